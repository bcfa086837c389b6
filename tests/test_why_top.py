"""`kip why` and `kip top`: what keeps a proc awake, to the socket and the thread; and all procs on one screen."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from harness import servers
from harness.kip import Kip, Proc
from harness.wait import wait_for
from test_api import local

# why


# promise K3: `kip why`: the socket, timer, thread, request or command that keeps a proc awake, or
#   woke it; where each microsecond of the last wake went
# held by: this, `tests/test_why_top.py::test_why_names_the_thread_that_works`,
#   `tests/test_why_top.py::test_why_names_what_exec_runs`,
#   `tests/test_why_top.py::test_why_keeps_nobody_awake_and_wakes_nobody`
# promise command-line: why names the socket: both addresses, the client's own, bytes queued, age of
#   the newest packet (whole seconds), which processes have it open
# held by: this, `kip_insight::why::flows::tests::a_socket_s_flow_is_found_with_its_client_and_age`
def test_why_names_the_connection(kip: Kip, tmp_path: Path) -> None:
    """The socket, its client's own port, what is queued, when the newest packet was, and which process has it open."""
    server = servers.echo()
    proc = kip.run("talk", server.command, ports=server.published, tar=server.tarball(tmp_path))
    with socket.create_connection(("127.0.0.1", proc.port())) as client:
        own = client.getsockname()[1]

        def seen() -> dict[str, Any] | None:
            sent = time.monotonic()
            client.sendall(b"hello\n")
            why = kip.json("why", "talk")
            why["took_ms"] = (time.monotonic() - sent) * 1000
            return why if why["activity"] == "traffic" else None

        why = wait_for("traffic was seen", seen, 30)
        [one] = [s for s in why["seen"]["sockets"] if s["proto"] == "tcp"]
        assert one["client"] == f"127.0.0.1:{own}" and one["state"] == "established", one
        assert one["local"].endswith(":9000") and one["unread"] == 0, one
        assert one["packet_ms"] <= 3000 + why["took_ms"], one
        assert [p["name"] for p in one["programs"]] == ["python3"], one
        assert any(str(own) in line and "python3" in line for line in why["awake_because"]), why
        assert str(own) in kip.cli("why", "talk").stdout
        assert why["quiet_ms"] < why["parks_after_ms"]
    wait_for("no connection is left", lambda: not kip.json("why", "talk")["seen"]["sockets"], 30)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(10)
        sent = time.monotonic()
        client.sendto(b"hello", ("127.0.0.1", proc.port(proto="udp")))
        client.recv(100)
        own = client.getsockname()[1]
        [one] = kip.json("why", "talk")["seen"]["sockets"]
        took_ms = (time.monotonic() - sent) * 1000
    assert (one["proto"], one["state"], one["client"]) == ("udp", "flow", f"127.0.0.1:{own}"), one
    assert one["packet_ms"] <= 3000 + took_ms and [p["name"] for p in one["programs"]] == ["python3"], one


BURNER = """
import ctypes, select, threading
def burn():
    ctypes.CDLL(None).prctl(15, b"burner")  # PR_SET_NAME
    while True: pass
threading.Thread(target=burn, daemon=True).start()
select.poll().poll(3600 * 1000)
"""


