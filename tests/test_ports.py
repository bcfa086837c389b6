"""Published ports: every way to reach them, awake and parked, and the ways that must not exist."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import servers
from harness.clients import http_get
from harness.kip import Kip, Proc
from harness.outside import Outside
from harness.outside import outside as outside_machine
from harness.wait import wait_for

PING = """
import socket, sys
kind, host, port, text = sys.argv[1:]
family = socket.AF_INET6 if ":" in host else socket.AF_INET
s = socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
s.settimeout(20)
s.connect((host, int(port)))
s.sendall(text.encode())
print(s.recv(1000).decode().strip())
"""


def ping(kind: str, host: str, port: int, text: str = "hello", inside: list[str] | None = None) -> str:
    """Sends and gives the answer, from here or by a command that runs elsewhere."""
    words = [*(inside or []), "/usr/bin/python3", "-c", PING, kind, host, str(port), text]
    done = subprocess.run(words, capture_output=True, text=True, timeout=40)
    assert done.returncode == 0, f"{kind} to {host} port {port}: {done.stderr.strip().splitlines()[-1:]}"
    return done.stdout.strip()


def host_addresses() -> list[str]:
    """All of this machine's, but link-local ones."""
    links = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True, timeout=10).stdout)
    found = [a["local"] for link in links for a in link["addr_info"] if a.get("scope") == "global"]
    # Those of Kip's own links lead to procs, not to the host.
    return ["127.0.0.1", "::1", *(a for a in found if not a.startswith(("10.213.", "fd6b:6970:")))]


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    with outside_machine() as machine:
        yield machine


@pytest.fixture(scope="module")
def echo(module_kip: Kip, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proc]:
    server = servers.echo(9000, 9001)
    tar = server.tarball(tmp_path_factory.mktemp("tar"))
    proc = module_kip.run("echo", server.command, ports=server.published, tar=tar, flags=["--network", "street"])
    yield proc
    proc.remove()


@pytest.fixture(scope="module")
def neighbour(module_kip: Kip, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proc]:
    """Another proc of the network."""
    server = servers.echo(9000)
    tar = server.tarball(tmp_path_factory.mktemp("tar"))
    proc = module_kip.run("neighbour", server.command, ports=server.published, tar=tar, flags=["--network", "street"])
    yield proc
    proc.remove()


# promise P2: several ports, TCP and UDP
# promise sandbox: from the host by all its addresses, 127.0.0.1 and ::1
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "parked"])
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_from_every_address_of_the_host(echo: Proc, kind: str, asleep: bool) -> None:
    port = echo.port(9001, kind)
    for address in host_addresses():
        if asleep:
            echo.sleep()
        assert ping(kind, address, port, f"by {address}") == f"by {address}"


# promise sandbox: ports, TCP and UDP, IPv4 and IPv6, awake and parked: from outside
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "parked"])
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_from_outside(outside: Outside, echo: Proc, kind: str, asleep: bool) -> None:
    """Another machine reaches it, and the program sees that machine's address."""
    inside, port = outside.inside, echo.port(9000, kind)
    for address, peer in ((outside.here4, outside.there4), (outside.here6, outside.there6)):
        if asleep:
            echo.sleep()
        assert ping(kind, address, port, "from outside", inside) == "from outside"
        assert ping(kind, address, port, "who", inside).removeprefix("::ffff:") == peer


# promise sandbox: from other procs and from itself
# held by: this, `tests/test_ports.py::test_to_itself`
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "parked"])
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_from_another_proc(echo: Proc, neighbour: Proc, kind: str, asleep: bool) -> None:
    """By its own address and port, and by the host's address and the published port."""
    ways = [(echo.address(9000, kind), 9000)]
    ways += [(a, echo.port(9000, kind)) for a in host_addresses() if a not in ("127.0.0.1", "::1")]
    for address, port in ways:
        if asleep:
            echo.sleep()
        words = ["/usr/bin/python3", "-c", PING, kind, address, str(port), "hi"]
        assert neighbour.exec(*words).stdout.strip() == "hi", (address, port)


def test_to_itself(echo: Proc) -> None:
    """By 127.0.0.1 inside, and by the host's address and its published port (hairpin)."""
    words = ["/usr/bin/python3", "-c", PING, "tcp"]
    assert echo.exec(*words, "127.0.0.1", "9000", "own loopback").stdout.strip() == "own loopback"
    public = [a for a in host_addresses() if a not in ("127.0.0.1", "::1")]
    for address in public:
        assert echo.exec(*words, address, str(echo.port(9000)), "hairpin").stdout.strip() == "hairpin", address


