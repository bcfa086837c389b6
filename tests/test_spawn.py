"""Procs by spawn: each that waits is told once how a proc has ended, or why there is no exit status, through kills of the daemon."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness import logged
from harness.clients import listens
from harness.kip import Kip, Proc
from harness.programs import SOURCES, tarball
from harness.wait import wait_for
from test_recovery import RECOVERING
from test_runtime import SDK, ask

SPAWN_STEPS = ["spawn-recorded", "spawn-begun", "spawn-started", "spawn-evicted", "spawn-ended", "spawn-end-kept"]


class Api:
    """A connection of one's own."""

    def __init__(self, kip: Kip):
        self.connection = http.client.HTTPConnection("kip", timeout=120)
        self.connection.sock = socket.socket(socket.AF_UNIX)
        self.connection.sock.settimeout(120)
        self.connection.sock.connect(str(kip.data / "run" / "api.sock"))

    def ask(self, method: str, path: str, body: object = None) -> Any:
        self.connection.request(method, path, None if body is None else json.dumps(body))
        answer = self.connection.getresponse()
        text = answer.read()
        assert answer.status < 300, (method, path, answer.status, text)
        return json.loads(text)


def spawn(kip: Kip, *words: str) -> str:
    return kip.cli("spawn", *words).stdout.strip()


def view(kip: Kip, name: str) -> dict[str, Any]:
    return json.loads(kip.get(f"/v1/spawned/{name}")[1])


def end(kip: Kip, name: str) -> dict[str, Any]:
    status, body = kip.get(f"/v1/spawned/{name}?wait=exit&within_ms=30000")
    assert status == 200, body
    assert "end" in json.loads(body), body
    return json.loads(body)["end"]


def gone(kip: Kip, *names: str) -> None:
    """Nothing is left of them but their ends."""
    wait_for("their procs are removed", lambda: not set(kip.names()) & set(names) and not any((kip.data / "procs" / name).exists() for name in names))


# promise spawn: `kip spawn` prints a name once the program was executed; `--wait` exits with its
#   code; the end says exit code, signal, or why there is none; the proc's directory is gone then
def test_ends(kip: Kip) -> None:
    name = spawn(kip, "--env", "A=b c", "--workdir", "/tmp", "--", "/bin/sh", "-c", 'test "$A $PWD" = "b c /tmp" && exit 7')
    assert name.startswith("sh-") and len(name) == len("sh-") + 10
    assert (got := end(kip, name))["why"] == "exited" and got["exit_code"] == 7, got
    done = kip.cli("spawn", "--wait", "sh", "-c", "echo the cause >&2; kill -SEGV $$", check=False)
    assert done.returncode == 128 + signal.SIGSEGV and "signal 11: it last wrote: the cause" in done.stdout, done
    line = kip.refused("spawn", "/no/such/program")
    assert "has not started: never-started: " in line and '"/no/such/program"' in line, line
    full = json.loads(kip.cli("--json", "spawn", "--wait", "--class", "be", "--mem", "64M", "--", "python3", "-c", "x = bytearray(200 << 20)", check=False).stdout)
    assert full["end"]["why"] == "killed" and "out of memory" in full["end"]["message"], full
    ended = {one["name"]: one["end"]["why"] for one in kip.json("procs", "--all")}
    assert ended[name] == "exited" and Counter(ended.values()) == {"exited": 1, "killed": 2, "never-started": 1}, ended
    gone(kip, *ended)
    assert kip.json("procs") == []
    status, body = kip.get("/v1/spawned/sh-0000000000?wait=exit")
    assert status == 404 and "an end is kept for a day" in body
    assert "no failure domain" in kip.refused("spawn", "--domain", "elsewhere", "true")
    assert "64 KiB" in kip.refused("spawn", "true", "x" * 66_000) or "65536" in kip.refused("spawn", "true", "x" * 66_000)
    assert spawn(kip, "--domain", os.uname().nodename, "true")


