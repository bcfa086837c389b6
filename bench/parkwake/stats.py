"""Percentiles and a bootstrap; nothing else is assumed of the samples."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def percentile(values: Sequence[float], p: float) -> float:
    """Linear between the nearest ranks."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def pooled_interval(
    rows: Sequence[tuple[Sequence[float], Sequence[float]]], draws: int = 2000
) -> tuple[float, float, float]:
    """Geometric mean of the ratios of several rows (over, under), with the bounds of its 95% bootstrap interval: rounds
    are drawn within each row."""
    pick = random.Random(21)
    pairs = [list(zip(over, under, strict=True)) for over, under in rows]

    def mean(chosen: Sequence[Sequence[tuple[float, float]]]) -> float:
        logs = [math.log(sum(o for o, _ in row) / sum(u for _, u in row)) for row in chosen]
        return math.exp(sum(logs) / len(logs))

    means = [mean([pick.choices(row, k=len(row)) for row in pairs]) for _ in range(draws)]
    return mean(pairs), percentile(means, 2.5), percentile(means, 97.5)


def ratio_interval(over: Sequence[float], under: Sequence[float], draws: int = 4000) -> tuple[float, float, float]:
    """Ratio of the sums of pairs (one pair per round), with the bounds of its 95% bootstrap interval: rounds are drawn,
    so that what hit both of a pair alike cancels out. The generator is seeded: the same samples give the same bounds."""
    assert len(over) == len(under) and over, "one pair per round"
    pick, pairs = random.Random(20), list(zip(over, under, strict=True))
    ratios = []
    for _ in range(draws):
        drawn = pick.choices(pairs, k=len(pairs))
        ratios.append(sum(o for o, _ in drawn) / sum(u for _, u in drawn))
    return sum(over) / sum(under), percentile(ratios, 2.5), percentile(ratios, 97.5)
