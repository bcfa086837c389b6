"""Archived procs: their generations lie in an object store, a directory here, and nothing of them on the local disk; their
sockets are held, and whoever connects brings them back as they were."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness import s3, servers
from harness.clients import Lines, Redis, http_get
from harness.kip import Kip, Proc
from harness.wait import wait_for


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def archiving(fresh_kip: Callable[..., Kip], store: Path) -> Kip:
    return fresh_kip("--store", str(store))


def archive(proc: Proc) -> None:
    """It may be at work at first, and wake at once."""
    proc.sleep()
    proc.kip.cli("sleep", proc.name, "--to", "archived")
    view = proc.inspect()
    assert view["state"] == view["tier"] == "archived" and view["pids"] == [], view
    left = list((proc.kip.data / "procs" / proc.name).glob("gen-*"))
    assert not left, f"an archived proc has nothing on the local disk: {left}"


def test_a_web_server(archiving: Kip, tmp_path: Path) -> None:
    server = servers.lighttpd()
    tar = server.tarball(tmp_path)
    proc = archiving.run("web", server.command, ports=server.published, tar=tar)
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    for _ in range(5):
        archive(proc)
        assert http_get(proc.port(), "/page.html") == servers.PAGE
        assert proc.wait_state("running")["wakes"]


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


def test_torture(archiving: Kip, tmp_path: Path) -> None:
    server = servers.torture()
    proc = archiving.run("torture", server.command, ports=server.published, tar=server.tarball(tmp_path))
    client = Lines(proc.port())
    for _ in range(3):
        archive(proc)
        client.check()
    client.close()


def test_daemon_killed_while_it_is_archived(archiving: Kip, tmp_path: Path) -> None:
    server = servers.lighttpd()
    proc = archiving.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    archive(proc)
    archiving.kill()
    archiving.up()
    assert proc.state == "archived"
    assert http_get(proc.port(), "/page.html") == servers.PAGE


def test_stop_and_start(archiving: Kip, tmp_path: Path) -> None:
    server = servers.lighttpd()
    proc = archiving.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    archive(proc)
    archiving.cli("stop", proc.name)
    archiving.cli("start", proc.name)
    proc.wait_state("running")
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    archive(proc)
    archiving.cli("rm", "--force", proc.name)


def test_without_a_store_it_is_refused(kip: Kip) -> None:
    server = servers.redis()
    proc = kip.run("redis", server.command, ports=server.published)
    refused = kip.refused("sleep", proc.name, "--to", "archived")
    assert "there is no store" in refused and "--store" in refused


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
        refusal = waiting.communicate(timeout=60)[1]
        assert waiting.returncode == 0 or "woke before it was archived" in refusal, refusal
        overtaken += waiting.returncode != 0
        assert proc.wait_state("running")
    assert overtaken, "none was overtaken"
    archive(proc)
    assert client.ask("GET", "key:19999") == b"19999" * 300


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
    # Who comes meanwhile waits, and is served once the store is there again.
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
    ]:
        kip = fresh_kip(start=False)
        done = subprocess.run([kip.program, "--data", kip.data, "up", "--store", url], capture_output=True, text=True, timeout=20)
        assert done.returncode == 1 and words in done.stderr.splitlines()[-1], (url, done)
        assert not (kip.data / "run" / "keeper.sock").exists(), "nothing was started that would outlive it"


@pytest.mark.parametrize("what", ["front", "pack"])
def test_a_damaged_object_is_found(archiving: Kip, store: Path, what: str) -> None:
    """A flipped bit anywhere: it does not wake, says what is damaged, and wakes once the object is whole again."""
    server = servers.redis()
    proc = archiving.run("redis", server.command, ports=server.published)
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", b"%d" % i * 300) for i in range(5000)])
    archive(proc)
    found = sorted(store.glob("realms/*/packs/*" if what == "pack" else "realms/*/procs/*/gen-*"))
    damaged = max(found, key=lambda path: path.stat().st_size)
    whole = damaged.read_bytes()
    for at in (1000, len(whole) // 3, len(whole) // 2):  # the header of a pack is of no use to a wake
        damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        refusal = archiving.refused("wake", "redis")
        assert "redis cannot be woken: " in refusal and "it stays archived" in refusal, refusal
    damaged.write_bytes(whole)
    assert client.ask("GET", "key:4999") == b"4999" * 300
