"""A sleeper comes back although the machine changed under it: an upgraded base file, a damaged snapshot, dead helpers."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import programs, servers
from harness.clients import Http, Lines
from harness.kip import Kip
from harness.wait import wait_for

# The base of every proc is the host's own /usr, so the file that is upgraded has to lie there.
INSTALLED = Path(f"/usr/local/lib/kip-test-{os.getpid()}")


@pytest.fixture
def installed() -> Iterator[Path]:
    INSTALLED.mkdir()
    program = INSTALLED / "torture"
    shutil.copy(programs.c_program("torture"), program)
    yield program
    shutil.rmtree(INSTALLED)


def upgrade(program: Path) -> None:
    """As a package manager does it: a new file takes the old one's name."""
    new = program.with_suffix(".new")
    shutil.copy(programs.c_program("torture", "-static"), new)
    new.rename(program)


def test_a_mapped_file_is_upgraded_under_a_sleeper(kip: Kip, installed: Path) -> None:
    """It wakes with the file it had, and again after its next sleep; a new proc gets the new one."""
    proc = kip.run("old", [str(installed), "7000"], ports=("7000",))
    client = Lines(proc.port())
    client.check()
    size = installed.stat().st_size
    proc.sleep()
    upgrade(installed)
    assert installed.stat().st_size != size
    for _ in range(3):
        client.check()
        assert proc.inspect()["last_wake"]["from"] == "parked"
        inside = int(proc.exec("stat", "-c", "%s", str(installed)).stdout)
        assert inside == size, "the program's own file has changed under it"
        proc.sleep()
    client.check()
    client.close()
    fresh = kip.run("new", [str(installed), "7000"], ports=("7000",))
    assert int(fresh.exec("stat", "-c", "%s", str(installed)).stdout) == installed.stat().st_size
    fresh.remove()
    proc.remove()


def test_a_client_finds_a_damaged_snapshot(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """The wake is tried again, then the server starts cold on its newest files; the snapshot is kept and it is said."""
    server = servers.lighttpd()
    kip = fresh_kip()
    kip.expected += [r"its snapshot cannot be used"]
    proc = kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    port = proc.port()
    generation = proc.sleep()["generation"]
    directory = kip.data / "procs" / "web"
    pages = max((directory / f"gen-{generation}").glob("pages-*.img"), key=lambda p: p.stat().st_size)
    damaged = bytearray(pages.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    pages.write_bytes(damaged)
    try:
        Http(port, timeout=20).get("/page.html")
    except OSError:
        pass  # this client's connection went with the snapshot
    proc.wait_state("running", 30)
    wait_for("the cold start serves", lambda: served(port), 30)
    assert (directory / f"failed-gen-{generation}" / pages.name).read_bytes() == damaged
    assert "cold-start" in [event["kind"] for event in kip.events()]


def served(port: int) -> bool:
    try:
        return Http(port, timeout=10).get("/page.html") == servers.PAGE
    except OSError:
        return False


def test_launcher_is_killed(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """Another takes its place; procs do not notice."""
    server = servers.lighttpd()
    kip = fresh_kip()
    kip.expected += [r"kip-launch has died"]
    proc = kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    assert kip.daemon
    for pid in children(kip.daemon.pid, "kip-launch"):
        os.kill(pid, signal.SIGKILL)
    wait_for("another launcher runs", lambda: children(kip.daemon.pid, "kip-launch"), 30)
    assert Http(proc.port()).get("/page.html") == servers.PAGE
    wait_for("it is used", lambda: kip.cli("exec", "web", "--", "true", check=False).returncode == 0, 30)
    proc.sleep()
    assert Http(proc.port()).get("/page.html") == servers.PAGE


def test_idle_helpers_are_killed(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """A wake that finds its waiting helper dead takes another one."""
    server = servers.lighttpd()
    kip = fresh_kip()
    kip.expected += [r"helper"]
    proc = kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    proc.sleep()
    assert kip.daemon
    for pid in children(kip.daemon.pid, "criu-helper"):
        os.kill(pid, signal.SIGKILL)
    assert Http(proc.port()).get("/page.html") == servers.PAGE
    assert proc.inspect()["last_wake"]["from"] == "parked"


def children(pid: int, comm: str) -> list[int]:
    """Those of that name that live."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                name, state = Path(f"/proc/{child}/comm").read_text().strip(), Path(f"/proc/{child}/stat").read_text()
            except OSError:
                continue
            if name == comm and state.rsplit(")", 1)[1].split()[0] != "Z":
                found.append(int(child))
    return found
