"""How procs live: they are asked to end as their owner said, and are started again when they end by themselves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import servers, logged
from harness.clients import Redis, listens
from harness.kip import Kip, Proc
from harness.wait import wait_for

# Ends in order at SIGUSR1, and says so.
ENDS_AT_USR1 = 'trap "echo told; exit 7" USR1; trap "" TERM; echo set; while :; do sleep 0.05; done'


def shell(kip: Kip, name: str, script: str, *flags: str) -> Proc:
    return kip.run(name, ["/bin/sh", "-c", script], flags=flags)


def ends_at_usr1(kip: Kip, name: str, *flags: str) -> Proc:
    """It runs, and has said which signals it takes: `kip run` is done before that."""
    proc = shell(kip, name, ENDS_AT_USR1, *flags)
    wait_for("its traps are set", lambda: "set" in proc.logs(), 30)
    return proc


def kinds(kip: Kip, name: str, *wanted: str) -> list[str]:
    return [e["kind"] for e in kip.events() if e["name"] == name and e["kind"] in wanted]


def restarts(proc: Proc, count: int) -> dict[str, object]:
    def reached() -> dict[str, object] | None:
        view = proc.inspect()
        return view if view["restarts"] >= count and view["state"] == "running" else None

    return wait_for(f"{proc.name} was started again {count} times", reached, 30)


def kill_program(proc: Proc) -> None:
    """SIGKILL to the program itself, which is pid 1's child."""
    os.kill(proc.inspect()["pids"][1], signal.SIGKILL)


# To be started again.

# Listens a second after it has begun.
LISTENS_LATE = "import socket, time; time.sleep(1); listener = socket.create_server(('', 8080)); time.sleep(1000)"


# promise life: `kip start --wait-ready` returns when the proc's ports listen; of one that ends
#   before that it says how it ended, and exits with 1
def test_a_start_waits_for_ports(kip: Kip) -> None:
    proc = kip.run("late", ["/usr/bin/python3", "-c", LISTENS_LATE], ports=[8080])
    proc.stop()
    began = time.monotonic()
    proc.start(ready=True)
    socket.create_connection(("127.0.0.1", proc.port()), timeout=20).close()
    assert time.monotonic() - began > 1
    short = kip.run("short", ["sh", "-c", "sleep 0.1; exit 3"], ports=[80], wait_ready=False)
    wait_for("it has ended", lambda: short.state == "stopped", 20)
    failed = kip.cli("start", "--wait-ready", "short", check=False)
    assert failed.returncode == 1 and "port 80" in failed.stderr and failed.stderr.count("\n") == 1, failed.stderr


# To be ended.


# promise life: `kip stop`, `kip down` send the proc's own stop signal and give it its own grace (10
#   s by default) before SIGKILL; `kip stop --grace` overrides it. A sleeper is woken for that, from
#   whatever tier; with a grace of 0 it is ended as it sleeps
# held by: this, `tests/test_life.py::test_its_grace_is_what_its_owner_said`
@pytest.mark.parametrize("tier", ["hot", "hibernated", "parked"])
def test_a_program_gets_its_own_stop_signal_asleep_or_not(kip: Kip, tier: str) -> None:
    proc = ends_at_usr1(kip, f"usr1-{tier}", "--stop-signal", "SIGUSR1", "--stop-grace", "20s")
    if tier == "hibernated":
        proc.hibernate()
    elif tier == "parked":
        proc.sleep()
    proc.stop()
    view = proc.inspect()
    assert (view["state"], view["exit"], view["restarts"]) == ("stopped", "exit code 7", 0)
    assert "told" in proc.logs()
    assert (view["spec"]["stop_signal"], view["spec"]["stop_grace_ms"]) == ("SIGUSR1", 20_000)


def test_its_grace_is_what_its_owner_said(kip: Kip) -> None:
    proc = ends_at_usr1(kip, "deaf", "--stop-grace", "300ms", "--restart", "always")
    begun = time.monotonic()
    proc.stop()
    assert 0.3 <= time.monotonic() - begun < 9, "10 s are the default"
    assert (proc.state, proc.inspect()["exit"]) == ("stopped", "signal 9")
    assert "stop grace" in kip.cli("inspect", "deaf").stdout
    proc.start()
    kip.cli("stop", "deaf", "--grace", "0s")
    assert proc.inspect()["exit"] == "signal 9"


