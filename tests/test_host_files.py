"""What servers of Debian need of the host's files, as a proc sees it. The host's /etc is this machine's with something more, in a
mount namespace of the daemon's own: passwords, and what not every user may read."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.kip import Kip, Proc, binary, daemon

HASH = "$6$kip$1nAMg835zTiw6WEo75zWV"
SECRET = "secret of the host's"
# Packages that scripts/setup installs, and the user that the directory of each in /var/lib belongs
# to.
STATE = {
    "beanstalkd": "beanstalkd", "docker-registry": "docker-registry", "jetty9": "jetty", "mosquitto": "mosquitto", "mysql": "mysql",
    "nsd": "nsd", "postfix": "postfix", "postgresql": "postgres", "rabbitmq": "rabbitmq", "redis": "redis", "unbound": "unbound",
}  # fmt: skip
START = """#!/bin/sh
case " $* " in *" up "*) ;; *) exec {kip} "$@" ;; esac
exec unshare --mount --propagation private sh -c 'mount -t overlay -o lowerdir=/etc,upperdir={upper},workdir={work} overlay /etc && exec {kip} "$@"' kip "$@"
"""


@dataclass
class Debian:
    proc: Proc
    # What the host's /etc has more than this machine's.
    upper: Path

    def inside(self, script: str, *words: str) -> str:
        return self.proc.exec("sh", "-c", script, "sh", *words).stdout

    def tree(self, directory: str) -> dict[str, str]:
        """Mode, owner, group and sum, or where a link leads, of all in it."""
        return dict(line.split(" ", 1) for line in self.inside(TREE, directory).splitlines())


# Paths have no spaces there.
TREE = """cd "$1" && find . | LC_ALL=C sort | while read -r f; do
    if [ -L "$f" ]; then echo "$f -> $(readlink "$f")"
    elif [ -f "$f" ]; then echo "$f $(stat -c '%a %u %g' "$f") $(sha256sum < "$f")"
    else echo "$f $(stat -c '%a %u %g' "$f")"; fi; done"""


def on_the_host(directory: str) -> dict[str, str]:
    text = subprocess.run(["sh", "-c", TREE, "sh", directory], capture_output=True, text=True, check=True).stdout
    return dict(line.split(" ", 1) for line in text.splitlines())


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Debian]:
    directory = tmp_path_factory.mktemp("debian")
    upper, work, start = directory / "upper", directory / "work", directory / "kip"
    work.mkdir()
    hashes = [line.split(":") for line in Path("/etc/shadow").read_text().splitlines()]
    files = {
        "shadow": "".join(":".join([name, HASH, *rest]) + "\n" for name, _, *rest in hashes), "pam.d/closed": SECRET,
        "chromium.d/closed": SECRET, "chromium.d/kip": "export CHROMIUM_FLAGS=\"$CHROMIUM_FLAGS --kip\"\n", "chromium.d/api.key": SECRET,
        "security/opasswd": f"root:0:1:{HASH}\n",
    }  # fmt: skip
    for name, text in files.items():
        (upper / name).parent.mkdir(parents=True, exist_ok=True)
        (upper / name).write_text(text)
        (upper / name).chmod(0o640 if text == SECRET or HASH in text else 0o644)
    (upper / "chromium.d/api.key").chmod(0o644)
    start.write_text(START.format(kip=binary(), upper=upper, work=work))
    start.chmod(0o755)
    with daemon(program=start) as kip:
        proc = kip.run("debian", ["sleep", "1000"], flags=["--idle", "1h"])
        assert kip.daemon and HASH in Path(f"/proc/{kip.daemon.pid}/root/etc/shadow").read_text(), "the daemon's host has them"
        yield Debian(proc, upper)


# promise sandbox: of the host's files that servers of Debian need a proc sees: /etc/pam.d and
#   /etc/chromium.d as they are but for keys and what not every user may read, an /etc/shadow of all
#   users with none of the host's hashes, for root and the group shadow alone, and the directories
#   of packages below /var/lib empty, each for its own user to write to
# held by: this, `tests/test_host_files.py::test_pam`, `tests/test_host_files.py::test_chromium`,
#   `tests/test_host_files.py::test_state_of_packages`
def test_no_password_of_the_host(debian: Debian) -> None:
    """Each user is in /etc/shadow, without a password; only root and the group may look."""
    users = [line.split(":")[0] for line in Path("/etc/passwd").read_text().splitlines()]
    assert debian.inside("cat /etc/shadow").splitlines() == [f"{user}:*:19000:0:99999:7:::" for user in users]
    assert debian.inside("stat -c '%a %U %G' /etc/shadow") == "640 root shadow\n"
    assert debian.inside("getent shadow www-data; getent passwd www-data | cut -d: -f1") == "www-data:*:19000:0:99999:7:::\nwww-data\n"
    as_user = "setpriv --reuid=www-data --regid=www-data --clear-groups cat /etc/shadow"
    assert "Permission denied" in debian.proc.exec("sh", "-c", as_user, check=False).stderr
    for place in ("/etc", "/var", "/run", "/root", "/home"):
        # What grep cannot read, root cannot; it has found nothing.
        found = debian.proc.exec("grep", "-rlF", HASH, place, check=False)
        sockets = "grep: /run/kip/runtime: No such device or address\n" if place == "/run" else ""
        assert (found.stdout, found.stderr) == ("", sockets), place
    assert debian.inside("ls -d /etc/shadow- /etc/gshadow /etc/passwd- /etc/security/opasswd 2>&1 | grep -vc 'No such'; true") == "0\n"


def test_pam(debian: Debian) -> None:
    """Each service of PAM's is as on the host, and PAM goes by it."""
    here = on_the_host("/etc/pam.d")
    assert {"./vsftpd", "./sshd", "./common-auth"} <= here.keys()
    assert debian.tree("/etc/pam.d") == here
    assert debian.inside("ls /etc/pam.d/closed 2>&1; true") == "ls: cannot access '/etc/pam.d/closed': No such file or directory\n"
    asked = debian.proc.exec("su", "-s", "/bin/sh", "www-data", "-c", "id -un")
    assert asked.stdout == "www-data\n", "root may be any user, by pam_rootok of /etc/pam.d/su"


