"""`kip check`: a trial says whether a program can sleep, and why not; it is alone; nothing of it is left, however it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import test_natural
from harness import programs
from harness.clients import Redis
from harness.kip import Kip
from harness.wait import wait_for
from test_comeback import AWAKE, ONLY_HERE

REDIS = ["redis-server", "--bind", "*", "--protected-mode", "no", "--save", ""]
# No interface gives what is in such a queue.
QUEUE = """
import ctypes, os, time
rt = ctypes.CDLL("librt.so.1", use_errno=True)
assert rt.mq_open(b"/kept", os.O_RDWR | os.O_CREAT, 0o600, None) >= 0, os.strerror(ctypes.get_errno())
time.sleep(1000)
"""


def checked(kip: Kip, *words: str, code: int = 0) -> dict[str, Any]:
    done = kip.cli("check", "--json", *words, check=False, timeout=120)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout)


def steps(view: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(step["step"], step["tier"]) for step in view["steps"]]


TWICE = [("sleep", "hibernated"), ("wake", "hibernated"), ("sleep", "parked"), ("wake", "parked")]


# promise trials: K4: one like it starts, sleeps and wakes in each tier down to `--to`, with a
#   connection to each of its ports; exit code 1 if it cannot
# held by: this, `tests/test_check.py::test_down_to_the_store`
def test_who_can_sleep(kip: Kip) -> None:
    view = checked(kip, "--port", "6379", "--ready", "tcp:6379", "--", *REDIS)
    assert view["sleeps"] is True and view["pinned"] == []
    assert steps(view) == [("start", None), *TWICE]
    assert all(step["refused"] == [] for step in view["steps"])
    # Redis ticks: its own first touch may wake it before the trial does, and no client waited for
    # that.
    assert all(step["us"] > 0 for step in view["steps"] if (step["step"], step["tier"]) != ("wake", "hibernated"))
    assert view["steps"][3]["bytes"] > 1 << 20
    assert kip.names() == []
    shown = kip.cli("check", "--to", "hibernated", "--", "sleep", "1000").stdout
    assert "It can sleep: it was hibernated and woke as it was.\n" in shown, shown
    assert "Not tried: whether it can be parked: `--to parked` does.\n" in shown, shown
    assert "Can it be cloned: not tried: no trial is cloned: `kip clone` of the proc that runs says it.\n" in shown, shown


# promise trials: what was not tried is said, and is no yes: tiers, moving (tried by `--to
#   archived`), clones; what another machine must have is named
# held by: this, `tests/test_check.py::test_down_to_the_store`
def test_what_was_not_tried_is_said(kip: Kip) -> None:
    """The answer claims nothing that the trial did not do: neither moving nor a tier that is switched off."""
    view = checked(kip, "--hibernate", "off", "--", "sleep", "1000")
    assert view["sleeps"] is True and steps(view) == [("start", None), *TWICE[2:]]
    assert [line.split(":")[0] for line in view["untried"]] == ["whether it can be hibernated", "whether it can be archived"]
    assert view["moves"]["answer"] == "untried" and "--to archived" in view["moves"]["because"][0]
    flags = Path("/proc/cpuinfo").read_text().split("flags\t\t: ")[1].split("\n")[0].split()
    needed = next(line for line in view["moves"]["because"] if "processor needs" in line)
    assert "sse2" in needed or not {"sse2"} & set(flags), needed
    assert any("files of the host" in line for line in view["moves"]["because"]), view
    assert view["clones"] == {"answer": "untried", "because": ["no trial is cloned: `kip clone` of the proc that runs says it"]}
    nothing = kip.refused("check", "--hibernate", "off", "--to", "hibernated", "--", "sleep", "1000")
    assert "nothing would be tried" in nothing and "--to parked" in nothing


def test_down_to_the_store(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    kip = fresh_kip("--store", str(tmp_path / "store"))
    view = checked(kip, "--to", "archived", "--port", "6379", "--ready", "tcp:6379", "--", *REDIS)
    assert steps(view) == [("start", None), *TWICE, ("sleep", "archived"), ("wake", "archived")] and view["sleeps"]
    assert view["untried"] == [] and view["moves"]["answer"] == "yes", view
    assert "came from there when it woke" in view["moves"]["because"][0]


# promise trials: what stands in the way is named, and `run --check` and `apply --check` do not
#   start it
# held by: this, `tests/test_check.py::test_apply_tries_what_it_would_make`
def test_who_cannot_is_told_why_and_is_not_started(kip: Kip) -> None:
    words = ["--", "/usr/bin/python3", "-c", QUEUE]
    view = checked(kip, *words, code=1)
    assert not view["sleeps"]
    refused = {step["tier"]: step["refused"] for step in view["steps"] if step["refused"]}
    assert "parked" in refused and "fd=3 path=/kept" in " ".join(refused["parked"]), view
    assert view["moves"]["answer"] == "no" and "/kept" in view["moves"]["because"][0], view
    assert "cannot be parked: " in kip.cli("check", *words, check=False).stdout
    line = kip.refused("run", "--check", "--name", "queue", *words)
    assert "queue was not started: its trial could not be parked: " in line and "/kept" in line
    assert kip.names() == []


# promise trials: what keeps a program awake, and what only this machine could wake, is found
#   beforehand
# held by: this, of other programs
#   `tests/test_check.py::test_who_cannot_is_told_why_and_is_not_started`
@pytest.mark.parametrize("kind", [*AWAKE, *ONLY_HERE])
def test_what_a_sleep_would_refuse_is_found(fresh_kip: Callable[..., Kip], store: Path, tmp_path: Path, kind: str) -> None:
    kip = fresh_kip("--store", str(store))
    tar = programs.tarball(tmp_path / "odd.tar", {"srv/odd.py": programs.SOURCES / "odd.py"})
    words = ["--to", "archived", "--tar", str(tar), "--port", "7000", "--", "/usr/bin/python3", "/srv/odd.py", kind]
    view = checked(kip, *words, code=1)
    refused = {step["tier"]: step["refused"] for step in view["steps"] if step["refused"]}
    causes = refused.pop("archived" if kind in ONLY_HERE else "parked")
    assert any(re.search({**AWAKE, **ONLY_HERE}[kind], cause) for cause in causes), causes
    assert kind in AWAKE or not refused, refused


# promise trials: the answer is that of a sleep: gunicorn, uvicorn, Node, HAProxy, Jetty, RabbitMQ,
#   redis, celery, APScheduler, schedule, node-cron and cron
# held by: in the soak: this
@pytest.mark.soak
@pytest.mark.parametrize("name", test_natural.LONG)
def test_the_answer_is_that_of_a_sleep(kip: Kip, tmp_path: Path, name: str) -> None:
    """What the trial says is what the program meets in a proc, in each tier."""
    natural = test_natural.LONG[name]
    words = ["--port", str(natural.port), "--ready", f"tcp:{natural.port}"] if natural.port else []
    if natural.files:
        words += ["--tar", str(programs.tarball(tmp_path / f"{name}.tar", natural.files))]
    done = kip.cli("check", "--json", *words, "--", *natural.command, check=False, timeout=120)
    view = json.loads(done.stdout)
    refused = {step["tier"]: step["refused"] for step in view["steps"] if step["refused"]}
    proc = test_natural.start(kip, natural, tmp_path)
    for tier in ("hibernated", "parked"):
        done = kip.cli("sleep", proc.name, "--to", tier, check=False)
        assert (done.returncode != 0) == (tier in refused), (tier, done.stderr, view)
        assert not refused or any(cause in done.stderr for cause in refused[tier]), (done.stderr, refused)
        proc.wake()
    assert view["sleeps"] == (not refused), view


# promise trials: `run --check` starts what can
def test_run_starts_what_can(kip: Kip) -> None:
    kip.cli("run", "--check", "--name", "cache", "--port", "6379", "--ready", "tcp:6379", "--", *REDIS, timeout=120)
    assert kip.names() == ["cache"]
    port = kip.json("inspect", "cache")["ports"][0]["host_port"]
    assert Redis(port).ask("PING") == "PONG"


# promise trials: a program that ends or does not become ready is told
def test_a_program_that_ends_is_told(kip: Kip) -> None:
    view = checked(kip, "--", "/bin/sh", "-c", "exit 3", code=1)
    assert not view["sleeps"] and view["steps"][0]["refused"], view
    view = checked(kip, "--port", "8080", "--ready", "tcp:8080", "--ready-timeout", "300ms", "--", "sleep", "100", code=1)
    assert "was not ready" in view["steps"][0]["refused"][0], view
    assert kip.names() == []


LATE = """
import ctypes, os, socket, time
time.sleep(1.5)
listener = socket.create_server(("", 8080), backlog=200)
rt = ctypes.CDLL("librt.so.1", use_errno=True)
held = []
while True:
    held.append(listener.accept()[0])
    # No interface gives what is in such a queue.
    if len(held) == FROM:
        assert rt.mq_open(b"/kept", os.O_RDWR | os.O_CREAT, 0o600, None) >= 0
