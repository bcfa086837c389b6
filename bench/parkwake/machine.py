"""What the numbers depend on: the machine, its programs, the commit, and how busy it was."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from parkwake import ROOT
from parkwake.setups import Setup


def first_line(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return "absent"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0] if lines else ""


def commit() -> str:
    """With `+` if the tree differs from it, and `?` where there is no repository."""
    git = ["git", "-C", str(ROOT), "-c", "safe.directory=*"]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode != 0:
        return "?"
    dirty = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def load() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


def describe(setups: list[Setup], kip: Path, criu: list[str]) -> dict[str, Any]:
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    memory = re.search(r"^MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text(), re.M)
    distribution = re.search(r'^PRETTY_NAME="(.*)"', Path("/etc/os-release").read_text(), re.M)
    versions = {s.name: first_line(*s.versions) for s in setups}
    versions["criu"] = first_line(*criu[: criu.index("-L")] if "-L" in criu else criu, "--version")
    return {
        "commit": commit(),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": int(memory[1]) * 1024 if memory else 0,
        "kernel": platform.release(),
        "distribution": distribution[1] if distribution else "?",
        "kip": str(kip),
        "kip_sha256": hashlib.sha256(kip.read_bytes()).hexdigest(),
        "kip_version": first_line(str(kip), "--version"),
        "versions": {
            **versions,
            "runc": first_line("runc", "--version"),
            "nft": first_line("nft", "--version"),
            "iptables": first_line("iptables", "--version"),
        },
    }
