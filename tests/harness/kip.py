"""The daemon under test and its command line.

Everything goes through `kip --data DIR COMMAND`; the only look behind it is `GET /v1/info`, for the
pids that the fault tests kill. Nothing is retried: a command that fails is a finding.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import leftovers
from harness.wait import wait_for

ROOT = Path(__file__).resolve().parents[2]

# A line of the daemon's log at these levels fails the test that caused it, unless it is expected.
COMPLAINT = re.compile(r"\b(WARN|ERROR)\b|panicked at")
# What a proc wakes by that was frozen in the middle of work; data on a connection with itself is
# such work.
IN_WORK = re.compile(r"at work|first touch|tcp 127\.0\.0\.1:\d+ from 127\.0\.0\.1:\d+")
# What its own clock wakes it by, or that. Sleeps by request are as those by idle time: without this
# the request itself would be the owner's word for a suspended clock.
BY_ITSELF_CLOCK = ("--clock", "auto")
BY_ITSELF = re.compile(rf"^timer \(|{IN_WORK.pattern}")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def binary() -> Path:
    """KIP_BIN, or what was built last."""
    if named := os.environ.get("KIP_BIN"):
        return Path(named)
    built = [p for p in (ROOT / "target" / kind / "kip" for kind in ("release", "debug")) if p.exists()]
    if not built:
        raise FileNotFoundError("there is no kip: build it (cargo build --release) or set KIP_BIN")
    return max(built, key=lambda p: p.stat().st_mtime)


class Failed(AssertionError):
    """A command ended with another code than it should have."""

    def __init__(self, done: subprocess.CompletedProcess[str]):
        super().__init__(f"{' '.join(map(str, done.args))}: exit {done.returncode}\n{done.stderr}{done.stdout}")
        self.done = done


@dataclass
class Proc:
    """A proc of the daemon under test."""

    kip: Kip
    name: str

    def inspect(self) -> dict[str, Any]:
        """By the API, for it is asked many times: starting the command costs more than what it asks for. Of the command itself
        are `tests/test_cli.py` and others."""
        status, body = self.kip.get(f"/v1/procs/{self.name}")
        if status != 200:
            raise Failed(subprocess.CompletedProcess(["inspect", self.name], 1, "", body))
        return json.loads(body)

    @property
    def state(self) -> str:
        return self.inspect()["state"]

    def port(self, inside: int | None = None, proto: str = "tcp") -> int:
        """The host's port for a port inside; the first one if none is named."""
        ports = [p for p in self.inspect()["ports"] if p["proto"] == proto and inside in (None, p["port"])]
        assert ports, f"{self.name} publishes no {proto} port {inside}"
        return ports[0]["host_port"]

    def address(self, inside: int | None = None, proto: str = "tcp") -> str:
        """The address that other procs dial."""
        return next(p["addr"] for p in self.inspect()["ports"] if p["proto"] == proto and inside in (None, p["port"]))

    def sleep(self, timeout: float = 60, clock: Sequence[str] = BY_ITSELF_CLOCK) -> dict[str, Any]:
        """Parks it and makes sure that it is: no process is left of those it had."""
        before, after = self._put_to_sleep("parked", timeout, clock)
        assert after["pids"] == [], "a parked proc has no process"
        if before["state"] == "running":
            assert after["generation"] > before["generation"], "each sleep makes a generation"
        for pid in before["pids"]:
            # On a busy machine a process that was killed takes a while to be gone.
            wait_for(f"pid {pid} of {self.name}, which is parked, is gone", lambda pid=pid: not leftovers.is_alive(pid), 10)
        return after

    def hibernate(self, timeout: float = 60) -> dict[str, Any]:
        """Hibernates it and makes sure that it is: its processes are there, their memory is not."""
        _, after = self._put_to_sleep("hibernated", timeout)
        assert after["pids"], "a hibernated proc has its processes"
        assert after["last_sleep"]["to"] == "hibernated", after["last_sleep"]
        return after

    def hibernate_once(self, *flags: str) -> dict[str, Any]:
        """Hibernates it, and makes sure of that. It may be awake again before this returns, for a program at work wakes at once."""
        before = self.inspect()
        self.kip.cli("sleep", self.name, "--to", "hibernated", *flags)
        after = self.inspect()
        sleep, last = after["last_sleep"], before["last_sleep"]
        assert sleep and sleep["to"] == "hibernated" and (sleep != last or before["state"] == "hibernated"), (last, sleep)
        if (sleep["memory_bytes"] or 0) > 8 << 20 and (not last or last["to"] != "hibernated"):
            # What has not changed since the sleep before is not written again, and of little memory
            # nothing is.
            assert sleep["held"] or sleep["bytes_written"] + sum(sleep.get("left_bytes", {}).values()) > 0, sleep
        return after

    def hold(self) -> dict[str, Any]:
        """Hibernates it with `--hibernate held`. One that was found at work ticks on in place: woken, and tried again."""
        for _ in range(20):
            view = self.hibernate()
            if view["last_sleep"]["held"]:
                return view
            self.wake()
            time.sleep(0.05)
        raise AssertionError(f"{self.name} is at work whenever it is to be held: {view['last_sleep']}")

    def _put_to_sleep(self, tier: str, timeout: float, clock: Sequence[str] = BY_ITSELF_CLOCK) -> tuple[dict[str, Any], dict[str, Any]]:
        """What it was and what it is in that tier. One that was frozen in the middle of work goes on with it at once, and one
        whose own timer was due meanwhile (the disk may take seconds) has woken for it: again."""
        for _ in range(10):
            before = self.inspect()
            self.kip.cli("sleep", self.name, "--to", tier, *clock, timeout=timeout)
            after = self.quiescent()
            woken = after["last_wake"]
            if after["state"] == tier or not woken or not BY_ITSELF.search(woken["trigger"]):
                break
            time.sleep(0.05)
        assert after["state"] == after["tier"] == tier, after
        return before, after

    def archive(self, timeout: float = 60) -> dict[str, Any]:
        """Archives it and makes sure that it is. One whose own timer was due meanwhile has woken and gone on: again."""
        for _ in range(5):
            view = self.inspect()
            wakes = (view if view["state"] == "archived" else self.sleep(timeout))["wakes"]
            done = self.kip.cli("sleep", self.name, "--to", "archived", *BY_ITSELF_CLOCK, check=False, timeout=timeout)
            after = self.quiescent()
            woke_by_itself = after["wakes"] > wakes and BY_ITSELF.search(after["last_wake"]["trigger"])
            if done.returncode != 0 or not woke_by_itself or after["state"] == "archived":
                break
        if done.returncode != 0:
            raise Failed(done)
        assert after["state"] == after["tier"] == "archived" and after["pids"] == [], after
        return after

    def quiescent(self) -> dict[str, Any]:
        """What it is once it is not on the way up. A sleeper that is due already (it was frozen in the middle of work, say) is:
        it says so before it has written down that it wakes, which may take as long as the disk does."""

        def view() -> dict[str, Any] | None:
            view = self.inspect()
            due = view["state"] in ("hibernated", "parked", "archived") and view["next_timer_ms"] == 0
            return None if view["state"] == "waking" or due else view

        return wait_for(f"{self.name} is awake", view, 30)

    def own_bytes(self) -> int:
        """Memory that is its own and there, in bytes. Pages of files are the page cache's, and ticks map some of them again."""
        found = 0
        for pid in self.inspect()["pids"]:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found += int(re.search(r"^Anonymous:\s+(\d+) kB", text, re.M)[1]) * 1024
        return found

    def asleep_bytes(self) -> int:
        """What it holds of its own while it hibernates. A proc that wakes while it is looked at is put to sleep again."""
        for _ in range(5):
            view = self.hibernate()
            own = self.own_bytes()
            after = self.inspect()
            if after["state"] == "hibernated" and after["wakes"] == view["wakes"]:
                break
        return own

    def written_bytes(self) -> list[int]:
        """What parking wrote, each time since the daemon started: `sleep` may have had to park it twice, and then the first time
        wrote nearly all, and `last_sleep` is of the second. Counts by name, and only the newest events are kept."""
        parked = [e["detail"] for e in self.kip.events() if e["name"] == self.name and e["kind"] == "parked"]
        return [int(re.search(r"\b(\d+) bytes", detail)[1]) for detail in parked]

    def wake(self, timeout: float = 60) -> dict[str, Any]:
        self.kip.cli("wake", self.name, timeout=timeout)
        return self.inspect()

    def rebuilt(self) -> bool:
        """Whether the last wake was native, by Kip's own restorer, and not by CRIU."""
        steps = {step["name"] for step in self.inspect()["last_wake"]["steps"]}
        assert ("plan" in steps) != ("helper" in steps), f"both ways in one wake: {steps}"
        return "plan" in steps

    def wait_state(self, state: str, timeout: float = 30) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            view = self.inspect()
            return view if view["state"] == state else None

        return wait_for(f"{self.name} is {state}", reached, timeout)

    def exec(self, *command: str, check: bool = True, timeout: float = 60, **options: Any):
        interactive = ["-i"] if "input" in options else []
        return self.kip.cli("exec", *interactive, self.name, "--", *command, check=check, timeout=timeout, **options)

    def logs(self) -> str:
        return self.kip.cli("logs", self.name).stdout

    def stop(self) -> None:
        self.kip.cli("stop", self.name)

    def start(self, ready: bool = False) -> None:
        """`kip start`, which returns before the program listens; with `ready` that is waited for, and for its own `--ready`."""
        self.kip.cli("start", self.name, *(["--wait-ready"] if ready else []))
        if ready:
            self.kip.cli("wait", self.name, "--ready")

    def remove(self) -> None:
        self.kip.cli("rm", self.name, "--force")


