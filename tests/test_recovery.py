"""kip up and kip-keeper are killed with SIGKILL, while they are quiescent and at every recorded step, and started again: running procs run
on and are adopted, parked ones wake, what was half done is finished or undone, nothing is lost and nothing is left.

The daemon kills itself when it first reaches a step given by `kip up --fault-at STEP`; `--fault-at list` names the steps."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import kip as kip_module
from harness import logged
from harness import leftovers, servers
from harness.clients import Lines, Redis, http_get, listens
from harness.kip import Failed, Kip, Proc
from harness.rows import one_in
from harness.wait import wait_for

# A daemon that finds something half done may say so.
RECOVERING = [*logged.DAEMON_KILLED, *logged.KEEPER_KILLED, *logged.PAGER_KILLED, *logged.KEEPER_GONE]


def steps() -> list[str]:
    """The steps, from the binary; when there is no binary the tests say so."""
    try:
        done = subprocess.run(
            [kip_module.binary(), "up", "--fault-at", "list"], capture_output=True, text=True, timeout=20
        )
    except FileNotFoundError:
        return ["no kip is built"]
    # Those of taking over from another data directory are in test_adopt.py, that of a backup is in
    # test_backup.py, of copying and cloning in test_clone.py, of checkpoints in
    # test_checkpoints.py, of falling back in test_fallback.py, of replacing residents in
    # test_upgrade.py, of an update in test_update.py, of a replacement in test_rolling.py, of a new
    # name in test_rename.py, of templates in test_templates.py, of the runtime socket in
    # test_runtime.py, of spawned procs in test_spawn.py.
    elsewhere = ("adopt-", "backup-", "checkpoint-", "clone-", "copy-", "older-", "rename-", "replace-", "rollback-", "runtime-", "spawn-", "supersede-",
                 "template-", "update-")
    here = [step for step in done.stdout.split() if not step.startswith(elsewhere)]
    return here if done.returncode == 0 else [f"--fault-at list: exit {done.returncode}"]


@pytest.fixture
def torture_tar(tmp_path: Path) -> Path:
    return servers.torture().tarball(tmp_path)


def run_torture(kip: Kip, tar: Path, name: str = "worker") -> Proc:
    server = servers.torture()
    return kip.run(name, server.command, ports=server.published, tar=tar)


def restart(kip: Kip, *flags: str) -> None:
    kip.expected += RECOVERING
    if kip.alive():
        kip.kill()
    kip.up(*flags)


# Quiescent


# promise recovery: running procs run on and are adopted, connections and output included
# held by: this, `kip_logs::tests::a_killed_daemon_loses_nothing`
def test_killed_while_a_proc_runs(fresh_kip: Callable[..., Kip], torture_tar: Path) -> None:
    """The program does not notice: same processes, same connections; what it writes meanwhile is in the log.

    Output is written to the log before it is taken out of its pipe, so that none is lost: a daemon that is killed in between
    leaves its newest lines to the next one, which writes them again (docs/design/upgrade.md)."""
    kip = fresh_kip()
    proc = run_torture(kip, torture_tar)
    client = Lines(proc.port())
    client.check()
    port, pids = proc.port(), proc.inspect()["pids"]
    client.ask("say before")
    for i in range(3):
        kip.kill()
        assert client.ask(f"say orphaned {i}") == "said", "the proc lives without the daemon"
        assert Lines(port).ask("echo new client") == "new client", "and is reached without it"
        client.check()
        restart(kip)
        view = proc.inspect()
        # The program forks and reaps in every check: of its processes the first ones stay.
        assert (view["state"], view["pids"][:3]) == ("running", pids[:3])
        client.ask(f"say adopted {i}")
    wanted = ["before"] + [f"{word} {i}" for i in range(3) for word in ("orphaned", "adopted")]
    wait_for("the last line is in the log", lambda: "adopted 2" in proc.logs(), 30)
    assert without_repeats(proc.logs().splitlines(), 3) == wanted, proc.logs()
    assert any(e["kind"] == "adopted" for e in kip.events())
    proc.sleep()
    client.check()
    client.close()


def without_repeats(lines: list[str], most: int) -> list[str]:
    """Distinct lines as they were written, if what a killed daemon had just written is there again: at most so many times."""
    whole: list[str] = []
    rest: list[str] = []  # of a repeat that goes on
    for line in lines:
        if line not in whole:
            assert not rest, lines
            whole.append(line)
        elif rest[:1] == [line]:
            rest = rest[1:]
        else:  # a repeat begins: it goes up to the newest line
            rest, most = whole[whole.index(line) + 1 :], most - 1
            assert most >= 0, lines
    return whole


# promise K1: new clients are accepted while the program is not in memory
# promise recovery: parked ones still wake; clients that came meanwhile are served
def test_killed_while_a_proc_is_parked(fresh_kip: Callable[..., Kip], torture_tar: Path) -> None:
    """Clients that come while there is neither proc nor daemon wait, and are served by the next daemon."""
    kip = fresh_kip()
    proc = run_torture(kip, torture_tar)
    port, steady = proc.port(), Lines(proc.port())
    steady.check()
    generation = proc.sleep()["generation"]
    kip.kill()
    late = Lines(port)  # the handshake completes: the socket is held
    late.socket.sendall(b"echo from the queue\n")
    restart(kip)
    assert late.reader.readline() == b"from the queue\n"
    steady.check()
    assert proc.inspect()["generation"] == generation
    proc.sleep()
    kip.kill()
    restart(kip)
    assert proc.state == "parked", "a sleeper that nobody called sleeps on"
    steady.check()
    proc.sleep()
    kip.kill()
    restart(kip)
    proc.wake()
    steady.check()


# promise recovery: a timer that became due meanwhile
def test_timer_due_while_the_daemon_is_dead(fresh_kip: Callable[..., Kip], torture_tar: Path) -> None:
    """Where the machine takes longer to park it than the timers have, nothing was tested: then with longer ones."""
    kip = fresh_kip()
    server = servers.torture()
    proc = kip.run("worker", server.command, ports=server.published, tar=torture_tar, flags=["--tick", "100ms"])
    client = Lines(proc.port())
    for first_ms, second_ms in ((1500, 6000), (5000, 20000), (15000, 60000)):
        armed = time.monotonic()
        overdue = client.ask(f"arm timerfd {first_ms}").split()[1]
        later = client.ask(f"arm nanosleep {second_ms}").split()[1]
        kip.cli("sleep", proc.name, "--to", "parked", "--clock", "auto")
        asleep = proc.state == "parked"
        kip.kill()
        in_time = asleep and time.monotonic() - armed < first_ms / 1000
        time.sleep(max(0.0, armed + first_ms / 1000 + 0.1 - time.monotonic()))  # the first becomes due with no daemon there
        restart(kip)
        proc.wait_state("running", 30)
        fired = lambda timer: lambda: client.values(f"result {timer}")["fired"] == "1"  # noqa: E731
        wait_for("the overdue timer has fired", fired(overdue), 30)
        kip.cli("sleep", proc.name, "--to", "parked", "--clock", "auto")
        in_time &= time.monotonic() - armed < second_ms / 1000
        view = proc.wait_state("running", second_ms / 1000 + 30)
        wait_for("the other fires", fired(later), second_ms / 1000 + 30)
        if in_time:
            stall_us = view["last_wake"]["total_us"]  # how long a wake may take, the bench says
            assert -1000 <= int(client.values(f"result {later}")["miss_mono_us"]) < 400_000 + stall_us
            return
    raise AssertionError("parking takes more than fifteen seconds here")


# Says when a wait ended that was to end so many milliseconds after the program began, and when
# that was, CLOCK_MONOTONIC in microseconds.
WAITS = """
import sys, time
began = time.monotonic()
end = began + int(sys.argv[1]) / 1e3
print("ready", flush=True)
time.sleep(end - time.monotonic())
print(int(end * 1e6), int(time.monotonic() * 1e6), flush=True)
time.sleep(1000)
"""


# promise recovery: overdue timers are met within 50 ms of the daemon's return, the wake aside
@pytest.mark.measures
def test_overdue_timers_are_met_at_once(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    kip.kill()
    restart(kip)
    waits = ["/usr/bin/python3", "-c", WAITS]
    procs = [kip.run(f"overdue-{n}", [*waits, str(4000 + 200 * n)], flags=["--tick", "100ms"]) for n in range(3)]
    for proc in procs:
        kip.cli("sleep", proc.name, "--to", "parked", "--clock", "auto")
    assert {proc.state for proc in procs} == {"parked"}, "they were to sleep before the first is due"
    kip.kill()
    time.sleep(5)
    restart(kip)
    ready = [event["at_ms"] for event in kip.events() if event["kind"] == "ready"][-1]
    for proc in procs:
        view = proc.wait_state("running", 30)
        wait_for("its wait ends", lambda proc=proc: len(proc.logs().split()) == 3, 30)
        woken = view["last_wake"]
        assert woken["at_ms"] - ready < 50 + woken["total_us"] / 1e3 * len(procs), (ready, woken)
        planned, ended = map(int, proc.logs().split()[1:])
        assert 0 <= ended - planned < 30_000_000, "not early, and with the daemon's return"


# promise recovery: how a program ended meanwhile is known
def test_proc_that_ends_while_the_daemon_is_dead(fresh_kip: Callable[..., Kip]) -> None:
    """How it ended is known all the same."""
    kip = fresh_kip()
    script = "test -e /tmp/again && exec sleep 1000; touch /tmp/again; echo hello; sleep 3; echo bye; exit 6"
    proc = kip.run("brief", ["sh", "-c", script])
    pids = proc.inspect()["pids"]
    kip.kill()
    wait_for("it ends", lambda: not any(map(leftovers.is_alive, pids)), 30)
    restart(kip)
    view = proc.wait_state("stopped", 30)
    assert view["exit"] == "exit code 6", view["exit"]
    wait_for("its last words are in the log", lambda: proc.logs().splitlines() == ["hello", "bye"], 30)
    proc.start()
    proc.wait_state("running", 30)


# promise recovery: SIGTERM ends the daemon only
def test_sigterm_ends_the_daemon_only(fresh_kip: Callable[..., Kip], torture_tar: Path) -> None:
    kip = fresh_kip()
    proc = run_torture(kip, torture_tar)
    client = Lines(proc.port())
    pids = proc.inspect()["pids"]
    assert kip.daemon
    kip.daemon.send_signal(signal.SIGTERM)
    assert kip.wait_dead() == 0
    client.check()
    kip.up()
    assert proc.inspect()["pids"][:3] == pids[:3]
    client.check()


# promise recovery: many procs, each as it was
def test_many_procs_are_adopted(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """Running, parked and stopped ones, each as it was."""
    kip = fresh_kip()
    server = servers.lighttpd()
    tar = server.tarball(tmp_path)
    procs = [kip.run(f"web-{i}", server.command, ports=server.published, tar=tar) for i in range(9)]
    for i, proc in enumerate(procs):
        if i % 3 == 1:
            proc.sleep()
        elif i % 3 == 2:
            proc.stop()
    before = {v["name"]: (v["state"], v["pids"], v["ports"], v["generation"]) for v in kip.json("ps")}
    kip.kill()
    restart(kip)
    assert {v["name"]: (v["state"], v["pids"], v["ports"], v["generation"]) for v in kip.json("ps")} == before
    for i, proc in enumerate(procs):
        if i % 3 == 2:
            proc.start()
        else:
            assert http_get(proc.port(), "/page.html") == servers.PAGE


# The keeper


def keeper_pid(kip: Kip) -> int:
    return kip.info()["keeper_pid"]


# promise K7: the same: the keeper
# held by: this, `tests/test_recovery.py::test_keeper_is_killed_in_the_middle`
# promise recovery: a killed keeper is replaced and given everything
# held by: this, `crates/keeper/tests/keeper.rs::a_killed_keeper_is_noticed_and_replaced`
# promise invariants: 2 daemon and keeper hold every descriptor
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "parked"])
def test_keeper_is_killed(fresh_kip: Callable[..., Kip], torture_tar: Path, asleep: bool) -> None:
    """The daemon starts another and gives it everything; after that the daemon may die as well."""
    kip = fresh_kip()
    kip.expected += RECOVERING
    proc = run_torture(kip, torture_tar)
    port, client = proc.port(), Lines(proc.port())
    client.check()
    for _ in range(2):
        if asleep:
            proc.sleep()
        old = keeper_pid(kip)
        os.kill(old, signal.SIGKILL)
        wait_for("another keeper is there", lambda old=old: kip.new_keeper(old), 30)
        client.check()
        if asleep:
            proc.sleep()
        kip.kill()
        client.socket.sendall(b"echo held\n")
        restart(kip)
        assert client.reader.readline() == b"held\n"
        assert Lines(port).ask("echo new") == "new"


def test_keeper_is_killed_in_the_middle(fresh_kip: Callable[..., Kip], torture_tar: Path) -> None:
    """While procs fall asleep and wake all the time. A transition may fail and say so; nothing may be lost."""
    kip = fresh_kip()
    kip.expected += RECOVERING
    proc = run_torture(kip, torture_tar)
    client = Lines(proc.port())
    client.check()
    for i in range(6):
        old = keeper_pid(kip)
        killer = threading.Timer(0.01 * i, lambda pid=old: os.kill(pid, signal.SIGKILL))
        killer.start()
        kip.cli("sleep", "worker", "--to", "parked", "--clock", "auto", check=False)
        killer.join()
        assert client.ask("echo there") == "there"
        wait_for("another keeper is there", lambda old=old: kip.new_keeper(old), 30)
        client.check()
    proc.sleep()
    client.check()


def test_daemon_is_killed_in_the_middle(fresh_kip: Callable[..., Kip], torture_tar: Path) -> None:
    """At arbitrary moments: the steps' own tests cover the recorded ones, this covers those between."""
    kip = fresh_kip()
    proc = run_torture(kip, torture_tar)
    client = Lines(proc.port())
    client.check()
    for i in range(10):
        killer = threading.Timer(0.004 + 0.006 * i, kip.kill)
        killer.start()
        kip.cli("sleep", "worker", "--to", "parked", "--clock", "auto", check=False)
        client.socket.sendall(b"echo there\n")
        killer.join()
        restart(kip)
        assert client.reader.readline() == b"there\n"
        client.check()
    proc.sleep()
    client.check()


