"""The samples as tables for people, beside the issue's targets and other projects' figures, and as figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from parkwake import throughput
from parkwake.setups import ALL
from parkwake.starts import LAUNCHER_BUILD, LAUNCHER_START
from parkwake.stats import percentile, pooled_interval, ratio_interval
from parkwake.svg import Bar, Figure

CRIU_TIMES, CRIU_SERVERS = 4.0, ("lighttpd", "nginx")
THROUGHPUT = 0.98
START_TARGETS = {LAUNCHER_START: 1.0, "kip run with a tarball, the command": 15.0, "kip run of sleep, the command": 15.0}
PSS_MB, CPU_PERCENT = 60.0, 0.5
LABELS = {
    "native_hot": "native, hot", "runc_hot": "runc, hot", "hot": "kip, hot", "parked": "kip, parked", "cold": "cold start",
    "runc": "runc run", "criu": "criu by hand",
}  # fmt: skip

Row = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned; the first column to the left, the others to the right."""
    lines = [list(map(str, head)), *[list(map(str, r)) for r in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def one(line: Sequence[str]) -> str:
        return "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()

    return "\n".join(one(line) for line in lines)


def ms(us: float) -> str:
    value = us / 1000
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def replies(data: Row) -> dict[str, dict[str, list[float]]]:
    """Microseconds by server and way."""
    found: dict[str, dict[str, list[float]]] = {s: {} for s in data["parameters"]["servers"]}
    for row in data["replies"]:
        if "error" in row:
            continue
        ways = found[row["server"]]
        ways.setdefault(row["method"], []).append(row["us"])
        if "hot_us" in row:
            ways.setdefault({"cold": "native_hot", "runc": "runc_hot"}[row["method"]], []).append(row["hot_us"])
    return found


def verdict(good: bool) -> str:
    return "reached" if good else "MISSED"


def target_ms(data: Row, server: str) -> float:
    """Of the first reply of a parked one."""
    setup = ALL[server]()
    if not setup.larger:
        return setup.target_ms
    read = [r["read_us"] for r in data["replies"] if r["server"] == server and "read_us" in r]
    return setup.target_ms + (percentile(read, 50) / 1000 if read else 0)


def reply_table(data: Row) -> str:
    rows = []
    for server, ways in replies(data).items():
        for way in LABELS:
            values = ways.get(way)
            if not values:
                continue
            line = [f"{server}: {LABELS[way]}", ms(percentile(values, 50)), ms(percentile(values, 90)), str(len(values))]
            if way == "parked":
                target, setup = target_ms(data, server), ALL[server]()
                others = f"{setup.target_ms:g} and what its bytes take to read" if setup.larger else setup.others
                line += [f"<= {target:.3g}", verdict(percentile(values, 50) <= target * 1000), others]
            rows.append(line + [""] * (7 - len(line)))
        rows.append([""] * 7)
    head = ["first reply, ms", "p50", "p90", "n", "target p50", "", "others report, ms"]
    return table(head, rows)


def failure_lines(data: Row) -> str:
    counted: dict[tuple[str, str], tuple[int, str]] = {}
    for row in data["replies"]:
        if "error" in row:
            key = (row["server"], LABELS[row["method"]])
            counted[key] = (counted.get(key, (0, ""))[0] + 1, row["error"])
    lines = [f"{server}: {way}: failed {n} times, last: {why}" for (server, way), (n, why) in counted.items()]
    return "\n".join(lines) if lines else "none"


def criu_table(data: Row) -> str:
    rows = []
    for server, ways in replies(data).items():
        if ALL[server]().larger:
            continue
        if not ways.get("criu") or not ways.get("parked"):
            rows.append([server, "-", "-", "-", "", ""])
            continue
        criu, kip = percentile(ways["criu"], 50), percentile(ways["parked"], 50)
        wanted = server in CRIU_SERVERS
        line = [server, ms(criu), ms(kip), f"{criu / kip:.1f}"]
        rows.append([*line, f">= {CRIU_TIMES:g}" if wanted else "", verdict(criu / kip >= CRIU_TIMES) if wanted else ""])
    return table(["parked against CRIU by hand, p50", "criu, ms", "kip, ms", "times", "target", ""], rows)


def sleep_table(data: Row) -> str:
    rows = []
    for server in data["parameters"]["servers"]:
        for method in ("parked", "criu"):
            sleeps = [r["sleep"] for r in data["replies"] if r["server"] == server and r["method"] == method and "sleep" in r]
            if not sleeps:
                continue
            frozen, total = [s["frozen_us"] for s in sleeps], [s["total_us"] for s in sleeps]
            size = percentile([s["bytes_written"] for s in sleeps], 50)
            rows.append([
                f"{server}: {LABELS[method]}", ms(percentile(frozen, 50)), ms(percentile(frozen, 90)), ms(percentile(total, 50)),
                ms(percentile(total, 90)), f"{size / 1024:,.0f}", str(len(sleeps)),
            ])  # fmt: skip
    return table(["going to sleep", "frozen p50, ms", "p90", "in all p50, ms", "p90", "KiB written", "n"], rows)


def step_table(data: Row) -> str:
    steps: dict[str, dict[str, list[float]]] = {}
    for row in data["replies"]:
        for step in row.get("wake", {}).get("steps", []):
            steps.setdefault(step["name"], {}).setdefault(row["server"], []).append(step["us"])
    servers = data["parameters"]["servers"]
    rows = [[n, *[ms(percentile(by[s], 50)) if by.get(s) else "-" for s in servers]] for n, by in steps.items()]
    return table(["steps of a wake, p50 ms", *servers], rows)


def rounds_of(data: Row, server: str, keep: bool) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in data["throughput"]:
        if row["server"] == server and row["keep"] == keep:
            found.setdefault(row["way"], []).append(row["per_second"])
    return found


def throughput_table(data: Row) -> str:
    rows = []
    pooled: dict[str, list[tuple[list[float], list[float]]]] = {"kip": [], "woken": []}
    for server in data["parameters"]["servers"]:
        for keep in (True, False):
            ways = rounds_of(data, server, keep)
            if not ways:
                continue
            line = [f"{server}, {'kept connections' if keep else 'a connection each'}"]
            line += [f"{percentile(ways[w], 50):,.0f}" for w in throughput.WAYS]
            for way in ("kip", "woken"):
                ratio, low, high = ratio_interval(ways[way], ways["runc"])
                said = "reached" if low >= THROUGHPUT else "MISSED" if high < THROUGHPUT else "open"
                line += [f"{ratio:.3f} [{low:.3f}, {high:.3f}]", said]
            rows.append([*line, str(len(ways["runc"]))])
            for way in ("kip", "woken"):
                pooled[way].append((ways[way], ways["runc"]))
    if len(rows) > 1:
        line = ["all of them, geometric mean", *[""] * len(throughput.WAYS)]
        for way in ("kip", "woken"):
            ratio, low, high = pooled_interval(pooled[way])
            said = "reached" if low >= THROUGHPUT else "MISSED" if high < THROUGHPUT else "open"
            line += [f"{ratio:.3f} [{low:.3f}, {high:.3f}]", said]
        rows.append([*line, ""])
    errors = sum(r["errors"] for r in data["throughput"])
    head = ["replies per second, p50", *throughput.WAYS]
    head += ["kip/runc [95%]", ">= 0.98", "woken/runc [95%]", ">= 0.98", "n"]
    note = f"'open': the interval contains 0.98. Wrong or lost replies in all slices: {errors}. Postfix is left out."
    return f"{table(head, rows)}\n{note}"


def start_table(data: Row) -> str:
    by: dict[str, list[float]] = {}
    for row in data["starts"]:
        by.setdefault(row["what"], []).append(row["us"])
    rows = []
    for what, values in by.items():
        target = START_TARGETS.get(what)
        said = [f"<= {target:g}", verdict(percentile(values, 50) <= target * 1000)] if target else ["", ""]
        rows.append([what, ms(percentile(values, 50)), ms(percentile(values, 90)), str(len(values)), *said])
    text = table(["starts, ms", "p50", "p90", "n", "target p50", ""], rows)
    missing = "" if data.get("launcher_measured") else f"\nnot measured: {LAUNCHER_START} (build it: {LAUNCHER_BUILD})"
    return text + missing


def density_table(data: Row) -> str:
    d = data["density"]
    pss, empty, cpu = d["pss_bytes"] / 1e6, d["pss_empty_bytes"] / 1e6, d["cpu_percent"]
    counted = f"{d['processes']} in all, {d['processes_empty']} without procs"
    more = (d["processes"] - d["processes_empty"] + d["processes_of_procs"]) / d["count"]
    rows = [
        ["PSS of Kip's processes, MB", f"{pss:.1f}", f"< {PSS_MB:g}", verdict(pss < PSS_MB), f"{empty:.1f} without procs"],
        ["CPU, % of a core", f"{cpu:.3f}", f"< {CPU_PERCENT:g}", verdict(cpu < CPU_PERCENT), f"over {d['seconds']:.0f} s"],
        ["processes per parked proc", f"{more:.2f}", "0", verdict(more <= 0), counted],
    ]  # fmt: skip
    if d["ended_meanwhile"]:
        rows.append(["processes that ended while CPU was counted", ", ".join(d["ended_meanwhile"]), "", "", ""])
    parts = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in sorted(d["pss_by_name"].items(), key=lambda i: -i[1]))
    return table([f"{d['count']} parked lighttpds", "", "target", "", ""], rows) + f"\nPSS by program, MB: {parts}"


PARTS = [
    ("replies", reply_table), ("replies", criu_table), ("replies", sleep_table), ("replies", step_table),
    ("throughput", throughput_table), ("starts", start_table), ("density", density_table),
]  # fmt: skip


def text(data: Row) -> str:
    m, p = data["machine"], data["parameters"]
    head = [
        f"bench/park-wake, commit {m['commit']}, {p['begun']}, {p['samples']} samples",
        f"{m['cpu']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB, Linux {m['kernel']}, {m['distribution']}",
        "; ".join(f"{name}: {version}" for name, version in m["versions"].items()),
        f"load average {p['load_at_start']:.2f} at the start, {p['load_at_end']:.2f} at the end, nice {p['nice']}"
        + (" -- THE MACHINE WAS BUSY: these numbers are too high" if p["busy"] else ""),
    ]
    parts = ["\n".join(head), *[show(data) for key, show in PARTS if data.get(key)]]
    if data.get("replies"):
        parts.append("failures of single measurements: " + failure_lines(data))
    if data.get("failed"):
        parts.append(f"THE RUN FAILED BEFORE ITS END: {data['failed']}")
    if data.get("complaints"):
        parts.append("the daemon's own account: " + data["complaints"])
    return "\n\n".join(parts) + "\n"


def spread(label: str, values: Sequence[float], scale: float = 1.0, note: str = "") -> Bar:
    low, middle, high = (percentile(values, p) / scale for p in (10, 50, 90))
    return Bar(label, low, middle, high, note)


def figures(data: Row) -> dict[str, Figure]:
    m = data["machine"]
    under = f"p50, whiskers p10 to p90; {m['cpu']}, {m['cores']} cores, Linux {m['kernel']}, commit {m['commit'][:12]}"
    found: dict[str, Figure] = {}
    if data.get("replies"):
        groups = [(s, [spread(LABELS[w], ways[w], 1000) for w in LABELS if ways.get(w)]) for s, ways in replies(data).items()]
        marks = {s: (target_ms(data, s), "target, parked") for s, bars in groups if bars}
        found["first-reply"] = Figure("From connect to the first reply", under, "milliseconds, logarithmic", groups, marks=marks)
        groups = []
        for server in data["parameters"]["servers"]:
            bars = []
            for method in ("parked", "criu"):
                sleeps = [r["sleep"] for r in data["replies"] if r["server"] == server and r["method"] == method and "sleep" in r]
                for key, label in (("frozen_us", "frozen"), ("total_us", "in all")):
                    if sleeps:
                        bars.append(spread(f"{LABELS[method]}, {label}", [s[key] for s in sleeps], 1000))
            groups.append((server, bars))
        found["sleep"] = Figure("Going to sleep", under, "milliseconds, logarithmic", groups)
    if data.get("throughput"):
        groups = []
        for server in data["parameters"]["servers"]:
            bars = []
            for keep in (True, False):
                ways = rounds_of(data, server, keep)
                for way in ("native", "kip", "woken") if ways else ():
                    ratio, low, high = ratio_interval(ways[way], ways["runc"])
                    bars.append(Bar(f"{way}, {'kept' if keep else 'new'}", low, ratio, high))
            if bars:
                groups.append((server, bars))
        title = "Throughput as a part of runc's behind the same NAT"
        note = "ratio, whiskers are the 95% bootstrap interval; kept connections or a new one for each request"
        found["throughput"] = Figure(title, note, "times runc's", groups, log=False, marks={s: (0.98, "0.98") for s, _ in groups})
    if data.get("starts"):
        kinds: dict[str, dict[str, list[float]]] = {}
        for row in data["starts"]:
            what, _, part = row["what"].partition(", ")
            kinds.setdefault(what, {}).setdefault(part, []).append(row["us"])
        groups = [(what, [spread(part, us, 1000) for part, us in parts.items()]) for what, parts in kinds.items()]
        found["starts"] = Figure("Starts", under, "milliseconds, logarithmic", groups)
    return found
