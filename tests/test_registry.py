"""Images from a real registry (Debian's docker-registry): names, logins, what it does not have, pulls that break off, no room."""

from __future__ import annotations

import base64
import http.client
import json
import os
import pty
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import images
from harness.certificates import certificate
from harness.clients import http_get
from harness.images import Cutting, Image, Registry, archive, digest, entry, layers_here, nothing_half, run
from harness.kip import Kip, one_line_refusal
from harness.wait import wait_for


@pytest.fixture
def kip(kip: Kip) -> Iterator[Kip]:
    """The module's daemon; images go after each test as procs do."""
    yield kip
    kip.remove_all()
    # One that was answered with an error may be at its last cleaning.
    wait_for("all images are gone", lambda: kip.cli("image", "gc", "--all", check=False).returncode == 0)


@pytest.fixture(scope="module")
def web() -> Image:
    return images.web()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with images.registry(tmp_path_factory.mktemp("registry") / "r") as running:
        yield running


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with images.registry(tmp_path_factory.mktemp("closed") / "r", login=True) as running:
        yield running


# promise P1: images come from a registry (logins, indexes, digests), an OCI layout (directory or
#   tar) and `docker save`; plain, gzip, zstd
# held by: this, `tests/test_registry.py::test_a_registry_that_wants_a_login`,
#   `tests/test_images.py::test_every_source_gives_the_same_layers`
def test_an_image_from_a_registry(kip: Kip, registry: Registry, web: Image) -> None:
    """Pulled by `kip run`, by digest, again without a byte; an index gives what runs here."""
    arm = Image([archive([entry("arm", "")])], {}, "arm64")
    name = registry.push("team/web", "1", [arm, web])
    proc = run(kip, "web", name, "-P", ready=True)
    assert http_get(proc.port(8080)) == b"first\n"
    shown = kip.json("image", "inspect", name)
    assert shown["reference"] == name and shown["digest"] == digest(images.index_of(arm, web))
    proc.sleep()
    assert http_get(proc.port(8080)) == b"first\n"
    pulled = kip.json("image", "pull", f"{registry.host}/team/web@{shown['digest']}")
    assert pulled["layers"] == shown["layers"]
    assert not list((kip.data / "images/blobs").glob("*.part"))
    # The name means something else now: the proc keeps what it has, the next gets the new.
    other = Image([*web.layers, archive([entry("srv/index.html", "newer\n", mode=0o644)])], web.config)
    registry.push("team/web", "1", other)
    assert run(kip, "old", name, "-P", ready=True).inspect()["spec"]["image"]["oci"]["layers"] == shown["layers"]
    new = run(kip, "new", name, "-P", "--pull", "always", ready=True)
    assert http_get(new.port(8080)) == b"newer\n" and http_get(proc.port(8080)) == b"first\n"


