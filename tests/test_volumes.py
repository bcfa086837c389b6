"""Volumes: files of this machine inside procs, through every tier. They stay here, and so does a proc that has them."""

from __future__ import annotations

import ast
import os
import pwd
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import servers, logged
from harness.clients import Lines, Redis, http_get
from harness.kip import Kip, Proc
from harness.programs import SOURCES
from harness.wait import wait_for

CHANGED = r"WARN.*its snapshot cannot be used"


@pytest.fixture(scope="module")
def module_kip(module_kip: Kip) -> Iterator[Kip]:
    yield module_kip
    for view in module_kip.json("volume", "ls"):
        module_kip.cli("volume", "rm", view["name"])


@pytest.fixture
def host(tmp_path: Path) -> Path:
    path = tmp_path / "host"
    path.mkdir()
    return path


def volumes(*specs: str) -> list[str]:
    return [word for spec in specs for word in ("-v", spec)]


def lines(kip: Kip, name: str, *specs: str, flags: tuple[str, ...] = ()) -> Proc:
    """A proc that does as it is told; its own program is in a volume that is one file."""
    program = f"{SOURCES / 'lines.py'}:/srv/lines.py:ro"
    command = ["/usr/bin/python3", "/srv/lines.py", "8080"]
    return kip.run(name, command, ports=["8080"], flags=[*volumes(program, *specs), *flags])


def ask(proc: Proc, *expressions: str) -> list[object]:
    client = Lines(proc.port())
    answers = [client.ask(expression) for expression in expressions]
    client.close()
    return [value(answer) for answer in answers]


def value(answer: str) -> object:
    try:
        return ast.literal_eval(answer)
    except (SyntaxError, ValueError):
        return answer  # an error's words


def cold_starts(kip: Kip, name: str) -> list[str]:
    return [e["detail"] for e in kip.events() if e["name"] == name and e["kind"] == "cold-start"]


# What they are.


# promise volumes: files and directories of the host, with the ids on the disk as ids inside,
#   writable for every user inside as the modes say; what is missing below DST is made in the proc's
#   own files
# held by: this, `tests/test_volumes.py::test_volumes_in_volumes_and_the_order`
def test_files_are_the_hosts_with_ids_as_they_are_inside(kip: Kip, host: Path) -> None:
    (host / "own").write_text("from the host")
    os.chown(host / "own", 33, 34)
    proc = lines(kip, "ids", f"{host}:/data/deep/er")
    stat = "(lambda s: (s.st_uid, s.st_gid))(os.stat('/data/deep/er/%s'))"
    assert ask(proc, stat % "own", stat % "", "open('/data/deep/er/own').read()") == [(33, 34), (0, 0), "from the host"]
    ask(proc, "open('/data/deep/er/made', 'w').write('x' * 10)", "os.chown('/data/deep/er/made', 1000, 7)")
    made = (host / "made").stat()
    assert (made.st_uid, made.st_gid, made.st_size) == (1000, 7, 10)
    # As another user of the proc's, too.
    os.chmod(host, 0o777)
    proc.exec("/usr/bin/python3", "-c", "import os; os.setuid(65); open('/data/deep/er/other', 'w').close()")
    assert (host / "other").stat().st_uid == 65
    # What it lies on is in the proc's own files, and root's inside.
    upper = (kip.data / "procs/ids/upper/root/data/deep").stat()
    assert upper.st_uid >= 0x20000000 and upper.st_uid % 65536 == 0
    assert not (kip.data / "procs/ids/upper/root/data/deep/er/made").exists()


