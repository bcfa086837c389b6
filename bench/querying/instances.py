"""An instance of the database: what is asked of one, however it was made."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parkwake.kiphost import pss_bytes

# Until the first query of one is answered, at most, seconds.
WITHIN_S = 60.0
# By name: what makes an instance, and what it begins from.
LABELS = {
    "hot": "hot clone, kip", "warm": "warm clone, kip", "cold": "cold clone, kip",
    "criu-hot": "hot by CRIU, images in memory", "criu-hot-disk": "hot by CRIU, images on disk",
    "criu-warm": "warm by CRIU, images in memory", "criu-warm-disk": "warm by CRIU, images on disk", "runc": "cold, runc run",
}  # fmt: skip
WAYS = tuple(LABELS)


@dataclass
class Disk:
    """Bytes of files."""

    own: int = 0
    shared: int = 0
    """Of files that have a second name elsewhere."""

    def row(self) -> dict[str, int]:
        return {"own": self.own, "shared": self.shared}


def disk(*directories: Path) -> Disk:
    names: dict[tuple[int, int], tuple[int, os.stat_result]] = {}
    for directory in directories:
        for place, _, files in os.walk(directory):
            for name in files:
                stat = (Path(place) / name).lstat()
                key = (stat.st_dev, stat.st_ino)
                names[key] = (names.get(key, (0, stat))[0] + 1, stat)
    found = Disk()
    for count, stat in names.values():
        if stat.st_nlink > count:
            found.shared += stat.st_blocks * 512
        else:
            found.own += stat.st_blocks * 512
    return found


@dataclass
class Instance:
    """One that has answered its first query."""

    way: str
    address: tuple[str, int]
    begun_s: float
    """When it was asked for (time.time)."""
    answers_ms: float
    pids: Callable[[], Sequence[int]]
    disk: Callable[[], Disk]
    end: Callable[[], None]
    more: dict[str, Any] = field(default_factory=dict)
    """What only this way to make one says of it."""

    def sizes(self) -> dict[str, Any]:
        return {"pss_bytes": pss_bytes(self.pids()), "disk": self.disk().row()}

    def row(self) -> dict[str, Any]:
        return {"way": self.way, "answers_ms": self.answers_ms, **self.more}


def anonymous_bytes(pids: Sequence[int]) -> int:
    """Memory that is no file's, as a limit counts it."""
    lines = [line.split() for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(words[1]) * 1024 for words in lines if words[0] == "Pss_Anon:")


class Since:
    """A moment, by both clocks."""

    def __init__(self) -> None:
        self.s, self._monotonic = time.time(), time.monotonic()

    @property
    def ms(self) -> float:
        """Since then."""
        return (time.monotonic() - self._monotonic) * 1e3
