"""What `make install` and `make deb` make of a build: it runs from there, under a service manager, and goes away again."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.clients import Redis
from harness.kip import Kip, binary, daemon

ROOT = Path(__file__).parents[1]
PROGRAM = binary()
PROGRAMS = ("kip", "kip-keeper", "kip-pager", "kip-launch")
REDIS = ["redis-server", "--bind", "*", "--protected-mode", "no", "--save", ""]


def script(name: str, *words: str | Path) -> str:
    done = subprocess.run([ROOT / "scripts" / name, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deb")
    script("deb", "--built", PROGRAM.parent, "--out", out)
    (file,) = out.glob("*.deb")
    return file


def files_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


def sleeps_and_wakes(kip: Kip) -> None:
    proc = kip.run("cache", REDIS, ports=["6379"])
    client = Redis(proc.port(6379))
    assert client.ask("SET", "a", "1") == "OK"
    proc.sleep()
    assert client.ask("GET", "a") == b"1"
    proc.remove()


def brings_criu(prefix: Path) -> None:
    """What `kip doctor` names on a machine without CRIU is there, with all that it calls."""
    doctor = subprocess.run([prefix / "bin/kip", "doctor", "--criu", "/nonexistent"], capture_output=True, text=True, timeout=60)
    found = re.search(r"run (\S+/setup-criu), or give", doctor.stdout)
    assert found and Path(found[1]).resolve() == (prefix / "lib/kip/setup-criu").resolve(), doctor.stdout
    done = subprocess.run([found[1], "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1) and done.stderr == "" and re.search(r"CRIU +(there|missing)", done.stdout)
    for file in (prefix / "lib/kip").iterdir():
        for name in re.findall(r"\$here/(\w[\w.-]*)", file.read_text()):
            assert (prefix / "lib/kip" / name).is_file(), f"{file.name} calls {name}"


# promise install: installed it runs, and goes away again but for what its owner wrote; the daemon's
#   settings, which may have credentials, are for root alone
# promise install: the programs are not taken away under a daemon
def test_installed_it_runs_and_goes_away_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    words = ["--built", PROGRAM.parent, "--prefix", "/opt/kip", "--destdir", root]
    script("install", "--strip", *words)
    found = files_below(root)
    assert {f"opt/kip/bin/{name}" for name in PROGRAMS} <= found
    assert {"opt/kip/share/man/man1/kip.1", "opt/kip/share/man/man1/kip-run.1", "etc/default/kip"} <= found
    assert {"opt/kip/share/bash-completion/completions/kip", "opt/kip/share/zsh/site-functions/_kip"} <= found
    assert "ExecStart=/opt/kip/bin/kip up $KIP_UP\n" in (root / "etc/systemd/system/kip.service").read_text()
    assert (root / "etc/default/kip").stat().st_mode & 0o777 == 0o600, "it may get credentials"
    brings_criu(root / "opt/kip")
    with daemon(program=root / "opt/kip/bin/kip") as kip:
        sleeps_and_wakes(kip)
        uninstall = [ROOT / "scripts/install", "--uninstall", *words]
        done = subprocess.run(uninstall, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and re.search(r"kip runs from .* \(pid \d+\).*: kip down --park first", done.stderr)
        assert files_below(root) == found, "nothing is gone under a daemon"
    (root / "etc/default/kip").write_text('KIP_UP="--memory 1G"\n')
    script("install", "--strip", *words)
    assert (root / "etc/default/kip").read_text() == 'KIP_UP="--memory 1G"\n', "what the owner has written stays"
    script("install", "--uninstall", *words)
    assert files_below(root) == {"etc/default/kip"}
    done = subprocess.run([ROOT / "scripts/install", "--built", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and "is not built: run make" in done.stderr


# promise install: the systemd unit is a valid one; readiness, each proc that is taken up, and end
#   are told as sd_notify(3) has it
# held by: this, `tests/test_packages.py::test_a_service_manager_is_told`,
#   `kip_daemon::notify::tests::paths_and_abstract_names_are_reached`
def test_the_unit_is_a_good_one(tmp_path: Path) -> None:
    text = (ROOT / "packaging/kip.service").read_text().replace("@bindir@", str(PROGRAM.parent))
    unit = tmp_path / "kip.service"
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60)
    told = [line for line in done.stderr.splitlines() if "kip.service" in line]
    assert not told, told
    # What makes a restart an upgrade that no proc notices.
    assert re.search(r"^KillMode=process$", text, re.M) and re.search(r"^Type=notify$", text, re.M)


@pytest.mark.parametrize(("state", "parks"), [("stopping", True), ("running", False), ("degraded", False)])
def test_only_a_machine_that_goes_down_parks_all(tmp_path: Path, state: str, parks: bool) -> None:
    """The unit's own command, where the service manager says that of itself."""
    for name, text in (("systemctl", f"echo {state}"), ("kip", f"echo kip $@ >{tmp_path}/called")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    unit = (ROOT / "packaging/kip.service").read_text().replace("@bindir@", str(tmp_path))
    command = re.search(r"^ExecStop=-(.*)$", unit, re.M)[1].replace("$$", "$")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(shlex.split(command), env=env, check=True, timeout=30)
    called = tmp_path / "called"
    assert called.exists() == parks and (not parks or called.read_text() == "kip down --park\n")


def test_a_service_manager_is_told(fresh_kip: Callable[..., Kip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        kip = fresh_kip()
        assert manager.recv(100) == b"READY=1\n"
        proc = kip.run("cache", REDIS, ports=["6379"])
        assert "NOTIFY_SOCKET" not in proc.exec("env").stdout
        kip.daemon.terminate()
        assert manager.recv(100) == b"STOPPING=1\n"
        assert kip.wait_dead() == 0
        kip.up()
        assert manager.recv(100).startswith(b"EXTEND_TIMEOUT_USEC="), "however many there are to be taken up"
        assert manager.recv(100) == b"READY=1\n"
        proc.remove()
        kip.down()
        assert manager.recv(100) == b"STOPPING=1\n"
        monkeypatch.delenv("NOTIFY_SOCKET")


# promise install: on a machine without CRIU what `kip doctor` names is there, with all that it
#   calls
# held by: this, `tests/test_packages.py::test_installed_it_runs_and_goes_away_again`
# promise install: a Debian package: fields, sums, conffile, installed, upgraded, removed, purged;
#   data stay
# held by: this (its scripts without systemd: what they do with it is untested)
def test_a_debian_package(deb: Path, tmp_path: Path) -> None:
    def field(name: str) -> str:
        return subprocess.run(["dpkg-deb", "--field", deb, name], capture_output=True, text=True, check=True).stdout.strip()

    version = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    assert (field("Package"), field("Version"), deb.name) == ("kip", version, f"kip_{version}_{field('Architecture')}.deb")
    assert {"nftables", "iproute2"} <= {word.split()[0] for word in field("Depends").split(",")}
    root = tmp_path / "root"
    for directory in ("info", "updates", "triggers"):
        (root / "var/lib/dpkg" / directory).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    dpkg = ["dpkg", f"--root={root}", "--force-depends", "--force-script-chrootless", "--log=/dev/null"]

    def manage(*words: str | Path) -> str:
        done = subprocess.run([*dpkg, *words], capture_output=True, text=True, timeout=120, env={**os.environ, "LC_ALL": "C"})
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    manage("--install", deb)
    brings_criu(root / "usr")
    assert subprocess.run([*dpkg, "--verify", "kip"], capture_output=True, text=True).stdout == "", "the sums are right"
    assert (root / "lib/systemd/system/kip.service").exists() and (root / "usr/share/man/man1/kip.1.gz").exists()
    assert (root / "etc/default/kip").stat().st_mode & 0o777 == 0o600, "it may get credentials"
    with daemon(program=root / "usr/bin/kip") as kip:
        sleeps_and_wakes(kip)
    (root / "etc/default/kip").write_text('KIP_UP="--memory 1G"\n')
    manage("--force-confold", "--install", deb)
    assert (root / "etc/default/kip").read_text() == 'KIP_UP="--memory 1G"\n', "as a conffile it is the owner's"
    (root / "var/lib/kip").mkdir(parents=True)
    manage("--remove", "kip")
    assert not (root / "usr/bin/kip").exists() and (root / "etc/default/kip").exists()
    assert "is left" in manage("--purge", "kip") and (root / "var/lib/kip").exists()
    assert not (root / "etc/default/kip").exists()
