"""`kip inspect NAME --files | --env | --sockets | --maps`: what is inside of a proc, in every tier, and nothing wakes for it."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness import servers
from harness.clients import Redis, http_get
from harness.kip import BY_ITSELF, Kip, Proc
from harness.rows import rest_in_soak

DETAILS = ("files", "env", "sockets", "maps")
WHERE = ("memory", "swapped", "out", "snapshot", "store", "zero", "file")
SECRET = "kip-inspect=a secret with spaces"
# Sleeps when it is told to.
FLAGS = ["--never-sleep", "--env", f"SECRET={SECRET}"]


@contextmanager
def undisturbed(proc: Proc, watched: float = 0.25) -> Iterator[None]:
    """No proc wakes, no process runs, no page comes back, no generation is made. Whether it ticks is watched for that many seconds."""

    def seen() -> dict[str, Any]:
        view = proc.inspect()
        memory = view["memory"]
        said = {key: view[key] for key in ("state", "tier", "wakes", "generation", "pids", "last_wake")}
        if view["state"] == "hibernated":
            said |= {"cpu_us": view["cpu_us"], "rss": memory["rss_bytes"], "faults": memory["working_set_misses"]}
        return said

    before = seen()
    time.sleep(watched)
    # A program that ticks goes on doing so while it is hibernated, and what that uses is its own.
    ticks = [key for key in ("cpu_us", "rss", "faults") if before.get(key) != seen().get(key)]
    yield
    after = seen()
    for key in ("cpu_us", "rss", "faults") if ticks else ():
        before.pop(key, None), after.pop(key, None)
    assert after == before


def look(proc: Proc, *details: str) -> dict[str, Any]:
    """All that is asked for; text and JSON are of one call each."""
    found = {}
    view = proc.inspect()
    for detail in details or DETAILS:
        found[detail] = proc.kip.json("inspect", proc.name, f"--{detail}")
        assert {key: found[detail].pop(key) for key in ("name", "tier", "generation")} == {
            key: view[key] for key in ("name", "tier", "generation")
        }
        text = proc.kip.cli("inspect", proc.name, f"--{detail}").stdout
        assert text.startswith(f"{proc.name}, {view['tier']}, generation {view['generation']}\n"), text[:200]
    for process in found.get("maps", {}).get("processes", []):
        for one in process["maps"]:
            assert sum(one[f"{where}_bytes"] for where in WHERE) == one["bytes"], one
    return found


def look_asleep(proc: Proc, sleep: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Inspection of a sleeping proc. A proc with timers of its own (postfix) may be woken by them while it is looked at, or tick, maybe not at once: again, and longer."""
    for watched in (0.25, 0.5, 1, 2, 4):
        wakes = sleep()["wakes"]
        try:
            with undisturbed(proc, watched):
                return look(proc)
        except AssertionError:
            after = proc.quiescent()
            if after["wakes"] != wakes and not BY_ITSELF.search(after["last_wake"]["trigger"]):
                raise
    raise AssertionError(f"{proc.name} wakes or does something by itself whenever it is looked at")


def total(found: dict[str, Any], where: str) -> int:
    return sum(one[f"{where}_bytes"] for process in found["maps"]["processes"] for one in process["maps"])


