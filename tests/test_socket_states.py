"""Connections in every state of tcp(7) that a descriptor can be in, over a sleep: both roles, both families, by both engines.

Bytes that wait on either side arrive, each once and in order; so do the ends; and a connection is in the state that it was in."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import pytest

from harness.clients import Lines
from harness.kip import BY_ITSELF, BY_ITSELF_CLOCK, Kip, Proc
from harness.programs import SOURCES
from harness.wait import wait_for

# Connections that may wait to be accepted: one more than the number says, listen(2).
BACKLOG = 7
# Bytes that wait to be read: fewer than a new connection has room for, so that none comes later.
SOME = 20_000
# Each: what is done by the program that sleeps (P) and by its peer (Q), and the state in which that
# leaves the former.
STATES: dict[str, tuple[str, str]] = {
    "established": ("", "established"),
    "established-unread": ("Q send", "established"),
    "established-full": ("P fill", "established"),
    "established-both-full": ("P fill, Q fill", "established"),
    "fin-wait-1": ("P fill, P shut", "fin-wait-1"),
    "fin-wait-1-unread": ("P fill, P shut, Q send", "fin-wait-1"),
    "fin-wait-2": ("P shut", "fin-wait-2"),
    "fin-wait-2-unread": ("P shut, Q send", "fin-wait-2"),
    "closing": ("P fill, P shut, Q shut", "closing"),
    "closing-unread": ("P fill, P shut, Q send, Q shut", "closing"),
    "close-wait": ("Q shut", "close-wait"),
    "close-wait-unread": ("Q send, Q shut", "close-wait"),
    "close-wait-full": ("P fill, Q shut", "close-wait"),
    "last-ack": ("P fill, Q shut, P shut", "last-ack"),
    "last-ack-unread": ("Q send, P fill, Q shut, P shut", "last-ack"),
    "closed-here-first": ("P shut, Q shut", "close"),
    "closed-here-first-unread": ("Q send, P shut, Q shut", "close"),
    "closed-there-first": ("Q shut, P shut", "close"),
    "closed-there-first-unread": ("Q send, Q shut, P shut", "close"),
    "reset": ("Q reset", "close"),
    "reset-unread": ("Q send, Q reset", "close"),
}
# Connections of clients that write all the while, and a program that reads at a signal only.
WRITERS = 40
READS_LATER = f"""
import signal, socket
orders = {{signal.SIGUSR1, signal.SIGUSR2}}
signal.pthread_sigmask(signal.SIG_BLOCK, orders)
listener = socket.create_server(("0.0.0.0", 8080), backlog={WRITERS})
connections = [listener.accept()[0] for _ in range({WRITERS})]
read = [0] * {WRITERS}
while True:
    to_the_end = signal.sigwait(orders) == signal.SIGUSR2
    for number, connection in enumerate(connections):
        try:
            while some := connection.recv(1 << 16, 0 if to_the_end else socket.MSG_DONTWAIT):
                read[number] += len(some)
            if to_the_end:
                connection.sendall(b"%d" % read[number])
        except BlockingIOError:
            pass
