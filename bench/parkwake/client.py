"""The client process (`client.c`): what it is asked and how it answers."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from parkwake.workspace import Failed

RETRY_US, TIMEOUT_MS = 300, 10_000


@dataclass(frozen=True)
class Question:
    """What a client asks a server, and the reply that alone counts."""

    proto: str
    request: bytes
    expect: str
    """As in client.c, `http:` and so on with hexadecimal."""

    def words(self, host: str, port: int) -> str:
        return f"{self.proto} {host} {port} {self.request.hex() or '-'} {self.expect}"


@dataclass(frozen=True)
class Reply:
    """CLOCK_MONOTONIC in nanoseconds, and how many connections were tried."""

    connect_ns: int
    reply_ns: int
    attempts: int

    @property
    def us(self) -> float:
        """From connect to the last byte."""
        return (self.reply_ns - self.connect_ns) / 1000


class WrongReply(Failed):
    """No reply, or not the right one."""


class Client:
    """A client in this network namespace or another."""

    def __init__(self, program: Path, namespace: Path | None = None):
        words = [str(program), *([str(namespace)] if namespace else [])]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def _send(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> list[str]:
        assert self._process.stdout
        line = self._process.stdout.readline().strip()
        if not line.startswith("ok "):
            raise WrongReply(line.removeprefix("error ") or "the client ended")
        return line.split()[1:]

    def first(self, question: Question, host: str, port: int) -> Reply:
        """One connection, which must be answered."""
        self._send(f"first {question.words(host, port)} 0 {TIMEOUT_MS}")
        return self.reply()

    def begin_first(self, question: Question, host: str, port: int) -> None:
        """Tries again and again until there is an answer, which `reply` gives."""
        self._send(f"first {question.words(host, port)} {RETRY_US} {TIMEOUT_MS}")

    def reply(self) -> Reply:
        return Reply(*map(int, self._answer()))

    def load(self, question: Question, host: str, port: int, connections: int, keep: bool, ms: int) -> tuple[float, int]:
        """(replies per second, errors) of so many closed loops."""
        self._send(f"load {question.words(host, port)} {connections} {int(keep)} {ms}")
        replies, errors, ns = map(int, self._answer())
        return replies * 1e9 / ns, errors

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
