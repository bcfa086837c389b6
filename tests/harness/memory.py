"""What the program `memory` (programs/memory.c) must hold: every page of every region of every process, as it would be if
the program never slept. A model of the kernel's promises, by mmap(2), mremap(2), madvise(2), mprotect(2), fork(2); of Kip it
knows nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

STACK, HEAP, SIGNALS = 1, 2, 3
STACK_PAGES, SIGNAL_PAGES = 24, 8
SIGNAL_TAG = 1 << 40


@dataclass
class Page:
    """Its tag, 0 for zeros, is in a cell, which shared pages have in common. `base` is what it falls back to."""

    cell: list[int] = field(default_factory=lambda: [0])
    base: int = 0
    access: str = "rw"  # r, none, hole
    shared: bool = False

    def drop(self) -> None:
        if not self.shared:
            self.cell = [self.base]

    def inherited(self) -> Page:
        return Page(self.cell if self.shared else self.cell.copy(), self.base, self.access, self.shared)


@dataclass
class Region:
    number: int
    # own: of the process from its beginning, or of a thread; map, shared, file: made by an order.
    kind: str
    pages: list[Page]
    # What lies behind a shared memory or a file: more pages than are mapped, once it has shrunk.
    behind: list[Page] = field(default_factory=list)
    advice: set[str] = field(default_factory=set)
    # It may be more than one mapping, so that mremap(2) may refuse to take it as a whole.
    pieces: bool = False
    # The kernel chose where it lies: a hole in it could be filled by others.
    wandered: bool = False
    # It slept with written pages of a file, which are the program's own memory since then.
    turned: bool = False

    def whole(self) -> bool:
        """Whether all pages are mapped, of one kind and with the same access."""
        return len({(p.access, p.shared) for p in self.pages}) == 1 and self.pages[0].access != "hole"

    def shown(self) -> str:
        """As the program tells it."""
        runs: list[tuple[str, int, int]] = []
        for page in self.pages:
            tag = page.cell[0]
            word = {"hole": "hole", "none": "shut"}.get(page.access) or ("t" if tag else "zero")
            last, first, count = runs[-1] if runs else ("", 0, 0)
            if word == last and (word != "t" or tag == first + count):
                runs[-1] = (word, first, count + 1)
            else:
                runs.append((word, tag, 1))
        return " ".join(f"t{first}+{count}" if word == "t" else f"{word}+{count}" for word, first, count in runs)

    def resized(self, count: int) -> None:
        while len(self.pages) > count:
            self.pages.pop()
        access = self.pages[0].access
        for index in range(len(self.pages), count):
            page = self.behind[index].inherited() if self.behind else Page()
            page.access = access
            self.pages.append(page)

    def inherited(self) -> Region:
        pages = [page.inherited() for page in self.pages]
        for page in pages:
            if "apart" in self.advice:
                page.access = "hole"
            elif "wipe" in self.advice:
                page.drop()
        advice = self.advice - {"lock"}
        return Region(self.number, self.kind, pages, self.behind, advice, self.pieces, self.wandered, self.turned)


def zeros(count: int) -> list[Page]:
    return [Page() for _ in range(count)]


def own_regions() -> dict[int, Region]:
    counts = {STACK: STACK_PAGES, HEAP: 0, SIGNALS: SIGNAL_PAGES}
    return {number: Region(number, "own", zeros(count)) for number, count in counts.items()}


@dataclass
class Process:
    path: tuple[str, ...] = ()
    regions: dict[int, Region] = field(default_factory=own_regions)
    threads: dict[str, int] = field(default_factory=dict)  # with the regions in their stacks
    children: dict[str, Process] = field(default_factory=dict)
    signals: int = 0

    def all(self) -> Iterator[Process]:
        yield self
        for child in self.children.values():
            yield from child.all()

    def of_kind(self, *kinds: str) -> list[Region]:
        return [region for region in self.regions.values() if region.kind in kinds]

    def signal(self, count: int) -> None:
        for _ in range(count):
            self.regions[SIGNALS].pages[self.signals % SIGNAL_PAGES].cell[0] = SIGNAL_TAG + self.signals
            self.signals += 1

    def fork(self, name: str) -> None:
        stacks = set(self.threads.values())
        regions = {n: region.inherited() for n, region in self.regions.items() if n not in stacks}
        self.children[name] = Process((*self.path, name), regions, signals=self.signals)

    def exec(self) -> None:
        self.regions, self.threads, self.children, self.signals = own_regions(), {}, {}, 0


def written(pages: Iterable[Page], tag: int) -> int:
    """Writes until it cannot; how many it could."""
    done = 0
    for page in pages:
        if page.access != "rw":
            break
        page.cell[0] = tag + done if tag else 0
        done += 1
    return done
