"""Section 6.4 of paper P: how long a parked strawman takes to answer, by the way its memory comes back.

Each sample is a wake from a snapshot on disk. What the request is to touch is known, so the answer's sum shows that every
page came back right; what has come back to memory shows that the wake was of the kind that it is counted as."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.kip import Kip, Proc
from harness.programs import tarball
from parkwake.client import Client, Question
from parkwake.workspace import Failed, Workspace, command

Rows = list[dict[str, Any]]
Say = Callable[[str], None]

SOURCES = Path(__file__).resolve().parents[1] / "programs"
PORT, PAGE = 8080, 4096
PAGES = 64 << 20 >> 12
SET_PAGES = 8 << 20 >> 12
# Of figure 7, bytes: 4 KB to 8 MB.
SIZES = [PAGE << i for i in range(12)]
# Of figure 8: the part of the working set that is not in the ActiveSet, 0.5% to 100%.
SHIFTS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]

# How each way is asked for (`kip run`). Whether it is what was got, `judge` says.
WAYS = {
    "activeset": ["--lazy", "on", "--prefetch", "on"],  # the pages that the last request touched come first, others when touched
    "reactive": ["--lazy", "on", "--prefetch", "off"],  # pages come when touched, B = 32 at a time
    "whole": ["--lazy", "off"],  # all pages come before the program runs
}
BLOCK = 32
# What the program has beside its block of memory, at most.
REST_BYTES = 6 << 20


def answer(first: int, count: int) -> bytes:
    """The sum that pages hold: see strawman.c."""
    pages = ((first + i) % PAGES for i in range(count))
    return str(sum(page * page + 1 for page in pages) % 2**64).encode()


def question(first: int, count: int) -> Question:
    request = f"GET /{first}/{count} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n".encode()
    return Question("tcp", request, f"http:{answer(first, count).hex()}")


def judge(way: str, touched: int, hot_bytes: int, view: dict[str, Any]) -> None:
    """Fails if the wake was of another kind: what has come back to memory tells."""
    back = view["memory"]["rss_bytes"]
    block = PAGES * PAGE
    if way == "whole":
        if back < block:
            raise Failed(f"the whole image was to come back, and {back >> 10} KiB of {hot_bytes >> 10} KiB did")
        return
    # Three times the working set, if this request and the two before it touched others (what the
    # set had of the first of them falls out after the second), and each fault may bring a block.
    most = REST_BYTES + (3 * touched + (BLOCK * 4)) * PAGE
    if back > most:
        raise Failed(
            f"a wake brought {back >> 10} KiB of {hot_bytes >> 10} KiB back where {touched * 4} KiB were "
            f"touched: this Kip reads the whole image, there is no {way} to measure"
        )


class Strawman:
    """One of them as a proc."""

    def __init__(self, kip: Kip, client: Client, way: str, tar: Path, cold_cache: bool):
        self.kip, self.client, self.way, self.cold_cache = kip, client, way, cold_cache
        words = ["/srv/strawman", str(PORT), str(PAGES)]
        flags = ["--never-sleep", *WAYS[way]]
        self.proc: Proc = kip.run(f"strawman-{way}", words, ports=[str(PORT)], tar=tar, flags=flags)
        self.host_port = self.proc.port()
        self.hot_bytes = self.proc.inspect()["memory"]["rss_bytes"]
        if self.hot_bytes < PAGES * PAGE:
            raise Failed(f"the strawman holds {self.hot_bytes} bytes, less than its block")

    def ask(self, first: int, count: int) -> float:
        return self.client.first(question(first, count), "127.0.0.1", self.host_port).us

    def warm(self, first: int, count: int) -> None:
        """Twice there and back: before the first wake everything has been touched, and is what comes back at it."""
        for _ in range(2):
            self.proc.sleep(timeout=120)
            self.ask(first, count)
            self.proc.wait_state("running", 10)

    def cycle(self, first: int, count: int) -> dict[str, Any]:
        """Parks it and asks: microseconds to the reply, and the figures of both ways."""
        parked = self.proc.sleep(timeout=120)
        if self.cold_cache:
            evict(self.kip.data / "procs" / self.proc.name)
        us = self.ask(first, count)
        deadline = time.monotonic() + 10
        while (view := self.proc.inspect())["state"] != "running":
            if time.monotonic() > deadline:
                raise Failed(f"{self.proc.name} answered and is {view['state']}")
        wake = view["last_wake"]
        if wake == parked["last_wake"] or wake["from"] != "parked":
            raise Failed(f"{self.proc.name} answered without a wake from parked on record")
        judge(self.way, count, self.hot_bytes, view)
        return {
            "us": us, "sleep": parked["last_sleep"], "wake": wake, "rss_bytes": view["memory"]["rss_bytes"],
            "working_set_pages": view["memory"]["working_set_pages"], "misses": view["memory"].get("working_set_misses"),
        }  # fmt: skip


def evict(directory: Path) -> None:
    """Takes a snapshot's files out of the page cache. They have been synced."""
    for path in directory.glob("gen-*/*"):
        if path.is_file() and not path.is_symlink():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def build(work: Workspace) -> Path:
    out = work.dir / "strawman"
    command("cc", "-O2", "-Wall", "-Wextra", "-static", "-o", out, SOURCES / "strawman.c")
    return tarball(work.dir / "strawman.tar", {"srv/strawman": out}, {"srv/strawman": 0o755})


def sizes(
    rows: Rows, kip: Kip, client: Client, tar: Path, wanted: Sequence[str], samples: int, cold_cache: bool, say: Say
) -> None:
    """Figure 7: rows {way, size, round, us..}, each way by turns. The same pages each time."""
    strawmen = {way: Strawman(kip, client, way, tar, cold_cache) for way in wanted}
    for size in SIZES:
        count = size // PAGE
        for way, strawman in strawmen.items():  # what was touched last is the ActiveSet of the first sample
            strawman.warm(0, count)
            hot = [strawman.ask(0, count) for _ in range(3)]
            rows.append({"way": way, "size": size, "hot_us": min(hot)})
        for number in range(samples):
            ways = list(wanted)
            shift = number % len(ways)
            for way in ways[shift:] + ways[:shift]:
                rows.append({"way": way, "size": size, "round": number, **strawmen[way].cycle(0, count)})
        say(f"working set of {size >> 10} KB: {samples} rounds")
    for strawman in strawmen.values():
        strawman.proc.remove()


def shifts(rows: Rows, kip: Kip, client: Client, tar: Path, samples: int, cold_cache: bool, say: Say) -> None:
    """Figure 8: rows {shift, round, us..} of the ActiveSet at 8 MB, each request so far from the one before."""
    strawman = Strawman(kip, client, "activeset", tar, cold_cache)
    first = 0
    strawman.warm(first, SET_PAGES)
    for part in SHIFTS:
        pages = max(1, round(part * SET_PAGES))
        for number in range(samples):
            first = (first + pages) % PAGES
            rows.append({"shift": part, "pages": pages, "round": number, **strawman.cycle(first, SET_PAGES)})
        say(f"shift of {part:.1%}: {samples} rounds")
    strawman.proc.remove()
