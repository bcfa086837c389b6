"""A hibernation that fails harms no proc: the pager stopped in the middle, starved, or asked by a client that has given up.
(Killed, and failing at each of its steps: crates/pager/tests/crash.rs.)"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import servers
from harness.clients import Lines
from harness.kip import Kip, Proc

THREADS = 1024


def run(kip: Kip, server: servers.Server, tmp_path: Path, *flags: str) -> Proc:
    return kip.run(server.name, server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)


def pager_pid(kip: Kip) -> int:
    return kip.info()["pager_pid"]


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
        pager = pager_pid(kip)
        os.kill(pager, signal.SIGSTOP)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gives_up:
            gives_up.connect(str(kip.data / "run/pager.sock"))
            gives_up.send(json.dumps(order).encode())
        os.kill(pager, signal.SIGCONT)
        client.check(tolerance_ms=5000)
    proc.hibernate()
    client.check()


# promise hibernation: the pager stopped in the middle, starved, or asked by a client that has given
#   up: the program goes on
# held by: this, `tests/test_harmless.py::test_a_starved_pager`,
#   `tests/test_harmless.py::test_a_client_that_has_given_up`
@pytest.mark.parametrize("way", ["blocked", "held"])
def test_the_pager_stopped_in_the_middle(kip: Kip, tmp_path: Path, way: str) -> None:
    proc, dice = run(kip, servers.torture(), tmp_path, "--hibernate", way), random.Random(way)
    client = Lines(proc.port())
    client.ask("eat 20")
    for _ in range(10):
        asking = threading.Thread(target=kip.cli, args=["sleep", proc.name, "--to", "hibernated"], kwargs={"check": False})
        asking.start()
        time.sleep(dice.random() * 0.1)
        pager = pager_pid(kip)
        os.kill(pager, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(pager, signal.SIGCONT)
        asking.join()
        client.check(tolerance_ms=5000)
    assert proc.inspect()["restarts"] == 0


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
        for _ in range(5):
            for proc in (churning, torture):
                kip.cli("sleep", proc.name, "--to", "hibernated", check=False, timeout=120)
            assert churner.ask("look") == "ok"
            client.check(tolerance_ms=20000)
    assert churning.inspect()["pids"] == pids["churn"], "the same ones"
    assert torture.inspect()["pids"][0] == pids["torture"][0], "and its pid 1: a look at it ends one child and forks the next"
    assert not churning.inspect()["restarts"] and not torture.inspect()["restarts"]
    assert churner.ask("look") == "ok"
