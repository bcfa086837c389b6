"""Waiting on conditions, with a deadline each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
