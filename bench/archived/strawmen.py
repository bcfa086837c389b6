"""Figures 7 and 8 of paper P from the store, and what is stored of a program that has changed a little, or is all noise."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from archived.host import STILL, Sleeper
from harness.line import Proxy
from harness.kip import Kip
from parkwake.client import Client, Question
from parkwake.workspace import Failed
from strawman.experiment import PAGE, PAGES, PORT, SET_PAGES, SHIFTS, WAYS, judge, question

Rows = list[dict[str, Any]]
Say = Callable[[str], None]

# Of figure 7, bytes: 4 KB to 8 MB.
SIZES = [PAGE << i for i in (0, 2, 4, 6, 8, 10, 11)]
# Pages that are changed between two sleeps: 1% of 64 MB.
CHANGED = PAGES // 100


class Strawman:
    """One of them as a proc that goes to the store. It knows what each word of its memory ought to be."""

    def __init__(self, kip: Kip, client: Client, proxy: Proxy, way: str, tar: Path, name: str, seed: int = 0):
        self.client, self.way = client, way
        words = ["/srv/strawman", str(PORT), str(PAGES), str(seed)]
        proc = kip.run(name, words, ports=[str(PORT)], tar=tar, flags=[*STILL, *WAYS[way]])
        self.sleeper, self.host_port = Sleeper(proc, proxy), proc.port()
        self.hot_bytes = proc.inspect()["memory"]["rss_bytes"]
        self.added = [0] * PAGES

    def ask(self, first: int, count: int, add: int = 0) -> tuple[float, int]:
        """Has these pages read, or changed, and checks the sum."""
        asked = question(first, count)
        places = [(first + i) % PAGES for i in range(count)]
        if add:
            for place in places:
                self.added[place] += add
        total = sum(place * place + 1 + self.added[place] for place in places) % 2**64
        path = f"GET /{first}/{count}" + (f"/{add} " if add else " ")
        request = asked.request.replace(f"GET /{first}/{count} ".encode(), path.encode())
        reply = self.client.first(Question("tcp", request, f"http:{str(total).encode().hex()}"), "127.0.0.1", self.host_port)
        return reply.us, reply.reply_ns

    def cycle(self, first: int, count: int, add: int = 0) -> dict[str, Any]:
        stored = self.sleeper.archive()
        woken = self.sleeper.wake("archived", lambda: self.ask(first, count, add))
        return {"stored": stored, **woken}

    def warm(self, first: int, count: int) -> None:
        """Twice there and back: before the first wake everything has been touched, and is what comes back at it."""
        for _ in range(2):
            self.cycle(first, count)


def other_way(strawman: Strawman, touched: int, row: dict[str, Any]) -> str:
    """What shows that a wake was not of the kind that was asked for: said in the results, for an archived proc may be fetched
    whole whatever is asked for. Nothing if it was."""
    try:
        judge(strawman.way, touched, strawman.hot_bytes, {"memory": row})
    except Failed as e:
        return str(e)
    return ""


def sizes(rows: Rows, kip: Kip, client: Client, proxy: Proxy, tar: Path, ways: Sequence[str], samples: int, say: Say) -> None:
    """Figure 7: rows {way, size, round, us..}, each way by turns. The same pages each time."""
    strawmen = {way: Strawman(kip, client, proxy, way, tar, f"strawman-{way}") for way in ways}
    for size in SIZES:
        count = size // PAGE
        for way, strawman in strawmen.items():
            strawman.warm(0, count)
            rows.append({"way": way, "size": size, "hot_us": min(strawman.ask(0, count)[0] for _ in range(3))})
        for number in range(samples):
            shift = number % len(ways)
            for way in [*ways[shift:], *ways[:shift]]:
                row = strawmen[way].cycle(0, count)
                row["other_way"] = other_way(strawmen[way], count, row)
                rows.append({"way": way, "size": size, "round": number, **row})
        say(f"working set of {size >> 10} KB: {samples} rounds")
    for strawman in strawmen.values():
        strawman.sleeper.proc.remove()


def shifts(rows: Rows, kip: Kip, client: Client, proxy: Proxy, tar: Path, samples: int, say: Say) -> None:
    """Figure 8: rows {shift, way, round, us..} at 8 MB, each request so far from the one before; the whole image by turns."""
    strawmen = {way: Strawman(kip, client, proxy, way, tar, f"shifting-{way}") for way in ("activeset", "whole")}
    first = dict.fromkeys(strawmen, 0)
    for way, strawman in strawmen.items():
        strawman.warm(first[way], SET_PAGES)
    for part in SHIFTS:
        pages = max(1, round(part * SET_PAGES))
        for number in range(samples):
            for way, strawman in strawmen.items():
                first[way] = (first[way] + pages) % PAGES
                row = strawman.cycle(first[way], SET_PAGES)
                row["other_way"] = other_way(strawman, SET_PAGES, row)
                rows.append({"shift": part, "pages": pages, "way": way, "round": number, **row})
        say(f"shift of {part:.1%}: {samples} rounds")
    for strawman in strawmen.values():
        strawman.sleeper.proc.remove()


def uploads(rows: Rows, kip: Kip, client: Client, proxy: Proxy, tar: Path, samples: int, say: Say) -> None:
    """Rows {what, round, us, up..}: a strawman of noise that was never stored before, and one that a wake has changed a little."""
    dice = random.Random(1)
    for number in range(samples):
        # Another seed, for what the realm has already is not stored again.
        seed = time.time_ns()
        noise = Strawman(kip, client, proxy, "whole", tar, "noise", seed=seed)
        rows.append({"what": "noise", "seed": seed, "round": number, **noise.sleeper.archive()})
        noise.sleeper.wake("archived", lambda noise=noise: noise.ask(0, PAGES))
        noise.sleeper.proc.remove()
    say(f"64 MB of noise: {samples} rounds")
    for number in range(samples):
        # A new one each time, for the places of earlier rounds would still be in its working set.
        # One run of pages, somewhere.
        little = Strawman(kip, client, proxy, "activeset", tar, "little", seed=time.time_ns())
        little.warm(0, 200)
        row = little.cycle(dice.randrange(PAGES), CHANGED, add=1 + number)
        rows.append({"what": "little", "round": number, **little.sleeper.archive(), "wake_before": row["wake"]})
        little.sleeper.wake("archived", lambda little=little: little.ask(0, PAGES))  # what was changed is what it was changed to
        little.sleeper.proc.remove()
    say(f"1% of 64 MB changed: {samples} rounds")
