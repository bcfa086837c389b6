"""Wakes by plan, by Kip's own restorer: what they take over, and that CRIU does the wake when a plan cannot."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import servers
from harness.clients import Http, Lines, http_get
from harness.kip import Kip, Proc

# Magic, checksum, length of the description.
HEAD = 24
NOT_BY_PLAN = r"WARN .*not rebuilt by plan, CRIU restores it proc="


def plan_of(proc: Proc) -> Path:
    """The plan's file of a sleeper."""
    generation = proc.inspect()["generation"]
    return proc.kip.data / "procs" / proc.name / f"gen-{generation}" / "wake.plan"


@pytest.fixture
def web(kip: Kip, tmp_path: Path) -> Proc:
    server = servers.lighttpd()
    return kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))


def test_a_damaged_plan(web: Proc, kip: Kip) -> None:
    """A flipped bit anywhere in it is found, and CRIU does the wake; the next sleep has a new plan."""
    steady = Http(web.port())
    assert steady.get("/page.html") == servers.PAGE
    kip.expected.append(r"WARN .*the plan of a wake cannot be used proc=")
    for place in (3, 40, 5000, -1):
        web.sleep()
        plan = plan_of(web)
        damaged = bytearray(plan.read_bytes())
        damaged[place] ^= 4
        plan.write_bytes(damaged)
        assert steady.get("/page.html") == servers.PAGE
        assert not web.rebuilt()
    web.sleep()
    assert steady.get("/page.html") == servers.PAGE
    assert web.rebuilt()


def test_no_plan(web: Proc) -> None:
    """It is derived and can be thrown away."""
    web.sleep()
    plan_of(web).unlink()
    assert http_get(web.port(), "/page.html") == servers.PAGE
    assert not web.rebuilt()


def test_what_the_restorer_cannot_do_criu_does(web: Proc, kip: Kip) -> None:
    """A plan that asks for a file that is not there: the restorer fails in the middle and leaves nothing; the same
    sockets go to CRIU's tree."""
    steady = Http(web.port())
    assert steady.get("/page.html") == servers.PAGE
    kip.expected.append(NOT_BY_PLAN)
    for _ in range(2):
        web.sleep()
        plan = plan_of(web)
        content = plan.read_bytes()
        assert content.count(b"/dev/null\0") > 0
        rest = content[HEAD:].replace(b"/dev/null\0", b"/dev/nowh\0")
        plan.write_bytes(content[:8] + struct.pack("<Q", zlib.crc32(rest)) + content[16:HEAD] + rest)
        assert steady.get("/page.html") == servers.PAGE
        assert "helper" in {step["name"] for step in web.inspect()["last_wake"]["steps"]}


def test_a_snapshot_cut_short(web: Proc) -> None:
    """Damage to the generation is damage for both ways; nothing is lost, and once it is whole again it wakes."""
    steady = Http(web.port())
    assert steady.get("/page.html") == servers.PAGE
    web.sleep()
    pages = sorted(plan_of(web).parent.glob("pages-*.img"))[-1]
    content = pages.read_bytes()
    pages.write_bytes(content[:4096])
    message = web.kip.refused("wake", web.name)
    assert pages.name in message, message
    assert web.state == "parked"
    pages.write_bytes(content)
    assert steady.get("/page.html") == servers.PAGE
    assert web.rebuilt()


def test_only_criu(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """`kip up --only-criu`: the other way is not forgotten."""
    kip = fresh_kip("--only-criu")
    server = servers.lighttpd()
    web = kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    steady = Http(web.port())
    for _ in range(3):
        web.sleep()
        assert not plan_of(web).exists()
        assert steady.get("/page.html") == servers.PAGE
        assert not web.rebuilt()


@pytest.mark.parametrize("tier", ["hibernated", "parked"])
def test_the_end_of_one_that_slept_is_told(kip: Kip, tmp_path: Path, tier: str) -> None:
    """Pid 1 is another process after a wake by plan; how the program ended is known all the same."""
    script = "trap 'exit 7' TERM; while :; do sleep 0.1; done"
    proc = kip.run(f"seven-{tier}", ["sh", "-c", script])
    for _ in range(2):
        kip.cli("sleep", proc.name, "--to", tier)
        proc.wake()
    if tier == "parked":
        assert proc.rebuilt()
    proc.stop()
    assert proc.inspect()["exit"] == "exit code 7"


def test_two_ways_in_turn(kip: Kip, tmp_path: Path) -> None:
    """What one way has restored the other takes down and up again: threads, children, zombies, orphans, signals, locks."""
    server = servers.torture()
    flags = ["--env", servers.ONLY_CRIU]
    proc = kip.run("turns", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    steady = Lines(proc.port())
    steady.check()
    for cycle in range(8):
        proc.sleep()
        if cycle % 2:
            plan_of(proc).unlink()
        steady.check()
        assert proc.rebuilt() == (cycle % 2 == 0)
