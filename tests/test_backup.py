"""`kip backup` and `kip restore`: all that a data directory keeps, in one closed file, and a data directory of that."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import images, leftovers, servers
from harness.clients import Lines, Redis, http_get, listens
from harness.kip import Kip, Proc
from harness.programs import SOURCES
from harness.wait import wait_for
from test_adopt import FILES, look
from test_templates import leaves, run, told, words

LINES = ["/usr/bin/python3", "/srv/lines.py", "8080"]
PROGRAM = ["-v", f"{SOURCES / 'lines.py'}:/srv/lines.py:ro"]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(os.urandom(32))
    return path


def back_up(kip: Kip, file: Path, key: Path) -> list[dict[str, Any]]:
    done = kip.cli("backup", file, "--key-file", key, "--json", timeout=120)
    return [json.loads(line) for line in done.stdout.splitlines()]


def restore(kip: Kip, file: Path, key: Path) -> dict[str, Any]:
    return json.loads(kip.cli("restore", file, "--key-file", key, "--json", timeout=120).stdout)


def lost(kip: Kip) -> None:
    """The machine ends, and its disk with it."""
    kip.kill()
    leftovers.end_all(kip)
    (leftovers.RUN / f"instance-{kip.instance}").unlink(missing_ok=True)
    shutil.rmtree(kip.data)


def hows(items: list[dict[str, Any]]) -> dict[str, str]:
    return {item["name"]: item["how"] for item in items if item["kind"] == "proc"}


# promise backup: all that a data directory keeps is in one closed file: procs in every tier with
#   files and memory, named volumes, secrets, keys, tokens; what is not in it (memory in the store,
#   the host's own files) is said
# promise backup: it wakes no sleeper; who is awake is parked for a moment and runs again; who
#   cannot sleep is in it with its files, and why is said
# promise backup: restored elsewhere it is as after a reboot: same ports, sleepers wake with memory,
#   files, open files in volumes; then all is as ever
def test_all_of_it_comes_back_on_another_machine(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    """A proc that slept goes on sleeping in the backup, one that ran slept for a moment; memory, files, volumes, secrets, ports,
    keys, images' layers and tokens are there again, in another directory. The store is where it was."""
    (tmp_path / "store").mkdir()
    store = ["--store", str(tmp_path / "store")]
    old = fresh_kip(*store)
    web, redis = servers.lighttpd(), servers.redis()
    secret = tmp_path / "secret"
    secret.write_text("hunter2 and more")
    hot = old.run("hot", web.command, ports=web.published, tar=web.tarball(tmp_path), flags=["--never-sleep"])
    hot.exec("sh", "-c", FILES)
    files, page = look(hot), http_get(hot.port(), "/page.html")
    parked = old.run("parked", redis.command, ports=redis.published)
    hibernated = old.run("hibernated", LINES, ports=["8080"], flags=[*PROGRAM, "-v", "data:/data", "--secret", f"s={secret}"])
    archived = old.run("archived", redis.command, ports=redis.published)
    stopped = old.run("stopped", ["sleep", "1000"], flags=["-v", "data:/data"])
    busy = old.run("busy", ["sleep", "1000"])
    for proc in (parked, archived):
        Redis(proc.port()).ask_all([("SET", f"key:{i}", b"%d" % i * 300) for i in range(3000)])
    talk = Lines(hibernated.port())
    assert talk.ask("kept = open('/data/kept', 'a+'); kept.write('before\\n'); kept.flush()") == "None"
    talk.close()
    stopped.exec("sh", "-c", "echo mine > /root/note; echo from stopped > /data/other")
    old.cli("token", "create", "reader", "--scope", "read")
    old.cli("exec", "busy", "--", "sh", "-c", "echo busy > /root/note")
    stopped.stop()
    hibernated.hibernate()
    parked.sleep()
    archived.archive()
    holder = subprocess.Popen([old.program, "--data", old.data, "exec", "busy", "--", "sleep", "1000"], stdin=subprocess.DEVNULL)
    wait_for("somebody is in busy", lambda: "exec" in old.cli("why", "busy").stdout, 20)
    wakes = {name: old.json("inspect", name)["wakes"] for name in old.names()}
    ports = {proc.name: proc.port() for proc in (hot, parked, hibernated, archived)}

    file = tmp_path / "all.kip"
    items = back_up(old, file, key)
    assert hows(items) == {
        "hot": "asleep", "parked": "asleep", "hibernated": "asleep", "archived": "in-the-store",
        "stopped": "stopped", "busy": "files-only",
    }  # fmt: skip
    cause = {item["name"]: item["cause"] for item in items if item["kind"] == "proc"}
    assert "exec" in cause["busy"] and cause["hot"] is None
    end = items[-1]
    assert (end["kind"], end["procs"], end["volumes"]) == ("end", 6, 1) and end["file_bytes"] == file.stat().st_size
    assert end["left_out"] == [str(SOURCES / "lines.py")]
    assert (file.stat().st_mode & 0o777, b"hunter2" in file.read_bytes()) == (0o600, False)
    # No sleeper was woken; the procs that ran run again.
    after = {name: old.json("inspect", name)["wakes"] for name in old.names()}
    assert after == {**wakes, "hot": wakes["hot"] + 1}
    assert [proc.state for proc in (hot, parked, hibernated, archived, stopped, busy)] == [
        "running", "parked", "parked", "archived", "stopped", "running",
    ]  # fmt: skip
    assert not (old.data / "run" / "backup").exists() and sorted(tmp_path.glob(".*")) == []
    # What happens after it is not in it.
    hot.exec("sh", "-c", "echo later > /srv/later")
    holder.kill()
    holder.wait()
    lost(old)

    new = fresh_kip(*store, data=tmp_path / "other" / "data", start=False)
    told = restore(new, file, key)
    assert {proc["name"]: proc["asleep"] for proc in told["procs"]} == {
        "hot": True, "parked": True, "hibernated": True, "archived": False, "stopped": False, "busy": False,
    }  # fmt: skip
    new.expected += [r"the keeper was not running"]
    new.up()
    at = {name: Proc(new, name) for name in new.names()}
    assert [at[name].state for name in ("hot", "parked", "hibernated", "archived", "stopped", "busy")] == [
        "parked", "parked", "parked", "archived", "stopped", "stopped",
    ]  # fmt: skip
    assert {name: at[name].port() for name in ports} == ports, "its clients find it where it was"
    for name in ("parked", "archived"):
        assert Redis(ports[name]).ask("GET", "key:2999") == b"2999" * 300
    assert look(at["hot"]) == files, "all its files are as they were"
    assert http_get(ports["hot"], "/page.html") == page
    talk = Lines(ports["hibernated"])
    assert talk.ask("(kept.write('after\\n'), kept.flush(), open('/data/kept').read(), open('/data/other').read())") == repr(
        (6, None, "before\nafter\n", "from stopped\n")
    ), "it goes on with the file that it had open in its volume"
    assert at["hibernated"].exec("cat", "/run/secrets/s").stdout == "hunter2 and more"
    talk.close()
    at["stopped"].start()
    assert at["stopped"].exec("cat", "/root/note").stdout == "mine\n"
    at["busy"].start()
    assert at["busy"].exec("cat", "/root/note").stdout == "busy\n"
    assert [token["name"] for token in new.json("token", "ls")] == ["reader"]
    assert {event["name"] for event in new.events() if event["kind"] == "cold-start"} == set()
    # From here on all is as ever.
    at["hibernated"].sleep()
    assert Lines(ports["hibernated"]).ask("kept.name") == "'/data/kept'" and at["hibernated"].rebuilt()
    at["parked"].archive()
    assert Redis(ports["parked"]).ask("GET", "key:1") == b"1" * 300
    new.remove_all()
    new.cli("volume", "rm", "data")


