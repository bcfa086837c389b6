"""What a daemon may leave behind when it is down: nothing.

Several daemons, of other people even, may share the machine, so each check looks only for what carries this
daemon's data directory or instance number (the names are those of docs/design/machine.md: `kpI-` interfaces, nft table
`inet kip_I`, cgroups `kip-I`, user ids from 0x20000000, addresses 10.213.0.0/16)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.kip import Kip

FIRST_UID, SLOTS, IDS, INSTANCES = 0x2000_0000, 2048, 65536, 16
# Instance numbers for daemons that were given none: those of other people, and of commands in
# tests.
FOR_ALL = 4
RUN = Path("/run/kip")


def is_alive(pid: int) -> bool:
    """Whether a process (zombies are none) has this pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def processes() -> dict[int, tuple[str, int, str]]:
    """pid -> (command line, real uid, start time)."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            status = Path(f"/proc/{entry}/status").read_text()
            started = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[19]
        except (FileNotFoundError, ProcessLookupError):
            continue
        uid = int(re.search(r"^Uid:\t(\d+)", status, re.M)[1])
        comm = re.search(r"^Name:\t(.*)", status, re.M)[1]
        found[int(entry)] = (line or f"[{comm}]", uid, started)
    return found


@dataclass
class Machine:
    """What was there before."""

    run_files: set[str]
    processes: set[tuple[int, str]]

    @staticmethod
    def now() -> Machine:
        return Machine(run_files(), {(pid, started) for pid, (_, _, started) in processes().items()})


def run_files() -> set[str]:
    return {str(p) for p in RUN.rglob("*")} if RUN.exists() else set()


def instance_of(*pids: int | None) -> int | None:
    """The instance number, from the lock that the daemon or its keeper holds on /run/kip/instance-I."""
    inodes = {}
    for path in RUN.glob("instance-*"):
        try:
            s = path.stat()
        except FileNotFoundError:
            continue  # another daemon's, which is down by now
        inodes[s.st_dev, s.st_ino] = int(path.name.rsplit("-", 1)[1])
    for pid in filter(None, pids):
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                s = os.stat(fd)
            except OSError:
                continue
            if (s.st_dev, s.st_ino) in inodes and "lock:" in Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text():
                return inodes[s.st_dev, s.st_ino]
    return None


def want_instance(data: Path) -> None:
    """Has a new data directory take a free instance number of this pytest worker (`pytest -n`): a number that is given back
    and taken by another worker's daemon at once would make what that one has look as if it had been left behind.

    A daemon takes the number that its directory had before, if it is free; else, and without workers, the lowest."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count == 1 or data.exists():
        return
    each = (INSTANCES - FOR_ALL) // count
    first = FOR_ALL + each * int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    free = (n for n in range(first, first + each) if not (RUN / f"instance-{n}").exists())
    if (number := next(free, None)) is not None:
        data.mkdir(mode=0o700)
        (data / "run").mkdir(mode=0o700)
        (data / "run" / "instance").write_text(str(number))


def left(before: Machine, data: Path, instance: int | None) -> list[str]:
    """Everything of this daemon that is still there, one line each."""
    found = []
    older = {pid for pid, _ in before.processes} - {1, os.getpid()}
    for pid, (line, uid, started) in processes().items():
        # A child of a process older than this daemon is not this daemon's, whatever its user id.
        if (pid, started) in before.processes or pid == os.getpid() or parent(pid) in older:
            continue
        ours = str(data) in line
        if instance is not None:
            first = FIRST_UID + instance * SLOTS * IDS
            ours |= first <= uid < first + SLOTS * IDS
        if ours and is_alive(pid):
            found.append(f"process {pid} (uid {uid}): {line}")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if str(data) in line and line.split()[4] != str(data):
            found.append(f"mount {line}")
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if str(data) in (file := backing.read_text().strip()):
                found.append(f"loop device {backing.parts[3]} of {file}")
        except OSError:  # it goes just now
            pass
    if (mode := Path("/dev/null").stat().st_mode & 0o777) != 0o666:
        found.append(f"/dev/null has mode {mode:o}")
    # A file whose only purpose is to be locked may stay: removing it would let two daemons take one
    # number.
    lock = re.compile(r"/instance-\d+$|\.lock$")
    for name in run_files():
        if name == str(RUN / "forwarding"):  # one for all instances of the machine
            try:
                users = json.loads(Path(name).read_text() or "{}").get("users", [])
            except FileNotFoundError:  # another worker's last daemon has just ended
                continue
            if instance in users or not users:
                found.append(f"file {name} with users {users}")
        elif name not in before.run_files and not lock.search(name):
            found.append(f"file {name}")
    if instance is not None:
        found += of_instance(instance)
    return found


