"""The program's own timers go on while it is parked, and clocks never stop.

Every kind of timer and of blocking call with a time-out must fire at its due time by the real and by the monotonic
clock, must wake the proc for it, and must not be seen as interrupted. LATE_MS is what a wake may take on a loaded
machine with two cores; early is never allowed."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from harness import servers
from harness.clients import Lines
from harness.kip import Kip, Proc
from harness.wait import AHEAD_S, TimedOut, wait_for

pytestmark = pytest.mark.measures

LATE_MS = 400
# So many have their turn at the same time; with more the machine would be late for them.
SIDE_BY_SIDE = 3

ONE_SHOT = (
    "timerfd timerfd_abs timerfd_real timerfd_boot timerfd_epoll posix posix_abs posix_real itimer nanosleep "
    "clock_nanosleep clock_nanosleep_abs clock_nanosleep_real poll ppoll epoll_wait epoll_pwait2 select pselect futex "
    "futex_abs sem_timedwait cond_timedwait sigtimedwait rcvtimeo"
).split()
PERIODIC = "timerfd_periodic posix_periodic itimer_periodic".split()


@pytest.fixture(scope="module", params=["criu", "plan"])
def way(request: pytest.FixtureRequest) -> str:
    """Wakes are by CRIU, and native."""
    return request.param


def run(kip: Kip, name: str, way: str, tar: Path) -> Proc:
    """Short timers count: --tick 100ms."""
    server = servers.torture()
    flags = ["--tick", "100ms", *(["--env", servers.ONLY_CRIU] if way == "plan" else [])]
    return kip.run(name, server.command, ports=server.published, tar=tar, flags=flags)


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return servers.torture().tarball(tmp_path_factory.mktemp("tar"))


@pytest.fixture(scope="module")
def proc(way: str, module_kip: Kip, tar: Path) -> Iterator[Proc]:
    proc = run(module_kip, f"timers-{way}", way, tar)
    yield proc
    assert proc.rebuilt() == (way == "plan")
    proc.remove()


@pytest.fixture(scope="module")
def judged(way: str, module_kip: Kip, tar: Path) -> Iterator[dict[str, Future[None]]]:
    """Of each kind alone whether it woke its proc in time. Most of that is waiting: a few procs do it side by side."""
    procs = [run(module_kip, f"{way}-{number}", way, tar) for number in range(SIDE_BY_SIDE)]
    free: Queue[Proc] = Queue()

    def judge_kind(kind: str) -> None:
        proc = free.get()
        client = Lines(proc.port())
        try:
            judge(proc, client, kind)
            assert proc.rebuilt() == (way == "plan")
        finally:
            client.close()
            free.put(proc)

    for proc in procs:
        free.put(proc)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {kind: pool.submit(judge_kind, kind) for kind in ONE_SHOT}
    for proc in procs:
        proc.remove()


@pytest.fixture
def client(proc: Proc) -> Iterator[Lines]:
    client = Lines(proc.port())
    yield client
    client.close()


def arm(client: Lines, kind: str, ms: int, every: int = 0) -> int:
    answer = client.ask(f"arm {kind} {ms} {every}").split()
    assert answer[0] == "armed", answer
    return int(answer[1])


def assert_on_time(client: Lines, timer: int, slack_ms: float = 0) -> None:
    result = client.values(f"result {timer}")
    assert result["fired"] == "1", result
    assert result["error"] == "0", result
    mono, real = int(result["miss_mono_us"]) / 1000, int(result["miss_real_us"]) / 1000
    assert -1 <= mono <= LATE_MS + slack_ms, result
    assert -5 <= real <= LATE_MS + slack_ms, result


def test_all_kinds_are_tested(client: Lines) -> None:
    assert set(client.ask("kinds").split()) == {*ONE_SHOT, *PERIODIC}


# promise P7: the program's timers fire when they should although it is parked
# held by: this, `tests/test_timers.py::test_all_at_once_over_many_sleeps`,
#   `tests/test_timers.py::test_time_outs_of_sockets_on_a_busy_machine`
# promise waking: timerfd, POSIX and interval timers, each call with a time-out of its own: on time,
#   not early, no EINTR
# held by: this, `tests/test_timers.py::test_all_kinds_are_tested`
@pytest.mark.parametrize("kind", ONE_SHOT)
def test_wakes_for_it(judged: dict[str, Future[None]], kind: str) -> None:
    """Parked with one timer due: it wakes by itself, and the timer fires when it should."""
    judged[kind].result(120)


def judge(proc: Proc, client: Lines, kind: str) -> None:
    timer = asleep_before_it_is_due(proc, client, kind)
    view = proc.wait_state("running", timer.due_ms / 1000 + 10)
    assert "timer" in view["last_wake"]["trigger"], view["last_wake"]
    wait_fired(client, timer.number, 10)
    assert_on_time(client, timer.number, timer.slack_ms(proc))
    client.check(LATE_MS)


@dataclass
class Timer:
    """One that was armed, and the proc is parked before it is due."""

    number: int
    kind: str
    due_ms: int
    # Monotonic seconds between which it was armed.
    asked: float
    armed: float
    parked: dict[str, Any]

    def left_ms(self, since: float, until: float) -> tuple[float, float]:
        """What may be left of it at a moment between these two, which a stalled machine makes far apart."""
        return self.due_ms - (until - self.asked) * 1000, self.due_ms - (since - self.armed) * 1000

    def slack_ms(self, proc: Proc) -> float:
        """A machine that stalls in the middle of the wake is late by that much; how long a wake may take, the bench says."""
        view = proc.inspect()
        slack = view["last_wake"]["total_us"] / 1000
        if self.kind == "rcvtimeo":  # on the kernel's timer wheel: an eighth late by design
            slack += self.due_ms / 8
        if self.kind.startswith(("posix", "itimer")):  # see test_all_at_once_over_many_sleeps
            slack += view["last_sleep"]["total_us"] / 1000
        return slack


def asleep_before_it_is_due(proc: Proc, client: Lines, kind: str) -> Timer:
    """Arms a timer and parks the proc half a second before the timer is due at the latest; `kip inspect` then says when
    it is. On a machine that needs seconds to write a snapshot the timer may be due first, which says nothing: then a
    longer one."""
    for due_ms in (1000, 3000, 9000, 27000):
        asked = time.monotonic()
        number, armed = arm(client, kind, due_ms), time.monotonic()
        timer = Timer(number, kind, due_ms, asked, armed, {})
        try:
            proc.sleep()
            since = time.monotonic()
            timer.parked = proc.inspect()
            until = time.monotonic()
            left = timer.parked["next_timer_ms"]
            assert timer.parked["state"] == "parked" and left is not None, "inspect says when a timer will wake it"
            least, most = timer.left_ms(since, until)
            assert least - 300 < left < most + 300, (least, left, most)
            if least > 500:
                return timer
        except AssertionError:
            if time.monotonic() - armed < due_ms / 1000 - AHEAD_S:
                raise
        wait_fired(client, number, due_ms / 1000 + 60)  # asked, so that no later check judges it
    raise AssertionError("parking takes more than half a minute here")


def wait_fired(client: Lines, timer: int, timeout: float) -> None:
    wait_for("the timer fires", lambda: client.values(f"result {timer}")["fired"] == "1", timeout)


def transition_ms(proc: Proc) -> float:
    """How long its last way down and its last way up took together."""
    view = proc.inspect()
    return (view["last_sleep"]["total_us"] + view["last_wake"]["total_us"]) / 1000


def test_all_at_once_over_many_sleeps(proc: Proc, client: Lines) -> None:
    """Everything is armed for the same time and the proc is parked and woken again and again before it: no kind starts
    anew, none forgets what has passed. Where a sleep takes so long that there were too few, or that the last one was not
    before they were due, nothing was tested: then once more with more time."""
    for due_ms in (5000, 15000, 45000):
        if all_at_once(proc, client, due_ms):
            return
    raise AssertionError("four sleeps do not fit into 45 seconds here")


def all_at_once(proc: Proc, client: Lines, due_ms: int) -> bool:
    """Whether there were enough sleeps; what they left is judged in any case."""
    armed = time.monotonic()
    # SIGALRM has one timer per process; the rest can be there many times.
    timers = {kind: arm(client, kind, due_ms) for kind in ONE_SHOT}
    sleeps, transitions_ms = 0, 0.0
    while time.monotonic() - armed < due_ms / 1000 * 0.76:
        # Not proc.sleep(): frozen in the middle of work it wakes at once, before it can be looked
        # at.
        proc.kip.cli("sleep", proc.name, "--to", "parked", "--clock", "auto")
        time.sleep(0.2)  # time must pass while it is parked
        assert client.ask("echo still here") == "still here"
        transitions_ms += transition_ms(proc)
        sleeps += 1
    proc.kip.cli("sleep", proc.name, "--to", "parked", "--clock", "auto")
    in_time = time.monotonic() - armed < due_ms / 1000
    if not in_time:
        proc.wake()  # all of them may have fired before it was frozen, and then nothing is left that would
    view = proc.wait_state("running", due_ms / 1000 + 10)
    transitions_ms += transition_ms(proc)
    # A machine that stalls in the wake is late by that much, and if it did so before, in the way
    # down, by that too.
    stall_ms = view["last_wake"]["total_us"] / 1000 + (0 if in_time else view["last_sleep"]["total_us"] / 1000)
    for timer in timers.values():
        wait_fired(client, timer, due_ms / 1000 + 10)
    # CRIU stores what is left of a POSIX or interval timer and arms it some time before the program
    # runs again; no other process can correct it, so each sleep makes these two kinds later, by
    # less than its freeze and its wake take (docs/limits.md).
    drift = transitions_ms
    for kind, timer in timers.items():
        slack = due_ms / 8 if kind == "rcvtimeo" else drift if kind.startswith(("posix", "itimer")) else 0
        try:
            assert_on_time(client, timer, slack + stall_ms + 100)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error
    client.check(LATE_MS + 100 + round(drift))
    return sleeps >= 4 and in_time


@contextmanager
def busy_machine() -> Iterator[None]:
    """Two programs for each core that never wait."""
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for program in busy:
            program.kill()
            program.wait()


def test_time_outs_of_sockets_on_a_busy_machine(proc: Proc, client: Lines) -> None:
    """A thread that has to share its CPU on the way back into its call still waits for what was left, not for all of it."""
    due_ms = 8000
    with busy_machine():
        armed = time.monotonic()
        timers = [arm(client, "rcvtimeo", due_ms) for _ in range(20)]
        while time.monotonic() - armed < due_ms / 1000 * 0.76:
            proc.kip.cli("sleep", proc.name, "--to", "parked", "--clock", "auto")
            time.sleep(0.2)
            assert client.ask("echo still here") == "still here"
    for timer in timers:
        wait_fired(client, timer, due_ms / 1000 + 10)
        assert_on_time(client, timer, due_ms / 8)


# promise waking: what is left of a time-out is what was left
# held by: this, `kip_sys::ran::tests::a_sleeper_s_time_is_known_on_every_cpu`
@pytest.mark.parametrize("kind", ["nanosleep", "epoll_wait", "futex", "timerfd", "posix"])
def test_due_while_awake_again(proc: Proc, client: Lines, kind: str) -> None:
    """Woken by a request before it is due: what is left of the time-out is what was left, not all of it."""
    timer = asleep_before_it_is_due(proc, client, kind)
    time.sleep(0.2)  # parked time, which counts
    assert client.ask("echo awake") == "awake"
    since = time.monotonic()
    left = int(client.values(f"result {timer.number}")["left_ms"])
    least, most = timer.left_ms(since, time.monotonic())
    assert least - 100 < left < most + 100, (least, left, most)
    wait_fired(client, timer.number, timer.due_ms / 1000 + 10)
    assert_on_time(client, timer.number, timer.slack_ms(proc))
    client.check(LATE_MS)


# promise waking: periodic timers keep their phase, timerfds their count
# held by: this, `kip_clocks::timers::tests::a_timerfd_goes_on_in_another`,
#   `kip_clocks::timers::tests::sleeps_add_up`
@pytest.mark.parametrize("kind", PERIODIC)
def test_periodic_timers_keep_their_phase(kip: Kip, tmp_path: Path, kind: str) -> None:
    """A tick shorter than --tick does not wake. After the sleep the missed ticks are all there and the phase is kept."""
    tar = servers.torture().tarball(tmp_path)
    for turn, every in enumerate((200, 700, 3000)):
        if keeps_phase(kip, tar, kind, every, f"ticker-{kind[:5]}-{turn}"):
            return
    raise AssertionError("a wake takes more than a second here")


def keeps_phase(kip: Kip, tar: Path, kind: str, every: int, name: str) -> bool:
    """Whether the period, in ms, was so long that the machine's part of the wake did not hide the phase, which is judged then."""
    server = servers.torture()
    proc = kip.run(name, server.command, ports=server.published, tar=tar)
    client = Lines(proc.port())
    timer = arm(client, kind, every, every)
    proc.sleep()
    begun = time.monotonic()
    while time.monotonic() - begun < every / 1000 * 7.5:
        assert proc.state == "parked", "a tick woke it although ticks below a minute do not count"
        time.sleep(0.1)
    # All but timerfds are armed by the program's own process, when CRIU has restored it: later by
    # what the restore took longer than expected.
    late = 20 if kind == "timerfd_periodic" else 100
    client.ask("echo awake")
    stall = 0 if kind == "timerfd_periodic" else max(0, proc.inspect()["last_wake"]["total_us"] / 1000 - 80)
    for _ in range(3):
        if kind != "posix_periodic":
            # A tick may be due between its reading and the clock's; missed ticks stay missed
            # however often it is asked.
            wait_for("no tick is missing", lambda: counted(client, timer), 3 + 3 * every / 1000, every=0.07)
        time.sleep(0.31)

    def phase_ms(result: dict[str, str]) -> float:
        phase = int(result["phase_us"]) / 1000
        return phase % every if kind == "posix_periodic" else phase  # its ticks that were counted are fewer

    def in_phase() -> bool:
        return 0 <= phase_ms(client.values(f"result {timer}")) < late + stall

    try:  # one tick can be late on a busy machine; a phase that is lost stays lost
        wait_for("a tick is on time", in_phase, 3 + 3 * every / 1000, every=0.07)
    except TimedOut:
        pass
    result = client.values(f"result {timer}")
    if kind == "posix_periodic":
        # timer_getoverrun() counts what the kernel itself has counted and cannot be set from
        # outside, so the missed ticks are one signal, whose si_overrun has their number; those
        # since the wake are single.
        assert 1 + 0.9 // (every / 1000) <= int(result["ticks"]) <= int(result["expected"]), result
    hidden = late + stall > every * 0.6
    assert hidden or in_phase(), f"the tick came {phase_ms(result)} ms after its time: the phase is lost ({result})"
    client.check()
    client.close()
    proc.remove()
    return not hidden


