"""Ports on which Kip answers how a proc is: they neither wake it nor keep it awake."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import servers
from harness.clients import Redis, free_port, http_get, listens
from harness.kip import Kip, Proc
from harness.wait import wait_for

REDIS = ["redis-server", "--bind", "*", "--protected-mode", "no", "--save", ""]
STAYS = ["--idle", "1h", "--park-after", "1h"]


def ask(port: int, method: str = "GET") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, "/whatever")
        response = connection.getresponse()
        body = response.read()
        return response.status, json.loads(body) if body else None
    finally:
        connection.close()


@contextmanager
def asked_all_the_time(port: int) -> Iterator[list[tuple[int, Any]]]:
    """A load balancer's look, five times a second."""
    over, answers = threading.Event(), []

    def probe() -> None:
        while not over.wait(0.2):
            answers.append(ask(port))

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        yield answers
    finally:
        over.set()
        prober.join(30)


def health(kip: Kip, name: str) -> Any:
    connection = http.client.HTTPConnection("kip", timeout=30)
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(30)
        s.connect(str(kip.data / "run" / "api.sock"))
        connection.sock = s
        connection.request("GET", f"/v1/procs/{name}/health")
        return json.loads(connection.getresponse().read())


def run_redis(kip: Kip, check: str, *flags: str) -> tuple[Proc, int]:
    port = free_port()
    return kip.run("cache", REDIS, ports=["6379"], flags=[*STAYS, "--probe", f"{port}={check}", *flags]), port


def sleeps_and_stays_asleep(kip: Kip, check: str, tmp_path: Path) -> None:
    web, port = servers.lighttpd(), free_port()
    # Longer than from one check to the next, which is a second.
    flags = ["--idle", "2s", "--park-after", "1s", "--probe", f"{port}={check}"]
    proc = kip.run("probed", web.command, ports=["8080"], tar=web.tarball(tmp_path), flags=flags)
    with asked_all_the_time(port) as answers:
        # Others' requests count as ever, in between.
        until = time.monotonic() + (3 if check.startswith("http") else 0)
        while time.monotonic() < until:
            assert http_get(proc.port(), "/page.html") == servers.PAGE
            time.sleep(0.15)
            assert proc.inspect()["wakes"] == 0 and proc.state == "running", "requests keep it awake"
        wait_for("it parks although it is probed", lambda: proc.state == "parked", 30)
        wakes, before = proc.inspect()["wakes"], len(answers)
        wait_for("it was probed in its sleep", lambda: len(answers) > before + 10, 30)
        view = proc.inspect()
        assert (view["state"], view["wakes"]) == ("parked", wakes)
    assert wakes == 0, f"woken by {view['last_wake']}"
    assert {status for status, _ in answers} == {200}, answers
    asleep = answers[-1][1]
    assert (asleep["state"], asleep["tier"], asleep["available"]) == ("parked", "parked", True)
    assert asleep["probes"][0]["health"] == "healthy" and asleep["probes"][0]["checked_ms"] > 1000
    assert any(body["state"] == "running" for _, body in answers)
    assert http_get(proc.port(), "/page.html") == servers.PAGE
    assert proc.inspect()["wakes"] == wakes + 1
    proc.remove()


# promise probes: asked five times a second by HTTP, a proc sleeps and stays asleep, and is answered
#   200 all the while; requests of others keep it awake as ever
# held by: this, `kip_supervisor::idle::tests::traffic_and_work_are_activity_and_ticks_are_not`
def test_by_http_it_sleeps_and_stays_asleep(kip: Kip, tmp_path: Path) -> None:
    sleeps_and_stays_asleep(kip, "http:8080/page.html", tmp_path)


# promise probes: the same where the check is a command that takes CPU time
def test_by_a_command_it_sleeps_and_stays_asleep(kip: Kip, tmp_path: Path) -> None:
    sleeps_and_stays_asleep(kip, "exec:i=0; while [ $i -lt 5000 ]; do i=$((i+1)); done", tmp_path)


