"""What a thread has set for itself with the kernel comes back after a sleep of each tier."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.kip import Kip, Proc
from harness.wait import wait_for

# Each thread sets another value of each kind, the last none, and all say theirs at a signal.
PROGRAM = """
import ctypes, json, os, signal, sys, threading
libc = ctypes.CDLL(None)
SLACK, GET_SLACK, IOPRIO_SET, IOPRIO_GET = 29, 30, 251, 252
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
said, turn = {}, threading.Barrier(4)
def look():
    core = int(open("/proc/self/coredump_filter").read(), 16)
    score = int(open("/proc/self/oom_score_adj").read())
    return [score, sorted(os.sched_getaffinity(0)), libc.prctl(GET_SLACK), libc.syscall(IOPRIO_GET, 1, 0), core, libc.personality(-1)]
def thread(number):
    if number:
        os.sched_setaffinity(0, {number % os.cpu_count()})
        libc.prctl(SLACK, 1000 * number)
        libc.syscall(IOPRIO_SET, 1, 0, 2 << 13 | number)
    while True:
        said[number] = look()
        turn.wait()
        turn.wait()
open("/proc/self/oom_score_adj", "w").write("300")
libc.personality(0x4040000)  # ADDR_NO_RANDOMIZE, STICKY_TIMEOUTS
open("/proc/self/coredump_filter", "w").write("0x7f")
for number in range(3):
    threading.Thread(target=thread, args=(number,), daemon=True).start()
while True:
    turn.wait()
    print(json.dumps(said), flush=True)
    signal.sigwait([signal.SIGUSR1])
    turn.wait()
"""


def said(proc: Proc, times: int) -> dict[str, list[object]]:
    lines = wait_for("it has said", lambda: (text := proc.logs().splitlines()) and len(text) == times and text, 20)
    return json.loads(lines[-1])


# promise parking: a thread's processors, timer slack, priority for disks and filter of core dumps
#   come back, natively and by CRIU; natively its personality, too
@pytest.mark.parametrize("engine", ["native", "criu"])
def test_what_a_thread_has_of_its_own(fresh_kip: Callable[..., Kip], store: Path, engine: str) -> None:
    kip = fresh_kip("--store", str(store), *(["--only-criu"] if engine == "criu" else []))
    proc = kip.run("own", ["python3", "-c", PROGRAM], flags=["--idle", "1h"])
    first = said(proc, 1)
    every = sorted(os.sched_getaffinity(0))
    assert first["0"] == [300, every, 50_000, 0, 0x7F, 0x4040000]
    for number in (1, 2):
        assert first[str(number)] == [300, [number % os.cpu_count()], 1000 * number, 2 << 13 | number, 0x7F, 0x4040000]
    for times, tier in enumerate(("hibernated", "parked", "parked", "archived"), 2):
        {"hibernated": proc.hibernate, "parked": proc.sleep, "archived": proc.archive}[tier]()
        proc.exec("kill", "-USR1", "2")
        if engine == "criu" and tier == "parked":  # docs/limits.md
            first = {number: [*own[:-1], 0] for number, own in first.items()}
        assert said(proc, times) == first
        if engine == "native":  # it may lower what it has raised
            proc.exec("sh", "-c", "echo 200 > /proc/2/oom_score_adj && echo 300 > /proc/2/oom_score_adj")
        wake = proc.inspect()["last_wake"]
        assert wake["from"] == tier and (tier == "hibernated" or proc.rebuilt() == (engine == "native")), wake
    proc.remove()


# promise sandbox: Landlock is a call that the kernel does not know: a sleep would lift what it
#   forbids
def test_landlock_is_unknown(kip: Kip) -> None:
    version = "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); print(c.syscall(444, 0, 0, 1), os.strerror(ctypes.get_errno()))"
    proc = kip.run("asks", ["sleep", "1000"])
    assert proc.exec("python3", "-c", version).stdout.strip() == "-1 Function not implemented"
