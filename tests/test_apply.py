"""Files that describe procs: `kip apply`, `kip diff`, `kip export`, with real servers; bad files are told with line and column."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from harness import images
from harness.clients import Redis, http_get
from harness.kip import Kip, Proc

ROOT = Path(__file__).parents[1]

PAIR = """\
[proc.cache]
command = ["redis-server", "--save", "", "--protected-mode", "no"]
port = [6379]
wait-ready = true
env = { PASSWORD = "hidden-1" }

[proc.web]
command = "python3 -m http.server 8000"
port = ["8000/tcp,wake=data"]
workdir = "/srv"
volume = ["./public:/srv:ro"]
mem = "64M"
idle = "1h"
wait-ready = true
depends-on = ["cache"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two servers, one of which shows a file beside the description."""
    (tmp_path / "public").mkdir()
    (tmp_path / "public/index.html").write_text("described\n")
    file = tmp_path / "kip.toml"
    file.write_text(PAIR)
    return file


def actions(kip: Kip, *words: str | Path) -> dict[str, str]:
    return {change["name"]: change["action"] for change in kip.json(*map(str, words))["changes"]}


def told(kip: Kip, *words: str | Path, code: int = 1) -> list[str]:
    """The lines of a refusal."""
    done = kip.cli(*words, check=False)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stderr.splitlines()


# promise files: apply makes what is missing, starts what is stopped, leaves alone what is as
#   described and wakes no proc
def test_apply_makes_what_is_missing_and_wakes_nobody(kip: Kip, file: Path) -> None:
    assert kip.cli("apply", "-f", file, "--dry-run").stdout == "+ cache\n+ web\n"
    assert kip.names() == []
    assert kip.cli("diff", "-f", file, check=False).returncode == 1
    assert actions(kip, "apply", "-f", file) == {"cache": "create", "web": "create"}
    cache, web = Proc(kip, "cache"), Proc(kip, "web")
    assert http_get(web.port(8000)) == b"described\n"
    assert Redis(cache.port(6379)).ask("SET", "a", "1") == "OK"
    cache.sleep()
    web.hibernate()
    before = [proc.inspect() for proc in (cache, web)]
    assert actions(kip, "apply", "-f", file) == {"cache": "same", "web": "same"}
    assert kip.cli("diff", "-f", file).stdout == ""
    after = [proc.inspect() for proc in (cache, web)]
    assert [(p["state"], p["wakes"], p["generation"]) for p in before] == [
        (p["state"], p["wakes"], p["generation"]) for p in after
    ], "nobody was woken"
    assert [p["state"] for p in after] == ["parked", "hibernated"]
    cache.stop()
    assert actions(kip, "apply", "-f", file) == {"cache": "start", "web": "same"}
    assert cache.state == "running"


# promise files: what is not as described is named key by key, without values of variables; a proc
#   that differs in what `kip update` can change is updated, others are made anew only with
#   `--replace`; diff exits with 0, 1 and 2 as diff(1)
# held by: this, `kip_describe::in_place::tests::only_what_can_change_is_updated`,
#   `kip_describe::file::tests::differences_are_by_key_and_keep_values_of_variables_to_themselves`
def test_what_differs_is_named_and_replaced_only_if_told(kip: Kip, file: Path) -> None:
    kip.cli("apply", "-f", file)
    pids = {name: Proc(kip, name).inspect()["pids"] for name in ("cache", "web")}
    more = '\n[proc.third]\ncommand = "sleep 1000"\n'
    file.write_text(PAIR.replace('"1h"', '"30m"').replace("hidden-1", "hidden-2") + more)
    lines = told(kip, "apply", "-f", file)
    assert len(lines) == 1 and "--replace" in lines[0], lines
    assert f"{file}:1:7: cache differs from the file: env.PASSWORD (is (not shown), wanted (not shown))" in lines[0]
    assert kip.names() == ["cache", "web"], "nothing was done, third neither"
    done = kip.cli("diff", "-f", file, check=False)
    assert done.returncode == 1 and "~ web is updated\n    - idle = 1h\n    + idle = 30m\n" in done.stdout, done.stdout
    assert "~ cache is made anew" in done.stdout and "hidden" not in done.stdout
    assert actions(kip, "apply", "-f", file, "third") == {"third": "create"}
    assert actions(kip, "apply", "-f", file, "--replace") == {"cache": "replace", "web": "update", "third": "same"}
    assert Proc(kip, "web").inspect()["spec"]["timing"]["idle_ms"] == 1_800_000
    assert Proc(kip, "cache").inspect()["pids"] != pids["cache"] and Proc(kip, "web").inspect()["pids"] == pids["web"]
    assert kip.cli("diff", "-f", file).returncode == 0


# promise files: the file, what the daemon would refuse, images and what differs are looked at
#   before anything is changed
def test_everything_is_checked_before_anything_is_changed(kip: Kip, file: Path) -> None:
    """What the daemon would refuse is known before a proc goes for another."""
    kip.cli("apply", "-f", file)
    pids = Proc(kip, "web").inspect()["pids"]
    file.write_text(PAIR.replace('mem = "64M"', 'mem = "1K"'))
    (line,) = told(kip, "apply", "-f", file, "--replace")
    assert f"{file}:7:7: web: a memory limit of 1024 bytes is too small" in line
    file.write_text(PAIR + '\n[proc.none]\nimage = "oci:nowhere"\n')
    assert "nowhere" in told(kip, "apply", "-f", file, "--replace")[-1]
    assert kip.names() == ["cache", "web"] and Proc(kip, "web").inspect()["pids"] == pids


# promise files: `--prune` removes only what the file made; procs of another file are never replaced
def test_prune_removes_only_what_the_file_made(kip: Kip, file: Path, tmp_path: Path) -> None:
    kip.run("by-hand", ["sleep", "1000"])
    other = tmp_path / "other.toml"
    other.write_text('[proc.other]\ncommand = "sleep 1000"\n')
    kip.cli("apply", "-f", other)
    kip.cli("apply", "-f", file)
    file.write_text(PAIR.split("[proc.web]")[0])
    assert actions(kip, "apply", "-f", file) == {"cache": "same"}
    assert kip.cli("diff", "-f", file, "--prune", check=False).stdout == "- web\n"
    assert actions(kip, "apply", "-f", file, "--prune") == {"cache": "same", "web": "remove"}
    assert kip.names() == ["by-hand", "cache", "other"]
    # A proc of another file is not replaced.
    file.write_text('[proc.other]\ncommand = "sleep 2000"\n')
    (line,) = told(kip, "apply", "-f", file, "--replace")
    assert "other was made by" in line and str(other) in line and "command" in line


# promise files: export gives a kip.toml that makes the same procs; contents of secrets are in none,
#   nor in what the daemon keeps of the request
# held by: this, `kip_describe::file::tests::what_is_rendered_is_read_as_the_same`,
#   `kip_api::admit::tests::fills_in_only_what_was_left_open`
def test_export_makes_the_same_procs_again(kip: Kip, file: Path, tmp_path: Path) -> None:
    kip.cli("apply", "-f", file)
    (tmp_path / "key").write_text("secret contents")
    flags = ["--env", "A=b", "--restart", "on-failure:2", "--cpus", "0.5", "--tick", "5s", "--secret", f"key={tmp_path}/key"]
    kip.run("by-hand", ["sh", "-c", "echo 'x  y'; sleep 1000"], ports=["53/udp"], flags=flags, wait_ready=False)
    names = ["by-hand", "cache", "web"]
    text = kip.cli("export", *names).stdout
    assert "hidden-1" in text and "secret contents" not in text
    assert "secret contents" not in kip.cli("inspect", "by-hand", "--json").stdout
    assert not any(b"secret contents" in spec.read_bytes() for spec in kip.data.glob("procs/*/spec.json"))

    def asked() -> list[dict]:
        return [Proc(kip, name).inspect()["spec"]["asked"] for name in names]

    before = asked()
    again = tmp_path / "again/kip.toml"
    (again.parent / "secrets").mkdir(parents=True)
    (again.parent / "secrets/key").write_text("secret contents")
    again.write_text(text)
    assert kip.cli("diff", "-f", again).stdout == "", "as it is exported it is"
    for name in names:
        kip.cli("rm", name, "--force")
    kip.cli("apply", "-f", again)
    after = asked()
    for one in before + after:
        one["spec"].pop("file", None)
    assert after == before
    assert kip.cli("export", *names).stdout == text
    assert "nobody" in kip.refused("export", "nobody")


# promise files: every mistake of a file is told with line and column, its key and what to write;
#   circles of dependencies are named
# held by: this, `kip_describe::file::tests::mistakes_are_told_with_their_place`,
#   `kip_describe::file::tests::mistakes_of_all_procs_are_told_at_once`,
#   `kip_describe::file::tests::circles_are_named`
def test_bad_files_are_told_with_line_and_column(kip: Kip, file: Path, tmp_path: Path) -> None:
    file.write_text('[proc.a]\ncommand = "x"\nports = ["80"]\n[proc.b]\ncommand = "x"\nidle = "soon"\n')
    lines = told(kip, "apply", "-f", file)
    assert lines[0] == f"kip: {file}:3:1: proc.a has no key ports: did you mean port?"
    assert lines[1].startswith(f'kip: {file}:6:8: proc.b.idle: duration "soon" is not valid: write a number')
    assert told(kip, "diff", "-f", file, code=2) == lines
    file.write_text('[proc.a]\ncommand = "x"\ndepends-on = ["b"]\n[proc.b]\ncommand = "x"\ndepends-on = ["a"]\n')
    (line,) = told(kip, "apply", "-f", file)
    assert "in a circle: a -> b -> a" in line
    assert str(tmp_path / "none") in kip.refused("apply", "-f", tmp_path / "none")
    file.write_text(PAIR)
    assert "no proc nobody" in kip.refused("apply", "-f", file, "nobody")
    assert kip.names() == []


def test_the_example_of_the_documents(kip: Kip, tmp_path: Path) -> None:
    text = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/kip-toml.md").read_text(), re.DOTALL)
    (tmp_path / "public").mkdir()
    (tmp_path / "public/index.html").write_text("shop\n")
    (tmp_path / "web.env").write_text("SIZE=big\n")
    (tmp_path / "token.txt").write_text("abc")
    (tmp_path / "kip.toml").write_text(text[0])
    done = subprocess.run([kip.program, "--data", kip.data, "apply"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cache made\nweb made\n", "")
    web = Proc(kip, "web")
    assert web.exec("sh", "-c", "echo $SIZE $COLOUR; cat /run/secrets/token").stdout == "big red\nabc"
    assert Proc(kip, "cache").inspect()["spec"]["file"] == "shop"


COMPOSE = """\
name: shop
services:
  front:
    image: ${WEB:-web:1}
    container_name: shop-front
    restart: unless-stopped
    ports: ["127.0.0.1::8080"]
    environment:
      - COLOUR=${COLOUR:-blue}
    healthcheck: {test: [CMD, cat, /srv/index.html], interval: 1s, timeout: 2s, retries: 10}
    depends_on:
      data_store: {condition: service_healthy}
  data_store:
    image: "oci:redis"
    ports: ["6379"]
    volumes: ["kept:/data"]
    mem_limit: 128m
    x-kip: {idle: 1h}
volumes:
  kept:
"""


# promise files: a Compose file of ordinary services comes up in order, sleeps and wakes; variables
#   and `.env` as Compose has them
# held by: this, `kip_describe::compose::tests::services_are_procs`,
#   `kip_describe::environ::tests::variables_are_replaced_as_compose_does`
# promise files: two Compose projects have services of the same names; a project is called as with
#   Compose
# held by: this, `kip_describe::compose::tests::a_project_is_called_as_compose_has_it`
def test_a_compose_file_comes_up_sleeps_and_wakes(kip: Kip, tmp_path: Path) -> None:
    images.layout(tmp_path / "redis", latest=images.redis())
    kip.cli("image", "load", f"oci:{images.layout(tmp_path / 'web', one=images.web())}:one", "--name", "web:1")
    file = tmp_path / "compose.yaml"
    file.write_text(COMPOSE)
    (tmp_path / ".env").write_text("COLOUR=green\n")
    done = kip.cli("apply", "-f", file)
    assert done.stdout == "shop-data-store made\nshop-front made\n"
    warned = done.stderr.splitlines()
    assert not any("container_name" in line for line in warned), warned
    front, store = Proc(kip, "shop-front"), Proc(kip, "shop-data-store")
    assert front.inspect()["ports"][0]["host_addr"] == "127.0.0.1"
    assert front.exec("sh", "-c", "echo $COLOUR").stdout == "green\n"
    names = " ".join(["shop-data-store", *store.inspect()["spec"]["aliases"]])
    assert front.exec("cat", "/etc/hosts").stdout.count(f"\t{names}\n") == 2, "by IPv4 and IPv6"
    assert front.inspect()["ready"] is True and front.inspect()["spec"]["ready"]["within_ms"] == 30_000
    assert front.inspect()["spec"]["restart"] == "always" and store.inspect()["spec"]["volumes"][0]["target"] == "/data"
    for proc in (front, store):
        proc.sleep()
    assert actions(kip, "apply", "-f", file) == {"shop-data-store": "same", "shop-front": "same"}
    assert actions(kip, "apply", "-f", file, "front", "--dry-run") == {"shop-data-store": "same", "shop-front": "same"}
    # Another project with services of the same names, from the same file.
    other = actions(kip, "apply", "-f", file, "-p", "other", "data-store")
    assert other == {"other-data-store": "create"}
    assert kip.json("inspect", "other-data-store")["spec"]["volumes"] != store.inspect()["spec"]["volumes"]
    assert [front.state, store.state] == ["parked", "parked"]
    assert http_get(front.port(8080)) == b"first\n"
    assert Redis(store.port(6379)).ask("PING") == "PONG"
    kip.remove_all()
    for volume in kip.json("volume", "ls"):
        kip.cli("volume", "rm", volume["name"])
    kip.cli("image", "gc", "--all")


# promise files: what a Compose file asks for and Kip lacks is named with its place; what the
#   program would notice is refused
# held by: this, `kip_describe::compose::tests::what_kip_lacks_is_named_and_weighed`
def test_what_compose_asks_for_and_kip_lacks_is_refused(kip: Kip, tmp_path: Path) -> None:
    file = tmp_path / "docker-compose.yml"
    file.write_text("services:\n  web:\n    image: web\n    privileged: true\n    pull_policy: never\nnetworks:\n  back: {driver: macvlan}\n")
    lines = told(kip, "apply", "-f", file)
    assert lines[0].startswith(f"kip: {file}:4:5: services.web.privileged is not supported: a proc is never")
    assert f"{file}:7:10: networks.back.driver is not supported: a proc has a network of its own" in lines[1]
    assert "--ignore-missing" in lines[2] and kip.names() == []
    # Then it is the image that is missing.
    assert "web" in told(kip, "apply", "-f", file, "--ignore-missing")[-1]
    # An external volume, which is filled elsewhere, is not made empty.
    file.write_text("services:\n  web:\n    image: web\n    volumes: ['kept:/kept']\nvolumes:\n  kept: {external: true}\n")
    assert any("there is no volume kept, and external: true" in line for line in told(kip, "apply", "-f", file))
    assert kip.json("volume", "ls") == []
    file.write_text("services:\n  web:\n    image: web\n    port: [80]\n")
    assert told(kip, "apply", "-f", file) == [f"kip: {file}:4:5: services.web has no key port: did you mean ports?"]


def test_several_compose_files(kip: Kip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is laid over those before it; paths count from the first one's directory."""
    base, other = tmp_path / "base", tmp_path / "other"
    for directory in (base, other):
        directory.mkdir()
        (directory / "of.env").write_text(f"WHERE={directory.name}\n")
    (base / "compose.yaml").write_text(
        "name: laid\nservices:\n  web:\n    image: oci:image:one\n    entrypoint: sleep\n    command: '1000'\n"
        "    environment: [A=first, B=first]\n    env_file: of.env\n    expose: ['80']\n"
    )
    (other / "debug.yaml").write_text("services:\n  web:\n    command: '2000'\n    environment: {A: second}\n    expose: ['81']\n")
    (other / "last.yaml").write_text("services:\n  web:\n    expose: !override ['82']\n  more:\n    image: oci:image:one\n")
    images.layout(base / "image", one=images.web())
    files = ["-f", base / "compose.yaml", "-f", other / "debug.yaml"]
    assert actions(kip, "apply", *files) == {"laid-web": "create"}
    spec = Proc(kip, "laid-web").inspect()["spec"]
    assert spec["command"] == ["sleep", "2000"]
    assert Proc(kip, "laid-web").exec("/bin/busybox", "sh", "-c", "echo $A $B $WHERE").stdout == "second first base\n"
    assert {80, 81} <= {port["port"] for port in spec["ports"]}
    assert actions(kip, "apply", *files) == {"laid-web": "same"}
    assert actions(kip, "apply", *files, "-f", other / "last.yaml", "--dry-run") == {"laid-web": "replace", "laid-more": "create"}
    # Without -f, what Compose reads by itself.
    (base / "compose.override.yaml").write_text((other / "debug.yaml").read_text())
    monkeypatch.chdir(base)
    assert actions(kip, "apply") == {"laid-web": "same"}
    # A mistake has the place of its own file.
    (other / "debug.yaml").write_text("services:\n  web:\n    expose: {a: b}\n")
    (line,) = told(kip, "apply", *files)
    assert line.startswith(f"kip: {other}/debug.yaml:3:") and "services.web.expose is a list at" in line, line
    (other / "kip.toml").touch()
    (line,) = told(kip, "apply", *files, "-f", other / "kip.toml")
    assert "only Compose files are laid over each other" in line, line
