"""The database: its settings, and its files with the table in them, from which every instance starts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.clients import free_port
from harness.servers import Server
from parkwake.workspace import Failed, Workspace, command
from querying import load
from querying.sql import DATABASE, PASSWORD, USER, Session, ask, first_answer

MIB = 1 << 20
PORT = 3306
DATA = "var/lib/mysql"
# Of paper S: MiB of query cache where all records fit, and where they do not, of 50,000 records.
CACHE_MIB = {"resident": 256, "thrashing": 128}
PAPER_RECORDS = 50_000
# A small pool: what the paper's instances differ by is the query cache.
POOL_MIB = 16
# What makes an answer wrong if a clone has other records than its source.
RECORDS = "SELECT SQL_NO_CACHE COUNT(*), SUM(CRC32(CONCAT_WS(':', YCSB_KEY, FIELD0, FIELD9))) FROM usertable"
HITS = ("Qcache_hits", "Qcache_inserts", "Qcache_lowmem_prunes", "Qcache_queries_in_cache", "Qcache_free_memory")

CONF = """[mariadbd]
datadir = {data}
socket = {socket}
pid-file = {temporary}/mysql.pid
tmpdir = {temporary}
port = {port}
bind-address = {address}
user = root
skip-name-resolve
performance_schema = off
max_connections = 50
innodb_buffer_pool_size = {pool}M
innodb_buffer_pool_dump_at_shutdown = off
innodb_buffer_pool_load_at_startup = off
innodb_log_file_size = 16M
innodb_undo_tablespaces = 0
# Through the page cache, as the paper's MySQL 5.7 does.
innodb_flush_method = fsync
query_cache_type = 1
query_cache_size = {cache}
"""
# The load only reads, as the paper's, so that instances share the files of their base.
READ_ONLY = "innodb_read_only = on\n"
# A ring of io_uring cannot be dumped by CRIU.
NO_RINGS = "--innodb-use-native-aio=off"
ACCOUNT = f"""CREATE USER IF NOT EXISTS {USER}@'%' IDENTIFIED BY '{PASSWORD}';
GRANT ALL ON *.* TO {USER}@'%';
CREATE DATABASE IF NOT EXISTS {DATABASE};
"""


@dataclass(frozen=True)
class Question:
    """The first query of each instance, by which it is ready, and what it must be answered."""

    sql: str
    answer: tuple[str, ...]

    def ask(self, host: str, port: int, within_s: float, is_hopeless: Callable[[], bool] = lambda: False) -> None:
        """Until it is answered, and rightly."""
        rows = first_answer(host, port, self.sql, within_s, is_hopeless)
        if len(rows) != 1 or tuple(rows[0]) != self.answer:
            raise Failed(f"another record: {rows!r:.200}")


@dataclass(frozen=True)
class Database:
    """Loaded and shut down; nothing writes to its files any more."""

    work: Workspace
    files: Path
    """Its data directory, root's."""
    records: int
    first: Question
    checksum: tuple[str, ...]
    read_only: bool
    unix_socket: bool
    """It listens at a unix socket too, as Debian's does."""

    @property
    def table_bytes(self) -> int:
        return (self.files / DATABASE / "usertable.ibd").stat().st_size

    def cache_bytes(self, state: str) -> int:
        return max(MIB, CACHE_MIB[state] * MIB * self.records // PAPER_RECORDS)

    def server(self, state: str, *options: str) -> Server:
        """For an instance in a root directory of its own."""
        socket = "/tmp/mysql.sock" if self.unix_socket else ""
        conf = settings(f"/{DATA}", "/tmp", socket, PORT, "*", self.cache_bytes(state)) + (READ_ONLY if self.read_only else "")
        command = ["mariadbd", "--defaults-file=/etc/mysql/my.cnf", *options]
        return Server("mariadb", command, PORT, {"etc/mysql/my.cnf": conf})

    def tarball(self, server: Server, name: str) -> Path:
        """Settings and files."""
        tree, tar = self.work.dir / f"tree-{name}", self.work.dir / f"{name}.tar"
        self.lay_out(server, tree)
        command("tar", "-c", "-f", tar, "--numeric-owner", "-C", tree, ".", timeout=300)
        shutil.rmtree(tree)
        return tar

    def lay_out(self, server: Server, root: Path) -> None:
        """The same, over what is in a root directory."""
        for name, content in server.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(content))
        self.copy_files(root)

    def copy_files(self, root: Path) -> None:
        """The table's, to where a server has them."""
        (root / DATA).mkdir(parents=True, exist_ok=True)
        command("cp", "-a", f"{self.files}/.", root / DATA, timeout=300)

    def check(self, host: str, port: int) -> None:
        """All records are there, and what they were when they were loaded."""
        if tuple(ask(host, port, RECORDS)[0]) != self.checksum:
            raise Failed("its records are not those that were loaded")


def settings(data: str, temporary: str, socket: str, port: int, address: str, cache_bytes: int) -> str:
    return CONF.format(data=data, temporary=temporary, socket=socket, port=port, address=address, pool=POOL_MIB, cache=cache_bytes)


def build(
    work: Workspace, program: Path, records: int, read_only: bool, unix_socket: bool, say: Callable[[str], None]
) -> Database:
    """Runs mariadb on this machine's loopback, outside of any sandbox, and loads it."""
    files, temporary, conf = work.dir / "base-data", work.dir / "base-tmp", work.dir / "base.cnf"
    temporary.mkdir()
    port = free_port()
    conf.write_text(settings(str(files), str(temporary), f"{temporary}/sock", port, "127.0.0.1", MIB))
    (work.dir / "base.sql").write_text(ACCOUNT)
    options = ["--skip-test-db", "--auth-root-authentication-method=normal"]
    command("mariadb-install-db", f"--defaults-file={conf}", *options, timeout=300)
    fast = ["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=256M", "--skip-log-bin"]
    log = work.dir / "base.log"
    with open(log, "wb") as output:
        words = ["mariadbd", f"--defaults-file={conf}", f"--init-file={work.dir / 'base.sql'}", *fast]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        first_answer("127.0.0.1", port, "SELECT 1", 120)
        say(f"loading {records} records")
        load.insert(program, "127.0.0.1", port, records)
        session = Session("127.0.0.1", port, timeout=300)
        checksum = tuple(session.ask(RECORDS)[0])
        sql = "SELECT SQL_NO_CACHE * FROM usertable ORDER BY YCSB_KEY LIMIT 1"
        first = Question(sql, tuple(session.ask(sql)[0]))
        # Nothing is left to be purged or merged, as a server that may not write wants it.
        session.ask("SET GLOBAL innodb_fast_shutdown = 0")
        session.ask("SHUTDOWN")
        session.close()
        if process.wait(120) != 0:
            raise Failed(f"mariadb: exit {process.returncode}: {log.read_text(errors='replace')[-500:]}")
    except Failed as e:
        raise Failed(f"{e}; its log ends with: {log.read_text(errors='replace')[-500:]}") from e
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
    if checksum[0] != str(records):
        raise Failed(f"of {records} records {checksum[0]} were loaded")
    shutil.rmtree(temporary)
    return Database(work, files, records, first, checksum, read_only, unix_socket)


def caches(host: str, port: int) -> dict[str, int]:
    """What the query cache counts."""
    names = ", ".join(f"'{name}'" for name in HITS)
    return {name: int(value) for name, value in ask(host, port, f"SHOW GLOBAL STATUS WHERE Variable_name IN ({names})")}
