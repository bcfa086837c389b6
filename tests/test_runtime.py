"""The runtime socket: what a program inside a proc asks of Kip, in every tier, and what may go wrong with it."""

from __future__ import annotations

import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.clients import Lines, listens
from harness.kip import Kip, Proc, daemon
from harness.programs import SOURCES, tarball
from harness.wait import wait_for
from test_clone import clone
from test_tree import cat, clear, grant, ls, put

SDK = SOURCES.parents[1] / "sdk" / "python" / "kip"
FILES = ["-v", f"{SOURCES / 'lines.py'}:/srv/lines.py:ro", "-v", f"{SDK}:/srv/kip:ro"]
# A program that carries out lines of Python, with a client of its own for the runtime socket.
BEGIN = "import kip, asyncio, socket, struct, threading; c = kip.Client()"
# It tells of what it has seen in the tree: to ask the program would wake it.
WATCH = (
    "w = c.watch('/w'); seen = []; echo = lambda: c.put('/echo', repr(seen[-1]).encode()); "
    "follow = lambda: [(seen.append([(x.path, x.kind) for x in r.changes]), echo()) for r in w]; "
    "threading.Thread(target=follow, daemon=True).start()"
)


def start(kip: Kip, name: str = "lines", *flags: str) -> Proc:
    proc = kip.run(name, ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=["8080"], flags=[*FILES, "--never-sleep", "--tree", "write", *flags])
    wait_for("it listens", lambda: listens(proc.port()), 20)
    assert ask(proc, BEGIN) == "None"
    return proc


def ask(proc: Proc, line: str) -> str:
    lines = Lines(proc.port())
    try:
        return lines.ask(line)
    finally:
        lines.close()


def echo(kip: Kip) -> str:
    return cat(kip, "/echo") if "echo" in ls(kip) else ""


@pytest.fixture
def kip(kip: Kip) -> Iterator[Kip]:
    """Its tree is empty again after each test."""
    yield kip
    kip.remove_all()
    for lease in kip.json("tree", "lease", "ls"):
        kip.cli("tree", "lease", "revoke", lease["id"], check=False)
    clear(kip, "/")


@pytest.fixture(scope="module")
def by_criu() -> Iterator[Kip]:
    with daemon("--only-criu") as kip:
        yield kip


Tier = Callable[[Proc], object]
TIERS: dict[str, Tier] = {
    "running": lambda proc: None,
    "hibernated": Proc.hibernate,
    "parked": Proc.sleep,
    "archived": Proc.archive,
}


# promise runtime: a program asks for the name of its proc and uses the whole name tree over a
#   socket in its sandbox, without a token: the socket says which proc and which realm it is of
def test_calls_of_a_program(kip: Kip) -> None:
    proc = start(kip)
    assert ask(proc, "c.whoami()") == "Identity(name='lines', realm='default', generation=0, clone_count=1)"
    ask(proc, "c.mkdir('/a'); n = c.put('/a/b', b'text')")
    assert cat(kip, "/a/b") == "text"
    assert ask(proc, "c.get('/a/b'), c.stat('/a/b') == n, c.read('/a/b').node == n, n.size, n.directory") == "(b'text', True, True, 4, False)"
    put(kip, "/a/c", "from outside")
    assert ask(proc, "[n.path for n in c.ls('/a')], c.get('/a/c')") == "(['/a/b', '/a/c'], b'from outside')"
    ask(proc, "c.mv('/a/b', '/a/d'); c.rm('/a/c')")
    assert ls(kip, "/a") == ["d"]
    # Longer than a message may be, and as long as a file may be.
    ask(proc, "big = bytes(range(256)) * 4096; c.put('/big', big)")
    assert ask(proc, "c.get('/big') == big") == "True"
    assert kip.cli("tree", "cat", "/big", binary=True).stdout == bytes(range(256)) * 4096
    ask(proc, "[c.put(f'/a/{i}', b'') for i in range(1100)]")
    assert ask(proc, "len(c.ls('/a')), c.ls('/a')[-1].path") == "(1101, '/a/d')"
    # Another user of the proc, and another proc.
    code = "import os, sys; os.setgid(65534); os.setuid(65534); sys.path.insert(0, '/srv'); import kip; print(kip.Client().whoami().name)"
    assert proc.exec("python3", "-c", code).stdout == "lines\n"
    assert ask(start(kip, "another"), "c.whoami().name, len(c.ls('/a'))") == "('another', 1101)"


