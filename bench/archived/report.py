"""The samples as tables and figures, beside the issue's targets and what paper P says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from archived.clamav import FILE_BYTES, FILES, TARGET_TIMES
from archived.replies import CACHED, ROUND_TRIPS, STATES, TARGETS_MS
from parkwake.report import ms, spread, table
from parkwake.stats import percentile
from parkwake.svg import Figure
from strawman.plot import Line, Plot
from strawman.report import LABELS, points, size_name

Row = dict[str, Any]

PAPER = "Picocenter, figures 6 to 8 and section 6.4, EC2, images on S3; medians of 50, 20 and 10"
# Swapped to local storage and to cloud storage, all three applications (section 6.3).
PAPER_PARKED_MS, PAPER_ARCHIVED_MS = "101-122", "158-219"
PAPER_ACTIVESET_8MB_MS, PAPER_WHOLE_MS = 250, 400
PAPER_CLAMAV_MS = (5160, 7490)  # hot, archived; over 81 ms, and parts of the hot one swapped out too

TARGET_8MB_MS = 110.0
TARGET_LITTLE_BYTES = 1.5e6
TARGET_RATE_PART = 0.5

REQUEST_HEAD = ("number", "KB down", "KB up", "first byte p50, ms", "no, in all", "left, in all")
KINDS = ("GET", "ranged GET", "HEAD", "PUT", "LIST", "POST", "DELETE")


def verdict(good: bool) -> str:
    return "REACHED" if good else "MISSED"


def all_requests(data: Row) -> Iterable[Row]:
    for part in ("replies", "sizes", "shifts", "clamav", "uploads"):
        for row in data.get(part, []):
            yield from row.get("requests", [])
            yield from row.get("later", [])
            stored = row.get("stored")
            yield from stored["requests"] if isinstance(stored, dict) else []


def first_byte_ms(data: Row) -> float:
    """The store's first byte as Kip sees it, p50 of fronts and heads: blocks are asked for many at a time, and may wait for each
    other here."""
    return percentile([r["first_ns"] / 1e6 for r in all_requests(data) if r["kind"] == "GET" and r["part"] in ("front", "head")], 50)


def some(values: Sequence[float], p: int) -> str:
    """A percentile, where there are samples enough for it."""
    return ms(percentile(values, p)) if len(values) >= 100 / (100 - p) else "-"


def by_state(data: Row) -> dict[str, dict[float, dict[str, list[float]]]]:
    found: dict[str, dict[float, dict[str, list[float]]]] = {}
    for row in data["replies"]:
        ways = found.setdefault(row["server"], {}).setdefault(row["round_trip_ms"], {})
        ways.setdefault(row["state"], []).append(row["us"])
    return found


def reply_table(data: Row) -> str:
    rows = []
    nearest = min(ROUND_TRIPS.values())
    for server, distances in by_state(data).items():
        for place, round_trip in ROUND_TRIPS.items():
            for state in [*STATES, *([CACHED] if CACHED in distances[round_trip] else [])]:
                values = distances[round_trip][state]
                line = [f"{server}, {round_trip:g} ms ({place}): {state}", ms(percentile(values, 50))]
                line += [some(values, 95), some(values, 99), str(len(values))]
                more = percentile(values, 50) - percentile(distances[round_trip]["hot"], 50)
                line.append("" if state == "hot" else ms(more))
                if round_trip == nearest and state == "archived":
                    most = first_byte_ms(data) + TARGETS_MS[server]
                    line += [f"<= {most:.1f}", verdict(percentile(values, 50) <= most * 1000), PAPER_ARCHIVED_MS]
                elif round_trip == nearest and state == "parked":
                    line += ["", "", PAPER_PARKED_MS]
                rows.append(line + [""] * (9 - len(line)))
        rows.append([""] * 9)
    head = ["first reply, ms (figure 6)", "p50", "p95", "p99", "n", "more than hot", "target p50", "", "paper P, in all"]
    note = f"Targets: the store's first byte, {first_byte_ms(data):.1f} ms here, and " + ", ".join(
        f"{more:g} ms ({server})" for server, more in TARGETS_MS.items()
    )
    return f"{table(head, rows[:-1])}\n{note}. p95 from 20 samples on, p99 from 100 on."


def step_table(data: Row) -> str:
    rows = []
    for server in by_state(data):
        for state in [*STATES[1:], CACHED]:
            steps: dict[str, list[float]] = {}
            for row in data["replies"]:
                if (row["server"], row["state"]) == (server, state):
                    for step in row["wake"]["steps"]:
                        steps.setdefault(step["name"], []).append(step["us"])
            if not steps:
                continue
            rows.append([f"{server}: {state}", ", ".join(f"{name} {ms(percentile(us, 50))}" for name, us in steps.items())])
    return table(["steps of a wake, p50", "ms"], rows)


def request_rows(label: str, samples: Sequence[Sequence[Row]]) -> list[list[str]]:
    """What a wake, or a sleep, asks of the store: mean number of requests by what they are about, and mean bytes."""
    count = len(samples)
    found: dict[tuple[str, str], list[Row]] = {}
    for requests in samples:
        for request in requests:
            found.setdefault((KINDS.index(request["kind"]), request["part"]), []).append(request)
    rows = []
    for (kind, part), requests in sorted(found.items()):
        rows.append([
            f"{label}: {KINDS[kind]} {part}", f"{len(requests) / count:.1f}", f"{sum(r['down'] for r in requests) / count / 1e3:,.1f}",
            f"{sum(r['up'] for r in requests) / count / 1e3:,.1f}", f"{percentile([r['first_ns'] / 1e6 for r in requests], 50):.1f}",
            *[str(n or "") for n in (sum(r["status"] >= 400 for r in requests), sum(not r["whole"] for r in requests))],
        ])  # fmt: skip
    return rows


def groups_of(data: Row) -> dict[str, list[Row]]:
    """Rows of archived wakes, by what woke."""
    found: dict[str, list[Row]] = {}
    for row in data.get("replies", []):
        if row["state"] in ("archived", CACHED):
            found.setdefault(row["server"] + row["state"].removeprefix("archived"), []).append(row)
    for row in data.get("sizes", []):
        if "requests" in row and row["size"] == 8 << 20:
            found.setdefault(f"strawman, 8 MB, {LABELS[row['way']]}", []).append(row)
    for row in data.get("clamav", []):
        if row["state"] == "archived":
            found.setdefault("clamd", []).append(row)
    return found


def request_table(data: Row) -> str:
    rows = []
    for label, mine in groups_of(data).items():
        rows += request_rows(f"{label}, until the reply", [r["requests"] for r in mine])
        rows += request_rows(f"{label}, after it", [r["later"] for r in mine])
        rows += request_rows(f"{label}, going there", [r["stored"]["requests"] for r in mine])
        rows.append([""] * 7)
    head = ["requests of a wake and of a sleep, mean", *REQUEST_HEAD]
    note = (
        "A wake reads the proc's head and takes it over by a compare-and-swap (head), while it reads the generation's front, which "
        "is a stream,\nand the blocks that the front leads to, by ranges of packs. A sleep writes packs and the front and reads each "
        "back, then swaps the head.\n'No': status 400 and above, which is how a store says that there is none, or that a swap came late. "
        "'Left': Kip hung up\nbefore the end, as it does when it has asked twice and one has answered."
    )
    return f"{table(head, rows[:-1])}\n{note}"


def by_size(data: Row) -> dict[int, dict[str, list[float]]]:
    found: dict[int, dict[str, list[float]]] = {}
    for row in data["sizes"]:
        if "us" in row:
            found.setdefault(row["size"], {}).setdefault(row["way"], []).append(row["us"])
    return found


def others(rows: Sequence[Row], **of: Any) -> list[Row]:
    """Wakes that were not of the kind that they stand for."""
    return [r for r in rows if r.get("other_way") and all(r[key] == value for key, value in of.items())]


def other_ways(rows: Sequence[Row]) -> str:
    """A note on them."""
    found = others(rows)
    if not found:
        return ""
    all_of = len([r for r in rows if "us" in r])
    return f"\nNOT AS ASKED FOR, {len(found)} of {all_of} wakes, so these figures are of something else: {found[-1]['other_way']}"


def size_table(data: Row) -> str:
    rows = []
    for size, ways in by_size(data).items():
        line = [size_name(size)]
        for way in LABELS:
            line += [ms(percentile(ways[way], 50)), ms(percentile(ways[way], 90))] if way in ways else ["-", "-"]
        if size == 8 << 20 and "activeset" in ways:
            most = first_byte_ms(data) + TARGET_8MB_MS
            said = verdict(percentile(ways["activeset"], 50) <= most * 1000)
            line += [f"<= {most:.1f}", "not judged" if others(data["sizes"], size=size) else said]
            line.append(f"< {PAPER_ACTIVESET_8MB_MS}; whole > {PAPER_WHOLE_MS}")
        rows.append([*line, *[""] * (10 - len(line)), str(min(map(len, ways.values())))])
    head = ["first reply of 64 MB, ms, by working set (figure 7)"]
    for label in LABELS.values():
        head += [label, "p90"]
    return table([*head, "target", "", "paper P", "n"], rows) + other_ways(data["sizes"])


def by_shift(data: Row) -> dict[float, dict[str, list[float]]]:
    found: dict[float, dict[str, list[float]]] = {}
    for row in data["shifts"]:
        found.setdefault(row["shift"], {}).setdefault(row["way"], []).append(row["us"])
    return found


def shift_table(data: Row) -> str:
    rows = []
    for shift, ways in by_shift(data).items():
        set_ms, whole_ms = (percentile(ways[way], 50) for way in ("activeset", "whole"))
        line = [f"{shift:.1%}", ms(set_ms), ms(percentile(ways["activeset"], 90)), ms(whole_ms), f"{set_ms / whole_ms:.2f}"]
        said = "not judged" if others(data["shifts"], shift=shift) else verdict(set_ms <= whole_ms)
        rows.append([*line, "<= 1", said, str(len(ways["activeset"]))])
    head = ["first reply, ms, by what is missed of 8 MB (figure 8)", "ActiveSet", "p90", "whole image", "of whole", "target", "", "n"]
    return table(head, rows) + other_ways(data["shifts"]) + "\nPaper P: flat up to 10%, then linear; from 20% on the whole image is faster."


def clamav_table(data: Row) -> str:
    by: dict[str, list[float]] = {}
    for row in data["clamav"]:
        if "us" in row:
            by.setdefault(row["state"], []).append(row["us"])
    facts = next(r for r in data["clamav"] if r["state"] == "facts")
    needs, line_mb = percentile(facts["touched_bytes"], 50) / 1e6, data["parameters"]["mb_per_s"]
    archived = [r for r in data["clamav"] if r["state"] == "archived"]
    came = percentile([sum(q["down"] for q in r["requests"]) / 1e6 for r in archived], 50)
    rows = [[f"clamd: {state}", ms(percentile(us, 50)), ms(percentile(us, 90)), str(len(us)), "", ""] for state, us in by.items()]
    more = (percentile(by["archived"], 50) - percentile(by["hot"], 50)) / 1000
    most = first_byte_ms(data) + TARGET_TIMES * needs / line_mb * 1000
    rows.append(["clamd: archived minus hot", f"{more:.0f}", "", "", f"<= {most:.0f}", verdict(more <= most)])
    note = (
        f"It has {facts['pss_bytes'] / 1e6:.0f} MB; a scan touches {needs:.1f} MB of its own memory (pages that the kernel marked "
        f"while it was hot), and until the last reply {came:.1f} MB came from the store, packed.\n"
        f"Target: the store's first byte and {TARGET_TIMES} times what a scan touches over {line_mb:g} MB/s. Paper P: "
        f"{PAPER_CLAMAV_MS[0]} hot, {PAPER_CLAMAV_MS[1]} archived, with a client 81 ms away."
    )
    return f"{table([f'{FILES} files of {FILE_BYTES // 1000} KB scanned, ms', 'p50', 'p90', 'n', 'target', ''], rows)}\n{note}"


def upload_table(data: Row) -> str:
    rows = []
    little = [sum(q["up"] for q in r["requests"]) for r in data["uploads"] if r["what"] == "little"]
    if little:
        most = percentile(little, 50)
        rows.append([
            "1% of 64 MB changed: bytes up, KB", f"{most / 1e3:,.0f}", f"{max(little) / 1e3:,.0f}", str(len(little)),
            f"<= {TARGET_LITTLE_BYTES / 1e3:,.0f}", verdict(most <= TARGET_LITTLE_BYTES),
        ])  # fmt: skip
    noise = [r for r in data["uploads"] if r["what"] == "noise"]
    if noise:
        line_mb = data["parameters"]["mb_per_s"]
        rates = [sum(q["up"] for q in r["requests"]) / r["us"] for r in noise]  # bytes per microsecond are MB/s
        least = TARGET_RATE_PART * line_mb
        rows.append([
            "64 MB of noise: MB/s up, the command's time", f"{percentile(rates, 50):.1f}", f"{min(rates):.1f}", str(len(rates)),
            f">= {least:g}", verdict(percentile(rates, 50) >= least),
        ])  # fmt: skip
        rows.append(["64 MB of noise: seconds of the command", f"{percentile([r['us'] / 1e6 for r in noise], 50):.2f}", "", "", "", ""])
    text = table(["going to the store", "p50", "worst", "n", "target", ""], rows)
    asked = request_rows("1% changed", [r["requests"] for r in data["uploads"] if r["what"] == "little"])
    asked += request_rows("noise", [r["requests"] for r in noise]) if noise else []
    return f"{text}\n\n{table(['requests of a sleep, mean', *REQUEST_HEAD], asked)}"


PARTS = [
    ("replies", reply_table), ("replies", step_table), ("sizes", size_table), ("shifts", shift_table), ("clamav", clamav_table),
    ("uploads", upload_table),
]  # fmt: skip


def text(data: Row) -> str:
    m, p = data["machine"], data["parameters"]
    head = [
        f"bench/archive, commit {m['commit']}, {p['begun']}, {p['samples']} samples",
        f"{m['cpu']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB, Linux {m['kernel']}, {m['distribution']}",
        "; ".join(f"{name}: {version}" for name, version in m["versions"].items()),
        f"load average {p['load_at_start']:.2f} at the start, {p['load_at_end']:.2f} at the end, nice {p['nice']}"
        + (" -- THE MACHINE WAS BUSY: these numbers are too high" if p["busy"] else ""),
        f"store: versitygw on this machine, {p['delay_ms']:g} ms to the first byte beside its own, {p['mb_per_s']:g} MB/s up and down in all",
        f"paper P: {PAPER}",
    ]
    parts = ["\n".join(head), *[show(data) for key, show in PARTS if complete(data, key)]]
    if groups_of(data):
        parts.append(request_table(data))
    if data.get("failures"):
        parts.append("FAILED:\n" + "\n".join(data["failures"]))
    if data.get("failed"):
        parts.append(f"THE RUN FAILED BEFORE ITS END: {data['failed']}")
    if data.get("complaints"):
        parts.append("the daemon's own account: " + data["complaints"])
    return "\n\n".join(parts) + "\n"


def complete(data: Row, part: str) -> bool:
    """Whether a part has all of a sample that its tables need: one that failed early has not."""
    return part in data.get("measured", [])


def figures(data: Row) -> dict[str, Figure | Plot]:
    m, p = data["machine"], data["parameters"]
    under = f"p50, whiskers p10 to p90; {m['cores']} cores, Linux {m['kernel']}, commit {m['commit'][:12]}; store {p['delay_ms']:g} ms, {p['mb_per_s']:g} MB/s"
    found: dict[str, Figure | Plot] = {}
    if complete(data, "replies"):
        groups, marks = [], {}
        for server, distances in by_state(data).items():
            for round_trip, ways in distances.items():
                groups.append((f"{server}, {round_trip:g} ms", [spread(s, ways[s], 1000) for s in STATES]))
                if round_trip == min(ROUND_TRIPS.values()):
                    marks[groups[-1][0]] = (first_byte_ms(data) + TARGETS_MS[server], "target, archived")
        title = "First replies by how far the client is (paper P, figure 6)"
        found["archive-replies"] = Figure(title, under, "milliseconds, logarithmic", groups, marks=marks)
    if complete(data, "sizes"):
        lines = []
        for way, label in LABELS.items():
            if series := {s / 1024: ways[way] for s, ways in by_size(data).items() if way in ways}:
                lines.append(Line(label, points(series)))
        notes = [(PAPER_ACTIVESET_8MB_MS, "paper P: ActiveSet at 8 MB is below"), (PAPER_WHOLE_MS, "paper P: whole image is above")]
        notes.append((first_byte_ms(data) + TARGET_8MB_MS, "target, ActiveSet at 8 MB"))
        title = "First reply of an archived strawman of 64 MB (paper P, figure 7)"
        found["archive-size"] = Plot(title, under, "working set, KB", "milliseconds", lines, notes)
    if complete(data, "shifts"):
        lines = [
            Line(LABELS[way], points({s * 100: ways[way] for s, ways in by_shift(data).items()})) for way in ("activeset", "whole")
        ]
        title = "First reply when the ActiveSet misses a part of 8 MB (paper P, figure 8)"
        found["archive-shift"] = Plot(title, under, "missed, %", "milliseconds", lines)
    return found
