"""A sleeper comes back although the machine changed under it: an upgraded base file, a damaged snapshot, dead helpers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import kept, programs, servers, logged
from harness.clients import Http, Lines, Redis, http_get
from harness.kip import BY_ITSELF, Kip, Proc, binary
from harness.wait import wait_for

# The base of every proc is the host's own /usr, so the file that is upgraded has to lie there.
INSTALLED = Path(f"/usr/local/share/kip-test-{os.getpid()}")


@pytest.fixture
def installed() -> Iterator[Path]:
    INSTALLED.mkdir()
    program = INSTALLED / "torture"
    shutil.copy(programs.c_program("torture"), program)
    yield program
    shutil.rmtree(INSTALLED)


def upgrade(program: Path) -> None:
    """As a package manager does it: a new file takes the old one's name."""
    new = program.with_suffix(".new")
    shutil.copy(programs.c_program("torture", "-static"), new)
    new.rename(program)


# promise parking: a sleeper wakes although a base file was replaced on the host, and sleeps and
#   wakes again
def test_a_mapped_file_is_upgraded_under_a_sleeper(kip: Kip, installed: Path) -> None:
    """It wakes with the file it had, and again after its next sleep; a new proc gets the new one."""
    proc = kip.run("old", [str(installed), "7000"], ports=("7000",))
    client = Lines(proc.port())
    client.check()
    size = installed.stat().st_size
    proc.sleep()
    upgrade(installed)
    assert installed.stat().st_size != size
    for _ in range(3):
        client.check()
        assert proc.inspect()["last_wake"]["from"] == "parked"
        inside = int(proc.exec("stat", "-c", "%s", str(installed)).stdout)
        assert inside == size, "the program's own file has changed under it"
        proc.sleep()
    client.check()
    client.close()
    fresh = kip.run("new", [str(installed), "7000"], ports=("7000",))
    assert int(fresh.exec("stat", "-c", "%s", str(installed)).stdout) == installed.stat().st_size
    fresh.remove()
    proc.remove()