"""


# promise trials: a trial begins when the program has begun: it listens on the TCP ports that it
#   declares, and is quiet; one that does not listen is told
def test_one_that_begins_late_is_tried_when_it_has_begun(kip: Kip) -> None:
    """Only its port tells when the program is ready. It cannot sleep once it has served a client."""
    view = checked(kip, "--port", "8080", "--", "/usr/bin/python3", "-c", LATE.replace("FROM", "1"), code=1)
    assert "/kept" in " ".join(line for step in view["steps"] for line in step["refused"]), view
    silent = checked(kip, "--port", "8080", "--", "sleep", "1000", code=1)
    assert silent["steps"][0]["refused"][0] == "its program does not listen on tcp port 8080 within 20 s", silent


# promise trials: 64 connections to each TCP port are open over each sleep, if the server takes them
def test_many_connections_are_open_when_it_sleeps(kip: Kip) -> None:
    """With one it could sleep."""
    view = checked(kip, "--port", "8080", "--", "/usr/bin/python3", "-c", LATE.replace("FROM", "60"), code=1)
    assert "/kept" in " ".join(line for step in view["steps"] for line in step["refused"]), view
    for engine in ("", "THREADS"):
        program = SERVES if engine else SERVES.replace("Threading", "")
        view = checked(kip, "--port", "8080", "--", "/usr/bin/python3", "-c", program)
        assert view["sleeps"], (engine, view)


SERVES = """
import socketserver
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)
socketserver.ThreadingTCPServer.daemon_threads = True
socketserver.ThreadingTCPServer(("", 8080), Echo).serve_forever()
"""
# One answers and closes, one greets and waits.
SAYS = """
import socket, threading, time
listener = socket.create_server(("", 8080), backlog=200)
held = []
while True:
    connection, _ = listener.accept()
    connection.sendall(b"hello")
    held.append(connection)
    if CLOSES:
        held.pop().close()