# At every recorded step


class Story:
    """A proc's life that passes every step. Whenever the daemon dies it is started again without the fault, and the
    command that was under way is given again if what it was to do has not been done."""

    def __init__(self, kip: Kip, tar: Path, step: str):
        self.kip, self.tar = kip, tar
        # A client may have its answer before the last steps of its wake; a command has it after all
        # of them.
        self.moment = 0.1 if step.startswith("wake") else 0.0
        self.proc = Proc(kip, "worker")
        self.died_in: str | None = None
        self.client: Lines | None = None
        self.is_unused = False

    def revive(self, act: str) -> None:
        """The daemon is dead or dying: it has said that it would."""
        assert self.died_in is None, (
            f"the daemon died in {self.died_in} and again in {act}\n{self.kip.stderr()[-3000:]}"
        )
        assert self.kip.wait_dead(20) == -signal.SIGKILL, (
            f"{act}: the daemon ended by itself\n{self.kip.stderr()[-3000:]}"
        )
        self.died_in = act
        restart(self.kip)

    def act(self, what: str, do: Callable[[], object], done: Callable[[], bool]) -> None:
        """Does one thing; if the daemon dies in it, the next one may have finished or undone it."""
        try:
            do()
        except Failed as failure:
            if not self.dies(5):
                raise AssertionError(f"{what} failed although the daemon lives: {failure}") from failure
        try:
            is_done = not self.dies() and done()
        except Failed as failure:  # it lived a moment longer than that
            if not self.dies(5):
                raise AssertionError(f"{what} was done and nobody says so: {failure}") from failure
            is_done = False
        for _ in range(5):  # one that was frozen in the middle of work goes on with it at once: again
            if is_done or self.dies() or not self.was_at_work():
                break
            try:
                do()
                is_done = done()
            except Failed:
                break
        if not is_done and self.dies():
            self.revive(what)
            wait_for(f"{what}: the proc is quiescent", self.quiescent, 30)
            if not done():
                do()
            is_done = done()
        assert is_done, f"{what} has not been done: {self.view()}"

    def was_at_work(self) -> bool:
        view = self.view()
        woken = view and view["last_wake"]
        return isinstance(woken, dict) and bool(kip_module.IN_WORK.search(woken["trigger"]))

    def dies(self, within: float | None = None) -> bool:
        """Whether it is dead. Where a step may come after the answer it gets a moment."""
        try:
            self.kip.wait_dead((self.moment if within is None else within) if self.died_in is None else 0.0)
        except subprocess.TimeoutExpired:
            return False
        return True

    def view(self) -> dict[str, object] | None:
        return next((v for v in self.kip.json("ps") if v["name"] == "worker"), None)

    def state(self) -> object:
        view = self.view()
        return view and view["state"]

    def quiescent(self) -> bool:
        return self.state() in (None, "running", "hibernated", "parked", "archived", "stopped")

    def check(self, client: Lines) -> None:
        """Talks to the program; the daemon may die in waking it, then the answer comes from the next one's wake."""
        client.socket.sendall(b"check 2000\n")
        for _ in range(120):
            client.socket.settimeout(0.5)
            try:
                answer = client.reader.readline()
                break
            except TimeoutError:
                client.reader = client.socket.makefile("rb")  # a reader that timed out once does not read on
                if self.died_in is None and self.dies():
                    self.revive("a wake by a request")
        else:
            raise AssertionError("a request is not answered within a minute")
        client.socket.settimeout(30)
        assert answer.startswith(b"ok "), answer
        if self.dies():  # after the answer, in the last steps of the wake
            self.revive("the end of a wake")
            assert client.ask("check 2000").startswith("ok ")

    def run(self) -> None:
        """The acts in order. Once it has died and been revived two more acts show that all is well, and it ends."""
        left = None
        acts = [self.start, self.hibernate, self.talk]
        acts += [self.sleep, self.talk, self.sleep, self.wake, self.talk]
        acts += [self.archive, self.talk, self.archive, self.wake, self.sleep, self.stop]
        for act in [*acts, self.start_again, self.talk, self.collect, self.talk]:
            act()
            if self.died_in is not None:
                left = 2 if left is None else left - 1
            if left == 0:
                break
        self.act("rm", lambda: self.kip.cli("rm", "worker", "--force"), lambda: self.state() is None)

    def is_in(self, state: str) -> Callable[[], bool]:
        return lambda: self.state() == state

    def start(self) -> None:
        def start_run() -> None:
            if self.state() is not None:  # undone to stopped
                self.proc.remove()
            run_torture(self.kip, self.tar)

        self.act("run", start_run, self.is_in("running"))
        self.connect()
        self.talk()

    def connect(self) -> None:
        wait_for("it listens", lambda: listens(self.proc.port()), 30)
        self.client = Lines(self.proc.port())

    def talk(self) -> None:
        assert self.client
        self.check(self.client)

    def sleep(self) -> None:
        self.act("sleep", lambda: self.fall_asleep("parked"), self.is_in("parked"))

    def archive(self) -> None:
        self.act("archive", lambda: self.fall_asleep("archived"), self.is_in("archived"))

    def hibernate(self) -> None:
        self.act("hibernate", lambda: self.fall_asleep("hibernated"), self.is_in("hibernated"))

    def fall_asleep(self, tier: str) -> None:
        """One that was frozen in the middle of work goes on with it at once: again, as `Proc.sleep` does."""
        for _ in range(10):
            self.kip.cli("sleep", "worker", "--to", tier, "--clock", "auto")
            view = self.proc.quiescent()
            woken = view["last_wake"]
            if view["state"] == tier or not woken or not kip_module.IN_WORK.search(woken["trigger"]):
                return

    def wake(self) -> None:
        self.act("wake", lambda: self.kip.cli("wake", "worker"), self.is_in("running"))

    def stop(self) -> None:
        self.act("stop", lambda: self.kip.cli("stop", "worker"), self.is_in("stopped"))

    def start_again(self) -> None:
        self.act("start", lambda: self.kip.cli("start", "worker"), self.is_in("running"))
        self.connect()

    def collect(self) -> None:
        """What it left in the store when it was started again is deleted, after two looks."""

        def look() -> dict[str, list[object]]:
            return self.kip.json("snapshot", "gc", "--dry-run", "--grace", "0s")

        def collect_twice() -> None:
            if not self.is_unused:
                wait_for("something is unused", lambda: look()["waiting"] or look()["deleted"], 30)
                self.is_unused = True
            for _ in range(2):
                self.kip.cli("snapshot", "gc", "--grace", "0s")

        self.act("collect", collect_twice, lambda: not look()["waiting"] and not look()["deleted"])