def test_wrong_policies_are_usage_errors(kip: Kip) -> None:
    for words in (["--restart", "often"], ["--restart", "on-failure:0"], ["--stop-grace", "soon"]):
        done = kip.cli("run", *words, "--", "true", check=False)
        assert done.returncode == 2 and words[0] in done.stderr, done.stderr


# To be started again.


# promise life: a program that ends by itself is started again as its policy says, with its files,
#   name, address and host ports, after 100 ms, then twice as long each time up to 30 s; a run of 10
#   s begins anew; `on-failure:MAX` counts starts in a row
# held by: this, `tests/test_life.py::test_failures_are_counted_and_the_pause_doubles`,
#   `tests/test_life.py::test_who_ends_well_stays_stopped_unless_always`,
#   `kip_types::life::tests::the_pause_doubles_up_to_its_bound`,
#   `kip_types::life::tests::who_is_started_again`
def test_a_killed_redis_is_there_again_with_its_files_and_ports(kip: Kip, tmp_path: Path) -> None:
    server = servers.redis()
    flags = [*server.flags, "--restart", "always"]
    proc = kip.run("redis", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=flags)
    before = proc.inspect()
    client = Redis(proc.port())
    assert client.ask("SET", "a", "b") == "OK"
    client.ask("SAVE")
    kill_program(proc)
    after = restarts(proc, 1)
    assert after["ports"] == before["ports"] and after["restarts"] == 1
    wait_for("redis answers", lambda: answers(proc.port()))
    assert Redis(proc.port()).ask("GET", "a") == b"b"
    assert kinds(kip, "redis", "exited", "restarting", "started") == ["started", "exited", "restarting", "started"]
    # It sleeps and wakes as before, and one that is killed asleep in the middle of it comes back
    # too.
    proc.sleep()
    assert Redis(proc.port()).ask("GET", "a") == b"b"
    kill_program(proc)
    assert restarts(proc, 2)["generation"] == 0
    wait_for("redis answers", lambda: answers(proc.port()))
    assert Redis(proc.port()).ask("GET", "a") == b"b"


def answers(port: int) -> bool:
    try:
        return bool(Redis(port).ask("PING"))
    except OSError:
        return False


def test_failures_are_counted_and_the_pause_doubles(kip: Kip) -> None:
    proc = shell(kip, "fails", "echo run; exit 3", "--restart", "on-failure:3")
    view = proc.wait_state("stopped")
    assert (view["exit"], view["restarts"], view["next_start_ms"]) == ("exit code 3", 3, None)
    assert proc.logs().count("run") == 4
    starts = [e["at_ms"] for e in kip.events() if e["name"] == "fails" and e["kind"] == "started"]
    pauses = [later - earlier for earlier, later in zip(starts, starts[1:], strict=False)]
    for pause, least in zip(pauses, (100, 200, 400), strict=True):
        assert least <= pause < least + 3000, pauses
    # Its owner starts it: it counts anew.
    proc.start()
    assert proc.wait_state("stopped")["restarts"] == 3


def test_who_ends_well_stays_stopped_unless_always(kip: Kip) -> None:
    proc = shell(kip, "well", "exit 0", "--restart", "on-failure")
    assert proc.wait_state("stopped")["restarts"] == 0
    # The program itself ends well three times, and then goes on.
    script = "echo x >> /tmp/runs; [ $(wc -l < /tmp/runs) -lt 3 ] || exec sleep 1000"
    proc = shell(kip, "always", script, "--restart", "always")
    assert restarts(proc, 2)["restarts"] == 2


def test_how_it_ended_is_known_even_if_it_is_stopped_just_then(kip: Kip) -> None:
    ends = set()
    for ms in range(60):
        proc = shell(kip, "ends", f"sleep {ms / 3000:.4f}; exit 7")
        kip.cli("stop", "ends")
        ends.add(proc.inspect()["exit"])
        proc.remove()
    # By itself, or by the signal that stop sends.
    assert ends <= {"exit code 7", "signal 15"}
    assert not any("parked" in e["detail"] for e in kip.events() if e["name"] == "ends")


