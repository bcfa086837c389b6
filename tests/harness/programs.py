"""Builds the test programs, once per session, and packs files into the tarballs that carry them into procs."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "programs"


@cache
def directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="kip-test-programs-"))


def forget() -> None:
    if directory.cache_info().currsize:
        shutil.rmtree(directory(), ignore_errors=True)
        directory.cache_clear()


@cache
def c_program(name: str, *flags: str) -> Path:
    """A C program of `programs/NAME.c` or all of `programs/NAME/`."""
    source = SOURCES / name
    files = sorted(source.glob("*.c")) if source.is_dir() else [source.with_suffix(".c")]
    out = directory() / "-".join([name, *flags]).replace("/", "_")
    words = ["cc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers", "-pthread", *flags]
    subprocess.run([*words, "-o", out, *files], check=True, timeout=120)
    return out


@cache
def go_program(name: str) -> Path:
    out = directory() / name
    go = shutil.which("go", path=os.environ.get("PATH", "") + ":/usr/local/go/bin:/usr/lib/go/bin")
    assert go, "go is not installed: run scripts/setup"
    env = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    subprocess.run([go, "build", "-o", out, "."], cwd=SOURCES / name, env=env, check=True, timeout=170)
    return out


@cache
def example(name: str) -> Path:
    """A Rust example. `cargo xtask test` has built them all and says where (KIP_EXAMPLES); else it is built."""
    if built := os.environ.get("KIP_EXAMPLES"):
        return Path(built) / name
    beside = Path(os.environ.get("KIP_BIN") or SOURCES.parents[1] / "target" / "release" / "kip").resolve().parent
    target = beside.parent if beside.name in ("debug", "release") else SOURCES.parents[1] / "target"
    cargo = shutil.which("cargo", path=os.environ.get("PATH", "") + ":/root/.cargo/bin:/usr/local/cargo/bin")
    assert cargo, "cargo is not installed: run scripts/setup"
    words = [cargo, "build", "-q", "--workspace", "--example", name, "--target-dir", str(target)]
    subprocess.run(words, cwd=SOURCES.parents[1], check=True, timeout=500)
    return target / "debug" / "examples" / name


def tarball(
    path: Path,
    files: Mapping[str, bytes | str | Path],
    modes: Mapping[str, int] | None = None,
    owners: Mapping[str, tuple[int, int]] | None = None,
) -> Path:
    """Writes a tarball. A Path as content is a file of this machine; a name with a slash at its end is a directory."""
    modes, owners = modes or {}, owners or {}
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name.strip("/"))
            info.uid, info.gid = owners.get(name, (0, 0))
            info.mtime = 1_600_000_000
            if name.endswith("/"):
                info.type, info.mode = tarfile.DIRTYPE, modes.get(name, 0o755)
                tar.addfile(info)
                continue
            executable = isinstance(content, Path) and os.access(content, os.X_OK)
            info.mode = modes.get(name, 0o755 if executable else 0o644)
            data = content.read_bytes() if isinstance(content, Path) else content
            data = data.encode() if isinstance(data, str) else data
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path
