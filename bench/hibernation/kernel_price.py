"""What the kernel itself takes for what every proc has: a network namespace, a veth pair, control groups. Without Kip."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from hibernation.density import meminfo
from parkwake.workspace import Workspace, command

COUNT = 200
IDLE_S = 3.0
CGROUPS = Path("/sys/fs/cgroup")
# Those in which Kip makes a group for each proc, where they are hierarchies of their own:
# cgroups(7).
V1 = ("memory", "cpu", "pids", "cpuacct", "freezer")


def taken() -> int:
    now = meminfo()
    return now["SUnreclaim"] + now["Percpu"]


def measure(work: Workspace) -> dict[str, float]:
    """KB of slab that the kernel cannot take back, and of per-CPU memory, for one of each, over COUNT of them: MemAvailable
    moves with what others do. The janitor knows their names."""
    names = [f"{work.prefix}q{i}" for i in range(COUNT)]
    roots = {(CGROUPS / name).resolve() for name in V1 if (CGROUPS / name).is_dir()} or {CGROUPS}

    def namespaces() -> None:
        for name in names:
            command("ip", "netns", "add", name)
            command("ip", "-n", name, "link", "set", "lo", "up")

    def links() -> None:
        for name in names:
            command("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            command("ip", "link", "set", name, "up")
            command("ip", "-n", name, "link", "set", "eth0", "up")

    def groups() -> None:
        for root in roots:
            for name in names:
                os.mkdir(root / name)

    steps: dict[str, Callable[[], None]] = {
        "a network namespace": namespaces, "a veth pair": links, f"groups in {len(roots)} hierarchies": groups,
    }  # fmt: skip
    price: dict[str, float] = {}
    try:
        for what, make in steps.items():
            before = taken()
            make()
            time.sleep(IDLE_S)
            price[what] = (taken() - before) / COUNT / 1e3
    finally:
        for name in names:
            for root in roots:
                if (root / name).is_dir():
                    os.rmdir(root / name)
            if Path("/run/netns", name).exists():
                command("ip", "netns", "delete", name)
    return price
