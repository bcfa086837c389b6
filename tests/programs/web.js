// A node web server with state in memory: static files from a directory, and a key-value store under /kv/.
const http = require('http'), fs = require('fs'), path = require('path'), crypto = require('crypto');
const [port, root] = [Number(process.argv[2]), process.argv[3]];
const kv = new Map();
let requests = 0;
http.createServer({ keepAliveTimeout: 0 }, (request, response) => {
  const url = new URL(request.url, 'http://x').pathname;
  const chunks = [];
  request.on('data', chunk => chunks.push(chunk));
  request.on('end', () => {
    if (url.startsWith('/kv/')) {
      requests++;
      if (request.method === 'PUT') {
        kv.set(url, Buffer.concat(chunks));
        return response.end(crypto.createHash('sha256').update(kv.get(url)).digest('hex'));
      }
      if (!kv.has(url)) { response.statusCode = 404; return response.end(); }
      return response.end(kv.get(url));
    }
    if (url === '/count') return response.end(String(++requests));
    fs.readFile(path.join(root, path.normalize(url)), (error, data) => {
      if (error) { response.statusCode = 404; return response.end(); }
      response.end(data);
    });
  });
}).listen({ port, host: '::' });
