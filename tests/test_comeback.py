"""Whatever is put away comes back: programs with odd descriptors, filters, sessions and trees (programs/odd.py), each way of waking
broken in turn. What could not come back is not put away, or not as far, and `kip why` says why; where a wake fails all the same the
program starts anew on its newest files, and a client that connects is answered."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import programs, logged
from harness.broken import BrittleCriu, break_plan, plan_of, files_of
from harness.clients import Lines
from harness.kip import Kip, Proc
from harness.rows import one_in
from harness.wait import wait_for

# What sleeps in every tier, what only this machine can wake, and what does not sleep, with what is
# said of it.
EVERYWHERE = ["pidfd", "pidfds", "watcher", "seccomp", "strict", "apart", "proc", "proc_gone", "daemon", "group", "adopted", "memory_mapping", "corked"]
SESSION = r"process \d+ \(python3\) is in a session that was begun elsewhere"
MEMORY = r"process 2 \(memfd:program\) runs a program that is a memory file, memfd_create\(2\)"
ONLY_HERE = {
    "subreaper": SESSION,
    "before_setsid": SESSION,
    "memory_program": MEMORY,
    "memory_program_open": MEMORY,
    "passing": r"a descriptor is on its way between two sockets, SCM_RIGHTS of unix\(7\)",
}
AWAKE = {
    "zombie_leader": r"the first thread of process \d+ \(python3\) has ended while others of it go on, pthread_exit\(3\)",
    "waiting": r"a connection to a listening unix socket that waits to be accepted",
}
NATIVE = {"pidfd", "pidfds", "watcher", "seccomp", "strict", "apart", "daemon", "group", "adopted", "memory_mapping", "corked", *ONLY_HERE}


def run(kip: Kip, tmp_path: Path, kind: str) -> Proc:
    tar = programs.tarball(tmp_path / f"{kind}.tar", {"srv/odd.py": programs.SOURCES / "odd.py"})
    name = kind.replace("_", "-")
    proc = kip.run(name, ["/usr/bin/python3", "/srv/odd.py", kind], ports=["7000"], tar=tar)
    assert said(proc) == "ok"
    return proc


def said(proc: Proc, timeout: float = 60) -> str:
    with socket.create_connection(("127.0.0.1", proc.port()), timeout=timeout) as client:
        return client.makefile().readline().strip()


def answers(proc: Proc) -> None:
    """Once it answers: what is reached is made anew meanwhile."""

    def ask() -> bool:
        try:
            return said(proc) == "ok"
        except OSError:
            return False

    wait_for("it answers", ask, 120)


def cold_starts(kip: Kip, proc: Proc) -> list[str]:
    return [e["detail"] for e in kip.events() if e["kind"] == "cold-start" and e["name"] == proc.name]


def refused(kip: Kip, proc: Proc, tier: str, words: str) -> None:
    """It says so, is what it was before, and `kip why` goes on saying it."""
    message = kip.refused("sleep", proc.name, "--to", tier)
    assert re.search(words, message), message
    view = kip.json("why", proc.name)
    assert any(re.search(words, line) for line in view["cannot_sleep"]) and view["cannot_sleep_at_ms"], view
    told = kip.cli("why", proc.name).stdout
    assert re.search(("stays parked +" if view["state"] == "parked" else "cannot sleep +") + ".*" + words, told), told


# promise waking: what is put away comes back: pidfds (live, ended, shared, watched), system call
#   filters of the program's own, descriptors of /proc, daemons, groups and sessions whose leader
#   has ended, below other processes that take orphans too, programs and mappings that are memory
#   files; natively and by CRIU, from every tier that they go to
# held by: this, `tests/test_comeback.py::test_after_a_reboot`,
#   `kip_checkpoint::plan::filters::tests::what_cannot_be_set_again_is_refused`
# promise waking: what neither way brings back is not put away, what only this machine can wake is
#   not archived; `kip why` says what it is
# held by: this,
#   `kip_criu_images::comeback::tests::only_children_of_pid_1_may_be_in_a_session_that_none_above_leads`
@pytest.mark.parametrize("flags", [(), ("--only-criu",)], ids=["by-plan", "by-criu"])
@pytest.mark.parametrize("kind", one_in(2, [*EVERYWHERE, *ONLY_HERE, *AWAKE]))
def test_every_oddity(fresh_kip: Callable[..., Kip], store: Path, tmp_path: Path, kind: str, flags: tuple[str, ...]) -> None:
    kip = fresh_kip("--store", str(store), *flags)
    proc = run(kip, tmp_path, kind)
    never = AWAKE.get(kind) or (ONLY_HERE.get(kind) if flags else None)
    for _ in range(2):
        if never:
            refused(kip, proc, "parked", never)
        else:
            proc.sleep()
        assert said(proc) == "ok"
        assert never or proc.rebuilt() == (kind in NATIVE and not flags)
        if never:
            assert proc.state == "running"
        elif kind in ONLY_HERE:
            proc.sleep()
            refused(kip, proc, "archived", "it could not be woken from the store: .*" + ONLY_HERE[kind])
            assert proc.state == "parked"
        else:
            proc.archive()
        assert said(proc) == "ok"
    assert cold_starts(kip, proc) == []


def test_a_memory_file_in_flight(kip: Kip) -> None:
    """Made again it would be another one than what is on its way."""
    flags = ["-v", f"{programs.SOURCES / 'lines.py'}:/srv/lines.py:ro"]
    proc = kip.run("passed-memory", ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=[8080], flags=flags)
    client = Lines(proc.port())
    make = "import mmap; ours, theirs = socket.socketpair(); a = os.memfd_create('n'); os.ftruncate(a, 4096); m = mmap.mmap(a, 4096)"
    assert client.ask(f"{make}; socket.send_fds(ours, [b'x'], [a])") == "None"
    refused(kip, proc, "parked", ONLY_HERE["passing"])
    assert client.ask("(m.__setitem__(0, 7), os.pread(socket.recv_fds(theirs, 1, 1)[1][0], 1, 0))") == "(None, b'\\x07')"
    proc.sleep()
    assert client.ask("(m[0], os.pread(a, 1, 0))") == "(7, b'\\x07')" and proc.rebuilt()


@pytest.mark.parametrize("kind", ["pidfds", "group", "seccomp", "proc"])
def test_after_a_reboot(fresh_kip: Callable[..., Kip], tmp_path: Path, kind: str) -> None:
    """Nothing is held any more: CRIU makes all of it."""
    kip = fresh_kip()
    kip.expected += logged.KEEPER_GONE
    proc = run(kip, tmp_path, kind)
    proc.sleep()
    kip.reboot()
    answers(proc)
    assert not proc.rebuilt() and cold_starts(kip, proc) == []


def test_what_the_machine_held_is_gone(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    kip = fresh_kip()
    kip.expected += [*logged.KEEPER_GONE, logged.SNAPSHOT_UNUSABLE]
    proc = run(kip, tmp_path, "subreaper")
    proc.sleep()
    kip.reboot()
    answers(proc)
    [line] = cold_starts(kip, proc)
    assert "kernel objects that Kip held for the sleeping proc are lost" in line and "begun elsewhere" in line, line
    assert kip.json("why", proc.name)["fell_back"] == line


# Each way of waking broken


@pytest.fixture
def criu(tmp_path: Path) -> BrittleCriu:
    return BrittleCriu(tmp_path)


@pytest.fixture
def brittle(fresh_kip: Callable[..., Kip], store: Path, criu: BrittleCriu) -> Kip:
    return fresh_kip("--store", str(store), "--criu", str(criu.program))


def test_criu_hangs(brittle: Kip, criu: BrittleCriu, tmp_path: Path) -> None:
    """A restore that says nothing any more is ended, and nothing of it is left; what waits for it is answered."""
    kip = brittle
    kip.expected += [logged.SNAPSHOT_UNUSABLE, logged.NO_HELPER]
    proc = run(kip, tmp_path, "proc")
    proc.sleep()
    for pid in criu.helpers():
        os.kill(pid, signal.SIGSTOP)
    answers(proc)
    [line] = cold_starts(kip, proc)
    assert "CRIU has said nothing for 20 s" in line, line
    assert [pid for pid in criu.helpers() if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"] == []
    proc.sleep()
    assert said(proc) == "ok"


def test_by_request_a_broken_engine_is_only_said(brittle: Kip, tmp_path: Path) -> None:
    """So that the user can put it right first: nothing has begun anew, and a plan that failed once is tried again."""
    proc = run(brittle, tmp_path, "subreaper")
    files = files_of(proc)
    proc.sleep()
    plan = plan_of(proc)
    whole = plan.read_bytes()
    break_plan(proc, files)
    assert "could not open a file" in brittle.refused("wake", proc.name)
    assert proc.state == "parked" and cold_starts(brittle, proc) == []
    plan.write_bytes(whole)
    assert said(proc) == "ok" and proc.rebuilt()


def test_a_policy_that_refuses(fresh_kip: Callable[..., Kip], store: Path, tmp_path: Path) -> None:
    """A snapshot from the store asks for more than it may have: `kip wake` says so; a client that connects is answered by a
    cold start."""
    kip = fresh_kip("--store", str(store))
    kip.expected += [r"WARN.*its snapshot cannot be used"]
    proc = run(kip, tmp_path, "plain")
    proc.archive()
    kip.kill()
    done = subprocess.run([programs.example("tamper"), kip.data, store, proc.name, "capabilities"],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    kip.up()
    message = kip.refused("wake", proc.name)
    assert "has capabilities 0x" in message and f"`kip stop {proc.name}` and `kip start {proc.name}` start it cold" in message
    assert proc.state == "archived" and cold_starts(kip, proc) == []
    answers(proc)
    [line] = cold_starts(kip, proc)
    assert "its images are refused" in line and kip.json("why", proc.name)["fell_back"] == line
