"""Limited egress: a proc calls what its rules name and nothing else, in every tier and while no daemon runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import programs
from harness.clients import http_get
from harness.kip import Kip, Proc, binary
from harness.outside import Outside, outside
from harness.wait import wait_for

FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"
WRAPPER = """\
#!/bin/sh
exec unshare -m --propagation private sh -c 'mount --bind {conf} /etc/resolv.conf && exec {kip} "$@"' sh "$@"
"""


@pytest.fixture(scope="module")
def world() -> Iterator[Outside]:
    """shop.example and the name server are at one of its addresses, evil.example at the other."""
    with outside() as there:
        table = [f"shop.example={there.there4}", f"*.cdn.example={there.there4}", f"evil.example={there.also4}"]
        script = programs.SOURCES / "names.py"
        server = subprocess.Popen(
            [*there.inside, sys.executable, script, there.there4, *table], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout and server.stdout.readline() == "ready\n"
            yield there
        finally:
            server.kill()
            server.wait()


@pytest.fixture
def knowing(fresh_kip: Callable[..., Kip], world: Outside, store: Path, tmp_path: Path) -> Kip:
    """A daemon whose machine has that world's name server, archiving."""
    conf, wrapper = tmp_path / "resolv.conf", tmp_path / "kip"
    conf.write_text(f"nameserver {world.there4}\n")
    wrapper.write_text(WRAPPER.format(conf=conf, kip=binary()))
    wrapper.chmod(0o755)
    return fresh_kip("--store", str(store), program=wrapper)


def limited(kip: Kip, name: str, *rules: str, flags: tuple[str, ...] = ()) -> Proc:
    words = [word for rule in rules for word in ("--egress", rule)]
    return kip.run(name, ["/usr/bin/python3", "-c", "import time; time.sleep(100000)"], flags=[*words, *flags])


