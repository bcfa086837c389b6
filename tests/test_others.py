"""What one proc does holds up no question about another, and no other."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from harness import programs, servers
from harness.clients import read_to_end
from harness.kip import Kip, Proc
from harness.wait import wait_for

# Rows of all procs are there within so many seconds, whatever one of them does.
ANSWERED_S = 6
# A question about a proc that nothing holds up is answered within so many seconds, one about a proc
# that does not answer within so many.
ONE_S, TOUCHED_S = 6, 20
# A program of 1,700 threads is hibernated within so many seconds: not in ten minutes.
ASLEEP_S = 45


def rows(kip: Kip) -> dict[str, str]:
    began = time.monotonic()
    lines = kip.cli("ps").stdout.splitlines()[1:]
    took = time.monotonic() - began
    assert took < ANSWERED_S, f"kip ps took {took:.1f} s"
    return {line.split()[0]: line for line in lines}


# promise waking: no proc holds up a question about another: with the pager stopped all rows of `kip
#   ps` are there in seconds, and those that it has touched do not answer; a program that makes and
#   ends threads all the time goes on at half its speed at least after a hibernation
# held by: this, `tests/test_others.py::test_who_makes_and_ends_threads_all_the_time`
def test_rows_come_without_the_pager(kip: Kip, tmp_path: Path) -> None:
    """It stands still and tells nothing of what it has touched: those procs do not answer, and all others do."""
    server = servers.lighttpd()
    tar = server.tarball(tmp_path)
    touched = [kip.run(f"touched-{n}", server.command, ports=server.published, tar=tar, flags=["--idle", "1h"]) for n in range(6)]
    for proc in touched:
        proc.hibernate()
        proc.wake()
    kip.run("other", server.command, ports=server.published, tar=tar, flags=["--idle", "1h"])
    pager = kip.info()["pager_pid"]
    os.kill(pager, signal.SIGSTOP)
    try:
        for _ in range(2):
            found = rows(kip)
            assert {name for name, row in found.items() if "does not answer" in row} == {proc.name for proc in touched}, found
            assert len(found) == 7
        # Each question about one of them, and about the other, has its answer or its refusal in
        # time.
        questions = [["inspect"], ["why"], ["port"], ["logs"]]
        for name in ("other", touched[0].name):
            for words in questions:
                began = time.monotonic()
                done = kip.cli(*words, name, check=False, timeout=60)
                took = time.monotonic() - began
                assert took < (ONE_S if name == "other" else TOUCHED_S), (words, name, took)
                assert name != "other" or done.returncode == 0, (words, done)
        for words in (["top", "--once"], ["stats", "--no-stream"]):
            began = time.monotonic()
            assert "other" in kip.cli(*words, check=False, timeout=60).stdout
            assert time.monotonic() - began < ANSWERED_S, words
    finally:
        os.kill(pager, signal.SIGCONT)
    wait_for("all answer", lambda: not any("does not answer" in row for row in rows(kip).values()), 10)


def made(proc: Proc, timeout: float = 30) -> tuple[int, int]:
    with socket.create_connection(("127.0.0.1", proc.port()), timeout=timeout) as client:
        count, us = read_to_end(client).decode().split()
    return int(count), int(us)


def a_second(proc: Proc, seconds: float = 2) -> float:
    """Threads made and ended."""
    (before, began), _, (after, ended) = made(proc), time.sleep(seconds), made(proc)
    return (after - before) / (ended - began) * 1e6


@pytest.mark.measures
@pytest.mark.parametrize(("makers", "idle"), [(2, 0), pytest.param(32, 1700, marks=pytest.mark.soak)])
def test_who_makes_and_ends_threads_all_the_time(kip: Kip, tmp_path: Path, makers: int, idle: int) -> None:
    """Its mappings change thousands of times a second while its memory comes back; it goes on at half its speed at least, and the others
    notice nothing."""
    tar = programs.tarball(tmp_path / "threads.tar", {"threads": programs.c_program("threads", "-static")})
    fighter = kip.run("fighter", ["/threads", str(makers), str(idle)], ports=["7000"], tar=tar, flags=["--idle", "1h", "--pids", "4096"])
    server = servers.lighttpd()
    other = kip.run("other", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=["--idle", "1h"])
    ratios = []
    for _ in range(3):
        # Anew: what else this machine does changes within seconds.
        native = a_second(fighter)
        began = time.monotonic()
        fighter.hibernate_once()
        assert time.monotonic() - began < ASLEEP_S
        rows(kip)
        other.hibernate()
        began = time.monotonic()
        other.wake()
        assert time.monotonic() - began < ANSWERED_S
        ratios.append(a_second(fighter) / native)
        rows(kip)
    print(f"{makers} makers, {idle} idle: {native:.0f} threads a second; after a hibernation {', '.join(f'{r:.2f}' for r in ratios)} of that")
    assert sorted(ratios)[1] >= 0.5, (native, ratios)
    fighter.remove()
    other.remove()
