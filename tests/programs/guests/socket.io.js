const { Server } = require('socket.io');
new Server(8000, { pingInterval: 3600e3, pingTimeout: 3600e3 }).on('connection', (socket) => {
  let seen = 0;
  socket.on('say', (words) => socket.emit('said', words, ++seen));
});
