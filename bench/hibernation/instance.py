"""A program as a proc of Kip's: the states it is put into, each seen before it counts."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.kip import Kip, Proc
from hibernation.programs import Program
from parkwake.client import Client
from parkwake.workspace import Failed

# They sleep when they are told to, and in the tier that they are told.
STILL = ["--never-sleep"]
LEARN, LEARN_S = 10, 0.5
# A wake is on record this long after the reply, seconds.
WAKE_KNOWN_S = 1
CONNECT_S, RETRY_S, COLD_S = 0.05, 0.0003, 60.0


def require_tier(program: Path) -> None:
    """Fails unless this Kip hibernates."""
    said = subprocess.run([str(program), "sleep", "--help"], capture_output=True, text=True, timeout=20).stdout
    if "hibernated" not in said:
        raise Failed(f"{program} has no tier hibernated: `kip sleep --help` does not name it")


class Instance:
    """One proc that runs a program."""

    def __init__(self, kip: Kip, client: Client, program: Program, name: str, tar: Path | None, flags: Sequence[str] = ()):
        self.kip, self.client, self.program = kip, client, program
        ports = [str(program.port)]
        self.proc: Proc = kip.run(name, program.command, ports=ports, tar=tar, flags=[*STILL, *flags], timeout=180)
        self.host_port = self.proc.port()
        if program.fill:
            program.fill(self.host_port)

    def ask(self) -> float:
        """Microseconds from connect to the last byte of the right reply."""
        return self.client.first(self.program.question, "127.0.0.1", self.host_port).us

    def hibernate(self) -> dict[str, Any]:
        """Seen to be hibernated; the figures of that sleep."""
        for _ in range(10):
            self.kip.cli("sleep", self.proc.name, "--to", "hibernated", timeout=120)
            view = self.proc.inspect()
            if view["state"] == "hibernated":
                break
            time.sleep(0.05)  # it was in the middle of something, and went on with it at once
        if (view["state"], view["tier"]) != ("hibernated", "hibernated"):
            raise Failed(f"{self.proc.name} does not stay hibernated: {view['state']}, last wake {view['last_wake']}")
        return view["last_sleep"]

    def learn(self) -> dict[str, Any]:
        """Sleeps as it will in the measurement: a program that ticks wakes by itself at first, and Kip learns to hold it; its
        working set is what the request at the end touches. The figures of the first sleep."""
        first = self.hibernate()
        for _ in range(LEARN):
            time.sleep(LEARN_S)
            if self.proc.inspect()["tier"] == "hibernated":
                self.ask()
                self.after_reply()
                return first
            self.hibernate()
        raise Failed(f"{self.proc.name} wakes by itself again and again: {self.proc.inspect()['last_wake']}")

    def after_reply(self) -> dict[str, Any]:
        """Waits until the wake is on record, which is when the program already runs. One that ticks in place keeps what its ticks touch, and
        may have answered from that alone: it is still hibernated then, and no wake follows."""
        deadline = time.monotonic() + WAKE_KNOWN_S
        while (view := self.proc.inspect())["state"] != "running" and time.monotonic() < deadline:
            time.sleep(0.01)
        if view["state"] not in ("running", "hibernated"):
            raise Failed(f"{self.proc.name} answered and is {view['state']}")
        return view

    def cycle(self) -> tuple[dict[str, Any], float, dict[str, Any]]:
        """There and back: the figures of the sleep, microseconds of the first reply, the figures of the wake. One that woke
        by itself in between says nothing: once more."""
        for _ in range(LEARN):
            sleep = self.hibernate()
            if self.proc.inspect()["tier"] == "hibernated":
                return sleep, *self.first_reply()
        raise Failed(f"{self.proc.name} wakes by itself again and again: {self.proc.inspect()['last_wake']}")

    def first_reply(self) -> tuple[float, dict[str, Any]]:
        """Of a sleeper: microseconds, and the figures of the wake that it was, if it was one."""
        before = self.proc.inspect()
        if before["tier"] != "hibernated":
            raise Failed(f"{self.proc.name} is {before['state']}, not hibernated")
        us = self.ask()
        view = self.after_reply()
        if view["state"] == "hibernated" and view["last_wake"] == before["last_wake"]:
            return us, {"asleep": True, "steps": [], "misses": None}
        wake = view["last_wake"]
        if not wake or wake == before["last_wake"] or wake["from"] != "hibernated":
            raise Failed(f"{self.proc.name} answered without a wake from hibernation on record")
        return us, wake | {"misses": view["memory"].get("working_set_misses")}

    def cold(self) -> float:
        """Microseconds from the start of `kip start` to the first right reply. The proc has been stopped before."""
        self.kip.cli("stop", self.proc.name, timeout=60)
        if self.proc.state != "stopped":
            raise Failed(f"{self.proc.name} is not stopped")
        words = [str(self.kip.program), "--data", str(self.kip.data), "start", self.proc.name]
        begun = time.monotonic_ns()
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as start:
            replied = self.first_of_a_start(start, begun)
            assert start.stderr
            said = start.stderr.read().decode().strip()
            if start.wait() != 0:
                raise Failed(f"kip start {self.proc.name}: {said}")
        if self.proc.port() != self.host_port:
            raise Failed(f"{self.proc.name} has another port after a start")
        return (replied - begun) / 1000

    def first_of_a_start(self, start: subprocess.Popen[bytes], begun: int) -> int:
        """Tries connections until one is accepted and answered right; when that was. One at a time: a server with a lot to
        do would otherwise do it for each."""
        question = self.program.question
        kind, _, wanted = question.expect.partition(":")
        right = bytes.fromhex(wanted)
        while time.monotonic_ns() - begun < COLD_S * 1e9:
            if start.poll() not in (None, 0):
                break
            try:
                with socket.create_connection(("127.0.0.1", self.host_port), timeout=CONNECT_S) as s:
                    s.settimeout(COLD_S)
                    s.sendall(question.request)
                    got = b""
                    while not got.endswith(right) and not (got.startswith(b"-") and got.endswith(b"\r\n")):
                        if not (piece := s.recv(65536)):
                            break
                        got += piece
                    at = time.monotonic_ns()
                    good = got == right if kind == "exact" else got.startswith(b"HTTP/1.1 200") and got.endswith(right)
                    if good:
                        return at
                    if got and not got.startswith(b"-LOADING"):
                        raise Failed(f"{self.proc.name} answered {got[:100]!r}")
            except OSError:
                pass
            time.sleep(RETRY_S)
        raise Failed(f"{self.proc.name} does not answer within {COLD_S:.0f} s of its start")

    def remove(self) -> None:
        self.proc.remove()

