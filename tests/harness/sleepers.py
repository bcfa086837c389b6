"""Every program of the tests that can be put away, each with a client: how it is used, and what it must still have after a wake.

`LEFT_OUT` names the sources that are no such programs. `tests/test_engines.py` fails until each file of `tests/programs` is in
one of the two."""

from __future__ import annotations

import shlex
import smtplib
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from harness import kept, profiled, programs, servers
from harness.clients import DnsTcp, Http, Lines, Redis, http_get, read_to_end
from harness.kip import BY_ITSELF_CLOCK, Proc
from harness.servers import Server

# Why a file of `tests/programs` has no entry in `ALL`.
LEFT_OUT = {
    "churn.c": "at work all the time, it wakes as soon as it is parked",
    "threads.c": "at work all the time, it wakes as soon as it is parked",
    "hostile.c": "at work all the time, it wakes as soon as it is parked",
    "expiries.c": "its timers expire all the time, so that it wakes as soon as it is parked",
    "light.c": "has no network; tests/test_light.py tries it in each tier by both engines",
    "red.c": "tries what it may do, and ends",
    "listen.h": "a part of others",
    "clients": "clients of Kip's API",
    "guests": "applications of programs in harness/guests.py",
    "natural/tasks.py": "celery talks to its broker all the time, so that it wakes as soon as it is parked",
    "natural/rabbit.py": "a client of RabbitMQ",
    "names.py": "runs outside of any proc",
    "sweeper.py": "is at work all the time, so that it wakes as soon as it is parked",
    "beats.py": "its timers expire all the time, and tests/test_spread.py tries it in each tier",
    "runtime_puts.py": "is at work all the time, so that it wakes as soon as it is parked",
    "runtime_calls.py": "asks Kip what its client tells it to; tests/test_sdk.py tries it in each tier",
    "owners.py": "has one client at a time; tests/test_owners.py tries it in each tier by both engines",
}
LINES = {"srv/lines.py": programs.SOURCES / "lines.py"}
Check = Callable[[], None]


def nothing(_: Proc) -> Check:
    return lambda: None


@dataclass(frozen=True)
class Sleeper:
    """A program, and its client."""

    name: str
    server: Callable[[], Server]
    # A new client asks and has the right answer.
    ask: Callable[[Proc], None]
    # Leaves something in it; what is called later, in the same run of the program, sees whether all
    # of that is there.
    leave: Callable[[Proc], Check] = nothing
    # Whether it is woken natively, and whether CRIU can wake it.
    native: bool = True
    by_criu: bool = True
    # Flags of `kip sleep`. Without, the request is the owner's word for a clock that stands: a
    # program that ticks stays parked.
    clock: tuple[str, ...] = ()
    # Files of `tests/programs` that it is made of.
    sources: tuple[str, ...] = ()


def lines(port: int, line: str, right: str) -> Callable[[Proc], None]:
    def ask(proc: Proc) -> None:
        client = Lines(proc.port(port))
        answer = client.ask(line)
        client.close()
        assert answer == right, (line, answer)

    return ask


def same_line(port: int, line: str, right: str) -> Callable[[Proc], Check]:
    """A connection that stays."""

    def leave(proc: Proc) -> Check:
        client = Lines(proc.port(port))

        def check() -> None:
            answer = client.ask(line)
            assert answer == right, (line, answer)

        check()
        return check

    return leave


# Our own programs.


def torture(name: str, native: bool, static: bool = False) -> Sleeper:
    def server() -> Server:
        made = servers.torture(static)
        return replace(made, flags=("--env", servers.ONLY_CRIU)) if native else made

    def ask(proc: Proc) -> None:
        client = Lines(proc.port())
        client.check()
        client.close()

    def leave(proc: Proc) -> Check:
        client = Lines(proc.port())
        return client.check

    return Sleeper(name, server, ask, leave, native, clock=BY_ITSELF_CLOCK, sources=("torture",))


def odd(kind: str, native: bool, by_criu: bool) -> Sleeper:
    """It says itself whether its oddity is as it was."""
    server = Server(kind.replace("_", "-"), ["/usr/bin/python3", "/srv/odd.py", kind], 7000, {"srv/odd.py": programs.SOURCES / "odd.py"})

    def ask(proc: Proc) -> None:
        with socket.create_connection(("127.0.0.1", proc.port()), timeout=60) as client:
            answer = client.makefile().readline()
        assert answer == "ok\n", answer

    return Sleeper(f"odd-{server.name}", lambda: server, ask, native=native, by_criu=by_criu, clock=BY_ITSELF_CLOCK, sources=("odd.py",))


