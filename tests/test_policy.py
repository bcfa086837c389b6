"""What comes from a store is restored only if it asks for no more than its sandbox gives: a front that an attacker with the keys
has rewritten is refused, and the refusal says why."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import programs, servers
from harness.clients import Redis
from harness.kip import Kip, Proc
from harness.rows import one_in
from test_archive import archive

ASKED = {
    "user": "thread 2 has the user id 70000",
    "capabilities": "thread 2 has capabilities 0x",
    "privileges": "thread 2 runs without the no_new_privs",
    "filter": "thread 2 runs without the system call filter",
    "ids": "maps user ids in another way",
    "mount": 'the mount at "/etc" is not one of its sandbox',
}


def tamper(kip: Kip, store: Path, proc: Proc, what: str) -> None:
    kip.kill()
    done = subprocess.run([programs.example("tamper"), kip.data, store, proc.name, what],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    kip.up()


# promise invariants: 9 what comes from a store is sealed, and restored only if it asks for no more
#   than its sandbox gives: ids, capabilities, filter, mounts, sockets, devices, kinds of files and
#   images
# held by: this, `kip_checkpoint::policy::tests::images_that_ask_for_more_are_refused`,
#   `kip_checkpoint::policy::tests::more_rights_are_refused`,
#   `kip_checkpoint::policy::tests::what_is_not_its_sandboxs_is_refused`
def test_what_asks_for_more_is_refused(fresh_kip: Callable[..., Kip], store: Path) -> None:
    kip = fresh_kip("--store", str(store))
    server = servers.redis()
    proc = kip.run("redis", server.command, ports=server.published)
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", b"%d" % i * 300) for i in range(3000)])
    archive(proc)
    # Rewritten without a change it wakes, so that it is the change which is refused.
    tamper(kip, store, proc, "nothing")
    assert client.ask("GET", "key:2999") == b"2999" * 300
    archive(proc)
    kept = {path: path.read_bytes() for path in (kip.data / "procs" / "redis").glob("archive*")}
    objects = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    for what, told in ASKED.items():
        tamper(kip, store, proc, what)
        refusal = kip.refused("wake", "redis")
        assert told in refusal and "redis cannot be woken: " in refusal and "it stays archived" in refusal, refusal
        view = proc.inspect()
        assert view["state"] == "archived" and view["pids"] == [], view
        assert not list((kip.data / "procs" / "redis").glob("gen-*")), "nothing of it is left here"
        kip.kill()
        for path, content in (kept | objects).items():
            path.write_bytes(content)
        kip.up()
    assert client.ask("GET", "key:2999") == b"2999" * 300


# promise archive: a generation from a processor that has what this one lacks, and a program can
#   use, is neither woken nor taken over, and stays free for another machine
# held by: this,
#   `kip_offload::processor::tests::what_a_program_may_use_must_be_there_and_what_is_the_kernels_need_not`
def test_another_processor(fresh_kip: Callable[..., Kip], store: Path) -> None:
    """A program may use all that the processor had on which it was archived. One that lacks some of it neither wakes nor adopts it,
    and says what it lacks."""
    kip = fresh_kip("--store", str(store))
    proc = kip.run("redis", servers.redis().command, ports=servers.redis().published)
    client = Redis(proc.port())
    client.ask("SET", "a", "1")
    archive(proc)
    kept = {path: path.read_bytes() for path in (kip.data / "procs" / "redis").glob("archive*")}
    kept |= {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    tamper(kip, store, proc, "processor")
    words = r"it comes from a processor with [a-z0-9_, ]+, which this one lacks: wake it on a machine that has them"
    refusal = kip.refused("wake", "redis")
    assert re.search(f"redis cannot be woken: {words}; it stays archived", refusal), refusal
    assert not list((kip.data / "procs" / "redis").glob("gen-*")), "nothing of it is left here"
    other = fresh_kip("--store", str(store), start=False)
    (other.data / "archive").mkdir(parents=True)
    shutil.copy(kip.data / "archive" / "default.keys", other.data / "archive" / "default.keys")
    other.up()
    assert re.search(f"redis cannot be taken over: {words}", other.refused("wake", "redis"))
    kip.kill()
    for path, content in kept.items():
        path.write_bytes(content)
    kip.up()
    assert client.ask("GET", "a") == b"1"


# promise invariants: 9 that refuses nothing that programs have
@pytest.mark.parametrize("name", one_in(2, ["torture", "mariadb", "postfix", "nginx", "node", "bind"]))
def test_what_programs_have_is_allowed(fresh_kip: Callable[..., Kip], store: Path, tmp_path: Path, name: str) -> None:
    """Threads, forks, locks, deleted files, memory files, setgid programs, System V memory: nothing of that is refused."""
    kip = fresh_kip("--store", str(store))
    server = getattr(servers, name)()
    flags = ["--allow-setuid"] if name == "postfix" else []
    proc = kip.run(name, server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    archive(proc)
    kip.cli("wake", name)
    assert proc.state == "running"
