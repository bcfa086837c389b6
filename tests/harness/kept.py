"""Archived generations that are kept in the repository, one directory in `tests/kept` for each version of the format that there
was: what every later Kip must still wake.

`KIP_BIN=target/debug/kip python3 -m harness.kept`, in `tests`, writes that of the version of now; those of older versions are never
written again. It is of a program that needs nothing of its machine (`programs/kept.c`), and its images are made to ask for no more
registers than every x86_64 has, so that a machine with another processor and another kernel wakes it too."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any

from harness import programs
from harness.clients import Lines
from harness.kip import ROOT, Kip, Proc, daemon
from harness.servers import Server

KEPT = ROOT / "tests" / "kept"
FLAGS = ("-static", "-nostdlib", "-ffreestanding", "-fno-stack-protector", "-mno-sse")


def server() -> Server:
    return Server("kept", ["/srv/kept"], 7300, {"srv/kept": programs.c_program("kept", *FLAGS)})


def version() -> int:
    """That this Kip writes."""
    return int(re.search(r"FORMAT: u16 = (\d+);", (ROOT / "crates/archive/src/seal.rs").read_text())[1])


def ask(proc: Proc) -> list[int]:
    """How many lines it has seen, and the checksum of its memory."""
    client = Lines(proc.port())
    try:
        return [int(word) for word in client.ask("?").split()]
    finally:
        client.close()


def unpack(directory: Path, kip: Kip, store: Path) -> dict[str, list[int]]:
    """Puts objects and keys where a data directory finds them; gives what the program had answered last."""
    with tarfile.open(directory / "store.tar.xz") as tar:
        tar.extractall(store)
    (kip.data / "archive").mkdir(parents=True)
    shutil.copy(directory / "default.keys", kip.data / "archive" / "default.keys")
    return json.loads((directory / "expected.json").read_text())


def make() -> Path:
    to = KEPT / f"v{version()}"
    temp = tempfile.mkdtemp(prefix="kip-test-kept-")
    (Path(temp) / "store").mkdir()
    with daemon("--store", temp + "/store") as kip:
        proc = kip.run("kept", server().command, ports=server().published, tar=server().tarball(Path(temp)))
        for _ in range(3):
            answer = ask(proc)
        proc.sleep()
        kip.cli("sleep", "kept", "--to", "archived")
        kip.kill()
        words = [programs.example("tamper"), kip.data, temp + "/store", "kept", "portable"]
        subprocess.run(words, check=True, timeout=60)
        objects = Path(temp) / "store"
        # One generation, and no more than it needs.
        fronts = sorted(objects.glob("realms/*/procs/*/gen-*"), key=lambda path: path.stat().st_mtime_ns)
        skipped = {path.relative_to(objects).as_posix() for path in fronts[:-1]}
        to.mkdir(parents=True)
        with tarfile.open(to / "store.tar.xz", "w:xz") as tar:
            for path in sorted(path for path in objects.rglob("*") if path.is_file()):
                if path.relative_to(objects).as_posix() not in skipped:
                    tar.add(path, path.relative_to(objects).as_posix())
        shutil.copy(kip.data / "archive" / "default.keys", to / "default.keys")
        (to / "expected.json").write_text(json.dumps({"answer": answer}) + "\n")
        kip.up()
        kip.cli("rm", "--force", "kept")
    shutil.rmtree(temp)
    return to


def as_files(directory: Path, manifest: dict[str, Any]) -> None:
    """A generation as it was before format 3, which has its images in one file."""
    archive = directory / "checkpoint.tar"
    with tarfile.open(archive) as images:
        files = {member.name: images.extractfile(member).read() for member in images}
    archive.unlink()
    for name, content in files.items():
        (directory / name).write_bytes(content)
        manifest["parts"].append({"name": name, "size": len(content), "crc": zlib.crc32(content)})
    manifest["format"] = 2
    del manifest["body"]["threads"]


if __name__ == "__main__":
    print(make())
    programs.forget()
