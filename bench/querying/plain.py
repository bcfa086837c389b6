"""The database without Kip: `runc run`, and checkpoint and restore by plain CRIU. Each instance has an overlay of its own over the
same files, as a container has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

from harness.wait import wait_for
from parkwake import byhand
from parkwake.client import Question
from parkwake.network import Network
from parkwake.setups import Setup
from parkwake.workspace import Failed, Workspace, command
from querying.database import NO_RINGS, PORT, Database
from querying.instances import WITHIN_S, Instance, Since, disk


def setup(database: Database, state: str, *options: str) -> Setup:
    """What `parkwake` wants to know of a server; the question is asked by `querying.sql` in place of its client."""
    return Setup("mariadb", database.server(state, *options), Question("tcp", b"", ""), (), 0, "")


def lower(work: Workspace, skeleton: Path, database: Database, state: str) -> Path:
    """The files below every overlay: the machine's that Kip allows, the settings, the table."""
    root = byhand.make_root(work, skeleton, setup(database, state), state, {})
    database.copy_files(root)
    return root


class Overlay:
    """A root directory whose changes lie apart."""

    def __init__(self, work: Workspace, below: Path, name: str, changes: Path | None = None):
        self.directory = work.dir / "overlays" / name
        self.upper, self.root = self.directory / "upper", self.directory / "root"
        for path in (self.directory / "work", self.root):
            path.mkdir(parents=True)
        if changes:
            command("cp", "-a", "--reflink=auto", changes, self.upper, timeout=300)
        self.upper.mkdir(exist_ok=True)
        layers = f"lowerdir={below},upperdir={self.upper},workdir={self.directory / 'work'}"
        command("mount", "-t", "overlay", "overlay", "-o", layers, self.root)

    def remove(self) -> None:
        command("umount", "--lazy", self.root)
        shutil.rmtree(self.directory)


class Runc:
    """Instances by `runc run`, one at a time."""

    def __init__(self, work: Workspace, below: Path, database: Database, state: str, number: int, limit_bytes: int | None):
        self.work, self.below, self.database = work, below, database
        # Where the overlay of each instance is mounted.
        self.runc = byhand.Runc(work, work.dir / "overlays" / "runc" / "root", number, setup(database, state))
        self.address = (self.runc.network.address, PORT)
        config = self.runc.bundle / "config.json"
        spec = json.loads(config.read_text())
        if limit_bytes:
            spec["linux"]["resources"] = {"memory": {"limit": limit_bytes}}
        config.write_text(json.dumps(spec))

    def cold(self) -> Instance:
        stack, since = ExitStack(), Since()
        with stack:
            overlay = Overlay(self.work, self.below, "runc")
            stack.callback(overlay.remove)
            stack.enter_context(self.runc.started())
            self.database.first.ask(*self.address, WITHIN_S)
            answers_ms = since.ms
            stack_of_it = stack.pop_all()
        return Instance("runc", self.address, since.s, answers_ms, self._pids, lambda: disk(overlay.upper), stack_of_it.close)

    def _pids(self) -> list[int]:
        return [int(json.loads(command("runc", "--root", self.runc.state, "state", self.runc.id))["pid"])]


class Group:
    """A control group with a limit of memory, for what is not runc's."""

    def __init__(self, work: Workspace, name: str, limit_bytes: int):
        first = Path("/sys/fs/cgroup/memory")
        self.path = (first if first.is_dir() else first.parent) / f"{work.prefix}-{name}"
        self.path.mkdir()
        (self.path / ("memory.limit_in_bytes" if first.is_dir() else "memory.max")).write_text(str(limit_bytes))

    def words(self, command: list[str]) -> list[str]:
        """Runs a command in it."""
        return ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    def kills(self) -> int:
        """Processes that the kernel has killed at the limit."""
        file = self.path / "memory.oom_control"
        lines = (file if file.exists() else self.path / "memory.events").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def remove(self) -> None:
        def is_gone() -> bool:
            with suppress(OSError):  # a process that ends is still in it
                self.path.rmdir()
            return not self.path.exists()

        wait_for(f"{self.path} is empty", is_gone, 10)


