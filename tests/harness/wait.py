"""Waiting on conditions, with a deadline each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# A wake begins this much ahead of its timer at most: 20 ms, and as long as the last wake took,
# which counts 300 ms at most.
AHEAD_S = 0.35


class TimedOut(AssertionError):
    """A condition did not come true in time."""


def wait_for(what: str, condition: Callable[[], T], timeout: float = 10.0, every: float = 0.02) -> T:
    """Calls `condition` until it gives something true, which is returned."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimedOut(f"{what}: not within {timeout} s, last seen {value!r}")
        time.sleep(every)
