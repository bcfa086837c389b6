"""A program that waits for events or for a while has the present time when it is told of the client that woke it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from harness import s3
from harness.clients import read_to_end
from harness.kip import Kip
from harness.line import Proxy
from harness.rows import rest_in_soak
from harness.wait import wait_for

# Seven times as long as it waits: half of it is late on the busiest machine, and all of it is a
# time-out that did not pass.
SLEPT_S = 1.5

# Looks at the clock only before it waits, as many servers do, and tells a client how old the time
# is that it goes by.
LOOKS_ONCE = """
import select, socket, sys, time
listener = socket.create_server(("", 7000))
epoll, poll = select.epoll(), select.poll()
epoll.register(listener, select.EPOLLIN)
poll.register(listener, select.POLLIN)
waits = {"epoll": lambda: epoll.poll(0.2), "poll": lambda: poll.poll(200),
         "select": lambda: select.select([listener], [], [], 0.2)[0]}
while True:
    now = time.monotonic()
    if waits[sys.argv[1]]():
        client = listener.accept()[0]
        client.sendall(b"%.1f\\n" % (time.monotonic() - now))
        client.close()
"""


# Works for a while and then waits for a while, again and again.
WORKS_AND_WAITS = """
import random, time
memory = bytearray(b"a" * (12 << 20))
while True:
    until = time.monotonic() + random.random() * 0.06
    while time.monotonic() < until:
        memory.count(b"b", 0, 20000)
    time.sleep(0.2)
"""


# promise hibernation: a program that begins to wait while it is put to sleep is held only if its
#   wait is known: else it goes on at once, and its timers are the kernel's
# held by: this, `kip_stop::stopped::tests::a_thread_that_has_run_since_the_look_did_not_sleep`
def test_a_wait_that_begins_while_the_proc_is_put_to_sleep_ends(kip: Kip) -> None:
    """What a program waits for is read a moment before its threads stop, and it may wait for something else by then."""
    proc = kip.run("phases", ["python3", "-c", WORKS_AND_WAITS], flags=["--hibernate", "held", "--tick", "10ms"])
    ways = []
    for _ in range(40):
        kip.cli("sleep", "phases", "--to", "hibernated")
        view = proc.inspect()
        held = view["last_sleep"]["held"]
        ways.append(held)
        if held:
            proc.wait_state("running", 5)
        elif view["state"] == "hibernated":
            proc.wake()
    assert any(ways), "it was held where its wait was known"


# promise waking: a wait for events whose time-out has passed meanwhile ends by it, before the event
#   that woke the program is told
# held by: this, `kip_sys::timed::tests::only_waits_for_events_end`
@pytest.mark.parametrize("tier", ["held", "parked"])
@pytest.mark.parametrize("call", ["epoll", "poll", "select"])
def test_a_time_out_passes_before_the_event(kip: Kip, call: str, tier: str) -> None:
    """A program that waits for events or for a while, and slept longer than that, sees the while pass first: its time is the
    present one when it is told of the client that woke it."""
    command = ["python3", "-c", LOOKS_ONCE, call]
    proc = kip.run(f"{call}-{tier}", command, ports=["7000"], flags=["--hibernate", "held" if tier == "held" else "off"])

    def age() -> float:
        with socket.create_connection(("127.0.0.1", proc.port())) as client:
            return float(read_to_end(client))

    wait_for("it listens", lambda: age() < SLEPT_S / 2, 10)
    for _ in range(3):
        if tier == "held":
            proc.hold()
        else:
            proc.sleep()
        time.sleep(SLEPT_S)
        assert age() < SLEPT_S / 2
    assert tier == "held" or proc.rebuilt()


# Waits for a client with a time-out, and tells it which came first since its last answer. With so
# many MiB of memory, of which each page is another.
WAITS = """
import ctypes, os, select, signal, socket, sys, time
memory = [os.urandom(1 << 20) for _ in range(int(sys.argv[2]))]
listener = socket.create_server(("", 7000))
epoll, poll = select.epoll(), select.poll()
epoll.register(listener, select.EPOLLIN)
poll.register(listener, select.POLLIN)
waits = {"epoll": lambda s: epoll.poll(s), "poll": lambda s: poll.poll(s * 1000), "select": lambda s: select.select([listener], [], [], s)[0]}
length, passed = 3600, False
libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
libc.timer_create(1, None, ctypes.byref(timer))
def posix(seconds, every=0):
    value = (ctypes.c_long * 4)(every, 0, int(seconds), int(seconds % 1 * 1e9))
    libc.timer_settime(timer, 0, value, None)
