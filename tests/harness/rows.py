"""Tables of tests that are too long for `make test`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def rest_in_soak(every: Iterable[str], here: Collection[str]) -> list[object]:
    """Values for `parametrize`: `make test` has those `here`, which stand for all, and `make soak` the others."""
    values = list(every)
    assert set(here) < set(values), f"no row: {set(here) - set(values)}"
    return [value if value in here else pytest.param(value, marks=pytest.mark.soak) for value in values]
