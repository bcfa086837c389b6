"""Does what it is told: a line is an expression of Python, answered with its value, or a statement, answered with None. Names
stay. One thread, so that it sleeps wherever it waits."""

import os  # noqa: F401, for what it is told
import selectors
import socket
import sys

names = dict(globals())
ready = selectors.DefaultSelector()


def accept(server):
    client, _ = server.accept()
    ready.register(client, selectors.EVENT_READ, (talk, client.makefile("rb")))


def talk(client, reader):
    try:
        line = reader.readline()
    except ConnectionResetError:
        line = b""
    if not line:
        ready.unregister(client)
        client.close()
        return
    try:
        try:
            code = compile(line, "line", "eval")
        except SyntaxError:
            code = compile(line, "line", "exec")
        answer = repr(eval(code, names))
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    client.sendall(answer.encode() + b"\n")


listener = socket.create_server(("0.0.0.0", int(sys.argv[1])))
ready.register(listener, selectors.EVENT_READ, (accept,))
while True:
    for key, _ in ready.select():
        key.data[0](key.fileobj, *key.data[1:])
