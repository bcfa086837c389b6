"""Clients that never pause, while what they talk to is hibernated and parked at random moments and Kip's own processes are
killed, one at a time: every answer is the right one, and none is missing."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import servers, logged
from harness.clients import Lines, Redis, talking, without_pause
from harness.kip import Kip, Proc
from harness.wait import wait_for

pytestmark = pytest.mark.measures

# What the daemon may say when it, its pager or its keeper was killed; a transition may fail then
# and say so.
KILLED = [*logged.DAEMON_KILLED, *logged.KEEPER_KILLED, *logged.PAGER_KILLED]
STATIC = 5000


def content(key: object, version: int) -> bytes:
    return f"{key} is at {version};".encode() * 60


@contextmanager
def storing(port: int, clients: int = 3) -> Iterator[list[int]]:
    """Clients of redis, each with keys of its own that it changes and reads back, and all read what no client changes."""

    def talk(number: int) -> Iterator[None]:
        client, versions, dice = Redis(port), [0] * 50, random.Random(number)
        while True:
            own, other = dice.randrange(len(versions)), dice.randrange(STATIC)
            key = f"{number}:{own}"
            stored = client.ask("GET", key)
            assert stored == (content(key, versions[own]) if versions[own] else None), f"{key}: {stored!r}"
            versions[own] += 1
            assert client.ask("SET", key, content(key, versions[own])) == "OK"
            assert client.ask("GET", f"static:{other}") == content(other, 0)
            yield

    with without_pause(talk, clients) as answered:
        yield answered


class Killer:
    """Kills one of Kip's processes and waits until there is another that knows everything."""

    def __init__(self, kip: Kip):
        self.kip = kip
        self.victims = {"pager": 0, "keeper": 0, "daemon": 0}

    def kill(self, victim: str) -> None:
        kip = self.kip
        self.victims[victim] += 1
        if victim == "daemon":
            kip.kill()
            kip.up()
            return
        field, told = f"{victim}_pid", self.told(victim)
        old = wait_for(f"there is a {victim}", lambda: kip.info()[field], 30)
        os.kill(old, signal.SIGKILL)
        wait_for(f"there is another {victim}", lambda: kip.info()[field] not in (0, old), 30)
        wait_for("it was told", lambda: self.told(victim) > told, 30)

    def told(self, victim: str) -> int:
        return sum(event["kind"] == victim for event in self.kip.events())


def load(kip: Kip, tmp_path: Path, seconds: float, seed: int) -> None:
    """With odd seeds the wakes of both programs are lazy; with even ones CRIU does those of torture."""
    kip.expected += KILLED
    dice = random.Random(seed)
    torture, redis = servers.torture(), servers.redis()
    flags = ["--idle", "1h", "--lazy", "on"]
    by_plan = ["--env", servers.ONLY_CRIU] if seed % 2 else []
    programs = [
        kip.run("torture", torture.command, ports=torture.published, tar=torture.tarball(tmp_path), flags=flags + by_plan),
        kip.run("redis", redis.command, ports=redis.published, flags=flags),
    ]
    lines, store = Lines(programs[0].port()), Redis(programs[1].port())
    assert lines.ask("eat 5") == "eaten"
    store.ask_all([("SET", f"static:{i}", content(i, 0)) for i in range(STATIC)])
    killer, slept = Killer(kip), {"hibernated": 0, "parked": 0}
    with talking(programs[0].port()) as lines_answered, storing(programs[1].port()) as answered:
        until = time.monotonic() + seconds
        # A machine that stalls gets more time.
        while time.monotonic() < until or min(slept.values()) < 4 or min(killer.victims.values()) < 1:
            proc, tier = dice.choice(programs), dice.choice(list(slept))
            victim = dice.choice([None, None, *killer.victims])
            # The pager's death in the middle of taking memory out costs the program:
            # docs/limits.md.
            at_once = victim in ("keeper", "daemon") and dice.random() < 0.5
            sleeper = threading.Thread(target=sleep, args=(proc, tier, slept))
            sleeper.start()
            if not at_once:
                sleeper.join(60)
            time.sleep(dice.random() * 0.05)
            if victim:
                killer.kill(victim)
            sleeper.join(60)
            assert not sleeper.is_alive(), f"{proc.name} to {tier}: no answer within a minute"
    assert min(lines_answered + answered) > 10, (lines_answered, answered)
    for proc in programs:
        proc.sleep()
    lines.check(2000)
    assert store.ask_all([("GET", f"static:{i}") for i in range(STATIC)]) == [content(i, 0) for i in range(STATIC)]
    kinds = [event["kind"] for event in kip.events()]
    assert not {"cold-start", "exited", "stopped"} & set(kinds), kinds


def sleep(proc: Proc, tier: str, slept: dict[str, int]) -> None:
    """It may be awake again before this returns, or not sleep at all because what was to do it is dead."""
    done = proc.kip.cli("sleep", proc.name, "--to", tier, "--clock", "auto", check=False)
    slept[tier] += done.returncode == 0


# promise hibernation: clients that talk all the while to procs that are put to sleep at random, and
#   pager, keeper or daemon killed meanwhile
# held by: this, for long `tests/test_load.py::test_random_sleeps_and_kills_for_long`
def test_random_sleeps_and_kills(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    load(fresh_kip(), tmp_path, 8, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10, 20), ids="seed{}".format)
def test_random_sleeps_and_kills_for_long(fresh_kip: Callable[..., Kip], tmp_path: Path, seed: int) -> None:
    load(fresh_kip(), tmp_path, 60, seed)
