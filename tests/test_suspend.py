"""--clock suspend: CLOCK_MONOTONIC stands while the proc is parked, as on a machine that is suspended.

What waits on that clock is later by the sleep, to 50 ms; what waits on CLOCK_REALTIME or CLOCK_BOOTTIME is on time; the clocks
are right in every process of the proc, whatever sleeps follow. Natively and by CRIU."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import programs
from harness.kip import Kip, Proc
from harness.wait import TimedOut, wait_for

pytestmark = pytest.mark.measures

LATE_S = 0.05
# Seconds that each wait takes, and that the proc is parked, twice.
LENGTH, PARKED = 12, 1.5


@pytest.fixture(params=["plan", "criu"])
def way(request: pytest.FixtureRequest) -> str:
    """Wakes are native, and by CRIU."""
    return request.param


def run(kip: Kip, name: str, tmp_path: Path, *words: str, flags: tuple[str, ...] = ("--clock", "suspend")) -> Proc:
    tar = programs.tarball(tmp_path / f"{name}.tar", {"waits": programs.c_program("waits")}, {"waits": 0o755})
    return kip.run(name, ["/waits", *words], tar=tar, flags=["--never-sleep", *flags])


def park(proc: Proc, way: str) -> None:
    view = proc.sleep()
    if way == "criu":
        (proc.kip.data / "procs" / proc.name / f"gen-{view['generation']}" / "wake.plan").unlink()


def park_for(proc: Proc, way: str, seconds: float) -> None:
    park(proc, way)
    time.sleep(seconds)
    proc.wake()
    assert proc.rebuilt() == (way == "plan")


@dataclass
class Clocks:
    mono: float
    real: float
    boot: float


def clocks(proc: Proc) -> tuple[Clocks, float]:
    """Those inside, by `kip exec`, and how far the monotonic one is behind the machine's."""
    for _ in range(20):
        before = time.monotonic()
        inside = Clocks(*(int(word) / 1e9 for word in proc.exec("/waits", "now").stdout.split()))
        after = time.monotonic()
        if after - before < 0.3:  # a stalled machine says nothing
            break
    # CLOCK_REALTIME and CLOCK_BOOTTIME are the machine's: one tells when the other was read.
    apart = time.clock_gettime(time.CLOCK_BOOTTIME) - time.time()
    assert inside.boot - inside.real == pytest.approx(apart, abs=0.01), "the two are not of one machine"
    ahead = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return inside, inside.boot - ahead - inside.mono


@dataclass
class Wait:
    name: str
    clock: str
    ended: int
    mono: float
    real: float
    boot: float


def all_over(proc: Proc) -> list[Wait]:
    try:
        wait_for("all waits are over", lambda: "all over" in proc.logs(), 30, every=0.2)
    except TimedOut as error:
        raise AssertionError(f"some wait on:\n{proc.logs()}") from error
    lines = [line.split() for line in proc.logs().splitlines() if not line.startswith("all ")]
    waits = [Wait(name, clock, int(ended), *(int(word) / 1e6 for word in rest)) for name, clock, ended, *rest in lines]
    assert len(waits) == 41, [wait.name for wait in waits]
    # What CRIU has sent anew may take less room than before, and then one that waits for room has
    # it: docs/limits.md.
    return [wait for wait in waits if proc.rebuilt() or wait.name != "sndtimeo"]


def judge(proc: Proc, waits: list[Wait], seconds: float) -> None:
    """None is early. A machine that stalls in a wake is late by that much, as for a sleep without --clock suspend."""
    told = [(e["kind"], e["detail"]) for e in proc.kip.events() if e["name"] == proc.name]
    woken, frozen = (
        sum(int(re.search(r"(\d+) us", detail)[1]) / 1e6 for kind, detail in told if kind == which)
        for which in ("woken", "parked")
    )
    wrong = []
    for wait in waits:
        late = LATE_S + woken
        if wait.name.endswith("timeo"):  # on the kernel's timer wheel: an eighth late by design
            late += seconds / 8
        if wait.name.startswith(("posix", "itimer", "alarm")) and not proc.rebuilt():  # docs/limits.md
            late += frozen
        took = wait.mono if wait.clock == "m" else wait.boot
        if wait.ended != 0 or not seconds - 0.001 <= took <= seconds + late:
            wrong.append(wait)
    assert not wrong, wrong


# promise waking: `--clock suspend`: every wait on CLOCK_MONOTONIC is later by the sleep, all others
#   on time, to 50 ms, natively and by CRIU
# held by: this, `tests/test_suspend.py::test_on_time_by_the_other_clocks`,
#   `kip_clocks::noted::tests::after_a_suspended_sleep_the_clock_and_what_is_on_it_is_where_it_was`
def test_every_wait(kip: Kip, tmp_path: Path, way: str) -> None:
    """Two sleeps in the middle of it: each ends by its time-out, none early, and late by the sleeps or not at all."""
    proc = run(kip, "waits", tmp_path, str(LENGTH))
    wait_for("all have begun", lambda: "all begun" in proc.logs())
    for _ in range(2):
        park_for(proc, way, PARKED)
        assert proc.inspect()["last_sleep"]["suspended"] == "--clock suspend"
    waits = all_over(proc)
    stood = [wait.boot - wait.mono for wait in waits]
    assert max(stood) - min(stood) < 0.005 and min(stood) >= 2 * PARKED, "one clock for all, that stood while it slept"
    judge(proc, waits, LENGTH)


