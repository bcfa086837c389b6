"""Images of the test's own: layers from files of this machine, written as an OCI layout, as `docker save` does, or pushed to a
registry. Builds what a builder of images would, and on request what none should."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.server
import io
import json
import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
import tarfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from harness.certificates import certificate
from harness.kip import Kip, Proc
from harness.wait import wait_for

OCI = "application/vnd.oci.image."
MANIFEST, INDEX, CONFIG = f"{OCI}manifest.v1+json", f"{OCI}index.v1+json", f"{OCI}config.v1+json"
LAYER = f"{OCI}layer.v1.tar"
USER, PASSWORD = "tester", "secret"
# bcrypt of PASSWORD, the one kind that docker-registry takes.
HTPASSWD = f"{USER}:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n"


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def entry(name: str, data: bytes | str | None = None, **how: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A file, or a directory where there is no data; `how` sets fields of the header (`mode`, `uid`, `type`, `linkname`..)."""
    info = tarfile.TarInfo(name)
    content = data.encode() if isinstance(data, str) else data or b""
    info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
    info.mode, info.size, info.mtime = 0o755, len(content), 1_700_000_000
    for key, value in how.items():
        setattr(info, key, value)
    return info, content


def link(name: str, target: str, **how: Any) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, "", type=tarfile.SYMTYPE, linkname=target, **how)


def archive(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def packed(tar: bytes, how: str) -> bytes:
    if how == "gzip":
        return gzip.compress(tar, 6, mtime=0)
    return stored_zstd(tar) if how == "zstd" else tar


def stored_zstd(data: bytes) -> bytes:
    """A zstd frame that compresses nothing (RFC 8878, 3.1.1: raw blocks), for Python has no zstd."""
    size = 128 << 10
    blocks = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
    out = struct.pack("<I", 0xFD2FB528) + bytes([0, 10 << 3])
    for n, block in enumerate(blocks):
        out += struct.pack("<I", len(block) << 3 | (n == len(blocks) - 1))[:3] + block
    return out


@dataclass
class Image:
    """What an image is: layers as plain tars, lowest first, and how its program is run."""

    layers: list[bytes]
    config: dict[str, Any] = field(default_factory=dict)
    architecture: str = "amd64"
    packing: str = "gzip"
    # Instead of the digests of the layers' contents.
    diff_ids: list[str] | None = None

    def configuration(self) -> bytes:
        ids = self.diff_ids or [digest(layer) for layer in self.layers]
        body = {"os": "linux", "architecture": self.architecture, "config": self.config}
        return json.dumps(body | {"rootfs": {"type": "layers", "diff_ids": ids}}).encode()

    def blobs(self) -> list[bytes]:
        return [packed(layer, self.packing) for layer in self.layers]

    def manifest(self) -> bytes:
        suffix = {"plain": "", "gzip": "+gzip", "zstd": "+zstd"}[self.packing]
        layers = [describe(blob, LAYER + suffix) for blob in self.blobs()]
        body = {"schemaVersion": 2, "mediaType": MANIFEST, "config": describe(self.configuration(), CONFIG)}
        return json.dumps(body | {"layers": layers}).encode()


def describe(blob: bytes, kind: str, **more: Any) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest(blob), "size": len(blob)} | more


def index_of(*images: Image) -> bytes:
    """An index of images for several platforms."""
    entries = [
        describe(i.manifest(), MANIFEST, platform={"os": "linux", "architecture": i.architecture}) for i in images
    ]
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).encode()


def layout(directory: Path, **tags: Image | list[Image]) -> Path:
    """An OCI layout with an image for each tag, or an index of several."""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(blob: bytes) -> None:
        (blobs / digest(blob).removeprefix("sha256:")).write_bytes(blob)

    entries = []
    for tag, what in tags.items():
        images = what if isinstance(what, list) else [what]
        for image in images:
            for blob in [*image.blobs(), image.configuration(), image.manifest()]:
                put(blob)
        top, kind = (index_of(*images), INDEX) if isinstance(what, list) else (what.manifest(), MANIFEST)
        put(top)
        entries.append(describe(top, kind, annotations={"org.opencontainers.image.ref.name": tag}))
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return directory


def tar_of(directory: Path, file: Path) -> Path:
    with tarfile.open(file, "w") as tar:
        tar.add(directory, arcname=".")
    return file