def mapped(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What is mapped where. The kernel may cut its own, and private memory, in other places after a wake."""
    maps = ((process["pid"], one) for process in found["maps"]["processes"] for one in process["maps"])
    files = ((pid, one) for pid, one in maps if not one["what"].startswith("["))
    return sorted((pid, *(one[key] for key in ("start", "end", "access", "what", "offset"))) for pid, one in files)


def private(found: dict[str, Any], name: str) -> dict[int, tuple[int, int]]:
    """From where to where each process but pid 1 has such memory; the kernel may cut it in other places."""
    ends: dict[int, list[int]] = {}
    for process in found["maps"]["processes"]:
        for one in process["maps"]:
            if one["what"] == name and process["pid"] != 1:
                ends.setdefault(process["pid"], []).extend(int(one[end], 16) for end in ("start", "end"))
    return {pid: (min(of), max(of)) for pid, of in ends.items()}


def programs(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Without pid 1, which is executed anew by a wake."""
    return [process for process in found["env"]["processes"] if process["pid"] != 1]


def opened(found: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Pipes by their order: those that CRIU makes anew have other numbers."""
    pipes: dict[str, str] = {}
    files = [(one["pid"], dict(file)) for one in found["files"]["processes"] for file in one["files"]]
    for _, file in files:
        if file["kind"] == "pipe":
            file["what"] = pipes.setdefault(file["what"], f"pipe {len(pipes)}")
    return files


def same(hot: dict[str, Any], now: dict[str, Any]) -> None:
    """A sleeper says what was seen hot just before."""
    assert programs(now) == programs(hot)
    for before, after in zip(opened(hot), opened(now), strict=True):
        assert before == after
    assert now["files"]["own"] == hot["files"]["own"]
    told = ("proto", "state", "local", "peer", "unread", "unsent", "open")
    sockets = [[{key: one[key] for key in told} for one in found["sockets"]["sockets"]] for found in (hot, now)]
    assert sockets[0] == sockets[1]
    assert mapped(now) == mapped(hot)
    assert private(now, "[heap]") == private(hot, "[heap]") and private(now, "[stack]") == private(hot, "[stack]")


def proc_says(proc: Proc, found: dict[str, Any]) -> None:
    """What is said of a proc that never slept is what /proc says."""
    hosts = {}
    for pid in proc.inspect()["pids"]:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        hosts[int(status["NSpid"].split()[-1])] = pid
    assert set(hosts) == {process["pid"] for process in found["env"]["processes"]}
    for process in found["env"]["processes"]:
        at = Path(f"/proc/{hosts[process['pid']]}")
        text = lambda name: (at / name).read_bytes().decode(errors="replace").rstrip("\0")  # noqa: B023, E731
        assert process["command"] == text("cmdline").split("\0")
        assert process["env"] == [line for line in text("environ").split("\0") if line]
        assert process["name"] == (at / "comm").read_text().strip() and process["directory"] == os.readlink(at / "cwd")
        assert process["program"] == os.readlink(at / "exe")
    for process in found["files"]["processes"]:
        at = Path(f"/proc/{hosts[process['pid']]}")
        links = {int(link.name): os.readlink(link) for link in (at / "fd").iterdir()}
        assert sorted(links) == [file["fd"] for file in process["files"]]
        for file in process["files"]:
            if links[file["fd"]].startswith("/") and not links[file["fd"]].startswith("/memfd:"):
                assert file["what"] == links[file["fd"]].removesuffix(" (deleted)")
    for process in found["maps"]["processes"]:
        lines = Path(f"/proc/{hosts[process['pid']]}/maps").read_text().splitlines()
        assert [f"{one['start']}-{one['end']} {one['access']}" for one in process["maps"]] == [
            f"{'-'.join(end.lstrip('0') for end in line.split()[0].split('-'))} {line.split()[1]}" for line in lines
        ]


# A look at a sleeper is some twenty commands, which on a busy machine take longer than the 3 s of
# postfix's logger.
SET_UPS = {"redis": servers.redis, "nginx": servers.nginx, "postfix": lambda: servers.postfix(watchdog="1000s"), "node": servers.node}


# promise command-line: `kip inspect --files`, `--env`, `--sockets`, `--maps`: of a running,
#   hibernated, parked and archived proc the same; nothing wakes, runs or changes for it
# held by: this, `tests/test_inspect.py::test_kinds`,
#   `crates/pager/tests/real.rs::an_inspection_fetches_nothing`
@pytest.mark.parametrize("name", rest_in_soak(SET_UPS, ["redis", "postfix"]))
def test_a_sleeper_says_what_it_was_hot(archiving: Kip, tmp_path: Path, name: str) -> None:
    """In all four tiers, with a client connected."""
    server = SET_UPS[name]()
    tar = server.tarball(tmp_path) if server.files else None
    proc = archiving.run(name, server.command, ports=server.published, tar=tar, flags=[*FLAGS, *server.flags], timeout=120)
    with socket.create_connection(("127.0.0.1", proc.port())) as client:
        if name == "postfix":
            assert client.recv(100).startswith(b"220 ")
        # What it does on its first look at the client is done.
        proc.hibernate()
        proc.wake()
        hot = look(proc)
        assert total(hot, "memory") > 0 and total(hot, "store") == 0
        assert any(f"SECRET={SECRET}" in process["env"] for process in hot["env"]["processes"])
        connected = [one for one in hot["sockets"]["sockets"] if one["proto"] == "tcp" and one["peer"]]
        assert connected and all(one["held"] is None for one in hot["sockets"]["sockets"])
        for tier, where in (("hibernated", "out"), ("parked", "snapshot"), ("archived", "store")):
            asleep = look_asleep(proc, {"hibernated": proc.hibernate, "parked": proc.sleep, "archived": proc.archive}[tier])
            same(hot, asleep)
            assert total(asleep, where) > 100_000, {place: total(asleep, place) for place in WHERE}
            if tier != "hibernated":
                assert total(asleep, "memory") == total(asleep, "out") == 0
                inet = [one for one in asleep["sockets"]["sockets"] if one["proto"] in ("tcp", "udp")]
                assert inet and all(one["held"] for one in inet), inet
        wakes = proc.inspect()["wakes"]
        proc.wake()
        assert proc.inspect()["wakes"] == wakes + 1
        if proc.rebuilt():
            same(hot, look(proc))
        else:  # CRIU makes unix sockets anew, those that were accepted without the names that they had from their listeners
            awake = look(proc)
            assert programs(awake) == programs(hot)
            kinds = [[(pid, file["fd"], file["kind"]) for pid, file in opened(found)] for found in (hot, awake)]
            assert kinds[0] == kinds[1]
    if name == "nginx":
        assert http_get(proc.port(), "/page.html") == servers.PAGE


# promise command-line: what they say of a running proc is what the kernel says
# held by: this, `kip_insight::inspect::live::tests::our_own_descriptors_are_understood`,
#   `kip_net::diag::unix::tests::our_own_are_among_them`
def test_hot_is_what_the_kernel_says(kip: Kip, tmp_path: Path) -> None:
    server = servers.nginx()
    proc = kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=FLAGS)
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    found = look(proc)
    proc_says(proc, found)
    titles = {" ".join(process["command"]) for process in found["env"]["processes"]}
    assert any(title.startswith("nginx: master process") for title in titles), titles
    assert "nginx: worker process" in titles
    workers = [process for process in found["env"]["processes"] if process["command"] == ["nginx: worker process"]]
    assert workers and all(process["uid"] == 33 and process["gid"] == 33 for process in workers)


KINDS = """
import os, socket, threading, time
os.makedirs("/srv", exist_ok=True)
gone = open("/srv/gone", "w+"); gone.write("x" * 1234); gone.flush(); os.remove("/srv/gone")
kept = open("/srv/kept", "ab"); kept.write(b"12345"); kept.flush()
memory = os.memfd_create("notes"); os.write(memory, b"abc")
one, other = socket.socketpair(); one.send(b"unread")
path = socket.socket(socket.AF_UNIX); path.bind("/srv/socket"); path.listen()
named = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); named.bind(b"\\0kip-named")
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.bind(("0.0.0.0", 7010))
flow = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); flow.connect(("127.0.0.1", 7011))
os.remove("/usr/bin/yes")
os.chdir("/srv")
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
listener = socket.create_server(("0.0.0.0", 7000))
while True:
    listener.accept()[0].recv(100)
