"""A user at a terminal."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time

from harness.kip import Kip, Proc
from harness.wait import wait_for

TIERS = {"hibernated": Proc.hibernate, "parked": Proc.sleep}


def wait_runs(proc: Proc, *command: str) -> None:
    """Until such a process is there."""
    line = "".join(f"{word}\0" for word in command)
    wait_for(f"{command[0]} runs", lambda: line in proc.exec("sh", "-c", "cat /proc/[0-9]*/cmdline").stdout or None)


SHELL_COMMAND = ["env", "PS1=ready$ ", "TERM=dumb", "bash", "--norc", "--noprofile", "-i"]


class Typist:
    """A user at a terminal that runs a command of Kip."""

    def __init__(self, kip: Kip, *command: str) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
        words = [kip.program, "--data", kip.data, *command]
        self.process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self.shown = b""

    @staticmethod
    def exec(proc: Proc, *command: str) -> Typist:
        """A session in a proc."""
        return Typist(proc.kip, "exec", "-it", proc.name, "--", *command)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def see(self, pattern: str, timeout: float = 20) -> re.Match[str]:
        """Waits until the terminal shows it, and forgets what it has shown up to there."""
        until = time.monotonic() + timeout
        while True:
            text = self.shown.decode(errors="replace").replace("\r\n", "\n")
            if found := re.search(pattern, text):
                self.shown = text[found.end() :].encode()
                return found
            left = until - time.monotonic()
            assert left > 0 and select.select([self.master], [], [], left)[0], f"{pattern!r} is not in {text!r}"
            try:
                self.shown += os.read(self.master, 4096)
            except OSError:
                assert re.search(pattern, text), f"the terminal ended with {text!r}"

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def hang_up(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def sized(self) -> str:
        """What a shell there takes for its size, `ROWS COLUMNS`."""
        self.type("stty size\n")
        return self.see(r"\n(\d+ \d+)\n")[1]
