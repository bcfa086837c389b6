"""`kip apply --replace` while clients connect: the new proc takes the old one's place without a moment in which a connection is refused
or reset; one that does not get ready takes nothing, and a daemon that is killed leaves the one or the other."""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from harness import logged, servers
from harness.clients import Http, free_port, http_get, listens
from harness.kip import Kip, Proc
from harness.rows import one_in, rest_in_soak
from harness.wait import wait_for
from test_apply import actions, told

PAGE = "srv/www/page.html"
# Each takes the requests that have begun to their end; Python's ends at once, when none is left.
GRACE = {"nginx": "QUIT", "lighttpd": "INT", "python": "TERM"}


def page(port: int) -> bytes:
    return http_get(port, "/page.html")


@dataclass
class Clients:
    """Short requests of several threads, each by a connection of its own, and requests on one that stays."""

    port: int
    over: threading.Event = field(default_factory=threading.Event)
    answers: list[bytes] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    kept_for: int = 0

    def short(self) -> None:
        while not self.over.is_set():
            try:
                self.answers.append(page(self.port))
            except Exception as error:  # whatever it is, the server was not there for a client
                self.failed.append(f"short: {error!r}")

    def stays(self) -> None:
        """A connection that the server has closed between two requests is made anew."""
        connection = None
        while not self.over.is_set():
            try:
                if connection is None or connection.sock is None or select.select([connection.sock], [], [], 0)[0]:
                    connection = Http(self.port)
                self.answers.append(connection.get("/page.html"))
                self.kept_for += 1
            except Exception as error:
                self.failed.append(f"kept: {error!r}")
                connection = None
            self.over.wait(0.1)


@contextmanager
def clients(port: int, stays: bool = True) -> Iterator[Clients]:
    """No request of theirs fails."""
    all = Clients(port)
    threads = [threading.Thread(target=all.short) for _ in range(3)]
    threads += [threading.Thread(target=all.stays)] * stays
    for thread in threads:
        thread.start()
    try:
        yield all
        # However slow the machine was, they have asked often.
        wait_for("clients have asked", lambda: len(all.answers) > 20 or all.failed, 30)
    finally:
        all.over.set()
        for thread in threads:
            thread.join()
    assert not all.failed, f"{len(all.failed)} of {len(all.failed) + len(all.answers)} failed: {all.failed[:5]}"


class Described:
    """A web server in a file, with another page each time."""

    def __init__(self, kip: Kip, directory: Path, which: str, more: str = ""):
        self.kip, self.directory, self.which, self.more = kip, directory, which, more
        self.port, self.file, self.page = free_port(), directory / "kip.toml", 0

    def write(self, more: str = "") -> None:
        self.page += 1
        server = servers.WEB[self.which]()
        server = replace(server, name=str(self.page), files={**server.files, PAGE: f"page {self.page}\n"})
        server.tarball(self.directory)
        self.file.write_text(
            f"[proc.web]\ncommand = {server.command}\ntar = '{self.page}.tar'\nport = ['{self.port}:8080']\nidle = '1h'\n"
            f"stop-signal = '{GRACE[self.which]}'\nstop-grace = '3s'\n{self.more}{more}"
        )

    def shown(self) -> bytes:
        return f"page {self.page}\n".encode()

    def apply(self) -> dict[str, str]:
        return actions(self.kip, "apply", "-f", self.file, "--replace")

    def begin(self) -> None:
        self.write("wait-ready = true\n")
        self.kip.cli("apply", "-f", self.file)
        assert page(self.port) == self.shown()


# promise files: `kip apply --replace` refuses and resets no connection: the new proc is started
#   beside the old one, gets its name and its ports at once when it is ready or listens where the
#   old one does, and the old one's connections come to their end before it is stopped
@pytest.mark.parametrize("which", rest_in_soak(["nginx", "lighttpd", "python"], ["nginx"]))
def test_no_client_is_refused(kip: Kip, tmp_path: Path, which: str) -> None:
    web = Described(kip, tmp_path, which)
    web.begin()
    with clients(web.port, stays=which != "python") as all:
        for _ in range(4):
            web.write()
            assert web.apply() == {"web": "replace"}
            assert page(web.port) == web.shown()
    assert which == "python" or all.kept_for > 4
    assert kip.names() == ["web"]
    assert Proc(kip, "web").inspect()["spec"]["replaced"] == 4
    # It is an ordinary proc in all else.
    proc = Proc(kip, "web")
    proc.sleep()
    assert page(web.port) == web.shown()
    assert actions(kip, "apply", "-f", web.file) == {"web": "same"}


