let seen = 0;
const Koa = require('koa');
const app = new Koa();
app.use((context) => { context.body = String(++seen); });
app.listen(8000).keepAliveTimeout = 3600e3;
