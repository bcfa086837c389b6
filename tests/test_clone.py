"""`kip clone`: procs that go on from where another one is, with files, names, addresses and ports of their own."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from harness import logged, servers
from harness.clients import Http, Lines, Redis, free_port, http_get, listens
from harness.databases import MariaDb
from harness.kip import Kip, Proc
from harness.programs import SOURCES
from harness.rows import rest_in_soak
from harness.wait import wait_for
from test_trouble import COUNTING, UNPARKABLE

LINES = ["/usr/bin/python3", "/srv/lines.py", "8080"]
PROGRAM = ["-v", f"{SOURCES / 'lines.py'}:/srv/lines.py:ro"]


def clone(proc: Proc, *words: str) -> list[Proc]:
    made = proc.kip.json("clone", proc.name, *words)
    assert made["total_us"] > 0
    return [Proc(proc.kip, view["name"]) for view in made["clones"]]


def redis(kip: Kip, name: str = "redis", flags: list[str] | None = None) -> Proc:
    server = servers.redis()
    return kip.run(name, server.command, ports=server.published, flags=["--never-sleep", *(flags or [])])


def lines(kip: Kip, name: str = "lines", flags: list[str] | None = None) -> Proc:
    proc = kip.run(name, LINES, ports=["8080"], flags=[*PROGRAM, "--never-sleep", *(flags or [])])
    wait_for("it listens", lambda: listens(proc.port()), 20)
    return proc


def directories(kip: Kip) -> list[str]:
    return sorted(path.name for path in (kip.data / "procs").iterdir())


# promise clones: `kip clone` makes a proc that goes on from where another one is, in every tier on
#   this machine: its memory and its files, and a name, host name, address, ports and logs of its
#   own
# promise clones: a sleeper that is cloned is not woken, and a proc that runs does not sleep for it
@pytest.mark.smoke
@pytest.mark.parametrize("state", ["running", "hibernated", "parked"])
def test_from_every_tier(kip: Kip, state: str) -> None:
    proc = redis(kip)
    Redis(proc.port()).ask_all([("SET", f"key:{i}", b"%d" % i * 100) for i in range(3000)])
    proc.exec("sh", "-c", "echo source > /tmp/file; echo $(hostname) > /tmp/name")
    {"running": Proc.wake, "hibernated": Proc.hibernate, "parked": Proc.sleep}[state](proc)
    since = len(kip.events())
    (other,) = clone(proc, "other")
    new = kip.events()[since:]
    assert [event["name"] for event in new if (event["kind"], event["detail"]) == ("waking", "clone")] == ["other"] * (state == "running")
    if state == "running":
        # It is frozen for a moment, and that is all.
        assert not [event for event in new if event["name"] == "redis"] and proc.inspect()["generation"] == 0
    assert other.port() != proc.port() and other.address() != proc.address()

    client = Redis(other.port())
    assert client.ask_all([("GET", f"key:{i}") for i in range(3000)]) == [b"%d" % i * 100 for i in range(3000)]
    client.ask("SET", "key:1", "the clone's")
    other.exec("sh", "-c", "echo clone > /tmp/file")
    assert Redis(proc.port()).ask("GET", "key:1") == b"1" * 100
    assert proc.exec("cat", "/tmp/file").stdout == "source\n" and other.exec("cat", "/tmp/file").stdout == "clone\n"
    assert other.exec("sh", "-c", "hostname; cat /etc/hostname; cat /tmp/name").stdout == "other\nother\nredis\n"
    hosts = other.exec("cat", "/etc/hosts").stdout
    assert "other" in hosts and "redis" not in hosts
    assert [event["detail"] for event in kip.events() if event["kind"] == "cloned" and event["name"] == "other"][-1] == "from redis"
    assert "Ready to accept" not in other.logs(), "its log begins with it"

    # A proc as any other.
    for go in (Proc.sleep, Proc.hibernate, Proc.sleep):
        go(other)
        assert client.ask("GET", "key:1") == b"the clone's"
    proc.remove()
    other.sleep()
    assert client.ask("GET", "key:2") == b"2" * 100
    other.stop()
    other.start(ready=True)
    assert other.exec("cat", "/tmp/file").stdout == "clone\n"


# promise clones: a proc whose memory was out, and came back in part, is cloned with all of it, and
#   goes on to sleep and wake as before, as its clone does
def test_of_one_that_was_hibernated(kip: Kip) -> None:
    proc = redis(kip)
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", b"%d" % i * 1000) for i in range(5000)])
    for turn in range(3):
        proc.hibernate()
        assert client.ask("GET", "key:7") == b"7" * 1000
        (other,) = clone(proc)
        assert client.ask("SET", "turn", turn) == "OK"
        mine = Redis(other.port())
        everything = [b"%d" % i * 1000 for i in range(5000)]
        for one, asked in ((other, mine), (proc, client)):
            assert asked.ask_all([("GET", f"key:{i}") for i in range(5000)]) == everything
            one.hibernate()
            assert asked.ask("GET", "key:8") == b"8" * 1000
            one.sleep()
            assert asked.ask_all([("GET", f"key:{i}") for i in range(5000)]) == everything
        assert mine.ask("GET", "turn") == (None if turn == 0 else b"%d" % (turn - 1))
        assert client.ask("GET", "turn") == b"%d" % turn


# promise clones: a source with hooks is parked for its clone and wakes again; one with much in
#   memory is not
@pytest.mark.parametrize("flags", [[], ["--after-wake", "true"]], ids=["large", "hooks"])
def test_of_one_that_is_parked_for_it(kip: Kip, flags: list[str]) -> None:
    proc = redis(kip, flags=flags)
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", b"%d" % i * 5000) for i in range(10 if flags else 6000)])
    (other,) = clone(proc)
    last = proc.inspect()["last_wake"]
    assert last["trigger"] == "clone" if flags else last is None
    for one in (client, Redis(other.port())):
        assert one.ask("GET", "key:7") == b"7" * 5000 and one.ask("DBSIZE") == (10 if flags else 6000)


# promise clones: `--after-clone` runs in a clone before that is handed out, asleep or not; a clone
#   whose command fails is not made
def test_after_clone(kip: Kip) -> None:
    hook = "echo clone of $KIP_CLONE_OF > /tmp/hook; sleep 0.5; redis-cli set hooked yes; [ ! -e /tmp/fail ] || { echo not today; exit 3; }"
    proc = redis(kip, flags=["--after-clone", hook])
    proc.exec("true")
    first, second = clone(proc, "--count", "2")
    (third,) = clone(proc, "third", "--asleep")
    third.wait_state("parked")
    assert proc.exec("cat", "/tmp/hook", check=False).returncode != 0, "it is for clones"
    for one in (first, second, third):
        assert Redis(one.port()).ask("GET", "hooked") == b"yes"
        assert one.exec("cat", "/tmp/hook").stdout == "clone of redis\n"
    assert Redis(proc.port()).ask("GET", "hooked") is None
    proc.exec("touch", "/tmp/fail")
    refused = kip.refused("clone", "redis", "fourth", "--count", "2")
    assert "fourth-1 is not made: its own command after the clone failed: the command ended with code 3: not today" in refused
    assert kip.names() == ["redis", "redis-1", "redis-2", "third"]


# promise clones: no client reaches a clone before its own command has run, not even one that knows
#   its port beforehand
@pytest.mark.parametrize("asleep", [False, True], ids=["", "asleep"])
def test_clients_wait_for_the_command(kip: Kip, asleep: bool) -> None:
    proc, port, heard, made = redis(kip, flags=["--after-clone", "sleep 0.3; redis-cli set hooked yes"]), free_port(), list[Any](), Event()

    def asks() -> None:
        while not heard:
            try:
                heard.append(Redis(port, timeout=30).ask("GET", "hooked"))
            except ConnectionRefusedError:
                assert not made.is_set()

    asking = [Thread(target=asks) for _ in range(4)]
    for one in asking:
        one.start()
    clone(proc, "other", "-p", f"{port}:6379", *(["--asleep"] if asleep else []))
    made.set()
    for one in asking:
        one.join(60)
    assert heard == [b"yes"] * len(heard) and heard


def page(proc: Proc) -> bytes:
    return http_get(proc.port(), "/page.html")


# promise clones: real servers with workers, threads and runtimes of their own are cloned while
#   they run: the clone answers with what the source had in memory, and the source goes on
@pytest.mark.parametrize("name", rest_in_soak(servers.WEB, ["nginx", "node", "go"]))
def test_web_servers(kip: Kip, tmp_path: Path, name: str) -> None:
    server = servers.WEB[name]()
    proc = kip.run(server.name, server.command, ports=server.published, tar=server.tarball(tmp_path), flags=["--never-sleep"])
    kept = Http(proc.port())
    assert kept.get("/page.html") == servers.PAGE
    if server.has_kv:
        kept.ask("PUT", "/kv/a", b"before")
    clones = clone(proc, "--count", "2")
    assert [other.name for other in clones] == [f"{name}-1", f"{name}-2"]
    assert kept.get("/page.html") == servers.PAGE, "the source's connections stay"
    for other in clones:
        assert page(other) == servers.PAGE
        if server.has_kv:
            mine = Http(other.port())
            assert mine.get("/kv/a") == b"before"
            mine.ask("PUT", "/kv/a", other.name.encode())
    if server.has_kv:
        assert kept.get("/kv/a") == b"before"
        assert [http_get(other.port(), "/kv/a") for other in clones] == [other.name.encode() for other in clones]


# promise clones: a clone of a clone of a clone is one, also after each has slept
def test_of_a_clone(kip: Kip) -> None:
    proc = lines(kip)
    assert Lines(proc.port()).ask("x = 1") == "None"
    line = [proc]
    for depth, go in enumerate((Proc.sleep, Proc.hibernate, Proc.wake)):
        (other,) = clone(line[-1])
        client = Lines(other.port())
        assert client.ask("x") == str(depth + 1)
        assert client.ask(f"x = {depth + 2}") == "None"
        go(other)
        line.append(other)
    assert [Lines(one.port()).ask("x") for one in line] == ["1", "2", "3", "4"]
    assert [one.name for one in line] == ["lines", "lines-1", "lines-1-1", "lines-1-1-1"]


# promise clones: connections to the outside are the source's: in the clone they end with a reset;
#   connections inside the tree stay
def test_connections(kip: Kip) -> None:
    proc = lines(kip)
    client = Lines(proc.port())
    assert client.ask("ours, theirs = socket.socketpair()") == "None"
    assert client.ask("ours.send(b'kept')") == "4"
    (other,) = clone(proc)
    assert client.ask("theirs.recv(4, socket.MSG_PEEK)") == "b'kept'", "the source has its connection"
    assert Lines(other.port()).ask("theirs.recv(4)") == "b'kept'"
    wait_for("the other end is gone there", lambda: len(connections(other)) == 0, 20)


# promise clones: pipes with what is in them, eventfds, signalfds and epoll sets of these and of
#   sockets are the clone's own, and are made without CRIU
def test_objects_of_the_kernel(kip: Kip) -> None:
    proc = lines(kip)
    client = Lines(proc.port())
    for line in (
        "import select, signal, struct; heard = socket.create_server(('', 7999))",
        "small, large = os.pipe(), os.pipe2(os.O_NONBLOCK)",
        "import fcntl; fcntl.fcntl(large[1], 1031, 1 << 20)",
        "os.write(small[1], b'waits') and os.write(large[1], b'x' * 500_000)",
        "count = os.eventfd(5, os.EFD_NONBLOCK)",
        "mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
        "libc = __import__('ctypes').CDLL(None)",
        "taken = os.eventfd(3, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)",
        "once = select.epoll(); once.register(count, select.EPOLLIN | select.EPOLLONESHOT); fired = once.poll(0)",
        "signals = libc.signalfd(-1, struct.pack('Q', 1 << 9) + bytes(120), 0)",
        "watched, inner = select.epoll(), select.epoll()",
        "inner.register(count, select.EPOLLIN)",
        "watched.register(small[0], select.EPOLLIN | select.EPOLLET); watched.register(inner.fileno(), select.EPOLLIN)",
        "watched.register(signals, select.EPOLLIN); watched.register(heard.fileno(), select.EPOLLIN)",
        "moved = os.dup2(small[0], 200); watched.register(200, select.EPOLLIN)",
    ):
        assert client.ask(line) in ("None", "500000", "200"), line
    (other,) = clone(proc)
    mine = Lines(other.port())
    assert other.rebuilt()
    for ask in (client, mine):
        assert ask.ask("sorted(fd for fd, _ in watched.poll(0)) == sorted([small[0], inner.fileno(), 200])") == "True"
        assert ask.ask("os.read(small[0], 100), len(os.read(large[0], 1 << 20)), os.eventfd_read(count)") == "(b'waits', 500000, 5)"
        assert ask.ask("fcntl.fcntl(large[1], 1032), os.get_blocking(large[1]), os.get_blocking(small[1])") == "(1048576, False, True)"
        assert ask.ask("watched.poll(0)") == "[]"
        assert ask.ask("watched.unregister(200)") == "None" and ask.ask("watched.modify(small[0], select.EPOLLIN)") == "None"
        assert ask.ask("os.kill(os.getpid(), signal.SIGUSR1)") == "None"
        assert ask.ask("[fd for fd, _ in watched.poll(1)] == [signals] and os.read(signals, 128)[0]") == "10"
        assert ask.ask("len(fired), once.poll(0), [os.eventfd_read(taken) for _ in range(3)]") == "(1, [], [1, 1, 1])"
        assert ask.ask("os.eventfd_read(taken)").startswith("BlockingIOError")
        # Of one and not of the other.
        assert ask.ask("os.write(small[1], b'mine')") == "4" and ask.ask("os.read(small[0], 100)") == "b'mine'"


# promise clones: what draws random numbers from the kernel draws others in each clone (Go,
#   Python's `secrets`)
def test_random_numbers(kip: Kip, tmp_path: Path) -> None:
    server = servers.go()
    proc = kip.run("go", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=["--never-sleep"])
    wait_for("it listens", lambda: listens(proc.port()), 20)
    # Its library has a state by now, which the kernel is to wipe.
    http_get(proc.port(), "/random")
    made = kip.json("clone", "go", "--count", "3")
    drawn = [http_get(view["ports"][0]["host_port"], "/random") for view in made["clones"]] + [http_get(proc.port(), "/random")]
    assert len(set(drawn)) == 4 and made["notes"] == []
    proc = lines(kip)
    client = Lines(proc.port())
    assert client.ask("import secrets") == "None"
    (other,) = clone(proc)
    assert client.ask("secrets.token_hex(16)") != Lines(other.port()).ask("secrets.token_hex(16)")


# promise clones: OpenSSL's random numbers, of each thread, are others in the source and in each
#   clone, and after each rollback; where OpenSSL is and no generator was found that is said
# held by: this, `kip_copy::random::tests::a_generator_is_known_by_its_functions_and_its_pid`
@pytest.mark.parametrize("state", rest_in_soak(["running", "parked", "archived", "by-criu"], ["running", "archived", "by-criu"]))
def test_numbers_of_openssl(fresh_kip: Callable[..., Kip], tmp_path: Path, state: str) -> None:
    kip = fresh_kip(*(["--only-criu"] if state == "by-criu" else ["--store", str(tmp_path)] if state == "archived" else []))
    proc = lines(kip)
    client = Lines(proc.port())
    client.ask("import queue, ssl, threading")
    (note,) = kip.json("clone", proc.name)["notes"]
    assert "libcrypto.so" in note and "none were found" in note
    assert f"note: {note}\n" in kip.cli("clone", proc.name).stdout
    client.ask("wanted, drawn = queue.Queue(), queue.Queue()")
    client.ask("threading.Thread(target=lambda: [drawn.put(ssl.RAND_bytes(wanted.get())) for _ in iter(int, 1)], daemon=True).start()")

    def draw(of: Proc) -> list[str]:
        ask = Lines(of.port()).ask
        return [ask("ssl.RAND_bytes(16).hex()"), ask("wanted.put(16)") and ask("drawn.get().hex()")]

    numbers = draw(proc)
    if state in ("parked", "archived"):
        proc.sleep() if state == "parked" else proc.archive()
    made = kip.json("clone", proc.name, "--count", "3")
    assert made["notes"] == []
    clones = [Proc(kip, view["name"]) for view in made["clones"]]
    (grandchild,) = clone(clones[0])
    # A program that is started is none that was cloned, though its generations have the same
    # numbers.
    other = clones.pop()
    other.stop()
    other.start(ready=True)
    wait_for("it listens", lambda: listens(other.port()), 20)
    drawn = [Lines(other.port()).ask(words) for words in ("import ssl", "ssl.RAND_bytes(16).hex()")][1:]
    other.sleep()
    (child,) = clone(other)
    drawn += [Lines(one.port()).ask("ssl.RAND_bytes(16).hex()") for one in (other, child)]
    assert len(set(drawn)) == 3, drawn
    kip.cli("checkpoint", proc.name, "--tag", "then")
    for one in (*clones, grandchild, proc, proc):
        numbers += draw(one)
    for _ in range(2):
        kip.cli("rollback", proc.name, "--to", "then")
        numbers += draw(proc)
    assert len(numbers) == 16 and len(set(numbers)) == 16, numbers


RANDOM_OF_NODE = """
const crypto = require("crypto");
require("http").createServer((asked, answer) => crypto.randomBytes(16, (error, later) =>
  answer.end(crypto.randomBytes(16).toString("hex") + " " + later.toString("hex")))).listen(8080);
