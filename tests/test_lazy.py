"""Lazy wakes: a parked proc runs before its memory is there, which comes by faults and with the working set; parked again,
what stayed out is taken over from where it lies. Neither the program nor its clients notice."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import servers, logged
from harness.clients import Lines, Redis, listens
from harness.kip import Kip, Proc
from harness.wait import wait_for

MIB = 1 << 20
PAGE = 4096
KEYS = 12_000
# What the daemon may say when its pager or keeper was killed.
REPLACED = [*logged.PAGER_KILLED, *logged.KEEPER_KILLED, *logged.DAEMON_KILLED]


def value(i: int, version: int = 0) -> bytes:
    """2,560 bytes that no other key and no other version has; 12,000 are 31 MB."""
    return hashlib.blake2b(b"%d of %d" % (version, i), digest_size=64).digest() * 40


class Keys:
    """redis with a lot of memory, woken lazily, and what must be in it."""

    def __init__(self, kip: Kip, *flags: str, name: str = "redis", lazy: str = "on", keys: int = KEYS):
        server = servers.redis()
        self.proc = kip.run(name, server.command, ports=server.published, flags=["--lazy", lazy, *flags])
        self.client = Redis(self.proc.port())
        self.versions = dict.fromkeys(range(keys), 0)
        self.client.ask_all([("SET", f"key:{i}", value(i)) for i in range(keys)])
        self.full = self.proc.inspect()["memory"]["pss_bytes"]

    def change(self, some: list[int]) -> None:
        for i in some:
            self.versions[i] += 1
        self.client.ask_all([("SET", f"key:{i}", value(i, self.versions[i])) for i in some])

    def check(self, some: list[int] | None = None) -> None:
        some = list(self.versions) if some is None else some
        answers = self.client.ask_all([("GET", f"key:{i}") for i in some])
        wrong = [i for i, answer in zip(some, answers) if answer != value(i, self.versions[i])]
        assert not wrong, f"{len(wrong)} values are wrong, the first is that of {wrong[0]}"

    def ask_one(self, i: int) -> dict[str, object]:
        """Wakes it by asking for one key; its memory after that, most of which is still out."""
        self.check([i])
        view = self.proc.wait_state("running")
        memory = view["memory"]
        # It may have been put to sleep twice, the second time with little.
        self.full = max(self.full, view["last_sleep"]["memory_bytes"])
        assert self.proc.rebuilt(), view["last_wake"]
        assert memory["pss_bytes"] < self.full / 4, f"{self.full} bytes became {memory}"
        return memory


def directory(proc: Proc) -> Path:
    return proc.kip.data / "procs" / proc.name


def generation(proc: Proc) -> Path:
    """The directory of a sleeper's only generation."""
    assert not (directory(proc) / "pager").exists(), "a parked proc has its memory in its snapshot"
    found = list(directory(proc).glob("gen-*"))
    assert len(found) == 1, found
    return found[0]


def on_disk(proc: Proc) -> int:
    """Bytes that the files of all generations take, each counted once."""
    files = [file.stat() for file in directory(proc).glob("gen-*/*")]
    return sum({s.st_ino: s.st_blocks * 512 for s in files}.values())


def sleep_anyhow(proc: Proc, tier: str = "hibernated") -> None:
    """It may be awake again before this returns, for a program at work wakes at once."""
    if tier == "hibernated":
        proc.hibernate_once("--clock", "auto")
    else:
        proc.kip.cli("sleep", proc.name, "--to", tier, "--clock", "auto")


# What comes back.


