"""mariadb: rows are checked through every sleep; a session, its open transaction and its temporary table live on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from harness import servers
from harness.databases import MariaDb as Session
from harness.kip import Kip, Proc

CYCLES = 20
CHECKSUM = "SELECT COUNT(*), SUM(CRC32(CONCAT(id, ':', body))), SUM(n) FROM test.rows"


@pytest.fixture(scope="module")
def mariadb(module_kip: Kip, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proc]:
    server = servers.mariadb()
    tar = server.tarball(tmp_path_factory.mktemp("tar"))
    # The first start makes the system tables.
    proc = module_kip.run("mariadb", server.command, ports=server.published, tar=tar, timeout=120)
    session = Session(proc.port())
    session.ask("CREATE TABLE test.rows (id INT PRIMARY KEY, body VARCHAR(200), n INT) ENGINE=InnoDB")
    session.ask("INSERT INTO test.rows SELECT seq, REPEAT(MD5(seq), 3), 0 FROM test.seq_1_to_20000")
    session.close()
    yield proc
    proc.remove()


def cycles(mariadb: Proc, count: int, sleep: Callable[[Proc], object] = Proc.sleep) -> None:
    port = mariadb.port()
    steady = Session(port)
    steady.ask("CREATE TEMPORARY TABLE test.mine (x INT)")
    rows, crc, total = steady.ask(CHECKSUM)[0]
    assert rows == "20000"
    for cycle in range(1, count + 1):
        sleep(mariadb)
        session = steady if cycle % 2 else Session(port)
        session.ask(f"UPDATE test.rows SET n = n + 1 WHERE id = {cycle}")
        assert session.ask(CHECKSUM) == [[rows, crc, str(int(total) + cycle)]]
        steady.ask(f"INSERT INTO test.mine VALUES ({cycle})")
        if session is not steady:
            session.close()
    assert steady.ask("SELECT COUNT(*), SUM(x) FROM test.mine") == [[str(count), str(count * (count + 1) // 2)]]
    assert steady.ask("CHECK TABLE test.rows")[0][-1] == "OK"
    steady.close()


# promise servers: mariadb: 20,000 rows, a temporary table, an open transaction
# held by: this, `tests/test_mariadb.py::test_transaction_lives_through_a_sleep`
def test_twenty_cycles(mariadb: Proc) -> None:
    cycles(mariadb, CYCLES)


def test_hibernated(mariadb: Proc) -> None:
    """In place, its memory out; it ticks there. Parked from there by turns."""
    cycles(mariadb, CYCLES // 3, Proc.hibernate)
    full = mariadb.inspect()["memory"]["pss_bytes"]
    own = mariadb.asleep_bytes()
    view = mariadb.inspect()
    assert not view["last_sleep"]["held"] and own < full / 2, (own, full, view)

    def both(mariadb: Proc) -> None:
        mariadb.hibernate()
        mariadb.sleep()

    cycles(mariadb, 2, both)


@pytest.mark.parametrize("to_sleep", [Proc.sleep, Proc.hibernate], ids=["parked", "hibernated"])
def test_transaction_lives_through_a_sleep(mariadb: Proc, to_sleep: Callable[[Proc], object]) -> None:
    """An open transaction is neither lost nor committed, and its locks hold."""
    one = Session(mariadb.port())
    one.ask("BEGIN")
    one.ask("UPDATE test.rows SET body = 'changed' WHERE id = 19999")
    to_sleep(mariadb)
    two = Session(mariadb.port())
    assert two.ask("SELECT body <> 'changed' FROM test.rows WHERE id = 19999") == [["1"]]
    assert two.ask("SELECT id FROM test.rows WHERE id IN (19998, 19999) FOR UPDATE SKIP LOCKED") == [["19998"]]
    to_sleep(mariadb)
    one.ask("ROLLBACK")
    assert two.ask("SELECT body <> 'changed' FROM test.rows WHERE id = 19999") == [["1"]]
    one.close()
    two.close()


def test_fell_back_from_io_uring(mariadb: Proc) -> None:
    """The sandbox denies io_uring, which cannot be checkpointed: no such descriptor is there."""
    links = mariadb.exec("sh", "-c", "ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c io_uring || true").stdout.strip()
    assert links == "0"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_cycles(mariadb: Proc) -> None:
    cycles(mariadb, 200)
