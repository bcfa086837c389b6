"""TCP connections in any state, led by a client: `states.py CONTROL_PORT PORT`.

Listens on PORT for IPv4 and IPv6, and obeys lines on CONTROL_PORT; each is answered by a line.
    open NAME HOST PORT   connects; it says its NAME to the other side, where the connection has that name too
    knows NAME            waits until a connection of that name has come
    send NAME COUNT       sends so many bytes, and waits until the kernel has them
    fill NAME             sends until there is no room; answers how many
    shut NAME             shutdown(2) of its own side
    reset NAME            closes with a reset
    take NAME COUNT       reads so many bytes and compares them: `ok`, or what is wrong
    rest NAME             reads to the end of the stream: how many bytes, and how it ended (`end`, or the error)
    state NAME            of tcp(7), TCP_INFO
Either side sends bytes that tell their place in the stream."""

from __future__ import annotations

import errno
import socket
import struct
import sys
import threading
import time

PIECE = bytes(i * 7 % 251 for i in range(251)) * 1000
# Of tcp_states.h.
STATES = "none established syn-sent syn-recv fin-wait-1 fin-wait-2 time-wait close close-wait last-ack listen closing".split()


class Connection:
    def __init__(self, sock: socket.socket):
        self.socket, self.sent, self.read = sock, 0, 0
        sock.settimeout(30)

    def piece(self, at: int, count: int) -> bytes:
        begin = at % 251
        return PIECE[begin : begin + min(count, len(PIECE) - begin)]

    def send(self, count: int) -> int:
        until = self.sent + count
        while self.sent < until:
            self.sent += self.socket.send(self.piece(self.sent, until - self.sent))
        return count

    def fill(self) -> int:
        """Until there has been no room for a while: what the other side takes goes on being sent."""
        before, last = self.sent, time.monotonic()
        self.socket.setblocking(False)
        while time.monotonic() - last < 0.2:
            try:
                self.sent += self.socket.send(self.piece(self.sent, 1 << 16))
                last = time.monotonic()
            except BlockingIOError:
                time.sleep(0.02)
        self.socket.settimeout(30)
        return self.sent - before

    def take(self, count: int) -> str:
        until = self.read + count
        while self.read < until:
            found = self.socket.recv(min(until - self.read, 1 << 16))
            if not found:
                return f"ended after {self.read} of {until} bytes"
            at = 0
            while at < len(found):
                wanted = self.piece(self.read, len(found) - at)
                if found[at : at + len(wanted)] != wanted:
                    return f"wrong bytes after {self.read}"
                at += len(wanted)
                self.read += len(wanted)
        return "ok"

    def rest(self) -> str:
        count = 0
        while True:
            try:
                found = self.socket.recv(1 << 16)
            except OSError as error:
                return f"{count} {errno.errorcode.get(error.errno or 0, error)}"
            if not found:
                return f"{count} end"
            count += len(found)
            self.read += len(found)

    def state(self) -> str:
        return STATES[self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]]

    def reset(self) -> str:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
        return "ok"


known: dict[str, Connection] = {}


def serve(listener: socket.socket) -> None:
    while True:
        sock = listener.accept()[0]
        name = b""
        while not name.endswith(b"\n"):
            name += sock.recv(1)
        known[name.decode().strip()] = Connection(sock)


def obey(word: str, name: str, *rest: str) -> object:
    if word == "open":
        sock = socket.create_connection((rest[0], int(rest[1])), 30)
        sock.sendall(name.encode() + b"\n")
        known[name] = Connection(sock)
        return "ok"
    if word == "knows":
        until = time.monotonic() + 30
        while name not in known:
            if time.monotonic() > until:
                return "never came"
            time.sleep(0.01)
        return "ok"
    if word == "shut":
        return known[name].socket.shutdown(socket.SHUT_WR) or "ok"
    return getattr(known[name], word)(*map(int, rest))


def main() -> None:
    control = socket.create_server(("", int(sys.argv[1])))
    listener = socket.create_server(("::", int(sys.argv[2])), family=socket.AF_INET6, dualstack_ipv6=True, backlog=200)
    threading.Thread(target=serve, args=[listener], daemon=True).start()
    while True:
        client = control.accept()[0].makefile("rw")
        for line in client:
            try:
                answer = obey(*line.split())
            except OSError as error:
                answer = f"error {error}"
            client.write(f"{answer}\n")
            client.flush()


main()