# promise volumes: no setuid, no devices, read-only if so wanted, after every kind of wake
# held by: this, `kip_checkpoint::policy::tests::volumes_are_where_they_were_and_as_closed`
def test_neither_setuid_nor_devices_nor_ways_out(kip: Kip, host: Path) -> None:
    (host / "ro").mkdir()
    shutil.copy("/usr/bin/id", host / "id")
    os.chmod(host / "id", 0o4755)
    os.mknod(host / "null", 0o020666, os.makedev(1, 3))
    (host / "ro/text").write_text("x")
    proc = lines(kip, "closed", f"{host}:/data", f"{host / 'ro'}:/ro:ro", flags=("--allow-setuid",))

    def mounts() -> dict[str, set[str]]:
        [text] = ask(proc, "open('/proc/self/mountinfo').read()")
        return {line.split()[4]: set(line.split()[5].split(",")) for line in text.splitlines()}

    def check() -> None:
        table = mounts()
        assert {"nosuid", "nodev", "rw"} <= table["/data"], table
        assert {"nosuid", "nodev", "ro"} <= table["/ro"], table
        assert "Read-only" in ask(proc, "open('/ro/text', 'w')")[0]
        assert "PermissionError" in ask(proc, "open('/data/null', 'w')")[0]
        out = proc.exec("/usr/bin/python3", "-c", "import os; os.setuid(5); os.execv('/data/id', ['id', '-u'])").stdout
        assert out == "5\n", "a setuid program in a volume"

    check()
    proc.sleep()
    proc.wake()
    assert proc.rebuilt()
    check()
    # By CRIU: a FIFO in a volume is in no plan.
    ask(proc, "os.mkfifo('/data/fifo')", "fifo = os.open('/data/fifo', os.O_RDWR)")
    proc.sleep()
    proc.wake()
    assert not proc.rebuilt()
    check()


def test_links_inside_lead_nowhere_else(kip: Kip, host: Path) -> None:
    """DST is looked up as the proc would, whatever it has made of its directories since."""
    proc = lines(kip, "links", f"{host}:/var/run/a/b")  # /var/run is a link to /run
    ask(proc, "open('/run/a/b/x', 'w').close()")
    assert (host / "x").exists()
    proc.sleep()
    assert ask(proc, "os.listdir('/run/a/b')") == [["x"]]
    outside = host.parent / "outside"
    outside.mkdir()
    ask(proc, f"os.makedirs('{outside}')", f"os.symlink('../../../../../../../../{outside}', '/srv/up')")
    proc.stop()
    upper = kip.data / "procs/links/upper/root"
    # The parent of DST becomes a link that would lead to the host's directory if it was followed
    # there.
    shutil.rmtree(upper / "run/a")
    os.symlink(f"/../../../..{outside}", upper / "run/a")
    proc.start()
    wait_for("it listens", lambda: ask_or_none(proc, f"os.listdir('{outside}/b')") == [["x"]])
    assert list(outside.iterdir()) == []


def ask_or_none(proc: Proc, expression: str) -> list[object] | None:
    try:
        return ask(proc, expression)
    except (OSError, AssertionError):
        return None


# promise volumes: a missing SRC, the data directory, `/proc`, `/sys`, `/dev`, `/usr`, two at one
#   place, a file system without mappings of ids: one line
# held by: this, `tests/test_volumes.py::test_a_file_system_without_mapping_is_named`,
#   `kip_types::volume::tests::what_is_the_sandboxs_own_cannot_be_covered`,
#   `kip_engine::volumes::tests::paths_are_resolved_and_kips_own_are_refused`
def test_what_cannot_be_is_refused(kip: Kip, host: Path) -> None:
    (host / "file").write_text("")
    (host / "link").symlink_to(kip.data / "procs")
    os.mkfifo(host / "fifo")
    for spec, why in [
        (f"{host}/none:/data", "there is no .*none.*make it first"),
        (f"{host}/fifo:/data", "neither a file nor a directory"),
        (f"{host}/link:/data", "Kip's own"),
        (f"{kip.data}:/data", "Kip's own"),
        ("/:/host", "Kip's own"),
        ("a:/proc/x", "the sandbox's own"),
        ("a:/usr", "the sandbox's own"),
        ("a:/etc/passwd", "Not a directory|directory"),
    ]:
        said = kip.refused("run", "--name", "no", "-v", spec, "--", "/bin/true")
        assert re.search(why, said), said
        assert "no" not in kip.names()
    assert "two volumes are at /x" in kip.refused("run", *volumes("a:/x", "b:/x/"), "--", "/bin/true")
    # A relative path begins with a dot and is that of the command's directory.
    assert "make it first" in kip.refused("run", "-v", "./a:/x", "--", "/bin/true")
    done = kip.cli("run", "-v", "a/b:/x", "--", "/bin/true", check=False)
    assert done.returncode == 2 and "SRC:DST" in done.stderr, done
    assert not (host / "none").exists()


