"""`kip apply` where procs go for others: they are stopped in order, only when the new ones can start, and also for new contents."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from harness import archives, images
from harness.clients import Redis, free_port, http_get
from harness.kip import Kip, Proc
from harness.wait import wait_for
from test_apply import actions, told

# Says what it has in memory when it is told to end.
SAVES = """trap 'echo "$said" >/kept/state; exit' TERM; said=unsaved; >/kept/set; while :; do sleep 1000 & wait; done"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kip.toml"


def failed(kip: Kip, file: Path, *words: str) -> str:
    """The one line of an apply that changed nothing."""
    (line,) = told(kip, "apply", "-f", file, *words)
    return line


# promise files: who goes is stopped in order, a sleeper woken for it
@pytest.mark.parametrize("asleep", [False, True], ids=["hot", "parked"])
@pytest.mark.parametrize("how", ["--replace", "--prune"])
def test_who_goes_is_stopped_in_order(kip: Kip, file: Path, asleep: bool, how: str) -> None:
    """One that would save its memory at the stop signal does, and is woken for it."""
    (file.parent / "kept").mkdir()
    writer = f"[proc.writer]\ncommand = ['sh', '-c', '''{SAVES}''']\nvolume = ['./kept:/kept']\n"
    file.write_text(writer)
    kip.cli("apply", "-f", file)
    wait_for("its trap is set", (file.parent / "kept/set").exists, 30)
    if asleep:
        Proc(kip, "writer").sleep()
    file.write_text(writer + "workdir = '/tmp'\n" if how == "--replace" else "[proc.other]\ncommand = 'sleep 1000'\n")
    kip.cli("apply", "-f", file, how)
    assert (file.parent / "kept/state").read_text() == "unsaved\n"
    assert kip.names() == (["writer"] if how == "--replace" else ["other"])


@contextmanager
def bound(port: int, address: str = "127.0.0.1") -> Iterator[None]:
    with socket.create_server((address, port)):
        yield


# promise files: it goes only if the new one could start: ports (also those that a proc which stays
#   has at another address), probes, volumes, tarball, user, working directory and program are
#   looked at, by a rehearsal that leaves nothing and does not run the program; memory for it is not
# held by: this, `tests/test_apply_replace.py::test_who_stays_keeps_its_port_at_another_address`,
#   `kip_net::reserve::tests::who_is_at_other_addresses_is_found`,
#   `tests/test_apply_replace.py::test_a_rehearsal_that_is_cut_off_leaves_nothing`,
#   `crates/sandbox/tests/sandbox.rs::a_program_that_is_only_execd_does_not_run`
def test_the_old_one_stays_if_the_new_one_could_not_start(kip: Kip, file: Path) -> None:
    """Whatever can be known before is: each cause is one line with its place, the old proc runs on, and nothing else is left."""
    own, others, foreign = free_port(), free_port(), free_port()
    kip.run("other", ["sleep", "1000"], ports=[f"{others}:80"], wait_ready=False)
    base = f"[proc.web]\ncommand = ['sleep', '1000']\nport = ['{own}:80']\n"
    file.write_text(base)
    kip.cli("apply", "-f", file)
    pids = Proc(kip, "web").inspect()["pids"]
    whole = archives.archive(archives.entry("srv/run", data=b"#!/no/shell\n"))
    (file.parent / "whole.tar").write_bytes(whole)
    (file.parent / "cut.tar").write_bytes(whole[:700])
    images.layout(file.parent / "image", one=images.web())

    def tried(text: str, *causes: str) -> None:
        file.write_text(text)
        line = failed(kip, file, "--replace")
        assert line.startswith(f"kip: {file}:1:7: web") and all(cause in line for cause in causes), line
        assert Proc(kip, "web").inspect()["pids"] == pids

    with bound(foreign):
        tried(base.replace(str(own), str(foreign)), f"port {foreign}/tcp is taken by", "choose another host port")
        tried(base + f"probe = ['{foreign}=tcp:80']\n", "its probe's port", "is taken by")
    tried(base.replace(str(own), str(others)), f"port {others} is taken by proc other")
    tried(base + "volume = ['./none:/x']\n", f"there is no {file.parent}/none on this machine")
    tried(base + "tar = 'none.tar'\n", "there is no tarball")
    tried(base + "tar = 'cut.tar'\n", "its tarball", "cut.tar")
    tried(base.replace("sleep", "no-such-program"), '"no-such-program" is not in the proc\'s files')
    tried(base.replace("sleep", "/srv/run") + "tar = 'whole.tar'\n", "the script /srv/run begins with #!/no/shell")
    tried(base.replace("sleep", "/etc/passwd"), "may not be executed")
    tried(base + "user = 'stranger'\nvolume = ['fresh:/x']\n", 'there is no user "stranger"')
    tried(base + "workdir = '/none'\n", "WorkDir")
    tried(base + "image = 'oci:image:one'\nentrypoint = 'none'\n", '"none" is not in the proc\'s files')
    assert kip.names() == ["other", "web"] and kip.json("volume", "ls") == []
    assert sorted(path.name for path in (kip.data / "procs").iterdir() if path.name[0] != ".") == ["other", "web"]
    # Its own port is free when it is gone, and so is that of one that is removed.
    file.write_text(base + "workdir = '/tmp'\n")
    assert actions(kip, "apply", "-f", file, "--replace") == {"web": "replace"}
    file.write_text(base.replace("proc.web", "proc.site"))
    assert actions(kip, "apply", "-f", file, "--prune") == {"web": "remove", "site": "create"}
    # Nor are ports in the way that others leave before; what two want is told before anything goes.
    site = base.replace("proc.web", "proc.site")
    moved = site.replace(str(own), str(foreign))
    for text, code in ((moved + base, 0), (moved + base.replace(str(own), str(foreign)), 1)):
        file.write_text(text)
        done = kip.cli("apply", "-f", file, "--replace", check=False)
        assert done.returncode == code, done.stderr
    assert done.stderr == f"kip: {file}:4:7: web: tcp host port {foreign} is asked for by site, too: choose another one\n"
    kip.remove_all()
    kip.cli("image", "gc", "--all")