# promise probes: a sleeper is answered as it was when it was awake, 503 if that was unhealthy; the
#   API and `kip inspect` say the same; a change is an event
# held by: this,
#   `kip_supervisor::probe::tests::a_sleeper_is_as_it_was_and_one_that_does_not_run_is_not_available`
def test_a_sleeper_is_as_it_was_when_it_was_awake(kip: Kip) -> None:
    proc, port = run_redis(kip, "exec:test ! -e /srv/sick || { echo its disk is full; exit 1; }")
    status, body = ask(port)
    assert status == 200 and body == health(kip, "cache") | {"probes": body["probes"]}, body
    assert ask(port, "HEAD") == (200, None) and ask(port, "POST") == (405, None)
    proc.exec("touch", "/srv/sick")
    wait_for("it is seen", lambda: ask(port)[0] == 503, 20)
    proc.sleep()
    count = proc.inspect()["wakes"]
    for status, body in [ask(port), (503, health(kip, "cache"))]:
        assert (status, body["available"], body["tier"]) == (503, False, "parked")
        assert body["reason"].endswith("ended with code 1: its disk is full"), body
    (probe,) = proc.inspect()["probes"]
    assert (probe["host_port"], probe["health"]) == (port, "unhealthy")
    shown = kip.cli("inspect", "cache").stdout
    assert f"{port} (exec:" in shown and "unhealthy" in shown
    assert proc.inspect()["wakes"] == count
    proc.exec("rm", "/srv/sick")
    wait_for("it is seen", lambda: ask(port)[0] == 200, 20)
    told = [e["kind"] for e in kip.events() if e["name"] == "cache" and "healthy" in e["kind"]]
    assert told == ["unhealthy", "healthy"]
    proc.hibernate()
    assert ask(port)[1]["tier"] == "hibernated" and proc.state == "hibernated"
    proc.remove()


# promise probes: a check that hangs is given up after 2 s, and a sleep waits no longer for it
def test_a_check_that_hangs_does_not_keep_it_awake(kip: Kip) -> None:
    proc, port = run_redis(kip, "exec:sleep 100")
    seen = threading.Event()

    def ask_on() -> None:
        while not seen.is_set():
            ask(port)

    prober = threading.Thread(target=ask_on)
    prober.start()
    wait_for("it is asked", lambda: "sleep 100" in proc.exec("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout.replace("sh -c", ""), 20)
    seen.set()
    proc.sleep()
    prober.join(30)
    status, body = ask(port)
    assert status == 503 and body["tier"] == "parked" and "no answer within 2000 ms" in body["reason"]
    assert Redis(proc.port(6379)).ask("PING") == "PONG"
    proc.remove()


# promise probes: who is not ready yet or is stopped is not available, and why is said; its port is
#   free when it is removed
def test_one_that_does_not_run_is_not_available(kip: Kip) -> None:
    port = free_port()
    flags = ["--probe", f"{port}=tcp:6379", "--ready", "exec:test -e /srv/go"]
    starter = threading.Thread(target=kip.run, args=("cache", REDIS), kwargs={"flags": [*STAYS, *flags]})
    starter.start()
    wait_for("it is there", lambda: "cache" in kip.names() and listens(port))
    status, body = ask(port)
    assert (status, body["state"]) == (503, "starting") and body["reason"] in ("it is not ready yet", "it is being started"), body
    proc = Proc(kip, "cache")
    proc.exec("touch", "/srv/go")
    starter.join(30)
    # What was checked within the last second is not checked again.
    wait_for("it is available", lambda: ask(port)[0] == 200, 10)
    proc.stop()
    assert (ask(port)[0], ask(port)[1]["reason"]) == (503, "it is stopped")
    proc.remove()
    assert not listens(port)


# promise probes: a port that is taken is refused, no other proc gets one that is a probe's, and
#   trials of `kip check` have none
# held by: this, `kip_net::reserve::tests::who_listens_again_has_the_port_to_itself`,
#   `kip_types::life::tests::reads_probes_and_writes_them_the_same`
def test_its_port_is_its_own(kip: Kip) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = kip.refused("run", "--name", "cache", "--probe", f"{port}=tcp:6379", "--", *REDIS)
        assert f"port {port}/tcp is taken by" in line
    assert kip.names() == []
    line = kip.refused("run", "--port", f"{port}:6379", "--probe", f"{port}=tcp:6379", "--", *REDIS)
    assert f"host port {port} is asked for twice" in line
    proc, port = run_redis(kip, "tcp:6379")
    for flags in (["--port", f"{port}:6379"], ["--probe", f"{port}=tcp:6379"]):
        assert "is taken by kip" in kip.refused("run", *flags, "--", *REDIS)
    # A trial of one like it has none.
    assert kip.cli("check", "--probe", f"{port}=tcp:6379", "--port", "6379", "--to", "parked", "--", *REDIS).returncode == 0
    proc.remove()
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("0.0.0.0", port))


# promise probes: who asks while there is no daemon waits, and the next one answers, of a sleeper
#   what was known when it fell asleep
def test_the_next_daemon_answers_as_this_one(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    proc, port = run_redis(kip, "exec:test ! -e /srv/sick")
    proc.exec("touch", "/srv/sick")
    wait_for("it is seen", lambda: ask(port)[0] == 503, 20)
    proc.sleep()
    kip.kill()
    # The keeper has the port: a client that asks now waits.
    with socket.create_connection(("127.0.0.1", port), 60) as early:
        early.sendall(b"GET / HTTP/1.0\r\n\r\n")
        kip.up()
        assert early.recv(15).startswith(b"HTTP/1.1 503 ")
    status, body = ask(port)
    assert (status, body["tier"], body["probes"][0]["health"]) == (503, "parked", "unhealthy")
    assert proc.inspect()["wakes"] == 0
