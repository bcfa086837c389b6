"""Images from layouts and from `docker save`, into procs that run on nothing but their files, sleep in every tier and wake; shared
layers, what goes and what stays; what is refused, each with one line. Registries are in `test_registry.py`."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import images, logged
from harness.clients import Redis, http_get, listens
from harness.images import Image, archive, digest, entry, layers_here, layout, link, nothing_half, run, saved, tar_of
from harness.kip import Kip, Proc
from harness.wait import wait_for

ESCAPED = Path("/tmp/kip-test-escaped-image")


@pytest.fixture
def kip(kip: Kip) -> Iterator[Kip]:
    """The module's daemon; images go after each test as procs do."""
    yield kip
    kip.remove_all()
    # One that was answered with an error may be at its last cleaning.
    wait_for("all images are gone", lambda: kip.cli("image", "gc", "--all", check=False).returncode == 0)


@pytest.fixture(scope="module")
def tools() -> bytes:
    return images.tools()


@pytest.fixture(scope="module")
def web() -> Image:
    return images.web()


@pytest.fixture
def here(fresh_kip: Callable[..., Kip], tmp_path: Path, web: Image) -> tuple[Kip, str]:
    """A daemon of the test's own, and the image in a layout."""
    return fresh_kip(), f"oci:{layout(tmp_path / 'web', one=web)}:one"


def two(fresh_kip: Callable[..., Kip], tmp_path: Path, *flags: str) -> tuple[Kip, Kip]:
    """A daemon, and one with the same store and keys that is not up yet."""
    (tmp_path / "store").mkdir()
    flags = ("--store", str(tmp_path / "store"), *flags)
    here, there = fresh_kip(*flags), fresh_kip(*flags, start=False)
    (there.data / "archive").mkdir(parents=True)
    (there.data / "archive/default.keys").write_bytes((here.data / "archive/default.keys").read_bytes())
    return here, there


# Running.


# promise P1: a proc runs from an OCI image and nothing of the host's files: program, arguments,
#   environment, user and groups, directory, ports, stop signal as the image says, the owner's word
#   first
# held by: this, `tests/test_images.py::test_the_owner_s_word_goes_first`,
#   `tests/test_images.py::test_stop_sends_the_image_s_signal`,
#   `tests/test_images.py::test_what_cannot_run_says_why`,
#   `kip_worker::images::tests::the_owner_s_word_goes_before_the_image_s`
def test_a_program_runs_as_its_image_says(kip: Kip, tmp_path: Path, web: Image) -> None:
    """Program, arguments, environment, user with its groups, directory, exposed ports; and of the host nothing."""
    source = f"oci:{layout(tmp_path / 'web', one=web)}:one"
    shown = kip.json("image", "load", source, "--name", "web:1")
    assert (shown["reference"], len(shown["layers"])) == ("docker.io/library/web:1", 3)
    proc = run(kip, "web", "web:1", "-P", ready=True)
    assert http_get(proc.port(8080)) == b"first\n"
    assert len(proc.inspect()["ports"]) == 1, "of what it exposes what can be forwarded"
    assert proc.exec("id").stdout == "uid=33(web) gid=34(web) groups=40(log)\n"
    assert proc.exec("pwd").stdout == "/srv\n" and proc.exec("sh", "-c", "echo $COLOUR $HOME").stdout == "red /srv\n"
    assert proc.exec("cat", "/proc/1/../2/cmdline").stdout == "/bin/busybox\0httpd\0-f\0-v\0-p\08080\0-h\0/srv\0"
    for path in ("/usr/bin", "/bin/bash", "/etc/os-release", "/var/lib/dpkg", "/opt", "/lib"):
        assert proc.exec("stat", path, check=False).returncode, f"{path} is the host's"
    assert proc.exec("sh", "-c", "echo x > /dev/stdout; echo y > /dev/null; cat /etc/resolv.conf").stdout.startswith("x\n")
    assert proc.exec("sh", "-c", "echo x > /srv/index.html", check=False).returncode, "root's file"
    assert "web" in proc.exec("cat", "/etc/hostname").stdout and proc.exec("stat", "-c", "%a", "/tmp").stdout == "1777\n"
    wait_for("its output", lambda: "response:200" in proc.logs())
    spec = proc.inspect()["spec"]
    assert spec["image"]["oci"]["digest"] == shown["digest"] and spec["image"]["oci"]["layers"] == shown["layers"]
    kip.cli("rm", "web", "--force")


