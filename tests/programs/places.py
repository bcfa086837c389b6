"""Holds one of everything that has, or had, a place in the file system, and says on TCP whether all of it is as it was left.

`round` uses each, leaves something in each for the next round, and answers `ok` and what SO_PEERCRED says of an old connection; a
failure is answered with what it was. Beside that /tmp/absolute says `hello` to each client."""

import contextlib
import os
import socket
import stat
import sys
import threading

UNIX, STREAM, DGRAM = socket.AF_UNIX, socket.SOCK_STREAM, socket.SOCK_DGRAM


def listen(path, backlog=5):
    s = socket.socket(UNIX, STREAM)
    s.bind(path)
    s.listen(backlog)
    return s


def connect(path, kind=STREAM):
    s = socket.socket(UNIX, kind)
    s.settimeout(10)
    s.connect(path)
    return s


def greet(listener):
    while True:
        connection, _ = listener.accept()
        connection.sendall(b"hello\n")
        connection.close()


def equal(what, is_now, was):
    if is_now != was:
        raise AssertionError(f"{what}: {is_now!r}, not {was!r}")


class Places:
    def __init__(self):
        os.makedirs("/srv/queue/private")
        os.chdir("/srv/queue")
        threading.Thread(target=greet, args=(listen("/tmp/absolute"),), daemon=True).start()
        self.relative = listen("private/relative")
        self.held = connect("private/relative")
        self.served, _ = self.relative.accept()
        self.waiting = connect("private/relative")
        self.gone = listen("/tmp/gone")
        self.of_gone = connect("/tmp/gone")
        self.at_gone, _ = self.gone.accept()
        os.unlink("/tmp/gone")
        self.datagrams = socket.socket(UNIX, DGRAM)
        self.datagrams.bind("/tmp/datagrams")
        self.datagrams.settimeout(10)
        self.sender = connect("/tmp/datagrams", DGRAM)
        os.mkfifo("/tmp/fifo")
        self.fifo_out = os.open("/tmp/fifo", os.O_RDONLY | os.O_NONBLOCK)
        self.fifo_in = os.open("/tmp/fifo", os.O_WRONLY)
        self.deleted = os.open("/tmp/deleted", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.nameless = os.open("/tmp", os.O_RDWR | os.O_TMPFILE)
        self.shared = os.dup(self.nameless)
        os.unlink("/tmp/deleted")
        self.number = 0
        self.leave()

    def text(self):
        return f"left in round {self.number}".encode()

    def leave(self):
        self.held.sendall(self.text())
        self.sender.send(self.text())
        os.write(self.fifo_in, self.text())
        os.write(self.deleted, self.text())
        os.write(self.nameless, self.text())
        self.at = os.lseek(self.nameless, 0, os.SEEK_CUR)

    def round(self):
        text = self.text()
        equal("a connection that was held", self.served.recv(100), text)
        self.served.sendall(b"back")
        equal("its other end", self.held.recv(100), b"back")
        equal("a datagram", self.datagrams.recv(100), text)
        equal("the fifo", os.read(self.fifo_out, 100), text)
        equal("the deleted file", os.pread(self.deleted, 1000, 0)[-len(text):], text)
        equal("the nameless file", os.pread(self.nameless, 100, self.at - len(text)), text)
        equal("its place", os.lseek(self.shared, 0, os.SEEK_CUR), self.at)
        equal("names", (os.fstat(self.deleted).st_nlink, os.fstat(self.nameless).st_nlink), (0, 0))
        # The client that waited is served, and another one waits.
        self.relative.settimeout(10)
        connection, _ = self.relative.accept()
        connection.sendall(b"at last")
        equal("who waited", self.waiting.recv(100), b"at last")
        connection.close()
        self.waiting.close()
        self.waiting = connect("private/relative")
        # New ones, by the path.
        for path in ("/tmp/absolute", "../../tmp/absolute"):
            with contextlib.closing(connect(path)) as s:
                equal(path, s.recv(100), b"hello\n")
        with contextlib.closing(connect("/tmp/datagrams", DGRAM)) as s:
            s.send(b"another")
        equal("another datagram", self.datagrams.recv(100), b"another")
        again = os.open("/tmp/fifo", os.O_WRONLY | os.O_NONBLOCK)
        os.write(again, b"by path")
        os.close(again)
        equal("the fifo by its path", os.read(self.fifo_out, 100), b"by path")
        self.of_gone.sendall(b"gone")
        equal("a connection to a socket whose file is gone", self.at_gone.recv(100), b"gone")
        equal("its file", os.path.exists("/tmp/gone"), False)
        for path in ("/tmp/absolute", "private/relative", "/tmp/datagrams"):
            equal(path, stat.S_ISSOCK(os.stat(path).st_mode), True)
        credentials = self.held.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, gid = (int.from_bytes(credentials[i : i + 4], sys.byteorder) for i in (0, 4, 8))
        self.number += 1
        self.leave()
        return f"ok pid={pid} uid={uid} gid={gid}"


def main():
    places = Places()
    server = socket.create_server(("", int(sys.argv[1])))
    while True:
        client, _ = server.accept()
        with client, client.makefile("rb") as lines:
            for _ in lines:
                try:
                    answer = places.round()
                except (AssertionError, OSError) as error:
                    answer = f"{type(error).__name__}: {error}"
                client.sendall(answer.encode() + b"\n")


main()
