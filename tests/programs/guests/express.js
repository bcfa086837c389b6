let seen = 0;
const app = require('express')();
app.get('/', (_, response) => response.send(String(++seen)));
app.listen(8000).keepAliveTimeout = 3600e3;
