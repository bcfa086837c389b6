"""Each way of waking broken: a plan that asks for a file that is not there, and a CRIU that ends at once."""

from __future__ import annotations

import os
import signal
import struct
import zlib
from collections.abc import Collection
from pathlib import Path

from harness.kip import Proc

# A plan's magic, checksum, length of the description.
HEAD = 24


def plan_of(proc: Proc) -> Path:
    """The plan's file of a sleeper."""
    generation = proc.inspect()["generation"]
    return proc.kip.data / "procs" / proc.name / f"gen-{generation}" / "wake.plan"


def files_of(proc: Proc) -> set[str]:
    """Programs and libraries that its processes have mapped, as the proc's own files have them."""
    found = set()
    for pid in proc.inspect()["pids"]:
        fields = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
        found |= {line[5] for line in fields if len(line) == 6 and "x" in line[1] and line[5].startswith("/")}
    return found


def break_plan(proc: Proc, files: Collection[str]) -> None:
    """It asks for files that are not there, in the place of these."""
    plan = plan_of(proc)
    content = plan.read_bytes()
    rest = content[HEAD:]
    for name in map(str.encode, files):
        rest = rest.replace(name + b"\0", name[:-1] + b"?\0")
    assert rest != content[HEAD:], f"the plan names none of {files}"
    plan.write_bytes(content[:8] + struct.pack("<Q", zlib.crc32(rest)) + content[16:HEAD] + rest)


class BrittleCriu:
    """A CRIU that ends at once as soon as there is a file `broken`; `started` has the pids of what waits for work."""

    def __init__(self, directory: Path):
        self.directory = directory
        tree = Path("/usr/local/lib/kip/criu")
        lib = next(path.parent for path in tree.glob("usr/lib/*/libc.so.6"))
        self.program = directory / "criu"
        self.program.write_text(
            f'#!/bin/sh\n[ -e {directory}/broken ] && [ "$1" != --version ] && exit 1\necho $$ >> {directory}/started\n'
            f"export CRIU_LIBS_DIR={tree}/usr/sbin\n"
            '[ "$KIP_RUN" ] && export LD_PRELOAD=$KIP_RUN/../criu-shim.so\n'
            f'exec {next(lib.glob("ld-linux*"))} --inhibit-cache --library-path {lib} {tree}/usr/sbin/criu "$@"\n'
        )
        self.program.chmod(0o755)

    def templates(self) -> list[int]:
        """Those that fork helpers."""

        def is_template(pid: int) -> bool:
            try:
                return b"criu" in Path(f"/proc/{pid}/cmdline").read_bytes()
            except FileNotFoundError:
                return False

        return [pid for pid in map(int, (self.directory / "started").read_text().split()) if is_template(pid)]

    def helpers(self) -> list[int]:
        """Those that wait for work or are at it."""
        return [int(pid) for of in self.templates() for pid in Path(f"/proc/{of}/task/{of}/children").read_text().split()]

    def break_it(self) -> None:
        (self.directory / "broken").touch()
        for pid in self.helpers() + self.templates():
            os.kill(pid, signal.SIGKILL)

    def mend_it(self) -> None:
        (self.directory / "broken").unlink(missing_ok=True)
