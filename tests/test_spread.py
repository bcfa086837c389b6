"""Periodic timers of clones: they keep their interval, and do not all fire at the same moment."""

from __future__ import annotations

import itertools

import pytest

from harness.kip import Kip, Proc
from harness.programs import SOURCES
from harness.wait import wait_for

EVERY = 0.8
BEATS = 5
CLONES = 6


def beats(proc: Proc) -> list[float]:
    return [float(line) for line in proc.logs().split()]


def phases(proc: Proc, since: int = 0) -> list[float]:
    return [beat % EVERY / EVERY for beat in beats(proc)[since:]]


# promise clones: periodic timers of clones (setitimer(2), timer_create(2), timerfd_create(2)) are
#   spread within their interval, so that the clones of one source do not fire at once; each keeps
#   its interval, and the source its phase
@pytest.mark.parametrize("asleep", [False, True], ids=["", "asleep"])
@pytest.mark.parametrize("kind", ["setitimer", "timer_create", "timerfd"])
def test_periodic_timers_of_clones_are_spread(kip: Kip, kind: str, asleep: bool) -> None:
    source = f"{SOURCES / 'beats.py'}:/srv/beats.py:ro"
    proc = kip.run("beats", ["/usr/bin/python3", "/srv/beats.py", kind, str(EVERY)], flags=["-v", source, "--never-sleep"])
    wait_for("it beats", lambda: len(beats(proc)) >= 2, 30)
    if asleep:
        proc.sleep()
    views = kip.json("clone", "beats", "--count", str(CLONES))["clones"]
    clones = [Proc(kip, view["name"]) for view in views]
    for one in (*clones, proc):
        if asleep:
            one.wake()
        wait_for(f"{one.name} beats", lambda one=one: len(beats(one)) >= BEATS, 60)
    # A beat of a busy machine is late, and the next one is not: of several the one in the middle.
    middle = [sorted(phases(one))[BEATS // 2] for one in clones]
    assert max(middle) - min(middle) > 0.05, middle
    for one in clones:
        apart = [b - a for a, b in itertools.pairwise(beats(one)[1:])]
        assert abs(sorted(apart)[len(apart) // 2] - EVERY) < 0.1, apart
    # What it missed while it slept comes at its wake, as one beat.
    mine = sorted(phases(proc))
    near = [phase for phase in mine if min(gap := abs(phase - mine[len(mine) // 2]), 1 - gap) < 0.15]
    assert len(near) >= len(mine) - 1, mine
