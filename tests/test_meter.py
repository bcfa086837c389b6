"""`kip meter`: what procs have used, held against the kernel's own counters; what a daemon's death and `kip down` leave of it."""

from __future__ import annotations

import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import programs
from harness.clients import Lines
from harness.kip import Kip, Proc
from harness.wait import wait_for
from test_api import free_port

PROGRAM = Path(__file__).parent / "programs" / "lines.py"
CGROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20


def lines(kip: Kip, tmp_path: Path, name: str, *flags: str) -> Proc:
    tar = programs.tarball(tmp_path / f"{name}.tar", {"srv/lines.py": PROGRAM})
    return kip.run(name, ["/usr/bin/python3", "/srv/lines.py", "9000"], ports=[9000], tar=tar, flags=flags)


def told(proc: Proc, what: str, port: int | None = None) -> Any:
    connection = Lines(port or proc.port(), timeout=60)
    try:
        return connection.ask(what)
    finally:
        connection.close()


def burn(proc: Proc, seconds: float, port: int | None = None) -> None:
    """So much CPU time, as the program's own clock counts it."""
    told(proc, "import time; end = time.process_time() + " + str(seconds), port)
    told(proc, "all(time.process_time() < end for _ in iter(int, 1))", port)


def meter(kip: Kip, name: str, *flags: str) -> dict[str, Any]:
    [view] = kip.json("meter", name, *flags)
    return view


def tier(view: dict[str, Any], name: str) -> dict[str, Any]:
    return next((t for t in view["tiers"] if t["tier"] == name), {"time_us": 0, "byte_seconds": 0.0})


def cgroup_file(kip: Kip, name: str, *files: str) -> Path:
    """The first that there is, wherever this machine has its controllers."""
    groups = [below / f"kip-{kip.instance}" / name for below in (CGROUPS, *CGROUPS.iterdir())]
    found = [group / file for file in files for group in groups if (group / file).exists()]
    assert found, f"the kernel has none of {files} for {name}"
    return found[0]


def kernel_cpu_us(kip: Kip, name: str) -> float:
    path = cgroup_file(kip, name, "cpuacct.usage", "cpu.stat")
    text = path.read_text()
    return int(text) / 1000 if path.name == "cpuacct.usage" else int(re.search(r"usage_usec (\d+)", text)[1])


def held_of(text: str) -> int:
    fields = dict(line.split() for line in text.splitlines())
    if "total_rss" in fields:
        return sum(int(fields[name]) for name in ("total_rss", "total_shmem", "total_mapped_file"))
    kernel = int(fields.get("kernel", 0)) - int(fields.get("slab_reclaimable", 0))
    return sum(int(fields[name]) for name in ("anon", "shmem", "file_mapped")) + max(kernel, 0)


def near(is_: float, should: float, share: float = 0.01) -> None:
    assert abs(is_ - should) <= share * should, f"{is_} is not {should} to within {share:.0%}"