def memory(criu: bool) -> Sleeper:
    """A region whose pages have numbers."""

    def leave(proc: Proc) -> Check:
        def order(line: str) -> str:
            client = Lines(proc.port())
            answer = client.ask(line)
            client.close()
            return answer

        order("map 10 20")
        order("write 10 3 9 5")
        seen = order("look 10")
        assert "t5+9" in seen, seen

        def check() -> None:
            assert order("look 10") == seen

        return check

    name = "memory-criu" if criu else "memory"
    return Sleeper(name, lambda: servers.memory(criu), lambda proc: leave_alone(proc, "regions"), leave, not criu, sources=("memory.c",))


def leave_alone(proc: Proc, line: str) -> None:
    """Asks something whose answer does not matter, but must come."""
    client = Lines(proc.port())
    assert client.ask(line)
    client.close()


def told(proc: Proc) -> None:
    """A server that tells each client what it has counted and closes. It ends if a client does not hear it out, SIGPIPE."""
    with socket.create_connection(("127.0.0.1", proc.port()), timeout=30) as client:
        assert read_to_end(client)


def asked(proc: Proc) -> None:
    with socket.create_connection(("127.0.0.1", proc.port()), timeout=30) as client:
        client.sendall(b"t")
        assert read_to_end(client)


def c_server(name: str, port: int, *words: str, flags: Iterable[str] = ("-static",)) -> Callable[[], Server]:
    flags = tuple(flags)
    return lambda: Server(name, [f"/srv/{name}", *words], port, {f"srv/{name}": programs.c_program(name, *flags)})


def python_server(name: str, port: int, *words: str) -> Server:
    return Server(name, ["/usr/bin/python3", f"/srv/{name}.py", *words], port, {f"srv/{name}.py": programs.SOURCES / f"{name}.py"})


def variable(proc: Proc) -> Check:
    """A name in `lines.py`, and a process of it."""
    client = Lines(proc.port())
    client.ask("word = 'left ' + 'here'")
    client.ask("import subprocess; child = subprocess.Popen(['sleep', '100000'])")

    def check() -> None:
        answer = client.ask("word, child.poll()")
        assert answer == "('left here', None)", answer

    return check


def scarce(what: str) -> Sleeper:
    return Sleeper(f"scarce-{what}", lambda: servers.scarce(what), lines(7400, "look", "ok"), sources=("scarce.c",))


def count(proc: Proc) -> Check:
    """`kept.c` counts lines; what it says of its memory stays."""
    before = kept.ask(proc)

    def check() -> None:
        after = kept.ask(proc)
        assert after[0] > before[0] and after[1] == before[1], (before, after)

    return check


def beside(command: list[str], files: dict[str, bytes | str | Path], name: str) -> Server:
    """A program that no client asks, with `lines.py` beside it, by which a client wakes the proc."""
    script = f"python3 /srv/lines.py 7000 & exec {shlex.join(command)}"
    return Server(name, ["sh", "-c", script], 7000, {**files, **LINES})


def places() -> Server:
    """Its sockets and FIFOs are in its files: those of the life before are in the way of a cold start."""
    server = servers.places()
    return replace(server, command=["sh", "-c", "rm -rf /tmp/* /srv/queue && exec " + " ".join(server.command)])


SEEN = "open('/proc/2/cmdline').read().split(chr(0))[-2]"


def quiet(name: str, command: list[str], files: Callable[[], dict[str, bytes | str | Path]], sources: tuple[str, ...] = (), native: bool = True) -> Sleeper:
    """The last word of its command is seen in the process that was the shell."""
    ask = lines(7000, SEEN, repr(command[-1]))
    return Sleeper(name, lambda: beside(command, files(), name), ask, variable, native, sources=(*sources, "lines.py"))


def c_file(name: str) -> Callable[[], dict[str, bytes | str | Path]]:
    return lambda: {f"srv/{name}": programs.c_program(name, "-static")}


