"""The sandbox, from inside: a red team (programs/red.c) that tries to reach the host and other procs, limits, identities.

The red team's own positive control is that natively, as root, it gets what it must not get inside."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import leftovers, programs
from harness.kip import Kip, Proc
from harness.wait import wait_for

# What the attempt must get natively, or it proves nothing when it is refused inside. The others
# depend on how the machine's kernel is built, or need a victim that only exists next to the
# attacker.
CONTROL = {
    "host-root-file", "host-tmp-file", "data-spec", "shadow", "proc-shows-others", "root-of-another-process",
    "signal-others", "pidfd-of-others", "abstract-socket", "host-loopback-4", "host-loopback-6", "mknod-mem", "mknod-disk",
    "mknod-null", "dev-kmsg", "write:/proc/sys/kernel/core_pattern", "write:/proc/sys/kernel/hostname",
    "write:/proc/sys/vm/drop_caches", "write:/proc/sys/net/ipv4/ip_forward", "write:/proc/sys/fs/file-max",
    "read:/proc/kmsg", "read:/proc/vmallocinfo", "read:/proc/slabinfo", "raw-socket", "raw-socket-6", "packet-socket",
    "transparent", "priority-mark", "mount-tmpfs", "mount-bind", "mount-remount", "mount-proc", "mount-sysfs",
    "mount-cgroup", "umount-mask", "fsopen", "open_tree", "unshare-user", "unshare-mount", "unshare-net", "unshare-time",
    "clone-user", "clone3-user", "open-by-handle", "sethostname", "bpf", "io_uring", "userfaultfd", "add_key", "keyctl",
    "reboot", "swapon", "adjust-clock", "kernel-log", "acct", "raise-priority", "realtime", "setuid-outside",
    "dangerous-capabilities",
}  # fmt: skip

VICTIM = """
import os, socket, sys, time
loop = socket.create_server(("127.0.0.1", 9100))
loop6 = socket.create_server(("::1", 9100), family=socket.AF_INET6)
abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); abstract.bind("\\0victim-abstract")
web = socket.create_server(("0.0.0.0", 9000))
udp = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); udp.bind(("::", 9000))
open("/tmp/secret-file", "w").write(os.environ["SECRET"])
keep = os.environ["SECRET"] * 1000
while True:
    data, peer = udp.recvfrom(2000)
    print("datagram", data.decode(), "from", peer[0], flush=True)
"""


@dataclass
class Battle:
    kip: Kip
    victim: Proc
    attacker: Proc
    secret: str
    words: list[str]
    inside: dict[str, tuple[str, str]]
    native: dict[str, tuple[str, str]]


def verdicts(output: str) -> dict[str, tuple[str, str]]:
    found = {}
    for line in output.splitlines():
        verdict, name, *detail = line.split(" ", 2)
        assert verdict in ("GOT", "REFUSED", "SENT"), line
        found[name] = (verdict, "".join(detail))
    return found


def gateways(proc: Proc) -> list[str]:
    """Where the proc's packets go first: addresses of the host that only procs see."""
    found = []
    for family in ("-4", "-6"):
        routes = json.loads(proc.exec("ip", "-j", family, "route").stdout or "[]")
        found += [r["gateway"] for r in routes if "gateway" in r]
    return [g for g in found if not g.startswith("fe80")]