def test_a_file_system_without_mapping_is_named(kip: Kip) -> None:
    said = kip.refused("run", "--name", "no", "-v", "/sys/kernel:/data", "--", "/bin/true")
    assert "/sys/kernel cannot be mounted with a mapping of user ids" in said and "ext4" in said
    assert "no" not in kip.names()


def test_volumes_in_volumes_and_the_order(kip: Kip, host: Path) -> None:
    """The outer one comes first, however they are written; what the inner one lies on is made in the outer one."""
    for name in ("outer", "inner", "usr"):
        (host / name).mkdir()
        (host / name / name).write_text(name)
    specs = (f"{host}/inner:/data/a/b", f"{host}/outer:/data", f"{host}/usr:/usr/share/own")
    proc = lines(kip, "nested", *specs)
    for turn in range(3):
        seen = ask(proc, "sorted(os.listdir('/data'))", "os.path.getsize('/data/a/b/inner')", "open('/usr/share/own/usr').read()")
        assert seen == [["a", "outer"], 5, "usr"]
        if turn == 0:
            ask(proc, "f = open('/data/a/b/open', 'w+')", "g = open('/usr/share/own/usr')")
        proc.sleep()
    assert ask(proc, "f.write('late') and f.flush()", "g.read()") == [None, "usr"]
    assert (host / "inner/open").read_text() == "late" and (host / "outer/a/b").stat().st_uid == 0


# Named ones.


# promise volumes: a name is a volume that Kip makes, keeps when the proc is removed, and deletes
#   only when no proc has it
def test_named_volumes_stay(kip: Kip) -> None:
    proc = lines(kip, "first", "kept:/data", "kept:/again:ro")
    ask(proc, "open('/data/x', 'w').write('kept' * 5000)")
    assert ask(proc, "open('/again/x').read()[:4]") == ["kept"]
    [view] = [v for v in kip.json("volume", "ls") if v["name"] == "kept"]
    assert view["users"] == ["first"] and view["bytes"] >= 20_000 and view["path"] == str(kip.data / "volumes/kept")
    assert "in use by first" in kip.refused("volume", "rm", "kept")
    proc.stop()
    assert "in use by first" in kip.refused("volume", "rm", "kept")
    proc.remove()
    second = lines(kip, "second", "kept:/elsewhere")
    assert ask(second, "open('/elsewhere/x').read()[:4]") == ["kept"]
    assert "kept" in kip.cli("volume", "ls").stdout
    second.remove()
    kip.cli("volume", "rm", "kept")
    assert not (kip.data / "volumes/kept").exists()
    assert "there is no volume" in kip.refused("volume", "rm", "kept")


# promise volumes: `kip inspect`, `kip why`, `kip snapshot show` name them
# held by: this, `tests/test_volumes.py::test_archived_it_wakes_here_and_nowhere_else`
def test_inspect_and_why_name_them(kip: Kip, host: Path) -> None:
    proc = lines(kip, "named", f"{host}:/data:ro", "seen:/seen")
    assert proc.inspect()["spec"]["volumes"][1:] == [
        {"source": {"host": str(host)}, "target": "/data", "read_only": True},
        {"source": {"named": "seen"}, "target": "/seen", "read_only": False},
    ]
    text = kip.cli("inspect", "named").stdout
    assert f"{host} at /data, read-only" in text and "seen at /seen" in text
    why = kip.json("why", "named")["pinned_by"]
    assert f"{host} at /data" in why and f"volume seen at /seen, {kip.data}/volumes/seen" in why
    assert "pinned by" in kip.cli("why", "named").stdout


# promise volumes: several procs share one; one sleeps while another writes
def test_two_procs_share_one(kip: Kip) -> None:
    """One writes while the other sleeps; the sleeper has the same file open, and goes on with it."""
    one, two = (lines(kip, name, "shared:/data") for name in ("one", "two"))
    opened = "db = sqlite3.connect('/data/db', isolation_level=None, timeout=5)"
    for proc in (one, two):
        ask(proc, "import sqlite3", opened)
    ask(one, "db.execute('create table t (n)').fetchall()")
    for n in range(4):
        awake, asleep = (one, two) if n % 2 else (two, one)
        asleep.sleep()
        assert ask(awake, f"db.execute('insert into t values ({n})').rowcount") == [1]
        assert ask(asleep, "db.execute('select n from t').fetchall()") == [[(m,) for m in range(n + 1)]]
    assert not cold_starts(kip, "one") + cold_starts(kip, "two")


