"""Horizontal bars with a spread, as SVG: one figure, groups of bars, a logarithmic or linear axis."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

BAR, GAP, GROUP_GAP, RIGHT, WIDTH, TOP = 15, 4, 16, 150, 980, 74
COLOURS = ["#4878a8", "#d1605e", "#e49444", "#6a9f58", "#a87c9f", "#967662", "#85b6b2", "#e7ca60", "#857aab", "#b8b0ac"]
TEXT = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif"'


@dataclass(frozen=True)
class Bar:
    """A middle with its spread."""

    label: str
    low: float
    middle: float
    high: float
    note: str = ""


@dataclass
class Figure:
    """`marks` are vertical lines per group: (value, label)."""

    title: str
    subtitle: str
    unit: str
    groups: list[tuple[str, list[Bar]]]
    log: bool = True
    marks: dict[str, tuple[float, str]] = field(default_factory=dict)
    base: float | None = None
    """Where bars begin on a linear axis; by default 0."""


def ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    step = 10 ** math.floor(math.log10(high - low))
    while (high - low) / step < 4:
        step /= 2
    first = math.ceil(low / step) * step
    return [first + i * step for i in range(int((high - first) / step + 1e-9) + 1)]


def number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def draw(figure: Figure) -> str:
    bars = [b for _, group in figure.groups for b in group]
    values = [v for b in bars for v in (b.low, b.middle, b.high) if v > 0] + [m[0] for m in figure.marks.values()]
    # All of it may have failed; the table says why.
    low, high = (min(values), max(values)) if values else (1.0, 2.0)
    if figure.log:
        low, high = low / 1.4, high * 1.2
    else:
        low = figure.base if figure.base is not None else 0.0
        high = high + (high - low) * 0.05
    # As wide as the texts need it, at the widths of common fonts.
    left = 40 + 8.2 * max(len(n) for n, _ in figure.groups) + 6.4 * max(len(b.label) for b in bars)
    names = list(dict.fromkeys(b.label for b in bars))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}

    def x(value: float) -> float:
        if figure.log:
            part = (math.log(max(value, low)) - math.log(low)) / (math.log(high) - math.log(low))
        else:
            part = (value - low) / (high - low)
        return left + min(max(part, 0.0), 1.0) * (WIDTH - left - RIGHT)

    out, y = [], TOP
    for name, group in figure.groups:
        begun = y
        out.append(f'<text x="12" y="{y + 12}" font-size="13" font-weight="bold" {TEXT}>{escape(name)}</text>')
        for bar in group:
            fill, middle = colour[bar.label], y + BAR / 2
            out.append(f'<text x="{left - 8}" y="{y + 12}" font-size="11" text-anchor="end" {TEXT}>{escape(bar.label)}</text>')
            width = max(x(bar.middle) - left, 0.5)
            out.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{fill}"/>')
            out.append(
                f'<path d="M{x(bar.low):.1f} {middle} H{x(bar.high):.1f} M{x(bar.low):.1f} {y + 4} v7 M{x(bar.high):.1f} '
                f'{y + 4} v7" stroke="#222" stroke-width="1.2" fill="none"/>'
            )
            text = number(bar.middle) + (f"  {bar.note}" if bar.note else "")
            at = max(x(bar.high), x(bar.middle)) + 7
            out.append(f'<text x="{at:.1f}" y="{y + 12}" font-size="11" {TEXT}>{escape(text)}</text>')
            y += BAR + GAP
        if name in figure.marks:
            value, label = figure.marks[name]
            out.append(
                f'<path d="M{x(value):.1f} {begun - 3} V{y}" stroke="#000" stroke-width="1.5" stroke-dasharray="4 2"/>'
                f'<text x="{x(value) + 3:.1f}" y="{begun - 5}" font-size="9" {TEXT}>{escape(label)}</text>'
            )
        y += GROUP_GAP
    height = y + 26
    grid = []
    for tick in ticks(low, high, figure.log):
        grid.append(f'<path d="M{x(tick):.1f} {TOP - 12} V{y - 6}" stroke="#ddd"/>')
        grid.append(f'<text x="{x(tick):.1f}" y="{y + 10}" font-size="10" text-anchor="middle" {TEXT}>{number(tick)}</text>')
    middle = (left + WIDTH - RIGHT) / 2
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="24" font-size="17" font-weight="bold" {TEXT}>{escape(figure.title)}</text>',
        f'<text x="12" y="43" font-size="11" fill="#555" {TEXT}>{escape(figure.subtitle)}</text>',
        f'<text x="{middle:.0f}" y="{height - 3}" font-size="11" text-anchor="middle" {TEXT}>{escape(figure.unit)}</text>',
    ]
    return "\n".join([*head, *grid, *out, "</svg>"]) + "\n"
