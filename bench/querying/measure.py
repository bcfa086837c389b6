"""What is measured of the database in one state of its caches: starts, loads, a source while it is cloned, and Kip's advice.

A round has every way to make an instance once, in an order of its own, so that a drift of the machine hits all alike."""

from __future__ import annotations

import os
import random
import signal
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from harness.kip import Kip
from parkwake.kiphost import skeleton
from parkwake.workspace import Failed, Workspace
from querying import load, plain
from querying.database import MIB, Database, caches
from querying.hosted import METHODS, Hosted
from querying.instances import Instance, Since, anonymous_bytes

Rows = list[dict[str, Any]]
# Failures of one way after which it is left out, with the reason in the tables.
GIVE_UP = 2
# Clones in a row, of figure 2; seconds without one before the first and behind each.
IN_A_ROW, CALM_S, APART_S, SETTLES_S = 6, 4.0, 2.0, 2.0
BIN_S = 0.1
# A limit leaves the page cache so much of the table, beside what the program has for itself.
PART_OF_TABLE, SPARE = 8, 8 * MIB
ENDLESS = 1_000_000_000
# The kernel's advice.h.
FORGET = os.POSIX_FADV_DONTNEED


@dataclass
class Run:
    """What all parts of a run of the bench share."""

    work: Workspace
    kip: Kip
    enter: Path
    memory: Path
    """A directory in memory."""
    program: Path
    """go-ycsb."""
    database: Database
    reads: int
    rounds: int
    ways: Sequence[str]
    distributions: Sequence[str]
    say: Callable[[str], None]


@dataclass
class Contest:
    """The sources of one state, and how an instance is made of each."""

    run: Run
    state: str
    number: int
    """Of its first network."""
    limit_bytes: int | None = None
    absent: dict[str, str] = field(default_factory=dict)
    """Ways that do not work, and why."""

    def __enter__(self) -> Self:
        self.stack = ExitStack()
        with self.stack:
            self._set_up()
            self.stack = self.stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _set_up(self) -> None:
        run, database, wanted = self.run, self.run.database, set(self.run.ways)
        name = f"source-{self.state}"
        tar = database.tarball(database.server(self.state), name)
        self.stack.callback(tar.unlink)
        self.source = Hosted(run.kip, database, self.state, tar, name, self.limit_bytes)
        self.stack.callback(self.source.remove)
        self.begin: dict[str, Callable[[], Instance]] = {m: lambda m=m: self.source.clone(m) for m in METHODS if m in wanted}
        self.template_ms = self.source.take_template()
        self.stack.callback(self.source.remove_templates)
        self.criu: plain.Criu | None = None
        if wanted <= set(METHODS):
            return
        below = plain.lower(run.work, skeleton(run.kip), database, self.state)
        if "runc" in wanted:
            runc = plain.Runc(run.work, below, database, self.state, self.number, self.limit_bytes)
            self.begin["runc"] = runc.cold
        by_criu = [way for way in run.ways if way.startswith("criu-")]
        if by_criu:
            try:
                self._set_up_criu(below, by_criu)
            except (Failed, OSError) as e:
                self.absent.update({way: str(e) for way in by_criu})

    def _set_up_criu(self, below: Path, ways: list[str]) -> None:
        run = self.run
        criu = plain.Criu(run.work, run.enter, below, run.database, self.state, self.number + 1, self.limit_bytes)
        self.stack.callback(criu.end)
        for way in ways:
            place = (run.work.dir / "images" if way.endswith("-disk") else run.memory) / way.removesuffix("-disk")
            if way.startswith("criu-warm"):
                criu.dump(place)
                self.begin[way] = lambda way=way, place=place: criu.warm(way, place)
            else:
                self.begin[way] = lambda way=way, place=place: criu.hot(way, place)
        self.criu = criu

    def sources(self) -> list[tuple[str, tuple[str, int]]]:
        return [("source", self.source.address), *([("criu-source", self.criu.address)] if self.criu else [])]

    def reads(self, address: tuple[str, int], distribution: str, since: float) -> load.Reads:
        run = self.run
        if self.limit_bytes:
            self.forget()
        return load.run(run.program, run.work, address, run.database.records, run.reads, distribution, since)

    def forget(self) -> None:
        """Has the page cache drop the table: a page counts for the one that reads it first, also if its files were copied."""
        for path in self.run.work.dir.rglob("usertable.ibd"):
            with suppress(OSError):
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, FORGET)
                os.close(fd)

    def warm_up(self, distribution: str) -> Rows:
        """The first reads of each source, which fill its caches."""
        rows = []
        if self.criu:
            self.criu.start_again()
        for name, address in self.sources():
            self.run.say(f"{self.state}, {distribution}: the first reads of {name}")
            found = self.reads(address, distribution, time.time())
            rows.append({"state": self.state, "distribution": distribution, "round": -1, "way": name, "reads": found.row()})
        return rows

    @contextmanager
    def attempt(self, way: str, row: dict[str, Any], failures: dict[str, list[str]]):
        """A way that fails is an error in its row, and after some of them it is absent."""
        try:
            yield
        except (Failed, AssertionError, OSError) as e:
            row["error"] = f"{type(e).__name__}: {e}"[:600]
            failures.setdefault(way, []).append(str(e))
            self.run.say(f"{self.state}, {way}: {row['error']}")
            if len(failures[way]) >= GIVE_UP:
                self.absent[way] = failures[way][-1][:300]
                self.begin.pop(way, None)