@pytest.mark.parametrize("stays", ["proc", "service"])
def test_who_stays_keeps_its_port_at_another_address(kip: Kip, file: Path, stays: str) -> None:
    """The old proc has the port at one address and goes; the new one wants it at all, and a proc or service stays at another."""
    port = free_port()
    base = f"[proc.web]\ncommand = ['sleep', '1000']\nport = ['127.0.0.1:{port}:80']\n"
    file.write_text(base)
    kip.cli("apply", "-f", file)
    pids = Proc(kip, "web").inspect()["pids"]
    base += "workdir = '/tmp'\n"
    file.write_text(base.replace("127.0.0.1:", ""))
    if stays == "proc":
        kip.run("other", ["sleep", "1000"], ports=[f"127.0.0.2:{port}:80"], wait_ready=False)
        line = failed(kip, file, "--replace")
        assert f"port {port} is taken by proc other" in line, line
        Proc(kip, "other").remove()
    else:
        with bound(port, "127.0.0.2"):
            line = failed(kip, file, "--replace")
        assert f"port {port}/tcp is taken by" in line, line
        file.write_text(base.replace(f"127.0.0.1:{port}", str(free_port())) + f"probe = ['{port}=tcp:80']\n")
        with bound(port, "127.0.0.2"):
            line = failed(kip, file, "--replace")
        assert f"its probe's port {port}/tcp is taken by" in line, line
    assert Proc(kip, "web").inspect()["pids"] == pids
    assert actions(kip, "apply", "-f", file, "--replace") == {"web": "replace"}


@pytest.mark.parametrize("step", ["start-mounts", "start-launched", "remove-files"])
def test_a_rehearsal_that_is_cut_off_leaves_nothing(fresh_kip: Callable[..., Kip], file: Path, step: str) -> None:
    kip = fresh_kip()
    file.write_text("[proc.web]\ncommand = 'sleep 1000'\n")
    kip.cli("apply", "-f", file)
    pids = Proc(kip, "web").inspect()["pids"]
    kip.kill()
    kip.up("--fault-at", step)
    file.write_text(file.read_text() + "idle = '1h'\n")
    assert kip.cli("apply", "-f", file, "--replace", check=False).returncode == 1
    assert kip.wait_dead(30) == -signal.SIGKILL
    kip.up()
    assert kip.names() == ["web"] and Proc(kip, "web").inspect()["pids"] == pids
    assert not list((kip.data / "procs").glob("trial-*"))


# promise files: the old one stays if the new one fails after all
def test_the_old_one_stays_if_the_new_one_fails_after_all(kip: Kip, file: Path) -> None:
    file.write_text("[proc.web]\ncommand = 'sleep 1000'\n")
    kip.cli("apply", "-f", file)
    pids = Proc(kip, "web").inspect()["pids"]
    file.write_text("[proc.web]\ncommand = 'false'\nready = 'tcp:80'\n")
    line = failed(kip, file, "--replace")
    assert line.startswith(f"kip: {file}:1:7: web ended before it was ready (tcp:80)"), line
    assert line.endswith("the one that is there runs on"), line
    assert Proc(kip, "web").inspect()["pids"] == pids


