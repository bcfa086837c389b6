"""Real programs through every tier: whether each sleeps, how it wakes, how long that takes, and whether all is there afterwards.

A tier is tried as idle time would bring the program there, its client connected (`--clock auto`); where its own timers wake it
at once or forbid it, a second time by request, which lets its clock stand. `table` is what docs/compatibility.md shows."""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from harness.guests import TIERS, Guest
from harness.kip import BY_ITSELF_CLOCK, Kip, Proc
from harness.profiled import CASES
from harness.wait import wait_for

BY_REQUEST: tuple[str, ...] = ()
# What a client has of a server that is not as it was.
LOST = (OSError, AssertionError, HTTPException, EOFError)
# How often a program that wakes by itself is put to sleep again before that is its answer.
TRIES = 4
# Of a run that looks where idle time alone brings a program, and for how long it looks.
IDLE, LONG_S = ["--idle", "1s", "--park-after", "1s"], 8
TICKS = re.compile(r"waits less than --tick .*\(thread \d+, (.*): [\d.]+ s in (\w+)\)")
PROFILES = {case.profile for case in CASES}
ROW = re.compile(r"^\| ([^|]+?) +\|", re.M)


class Broken(AssertionError):
    """The program is not what it was before the sleep."""


@dataclass
class Tier:
    """What came of one tier."""

    # Milliseconds from the event to the program's first instruction.
    wakes_ms: list[float] = field(default_factory=list)
    # Milliseconds from the client's words to the end of its check.
    answers_ms: list[float] = field(default_factory=list)
    # Its clock stood still: idle time alone does not bring it there while its client is connected.
    by_request: bool = False
    # Why it did not sleep so, in Kip's words.
    refused: str | None = None
    engines: list[str] = field(default_factory=list)


@dataclass
class Result:
    name: str
    source: str
    package: str
    version: str
    notices: str
    tiers: dict[str, Tier]
    # Where idle time alone brings it while its client is connected, and what keeps it from the
    # disk; none if this was not tried.
    by_itself: str | None = None
    kept: str | None = None

    def view(self) -> dict[str, Any]:
        return asdict(self)