# promise K7: any of our processes may be killed at any moment: the daemon
# held by: this, `tests/test_recovery.py::test_daemon_is_killed_in_the_middle`
# promise parking: it is recorded before the processes go
# held by: this, `tests/test_recovery.py::test_data_lives_through_crashes`
# promise recovery: killed at each of the recorded steps, started again: finished or undone, nothing
#   is left
# held by: this, `tests/test_recovery.py::test_there_are_steps`
# promise recovery: a dump that is called off is not noticed by the program
# held by: this, `tests/test_trouble.py::test_disk_full_while_parking`
# promise recovery: `kip down` ends everything
# held by: this, `kip_cli::commands::tests::down_reports_what_it_ended`
# promise archive: the daemon is killed at every durable step of archiving (packs, front, reading
#   back, head) and fetching, and at every step of a wake from the store, also in the middle of a
#   front: nothing is lost, nothing is left
# held by: this, `tests/test_archive.py::test_killed_at_a_step_of_a_wake_from_the_store`,
#   `tests/test_archive.py::test_archived_it_outlives_the_daemon`
# promise invariants: 6 intent first; any proc can always be ended
# held by: this, `kip_types::lifecycle::tests::always_can_end`
@pytest.mark.parametrize("step", one_in(3, steps()))
def test_killed_at_step(fresh_kip: Callable[..., Kip], torture_tar: Path, tmp_path: Path, step: str) -> None:
    (tmp_path / "store").mkdir()
    kip = fresh_kip("--store", str(tmp_path / "store"), start=False)
    kip.expected += RECOVERING
    kip.up("--fault-at", step)
    story = Story(kip, torture_tar, step)
    story.run()
    assert story.died_in, f"the daemon never reached {step}"
    # `kip down` at the end of the fixture asserts that nothing is left of all this.


