"""Procs that are copied while they run: `kip clone`, `kip checkpoint` and templates of one moment, which the program does not
notice."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from harness import servers
from harness.clients import Redis
from harness.kip import Kip, Proc
from harness.programs import SOURCES

# Of the sweeper's memory, MiB, all of which it writes anew within some ten milliseconds.
SIZE = 48


def sweeper(kip: Kip, *options: str, flags: tuple[str, ...] = ()) -> Proc:
    command = ["/usr/bin/python3", "/srv/sweeper.py", str(SIZE), *options]
    source = f"{SOURCES / 'sweeper.py'}:/srv/sweeper.py:ro"
    proc = kip.run("sweeper", command, ports=["8080"], flags=["-v", source, "--never-sleep", *flags])
    assert said(proc).startswith("sound")
    return proc


def said(proc: Proc) -> str:
    with socket.create_connection(("127.0.0.1", proc.port()), timeout=60) as client:
        return client.makefile().readline().strip()


def clone(proc: Proc, *words: str) -> tuple[Proc, dict[str, Any]]:
    made = proc.kip.json("clone", proc.name, *words)
    return Proc(proc.kip, made["clones"][0]["name"]), made


def was_parked(proc: Proc) -> bool:
    return (proc.inspect()["last_wake"] or {}).get("trigger") in ("clone", "checkpoint")



# promise clones: the memory of a clone is of one moment, though its source goes on to write while
#   that is copied; the source is not parked for it, however much memory it has, finds no child that
#   it has not made, and handles signals as before; memory that a fork wipes is zeros in a clone
# held by: this, `tests/test_copied_running.py::test_a_checkpoint_of_one_moment`
@pytest.mark.parametrize("options", [(), ("adopts",)], ids=["", "adopts"])
def test_memory_of_one_moment(kip: Kip, options: tuple[str, ...]) -> None:
    proc, clones = sweeper(kip, *options), list[Proc]()
    for turn in range(4):
        made, view = clone(proc, *(["--asleep"] if turn == 3 else []))
        clones.append(made)
        assert 0 < view["still_us"] < view["total_us"]
        assert said(made).startswith("sound, zeros"), turn
        assert said(proc).startswith("sound, kept"), turn
    assert not was_parked(proc)
    # What was woken page by page is copied in the same way.
    before = clones[0].inspect()["last_wake"]
    again, _ = clone(clones[0], "again")
    assert clones[0].inspect()["last_wake"] == before
    for one in (again, *clones, proc):
        assert said(one).startswith("sound")


# promise clones: what holds a source's memory while that is copied is not on the account of the
#   source, which has its own limits again afterwards
@pytest.mark.parametrize(
    ("options", "flags"),
    [(("full",), ("--pids", "12")), ((), ("--mem", f"{SIZE + 24}M")), ((), ("--cpus", "0.5"))],
    ids=["processes", "memory", "processors"],
)
def test_limits_are_the_sources_own(kip: Kip, options: tuple[str, ...], flags: tuple[str, ...]) -> None:
    proc = sweeper(kip, *options, flags=flags)
    for _ in range(3):
        made, _ = clone(proc)
        assert not was_parked(proc)
        assert said(made).startswith("sound") and said(proc).startswith("sound")
        assert limits(proc) == limits(made)
        made.remove()


def limits(proc: Proc) -> list[str]:
    """As the program sees them."""
    files = ["pids/pids.max", "memory/memory.limit_in_bytes", "cpu/cpu.cfs_quota_us", "pids.max", "memory.max", "cpu.max"]
    return [line for name in files for line in proc.exec("cat", f"/sys/fs/cgroup/{name}", check=False).stdout.splitlines()]


# promise clones: memory that a source has excepted from forks (madvise(2), MADV_DONTFORK) comes
#   along; one with much of that is parked for its clone
@pytest.mark.parametrize("option", ["apart", "much-apart"])
def test_memory_that_is_excepted_from_forks(kip: Kip, option: str) -> None:
    proc = sweeper(kip, option)
    made, _ = clone(proc)
    assert was_parked(proc) == (option == "much-apart")
    assert said(made).startswith("sound") and said(proc).startswith("sound")


# promise checkpoints: a checkpoint is of one moment, and the proc goes on while it is written
def test_a_checkpoint_of_one_moment(kip: Kip) -> None:
    proc = sweeper(kip)
    kip.cli("checkpoint", "sweeper", "--tag", "t")
    assert not was_parked(proc) and said(proc).startswith("sound")
    kip.cli("clone", "sweeper@t", "other")
    assert said(Proc(kip, "other")).startswith("sound, kept")


# promise clones: what a source that runs has out at that moment stays as it was for its copies,
#   though the source brings it back and puts other pages out there
@pytest.mark.parametrize("tier", ["hibernated", "parked"])
def test_paged_out_memory_stays_of_that_moment(kip: Kip, tier: str) -> None:
    server = servers.redis()
    proc = kip.run("redis", server.command, ports=server.published, flags=["--never-sleep"])
    client, count = Redis(proc.port()), 4000
    client.ask_all([("SET", f"key:{i}", b"%d " % i * 500) for i in range(count)])
    (proc.hibernate if tier == "hibernated" else proc.sleep)()
    # Most of it stays out.
    assert client.ask("GET", "key:7") == b"7 " * 500
    kip.cli("checkpoint", "redis", "--tag", "t")
    kip.cli("clone", "redis", "asleep", "--asleep")
    kip.cli("clone", "redis", "awake")
    for turn in range(2):
        client.ask_all([("SET", f"key:{i}", b"%d-%d " % (turn, i) * 400) for i in range(count)])
        proc.hibernate()
        assert client.ask("GET", "key:8") == b"%d-8 " % turn * 400
    kip.cli("clone", "redis@t", "kept")
    for name in ("asleep", "awake", "kept"):
        of_it = Redis(Proc(kip, name).port())
        assert of_it.ask_all([("GET", f"key:{i}") for i in range(count)]) == [b"%d " % i * 500 for i in range(count)], name