"""


# promise trials: a server that closes silent connections while it is awake is not blamed for it,
#   and the trial says so
def test_a_server_that_closes_is_no_no(kip: Kip) -> None:
    """A daytime server: it answers and closes, asleep or not."""
    view = checked(kip, "--port", "8080", "--", "/usr/bin/python3", "-c", SAYS.replace("CLOSES", "True"))
    assert view["sleeps"], view
    assert any("tcp port 8080 survives a sleep: awake, too, the program closes" in line for line in view["untried"]), view
    assert checked(kip, "--port", "8080", "--", "/usr/bin/python3", "-c", SAYS.replace("CLOSES", "False"))["sleeps"]


# promise trials: volumes are not written to unless `--use-volumes` allows it, and never those of a
#   proc that is not stopped; what ties a proc to its machine is named
# held by: this, `tests/test_check.py::test_a_volume_that_somebody_has_is_left_alone`
def test_volumes_are_not_written_to_unasked(kip: Kip, tmp_path: Path) -> None:
    volume = ["-v", f"{tmp_path}:/data"]
    line = kip.refused("check", *volume, "--", "/bin/sh", "-c", "echo x > /data/x; sleep 1000")
    assert f"would write to the volume {tmp_path} at /data" in line and "--use-volumes" in line
    assert not list(tmp_path.iterdir())
    view = checked(kip, "--use-volumes", *volume, "--", "/bin/sh", "-c", "echo x > /data/x; sleep 1000")
    assert view["pinned"] == [f"the volume {tmp_path} at /data is here"] and (tmp_path / "x").exists()
    assert view["moves"] == {"answer": "no", "because": view["pinned"]}
    assert any("copies of it would all write to the volume" in line for line in view["clones"]["because"]), view


def test_a_volume_that_somebody_has_is_left_alone(kip: Kip, tmp_path: Path) -> None:
    """Two databases on one directory: the trial would be the second, be the first awake or asleep."""
    (tmp_path / "below").mkdir()
    db = kip.run("db", ["sleep", "1000"], flags=["-v", f"{tmp_path}:/data", "-v", "kept:/kept"])
    (link := tmp_path.parent / f"{tmp_path.name}-link").symlink_to(tmp_path)
    for volume in (f"{tmp_path}:/data", f"{tmp_path}/below:/data", f"{link}:/data", f"{link}/below:/data", "kept:/other"):
        line = kip.refused("check", "--use-volumes", "-v", volume, "--", "sleep", "1000")
        assert "which db has" in line and "kip stop db" in line, line
    db.sleep()
    kip.refused("run", "--check", "--use-volumes", "-v", "kept:/x", "--name", "second", "--", "sleep", "1000")
    file = tmp_path / "kip.toml"
    file.write_text('[proc.db]\ncommand = ["sleep", "2000"]\nvolume = ["kept:/kept"]\n')
    done = kip.cli("apply", "--replace", "--check", "--use-volumes", "-f", file, check=False, timeout=120)
    assert done.returncode == 1 and "which db has" in done.stderr, done.stderr
    assert kip.names() == ["db"] and db.inspect()["spec"]["command"] == ["sleep", "1000"]
    assert checked(kip, "-v", f"{tmp_path}:/data:ro", "--", "sleep", "1000")["sleeps"], "it only looks"
    db.stop()
    assert checked(kip, "--use-volumes", "-v", "kept:/x", "--", "sleep", "1000")["sleeps"]


# Dials whatever it is told to, once, and then serves what came of it.
DIALS = '''
import http.server, socket, sys
said = []
for to in sys.argv[1:]:
    host, port = to.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), 5) as s:
            s.sendall(b"from the trial")
        said.append("reached")
    except OSError as e:
        said.append(type(e).__name__)
open("/data/said", "w").write(" ".join(said) + "\\n" + open("/etc/hosts").read())
own = socket.create_server(("127.0.0.1", 80))
socket.create_connection(("127.0.0.1", 80)).close()
own.close()
http.server.HTTPServer(("", 80), http.server.BaseHTTPRequestHandler).serve_forever()
'''


# Prints /etc/hosts as often as it changes.
HOSTS = """
import time
before = None
while True:
    with open("/etc/hosts") as file:
        now = file.read()
    if now != before:
        print(now, flush=True)
    before = now
    time.sleep(0.1)
