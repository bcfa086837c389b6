"""`kip template export` and `import`: a template in a closed file, for another data directory to begin from."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import images, logged, servers
from harness.clients import Redis, http_get
from harness.kip import Kip, Proc
from harness.wait import wait_for
from test_full_disk import NO_ROOM, Disk, disk
from test_templates import leaves, on_disk, run, templates, told, words
from test_upgrade import installed, upgrade

__all__ = ["disk", "installed"]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(os.urandom(32))
    return path


def export(kip: Kip, template: str, file: Path, key: Path) -> dict[str, Any]:
    return kip.json("template", "export", template, str(file), "--key-file", str(key))


def bring(kip: Kip, file: Path, key: Path) -> dict[str, Any]:
    return kip.json("template", "import", str(file), "--key-file", str(key))


# promise templates: `export` writes one into a closed file, and where that is imported a run of
#   the same spec begins from it, with the secrets and the name of its own; it sleeps, wakes, and
#   goes on to a third data directory
@pytest.mark.smoke
def test_to_another_data_directory(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    kip = fresh_kip()
    secret = tmp_path / "secret"
    secret.write_text("hunter2 and more")
    flags = ["--secret", f"key={secret}", "-e", "WORD=here"]
    first, template = leaves(kip, "first", *flags)
    first.exec("sh", "-c", "echo later >> /tmp/started")
    seen = words(first)
    file = tmp_path / "first.kip"
    done = export(kip, template, file, key)
    assert done["template"]["id"] == done["exported_id"] == template and done["file_bytes"] == file.stat().st_size
    assert file.stat().st_mode & 0o777 == 0o600
    held = file.read_bytes()
    assert b"hunter2" not in held and seen[0].encode() not in held, "it is closed"
    assert f"{file}2: template {template} of first" in kip.cli("template", "export", template, f"{file}2", "--key-file", key).stdout

    other = fresh_kip(data=tmp_path / "elsewhere" / "data")
    done = bring(other, file, key)
    (view,) = templates(other)
    assert view == done["template"] and view["name"] == "first" and view["used_at_ms"] is None
    assert view["memory_bytes"] > 1 << 20 and done["exported_id"] == template
    second = run(other, "second", *flags)
    assert words(second) == [seen[0], "once", "first", "cold", "here"], "it did not start, and has the files of then"
    assert told(other, "second", "cloned") == [f"from template {view['id']}"]
    assert second.exec("cat", "/run/secrets/key").stdout == "hunter2 and more"
    assert second.exec("hostname").stdout == "second\n"
    second.sleep()
    assert words(second)[0] == seen[0]
    # Its kind is what it was asked to be, as ever.
    secret.write_text("other")
    assert words(run(other, "changed", *flags))[2] == "changed"
    secret.write_text("hunter2 and more")

    third = fresh_kip(data=tmp_path / "third" / "data")
    export(other, view["id"], tmp_path / "again.kip", key)
    bring(third, tmp_path / "again.kip", key)
    third.kill()
    third.up()
    assert words(run(third, "third", *flags))[:3] == [seen[0], "once", "first"]
    assert words(first)[0] == seen[0], "where it came from nothing has changed"


# promise templates: one of an image goes where the image is, and elsewhere it is refused; one of a
#   tarball takes that along
def test_of_an_image_and_of_a_tarball(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    redis = images.redis()
    # A volume that it can write to would stay where it is.
    redis = dataclasses.replace(redis, config={key: value for key, value in redis.config.items() if key != "Volumes"})
    source = f"oci:{images.layout(tmp_path / 'redis', a=redis)}"
    kip, other = fresh_kip(), fresh_kip(data=tmp_path / "elsewhere" / "data")
    kip.cli("image", "load", source)
    flags = ["-p", "6379", "--template", "auto", "--never-sleep", "-d"]
    one = images.run(kip, "one", source, *flags)
    wait_for("its template is taken", lambda: told(kip, "one"), 30)
    (template,) = templates(kip)
    export(kip, template["id"], tmp_path / "image.kip", key)
    # A line that is long by the paths of a test alone.
    done = other.cli("template", "import", tmp_path / "image.kip", "--key-file", key, check=False)
    assert done.returncode == 1 and "it needs image" in done.stderr and len(done.stderr.splitlines()) == 1
    other.cli("image", "load", source)
    bring(other, tmp_path / "image.kip", key)
    two = images.run(other, "two", source, *flags)
    assert told(other, "two", "started") == [] and told(other, "two", "cloned")
    run_id = lambda proc: re.search(rb"run_id:(\w+)", Redis(proc.port()).ask("INFO"))[1]  # noqa: E731
    assert run_id(one) == run_id(two), "drawn once"

    web = servers.lighttpd()
    tar = web.tarball(tmp_path)
    limited = ["--template", "auto", "--never-sleep", "--disk", "64M"]
    served = kip.run("web", web.command, ports=web.published, tar=tar, flags=limited)
    wait_for("its template is taken", lambda: told(kip, "web"), 30)
    export(kip, told(kip, "web")[0].split()[0], tmp_path / "tar.kip", key)
    bring(other, tmp_path / "tar.kip", key)
    again = other.run("web", web.command, ports=web.published, tar=tar, flags=limited)
    assert told(other, "web", "started") == [] and told(other, "web", "cloned")
    assert http_get(again.port(), "/page.html") == http_get(served.port(), "/page.html")


# promise templates: what is no template, is not whole, is closed with something else, is of another
#   kind or is here already is refused in a line, and nothing is left; one that needs a volume of
#   its machine is not exported
def test_what_cannot_be_imported(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    kip = fresh_kip()
    _, template = leaves(kip, "first")
    file, closed = tmp_path / "first.kip", ["--key-file", str(key)]
    assert "there is no template t0" in kip.refused("template", "export", "t0", file, *closed)
    assert "No such file" in kip.refused("template", "export", template, tmp_path / "none" / "first.kip", *closed)
    export(kip, template, file, key)
    assert "is there already" in kip.refused("template", "export", template, file, *closed)
    short = tmp_path / "short"
    short.write_bytes(b"7")
    assert "32 bytes" in kip.refused("template", "export", template, tmp_path / "x", "--key-file", short)
    assert not (tmp_path / "x").exists()

    said = kip.refused("template", "import", file, *closed)
    assert f"the template {template}, of the same kind, is here already" in said and f"kip template rm {template}" in said
    kip.cli("template", "rm", template)
    assert "No such file" in kip.refused("template", "import", tmp_path / "none", *closed)
    other_key = tmp_path / "other-key"
    other_key.write_bytes(os.urandom(32))
    assert "is not the one that closed the template" in kip.refused("template", "import", file, "--key-file", other_key)
    phrase = tmp_path / "phrase"
    phrase.write_text("correct horse battery staple\n")
    assert "closed with a key file" in kip.refused("template", "import", file, "--passphrase-file", phrase)
    whole, broken = file.read_bytes(), tmp_path / "broken"
    flipped = whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 0x10]) + whole[len(whole) // 2 + 1 :]
    for bad, why in {
        whole[: len(whole) // 2]: "is not whole",
        flipped: "is not whole",
        whole[:-1]: "is not whole",
        whole + b"x": "is not whole",
        b"no template at all" * 100: "this is no template of Kip's",
        b"": "this is no template of Kip's",
    }.items():
        broken.write_bytes(bad)
        said = kip.refused("template", "import", broken, *closed)
        assert why in said, said
        assert on_disk(kip) == []
    backup = tmp_path / "all.kip"
    kip.cli("backup", backup, *closed)
    assert "this is a backup, which `kip restore FILE` reads" in kip.refused("template", "import", backup, *closed)
    other = Kip(tmp_path / "other-data")
    assert "this is a template, which `kip template import FILE` reads" in other.refused("restore", file, *closed)
    # All of this has left it as it was.
    assert bring(kip, file, key)["template"]["id"] == template
    assert words(run(kip, "second"))[2] == "first"

    volume = tmp_path / "own"
    volume.mkdir()
    kip.run("bound", ["sleep", "1000"], flags=["-v", f"{volume}:/own:ro", "--never-sleep"])
    bound = kip.json("template", "take", "bound")["id"]
    assert f"its volume {volume} at /own stays on this machine" in kip.refused("template", "export", bound, tmp_path / "x", *closed)
    assert not (tmp_path / "x").exists()
    (pages,) = list((kip.data / "templates" / template).glob("gen-*/g*-memory*"))[:1]
    damaged = bytearray(pages.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    pages.unlink()
    pages.write_bytes(damaged)
    assert "it is damaged" in kip.refused("template", "export", template, tmp_path / "x", *closed)
    assert not (tmp_path / "x").exists()


# promise templates: one whose program is another on this machine is not imported
# held by: this, `kip_offload::template::tests::another_file_of_the_machine_is_found`
def test_another_program(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path, installed: Path) -> None:
    kip, other = fresh_kip(), fresh_kip(data=tmp_path / "elsewhere" / "data")
    kip.run("old", [str(installed), "7000"], ports=["7000"], flags=["--never-sleep"])
    template = kip.json("template", "take", "old")["id"]
    export(kip, template, tmp_path / "old.kip", key)
    upgrade(installed)
    said = other.refused("template", "import", tmp_path / "old.kip", "--key-file", key)
    assert f"this machine has another {installed} than the one that its program runs on" in said, said
    assert on_disk(other) == []
    kip.remove_all()


# promise templates: a full disk leaves neither a file nor a template
def test_a_full_disk(disk: Disk, fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    kip = fresh_kip()
    noise = "import os, time; noise = os.urandom(30 << 20); open('/tmp/drawn', 'w'); time.sleep(1e6)"
    noisy = kip.run("noisy", ["/usr/bin/python3", "-c", noise], flags=["--never-sleep"])
    wait_for("its memory is full", lambda: noisy.exec("test", "-e", "/tmp/drawn", check=False).returncode == 0, 30)
    template, closed = kip.json("template", "take", "noisy")["id"], ["--key-file", str(key)]
    export(kip, template, tmp_path / "file", key)
    other = fresh_kip(data=disk.path / "data")
    disk.fill(10 << 20)
    (disk.path / "place").mkdir()
    assert NO_ROOM in kip.refused("template", "export", template, disk.path / "place" / "file", *closed)
    assert list((disk.path / "place").iterdir()) == []
    said = other.refused("template", "import", tmp_path / "file", *closed)
    assert "no space is left there" in said or NO_ROOM in said, said
    assert on_disk(other) == [] == templates(other)
    disk.free()
    assert bring(other, tmp_path / "file", key)["template"]["id"] == templates(other)[0]["id"]


# promise templates: a daemon that is killed in the middle of an export or an import leaves no file
#   and no template
@pytest.mark.parametrize("step", ["template-exported", "template-unpacked"])
def test_killed_at_step(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path, step: str) -> None:
    kip = fresh_kip()
    kip.expected += [*logged.DAEMON_KILLED]
    _, template = leaves(kip, "first")
    place = tmp_path / "place"
    place.mkdir()
    file = tmp_path / "first.kip"
    if step == "template-unpacked":
        export(kip, template, file, key)
        kip.cli("template", "rm", template)
    kip.kill()
    kip.up("--fault-at", step)
    command = ["import", file] if step == "template-unpacked" else ["export", template, place / "file"]
    assert kip.cli("template", *command, "--key-file", key, check=False).returncode == 1
    assert kip.wait_dead(30) == -signal.SIGKILL
    assert list(place.iterdir()) == []
    kip.up()
    assert len(on_disk(kip)) == len(templates(kip)) == (step == "template-exported")
    if step == "template-unpacked":
        bring(kip, file, key)
    else:
        export(kip, template, place / "file", key)
    assert words(run(kip, "second"))[2] == "first"