"""
# What a client has done with a connection that the program has not accepted yet.
NOT_ACCEPTED = {"silent": [], "said": [f"send NAME {SOME}"], "ended": ["shut NAME"], "said-and-ended": [f"send NAME {SOME}", "shut NAME"]}


@dataclass
class Side:
    """A program, and what it has done with a connection."""

    line: Lines
    sent: int = 0
    shut: bool = False
    was_reset: bool = False

    def do(self, word: str, name: str, *rest: object) -> str:
        return self.line.ask(" ".join(map(str, (word, name, *rest))))

    def act(self, word: str, name: str) -> None:
        answer = self.do(word, name, *([SOME] if word == "send" else []))
        assert "error" not in answer, (name, word, answer)
        if word in ("send", "fill"):
            self.sent += int(answer)
        self.shut |= word == "shut"
        self.was_reset |= word == "reset"


class Connection:
    def __init__(self, name: str, sleeper: Lines, peer: Lines, connect: Callable[[str], None]):
        self.name, self.p, self.q = name, Side(sleeper), Side(peer)
        connect(name)
        does, self.state = STATES[name.split(":")[1]]
        for step in filter(None, does.split(", ")):
            side, word = step.split()
            (self.p if side == "P" else self.q).act(word, name)
        self.drained: str | None = None

    def drain(self) -> None:
        """The peer takes what the sleeper has sent."""
        self.drained = self.q.do("take", self.name, self.p.sent)

    def at_end(self) -> list[str]:
        """All that is under way arrives, both sides go on and end: what each of them saw."""
        p, q, name = self.p, self.q, self.name
        if q.was_reset:
            return [p.do("rest", name)]
        seen = [self.drained or q.do("take", name, p.sent), p.do("take", name, q.sent)]
        for one, other in ((p, q), (q, p)):
            if not one.shut:
                one.act("send", name)
                seen.append(other.do("take", name, SOME))
                one.act("shut", name)
        return [*seen, p.do("rest", name), q.do("rest", name)]


def program(kip: Kip, name: str, *flags: str, backlog: int = BACKLOG) -> tuple[Proc, Lines]:
    command = ["/usr/bin/python3", "/srv/states.py", "7000", "7001", "7002", str(backlog)]
    flags = ("-v", f"{SOURCES / 'states.py'}:/srv/states.py:ro", "--network", "states", *flags)
    proc = kip.run(name, command, ports=["7000", "7001", "7002"], flags=list(flags))
    return proc, Lines(proc.port(7000), timeout=60)


def addresses(proc: Proc) -> dict[str, str]:
    """By family: an instance has both of the same numbers, docs/design/machine.md."""
    v4 = ipaddress.IPv4Address(proc.address(7001))
    instance, slot = divmod(int(v4) & 0xFFFF, 2048)
    return {"v4": str(v4), "v6": f"fd6b:6970:0:{instance:x}::{slot:x}"}


def fall_asleep(proc: Proc) -> None:
    """Parks it. The peer of a full connection has more to send and finds room for it while the proc sleeps: on a busy machine already
    before the command returns."""
    proc.kip.cli("sleep", proc.name, "--to", "parked", *BY_ITSELF_CLOCK)
    view = proc.quiescent()
    wake = view["last_wake"]
    by_itself = wake and wake["from"] == "parked" and (wake["trigger"].endswith("(data)") or BY_ITSELF.search(wake["trigger"]))
    assert view["state"] == "parked" or by_itself, view


# promise waking: a TCP connection in every state that a descriptor can be in, in both roles and
#   families, with bytes on either side; it closes while its program is parked as it would awake; by
#   plan and by CRIU
@pytest.mark.parametrize("drained", [False, True], ids=["", "drained"])
@pytest.mark.parametrize("role", ["server", "client"])
@pytest.mark.parametrize("engine", ["plan", "CRIU"])
def test_every_state(fresh_kip: Callable[..., Kip], engine: str, role: str, drained: bool) -> None:
    """Drained: the peer takes what was sent while the proc is parked."""
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    proc, sleeper = program(kip, "sleeper", "--idle", "1h")
    other, peer = program(kip, "peer", "--never-sleep")
    opens, knows, of = (peer, sleeper, addresses(proc)) if role == "server" else (sleeper, peer, addresses(other))

    def connect(name: str) -> None:
        assert opens.ask(f"open {name} {of[name.split(':')[0]]} 7001") == "ok"
        assert knows.ask(f"knows {name}") == "ok"

    # What the peer has not got rid of yet comes while the proc sleeps, which gives it more room,
    # and wakes it.
    those = [state for state in STATES if not (drained and state == "established-both-full")]
    names = [f"{family}:{state}" for family in of for state in those]
    native = {name: Connection(f"{name}:awake", sleeper, peer, connect).at_end() for name in names}
    assert {word for seen in native.values() for word in seen} <= {"ok", "0 end", "0 ECONNRESET", f"{SOME} ECONNRESET"}, native
    connections = [Connection(f"{name}:slept", sleeper, peer, connect) for name in names]

    def states() -> dict[str, str]:
        return {one.name: one.p.do("state", one.name) for one in connections}

    assert states() == {one.name: one.state for one in connections}
    if drained:
        proc.sleep()
        for one in connections:
            # Room wakes those that go on writing; what closes meanwhile does so without the
            # program.
            if one.state in ("fin-wait-1", "closing", "last-ack"):
                one.drain()
        assert proc.state == "parked"
    else:
        fall_asleep(proc)
        assert states() == {one.name: one.state for one in connections}
    wrong = {one.name: seen for one in connections if (seen := one.at_end()) != native[one.name.removesuffix(":slept")]}
    assert proc.rebuilt() == (engine == "plan")
    assert not wrong, (wrong, "without a sleep", native)


# promise waking: connections that wait to be accepted at the sleep, with bytes and ends on them:
#   accepted after it in their order, by plan and by CRIU, and none of them wakes the program
@pytest.mark.parametrize("engine", ["plan", "CRIU"])
def test_connections_that_were_not_accepted(fresh_kip: Callable[..., Kip], engine: str) -> None:
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    proc, sleeper = program(kip, "sleeper", "--idle", "1h")
    _, peer = program(kip, "peer", "--never-sleep")
    for _ in range(2):
        names = [f"{family}:{what}" for family in addresses(proc) for what in NOT_ACCEPTED]
        for name in names:
            family, what = name.split(":")
            assert peer.ask(f"open {name} {addresses(proc)[family]} 7002") == "ok"
            for word in NOT_ACCEPTED[what]:
                assert "error" not in peer.ask(word.replace("NAME", name))
        assert len(names) == BACKLOG + 1
        proc.sleep()
        assert sleeper.ask(f"accept {len(names)}") == " ".join(names)
        assert proc.rebuilt() == (engine == "plan")
        for name in names:
            done = NOT_ACCEPTED[name.split(":")[1]]
            for word in done:
                assert not word.startswith("send") or sleeper.ask(f"take {name} {SOME}") == "ok"
            assert sleeper.ask(f"send {name} {SOME}") == str(SOME) and peer.ask(f"take {name} {SOME}") == "ok"
            assert "shut NAME" in done or peer.ask(f"shut {name}") == "ok"
            assert sleeper.ask(f"rest {name}") == "0 end" and sleeper.ask(f"shut {name}") == "ok"
            assert peer.ask(f"rest {name}") == "0 end"


# promise waking: a connection that is still being made at the sleep, syn-sent: it goes on being
#   made while its program is parked, which wakes when it is there or refused; by plan and by CRIU
@pytest.mark.parametrize("ends", ["accepted", "accepted-asleep", "refused-asleep"])
@pytest.mark.parametrize("family", ["v4", "v6"])
@pytest.mark.parametrize("engine", ["plan", "CRIU"])
def test_a_connection_that_is_being_made(fresh_kip: Callable[..., Kip], engine: str, family: str, ends: str) -> None:
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    proc, sleeper = program(kip, "sleeper", "--idle", "1h")
    other, peer = program(kip, "peer", "--never-sleep", backlog=0)
    host = addresses(other)[family]
    # One waits to be accepted; a further one is not answered.
    assert peer.ask("open first 127.0.0.1 7002") == "ok"
    assert sleeper.ask(f"dial second {host} 7002") == "ok"
    assert sleeper.ask("state second") == "syn-sent"
    wakes = proc.sleep()["wakes"]
    if ends == "accepted":
        assert sleeper.ask("state second") == "syn-sent"
        assert peer.ask("accept 1") == "first"
    else:
        assert peer.ask("refuse now" if ends == "refused-asleep" else "accept 1") in ("ok", "first")
        # It is sent again after 1, 3, 7 s.
        wait_for("it wakes", lambda: proc.inspect()["wakes"] > wakes and proc.state == "running", 30)
        assert "room to write" in (trigger := proc.inspect()["last_wake"]["trigger"]), trigger
    if ends == "refused-asleep":
        assert sleeper.ask("dialled second") == "ECONNREFUSED"
    else:
        assert sleeper.ask("dialled second") == "ok" and peer.ask("accept 1") == "second"
        for one, another in ((sleeper, peer), (peer, sleeper)):
            assert one.ask(f"send second {SOME}") == str(SOME) and another.ask(f"take second {SOME}") == "ok"
    assert proc.rebuilt() == (engine == "plan")


# promise parking: clients that write while the program is parked do not keep it from sleep, and
#   their bytes are there after it
# held by: this,
#   `crates/checkpoint/tests/helper.rs::criu_finds_no_bytes_in_the_queues_of_connections`
def test_clients_that_write_all_the_while(kip: Kip) -> None:
    """CRIU reads each connection's queues, and gives up where one is not as long as it was a moment before."""
    proc = kip.run("read-later", ["/usr/bin/python3", "-c", READS_LATER], ports=[8080], flags=["--idle", "1h"])
    clients = [socket.create_connection(("127.0.0.1", proc.port())) for _ in range(WRITERS)]
    for client in clients:
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent = [0] * WRITERS

    def write(over: threading.Event) -> None:
        while not over.is_set():
            for number, client in enumerate(clients):
                with suppress(BlockingIOError):
                    sent[number] += client.send(b"x")

    for _ in range(3):
        before, over = sum(sent), threading.Event()
        with ThreadPoolExecutor() as pool:
            writer = pool.submit(write, over)
            try:
                fall_asleep(proc)
            finally:
                over.set()
            writer.result()
        assert sum(sent) > before
        kip.cli("kill", "-s", "USR1", proc.name)
    kip.cli("kill", "-s", "USR2", proc.name)
    for client in clients:
        client.settimeout(60)
        client.shutdown(socket.SHUT_WR)
    assert [int(client.recv(20)) for client in clients] == sent
