"""The newest generation of an archived proc is damaged or missing in the store for good: a client that connects
is not left waiting. The proc starts cold on its newest files, or, where its spec asks for it, comes back as the generation
before; the store keeps all that it has."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import servers, logged
from harness.clients import Redis
from harness.kip import Kip, Proc
from harness.wait import wait_for


@pytest.fixture
def archiving(archiving: Kip) -> Kip:
    archiving.expected += [r"WARN.*its snapshot cannot be used"]
    return archiving


def objects(store: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in store.glob("realms/*/**/*") if path.is_file() and path.name != "head"}


def told(kip: Kip, kind: str) -> list[str]:
    return [event["detail"] for event in kip.events() if event["kind"] == kind]


def answers(proc: Proc, *words: str) -> object:
    """Once it answers: what it is reached by is made anew meanwhile."""

    def ask() -> object:
        try:
            return (Redis(proc.port(), timeout=20).ask(*words),)
        except (OSError, AssertionError):
            return None

    return wait_for("it answers", ask, 60)[0]  # type: ignore[index]


def damage(front: Path, how: str) -> None:
    """In what a wake cannot begin without, or all of it."""
    if how == "missing":
        front.unlink()
        return
    whole = front.read_bytes()
    front.write_bytes(whole[:1000] + bytes([whole[1000] ^ 4]) + whole[1001:])


def newest(proc: Proc, store: Path) -> Path:
    id = (proc.kip.data / "procs" / proc.name / "archive-id").read_text().strip()
    return max(store.glob(f"realms/default/procs/{id}/gen-*"), key=lambda path: path.stat().st_mtime_ns)


def slept_twice(kip: Kip, store: Path, *flags: str) -> Proc:
    """A redis with a key and a file of each of two generations, archived."""
    proc = kip.run("redis", servers.redis().command, ports=servers.redis().published, flags=list(flags))
    for turn in ("first", "second"):
        assert Redis(proc.port()).ask("SET", "turn", turn) == "OK"
        proc.exec("sh", "-c", f"echo {turn} > /var/tmp/turn; echo x > /var/tmp/{turn}")
        proc.archive()
    assert len(list(newest(proc, store).parent.glob("gen-*"))) == 2
    return proc


# promise K5: a generation replaces its parent only once it was read back; the two before it stay in
#   the store; one that is damaged for good is tried again, then its owner's choice follows, a cold
#   start on the newest files or the generation before it whole; nothing is deleted, and it is said
# held by: this, `tests/test_fallback.py::test_the_generation_before`,
#   `tests/test_store_trouble.py::test_bits_that_flip_on_the_way_up`,
#   `tests/test_snapshot.py::test_beside_wakes_and_uploads`
# promise waking: `--fallback cold`, `previous`; in `kip.toml`, below `x-kip`, in the API, and shown
#   by `kip inspect`
# held by: this, `tests/test_fallback.py::test_the_generation_before`,
#   `kip_describe::file::tests::every_key_is_read`
# promise archive: a client of a proc whose front, or what a wake needs beside it, is damaged or
#   missing for good is not left waiting: read twice, it starts cold on its newest files, with the
#   event `cold-start`, in `kip why` too; `kip wake` is refused, so that it can be put right; the
#   store keeps what it has until `kip rm`
# held by: this, `tests/test_fallback.py::test_by_request_it_is_only_said`,
#   `tests/test_fallback.py::test_what_a_wake_needs_of_a_pack_is_missing`
@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_cold(archiving: Kip, store: Path, how: str) -> None:
    proc = slept_twice(archiving, store)
    before, front = objects(store), newest(proc, store)
    damage(front, how)
    assert answers(proc, "GET", "turn") is None, "its memory is lost"
    assert proc.exec("cat", "/var/tmp/turn").stdout == "second\n", "its newest files are there"
    [line] = told(archiving, "cold-start")
    assert "redis cannot be woken: " in line and "starting it cold on its newest files" in line, line
    assert archiving.json("why", "redis")["fell_back"] == line and line in archiving.cli("why", "redis").stdout
    # What is left of it in the store stays there, whatever comes after it, until it is removed.
    proc.archive()
    archiving.cli("snapshot", "gc", check=False)
    after = objects(store)
    assert {path for path in before if path not in after} <= {front}
    assert answers(proc, "PING") == "PONG"
    archiving.cli("stop", "redis")
    archiving.cli("start", "redis")
    assert archiving.json("why", "redis")["fell_back"] is None
    archiving.cli("rm", "--force", "redis")
    assert {one["state"] for one in archiving.json("snapshot", "ls")} <= {"removed"}
    archiving.cli("snapshot", "gc")


def test_by_request_it_is_only_said(archiving: Kip, store: Path) -> None:
    """`kip wake` is refused, so that the user can put the snapshot right first; nothing has begun anew."""
    proc = slept_twice(archiving, store)
    front = newest(proc, store)
    whole = front.read_bytes()
    damage(front, "missing")
    refused = archiving.refused("wake", "redis")
    assert "it stays archived, `kip stop redis` and `kip start redis` start it cold on its newest files" in refused, refused
    assert proc.state == "archived" and not told(archiving, "cold-start")
    front.write_bytes(whole)
    assert answers(proc, "GET", "turn") == b"second"


def test_what_a_wake_needs_of_a_pack_is_missing(archiving: Kip, store: Path) -> None:
    """Its front is whole, but what it leads to is gone and needed before the program can run."""
    archiving.expected += [*logged.KEEPER_GONE, *logged.DAEMON_KILLED]
    proc = slept_twice(archiving, store)
    archiving.reboot()
    for pack in store.glob("realms/*/packs/*"):
        pack.unlink()
    assert answers(proc, "GET", "turn") is None
    assert len(told(archiving, "cold-start")) == 1
    assert proc.exec("cat", "/var/tmp/turn").stdout == "second\n"


# The generation before


def aside(proc: Proc) -> list[Path]:
    """Files of its newest generation that are kept out of the way."""
    return list((proc.kip.data / "procs" / proc.name).glob("aside-gen-*/upper/root/var/tmp/second"))


def is_first(proc: Proc) -> bool:
    """Memory and files of the first generation, and nothing of the second; false if it is as it would be after a cold start."""
    memory = answers(proc, "GET", "turn")
    files = proc.exec("sh", "-c", "cat /var/tmp/turn; ls /var/tmp").stdout
    if memory is None:
        assert files.startswith("second\n") and "second" in files.splitlines()[1:], files
        return False
    assert memory == b"first" and files.startswith("first\n") and "second" not in files, (memory, files)
    return True


# promise archive: `--fallback previous`: instead the newest older generation that is whole, every
#   byte of it, memory and files, comes back (event `fell-back`), or a cold start if there is none;
#   its newest files are kept aside; killed in the middle it is one or the other
# held by: this, `tests/test_fallback.py::test_none_before_is_whole`,
#   `tests/test_fallback.py::test_killed_while_it_falls_back`,
#   `kip_supervisor::task::previous::tests::the_newest_files_are_put_back_from_wherever_it_was_interrupted`,
#   `kip_supervisor::task::previous::tests::files_on_a_limited_disk_are_not_forgotten_half_way`
@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_the_generation_before(archiving: Kip, store: Path, how: str) -> None:
    """Whole: its memory and its files, none of the newest's; those are kept. It goes on from there as any other."""
    proc = slept_twice(archiving, store, "--fallback", "previous")
    assert proc.inspect()["spec"]["timing"]["fallback"] == "previous"
    before, front = objects(store), newest(proc, store)
    generation = proc.inspect()["generation"]
    damage(front, how)
    assert is_first(proc) and len(aside(proc)) == 1
    [line] = told(archiving, "fell-back")
    assert "redis cannot be woken: " in line and f"waking it from generation {generation - 1}, the newest older one" in line, line
    assert archiving.json("why", "redis")["fell_back"] == line and not told(archiving, "cold-start")
    assert Redis(proc.port()).ask("SET", "third", "3") == "OK"
    for sleep in (proc.sleep, proc.archive, proc.archive):
        sleep()
        assert is_first(proc) and answers(proc, "GET", "third") == b"3"
    proc.archive()
    assert proc.inspect()["generation"] > generation
    assert {path for path in before if path not in objects(store)} <= {front}
    archiving.kill()
    archiving.up()
    assert is_first(proc) and len(aside(proc)) == 1