def expired(*_):
    global passed
    passed = True
signal.signal(signal.SIGALRM, expired)
arms = {"setitimer": lambda s: signal.setitimer(signal.ITIMER_REAL, s), "timer_create": posix,
        "setitimer-every": lambda s: signal.setitimer(signal.ITIMER_REAL, s, 7200), "timer_create-every": lambda s: posix(s, 7200)}
if arm := arms.get(sys.argv[1]):
    waits[sys.argv[1]] = lambda s: epoll.poll()
if sys.argv[1] == "timerfd":
    timerfd = libc.timerfd_create(1, 0)
    epoll.register(timerfd, select.EPOLLIN)
    def arm(seconds):
        libc.timerfd_settime(timerfd, 0, (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9)), None)
    def first(s):
        # What was ready first is first.
        if epoll.poll()[0][0] != timerfd:
            return True
        os.read(timerfd, 8)
        return False
    waits["timerfd"] = first
while True:
    if not waits[sys.argv[1]](length):
        passed, length = True, 3600
        continue
    client = listener.accept()[0]
    client.sendall(b"the time-out" if passed else b"the client")
    passed, length = False, float(client.recv(100))
    if arm:
        arm(length)
    client.close()
"""


@pytest.fixture(scope="module")
def far_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Proxy]]:
    """A real S3 server, and the line to it."""
    with ExitStack() as stack:
        url = stack.enter_context(s3.server(tmp_path_factory.mktemp("s3")))
        proxy = Proxy(int(url.rpartition(":")[2]), 0, 100)
        stack.callback(proxy.close)
        yield f"{url.rpartition(':')[0]}:{proxy.port}", proxy


CALLS = ["epoll", "poll", "select", "setitimer", "timer_create", "setitimer-every", "timer_create-every", "timerfd"]


def first(proc: Proc, seconds: float) -> str:
    with socket.create_connection(("127.0.0.1", proc.port()), timeout=30) as client:
        client.sendall(f"{seconds}".encode())
        return read_to_end(client).decode()


# promise waking: the same from the local disk, where the wake is long for its memory
# Not beside the natural runs, whose timers would be late: it writes 0.7 GB at once.
@pytest.mark.xdist_group("natural")
@pytest.mark.measures
@pytest.mark.parametrize("call", rest_in_soak(["epoll", "setitimer", "timerfd"], ["epoll", "setitimer"]))
def test_a_packet_comes_before_what_passes_while_memory_is_read(kip: Kip, call: str) -> None:
    flags = ["--tick", "0s", "--idle", "1h", "--lazy", "off"]
    proc = kip.run("large", ["python3", "-c", WAITS, call, "700"], ports=["7000"], flags=flags)
    # It passes between the two, for the answer takes its time to this process too.
    earliest = time.monotonic() + 9
    assert first(proc, 9) == "the client"
    latest = time.monotonic() + 9
    proc.sleep()
    assert time.monotonic() < earliest - 1, "this machine is too slow for the test"
    # Before the wake for the time-out itself begins, which is a little ahead of it.
    time.sleep(earliest - 0.15 - time.monotonic())
    ahead = latest - time.monotonic()
    assert first(proc, 1) == "the client"
    view = proc.inspect()["last_wake"]
    assert view["trigger"].startswith("tcp") and view["total_us"] > ahead * 1e6, f"{ahead:.3f} s: the time-out passed in the wake"
    time.sleep(1)
    assert first(proc, 3600) == "the time-out"


# promise waking: a packet that comes while the proc is woken for a time-out of a wait for events
#   comes before that time-out, also where the wake takes longer than it was begun ahead
@pytest.mark.measures
@pytest.mark.parametrize("call", rest_in_soak(["epoll", "poll", "select"], ["epoll"]))
def test_a_packet_in_the_wake_for_a_time_out_comes_before_it(fresh_kip: Callable[..., Kip], far_store: tuple[str, Proxy], call: str) -> None:
    url, line = far_store
    kip = fresh_kip("--store", url, "--cache", "0")
    line.delay(0)
    proc = kip.run("waits", ["python3", "-c", WAITS, call, "0"], ports=["7000"], flags=["--tick", "0s", "--idle", "1h"])
    # By its last wake, a long one, the daemon knows how far ahead to begin: at most 0.32 s.
    proc.archive()
    line.delay(1500)
    assert first(proc, 10) == "the client"
    due = time.monotonic() + 10
    line.delay(0)
    proc.archive()
    line.delay(1500)
    assert time.monotonic() < due - 2, "this machine is too slow for the test"
    # The wake has begun, and the time-out is to come.
    time.sleep(due - 0.15 - time.monotonic())
    late = time.monotonic() - due
    said, view = first(proc, 1), proc.inspect()["last_wake"]
    assert view["trigger"].startswith("timer"), view
    assert late < 0, f"the client came {late:.3f} s after the time-out: this machine is too slow for the test"
    assert view["total_us"] > 1_000_000, "the time-out passed in the wake"
    assert said == "the client"


# promise waking: a time-out of a wait for events, or the signal of a timer for one time or of a
#   periodic one, or a timerfd for one time, that passes during the wake, after the packet came,
#   does not come before that packet; by either engine
# held by: this,
#   `kip_clocks::timers::tests::what_was_due_after_the_packet_comes_after_it`
@pytest.mark.measures
@pytest.mark.parametrize(
    "call_engine",
    rest_in_soak(
        [f"{call} {engine}" for call in CALLS for engine in ["plan", "criu"]],
        ["epoll plan", "setitimer-every plan", "timer_create-every criu"],
    ),
)
def test_a_packet_that_came_in_time_comes_before_the_time_out(
    fresh_kip: Callable[..., Kip], far_store: tuple[str, Proxy], call_engine: str
) -> None:
    """However long the wake took: here the time-out passes while it waits for the store, and the program for its memory."""
    call, engine = call_engine.split()
    url, line = far_store
    kip = fresh_kip("--store", url, "--cache", "0", *(["--only-criu"] if engine == "criu" else []))
    line.delay(0)
    proc = kip.run("waits", ["python3", "-c", WAITS, call, "0"], ports=["7000"], flags=["--tick", "0s", "--idle", "1h"])

    assert first(proc, 12) == "the client"
    due = time.monotonic() + 12
    proc.archive()
    # Long enough that the client may be held up by a busy machine, and still comes in time.
    line.delay(1500)
    assert time.monotonic() < due - 2, "this machine is too slow for the test"
    time.sleep(due - 1 - time.monotonic())
    late = time.monotonic() - due + 1
    said, view = first(proc, 1), proc.inspect()["last_wake"]
    assert view["trigger"].startswith("tcp"), f"the client came {late:.3f} s late: {view}"
    assert said == "the client"
    assert view["total_us"] > 1_000_000, "the time-out passed in the wake"
    assert proc.rebuilt() == (engine == "plan")
    # Its time-out comes all the same, at most 3 s later (docs/limits.md).
    time.sleep(4)
    assert first(proc, 3600) == "the time-out"
