"""Programs of which `kip profiles` says that they bear a sleep in which their clock stands: each is put through one."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.kip import Kip, Proc, binary
from harness.profiled import CASES, Case, open_to
from harness.rows import rest_in_soak
from harness.wait import wait_for

PARKED_S = 3
BY_NAME = {case.profile: case for case in CASES}
# Of each kind one: workers of a master, one process, threads, sessions, a process for each client.
HERE = {"nginx", "redis", "named", "postgres", "sshd"}


def run(kip: Kip, case: Case, tmp_path: Path, *flags: str) -> Proc:
    server = case.server()
    words = ["--never-sleep", *server.flags, *flags]
    return kip.run(server.name, server.command, ports=server.published, tar=server.tarball(tmp_path), flags=words)


def word(proc: Proc) -> str | None:
    return proc.kip.json("why", proc.name)["clock"]


def table() -> list[dict[str, object]]:
    """No daemon is asked."""
    done = subprocess.run([binary(), "profiles", "--json"], capture_output=True, text=True, check=True, timeout=20)
    return json.loads(done.stdout)["profiles"]


def test_the_table() -> None:
    """Each profile has its test here, and each test its profile."""
    assert {profile["name"] for profile in table()} == set(BY_NAME)
    shown = subprocess.run([binary(), "profiles"], capture_output=True, text=True, check=True, timeout=20).stdout
    assert all(name in shown for name in BY_NAME) and "version " in shown


def serves(case: Case, proc: Proc) -> bool:
    """Whether a server that listens has loaded what it serves: BIND listens before its zones are there, and says SERVFAIL."""
    try:
        case.use(proc)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", rest_in_soak(BY_NAME, HERE))
def test_a_program_bears_it(kip: Kip, tmp_path: Path, name: str) -> None:
    """Used, parked for some seconds with its clock standing, used again by a new connection; its own timers go on."""
    case = BY_NAME[name]
    proc = run(kip, case, tmp_path)
    wait_for("it serves", lambda: serves(case, proc), 20)
    wait_for("no connection is open", lambda: word(proc) is not None, 20, every=0.2)
    assert word(proc) == f"the proc's CLOCK_MONOTONIC stands still while it is parked (profile {name})"
    view = proc.sleep()
    assert view["last_sleep"]["suspended"] == f"profile {name}"
    time.sleep(PARKED_S)
    case.use(proc)
    assert proc.state == "running"
    case.beats(proc)


@pytest.fixture
def web(kip: Kip, tmp_path: Path) -> Iterator[Proc]:
    proc = run(kip, BY_NAME["redis"], tmp_path)
    wait_for("it is known", lambda: word(proc) is not None, 20, every=0.2)
    yield proc
    proc.remove()


def test_only_while_no_connection_is_open(web: Proc) -> None:
    with open_to(web, 6379) as client:
        client.sendall(b"CLIENT NO-TOUCH on\r\n")
        client.recv(100)
        assert word(web) is None
        assert web.sleep()["last_sleep"]["suspended"] is None, "its peer may wait for a timer"
        web.wake()
    wait_for("the connection is gone", lambda: word(web) is not None, 20, every=0.2)


def test_a_flag_goes_before_a_profile(kip: Kip, tmp_path: Path) -> None:
    proc = run(kip, BY_NAME["redis"], tmp_path, "--clock", "continue")
    assert word(proc) is None
    assert proc.sleep()["last_sleep"]["suspended"] is None


def test_every_process_is_of_it(web: Proc) -> None:
    """A program that `kip exec` runs in the proc is not known to bear anything."""
    program = subprocess.Popen([web.kip.program, "--data", web.kip.data, "exec", web.name, "--", "sleep", "60"])
    try:
        wait_for("its program runs", lambda: "sleep" in web.exec("sh", "-c", "cat /proc/[0-9]*/comm").stdout, 20)
        assert word(web) is None
    finally:
        program.terminate()
        program.wait(20)
    wait_for("it has ended", lambda: word(web) is not None, 20, every=0.2)