def counted(client: Lines, timer: int) -> bool:
    result = client.values(f"result {timer}")
    return abs(int(result["ticks"]) - int(result["expected"])) <= 1


# promise waking: by the owner's word (`kip sleep`) or in a suspended sleep ticks are gathered,
#   single timers are on time beside them
# held by: this, `kip_records::due::tests::ticks_of_a_suspended_proc_are_gathered`
def test_a_long_timer_wakes_though_ticks_do_not(kip: Kip, tmp_path: Path) -> None:
    """--tick 40s: ticks of 300 ms are gathered for so long, a timer of 1.5 s that fires once is on time."""
    server = servers.torture()
    flags = ["--tick", "40s"]
    proc = kip.run("mixed", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    client = Lines(proc.port())
    arm(client, "timerfd_periodic", 300, 300)
    timer = asleep_before_it_is_due(proc, client, "timerfd_abs")
    proc.wait_state("running", timer.due_ms / 1000 + 10)
    assert time.monotonic() - timer.asked > timer.due_ms / 1000 - 0.3, "the ticks woke it"
    wait_fired(client, timer.number, 10)
    assert_on_time(client, timer.number, timer.slack_ms(proc))


# promise waking: clocks go on and never back
# held by: this, `tests/test_timers.py::test_clocks_never_go_back`
def test_clocks_go_on(proc: Proc, client: Lines) -> None:
    """Inside, each clock is the host's, before and after; monotonic time neither stops nor jumps by a sleep."""

    def read() -> dict[str, float]:
        return {
            "realtime": time.time(),
            "monotonic": time.clock_gettime(time.CLOCK_MONOTONIC),
            "boottime": time.clock_gettime(time.CLOCK_BOOTTIME),
        }

    def clocks() -> tuple[dict[str, float], dict[str, float]]:
        """Those inside, and the host's at the same moment: a reading in which the machine stalled is taken again."""
        for _ in range(100):
            before = read()
            inside = {k: int(v) / 1e9 for k, v in client.values("clocks").items()}
            host = read()
            if host["monotonic"] - before["monotonic"] < 0.04:
                return inside, host
        raise AssertionError("this machine does not answer within 40 ms")

    first_inside, first_host = clocks()
    for i in range(5):
        proc.sleep()
        time.sleep(0.3)  # the sleep that clocks must not lose
        assert client.ask("echo awake") == "awake"
        inside, host = clocks()
        for name in host:
            passed_inside, passed = inside[name] - first_inside[name], host[name] - first_host[name]
            assert abs(passed_inside - passed) < 0.1, f"{name}: {passed_inside} s inside, {passed} s outside, sleep {i}"
        assert inside["realtime"] - inside["monotonic"] == pytest.approx(
            first_inside["realtime"] - first_inside["monotonic"], abs=0.05
        ), "the clocks parted"


def test_clocks_never_go_back(proc: Proc, client: Lines) -> None:
    """Asked all the time from several connections while it sleeps and wakes."""
    port, stop, failures = proc.port(), threading.Event(), []

    def watch() -> None:
        try:
            connection, last = Lines(port), 0
            while not stop.is_set():
                now = int(connection.values("clocks")["monotonic"])
                assert now > last, f"monotonic time went from {last} to {now}"
                last = now
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=watch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        proc.kip.cli("sleep", proc.name, "--to", "parked", "--clock", "auto")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures, failures


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ONE_SHOT)
def test_many_times(proc: Proc, client: Lines, kind: str) -> None:
    for _ in range(10):
        judge(proc, client, kind)
