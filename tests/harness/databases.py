"""Sessions of databases: one connection each, which must not be made anew."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import time


class MariaDb:
    """One connection of the `mariadb` client, fed by a pipe; it must not reconnect."""

    MARK = "--end-of-answer--"

    def __init__(self, port: int):
        words = ["mariadb", "--no-defaults", "-h", "127.0.0.1", "-P", str(port), "-ukip", "-pkip", "--protocol=tcp"]
        options = [
            "--skip-ssl",
            "--skip-reconnect",
            "--batch",
            "--skip-column-names",
            "--unbuffered",
            "--connect-timeout=20",
        ]
        self.client = subprocess.Popen(
            [*words, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def ask(self, sql: str, timeout: float = 30) -> list[list[str]]:
        assert self.client.stdin and self.client.stdout
        self.client.stdin.write(f"{sql};\nSELECT '{self.MARK}';\n".encode())
        self.client.stdin.flush()
        data, deadline = b"", time.monotonic() + timeout
        while self.MARK.encode() + b"\n" not in data:
            ready = select.select([self.client.stdout], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, f"{sql}: no answer within {timeout} s, only {data!r}"
            piece = os.read(self.client.stdout.fileno(), 65536)
            assert piece, f"{sql}: the session ended: {data!r}"
            data += piece
        lines = data.decode().splitlines()[:-1]
        assert not any(line.startswith("ERROR") for line in lines), lines
        return [line.split("\t") for line in lines]

    def close(self) -> None:
        assert self.client.stdin
        self.client.stdin.close()
        assert self.client.wait(10) == 0


class Postgres:
    """One connection by protocol 3.0, with simple queries; it is let in without a word."""

    def __init__(self, port: int, user: str = "kip", database: str = "postgres"):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.reader = self.socket.makefile("rb")
        words = b"".join(word.encode() + b"\0" for word in ("user", user, "database", database)) + b"\0"
        self.socket.sendall(struct.pack("!II", len(words) + 8, 3 << 16) + words)
        self._answers()

    def _answers(self) -> list[list[str]]:
        """The rows up to ReadyForQuery."""
        rows = []
        while True:
            head = self.reader.read(5)
            assert len(head) == 5, "the session ended"
            kind, length = struct.unpack("!cI", head)
            body = self.reader.read(length - 4)
            assert kind != b"E", body
            if kind == b"D":
                row, at = [], 2
                for _ in range(struct.unpack_from("!H", body)[0]):
                    size = struct.unpack_from("!i", body, at)[0]
                    row.append(body[at + 4 : at + 4 + size].decode())
                    at += 4 + size
                rows.append(row)
            if kind == b"Z":
                return rows

    def ask(self, sql: str) -> list[list[str]]:
        self.socket.sendall(b"Q" + struct.pack("!I", len(sql.encode()) + 5) + sql.encode() + b"\0")
        return self._answers()
