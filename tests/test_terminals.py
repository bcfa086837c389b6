"""Terminals: programs that make their own, and sessions of clients, over the sleep of each tier."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import textwrap
import threading
import time
from collections.abc import Callable

import pytest

from harness.clients import Lines
from harness.kip import Kip, Proc
from harness.typist import SHELL_COMMAND, TIERS, Typist, wait_runs
from harness.wait import wait_for

# A shell on a terminal that the server has made: each line of the client is typed, and what the
# terminal shows until it has shown a text so often, and then nothing for 300 ms, is the answer.
SHELL = textwrap.dedent(
    """
    import os, pty, select, socket, sys, time
    pid, master = pty.fork()
    if pid == 0:
        os.environ["PS1"] = "ready$ "
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    server = socket.create_server(("0.0.0.0", 7400))
    while True:
        client, _ = server.accept()
        lines = client.makefile("rb")
        for line in lines:
            text, until, count = eval(line)
            os.write(master, text)
            shown, given_up = b"", time.monotonic() + 20
            while True:
                if select.select([master], [], [], 0.3)[0]:
                    shown += os.read(master, 4096)
                elif shown.count(until) >= count or time.monotonic() > given_up:
                    break
            client.sendall(repr(shown).encode() + b"\\n")
    """
)


@pytest.fixture
def shell(fresh_kip: Callable[..., Kip]) -> Proc:
    kip = fresh_kip()
    return kip.run("shell", ["python3", "-c", SHELL], ports=["7400/tcp"])


def typed(client: Lines, text: str, until: str, count: int = 1) -> str:
    """What the terminal has shown since the text was typed, which `until` is in so often, or 20 s are over."""
    return eval(client.ask(repr((text.encode(), until.encode(), count)))).decode().replace("\r\n", "\n")


# promise K14: a shell on a terminal of its own goes on after each tier: its variables, job control,
#   the foreground group, what was typed and not read, settings and size of the terminal
@pytest.mark.parametrize("tier", TIERS)
def test_a_shell_goes_on(shell: Proc, tier: str) -> None:
    client = Lines(shell.port())
    assert "ready$" in typed(client, "x=kept; stty rows 33 columns 77; tty\n", "ready$", 2)
    typed(client, "sleep 1000 & cat\n", "[1] ")
    assert typed(client, "echoed\n", "echoed", 2).count("echoed") == 2, "by the terminal and by cat"
    for _ in range(2):
        TIERS[tier](shell)
        assert typed(client, "again\n", "again", 2).count("again") == 2
    if tier == "parked":
        assert shell.rebuilt()
    # Ctrl-C goes to the group in the foreground, which is cat's; the shell goes on.
    assert "ready$" in typed(client, "\x03", "ready$")
    assert "kept 33 77" in typed(client, "echo $x $(stty size)\n", "kept 33 77")
    assert "Running" in typed(client, "jobs\n", "Running")
    TIERS[tier](shell)
    assert "/dev/pts/0" in typed(client, "tty\n", "/dev/pts/0")
    assert "sleep 1000" in typed(client, "fg\n", "sleep 1000")
    TIERS[tier](shell)
    assert "Stopped" in typed(client, "\x1a", "Stopped")
    TIERS[tier](shell)
    assert "Stopped" in typed(client, "jobs\n", "Stopped")


@pytest.fixture
def idle(fresh_kip: Callable[..., Kip]) -> Proc:
    return fresh_kip().run("idle", ["sleep", "1000000"])


# promise K14: `kip exec -it` is a session on a terminal of the proc's own, with job control, the
#   client's size and the program's exit code; it sleeps with the proc in each tier and goes on
#   where it was when the client types
@pytest.mark.parametrize("tier", TIERS)
def test_a_session_sleeps_with_its_proc(idle: Proc, tier: str) -> None:
    user = Typist.exec(idle, *SHELL_COMMAND)
    user.see(r"ready\$ ")
    user.type("x=kept; tty; stty size\n")
    user.see("/dev/pts/0\n33 77\nready")
    for rows in range(40, 43):
        TIERS[tier](idle)
        user.type("echo $x\n")
        user.see("\nkept\n")
        TIERS[tier](idle)
        user.resize(rows, 120)
        # The size takes another way than what is typed.
        wait_for(f"{rows} rows", lambda rows=rows: user.sized() == f"{rows} 120" or None)
    user.type("sleep 1000\n")
    user.see("sleep 1000\n")
    # The shell has to have the terminal given to it before the sleep, as on a machine that was
    # suspended.
    wait_runs(idle, "sleep", "1000")
    TIERS[tier](idle)
    user.type("\x03")
    user.see(r"ready\$ ")
    user.type("exit 7\n")
    assert user.process.wait(20) == 7
    os.close(user.master)
    # Nothing of the session is left.
    wait_for("the session is gone", lambda: "bash" not in idle.exec("sh", "-c", "cat /proc/[0-9]*/comm").stdout or None)


# promise K14: a proc sleeps by itself while a session is open and idle
def test_an_open_session_keeps_nothing_awake(fresh_kip: Callable[..., Kip]) -> None:
    proc = fresh_kip().run("idle", ["sleep", "1000000"], flags=["--idle", "2s", "--park-after", "4s"])
    user = Typist.exec(proc, *SHELL_COMMAND)
    user.see(r"ready\$ ")
    proc.wait_state("parked", 60)
    user.type("echo there\n")
    user.see("\nthere\n")
    assert proc.rebuilt()
    user.hang_up()


# promise K14: a client that is gone hangs its terminal up, awake or asleep: its programs get SIGHUP
@pytest.mark.parametrize("tier", ["running", *TIERS])
def test_a_client_that_is_gone_hangs_up(idle: Proc, tier: str) -> None:
    user = Typist.exec(idle, "bash", "--norc", "-c", "trap 'echo hung up > /srv/said; exit' HUP; echo set; while :; do read x; done")
    user.see("set")
    if tier != "running":
        TIERS[tier](idle)
    user.hang_up()
    wait_for("it was told", lambda: idle.exec("cat", "/srv/said", check=False).stdout == "hung up\n" or None)


# promise K14: a session does not outlive its daemon: at the next wake its program gets SIGHUP
def test_a_daemon_that_ends_hangs_up(idle: Proc) -> None:
    user = Typist.exec(idle, "bash", "--norc", "-c", "trap 'echo hung up > /srv/said; exit' HUP; echo set; while :; do read x; done")
    user.see("set")
    idle.sleep()
    idle.kip.kill()
    assert user.process.wait(20) == 1
    idle.kip.up()
    idle.kip.cli("wake", "idle")
    assert idle.rebuilt()
    wait_for("it was told", lambda: idle.exec("cat", "/srv/said", check=False).stdout == "hung up\n" or None)


def test_a_session_ends_with_its_program(idle: Proc) -> None:
    """Whatever other programs in it go on to write, and though another program has the terminal open for writing only."""
    first = Typist.exec(idle, *SHELL_COMMAND)
    first.see(r"ready\$ ")
    second = Typist.exec(idle, *SHELL_COMMAND)
    second.see(r"ready\$ ")
    first.type("sleep 100000 > /dev/pts/1 & echo begun\n")
    first.see("\nbegun\n")
    idle.sleep()
    second.type("yes & exit\n")
    until = time.monotonic() + 30
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            os.read(second.master, 65536)
    assert second.process.wait(5) == 0 and idle.rebuilt()
    first.type("exit 3\n")
    assert first.process.wait(20) == 3


def test_what_a_session_leaves_behind(idle: Proc) -> None:
    """A background program whose terminal has been hung up, as its standard input is, sleeps and wakes."""
    user = Typist.exec(idle, *SHELL_COMMAND)
    user.see(r"ready\$ ")
    user.type("nohup sleep 100000 >/dev/null 2>&1 & disown; exit\n")
    assert user.process.wait(20) == 0
    wait_for("the shell is gone", lambda: "bash" not in idle.exec("sh", "-c", "cat /proc/[0-9]*/comm").stdout or None)
    for _ in range(2):
        idle.sleep()
        idle.kip.cli("wake", "idle")
        assert idle.rebuilt()
    idle.hibernate()
    assert "sleep\x00100000\x00" in idle.exec("sh", "-c", "cat /proc/[0-9]*/cmdline").stdout


def test_full_screen_programs(idle: Proc) -> None:
    """They read the size and settings of the terminal, and draw."""
    user = Typist.exec(idle, "top", "-d", "1000")
    user.see("load average")
    idle.sleep()
    user.type("q")
    assert user.process.wait(20) == 0


def test_much_goes_both_ways(idle: Proc) -> None:
    """More than the terminal's queues hold, in one piece, while the program writes as much."""
    user = Typist.exec(idle, "sh", "-c", "stty raw -echo; echo set; head -c 300000 | sha256sum; head -c 300000 /dev/zero | tr '\\0' z")
    user.see("set")
    data = b"some line of text\n" * 17000
    reader = threading.Thread(target=lambda: user.see("z{300000}", 60))
    reader.start()
    sent = 0
    while sent < 300000:
        sent += os.write(user.master, data[sent : min(sent + 4096, 300000)])
    reader.join()
    assert user.process.wait(20) == 0