def test_none_before_is_whole(archiving: Kip, store: Path) -> None:
    """A pack that the older one needs is damaged as well: it starts cold on its newest files, and says both."""
    proc = slept_twice(archiving, store, "--fallback", "previous")
    damage(newest(proc, store), "flipped")
    for pack in store.glob("realms/*/packs/*"):
        whole = pack.read_bytes()
        pack.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    assert not is_first(proc)
    [line] = told(archiving, "cold-start")
    assert "no older generation can be woken: the store has no older generation" in line and "starting it cold" in line, line


@pytest.mark.parametrize("step", ["older-aside", "older-brought", "older-recorded"])
def test_killed_while_it_falls_back(archiving: Kip, store: Path, step: str) -> None:
    """It is the older generation, whole, or begins anew on its newest files, whole; both are still there."""
    archiving.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_KILLED, *logged.PAGER_KILLED]
    proc = slept_twice(archiving, store, "--fallback", "previous")
    before, front = objects(store), newest(proc, store)
    damage(front, "flipped")
    archiving.kill()
    archiving.up("--fault-at", step)
    try:
        Redis(proc.port(), timeout=20).ask("PING")
    except OSError:
        pass
    assert archiving.wait_dead(30) == -signal.SIGKILL
    archiving.up()
    wait_for("it is not at work", lambda: proc.state in ("stopped", "parked", "running"), 30)
    if proc.state == "stopped":
        proc.start()
        assert not is_first(proc)
    else:
        assert is_first(proc) and len(aside(proc)) == 1
    assert {path for path in before if path not in objects(store)} <= {front}


