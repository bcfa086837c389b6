"""Generations of older versions of the formats still wake: archived ones that are kept in the repository, and one on the local
disk that is written back into the oldest encoding.

Archived objects are bound to no machine, so those of a version are kept as they were (`harness/kept.py` says how they were made).
What is on the local disk is bound to sockets, namespaces and a boot, so none of it could be kept: a fresh one is converted."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import kept, servers
from harness.clients import Redis
from harness.kip import Kip, Proc


def test_every_version_is_kept() -> None:
    assert sorted(path.name for path in kept.KEPT.iterdir()) == [f"v{n + 1}" for n in range(kept.version())]


# promise archive: a generation that an older Kip archived still wakes, on a machine of another
#   kind; one of the oldest encoding on the local disk does
# held by: this, `tests/test_kept.py::test_every_version_is_kept`,
#   `tests/test_kept.py::test_one_on_the_local_disk`
@pytest.mark.parametrize("version", sorted(path.name for path in kept.KEPT.iterdir()))
def test_an_archived_one(fresh_kip: Callable[..., Kip], tmp_path: Path, version: str) -> None:
    """It is taken over with its keys, goes on where it was, and is archived and woken as any other from there on."""
    (tmp_path / "store").mkdir()
    kip = fresh_kip("--store", str(tmp_path / "store"), start=False)
    count, checksum = kept.unpack(kept.KEPT / version, kip, tmp_path / "store")["answer"]
    kip.up()
    assert "all as sealed" in kip.cli("snapshot", "verify", "--all").stdout
    kip.cli("wake", "kept")
    proc = Proc(kip, "kept")
    assert kept.ask(proc) == [count + 1, checksum]
    proc.archive()
    assert kept.ask(proc) == [count + 2, checksum]


def test_one_on_the_local_disk(fresh_kip: Callable[..., Kip]) -> None:
    """Format 1: no map of pages, page files as CRIU wrote them with one checksum each, each image a file, nothing said of what could be
    made anew."""
    kip = fresh_kip()
    proc = kip.run("redis", servers.redis().command, ports=servers.redis().published)
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", f"{i} " * 100) for i in range(3000)])
    proc.sleep()
    kip.kill()
    directory = next((kip.data / "procs" / "redis").glob("gen-*"))
    manifest = json.loads((directory / "manifest.json").read_text())
    for name in ("pages.map", "sets.pages", "wake.plan"):
        (directory / name).unlink(missing_ok=True)
    kept.as_files(directory, manifest)
    left = [part for part in manifest["parts"] if (directory / part["name"]).exists()]
    assert any(part["name"].startswith("pages-") for part in left) and len(left) < len(manifest["parts"])
    parts = [part | {"crc": zlib.crc32((directory / part["name"]).read_bytes())} for part in left]
    body = manifest["body"]
    body.pop("home")
    for socket in body["sockets"]:
        socket.pop("recipe")
    (directory / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "remote"} | {"format": 1, "parts": parts}))
    kip.up()
    assert proc.state == "parked"
    assert client.ask("GET", "key:2999") == b"2999 " * 100
    assert not proc.rebuilt() and not [event for event in kip.events() if event["kind"] == "cold-start"]
    proc.sleep()
    assert client.ask("GET", "key:1") == b"1 " * 100
