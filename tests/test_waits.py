"""Every call with a time-out that Linux has ends when it would have ended, through every sequence of tiers."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from harness import programs
from harness.clients import read_to_end
from harness.kip import Kip, Proc
from harness.rows import rest_in_soak
from harness.wait import wait_for

pytestmark = pytest.mark.measures

# How much later than it should a wait may end, seconds; what this machine is late beside it,
# without Kip, comes on top.
LATE_S = 0.05
# The kernel rounds a socket's time-out up by as much of it, the timer wheel's coarsest step: 8 of
# 63 jiffies.
ROUNDED = 8 / 63
# A part of each wait that passes before the first sleep: a wait that begins anew is later by it,
# which is more than that rounding.
BEFORE = 1 / 6
# Between the end of a sequence and that of the waits, at least.
BEFORE_DUE_S = 1
# Between the ends of two procs' waits.
APART_S = 0.5
# A proc that has these open cannot be parked.
NOT_PARKED = ["aio_events", "aio_mask", "queue_receive", "queue_send"]
# Needs a processor for about as long as the wake of such a program does, again and again, and says
# how much longer that took.
LOAD = """
import time
while True:
    time.sleep(0.2)
    began, until = time.monotonic(), time.thread_time() + 0.06
    while time.thread_time() < until:
        pass
    print(time.monotonic() - began - 0.06, flush=True)