def second() -> images.Image:
    """The web server with another page."""
    page = [images.entry("srv", uid=33, gid=34), images.entry("srv/index.html", "second\n", mode=0o644)]
    return replace(images.web(), layers=[*images.web().layers, images.archive(page)])


# promise files: other contents of an image, a tarball or a secret of the same name are a
#   difference, those of a secret without saying which
# held by: this, `kip_worker::rehearse::tests::a_tarball_is_known_by_all_of_its_bytes`
def test_other_contents_are_a_difference(kip: Kip, file: Path) -> None:
    """The name leads elsewhere now, or the file of that name was written anew."""
    both = images.layout(file.parent / "image", one=images.web(), two=second())
    kip.cli("image", "load", f"oci:{both}:one", "--name", "web:1")
    tar, key = file.parent / "files.tar", file.parent / "key"
    tar.write_bytes(archives.archive(archives.entry("srv/a", data=b"first")))
    key.write_text("hidden-1")
    file.write_text(
        "[proc.site]\nimage = 'web:1'\nport = [8080]\nwait-ready = true\n"
        "[proc.files]\ncommand = 'sleep 1000'\ntar = 'files.tar'\n"
        "[proc.keys]\ncommand = 'sleep 1000'\nsecret = { key = 'key', other = 'kip.toml' }\n"
    )
    kip.cli("apply", "-f", file)
    Proc(kip, "keys").sleep()
    tar.touch()
    assert kip.cli("diff", "-f", file).stdout == ""

    kip.cli("image", "load", f"oci:{both}:two", "--name", "web:1")
    tar.write_bytes(archives.archive(archives.entry("srv/a", data=b"other")))
    key.write_text("hidden-2")
    done = kip.cli("diff", "-f", file, check=False)
    assert done.returncode == 1 and "hidden" not in done.stdout
    fields = [line.split(" = ")[0].strip() for line in done.stdout.splitlines() if " = " in line]
    assert fields == ["- image", "+ image", "- tar", "+ tar", "- secret.key", "+ secret.key"], done.stdout
    assert all("--replace" in line for line in told(kip, "apply", "-f", file))
    assert Proc(kip, "keys").state == "parked", "it was looked at and not woken"
    assert set(actions(kip, "apply", "-f", file, "--replace").values()) == {"replace"}
    assert http_get(Proc(kip, "site").port(8080)) == b"second\n"
    assert Proc(kip, "files").exec("cat", "/srv/a").stdout == "other"
    assert Proc(kip, "keys").exec("cat", "/run/secrets/key").stdout == "hidden-2"
    assert kip.cli("diff", "-f", file).stdout == ""
    assert not any(b"hidden" in spec.read_bytes() for spec in kip.data.glob("procs/*/spec.json"))
    kip.remove_all()
    kip.cli("image", "gc", "--all")


# promise files: an image that is always brought is brought before it is compared
def test_an_image_that_is_always_brought_is_brought_before_it_is_compared(kip: Kip, file: Path) -> None:
    images.layout(file.parent / "first", it=images.web())
    images.layout(file.parent / "second", it=second())
    at = file.parent / "image"
    (file.parent / "first").rename(at)
    file.write_text("[proc.site]\nimage = 'oci:image:it'\npull = 'always'\nport = [8080]\nwait-ready = true\n")
    kip.cli("apply", "-f", file)
    assert actions(kip, "apply", "-f", file, "--replace") == {"site": "same"}
    at.rename(file.parent / "first")
    (file.parent / "second").rename(at)
    assert actions(kip, "apply", "-f", file, "--replace") == {"site": "replace"}
    assert http_get(Proc(kip, "site").port(8080)) == b"second\n"
    kip.remove_all()
    kip.cli("image", "gc", "--all")


SLOWLY = """\
[proc.db]
command = ["sh", "-c", "rm -f /tmp/up; sleep 1; touch /tmp/up; exec sleep 1000"]
ready = "exec:test -e /tmp/up"

[proc.web]
command = "sleep 1000"
depends-on = ["db"]
"""


