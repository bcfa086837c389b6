"""redis: 100,000 keys stay what they are through every sleep, and a background save works right after a wake."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator

import pytest

from harness import servers
from harness.clients import Redis
from harness.kip import Kip, Proc
from harness.wait import wait_for

KEYS, CYCLES = 100_000, 20


def value(i: int) -> bytes:
    return hashlib.blake2b(b"%d" % i, digest_size=20).digest() * (1 + i % 4)


@pytest.fixture(scope="module")
def redis(module_kip: Kip) -> Iterator[Proc]:
    server = servers.redis()
    proc = module_kip.run("redis", server.command, ports=server.published)
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", value(i)) for i in range(KEYS)])
    client.close()
    yield proc
    proc.remove()


def all_values_sha(client: Redis) -> str:
    sha = hashlib.sha256()
    for answer in client.ask_all([("GET", f"key:{i}") for i in range(KEYS)]):
        sha.update(answer)
    return sha.hexdigest()


def cycles(redis: Proc, count: int) -> None:
    port = redis.port()
    own = hashlib.sha256()
    for i in range(KEYS):
        own.update(value(i))
    steady = Redis(port)
    assert steady.ask("DBSIZE") >= KEYS
    assert all_values_sha(steady) == own.hexdigest()
    steady.ask("DEL", "count")
    pick = random.Random(7)
    digest = steady.ask("DEBUG", "DIGEST")
    for cycle in range(count):
        redis.sleep()
        client = steady if cycle % 2 else Redis(port)
        some = pick.sample(range(KEYS), 50)
        assert client.ask_all([("GET", f"key:{i}") for i in some]) == [value(i) for i in some]
        assert client.ask("INCR", "count") == cycle + 1, "a write was lost or done twice"
        steady.ask("DEL", "count")
        assert steady.ask("DEBUG", "DIGEST") == digest, "the data changed"
        steady.ask("SET", "count", cycle + 1)
        if client is not steady:
            client.close()
    assert all_values_sha(steady) == own.hexdigest()
    steady.ask("DEL", "count")
    steady.close()


# promise servers: redis: 100,000 keys, digests; background save; expiry
# held by: this, `tests/test_redis.py::test_background_save_after_a_wake`,
#   `tests/test_redis.py::test_expiry_goes_on_while_parked`
def test_twenty_cycles(redis: Proc) -> None:
    cycles(redis, CYCLES)
    assert redis.rebuilt()


def test_background_save_after_a_wake(redis: Proc) -> None:
    """BGSAVE forks: the restored memory must be as good as the old for copy-on-write, and the disk must be there."""
    redis.sleep()
    client = Redis(redis.port())
    before = client.ask("LASTSAVE")
    wait_for("the clock of LASTSAVE (seconds) has moved on", lambda: int(client.ask("TIME")[0]) > before, 30)
    client.ask("BGSAVE")
    wait_for("the save is done", lambda: client.ask("LASTSAVE") > before, 30)
    assert b"rdb_last_bgsave_status:ok" in client.ask("INFO", "persistence")
    assert "RDB looks OK" in redis.exec("redis-check-rdb", "/tmp/dump.rdb").stdout
    client.close()
    redis.sleep()  # the child that saved has left nothing that stands in the way
    client = Redis(redis.port())
    assert client.ask("DBSIZE") >= KEYS


@pytest.mark.smoke
def test_blocked_and_subscribed_clients(redis: Proc) -> None:
    """Clients that wait for the server (BLPOP, SUBSCRIBE) wait through the sleep and get what they wait for."""
    port = redis.port()
    popper, subscriber = Redis(port), Redis(port)
    assert subscriber.ask("SUBSCRIBE", "news")[0] == b"subscribe"
    popper.socket.sendall(Redis.pack(("BLPOP", "queue", 0)))
    watcher = Redis(port)
    wait_for("redis blocks the client", lambda: b"blocked_clients:1" in watcher.ask("INFO", "clients"), 30)
    watcher.close()
    redis.sleep()
    client = Redis(port)
    assert client.ask("RPUSH", "queue", "job") == 1
    assert client.ask("PUBLISH", "news", "hello") == 1
    assert popper.answer() == [b"queue", b"job"]
    assert subscriber.answer() == [b"message", b"news", b"hello"]


def test_expiry_goes_on_while_parked(redis: Proc) -> None:
    """A key's time to live is real time, also for a sleeper."""
    client = Redis(redis.port())

    def now_ms() -> float:
        seconds, us = client.ask("TIME")
        return int(seconds) * 1000 + int(us) / 1000

    client.ask("SET", "short", "x", "PX", 700)
    earliest = now_ms()
    client.ask("SET", "long", "x", "PX", 600_000)
    latest = now_ms()
    redis.sleep()
    time.sleep(0.8)  # real time is what is tested
    assert client.ask("GET", "short") is None
    since = now_ms()
    left = client.ask("PTTL", "long")
    until = now_ms()
    # A machine that stalls between two of these makes the bounds wide.
    assert 600_000 - (until - earliest) - 100 < left < 600_000 - (since - latest) + 100, (left, since - latest, until - earliest)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thousand_cycles(redis: Proc) -> None:
    cycles(redis, 1000)