# promise spawn: a spawned proc is an ordinary one: it sleeps and wakes, has logs and can be looked
#   into; stopped or removed by its owner it has ended, and it never starts again
def test_it_is_an_ordinary_proc(kip: Kip) -> None:
    name = spawn(kip, "--", "sh", "-c", "echo begun; exec sleep 1000")
    wait_for("it has written", lambda: kip.cli("logs", name).stdout == "begun\n")
    kip.cli("sleep", name)
    assert view(kip, name)["tier"] == "parked" and kip.json("procs")[0]["state"] == "live"
    kip.cli("wake", name)
    assert kip.cli("exec", name, "--", "cat", "/proc/1/comm").stdout
    kip.cli("rename", name, "another")
    kip.cli("stop", "another")
    assert (got := end(kip, name))["signal"] == 15, got
    gone(kip, name, "another")
    other = spawn(kip, "sleep", "1000")
    kip.cli("rm", "--force", other)
    assert end(kip, other)["why"] in ("evicted", "killed")


# promise spawn: children end with their parent, asleep or not, and go on if they are detached; a
#   proc that was evicted says why
def test_parents(kip: Kip) -> None:
    kip.run("top", ["sleep", "1000"])
    child = spawn(kip, "--parent", "top", "sleep", "1000")
    below = spawn(kip, "--parent", child, "sleep", "1000")
    apart = spawn(kip, "--parent", child, "--detached", "sleep", "1000")
    # Sleep is not death.
    kip.cli("sleep", child)
    kip.cli("sleep", "top")
    assert {one["name"] for one in kip.json("procs")} == {child, below, apart}
    rows = kip.cli("procs").stdout.splitlines()
    at = [next(n for n, row in enumerate(rows) if row.strip().startswith(name)) for name in ("top", child, below)]
    assert at[0] < at[1] < at[2] and rows[at[1]].startswith("  " + child) and rows[at[2]].startswith("    " + below), rows
    kip.cli("stop", "top")
    assert end(kip, child)["message"] == "its parent top has ended" and end(kip, below)["why"] == "evicted"
    assert view(kip, apart)["state"] == "live"
    assert "it has no program that runs or sleeps" in kip.refused("spawn", "--parent", "top", "true")
    kip.cli("evict", apart, "--reason", "enough", "--grace", "1s")
    assert (got := end(kip, apart))["why"] == "evicted" and (got["signal"], got["message"]) == (15, "enough"), got
    assert "evicted, signal 15: enough" in kip.cli("evict", apart).stdout
    # Another program of the parent's has children of its own.
    kip.cli("start", "top")
    again = spawn(kip, "--parent", "top", "sleep", "1000")
    kip.cli("restart", "top")
    assert end(kip, again)["why"] == "evicted"
    gone(kip, child, below, apart, again)


# promise spawn: a latency-critical proc has what it reserves or waits in the queue, and can be
#   evicted there; best effort reserves nothing and has the kernel's lowest class
def test_classes(kip: Kip) -> None:
    cpus = os.cpu_count() or 1
    first = spawn(kip, "--cpus", str(cpus), "sleep", "1000")
    effort = spawn(kip, "--class", "be", "--cpus", "1", "sleep", "1000")
    second, third = (spawn(kip, "--queue", "--cpus", "0.5", "true") for _ in range(2))
    waits = wait_for("it says what it waits for", lambda: view(kip, second).get("waits_for"))
    assert f"0.5 CPUs: {cpus}.00 of {cpus} are reserved" in waits
    assert view(kip, second)["state"] == "queued" and f"this machine has {cpus}" in kip.refused("spawn", "--cpus", str(cpus + 1), "true")
    group = next(line for line in Path(f"/proc/{Proc(kip, effort).inspect()['pids'][0]}/cgroup").read_text().splitlines() if "cpu" in line.split(":")[1].split(",") or line.startswith("0::/kip"))
    place = Path("/sys/fs/cgroup") / ("" if group.startswith("0::") else "cpu")
    idle = place / group.split(":")[2].lstrip("/") / "cpu.idle"
    assert not idle.exists() or idle.read_text() == "1\n"
    kip.cli("evict", third)
    assert (got := end(kip, third))["why"] == "evicted" and "before it was started" in got["message"], got
    kip.cli("evict", first, "--grace", "0s")
    assert end(kip, second)["exit_code"] == 0
    kip.cli("evict", effort)
    end(kip, effort)


