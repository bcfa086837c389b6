"""The name tree: what is answered is there, through kills and restarts; a watch tells each change once and in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

from harness.clients import free_port
from harness.kip import Kip, one_line_refusal
from harness.wait import wait_for
from test_backup import lost
from test_full_disk import Disk, disk  # noqa: F401


def put(kip: Kip, path: str, text: str, *flags: str) -> dict[str, Any]:
    return json.loads(kip.cli("tree", "put", path, "--json", *flags, input=text).stdout)


def cat(kip: Kip, path: str) -> str:
    return kip.cli("tree", "cat", path).stdout


def ls(kip: Kip, path: str = "/") -> list[str]:
    return kip.cli("tree", "ls", path).stdout.split()


def grant(kip: Kip, ttl: str) -> str:
    return kip.cli("tree", "lease", "grant", ttl).stdout.strip()


class Watch:
    """A `kip tree watch` that runs, and the lines it has printed."""

    def __init__(self, kip: Kip, *words: str):
        command = [kip.program, "--data", kip.data, "tree", "watch", *words]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line)

    def next(self, timeout: float = 20) -> str:
        try:
            return self.lines.get(timeout=timeout)
        except Empty:
            raise AssertionError(f"no change after {timeout} s, exit {self.process.poll()}") from None


@contextmanager
def watching(kip: Kip, *words: str) -> Iterator[Watch]:
    watch = Watch(kip, *words)
    try:
        yield watch
    finally:
        watch.process.kill()
        watch.process.communicate()


@pytest.fixture
def kip(kip: Kip) -> Iterator[Kip]:
    """Its tree is empty again after each test."""
    yield kip
    for lease in kip.json("tree", "lease", "ls"):
        kip.cli("tree", "lease", "revoke", lease["id"])
    clear(kip, "/")


def clear(kip: Kip, path: str) -> None:
    for node in kip.json("tree", "ls", path):
        if node["kind"] == "directory":
            clear(kip, node["path"])
        kip.cli("tree", "rm", node["path"])


# promise tree: `kip tree` puts, prints, lists, moves and removes files, from a file or standard
#   input, also with --json
def test_files_come_and_go(kip: Kip, tmp_path: Path) -> None:
    assert ls(kip) == []
    assert kip.cli("tree", "mkdir", "-p", "/services/web").stdout.startswith("/services/web version ")
    kip.cli("tree", "mkdir", "--parents", "/services/web")
    made = put(kip, "/services/web/size", "4\n")
    assert made["path"] == "/services/web/size" and made["size_bytes"] == 2 and made["version"] == made["created"]
    assert cat(kip, "/services/web/size") == "4\n"
    blob = bytes(range(256)) * 4096
    (tmp_path / "blob").write_bytes(blob)
    kip.cli("tree", "put", "/services/web/blöb &?#%", tmp_path / "blob")
    assert kip.cli("tree", "cat", "/services/web/blöb &?#%", binary=True).stdout == blob
    assert bytes.fromhex(kip.json("tree", "cat", "/services/web/blöb &?#%")["hex"]) == blob
    assert kip.json("tree", "cat", "/services/web/size")["text"] == "4\n"
    kip.cli("tree", "mv", "/services/web", "/services/www")
    assert ls(kip, "/services") == ["www/"]
    assert [node["path"] for node in kip.json("tree", "ls", "/services/www")] == ["/services/www/blöb &?#%", "/services/www/size"]
    table = kip.cli("tree", "ls", "-l", "/services/www").stdout.splitlines()
    assert table[0].split() == ["SIZE", "VERSION", "LEASE", "NAME"] and table[1].split()[0] == "1.0M"
    assert ls(kip, "/services/www/size") == ["size"]
    again = put(kip, "/services/www/size", "5")
    assert again["created"] == made["created"] and again["version"] > made["version"]
    assert kip.json("tree", "stat", "/services/www/size") == again
    put(kip, "/other", "6")
    kip.cli("tree", "mv", "--replace", "/other", "/services/www/size")
    assert cat(kip, "/services/www/size") == "6"
    kip.cli("tree", "rm", "/services/www/size")
    assert [node["path"] for node in kip.json("tree", "ls", "/services/www")] == ["/services/www/blöb &?#%"]


# promise tree: a condition that does not hold, a path that is none, a file above its limit: one
#   clear line each, and nothing is changed
def test_conditions(kip: Kip, tmp_path: Path) -> None:
    version = put(kip, "/a", "one")["version"]
    kip.cli("tree", "mkdir", "/d")
    put(kip, "/d/x", "x")
    (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    refusals = {
        ("put", "/a", "--if-version", str(version + 1)): f"/a has the version {version} by now",
        ("put", "/none", "--if-version", "1"): "/none is not there",
        ("put", "/a", "--new"): "/a is there already",
        ("put", "/none/b",): "/none is not there",
        ("put", "/a/b",): "/a is a file, not a directory",
        ("put", "/d",): "/d is a directory, not a file",
        ("put", "/",): "/",
        ("put", "/a", str(tmp_path / "large")): "at most 1048576",
        ("put", "/a", str(tmp_path / "none")): "cannot read",
        ("put", "/a", "--lease", "ffff"): "the lease ffff has run out",
        ("put", "/a", "--fence", f"/a@{version + 1}"): f"the epoch {version + 1} of /a is over",
        ("put", "/a", "--fence", "/none@1"): "the epoch 1 of /none is over",
        ("cat", "/none"): "/none is not there",
        ("cat", "/d"): "/d is a directory, not a file",
        ("ls", "/none"): "/none is not there",
        ("mkdir", "/d"): "/d is there already",
        ("mkdir", "-p", "/a/b"): "/a is a file, not a directory",
        ("mkdir", "-p", "/a"): "/a is there already",
        ("rm", "/d"): "the directory /d is not empty",
        ("rm", "/none"): "/none is not there",
        ("rm", "/"): "/ can be neither",
        ("rm", "/a", "--if-version", "1"): "/a has the version",
        ("mv", "/d", "/d/e"): "which is inside it",
        ("mv", "/a", "/d/x"): "/d/x is there already",
        ("mv", "/none", "/b"): "/none is not there",
        ("lease", "grant", "0s"): "a lease of 0ns is not possible",
        ("lease", "keep", "ffff"): "the lease ffff has run out",
        ("lease", "revoke", "ffff"): "the lease ffff has run out",
        ("watch", "--from", "999999999"): "there is no revision 999999999 yet",
        ("watch", "--from", "0"): "not kept any more",
    }  # fmt: skip
    before = kip.json("tree", "ls"), kip.json("tree", "ls", "/d")
    for words, line in refusals.items():
        assert line in kip.refused("tree", *words), words
    for path in ("a", "/a/", "/a//b", "/../a", "/a\n", "/" + "n" * 256, "/x" * 33):
        done = kip.cli("tree", "put", path, check=False)
        assert done.returncode == 2 and "is not valid" in done.stderr, path
    assert (kip.json("tree", "ls"), kip.json("tree", "ls", "/d")) == before
    put(kip, "/a", "two", "--if-version", str(version), "--fence", f"/a@{version}")
    assert cat(kip, "/a") == "two"


def lines_of(watch: Watch, count: int) -> list[list[str]]:
    return [watch.next().split(maxsplit=2) for _ in range(count)]


# promise tree: a watch prints each change once and in order, over a daemon that is killed and one
#   that ends, by --from
def test_a_watch_misses_nothing(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    first = put(kip, "/before", "")["version"]
    versions: list[int] = []
    with watching(kip, "--from", str(first)) as watch, watching(kip, "/b", "--only", "--json", "--from", str(first)) as only:
        for round in range(3):
            for n in range(5):
                versions.append(put(kip, f"/{'ab'[n % 2]}", f"{round} {n}")["version"])
            if round < 2:
                kip.kill()
                kip.up()
        kip.cli("tree", "mkdir", "/d")
        kip.cli("tree", "mv", "/a", "/d/a")
        kip.cli("tree", "rm", "/d/a")
        told = lines_of(watch, len(versions) + 3)
        assert [int(revision) for revision, _, _ in told[: len(versions)]] == versions
        assert [what for _, what, _ in told] == ["created"] * 2 + ["written"] * 13 + ["created", "moved", "removed"]
        assert told[-2][2].strip() == "/a -> /d/a" and told[-1][2].strip() == "/d/a"
        of_b = [json.loads(only.next()) for _ in range(6)]
        assert [change["path"] for change in of_b] == ["/b"] * 6
        assert watch.lines.empty() and only.lines.empty()
        last = int(told[-1][0])
        # A daemon that is asked to end ends its watches; the next one goes on from any revision.
        assert kip.daemon
        kip.daemon.terminate()
        kip.wait_dead()
        assert watch.process.wait(20) == 0
    kip.up()
    put(kip, "/after", "")
    with watching(kip, "--from", str(versions[-1])) as watch:
        assert [what for _, what, _ in lines_of(watch, 4)] == ["created", "moved", "removed", "created"]
    with watching(kip, "--from", str(last)) as watch:
        assert lines_of(watch, 1)[0][2].strip() == "/after"


# promise tree: a lease that ends takes its files with it; one that is kept lives, also over a
#   restart of the daemon
def test_leases(kip: Kip) -> None:
    begun = time.monotonic()
    kept = grant(kip, "4s")
    holder = subprocess.Popen([kip.program, "--data", kip.data, "tree", "lease", "keep", "--hold", kept])
    try:
        put(kip, "/kept", "k", "--lease", kept)
        granted = time.monotonic()
        short = grant(kip, "2s")
        first = put(kip, "/short", "s", "--lease", short)
        assert first["lease"] == short
        with watching(kip, "--from", str(first["version"] - 1)) as watch:
            assert [what for _, what, _ in lines_of(watch, 2)] == ["created", "removed"]
            assert time.monotonic() - granted > 2
        assert ls(kip) == ["kept"] and [lease["id"] for lease in kip.json("tree", "lease", "ls")] == [kept]
        wait_for("longer than the lease", lambda: time.monotonic() - begun > 5, 10)
        assert ls(kip) == ["kept"]
        kip.kill()
        kip.up()
        assert ls(kip) == ["kept"]
        assert kip.json("tree", "lease", "keep", kept)["ttl_ms"] == 4000
    finally:
        holder.send_signal(signal.SIGINT)
        ended = holder.wait(20)
    assert ended == 0
    kip.cli("tree", "lease", "revoke", kept)
    assert ls(kip) == []
    assert kip.cli("tree", "lease", "ls").stdout == "there are no leases\n"


# promise tree: the tree from elsewhere, by TCP: a token that allows to look shows names and no
#   contents
def test_from_elsewhere(fresh_kip: Callable[..., Kip]) -> None:
    port = free_port()
    kip = fresh_kip("--listen", f"127.0.0.1:{port}", "--listen-plain")
    tokens = {scope: kip.cli("token", "create", scope, "--scope", scope).stdout.strip() for scope in ("read", "write")}

    def elsewhere(scope: str, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"KIP_HOST": f"http://127.0.0.1:{port}", "KIP_TOKEN": tokens[scope]}
        return subprocess.run([kip.program, "tree", *words], env=environment, input=text, capture_output=True, text=True, timeout=30)

    assert elsewhere("write", "put", "/a b", text="secret").returncode == 0
    assert elsewhere("write", "cat", "/a b").stdout == "secret"
    assert elsewhere("read", "ls").stdout == "a b\n"
    assert "does not allow to see files" in one_line_refusal(elsewhere("read", "cat", "/a b"))
    for words in (("put", "/a b"), ("rm", "/a b"), ("mkdir", "/d"), ("mv", "/a b", "/c"), ("lease", "grant", "9s")):
        assert "this token allows to look only" in one_line_refusal(elsewhere("read", *words))
    assert cat(kip, "/a b") == "secret"


# promise tree: a leader whose lease has ended changes nothing any more
def test_a_late_leader_is_fenced(kip: Kip) -> None:
    lease = grant(kip, "60s")
    leader = put(kip, "/leader", "one", "--new", "--lease", lease)
    fence = f"/leader@{leader['created']}"
    put(kip, "/state", "by one", "--fence", fence)
    kip.cli("tree", "lease", "revoke", lease)
    put(kip, "/leader", "two", "--new", "--lease", grant(kip, "60s"))
    assert "is over" in kip.refused("tree", "put", "/state", "--fence", fence)
    assert "is over" in kip.refused("tree", "rm", "/state", "--fence", fence)
    assert cat(kip, "/state") == "by one"


# promise tree: a kill of the daemon in the middle of writes loses nothing that was answered
def test_kills_lose_nothing_that_was_answered(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    for round in range(3):
        answered: dict[str, str] = {}
        stop = threading.Event()

        def write(writer: int, round: int = round, answered: dict[str, str] = answered, stop: threading.Event = stop) -> None:
            for n in range(1000):
                path, text = f"/{writer}-{n % 3}", f"{round} {n}"
                if stop.is_set() or kip.cli("tree", "put", path, check=False, input=text).returncode != 0:
                    answered[f"{path} unsure"] = text
                    return
                answered[path] = text

        writers = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
        for writer in writers:
            writer.start()
        wait_for("writes", lambda: len(answered) >= 6, 20)
        kip.kill()
        stop.set()
        for writer in writers:
            writer.join()
        kip.up()
        for path, text in answered.items():
            if not path.endswith("unsure"):
                assert cat(kip, path) in (text, answered.get(f"{path} unsure")), path


# promise tree: a file of the tree that is damaged is one clear line for what asks for the tree, and
#   keeps no proc from running
def test_a_damaged_file_is_said(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    kip.expected += [r"there is no name tree", r"the name tree"]
    put(kip, "/a", "there")
    assert kip.daemon
    kip.daemon.terminate()
    kip.wait_dead()
    file = kip.data / "meta.redb"
    whole = file.read_bytes()
    file.write_bytes(b"\0" * len(whole))
    kip.up()
    for words in (["tree", "cat", "/a"], ["tree", "ls", "/"], ["tree", "mkdir", "/b"]):
        line = kip.refused(*words)
        assert "cannot open the metadata store" in line and str(file) in line
    kip.run("proc", ["/usr/bin/sleep", "1000"])
    file.write_bytes(whole)
    assert cat(kip, "/a") == "there"


# promise tree: `kip backup` has the tree, as it is between two changes; `kip restore` brings it
#   back
# promise backup: the name tree is in it
# held by: this
def test_a_backup_has_it(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    kip = fresh_kip()
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    kip.cli("tree", "mkdir", "/d")
    before = put(kip, "/d/a", "one")
    stop, count = threading.Event(), [0]

    def write() -> None:
        while not stop.is_set():
            put(kip, "/n", str(count[0] + 1))
            count[0] += 1

    writer = threading.Thread(target=write)
    writer.start()
    wait_for("writes", lambda: count[0] > 2, 20)
    begun = count[0]
    kip.cli("backup", tmp_path / "file", "--key-file", key)
    ended = count[0]
    stop.set()
    writer.join()
    kip.cli("tree", "rm", "/d/a")
    later, lease = put(kip, "/later", "gone")["version"], kip.json("tree", "lease", "grant", "60s")["id"]
    lost(kip)
    kip.cli("restore", tmp_path / "file", "--key-file", key)
    kip.up()
    assert kip.json("tree", "stat", "/d/a") == before and cat(kip, "/d/a") == "one"
    assert begun <= int(cat(kip, "/n")) <= ended + 1
    assert put(kip, "/d/a", "two", "--if-version", str(before["version"]))["version"] > later
    assert kip.json("tree", "lease", "grant", "60s")["id"] > lease
    done = kip.cli("tree", "watch", "/", "--from", str(later), check=False)
    assert done.returncode == 1 and "not kept any more" in done.stderr


# promise tree: a full disk is one clear line for each write and loses nothing; what is there can be
#   read, by the next daemon too, and writes go on once there is room
def test_a_full_disk(disk: Disk, fresh_kip: Callable[..., Kip]) -> None:  # noqa: F811
    kip = fresh_kip(data=disk.path / "data")
    kip.expected += [r"the metadata store cannot be written", r"the name tree"]
    put(kip, "/a", "there")
    disk.fill(0)
    large = "x" * 500_000
    wait_for("a refusal", lambda: kip.cli("tree", "put", "/large", check=False, input=large).returncode == 1, 20)
    done = kip.cli("tree", "put", "/large", check=False, input=large)
    assert "o space left on device" in one_line_refusal(done) and "meta.redb" in done.stderr
    assert cat(kip, "/a") == "there"
    kip.kill()
    kip.up()
    assert cat(kip, "/a") == "there"
    disk.free()
    put(kip, "/large", large)
    assert cat(kip, "/large") == large and cat(kip, "/a") == "there"