# promise meters: CPU time is the kernel's own count within 1%, over sleeps of both kinds, killed
#   daemons, a stop and another cgroup, a reboot
# held by: this, `tests/test_meter.py::test_a_reboot_neither_loses_nor_repeats`,
#   `kip_journal::meter::tests::counters_that_begin_anew_are_neither_lost_nor_counted_twice`
def test_cpu_time_is_the_kernels(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """Over sleeps of both kinds, a daemon that is killed, and a stop, after which it has another cgroup."""
    kip = fresh_kip()
    proc = lines(kip, tmp_path, "burn")
    burn(proc, 0.7)
    proc.hibernate()
    burn(proc, 0.5)
    proc.sleep()
    before = meter(kip, "burn")["cpu_us"]
    near(before, kernel_cpu_us(kip, "burn"))
    kip.kill()
    kip.up()
    near(meter(kip, "burn")["cpu_us"], before, 0.001)
    burn(proc, 0.5)
    port = proc.port()
    kip.kill()
    burn(proc, 0.5, port)  # what it does while no daemon is there counts
    kip.up()
    first = kernel_cpu_us(kip, "burn")
    assert first > 2.2e6
    near(meter(kip, "burn")["cpu_us"], first)
    proc.stop()
    stopped = meter(kip, "burn")["cpu_us"]
    assert first <= stopped <= first * 1.05, "ending takes little"
    proc.start()
    wait_for("it listens", lambda: answers(proc), 30)
    burn(proc, 3)
    near(meter(kip, "burn")["cpu_us"], stopped + kernel_cpu_us(kip, "burn"))


# promise meters: CPU time and connections by tier: what was used in it and by the wake that ended
#   it, read from the kernel when the tier changes; connections that came to a sleeper are those
#   that woke it
# held by: this, `kip_journal::meter::tests::each_tier_has_its_own_cpu_time`
def test_each_tier_has_its_own(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """CPU time and connections, read from the kernel where it changes its tier: what was used there, and what woke it."""
    kip = fresh_kip()
    proc = lines(kip, tmp_path, "split", "--idle", "1h", "--park-after", "1h")
    cpu = lambda view, name: tier(view, name).get("cpu_us", 0)  # noqa: E731
    begun, hot = cpu(meter(kip, "split"), "hot"), 0.0
    for sleep in (proc.hibernate, proc.sleep):
        woken = kernel_cpu_us(kip, "split")
        burn(proc, 0.6)
        asleep, before = kernel_cpu_us(kip, "split"), meter(kip, "split")
        hot += asleep - woken
        sleep()
        proc.wake()
        view = meter(kip, "split")
        grown = {name: cpu(view, name) - cpu(before, name) for name in ("hot", "hibernated", "parked")}
        near(sum(grown.values()), kernel_cpu_us(kip, "split") - asleep, 0.01 + 20_000 / sum(grown.values()))
        hot += grown["hot"]
    assert cpu(view, "parked") > 0, "a tree that is rebuilt takes some"
    near(cpu(view, "hot") - begun, hot, 0.01 + 20_000 / hot)
    near(sum(used["cpu_us"] for used in view["tiers"]), view["cpu_us"], 0.001)
    near(view["cpu_us"], kernel_cpu_us(kip, "split"))
    before = view
    for count, sleep in enumerate((proc.hibernate, proc.sleep, None, proc.sleep), 1):
        if sleep:
            sleep()
        told(proc, "1")
        counted = lambda: meter(kip, "split")["connections"] - before["connections"]  # noqa: E731
        wait_for("the next look", lambda: counted() == count, 20)  # noqa: B023
    view = meter(kip, "split")
    grown = {t: tier(view, t)["connections"] - tier(before, t).get("connections", 0) for t in ("hot", "hibernated", "parked")}
    assert grown == {"hot": 1, "hibernated": 1, "parked": 2}, grown
    assert sum(used["connections"] for used in view["tiers"]) == view["connections"]


# promise meters: connections of Kip's own checks (`--ready`, `--probe`) are not counted
# held by: this, `kip_journal::meter::tests::our_own_connections_do_not_count`
def test_kip_s_own_checks_do_not_count(kip: Kip, tmp_path: Path) -> None:
    """Neither those of readiness, which are many while it does not listen yet, nor those of probes."""
    tar = programs.tarball(tmp_path / "late.tar", {"srv/lines.py": PROGRAM})
    port = free_port()
    late = ["sh", "-c", "sleep 1; exec /usr/bin/python3 /srv/lines.py 9000"]
    flags = ["--ready", "tcp:9000", "--probe", f"{port}=tcp:9000", "--idle", "1h"]
    proc = kip.run("asked", late, ports=[9000], tar=tar, flags=flags, wait_ready=False)

    def asked() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
            answer.read()
        return kernel_accepted(proc) >= 6

    for _ in range(3):
        told(proc, "1")
    wait_for("the kernel has counted the checks, too", asked, 30)
    wait_for("the next look", lambda: meter(kip, "asked")["connections"] >= 3, 10)
    assert meter(kip, "asked")["connections"] == 3


def kernel_accepted(proc: Proc) -> int:
    names, values = [line.split() for line in Path(f"/proc/{proc.inspect()['pids'][0]}/net/snmp").read_text().splitlines() if line.startswith("Tcp:")]
    return int(dict(zip(names, values, strict=True))["PassiveOpens"])


def test_a_reboot_neither_loses_nor_repeats(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """The counters of cgroup and network namespace begin anew, and by the next look show more than they did."""
    kip = fresh_kip()
    proc = lines(kip, tmp_path, "again")
    burn(proc, 0.3)
    proc.sleep()
    before = meter(kip, "again")
    kip.reboot()
    burn(proc, 1.2)
    after = meter(kip, "again")
    assert kernel_cpu_us(kip, "again") > before["cpu_us"]
    near(after["cpu_us"], before["cpu_us"] + kernel_cpu_us(kip, "again"))
    assert after["connections"] == before["connections"] + 2, (before, after)
    assert tier(after, "parked")["time_us"] > tier(before, "parked")["time_us"]


def answers(proc: Proc) -> bool:
    try:
        return told(proc, "1 + 1") == "2"
    except OSError:
        return False


class Integral:
    """What the kernel says that the proc holds, times how long, looked at fifty times a second."""

    def __init__(self, kip: Kip, name: str):
        self.path = cgroup_file(kip, name, "memory.stat")
        self.samples: list[tuple[float, int]] = []
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.go)
        self.thread.start()

    def go(self) -> None:
        while not self.end.is_set():
            self.samples.append((time.time(), held_of(self.path.read_text())))
            time.sleep(0.02)

    def stop(self) -> float:
        """Bytes times seconds."""
        self.end.set()
        self.thread.join()
        return self.so_far()

    def so_far(self) -> float:
        return self.within(0, time.time())

    def within(self, begin: float, end: float) -> float:
        """Of that part of its time, in seconds since the epoch: on a busy machine an answer of Kip takes its time."""
        total = 0.0
        for a, b in zip(self.samples, self.samples[1:], strict=False):
            first, last = max(a[0], begin), min(b[0], end)
            if first < last:
                at = [a[1] + (b[1] - a[1]) * (t - a[0]) / (b[0] - a[0]) for t in (first, last)]
                total += (last - first) * sum(at) / 2
        return total


# promise P13: meters per proc and tier: GB-time, CPU time, requests as far as the kernel counts
#   them (see "Meters"), each against the kernel's own count within 1%
# held by: this, `tests/test_meter.py::test_cpu_time_is_the_kernels`,
#   `tests/test_meter.py::test_each_tier_has_its_own`,
#   `tests/test_meter.py::test_datagrams_are_counted`
# promise meters: memory times time is the integral of the kernel's counter within 1%, hot and
#   hibernated; of a parked proc what its generation takes on the disk
# held by: this,
#   `kip_journal::meter::tests::memory_changes_evenly_between_samples_and_not_at_all_in_sleep`
@pytest.mark.measures
def test_memory_is_the_integral_of_the_kernels_counter(kip: Kip, tmp_path: Path) -> None:
    """Of a program whose memory grows and shrinks, and of one that sleeps, in each tier where its tier has it."""
    proc = lines(kip, tmp_path, "grow", "--idle", "1h")
    told(proc, f"import time; kept = [bytearray(60 * {MIB})]")
    integral = Integral(kip, "grow")
    before = meter(kip, "grow")
    told(proc, f"[(kept.append(bytearray({MIB})), time.sleep(0.08)) for _ in range(40)][0][1]")
    told(proc, "time.sleep(1)")
    told(proc, "[(kept.pop() and None, time.sleep(0.08)) for _ in range(30)][0][1]")
    after = meter(kip, "grow")
    integral.stop()
    kernel = integral.within(before["to_ms"] / 1000, after["to_ms"] / 1000)
    used = tier(after, "hot")["byte_seconds"] - tier(before, "hot")["byte_seconds"]
    assert kernel > 400 * MIB
    near(used, kernel)

    proc.hibernate()
    begun, held = meter(kip, "grow"), held_of(cgroup_file(kip, "grow", "memory.stat").read_text())
    sets = kip.info()["room"]["set_bytes"]
    time.sleep(2)
    ended = meter(kip, "grow")
    seconds = (tier(ended, "hibernated")["time_us"] - tier(begun, "hibernated")["time_us"]) / 1e6
    assert 2 <= seconds < 4 and ended["tier"] == "hibernated", ended
    used = tier(ended, "hibernated")["byte_seconds"] - tier(begun, "hibernated")["byte_seconds"]
    near(used, (held + sets) * seconds)

    view = proc.sleep()
    begun, generation = meter(kip, "grow"), kip.data / "procs" / "grow" / f"gen-{view['generation']}"
    time.sleep(1.5)
    ended = meter(kip, "grow")
    on_disk = sum(file.stat().st_blocks * 512 for file in generation.iterdir())
    seconds = (tier(ended, "parked")["time_us"] - tier(begun, "parked")["time_us"]) / 1e6
    used = tier(ended, "parked")["byte_seconds"] - tier(begun, "parked")["byte_seconds"]
    near(used, on_disk * seconds)
    near(ended["held_bytes"], on_disk)
    assert proc.state == "parked", "who reads a meter wakes nobody"


# promise meters: of a short wake, in which memory comes back at once: within 20%
# held by: this,
#   `kip_supervisor::task::deadline::tests::memory_is_sampled_the_more_rarely_the_longer_it_runs`
@pytest.mark.measures
def test_a_short_wake_is_measured_as_memory_comes(kip: Kip, tmp_path: Path) -> None:
    """Lazily woken it has nearly nothing at first and all of it soon after; a look a second later would take that for an even growth."""
    proc = lines(kip, tmp_path, "short", "--idle", "1h", "--lazy", "on")
    told(proc, f"import time, random; kept = bytearray(random.randbytes({MIB})) * 80")
    proc.sleep()
    before = meter(kip, "short")
    integral = Integral(kip, "short")
    told(proc, "(sum(kept[::4096]), time.sleep(0.8))[0]")
    hot = lambda view: tier(view, "hot")["byte_seconds"]  # noqa: E731
    least = integral.so_far()
    used = hot(meter(kip, "short")) - hot(before)
    assert 0.8 * least <= used <= 1.2 * integral.stop(), (least, used)


# promise meters: of an archived proc what it takes in the store
def test_of_an_archived_one_the_store_counts(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    kip = fresh_kip("--store", str(tmp_path / "store"))
    proc = lines(kip, tmp_path, "away")
    told(proc, f"import random; kept = random.randbytes(4 * {MIB})")
    proc.archive()
    begun = meter(kip, "away")
    objects = [file for file in (tmp_path / "store").rglob("*") if file.is_file()]
    stored = sum(file.stat().st_size for file in objects)
    assert begun["tier"] == "archived" and stored > 4 * MIB
    near(begun["held_bytes"], stored, 0.02)
    kip.kill()
    time.sleep(1)
    kip.up()
    ended = meter(kip, "away")
    seconds = (tier(ended, "archived")["time_us"] - tier(begun, "archived")["time_us"]) / 1e6
    assert seconds >= 1 and proc.state == "archived"
    used = tier(ended, "archived")["byte_seconds"] - tier(begun, "archived")["byte_seconds"]
    near(used, begun["held_bytes"] * seconds)
    assert told(proc, "len(kept)") == str(4 * MIB)
    assert meter(kip, "away")["wakes"] == [{"from": "archived", "trigger": "tcp", "count": 1}]


# promise meters: a killed daemon loses no time of who lives on; after `kip down` and `up` all
#   counts are as they were; a stopped proc's time does not count
# held by: this, `kip_journal::meter::tests::the_time_without_a_daemon_counts_where_it_was`
def test_it_outlives_daemons(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """A killed daemon loses no time of procs that live on; after `kip down` all is as it was, and the time until `kip up` counts
    for no proc."""
    kip = fresh_kip()
    parked, awake = lines(kip, tmp_path, "asleep"), lines(kip, tmp_path, "awake", "--idle", "1h")
    parked.sleep()
    before = {name: meter(kip, name) for name in ("asleep", "awake")}
    kip.kill()
    time.sleep(2)
    kip.up()
    after = {name: meter(kip, name) for name in ("asleep", "awake")}
    for name, where in (("asleep", "parked"), ("awake", "hot")):
        passed = (after[name]["to_ms"] - before[name]["to_ms"]) * 1000
        assert passed > 2_000_000
        assert abs(tier(after[name], where)["time_us"] - tier(before[name], where)["time_us"] - passed) < 20_000, name
        assert after[name]["from_ms"] == before[name]["from_ms"]
    assert after["awake"]["tiers"] == [tier(after["awake"], "hot")], "it was nowhere else"
    kip.cli("down", "--all")
    kip.wait_dead()
    time.sleep(1)
    kip.up()
    down = {name: meter(kip, name) for name in ("asleep", "awake")}
    time.sleep(0.3)
    assert meter(kip, "awake")["tiers"] == down["awake"]["tiers"], "a stopped one's time does not count"
    grown = tier(down["awake"], "hot")["time_us"] - tier(after["awake"], "hot")["time_us"]
    assert 0 <= grown < (down["awake"]["to_ms"] - after["awake"]["to_ms"] - 1000) * 1000
    assert tier(down["asleep"], "parked")["time_us"] >= tier(after["asleep"], "parked")["time_us"]
    assert down["asleep"]["cpu_us"] >= after["asleep"]["cpu_us"]


# promise meters: wakes by tier and trigger, connections
# held by: this, `kip_engine::cause::tests::each_cause_has_its_text_its_working_set_and_its_word`
def test_wakes_and_connections_are_counted(kip: Kip, tmp_path: Path) -> None:
    proc = lines(kip, tmp_path, "calls", "--hibernate", "held")
    begun = meter(kip, "calls")
    for _ in range(3):
        proc.sleep()
        told(proc, "1")
    proc.hibernate()
    told(proc, "1")
    proc.sleep()
    proc.wake()
    proc.hibernate()
    proc.exec("true")
    view = meter(kip, "calls")
    wakes = {(w["from"], w["trigger"]): w["count"] for w in view["wakes"]}
    assert wakes[("parked", "tcp")] == 3 and wakes[("parked", "wake")] == 1, wakes
    assert wakes[("hibernated", "tcp")] == 1 and wakes[("hibernated", "exec")] == 1, wakes
    assert sum(wakes.values()) == proc.inspect()["wakes"]
    wait_for("the next look", lambda: meter(kip, "calls")["connections"] - begun["connections"] >= 4, 10)
    assert meter(kip, "calls")["connections"] - begun["connections"] == 4


ECHO = """
import socket
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
s.bind(("::", 9000))
while True:
    data, peer = s.recvfrom(2048)
    s.sendto(data, peer)
"""


# promise meters: UDP datagrams are the kernel's own count, those too that woke it
def test_datagrams_are_counted(kip: Kip) -> None:
    """Each that came, those too that woke it and those that waited for it."""
    proc = kip.run("echo", ["/usr/bin/python3", "-c", ECHO], ports=["9000/udp"])
    begun, sent = meter(kip, "echo")["datagrams"], 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(("127.0.0.1", proc.port(proto="udp")))
        client.settimeout(30)
        wait_for("it listens", lambda: proc.exec("grep", "-c", ":2328", "/proc/net/udp6", check=False).returncode == 0, 20)
        for sleep in (proc.hibernate, proc.sleep, proc.sleep):
            sleep()
            for _ in range(50):
                client.send(b"x" * 10)
                assert client.recv(100) == b"x" * 10
                sent += 1
    wait_for("the next look", lambda: meter(kip, "echo")["datagrams"] - begun >= sent, 10)
    view, init = meter(kip, "echo"), proc.inspect()["pids"][0]
    assert view["datagrams"] - begun == sent
    names, values = [line.split() for line in Path(f"/proc/{init}/net/snmp").read_text().splitlines() if line.startswith("Udp:")]
    v6 = dict(line.split() for line in Path(f"/proc/{init}/net/snmp6").read_text().splitlines())
    kernels = int(dict(zip(names, values, strict=True))["InDatagrams"]) + int(v6["Udp6InDatagrams"])
    assert view["datagrams"] == kernels, "the kernel's own count"


# promise meters: `--since`: to a quarter of an hour; what is kept for it stays short
# held by: this, `kip_journal::meter::marks::tests::between_marks_the_use_is_even`,
#   `kip_journal::meter::marks::tests::the_file_stays_short`
def test_shown_for_people(kip: Kip, tmp_path: Path) -> None:
    assert kip.cli("meter").stdout == "there are no procs\n"
    proc = lines(kip, tmp_path, "one")
    proc.sleep()
    lines(kip, tmp_path, "two")
    text = kip.cli("meter").stdout.splitlines()
    assert text[0].split() == ["NAME", "TIER", "TIME", "GB-HOURS", "CPU", "CONNECTIONS", "DATAGRAMS", "WAKES"]
    assert [line.split()[0] for line in text[1:]] == ["one", "hot", "parked", "two", "hot"], text
    column = text[0].index("GB-HOURS")
    assert all(line[column - 1] == " " and line[column] != " " for line in text), "in columns"
    [view] = kip.json("meter", "one", "--since", "1h")
    assert view["from_ms"] == meter(kip, "one")["from_ms"], "it is younger than that"
    time.sleep(1.5)
    short = meter(kip, "two", "--since", "1s")
    near(tier(short, "hot")["time_us"], (short["to_ms"] - short["from_ms"]) * 1000, 0.2)
    assert short["to_ms"] - short["from_ms"] >= 900, short
    assert "no proc" in kip.refused("meter", "nobody")
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(kip.data / "run" / "api.sock"))
        s.sendall(b"GET /v1/procs/one/meter?since_ms=x HTTP/1.1\r\nhost: kip\r\nconnection: close\r\n\r\n")
        assert b" 400 " in s.recv(4096)
