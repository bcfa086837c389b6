"""Tables of tests that are too long for `make test`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def rest_in_soak(every: Iterable[object], here: Collection[object]) -> list[object]:
    """Values for `parametrize`: `make test` has those `here`, which stand for all, and `make soak` the others."""
    values = list(every)
    assert set(here) < set(values), f"no row: {set(here) - set(values)}"
    return [value if value in here else pytest.param(value, marks=pytest.mark.soak) for value in values]


def one_in(count: int, every: Iterable[object]) -> list[object]:
    """Values for `parametrize` of a table whose neighbours are alike, as the steps at which a daemon is killed are: `make test` has
    the first and each `count`th after it, and `make soak` the others."""
    row = lambda value: value if isinstance(value, tuple) else (value,)  # noqa: E731
    soak = lambda number: [pytest.mark.soak] if number % count else []  # noqa: E731
    return [pytest.param(*row(value), marks=soak(number)) for number, value in enumerate(every)]