# promise runtime: without `--tree` a program may call `whoami` and nothing else; with `--tree read`
#   it reads and watches; a clone has the access that its source has
def test_access_to_the_tree(kip: Kip) -> None:
    put(kip, "/f", "before")
    reads = ["c.get('/f')", "c.stat('/f')", "c.ls('/')", "c.watch('/')", "c.leases()"]
    changes = [
        "c.put('/f', b'')",
        "c.mkdir('/d')",
        "c.rm('/f')",
        "c.mv('/f', '/g')",
        "c.grant(1000)",
        "c.keep(1)",
        "c.revoke(1)",
    ]
    refused = "Denied: the proc may not {} the name tree: its owner allows it by `kip run --tree {}`"
    for access in ("none", "read"):
        flags = [*FILES, "--never-sleep", *([] if access == "none" else ["--tree", access])]
        proc = kip.run(access, ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=["8080"], flags=flags)
        wait_for("it listens", lambda proc=proc: listens(proc.port()), 20)
        for one in (proc, clone(proc, f"{access}-clone")[0]):
            ask(one, BEGIN)
            assert ask(one, "c.whoami().name") == repr(one.name)
            for call in reads:
                if access == "none":
                    assert ask(one, call) == refused.format("read", "read"), call
                else:
                    assert "Denied" not in ask(one, call), call
            for call in changes:
                assert ask(one, call) == refused.format("change", "write"), call
    assert ls(kip) == ["f"] and cat(kip, "/f") == "before" and kip.json("tree", "lease", "ls") == []


# promise runtime: a call that fails is an error of its own kind with one clear line; what a
#   condition forbids changes nothing
@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("c.get('/none')", "NotFound"),
        ("c.put('/none/x', b'')", "NotFound"),
        ("c.put('/f', b'', new=True)", "Exists"),
        ("c.put('/f', b'', version=1)", "ConditionFailed"),
        ("c.put('/f', b'', fence=kip.Fence('/f', 1))", "ConditionFailed"),
        ("c.rm('/d')", "ConditionFailed"),
        ("c.get('/d')", "ConditionFailed"),
        ("c.stat('x')", "Invalid"),
        ("c.stat('/a/../b')", "Invalid"),
        ("c.put('/f', bytes((1 << 20) + 1))", "TooLarge"),
        ("c.keep(12345)", "NotFound"),
        ("c.grant(0)", "Invalid"),
        ("c.put('/f', b'', lease=12345)", "NotFound"),
    ],
)
def test_errors(kip: Kip, call: str, kind: str) -> None:
    proc = Proc(kip, "lines") if "lines" in kip.names() else start(kip)
    ask(proc, "c.mkdir('/d'); c.put('/d/x', b''); c.put('/f', b'before')")
    answer = ask(proc, call)
    assert answer.startswith(f"{kind}: ") and len(answer) > len(kind) + 10, answer
    assert cat(kip, "/f") == "before"


# promise runtime: a proc with an open connection to Kip sleeps in each tier, and uses it after the
#   wake as before; a change that it watches wakes it
@pytest.mark.parametrize("engine", ["plan", "criu"])
@pytest.mark.parametrize("tier", ["hibernated", "parked", "archived"])
def test_a_watch_wakes_a_sleeper(kip: Kip, by_criu: Kip, tier: str, engine: str) -> None:
    kip = by_criu if engine == "criu" else kip
    proc = start(kip)
    ask(proc, "c.mkdir('/w'); c.put('/w/0', b'')")
    assert ask(proc, WATCH) == "None"
    ask(proc, "before = c._connection")
    for turn in range(2):
        TIERS[tier](proc)
        put(kip, f"/w/{turn}x", "")
        wait_for("the change has woken it", lambda turn=turn: echo(kip) == f"[('/w/{turn}x', 0)]", 20)
        # A hibernated one may do so little in its place, without a wake.
        if tier != "hibernated":
            assert proc.state == "running"
            assert proc.inspect()["last_wake"]["trigger"].startswith("runtime socket"), proc.inspect()["last_wake"]
            assert proc.rebuilt() == (engine == "plan")
    assert ask(proc, "c.get('/w/0x'), c._connection is before") == "(b'', True)"
    assert ask(proc, "c.whoami().name") == "'lines'"
    kip.remove_all()
    clear(kip, "/")


