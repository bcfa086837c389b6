"""Templates: what the first proc of a kind leaves when it is ready, and later ones begin from in place of a start."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import logged
from harness.clients import http_get
from harness.kip import Kip, Proc
from harness.wait import wait_for
from test_clone import lines
from test_trouble import UNPARKABLE

# Takes its time to start. Answers with a number that it has drawn then, what it has in a file that
# only a start writes, its host name as it was then, and what was put into its memory before the
# template was taken.
SLOW = """
import http.server, os, secrets, socket, sys, time
time.sleep(1)
drawn, then, warmed = secrets.token_hex(8), socket.gethostname(), "cold"
open("/tmp/started", "a").write("once ")
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global warmed
        if self.path == "/warm":
            warmed = "warm"
        words = [drawn, open("/tmp/started").read().strip(), then, warmed, os.environ.get("WORD", "-")]
        body = " ".join(words).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("", 8080), Answer).serve_forever()
"""
COMMAND = ["/usr/bin/python3", "-c", SLOW]
AUTO = ["--template", "auto", "--ready", "http:8080/", "--never-sleep"]


@pytest.fixture
def kip(fresh_kip: Callable[..., Kip]) -> Kip:
    """No proc of another test has left a template there."""
    return fresh_kip()


def run(kip: Kip, name: str, *flags: str) -> Proc:
    return kip.run(name, COMMAND, ports=["8080"], flags=[*AUTO, *flags])


def words(proc: Proc) -> list[str]:
    return http_get(proc.port(), "/").decode().split()


def told(kip: Kip, name: str, kind: str = "templated") -> list[str]:
    return [event["detail"] for event in kip.events() if event["name"] == name and event["kind"] == kind]


def templates(kip: Kip) -> list[dict[str, Any]]:
    return kip.json("template", "ls")["templates"]


def leaves(kip: Kip, name: str, *flags: str) -> tuple[Proc, str]:
    """One that has left a template, and its id."""
    proc = run(kip, name, *flags)
    wait_for("its template is taken", lambda: told(kip, name), 30)
    (detail,) = told(kip, name)
    assert detail.endswith("was taken from it"), detail
    return proc, detail.split()[0]


def on_disk(kip: Kip) -> list[str]:
    return sorted(path.name for path in (kip.data / "templates").glob("*"))


# promise templates: by `--template auto` the first proc of a kind leaves its memory and files of
#   the moment when it was ready, and goes on; the next one that is run begins from them, under its
#   own name, host name and port, and without the time that a start takes
# promise templates: another command, environment, secret or limit is another kind
@pytest.mark.smoke
def test_the_second_begins_from_the_first(kip: Kip, tmp_path: Path) -> None:
    first, template = leaves(kip, "first")
    seen = words(first)
    assert seen[1:] == ["once", "first", "cold", "-"]
    second = run(kip, "second")
    assert words(second) == seen == words(first), "drawn once: it did not start"
    assert second.exec("hostname").stdout == "second\n" and second.port() != first.port()
    assert told(kip, "second", "cloned") == [f"from template {template}"] and told(kip, "second", "started") == []
    # Files are its own.
    second.exec("sh", "-c", "echo more >> /tmp/started")
    assert words(first)[1] == "once" and "more" in words(second)
    (view,) = templates(kip)
    assert view["id"] == template and view["name"] == "first" and view["used_at_ms"] >= view["taken_at_ms"]
    assert view["memory_bytes"] > 1 << 20
    shown = kip.cli("template", "show", template).stdout
    assert "first" in shown and template in kip.cli("template", "ls").stdout
    # It sleeps and wakes as any other.
    second.sleep()
    assert words(second)[0] == seen[0]

    secret = tmp_path / "secret"
    secret.write_text("one")
    others = {"env": ["-e", "WORD=x"], "limit": ["-m", "200M"], "secret": ["--secret", f"key={secret}"]}
    ids = {template}
    for name, flags in others.items():
        proc, other = leaves(kip, name, *flags)
        assert words(proc)[0] != seen[0] and words(proc)[2] == name, name
        ids.add(other)
    assert len(ids) == 4 == len(templates(kip))
    again = run(kip, "again", *others["secret"])
    assert words(again)[2] == "secret" and again.exec("cat", "/run/secrets/key").stdout == "one"
    secret.write_text("two")
    assert words(run(kip, "changed", *others["secret"]))[2] == "changed"
    assert words(run(kip, "env-again", *others["env"]))[2:] == ["env", "cold", "x"]


# promise templates: a command that is given for it runs before the template is taken; one that
#   fails leaves the proc without one, and an event says why
def test_it_is_warmed_before(kip: Kip) -> None:
    ask = "/usr/bin/python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:8080/warm\")'"
    first, template = leaves(kip, "first", "--template-after", ask)
    assert words(run(kip, "second", "--template-after", ask))[3] == "warm"
    run(kip, "bad", "-e", "WORD=bad", "--template-after", "echo not now; exit 3")
    wait_for("it says why not", lambda: told(kip, "bad"), 20)
    (why,) = told(kip, "bad")
    assert why.startswith("it leaves none") and "not now" in why
    assert [one["id"] for one in templates(kip)] == [template]
    # By hand, in place of the older one.
    http_get(first.port(), "/warm")
    taken = kip.json("template", "take", "first")
    assert taken["id"] == template and taken["used_at_ms"] is None and len(templates(kip)) == 1


# promise clones: `kip clone --warm` makes procs of the template of the source's kind, `--cold`
#   starts what the source was asked to be
def test_clones_by_each_method(kip: Kip) -> None:
    source, _ = leaves(kip, "source", "-l", "of=source")
    drawn = words(source)[0]
    http_get(source.port(), "/warm")
    for method, expected in {"--hot": (drawn, "source", "warm"), "--warm": (drawn, "source", "cold")}.items():
        made = kip.json("clone", "source", f"made{method}", method, "--count", "2")["clones"]
        assert len(made) == 2
        for view in made:
            seen = words(Proc(kip, view["name"]))
            assert (seen[0], seen[2], seen[3]) == expected, method
            assert view["spec"]["labels"] == {"of": "source"}
            own = Proc(kip, view["name"]).exec("sh", "-c", "cat /etc/hostname; getent hosts $(hostname)").stdout
            assert own.startswith(view["name"]) and own.endswith(f" {view['name']}\n")
    cold = kip.json("clone", "source", "cold", "--cold")["clones"][0]
    seen = words(Proc(kip, "cold"))
    assert seen[0] != drawn and seen[2:4] == ["cold", "cold"] and cold["spec"]["labels"] == {"of": "source"}
    source.stop()
    for method in ("--warm", "--cold"):
        assert kip.json("clone", "source", method)["clones"][0]["state"] == "running", "its memory is not needed"
    assert "of the source" not in kip.cli("clone", "source", "--warm", "--asleep").stderr


# promise templates: what cannot leave one, or has none, is refused in a line; a template that is
#   damaged is not gone on from: the proc starts
def test_refused(kip: Kip, tmp_path: Path) -> None:
    assert "say by --ready when that is" in kip.refused("run", "--name", "x", "--template", "auto", "-d", "--", "sleep", "1000")
    said = kip.refused("run", "--name", "x", "--template", "auto", "-p", "80", "-v", "data:/data", "-d", "--", "sleep", "1000")
    assert "its volume data at /data" in said
    for bad, why in {("run", "--template", "on", "--", "x"): "write auto or off", ("clone", "x", "--warm", "--cold"): "cannot be used with"}.items():
        done = kip.cli(*bad, check=False)
        assert done.returncode == 2 and why in done.stderr
    other = lines(kip)
    assert "`kip template take lines` makes one" in kip.refused("clone", "lines", "--warm")
    assert "there is no proc" in kip.refused("template", "take", "nothing")
    assert "there is no template t0" in kip.refused("template", "rm", "t0")
    assert "there is no template t0" in kip.refused("template", "show", "t0")
    assert "cold clone starts" in kip.refused("clone", "lines", "--cold", "--asleep")
    kip.cli("checkpoint", "lines")
    assert "goes on from that" in kip.refused("clone", "lines@c1", "--warm")
    assert "the command ended with code 3" in kip.refused("template", "take", "lines", "--after", "exit 3")
    other.stop()
    assert "it does not run" in kip.refused("template", "take", "lines")
    kip.run("stuck", ["/usr/bin/python3", "-c", next(iter(UNPARKABLE.values())) + "\nimport time\ntime.sleep(1000)"])
    assert "stuck cannot be kept as a template now" in kip.refused("template", "take", "stuck")
    assert kip.names() == ["lines", "stuck"] and templates(kip) == [] == on_disk(kip)

    _, template = leaves(kip, "first")
    (pages,) = [path for path in (kip.data / "templates" / template).glob("gen-*/manifest*")][:1]
    pages.write_bytes(pages.read_bytes()[:-10])
    started = run(kip, "second")
    assert words(started)[2] == "second"
    wait_for("it leaves a new one", lambda: len(told(kip, "second")) == 2, 20)
    assert "cannot be gone on from: the template" in told(kip, "second")[0]
    assert words(run(kip, "third"))[2] == "second"
    kip.cli("template", "rm", template)
    assert templates(kip) == [] == on_disk(kip)
    assert words(run(kip, "fourth"))[2] == "fourth"


# promise templates: a daemon that is killed while one is taken, or a proc begins from it, leaves
#   nothing half made
@pytest.mark.parametrize("step", ["template-taken", "template-copied", "clone-published", "clone-filled"])
def test_killed_at_step(fresh_kip: Callable[..., Kip], step: str) -> None:
    kip = fresh_kip()
    kip.expected += [*logged.DAEMON_KILLED]
    if step != "template-taken":
        leaves(kip, "first")
    kip.kill()
    kip.up("--fault-at", step)
    kip.cli("run", "--name", "second", "-d", *AUTO, "-p", "8080", "--", *COMMAND, check=False)
    assert kip.wait_dead(30) == -signal.SIGKILL
    kip.up()
    there = [] if step == "template-taken" else ["first"]
    made = ["second"] if step == "template-taken" else []
    wait_for("what was begun is gone", lambda: kip.names() == [*there, *made], 20)
    assert len(on_disk(kip)) == len(there) == len(templates(kip))
    if made:
        wait_for("it answers", lambda: words(Proc(kip, "second")), 20)
    assert words(run(kip, "third"))[2] == ("third" if step == "template-taken" else "first")


# promise templates: they are there after a restart of the daemon
def test_kept(kip: Kip) -> None:
    kip.expected += [*logged.DAEMON_KILLED]
    _, template = leaves(kip, "first")
    kip.kill()
    kip.up()
    second = run(kip, "second")
    assert words(second)[2] == "first"
    assert [one["id"] for one in templates(kip)] == [template]


# promise templates: by the API as by the command line; a kip.toml has them too
def test_by_file_and_api(kip: Kip, tmp_path: Path) -> None:
    file = tmp_path / "kip.toml"
    script = json.dumps(SLOW)
    table = f'command = ["/usr/bin/python3", "-c", {script}]\nport = ["8080"]\nready = "http:8080/"\ntemplate = "auto"\nidle = "1h"\n'
    file.write_text(f"[proc.one]\n{table}template-after = \"true\"\n")
    kip.cli("apply", "-f", str(file))
    wait_for("its template is taken", lambda: told(kip, "one"), 20)
    file.write_text(file.read_text() + f"[proc.two]\n{table}template-after = \"true\"\n")
    kip.cli("apply", "-f", str(file))
    assert words(Proc(kip, "two"))[2] == "one"
    exported = kip.cli("export", "one", "two").stdout
    assert exported.count('template = "auto"') == 2 and exported.count('template-after = "true"') == 2


# promise templates: of more than 32 the one goes that was not used for longest
@pytest.mark.soak
def test_so_many_are_kept(kip: Kip) -> None:
    ids = []
    for number in range(33):
        proc = kip.run(f"p{number}", ["sleep", "1000"], flags=["-e", f"N={number}", "--never-sleep"])
        ids.append(kip.json("template", "take", proc.name)["id"])
        if number == 31:
            kip.cli("clone", "p0", "used", "--warm")
    assert {one["id"] for one in templates(kip)} == {ids[0], *ids[2:]} and len(on_disk(kip)) == 32