def flood(kip: Kip, count: int, at_once: int) -> None:
    """Spawns them, of which one in a hundred crashes; two wait for each. Each waiter has one answer, and both the right one."""
    for_all = {}

    def one(number: int) -> None:
        api = Api(kip)
        crashes = number % 100 == 7
        command = ["sh", "-c", "kill -SEGV $$" if crashes else f"exit {number % 5}"]
        name = api.ask("POST", "/v1/spawned", {"command": command, "class": "be"})["name"]
        other = Api(kip)
        answers = [each.ask("GET", f"/v1/spawned/{name}?wait=exit")["end"] for each in (api, other)]
        want = (None, 11) if crashes else (number % 5, None)
        assert [(e.get("exit_code"), e.get("signal")) for e in answers] == [want, want], (number, answers)
        for_all[number] = name
        api.connection.close()
        other.connection.close()

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, range(count)))
    assert len(set(for_all.values())) == count
    gone(kip, *for_all.values())
    ends = Counter(one["end"]["why"] for one in kip.json("procs", "--all") if one["name"] in set(for_all.values()))
    assert ends["killed"] == len([n for n in range(count) if n % 100 == 7]) and ends.total() == count, ends


# promise spawn: of 10,000 procs of which one in a hundred crashes each waiter is told once, the
#   right end
# held by: this, `tests/test_spawn.py::test_ten_thousand`
def test_a_hundred(kip: Kip) -> None:
    flood(kip, 110, 16)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_thousand(fresh_kip: Callable[..., Kip]) -> None:
    flood(fresh_kip(), 10_000, 64)


