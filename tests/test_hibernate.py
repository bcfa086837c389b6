"""Hibernation in place: memory goes to a private swap file and comes back by faults or with the working set, and neither
the program nor its clients notice. Real servers, and the torture program that notices everything."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness import logged, programs, servers
from harness.clients import Http, Lines, Redis, http_get, talking, tcp_states
from harness.kip import Kip, Proc
from harness.rows import rest_in_soak
from harness.wait import TimedOut, wait_for
from test_api import local

CYCLES = 20
WAYS = ["blocked", "held"]
# What the daemon may say when its pager or keeper was killed.
REPLACED = [*logged.PAGER_KILLED, *logged.KEEPER_KILLED]


@pytest.fixture(scope="module", params=WAYS)
def torture(request: pytest.FixtureRequest, module_kip: Kip, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proc]:
    server = servers.torture()
    tar = server.tarball(tmp_path_factory.mktemp("tar"))
    flags = ["--hibernate", request.param]
    proc = module_kip.run(f"torture-{request.param}", server.command, ports=server.published, tar=tar, flags=flags)
    yield proc
    proc.remove()


def run(kip: Kip, server: servers.Server, tmp_path: Path, *flags: str, name: str | None = None) -> Proc:
    return kip.run(name or server.name, server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)


def is_single_threaded(proc: Proc) -> bool:
    return all(len(os.listdir(f"/proc/{pid}/task")) == 1 for pid in proc.inspect()["pids"])


# promise P16: a tier between that keeps the working set on the worker: hibernated, with its set in
#   memory (all of them within `--set-memory`) and the rest on the local disk, metered by itself
# held by: this, `tests/test_meter.py::test_memory_is_the_integral_of_the_kernels_counter`
# promise H1: states hot, hibernated and parked, awake between; an operator forces each way
# held by: this, `tests/test_cli.py::test_sleep_and_wake_twice`, `tests/test_cli.py::test_shapes`
# promise H2: memory goes to a private swap file, clean file pages are dropped, pages of zeros are
#   not written, only changed pages are written again
# held by: this, `tests/test_hibernate.py::test_redis_keeps_every_key`,
#   `crates/pager/tests/real.rs::all_comes_back_by_faults`
# promise H5: woken by the request itself, or ahead of it by `kip wake`
# held by: this, `tests/test_hibernate.py::test_torture_without_anything_between`
# promise hibernation: real servers and the torture program, 20 cycles each way, blocked and held;
#   parked in between
# held by: this, `tests/test_hibernate.py::test_torture`
@pytest.mark.parametrize("name", rest_in_soak(servers.WEB, ["nginx", "python", "go"]))
def test_web_servers(kip: Kip, tmp_path: Path, name: str) -> None:
    """A client that stays connected, new clients and the data, over and over; parked in between, too."""
    server = servers.WEB[name]()
    proc = run(kip, server, tmp_path)
    port = proc.port()
    steady = Http(port)
    assert steady.get("/page.html") == servers.PAGE
    stored = hashlib.sha256(server.name.encode()).digest() * 3000
    if server.has_kv:
        assert steady.ask("PUT", "/kv/blob", stored).decode() == hashlib.sha256(stored).hexdigest()
    # That of a program that has never slept: later it has back what it has needed since, and no
    # more.
    hot = proc.own_bytes()
    for cycle in range(CYCLES):
        if cycle % 7 == 6:
            proc.hibernate()
            proc.sleep()  # parked straight from hibernation
        else:
            # A server that has little of its own keeps the pages of its ticks; one that has some
            # loses nearly all, but where it collects its garbage just then.
            most = max(hot / 4, 150_000)
            for _ in range(3):
                if (after := proc.asleep_bytes()) < most:
                    break
                assert http_get(port, "/page.html") == servers.PAGE
            assert after < most, f"{hot} bytes became {after}"
        assert (steady.get("/page.html") if cycle % 2 else http_get(port, "/page.html")) == servers.PAGE
        assert hashlib.sha256(steady.get("/big.bin")).hexdigest() == servers.BIG_SHA
        if server.has_kv:
            assert steady.get("/kv/blob") == stored
    view = proc.wait_state("running")
    assert view["last_wake"]["from"] in ("hibernated", "parked")
    steady.close()


def test_redis_keeps_every_key(kip: Kip, tmp_path: Path) -> None:
    proc = run(kip, servers.redis(), tmp_path)
    client = Redis(proc.port())
    values = {f"key{i}": hashlib.sha256(b"%d" % i).hexdigest() * 8 for i in range(3000)}
    for key, value in values.items():
        client.ask("SET", key, value)
    for cycle in range(6):
        first = proc.hibernate()
        sample = random.Random(cycle).sample(sorted(values), 300)
        for key in sample:
            assert client.ask("GET", key).decode() == values[key]
    written = proc.hibernate()["last_sleep"]["bytes_written"]
    assert written < first["memory"]["swap_bytes"], "only what has changed is written again"
    assert client.ask("BGSAVE").startswith("Background"), "a fork right after the wake"
    wait_for("the save has ended", lambda: b"rdb_bgsave_in_progress:0" in client.ask("INFO", "persistence"), 30)
    for key, value in values.items():
        assert client.ask("GET", key).decode() == value


def test_torture(torture: Proc) -> None:
    """One of everything, blocked calls of all kinds with it: nothing changes and nothing returns EINTR."""
    client = Lines(torture.port())
    for cycle in range(CYCLES):
        torture.hibernate_once()
        client.check()
        if cycle % 5 == 4:
            torture.sleep()
            client.check()
        if cycle % 5 == 2:
            other = Lines(torture.port())
            other.check()
            other.close()
    client.close()


def test_torture_without_anything_between(torture: Proc) -> None:
    client = Lines(torture.port())
    for _ in range(8):
        torture.hibernate_once()
        torture.wake()
    client.check()


def test_new_memory_is_kept(torture: Proc) -> None:
    client = Lines(torture.port())
    for _ in range(3):
        assert client.ask("eat 20") == "eaten"
        torture.hibernate_once()
        client.check()


# promise hibernation: clients that talk all the time notice nothing
@pytest.mark.parametrize("way", WAYS)
def test_clients_while_it_hibernates(kip: Kip, tmp_path: Path, way: str) -> None:
    """Clients that talk without pause meanwhile: each answer is the right one."""
    proc = run(kip, servers.torture(), tmp_path, "--hibernate", way, name=f"talk-{way}")
    with talking(proc.port()) as answered:
        for _ in range(20):
            proc.hibernate_once()
    assert all(count > 10 for count in answered)


ONE_SHOT = (
    "timerfd timerfd_epoll posix posix_abs itimer nanosleep clock_nanosleep_abs poll ppoll epoll_wait epoll_pwait2 "
    "select pselect futex futex_abs sigtimedwait"
).split()


# promise hibernation: timers and time-outs go on and fire on time, ticks too
# held by: this, `tests/test_ticks.py::test_a_ticker_ticks_on_time_while_it_is_hibernated`, the
#   first tick of the first sleep by
#   `tests/test_ticks.py::test_the_first_tick_of_a_program_does_not_wait_for_the_disk`, those of
#   each other sleep by
#   `tests/test_ticks.py::test_what_ticks_have_touched_stays_in_the_next_sleep`,
#   `tests/test_ticks.py::test_a_long_tick_is_known_as_one_whatever_its_clients_send_later`
@pytest.mark.parametrize("way", WAYS)
def test_timers(kip: Kip, tmp_path: Path, way: str) -> None:
    """Asleep again and again with everything armed: each fires when it should, none begins anew. Where a machine stalls so
    much that there were too few sleeps, or that the last one was not before they were due: once more with more time."""
    proc = run(kip, servers.torture(), tmp_path, "--hibernate", way, "--tick", "100ms", name=f"timers-{way}")
    client = Lines(proc.port())
    for due_ms in (3000, 9000, 27000):
        if sleeps_before_they_are_due(proc, client, due_ms):
            return
    raise AssertionError("three sleeps do not fit into 27 seconds here")


def sleeps_before_they_are_due(proc: Proc, client: Lines, due_ms: int) -> bool:
    """Whether there were enough sleeps; that each timer has fired right is judged in any case."""
    armed = time.monotonic()
    timers = {kind: int(client.ask(f"arm {kind} {due_ms} 0").split()[1]) for kind in ONE_SHOT}
    sleeps = 0
    while time.monotonic() - armed < due_ms / 1000 * 0.77:
        proc.hibernate_once()
        time.sleep(0.15)
        assert client.ask("echo here") == "here"
        sleeps += 1
    proc.hibernate_once()
    in_time = time.monotonic() - armed < due_ms / 1000 - 0.05
    time.sleep(max(0.0, due_ms / 1000 + 0.05 - (time.monotonic() - armed)))
    # No client asks it anything: the timers wake it, or it ticks in place if all that they touch
    # was in its set.
    with suppress(TimedOut):
        proc.wait_state("running", 10)
    view = proc.inspect()
    assert view["state"] in ("running", "hibernated") and view["last_wake"]["from"] == "hibernated"
    stall_ms = view["last_wake"]["total_us"] / 1000 + (0 if in_time else view["last_sleep"]["total_us"] / 1000)
    fired = lambda: all(client.values(f"result {timer}")["fired"] == "1" for timer in timers.values())  # noqa: E731
    wait_for("all have fired", fired, 30)
    for kind, timer in timers.items():
        result = client.values(f"result {timer}")
        assert result["fired"] == "1" and result["error"] == "0", f"{kind}: {result}"
        late = int(result["miss_mono_us"]) / 1000
        assert -1 <= late <= 400 + stall_ms, f"{kind} is {late} ms late"
    client.check(600)
    return sleeps >= 3 and in_time


# promise hibernation: it sinks by itself: idle, then parked
# held by: this, `tests/test_hibernate.py::test_hibernation_can_be_off`
@pytest.mark.smoke
def test_sinks_by_itself(kip: Kip, tmp_path: Path) -> None:
    """Idle: hibernated; that long after: parked. A request brings it back from either."""
    server = servers.lighttpd()
    proc = run(kip, server, tmp_path, "--idle", "1s", "--park-after", "3s")
    proc.wait_state("hibernated", 30)
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    proc.wait_state("parked", 60)
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    kinds = [event["kind"] for event in kip.events() if event["name"] == proc.name]
    assert kinds.count("hibernated") >= 2 and "parked" in kinds, kinds


def test_hibernation_can_be_off(kip: Kip, tmp_path: Path) -> None:
    proc = run(kip, servers.lighttpd(), tmp_path, "--idle", "300ms", "--park-after", "300ms", "--hibernate", "off", name="awake")
    proc.wait_state("parked", 30)
    kinds = [event["kind"] for event in kip.events() if event["name"] == proc.name]
    assert "hibernated" not in kinds, kinds


# promise H3: the swap file belongs to one proc, no other can read it, it is gone when the proc is
# held by: this, `tests/test_hibernate.py::test_stop_is_in_order`
def test_the_swap_file_is_private_and_goes(kip: Kip, tmp_path: Path) -> None:
    proc = run(kip, servers.WEB["python"](), tmp_path, "--prefetch", "off")
    proc.hibernate()
    place = kip.data / "procs" / proc.name / "pager"
    files = list(place.iterdir())
    assert {f.stat().st_mode & 0o777 for f in files if f.suffix != ".pid"} <= {0o600}, files
    assert place.stat().st_mode & 0o777 == 0o700
    assert (place / "swap").stat().st_size > 1 << 20
    assert proc.exec("ls", "/proc/1/root/" + str(place), check=False).returncode != 0
    proc.sleep()
    assert not place.exists(), "a parked proc has its memory in its snapshot"


# promise H6: clean file pages are dropped, or kept where the owner says so
def test_file_pages_can_be_kept(kip: Kip, tmp_path: Path) -> None:
    """--file-pages keep leaves unchanged pages of files mapped; drop does not."""
    left = {}
    for policy in ("keep", "drop"):
        proc = run(kip, servers.WEB["python"](), tmp_path, "--file-pages", policy, name=f"files-{policy}")
        left[policy] = proc.hibernate()["memory"]["rss_bytes"]
        http_get(proc.port(), "/page.html")
    assert left["keep"] > left["drop"] + (1 << 20), left


# promise P9: the pages that come back are the next working set, which is parked with the proc
# held by: this, `tests/test_lazy.py::test_redis`,
#   `kip_pager::set::tests::what_is_known_of_a_set_outlives_parking`
def test_inspect_and_why(kip: Kip, tmp_path: Path) -> None:
    proc = run(kip, servers.WEB["python"](), tmp_path)
    proc.hibernate()
    assert kip.json("why", proc.name)["state"] == "hibernated"
    http_get(proc.port(), "/page.html")
    # A thread has still to end when the client has its answer.
    wait_for("its threads have ended", lambda: is_single_threaded(proc), 10)
    proc.hibernate()  # what came back is the working set
    view = proc.inspect()
    assert view["memory"]["working_set_pages"] > 100 and view["memory"]["swap_bytes"] > 1 << 20
    assert view["memory"]["working_set_hit_percent"] is None
    http_get(proc.port(), "/page.html")
    memory = proc.wait_state("running")["memory"]
    assert memory["working_set_hit_percent"] > 80, memory
    wake = kip.json("why", proc.name)["last_wake"]
    assert wake["from"] == "hibernated" and {"install"} <= {step["name"] for step in wake["steps"]}


# promise hibernation: a client that has its answer finds the wake in `kip inspect`, `kip why` and
#   `kip meter`, although the daemon learns of it after the client
@pytest.mark.parametrize("published", ["7000", "7000,wake=data"])
@pytest.mark.parametrize("way", WAYS)
def test_a_wake_is_shown_to_the_client_that_caused_it(kip: Kip, tmp_path: Path, way: str, published: str) -> None:
    """Asked over the local socket, within a millisecond of the answer. Not of a server that ticks: its ticks' memory may be enough
    for a client, and then it sleeps on."""
    tar = programs.tarball(tmp_path / "holder.tar", {"srv/holder": programs.c_program("holder", "-static")})
    flags = ["--hibernate", way, "--idle", "1h"]
    proc = kip.run("shown", ["/srv/holder", "7000", "4"], ports=[published], tar=tar, flags=flags)
    client = Lines(proc.port())
    for number in range(10):
        before = proc.hibernate()["wakes"]
        assert client.ask(f"{number}") == f"ok {number}"
        view = json.loads(local(kip, "GET", "/v1/procs/shown")[2])
        assert (view["state"], view["wakes"] > before) == ("running", True), view["last_wake"]
    client.close()


@pytest.mark.smoke
def test_exec_wakes(kip: Kip, tmp_path: Path) -> None:
    proc = run(kip, servers.lighttpd(), tmp_path)
    proc.hibernate()
    assert proc.exec("echo", "inside").stdout == "inside\n"
    assert proc.state == "running"


def test_stop_is_in_order(kip: Kip, tmp_path: Path) -> None:
    """A hibernated program is woken to end; a killed one leaves nothing."""
    proc = run(kip, servers.redis(), tmp_path)
    Redis(proc.port()).ask("SET", "a", "b")
    proc.hibernate()
    proc.stop()
    assert "exit code 0" in str(proc.inspect()["exit"]), proc.inspect()["exit"]
    proc.start()
    wait_for("redis answers", lambda: proc.exec("redis-cli", "PING", check=False).stdout == "PONG\n", 30)
    proc.hibernate()
    proc.remove()
    assert not (kip.data / "procs" / proc.name).exists()


# promise hibernation: one killed while it is held is seen to have ended
@pytest.mark.parametrize("which", [0, -1], ids=["pid-1", "program"])
def test_one_killed_inside_is_seen(kip: Kip, tmp_path: Path, which: int) -> None:
    proc = run(kip, servers.lighttpd(), tmp_path)
    view = proc.hibernate()
    os.kill(view["pids"][which], signal.SIGKILL)
    proc.wait_state("stopped", 30)


# promise hibernation: one of a single process and port costs 5 descriptors in daemon and keeper and
#   at most 8 in the pager, whose limits are 20,000 on many machines
@pytest.mark.parametrize("hibernate", ["blocked", "held"])
def test_one_costs_few_descriptors(fresh_kip: Callable[..., Kip], tmp_path: Path, hibernate: str) -> None:
    """Thousands have to fit below a limit of 20,000 open files in each of our processes."""
    kip = fresh_kip("--set-memory", "0")
    info = kip.info()
    ours = {name: info[f"{name}_pid"] for name in ("keeper", "pager")} | {"daemon": kip.daemon.pid}

    def one(name: str) -> None:
        server = servers.lighttpd()
        flags = ["--never-sleep", "--hibernate", hibernate]
        proc = kip.run(name, server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
        client = Http(proc.port())
        client.get("/page.html")
        client.close()
        # Its end is data that wakes a sleeper which has not seen it.
        wait_for("the server has let it go", lambda: set(tcp_states(proc.inspect()["pids"][0])) == {"LISTEN"}, 30)
        proc.hibernate()

    def held() -> dict[str, int]:
        return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in ours.items()}

    def grown() -> bool:
        # What is open for a moment only, or was made ahead, may be among them.
        return all(after - before <= most * 4 + 3 for (after, before), most in zip(pairs(), (5, 8, 5), strict=True))

    def pairs() -> list[tuple[int, int]]:
        now = held()
        return [(now[name], first[name]) for name in ours]

    one("web-0")
    first = held()
    for number in range(1, 5):
        one(f"web-{number}")
    wait_for("each costs 5, 8 and 5 descriptors in keeper, pager and daemon", grown, 10)


# promise recovery: every program gets its SIGTERM and 10 s with it, asleep or not
def test_down_lets_sleepers_end_in_order(fresh_kip: Callable[..., Kip]) -> None:
    """More than are ended at a time, of each tier: every program handles its SIGTERM."""
    kip = fresh_kip()
    script = "trap 'echo in order; exit 3' TERM; echo waits; sleep 10000 & wait"
    procs = [kip.run(f"sh-{n}", ["sh", "-c", script], flags=["--never-sleep"]) for n in range(24)]
    for proc in procs:
        wait_for(f"{proc.name} waits", lambda proc=proc: "waits" in proc.logs(), 30)
    for proc in procs[2:18]:
        proc.hibernate()
    for proc in procs[18:]:
        proc.sleep()
    kip.cli("down", "--all", timeout=90)
    assert kip.wait_dead() == 0
    kip.up()
    for proc in procs:
        view = proc.inspect()
        assert (view["state"], "exit code 3" in str(view["exit"])) == ("stopped", True), view
        assert "in order" in proc.logs()


# promise hibernation: two wakes, or a wake and the way down, at the same moment do not wait for
#   each other
def test_two_wakes_at_once(kip: Kip, tmp_path: Path) -> None:
    """A request and `kip wake`, or the way down to parked, at the same moment: neither waits for the other for ever."""
    proc = run(kip, servers.torture(), tmp_path, "--hibernate", "held")
    client = Lines(proc.port())
    for turn in range(16):
        proc.wake()  # it may be parked
        proc.hibernate_once()
        command = ["wake", proc.name] if turn % 2 else ["sleep", proc.name, "--to", "parked", "--clock", "auto"]
        other = threading.Thread(target=kip.cli, args=command, kwargs={"check": False})
        other.start()
        time.sleep(turn % 8 * 0.002)
        assert client.ask(f"echo {turn}") == str(turn)
        other.join(30)
        assert not other.is_alive()
    client.check()


TRACER = """
import ctypes, os, time
child = os.fork()
if child == 0:
    time.sleep(3600)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(0x4206, child, 0, 0) == 0, ctypes.get_errno()
