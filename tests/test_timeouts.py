"""Whoever waits for events or for a while has the present time when he is told of the client that woke him."""

from __future__ import annotations

import socket
import time

import pytest

from harness.clients import read_to_end
from harness.kip import Kip, Proc
from harness.wait import wait_for

# Seven times as long as it waits: half of it is late on the busiest machine, and all of it is a time-out that did not pass.
SLEPT_S = 1.5

# Looks at the clock only before it waits, as many servers do, and tells a client how old the time is that it goes by.
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


@pytest.mark.parametrize("tier", ["held", "parked"])
@pytest.mark.parametrize("call", ["epoll", "poll", "select"])
def test_a_time_out_passes_before_the_event(kip: Kip, call: str, tier: str) -> None:
    """Whoever waits for events or for a while, and slept longer than that, sees the while pass first: his time is the present
    one when he is told of the client that woke him."""
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
