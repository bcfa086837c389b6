"""A server without Kip: natively, dumped and restored by plain CRIU, and under runc."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from parkwake.client import Client, Reply
from parkwake.network import Network
from parkwake.setups import Setup
from parkwake.workspace import Failed, Workspace, command

# What Docker gives a container; runc's own default has too little for servers that drop their
# rights.
CAPABILITIES = """CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT
KILL AUDIT_WRITE""".split()
CAP_SYS_RESOURCE = 24


def make_root(work: Workspace, skeleton: Path, setup: Setup, name: str, extra: dict[str, Path]) -> Path:
    """A root directory as Kip lays it out: the allowlist of the host's files, and the server's own over that."""
    root = work.dir / "roots" / f"{setup.name}-{name}"
    root.parent.mkdir(exist_ok=True)
    command("cp", "-a", skeleton, root)
    tar = setup.server.tarball(work.dir)
    command("tar", "-x", "-f", tar, "--numeric-owner", "-C", root)
    # Looking up the own name must not wait for a name server that is out of reach.
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost runc {socket.gethostname()}\n")
    (root / "etc/resolv.conf").write_text("nameserver 127.0.0.1\n")
    for inside, source in extra.items():
        (root / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, root / inside)
    return root


@dataclass
class Started:
    """A running server of ours."""

    process: subprocess.Popen[str]
    pid: int
    exec_ns: int


class Entered:
    """A server started by `enter`, natively or in namespaces."""

    def __init__(self, enter: Path, how: str, root: Path, network: Network, setup: Setup):
        self.network, self.root = network, root
        self.words = [str(enter), how, str(root), str(network.path), *setup.server.command]

    def start(self) -> Started:
        process = subprocess.Popen(self.words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        line = process.stdout.readline().split()
        if len(line) != 2:
            raise Failed(f"enter: exit {process.wait()}")
        return Started(process, int(line[0]), int(line[1]))

    def end(self, started: Started, but: tuple[int, ...] = ()) -> None:
        self.network.end_servers(but)
        started.process.wait(10)
        assert started.process.stdout
        started.process.stdout.close()

    def output(self) -> str:
        path = self.root / "tmp/output"
        return path.read_text(errors="replace")[-500:] if path.exists() else ""


class Native:
    """No sandbox: a chroot, and a loopback of its own so that ports of the machine stay free."""

    def __init__(self, work: Workspace, tools: dict[str, Path], root: Path, number: int, setup: Setup):
        self.setup, self.network = setup, Network(work, number, veth=False)
        self.server = Entered(tools["enter"], "native", root, self.network, setup)
        self.client = Client(tools["client"], self.network.path)

    @contextmanager
    def running(self) -> Iterator[tuple[Started, Reply]]:
        """The server, and its first reply."""
        self.client.begin_first(self.setup.first, self.network.address, self.setup.port)
        started = self.server.start()
        try:
            yield started, self.client.reply()
        finally:
            self.server.end(started, (self.client.pid,))

    def ask(self) -> Reply:
        return self.client.first(self.setup.first, self.network.address, self.setup.port)


class Criu:
    """CRIU as one uses it by hand, in the arrangement that suits it best: the network namespace is kept (as runc and podman
    keep it), so that CRIU need not make it again; uts, ipc, pid and mount namespaces are CRIU's."""

    def __init__(self, work: Workspace, tools: dict[str, Path], root: Path, number: int, setup: Setup, program: list[str]):
        self.setup, self.network, self.root = setup, Network(work, number, veth=True), root
        self.server = Entered(tools["enter"], "sandbox", root, self.network, setup)
        self.images, self.pid_file = work.dir / f"images-{setup.name}", work.dir / f"pid-{setup.name}"
        self.program = program
        self.pid: int | None = None
        self.started: Started | None = None
        work.bind(root)

    def begin(self, client: Client) -> Reply:
        """Starts the server afresh."""
        self.end()
        client.begin_first(self.setup.first, self.network.address, self.setup.port)
        self.started = self.server.start()
        self.pid = self.started.pid
        return client.reply()

    def end(self) -> None:
        self.network.end_servers()
        if self.started:
            self.server.end(self.started)
        self.started = self.pid = None

    def dump(self) -> dict[str, float]:
        """Dumps, which ends the server."""
        shutil.rmtree(self.images, ignore_errors=True)
        self.images.mkdir()
        net = self.network.path.stat().st_ino
        begun = time.monotonic_ns()
        self._criu(
            "dump", "-t", str(self.pid), "--skip-in-flight", "--external", "mnt[/usr]:usr", "--external", f"net[{net}]:net"
        )
        total = time.monotonic_ns() - begun
        self.network.end_servers()
        size = sum(f.stat().st_size for f in self.images.iterdir() if f.suffix == ".img")
        return {"total_us": total / 1000, "frozen_us": frozen_us(self.images / "stats-dump"), "bytes_written": size}

    def restore(self, client: Client) -> tuple[int, Reply]:
        """(when it was asked for, the first reply)."""
        self.pid_file.unlink(missing_ok=True)
        client.begin_first(self.setup.first, self.network.address, self.setup.port)
        fd = os.open(self.network.path, os.O_RDONLY)
        try:
            begun = time.monotonic_ns()
            words = ["--root", str(self.root), "--external", "mnt[usr]:/usr", "--inherit-fd", f"fd[{fd}]:net"]
            try:
                self._criu("restore", "-d", "--pidfile", str(self.pid_file), *words, fds=(fd,))
            finally:
                failed = None
                try:
                    reply = client.reply()
                except Failed as e:
                    failed = e
        finally:
            os.close(fd)
        if failed:
            raise failed
        self.pid = int(self.pid_file.read_text())
        return begun, reply

    def _criu(self, what: str, *words: str, fds: tuple[int, ...] = ()) -> None:
        every = ["-D", str(self.images), "-o", f"{what}.log", "--tcp-established", "--file-locks", "--link-remap"]
        done = subprocess.run(
            [*self.program, what, *every, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=fds, timeout=60,
        )  # fmt: skip
        if done.returncode != 0:
            raise Failed(f"criu {what}: {causes(self.images / f'{what}.log')}")


def causes(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error (" in line and "RLIMIT" not in line]
    return "; ".join(line.split("): ", 1)[-1] for line in lines[:3]) or "no reason in its log"


def frozen_us(stats: Path) -> int:
    """`frozen_time` of CRIU's statistics (stats.proto: StatsEntry.dump = 1, DumpStatsEntry.frozen_time = 2)."""

    def varint(data: bytes, at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if not data[at - 1] & 0x80:
                return value, at

    data = stats.read_bytes()
    size = struct.unpack_from("<I", data, 8)[0]
    entry = data[12 : 12 + size]
    _, at = varint(entry, 1)
    while at < len(entry):
        key, at = varint(entry, at)
        number, at = varint(entry, at)
        if key == 2 << 3:
            return number
    raise Failed("CRIU's statistics have no frozen time")


def for_criu(setup: Setup) -> Setup:
    """CRIU asks for limits of every process, which, of another user's, takes CAP_SYS_RESOURCE. Where root lacks that
    (some virtual machines), nginx's workers stay root for CRIU's sake."""
    capabilities = int(re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.M)[1], 16)
    if setup.name != "nginx" or capabilities >> CAP_SYS_RESOURCE & 1:
        return setup
    path = "etc/nginx/kip.conf"
    files = {**setup.server.files, path: setup.server.files[path].replace("user www-data;", "user root;")}
    return replace(setup, server=replace(setup.server, files=files))


def find_criu() -> list[str]:
    """How to start CRIU without the time that the wrapper of scripts/setup-criu takes (a shell and five programs)."""
    for prefix in ("/usr/local/lib/kip/criu",):
        for lib in sorted(Path(prefix).glob("usr/lib/*/libc.so.6")):
            loader = next(lib.parent.glob("ld-linux*.so.*"), None)
            if loader:
                plugins = ["-L", f"{prefix}/usr/sbin"]
                return [str(loader), "--inhibit-cache", "--library-path", str(lib.parent), f"{prefix}/usr/sbin/criu", *plugins]
    found = shutil.which("criu", path="/usr/local/sbin:/usr/sbin:/sbin:/usr/bin")
    if not found:
        raise Failed("there is no CRIU: run scripts/setup")
    return [found]


class Runc:
    """`runc run` in a network namespace that is there already, without a seccomp profile."""

    def __init__(self, work: Workspace, root: Path, number: int, setup: Setup, command_line: list[str] | None = None):
        self.setup, self.network = setup, Network(work, number, veth=True)
        self.id, self.state = f"{work.prefix}-{number}", work.dir / "runc"
        self.bundle, self.log = work.dir / f"bundle-{number}", work.dir / f"runc-{number}.log"
        self.bundle.mkdir()
        command("runc", "spec", cwd=self.bundle)
        spec = json.loads((self.bundle / "config.json").read_text())
        process, linux = spec["process"], spec["linux"]
        process.update(terminal=False, args=command_line or setup.server.command, rlimits=[], noNewPrivileges=False)
        process["env"] = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"]
        process["capabilities"] = {kind: [f"CAP_{c}" for c in CAPABILITIES] for kind in process["capabilities"]}
        spec["root"] = {"path": str(root), "readonly": False}
        spec["mounts"] = [m for m in spec["mounts"] if m["destination"] in ("/proc", "/dev", "/dev/pts", "/dev/shm")]
        spec["mounts"].append({"destination": "/usr", "type": "none", "source": "/usr", "options": ["bind", "ro"]})
        linux["resources"], linux["cgroupsPath"] = {}, f"/{self.id}"
        for namespace in linux["namespaces"]:
            if namespace["type"] == "network":
                namespace["path"] = str(self.network.path)
        (self.bundle / "config.json").write_text(json.dumps(spec))

    @contextmanager
    def started(self) -> Iterator[int]:
        """Runs it; when it was asked for."""
        with open(self.log, "w") as log:
            begun = time.monotonic_ns()
            process = subprocess.Popen(
                ["runc", "--root", str(self.state), "run", "--bundle", str(self.bundle), self.id],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield begun
        finally:
            subprocess.run(["runc", "--root", str(self.state), "delete", "--force", self.id], capture_output=True, timeout=30)
            process.wait(10)
            self.network.end_servers()

    @contextmanager
    def running(self, client: Client) -> Iterator[tuple[int, Reply]]:
        """The server: when it was asked for, and its first reply."""
        client.begin_first(self.setup.first, self.network.address, self.setup.port)
        with self.started() as begun:
            yield begun, client.reply()

    def ask(self, client: Client) -> Reply:
        return client.first(self.setup.first, self.network.address, self.setup.port)
