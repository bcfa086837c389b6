"""The database under Kip: a source, its template, and its clones."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.clients import free_port
from harness.kip import Kip, Proc
from harness.wait import wait_for
from parkwake.workspace import Failed
from querying.database import PORT, Database
from querying.instances import WITHIN_S, Disk, Instance, Since, disk

METHODS = ("hot", "warm", "cold")
COMMAND_S = 300


class Hosted:
    """A source as a proc, which answers."""

    def __init__(self, kip: Kip, database: Database, state: str, tar: Path, name: str, limit_bytes: int | None = None):
        self.kip, self.database, self.name = kip, database, name
        limit = ["--mem", str(limit_bytes)] if limit_bytes else []
        server = database.server(state)
        self.proc: Proc = kip.run(name, server.command, ports=[str(PORT)], tar=tar, flags=["--never-sleep", *limit], timeout=300)
        self.address = ("127.0.0.1", self.proc.port())
        database.first.ask(*self.address, WITHIN_S)

    def take_template(self) -> float:
        """The command, milliseconds. In place of an older one."""
        since = Since()
        self.kip.cli("template", "take", self.name, timeout=COMMAND_S)
        return since.ms

    def template(self) -> Disk:
        return disk(*(self.kip.data / "templates").iterdir())

    def remove_templates(self) -> None:
        for template in self.kip.json("template", "ls")["templates"]:
            self.kip.cli("template", "rm", template["id"])

    def base(self) -> Disk:
        """The files from which it started, without those of the machine's own /usr."""
        return disk(self.directory(self.name) / "layer")

    def directory(self, name: str) -> Path:
        return self.kip.data / "procs" / name

    def disk(self) -> Disk:
        return disk(self.directory(self.name))

    def clone(self, method: str) -> Instance:
        """Asked as soon as its port is there, which can be before the command has ended."""
        with ThreadPoolExecutor(1) as pool:
            port, since = free_port(), Since()
            words = ("clone", self.name, f"--{method}", "-p", f"{port}:{PORT}", "--json")
            command = pool.submit(self.kip.cli, *words, timeout=COMMAND_S)
            took: list[float] = []
            command.add_done_callback(lambda _: took.append(since.ms))
            try:
                self.database.first.ask("127.0.0.1", port, WITHIN_S, lambda: command.done() and command.exception() is not None)
                answers_ms = since.ms
            finally:
                made = json.loads(command.result(COMMAND_S).stdout)  # why it failed, if it did
        (view,) = made["clones"]
        proc = Proc(self.kip, view["name"])
        try:
            proc.wait_state("running")
            more = {"command_ms": took[0], "made_ms": made["total_us"] / 1e3, "still_ms": made["still_us"] / 1e3}
            if method != "cold":
                more |= self.woken(proc)
        except BaseException:
            proc.remove()
            raise
        return Instance(
            method, ("127.0.0.1", port), since.s, answers_ms, lambda: proc.inspect()["pids"],
            lambda: disk(self.directory(proc.name)), proc.remove, more,
        )  # fmt: skip

    def woken(self, clone: Proc) -> dict[str, Any]:
        """How a clone was woken, which is on record when its program runs already. One that was not has started, and is no clone."""
        try:
            last = wait_for("its wake is on record", lambda: clone.inspect()["last_wake"], 5)
        except AssertionError:
            raise Failed(f"it is no clone, for it started cold: {self.refused(clone.name)}") from None
        return {"wake_ms": last["total_us"] / 1e3, "native": clone.rebuilt(), "refused": self.refused(clone.name)}

    def refused(self, clone: str) -> str | None:
        """Why a wake of a clone failed, before one that did not."""
        events = [event for event in self.kip.events() if event["name"] == clone]
        made = max((at for at, event in enumerate(events) if event["kind"] == "cloned"), default=0)  # others had its name
        found = [event["detail"] for event in events[made:] if event["kind"] == "refused"]
        return found[-1] if found else None

    def advice(self) -> dict[str, Any]:
        """What `kip clone --explain` says just now."""
        return self.kip.json("clone", self.name, "--explain")

    def automatic(self) -> dict[str, Any]:
        """What `kip clone --method auto` does just now; the clone is removed."""
        done = self.kip.cli("clone", self.name, "--method", "auto", "--json", timeout=COMMAND_S)
        made = json.loads(done.stdout)
        for view in made["clones"]:
            Proc(self.kip, view["name"]).remove()
        return {"method": made["method"], "why": made.get("why")}

    def remove(self) -> None:
        self.proc.remove()