# promise life: meanwhile it is `restarting`: `ps` and `inspect` say when and how often, its ports
#   stay its own, `kip start` starts it at once and `kip stop` ends it for good
# held by: this, `tests/test_life.py::test_its_port_is_nobody_elses_while_it_waits`
def test_while_it_waits_it_is_seen_and_can_be_stopped_started_and_removed(kip: Kip) -> None:
    # Ends at once until the pause is long enough to look at.
    proc = shell(kip, "waits", "exit 1", "--restart", "always")

    def waits() -> dict[str, object] | None:
        view = proc.inspect()
        return view if (view["next_start_ms"] or 0) > 2500 else None

    view = wait_for("the pause is long", waits, 30)
    assert view["state"] == "restarting" and view["exit"] == "exit code 1" and view["tier"] is None
    assert "restarting in " in kip.cli("ps").stdout and "next start" in kip.cli("inspect", "waits").stdout
    for words in (["wake", "waits"], ["sleep", "waits"], ["exec", "waits", "true"], ["rm", "waits"]):
        assert "restarting" in kip.refused(*words)
    proc.start()
    assert proc.inspect()["restarts"] < view["restarts"], "it counts anew"
    wait_for("it has ended again", lambda: proc.inspect()["exit"])
    kip.cli("stop", "waits")
    assert (proc.state, proc.inspect()["exit"]) == ("stopped", "exit code 1")
    ended = len(kinds(kip, "waits", "started"))
    proc.start()
    wait_for("it waits again", lambda: proc.state == "restarting")
    proc.remove()
    assert len(kinds(kip, "waits", "started")) > ended and "waits" not in kip.names()


def test_its_port_is_nobody_elses_while_it_waits(kip: Kip) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    proc = kip.run("holder", ["/bin/sh", "-c", "exit 1"], ports=[f"{port}:80"], flags=["--restart", "always"], wait_ready=False)
    wait_for("it waits", lambda: (proc.inspect()["next_start_ms"] or 0) > 300, 30)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    assert f"taken by proc {proc.name}" in kip.refused("run", "--port", f"{port}:80", "--", "sleep", "9")


# Files of variables.