def saved(file: Path, **tags: Image) -> Path:
    """What `docker save` wrote before it wrote layouts: a layer that comes twice is a link."""
    listing, seen, entries = [], {}, []
    for tag, image in tags.items():
        config = image.configuration()
        name = digest(config).removeprefix("sha256:") + ".json"
        entries.append(entry(name, config))
        paths = []
        for n, layer in enumerate(image.layers):
            path = f"{tag}-{n}/layer.tar"
            if (first := seen.get(layer)) is not None:
                entries.append(link(path, f"../{first}"))
            else:
                entries.append(entry(path, layer))
                seen[layer] = path
            paths.append(path)
        listing.append({"Config": name, "RepoTags": [f"{tag}:1"], "Layers": paths})
    entries.append(entry("manifest.json", json.dumps(listing)))
    file.write_bytes(archive(entries))
    return file


# What images of programs are made of.


def busybox(*applets: str) -> bytes:
    """A layer with busybox, its shell and what else is named, and the usual directories; no /usr, no host."""
    program = Path(shutil.which("busybox", path="/usr/bin:/bin:/usr/sbin") or "").read_bytes()
    entries = [entry(d) for d in ("bin", "etc", "root", "var")] + [entry("tmp", mode=0o1777)]
    entries.append(entry("bin/busybox", program))
    entries += [link(f"bin/{name}", "busybox") for name in ("sh", "cat", "ls", "id", "sleep", *applets)]
    entries.append(entry("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nweb:x:33:34:web:/srv:/bin/sh\n", mode=0o644))
    entries.append(entry("etc/group", "root:x:0:\nweb:x:34:\nlog:x:40:web\n", mode=0o644))
    return archive(entries)


def with_libraries(*programs: str) -> bytes:
    """A layer with programs of this machine and the libraries that they need, each where it is."""
    found: dict[str, Path] = {}
    for program in programs:
        found[program] = Path(program).resolve()
        for line in subprocess.run(["ldd", program], capture_output=True, text=True).stdout.splitlines():
            path = next((word for word in line.split() if word.startswith("/")), None)
            if path:
                found[path] = Path(path).resolve()
    entries = [entry("usr"), link("lib", "usr/lib"), link("lib64", "usr/lib64"), link("bin", "usr/bin")]
    for name, path in sorted(found.items()):
        # /lib is a link into /usr here as there.
        inside = name if name.startswith("/usr/") else "/usr" + name
        entries.append(entry(inside.lstrip("/"), path.read_bytes()))
    return archive(entries)


def redis() -> Image:
    users = [entry("etc"), entry("etc/passwd", "root:x:0:0::/root:/bin/sh\nredis:x:999:999::/data:/bin/sh\n", mode=0o644)]
    users.append(entry("data", uid=999, gid=999))
    config = {
        "Entrypoint": ["redis-server"], "Cmd": ["--save", "", "--protected-mode", "no"], "User": "redis",
        "WorkingDir": "/data", "ExposedPorts": {"6379/tcp": {}}, "Env": ["PATH=/usr/bin:/bin", "LANG=C"],
        "Volumes": {"/data": {}},
    }  # fmt: skip
    return Image([with_libraries("/usr/bin/redis-server"), archive(users)], config)


@cache
def tools() -> bytes:
    """The layer below those of the tests' own images."""
    return busybox("httpd", "stat", "touch", "grep", "kill", "dd", "rm", "wc", "env", "pwd", "readlink")


@cache
def web() -> Image:
    """A web server in three layers, of which each hides or deletes something of those below."""
    pages = [entry("srv", uid=33, gid=34), entry("srv/index.html", "first\n", mode=0o644), entry("srv/gone", "x")]
    pages += [entry("srv/closed"), entry("srv/closed/hidden", "x"), entry("etc"), entry("etc/motd", "below\n", mode=0o644)]
    pages += [entry("srv/file", "kept\n", mode=0o640, uid=33, gid=40)]
    pages += [entry("srv/hard", "", type=tarfile.LNKTYPE, linkname="srv/file"), entry("srv/set", "#!", mode=0o4755)]
    pages += [link("srv/soft", "/etc/motd"), entry("dev"), entry("dev/sda", "", type=tarfile.BLKTYPE)]
    pages += [entry("usr"), entry("usr/share"), entry("usr/share/low", "low\n"), entry("usr/share/deleted", "x")]
    top = [entry("srv", uid=33, gid=34), entry("srv/closed"), entry("etc"), entry("usr"), entry("usr/share")]
    top += [entry("srv/.wh.gone", ""), entry("srv/closed/.wh..wh..opq", ""), entry("srv/closed/shown", "x")]
    top += [entry("etc/motd", "above\n", mode=0o644)]
    top += [entry("usr/share/.wh.deleted", ""), entry("usr/share/high", "high\n")]
    config = {
        "Entrypoint": ["/bin/busybox", "httpd"], "Cmd": ["-f", "-v", "-p", "8080", "-h", "/srv"], "User": "web",
        "WorkingDir": "/srv", "Env": ["PATH=/bin", "COLOUR=red"], "ExposedPorts": {"8080/tcp": {}, "9/sctp": {}},
        "Volumes": {"/srv/data": {}},
    }  # fmt: skip
    return Image([tools(), archive(pages), archive(top)], config)


