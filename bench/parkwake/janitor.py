"""Takes away what a run of the bench made: see `workspace`. Standard input is a pipe from the run; its end is the signal."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

NETNS = Path("/run/netns")


def run(*words: str, timeout: float = 30) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout).stdout
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return ""


def processes() -> list[int]:
    return [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]


def inside(namespace: Path) -> list[int]:
    """Processes that stand in a network namespace."""
    wanted, found = namespace.stat().st_ino, []
    for pid in processes():
        try:
            if os.stat(f"/proc/{pid}/ns/net").st_ino == wanted:
                found.append(pid)
        except OSError:
            pass
    return found


def naming(text: str) -> list[int]:
    """Processes with the text in their command line."""
    found = []
    for pid in processes():
        try:
            if text.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            pass
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def end_kips(directory: Path) -> None:
    """Daemons that the run did not bring down itself."""
    for socket in directory.glob("*/run/api.sock"):
        data = socket.parent.parent
        line = next((Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0") for p in naming(str(data))), None)
        if line and line[0].endswith(b"kip"):
            run(line[0].decode(), "--data", str(data), "down", "--all", timeout=60)


def clean(prefix: str, directory: Path) -> list[str]:
    """Returns what would not go."""
    end_kips(directory)
    for container in re.findall(rf"^({prefix}\S*)", run("runc", "--root", str(directory / "runc"), "list"), re.M):
        run("runc", "--root", str(directory / "runc"), "delete", "--force", container)
    namespaces = [p for p in NETNS.glob(f"{prefix}-*")]
    for _ in range(50):
        left = [pid for n in namespaces for pid in inside(n)] + naming(str(directory))
        if not left:
            break
        kill(left)
        time.sleep(0.05)
    for namespace in namespaces:
        run("ip", "netns", "delete", namespace.name)
    for link in os.listdir("/sys/class/net"):
        if link.startswith(f"{prefix}-"):
            run("ip", "link", "delete", link)
    if prefix in run("nft", "list", "tables"):
        run("nft", "delete", "table", "inet", prefix)
    for group in Path("/sys/fs/cgroup").glob(f"*/{prefix}*"):
        with suppress(OSError):  # it is listed below
            group.rmdir()
    for _ in range(20):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            break
        time.sleep(0.1)
    found = [f"process {pid}" for pid in naming(str(directory))]
    found += [str(p) for p in NETNS.glob(f"{prefix}-*")]
    found += [f"link {name}" for name in os.listdir("/sys/class/net") if name.startswith(f"{prefix}-")]
    found += [str(directory)] if directory.exists() else []
    return found + [str(p) for p in Path("/sys/fs/cgroup").glob(f"*/{prefix}*")]


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    remains = clean(sys.argv[1], Path(sys.argv[2]))
    for line in remains:
        print(f"bench: left behind: {line}", file=sys.stderr)
    sys.exit(1 if remains else 0)
