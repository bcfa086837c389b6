"""The samples as tables and figures, beside the issue's targets and what paper H says."""

from __future__ import annotations

from typing import Any

from parkwake.report import ms, spread, table, verdict
from parkwake.stats import percentile, ratio_interval
from parkwake.svg import Bar, Figure

Row = dict[str, Any]

LABELS = {
    "cold": "cold start", "hot": "hot", "faults": "hibernated, faults", "prefetch": "hibernated, prefetch",
    "prefetch_disk": "hibernated, prefetch from disk", "awake": "awake, the next requests",
    "again": "hot, the next requests",
}  # fmt: skip

# What the text of paper H says; its figures 6 and 7 have no numbers in print.
PAPER = "Hibernate Container, section 4, i7-8700K, Quark"
PAPER_LATENCY = {
    # Request latency by REAP's prefetch as a part of a cold start's (section 4.1).
    "hello-python": 0.03, "hello-go": 0.03, "image-large": 0.67,
}  # fmt: skip
PAPER_NODE_MS = (25, 11)  # hello world in Node, hibernated; with the binary shared (section 3.5)
PAPER_HIBERNATED = {"video": 0.07, "hello-go": 0.25}  # PSS as a part of hot (section 4.2, figure 7)
PAPER_AWAKE = {"hello-node": 0.28, "image-large": 0.90}

AWAKE_TIMES = 1.1
PSS_PART = {"memory": 0.02, "disk": 0.005}
PSS_PART_FROM_BYTES = 10 << 20
KERNEL_BYTES, SMALL_BYTES = 120 << 10, 10 << 20
DENSITY_COUNT, DENSITY_BYTES = 2000, 1.2e9
# Of the issue: threads made and ended while memory comes back, as a part of native.
THREADS_PART = 0.5


def us_of(data: Row) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for row in data["latency"]:
        if "us" in row:
            found.setdefault(row["program"], {}).setdefault(row["way"], []).append(row["us"])
    return found


def latency_table(data: Row) -> str:
    rows = []
    for program, ways in us_of(data).items():
        cold = percentile(ways["cold"], 50)
        for way in LABELS:
            values = ways[way]
            part = percentile(values, 50) / cold
            says = ""
            if way == "prefetch" and program in PAPER_LATENCY:
                says = f"{PAPER_LATENCY[program]:.0%} of cold"
            if way == "prefetch" and program == "hello-node":
                says = f"{PAPER_NODE_MS[0]} ms, {PAPER_NODE_MS[1]} with a shared binary"
            line = [f"{program}: {LABELS[way]}", ms(percentile(values, 50)), ms(percentile(values, 90)), str(len(values))]
            rows.append([*line, f"{part:.1%}", says])
        rows.append([""] * 6)
    return table(["first reply, ms", "p50", "p90", "n", "of cold", "paper H"], rows[:-1])


def target_table(data: Row) -> str:
    """Hibernated minus hot, and awake against hot."""
    rows = []
    for program, ways in us_of(data).items():
        hot = percentile(ways["hot"], 50)
        targets = data["targets"][program]
        for way, target in zip(("prefetch", "prefetch_disk"), targets or (None, None), strict=True):
            more = (percentile(ways[way], 50) - hot) / 1000
            said = [f"<= {target:g}", verdict(more <= target)] if target else ["", ""]
            rows.append([f"{program}: {LABELS[way]}, minus hot, ms", f"{more:.3f}", *said])
        times = percentile(ways["awake"], 50) / percentile(ways["again"], 50)
        rows.append([f"{program}: awake against hot, times", f"{times:.2f}", f"<= {AWAKE_TIMES:g}", verdict(times <= AWAKE_TIMES)])
    return table(["p50", "", "target", ""], rows)


def sleep_table(data: Row) -> str:
    rows = []
    for program in us_of(data):
        mine = [r for r in data["latency"] if r["program"] == program and r["way"] == "prefetch"]
        first = next(r["first_sleep"] for r in mine if "first_sleep" in r)
        later = [r["sleep"] for r in mine if "sleep" in r]
        total = percentile([s["total_us"] for s in later], 50)
        target = data["deflate_targets"][program]
        written = percentile([s["bytes_written"] for s in later], 50)
        rows.append([
            program, ms(first["total_us"]), f"{first['bytes_written'] / 1024:,.0f}", ms(total),
            ms(percentile([s["frozen_us"] for s in later], 50)), f"{written / 1024:,.0f}",
            *([f"<= {target:g}", verdict(total <= target * 1000)] if target else ["", ""]),
        ])  # fmt: skip
    head = ["going to hibernation", "first, ms", "KiB written", "later p50, ms", "frozen, ms", "KiB written", "target", ""]
    return table(head, rows)


