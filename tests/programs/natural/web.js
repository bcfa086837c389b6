// A web server with all its default time-outs; beside pages it sends pings over SSE and WebSocket, answers /after/N after
// N seconds, and has a long timer beside a short interval. Arguments: port, seconds between pings, seconds of the long timer.
const http = require("http");
const { WebSocketServer } = require("ws");

const [port, every, long] = process.argv.slice(2).map(Number);
const now = () => (Date.now() / 1000).toFixed(3);
const server = http.createServer((request, response) => {
  if (request.url === "/events") {
    response.writeHead(200, { "Content-Type": "text/event-stream" });
    const pings = setInterval(() => response.write(`data: ping ${now()}\n\n`), every * 1000);
    request.on("close", () => clearInterval(pings));
  } else if (request.url.startsWith("/after/")) {
    setTimeout(() => response.end("natural\n"), Number(request.url.slice(7)) * 1000);
  } else {
    response.end("natural\n");
  }
});
new WebSocketServer({ server }).on("connection", (socket) => {
  const pings = setInterval(() => socket.ping(now()), every * 1000);
  socket.on("close", () => clearInterval(pings));
});
server.listen(port);
setInterval(() => {}, 1000);
if (long) {
  console.log(`began ${now()}`);
  setTimeout(() => console.log(`ran ${now()}`), long * 1000);
}
