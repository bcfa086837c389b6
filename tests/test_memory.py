"""Random orders to the program `memory`, with sleeps of all kinds between and during them; every page of every process must
be what the model in harness/memory.py says.

A failure names its seed: KIP_SEED=N runs the same orders again. (When a sleep falls into the middle of one is up to the
machine.) KIP_SOAK_MINUTES is how long the long version takes for each way to sleep and each moment to do so."""

from __future__ import annotations

import os
import random
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness import servers
from harness.clients import Lines
from harness.kip import Kip, Proc
from harness.memory import HEAP, STACK_PAGES, Page, Process, Region, written, zeros

ORDERS = 100
REGIONS, PROCESSES, DEPTH, THREADS, LARGEST = 10, 5, 3, 3, 700
ALL = ("own", "map", "shared", "file", "mixed")
# A proc of each; which by CRIU, others by Kip's own restorer.
WAYS = {
    "blocked-lazy": ["--hibernate", "blocked", "--lazy", "on", "--prefetch", "on"],
    "blocked-eager": ["--hibernate", "blocked", "--lazy", "off", "--prefetch", "off"],
    "held-lazy": ["--hibernate", "held", "--lazy", "on", "--prefetch", "off"],
    "held-eager": ["--hibernate", "held", "--lazy", "off", "--prefetch", "on"],
    "criu": ["--hibernate", "blocked", "--prefetch", "on"],
}
# Orders are carried out while it stays awake, or also while it falls asleep.
WHEN = ["between", "during"]


