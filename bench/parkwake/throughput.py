"""Steady throughput of one server in four ways: short slices that alternate in an order that changes with the round."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.kip import Kip
from parkwake import byhand
from parkwake.client import Client
from parkwake.kiphost import Hosted, skeleton
from parkwake.network import Nat
from parkwake.replies import saved_state
from parkwake.setups import Setup
from parkwake.workspace import Workspace

WAYS = ("native", "runc", "kip", "woken")
# Before each slice, not counted: connections are made, and what a wake left cold becomes warm.
IDLE_MS = 200


def measure(
    work: Workspace, tools: dict[str, Path], kip: Kip, client: Client, nat: Nat, setup: Setup,
    numbers: tuple[int, int], rounds: int, slice_ms: int, say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows {server, way, keep, round, per_second, errors}."""
    base, host_port, extra = skeleton(kip), 20_000 + numbers[1], saved_state(work, kip, setup)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        native = byhand.Native(work, tools, byhand.make_root(work, base, setup, "load-native", extra), numbers[0], setup)
        runc = byhand.Runc(work, byhand.make_root(work, base, setup, "load-runc", extra), numbers[1], setup)
        nat.publish(runc.network, setup.first.proto, host_port, setup.port)
        never = Hosted(work, kip, client, setup, f"{setup.name}-load")
        stack.callback(never.proc.remove)
        woken = Hosted(work, kip, client, setup, f"{setup.name}-woken")
        stack.callback(woken.proc.remove)
        stack.enter_context(native.running())
        stack.enter_context(runc.running(client))
        # The client that asks, and the port: Kip's and runc's are reached by 127.0.0.1 and the
        # kernel's NAT.
        ways: dict[str, tuple[Client, int]] = {
            "native": (native.client, setup.port),
            "runc": (client, host_port),
            "kip": (client, never.host_port),
            "woken": (client, woken.host_port),
        }
        order = random.Random(2)
        for number in range(rounds):
            turns = [(way, kind) for way in WAYS for kind in setup.loads]
            order.shuffle(turns)
            for way, (question, keep) in turns:
                if way == "woken":
                    woken.sleep()
                    woken.wake_by_client()
                asker, port = ways[way]
                asker.load(question, "127.0.0.1", port, setup.connections, keep, IDLE_MS)
                rate, errors = asker.load(question, "127.0.0.1", port, setup.connections, keep, slice_ms)
                rows.append({
                    "server": setup.name, "way": way, "keep": keep, "round": number, "per_second": rate, "errors": errors,
                })  # fmt: skip
            say(f"throughput of {setup.name}: round {number + 1} of {rounds}")
    native.client.close()
    return rows
