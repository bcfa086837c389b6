"""Archived procs: their generations lie in an object store, a directory here, and nothing of them on the local disk; their
sockets are held, and a client that connects brings them back as they were."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from harness import s3, servers, logged
from harness.clients import Lines, Redis, http_get
from harness.kip import Kip, Proc
from harness.rows import one_in
from harness.wait import wait_for


def archive(proc: Proc) -> None:
    proc.archive()
    left = list((proc.kip.data / "procs" / proc.name).glob("gen-*"))
    assert not left, f"an archived proc has nothing on the local disk: {left}"
    wait_for("no page file that is deleted takes disk space", lambda: not deleted_page_files(proc.kip), 10)


def deleted_page_files(kip: Kip) -> list[str]:
    """Those that Kip's own processes still have open."""
    info = kip.info()
    targets = []
    for link in [link for pid in (info["pid"], info["pager_pid"]) for link in Path(f"/proc/{pid}/fd").iterdir()]:
        # One that is closed meanwhile is none.
        with suppress(FileNotFoundError):
            targets.append(os.readlink(link))
    return [target for target in targets if target.endswith("(deleted)") and f"{kip.data}/procs/" in target]


# promise archive: what is archived takes no disk space, not by a deleted file either
# promise archive: `kip sleep --to archived`: sealed memory and state go to the store, are read
#   back, and nothing of them stays on the local disk; a client that connects brings the proc back
#   as it was
# held by: this, `tests/test_archive.py::test_much_memory`, `tests/test_archive.py::test_torture`,
#   `kip_offload::tests::a_generation_comes_back_from_a_store`
@pytest.mark.smoke
def test_a_web_server(archiving: Kip, tmp_path: Path) -> None:
    server = servers.lighttpd()
    tar = server.tarball(tmp_path)
    proc = archiving.run("web", server.command, ports=server.published, tar=tar)
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    for _ in range(5):
        archive(proc)
        assert http_get(proc.port(), "/page.html") == servers.PAGE
        assert proc.wait_state("running")["wakes"]


# promise P5: archived to a store by itself and by request, on the same machine back
# held by: this, `tests/test_archive.py::test_a_web_server`
# promise archive: by itself, after `--archive-after` in the parked tier; `kip inspect` and `kip
#   why` say so
def test_by_itself(archiving: Kip, tmp_path: Path) -> None:
    """Idle, hibernated, parked, archived, each after its time; `kip inspect` and `kip why` say where it woke from and by which
    steps."""
    server = servers.lighttpd()
    flags = ["--idle", "300ms", "--park-after", "300ms", "--archive-after", "300ms"]
    proc = archiving.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    proc.wait_state("archived")
    assert proc.inspect()["last_sleep"]["to"] == "archived"
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    wake = proc.inspect()["last_wake"]
    assert wake["from"] == "archived" and "fetch" in {step["name"] for step in wake["steps"]}, wake
    proc.wait_state("archived")


def test_much_memory(archiving: Kip) -> None:
    server = servers.redis()
    proc = archiving.run("redis", server.command, ports=server.published)
    client = Redis(proc.port())
    values = {f"key:{i}": (f"{i} " * 500).encode() for i in range(5000)}
    client.ask_all([("SET", key, value) for key, value in values.items()])
    for cycle in range(3):
        archive(proc)
        assert client.ask_all([("GET", key) for key in values]) == list(values.values()), cycle
        client.ask_all([("SET", "key:7", b"%d" % cycle)])
        values["key:7"] = b"%d" % cycle


