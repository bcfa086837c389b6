// WebSockets that know their number and what they were told before, and a directory that is watched: `watched.js PORT DIRECTORY`.
// Answers each message with its number, the message before, and the names that were changed in the directory so far.
const fs = require("fs"), http = require("http");
const { WebSocketServer } = require("ws");

const [port, directory] = process.argv.slice(2);
const seen = new Set();
let count = 0;
fs.watch(directory, (_, name) => seen.add(name));
const server = http.createServer((_, response) => response.end(`${count}\n`));
new WebSocketServer({ server }).on("connection", (socket) => {
  const number = count++;
  let before = "nothing";
  socket.on("message", (text) => {
    socket.send(`${number} ${before} ${[...seen].sort().join(",")}`);
    before = String(text);
  });
});
server.listen(Number(port), "0.0.0.0");
