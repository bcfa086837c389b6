"""What a hundred parked procs cost: memory, CPU and processes of Kip's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import leftovers, servers
from harness.kip import cpu_ns
from parkwake.kiphost import AWAKE, pss_bytes, up
from parkwake.workspace import Failed, Workspace


def measure(work: Workspace, program: Path, count: int, seconds: int, say: Callable[[str], None]) -> dict[str, Any]:
    kip = up(program, work.dir / "density")
    server = servers.lighttpd()
    tar = server.tarball(work.dir)
    time.sleep(2)  # pools fill
    empty = kip.own_processes()
    empty_pss = pss_bytes(empty)
    procs = []
    for i in range(count):
        proc = kip.run(f"web-{i}", server.command, ports=server.published, tar=tar, flags=AWAKE)
        proc.sleep()
        procs.append(proc)
        if i % 20 == 19:
            say(f"density: {i + 1} of {count} parked")
    time.sleep(3)
    views = kip.json("ps")
    if sum(v["tier"] == "parked" for v in views) != count or any(v.get("pids") for v in views):
        raise Failed("not all are parked")
    own = kip.own_processes()
    # A process that has an id of this instance's blocks belongs to a proc.
    first = leftovers.FIRST_UID + kip.instance * leftovers.SLOTS * leftovers.IDS
    hosted = sum(first <= uid < first + leftovers.SLOTS * leftovers.IDS for _, uid, _ in leftovers.processes().values())
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in own}
    sizes: dict[str, int] = {}
    for pid, name in names.items():
        sizes[name] = sizes.get(name, 0) + pss_bytes([pid])
    before, begun = cpu_ns(own), time.monotonic_ns()
    time.sleep(seconds)
    after, took = cpu_ns(kip.own_processes()), time.monotonic_ns() - begun
    # What came in between has all its time counted; what went is named in the result.
    used = sum(ns - before.get(pid, 0) for pid, ns in after.items())
    result = {
        "count": count, "seconds": took / 1e9, "pss_bytes": sum(sizes.values()), "pss_empty_bytes": empty_pss,
        "cpu_percent": 100 * used / took, "processes": len(own), "processes_empty": len(empty),
        "processes_of_procs": hosted, "pss_by_name": sizes,
        "ended_meanwhile": sorted(names[pid] for pid in before.keys() - after.keys()),
    }  # fmt: skip
    kip.down()
    return result