# promise P1: layers lie over each other as their builder meant: deletions, closed directories,
#   owners, modes, links, up to 127 of them
# held by: this, `tests/test_images.py::test_directories_that_a_layer_only_implies_are_as_below`,
#   `tests/test_images.py::test_as_many_layers_as_builders_make`,
#   `crates/sandbox/tests/layers.rs::deletions_become_overlayfs_s`,
#   `kip_image::parents::tests::directories_keep_what_lower_layers_say_of_them`
def test_layers_lie_over_each_other(kip: Kip, tmp_path: Path, web: Image) -> None:
    """Deletions, directories that are closed, owners, modes and hard links; across /usr as well."""
    proc = run(kip, "web", f"oci:{layout(tmp_path / 'web', one=web)}", "--user", "0", command=("-f", "-p", "80"))
    names = proc.exec("ls", "/srv", "/srv/closed", "/usr/share").stdout.split()
    assert "gone" not in names and "hidden" not in names and "deleted" not in names, names
    assert {"shown", "low", "high"} <= set(names), names
    assert proc.exec("stat", "-c", "%u %g %a", "/srv").stdout == "33 34 755\n"
    assert proc.exec("stat", "-c", "%u %g %a %h", "/srv/file").stdout == "33 40 640 2\n"
    assert proc.exec("stat", "-c", "%u %a", "/srv/set").stdout == "0 4755\n"
    assert proc.exec("cat", "/srv/soft").stdout == "above\n"
    assert proc.exec("stat", "/dev/sda", check=False).returncode
    # Its own layer takes what it writes, and what it deletes; another proc of the image sees none
    # of it.
    proc.exec("sh", "-c", "rm /srv/file; echo new > /usr/share/low; touch /usr/share/own")
    other = run(kip, "other", f"oci:{tmp_path / 'web'}", command=("-f", "-p", "80"))
    assert other.exec("cat", "/srv/hard", "/usr/share/low").stdout == "kept\nlow\n"
    assert proc.exec("cat", "/usr/share/low").stdout == "new\n"
    shown = kip.cli("image", "inspect", f"oci:{tmp_path / 'web'}").stdout
    assert "/dev/sda is a device node" in shown and "ordinary directory of the proc's own" in shown, shown


def test_the_owner_s_word_goes_first(kip: Kip, tmp_path: Path, web: Image) -> None:
    source = f"oci:{layout(tmp_path / 'web', one=web)}"
    flags = ["--user", "1000:log", "--workdir", "/tmp", "--env", "COLOUR=blue", "--entrypoint", "/bin/sh", "--port", "80"]
    proc = run(kip, "own", source, *flags, command=("-c", "id; pwd; echo $COLOUR $HOME; sleep 1000"))
    wait_for("its output", lambda: proc.logs().count("\n") == 3)
    assert proc.logs() == "uid=1000 gid=40(log)\n/tmp\nblue /root\n"
    assert [p["port"] for p in proc.inspect()["ports"]] == [80], "exposed ports are published only when asked"
    shell = run(kip, "shell", source, "--entrypoint", "", command=("/bin/sleep", "1000"))
    assert shell.exec("cat", "/proc/2/cmdline").stdout == "/bin/sleep\x001000\x00"


def test_what_cannot_run_says_why(kip: Kip, tmp_path: Path, tools: bytes) -> None:
    empty, strange = Image([tools]), Image([tools], {"Cmd": ["sleep", "9"], "User": "nobody-here"})
    path = layout(tmp_path / "l", empty=empty, strange=strange, signal=Image([tools], {"Cmd": ["x"], "StopSignal": "SIGX"}))

    def refused(*words: str) -> str:
        return kip.refused("run", "--name", "no", "--image", *words)

    assert "names no program" in refused(f"oci:{path}:empty")
    assert 'no user "nobody-here" in the proc\'s /etc/passwd' in refused(f"oci:{path}:strange")
    assert "id 70000" in refused(f"oci:{path}:strange", "--user", "70000")
    assert "SIGX" in refused(f"oci:{path}:signal")
    assert '"bash" is not in the proc\'s files' in refused(f"oci:{path}:empty", "--", "bash")
    assert "has no image other; it has empty, strange, signal" in refused(f"oci:{path}:other").replace(str(path), "")
    assert "without a tag" in refused(f"oci:{path}")
    assert "there is no image absent here" in refused("absent", "--pull", "never")
    assert kip.names() == []
    assert kip.cli("run", "--image", "a", "--tar", "b", check=False).returncode == 2
    assert kip.cli("run", check=False).returncode == 2


