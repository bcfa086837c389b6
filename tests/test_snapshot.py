"""`kip snapshot`: what is in the store is listed, shown, verified, carried to another data directory, and deleted once nothing
leads to it; in a directory and in a bucket of a real S3 server."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness import s3, servers
from harness.clients import Redis
from harness.kip import Kip, Proc
from harness.rows import rest_in_soak
from harness.wait import wait_for


@pytest.fixture(params=rest_in_soak(["directory", "bucket"], ["bucket"]))
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The URL of a store, and the directory that its objects are files of."""
    if request.param == "directory":
        (tmp_path / "store").mkdir()
        yield str(tmp_path / "store"), tmp_path / "store"
    else:
        with s3.server(tmp_path / "server") as url:
            yield url, tmp_path / "server" / s3.BUCKET / "kip"


def run_redis(kip: Kip, name: str = "redis") -> tuple[Proc, Redis]:
    server = servers.redis()
    proc = kip.run(name, server.command, ports=server.published)
    return proc, Redis(proc.port())


def fill(client: Redis, turn: int) -> None:
    client.ask_all([("SET", f"key:{i}", (f"{turn} {i} " * 100).encode()) for i in range(400)])


def archive(proc: Proc) -> int:
    """Its generation."""
    return proc.archive()["generation"]


def archive_often(proc: Proc, client: Redis, times: int) -> list[int]:
    generations = []
    for turn in range(times):
        fill(client, turn)
        generations.append(archive(proc))
    return generations


def objects(files: Path) -> list[Path]:
    found = [*files.glob("realms/*/packs/*"), *files.glob("realms/*/procs/*/gen-*")]
    return sorted(path for path in found if "#" not in path.name)


def collect(kip: Kip, grace: str) -> dict[str, list[dict[str, object]]]:
    return kip.json("snapshot", "gc", "--grace", grace)


def collected(kip: Kip) -> list[str]:
    """The names of what goes after two looks."""
    collect(kip, "0s")
    return [str(unused["object"]) for unused in collect(kip, "0s")["deleted"]]


def generations(kip: Kip, name: str) -> list[tuple[int, str]]:
    (proc,) = kip.json("snapshot", "ls", name)
    return [(one["generation"], one["place"]) for one in proc["generations"]]