@pytest.fixture(scope="module")
def battle(module_kip: Kip, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Battle]:
    secret = "secret-" + secrets.token_hex(12)
    red = programs.c_program("red", "-static")
    tar = programs.tarball(tmp_path_factory.mktemp("tar") / "red.tar", {"srv/red": red})
    own = f"kip-red-team-{os.getpid()}"  # others may test on this machine
    with ExitStack() as stack:
        for path in (Path("/root", own), Path("/tmp", own)):
            path.write_text(secret)
            stack.callback(path.unlink)
        host4 = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        port = host4.getsockname()[1]
        stack.enter_context(closing(socket.create_server(("::1", port), family=socket.AF_INET6)))
        abstract = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
        abstract.bind(f"\0{own}")
        abstract.listen()
        victim = module_kip.run(
            "victim",
            ["/usr/bin/python3", "-c", VICTIM],
            ports=["9000", "9000/udp"],
            # Of the attacker's network: more is out of reach for others.
            flags=["--env", f"SECRET={secret}", "--network", "street"],
        )
        stack.callback(victim.remove)
        flags = ["--network", "street"]
        attacker = module_kip.run("attacker", ["sleep", "100000"], ports=["9999"], tar=tar, wait_ready=False, flags=flags)
        stack.callback(attacker.remove)
        public = [a for a in own_addresses() if a not in ("127.0.0.1", "::1")]
        reached = [*public, *gateways(attacker)]
        secret_in_shadow = Path("/etc/shadow").read_text().splitlines()[-1]
        data = module_kip.data
        pids = [module_kip.info()["pid"], os.getpid(), *victim.inspect()["pids"]]
        words = [
            f"read=host-root-file:/root/{own}:{secret}",
            f"read=host-tmp-file:/tmp/{own}:{secret}",
            f"read=data-spec:{data}/procs/victim/spec.json:{secret}",
            f"read=victim-file-by-data:{data}/procs/victim/upper/root/tmp/secret-file:{secret}",
            f"read=shadow:/etc/shadow:{secret_in_shadow}",
            f"secret={secret}",
            f"pids={','.join(map(str, pids))}",
            f"abstract={own}",
            f"connect=host-loopback-4:127.0.0.1:{port}",
            f"connect=host-loopback-6:::1:{port}",
            f"connect-by-device=host-loopback-by-device:127.0.0.1:{port}",
            f"connect-by-device=host-loopback-by-device-6:::1:{port}",
            f"connect=victim-loopback:{victim.address(9000)}:9100",
            *[f"connect=host-loopback-at-{i}:{a}:{port}" for i, a in enumerate(reached)],
        ]
        inside = verdicts(attacker.exec("/srv/red", *words).stdout)
        # In namespaces of its own, so that nothing that succeeds lasts.
        natively = subprocess.run(
            ["unshare", "-m", "-u", "-i", red, *words], capture_output=True, text=True, timeout=60
        )
        yield Battle(module_kip, victim, attacker, secret, words, inside, verdicts(natively.stdout))


def own_addresses() -> list[str]:
    links = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True, timeout=10).stdout)
    found = [a["local"] for link in links for a in link["addr_info"] if a.get("scope") == "global"]
    return ["127.0.0.1", "::1", *(a for a in found if not a.startswith(("10.213.", "fd6b:6970:")))]


# promise sandbox: what the red team is refused, it gets natively, and its targets are there
# held by: this, `tests/test_sandbox.py::test_the_attacked_is_there`
def test_positive_control(battle: Battle) -> None:
    """Natively the same program gets nearly everything: a refusal inside means something."""
    missed = {name: battle.native.get(name) for name in CONTROL if battle.native.get(name, ("", ""))[0] != "GOT"}
    assert not missed, missed


# promise sandbox: never to the host's own loopback services
# held by: this,
#   `crates/net/tests/reach.rs::procs_reach_nothing_else_of_the_host_or_of_other_networks`
# promise invariants: 9 nothing of a tenant is readable by another tenant
def test_red_team_gets_nothing(battle: Battle) -> None:
    assert len(battle.inside) >= len(CONTROL)
    assert CONTROL <= battle.inside.keys(), CONTROL - battle.inside.keys()
    got = {name: detail for name, (verdict, detail) in battle.inside.items() if verdict == "GOT"}
    assert not got, got


