"""Commands of the owner's that run inside before a sleep and after a wake."""

from __future__ import annotations

import re
from typing import Any

import pytest

from harness.clients import Redis, http_get
from harness.kip import Kip, Proc
from harness.wait import wait_for

REDIS = ["redis-server", "--bind", "*", "--protected-mode", "no", "--save", ""]
STAYS = ["--idle", "1h", "--park-after", "1h"]


def run(kip: Kip, *flags: str) -> Proc:
    return kip.run("cache", REDIS, ports=["6379"], flags=[*STAYS, *flags])


def told(kip: Kip, kind: str) -> list[dict[str, Any]]:
    return [event for event in kip.events() if event["kind"] == kind and event["name"] == "cache"]


def said(proc: Proc) -> list[str]:
    return proc.exec("cat", "/srv/said").stdout.splitlines()


def sleeps_from_hot(kip: Kip) -> int:
    """How often it slept that ran before. One that was at work when it was frozen is woken at once, and the harness tries again."""
    kinds = [e["kind"] for e in kip.events() if e["name"] == "cache" and e["kind"] in ("hibernated", "parked", "woken")]
    return sum(kind != "woken" and before == "woken" for before, kind in zip(["woken", *kinds], kinds, strict=False))


# promise hooks: run inside at each sleep of a running proc and after each wake, with tier and
#   trigger; a hibernated one that is parked is not asked
def test_they_run_at_each_sleep_and_wake(kip: Kip) -> None:
    # By the server itself: what it has when it sleeps is what the hook has done.
    before = "redis-cli incr sleeps >/dev/null; echo before $KIP_TIER $(id -u) >>/srv/said"
    after = 'echo after $KIP_TIER "$KIP_TRIGGER" >>/srv/said'
    proc = run(kip, "--before-sleep", before, "--after-wake", after)
    client = Redis(proc.port(6379))

    def slept() -> bool:
        return client.ask("GET", "sleeps") == str(sleeps_from_hot(kip)).encode()

    proc.hibernate()
    assert slept() and sleeps_from_hot(kip) >= 1
    wait_for("it was told of the wake", lambda: len(said(proc)) >= 2, 20)
    lines = said(proc)
    # On a busy machine it may have been at work when it was to be held, and was not.
    assert lines[0] == "before hibernated 0" and re.match("after hibernated (tcp |first touch|timer|kip exec)", lines[1]), lines
    proc.sleep()
    assert slept() and sleeps_from_hot(kip) >= 2
    wait_for("it was told of the wake", lambda: len(said(proc)) == 2 * sleeps_from_hot(kip), 20)
    lines = said(proc)
    assert lines[-2] == "before parked 0" and re.match("after parked (tcp |timer)", lines[-1]), lines
    # From hibernated on it does not run: there is nothing to ask.
    proc.hibernate()
    kip.cli("sleep", "cache", "--to", "parked")
    assert slept() and sleeps_from_hot(kip) >= 3


# promise hooks: one before a sleep that fails refuses it with what it wrote last, by `kip sleep`;
#   by idle time it is tried again a minute later (untested)
def test_one_that_fails_keeps_it_awake(kip: Kip) -> None:
    proc = run(kip, "--before-sleep", "test ! -e /srv/busy || { echo a job runs; exit 7; }")
    proc.exec("touch", "/srv/busy")
    for tier in ("hibernated", "parked"):
        line = kip.refused("sleep", "cache", "--to", tier)
        assert "its own command before sleep refuses: the command ended with code 7: a job runs" in line
    assert proc.state == "running" and Redis(proc.port(6379)).ask("PING") == "PONG"
    (cause,) = kip.json("why", "cache")["cannot_sleep"]
    assert cause.endswith("a job runs")
    assert 'kip_sleep_refusals_total{cause="hook"' in kip.cli("metrics").stdout.replace('tier="hibernated",', "").replace('tier="parked",', "")
    proc.exec("rm", "/srv/busy")
    proc.sleep()


