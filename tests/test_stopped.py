"""Stopped processes (SIGSTOP, SIGTSTP): they keep no proc awake, sleep in each tier, are still stopped afterwards without
having run, and go on when they are continued."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.clients import Lines
from harness.kip import Kip, Proc
from harness.programs import SOURCES
from harness.wait import wait_for

# Writes as often as it runs: a moment is enough to be seen.
BUSY = "import os, itertools\nfor n in itertools.count(1): os.pwrite(1, b'%20d' % n, 0)"
# Two threads, in calls of two kinds.
WAITING = (
    "import os, threading, time\n"
    "def tick():\n"
    "  while True: time.sleep(0.05); os.pwrite(1, b'%20d' % time.monotonic_ns(), 0)\n"
    "threading.Thread(target=tick, daemon=True).start()\nos.read(0, 1)"
)
CHILDREN = {"busy": BUSY, "waiting": WAITING}


class Child:
    """A child of the program `lines`, which writes to a file what it has come to."""

    def __init__(self, client: Lines, kind: str, signal: str):
        self.client, self.signal = client, signal
        self.do("import signal, subprocess; out = open('/tmp/count', 'w+')")
        self.do(f"p = subprocess.Popen(['/usr/bin/python3', '-c', {CHILDREN[kind]!r}], stdin=subprocess.PIPE, stdout=out, process_group=0)")
        wait_for("it runs", lambda: self.count() > 0, 10)
        self.stop()

    def do(self, statement: str) -> None:
        assert (answer := self.client.ask(statement)) == "None", (statement, answer)

    def stop(self) -> None:
        self.do(f"os.kill(p.pid, signal.{self.signal})")
        wait_for("it is stopped", lambda: self.state() == "T", 10)
        self.at = self.count()

    def state(self) -> str:
        return self.client.ask("open(f'/proc/{p.pid}/stat').read().rpartition(')')[2].split()[0]").strip("'")

    def count(self) -> int:
        return int(self.client.ask("int(os.pread(out.fileno(), 20, 0) or 0)"))

    def told(self) -> str:
        """What wait(2) has to say that it has not said."""
        return self.client.ask("[os.WIFSTOPPED(s) and os.WSTOPSIG(s) for pid, s in [os.waitpid(p.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)] if pid]")

    def still(self) -> None:
        # The threads of a proc are let go one after the other, and one that is stopped has to come
        # to run for that; not to its code.
        wait_for("it is stopped", lambda: self.state() == "T", 10)
        assert self.count() == self.at

    def goes_on(self) -> None:
        self.do("os.kill(p.pid, signal.SIGCONT)")
        wait_for("it goes on", lambda: self.count() != self.at, 10)


def start(kip: Kip, *flags: str) -> tuple[Proc, Lines]:
    flags = ("-v", f"{SOURCES / 'lines.py'}:/srv/lines.py:ro", *flags)
    proc = kip.run("parent", ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=[8080], flags=list(flags))
    return proc, Lines(proc.port())


# promise waking: a stopped process (SIGSTOP, SIGTSTP) does not keep its proc awake, sleeps in each
#   tier, is stopped afterwards without having run, and goes on when it is continued; wait(2) of its
#   parent tells of the stop once, by CRIU once more; a stopped process with several threads
#   hibernates, and is refused by name where it would be parked
# held by: this, `tests/test_stopped.py::test_it_keeps_nobody_awake`,
#   `tests/test_stopped.py::test_one_with_threads_is_named`
@pytest.mark.parametrize("signal", ["SIGSTOP", "SIGTSTP"])
@pytest.mark.parametrize("engine", ["plan", "criu"])
def test_it_is_still_stopped(fresh_kip: Callable[..., Kip], engine: str, signal: str) -> None:
    proc, client = start(fresh_kip(*(["--only-criu"] if engine == "criu" else [])))
    child = Child(client, "busy", signal)
    number = {"SIGSTOP": 19, "SIGTSTP": 20}[signal]
    assert child.told() == f"[{number}]"
    # By CRIU it is stopped by SIGSTOP, of which its parent is told once more.
    again = "[]" if engine == "plan" else "[19]"
    for put_away in (proc.hibernate, proc.sleep, proc.sleep, proc.hibernate):
        put_away()
        child.still()
        assert child.told() == ("[]" if put_away == proc.hibernate else again), "it has been told of that stop"
        assert put_away == proc.hibernate or proc.rebuilt() == (engine == "plan")
    child.goes_on()
    assert child.told() == "[False]", "it was continued"
    # And once more, of which it is told after the sleep.
    child.stop()
    proc.sleep()
    child.still()
    assert child.told() in (f"[{number}]", "[19]"), "it has not been told before"
    child.goes_on()


def test_one_with_threads_is_named(kip: Kip) -> None:
    """It hibernates; CRIU cannot dump it, and `kip why` says so in the owner's words."""
    proc, client = start(kip)
    child = Child(client, "waiting", "SIGSTOP")
    for _ in range(2):
        proc.hibernate()
        child.still()
        refused = kip.refused("sleep", "parent", "--to", "parked")
        assert "is stopped by a signal and has several threads" in refused, refused
        assert "is stopped by a signal and has several threads" in kip.cli("why", "parent").stdout
        child.still()
    child.goes_on()
    proc.sleep()
    proc.wake()
    assert proc.rebuilt()


@pytest.mark.parametrize("way", ["auto", "blocked", "held", "off"])
def test_it_keeps_nobody_awake(kip: Kip, way: str) -> None:
    """By itself the proc sinks as it does without it, and stays there."""
    proc, client = start(kip, "--idle", "500ms", "--park-after", "2s", "--hibernate", way)
    child = Child(client, "busy", "SIGSTOP")
    proc.wait_state("parked", 30)
    assert proc.inspect()["wakes"] == 0, proc.inspect()["last_wake"]
    child.still()
