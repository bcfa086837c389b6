const { Aedes } = require('aedes');
Aedes.createBroker().then((broker) => require('net').createServer(broker.handle).listen(8000));
