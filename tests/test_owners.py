"""A program that does nothing but wait for the signals of its open files, fcntl(2) F_SETOWN_EX and F_SETSIG, over sleeps by both engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.clients import Lines
from harness.kip import Kip

# Answers a line only when a signal says that something has come, and with that signal. Each
# connection has another owner.
TOLD = """
import fcntl, os, signal, socket, struct, sys, threading
F_SETSIG, F_SETOWN_EX = 10, 15
THREAD, PROCESS, GROUP = 0, 1, 2
OWNERS = [(PROCESS, 0), (PROCESS, 1), (THREAD, 2), (GROUP, 3)]
ALL = [signal.SIGIO, *(signal.SIGRTMIN + n for n in (1, 2, 3))]
signal.pthread_sigmask(signal.SIG_BLOCK, ALL)

def told(file, kind, number):
    who = {THREAD: threading.get_native_id(), PROCESS: os.getpid(), GROUP: os.getpgid(0)}[kind]
    fcntl.fcntl(file, F_SETOWN_EX, struct.pack("ii", kind, who))
    fcntl.fcntl(file, F_SETSIG, signal.SIGRTMIN + number if number else 0)
    file.setblocking(False)
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_ASYNC)

def answer(client, own):
    try:
        client.sendall(f"{own} {client.recv(100).decode()}".encode())
    except BlockingIOError:
        pass

listener = socket.create_server(("", 7000))
told(listener, PROCESS, 0)
clients, number = [], signal.SIGIO
while True:
    try:
        while True:
            client, (kind, own) = listener.accept()[0], OWNERS[len(clients)]
            told(client, kind, own)
            clients.append((client, own))
            # For bytes that came before the socket had an owner the kernel sends no signal.
            answer(client, own)
    except BlockingIOError:
        pass
    for client, own in clients:
        if number == (signal.SIGRTMIN + own if own else signal.SIGIO):
            answer(client, own)
    number = signal.sigwaitinfo(ALL).si_signo
"""


# promise waking: owners of sockets and their signals (F_SETOWN_EX, F_SETSIG) stay: processes,
#   threads, groups; for bytes that came while the proc was parked the owner gets its signal at the
#   wake; natively and by CRIU
# held by: this, `kip_sys::owner::tests::an_owner_is_set_and_read_and_told`,
#   `kip_sys::owner::tests::a_signal_that_a_user_may_not_send_is_refused_and_the_process_keeps_its_user`
@pytest.mark.parametrize("engine", ["plan", "CRIU"])
def test_the_signals_of_open_files_go_on(fresh_kip: Callable[..., Kip], engine: str) -> None:
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    proc = kip.run("told", ["/usr/bin/python3", "-c", TOLD], ports=["7000"], flags=["--idle", "1h"])
    clients = [Lines(proc.port(), timeout=20) for _ in range(4)]

    def ask(word: str) -> None:
        for number, client in enumerate(clients):
            assert client.ask(word) == f"{number} {word}"

    ask("awake")
    for sleep in range(2):
        for number, client in enumerate(clients):
            # That which wakes it is told of what came while none of its threads was there.
            proc.sleep()
            assert client.ask("asleep") == f"{number} asleep"
        ask(f"after sleep {sleep}")
        proc.sleep()
        proc.wake()
        ask("what comes later")
    assert proc.rebuilt() == (engine == "plan")


# A line is `check`: a FIFO without a name, a pipe and an inotify instance have their owners, and
# what comes into them is told.
OTHERS = """
import ctypes, fcntl, os, signal, socket, struct, traceback
F_SETSIG, F_GETSIG, F_SETOWN_EX, F_GETOWN_EX = 10, 11, 15, 16
SIGNALS = [signal.SIGRTMIN + n for n in (1, 2, 3)]
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
libc = ctypes.CDLL(None)
os.mkfifo("/tmp/fifo")
fifo = os.open("/tmp/fifo", os.O_RDWR | os.O_NONBLOCK)
read, write = os.pipe2(os.O_NONBLOCK)
inotify = libc.inotify_init1(os.O_NONBLOCK)
os.mkdir("/tmp/watched")
assert libc.inotify_add_watch(inotify, b"/tmp/watched", 0x100) > 0
owner = struct.pack("ii", 1, os.getpid())
for fd, number in zip((fifo, read, inotify), SIGNALS):
    fcntl.fcntl(fd, F_SETOWN_EX, owner)
    fcntl.fcntl(fd, F_SETSIG, number)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
comes = [lambda: os.write(fifo, b"x"), lambda: os.write(write, b"x"), lambda: open("/tmp/watched/file", "w").close()]

def check():
    for fd, number, come in zip((fifo, read, inotify), SIGNALS, comes):
        assert fcntl.fcntl(fd, F_GETOWN_EX, bytes(8)) == owner, fd
        assert fcntl.fcntl(fd, F_GETSIG) == number, fd
        come()
        told = signal.sigtimedwait([number], 10)
        assert told and told.si_signo == number, fd
        os.read(fd, 1000)
    os.unlink("/tmp/watched/file")

client = socket.create_server(("", 7000)).accept()[0]
while client.recv(100):
    try:
        check()
        client.sendall(b"ok\\n")
    except BaseException:
        client.sendall(repr(traceback.format_exc()).encode() + b"\\n")
"""


# promise waking: owners of FIFOs, pipes and inotify instances and their signals stay too, natively
#   and by CRIU
@pytest.mark.parametrize("engine", ["plan", "CRIU"])
def test_the_signals_of_other_files_go_on(fresh_kip: Callable[..., Kip], engine: str) -> None:
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    proc = kip.run("others", ["/usr/bin/python3", "-c", OTHERS], ports=["7000"], flags=["--idle", "1h"])
    client = Lines(proc.port(), timeout=30)
    assert client.ask("check") == "ok"
    for put_away in (proc.hibernate, proc.sleep, proc.sleep):
        put_away()
        assert client.ask("check") == "ok"
    assert proc.rebuilt() == (engine == "plan")
