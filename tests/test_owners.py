"""A program that does nothing but wait for the signals of its open files, fcntl(2) F_SETOWN_EX and F_SETSIG, over sleeps by both engines."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import programs
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


OWNERS = ["nameless", "process", "thread", "group"]
KINDS = ["stream", "datagram", "seqpacket", "named-datagram", "loopback-udp", "pipe", "fifo", "gone-fifo", "inotify"]


# promise waking: owners of UDP sockets, unix sockets (stream pairs, datagram, by name), pipes,
#   FIFOs and inotify instances and their signals stay, hibernated, parked and archived, natively
#   and by CRIU: processes, threads, groups; for datagrams that came meanwhile the owner gets its
#   signal, with the number of the file, also beside one that it had left unread
@pytest.mark.parametrize("engine", ["plan", "CRIU"])
def test_the_signals_of_other_files_go_on(fresh_kip: Callable[..., Kip], store: Path, tmp_path: Path, engine: str) -> None:
    """Each kind of file, of each kind of owner, over each way to sleep."""
    kip = fresh_kip("--store", str(store), *(["--only-criu"] if engine == "CRIU" else []))
    ports = ["7000", *(f"{7001 + place}/udp" for place in range(len(OWNERS)))]
    tar = programs.tarball(tmp_path / "owners.tar", {"srv/owners.py": programs.SOURCES / "owners.py"})
    proc = kip.run("files", ["/usr/bin/python3", "/srv/owners.py"], ports=ports, tar=tar, flags=["--idle", "1h"])
    control = Lines(proc.port(), timeout=20)
    assert control.ask("") == "ready"
    clients = {}
    for place, owner in enumerate(OWNERS):
        clients[owner] = client = socket.socket(type=socket.SOCK_DGRAM)
        client.settimeout(20)
        client.connect(("127.0.0.1", proc.port(7001 + place, "udp")))

    def check(word: str) -> None:
        for file in [f"{kind} {owner}" for kind in KINDS for owner in OWNERS]:
            try:
                assert control.ask(f"{file} {word}") == f"{file} {word}"
            except TimeoutError:
                raise AssertionError(f"{word}: the owner got no signal of {file}") from None

    def comes(owner: str, word: str) -> None:
        clients[owner].send(word.encode())
        assert clients[owner].recv(100).decode() == f"{owner} {word}"

    check("awake")
    for tier, put_away in [("hibernated", proc.hibernate), ("parked", proc.sleep), ("archived", proc.archive)]:
        for owner in OWNERS:
            put_away()
            comes(owner, tier)
        if tier != "hibernated":
            assert proc.rebuilt() == (engine == "plan")
        check(f"after-{tier}")
        for owner in OWNERS:
            clients[owner].send(b"leave")
        check("beside")
        put_away()
        for owner in OWNERS:
            clients[owner].send(tier.encode())
            assert [clients[owner].recv(100).decode() for _ in range(2)] == [f"{owner} leave", f"{owner} {tier}"]
        put_away()
        proc.wake()
        check("later")
    for client in clients.values():
        client.close()
