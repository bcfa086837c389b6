"""A program is frozen for a sleep in the middle of what its processes do with each other.

One has passed a client's line on, and waits for the answer, and the other has not run since: all of them wait, and nothing from
outside would ever wake the proc. Or one is just ending."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import programs, servers
from harness.clients import Lines
from harness.kip import Kip

SLEEPS = 12


@contextmanager
def crowded(pids: list[int]) -> Iterator[None]:
    """The processes share a processor with a program that never waits, so that whichever is woken runs a little later."""
    processor = min(os.sched_getaffinity(0))
    for pid in pids:
        os.sched_setaffinity(pid, {processor})
    spins = subprocess.Popen(["taskset", "-c", str(processor), "nice", "-n", "-5", "sh", "-c", "while :; do :; done"])
    try:
        yield
    finally:
        spins.kill()
        spins.wait()


# promise waking: a program that began to work between the look at it and its freeze is woken,
#   though each of its threads waits: one for what another has sent to it and it has not taken yet
@pytest.mark.parametrize("lazy", ["on", "off"])
def test_a_line_that_is_passed_on_has_its_answer(fresh_kip: Callable[..., Kip], tmp_path: Path, lazy: str) -> None:
    kip = fresh_kip(start=False)
    kip.up("--fault-at", "park-sampled:20")
    server = servers.memory()
    flags = ["--lazy", lazy, "--never-sleep"]
    proc = kip.run("relay", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    client, asked = Lines(proc.port(), timeout=60), 0
    assert client.ask("fork one") == "done" and client.ask("@one fork two") == "done"

    def sleep() -> None:
        for _ in range(SLEEPS):
            kip.cli("sleep", "relay", "--to", "parked", "--clock", "auto")

    with crowded(proc.inspect()["pids"]), ThreadPoolExecutor(1) as pool:
        slept = pool.submit(sleep)
        while not slept.done():
            asked += 1
            assert client.ask(f"@one @two dive 2 {asked}") == "done"
        slept.result()
    client.close()
    assert asked > SLEEPS


# promise waking: what one process lets go of while it is being frozen, and another one waits for
#   that was stopped before, wakes the proc: a mutex, a lock of a file, a semaphore of System V
@pytest.mark.parametrize("kind", ["mutex", "flock", pytest.param("ofd", marks=pytest.mark.soak), "lock", "semaphore"])
def test_a_lock_that_is_handed_over_is_had(fresh_kip: Callable[..., Kip], kind: str) -> None:
    kip = fresh_kip(start=False)
    kip.up("--fault-at", "park-sampled:20")
    tar = programs.tarball(programs.directory() / "handed.tar", {"handed": programs.c_program("handed", "-static")})
    proc = kip.run("handed", ["/handed"], ports=["7000"], tar=tar, flags=["--never-sleep"])
    client, asked, dice = Lines(proc.port(), timeout=60), 0, random.Random(SLEEPS)

    def sleep() -> None:
        for _ in range(SLEEPS // 2):
            kip.cli("sleep", "handed", "--to", "parked", "--clock", "auto")

    with ThreadPoolExecutor(1) as pool:
        slept = pool.submit(sleep)
        while not slept.done():
            asked += 1
            # It is found asleep, works while it is stopped, and lets go in the middle of that.
            assert client.ask(f"{kind} {dice.randint(15, 40)}") == "done"
            time.sleep(dice.uniform(0, 0.02))
        slept.result()
    client.close()
    assert asked > SLEEPS // 2


# Now and then a process ends that has many threads, of which the first is gone some milliseconds
# before the others.
ENDS = """
import os, threading, time
threading.stack_size(1 << 16)
while True:
    if os.fork() == 0:
        for _ in range(60):
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        os._exit(0)
    os.wait()
    time.sleep(0.1)
"""


# promise parking: a process that is about to end is no reason to refuse a sleep
def test_processes_that_are_ending(kip: Kip) -> None:
    proc = kip.run("ends", ["python3", "-c", ENDS], flags=["--never-sleep"], wait_ready=False)
    for _ in range(15):
        kip.cli("sleep", "ends", "--to", "parked")
    proc.remove()
