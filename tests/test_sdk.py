"""Conformance of the SDKs: the same table of calls has the same answers through each of them, in a real proc, in each tier."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.clients import Lines, listens
from harness.kip import Kip, Proc
from harness.programs import SOURCES, example
from harness.wait import wait_for
from test_tree import clear, ls, put

SDK = SOURCES.parents[1] / "sdk" / "python" / "kip"
PYTHON = ["-v", f"{SOURCES / 'runtime_calls.py'}:/srv/calls.py:ro", "-v", f"{SDK}:/srv/kip:ro"]
FAILED, TOO_LARGE, INVALID, NOT_FOUND, EXISTS, CONDITION = 0, 2, 5, 6, 7, 8
CREATED, WRITTEN, REMOVED, MOVED = range(4)
EXITED, KILLED, EVICTED = range(3)


def python(kip: Kip, client: str) -> Proc:
    return kip.run("calls", ["/usr/bin/python3", "/srv/calls.py", "8080", client], ports=["8080"], flags=[*PYTHON, "--never-sleep", "--tree", "write", "--spawn", "4"])


def rust(kip: Kip) -> Proc:
    program = ["-v", f"{example('conform')}:/srv/conform:ro"]
    return kip.run("calls", ["/srv/conform", "8080"], ports=["8080"], flags=[*program, "--never-sleep", "--tree", "write", "--spawn", "4"])


SDKS: dict[str, Callable[[Kip], Proc]] = {
    "python": lambda kip: python(kip, "sync"),
    "asyncio": lambda kip: python(kip, "asyncio"),
    "rust": rust,
}
TIERS: dict[str, Callable[[Proc], object]] = {
    "running": lambda proc: None,
    "hibernated": Proc.hibernate,
    "parked": Proc.sleep,
    "archived": Proc.archive,
}


class Calls:
    """What is asked of a program that asks Kip."""

    def __init__(self, proc: Proc):
        self.proc = proc

    def __call__(self, call: str, path: str | None = None, **named: Any) -> Any:
        lines = Lines(self.proc.port())
        try:
            answer = json.loads(lines.ask(json.dumps({"call": call, **({"path": path} if path else {}), **named})))
        finally:
            lines.close()
        return answer["ok"] if "ok" in answer else ("error", answer["error"])


def fails(code: int) -> tuple[str, int]:
    return ("error", code)


@pytest.fixture
def kip(kip: Kip) -> Iterator[Kip]:
    """Its tree is empty again after each test."""
    yield kip
    kip.remove_all()
    clear(kip, "/")


def table(call: Calls, name: str) -> None:
    """Each call with its answer, and each kind of error that a client can cause."""
    assert call("whoami") == {"name": name, "realm": "default", "clone_count": 1}
    made = call("mkdir", "/a")
    assert made == {"path": "/a", "directory": True, "size": 0, "version": made["version"], "created": made["version"], "lease": None}
    file = call("put", "/a/b", text="text")
    assert (file["size"], file["directory"], file["version"]) == (4, False, file["created"])
    assert call("get", "/a/b") == "text" and call("stat", "/a/b") == file
    assert call("put", "/a/b", text="other", new=True) == fails(EXISTS)
    assert call("put", "/a/b", text="other", version=file["version"] - 1) == fails(CONDITION)
    assert call("get", "/a/b") == "text"
    again = call("put", "/a/b", text="other", version=file["version"])
    assert again["created"] == file["created"] and again["version"] > file["version"]
    assert call("put", "/a/big", text="x", times=1 << 20)["size"] == 1 << 20
    assert call("get", "/a/big") == "x" * (1 << 20)
    assert call("put", "/a/big", text="x", times=(1 << 20) + 1) == fails(TOO_LARGE)
    assert call("ls", "/a") == ["/a/b", "/a/big"]
    fence = {"path": "/a/b", "epoch": file["created"]}
    assert call("mkdir", "/a/c", fence=fence)["directory"]
    assert call("mkdir", "/a/d", fence={**fence, "epoch": file["created"] + 1}) == fails(CONDITION)
    assert call("mv", "/a/b", to="/a/c/b")["path"] == "/a/c/b"
    assert call("mv", "/a/none", to="/a/x") == fails(NOT_FOUND)
    assert call("mkdir", "/a/d", fence=fence) == fails(CONDITION)
    assert call("rm", "/a/c") == fails(CONDITION)
    assert call("rm", "/a/c/b", version=1) == fails(CONDITION)
    assert call("rm", "/a/c/b") is None and call("rm", "/a/c/b") == fails(NOT_FOUND)
    assert call("get", "/a") == fails(CONDITION) and call("stat", "/a//b") == fails(INVALID)
    lease = call("grant", ttl_ms=30_000)
    assert lease["ttl_ms"] == 30_000 and lease in call("leases")
    assert call("put", "/a/leased", text="", lease=lease["id"])["lease"] == lease["id"]
    assert call("keep", lease=lease["id"]) == lease
    assert call("revoke", lease=lease["id"]) is None and call("stat", "/a/leased") == fails(NOT_FOUND)
    assert call("keep", lease=lease["id"]) == fails(NOT_FOUND) and call("grant", ttl_ms=0) == fails(INVALID)
    child = call("spawn", command=["/bin/sh", "-c", "exit $#", "sh", "", "x"])
    assert call("wait_exit", name=child) == {"why": EXITED, "exit_code": 2, "signal": None, "status": None, "message": ""}
    assert call("wait_start", name=child) == {"name": child, "started": True, "evicted": None}
    child = call("spawn", command=["sleep", "1000"])
    assert call("wait_start", name=child)["started"] and call("evict", name=child, reason="enough")["evicted"] == "enough"
    assert call("wait_exit", name=child) == {"why": EVICTED, "exit_code": None, "signal": 15, "status": None, "message": "enough"}
    assert call("wait_exit", name="none-0000000000") == fails(NOT_FOUND) and call("spawn", command=[]) == fails(INVALID)
    assert call("started") == call("exited", status=1) == call("wait_evict") == fails(NOT_FOUND)
    assert call("watch", "/a") is None
    call("put", "/a/1", text="")
    call("put", "/a/1", text="1")
    call("mv", "/a/1", to="/a/2")
    call("rm", "/a/2")
    seen = [call("next", "/a") for _ in range(4)]
    assert seen[:2] == [[[CREATED, "/a/1"]], [[WRITTEN, "/a/1"]]] and seen[3] == [[REMOVED, "/a/2"]], seen
    assert [MOVED, "/a/2"] in seen[2], seen


# promise runtime: each SDK gives the same answers to the same calls, before and after a sleep in
#   each tier, and a watch of before the sleep goes on
@pytest.mark.parametrize("sdk", SDKS)
@pytest.mark.parametrize("tier", TIERS)
def test_conformance(kip: Kip, sdk: str, tier: str) -> None:
    proc = SDKS[sdk](kip)
    wait_for("it listens", lambda: listens(proc.port()), 20)
    call = Calls(proc)
    assert call("mkdir", "/before")["directory"] and call("watch", "/before") is None
    TIERS[tier](proc)
    put(kip, "/before/x", "from outside")
    assert call("next", "/before") == [[CREATED, "/before/x"]]
    assert call("get", "/before/x") == "from outside"
    table(call, proc.name)
    assert ls(kip) == ["a/", "before/"]
