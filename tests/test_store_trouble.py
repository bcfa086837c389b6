"""Trouble between a daemon and its object store, by a network that fails on demand before a real S3 server: nothing is lost, one
line says what, where and what to do, and once the trouble is over all goes on, connections included."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import conftest
import pytest

from harness import faulty, servers, logged
from harness.clients import Redis, http_get
from harness.faulty import Fault, Network, answers, cut, delayed, flipped, hung, lost_answer, lost_request
from harness.kip import Kip, Proc, daemon
from harness.rows import one_in
from harness.wait import wait_for
from test_metrics import refusals

# Random, so that it cannot be compressed: more than is fetched behind a wake by itself (`BEHIND` in
# archive/demand.rs).
KEYS, LENGTH = 1600, 8000
# What a client asks for each time, so that it is in the working set, and little else is.
USUAL = 5

# Trouble that stays until the user does something about it, and the words for it.
STAYS: dict[str, tuple[Fault, str]] = {
    "forbidden": (answers(403, "AccessDenied"), r"forbids this with these credentials \(AccessDenied\): allow them"),
    "key": (answers(403, "InvalidAccessKeyId"), r"does not accept the credentials \(InvalidAccessKeyId\): check the key"),
    "secret": (answers(403, "SignatureDoesNotMatch"), r"does not accept the credentials \(SignatureDoesNotMatch\): check"),
    "clock": (answers(403, "RequestTimeTooSkewed"), r"the clock of this machine differs too much from that of http://.*: set it"),
    "bucket": (answers(404, "NoSuchBucket"), r'bucket "bucket" does not exist at http://.*: create it'),
}
# What would pass, but does not in the time of the test.
PERSISTS: dict[str, tuple[Fault, str]] = {
    "error": (answers(500, "InternalError"), r"overloaded or ill: http://.* answered 500 InternalError"),
    "unavailable": (answers(503, ""), r"overloaded or ill: http://.* answered 503"),
    "slow down": (answers(503, "SlowDown"), r"overloaded or ill: http://.* answered 503 SlowDown"),
    "lost": (lost_request, r"the connection to store s3://bucket/kip at http://.* broke in the middle"),
}
ALL = STAYS | PERSISTS


@dataclass
class Stored:
    """A redis with data, a connection to it that is never closed, and the network between its daemon and the store."""

    kip: Kip
    network: Network
    proc: Proc
    client: Redis
    files: Path
    values: dict[str, bytes] = field(default_factory=dict)
    turn: int = 0

    def check(self, count: int = 60) -> None:
        some = [f"key:{USUAL}", *random.Random(self.turn).sample(sorted(self.values), count)]
        assert self.client.ask_all([("GET", key) for key in some]) == [self.values[key] for key in some]

    def usual(self) -> None:
        assert self.client.ask("GET", f"key:{USUAL}") == self.values[f"key:{USUAL}"]

    def change(self) -> None:
        """So that there is something to store."""
        self.turn += 1
        key = f"key:{self.turn % KEYS}"
        self.values[key] = random.Random(f"{key} {self.turn}").randbytes(LENGTH)
        assert self.client.ask("SET", key, self.values[key]) == "OK"

    def park(self) -> None:
        """With new data in its memory, most of which goes into the front, and in a file, which goes into a pack."""
        self.change()
        self.proc.exec("dd", "if=/dev/urandom", "of=/tmp/new", "bs=50k", "count=1", "status=none")
        self.proc.sleep()

    def archive(self) -> None:
        """Parked or not before. Ends with nothing of it on the local disk."""
        self.proc.archive()
        assert not list((self.kip.data / "procs" / self.proc.name).glob("gen-*"))

    def object(self, pattern: str) -> Path:
        return max(self.files.glob(f"realms/default/{pattern}"), key=lambda path: (path.stat().st_mtime_ns, path.name))

    def front(self) -> Path:
        id = (self.kip.data / "procs" / self.proc.name / "archive-id").read_text().strip()
        return self.object(f"procs/{id}/gen-*")

    def refused(self, *words: str) -> str:
        return self.kip.refused(*words)

    def told(self, words: str, since: int) -> list[str]:
        return [e["detail"] for e in self.kip.events()[since:] if re.search(words, e["detail"])]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with faulty.server(tmp_path_factory.mktemp("s3")) as network:
        yield network


@pytest.fixture(scope="module")
def module_kip(network: Network) -> Iterator[Kip]:
    """Instead of the usual one."""
    with daemon("--store", network.url, "--cache", "0") as kip:
        conftest.ALL_KIPS.append(kip)
        yield kip
        network.heal()
        conftest.ALL_KIPS.remove(kip)


@pytest.fixture(scope="module")
def module_stored(module_kip: Kip, network: Network) -> Stored:
    server = servers.redis()
    proc = module_kip.run("redis", server.command, ports=server.published)
    stored = Stored(module_kip, network, proc, Redis(proc.port(), timeout=60), network.directory / "kip")
    stored.values = {f"key:{i}": random.Random(i).randbytes(LENGTH) for i in range(KEYS)}
    stored.client.ask_all([("SET", key, value) for key, value in stored.values.items()])
    for _ in range(2):
        proc.sleep()
        stored.usual()
    return stored


@pytest.fixture
def stored(module_stored: Stored, kip: Kip) -> Iterator[Stored]:
    yield module_stored
    module_stored.network.heal()


def is_cold(stored: Stored) -> bool:
    return any(event["kind"] == "cold-start" for event in stored.kip.events())


EVERY = [("pack", "PUT"), ("front", "PUT"), ("head", "PUT"), ("pack", "GET"), ("front", "GET"), ("head", "GET")]
# Which requests meet it, if not each kind. A change of a head whose outcome is not known is tried
# for ten seconds.
UP = {
    "key": [("pack", "GET")], "secret": [("front", "PUT")], "clock": [("head", "PUT")], "bucket": [("pack", "PUT")],
    "error": [("front", "GET")], "unavailable": [("pack", "PUT")], "slow down": [("head", "PUT")], "lost": [("front", "PUT")],
}  # fmt: skip


# promise archive: every trouble of the network or the store while a proc is archived or woken
#   (errors, refusals, lost requests and answers, cuts, flipped bits, delays, hanging, no answer):
#   parked or archived as it was, one line that says what, where and what to do, its connections are
#   held, and it goes on once the trouble is over
# held by: this, `tests/test_store_trouble.py::test_waking`,
#   `tests/test_store_trouble.py::test_who_connects_meanwhile_waits`,
#   `tests/test_store_trouble.py::test_bits_that_flip_on_the_way_up`,
#   `tests/test_store_trouble.py::test_bits_that_flip_on_the_way_back`,
#   `tests/test_store_trouble.py::test_another_web_server_beside_it`
@pytest.mark.parametrize("trouble", one_in(2, ALL))
def test_archiving(stored: Stored, trouble: str) -> None:
    """Whatever request meets it, of those that write or of those that read back: it stays parked and says why, wakes from the local
    disk for the connected client, and is archived once the trouble is over."""
    fault, words = ALL[trouble]
    for kind, method in UP.get(trouble, EVERY):
        stored.park()
        met, refused = stored.network.met, refusals(stored.kip, "archived", "store")
        stored.network.fail(fault, kind, method=method)
        line = stored.refused("sleep", "redis", "--to", "archived")
        assert refusals(stored.kip, "archived", "store") == refused + 1
        assert line.startswith("kip: redis stays parked: ") or "redis stays parked: " in line, (kind, line)
        assert re.search(words, line), (kind, line)
        assert stored.network.met > met and stored.proc.state == "parked"
        stored.usual()
        stored.network.heal()
        stored.archive()
        stored.check()
    assert not is_cold(stored)


@pytest.mark.parametrize("trouble", one_in(2, [trouble for trouble in ALL if trouble != "unavailable"]))
def test_waking(stored: Stored, trouble: str) -> None:
    """The front does not come, or the head cannot be had: it stays archived and says why, and wakes once the trouble is over."""
    fault, words = ALL[trouble]
    stored.archive()
    kind, method = ("head", "PUT") if trouble in ("key", "clock", "slow down") else ("front", "GET")
    stored.network.fail(fault, kind, method=method)
    line = stored.refused("wake", "redis")
    assert re.search(rf"redis cannot be woken: .*{words}.*; it stays archived", line), line
    view = stored.proc.inspect()
    assert view["state"] == "archived" and view["pids"] == []
    assert not list((stored.kip.data / "procs" / "redis").glob("gen-*")), "what came of it is gone"
    stored.network.heal()
    stored.kip.cli("wake", "redis")
    stored.check()
    assert not is_cold(stored)


def test_who_connects_meanwhile_waits(stored: Stored) -> None:
    """Held connections wake it by themselves once the trouble is over; it is told once for each try, not without pause."""
    stored.archive()
    since = len(stored.kip.events())
    with ThreadPoolExecutor(1) as pool:
        stored.network.refuse()
        try:
            waiting = pool.submit(stored.check)
            line = r"cannot be reached at http://.*: is the endpoint right, is it up, does the network lead there\?.*stays archived"
            wait_for("it is told", lambda: stored.told(line, since), 30)
            assert stored.proc.state == "archived" and not waiting.done()
        finally:
            stored.network.listen()
        waiting.result(60)
    assert len(stored.told("stays archived", since)) <= 2


PASSES = {
    "errors": answers(500, "InternalError"),
    "slow down": answers(503, "SlowDown"),
    "lost requests": lost_request,
    "lost answers": lost_answer,
    "late first bytes": delayed(0.4),
    "cut": cut(700),
}


# promise archive: what passes is not noticed, nor are reads that hang
# held by: this, `tests/test_store_trouble.py::test_reads_that_hang`; writes that hang, in the soak:
#   `tests/test_store_trouble.py::test_writes_that_hang`
@pytest.mark.parametrize("trouble", one_in(2, PASSES))
def test_what_passes_is_not_noticed(stored: Stored, trouble: str) -> None:
    """Two of each kind of request meet it, on the way down and on the way up: both are done, and nothing is said."""
    stored.park()
    since, met = len(stored.kip.events()), stored.network.met
    for kind in ("pack", "front", "head", "list", "collection"):
        stored.network.fail(PASSES[trouble], kind, times=2)
    stored.archive()
    stored.network.heal()
    for kind in ("pack", "front", "head"):
        stored.network.fail(PASSES[trouble], kind, times=2)
    stored.check()
    assert stored.network.met >= met + 8, "hardly anything met it"
    assert not stored.told("redis (stays|cannot)", since) and not is_cold(stored)


def test_reads_that_hang(stored: Stored) -> None:
    """They are asked again long before they are given up."""
    stored.archive()
    stored.network.fail(hung, "front", method="GET", times=1)
    stored.network.fail(hung, "pack", method="GET", times=1)
    since = time.monotonic()
    asks_for_all(stored)
    assert stored.network.met >= 2 and time.monotonic() - since < 20


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["pack", "front", "head"])
def test_writes_that_hang(stored: Stored, kind: str) -> None:
    """They are sent again once nothing has moved for 15 s."""
    stored.park()
    stored.network.fail(hung, kind, method="PUT", times=1)
    stored.archive()
    stored.check()


@pytest.mark.parametrize("kind", ["pack", "front", "head"])
def test_bits_that_flip_on_the_way_up(stored: Stored, kind: str) -> None:
    """The store finds that it is not what was signed, or the reading back does; it is parked as long as that goes on."""
    stored.park()
    stored.network.fail(flipped(-20), kind, method="PUT")
    line = stored.refused("sleep", "redis", "--to", "archived")
    assert re.search(r"redis stays parked: .*(damaged on the way|XAmzContentSHA256Mismatch|BadDigest)", line), line
    assert stored.proc.state == "parked"
    stored.network.heal()
    stored.archive()
    stored.check()


@pytest.mark.parametrize("kind", ["pack", "front", "head"])
def test_bits_that_flip_on_the_way_back(stored: Stored, kind: str) -> None:
    """What is read back is not what was stored: parked. What is fetched is not what was sealed: archived. Both say which object."""
    stored.park()
    stored.network.fail(flipped(-20), kind, method="GET")
    line = stored.refused("sleep", "redis", "--to", "archived")
    assert "redis stays parked: " in line and re.search("damaged|is not what is there", line), line
    stored.network.heal()
    stored.archive()
    if kind == "front":
        # In what a wake cannot begin without.
        stored.network.fail(flipped(1000), kind, method="GET")
        line = stored.refused("wake", "redis")
        assert re.search(r"redis cannot be woken: the archived .* cannot be opened: .*damaged.*; it stays archived", line), line
        assert stored.proc.state == "archived"
        stored.network.heal()
    # What follows beside the wake is asked for again, once.
    stored.network.fail(flipped(-20), "front", method="GET", times=1)
    stored.network.fail(flipped(1000), "pack", method="GET", times=1)
    stored.kip.cli("wake", "redis")
    asks_for_all(stored)
    assert not is_cold(stored)


def asks_for_all(stored: Stored) -> None:
    keys = sorted(stored.values)
    assert stored.client.ask_all([("GET", key) for key in keys]) == [stored.values[key] for key in keys]


# promise archive: memory that a program, or CRIU before it, needs and the store does not give is
#   waited for: no cold start for trouble of the store
# held by: this, `tests/test_store_trouble.py::test_all_of_it_is_needed_and_does_not_come`
@pytest.mark.parametrize("trouble", ["slow down", "refused", "cut"])
def test_memory_that_does_not_come(stored: Stored, trouble: str) -> None:
    """A running program touches memory that is still in the store: it waits, that is told, and it gets what it had."""
    stored.archive()
    # From before the wake: it may be known by now that all of it will be needed, which then comes
    # beside the wake.
    if trouble == "refused":
        fault, words = PERSISTS["slow down"][0], "cannot be reached at"
    else:
        # A body that is cut each time is gained byte by byte: the user need not be told.
        fault, words = ALL.get(trouble, (cut(3000), ""))
    stored.network.fail(fault, "pack", method="GET")
    since = len(stored.kip.events())
    stored.kip.cli("wake", "redis")
    with ThreadPoolExecutor(1) as pool:
        if trouble == "refused":
            stored.network.refuse()
            stored.network.heal()
        try:
            waiting = pool.submit(asks_for_all, stored)
            if words:
                wait_for("it is told", lambda: stored.told(f"it waits for memory that is in the store: .*{words}", since), 60)
                assert not waiting.done() and stored.proc.state == "running"
            else:
                wait_for("it meets it", lambda: stored.network.met > 3, 30)
        finally:
            stored.network.listen() if trouble == "refused" else stored.network.heal()
        waiting.result(60)
    assert not is_cold(stored)


def test_all_of_it_is_needed_and_does_not_come(stored: Stored) -> None:
    """A wake by CRIU needs all memory, and the packs are not to be had: the proc sleeps on, whatever would wake it, never starts
    cold, and wakes for the client that waited."""
    stored.archive()
    stored.kip.expected += [*logged.KEEPER_GONE, *logged.DAEMON_KILLED]
    # A client that went with the reboot may wake it at once.
    stored.network.fail(answers(503, "SlowDown"), "pack", method="GET")
    stored.kip.reboot()
    since = len(stored.kip.events())
    stored.client = Redis(stored.proc.port(), timeout=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stored.usual)
        words = "some of its memory is in the store and does not come: .*SlowDown.*stays parked"
        wait_for("it is told", lambda: stored.told(words, since), 30)
        line = stored.refused("wake", "redis")
        assert re.search(f"redis cannot be woken: {words}", line), line
        assert stored.proc.state == "parked" and not waiting.done()
        stored.network.heal()
        waiting.result(60)
    asks_for_all(stored)
    assert not is_cold(stored)


def verified(stored: Stored) -> str:
    done = stored.kip.cli("snapshot", "verify", "--all", check=False)
    return "sound" if done.returncode == 0 else done.stdout + done.stderr


# promise snapshots: trouble of the store is not called damage; a collection that meets it says so
#   and takes nothing that is used
# held by: this, `tests/test_store_trouble.py::test_verifying_what_flips`,
#   `tests/test_store_trouble.py::test_collecting`
@pytest.mark.parametrize(("trouble", "kind"), [("clock", "front"), ("slow down", "pack"), ("bucket", "list")])
def test_verifying(stored: Stored, trouble: str, kind: str) -> None:
    """Trouble of the store is no damage of what it holds."""
    fault, words = ALL[trouble]
    stored.archive()
    stored.network.fail(fault, kind)
    done = stored.kip.cli("snapshot", "verify", "--all", check=False)
    line = done.stderr.strip()
    assert done.returncode == 1 and re.search(words, line) and "\n" not in line, done
    assert "damaged" not in done.stdout + line, done
    stored.network.heal()
    assert verified(stored) == "sound"


def test_verifying_what_flips(stored: Stored) -> None:
    stored.archive()
    stored.network.fail(flipped(2000), "pack", method="GET", times=1)
    assert "damaged" in verified(stored)
    assert verified(stored) == "sound"


COLLECTING = [("secret", "list", ""), ("unavailable", "collection", "PUT"), ("lost", "head", ""), ("forbidden", "", "DELETE")]


@pytest.mark.parametrize(("trouble", "kind", "method"), COLLECTING)
def test_collecting(stored: Stored, trouble: str, kind: str, method: str) -> None:
    """A collection that meets it says so and takes nothing that is used; the next one takes the rest."""
    fault, words = ALL[trouble]
    stored.park()
    stored.archive()
    stored.kip.json("snapshot", "gc", "--grace", "0s")
    stored.network.fail(fault, *filter(None, [kind]), method=method)
    line = stored.refused("snapshot", "gc", "--grace", "0s")
    assert re.search(words, line), line
    stored.network.heal()
    stored.kip.json("snapshot", "gc", "--grace", "0s")
    assert verified(stored) == "sound"
    stored.check()


# Bad input: what the user has to put right.


@contextmanager
def again_with(stored: Stored, **environment: str) -> Iterator[None]:
    """The daemon is started with other credentials, and after it as before."""
    before = {name: os.environ[name] for name in environment}
    for values in (environment, before):
        stored.kip.kill()
        os.environ.update(values)
        stored.kip.up()
        if values is environment:
            yield


# promise archive: wrong credentials, a missing bucket, a missing front, pack or head, what a newer
#   Kip wrote in the store or on the local disk: one line, nothing is touched, it wakes once that is
#   put right
# held by: this, `tests/test_store_trouble.py::test_a_bucket_that_is_missing`,
#   `tests/test_store_trouble.py::test_an_object_that_is_missing`,
#   `tests/test_store_trouble.py::test_what_a_newer_kip_wrote`; other keys:
#   `tests/test_adopt.py::test_without_its_keys_nothing_is_taken`
@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials(stored: Stored, name: str) -> None:
    """The server's own word for it."""
    stored.archive()
    with again_with(stored, **{name: "wrong"}):
        line = stored.refused("wake", "redis")
        words = r"store s3://bucket/kip does not accept the credentials \(.*\): check the key, its secret and whether it has ended"
        assert re.search(rf"redis cannot be woken: {words}; it stays archived", line), line
        assert re.search(words, stored.refused("snapshot", "ls"))
    stored.check()


