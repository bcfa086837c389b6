"""Native restores, by Kip's own restorer: what they take over, and that CRIU does the wake when a plan cannot."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import logged, servers
from harness.broken import HEAD, plan_of
from harness.clients import Http, Lines, http_get
from harness.kip import Kip, Proc
from harness.programs import SOURCES
from harness.wait import wait_for

NOT_NATIVE = r"WARN .*native restore failed; CRIU restores the proc proc="


@pytest.fixture
def web(kip: Kip, tmp_path: Path) -> Proc:
    server = servers.lighttpd()
    return kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))


# promise waking: a plan that is damaged, missing, or cannot be carried out: CRIU does the wake
# held by: this, `tests/test_rebuild.py::test_no_plan`,
#   `tests/test_rebuild.py::test_what_the_restorer_cannot_do_criu_does`
def test_a_damaged_plan(web: Proc, kip: Kip) -> None:
    """A flipped bit anywhere in it is found, and CRIU does the wake; the next sleep has a new plan."""
    steady = Http(web.port())
    assert steady.get("/page.html") == servers.PAGE
    kip.expected.append(r"WARN .*the plan of a wake cannot be used proc=")
    for place in (3, 40, 5000, -1):
        web.sleep()
        plan = plan_of(web)
        damaged = bytearray(plan.read_bytes())
        damaged[place] ^= 4
        plan.write_bytes(damaged)
        assert steady.get("/page.html") == servers.PAGE
        assert not web.rebuilt()
    web.sleep()
    assert steady.get("/page.html") == servers.PAGE
    assert web.rebuilt()


# promise waking: a plan of another version of Kip is made anew from the same images; memory
#   anywhere in 46 bits of addresses (node's are by chance) is no obstacle
# held by: this, `tests/test_rebuild.py::test_memory_anywhere_is_no_obstacle`
def test_a_plan_of_another_version(web: Proc) -> None:
    """A plan that an older Kip made is not used, but made anew from the same images; no client waits for CRIU."""
    steady = Http(web.port())
    assert steady.get("/page.html") == servers.PAGE
    web.sleep()
    plan = plan_of(web)
    content = plan.read_bytes()
    assert content[:7] == b"KIPPLAN"
    plan.write_bytes(b"KIPPLAN1" + bytes(len(content) - 8))
    assert steady.get("/page.html") == servers.PAGE
    assert web.rebuilt()


def test_no_plan(web: Proc) -> None:
    """It is derived and can be thrown away."""
    web.sleep()
    plan_of(web).unlink()
    assert http_get(web.port(), "/page.html") == servers.PAGE
    assert not web.rebuilt()


def test_what_the_restorer_cannot_do_criu_does(web: Proc, kip: Kip) -> None:
    """A plan that asks for a file that is not there: the restorer fails in the middle and leaves nothing; the same
    sockets go to CRIU's tree."""
    steady = Http(web.port())
    assert steady.get("/page.html") == servers.PAGE
    kip.expected.append(NOT_NATIVE)
    for _ in range(2):
        web.sleep()
        plan = plan_of(web)
        content = plan.read_bytes()
        assert content.count(b"/dev/null\0") > 0
        rest = content[HEAD:].replace(b"/dev/null\0", b"/dev/nowh\0")
        plan.write_bytes(content[:8] + struct.pack("<Q", zlib.crc32(rest)) + content[16:HEAD] + rest)
        assert steady.get("/page.html") == servers.PAGE
        assert "helper" in {step["name"] for step in web.inspect()["last_wake"]["steps"]}


def test_a_snapshot_cut_short(web: Proc) -> None:
    """Damage to the generation is damage for both ways; nothing is lost, and once it is whole again it wakes."""
    steady = Http(web.port())
    assert steady.get("/page.html") == servers.PAGE
    web.sleep()
    pages = sorted(plan_of(web).parent.glob("pages-*.img"))[-1]
    content = pages.read_bytes()
    pages.write_bytes(content[:4096])
    message = web.kip.refused("wake", web.name)
    assert pages.name in message, message
    assert web.state == "parked"
    pages.write_bytes(content)
    assert steady.get("/page.html") == servers.PAGE
    assert web.rebuilt()