# promise snapshots: `ls`: all generations of the realm in the store and on the local disk, whose
#   they are, when they were made, how large; what cannot be read is told and the list goes on
# held by: this, `tests/test_snapshot.py::test_without_a_store`,
#   `kip_offload::snapshot_tests::a_list_goes_on_behind_what_cannot_be_read`
# promise snapshots: `show`: what a generation is made of
# held by: this, `kip_offload::snapshot_tests::what_a_generation_is_made_of_is_shown`
def test_what_there_is(where: tuple[str, Path], fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip("--store", where[0])
    assert kip.cli("snapshot", "ls").stdout == "there are no snapshots\n"
    proc, client = run_redis(kip)
    numbers = archive_often(proc, client, 4)
    parked, _ = run_redis(kip, "parked")
    parked.sleep()
    (redis,) = kip.json("snapshot", "ls", "redis")
    places = ["current", "kept", "kept", "unused"]
    assert [(one["generation"], one["place"]) for one in redis["generations"]] == list(zip(numbers[::-1], places))
    assert redis["state"] == "archived" and redis["packs"] and redis["pack_bytes"], redis
    assert all(one["format"] == 2 and one["bytes"] and one["frozen_at_ms"] for one in redis["generations"])
    (local,) = kip.json("snapshot", "ls", "parked")
    assert local["state"] == "local" and [one["place"] for one in local["generations"]] == ["local"]
    table = kip.cli("snapshot", "ls").stdout.splitlines()
    assert len(table) == 6 and "archived, free to adopt" in table[2], table
    shown = kip.json("snapshot", "show", f"redis@{numbers[-2]}")
    assert (shown["generation"], shown["parent"], shown["place"]) == (numbers[-2], numbers[-3], "kept")
    assert shown["command"] == servers.redis().command and shown["sockets"] >= 2, shown
    assert sum(section["bytes"] for section in shown["sections"]) == shown["bytes"]
    assert shown["timers"] and shown["pages"]["packs"] and "checkpoint.tar" in {f["name"] for f in shown["metadata"]}
    text = kip.cli("snapshot", "show", "redis").stdout
    assert text.startswith(f"redis@{numbers[-1]}\n") and "page table" in text and "redis-server" in text, text
    by_id = kip.json("snapshot", "show", redis["proc"][:12])
    assert by_id["generation"] == numbers[-1]
    assert client.ask("GET", "key:7") == b"3 7 " * 100
    assert kip.json("snapshot", "ls", "redis")[0]["state"] == "owned-here"
    for words, says in [
        (["show", "nobody"], "no snapshot nobody"),
        (["show", f"redis@{numbers[0]}"], "no snapshot"),
        (["show", "redis@x"], "NAME@GENERATION"),
        (["show", "parked"], "--to archived"),
        (["export", "parked", "/tmp/never"], "--to archived"),
        (["verify", "nobody"], "no snapshot nobody"),
    ]:
        assert says in kip.refused("snapshot", *words), words


def test_without_a_store(fresh_kip: Callable[..., Kip]) -> None:
    """What is parked is there; the rest says that there is no store."""
    kip = fresh_kip("--store", "none")
    proc, _ = run_redis(kip)
    proc.sleep()
    (view,) = kip.json("snapshot", "ls")
    assert view["state"] == "local" and view["proc"] is None
    assert "1 generations, 1 objects" in kip.cli("snapshot", "verify", "redis").stdout
    for words in (["show", "redis"], ["gc"], ["export", "redis", "/tmp/never"], ["import", "/tmp/never"]):
        assert "there is no store" in kip.refused("snapshot", *words), words


def damage(kip: Kip, *words: str) -> list[dict[str, str]]:
    """What verifying tells as damaged."""
    done = kip.cli("snapshot", "verify", *words, "--json", check=False)
    items = [json.loads(line) for line in done.stdout.splitlines()]
    found = [item for item in items if item["kind"] == "damage"]
    assert items[-1]["kind"] == "end" and items[-1]["damaged"] == len(found), done
    assert done.returncode == (1 if found else 0) and not done.stderr, done
    return found


# promise snapshots: `verify`: a flipped bit, a cut, a missing object is found and named, in fronts,
#   packs, heads and on the local disk; exit code 1; a terminal sees how far it is
# held by: this, `tests/test_snapshot.py::test_a_flipped_bit_is_found`,
#   `kip_offload::snapshot_tests::a_flipped_bit_is_found_and_named`
def test_a_terminal_sees_how_far_it_is(fresh_kip: Callable[..., Kip], store: Path) -> None:
    kip = fresh_kip("--store", str(store))
    proc, client = run_redis(kip)
    archive_often(proc, client, 1)
    terminal, end = pty.openpty()
    words = [kip.program, "--data", kip.data, "snapshot", "verify", "--all"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=end, text=True, timeout=60, check=False)
    os.close(end)
    seen = ""
    with suppress(OSError):  # EIO: all is read, and no process has the other end any more
        while more := os.read(terminal, 1 << 16).decode():
            seen += more
    os.close(terminal)
    assert "2 of 2 objects" in seen or "3 of 3 objects" in seen, seen
    assert done.returncode == 0 and "\r" not in done.stdout, done


def test_a_flipped_bit_is_found(where: tuple[str, Path], fresh_kip: Callable[..., Kip]) -> None:
    url, files = where
    kip = fresh_kip("--store", url)
    proc, client = run_redis(kip)
    numbers = archive_often(proc, client, 3)
    assert damage(kip, "--all") == damage(kip, "redis") == damage(kip, "redis", "--all") == []
    assert "all as sealed" in kip.cli("snapshot", "verify", "--all").stdout
    front = next(files.glob(f"realms/default/procs/*/gen-{numbers[0]}-*"))
    packs = {pack["pack"] for pack in kip.json("snapshot", "show", "redis")["packs"]}
    pack = max((files / "realms/default/packs" / name for name in packs), key=lambda path: path.stat().st_size)
    for path in (front, pack):
        whole = path.read_bytes()
        for at in (100, len(whole) // 2, len(whole) - 5):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            (found,) = damage(kip, "--all")
            assert path.name in found["object"] and found["snapshot"].startswith("redis@"), found
        assert bool(damage(kip, "redis")) == (path == pack), "the newest only"
        assert damage(kip, f"redis@{numbers[0]}") if path == front else True
        line = kip.cli("snapshot", "verify", "--all", check=False).stdout.splitlines()[0]
        assert path.name in line and "the object is damaged" in line, line
        path.write_bytes(whole)
    assert damage(kip, "--all") == []
    # On the local disk.
    proc.wake()
    generation = proc.sleep()["generation"]
    image = next((kip.data / "procs/redis" / f"gen-{generation}").glob("checkpoint.tar"))
    whole = image.read_bytes()
    image.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (found,) = damage(kip, "redis")
    assert str(image.parent) in found["object"] and image.name in found["what"], found
    image.write_bytes(whole)


# promise snapshots: `gc`: what nothing leads to is deleted once it was known as such for the grace
#   time; the newest generation and two older ones stay whole; of the removed their heads only
# held by: this, `tests/test_snapshot.py::test_the_grace_time_is_kept`,
#   `kip_offload::snapshot_tests::what_nothing_leads_to_goes_and_what_is_kept_wakes`,
#   `kip_offload::snapshot_tests::the_wait_is_kept_and_the_removed_lose_everything_but_their_head`
def test_what_is_unused_goes(where: tuple[str, Path], fresh_kip: Callable[..., Kip]) -> None:
    """The last generations stay, whole; what only older ones led to is deleted, and the proc wakes as before."""
    url, files = where
    kip = fresh_kip("--store", url)
    proc, client = run_redis(kip)
    numbers = archive_often(proc, client, 5)
    before = objects(files)
    assert kip.json("snapshot", "gc", "--dry-run")["deleted"] == []
    names = collected(kip)
    left = objects(files)
    assert len(left) == len(before) - len(names) and len(names) >= 2, names
    assert generations(kip, "redis") == list(zip(numbers[:1:-1], ["current", "kept", "kept"]))
    assert damage(kip, "--all") == []
    assert client.ask("GET", "key:399") == b"4 399 " * 100
    assert any(event["kind"] == "collected" for event in kip.events())
    # Removed, it leaves nothing but the word that it is no more.
    proc.sleep()
    proc.remove()
    collected(kip)
    assert objects(files) == []
    heads = [path for path in files.glob("realms/*/procs/*/head")]
    assert len(heads) == 1 and kip.cli("snapshot", "ls").stdout == "there are no snapshots\n"


def test_the_grace_time_is_kept(fresh_kip: Callable[..., Kip], store: Path) -> None:
    kip = fresh_kip("--store", str(store))
    proc, client = run_redis(kip)
    archive_often(proc, client, 4)
    before = objects(store)
    for grace in ("24h", "1h", "24h"):
        found = collect(kip, grace)
        assert found["deleted"] == [] and found["waiting"], found
    assert objects(store) == before
    soon = collect(kip, "2s")
    due = [unused["due_at_ms"] for unused in soon["waiting"]]
    assert all(due) or soon["deleted"]
    wait_for("its time has come", lambda: collect(kip, "2s")["deleted"], 30)
    assert len(objects(store)) < len(before)
    assert kip.cli("snapshot", "gc").stdout.startswith("deleted: 0 objects, 0; waiting: ")


# promise snapshots: safe beside wakes and uploads: of this data directory however short the grace
#   time is, of others with the usual one, and else but for the moment of publishing
# held by: this, `kip_offload::snapshot_tests::who_stores_meanwhile_hears_of_it`; two
#   daemons at once: `tests/test_snapshot.py::test_one_collects_while_another_wakes`
def test_beside_wakes_and_uploads(where: tuple[str, Path], fresh_kip: Callable[..., Kip]) -> None:
    """Collections without any wait, one after the other, while a proc is archived and woken: nothing that it needs goes."""
    kip = fresh_kip("--store", where[0])
    proc, client = run_redis(kip)
    fill(client, 0)
    ended, failures = threading.Event(), []

    def collect_on() -> None:
        while not ended.is_set():
            done = kip.cli("snapshot", "gc", "--grace", "0s", check=False)
            if done.returncode != 0:
                failures.append(done.stderr)

    collector = threading.Thread(target=collect_on)
    collector.start()
    try:
        for turn in range(6):
            fill(client, turn)
            archive(proc)
            assert client.ask("GET", "key:399") == (f"{turn} 399 " * 100).encode()
    finally:
        ended.set()
        collector.join()
    assert failures == []
    archive(proc)
    assert damage(kip, "--all") == []
    collected(kip)
    assert [place for _, place in generations(kip, "redis")] == ["current", "kept", "kept"]


# promise snapshots: collections without any wait of another data directory, one after the other,
#   keep no generation out of the store
# held by: this
def test_one_collects_while_another_wakes(where: tuple[str, Path], fresh_kip: Callable[..., Kip]) -> None:
    """Two data directories with one store, one collects without any wait, again and again: the other stores and wakes all that it has."""
    kip = fresh_kip("--store", where[0])
    proc, client = run_redis(kip)
    other = fresh_kip("--store", where[0], start=False)
    (other.data / "archive").mkdir(parents=True)
    shutil.copy(kip.data / "archive/default.keys", other.data / "archive/default.keys")
    other.up()
    ended, failures, rounds = threading.Event(), [], 0

    def collect_on() -> None:
        nonlocal rounds
        while not ended.is_set():
            done = other.cli("snapshot", "gc", "--grace", "0s", check=False)
            rounds += 1
            if done.returncode != 0:
                failures.append(done.stderr)

    collector = threading.Thread(target=collect_on)
    collector.start()
    try:
        for turn in range(6):
            fill(client, turn)
            before = rounds
            wait_for("one is under way", lambda before=before: rounds > before, 60)
            kip.cli("sleep", "redis", "--to", "archived")
            assert client.ask_all([("GET", f"key:{i}") for i in range(400)]) == [(f"{turn} {i} " * 100).encode() for i in range(400)]
    finally:
        ended.set()
        collector.join()
    assert failures == [] and rounds >= 6
    archive(proc)
    assert damage(kip, "--all") == []
    assert client.ask("GET", "key:399") == ("5 399 " * 100).encode()


# promise snapshots: killed at any step nothing is lost, and the next goes on
# held by: this, `tests/test_recovery.py::test_killed_at_step`
@pytest.mark.parametrize("step", ["gc-marked", "gc-candidates", "gc-deleted"])
def test_killed_while_it_collects(fresh_kip: Callable[..., Kip], store: Path, step: str) -> None:
    """Whatever was half done, nothing that is used is lost, the next collection goes on and takes the rest."""
    kip = fresh_kip("--store", str(store))
    proc, client = run_redis(kip)
    archive_often(proc, client, 5)
    collect(kip, "0s")
    waiting = len(collect_dry(kip))
    assert waiting >= 2
    before = objects(store)
    kip.kill()
    kip.expected.append(r"WARN.*fault")
    kip.up("--fault-at", step)
    assert kip.cli("snapshot", "gc", "--grace", "0s", check=False).returncode == 1
    assert kip.wait_dead() == -signal.SIGKILL
    gone = len(before) - len(objects(store))
    assert (gone > 0) == (step == "gc-deleted"), gone
    kip.up()
    collected(kip)
    assert len(objects(store)) == len(before) - waiting
    assert damage(kip, "--all") == []
    assert client.ask("GET", "key:399") == b"4 399 " * 100


def collect_dry(kip: Kip) -> list[dict[str, object]]:
    return kip.json("snapshot", "gc", "--dry-run", "--grace", "0s")["deleted"]


# promise snapshots: about once an hour by itself
def test_by_itself(fresh_kip: Callable[..., Kip], store: Path) -> None:
    """What is unused is noted without a command, and kept for a day."""
    kip = fresh_kip("--store", str(store), "--collect-every", "300ms")
    proc, client = run_redis(kip)
    archive_often(proc, client, 4)
    noted = store / "realms/default/collection"
    wait_for("it is noted", lambda: noted.exists() and b"Front" in noted.read_bytes(), 30)
    before = objects(store)
    again = noted.read_bytes()
    wait_for("it has collected again", lambda: noted.read_bytes() != again, 30)
    assert objects(store) == before


# promise snapshots: `export` and `import`: one sealed file, into another data directory's store;
#   other keys, damage and what lives there are refused; it is free to adopt, wakes there, sleeps
#   there and goes on to a third
# held by: this,
#   `kip_offload::snapshot_tests::an_export_comes_back_elsewhere_with_the_same_keys_only`,
#   `kip_archive::head::tests::what_is_brought_in_is_free_to_adopt_and_replaces_nothing_that_lives`
def test_export_and_import(where: tuple[str, Path], fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """Into another data directory with another store: only where the keys are, and never over what lives."""
    kip = fresh_kip("--store", where[0])
    proc, client = run_redis(kip)
    numbers = archive_often(proc, client, 3)
    file = tmp_path / "redis.kip"
    told = kip.json("snapshot", "export", f"redis@{numbers[1]}", str(file))
    assert told["generation"] == numbers[1] and told["packs"] and file.stat().st_size > told["bytes"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert "there already" in kip.refused("snapshot", "export", "redis", str(file))
    (tmp_path / "elsewhere").mkdir()
    other = fresh_kip("--store", str(tmp_path / "elsewhere"))
    assert "does not have the key" in other.refused("snapshot", "import", str(file))
    other.kill()
    shutil.copy(kip.data / "archive/default.keys", other.data / "archive/default.keys")
    other.up()
    whole = file.read_bytes()
    broken = tmp_path / "broken.kip"
    flipped = whole[:-2000] + bytes([whole[-2000] ^ 0x10]) + whole[-1999:]
    for bytes_ in (whole[: len(whole) // 2], b"no export at all" * 100, flipped, b""):
        broken.write_bytes(bytes_)
        other.refused("snapshot", "import", str(broken))
    assert other.json("snapshot", "ls") == [], "nothing leads to what was stored of those"
    told = other.json("snapshot", "import", str(file), "--name", "copy")
    assert (told["name"], told["generation"]) == ("copy", numbers[1])
    (view,) = other.json("snapshot", "ls", "copy")
    assert view["state"] == "archived" and [g["generation"] for g in view["generations"]] == [numbers[1]]
    assert damage(other, "--all") == []
    assert other.json("snapshot", "show", "copy")["command"] == servers.redis().command
    assert "in the store already, as copy" in other.refused("snapshot", "import", str(file))
    assert "in the store already, as redis" in kip.refused("snapshot", "import", str(file))
    collected(other)
    assert damage(other, "copy") == []
    # It runs there, as it was, sleeps there, and goes on to a third.
    assert "woke from archived" in other.cli("wake", "copy").stdout
    copy = Proc(other, "copy")
    turn = lambda proc: Redis(proc.port()).ask("GET", "key:399")  # noqa: E731
    assert turn(copy) == ("1 399 " * 100).encode()
    archive(copy)
    third = fresh_kip("--store", str(tmp_path / "elsewhere"), start=False)
    (third.data / "archive").mkdir(parents=True)
    shutil.copy(kip.data / "archive/default.keys", third.data / "archive/default.keys")
    third.up()
    assert "woke from archived" in third.cli("wake", "copy").stdout
    assert turn(Proc(third, "copy")) == ("1 399 " * 100).encode()
    assert "has taken it over" in other.refused("wake", "copy")
    # Where it came from it is another, and its newest.
    assert client.ask("GET", "key:399") == ("2 399 " * 100).encode()
