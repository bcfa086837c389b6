"""The servers that are measured: the set-ups of the tests, what is asked of each, and the issue's figures."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from harness import servers
from harness.clients import Redis
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
    """Of the issue: first reply of a parked one, p50."""
    others: str
    """What papers and projects report for the same, milliseconds."""
    connections: int = 16
    versions: tuple[str, ...] = ()
    """Command that prints the version."""

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


ALL: dict[str, Callable[[], Setup]] = {
    "lighttpd": lambda: web("lighttpd", servers.lighttpd(), 10, "Picocenter 101-122", "lighttpd", "-v"),
    "nginx": lambda: web("nginx", servers.nginx(), 15, "zeropod 127", "nginx", "-v"),
    "redis": redis,
    "bind": bind,
    "node": lambda: web("node", servers.node(), 25, "", "node", "--version"),
    "python": lambda: web("python", servers.python(), 25, "", "/usr/bin/python3", "--version"),
    "postfix": postfix,
}
