"""`/sys` of a proc: the kernel's, read-only, with the proc's own control groups, so that runtimes size themselves by its limits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.kip import Kip, Proc
from harness.wait import wait_for

LIMITS = ["--mem", "512M", "--cpus", "1"]
# The limits as the kernel has them on a machine with hierarchies of version 1, and on one without.
MEMORY = "cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/memory.max"
# It holds files open and reads them again at each signal.
READS = """
import signal, sys
held = [open(path) for path in sys.argv[1:]]
def read(*_):
    for file in held:
        file.seek(0)
        print(file.name, file.read().split()[0], flush=True)
signal.signal(signal.SIGUSR1, read)
print("up", flush=True)
while True:
    signal.pause()
"""


def inside(proc: Proc, command: str) -> str:
    return proc.exec("sh", "-c", command).stdout.strip()


def limit(proc: Proc) -> int:
    return int(inside(proc, MEMORY))


# promise sandbox: /sys is the kernel's, of the proc's own network, read-only; /sys/fs/cgroup has
#   the proc's own groups and no other's
def test_it_is_there_and_read_only(kip: Kip) -> None:
    other = kip.run("other", ["sleep", "1000"], flags=["--mem", "99M"])
    proc = kip.run("seen", ["sleep", "1000"], flags=LIMITS)
    assert (limit(proc), limit(other)) == (512 << 20, 99 << 20)
    kip.cli("update", "seen", "--mem", "600M")
    assert limit(proc) == 600 << 20, "it is a view, no copy"
    # A program that was told a number of processors by a file of /sys has them all.
    assert inside(proc, "cat /sys/devices/system/cpu/online") == Path("/sys/devices/system/cpu/online").read_text().strip()
    networks = inside(proc, "ls /sys/class/net").split()
    assert "lo" in networks and len(networks) == 2, "its own, not the machine's"
    found = inside(proc, "find /sys/fs/cgroup -name 'kip-*'")
    assert found == "", "no group but its own"
    for path in ("/sys/kernel/uevent_helper", "/sys/fs/cgroup/memory/cgroup.procs", "/sys/fs/cgroup/cgroup.procs"):
        refused = kip.cli("exec", "seen", "--", "sh", "-c", f"echo 1 > {path}", check=False)
        assert refused.returncode != 0, path
    made = kip.cli("exec", "seen", "--", "mkdir", "/sys/fs/cgroup/memory/deeper", check=False)
    assert made.returncode != 0 and "ead-only" in made.stderr, made.stderr
    assert all("ro," in line for line in inside(proc, "grep ' /sys' /proc/mounts").splitlines())


# promise sandbox: a JVM and Node take a proc's `--mem` and `--cpus` for the machine's
def test_a_jvm_sizes_itself(kip: Kip) -> None:
    proc = kip.run("jvm", ["sleep", "1000"], flags=LIMITS)
    seen = kip.cli("exec", "jvm", "--", "java", "-XshowSettings:system", "-XX:+PrintFlagsFinal", "-version")
    text = seen.stdout + seen.stderr
    assert re.search(r"Memory Limit: 512\.00M", text) and re.search(r"Effective CPU Count: 1\b", text), text
    assert int(re.search(r"MaxHeapSize\s+= (\d+)", text)[1]) == 128 << 20
    proc.remove()


def test_node_sizes_itself(kip: Kip) -> None:
    proc = kip.run("node", ["sleep", "1000"], flags=LIMITS)
    script = "console.log(JSON.stringify([process.constrainedMemory(), v8.getHeapStatistics().heap_size_limit]))"
    limit, heap = json.loads(proc.exec("node", "-e", script).stdout)
    assert limit == 512 << 20 and heap <= 320 << 20, (limit, heap)
    proc.remove()


# promise sandbox: /sys is there after a sleep of each tier, natively and by CRIU, and what a
#   program has open in it
@pytest.mark.parametrize("engine", ["native", "criu"])
def test_it_outlives_sleep(fresh_kip: Callable[..., Kip], store: Path, engine: str) -> None:
    kip = fresh_kip("--store", str(store), *(["--only-criu"] if engine == "criu" else []))
    held = ["/sys/class/net/lo/mtu", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
    held = [path for path in held if "memory" not in path or Path("/sys/fs/cgroup/memory").is_dir()]
    proc = kip.run("reads", ["python3", "-c", READS, *held], flags=["--idle", "1h", *LIMITS])
    wait_for("it is up", lambda: "up" in proc.logs(), 10)
    before = inside(proc, "grep ' /sys' /proc/mounts")
    for number, tier in enumerate(("hibernated", "parked", "parked", "archived"), 1):
        {"hibernated": proc.hibernate, "parked": proc.sleep, "archived": proc.archive}[tier]()
        assert limit(proc) == 512 << 20
        assert proc.inspect()["last_wake"]["from"] == tier
        if tier != "hibernated":
            assert proc.rebuilt() == (engine == "native"), proc.inspect()["last_wake"]
        assert inside(proc, "grep ' /sys' /proc/mounts") == before
        proc.exec("kill", "-USR1", "2")
        lines = wait_for("it has read", lambda n=number: (text := proc.logs().splitlines()[1:]) and len(text) == n * len(held) and text, 10)
        assert lines[-len(held) :] == [f"{path} {65536 if 'mtu' in path else 512 << 20}" for path in held]