# Through the tiers.

OPEN = [
    "import mmap, fcntl",
    "f = open('/data/file', 'w+b', 0)",
    "f.write(b'0123456789')",
    "m = mmap.mmap(os.open('/data/mapped', os.O_RDWR), 0)",
    "m[:5] = b'begun'",
    "log = open('/data/log', 'a')",
    "fcntl.flock(f, fcntl.LOCK_EX)",
    "os.chdir('/data/dir')",
]
USE = [
    "f.write(b'+')",
    "bytes(m[:5])",
    "m[5:9] = b'more'",
    "log.write('line\\n') + (log.flush() or 0)",
    "os.getcwd()",
    "os.listdir('.')",
]


def prepare(host: Path) -> None:
    (host / "mapped").write_bytes(bytes(8192))
    (host / "dir").mkdir()
    (host / "dir/in").write_text("")


def check_use(proc: Proc, host: Path, times: int) -> None:
    assert ask(proc, *USE) == [1, b"begun", None, 5, "/data/dir", ["in"]]
    assert (host / "file").read_bytes() == b"0123456789" + b"+" * times
    assert (host / "mapped").read_bytes()[:9] == b"begunmore"
    assert (host / "log").read_text() == "line\n" * times


# promise volumes: open files, shared mappings, locks and the working directory are there after
#   hibernating, parking and waking natively
def test_open_files_mappings_and_locks(kip: Kip, host: Path) -> None:
    prepare(host)
    proc = lines(kip, "open", f"{host}:/data")
    ask(proc, *OPEN)
    for times in range(1, 4):
        proc.hibernate()
        check_use(proc, host, 3 * times - 2)
        proc.sleep()
        check_use(proc, host, 3 * times - 1)
        assert proc.rebuilt()
        with open(host / "log", "a") as log:  # another process's, at the end
            log.write("")
        proc.sleep()
        proc.wake()
        check_use(proc, host, 3 * times)
    assert not cold_starts(kip, "open")
    proc.stop()
    proc.start()
    wait_for("it is there again", lambda: ask_or_none(proc, "os.path.getsize('/data/file')") == [19])


# promise volumes: the same by CRIU, with a unix socket bound in it and a deleted file
def test_by_criu_a_socket_and_a_deleted_file(kip: Kip, host: Path) -> None:
    """What is in no plan: a unix socket bound in a volume, and a file that is open and has no name any more."""
    prepare(host)
    proc = lines(kip, "socket", f"{host}:/data")
    ask(proc, *OPEN)
    ask(
        proc,
        "s = socket.socket(socket.AF_UNIX)",
        "s.bind('/data/socket')",
        "s.listen()",
        "gone = open('/data/gone', 'w+')",
        "gone.write('nameless') and gone.flush()",
        "os.unlink('/data/gone')",
    )
    for times in range(1, 4):
        proc.sleep()
        check_use(proc, host, times)
        assert not proc.rebuilt()
        assert ask(proc, "gone.seek(0) or gone.read()") == ["nameless"]
        assert not (host / "gone").exists()
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(host / "socket"))
        client.send(b"to its own")
        assert ask(proc, "s.accept()[0].recv(99)") == [b"to its own"]
        client.close()
    assert sorted(p.name for p in host.iterdir()) == ["dir", "file", "log", "mapped", "socket"]


# promise volumes: daemon and keeper killed, a reboot
# held by: this, `tests/test_volumes.py::test_reboot`
def test_killed_daemon_and_keeper(kip: Kip, host: Path) -> None:
    kip.expected += logged.KEEPER_KILLED
    prepare(host)
    asleep, awake = (lines(kip, name, f"{host}:/data{n}", f"{host}:/data") for n, name in enumerate(("asleep", "awake")))
    ask(asleep, *OPEN)
    ask(awake, "own = open('/data1/own', 'w')")
    asleep.sleep()
    os.kill(kip.info()["keeper_pid"], 9)
    wait_for("there is another keeper", lambda: [e for e in kip.events() if e["kind"] == "keeper"])
    kip.kill()
    kip.up()
    check_use(asleep, host, 1)
    assert ask(awake, "own.write('here') and own.flush()") == [None] and (host / "own").read_text() == "here"
    asleep.sleep()
    awake.sleep()
    kip.kill()
    kip.up()
    check_use(asleep, host, 2)
    assert ask(awake, "own.name") == ["/data1/own"]


