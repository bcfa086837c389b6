"""Section 4.2 of paper H: memory of ten instances hot, hibernated and awake, with the kernel's and with Kip's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.kip import Kip
from hibernation.instance import Instance
from hibernation.programs import Program
from parkwake.client import Client
from parkwake.kiphost import daemon, pss_bytes
from parkwake.workspace import Failed, Workspace

REQUESTS = 3
STATES = ("hot", "hibernated", "awake")
# Time for the pools of what is made ahead to fill, so that they are in each figure or in none.
IDLE_S = 2.0
MOST_WOKEN = 5


def own_by_name(kip: Kip) -> dict[str, int]:
    """PSS of each of Kip's own programs, bytes."""
    sizes: dict[str, int] = {}
    for pid in kip.own_processes():
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            sizes[name] = sizes.get(name, 0) + pss_bytes([pid])
        except OSError:
            continue  # a helper that has ended
    return sizes


class Awake(Failed):
    """One that should be in a tier is not."""


def look(kip: Kip, instances: Sequence[Instance], state: str) -> dict[str, Any]:
    """Memory in one state. All must be in it before and after: looking wakes no proc."""
    tier = "hibernated" if state == "hibernated" else "hot"

    def views() -> list[dict[str, Any]]:
        found = [i.proc.inspect() for i in instances]
        if wrong := [f"{v['name']} (last wake: {v['last_wake']['trigger']})" for v in found if v["tier"] != tier]:
            raise Awake(f"not {tier} as they should be: {', '.join(wrong)}")
        return found

    seen = views()
    pids = [pid for view in seen for pid in view["pids"]]
    measured = {
        "state": state, "processes": len(pids), "pss_bytes": pss_bytes(pids), "own": own_by_name(kip),
        **{key: sum(v["memory"][key] for v in seen) for key in ("kernel_bytes", "swap_bytes", "working_set_pages")},
    }  # fmt: skip
    views()
    return measured


def look_asleep(kip: Kip, instances: Sequence[Instance]) -> dict[str, Any]:
    """Those whose own timers wake them are put back until all sleep at once; how often that was is part of the result."""
    woken = 0
    while True:
        time.sleep(IDLE_S)
        try:
            return look(kip, instances, "hibernated") | {"woken": woken}
        except Awake:
            if woken > MOST_WOKEN * len(instances):
                raise
        for instance in instances:
            if instance.proc.inspect()["tier"] != "hibernated":
                woken += 1
                instance.hibernate()


def measure(
    work: Workspace, program_path: Path, client: Client, program: Program, count: int, flags: Sequence[str], where: str,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """A daemon of its own, so that nothing of others is in its memory. `flags` are those of `kip up`."""
    with daemon(program_path, work.dir / f"footprint-{program.name}-{where}", *flags) as kip:
        result = states(work, kip, client, program, count, where)
    say(f"{program.name}: {count} instances, set {where}")
    return result


def states(work: Workspace, kip: Kip, client: Client, program: Program, count: int, where: str) -> dict[str, Any]:
    time.sleep(IDLE_S)
    result: dict[str, Any] = {"program": program.name, "set": where, "count": count, "own_empty": own_by_name(kip), "states": []}
    tar = program.tar(work.dir)
    instances = [Instance(kip, client, program, f"{program.name}-{i}", tar) for i in range(count)]
    for instance in instances:
        for _ in range(REQUESTS):
            instance.ask()
    time.sleep(IDLE_S)
    result["states"].append(look(kip, instances, "hot"))
    for instance in instances:
        instance.learn()
        instance.hibernate()
    result["states"].append(look_asleep(kip, instances))
    for instance in instances:
        instance.ask()
        instance.proc.wake()  # it may have answered from what its ticks keep
    time.sleep(IDLE_S)
    result["states"].append(look(kip, instances, "awake"))
    return result
