"""A proc that was archived wakes in another data directory, with its memory and its files; where it was, it cannot wake any more.

Both share a store, a directory here, and the realm's keys; both run on one machine, so a proc gets another block of user ids,
another address and another port of the host."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import s3, servers, logged
from harness.clients import Lines, Redis, http_get
from harness.kip import Kip, Proc
from harness.rows import one_in, rest_in_soak
from harness.wait import wait_for
from test_rolling import Waiting

# A daemon that finds something half done may say so.
RECOVERING = [*logged.DAEMON_KILLED, *logged.KEEPER_KILLED, *logged.PAGER_KILLED]


@pytest.fixture
def where(request: pytest.FixtureRequest, tmp_path: Path, store: Path) -> Iterator[str]:
    """The store's URL: the directory, or a bucket of a real S3 server."""
    if getattr(request, "param", "directory") == "directory":
        yield str(store)
    else:
        with s3.server(tmp_path / "server") as url:
            yield url


@pytest.fixture
def here(fresh_kip: Callable[..., Kip], where: str) -> Kip:
    return fresh_kip("--store", where)


@pytest.fixture
def there(fresh_kip: Callable[..., Kip], here: Kip, where: str) -> Kip:
    """Another data directory with the same keys."""
    kip = fresh_kip("--store", where, start=False)
    (kip.data / "archive").mkdir(parents=True)
    shutil.copy(here.data / "archive" / "default.keys", kip.data / "archive" / "default.keys")
    kip.up()
    return kip


def adopt(kip: Kip, name: str, *flags: str) -> Proc:
    answer = kip.cli("wake", name, *flags).stdout
    assert "woke from archived" in answer, answer
    return Proc(kip, name)


FILES = """
set -e
cd /srv
echo own > made
ln made again
ln -s made link
mkdir -p deep/er && echo x > deep/er/file
chown 7:8 made && chmod 4750 made
chown -h 9:10 link
setfattr -n user.note -v value made 2>/dev/null || python3 -c 'import os; os.setxattr("/srv/made", "user.note", b"value")'
rm page.html && echo other > page.html
rm /etc/hostname
mkdir -p /usr/local/lib/own && echo usr > /usr/local/lib/own/file
rm -rf /usr/share/doc/base-files 2>/dev/null || true
truncate -s 30M sparse
printf middle | dd of=sparse bs=1 seek=20000000 conv=notrunc 2>/dev/null
mkfifo pipe
touch -d @1234567890 deep
"""
LOOK = """
import hashlib, os, stat
for top in ("/srv", "/usr/local/lib/own"):
    for directory, names, files in sorted(os.walk(top)):
        for name in sorted(names + files):
            path = os.path.join(directory, name)
            s = os.lstat(path)
            content = os.readlink(path) if stat.S_ISLNK(s.st_mode) else ""
            if stat.S_ISREG(s.st_mode):
                content = hashlib.sha256(open(path, "rb").read()).hexdigest()
            xattrs = [] if stat.S_ISLNK(s.st_mode) else [(x, os.getxattr(path, x)) for x in sorted(os.listxattr(path))]
            time = 0 if name == "sparse" else s.st_mtime_ns
            print(path, oct(s.st_mode), s.st_uid, s.st_gid, s.st_size, s.st_nlink, time, s.st_blocks < 4096, content, xattrs)
print(os.path.exists("/etc/hostname"), os.path.exists("/usr/share/doc/base-files"))
"""


def look(proc: Proc) -> str:
    return proc.exec("/usr/bin/python3", "-c", LOOK).stdout


# promise P5: what runs nowhere wakes in another data directory on the same machine, with memory and
#   files
# held by: this, `tests/test_adopt.py::test_redis_with_its_data_and_the_fence`; on another machine:
#   untested
# promise P11: the proc's own files, those that it wrote, its tarball and what it has pinned of its
#   base, go with it; only what is not stored already is stored; what its processes have open or
#   mapped comes first
# held by: this, `crates/archive/tests/files.rs::what_is_known_is_neither_read_nor_stored_again`,
#   `tests/test_fallback.py::test_files_that_are_open_come_first`; on demand, file by file: not
#   built
# promise archive: the proc's own files are part of the generation, with deletions, owners, modes,
#   times, attributes, links and holes; unchanged ones are neither read nor stored again; one that
#   no proc may have is named, and the proc stays parked
# held by: this, `tests/test_adopt.py::test_a_file_that_cannot_be_archived_is_named`,
#   `kip_offload::tests::the_procs_own_files_come_along_and_unchanged_ones_are_not_stored_again`
def test_a_web_server_with_its_files(here: Kip, there: Kip, tmp_path: Path) -> None:
    """Every file that it had, with owner, mode, times, attributes, links and holes; none that it had removed."""
    server = servers.lighttpd()
    proc = here.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    proc.exec("sh", "-c", FILES)
    before = look(proc)
    assert "made" in before and "False" in before.splitlines()[-1], before
    proc.archive()
    new = adopt(there, "web")
    assert look(new) == before
    assert new.inspect()["generation"] == proc.inspect()["generation"]
    served = http_get(new.port(), "/page.html")
    # It sleeps, wakes and is archived there as any other, and comes back here.
    new.sleep()
    assert http_get(new.port(), "/page.html") == served and look(new) == before
    new.archive()
    assert http_get(new.port(), "/page.html") == served
    new.exec("sh", "-c", "echo changed > /srv/made")
    new.archive()
    there.cli("stop", "web")
    there.cli("start", "web")
    assert "changed" in new.exec("cat", "/srv/made").stdout, "a cold start has its files and its tarball"