# promise files: where both would write to one volume the old proc ends before the new one starts,
#   and connections wait instead of being refused
def test_with_a_volume_connections_wait(kip: Kip, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    web = Described(kip, tmp_path, "nginx", "volume = ['./kept:/kept']\n")
    web.begin()
    with clients(web.port, stays=False):
        for _ in range(2):
            web.write()
            assert web.apply() == {"web": "replace"}
            assert page(web.port) == web.shown()
    assert kip.names() == ["web"]


# promise files: a new proc that does not get ready, or ends, or does not listen where the old one
#   does, takes nothing: that is one line, and the old one runs on
@pytest.mark.parametrize("volume", [False, True], ids=["beside", "after"])
def test_one_that_does_not_get_ready_takes_nothing(kip: Kip, tmp_path: Path, volume: bool) -> None:
    (tmp_path / "kept").mkdir()
    web = Described(kip, tmp_path, "nginx", "volume = ['./kept:/kept']\n" if volume else "")
    web.begin()
    shown, before = web.shown(), Proc(kip, "web").inspect()
    stays = "the one that was there is started again" if volume else "the one that is there runs on"

    def tried(*why: str) -> None:
        (line,) = told(kip, "apply", "-f", web.file, "--replace")
        assert all(text in line for text in ["web", *why, stays]), line
        assert "web-r" not in line, line
        assert kip.names() == ["web"]
        wait_for("the old one listens", lambda: listens(web.port), 30)
        assert page(web.port) == shown

    with clients(web.port, stays=False) if not volume else threading.Lock():
        web.write("ready = 'http:8080/none'\nready-timeout = '6s'\n")
        tried("was not ready", "404")
        web.write()
        web.file.write_text(web.file.read_text().replace("/etc/nginx/kip.conf", "/etc/nginx/none.conf"))
        tried("ended before it could take over")
    if not volume:
        assert Proc(kip, "web").inspect()["pids"] == before["pids"]
    web.write()
    assert web.apply() == {"web": "replace"}
    assert page(web.port) == web.shown()


def test_one_that_goes_at_its_end_does_so_only_then(kip: Kip, tmp_path: Path) -> None:
    """`kip run --rm`: that it is stopped for another proc, which fails, is not its end."""
    (tmp_path / "kept").mkdir()
    flags = ["-v", f"{tmp_path}/kept:/kept"]
    old = kip.run("goes", ["sleep", "1000"], flags=[*flags, "--rm"])
    file = tmp_path / "kip.toml"
    unready = "port = ['8080']\nready = 'tcp:8080'\nready-timeout = '1s'\n"
    file.write_text(f"[proc.goes]\ncommand = ['sleep', '2000']\nvolume = ['./kept:/kept']\n{unready}")
    (line,) = told(kip, "apply", "-f", file, "--replace")
    assert "the one that was there is started again" in line, line
    old.wait_state("running", 30)
    kip.cli("stop", "goes")
    wait_for("it is gone", lambda: kip.names() == [], 20)


# promise files: the daemon is killed while a proc is replaced: the next one has the old proc or the
#   new one, which answers, and nothing else
@pytest.mark.parametrize("volume", [False, True], ids=["beside", "after"])
@pytest.mark.parametrize(
    "step",
    one_in(2, ["start-launched", "replace-started", "replace-ports", "replace-recorded", "replace-switched", "replace-left",
               "stop-intent", "stop-killed", "stop-recorded", "remove-files"]),
)  # fmt: skip
def test_killed_while_it_is_replaced(fresh_kip: Callable[..., Kip], tmp_path: Path, step: str, volume: bool) -> None:
    kip = fresh_kip()
    kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_GONE]
    (tmp_path / "kept").mkdir()
    web = Described(kip, tmp_path, "nginx", "volume = ['./kept:/kept']\n" if volume else "")
    web.begin()
    old = web.shown()
    kip.kill()
    kip.up("--fault-at", step)
    web.write()
    # The rehearsal comes to some of these steps first.
    kip.cli("apply", "-f", web.file, "--replace", check=False)
    assert kip.wait_dead(60) == -signal.SIGKILL
    kip.up()
    wait_for("nothing else is there", lambda: kip.names() == ["web"], 30)
    wait_for("it listens", lambda: listens(web.port), 30)
    shown = page(web.port)
    assert shown in (old, web.shown())
    assert (shown == old) == (Proc(kip, "web").inspect()["spec"].get("replaced", 0) == 0)
    wait_for("no other directory", lambda: len([d for d in (kip.data / "procs").iterdir() if d.name[0] != "."]) == 1, 30)
    # And it can be replaced again.
    web.write()
    assert web.apply() == {"web": "replace"}
    assert page(web.port) == web.shown()