def starts(contest: Contest) -> Rows:
    """Table I: until the first query is answered, and how much each instance takes then."""
    rows, failures, order = [], {}, random.Random(1)
    for number in range(contest.run.rounds):
        contest.run.say(f"starts: round {number + 1} of {contest.run.rounds}")
        for way in order.sample(list(contest.begin), k=len(contest.begin)):
            row: dict[str, Any] = {"round": number, "way": way}
            rows.append(row)
            with contest.attempt(way, row, failures):
                instance = contest.begin[way]()
                try:
                    row.update(instance.row(), **instance.sizes())
                    contest.run.database.check(*instance.address)
                finally:
                    instance.end()
    return rows


def loads(contest: Contest, distribution: str) -> Rows:
    """Figure 1 and Table II: the reads of each instance from its start on, and of its source."""
    rows, failures, order = contest.warm_up(distribution), {}, random.Random(2)
    for number in range(contest.run.rounds):
        ways = ["source", *contest.begin]
        for way in order.sample(ways, k=len(ways)):
            if way != "source" and way not in contest.begin:
                continue
            contest.run.say(f"{contest.state}, {distribution}, round {number + 1} of {contest.run.rounds}: {way}")
            row: dict[str, Any] = {"state": contest.state, "distribution": distribution, "round": number, "way": way}
            rows.append(row)
            with contest.attempt(way, row, failures):
                if way == "source":
                    row.update(loaded(contest, contest.source.address, distribution, time.time()))
                    continue
                instance = contest.begin[way]()
                try:
                    row.update(instance.row())
                    row.update(loaded(contest, instance.address, distribution, instance.begun_s))
                    row.update(instance.sizes())
                    contest.run.database.check(*instance.address)
                finally:
                    instance.end()
    return rows


def loaded(contest: Contest, address: tuple[str, int], distribution: str, since: float) -> dict[str, Any]:
    """The reads of one run, how the query cache served them, and how long it was from `since` to the last answer."""
    before = caches(*address)
    found = contest.reads(address, distribution, since)
    after = caches(*address)
    counted = {name: after[name] - before[name] for name in ("Qcache_hits", "Qcache_inserts", "Qcache_lowmem_prunes")}
    return {"reads": found.row(), "caches": counted, "cached_before": before["Qcache_queries_in_cache"], "ready_and_read_s": found.last_s - since}


