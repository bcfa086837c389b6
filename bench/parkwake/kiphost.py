"""Servers under Kip: the daemon under test and what is asked of its procs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.clients import Redis
from harness.kip import Kip, Proc
from harness.wait import wait_for
from parkwake.client import Client, Reply
from parkwake.setups import KEYS, Setup, value
from parkwake.workspace import Failed, Workspace

# They sleep when they are told to, not when they are idle.
AWAKE = ["--idle", "24h"]
# A browser with a cold disk.
STARTED_WITHIN_S = 60


def up(program: Path, data: Path, *flags: str) -> Kip:
    """A daemon of the run's own."""
    kip = Kip(data, program=program, flags=flags)
    kip.up()
    return kip


@contextmanager
def daemon(program: Path, data: Path, *flags: str) -> Iterator[Kip]:
    """One for a part of the run, which ends with it, however that ends. What it complains about fails the part."""
    kip = up(program, data, *flags)
    try:
        yield kip
    except BaseException:
        kip.cli("down", "--all", check=False, timeout=1200)
        raise
    kip.down()


def skeleton(kip: Kip) -> Path:
    """The allowlist of the host's files that Kip made."""
    # The other one is for procs of images, which have these files themselves.
    return next(p for p in (kip.data / "base").iterdir() if not p.name.startswith(".") and (p / "tmp").is_dir())


class Hosted:
    """A server as a proc."""

    def __init__(self, work: Workspace, kip: Kip, client: Client, setup: Setup, name: str):
        self.kip, self.client, self.setup = kip, client, setup
        tar = setup.server.tarball(work.dir) if setup.server.files else None
        flags = [*AWAKE, *setup.server.flags]
        self.proc: Proc = kip.run(name, setup.server.command, ports=setup.server.published, tar=tar, flags=flags, timeout=120)
        self.host_port = self.proc.port(setup.port, setup.first.proto)
        if setup.name == "redis":
            fill(self.host_port)
        if setup.larger:
            wait_for(f"{name} answers", self.answers, STARTED_WITHIN_S)
        self.sessions = setup.sessions(self.proc)

    def ask(self) -> Reply:
        return self.client.first(self.setup.first, "127.0.0.1", self.host_port)

    def answers(self) -> bool:
        try:
            self.ask()
        except Failed:
            return False
        return True

    def read_us(self) -> float:
        """How long the files of a parked one take to read, from the page cache where they are in it, microseconds."""
        files = sorted((self.kip.data / "procs" / self.proc.name / f"gen-{self.proc.inspect()['generation']}").iterdir())
        buffer = bytearray(1 << 20)
        begun = time.perf_counter()
        for path in files:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        return (time.perf_counter() - begun) * 1e6

    def sleep(self) -> dict[str, Any]:
        """Parks it; it is seen to have no process. The figures of that sleep."""
        return self.proc.sleep()["last_sleep"]

    def wake_by_client(self) -> tuple[Reply, dict[str, Any]]:
        """The first reply of a parked one, and the figures of that wake."""
        before = self.proc.inspect()
        if before["tier"] != "parked" or before["pids"]:
            raise Failed(f"{self.proc.name} is not parked")
        reply = self.ask()
        deadline = time.monotonic() + 10
        # The wake is recorded when the program already runs.
        while (view := self.proc.inspect())["state"] != "running":
            if time.monotonic() > deadline:
                raise Failed(f"{self.proc.name} answered and is {view['state']}")
        if not view["last_wake"] or view["last_wake"] == before.get("last_wake"):
            raise Failed(f"{self.proc.name} answered without a wake on record")
        return reply, view["last_wake"]


def fill(port: int) -> None:
    """redis's keys, and that they are there."""
    client = Redis(port)
    client.ask_all([("SET", f"key:{i}", value(i)) for i in range(KEYS)])
    if client.ask("DBSIZE") != KEYS:
        raise Failed("redis does not hold the keys")
    client.close()


def pss_bytes(pids: Sequence[int]) -> int:
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total