def test_chromium(debian: Debian) -> None:
    """The flags that Debian's start script reads, and no keys."""
    here, added = on_the_host("/etc/chromium.d"), on_the_host(str(debian.upper / "chromium.d"))
    of_all = {name: what for name, what in added.items() if name == "./kip"}
    assert len(of_all) == 1 and added.keys() > of_all.keys()
    assert debian.tree("/etc/chromium.d") == here | of_all
    assert "--kip" in debian.inside('for f in /etc/chromium.d/*; do . "$f"; done; echo "$CHROMIUM_FLAGS"')


def test_state_of_packages(debian: Debian) -> None:
    """Below /var/lib is a directory for each package, empty whatever the host has there; its user writes there, also after a sleep."""
    for name, user in STATE.items():
        host = Path("/var/lib") / name
        seen = debian.inside('stat -c "%a %U %G" "$1"', str(host)).split()
        assert seen == [f"{host.stat().st_mode & 0o7777:o}", host.owner(), host.group()] and host.owner() == user, (name, seen)
        assert debian.inside('find "$1" ! -type d', str(host)) == ""
        write = 'setpriv --reuid="$1" --regid="$1" --clear-groups sh -c "echo $2 >>/var/lib/$2/kip && cat /var/lib/$2/kip"'
        assert debian.inside(write, user, name) == f"{name}\n"
    debian.proc.sleep()
    debian.proc.wake()
    for name, user in STATE.items():
        assert debian.inside(write, user, name) == f"{name}\n{name}\n"
        assert not (Path("/var/lib") / name / "kip").exists(), "the host sees it"