def fails(web: Described, ends: bool) -> None:
    """The next proc is not ready in time, or its start fails, with which all that there is of it goes."""
    web.write("wait-ready = true\n" if ends else "ready = 'http:8080/none'\nready-timeout = '500ms'\n")
    if ends:
        web.file.write_text(web.file.read_text().replace("/etc/nginx/kip.conf", "/etc/nginx/none.conf"))


def serves_alone(kip: Kip, web: Described, shown: bytes) -> None:
    """The old proc is there, and nothing else, and it can be replaced."""
    wait_for("nothing else is there", lambda: kip.names() == ["web"], 30)
    wait_for("it listens", lambda: listens(web.port), 30)
    assert page(web.port) == shown
    wait_for("no other directory", lambda: len([d for d in (kip.data / "procs").iterdir() if d.name[0] != "."]) == 1, 30)
    web.write()
    assert web.apply() == {"web": "replace"}
    assert page(web.port) == web.shown()


def after_one_that_was_stopped_for_another(kip: Kip, directory: Path) -> Described:
    kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_GONE]
    (directory / "kept").mkdir()
    web = Described(kip, directory, "nginx", "volume = ['./kept:/kept']\n")
    web.begin()
    return web


# promise files: the daemon is killed while a proc that was stopped for another one is to be started
#   again: the next one starts it
@pytest.mark.parametrize("ends", [False, True], ids=["unready", "ends"])
@pytest.mark.parametrize("step", one_in(2, ["stop-intent", "stop-recorded", "replace-failed", "replace-gives-back", "replace-given-back"]))
def test_killed_while_a_replacement_fails(fresh_kip: Callable[..., Kip], tmp_path: Path, step: str, ends: bool) -> None:
    kip = fresh_kip()
    web = after_one_that_was_stopped_for_another(kip, tmp_path)
    shown = web.shown()
    kip.kill()
    kip.up("--fault-at", step)
    fails(web, ends)
    kip.cli("apply", "-f", web.file, "--replace", check=False)
    assert kip.wait_dead(60) == -signal.SIGKILL
    kip.up()
    serves_alone(kip, web, shown)


# promise files: the daemon is killed again while it starts such a proc: the next one starts it
@pytest.mark.parametrize("ends", [False, True], ids=["unready", "ends"])
@pytest.mark.parametrize("step", one_in(2, ["start-recorded", "start-ports", "start-held", "start-launched", "start-hot", "replace-given-back"]))
def test_killed_again_while_the_old_one_starts_again(fresh_kip: Callable[..., Kip], tmp_path: Path, step: str, ends: bool) -> None:
    kip = fresh_kip()
    web = after_one_that_was_stopped_for_another(kip, tmp_path)
    shown = web.shown()
    kip.kill()
    kip.up("--fault-at", "replace-failed")
    fails(web, ends)
    kip.cli("apply", "-f", web.file, "--replace", check=False)
    assert kip.wait_dead(60) == -signal.SIGKILL
    with suppress(AssertionError, OSError):  # it may be killed before it has said that it is ready
        kip.up("--fault-at", step)
    assert kip.wait_dead(60) == -signal.SIGKILL
    kip.up()
    serves_alone(kip, web, shown)


