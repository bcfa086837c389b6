"""Everything a run makes on the machine, under one prefix, and the janitor that takes it away again.

The janitor is a process of its own that waits for the end of a pipe. However a run ends, by SIGKILL even, the pipe
ends with it, and the janitor removes what carries the run's prefix or lies in its directory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLONE_NEWNS, MS_REC, MS_PRIVATE, MS_BIND = 0x20000, 0x4000, 1 << 18, 0x1000


class Failed(Exception):
    """Something on which the measurement stands did not work."""


def command(*words: str | Path, timeout: float = 60, **options) -> str:
    """Runs a command that must succeed; its output."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=timeout, **options)
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, words))}: exit {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


class Workspace:
    """A temporary directory, a prefix for names, and the compiled tools."""

    def __init__(self) -> None:
        self.prefix = f"kb{os.getpid()}"
        self.dir = Path(tempfile.mkdtemp(prefix="kip-bench-"))
        self.dir.chmod(0o755)
        words = [sys.executable, str(HERE / "janitor.py"), self.prefix, str(self.dir)]
        self._janitor = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        self.libc = ctypes.CDLL(None, use_errno=True)

    def close(self) -> None:
        """Takes everything away; raises if something would not go."""
        assert self._janitor.stdin
        self._janitor.stdin.close()
        if self._janitor.wait(120) != 0:
            raise Failed("something was left behind, see above")

    def compile(self, name: str, *flags: str) -> Path:
        """One of the C programs beside this file."""
        out = self.dir / name
        command("cc", "-O2", "-Wall", "-Wextra", *flags, "-o", out, HERE / f"{name}.c")
        return out

    def own_mounts(self) -> None:
        """From here on this process and what it starts mount for themselves only. Kip's daemon is started before."""
        if self.libc.unshare(CLONE_NEWNS) or self.libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None):
            raise Failed(f"a mount namespace: {os.strerror(ctypes.get_errno())}")

    def bind(self, path: Path) -> None:
        """Makes a directory a mount point."""
        if self.libc.mount(str(path).encode(), str(path).encode(), None, MS_BIND, None):
            raise Failed(f"bind {path}: {os.strerror(ctypes.get_errno())}")

    def cover(self, path: Path, by: Path) -> None:
        """Puts a directory in the place of another one."""
        if self.libc.mount(str(by).encode(), str(path).encode(), None, MS_BIND, None):
            raise Failed(f"bind {by} to {path}: {os.strerror(ctypes.get_errno())}")
