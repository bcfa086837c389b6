"""Programs that tick while they are hibernated: on time from the first tick on, and what a tick needs stays."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from harness import servers
from harness.clients import Lines
from harness.kip import Kip
from harness.rows import one_in, rest_in_soak
from harness.wait import wait_for


def test_a_ticker_ticks_on_time_while_it_is_hibernated(kip: Kip, tmp_path: Path) -> None:
    """It stays hibernated, its threads run, and no tick is late or missing; its first request wakes it."""
    server = servers.torture()
    proc = kip.run("ticker", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=["--hibernate", "auto"])
    client = Lines(proc.port())
    timer = client.ask("arm timerfd_periodic 200 200").split()[1]

    def asleep_for_a_while() -> bool:
        """The first sleeps may have to learn what a tick touches."""
        wakes = proc.hibernate()["wakes"]
        time.sleep(3)
        view = proc.inspect()
        return view["state"] == "hibernated" and view["wakes"] == wakes

    wait_for("it ticks without waking", asleep_for_a_while, 60)
    assert not proc.inspect()["last_sleep"]["held"]
    assert "hibernated" in proc.inspect()["tier"]
    result = client.values(f"result {timer}")
    # A tick may be due between its reading and the clock's.
    assert abs(int(result["ticks"]) - int(result["expected"])) <= 1, result
    proc.wait_state("running", 30)


TICKS = "import time\nwhile True: time.sleep(0.5)"


def test_what_ticks_have_touched_stays_in_the_next_sleep(kip: Kip) -> None:
    """So that its first ticks are on time; each page that has to come makes a tick later."""
    proc = kip.run("ticks", ["python3", "-c", TICKS], flags=["--idle", "1h"])
    came = []
    for _ in range(4):
        proc.hibernate()
        time.sleep(2)
        view = proc.inspect()
        assert view["state"] == "hibernated", view
        came.append(view["memory"]["working_set_misses"])
        proc.wake()
    assert came[0] > 20 and max(came[1:]) <= came[0] / 3, came


# Each tick touches 400 pages far apart, and says how long that took, in milliseconds.
TICKS_WIDE = """
import time
pages = bytearray(b"x") * (4096 * 16 * 400)
while True:
    time.sleep(2)
    began = time.monotonic()
    for page in range(0, len(pages), 4096 * 16):
        pages[page] ^= 1
    print(round((time.monotonic() - began) * 1000), flush=True)
"""


def test_the_first_tick_of_a_program_does_not_wait_for_the_disk(kip: Kip) -> None:
    """What was written as it fell asleep is still in the page cache."""
    read = lambda: int(re.search(r"^read_bytes: (\d+)", Path(f"/proc/{kip.info()['pager_pid']}/io").read_text(), re.M)[1])  # noqa: E731
    proc = kip.run("ticks-wide", ["python3", "-c", TICKS_WIDE], flags=["--idle", "1h"])
    wait_for("it has ticked", proc.logs, 30)
    proc.hibernate()
    ticks, before = len(proc.logs().split()), read()
    wait_for("it has ticked in its sleep", lambda: len(proc.logs().split()) > ticks, 30)
    view = proc.inspect()
    assert view["memory"]["working_set_misses"] >= 400, view["memory"]
    # Each page by itself would be 26 MB; the pager may read a page of its own program.
    assert read() - before < 1 << 20, (proc.logs(), view)


# Each tick touches 700 pages. It answers each line of a client.
TICKS_LONG = """
import socket, time
pages = bytearray(4096 * 700)
client = socket.create_server(("", 7000)).accept()[0]
client.settimeout(1)
while True:
    for page in range(0, len(pages), 4096):
        pages[page] ^= 1
    try:
        client.sendall(client.recv(4096))
    except TimeoutError:
        pass