# promise command-line: why names the thread: name, id inside, CPU in the last second
# held by: this, `kip_insight::why::inspect::tests::the_thread_that_works_is_named`
# promise command-line: why names timers that are set, and when they are due where the kernel tells
#   that from outside
# held by: this, `kip_insight::why::inspect::tests::timerfds_report_what_is_left`
def test_why_names_the_thread_that_works(kip: Kip) -> None:
    kip.run("hot", ["/usr/bin/python3", "-c", BURNER])

    def seen() -> dict[str, Any] | None:
        why = kip.json("why", "hot")  # the first looks see the interpreter begin
        begun = why["activity"] == "cpu" and why["seen"]["threads"][0]["name"] == "burner"
        # A busy machine gives it a small part of a core in one look; it gets more in another.
        worked = begun and why["seen"]["threads"][0]["cpu_us"] > 0.2 * why["seen"]["watched_us"]
        # When the call ends is not told of a thread that is just being looked at by the scheduler.
        timers = why["seen"]["timers"]
        return why if worked and timers and all(timer["due_ms"] is not None for timer in timers) else None

    why = wait_for("work was seen", seen, 60)
    first = why["seen"]["threads"][0]
    assert first["program"]["name"] == "python3", why
    assert first["tid"] != first["program"]["pid"], "it is not the main thread"
    assert first["cpu_us"] < 1.2 * why["seen"]["watched_us"], why["seen"]
    assert any(f"thread burner (tid {first['tid']})" in line for line in why["awake_because"]), why
    [poll] = [t for t in why["seen"]["timers"] if t["kind"] == "time-out of poll"]
    assert 3_500_000 < poll["due_ms"] <= 3_600_000 and poll["tid"] == poll["program"]["pid"], poll


# promise command-line: why names the programs of `kip exec`
def test_why_names_what_exec_runs(kip: Kip) -> None:
    kip.run("shell", ["sleep", "1000"])
    words = [kip.program, "--data", kip.data, "exec", "shell", "--", "sh", "-c", "sleep 1234; true"]
    with subprocess.Popen(words) as running:
        try:
            names = lambda: [p["name"] for p in kip.json("why", "shell")["seen"]["execs"]]  # noqa: E731
            wait_for("it is named", lambda: names() == ["sh"], 30)
            assert any("`kip exec`: sh (pid " in line for line in kip.json("why", "shell")["awake_because"])
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(10)


