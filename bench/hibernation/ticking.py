"""What it costs that programs tick in place while they are hibernated: CPU time and memory of the same procs hot and hibernated, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from harness import profiled, programs as sources, servers
from harness.clients import Redis
from harness.kip import Kip, cpu_ns
from hibernation.footprint import IDLE_S, own_by_name
from hibernation.instance import Instance
from hibernation.programs import PORT, SOURCES, Program, hello_java, http, lighttpd, need
from parkwake.client import Client, Question
from parkwake.kiphost import daemon, pss_bytes
from parkwake.workspace import Failed, Workspace

MOST_TRIES = 5


def redis(_: Workspace) -> Program:
    """Nearly empty: it ticks ten times a second, whatever it holds."""
    server = servers.redis()
    return Program("redis", server.command, Question("tcp", Redis.pack(("PING",)), "exact:" + b"+PONG\r\n".hex()), port=server.port)


def node(_: Workspace) -> Program:
    words = [need("node"), "/srv/ticks.js", str(PORT)]
    return Program("node-interval", words, http(b"hello"), {"srv/ticks.js": SOURCES / "ticks.js"})


def gunicorn(_: Workspace) -> Program:
    words = [need("gunicorn"), "-b", f"0.0.0.0:{PORT}", "-w", "2", "--chdir", "/srv", "web:application"]
    return Program("gunicorn", words, http(b"natural\n"), {"srv/web.py": sources.SOURCES / "natural" / "web.py"})


def postgres(_: Workspace) -> Program:
    server = profiled.postgres()
    question = Question("tcp", profiled.SSL_REQUEST, "exact:" + b"N".hex())
    return Program("postgres", server.command, question, server.files, port=server.port, modes=server.modes)


TICKERS: dict[str, Callable[[Workspace], Program]] = {
    "redis": redis,
    "lighttpd": lighttpd,
    "node-interval": node,
    "gunicorn": gunicorn,
    "postgres": postgres,
    "jvm": lambda work: replace(hello_java(work), name="jvm"),
}


def tiers(instances: Sequence[Instance]) -> set[str]:
    return {i.proc.inspect()["tier"] for i in instances}


def used(pids: Sequence[int]) -> int:
    """CPU time so far, ns. All of them must be there."""
    found = cpu_ns(pids)
    if len(found) != len(pids):
        raise Failed(f"processes ended: {set(pids) - found.keys()}")
    return sum(found.values())


def window(kip: Kip, instances: Sequence[Instance], seconds: float) -> dict[str, Any]:
    """CPU time of the procs and of Kip's own while no command is given, and the memory of both at the end."""
    pids = [pid for i in instances for pid in i.proc.inspect()["pids"]]
    own = kip.own_processes()
    before, own_before, began = used(pids), cpu_ns(own), time.monotonic()
    time.sleep(seconds)
    took, after, own_after = time.monotonic() - began, used(pids), cpu_ns(own)
    return {
        "seconds": took, "cpu_ns": after - before, "own_cpu_ns": sum(own_after[pid] - own_before[pid] for pid in own_after),
        "pss_bytes": pss_bytes(pids), "own": own_by_name(kip),
    }  # fmt: skip


def asleep(kip: Kip, instances: Sequence[Instance], seconds: float) -> dict[str, Any]:
    """All of them hibernated all the time: a window in which one woke is not one."""
    woken = 0
    for _ in range(MOST_TRIES):
        for instance in instances:
            if instance.proc.inspect()["tier"] != "hibernated":
                instance.hibernate()
        # The first ticks bring what they touch.
        time.sleep(IDLE_S)
        wakes = [i.proc.inspect()["wakes"] for i in instances]
        if tiers(instances) == {"hibernated"}:
            found = window(kip, instances, seconds)
            more = sum(i.proc.inspect()["wakes"] for i in instances) - sum(wakes)
            if not more and tiers(instances) == {"hibernated"}:
                return found | {"woken": woken}
        woken += 1
    raise Failed(f"{instances[0].program.name}: one of {len(instances)} woke by itself in each of {MOST_TRIES} windows")


def measure(
    work: Workspace, program_path: Path, client: Client, program: Program, count: int, rounds: int, seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """A daemon of its own; its processes alone take so much CPU time, whatever the procs are in."""
    with daemon(program_path, work.dir / f"ticking-{program.name}") as kip:
        time.sleep(IDLE_S)
        result: dict[str, Any] = {"program": program.name, "count": count, "own_empty": own_by_name(kip), "rounds": []}
        tar = program.tar(work.dir)
        instances = [Instance(kip, client, program, f"{program.name}-{i}", tar) for i in range(count)]
        for instance in instances:
            instance.ask()
        time.sleep(IDLE_S)
        # Woken, a program has no more of its memory than it has needed since.
        pids = [pid for i in instances for pid in i.proc.inspect()["pids"]]
        result["never_asleep"] = {"pss_bytes": pss_bytes(pids), "own": own_by_name(kip)}
        for instance in instances:
            instance.learn()
        for number in range(rounds):
            for instance in instances:
                instance.ask()
                instance.proc.wake()
            time.sleep(IDLE_S)
            if tiers(instances) != {"hot"}:
                raise Failed(f"{program.name}: not all are hot")
            result["rounds"].append({"hot": window(kip, instances, seconds), "hibernated": asleep(kip, instances, seconds)})
            say(f"{program.name}: {number + 1} of {rounds} rounds of ticks")
    return result
