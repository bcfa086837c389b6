"""`kip checkpoint` and `kip rollback`: a proc as it was at some moment, cloned and gone back to."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest

from harness import logged
from harness.clients import Lines, Redis, free_port, listens
from harness.kip import Kip, Proc
from harness.rows import one_in
from harness.wait import wait_for
from test_clone import PROGRAM, lines, redis


# Steps of a rollback.
PLACED = ["rollback-kept", "replace-ports", "replace-recorded", "replace-switched", "replace-left"]


def checkpoint(proc: Proc, tag: str | None = None) -> str:
    taken = proc.kip.json("checkpoint", proc.name, *(["--tag", tag] if tag else []))
    assert taken["total_us"] > 0 and taken["is_current"]
    return taken["tag"]


def rollback(proc: Proc, to: str) -> str:
    """The tag of what it was."""
    done = proc.kip.json("rollback", proc.name, "--to", to)
    assert done["proc"]["name"] == proc.name
    return done["kept"]["tag"]


def tags(kip: Kip, name: str) -> list[tuple[str, str | None, bool]]:
    return [(one["tag"], one["parent"], one["is_current"]) for one in kip.json("checkpoint", "ls", name)["checkpoints"]]


def on_disk(kip: Kip) -> list[str]:
    """Checkpoints, and what is left of some."""
    return sorted(str(path.relative_to(kip.data)) for path in (kip.data / "checkpoints").glob("*/*"))


# promise checkpoints: `kip checkpoint` keeps memory and files of a proc of one moment, in every
#   tier on this machine: a sleeper is not woken, and a proc that runs goes on
# promise checkpoints: `kip rollback` brings both back under the same name and port; what the proc
#   was is a checkpoint, to which it can be rolled back too
@pytest.mark.smoke
@pytest.mark.parametrize("state", ["running", "hibernated", "parked"])
def test_there_and_back(kip: Kip, state: str) -> None:
    proc = redis(kip)
    port, client = proc.port(), Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", b"%d" % i * 100) for i in range(3000)])
    proc.exec("sh", "-c", "echo then > /tmp/file")
    {"running": Proc.wake, "hibernated": Proc.hibernate, "parked": Proc.sleep}[state](proc)
    since = len(kip.events())
    first = checkpoint(proc)
    assert first == "c1"
    new = [(event["kind"], event["detail"]) for event in kip.events()[since:] if event["name"] == "redis"]
    assert ("checkpointed", "as c1") in new
    if state == "hibernated":  # It is parked, and redis has a timer ten times a second.
        assert all(detail.startswith("timer") for kind, detail in new if kind == "waking"), new
    else:
        assert len(new) == 1, "it neither woke nor slept"
    assert client.ask("GET", "key:7") == b"7" * 100, "its connections are kept"
    client.ask("SET", "key:7", "now")
    proc.exec("sh", "-c", "echo now > /tmp/file")

    since = len(kip.events())
    now = rollback(proc, first)
    assert proc.port() == port and now == "before-c1-1"
    woken = [(event["name"], event["detail"]) for event in kip.events()[since:] if event["kind"] == "waking"]
    assert "stop" not in [detail for _, detail in woken], f"what it was is not woken to be ended: {woken}"
    client = Redis(port)
    assert client.ask_all([("GET", f"key:{i}") for i in range(3000)]) == [b"%d" % i * 100 for i in range(3000)]
    assert proc.exec("cat", "/tmp/file").stdout == "then\n"
    client.ask("SET", "key:8", "later")
    # A proc as any other.
    for go in (Proc.sleep, Proc.hibernate):
        go(proc)
        assert client.ask("GET", "key:8") == b"later"
    assert tags(kip, "redis") == [("c1", None, True), ("before-c1-1", "c1", False)]
    assert rollback(proc, now) == "before-before-c1-1-1"
    assert Redis(port).ask_all([("GET", "key:7"), ("GET", "key:8")]) == [b"now", b"8" * 100]
    assert proc.exec("cat", "/tmp/file").stdout == "now\n"
    assert len(kip.names()) == 1
    proc.remove()
    assert on_disk(kip) == []


# promise checkpoints: a checkpoint is cloned as often as is asked for, whatever became of its
#   proc since, and can be removed
def test_clones_of_a_checkpoint(kip: Kip) -> None:
    proc = redis(kip)
    Redis(proc.port()).ask("SET", "key", "then")
    proc.kip.cli("checkpoint", "redis", "--tag", "warm")
    Redis(proc.port()).ask("SET", "key", "now")
    proc.stop()
    made = kip.json("clone", "redis@warm", "copy", "--count", "3")["clones"]
    assert [view["name"] for view in made] == ["copy-1", "copy-2", "copy-3"]
    clients = [Redis(Proc(kip, view["name"]).port()) for view in made]
    assert [client.ask("GET", "key") for client in clients] == [b"then"] * 3
    clients[0].ask("SET", "key", "of a clone")
    assert [event["detail"] for event in kip.events() if event["kind"] == "cloned"][-3:] == ["from redis@warm"] * 3
    kip.cli("checkpoint", "rm", "redis@warm")
    assert tags(kip, "redis") == []
    # They do not need it any more.
    for name in ("copy-1", "copy-2"):
        Proc(kip, name).sleep()
    assert [client.ask("GET", "key") for client in clients] == [b"of a clone", b"then", b"then"]
    # A clone has checkpoints of its own.
    assert tags(kip, "copy-1") == [] and checkpoint(Proc(kip, "copy-1")) == "c1"


# promise checkpoints: `kip checkpoint ls` shows them as a tree: each below the one that its proc
#   had gone on from
def test_a_tree_of_them(kip: Kip) -> None:
    proc = lines(kip)
    for tag in ("a", "b", "c"):
        checkpoint(proc, tag)
    rollback(proc, "a")
    checkpoint(proc, "d")
    assert tags(kip, "lines") == [
        ("a", None, False), ("b", "a", False), ("c", "b", False), ("before-a-1", "c", False), ("d", "a", True),
    ]  # fmt: skip
    shown = kip.cli("checkpoint", "ls", "lines").stdout.splitlines()
    names = [line.split("   ")[0].rstrip() if not line.startswith(" ") else "  " + line.strip().split("   ")[0] for line in shown[1:]]
    assert [name.strip().split()[0] for name in names] == ["lines@a", "lines@b", "lines@c", "lines@before-a-1", "lines@d"]
    depths = [len(line) - len(line.lstrip()) for line in shown[1:]]
    assert depths == [0, 2, 4, 6, 2], "\n".join(shown)
    assert "lines@d *" in shown[-1]


# promise checkpoints: they stay with a proc that is renamed, and its old name's next proc has
#   others
def test_they_stay_with_a_renamed_proc(kip: Kip) -> None:
    proc = lines(kip, "web")
    checkpoint(proc, "old")
    kip.cli("rename", "web", "site")
    site = Proc(kip, "site")
    assert tags(kip, "site") == [("old", None, True)]
    rollback(site, "old")
    # The name that it had is another proc's.
    other = lines(kip, "web")
    assert tags(kip, "web") == [] and checkpoint(other) == "c1"
    site.remove()
    assert tags(kip, "web") == [("c1", None, True)] and len(on_disk(kip)) == 1


# promise checkpoints: they stay when another proc takes the place of theirs (`kip apply`), and a
#   rollback brings back the command of then; the next daemon has them too
def test_they_stay_when_it_is_replaced(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    kip = fresh_kip()
    kip.expected += [*logged.DAEMON_KILLED]
    file, port = tmp_path / "kip.toml", free_port()

    def apply(*more: str) -> Proc:
        command = ["/usr/bin/python3", "-m", "http.server", *more, "8080"]
        file.write_text(f'[proc.site]\ncommand = {json.dumps(command)}\nport = ["{port}:8080"]\nnever-sleep = true\n')
        kip.cli("apply", "--replace", "-f", file)
        wait_for("it listens", lambda: answers(port), 20)
        return Proc(kip, "site")

    site = apply()
    checkpoint(site, "old")
    apply("-b", "0.0.0.0")
    assert tags(kip, "site") == [("old", None, False)] and "-b" in site.inspect()["spec"]["command"]
    assert rollback(site, "old") == "before-old-1"
    assert "-b" not in site.inspect()["spec"]["command"] and answers(port)
    kip.kill()
    kip.up()
    assert tags(kip, "site") == [("old", None, True), ("before-old-1", None, False)]
    rollback(site, "before-old-1")
    assert "-b" in site.inspect()["spec"]["command"] and answers(port)
    site.remove()
    assert on_disk(kip) == []


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return client.recv(4) == b"HTTP"
    except OSError:
        return False


# promise checkpoints: a tag that is used again hides no checkpoint
def test_a_tag_that_is_used_again(kip: Kip) -> None:
    proc = lines(kip)
    assert [checkpoint(proc), checkpoint(proc)] == ["c1", "c2"]
    kip.cli("checkpoint", "rm", "lines@c1")
    assert checkpoint(proc) == "c1"
    shown = kip.cli("checkpoint", "ls").stdout
    assert shown.count("lines@") == 2, shown


# promise checkpoints: a proc whose program ends again and again is rolled back to one that ran
def test_of_one_that_does_not_run(kip: Kip) -> None:
    command = ["sh", "-c", "[ -e /tmp/broken ] && exit 1; exec /usr/bin/python3 /srv/lines.py 8080"]
    proc = kip.run("lines", command, ports=["8080"], flags=[*PROGRAM, "--never-sleep", "--restart", "always"])
    wait_for("it listens", lambda: listens(proc.port()), 20)
    checkpoint(proc, "good")
    proc.exec("sh", "-c", "echo broken > /tmp/broken; kill -9 $(pidof -s python3)", check=False)
    wait_for("it ends again and again", lambda: proc.inspect()["restarts"] >= 3 and proc.state == "restarting", 30)
    before = rollback(proc, "good")
    assert Lines(proc.port()).ask("1 + 1") == "2"
    assert proc.exec("cat", "/tmp/broken", check=False).returncode != 0
    assert before == "before-good-1"


# promise checkpoints: a checkpoint with secrets is not gone back to when the proc has none, or the
#   other way round, for its program has them mounted
def test_secrets_that_came_since(kip: Kip, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    proc = lines(kip, flags=["--secret", f"key={tmp_path / 'key'}"])
    checkpoint(proc, "one")
    (tmp_path / "key").write_text("other")
    rollback(proc, "one")
    assert Lines(proc.port()).ask("open('/run/secrets/key').read()") == "'secret'"
    bare = lines(kip, "bare")
    checkpoint(bare, "one")
    kip.cli("checkpoint", "rm", "lines@one")
    # As `kip apply --replace` leaves them.
    taken = kip.data / "checkpoints" / "bare"
    (taken / "one").rename(kip.data / "checkpoints" / "lines" / "one")
    assert "the proc had no secrets, and it has some now" in kip.refused("rollback", "lines", "--to", "one")
    assert "the proc had no secrets, and it has some now" in kip.refused("clone", "lines@one")


# promise checkpoints: of a proc that is stopped its files are kept: a rollback to them starts it
def test_of_one_that_is_stopped(kip: Kip) -> None:
    proc = redis(kip)
    proc.exec("sh", "-c", "echo good > /tmp/file")
    proc.stop()
    checkpoint(proc, "files")
    assert not kip.json("checkpoint", "ls", "redis")["checkpoints"][0]["has_memory"]
    proc.start(ready=True)
    proc.exec("sh", "-c", "echo bad > /tmp/file")
    proc.stop()
    # Of a program that has ended too, which is what a rollback is wanted for.
    before = rollback(proc, "files")
    wait_for("it listens", lambda: Redis(proc.port()).ask("PING") == "PONG", 20)
    assert proc.exec("cat", "/tmp/file").stdout == "good\n"
    (other,) = kip.json("clone", f"redis@{before}", "other")["clones"]
    assert other["state"] == "running" and Proc(kip, "other").exec("cat", "/tmp/file").stdout == "bad\n"


# promise checkpoints: a daemon that is killed at any step of a checkpoint or a rollback leaves a
#   proc that is what it was, or what it was to be, and nothing half made
@pytest.mark.parametrize("step", ["checkpoint-copied", "checkpoint-published", *one_in(2, PLACED)])
def test_killed_at_step(fresh_kip: Callable[..., Kip], step: str) -> None:
    kip = fresh_kip()
    kip.expected += [*logged.DAEMON_KILLED]
    proc = redis(kip)
    Redis(proc.port()).ask("SET", "key", "then")
    checkpoint(proc, "good")
    Redis(proc.port()).ask("SET", "key", "now")
    kip.kill()
    kip.up("--fault-at", step)
    of_checkpoint = step.startswith("checkpoint")
    kip.cli(*(["checkpoint", "redis", "--tag", "new"] if of_checkpoint else ["rollback", "redis", "--to", "good"]), check=False)
    assert kip.wait_dead(30) == -signal.SIGKILL
    kip.up()
    has_place = step in ("replace-recorded", "replace-switched", "replace-left")
    assert Redis(proc.port()).ask("GET", "key") == (b"then" if has_place else b"now")
    wait_for("the other one is gone", lambda: kip.names() == ["redis"] == sorted({*kip.names()}), 20)
    there = {"good", *(["new"] if step == "checkpoint-published" else [] if of_checkpoint else ["before-good-1"])}
    assert {tag for tag, *_ in tags(kip, "redis")} == there
    assert {Path(path).name for path in on_disk(kip)} == there, "nothing that was begun"
    rollback(proc, "good")
    assert Redis(proc.port()).ask("GET", "key") == b"then"


# promise checkpoints: a proc that is removed while it is rolled back is gone, or was rolled back,
#   and neither command waits for the other for ever
def test_removed_meanwhile(kip: Kip) -> None:
    for after in (0.0, 0.05, 0.1, 0.15, 0.2, 0.3):
        proc = redis(kip)
        checkpoint(proc, "good")
        done = list[int]()
        rolls = Thread(target=lambda done=done: done.append(kip.cli("rollback", "redis", "--to", "good", check=False, timeout=30).returncode))
        rolls.start()
        time.sleep(after)
        removed = kip.cli("rm", "-f", "redis", check=False, timeout=30)
        rolls.join(40)
        assert done and not rolls.is_alive(), "the rollback came to its end"
        assert removed.returncode == 0 or kip.names() == ["redis"], removed.stderr
        wait_for("what was begun is gone", lambda: kip.names() in ([], ["redis"]), 20)
        if kip.names():
            kip.cli("rm", "-f", "redis")
        assert on_disk(kip) == []


# promise checkpoints: what cannot be kept, or gone back to, is refused with one line, and the
#   proc is as it was
def test_refused(kip: Kip, tmp_path: Path) -> None:
    proc = redis(kip)
    client = Redis(proc.port())
    assert "it has none: `kip checkpoint redis` takes one" in kip.refused("rollback", "redis", "--to", "none")
    checkpoint(proc, "one")
    for words, why in [
        (["checkpoint", "redis", "--tag", "one"], "redis has a checkpoint one already"),
        (["checkpoint", "nobody"], "there is no proc"),
        (["checkpoint", "ls", "nobody"], "there is no proc"),
        (["checkpoint", "rm", "redis@two"], "redis has no checkpoint two"),
        (["rollback", "redis", "--to", "oen"], "did you mean one?"),
        (["clone", "redis@two"], "redis has no checkpoint two"),
        (["clone", "redis@one", "--count", "0"], "clones"),
    ]:
        assert why in kip.refused(*words), words
    for words, why in [(["checkpoint", "redis", "--tag", "One"], "checkpoint name"), (["checkpoint", "rm", "redis"], "PROC@TAG")]:
        done = kip.cli(*words, check=False)
        assert done.returncode == 2 and why in done.stderr
    kip.run("writes", ["sleep", "1000"], flags=["-v", f"{tmp_path}:/data"])
    assert f"what is in its volume {tmp_path} at /data would not be of that moment" in kip.refused("checkpoint", "writes")
    # A page that was damaged on the disk.
    pages = max((kip.data / "checkpoints" / "redis" / "one").glob("gen-*/*pages*"), key=lambda path: path.stat().st_size)
    content = bytearray(pages.read_bytes())
    content[5000] ^= 1
    pages.unlink()
    pages.write_bytes(content)
    assert "redis is not rolled back: its checkpoint one is damaged" in kip.refused("rollback", "redis", "--to", "one")
    assert client.ask("PING") == "PONG" and [tag for tag, *_ in tags(kip, "redis")] == ["one"]


# promise checkpoints: clients that connect while a proc is rolled back reach the one or the other
def test_no_client_is_refused(kip: Kip) -> None:
    proc = kip.run("web", ["/usr/bin/python3", "-m", "http.server", "8080"], ports=["8080"], flags=["--never-sleep"])
    port = proc.port()
    wait_for("it listens", lambda: answers(port), 20)
    checkpoint(proc, "good")
    over, refused, answered = Event(), list[OSError](), list[bool]()

    def connect() -> None:
        while not over.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                    client.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    answered.append(client.recv(4) == b"HTTP")
            except ConnectionResetError:
                pass  # It had been connected to the one that went.
            except OSError as error:
                refused.append(error)

    client = Thread(target=connect)
    client.start()
    for _ in range(3):
        rollback(proc, "good")
        assert answers(port)
    over.set()
    client.join()
    assert not refused and answered, refused[:3]


# promise clones: a clone of a stopped proc that is not started has clients when it is
def test_of_a_stopped_one_with_a_command(kip: Kip) -> None:
    proc = redis(kip, flags=["--after-clone", "true"])
    proc.stop()
    checkpoint(proc, "files")
    kip.cli("clone", "redis@files", "other", "--asleep")
    other = Proc(kip, "other")
    assert other.state == "stopped"
    other.start(ready=True)
    wait_for("it answers", lambda: Redis(other.port(), timeout=5).ask("PING") == "PONG", 20)


# promise checkpoints: by `--checkpoint-every` they are taken by themselves, the newest are kept,
#   and none is taken of a proc that has slept all the while
def test_by_themselves(kip: Kip) -> None:
    proc = redis(kip, flags=["--checkpoint-every", "1s", "--checkpoint-keep", "2"])
    checkpoint(proc, "own")
    client, asked = Redis(proc.port()), 0

    def count() -> int:
        return sum(event["kind"] == "checkpointed" and event["detail"].startswith("as every-") for event in kip.events() if event["name"] == "redis")

    while count() < 4:
        asked = client.ask("INCR", "n")
        time.sleep(0.1)
    wait_for("old ones are gone", lambda: len(tags(kip, "redis")) == 3, 5)
    proc.sleep()
    wait_for("that of the sleep", lambda: kip.events()[-1]["kind"] == "checkpointed" and proc.state == "parked", 5)
    taken = count()
    time.sleep(2.5)
    assert count() == taken and proc.state == "parked"
    known = tags(kip, "redis")
    assert known[0][0] == "own" and len(known) == 3 and all(tag.startswith("every-") for tag, *_ in known[1:])
    (other,) = kip.json("clone", f"redis@{known[-1][0]}", "other")["clones"]
    assert int(Redis(other["ports"][0]["host_port"]).ask("GET", "n")) == asked
    said = kip.refused("run", "--name", "x", "--checkpoint-every", "10ms", "-d", "--", "sleep", "1")
    assert "1s is the least" in said
    assert "1 to 100" in kip.refused("run", "--name", "x", "--checkpoint-every", "1s", "--checkpoint-keep", "0", "-d", "--", "sleep", "1")
    said = kip.refused("run", "--name", "x", "--checkpoint-every", "1m", "-v", "data:/data", "-d", "--", "sleep", "1")
    assert "its volume data at /data" in said