@dataclass
class Kip:
    """One data directory with its daemon."""

    data: Path
    program: Path = field(default_factory=binary)
    flags: Sequence[str] = ()
    daemon: subprocess.Popen[bytes] | None = None
    # The instance number, 0..16, by which everything it makes on the machine is named; known once
    # it is up.
    instance: int | None = None
    before: leftovers.Machine | None = None
    # Regular expressions of log lines that may be there.
    expected: list[str] = field(default_factory=list)
    runs: int = 0
    # Larger than the id of each event of an earlier daemon.
    first_event: int = 0

    # The daemon.

    def up(self, *flags: str, timeout: float = 60) -> None:
        """Starts the daemon and waits until it is ready."""
        if self.before is None:
            self.before = leftovers.Machine.now()
        self.runs += 1
        self.data.parent.mkdir(parents=True, exist_ok=True)
        leftovers.want_instance(self.data)
        self.first_event = time.time_ns() // 1_000_000 * 1000
        with open(self.stderr_file, "ab") as log:
            self.daemon = subprocess.Popen(
                [self.program, "--data", self.data, "up", *self.flags, *flags],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        line = self._first_line(timeout)
        assert line.startswith("ready"), f"kip up said {line!r}\n{self.stderr()[-3000:]}"
        self.instance = leftovers.instance_of(self.daemon.pid, self.info().get("keeper_pid"))

    def _first_line(self, timeout: float) -> str:
        assert self.daemon and self.daemon.stdout
        fd, text, deadline = self.daemon.stdout.fileno(), b"", time.monotonic() + timeout
        while not text.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise AssertionError(f"kip up is not ready after {timeout} s\n{self.stderr()[-3000:]}")
            byte = os.read(fd, 1)
            if not byte:
                raise AssertionError(f"kip up ended, exit {self.daemon.wait()}\n{self.stderr()[-3000:]}")
            text += byte
        return text.decode()

    @property
    def stderr_file(self) -> Path:
        return self.data.parent / f"{self.data.name}.stderr"

    def stderr(self) -> str:
        return COLOURS.sub("", self.stderr_file.read_text(errors="replace")) if self.stderr_file.exists() else ""

    def complaints(self) -> list[str]:
        """Lines that the test did not expect."""
        lines = [line for line in self.stderr().splitlines() if COMPLAINT.search(line)]
        return [line for line in lines if not any(re.search(e, line) for e in self.expected)]

    def alive(self) -> bool:
        return self.daemon is not None and self.daemon.poll() is None

    def kill(self) -> None:
        """SIGKILL, and nothing else."""
        assert self.daemon
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait(30)  # a write to disk that has begun ends first

    def reboot(self, *flags: str) -> None:
        """What a machine's end and start leave of it: the data directory, and nothing else. Then `kip up`."""
        if self.alive():
            self.kill()
        leftovers.end_all(self)
        (leftovers.RUN / f"instance-{self.instance}").unlink(missing_ok=True)
        self.expected += [r"the keeper was not running"]
        self.up(*flags)

    def wait_dead(self, timeout: float = 30) -> int:
        assert self.daemon
        return self.daemon.wait(timeout)

    def down(self, last: Callable[[Path], None] | None = None) -> None:
        """`kip down`, and then nothing is left on the machine. `last` is called with the data directory before it is looked at."""
        if not self.alive():
            self.up()
        self.cli("down", "--all", timeout=90)
        assert self.wait_dead() == 0, f"kip up ended with {self.daemon and self.daemon.returncode}"
        if self.daemon and self.daemon.stdout:
            self.daemon.stdout.close()
        if last:
            last(self.data)
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        assert self.before is not None
        leftovers.assert_none(self.before, self.data, self.instance)
        complaints = self.complaints()
        assert not complaints, "the daemon complained:\n" + "\n".join(complaints[:20])

    def info(self) -> dict[str, Any]:
        """`GET /v1/info` on the API's socket."""
        return json.loads(self.get("/v1/info")[1])

    def get(self, path: str) -> tuple[int, str]:
        """GET on the API's socket: status and body. Without a daemon a failure, as of a command."""
        connection = http.client.HTTPConnection("kip", timeout=60)
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(60)
            try:
                s.connect(str(self.data / "run" / "api.sock"))
                connection.sock = s
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except (OSError, http.client.HTTPException) as e:
                raise Failed(subprocess.CompletedProcess(["GET", path], 1, "", f"no answer: {e}")) from e

    def own_processes(self) -> list[int]:
        """The daemon, the keeper and the pager, which are not each other's children, and all that descends from them but the
        procs' own processes."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):  # it has ended
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        assert self.daemon
        info = self.info()
        found = {self.daemon.pid, info["keeper_pid"], info["pager_pid"]}
        assert found <= parents.keys(), f"one of daemon, keeper and pager is not there: {found}"
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return sorted(found - {pid for view in self.json("ps") for pid in view.get("pids") or []})

    # The command line.

    def cli(
        self,
        *words: str | Path,
        check: bool = True,
        timeout: float = 60,
        input: str | None = None,
        binary: bool = False,
    ) -> subprocess.CompletedProcess[Any]:
        """Runs a command; with `check`, anything but exit code 0 is a failure."""
        done = subprocess.run(
            [self.program, "--data", self.data, *words],
            input=input, stdin=subprocess.DEVNULL if input is None else None, capture_output=True, text=not binary,
            errors=None if binary else "replace", timeout=timeout,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise Failed(done)
        return done

    def json(self, *words: str) -> Any:
        return json.loads(self.cli(*words, "--json").stdout)

    def refused(self, *words: str | Path, timeout: float = 60) -> str:
        """Runs a command that must be refused: exit code 1 and one clear line on stderr, which is returned."""
        done = self.cli(*words, check=False, timeout=timeout)
        return one_line_refusal(done)

    def run(
        self,
        name: str,
        command: Sequence[str],
        *,
        ports: Sequence[str | int] = (),
        tar: Path | None = None,
        flags: Sequence[str] = (),
        wait_ready: bool | None = None,
        timeout: float = 60,
    ) -> Proc:
        """`kip run`; waits until its ports listen if it has any."""
        words: list[str | Path] = ["run", "--name", name]
        for port in ports:
            words += ["--port", str(port)]
        if tar is not None:
            words += ["--tar", tar]
        if wait_ready or (wait_ready is None and ports):
            words.append("--wait-ready")
        self.cli(*words, *flags, "--", *command, timeout=timeout)
        return Proc(self, name)

    def names(self) -> list[str]:
        return [view["name"] for view in self.json("ps")]

    def remove_all(self, but: Collection[str] = ()) -> None:
        """One that goes by itself meanwhile, such as a replica, is gone all the same."""
        for name in self.names():
            if name not in but and (done := self.cli("rm", name, "--force", check=False)).returncode and name in self.names():
                raise Failed(done)

    def new_keeper(self, old: int) -> int | None:
        """The pid of a keeper that is another one, alive, and holds all: its event comes after that."""
        pid = self.info()["keeper_pid"]
        holds = any(event["kind"] == "keeper" and event["detail"].endswith(f" {pid}") for event in self.events())
        return pid if pid != old and holds and leftovers.is_alive(pid) else None

    def events(self) -> list[dict[str, Any]]:
        """Those of this daemon: what earlier ones of the data directory said is kept, too."""
        events = (json.loads(line) for line in self.cli("events", "--json").stdout.splitlines())
        return [event for event in events if event["id"] >= self.first_event]

    def account(self) -> str:
        """What a person would look at after a failed test."""
        parts = [f"--- stderr of {self.data.name}\n{self.stderr()[-4000:]}"]
        if self.alive():
            for words in (["ps"], ["events"]):
                done = self.cli(*words, check=False, timeout=10)
                lines = (done.stdout + done.stderr).splitlines()[-25:]
                parts.append("\n".join([f"--- kip {' '.join(words)}", *lines]))
        return "\n".join(parts)


def one_line_refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal, or a failure that says what was wrong with it."""
    shown = (
        f"{' '.join(map(str, done.args[3:]))}: exit {done.returncode}, stderr {done.stderr!r}, stdout {done.stdout!r}"
    )
    assert done.returncode == 1, shown
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, f"not one line: {shown}"
    assert 10 <= len(lines[0]) <= 400, f"not a clear line: {shown}"
    assert not re.search(r"panicked|RUST_BACKTRACE|Os \{|Error \{|Some\(|\\n", lines[0]), (
        f"debris of a program: {shown}"
    )
    return lines[0]


class Bases:
    """Skeletons of procs' roots: 1,500 small files, alike in each data directory and never changed. One that is no longer needed becomes
    that of the next data directory: making and removing them took a fifth of the tests' time, for ext4 makes no file in the
    place of one that was removed in the last five seconds, and looks at each such place."""

    def __init__(self) -> None:
        self._room: Path | None = None

    def keep(self, data: Path) -> None:
        """Of a data directory that has no daemon and is not needed any more."""
        self._room = self._room or Path(tempfile.mkdtemp(prefix="kip-bases-", dir=data.parents[1]))
        with suppress(FileNotFoundError):
            (data / "base").rename(Path(tempfile.mkdtemp(dir=self._room)) / "base")

    def give(self, data: Path) -> None:
        """To a data directory that has had no daemon yet."""
        for base in self._room.glob("*/base") if self._room else ():
            data.mkdir(mode=0o700, exist_ok=True)
            base.rename(data / "base")
            base.parent.rmdir()
            break

    def forget(self) -> None:
        if self._room:
            shutil.rmtree(self._room)
        self._room = None


BASES = Bases()


@contextmanager
def daemon(*flags: str, data: Path | None = None, start: bool = True, program: Path | None = None) -> Iterator[Kip]:
    """A daemon of its own with an empty data directory; at the end nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="kip-test-") as temp:
        kip = Kip(data or Path(temp) / "data", flags=flags)
        kip.program = program or kip.program
        try:
            if start:
                if data is None:
                    leftovers.want_instance(kip.data)
                    BASES.give(kip.data)
                kip.up()
            yield kip
            kip.down(BASES.keep if data is None else None)
        except BaseException:
            kip.expected = [""]
            leftovers.force_down(kip)
            raise


def cpu_ns(pids: Sequence[int]) -> dict[int, int]:
    """CPU time of each with all its threads, ended ones too: the kernel's clock of a process (clock_getcpuclockid(3)).
    A process that has ended is left out."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            found[pid] = time.clock_gettime_ns((~pid << 3) | 2)
    return found
