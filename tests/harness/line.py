"""The line to the store: a proxy in front of an S3 server, which delays the first byte of each response, holds what passes to a
rate, and writes down every request.

A process of its own (`python3 line.py UPSTREAM DELAY_MS MB_PER_S`), so that it shares no interpreter with the measuring program.
It says its port, then answers each line of standard input by one line of JSON: how many requests are under way, and those that have
ended since the last time. A line with a number sets the delay to so many milliseconds. Up and down are a rate each, shared by all
connections. Times are CLOCK_MONOTONIC."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

PIECE = 32 << 10
# A sleep ends late by some 0.1 ms: as much as was missed by that may pass at once.
CREDIT_S = 0.002


@dataclass
class Request:
    """One request; `first_ns` is from its last byte to the first of the response, as the client sees it."""

    kind: str
    key: str
    status: int
    began_ns: int
    first_ns: int
    ended_ns: int
    up: int
    down: int
    whole: bool
    """The response came to its end; the client may have hung up before."""


class Rate:
    """Lets so many bytes pass per second, over all connections together."""

    def __init__(self, per_second: float):
        self.per_second, self.next, self.lock = per_second, 0.0, threading.Lock()

    def wait(self, count: int) -> None:
        with self.lock:
            self.next = max(self.next, time.monotonic() - CREDIT_S) + count / self.per_second
            until = self.next
        if (left := until - time.monotonic()) > 0:
            time.sleep(left)


def kind_of(method: str, target: str, headers: dict[bytes, bytes]) -> str:
    if method == "GET" and "list-type=" in target:
        return "LIST"
    return "ranged GET" if method == "GET" and b"range" in headers else method


class Line:
    """Serves until the process ends."""

    def __init__(self, upstream: tuple[str, int], delay_s: float, per_second: float):
        self.upstream, self.delay_s = upstream, delay_s
        self.up, self.down = Rate(per_second), Rate(per_second)
        self.done: list[Request] = []
        self.open: set[int] = set()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def serve(self) -> None:
        while True:
            client, _ = self.listener.accept()
            threading.Thread(target=self.connection, args=(client,), daemon=True).start()

    def connection(self, client: socket.socket) -> None:
        with client, socket.create_connection(self.upstream) as server:
            for s in (client, server):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ours, theirs = client.makefile("rb"), server.makefile("rb")
            try:
                while self.request(client, ours, server, theirs):
                    pass
            except (ConnectionError, EOFError):
                pass  # the client has hung up, or the server has

    def request(self, client: socket.socket, ours: BinaryIO, server: socket.socket, theirs: BinaryIO) -> bool:
        """Passes one request on and its response back; whether another may follow."""
        began = time.monotonic_ns()
        if not (head := read_head(ours)):
            return False
        self.open.add(threading.get_ident())
        try:
            return self.exchange(head, began, client, ours, server, theirs)
        finally:
            self.open.discard(threading.get_ident())

    def exchange(
        self, head: list[bytes], began: int, client: socket.socket, ours: BinaryIO, server: socket.socket, theirs: BinaryIO
    ) -> bool:
        method, target, _ = head[0].decode().split(" ", 2)
        headers = fields(head)
        if b"expect" in headers:
            raise NotImplementedError("a request that waits for leave to send its body")
        server.sendall(b"\r\n".join([*head, b"", b""]))
        up = self.body(ours, server, self.up, headers, has_body=b"content-length" in headers or b"transfer-encoding" in headers)
        asked = time.monotonic_ns()
        if not (answer := read_head(theirs)):
            raise EOFError
        time.sleep(self.delay_s)
        status, headers_back = int(answer[0].split()[1]), fields(answer)
        kept = Request(kind_of(method, target, headers), target.partition("?")[0], status, began, 0, 0, up, 0, False)
        try:
            client.sendall(b"\r\n".join([*answer, b"", b""]))
            kept.first_ns = time.monotonic_ns() - asked
            has_body = method != "HEAD" and status not in (204, 304)
            kept.down = self.body(theirs, client, self.down, headers_back, has_body, kept)
            kept.whole = True
        finally:
            kept.ended_ns = time.monotonic_ns()
            self.done.append(kept)
        return headers.get(b"connection", b"").lower() != b"close" and headers_back.get(b"connection", b"").lower() != b"close"

    def body(
        self, source: BinaryIO, to: socket.socket, rate: Rate, headers: dict[bytes, bytes], has_body: bool, kept: Request | None = None
    ) -> int:
        """Passes a body on as it is framed; its bytes, the frames' own not counted."""
        if not has_body:
            return 0
        if headers.get(b"transfer-encoding", b"").lower() != b"chunked":
            return passed(source, to, rate, int(headers.get(b"content-length", b"0")), kept)
        total = 0
        while True:
            line = source.readline()
            to.sendall(line)
            size = int(line.split(b";")[0], 16)
            total += passed(source, to, rate, size, kept)
            to.sendall(source.readline())
            if size == 0:
                return total


def passed(source: BinaryIO, to: socket.socket, rate: Rate, size: int, kept: Request | None) -> int:
    left = size
    while left:
        if not (piece := source.read(min(PIECE, left))):
            raise EOFError
        rate.wait(len(piece))
        to.sendall(piece)
        left -= len(piece)
        if kept:
            kept.down = size - left
    return size


def read_head(source: BinaryIO) -> list[bytes]:
    """First line and fields; nothing at the end of the connection."""
    lines = []
    while (line := source.readline()) not in (b"\r\n", b""):
        lines.append(line.rstrip(b"\r\n"))
    return lines


def fields(head: Sequence[bytes]) -> dict[bytes, bytes]:
    pairs = (line.partition(b":") for line in head[1:])
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


class Proxy:
    """The proxy process, as the measuring program has it."""

    def __init__(self, upstream_port: int, delay_ms: float, mb_per_s: float):
        words = [sys.executable, str(Path(__file__)), f"127.0.0.1:{upstream_port}", str(delay_ms), str(mb_per_s)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self.port = int(self._process.stdout.readline())

    def take(self) -> tuple[int, list[Request]]:
        """How many requests are under way, and those that have ended since the last time."""
        return self._say("")

    def delay(self, ms: float) -> None:
        """From now on it delays a first byte by so much; what has ended so far is forgotten."""
        self._say(str(ms))

    def _say(self, line: str) -> tuple[int, list[Request]]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        under_way, rows = json.loads(self._process.stdout.readline())
        return under_way, [Request(**row) for row in rows]

    def quiet(self, seconds: float = 0.3, timeout: float = 60) -> list[Request]:
        """Waits until nothing has passed for so long; the requests that have ended since the last time."""
        rows: list[Request] = []
        deadline, still = time.monotonic() + timeout, time.monotonic()
        while time.monotonic() - still < seconds:
            under_way, more = self.take()
            rows += more
            if more or under_way:
                still = time.monotonic()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the store is not left alone for {seconds} s within {timeout} s")
            time.sleep(0.01)
        return rows

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    line = Line((host, int(port)), float(sys.argv[2]) / 1000, float(sys.argv[3]) * 1e6)
    threading.Thread(target=line.serve, daemon=True).start()
    print(line.listener.getsockname()[1], flush=True)
    for text in sys.stdin:
        if text.strip():
            line.delay_s = float(text) / 1000
        count = len(line.done)  # threads only append
        rows, line.done[:count] = line.done[:count], []
        print(json.dumps([len(line.open), [asdict(row) for row in rows]]), flush=True)


if __name__ == "__main__":
    main()
