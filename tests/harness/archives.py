"""Hostile tarballs. Each is refused whole: nothing of it is unpacked, inside or outside of where it should go."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

# A file that no archive may write; the tests make sure that it is not there.
TARGET = "/tmp/kip-test-escaped"


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = "", size: int | None = None
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, 0o755, len(data) if size is None else size
    return info, data


def archive(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def device(kind: bytes, major: int, minor: int) -> tuple[tarfile.TarInfo, bytes]:
    info, data = entry("srv/device", kind)
    info.devmajor, info.devminor = major, minor
    return info, data


def zstd_zeros(count: int, before: bytes) -> bytes:
    """A zstd frame of `before` and then `count` zeros, about 4 bytes per 128 KiB (RFC 8878, 3.1.1.2: RLE blocks)."""

    def block(kind: int, size: int, last: bool, body: bytes) -> bytes:
        return struct.pack("<I", size << 3 | kind << 1 | last)[:3] + body

    window = bytes([10 << 3])  # 1 MiB
    head = struct.pack("<I", 0xFD2FB528) + bytes([0]) + window
    full, rest = divmod(count, 128 << 10)
    return (
        head
        + block(0, len(before), False, before)
        + block(1, 128 << 10, False, b"\0") * full
        + block(1, rest, True, b"\0")
    )


def bomb() -> bytes:
    """7 MB that unpack to 200 GiB."""
    info, _ = entry("srv/bomb", size=200 << 30)
    header = info.tobuf(tarfile.GNU_FORMAT)
    return zstd_zeros((200 << 30) + 1024, header)


def gzip_bomb() -> bytes:
    """30 GiB of zeros in 30 MB: the same ten megabytes over and over, as members of one gzip file."""
    info, _ = entry("srv/bomb", size=30 << 30)
    piece = gzip.compress(bytes(10 << 20), 9)
    return gzip.compress(info.tobuf(tarfile.GNU_FORMAT)) + piece * (3 * 1024 + 1)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "absolute path": lambda: archive(entry(TARGET, data=b"x")),
    "dot dot": lambda: archive(entry("srv/../../../../../../.." + TARGET, data=b"x")),
    "symlink out": lambda: archive(
        entry("out", tarfile.SYMTYPE, link="/tmp"), entry("out/kip-test-escaped", data=b"x")
    ),
    "symlink out by dot dot": lambda: archive(
        entry("a", tarfile.SYMTYPE, link="../../../../../../../../tmp"), entry("a/kip-test-escaped", data=b"x")
    ),
    "file over symlink": lambda: archive(entry("f", tarfile.SYMTYPE, link=TARGET), entry("f", data=b"x")),
    "hard link out": lambda: archive(entry("h", tarfile.LNKTYPE, link="/etc/shadow")),
    "hard link out by dot dot": lambda: archive(entry("h", tarfile.LNKTYPE, link="../../../../../../../etc/shadow")),
    "hard link through symlink": lambda: archive(
        entry("etc2", tarfile.SYMTYPE, link="/etc"), entry("h", tarfile.LNKTYPE, link="etc2/shadow")
    ),
    "block device": lambda: archive(device(tarfile.BLKTYPE, 254, 0)),
    "character device": lambda: archive(device(tarfile.CHRTYPE, 1, 1)),
    "zstd bomb": bomb,
    "gzip bomb": gzip_bomb,
    "cut short": lambda: archive(entry("srv/f", data=bytes(100_000)))[:50_000],
    "not an archive": lambda: b"this is no archive, whatever its name says\n" * 100,
}

# Allowed: what looks hostile and is not. A link may point anywhere, for it is followed inside; it
# just must not be followed while unpacking. "file over symlink" may also be unpacked, if the link
# is replaced.
MAY_BE_TAKEN = {"file over symlink"}


def write(directory: Path, name: str) -> Path:
    path = directory / f"{name.replace(' ', '-')}.tar"
    path.write_bytes(HOSTILE[name]())
    return path
