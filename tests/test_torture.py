"""A program that holds one of everything (programs/torture) and notices when any of it changes by sleeping.

`check` wants: no call returned EINTR or without reason, every byte, lock, offset, option, child, signal in its place."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import servers
from harness.clients import Lines, talking
from harness.kip import Kip, Proc
from harness.wait import wait_for

CYCLES = 20


@pytest.fixture(scope="module", params=["criu", "plan"])
def torture(request: pytest.FixtureRequest, module_kip: Kip, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proc]:
    """With everything, which CRIU restores; and with all but a few things, which Kip's own restorer does."""
    server = servers.torture()
    tar = server.tarball(tmp_path_factory.mktemp("tar"))
    flags = ["--env", servers.ONLY_CRIU] if request.param == "plan" else []
    proc = module_kip.run(f"torture-{request.param}", server.command, ports=server.published, tar=tar, flags=flags)
    yield proc
    proc.remove()


def cycles(torture: Proc, count: int) -> None:
    port = torture.port()
    steady = Lines(port)
    steady.check()
    before = steady.values("stats")
    connections = int(before["connections"])
    for cycle in range(count):
        torture.sleep()
        if cycle % 2:
            client = Lines(port)
            connections += 1
            client.check()
            client.close()
        steady.check()
    after = steady.values("stats")
    assert int(after["connections"]) == connections, "a connection was accepted twice or came from nowhere"
    assert (after["pid"], after["child"]) == (before["pid"], before["child"])
    assert int(after["counter"]) - int(before["counter"]) == int(after["checks"]) - int(before["checks"])
    steady.close()


# promise servers: what the torture program checks holds while it is awake
def test_it_is_right_without_sleeping(torture: Proc) -> None:
    """The positive control: what it checks holds while it is awake."""
    client = Lines(torture.port())
    for _ in range(3):
        client.check()


# promise P2: unmodified programs with threads, forks, orphans, zombies, shared memory, signals,
#   locks
# promise waking: what a plan restores is as before: threads, children, zombies, orphans, sessions,
#   signals that wait, locks, timers, memory
# held by: this, `tests/test_timers.py::test_wakes_for_it` (each natively and by CRIU)
# promise servers: our own, one of everything: memory of every kind, files, locks, bytes in flight,
#   signals, children, no EINTR
# held by: this, `tests/test_torture.py::test_new_memory_is_kept`,
#   `tests/test_torture.py::test_sleeps_without_anything_between`
# promise invariants: 7 no EINTR, lost byte, reset, wrong close, stopped clock
# held by: this, `tests/test_torture.py::test_a_line_in_pieces`,
#   `tests/test_web.py::test_close_sends_fin`, `tests/test_timers.py::test_clocks_go_on`
def test_twenty_cycles(torture: Proc) -> None:
    cycles(torture, CYCLES)
    assert torture.rebuilt() == torture.name.endswith("plan")


# promise P2: static programs
def test_static_program(kip: Kip, tmp_path: Path) -> None:
    """The same without a dynamic linker, which must not be relied on to be there."""
    server = servers.torture(static=True)
    cycles(kip.run(server.name, server.command, ports=server.published, tar=server.tarball(tmp_path)), 5)


def test_sleeps_without_anything_between(torture: Proc) -> None:
    """Parked, woken by `kip wake`, parked again at once: it hardly runs in between."""
    client = Lines(torture.port())
    client.check()
    for _ in range(8):
        torture.sleep()
        torture.wake()
    client.check()


def test_new_memory_is_kept(torture: Proc) -> None:
    client = Lines(torture.port())
    for _ in range(3):
        assert client.ask("eat 20") == "eaten"
        torture.sleep()
        client.check()


# promise waking: a datagram
@pytest.mark.smoke
def test_datagram_wakes(torture: Proc) -> None:
    port = torture.port(proto="udp")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(20)
        s.connect(("127.0.0.1", port))
        for i in range(3):
            torture.sleep()
            s.send(b"datagram %d" % i)
            assert s.recv(100) == b"datagram %d" % i
            assert torture.wait_state("running")["last_wake"]["trigger"].startswith("udp")
    Lines(torture.port()).check()


def test_a_line_in_pieces(torture: Proc) -> None:
    """Bytes that come before, during and after a sleep make one line."""
    client = Lines(torture.port())
    client.socket.sendall(b"echo one ")
    torture.sleep()
    client.socket.sendall(b"two ")
    torture.wait_state("running")
    torture.sleep()
    assert client.ask("three") == "one two three"


# promise parking: it falls asleep under traffic without harm
# held by: this, `kip_engine::park::tests::what_a_program_may_not_have_seen_wakes_it`
def test_clients_while_it_falls_asleep(torture: Proc) -> None:
    """Clients that talk without pause while it is parked again and again: each answer is the right one."""
    with talking(torture.port()) as answered:
        for _ in range(5):
            # It may be awake again before `kip sleep` has returned.
            torture.kip.cli("sleep", torture.name, "--to", "parked", "--clock", "auto")
    assert min(answered) > 5, answered
    Lines(torture.port()).check()


def test_wake_by_exec(torture: Proc) -> None:
    """`kip exec` wakes, and joins the sandbox as it was."""
    torture.sleep()
    names = torture.exec("cat", "/proc/1/comm", "/tmp/torture/appended").stdout
    assert "line" in names
    assert torture.inspect()["last_wake"]["trigger"] == "kip exec"
    Lines(torture.port()).check()


# promise command-line: a proc does not sleep while an exec runs
def test_sleep_while_an_exec_runs(torture: Proc) -> None:
    """A process started by exec is part of the proc: it sleeps with it or keeps it awake, but does not break it."""
    done: list[int] = []
    run = threading.Thread(
        target=lambda: done.append(
            torture.exec("sh", "-c", "until test -e /tmp/go; do sleep 1; done; exit 9", check=False).returncode
        )
    )
    run.start()
    wait_for("the exec runs", lambda: "sleep" in torture.exec("sh", "-c", "cat /proc/[0-9]*/comm").stdout, 30)
    torture.kip.cli("sleep", torture.name, "--to", "parked", "--clock", "auto", check=False)
    Lines(torture.port()).check()
    torture.exec("touch", "/tmp/go")
    run.join(30)
    torture.exec("rm", "/tmp/go")
    assert done == [9], "exec exits with the program's code"


def test_output_across_sleeps(torture: Proc) -> None:
    """Both outputs, in order, none lost or twice."""
    client = Lines(torture.port())
    for i in range(5):
        client.ask(f"say output {i}")
        client.ask(f"complain trouble {i}")
        torture.sleep()
        client.ask(f"say after {i}")
    wait_for("the last line is in the log", lambda: "after 4" in torture.logs(), 30)
    lines = torture.logs().splitlines()
    said = [line for line in lines if line.startswith(("output", "after"))]
    assert said == [f"{word} {i}" for i in range(5) for word in ("output", "after")]
    assert [line for line in lines if line.startswith("trouble")] == [f"trouble {i}" for i in range(5)]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thousand_cycles(torture: Proc) -> None:
    cycles(torture, 1000)