def test_stop_sends_the_image_s_signal(kip: Kip, tmp_path: Path, tools: bytes) -> None:
    def image(signal: str) -> Image:
        script = f"trap 'echo got {signal}; exit 7' {signal}; echo ready; while :; do sleep 0.1; done"
        return Image([tools], {"Entrypoint": ["/bin/sh", "-c", script], "StopSignal": f"SIG{signal}", "Env": ["PATH=/bin"]})

    layout(tmp_path / "l", quit=image("QUIT"), rtmin=image("RTMIN+3"))
    for tag, number in (("quit", 3), ("rtmin", 37)):
        proc = run(kip, tag, f"oci:{tmp_path / 'l'}:{tag}")
        wait_for("its trap", lambda proc=proc: "ready" in proc.logs())
        proc.stop()
        exit = proc.inspect()["exit"]
        # busybox knows no name for signals beyond the first 31.
        assert "got QUIT" in proc.logs() if number == 3 else str(number) in json.dumps(exit), (proc.logs(), exit)
    own = run(kip, "own", f"oci:{tmp_path / 'l'}:quit", "--stop-signal", "KILL")
    wait_for("its trap", lambda: "ready" in own.logs())
    own.stop()
    assert "got" not in own.logs()


def test_directories_that_a_layer_only_implies_are_as_below(kip: Kip, tmp_path: Path, tools: bytes) -> None:
    """It has files in them and no entry of their own: such a layer must not give /tmp to root alone."""
    below = archive([entry("srv", uid=33, gid=34, mode=0o750), entry("srv/deep", mode=0o2711), entry("srv/both", uid=33)])
    above = archive([entry("tmp/x", ""), entry("srv/deep/x", ""), entry("srv/both", uid=40), entry("new/x", "")])
    image = Image([tools, below, above], {"Cmd": ["sleep", "1000"], "Env": ["PATH=/bin"]})
    proc = run(kip, "in", f"oci:{layout(tmp_path / 'l', a=image)}")
    shown = proc.exec("stat", "-c", "%n %u %g %a", "/tmp", "/srv", "/srv/deep", "/srv/both", "/new").stdout
    wanted = ["/tmp 0 0 1777", "/srv 33 34 750", "/srv/deep 0 0 2711", "/srv/both 40 0 755", "/new 0 0 755"]
    assert shown.splitlines() == wanted
    layers = proc.inspect()["spec"]["image"]["oci"]["layers"]
    assert layers[:3] == [digest(layer) for layer in image.layers] and len(layers) == 4, "one of ours lies above"


def test_as_many_layers_as_builders_make(kip: Kip, tmp_path: Path, tools: bytes) -> None:
    """127, of which two are the same: it counts where it is topmost."""
    same = archive([entry("srv/turn", "again\n")])
    between = archive([entry("srv/.wh.turn", "")])

    def layer(n: int) -> bytes:
        files = [entry(f"srv/{n}", f"{n}\n"), entry("srv/last", f"{n}\n"), entry(f"usr/{n}", "")]
        return archive([entry("srv"), entry("usr"), *files])

    many = [layer(n) for n in range(123)]
    image = Image([tools, same, *many, between, same], {"Cmd": ["sleep", "1000"], "Env": ["PATH=/bin"]}, packing="plain")
    proc = run(kip, "many", f"oci:{layout(tmp_path / 'l', a=image)}")
    assert len(proc.inspect()["spec"]["image"]["oci"]["layers"]) == 127
    assert proc.exec("cat", "/srv/last", "/srv/0", "/srv/turn").stdout == "122\n0\nagain\n"
    assert len(proc.exec("ls", "/usr").stdout.split()) == 123
    proc.sleep()
    assert proc.exec("cat", "/srv/turn").stdout == "again\n"
    more = Image([archive([entry(f"{n}", "")]) for n in range(129)], {"Cmd": ["x"]}, packing="plain")
    assert "129 layers" in kip.refused("image", "load", f"oci:{layout(tmp_path / 'more', a=more)}")