# On the daemon.


def run(kip: Kip, name: str, image: str, *words: str, command: tuple[str, ...] = (), ready: bool = False) -> Proc:
    flags = ["--wait-ready"] if ready else []
    kip.cli("run", "--name", name, "--image", image, *flags, *words, *(["--", *command] if command else []))
    return Proc(kip, name)


def layers_here(kip: Kip) -> set[str]:
    return {"sha256:" + path.name for path in (kip.data / "images/layers").iterdir()}


def nothing_half(kip: Kip) -> None:
    """Every layer that has its name is whole, and nothing else looks like one."""

    def half() -> list[str]:
        every = (kip.data / "images").glob("*/*")
        return [path.name for path in every if path.name.endswith((".new", ".gone"))]

    # What had begun when another layer was refused comes to its end, and goes.
    wait_for("nothing half is there", lambda: not half())
    for path in (kip.data / "images/layers").iterdir():
        assert (path / "layer.json").exists() and (path / "files").is_dir(), path


# A registry.


@dataclass
class Registry:
    """Debian's docker-registry on loopback."""

    host: str
    process: subprocess.Popen[bytes]
    login: str | None
    directory: Path
    ca: Path | None = None
    tokens: Tokens | None = None

    def send(self, method: str, path: str, body: bytes = b"", kind: str = "application/octet-stream") -> Any:
        url = path if path.startswith("http") else f"http{'s' if self.ca else ''}://{self.host}{path}"
        request = urllib.request.Request(url, data=body if method != "GET" else None, method=method)
        request.add_header("Content-Type", kind)
        if self.login:
            request.add_header("Authorization", "Basic " + base64.b64encode(self.login.encode()).decode())
        if self.tokens:
            name = re.search(r"/v2/(.+)/(blobs|manifests)/", url)[1]
            request.add_header("Authorization", f"Bearer {self.tokens.token(name, ['pull', 'push'])}")
        handlers: list[Any] = [urllib.request.ProxyHandler({})]
        if self.ca:
            handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(self.ca))))
        return urllib.request.build_opener(*handlers).open(request, timeout=60)

    def push_blob(self, name: str, blob: bytes) -> None:
        place = self.send("POST", f"/v2/{name}/blobs/uploads/").headers["Location"]
        self.send("PUT", f"{place}{'&' if '?' in place else '?'}digest={digest(blob)}", blob)

    def push(self, name: str, tag: str, what: Image | list[Image]) -> str:
        """Pushes an image, or an index of several; its name for `kip image pull`."""
        images = what if isinstance(what, list) else [what]
        for image in images:
            for blob in [*image.blobs(), image.configuration()]:
                self.push_blob(name, blob)
            self.send("PUT", f"/v2/{name}/manifests/{digest(image.manifest())}", image.manifest(), MANIFEST)
        top, kind = (index_of(*images), INDEX) if isinstance(what, list) else (what.manifest(), MANIFEST)
        self.send("PUT", f"/v2/{name}/manifests/{tag}", top, kind)
        return f"{self.host}/{name}:{tag}"

    def blob_file(self, blob: str) -> Path:
        """Where the registry has it: tests damage it there."""
        hexa = blob.removeprefix("sha256:")
        return self.directory / "docker/registry/v2/blobs/sha256" / hexa[:2] / hexa / "data"