# promise backup: what is archived in the data directory's own store is in it
def test_what_is_archived_in_the_own_store_is_in_it(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    """Nothing is missing then but volumes of the host."""
    old = fresh_kip()
    redis = servers.redis()
    proc = old.run("redis", redis.command, ports=redis.published)
    Redis(proc.port()).ask_all([("SET", f"key:{i}", b"%d" % i * 300) for i in range(3000)])
    proc.archive()
    port, file = proc.port(), tmp_path / "all.kip"
    assert hows(back_up(old, file, key)) == {"redis": "asleep"} and proc.state == "archived"
    lost(old)
    new = fresh_kip(data=tmp_path / "other" / "data", start=False)
    assert restore(new, file, key)["procs"] == [{"name": "redis", "asleep": True}]
    new.expected += [r"the keeper was not running"]
    new.up()
    assert Proc(new, "redis").state == "archived"
    assert Redis(port).ask("GET", "key:2999") == b"2999" * 300
    new.remove_all()


# promise backup: that store is of the moment of the records: who is to be archived waits for the
#   end of the backup
def test_its_store_is_of_the_moment_of_its_records(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    """A proc that is to be archived waits for the end of the backup; else its record would say that it sleeps, and its pages
    would not be there."""
    kip = fresh_kip()
    big = kip.run("big", ["sh", "-c", "head -c 400000000 /dev/urandom > /var/tmp/big; exec sleep 1000"])
    other = kip.run("other", ["sleep", "1000"])
    other.archive()  # The store is there.
    other.wake()
    wait_for("its file is there", lambda: "400000000" in big.exec("ls", "-l", "/var/tmp").stdout, 60)
    big.sleep()
    other.sleep()
    file = tmp_path / "all.kip"
    making = subprocess.Popen([kip.program, "--data", kip.data, "backup", file, "--key-file", key], stdout=subprocess.DEVNULL)
    wait_for("it is being made", lambda: (growing := tmp_path / ".all.kip.kip-backup").exists() and growing.stat().st_size > 1 << 20, 30, every=0.005)
    archived = kip.cli("sleep", "other", "--to", "archived", check=False)
    assert making.wait(60) == 0
    event = next((e for e in reversed(kip.events()) if e["kind"] == "archived"), None)
    assert archived.returncode == 0 and other.state == "archived", archived.stderr
    assert event and event["at_ms"] / 1e3 >= file.stat().st_mtime - 0.1, "it was archived while its store was copied"


WRITER = """
import os, socket, sys
listener = socket.create_server(("0.0.0.0", 8080))
listener.setblocking(False)
held, number = [], 0
log = open("/data/log", "a")
while True:
    number += 1
    held.append(number)
    log.write(f"{number}\\n")
    log.flush()
    os.makedirs(f"/data/d{number % 50}", exist_ok=True)
    with open(f"/data/d{number % 50}/f{number}", "w") as f:
        f.write("x" * 1000)
    if number > 400:
        os.unlink(f"/data/d{(number - 400) % 50}/f{number - 400}")
    try:
        client, _ = listener.accept()
    except BlockingIOError:
        continue
    files = [int(l) for l in open("/data/log")]
    there = sorted(int(n[1:]) for d in os.listdir("/data") if d != "log" for n in os.listdir(f"/data/{d}"))
    good = files == held and there == list(range(max(1, number - 399), number + 1))
    good = good and all(os.path.getsize(f"/data/d{n % 50}/f{n}") == 1000 for n in there)
    client.sendall(f"{good} {number}\\n".encode())
    client.close()
"""


# promise backup: files and volumes are those of the moment in which the memory is, however many are
#   made, changed and deleted meanwhile
# promise backup: procs that share a named volume stand still together
def test_files_are_those_of_the_moment_in_which_it_slept(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    """A program that makes, changes and deletes files all the while finds exactly those that it remembers."""
    old = fresh_kip()
    program = tmp_path / "writer.py"
    program.write_text(WRITER)
    writer = old.run(
        "writer", ["/usr/bin/python3", "/srv/writer.py"], ports=["8080"],
        flags=["-v", f"{program}:/srv/writer.py:ro", "-v", "data:/data", "--never-sleep"],
    )  # fmt: skip
    port = writer.port()
    # It has the volume too, so it stands still with it.
    old.run("reader", ["sleep", "1000"], flags=["-v", "data:/data:ro"])

    def said() -> tuple[str, int]:
        good, number = Lines(port).reader.readline().decode().split()
        return good, int(number)

    good, begun = said()
    assert good == "True"
    files = [tmp_path / f"{turn}.kip" for turn in range(2)]
    for file in files:
        items = back_up(old, file, key)
        assert hows(items) == {"writer": "asleep", "reader": "asleep"}
        assert len({item["still_us"] for item in items if item["kind"] == "proc"}) == 1
    good, last = said()
    assert good == "True" and last > begun, "it went on meanwhile"
    lost(old)
    new = fresh_kip(data=tmp_path / "other" / "data", start=False)
    restore(new, files[1], key)
    new.expected += [r"the keeper was not running"]
    new.up()
    good, number = said()
    assert good == "True" and number > begun
    new.remove_all()
    new.cli("volume", "rm", "data")


# promise backup: beside the original ids are moved, in files, capabilities and memory
# held by: this, `kip_archive::files::shift::tests::owners_move_and_modes_and_others_stay`
def test_beside_the_original(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    """On the same machine it gets another number, so all ids of its procs are moved, in files as in memory."""
    old = fresh_kip()
    lines = old.run("lines", LINES, ports=["8080,private"], flags=[*PROGRAM, "-v", "data:/data"])
    lines.exec("sh", "-c", "mkdir -p /srv; " + FILES + "\ncp made /data/mine; chown 11:12 /data/mine; chmod 6755 /data/mine")
    files, mine = look(lines), lines.exec("stat", "-c", "%u %g %a", "/data/mine").stdout
    lines.sleep()
    file = tmp_path / "all.kip"
    back_up(old, file, key)
    new = fresh_kip(data=tmp_path / "other" / "data", start=False)
    restore(new, file, key)
    new.expected += [r"the keeper was not running"]
    new.up()
    assert new.instance != old.instance
    copy = Proc(new, "lines")
    assert copy.state == "parked"
    copy.wake()
    assert look(copy) == files
    assert copy.exec("stat", "-c", "%u %g %a", "/data/mine").stdout == mine
    made = [(kip.data / "procs/lines/upper/root/srv/made").stat().st_uid for kip in (old, new)]
    assert made[0] != made[1] and min(made) > 1 << 20
    for kip in (old, new):
        kip.remove_all()
        kip.cli("volume", "rm", "data")


# promise backup: templates and checkpoints are in it: after a restore, also in another directory
#   and under another number, a run begins from the template, and a proc goes back to its checkpoint
def test_templates_and_checkpoints_are_in_it(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    old = fresh_kip()
    first, template = leaves(old, "first")
    seen = words(first)
    lines = old.run("lines", LINES, ports=["8080"], flags=[*PROGRAM, "-v", "data:/data:ro"])
    assert Lines(lines.port()).ask("kept = 7; open('/tmp/own', 'w').write('then')") == "None"
    old.cli("checkpoint", "lines", "--tag", "seven")
    assert Lines(lines.port()).ask("kept = 8; open('/tmp/own', 'w').write('now')") == "None"
    file = tmp_path / "all.kip"
    back_up(old, file, key)
    # Beside the original, so that all ids are moved.
    new = fresh_kip(data=tmp_path / "other" / "data", start=False)
    restore(new, file, key)
    new.expected += [r"the keeper was not running"]
    new.up()
    assert new.instance != old.instance
    assert [one["id"] for one in new.json("template", "ls")["templates"]] == [template]
    second = run(new, "second")
    assert words(second) == seen and told(new, "second", "started") == [], "it began from the template"
    assert [one["tag"] for one in new.json("checkpoint", "ls", "lines")["checkpoints"]] == ["seven"]
    new.cli("rollback", "lines", "--to", "seven")
    copy = Proc(new, "lines")
    assert Lines(copy.port()).ask("(kept, open('/tmp/own').read())") == repr((7, "then"))
    assert copy.exec("stat", "-c", "%u", "/tmp/own").stdout == lines.exec("stat", "-c", "%u", "/tmp/own").stdout
    new.cli("clone", "lines@seven", "again")
    assert Lines(Proc(new, "again").port()).ask("kept") == "7"
    for kip in (old, new):
        kip.remove_all()
        kip.cli("volume", "rm", "data")


# promise backup: images' layers are in it
def test_images_are_in_it(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    """Layers, for the procs that lie over them and for those that are made of them later."""
    old = fresh_kip()
    image = f"oci:{images.layout(tmp_path / 'web', one=images.web())}:one"
    web = images.run(old, "web", image, "-P", ready=True)
    port, page = web.port(), http_get(web.port())
    web.sleep()
    names = [image["reference"] for image in old.json("image", "ls")]
    file = tmp_path / "all.kip"
    back_up(old, file, key)
    lost(old)
    new = fresh_kip(data=tmp_path / "other" / "data", start=False)
    restore(new, file, key)
    new.expected += [r"the keeper was not running"]
    new.up()
    assert http_get(port) == page
    assert [image["reference"] for image in new.json("image", "ls")] == names
    again = Proc(new, "web")
    again.stop()
    again.start()
    wait_for("it listens", lambda: listens(port))
    assert http_get(port) == page, "and cold"
    new.remove_all()


# promise backup: nothing is replaced: neither a file nor a data directory in which something is
def test_what_cannot_be_is_one_line(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    kip = fresh_kip()
    kip.run("one", ["sleep", "1000"])
    other, file = tmp_path / "other-key", tmp_path / "all.kip"
    other.write_bytes(os.urandom(32))
    short, none = tmp_path / "short", tmp_path / "none"
    short.write_text("short\n")
    none.write_bytes(b"x" * 31)
    with_key = ("--key-file", key)
    assert "too short" in kip.refused("backup", file, "--passphrase-file", short)
    assert "a key file has 32 bytes, this one has 31" in kip.refused("backup", file, "--key-file", none)
    assert "is in the data directory" in kip.refused("backup", kip.data / "all.kip", *with_key)
    assert "nowhere" in kip.refused("backup", tmp_path / "nowhere" / "all.kip", *with_key)
    assert "no terminal to ask at" in kip.refused("backup", file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["key", "none", "other-key", "short"], "nothing is left of these"
    back_up(kip, file, key)
    assert "is there already" in kip.refused("backup", file, *with_key)
    table = kip.cli("backup", tmp_path / "second.kip", *with_key).stdout.splitlines()
    assert table[0].split()[:1] == ["PROC"] and table[1].split()[:3] == ["one", "files,", "memory"]
    assert table[-1].startswith(f"{tmp_path / 'second.kip'}: 1 proc, 0 volumes")

    to = fresh_kip(data=tmp_path / "to" / "data", start=False)
    assert "already runs on" in kip.refused("restore", file, *with_key)
    assert "not the one that closed the backup" in to.refused("restore", file, "--key-file", other)
    assert "closed with a key file" in to.refused("restore", file, "--passphrase-file", short)
    assert "no backup of Kip's" in to.refused("restore", Path("/etc/passwd"), *with_key)
    assert "nowhere.kip" in to.refused("restore", tmp_path / "nowhere.kip", *with_key)
    sealed = file.read_bytes()
    for name, bad in (
        ("cut", sealed[: len(sealed) // 2]),
        ("flipped", sealed[: len(sealed) // 2] + bytes([sealed[len(sealed) // 2] ^ 1]) + sealed[len(sealed) // 2 + 1 :]),
        ("longer", sealed + b"x"),
    ):
        (tmp_path / name).write_bytes(bad)
        assert f"{name} is not whole" in to.refused("restore", tmp_path / name, *with_key)
        left = {path.name for path in to.data.iterdir()}
        assert left <= {"run"}, f"nothing of {name} is left: {left}"
    restore(to, file, key)
    assert "is in the way" in to.refused("restore", file, *with_key)
    to.expected += [r"the keeper was not running"]
    to.up()
    assert Proc(to, "one").state == "parked"
    Proc(to, "one").wake()


# promise backup: a full disk, a client that goes, a killed daemon leave nothing half done and lose
#   nothing
# held by: this, `tests/test_backup.py::test_a_daemon_is_killed_while_a_proc_stands_still`
def test_a_full_disk_and_one_who_goes_away_leave_nothing(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    # Before the daemon, whose mounts are its own.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16M", "tmpfs", full], check=True)
    kip = fresh_kip()
    one = kip.run("one", LINES, ports=["8080"], flags=[*PROGRAM, "-v", "data:/data"])
    assert Lines(one.port()).ask("kept = 7") == "None"
    one.exec("sh", "-c", "head -c 60M /dev/urandom > /data/noise")
    try:
        assert "No space left on device" in kip.refused("backup", full / "all.kip", "--key-file", key, timeout=120)
        assert list(full.iterdir()) == []
        file = tmp_path / "all.kip"
        back_up(kip, file, key)
        to = Kip(full / "data")
        assert "no space is left" in to.refused("restore", file, "--key-file", key, timeout=120)
        assert {path.name for path in to.data.iterdir()} <= {"run"}
    finally:
        subprocess.run(["umount", "--lazy", full], check=True)
    # Its client is killed in the middle.
    one.exec("sh", "-c", "for i in 1 2 3 4 5; do cp /data/noise /data/noise$i; done")
    second = tmp_path / "second.kip"
    client = subprocess.Popen([kip.program, "--data", kip.data, "backup", second, "--key-file", key], stdout=subprocess.DEVNULL)
    growing = tmp_path / ".second.kip.kip-backup"
    wait_for("it grows", lambda: growing.exists() and growing.stat().st_size > 1 << 20, 20, every=0.01)
    client.kill()
    client.wait()
    wait_for("what was begun is gone", lambda: not growing.exists(), 20)
    assert not second.exists() and not (kip.data / "run" / "backup").exists()
    assert Lines(one.port()).ask("kept") == "7"
    kip.remove_all()
    kip.cli("volume", "rm", "data")


def test_a_daemon_is_killed_while_a_proc_stands_still(fresh_kip: Callable[..., Kip], tmp_path: Path, key: Path) -> None:
    kip = fresh_kip(start=False)
    kip.up("--fault-at", "backup-still")
    one = kip.run("one", LINES, ports=["8080"], flags=PROGRAM)
    assert Lines(one.port()).ask("kept = 7") == "None"
    file = tmp_path / "all.kip"
    kip.cli("backup", file, "--key-file", key, check=False)
    kip.wait_dead()
    assert not file.exists() and kip.daemon and kip.daemon.returncode == -signal.SIGKILL
    kip.up()
    assert not (kip.data / "run" / "backup").exists()
    assert one.state == "parked"
    assert Lines(one.port()).ask("kept") == "7"
    # The same name serves again.
    assert hows(back_up(kip, file, key)) == {"one": "asleep"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
