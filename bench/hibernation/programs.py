"""What is measured: paper H's programs and two servers more, each with a question, the answer that alone counts, and the
issue's figures."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness import servers
from harness.clients import Redis
from harness.programs import tarball
from parkwake.client import Question
from parkwake.workspace import Failed, Workspace, command

SOURCES = Path(__file__).resolve().parents[1] / "programs"
PORT = 8080
PYTHON = "/usr/bin/python3"

SMALL_IMAGE, LARGE_IMAGE = 97_000, 2_600_000  # the paper names the larger size only
FRAMES = 240
REDIS_KEYS, REDIS_VALUE = 100, 1 << 20


@dataclass(frozen=True)
class Program:
    """A server, and what it is asked."""

    name: str
    command: list[str]
    question: Question
    files: Mapping[str, bytes | str | Path] = field(default_factory=dict)
    port: int = PORT
    modes: Mapping[str, int] = field(default_factory=dict)
    fill: Callable[[int], None] | None = None
    """Puts its data into it, given its port on this machine."""
    target_ms: tuple[float, float] | None = None
    """Of the issue: first reply hibernated minus hot, p50, with the set in memory and on disk."""
    deflate_target_ms: float | None = None
    """Of the issue: second deflate of it unchanged."""
    versions: tuple[str, ...] = ()

    def tar(self, directory: Path) -> Path | None:
        return tarball(directory / f"{self.name}.tar", self.files, self.modes) if self.files else None


def http(body: bytes, path: str = "/") -> Question:
    return Question("tcp", f"GET {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n".encode(), f"http:{body.hex()}")


def need(name: str) -> str:
    path = "/usr/local/go/bin:/usr/lib/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if not (found := shutil.which(name, path=path)):
        raise Failed(f"there is no {name}: run scripts/setup bench")
    return found


def function(name: str, work: Workspace, kind: str, media: Path | None = None, **more) -> Program:
    """One of the Python servers; the right answer is what the same code says here."""
    inside = f"/srv/{media.name}" if media else None
    files: dict[str, bytes | str | Path] = {"srv/serve.py": SOURCES / "serve.py"}
    words = [PYTHON, "/srv/serve.py", str(PORT), kind]
    if media and inside:
        files[inside[1:]] = media
        words.append(inside)
    right = command(PYTHON, SOURCES / "serve.py", "once", kind, *([media] if media else []), timeout=120).strip()
    return Program(name, words, http(right.encode()), files, versions=(PYTHON, "--version"), **more)


def make_media(work: Workspace, kind: str, name: str, size: int) -> Path:
    command(PYTHON, SOURCES / "media.py", kind, work.dir / name, str(size), timeout=120)
    return work.dir / name


def image(name: str, work: Workspace, size: int) -> Program:
    return function(name, work, "image", make_media(work, "image", f"{name}.jpg", size))


def hello_node(_: Workspace) -> Program:
    words = [need("node"), "/srv/hello.js", str(PORT)]
    files = {"srv/hello.js": SOURCES / "hello.js"}
    return Program("hello-node", words, http(b"hello"), files, target_ms=(4, 9), versions=("node", "--version"))


def hello_go(work: Workspace) -> Program:
    go, out = need("go"), work.dir / "hello-go"
    env = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "HOME": str(work.dir), "PATH": "/usr/bin:/bin"}
    command(go, "build", "-o", out, ".", cwd=SOURCES / "hello-go", env=env, timeout=170)
    words = ["/usr/local/bin/hello-go", f":{PORT}"]
    return Program("hello-go", words, http(b"hello"), {"usr/local/bin/hello-go": out}, versions=(go, "version"))


def hello_java(work: Workspace) -> Program:
    command(need("javac"), "-d", work.dir, SOURCES / "Hello.java", timeout=120)
    # A function's instance is small: the machine's memory is no measure for its heap.
    words = [str(Path(need("java")).resolve()), "-XX:+UseSerialGC", "-Xmx64m", "-cp", "/srv", "Hello", str(PORT)]
    files = {f"srv/{path.name}": path for path in work.dir.glob("Hello*.class")}
    return Program("hello-java", words, http(b"hello"), files, versions=("java", "-version"))


def lighttpd(_: Workspace) -> Program:
    server = servers.lighttpd()
    question = http(servers.PAGE, "/page.html")
    return Program("lighttpd", server.command, question, server.files, target_ms=(0.5, 0.8), versions=("lighttpd", "-v"))


def value(i: int) -> bytes:
    """What redis holds under key:i: a megabyte, like no other."""
    return hashlib.shake_128(b"%d" % i).digest(REDIS_VALUE)


def fill_redis(port: int) -> None:
    client = Redis(port)
    client.ask_all([("SET", f"key:{i}", value(i)) for i in range(REDIS_KEYS)], at_once=10)
    client.ask("SET", "small", "a small value")
    if client.ask("DBSIZE") != REDIS_KEYS + 1:
        raise Failed("redis does not hold the keys")
    client.ask("SAVE")  # what a cold start loads
    client.close()


def redis(_: Workspace) -> Program:
    server = servers.redis()
    question = Question("tcp", Redis.pack(("GET", "small")), "exact:" + b"$13\r\na small value\r\n".hex())
    return Program(
        "redis-100mb", server.command, question, port=server.port, fill=fill_redis, target_ms=(1, 1.8), deflate_target_ms=5,
        versions=("redis-server", "--version"),
    )  # fmt: skip


ALL: dict[str, Callable[[Workspace], Program]] = {
    "hello-python": lambda work: function("hello-python", work, "hello", target_ms=(4, 9)),
    "hello-node": hello_node,
    "hello-go": hello_go,
    "hello-java": hello_java,
    "float": lambda work: function("float", work, "float"),
    "image-small": lambda work: image("image-small", work, SMALL_IMAGE),
    "image-large": lambda work: image("image-large", work, LARGE_IMAGE),
    "video": lambda work: function("video", work, "video", make_media(work, "video", "clip.avi", FRAMES)),
    "lighttpd": lighttpd,
    "redis-100mb": redis,
}