# promise K14: `kip exec` without `-i` gives the program no input, with it what the command has;
#   `-u`, `-w`, `-e`, `-d`
def test_without_a_terminal(idle: Proc) -> None:
    assert idle.kip.cli("exec", "idle", "--", "cat", input="typed").stdout == ""
    assert idle.kip.cli("exec", "-i", "idle", "--", "cat", input="typed").stdout == "typed"
    words = ["-u", "daemon", "-w", "/tmp", "-e", "WORD=said", "idle", "--", "sh", "-c", "id -un; pwd; echo $WORD; tty"]
    assert idle.kip.cli("exec", *words, check=False).stdout == "daemon\n/tmp\nsaid\nnot a tty\n"
    idle.kip.cli("exec", "-d", "idle", "--", "sh", "-c", "echo begun; exec sleep 100000")
    wait_for("its output is logged", lambda: "begun" in idle.logs() or None)
    idle.sleep()
    idle.kip.cli("wake", "idle")
    assert "sleep\x00100000\x00" in idle.exec("sh", "-c", "cat /proc/[0-9]*/cmdline").stdout


BAD = [
    (["-t", "idle", "--", "true"], "neither standard output nor standard input is a terminal"),
    (["-d", "-t", "idle", "--", "true"], "cannot be used with"),
    (["-u", "nobody-there", "idle", "--", "true"], "nobody-there"),
    (["-w", "/none", "-d", "idle", "--", "true"], "working directory"),
    (["-d", "idle", "--", "none"], 'command "none" is not in the proc\'s files'),
]


@pytest.mark.parametrize("words, said", BAD)
def test_bad_input(idle: Proc, words: list[str], said: str) -> None:
    done = idle.kip.cli("exec", *words, check=False, input="")
    assert done.returncode != 0 and said in done.stderr, done