def test_reboot(fresh_kip: Callable[..., Kip], host: Path) -> None:
    kip = fresh_kip()
    prepare(host)
    proc = lines(kip, "sleeper", f"{host}:/data", "db:/db")
    ask(proc, *OPEN, "d = open('/db/x', 'w')")
    for times in range(1, 3):
        proc.sleep()
        kip.reboot()
        assert proc.state == "parked"
        check_use(proc, host, times)
        assert not proc.rebuilt()
        assert ask(proc, "d.write('x') + (d.flush() or 0)") == [1]
        assert (kip.data / "volumes/db/x").read_text() == "x" * times
    assert not cold_starts(kip, "sleeper")


# promise volumes: real servers
# held by: this, `tests/test_volumes.py::test_postgres_in_a_volume`
def test_redis_keeps_its_files_in_one(kip: Kip) -> None:
    server = servers.redis()
    command = ["/data" if word == "/tmp" else word for word in server.command] + ["--appendonly", "yes"]
    redis = kip.run("redis", command, ports=["6379"], flags=volumes("redis:/data"))
    client = Redis(redis.port())
    for turn in range(4):
        client.ask_all([("SET", f"k{turn}:{n}", b"v" * 100) for n in range(500)])
        redis.hibernate() if turn % 2 else redis.sleep()
        assert client.ask("DBSIZE") == 500 * (turn + 1)
    client.ask("BGREWRITEAOF")
    wait_for("it is rewritten", lambda: b"aof_rewrite_in_progress:0" in client.ask("INFO", "persistence"))
    redis.sleep()
    assert client.ask("SET", "last", b"one") and redis.rebuilt()
    client.close()
    redis.stop()
    redis.start()
    again = wait_for("it has loaded", lambda: size_or_none(redis), 30)
    assert again == 2001, "what it had written is in the volume"
    redis.remove()
    other = kip.run("other", command, ports=["6379"], flags=volumes("redis:/data"))
    assert wait_for("it has loaded", lambda: size_or_none(other), 30) == 2001


def size_or_none(redis: Proc) -> int | None:
    try:
        client = Redis(redis.port())
        size = client.ask("DBSIZE")
        client.close()
        return size if isinstance(size, int) and size > 0 else None
    except (OSError, AssertionError, EOFError):
        return None


POSTGRES = """
set -e
as="setpriv --reuid postgres --regid postgres --clear-groups"
if [ ! -e /db/PG_VERSION ]; then
    chown postgres /db && chmod 700 /db
    $as /usr/lib/postgresql/15/bin/initdb -D /db -A trust -U kip --no-sync >/dev/null
    echo "host all all all trust" >> /db/pg_hba.conf
fi
exec $as /usr/lib/postgresql/15/bin/postgres -D /db \
    -c listen_addresses='*' -c unix_socket_directories=/db -c dynamic_shared_memory_type=mmap
"""


def psql(proc: Proc, text: str) -> subprocess.CompletedProcess[str]:
    words = ["psql", "-h", "127.0.0.1", "-p", str(proc.port()), "-U", "kip", "-d", "postgres", "-Atqc", text]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def sql(proc: Proc, text: str) -> str:
    done = psql(proc, text)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def postgres(kip: Kip, name: str) -> Proc:
    """One that listens refuses clients until it has read its journal."""
    proc = kip.run(name, ["/bin/sh", "-c", POSTGRES], ports=["5432"], flags=volumes("pg:/db"))
    wait_for("it answers", lambda: psql(proc, "select 1").stdout == "1\n", 30)
    return proc