# promise P14: what passes through the daemon when a proc is parked, archived and woken is given
#   back: it grows by less than a 20th of 600 MB of noise
# held by: this, `kip_archive::index::tests::what_was_neither_stored_nor_found_for_the_longest_goes`
def test_the_daemon_gives_memory_back(archiving: Kip) -> None:
    def own_memory() -> int:
        assert archiving.daemon
        lines = Path(f"/proc/{archiving.daemon.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))

    before = own_memory()
    noise = "import os, sys, time\npieces = [os.urandom(1 << 20) for _ in range(600)]\nprint('written', flush=True)\ntime.sleep(1e6)"
    proc = archiving.run("noisy", ["/usr/bin/python3", "-c", noise])
    wait_for("it has its memory", lambda: "written" in archiving.cli("logs", "noisy").stdout, 60)
    proc.sleep()
    proc.archive()
    proc.wake()
    wait_for("the daemon is small again", lambda: own_memory() - before < 30 << 20, 30)


def test_torture(archiving: Kip, tmp_path: Path) -> None:
    server = servers.torture()
    proc = archiving.run("torture", server.command, ports=server.published, tar=server.tarball(tmp_path))
    client = Lines(proc.port())
    for _ in range(3):
        archive(proc)
        client.check()
    client.close()


def test_archived_it_outlives_the_daemon(archiving: Kip, tmp_path: Path) -> None:
    """Killed while a proc sleeps in the store: the next daemon holds its sockets and wakes it."""
    server = servers.lighttpd()
    proc = archiving.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    archive(proc)
    archiving.kill()
    archiving.up()
    assert proc.state == "archived"
    assert http_get(proc.port(), "/page.html") == servers.PAGE


# A daemon that finds something half done may say so; what is replaced may be told of.
RECOVERING = [*logged.DAEMON_KILLED, *logged.KEEPER_KILLED, *logged.PAGER_KILLED]
# Of a native restore, and of one by CRIU, from the store both.
NATIVE = ["fetch-begun", "fetch-done", "fetch-recorded", "wake-intent", "wake-released", "wake-resumed", "wake-recorded"]
BY_CRIU = ["fetch-begun", "wake-helper", "wake-created", "wake-restored", "wake-held", "wake-released", "wake-resumed", "wake-recorded"]


# promise waking: threads that CRIU has restored and that the daemon did not let go are ended by the
#   next daemon, and the proc wakes again
@pytest.mark.parametrize(("how", "step"), one_in(3, [("plan", step) for step in NATIVE] + [("criu", step) for step in BY_CRIU]))
def test_killed_at_a_step_of_a_wake_from_the_store(archiving: Kip, store: Path, how: str, step: str) -> None:
    """While its front is half there, and at every step after that: a client that has asked gets the next daemon's answer."""
    archiving.expected += RECOVERING
    flags = ("--only-criu",) if how == "criu" else ()
    archiving.flags = ("--store", str(store), *flags)
    server = servers.redis()
    proc = archiving.run("redis", server.command, ports=server.published)
    client = Redis(proc.port(), timeout=60)
    client.ask_all([("SET", f"key:{i}", b"%d" % i * 300) for i in range(3000)])
    archive(proc)
    archiving.kill()
    archiving.up("--fault-at", step)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.ask, "GET", "key:2999")
        assert archiving.wait_dead(30) == -signal.SIGKILL
        archiving.up()
        assert answer.result(60) == b"2999" * 300
    values = [b"%d" % i * 300 for i in range(3000)]
    assert client.ask_all([("GET", f"key:{i}") for i in range(3000)]) == values
    assert not [e for e in archiving.events() if e["kind"] in ("cold-start", "fell-back")]
    archive(proc)
    assert client.ask("GET", "key:0") == values[0]


# promise archive: pager or keeper killed while memory comes from the store: it comes all the same
@pytest.mark.parametrize("victim", ["pager", "keeper"])
def test_killed_while_its_memory_comes(archiving: Kip, victim: str) -> None:
    """Another takes its place, and the pages that are still in the store come as before."""
    archiving.expected += RECOVERING
    proc, client, values = filled(archiving)
    archive(proc)
    assert client.ask("GET", "key:5") == values[5]
    for turn in range(2):
        with ThreadPoolExecutor(1) as pool:
            some = range(turn * 5000, turn * 5000 + 5000)
            answers = pool.submit(client.ask_all, [("GET", f"key:{i}") for i in some])
            os.kill(archiving.info()[f"{victim}_pid"], signal.SIGKILL)
            assert answers.result(120) == [values[i] for i in some]
    assert not [e for e in archiving.events() if e["kind"] in ("cold-start", "fell-back")]