def slug(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", name.lower())


def put(proc: Proc, tier: str, flags: tuple[str, ...]) -> str | None:
    """Puts it into the tier; none, or why it is not there."""
    reason = None
    for _ in range(TRIES):
        for step in ("parked", "archived") if tier == "archived" else (tier,):
            done = proc.kip.cli("sleep", proc.name, "--to", step, *flags, check=False)
            if done.returncode != 0:
                reason = done.stderr.strip().splitlines()[-1]
                break
            view = proc.quiescent()
            if view["tier"] != step:
                reason = f"wakes by itself: {view['last_wake']['trigger']}" if view["last_wake"] else f"is {view['state']}"
                break
        else:
            return None
        time.sleep(0.1)
    return reason


def asked(guest: Guest, check: Any, when: str) -> None:
    try:
        check()
    except LOST as error:
        raise Broken(f"{guest.name}, {when}: {error!r}") from error


def through(guest: Guest, proc: Proc, check: Any, tier: str, count: int) -> Tier:
    """So many sleeps in one tier, each ended by the client."""
    found = Tier()
    tries = 0
    while len(found.wakes_ms) < count and tries < 3 * count:
        tries += 1
        flags = BY_REQUEST if found.by_request else BY_ITSELF_CLOCK
        before = proc.inspect()["wakes"]
        if words := put(proc, tier, flags):
            found.refused = found.refused or words
            if found.by_request or found.wakes_ms:
                return found
            # What `put` itself has left asleep in the tier before.
            proc.wake()
            asked(guest, check, f"not {tier}")
            found.by_request = True
            continue
        begun = time.perf_counter()
        asked(guest, check, f"after it was {tier}")
        found.answers_ms.append((time.perf_counter() - begun) * 1000)
        view = proc.quiescent()
        wake = view["last_wake"]
        if view["tier"] == "hibernated" == tier:
            # It has so little memory that none of it had to come back.
            found.wakes_ms.append(0.0)
            continue
        # Its own timer may have been first, in `put`.
        if view["wakes"] > before and wake and wake["from"] == tier:
            found.wakes_ms.append(wake["total_us"] / 1000)
            steps = {step["name"] for step in wake["steps"]}
            if tier != "hibernated":
                found.engines.append("native" if "plan" in steps else "CRIU")
    return found


def opened(guest: Guest, proc: Proc) -> Any:
    def once() -> Any:
        try:
            return guest.open(proc)
        except LOST as error:
            problem.append(repr(error))
            return None

    problem: list[str] = []
    try:
        return wait_for(f"{guest.name} answers", once, 60)
    except AssertionError as error:
        raise Broken(f"{guest.name} does not answer: {problem[-1:]}\n{proc.logs()[-1500:]}") from error


def left_alone(proc: Proc) -> tuple[str, str | None]:
    """The tier that idle time alone brings it to, its client connected, and what keeps it there."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        view = proc.kip.json("why", proc.name)
        if view["state"] == "parked":
            return "parked", None
        if view["state"] == "hibernated" and view["cannot_sleep"]:
            return "hibernated", view["cannot_sleep"][0]
        time.sleep(0.2)
    return view["state"], next(iter(view["cannot_sleep"] or view["awake_because"]), None)


def run(kip: Kip, guest: Guest, directory: Path, count: int, alone: bool = False) -> Result:
    """With `alone` also what it does when its client is silent."""
    server = guest.server()
    tar = server.tarball(directory) if server.files else None
    ports = () if guest.by_owner else server.published
    proc = kip.run(slug(guest.name), server.command, ports=ports, tar=tar, flags=[*(IDLE if alone else ["--never-sleep"]), *server.flags], timeout=120)
    try:
        check = opened(guest, proc)
        asked(guest, check, "before any sleep")
        tiers = {tier: through(guest, proc, check, tier, count) for tier in TIERS}
        asked(guest, check, "at the end")
        by_itself, kept = left_alone(proc) if alone else (None, None)
        asked(guest, check, "after it was left alone")
        view = proc.quiescent()
        assert view["restarts"] == 0, view
    finally:
        proc.remove()
    return Result(guest.name, guest.source, guest.package, guest.version(), guest.notices, tiers, by_itself, kept)


# The table.


def cell(tier: Tier) -> str:
    if not tier.wakes_ms:
        return "no"
    median = statistics.median(tier.wakes_ms)
    return ("< 0.1" if median < 0.1 else f"{median:.1f}") + (" *" if tier.by_request else "")


def engine(result: Result) -> str:
    engines = sorted({name for tier in result.tiers.values() for name in tier.engines})
    return " and ".join(engines) or "-"


def notices(result: Result) -> str:
    said = [result.notices] if result.notices else []
    said += [f"{name}: {tier.refused}" for name, tier in result.tiers.items() if not tier.wakes_ms and tier.refused]
    if result.kept:
        ticks = TICKS.search(result.kept)
        why = f"it ticks ({ticks[1]} in {ticks[2]})" if ticks else result.kept.partition("; ")[0]
        said.append(f"stays {result.by_itself}: {why}" + ("; parked by its profile once no client is connected" if result.name in PROFILES else ""))
    return "; ".join(dict.fromkeys(said)) or "nothing"


def table(results: list[Result]) -> str:
    head = ["program", "from", "version", *TIERS, "woken from disk by", "left alone", "what a user notices"]
    rows = [
        [each.name, f"{each.source}: {each.package}", each.version, *(cell(each.tiers[tier]) for tier in TIERS), engine(each), each.by_itself or "", notices(each).replace("|", "/")]
        for each in results
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "".join("| " + " | ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) + " |\n" for line in lines)


def named(document: str) -> list[str]:
    """The programs of the table in a document."""
    return ROW.findall(document)[2:]