# promise runtime: a program that is hibernated by holding its threads is woken by a change, too
def test_a_held_program(kip: Kip) -> None:
    proc = start(kip, "lines", "--hibernate", "held")
    ask(proc, "c.mkdir('/w')")
    assert ask(proc, WATCH) == "None"
    for turn in range(2):
        proc.hold()
        put(kip, f"/w/{turn}", "")
        wait_for("the change has woken it", lambda turn=turn: echo(kip) == f"[('/w/{turn}', 0)]", 20)
        assert proc.state == "running" and proc.inspect()["last_wake"]["trigger"].startswith("runtime socket")


# promise runtime: after a reboot the program reads the end of its connections, and the SDK makes
#   others
def test_a_reboot(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    proc = start(kip)
    ask(proc, "c.mkdir('/w')")
    assert ask(proc, WATCH) == "None"
    proc.sleep()
    kip.reboot()
    put(kip, "/w/x", "")
    assert ask(proc, "c.whoami().name") == "'lines'"
    wait_for("its watch goes on", lambda: echo(kip) == "[('/w/x', 0)]", 20)


# promise runtime: connections and watches live through the daemon's death; what was asked meanwhile
#   is answered by the next daemon
@pytest.mark.parametrize("tier", ["running", "hibernated", "parked"])
def test_the_daemon_is_killed(kip: Kip, tier: str) -> None:
    proc = start(kip)
    ask(proc, "c.mkdir('/w')")
    assert ask(proc, WATCH) == "None"
    ask(proc, "before = c._connection; t = threading.Thread(target=lambda: c.put('/w/asked', b'x'))")
    if tier == "running":
        lines = Lines(proc.port())
        kip.kill()
        assert lines.ask("t.start()") == "None"
        kip.up()
        wait_for("what was asked is done", lambda: ls(kip, "/w") == ["asked"], 20)
        assert lines.ask("t.join()") == "None"
    else:
        TIERS[tier](proc)
        kip.kill()
        kip.up()
        put(kip, "/w/asked", "")
    wait_for("the change has woken it", lambda: echo(kip) == "[('/w/asked', 0)]", 20)
    assert ask(proc, "c.whoami().name, c._connection is before") == "('lines', True)"


# promise runtime: a daemon that is killed at any step of a call leaves a connection that goes on; a
#   change is answered, or is an error that says that it may be done
@pytest.mark.parametrize(
    ("step", "answer", "there"),
    [
        ("runtime-held", "'/x'", True),
        ("runtime-begun", "OutcomeUnknown: ", False),
        ("runtime-done", "OutcomeUnknown: ", True),
        ("runtime-answered", "'/x'", True),
    ],
)
def test_killed_at_each_step(fresh_kip: Callable[..., Kip], step: str, answer: str, there: bool) -> None:
    kip = fresh_kip()
    proc = start(kip)
    if step != "runtime-held":
        ask(proc, "before = c.whoami() and c._connection")
    kip.kill()
    kip.up("--fault-at", step)
    lines = Lines(proc.port())
    lines.socket.sendall(b"c.put('/x', b'').path\n")
    assert kip.wait_dead() == -signal.SIGKILL
    kip.up()
    assert lines.reader.readline().decode().startswith(answer)
    assert ("x" in ls(kip)) == there
    assert lines.ask("c.whoami().name") == "'lines'"
    if step != "runtime-held":
        assert lines.ask("c._connection is before") == "True"
    assert lines.ask("c.put('/y', b'').path, c.put('/x', b'').path") == "('/y', '/x')"


# promise runtime: a proc that has something else in the place of the socket starts and sleeps
#   without one, and nothing is made in a volume there
def test_no_place_for_it(kip: Kip, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    tar = tarball(tmp_path / "files.tar", {"run": b"no directory"})
    for name, flags in [("volume", ["-v", f"{tmp_path}/run:/run"]), ("memory", ["--tmpfs", "/run"])]:
        proc = kip.run(name, ["sleep", "1000"], flags=[*flags, "--never-sleep"])
        assert "runtime" not in proc.exec("find", "/run").stdout
        proc.sleep()
        proc.wake()
    assert list((tmp_path / "run").iterdir()) == []
    proc = kip.run("file", ["sleep", "1000"], tar=tar, flags=["--never-sleep"])
    assert proc.exec("cat", "/run").stdout == "no directory"
    proc.sleep()
    proc.wake()


# promise runtime: the park of a proc whose program gave /run/kip another name is refused, and the
#   refusal names the directory
def test_another_name_for_its_directory(kip: Kip) -> None:
    proc = start(kip)
    proc.exec("mv", "/run/kip", "/run/other")
    assert "/run/kip" in kip.refused("sleep", proc.name, "--to", "parked")
    proc.exec("mv", "/run/other", "/run/kip")
    proc.sleep()
    assert ask(proc, "c.whoami().name") == "'lines'"


# promise runtime: a change that is asked for while the daemon is killed again and again is made
#   once, or the error says that it is not known whether it was
def test_changes_while_the_daemon_is_killed(kip: Kip) -> None:
    files = ["-v", f"{SOURCES / 'runtime_puts.py'}:/srv/puts.py:ro", "-v", f"{SDK}:/srv/kip:ro"]
    proc = kip.run("puts", ["/usr/bin/python3", "/srv/puts.py"], flags=[*files, "--never-sleep", "--tree", "write"])
    for turn in range(5):
        before = len(outcomes(proc))
        wait_for("it goes on", lambda before=before: len(outcomes(proc)) > before + 3 + turn, 30)
        kip.kill()
        kip.up()
    wait_for("it goes on", lambda: len(outcomes(proc)) > before + 20, 30)
    proc.exec("pkill", "-STOP", "python3")
    found, there = outcomes(proc), {int(name) for name in ls(kip, "/n")}
    done = {number for number, outcome in found.items() if outcome == "done"}
    unknown = {number for number, outcome in found.items() if outcome == "unknown"}
    assert len(done) + len(unknown) == len(found), {n: o for n, o in found.items() if o not in ("done", "unknown")}
    assert done <= there and len(unknown) <= 5
    # The last one may be done, and not printed yet.
    assert there - done - unknown <= {max(found) + 1}


def outcomes(proc: Proc) -> dict[int, str]:
    """What became of each file, by its number."""
    words = (line.split(" ", 1) for line in proc.logs().splitlines() if line[:1].isdigit())
    return {int(number): outcome for number, outcome in words}


# promise runtime: a clone of a proc with a connection is another proc: its connections end, and
#   the SDK makes others
@pytest.mark.parametrize("state", ["running", "parked"])
def test_a_clone_connects_anew(kip: Kip, state: str) -> None:
    proc = start(kip)
    ask(proc, "c.mkdir('/w')")
    assert ask(proc, WATCH) == "None"
    if state == "parked":
        proc.sleep()
    made = clone(proc, "other")[0]
    assert ask(made, "c.whoami().name, c.whoami().clone_count") == "('other', 2)"
    put(kip, "/w/x", "")
    for one in (made, proc):
        wait_for("each has seen the change", lambda one=one: ask(one, "seen") == "[[('/w/x', 0)]]", 20)
    assert ask(proc, "c.whoami().name") == "'lines'"


# promise runtime: a proc that is rolled back connects anew, and its watch goes on
def test_a_rollback_connects_anew(kip: Kip) -> None:
    proc = start(kip)
    ask(proc, "c.mkdir('/w')")
    assert ask(proc, WATCH) == "None"
    kip.cli("checkpoint", proc.name, "--tag", "then")
    kip.cli("rollback", proc.name, "--to", "then")
    assert ask(proc, "c.whoami().name, c.whoami().clone_count") == "('lines', 2)"
    put(kip, "/w/x", "")
    wait_for("its watch goes on", lambda: echo(kip) == "[('/w/x', 0)]", 20)


def frame(body: bytes) -> str:
    return repr(struct.pack("<I", len(body)) + body)


HELLO = frame(bytes.fromhex("0801 12020801"))
RAW = "s = socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect('/run/kip/runtime')"
# All that comes until the end of the connection.
ALL = "b''.join(iter(lambda: s.recv(65536), b''))"


# promise runtime: bytes that are no frame, a frame that is too long, an unknown version and an
#   unknown call are one clear error each, and the daemon goes on
def test_bad_frames(kip: Kip) -> None:
    proc = start(kip)
    ask(proc, "from kip import wire")
    cases = [
        ("b'GET / HTTP/1.1\\r\\n\\r\\n'", 2, "at most 65536"),
        (repr(struct.pack("<I", 1 << 31)), 2, "at most 65536"),
        (frame(b"\xff" * 9), 1, "no message"),
        (frame(bytes.fromhex("0801 1a00")), 1, "hello"),
        (frame(bytes.fromhex("0801 1202082a")), 3, "version 42"),
    ]
    for sent, code, words in cases:
        ask(proc, RAW)
        ask(proc, f"s.sendall({sent})")
        answer = ask(proc, f"wire.decode(wire.Answer, {ALL}[4:]).failure")
        assert f"code={code}," in answer and words in answer, answer
    # A call of a newer version, and one that follows it.
    ask(proc, RAW)
    ask(proc, f"s.sendall({HELLO} + {frame(bytes.fromhex('0802 fa7f00'))} + {frame(bytes.fromhex('0803 1a00'))})")
    ask(proc, "d = s.makefile('rb'); r = lambda: wire.decode(wire.Answer, d.read(*struct.unpack('<I', d.read(4))))")
    assert ask(proc, "r().welcome.most_call_bytes") == "65536"
    assert "code=4," in ask(proc, "r().failure")
    assert ask(proc, "r().identity.name") == "'lines'"
    # A slow writer, and one that writes more pieces than the socket has room for.
    ask(proc, f"[s.sendall(bytes([b])) for b in {frame(bytes.fromhex('0804 1a00'))}]")
    assert ask(proc, "r().identity.name") == "'lines'"
    ask(proc, "c.put('/long', b''); s.settimeout(20); long = wire.frame(wire.Call(5, put=wire.Put('/long', b'x' * 3000)))")
    assert ask(proc, "[s.sendall(bytes([b])) for b in long][:0]") == "[]"
    assert ask(proc, "r().node.size, c.get('/long') == b'x' * 3000") == "(3000, True)"
    ask(proc, f"s.sendall({frame(bytes.fromhex('0806 1a00'))})")
    assert ask(proc, "r().identity.name") == "'lines'"


# promise runtime: a proc parks with a connection over which nothing was said yet
def test_parked_before_a_greeting(kip: Kip) -> None:
    proc = start(kip)
    ask(proc, "from kip import wire")
    ask(proc, RAW)
    # The daemon has taken up that connection before this one.
    assert ask(proc, "c.whoami().name") == "'lines'"
    proc.sleep()
    ask(proc, f"s.sendall({HELLO})")
    ask(proc, "d = s.makefile('rb')")
    assert ask(proc, "wire.decode(wire.Answer, d.read(*struct.unpack('<I', d.read(4)))).welcome.version") == "1"


# promise runtime: a client that never reads its answers takes a bounded amount of memory, and
#   others go on
def test_a_client_that_reads_nothing(kip: Kip) -> None:
    proc = start(kip)
    ask(proc, "c.put('/big', bytes(1 << 20)); from kip import wire")
    ask(proc, RAW)
    ask(proc, f"s.sendall({HELLO}); s.setblocking(False); n = 0")
    before = resident(kip)
    ask(proc, "g = wire.frame(wire.Call(9, get=wire.Get('/big'))) * 50; sent = s.send(g)")
    assert ask(proc, "c.whoami().name") == "'lines'"
    assert resident(kip) - before < 64 << 20
    # It is no activity either, and stands in the way of no sleep.
    proc.sleep()
    assert ask(proc, "c.whoami().name") == "'lines'"


def resident(kip: Kip) -> int:
    assert kip.daemon
    return int(Path(f"/proc/{kip.daemon.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# promise runtime: a lease of a proc is held by Kip while the proc sleeps, and ends with the proc
@pytest.mark.parametrize("tier", ["hibernated", "parked"])
def test_leases_of_a_sleeper(kip: Kip, tier: str) -> None:
    proc = start(kip)
    ask(proc, "l = c.grant(2000); c.put('/leader', b'me', lease=l.id)")
    ask(proc, "c.put('/always', b'me', lease=c.grant(2000, with_proc=True).id)")
    TIERS[tier](proc)
    other = grant(kip, "2s")
    put(kip, "/other", "x", "--lease", other)
    wait_for("a lease of no sleeper has ended", lambda: "other" not in ls(kip), 30)
    assert ls(kip) == ["always", "leader"] and proc.state == tier
    assert ask(proc, "c.keep(l.id).ttl_ms") == "2000"
    wait_for("one that the program does not keep ends", lambda: ls(kip) == ["always"], 30)
    proc.stop()
    wait_for("the other one ends with the proc", lambda: ls(kip) == [], 20)


# promise runtime: leases of procs go on over the daemon's death, and end with a program that its
#   policy starts again
def test_leases_and_ends(kip: Kip) -> None:
    proc = start(kip, "lines", "--restart", "always")
    ask(proc, "l = c.grant(4000); c.put('/leader', b'me', lease=l.id)")
    ask(proc, "c.put('/always', b'me', lease=c.grant(4000, with_proc=True).id)")
    proc.sleep()
    kip.kill()
    kip.up()
    other = grant(kip, "4s")
    put(kip, "/other", "x", "--lease", other)
    wait_for("a lease of no sleeper has ended", lambda: "other" not in ls(kip), 30)
    assert ls(kip) == ["always", "leader"] and proc.state == "parked"
    ask(proc, "c.keep(l.id)")
    proc.exec("sh", "-c", "kill -9 $(pidof python3)", check=False)
    wait_for("they end with the program", lambda: ls(kip) == [], 3)


# A program that is granted a lease at once, and makes a file with it.
AT_ONCE = (
    "import sys, time; sys.path.insert(0, '/srv'); import kip; c = kip.Client(); "
    "c.put(f'/{time.time_ns()}', b'', lease=c.grant(2000, with_proc=True).id); time.sleep(1000)"
)


# promise runtime: a program that its policy starts again has leases of its own, however soon it is
#   granted one: those of the program before end, and its own go on over the daemon's death
def test_leases_of_the_next_program(kip: Kip) -> None:
    flags = ["-v", f"{SDK}:/srv/kip:ro", "--never-sleep", "--tree", "write", "--restart", "always"]
    proc = kip.run("again", ["/usr/bin/python3", "-c", AT_ONCE], flags=flags)
    before: list[str] = []

    def another() -> list[str] | None:
        there = ls(kip)
        return there if len(there) == 1 and there != before else None

    for _ in range(3):
        before = wait_for("the lease of the new program is the only one", another, 20)
        proc.exec("sh", "-c", "kill -9 $(pidof python3)", check=False)
    before = wait_for("the lease of the new program is the only one", another, 20)
    kip.kill()
    kip.up()
    other = grant(kip, "2s")
    put(kip, "/other", "x", "--lease", other)
    wait_for("a lease of no proc has ended", lambda: "other" not in ls(kip), 30)
    assert ls(kip) == before


# promise runtime: a lease does not end while the program has its grace
def test_leases_in_the_grace(kip: Kip) -> None:
    proc = start(kip, "lines", "--stop-signal", "WINCH", "--stop-grace", "2s")
    ask(proc, "c.put('/leader', b'me', lease=c.grant(30000).id)")
    stop = threading.Thread(target=proc.stop)
    stop.start()
    proc.wait_state("stopping")
    while True:
        there = ls(kip)
        if proc.state != "stopping":
            break
        assert there == ["leader"]
    stop.join()
    wait_for("it ends with the program", lambda: ls(kip) == [], 20)


# promise runtime: a program has at most 64 leases
def test_too_many_leases(kip: Kip) -> None:
    proc = start(kip)
    assert ask(proc, "len([c.grant(30000) for _ in range(64)])") == "64"
    assert ask(proc, "c.grant(30000)").startswith("TooMany: ")
    wait_for("none is left over", lambda: len(kip.json("tree", "lease", "ls")) == 64, 20)
    assert ask(proc, "c.revoke(c.leases()[0].id), c.grant(30000).ttl_ms") == "(None, 30000)"


# promise runtime: an open connection with a watch is no activity: the proc hibernates and parks by
#   itself, again and again
def test_a_watch_is_no_activity(kip: Kip) -> None:
    flags = [*FILES, "--tree", "write", "--idle", "500ms", "--park-after", "500ms"]
    proc = kip.run("lines", ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=["8080"], flags=flags)
    wait_for("it listens", lambda: listens(proc.port()), 20)
    ask(proc, BEGIN)
    ask(proc, "c.mkdir('/w')")
    assert ask(proc, WATCH) == "None"
    for turn in range(2):
        proc.wait_state("parked")
        put(kip, f"/w/{turn}", "")
        wait_for("the change has woken it", lambda turn=turn: echo(kip) == f"[('/w/{turn}', 0)]", 20)
    proc.wait_state("parked")


# promise runtime: without the file of the socket procs start, sleep and wake, and the next daemon
#   makes it
def test_the_file_is_gone(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    kip.expected += [r"the file of the runtime socket is gone"]
    proc = start(kip)
    (kip.data / "run" / "runtime" / "kip-runtime").unlink()
    other = kip.run("other", ["sleep", "1000"], flags=["--never-sleep"])
    assert "runtime" not in other.exec("find", "/run").stdout
    for one in (proc, other):
        one.sleep()
        one.wake()
    kip.kill()
    kip.up()
    assert ask(start(kip, "next"), "c.whoami().name") == "'next'"


# promise runtime: tasks of asyncio share a connection
def test_asyncio(kip: Kip) -> None:
    proc = start(kip)
    ask(proc, "from kip import AsyncClient; a = AsyncClient(); loop = asyncio.new_event_loop(); go = loop.run_until_complete")
    assert ask(proc, "go(a.whoami()).name") == "'lines'"
    ask(proc, "go(a.mkdir('/w')); go(a.put('/w/x', bytes(100000)))")
    assert ask(proc, "len(go(a.get('/w/x'))), [n.path for n in go(a.ls('/w'))]") == "(100000, ['/w/x'])"
    assert ask(proc, "go(a.get('/none'))").startswith("NotFound: ")
    ask(proc, "async def many(): return await asyncio.gather(*[a.whoami() for _ in range(50)])")
    assert ask(proc, "[r.name for r in go(many())] == ['lines'] * 50") == "True"
    ask(proc, "v = go(a.watch('/w')); go(a.rm('/w/x'))")
    assert ask(proc, "[(x.path, x.kind) for x in go(anext(v)).changes]") == "[('/w/x', 2)]"
    assert ask(proc, "go(v.close())") == "None"
    assert ask(proc, "go(a.whoami()).name") == "'lines'"


# promise runtime: changes of one revision that are longer than an answer come in parts, which the
#   clients join; the watch goes on, also past a daemon's end
# held by: this,
#   `kip_runtime::connection::tests::watches::changes_that_are_too_long_for_an_answer_come_in_parts`
def test_more_changes_at_once_than_an_answer_holds(kip: Kip) -> None:
    proc = start(kip)
    # Paths of 8 KB, for as few files as possible.
    ask(proc, "deep = '/w'; c.mkdir(deep)")
    ask(proc, "for i in range(30): deep += '/' + 'd' * 255; c.mkdir(deep)")
    ask(proc, "l = c.grant(60000); n = [c.put(f'{deep}/{i}', b'', lease=l.id) for i in range(300)]")
    ask(proc, "a = kip.AsyncClient(); loop = asyncio.new_event_loop(); go = loop.run_until_complete; v = go(a.watch('/w')); w = c.watch('/w')")
    ask(proc, "c.revoke(l.id)")
    kip.kill()
    kip.up()
    for next_changes in ("next(w)", "go(anext(v))"):
        ask(proc, f"r = {next_changes}")
        assert ask(proc, "sorted(x.path for x in r.changes) == sorted(x.path for x in n), r.more, r.part") == "(True, False, 0)"
    put(kip, "/w/x", "")
    for next_changes in ("next(w)", "go(anext(v))"):
        assert ask(proc, f"[x.path for x in {next_changes}.changes]") == "['/w/x']"


# promise runtime: a watch of the Python client that is interrupted goes on
def test_an_interrupted_watch_goes_on(kip: Kip) -> None:
    proc = start(kip)
    ask(proc, "import signal; c.mkdir('/w'); w = c.watch('/w')")
    # In the main thread alone a signal interrupts.
    ask(proc, "signal.signal(signal.SIGALRM, signal.default_int_handler); signal.setitimer(signal.ITIMER_REAL, 0.3)")
    assert ask(proc, "next(w)").startswith("KeyboardInterrupt")
    put(kip, "/w/x", "")
    assert ask(proc, "[x.path for x in next(w).changes]") == "['/w/x']"
