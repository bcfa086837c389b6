"""Lines over time, as SVG: a linear axis of seconds, a linear or logarithmic one of values, and marks of moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from parkwake.svg import COLOURS, TEXT, number, ticks

LEFT, RIGHT, TOP, WIDTH, HEIGHT, BOTTOM = 78, 30, 136, 980, 540, 50
# Of the legend: in each row, and their distances.
COLUMNS, COLUMN, ROW = 4, 225, 18


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]


@dataclass
class Series:
    title: str
    subtitle: str
    unit: str
    lines: list[Line]
    log: bool = False
    moments: list[tuple[float, str]] = field(default_factory=list)
    """Seconds, and the label of a line: its colour."""


def draw(series: Series) -> str:
    ys = [y for line in series.lines for _, y in line.points if y > 0 or not series.log]
    low_y, high_y = (min(ys) / 1.2, max(ys) * 1.2) if series.log else (0.0, max([*ys, 1.0]) * 1.08)
    high_x = max([x for line in series.lines for x, _ in line.points] + [1.0])

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / high_x

    def y(value: float) -> float:
        if series.log:
            part = math.log(max(value, low_y) / low_y) / math.log(high_y / low_y)
        else:
            part = (value - low_y) / (high_y - low_y)
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * part

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="12" y="24" font-size="17" font-weight="bold" {TEXT}>{escape(series.title)}</text>',
        f'<text x="12" y="43" font-size="11" fill="#555" {TEXT}>{escape(series.subtitle)}</text>',
        f'<text x="12" y="{TOP - 10}" font-size="11" {TEXT}>{escape(series.unit)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" font-size="11" text-anchor="middle" {TEXT}>seconds</text>',
    ]
    for tick in ticks(0.0, high_x, log=False):
        out.append(f'<path d="M{x(tick):.1f} {TOP} V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        out.append(
            f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 14}" font-size="10" text-anchor="middle" {TEXT}>{number(tick)}</text>'
        )
    for tick in ticks(low_y, high_y, log=series.log):
        out.append(f'<path d="M{LEFT} {y(tick):.1f} H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" font-size="10" text-anchor="end" {TEXT}>{number(tick)}</text>')
    for place, line in enumerate(series.lines):
        colour = COLOURS[place % len(COLOURS)]
        for at in (at for at, label in series.moments if label == line.label):
            out.append(f'<path d="M{x(at):.1f} {TOP} V{HEIGHT - BOTTOM}" stroke="{colour}" stroke-dasharray="4 3"/>')
        way = " ".join(f"{'L' if i else 'M'}{x(at):.1f} {y(value):.1f}" for i, (at, value) in enumerate(line.points))
        out.append(f'<path d="{way}" stroke="{colour}" stroke-width="1.8" fill="none"/>')
        left, top = 12 + COLUMN * (place % COLUMNS), 56 + ROW * (place // COLUMNS)
        out.append(f'<rect x="{left}" y="{top}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{left + 18}" y="{top + 10}" font-size="11" {TEXT}>{escape(line.label)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
