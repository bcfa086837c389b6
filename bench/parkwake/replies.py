"""First replies: hot, parked, by plain CRIU, cold, by runc; and what each sleep took. One round asks every server in every
way once, in an order that changes with the round, so that a drift of the machine hits all alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.clients import Redis
from harness.kip import Kip
from parkwake import byhand
from parkwake.client import Client
from parkwake.kiphost import AWAKE, Hosted, fill, skeleton
from parkwake.setups import Setup
from parkwake.workspace import Failed, Workspace

METHODS = ("hot", "parked", "criu", "cold", "runc")
# Of a larger server.
UNDER_KIP = METHODS[:2]
# Failures in a row after which a way to run a server is given up, with the reason in the table.
GIVE_UP = 3


class Contest:
    """One server in all its ways."""

    def __init__(self, work: Workspace, tools: dict[str, Path], kip: Kip, client: Client, setup: Setup, number: int):
        self.setup, self.client = setup, client
        self.hosted = Hosted(work, kip, client, setup, setup.name)
        self.failures: dict[str, list[str]] = {m: [] for m in (UNDER_KIP if setup.larger else METHODS)}
        if setup.larger:
            return
        extra = saved_state(work, kip, setup)
        base = skeleton(kip)

        def root(name: str, setup: Setup = setup) -> Path:
            return byhand.make_root(work, base, setup, name, extra)

        self.native = byhand.Native(work, tools, root("native"), 3 * number, setup)
        self.runc = byhand.Runc(work, root("runc"), 3 * number + 1, setup)
        self.criu = byhand.Criu(work, tools, root("criu", byhand.for_criu(setup)), 3 * number + 2, setup, byhand.find_criu())

    def hot(self) -> dict[str, Any]:
        self.hosted.ask()
        return {"us": self.hosted.ask().us}

    def parked(self) -> dict[str, Any]:
        self.hosted.ask()
        sleep = self.hosted.sleep()
        read_us = self.hosted.read_us()
        reply, wake = self.hosted.wake_by_client()
        return {"us": reply.us, "sleep": sleep, "wake": wake, "read_us": read_us}

    def criu_by_hand(self) -> dict[str, Any]:
        if self.criu.pid is None:
            self.criu.begin(self.client)
        sleep = self.criu.dump()
        begun, reply = self.criu.restore(self.client)
        return {"us": (reply.reply_ns - begun) / 1000, "sleep": sleep}

    def cold(self) -> dict[str, Any]:
        with self.native.running() as (started, reply):
            us = (reply.reply_ns - started.exec_ns) / 1000
            self.native.ask()
            return {"us": us, "hot_us": self.native.ask().us}

    def by_runc(self) -> dict[str, Any]:
        with self.runc.running(self.client) as (begun, reply):
            us = (reply.reply_ns - begun) / 1000
            self.runc.ask(self.client)
            return {"us": us, "hot_us": self.runc.ask(self.client).us}

    def close(self) -> None:
        """Ends what runs."""
        if not self.setup.larger:
            self.criu.end()
            self.native.client.close()
        self.hosted.proc.remove()

    WAYS = {"hot": hot, "parked": parked, "criu": criu_by_hand, "cold": cold, "runc": by_runc}


def saved_state(work: Workspace, kip: Kip, setup: Setup) -> dict[str, Path]:
    """redis: a file with all keys, for the ways that start it afresh."""
    if setup.name != "redis":
        return {}
    file = work.dir / "dump.rdb"
    if not file.exists():
        proc = kip.run("redis-filler", setup.server.command, ports=setup.server.published, flags=AWAKE)
        fill(proc.port(setup.port))
        client = Redis(proc.port(setup.port))
        client.ask("SAVE")
        client.close()
        file.write_bytes(proc.exec("cat", "/tmp/dump.rdb", binary=True).stdout)
        proc.remove()
    return {"tmp/dump.rdb": file}


def run(contests: list[Contest], rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows {server, method, round, us, ..} or {server, method, round, error}."""
    rows: list[dict[str, Any]] = []
    order = random.Random(1)
    for number in range(-1, rounds):  # the first is to warm up caches and is not kept
        pairs = [(c, m) for c in contests for m in c.failures]
        order.shuffle(pairs)
        for contest, method in pairs:
            if len(contest.failures[method]) >= GIVE_UP:
                continue
            row: dict[str, Any] = {"server": contest.setup.name, "method": method, "round": number}
            try:
                row.update(Contest.WAYS[method](contest))
                contest.failures[method].clear()
            except (Failed, AssertionError) as e:
                row["error"] = str(e)
                contest.failures[method].append(str(e))
                say(f"{contest.setup.name}, {method}: {e}")
                if method == "criu":
                    contest.criu.end()
            if number >= 0 or "error" in row:
                rows.append(row)
        say(f"first replies: round {number + 1} of {rounds}")
    return rows
