"""A proc's own terminal and open standard input: `kip run -it`, `kip run -i`, `kip attach`, `--rm`, over the sleep of each tier."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.kip import Kip, Proc
from harness.typist import TIERS, Typist, wait_runs
from harness.wait import wait_for


# A shell that draws nothing.
SHELL = ["--env", "PS1=ready$ ", "--env", "TERM=dumb"]


@pytest.fixture
def own(fresh_kip: Callable[..., Kip]) -> Kip:
    return fresh_kip()


def gone(kip: Kip, name: str) -> None:
    wait_for(f"{name} is removed", lambda: name not in kip.names() or None, 20)


# promise K14: `kip run -it` is a shell on the proc's own terminal, with the client's size, job
#   control and the program's exit code; it sleeps in each tier and goes on when the client types;
#   what it shows is in the logs
@pytest.mark.parametrize("tier", TIERS)
def test_a_shell_of_its_own(own: Kip, tier: str) -> None:
    user = Typist(own, "run", "-it", "--name", "shell", *SHELL, "--", "bash", "--norc", "--noprofile")
    user.see(r"ready\$ ")
    proc = Proc(own, "shell")
    user.type("x=kept; tty; stty size\n")
    user.see("/dev/pts/0\n33 77\nready")
    for _ in range(2):
        TIERS[tier](proc)
        user.type("echo $x\n")
        user.see("\nkept\n")
    user.type("sleep 1000\n")
    user.see("sleep 1000\n")
    wait_runs(proc, "sleep", "1000")
    TIERS[tier](proc)
    user.type("\x03")
    user.see(r"ready\$ ")
    user.type("echo last; exit 7\n")
    assert user.process.wait(20) == 7
    assert "exit code 7" in proc.inspect()["exit"]
    wait_for("all is in the log", lambda: "\nlast\n" in proc.logs() or None)
    assert "\r" not in proc.logs()


# promise K14: a client leaves the proc alone by ctrl-p ctrl-q or by its end; another attaches, of
#   another size, and several see the same
def test_clients_come_and_go(own: Kip) -> None:
    first = Typist(own, "run", "-it", "--name", "shell", *SHELL, "--", "bash", "--norc", "--noprofile")
    first.see(r"ready\$ ")
    proc = Proc(own, "shell")
    first.type("x=kept; echo set\n")
    first.see("\nset\n")
    first.type("\x10\x11")
    first.see("shell runs on")
    assert first.process.wait(20) == 0
    proc.sleep()
    second, third = Typist(own, "attach", "shell"), Typist(own, "attach", "--no-stdin", "shell")
    second.resize(40, 100)

    def third_sees() -> bool:
        """Only what is written once it is attached."""
        second.type("echo $x\n")
        second.see("\nkept\n")
        with contextlib.suppress(AssertionError):
            # The terminal of one that only watches is in no raw mode.
            return bool(third.see(r"\nkept\r?\n", 1))
        return False

    wait_for("the third sees what the second does", third_sees, 20)
    wait_for("40 rows", lambda: second.sized() == "40 100" or None)
    # A client that dies hangs nothing up.
    second.hang_up()
    third.hang_up()
    proc.sleep()
    fourth = Typist(own, "attach", "shell", "--detach-keys", "ctrl-x")
    fourth.type("echo $x again\n")
    fourth.see("\nkept again\n")
    fourth.type("\x18")
    assert fourth.process.wait(20) == 0
    proc.wait_state("running")


# promise K14: a proc's own terminal outlives the daemon, awake and parked
@pytest.mark.parametrize("tier", ["running", "parked"])
def test_a_terminal_outlives_the_daemon(own: Kip, tier: str) -> None:
    own.cli("run", "-dt", "--name", "shell", *SHELL, "--", "bash", "--norc", "--noprofile")
    proc = Proc(own, "shell")
    user = Typist(own, "attach", "shell")
    user.type("x=kept; echo set\n")
    user.see("\nset\n")
    if tier == "parked":
        proc.sleep()
    own.kill()
    assert user.process.wait(20) == 1
    own.up()
    user = Typist(own, "attach", "shell")
    user.type("echo $x $?\n")
    user.see("\nkept 0\n")
    if tier == "parked":
        assert proc.rebuilt()


def answer(client: subprocess.Popen[str]) -> str:
    """The next line, which is there soon."""
    assert client.stdout and select.select([client.stdout], [], [], 20)[0], "no answer"
    return client.stdout.readline()


def piped(kip: Kip, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [kip.program, "--data", kip.data, *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


# promise K14: `kip run -i` gives the program standard input and its end, and ends with its output
#   and code; --rm removes it
def test_standard_input_of_a_run(own: Kip) -> None:
    done = piped(own, "run", "-i", "--rm", "--name", "sums", "--", "sh", "-c", "while read n; do echo $((2 * n)); done; echo over >&2; exit 3", text="4\n21\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "8\n42\n", "over\n")
    gone(own, "sums")
    # Without -i it is empty, and --attach only watches.
    done = piped(own, "run", "-a", "--rm", "--", "sh", "-c", "cat; echo watched", text="not for it\n")
    assert (done.returncode, done.stdout) == (0, "watched\n")


# promise K14: without a terminal a client gets the bytes that the program wrote, lines or not,
#   whatever it does at its end
def test_bytes(own: Kip) -> None:
    data = bytes(range(256)) * 2000 + b"no end of line"
    script = "import os, sys; b = sys.stdin.buffer.read(); os.write(1, b[:-5]); os.write(1, b[-5:])"
    words = [own.program, "--data", own.data, "run", "-i", "--rm", "--", "python3", "-c", script]
    done = subprocess.run(words, input=data, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout == data) == (0, b"", True), len(done.stdout)


# promise K14: more clients follow the logs of one proc than the daemon has threads; each is told
#   what comes, and others are served
def test_many_followers(own: Kip) -> None:
    own.cli("run", "-di", "--name", "echo", "--", "cat")
    followers = []
    for _ in range(600):
        follower = socket.socket(socket.AF_UNIX)
        follower.settimeout(30)
        follower.connect(str(own.data / "run" / "api.sock"))
        follower.sendall(b"GET /v1/procs/echo/logs?follow=true HTTP/1.1\r\nHost: kip\r\n\r\n")
        assert b" 200 " in follower.recv(4096)
        followers.append(follower)
    words = [own.program, "--data", own.data, "attach", "echo"]
    client = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert client.stdin
    client.stdin.write("told\n")
    assert answer(client) == "told\n"
    client.kill()
    client.wait()
    for follower in followers:
        with follower, follower.makefile("rb") as lines:
            assert any(b"told" in line for line in lines)
    proc = Proc(own, "echo")
    proc.sleep()
    assert "told" in proc.logs()


# promise K14: an open standard input is kept over the sleep of each tier: what is written then
#   wakes the program, and so does its end
@pytest.mark.parametrize("tier", TIERS)
def test_standard_input_sleeps(own: Kip, tier: str) -> None:
    words = [own.program, "--data", own.data, "run", "-i", "--name", "lines", "--", "python3", "-uc", "import sys\nfor line in sys.stdin: print('got', line.strip())\nprint('over')"]
    client = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert client.stdin
    client.stdin.write("one\n")
    assert answer(client) == "got one\n"
    proc = Proc(own, "lines")
    for word in ("two", "three"):
        TIERS[tier](proc)
        client.stdin.write(f"{word}\n")
        assert answer(client) == f"got {word}\n"
    TIERS[tier](proc)
    client.stdin.close()
    assert answer(client) == "over\n"
    assert client.wait(20) == 0
    if tier == "parked":
        assert proc.inspect()["exit"] == "exit code 0"


# promise K14: an input that has ended stays at its end over a sleep, and one that is open stays
#   open
def test_the_end_of_input_sleeps(own: Kip) -> None:
    script = "import sys, time\nwhile True:\n print(repr(sys.stdin.read()))\n time.sleep(1)"
    own.cli("run", "-di", "--name", "open", "--", "python3", "-uc", script)
    words = [own.program, "--data", own.data, "run", "-i", "--name", "ended", "--", "python3", "-uc", script]
    client = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin
    client.stdin.write("all")
    client.stdin.close()
    assert answer(client) == "'all'\n"
    ended = Proc(own, "ended")
    for _ in range(2):
        ended.sleep()
        ended.wake()
        assert ended.rebuilt()
        before = ended.logs().count("''")
        wait_for("it reads its end again", lambda before=before: ended.logs().count("''") > before + 1 or None)
    client.kill()
    client.wait()
    proc = Proc(own, "open")
    proc.sleep()
    proc.wake()
    time.sleep(1)
    assert proc.logs() == "", "no client has ended it"


# promise K14: `kip run -it` of a program that ends at once shows all it wrote and its code
def test_a_program_that_ends_at_once(own: Kip) -> None:
    for number in range(20):
        user = Typist(own, "run", "-it", "--rm", "--name", f"short-{number}", "--", "sh", "-c", f"echo said {number}; exit 7")
        user.type("typed\n")
        user.see(f"said {number}")
        assert user.process.wait(20) == 7
    wait_for("all are removed", lambda: own.names() == [] or None, 20)


# promise K14: a program on a terminal that handles SIGTERM has its grace; a shell, which ignores
#   it, ends when it is hung up
def test_the_end_of_a_program_on_a_terminal(own: Kip) -> None:
    drains = "import signal, sys, time\ndef end(*_):\n time.sleep(1); print('drained', flush=True); sys.exit(5)\nsignal.signal(signal.SIGTERM, end)\nprint('set', flush=True)\nwhile True: time.sleep(1000)"
    own.cli("run", "-dt", "--name", "drains", "--", "python3", "-c", drains)
    proc = Proc(own, "drains")
    wait_for("its handler is set", lambda: "set" in proc.logs() or None)
    own.cli("stop", "drains")
    assert (proc.inspect()["exit"], "drained" in proc.logs()) == ("exit code 5", True)
    own.cli("run", "-dt", "--name", "shell", *SHELL, "--", "bash", "--norc", "--noprofile")
    shell = Proc(own, "shell")
    ignored = "grep -h SigIgn /proc/[0-9]*/status"
    wait_for("it ignores SIGTERM", lambda: any(int(line.split()[1], 16) >> 14 & 1 for line in shell.exec("sh", "-c", ignored).stdout.splitlines()) or None)
    begun = time.monotonic()
    own.cli("stop", "shell")
    assert time.monotonic() - begun < 8, "its grace is 10 s"


# promise K14: a client stays attached to a proc that is started again by its restart policy, and
#   types at its new terminal
def test_a_program_that_is_started_again(own: Kip) -> None:
    words = ["run", "-it", "--name", "again", "--restart", "always", "--", "sh", "-c", "stty -echo; until size=$(stty size) && [ \"$size\" = '33 77' ]; do sleep 0.1; done; echo begun $size; read x; echo read $x"]
    user = Typist(own, *words)
    for word in ("one", "two"):
        user.see("begun 33 77")
        user.type(f"{word}\n")
        user.see(f"read {word}")
    user.see("begun 33 77", 30)
    user.type("\x10\x11")
    assert user.process.wait(20) == 0


# promise K14: --rm removes a proc that ends, is stopped or has ended while no daemon was there, and
#   is refused beside a restart policy
def test_rm(own: Kip) -> None:
    own.cli("run", "-d", "--rm", "--name", "short", "--", "true")
    gone(own, "short")
    own.cli("run", "-d", "--rm", "--name", "long", "--", "sleep", "1000000")
    own.cli("stop", "long")
    gone(own, "long")
    own.cli("run", "-d", "--rm", "--name", "killed", "--", "sh", "-c", "sleep 4; true")
    pid = Proc(own, "killed").inspect()["pids"][0]
    own.kill()
    wait_for("its program has ended", lambda: not Path(f"/proc/{pid}").exists() or None, 20)
    own.up()
    gone(own, "killed")
    own.cli("run", "-d", "--rm", "--name", "stays", "--", "sleep", "1000000")
    assert "cannot be ended and started again" in own.refused("restart", "stays")
    own.cli("rm", "-f", "stays")
    assert "leave out --rm or --restart" in own.refused("run", "--rm", "--restart", "always", "--", "true")


def test_what_cannot_be_said(own: Kip) -> None:
    assert "standard input is no terminal" in own.refused("run", "-it", "--", "sh")
    assert "neither standard output nor standard input is a terminal" in own.refused("run", "-t", "--", "sh")
    assert own.names() == []
    assert "add -d" in own.refused("--json", "run", "-i", "--", "cat")
    assert "is no key" in piped(own, "attach", "--detach-keys", "ctrl-!", "x").stderr
    own.cli("run", "-dt", "--name", "shell", "--", "sh")
    assert "add --no-stdin" in own.refused("attach", "shell")
    assert "there is no proc" in own.refused("attach", "nothing")
    own.cli("run", "--name", "over", "--", "true")
    wait_for("it has ended", lambda: Proc(own, "over").state == "stopped" or None)
    assert "over is stopped" in own.refused("attach", "over")


def test_full_screen(own: Kip) -> None:
    """A program that draws by the size of its terminal, asleep and awake, and again when that changes."""
    user = Typist(own, "run", "-it", "--name", "top", "--", "top", "-d", "1000")
    user.see("PID USER")
    proc = Proc(own, "top")
    proc.sleep()
    user.resize(20, 60)
    user.see("PID USER")
    proc.sleep()
    user.type("q")
    assert user.process.wait(20) == 0
