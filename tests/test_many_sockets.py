"""As many sockets as a program may have, over a sleep, by both engines: what is handed over lies under the right numbers."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress

import pytest
from conftest import ALL_KIPS

from harness.clients import Lines
from harness.kip import Kip, Proc, daemon
from harness.programs import SOURCES

# 250 descriptors go with a message, and from 64 on was where the first of them were to lie.
COUNTS = [1, 47, 48, 250, 251, pytest.param(5000, marks=pytest.mark.soak)]


@pytest.fixture(scope="module", params=["plan", "criu"])
def module_kip(request: pytest.FixtureRequest) -> Iterator[Kip]:
    with daemon(*(["--only-criu"] if request.param == "criu" else [])) as kip:
        ALL_KIPS.append(kip)
        yield kip
        ALL_KIPS.remove(kip)


def sockets(proc: Proc) -> int:
    """How many its processes have open."""
    found = set()
    for pid in proc.inspect()["pids"]:
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return len({target for target in found if target.startswith("socket:")})


def answers(clients: list[Lines]) -> list[int]:
    """Each is asked for its own number, all at once."""
    for number, client in enumerate(clients):
        client.socket.sendall(b"%d\n" % number)
    return [int(client.reader.readline()) for client in clients]


# promise waking: many sockets are handed over under the right numbers, by both engines
# held by: this,
#   `crates/checkpoint/tests/helper.rs::each_descriptor_lies_under_its_number_whatever_the_count`,
#   `crates/checkpoint/tests/helper.rs::a_number_that_is_taken_is_refused_and_not_replaced`
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", COUNTS)
def test_each_is_the_one_that_it_was(kip: Kip, request: pytest.FixtureRequest, count: int) -> None:
    """A listener and connections; each of these answers as the one that it was before."""
    by_plan = request.node.callspec.params["module_kip"] == "plan"
    program = f"{SOURCES / 'lines.py'}:/srv/lines.py:ro"
    proc = kip.run(f"many-{count}", ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=[8080], flags=["-v", program, "--idle", "1h", "--ulimit", "nofile=8192"])
    # This process has a socket and a stream for each.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 20_000), most))
    clients = [Lines(proc.port()) for _ in range(count - 1)]
    assert answers(clients) == list(range(len(clients)))
    for _ in range(2):
        proc.sleep(timeout=120)
        if not clients:
            proc.wake()
        assert answers(clients) == list(range(len(clients)))
        assert proc.rebuilt() == by_plan
        assert sockets(proc) == count
    for client in clients:
        client.close()
