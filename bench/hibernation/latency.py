"""Section 4.1 of paper H: the first reply cold, hot, hibernated with faults alone and with prefetch, and awake."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from harness.kip import Kip
from hibernation.instance import Instance
from hibernation.programs import Program
from parkwake.client import Client
from parkwake.workspace import Workspace

# Asked before the first sleep, so that caches are warm and what is initialized late is.
WARM = 5
WAYS = ("cold", "hot", "faults", "prefetch", "prefetch_disk")
# Requests right after the first reply of one that was hot, and of one that was hibernated: they are
# compared.
NEXT = 4


def measure(
    work: Workspace, in_memory: Kip, on_disk: Kip, client: Client, program: Program, samples: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Rows {program, way, round, us}; of hibernated ones with the figures of sleep and wake. In each round every way has its
    turn, in an order that moves on."""
    tar = program.tar(work.dir)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:

        def instance(kip: Kip, name: str, *flags: str) -> Instance:
            made = Instance(kip, client, program, f"{program.name}-{name}", tar, flags)
            stack.callback(made.remove)
            for _ in range(WARM):
                made.ask()
            return made

        started = instance(in_memory, "started")
        sleepers = {
            "faults": instance(in_memory, "faults", "--prefetch", "off"),
            "prefetch": instance(in_memory, "prefetch", "--prefetch", "on"),
            "prefetch_disk": instance(on_disk, "disk", "--prefetch", "on"),
        }
        first_sleeps: dict[str, dict[str, Any]] = {}
        for way, sleeper in sleepers.items():  # the working set is what the last request touched
            first_sleeps[way] = sleeper.learn()
            sleeper.cycle()
        for way, sleep in first_sleeps.items():
            rows.append({"program": program.name, "way": way, "round": -1, "first_sleep": sleep})

        def turn(way: str, number: int) -> None:
            row: dict[str, Any] = {"program": program.name, "way": way, "round": number}
            if way == "cold":
                row["us"] = started.cold()
                started.ask()
            elif way == "hot":
                row["us"] = started.ask()
                started.after_reply()  # as after the wake of one that was hibernated: a command has run before they go on
                follow("again", started, number)
            else:
                sleeper = sleepers[way]
                row["sleep"], row["us"], row["wake"] = sleeper.cycle()
                if way == "prefetch":
                    follow("awake", sleeper, number)
            rows.append(row)

        def follow(way: str, instance: Instance, number: int) -> None:
            for _ in range(NEXT):
                rows.append({"program": program.name, "way": way, "round": number, "us": instance.ask()})

        for number in range(samples):
            shift = number % len(WAYS)
            for way in WAYS[shift:] + WAYS[:shift]:
                turn(way, number)
        say(f"{program.name}: {samples} rounds")
    return rows