# promise waking: a wake by traffic that fails is tried again, then starts cold, and says so
# promise trouble: corrupt snapshot and a client that connects: cold start; the client's connection
#   is lost, the generation is set aside
# promise invariants: 5 a failed wake by traffic or timer deletes nothing
# held by: this, `kip_snapshot::tests::what_could_not_be_restored_is_kept_aside`
def test_a_client_finds_a_damaged_snapshot(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """The wake is tried again, then the server starts cold on its newest files; the snapshot is kept and it is said."""
    server = servers.lighttpd()
    kip = fresh_kip()
    kip.expected += [r"its snapshot cannot be used"]
    proc = kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    port = proc.port()
    generation = proc.sleep()["generation"]
    directory = kip.data / "procs" / "web"
    pages = max((directory / f"gen-{generation}").glob("pages-*.img"), key=lambda p: p.stat().st_size)
    damaged = bytearray(pages.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    pages.write_bytes(damaged)
    try:
        Http(port, timeout=20).get("/page.html")
    except OSError:
        pass  # this client's connection went with the snapshot
    proc.wait_state("running", 30)
    wait_for("the cold start serves", lambda: served(port), 30)
    assert (directory / f"failed-gen-{generation}" / pages.name).read_bytes() == damaged
    assert "cold-start" in [event["kind"] for event in kip.events()]


# promise waking: a generation of an older Kip, which has each image as a file, is woken natively
#   and by CRIU
@pytest.mark.parametrize("engine", ["plan", "criu"])
def test_a_generation_of_files_wakes(fresh_kip: Callable[..., Kip], tmp_path: Path, engine: str) -> None:
    server = servers.lighttpd()
    kip = fresh_kip()
    proc = kip.run("old", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=["--idle", "1h"])
    client = Http(proc.port())
    assert client.get("/page.html") == servers.PAGE
    generation = kip.data / "procs" / "old" / f"gen-{proc.sleep()['generation']}"
    manifest = json.loads((generation / "manifest.json").read_text())
    plan = generation / "wake.plan"
    if engine == "criu":
        plan.unlink()
    else:  # of another version, so that it is made again
        bytes_ = bytearray(plan.read_bytes())
        bytes_[7] ^= 1
        plan.write_bytes(bytes_)
    kept.as_files(generation, manifest)
    manifest["parts"] = [part for part in manifest["parts"] if (generation / part["name"]).exists()]
    (generation / "manifest.json").write_text(json.dumps(manifest))
    assert client.get("/page.html") == servers.PAGE
    wake = proc.inspect()["last_wake"]
    steps = [step["name"] for step in wake["steps"]]
    assert wake["from"] == "parked" and ("plan" in steps) == (engine == "plan"), wake


def served(port: int) -> bool:
    try:
        return Http(port, timeout=10).get("/page.html") == servers.PAGE
    except OSError:
        return False


# promise K7: the same: `kip-launch`, a CRIU helper that waits
# held by: this, `tests/test_upgrade.py::test_idle_helpers_are_killed`
def test_launcher_is_killed(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """Another takes its place; procs do not notice."""
    server = servers.lighttpd()
    kip = fresh_kip()
    kip.expected += [r"kip-launch has died"]
    proc = kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    assert kip.daemon
    for pid in children(kip.daemon.pid, "kip-launch"):
        os.kill(pid, signal.SIGKILL)
    wait_for("another launcher runs", lambda: children(kip.daemon.pid, "kip-launch"), 30)
    assert Http(proc.port()).get("/page.html") == servers.PAGE
    wait_for("it is used", lambda: kip.cli("exec", "web", "--", "true", check=False).returncode == 0, 30)
    proc.sleep()
    assert Http(proc.port()).get("/page.html") == servers.PAGE


@pytest.mark.parametrize("which", ["helpers", "template", "both"])
def test_idle_helpers_are_killed(fresh_kip: Callable[..., Kip], tmp_path: Path, which: str) -> None:
    """A sleep and a wake by CRIU that find helpers, or the template that forks them, dead take others."""
    server = servers.lighttpd()
    kip = fresh_kip("--only-criu")
    kip.expected += [logged.NO_HELPER]
    proc = kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    assert kip.daemon
    for _ in range(3):
        (template,) = wait_for("there is a template", lambda: children(kip.daemon.pid, "criu-template"))
        helpers = wait_for("a helper waits", lambda: children(template, "criu-helper"))
        for pid in {"helpers": helpers, "template": [template], "both": [template, *helpers]}[which]:
            os.kill(pid, signal.SIGKILL)
        proc.sleep()
        assert Http(proc.port()).get("/page.html") == servers.PAGE
        assert proc.inspect()["last_wake"]["from"] == "parked"


def children(pid: int, comm: str) -> list[int]:
    """Those of that name that live."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            all_of_it = (task / "children").read_text().split()
        except OSError:  # this thread has ended
            continue
        for child in all_of_it:
            try:
                name, state = Path(f"/proc/{child}/comm").read_text().strip(), Path(f"/proc/{child}/stat").read_text()
            except OSError:
                continue
            if name == comm and state.rsplit(")", 1)[1].split()[0] != "Z":
                found.append(int(child))
    return found


# Kip itself.


class Load:
    """Asks two servers without a pause: one over one connection, the other by a new one each time; and a third now and then, which
    falls asleep in between. It never tries again."""

    def __init__(self, redis_port: int, web_port: int, nods_port: int):
        self.asked, self.failures, self._over = 0, [], threading.Event()
        asks = (self._redis(redis_port), self._web(web_port), self._nods(nods_port))
        self._threads = [threading.Thread(target=self._ask, args=(ask,)) for ask in asks]
        for thread in self._threads:
            thread.start()

    def _redis(self, port: int) -> Iterator[bool]:
        client, count = Redis(port, timeout=30), 0
        while True:
            count += 1
            yield client.ask("INCR", "load") == count

    def _web(self, port: int) -> Iterator[bool]:
        while True:
            yield http_get(port, "/page.html") == servers.PAGE

    def _nods(self, port: int) -> Iterator[bool]:
        client, count = Redis(port, timeout=30), 0
        while True:
            count += 1
            yield client.ask("INCR", "nods") == count
            self._over.wait(0.1 * (count % 8))

    def _ask(self, ask: Iterator[bool]) -> None:
        while not self._over.is_set():
            try:
                if not next(ask):
                    self.failures.append("another answer")
            except Exception as e:  # all of them are failures of the upgrade
                self.failures.append(repr(e))
                return
            self.asked += 1

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


def seen(proc: Proc) -> tuple[str, list[str]]:
    """Its state, and why it has woken since it began. One that is frozen in the middle of work goes on with it by itself."""
    events = [event for event in proc.kip.events() if event["name"] == proc.name and event["kind"] == "woken"]
    causes = [event["detail"] for event in events if not BY_ITSELF.search(event["detail"])]
    view = proc.inspect()
    by_itself = view["state"] == "running" and len(events) > len(causes)
    return "parked" if by_itself else view["state"], causes


def put_in_place(programs_now: Path, build: int) -> None:
    """As a package manager does it: a new file takes the old one's name."""
    for name in ("kip", "kip-keeper", "kip-pager", "kip-launch"):
        new = programs_now / f"{name}.new"
        shutil.copy(binary().parent / name, new)
        with open(new, "ab") as file:
            file.write(b"build %d" % build)
        new.rename(programs_now / name)


def runs(pid: int) -> tuple[int, int]:
    """The file that a process runs; none if it has ended."""
    try:
        found = os.stat(f"/proc/{pid}/exe")
    except FileNotFoundError:
        return 0, 0
    return found.st_dev, found.st_ino


def file_of(place: Path, name: str) -> tuple[int, int]:
    found = os.stat(place / f"kip-{name}")
    return found.st_dev, found.st_ino


# promise install: K12: new programs and another daemon: all four run the new files, under load no
#   request fails, no sleeper wakes, no connection ends
# held by: this, `kip_supervisor::outdated::tests::another_file_at_the_same_path_is_another`
# promise install: hibernated procs, blocked or held, are parked before their pager is replaced; one
#   that falls asleep and wakes all the while fails no request
def test_kip_is_upgraded_under_load(fresh_kip: Callable[..., Kip], installed: Path, tmp_path: Path) -> None:
    """Each part runs the new file; 0 failed requests, 0 wakes, 0 lost bytes. Twice."""
    place = tmp_path / "bin"
    place.mkdir()
    put_in_place(place, 0)
    (tmp_path / "store").mkdir()
    kip = fresh_kip("--store", str(tmp_path / "store"), program=place / "kip")
    redis = ["redis-server", "--bind", "*", "--protected-mode", "no", "--save", ""]
    stays = ["--idle", "1h", "--park-after", "1h"]
    hot = kip.run("hot", redis, ports=["6379"], flags=stays)
    server = servers.lighttpd()
    web = kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=stays)
    nods = kip.run("nods", redis, ports=["6379"], flags=["--idle", "200ms", "--park-after", "200ms"])
    torture = [str(installed), "7000"]
    sleepers, clients = [], []
    for number in range(8):
        proc = kip.run(f"sleeper-{number}", torture, ports=["7000"], flags=[*stays, "--hibernate", "blocked"])
        client = Lines(proc.port())
        client.check()
        proc.hibernate() if number % 2 else proc.sleep()
        sleepers.append(proc)
        clients.append(client)
    stored = kip.run("stored", redis, ports=["6379"], flags=stays)
    assert Redis(stored.port()).ask("SET", "a", "1") == "OK"
    stored.archive()
    # Not redis: a proc that is held is woken for each tick.
    held = kip.run("held", torture, ports=["7000"], flags=[*stays, "--hibernate", "held"])
    waits = Lines(held.port())
    waits.check()
    held.hold()
    sleepers += [stored, held]
    load = Load(hot.port(6379), web.port(), nods.port(6379))
    try:
        for build in (1, 2):
            before = [seen(proc) for proc in (hot, web, *sleepers)]
            # A hibernated proc is parked first: this pager alone knows whether the proc has touched
            # its memory.
            # The next daemon tells of wakes of its own time: to be held a proc may have been woken.
            after = [("parked" if state == "hibernated" else state, list[str]()) for state, _ in before]
            assert build == 2 or [state for state, _ in before].count("hibernated") == 5
            asked = load.asked
            put_in_place(place, build)
            kip.daemon.terminate()
            assert kip.wait_dead() == 0
            kip.up()
            for name in ("keeper", "pager"):
                wait_for(f"{name} is new", lambda name=name: runs(kip.info()[f"{name}_pid"]) == file_of(place, name), 30)
            found = {runs(pid) for pid in children(kip.daemon.pid, "kip-launch")}
            assert found == {file_of(place, "launch")}
            wait_for("the load goes on", lambda: load.asked > asked + 20, 30)
            now = [seen(proc) for proc in (hot, web, *sleepers)]
            assert now == after, "none of them was woken"
    finally:
        load.end()
    assert load.failures == [] and load.asked > 100
    assert Redis(stored.port()).ask("GET", "a") == b"1"
    waits.check()
    waits.close()
    for proc, client, (_, causes) in zip(sleepers[:8], clients, after[2:10], strict=True):
        sleeps = proc.state != "running"
        client.check()
        client.close()
        # The client has its answer before the event of the wake is written.
        wait_for("its wake is told", lambda p=proc, n=len(causes) + sleeps: len(seen(p)[1]) == n, 10)


def upgraded(kip: Kip, place: Path, build: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """New programs and another daemon; what happens in between, while there is none."""
    put_in_place(place, build)
    kip.daemon.terminate()
    assert kip.wait_dead() == 0
    meanwhile()
    kip.up()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "bin"
    place.mkdir()
    put_in_place(place, 0)
    return place


WAYS = {"parked": "blocked", "archived": "blocked", "blocked": "blocked", "held": "held"}
STAYS = ["--idle", "1h", "--park-after", "1h"]
WRITES = "until test -e /srv/go; do sleep 0.05; done; echo written in the gap; touch /srv/done; exec sleep 1000000"


# promise install: bytes, connections and datagrams that come for sleepers while there is no daemon
#   arrive; what programs write meanwhile is in their logs, once
def test_what_comes_while_there_is_no_daemon_arrives(fresh_kip: Callable[..., Kip], place: Path, tmp_path: Path) -> None:
    """Bytes on connections, new connections and datagrams for sleepers of each tier; and what a program writes is in its log."""
    (tmp_path / "store").mkdir()
    kip = fresh_kip("--store", str(tmp_path / "store"), program=place / "kip")
    server = servers.echo(9000)
    tar = server.tarball(tmp_path)
    writer = kip.run("writer", ["/bin/sh", "-c", WRITES], tar=tar, flags=["--never-sleep"])
    pid = writer.inspect()["pids"][0]
    procs, ports, old, datagrams, new = {}, {}, {}, {}, {}
    for name, way in WAYS.items():
        proc = kip.run(name, server.command, ports=server.published, tar=tar, flags=[*STAYS, "--hibernate", way])
        datagrams[name] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams[name].connect(("127.0.0.1", proc.port(proto="udp")))
        ports[name] = proc.port(proto="tcp")
        old[name] = Lines(ports[name])
        assert old[name].ask("before") == "before"
        if name == "archived":
            old.pop(name).close()
            proc.archive()
        else:
            proc.sleep() if name == "parked" else proc.hibernate()
        procs[name] = proc

    def meanwhile() -> None:
        for name, port in ports.items():
            datagrams[name].send(b"datagram")
            new[name] = Lines(port)
            new[name].socket.sendall(b"new\n")
            if name in old:
                old[name].socket.sendall(b"old\n")
        (Path(f"/proc/{pid}/root/srv") / "go").touch()
        wait_for("it has written", (Path(f"/proc/{pid}/root/srv") / "done").exists, 30)

    upgraded(kip, place, 1, meanwhile)
    for name, proc in procs.items():
        for client, line in ((new[name], b"new\n"), (old.get(name), b"old\n")):
            if client:
                assert client.reader.readline() == line, name
                client.close()
        datagrams[name].settimeout(30)
        assert datagrams[name].recv(100) == b"datagram", name
        datagrams[name].close()
        assert proc.state == "running"
    wait_for("it is in the log", lambda: "written in the gap" in writer.logs(), 30)
    assert writer.logs().count("written in the gap") == 1


# Its message queue cannot be in a snapshot, but its memory can be taken out where it is.
QUEUE = """
import ctypes, os, socket, zlib
ctypes.CDLL(None).mq_open(b"/kept", os.O_CREAT | os.O_RDWR, 0o600, None)
kept = os.urandom(8 << 20)
sum = zlib.crc32(kept)
listener = socket.create_server(("", 7000))
while True:
    with listener.accept()[0] as client:
        client.recv(100)
        client.sendall(b"it is there\\n" if zlib.crc32(kept) == sum else b"it is not\\n")
"""


# promise install: who cannot be parked counts as awake then, the reason is an event, and its memory
#   is taken up by the next pager
def test_who_cannot_be_parked_is_taken_up_by_the_next_pager(fresh_kip: Callable[..., Kip], place: Path) -> None:
    """It counts as awake then, and its memory is where it was."""
    kip = fresh_kip(program=place / "kip")
    stuck = kip.run("stuck", ["/usr/bin/python3", "-c", QUEUE], ports=["7000"], flags=[*STAYS, "--hibernate", "blocked"])
    assert stuck.hibernate()["memory"]["swap_bytes"] > 8 << 20
    upgraded(kip, place, 1)
    for name in ("keeper", "pager"):
        wait_for(f"{name} is new", lambda name=name: runs(kip.info()[f"{name}_pid"]) == file_of(place, name), 30)
    refused = [e["detail"] for e in kip.events() if e["kind"] == "refused"]
    assert len(refused) == 1 and "/kept" in refused[0], "why is said"
    assert stuck.state == "running" and stuck.inspect()["memory"]["swap_bytes"] > 8 << 20
    client = Lines(stuck.port())
    assert client.ask("is it?") == "it is there"
    client.close()
    stuck.hibernate()


KILLS = """#!/bin/sh
[ "$2" = --in-place ] && kill -9 $PPID
exec {real} "$@"
"""


# promise install: the daemon killed at any step of replacing keeper or pager, a new keeper that
#   does not start or dies at once: sleepers have their connections and memory, and no other process
#   becomes keeper in between
# held by: this, `crates/keeper/tests/succession.rs::a_successor_takes_everything_by_itself`,
#   `crates/keeper/tests/succession.rs::whoever_fails_in_the_middle_of_a_succession_loses_nothing`,
#   `crates/keeper/tests/succession.rs::nobody_comes_in_between_two_keepers`
@pytest.mark.parametrize("where", ["supersede-pager", "in the middle", "supersede-keeper", "renewed"])
def test_killed_while_residents_are_replaced(
    fresh_kip: Callable[..., Kip], installed: Path, place: Path, where: str
) -> None:
    """Whatever is replaced, and however far that has come: sleepers have their connections and their memory afterwards."""
    kip = fresh_kip(program=place / "kip")
    procs, clients = {}, {}
    for name in ("parked", "hibernated"):
        procs[name] = kip.run(name, [str(installed), "7000"], ports=["7000"], flags=[*STAYS, "--hibernate", "blocked"])
        clients[name] = Lines(procs[name].port())
        clients[name].check()
    before = kip.info()
    procs["parked"].sleep()
    procs["hibernated"].hibernate()
    kip.daemon.terminate()
    assert kip.wait_dead() == 0
    keeper, real = place / "kip-keeper", place / "kip-keeper.real"
    flags = ["--supersede", "--fault-at", where]
    if not where.startswith("supersede"):
        flags = [] if where == "renewed" else ["--supersede"]
        keeper.rename(real)
        keeper.write_text(KILLS.format(real=real))
        keeper.chmod(0o755)
    try:
        kip.up(*flags)
    except (AssertionError, OSError):
        pass  # before it was ready, or a moment after that
    assert kip.wait_dead() == -signal.SIGKILL
    if real.exists():
        # What the daemon had begun ends without it; the wrapper has executed it by then.
        wait_for("the old keeper is gone", lambda: runs(before["keeper_pid"]) == (0, 0), 30)
        real.rename(keeper)
    kip.up()
    if where == "supersede-pager":
        assert kip.info()["keeper_pid"] == before["keeper_pid"]
    else:
        assert runs(before["keeper_pid"]) == (0, 0)
    for _ in range(2):
        for name, proc in procs.items():
            clients[name].check()
            proc.sleep()
    for client in clients.values():
        client.close()


# promise install: what a keeper holds of the pager's and the pager no longer has is dropped at the
#   next start of a daemon
def test_a_keeper_drops_what_the_pager_does_not_have(fresh_kip: Callable[..., Kip], installed: Path) -> None:
    """A new keeper may have taken over what was dropped at the last moment: the next daemon has that dropped, and nothing else."""
    kip = fresh_kip()
    proc = kip.run("out", [str(installed), "7000"], ports=["7000"], flags=[*STAYS, "--hibernate", "blocked"])
    client = Lines(proc.port())
    client.check()
    proc.hibernate()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as keeper, open("/dev/null") as null:
        keeper.connect(str(kip.data / "run/keeper.sock"))

        def held() -> list[str]:
            keeper.send(json.dumps({"op": "list", "prefix": "@"}).encode())
            return [name for name, _ in json.loads(keeper.recv(1 << 16))["names"]]

        names = held()
        assert names
        left = [names[0].rsplit("/", 1)[0] + "/1ffffffff", names[0].replace("out", "gone")]
        socket.send_fds(keeper, [json.dumps({"op": "put", "names": left}).encode()], [null.fileno()] * 2)
        assert json.loads(keeper.recv(1 << 16))["re"] == "done"
        assert sorted(held()) == sorted(names + left)
        kip.kill()
        kip.up()
        wait_for("what is left is dropped", lambda: held() == names, 30)
    client.check()
    client.close()


# promise install: residents of another protocol are replaced with all they hold; memory that is out
#   in an unknown form is left alone, and said
# held by: this,
#   `crates/keeper/tests/keeper.rs::a_keeper_of_another_protocol_is_superseded_with_all_it_holds`,
#   `crates/keeper/tests/succession.rs::one_of_another_protocol_is_told_from_ours`,
#   `kip_pager::slots::tests::a_map_of_another_form_is_found`
def test_residents_of_another_version_are_replaced(fresh_kip: Callable[..., Kip], installed: Path) -> None:
    """The running keeper and pager are taken for ones with other messages: no proc loses anything, in whatever way it sleeps."""
    kip = fresh_kip()
    procs, clients = {}, {}
    for name in ("hot", "parked", "blocked", "held"):
        flags = [*STAYS, "--hibernate", "held" if name == "held" else "blocked"]
        procs[name] = kip.run(name, [str(installed), "7000"], ports=["7000"], flags=flags)
        clients[name] = Lines(procs[name].port())
        clients[name].check()
    procs["parked"].sleep()
    for name in ("blocked", "held"):
        procs[name].hibernate()
    before = kip.info()
    kip.daemon.terminate()
    assert kip.wait_dead() == 0
    kip.up("--supersede")
    after = kip.info()
    for resident in ("keeper_pid", "pager_pid"):
        assert before[resident] != after[resident] and runs(before[resident]) == (0, 0)
    assert procs["parked"].state == "parked"
    for _ in range(2):
        for name, proc in procs.items():
            clients[name].check()
            proc.sleep()
    for client in clients.values():
        client.close()
