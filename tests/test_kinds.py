"""What a wake was for has a working set of its own: each port, and timers. A client of one port does not wait for
what another port needs."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from harness.clients import Lines
from harness.kip import Failed, Kip, Proc
from harness.wait import AHEAD_S, wait_for

# Pages of what each kind of wake touches, and of what a client can have touched beside that. An
# interpreter that takes a connection needs some hundred pages, whatever it does then.
FIRST, SECOND, TIMER, MORE = 7000, 7001, 7003, 7004
PAGES = {FIRST: 700, SECOND: 1600, TIMER: 400, MORE: 800}
COMMON = 500
# This port touches nothing: it arms a timer that is due as many seconds later as it is told. A
# machine that stalls may need longer to put it to sleep.
ARMS, AFTER_S = 7002, (0.7, 2.1, 6.3)
# A kind of wake that is new gets the pages of all kinds. Pages that no such wake touches fall out
# within so many sleeps.
ROUNDS = 5

PROGRAM = f"""
import select, socket, sys, time
tables = {{port: bytearray(b"x" * (pages * 4096)) for port, pages in {PAGES}.items()}}
listeners = [socket.create_server(("0.0.0.0", port)) for port in ({FIRST}, {SECOND}, {ARMS})]
due = None
while True:
    ready = select.select(listeners, [], [], None if due is None else max(0, due - time.monotonic()))[0]
    if not ready and due is not None:
        due = None
        print("fired", sum(tables[{TIMER}][::4096]), flush=True)
    for listener in ready:
        port = listener.getsockname()[1]
        client = listener.accept()[0]
        line = client.makefile().readline()
        touched = sum(tables[port][::4096]) if port in tables else 0
        if line == "more\\n":
            touched += sum(tables[{MORE}][::4096])
        if port == {ARMS}:
            due = time.monotonic() + float(line)
        client.sendall(b"ok %d\\n" % touched)
        client.close()
"""


@pytest.fixture(params=["hibernated", "parked"])
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def proc(kip: Kip, tier: str) -> Proc:
    flags = ["--hibernate", "held", "--lazy", "on", "--tick", "100ms"]
    return kip.run(tier, ["/usr/bin/python3", "-c", PROGRAM], ports=[FIRST, SECOND, ARMS], flags=flags)


def nap(proc: Proc, tier: str) -> None:
    # Half a second after a timer alone has woken it, it is parked once more: before this, or just
    # now. A call's wake lasts.
    try:
        proc.hold()  # one that was not quite quiescent would wake by whatever it touched first
    except Failed as refused:
        if "it is parked" not in str(refused):
            raise
        proc.wake()
        proc.hold()
    if tier == "parked":
        proc.sleep()


def ask(proc: Proc, port: int, line: str = "") -> None:
    client = Lines(proc.port(port))
    touched = PAGES.get(port, 0) + (PAGES[MORE] if line == "more" else 0)
    assert client.ask(line) == f"ok {touched * ord('x')}"
    client.close()


def quiescent(proc: Proc, trigger: str) -> dict[str, Any]:
    """Its memory once the daemon has heard of the wake and all of the set is installed, which may go on while the program
    runs."""
    seen: list[dict[str, Any]] = []

    def still() -> dict[str, Any] | None:
        view = proc.inspect()
        if not view["last_wake"] or not re.match(trigger, view["last_wake"]["trigger"]):
            return None
        seen.append(view["memory"])
        figures = [[memory[f"working_set_{key}"] for key in ("installed", "misses")] for memory in seen[-2:]]
        return view["memory"] if len(figures) == 2 and figures[0] == figures[1] else None

    return wait_for("all is installed", still, 10, every=0.1)


def visit(proc: Proc, tier: str, port: int, line: str = "") -> dict[str, Any]:
    """Sleeps, and wakes by a client that comes through this port."""
    nap(proc, tier)
    ask(proc, port, line)
    return quiescent(proc, rf"tcp 0\.0\.0\.0:{port} \(connection\)")


def fire(proc: Proc, tier: str) -> dict[str, Any]:
    """Sleeps and wakes by a timer. One that was due before it slept says nothing: then a longer one."""
    for after in AFTER_S:
        fired = proc.logs().count("fired")
        ask(proc, ARMS, str(after))
        armed = time.monotonic()
        try:
            nap(proc, tier)
            # On a busy machine it may have woken for the timer and been put to sleep once more.
            in_time = proc.logs().count("fired") == fired
        except AssertionError:
            in_time = False
            if time.monotonic() - armed < after - AHEAD_S:
                raise
        wait_for("the timer is due", lambda fired=fired: proc.logs().count("fired") > fired, 15)
        if in_time:
            return quiescent(proc, r"timer \(")
    raise AssertionError(f"going to sleep takes more than {AFTER_S[-1]} s here")


# promise P9: each kind of wake has a set of its own: port, timer, call; what is not needed any more
#   falls out
# held by: this, `tests/test_kinds.py::test_what_was_needed_once_falls_out`,
#   `kip_pager::set::tests::each_kind_of_wake_has_a_set_of_its_own`,
#   `kip_engine::cause::tests::each_cause_has_its_text_its_working_set_and_its_word`
def test_each_kind_of_wake_has_its_set(proc: Proc, tier: str) -> None:
    for _ in range(ROUNDS):
        first, second, timer = visit(proc, tier, FIRST), visit(proc, tier, SECOND), fire(proc, tier)
    for memory, port in ((first, FIRST), (second, SECOND), (timer, TIMER)):
        installed, missed = memory["working_set_installed"], memory["working_set_misses"]
        assert PAGES[port] * 0.6 < installed < PAGES[port] + COMMON, (port, memory)
        assert missed < installed / 8, (port, memory)


def test_what_was_needed_once_falls_out(proc: Proc, tier: str) -> None:
    """Of what one client had touched and no other, hardly anything is installed some sleeps later."""
    usual = [visit(proc, tier, FIRST) for _ in range(4)][-1]["working_set_pages"]
    visit(proc, tier, FIRST, "more")
    later = [visit(proc, tier, FIRST) for _ in range(ROUNDS + 1)]
    assert later[0]["working_set_pages"] > usual + PAGES[MORE] / 2, "it is expected once more, installed or at hand"
    counts = [view["working_set_installed"] for view in later]
    assert PAGES[FIRST] * 0.6 < counts[-1] < usual + PAGES[MORE] / 8, (usual, counts)