def fetched(proc: Proc, url: str) -> str:
    """The page, or the last line of what went wrong."""
    done = proc.exec("/usr/bin/python3", "-c", FETCH, url, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def calls(proc: Proc, address: str, port: int) -> bool:
    """By its network alone, with the daemon or without."""
    script = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
    pid = proc.inspect()["pids"][0] if proc.kip.alive() else PIDS[proc.name]
    PIDS[proc.name] = pid
    words = ["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-c", script, address, str(port)]
    return subprocess.run(words, capture_output=True, timeout=30).returncode == 0


PIDS: dict[str, int] = {}


def told(proc: Proc) -> list[str]:
    return [call["to"] for call in proc.kip.json("why", proc.name).get("egress_refused", [])]


# promise sandbox: `--egress RULE`: a proc calls the names, addresses and ports that its rules have,
#   and nothing else; `kip why` and events tell what it was refused; names are found by the proc's
#   own resolver, which asks for no others; so it stays in every tier, over a daemon that is killed,
#   and while none runs
# held by: this, `kip_types::spec::egress::tests::rules_are_written_as_they_are_read`,
#   `kip_types::spec::egress::tests::names_are_covered_whole_or_below`,
#   `kip_engine::host::egress::tests::addresses_of_names_are_kept_for_the_next_daemon`,
#   `kip_engine::host::egress::tests::what_was_not_asked_for_the_longest_goes`
# promise K16: egress by name, address and port
def test_names_in_every_tier(knowing: Kip, world: Outside) -> None:
    proc = limited(knowing, "agent", "shop.example:80", "*.cdn.example:80/tcp")
    assert proc.exec("cat", "/etc/resolv.conf").stdout.count("nameserver") == 1

    def holds() -> None:
        assert fetched(proc, "http://shop.example/") == "page of shop.example"
        assert fetched(proc, "http://a.cdn.example/") == "page of a.cdn.example"
        assert "Name or service not known" in fetched(proc, "http://evil.example/")
        assert "Name or service not known" in fetched(proc, "http://cdn.example/")
        assert "No route to host" in fetched(proc, f"http://{world.also4}/")
        assert "No route to host" in fetched(proc, "http://shop.example:81/")
        assert not calls(proc, world.there4, 53), "the name server itself"

    assert not calls(proc, world.there4, 80), "its name was not asked for yet"
    holds()
    refusals = {f"tcp {world.also4}:80", f"tcp {world.there4}:81", f"tcp {world.there4}:53", f"tcp {world.there4}:80"}
    refusals |= {"name evil.example", "name cdn.example"}
    assert set(told(proc)) == refusals
    text = knowing.cli("why", "agent").stdout
    assert f"tcp {world.also4}:80, which its egress rules do not name, " in text, text
    events = lambda: {e["detail"] for e in knowing.events() if e["kind"] == "egress-refused"}  # noqa: E731
    wait_for("events of all that was refused", lambda: events() == refusals, 20)
    for go in (proc.hibernate, proc.sleep, proc.archive):
        go()
        holds()
    # Its connections go on where no daemon runs, and so do its limits.
    assert calls(proc, world.there4, 80)
    knowing.kill()
    assert calls(proc, world.there4, 80) and not calls(proc, world.also4, 80) and not calls(proc, world.there4, 81)
    knowing.up()
    # What it knows the address of it does not ask for again.
    assert calls(proc, world.there4, 80) and not calls(proc, world.also4, 80)
    proc.sleep()
    knowing.kill()
    knowing.up()
    proc.wake()
    assert calls(proc, world.there4, 80) and not calls(proc, world.also4, 80)
    holds()


def test_addresses_and_ports(kip: Kip, world: Outside) -> None:
    network = world.there4.rsplit(".", 1)[0] + ".0/24"
    some = limited(kip, "some", f"{network}:81/tcp", f"{world.also4}:80-90", f"[{world.there6}]:22/udp")
    assert calls(some, world.there4, 81) and calls(some, world.also4, 81) and calls(some, world.also4, 80)
    assert not calls(some, world.there4, 80)
    free = limited(kip, "free", "all")
    assert calls(free, world.there4, 80) and told(free) == []
    shown = " ".join(kip.cli("inspect", "some").stdout.split())
    assert f"may call {network}:81/tcp may call {world.also4}:80-90 may call [{world.there6}]:22/udp" in shown, shown


# promise sandbox: procs with `egress = ["none"]`, as services of an internal network of a Compose
#   file are, reach each other, are reached by their published ports, and call nothing outside
# held by: this, `kip_describe::compose::tests::services_of_internal_networks_call_nothing_outside`
def test_nothing_outside(knowing: Kip, world: Outside, tmp_path: Path) -> None:
    file = tmp_path / "kip.toml"
    file.write_text(
        '[proc.db]\ncommand = "/usr/bin/python3 -m http.server 8000"\nport = ["8000"]\nnetwork = "back"\negress = ["none"]\n'
        '[proc.app]\ncommand = "/usr/bin/sleep 100000"\nnetwork = "back"\negress = ["shop.example"]\n'
    )
    knowing.cli("apply", "-f", file)
    app, db = Proc(knowing, "app"), Proc(knowing, "db")
    wait_for("the server listens", lambda: "Directory listing" in fetched(app, "http://db:8000/"), 20)
    assert fetched(app, "http://shop.example/") == "page of shop.example"
    assert not calls(db, world.there4, 80) and told(db) == [f"tcp {world.there4}:80"]
    assert "Name or service not known" in fetched(db, "http://shop.example/")
    assert b"Directory listing" in http_get(db.port())
    assert db.inspect()["spec"]["egress"] == ["none"]


def test_bad_rules(kip: Kip) -> None:
    for rules, words in [
        (["none", "db.example"], "egress none stands alone"),
        (["x.example:99999"], "no rule for egress"),
        ([f"192.0.2.{n}" for n in range(65)], "65 rules for egress are too many: at most 64"),
    ]:
        flags = [word for rule in rules for word in ("--egress", rule)]
        done = kip.cli("run", *flags, "--name", "bad", "--", "sleep", "9", check=False)
        assert done.returncode != 0 and words in done.stderr, done.stderr
    line = kip.refused("run", "--egress", "db.example", "-p", "53/udp", "--name", "bad", "--", "sleep", "9")
    assert "this proc has port 53 for itself: name addresses instead" in line