def answers(address: str, port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex((address, port)) == 0


class Tokens:
    """Gives out the tokens that a registry with `auth: token` asks for, to USER with PASSWORD."""

    def __init__(self, directory: Path):
        self.directory, self.asked = directory, []  # type: tuple[Path, list[str]]
        certificate(directory, "issuer", None, "")
        der = subprocess.run(
            ["openssl", "x509", "-in", directory / "issuer.pem", "-outform", "der"], check=True, capture_output=True
        ).stdout
        self.chain = base64.b64encode(der).decode()
        tokens = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
                tokens.asked.append(self.path)
                who = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
                given = self.headers.get("Authorization")
                # A request without credentials gets a token that allows nothing; one with wrong
                # ones gets none.
                status = 200 if given in (who, None) else 401
                _, name, actions = (query.get("scope", ["repository::"])[0].split(":") + ["", ""])[:3]
                body = json.dumps({"token": tokens.token(name, actions.split(",") if given else [])} if status == 200 else {})
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def token(self, name: str, actions: list[str]) -> str:
        """A JSON Web Token, RFC 7519, signed with ES256."""
        now = int(time.time())
        claims = {"iss": "kip-tests", "sub": USER, "aud": "registry", "exp": now + 300, "nbf": now - 10, "iat": now}
        claims |= {"jti": os.urandom(8).hex(), "access": [{"type": "repository", "name": name, "actions": actions}]}

        def packed(data: bytes) -> bytes:
            return base64.urlsafe_b64encode(data).rstrip(b"=")

        head = {"typ": "JWT", "alg": "ES256", "x5c": [self.chain]}
        text = packed(json.dumps(head).encode()) + b"." + packed(json.dumps(claims).encode())
        sign = ["openssl", "dgst", "-sha256", "-sign", self.directory / "issuer.key"]
        der = subprocess.run(sign, input=text, check=True, capture_output=True).stdout
        # SEQUENCE of two INTEGERs, each of which is 32 bytes in the token.
        first = der[4 : 4 + der[3]]
        second = der[6 + der[3] :]
        numbers = b"".join(number.lstrip(b"\0").rjust(32, b"\0") for number in (first, second))
        return (text + b"." + packed(numbers)).decode()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def registry(
    directory: Path, login: bool = False, host: str = "127.0.0.1", tls: bool = False, tokens: bool = False
) -> Iterator[Registry]:
    """With `tls` it is `localhost` where no host is named, by a CA in DIRECTORY/ca.pem."""
    program = shutil.which("docker-registry", path="/usr/bin:/usr/local/bin")
    assert program, "docker-registry is not there: run scripts/setup"
    address = socket.gethostbyname(host)
    with socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
    directory.mkdir(parents=True)
    lines = ["version: 0.1", "log: {level: error}", f"storage: {{filesystem: {{rootdirectory: {directory}/data}}}}"]
    lines.append(f"http: {{addr: '{address}:{port}'}}")
    issuer = None
    if tls:
        host = "localhost" if host == "127.0.0.1" else host
        certificate(directory, "ca", None, "")
        certificate(directory, "good", "ca", f"DNS:{host}")
        files = f"certificate: {directory}/good.pem, key: {directory}/good.key"
        lines[-1] = f"http: {{addr: '{address}:{port}', tls: {{{files}}}}}"
    if tokens:
        issuer = Tokens(directory)
        realm = f"realm: 'http://127.0.0.1:{issuer.server.server_address[1]}/token', service: registry, issuer: kip-tests"
        lines.append(f"auth: {{token: {{{realm}, rootcertbundle: {directory}/issuer.pem}}}}")
    if login:
        (directory / "htpasswd").write_text(HTPASSWD)
        lines.append(f"auth: {{htpasswd: {{realm: kip, path: {directory}/htpasswd}}}}")
    (directory / "config.yml").write_text("\n".join(lines) + "\n")
    process = subprocess.Popen(
        [program, "serve", str(directory / "config.yml")],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    try:
        wait_for("docker-registry listens", lambda: answers(address, port), 60)
        who, ca = f"{USER}:{PASSWORD}" if login else None, directory / "ca.pem" if tls else None
        yield Registry(f"{host}:{port}", process, who, directory / "data", ca, issuer)
    finally:
        if issuer:
            issuer.close()
        process.kill()
        process.wait()


class Cutting:
    """A proxy before a registry that injects what networks do: after `limit` bytes of answers a connection ends, or stands still."""

    def __init__(self, target: str, limit: int, stall: bool = False, times: int = 1):
        host, port = target.rsplit(":", 1)
        self.target, self.limit, self.stall, self.times = (host, int(port)), limit, stall, times
        self.cuts, self.sent, self.reached = 0, 0, threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            self.open += [client, server]
            threading.Thread(target=self._carry, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(server, client, True), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        passed = 0
        try:
            while data := source.recv(16 << 10):
                if answers and self.cuts < self.times and passed + len(data) > self.limit:
                    sink.sendall(data[: self.limit - passed])
                    self.cuts += 1
                    self.sent += self.limit - passed
                    self.reached.set()
                    if self.stall:
                        return
                    break
                passed += len(data)
                self.sent += len(data) if answers else 0
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self.listener.close()
        for end in self.open:
            end.close()