def test_postgres_in_a_volume(kip: Kip) -> None:
    """A database that runs as another user, with its socket in the volume; then a copy of it in another proc."""
    proc = postgres(kip, "postgres")
    sql(proc, "create table t as select n, md5(n::text) m from generate_series(1, 20000) n")
    want = sql(proc, "select count(*), sum(n), md5(string_agg(m, '' order by n)) from t")
    for turn in range(3):
        proc.hibernate() if turn == 1 else proc.sleep()
        assert sql(proc, "select count(*), sum(n), md5(string_agg(m, '' order by n)) from t") == want
        sql(proc, f"create table turn{turn} (n int)")
    assert not cold_starts(kip, "postgres")
    owner = (kip.data / "volumes/pg/PG_VERSION").stat().st_uid
    assert owner == pwd.getpwnam("postgres").pw_uid, "the disk has ids as they are inside"
    proc.stop()
    proc.remove()
    other = postgres(kip, "other")
    assert sql(other, "select count(*), sum(n), md5(string_agg(m, '' order by n)) from t") == want


# What others do meanwhile.


# promise volumes: what others write while it sleeps it sees as if it had run
def test_what_happens_to_files_that_are_not_open_is_seen(kip: Kip, host: Path) -> None:
    web = servers.lighttpd()
    (host / "page.html").write_bytes(b"old")
    conf = {**web.files}
    conf.pop("srv/www/page.html")
    command = ["/usr/sbin/lighttpd", "-D", "-f", "/etc/kip.conf"]
    (host.parent / "kip.conf").write_text(str(conf["etc/lighttpd/kip.conf"]))
    proc = kip.run("web", command, ports=["8080"], flags=volumes(f"{host}:/srv/www:ro", f"{host.parent}/kip.conf:/etc/kip.conf:ro"))
    assert http_get(proc.port(), "/page.html") == b"old"
    proc.sleep()
    (host / "new.html").write_bytes(b"new")
    (host / "page.html").write_bytes(b"changed")
    assert http_get(proc.port(), "/new.html") == b"new"
    assert proc.rebuilt() and not cold_starts(kip, "web")


# promise volumes: a file that it has open and that is gone, replaced or cut, or that was changed
#   where it alone could write: `kip wake` says which and changes nothing; for a client it starts
#   cold, and tells
# held by: this,
#   `kip_engine::volumes::sleep::tests::what_somebody_else_did_to_a_file_counts_where_the_sleeper_alone_writes`
@pytest.mark.parametrize("what", ["changed", "cut", "replaced", "gone"])
def test_an_open_file_that_is_not_as_it_was_starts_it_cold(kip: Kip, host: Path, what: str) -> None:
    kip.expected += [CHANGED]
    prepare(host)
    proc = lines(kip, what, f"{host}:/data")
    ask(proc, *OPEN)
    proc.sleep()
    file = host / "file"
    if what == "changed":
        file.write_bytes(b"9876543210")
    elif what == "cut":
        os.truncate(file, 3)
    elif what == "replaced":
        (host / "other").write_bytes(b"0123456789")
        (host / "other").rename(file)
    else:
        file.unlink()
    told = {"changed": "was changed from outside", "cut": "was cut", "replaced": "was replaced", "gone": "is gone"}[what]
    said = kip.refused("wake", what)
    assert told in said and str(file) in said and "its snapshot is kept" in said
    assert proc.state == "parked"
    # A client comes: the same refusal once more, then a cold start, and its event tells why.
    socket.create_connection(("127.0.0.1", proc.port())).close()
    wait_for("it has begun anew", lambda: ask_or_none(proc, "'f' in globals()") == [False], 30)
    [event] = cold_starts(kip, what)
    assert told in event and str(file) in event
    ask(proc, "f = open('/data/mapped')")
    proc.sleep()
    assert ask(proc, "f.name") == ["/data/mapped"], "it is a proc like any other"


# promise volumes: a whole volume that is not there: it says so, stays parked and wakes when it is
#   there again
def test_a_volume_that_is_not_there_is_waited_for(kip: Kip, host: Path) -> None:
    """A disk that is not mounted is no reason to forget what it was."""
    disk = host / "disk"
    disk.mkdir()
    prepare(disk)
    proc = lines(kip, "waits", f"{disk}:/data")
    ask(proc, *OPEN)
    proc.sleep()
    disk.rename(host / "away")
    assert f"there is no {disk}" in kip.refused("wake", "waits")
    client = Lines(proc.port())
    client.socket.sendall(b"f.write(b'+')\n")
    wait_for("it has tried", lambda: len([e for e in kip.events() if e["name"] == "waits" and e["kind"] == "refused"]) >= 3)
    assert proc.state == "parked" and not cold_starts(kip, "waits")
    disk.mkdir()  # an empty directory is not it either
    assert "another is there now" in kip.refused("wake", "waits")
    disk.rmdir()
    (host / "away").rename(disk)
    assert client.reader.readline() == b"1\n", "it was woken when the volume was there again"
    client.close()
    assert (disk / "file").read_bytes() == b"0123456789+"
    # Nor can it start without.
    proc.stop()
    disk.rename(host / "away")
    assert f"there is no {disk}" in kip.refused("start", "waits")
    (host / "away").rename(disk)
    proc.start()


