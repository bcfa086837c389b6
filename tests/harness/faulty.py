"""A network that fails on demand, request by request, between Kip and a real S3 server (`s3.py`).

Bytes pass as they are, signed headers too, so what is not failed is the server's own answer. A fault is a function of an
exchange; rules say which requests meet it, and how many of them."""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from harness import s3

HOST = "127.0.0.1"
# What is hung is let go after this, so that a test that fails ends.
LONGEST_HUNG_S = 60.0


class Dropped(Exception):
    """This connection ends here."""


@dataclass
class Message:
    """A request or an answer."""

    head: bytes
    body: bytes = b""

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n", 1)[0].decode()

    def header(self, name: str) -> str | None:
        found = re.search(rb"(?im)^" + name.encode() + rb":[ \t]*(.*?)\r$", self.head)
        return found[1].decode() if found else None

    @property
    def kind(self) -> str:
        """What a request is about: `pack`, `front`, `head`, `collection`, `list`, or something else."""
        path, _, query = self.line.split(" ")[1].partition("?")
        if "list-type" in query:
            return "list"
        for kind, part in {"pack": "/packs/", "front": "/gen-", "head": "/head", "collection": "/collection"}.items():
            if part in path:
                return kind
        return "other"

    @property
    def is_write(self) -> bool:
        return self.line.split(" ")[0] in ("PUT", "POST", "DELETE")


@dataclass
class Exchange:
    """One request, whose answer is still to be given."""

    network: Network
    request: Message
    client: socket.socket
    upstream: Upstream

    def ask(self, request: Message | None = None) -> Message:
        """What the server says."""
        return self.upstream.ask(request or self.request)

    def answer(self, answer: Message) -> None:
        self.client.sendall(answer.head + answer.body)


Fault = Callable[[Exchange], None]


def answers(status: int, code: str) -> Fault:
    """The server does not hear of it, and this is said instead."""

    def fault(exchange: Exchange) -> None:
        body = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()
        head = f"HTTP/1.1 {status} Made Up\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
        exchange.answer(Message(head.encode(), b"" if exchange.request.line.startswith("HEAD") else body))

    return fault


def delayed(seconds: float) -> Fault:
    """The first byte comes late."""

    def fault(exchange: Exchange) -> None:
        time.sleep(seconds)
        exchange.answer(exchange.ask())

    return fault


def cut(after: int) -> Fault:
    """The connection ends in the middle of a body; of an upload's body only so much reaches the server, and no answer comes."""

    def fault(exchange: Exchange) -> None:
        if exchange.request.is_write:
            exchange.upstream.cut(exchange.request, after)
            raise Dropped
        answer = exchange.ask()
        exchange.client.sendall(answer.head + answer.body[:after])
        raise Dropped

    return fault


def flipped(at: int) -> Fault:
    """One bit of the body turns on its way, up or down; `at` counts from its end if it is negative."""

    def turned(message: Message) -> Message:
        if -len(message.body) <= at < len(message.body):
            body = bytearray(message.body)
            body[at] ^= 4
            return Message(message.head, bytes(body))
        return message

    def fault(exchange: Exchange) -> None:
        if exchange.request.is_write:
            exchange.answer(exchange.ask(turned(exchange.request)))
        else:
            answer = exchange.ask()
            # An error's words are no body of an object.
            exchange.answer(turned(answer) if " 20" in answer.line else answer)

    return fault


def lost_request(exchange: Exchange) -> None:
    """The server never hears of it."""
    raise Dropped


def lost_answer(exchange: Exchange) -> None:
    """The server acts on the request, and its answer is lost."""
    exchange.ask()
    raise Dropped


def hung(exchange: Exchange) -> None:
    """Nothing more is heard until all is well again."""
    exchange.network.well.wait(LONGEST_HUNG_S)
    raise Dropped


@dataclass
class Rule:
    concerns: Callable[[Message], bool]
    fault: Fault
    times: float


