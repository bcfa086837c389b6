"""Starts: from the call of `kip run` to the program's first instruction, and to the end of `kip run`; beside `runc run`."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import programs
from harness.kip import Kip
from harness.servers import Server
from parkwake import byhand
from parkwake.client import Question
from parkwake.kiphost import AWAKE, skeleton
from parkwake.setups import Setup
from parkwake.workspace import Failed, Workspace, command

# So that the pools of sandboxes and networks are full again.
PAUSE_S = 0.15
LAUNCHER = "sandbox alone with pools filled"
LAUNCHER_START = f"{LAUNCHER}, first instruction"
LAUNCHER_BUILD = "cargo build --release -p kip-sandbox --example start_latency"


def stamp(text: str, begun: int) -> float:
    """Microseconds from `begun` to the first instruction, as the program wrote it."""
    word = text.split()
    if not word or not word[0].isdigit() or int(word[0]) < begun:
        raise Failed(f"the program did not say when it began: {text[:100]!r}")
    return (int(word[0]) - begun) / 1000


def wait_stamp(read: Callable[[], str], begun: int) -> float:
    deadline = time.monotonic() + 5
    while not (text := read()).endswith("\n"):
        if time.monotonic() > deadline:
            raise Failed(f"the program did not say when it began: {text[:100]!r}")
        time.sleep(0.002)
    return stamp(text, begun)


def under_kip(kip: Kip, name: str, words: list[str | Path], program: list[str]) -> tuple[int, float]:
    """(when it was asked for, microseconds that the command took)."""
    begun = time.monotonic_ns()
    done = subprocess.run(
        [str(kip.program), "--data", str(kip.data), "run", "--name", name, *map(str, [*AWAKE, *words]), "--", *program],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    took = (time.monotonic_ns() - begun) / 1000
    if done.returncode != 0:
        raise Failed(f"kip run: {done.stderr.strip()}")
    return begun, took


def measure(work: Workspace, tools: dict[str, Path], kip: Kip, number: int, samples: int) -> list[dict[str, Any]]:
    """Rows {what, round, us}."""
    tar = programs.tarball(work.dir / "first.tar", {"srv/first": tools["first"]}, {"srv/first": 0o755})
    server = Server("first", ["/srv/first"], 1, {"srv/first": tools["first"]}, modes={"srv/first": 0o755})
    setup = Setup("first", server, Question("tcp", b"", "line:00"), (), 0, "")
    root = byhand.make_root(work, skeleton(kip), setup, "runc", {})
    runc = byhand.Runc(work, root, number, setup)
    rows: list[dict[str, Any]] = []

    def note(what: str, round_number: int, us: float) -> None:
        if round_number >= 0:
            rows.append({"what": what, "round": round_number, "us": us})

    for i in range(-1, samples):
        time.sleep(PAUSE_S)
        name = f"first-{i + 1}"
        begun, took = under_kip(kip, name, ["--tar", tar], ["/srv/first"])
        note("kip run with a tarball, first instruction", i, wait_stamp(lambda name=name: kip.cli("logs", name).stdout, begun))
        note("kip run with a tarball, the command", i, took)
        kip.cli("rm", name, "--force")
        time.sleep(PAUSE_S)
        _, took = under_kip(kip, name, [], ["sleep", "infinity"])
        note("kip run of sleep, the command", i, took)
        kip.cli("rm", name, "--force")
        with runc.started() as begun:
            note("runc run, first instruction", i, wait_stamp(runc.log.read_text, begun))
    return rows


def launcher(work: Workspace, kip: Path, samples: int) -> list[dict[str, Any]]:
    """The same by the sandbox's own measurement, which talks to the launcher without a daemon; none if it is not built."""
    program = kip.parent / "examples" / "start_latency"
    if not program.exists():
        return []
    file = work.dir / "start-latency.json"
    command(program, str(samples), file, timeout=300)
    found = json.loads(file.read_text())
    wanted = {"start: request to first instruction": LAUNCHER_START, "start: request to answer": f"{LAUNCHER}, answer"}
    return [
        {"what": what, "round": i, "us": ns / 1000} for key, what in wanted.items() for i, ns in enumerate(found.get(key, []))
    ]