class Criu:
    """A source in namespaces, which is dumped while its clients are there and goes on, and its clones, one at a time."""

    def __init__(
        self, work: Workspace, enter: Path, below: Path, database: Database, state: str, number: int, limit_bytes: int | None
    ):
        self.work, self.below, self.database, self.number = work, below, database, number
        self.of_source, self.of_clone = Network(work, number, veth=True), Network(work, number + 1, veth=True)
        self.program, self.setup, self.enter = byhand.find_criu(), setup(database, state, NO_RINGS), enter
        self.groups = [Group(work, f"{name}-{number}", limit_bytes) for name in ("source", "clone") if limit_bytes]
        self.address = (self.of_source.address, PORT)
        self._start()

    def _start(self) -> None:
        self.overlay = Overlay(self.work, self.below, f"source-{self.number}")
        self.server = byhand.Entered(self.enter, "sandbox", self.overlay.root, self.of_source, self.setup)
        if self.groups:
            self.server.words = self.groups[0].words(self.server.words)
        self.started = self.server.start()
        try:
            self.database.first.ask(*self.address, WITHIN_S, self.has_ended)
        except Failed as e:
            said = self.server.output()
            self.end()
            raise Failed(f"{e}; {said}") from e

    def has_ended(self) -> bool:
        return self.started.process.poll() is not None

    def start_again(self) -> None:
        """A source that has ended, as by a dump at the limit."""
        if self.has_ended():
            self.server.end(self.started)
            self.overlay.remove()
            self._start()

    def dump(self, images: Path) -> dict[str, float]:
        """Milliseconds. The files are copied as soon as the source goes on: its load does not change them."""
        shutil.rmtree(images, ignore_errors=True)
        images.mkdir(parents=True)
        since, net = Since(), self.of_source.path.stat().st_ino
        external = ["--external", "mnt[/usr]:usr", "--external", f"net[{net}]:net"]
        clients = ["--tcp-established", "--skip-in-flight"]
        self._criu(images, "dump", "-t", str(self.started.pid), "--leave-running", *clients, *external)
        dumped_ms = since.ms
        command("cp", "-a", "--reflink=auto", self.overlay.upper, images / "upper", timeout=300)
        return {"dump_ms": dumped_ms, "copy_ms": since.ms - dumped_ms, "still_ms": byhand.frozen_us(images / "stats-dump") / 1e3}

    def restored(self, way: str, images: Path, since: Since, more: dict[str, float]) -> Instance:
        """Connections of the source's clients are closed in it."""
        begun_ms, pid_file = since.ms, images / "pid"
        pid_file.unlink(missing_ok=True)
        overlay = Overlay(self.work, self.below, f"clone-{self.number}", images / "upper")

        def end() -> None:
            self.of_clone.end_servers()
            overlay.remove()

        fd = os.open(self.of_clone.path, os.O_RDONLY)
        try:
            words = ["--root", str(overlay.root), "--external", "mnt[usr]:/usr", "--inherit-fd", f"fd[{fd}]:net", "--tcp-close"]
            self._criu(images, "restore", "-d", "--pidfile", str(pid_file), *words, fds=(fd,))
            restored_ms = since.ms - begun_ms
            self.database.first.ask(self.of_clone.address, PORT, WITHIN_S)
            answers_ms = since.ms
        except BaseException:
            end()
            raise
        finally:
            os.close(fd)
        pid = int(pid_file.read_text())
        return Instance(
            way, (self.of_clone.address, PORT), since.s, answers_ms, lambda: [pid],
            lambda: disk(images), end, {**more, "restore_ms": restored_ms},
        )  # fmt: skip

    def hot(self, way: str, images: Path) -> Instance:
        since = Since()
        return self.restored(way, images, since, self.dump(images))

    def warm(self, way: str, images: Path) -> Instance:
        """From images that were dumped before."""
        return self.restored(way, images, Since(), {})

    def end(self) -> None:
        self.server.end(self.started)
        self.of_clone.end_servers()
        self.overlay.remove()
        for group in self.groups:
            group.remove()

    def _criu(self, images: Path, what: str, *words: str, fds: tuple[int, ...] = ()) -> None:
        every = ["-D", str(images), "-o", f"{what}.log", "--file-locks", "--link-remap"]
        command_line = [*self.program, what, *every, *words]
        if what == "restore" and self.groups:
            command_line = self.groups[1].words(command_line)
        done = subprocess.run(
            command_line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=fds, timeout=120,
        )  # fmt: skip
        if done.returncode != 0:
            kills = sum(group.kills() for group in self.groups)
            at_limit = f"; the kernel killed {kills} processes at the memory limit" if kills else ""
            raise Failed(f"criu {what}: {byhand.causes(images / f'{what}.log')}{at_limit}")
