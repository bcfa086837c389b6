"""Servers with many clients that stay: each session finds after a sleep what it left there, by both engines."""

from __future__ import annotations

import base64
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import profiled, programs
from harness.clients import http_get
from harness.kip import Kip, Proc
from harness.wait import wait_for
from test_natural import MODULES, modules

ENGINES = ["plan", "CRIU"]
SESSIONS = [12, pytest.param(100, marks=pytest.mark.soak)]
# Where a descriptor was moved over another one, 48 were enough.
SOCKETS = 60
SLEEPS = 2


class Session:
    """One of PostgreSQL, by its protocol, version 3."""

    def __init__(self, port: int):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.reader = self.socket.makefile("rb")
        words = b"user\0kip\0database\0postgres\0\0"
        self.socket.sendall(struct.pack("!II", 8 + len(words), 3 << 16) + words)
        self.answer()

    def answer(self) -> list[str]:
        """The first column of each row, once the server is ready for the next query."""
        rows, failure = [], None
        while True:
            head = self.reader.read(5)
            assert len(head) == 5, f"the session ended: {failure!r}"
            kind, size = struct.unpack("!cI", head)
            body = self.reader.read(size - 4)
            if kind == b"E":
                failure = body
            elif kind == b"D":
                rows.append(body[6 : 6 + struct.unpack("!i", body[2:6])[0]].decode())
            elif kind == b"Z":
                assert failure is None, failure
                return rows

    def ask(self, sql: str) -> list[str]:
        self.socket.sendall(b"Q" + struct.pack("!I", 5 + len(sql.encode())) + sql.encode() + b"\0")
        return self.answer()


def put_to_sleep(proc: Proc) -> None:
    """By its owner's word, so that a server's own timers do not wake it; once more if it was at work when it was frozen."""
    for _ in range(5):
        proc.kip.cli("sleep", proc.name, "--to", "parked", timeout=120)
        view = proc.quiescent()
        if view["state"] == "parked":
            break
    assert view["state"] == "parked" and view["pids"] == [], view


def daemon_of(fresh_kip: Callable[..., Kip], engine: str) -> Kip:
    return fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))


def woke(proc: Proc, engine: str) -> None:
    assert proc.rebuilt() == (engine == "plan")
    assert [e for e in proc.kip.events() if e["kind"] == "cold-start"] == []


def postgres_sleeps(kip: Kip, engine: str, tmp_path: Path, count: int) -> None:
    """It has System V memory: the segment by which a second server finds the first."""
    server = profiled.postgres()
    proc = kip.run("postgres", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=["--never-sleep"], timeout=120)

    def first() -> Session | None:
        try:
            return Session(proc.port())
        except AssertionError:  # it listens before it lets clients in
            return None

    sessions = [wait_for("it lets a client in", first, 30), *(Session(proc.port()) for _ in range(count - 1))]
    pids = [session.ask("SELECT pg_backend_pid()") for session in sessions]
    sessions[0].ask("CREATE TABLE shared (n int)")
    for number, session in enumerate(sessions):
        session.ask(f"CREATE TEMP TABLE own AS SELECT {number} AS n; PREPARE mine AS SELECT n * 2 FROM own; SET kip.number = {number}")
        # Each leaves a transaction open, with a lock and a row that others do not see.
        session.ask(f"BEGIN; SELECT pg_advisory_xact_lock({number}); INSERT INTO shared VALUES ({number})")
    for _ in range(SLEEPS):
        put_to_sleep(proc)
        for number, session in enumerate(sessions):
            assert session.ask("EXECUTE mine") == [str(number * 2)]
            assert session.ask("SHOW kip.number") == [str(number)]
            assert session.ask("SELECT n FROM shared") == [str(number)], "its own row, and none that is not committed"
            assert session.ask("SELECT pg_backend_pid()") == pids[number]
        woke(proc, engine)
        proc.hibernate_once()
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
    assert sessions[0].ask(locks) == [str(count)]
    for session in sessions:
        session.ask("COMMIT")
    assert sessions[0].ask("SELECT count(*) FROM shared") == [str(count)]


class WebSocket:
    """RFC 6455, short messages only."""

    def __init__(self, port: int):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET / HTTP/1.1\r\nHost: kip\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.reader = self.socket.makefile("rb")
        assert b" 101 " in self.reader.readline()
        while self.reader.readline() != b"\r\n":
            pass

    def ask(self, text: str) -> str:
        mask, words = os.urandom(4), text.encode()
        self.socket.sendall(bytes([0x81, 0x80 | len(words)]) + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(words)))
        head = self.reader.read(2)
        assert head[:1] == b"\x81" and head[1] < 126, head
        return self.reader.read(head[1]).decode()


def node_sleeps(kip: Kip, engine: str, tmp_path: Path, count: int) -> None:
    if not MODULES.exists():
        pytest.skip("scripts/setup could not install Node's modules")
    files = {"srv/watched.js": programs.SOURCES / "watched.js", "srv/watched/": "", **modules("ws")}
    tar = programs.tarball(tmp_path / "watched.tar", files)
    proc = kip.run("watched", ["node", "/srv/watched.js", "8000", "/srv/watched"], ports=[8000], tar=tar, flags=["--never-sleep"])
    sockets = [WebSocket(proc.port()) for _ in range(count)]
    for number, client in enumerate(sockets):
        assert client.ask(f"first-{number}") == f"{number} nothing "
    before = [f"first-{number}" for number in range(count)]
    files_seen: list[str] = []
    for cycle in range(SLEEPS):
        put_to_sleep(proc)
        for number, client in enumerate(sockets):
            assert client.ask(f"cycle-{cycle}-{number}") == f"{number} {before[number]} {','.join(files_seen)}"
            before[number] = f"cycle-{cycle}-{number}"
        woke(proc, engine)
        proc.exec("touch", f"/srv/watched/file-{cycle}")
        files_seen.append(f"file-{cycle}")

        def is_seen() -> bool:
            answer = sockets[0].ask("look")
            before[0] = "look"
            return answer.endswith(",".join(files_seen))

        wait_for("the change is seen", is_seen, 20)
    assert http_get(proc.port()) == f"{count}\n".encode()


# promise waking: PostgreSQL with a hundred sessions (in the soak; a dozen else), each with a
#   transaction, a temporary table, a prepared statement and a lock, parked and hibernated, and Node
#   with `fs.watch` and sixty WebSockets, each by plan and by CRIU: each session is as it was
# held by: this, `tests/test_sessions.py::test_node_with_many_websockets`
@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", SESSIONS)
@pytest.mark.parametrize("engine", ENGINES)
def test_postgres_with_many_sessions(fresh_kip: Callable[..., Kip], tmp_path: Path, engine: str, count: int) -> None:
    postgres_sleeps(daemon_of(fresh_kip, engine), engine, tmp_path, count)


@pytest.mark.parametrize("engine", ENGINES)
def test_node_with_many_websockets(fresh_kip: Callable[..., Kip], tmp_path: Path, engine: str) -> None:
    node_sleeps(daemon_of(fresh_kip, engine), engine, tmp_path, SOCKETS)
