"""A signal whose handler runs as a program comes back ends the wait that it came in, as without Kip."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import pytest

from harness import programs
from harness.clients import read_to_end
from harness.kip import Kip, Proc
from harness.wait import wait_for

# How late a wait ends is judged.
pytestmark = pytest.mark.measures

# Parked, hibernated and parked.
SLEEPS = 6
# How late a wait may end, microseconds: CRIU starts and makes the processes meanwhile, where they
# are woken for it.
LATE_US = 1_500_000


def told(proc: Proc) -> dict[str, tuple[int, ...]]:
    """How often each wait's handler ran, how often the wait ended with EINTR, and how often otherwise."""
    with socket.create_connection(("127.0.0.1", proc.port()), timeout=30) as client:
        lines = [line.split() for line in read_to_end(client).decode().splitlines()]
    return {name: tuple(map(int, counts)) for name, *counts in lines}


# promise waking: a signal whose handler runs as the program comes back ends the wait that it came
#   in with EINTR, as without Kip: 22 kinds of waits, with and without SA_RESTART; natively, by
#   CRIU, blocked and held
# held by: this, `tests/test_handlers.py::test_a_sleep_that_a_handler_ends_says_what_is_left`,
#   `kip_sys::restart::tests::a_handler_that_comes_first_ends_the_call`,
#   `kip_sys::restart::tests::each_call_is_broken_off_as_the_kernel_does`
# promise waking: a held proc is on time for the timers of processes that are too small to be taken
#   out
@pytest.mark.parametrize(("engine", "hibernate"), [("plan", "held"), ("plan", "blocked"), ("CRIU", "held")])
def test_a_handler_ends_the_wait_that_it_came_in(fresh_kip: Callable[..., Kip], engine: str, hibernate: str) -> None:
    """Its timer expires while the program sleeps; a wait that began anew after the handler would be told of once less."""
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    tar = programs.tarball(programs.directory() / "handlers.tar", {"handlers": programs.c_program("handlers", "-static")})
    flags = ["--idle", "1h", "--tick", "0s", "--hibernate", hibernate]
    proc = kip.run("handlers", ["/handlers"], ports=["7000"], tar=tar, flags=flags)
    for number in range(SLEEPS):
        before = told(proc)
        wait_for("every timer expires", lambda b=before: all(t[0] > b[name][0] for name, t in told(proc).items()), 20)
        if number % 3 == 1:
            proc.hibernate_once("--clock", "auto")
        else:
            kip.cli("sleep", proc.name, "--to", "parked", "--clock", "auto")
        if proc.state == "hibernated" and not proc.inspect()["last_sleep"]["held"]:
            # Blocked, or found at work: it stays so, for its processes are too small to be taken
            # out, and its timers go on.
            proc.wake()
        wait_for("a timer brings it back", lambda: proc.state == "running", 30)
    before = told(proc)
    wait_for("every timer expires", lambda: all(t[0] > before[name][0] for name, t in told(proc).items()), 20)
    wrong = {}
    for name, (handled, interrupted, other) in told(proc).items():
        # A wait whose handler has run may not have counted its EINTR yet.
        right = interrupted == 0 if name.startswith("again_") else handled - 1 <= interrupted <= handled
        if other or not right:
            wrong[name] = f"handler {handled}, EINTR {interrupted}, other {other}"
    assert not wrong, wrong
    assert proc.rebuilt() == (engine == "plan")


@pytest.mark.parametrize("engine", ["plan", "CRIU", "held"])
def test_a_sleep_that_a_handler_ends_says_what_is_left(fresh_kip: Callable[..., Kip], engine: str) -> None:
    """Of the whole time, and not what was left when it fell asleep: sleep(3) would wait for that once more."""
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    tar = programs.tarball(programs.directory() / "handlers.tar", {"handlers": programs.c_program("handlers", "-static")})
    proc = kip.run("rest", ["/handlers", "6"], tar=tar, flags=["--idle", "1h", "--tick", "0s", "--hibernate", "held"])
    proc.hold() if engine == "held" else proc.sleep()
    said = wait_for("both have ended", lambda: len(lines := proc.logs().split("\n")) > 2 and lines[:2], 30)
    for line in said:
        name, error, wrong_us = line.split()
        assert int(error) == errno.EINTR and abs(int(wrong_us)) < LATE_US, line
    assert engine == "held" or proc.rebuilt() == (engine == "plan")


# promise waking: a program that filters its own calls, seccomp(2), makes no other calls than its
#   own when it wakes, and its waits end on time
# held by: this,
#   `kip_criu_images::processes::tests::filters_besides_the_sandbox_s_are_the_program_s_own`
@pytest.mark.parametrize("tier", ["parked", "held"])
def test_filters_of_the_program_see_its_own_calls_only(fresh_kip: Callable[..., Kip], tier: str) -> None:
    """A call that Kip exchanged for another would be the program's end."""
    kip = fresh_kip()
    tar = programs.tarball(programs.directory() / "filtered.tar", {"filtered": programs.c_program("filtered", "-static")})
    flags = ["--idle", "1h", "--tick", "0s", "--hibernate", "held"]
    proc = kip.run("filtered", ["/filtered"], ports=["7000"], tar=tar, flags=flags)
    for _ in range(3):
        before = told(proc)
        proc.sleep() if tier == "parked" else proc.hold()
        wait_for("a time-out brings it back", lambda: proc.state == "running", 10)
        wait_for("all waits end", lambda b=before: all(t[0] > b[name][0] + 1 for name, t in told(proc).items()), 20)
    for name, (count, earliest, latest) in told(proc).items():
        assert earliest >= -500 and latest < LATE_US, (name, count, earliest, latest)
    assert tier != "parked" or proc.rebuilt()
