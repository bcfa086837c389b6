"""Unix sockets of clones: each clone has its own, made anew, with what waited in them, and Kip alone wakes it."""

from __future__ import annotations

import pytest

from harness.kip import Kip, Proc
from test_clone import clone, lines
from test_runtime import ask

SERVES = (
    "os.makedirs('/run/x', exist_ok=True); l = socket.socket(socket.AF_UNIX); l.bind('/run/x/s'); l.listen(7); "
    "os.chmod('/run/x/s', 0o640); os.chown('/run/x/s', 0, 7)"
)
CONNECTED = "c = socket.socket(socket.AF_UNIX); c.connect('/run/x/s'); k = l.accept()[0]; c.send(b'asked'); k.send(b'told')"
HIDDEN = "h = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); h.bind(b'\\0hidden'); h.listen(); v = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); v.connect(b'\\0hidden'); w = h.accept()[0]"
MESSAGES = "d = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); d.bind('/run/x/log'); u = socket.socket(socket.AF_UNIX)"
PAIRS = (
    "a, b = socket.socketpair(); a.send(b'one'); a.send(b'two'); m, n = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); m.send(b'first'); m.send(b'second'); "
    "e = select.epoll(); e.register(b, select.EPOLLIN); e.register(l, select.EPOLLIN); import struct"
)
ENDED = "x, y = socket.socketpair(); y.close(); q, r = socket.socketpair(); q.send(b'last'); q.shutdown(socket.SHUT_WR)"
OWNED = "import fcntl, signal; came = []; signal.signal(signal.SIGIO, lambda *_: came.append(1)); fcntl.fcntl(m, fcntl.F_SETOWN, os.getpid()); fcntl.fcntl(m, fcntl.F_SETFL, fcntl.fcntl(m, fcntl.F_GETFL) | os.O_ASYNC)"
DELETED = (
    "t = os.open('/run/x/gone', os.O_RDWR | os.O_CREAT, 0o604); os.write(t, b'0123456789'); os.truncate(t, 20000); os.pwrite(t, b'end', 19997); "
    "s = os.open('/run/x/gone', os.O_RDONLY); os.lseek(s, 3, 0); os.fchown(t, 5, 6); os.unlink('/run/x/gone')"
)
OPTIONS = (
    "b.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 50000); b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('ll', 3, 500000)); "
    "a.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1); b.setblocking(False)"
)
# What each is, and what comes of it.
LOOK = [
    ("l.getsockname(), os.stat('/run/x/s').st_mode & 0o7777, os.stat('/run/x/s').st_gid", "('/run/x/s', 416, 7)"),
    ("k.getsockname(), c.getpeername(), c.getsockname()", "('/run/x/s', '/run/x/s', '')"),
    ("h.getsockname(), w.getsockname(), d.getsockname(), u.getsockname()", "(b'\\x00hidden', b'\\x00hidden', '/run/x/log', '')"),
    ("[fd in (b.fileno(), l.fileno()) for fd, _ in e.poll(0)]", "[True]"),
    ("b.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), struct.unpack('ll', b.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))", "(100000, (3, 500000))"),
    ("a.getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED), c.getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED), b.getblocking()", "(1, 0, False)"),
    ("[(f.st_size, oct(f.st_mode), f.st_uid, f.st_gid, f.st_nlink) for f in map(os.fstat, (t, s))]", "[(20000, '0o100604', 5, 6, 0), (20000, '0o100604', 5, 6, 0)]"),
    ("struct.unpack('iii', c.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1:]", "(0, 0)"),
]
TAKE = [
    ("b.recv(100), n.recv(100), n.recv(100)", "(b'onetwo', b'first', b'second')"),
    ("os.read(s, 4), os.write(t, b'ab'), os.read(s, 6), os.pread(s, 3, 19997), os.readlink(f'/proc/self/fd/{s}')", "(b'3456', 2, b'789ab\\x00', b'end', '/run/x/gone (deleted)')"),
    ("came, n.send(b'signal'), [time.sleep(0.01) for _ in range(300) if not came], came", "([1], 6, [], [1])"),
    ("x.recv(1), r.recv(100), r.recv(1)", "(b'', b'last', b'')"),
    ("k.recv(100), c.recv(100)", "(b'asked', b'told')"),
    ("b.send(b'back'), a.recv(9), v.send(b'in'), w.recv(9), r.send(b'still'), q.recv(9)", "(4, b'back', 2, b'in', 5, b'still')"),
    ("z.connect('/run/x/s'), l.accept()[0].getsockname()", "(None, '/run/x/s')"),
    ("z.close(), u.connect('/run/x/s'), l.accept()[0].send(b'o'), u.recv(9)", "(None, None, 1, b'o')"),
    ("o.sendto(b'line', '/run/x/log'), d.recv(9)", "(4, b'line')"),
]


def make(proc: Proc) -> None:
    for line in ("import select", SERVES, CONNECTED, HIDDEN, MESSAGES, PAIRS, ENDED, OWNED, DELETED, OPTIONS):
        assert ask(proc, line) == "None", line


def look(proc: Proc) -> None:
    for line, said in LOOK:
        assert ask(proc, line) == said, (proc.name, line)


def take(proc: Proc) -> None:
    ask(proc, "import time; z = socket.socket(socket.AF_UNIX); o = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)")
    for line, said in TAKE:
        assert ask(proc, line) == said, (proc.name, line)


# promise clones: deleted files that are open are a clone's own, with what was in them
# promise clones: unix sockets of a clone are its own: pairs, listening ones and connections to
#   them, at the same paths and abstract names, with their options and with what waited in them;
#   neither clone nor source takes part in those of the other, and no clone needs CRIU for them
@pytest.mark.parametrize("tier", ["running", "hibernated", "parked"])
def test_each_clone_has_its_own(kip: Kip, tier: str) -> None:
    proc = lines(kip)
    make(proc)
    look(proc)
    {"running": lambda: None, "hibernated": proc.hibernate, "parked": proc.sleep}[tier]()
    (first,) = clone(proc, "first")
    look(first)
    assert first.rebuilt()
    first.sleep()
    (second,) = clone(first, "second")
    for one in (second, first, proc):
        look(one)
        assert one is proc or one.rebuilt()
    for one in (first, proc, second):
        take(one)


# promise clones: unix sockets are CRIU's to make with all else that Kip does not make anew, such as
#   a FIFO or one bound to a relative path, and the clone is the same
@pytest.mark.parametrize("odd", ["os.mkfifo('/tmp/f'); p = os.open('/tmp/f', os.O_RDWR)", "os.chdir('/tmp'); p = socket.socket(socket.AF_UNIX); p.bind('relative')"])
def test_what_is_left_to_criu(kip: Kip, odd: str) -> None:
    proc = lines(kip)
    make(proc)
    assert ask(proc, odd) == "None"
    (first,) = clone(proc, "first")
    assert not first.rebuilt()
    take(first)
    take(proc)