class Upstream:
    """The server's side of a client's connection."""

    def __init__(self, port: int):
        self.port = port
        self.socket: socket.socket | None = None
        self.reader: BinaryIO | None = None

    def connect(self) -> socket.socket:
        if self.socket is None:
            self.socket = socket.create_connection((HOST, self.port), timeout=60)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.reader = self.socket.makefile("rb")
        return self.socket

    def ask(self, request: Message) -> Message:
        try:
            return self.ask_once(request)
        except (OSError, Dropped):
            # It has closed what was idle.
            self.close()
            return self.ask_once(request)

    def ask_once(self, request: Message) -> Message:
        self.connect().sendall(request.head + request.body)
        assert self.reader
        head = read_head(self.reader)
        while head.split(b" ", 2)[1] == b"100":
            head = read_head(self.reader)
        answer = Message(head)
        status = int(head.split(b" ", 2)[1])
        if not request.line.startswith("HEAD") and status not in (204, 304):
            length = answer.header("content-length")
            assert length is not None, f"versitygw gives every body a length: {head!r}"
            answer.body = read_whole(self.reader, int(length))
        return answer

    def cut(self, request: Message, after: int) -> None:
        self.connect().sendall(request.head + request.body[:after])
        self.close()

    def close(self) -> None:
        if self.socket is not None and self.reader is not None:
            self.reader.close()
            self.socket.close()
            self.socket = self.reader = None


def read_head(reader: BinaryIO) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = reader.readline(65536)
        if not line:
            raise Dropped
        head += line
    return head


def read_whole(reader: BinaryIO, length: int) -> bytes:
    body = reader.read(length)
    if len(body) != length:
        raise Dropped
    return body


@dataclass
class Network:
    """Between Kip and the server."""

    server_port: int
    # Where the server keeps the bucket's objects, as files.
    directory: Path
    rules: list[Rule] = field(default_factory=list)
    # Requests that came by: method, kind.
    seen: list[tuple[str, str]] = field(default_factory=list)
    # How many of them met a fault.
    met: int = 0

    def __post_init__(self) -> None:
        self.lock, self.well = threading.Lock(), threading.Event()
        self.connections: set[socket.socket] = set()
        self.listener = socket.create_server((HOST, 0), backlog=256)
        self.port = self.listener.getsockname()[1]
        self.url = f"s3://{s3.BUCKET}/kip?endpoint=http://{HOST}:{self.port}"
        self.thread = self.accept_from(self.listener)

    def fail(self, fault: Fault, *kinds: str, method: str = "", times: float = float("inf")) -> None:
        """The next so many requests of these kinds, or of any, meet this fault."""
        self.fail_where(lambda m: (not kinds or m.kind in kinds) and m.line.startswith(method), fault, times)

    def fail_where(self, concerns: Callable[[Message], bool], fault: Fault, times: float = float("inf")) -> None:
        with self.lock:
            self.well.clear()
            self.rules.append(Rule(concerns, fault, times))

    def fail_now_and_then(self, chance: random.Random, share: float, faults: list[Fault]) -> None:
        """Any request meets one of these with so much probability."""

        def some(exchange: Exchange) -> None:
            with self.lock:
                fault = chance.choice(faults)
            fault(exchange)

        self.fail_where(lambda _: chance.random() < share, some)

    def heal(self) -> None:
        """All is well again."""
        with self.lock:
            self.rules.clear()
            self.well.set()

    def count(self, method: str, kind: str) -> int:
        with self.lock:
            return self.seen.count((method, kind))

    def refuse(self) -> None:
        """The proxy no longer listens, and its connections are closed."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(10)
        with self.lock:
            for connection in self.connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def listen(self) -> None:
        """As before."""
        self.listener = socket.create_server((HOST, self.port), backlog=256)
        self.thread = self.accept_from(self.listener)

    def close(self) -> None:
        self.heal()
        self.refuse()

    def accept_from(self, listener: socket.socket) -> threading.Thread:
        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=self.serve, args=(client,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        return thread

    def serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        upstream = Upstream(self.server_port)
        with self.lock:
            self.connections.add(client)
        try:
            with client, client.makefile("rb") as reader:
                while True:
                    request = Message(read_head(reader))
                    request.body = read_whole(reader, int(request.header("content-length") or 0))
                    exchange = Exchange(self, request, client, upstream)
                    fault = self.fault_of(request)
                    fault(exchange) if fault else exchange.answer(exchange.ask())
        except (OSError, Dropped):
            pass  # however it ended: what Kip makes of it is what is tested
        finally:
            with self.lock:
                self.connections.discard(client)
            upstream.close()

    def fault_of(self, request: Message) -> Fault | None:
        with self.lock:
            self.seen.append((request.line.split(" ")[0], request.kind))
            rule = next((rule for rule in self.rules if rule.times > 0 and rule.concerns(request)), None)
            if rule is None:
                return None
            rule.times -= 1
            self.met += 1
            return rule.fault


@contextmanager
def server(directory: Path) -> Iterator[Network]:
    """A network with an empty bucket of a real S3 server behind it."""
    with s3.server(directory) as url:
        network = Network(int(url.rsplit(":", 1)[1]), directory / s3.BUCKET)
        try:
            yield network
        finally:
            network.close()
