"""What an owner asks of a proc while another one takes its place (`kip apply --replace`): a start that has begun comes to its end first,
and a stop counts, whichever of the two has the name by then."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import logged
from harness.clients import listens
from harness.kip import Kip, Proc
from harness.wait import wait_for
from test_rolling import Described, binds, clients, page

# A program that finds another one at work says so in the volume.
ALONE = "exec 9>/kept/lock; flock -n 9 || touch /kept/both; exec \"$@\""


class Requested(Described):
    """With a volume its programs say if two of them run."""

    def __init__(self, kip: Kip, directory: Path, volume: bool):
        self.volume, self.kept = volume, directory / "kept"
        self.kept.mkdir()
        super().__init__(kip, directory, "nginx", "volume = ['./kept:/kept']\n" if volume else "")

    def write(self, more: str = "") -> None:
        super().write(more)
        if self.volume:
            text = self.file.read_text()
            self.file.write_text(text.replace("command = [", f"command = ['sh', '-c', '''{ALONE}''', 'sh', ", 1))

    def asked(self, *words: str | Path) -> subprocess.Popen[str]:
        words = (self.kip.program, "--data", self.kip.data, *words)
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def replacing(self) -> subprocess.Popen[str]:
        return self.asked("apply", "-f", self.file, "--replace")

    def is_whole(self) -> None:
        """One proc is there, with its one directory, and no two ran at once."""
        assert self.kip.names() == ["web"]
        directories = [d.name for d in (self.kip.data / "procs").iterdir() if d.name[0] != "."]
        assert len(directories) == 1, directories
        assert not (self.kept / "both").exists()


def restarted(kip: Kip, *flags: str) -> None:
    kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_GONE]
    kip.kill()
    kip.up(*flags)


def state(kip: Kip, name: str = "web") -> str | None:
    return next((view["state"] for view in kip.json("ps") if view["name"] == name), None)


def unready(web: Requested) -> None:
    """The next proc waits for a file before it is ready."""
    web.write("ready = 'exec:test -e /watched/go'\nready-timeout = '60s'\n")
    text = web.file.read_text()
    watched = f"volume = ['{web.directory}:/watched:ro'"
    web.file.write_text(text.replace("volume = [", f"{watched}, ") if web.volume else f"{text}{watched}]\n")


def runs(kip: Kip, name: str) -> bool:
    return any(view["name"] == name and view["pids"] for view in kip.json("ps"))


# promise files: a start that has begun comes to its end before the proc is replaced: the two never
#   own the name, a port or a volume at once, and no connection is refused
@pytest.mark.parametrize("volume", [False, True], ids=["beside", "after"])
def test_a_start_that_has_begun(fresh_kip: Callable[..., Kip], tmp_path: Path, volume: bool) -> None:
    kip = fresh_kip()
    web = Requested(kip, tmp_path, volume)
    web.begin()
    kip.cli("stop", "web")
    restarted(kip, "--fault-at", "start-recorded:2000")
    web.write()
    with web.asked("start", "web") as starting:
        wait_for("it is being started", lambda: state(kip) == "starting", 30)
        with web.replacing() as replacing:
            _, said = starting.communicate(timeout=60)
            assert starting.returncode == 0, said
            wait_for("it listens", lambda: listens(web.port), 30)
            with clients(web.port, stays=not volume):
                _, said = replacing.communicate(timeout=90)
                assert replacing.returncode == 0, said
                assert page(web.port) == web.shown()
    web.is_whole()
    assert Proc(kip, "web").inspect()["spec"]["replaced"] == 1


# promise files: the first start of a proc comes to its end before the proc is replaced
@pytest.mark.parametrize("volume", [False, True], ids=["beside", "after"])
def test_a_first_start_that_has_begun(fresh_kip: Callable[..., Kip], tmp_path: Path, volume: bool) -> None:
    kip = fresh_kip("--fault-at", "start-recorded:2000")
    web = Requested(kip, tmp_path, volume)
    web.write("wait-ready = true\n")
    with web.asked("apply", "-f", web.file) as making:
        wait_for("it is being started", lambda: state(kip) == "starting", 30)
        web.write()
        with web.replacing() as replacing:
            _, said = making.communicate(timeout=60)
            assert making.returncode == 0, said
            with clients(web.port, stays=not volume):
                _, said = replacing.communicate(timeout=90)
                assert replacing.returncode == 0, said
                assert page(web.port) == web.shown()
    web.is_whole()


# promise files: a start by its restart policy comes to its end before another proc gets the ports
def test_it_starts_again_by_itself_meanwhile(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    kip = fresh_kip()
    web = Requested(kip, tmp_path, volume=False)
    web.more = "restart = 'always'\n"
    web.begin()
    restarted(kip, "--fault-at", "start-ports:2000")
    unready(web)
    with web.replacing() as replacing:
        wait_for("the new one runs", lambda: runs(kip, "web-r1"), 30)
        kip.cli("kill", "-s", "SEGV", "web")
        wait_for("it is being started again", lambda: state(kip) == "starting", 30)
        (tmp_path / "go").touch()
        wait_for("the new one is there", lambda: kip.names() == ["web"] or state(kip) == "running", 30)
        wait_for("it listens", lambda: listens(web.port), 30)
        with clients(web.port):
            _, said = replacing.communicate(timeout=90)
            assert replacing.returncode == 0, said
            assert page(web.port) == web.shown()
    web.is_whole()


def starts_as_it_was(web: Requested, shown: bytes) -> None:
    """It is stopped, has no port, and can be started and replaced."""
    wait_for("nothing else is there", lambda: web.kip.names() == ["web"], 30)
    assert state(web.kip) == "stopped"
    assert binds(web.port)
    web.is_whole()
    web.kip.cli("start", "web")
    wait_for("it listens", lambda: listens(web.port), 30)
    assert page(web.port) == shown
    web.write()
    assert web.apply() == {"web": "replace"}
    assert page(web.port) == web.shown()


# promise files: a stop that an owner asks for while a proc is replaced ends the replacement: the
#   proc is stopped, and stays so
@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("volume", [False, True], ids=["beside", "after"])
def test_a_stop_counts(kip: Kip, tmp_path: Path, volume: bool, how: str) -> None:
    web = Requested(kip, tmp_path, volume)
    web.begin()
    shown = web.shown()
    unready(web)
    with web.replacing() as replacing:
        wait_for("the new one runs", lambda: runs(kip, "web-r1"), 30)
        kip.cli(how, "web")
        _, said = replacing.communicate(timeout=30)
    assert replacing.returncode == 1
    assert "web was stopped while it was being replaced; the one that is there stays stopped" in said, said
    starts_as_it_was(web, shown)


# promise files: a stop that ended a replacement counts for the next daemon, too
@pytest.mark.parametrize("volume", [False, True], ids=["beside", "after"])
def test_a_stop_counts_for_the_next_daemon(fresh_kip: Callable[..., Kip], tmp_path: Path, volume: bool) -> None:
    kip = fresh_kip()
    web = Requested(kip, tmp_path, volume)
    web.begin()
    shown = web.shown()
    restarted(kip, "--fault-at", "replace-failed")
    unready(web)
    with web.replacing() as replacing:
        wait_for("the new one runs", lambda: runs(kip, "web-r1"), 30)
        # The daemon dies when it finds that the replacement is over, before it acts on that.
        kip.cli("stop", "web", check=False)
        assert kip.wait_dead(60) == -signal.SIGKILL
        replacing.communicate(timeout=30)
    kip.up()
    starts_as_it_was(web, shown)


# promise files: a stop counts where the old proc is about to be started again, and where the new
#   one is about to get its name
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_stop_of_one_that_is_put_back(fresh_kip: Callable[..., Kip], tmp_path: Path, how: str) -> None:
    kip = fresh_kip()
    web = Requested(kip, tmp_path, volume=True)
    web.begin()
    shown = web.shown()
    restarted(kip, "--fault-at", "replace-gives-back:2000")
    web.write("ready = 'http:8080/none'\nready-timeout = '500ms'\n")
    with web.replacing() as replacing:
        wait_for("the new one has ended", lambda: state(kip, "web-r1") == "stopped", 30)
        kip.cli(how, "web")
        assert state(kip) == "stopped"
        _, said = replacing.communicate(timeout=30)
    assert replacing.returncode == 1 and "stays stopped" in said, said
    starts_as_it_was(web, shown)


@pytest.mark.parametrize("step", ["replace-ports", "replace-switched"])
def test_a_stop_in_the_moment_of_the_switch(fresh_kip: Callable[..., Kip], tmp_path: Path, step: str) -> None:
    """It is the new one that ends, for it has the name."""
    kip = fresh_kip()
    web = Requested(kip, tmp_path, volume=False)
    web.begin()
    restarted(kip, "--fault-at", f"{step}:2000")
    unready(web)
    with web.replacing() as replacing:
        wait_for("the new one runs", lambda: runs(kip, "web-r1"), 30)
        (tmp_path / "go").touch()
        wait_for("the step is reached", lambda: f'the daemon waits step="{step}"' in kip.stderr(), 30)
        kip.cli("stop", "web")
        assert state(kip) == "stopped"
        replacing.communicate(timeout=30)
    starts_as_it_was(web, web.shown())


# promise files: one that is removed meanwhile is not replaced, and neither is there
@pytest.mark.parametrize("volume", [False, True], ids=["beside", "after"])
def test_a_removal_counts(kip: Kip, tmp_path: Path, volume: bool) -> None:
    web = Requested(kip, tmp_path, volume)
    web.begin()
    unready(web)
    with web.replacing() as replacing:
        wait_for("the new one runs", lambda: runs(kip, "web-r1"), 30)
        if not volume:
            assert "kip stop" in kip.refused("rm", "web")
        kip.cli("rm", "web", *(["--force"] if not volume else []))
        (tmp_path / "go").touch()
        _, said = replacing.communicate(timeout=30)
    assert replacing.returncode == 1
    assert "web is another proc by now, or none; the one that was there has been removed" in said, said
    wait_for("none is there", lambda: kip.names() == [], 30)
    assert binds(web.port)
    assert not (web.kept / "both").exists()