# promise P12: what a wake elsewhere needs is in the store: sockets, timers, files, what engine and
#   processor must be able to do
# held by: this, `tests/test_fallback.py::test_a_newer_engine`,
#   `tests/test_policy.py::test_another_processor`; on another machine: untested
# promise archive: where it was it is `elsewhere`: `kip ps` and `kip why` say so, `kip rm` removes
#   what is left without asking the store
@pytest.mark.parametrize("where", rest_in_soak(["directory", "bucket"], ["bucket"]), indirect=True)
def test_redis_with_its_data_and_the_fence(here: Kip, there: Kip) -> None:
    """Where it was it is seen to be elsewhere: it does not wake for traffic nor by request, nothing of it is stored or removed."""
    server = servers.redis()
    proc = here.run("redis", server.command, ports=server.published)
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", b"%d" % i * 300) for i in range(5000)])
    port = proc.port()
    assert "nor is it in store" in there.refused("wake", "redis"), "what was never archived is not there"
    proc.archive()
    new = adopt(there, "redis")
    other = Redis(new.port())
    assert other.ask("GET", "key:4999") == b"4999" * 300
    other.ask("SET", "written", "there")
    assert proc.state == "archived", "nobody has asked here yet"
    for words in (["wake", "redis"], ["stop", "redis"], ["exec", "redis", "--", "true"], ["sleep", "redis"], ["start", "redis"]):
        refused = here.refused(*words)
        assert ("has taken it over" in refused and "`kip rm redis`" in refused) or "elsewhere" in refused, (words, refused)
    assert proc.state == "elsewhere"
    assert "taken over by" in here.cli("why", "redis").stdout and here.json("why", "redis")["taken_over_by"]
    assert "elsewhere" in here.cli("ps").stdout
    with pytest.raises(OSError):
        Redis(port, timeout=3).ask("PING")
    # After a start of the daemon as well; and what is left goes without a word to the store.
    here.kill()
    here.up()
    assert proc.state == "elsewhere"
    here.cli("rm", "redis")
    assert other.ask("GET", "written") == b"there"
    new.archive()
    # It is free again: back it comes.
    back = adopt(here, "redis")
    assert Redis(back.port()).ask("GET", "written") == b"there"
    assert "has taken it over" in there.refused("wake", "redis")


@pytest.mark.parametrize("where", rest_in_soak(["directory", "bucket"], ["bucket"]), indirect=True)
def test_traffic_finds_the_fence(here: Kip, there: Kip) -> None:
    """A client connects where the proc was: it does not run twice, and one event says that it is elsewhere."""
    server = servers.redis()
    proc = here.run("redis", server.command, ports=server.published)
    port = proc.port()
    proc.archive()
    adopt(there, "redis")
    with pytest.raises(OSError):
        Redis(port, timeout=5).ask("PING")
    proc.wait_state("elsewhere", 20)
    told = wait_for("it is said", lambda: [event for event in here.events() if event["kind"] == "elsewhere"], 10)
    assert len(told) == 1 and "has taken it over" in told[0]["detail"], told


# promise archive: `kip wake NAME` or `kip wake ID` takes over what another data directory has
#   archived; several of a name are told apart by `--id`; what may be running, or cannot be read, is
#   not taken
# held by: this, `tests/test_adopt.py::test_without_its_keys_nothing_is_taken`
def test_which_one(here: Kip, there: Kip) -> None:
    """Names that are not there, several of one name, ids, a name that is taken, one that runs."""
    server = servers.redis()
    assert "nor is it in store" in there.refused("wake", "redis")
    ids = []
    for turn in range(2):
        proc = here.run("redis", server.command, ports=server.published)
        Redis(proc.port()).ask("SET", "turn", turn)
        proc.archive()
        ids.append((here.data / "procs" / "redis" / "archive-id").read_text())
        # What is here is lost, and the store does not hear of it.
        here.kill()
        shutil.move(here.data / "procs" / "redis", here.data.parent / f"lost-{turn}")
        here.expected += RECOVERING + [r"stays on disk|left behind|nobody knows"]
        here.up()
    refused = there.refused("wake", "redis")
    assert all(id in refused for id in ids) and "--id" in refused, refused
    one = adopt(there, "redis", "--id", ids[1])
    assert Redis(one.port()).ask("GET", "turn") == b"1"
    assert "exists already" in there.refused("wake", "redis", "--id", ids[0])
    other = adopt(there, "copy", "--id", ids[0])
    assert Redis(other.port()).ask("GET", "turn") == b"0"
    assert "may be running it" in here.refused("wake", "redis")
    assert "nor is it in store" in here.refused("wake", "0" * 32)
    other.archive()
    assert Redis(adopt_by_id(here, ids[0], "copy").port()).ask("GET", "turn") == b"0"