# promise files: who is started, and who another one depends on, is waited for until it is ready;
#   one that does not become ready is told
# held by: this, `tests/test_apply_replace.py::test_a_dependency_that_does_not_become_ready_is_told`
def test_who_is_started_or_starting_is_waited_for(kip: Kip, file: Path) -> None:
    file.write_text(SLOWLY)

    def order(kinds: dict[str, str]) -> list[str]:
        """Names, each at the last event of its kind."""
        at = {event["name"]: event["id"] for event in kip.events() if kinds.get(event["name"]) == event["kind"]}
        return sorted(at, key=at.__getitem__)

    kip.cli("apply", "-f", file)
    assert order({"db": "ready", "web": "started"}) == ["db", "web"]
    # A stopped proc is started, and is ready when `apply` says so, also if no other proc waits for
    # it.
    kip.cli("stop", "db")
    kip.cli("rm", "web", "--force")
    assert actions(kip, "apply", "-f", file) == {"db": "start", "web": "create"}
    assert order({"db": "ready", "web": "started"}) == ["db", "web"]
    kip.cli("stop", "db")
    assert actions(kip, "apply", "-f", file) == {"db": "start", "web": "same"}
    assert Proc(kip, "db").inspect()["ready"] is True
    # As described, and not ready yet: another command has just started it.
    for make in ("create", "start"):
        kip.cli("stop", "db")
        kip.cli(*(["rm", "web", "--force"] if make == "create" else ["stop", "web"]))
        kip.cli("start", "db")
        assert actions(kip, "apply", "-f", file) == {"db": "same", "web": make}
        assert order({"db": "ready", "web": "started"}) == ["db", "web"]
    # Without a check it is its ports that are waited for, if the file says so.
    file.write_text('[proc.cache]\ncommand = ["redis-server", "--save", "", "--protected-mode", "no"]\nport = [6379]\nwait-ready = true\n')
    kip.cli("apply", "-f", file)
    kip.cli("stop", "cache")
    kip.cli("apply", "-f", file)
    assert Redis(Proc(kip, "cache").port(6379)).ask("PING") == "PONG"


def test_a_dependency_that_does_not_become_ready_is_told(kip: Kip, file: Path) -> None:
    file.write_text(SLOWLY.replace("touch /tmp/up", "true") + '[proc.last]\ncommand = "sleep 1000"\n')
    file.write_text(file.read_text().replace("[proc.web]", 'ready-timeout = "1500ms"\n[proc.web]'))
    assert "was not ready" in told(kip, "apply", "-f", file)[0]
    (line,) = told(kip, "apply", "-f", file)
    assert line.startswith(f"kip: {file}:6:7: web depends on db: db is running and was not ready within"), line


# promise files: without `--prune` procs that have left the file are named
def test_procs_that_have_left_the_file_are_named(kip: Kip, file: Path) -> None:
    both = "[proc.a]\ncommand = 'sleep 1000'\n[proc.b]\ncommand = 'sleep 1000'\n"
    file.write_text(both + "[proc.c]\ncommand = 'sleep 1000'\n")
    assert kip.cli("apply", "-f", file).stderr == ""
    file.write_text(both)
    line = "kip: c is of this file and not in it any more: --prune removes what is\n"
    for words in (["apply"], ["apply", "--dry-run"], ["diff"]):
        assert kip.cli(*words, "-f", file).stderr == line
    assert kip.cli("apply", "-f", file, "a").stderr == "", "who asks for some has said nothing about the others"
    assert kip.cli("apply", "-f", file, "--prune").stderr == ""
    assert kip.names() == ["a", "b"]


# promise files: export keeps what procs depend on, how images are brought, and the project
def test_export_keeps_how_procs_are_made(kip: Kip, file: Path) -> None:
    images.layout(file.parent / "image", one=images.web())
    kip.cli("image", "load", f"oci:{file.parent}/image:one", "--name", "web:1")
    file.write_text(
        "project = 'shop'\n[proc.db]\ncommand = 'sleep 1000'\n"
        "[proc.a-first-by-name]\nimage = 'web:1'\npull = 'never'\nplain-http = true\ndepends-on = ['db']\n"
    )
    kip.cli("apply", "-f", file)
    again = file.parent / "again.toml"
    again.write_text(kip.cli("export", "a-first-by-name", "db").stdout)
    assert kip.cli("diff", "-f", again).stdout == ""
    kip.remove_all()
    assert kip.cli("apply", "-f", again).stdout == "db made\na-first-by-name made\n", "each after what it depends on"
    text = again.read_text()
    assert kip.cli("export", "a-first-by-name", "db").stdout == text
    assert 'project = "shop"' in text and 'pull = "never"' in text and "plain-http = true" in text
    assert Proc(kip, "db").inspect()["spec"]["file"] == "shop"
    # What depends on one that is left out can be read all the same, and that is said.
    done = kip.cli("export", "a-first-by-name")
    assert "depends-on" not in done.stdout and "a-first-by-name depends on db, which is left out" in done.stderr
    kip.remove_all()
    kip.cli("image", "gc", "--all")
