// Notes: POST /notes adds one, GET /notes gives them all.
const http = require("http");

const notes = [];

function answer(response) {
    response.writeHead(200, { "Content-Type": "application/json" });
    response.end(JSON.stringify(notes));
}

http.createServer((request, response) => {
    if (request.url !== "/notes") {
        response.writeHead(404).end("not here\n");
    } else if (request.method === "POST") {
        let text = "";
        request.on("data", (part) => { text += part; });
        request.on("end", () => { notes.push(text); answer(response); });
    } else {
        answer(response);
    }
}).listen(8000);