def test_program_reaches_the_outside(outside: Outside, neighbour: Proc) -> None:
    """A proc may call out; a server in the other namespace sees the host's address, for procs are behind NAT."""
    script = (
        f"import socket\ns=socket.create_server(('{outside.there4}', 8123))\nprint('ready', flush=True)\n"
        "c,peer=s.accept()\nc.sendall(peer[0].encode())\nc.close()"
    )
    server = subprocess.Popen([*outside.inside, "/usr/bin/python3", "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout and server.stdout.readline() == "ready\n"
        words = ["/usr/bin/python3", "-c", PING, "tcp", outside.there4, "8123", "x"]
        assert neighbour.exec(*words).stdout.strip() == outside.here4
    finally:
        server.kill()
        server.wait()


# promise sandbox: an unspecified host port is chosen, reported, reserved, also while parked
# held by: this, `tests/test_ports.py::test_reservation_lives_through_sleep`
def test_chosen_port_is_reported_and_reserved(echo: Proc) -> None:
    """No HOST: part: a port is chosen, inspect says which, and no service of the host can take it unnoticed."""
    view = echo.inspect()
    assert {(p["proto"], p["port"]) for p in view["ports"]} == {(k, p) for k in ("tcp", "udp") for p in (9000, 9001)}
    for p in view["ports"]:
        assert 1024 <= p["host_port"] < 65536 and p["host_addr"] in ("0.0.0.0", "::")
        kind = socket.SOCK_STREAM if p["proto"] == "tcp" else socket.SOCK_DGRAM
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")):
            with socket.socket(family, kind) as s, pytest.raises(OSError, match="in use"):
                s.bind((address, p["host_port"]))


def test_reservation_lives_through_sleep(echo: Proc) -> None:
    echo.sleep()
    test_chosen_port_is_reported_and_reserved(echo)


def answers(kind: str, host: str, port: int, inside: list[str] | None = None) -> bool:
    """Whether the port answers: that it does not shows at once on this machine, and from outside within a second."""
    words = [*(inside or []), "/usr/bin/python3", "-c", PING.replace("settimeout(20)", "settimeout(1)"), kind, host, str(port), "x"]
    return subprocess.run(words, capture_output=True, timeout=40).returncode == 0


# promise sandbox: published at one address it is reached by that one, asleep too, and at 127.0.0.1
#   not by packets forged from outside; two procs share a port by two addresses, and who starts at
#   one does not disturb flows to the other; an address that the machine lacks is refused
# held by: this, `tests/test_ports.py::test_a_flow_to_one_address_outlives_who_starts_at_another`,
#   `kip_net::reserve::tests::one_address_is_reserved_and_the_others_are_not`,
#   `kip_types::spec::tests::reads_ports`
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_at_one_address(kip: Kip, outside: Outside, tmp_path: Path, kind: str) -> None:
    """Published at 127.0.0.1 a port is the host's own, also against packets forged from outside; two procs share a port by their
    addresses."""
    server = servers.echo(9000)
    tar = server.tarball(tmp_path)
    suffix = "/udp" if kind == "udp" else ""
    inner = kip.run("inner", server.command, ports=[f"127.0.0.1::9000{suffix}"], tar=tar, flags=["--network", "street"])
    port = inner.port(9000, kind)
    outer = kip.run("outer", server.command, ports=[f"{outside.here4}:{port}:9000{suffix}"], tar=tar)
    for proc, address in ((inner, "127.0.0.1"), (outer, outside.here4)):
        shown = [(p["host_addr"], p["host_port"]) for p in proc.inspect()["ports"]]
        assert shown == [(address, port)]
        assert f"{address}:{port}->9000/{kind}" in kip.cli("ps").stdout
    inside = outside.inside
    assert ping(kind, outside.here4, port, "from outside", inside) == "from outside"
    for asleep in (False, True):
        if asleep:
            inner.sleep()
            outer.sleep()
        for address in ("127.0.0.1", outside.here4):
            assert ping(kind, address, port, f"by {address}") == f"by {address}"
    taken = kip.refused("run", "--name", "all", "--port", f"{port}:80{suffix}", "--", "sleep", "100")
    assert str(port) in taken and ("inner" in taken or "outer" in taken), taken
    outer.remove()
    # A neighbour of the machine may send it anything: also packets to its loopback, and to the
    # proc's own address.
    subprocess.run([*inside, "ip", "route", "replace", "127.0.0.1", "via", outside.here4], check=True, timeout=10)
    subprocess.run([*inside, "sysctl", "-qw", "net.ipv4.conf.eth0.route_localnet=1"], check=True, timeout=10)
    ways = [(outside.here4, port), (outside.here6, port), ("127.0.0.1", port), (inner.address(9000, kind), 9000)]
    assert [way for way in ways if answers(kind, *way, inside=inside)] == []
    assert not answers(kind, outside.here4, port) and not answers(kind, "::1", port)
    assert ping(kind, "127.0.0.1", port) == "hello"
    # Another proc of the network dials it by its own address; one of another network, or of none,
    # does not.
    words = ["/usr/bin/python3", "-c", PING, kind, inner.address(9000, kind), "9000", "hi"]
    mate = kip.run("mate", ["sleep", "1000"], flags=["--network", "street"])
    assert mate.exec(*words).stdout.strip() == "hi"
    for name, flags in (("far", ["--network", "elsewhere"]), ("other", [])):
        stranger = kip.run(name, ["sleep", "1000"], flags=flags)
        assert "No route to host" in stranger.exec(*words, check=False).stderr
        stranger.remove()
    shared = ipaddress.ip_interface(f"{outside.here4}/29").network.broadcast_address
    for address, why in ((shared, f"{shared} is the broadcast address"), ("203.0.113.255", "this machine has no address 203.0.113.255")):
        assert why in kip.refused("run", "--name", "far", "--port", f"{address}:8080:80{suffix}", "--", "sleep", "100")


# Says "kept" to a client that sends "keep", and "here" to that client again when another one sends
# anything else.
ANSWERS_LATER = """
import socket
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
s.bind(("::", 9000))
kept = None
while True:
    data, who = s.recvfrom(100)
    if data == b"keep":
        kept = who
        s.sendto(b"kept", who)
    else:
        s.sendto(b"here", kept)
"""


def test_a_flow_to_one_address_outlives_who_starts_at_another(kip: Kip) -> None:
    """What the proc says to a client after another one got the port at another address still comes from where the client sent to."""
    first = kip.run("first", ["/usr/bin/python3", "-c", ANSWERS_LATER], ports=["127.0.0.1::9000/udp"])
    port = first.port(9000, "udp")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        client.connect(("127.0.0.1", port))
        client.settimeout(10)

        def keeps() -> bool:
            client.send(b"keep")
            try:
                return client.recv(100) == b"kept"
            except ConnectionRefusedError:
                return False

        wait_for("the program answers", keeps)
        kip.run("second", ["sleep", "1000"], ports=[f"127.0.0.2:{port}:9000/udp"], wait_ready=False)
        other.sendto(b"say it", ("127.0.0.1", port))
        assert client.recv(100) == b"here"


# promise trouble: host port in use by a proc: the line names it
def test_asked_port(kip: Kip, tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("", 0))
        free = s.getsockname()[1]
    server = servers.echo(9000)
    proc = kip.run("asked", server.command, ports=[f"{free}:9000"], tar=server.tarball(tmp_path))
    assert proc.port() == free
    assert ping("tcp", "127.0.0.1", free) == "hello"
    taken = kip.refused("run", "--name", "second", "--port", f"{free}:80", "--", "sleep", "100")
    assert "asked" in taken and str(free) in taken, "the line names the port and the proc that has it"
    assert "second" not in kip.names(), "nothing is left of what was refused"
    proc.remove()
    again = kip.run("again", server.command, ports=[f"{free}:9000"], tar=server.tarball(tmp_path))
    assert ping("tcp", "127.0.0.1", free) == "hello", "a removed proc's port is free at once"
    again.remove()
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("", free))


# promise trouble: host port in use by a service of the host: program and pid
@pytest.mark.parametrize("kind", ["tcp", "udp"])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_port_taken_by_a_service_of_the_host(kip: Kip, kind: str, address: str) -> None:
    """The refusal names the program that has the port, and its pid."""
    type_name = "SOCK_STREAM" if kind == "tcp" else "SOCK_DGRAM"
    script = f"""
import socket, time
s = socket.socket(socket.{"AF_INET6" if ":" in address else "AF_INET"}, socket.{type_name})
s.bind(({address!r}, 0))
{"s.listen()" if kind == "tcp" else ""}
print(s.getsockname()[1], flush=True)
time.sleep(60)
"""
    service = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout
        port = int(service.stdout.readline())
        suffix = "/udp" if kind == "udp" else ""
        line = kip.refused("run", "--name", "loser", "--port", f"{port}:80{suffix}", "--", "sleep", "100")
        assert str(port) in line and re.search(rf"python.*\b{service.pid}\b", line), line
        assert "loser" not in kip.names()
    finally:
        service.kill()
        service.wait()


# promise recovery: rules that were flushed are put back within seconds, and an event says so
# held by: this, `crates/net/tests/reach.rs::rules_are_recovered_and_leave_nothing_behind`
def test_rules_that_somebody_flushed_come_back(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """By themselves, although nothing is published anew. The machine's other tables are none of this test's business."""
    server = servers.echo(9000)
    kip = fresh_kip()
    proc = kip.run("echo", server.command, ports=server.published, tar=server.tarball(tmp_path))
    port = proc.port()
    assert ping("tcp", "127.0.0.1", port) == "hello"
    table = f"kip_{kip.instance}"
    subprocess.run(["nft", "delete", "table", "inet", table], check=True, timeout=30)
    wait_for("its rules are put back", lambda: any(e["kind"] == "rules" for e in kip.events()), 60)
    assert ping("tcp", "127.0.0.1", port) == "hello"
    assert [e["detail"] for e in kip.events() if e["kind"] == "rules"] == [f"table inet {table} was gone and is put back"]


# promise sandbox: a stopped proc's ports do not answer; it gets them back if they are free
def test_ports_of_stopped_procs_do_not_answer(kip: Kip, tmp_path: Path) -> None:
    server = servers.echo(9000)
    proc = kip.run("halted", server.command, ports=server.published, tar=server.tarball(tmp_path))
    port = proc.port()
    proc.stop()
    with socket.socket() as s:
        s.settimeout(3)
        assert s.connect_ex(("127.0.0.1", port)) != 0
    proc.start()
    proc.wait_state("running")
    assert proc.port() == port, "it keeps its port while nobody else wants it"

    def answers() -> bool:
        try:
            return ping("tcp", "127.0.0.1", port) == "hello"
        except AssertionError:
            return False

    wait_for("it serves again", answers, 30)


# promise waking: many clients at once wake it once
def test_many_connections_while_parked(echo: Proc) -> None:
    """Connections from all sides at once wake it once, and each is answered."""
    port = echo.port(9000)
    generation = echo.sleep()["generation"]
    failures: list[str] = []

    def one(i: int) -> None:
        try:
            with socket.create_connection(("127.0.0.1" if i % 2 else "::1", port), timeout=30) as s:
                s.sendall(b"client %d" % i)
                assert s.recv(100) == b"client %d" % i
        except Exception as error:
            failures.append(f"{i}: {error!r}")

    threads = [threading.Thread(target=one, args=(i,)) for i in range(40)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures
    assert echo.inspect()["generation"] == generation


# promise K10: a probed proc parks by itself, end to end, and stays parked where its port wakes on
#   data
def test_probes_neither_keep_awake_nor_wake(kip: Kip, tmp_path: Path) -> None:
    """A load balancer's look, five times a second: it connects, and closes. A request is another thing."""
    web = servers.lighttpd()
    flags = ["--idle", "1s", "--park-after", "1s"]
    proc = kip.run("probed", web.command, ports=["8080,wake=data"], tar=web.tarball(tmp_path), flags=flags)
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    over, probes = threading.Event(), []

    def probe() -> None:
        while not over.wait(0.2):
            socket.create_connection(("127.0.0.1", proc.port()), timeout=10).close()
            probes.append(time.monotonic())

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        wait_for("it parks although it is probed", lambda: proc.state == "parked", 30)
        wakes, before = proc.inspect()["wakes"], len(probes)
        wait_for("it was probed in its sleep", lambda: len(probes) > before + 10, 30)
        assert (proc.state, proc.inspect()["wakes"]) == ("parked", wakes)
    finally:
        over.set()
        prober.join(30)
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    assert proc.inspect()["wakes"] == wakes + 1
    proc.remove()
