"""System V IPC over many sleeps: segments, semaphores and message queues, natively and by CRIU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import programs
from harness.clients import Lines
from harness.kip import Kip, Proc
from harness.rows import rest_in_soak

SLEEPS = 7
ATTACHED = "process 2 (system_v) has System V memory attached in part, shmat(2)"


def without_plan(proc: Proc) -> None:
    generation = proc.inspect()["generation"]
    (proc.kip.data / "procs" / proc.name / f"gen-{generation}" / "wake.plan").unlink(missing_ok=True)


def run(kip: Kip, *words: str) -> Proc:
    tar = programs.tarball(programs.directory() / "system_v.tar", {"system_v": programs.c_program("system_v", "-static")})
    return kip.run("ipc", ["/system_v", *words], ports=["7000"], tar=tar, flags=["--never-sleep"])


# promise waking: System V shared memory of every kind (private, keyed, of another owner, deleted,
#   attached twice, to read only, split, or by no process), semaphores and message
#   queues, used by two processes: parked and archived, by each engine and in turns
# held by: this, `kip_criu_images::system_v::tests::what_is_in_the_images_is_read`
@pytest.mark.parametrize("engine", rest_in_soak(["plan", "criu", "turns"], ["turns"]))
def test_system_v(fresh_kip: Callable[..., Kip], store: Path, engine: str) -> None:
    """Each answer of the program is about all it has, and changes it for the next one."""
    kip = fresh_kip(*(["--only-criu"] if engine == "criu" else []), "--store", str(store))
    proc = run(kip)
    client = Lines(proc.port())
    # CRIU makes segments as root and queues of the usual size, those that are deleted stay, and
    # what is attached to read only and otherwise too can be written to by both.
    word = "strict" if engine == "plan" else "check"
    assert client.ask(word) == "ok"
    for cycle in range(SLEEPS):
        (proc.archive if cycle % 4 == 2 else proc.sleep)()
        if engine == "turns" and cycle % 2:
            without_plan(proc)
        assert client.ask(word) == "ok", cycle
        assert proc.rebuilt() == (engine == "plan" or engine == "turns" and cycle % 2 == 0), cycle
        # Segments stay where they are, and there is little else.
        kip.cli("sleep", proc.name, "--to", "hibernated")
        assert proc.inspect()["last_sleep"]["to"] == "hibernated"
        assert client.ask(word) == "ok", cycle


# promise waking: System V memory that a process has attached in part is parked, and woken natively;
#   where only CRIU could wake it, it does not sleep so far, and `kip why` says so
# held by: this, `kip_criu_images::system_v::tests::a_segment_is_attached_whole_or_in_part`
def test_memory_attached_in_part(fresh_kip: Callable[..., Kip], store: Path) -> None:
    kip = fresh_kip("--store", str(store))
    proc = run(kip, "hole")
    client = Lines(proc.port())
    for _ in range(3):
        assert client.ask("strict") == "ok"
        proc.sleep()
        assert ATTACHED in kip.refused("sleep", proc.name, "--to", "archived")
        assert client.ask("strict") == "ok"
        assert proc.rebuilt()
    other = fresh_kip("--only-criu")
    proc = run(other, "hole")
    assert ATTACHED in other.refused("sleep", proc.name, "--to", "parked")
    assert Lines(proc.port()).ask("check") == "ok"
