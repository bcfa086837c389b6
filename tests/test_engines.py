"""Whatever is put away comes back, also where a way of waking is broken: every program of the tests, with each engine broken in turn.

The other engine wakes it with its state, if it can. Where none can it starts cold, says why, and its next client is answered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import test_comeback
import test_natural
from conftest import ALL_KIPS
from harness import programs, sleepers, logged
from harness.broken import BrittleCriu, break_plan, files_of
from harness.clients import http_get
from harness.kip import Kip, Proc, daemon
from harness.rows import one_in
from harness.servers import Server
from harness.sleepers import Sleeper
from harness.wait import wait_for
from test_rebuild import NOT_NATIVE


def natural(of: test_natural.Natural) -> Sleeper:
    sources = tuple(f"natural/{path.name}" for path in of.files.values() if isinstance(path, Path) and path.parent == test_natural.SOURCES)
    if of.port is None:
        return sleepers.quiet(f"natural-{of.name}", of.command, lambda: dict(of.files), sources)

    def ask(proc: Proc) -> None:
        if of.port in (5672, 6379):
            with_amqp = of.port == 5672
            sleepers.profiled.said(proc, of.port, b"AMQP\0\0\x09\x01" if with_amqp else b"PING\r\n", b"RabbitMQ" if with_amqp else b"+PONG")
        elif of.port == 21:
            sleepers.profiled.said(proc, of.port, b"", b"220 ")
        else:
            assert http_get(proc.port()) == b"natural\n"

    return Sleeper(f"natural-{of.name}", lambda: Server(of.name, of.command, of.port or 0, of.files), ask, sources=sources)


def watched() -> Server:
    files = {"srv/watched.js": programs.SOURCES / "watched.js", "srv/watched/": "", **test_natural.modules("ws")}
    return Server("watched", ["node", "/srv/watched.js", "8000", "/srv/watched"], 8000, files)


def counted(proc: Proc) -> None:
    """No WebSocket was made."""
    assert http_get(proc.port()) == b"0\n"


WATCHED = Sleeper("watched", watched, counted, sources=("watched.js",))
KINDS = [*test_comeback.EVERYWHERE, *test_comeback.ONLY_HERE, "plain"]
ODD = [sleepers.odd(kind, kind in {*test_comeback.NATIVE, "plain"}, kind not in test_comeback.ONLY_HERE) for kind in KINDS]
NATURAL = [natural(of) for of in test_natural.LONG.values() if of.name != "celery"]
ALL = {sleeper.name: sleeper for sleeper in [*ODD, *sleepers.OWN, *sleepers.REAL, *NATURAL, WATCHED]}
SHORT = ["odd-pidfds", "odd-subreaper", "odd-seccomp", "torture-native", "lighttpd", "timed-waits"]


def test_every_program_is_tried() -> None:
    tried = {source for sleeper in ALL.values() for source in sleeper.sources} | set(sleepers.LEFT_OUT)
    there = {path.relative_to(programs.SOURCES) for path in programs.SOURCES.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    missing = [str(path) for path in there if str(path) not in tried and path.parts[0] not in tried]
    assert not missing, f"neither in harness/sleepers.py nor left out there: {missing}"


@pytest.fixture(scope="module")
def criu(tmp_path_factory: pytest.TempPathFactory) -> BrittleCriu:
    return BrittleCriu(tmp_path_factory.mktemp("criu"))


@pytest.fixture(scope="module")
def module_kip(criu: BrittleCriu) -> Iterator[Kip]:
    with daemon("--criu", str(criu.program)) as kip:
        kip.expected += [NOT_NATIVE, logged.SNAPSHOT_UNUSABLE, logged.NO_HELPER, logged.LOST_BY_REBOOT]
        ALL_KIPS.append(kip)
        yield kip
        ALL_KIPS.remove(kip)


def stacks(proc: Proc) -> set[str]:
    """Where the stacks of its processes end, which the kernel draws anew for each program that begins. A program that makes
    processes all the time has others the next time."""
    found = set()
    for pid in proc.inspect()["pids"]:
        # One that serves a session may end with it.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"kip-init"):
                maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
                found |= {line.split()[0].split("-")[1] for line in maps if line.endswith("[stack]")}
    return found


def cold_starts(proc: Proc) -> list[str]:
    return [e["detail"] for e in proc.kip.events() if e["kind"] == "cold-start" and e["name"] == proc.name]


class Life:
    """A program in a proc, from one sleep to the next."""

    def __init__(self, kip: Kip, criu: BrittleCriu, sleeper: Sleeper, directory: Path):
        self.criu, self.sleeper = criu, sleeper
        server = sleeper.server()
        tar = server.tarball(directory) if server.files else None
        flags = ["--never-sleep", *server.flags]
        self.proc = kip.run(sleeper.name, server.command, ports=server.published, tar=tar, flags=flags, timeout=120)
        self.begin()

    def begin(self) -> None:
        """As it is used at first, and after a cold start."""
        wait_for("it answers", self.is_answered, 60)
        self.same = self.sleeper.leave(self.proc)
        self.stacks = wait_for("its processes are there", lambda: stacks(self.proc))
        self.files = files_of(self.proc)

    def is_answered(self) -> bool:
        """By a client of its own. One that came while it was made anew may have been sent away."""
        try:
            self.sleeper.ask(self.proc)
        except (OSError, AssertionError):
            return False
        return True

    def park(self) -> None:
        """What it did at the freeze may wake it: a timer, or a connection to itself."""
        for _ in range(10):
            self.proc.kip.cli("sleep", self.proc.name, "--to", "parked", *self.sleeper.clock)
            view = self.proc.quiescent()
            if view["state"] == "parked":
                return
        raise AssertionError(f"it wakes by itself whenever it is parked: {view}")

    def wake(self, broken: str) -> None:
        """Comes back by the engine that is whole, or starts cold."""
        by_plan, by_criu = self.sleeper.native and broken == "criu", self.sleeper.by_criu and broken == "plan"
        before = len(cold_starts(self.proc))
        self.park()
        if self.sleeper.native and broken != "criu":
            break_plan(self.proc, self.files)
        try:
            if broken != "plan":
                self.criu.break_it()
            wait_for("a client is answered", self.is_answered, 60)
        finally:
            self.criu.mend_it()
        lines, view = cold_starts(self.proc)[before:], self.proc.kip.json("why", self.proc.name)
        assert self.proc.state == "running"
        if by_plan or by_criu:
            steps = {step["name"] for step in self.proc.inspect()["last_wake"]["steps"]}
            assert lines == [] and ("helper" in steps) == by_criu, (broken, lines, steps)
            assert stacks(self.proc) & self.stacks, "they are the same processes"
            self.same()
            return
        assert len(lines) == 1 and "cannot be woken: " in lines[0], (broken, lines)
        assert "starting it cold on its newest files" in lines[0] and view["fell_back"] == lines[0], (lines, view)
        assert not stacks(self.proc) & self.stacks, "they are new processes"
        self.begin()

    def go(self) -> None:
        for broken in ["plan", "criu", "both"] if self.sleeper.native else ["criu"]:
            self.wake(broken)
        # What fell back sleeps and wakes as others do.
        self.park()
        wait_for("a client is answered", self.is_answered, 60)
        self.proc.wait_state("running")
        self.same()
        assert self.proc.rebuilt() == self.sleeper.native and stacks(self.proc) & self.stacks


# promise waking: a plan, CRIU or both broken at the wake, CRIU that hangs, a policy that refuses
#   what came from the store, a machine that held what only it could wake and was restarted: the
#   other way does it or the program starts cold, its clients are answered, and an event and `kip
#   why` say so
# held by: this, for every program of the tests `tests/test_engines.py::test_every_program`,
#   `tests/test_comeback.py::test_criu_hangs`, `tests/test_comeback.py::test_a_policy_that_refuses`,
#   `tests/test_comeback.py::test_what_the_machine_held_is_gone`; by request it is only said:
#   `tests/test_comeback.py::test_by_request_a_broken_engine_is_only_said`
@pytest.mark.parametrize("name", one_in(2, SHORT))
def test_some_programs(kip: Kip, criu: BrittleCriu, tmp_path: Path, name: str) -> None:
    Life(kip, criu, ALL[name], tmp_path).go()


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in ALL if name not in SHORT])
def test_every_program(kip: Kip, criu: BrittleCriu, tmp_path: Path, name: str) -> None:
    Life(kip, criu, ALL[name], tmp_path).go()