def test_the_attacked_is_there(battle: Battle) -> None:
    """From its own inside the victim's loopback, file and abstract socket are reachable: the attacks had a target."""
    script = (
        "import socket; [socket.create_connection((h, 9100), 2) for h in ('127.0.0.1', '::1')];"
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).connect('\\0victim-abstract');"
        "print(open('/tmp/secret-file').read())"
    )
    assert battle.victim.exec("/usr/bin/python3", "-c", script).stdout.strip() == battle.secret


def test_red_team_after_a_sleep(battle: Battle) -> None:
    """A restored sandbox holds as well as a new one. (Restoring is done by root: this is where a hole would be.)"""
    battle.attacker.sleep()
    battle.attacker.wake()
    after = verdicts(battle.attacker.exec("/srv/red", *battle.words).stdout)
    got = {name: detail for name, (verdict, detail) in after.items() if verdict == "GOT"}
    assert not got, got


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    keys = (
        "Uid",
        "Gid",
        "Groups",
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Seccomp",
        "Seccomp_filters",
    )
    return {k: v.strip() for k, v in (line.split(":", 1) for line in lines if ":" in line) if k in keys}


# promise sandbox: the same ids, capabilities, filters, limits after a sleep
# held by: this, `tests/test_sandbox.py::test_red_team_after_a_sleep`
def test_credentials_are_the_same_after_a_sleep(battle: Battle) -> None:
    """Ids, capabilities, no_new_privs, seccomp, limits, cgroup and namespaces of the program do not change by sleeping."""

    def identity() -> list[object]:
        pid = battle.victim.inspect()["pids"][-1]
        # The user namespace is made anew with the same mapping, as are those of pids and mounts.
        links = {ns: os.readlink(f"/proc/{pid}/ns/{ns}") for ns in ("net", "uts", "ipc")}
        maps = [
            Path(f"/proc/{pid}/{name}").read_text()
            for name in ("uid_map", "gid_map", "cgroup", "limits", "oom_score_adj")
        ]
        return [status_of(pid), links, maps]

    before = identity()
    assert before[0]["NoNewPrivs"] == "1" and before[0]["Seccomp"] == "2"
    battle.victim.sleep()
    battle.victim.wake()
    assert identity() == before


# promise sandbox: each proc has its own block of ids
def test_no_id_of_the_host(battle: Battle) -> None:
    """Each proc has a block of ids of its own, far from the host's and from each other's."""
    blocks = []
    for proc in (battle.victim, battle.attacker):
        uids = {int(status_of(pid)["Uid"].split()[0]) for pid in proc.inspect()["pids"]}
        assert all(uid >= leftovers.FIRST_UID for uid in uids), uids
        blocks.append({uid >> 16 for uid in uids})
        assert len(blocks[-1]) == 1
    assert blocks[0] != blocks[1]


def datagrams(proc: Proc) -> str:
    return "\n".join(line for line in proc.logs().splitlines() if line.startswith("datagram"))


# promise sandbox: source addresses cannot be forged
def test_source_addresses_cannot_be_forged(battle: Battle) -> None:
    """No datagram of the attacker arrives with a source that is not its own."""
    own = battle.attacker.address(9999)
    target = battle.victim.address(9000, "udp")
    six = battle.victim.exec("sh", "-c", "ip -6 -o addr show scope global | head -1").stdout
    target6 = re.search(r"inet6 ([0-9a-f:]+)", six)[1]
    words, forged = [], []
    near = target.rsplit(".", 1)[0] + ".77"
    for i, (source, to) in enumerate(
        [(near, target), ("127.0.0.1", target), (own_addresses()[2], target), ("203.0.113.5", target),
         (target6[:-1] + "e", target6), ("2001:db8::5", target6), ("::1", target6)]
    ):  # fmt: skip
        words.append(f"spoof=spoof-{i}:{source},{to},9000,forged-{i}")
        forged.append(f"forged-{i}")
    battle.attacker.exec("/srv/red", *words)
    script = (
        f"import socket; s=socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'honest', ('{target}', 9000))"
    )
    battle.attacker.exec("/usr/bin/python3", "-c", script)
    wait_for("the honest datagram arrives", lambda: "honest" in datagrams(battle.victim), 30)
    seen = datagrams(battle.victim)
    assert own in seen, "the honest one has its own address"
    assert not [f for f in forged if f in seen], seen


