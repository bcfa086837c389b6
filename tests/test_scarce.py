"""Programs that have used up a limit, and programs with guards in their memory, sleep as others do, by each engine. What is
really used up and cannot be lifted is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import servers
from harness.clients import Lines
from harness.kip import Kip, Proc
from harness.rows import one_in

WHATS = ["files", "space", "data", "locked", "processes", "size", "guards"]


def run(kip: Kip, tmp_path: Path, *what: str) -> tuple[Proc, Lines]:
    server = servers.scarce(*what)
    proc = kip.run("-".join(("scarce", *what)), server.command, ports=server.published, tar=server.tarball(tmp_path))
    client = Lines(proc.port())
    assert client.ask("look") == "ok"
    return proc, client


def arguments(proc: Proc) -> set[str]:
    """Those of the program as ps and pgrep see them from outside: the ones of pid 1 tell whether it was restored."""
    pids = proc.inspect()["pids"]
    texts = (Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip() for pid in pids)
    return {text for text in texts if not text.startswith("kip-init")}


# promise hibernation: arguments and environment stay where they are: ps and pgrep see a sleeper as
#   it is, and one that was woken with a part of its memory
# held by: this, `kip_pager::arguments::tests::the_pages_of_both_are_told`,
#   `crates/pager/tests/real.rs::an_inspection_fetches_nothing`
# promise hibernation: guards (MADV_GUARD_INSTALL) are guards after hibernation, and after a wake by
#   each engine
# held by: this, `tests/test_scarce.py::test_by_criu`
# promise hibernation: a process that has used up a soft limit (open files, address space, data,
#   locked memory), or its limit of processes or file size, sleeps, and has that limit after it;
#   hard limits too where Kip has CAP_SYS_RESOURCE. What cannot be lifted is tried all the same, and
#   named if the sleep fails for it, as is vm.max_map_count
# held by: this, `tests/test_scarce.py::test_by_criu`,
#   `tests/test_scarce.py::test_memory_that_is_locked_as_it_is_mapped`,
#   `tests/test_scarce.py::test_a_hard_limit_that_is_used_up`,
#   `tests/test_scarce.py::test_what_cannot_be_lifted_is_named`,
#   `kip_stop::limits::tests::what_is_used_up_is_lifted_for_a_moment`,
#   `kip_stop::limits::tests::a_hard_limit_is_lifted_where_the_kernel_allows_it`,
#   `kip_stop::limits::tests::the_limit_that_is_used_up_is_named`,
#   `kip_checkpoint::limits::tests::only_what_was_lifted_is_set`
@pytest.mark.parametrize("what", one_in(2, WHATS))
def test_what_is_used_up_is_no_obstacle(kip: Kip, tmp_path: Path, what: str) -> None:
    proc, client = run(kip, tmp_path, what)
    before = arguments(proc)
    assert before == {f"/srv/scarce 7400 {what}"}
    for turn in range(3):
        proc.hibernate()
        assert arguments(proc) == before, "ps shows what it is while it sleeps"
        assert client.ask("look") == "ok"
        if turn == 1:
            proc.hibernate()
        proc.sleep()
        assert client.ask("look") == "ok"
        assert proc.rebuilt(), "by plan"
        assert arguments(proc) == before, "and after that"


@pytest.mark.parametrize("what", one_in(3, WHATS))
def test_by_criu(fresh_kip: Callable[..., Kip], tmp_path: Path, what: str) -> None:
    kip = fresh_kip("--only-criu")
    proc, client = run(kip, tmp_path, what)
    before = arguments(proc)
    for _ in range(2):
        proc.sleep()
        assert client.ask("look") == "ok"
        assert arguments(proc) == before
        proc.hibernate()
        assert client.ask("look") == "ok"


def may_raise_hard_limits() -> bool:
    """CAP_SYS_RESOURCE."""
    status = Path("/proc/self/status").read_text()
    return bool(int(re.search(r"CapEff:\s*(\w+)", status)[1], 16) >> 24 & 1)


HARD = {"files": "RLIMIT_NOFILE", "space": "RLIMIT_AS", "data": "RLIMIT_DATA", "future": "RLIMIT_MEMLOCK"}


def test_memory_that_is_locked_as_it_is_mapped(kip: Kip, tmp_path: Path) -> None:
    """mlockall(2) with MCL_FUTURE, and no more may be locked: what the pager maps in it would be, too."""
    proc, client = run(kip, tmp_path, "future")
    for _ in range(3):
        proc.hibernate()
        assert client.ask("look") == "ok"


@pytest.mark.parametrize("what", HARD)
def test_a_hard_limit_that_is_used_up(kip: Kip, tmp_path: Path, what: str) -> None:
    """It is no obstacle where the machine lets it be raised; elsewhere the limit is named."""
    proc, client = run(kip, tmp_path, what, "hard")
    if may_raise_hard_limits():
        for sink in (proc.hibernate, proc.sleep):
            sink()
            assert client.ask("look") == "ok"
        return
    kip.expected += [rf"WARN.*not (hibernated|parked).*{HARD[what]}"]
    # What CRIU maps in a process is shared, and is no data.
    for tier in ("hibernated",) if what == "data" else ("hibernated", "parked"):
        refusal = kip.refused("sleep", proc.name, "--to", tier)
        assert re.search(rf"the process \d+ \(scarce\) has used up {HARD[what]} \(\d+ of \d+\); a sleep", refusal), refusal
        assert "swap" not in refusal, "it is not the machine's fault"
        assert client.ask("look") == "ok", "it goes on"
        assert HARD[what] in kip.cli("why", proc.name).stdout


def test_what_cannot_be_lifted_is_named(kip: Kip, tmp_path: Path) -> None:
    proc, client = run(kip, tmp_path, "mappings")
    kip.expected += [r"WARN.*not (hibernated|parked).*vm\.max_map_count"]
    for tier in ("hibernated", "parked"):
        refusal = kip.refused("sleep", proc.name, "--to", tier)
        named = r"the process \d+ \(scarce\) has used up vm\.max_map_count \(\d+ of \d+ mappings\)"
        assert re.search(named, refusal), refusal
        assert client.ask("look") == "ok", "it goes on"
        assert "vm.max_map_count" in kip.cli("why", proc.name).stdout