"""


def test_kinds(archiving: Kip) -> None:
    """Python with threads, and one of each kind of file and socket: some only CRIU brings back."""
    proc = archiving.run("kinds", ["/usr/bin/python3", "-c", KINDS], ports=[7000], flags=FLAGS)

    def check(found: dict[str, Any]) -> None:
        [process] = [one for one in found["files"]["processes"] if one["name"] == "python3"]
        files = process["files"]
        [gone] = [file for file in files if file["what"] == "/srv/gone"]
        assert (gone["kind"], gone["access"], gone["offset"], gone["deleted"]) == ("file", "rw", 1234, True)
        [kept] = [file for file in files if file["what"] == "/srv/kept"]
        assert (kept["access"], kept["offset"], kept["deleted"], kept["flags"]) == ("w", 5, False, ["append", "cloexec"])
        [memory] = [file for file in files if file["kind"] == "memory"]
        assert (memory["what"], memory["offset"]) == ("notes", 3)
        assert [file["kind"] for file in files[:3]] == ["device", "pipe", "pipe"], files[:3]
        own = {one["path"]: (one["kind"], one["bytes"]) for one in found["files"]["own"]["entries"]}
        assert own["/srv/kept"] == ("file", 5) and own["/usr/bin/yes"] == ("deleted", 0) and "/srv/gone" not in own
        assert own["/srv/socket"] == ("socket", 0) and found["files"]["own"]["complete"]
        sockets = found["sockets"]["sockets"]
        unix = [one for one in sockets if one["proto"] == "unix"]
        assert sorted((one["local"], one["state"]) for one in unix) == [
            ("", "stream connected"), ("", "stream connected"), ("/srv/socket", "stream listen"), ("@kip-named", "datagram open"),
        ]  # fmt: skip
        one, other = (one for one in unix if one["state"] == "stream connected")
        assert (one["unread"], other["unread"]) == (0, 6), (one, other)
        at = lambda socket: f"pid {socket['open'][0]['pid']} fd {socket['open'][0]['fd']}"  # noqa: E731
        assert (one["peer"], other["peer"]) == (at(other), at(one))
        udp = [(one["local"], one["state"], one["peer"]) for one in sockets if one["proto"] == "udp"]
        assert ("0.0.0.0:7010", "open", None) in udp
        assert [peer for _, state, peer in udp if state == "connected"] == ["127.0.0.1:7011"]
        [listener] = [one for one in sockets if one["proto"] == "tcp"]
        assert (listener["state"], listener["local"], listener["unread"]) == ("listen", "0.0.0.0:7000", 0)
        [process] = [one for one in found["env"]["processes"] if one["name"] == "python3"]
        assert process["directory"] == "/srv" and process["command"] == ["/usr/bin/python3", "-c", KINDS]
        assert process["uid"] == process["gid"] == 0 and process["program"].startswith("/usr/bin/python3")

    hot = look(proc)
    check(hot)
    proc_says(proc, hot)
    for sleep in (proc.hibernate, proc.sleep, proc.archive):
        sleep()
        with undisturbed(proc):
            check(look(proc))
    proc.wake()
    check(look(proc))


def test_memory_that_never_came_from_the_store(archiving: Kip) -> None:
    """A proc that was woken from the store has its environment there still, maybe: running, hibernated and parked it is told."""
    server = servers.redis()
    proc = archiving.run("redis", server.command, ports=server.published, flags=FLAGS)
    client = Redis(proc.port())
    values = {f"key:{i}": os.urandom(3000) for i in range(10_000)}
    client.ask_all([("SET", key, value) for key, value in values.items()])
    # The next wakes know a working set, so that not everything comes behind them.
    proc.hibernate()
    assert client.ask("GET", "key:1") == values["key:1"]
    proc.wait_state("running")
    hot = programs(look(proc, "env"))
    proc.archive()
    assert client.ask("GET", "key:2") == values["key:2"]
    proc.wait_state("running")
    away = total(look(proc, "maps"), "store")
    assert away > 10 << 20, "most of it is in the store still"
    assert programs(look(proc, "env")) == hot
    for sleep in (proc.hibernate, proc.sleep):
        sleep()
        with undisturbed(proc):
            found = look(proc, "env", "maps")
        assert programs(found) == hot and total(found, "store") > 10 << 20
    assert client.ask("GET", "key:9999") == values["key:9999"]


# promise command-line: of an archived proc no more is fetched than is needed, by ranges what lies
#   in packs, and nothing of it is kept
# held by: this, `kip_offload::inspect::tests::pages_are_seen_where_they_lie_and_stay_there`,
#   `tests/test_inspect.py::test_memory_that_never_came_from_the_store`
# promise command-line: a proc that is stopped or elsewhere, a store that is gone, a damaged front:
#   one clear line
# held by: this, `tests/test_inspect.py::test_where_it_was_it_is_not_looked_at`
def test_what_cannot_be_shown_is_one_line(archiving: Kip, store: Path) -> None:
    server = servers.redis()
    proc = archiving.run("redis", server.command, ports=server.published, flags=FLAGS)
    assert "there is no proc" in archiving.refused("inspect", "none", "--files")
    assert archiving.cli("inspect", "redis", "--files", "--env", check=False).returncode == 2
    proc.archive()
    [front] = store.glob("realms/*/procs/*/gen-*")
    store.rename(store.with_name("gone"))
    for detail in DETAILS:
        refused = archiving.refused("inspect", "redis", f"--{detail}")
        assert refused.startswith("kip: redis cannot be inspected: ") and "store" in refused, refused
    store.with_name("gone").rename(store)
    whole = front.read_bytes()
    # Behind the images come pages, which these looks do not need: those may be missing.
    front.write_bytes(whole[:-100])
    with undisturbed(proc):
        look(proc, "files", "sockets", "maps")
    front.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 4]) + whole[len(whole) // 2 + 1 :])
    refused = archiving.refused("inspect", "redis", "--env")
    assert "redis cannot be inspected: " in refused and "is damaged" in refused, refused
    front.write_bytes(b"")
    assert "redis cannot be inspected: " in archiving.refused("inspect", "redis", "--files")
    front.write_bytes(whole)
    with undisturbed(proc):
        look(proc)
    proc.wake()
    proc.stop()
    for detail in DETAILS:
        refused = archiving.refused("inspect", "redis", f"--{detail}")
        assert "redis is stopped and has nothing inside" in refused and "kip start redis" in refused, refused


def test_where_it_was_it_is_not_looked_at(fresh_kip: Callable[..., Kip], archiving: Kip, store: Path) -> None:
    """Taken over by another data directory; there it is seen, asleep too, with the addresses and ids of there."""
    there = fresh_kip("--store", str(store), start=False)
    (there.data / "archive").mkdir(parents=True)
    shutil.copy(archiving.data / "archive" / "default.keys", there.data / "archive" / "default.keys")
    there.up()
    server = servers.redis()
    proc = archiving.run("redis", server.command, ports=server.published, flags=FLAGS)
    env = programs(look(proc, "env"))
    proc.archive()
    there.cli("wake", "redis")
    archiving.refused("wake", "redis")
    refused = archiving.refused("inspect", "redis", "--env")
    assert "redis is not here any more" in refused and "taken over by" in refused, refused
    moved = Proc(there, "redis")
    assert programs(look(moved, "env")) == env
    moved.archive()
    with undisturbed(moved):
        found = look(moved)
    assert programs(found) == env and all(one["held"] for one in found["sockets"]["sockets"] if one["proto"] == "tcp")