"""


# promise trials: a trial is alone: it reaches neither procs nor the host nor the outside, is found
#   by no other, and has loopback and its own ports; `--with-network` lets it reach what the proc
#   would
# held by: this,
#   `crates/net/tests/reach.rs::who_is_alone_reaches_nobody_and_is_reached_by_the_host_only`
def test_a_trial_is_alone(kip: Kip, tmp_path: Path) -> None:
    """It does not dial the live database, by its address or by the host's port, and those of the network do not hear of it."""
    os.chmod(tmp_path, 0o777)
    listen = "import socket, time; s = socket.create_server(('', 5432)); print(s.accept()[0].recv(99), flush=True); time.sleep(1000)"
    flags = ["--network", "live", "--ready", "tcp:5432"]
    db = kip.run("db", ["/usr/bin/python3", "-c", listen.replace("print", "s.accept(); print")], ports=["5432"], flags=flags)
    peer = kip.run("peer", ["/usr/bin/python3", "-c", HOSTS], flags=["--network", "live"])
    to = [f"{db.address(5432)}:5432", f"{kip_gateway(db)}:{db.port(5432)}"]
    words = ["--use-volumes", "-v", f"{tmp_path}:/data", "--network", "live", "--port", "80", "--ready", "tcp:80"]
    words += ["--", "/usr/bin/python3", "-c", DIALS, *to]
    view = checked(kip, *words)
    assert view["sleeps"] is True, view
    said, _, hosts = (tmp_path / "said").read_text().partition("\n")
    assert "reached" not in said and len(said.split()) == 2, said
    assert "from the trial" not in db.logs() and "db" not in hosts
    assert "trial-" not in peer.logs()
    view = checked(kip, "--with-network", *words)
    said, _, hosts = (tmp_path / "said").read_text().partition("\n")
    assert said == "reached reached" and "db" in hosts, (said, hosts, view)
    wait_for("it was reached", lambda: "from the trial" in db.logs())
    wait_for("the peer has heard of it", lambda: "trial-" in peer.logs())
    peer.remove()
    # If the program cannot start so, the refusal says what to do.
    view = checked(kip, "--", "/usr/bin/python3", "-c", f"import socket; socket.create_connection(('{db.address(5432)}', 5432), 5)", code=1)
    assert any("--with-network" in line for line in view["steps"][0]["refused"]), view


