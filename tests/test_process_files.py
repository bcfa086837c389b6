"""Open files that proc(5) has of a process: each comes back by a plan, as the file of the same process, at its position."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.kip import Kip, Proc
from harness.wait import wait_for

# A parent and its child have files of each other's and of their own open, watch one in an epoll
# set, and say at a signal what each descriptor is and whether it still reads.
PROGRAM = """
import json, os, select, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
names = ["statm", "stat", "status", "maps", "mountinfo", "fd", "environ", "cmdline"]
parent, child = os.getpid(), os.fork()
other = child or parent
me = "parent" if child else "child"
held = {}
for name in names:
    for whose in ("self", other):
        flags = os.O_RDONLY | (os.O_DIRECTORY if name == "fd" else 0)
        held[f"{whose == 'self'} {name}"] = os.open(f"/proc/{whose}/{name}", flags)
os.lseek(held["True cmdline"], 3, os.SEEK_SET)
memory = os.open("/proc/self/mem", os.O_RDWR)
word = bytearray(b"the word that is there")
import ctypes
at = ctypes.addressof(ctypes.c_char.from_buffer(word))
mounts = select.epoll()
mounts.register(held["True mountinfo"], select.EPOLLERR | select.EPOLLPRI)
def look():
    found = {}
    for what, fd in held.items():
        where = os.readlink(f"/proc/self/fd/{fd}")
        name = what.split()[1]
        if name == "fd":
            read = len(os.listdir(fd)) > 0
        else:
            position = os.lseek(fd, 0, os.SEEK_CUR)
            read = [position, len(os.pread(fd, 64, position)) > 2, os.get_inheritable(fd)]
        found[what] = [where, read]
    found["mem"] = os.pread(memory, len(word), at).decode()
    found["mounts"] = len(mounts.poll(0)) >= 0
    return found
while True:
    print(json.dumps([me, look()]), flush=True)
    signal.sigwait([signal.SIGUSR1])
"""


def said(proc: Proc, times: int) -> dict[str, object]:
    lines = wait_for("both have said", lambda: (text := proc.logs().splitlines()) and len(text) == 2 * times and text, 20)
    return dict(json.loads(line) for line in lines[-2:])


# promise waking: files of proc(5) that a program has open, of its own process and of others, come
#   back natively: each once, at its position, in its epoll sets; one that two descriptors share, of
#   a thread, or of the sandbox's pid 1 leaves the wake to CRIU
@pytest.mark.parametrize("engine", ["native", "criu"])
def test_files_of_processes(fresh_kip: Callable[..., Kip], store: Path, engine: str) -> None:
    kip = fresh_kip("--store", str(store), *(["--only-criu"] if engine == "criu" else []))
    proc = kip.run("files", ["python3", "-c", PROGRAM], flags=["--idle", "1h"])
    first = said(proc, 1)
    assert first["parent"]["mem"] == "the word that is there"
    for times, tier in enumerate(("hibernated", "parked", "parked", "archived"), 2):
        {"hibernated": proc.hibernate, "parked": proc.sleep, "archived": proc.archive}[tier]()
        proc.exec("sh", "-c", "kill -USR1 2 3 || kill -USR1 $(pgrep python3)")
        assert said(proc, times) == first
        wake = proc.inspect()["last_wake"]
        assert wake["from"] == tier and (tier == "hibernated" or proc.rebuilt() == (engine == "native")), wake
    proc.remove()


# It opens one file in a way that a native restore does not open it.
SHARED = """
import os, sys, threading, time
how = sys.argv[1]
fd = os.open({"twice": "/proc/self/stat", "thread": "/proc/thread-self/stat", "init": "/proc/1/stat"}[how], os.O_RDONLY)
if how == "twice":
    os.dup(fd)
print("up", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["twice", "thread", "init"])
def test_what_is_left_to_criu(kip: Kip, how: str) -> None:
    proc = kip.run(f"left-{how}", ["python3", "-c", SHARED, how], flags=["--idle", "1h"])
    wait_for("it is up", lambda: "up" in proc.logs(), 10)
    for _ in range(2):
        proc.sleep()
        proc.wake()
        assert not proc.rebuilt() and proc.state == "running"
