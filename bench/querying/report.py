"""The samples as tables and figures, beside the issue's targets and the figures of paper S."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from parkwake.report import table, verdict
from parkwake.stats import percentile, ratio_interval
from querying.instances import LABELS
from querying.measure import IN_A_ROW
from querying.series import Line, Series

Row = dict[str, Any]
MB = 1e6
ALL = {"source-first": "source, its first reads", "source": "source", "criu-source": "source of CRIU, its first reads", **LABELS}
# Of paper S: section IV-B.2 and Table I, milliseconds.
PAPER_MS = {"cold": "7,500", "runc": "7,500", "warm": "300-400", "hot": "900-1,300"}
# Of its section IV-B.1, against the base image of 400 MB.
PAPER_SIZE = {"cold": "1.00", "warm": "1.30", "hot": "2.30"}
# Of issue 21.
WARM_MS, FIRST_SECOND, WHOLE_RUN, SOURCE_RATIO, LAST_OF_ROW = 60.0, 1.5, 1.05, 0.9, 1.2
# Whose files below the overlay are not among those of the instance.
PLAIN = ("runc", "criu-hot", "criu-hot-disk", "criu-warm", "criu-warm-disk")


def middle(rows: Sequence[Row], what: str) -> float | None:
    values = [row[what] for row in rows if what in row]
    return percentile(values, 50) if values else None


def shown(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def by_way(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if "error" not in row:
            found.setdefault(row["way"], []).append(row)
    return {way: found[way] for way in ALL if way in found}


def first_table(data: Row) -> str:
    """Table I."""
    lines, base = [], data["base"]["own"] + data["base"]["shared"]
    for way, rows in by_way(data["starts"]).items():
        answers = [row["answers_ms"] for row in rows]
        own = percentile([row["disk"]["own"] for row in rows], 50)
        whole = percentile([row["disk"]["own"] + row["disk"]["shared"] for row in rows], 50) + (base if way in PLAIN else 0)
        target = f"{WARM_MS:.0f}: {verdict(percentile(answers, 50) <= WARM_MS)}" if way == "warm" else ""
        lines.append([
            ALL[way], shown(percentile(answers, 50)), shown(percentile(answers, 90)), str(len(rows)), target,
            PAPER_MS.get(way.removeprefix("criu-").removesuffix("-disk"), ""), shown(middle(rows, "pss_bytes") / MB),
            shown(own / MB), shown(whole / MB), f"{whole / base:.2f}", PAPER_SIZE.get(way.removeprefix("criu-").removesuffix("-disk"), ""),
        ])  # fmt: skip
    head = ["Table I: until the first query is answered, ms", "p50", "p90", "n", "target", "paper S", "memory, MB", "disk, own", "in all", "times the base", "paper S"]
    sizes = data["sizes"]
    return (
        f"{table(head, lines)}\n"
        f"base image: {base / MB:.1f} MB, of which the table is {data['table_bytes'] / MB:.1f}; the source has {sizes['source_pss'] / MB:.1f} MB in memory, "
        f"{(sizes['source']['own'] + sizes['source']['shared']) / MB:.1f} on disk; the template is {(sizes['template']['own'] + sizes['template']['shared']) / MB:.1f}, "
        f"and was taken in {sizes['template_ms']:.0f} ms."
    )


STEPS = {"still_ms": "source still", "dump_ms": "dump", "copy_ms": "files", "restore_ms": "restore", "made_ms": "made", "command_ms": "command", "wake_ms": "wake"}


def step_table(data: Row) -> str:
    lines = []
    for way, rows in by_way(data["starts"]).items():
        if any(step in rows[0] for step in STEPS):
            native = "" if "native" not in rows[0] else "natively" if all(row["native"] for row in rows) else "by CRIU"
            lines.append([ALL[way], *[shown(middle(rows, step)) for step in STEPS], native])
    return table(["of which, p50, ms", *STEPS.values(), ""], lines) if lines else ""


def paired(rows: Sequence[Row], of_source: Sequence[Row], value: Callable[[Row], float]) -> tuple[float, float, float] | None:
    """Ratio to the source in the same rounds."""
    under = {row["round"]: value(row) for row in of_source}
    pairs = [(value(row), under[row["round"]]) for row in rows if row["round"] in under]
    return ratio_interval([over for over, _ in pairs], [u for _, u in pairs]) if pairs else None


def ratio(found: tuple[float, float, float] | None) -> str:
    if found is None:
        return "-"
    # One round has no spread.
    return f"{found[0]:.2f}" if found[1] == found[2] else f"{found[0]:.2f} ({found[1]:.2f}-{found[2]:.2f})"


def load_table(runs: Sequence[Row], title: str, judged: bool) -> str:
    """Figure 1 as numbers, and what Table II says of the query cache."""
    found, lines = by_way([{**row, "way": "source-first"} if row["way"] == "source" and row["round"] < 0 else row for row in runs]), []
    source = found.get("source", [])
    for way, rows in found.items():
        reads = [row["reads"] for row in rows]
        at_first = paired(rows, source, lambda row: row["reads"]["first_second"]["p99_us"])
        whole = paired(rows, source, lambda row: row["reads"]["took_s"])
        of_cold = paired(rows, found.get("cold", []), lambda row: row["reads"]["took_s"])
        is_hot = way == "hot" and judged
        cached = [row["caches"] for row in rows if "caches" in row]
        lines.append([
            ALL[way], shown(middle(rows, "answers_ms")), shown(percentile([r["first_second"]["p50_us"] for r in reads], 50), 0),
            shown(percentile([r["first_second"]["p99_us"] for r in reads], 50), 0), ratio(at_first),
            f"{FIRST_SECOND}: {verdict(at_first[0] <= FIRST_SECOND)}" if is_hot and at_first else "",
            shown(percentile([r["took_s"] for r in reads], 50), 2), ratio(whole),
            f"{WHOLE_RUN}: {verdict(whole[0] <= WHOLE_RUN)}" if is_hot and whole else "", ratio(of_cold),
            shown(percentile([r["per_s"] for r in reads], 50), 0), shown(middle(rows, "ready_and_read_s"), 2),
            *[shown(middle(cached, f"Qcache_{what}"), 0) for what in ("inserts", "hits", "lowmem_prunes")],
            str(sum(r["errors"] for r in reads)),
        ])  # fmt: skip
    head = [
        title, "ready, ms", "first s: p50, us", "p99", "p99 to the source's", "target", "reads, s", "to the source's", "target", "to the cold clone's", "reads/s", "with ready, s",
        "inserts", "hits", "prunes", "errors",
    ]  # fmt: skip
    return table(head, lines)


def disturbance_table(data: Row) -> str:
    """Figure 2 as numbers."""
    lines = []
    for found in data["disturbed"]:
        clones, is_kip = found["clones"], found["way"] == "hot"
        worst = min(clone["source_ratio"] for clone in clones)
        middle_ratio = percentile([clone["source_ratio"] for clone in clones], 50)
        answered = [clone["answers_ms"] for clone in clones if "answers_ms" in clone]
        last = answered[-1] / answered[0] if answered else 0.0
        lines.append([
            f"{ALL[found['way']]}, {found['distribution']}", shown(found["calm_per_s"], 0), " ".join(f"{100 * c['source_ratio']:.0f}" for c in clones),
            f"{100 * middle_ratio:.0f}% ({100 * worst:.0f})", f"{100 * SOURCE_RATIO:.0f}: {verdict(middle_ratio >= SOURCE_RATIO)}" if is_kip else "",
            " ".join(f"{c['longest_ms']:.0f}" for c in clones), " ".join(f"{c['answers_ms']:.0f}" if "answers_ms" in c else "-" for c in clones),
            f"{last:.2f}", f"{LAST_OF_ROW}: {verdict(last <= LAST_OF_ROW)}" if is_kip else "", str(found["errors"]),
        ])  # fmt: skip
    head = [
        "Figure 2: the source while it is cloned", "calm, reads/s", f"second of each of {IN_A_ROW}, % of the one before", "p50 (least)", "target", "longest read, ms",
        "until it answers, ms", "last to first", "target", "errors",
    ]  # fmt: skip
    return table(head, lines)


def advice_table(data: Row) -> str:
    lines = [
        [
            f"{row['state']}, {row['distribution']}, {'with its template' if row['template'] else 'without a template'}", row["method"],
            shown(None if row["reread_bytes_per_s"] is None else row["reread_bytes_per_s"] / MB), row["automatic"]["method"], row["why"],
        ]
        for row in data["advice"]
    ]  # fmt: skip
    return table(["kip clone --explain, under load", "says", "MB/s read again", "--method auto makes", "why"], lines)


def failures(data: Row) -> str:
    """What failed, each reason once, with how often."""
    counted: dict[str, int] = {}

    def count(line: str) -> None:
        counted[line] = counted.get(line, 0) + 1

    for state, ways in data["absent"].items():
        for way, why in ways.items():
            count(f"{state}: {ALL[way]}: left out: {why}")
    cloned = [{"way": found["way"], **clone} for found in data.get("disturbed", []) for clone in found["clones"]]
    for row in [*data.get("starts", []), *data.get("runs", []), *cloned, *data["failed_parts"]]:
        where = f"{row.get('state', 'resident')}: {ALL.get(row['way'], row['way'])}"
        if row.get("refused"):
            count(f"{where}: answered after a wake that failed: {plain(row['refused'])}")
        if "error" in row:
            count(f"{where}: {plain(row['error'])}")
    lines = [f"  {times} times: {line}" for line, times in counted.items()]
    return "\n".join(["failed, or left out:", *lines]) if lines else "Nothing failed."


def plain(why: str) -> str:
    """A reason without the names of this run, at a length for a table."""
    without_paths = re.sub(r"/\S*/kip-bench-\w+/", "", re.sub(r"\s+", " ", why))
    return re.sub(r"(source-\w+)-\d+", r"\1-N", without_paths)[:500]


def text(data: Row) -> str:
    parameters, parts = data["parameters"], []
    parts.append(
        f"{parameters['records']} records of 4 KB, {parameters['reads']} reads by {parameters['threads']} connections, {parameters['rounds']} rounds; "
        f"go-ycsb {data['go_ycsb']}; files {'only read' if parameters['read_only'] else 'written to'}, {'with' if parameters['unix_socket'] else 'without'} a unix socket; query cache "
        f"{parameters['cache_bytes']['resident'] / MB:.0f} and {parameters['cache_bytes']['thrashing'] / MB:.0f} MB; load average at the start "
        f"{parameters['load_at_start']:.2f}{', THE MACHINE WAS BUSY' if parameters['busy'] else ''}; commit {data['machine']['commit']}."
    )
    if data.get("starts"):
        parts += [first_table(data), step_table(data)]
    for state, part, judged in (("resident", "Figure 1", True), ("thrashing", "Table II", False)):
        runs = [row for row in data.get("runs", []) if row["state"] == state]
        for distribution in dict.fromkeys(row["distribution"] for row in runs):
            title = f"{part}: memory-{state}, {distribution}"
            parts.append(load_table([row for row in runs if row["distribution"] == distribution], title, judged))
        if state == "thrashing" and runs:
            parts.append(
                f"memory limit {data['limit_bytes'] / MB:.0f} MB, of which {parameters['cache_bytes']['thrashing'] / MB:.0f} are the query cache; table {data['table_bytes'] / MB:.0f} MB.\n"
                "paper S: a hot clone takes 1.46 (zipfian) and 1.64 times (uniform) as long as a cold one; it prunes 145 and 232 thousand queries, the cold one 114 and 197."
            )
        if state == "resident" and runs:
            parts.append("paper S: a hot clone takes 0.80 times as long as a cold one (14.4 and 18.1 s).")
    if data.get("disturbed"):
        parts.append(disturbance_table(data))
    if data.get("advice"):
        parts.append(advice_table(data))
    parts.append(failures(data))
    return "\n\n".join(part for part in parts if part) + "\n"


def figures(data: Row) -> dict[str, Series]:
    """By the names of their files."""
    found = {}
    for state, distribution in dict.fromkeys((row["state"], row["distribution"]) for row in data.get("runs", [])):
        runs = [row for row in data["runs"] if (row["state"], row["distribution"]) == (state, distribution) and row["round"] == 0 and "error" not in row]
        note = f"memory-{state}, {distribution}; time from the command on, so that a start is in it; round 1 of {data['parameters']['rounds']}; load average {data['parameters']['load_at_start']:.2f}"

        def lines(value: str, runs: list[Row] = runs) -> list[Line]:
            return [Line(ALL[way], [(s["at"], s[value]) for s in rows[0]["reads"]["seconds"]]) for way, rows in by_way(runs).items()]

        name = f"{state}-{distribution}"
        found[f"ycsb-latency-{name}"] = Series("Latency after the start (figure 1)", note, "p99 of each second, microseconds", lines("p99_us"), log=True)
        found[f"ycsb-throughput-{name}"] = Series("Reads after the start", note, "reads in each second", lines("reads"))
    for distribution in dict.fromkeys(row["distribution"] for row in data.get("disturbed", [])):
        rows = [row for row in data["disturbed"] if row["distribution"] == distribution]
        drawn = [Line(ALL[row["way"]], [(i * row["bin_s"], count / row["bin_s"]) for i, count in enumerate(row["bins"][:-1])]) for row in rows]
        moments = [(clone["at_s"], ALL[row["way"]]) for row in rows for clone in row["clones"]]
        note = f"{distribution} reads; dashed: a clone is asked for; load average {data['parameters']['load_at_start']:.2f}"
        found[f"ycsb-source-{distribution}"] = Series("The source while it is cloned (figure 2)", note, "reads per second, of 100 ms each", drawn, moments=moments)
    return {name: series for name, series in found.items() if any(line.points for line in series.lines)}
