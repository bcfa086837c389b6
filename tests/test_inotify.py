"""inotify over a sleep: what waits in the queue, a read that waits, and what changes in a volume meanwhile, by both engines and in every
tier in which the processes or their descriptors live on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import programs
from harness.broken import break_plan, files_of
from harness.clients import Lines
from harness.kip import Kip, Proc
from harness.programs import SOURCES
from harness.wait import wait_for
from test_rebuild import NOT_NATIVE

BEGIN = (
    "import ctypes, struct, threading; libc = ctypes.CDLL(None, use_errno=True)",
    "i = libc.inotify_init1(0o4000)",
    "os.mkdir('/tmp/own')",
    # IN_CREATE | IN_MODIFY | IN_DELETE
    "own, shared = (libc.inotify_add_watch(i, at, 0x302) for at in (b'/tmp/own', b'/data'))",
    """def parse(b):
        at, found = 0, []
        while at < len(b):
            watch, mask, _, length = struct.unpack_from('iIII', b, at)
            found.append(('own' if watch == own else 'shared', mask, b[at + 16 : at + 16 + length].rstrip(b'\\0').decode()))
            at += 16 + length
        return found""".replace("\n        ", "\\n "),
)
CREATE, MODIFY = 0x100, 0x2


def begin(kip: Kip, volume: Path, *flags: str) -> tuple[Proc, Lines]:
    volume.mkdir(mode=0o777)
    all_flags = ["-v", f"{SOURCES / 'lines.py'}:/srv/lines.py:ro", "-v", f"{volume}:/data", *flags]
    proc = kip.run("watcher", ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=[8080], flags=all_flags)
    client = Lines(proc.port())
    for line in BEGIN:
        line = f"exec({line!r}, globals())".replace("\\\\n", "\\n") if line.startswith("def ") else line
        do(client, line)
    return proc, client


def do(client: Lines, statement: str) -> None:
    assert (answer := client.ask(statement)) == "None", (statement, answer)


def woken_by_a_change(proc: Proc, wakes: int) -> None:
    view = wait_for("the change wakes it", lambda: (v := proc.quiescent())["state"] == "running" and v["wakes"] > wakes and v, 30)
    assert view["last_wake"]["trigger"] == "watched files (changed)", view["last_wake"]


# promise waking: inotify: events that wait are delivered, a read and an epoll set go on waiting, a
#   file of a volume that changes wakes a parked or hibernated proc and is reported; by either
#   engine; daemon killed meanwhile
# held by: this, `tests/test_inotify.py::test_a_read_that_waits`,
#   `tests/test_inotify.py::test_a_change_wakes_from_hibernation`,
#   `tests/test_inotify.py::test_the_daemon_may_die`, `tests/test_inotify.py::test_tail`,
#   `tests/test_inotify.py::test_events_over_a_wake_that_fails`
@pytest.mark.parametrize("engine", ["plan", "criu"])
def test_events_over_sleeps(fresh_kip: Callable[..., Kip], tmp_path: Path, engine: str) -> None:
    """Events that waited unread, of what the program did itself, and of what another process did in the volume while the proc was
    parked: each comes once and in order."""
    kip = fresh_kip(*(["--only-criu"] if engine == "criu" else []))
    proc, client = begin(kip, tmp_path / "volume")
    for cycle in range(3):
        do(client, f"open('/tmp/own/before{cycle}', 'w').close()")
        wakes = proc.sleep()["wakes"]
        (tmp_path / "volume" / f"meanwhile{cycle}").touch()
        woken_by_a_change(proc, wakes)
        assert proc.rebuilt() == (engine == "plan")
        do(client, f"open('/tmp/own/after{cycle}', 'w').close()")
        got = eval(client.ask("parse(os.read(i, 65536))"))
        assert got == [
            ("own", CREATE, f"before{cycle}"), ("shared", CREATE, f"meanwhile{cycle}"), ("own", CREATE, f"after{cycle}"),
        ]  # fmt: skip
        # It knows of this one, and sleeps on.
        do(client, f"open('/tmp/own/unread{cycle}', 'w').close()")
        proc.sleep()
        assert eval(client.ask("parse(os.read(i, 65536))")) == [("own", CREATE, f"unread{cycle}")]


def test_events_over_a_wake_that_fails(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """The plan is broken, so CRIU does the wake: what waited unread, what changed in the volume meanwhile, and what changes after it,
    in the proc's own files too, come once and in order."""
    kip = fresh_kip()
    kip.expected += [NOT_NATIVE]
    proc, client = begin(kip, tmp_path / "volume")
    for cycle in range(2):
        do(client, f"open('/tmp/own/before{cycle}', 'w').close()")
        files = files_of(proc)
        wakes = proc.sleep()["wakes"]
        break_plan(proc, files)
        (tmp_path / "volume" / f"meanwhile{cycle}").touch()
        woken_by_a_change(proc, wakes)
        assert {"not rebuilt", "helper"} <= {step["name"] for step in proc.inspect()["last_wake"]["steps"]}
        do(client, f"open('/tmp/own/after{cycle}', 'w').close()")
        (tmp_path / "volume" / f"later{cycle}").touch()
        got = eval(client.ask("parse(os.read(i, 65536))"))
        assert got == [
            ("own", CREATE, f"before{cycle}"), ("shared", CREATE, f"meanwhile{cycle}"), ("own", CREATE, f"after{cycle}"),
            ("shared", CREATE, f"later{cycle}"),
        ]  # fmt: skip