def step_table(data: Row) -> str:
    rows = []
    for program in us_of(data):
        for way in ("faults", "prefetch", "prefetch_disk"):
            wakes = [r["wake"] for r in data["latency"] if r["program"] == program and r["way"] == way and "wake" in r]
            steps: dict[str, list[float]] = {}
            for wake in wakes:
                for step in wake["steps"]:
                    steps.setdefault(step["name"], []).append(step["us"])
            shown = ", ".join(f"{name} {percentile(us, 50):.0f}" for name, us in steps.items())
            if asleep := sum("asleep" in wake for wake in wakes):
                shown = f"{asleep} of {len(wakes)} answered without a wake{', ' if shown else ''}{shown}"
            misses = [w["misses"] for w in wakes if w["misses"] is not None]
            rows.append([f"{program}: {LABELS[way]}", f"{percentile(misses, 50):.0f}" if misses else "-", shown])
    return table(["wakes, p50", "pages by faults", "steps, us"], rows)


def state_of(row: Row, name: str) -> Row:
    return next(s for s in row["states"] if s["state"] == name)


def with_own(row: Row, name: str) -> float:
    """PSS of the instances and what Kip's own processes have more than without them, bytes."""
    state = state_of(row, name)
    return state["pss_bytes"] + sum(state["own"].values()) - sum(row["own_empty"].values())


def footprint_table(data: Row) -> str:
    rows = []
    for row in data["footprint"]:
        hot = with_own(row, "hot")
        for name in ("hot", "hibernated", "awake"):
            state, whole = state_of(row, name), with_own(row, name)
            part, says, said = whole / hot, "", ["", ""]
            if name == "hibernated" and hot / row["count"] > PSS_PART_FROM_BYTES:
                said = [f"<= {PSS_PART[row['set']]:.1%}", verdict(part <= PSS_PART[row["set"]])]
            if name == "hibernated" and row["program"] in PAPER_HIBERNATED:
                says = f"{PAPER_HIBERNATED[row['program']]:.0%}"
            if name == "awake" and row["program"] in PAPER_AWAKE:
                says = f"{PAPER_AWAKE[row['program']]:.0%}"
            own = sum(state["own"].values()) / 1e6
            rows.append([
                f"{row['program']}, set {'in' if row['set'] == 'memory' else 'on'} {row['set']}: {name}",
                f"{state['pss_bytes'] / 1e6:.2f}", f"{own:.2f}", f"{whole / row['count'] / 1e6:.3f}", f"{part:.2%}", *said, says,
                f"{state['kernel_bytes'] / row['count'] / 1024:.0f}",
                f"{state['woken']}" if "woken" in state else "",
            ])  # fmt: skip
        rows.append([""] * 10)
    count = data["footprint"][0]["count"]
    head = [f"{count} instances", "PSS, MB", "Kip's own, MB", "each, both, MB", "of hot", "target", "", "paper H", "kernel each, KiB", "woke"]
    note = "'each, both': PSS of the instances and what Kip's own processes have more than before the first, divided by their number.\n"
    note += "Working sets above 256 KiB or 1/64 of the paged-out memory lie in the page cache, at most 256 MiB, which is in no process's PSS.\n"
    note += "'woke': how often one of them woke by itself meanwhile, and was put back."
    return f"{table(head, rows[:-1])}\n{note}"


def kernel_table(data: Row) -> str:
    rows = []
    for row in data["footprint"]:
        if with_own(row, "hot") / row["count"] > SMALL_BYTES or row["set"] != "memory":
            continue
        each = state_of(row, "hibernated")["kernel_bytes"] / row["count"]
        rows.append([row["program"], f"{each / 1024:.0f}", f"<= {KERNEL_BYTES >> 10}", verdict(each <= KERNEL_BYTES)])
    return table(["kernel memory of a small hibernated one, by its cgroup, KiB", "", "target", ""], rows) if rows else ""


