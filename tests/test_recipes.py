"""Each recipe (recipes/NAME) is applied as it is, used by a real client, and sleeps and wakes with its clients and its data."""

from __future__ import annotations

import imaplib
import json
import re
import shutil
import smtplib
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.clients import DnsTcp, Redis, dns_udp, http_get
from harness.kip import Kip, Proc
from harness.rows import one_in
from harness.wait import wait_for

RECIPES = Path(__file__).parents[1] / "recipes"
# What a client does: once before, and once after each sleep of the proc.
Client = Callable[[Proc, Path], Iterator[None]]


def page(path: str, words: bytes) -> Client:
    def ask(proc: Proc, _: Path) -> Iterator[None]:
        port = proc.port(8080)
        while True:
            assert words in http_get(port, path)
            yield

    return ask


def redis(proc: Proc, _: Path) -> Iterator[None]:
    client = Redis(proc.port(6379), timeout=60)
    for count in range(1, 99):
        assert client.ask("INCR", "visits") == count
        yield


def run(*words: str, **options: object) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout.strip()


def postgres(proc: Proc, _: Path) -> Iterator[None]:
    """One session over all sleeps, and a new one after each."""
    words = ["psql", "-h", "127.0.0.1", "-p", str(proc.port(5432)), "-U", "postgres", "-Atq"]
    held = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert held.stdin and held.stdout
    try:
        run(*words, "-c", "create table visits (n int)")
        for count in range(1, 99):
            held.stdin.write("insert into visits values (1); select sum(n) from visits;\n")
            held.stdin.flush()
            assert held.stdout.readline() == f"{count}\n"
            assert run(*words, "-c", "select count(*) from visits") == str(count)
            yield
    finally:
        held.kill()
        held.communicate()


def mariadb(proc: Proc, _: Path) -> Iterator[None]:
    words = ["mariadb", "-h", "127.0.0.1", "-P", str(proc.port(3306)), "-ukip", "-pkip", "-N", "-B", "app", "-e"]
    run(*words, "create table visits (n int)")
    for count in range(1, 99):
        run(*words, "insert into visits values (1)")
        assert run(*words, "select count(*) from visits") == str(count)
        yield


def bind(proc: Proc, _: Path) -> Iterator[None]:
    udp, held = proc.port(53, "udp"), DnsTcp(proc.port(53))
    address = socket.inet_aton("192.0.2.80")
    while True:
        assert dns_udp(udp, "www.kip.example") == [address]
        assert held.ask("www.kip.example") == [address]
        yield


def mail(proc: Proc, _: Path) -> Iterator[None]:
    """A mail goes in by one server of the proc and comes out by the other, in a session that outlives the sleeps."""
    with imaplib.IMAP4("127.0.0.1", proc.port(143), timeout=60) as session:
        session.login("alice", "wonderland")
        for count in range(1, 99):
            with smtplib.SMTP("127.0.0.1", proc.port(25), local_hostname="client.test", timeout=60) as smtp:
                smtp.sendmail("bob@kip.example", ["alice@kip.example"], f"Subject: number {count}\r\n\r\nhello\r\n")

            def there(count: int = count) -> bool:
                return session.select("INBOX")[1] == [str(count).encode()]

            wait_for(f"mail {count} is in the mailbox", there, 60, every=0.1)
            [(_, text)] = session.fetch(str(count), "(RFC822)")[1][:1]
            assert f"number {count}".encode() in text
            yield
        session.logout()


class Chat:
    """A client of the chat server, which is never closed."""

    def __init__(self, port: int, nick: str):
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.lines = self.connection.makefile("r", encoding="utf-8", newline="\r\n")
        self.say(f"NICK {nick}", f"USER {nick} 0 * :{nick}", "JOIN #kip")
        self.hear("366")

    def say(self, *lines: str) -> None:
        self.connection.sendall("".join(f"{line}\r\n" for line in lines).encode())

    def hear(self, words: str) -> str:
        for line in self.lines:
            if line.startswith("PING"):
                self.say(line.rstrip().replace("PING", "PONG", 1))
            if words in line:
                return line
        raise AssertionError(f"closed before {words}")