def of_instance(instance: int) -> list[str]:
    found = []
    prefix = f"kp{instance}-"
    found += [f"interface {name}" for name in os.listdir("/sys/class/net") if name.startswith(prefix)]
    tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, timeout=10).stdout
    found += [f"nft {line}" for line in tables.splitlines() if re.search(rf"\bkip_{instance}(_standby)?\b", line)]
    for top, names, _ in os.walk("/sys/fs/cgroup"):
        if f"kip-{instance}" in names:
            found.append(f"cgroup {top}/kip-{instance}")
    routes = subprocess.run(["ip", "route", "show", "table", "all"], capture_output=True, text=True, timeout=10).stdout
    found += [f"route {line}" for line in routes.splitlines() if f" {prefix}" in line]
    return found


def assert_none(before: Machine, data: Path, instance: int | None, within: float = 15.0) -> None:
    """Fails with the list of what is left; the kernel takes namespaces and interfaces down a moment after their end."""
    assert instance is not None, "could not find out which instance the daemon was: is /run/kip/instance-I locked?"
    deadline = time.monotonic() + within
    while found := left(before, data, instance):
        if time.monotonic() > deadline:
            raise AssertionError("left behind:\n" + "\n".join(found))
        time.sleep(0.05)
    if data.exists():
        shutil.rmtree(data)  # fails if something in it is a mount or immutable
    forget_number(data, instance)


def forget_number(data: Path, instance: int | None) -> None:
    """It stays with a data directory that has procs, stopped ones too; that is gone."""
    path = RUN / f"instance-{instance}"
    try:
        if path.read_text() == str(data):
            path.unlink()
    except FileNotFoundError:
        pass


def force_down(kip: Kip) -> None:
    """Ends what a failed test left, as far as it can be told apart; says nothing, for the failure has been said."""
    if kip.alive() and kip.daemon:
        try:
            kip.cli("down", "--all", check=False, timeout=20)
            kip.daemon.wait(5)
        except subprocess.TimeoutExpired:
            kip.daemon.kill()
    end_all(kip)


def end_all(kip: Kip) -> None:
    """Ends every process of the daemon's and takes away its mounts, rules, links and control groups, as the end of a machine does."""
    known = kip.before.processes if kip.before else set()
    for _ in range(3):
        for pid, (line, uid, started) in processes().items():
            mine = str(kip.data) in line
            if kip.instance is not None:
                first = FIRST_UID + kip.instance * SLOTS * IDS
                mine |= first <= uid < first + SLOTS * IDS
            if mine and (pid, started) not in known and pid != os.getpid():
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    pass
        time.sleep(0.1)
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        if str(kip.data) in line:
            subprocess.run(["umount", "-l", line.split()[4]], capture_output=True)
    if kip.instance is None:
        return
    for table in (f"kip_{kip.instance}", f"kip_{kip.instance}_standby"):
        subprocess.run(["nft", "delete", "table", "inet", table], capture_output=True)
    for name in os.listdir("/sys/class/net"):
        if name.startswith(f"kp{kip.instance}-"):
            subprocess.run(["ip", "link", "delete", name], capture_output=True)
    # Not that of another instance whose number begins with the same digits.
    own = f"kip-{kip.instance}"
    for top, names, _ in os.walk("/sys/fs/cgroup", topdown=False):
        for name in names:
            path = Path(top) / name
            if own in path.parts:
                _remove_group(path)


def _remove_group(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        pass  # a process in the group is still dying; a daemon that makes the group again finds it there
