"""File systems in memory, `/dev/shm`, `--shm-size` and `--tmpfs`: limits, and what is in them after the sleep of each tier."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from harness import programs
from harness.clients import Lines
from harness.kip import Kip, Proc
from harness.wait import wait_for

WAYS = {"hibernated": Proc.hibernate, "parked": Proc.sleep, "archived": Proc.archive}
ENGINES = pytest.mark.parametrize("engine", ["natively", "by CRIU"])
# Each line of a client is run, and what it evaluates to is the answer.
COMMAND, PORT = ["/usr/bin/python3", "/srv/lines.py", "7600"], "7600"
# What a program has in its file systems in memory: files, links, holes, pipes, sockets, mappings.
BEGIN = """
import mmap, os, socket, stat, threading
LETTERS = 'abcdefghijklmnopqrstuvwxyz'
os.makedirs('/run/deep/er'); os.chown('/run/deep', 33, 34); os.chmod('/run/deep/er', 0o2751)
open('/run/deep/er/file', 'w').write('contents'); os.link('/run/deep/er/file', '/run/again')
os.utime('/run/again', ns=(5, 7 * 10**9)); os.symlink('deep/er/file', '/run/link'); os.mkfifo('/run/pipe', 0o640)
holes = open('/dev/shm/holes', 'w+b'); holes.truncate(32 << 20); holes.seek(20 << 20); holes.write(b'middle'); holes.flush()
f = os.open('/dev/shm/mapped', os.O_CREAT | os.O_RDWR, 0o600); os.ftruncate(f, SIZE)
mapped = mmap.mmap(f, SIZE); mapped[:] = os.urandom(4096) * (SIZE // 4096); mapped[0:6] = b'begins'
position = open('/run/position', 'w+'); position.write(LETTERS); position.flush(); position.seek(4)
server = socket.socket(socket.AF_UNIX); server.bind('/run/unix.sock'); server.listen()
def serve():
    while True:
        client, _ = server.accept()
        client.sendall(client.recv(100).upper()); client.close()
threading.Thread(target=serve, daemon=True).start()
def ask(text):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect('/run/unix.sock'); client.sendall(text); return client.recv(100)
import hashlib
def check(turn):
    assert open('/run/again').read() == 'contents' and os.readlink('/run/link') == 'deep/er/file'
    one, two = os.stat('/run/again'), os.stat('/run/deep/er/file')
    assert one.st_ino == two.st_ino and one.st_nlink == 2 and one.st_mtime == 7, one
    deep = os.stat('/run/deep')
    assert (deep.st_uid, deep.st_gid) == (33, 34) and oct(os.stat('/run/deep/er').st_mode) == '0o42751'
    assert stat.S_ISFIFO(os.stat('/run/pipe').st_mode)
    length = os.stat('/dev/shm/holes')
    assert length.st_size == 32 << 20 and length.st_blocks < 64, length.st_blocks
    holes.seek(20 << 20); assert holes.read(6) == b'middle'
    assert bytes(mapped[0:6]) == open('/dev/shm/mapped', 'rb').read(6) == b'begins'
    # The mapping and the file are one.
    mapped[100:104] = turn.to_bytes(4, 'little')
    assert open('/dev/shm/mapped', 'rb').read()[100:104] == turn.to_bytes(4, 'little')
    assert os.read(position.fileno(), 1) == LETTERS[4 + turn - 1].encode()
    assert ask(b'there') == b'THERE'
    return hashlib.sha256(mapped[4096:]).hexdigest()
"""


def start(kip: Kip, *flags: str, size: int) -> tuple[Proc, Lines]:
    flags = ("-v", f"{programs.SOURCES / 'lines.py'}:/srv/lines.py:ro", *flags)
    proc = kip.run("memory", COMMAND, ports=[PORT], flags=flags)
    client = Lines(proc.port())
    program = textwrap.dedent(BEGIN).replace("SIZE", str(size))
    assert client.ask(f"exec({program!r}, globals())") == "None"
    return proc, client


def connected(proc: Proc) -> Lines | None:
    with suppress(ConnectionRefusedError):
        return Lines(proc.port())
    return None


# promise K14: /dev/shm and `--tmpfs` are in memory, and all in them is there after each tier:
#   names, owners, times, hard links, holes, shared mappings, positions, unix sockets that listen;
#   little of it and much, natively and by CRIU, from a store, after a reboot and with daemon and
#   keeper killed
# held by: this, `kip_files::whole::tests::all_of_it_comes_back`,
#   `kip_files::whole::tests::what_leads_elsewhere_is_refused`
@ENGINES
@pytest.mark.parametrize("size", [64 << 10, 6 << 20], ids=["little", "much"])
def test_contents(fresh_kip: Callable[..., Kip], store: Path, size: int, engine: str) -> None:
    kip = fresh_kip("--store", str(store), *(["--only-criu"] if engine == "by CRIU" else []))
    kip.expected += [r"WARN.*(again|left|gone|keeper|made anew)"]
    proc, client = start(kip, "--tmpfs", "/run:size=1m", size=size)
    turn = 1
    sum_before = client.ask(f"check({turn})")
    assert re.fullmatch(r"'[0-9a-f]{64}'", sum_before), sum_before
    for _ in range(2):
        for tier, sleep in WAYS.items():
            sleep(proc)
            turn += 1
            assert client.ask(f"check({turn})") == sum_before, tier
            if tier == "parked":
                # What listens at a path in it is bound to an inode.
                assert proc.rebuilt() == (engine == "natively" and size <= 1 << 20)
    client.close()
    proc.sleep()
    kip.reboot()
    client = Lines(proc.port())
    turn += 1
    # The last connection has been reset.
    wait_for("it answers", lambda: client.ask(f"check({turn})") == sum_before, 30)
    assert [e for e in kip.events() if e["kind"] == "cold-start"] == []
    client.close()
    # A start makes them anew.
    proc.stop()
    proc.start()
    client = wait_for("it listens", lambda: connected(proc), 30)
    assert client.ask("__import__('os').listdir('/run') + __import__('os').listdir('/dev/shm')") == "[]"


def mounts(proc: Proc) -> dict[str, str]:
    text = proc.exec("cat", "/proc/self/mounts").stdout
    return {line.split()[1]: line for line in text.splitlines() if line.split()[2] == "tmpfs"}


# promise K14: /dev/shm has 64 MiB unless `--shm-size` says otherwise; a tmpfs has the size, the
#   mode and the owner that it was given, more is refused with ENOSPC; nothing in one is executed
#   unless it is asked for
def test_limits(kip: Kip) -> None:
    usual = kip.run("usual", ["sleep", "1000"])
    assert "64M" in usual.exec("df", "-h", "--output=size", "/dev/shm").stdout
    assert re.search(r"rw,nosuid,nodev,noexec\b", mounts(usual)["/dev/shm"])
    assert [place for place in mounts(usual) if not place.startswith("/proc/")] == ["/dev/shm"]
    flags = ["--shm-size", "8M", "--tmpfs", "/run:size=1M,mode=0750,uid=33,gid=34", "--tmpfs", "/opt/x/y:exec"]
    proc = kip.run("sized", ["sleep", "1000"], flags=flags)
    for place, kib in (("/dev/shm", 8 << 10), ("/run", 1 << 10)):
        done = proc.exec("sh", "-c", f"dd if=/dev/zero of={place}/x bs=1k count={kib + 1} 2>&1", check=False)
        assert done.returncode != 0 and "No space left on device" in done.stdout
    for _ in range(2):
        assert proc.exec("stat", "-c", "%a %u %g", "/run").stdout == "750 33 34\n"
        assert proc.exec("sh", "-c", "cp /usr/bin/true /opt/x/y/true && /opt/x/y/true && cp /opt/x/y/true /tmp/ && echo ran").stdout == "ran\n"
        done = proc.exec("sh", "-c", "rm -f /dev/shm/x; cp /usr/bin/true /dev/shm/true && /dev/shm/true", check=False)
        assert "Permission denied" in done.stderr
        proc.exec("sh", "-c", "rm /opt/x/y/true /dev/shm/true; chmod 0750 /run")
        proc.sleep()
    assert "/run:size=1048576,mode=750,uid=33,gid=34" in kip.cli("inspect", "sized").stdout
    for bad, told in [
        (["--tmpfs", "/dev/shm"], "--shm-size says how large"),
        (["--tmpfs", "/proc/x"], "that is the sandbox's own"),
        (["--tmpfs", "/a:size=much"], "known are size=SIZE"),
    ]:
        done = kip.cli("run", *bad, "--", "true", check=False)
        assert done.returncode == 2 and told in done.stderr, done.stderr
    assert "something else is mounted there" in kip.refused("run", "--tmpfs", "/a", "-v", "x:/a", "--", "true")


def memory_bytes(kip: Kip, name: str) -> int:
    """What the kernel charges the proc's cgroup with."""
    for top in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        for file in ("memory.usage_in_bytes", "memory.current"):
            path = Path(top) / f"kip-{kip.instance}" / name / file
            if path.exists():
                return int(path.read_text())
    raise AssertionError(f"{name} has no cgroup with memory")


# promise K14: what is in memory counts for its proc, also when it has come back from a snapshot; a
#   parked proc has no more than 1 MiB and 256 files of it in memory, where nothing is watched
def test_it_counts_for_its_proc(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    flags = ["--shm-size", "200M", "--mem", "100M"]
    proc = kip.run("counted", ["sleep", "1000"], flags=flags)
    proc.exec("sh", "-c", "head -c 40M /dev/urandom > /dev/shm/much")
    for _ in range(2):
        assert memory_bytes(kip, "counted") > 40 << 20
        proc.sleep()
        wait_for("its memory is given back", lambda: memory_bytes(kip, "counted") < 20 << 20, 10)
        proc.wake()
        assert proc.exec("stat", "-c", "%s", "/dev/shm/much").stdout == f"{40 << 20}\n"
    done = proc.exec("sh", "-c", "head -c 150M /dev/zero > /dev/shm/more", check=False)
    assert done.returncode != 0, "it is killed at its limit"


# promise K14: a tmpfs lies below the secrets and volumes that are in it, over those that it is in,
#   and links lead to it
def test_mounts_within_mounts(archiving: Kip, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("word")
    flags = ["--tmpfs", "/var/run", "--secret", f"s={tmp_path / 'secret'}", "-v", "data:/srv", "--tmpfs", "/srv/cache:size=1M", "-v", "more:/srv/cache/more"]
    proc = archiving.run("within", ["sleep", "1000"], flags=flags)
    look = "cat /run/secrets/s; cat /srv/cache/more/x /srv/y /run/z; stat -f -c %T /run /srv/cache"
    proc.exec("sh", "-c", "echo 1 > /srv/cache/more/x; echo 2 > /srv/y; echo 3 > /var/run/z; echo 4 > /srv/cache/w")
    expected = "word1\n2\n3\ntmpfs\ntmpfs\n"
    for sleep in (Proc.hibernate, Proc.sleep, Proc.archive, Proc.sleep):
        assert proc.exec("sh", "-c", look).stdout == expected
        sleep(proc)
    assert proc.exec("sh", "-c", look).stdout == expected
    assert proc.exec("cat", "/srv/cache/w").stdout == "4\n"


# promise K14: semaphores and shared memory of Python's multiprocessing, which are files of /dev/shm
#   with and without a name, go on after each tier
@ENGINES
def test_posix_shared_memory(fresh_kip: Callable[..., Kip], store: Path, engine: str) -> None:
    kip = fresh_kip("--store", str(store), *(["--only-criu"] if engine == "by CRIU" else []))
    proc = kip.run("shared", COMMAND, ports=[PORT], flags=["-v", f"{programs.SOURCES / 'lines.py'}:/srv/lines.py:ro"])
    client = Lines(proc.port())
    begin = textwrap.dedent(
        """
        import multiprocessing as m
        from multiprocessing import shared_memory
        c = m.get_context('fork')
        s, q, block = c.Semaphore(0), c.SimpleQueue(), shared_memory.SharedMemory(create=True, size=1 << 16)
        def work():
            while True:
                s.acquire(); block.buf[0] += 1; q.put(block.buf[0])
        c.Process(target=work, daemon=True).start()
        def turn():
            s.release(); return q.get()
        """
    )
    assert client.ask(f"exec({begin!r}, globals())") == "None"
    for number, sleep in enumerate([Proc.hibernate, Proc.sleep, Proc.sleep, Proc.archive, Proc.sleep]):
        assert client.ask("turn()") == str(number + 1)
        sleep(proc)
    assert client.ask("turn()") == "6"


# promise K14: what watches files in memory goes on doing so after a park, however much is there
def test_watches(fresh_kip: Callable[..., Kip]) -> None:
    proc, client = start(fresh_kip(), "--tmpfs", "/run", size=4 << 20)
    for line in (
        "exec('import ctypes; libc = ctypes.CDLL(None)', globals())",
        "exec('i = libc.inotify_init1(0o4000); libc.inotify_add_watch(i, b\"/dev/shm\", 0x100)', globals())",
    ):
        assert client.ask(line) == "None"
    for turn in range(1, 3):
        proc.sleep()
        assert client.ask(f"open('/dev/shm/new{turn}', 'w').close()") == "None"
        assert f"new{turn}" in client.ask("os.read(i, 4096)")


# promise files: a tmpfs and the size of /dev/shm in a kip.toml and in a Compose file; `kip cp`
#   reaches what is in memory of a proc that is awake, and refuses it of one that sleeps
def test_files(kip: Kip, tmp_path: Path) -> None:
    file = tmp_path / "kip.toml"
    file.write_text('[proc.filed]\ncommand = "sleep 1000"\nshm-size = "8M"\ntmpfs = ["/run:size=1M", "/tmp"]\n')
    kip.cli("apply", "-f", file)
    assert kip.cli("diff", "-f", file, check=False).returncode == 0
    spec = kip.json("inspect", "filed")["spec"]
    assert (spec["shm_bytes"], spec["tmpfs"]) == (8 << 20, ["/run:size=1048576", "/tmp"])
    (tmp_path / "new").write_text("new")
    kip.cli("cp", tmp_path / "new", "filed:/run/new")
    assert kip.cli("exec", "filed", "cat", "/run/new").stdout == "new"
    Proc(kip, "filed").sleep()
    for word in (["filed:/run/new", tmp_path / "back"], [tmp_path / "new", "filed:/run/other"]):
        assert kip.refused("cp", *word)
    assert kip.cli("exec", "filed", "cat", "/run/new").stdout == "new"
    kip.cli("cp", "filed:/run/new", tmp_path / "back")
    assert (tmp_path / "back").read_text() == "new"