def irc(proc: Proc, _: Path) -> Iterator[None]:
    port = proc.port(6667)
    alice, bob = Chat(port, "alice"), Chat(port, "bob")
    for count in range(99):
        alice.say(f"PRIVMSG #kip :number {count}.")
        assert f":number {count}." in bob.hear("PRIVMSG")
        yield


def git(proc: Proc, scratch: Path) -> Iterator[None]:
    url = f"http://127.0.0.1:{proc.port(8080)}/git/project.git"
    mine, who = scratch / "mine", ["-c", "user.name=kip", "-c", "user.email=kip@kip.example"]
    run("git", "clone", "--quiet", url, str(mine))
    run("git", "-C", str(mine), "checkout", "--quiet", "-B", "main")
    for count in range(99):
        (mine / "file").write_text(f"version {count}\n")
        run("git", "-C", str(mine), "add", "file")
        run("git", "-C", str(mine), *who, "commit", "--quiet", "-m", f"number {count}")
        run("git", "-C", str(mine), "push", "--quiet", "origin", "main")
        theirs = scratch / f"theirs-{count}"
        run("git", "clone", "--quiet", url, str(theirs))
        assert (theirs / "file").read_text() == f"version {count}\n"
        assert run("git", "-C", str(theirs), "rev-list", "--count", "HEAD") == str(count + 1)
        yield


def notes(proc: Proc, _: Path) -> Iterator[None]:
    url, have = f"http://127.0.0.1:{proc.port(8000)}/notes", []
    for count in range(99):
        have.append(f"note {count}")
        with urllib.request.urlopen(url, data=have[-1].encode(), timeout=60) as answer:
            assert json.load(answer) == have
        assert json.loads(http_get(proc.port(8000), "/notes")) == have
        yield


class Mqtt:
    """A client of MQTT 3.1.1 that is never closed, with as much of it as a message at most once needs."""

    def __init__(self, port: int, name: bytes):
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.send(0x10, self.text(b"MQTT") + b"\x04\x02\x00\x00" + self.text(name))
        assert self.receive() == (0x20, b"\x00\x00")

    @staticmethod
    def text(words: bytes) -> bytes:
        return len(words).to_bytes(2, "big") + words

    def send(self, kind: int, body: bytes) -> None:
        assert len(body) < 128, "lengths of one byte only"
        self.connection.sendall(bytes([kind, len(body)]) + body)

    def receive(self) -> tuple[int, bytes]:
        head = self.connection.recv(2, socket.MSG_WAITALL)
        return head[0], self.connection.recv(head[1], socket.MSG_WAITALL) if head[1] else b""

    def subscribe(self, topic: bytes) -> None:
        self.send(0x82, b"\x00\x01" + self.text(topic) + b"\x00")
        assert self.receive() == (0x90, b"\x00\x01\x00")


def mqtt(proc: Proc, _: Path) -> Iterator[None]:
    port = proc.port(1883)
    listener, speaker = Mqtt(port, b"listener"), Mqtt(port, b"speaker")
    listener.subscribe(b"house/+")
    for count in range(99):
        words = f"number {count}".encode()
        speaker.send(0x30, Mqtt.text(b"house/door") + words)
        assert listener.receive() == (0x30, Mqtt.text(b"house/door") + words)
        yield


CLIENTS: dict[str, Client] = {
    "bind": bind,
    "git": git,
    "irc": irc,
    "lighttpd": page("/", b"readme.txt"),
    "mail": mail,
    "mariadb": mariadb,
    "mqtt": mqtt,
    "nginx": page("/", b"may have been asleep"),
    "node-app": notes,
    "postgres": postgres,
    "python-app": notes,
    "redis": redis,
    "static-site": page("/index.html", b"This site slept"),
}


def test_each_recipe_is_tested_and_listed() -> None:
    there = {path.parent.name for path in RECIPES.glob("*/kip.toml")}
    assert there == set(CLIENTS)
    listed = (RECIPES / "README.md").read_text()
    assert all(f"[{name}]({name}/kip.toml)" in listed for name in there)


