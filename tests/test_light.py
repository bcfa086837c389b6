"""Light procs (`--sandbox light`): what can be done from inside, call by call, and their sleep in each tier."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import programs
from harness.kip import Kip, Proc
from harness.wait import wait_for

LIGHT = ["--sandbox", "light"]
DOCUMENT = programs.SOURCES.parents[1] / "docs" / "light.md"
TIERS: dict[str, Callable[[Proc], object]] = {"hibernated": Proc.hibernate, "parked": Proc.sleep, "archived": Proc.archive}
# From here on what is refused is ENOSYS.
MODERN = 424
# The kernel's own, for probes: no filter is asked.
PROBES = {335, 336}


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = programs.c_program("light", "-static")
    return programs.tarball(tmp_path_factory.mktemp("tar") / "light.tar", {"srv/light": program})


def answers(proc: Proc, *words: str) -> dict[str, str]:
    """What the program says: a name and an answer in each line."""
    return dict(line.rsplit(" ", 1) for line in proc.exec("/srv/light", *words).stdout.splitlines())


@contextmanager
def served(kip: Kip, name: str, tar: Path, *flags: str) -> Iterator[Proc]:
    """The program as it waits for lines, with its standard input open."""
    kip.cli("run", "--name", name, "--tar", tar, *LIGHT, "-d", "-i", "--never-sleep", *flags, "--", "/srv/light")
    proc = Proc(kip, name)
    wait_for("it is ready", lambda: "ready" in proc.logs() or None)
    yield proc
    proc.remove()


def ask(proc: Proc, number: int) -> None:
    """Types a line, and reads what the program says to it."""
    words = [proc.kip.program, "--data", proc.kip.data, "attach", proc.name]
    client = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert client.stdin and client.stdout
    try:
        client.stdin.write(f"word-{number}\n")
        client.stdin.flush()
        wait_for(f"line {number} is answered", lambda: f"line {number} word-{number}" in proc.logs() or None)
    finally:
        client.kill()
        client.communicate()
    assert "broken" not in proc.logs()


def sealed(proc: Proc) -> None:
    """Its sandbox is as closed as at its start."""
    found = answers(proc, "files")
    assert {name: found[name] for name in ("create-root", "write-usr", "create-tmp")} == dict.fromkeys(
        ("create-root", "write-usr", "create-tmp"), "EROFS"
    )
    assert proc.exec("/srv/light", "limits").stdout.count("socket-inet EPERM") == 1
    init = min(proc.inspect()["pids"])
    for pid in proc.inspect()["pids"]:
        status = Path(f"/proc/{pid}/status").read_text()
        assert re.findall(r"^Cap(?:Prm|Eff|Bnd|Amb):\t(\w+)$", status, re.M) == ["0" * 16] * 4, status
        assert re.search(r"^Seccomp:\t2$", status, re.M) and re.search(r"^NoNewPrivs:\t1$", status, re.M), status
    mounts = {line.split()[4]: line for line in Path(f"/proc/{init}/mountinfo").read_text().splitlines()}
    assert set(mounts) == {"/", "/usr", "/proc", "/run/kip/runtime"}, mounts
    assert all(mounts[at].split()[5].startswith("ro,") for at in ("/", "/usr", "/run/kip/runtime")), mounts
    assert "subset=pid" in mounts["/proc"], mounts


# promise sandbox: `--sandbox light`: each system call is refused from inside but those of the table
#   in docs/light.md, which are not
def test_calls_are_those_of_the_table(kip: Kip, tar: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| ([^|]*) \|", DOCUMENT.read_text(), re.M)
    assert len(rows) > 60
    whole = {int(number) for _, number, limit in rows if not limit.strip()}
    limited = {int(number) for _, number, limit in rows if limit.strip()}
    proc = kip.run("calls", ["sleep", "100000"], tar=tar, flags=LIGHT)
    said = {int(name.split()[1]): answer for name, answer in answers(proc, "calls").items()}
    refused = {number for number, answer in said.items() if answer == "EPERM" or (answer == "ENOSYS" and number >= MODERN)}
    assert set(said) == set(range(480))
    assert set(said) - refused - PROBES == whole, "what the table has as a whole, and nothing else"
    # With arguments that mean nothing these refuse, too; what they allow is the next test's.
    assert limited <= refused
    proc.remove()


# promise sandbox: `--sandbox light`: of limited calls all is refused but what the table says
def test_limited_calls(kip: Kip, tar: Path) -> None:
    proc = kip.run("limits", ["sleep", "100000"], tar=tar, flags=LIGHT)
    found = answers(proc, "limits")
    allowed = {"socket-unix-stream", "socketpair-stream", "connect-runtime", "thread", "set-name", "dup-descriptor", "bytes-waiting"}
    assert {name for name, answer in found.items() if answer == "ok"} == allowed, found
    assert {answer for name, answer in found.items() if name not in allowed} == {"EPERM"}, found
    # Of a full proc most of them are allowed: the program can do them.
    full = kip.run("full", ["sleep", "100000"], tar=tar)
    usual = answers(full, "limits")
    assert {"socket-inet", "bind-abstract", "listen", "socket-unix-datagram"} <= {n for n, answer in usual.items() if answer == "ok"}
    proc.remove()
    full.remove()


# promise sandbox: `--sandbox light`: from inside there are no files of the host or of other procs,
#   nothing of other processes, and no way to change the sandbox
def test_what_can_be_reached(kip: Kip, tar: Path) -> None:
    own = Path("/root", f"kip-light-{os.getpid()}")
    own.write_text(secrets.token_hex(8))
    try:
        other = kip.run("other", ["sleep", "100000"], tar=tar, flags=LIGHT)
        proc = kip.run("files", ["sleep", "100000"], tar=tar, flags=LIGHT)
        outside = [str(own), f"{kip.data}/procs/other/spec.json", f"/proc/{other.inspect()['pids'][0]}/status", "/run/docker.sock"]
        found = answers(proc, "files", *outside)
        reached = {name for name, answer in found.items() if answer == "ok"}
        # 1 is the first process of its own pid namespace.
        assert reached == {"own-program", "null", "random", "proc-self", "proc-1"}, found
        # The positive control: a file that is there.
        assert proc.exec("/srv/light", "files", "/etc/passwd").stdout.count("/etc/passwd ok") == 1
        sealed(proc)
        ids = {Path(f"/proc/{pid}").stat().st_uid for pid in proc.inspect()["pids"]}
        assert len(ids) == 1 and min(ids) >= 0x20000000
        nets = [os.readlink(f"/proc/{one.inspect()['pids'][0]}/ns/net") for one in (proc, other)]
        assert nets[0] == nets[1] != os.readlink("/proc/self/ns/net")
        other.remove()
        proc.remove()
    finally:
        own.unlink()


# promise sandbox: `--sandbox light`: what it has not is refused in one line, and nothing is left
@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--port", "80"], "ports"),
        (["--network", "street"], "a network"),
        (["--egress", "none"], "egress rules"),
        (["-v", "light-volume:/data"], "volumes"),
        (["--cap-add", "CHOWN"], "capabilities"),
        (["--allow-setuid"], "setuid programs"),
        (["-t", "-d"], "a terminal"),
        (["--disk", "64M"], "a limit of disk space"),
    ],
)
def test_contradictions_are_refused(kip: Kip, flags: list[str], what: str) -> None:
    line = kip.refused("run", "--name", "both", *LIGHT, *flags, "--", "sleep", "1")
    assert "a light sandbox has" in line and what in line, line
    assert "both" not in kip.names()


# promise sandbox: `--sandbox light`: it sleeps in each tier and wakes by each engine with all that
#   it had, into a sandbox as closed as before
@pytest.mark.parametrize("engine", ["native", "criu"])
def test_it_sleeps_in_each_tier(fresh_kip: Callable[..., Kip], tar: Path, engine: str) -> None:
    kip = fresh_kip(*(["--only-criu"] if engine == "criu" else []))
    with served(kip, "line", tar) as proc:
        number = 0
        for tier in TIERS:
            TIERS[tier](proc)
            number += 1
            ask(proc, number)
            sealed(proc)
            woken = proc.inspect()["last_wake"]
            assert woken["from"] == tier
            steps = [step["name"] for step in woken["steps"]]
            assert "not rebuilt" not in steps and ("helper" in steps) == (engine == "criu" and tier != "hibernated"), steps


# promise sandbox: `--sandbox light`: it goes on through a kill of the daemon, running and asleep,
#   and through a reboot of the machine
def test_it_outlives_daemon_and_machine(fresh_kip: Callable[..., Kip], tar: Path) -> None:
    kip = fresh_kip()
    with served(kip, "line", tar) as proc:
        number = 0
        for before in (lambda: None, *(lambda down=down: down(proc) for down in TIERS.values())):
            before()
            tier = proc.inspect()["tier"]
            kip.kill()
            kip.up()
            assert proc.inspect()["tier"] == tier
            number += 1
            ask(proc, number)
        sealed(proc)
        proc.sleep()
        kip.reboot()
        ask(proc, number + 1)
        sealed(proc)


# promise sandbox: `--sandbox light`: a clone is a light proc, too, and goes on where its source was
@pytest.mark.parametrize("method", ["hot", "warm"])
def test_clones(kip: Kip, tar: Path, method: str) -> None:
    with served(kip, "source", tar) as source:
        ask(source, 1)
        if method == "warm":
            kip.cli("template", "take", "source")
        kip.cli("clone", "source", "copy", f"--{method}")
        copy = Proc(kip, "copy")
        ask(copy, 2)
        sealed(copy)
        ask(source, 2)
        copy.remove()


# promise sandbox: `--sandbox light`: an update gives a proc nothing that its sandbox has not
def test_an_update_stays_within_the_sandbox(kip: Kip, tar: Path) -> None:
    with served(kip, "updated", tar) as proc:
        line = kip.refused("update", "updated", "--port", "8080")
        assert line == "kip: updated stays as it is: a light sandbox has no network, and ports cannot be had in it: leave out one of the two", line
        assert proc.inspect()["ports"] == []