# promise life: environment files as docker has them; errors name file and line, never a value
# held by: this, `kip_describe::env_file::tests::lines_are_taken_as_they_stand`,
#   `kip_describe::env_file::tests::what_is_wrong_is_told_with_its_line_and_without_values`
def test_variables_come_from_files(kip: Kip, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("# of the site\nA=1\nB=a b=c\n\nHOME_OF\nD=first\n")
    second.write_text("D=second\nE=file\n")
    flags = ["--env-file", str(first), "--env-file", str(second), "--env", "E=flag"]
    proc = shell(kip, "env", 'echo "$A|$B|$D|$E|${HOME_OF-unset}"; exec sleep 1000', *flags)
    wait_for("it has said so", lambda: "1|a b=c|second|flag|unset" in proc.logs())
    spec = proc.inspect()["spec"]
    assert set(spec["env"]) == {"A", "B", "D", "E", "HOME_OF"} & set(spec["env"]) >= {"A", "B", "D", "E"}
    assert not any([*spec["env"].values(), *spec["asked"]["spec"]["env"].values()]), "names, and no values"
    first.write_text("A=1\nB C=hidden\n")
    said = kip.refused("run", "--env-file", str(first), "--", "true")
    assert "line 2" in said and str(first) in said and "hidden" not in said
    assert "none.env" in kip.refused("run", "--env-file", str(tmp_path / "none.env"), "--", "true")


# To be ready.

SLOW = """
import http.server, os, socketserver, sys, time
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if os.path.exists("/tmp/ready") else 503)
        self.end_headers()
time.sleep(float(sys.argv[1]))
http.server.HTTPServer(("", 8080), H).serve_forever()
"""


def slow(kip: Kip, name: str, seconds: float, *flags: str, check: bool = True) -> tuple[Proc, str]:
    """Listens after so long, and says 200 once /tmp/ready is there; and what `kip run` said."""
    words = ["run", "--name", name, "--port", "8080", *flags, "--", "/usr/bin/python3", "-c", SLOW, str(seconds)]
    done = kip.cli(*words, check=check)
    return Proc(kip, name), done.stderr


# promise life: `--ready tcp:PORT`, `http:PORT/PATH` (a status from 200 to 399), `exec:COMMAND`:
#   `kip run` returns when that is so; until then `ps` and `inspect` say `starting`, and it does not
#   sleep. `kip wait NAME --ready` waits for it and wakes no proc
# held by: this, `kip_types::life::tests::reads_checks_and_writes_them_the_same`
def test_run_returns_when_it_takes_connections(kip: Kip) -> None:
    proc, _ = slow(kip, "tcp", 0.7, "--ready", "tcp:8080", "--idle", "100ms")
    assert listens(proc.port())
    view = proc.inspect()
    assert view["ready"] is True and kinds(kip, "tcp", "parked", "started", "ready", "hibernated") [:2] == ["started", "ready"]
    assert "tcp is ready" in kip.cli("wait", "tcp", "--ready").stdout
    # That it is ready is known of a sleeper, and asking does not wake it.
    wakes = proc.hibernate()["wakes"]
    kip.cli("wait", "tcp", "--ready")
    assert proc.state == "hibernated" and proc.inspect()["wakes"] == wakes


# promise life: who is not ready within `--ready-timeout` (60 s) is left running and `kip run` fails
#   with the last reason; every start is looked at anew
@pytest.mark.parametrize("check", ["http:8080/health", "exec:test -e /tmp/ready"])
def test_who_is_not_ready_in_time_is_left_and_says_so(kip: Kip, check: str) -> None:
    name = check.split(":")[0]
    proc, said = slow(kip, name, 0, "--ready", check, "--ready-timeout", "3000ms", check=False)
    assert "was not ready" in said and "3000 ms" in said and ("503" in said or "code 1" in said), said
    view = proc.inspect()
    assert (view["state"], view["ready"]) == ("running", False)
    said = kip.refused("wait", name, "--ready", "--timeout", "200ms")
    assert "not ready" in said
    # It is looked again at its next start.
    proc.exec("touch", "/tmp/ready")
    proc.stop()
    proc.start()
    assert proc.state in ("starting", "running")
    kip.cli("wait", name, "--ready")
    assert proc.inspect()["ready"] is True


# promise life: who ends before it is ready: how, and its last words; name, files and logs stay
def test_who_ends_before_it_is_ready_says_how(kip: Kip) -> None:
    flags = ["--ready", "tcp:80"]
    said = kip.refused("run", "--name", "ends", *flags, "--", "/bin/sh", "-c", "echo no config; exit 4")
    assert "exit code 4" in said and "no config" in said
    assert kip.json("inspect", "ends")["state"] == "stopped"
    assert "stopped" in kip.refused("wait", "ends", "--ready")
    for words in (["--ready", "udp:5"], ["--ready", "http:x/"], ["--ready-timeout", "5s"]):
        assert kip.cli("run", *words, "--", "true", check=False).returncode == 2


# promise life: a daemon that is killed meanwhile: the next one looks again
def test_a_killed_daemon_looks_again(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    words = ["run", "--name", "late", "--ready", "exec:test -e /tmp/ready", "--", "sleep", "1000"]
    client = subprocess.Popen([kip.program, "--data", kip.data, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    late = Proc(kip, "late")
    wait_for("it starts", lambda: "late" in kip.names() and late.state == "starting")
    assert "late" in kip.cli("ps").stdout and "starting" in kip.cli("ps").stdout
    kip.kill()
    assert client.wait(30) == 1, "its daemon is gone"
    client.communicate()
    kip.up()
    assert late.state == "starting"
    late.exec("touch", "/tmp/ready")
    kip.cli("wait", "late", "--ready")
    assert late.inspect()["ready"] is True


# Daemons die.


# promise life: a killed daemon forgets neither policy nor count, and starts again what ended
#   meanwhile
def test_a_killed_daemon_forgets_neither_policy_nor_count(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    waits = shell(kip, "waits", "exit 1", "--restart", "on-failure:20")
    lives = shell(kip, "lives", "echo run; exec sleep 1000", "--restart", "on-failure")
    ends = shell(kip, "ends", "exec sleep 1000", "--restart", "on-failure")
    wait_for("it failed twice", lambda: waits.inspect()["restarts"] >= 3)
    kip.kill()
    seen = count_on_disk(kip, "waits")
    # One of them ends while no daemon looks.
    program = lives_pid(kip, "lives")
    os.kill(program, signal.SIGKILL)
    kip.up()
    assert restarts(lives, 1)["restarts"] == 1
    wait_for("it goes on failing", lambda: waits.inspect()["restarts"] > seen, 30)
    assert (ends.state, ends.inspect()["restarts"]) == ("running", 0)


def lives_pid(kip: Kip, name: str) -> int:
    """The program's pid, without a daemon to ask."""
    for tasks in Path("/sys/fs/cgroup").rglob(f"kip-{kip.instance}/{name}/cgroup.procs"):
        pids = [int(word) for word in tasks.read_text().split()]
        programs = [pid for pid in pids if "sleep" in Path(f"/proc/{pid}/comm").read_text()]
        if programs:
            return programs[0]
    raise AssertionError(f"no process of {name}")


def count_on_disk(kip: Kip, name: str) -> int:
    return json.loads((kip.data / "procs" / name / "state.json").read_text())["restarts"]


# promise life: what `kip down` or a reboot ended is started by the next `kip up`: of `kip down`
#   with `always` only
# held by: this, `tests/test_life.py::test_what_a_reboot_ended_is_started_again`
def test_down_and_up_starts_those_that_are_always_to_run(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    always = shell(kip, "always", "echo run; exec sleep 1000", "--restart", "always")
    asleep = shell(kip, "asleep", "echo run; exec sleep 1000", "--restart", "always")
    failing = shell(kip, "failing", "exec sleep 1000", "--restart", "on-failure")
    stopped = shell(kip, "stopped", "exec sleep 1000", "--restart", "always")
    stopped.stop()
    wait_for("it has run", lambda: "run" in asleep.logs(), 30)
    asleep.sleep()
    kip.cli("down", "--all", timeout=90)
    assert kip.wait_dead() == 0
    kip.up()
    for proc in (always, asleep):
        proc.wait_state("running")
        wait_for("it has run again", lambda proc=proc: proc.logs().count("run") == 2, 30)
    assert (failing.state, stopped.state) == ("stopped", "stopped")


def test_what_a_reboot_ended_is_started_again(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    with_policy = [
        kip.run(name, ["python3", "-m", "http.server", "8080"], ports=["8080"], flags=["--restart", policy])
        for name, policy in (("failing", "on-failure"), ("always", "always"))
    ]
    without = shell(kip, "without", "exec sleep 1000")
    ports = [proc.port() for proc in with_policy]
    kip.reboot()
    for proc, port in zip(with_policy, ports, strict=True):
        assert restarts(proc, 1)["restarts"] == 1 and proc.port() == port
        wait_for(f"{proc.name} serves", lambda port=port: listens(port))
    assert without.state == "stopped"


# promise life: a wake that fails is no restart: what is started cold for it counts as before
def test_a_cold_start_after_a_failed_wake_is_no_restart(kip: Kip) -> None:
    kip.expected += [logged.SNAPSHOT_UNUSABLE, logged.NOT_NATIVE]
    proc = kip.run("cold", ["python3", "-m", "http.server", "8080"], ports=["8080"], flags=["--restart", "always"])
    proc.sleep()
    generation = kip.data / "procs" / "cold" / f"gen-{proc.inspect()['generation']}"
    (generation / "checkpoint.tar").write_bytes(b"")
    with socket.create_connection(("127.0.0.1", proc.port())):
        proc.wait_state("running")
    assert kinds(kip, "cold", "cold-start", "restarting") == ["cold-start"]
    assert proc.inspect()["restarts"] == 0
    wait_for("it serves", lambda: listens(proc.port()))
    kill_program(proc)
    assert restarts(proc, 1)["restarts"] == 1
