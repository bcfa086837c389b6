"""Lines with a spread over two logarithmic axes, as SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from parkwake.svg import COLOURS, TEXT, number, ticks

LEFT, RIGHT, TOP, WIDTH, HEIGHT, BOTTOM = 70, 190, 74, 980, 520, 50


@dataclass(frozen=True)
class Point:
    x: float
    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Line:
    label: str
    points: list[Point]


@dataclass
class Plot:
    """`marks` are horizontal lines: (value, label)."""

    title: str
    subtitle: str
    x_unit: str
    y_unit: str
    lines: list[Line]
    marks: list[tuple[float, str]] = field(default_factory=list)


def draw(plot: Plot) -> str:
    xs = [p.x for line in plot.lines for p in line.points]
    ys = [v for line in plot.lines for p in line.points for v in (p.low, p.middle, p.high) if v > 0]
    ys += [value for value, _ in plot.marks]
    low_x, high_x, low_y, high_y = min(xs) / 1.2, max(xs) * 1.2, min(ys) / 1.4, max(ys) * 1.4

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low_x) / math.log(high_x / low_x)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * math.log(max(value, low_y) / low_y) / math.log(high_y / low_y)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="12" y="24" font-size="17" font-weight="bold" {TEXT}>{escape(plot.title)}</text>',
        f'<text x="12" y="43" font-size="11" fill="#555" {TEXT}>{escape(plot.subtitle)}</text>',
        f'<text x="12" y="{TOP - 12}" font-size="11" {TEXT}>{escape(plot.y_unit)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" font-size="11" text-anchor="middle" {TEXT}>'
        f"{escape(plot.x_unit)}</text>",
    ]
    for tick in ticks(low_x, high_x, log=True):
        out.append(f'<path d="M{x(tick):.1f} {TOP} V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        out.append(
            f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 14}" font-size="10" text-anchor="middle" {TEXT}>{number(tick)}</text>'
        )
    for tick in ticks(low_y, high_y, log=True):
        out.append(f'<path d="M{LEFT} {y(tick):.1f} H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" font-size="10" text-anchor="end" {TEXT}>{number(tick)}</text>')
    for value, label in plot.marks:
        out.append(f'<path d="M{LEFT} {y(value):.1f} H{WIDTH - RIGHT}" stroke="#000" stroke-width="1.2" stroke-dasharray="4 2"/>')
        out.append(f'<text x="{WIDTH - RIGHT + 6}" y="{y(value) + 3:.1f}" font-size="9" {TEXT}>{escape(label)}</text>')
    for place, line in enumerate(plot.lines):
        colour = COLOURS[place % len(COLOURS)]
        way = " ".join(f"{'L' if i else 'M'}{x(p.x):.1f} {y(p.middle):.1f}" for i, p in enumerate(line.points))
        out.append(f'<path d="{way}" stroke="{colour}" stroke-width="2" fill="none"/>')
        for p in line.points:
            out.append(f'<path d="M{x(p.x):.1f} {y(p.low):.1f} V{y(p.high):.1f}" stroke="{colour}" stroke-width="1"/>')
            out.append(f'<circle cx="{x(p.x):.1f}" cy="{y(p.middle):.1f}" r="3" fill="{colour}"/>')
        top = TOP + 4 + 18 * place
        out.append(f'<rect x="{LEFT + 12}" y="{top}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + 30}" y="{top + 10}" font-size="11" {TEXT}>{escape(line.label)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
