"""Fixtures: a daemon per module, daemons of one's own, and the account of what went wrong."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness import programs
from harness.kip import BASES, Kip, daemon

ALL_KIPS: list[Kip] = []
# Files that take longest: of those that measure (180 to 20 s, added up with `--durations=0`), and
# of the others (150 to 60 s). The longest is first, but that pressure waits until the natural runs
# are over.
LONG = [
    "natural", "timers", "suspend", "waits", "handlers", "expiries", "pressure", "harmless", "timeouts", "metrics", "load",
    "recovery", "hibernate", "clone", "archive", "lazy", "check", "scale", "store_trouble", "ticks", "images", "comeback", "cache",
    "rolling", "rolling_requests", "copied_running", "checkpoints", "passed_on", "torture", "fallback", "adopt", "upgrade",
]  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if os.geteuid() != 0:
        raise pytest.UsageError("the system tests build namespaces: run them as root")
    # A shell starts what runs in its background with SIGINT ignored, and `kip` would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave_combinations_to_soak(items: list[pytest.Item]) -> None:
    """Of a test with several parameters `make test` runs as many rows as give each value of each parameter a turn, and `make soak`
    the other combinations."""
    tables: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("soak"):
            tables.setdefault((item.path, item.originalname), []).append(item)
    for rows in tables.values():
        # Of each parameter the name of its value: `indices` numbers rows.
        values = {row: list(enumerate(row.callspec._idlist)) for row in rows}
        turns = Counter({value: 0 for row in rows for value in values[row]})
        left = list(rows)
        while 0 in turns.values():
            # The one with the most values that had no turn; of equals one whose others had few.
            row = min(left, key=lambda row: (-sum(turns[value] == 0 for value in values[row]), sum(turns[value] for value in values[row])))
            turns.update(values[row])
            left.remove(row)
        for row in left:
            row.add_marker(pytest.mark.soak)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers (`-n 2 --dist loadgroup`) a file's tests are one worker's, for they share a daemon."""
    _leave_combinations_to_soak(items)
    if not config.getoption("loadgroup", default=False):  # what a worker has of `--dist loadgroup`
        return
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem.removeprefix("test_")))
    # Those that take minutes come first, or one worker has them when the others have nothing left.
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem.removeprefix("test_"), len(LONG)))


@pytest.fixture(scope="session", autouse=True)
def _fresh_builds() -> Iterator[None]:
    """Test programs are built once per session, on first use, and skeletons as many as daemons run at a time."""
    yield
    programs.forget()
    BASES.forget()


@pytest.fixture(scope="module")
def module_kip() -> Iterator[Kip]:
    with daemon() as kip:
        ALL_KIPS.append(kip)
        yield kip
        ALL_KIPS.remove(kip)


@pytest.fixture
def kip(module_kip: Kip) -> Iterator[Kip]:
    """The module's daemon; what a test starts is removed after it."""
    if (
        not module_kip.alive()
    ):  # that has failed the test which it died in; the others are to say something of their own
        module_kip.up()
    already, there = len(module_kip.complaints()), set(module_kip.names())
    yield module_kip
    assert module_kip.alive(), f"the daemon died\n{module_kip.stderr()[-3000:]}"
    module_kip.remove_all(but=there)
    new = module_kip.complaints()[already:]
    assert not new, "the daemon complained:\n" + "\n".join(new[:20])


@pytest.fixture
def fresh_kip() -> Iterator[Callable[..., Kip]]:
    """Starts daemons of the test's own; at the end each goes down and leaves nothing."""
    with ExitStack() as stack:

        def start(*flags: str, **options: object) -> Kip:
            kip = stack.enter_context(daemon(*flags, **options))
            ALL_KIPS.append(kip)
            stack.callback(ALL_KIPS.remove, kip)
            return kip

        yield start


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """An object store that is a directory."""
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def archiving(fresh_kip: Callable[..., Kip], store: Path) -> Kip:
    """A daemon of the test's own that archives there."""
    return fresh_kip("--store", str(store))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for kip in ALL_KIPS:
            try:
                report.sections.append((f"kip {kip.data}", kip.account()))
            except Exception as error:  # the account must not hide the failure
                report.sections.append((f"kip {kip.data}", f"no account: {error!r}"))


@pytest.fixture
def tool() -> Callable[[str], str]:
    """The path of a program that a test needs; a machine without it fails the test, for a skip would look like a pass."""

    def find(name: str) -> str:
        path = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin:/usr/local/go/bin")
        assert path, f"{name} is not installed: run scripts/setup"
        return str(Path(path))

    return find
