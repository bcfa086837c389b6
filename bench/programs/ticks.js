// Answers "hello", and has something to do once a second.
let ticks = 0;
setInterval(() => { ticks++; }, 1000);
require("http").createServer((_, response) => response.end("hello")).listen(Number(process.argv[2]), "0.0.0.0");
