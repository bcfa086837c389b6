"""Every call with a time-out that Linux has ends when it would have ended, through every sequence of tiers."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import programs
from harness.clients import read_to_end
from harness.kip import Kip, Proc
from harness.wait import wait_for

pytestmark = pytest.mark.measures

# How much later than it should a wait may end, seconds; what a wait of the same kind beside it is late on this machine comes on top.
LATE_S = 0.05
# As much on a machine whose processors have been fought for, or taken away from it, for more than a tenth of the time: no wake is
# on time there. A wait that began anew would be later: it has waited longer before its first sleep.
BUSY_LATE_S = 1.5
BUSY = 0.1
BEFORE_S = 2.0
# A proc that has these open cannot be parked.
NOT_PARKED = ["aio_events", "aio_mask", "queue_receive", "queue_send"]


def tiers(proc: Proc, sequence: str) -> None:
    """One step for each word, as soon as the one before it is done."""
    steps: dict[str, Callable[[], object]] = {
        "hibernated": proc.hibernate,
        "parked": proc.sleep,
        "archived": proc.archive,
        "hot": proc.wake,
    }
    for step in sequence.split():
        steps[step]()


def waits(text: str) -> dict[str, tuple[str, float]]:
    """(result, lateness in seconds) by name."""
    lines = [line.split() for line in text.splitlines() if line not in ("begun", "over")]
    return {name: (result, int(late) / 1e6) for name, result, late in lines}


def lost_s() -> float:
    """Seconds for which some process waited for a processor, or which the processors were taken away: proc(5), PSI."""
    some = Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]
    stolen = [int(line.split()[8]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    return int(some) / 1e6 + max(stolen[1:]) / os.sysconf("SC_CLK_TCK")


class Control:
    """The same waits beside it, without Kip: how they end, and how late this machine is."""

    def __init__(self, program: Path, seconds: float):
        self.began, self.lost = time.monotonic(), lost_s()
        self.process = subprocess.Popen(
            [program, str(seconds)], stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def end(self) -> dict[str, tuple[str, float]]:
        assert self.process.stdout
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line == "over\n":
                break
        self.process.terminate()
        self.process.wait(10)
        self.process.stdout.close()
        return waits("".join(lines))


def check(procs: dict[str, Proc], control: Control, seconds: float) -> None:
    for name, proc in procs.items():
        wait_for(f"{name} is over", lambda proc=proc: "over" in proc.logs().split(), seconds + 60)
    native = control.end()
    # Sockets go by a coarser clock of the kernel's.
    machine = max(late for name, (_, late) in native.items() if not name.startswith("socket"))
    busy = (lost_s() - control.lost) / (time.monotonic() - control.began) > BUSY
    limit = BUSY_LATE_S if busy else LATE_S
    wrong = []
    for name, proc in procs.items():
        found = waits(proc.logs())
        assert native.keys() - found.keys() <= set(NOT_PARKED)
        for wait, (result, late) in sorted(found.items()):
            if result != native[wait][0] and "missing" not in (result, native[wait][0]):
                wrong.append(f"{name}: {wait} ends with {result}, and with {native[wait][0]} without Kip")
            if not -0.0005 <= late <= limit + max(machine, native[wait][1]):
                wrong.append(f"{name}: {wait} is {late:.4f} s late; without Kip {native[wait][1]:.3f} s")
        assert sum(result != "missing" for result, _ in found.values()) > 50, found
    assert not wrong, "\n".join([f"the machine's own waits are up to {machine:.3f} s late", *wrong])


# Each name is a sequence of tiers; the waits' own end is the last step.
SHORT = ["hibernated", "hibernated parked", "parked hot parked", "hibernated hot hibernated parked hot"]
LONG = [
    "archived",
    "hibernated archived",
    "hibernated parked hot hibernated archived hot",
    "parked hot hibernated hot parked hot archived",
]


def run(kip: Kip, sequences: list[str], seconds: float, flags: list[str]) -> None:
    program = programs.c_program("timed_waits", "-static")
    tar = programs.tarball(programs.directory() / "waits.tar", {"waits": program})
    timing = ["--tick", "0s", "--idle", "1h", "--park-after", "1d", *flags]
    procs = {}
    for number, sequence in enumerate(sequences):
        left_out = NOT_PARKED if "parked" in sequence or "archived" in sequence else []
        command = ["/waits", str(seconds), *left_out]
        procs[f"{sequence} ({' '.join(flags)})"] = kip.run(f"waits-{number}", command, tar=tar, flags=timing)
    control = Control(program, seconds)
    for proc in procs.values():
        wait_for("it waits", lambda proc=proc: "begun" in proc.logs(), 20)
    time.sleep(BEFORE_S)
    for sequence, proc in zip(sequences, procs.values(), strict=True):
        tiers(proc, sequence)
    check(procs, control, seconds)


@pytest.mark.parametrize("hibernate", ["blocked", "held"])
def test_every_wait_ends_on_time(kip: Kip, hibernate: str) -> None:
    """Never early, and no later than 50 ms after a wait of the same kind without Kip at the same time."""
    run(kip, SHORT, 25, ["--hibernate", hibernate])


# Blocks the signal of its interval timer until it waits, answers whoever connects with how often the timer expired after that.
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
signal.setitimer(signal.ITIMER_REAL, 1, 1)
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


@pytest.mark.parametrize("tier", ["held", "by plan", "by CRIU"])
def test_an_interval_timer_whose_signal_waits_goes_on(fresh_kip: Callable[..., Kip], tier: str) -> None:
    """While its signal waits the kernel says that nothing is left of it, and set to that it would be gone."""
    kip = fresh_kip(*(["--only-criu"] if tier == "by CRIU" else []))
    flags = ["--hibernate", "held", "--idle", "1h"]
    proc = kip.run("alarms", ["python3", "-c", ITS_SIGNAL_WAITS], ports=["7000"], flags=flags)
    for _ in range(3):
        proc.hibernate() if tier == "held" else proc.sleep()
        with socket.create_connection(("127.0.0.1", proc.port()), timeout=40) as client:
            assert read_to_end(client) == b"3 1\n"
    assert tier == "held" or proc.rebuilt() == (tier == "by plan")


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["plan", "CRIU"])
def test_every_wait_ends_on_time_through_all_tiers(fresh_kip: Callable[..., Kip], store: Path, engine: str) -> None:
    kip = fresh_kip("--store", str(store), *(["--only-criu"] if engine == "CRIU" else []))
    for hibernate in ["blocked", "held"]:
        run(kip, LONG, 60, ["--hibernate", hibernate])
        kip.remove_all()