"""


def again(kip: Kip) -> None:
    """Another daemon in the place of one that is killed, as by a machine that has no memory left."""
    kip.kill()
    kip.up()


def tiers(proc: Proc, sequence: str) -> None:
    """One step for each word, as soon as the one before it is done."""
    steps: dict[str, Callable[[], object]] = {
        "hibernated": proc.hibernate,
        "parked": proc.sleep,
        "archived": proc.archive,
        "hot": proc.wake,
        # The descriptors that cannot be parked are found when all stands still: the dump is called
        # off.
        "refused": lambda: proc.kip.refused("sleep", proc.name, "--to", "parked"),
        # Parked by Kip after it has looked at what the program waits for.
        "itself": lambda: proc.wait_state("parked"),
        "killed": lambda: again(proc.kip),
    }
    for step in sequence.split():
        steps[step]()


def waits(text: str) -> dict[str, tuple[str, float]]:
    """(result, lateness in seconds) by name."""
    lines = [line.split() for line in text.splitlines() if line not in ("begun", "over")]
    return {name: (result, int(late) / 1e6) for name, result, late in lines}


class Control:
    """The same waits beside it, without Kip: how they end, and how late they are; and how long work waits for a processor here."""

    def __init__(self, program: Path, seconds: float):
        def start(*command: str | Path) -> subprocess.Popen[str]:
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

        self.load, self.process = start("python3", "-c", LOAD), start(program, str(seconds))

    def end(self) -> tuple[dict[str, tuple[str, float]], float]:
        """The waits, and how late this machine is, seconds."""
        assert self.process.stdout and self.load.stdout
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line == "over\n":
                break
        self.load.terminate()
        delays = [float(line) for line in self.load.stdout.read().split()]
        found = waits("".join(lines))
        # Sockets go by a coarser clock of the kernel.
        return found, max([late for name, (_, late) in found.items() if not name.startswith("socket")] + delays)


    def close(self) -> None:
        for process in (self.process, self.load):
            process.kill()
            process.communicate()


def stall_s(proc: Proc) -> float:
    """How long its last way down and its last way up took together, seconds."""
    view = proc.inspect()
    ways = [view[way] for way in ("last_sleep", "last_wake") if view[way]]
    return sum(way["total_us"] for way in ways) / 1e6


def check(procs: dict[str, Proc], control: Control, seconds: float) -> None:
    for name, proc in procs.items():
        wait_for(f"{name} is over", lambda proc=proc: "over" in proc.logs().split(), seconds + 60)
    native, machine = control.end()
    wrong = []
    for name, proc in procs.items():
        found = waits(proc.logs())
        # A machine that is late itself stalls in a sleep that is not over when a wait ends, and in
        # the wake.
        stall = stall_s(proc) if machine > LATE_S else 0
        assert native.keys() - found.keys() <= set(NOT_PARKED)
        for wait, (result, late) in sorted(found.items()):
            limit = LATE_S + machine + stall + (ROUNDED * seconds if wait.startswith("socket") else 0)
            if result != native[wait][0] and "missing" not in (result, native[wait][0]):
                wrong.append(f"{name}: {wait} ends with {result}, and with {native[wait][0]} without Kip")
            if not -0.0005 <= late <= limit:
                wrong.append(f"{name}: {wait} is {late:.4f} s late; without Kip {native[wait][1]:.3f} s")
        assert sum(result != "missing" for result, _ in found.values()) > 50, found
    assert not wrong, "\n".join([f"this machine is up to {machine:.3f} s late", *wrong])


# Each name is a sequence of tiers; the waits' own end is the last step.
SHORT = [
    "hibernated",
    "hibernated parked",
    "parked hot parked",
    "hibernated hot hibernated parked hot",
    "refused",
    "hibernated refused",
    "hibernated killed hot parked killed",
    "itself hot itself hot itself hot itself",
]
LONG = [
    "archived",
    "hibernated archived",
    "hibernated parked hot hibernated archived hot",
    "parked hot hibernated hot parked hot archived",
]


class TooSlow(Exception):
    """This machine is: a sequence is not over before its waits are."""


def run(kip: Kip, sequences: list[str], seconds: float) -> None:
    """Each sequence blocked and held, all side by side. The sequence is over before the waits are: a daemon that is killed when a
    wait ends wakes its program when the next one is up."""
    program = programs.c_program("timed_waits", "-static")
    tar = programs.tarball(programs.directory() / "waits.tar", {"waits": program})
    procs: dict[str, Proc] = {}
    due: dict[str, float] = {}
    for sequence in sequences:
        left_out = [] if sequence == "hibernated" or "refused" in sequence else NOT_PARKED
        idle = ["500ms", "500ms"] if "itself" in sequence else ["1h", "1d"]
        for hibernate in ["blocked", "held"]:
            timing = ["--tick", "0s", "--idle", idle[0], "--park-after", idle[1], "--hibernate", hibernate]
            name = f"waits-{len(procs)}"
            due[name] = time.monotonic() + seconds
            procs[f"{sequence} ({hibernate})"] = kip.run(name, ["/waits", str(seconds), *left_out], tar=tar, flags=timing)
            # Wakes that are due at once would wait for each other.
            time.sleep(APART_S)
    with closing(Control(program, seconds)) as control:
        for proc in procs.values():
            wait_for("it waits", lambda proc=proc: "begun" in proc.logs(), 20)
        time.sleep(seconds * BEFORE)

        def through(name: str) -> None:
            proc = procs[name]
            tiers(proc, name.split(" (")[0])
            left = due[proc.name] - time.monotonic()
            if left <= BEFORE_DUE_S:
                raise TooSlow(f"{name}: the waits end in {left:.1f} s, too soon after its sequence")

        # What Kip does by itself takes seconds, in which nothing else is to be done.
        by_itself = [name for name in procs if "itself" in name]
        for name in procs:
            if name not in by_itself:
                through(name)
        with ThreadPoolExecutor() as pool:
            list(pool.map(through, by_itself))
        check(procs, control, seconds)


# promise waking: every call with a time-out ends when it would have ended, whatever tiers it was in
#   meanwhile, whatever sleeps were refused and whatever daemon was killed: what counts is when it
#   began
# held by: this,
#   `kip_stop::stopped::tests::a_wait_whose_beginning_is_not_known_ends_when_its_timer_says`,
#   `kip_engine::survey::tests::what_has_to_be_known_is_asked_again`,
#   `kip_sys::armed::tests::a_sleeping_thread_has_a_timer_that_is_gone_when_it_has_woken`,
#   `tests/test_waits.py::test_a_sleep_does_not_begin_just_before_a_wait_ends`,
#   `kip_supervisor::task::hibernate::tests::a_park_is_not_in_the_way_of_a_wait_that_ends`,
#   `kip_sys::ends::tests::a_record_belongs_to_the_call_that_points_to_it`,
#   `kip_sys::ends::tests::what_a_handler_has_written_over_is_no_record`,
#   `kip_clocks::calls::tests::what_the_kernel_says_is_left_of_a_sleep_is_left`,
#   `kip_clocks::calls::tests::absolute_time_outs_are_due_on_their_clocks`
@pytest.mark.timeout(300)
def test_every_wait_ends_on_time(kip: Kip) -> None:
    """Never early, and no later than 50 ms after a wait of the same kind without Kip at the same time."""
    try:
        run(kip, SHORT, 30)
    except TooSlow:
        for name in kip.names():
            Proc(kip, name).remove()
        run(kip, SHORT, 75)


# Much memory, which takes longer to put away than a wait may be late.
WAITS_AND_SAYS = """
import ctypes, os, select, signal, sys, time
memory = os.urandom(200 << 20)
libc, timer, value = ctypes.CDLL(None), ctypes.c_void_p(), (ctypes.c_long * 4)(0, 0, 11, 0)
libc.timer_create(1, None, ctypes.byref(timer))
signal.signal(signal.SIGALRM, lambda *_: None)
waits = {"poll": lambda: select.poll().poll(11000), "setitimer": lambda: signal.setitimer(signal.ITIMER_REAL, 11) and signal.pause(),
         "timer_create": lambda: libc.timer_settime(timer, 0, value, None) or signal.pause()}
