"""`kip metrics` and `GET /metrics`: what Prometheus scrapes, read by its own parser; what `docs/metrics.md` says of it; a scrape wakes nobody."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness import s3
from harness.kip import ROOT, Kip
from harness.wait import wait_for
from test_api import local
from test_meter import burn, lines, meter, near, told

ROW = re.compile(r"^\| `(kip_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", re.M)


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


def scrape(kip: Kip) -> Scrape:
    return Scrape(kip.cli("metrics").stdout)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """Of a real S3 server, which is there until the daemons that ask it are not."""
    with s3.server(tmp_path / "s3") as url:
        yield url


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
    resting, away = (lines(kip, tmp_path, name, "--idle", "1h") for name in ("resting", "away"))
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
        told_s = now.value("kip_proc_time_seconds_total", proc="away", tier=used["tier"])
        assert 0 < told_s <= used["time_us"] / 1e6
    mark = now.value("kip_memory_mark_bytes", mark="high")
    assert 0 < now.value("kip_memory_used_bytes") and mark < now.value("kip_memory_mark_bytes", mark="limit")


def test_refusals_are_counted_by_cause(kip: Kip, tmp_path: Path) -> None:
    proc = lines(kip, tmp_path, "kept", "--idle", "1h")
    before = scrape(kip).value("kip_sleep_refusals_total", tier="parked", cause="exec")
    words = [kip.program, "--data", kip.data, "exec", "kept", "--", "cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as there:
        wait_for("it runs", lambda: len(proc.inspect()["pids"]) > 2, 10)
        assert "kip exec" in kip.refused("sleep", "kept", "--to", "parked")
        there.stdin.close()
    assert scrape(kip).value("kip_sleep_refusals_total", tier="parked", cause="exec") == before + 1
    assert proc.state == "running"


def test_as_the_text_format_has_it(kip: Kip, tmp_path: Path) -> None:
    status, headers, content = local(kip, "GET", "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    text = content.decode()
    assert text.endswith("\n") and "# EOF" not in text
    assert "# TYPE kip_wakes_total counter\n" in text and "# HELP kip_wakes_total " in text
    assert all(re.match(r"# (HELP|TYPE) kip_\w+ .|kip_\w+({.*})? [-+0-9.eInf]+$", line) for line in text.splitlines())


@pytest.mark.measures
def test_a_scrape_takes_little(kip: Kip, tmp_path: Path) -> None:
    """Of twenty sleepers: nobody is looked at, so that more of them cost no more than their lines."""
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
