"""`kip rename`: another name in every tier, and nothing else changes but what goes by the name."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import logged
from harness.clients import Redis, listens
from harness.kip import Kip, Proc
from harness.wait import wait_for
from test_backup import back_up, lost, restore
from test_update import STAYS, redis, woken


# promise life: `kip rename` gives a proc another name in every tier, without waking it; files,
#   memory, logs, ports and meter stay with it, also over restarts of the daemon, and another proc
#   can have the old name
@pytest.mark.smoke
def test_in_every_tier(archiving: Kip) -> None:
    kip = archiving
    kip.expected += logged.DAEMON_KILLED
    proc = redis(kip)
    port = proc.port()
    Redis(port).ask("SET", "key", "value")
    ways: dict[str, Callable[[Proc], Any]] = {
        "running": Proc.wake, "hibernated": Proc.hibernate, "parked": Proc.sleep, "archived": Proc.archive,
    }  # fmt: skip
    for number, (state, go) in enumerate(ways.items()):
        go(proc)
        before, wakes, meter = proc.inspect(), woken(kip, proc.name), kip.json("meter", proc.name)[0]
        new = f"name-{number}"
        assert kip.cli("rename", proc.name, new).stdout == f"{proc.name} is {new} now\n"
        old, proc = proc, Proc(kip, new)
        after = proc.inspect()
        assert (after["state"], after["pids"], after["ports"]) == (state, before["pids"], before["ports"])
        assert woken(kip, new) == 0 and woken(kip, old.name) == wakes
        assert kip.names() == [new] and "there is no proc" in kip.refused("inspect", old.name)
        assert kip.json("meter", new)[0]["wakes"] == meter["wakes"]
        assert "Ready to accept" in proc.logs()
        (event,) = [event for event in kip.events() if event["kind"] == "renamed" and event["name"] == new]
        assert event["detail"] == f"it was {old.name}"
        # Another one has the old name, and its own directory.
        other = kip.run(old.name, ["sh", "-c", "echo other; sleep 1000"])
        wait_for("its own log", lambda: other.logs() == "other\n")
        kip.kill()
        kip.up()
        assert kip.names() == sorted([old.name, new]) and proc.state == state
        assert other.logs() == "other\n"
        other.remove()
        assert Redis(port).ask("GET", "key") == b"value"
        # From its working set it may answer without a wake.
        assert proc.inspect()["state"] in ("running", "hibernated")
        assert proc.exec("hostname").stdout == "redis\n", "the program's own names stay"
    kip.cli("stop", proc.name)
    kip.cli("rename", proc.name, "redis")
    Proc(kip, "redis").start()
    wait_for("it listens", lambda: listens(port), 20)
    assert Redis(port).ask("PING") == "PONG"
    kip.cli("rm", "redis", "--force")
    assert list((kip.data / "procs").iterdir()) == []


# promise invariants: what Kip writes into a proc's files stays there, wherever the program's links
#   lead
# held by: this, `kip_sys::within::tests::a_text_is_changed_below_the_root_and_nowhere_else`
def test_links_of_the_program_lead_kip_nowhere(kip: Kip, tmp_path: Path) -> None:
    """/etc/hosts of a proc in a network is written by the daemon, from outside."""
    kip.expected += ["it is not told of its network"]
    (tmp_path / "hosts").write_text("the host's own\n")
    proc = kip.run("hostile", ["sleep", "1000"], flags=["--network", "n", "--never-sleep"])
    proc.exec("sh", "-c", f"rm -rf /etc; ln -s {tmp_path} /etc")
    kip.run("other", ["sleep", "1000"], flags=["--network", "n"]).remove()
    proc.sleep()
    kip.cli("clone", proc.name, "hostile-too")
    proc.wake()
    assert (tmp_path / "hosts").read_text() == "the host's own\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts"]


# promise life: others of its network find a renamed proc by its new name, and by the old one no
#   more
def test_in_its_network(kip: Kip) -> None:
    kip.run("db", ["sleep", "1000"], flags=["--network", "shop", "--alias", "store"])
    web = kip.run("web", ["sleep", "1000"], flags=["--network", "shop"])

    def found(name: str) -> bool:
        return web.exec("getent", "hosts", name, check=False).returncode == 0

    assert found("db") and found("store") and not found("base")
    kip.cli("rename", "db", "base")
    wait_for("the new name", lambda: found("base"))
    assert found("store") and not found("db")
    hosts = web.exec("cat", "/etc/hosts").stdout
    assert "base store" in hosts and "db" not in hosts


# promise life: a name that is taken or is none is refused by `kip rename` with one line, and so is
#   the rename of a proc that a file describes
def test_refused(kip: Kip, tmp_path: Path) -> None:
    redis(kip, "a")
    redis(kip, "b")
    assert "exists already" in kip.refused("rename", "a", "b")
    assert "exists already" in kip.refused("rename", "a", "a")
    assert "there is no proc" in kip.refused("rename", "c", "d")
    done = kip.cli("rename", "a", "A b", check=False)
    assert done.returncode == 2 and "is not valid" in done.stderr
    file = tmp_path / "kip.toml"
    file.write_text("[proc.web]\ncommand = 'sleep 1000'\n")
    kip.cli("apply", "-f", file)
    line = kip.refused("rename", "web", "site")
    assert "belongs to" in line and "rename it there" in line
    assert kip.names() == ["a", "b", "web"]


# promise life: secrets open under the new name, and what is in the store is found by it; the store
#   has it from the next generation on
def test_what_is_kept_elsewhere(archiving: Kip, tmp_path: Path) -> None:
    kip = archiving
    (tmp_path / "key").write_text("hidden")
    flags = [*STAYS, "--secret", f"key={tmp_path / 'key'}"]
    kip.run("old", ["sleep", "1000"], flags=flags)
    stays = redis(kip)
    stays.archive()
    kip.cli("rename", "old", "new")
    kip.cli("rename", "redis", "cache")
    proc = Proc(kip, "new")
    proc.sleep()
    proc.wake()
    kip.cli("stop", "new")
    proc.start()
    assert proc.exec("cat", "/run/secrets/key").stdout == "hidden"
    cache = Proc(kip, "cache")
    assert [one["name"] for one in kip.json("snapshot", "ls", "cache")] == ["cache"]
    Redis(cache.port()).ask("PING")
    cache.archive()
    assert "cache" in kip.cli("snapshot", "ls").stdout


# promise life: a renamed proc is itself after a reboot and in a backup, also beside one that has
#   its old name
def test_after_a_reboot_and_in_a_backup(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    old, new = fresh_kip(), fresh_kip(start=False)
    proc = redis(old, "first")
    Redis(proc.port()).ask("SET", "key", "value")
    old.cli("rename", "first", "second")
    other = redis(old, "first")
    Redis(other.port()).ask("SET", "key", "other")
    proc = Proc(old, "second")
    ports = [proc.port(), other.port()]
    proc.sleep()
    other.sleep()
    old.reboot()
    assert old.names() == ["first", "second"]
    assert [Redis(port).ask("GET", "key") for port in ports] == [b"value", b"other"]
    file, key = tmp_path / "all.kip", tmp_path / "key"
    key.write_bytes(b"k" * 32)
    back_up(old, file, key)
    lost(old)
    told = restore(new, file, key)
    assert [one["name"] for one in told["procs"]] == ["first", "second"]
    new.expected += [r"the keeper was not running"]
    new.up()
    assert new.names() == ["first", "second"]
    assert [Redis(port).ask("GET", "key") for port in ports] == [b"value", b"other"]


# promise life: the daemon is killed in the middle of a rename: the proc has the new name after the
#   next start
def test_killed_in_the_middle(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip(start=False)
    kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_GONE]
    kip.up("--fault-at", "rename-recorded")
    proc = redis(kip)
    port = proc.port()
    Redis(port).ask("SET", "key", "value")
    kip.cli("rename", "redis", "cache", check=False)
    assert kip.wait_dead(30) == -signal.SIGKILL
    kip.up()
    assert kip.names() == ["cache"]
    assert Redis(port).ask("GET", "key") == b"value"
