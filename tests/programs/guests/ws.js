let seen = 0;
const { WebSocketServer } = require('ws');
new WebSocketServer({ port: 8000 }).on('connection', (socket) => socket.on('message', (message) => socket.send(`${message} ${++seen}`)));
