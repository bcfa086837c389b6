"""Timers that expire many times a second go on through many sleeps: due before, in and after each freeze, none is lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import programs, servers
from harness.clients import read_to_end
from harness.kip import Kip, Proc
from harness.wait import TimedOut, wait_for

pytestmark = pytest.mark.measures

# Parked, hibernated and parked, blocked or held.
SLEEPS = 3
# Each timer has to expire so often between two sleeps.
BETWEEN = 2

Counts = dict[tuple[str, int], tuple[int, float]]


def counts(proc: Proc) -> Counts:
    """How often each timer has expired, and for how many milliseconds it has been armed, by its kind and period."""
    with socket.create_connection(("127.0.0.1", proc.port()), timeout=30) as client:
        lines = [line.split() for line in read_to_end(client).decode().splitlines()]
    return {(kind, int(period)): (int(count), int(us) / 1000) for kind, period, count, us in lines}


def all_expire(proc: Proc) -> None:
    before = counts(proc)

    def lost() -> list[tuple[str, int]]:
        return [timer for timer, (count, _) in counts(proc).items() if count < before[timer][0] + BETWEEN]

    try:
        wait_for("all timers expire", lambda: not lost(), 20)
    except TimedOut:
        raise AssertionError(f"timers of {proc.name} that do not expire any more: {lost()}") from None


def none_is_lost(proc: Proc) -> bool:
    """Not so while the program waits for a processor before it reads them."""
    return all(count >= armed / period - 2 for (kind, period), (count, armed) in counts(proc).items() if kind == "timerfd")


def expire_through(kip: Kip, engine: str, hibernate: str, sleeps: int) -> None:
    program = programs.c_program("expiries", "-static")
    tar = programs.tarball(programs.directory() / "expiries.tar", {"expiries": program})
    flags = ["--idle", "1h", "--tick", "0s", "--hibernate", hibernate]
    proc = kip.run(f"expiries-{hibernate}", ["/expiries"], ports=["7000"], tar=tar, flags=flags)
    for number in range(sleeps):
        all_expire(proc)
        # Some timer is due at once and wakes it again.
        if number % 3 == 1:
            proc.hibernate_once("--clock", "auto")
        else:
            kip.cli("sleep", proc.name, "--to", "parked", "--clock", "auto")
    all_expire(proc)
    for (kind, period), (count, elapsed) in counts(proc).items():
        # What counts CPU time expires as often as that lets it.
        assert count <= elapsed / period + 1, f"{kind} of {period} ms expired {count} times in {elapsed} ms"
    wait_for("all expirations of timerfds are counted", lambda: none_is_lost(proc), 20)
    assert proc.rebuilt() == (engine == "plan")
    proc.remove()


ENGINES = [("plan", "blocked"), ("CRIU", "held")]


# promise waking: timers that expire many times a second go on through sleep after sleep: interval
#   timers of all three kinds, POSIX timers, timerfds; none hangs, none is early, timerfds count all
@pytest.mark.parametrize(("engine", "hibernate"), ENGINES)
def test_timers_expire_through_many_sleeps(fresh_kip: Callable[..., Kip], engine: str, hibernate: str) -> None:
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    expire_through(kip, engine, hibernate, SLEEPS)


@pytest.mark.parametrize("engine", ["plan", "CRIU"])
def test_nginx_with_timer_resolution_times_out_after_ten_sleeps(fresh_kip: Callable[..., Kip], tmp_path: Path, engine: str) -> None:
    """Its clock is an interval timer's signal: without that it closes no idle connection any more."""
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    server = servers.nginx()
    conf = servers.NGINX_CONF.replace("keepalive_timeout 3600s", "keepalive_timeout 2s").replace("user www-data;", "user www-data;\ntimer_resolution 100ms;")
    server.files["etc/nginx/kip.conf"] = conf
    proc = kip.run("nginx", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=["--idle", "1h"])

    def closes_after() -> float:
        """Seconds from the answer to a request until it closes the connection."""
        with socket.create_connection(("127.0.0.1", proc.port()), timeout=30) as client:
            client.sendall(b"GET /worker HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in client.recv(10_000)
            answered = time.monotonic()
            while client.recv(10_000):
                pass
            return time.monotonic() - answered

    assert closes_after() >= 1.8
    for _ in range(10):
        kip.cli("sleep", "nginx", "--clock", "auto")
        proc.wake()
    assert 1.8 <= closes_after() < 8
    assert proc.rebuilt() == (engine == "plan")


# Memory of a program, MB: its timers expire while that goes into a snapshot.
MEMORY_MB = 256


# promise waking: the program gets the signal of a timer that was set for once and expires while
#   CRIU takes the snapshot, and gets it once: setitimer(2), POSIX timers of all kinds, natively and
#   by CRIU
# held by: this,
#   `kip_clocks::signals::tests::a_timer_that_was_set_for_once_is_not_taken_for_one_that_is_armed`,
#   `kip_clocks::signals::tests::a_periodic_timer_is_known_by_its_phase`
@pytest.mark.parametrize("engine", ["plan", "CRIU"])
def test_a_timer_that_expires_in_a_snapshot_is_told_once(fresh_kip: Callable[..., Kip], engine: str) -> None:
    """Set for once, it is not armed any more when the snapshot has its turn, and its signal came too late for it."""
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    tar = programs.tarball(programs.directory() / "once.tar", {"once": programs.c_program("once", "-static")})
    proc = kip.run("once", ["/once", str(MEMORY_MB)], ports=["7000"], tar=tar, flags=["--idle", "1h", "--tick", "0s"])

    def told(word: str) -> dict[str, int]:
        with socket.create_connection(("127.0.0.1", proc.port()), timeout=30) as client:
            client.sendall(f"{word}\n".encode())
            lines = [line.rsplit(" ", 1) for line in read_to_end(client).decode().splitlines()]
        return {name: int(count) for name, count in lines}

    told("told")
    for number in range(1, SLEEPS + 1):
        told("arm")
        kip.cli("sleep", proc.name, "--clock", "auto")
        proc.quiescent()
        try:
            wait_for("all are told", lambda: min(told("told").values()) == number, 10)
        except TimedOut:
            raise AssertionError([name for name, count in told("told").items() if count < number]) from None
        assert set(told("told").values()) == {number}, told("told")
    assert proc.rebuilt() == (engine == "plan")


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["plan", "CRIU"])
@pytest.mark.parametrize("hibernate", ["blocked", "held"])
def test_timers_expire_through_very_many_sleeps(fresh_kip: Callable[..., Kip], engine: str, hibernate: str) -> None:
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    expire_through(kip, engine, hibernate, 1000)