"""


def test_a_long_tick_is_known_as_one_whatever_its_clients_send_later(kip: Kip) -> None:
    """The wake that it is taken for at first is the last one by itself."""
    seen = []
    # On a busy machine a program can be so slow that none of its ticks is taken for a wake: then
    # another one is tried.
    for number in range(4):
        proc = kip.run(f"ticks-long-{number}", ["python3", "-c", TICKS_LONG], ports=[7000], flags=["--idle", "1h"])
        client = Lines(proc.port())
        woke = []
        for _ in range(4):
            assert client.ask("hello") == "hello"
            # That the client has the answer is said within 40 ms, by a packet that could be what a
            # tick is for.
            time.sleep(0.3)
            proc.hibernate()
            time.sleep(2.5)
            woke.append(proc.inspect()["state"] != "hibernated")
        seen.append(woke)
        # If there was no long tick within the first sleep, there was one in the second.
        assert not any(woke[2:]), (seen, kip.account())
        proc.remove()
        if any(woke):
            return
    raise AssertionError(f"no tick was taken for a wake: {seen}\n{kip.account()}")


# Waits 8 s, until an absolute time, and says how late that ended.
UNTIL = """
import ctypes, sys, threading, time
libc, seconds = ctypes.CDLL(None), 8
began = time.time()
spec = (ctypes.c_long * 2)(int(began) + seconds, int(began % 1 * 1e9))
semaphore = (ctypes.c_long * 8)()
{
    "event": lambda: threading.Event().wait(seconds),
    "sem_timedwait": lambda: libc.sem_timedwait(semaphore, spec),
    "clock_nanosleep": lambda: libc.clock_nanosleep(0, 1, spec, None),
}[sys.argv[1]]()
print(time.time() - began - seconds, flush=True)
"""


# promise waking: a timer is a tick by its period or its whole length, never by what is left of it:
#   waits until an absolute time too
# held by: this,
#   `kip_clocks::calls::tests::a_stop_does_not_shorten_an_absolute_wait`
@pytest.mark.parametrize("before", one_in(2, ["running", "blocked", "held", "parked", "killed"]))
@pytest.mark.parametrize("call", ["event", "sem_timedwait", "clock_nanosleep"])
def test_what_is_left_of_a_long_wait_is_no_tick(kip: Kip, call: str, before: str) -> None:
    """Less is left than --tick when it is parked by its owner's word, which lets ticks be gathered; also where its wait was
    stopped by a sleep before, and began anew; then the daemon may have been killed."""
    # Only of this call's clock the owner's word may make it late: that of the others goes on.
    clock = ["--clock", "continue"] if call == "event" else []
    hibernates = {"blocked": "blocked", "held": "held", "killed": "blocked"}.get(before)
    hibernate = ["--hibernate", hibernates] if hibernates else []
    proc = kip.run("until", ["/usr/bin/python3", "-c", UNTIL, call], flags=["--tick", "5s", "--never-sleep", *hibernate])
    began = time.monotonic()
    if before != "running":
        time.sleep(1)
        proc.hibernate() if hibernate else kip.cli("sleep", proc.name, "--clock", "continue")
        assert before != "held" or proc.inspect()["last_sleep"]["held"]
        if before == "killed":
            kip.kill()
            kip.up()
        proc.wake()
    left = 4.5 - (time.monotonic() - began)
    assert left > -2, "this machine is too slow for the test"
    time.sleep(max(0, left))
    kip.cli("sleep", proc.name, *clock)
    proc.wait_state("stopped", 30)
    assert 0 <= float(proc.logs()) < 1, proc.logs()
    assert proc.inspect()["last_sleep"]["to"] == "parked"


# 500 threads, of which one waits 50 ms at a time, until a time or for one: that time-out passes in
# each freeze, and while the threads are looked at before it, which both take longer. It says so if
# a wait was short.
CROWD = """
import select, sys, threading, time
threading.stack_size(64 << 10)
for _ in range(498):
    threading.Thread(target=threading.Event().wait).start()
wait = {"until": lambda: threading.Event().wait(0.05), "for": lambda: select.poll().poll(50)}[sys.argv[1]]
def tick():
    while True:
        began = time.monotonic()
        wait()
        if time.monotonic() - began < 0.0499:
            print("short:", time.monotonic() - began, flush=True)
threading.Thread(target=tick).start()
print("all", flush=True)
"""


# promise waking: a time-out that passes in the freeze is a tick: one of 500 threads waits 50 ms at
#   a time, and the proc stays parked; none of its waits is short for that
@pytest.mark.parametrize("wait", rest_in_soak(["until", "for"], ["until"]))
def test_a_tick_of_one_of_many_threads_does_not_wake_it(kip: Kip, wait: str) -> None:
    proc = kip.run("crowd", ["/usr/bin/python3", "-c", CROWD, wait], flags=["--never-sleep"])
    wait_for("all threads are there", lambda: proc.logs() == "all\n", 30)
    stayed, rounds = 0, 0
    while stayed < 5:
        kip.cli("sleep", proc.name)
        wakes = proc.inspect()["wakes"]
        time.sleep(2)
        view = proc.inspect()
        if (view["state"], view["wakes"]) == ("parked", wakes):
            stayed += 1
        else:
            # Its thread had not come to its wait again, for want of a processor: at work.
            assert "at work" in view["last_wake"]["trigger"], kip.account()
        assert (rounds := rounds + 1) <= 8, kip.account()
        proc.wake()
        time.sleep(0.2)
    assert proc.logs() == "all\n"


# promise waking: by default a proc that ticks is not parked by itself, and ticks on time while it
#   is hibernated; one that waits longer is parked and woken on time
# held by: this, `tests/test_ticks.py::test_a_ticker_ticks_on_time_while_it_is_hibernated`,
#   `kip_records::due::tests::by_default_every_timer_is_on_time`,
#   `kip_records::due::tests::a_timer_is_a_tick_by_its_period_and_never_by_what_is_left_of_it`,
#   `kip_pager::ticking::tests::a_long_burst_is_a_wake_and_ticks_apart_are_not`,
#   `kip_pager::ticking::tests::what_packets_have_come_for_is_a_wake_at_its_first_touch`
def test_a_ticker_is_not_parked_by_itself(kip: Kip, tmp_path: Path) -> None:
    """Nothing is gathered by default: a wait below --tick keeps it hibernated, one above it parks, on time both."""
    script = "import sys, time, threading\nwhile True:\n    threading.Event().wait(float(sys.argv[1]))\n    print(time.time(), flush=True)"
    flags = ["--idle", "300ms", "--park-after", "700ms", "--tick", "3s"]
    procs = {wait: kip.run(f"waits-{wait}", ["python3", "-c", script, str(wait)], flags=flags) for wait in (1, 5)}
    for wait, proc in procs.items():
        wait_for(f"{proc.name} has waited four times", lambda proc=proc: len(proc.logs().split()) >= 4, 60)
        at = [float(line) for line in proc.logs().split()]
        gaps = [after - before for before, after in zip(at, at[1:], strict=False)]
        assert all(wait - 0.001 <= gap for gap in gaps), (wait, gaps)
        kinds = {event["kind"] for event in kip.events() if event["name"] == proc.name}
        assert "hibernated" in kinds and ("parked" in kinds) == (wait == 5), (wait, kinds)