# Calls of which no sleep on disk is possible, `kip sleep` says why.
NOT_PARKED = ["aio_events", "aio_mask", "queue_receive", "queue_send"]
OWN = [
    torture("torture", native=False),
    torture("torture-native", native=True),
    torture("torture-static", native=True, static=True),
    memory(criu=False),
    memory(criu=True),
    *(scarce(what) for what in ("files", "space", "data", "locked", "processes", "size", "guards")),
    Sleeper("echo", servers.echo, lines(9000, "said", "said"), same_line(9000, "again", "again"), sources=("echo.py",)),
    Sleeper("alarm", servers.alarm, lines(7000, "said", "said"), same_line(7000, "late sleep", "armed"), sources=("alarm.py",)),
    Sleeper("lines", lambda: python_server("lines", 7000, "7000"), lines(7000, "6 * 7", "42"), variable, sources=("lines.py",)),
    Sleeper("places", places, lambda proc: leave_alone(proc, "round"), sources=("places.py",)),
    Sleeper("states", lambda: python_server("states", 7000, "7000", "7001", "7002", "7"), lines(7000, "open new 127.0.0.1 7001", "ok"), sources=("states.py",)),
    Sleeper("kept", kept.server, lambda proc: leave_alone(proc, "?"), count, sources=("kept.c",)),
    Sleeper("reader", lambda: servers.reader(500), lines(7300, "read 2 0 100 1 0", "wrong 0"), sources=("reader.c",)),
    Sleeper("holder", c_server("holder", 7000, "7000", "8"), lines(7000, "word", "ok word"), same_line(7000, "eat 1", "ok eat 1"), sources=("holder.c",)),
    Sleeper("filtered", c_server("filtered", 7000), told, sources=("filtered.c",)),
    Sleeper("handlers", c_server("handlers", 7000), told, sources=("handlers.c",)),
    Sleeper("system-v", c_server("system_v", 7000), lines(7000, "check", "ok"), sources=("system_v.c",)),
    Sleeper("rings", c_server("rings", 7000), lines(7000, "check", "ok"), sources=("rings.c",)),
    Sleeper("once", c_server("once", 7000, "8"), asked, sources=("once.c",)),
    Sleeper("handed", c_server("handed", 7000), lines(7000, "mutex 1", "done"), sources=("handed.c",)),
    quiet("timed-waits", ["/srv/timed_waits", "1000", *NOT_PARKED], c_file("timed_waits"), ("timed_waits.c",)),
    quiet("waits", ["/srv/waits", "1000"], c_file("waits"), ("waits.c",)),
]

# Real servers.


def web(name: str, make: Callable[[], Server]) -> Sleeper:
    """A connection that stays, and what a client has stored."""

    def leave(proc: Proc) -> Check:
        steady, has_kv = Http(proc.port()), make().has_kv
        if has_kv:
            steady.ask("PUT", "/kv/left", b"here")
        assert steady.get("/page.html") == servers.PAGE

        def check() -> None:
            assert steady.get("/page.html") == servers.PAGE
            assert not has_kv or steady.get("/kv/left") == b"here"

        return check

    def ask(proc: Proc) -> None:
        assert http_get(proc.port(), "/page.html") == servers.PAGE

    return Sleeper(name, make, ask, leave, sources={"node": ("web.js",), "go": ("goweb",)}.get(name, ()))


def redis_ask(proc: Proc) -> None:
    client = Redis(proc.port())
    assert client.ask("PING") == "PONG"
    client.close()


def redis_leave(proc: Proc) -> Check:
    client = Redis(proc.port())
    assert client.ask("SET", "left", "here") == "OK"

    def check() -> None:
        assert client.ask("GET", "left") == b"here"

    return check


def bind_leave(proc: Proc) -> Check:
    client = DnsTcp(proc.port(53))

    def check() -> None:
        assert client.ask("host7.kip.test") == [socket.inet_aton("192.0.2.7")]

    check()
    return check


def postfix_leave(proc: Proc) -> Check:
    """In the middle of a mail."""
    session = smtplib.SMTP("127.0.0.1", proc.port(), local_hostname="client.test", timeout=60)
    assert session.ehlo()[0] == 250 and session.mail("sender@client.test")[0] == 250

    def check() -> None:
        assert session.rcpt("alice@kip.test")[0] == 250
        assert session.data("Subject: test\r\n\r\ntext\r\n")[0] == 250
        assert session.mail("sender@client.test")[0] == 250

    return check


def of_profile(case: profiled.Case) -> Sleeper:
    """Its time-outs for clients are two seconds long: no connection stays."""
    name = case.profile.replace(" ", "-").replace(".", "-")
    return Sleeper(f"profile-{name}", case.server, case.use)


REAL = [
    *(web(name, make) for name, make in servers.WEB.items()),
    Sleeper("redis", servers.redis, redis_ask, redis_leave),
    Sleeper("bind", servers.bind, profiled.dns_use("host7.kip.test", "192.0.2.7"), bind_leave),
    Sleeper("postfix", servers.postfix, lambda proc: profiled.said(proc, 25, b"", b"220 "), postfix_leave),
    Sleeper("mariadb", servers.mariadb, lambda proc: profiled.said(proc, 3306, b"", b"MariaDB")),
    *map(of_profile, profiled.CASES),
]