# promise command-line: why tells what woke it last and each step in microseconds; asking keeps no
#   proc awake and wakes none
def test_why_keeps_nobody_awake_and_wakes_nobody(kip: Kip, tmp_path: Path) -> None:
    """Asked all the time, a proc falls asleep as if it were not asked, with a client connected; then it sleeps on."""
    server = servers.echo()
    flags = ["--idle", "2s", "--park-after", "2s"]
    proc = kip.run("quiet", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    with socket.create_connection(("127.0.0.1", proc.port())) as client:
        client.sendall(b"hello\n")
        why = wait_for("it sleeps", lambda: (w := kip.json("why", "quiet"))["state"] == "parked" and w, 90)
        for _ in range(20):
            why = kip.json("why", "quiet")
            assert why["state"] == "parked" and why["seen"] is None and why["awake_because"] == [], why
        client.sendall(b"again\n")
        proc.wait_state("running")
    why = kip.json("why", "quiet")
    assert "tcp" in why["last_wake"]["trigger"] and all(step["us"] >= 0 for step in why["last_wake"]["steps"])
    text = kip.cli("why", "quiet").stdout
    assert all(re.search(rf"{re.escape(s['name'])} +{s['us']} us", text) for s in why["last_wake"]["steps"]), text


UNPARKABLE = """
import ctypes, os, time
fd = ctypes.CDLL(None).mq_open(b"/queue", os.O_CREAT | os.O_RDWR, 0o600, None)
print("descriptor", fd, flush=True)
time.sleep(3600)
"""


# promise K3: what stood in the way of a sleep, and when
def test_why_tells_when_a_sleep_was_refused(kip: Kip) -> None:
    proc = kip.run("stuck", ["/usr/bin/python3", "-c", UNPARKABLE])
    wait_for("it has its descriptor", lambda: "descriptor" in proc.logs(), 30)
    assert kip.json("why", "stuck")["cannot_sleep_at_ms"] is None
    begun = time.time() * 1000
    kip.refused("sleep", "stuck", "--to", "parked")
    why = kip.json("why", "stuck")
    assert begun - 1 <= why["cannot_sleep_at_ms"] <= time.time() * 1000, why
    assert why["cannot_sleep"] and any("was refused" in line and " s ago: " in line for line in why["awake_because"])


# Works for ever in a thread of that name, and waits in the other.
WORKS = """
import ctypes, threading
def work():
    ctypes.CDLL(None).prctl(15, b"grinder", 0, 0, 0)
    while True:
        pass
threading.Thread(target=work).start()
"""


# promise waking: a program that was frozen in the middle of work is woken at once, and `kip why`
#   names the thread
# held by: this, `kip_engine::cause::tests::a_wake_for_work_names_the_thread`
def test_the_thread_that_was_at_work_is_named(kip: Kip) -> None:
    proc = kip.run("grinds", ["/usr/bin/python3", "-c", WORKS], flags=["--never-sleep"])
    wait_for("it works", lambda: proc.inspect()["cpu_us"] > 200_000, 20)
    kip.cli("sleep", proc.name, check=False)
    wait_for("it is awake again", lambda: proc.state == "running" and proc.inspect()["wakes"] == 1, 20)
    trigger = kip.json("why", proc.name)["last_wake"]["trigger"]
    assert re.fullmatch(r"timer \(it was at work: thread \d+, grinder\)", trigger), trigger
    assert "grinder" in kip.cli("why", proc.name).stdout


# top


# promise command-line: top: a line for each proc, sorted by tier and memory; sums; memory saved;
#   `--once`, `--json`, without a terminal
# held by: this, `kip_cli::top::compare::tests::procs_are_sorted_and_summed_by_tier`,
#   `kip_cli::top::compare::tests::cpu_is_what_was_used_between`
def test_top_once(kip: Kip) -> None:
    """A line for each proc with its tier; sleepers have given memory back."""
    awake = kip.run("awake", ["sleep", "1000"], flags=["--idle", "1h"])
    asleep = kip.run("asleep", ["sleep", "1001"])
    kip.run("ended", ["sleep", "1002"]).stop()
    asleep.sleep()
    asleep.wake()
    asleep.sleep()
    done = kip.cli("top", "--once", "-d", "0.2")
    assert "\x1b" not in done.stdout
    rows = {words[0]: words for words in map(str.split, done.stdout.splitlines()[4:])}
    assert list(rows) == ["awake", "asleep", "ended"], done.stdout
    assert [row[2] for row in rows.values()] == ["hot", "parked", "-"]
    assert "1 hot, 0 hibernated, 1 parked, 0 archived, 1 stopped" in done.stdout
    assert kip.cli("top", "-d", "0.2").stdout.splitlines()[1:] != [], "without a terminal it ends by itself"
    view = kip.json("top", "-d", "0.2")
    assert view["tiers"] == {"hot": 1, "hibernated": 0, "parked": 1, "archived": 0, "stopped": 1}
    first, second, _ = view["procs"]
    assert first["memory_bytes"] > 0 and first["saved_bytes"] is None and first["cpu_percent"] < 50
    assert second["memory_bytes"] == 0 and second["wakes"] == 1 and second["last_trigger"] == "kip wake"
    assert 0 < second["saved_bytes"] == asleep.inspect()["saved_bytes"]
    assert (view["held_bytes"], view["saved_bytes"]) == (first["memory_bytes"], second["saved_bytes"])
    assert view["wakes_last_minute"] >= 1
    assert awake.state == "running" and asleep.state == "parked", "looking wakes nobody"


FULL = "import time\nhold = bytearray(b'x') * (64 << 20)\nwhile True: time.sleep(1000)"


# promise command-line: memory saved is what sleepers would take if they ran: what they wrote, less
#   what is left in memory, and nothing of files that they only read; top, inspect, dashboard and
#   metrics agree
def test_memory_saved_is_what_a_sleeper_would_take(kip: Kip) -> None:
    full = kip.run("full", ["python3", "-c", FULL], flags=["--idle", "1h", "--park-after", "1h"])
    wait_for("it has filled its memory", lambda: full.inspect()["memory"]["pss_bytes"] > 64 << 20, 30)
    assert full.inspect()["saved_bytes"] is None
    empty = kip.run("empty", ["sleep", "1000"], flags=["--idle", "1h", "--park-after", "1h"])
    for to in (Proc.hibernate, Proc.sleep):
        to(full)
        to(empty)
        seen = full.inspect()
        assert 60 << 20 < seen["saved_bytes"] < 80 << 20, seen
        assert empty.inspect()["saved_bytes"] < 256 << 10, "it wrote next to nothing"
        total = sum(kip.json("inspect", name)["saved_bytes"] for name in ("full", "empty"))
        history = json.loads(local(kip, "GET", "/v1/history")[2])["samples"][-1]["saved_bytes"]
        assert kip.json("top", "-d", "0.2")["saved_bytes"] == total == history
        samples = local(kip, "GET", "/metrics")[2].decode().splitlines()
        assert sum(float(line.split()[-1]) for line in samples if line.startswith("kip_memory_saved_bytes{")) == total


# promise command-line: top fits the terminal, follows its size, respects NO_COLOR, ends on `q` and
#   Ctrl-C and leaves the terminal as it was
# held by: this, `kip_cli::top::layout::tests::triggers_are_cut_and_then_names`,
#   `kip_cli::top::layout::tests::what_does_not_fit_is_counted`
@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_top_gives_the_terminal_back(kip: Kip, key: bytes, colour: bool) -> None:
    """It draws on the alternate screen, as wide as the terminal, and leaves everything as it was."""
    kip.run("a-long-name-" + "x" * 40, ["sleep", "1000"])
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    env = os.environ | {"TERM": "xterm", "NO_COLOR": "" if colour else "1"}
    words = [kip.program, "--data", kip.data, "top", "-d", "0.2"]
    shown = b""

    def read() -> bool:
        nonlocal shown
        while select.select([ours], [], [], 0)[0]:
            shown += os.read(ours, 65536)
        return True

    def drawn(width: int) -> bool:
        lines = [re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", line) for line in shown.split(b"\x1b[H")[-1].split(b"\r\n")]
        return len(lines) == 24 and max(len(line.decode().rstrip()) for line in lines) in range(width - 2, width + 1)

    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True) as top:
        try:
            wait_for("it is drawn", lambda: read() and shown.count(b"\x1b[H") > 3 and drawn(100), 30)
            assert shown.startswith(b"\x1b[?1049h\x1b[?25l") and b"a-long-name-" in shown
            assert (b"\x1b[7m" in shown) == colour
            assert not termios.tcgetattr(theirs)[3] & (termios.ECHO | termios.ICANON)
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 84, 0, 0))
            top.send_signal(signal.SIGWINCH)
            wait_for("it is drawn anew", lambda: read() and drawn(84), 30)
            os.write(ours, b"m")
            wait_for("it is sorted by memory, and says so", lambda: read() and "MEMORY↓" in shown.split(b"\x1b[H")[-1].decode(), 30)
            os.write(ours, b"?")
            wait_for("it shows its help", lambda: read() and b"Sort by" in shown.split(b"\x1b[H")[-1], 30)
            os.write(ours, b"x" + key)
            assert top.wait(10) == 0
        finally:
            top.kill()
    read()
    assert shown.endswith(b"\x1b[?25h\x1b[?1049l")
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


# promise K3: why a hibernated proc that ticks is not parked, and which of its threads ticks
def test_why_says_that_a_sleeper_ticks_in_place(kip: Kip) -> None:
    """A web server of Python looks twice a second whether it is to end: its ticks do not wake it, and it is not parked for them."""
    flags = ["--idle", "1h", "--park-after", "1h"]
    proc = kip.run("ticks", ["python3", "-m", "http.server", "8000"], ports=[8000], flags=flags)
    wakes = proc.hibernate()["wakes"]
    time.sleep(2)
    assert (proc.state, proc.inspect()["wakes"]) == ("hibernated", wakes), "a tick woke it"
    (line,) = kip.json("why", "ticks")["cannot_sleep"]
    thread = r"a thread waits less than --tick \(60 s\) at a time \(thread \d+, python3: 0\.5 s in (e?poll|select)\w*\); parked,"
    assert re.match(thread, line), line
    assert "stays hibernated" in kip.cli("why", "ticks").stdout
