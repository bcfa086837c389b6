"""What the system tests stand on: the daemon under test, clients, server set-ups, and the watch over what is left."""