def density_table(data: Row) -> str:
    d = data["density"]
    count, replies = d["count"], d["replies_us"]
    whole = d["all_bytes"] / 1e9
    said = [f"<= {DENSITY_BYTES / 1e9:g}", verdict(d["all_bytes"] <= DENSITY_BYTES)] if count == DENSITY_COUNT else ["", ""]
    rows = [
        ["memory in all (MemAvailable), GB", f"{whole:.3f}", *said],
        ["  of each, KB", f"{d['all_bytes'] / count / 1e3:.0f}", "", ""],
        ["  less although all had gone again, GB", f"{d['drift_bytes'] / 1e9:.3f}", "", "others on the machine; ought to be 0"],
        ["  PSS of their processes, MB", f"{d['pss_bytes'] / 1e6:.1f}", "", ""],
        ["  kernel memory of their cgroups, MB", f"{d['kernel_bytes'] / 1e6:.1f}", "", ""],
        ["  PSS of Kip's own, MB", f"{sum(d['own'].values()) / 1e6:.1f}", "", ""],
        *[[f"  kernel, {key}, MB", f"{more / 1e6:.1f}", "", ""] for key, more in d["kernel_more_bytes"].items()],
        *[[f"  the kernel's price of {what}, KB each", f"{kb:.0f}", "", ""] for what, kb in data.get("kernel_price", {}).items()],
        ["answered", f"{len(replies)}", f"{count}", verdict(len(replies) == count)],
        ["first reply, p50, ms", ms(percentile(replies, 50)), "", ""],
        ["first reply, p99, ms", ms(percentile(replies, 99)), "", ""],
    ]  # fmt: skip
    return table([f"{count} hibernated lighttpds, sets on disk", "", "target", ""], rows)


def tick_rates(row: Row, state: str, key: str) -> list[float]:
    """CPU time of each round, ms a minute, for each instance."""
    return [r[state][key] / 1e6 / r[state]["seconds"] * 60 / row["count"] for r in row["rounds"]]


def tick_memory(row: Row, own: bool) -> tuple[float, float]:
    """PSS of an instance, with its share of Kip's own or without, MB: before it ever slept, and hibernated, the middle of the rounds."""

    def of(seen: Row) -> float:
        more = sum(seen["own"].values()) - sum(row["own_empty"].values()) if own else 0
        return (seen["pss_bytes"] + more) / row["count"] / 1e6

    return of(row["never_asleep"]), percentile([of(r["hibernated"]) for r in row["rounds"]], 50)


def tick_table(data: Row) -> str:
    rows = []
    for row in data["ticks"]:
        for key, what in (("cpu_ns", "CPU of the program"), ("own_cpu_ns", "CPU of Kip's own processes")):
            hot, asleep = tick_rates(row, "hot", key), tick_rates(row, "hibernated", key)
            times, low, high = ratio_interval(asleep, hot)
            rows.append([
                f"{row['program']}: {what}, ms a minute", f"{percentile(hot, 50):.2f}", f"{percentile(asleep, 50):.2f}",
                f"{times:.2f}", f"{low:.2f} to {high:.2f}",
            ])  # fmt: skip
        for own, what in ((False, "PSS"), (True, "PSS with its share of Kip's own")):
            hot, asleep = tick_memory(row, own)
            rows.append([f"{row['program']}: {what}, MB", f"{hot:.2f}", f"{asleep:.3f}", f"{asleep / hot:.3f}", ""])
        rows.append([""] * 5)
    first = data["ticks"][0]
    window = first["rounds"][0]["hot"]["seconds"]
    head = [f"{first['count']} instances that tick in place, each", "hot", "hibernated", "times", "95%"]
    note = f"{len(first['rounds'])} rounds of a window of {window:.0f} s hot and one hibernated, in turn; no client, no command and no wake in it.\n"
    note += "PSS hot is before the first sleep; hibernated, it is what the ticks keep."
    if woken := [f"{row['program']} {n}" for row in data["ticks"] if (n := sum(r["hibernated"]["woken"] for r in row["rounds"]))]:
        note += f"\nWindows in which one woke by itself, and that were begun anew: {', '.join(woken)}."
    return f"{table(head, rows[:-1])}\n{note}"