# Of another engine


# promise archive: what a newer engine wrote, or another, is neither woken nor taken over, by one
#   line, and stays free for others
# held by: this,
#   `kip_offload::engine::tests::the_same_or_a_newer_one_of_the_same_name_reads_it`
def test_a_newer_engine(fresh_kip: Callable[..., Kip], tmp_path: Path, store: Path) -> None:
    """What a newer CRIU has written is refused before anything is done, by the machine that has an older one, and left to others."""
    tree = Path("/usr/local/lib/kip/criu")
    lib = next(path.parent for path in tree.glob("usr/lib/*/libc.so.6"))
    newer = tmp_path / "criu"
    newer.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Version: 9.9" && exit\nexport CRIU_LIBS_DIR={tree}/usr/sbin\n'
        # What a helper loads takes itself out of the environment, here that of this shell.
        '[ "$KIP_RUN" ] && export LD_PRELOAD=$KIP_RUN/../criu-shim.so\n'
        f'exec {next(lib.glob("ld-linux*"))} --inhibit-cache --library-path {lib} {tree}/usr/sbin/criu "$@"\n'
    )
    newer.chmod(0o755)
    here = fresh_kip("--store", str(store), "--criu", str(newer))
    proc = here.run("redis", servers.redis().command, ports=servers.redis().published)
    assert Redis(proc.port()).ask("SET", "a", "1") == "OK"
    proc.archive()
    assert here.json("snapshot", "show", "redis")["engine"] == "criu 9.9"
    there = fresh_kip("--store", str(store), start=False)
    shutil.copytree(here.data / "archive", there.data / "archive", ignore=shutil.ignore_patterns("owner", "index"))
    there.up()
    refused = there.refused("wake", "redis")
    assert "redis cannot be taken over: the snapshot was made by criu 9.9; this machine has criu 4" in refused, refused
    assert there.names() == [] and answers(proc, "GET", "a") == b"1"
    # This machine has got an older CRIU meanwhile: the proc stays archived, also if a client comes,
    # until the newer CRIU is there again.
    proc.archive()
    here.kill()
    here.flags = ("--store", str(store), "--criu", str(tree))
    here.up()
    refused = here.refused("wake", "redis")
    assert "the snapshot was made by criu 9.9" in refused and "it stays archived" in refused and not told(here, "cold-start"), refused
    here.kill()
    here.flags = ("--store", str(store), "--criu", str(newer))
    here.up()
    assert answers(proc, "GET", "a") == b"1"


# Files


def test_files_that_are_open_come_first(archiving: Kip, store: Path) -> None:
    """Those of its own that its processes have open, and what they have mapped of the base; the others after them."""
    proc = archiving.run("reader", ["sh", "-c", "cd /var/tmp; for i in 1 2 3 4 5; do echo $i > file-$i; done; exec 7< file-3; exec sleep 1000"])
    wait_for("its files are there", lambda: "file-5" in proc.exec("ls", "/var/tmp").stdout, 30)
    proc.archive()
    roots = {root["name"]: root for root in archiving.json("snapshot", "show", "reader")["roots"]}
    assert roots["root"]["first"] == 1 and roots["root"]["entries"] >= 5, roots
    assert roots["pins-usr"]["first"] >= 2, "the program and its C library"
    assert "needed first" in archiving.cli("snapshot", "show", "reader").stdout