def kip_gateway(proc: Any) -> str:
    """The host as a proc sees it."""
    routes = [line.split() for line in proc.exec("cat", "/proc/net/route").stdout.splitlines()]
    raw = bytes.fromhex(next(r[2] for r in routes[1:] if r[1] == "00000000"))
    return ".".join(str(byte) for byte in reversed(raw))


# promise trials: nothing of a trial is left, be the client or the daemon killed in its middle
@pytest.mark.parametrize("who", ["client", "daemon"])
def test_nothing_is_left_of_one_that_is_cut_off(fresh_kip: Callable[..., Kip], who: str) -> None:
    kip = fresh_kip()
    words = [kip.program, "--data", str(kip.data), "check", "--", *REDIS]
    client = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for("the trial is there", kip.names, 20)
    if who == "client":
        client.kill()
    else:
        kip.kill()
    client.wait(20)
    if who == "daemon":
        kip.up()
    wait_for("it is gone", lambda: kip.names() == [], 20)
    assert not list((kip.data / "procs").glob("trial-*"))


def test_apply_tries_what_it_would_make(kip: Kip, tmp_path: Path) -> None:
    file = tmp_path / "kip.toml"
    table = "[proc.{}]\ncommand = {}\n"
    file.write_text(table.format("good", '["sleep", "1000"]') + table.format("queue", json.dumps(["/usr/bin/python3", "-c", QUEUE])))
    done = kip.cli("apply", "--check", "-f", file, check=False, timeout=120)
    assert done.returncode == 1 and "queue was not started: its trial could not be parked" in done.stderr, done.stderr
    assert f"{file}:3" in done.stderr and kip.names() == ["good"]


# promise trials: K10: `--idle-dry-run` stays awake and tells when it would have slept, for what it
#   would have woken, and how much of the time that is
# held by: this, `kip_supervisor::idle::tests::a_dry_run_adds_up_what_it_would_have_slept`
def test_a_dry_run_tells_when_it_would_have_slept_and_stays_awake(kip: Kip) -> None:
    flags = ["--idle", "1s", "--park-after", "1s", "--idle-dry-run"]
    proc = kip.run("dry", REDIS, ports=["6379"], flags=flags)

    def told(kind: str) -> list[dict[str, Any]]:
        return [event for event in kip.events() if event["kind"] == kind and event["name"] == "dry"]

    wait_for("it would sleep", lambda: told("would-sleep"), 20)
    assert Redis(proc.port(6379)).ask("SET", "a", "1") == "OK"
    wait_for("it would wake", lambda: told("would-wake"), 20)
    wait_for("it would sleep again", lambda: len(told("would-sleep")) == 2, 20)
    assert re.search(r"hibernated, idle [1-9]\d*\.", told("would-sleep")[0]["detail"]), told("would-sleep")
    assert "for data that it received or sent" in told("would-wake")[0]["detail"]
    view = proc.inspect()
    assert (view["state"], view["wakes"], view["last_sleep"]) == ("running", 0, None)
    lines = kip.json("why", "dry")["awake_because"]
    assert any("the proc would have slept 2 times" in line for line in lines), lines
    proc.sleep()
    both = kip.cli("run", "--idle-dry-run", "--never-sleep", "--", "true", check=False)
    assert both.returncode == 2 and "cannot be used with" in both.stderr, both.stderr