# promise P15: recipes for common servers: BIND, git over HTTP, an IRC server, lighttpd, postfix
#   with dovecot, mariadb, an MQTT broker, nginx, a Node and a Python application, postgres, redis,
#   a static site; each applied as it is, used by a real client over a sleep of each kind; what is
#   in a database outlives its proc
# held by: this, `tests/test_recipes.py::test_a_database_outlives_its_proc`,
#   `tests/test_recipes.py::test_each_recipe_is_tested_and_listed`
@pytest.mark.parametrize("name", one_in(2, CLIENTS))
def test_a_recipe_serves_sleeps_and_wakes(kip: Kip, tmp_path: Path, name: str) -> None:
    file = str(RECIPES / name / "kip.toml")
    kip.cli("apply", "-f", file, timeout=90)
    proc = Proc(kip, name)
    assert proc.inspect()["ready"] is True
    client = CLIENTS[name](proc, tmp_path)
    next(client)
    proc.hibernate()
    next(client)
    proc.sleep()
    next(client)
    proc.sleep()
    assert [change["action"] for change in kip.json("apply", "-f", file)["changes"]] == ["same"]
    assert proc.state == "parked", "who applies again wakes nobody"
    next(client)
    client.close()
    assert not [event for event in kip.events() if event["name"] == name and event["kind"] == "cold-start"]


@pytest.fixture(autouse=True)
def _no_volume_for_the_next(kip: Kip) -> Iterator[None]:
    yield
    kip.remove_all()
    for volume in kip.json("volume", "ls"):
        kip.cli("volume", "rm", volume["name"])


@pytest.mark.parametrize("name", ["mariadb", "postgres"])
def test_a_database_outlives_its_proc(kip: Kip, tmp_path: Path, name: str) -> None:
    """Other limits make the proc anew, and what is in the database stays; only this machine reaches it."""
    directory = tmp_path / name
    shutil.copytree(RECIPES / name, directory)
    file = directory / "kip.toml"
    kip.cli("apply", "-f", file, timeout=90)
    proc = Proc(kip, name)
    assert proc.inspect()["ports"][0]["host_addr"] == "127.0.0.1"
    if name == "postgres":
        words = ["psql", "-h", "127.0.0.1", "-U", "postgres", "-Atqc"]
    else:
        words = ["mariadb", "--defaults-file=/srv/my.cnf", "-N", "app", "-e"]

    def ask(what: str) -> str:
        return proc.exec(*words, what).stdout.strip()

    ask("create table kept (n int)")
    ask("insert into kept values (7)")
    file.write_text(file.read_text() + 'hostname = "other"\n')
    changed = json.loads(kip.cli("apply", "-f", file, "--replace", "--json", timeout=90).stdout)["changes"]
    assert [(change["action"], change["fields"][0]["field"]) for change in changed] == [("replace", "hostname")]
    assert ask("select n from kept") == "7"


SINKING = ("mqtt", "nginx", "postgres", "redis")


# promise P15: they sink by themselves when no client comes (nginx, redis, postgres and the MQTT
#   broker are tried, with shorter times)
def test_recipes_sink_by_themselves(kip: Kip, tmp_path: Path) -> None:
    """No command sends them to sleep: with shorter times than their own they hibernate and are parked for idleness, with
    clients connected, and serve again. All at once, so that this takes as long as one."""
    clients = {}
    for name in SINKING:
        folder = shutil.copytree(RECIPES / name, tmp_path / name)
        file = folder / "kip.toml"
        # By its owner's word, for clients stay connected and most of them tick.
        sooner = 'idle = "1s"\npark-after = "1s"\nclock = "suspend"'
        text, times = re.subn(r'(?m)^idle = "\w+"$', sooner, file.read_text())
        assert times == 1, f"{name} says when it is idle"
        file.write_text(text)
        kip.cli("apply", "-f", str(file), timeout=90)
        clients[name] = CLIENTS[name](Proc(kip, name), tmp_path)
        next(clients[name])
    for name, client in clients.items():
        view = Proc(kip, name).wait_state("parked", 90)
        assert view["last_sleep"]["cause"] is None, f"{name} was put to sleep for others"
        next(client)
        client.close()
    kinds = {name: [event["kind"] for event in kip.events() if event["name"] == name] for name in SINKING}
    assert all("hibernated" in kinds[name] and "parked" in kinds[name] for name in SINKING), kinds
    assert not any({"refused", "cold-start"} & set(all_of) for all_of in kinds.values()), kinds