class Run:
    """Gives orders, keeps the model up with them and compares."""

    def __init__(self, proc: Proc, seed: int, during: bool, criu: bool):
        self.proc, self.seed, self.dice, self.during, self.criu = proc, seed, random.Random(seed), during, criu
        self.lines = Lines(proc.port())
        self.root = Process()
        self.last: deque[str] = deque(maxlen=40)
        self.numbers, self.tag = 100, 1
        self.pool = ThreadPoolExecutor(1)
        self.choices = {
            self.write: 14, self.zero: 2, self.look: 10, self.drop: 5, self.protect: 5, self.unmap: 3, self.renew: 3,
            self.map: 5, self.resize: 5, self.move: 3, self.carry: 2, self.split: 2, self.advise: 5, self.brk: 3,
            self.dive: 2, self.signal: 3, self.fork: 3, self.end: 2, self.exec: 0.7, self.thread: 2, self.unthread: 1.2,
        }  # fmt: skip

    def go(self, orders: int) -> None:
        try:
            while orders > 0:
                orders -= self.some_orders(self.dice.randint(1, 12))
                self.sleep()
                self.look()
            self.proc.sleep()
            self.look_at_all()
        except Exception as error:
            shown = "\n  ".join(self.last)
            raise AssertionError(f"KIP_SEED={self.seed}: {error}\nThe last orders:\n  {shown}") from error
        finally:
            self.pool.shutdown()
            self.lines.close()

    def some_orders(self, count: int) -> int:
        for _ in range(count):
            while self.dice.choices(list(self.choices), list(self.choices.values()))[0]() is False:
                pass  # there is nothing that it could be done to
        return count

    def sleep(self) -> None:
        if self.during and self.dice.random() < 0.5:
            self.sleep_meanwhile(self.dice.choice(["hibernated", "parked"]))
            return
        last = ""
        for step in self.dice.choices(["hibernated", "parked", "wake"], k=self.dice.choice([1, 1, 2, 3, 4])):
            if step == "wake" or (step == "hibernated" and last == "parked"):  # that is no way down
                self.kip("wake")
            if step != "wake":
                self.kip("sleep", "--to", step, "--clock", "auto")
            last = step

    def sleep_meanwhile(self, tier: str) -> None:
        """It falls asleep in the middle of orders."""
        self.last.append("the next one beside the orders")
        sleeps = self.pool.submit(self.kip, "sleep", "--to", tier, "--clock", "auto")
        self.some_orders(self.dice.randint(3, 20))
        sleeps.result(60)
        self.last.append("it is done")

    def kip(self, command: str, *flags: str) -> None:
        self.last.append(" ".join(["kip", command, *flags]))
        self.proc.kip.cli(command, self.proc.name, *flags)
        for process in self.root.all():
            for region in process.of_kind("file", "mixed"):
                region.pieces = region.turned = True

    def order(self, process: Process, line: str, *right: str) -> str:
        """Gives an order; its answer must be one of the right ones."""
        line = "".join(f"@{name} " for name in process.path) + line
        self.last.append(line)
        answer = self.lines.ask(line).strip()
        assert answer in right, f"{line!r} was answered with {answer!r}, not with {' or '.join(map(repr, right))}"
        return answer

    def by_anyone(self, process: Process, line: str, *right: str) -> str:
        """The same, perhaps by another thread."""
        threads = [f"%{name} " for name in process.threads]
        return self.order(process, self.dice.choice(["", *threads]) + line, *right)

    # What it is done to.

    def process(self) -> Process:
        return self.dice.choice(list(self.root.all()))

    def some(self, *kinds: str) -> tuple[Process, Region] | None:
        process = self.process()
        regions = [region for region in process.of_kind(*kinds) if region.pages]
        return (process, self.dice.choice(regions)) if regions else None

    def part(self, region: Region) -> tuple[int, int]:
        """First page and count."""
        size = len(region.pages)
        count = self.dice.choice([1, size, self.dice.randint(1, size)])
        return self.dice.randint(0, size - count), count

    def size(self) -> int:
        return self.dice.choice([self.dice.randint(1, 8), self.dice.randint(1, 80), self.dice.randint(1, LARGEST)])

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def tags(self, count: int) -> int:
        self.tag += count
        return self.tag - count

    # Orders. False: not now.

    def write(self) -> bool | None:
        if not (found := self.some(*ALL)):
            return False
        (process, region), tag = found, self.tags(LARGEST)
        first, count = self.part(region)
        done = written(region.pages[first : first + count], tag)
        self.by_anyone(process, f"write {region.number} {first} {count} {tag}", f"written {done}")

    def zero(self) -> bool | None:
        if not (found := self.some(*ALL)):
            return False
        process, region = found
        first, count = self.part(region)
        done = written(region.pages[first : first + count], 0)
        self.by_anyone(process, f"zero {region.number} {first} {count}", f"written {done}")

    def look(self) -> bool | None:
        if not (found := self.some(*ALL)):
            return False
        process, region = found
        self.by_anyone(process, f"look {region.number}", region.shown())

    def look_at_all(self) -> None:
        for process in self.root.all():
            sizes = {f"{region.number}:{len(region.pages)}" for region in process.regions.values()}
            told = self.lines.ask("".join(f"@{name} " for name in process.path) + "regions").split()
            assert set(told) == sizes, f"{process.path} has the regions {told}"
            for region in process.regions.values():
                self.by_anyone(process, f"look {region.number}", region.shown())

    def drop(self) -> bool | None:
        if not (found := self.some(*ALL)):
            return False
        process, region = found
        if region.turned:
            return False  # zeros, not the file's: docs/limits.md
        first, count = self.part(region)
        pages = region.pages[first : first + count]
        mapped = [page for page in pages if page.access != "hole"]
        refused = "lock" in region.advice and mapped
        answer = "EINVAL" if refused else "done" if mapped == pages else "ENOMEM"
        self.by_anyone(process, f"drop {region.number} {first} {count}", answer)
        for page in [] if refused else mapped:
            page.drop()

    def protect(self) -> bool | None:
        if not (found := self.some("map", "shared", "file")):
            return False
        process, region = found
        first, count = self.part(region)
        pages = region.pages[first : first + count]
        if "lock" in region.advice or any(page.access == "hole" for page in pages):
            return False
        access = self.dice.choice(["none", "r", "rw", "rw"])
        self.by_anyone(process, f"protect {region.number} {first} {count} {access}", "done")
        for page in pages:
            page.access = access
        region.pieces |= count < len(region.pages)

    def unmap(self) -> bool | None:
        if not (found := self.some("map", "shared", "file")):
            return False
        process, region = found
        first, count = self.part(region)
        if region.wandered:
            first, count = 0, len(region.pages)
        self.by_anyone(process, f"unmap {region.number} {first} {count}", "done")
        for page in region.pages[first : first + count]:
            page.access = "hole"
        region.pieces = True
        if count == len(region.pages):
            del process.regions[region.number]

    def renew(self) -> bool | None:
        if not (found := self.some("map", "shared", "file")) or found[1].advice:
            return False
        process, region = found
        first, count = self.part(region)
        self.by_anyone(process, f"renew {region.number} {first} {count}", "done")
        region.pages[first : first + count] = zeros(count)
        region.pieces = True
        if region.kind != "map":
            region.kind = "mixed"

    def map(self) -> bool | None:
        process = self.process()
        if len(process.regions) >= REGIONS:
            return False
        number, size, kind = self.number(), self.size(), self.dice.choice(["map", "map", "shared", "file"])
        tag = self.tags(size) if kind == "file" else 0
        pages = [Page([tag + i], tag + i) for i in range(size)] if tag else zeros(size)
        for page in pages:
            page.shared = kind == "shared"
        behind = [] if kind == "map" else [page.inherited() for page in pages]
        process.regions[number] = Region(number, kind, pages, behind)
        self.by_anyone(process, f"{kind} {number} {size}" + (f" {tag}" if tag else ""), "done")

    def new_size(self, region: Region) -> int:
        most = len(region.behind) or (60 if "lock" in region.advice else LARGEST)
        return min(most, self.size())

    def resize(self) -> bool | None:
        if not (found := self.some("map", "shared", "file")) or "apart" in found[1].advice:
            return False
        process, region = found
        count = self.new_size(region)
        grows, whole = count > len(region.pages), region.whole()
        if grows and region.turned:
            return False  # zeros, not the file's, too
        right = ["stayed"] if whole or not grows else []
        right += ["moved"] if whole and grows else []
        right += ["refused"] if region.pieces or not whole else []
        answer = self.by_anyone(process, f"resize {region.number} {count}", *right)
        if answer != "refused":
            region.resized(count)
        region.wandered |= answer == "moved"

    def move(self) -> bool | None:
        if not (found := self.some("map", "shared", "file")) or found[1].pieces:
            return False
        process, region = found
        count = self.new_size(region)
        if not region.whole():
            return False
        self.by_anyone(process, f"move {region.number} {count}", "moved")
        region.resized(count)
        region.wandered = False

    def carry(self) -> bool | None:
        if not (found := self.some("map", "shared", "file", "mixed")) or len(found[1].pages) > 100:
            return False
        process, region = found
        self.by_anyone(process, f"carry {region.number}", "done")
        region.pieces, region.wandered = True, False

    def split(self) -> bool | None:
        if not (found := self.some("map")) or found[1].pieces or "lock" in found[1].advice:
            return False
        (process, region), number = found, self.number()
        if not region.whole() or len(process.regions) >= REGIONS:
            return False
        self.by_anyone(process, f"split {region.number} {number}", "done")
        old = Region(number, "map", zeros(len(region.pages)), advice=region.advice.copy(), wandered=region.wandered)
        for page in old.pages:
            page.access = region.pages[0].access
        process.regions[number], region.wandered = old, False

    def advise(self) -> bool | None:
        words = {"wipe": "keep", "apart": "inherit", "huge": "small", "lock": "unlock"}
        word = self.dice.choice([*words, *words.values()])
        if not (found := self.some("map")) or not found[1].whole():
            return False
        process, region = found
        if word == "apart" and region.wandered:
            return False
        if word == "lock" and self.criu and process.path:
            return False  # CRIU forks it, and the fork is not locked: docs/limits.md
        if word == "lock" and (region.pages[0].access != "rw" or len(region.pages) > 60):
            return False
        self.by_anyone(process, f"advise {region.number} {word}", "done")
        region.advice -= {undone for undone, by in words.items() if by == word}
        region.advice |= {word} & set(words)

    def brk(self) -> None:
        process = self.process()
        heap, count = process.regions[HEAP], self.dice.randint(0, 120)
        self.by_anyone(process, f"brk {count}", "done")
        heap.pages = [*heap.pages[:count], *zeros(count - len(heap.pages))]

    def dive(self) -> None:
        self.by_anyone(self.process(), f"dive {self.dice.randint(1, 40)} {self.tags(40)}", "done")

    def signal(self) -> None:
        process, count = self.process(), self.dice.randint(1, 5)
        process.signal(count)
        self.by_anyone(process, f"signal {count}", f"signals {process.signals}")

    def fork(self) -> bool | None:
        process = self.process()
        if len(list(self.root.all())) >= PROCESSES or len(process.path) >= DEPTH:
            return False
        name = f"c{self.number()}"
        self.order(process, f"fork {name}", "done")
        process.fork(name)

    def end(self) -> bool | None:
        process = self.process()
        if not process.children:
            return False
        name = self.dice.choice(list(process.children))
        self.order(process, f"end {name}", "done")
        del process.children[name]

    def exec(self) -> bool | None:
        process = self.process()
        if not process.path:
            return False
        process.exec()
        self.order(process, "exec", "done")

    def thread(self) -> bool | None:
        process, number = self.process(), self.number()
        if len(process.threads) >= THREADS:
            return False
        process.threads[f"t{number}"] = number
        self.order(process, f"thread t{number} {number}", "done")
        process.regions[number] = Region(number, "own", zeros(STACK_PAGES))

    def unthread(self) -> bool | None:
        process = self.process()
        if not process.threads:
            return False
        name = self.dice.choice(list(process.threads))
        self.order(process, f"unthread {name}", "done")
        del process.regions[process.threads.pop(name)]