# Sources.


@pytest.mark.parametrize("packing", ["plain", "gzip", "zstd"])
def test_every_source_gives_the_same_layers(kip: Kip, tmp_path: Path, web: Image, packing: str) -> None:
    image = Image(web.layers, web.config, packing=packing)
    arm = Image([archive([entry("arm", packing)])], {}, "arm64")
    directory = layout(tmp_path / "l", one=image, both=[arm, image])
    sources = [f"oci:{directory}:one", f"oci:{directory}:both", f"oci:{tar_of(directory, tmp_path / 'l.tar')}:one"]
    double = Image([*web.layers, web.layers[1]], web.config)
    sources.append(f"docker-archive:{saved(tmp_path / 's.tar', web=image, double=double)}:web:1")
    loaded = [kip.json("image", "load", source) for source in sources]
    assert all(one["layers"] == [digest(layer) for layer in web.layers] for one in loaded)
    assert len({one["id"] for one in loaded}) == 1, "one configuration"
    assert loaded[-1]["reference"] == "docker.io/library/web:1", "docker save has names"
    twice = kip.json("image", "load", f"docker-archive:{tmp_path / 's.tar'}:double:1")
    assert len(twice["layers"]) == 4 and len(layers_here(kip)) <= 4
    by_id = kip.json("image", "inspect", loaded[0]["id"].removeprefix("sha256:")[:8])
    assert by_id["id"] == loaded[0]["id"] and by_id["config"]["user"] == "web"
    for one in [*loaded, twice]:
        kip.cli("image", "rm", one["reference"])
    kip.cli("image", "gc")
    assert kip.json("image", "ls") == [] and layers_here(kip) == set()


# promise P1: what is not what its digest says, is for other machines, is not there, is not given to
#   this client, or has no room is refused with one line and a code for each of these
# held by: this, `tests/test_registry.py::test_what_a_registry_does_not_have`,
#   `tests/test_registry.py::test_no_room_on_the_disk`,
#   `tests/test_registry.py::test_codes_of_pulls_that_fail`,
#   `kip_worker::images::tests::each_trouble_with_an_image_has_its_code`
def test_what_is_no_image_is_refused(kip: Kip, tmp_path: Path, web: Image, tools: bytes) -> None:
    def refused(source: str) -> str:
        return kip.refused("image", "load", source)

    path = layout(tmp_path / "arm", a=[Image(web.layers, {}, "arm64"), Image(web.layers, {}, "riscv64")])
    assert "nothing for linux/amd64; it has linux/arm64, linux/riscv64" in refused(f"oci:{path}")
    alone = layout(tmp_path / "alone", a=Image(web.layers, {}, "arm64"))
    assert "nothing for linux/amd64; it has linux/arm64" in refused(f"oci:{alone}")
    assert "No such file" in refused(f"oci:{tmp_path / 'nowhere'}")
    (tmp_path / "empty").mkdir()
    assert "has no index.json" in refused(f"oci:{tmp_path / 'empty'}")
    (tmp_path / "text").write_text("no tar at all")
    assert refused(f"docker-archive:{tmp_path / 'text'}")
    subprocess.run(["gzip", "-k", str(saved(tmp_path / "s.tar", web=web))], check=True)
    assert "unpack it first" in refused(f"docker-archive:{tmp_path / 's.tar.gz'}")
    assert "kip image load" in kip.refused("image", "pull", f"oci:{path}")
    assert "kip image pull" in kip.refused("image", "load", "redis")
    # A blob that is another, a layer whose content is another, one that is cut short, one that ends
    # before its time.
    for what in ("blob", "content", "short", "config"):
        diff_ids = [digest(b"other")] if what == "content" else None
        image = Image([archive([entry(what, what * 500)])], {"Cmd": ["x"]}, diff_ids=diff_ids)
        directory = layout(tmp_path / what, a=image)
        victim = digest(image.configuration() if what == "config" else image.blobs()[0]).removeprefix("sha256:")
        file = directory / "blobs/sha256" / victim
        if what in ("blob", "config"):
            file.write_bytes(bytes([*file.read_bytes()[:-9], 0, 0, 0, 0, 0, 0, 0, 0, 0]))
        if what == "short":
            file.write_bytes(file.read_bytes()[:-20])
        text = refused(f"oci:{directory}")
        assert "damaged: it should be sha256:" in text, (what, text)
    assert layers_here(kip) == set()
    nothing_half(kip)


