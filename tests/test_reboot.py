"""A machine that ends under its procs: after `kip up` every sleeper's sockets listen again, and all wake as they were.

A reboot is what is left by killing everything: daemon, keeper, pager, launcher, every process of every proc, and with them
namespaces, rules, links, control groups. The machine's clocks go on here; what they do across a real one is tested in
`kip_clocks::noted::tests::after_a_reboot_all_is_due_by_the_wall_clock`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import leftovers, programs, servers
from harness.clients import Lines, Redis, http_get
from harness.kip import Kip, one_line_refusal
from harness.wait import wait_for


@pytest.fixture
def kip(archiving: Kip) -> Kip:
    return archiving


# promise recovery: everything killed at once, as a reboot does: sockets of parked and archived
#   procs listen before anything wakes, all wake by CRIU, a base file that was upgraded meanwhile is
#   the one they had
# held by: this, `tests/test_reboot.py::test_sockets_listen_before_anything_wakes`,
#   `tests/test_reboot.py::test_a_base_file_was_upgraded_meanwhile`
# promise invariants: 10 a reboot does not strand sleepers
# held by: simulated: this, `tests/test_reboot.py::test_who_was_parked_for_it_has_all_of_its_memory`
def test_every_sleeper_comes_back(kip: Kip, tmp_path: Path) -> None:
    """Of those that are hibernated, parked and archived: what is on a disk or in the store wakes, what was in memory has ended."""
    web, redis = servers.lighttpd(), servers.redis()
    tar = web.tarball(tmp_path)
    parked = kip.run("parked", web.command, ports=web.published, tar=tar)
    archived = kip.run("archived", redis.command, ports=redis.published)
    hibernated = kip.run("hibernated", web.command, ports=web.published, tar=tar)
    client = Redis(archived.port())
    client.ask_all([("SET", f"key:{i}", b"%d" % i * 300) for i in range(2000)])
    client.close()
    for proc in (parked, hibernated):
        assert http_get(proc.port(), "/page.html") == servers.PAGE
    ports = [proc.port() for proc in (parked, archived)]
    hibernated.hibernate()
    parked.sleep()
    archived.archive()
    for turn in range(2):
        kip.reboot()
        assert [proc.state for proc in (parked, archived, hibernated)] == ["parked", "archived", "stopped"], turn
        assert [proc.port() for proc in (parked, archived)] == ports, "its clients find it where it was"
        assert {e["name"] for e in kip.events() if e["kind"] == "renewed"} == {"parked", "archived"}
    assert http_get(ports[0], "/page.html") == servers.PAGE
    assert Redis(ports[1]).ask("GET", "key:1999") == b"1999" * 300
    wakes = [proc.inspect()["last_wake"]["from"] for proc in (parked, archived)]
    assert wakes == ["parked", "archived"]
    assert not parked.rebuilt()
    # From here on all is as ever: it sleeps, wakes natively, and stops in order.
    parked.sleep()
    assert http_get(ports[0], "/page.html") == servers.PAGE and parked.rebuilt()
    hibernated.start(ready=True)
    assert http_get(hibernated.port(), "/page.html") == servers.PAGE
    assert "PONG" in str(Redis(ports[1]).ask("PING"))


# promise recovery: K12: before a machine goes down in order (`kip down --park`, the unit's
#   ExecStop) all are parked, whatever tier they were in; who was awake is woken by the next daemon;
#   who cannot be parked is named, exit code 1
# held by: this, `tests/test_packages.py::test_only_a_machine_that_goes_down_parks_all` (the unit's
#   command; a shutdown by systemd itself is untested)
def test_who_was_parked_for_it_has_all_of_its_memory(kip: Kip) -> None:
    """`kip down --park`, and then the end of the machine: of redis without a file nothing is lost, and a proc that was awake
    is awake again."""
    server = servers.redis()
    names = ("awake", "hibernated", "parked", "busy")
    refuses = {"busy": ["--before-sleep", "echo not now; exit 3"]}
    flags = ["--idle", "1h", "--park-after", "1h"]
    procs = [kip.run(n, server.command, ports=server.published, flags=flags + refuses.get(n, [])) for n in names]
    awake, hibernated, parked, busy = procs
    for proc in procs:
        client = Redis(proc.port())
        assert client.ask("SET", "name", proc.name.encode() * 1000) == "OK"
        client.close()
    ports = [proc.port() for proc in procs]
    hibernated.hibernate()
    parked.sleep()
    done = kip.cli("down", "--park", "--within", "60s", "--json", check=False, timeout=90)
    told = json.loads(done.stdout)
    assert sorted(told["asleep"]) == ["awake", "hibernated", "parked"] and done.returncode == 1
    assert list(told["awake"]) == ["busy"] and "not now" in told["awake"]["busy"]
    assert kip.wait_dead() == 0
    kip.reboot()
    awake.wait_state("running")
    assert awake.inspect()["last_wake"]["trigger"] == "kip up"
    # The hibernated one may have been at work when it was parked, and goes on with it then.
    assert [p.state for p in (parked, busy)] == ["parked", "stopped"]
    assert [p.port() for p in procs[:3]] == ports[:3]
    assert {e["name"] for e in kip.events() if e["kind"] == "renewed"} == {"awake", "hibernated", "parked"}
    for proc in procs[:3]:
        assert Redis(proc.port()).ask("GET", "name") == proc.name.encode() * 1000
    # That was once: a proc that sleeps for another reason sleeps on.
    awake.sleep()
    kip.reboot()
    assert awake.state == "parked"


# promise recovery: nothing is started or woken any more while all are parked, and the line says so
def test_nothing_is_begun_while_all_are_parked(kip: Kip, tmp_path: Path) -> None:
    """A proc that is started or woken after its turn would be lost with the machine."""
    command, flags = ["sleep", "1000"], ["--idle", "1h", "--park-after", "1h", "--hook-timeout", "60s"]
    early = kip.run("early", command, flags=flags)
    (go := tmp_path / "go").mkdir()
    kip.run("late", command, flags=[*flags, "-v", f"{go}:/go", "--before-sleep", "while ! test -e /go/on; do sleep 0.1; done"])
    down = subprocess.Popen([kip.program, "--data", kip.data, "down", "--park", "--json"], stdout=subprocess.PIPE, text=True)
    try:
        early.wait_state("parked")
        for words in (["run", "--name", "new", "--", *command], ["wake", "early"]):
            line = kip.refused(*words)
            assert "all procs are being parked" in line and "the next `kip up` has them" in line, line
        assert down.poll() is None
    finally:
        (go / "on").touch()
        said, _ = down.communicate(timeout=60)
    assert json.loads(said)["asleep"] == ["early", "late"] and down.returncode == 0
    assert kip.wait_dead() == 0
    kip.up()
    assert kip.names() == ["early", "late"]


# promise recovery: no proc wakes between that and the next daemon; without a reboot connections are
#   there, too
def test_without_a_reboot_connections_are_there_too(kip: Kip, tmp_path: Path) -> None:
    """Parked by `kip down --park`, and no proc wakes while there is no daemon; the next one finds all connections."""
    server = servers.torture()
    proc = kip.run("calls", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=["--idle", "1h"])
    client = Lines(proc.port())
    client.check()
    assert "asleep until the next `kip up`: calls" in kip.cli("down", "--park").stdout
    assert kip.wait_dead() == 0
    client.socket.sendall(b"check 300\n")
    kip.up()
    assert client.reader.readline().startswith(b"ok ")
    client.check()
    assert kip.cli("down", "--within", "1s", check=False).returncode == 2 and kip.alive(), "only with --park"


def test_sockets_listen_before_anything_wakes(kip: Kip, tmp_path: Path) -> None:
    """A client that connects while all procs come back waits, and is served."""
    web = servers.lighttpd()
    tar = web.tarball(tmp_path)
    procs = [kip.run(f"web-{n}", web.command, ports=web.published, tar=tar) for n in range(4)]
    ports = [proc.port() for proc in procs]
    for proc in procs:
        assert http_get(proc.port(), "/page.html") == servers.PAGE
        proc.sleep()
    kip.reboot()
    assert [proc.state for proc in procs] == ["parked"] * 4, "nobody was called"
    clients = [socket.create_connection(("127.0.0.1", port), 10) for port in ports]
    for client in clients:
        client.sendall(b"GET /page.html HTTP/1.0\r\n\r\n")
    for client in clients:
        client.settimeout(60)
        assert client.recv(15).startswith(b"HTTP/1.0 200")
        client.close()


# promise K7: daemon and keeper at once: what sleeps is made anew and loses its connections, as
#   after a reboot
# promise recovery: daemon and keeper killed at once: the same for sleepers
def test_daemon_and_keeper_die_at_once(kip: Kip, tmp_path: Path) -> None:
    """That loses what sleepers held as well; a proc that runs does not notice."""
    server = servers.alarm()
    tar = server.tarball(tmp_path)
    asleep = kip.run("asleep", server.command, ports=server.published, tar=tar)
    awake = kip.run("awake", server.command, ports=server.published, tar=tar)
    client, steady = Lines(asleep.port()), Lines(awake.port())
    assert client.ask("here") == "here" and steady.ask("there") == "there"
    asleep.sleep()
    kip.expected += [r"the keeper was not running", r"its output is lost"]
    keeper = kip.info()["keeper_pid"]
    kip.kill()
    os.kill(keeper, 9)
    wait_for("the keeper is gone", lambda: not leftovers.is_alive(keeper), 10)
    kip.up()
    assert steady.ask("still there") == "still there"
    assert Lines(asleep.port()).ask("here again") == "here again"
    with pytest.raises((OSError, AssertionError)):
        client.ask("and this one?")


# promise recovery: connections are lost then, and the program is told: they were reset by their
#   peer
# held by: this, `kip_net::renewal::tests::a_connection_comes_back_as_one_that_was_reset`
# promise recovery: timers are due by the wall clock after that
# held by: this, `kip_clocks::noted::tests::after_a_reboot_all_is_due_by_the_wall_clock`
def test_lost_connections_are_told_and_timers_are_met(kip: Kip, tmp_path: Path) -> None:
    """The program sees the end of its connection and goes on. What came due meanwhile has fired, what is due later fires then."""
    server = servers.alarm()
    flags = ["--tick", "100ms"]
    proc = kip.run("worker", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    client = Lines(proc.port())
    assert client.ask("itimer 4000") == client.ask("sleep 15000") == "armed"
    began = time.monotonic()
    proc.sleep()
    kip.reboot()
    proc.wait_state("running", 30)  # by the end of its connection, or by the timer
    away_ms = 1000 * (time.monotonic() - began)
    again = Lines(proc.port())
    for kind in ("itimer", "sleep"):
        wait_for(f"{kind} has fired", lambda kind=kind: again.ask(f"late {kind}") != "armed", 40)
        assert 0 <= int(again.ask(f"late {kind}")) < max(4000, away_ms), kind
    with pytest.raises((OSError, AssertionError)):
        client.ask("and this one?")
    again.close()
    proc.sleep()
    assert Lines(proc.port()).ask("again") == "again"


INSTALLED = Path(f"/usr/local/share/kip-reboot-{os.getpid()}")


@pytest.fixture
def installed() -> Iterator[Path]:
    INSTALLED.mkdir()
    program = INSTALLED / "holder"
    shutil.copy(programs.c_program("holder"), program)
    yield program
    shutil.rmtree(INSTALLED)


# promise K12: base files that a sleeper has open or mapped are pinned: after a reboot and an
#   upgrade of them it wakes with those that it had
# held by: this, `tests/test_upgrade.py::test_kip_is_upgraded_under_load`
@pytest.mark.parametrize("tier", ["parked", "archived"])
def test_a_base_file_was_upgraded_meanwhile(kip: Kip, installed: Path, tier: str) -> None:
    proc = kip.run("old", [str(installed), "7000", "8"], ports=("7000",))
    assert Lines(proc.port()).ask("a") == "ok a"
    size = installed.stat().st_size
    proc.sleep()
    kip.cli("sleep", "old", "--to", tier, "--clock", "auto")
    new = installed.with_suffix(".new")
    shutil.copy(programs.c_program("holder", "-static"), new)
    new.rename(installed)
    assert installed.stat().st_size != size
    kip.reboot()
    for _ in range(2):
        client = Lines(proc.port())
        assert client.ask("b") == "ok b"
        client.close()
        assert int(proc.exec("stat", "-c", "%s", str(installed)).stdout) == size, "its own file has changed under it"
        proc.sleep()


MAKE = "cd /root; echo mine > file; echo own > secret; chown 7:8 secret; chmod 4700 secret"
LOOK = "cd /root; cat secret; stat -c '%n %u %g %a' file secret"


# promise recovery: another data directory has its number after a restart of the machine: files of
#   its procs have owners by that, so it is refused until the number is free; nothing is lost
def test_another_has_its_number_by_then(fresh_kip: Callable[..., Kip], kip: Kip) -> None:
    """After a restart of the machine another data directory may come first and have this one's number, by which files of its
    procs have their owners."""
    parked, stopped = [kip.run(name, ["sleep", "1000"], flags=["--idle", "1h"]) for name in ("parked", "stopped")]
    for proc in (parked, stopped):
        proc.exec("sh", "-c", MAKE)
    seen = stopped.exec("sh", "-c", LOOK).stdout
    parked.sleep()
    stopped.stop()
    before = kip.instance
    kip.kill()
    leftovers.end_all(kip)
    (leftovers.RUN / f"instance-{before}").unlink()
    kip.expected += [r"the keeper was not running"]
    other = fresh_kip(start=False)
    (other.data / "run").mkdir(parents=True, mode=0o700)
    (other.data / "run/instance").write_text(str(before))
    other.up()
    assert other.instance == before
    line = kip.refused("up")
    assert f"had number {before}" in line and f"kip --data {other.data} down" in line, line
    # By another path it is still the same.
    (link := kip.data.parent / "link").symlink_to(other.data)
    assert "already runs" in one_line_refusal(subprocess.run([kip.program, "--data", link, "up"], capture_output=True, text=True, timeout=60))
    other.cli("down", "--all")
    assert other.wait_dead() == 0
    kip.up()
    assert kip.instance == before
    stopped.start()
    for proc in (parked, stopped):
        assert proc.exec("sh", "-c", LOOK).stdout == seen, proc.name


# promise recovery: a data directory keeps its number as long as it has procs, stopped ones too
def test_the_number_stays_with_stopped_procs(fresh_kip: Callable[..., Kip]) -> None:
    """After `kip down` the next data directory does not take the number, in whatever order they are started."""
    kips = [fresh_kip(), fresh_kip()]
    numbers = [kip.instance for kip in kips]
    for kip in kips:
        kip.run("one", ["sleep", "1000"]).exec("sh", "-c", MAKE)
        kip.cli("down", "--all")
        assert kip.wait_dead() == 0
    third = fresh_kip()
    assert third.instance not in numbers
    for kip in reversed(kips):
        kip.up()
        kip.cli("start", "one")
        assert "own" in kip.cli("exec", "one", "--", "cat", "/root/secret").stdout
    assert [kip.instance for kip in kips] == numbers
