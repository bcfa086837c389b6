"""What a proc may do to its own files and within its own user namespace: `--read-only`, `--cap-add`, `--cap-drop`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import logged, servers
from harness.clients import Lines, http_get
from harness.kip import Kip, Proc
from harness.programs import SOURCES

# A server that says which capabilities its process has, and tries to write at the path that a
# client names.
SERVER = """
import socket, re
server = socket.create_server(("0.0.0.0", 7500))
while True:
    client, _ = server.accept()
    with client, client.makefile() as lines:
        for line in lines:
            said = []
            for path in line.split():
                try:
                    open(path + "/tried", "a").write("x")
                    said.append("yes")
                except OSError as error:
                    said.append(str(error.errno))
            status = open("/proc/self/status").read()
            said += re.findall(r"^Cap(?:Prm|Bnd):\\s+(\\S+)", status, re.M)
            client.sendall((" ".join(said) + "\\n").encode())
"""
WAYS = {
    "hibernated": Proc.hibernate,
    "parked": Proc.sleep,
    "archived": Proc.archive,
}
ENGINES = pytest.mark.parametrize("engine", ["natively", "by CRIU"])
READ_ONLY = "30"
USUAL, CHOWN, KILL, SETUID, BIND, PTRACE = 0xA00425FB & ~(1 << 27) & ~(1 << 13), 1, 1 << 5, 1 << 7, 1 << 10, 1 << 19


def asked(proc: Proc, paths: str = "") -> list[str]:
    client = Lines(proc.port())
    said = client.ask(paths).split()
    client.close()
    return said


def capabilities(proc: Proc) -> int:
    permitted, bounding = asked(proc)
    assert permitted == bounding
    return int(permitted, 16)


# promise sandbox: `--read-only`: neither the program, nor a root beside it, nor `kip cp` writes to
#   the root file system or to /usr; volumes stay as they are; the same after each tier, natively
#   and by CRIU, from a store and after a reboot
@ENGINES
def test_read_only(fresh_kip: Callable[..., Kip], store: Path, tmp_path: Path, engine: str) -> None:
    kip = fresh_kip("--store", str(store), *(["--only-criu"] if engine == "by CRIU" else []))
    kip.expected += [*logged.KEEPER_GONE, logged.FETCHED_AGAIN]
    flags = ["--read-only", "-v", "data:/srv/deep/data"]
    proc = kip.run("fixed", ["python3", "-c", SERVER], ports=["7500"], flags=flags)

    def check() -> None:
        places = "/ /etc /usr/bin /srv/deep /run /tmp"
        assert asked(proc, places + " /srv/deep/data")[:7] == [READ_ONLY] * 6 + ["yes"]
        assert "Read-only file system" in proc.exec("touch", "/etc/new", check=False).stderr
        assert proc.exec("sh", "-c", "echo x > /dev/null && mount -o remount,rw / || echo refused").stdout == "refused\n"

    check()
    for tier, sleep in WAYS.items():
        sleep(proc)
        check()
        assert tier != "parked" or proc.rebuilt() == (engine == "natively")
    (tmp_path / "file").write_text("x")
    for sleep in (None, proc.sleep):
        if sleep:
            sleep()
        assert "read-only" in kip.refused("cp", tmp_path / "file", "fixed:/etc/file").lower()
        kip.cli("cp", tmp_path / "file", "fixed:/srv/deep/data/file")
    assert "root" in kip.cli("inspect", "fixed").stdout and kip.json("inspect", "fixed")["spec"]["read_only"]
    kip.reboot()
    check()


# promise sandbox: a real server on a read-only root file system sleeps in each tier and goes on
def test_a_server_on_a_read_only_root(archiving: Kip, tmp_path: Path) -> None:
    web = servers.lighttpd()
    proc = archiving.run("web", web.command, ports=web.published, tar=web.tarball(tmp_path), flags=["--read-only"])
    for sleep in WAYS.values():
        assert http_get(proc.port(), "/page.html") == servers.PAGE
        sleep(proc)
    assert http_get(proc.port(), "/page.html") == servers.PAGE


# promise sandbox: `--cap-add` and `--cap-drop` with Docker's names: the program, a root beside it
#   and a session of a client have what is said and no more, after each tier, natively and by CRIU
# held by: this,
#   `kip_types::spec::capability::tests::sets_are_those_of_docker_among_what_can_be_given`,
#   `kip_types::spec::capability::tests::names_are_those_of_the_kernel`
@ENGINES
def test_capabilities(fresh_kip: Callable[..., Kip], store: Path, engine: str) -> None:
    kip = fresh_kip("--store", str(store), *(["--only-criu"] if engine == "by CRIU" else []))
    cases = {
        "usual": ([], USUAL),
        "none": (["--cap-drop", "ALL"], 0),
        "one": (["--cap-drop", "all", "--cap-add", "CAP_NET_BIND_SERVICE"], BIND),
        "fewer": (["--cap-drop", "chown", "--cap-drop", "NET_RAW", "--cap-drop", "KILL"], USUAL & ~CHOWN & ~KILL),
        "more": (["--cap-add", "SYS_PTRACE"], USUAL | PTRACE),
        "all": (["--cap-add", "ALL", "--cap-drop", "SETUID"], USUAL & ~SETUID | PTRACE | 1 << 2 | 1 << 15),
    }
    procs = {name: kip.run(name, ["python3", "-c", SERVER], ports=["7500"], flags=f) for name, (f, _) in cases.items()}

    def check(name: str) -> None:
        expected = cases[name][1]
        assert capabilities(procs[name]) == expected, name
        status = procs[name].exec("cat", "/proc/self/status").stdout
        found = dict(re.findall(r"^Cap(\w+):\s+(\S+)", status, re.M))
        assert {int(found[key], 16) for key in ("Prm", "Eff", "Bnd")} == {expected}, (name, found)
        assert int(found["Inh"], 16) == int(found["Amb"], 16) == 0

    for name in cases:
        check(name)
    for sleep in WAYS.values():
        for name in ("usual", "none", "one", "all"):
            sleep(procs[name])
            check(name)
    told = kip.cli("inspect", "one").stdout
    assert "ALL" in told and "NET_BIND_SERVICE" in told


# promise sandbox: a program of another user starts without any capability, in sessions too
def test_another_user_without_capabilities(kip: Kip) -> None:
    proc = kip.run("other", ["python3", "-c", SERVER], ports=["7500"], flags=["--cap-drop", "ALL", "-u", "www-data"])
    assert asked(proc) == ["0" * 16] * 2
    assert proc.exec("id", "-u").stdout == "33\n"
    proc.sleep()
    assert asked(proc) == ["0" * 16] * 2


# promise sandbox: a capability that Kip gives to no proc is refused, with those that can be had; so
#   is one that does not exist
def test_what_is_never_given(kip: Kip, tmp_path: Path) -> None:
    line = kip.refused("run", "--cap-add", "SYS_ADMIN", "--", "true")
    assert "Kip gives the capability SYS_ADMIN to no proc" in line and "SYS_PTRACE" in line
    done = kip.cli("run", "--cap-drop", "NET_BINDING", "--", "true", check=False)
    assert done.returncode == 2 and 'there is no capability "NET_BINDING"' in done.stderr
    compose = tmp_path / "compose.yaml"
    compose.write_text("services:\n  web:\n    image: x\n    cap_add: [NET_ADMINS]\n")
    done = kip.cli("apply", "-f", compose, check=False)
    assert done.returncode != 0 and ":4:" in done.stderr and "NET_ADMINS" in done.stderr
    file = tmp_path / "kip.toml"
    file.write_text('[proc.filed]\ncommand = "sleep 1000"\nread-only = true\ncap-add = ["SYS_PTRACE"]\ncap-drop = ["ALL"]\n')
    kip.cli("apply", "-f", file)
    assert kip.cli("diff", "-f", file, check=False).returncode == 0
    spec = kip.json("inspect", "filed")["spec"]
    assert (spec["read_only"], spec["cap_add"], spec["cap_drop"]) == (True, ["SYS_PTRACE"], ["ALL"])
    assert kip.names() == ["filed"]


# promise waking: a process that has called chroot(2) has its root directory after a sleep, and its
#   children have; by plan and by CRIU
@pytest.mark.parametrize("engine", ["plan", "CRIU"])
def test_another_root_directory(fresh_kip: Callable[..., Kip], engine: str) -> None:
    kip = fresh_kip(*(["--only-criu"] if engine == "CRIU" else []))
    flags = ["-v", f"{SOURCES / 'lines.py'}:/srv/lines.py:ro", "--idle", "1h"]
    proc = kip.run("elsewhere", ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=[8080], flags=flags)
    line = Lines(proc.port())
    made = (
        "os.makedirs('/tmp/jail/in'); outside = os.open('/', os.O_RDONLY); r, w = os.pipe(); back, there = os.pipe(); os.chroot('/tmp/jail'); "
        "os.chdir('/in'); other = lambda: [os.write(there, ','.join(os.listdir('/')).encode()) for _ in iter(lambda: os.read(r, 1), b'')]; "
        "os.fork() or other()"
    )
    assert line.ask(made) == "None"
    for number in range(3):
        expected = ["in", *(f"file{before}" for before in range(number))]
        asked = line.ask("(os.getcwd(), sorted(os.listdir('/')), os.write(w, b'x'), sorted(os.read(back, 99).decode().split(',')), 'usr' in os.listdir(outside))")
        assert asked == str(("/in", sorted(expected), 1, sorted(expected), True))
        proc.sleep()
        assert line.ask(f"open('/file{number}', 'w').close()") == "None"
        assert proc.rebuilt() == (engine == "plan")