def thread_table(data: Row) -> str:
    rows = []
    for row in data["threads"]:
        for way, label in (("hot", "in a proc, never asleep"), ("hibernated", "hibernated and touched")):
            times, low, high = ratio_interval(row[way], row["native"])
            said = [f">= {THREADS_PART:g}", verdict(times >= THREADS_PART)] if way == "hibernated" else ["", ""]
            rows.append([
                f"{row['makers']} threads make others, {row['idle']} wait: {label}", f"{percentile(row['native'], 50):,.0f}",
                f"{percentile(row[way], 50):,.0f}", f"{times:.2f}", f"{low:.2f} to {high:.2f}", *said,
            ])  # fmt: skip
    return table(["threads made and ended a second, p50", "native", "so", "times", "95%", "target", ""], rows)


PARTS = [
    ("latency", latency_table), ("latency", target_table), ("latency", sleep_table), ("latency", step_table),
    ("footprint", footprint_table), ("footprint", kernel_table), ("density", density_table),
    ("ticks", tick_table), ("threads", thread_table),
]  # fmt: skip


def text(data: Row) -> str:
    m, p = data["machine"], data["parameters"]
    head = [
        f"bench/hibernate, commit {m['commit']}, {p['begun']}, {p['samples']} samples",
        f"{m['cpu']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB, Linux {m['kernel']}, {m['distribution']}",
        "; ".join(f"{name}: {version}" for name, version in m["versions"].items()),
        f"load average {p['load_at_start']:.2f} at the start, {p['load_at_end']:.2f} at the end, nice {p['nice']}"
        + (" -- THE MACHINE WAS BUSY: these numbers are too high" if p["busy"] else ""),
        f"paper H: {PAPER}",
    ]
    parts = ["\n".join(head), *[shown for key, show in PARTS if data.get(key) and (shown := show(data))]]
    if data.get("failures"):
        parts.append("FAILED:\n" + "\n".join(data["failures"]))
    if data.get("failed"):
        parts.append(f"THE RUN FAILED BEFORE ITS END: {data['failed']}")
    if data.get("complaints"):
        parts.append("the daemons' own account: " + data["complaints"])
    return "\n\n".join(parts) + "\n"


def figures(data: Row) -> dict[str, Figure]:
    m = data["machine"]
    where = f"{m['cpu']}, {m['cores']} cores, Linux {m['kernel']}, commit {m['commit'][:12]}"
    found: dict[str, Figure] = {}
    if data.get("latency"):
        groups, marks = [], {}
        for program, ways in us_of(data).items():
            groups.append((program, [spread(LABELS[w], ways[w], 1000) for w in LABELS]))
            if program in PAPER_LATENCY:
                cold = percentile(ways["cold"], 50) / 1000
                marks[program] = (PAPER_LATENCY[program] * cold, f"paper H: prefetch {PAPER_LATENCY[program]:.0%} of cold")
        title, note = "From connect to the first reply (paper H, figure 6)", f"p50, whiskers p10 to p90; {where}"
        found["hibernate-latency"] = Figure(title, note, "milliseconds, logarithmic", groups, marks=marks)
    if data.get("footprint"):
        groups, marks = [], {}
        for row in data["footprint"]:
            name = f"{row['program']}, set {'in' if row['set'] == 'memory' else 'on'} {row['set']}"
            each = {s: max(with_own(row, s), 1) / row["count"] / 1e6 for s in ("hot", "hibernated", "awake")}
            groups.append((name, [Bar(s, v, v, v, f"{v / each['hot']:.1%}") for s, v in each.items()]))
            if row["program"] in PAPER_HIBERNATED:
                part = PAPER_HIBERNATED[row["program"]]
                marks[name] = (part * each["hot"], f"paper H: hibernated {part:.0%} of hot")
        title = "Memory of an instance, with its share of Kip's own (paper H, figure 7)"
        note = f"PSS of {data['footprint'][0]['count']} instances and of what Kip's own processes have more, divided; {where}"
        found["hibernate-memory"] = Figure(title, note, "MB, logarithmic", groups, marks=marks)
    if data.get("ticks"):
        groups = []
        for row in data["ticks"]:
            bars = [spread(state, tick_rates(row, state, "cpu_ns"), 1) for state in ("hot", "hibernated")]
            groups.append((row["program"], [*bars, spread("Kip's own, hibernated", tick_rates(row, "hibernated", "own_cpu_ns"), 1)]))
        title, note = "CPU time of an instance that ticks in place", f"p50, whiskers p10 to p90; {where}"
        found["hibernate-ticks"] = Figure(title, note, "milliseconds a minute, logarithmic", groups)
    return found