def test_on_time_by_the_other_clocks(kip: Kip, tmp_path: Path, way: str) -> None:
    """No client wakes the proc: it wakes for the first wait on another clock, and waits on its own go on for as long as they had
    left."""
    proc = run(kip, "ontime", tmp_path, "4")
    wait_for("all have begun", lambda: "all begun" in proc.logs())
    park(proc, way)
    view = proc.wait_state("running")
    assert "timer" in view["last_wake"]["trigger"] and proc.rebuilt() == (way == "plan"), view["last_wake"]
    judge(proc, all_over(proc), 4)


# promise waking: its clock never jumps in what follows: hibernation, other sleeps, another daemon,
#   the archive; `kip exec` sees it too; without it the clock goes on
# held by: this, `tests/test_suspend.py::test_without_it_the_clock_goes_on`,
#   `kip_sys::timens::tests::a_clock_stands_behind_in_a_new_namespace_and_only_there`
def test_the_clock_through_all_that_follows(fresh_kip: Callable[..., Kip], tmp_path: Path, store: Path, way: str) -> None:
    """Sleeps in every tier, a daemon that is killed, and the machine's restart: it never jumps, neither forward nor backward."""
    kip = fresh_kip("--store", str(store))
    proc = run(kip, "clock", tmp_path, "3600")
    first, behind = clocks(proc)
    assert behind == pytest.approx(0, abs=0.001), "a proc that never slept has the machine's clock"
    park_for(proc, way, PARKED)
    _, stood = clocks(proc)
    assert stood >= PARKED, "it stood while it was parked"
    park_for(proc, way, PARKED)
    after, twice = clocks(proc)
    assert twice >= stood + PARKED and after.mono > first.mono
    proc.hibernate()
    time.sleep(0.5)
    proc.wake()
    assert clocks(proc)[1] == pytest.approx(twice, abs=0.001), "hibernated, a clock never stands"
    kip.kill()
    kip.up()
    assert clocks(proc)[1] == pytest.approx(twice, abs=0.001), "another daemon"
    before = clocks(proc)[0]
    proc.archive()
    time.sleep(PARKED)
    proc.wake()
    after, archived = clocks(proc)
    assert archived >= twice + PARKED and after.mono > before.mono, "archived, it stands as well"
    proc.sleep()
    kip.reboot()
    proc.wake()
    last, rebooted = clocks(proc)
    assert rebooted > archived and last.mono > after.mono, "and over the machine's restart"


def test_without_it_the_clock_goes_on(kip: Kip, tmp_path: Path, way: str) -> None:
    proc = run(kip, "goes-on", tmp_path, "3600", flags=("--clock", "continue"))
    park_for(proc, way, 0.5)
    assert clocks(proc)[1] == pytest.approx(0, abs=0.001)
    assert proc.inspect()["last_sleep"]["suspended"] is None


# promise waking: `kip inspect` and `kip why` show it; `kip sleep --to hibernated --clock suspend`
#   is refused, for threads in place have clocks that go on; a profile counts for every process of
#   the proc and without connections; `kip profiles` prints them
# held by: this, `tests/test_profiles.py::test_a_program_bears_it`,
#   `tests/test_profiles.py::test_the_table`,
#   `tests/test_profiles.py::test_only_while_no_connection_is_open`,
#   `kip_types::profile::tests::a_program_is_known_by_its_file`
def test_it_is_shown(kip: Kip, tmp_path: Path) -> None:
    proc = run(kip, "shown", tmp_path, "3600")
    assert proc.inspect()["spec"]["timing"]["clock"] == "suspend"
    line = "the proc's CLOCK_MONOTONIC stands still while it is parked (--clock suspend)"
    assert kip.json("why", proc.name)["clock"] == line and line in kip.cli("why", proc.name).stdout
    proc.sleep()
    assert kip.json("why", proc.name)["clock"] == line
    other = run(kip, "other", tmp_path, "3600", flags=())
    assert kip.json("why", other.name)["clock"] is None
    refused = kip.cli("sleep", other.name, "--to", "hibernated", "--clock", "suspend", check=False)
    assert refused.returncode == 1 and "its threads stay in place, and its clocks go on" in refused.stderr
    assert other.state == "running"


# promise waking: `kip sleep` is its owner's word for a suspended clock in that one sleep, `--clock`
#   of it for another
# held by: this, `kip_engine::suspend::tests::the_owner_s_word_goes_before_a_profile_s`
@pytest.mark.parametrize(
    ("own", "asked", "word"),
    [
        ([], [], "the request to sleep"),
        ([], ["--clock", "continue"], None),
        ([], ["--clock", "auto"], None),
        (["--clock", "continue"], [], None),
        (["--clock", "continue"], ["--clock", "suspend"], "the request to sleep"),
        (["--clock", "suspend"], [], "--clock suspend"),
        (["--clock", "suspend"], ["--clock", "continue"], None),
    ],
)
def test_a_request_to_sleep_is_a_word_for_that_one_sleep(kip: Kip, tmp_path: Path, own: list[str], asked: list[str], word: str | None) -> None:
    """Its clock stands then, and goes on in the next sleep by itself."""
    proc = run(kip, f"once-{'-'.join([*own, '', *asked]).replace('--', '')}"[:40].strip("-"), tmp_path, "3600", flags=tuple(own))
    wait_for("all have begun", lambda: "all begun" in proc.logs())
    _, behind = clocks(proc)
    assert proc.sleep(clock=asked)["last_sleep"]["suspended"] == word
    time.sleep(PARKED)
    proc.wake()
    _, stood = clocks(proc)
    assert (stood - behind > PARKED) == (word is not None) and (word is not None or abs(stood - behind) < 0.1), (behind, stood)
    assert proc.sleep()["last_sleep"]["suspended"] == ("--clock suspend" if own == ["--clock", "suspend"] else None)
    proc.remove()
