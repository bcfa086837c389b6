"""Figure 6 of paper P: first replies hot, parked and archived, by how far the client is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from archived.host import STILL, TRIES, Distance, NotAsleep, Sleeper
from harness.line import Proxy
from harness.kip import Kip
from harness.wait import wait_for
from parkwake.client import Client, WrongReply
from parkwake.kiphost import daemon
from parkwake.setups import ALL, Setup
from parkwake.workspace import Workspace

STATES = ("hot", "parked", "archived")
# What was stored is on the local disk too, under a daemon of its own; the first server, over the
# shortest way, to compare.
CACHED = "archived, cached"
# Milliseconds from the paper's clients to its workers in Virginia, there and back.
ROUND_TRIPS = {"Virginia": 0.26, "Oregon": 81.0, "Frankfurt": 89.0, "Tokyo": 149.0}
# Of the issue: first reply of an archived one over the shortest way, more than the store's first
# byte, ms.
TARGETS_MS = {"lighttpd": 20.0, "bind": 35.0, "postfix": 50.0}
# Wakes by which it is known what a wake needs, before the first sample.
LEARN = 2


class Contest:
    """One server in all its states, over all distances."""

    def __init__(self, work: Workspace, kip: Kip, client: Client, proxy: Proxy, setup: Setup, tool: Path, stack: ExitStack):
        self.setup, self.client = setup, client
        server = setup.server
        flags = [*STILL, *server.flags]
        proc = kip.run(setup.name, server.command, ports=server.published, tar=server.tarball(work.dir), flags=flags, timeout=120)
        self.sleeper = Sleeper(proc, proxy)
        port = proc.port(setup.port, setup.first.proto)
        self.ways = {}
        for ms in ROUND_TRIPS.values():
            self.ways[ms] = Distance(tool, setup.first.proto, port, ms)
            stack.callback(self.ways[ms].close)
        wait_for(f"{setup.name} has its data", self.is_right, 30)
        for _ in range(LEARN):
            self.ask(ROUND_TRIPS["Virginia"])
            self.sleeper.archive()
            self.sleeper.wake("archived", lambda: self.ask(ROUND_TRIPS["Virginia"]))

    def is_right(self) -> bool:
        """BIND listens before its zones are loaded, and says until then that it failed."""
        try:
            self.ask(ROUND_TRIPS["Virginia"])
        except WrongReply:
            return False
        return True

    def ask(self, round_trip_ms: float) -> tuple[float, int]:
        reply = self.client.first(self.setup.first, "127.0.0.1", self.ways[round_trip_ms].port)
        return reply.us, reply.reply_ns

    def turn(self, state: str, round_trip_ms: float) -> dict[str, Any]:
        if state == "hot":
            self.ask(round_trip_ms)
            return {"us": self.ask(round_trip_ms)[0]}
        for left in reversed(range(TRIES)):
            stored = self.sleeper.archive() if state == "archived" else self.sleeper.park()
            try:
                return {"stored": stored, **self.sleeper.wake(state, lambda: self.ask(round_trip_ms))}
            except NotAsleep:
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")


def measure(
    rows: list[dict[str, Any]], work: Workspace, kip: Kip, client: Client, proxy: Proxy, servers: Sequence[str], samples: int,
    url: str, say: Callable[[str], None],
) -> None:  # fmt: skip
    """Rows {server, state, round_trip_ms, round, us..}; in each round every server has its turn in every state from everywhere,
    in an order that changes."""
    order = random.Random(6)
    tool = work.dir / "distance"
    with ExitStack() as stack:
        contests = [Contest(work, kip, client, proxy, ALL[name](), tool, stack) for name in servers]
        other = stack.enter_context(daemon(kip.program, work.dir / "cached", "--store", url, "--cache", "1G"))
        cached = Contest(work, other, client, proxy, ALL[servers[0]](), tool, stack)
        for number in range(samples):
            turns = [(c, s, ms) for c in contests for s in STATES for ms in ROUND_TRIPS.values()]
            turns.append((cached, CACHED, min(ROUND_TRIPS.values())))
            order.shuffle(turns)
            for contest, state, ms in turns:
                row = {"server": contest.setup.name, "state": state, "round_trip_ms": ms, "round": number}
                rows.append({**row, **contest.turn(state.partition(",")[0], ms)})
            say(f"first replies: round {number + 1} of {samples}")
        for contest in [*contests, cached]:
            contest.sleeper.proc.remove()
