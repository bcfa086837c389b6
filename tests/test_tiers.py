"""Real servers through all tiers at random, the archive included, over a network that now and then fails: every answer is checked.

`KIP_SEED` and `KIP_ROUNDS` repeat or shorten a run."""

from __future__ import annotations

import hashlib
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import faulty, servers
from harness.clients import DnsTcp, Http, Redis, dns_udp, http_get, send_mail
from harness.faulty import Network, answers, cut, delayed, flipped, lost_answer, lost_request
from harness.kip import Kip, Proc
from test_bind import expected
from test_mariadb import Session
from test_postfix import mailbox, wait_delivered

ROUNDS = int(os.environ.get("KIP_ROUNDS", "1000"))
SEED = int(os.environ.get("KIP_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
# It ends after so long however many rounds there were, within what pytest allows it.
LONGEST_S = 3000.0
# Of all requests to the store.
SHARE = 0.03
FAULTS = [
    answers(500, "InternalError"), answers(503, "SlowDown"), answers(403, "AccessDenied"), lost_request, lost_answer,
    delayed(0.1), cut(1000), flipped(500), flipped(-10),
]  # fmt: skip
# Why something may not sleep this time; anything else is a finding.
MAY_REFUSE = re.compile(r"stays parked: |cannot (hibernate|do that now): it is (parked|archived)")
# A wake from a store that fails at that moment is tried again after 5 s.
PATIENCE_S = 90.0


class Web:
    def __init__(self, proc: Proc):
        self.proc, self.port = proc, proc.port()
        self.steady = Http(self.port, timeout=PATIENCE_S)

    def check(self, dice: random.Random) -> None:
        if dice.random() < 0.5:
            assert self.steady.get("/page.html") == servers.PAGE
        elif dice.random() < 0.7:
            assert http_get(self.port, "/page.html", timeout=PATIENCE_S) == servers.PAGE
        else:
            assert hashlib.sha256(self.steady.get("/big.bin")).hexdigest() == servers.BIG_SHA


class Store:
    def __init__(self, proc: Proc):
        self.proc, self.client = proc, Redis(proc.port(), timeout=PATIENCE_S)
        self.values: dict[str, bytes] = {}
        self.set(random.Random(1), 2000)

    def set(self, dice: random.Random, count: int) -> None:
        new = {f"key:{dice.randrange(4000)}": dice.randbytes(dice.randrange(1, 6000)) for _ in range(count)}
        assert set(self.client.ask_all([("SET", key, value) for key, value in new.items()])) == {"OK"}
        self.values |= new

    def check(self, dice: random.Random) -> None:
        some = dice.sample(sorted(self.values), dice.choice([1, 20, 500]))
        assert self.client.ask_all([("GET", key) for key in some]) == [self.values[key] for key in some]
        if dice.random() < 0.5:
            self.set(dice, dice.choice([1, 50]))


class Names:
    def __init__(self, proc: Proc):
        self.proc, self.udp = proc, proc.port(53, "udp")
        self.steady = DnsTcp(proc.port(53, "tcp"), timeout=PATIENCE_S)

    def check(self, dice: random.Random) -> None:
        name, address = expected(dice.randrange(100))
        by_udp = dice.random() < 0.5
        assert (dns_udp(self.udp, name, timeout=PATIENCE_S) if by_udp else self.steady.ask(name)) == address


class Mail:
    def __init__(self, proc: Proc):
        self.proc, self.port, self.tokens = proc, proc.port(25), []

    def check(self, dice: random.Random) -> None:
        self.tokens.append(f"token-{len(self.tokens)}-{dice.getrandbits(32):x}-end")
        send_mail(self.port, "alice@kip.test", self.tokens[-1], timeout=PATIENCE_S)

    def check_all(self) -> None:
        for token in self.tokens:
            wait_delivered(self.proc, token)
        text = mailbox(self.proc)
        assert [text.count(token) for token in self.tokens] == [1] * len(self.tokens)


class Rows:
    def __init__(self, proc: Proc):
        self.proc, self.session, self.rows = proc, Session(proc.port()), {}
        self.ask("CREATE TABLE test.soak (id INT PRIMARY KEY, body VARCHAR(2000))")

    def ask(self, sql: str) -> list[list[str]]:
        return self.session.ask(sql, timeout=PATIENCE_S)

    def check(self, dice: random.Random) -> None:
        for _ in range(dice.choice([1, 1, 20])):
            id, body = dice.randrange(300), f"{dice.getrandbits(2000):x}"
            self.ask(f"REPLACE INTO test.soak VALUES ({id}, '{body}')")
            self.rows[id] = body
        some = dice.choice(sorted(self.rows))
        assert self.ask(f"SELECT body FROM test.soak WHERE id = {some}") == [[self.rows[some]]]

    def check_all(self) -> None:
        rows = {int(id): body for id, body in self.ask("SELECT id, body FROM test.soak")}
        assert rows == self.rows


KINDS: dict[str, Callable[[Proc], object]] = {
    "lighttpd": Web, "nginx": Web, "redis": Store, "bind": Names, "postfix": Mail, "mariadb": Rows,
}  # fmt: skip


WAYS = [["hibernated"], ["parked"], ["archived"], ["archived"], ["hibernated", "parked"], ["parked", "archived"]]


def put_to_sleep(proc: Proc, tier: str, told: Counter[str]) -> None:
    done = proc.kip.cli("sleep", proc.name, "--to", tier, "--clock", "auto", check=False, timeout=120)
    assert done.returncode == 0 or MAY_REFUSE.search(done.stderr), done
    told[f"to {tier}" if done.returncode == 0 else "refused"] += 1


def assert_nobody_began_anew(kip: Kip) -> None:
    bad = [event for event in kip.events() if event["kind"] in ("cold-start", "exited", "stopped")]
    assert not bad, bad


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with faulty.server(tmp_path / "s3") as network:
        yield network


def some_rounds(kip: Kip, actors: list[Any], dice: random.Random, told: Counter[str]) -> int:
    """Until there were enough of them, or it is time."""
    until = time.monotonic() + LONGEST_S
    for rounds in range(1, ROUNDS + 1):
        actor = dice.choice(actors)
        try:
            for tier in dice.choice(WAYS):
                put_to_sleep(actor.proc, tier, told)
            if dice.random() < 0.2:
                told["woken by name"] += kip.cli("wake", actor.proc.name, check=False).returncode == 0
            if dice.random() < 0.9:
                actor.check(dice)
            if dice.random() < 0.05:
                kip.cli("snapshot", "gc", "--grace", "0s", check=False)
            if rounds % 25 == 0:
                assert_nobody_began_anew(kip)
        except Exception as error:
            raise AssertionError(f"KIP_SEED={SEED}, round {rounds}, {actor.proc.name}: {error!r}; {told}") from error
        if time.monotonic() > until:
            break
    return rounds


# promise archive: real servers through all tiers at random, over a network that now and then fails:
#   no answer is wrong, nothing begins anew
# held by: in the soak: this
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_random_tiers_with_the_archive(network: Network, fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    print(f"KIP_SEED={SEED} KIP_ROUNDS={ROUNDS}")
    dice, told = random.Random(SEED), Counter()
    kip = fresh_kip("--store", network.url)
    # A head that cannot be let go of is still this data directory's, and wakes here.
    kip.expected += [r"WARN.*can be woken by this data directory only"]
    actors = []
    for name, kind in KINDS.items():
        server = getattr(servers, name)()
        tar = server.tarball(tmp_path)
        actors.append(kind(kip.run(name, server.command, ports=server.published, tar=tar, flags=server.flags)))
    network.fail_now_and_then(random.Random(SEED + 1), SHARE, FAULTS)
    try:
        rounds = some_rounds(kip, actors, dice, told)
    finally:
        network.heal()
    for actor in actors:
        actor.check(dice)
        if check_all := getattr(actor, "check_all", None):
            check_all()
    for actor in actors:
        put_to_sleep(actor.proc, "archived", told)
    assert "all as sealed" in kip.cli("snapshot", "verify", "--all").stdout
    for actor in actors:
        actor.check(dice)
    assert_nobody_began_anew(kip)
    print(f"{rounds} rounds, {dict(told)}, {network.met} faults among {len(network.seen)} requests")
    assert rounds >= min(ROUNDS, 300), f"only {rounds} rounds in {LONGEST_S} s"