def disturbed(contest: Contest, way: str, distribution: str) -> dict[str, Any]:
    """Figure 2: reads of the source without pause while it is cloned several times in a row."""
    run = contest.run
    address = dict(contest.sources())["criu-source" if way.startswith("criu") else "source"]
    clones: Rows = []
    reading = load.reading(run.program, run.work, *address, run.database.records, ENDLESS, distribution)
    with ExitStack() as kept, reading as (process, out):
        time.sleep(SETTLES_S + CALM_S)
        begun_s = time.time() - CALM_S
        for number in range(IN_A_ROW):
            run.say(f"{way}, clone {number + 1} of {IN_A_ROW} while {distribution} reads go on")
            clones.append({"at_s": time.time() - begun_s})
            try:
                instance = contest.begin[way]()
            except (Failed, AssertionError) as e:
                run.say(f"{way}: {e}")
                clones[-1]["error"] = f"{type(e).__name__}: {e}"[:600]
                time.sleep(APART_S)
                continue
            clones[-1] |= {**instance.row(), "at_s": instance.begun_s - begun_s}
            if way in METHODS:
                kept.callback(instance.end)
            else:  # they have one network
                instance.end()
            time.sleep(APART_S)
        end_s = time.time()
        if process.poll() is not None:
            raise Failed("go-ycsb ended by itself")
        process.send_signal(signal.SIGINT)
        process.wait(60)
        found = load.parse(out, begun_s)
    within = [(at - begun_s, took) for at, took in found.begun if begun_s <= at < end_s]
    bins = [0] * (int((end_s - begun_s) / BIN_S) + 1)
    for at, took in within:
        # A read counts when it is answered.
        bins[min(int((at + took) / BIN_S), len(bins) - 1)] += 1
    calm_per_s = sum(at + took < CALM_S for at, took in within) / CALM_S
    ended = sorted(at + took for at, took in within)

    def answered(begin: float) -> int:
        """In the second from then on."""
        return bisect_left(ended, begin + 1) - bisect_left(ended, begin)

    for clone in clones:
        # Against the second before it, so that a drift of the machine hits both.
        before, clone["source_per_s"] = answered(clone["at_s"] - 1), answered(clone["at_s"])
        clone["source_ratio"] = clone["source_per_s"] / before if before else 0.0
        clone["longest_ms"] = 1e3 * max([took for at, took in within if clone["at_s"] - 0.5 <= at < clone["at_s"] + APART_S], default=0.0)
    return {"way": way, "distribution": distribution, "calm_per_s": calm_per_s, "errors": sum(at < end_s for at in found.failed), "bin_s": BIN_S, "bins": bins, "clones": clones}


def advised(contest: Contest, distribution: str) -> Rows:
    """What Kip advises, and does by `--method auto`, while the source is read: with its template, and without."""
    run, rows = contest.run, []
    contest.forget()
    with load.reading(run.program, run.work, *contest.source.address, run.database.records, ENDLESS, distribution):
        time.sleep(SETTLES_S)
        for template in (True, False):
            if not template:
                contest.source.remove_templates()
            row = {"state": contest.state, "distribution": distribution, "template": template, **contest.source.advice()}
            row["automatic"] = contest.source.automatic()
            rows.append(row)
    return rows


def thrashing_limit(run: Run, tar: Path) -> int:
    """A limit below what the database would have in memory: what its program takes with full caches, and room
    for a part of the table."""
    source = Hosted(run.kip, run.database, "thrashing", tar, "unlimited")
    try:
        load.run(run.program, run.work, source.address, run.database.records, run.reads, "uniform", Since().s)
        taken = anonymous_bytes(source.proc.inspect()["pids"])
    finally:
        source.remove()
    return (taken + SPARE + run.database.table_bytes // PART_OF_TABLE) // MIB * MIB