@pytest.mark.parametrize("engine", ["plan", "criu"])
def test_a_read_that_waits(fresh_kip: Callable[..., Kip], tmp_path: Path, engine: str) -> None:
    """A thread in read(2) and an epoll set go on waiting over sleeps, and have what comes in one."""
    kip = fresh_kip(*(["--only-criu"] if engine == "criu" else []))
    proc, client = begin(kip, tmp_path / "volume")
    do(client, "import select, fcntl; e = select.epoll(); e.register(i, select.EPOLLIN)")
    do(client, "b = libc.inotify_init1(0); got = []; shared_b = libc.inotify_add_watch(b, b'/data', 0x102)")
    do(client, "t = threading.Thread(target=lambda: [got.append(os.read(b, 4096)) for _ in range(3)], daemon=True); t.start()")
    for cycle in range(3):
        proc.sleep()
        proc.wake()
        assert (client.ask("len(got)"), client.ask("e.poll(0)")) == (str(cycle), "[]")
        wakes = proc.sleep()["wakes"]
        (tmp_path / "volume" / f"file{cycle}").touch()
        woken_by_a_change(proc, wakes)
        wait_for("the read returns", lambda: client.ask("len(got)") == str(cycle + 1), 10)
        assert client.ask(f"got[{cycle}][16:].rstrip(b'\\0')") == f"b'file{cycle}'"
        assert client.ask("[fd for fd, _ in e.poll(0)] == [i]") == "True"
        assert eval(client.ask("parse(os.read(i, 65536))")) == [("shared", CREATE, f"file{cycle}")]


@pytest.mark.parametrize("way", ["blocked", "held"])
def test_a_change_wakes_from_hibernation(kip: Kip, tmp_path: Path, way: str) -> None:
    proc, client = begin(kip, tmp_path / "volume", "--hibernate", way)
    came = "lambda fd: got.append((os.read(fd, 4096), time.time()))"
    do(client, f"import time; got = []; sys.modules['__main__'].ready.register(i, 1, ({came},))")
    for cycle in range(2):
        proc.hibernate()
        (tmp_path / "volume" / f"file{cycle}").touch()
        # One that was found at work ticks on in place, and may read it there without a wake.
        time.sleep(2)
        asked = time.time()
        wait_for("it has read", lambda: client.ask("len(got)") == str(cycle + 1), 10)
        assert float(client.ask(f"got[{cycle}][1]")) < asked, "it has read when it was asked"
        assert way == "blocked" or proc.inspect()["last_wake"]["from"] == "hibernated"


# promise waking: changes to watched files that a sleep itself causes do not wake the proc
def test_what_the_sleep_itself_does_wakes_nobody(kip: Kip, tmp_path: Path) -> None:
    """A program that watches for files being closed has one open itself, which its own end closes."""
    proc, client = begin(kip, tmp_path / "volume")
    do(client, "log = open('/data/log', 'w'); j = libc.inotify_init1(0o4000); watch = libc.inotify_add_watch(j, b'/data', 0xfff)")
    for cycle in range(2):
        proc.sleep()
        assert proc.quiescent()["state"] == "parked"
        wakes = proc.inspect()["wakes"]
        (tmp_path / "volume" / f"file{cycle}").touch()
        woken_by_a_change(proc, wakes)
        assert f"file{cycle}" in client.ask("[name for _, _, name in parse(os.read(j, 65536))]")
        client.ask("os.read(i, 65536)")


def test_the_daemon_may_die(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    kip = fresh_kip()
    proc, client = begin(kip, tmp_path / "volume")
    wakes = proc.sleep()["wakes"]
    kip.kill()
    (tmp_path / "volume" / "without").touch()
    kip.up()
    woken_by_a_change(proc, wakes)
    client = Lines(proc.port())
    assert eval(client.ask("parse(os.read(i, 65536))")) == [("shared", CREATE, "without")]


def test_tail(kip: Kip, tmp_path: Path) -> None:
    """tail(1) follows a log in a volume: parked, it wakes for each line and prints it."""
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o777)
    (log := volume / "log").write_text("old\n")
    log.chmod(0o666)
    tail = kip.run("tail", ["tail", "-n", "0", "-f", "/data/log"], flags=["-v", f"{volume}:/data"])
    for number in range(3):
        wakes = tail.sleep()["wakes"]
        with log.open("a") as file:
            file.write(f"line {number}\n")
        woken_by_a_change(tail, wakes)
        assert tail.rebuilt()
        wait_for("the line is printed", lambda: tail.logs().split("\n")[number:][:1] == [f"line {number}"], 10)


# promise waking: a watch of a directory that came with the proc's files, which the kernel knows by
#   no name after a sleep, is no obstacle to the next one: by plan, by CRIU and where a plan fails
@pytest.mark.parametrize("engine", ["plan", "CRIU", "broken plan"])
def test_a_directory_of_the_tarball_is_watched_through_sleeps(fresh_kip: Callable[..., Kip], tmp_path: Path, engine: str) -> None:
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    kip.expected += [NOT_NATIVE]
    tar = programs.tarball(tmp_path / "watched.tar", {"srv/lines.py": SOURCES / "lines.py", "srv/watched/": ""})
    proc = kip.run("watched", ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=[8080], tar=tar, flags=["--idle", "1h"])
    client = Lines(proc.port())
    # IN_CREATE
    for line in ("import ctypes", "i = ctypes.CDLL(None).inotify_init1(0o4000)", "w = ctypes.CDLL(None).inotify_add_watch(i, b'/srv/watched', 0x100)"):
        client.ask(line)
    for _ in range(3):
        files = files_of(proc)
        proc.sleep()
        if engine == "broken plan":
            break_plan(proc, files)
        assert client.ask("6 * 7") == "42"
    client.ask("open('/srv/watched/new', 'w').close()")
    assert "new" in client.ask("os.read(i, 4096)")
    assert engine == "broken plan" or proc.rebuilt() == (engine == "plan")