# promise archive: due timers and datagrams wake it from the store as connections do
@pytest.mark.parametrize("event", ["timer", "udp"])
def test_wakes_from_the_store_for_it(archiving: Kip, tmp_path: Path, event: str) -> None:
    """A timer that is due, a datagram: on time, and with its content."""
    server = servers.torture()
    proc = archiving.run("torture", server.command, ports=server.published, tar=server.tarball(tmp_path))
    client = Lines(proc.port())
    if event == "udp":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(30)
            s.connect(("127.0.0.1", proc.port(proto="udp")))
            archive(proc)
            s.send(b"from afar")
            assert s.recv(100) == b"from afar"
        number = None
    else:
        # On a slow machine it is due before all is stored: then with more time.
        for due_s in (8, 30):
            number = client.ask(f"arm timerfd {due_s * 1000}").split()[1]
            begun = time.monotonic()
            proc.archive()
            if time.monotonic() < begun + due_s - 2:
                break
    view = proc.wait_state("running", 60)
    wake = view["last_wake"]
    assert wake["from"] == "archived" and event in wake["trigger"], wake
    if number is not None:
        wait_for("it has fired", lambda: client.values(f"result {number}")["fired"] == "1", 30)
    client.check()


# promise archive: stopped and started anew it begins with an archive of its own; removed, it leaves
#   the store
# held by: this; its objects are deleted: `tests/test_snapshot.py::test_what_is_unused_goes`
def test_stop_and_start(archiving: Kip, tmp_path: Path) -> None:
    server = servers.lighttpd()
    proc = archiving.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    archive(proc)
    archiving.cli("stop", proc.name)
    proc.start(ready=True)
    proc.wait_state("running")
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    archive(proc)
    archiving.cli("rm", "--force", proc.name)