@pytest.mark.parametrize("restorer, cycles", [("plan", 5), ("criu", 3)])
def test_torture(kip: Kip, tmp_path: Path, restorer: str, cycles: int) -> None:
    """One of everything, parked and hibernated by turns: with all but a few things its wakes are lazy; with everything CRIU
    does them, of whole images although it was parked with its memory out."""
    server, flags = servers.torture(), ["--lazy", "on"]
    flags += ["--env", servers.ONLY_CRIU] if restorer == "plan" else []
    tar = server.tarball(tmp_path)
    proc = kip.run(f"torture-{restorer}", server.command, ports=server.published, tar=tar, flags=flags)
    client = Lines(proc.port())
    assert client.ask("eat 20") == "eaten"
    client.check()
    hot = proc.inspect()["memory"]["pss_bytes"]
    for cycle in range(cycles):
        if cycle % 3 == 2:
            sleep_anyhow(proc)
        if cycle % 3 != 1:
            proc.sleep()
            assert client.ask("echo here") == "here"
            assert proc.rebuilt() == (restorer == "plan")
        if cycle == 0 and restorer == "plan":  # from then on all that was checked is the working set
            left = proc.inspect()["memory"]["pss_bytes"]
            assert left < hot / 4, f"{hot} bytes became {left}"
        if cycle % 2:
            sleep_anyhow(proc)
        client.check()
    client.close()


# promise P8: on one machine: a parked proc runs before its memory is there, which comes when it is
#   touched; every page is checked before a program gets it
# held by: this, `tests/test_lazy.py::test_torture`, `tests/test_lazy.py::test_a_damaged_page`,
#   `tests/test_memory.py::test_every_page`
# promise P10: a proc that was woken and touched little writes little when it is parked again; what
#   it unmapped is not kept; it does not grow
# held by: this, `tests/test_lazy.py::test_what_was_unmapped_goes`,
#   `tests/test_lazy.py::test_many_cycles_do_not_pile_up`
# promise waking: lazily: with the working set installed, the rest when touched; the same memory,
#   children, threads, also when CRIU completes what was taken over
# held by: this, `tests/test_lazy.py::test_all_orders`,
#   `tests/test_lazy.py::test_fork_right_after_a_wake`,
#   `tests/test_lazy.py::test_criu_wakes_what_was_taken_over`
def test_redis(kip: Kip) -> None:
    """One request brings what it needs; the second parking writes only that, and the second wake brings it at once."""
    redis = Keys(kip, keys=2 * KEYS)
    before = len(redis.proc.written_bytes())
    redis.proc.sleep()
    first = redis.proc.written_bytes()[before:]
    assert sum(first) > 50 * MIB
    redis.ask_one(7)
    redis.proc.sleep()
    second = redis.proc.written_bytes()[before + len(first) :]
    assert second and all(0 < one < sum(first) / 10 for one in second), (first, second)
    for cycle in range(4):
        memory = redis.ask_one(7)
        assert memory["working_set_hit_percent"] > 80 and memory["working_set_misses"] < 40, memory
        if cycle % 2:
            redis.change([7])
        redis.proc.sleep()
    redis.check()
    for cycle in range(3):
        redis.proc.sleep()
        redis.change(random.Random(cycle).sample(range(KEYS), 20))
    redis.check()


