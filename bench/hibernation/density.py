"""How much memory thousands of hibernated servers take in all, and whether each of them answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.kip import Kip
from hibernation.footprint import IDLE_S, own_by_name
from hibernation.instance import Instance
from hibernation.programs import Program
from parkwake.client import Client
from parkwake.kiphost import daemon, pss_bytes
from parkwake.workspace import Failed, Workspace

IDLE_LONG_S = 5.0


# What of the kernel's own memory grows with what is kept: proc_meminfo(5).
KERNEL = ("SUnreclaim", "SReclaimable", "PageTables", "SecPageTables", "KernelStack", "Percpu", "VmallocUsed")


def meminfo() -> dict[str, int]:
    """The kernel's own account, bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {key: int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", *KERNEL) if key in lines}


def measure(
    work: Workspace, program_path: Path, client: Client, program: Program, count: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """All in all is what the machine has less than before the daemon was started: processes, page tables, network
    namespaces, cgroups, the rest of the kernel's, and Kip's own."""
    before = meminfo()
    with daemon(program_path, work.dir / "density", "--set-memory", "0") as kip:
        result = fill(work, kip, client, program, count, before, say)
    time.sleep(IDLE_LONG_S)
    # How much less there is although all is gone: what others on the machine took meanwhile, and
    # what goes later.
    result["drift_bytes"] = before["MemAvailable"] - meminfo()["MemAvailable"]
    return result


def fill(
    work: Workspace, kip: Kip, client: Client, program: Program, count: int, before: dict[str, int], say: Callable[[str], None]
) -> dict[str, Any]:
    time.sleep(IDLE_S)
    with_daemon = meminfo()
    tar = program.tar(work.dir)
    instances = []
    for i in range(count):
        instance = Instance(kip, client, program, f"web-{i}", tar)
        instance.ask()
        instance.cycle()  # by which its working set is known
        instance.hibernate()
        instances.append(instance)
        if i % 100 == 99:
            say(f"density: {i + 1} of {count} hibernated")
    woken = 0
    for _ in range(5):
        time.sleep(IDLE_LONG_S)
        views = kip.json("ps")
        awake = {v["name"] for v in views if v["tier"] != "hibernated"}
        if not awake:
            break
        woken += len(awake)
        for instance in instances:
            if instance.proc.name in awake:
                instance.hibernate()
    if (asleep := sum(v["tier"] == "hibernated" for v in views)) != count:
        raise Failed(f"{asleep} of {count} are hibernated")
    after = meminfo()
    own = own_by_name(kip)
    result = {
        "woken": woken, "count": count, "all_bytes": before["MemAvailable"] - after["MemAvailable"], "own": own,
        "daemon_alone_bytes": before["MemAvailable"] - with_daemon["MemAvailable"],
        "kernel_more_bytes": {key: after[key] - before[key] for key in KERNEL if key in after},
        "pss_bytes": pss_bytes([pid for v in views for pid in v["pids"]]),
        "kernel_bytes": sum(v["memory"]["kernel_bytes"] for v in views),
    }  # fmt: skip
    replies, unanswered = [], []
    for instance in instances:
        try:
            replies.append(instance.first_reply()[0])
        except Failed as failed:
            unanswered.append(f"{instance.proc.name}: {failed}")
    if unanswered:
        say(f"density: {len(unanswered)} did not answer, the first: {unanswered[0]}")
    result |= {"replies_us": replies, "unanswered": unanswered}
    return result
