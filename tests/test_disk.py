"""`kip up --disk`: parked procs take no more than that on the local disk, those parked the longest are archived."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness import servers
from harness.clients import Redis
from harness.kip import Kip, Proc
from harness.wait import wait_for

LIMIT_MIB = 40


def redis(kip: Kip, name: str, *flags: str) -> tuple[Proc, Redis]:
    """It takes about 16 MB on the disk."""
    server = servers.redis()
    proc = kip.run(name, server.command, ports=server.published, flags=flags)
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", f"{name} {i:06} ".encode() * 300) for i in range(2500)])
    return proc, client


def pressure(kip: Kip) -> list[dict[str, str]]:
    return [event for event in kip.events() if event["kind"] == "pressure"]


# promise archive: `kip up --disk`: while parked procs take more than that on the local disk, those
#   parked the longest are archived, and say why; never who sleeps only when told to
# held by: this,
#   `kip_supervisor::disk::tests::who_sleeps_the_longest_goes_first_and_no_more_than_needed`
def test_those_parked_the_longest_are_archived(fresh_kip: Callable[..., Kip], store: Path) -> None:
    kip = fresh_kip("--store", str(store), "--disk", f"{LIMIT_MIB}M")
    kept, kept_client = redis(kip, "kept", "--never-sleep")
    first, first_client = redis(kip, "first")
    second, second_client = redis(kip, "second")
    third, _ = redis(kip, "third")
    kept.sleep()
    first.sleep()
    assert pressure(kip) == [], "there is room for two"
    second.sleep()
    first.wait_state("archived")
    assert "disk pressure: parked procs take" in first.inspect()["last_sleep"]["cause"]
    why = kip.cli("why", "first").stdout
    assert f"of {LIMIT_MIB}.0M on disk" in why, why
    assert [event["name"] for event in pressure(kip)] == ["first"]
    third.sleep()
    second.wait_state("archived")
    assert (kept.state, third.state) == ("parked", "parked"), "who sleeps only when told to is archived only then"
    # Each wakes as it was, and one that comes back makes no room necessary.
    for name, client in (("first", first_client), ("second", second_client), ("kept", kept_client)):
        assert client.ask("GET", "key:2499") == f"{name} 002499 ".encode() * 300
    assert third.state == "parked"
    kip.cli("rm", "--force", "third")


# promise archive: who cannot be archived stays parked, which is told once
def test_a_store_that_is_gone(fresh_kip: Callable[..., Kip], store: Path) -> None:
    """What cannot be archived stays parked; that is told once, and it is tried again later."""
    kip = fresh_kip("--store", str(store), "--disk", "1M")
    proc, client = redis(kip, "web")
    store.rename(store.with_name("gone"))
    proc.sleep()
    told = wait_for("it is told", lambda: [e["detail"] for e in pressure(kip) if "none of them can be archived now" in e["detail"]], 30)
    assert len(told) == 1 and proc.state == "parked", told
    assert client.ask("GET", "key:1") == b"web 000001 " * 300
    store.with_name("gone").rename(store)


# promise archive: it needs a store elsewhere, that of the last time will do
def test_a_limit_needs_a_store_elsewhere(fresh_kip: Callable[..., Kip], store: Path) -> None:
    """One that was given the last time will do; the data directory's own is on the same disk."""
    kip = fresh_kip(start=False)
    for flags in ([], ["--store", "none"]):
        assert "--disk needs a store elsewhere" in kip.refused("up", "--disk", "1M", *flags)
    assert "leave one of the two out" in kip.refused("up", "--cache", "1M", "--store", "none")
    kip.up("--store", str(store))
    kip.cli("down", "--all")
    assert kip.wait_dead() == 0
    kip.up("--disk", "1M", "--cache", "1M")