def test_a_bucket_that_is_missing(stored: Stored) -> None:
    stored.archive()
    bucket = stored.network.directory
    bucket.rename(bucket.with_name("gone"))
    try:
        line = stored.refused("wake", "redis")
    finally:
        bucket.with_name("gone").rename(bucket)
    assert re.search(r'redis cannot be woken: bucket "bucket" does not exist at .*: create it, .*; it stays archived', line), line
    stored.kip.cli("wake", "redis")
    stored.check()


@pytest.mark.parametrize("kind", ["front", "pack", "head"])
def test_an_object_that_is_missing(stored: Stored, kind: str) -> None:
    """The refusal names it. Only a program that touches a pack misses it, and waits for it."""
    stored.archive()
    front = stored.front()
    path = {"front": front, "head": front.parent / "head", "pack": front.parents[2] / "packs"}[kind]
    if kind == "pack":
        stored.usual()
    away = path.with_name("away")
    since = len(stored.kip.events())
    path.rename(away)
    try:
        if kind == "pack":
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(asks_for_all, stored)
                wait_for("it is told", lambda: stored.told("it waits for memory .* has no object realms/default/packs/", since), 30)
                away.rename(path)
                waiting.result(60)
        elif kind == "front":
            line = stored.refused("wake", "redis")
            assert re.search(rf"redis cannot be woken: store s3://bucket/kip has no object .*/{path.name}; it stays archived", line)
        else:
            # What it was when it was let go is remembered: it is missed after a start of the
            # daemon.
            stored.kip.kill()
            stored.kip.up()
            line = stored.refused("wake", "redis")
            assert re.search(r"redis cannot be woken: proc [0-9a-f]+ is not in the store; it stays archived", line), line
    finally:
        if away.exists():
            away.rename(path)
    stored.kip.cli("wake", "redis")
    stored.check()
    assert not is_cold(stored)


