"""Several procs behind the name of one: added under load, spread by the kernel, taken away when it is calm, replaced when they die."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from harness import images
from harness.clients import Http, free_port, http_get
from harness.kip import Failed, Kip, Proc
from harness.wait import wait_for
from test_apply import actions

# Answers with its host name; `/work/MS` takes so much time of a processor, `/set/WORD` keeps a word
# in memory and `/word` gives it back, `/enough` fails once that word is `more`.
SERVER = """
import http.server, socket, socketserver, time
word = "-"
class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        global word
        parts = self.path.split("/")
        if parts[1] == "work":
            until = time.thread_time() + int(parts[2]) / 1000
            while time.thread_time() < until:
                pass
        if parts[1] == "set":
            word = parts[2]
        fails = parts[1] == "enough" and word == "more"
        body = (socket.gethostname() + " " + word).encode()
        self.send_response(503 if fails else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("", 8080), Answer).serve_forever()
"""
COMMAND = ["/usr/bin/python3", "-c", SERVER]


def run(kip: Kip, *flags: str, name: str = "web", ports: tuple[str, ...] = ("8080",)) -> Proc:
    return kip.run(name, COMMAND, ports=ports, flags=flags)


def scale(kip: Kip, *flags: str, name: str = "web") -> dict[str, Any]:
    return kip.json("scale", name, *flags)


def rotation(kip: Kip, name: str = "web") -> list[str]:
    return [replica["name"] for replica in scale(kip, name=name)["replicas"] if replica["in_rotation"]]


def names(kip: Kip) -> set[str]:
    return {proc["name"] for proc in kip.json("ps", "-a")}


def told(kip: Kip, name: str = "web") -> list[str]:
    return [event["detail"] for event in kip.events() if event["name"] == name and event["kind"] == "scaled"]


def host_of(port: int, path: str = "/", host: str = "127.0.0.1") -> str:
    return http_get(port, path, host).decode().split()[0]


def hosts(port: int, count: int, host: str = "127.0.0.1") -> Counter[str]:
    """Who answers so many connections."""
    return Counter(host_of(port, host=host) for _ in range(count))


def is_scaled_to(kip: Kip, count: int, timeout: float = 60) -> list[str]:
    return wait_for(f"{count} are in rotation", lambda: (found := rotation(kip)) and len(found) == count and found, timeout)


@contextmanager
def load(port: int, clients: int, ms: int) -> Iterator[list[str]]:
    """So many clients, each with one request after the other on connections of their own; what they were answered."""
    stop, answers, failures = threading.Event(), [], []

    def ask() -> None:
        while not stop.is_set():
            try:
                answers.append(host_of(port, f"/work/{ms}"))
            except (OSError, AssertionError) as e:
                failures.append(repr(e))
                return

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures


# promise scaling: `kip scale NAME --max N` adds procs behind the name and ports of a proc under
#   load, each new connection goes to one of them, and takes them away when it is calm: no new
#   connections first, then asleep, parked, removed; no client is refused
def test_load_adds_and_calm_takes_away(kip: Kip) -> None:
    web = run(kip, "--idle", "1s", "--park-after", "1s", "--cpus", "0.1")
    port = web.port()
    http_get(port, "/set/kept")
    assert scale(kip, "--max", "3", "--calm", "1s")["scaling"] == {"min": 0, "max": 3, "method": "auto", "calm_ms": 1000}
    # So little that they get it on a machine that is busy with others, too.
    with closing(Http(port)) as stays, load(port, 4, 20):
        assert stays.get("/word") == b"web kept"
        found = is_scaled_to(kip, 3)
        assert found == ["web", "web-1", "web-2"]
        seen = hosts(port, 90)
        assert set(seen) == set(found) and min(seen.values()) >= 10, seen
        assert http_get(port, "/word").decode().split()[1] == "kept", "they go on from where it was"
        assert stays.get("/word") == b"web kept", "a connection that is open stays where it is"
    assert {view["spec"]["ports"][0]["private"] for view in (Proc(kip, name).inspect() for name in found[1:])} == {True}
    wait_for("the others are gone", lambda: names(kip) == {"web"}, 60)
    assert [line.split(" is ")[0] for line in told(kip) if " is added (hot): " in line] == ["web-1", "web-2"]
    assert any("gets no new connections" in line for line in told(kip)) and any("is removed" in line for line in told(kip))
    assert hosts(port, 5) == {"web": 5}


# promise scaling: with `--min N` so many are there at once, and stay awake; by `--off`, and when
#   the proc is stopped or removed, the replicas are removed
def test_at_least_so_many_are_awake(kip: Kip) -> None:
    port = run(kip, "--idle", "1s", "--park-after", "1s").port()
    scale(kip, "--min", "2", "--max", "2")
    is_scaled_to(kip, 2)
    time.sleep(4)
    assert {proc["name"]: proc["state"] for proc in kip.json("ps")} == {"web": "running", "web-1": "running"}
    assert set(hosts(port, 30)) == {"web", "web-1"}
    scale(kip, "--off")
    wait_for("it is alone", lambda: names(kip) == {"web"})
    assert hosts(port, 3) == {"web": 3} and scale(kip)["scaling"] is None
    Proc(kip, "web").wait_state("hibernated", 20)
    scale(kip, "--min", "2")
    is_scaled_to(kip, 2)
    kip.cli("stop", "web")
    wait_for("the replica is gone", lambda: names(kip) == {"web"})
    kip.cli("start", "web")
    is_scaled_to(kip, 2)
    kip.cli("rm", "--force", "web")
    wait_for("all are gone", lambda: names(kip) == set())


def test_replicas_of_a_compose_file(kip: Kip, tmp_path: Path) -> None:
    kip.cli("image", "load", f"oci:{images.layout(tmp_path / 'web', one=images.web())}:one", "--name", "web:1")
    file = tmp_path / "compose.yaml"
    file.write_text("name: shop\nservices:\n  web:\n    image: web:1\n    ports: ['8080']\n    deploy: {replicas: 3}\n")
    assert kip.cli("apply", "-f", file).stderr == ""
    wait_for("all are there", lambda: sum(one["in_rotation"] for one in scale(kip, name="shop-web")["replicas"]) == 3, 60)
    assert http_get(Proc(kip, "shop-web").port(8080)) == b"first\n"
    assert actions(kip, "apply", "-f", file) == {"shop-web": "same"}
    file.write_text(file.read_text().replace("replicas: 3", "replicas: 1"))
    kip.cli("apply", "-f", file)
    wait_for("one is left", lambda: names(kip) == {"shop-web"}, 30)
    kip.remove_all()
    kip.cli("image", "gc", "--all")


# promise scaling: replicas of a proc that was removed do not serve for another one of its name
def test_another_proc_of_its_name(kip: Kip) -> None:
    port = run(kip, ports=(f"{free_port()}:8080",)).port()
    http_get(port, "/set/old")
    scale(kip, "--min", "3")
    is_scaled_to(kip, 3)
    kip.cli("rm", "--force", "web")
    run(kip, ports=(f"{port}:8080",))
    scale(kip, "--min", "2")
    for _ in range(40):
        assert http_get(port, "/word").decode().split()[1] == "-", "it is of the new one"
    wait_for("the old ones are gone", lambda: len(names(kip)) == 2, 30)
    wait_for("both serve", lambda: len(hosts(port, 20)) == 2, 30)


# promise scaling: volumes that were made for a replica go with it
def test_volumes_of_replicas(kip: Kip) -> None:
    run(kip, "--volume", "shop:/data")
    for _ in range(2):
        scale(kip, "--min", "2", "--volumes", "copy")
        is_scaled_to(kip, 2)
        assert {volume["name"] for volume in kip.json("volume", "ls")} >= {"shop", "shop-web-1"}
        scale(kip, "--off")
        wait_for("it is alone", lambda: names(kip) == {"web"}, 30)
        wait_for("its volume is gone", lambda: [v["name"] for v in kip.json("volume", "ls") if v["name"].startswith("shop")] == ["shop"])
    for words, said in [
        (["--volumes", "copy", "--method", "cold"], "leave out --method cold"),
        (["--volumes", "share", "--method", "warm"], "leave out --method warm"),
    ]:
        assert said in kip.refused("scale", "web", "--max", "2", *words), words


# promise scaling: a proc that is replaced is answered for by the one or the other all the while,
#   unless both would write to one volume; its replicas go, and the new one has its own
@pytest.mark.parametrize("flags", [(), ("--volume", "shop:/data")], ids=["beside", "after"])
def test_it_is_replaced(kip: Kip, tmp_path: Path, flags: tuple[str, ...]) -> None:
    port = free_port()

    def table(word: str) -> Path:
        volume = 'volume = ["shop:/data"]\nscale-volumes = "share"' if flags else ""
        file = tmp_path / "kip.toml"
        command = json.dumps(["/usr/bin/python3", "-c", SERVER.replace('word = "-"', f'word = "{word}"')])
        file.write_text(f"[proc.web]\ncommand = {command}\nport = [\"{port}:8080\"]\nscale-min = 2\nscale-max = 2\n{volume}\n")
        return file

    kip.cli("apply", "-f", table("old"))
    is_scaled_to(kip, 2)
    # Where both would write to one volume the old ones end first, in the middle of what they do.
    with nullcontext() if flags else load(port, 2, 1):
        time.sleep(0.3)
        kip.cli("apply", "--replace", "-f", table("new"))
        is_scaled_to(kip, 2)
    wait_for("the old ones are gone", lambda: len(names(kip)) == 2, 30)
    assert {http_get(port, "/word").decode().split()[1] for _ in range(20)} == {"new"}


# promise scaling: a replica whose program ends is replaced, and so is the proc itself
def test_one_that_dies_is_replaced(kip: Kip) -> None:
    web = run(kip)
    port = web.port()
    scale(kip, "--min", "3", "--max", "3")
    is_scaled_to(kip, 3)
    Proc(kip, "web-1").exec("kill", "-KILL", "2", check=False)
    wait_for("it is replaced", lambda: any("web-1 has ended" in line for line in told(kip)), 30)
    wait_for("all serve", lambda: is_scaled_to(kip, 3) and len(hosts(port, 60)) == 3, 30)
    assert all(" is added (hot): " in line for line in told(kip) if "added" in line), told(kip)
    web.exec("kill", "-KILL", "2", check=False)
    wait_for("it is started again", lambda: "web has ended and is started again" in told(kip), 30)
    wait_for("all serve", lambda: is_scaled_to(kip, 3) and len(hosts(port, 60)) == 3, 30)


# promise scaling: procs of its network reach the replicas by its name; a proc outside does not
def test_by_its_name_in_a_network(kip: Kip) -> None:
    run(kip, "--network", "shop", ports=("8080,private",))
    scale(kip, "--min", "3")
    is_scaled_to(kip, 3)
    ask = "import http.client\nfor _ in range(60):\n c = http.client.HTTPConnection('{}', 8080, timeout=3); c.request('GET', '/'); print(c.getresponse().read().decode().split()[0])"
    near = kip.run("near", ["/bin/sleep", "1000"], flags=("--network", "shop"))
    seen = Counter(near.exec("/usr/bin/python3", "-c", ask.format("web")).stdout.split())
    assert set(seen) == {"web", "web-1", "web-2"} and min(seen.values()) >= 6, seen
    far = kip.run("far", ["/bin/sleep", "1000"])
    address = Proc(kip, "web").address(8080).rpartition(":")[0].strip("[]")
    assert far.exec("/usr/bin/python3", "-c", ask.format(address), check=False).returncode != 0


# promise scaling: a check of the owner's adds replicas while it fails, and is no activity
def test_a_probe_asks_for_more(kip: Kip) -> None:
    web = run(kip, "--idle", "2s", "--park-after", "1h")
    scale(kip, "--max", "2", "--probe", "http:8080/enough")
    web.wait_state("hibernated", 30)
    http_get(web.port(), "/set/more")
    is_scaled_to(kip, 2)
    assert any("its probe asks for more" in line for line in told(kip))


# promise scaling: the next daemon goes on with the replicas that are there; a port that is changed
#   leads to all of them
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_the_next_daemon_goes_on(kip: Kip, how: signal.Signals) -> None:
    web = run(kip)
    port = web.port()
    scale(kip, "--min", "2")
    is_scaled_to(kip, 2)
    assert kip.daemon
    kip.daemon.send_signal(how)
    kip.wait_dead()
    assert hosts(port, 20).total() == 20, "what leads to them is the kernel's"
    kip.up()
    is_scaled_to(kip, 2)
    wait_for("both serve", lambda: set(hosts(port, 20)) == {"web", "web-1"}, 20)
    assert names(kip) == {"web", "web-1"}
    other = free_port()
    kip.cli("update", "web", "-p", f"{other}:8080")
    wait_for("both serve there", lambda: set(hosts(other, 20)) == {"web", "web-1"}, 20)


# promise scaling: replicas begin warm, cold or hot, as asked; by itself warm where there is a
#   template, and cold where a proc cannot be cloned
@pytest.mark.parametrize("method", ["hot", "warm", "cold", "auto"])
def test_what_they_begin_from(kip: Kip, method: str) -> None:
    web = run(kip)
    http_get(web.port(), "/set/before")
    if method in ("warm", "auto"):
        kip.cli("template", "take", "web")
    http_get(web.port(), "/set/after")
    scale(kip, "--min", "2", "--method", method)
    is_scaled_to(kip, 2)
    word = {"hot": "after", "cold": "-"}.get(method, "before")
    assert Proc(kip, "web-1").exec("/usr/bin/python3", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8080); c.request('GET', '/'); print(c.getresponse().read().decode())").stdout.split() == ["web-1", word]


# promise scaling: what cannot be scaled is refused with one clear line
def test_what_cannot_be_is_one_line(kip: Kip) -> None:
    run(kip)
    kip.run("portless", ["/bin/sleep", "1000"])
    kip.run("written", ["/bin/sleep", "1000"], flags=("-p", "80", "--volume", "data:/data"))
    for words, said in [
        (["web", "--max", "33"], "cannot be scaled to 33: say 1 to 32"),
        (["web", "--max", "0"], "cannot be scaled to 0: say 1 to 32"),
        (["web", "--min", "3", "--max", "2"], "at least 3 and at most 2"),
        (["portless", "--max", "2"], "portless has no ports"),
        (["written", "--max", "2"], "--volumes share, copy or drop"),
        (["nobody", "--max", "2"], "there is no proc"),
    ]:
        assert said in kip.refused("scale", *words), words
    scale(kip, "--min", "2")
    is_scaled_to(kip, 2)
    assert "web-1 is a replica of web: scale that" in kip.refused("scale", "web-1", "--max", "2")
    with pytest.raises(Failed, match="unexpected|invalid value"):
        kip.cli("scale", "web", "--method", "lukewarm")
