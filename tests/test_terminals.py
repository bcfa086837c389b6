"""Terminals: programs that make their own, and sessions of clients, over the sleep of each tier."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

from harness.clients import Lines
from harness.kip import Kip, Proc

# A shell on a terminal that the server has made: each line of the client is typed, and what the terminal shows within 300 ms is the answer.
SHELL = textwrap.dedent(
    """
    import os, pty, select, socket, sys
    pid, master = pty.fork()
    if pid == 0:
        os.environ["PS1"] = "ready$ "
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    server = socket.create_server(("0.0.0.0", 7400))
    while True:
        client, _ = server.accept()
        lines = client.makefile("rb")
        for line in lines:
            os.write(master, eval(line))
            shown = b""
            while select.select([master], [], [], 0.3)[0]:
                shown += os.read(master, 4096)
            client.sendall(repr(shown).encode() + b"\\n")
    """
)


@pytest.fixture
def shell(fresh_kip: Callable[..., Kip]) -> Proc:
    kip = fresh_kip()
    return kip.run("shell", ["python3", "-c", SHELL], ports=["7400/tcp"])


def typed(client: Lines, text: str) -> str:
    return eval(client.ask(repr(text.encode()))).decode().replace("\r\n", "\n")


TIERS = {"hibernated": Proc.hibernate, "parked": Proc.sleep}


# promise K14: a shell on a terminal of its own goes on after each tier: its variables, job control,
#   the foreground group, what was typed and not read, settings and size of the terminal
@pytest.mark.parametrize("tier", TIERS)
def test_a_shell_goes_on(shell: Proc, tier: str) -> None:
    client = Lines(shell.port())
    assert "ready$" in typed(client, "x=kept; stty rows 33 columns 77; tty\n")
    typed(client, "sleep 1000 & cat\n")
    assert typed(client, "echoed\n").count("echoed") == 2, "by the terminal and by cat"
    for _ in range(2):
        TIERS[tier](shell)
        assert typed(client, "again\n").count("again") == 2
    if tier == "parked":
        assert shell.rebuilt()
    # Ctrl-C goes to the group in the foreground, which is cat's; the shell goes on.
    assert "ready$" in typed(client, "\x03")
    assert "kept 33 77" in typed(client, "echo $x $(stty size)\n")
    assert "Running" in typed(client, "jobs\n")
    TIERS[tier](shell)
    assert "/dev/pts/0" in typed(client, "tty\n")
    assert "sleep 1000" in typed(client, "fg\n")
    TIERS[tier](shell)
    assert "Stopped" in typed(client, "\x1a")
    TIERS[tier](shell)
    assert "Stopped" in typed(client, "jobs\n")
