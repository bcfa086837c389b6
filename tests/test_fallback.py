"""The newest generation of an archived proc is damaged or missing in the store for good: who connects is not left waiting. It starts
cold on its newest files, and the store keeps all that it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import servers
from harness.clients import Redis
from harness.kip import Kip, Proc
from harness.wait import wait_for


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def archiving(fresh_kip: Callable[..., Kip], store: Path) -> Kip:
    kip = fresh_kip("--store", str(store))
    kip.expected += [r"WARN.*its snapshot cannot be used"]
    return kip


def objects(store: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in store.glob("realms/*/**/*") if path.is_file() and path.name != "head"}


def told(kip: Kip, kind: str) -> list[str]:
    return [event["detail"] for event in kip.events() if event["kind"] == kind]


def answers(proc: Proc, *words: str) -> object:
    """Once it answers: what it is reached by is made anew meanwhile."""

    def ask() -> object:
        try:
            return (Redis(proc.port(), timeout=20).ask(*words),)
        except (OSError, AssertionError):
            return None

    return wait_for("it answers", ask, 60)[0]  # type: ignore[index]


def damage(front: Path, how: str) -> None:
    """In what a wake cannot begin without, or all of it."""
    if how == "missing":
        front.unlink()
        return
    whole = front.read_bytes()
    front.write_bytes(whole[:1000] + bytes([whole[1000] ^ 4]) + whole[1001:])


def newest(proc: Proc, store: Path) -> Path:
    id = (proc.kip.data / "procs" / proc.name / "archive-id").read_text().strip()
    return max(store.glob(f"realms/default/procs/{id}/gen-*"), key=lambda path: path.stat().st_mtime_ns)


def slept_twice(kip: Kip, store: Path, *flags: str) -> Proc:
    """A redis with a key and a file of each of two generations, archived."""
    proc = kip.run("redis", servers.redis().command, ports=servers.redis().published, flags=list(flags))
    for turn in ("first", "second"):
        assert Redis(proc.port()).ask("SET", "turn", turn) == "OK"
        proc.exec("sh", "-c", f"echo {turn} > /var/tmp/turn; echo x > /var/tmp/{turn}")
        proc.archive()
    assert len(list(newest(proc, store).parent.glob("gen-*"))) == 2
    return proc


@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_cold(archiving: Kip, store: Path, how: str) -> None:
    proc = slept_twice(archiving, store)
    before, front = objects(store), newest(proc, store)
    damage(front, how)
    assert answers(proc, "GET", "turn") is None, "its memory is lost"
    assert proc.exec("cat", "/var/tmp/turn").stdout == "second\n", "its newest files are there"
    [line] = told(archiving, "cold-start")
    assert "redis cannot be woken: " in line and "starting it cold on its newest files" in line, line
    assert archiving.json("why", "redis")["fell_back"] == line and line in archiving.cli("why", "redis").stdout
    # What is left of it in the store stays there, whatever comes after it, until it is removed.
    proc.archive()
    archiving.cli("snapshot", "gc", check=False)
    after = objects(store)
    assert {path for path in before if path not in after} <= {front}
    assert answers(proc, "PING") == "PONG"
    archiving.cli("stop", "redis")
    archiving.cli("start", "redis")
    assert archiving.json("why", "redis")["fell_back"] is None
    archiving.cli("rm", "--force", "redis")
    assert {one["state"] for one in archiving.json("snapshot", "ls")} <= {"removed"}
    archiving.cli("snapshot", "gc")


def test_by_request_it_is_only_said(archiving: Kip, store: Path) -> None:
    """`kip wake` is refused, so that somebody can put it right first; nothing has begun anew."""
    proc = slept_twice(archiving, store)
    front = newest(proc, store)
    whole = front.read_bytes()
    damage(front, "missing")
    refused = archiving.refused("wake", "redis")
    assert "it stays archived, `kip stop redis` and `kip start redis` start it cold on its newest files" in refused, refused
    assert proc.state == "archived" and not told(archiving, "cold-start")
    front.write_bytes(whole)
    assert answers(proc, "GET", "turn") == b"second"


def test_what_a_wake_needs_of_a_pack_is_missing(archiving: Kip, store: Path) -> None:
    """Its front is whole, but what it leads to is gone and needed before the program can run."""
    archiving.expected += [r"WARN.*(again|left|gone|keeper|made anew)"]
    proc = slept_twice(archiving, store)
    archiving.reboot()
    for pack in store.glob("realms/*/packs/*"):
        pack.unlink()
    assert answers(proc, "GET", "turn") is None
    assert len(told(archiving, "cold-start")) == 1
    assert proc.exec("cat", "/var/tmp/turn").stdout == "second\n"