def adopt_by_id(kip: Kip, id: str, name: str) -> Proc:
    kip.cli("wake", id)
    return Proc(kip, name)


def test_without_its_keys_nothing_is_taken(here: Kip, fresh_kip: Callable[..., Kip], store: Path) -> None:
    proc = here.run("redis", servers.redis().command, ports=servers.redis().published)
    proc.archive()
    stranger = fresh_kip("--store", str(store))
    refused = stranger.refused("wake", "redis")
    assert "not everything in the store can be read" in refused and "key" in refused, refused
    assert stranger.names() == []
    assert Redis(proc.port()).ask("PING") == "PONG"


STEPS = ["adopt-recorded", "adopt-held", "adopt-headed", "adopt-files", "adopt-done", "fetch-done", "fetch-recorded", "wake-intent"]


# promise archive: killed at any step of that it is still free in the store, or here; a store that
#   is gone changes nothing
# held by: this, `tests/test_adopt.py::test_a_store_that_is_gone_in_the_middle`
@pytest.mark.parametrize("step", one_in(2, STEPS))
def test_killed_at_step(here: Kip, there: Kip, tmp_path: Path, step: str) -> None:
    """It is either still free in the store or in the other directory; never in both, never lost."""
    server = servers.alarm()
    proc = here.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    assert Lines(proc.port()).ask("hello") == "hello"
    proc.exec("sh", "-c", "echo kept > /srv/kept")
    proc.archive()
    there.down()
    there.expected += RECOVERING
    shutil.copytree(here.data / "archive", there.data / "archive", ignore=shutil.ignore_patterns("owner", "index"))
    there.up("--fault-at", step)
    assert there.cli("wake", "web", check=False).returncode != 0
    assert there.wait_dead(30) == -signal.SIGKILL
    there.up()
    headed = step not in ("adopt-recorded", "adopt-held")
    wait_for("it is here or not", lambda: (there.names() == ["web"]) == headed, 30)
    if headed:
        wait_for("it is not at work", lambda: Proc(there, "web").state in ("archived", "parked", "running"), 30)
        assert "has taken it over" in here.refused("wake", "web")
        there.cli("wake", "web")
        new = Proc(there, "web")
    else:
        assert Lines(proc.port()).ask("still here") == "still here"
        proc.archive()
        new = adopt(there, "web")
    assert Lines(new.port()).ask("hello") == "hello"
    assert new.exec("cat", "/srv/kept").stdout == "kept\n"
    assert here.refused("wake", "web")


def test_a_store_that_is_gone_in_the_middle(here: Kip, there: Kip, store: Path) -> None:
    proc = here.run("redis", servers.redis().command, ports=servers.redis().published)
    proc.archive()
    store.rename(store.with_name("gone"))
    assert "the store cannot be searched" in there.refused("wake", "redis")
    store.with_name("gone").rename(store)
    new = adopt(there, "redis")
    new.archive()
    # Started again while the store is away it is as it was.
    store.rename(store.with_name("gone"))
    subprocess.run([there.program, "--data", there.data, "wake", "redis"], capture_output=True, timeout=60)
    assert new.state == "archived"
    store.with_name("gone").rename(store)
    assert Redis(new.port()).ask("PING") == "PONG"


def test_a_file_that_cannot_be_archived_is_named(here: Kip, tmp_path: Path) -> None:
    server = servers.lighttpd()
    proc = here.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    proc.exec("sh", "-c", "echo x > /srv/strange")
    upper = here.data / "procs" / "web" / "upper" / "root" / "srv" / "strange"
    subprocess.run(["chown", "5:5", upper], check=True)
    proc.sleep()
    refused = here.refused("sleep", "web", "--to", "archived")
    assert "web stays parked" in refused and "srv/strange belongs to the user" in refused, refused
    assert proc.state == "parked"
    assert http_get(proc.port(), "/page.html") == servers.PAGE


# promise archive: the name of a proc that is being replaced is no other proc's meanwhile
def test_a_name_of_a_replacement_is_not_taken(here: Kip, there: Kip, tmp_path: Path) -> None:
    away = here.run("web", ["sleep", "3000"])
    away.archive()
    waiting = Waiting(there, tmp_path)
    waiting.begin()
    there.cli("rm", "--force", "web")
    there.run("other", ["sleep", "1000"])
    for words in (["wake", "web"], ["run", "--name", "web", "--", "sleep", "1"], ["rename", "other", "web"]):
        refused = there.refused(*words)
        assert "web is being replaced: try again when that is over" in refused, refused
    there.cli("rm", "--force", "other")
    said = waiting.end()
    assert "web is another proc by now, or none" in said, said
    assert there.names() == []
    adopt(there, "web")
    assert there.names() == ["web"]
