"""The samples as tables and figures, beside the issue's target and what paper P says of its figures 7 and 8."""

from __future__ import annotations

from typing import Any

from parkwake.report import ms, table, verdict
from parkwake.stats import percentile
from strawman.experiment import SIZES
from strawman.plot import Line, Plot, Point

Row = dict[str, Any]

LABELS = {"activeset": "ActiveSet", "reactive": "reactive, B = 32", "whole": "whole image"}

# What the text of paper P says (section 6.4): EC2 c4.large, images on S3, medians of 20.
PAPER = "Picocenter, section 6.4, EC2 c4.large, images on S3, medians of 20"
PAPER_ACTIVESET_8MB_MS = 250  # stays under it, figure 7
PAPER_WHOLE_MS = 400  # over it, at every size, figure 7
PAPER_REACTIVE_MEETS_WHOLE = 2 << 20  # from this size on reactive paging is slower than the whole image, figure 7
PAPER_SHIFT_FLAT = 0.10  # up to this error the latency is consistently low, figure 8
PAPER_SHIFT_MEETS_WHOLE = 0.20  # from this error on the whole image is faster, figure 8

TARGET_8MB_MS = 25.0


def size_name(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def by_size(data: Row) -> dict[int, dict[str, list[float]]]:
    found: dict[int, dict[str, list[float]]] = {}
    for row in data["sizes"]:
        if "us" in row:
            found.setdefault(row["size"], {}).setdefault(row["way"], []).append(row["us"])
    return found


def by_shift(data: Row) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for row in data["shifts"]:
        found.setdefault(row["shift"], []).append(row["us"])
    return found


def meets(data: Row) -> int | None:
    """From which size on reactive paging is slower than the whole image."""
    both = {s: ways for s, ways in by_size(data).items() if {"reactive", "whole"} <= ways.keys()}
    slower = [s for s, ways in both.items() if percentile(ways["reactive"], 50) > percentile(ways["whole"], 50)]
    return min(slower) if slower else None


def size_table(data: Row) -> str:
    rows = []
    for size, ways in by_size(data).items():
        line = [size_name(size)]
        for way in LABELS:
            line += [ms(percentile(ways[way], 50)), ms(percentile(ways[way], 90))] if way in ways else ["-", "-"]
        last = size == SIZES[-1] and "activeset" in ways
        values = ways.get("activeset", [])
        said = [f"<= {TARGET_8MB_MS:g}", verdict(percentile(values, 50) <= TARGET_8MB_MS * 1000)] if last else ["", ""]
        rows.append([*line, *said, f"< {PAPER_ACTIVESET_8MB_MS}" if last else "", str(min(map(len, ways.values())))])
    head = ["first reply, ms, by working set"]
    for label in LABELS.values():
        head += [label, "p90"]
    head += ["target", "", "paper P, ActiveSet", "n"]
    at = meets(data)
    own = f"from {size_name(at)} on" if at else "at no size that was measured by both"
    note = (
        f"Reactive paging is slower than the whole image {own}; paper P: from {size_name(PAPER_REACTIVE_MEETS_WHOLE)} on. "
        f"Its whole image takes over {PAPER_WHOLE_MS} ms at every size."
    )
    return f"{table(head, rows)}\n{note}"


def part_table(data: Row) -> str:
    """What came back, and what the daemon says of the wakes."""
    rows = []
    for size in by_size(data):
        for way, label in LABELS.items():
            if way not in by_size(data)[size]:
                continue
            mine = [r for r in data["sizes"] if r["size"] == size and r["way"] == way and "us" in r]
            hot = next(r["hot_us"] for r in data["sizes"] if r["size"] == size and r["way"] == way and "hot_us" in r)
            rows.append([
                f"{size_name(size)}: {label}", ms(hot), ms(percentile([r["wake"]["total_us"] for r in mine], 50)),
                f"{percentile([r['rss_bytes'] for r in mine], 50) / 1024:,.0f}",
                ms(percentile([r["sleep"]["frozen_us"] for r in mine], 50)),
                f"{percentile([r['sleep']['bytes_written'] for r in mine], 50) / 1024:,.0f}",
            ])  # fmt: skip
    return table(["what it took, p50", "hot, ms", "wake, ms", "back in memory, KiB", "frozen, ms", "KiB written"], rows)


def shift_table(data: Row) -> str:
    rows = []
    for shift, values in by_shift(data).items():
        rows.append([f"{shift:.1%}", ms(percentile(values, 50)), ms(percentile(values, 90)), str(len(values))])
    note = (
        f"Paper P: consistently low up to {PAPER_SHIFT_FLAT:.0%}, then linear; from {PAPER_SHIFT_MEETS_WHOLE:.0%} on the whole "
        "image is faster."
    )
    return f"{table(['first reply, ms, by what the ActiveSet misses of 8 MB', 'p50', 'p90', 'n'], rows)}\n{note}"


PARTS = [("sizes", size_table), ("sizes", part_table), ("shifts", shift_table)]


def text(data: Row) -> str:
    m, p = data["machine"], data["parameters"]
    head = [
        f"bench/activeset, commit {m['commit']}, {p['begun']}, {p['samples']} samples",
        f"{m['cpu']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB, Linux {m['kernel']}, {m['distribution']}",
        f"load average {p['load_at_start']:.2f} at the start, {p['load_at_end']:.2f} at the end, nice {p['nice']}"
        + (" -- THE MACHINE WAS BUSY: these numbers are too high" if p["busy"] else ""),
        f"a strawman of 64 MB, parked, its snapshot on disk{' and dropped from the page cache' if p['cold_cache'] else ''}",
        f"paper P: {PAPER}",
    ]
    parts = ["\n".join(head), *[show(data) for key, show in PARTS if any("us" in r for r in data.get(key, []))]]
    if data.get("failed"):
        parts.append(f"THE RUN FAILED BEFORE ITS END: {data['failed']}")
    if data.get("complaints"):
        parts.append("the daemon's own account: " + data["complaints"])
    return "\n\n".join(parts) + "\n"


def points(series: dict[float, list[float]]) -> list[Point]:
    return [Point(x, *(percentile(us, p) / 1000 for p in (10, 50, 90))) for x, us in series.items()]


def plots(data: Row) -> dict[str, Plot]:
    m = data["machine"]
    under = f"p50, whiskers p10 to p90; {m['cpu']}, {m['cores']} cores, Linux {m['kernel']}, commit {m['commit'][:12]}"
    found: dict[str, Plot] = {}
    if data.get("sizes") and by_size(data):
        lines = []
        for way, label in LABELS.items():
            if series := {s / 1024: ways[way] for s, ways in by_size(data).items() if way in ways}:
                lines.append(Line(label, points(series)))
        marks = [(PAPER_ACTIVESET_8MB_MS, "paper P: ActiveSet at 8 MB is below"), (PAPER_WHOLE_MS, "paper P: whole image is above")]
        marks.append((TARGET_8MB_MS, "target, ActiveSet at 8 MB"))
        title = "First reply of a parked strawman of 64 MB (paper P, figure 7)"
        found["activeset-size"] = Plot(title, under, "working set, KB", "milliseconds", lines, marks)
    if data.get("shifts"):
        lines = [Line("ActiveSet", points({s * 100: us for s, us in by_shift(data).items()}))]
        marks = []
        sizes = by_size(data) if data.get("sizes") else {}
        if sizes and "whole" in sizes[max(sizes)]:
            marks.append((percentile(sizes[max(sizes)]["whole"], 50) / 1000, "whole image, here"))
        title = "First reply when the ActiveSet misses a part of 8 MB (paper P, figure 8)"
        found["activeset-shift"] = Plot(title, under, "missed, %", "milliseconds", lines, marks)
    return found
