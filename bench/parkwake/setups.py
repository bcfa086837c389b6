"""The servers that are measured: the set-ups of the tests, what is asked of each, and the issue's figures.

The larger ones have much memory, many processes or much open. They run under Kip alone, hot and parked; what a parked one may
take is what its bytes take to read, and a little more."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from harness import guests, profiled, servers
from harness.clients import Redis
from harness.databases import Postgres
from harness.kip import Proc
from parkwake.client import Question

KEYS = 100_000


def value(i: int) -> bytes:
    """What redis holds under key:i."""
    return b"%032d" % (i * 2_654_435_761) * (1 + i % 4)


@dataclass(frozen=True)
class Setup:
    """A server and its questions."""

    name: str
    server: servers.Server
    first: Question
    """Asked on a connection of its own."""
    loads: tuple[tuple[Question, bool], ...]
    """How throughput is measured: what is asked, and whether a connection is kept for the next request."""
    target_ms: float
    """Of the issue: first reply of a parked one, p50; of a larger one this is on top of the time to read its bytes."""
    others: str
    """What papers and projects report for the same, milliseconds."""
    connections: int = 16
    versions: tuple[str, ...] = ()
    """Command that prints the version."""
    larger: bool = False
    """Only under Kip."""
    sessions: Callable[[Proc], list[object]] = lambda proc: []
    """What clients keep open all the while."""

    @property
    def port(self) -> int:
        return self.server.port


def http(keep: bool) -> Question:
    head = "" if keep else "Connection: close\r\n"
    request = f"GET /page.html HTTP/1.1\r\nHost: bench\r\n{head}\r\n".encode()
    return Question("tcp", request, f"http:{servers.PAGE.hex()}")


def web(name: str, server: servers.Server, target_ms: float, others: str, *version: str) -> Setup:
    loads: tuple[tuple[Question, bool], ...] = ((http(True), True), (http(False), False))
    if name == "python":
        # It sends head and body by two calls, so that a kept connection measures delayed
        # acknowledgements.
        loads = loads[1:]
    return Setup(name, server, http(False), loads, target_ms, others, versions=version)


def redis() -> Setup:
    data = value(777)
    question = Question("tcp", Redis.pack(("GET", "key:777")), "exact:" + (b"$%d\r\n%s\r\n" % (len(data), data)).hex())
    loads = ((question, True), (question, False))
    return Setup("redis", servers.redis(), question, loads, 25, "", versions=("redis-server", "--version"))


def bind() -> Setup:
    name = "host42.kip.test"
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    query = struct.pack(">6H", 0x4B49, 0, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", 1, 1)
    question = Question("udp", query, f"dns:{socket.inet_aton(servers.ZONE_NAMES[name]).hex()}")
    return Setup("bind", servers.bind(), question, ((question, True),), 32, "Picocenter 101-122", versions=("named", "-v"))


def postfix() -> Setup:
    banner = Question("tcp", b"", f"line:{b'220 mail.kip.test'.hex()}")
    return Setup("postfix", servers.postfix(), banner, (), 50, "Picocenter 101-122", versions=("postconf", "mail_version"))


# What the issue allows a larger one beyond the time to read its bytes, milliseconds.
BESIDES_READING_MS, CHROMIUM_MS = 15, 150
SESSIONS = 50


def larger(name: str, server: servers.Server, first: Question, *versions: str, target_ms: float = BESIDES_READING_MS) -> Setup:
    return Setup(name, server, first, (), target_ms, "", versions=versions, larger=True)


def page(path: str, begins: bytes, host: str = "bench") -> Question:
    """A page of which only the beginning is known."""
    return Question("tcp", f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode(), f"page:{begins.hex()}")


def gunicorn() -> Setup:
    return larger("gunicorn", guests.ALL["gunicorn"].server(), page("/", b""), "gunicorn", "--version")


def jvm() -> Setup:
    return larger("jvm", guests.jetty(), http(False), "java", "-version")


def postgres() -> Setup:
    """Asked whether it speaks TLS, for which it begins a process, as for each connection: it does not."""
    request = struct.pack(">2I", 8, 80877103)
    setup = larger("postgres", profiled.postgres(), Question("tcp", request, f"exact:{b'N'.hex()}"), "psql", "--version")
    return replace(setup, sessions=lambda proc: [Postgres(proc.port()) for _ in range(SESSIONS)])


def jupyter() -> Setup:
    words = "jupyter-server --allow-root --no-browser --ip=0.0.0.0 --port=8000 --ServerApp.token= --ServerApp.password="
    server = servers.Server("jupyter", ["env", "HOME=/tmp", *words.split()], 8000)
    return larger("jupyter", server, page("/api", b'{"version"'), "jupyter-server", "--version")


def chromium() -> Setup:
    """Its port for debuggers is for this machine alone, so a socat is before it."""
    start = "#!/bin/sh\nsocat TCP-LISTEN:9223,fork,reuseaddr TCP:127.0.0.1:9222 &\nexport HOME=/tmp\n" \
        "exec chromium --headless --no-sandbox --disable-gpu --remote-debugging-port=9222 about:blank\n"  # fmt: skip
    server = servers.Server("chromium", ["/srv/start"], 9223, {"srv/start": start}, modes={"srv/start": 0o755})
    return larger("chromium", server, page("/json/version", b"{", "127.0.0.1"), "chromium", "--version", target_ms=CHROMIUM_MS)


ALL: dict[str, Callable[[], Setup]] = {
    "lighttpd": lambda: web("lighttpd", servers.lighttpd(), 10, "Picocenter 101-122", "lighttpd", "-v"),
    "nginx": lambda: web("nginx", servers.nginx(), 15, "zeropod 127", "nginx", "-v"),
    "redis": redis,
    "bind": bind,
    "node": lambda: web("node", servers.node(), 25, "", "node", "--version"),
    "python": lambda: web("python", servers.python(), 25, "", "/usr/bin/python3", "--version"),
    "postfix": postfix,
    "gunicorn": gunicorn,
    "postgres": postgres,
    "jvm": jvm,
    "jupyter": jupyter,
    "chromium": chromium,
}