def test_one_that_fights(kip: Kip, tmp_path: Path) -> None:
    """Threads that unmap, move and drop what is still out, children without end: no page is ever another's."""
    server = servers.hostile()
    flags = ["--lazy", "on", "--idle", "1h"]
    fighter = kip.run(server.name, server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    client = Lines(fighter.port())
    for turn in range(30):
        sleep_anyhow(fighter, "hibernated" if turn % 5 == 4 else "parked")
        assert client.ask(f"echo still {turn}") == f"still {turn}"
    assert fighter.wait_state("running")["wakes"] > 15
    assert "a page of" not in fighter.logs()


def test_fork_right_after_a_wake(kip: Kip) -> None:
    """BGSAVE: the child reads everything while most of it is out, for itself and for its parent."""
    redis = Keys(kip)
    client, proc = redis.client, redis.proc
    for turn in range(2):
        proc.sleep()  # the second time all that the first child read is the working set
        assert client.ask("BGSAVE").startswith("Background")
        redis.change(random.Random(turn).sample(range(KEYS), 100))  # while it saves
        wait_for("the save ends", lambda: b"rdb_bgsave_in_progress:0" in client.ask("INFO", "persistence"), 30)
        assert b"rdb_last_bgsave_status:ok" in client.ask("INFO", "persistence")
        assert "RDB looks OK" in proc.exec("redis-check-rdb", "/tmp/dump.rdb").stdout
        redis.check()
    proc.sleep()
    redis.check()


def test_all_orders(kip: Kip) -> None:
    """Hibernated, parked, and awake with a few keys asked for and changed: whatever comes after whatever."""
    redis = Keys(kip)
    dice = random.Random(3)
    for order in itertools.permutations(["hibernated", "parked", "awake"]):
        for what in order:
            if redis.proc.state == "parked":
                redis.proc.wake()  # and no client asks it anything
            if what == "parked":
                redis.proc.sleep()
            elif what == "hibernated":
                redis.proc.hibernate()
            else:
                some = dice.sample(range(KEYS), 10)
                redis.check(some)
                redis.change(some[:5])
        redis.check(dice.sample(range(KEYS), 30))
    redis.check()


# promise waking: `--lazy auto`, `on`, `off`
def test_ways(kip: Kip) -> None:
    """auto: lazily if there is more than 8 MB; off: all of it at once."""
    left = {}
    for way, keys in (("auto", KEYS), ("auto", 500), ("off", KEYS)):
        redis = Keys(kip, lazy=way, keys=keys)
        redis.proc.sleep()
        redis.check([7])
        view = redis.proc.wait_state("running")
        left[way, keys] = view["memory"]["pss_bytes"] / redis.full
        redis.check()
        redis.proc.remove()
    assert left["auto", KEYS] < 0.25 and left["off", KEYS] > 0.8, left
    assert left["auto", 500] > 0.4, left


# What stays on disk.


def test_what_was_unmapped_goes(kip: Kip) -> None:
    """Memory that the program gives up while it is out is not taken over; a file may stay until half of it is."""
    redis = Keys(kip, keys=2000)
    big = {f"big:{i}": random.Random(i).randbytes(MIB) for i in range(40)}
    redis.client.ask_all([("SET", key, content) for key, content in big.items()])
    redis.proc.sleep()
    full = on_disk(redis.proc)
    redis.ask_one(7)
    gone = [key for i, key in enumerate(big) if i % 8]
    assert redis.client.ask("DEL", *gone) == len(gone)
    assert redis.client.ask("MEMORY", "PURGE") == "OK"
    redis.proc.sleep()
    redis.proc.wake()
    redis.proc.sleep()
    assert on_disk(redis.proc) < full / 2, f"{full} bytes became {on_disk(redis.proc)}"
    redis.check()
    assert redis.client.ask("GET", "big:8") == big["big:8"]
    redis.proc.sleep()
    assert redis.client.ask("FLUSHALL") == "OK"  # others of the big ones are still out
    assert redis.client.ask("MEMORY", "PURGE") == "OK"
    redis.proc.sleep()
    redis.proc.wake()
    redis.proc.sleep()
    assert on_disk(redis.proc) < full / 8, f"{full} bytes became {on_disk(redis.proc)}"
    assert redis.client.ask("DBSIZE") == 0


def test_many_cycles_do_not_pile_up(kip: Kip) -> None:
    redis = Keys(kip)
    dice = random.Random(5)
    live = redis.proc.inspect()["memory"]["pss_bytes"]
    for _ in range(15):
        redis.proc.sleep()
        generation(redis.proc)
        found = on_disk(redis.proc)
        assert found < 2.5 * live, f"{found} bytes on disk for {live} of memory"
        redis.change(dice.sample(range(KEYS), 100))
        redis.check(dice.sample(range(KEYS), 20))
    redis.check()


def test_criu_wakes_what_was_taken_over(kip: Kip) -> None:
    """Without a plan CRIU does the wake, of images that are made whole for it; the next one is lazy again."""
    redis = Keys(kip)
    for turn in range(2):
        redis.proc.sleep()
        redis.ask_one(7)
        redis.change([turn, KEYS - turn - 1])
        redis.proc.sleep()
        names = [file.name for file in generation(redis.proc).iterdir()]
        assert any(name.startswith("g") for name in names), f"nothing was taken over: {names}"
        (generation(redis.proc) / "wake.plan").unlink()
        redis.check()
        assert not redis.proc.rebuilt()


# What goes wrong.


# promise waking: a damaged page that comes later ends the proc, which starts cold, and it is said
def test_a_damaged_page(fresh_kip: Callable[..., Kip]) -> None:
    """A page that is damaged where it lies is found when the program wants it: no read gets a wrong byte, and the program,
    which cannot go on, is started cold."""
    kip = fresh_kip()
    kip.expected += ["damaged"]
    redis = Keys(kip)
    redis.proc.sleep()
    redis.ask_one(7)
    pids = redis.proc.inspect()["pids"]
    redis.proc.sleep()
    damage_values(generation(redis.proc))
    redis.ask_one(7)  # it is in the working set, and whole
    redis.client.socket.settimeout(10)
    with pytest.raises((ConnectionError, AssertionError), match="the connection ended|reset|pipe"):
        for i in range(KEYS):
            assert redis.client.ask("GET", f"key:{i}") == value(i), "a wrong byte"
    view = redis.proc.wait_state("running")
    assert not set(view["pids"]) & set(pids)
    wait_for("the cold start serves", lambda: listens(redis.proc.port()), 30)
    assert Redis(redis.proc.port()).ask("DBSIZE") == 0, "it is new"
    events = [event for event in kip.events() if event["kind"] in ("cold-start", "damaged")]
    assert any("damaged" in str(event) for event in events), kip.events()


def damage_values(images: Path) -> None:
    """Flips a bit in every page of the largest page file that holds nothing but a value or two: none that is read before
    the program runs."""
    pages = max(images.glob("*pages-*.img"), key=lambda file: file.stat().st_size)
    content = bytearray(pages.read_bytes())
    values = {value(i)[:64] for i in range(KEYS)}
    count = 0
    for start in range(0, len(content), PAGE):
        page = bytes(content[start : start + PAGE])
        period = next((at for at in range(64) if page[at : at + 64] in values), None)
        if period is not None:
            content[start + 2000] ^= 1
            count += 1
    assert count > KEYS / 4, f"only {count} pages hold values"
    pages.write_bytes(content)


# promise waking: pager, keeper or daemon killed while most is still out; a proc that fights
# held by: this, `tests/test_lazy.py::test_one_that_fights`
@pytest.mark.parametrize("victim", ["pager", "keeper", "daemon"])
def test_killed_while_most_is_out(fresh_kip: Callable[..., Kip], victim: str) -> None:
    """What comes later comes from the next one, too."""
    kip = fresh_kip()
    kip.expected += REPLACED
    redis = Keys(kip, "--prefetch", "off")
    dice = random.Random(11)
    for turn in range(2):
        redis.proc.sleep()
        redis.ask_one(7)
        redis.change(dice.sample(range(KEYS), 10))
        kill(kip, victim)
        if turn:
            redis.proc.sleep()  # with most of it still out
        redis.check()
    redis.proc.sleep()
    redis.ask_one(7)
    kill(kip, victim)
    redis.proc.hibernate()
    redis.check()


# promise hibernation: a proc that is put to sleep as soon as its pager was replaced loses nothing
@pytest.mark.parametrize("tier", ["hibernated", "parked"])
def test_put_to_sleep_as_soon_as_the_pager_is_replaced(fresh_kip: Callable[..., Kip], tier: str) -> None:
    """The new one may not know all procs yet: a sleep is refused or waits, and loses nothing that is out."""
    kip = fresh_kip()
    kip.expected += REPLACED
    some = [Keys(kip, "--prefetch", "off", name=f"redis-{i}", keys=5000) for i in range(6)]
    for redis in some:
        redis.proc.sleep()
        redis.ask_one(7)
    os.kill(kip.info()["pager_pid"], signal.SIGKILL)

    def put_to_sleep(proc: Proc) -> None:
        wait_for("it sleeps", lambda: kip.cli("sleep", proc.name, "--to", tier, "--clock", "auto", check=False).returncode == 0, 30, 0)

    threads = [threading.Thread(target=put_to_sleep, args=(redis.proc,)) for redis in some]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for redis in some:
        redis.check()


def kill(kip: Kip, victim: str) -> None:
    """Kills it, and waits until there is another that knows everything."""
    if victim == "daemon":
        kip.kill()
        kip.up()
        return
    field = f"{victim}_pid"
    told = sum(event["kind"] == victim for event in kip.events())
    old = kip.info()[field]
    os.kill(old, signal.SIGKILL)
    wait_for(f"there is another {victim}", lambda: kip.info()[field] not in (0, old), 30)
    wait_for("it was told", lambda: sum(event["kind"] == victim for event in kip.events()) > told, 30)


# Reads the arguments of all processes of a control group without pause.
LOOK = """
import os, sys
first = int(sys.argv[2])
while True:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(pid) >= first and sys.argv[1] in open(f"/proc/{pid}/cgroup").read():
                open(f"/proc/{pid}/cmdline", "rb").read()
        except OSError:
            pass
"""


# promise waking: another process reads the arguments of its processes (ps(1)) while they fall
#   asleep or wake: no page becomes one of zeros
@pytest.mark.parametrize("tier", ["parked", "hibernated"])
def test_its_arguments_are_read_meanwhile(kip: Kip, tmp_path: Path, tier: str) -> None:
    """ps(1), and whatever else looks at the machine, touches the page where a process has its arguments, which is often that
    of its environment and of its first frames. Touched when it is neither there nor watched, it would be one of zeros."""
    server = servers.torture()
    flags = ["--lazy", "on", "--env", servers.ONLY_CRIU]
    proc = kip.run(f"looked-at-{tier}", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    client = Lines(proc.port())
    client.check()
    first = proc.inspect()["pids"][0]  # the others are not asked, for speed
    looking = subprocess.Popen([sys.executable, "-c", LOOK, f"/kip-{kip.instance}/{proc.name}\n", str(first)])
    try:
        for _ in range(8):
            sleep_anyhow(proc) if tier == "hibernated" else proc.sleep()
            client.check()
            assert tier == "hibernated" or proc.rebuilt()
            _, *arguments = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in proc.inspect()["pids"])
            # Of a zombie, and where the page is still out, there are none.
            assert set(arguments) <= {b"", b"/srv/torture\x007000\x00"}, arguments
    finally:
        looking.kill()
        looking.wait()


# A process for each client, with memory of its own, all of which it reads for each line: as a
# database has.
SESSIONS = """
import hashlib, os, random, signal, socket
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listener = socket.create_server(("", 7000))
number = 0
while True:
    client, _ = listener.accept()
    number += 1
    if os.fork() == 0:
        listener.close()
        own = random.Random(number).randbytes(%d)
        for line in client.makefile("rb"):
            client.sendall(hashlib.sha256(own + line).hexdigest().encode() + b"\\n")
        os._exit(0)
    client.close()
"""


# promise waking: of many processes the one whose client has sent something has its working set
#   before it runs; the others have theirs when they run
def test_a_session_does_not_wait_for_the_others(kip: Kip) -> None:
    size, sessions = 16 * MIB, 6
    flags = ["--lazy", "on", "--never-sleep"]
    proc = kip.run("sessions", ["python3", "-c", SESSIONS % size], ports=["7000"], flags=flags)
    clients = [Lines(proc.port()) for _ in range(sessions)]
    right = [random.Random(number + 1).randbytes(size) for number in range(sessions)]

    def ask(number: int) -> None:
        line = f"{os.urandom(8).hex()}"
        assert clients[number].ask(line) == hashlib.sha256(right[number] + line.encode() + b"\n").hexdigest()

    for number in range(sessions):
        ask(number)
    for asked in (0, 3, 3, 5):
        proc.sleep()
        ask(asked)
        assert proc.rebuilt() and proc.inspect()["last_wake"]["trigger"].startswith("tcp")
        there = sorted(rss_anon(pid) for pid in proc.inspect()["pids"])
        assert there[-1] >= size, "the session that was asked"
        assert there[-2] < size / 4, there
    proc.sleep()
    for number in range(sessions):
        ask(number)
    proc.hibernate_once("--clock", "auto")
    for number in range(sessions):
        ask(number)
    for client in clients:
        client.close()


def rss_anon(pid: int) -> int:
    """Bytes; 0 when it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


# A parent that has written a part of a file's private mapping, and its children, of which one is
# asked at a time: each reads all of it, writes a page and reads it once more.
CHILDREN = 9
INHERITED = f"""
import hashlib, mmap, os, socket
length, pages = 64 * 4096, range(4, 36)
with open("/tmp/inherited", "wb+") as file:
    file.write(b"".join(bytes([number]) * 4096 for number in range(64)))
    file.flush()
    memory = mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
for number in pages:
    memory[number * 4096 : (number + 1) * 4096] = bytes([255 - number]) * 4096
digest = lambda: hashlib.sha256(memory).hexdigest().encode()
children = []
for child in range({CHILDREN}):
    ours, its = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        while its.recv(1):
            before = digest()
            memory[:4096] = bytes([100 + child]) * 4096
            its.sendall(before + b" " + digest())
        os._exit(0)
    children.append(ours)
listener = socket.create_server(("0.0.0.0", 8080))
while True:
    client = listener.accept()[0]
    child = children[int(client.recv(10))]
    child.sendall(b"?")
    client.sendall(child.recv(200))
    client.close()
"""


# promise waking: in a tree of eight processes or more what they had written to private mappings of
#   files comes only when each is asked for it; its pages are right, written and not
def test_inherited_pages_of_files_come_when_they_are_asked_for(kip: Kip) -> None:
    """Read for each of fifty sessions of a database they took 60 ms of its wake."""
    # The parent has the files it reads open, and 9 MiB more, so that its wakes are lazy.
    program = "room = bytearray(b'x') * (9 << 20)\n" + INHERITED
    proc = kip.run("inherits", ["/usr/bin/python3", "-c", program], ports=[8080], flags=["--idle", "1h"])
    content = [bytes([number]) * PAGE for number in range(64)]
    content[4:36] = [bytes([255 - number]) * PAGE for number in range(4, 36)]

    def ask(child: int) -> list[str]:
        with socket.create_connection(("127.0.0.1", proc.port()), timeout=60) as client:
            client.sendall(b"%d" % child)
            return client.makefile().read().split()

    def resident(pid: int) -> int:
        """Pages of a child that are its own."""
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(rollup.split("Anonymous:")[1].split()[0]) // 4

    shown = {child: hashlib.sha256(b"".join(content)).hexdigest() for child in range(CHILDREN)}
    for turn, asked in enumerate([0, 3, 3, 8]):
        proc.sleep() if turn != 2 else proc.hibernate()
        before, after = ask(asked)
        assert before == shown[asked], turn
        content[0] = bytes([100 + asked]) * PAGE
        shown[asked] = after
        assert after == hashlib.sha256(b"".join(content)).hexdigest()
        assert turn == 2 or proc.rebuilt()
        if turn == 0:
            out = [resident(pid) for pid in proc.inspect()["pids"][2:]]
            assert sum(pages < 32 for pages in out) >= CHILDREN - 1, out
    assert {child: ask(child)[0] for child in range(CHILDREN)} == shown
