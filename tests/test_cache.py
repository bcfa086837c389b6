"""What is kept on the local disk of what lies in the store, and how far is read ahead of what a woken proc needs: each wake says what
it took from where, and a proxy in front of a real S3 server counts too."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harness import s3, servers
from harness.clients import Lines, Redis
from harness.kip import Kip, Proc
from harness.line import Proxy, Request
from harness.wait import wait_for
from test_archive import archive
from test_full_disk import Disk, disk  # noqa: F401

MIB = 1 << 20
# Of `reader`: 64 MB, more than comes behind a wake by itself.
PAGES = 16 << 10
BLOCK_PAGES = 32
BLOCK = BLOCK_PAGES * 4096
# Of redis: 20 MB.
KEYS = 2500
TOLD = r"WARN.*the cache"


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[tuple[str, Proxy]]:
    """Of a real S3 server, a first byte of which takes 15 ms, and 100 MB a second."""
    with ExitStack() as stack:
        url = stack.enter_context(s3.server(tmp_path / "s3"))
        proxy = Proxy(int(url.rpartition(":")[2]), 15, 100)
        stack.callback(proxy.close)
        yield f"{url.rpartition(':')[0]}:{proxy.port}", proxy


def value(i: int) -> bytes:
    return random.Random(i).randbytes(8000)


def redis(kip: Kip, name: str = "redis") -> tuple[Proc, Redis]:
    """One request of which needs little of its memory, which is known."""
    server = servers.redis()
    proc = kip.run(name, server.command, ports=server.published)
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", value(i)) for i in range(KEYS)])
    for _ in range(2):
        proc.sleep()
        assert client.ask("GET", "key:5") == value(5)
    return proc, client


def whole(client: Redis) -> None:
    assert client.ask_all([("GET", f"key:{i}") for i in range(KEYS)]) == [value(i) for i in range(KEYS)]


def fetched(proc: Proc) -> dict[str, Any]:
    """What the last wake took from where, once nothing comes behind it any more."""
    seen: list[dict[str, Any]] = []

    def still() -> bool:
        seen.append(proc.inspect()["last_wake"]["fetched"])
        return len(seen) > 4 and seen[-5] == seen[-1]

    wait_for("nothing comes any more", still, 30, every=0.1)
    return seen[-1]


def reads(rows: list[Request]) -> list[Request]:
    return [row for row in rows if "GET" in row.kind and ("/packs/" in row.key or "/gen-" in row.key)]


def asked_twice(kip: Kip) -> int:
    """Second requests because a first byte was slow: of such two one is given up, and may never have come to the line."""
    counted = re.findall(r"^kip_store_hedges_total(?:\{.*\})? (\d+)", kip.cli("metrics").stdout, re.MULTILINE)
    return sum(map(int, counted))


def files(kip: Kip) -> list[Path]:
    return list((kip.data / "cache").iterdir())


def told(kip: Kip, what: str) -> int:
    return len(re.findall(f"WARN.*{what}", kip.stderr()))


# promise P16: of an archived proc the front, which has its set, stays on the local disk as long as
#   `--cache` has room; kept for one proc by its owner's wish, for a price
# held by: the cache: this; the wish and the price: not built
# promise archive: `kip up --cache`: what was stored or fetched lately is kept on the local disk,
#   sealed, and the next wake reads nothing of that from the store; `kip inspect` says what came
#   from where
# held by: this, `kip_offload::tests::what_the_cache_has_is_not_fetched`,
#   `kip_offload::cache::tests::what_was_put_in_is_read_in_any_ranges`
def test_a_wake_asks_the_store_for_nothing_that_is_here(bucket: tuple[str, Proxy], fresh_kip: Callable[..., Kip]) -> None:
    """What this machine stored is here, and what it fetched; nothing of a proc can be read there. Without a cache all is fetched."""
    url, proxy = bucket
    kip = fresh_kip("--store", url, "--cache", "200M")
    proc, client = redis(kip)
    archive(proc)
    assert files(kip) and not any(value(7)[:64] in path.read_bytes() for path in files(kip))
    for cycle in range(2):
        proxy.quiet()
        whole(client)
        came = fetched(proc)
        assert reads(proxy.quiet()) == [] and came["requests"] == came["store_bytes"] == 0 < came["cache_bytes"], (cycle, came)
        if cycle:
            # Kept by a daemon for the next; `kip inspect` shows it as text too.
            assert f"by 0 requests, {came['cache_bytes'] / MIB:.1f}" in kip.cli("inspect", "redis").stdout
            kip.kill()
            kip.up()
        archive(proc)
    held = kip.json("top")["cache"]
    assert held["limit_bytes"] == 200 * MIB and held["bytes"] == sum(-(-p.stat().st_size // 4096) * 4096 for p in files(kip))
    # Everything gone, what was fetched is here the next time.
    for path in files(kip):
        path.unlink()
    kip.kill()
    kip.up()
    proxy.quiet()
    whole(client)
    first = fetched(proc)
    came = len(reads(proxy.quiet()))
    assert 0 <= first["requests"] - came <= asked_twice(kip) and came > 0 == first["cache_bytes"], (first, came)
    kip.kill()
    kip.up()
    archive(proc)
    whole(client)
    again = fetched(proc)
    print(f"20 MB of redis: {first['store_bytes']} bytes by {first['requests']} requests, then {again['store_bytes']} by {again['requests']}")
    # But for pages that came with its front then, and do not now.
    assert again["store_bytes"] < first["store_bytes"] and again["store_bytes"] < again["cache_bytes"], (first, again)
    # None at all.
    kip.cli("down", "--all")
    kip = fresh_kip("--store", url, "--cache", "0")
    proc, client = redis(kip)
    archive(proc)
    whole(client)
    came = fetched(proc)
    assert came["requests"] and not came["cache_bytes"] and not (kip.data / "cache").exists(), came


# promise archive: its front is read once for that: all of it is authenticated before the head is
#   touched, and sockets, files and the wake have it from the local cache
def test_a_front_is_read_once_by_whoever_takes_over(bucket: tuple[str, Proxy], fresh_kip: Callable[..., Kip]) -> None:
    """All of it, before the head is touched: sockets, files and the wake have it from the cache."""
    url, proxy = bucket
    here = fresh_kip("--store", url)
    there = fresh_kip("--store", url, start=False)
    (there.data / "archive").mkdir(parents=True)
    shutil.copy(here.data / "archive" / "default.keys", there.data / "archive" / "default.keys")
    there.up()
    proc, client = redis(here)
    proc.exec("sh", "-c", "echo mine > /srv/mine")
    client.close()
    archive(proc)
    proxy.quiet()
    there.cli("wake", "redis")
    new = Proc(there, "redis")
    fronts = [row for row in proxy.quiet() if "GET" in row.kind and "/gen-" in row.key]
    assert len(fronts) == 1 and fronts[0].whole, fronts
    client = Redis(new.port())
    assert client.ask("GET", "key:5") == value(5) and new.exec("cat", "/srv/mine").stdout == "mine\n"
    client.close()


# promise archive: what is damaged, cut or gone there comes from the store; a cache that cannot be
#   written, a full disk, a directory that is taken away: a line, and it goes on without
# held by: this, `tests/test_cache.py::test_without_room_or_a_directory_it_goes_on`,
#   `tests/test_cache.py::test_a_full_disk_has_no_room_for_it`,
#   `kip_offload::cache::tests::what_cannot_be_read_or_opened_is_dropped`
def test_what_is_damaged_here_comes_from_the_store(bucket: tuple[str, Proxy], fresh_kip: Callable[..., Kip]) -> None:
    """A flipped bit, which is told, a file that is cut, one that is gone: the proc has all that it had."""
    kip = fresh_kip("--store", bucket[0], "--cache", "200M")
    kip.expected += [TOLD]
    proc, client = redis(kip)

    def flip(path: Path) -> None:
        bytes_ = bytearray(path.read_bytes())
        bytes_[len(bytes_) // 2] ^= 4
        path.write_bytes(bytes_)

    for spoil in (flip, lambda path: os.truncate(path, path.stat().st_size // 2), Path.unlink):
        archive(proc)
        before, fronts = told(kip, "the cache"), [path for path in files(kip) if ".gen-" in path.name]
        assert len(fronts) == 1 and len(files(kip)) > 3, "the newest front, and packs"
        for path in files(kip):
            spoil(path)
        whole(client)
        came = fetched(proc)
        assert came["requests"], came
        assert spoil is not flip or told(kip, "the cache had of it was damaged") > before
    assert not [e for e in kip.events() if e["kind"] == "cold-start"]


def test_without_room_or_a_directory_it_goes_on(bucket: tuple[str, Proxy], fresh_kip: Callable[..., Kip]) -> None:
    """The directory is taken away, and replaced by what is none: a line each, and everything works as without a cache."""
    kip = fresh_kip("--store", bucket[0], "--cache", "200M")
    kip.expected += [TOLD]
    proc, client = redis(kip)
    archive(proc)
    shutil.rmtree(kip.data / "cache")
    whole(client)
    assert fetched(proc)["requests"] and told(kip, "the cache") <= 2
    archive(proc)
    assert files(kip), "it begins anew"
    shutil.rmtree(kip.data / "cache")
    (kip.data / "cache").write_text("in the way")
    before = told(kip, "the cache")
    for _ in range(2):
        whole(client)
        assert fetched(proc)["requests"]
        archive(proc)
    assert told(kip, "the cache cannot be used") >= 1 and told(kip, "the cache") - before <= 2
    kip.kill()
    kip.up()
    whole(client)
    (kip.data / "cache").unlink()


def test_a_full_disk_has_no_room_for_it(
    disk: Disk, fresh_kip: Callable[..., Kip], bucket: tuple[str, Proxy]  # noqa: F811
) -> None:
    """Others need the last of the disk more: nothing is kept, which is told once; what sleeps and wakes does so."""
    kip = fresh_kip("--store", bucket[0], "--cache", "50M", data=disk.path / "data")
    kip.expected += [TOLD]
    proc, client = redis(kip)
    found = os.statvfs(disk.path)
    disk.fill(min(60 * MIB, found.f_bavail * found.f_frsize - MIB))
    for _ in range(2):
        archive(proc)
        whole(client)
        assert fetched(proc)["requests"]
    assert told(kip, "the cache cannot be used.*no storage space") == 1
    disk.free()


# promise archive: it keeps to its limit, least recently used first; fronts of the removed, what
#   this directory collects and all when a key is destroyed go from it
# held by: this, `tests/test_cache.py::test_what_is_over_goes`,
#   `kip_offload::cache::tests::what_was_unused_the_longest_goes_first`
def test_it_keeps_to_its_limit(bucket: tuple[str, Proxy], fresh_kip: Callable[..., Kip]) -> None:
    """With two procs of which one alone is more than that."""
    kip = fresh_kip("--store", bucket[0], "--cache", "12M")
    taken = lambda: sum(path.stat().st_blocks * 512 for path in files(kip))  # noqa: E731
    proc, client = redis(kip)
    other, other_client = redis(kip, "other")
    for _ in range(2):
        for one in (proc, other):
            archive(one)
            assert taken() <= 12 * MIB
        whole(client)
        whole(other_client)
        assert 0 < fetched(proc)["store_bytes"] and taken() <= 12 * MIB


def test_what_is_over_goes(bucket: tuple[str, Proxy], fresh_kip: Callable[..., Kip]) -> None:
    """Fronts of the removed, what was collected, and what a destroyed key may have sealed."""
    kip = fresh_kip("--store", bucket[0], "--cache", "200M")
    proc, client = redis(kip)
    archive(proc)
    whole(client)
    fronts = lambda: [path for path in files(kip) if ".gen-" in path.name]  # noqa: E731
    assert len(fronts()) == 1
    kip.cli("rm", "--force", "redis")
    assert not fronts() and files(kip)
    kip.cli("snapshot", "gc", "--grace", "0s")
    kip.cli("snapshot", "gc", "--grace", "0s")
    assert not files(kip), "its packs were collected"
    proc, client = redis(kip)
    archive(proc)
    whole(client)
    old = next(key["id"] for key in kip.json("key", "ls") if key["current"])
    kip.cli("key", "rotate")
    assert files(kip)
    kip.cli("key", "destroy", old, "--yes")
    assert not files(kip)
    # What had not come from the store yet was sealed by that key as well: once the program needs
    # some of it, it ends.
    kip.expected += [r"its snapshot cannot be used"]


class Reader:
    """Woken from the store without a cache, with little of its memory."""

    def __init__(self, kip: Kip, tmp_path: Path, proxy: Proxy):
        server = servers.reader(PAGES)
        self.proc = kip.run("reader", server.command, ports=server.published, tar=server.tarball(tmp_path))
        self.lines, self.proxy = Lines(self.proc.port()), proxy
        for _ in range(2):
            self.proc.sleep()
            self.read(1, 0, 0)

    def read(self, threads: int, first: int, count: int, skip: int = 1, seed: int = 0) -> None:
        answer = self.lines.ask(f"read {threads} {first} {count} {skip} {seed}")
        assert answer == "wrong 0", answer

    def woken(self, *order: int) -> tuple[int, int, list[Request], dict[str, Any]]:
        """Archived and woken, then told to read: requests for that and their bytes, and what `kip inspect` says of all."""
        archive(self.proc)
        self.read(1, 0, 0)
        # What is under way is counted by the one before the other: the line first, on which nothing
        # is under way then.
        self.proxy.quiet()
        before, twice = fetched(self.proc), asked_twice(self.proc.kip)
        self.read(*order)
        rows = reads(self.proxy.quiet())
        down = sum(row.down for row in rows)
        # What the line has delivered Kip has yet to read, but for an answer that came too late: Kip
        # has asked again, and hangs up.
        again = lambda: asked_twice(self.proc.kip) - twice  # noqa: E731
        counted = lambda: fetched(self.proc)["store_bytes"] - before["store_bytes"] >= down or again()  # noqa: E731
        wait_for("Kip has counted all that came", counted, 10)
        came = fetched(self.proc)
        requests, bytes_ = (came[of] - before[of] for of in ("requests", "store_bytes"))
        assert 0 <= requests - len(rows) <= again(), "it says what there was"
        assert bytes_ == down or again() and bytes_ < down, "it says what there was"
        return requests, bytes_, rows, came


# promise archive: reading ahead by what it is worth: who reads 32 MB one page behind the other asks
#   80 times at most (it has 256 blocks) and gets 1.6 times that at most, who reads pages anywhere
#   gets 1.8 times their blocks at most; faults of several threads are served at once
# held by: this,
#   `kip_offload::ahead::tests::what_was_of_no_use_is_given_up_and_for_the_next_wake_too`
@pytest.mark.measures
def test_reading_ahead_pays(bucket: tuple[str, Proxy], fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """A program that reads through much waits for few requests; one that reads here and there gets little that it does not
    need, also if reading ahead was of use before; faults of several threads are served at once."""
    url, proxy = bucket
    kip = fresh_kip("--store", url, "--cache", "0")
    reader = Reader(kip, tmp_path, proxy)
    through = PAGES // 2
    for turn in range(2):
        requests, bytes_, _, came = reader.woken(1, 1000 + turn, through)
        ideal = through * 4096
        print(f"{through} pages one behind the other: {requests} requests, {bytes_ / ideal:.2f} times their bytes, {came}")
        assert requests <= 80 and bytes_ <= 1.6 * ideal, (requests, bytes_)
    dice = 11
    pages = 40
    for turn in range(2):
        requests, bytes_, _, came = reader.woken(1, 0, pages, 1, dice + 1000 * turn)
        print(f"{pages} pages anywhere: {requests} requests, {bytes_ / (pages * BLOCK):.2f} times the bytes of their blocks, {came}")
        assert bytes_ <= 1.8 * pages * BLOCK, bytes_
    requests, bytes_, rows, _ = reader.woken(8, 0, 10, 1, 77)
    at_once = max(sum(other.began_ns <= row.began_ns < other.ended_ns for other in rows) for row in rows)
    print(f"8 threads, 10 pages each, anywhere: {requests} requests, up to {at_once} at once, {bytes_ / (80 * BLOCK):.2f} times the bytes")
    assert at_once >= 4 and bytes_ <= 1.8 * 80 * BLOCK, (at_once, bytes_)
    reader.lines.close()


def test_what_is_needed_all_over_comes_whole(bucket: tuple[str, Proxy], fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """A program that needs so much, anywhere, that all of its memory comes sooner than the pieces one by one: that is found out while it waits,
    known at the next wake, and forgotten once it needs little."""
    url, proxy = bucket
    kip = fresh_kip("--store", url, "--cache", "0")
    reader = Reader(kip, tmp_path, proxy)
    image, pages = PAGES * 4096, 400
    archive(reader.proc)
    reader.read(1, 0, pages, 1, 5)
    came = fetched(reader.proc)
    print(f"{pages} pages anywhere: {came['requests']} requests, {came['store_bytes'] / image:.2f} times the image")
    assert image * 0.9 <= came["store_bytes"] <= image * 1.1 and came["requests"] <= 240, came
    # Nothing is waited for any more once all is here, and all comes behind the next wake, whatever
    # is asked then. Other pages than before: those would come with the front.
    before = pages
    for needed in (pages, 3, 3):
        archive(reader.proc)
        reader.read(1, 0, needed, 1, 100_000)
        came = fetched(reader.proc)
        print(f"{needed} pages after it: {came['requests']} requests, {came['store_bytes'] / image:.2f} times the image")
        if needed == 3 == before:
            assert came["store_bytes"] <= image * 0.3, came
        else:
            assert image * 0.9 <= came["store_bytes"] <= image * 1.1 and came["requests"] <= 80, came
        before = needed
    reader.lines.close()