# promise sandbox: files are private, writable, kept
# held by: this, `crates/sandbox/tests/sandbox.rs::files_belong_to_the_block_and_stay`
def test_writes_stay_inside(battle: Battle) -> None:
    """A proc may change what it sees of the host's files; the host and its neighbour do not see it."""
    name = "kip-red-team-was-here"
    for directory in ("/usr/bin", "/etc", "/tmp", "/usr/local/bin", "/"):
        battle.attacker.exec("sh", "-c", f"echo x > {directory}/{name}")
        assert not Path(directory, name).exists()
        assert battle.victim.exec("test", "-e", f"{directory}/{name}", check=False).returncode == 1
    env = Path("/usr/bin/env").read_bytes()
    battle.attacker.exec("sh", "-c", "cp /usr/bin/false /usr/bin/env.new && mv /usr/bin/env.new /usr/bin/env")
    assert Path("/usr/bin/env").read_bytes() == env
    assert battle.victim.exec("/usr/bin/env", "true").returncode == 0
    battle.attacker.sleep()
    battle.attacker.wake()
    for directory in ("/usr/bin", "/etc", "/tmp", "/"):
        assert battle.attacker.exec("cat", f"{directory}/{name}").stdout == "x\n", "what it wrote is kept"


# promise P1: a proc runs from the host's own files, an allowlist
# held by: this, `tests/test_redis.py::test_twenty_cycles`
def test_base_is_an_allowlist(battle: Battle) -> None:
    """Nothing of the host's /root, /home, /etc beyond the list; of /var/lib and its like empty directories, and a shadow file of our own."""
    listing = battle.attacker.exec("sh", "-c", "ls -A /root /home /srv; ls /etc").stdout
    for name in ("mysql", "postfix", "gshadow", "ssh", "sudoers", ".ssh", ".bashrc", "redis"):
        assert name not in listing.split(), f"{name} of the host is visible"
    places = ["/var/lib", "/var/log", "/var/cache", "/var/spool"]
    assert battle.attacker.exec("find", *places, "!", "-type", "d").stdout == "", "a file of the host's /var"
    shadow = battle.attacker.exec("cat", "/etc/shadow").stdout
    assert shadow and "$" not in shadow, "a password of the host"


# promise sandbox: no_new_privs unless `--allow-setuid`
# held by: this, `tests/test_postfix.py::test_setgid_program_inside`
def test_no_setuid_without_asking(kip: Kip) -> None:
    """A setuid program changes identity only where the spec allows it, and then within the proc's own ids."""
    script = (
        "cp /usr/bin/id /tmp/sid && chmod 4755 /tmp/sid && setpriv --reuid=1000 --regid=1000 --clear-groups /tmp/sid -u"
    )
    plain = kip.run("plain", ["sleep", "1000"])
    assert plain.exec("sh", "-c", script).stdout.strip() == "1000"
    allowed = kip.run("allowed", ["sleep", "1000"], flags=["--allow-setuid"])
    assert allowed.exec("sh", "-c", script).stdout.strip() == "0"
    assert allowed.exec("sh", "-c", "grep NoNewPrivs /proc/self/status").stdout.split()[1] == "0"


