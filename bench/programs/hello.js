// The server in Node that bench/hibernate measures: node hello.js PORT
require("http").createServer((request, response) => response.end("hello")).listen(Number(process.argv[2]));