HOSTILE: dict[str, list[Any]] = {
    "has .. in its path": [entry("../../../../../../../tmp/kip-test-escaped-image", "x")],
    "hard link to something outside": [entry("x", "", type=tarfile.LNKTYPE, linkname="../../../../../etc/shadow")],
    "which is not there": [entry("x", "", type=tarfile.LNKTYPE, linkname="/etc/shadow")],
    "leads nowhere": [link("way", "/tmp/kip-no-such"), entry("way/x", "x")],
    "deletes what is no name": [entry("srv/.wh...", "")],
    "belongs to id 100000": [entry("x", "x", uid=100_000)],
    "must be a directory": [link("usr", "/")],
}


# promise P1: hostile layers write nothing outside and are refused whole, with the entry's name
# held by: this, `tests/test_images.py::test_absolute_names_and_links_stay_inside`,
#   `crates/sandbox/tests/layers.rs::nothing_leaves_the_layer`,
#   `crates/sandbox/tests/layers.rs::what_is_too_much_or_nobody_s_is_refused`
@pytest.mark.parametrize("words", HOSTILE)
def test_hostile_layers_are_refused_whole(kip: Kip, tmp_path: Path, words: str) -> None:
    image = Image([archive([entry("honest", "x"), *HOSTILE[words]])], {"Cmd": ["x"]})
    text = kip.refused("image", "load", f"oci:{layout(tmp_path / 'l', a=image)}")
    assert words in text and "layer sha256:" in text, text
    assert layers_here(kip) == set() and not ESCAPED.exists() and kip.json("image", "ls") == []
    nothing_half(kip)


def test_absolute_names_and_links_stay_inside(kip: Kip, tmp_path: Path, tools: bytes) -> None:
    """A layer sees its own root as /, as its programs will."""
    tricks = [entry("/tmp/kip-test-escaped-image", "inside\n")]
    tricks += [link("out", "/tmp"), entry("out/kip-test-through", "inside\n")]
    image = Image([tools, archive(tricks)], {"Cmd": ["sleep", "1000"], "Env": ["PATH=/bin"]})
    proc = run(kip, "in", f"oci:{layout(tmp_path / 'l', a=image)}")
    assert proc.exec("cat", "/tmp/kip-test-escaped-image", "/tmp/kip-test-through").stdout == "inside\n" * 2
    assert not ESCAPED.exists() and not Path("/tmp/kip-test-through").exists()


# Sleeping.


