"""Files from and to procs: `kip cp` and its routes, in every tier, without a wake."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.clients import Lines, free_port
from harness.kip import Kip, Proc
from harness.programs import SOURCES
from harness.wait import wait_for

TIERS = ["hot", "hibernated", "parked", "stopped"]


@pytest.fixture(autouse=True)
def nothing_left(kip: Kip) -> Iterator[None]:
    yield
    kip.remove_all()
    for view in kip.json("volume", "ls"):
        kip.cli("volume", "rm", view["name"])


def sent_to(proc: Proc, tier: str) -> None:
    {"hot": lambda: None, "hibernated": proc.hibernate, "parked": proc.sleep, "stopped": proc.stop}[tier]()


def state_of(tier: str) -> str:
    return "running" if tier == "hot" else tier


def lines(kip: Kip, name: str, *flags: str) -> Proc:
    program = f"{SOURCES / 'lines.py'}:/opt/lines.py:ro"
    command = ["/usr/bin/python3", "/opt/lines.py", "8080"]
    return kip.run(name, command, ports=["8080"], flags=["-v", program, *flags])


def ask(proc: Proc, expression: str) -> str:
    client = Lines(proc.port())
    answer = client.ask(expression)
    client.close()
    return answer


def make_tree(where: Path) -> Path:
    tree = where / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "file").write_text("contents\n")
    (tree / "file").chmod(0o4750)
    os.utime(tree / "file", (1_000_000_000, 1_000_000_000))
    (tree / "below" / "link").symlink_to("../file")
    (tree / "second").hardlink_to(tree / "file")
    os.utime(tree / "below", (1_100_000_000, 1_100_000_000))
    return tree


# promise K14: `kip cp` both ways, in every tier and with the proc stopped, wakes no proc; modes,
#   times and links stay; what comes in is root's inside; a parked proc wakes natively afterwards
#   and sees it
# held by: this, `kip_files::unpack::tests::docker_s_rules_for_the_destination`,
#   `kip_files::unpack::tests::what_is_packed_is_unpacked_as_it_was`
@pytest.mark.parametrize("tier", TIERS)
def test_both_ways_in_every_tier(kip: Kip, tmp_path: Path, tier: str) -> None:
    proc = lines(kip, "copied", "-v", "kept:/kept")
    proc.exec("sh", "-c", "mkdir -p /srv/out; echo out >/srv/out/a; chown 7:7 /srv/out/a; echo kept >/kept/b; ln -s /srv/out /srv/way")
    assert ask(proc, "1 + 1") == "2"
    tree = make_tree(tmp_path)
    sent_to(proc, tier)
    wakes = proc.inspect()["wakes"]
    # In: into a directory, under a new name, to /usr, by a link, into a volume.
    for to in ("/srv", "/srv/named", "/usr/local", "/srv/way", "/kept"):
        kip.cli("cp", tree, f"copied:{to}")
    kip.cli("cp", f"{tree}/file", "copied:/etc/new")
    kip.cli("cp", f"{tree}/.", "copied:/srv/contents")
    # Out.
    for path in ("/srv/out", "/kept/b", "/srv/named", "/usr/bin/env"):
        kip.cli("cp", f"copied:{path}", tmp_path)
    kip.cli("cp", "copied:/usr/local/tree", tmp_path / "fresh")
    assert (tmp_path / "out" / "a").read_text() == "out\n" and (tmp_path / "b").read_text() == "kept\n"
    assert (tmp_path / "env").read_bytes() == Path("/usr/bin/env").read_bytes()
    for copy in (tmp_path / "named", tmp_path / "fresh"):
        stat = (copy / "file").stat()
        assert (stat.st_mode & 0o7777, stat.st_mtime, stat.st_nlink, stat.st_uid) == (0o750, 1_000_000_000, 2, 0)
        assert os.readlink(copy / "below" / "link") == "../file"
        assert (copy / "below").stat().st_mtime == 1_100_000_000
    view = proc.inspect()
    assert (view["state"], view["wakes"]) == (state_of(tier), wakes), "it was not woken"
    if tier == "stopped":
        proc.start()
    elif tier == "parked":
        assert ask(proc, "open('/srv/tree/file').read()") == repr("contents\n")
        assert proc.quiescent()["state"] == "running" and proc.rebuilt()
    paths = "/srv/tree/file /srv/named/second /usr/local/tree/file /srv/out/tree/file /kept/tree/file /etc/new /srv/contents/file"
    seen = proc.exec("sh", "-c", f"stat -c '%u %g %a %Y' {paths}; cat /srv/tree/below/link /kept/b; stat -c %u /srv/out/a").stdout
    assert seen == "0 0 750 1000000000\n" * 7 + "contents\nkept\n7\n"


# promise K14: `kip cp` with `-` and the routes of the API carry tar archives; a destination is what
#   docker takes it for; every refusal is one line that says what is not there
def test_archives_and_refusals(kip: Kip, tmp_path: Path) -> None:
    proc = kip.run("app", ["sleep", "1000"])
    proc.exec("sh", "-c", "mkdir -p /srv/d; echo one >/srv/d/one; ln -s one /srv/d/link; mkfifo /srv/pipe; mkdir -p /srv/deep; ln -s / /srv/deep/top")
    proc.sleep()
    program = [str(kip.program), "--data", str(kip.data)]
    out = subprocess.run([*program, "cp", "app:/srv/d", "-"], check=True, capture_output=True, timeout=60).stdout
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        assert archive.getnames() == ["d", "d/link", "d/one"] and archive.getmember("d/one").uid == 0
    subprocess.run([*program, "cp", "-", "app:/srv/deep"], check=True, input=out, capture_output=True, timeout=60)
    assert kip.json("cp", "app:/srv/deep/d/one", tmp_path / "renamed") == {"bytes": 4, "entries": 1}
    assert (tmp_path / "renamed").read_text() == "one\n"
    kip.cli("cp", "app:/srv/d/link", tmp_path)
    assert os.readlink(tmp_path / "link") == "one"
    kip.cli("cp", "-L", "app:/srv/d/link", tmp_path / "followed")
    assert (tmp_path / "followed").read_text() == "one\n"
    for words, line in [
        (("app:/srv/none", tmp_path), "app: there is no /srv/none"),
        (("app:/srv/pipe", tmp_path), "/srv/pipe is not a file on a disk"),
        (("app:/srv/d/one/x", tmp_path), "is not a directory"),
        (("app:/proc/1/environ", tmp_path), "is not a file on a disk"),
        ((tmp_path / "renamed", "app:/none/x"), "app: there is no /none/x"),
        ((tmp_path / "renamed", "app:/srv/none/"), "app: there is no /srv/none/"),
        ((tmp_path, "app:/srv/d/one"), "a directory is not copied onto it"),
        ((tmp_path / "renamed", "app:/srv/pipe"), "takes the place of a pipe"),
        ((tmp_path / "nothing", "app:/srv"), "there is no"),
        (("apq:/srv", tmp_path), "did you mean app?"),
        (("app:/srv", "app:/tmp"), "not between two"),
        ((tmp_path, tmp_path / "x"), "neither is in a proc"),
        (("app:", tmp_path), "no path"),
    ]:
        assert line in kip.refused("cp", *map(str, words)), words
    assert proc.state == "parked" and proc.inspect()["wakes"] == 0
    # What climbs out arrives inside, and nothing of the host is read.
    kip.cli("cp", tmp_path / "renamed", "app:/srv/deep/top/../../etc/inside")
    assert not Path("/etc/inside").exists()
    kip.cli("cp", "app:/srv/deep/top/etc/hostname", tmp_path / "name")
    assert (tmp_path / "name").read_text() == "app\n"
    assert proc.exec("cat", "/etc/inside").stdout == "one\n"


# promise K14: `kip cp` does not replace a file that a parked program has open or mapped: it says
#   so, and the proc wakes as it was
def test_open_files_of_a_sleeper_stay(kip: Kip, tmp_path: Path) -> None:
    proc = lines(kip, "opens", "-v", "kept:/kept")
    assert ask(proc, "globals().update(f=open('/srv/data', 'w+'), g=open('/kept/data', 'w+'))") == "None"
    ask(proc, "(f.write('mine'), f.flush(), g.write('mine'), g.flush())")
    new = tmp_path / "data"
    new.write_text("replaced, and longer")
    proc.sleep()
    for path in ("/srv/data", "/kept/data", "/usr/bin/python3", "/opt/lines.py"):
        target = os.path.realpath(path) if path.startswith("/usr") else path
        line = kip.refused("cp", str(new), f"opens:{target}")
        assert "wake it first" in line or "a mount" in line, line
    kip.cli("cp", new, "opens:/srv/beside")
    assert proc.state == "parked"
    assert ask(proc, "(f.seek(0), f.read(), g.seek(0), g.read(), open('/srv/beside').read())") == repr((0, "mine", 0, "mine", "replaced, and longer"))
    assert proc.quiescent() and proc.rebuilt()
    # Awake its open file stays what it is, and the name is another's.
    kip.cli("cp", new, "opens:/srv/data")
    assert ask(proc, "(f.seek(0), f.read(), open('/srv/data').read())") == repr((0, "mine", "replaced, and longer"))


# promise K14: `kip cp` keeps a proc's limit of disk space, asleep and awake, and says that there is
#   no space; an archived proc's files are to be woken first
def test_limits(kip: Kip, tmp_path: Path) -> None:
    proc = kip.run("small", ["sleep", "1000"], flags=["--disk", "64m"])
    big = tmp_path / "big"
    big.write_bytes(os.urandom(80 << 20))
    for tier in ("hot", "parked"):
        if tier == "parked":
            proc.sleep()
        assert "No space left" in kip.refused("cp", str(big), "small:/srv/big"), tier
        assert proc.state == state_of(tier)
    kip.cli("cp", f"{tmp_path}/.", "small:/tmp/none", check=False)
    proc.archive()
    for words in (["small:/etc/hostname", str(tmp_path)], [str(big), "small:/srv"]):
        assert "wake it first" in kip.refused("cp", *words)
    assert proc.state == "archived"
    proc.wake()
    assert ".kip-cp" not in proc.exec("ls", "-a", "/srv").stdout


# promise K14: a token that may only look reads and writes no file
def test_a_token_that_may_only_look(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    port = free_port()
    kip = fresh_kip("--listen", f"127.0.0.1:{port}", "--listen-plain")
    kip.run("kept", ["sleep", "1000"])
    (tmp_path / "in.tar").write_bytes(b"")
    codes = {}
    for scope in ("read", "write"):
        token = kip.json("token", "create", scope, "--scope", scope)["token"]
        for name, words in {"get": [], "put": ["-T", str(tmp_path / "in.tar")]}.items():
            url = f"http://127.0.0.1:{port}/v1/procs/kept/files?path=/etc"
            curl = ["curl", "--silent", "-o", "/dev/null", "-w", "%{http_code}", "-H", f"Authorization: Bearer {token}", *words, url]
            codes[scope, name] = subprocess.run(curl, check=True, capture_output=True, text=True, timeout=60).stdout
    assert codes["read", "get"] == codes["read", "put"] == "403", codes
    assert codes["write", "get"] == "200" and codes["write", "put"] == "400", codes


# promise K14: `GET` and `PUT /v1/procs/NAME/files` carry archives on the API's socket
def test_routes(kip: Kip, tmp_path: Path) -> None:
    proc = kip.run("routed", ["sleep", "1000"])
    proc.sleep()
    with tarfile.open(tmp_path / "in.tar", "w") as archive:
        entry = tarfile.TarInfo("a b")
        entry.size = 5
        archive.addfile(entry, io.BytesIO(b"hello"))
    api = ["curl", "--silent", "--show-error", "--unix-socket", str(kip.data / "run" / "api.sock")]
    path = "http://kip/v1/procs/routed/files?path="
    put = subprocess.run([*api, "-T", tmp_path / "in.tar", path + "/srv"], check=True, capture_output=True, text=True, timeout=60)
    assert json.loads(put.stdout) == {"bytes": 5, "entries": 1}
    got = subprocess.run([*api, path + urllib.parse.quote("/srv/a b")], check=True, capture_output=True, timeout=60).stdout
    with tarfile.open(fileobj=io.BytesIO(got)) as archive:
        read = archive.extractfile("a b")
        assert read is not None and read.read() == b"hello"
    refused = subprocess.run([*api, "-w", "%{http_code}", path + "/none"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert "there is no /none" in refused and refused.endswith("404")
    # A device, and a name that climbs.
    for name, kind in [("../up", tarfile.REGTYPE), ("dev", tarfile.CHRTYPE)]:
        with tarfile.open(tmp_path / "bad.tar", "w") as archive:
            entry = tarfile.TarInfo(name)
            entry.type = kind
            archive.addfile(entry)
        bad = subprocess.run([*api, "-T", tmp_path / "bad.tar", path + "/srv"], check=True, capture_output=True, text=True, timeout=60)
        assert json.loads(bad.stdout)["code"] == "invalid", bad.stdout
    assert proc.state == "parked"


# promise K14: a client of `kip cp` that takes nothing holds up no wake, end or start: what it reads
#   of a sleeper is kept for it, and what it reads of a program that ends breaks off
@pytest.mark.parametrize("tier", ["hot", "parked", "stopped"])
def test_a_client_that_takes_nothing(kip: Kip, tier: str) -> None:
    proc = lines(kip, "held")
    ask(proc, "open('/srv/big', 'wb').write(bytes(64 << 20))")
    sent_to(proc, tier)
    client = subprocess.Popen([kip.program, "--data", kip.data, "cp", "held:/srv", "-"], stdout=subprocess.PIPE)
    assert client.stdout and client.stdout.read(512)
    began = time.monotonic()
    if tier != "stopped":
        assert ask(proc, "1 + 1") == "2"
        proc.stop()
    proc.start()
    assert time.monotonic() - began < 30
    wait_for("it listens", lambda: ":1F90 " in proc.exec("cat", "/proc/net/tcp").stdout, 20)
    assert ask(proc, "2 + 2") == "4"
    rest = client.stdout.read()
    assert (client.wait(), len(rest) > 64 << 20) == ((1, False) if tier == "hot" else (0, True))
