"""Secrets: files that a proc has in memory, and that no other program can read: they are not in what is shown, not on the disk,
not in the store."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.clients import Lines
from harness.kip import Kip, Proc
from harness.programs import SOURCES


def store_of(directory: Path) -> Path:
    store = directory / "store"
    store.mkdir()
    return store


def made(directory: Path, name: str) -> tuple[str, Path]:
    """Contents that are nowhere else, and their file."""
    text = secrets.token_hex(24)
    path = directory / name
    path.write_text(text)
    return text, path


def nowhere(text: str, *tops: Path) -> None:
    """No file has it in its bytes, nor its name; there were files to look at."""
    looked = 0
    for top in tops:
        for directory, _, names in os.walk(top):
            for path in (Path(directory) / name for name in names):
                if path.is_file() and not path.is_symlink():
                    looked += 1
                    assert text.encode() not in path.read_bytes(), f"{path} has the secret"
    assert looked > 10, "there is something to look at"


def shown(kip: Kip, name: str) -> str:
    """All that Kip shows of it and of what happened."""
    commands = [["inspect", name, "--json"], ["inspect", name], ["ps", "--json"], ["events"], ["logs", name], ["why", name]]
    return "".join(kip.cli(*words).stdout for words in commands) + kip.stderr()


def read(proc: Proc, name: str) -> str:
    return proc.exec("cat", f"/run/secrets/{name}").stdout


# promise life: `--secret NAME=FILE`: `/run/secrets/NAME` inside, mode 0400 of the proc's user, in
#   memory that is never swapped, read-only; by start, exec and every wake, from every tier, also by
#   a daemon that was never told
# promise life: contents of secrets are in no file of the data directory or the store while it runs,
#   is hibernated, parked or archived, and in nothing that Kip shows
def test_they_are_inside_in_every_tier_and_nowhere_else(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    store = store_of(tmp_path)
    kip = fresh_kip("--store", str(store))
    text, path = made(tmp_path, "db")
    flags = ["--secret", f"db={path}", "--user", "www-data"]
    # The program itself never looks: what a program reads is in its memory, and its memory on the
    # disk.
    proc = kip.run("holds", ["sleep", "100000"], flags=flags)
    assert read(proc, "db") == text
    stat = proc.exec("stat", "-c", "%u %g %a %n", "/run/secrets/db").stdout
    assert stat.strip() == "33 33 400 /run/secrets/db"
    mounts = proc.exec("cat", "/proc/mounts").stdout
    assert [line.split()[3].split(",")[0] for line in mounts.splitlines() if " /run/secrets " in line] == ["ro"]
    assert proc.exec("sh", "-c", "echo x > /run/secrets/db", check=False).returncode != 0
    proc.hibernate()
    nowhere(text, kip.data, store)
    proc.sleep()
    nowhere(text, kip.data, store)
    assert read(proc, "db") == text and proc.rebuilt()
    proc.archive()
    nowhere(text, kip.data, store)
    kip.kill()
    kip.up()
    assert proc.state == "archived"
    assert read(proc, "db") == text, "by a daemon that was never told"
    proc.stop()
    proc.start()
    assert read(proc, "db") == text
    nowhere(text, kip.data, store)
    assert text not in shown(kip, "holds")
    assert proc.inspect()["spec"]["secrets"] == ["db"] and "secrets" in str(kip.json("why", "holds")["pinned_by"])


# promise life: a secret that is open when it falls asleep is open when it wakes, natively and by
#   CRIU
@pytest.mark.parametrize("by_criu", [False, True])
def test_an_open_secret_stays_open_through_sleeps(
    fresh_kip: Callable[..., Kip], tmp_path: Path, by_criu: bool
) -> None:
    kip = fresh_kip(*(["--only-criu"] if by_criu else []))
    text, path = made(tmp_path, "key")
    empty = tmp_path / "empty"
    empty.touch()
    program = f"{SOURCES / 'lines.py'}:/srv/lines.py:ro"
    flags = ["-v", program, "--secret", f"key.pem={path}", "--secret", f"empty={empty}"]
    proc = kip.run("open", ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=["8080"], flags=flags)
    client = Lines(proc.port())
    assert client.ask("globals().__setitem__('f', open('/run/secrets/key.pem'))") == "None"
    half = len(text) // 2
    assert client.ask(f"f.read({half})") == repr(text[:half])
    for _ in range(2):
        proc.sleep()
        assert client.ask("os.path.getsize('/run/secrets/empty')") == "0"
        assert proc.rebuilt() != by_criu
    assert client.ask("f.read()") == repr(text[half:])
    assert client.ask("f.seek(0) or f.read()") == repr(text)
    client.close()


# promise life: they are kept sealed under the realm's key (made for it where there is no store),
#   for that proc only; a destroyed key makes them unreadable: start and wake say so, a sleeper
#   stays as it is; `kip key destroy` names who needs the key
# held by: this,
#   `kip_archive::secrets::tests::secrets_open_for_their_proc_only_and_as_long_as_their_key_is_there`
def test_a_destroyed_key_makes_them_unreadable(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    kip = fresh_kip("--store", str(store_of(tmp_path)))
    text, path = made(tmp_path, "token")
    proc = kip.run("bound", ["sleep", "100000"], flags=["--secret", f"token={path}"])
    old = kip.json("key", "ls")[0]["id"]
    kip.cli("key", "rotate")
    proc.sleep()
    assert read(proc, "token") == text, "an old key still opens"
    assert "bound" in kip.refused("key", "destroy", old), "it says whom that costs"
    kip.cli("key", "destroy", old, "--yes")
    proc.sleep()
    said = kip.refused("wake", "bound")
    assert "secrets" in said and "destroyed" in said
    assert proc.state == "parked"
    kip.cli("stop", "bound", "--grace", "0s")
    said = kip.refused("start", "bound")
    assert "secrets" in said and "destroyed" in said and text not in shown(kip, "bound")


# promise life: who has secrets is pinned to its data directory, as by a volume
def test_elsewhere_they_are_not_to_be_had(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    store = str(store_of(tmp_path))
    here, there = fresh_kip("--store", store), fresh_kip("--store", store)
    _, path = made(tmp_path, "token")
    here.run("stays", ["sleep", "100000"], flags=["--secret", f"token={path}"]).archive()
    keys = tmp_path / "keys"
    (tmp_path / "pass").write_bytes(os.urandom(32))
    here.cli("key", "export", str(keys), "--key-file", str(tmp_path / "pass"))
    there.cli("key", "import", str(keys), "--key-file", str(tmp_path / "pass"))
    said = there.refused("wake", "stays")
    assert "its volumes are there" in said and "secrets at /run/secrets" in said


# promise life: names that are no file names, more than 64 KiB, the same name twice, a volume at
#   their place are refused
def test_what_cannot_be_is_refused(kip: Kip, tmp_path: Path) -> None:
    _, path = made(tmp_path, "s")
    big = tmp_path / "big"
    big.write_bytes(bytes(64 * 1024 + 1))
    for name in ("../x", ".x", "a/b", ""):
        done = kip.cli("run", "--secret", f"{name}={path}", "--", "true", check=False)
        assert done.returncode == 2 and "--secret" in done.stderr, done.stderr
    assert str(tmp_path / "none") in kip.refused("run", "--secret", f"a={tmp_path / 'none'}", "--", "true")
    assert "65536 bytes" in kip.refused("run", "--secret", f"a={big}", "--", "true")
    assert "twice" in kip.refused("run", "--secret", f"a={path}", "--secret", f"a={path}", "--", "true")
    volume = f"{tmp_path}:/run/secrets/x"
    assert "its secrets are there" in kip.refused("run", "--secret", f"a={path}", "-v", volume, "--", "true")
    assert json.loads(kip.cli("ps", "--json").stdout) == []
