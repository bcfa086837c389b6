"""Clients of the servers under test, over plain sockets. None retries, reconnects or hides a short answer."""

from __future__ import annotations

import errno
import http.client
import itertools
import random
import secrets
import selectors
import smtplib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# How long a client waits for a server on a machine that stalls; none of the tests wants an error to
# come so soon.
TIMEOUT = 30.0


def free_port() -> int:
    """A TCP port that is free, and not of those that the kernel gives to clients of other tests (ip_local_port_range), nor,
    where there are others, of those that Kip chooses from."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = range(10_000, 20_000) if first >= 20_000 or last > 64_000 else range(last + 1, 65_536)
    for _ in range(1000):
        port = random.SystemRandom().choice(ports)
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError(f"no port of {ports} is free")


class Http(http.client.HTTPConnection):
    """One connection that stays; when the server closes it, the next request fails."""

    def __init__(self, port: int, host: str = "127.0.0.1", timeout: float = TIMEOUT):
        super().__init__(host, port, timeout=timeout)
        self.connect()
        self.auto_open = 0

    def get(self, path: str = "/", **headers: str) -> bytes:
        return self.ask("GET", path, None, **headers)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        self.request(method, path, body, headers)
        response = self.getresponse()
        data = response.read()
        assert response.status == 200, f"{method} {path}: {response.status} {data[:200]!r}"
        return data


def http_get(port: int, path: str = "/", host: str = "127.0.0.1", timeout: float = TIMEOUT) -> bytes:
    """One connection, one request."""
    connection = Http(port, host, timeout)
    try:
        return connection.get(path, Connection="close")
    finally:
        connection.close()


def listens(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(2)
        return s.connect_ex(("127.0.0.1", port)) == 0


def tcp_states(pid: int) -> list[str]:
    """Of the IPv4 and IPv6 TCP sockets in the network namespace of that process; by number where a test needs no name."""
    names = {"01": "ESTABLISHED", "08": "CLOSE_WAIT", "0A": "LISTEN"}
    lines = [line for f in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{f}").read_text().splitlines()[1:]]
    return [names.get(state, state) for state in (line.split()[3] for line in lines)]


def read_to_end(connection: socket.socket, timeout: float = TIMEOUT) -> bytes:
    """Everything up to the peer's FIN; a reset or a FIN that does not come is an error."""
    connection.settimeout(timeout)
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def many_gets(
    port: int, count: int, path: str, timeout: float, host: str = "127.0.0.1", dialled: Callable[[], None] = lambda: None
) -> tuple[list[bytes], float, int]:
    """`count` connections, and once each has sent its SYN (`dialled`) one GET on each. Bodies, seconds from the last SYN to the last
    byte, and how many had to send their SYN again."""
    request = f"GET {path} HTTP/1.0\r\nHost: x\r\n\r\n".encode()
    selector = selectors.DefaultSelector()
    sockets = [socket.socket() for _ in range(count)]
    received: dict[socket.socket, bytearray] = {s: bytearray() for s in sockets}
    for s in sockets:
        s.setblocking(False)
    for s in sockets:
        if s.connect_ex((host, port)) not in (0, errno.EINPROGRESS):
            raise ConnectionError("connect was refused at once")
        selector.register(s, selectors.EVENT_WRITE)
    dialled()
    waiting, again, begun = count, 0, time.monotonic()
    while waiting:
        ready = selector.select(max(0.0, begun + timeout - time.monotonic()))
        if not ready:
            for s in sockets:
                s.close()
            raise TimeoutError(f"{waiting} of {count} clients were not served within {timeout} s")
        for key, mask in ready:
            s = key.fileobj
            if mask & selectors.EVENT_WRITE:
                if error := s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, f"connect: {errno.errorcode[error]}")
                # Nothing but the SYN has been sent: struct tcp_info, tcpi_total_retrans
                # (linux/tcp.h).
                again += struct.unpack_from("I", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100)[0] > 0
                s.send(request)
                selector.modify(s, selectors.EVENT_READ)
            elif data := s.recv(65536):
                received[s] += data
            else:
                selector.unregister(s)
                waiting -= 1
    took = time.monotonic() - begun
    for s in sockets:
        s.close()
    bodies = []
    for data in received.values():
        head, _, body = bytes(data).partition(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n")[0], head[:100]
        bodies.append(body)
    return bodies, took, again


class Lines:
    """A connection with a protocol of lines; also the client of the program `torture`."""

    def __init__(self, port: int, host: str = "127.0.0.1", timeout: float = TIMEOUT):
        self.socket = socket.create_connection((host, port), timeout=timeout)
        self.reader = self.socket.makefile("rb")

    def ask(self, line: str) -> str:
        self.socket.sendall(line.encode() + b"\n")
        answer = self.reader.readline()
        assert answer.endswith(b"\n"), f"{line!r} was answered with {answer!r} and the end of the connection"
        return answer.decode().rstrip("\r\n")

    def values(self, line: str) -> dict[str, str]:
        """An answer of key=value words."""
        return dict(word.split("=", 1) for word in self.ask(line).split())

    def check(self, tolerance_ms: int = 300) -> None:
        """The program verifies everything it holds."""
        answer = self.ask(f"check {tolerance_ms}")
        assert answer.startswith("ok "), answer

    def close(self) -> None:
        self.reader.close()
        self.socket.close()


@contextmanager
def talking(port: int, clients: int = 4) -> Iterator[list[int]]:
    """Clients of `torture` that talk without pause, each answer being the right one; how many each has had."""

    def talk(number: int) -> Iterator[None]:
        client = Lines(port)
        for count in itertools.count(1):
            text = f"client {number} line {count}"
            assert client.ask(f"echo {text}") == text
            yield
            if count % 50 == 0:
                client.close()
                client = Lines(port)

    with without_pause(talk, clients) as answered:
        yield answered


@contextmanager
def without_pause(talk: Callable[[int], Iterator[None]], clients: int) -> Iterator[list[int]]:
    """Clients, by number, that yield after each right answer and go on until the end; how many answers each has had."""
    stop, failures, answered = threading.Event(), [], [0] * clients

    def go_on(number: int) -> None:
        try:
            for _ in talk(number):
                answered[number] += 1
                if stop.is_set():
                    return
        except BaseException as error:
            failures.append(f"client {number}: {error!r}")

    threads = [threading.Thread(target=go_on, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answered
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not failures, failures


class Redis:
    """RESP, pipelined where told to."""

    def __init__(self, port: int, host: str = "127.0.0.1", timeout: float = 30):
        self.socket = socket.create_connection((host, port), timeout=timeout)
        self.reader = self.socket.makefile("rb")

    @staticmethod
    def pack(words: tuple[Any, ...]) -> bytes:
        parts = [w if isinstance(w, bytes) else str(w).encode() for w in words]
        return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)

    def answer(self) -> Any:
        line = self.reader.readline()
        assert line.endswith(b"\r\n"), f"the connection ended in {line!r}"
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            raise AssertionError(f"redis: {rest.decode()}")
        if kind == b":":
            return int(rest)
        length = int(rest)
        if length < 0:
            return None
        if kind == b"$":
            return self.reader.read(length + 2)[:-2]
        return [self.answer() for _ in range(length)]

    def ask(self, *words: Any) -> Any:
        self.socket.sendall(self.pack(words))
        return self.answer()

    def ask_all(self, commands: list[tuple[Any, ...]], at_once: int = 5000) -> list[Any]:
        answers = []
        for i in range(0, len(commands), at_once):
            chunk = commands[i : i + at_once]
            self.socket.sendall(b"".join(map(self.pack, chunk)))
            answers += [self.answer() for _ in chunk]
        return answers

    def close(self) -> None:
        self.reader.close()
        self.socket.close()


A, TXT, IN = 1, 16, 1


def dns_packet(name: str, kind: int = A) -> tuple[int, bytes]:
    ident = secrets.randbits(16)
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.rstrip(".").split("."))
    return ident, struct.pack(">6H", ident, 0, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", kind, IN)


def dns_answers(ident: int, packet: bytes) -> list[bytes]:
    """The data of each answer record; anything but a good answer to our question is an error."""
    got, flags, questions, answers, _, _ = struct.unpack(">6H", packet[:12])
    assert got == ident and flags & 0x8000, "not the answer to our question"
    assert flags & 0xF == 0, f"rcode {flags & 0xF}"

    def skip_name(at: int) -> int:
        while packet[at]:
            if packet[at] >= 0xC0:
                return at + 2
            at += packet[at] + 1
        return at + 1

    at, found = 12, []
    for _ in range(questions):
        at = skip_name(at) + 4
    for _ in range(answers):
        at = skip_name(at)
        length = struct.unpack(">H", packet[at + 8 : at + 10])[0]
        found.append(packet[at + 10 : at + 10 + length])
        at += 10 + length
    return found


def dns_udp(port: int, name: str, kind: int = A, host: str = "127.0.0.1", timeout: float = TIMEOUT) -> list[bytes]:
    """One datagram, sent once."""
    ident, query = dns_packet(name, kind)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(timeout)
        s.connect((host, port))
        s.send(query)
        return dns_answers(ident, s.recv(65535))


class DnsTcp:
    """A TCP connection to a name server; several questions may go over it."""

    def __init__(self, port: int, host: str = "127.0.0.1", timeout: float = TIMEOUT):
        self.socket = socket.create_connection((host, port), timeout=timeout)
        self.reader = self.socket.makefile("rb")

    def ask(self, name: str, kind: int = A) -> list[bytes]:
        ident, query = dns_packet(name, kind)
        self.socket.sendall(struct.pack(">H", len(query)) + query)
        length = struct.unpack(">H", self.reader.read(2))[0]
        return dns_answers(ident, self.reader.read(length))

    def close(self) -> None:
        self.reader.close()
        self.socket.close()


def send_mail(port: int, recipient: str, text: str, timeout: float = TIMEOUT) -> None:
    """One SMTP session; every step must be accepted."""
    with smtplib.SMTP("127.0.0.1", port, local_hostname="client.test", timeout=timeout) as smtp:
        refused = smtp.sendmail("sender@client.test", [recipient], f"Subject: test\r\n\r\n{text}\r\n")
        assert not refused, refused