# promise P1: a proc of an image sleeps in every tier and wakes, natively and by CRIU, after a
#   reboot, and elsewhere where its layers are
# held by: this, `tests/test_images.py::test_criu_wakes_it_as_well`,
#   `tests/test_images.py::test_elsewhere_its_layers_must_be_there`,
#   `tests/test_images.py::test_a_volume_lies_in_an_image`
def test_redis_from_an_image_sleeps_in_every_tier(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """Hibernated, parked and woken natively, killed daemon, rebooted machine, archived: with its data, and on its layers only."""
    (tmp_path / "store").mkdir()
    kip = fresh_kip("--store", str(tmp_path / "store"))
    source = f"oci:{layout(tmp_path / 'redis', a=images.redis())}"
    proc = run(kip, "redis", source, "-P", ready=True)
    assert "volume" in kip.cli("image", "inspect", source).stdout
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", b"%d" % i * 100) for i in range(2000)])

    def check(client: Redis) -> None:
        assert client.ask_all([("GET", f"key:{i}") for i in range(2000)]) == [b"%d" % i * 100 for i in range(2000)]

    proc.hibernate()
    check(client)
    for _ in range(2):
        proc.sleep()
        check(client)
        assert proc.rebuilt(), "woken natively"
    # What a sleeper needs stays, whatever becomes of the name and of the source.
    proc.sleep()
    kip.cli("image", "rm", source)
    assert "redis" in kip.cli("image", "gc", "--all").stdout
    assert kip.json("image", "ls") == [] and len(layers_here(kip)) == 2
    kip.expected += logged.DAEMON_KILLED
    kip.kill()
    kip.up()
    check(client)
    proc.sleep()
    kip.reboot()
    check(Redis(proc.port()))
    proc.archive()
    check(Redis(proc.port()))
    proc.stop()
    proc.start()

    def pongs() -> bool:
        try:
            return Redis(proc.port()).ask("PING") == "PONG"
        except ConnectionRefusedError:
            return False

    wait_for("redis", pongs)
    proc.remove()
    assert "2 layers removed" in kip.cli("image", "gc").stdout
    assert layers_here(kip) == set()


# promise volumes: a new named volume gets the files of the image that it covers, with their owners,
#   and none of them again later; a fill that was cut short goes on
def test_a_new_volume_gets_what_it_covers(kip: Kip, tmp_path: Path, web: Image) -> None:
    """As other runtimes of images do it, whichever proc comes first; later the volume's files are its owner's affair."""
    source = f"oci:{layout(tmp_path / 'web', a=web)}"
    look = 'cd /srv && find . ! -name . | sort && stat -c "%n %u %g %a" . * && cat /usr/share/high'
    plain = run(kip, "plain", source, "-P", ready=True)
    plain.exec("sh", "-c", "rmdir /srv/data")  # which the image declares: no volume gets it
    before = plain.exec("sh", "-c", look).stdout
    assert len(before.splitlines()) > 3
    for name in ("first", "second"):
        one = run(kip, name, source, "-P", "-v", "pages:/srv", "-v", "shared:/usr/share", ready=True)
        assert one.exec("sh", "-c", look).stdout == before
        one.sleep()
        assert one.exec("sh", "-c", look).stdout == before
    assert {path.name for path in (kip.data / "volumes").iterdir()} == {"pages", "shared"}
    assert (kip.data / "volumes/pages").stat().st_uid == 33
    # What was deleted does not come back.
    (kip.data / "volumes/shared/mine").write_text("mine\n")
    (kip.data / "volumes/shared/high").unlink()
    third = run(kip, "third", source, "-P", "-v", "shared:/usr/share", ready=True)
    assert third.exec("cat", "/usr/share/high", check=False).returncode != 0
    # A fill that was cut short goes on where it was.
    begun = kip.data / "volumes/.filling-late"
    begun.mkdir()
    (begun / "copied").write_text("copied\n")
    late = run(kip, "late", source, "-P", "-v", "late:/srv", ready=True)
    assert late.exec("ls", "/srv").stdout == "copied\n" and not begun.exists()
    kip.remove_all()
    for name in ("pages", "shared", "late"):
        kip.cli("volume", "rm", name)


def test_a_volume_lies_in_an_image(kip: Kip, tmp_path: Path, web: Image) -> None:
    """Where the image declares one it is an ordinary directory, unless a volume is put there."""
    source = f"oci:{layout(tmp_path / 'web', a=web)}"
    proc = run(kip, "web", source, "-P", "--user", "0", "-v", "pages:/srv/data", ready=True)
    proc.exec("sh", "-c", "echo kept > /srv/data/page")
    proc.sleep()
    assert http_get(proc.port(8080), "/data/page") == b"kept\n"
    proc.remove()
    again = run(kip, "again", source, "-P", "--user", "0", "-v", "pages:/srv/data", ready=True)
    assert http_get(again.port(8080), "/data/page") == b"kept\n"
    again.remove()
    kip.cli("volume", "rm", "pages")


# promise P1: directories that an image declares as volumes are there and, unless a volume is put
#   there, the proc's own
# held by: this, `kip_worker::images::tests::directories_for_data_are_those_that_no_volume_covers`
def test_directories_that_an_image_wants_for_data(kip: Kip, tmp_path: Path, tools: bytes) -> None:
    """They are there, as the image has them or empty, and are the proc's own: nothing ties it to this machine, stops lose nothing."""
    some = archive([entry("there", uid=33, mode=0o700), entry("there/page", "x"), entry("usr"), entry("usr/share")])
    wanted = ["/there", "var/lib/deep/data", "/usr/data", "/kept", "/kept/below", "/proc/x"]
    config = {"Cmd": ["sleep", "1000"], "Env": ["PATH=/bin"], "Volumes": {path: {} for path in wanted}}
    source = f"oci:{layout(tmp_path / 'l', a=Image([tools, some], config))}"
    proc = run(kip, "in", source, "-v", "named:/kept")
    shown = proc.exec("stat", "-c", "%n %F %u %a", "/there", "/there/page", "/var/lib/deep/data", "/usr/data").stdout
    assert shown.splitlines() == [
        "/there directory 33 700", "/there/page regular file 0 755", "/var/lib/deep/data directory 0 755", "/usr/data directory 0 755"
    ]  # fmt: skip
    spec = proc.inspect()["spec"]
    assert sorted(spec["image"]["oci"]["volumes"]) == ["/there", "/usr/data", "/var/lib/deep/data"]
    assert [volume["name"] for volume in kip.json("volume", "ls")] == ["named"] and len(spec["volumes"]) == 1
    proc.exec("sh", "-c", "echo kept > /usr/data/page; rmdir /var/lib/deep/data")
    proc.sleep()
    proc.wake()
    proc.stop()
    proc.start()
    assert proc.exec("cat", "/usr/data/page").stdout == "kept\n"
    proc.exec("stat", "/var/lib/deep/data")
    proc.remove()
    kip.cli("volume", "rm", "named")
    free = run(kip, "free", source)
    assert "pinned_by" not in kip.json("why", "free"), "no volume was made unasked"
    free.remove()


def test_criu_wakes_it_as_well(fresh_kip: Callable[..., Kip], tmp_path: Path, web: Image) -> None:
    kip = fresh_kip("--only-criu")
    proc = run(kip, "web", f"oci:{layout(tmp_path / 'web', a=web)}", "-P", ready=True)
    for _ in range(2):
        proc.sleep()
        assert http_get(proc.port(8080)) == b"first\n"
        assert not proc.rebuilt()
    assert proc.exec("id").stdout.startswith("uid=33(web)")


# promise invariants: 10 so is Kip's init, which pid 1 has mapped: a proc of an image wakes with it
#   under another Kip, natively and by CRIU
@pytest.mark.parametrize("flags", [(), ("--only-criu",)], ids=["plan", "criu"])
def test_another_kip_wakes_it_with_the_init_that_it_had(
    fresh_kip: Callable[..., Kip], tmp_path: Path, web: Image, flags: tuple[str, ...]
) -> None:
    """Pid 1 has it mapped. When it starts anew it gets the other Kip's."""
    here, there = two(fresh_kip, tmp_path, *flags)
    init = next((here.data / "base").glob("image-*/.kip/init")).read_bytes()
    # A byte of the header's padding, which no program reads: elf(5).
    other = init[:12] + b"K" + init[13:]
    (tmp_path / "bin").mkdir()
    for program in (path for path in here.program.parent.glob("kip*") if os.access(path, os.X_OK) and path.is_file()):
        new = tmp_path / "bin" / program.name
        new.write_bytes(program.read_bytes().replace(init, other))
        new.chmod(0o755)
    there.program = tmp_path / "bin/kip"
    there.up()
    source = f"oci:{layout(tmp_path / 'web', a=web)}"
    run(here, "web", source, "-P", ready=True).archive()
    there.cli("image", "load", source)
    proc = Proc(there, "web")
    there.cli("wake", "web")
    for _ in range(2):
        assert http_get(proc.port(8080)) == b"first\n"
        assert proc.exec("cat", "/.kip/init", binary=True).stdout == init
        proc.sleep()
    proc.archive()
    assert http_get(proc.port(8080)) == b"first\n"
    assert proc.exec("cat", "/.kip/init", binary=True).stdout == init
    proc.stop()
    proc.start()
    assert proc.exec("cat", "/.kip/init", binary=True).stdout == other


def test_elsewhere_its_layers_must_be_there(fresh_kip: Callable[..., Kip], tmp_path: Path, web: Image) -> None:
    """Another data directory takes it over if it has the image's layers, by whatever name, and says what is missing if not."""
    here, there = two(fresh_kip, tmp_path)
    there.up()
    source = f"oci:{layout(tmp_path / 'web', a=web)}"
    here.cli("image", "load", source, "--name", "web:2")
    proc = run(here, "web", "web:2", "-P", ready=True)
    proc.exec("sh", "-c", "echo own > /srv/own; rm /srv/file")
    proc.archive()
    text = there.refused("wake", "web")
    assert "needs image docker.io/library/web:2 (sha256:" in text and "3 of its 3 layers are not here" in text, text
    assert there.names() == [], "nothing of it is here"
    base = Image(web.layers[:2], {"Cmd": ["x"]})
    there.cli("image", "load", f"oci:{layout(tmp_path / 'base', a=base)}")
    assert "1 of its 3 layers are not here" in there.refused("wake", "web")
    there.cli("image", "load", source, "--name", "another/name:9")
    assert "woke from archived" in there.cli("wake", "web").stdout
    new = Proc(there, "web")
    assert http_get(new.port(8080)) == b"first\n"
    assert new.exec("cat", "/srv/own", "/srv/hard").stdout == "own\nkept\n"
    assert new.exec("stat", "/srv/file", check=False).returncode and new.exec("id").stdout.startswith("uid=33(web)")
    new.sleep()
    assert http_get(new.port(8080)) == b"first\n"


def test_layers_that_are_gone_are_named(here: tuple[Kip, str]) -> None:
    """The user deleted a layer by hand: nothing is lost, and the refusal names the layer and what brings it back."""
    kip, source = here
    proc = run(kip, "web", source, "-P", ready=True)
    proc.sleep()
    victim = proc.inspect()["spec"]["image"]["oci"]["layers"][1].removeprefix("sha256:")
    away = kip.data / "images" / victim
    (kip.data / "images/layers" / victim).rename(away)
    kip.expected += [logged.SNAPSHOT_UNUSABLE, logged.NOT_NATIVE]
    kip.kill()
    kip.up()
    text = kip.refused("wake", "web")
    assert victim[:12] in text, text
    assert proc.state == "parked"
    away.rename(kip.data / "images/layers" / victim)
    assert http_get(proc.port(8080)) == b"first\n"


# promise P1: layers are shared by images and procs, stay as long as a proc in whatever tier needs
#   them, and are collected then
# held by: this, `tests/test_images.py::test_layers_that_are_gone_are_named`
def test_layers_are_shared_and_kept_as_long_as_needed(here: tuple[Kip, str], tmp_path: Path, web: Image) -> None:
    kip, source = here
    kip.cli("image", "load", source, "--name", "a:1")
    used = sum(1 for _ in (kip.data / "images/layers").iterdir())
    top = archive([entry("srv", uid=33, gid=34), entry("srv/index.html", "second\n", mode=0o644)])
    kip.cli("image", "load", f"oci:{layout(tmp_path / 'b', a=Image([*web.layers, top], web.config))}", "--name", "b:1")
    assert len(layers_here(kip)) == used + 1
    first, second = run(kip, "first", "a:1", "-P", ready=True), run(kip, "second", "b:1", "-P", ready=True)
    assert (http_get(first.port()), http_get(second.port())) == (b"first\n", b"second\n")
    assert {i["reference"]: i["procs"] for i in kip.json("image", "ls")} == {
        "docker.io/library/a:1": ["first"], "docker.io/library/b:1": ["second"],
    }  # fmt: skip
    first.stop()
    second.remove()
    assert kip.json("image", "gc", "--dry-run")["layers"] == []
    would = kip.json("image", "gc", "--all", "--dry-run")
    assert would["references"] == ["docker.io/library/b:1"] and would["layers"] == [digest(top)]
    assert len(layers_here(kip)) == 4
    removed = kip.json("image", "rm", "b:1")
    assert removed["layers"] == [digest(top)] and removed["kept_for"] == []
    assert "there is no image b:1 here" in kip.refused("image", "rm", "b:1")
    assert kip.json("image", "rm", "a:1")["kept_for"] == ["first"] and len(layers_here(kip)) == 3
    first.start()
    wait_for("it serves", lambda: listens(first.port()), 30)
    assert http_get(first.port()) == b"first\n"
