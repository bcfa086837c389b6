"""`kip metrics` and `GET /metrics`: what Prometheus scrapes, read by its own parser; what `docs/metrics.md` says of it;
a scrape wakes no proc."""

from __future__ import annotations

import re
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness import s3, logged
from harness.kip import ROOT, Kip, cpu_ns
from harness.wait import wait_for
from test_api import local
from test_hibernate import TRACER
from test_meter import burn, lines, meter, near, told
from test_why_top import UNPARKABLE

ROW = re.compile(r"^\| `((?:kip|process)_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", re.M)


class Scrape:
    """One scrape, as Prometheus' own parser reads it."""

    def __init__(self, text: str):
        self.families = {}
        for family in text_string_to_metric_families(text):
            name = family.name + ("_total" if family.type == "counter" else "")
            assert name not in self.families, f"{name} is told twice"
            self.families[name] = family

    def value(self, name: str, **labels: str) -> float:
        """Of the one sample with these labels, or of all that have them, together; 0 without one."""
        samples = [s for f in self.families.values() for s in f.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def described(self) -> dict[str, tuple[str, str, str]]:
        """Type, labels and help of each, as the table of the documentation has them."""
        labels = {
            name: sorted({label for sample in f.samples for label in sample.labels} - {"le"})
            for name, f in self.families.items()
        }
        return {
            name: (f.type, ", ".join(f"`{label}`" for label in labels[name]), f.documentation)
            for name, f in self.families.items()
        }


def refusals(kip: Kip, tier: str, cause: str) -> float:
    return scrape(kip).value("kip_sleep_refusals_total", tier=tier, cause=cause)


def scrape(kip: Kip) -> Scrape:
    return Scrape(kip.cli("metrics").stdout)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """Of a real S3 server, which is there until the daemons that ask it are not."""
    with s3.server(tmp_path / "s3") as url:
        yield url


# promise meters: Prometheus' text format 0.0.4; every metric with its type, labels and help is in
#   `docs/metrics.md`, and nothing else is
# held by: this, `tests/test_metrics.py::test_as_the_text_format_has_it`,
#   `kip_journal::metrics::tests::what_happened_is_counted`
# promise meters: wakes and their durations by tier and trigger agree with the proc's meter; procs,
#   memory held and saved, disk, store, cache and requests of procs in all tiers
def test_what_happened_and_what_is(store: str, fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """Of procs in all tiers, on a real S3 server; and all of it is in the documentation, and nothing else is."""
    kip = fresh_kip("--store", store, "--cache", "50M")
    busy = lines(kip, tmp_path, "busy", "--hibernate", "held", "--idle", "1h")
    assert scrape(kip).value("kip_wakes_total") == 0
    burn(busy, 0.3)
    for sleep in (busy.sleep, busy.hibernate, busy.archive):
        sleep()
        told(busy, "1")
    busy.sleep()
    busy.wake()
    resting = lines(kip, tmp_path, "resting", "--idle", "1h", "--disk", "64M")
    away = lines(kip, tmp_path, "away", "--idle", "1h")
    resting.hibernate()
    away.archive()
    now = scrape(kip)
    documented = {name: rest for name, *rest in ROW.findall((ROOT / "docs/metrics.md").read_text())}
    assert {name: tuple(rest) for name, rest in documented.items()} == now.described()
    wakes = {(w["from"], w["trigger"]): w["count"] for w in meter(kip, "busy")["wakes"]}
    check_wakes(now, wakes)
    assert now.value("kip_procs", tier="hibernated") == now.value("kip_procs", tier="archived") == 1
    assert now.value("kip_procs", tier="hot", state="running") == now.value("kip_procs") - 2 == 1
    check_sizes(now, kip)
    requests = {kind: now.value("kip_store_requests_total", kind=kind) for kind in ("get", "put", "head", "list")}
    assert requests["put"] > 0 and now.value("kip_store_written_bytes_total") > 1 << 20, requests
    assert now.value("kip_cache_hits_total") > 0 and now.value("kip_cache_bytes") > 0
    assert (resting.state, away.state) == ("hibernated", "archived"), "a scrape wakes nobody"


def check_wakes(now: Scrape, wakes: dict[tuple[str, str], int]) -> None:
    """As many as the proc's meter has, all of them timed."""
    assert wakes[("parked", "tcp")] >= 1 and wakes[("hibernated", "tcp")] == wakes[("archived", "tcp")] == 1, wakes
    for (tier, trigger), count in wakes.items():
        labels = {"tier": tier, "trigger": trigger}
        assert now.value("kip_wakes_total", **labels) >= now.value("kip_proc_wakes_total", proc="busy", **labels)
        assert now.value("kip_proc_wakes_total", proc="busy", **labels) == count, labels
        assert now.value("kip_wake_duration_seconds_count", **labels) == now.value("kip_wakes_total", **labels)
        assert now.value("kip_wake_duration_seconds_bucket", le="30.0", **labels) == count, "none took half a minute"
        mean = now.value("kip_wake_duration_seconds_sum", **labels) / count
        assert 0 < mean < 30, (labels, mean)
    assert now.value("kip_sleep_duration_seconds_count", tier="archived") == 2
    assert now.value("kip_wake_failures_total") == 0


def check_sizes(now: Scrape, kip: Kip) -> None:
    views: dict[str, dict[str, Any]] = {view["name"]: view for view in kip.json("meter")}
    held = {name: now.value("kip_proc_held_bytes", proc=name) for name in views}
    assert held["resting"] == views["resting"]["held_bytes"] == now.value("kip_memory_held_bytes", tier="hibernated")
    assert held["away"] == now.value("kip_archived_store_bytes") > 0
    assert now.value("kip_memory_saved_bytes", tier="archived") > 1 << 20
    near(now.value("kip_proc_cpu_seconds_total", proc="busy"), views["busy"]["cpu_us"] / 1e6, 0.05)
    for used in views["away"]["tiers"]:
        mine = {"proc": "away", "tier": used["tier"]}
        near(now.value("kip_proc_cpu_seconds_total", **mine), used["cpu_us"] / 1e6, 0.05)
        assert now.value("kip_proc_connections_total", **mine) == used["connections"]
    for used in views["away"]["tiers"]:
        told_s = now.value("kip_proc_time_seconds_total", proc="away", tier=used["tier"])
        assert 0 < told_s <= used["time_us"] / 1e6
    mark = now.value("kip_memory_mark_bytes", mark="high")
    assert 0 < now.value("kip_memory_used_bytes") and mark < now.value("kip_memory_mark_bytes", mark="limit")


# promise meters: refusals to sleep by cause: `exec`, `memory`, `criu`, `starting`, `hook`
# held by: this, `tests/test_metrics.py::test_each_cause_is_its_own`; `snapshot`:
#   `tests/test_full_disk.py::test_parking`; `store`: `tests/test_store_trouble.py::test_archiving`;
#   `pager`: untested
def test_refusals_are_counted_by_cause(kip: Kip, tmp_path: Path) -> None:
    proc = lines(kip, tmp_path, "kept", "--idle", "1h")
    before = refusals(kip, "parked", "exec")
    words = [kip.program, "--data", kip.data, "exec", "-i", "kept", "--", "cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as there:
        wait_for("it runs", lambda: len(proc.inspect()["pids"]) > 2, 10)
        assert "kip exec" in kip.refused("sleep", "kept", "--to", "parked")
        there.stdin.close()
    assert refusals(kip, "parked", "exec") == before + 1
    assert proc.state == "running"


# Only the test puts them to sleep.
STAYS = ["--idle", "1h"]


def test_each_cause_is_its_own(kip: Kip) -> None:
    """Traced; what CRIU cannot image; not ready yet; its own command, before a sleep and while it runs after a wake."""
    traced = kip.run("traced", ["python3", "-c", TRACER], flags=STAYS)
    wait_for("it traces its child", lambda: "traces" in traced.logs(), 30)
    stuck = kip.run("stuck", ["python3", "-c", UNPARKABLE], flags=STAYS)
    wait_for("it has its descriptor", lambda: "descriptor" in stuck.logs(), 30)
    words = ["run", *STAYS, "--name", "slow", "--ready", "exec:test -e /srv/go", "--", "sleep", "1000"]
    hooked = kip.run("hooked", ["sleep", "1000"], flags=[*STAYS, "--before-sleep", "test ! -e /tmp/busy"])
    hooked.exec("touch", "/tmp/busy")
    after = kip.run("after", ["sleep", "1000"], flags=[*STAYS, "--after-wake", "touch /tmp/on; while test -e /tmp/on; do sleep 0.1; done"])
    after.sleep()
    after.wake()
    wait_for("its command runs", lambda: len(after.inspect()["pids"]) > 2, 30)
    with subprocess.Popen([kip.program, "--data", kip.data, *words], stderr=subprocess.DEVNULL) as starting:
        wait_for("it is not ready", lambda: "slow" in kip.names() and kip.json("inspect", "slow")["state"] == "starting", 30)
        cases = (
            ("traced", "hibernated", "memory", "cannot hibernate"),
            ("stuck", "parked", "criu", "cannot sleep"),
            ("slow", "parked", "starting", "it is not ready yet"),
            ("hooked", "parked", "hook", "its own command before sleep refuses"),
            ("after", "hibernated", "hook", "its own command after the wake still runs"),
        )
        for name, tier, cause, said in cases:
            before = refusals(kip, tier, cause)
            assert said in kip.refused("sleep", name, "--to", tier)
            assert refusals(kip, tier, cause) == before + 1, (name, tier, cause)
        kip.cli("rm", "slow", "--force")
        starting.wait(30)
    kip.cli("rm", "after", "--force")


# promise meters: programs that ended by themselves, by how, those that the kernel killed for
#   memory apart; restarts, cold starts, wakes that failed
def test_ends_restarts_and_wakes_that_fail(kip: Kip, tmp_path: Path) -> None:
    """What the operating guide calls worth an alarm."""
    kip.expected += [logged.SNAPSHOT_UNUSABLE, logged.NOT_NATIVE]
    counters = ("kip_restarts_total", "kip_cold_starts_total", "kip_wake_failures_total")
    before = scrape(kip)
    ended = lambda now, how: now.value("kip_exits_total", how=how) - before.value("kip_exits_total", how=how)  # noqa: E731
    kip.run("ok", ["true"], wait_ready=False)
    kip.run("failed", ["sh", "-c", "exit 3"], flags=["--restart", "on-failure:1"])
    kip.run("signal", ["sh", "-c", "kill -TERM $$"])
    eater = "data = []\nwhile True: data.append(b'x' * (1 << 20))"
    kip.run("eater", ["/usr/bin/python3", "-c", eater], flags=["--mem", "32M"])
    want = {"ok": 1, "failed": 2, "signal": 1, "memory": 1, "unknown": 0}
    wait_for("all have ended", lambda: {how: ended(scrape(kip), how) for how in want} == want, 60)
    cold = lines(kip, tmp_path, "cold", "--idle", "1h")
    generation = kip.data / "procs" / "cold" / f"gen-{cold.sleep()['generation']}"
    (generation / "checkpoint.tar").write_bytes(b"")
    with socket.create_connection(("127.0.0.1", cold.port())):
        cold.wait_state("running")
    now = scrape(kip)
    assert {name: now.value(name) - before.value(name) for name in counters} == dict(zip(counters, (1, 1, 2), strict=True))
    assert now.value("kip_proc_oom_kills_total", proc="eater") == 1 == meter(kip, "eater")["oom_kills"]
    assert now.value("kip_wake_failures_total", tier="parked") - before.value("kip_wake_failures_total", tier="parked") == 2


# promise meters: disk used and allowed of procs with `--disk`; the daemon itself under the usual
#   `process_` names
# held by: this, `kip_worker::scrape::process::tests::it_is_this_one`
def test_disks_and_the_daemon_itself(kip: Kip, tmp_path: Path) -> None:
    full = lines(kip, tmp_path, "full", "--disk", "64M")
    before = scrape(kip)
    full.exec("sh", "-c", "head -c 5000000 /dev/urandom > /srv/more; sync")
    now = scrape(kip)
    assert now.value("kip_proc_disk_limit_bytes", proc="full") == 64 << 20
    grown = now.value("kip_proc_disk_bytes", proc="full") - before.value("kip_proc_disk_bytes", proc="full")
    assert 4e6 < grown < 20e6 and now.value("kip_proc_disk_bytes", proc="full") == full.inspect()["disk_bytes"]
    assert kip.daemon
    status = dict(line.split(":", 1) for line in Path(f"/proc/{kip.daemon.pid}/status").read_text().splitlines())
    near(now.value("process_resident_memory_bytes"), int(status["VmRSS"].split()[0]) * 1024, 0.2)
    assert 0 <= time.time() - now.value("process_start_time_seconds") < 600
    assert now.value("process_max_fds") > now.value("process_open_fds") > 10
    ticks = [int(n) for n in Path(f"/proc/{kip.daemon.pid}/stat").read_text().rpartition(")")[2].split()[11:13]]
    assert before.value("process_cpu_seconds_total") <= now.value("process_cpu_seconds_total") <= sum(ticks) / 100


def test_as_the_text_format_has_it(kip: Kip, tmp_path: Path) -> None:
    status, headers, content = local(kip, "GET", "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    text = content.decode()
    assert text.endswith("\n") and "# EOF" not in text
    assert "# TYPE kip_wakes_total counter\n" in text and "# HELP kip_wakes_total " in text
    assert all(re.match(r"# (HELP|TYPE) (kip|process)_\w+ .|(kip|process)_\w+({.*})? [-+0-9.eInf]+$", line) for line in text.splitlines())


# promise meters: 500 parked and 500 hibernated procs: a scrape below 50 ms, `kip ps` below 100 ms,
#   idle CPU below 1%, gathered ticks included
# held by: measured by `bench/sleepers`, which fails if one is missed; with 30 of each, and bounds
#   for a sleeper: this
@pytest.mark.measures
def test_many_sleepers_cost_little(fresh_kip: Callable[..., Kip]) -> None:
    """A sleeper adds little to what `kip ps` and a scrape cost where there is none: what grows by a factor fails, a slow machine or
    a build without optimisation does not. `bench/sleepers` measures the targets, with 500 hibernated and 500 parked."""
    kip, flags, many = fresh_kip(), ["--idle", "1h", "--park-after", "1h"], 30

    def best_ms(*words: str) -> float:
        """CPU time of Kip and of the command: on a busy machine the rest is waiting for a processor."""

        def used_ms() -> float:
            children = resource.getrusage(resource.RUSAGE_CHILDREN)
            return sum(cpu_ns(kip.own_processes()).values()) / 1e6 + (children.ru_utime + children.ru_stime) * 1e3

        times = []
        for _ in range(12):
            before = used_ms()
            kip.cli(*words)
            times.append(used_ms() - before)
        return min(times)

    def idle_share(seconds: float) -> float:
        before, begun = cpu_ns(kip.own_processes()), time.monotonic_ns()
        time.sleep(seconds)
        after, took = cpu_ns(list(before)), time.monotonic_ns() - begun
        return sum(ns - before[pid] for pid, ns in after.items()) / took

    empty = best_ms("ps"), best_ms("metrics"), idle_share(2)
    for number in range(many):
        kip.run(f"h{number}", ["sleep", "100000"], flags=flags).hibernate()
        kip.run(f"p{number}", ["sleep", "100000"], flags=flags).sleep()
    full = best_ms("ps"), best_ms("metrics"), idle_share(4)
    wakes = [view["wakes"] for view in kip.json("ps")]
    each = [(now - then) / (2 * many) for now, then in zip(full, empty, strict=True)]
    shares = [each[n] / empty[n] for n in (0, 1)]
    assert max(shares) < 0.03, f"each sleeper adds {shares} to {empty[:2]} ms of CPU of ps and of a scrape"
    assert each[2] < 0.00005, f"{each[2]:.4%} of a core for each sleeper"
    assert empty[2] < 0.02, f"{empty[2]:.2%} of a core without any"
    assert wakes == [0] * (2 * many), "a look wakes no proc"


# promise meters: a scrape wakes no proc and looks at none: 20 sleepers in less than 50 ms
@pytest.mark.measures
def test_a_scrape_takes_little(kip: Kip, tmp_path: Path) -> None:
    """Of twenty sleepers: none is looked at, so that more of them cost no more than their lines."""
    for n in range(20):
        lines(kip, tmp_path, f"s{n}", "--idle", "1h").hibernate()
    wakes = scrape(kip).value("kip_wakes_total")
    times = []
    for _ in range(5):
        began = time.monotonic()
        local(kip, "GET", "/metrics")
        times.append(time.monotonic() - began)
    assert min(times) < 0.05, times
    assert scrape(kip).value("kip_wakes_total") == wakes
