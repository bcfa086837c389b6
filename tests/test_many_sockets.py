"""As many sockets as a program may have, over a sleep, by both engines: what is handed over lies under the right numbers."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ALL_KIPS

from harness import logged, servers
from harness.clients import Lines, http_get
from harness.kip import Kip, Proc, daemon
from harness.programs import SOURCES
from harness.rows import rest_in_soak
from harness.wait import TimedOut, wait_for

# 250 descriptors go with a message, and from 64 on was where the first of them were to lie.
COUNTS = rest_in_soak([1, 47, 48, 250, 251, 5000], [48, 251])


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


# promise P14: a web server costs at most six open files of the daemon's and six of the keeper's, in
#   every tier, over a daemon and a keeper that are killed
# held by: this, `kip_keeper::bundle::tests::what_waits_lives_and_is_given_again_and_again`
def test_open_files_of_a_proc(fresh_kip: Callable[..., Kip], store: Path, tmp_path: Path) -> None:
    kip = fresh_kip("--store", str(store))
    kip.expected += logged.KEEPER_KILLED
    procs = 5

    def open_files() -> list[int]:
        assert kip.daemon
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (kip.daemon.pid, kip.info()["keeper_pid"])]

    def each_is_cheap(tier: str) -> None:
        # Beside the procs' own: what waits for the next start, and a call that has just ended.
        most = [before + 6 * procs + 3 for before in idle]
        now: list[int] = []

        def few() -> bool:
            now[:] = open_files()
            return now[0] <= most[0] and now[1] <= most[1]

        with suppress(TimedOut):
            wait_for("few open files", few, 10)
        assert few(), (tier, now, most)

    server = servers.lighttpd()
    idle = open_files()
    all_of_them = [kip.run(f"web-{number}", server.command, ports=server.published, tar=server.tarball(tmp_path)) for number in range(procs)]
    each_is_cheap("hot")
    for tier, go in [("hibernated", Proc.hibernate), ("parked", Proc.sleep)]:
        for proc in all_of_them:
            go(proc)
        each_is_cheap(tier)
    keeper = kip.info()["keeper_pid"]
    os.kill(keeper, signal.SIGKILL)
    wait_for("another keeper", lambda: kip.info().get("keeper_pid") not in (None, keeper), 20)
    each_is_cheap("another keeper")
    kip.kill()
    kip.up()
    each_is_cheap("another daemon")
    os.kill(kip.info()["keeper_pid"], signal.SIGKILL)
    for proc in all_of_them:
        assert http_get(proc.port(), "/page.html") == servers.PAGE
    each_is_cheap("awake again")
    for proc in all_of_them:
        proc.archive()
    each_is_cheap("archived")