def test_there_are_steps() -> None:
    found = steps()
    assert len(found) >= 15, found
    for part in ("start", "hibernate", "park", "archive", "fetch", "wake", "stop", "remove", "gc"):
        assert any(part in step for step in found), f"no step of {part} in {found}"


# promise invariants: 1 the last copy goes last
# held by: this, `kip_snapshot::tests::a_sealed_generation_verifies_and_every_flipped_bit_is_found`
@pytest.mark.parametrize("lazy", ["off", pytest.param("on", marks=pytest.mark.soak)])
def test_data_lives_through_crashes(fresh_kip: Callable[..., Kip], lazy: str) -> None:
    """redis with 20,000 keys, the daemon killed at a handful of steps one after the other; when it is woken lazily, without
    a working set, most of its memory is paged out each time it is parked."""
    kip = fresh_kip()
    server = servers.redis()
    proc = kip.run("redis", server.command, ports=server.published, flags=["--lazy", lazy, "--prefetch", "off"])
    client = Redis(proc.port())
    client.ask_all([("SET", f"k{i}", f"v{i}" * 3) for i in range(20_000)])
    digest = client.ask("DEBUG", "DIGEST")
    # It wakes natively, and CRIU has no threads to hold.
    for step in [s for s in steps() if s.startswith(("park", "wake")) and s != "wake-held"]:
        if lazy == "on":
            proc.sleep()
            assert client.ask("GET", "k7") == b"v7v7v7"
        restart(kip, "--fault-at", step)
        kip.cli("sleep", "redis", "--to", "parked", "--clock", "auto", check=False)
        if kip.alive():
            client.socket.sendall(Redis.pack(("PING",)))
            try:
                assert kip.wait_dead(30) == -signal.SIGKILL
            except subprocess.TimeoutExpired:
                pytest.fail(f"{step} was not reached")
            restart(kip)
            assert client.answer() == "PONG"
        else:
            restart(kip)
        assert client.ask("DEBUG", "DIGEST") == digest, step


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("turn", range(30))
def test_killed_at_random(turn: int, fresh_kip: Callable[..., Kip], torture_tar: Path) -> None:
    """A daemon of its own each: a machine has room for sixteen."""
    test_daemon_is_killed_in_the_middle(fresh_kip, torture_tar)
