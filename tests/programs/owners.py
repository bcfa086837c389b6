"""Waits for the signals of its open files alone, fcntl(2) F_SETOWN_EX and F_SETSIG.

A word for a UDP port comes back from there, and `FILE OWNER WORD` over the connection once WORD has been written into that
file, each when its signal has come to its owner and with the number of the file. What is wrong with an owner comes back in
its place. A first `leave` stays unread in its UDP port until the next signal."""

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import threading

F_SETSIG, F_GETSIG, F_SETOWN_EX, F_GETOWN_EX = 10, 11, 15, 16
THREAD, PROCESS, GROUP = 0, 1, 2
CONTROL, LISTENER = signal.SIGRTMIN + 8, signal.SIGRTMIN + 9
OWNERS = {"nameless": (PROCESS, 0), "process": (PROCESS, signal.SIGRTMIN + 1), "thread": (THREAD, signal.SIGRTMIN + 2), "group": (GROUP, signal.SIGRTMIN + 3)}
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO, *(signal.SIGRTMIN + n for n in range(1, 10))])
libc = ctypes.CDLL(None, use_errno=True)
os.mkdir("/tmp/watched")
files, lock = {}, threading.Lock()

def told(fd, kind, number):
    who = {THREAD: other.native_id, PROCESS: os.getpid(), GROUP: os.getpgid(0)}[kind]
    fcntl.fcntl(fd, F_SETOWN_EX, struct.pack("ii", kind, who))
    fcntl.fcntl(fd, F_SETSIG, number)
    os.set_blocking(fd, False)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)

def wrong(fd, kind, number):
    who = {THREAD: other.native_id, PROCESS: os.getpid(), GROUP: os.getpgid(0)}[kind]
    owner = struct.unpack("ii", fcntl.fcntl(fd, F_GETOWN_EX, bytes(8)))
    if owner != (kind, who):
        return f"owner {owner}"
    if fcntl.fcntl(fd, F_GETSIG) != number:
        return f"signal {fcntl.fcntl(fd, F_GETSIG)}"
    return "" if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ASYNC else "no O_ASYNC"

def pair(kind):
    return lambda owner: [s.detach() for s in socket.socketpair(socket.AF_UNIX, kind)]

def named(kind):
    def make(owner):
        here, there = socket.socket(socket.AF_UNIX, kind), socket.socket(socket.AF_UNIX, kind)
        here.bind(f"/tmp/{int(kind)}.{owner}")
        there.connect(f"/tmp/{int(kind)}.{owner}")
        return here.detach(), there.detach()
    return make

def fifo(owner):
    os.mkfifo(f"/tmp/fifo.{owner}")
    return [os.open(f"/tmp/fifo.{owner}", way | os.O_NONBLOCK) for way in (os.O_RDONLY, os.O_WRONLY)]

def gone_fifo(owner):
    os.mkfifo("/tmp/fifo")
    fd = os.open("/tmp/fifo", os.O_RDWR | os.O_NONBLOCK)
    os.unlink("/tmp/fifo")
    return fd, fd

def loopback(owner):
    here, there = socket.socket(type=socket.SOCK_DGRAM), socket.socket(type=socket.SOCK_DGRAM)
    here.bind(("127.0.0.1", 0))
    there.connect(here.getsockname())
    here.connect(there.getsockname())
    return here.detach(), there.detach()

def watch(owner):
    fd = libc.inotify_init1(os.O_NONBLOCK)
    os.mkdir(f"/tmp/watched/{owner}")
    assert libc.inotify_add_watch(fd, f"/tmp/watched/{owner}".encode(), 0x100) > 0
    return fd, None

KINDS = {
    "stream": pair(socket.SOCK_STREAM), "datagram": pair(socket.SOCK_DGRAM), "seqpacket": pair(socket.SOCK_SEQPACKET),
    "named-datagram": named(socket.SOCK_DGRAM), "loopback-udp": loopback, "pipe": lambda owner: os.pipe(), "fifo": fifo,
    "gone-fifo": gone_fifo, "inotify": watch,
}

class Udp:
    def __init__(self, port, owner):
        self.socket, self.owner, self.left = socket.socket(type=socket.SOCK_DGRAM), owner, False
        self.socket.bind(("", port))
        self.fd = self.socket.fileno()
    def read(self, say):
        if not self.left and self.socket.recv(100, socket.MSG_PEEK) == b"leave":
            self.left = True
            return
        while True:
            try:
                word, peer = self.socket.recvfrom(100)
            except BlockingIOError:
                return
            self.left = False
            self.socket.sendto((say or f"{self.owner} {word.decode()}").encode(), peer)

class File:
    def __init__(self, kind, owner):
        self.kind, self.owner = kind, owner
        self.fd, self.there = KINDS[kind](owner)
    def write(self, word):
        if self.there is None:
            open(f"/tmp/watched/{self.owner}/{word}", "w").close()
        else:
            os.write(self.there, word.encode())
    def read(self, say):
        word = os.read(self.fd, 1000).decode()
        if self.there is None:
            word = word[16:].rstrip(chr(0))
            os.unlink(f"/tmp/watched/{self.owner}/{word}")
        control.sendall((say or f"{self.kind} {self.owner} {word}").encode() + b"\n")

def hear(signals):
    while True:
        info = (ctypes.c_char * 128)()
        mask = (ctypes.c_uint64 * 16)(sum(1 << (int(n) - 1) for n in signals))
        number = libc.sigwaitinfo(mask, info)
        if number < 0:
            continue
        fd = struct.unpack_from("i", bytes(info), 24)[0]
        with lock:
            heard(number, fd)

def accept():
    global control
    try:
        control = listener.accept()[0]
    except BlockingIOError:
        return
    told(control.fileno(), PROCESS, CONTROL)
    # Nothing is asked before this is said.
    control.sendall(b"ready\n")

def heard(number, fd):
    if number == LISTENER:
        accept()
    elif number == CONTROL:
        try:
            kind, owner, word = control.recv(100).decode().split()
        except (BlockingIOError, ValueError):
            return
        next(f for f in files.values() if isinstance(f, File) and (f.kind, f.owner) == (kind, owner)).write(word)
    else:
        # SIGIO does not say which file it is about.
        those = [f for f in files.values() if OWNERS[f.owner][1] == 0] if number == signal.SIGIO else [files[fd]]
        for file in those:
            # Each read of a FIFO that is open both ways makes room to write: another signal.
            if not select.select([file.fd], [], [], 0)[0]:
                continue
            say = wrong(file.fd, *OWNERS[file.owner])
            if OWNERS[file.owner][1] not in (0, number):
                say += f" told by {number}"
            file.read(say and f"{file.owner}: {say}")

other = threading.Thread(target=hear, args=[[OWNERS["thread"][1]]])
lock.acquire()
other.start()
for place, owner in enumerate(OWNERS):
    for file in (Udp(7001 + place, owner), *(File(kind, owner) for kind in KINDS)):
        files[file.fd] = file
        told(file.fd, *OWNERS[owner])
listener = socket.create_server(("", 7000))
told(listener.fileno(), PROCESS, LISTENER)
# For a client that came before it had an owner the kernel sends no signal.
accept()
lock.release()
hear([signal.SIGIO, OWNERS["process"][1], OWNERS["group"][1], CONTROL, LISTENER])