def test_what_a_newer_kip_wrote(stored: Stored) -> None:
    """Of an object, and of a generation on the local disk: neither is touched."""
    stored.archive()
    front = stored.front()
    whole = front.read_bytes()
    front.write_bytes(whole[:8] + (99).to_bytes(2, "little") + whole[10:])
    line = stored.refused("wake", "redis")
    front.write_bytes(whole)
    assert re.search(r"redis cannot be woken: .*format 99, this Kip reads up to 2: upgrade Kip; it stays archived", line), line
    stored.kip.cli("wake", "redis")
    stored.check()
    stored.park()
    manifest = next((stored.kip.data / "procs" / "redis").glob("gen-*/manifest.json"))
    text = manifest.read_text()
    manifest.write_text(re.sub(r'"format":\d+', '"format":99', text, count=1))
    line = stored.refused("wake", "redis")
    manifest.write_text(text)
    assert re.search(r"redis cannot be woken: snapshot .* has format 99, this Kip reads up to \d+: upgrade Kip", line), line
    stored.check()  # no command has to say that it is put right


def test_another_web_server_beside_it(stored: Stored, tmp_path: Path) -> None:
    """One that wakes by what came with its front needs the store for nothing more: it serves while the store is gone."""
    server = servers.lighttpd()
    proc = stored.kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    proc.archive()
    port = proc.port()
    for fault in (lost_request, answers(503, "SlowDown"), flipped(300)):
        stored.network.fail(fault, "front", method="GET")
        stored.refused("wake", "web")
        stored.network.heal()
        stored.kip.cli("wake", "web")
        stored.network.fail(answers(403, "AccessDenied"))
        assert http_get(port, "/page.html") == servers.PAGE
        stored.network.heal()
        proc.archive()
    proc.remove()
