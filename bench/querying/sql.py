"""A connection to mariadb by its own protocol. A client program takes longer to start than a clone takes to answer."""

from __future__ import annotations

import hashlib
import socket
import struct
import time
from collections.abc import Callable

from parkwake.workspace import Failed

USER = PASSWORD = "kip"
DATABASE = "test"
# CLIENT_LONG_PASSWORD, LONG_FLAG, CONNECT_WITH_DB, PROTOCOL_41, TRANSACTIONS, SECURE_CONNECTION,
# PLUGIN_AUTH.
CAPABILITIES = 0x1 | 0x4 | 0x8 | 0x200 | 0x2000 | 0x8000 | 0x80000
UTF8MB4 = 45
QUERY = b"\x03"
# Between two tries to connect, seconds.
RETRY_S = 0.001


class Refused(Failed):
    """The server's own word that it will not."""


class Session:
    """One connection, which must not be made anew."""

    def __init__(self, host: str, port: int, timeout: float = 30):
        self.socket = socket.create_connection((host, port), timeout=timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = self.socket.makefile("rb")
        self.number = 0
        try:
            self._log_in()
        except BaseException:
            self.close()
            raise

    def _packet(self) -> bytes:
        head = self.reader.read(4)
        if len(head) < 4:
            raise ConnectionResetError("the session ended")
        self.number = head[3] + 1
        body = self.reader.read(int.from_bytes(head[:3], "little"))
        if body[:1] == b"\xff":
            raise Refused(body[9:].decode(errors="replace"))
        return body

    def _send(self, body: bytes) -> None:
        self.socket.sendall(len(body).to_bytes(3, "little") + bytes([self.number]) + body)

    def _log_in(self) -> None:
        greeting = self._packet()
        rest = greeting[greeting.index(b"\0", 1) + 5 :]
        nonce = rest[:8] + rest[27:39]
        once = hashlib.sha1(PASSWORD.encode()).digest()
        proof = hashlib.sha1(nonce + hashlib.sha1(once).digest()).digest()
        token = bytes(a ^ b for a, b in zip(once, proof, strict=True))
        head = struct.pack("<IIB23x", CAPABILITIES, 1 << 24, UTF8MB4)
        names = USER.encode() + b"\0" + bytes([len(token)]) + token + DATABASE.encode() + b"\0mysql_native_password\0"
        self._send(head + names)
        if self._packet()[:1] != b"\0":
            raise Refused("it asks for another way to log in")

    def ask(self, sql: str) -> list[list[str]]:
        """The rows of an answer; none of a statement that has none."""
        self.number = 0
        self._send(QUERY + sql.encode())
        first = self._packet()
        if first[:1] == b"\0":
            return []
        for _ in range(_length(first, 0)[0]):
            self._packet()
        self._packet()  # the end of the columns
        rows = []
        while True:
            packet = self._packet()
            if packet[:1] == b"\xfe" and len(packet) < 9:
                return rows
            rows.append(_texts(packet))

    def close(self) -> None:
        self.reader.close()
        self.socket.close()


def _length(packet: bytes, at: int) -> tuple[int, int]:
    """A length-encoded number, and where the next thing begins."""
    size = {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(packet[at], 0)
    if not size:
        return packet[at], at + 1
    return int.from_bytes(packet[at + 1 : at + 1 + size], "little"), at + 1 + size


def _texts(packet: bytes) -> list[str]:
    row, at = [], 0
    while at < len(packet):
        if packet[at] == 0xFB:  # NULL
            row.append("")
            at += 1
            continue
        size, at = _length(packet, at)
        row.append(packet[at : at + size].decode(errors="replace"))
        at += size
    return row


def first_answer(host: str, port: int, sql: str, within_s: float, is_hopeless: Callable[[], bool] = lambda: False) -> list[list[str]]:
    """Tries again and again, by a new connection each time, until the query is answered."""
    deadline, last = time.monotonic() + within_s, "never tried"
    while time.monotonic() < deadline and not is_hopeless():
        try:
            session = Session(host, port, timeout=max(0.1, deadline - time.monotonic()))
            try:
                return session.ask(sql)
            finally:
                session.close()
        except (OSError, Refused) as e:
            last = str(e)
        time.sleep(RETRY_S)
    raise Failed(f"no answer, within {within_s:.0f} s or until what starts it failed, last: {last}")


def ask(host: str, port: int, sql: str) -> list[list[str]]:
    """One query by a connection of its own."""
    session = Session(host, port)
    try:
        return session.ask(sql)
    finally:
        session.close()
