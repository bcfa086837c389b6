"""BIND: the query that wakes it is answered, by UDP (one datagram, sent once) and by TCP."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import servers
from harness.clients import TXT, DnsTcp, dns_answers, dns_packet, dns_udp
from harness.kip import Kip, Proc

CYCLES = 20


@pytest.fixture(scope="module")
def bind(module_kip: Kip, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proc]:
    server = servers.bind()
    tar = server.tarball(tmp_path_factory.mktemp("tar"))
    proc = module_kip.run("bind", server.command, ports=server.published, tar=tar)
    yield proc
    proc.remove()


def expected(i: int) -> tuple[str, list[bytes]]:
    name = f"host{i % 100 + 1}.kip.test"
    return name, [socket.inet_aton(servers.ZONE_NAMES[name])]


def cycles(bind: Proc, count: int, sleep: Callable[[Proc], object] = Proc.sleep) -> None:
    udp, tcp = bind.port(53, "udp"), bind.port(53, "tcp")
    steady = DnsTcp(tcp)
    for cycle in range(count):
        name, address = expected(cycle)
        sleep(bind)
        if cycle % 3 == 0:
            assert dns_udp(udp, name) == address
            # One that ticks in place answers from its ticks' pages, and sleeps on, if it needs no
            # other.
            if sleep is Proc.sleep:
                assert bind.wait_state("running")["last_wake"]["trigger"].startswith("udp")
        elif cycle % 3 == 1:
            assert DnsTcp(tcp).ask(name) == address
        else:
            assert steady.ask(name) == address
        assert steady.ask(name) == address
        assert dns_udp(udp, name) == address


# promise servers: BIND: answers by UDP and TCP; a zone that is only in memory
# held by: this, `tests/test_bind.py::test_long_answer_by_tcp`,
#   `tests/test_bind.py::test_zone_survives_in_memory_only`
def test_twenty_cycles(bind: Proc) -> None:
    cycles(bind, CYCLES)
    assert bind.rebuilt()


# promise hibernation: BIND, postfix and mariadb hibernate as the others do
# held by: this, `tests/test_postfix.py::test_hibernated`, `tests/test_mariadb.py::test_hibernated`
@pytest.mark.parametrize("way", ["blocked", "held"])
def test_hibernated(kip: Kip, tmp_path: Path, way: str) -> None:
    """In place, its memory out; and parked from there."""
    server = servers.bind()
    tar, flags = server.tarball(tmp_path), ["--hibernate", way]
    bind = kip.run(f"bind-{way}", server.command, ports=server.published, tar=tar, flags=flags)
    full = bind.inspect()["memory"]["pss_bytes"]
    cycles(bind, CYCLES // 2, Proc.hibernate)
    view = bind.hold() if way == "held" else bind.hibernate()
    assert view["last_sleep"]["held"] == (way == "held")
    assert view["memory"]["pss_bytes"] < full / 4, (full, view)
    bind.sleep()
    bind.wake()
    cycles(bind, 3, Proc.hibernate)


def test_ipv6(bind: Proc) -> None:
    bind.sleep()
    name, address = expected(3)
    assert dns_udp(bind.port(53, "udp"), name, host="::1") == address
    bind.sleep()
    connection = DnsTcp(bind.port(53, "tcp"), host="::1")
    assert connection.ask(name) == address


# promise P6: the same: datagrams
def test_many_datagrams_at_once(bind: Proc) -> None:
    """Datagrams that come to a sleeper queue up: none of 200 is lost."""
    port = bind.port(53, "udp")
    bind.sleep()
    clients = []
    for i in range(200):
        name, address = expected(i)
        ident, query = dns_packet(name)
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.settimeout(20)
        s.connect(("127.0.0.1", port))
        s.send(query)
        clients.append((s, ident, address))
    for s, ident, address in clients:
        assert dns_answers(ident, s.recv(65535)) == address
        s.close()


def test_long_answer_by_tcp(bind: Proc) -> None:
    bind.sleep()
    answer = DnsTcp(bind.port(53, "tcp")).ask("long.kip.test", TXT)
    assert answer[0] == b"".join(bytes([200]) + c.encode() * 200 for c in "abcdefghij")


def test_zone_survives_in_memory_only(bind: Proc) -> None:
    """What it answers from is its memory: the zone file is gone when it wakes."""
    bind.exec("rm", "/etc/bind/db.kip.test")
    bind.sleep()
    name, address = expected(42)
    assert dns_udp(bind.port(53, "udp"), name) == address


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thousand_cycles(bind: Proc) -> None:
    cycles(bind, 1000)
