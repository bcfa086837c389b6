"""A hibernation that fails harms no proc, and is said: the pager stopped in the middle, starved, without files, or asked by a client
that has given up. (Killed, and failing at each of its steps: crates/pager/tests/crash.rs.)"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from harness import servers
from harness.clients import Lines
from harness.kip import Kip, Proc, one_line_refusal
from harness.wait import wait_for

THREADS = 1024


def run(kip: Kip, server: servers.Server, tmp_path: Path, *flags: str) -> Proc:
    return kip.run(server.name, server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)


def refused(kip: Kip, proc: Proc, trouble: AbstractContextManager[None], timeout: float = 60) -> str:
    """Asks for the sleep in the middle of trouble. The reason of a refusal, which is one clear line and an event; or nothing."""
    with trouble:
        done = kip.cli("sleep", proc.name, "--to", "hibernated", check=False, timeout=timeout)
    if done.returncode == 0:
        return ""
    line, said = one_line_refusal(done), f"{proc.name} cannot hibernate: "
    assert said in line, line
    events = [event["detail"] for event in kip.events() if event["kind"] == "refused" and event["name"] == proc.name]
    assert events and line.endswith(events[-1]), (line, events)
    return line.split(said)[1]


def runs_on(kip: Kip, proc: Proc, reason: str) -> None:
    """Right after a refusal: `kip why` knows of it."""
    view = proc.inspect()
    assert (view["state"], view["restarts"]) == ("running", 0), view
    assert kip.json("why", proc.name)["cannot_sleep"] == [reason]


@contextmanager
def stopped(pager: int, after: float, stands: float = 0.3) -> Iterator[None]:
    """After that many seconds the pager stands still for a while."""

    def stop() -> None:
        time.sleep(after)
        os.kill(pager, signal.SIGSTOP)
        time.sleep(stands)
        os.kill(pager, signal.SIGCONT)

    stopping = threading.Thread(target=stop)
    stopping.start()
    yield
    stopping.join()


@contextmanager
def no_more_files(pager: int, most: int, lifted: list[bool]) -> Iterator[None]:
    """The pager may have no descriptor above that, for a second at most: without one for a child it waits. Says whether
    the limit was lifted for that."""
    soft, hard = resource.prlimit(pager, resource.RLIMIT_NOFILE)
    ends = threading.Timer(1, resource.prlimit, (pager, resource.RLIMIT_NOFILE, (soft, hard)))
    resource.prlimit(pager, resource.RLIMIT_NOFILE, (most + 1, hard))
    ends.start()
    yield
    lifted.append(ends.finished.is_set())
    ends.cancel()
    ends.join()
    resource.prlimit(pager, resource.RLIMIT_NOFILE, (soft, hard))


def pager_pid(kip: Kip) -> int:
    return kip.info()["pager_pid"]


def sleeper(tid: str) -> dict[str, int]:
    """A thread as an order to hold it names it."""
    switches = re.findall(r"ctxt_switches:\s+(\d+)", Path(f"/proc/{tid}/status").read_text())
    return {"tid": int(tid), "switches": sum(map(int, switches))}


@pytest.mark.parametrize("way", ["blocked", "held"])
def test_a_client_that_has_given_up(kip: Kip, tmp_path: Path, way: str) -> None:
    """An order that is carried out after its client has gone, as by a pager that stood still: no daemon would wake the proc."""
    proc = run(kip, servers.torture(), tmp_path)
    client = Lines(proc.port())
    proc.hibernate()
    client.check()
    cgroup = Path(f"/proc/{proc.inspect()['pids'][0]}/cgroup").read_text().strip().split(":")[2]
    order = {
        "do": "hibernate", "name": proc.name, "number": 1, "directory": str(kip.data / "procs" / proc.name / "pager"),
        "processes": f"/sys/fs/cgroup{cgroup}/cgroup.procs", "turn": 1, "hold": way == "held", "prefetch": True,
        "drop_files": True, "watch": [],
    }  # fmt: skip
    for _ in range(4):
        order["slept"] = [sleeper(tid) for pid in proc.inspect()["pids"] for tid in os.listdir(f"/proc/{pid}/task")]
        pager = pager_pid(kip)
        os.kill(pager, signal.SIGSTOP)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gives_up:
            gives_up.connect(str(kip.data / "run/pager.sock"))
            gives_up.send(json.dumps(order).encode())
        os.kill(pager, signal.SIGCONT)
        client.check(tolerance_ms=5000)
    proc.hibernate()
    client.check()


# promise hibernation: the pager stopped in the middle, starved, failing at each file that it opens,
#   or asked by a client that has given up: the program goes on and answers; a refusal is one line,
#   an event and the reason in `kip why`
# held by: this, `tests/test_harmless.py::test_a_pager_that_fails_at_each_file`,
#   `tests/test_harmless.py::test_a_starved_pager`,
#   `tests/test_harmless.py::test_a_client_that_has_given_up`
@pytest.mark.parametrize("way", ["blocked", "held"])
def test_the_pager_stopped_in_the_middle(kip: Kip, tmp_path: Path, way: str) -> None:
    proc, dice = run(kip, servers.torture(), tmp_path, "--hibernate", way), random.Random(way)
    client = Lines(proc.port())
    client.ask("eat 20")
    for _ in range(10):
        if reason := refused(kip, proc, stopped(pager_pid(kip), dice.random() * 0.1)):
            runs_on(kip, proc, reason)
        client.check(tolerance_ms=5000)
    assert proc.inspect()["restarts"] == 0


@pytest.mark.parametrize("way", ["blocked", "held"])
def test_a_pager_that_fails_at_each_file(kip: Kip, tmp_path: Path, way: str) -> None:
    """It may open one file more each time, so that each that it opens is once the one that fails, until none does."""
    kip.expected += [r"WARN.*not hibernated.*Too many open files"]
    proc = run(kip, servers.torture(), tmp_path, "--hibernate", way)
    client = Lines(proc.port())
    client.ask("eat 20")
    client.check()
    pager, pids, answers, kinds = pager_pid(kip), proc.inspect()["pids"], [], set()
    there = max(int(fd.name) for fd in Path(f"/proc/{pager}/fd").iterdir())
    # Numbers below the highest may be free, and those are taken first.
    first = next(n for n in itertools.count() if not Path(f"/proc/{pager}/fd/{n}").exists())
    lifted: list[bool] = []
    for most in range(first, there + 40):
        answers.append(reason := refused(kip, proc, no_more_files(pager, most, lifted)))
        if (kind := re.sub(r"\d+", "", reason)) and kind not in kinds:
            runs_on(kip, proc, reason)
            kinds.add(kind)
        assert client.ask(f"echo {most}") == str(most)
        # One that has waited until there were files again tells nothing.
        if list(zip(answers, lifted, strict=True))[-2:] == [("", False)] * 2:
            break
    client.check(tolerance_ms=5000)
    assert len(kinds) >= 3 and answers[-2:] == ["", ""], answers
    proc.hibernate()
    client.check()
    assert pager_pid(kip) == pager and proc.inspect()["pids"][0] == pids[0]


# promise hibernation: a pager that has no descriptor left for a request refuses it at once, in
#   words, and spends no CPU time meanwhile
def test_a_pager_without_a_descriptor(kip: Kip, tmp_path: Path) -> None:
    kip.expected += [r"WARN.*a client is refused.*Too many open files"]
    proc = run(kip, servers.torture(), tmp_path)
    client, pager = Lines(proc.port()), pager_pid(kip)
    client.check()
    soft, hard = resource.prlimit(pager, resource.RLIMIT_NOFILE)
    with ExitStack() as stack:

        def connect() -> socket.socket:
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.connect(str(kip.data / "run/pager.sock"))
            return silent

        # Its clients have all numbers below the limit.
        used = {int(fd.name) for fd in Path(f"/proc/{pager}/fd").iterdir()}
        for _ in range(20 + max(used) - len(used)):
            connect()
        wait_for("they are taken", lambda: len(list(Path(f"/proc/{pager}/fd").iterdir())) >= 20 + max(used))
        first_free = next(n for n in itertools.count() if not Path(f"/proc/{pager}/fd/{n}").exists())
        resource.prlimit(pager, resource.RLIMIT_NOFILE, (first_free, hard))
        began = time.monotonic()
        reason = refused(kip, proc, nullcontext(), timeout=20)
        assert time.monotonic() - began < 5
        assert reason.startswith("the pager has no file descriptor left for another client: Too many open files"), reason
        runs_on(kip, proc, reason)
        # A client that only connects is refused as well, after a moment in which it may ask.
        assert b"no file descriptor left" in connect().recv(1 << 16)
        before = cpu_s(pager)
        time.sleep(1)
        assert cpu_s(pager) - before < 0.2
        resource.prlimit(pager, resource.RLIMIT_NOFILE, (soft, hard))
    proc.hibernate()
    client.check()
    assert pager_pid(kip) == pager


def cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def busy(count: int) -> Iterator[None]:
    def spin() -> None:
        while True:
            pass

    spinners = [multiprocessing.Process(target=spin, daemon=True) for _ in range(count)]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


@pytest.mark.measures
def test_a_starved_pager(kip: Kip, tmp_path: Path) -> None:
    """Threads that come and go, and a pager that hardly gets a processor: what cannot be put to sleep goes on."""
    kip.expected += [r"WARN.*not hibernated"]
    server = servers.churn(THREADS)
    churning, torture = run(kip, server, tmp_path), run(kip, servers.torture(), tmp_path)
    churner, client = Lines(churning.port(), timeout=60), Lines(torture.port(), timeout=60)
    pids = {name: proc.inspect()["pids"] for name, proc in (("churn", churning), ("torture", torture))}
    for task in Path(f"/proc/{pager_pid(kip)}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
    with busy(2 * (os.cpu_count() or 1)):
        for _ in range(2):
            for proc in (churning, torture):
                if reason := refused(kip, proc, nullcontext(), timeout=120):
                    runs_on(kip, proc, reason)
            assert churner.ask("look") == "ok"
            client.check(tolerance_ms=20000)
    assert churning.inspect()["pids"] == pids["churn"], "the same ones"
    assert torture.inspect()["pids"][0] == pids["torture"][0], "and its pid 1: a look at it ends one child and forks the next"
    assert not churning.inspect()["restarts"] and not torture.inspect()["restarts"]
    assert churner.ask("look") == "ok"


# promise hibernation: what the kernel touches for calls that begin anew wakes nothing, also if the
#   pager's threads that serve faults hardly get a processor
@pytest.mark.measures
def test_starved_faults_of_the_way_back(kip: Kip) -> None:
    """Of processes of one thread and of many, which stand in calls whose arguments are in memory."""
    waits = "import threading, time\nfor _ in range({}): threading.Thread(target=time.sleep, args=(1000,)).start()\ntime.sleep(1000)"
    procs = [kip.run(f"waits-{n}", ["/usr/bin/python3", "-c", waits.format(n)], flags=("--idle", "1h")) for n in (0, 30)]
    time.sleep(2)
    for task in Path(f"/proc/{pager_pid(kip)}/task").iterdir():
        if (task / "comm").read_text().startswith("faults"):
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
    woken = {}
    with busy(2 * (os.cpu_count() or 1)):
        for round in range(8):
            for proc in procs:
                proc.hibernate()
                time.sleep(0.3)
                woken[proc.name, round] = [e["detail"] for e in kip.events() if e["name"] == proc.name and e["kind"] == "woken"][round:]
                kip.cli("wake", proc.name)
    assert not any(woken.values()), woken
