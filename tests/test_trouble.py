"""Trouble that is not the command's fault: a full disk, a damaged snapshot, a program that cannot be parked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import servers, logged
from harness.clients import Lines
from harness.kip import Kip
from harness.wait import wait_for

@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 300 MB of its own."""
    image, mountpoint = tmp_path / "disk.img", Path("/tmp") / f"kip-test-disk-{os.getpid()}"
    mountpoint.mkdir()
    subprocess.run(["truncate", "-s", "300M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mountpoint], check=True)
    try:
        yield mountpoint
    finally:
        subprocess.run(["umount", mountpoint], check=True)
        mountpoint.rmdir()


# promise trouble: disk full while parking: runs on, parks when there is room
def test_disk_full_while_parking(small_disk: Path, fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """The proc runs on untouched, says why it could not sleep, leaves no half snapshot, and parks when there is room."""
    server = servers.torture()
    kip = fresh_kip(data=small_disk / "data")
    # By itself it would sleep on a busy machine before the disk is full.
    proc = kip.run("full", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=["--idle", "1h"])
    client = Lines(proc.port())
    client.ask("eat 60")
    client.check()
    filler = small_disk / "filler"
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    with open(filler, "wb") as f:
        f.write(os.urandom(1 << 20) * (free // (1 << 20) - 20))
        f.flush()
        os.fsync(f.fileno())
    pids = proc.inspect()["pids"]
    line = kip.refused("sleep", "full", "--to", "parked")
    assert re.search(r"space|disk|full", line), line
    view = proc.inspect()
    assert (view["state"], view["pids"], view["generation"]) == ("running", pids, 0), view
    client.check()
    why = kip.json("why", "full")
    assert any(re.search(r"space|disk|full", reason) for reason in why["cannot_sleep"]), why
    left = [p for p in (kip.data / "procs" / "full").glob("gen-*") if any(p.iterdir())]
    assert not left, "a half snapshot is left"
    filler.unlink()
    proc.sleep()
    client.check()
    client.close()


def damage(path: Path) -> bytes:
    """Flips bits in the middle of a file; gives what was there."""
    whole = path.read_bytes()
    at = len(whole) // 2
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(bytes(b ^ 0x55 for b in whole[at : at + 64]))
    return whole


# promise waking: a wake that failed is not tried again for what it did itself to files that the
#   program watches; it waits for a client, a timer or its owner
# promise trouble: corrupt snapshot: not restored by `kip wake`, nothing deleted, wakes once mended
# promise invariants: 5 a failed `kip wake` deletes nothing
@pytest.mark.parametrize("which", ["pages", "images", "missing file"])
def test_corrupt_snapshot(fresh_kip: Callable[..., Kip], tmp_path: Path, which: str) -> None:
    """It is not restored, nothing is deleted, and with the bytes mended it wakes with everything."""
    server = servers.torture()
    kip = fresh_kip()
    kip.expected += [logged.SNAPSHOT_UNUSABLE, logged.NOT_NATIVE]
    proc = kip.run("full", server.command, ports=server.published, tar=server.tarball(tmp_path))
    client = Lines(proc.port())
    client.check()
    generation = proc.sleep()["generation"]
    directory = next((kip.data / "procs" / "full").glob(f"gen-{generation}"))
    pattern = {"pages": "pages-*.img", "images": "checkpoint.tar", "missing file": "checkpoint.tar"}[which]
    victim = max(directory.rglob(pattern), key=lambda p: p.stat().st_size)
    whole = damage(victim)
    if which == "missing file":
        victim.unlink()
    names = {p.name for p in directory.rglob("*")}
    line = kip.refused("wake", "full")
    assert victim.name in line or "snapshot" in line or "generation" in line, line
    view = proc.inspect()
    assert view["pids"] == [] and view["generation"] == generation, view
    assert names <= {p.name for p in directory.rglob("*")}, "a wake that fails deletes nothing"
    time.sleep(1)
    tried = [event["detail"] for event in kip.events() if event["kind"] == "waking"]
    assert tried == ["kip wake"], "what the wake did to its watched files woke it again"
    victim.write_bytes(whole)
    proc.wake()
    client.check()
    client.close()


UNPARKABLE = {
    # A POSIX message queue's descriptor lies on the mqueue filesystem.
    "mqueue": "import ctypes, time, os\nfd=ctypes.CDLL(None).mq_open(b'/kip-test', os.O_CREAT | os.O_RDWR, 0o600, None)",
}


COUNTING = """
print("descriptor", fd, flush=True)
n = 0
while True:
    time.sleep(0.05)
    n += 1
    open("/tmp/alive", "w").write(str(n))
"""


# promise parking: what cannot be parked runs on; `kip why` names the descriptor
# promise invariants: 4 failing to sleep is not failing
@pytest.mark.parametrize("kind", list(UNPARKABLE))
def test_what_cannot_be_parked_runs_on(kip: Kip, kind: str) -> None:
    """`kip sleep` refuses with the reason, `kip why` names the descriptor, the program notices nothing."""
    script = UNPARKABLE[kind] + COUNTING
    proc = kip.run("stuck", ["/usr/bin/python3", "-c", script])
    wait_for("it has its descriptor", lambda: "descriptor" in proc.logs(), 30)
    fd = int(proc.logs().split()[1])
    assert fd >= 0, "this kernel does not give out such a descriptor: choose another for this test"
    pids = proc.inspect()["pids"]
    line = kip.refused("sleep", "stuck", "--to", "parked")
    assert "stuck" in line, line
    view = proc.inspect()
    assert (view["state"], view["pids"], view["generation"]) == ("running", pids, 0)

    def alive() -> int:
        return int(proc.exec("cat", "/tmp/alive", check=False).stdout or 0)

    seen = alive()
    wait_for("the program goes on", lambda: alive() > seen, 30)
    why = kip.json("why", "stuck")
    assert why["cannot_sleep"] and any(re.search(rf"\b{fd}\b", reason) for reason in why["cannot_sleep"]), why
    assert any(e["kind"] == "refused" and e["name"] == "stuck" for e in kip.events())
    human = kip.cli("why", "stuck").stdout
    assert str(fd) in human, human
