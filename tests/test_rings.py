"""Rings of asynchronous I/O, io_setup(2), over many sleeps, natively and by CRIU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import programs
from harness.broken import plan_of
from harness.clients import Lines
from harness.kip import Kip, Proc
from test_rebuild import NOT_NATIVE

SLEEPS = 7


def run(kip: Kip, *flags: str) -> Proc:
    tar = programs.tarball(programs.directory() / "rings.tar", {"rings": programs.c_program("rings", "-static")})
    return kip.run("rings", ["/rings"], ports=["7000"], tar=tar, flags=["--never-sleep", *flags])


# promise waking: rings of asynchronous I/O with a thread that waits for events, io_setup(2), parked
#   and archived, by each engine and in turns, with all memory at once and lazily
# held by: this, `tests/test_rings.py::test_an_event_that_was_not_taken`
@pytest.mark.parametrize("lazy", ["off", "on"])
@pytest.mark.parametrize("engine", ["plan", "criu", "turns"])
def test_rings(fresh_kip: Callable[..., Kip], store: Path, engine: str, lazy: str) -> None:
    kip = fresh_kip(*(["--only-criu"] if engine == "criu" else []), "--store", str(store))
    proc = run(kip, "--lazy", lazy)
    client = Lines(proc.port())
    assert client.ask("check") == "ok"
    for cycle in range(SLEEPS):
        (proc.archive if cycle % 4 == 2 else proc.sleep)()
        if engine == "turns" and cycle % 2:
            plan_of(proc).unlink()
        # Events of the small one go round in it.
        assert [client.ask("check") for _ in range(3)] == ["ok"] * 3, cycle
        assert proc.rebuilt() == (engine == "plan" or engine == "turns" and cycle % 2 == 0), cycle
        proc.hibernate_once()
        assert client.ask("check") == "ok", cycle


def test_an_event_that_was_not_taken(kip: Kip) -> None:
    """The kernel has no way to give a new ring what was in the old one but that of CRIU."""
    kip.expected.append(NOT_NATIVE)
    proc = run(kip)
    client = Lines(proc.port())
    assert [client.ask("check"), client.ask("leave")] == ["ok"] * 2
    for _ in range(2):
        proc.sleep()
        assert "not rebuilt" in {step["name"] for step in proc.wake()["last_wake"]["steps"]}
    assert client.ask("take") == "ok"
    proc.sleep()
    assert client.ask("check") == "ok"
    assert proc.rebuilt()
