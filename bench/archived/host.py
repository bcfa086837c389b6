"""What is measured stands here: a real S3 server behind the line, and procs that go to it and come back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.line import Proxy, Request
from harness import s3
from harness.clients import tcp_states
from harness.kip import Kip, Proc
from harness.wait import wait_for
from parkwake.workspace import Failed, Workspace

# They sleep when they are told to, and in the tier that they are told.
STILL = ["--never-sleep"]
TRIES = 10
TIME_WAIT = "06"


@contextmanager
def store(work: Workspace, delay_ms: float, mb_per_s: float) -> Iterator[tuple[str, Proxy]]:
    """The URL of an empty bucket behind the line, and the line. Credentials are in the environment meanwhile."""
    with s3.server(work.dir / "store") as url:
        proxy = Proxy(int(url.rpartition(":")[2]), delay_ms, mb_per_s)
        try:
            yield f"{url.rpartition(':')[0]}:{proxy.port}", proxy
        finally:
            proxy.close()


class Distance:
    """A port of this machine from which a proc's is so far away: `distance.c`."""

    def __init__(self, tool: Path, proto: str, port: int, round_trip_ms: float):
        words = [str(tool), proto, "127.0.0.1", str(port), str(round(round_trip_ms * 1000))]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self.port = int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdout
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def part_of(request: Request) -> str:
    """What a request is about: see the names of objects in docs/design/2026-11-22-archive.md."""
    words = request.key.strip("/").split("/")
    if "packs" in words:
        return "pack"
    return "head" if words[-1] == "head" else "front" if words[-1].startswith("gen-") else "other"


def row_of(request: Request) -> dict[str, Any]:
    return {"part": part_of(request), **{k: v for k, v in asdict(request).items() if k != "key"}}


class NotAsleep(Failed):
    """It woke by itself, by a timer, before it could be asked."""


class Sleeper:
    """A proc, put into the tiers and woken; each is seen to be what it counts as."""

    def __init__(self, proc: Proc, proxy: Proxy):
        self.proc, self.proxy = proc, proxy

    @property
    def kip(self) -> Kip:
        return self.proc.kip

    def park(self) -> None:
        """Once its clients have gone: the end of a connection, which comes late from far away, would wake it."""
        if pids := self.proc.inspect()["pids"]:
            wait_for("its connections have ended", lambda: set(tcp_states(pids[0])) <= {"LISTEN", TIME_WAIT}, 30)
        self.proc.sleep(timeout=300)

    def archive(self) -> dict[str, Any]:
        """From the local disk to the store: microseconds of the command, and the requests it made. One that is at work wakes
        meanwhile, and goes again."""
        for _ in range(TRIES):
            self.park()
            self.proxy.quiet(0.05)
            begun = time.monotonic_ns()
            self.kip.cli("sleep", self.proc.name, "--to", "archived", timeout=300, check=False)
            us = (time.monotonic_ns() - begun) / 1000
            view = self.proc.inspect()
            left = sorted(path.name for path in (self.kip.data / "procs" / self.proc.name).glob("gen-*"))
            if view["state"] == "archived" and not left:
                break
            if all(name.endswith(".new") for name in left):  # it comes back already: a timer was due
                self.proc.quiescent()
        if (view["state"], view["tier"]) != ("archived", "archived") or view["pids"]:
            raise Failed(f"{self.proc.name} does not stay archived: {view['state']}, last wake {view['last_wake']}")
        if left:
            raise Failed(f"{self.proc.name} is archived, and still has on the local disk: {left}")
        return {"us": us, "requests": [row_of(r) for r in self.proxy.quiet(0.05)]}

    def wake(self, tier: str, ask: Callable[[], tuple[float, int]]) -> dict[str, Any]:
        """The first reply of one that sleeps there: microseconds, the figures of the wake that it must have been, and the
        requests that it made of the store, those begun before the reply and those after it. `ask` gives microseconds
        and when the reply was there, nanoseconds."""
        before = self.proc.inspect()
        if before["tier"] != tier or before["pids"]:
            raise NotAsleep(f"{self.proc.name} is {before['state']}, not {tier}")
        self.proxy.take()
        us, replied_ns = ask()
        view = self.running()
        wake = view["last_wake"]
        if not wake or wake == before["last_wake"] or wake["from"] != tier:
            raise Failed(f"{self.proc.name} answered without a wake from {tier} on record: {wake}")
        requests = self.proxy.quiet() if tier == "archived" else []
        return {
            "us": us, "wake": wake, "rss_bytes": view["memory"]["rss_bytes"], "misses": view["memory"].get("working_set_misses"),
            "requests": [row_of(r) for r in requests if r.began_ns < replied_ns],
            "later": [row_of(r) for r in requests if r.began_ns >= replied_ns],
        }  # fmt: skip

    def running(self) -> dict[str, Any]:
        """Waits until the wake is on record, which is when the program already runs."""
        deadline = time.monotonic() + 30
        while (view := self.proc.inspect())["state"] != "running":
            if time.monotonic() > deadline:
                raise Failed(f"{self.proc.name} answered and is {view['state']}")
        return view
