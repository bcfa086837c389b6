"""TCP connections in any state, led by a client: `states.py CONTROL_PORT PORT SLOW_PORT BACKLOG`.

Listens on PORT for IPv4 and IPv6, and on SLOW_PORT with that backlog, where it accepts as many connections as a line asks for. Obeys lines
on CONTROL_PORT; each is answered by a line.
    open NAME HOST PORT   connects; it says its NAME to the other side, where the connection has that name too
    dial NAME HOST PORT   begins to connect, and does not wait
    dialled NAME          waits until that is done, and says its NAME: `ok`, or the error
    knows NAME            waits until a connection of that name has come
    accept COUNT          on SLOW_PORT: the names of these, in their order
    refuse now            closes the listener on SLOW_PORT
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
import select
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


def accept(listener: socket.socket) -> str:
    sock = listener.accept()[0]
    text = b""
    while not text.endswith(b"\n"):
        text += sock.recv(1)
    name = text.decode().strip()
    known[name] = Connection(sock)
    return name


def serve(listener: socket.socket) -> None:
    while True:
        accept(listener)


def dialled(connection: Connection, name: str) -> str:
    select.select([], [connection.socket], [], 30)
    if error := connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return errno.errorcode[error]
    connection.socket.settimeout(30)
    connection.socket.sendall(name.encode() + b"\n")
    return "ok"


def obey(word: str, name: str, *rest: str) -> object:
    if word == "open":
        sock = socket.create_connection((rest[0], int(rest[1])), 30)
        sock.sendall(name.encode() + b"\n")
        known[name] = Connection(sock)
        return "ok"
    if word == "dial":
        sock = socket.socket(socket.AF_INET6 if ":" in rest[0] else socket.AF_INET)
        known[name] = Connection(sock)
        sock.setblocking(False)
        began = sock.connect_ex((rest[0], int(rest[1])))
        return "ok" if began in (0, errno.EINPROGRESS) else errno.errorcode[began]
    if word == "dialled":
        return dialled(known[name], name)
    if word == "accept":
        return " ".join(accept(slow) for _ in range(int(name)))
    if word == "refuse":
        return slow.close() or "ok"
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


def listen(port: str, backlog: int) -> socket.socket:
    return socket.create_server(("::", int(port)), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)


def main() -> None:
    control = socket.create_server(("", int(sys.argv[1])))
    threading.Thread(target=serve, args=[listen(sys.argv[2], 200)], daemon=True).start()
    while True:
        client = control.accept()[0].makefile("rw")
        for line in client:
            try:
                answer = obey(*line.split())
            except OSError as error:
                answer = f"error {error}"
            client.write(f"{answer}\n")
            client.flush()


slow = listen(sys.argv[3], int(sys.argv[4]))
main()