def test_only_criu(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """`kip up --only-criu`: the other way is not forgotten."""
    kip = fresh_kip("--only-criu")
    server = servers.lighttpd()
    web = kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    steady = Http(web.port())
    for _ in range(3):
        web.sleep()
        assert not plan_of(web).exists()
        assert steady.get("/page.html") == servers.PAGE
        assert not web.rebuilt()


EVERYWHERE = (
    "import ctypes; libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p; "
    "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]",
    # PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    "made = [libc.mmap(at << 36, 4096, 3, 0x100022, -1, 0) for at in range(1, 1024)]",
    "[ctypes.memset(at, at >> 36 & 255, 4096) for at in made]",
)


def test_memory_anywhere_is_no_obstacle(kip: Kip) -> None:
    """node takes memory at addresses by chance, of 46 bits: a mapping in each of their stretches of 64 GiB."""
    program = f"{SOURCES / 'lines.py'}:/srv/lines.py:ro"
    proc = kip.run("everywhere", ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=[8080], flags=["-v", program])
    client = Lines(proc.port())
    for line in EVERYWHERE:
        client.ask(line)
    assert client.ask("made == [at << 36 for at in range(1, 1024)]") == "True"
    for _ in range(2):
        proc.sleep()
        assert client.ask("all(ctypes.string_at(at, 4096) == bytes([at >> 36 & 255]) * 4096 for at in made)") == "True"
        assert proc.rebuilt()


# promise waking: how the program ended is told, also after it slept
@pytest.mark.parametrize("tier", ["hibernated", "parked"])
def test_the_end_of_one_that_slept_is_told(kip: Kip, tmp_path: Path, tier: str) -> None:
    """Pid 1 is another process after a native restore; how the program ended is known all the same."""
    script = "trap 'exit 7' TERM; while :; do sleep 0.1; done"
    proc = kip.run(f"seven-{tier}", ["sh", "-c", script])
    for _ in range(2):
        kip.cli("sleep", proc.name, "--to", tier, "--clock", "auto")
        proc.wake()
    if tier == "parked":
        assert proc.rebuilt()
    proc.stop()
    assert proc.inspect()["exit"] == "exit code 7"


# promise waking: both ways in turn
def test_two_ways_in_turn(kip: Kip, tmp_path: Path) -> None:
    """What one way has restored the other takes down and up again: threads, children, zombies, orphans, signals, locks."""
    server = servers.torture()
    flags = ["--env", servers.ONLY_CRIU]
    proc = kip.run("turns", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    steady = Lines(proc.port())
    steady.check()
    for cycle in range(8):
        proc.sleep()
        if cycle % 2:
            plan_of(proc).unlink()
        steady.check()
        assert proc.rebuilt() == (cycle % 2 == 0)


HELLO = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/tmp/absolute'); print(s.recv(9).decode())"


@pytest.fixture
def places(fresh_kip: Callable[..., Kip], tmp_path: Path) -> Proc:
    server = servers.places()
    kip = fresh_kip()
    return kip.run("places", server.command, ports=server.published, tar=server.tarball(tmp_path))


def use(client: Lines) -> dict[str, str]:
    answer = client.ask("round")
    assert answer.startswith("ok "), answer
    return dict(word.split("=") for word in answer.split()[1:])


# promise waking: what has, or had, a path is held and found by it: unix sockets (listening,
#   connected, with a process that waits, with datagrams, without their file), FIFOs, deleted files;
#   by both ways in turn
# held by: this, `tests/test_rebuild.py::test_what_has_a_path_by_both_ways_in_turn`,
#   `crates/sandbox/tests/restore.rs::held_mounts_keep_what_is_bound_to_a_path_of_a_sandbox_that_is_gone`
def test_what_has_a_path(places: Proc) -> None:
    """Unix sockets bound to a path, absolute and relative, listening, connected, with a client that waits, with datagrams,
    without their file; FIFOs; deleted files: held, and found by their paths from inside."""
    client = Lines(places.port())
    before = use(client)
    assert before["pid"] != "0"
    for _ in range(8):
        assert places.exec("python3", "-c", HELLO).stdout.strip() == "hello"
        places.sleep()
        after = use(client)
        assert places.rebuilt()
        # The process that connected before the sleep was of another pid namespace.
        assert after == {**before, "pid": "0"}


def test_what_has_a_path_by_both_ways_in_turn(places: Proc) -> None:
    """What was held on mounts of earlier runs CRIU dumps and makes anew, and so on."""
    client = Lines(places.port())
    use(client)
    for cycle in range(6):
        places.sleep()
        if cycle % 2:
            plan_of(places).unlink()
        use(client)
        assert places.rebuilt() == (cycle % 2 == 0)
        assert places.exec("python3", "-c", HELLO).stdout.strip() == "hello"


# promise waking: daemon or keeper killed, both killed, a mapped base file upgraded: it wakes with
#   what has a path, natively where the mounts are still held, else by CRIU
# held by: this, `tests/test_rebuild.py::test_a_path_when_all_that_was_held_is_lost`,
#   `tests/test_rebuild.py::test_a_path_when_the_base_has_changed`
@pytest.mark.parametrize("who", ["daemon", "keeper"])
def test_what_has_a_path_outlives(places: Proc, who: str) -> None:
    """The mounts are held twice."""
    kip, client = places.kip, Lines(places.port())
    use(client)
    for _ in range(2):
        places.sleep()
        if who == "daemon":
            kip.kill()
            kip.up()
        else:
            kip.expected += logged.KEEPER_KILLED
            old = kip.info()["keeper_pid"]
            os.kill(old, signal.SIGKILL)
            wait_for("there is another keeper", lambda old=old: kip.new_keeper(old), 30)
        use(client)
        assert places.rebuilt()


def test_a_path_when_all_that_was_held_is_lost(places: Proc) -> None:
    """New mounts, and CRIU makes sockets and files anew; the next wake is native again."""
    kip = places.kip
    use(Lines(places.port()))
    places.sleep()
    kip.expected += [*logged.KEEPER_KILLED, *logged.KEEPER_GONE]
    keeper = kip.info()["keeper_pid"]
    kip.kill()
    os.kill(keeper, signal.SIGKILL)
    kip.up()
    client = Lines(places.port())
    use(client)
    assert not places.rebuilt()
    places.sleep()
    use(client)
    assert places.rebuilt()


def test_a_path_when_the_base_has_changed(kip: Kip, tmp_path: Path) -> None:
    """The sleeper wakes with other mounts, so CRIU does it; from then on it has those."""
    server = servers.places()
    directory = Path(f"/usr/local/share/kip-places-{os.getpid()}")
    directory.mkdir()
    try:
        python = directory / "python"
        shutil.copy(Path("/usr/bin/python3").resolve(), python)
        command = [str(python), *server.command[1:]]
        places = kip.run("based", command, ports=server.published, tar=server.tarball(tmp_path))
        client = Lines(places.port())
        use(client)
        places.sleep()
        new = directory / "new"
        new.write_bytes(python.read_bytes() + b"upgraded")
        new.chmod(0o755)
        new.rename(python)
        for native in (False, True, True):
            use(client)
            assert places.rebuilt() == native
            places.sleep()
        places.remove()
    finally:
        shutil.rmtree(directory)


def test_a_fifo_or_deleted_file_in_a_volume(kip: Kip, tmp_path: Path) -> None:
    """They are on a mount of which the next snapshot knows nothing, so CRIU does it."""
    server = servers.places()
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o777)
    flags = ["-v", f"{volume}:/tmp"]
    places = kip.run("in-volume", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    client = Lines(places.port())
    for _ in range(3):
        use(client)
        places.sleep()
        use(client)
        assert not places.rebuilt()
    places.remove()
