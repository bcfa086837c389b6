"""`kip run --disk`: a proc's own files have a limit. A proc over it gets ENOSPC at once; others notice nothing; it sleeps and
wakes as ever."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import servers, logged
from harness.clients import Lines, Redis
from harness.kip import Kip, Proc
from harness.programs import SOURCES
from harness.wait import wait_for
from test_adopt import FILES, adopt, here, look, there, where
from test_backup import back_up, key, lost, restore

__all__ = ["here", "key", "there", "where"]

MIB = 1 << 20
LINES = ["/usr/bin/python3", "/srv/lines.py", "8080"]
PROGRAM = ["-v", f"{SOURCES / 'lines.py'}:/srv/lines.py:ro"]
# Until there is no room; prints how much went in.
FILL = "cat /dev/zero > /root/filler 2>/dev/null; stat -c %s /root/filler"


def limited(kip: Kip, name: str, size: str = "64M", *flags: str) -> Proc:
    return kip.run(name, LINES, ports=["8080"], flags=[*PROGRAM, "--disk", size, *flags])


def fill(proc: Proc) -> int:
    return int(proc.exec("sh", "-c", FILL, timeout=120).stdout)


def image(proc: Proc) -> Path:
    return proc.kip.data / "procs" / proc.name / "disk.img"


def taken(proc: Proc) -> int:
    return image(proc).stat().st_blocks * 512


def loops(kip: Kip) -> list[str]:
    backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    return [text for text in backing if str(kip.data) in text]


# promise P14: limits of disk space: who is over it gets ENOSPC, others notice nothing, what is
#   deleted is given back to the machine
# held by: this, `crates/sandbox/tests/disk.rs::as_much_as_was_said_and_little_more`
def test_who_is_over_it_gets_no_room(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    one, other = limited(kip, "one"), limited(kip, "other", "100M")
    empty = one.inspect()["disk_bytes"]
    assert 0 < empty < 3 * MIB
    size = fill(one)
    assert 63 * MIB < size < 75 * MIB
    wait_for("it is on the disk", lambda: one.inspect()["disk_bytes"] > 60 * MIB, 20)
    assert "of 64.0M" in kip.cli("inspect", "one").stdout
    # It goes on with what needs no room, and so does every other proc.
    client = Lines(one.port())
    assert client.ask("kept = 7") == "None"
    assert "No space left" in one.exec("sh", "-c", "head -c 1M /dev/zero > /root/more", check=False).stderr
    other.exec("sh", "-c", "head -c 90M /dev/urandom > /root/file && sync")
    one.exec("sh", "-c", "rm /root/filler; sync; echo x > /root/more")
    wait_for("the room is given back", lambda: taken(one) < 8 * MIB, 20)
    assert one.inspect()["spec"]["limits"]["disk_bytes"] == 64 * MIB
    for proc in (one, other):
        proc.remove()
    wait_for("no loop device stays", lambda: not loops(kip), 20)
    unlimited = kip.run("unlimited", LINES, ports=["8080"], flags=PROGRAM)
    assert unlimited.inspect()["disk_bytes"] is None and not image(unlimited).exists()


# promise P14: full, it sleeps and wakes in every tier, is looked at, told of others, stopped and
#   started
def test_full_it_sleeps_in_every_tier(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """Nothing that sleeping and waking need is in there."""
    (tmp_path / "store").mkdir()
    kip = fresh_kip("--store", str(tmp_path / "store"))
    proc = limited(kip, "one", "32M", "--network", "net")
    client = Lines(proc.port())
    assert client.ask("kept = open('/root/kept', 'a+'); kept.write('before\\n'); kept.flush()") == "None"
    size = fill(proc)
    for sleep in (proc.hibernate, proc.sleep, proc.archive):
        sleep()
        assert client.ask("kept.seek(0)") == "0"
        assert client.ask("kept.read()") == repr("before\n")
    proc.archive()
    own = kip.json("inspect", "one", "--files")["own"]
    assert any(entry["path"] == "/root/filler" and entry["bytes"] == size for entry in own["entries"]), own
    assert client.ask("kept.seek(0)") == "0"
    # One that comes is told of, also where there is hardly room for it.
    kip.run("friend", LINES, ports=["8080,private"], flags=[*PROGRAM, "--network", "net"])
    assert "friend" in proc.exec("cat", "/etc/hosts").stdout
    proc.stop()
    proc.start()
    assert proc.exec("cat", "/root/kept").stdout == "before\n"
    assert proc.exec("stat", "-c", "%s", "/root/filler").stdout == f"{size}\n"


# promise P14: daemons and machines come and go: one device for a file, always; none stays
# held by: this, `kip_sys::loops::tests::a_file_is_found_again_as_long_as_its_device_is_open`
def test_daemons_and_machines_come_and_go(fresh_kip: Callable[..., Kip]) -> None:
    """The device of one that runs on is found again: two for one file would destroy it."""
    kip = fresh_kip()
    awake, asleep = limited(kip, "awake", "64M", "--never-sleep"), limited(kip, "asleep")
    client, late = Lines(awake.port()), Lines(asleep.port())
    for proc in (awake, asleep):
        proc.exec("sh", "-c", "head -c 8M /dev/urandom > /root/file && md5sum /root/file > /root/sum && sync")
    check = lambda proc: proc.exec("md5sum", "-c", "/root/sum").stdout  # noqa: E731
    asleep.sleep()
    for _ in range(2):
        kip.kill()
        assert client.ask("7") == "7"
        kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_KILLED, *logged.PAGER_KILLED]
        kip.up()
        assert len(loops(kip)) == 2, loops(kip)
        assert late.ask("8") == "8"
        assert "OK" in check(awake) and "OK" in check(asleep)
        asleep.sleep()
    client.close()
    late.close()
    awake.sleep()
    asleep.sleep()
    kip.reboot()
    for proc in (awake, asleep):
        assert "OK" in check(proc)
        fill(proc)
        assert "OK" in check(proc)


# promise P14: its files go with it: to another data directory, into a backup and back
# held by: this, `tests/test_quota.py::test_a_backup_has_its_files`,
#   `kip_sandbox::quota::tests::they_are_mounted_as_long_as_somebody_has_to_do_with_them`
def test_it_goes_with_its_files_to_another_directory(here: Kip, there: Kip, tmp_path: Path) -> None:
    server = servers.lighttpd()
    proc = here.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=["--disk", "100M"])
    proc.exec("sh", "-c", FILES)
    before = look(proc)
    proc.archive()
    new = adopt(there, "web")
    assert look(new) == before
    assert 80 * MIB < fill(new) < 110 * MIB
    new.exec("rm", "/root/filler")
    new.sleep()
    assert look(new) == before


def test_a_backup_has_its_files(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    kip = fresh_kip()
    redis = servers.redis()
    asleep = kip.run("asleep", redis.command, ports=redis.published, flags=["--disk", "200M"])
    Redis(asleep.port()).ask("SET", "a", "b")
    asleep.exec("sh", "-c", FILES)
    stopped = limited(kip, "stopped")
    stopped.exec("sh", "-c", "echo mine > /root/note")
    stopped.stop()
    before = look(asleep)
    file = tmp_path / "all.kip"
    back_up(kip, file, key)
    assert file.stat().st_size < 60 * MIB, "not the file system, what is in it"
    lost(kip)
    to = fresh_kip(start=False)
    to.expected += [r"the keeper was not running"]
    restore(to, file, key)
    to.up()
    there_asleep, there_stopped = Proc(to, "asleep"), Proc(to, "stopped")
    assert Redis(there_asleep.port()).ask("GET", "a") == b"b"
    assert look(there_asleep) == before
    there_stopped.start()
    assert there_stopped.exec("cat", "/root/note").stdout == "mine\n"
    assert 63 * MIB < fill(there_stopped) < 75 * MIB


# promise P14: too small a limit, a damaged file system: one line, nothing is made anew
# held by: this, `crates/sandbox/tests/disk.rs::what_is_no_file_system_is_refused`
def test_what_cannot_be_limited_is_refused(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    kip = fresh_kip()
    assert "give at least 16777216" in kip.refused("run", "--name", "a", "--disk", "1M", "--", "sleep", "1")
    # A damaged one is not made anew.
    proc = limited(kip, "one")
    proc.exec("sh", "-c", "echo mine > /root/note")
    proc.stop()
    wait_for("nobody has it mounted", lambda: not loops(kip), 20)
    saved = tmp_path / "saved"
    shutil.copy(image(proc), saved)
    with open(image(proc), "r+b") as file:
        file.write(bytes(1 << 20))
    assert "disk.img cannot be mounted" in kip.refused("start", "one")
    subprocess.run(["cp", "--sparse=always", saved, image(proc)], check=True)
    proc.start()
    assert proc.exec("cat", "/root/note").stdout == "mine\n"


@pytest.mark.parametrize("size", ["16M"])
def test_a_small_one_has_room_for_a_server(fresh_kip: Callable[..., Kip], tmp_path: Path, size: str) -> None:
    kip = fresh_kip()
    server = servers.lighttpd()
    web = kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=["--disk", size])
    web.sleep()
    assert fill(web) > 15 * MIB