# promise volumes: links in SRC are resolved when the proc is made and refused later; DST is looked
#   up within the proc's root
# held by: this, `tests/test_volumes.py::test_links_inside_lead_nowhere_else`,
#   `kip_sandbox::launch::volumes::tests::what_is_missing_is_made_below_the_root_whatever_links_say`
def test_a_volume_that_became_a_link_is_refused(kip: Kip, host: Path) -> None:
    (host / "a").mkdir()
    proc = lines(kip, "linked", f"{host}/a:/data")
    proc.stop()
    (host / "a").rmdir()
    (host / "a").symlink_to("/root")
    assert "a symbolic link is in the path" in kip.refused("start", "linked")


# promise volumes: who moves a directory above a volume cannot be put to sleep, and is told why
def test_it_cannot_sleep_if_it_moves_its_volume(kip: Kip, host: Path) -> None:
    proc = lines(kip, "moves", f"{host}:/data/deep")
    ask(proc, "os.rename('/data', '/moved')")
    assert "was moved" in kip.refused("sleep", "moves")
    assert "was moved" in " ".join(kip.json("why", "moves")["cannot_sleep"])
    ask(proc, "os.rename('/moved', '/data')")
    proc.sleep()
    assert ask(proc, "os.listdir('/data/deep')") == [[]]


# The archive.


# promise volumes: archived it wakes here; another data directory is told what it needs and where;
#   nothing of its volumes is stored
def test_archived_it_wakes_here_and_nowhere_else(fresh_kip: Callable[..., Kip], host: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    here = fresh_kip("--store", str(store))
    prepare(host)
    (host / "secret").write_bytes(b"marrow" * 100_000)
    proc = lines(here, "pinned", f"{host}:/data", "db:/db")
    ask(proc, *OPEN, "d = open('/db/x', 'w+')", "os.unlink('/data/dir/in') or open('/data/dir/in', 'w').close()")
    for times in range(1, 3):
        proc.sleep()
        here.cli("sleep", "pinned", "--to", "archived", "--clock", "auto")
        shown = here.json("snapshot", "show", "pinned")
        machine = os.uname().nodename
        assert f"{host} at /data on machine {machine}" in shown["pinned_by"]
        assert f"{here.data}/volumes/db at /db on machine {machine}" in shown["pinned_by"]
        assert "pinned by" in here.cli("snapshot", "show", "pinned").stdout
        roots = {root["name"]: root["bytes"] for root in shown["roots"]}
        assert sum(bytes for name, bytes in roots.items() if "pins" not in name) < 300_000, f"none of the volumes' {roots}"
        if times == 1:
            there = fresh_kip("--store", str(store), start=False)
            (there.data / "archive").mkdir(parents=True)
            shutil.copy(here.data / "archive/default.keys", there.data / "archive/default.keys")
            there.up()
            said = there.refused("wake", "pinned")
            assert "pinned stays in data directory" in said and f"{host} at /data on machine {machine}" in said, said
            assert there.names() == []
        # Fetched: the policy knows the mounts.
        check_use(proc, host, times)
        assert ask(proc, "d.write('x') + (d.flush() or 0)") == [1]
    assert not cold_starts(here, "pinned")
    proc.sleep()
    here.cli("sleep", "pinned", "--to", "archived", "--clock", "auto")
    (host / "file").write_bytes(b"")
    assert "while it slept" in here.refused("wake", "pinned")
    here.expected += [CHANGED]
    socket.create_connection(("127.0.0.1", proc.port())).close()
    wait_for("it has begun anew", lambda: ask_or_none(proc, "'f' in globals()") == [False], 30)