while True:
    began = time.monotonic()
    waits[sys.argv[1]]()
    print(time.monotonic() - began - 11, flush=True)
"""


# promise waking: a sleep that Kip begins by itself is put off until after a wait that is about to
#   end, a POSIX timer or an interval timer that is about to expire
# held by: this
@pytest.mark.parametrize("call", rest_in_soak(["poll", "setitimer", "timer_create"], ["timer_create"]))
def test_a_sleep_does_not_begin_just_before_a_wait_ends(kip: Kip, call: str) -> None:
    """It would have begun about a second before; and it is put off once, not for ever."""
    ways = {"hibernated": ["--park-after", "1h"], "parked": ["--hibernate", "off", "--park-after", "0s"]}
    procs = {}
    for tier, way in ways.items():
        command = ["python3", "-c", WAITS_AND_SAYS, call]
        procs[tier] = kip.run(f"big-{tier}-{call.replace('_', '-')}", command, flags=["--tick", "0s", "--idle", "9500ms", *way])
        # The sleep of the one is no load when the wait of the other ends.
        time.sleep(4)
    for tier, proc in procs.items():
        wait_for("the first wait ends", proc.logs, 20)
        kinds = {event["kind"] for event in kip.events() if event["name"] == proc.name}
        assert not kinds & {"hibernated", "parking"}, kinds
        proc.wait_state(tier, timeout=6)
    for proc in procs.values():
        wait_for("the second wait ends", lambda proc=proc: len(proc.logs().split()) == 2, 20)
        late = [float(line) for line in proc.logs().split()]
        assert 0 <= late[0] < LATE_S, late


# The program blocks the signal of its interval timer until it waits, and answers each client with
# how often the timer expired after that.
ITS_SIGNAL_WAITS = """
import signal, socket, time
expired = 0
def count(*_):
    global expired
    expired += 1
signal.signal(signal.SIGALRM, count)
def until_it_waits():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    while signal.SIGALRM not in signal.sigpending():
        time.sleep(0.01)
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
until_it_waits()
listener = socket.create_server(("", 7000))
while True:
    client = listener.accept()[0]
    expired = 0
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    until = time.monotonic() + 10
    while expired < 3 and time.monotonic() < until:
        time.sleep(0.01)
    until_it_waits() if expired == 3 else None
    client.sendall(b"%d %g\\n" % (expired, signal.getitimer(signal.ITIMER_REAL)[1]))
    client.close()
"""


# promise waking: an interval timer whose signal waits when the proc is put to sleep goes on
# held by: this,
#   `tests/test_expiries.py::test_nginx_with_timer_resolution_times_out_after_ten_sleeps`,
#   `kip_clocks::timers::tests::a_timer_whose_signal_waits_is_armed`
@pytest.mark.parametrize("tier", ["held", "by plan", "by CRIU"])
def test_an_interval_timer_whose_signal_waits_goes_on(fresh_kip: Callable[..., Kip], tier: str) -> None:
    """While its signal waits the kernel says that nothing is left of it, and set to that it would be gone."""
    kip = fresh_kip(*(["--only-criu"] if tier == "by CRIU" else []))
    flags = ["--hibernate", "held", "--idle", "1h"]
    proc = kip.run("alarms", ["python3", "-c", ITS_SIGNAL_WAITS], ports=["7000"], flags=flags)
    for _ in range(3):
        proc.hold() if tier == "held" else proc.sleep()
        with socket.create_connection(("127.0.0.1", proc.port()), timeout=40) as client:
            assert read_to_end(client) == b"3 0.2\n"
    assert tier == "held" or proc.rebuilt() == (tier == "by plan")


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["plan", "CRIU"])
def test_every_wait_ends_on_time_through_all_tiers(fresh_kip: Callable[..., Kip], store: Path, engine: str) -> None:
    kip = fresh_kip("--store", str(store), *(["--only-criu"] if engine == "CRIU" else []))
    run(kip, LONG, 60)
