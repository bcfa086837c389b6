"""Procs that are copied while they run: `kip clone`, `kip checkpoint` and templates of one moment, which the program does not
notice."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness import logged, servers
from harness.clients import Redis
from harness.kip import Kip, Proc
from harness.programs import SOURCES
from harness.wait import wait_for

# Of the sweeper's memory, MiB, all of which it writes anew within some ten milliseconds.
SIZE = 48


def sweeper(kip: Kip, *options: str, size: int = SIZE, flags: tuple[str, ...] = ()) -> Proc:
    command = ["/usr/bin/python3", "/srv/sweeper.py", str(size), *options]
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
@pytest.mark.parametrize("options", [(), ("adopts",), ("fifo",)], ids=["", "adopts", "CRIU wakes"])
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


# Milliseconds that the daemon waits before it copies what no clone has asked for.
BEHIND = 8000
# Enough to be copied behind a clone, MiB.
SMALL = 16


@pytest.fixture
def slow(fresh_kip: Callable[..., Kip]) -> Kip:
    """A daemon in which memory is copied long after its clone runs."""
    kip = fresh_kip(start=False)
    kip.up("--fault-at", f"copy-behind:{BEHIND}")
    return kip


def cloning(proc: Proc, name: str) -> tuple[Proc, Future[Any]]:
    """A clone that runs, and its command, which has not ended."""
    command = ThreadPoolExecutor(1).submit(proc.kip.cli, "clone", proc.name, name, check=False)
    made = Proc(proc.kip, name)
    wait_for("the clone runs", lambda: name in proc.kip.names() and made.state == "running", 20)
    assert not command.done()
    return made, command


# promise clones: a clone of a source that runs answers before most of its memory is copied: what it
#   needs comes first; what is done with it meanwhile is as at any other time
@pytest.mark.parametrize("meanwhile", ["nothing", "hibernate", "sleep", "clone", "checkpoint", "restart"])
def test_a_clone_answers_before_its_memory_is_copied(slow: Kip, meanwhile: str) -> None:
    proc = sweeper(slow, size=SMALL)
    made, command = cloning(proc, "made")
    match meanwhile:
        case "hibernate" | "sleep":
            # It is at work all the time, and is woken at once.
            slow.cli("sleep", "made", *(["--to", "hibernated"] if meanwhile == "hibernate" else []))
        case "clone":
            slow.cli("clone", "made", "again", "--asleep")
        case "checkpoint":
            slow.cli("checkpoint", "made", "--tag", "t")
        case "restart":
            slow.cli("restart", "made")
        case _:
            pass
    if meanwhile in ("nothing", "hibernate"):
        assert said(made).startswith("sound, zeros")
        assert not command.done()
    assert command.result(60).returncode == 0
    others = {"clone": ["again"], "checkpoint": ["of-t"]}.get(meanwhile, [])
    if meanwhile == "checkpoint":
        slow.cli("clone", "made@t", "of-t")
    for one in (proc, made, *(Proc(slow, name) for name in others)):
        assert said(one).startswith("sound"), one.name
    slow.cli("sleep", "made")
    assert said(made).startswith("sound")
    assert not was_parked(proc)


# promise clones: a clone that CRIU has to wake has the memory of its source at once, as any other
# held by: this, `tests/test_copied_running.py::test_memory_of_one_moment`
def test_a_clone_that_criu_wakes_before_its_memory_is_copied(slow: Kip) -> None:
    proc = sweeper(slow, "fifo", size=SMALL)
    made, command = cloning(proc, "made")
    assert said(made).startswith("sound, zeros") and not command.done()
    assert command.result(60).returncode == 0
    assert not made.rebuilt() and said(made).startswith("sound")
    kinds = [event["kind"] for event in slow.events() if event["name"] == "made"]
    assert "refused" not in kinds and kinds.count("woken") == 1


# promise clones: a clone that cannot be woken is not made, and the command says why
def test_a_clone_that_does_not_wake_is_not_made(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip(start=False)
    kip.expected += [r"no plan of the next wake proc=made"]
    kip.up("--fault-at", "clone-published:4000")
    proc = sweeper(kip, "fifo")
    command = ThreadPoolExecutor(1).submit(kip.cli, "clone", "sweeper", "made", check=False)
    images = kip.data / "procs/made/gen-1"
    wait_for("the clone has its name", images.exists, 20)
    (images / "checkpoint.tar").write_bytes(b"damaged")
    done = command.result(60)
    assert done.returncode == 1 and "clones of sweeper cannot be made: made cannot be woken" in done.stderr, done
    assert done.stderr.count("\n") == 1 and kip.names() == ["sweeper"] and not (kip.data / "procs/made").exists()
    assert said(proc).startswith("sound")


# promise clones: the pager alone gives a clone what it needs of memory that is still copied; a
#   pager that dies meanwhile is replaced by one that asks the daemon for it
@pytest.mark.parametrize("killed", [False, True], ids=["", "pager killed"])
def test_the_daemon_has_no_part_in_the_faults_of_a_clone(slow: Kip, killed: bool) -> None:
    slow.expected += [*logged.PAGER_KILLED] if killed else []
    proc = sweeper(slow, size=SMALL)
    made, command = cloning(proc, "made")
    info, port = slow.info(), made.port()
    if killed:
        os.kill(info["pager_pid"], signal.SIGKILL)
        wait_for("another pager", lambda: slow.info()["pager_pid"] not in (0, None, info["pager_pid"]), 20)
        assert said(made).startswith("sound, zeros")
    else:
        os.kill(slow.daemon.pid, signal.SIGSTOP)
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                assert client.makefile().readline().startswith("sound, zeros")
        finally:
            os.kill(slow.daemon.pid, signal.SIGCONT)
    assert not command.done()
    assert command.result(60).returncode == 0
    assert said(made).startswith("sound") and said(proc).startswith("sound, kept")


# promise clones: a clone that is removed before its memory is copied is gone, and its source goes
#   on
def test_a_clone_is_removed_before_its_memory_is_copied(slow: Kip) -> None:
    proc = sweeper(slow, size=SMALL)
    made, command = cloning(proc, "made")
    made.remove()
    command.result(60)
    assert slow.names() == ["sweeper"] and said(proc).startswith("sound, kept")


# promise clones: a clone that is removed before its memory is copied takes no other one along
def test_one_of_several_clones_is_removed_before_their_memory_is_copied(slow: Kip) -> None:
    proc = sweeper(slow, size=SMALL)
    command = ThreadPoolExecutor(1).submit(slow.cli, "clone", "sweeper", "made", "--count", "2", check=False)
    one, other = Proc(slow, "made-1"), Proc(slow, "made-2")
    wait_for("both run", lambda: len(slow.names()) == 3 and one.state == other.state == "running", 20)
    assert not command.done()
    one.remove()
    # What its program does with its files meanwhile is no concern of the daemon's.
    other.exec("sh", "-c", "mkfifo /etc/hosts.new && mv /etc/hosts.new /etc/hosts && rm -rf /usr/share/none")
    assert command.result(60).returncode == 0, command.result()
    assert slow.names() == ["made-2", "sweeper"] and said(other).startswith("sound") and said(proc).startswith("sound, kept")


# promise clones: clones whose memory cannot be copied to its end are not made, which is said
@pytest.mark.parametrize("asked", [False, True], ids=["", "asked"])
def test_a_clone_whose_memory_is_lost_is_not_made(slow: Kip, asked: bool) -> None:
    slow.expected += [r"memory of a clone cannot be copied", r"memory of its source was not copied"]
    server = servers.redis()
    proc = slow.run("redis", server.command, ports=server.published, flags=["--never-sleep"])
    client, keys = Redis(proc.port()), [f"key:{i}" for i in range(20_000)]
    client.ask_all([("SET", key, b"%d " % len(key) * 500) for key in keys])
    made, command = cloning(proc, "made")
    copies = [pid for pid in proc.inspect()["pids"] if Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"]
    assert copies
    for copy in copies:
        os.kill(copy, signal.SIGKILL)
    if asked:
        # It waits for pages that do not come any more, and is ended.
        with pytest.raises((OSError, AssertionError)):
            Redis(made.port()).ask_all([("GET", key) for key in keys])
    done = command.result(60)
    assert done.returncode == 1 and "clones of redis cannot be made: redis cannot be copied: memory that its clone needs was lost" in done.stderr, done
    assert slow.names() == ["redis"] and client.ask_all([("GET", key) for key in keys]) == [b"%d " % len(key) * 500 for key in keys]
    assert not was_parked(proc)


# promise clones: a clone whose command was cut off by the end of the daemon is not made
@pytest.mark.parametrize("step", [f"copy-behind:{10 * BEHIND}", "clone-filled"])
def test_the_daemon_is_killed_while_memory_is_copied(fresh_kip: Callable[..., Kip], step: str) -> None:
    kip = fresh_kip(start=False)
    kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_GONE]
    kip.up("--fault-at", step)
    proc = sweeper(kip, size=SMALL)
    if step == "clone-filled":
        kip.cli("clone", "sweeper", "made", check=False)
        assert kip.wait_dead(30) == -signal.SIGKILL
    else:
        _, command = cloning(proc, "made")
        kip.kill()
        assert command.result(60).returncode == 1
    kip.up()
    assert kip.names() == ["sweeper"]
    again, _ = clone(proc, "again")
    assert said(again).startswith("sound, zeros") and said(proc).startswith("sound, kept")


# promise clones: a clone whose command was cut off by the end of the machine is not made, whatever
#   the file system has kept of it
@pytest.mark.parametrize("lost", ["", "spec.json", "state.json"])
def test_the_machine_stops_while_memory_is_copied(fresh_kip: Callable[..., Kip], lost: str) -> None:
    kip = fresh_kip(start=False)
    kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_GONE]
    kip.up("--fault-at", f"copy-behind:{10 * BEHIND}")
    proc = sweeper(kip, size=SMALL)
    _, command = cloning(proc, "made")
    kip.kill()
    assert command.result(60).returncode == 1
    if lost:
        # Written, and not synced yet: a file system has the name, and nothing in it.
        (kip.data / "procs/made" / lost).write_bytes(b"")
    kip.reboot()
    assert kip.names() == ["sweeper"] and not (kip.data / "procs/made").exists()
    proc.start(ready=True)
    again, _ = clone(proc, "again")
    assert said(again).startswith("sound") and said(proc).startswith("sound")