"""


# promise clones: those of Node, which has OpenSSL in its program, too
def test_numbers_of_node(kip: Kip, tool: Callable[[str], str]) -> None:
    node = tool("node")
    proc = kip.run("node", [node, "-e", RANDOM_OF_NODE], ports=["8080"], flags=["--never-sleep"])
    wait_for("it listens", lambda: listens(proc.port()), 20)
    numbers = [*http_get(proc.port(), "/").split()]
    made = kip.json("clone", proc.name, "--count", "3")
    for port in [proc.port(), *(view["ports"][0]["host_port"] for view in made["clones"])]:
        for _ in range(6):  # More than it has threads for them.
            numbers += http_get(port, "/").split()
    assert len(set(numbers)) == len(numbers) == 50


def connections(proc: Proc) -> list[str]:
    return proc.exec("ss", "-Htn", "state", "established").stdout.splitlines()


@contextmanager
def asked_all_the_time(port: int) -> Iterator[list[Any]]:
    """By one connection, and by a new one each time. What it heard."""
    heard: list[Any] = []
    over = Event()

    def ask() -> None:
        client = Redis(port)
        while not over.is_set():
            try:
                heard.append((client.ask("INCR", "n"), Redis(port).ask("GET", "key")))
            except (OSError, AssertionError) as error:
                heard.append(error)
                return

    asking = Thread(target=ask)
    asking.start()
    try:
        yield heard
    finally:
        over.set()
        asking.join(60)


# promise clones: the source loses no request while it is cloned again and again
@pytest.mark.parametrize("times", [10, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.timeout(600)
def test_the_source_under_load(kip: Kip, times: int) -> None:
    proc = redis(kip)
    Redis(proc.port()).ask("SET", "key", "value")
    with asked_all_the_time(proc.port()) as heard:
        for _ in range(times):
            before = len(heard)
            (other,) = clone(proc)
            assert Redis(other.port()).ask("GET", "key") == b"value"
            other.remove()
            wait_for("it is asked on", lambda before=before: len(heard) > before + 2, 30)
    assert [n for n, _ in heard] == list(range(1, len(heard) + 1)) and {value for _, value in heard} == {b"value"}, heard[-1]


# promise clones: a database with its files is cloned with both of one moment, and neither writes
#   where the other reads
def test_mariadb(kip: Kip, tmp_path: Path) -> None:
    server = servers.mariadb()
    flags = [*server.flags, "--never-sleep"]
    proc = kip.run("mariadb", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    wait_for("it listens", lambda: listens(proc.port()), 60)
    client = MariaDb(proc.port())
    client.ask("CREATE DATABASE d")
    client.ask("CREATE TABLE d.t (n INT PRIMARY KEY) ENGINE=InnoDB")
    client.ask("INSERT INTO d.t VALUES (1), (2), (3)")
    (other,) = clone(proc)
    client.ask("INSERT INTO d.t VALUES (4)")
    theirs = MariaDb(other.port())
    assert theirs.ask("SELECT n FROM d.t ORDER BY n") == [["1"], ["2"], ["3"]]
    theirs.ask("INSERT INTO d.t VALUES (5)")
    for one, last in ((proc, "4"), (other, "5")):
        one.sleep()
        assert MariaDb(one.port()).ask("SELECT n FROM d.t ORDER BY n") == [["1"], ["2"], ["3"], [last]]


# promise clones: secrets, a limited disk, file systems in memory and the owners of files are the
#   clone's own, with the same contents
@pytest.mark.parametrize("disk", [[], ["--disk", "64M"]], ids=["unlimited", "limited"])
def test_what_it_has(kip: Kip, tmp_path: Path, disk: list[str]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    flags = ["--secret", f"s={secret}", *disk, "--tmpfs", "/scratch", "--label", "team=shop"]
    proc = lines(kip, flags=flags)
    proc.exec("sh", "-c", "echo own > /root/own; echo of > /tmp/of; chown 33:33 /tmp/of; chmod 640 /tmp/of; ln /tmp/of /tmp/link;"
              "echo there > /scratch/there; mkfifo /tmp/fifo; ln -s nowhere /tmp/broken; rm /etc/debian_version")  # fmt: skip
    look = "cat /run/secrets/s /root/own /scratch/there; stat -c '%u %g %a %h %F' /tmp/of /tmp/fifo /tmp/broken; ls /etc/debian_version; df -k / | tail -1"
    mine = proc.exec("sh", "-c", look, check=False).stdout
    (other,) = clone(proc)
    assert other.exec("sh", "-c", look, check=False).stdout.split()[:-4] == mine.split()[:-4]
    assert other.inspect()["spec"]["labels"] == {"team": "shop"}
    other.exec("sh", "-c", "echo theirs > /scratch/there; echo theirs > /root/own")
    assert proc.exec("cat", "/scratch/there", "/root/own").stdout == "there\nown\n"
    other.sleep()
    assert other.exec("cat", "/scratch/there", "/root/own").stdout == "theirs\ntheirs\n"
    if not disk:
        # Of the host's ids each has its own block; what marks a deleted file is the host's own.
        found = [[path.lstat().st_uid for path in (kip.data / "procs" / one.name / "upper").rglob("*")] for one in (proc, other)]
        blocks = [{uid >> 16 for uid in uids if uid} for uids in found]
        assert [len(found) for found in blocks] == [1, 1] and blocks[0] != blocks[1]


# promise clones: what a program has made of its files stands in no clone's way: directories as
#   deep as a path may be, names that Kip uses itself, holes of any size in files that Kip writes
def test_files_of_any_shape(kip: Kip) -> None:
    proc = lines(kip)
    client = Lines(proc.port())
    assert client.ask("import functools; functools.reduce(lambda path, _: os.mkdir(path) or path + '/d', range(1800), '/root/d')") == "None"
    assert client.ask("os.makedirs('/root/layer/pins/upper')") == "None"
    assert client.ask("os.truncate('/etc/hostname', 1 << 40)") == "None"
    (other,) = clone(proc)
    ask = "os.path.isdir('/root/' + '/'.join('d' for _ in range(1800))), os.path.isdir('/root/layer/pins/upper'), os.stat('/etc/hostname').st_size"
    assert Lines(other.port()).ask(ask) == f"(True, True, {1 << 40})"


# promise clones: a program that is not root opens its output anew in a clone as in the source
def test_of_a_user(kip: Kip) -> None:
    proc = lines(kip, flags=["--user", "33:33"])
    client = Lines(proc.port())
    assert client.ask("pipe = os.pipe()") == "None"
    (other,) = clone(proc)
    mine = Lines(other.port())
    assert other.rebuilt()
    for ask in (client, mine):
        assert ask.ask("open('/dev/stdout', 'w').write('again')") == "5"
        assert ask.ask("os.fstat(os.open(f'/proc/self/fd/{pipe[1]}', os.O_WRONLY)).st_uid") == "33"
    wait_for("its output", lambda: "again" in other.logs())


# promise clones: what a clone is asked to be is its own: names and ports, also where its source
#   was renamed, and in what `kip export` shows
def test_what_it_is_asked_to_be(kip: Kip) -> None:
    proc = kip.run("first", LINES, ports=["8080,wake=data"], flags=[*PROGRAM, "--never-sleep", "--alias", "shop", "--network", "n"])
    wait_for("it listens", lambda: listens(proc.port()), 20)
    kip.cli("rename", "first", "second")
    port = free_port()
    (other,) = clone(Proc(kip, "second"), "third", "-p", f"{port}:8080")
    assert other.exec("hostname").stdout == "third\n"
    exported = kip.cli("export", "third").stdout
    assert f'"{port}:8080,wake=data"' in exported and "third" in exported and "second" not in exported and "shop" not in exported, exported
    # What was in the way of one is no slot less for the next.
    (kip.data / "procs" / "second-1").mkdir()
    assert "exists already" in kip.refused("clone", "second", "second-1")
    assert [one.name for one in clone(Proc(kip, "second"))] == ["second-2"]
    (kip.data / "procs" / "second-1").rmdir()


# promise clones: a single clone's ports are where its owner says, others where Kip chooses
def test_ports(kip: Kip) -> None:
    proc = lines(kip, "web")
    port = free_port()
    (other,) = clone(proc, "mine", "-p", f"{port}:8080")
    assert other.port() == port and Lines(port).ask("1 + 1") == "2"
    assert f"tcp port {port} is taken by proc mine" in kip.refused("clone", "web", "-p", f"{port}:8080")
    assert kip.names() == ["mine", "web"]


# promise clones: what cannot be cloned is refused with one line, and nothing is left of it
def test_refused(kip: Kip, tmp_path: Path) -> None:
    lines(kip)
    kip.run("other", ["sleep", "1000"])
    kip.run("volume", ["sleep", "1000"], flags=["-v", "data:/data"])
    kip.run("bound", ["sleep", "1000"], flags=["-v", f"{tmp_path}:/data"])
    kip.run("has", ["sleep", "1000"], flags=["-v", "data-taken:/data"])
    stopped = kip.run("stopped", ["sleep", "1000"])
    stopped.stop()
    for words, said in {
        ("nothing",): "there is no proc",
        ("lines", "other"): "exists already",
        ("lines", "--count", "0"): "1 to 256",
        ("lines", "--count", "257"): "1 to 256",
        ("lines", "--count", "2", "-p", "9000:8080"): "a single clone",
        ("lines", "-p", "9000:81"): "has no tcp port 81",
        ("lines", "-p", "9000:8080", "-p", "9001:8080"): "is published twice",
        ("volume",): "the volume data at /data, which a clone would write to as well",
        ("volume", "--cold", "--volumes", "copy"): "copied at the moment at which a hot clone is made",
        ("bound", "--volumes", "copy"): "is not Kip's own to copy",
        ("volume", "taken", "--volumes", "copy"): "would have the volume data-taken, which is there already",
        ("stopped",): "it is stopped",
    }.items():
        assert said in kip.refused("clone", *words), words
    kip.run("stuck", ["/usr/bin/python3", "-c", next(iter(UNPARKABLE.values())) + COUNTING])
    wait_for("it has its descriptor", lambda: "descriptor" in Proc(kip, "stuck").logs(), 30)
    assert "stuck cannot be cloned now" in kip.refused("clone", "stuck")
    # Held for a sleeper on this machine, and for it alone.
    kip.run("shell", ["sh"], flags=["-t", "-d"])
    assert "shell cannot be cloned now: it has a terminal open" in kip.refused("clone", "shell")
    assert kip.names() == ["bound", "has", "lines", "other", "shell", "stopped", "stuck", "volume"] == directories(kip)


# promise clones: a proc that is archived is cloned without being woken, and one that has come back
#   in part too: what is in the store comes, and the clone needs it no more; a clone is archived as
#   any other
def test_with_a_store(archiving: Kip) -> None:
    proc = redis(archiving)
    Redis(proc.port()).ask_all([("SET", f"key:{i}", b"%d" % i * 1000) for i in range(5000)])
    (other,) = clone(proc, "other")
    proc.archive()
    woken = proc.inspect()["wakes"]
    (of_archived,) = clone(proc, "of-archived")
    assert proc.state == "parked" and proc.inspect()["wakes"] == woken
    proc.archive()
    checkpointed = archiving.json("checkpoint", "redis", "--tag", "stored")
    assert checkpointed["has_memory"]
    proc.archive()
    # It runs, and most of its memory is still in the store.
    assert Redis(proc.port()).ask("GET", "key:7") == b"7" * 1000
    (of_running,) = clone(proc, "of-running")
    proc.remove()
    for one in (other, of_archived, of_running):
        client = Redis(one.port())
        assert [client.ask("GET", f"key:{i}") for i in range(0, 5000, 7)] == [b"%d" % i * 1000 for i in range(0, 5000, 7)]
        one.sleep()
        assert Redis(one.port()).ask("GET", "key:4999") == b"4999" * 1000
    for one in (other, of_archived):
        one.archive()
        assert Redis(one.port()).ask("GET", "key:11") == b"11" * 1000


# promise clones: killed in the middle, the next daemon has the source as it was, and the clone
#   whole or not at all
@pytest.mark.parametrize("step", ["park-frozen", "copy-held", "copy-files", "copy-written", "copy-sealed", "clone-copied", "clone-synced", "clone-published", "clone-filled"])
def test_killed_in_the_middle(fresh_kip: Callable[..., Kip], step: str) -> None:
    kip = fresh_kip(start=False)
    kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_GONE]
    kip.up("--fault-at", step)
    proc = redis(kip)
    Redis(proc.port()).ask("SET", "key", "value")
    kip.cli("clone", "redis", "other", check=False)
    assert kip.wait_dead(30) == -signal.SIGKILL
    kip.up()
    assert Redis(proc.port()).ask("GET", "key") == b"value"
    # It is one when the command ends.
    assert kip.names() == ["redis"] == directories(kip)
    (other,) = clone(proc, "other")
    assert Redis(other.port()).ask("GET", "key") == b"value"


# promise clones: one that sleeps is one from the moment on at which it has its name
def test_killed_when_it_has_its_name(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip(start=False)
    kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_GONE]
    kip.up("--fault-at", "clone-published")
    proc = redis(kip)
    Redis(proc.port()).ask("SET", "key", "value")
    proc.sleep()
    kip.cli("clone", "redis", "other", check=False)
    assert kip.wait_dead(30) == -signal.SIGKILL
    kip.up()
    assert kip.names() == ["other", "redis"] == directories(kip)
    assert Redis(Proc(kip, "other").port()).ask("GET", "key") == b"value"


# promise clones: a clone outlives the daemon, the keeper, a restart of the machine and its source
def test_it_is_a_proc_of_its_own(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    kip.expected += [*logged.DAEMON_KILLED, *logged.KEEPER_GONE]
    proc = redis(kip)
    Redis(proc.port()).ask("SET", "key", "value")
    proc.sleep()
    one, two = clone(proc, "--count", "2")
    proc.remove()
    kip.kill()
    kip.up()
    assert Redis(one.port()).ask("GET", "key") == b"value"
    one.wait_state("running")
    kip.reboot()
    wait_for("it listens", lambda: listens(two.port()), 20)
    assert Redis(two.port()).ask("GET", "key") == b"value"
    assert one.state == "stopped"


# promise clones: the same by the API, where clones may be asked to sleep at first
def test_by_the_api(kip: Kip) -> None:
    proc = redis(kip)
    Redis(proc.port()).ask("SET", "key", "value")
    with socket.socket(socket.AF_UNIX) as api:
        api.connect(str(kip.data / "run/api.sock"))
        body = json.dumps({"asleep": True}).encode()
        api.sendall(b"POST /v1/procs/redis/clone HTTP/1.1\r\nHost: kip\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        answer = api.makefile("rb").read()
    assert b" 200 " in answer.splitlines()[0], answer
    made = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])
    assert made["still_us"] > 0 and made["clones"][0]["state"] == "parked"
    assert Redis(Proc(kip, made["clones"][0]["name"]).port()).ask("GET", "key") == b"value"
