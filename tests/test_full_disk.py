"""No room on the disk of the data directory: what should go there stays where it is, says so, and loses nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness import servers
from harness.clients import Redis
from harness.kip import Kip, Proc
from harness.wait import wait_for
from test_archive import archive
from test_metrics import refusals

SIZE = 96 << 20
KEYS = 4000
NO_ROOM = "o space left on device"


class Disk:
    """A small disk that can be filled up."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, left: int) -> None:
        found = os.statvfs(self.path)
        with open(self.path / "filler", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - left)

    def free(self) -> None:
        (self.path / "filler").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "kip-test", path], check=True, timeout=20)
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", path], check=True, timeout=20)


@pytest.fixture
def on_disk(disk: Disk, fresh_kip: Callable[..., Kip], tmp_path: Path) -> tuple[Kip, Proc, Redis]:
    """A redis with 20 MB that do not compress, and a store that has room."""
    (tmp_path / "store").mkdir()
    kip = fresh_kip("--store", str(tmp_path / "store"), data=disk.path / "data")
    server = servers.redis()
    proc = kip.run("redis", server.command, ports=server.published)
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", value(i)) for i in range(KEYS)])
    return kip, proc, client


def value(i: int) -> bytes:
    return (b"%08d" % i) * 640


def check(client: Redis) -> None:
    assert client.ask_all([("GET", f"key:{i}") for i in range(KEYS)]) == [value(i) for i in range(KEYS)]


# promise archive: no room on the disk: who should be parked runs on, who should be archived stays
#   parked, who should wake stays archived; each says so, loses nothing and leaves nothing there
# held by: this, `tests/test_full_disk.py::test_archiving_and_back`
@pytest.mark.parametrize("left", [0, 64 << 10, 4 << 20])
def test_parking(disk: Disk, on_disk: tuple[Kip, Proc, Redis], left: int) -> None:
    kip, proc, client = on_disk
    disk.fill(left)
    refusal = kip.refused("sleep", "redis")
    assert NO_ROOM in refusal, refusal
    # Without any room not even that it is to be parked can be written down.
    assert refusals(kip, "parked", "snapshot") == (left > 0)
    assert proc.state == "running", "it runs on"
    check(client)
    assert not list((kip.data / "procs" / "redis").glob("gen-*")), "what was begun is gone"
    disk.free()
    proc.sleep()
    check(client)


def test_archiving_and_back(disk: Disk, on_disk: tuple[Kip, Proc, Redis]) -> None:
    kip, proc, client = on_disk
    proc.sleep()
    disk.fill(0)
    refusal = kip.refused("sleep", "redis", "--to", "archived")
    assert "redis stays parked: " in refusal and NO_ROOM in refusal, refusal
    assert proc.state == "parked"
    disk.free()
    archive(proc)
    disk.fill(0)
    refusal = kip.refused("wake", "redis")
    assert "redis cannot be woken: " in refusal and NO_ROOM in refusal and "it stays archived" in refusal, refusal
    assert proc.state == "archived" and not list((kip.data / "procs" / "redis").glob("gen-*"))
    kip.kill()
    disk.free()
    kip.up()
    check(client)


# promise archive: who woke and has no room for the rest of its memory waits, says so and goes on
#   once there is room
def test_what_comes_after_the_wake_waits_for_room(disk: Disk, on_disk: tuple[Kip, Proc, Redis]) -> None:
    """Room for its front, none for all of its memory: it runs, waits for the rest, says so, and goes on once there is room."""
    kip, proc, client = on_disk
    kip.expected += [NO_ROOM]
    archive(proc)
    disk.fill(4 << 20)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(check, client)
        wait_for("it is told", lambda: any(e["kind"] == "waiting" and NO_ROOM in e["detail"] for e in kip.events()), 30)
        disk.free()
        waiting.result(60)