# promise archive: without `--store` it is that of the last time, at first a directory of the data
#   directory's own; `none` is none
# held by: this,
#   `kip_offload::place::tests::the_last_one_is_remembered_and_the_own_one_is_not`
def test_without_a_word_the_store_is_its_own_or_that_of_the_last_time(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """A directory in the data directory; what a daemon was told once the next one knows."""
    kip = fresh_kip()
    server = servers.redis()
    proc = kip.run("redis", server.command, ports=server.published)
    client = Redis(proc.port())
    client.ask("SET", "key", "value")
    proc.archive()
    assert list((kip.data / "store").rglob("gen-*")) and (kip.data / "store").stat().st_mode & 0o777 == 0o700
    kip.kill()
    kip.up()
    assert client.ask("GET", "key") == b"value"
    # A directory given by `--store` is the store until another is given.
    (tmp_path / "other").mkdir()
    other = kip.run("other", server.command, ports=server.published)
    for flags in (("--store", str(tmp_path / "other")), ()):
        kip.kill()
        kip.flags = flags
        kip.up()
        assert Redis(other.port()).ask("PING") == "PONG"
        other.archive()
        assert list((tmp_path / "other").rglob("gen-*"))
    assert Redis(other.port()).ask("PING") == "PONG"


# promise archive: no store, or one that cannot be opened: one line
# held by: this, `tests/test_archive.py::test_stores_that_cannot_be_used`
def test_without_a_store_it_is_refused(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip("--store", "none")
    server = servers.redis()
    proc = kip.run("redis", server.command, ports=server.published)
    refused = kip.refused("sleep", proc.name, "--to", "archived")
    assert "there is no store" in refused and "--store" in refused


# promise waking: `kip sleep` of one that wakes at once, before it is archived too, says that it
#   slept and has woken, and by what
# promise archive: who wakes while it is stored stays awake
def test_who_wakes_while_it_is_stored_stays_awake(archiving: Kip) -> None:
    """Connections come all the time, so that an upload is overtaken by a wake again and again; nothing is lost by it."""
    server = servers.redis()
    proc = archiving.run("redis", server.command, ports=server.published)
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", b"%d" % i * 300) for i in range(20000)])
    overtaken = 0
    for cycle in range(8):
        waiting = subprocess.Popen([archiving.program, "--data", archiving.data, "sleep", "redis", "--to", "archived"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
        wait_for("it sleeps", lambda: proc.state in ("parked", "archived"), 30)
        assert client.ask("GET", f"key:{cycle}") == b"%d" % cycle * 300
        told = waiting.communicate(timeout=60)[0]
        assert waiting.returncode == 0, told
        # It says what is true when it returns: the wake may have come a moment later.
        woke = " parked in " in told
        assert not woke or "; it woke since, by " in told and " is running" in told, told
        overtaken += woke
        assert proc.wait_state("running")
    assert overtaken, "none was overtaken"
    archive(proc)
    assert client.ask("GET", "key:19999") == b"19999" * 300


# promise archive: a store that is gone: procs stay parked or archived and say so; a damaged front
#   does not wake, and says which
# held by: this, `tests/test_archive.py::test_a_damaged_object_is_found`
def test_a_store_that_is_gone(archiving: Kip, store: Path) -> None:
    """What is parked stays parked, what is archived stays so, and both say so; once it is back all goes on."""
    server = servers.redis()
    proc = archiving.run("redis", server.command, ports=server.published)
    client = Redis(proc.port())
    client.ask("SET", "a", "1")
    store.rename(store.with_name("gone"))
    proc.sleep()
    refusal = archiving.refused("sleep", "redis", "--to", "archived")
    assert "redis stays parked: " in refusal and "store" in refusal, refusal
    assert proc.state == "parked" and client.ask("GET", "a") == b"1"
    store.with_name("gone").rename(store)
    archive(proc)
    store.rename(store.with_name("gone"))
    refusal = archiving.refused("wake", "redis")
    assert "redis cannot be woken: " in refusal and "it stays archived" in refusal, refusal
    assert "redis cannot be stopped: " in archiving.refused("stop", "redis")
    # A client that comes meanwhile waits, and is served once the store is there again.
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.ask, "GET", "a")
        wait_for("it is told", lambda: any(e["kind"] == "refused" and "stays archived" in e["detail"] for e in archiving.events()), 20)
        assert proc.state == "archived"
        store.with_name("gone").rename(store)
        assert waiting.result(30) == b"1"
    # Removed by force although the store is gone.
    archiving.expected += [r"WARN.*stays in the store"]
    archive(proc)
    store.rename(store.with_name("gone"))
    archiving.cli("rm", "--force", "redis")
    store.with_name("gone").rename(store)


# promise K9: generations are sealed for realm, proc and generation; a destroyed key makes what it
#   sealed unreadable for ever
# held by: this, `tests/test_keys.py::test_rotated_and_destroyed`,
#   `crates/archive/tests/front.rs::a_front_opens_for_its_own_proc_and_generation_only`
# promise archive: the same in a bucket of a real S3 server
def test_in_a_bucket(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """Of a real S3 server. Objects are sealed: what the program knows is in none of them."""
    with s3.server(tmp_path / "s3") as url:
        kip = fresh_kip("--store", url)
        proc = kip.run("redis", servers.redis().command, ports=servers.redis().published)
        client = Redis(proc.port())
        client.ask_all([("SET", f"key:{i}", f"very secret {i} ".encode() * 100) for i in range(3000)])
        for cycle in range(3):
            archive(proc)
            assert client.ask("GET", "key:2999") == b"very secret 2999 " * 100
            client.ask("SET", "key:1", b"%d" % cycle)
        objects = [path for path in (tmp_path / "s3").rglob("*") if path.is_file()]
        assert len(objects) >= 5 and not any(b"very secret" in path.read_bytes() for path in objects)
        kip.down()


def test_stores_that_cannot_be_used(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """Told when the daemon starts."""
    for url, words in [
        (str(tmp_path / "nothing"), "nothing"),
        ("s3://", "s3://"),
        ("ftp://x/y", "ftp"),
        ("relative", "relative"),
        ("gs://bucket/kip", "--features gcs"),
        ("az://container/kip", "--features azure"),
    ]:
        kip = fresh_kip(start=False)
        done = subprocess.run([kip.program, "--data", kip.data, "up", "--store", url], capture_output=True, text=True, timeout=20)
        assert done.returncode == 1 and words in done.stderr.splitlines()[-1], (url, done)
        assert not (kip.data / "run" / "keeper.sock").exists(), "nothing was started that would outlive it"


def filled(kip: Kip) -> tuple[Proc, Redis, list[bytes]]:
    """A redis with 80 MB of which one request needs little, which is known."""
    server = servers.redis()
    proc = kip.run("redis", server.command, ports=server.published)
    client = Redis(proc.port())
    values = [random.Random(i).randbytes(8000) for i in range(10_000)]
    client.ask_all([("SET", f"key:{i}", value) for i, value in enumerate(values)])
    for _ in range(2):
        proc.sleep()
        assert client.ask("GET", "key:5") == values[5]
    return proc, client, values


def serves(proc: Proc) -> bool:
    try:
        return bool(Redis(proc.port()).ask("PING") == "PONG")
    except (OSError, AssertionError):
        return False


def flip(path: Path, whole: bytes, at: int) -> None:
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])


def test_a_damaged_object_is_found(archiving: Kip, store: Path) -> None:
    """A flipped bit anywhere in what a wake needs: it does not wake, says what is damaged, and wakes once the object is whole."""
    proc, client, values = filled(archiving)
    archive(proc)
    damaged = max(store.glob("realms/*/procs/*/gen-*"), key=lambda path: path.stat().st_size)
    whole = damaged.read_bytes()
    for at in (1000, len(whole) // 3, len(whole) // 2):
        flip(damaged, whole, at)
        refusal = archiving.refused("wake", "redis")
        assert "redis cannot be woken: " in refusal and "it stays archived" in refusal, refusal
    damaged.write_bytes(whole)
    assert client.ask("GET", "key:9999") == values[9999]


# promise archive: memory that is damaged in the store is given to no program: the proc starts cold
#   and says why
def test_damaged_memory_is_found_when_it_is_needed(archiving: Kip, store: Path) -> None:
    """A flipped bit in what comes after the wake: no client ever gets a wrong answer; the proc starts anew and says why."""
    archiving.expected += [r"WARN.*its snapshot cannot be used"]
    proc, client, values = filled(archiving)
    archive(proc)
    packs = list(store.glob("realms/*/packs/*"))
    for pack in packs:
        whole = bytearray(pack.read_bytes())
        whole[5000::100_000] = bytes(byte ^ 4 for byte in whole[5000::100_000])
        pack.write_bytes(whole)
    with pytest.raises((OSError, AssertionError)):  # the connection ends
        for i in range(0, 10_000, 100):
            if client.ask("GET", f"key:{i}") != values[i]:
                pytest.fail("a wrong answer")
    started = lambda: [e["detail"] for e in archiving.events() if e["kind"] == "cold-start"]  # noqa: E731
    told = wait_for("it starts anew", started, 30)
    assert any(pack.name in told[0] for pack in packs), told
    wait_for("it serves", lambda: serves(proc), 30)


# promise K6: one GET: the first object holds all up to the first reply
# held by: this, `kip_offload::tests::a_front_that_breaks_off_is_read_again`
# promise P8: lazily from a store, blocks of 32 pages, more as long as what is read ahead is needed,
#   all once the pieces cost more waiting than that
# held by: this, `tests/test_cache.py::test_what_is_needed_all_over_comes_whole`,
#   `kip_offload::tests::what_is_needed_is_fetched_and_the_rest_is_taken_over`
# promise P9: the working set comes with the first object, and the wake begins before all of it has
#   come
# held by: this, `kip_offload::tests::a_front_that_breaks_off_is_read_again`
# promise archive: memory that a wake does not need first stays in the store; what is touched comes,
#   and is checked; what never came is not stored again
# held by: this, `kip_snapshot::remote::tests::pages_are_here_once_they_came`,
#   `kip_pager::parked::tests::what_is_not_here_is_asked_for_once_and_read_when_it_came`
def test_memory_comes_when_it_is_needed(archiving: Kip, store: Path) -> None:
    """Most of 80 MB stays in the store; what is asked for comes, and what never came is not stored again."""
    proc, client, values = filled(archiving)
    archive(proc)
    stored = lambda: sum(path.stat().st_size for path in store.glob("realms/*/packs/*"))  # noqa: E731
    full = stored()
    assert full > 70 << 20
    for cycle in range(3):
        assert client.ask("GET", "key:5") == values[5]
        remote = next((archiving.data / "procs" / "redis").glob("gen-*/*-remote"))
        assert remote.stat().st_blocks * 512 < 40 << 20, "most of it stays where it is"
        some = random.Random(cycle).sample(range(10_000), 150)
        assert client.ask_all([("GET", f"key:{i}") for i in some]) == [values[i] for i in some]
        assert proc.inspect()["memory"]["rss_bytes"] < 60 << 20
        archive(proc)
        assert stored() < full + (cycle + 1) * (8 << 20), "what did not change is not stored again"
    assert client.ask_all([("GET", f"key:{i}") for i in range(10_000)]) == values


# promise archive: it hibernates, parks and wakes with memory that never came, natively and by CRIU
# held by: this,
#   `kip_snapshot::carry::tests::a_remote_file_is_linked_whole_and_sets_have_what_is_here`
def test_sleeps_while_most_of_it_is_in_the_store(archiving: Kip) -> None:
    """Hibernated, parked and woken on this machine, natively and by CRIU, with memory that never came from the store."""
    proc, client, values = filled(archiving)
    archive(proc)
    assert client.ask("GET", "key:5") == values[5]
    for tier in ("hibernated", "parked", "parked", "hibernated"):
        proc.hibernate() if tier == "hibernated" else proc.sleep()
        assert client.ask("GET", "key:5") == values[5]
        client.ask_all([("SET", "key:7", b"7"), ("GET", "key:8000")])
    values[7] = b"7"
    proc.sleep()
    archiving.kill()
    archiving.up()
    assert client.ask_all([("GET", f"key:{i}") for i in range(10_000)]) == values


# promise archive: a store that goes away lets it wait, and says so; it goes on when the store is
#   back, also for a daemon that was killed meanwhile
def test_a_store_that_goes_away_lets_it_wait(archiving: Kip, store: Path) -> None:
    """Memory that does not come is waited for, and that is told; it comes once the store is back, though the daemon was killed."""
    archiving.expected += [logged.FETCHED_AGAIN, logged.SNAPSHOT_UNUSABLE]
    proc, client, values = filled(archiving)
    archive(proc)
    assert client.ask("GET", "key:5") == values[5]
    packs = next(store.glob("realms/*/packs"))
    packs.rename(packs.with_name("away"))
    with ThreadPoolExecutor(1) as other:
        answers = other.submit(client.ask_all, [("GET", f"key:{i}") for i in range(10_000)])
        waits = lambda: [e for e in archiving.events() if e["kind"] == "waiting" and "redis" in str(e)]  # noqa: E731
        wait_for("it says that it waits", waits, 30)
        assert not answers.done()
        archiving.kill()
        packs.with_name("away").rename(packs)
        archiving.up()
        assert answers.result(timeout=60) == values


# promise archive: a copy from the store that is lost or damaged on the local disk comes again
# held by: this, `kip_snapshot::remote::tests::one_that_is_damaged_is_not_here`
@pytest.mark.parametrize("lost", one_in(2, ["manifest.json", "pages.map", "g*-remote", "g*-remote.here", "g*-remote.table"]))
def test_a_copy_that_is_lost_is_fetched_again(archiving: Kip, lost: str) -> None:
    """What came from the store and was not changed since is not synced: it may be lost with the machine, and comes again."""
    archiving.expected += [logged.FETCHED_AGAIN, logged.SNAPSHOT_UNUSABLE]
    proc, client, values = filled(archiving)
    archive(proc)
    archiving.kill()
    archiving.up("--fault-at", "fetch-recorded")
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(client.ask, "GET", "key:9999")
        assert archiving.wait_dead(30) == -signal.SIGKILL
        next((archiving.data / "procs" / "redis").glob(f"gen-*/{lost}")).write_bytes(b"")
        archiving.up()
        assert answer.result(timeout=30) == values[9999]
    assert not [e for e in archiving.events() if e["kind"] == "cold-start"]
    assert client.ask_all([("GET", f"key:{i}") for i in range(10_000)]) == values