def test_a_registry_that_wants_a_login(
    kip: Kip, closed: Registry, web: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flag, by standard input, by what `docker login` left; refused with one line that does not show the password."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    name = closed.push("private/web", "1", web)

    def pull(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return kip.cli("image", "pull", name, *words, check=False, **options)

    assert "to anonymous users: log in with" in one_line_refusal(pull())
    wrong = one_line_refusal(pull("--registry-auth", f"{images.USER}:hunter2"))
    assert f"to user {images.USER}" in wrong and "hunter2" not in wrong
    assert "needs USER:PASSWORD" in one_line_refusal(pull("--registry-auth", images.USER))
    assert kip.json("image", "ls") == []
    assert pull("--registry-auth", f"{images.USER}:{images.PASSWORD}").returncode == 0
    kip.cli("image", "rm", name)
    assert pull("--registry-auth", images.USER, "--password-stdin", input=images.PASSWORD + "\n").returncode == 0
    kip.cli("image", "rm", name)
    auth = base64.b64encode(f"{images.USER}:{images.PASSWORD}".encode()).decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {closed.host: {"auth": auth}}}))
    proc = run(kip, "web", name, "-P", ready=True)
    assert http_get(proc.port(8080)) == b"first\n"
    kip.cli("rm", "web", "--force")
    kip.cli("image", "rm", name)
    (tmp_path / "bin").mkdir()
    helper = tmp_path / "bin/docker-credential-test"
    answer = json.dumps({"ServerURL": closed.host, "Username": images.USER, "Secret": images.PASSWORD})
    helper.write_text(f"#!/bin/sh\nread host; [ \"$1 $host\" = 'get {closed.host}' ] && echo '{answer}'\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "config.json").write_text(json.dumps({"credHelpers": {closed.host: "test"}}))
    assert pull().returncode == 0, "a program keeps it"
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in one_line_refusal(pull())
    assert images.PASSWORD not in kip.stderr() and "hunter2" not in kip.stderr()
    assert images.PASSWORD not in "".join(p.read_text() for p in (kip.data / "images/refs").iterdir())


# promise P1: a registry by TLS with a CA that the machine trusts or that `--registry-ca` names; a
#   registry whose tokens another server gives out
# held by: this, `tests/test_registry.py::test_a_daemon_that_trusts_the_ca`,
#   `tests/test_registry.py::test_tokens_of_a_registry`
def test_by_tls_with_a_ca_of_ones_own(kip: Kip, web: Image, tmp_path: Path) -> None:
    """A registry, also on this machine, whose certificate is not trusted yet: `--registry-ca` names its CA."""
    with images.registry(tmp_path / "r", tls=True) as secure:
        name = secure.push("private/web", "1", web)
        ca = ["--registry-ca", str(secure.ca)]
        proc = run(kip, "web", name, "-P", *ca, ready=True)
        assert http_get(proc.port(8080)) == b"first\n"
        proc.remove()
        kip.cli("image", "rm", name)
        (tmp_path / "other").mkdir()
        certificate(tmp_path / "other", "ca", None, "")
        text = kip.refused("image", "pull", "--registry-ca", tmp_path / "other/ca.pem", name)
        assert f"registry {secure.host} cannot be asked" in text and "certificate" in text, text
        key = secure.ca.with_suffix(".key")
        assert f"there is no certificate in {key}" in kip.refused("image", "pull", "--registry-ca", key, name)
        assert "none.pem" in kip.refused("image", "pull", "--registry-ca", tmp_path / "none.pem", name)
        assert kip.json("image", "ls") == []


def test_a_daemon_that_trusts_the_ca(fresh_kip: Callable[..., Kip], web: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that the daemon's machine trusts needs no flag: here by SSL_CERT_FILE. It goes by this machine's name, for
    loopback is asked without TLS."""
    with images.registry(tmp_path / "r", host=socket.gethostname(), tls=True) as secure:
        monkeypatch.setenv("SSL_CERT_FILE", str(secure.ca))
        kip = fresh_kip()
        kip.cli("image", "pull", secure.push("private/web", "1", web))


def test_tokens_of_a_registry(kip: Kip, web: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that sends its clients to a server that gives out tokens, as the large ones do."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with images.registry(tmp_path / "r", tokens=True) as given:
        name = given.push("team/web", "1", web)
        assert "to anonymous users: log in with" in kip.refused("image", "pull", name)
        assert f"to user {images.USER}" in kip.refused("image", "pull", name, "--registry-auth", f"{images.USER}:wrong")
        proc = run(kip, "web", name, "-P", "--registry-auth", f"{images.USER}:{images.PASSWORD}", ready=True)
        assert http_get(proc.port(8080)) == b"first\n"
        assert any("team%2Fweb" in path or "team/web" in path for path in given.tokens.asked), given.tokens.asked
        assert images.PASSWORD not in kip.stderr()


# promise P1: a login that cannot be used (a helper that fails, an identity token) is named, and no
#   registry is asked as anonymous instead
# held by: this, `kip_cli::image::login::tests::logins_are_found_as_docker_writes_them`
def test_logins_that_cannot_be_used_are_named(kip: Kip, closed: Registry, web: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has a login and cannot use it does not ask as anonymous: the answer would be another, and unclear."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    name = closed.push("private/web", "1", web)
    helper, config = tmp_path / "bin/docker-credential-test", tmp_path / "config.json"
    helper.parent.mkdir()
    monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
    config.write_text(json.dumps({"credHelpers": {closed.host: "test"}}))

    def refused(script: str) -> str:
        helper.write_text(f"#!/bin/sh\n{script}\n")
        helper.chmod(0o755)
        return kip.refused("image", "pull", name)

    text = refused("echo 'the keychain is locked'; exit 1")
    assert "docker-credential-test failed" in text and "the keychain is locked" in text and "anonymous" not in text, text
    assert "docker-credential-test failed" in refused("kill -9 $$")
    assert "to anonymous users" in refused("echo 'credentials not found in native keychain'; exit 1"), "it has none"
    answer = json.dumps({"ServerURL": closed.host, "Username": "<token>", "Secret": "hunter2"})
    text = refused(f"echo '{answer}'")
    assert "identity token" in text and "--registry-auth" in text and "hunter2" not in text, text
    config.write_text(json.dumps({"auths": {closed.host: {"auth": "dXNlcjo=", "identitytoken": "hunter2"}}}))
    text = kip.refused("image", "pull", name)
    assert "identity token" in text and "hunter2" not in text, text


def test_what_a_registry_does_not_have(kip: Kip, registry: Registry, web: Image) -> None:
    def refused(name: str, *words: str) -> str:
        return kip.refused("image", "pull", name, *words, timeout=120)

    registry.push("only/arm", "1", [Image([archive([entry("a", "")])], {}, "arm64")])
    name = registry.push("only/web", "1", web)
    assert "nothing for linux/amd64; it has linux/arm64" in refused(f"{registry.host}/only/arm:1")
    for absent in ("only/web:2", "nobody/nothing:1", f"only/web@{digest(b'x')}"):
        assert f"registry {registry.host} has no image" in refused(f"{registry.host}/{absent}")
    assert "127.0.0.1:9 cannot be asked" in refused("127.0.0.1:9/web") and "Connection refused" in refused("127.0.0.1:9/web")
    assert "cannot be asked" in refused("registry.invalid/web")
    assert "is no name of an image" in refused(f"{registry.host}/Upper:1")
    # By TLS it is not asked where it does not speak it: the flag is for others than this machine.
    blob = web.blobs()[1]
    file = registry.blob_file(digest(blob))
    good = file.read_bytes()
    try:
        file.write_bytes(bytes([*good[:-8], *b"\0\0\0\0\0\0\0\0"]))
        text = refused(name)
        assert f"a layer of {name} is damaged: it should be {digest(blob)}" in text, text
    finally:
        file.write_bytes(good)
    assert kip.json("image", "ls") == []
    nothing_half(kip)
    kip.cli("image", "pull", name)
    kip.cli("image", "rm", name)


def code_of(kip: Kip, source: dict[str, Any], **more: Any) -> str:
    """The code of a pull that is refused, for programs."""
    connection = http.client.HTTPConnection("kip", timeout=60)
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(60)
        s.connect(str(kip.data / "run/api.sock"))
        connection.sock = s
        connection.request("POST", "/v1/images/pull", json.dumps({"source": source} | more))
        last = json.loads(connection.getresponse().read().splitlines()[-1])
    return last["refusal"]["code"] if "refusal" in last else last["code"]


def test_codes_of_pulls_that_fail(kip: Kip, registry: Registry, closed: Registry, web: Image, tmp_path: Path) -> None:
    """An image that is missing or damaged, a client without permission, no registry: none of it is a defect or a full disk."""
    name = closed.push("codes/web", "1", web)
    assert code_of(kip, {"oci": {"path": "/nowhere"}}) == "unknown"
    assert code_of(kip, {"dockerarchive": {"path": str(tmp_path)}}) == "invalid"
    (tmp_path / "text").write_text("text " * 200)
    assert code_of(kip, {"dockerarchive": {"path": str(tmp_path / "text")}}) == "invalid"
    assert code_of(kip, {"registry": f"{registry.host}/nobody/nothing:1"}) == "unknown"
    assert code_of(kip, {"registry": name}) == "forbidden"
    assert code_of(kip, {"registry": name}, login={"user": images.USER, "password": "wrong"}) == "forbidden"
    assert code_of(kip, {"registry": "127.0.0.1:9/web"}) == "exhausted"
    name = registry.push("codes/web", "1", web)
    file = registry.blob_file(digest(web.blobs()[1]))
    good = file.read_bytes()
    try:
        file.write_bytes(bytes([*good[:-8], *b"\0\0\0\0\0\0\0\0"]))
        assert code_of(kip, {"registry": name}) == "invalid"
    finally:
        file.write_bytes(good)


def big(seed: str, size: int = 6 << 20) -> Image:
    noise = os.urandom(size)
    return Image([archive([entry(f"srv/{seed}", noise)])], {"Cmd": ["x"]}, packing="plain")


# promise P1: a pull that broke off goes on; a killed daemon and a client that goes leave nothing
#   half
# held by: this,
#   `tests/test_registry.py::test_a_killed_daemon_and_a_client_that_goes_leave_nothing_half`,
#   `tests/test_registry.py::test_the_same_image_pulled_at_the_same_time`
def test_a_pull_that_breaks_off_goes_on(kip: Kip, registry: Registry) -> None:
    """Within one pull, and with the next one: what has come is not asked for again."""
    image = big("broken")
    size = len(image.blobs()[0])
    registry.push("big/broken", "1", image)
    proxy = Cutting(registry.host, 2 << 20, times=2)
    try:
        kip.cli("image", "pull", f"{proxy.host}/big/broken:1")
        assert proxy.cuts == 2 and proxy.sent < size + (1 << 20), "it went on where it had ended"
    finally:
        proxy.close()
    nothing_half(kip)
    kip.cli("image", "rm", f"{proxy.host}/big/broken:1")
    endless = Cutting(registry.host, 300 << 10, times=1000)
    endless.limit = 0
    try:
        text = kip.refused("image", "pull", f"{endless.host}/big/broken:1", timeout=120)
        assert f"registry {endless.host} cannot be asked" in text, text
    finally:
        endless.close()
    assert kip.json("image", "ls") == []


# promise P1: a terminal shows how far a pull is; a registry elsewhere is asked by TLS unless a flag
#   says otherwise
# held by: this, `tests/test_registry.py::test_only_this_machine_is_asked_without_tls`
def test_a_terminal_shows_how_far_it_is(kip: Kip, registry: Registry) -> None:
    """Of each layer; elsewhere, and with --json, there is nothing but the result."""
    name = registry.push("big/shown", "1", big("shown"))
    ours, theirs = pty.openpty()
    try:
        words = [kip.program, "--data", kip.data, "image", "pull", name]
        subprocess.run(words, stdout=subprocess.DEVNULL, stderr=theirs, check=True, timeout=60)
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # all of it was read
            pass
    finally:
        os.close(ours)
    layer = kip.json("image", "inspect", name)["layers"][0].removeprefix("sha256:")[:12]
    assert layer.encode() in shown and re.search(rb"iB/6\.\d\d MiB", shown), shown[-500:]
    again = kip.cli("image", "pull", name)
    assert again.stderr == "" and again.stdout.startswith(f"{name} is here: "), again


def test_only_this_machine_is_asked_without_tls(kip: Kip, web: Image, tmp_path: Path) -> None:
    """By another name it is any machine: TLS unless the flag says otherwise."""
    with images.registry(tmp_path / "r", host=socket.gethostname()) as elsewhere:
        name = elsewhere.push("team/web", "1", web)
        assert not name.startswith(("127.", "localhost"))
        assert "cannot be asked" in kip.refused("image", "pull", name, timeout=120)
        assert kip.json("image", "pull", name, "--plain-http")["reference"] == name


def test_a_killed_daemon_and_a_client_that_goes_leave_nothing_half(
    fresh_kip: Callable[..., Kip], registry: Registry
) -> None:
    kip = fresh_kip()
    image = big("killed")
    registry.push("big/killed", "1", image)
    part = kip.data / "images/blobs" / (digest(image.blobs()[0]).removeprefix("sha256:") + ".part")

    def stalled(end: Callable[[subprocess.Popen[bytes]], None]) -> None:
        proxy = Cutting(registry.host, 3 << 20, stall=True)
        client = subprocess.Popen(
            [kip.program, "--data", kip.data, "image", "pull", f"{proxy.host}/big/killed:1"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert proxy.reached.wait(30)
            wait_for("most of it is there", lambda: part.exists() and part.stat().st_size > 2 << 20)
            assert "images are being pulled" in kip.refused("image", "gc")
            end(client)
            client.wait(30)
        finally:
            client.kill()
            client.wait()
            proxy.close()

    stalled(lambda client: client.kill())
    wait_for("nobody pulls", lambda: kip.cli("image", "gc", "--dry-run", check=False).returncode == 0)
    assert kip.json("image", "ls") == [] and part.exists()
    stalled(lambda client: kip.kill())
    # As a crash in the middle of unpacking leaves it.
    half = kip.data / "images/layers" / ("0" * 64 + "-1.new")
    (half / "files.new").mkdir(parents=True)
    (half / "files.new/file").write_text("half")
    kip.up()
    assert kip.json("image", "ls") == [] and layers_here(kip) == set()
    nothing_half(kip)
    proxy = Cutting(registry.host, 1 << 40)
    try:
        kip.cli("image", "pull", f"{proxy.host}/big/killed:1")
        assert proxy.sent < 5 << 20, "what had come is of use"
    finally:
        proxy.close()
    assert layers_here(kip) == {digest(image.layers[0])} and not part.exists()
    nothing_half(kip)


def test_no_room_on_the_disk(fresh_kip: Callable[..., Kip], registry: Registry, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40M", "kip-test", disk], check=True, timeout=20)
    try:
        kip = fresh_kip(data=disk / "data")
        name = registry.push("big/small", "1", big("small", 8 << 20))
        bigger = registry.push("big/bigger", "1", big("bigger", 60 << 20))
        text = kip.refused("image", "pull", bigger, timeout=120)
        assert "o space left on device" in text and "kip image gc" in text, text
        assert kip.json("image", "ls") == []
        nothing_half(kip)
        # Half of it has room: it came, and cannot be unpacked.
        text = kip.refused("image", "pull", registry.push("big/half", "1", big("half", 24 << 20)), timeout=120)
        assert "o space left on device" in text, text
        nothing_half(kip)
        kip.cli("image", "pull", name)
        kip.down()
    finally:
        subprocess.run(["umount", disk], check=True, timeout=20)


def test_the_same_image_pulled_at_the_same_time(kip: Kip, registry: Registry) -> None:
    image = big("twice", 12 << 20)
    names = [registry.push("big/twice", tag, image) for tag in ("1", "2", "3")]
    proxy = Cutting(registry.host, 1 << 40)
    try:
        words = [[kip.program, "--data", kip.data, "image", "pull", n.replace(registry.host, proxy.host)] for n in names]
        pulls = [subprocess.Popen(w, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for w in words]
        for pull in pulls:
            _, stderr = pull.communicate(timeout=60)
            assert pull.returncode == 0, stderr
        assert proxy.sent < 14 << 20, "one brings it, the others wait"
    finally:
        proxy.close()
    assert len(kip.json("image", "ls")) == 3 and len(layers_here(kip)) == 1
    kip.cli("image", "gc", "--all")