def run(kip: Kip, tmp_path: Path, way: str, when: str, seed: int, orders: int) -> None:
    server = servers.memory(criu=way == "criu")
    flags = [*WAYS[way], "--never-sleep"]
    proc = kip.run(f"memory-{way}", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    Run(proc, seed, when == "during", way == "criu").go(orders)
    assert proc.rebuilt() == (way != "criu")
    proc.remove()


# promise hibernation: every page of every process is as a model says, through random orders (map,
#   write, move, drop, protect, fork, exec, threads, signals, brk) with sleeps of both kinds between
#   and during them
# held by: this, for hours `tests/test_memory.py::test_every_page_for_long`
# promise hibernation: one that is frozen at work is not held, it goes on
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", WHEN)
def test_every_page(kip: Kip, tmp_path: Path, way: str, when: str) -> None:
    run(kip, tmp_path, way, when, int(os.environ.get("KIP_SEED", "3")), ORDERS)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", WHEN)
def test_every_page_for_long(kip: Kip, tmp_path: Path, way: str, when: str) -> None:
    until = time.monotonic() + 60 * float(os.environ.get("KIP_SOAK_MINUTES", "15"))
    while time.monotonic() < until:
        run(kip, tmp_path, way, when, random.randrange(1 << 32), ORDERS * 10)