print("traces", flush=True)
time.sleep(3600)
"""


# promise hibernation: one that is traced: its memory is offered to the kernel's swap, and that is
#   said
# held by: this (that there is no swap),
#   `kip_engine::page_out::tests::only_private_memory_that_is_no_files_is_given`
def test_one_that_is_traced_cannot_and_its_memory_is_the_kernels(kip: Kip) -> None:
    """A tracer stops its threads already. The refusal and `kip why` say what became of its memory."""
    proc = kip.run("tracer", ["python3", "-c", TRACER])
    wait_for("it traces its child", lambda: "traces" in proc.logs(), 30)
    refused = kip.cli("sleep", proc.name, "--to", "hibernated", check=False)
    assert refused.returncode != 0 and "cannot hibernate" in refused.stderr, refused.stderr
    assert "its memory stays in RAM" in refused.stderr, refused.stderr
    assert any("its memory stays in RAM" in cause for cause in kip.json("why", proc.name)["cannot_sleep"])
    assert proc.state == "running"


# Procs that fight.


# promise hibernation: a proc that fights the pager (unmaps, moves, drops, forks, asks for a
#   userfaultfd) harms no other proc and loses no byte
def test_one_that_fights_the_pager(kip: Kip, tmp_path: Path) -> None:
    """Threads that unmap, move and drop what is taken out, children without end: its own bytes are right, it cannot have a
    userfaultfd, and its neighbour notices nothing."""
    fighter = run(kip, servers.hostile(), tmp_path, "--idle", "1h", "--hibernate", "blocked")
    neighbour = run(kip, servers.torture(), tmp_path)
    client, other = Lines(fighter.port()), Lines(neighbour.port())
    assert "userfaultfd EPERM" in client.ask("tried")
    slept = 0
    for turn in range(25):
        done = kip.cli("sleep", fighter.name, "--to", "hibernated", check=False)
        slept += done.returncode == 0
        assert client.ask(f"echo still {turn}") == f"still {turn}"
        if turn % 5 == 0:
            neighbour.hibernate_once()
            other.check()
    assert slept >= 20, "it can be hibernated all the same"
    assert fighter.state in ("running", "hibernated")
    assert "a page of" not in fighter.logs()


# promise hibernation: a proc that fills its cgroup waits or is ended alone
def test_one_that_fills_its_cgroup(kip: Kip, tmp_path: Path) -> None:
    """A proc at its limit comes back as far as it has room, or is ended for it by the kernel; no other proc waits."""
    # Twice what it fills, for its children: what they share with it when they are forked they have
    # for themselves later.
    full = run(kip, servers.hostile(), tmp_path, "--mem", "80M", "--idle", "1h", name="full")
    neighbour = run(kip, servers.torture(), tmp_path)
    client, other = Lines(full.port()), Lines(neighbour.port())
    assert client.ask("fill 24") == "filled"
    for _ in range(3):
        kip.cli("sleep", full.name, "--to", "hibernated", check=False)
        assert client.ask("echo here") == "here"
    kip.cli("sleep", full.name, "--to", "hibernated", check=False)
    neighbour.hibernate_once()
    client.socket.sendall(b"fill 120\n")
    begun = time.monotonic()
    other.check()
    assert time.monotonic() - begun < 30, "its neighbour waits for it"
    full.wait_state("stopped", 60)
    other.check()


# The pager, the daemon and the keeper die.


def pager_pid(kip: Kip) -> int:
    return kip.info()["pager_pid"]


def kill_pager(kip: Kip) -> None:
    kip.expected += REPLACED
    old = wait_for("there is a pager", lambda: pager_pid(kip), 30)
    os.kill(old, signal.SIGKILL)


# promise hibernation: the pager killed while procs sleep, and while memory comes back
# held by: this, `tests/test_hibernate.py::test_pager_killed_under_load`
@pytest.mark.parametrize("way", WAYS)
def test_pager_killed_while_it_sleeps(fresh_kip: Callable[..., Kip], tmp_path: Path, way: str) -> None:
    """A thread that touches memory waits for the next pager; no byte is wrong."""
    kip = fresh_kip()
    proc = run(kip, servers.torture(), tmp_path, "--hibernate", way)
    client = Lines(proc.port())
    client.ask("eat 20")
    for _ in range(4):
        proc.hibernate_once()
        kill_pager(kip)
        client.check()
        wait_for("another serves", lambda: pager_pid(kip), 30)
    proc.hibernate_once()
    proc.sleep()
    client.check()


def test_pager_killed_under_load(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """While memory comes back, again and again. (While it is taken out its death costs the program: docs/limits.md.)"""
    kip = fresh_kip()
    proc = run(kip, servers.torture(), tmp_path)
    client, dice = Lines(proc.port()), random.Random(7)
    client.ask("eat 20")
    for _ in range(12):
        proc.hibernate_once()
        killer = threading.Timer(dice.random() * 0.03, kill_pager, [kip])
        killer.start()
        client.check()
        killer.join()
        client.check()
        wait_for("another serves", lambda: pager_pid(kip), 30)
    client.check()


# promise hibernation: daemon, daemon and pager, keeper then pager killed
# held by: this, `tests/test_hibernate.py::test_daemon_and_pager_killed_together`,
#   `tests/test_hibernate.py::test_keeper_killed_then_pager`
@pytest.mark.parametrize("way", WAYS)
def test_daemon_killed_while_it_sleeps(fresh_kip: Callable[..., Kip], tmp_path: Path, way: str) -> None:
    kip = fresh_kip()
    kip.expected += REPLACED
    proc = run(kip, servers.torture(), tmp_path, "--hibernate", way)
    client = Lines(proc.port())
    for cycle in range(3):
        proc.hibernate_once()
        kip.kill()
        if cycle % 2 and way == "blocked":
            client.check()  # only the pager is needed for that
        kip.up()
        client.check()
        # One that is held is parked by the next daemon, which may be right after its answer.
        proc.wake()
    assert proc.wait_state("running")["state"] == "running"


def test_daemon_and_pager_killed_together(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    kip = fresh_kip()
    proc = run(kip, servers.torture(), tmp_path, "--hibernate", "blocked")
    client = Lines(proc.port())
    client.ask("eat 20")
    proc.hibernate_once()
    pager = pager_pid(kip)
    kip.expected += REPLACED
    kip.kill()
    os.kill(pager, signal.SIGKILL)
    kip.up()
    client.check()


def test_keeper_killed_then_pager(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """The pager gives its descriptors to the next keeper, so that its own death costs nothing after that."""
    kip = fresh_kip()
    proc = run(kip, servers.torture(), tmp_path, "--hibernate", "blocked")
    client = Lines(proc.port())
    client.ask("eat 20")
    proc.hibernate_once()
    kip.expected += REPLACED
    old = kip.info()["keeper_pid"]
    os.kill(old, signal.SIGKILL)
    wait_for("there is another keeper", lambda: kip.info()["keeper_pid"] not in (0, old), 30)
    wait_for("it was told", lambda: any(e["kind"] == "keeper" for e in kip.events()), 30)
    kill_pager(kip)
    client.check()
