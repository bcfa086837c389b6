"""`kip update`: limits, times, ports, labels, the restart policy and the way to end change while a proc exists, in whatever tier it is,
and nothing wakes it for that."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from harness import servers, logged
from harness.clients import Redis, free_port, listens
from harness.kip import Kip, Proc
from harness.wait import wait_for
from test_api import local

MIB = 1 << 20
STAYS = ["--idle", "1h", "--park-after", "1h", "--archive-after", "1h"]


def redis(kip: Kip, name: str = "redis", flags: list[str] = STAYS) -> Proc:
    server = servers.redis()
    return kip.run(name, server.command, ports=server.published, flags=flags)


def woken(kip: Kip, name: str) -> int:
    return sum(event["kind"] == "woken" and event["name"] == name for event in kip.events())


def fill(proc: Proc, mib: int) -> None:
    """Values that do not compress, in one connection each time: the server may end in the middle."""
    client = Redis(proc.port())
    for i in range(mib):
        client.ask("SET", f"value{i}", b"x" * MIB)
    client.socket.close()


def ends_for_memory(proc: Proc, limit_mib: int) -> None:
    """It takes more than its limit."""
    with pytest.raises((AssertionError, OSError)):
        fill(proc, 4 * limit_mib)
    view = wait_for(f"{proc.name} has ended", lambda: (v := proc.inspect())["state"] == "stopped" and v, 30)
    assert view["exit"] == "signal 9, out of memory", view["exit"]


# promise life: `kip update` changes limits, times, labels, the restart policy and the way to end in
#   every tier; it wakes no proc, and what it has changed outlives the daemon
# held by: this, `kip_api::api::a_proc_is_updated`
@pytest.mark.smoke
def test_in_every_tier(archiving: Kip) -> None:
    kip = archiving
    kip.expected += logged.DAEMON_KILLED
    proc = redis(kip)
    Redis(proc.port()).ask("SET", "key", "value")
    ways: dict[str, Callable[[], Any]] = {
        "running": proc.wake, "hibernated": proc.hibernate, "parked": proc.sleep, "archived": proc.archive,
    }  # fmt: skip
    for number, (state, go) in enumerate(ways.items()):
        go()
        before = woken(kip, "redis")
        memory = (100 + number) * MIB
        words = ["--mem", str(memory), "--cpus", "0.7", "--pids", str(500 + number), "--idle", f"{50 + number}m"]
        words += ["--restart", "always", "--stop-signal", "INT", "--stop-grace", "3s", "-l", f"tier={state}", "-l", f"{state}"]
        told = kip.cli("update", "redis", *words).stdout
        assert told == "redis updated\n"
        view = proc.inspect()
        assert view["state"] == state and woken(kip, "redis") == before, view
        spec = view["spec"]
        limits = spec["limits"]
        assert (limits["memory_bytes"], limits["cpus"], limits["pids"]) == (memory, 0.7, 500 + number)
        assert spec["timing"]["idle_ms"] == (50 + number) * 60_000 and spec["timing"]["park_after_ms"] == 3_600_000
        assert (spec["restart"], spec["stop_signal"], spec["stop_grace_ms"]) == ("always", "INT", 3000)
        assert spec["labels"]["tier"] == state and len(spec["labels"]) == number + 2
    changed = [event["detail"] for event in kip.events() if event["kind"] == "updated"]
    assert len(changed) == 4 and f"limits.memory_bytes {100 * MIB} -> {101 * MIB}" in changed[1], changed
    assert kip.cli("ps", "-q", "--filter", "label=tier=archived").stdout == "redis\n"

    kip.kill()
    kip.up()
    assert proc.inspect()["spec"] == view["spec"] and proc.state == "archived"
    assert "mem" in kip.cli("export", "redis").stdout
    assert Redis(proc.port()).ask("GET", "key") == b"value"
    kip.cli("update", "redis", "--mem", "0", "--cpus", "0", "--label-rm", "tier", "--label-rm", "nothing", "--idle", "59m")
    spec = proc.inspect()["spec"]
    assert spec["limits"]["memory_bytes"] is None and spec["limits"]["cpus"] is None
    assert "tier" not in spec["labels"] and len(spec["labels"]) == 4


# promise life: a memory limit that `kip update` sets holds at once, and for a sleeper after its
#   wake; one below the memory that the proc has is refused, and nothing is changed
@pytest.mark.parametrize("state", ["running", "hibernated", "parked"])
def test_memory(kip: Kip, state: str) -> None:
    proc = redis(kip)
    fill(proc, 24)
    if state != "running":
        proc.hibernate() if state == "hibernated" else proc.sleep()
    before = proc.inspect()["spec"]
    refused = kip.refused("update", "redis", "--mem", "16M", "--idle", "7s")
    assert "16 MiB" in refused and "redis" in refused, refused
    assert proc.inspect()["spec"] == before and proc.state == state
    kip.cli("update", "redis", "--mem", "64M")
    assert proc.state == state
    ends_for_memory(proc, 64)


def test_without_the_limit_it_goes_on(kip: Kip) -> None:
    """The limit is lifted for a proc that would be ended otherwise, asleep or awake."""
    for state in ("running", "parked"):
        proc = redis(kip, state, [*STAYS, "--mem", "32M"])
        if state == "parked":
            proc.sleep()
        kip.cli("update", state, "--mem", "0")
        fill(proc, 64)
        assert proc.state == "running"


# promise life: times that `kip update` changes count from when the proc fell idle or asleep
def test_times(kip: Kip) -> None:
    proc = redis(kip)
    kip.cli("update", "redis", "--idle", "300ms")
    proc.wait_state("hibernated")
    kip.cli("update", "redis", "--never-sleep", "on", "--park-after", "300ms")
    proc.wake()
    kip.cli("sleep", "redis", "--to", "hibernated")
    kip.cli("update", "redis", "--tick", "61s")
    assert proc.state == "hibernated"
    kip.cli("update", "redis", "--never-sleep", "off")
    proc.wait_state("parked")
    timing = proc.inspect()["spec"]["timing"]
    assert (timing["idle_ms"], timing["park_after_ms"], timing["tick_ms"]) == (300, 300, 61_000), timing


# promise life: the daemon is killed in the middle of an update: the new limits hold after the next
#   start
def test_killed_in_the_middle(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip(start=False)
    kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_GONE]
    kip.up("--fault-at", "update-written")
    proc = redis(kip)
    kip.cli("update", "redis", "--mem", "64M", check=False)
    assert kip.wait_dead(30) == -signal.SIGKILL
    kip.up()
    assert proc.inspect()["spec"]["limits"]["memory_bytes"] == 64 * MIB
    ends_for_memory(proc, 64)


# promise life: what an update cannot have is refused with one line, and nothing is changed
def test_refused(kip: Kip) -> None:
    proc = redis(kip)
    before = proc.inspect()["spec"]
    for words, says in [
        (["--mem", "5"], "too small"),
        (["--pids", "1"], "too small"),
        (["--cpus", "0.001"], "too small"),
        (["--stop-signal", "NOTHING"], "signal"),
        (["--never-sleep", "on", "--idle-dry-run", "on"], "never-sleep"),
        ([], "nothing"),
    ]:
        refused = kip.refused("update", "redis", *words)
        assert says in refused, refused
    assert "no proc" in kip.refused("update", "redi", "--idle", "5s")
    done = kip.cli("update", "nobody", "redis", "-l", "a=b", check=False)
    assert (done.returncode, done.stdout) == (1, "redis updated\n"), done
    for body in ({"image": "host"}, {"limits": {"disk_bytes": 1 << 30}}, {"env": {"A": "b"}}, {"timing": {"idle": 1}}):
        status, _, answer = local(kip, "PATCH", "/v1/procs/redis", body)
        refusal = json.loads(answer)
        assert (status, refusal["code"]) == (400, "invalid") and "kip apply --replace" in refusal["hint"], refusal
    before["labels"] = {"a": "b"}
    after = proc.inspect()["spec"]
    after.pop("asked"), before.pop("asked")
    assert after == before


def test_a_stopped_proc(kip: Kip) -> None:
    """The new spec is that of its next start."""
    proc = redis(kip)
    proc.stop()
    kip.cli("update", "redis", "--mem", "64M", "--restart", "no")
    assert proc.state == "stopped"
    proc.start()
    wait_for("it listens", lambda: listens(proc.port()), 30)
    ends_for_memory(proc, 64)


def published(proc: Proc) -> dict[int, int | None]:
    return {port["port"]: port["host_port"] for port in proc.inspect()["ports"]}


# promise life: `kip update --port` and `--port-rm` change what is published in every tier, without
#   a wake or a restart; connections that are open stay, and it outlives the daemon
@pytest.mark.smoke
def test_ports(archiving: Kip) -> None:
    kip = archiving
    kip.expected += logged.DAEMON_KILLED
    proc = redis(kip)
    stays = Redis(proc.port())
    ways: dict[str, Callable[[], Any]] = {
        "running": proc.wake, "hibernated": proc.hibernate, "parked": proc.sleep, "archived": proc.archive,
    }  # fmt: skip
    for state, go in ways.items():
        if state == "archived":  # with a connection a proc is not archived by request
            stays.socket.close()
        before, other = proc.port(), free_port()
        go()
        wakes, pids = woken(kip, "redis"), proc.inspect()["pids"]
        kip.cli("update", "redis", "--port", f"{other}:6379")
        assert not listens(before) and proc.state == state
        assert published(proc) == {6379: other} and (woken(kip, "redis"), proc.inspect()["pids"]) == (wakes, pids)
        kip.kill()
        kip.up()
        assert published(proc) == {6379: other} and proc.state == state
        assert Redis(other).ask("PING") == "PONG"
        if state != "archived":
            assert stays.ask("PING") == "PONG"
        with socket.create_server(("127.0.0.1", before)):
            pass  # the port is free for others
    kip.cli("update", "redis", "--port-rm", "6379", "-p", "6380,private")
    assert published(proc) == {6380: None} and not listens(other)
    kip.cli("stop", "redis")
    kip.cli("update", "redis", "--port", "6379", "--port-rm", "6380")
    proc.start(ready=True)
    assert Redis(proc.port()).ask("PING") == "PONG"


# promise life: a port that `kip update` cannot have is refused with one line, and all are as before
def test_ports_that_are_refused(kip: Kip) -> None:
    redis(kip, "other")
    proc = redis(kip)
    taken, before = Proc(kip, "other").port(), published(proc)
    for words, says in [
        (["-p", f"{taken}:6379"], f"port {taken} is taken by proc other"),
        (["-p", f"{taken}:80", "--mem", "512M"], "is taken by proc other"),
        (["--port-rm", "81"], "redis has no tcp port 81"),
        (["-p", "8080:80", "-p", "8080:81"], "8080 is asked for twice"),
        (["-p", "192.0.2.1::80"], "no address"),
        (["-p", "53/udp"], "port 53"),
    ]:
        line = kip.refused("update", "redis", *words)
        assert says in line and "cannot start" not in line, line
        view = proc.inspect()
        assert published(proc) == before and view["spec"]["limits"]["memory_bytes"] is None
        assert Redis(proc.port()).ask("PING") == "PONG"
    # At one address instead of all, and back.
    kip.cli("update", "redis", "-p", f"127.0.0.1:{before[6379]}:6379")
    kip.cli("update", "redis", "-p", f"{before[6379]}:6379")
    assert published(proc) == before and Redis(proc.port()).ask("PING") == "PONG"


# promise files: `kip apply` changes ports in place
def test_apply_changes_ports_in_place(kip: Kip, tmp_path: Path) -> None:
    file, first, second = tmp_path / "kip.toml", free_port(), free_port()
    command = 'command = ["redis-server", "--save", "", "--protected-mode", "no"]\nwait-ready = true\n'

    def apply(*ports: str) -> str:
        file.write_text(f"[proc.redis]\n{command}port = {list(ports)}\n")
        (change,) = json.loads(kip.cli("apply", "-f", file, "--json").stdout)["changes"]
        return str(change["action"])

    assert apply(f"{first}:6379") == "create"
    proc = Proc(kip, "redis")
    Redis(first).ask("SET", "key", "value")
    proc.sleep()
    assert apply("6380,private", f"{second}:6379") == "update"
    assert apply(f"{second}:6379", "6380,private") == "same"
    assert proc.state == "parked" and published(proc) == {6379: second, 6380: None}
    assert Redis(second).ask("GET", "key") == b"value"
    assert apply(f"{second}:6379") == "update" and published(proc) == {6379: second}


# promise life: the daemon is killed in the middle of an update of ports: the new ones lead to the
#   proc after the next start, and those that it has no more are free; its program may have ended
#   meanwhile
@pytest.mark.parametrize("ends", [False, True], ids=["runs", "ends"])
@pytest.mark.parametrize("step", ["update-written", "update-ports"])
def test_killed_in_the_middle_of_ports(fresh_kip: Callable[..., Kip], step: str, ends: bool) -> None:
    kip = fresh_kip(start=False)
    kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_GONE]
    kip.up("--fault-at", step)
    first, port, goes = free_port(), free_port(), free_port()
    server = servers.redis()
    ports = [f"{first}:6379", f"{goes}:6390"]
    proc = kip.run("redis", server.command, ports=ports, wait_ready=False, flags=[*STAYS, "--restart", "always"])
    pids = wait_for("it listens", lambda: listens(first) and proc.inspect()["pids"], 30)
    kip.cli("update", "redis", "-p", f"{port}:6379", "-p", "6380,private", "--port-rm", "6390", check=False)
    assert kip.wait_dead(30) == -signal.SIGKILL
    if ends:
        for pid in pids:
            with suppress(ProcessLookupError):  # the end of its pid 1 is that of the others
                os.kill(pid, signal.SIGKILL)
    kip.up()
    # One that is started again shows its ports when it has them all.
    wait_for("it has its ports", lambda: published(proc) == {6379: port, 6380: None} and listens(port), 30)
    assert Redis(port).ask("PING") == "PONG"
    for free in (first, goes):
        with socket.create_server(("", free)):
            pass


# promise life: ports of a proc that is about to be started again are not changed: it starts on
#   those that it has
def test_ports_between_two_starts(kip: Kip) -> None:
    port = free_port()
    proc = kip.run("ends", ["sh", "-c", "exit 3"], ports=[f"{port}:80"], wait_ready=False, flags=["--restart", "always"])
    # Its pauses become longer: 10 s and more.
    wait_for("it is between two starts", lambda: (v := proc.inspect())["state"] == "restarting" and v["restarts"] > 6, 60)
    before = proc.inspect()["spec"]
    done = kip.cli("update", "ends", "-p", f"{free_port()}:80", check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and "ends is about to be started again, on the ports that it has" in lines[0], done
    assert "`kip stop ends` first, or try again when it runs" in done.stderr, done
    assert proc.inspect()["spec"] == before and published(proc) == {80: port}
    # What is no port changes.
    kip.cli("update", "ends", "--idle", "7s")
    kip.cli("stop", "ends")
    kip.cli("update", "ends", "-p", f"{free_port()}:80")