# promise files: `kip down` while a proc stands aside for another ends both, and the next `kip up`
#   starts the one that stood aside
def test_all_end_in_a_replacement(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    kip = fresh_kip()
    (tmp_path / "kept").mkdir()
    old = kip.run("web", ["sleep", "1000"], flags=["-v", f"{tmp_path}/kept:/kept"])
    file = tmp_path / "kip.toml"
    unready = "port = ['8080']\nready = 'tcp:8080'\nready-timeout = '60s'\n"
    file.write_text(f"[proc.web]\ncommand = ['sleep', '2000']\nvolume = ['./kept:/kept']\n{unready}")
    words = [kip.program, "--data", kip.data, "apply", "-f", file, "--replace"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as applying:
        wait_for("the new one runs", lambda: any(v["name"] == "web-r1" and v["pids"] for v in kip.json("ps")), 30)
        refused = [kip.refused("start", "web"), kip.refused("rename", "web", "other")]
        assert all("web is being replaced" in line for line in refused), refused
        kip.cli("down", "--all", timeout=90)
        assert kip.wait_dead() == 0
        applying.communicate(timeout=60)
        assert applying.returncode != 0
    kip.up()
    old.wait_state("running", 30)
    assert kip.names() == ["web"] and old.exec("cat", "/proc/2/cmdline").stdout.split("\0")[:2] == ["sleep", "1000"]


def test_one_that_goes_at_its_end_is_there_after_a_crash(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """The next daemon does not take the stop for another proc for its end either."""
    kip = fresh_kip()
    kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_GONE]
    (tmp_path / "kept").mkdir()
    old = kip.run("goes", ["sleep", "1000"], flags=["-v", f"{tmp_path}/kept:/kept", "--rm"])
    kip.kill()
    kip.up("--fault-at", "replace-failed")
    file = tmp_path / "kip.toml"
    unready = "port = ['8080']\nready = 'tcp:8080'\nready-timeout = '500ms'\n"
    file.write_text(f"[proc.goes]\ncommand = ['sleep', '2000']\nvolume = ['./kept:/kept']\n{unready}")
    kip.cli("apply", "-f", file, "--replace", check=False)
    assert kip.wait_dead(60) == -signal.SIGKILL
    kip.up()
    old.wait_state("running", 30)
    kip.cli("stop", "goes")
    wait_for("it is gone", lambda: kip.names() == [], 20)


@dataclass
class Waiting:
    """`kip apply --replace` of the proc `web`, where the new proc waits to be ready."""

    kip: Kip
    directory: Path
    applying: subprocess.Popen[str] | None = None

    def begin(self, old: str = "", new: str = "", stopped: bool = False) -> None:
        """With `old` in its table the proc is there; one with `new` is to take its place."""
        file = self.directory / "kip.toml"
        file.write_text(f"[proc.web]\ncommand = 'sleep 1000'\n{old}")
        self.kip.cli("apply", "-f", file)
        if stopped:
            self.kip.cli("stop", "web")
        waits = f"volume = ['{self.directory}:/watched:ro']\nready = 'exec:test -e /watched/go'\nready-timeout = '60s'\n"
        file.write_text(f"[proc.web]\ncommand = 'sleep 2000'\n{waits}{new}")
        words = [self.kip.program, "--data", self.kip.data, "apply", "-f", file, "--replace"]
        self.applying = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        runs = lambda: any(view["name"] == "web-r1" and view["pids"] for view in self.kip.json("ps"))
        wait_for("the new one runs", runs, 30)

    def end(self) -> str:
        """Lets the new one be ready; what is said of it."""
        assert self.applying
        (self.directory / "go").touch()
        _, said = self.applying.communicate(timeout=60)
        return said


def binds(port: int, address: str = "") -> bool:
    """Whether a program of the host can have the port."""
    try:
        with socket.create_server((address, port)):
            return True
    except OSError:
        return False


# promise files: a new proc that cannot have its ports takes nothing: the old one has its own, and
#   one that is stopped none
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_ports_that_cannot_pass(kip: Kip, tmp_path: Path, stopped: bool) -> None:
    own, other = free_port(), free_port()
    waiting = Waiting(kip, tmp_path)
    # At one address instead of all, the kernel gives a port to one of the two.
    waiting.begin(f"port = ['{own}:8080']\n", f"port = ['127.0.0.1:{own}:8080', '{other}:8081']\n", stopped)
    assert binds(own) == stopped
    with socket.create_server(("127.0.0.1", other)):
        said = waiting.end()
    stays = "the one that is there stays stopped" if stopped else "the one that is there runs on"
    assert f"port {other}/tcp is taken" in said and stays in said, said
    assert kip.names() == ["web"]
    assert binds(own) == stopped and binds(other)
    if stopped:
        kip.cli("start", "web")
    assert not binds(own)


# promise files: a proc that is replaced while it sleeps is woken for its stop signal only; its
#   probes answer all the while
def test_a_sleeper_is_replaced(kip: Kip, tmp_path: Path) -> None:
    probe = free_port()
    web = Described(kip, tmp_path, "nginx", f"probe = ['{probe}=http:8080/page.html']\n")
    web.begin()
    Proc(kip, "web").sleep()
    with clients(probe, stays=False):
        web.write()
        assert web.apply() == {"web": "replace"}
    assert page(web.port) == web.shown()
    assert kip.names() == ["web"]