# promise spawn: a daemon that is killed at any step of a proc by spawn loses none, starts none
#   twice, and leaves none without a parent; each waiter is told once
@pytest.mark.parametrize("step", SPAWN_STEPS)
def test_killed_at_each_step(fresh_kip: Callable[..., Kip], step: str) -> None:
    kip = fresh_kip()
    kip.run("top", ["sleep", "1000"])
    before = [spawn(kip, "--parent", "top", "sh", "-c", "sleep 1000"), spawn(kip, "sh", "-c", "sleep 1; exit 5")]
    kip.expected += [*RECOVERING, *logged.DAEMON_KILLED]
    kip.kill()
    kip.up("--fault-at", step)
    waiting = subprocess.Popen([kip.program, "--data", kip.data, "spawn", "--wait", "sh", "-c", "exit 9"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if step == "spawn-evicted":
        kip.cli("evict", before[0], check=False)
    assert kip.wait_dead(20) == -signal.SIGKILL
    kip.up()
    kip.cli("stop", "top")
    out, error = waiting.communicate(timeout=60)
    # Its own request may have been lost, and then it says so.
    if waiting.returncode == 9:
        assert "exit code 9" in out
    else:
        assert waiting.returncode == 1 and (error.startswith("kip: ") or "lost" in out), (out, error)
    ends = wait_for("all have ended", lambda: (all_ends := kip.json("procs", "--all")) and all("end" in one for one in all_ends) and all_ends, 30)
    by_name = {one["name"]: one["end"] for one in ends}
    assert by_name[before[0]]["why"] == "evicted" and (by_name[before[1]]["why"], by_name[before[1]]["exit_code"]) == ("exited", 5), by_name
    # One whose name no client has heard is there all the same.
    for own in by_name.keys() - set(before):
        assert by_name[own]["why"] in ("exited", "lost") and by_name[own].get("exit_code", 9) == 9, by_name
        assert (by_name[own]["why"] == "exited") or step in ("spawn-recorded", "spawn-begun", "spawn-started", "spawn-evicted"), by_name
    assert len(by_name) == 3 or step == "spawn-evicted", by_name
    gone(kip, *by_name)
    kept = [json.loads(line) for line in kip.cli("events", "--json").stdout.splitlines()]
    starts = Counter(event["name"] for event in kept if event["kind"] == "started")
    assert all(starts[name] <= 1 for name in by_name), starts


# promise spawn: after the machine was restarted a proc by spawn that slept goes on, and of one
#   that ran each waiter is told that it is lost
def test_reboot(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    ran = spawn(kip, "sleep", "1000")
    slept = spawn(kip, "sh", "-c", "sleep 1000; exit 3")
    child = spawn(kip, "--parent", slept, "sleep", "1000")
    kip.cli("sleep", slept)
    kip.reboot()
    assert end(kip, ran)["why"] == "lost" and end(kip, child)["why"] == "lost"
    assert view(kip, slept)["state"] == "live"
    kip.cli("evict", slept)
    assert end(kip, slept)["why"] == "evicted"
    gone(kip, ran, slept, child)


CHILD = (
    "import sys; sys.path.insert(0, '/srv'); import kip; c = kip.Client(); c.started(); "
    "why = c.wait_evict(); c.exited(5, f'{why}, and tidied up'); sys.exit(4)"
)
PARENT = "import kip, asyncio, threading; c = kip.Client(); ends = {}"
# Waits beside the thread that answers.
WAIT = "begin = lambda name: threading.Thread(target=lambda: ends.__setitem__(name, c.wait_exit(name)), daemon=True).start()"


def parent(kip: Kip, tmp_path: Path, *flags: str) -> Proc:
    """A program that carries out lines; its children have the SDK because it is in its image."""
    files = {"srv/lines.py": SOURCES / "lines.py", **{f"srv/kip/{file.name}": file for file in SDK.glob("*.py")}}
    tar = tarball(tmp_path / "parent.tar", files)
    proc = kip.run("parent", ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=["8080"], tar=tar, flags=["--never-sleep", *flags])
    wait_for("it listens", lambda: listens(proc.port()), 20)
    assert ask(proc, PARENT) == "None" and ask(proc, WAIT) == "None"
    return proc


# promise spawn: a program evicts no proc but its children and theirs
# promise spawn: a program spawns children over the runtime socket, as many as its owner allows, and
#   none without that; a child says that it has started and with what status it ends, and is told to
#   end in place of a signal
def test_from_a_program(kip: Kip, tmp_path: Path) -> None:
    proc = parent(kip, tmp_path, "--spawn", "3")
    child = f"['/usr/bin/python3', '-c', {CHILD!r}]"
    assert ask(proc, f"n = c.spawn({child}, says_started=True, env={{'A': 'b'}})") == "None"
    assert ask(proc, "c.wait_start(n).started") == "True"
    name = ask(proc, "n").strip("'")
    assert view(kip, name)["parent"] == "parent" and kip.cli("exec", name, "--", "true").returncode == 0
    assert ask(proc, "a, b = c.spawn(['sleep', '1000']), c.spawn(['sleep', '1000'], detached=True)") == "None"
    refused = ask(proc, "c.spawn(['true'])")
    assert refused.startswith("Unavailable: 3 procs that parent and its children have spawned have not ended"), refused
    other = spawn(kip, "sleep", "1000")
    assert ask(proc, f"c.evict({other!r})").startswith("NotFound: there is no spawned proc") and view(kip, other)["state"] == "live"
    kip.cli("evict", other)
    assert ask(proc, "c.evict(n, 'enough').evicted") == "'enough'"
    assert ask(proc, "c.wait_exit(n)") == "SpawnEnd(why=2, exit_code=4, signal=None, status=5, message='enough, and tidied up')"
    # Waits of tasks go over one connection.
    many = "async def many():\n async with kip.AsyncClient() as a:\n  async def one(i): return (await a.wait_exit(await a.spawn(['sh', '-c', f'exit {i}']))).exit_code\n  return [await asyncio.gather(*(one(i) for i in (7,))) for _ in range(3)]"
    assert ask(proc, f"exec({many!r}, globals())") == "None"
    assert ask(proc, "asyncio.run(globals()['many']())") == "[[7], [7], [7]]"
    # Asked for at the same moment, there are no more than allowed.
    crowd = "import threading; got = []; once = lambda: got.append(type(kip.Client().spawn(['sleep', '1000'])).__name__); threads = [threading.Thread(target=once) for _ in range(6)]"
    assert ask(proc, f"{crowd}; threading.excepthook = lambda e: got.append(e.exc_type.__name__); [t.start() for t in threads]; [t.join() for t in threads]") == "None"
    assert ask(proc, "sorted(got)") == repr(["Unavailable"] * 5 + ["str"])
    first, apart = ask(proc, "a").strip("'"), ask(proc, "b").strip("'")
    kip.cli("stop", "parent")
    assert end(kip, first)["message"] == "its parent parent has ended" and view(kip, apart)["state"] == "live"
    kip.cli("evict", apart)
    kip.cli("rm", "parent")
    denied = parent(kip, tmp_path)
    for call in ("c.spawn(['true'])", "c.evict('x')", "c.wait_exit('x')"):
        assert "allows it by `kip run --spawn N`" in ask(denied, call)
    assert ask(denied, "c.started()").startswith("NotFound: this proc was not spawned")


# promise spawn: a parent that waits sleeps, and the end of its child wakes it; a wait goes on over
#   a daemon that is killed
def test_waits_of_a_sleeper(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    kip = fresh_kip()
    proc = parent(kip, tmp_path, "--spawn", "3")
    names = []
    for _ in range(2):
        assert ask(proc, "n = c.spawn(['sleep', '1000']); begin(n)") == "None"
        names.append(ask(proc, "n").strip("'"))
    wait_for("both live", lambda: all(view(kip, name)["state"] == "live" for name in names))
    proc.sleep()
    kip.cli("evict", names[0], "--reason", "one")
    proc.wait_state("running")
    wait_for("it is told", lambda: names[0] in ask(proc, "list(ends)"))
    proc.sleep()
    kip.expected += RECOVERING
    kip.cli("evict", names[1], "--reason", "two")
    kip.kill()
    kip.up()
    wait_for("it is told", lambda: names[1] in ask(proc, "list(ends)"), 30)
    assert ask(proc, "[ends[n].message for n in ends]") == "['one', 'two']"


def test_waiters_over_a_kill(fresh_kip: Callable[..., Kip]) -> None:
    """Those that wait while the daemon is killed are told by the next one."""
    kip = fresh_kip()
    command = [kip.program, "--data", kip.data, "spawn", "--wait", "sh", "-c", "sleep 1; exit 4"]
    waiting = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    wait_for("all run", lambda: [one["state"] for one in kip.json("procs", "--all")].count("live") == 3)
    kip.expected += RECOVERING
    kip.kill()
    kip.up()
    for each in waiting:
        out, error = each.communicate(timeout=60)
        assert each.returncode == 4 and out.count("exit code 4") == 1, (out, error)


# promise spawn: a child of a light proc is light, and any child may be
def test_light_children(kip: Kip) -> None:
    kip.run("light", ["sleep", "1000"], flags=["--sandbox", "light", "--never-sleep"])
    kip.run("full", ["sleep", "1000"], flags=["--never-sleep"])
    for words, sandbox in ((["--parent", "light"], "light"), (["--parent", "full", "--sandbox", "light"], "light"), (["--parent", "full"], "full")):
        name = kip.cli("spawn", *words, "sleep", "1000").stdout.strip()
        assert kip.json("inspect", name)["spec"].get("sandbox", "full") == sandbox
    line = kip.refused("spawn", "--parent", "light", "--sandbox", "full", "sleep", "1000")
    assert line == "kip: light is light, and so are its children: leave out the sandbox", line
