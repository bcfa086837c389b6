"""How many threads a second a program makes and ends without Kip, in a proc, and right after a hibernation, while its memory comes back."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.clients import read_to_end
from harness.programs import c_program, tarball
from parkwake.kiphost import daemon
from parkwake.workspace import Failed, Workspace, command

# Threads that make others, and threads that wait.
SHAPES = ((2, 0), (32, 1700))
SECONDS = 2.0
PORT, START_S = 7000, 10.0
CLONE_NEWNET = 0x40000000
WAYS = ("native", "hot", "hibernated")


def made(port: int) -> tuple[int, int]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        count, us = read_to_end(client, 60).decode().split()
    return int(count), int(us)


def a_second(port: int) -> float:
    """Threads made and ended from the first answer on."""
    (before, began), _, (after, ended) = made(port), time.sleep(SECONDS), made(port)
    return (after - before) / (ended - began) * 1e6


def in_own_network(libc: ctypes.CDLL, words: list[str]) -> float:
    """Of the thread that calls it: a network namespace is a thread's, and what that starts is in it."""
    if libc.unshare(CLONE_NEWNET):
        raise Failed(f"a network namespace: {os.strerror(ctypes.get_errno())}")
    command("ip", "link", "set", "lo", "up")
    with subprocess.Popen(words, stdin=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + START_S
            while True:
                try:
                    return a_second(PORT)
                except ConnectionRefusedError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.05)
        finally:
            process.kill()


def native(work: Workspace, words: list[str]) -> float:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(in_own_network, work.libc, words).result()


def measure(work: Workspace, program_path: Path, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    program = c_program("threads", "-static")
    tar = tarball(work.dir / "threads.tar", {"threads": program})
    found = []
    with daemon(program_path, work.dir / "threads-data") as kip:
        for makers, idle in SHAPES:
            row: dict[str, Any] = {"makers": makers, "idle": idle, **{way: [] for way in WAYS}}
            words = [str(makers), str(idle)]
            flags = ["--idle", "24h", "--pids", "4096"]
            for number in range(rounds):
                # One at a time: they would take the processors from each other.
                row["native"].append(native(work, [str(program), *words]))
                proc = kip.run("threads", ["/threads", *words], ports=[PORT], tar=tar, flags=flags)
                row["hot"].append(a_second(proc.port()))
                proc.hibernate_once()
                row["hibernated"].append(a_second(proc.port()))
                proc.remove()
                say(f"threads, {makers} makers: {number + 1} of {rounds} rounds")
            found.append(row)
    return found