# promise hooks: one that takes too long is ended, and refuses the sleep
def test_one_that_takes_too_long_is_ended(kip: Kip) -> None:
    proc = run(kip, "--before-sleep", "sleep 100", "--hook-timeout", "500ms")
    assert "took more than 500 ms" in kip.refused("sleep", "cache")
    wait_for("it is gone", lambda: "sleep 100" not in proc.exec("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout.replace("sh -c", ""), 20)


# promise hooks: one after a wake that fails is an event
def test_after_a_wake_it_is_an_event_and_no_more(kip: Kip) -> None:
    proc = run(kip, "--after-wake", "echo no; exit 3")
    proc.sleep()
    assert Redis(proc.port(6379)).ask("PING") == "PONG"
    (event,) = wait_for("it is told", lambda: told(kip, "hook-failed"), 20)
    assert "ended with code 3: no" in event["detail"] and proc.state == "running"


# Remembers what it was asked, with the headers of Kip's; `/seen` tells it, `/refuses` is refused.
SERVER = """
import http.server
seen = []
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        kips = [f"{k}={v}" for k, v in self.headers.items() if k.startswith("Kip-")]
        body = " ".join(seen).encode()
        if self.path != "/seen":
            seen.append(",".join([self.path, *kips]))
        self.send_response(503 if self.path == "/refuses" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("", 8080), Answer).serve_forever()
"""


def seen(proc: Proc) -> list[str]:
    return http_get(proc.port(), "/seen").decode().split()


# promise hooks: each may be a request to the program itself, `http:PORT/PATH`, with the variables
#   as headers; before a clone, a checkpoint or a template of one that is awake, and in a clone
#   before its clients reach it
@pytest.mark.parametrize("method", ["hot", "cold"])
def test_requests_in_place_of_commands(kip: Kip, method: str) -> None:
    flags = ["--before-checkpoint", "http:8080/before", "--after-clone", "http:8080/after?is=new", "--ready", "http:8080/ready"]
    web = kip.run("web", ["/usr/bin/python3", "-c", SERVER], ports=["8080"], flags=[*STAYS, *flags])
    kip.cli("checkpoint", "web", "--tag", "one")
    assert seen(web) == ["/ready", "/before,Kip-Purpose=checkpoint"]
    kip.cli("clone", "web", "other", "--method", method)
    came_from = {"hot": "web", "cold": "what web was asked to be"}[method]
    before = ["/ready", "/before,Kip-Purpose=checkpoint", "/before,Kip-Purpose=clone"] if method == "hot" else ["/ready"]
    assert seen(Proc(kip, "other")) == [*before, *f"/after?is=new,Kip-Clone-Of={came_from}".split()]
    web.sleep()
    kip.cli("clone", "web", "of-a-sleeper", "--asleep")
    assert web.state == "parked", "a sleeper is not asked, and not woken"


# promise hooks: one before a checkpoint that fails refuses the clone, checkpoint or template, in
#   one clear line
@pytest.mark.parametrize(("hook", "said"), [("http:8080/refuses", "status 503"), ("echo not now; exit 3", "code 3: not now")])
def test_one_that_fails_refuses_the_copy(kip: Kip, hook: str, said: str) -> None:
    kip.run("web", ["/usr/bin/python3", "-c", SERVER], ports=["8080"], flags=[*STAYS, "--before-checkpoint", hook])
    for words in (["clone", "web"], ["checkpoint", "web"], ["template", "take", "web"]):
        line = kip.refused(*words)
        assert "web cannot be" in line and said in line, line
    assert kip.names() == ["web"]


@pytest.mark.parametrize("flag", ["--before-sleep", "--after-wake"])
def test_an_empty_one_is_refused(kip: Kip, flag: str) -> None:
    done = kip.cli("run", flag, " ", "--", "true", check=False)
    assert done.returncode == 2 and "write a command for the shell" in done.stderr
