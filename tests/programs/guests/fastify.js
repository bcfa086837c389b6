let seen = 0;
const app = require('fastify')({ keepAliveTimeout: 3600e3 });
app.get('/', () => String(++seen));
app.listen({ port: 8000, host: '0.0.0.0' });