# promise P14: limits of memory; inspect, ps, events and the log say so of a program that the kernel
#   ends for lack of memory
# promise sandbox: a wake needs no more than the limits, which hold again after it
# held by: this, `tests/test_sandbox.py::test_process_limit`
def test_memory_limit(kip: Kip, battle: Battle) -> None:
    """Too much memory kills the program, and only that; inspect, ps and events say how it ended."""
    eater = "import time\ndata=[]\nwhile True: data.append(b'x' * (1 << 20))"
    proc = kip.run("eater", ["/usr/bin/python3", "-c", eater], flags=["--mem", "64M"])
    # Each of these looks counts the kills, and one of them may come before the daemon knows of the
    # end.
    deadline = time.monotonic() + 30
    while (view := proc.inspect())["state"] != "stopped":
        assert time.monotonic() < deadline, view
    assert view["exit"] == "signal 9, out of memory", view["exit"]
    assert (view["exit_code"], view["out_of_memory"]) == (137, True)
    assert "137 (memory)" in kip.cli("ps").stdout
    told = [event["detail"] for event in kip.events() if event["name"] == "eater" and event["kind"] == "exited"]
    assert told == ["signal 9, out of memory"]
    assert proc.logs() == "[kip: the kernel has ended the program: out of memory at its limit of 64 MiB]\n"
    assert battle.victim.state == "running"
    small = "import time\ndata = b'x' * (20 << 20)\ntime.sleep(1000)"
    modest = kip.run("modest", ["/usr/bin/python3", "-c", small], flags=["--mem", "64M"])
    modest.sleep()
    modest.wake()  # restoring needs no more than running
    assert modest.state == "running"


# promise P14: limits of processes
def test_process_limit(kip: Kip) -> None:
    """A fork bomb ends at its limit and leaves the machine alone; it can be parked and removed all the same."""
    bomb = """
import os, time
n = 0
try:
    while n < 500:
        if os.fork() == 0:
            time.sleep(1000)
        n += 1
except OSError:
    print("stopped at", n, flush=True)
time.sleep(1000)
"""
    proc = kip.run("bomb", ["/usr/bin/python3", "-c", bomb], flags=["--pids", "25"])
    wait_for("the bomb has stopped", lambda: "stopped at" in proc.logs(), 30)
    reached = int(proc.logs().split()[2])
    assert 15 <= reached <= 25, proc.logs()
    proc.sleep()
    proc.wake()
    assert len(proc.inspect()["pids"]) >= reached


# promise P14: limits of CPU time
def test_cpu_limit(kip: Kip) -> None:
    burner = """
import time
begun = time.monotonic()
while time.monotonic() - begun < 2:
    pass
print("used", time.process_time(), flush=True)
time.sleep(1000)
"""
    proc = kip.run("burner", ["/usr/bin/python3", "-c", burner], flags=["--cpus", "0.25"])
    wait_for("it has measured", lambda: "used" in proc.logs(), 30)
    used = float(proc.logs().split()[1])
    assert used < 1.0, f"a quarter of a core for two seconds is 0.5 s, it used {used} s"


# promise sandbox: orphans are reaped; the program is not pid 1
# held by: this, `tests/test_sandbox.py::test_sigterm_ends_a_program_that_does_not_handle_it`
def test_orphans_are_reaped(kip: Kip) -> None:
    proc = kip.run("parent", ["sleep", "1000"])
    proc.exec("sh", "-c", "for i in 1 2 3 4 5; do (sleep 0.05 & sleep 0.02); done; sleep 0.2")

    def zombies() -> list[str]:
        lines = proc.exec("sh", "-c", "cat /proc/[0-9]*/stat").stdout.splitlines()
        return [line for line in lines if line.rsplit(")", 1)[1].split()[0] == "Z"]

    wait_for("no zombie is left", lambda: not zombies(), 30)


def test_sigterm_ends_a_program_that_does_not_handle_it(kip: Kip) -> None:
    """A program that were pid 1 would ignore it: stop would have to wait and kill."""
    proc = kip.run("plain-sleep", ["sleep", "1000"])
    begun = time.monotonic()
    kip.cli("stop", proc.name, "--grace", "60s", timeout=90)
    assert time.monotonic() - begun < 30, "it waited for the grace to pass"
    assert proc.inspect()["exit"] == "signal 15", proc.inspect()["exit"]
