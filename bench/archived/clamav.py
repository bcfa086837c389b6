"""The extreme case of paper P: clamd, whose memory is one large index of signatures, of which each scan touches other parts."""

from __future__ import annotations

import random
import re
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from archived.host import STILL, Sleeper
from harness.line import Proxy
from harness.kip import Kip
from harness.programs import tarball
from parkwake.workspace import Failed, Workspace

PORT = 3310
# So many signatures of each kind are about 300 MB in memory, the paper's footprint.
BODIES, HASHES = 780_000, 780_000
# As in the paper: what a client has scanned.
FILES, FILE_BYTES = 10, 50_000
LOAD_S, SCAN_S = 170.0, 60.0
# Of the issue: archived minus hot is at most the store's first byte and so many times what it needs
# over the bandwidth.
TARGET_TIMES = 1.3

CONF = f"""
Foreground yes
DatabaseDirectory /srv/signatures
TCPSocket {PORT}
TCPAddr 0.0.0.0
User root
MaxThreads 2
SelfCheck 0
ConcurrentDatabaseReload no
Bytecode no
"""


def bodies(seed: int = 5) -> bytes:
    """The pattern of the last signature, which is in one of the files."""
    return random.Random(seed).randbytes(24)


def signatures(directory: Path) -> tuple[Path, Path]:
    """Patterns that match anywhere in any file, and hashes of whole files; all noise, so that only the one is ever found."""
    dice = random.Random(7)
    patterns, hashes = directory / "bench.ndb", directory / "bench.hdb"
    with open(patterns, "w") as file:
        for i in range(BODIES):
            file.write(f"Bench.Pattern.{i}:0:*:{dice.randbytes(24).hex()}\n")
        file.write(f"Bench.Found:0:*:{bodies().hex()}\n")
    with open(hashes, "w") as file:
        for i in range(HASHES):
            file.write(f"{dice.randbytes(16).hex()}:{FILE_BYTES + i % 1000}:Bench.Hash.{i}\n")
    return patterns, hashes


def files(seed: int) -> list[tuple[bytes, bytes]]:
    """What is scanned, none ever seen before, and what clamd must say of each. One has the pattern in it."""
    dice = random.Random(seed)
    found = [(dice.randbytes(FILE_BYTES), b"stream: OK\0") for _ in range(FILES - 1)]
    data, at = bytearray(dice.randbytes(FILE_BYTES)), dice.randrange(FILE_BYTES - 24)
    data[at : at + 24] = bodies()
    return [*found, (bytes(data), b"stream: Bench.Found.UNOFFICIAL FOUND\0")]


def scan(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=SCAN_S) as s:
        s.sendall(b"zINSTREAM\0" + struct.pack(">I", len(data)) + data + struct.pack(">I", 0))
        answer = b""
        while piece := s.recv(4096):
            answer += piece
    return answer


def scan_all(port: int, seed: int) -> tuple[float, int]:
    """Microseconds for all files, one after the other, and when the last answer was there."""
    asked = files(seed)
    begun = time.monotonic_ns()
    answers = [scan(port, data) for data, _ in asked]
    ended = time.monotonic_ns()
    if wrong := [answer for answer, (_, right) in zip(answers, asked, strict=True) if answer != right]:
        raise Failed(f"clamd answered {wrong[0]!r}")
    return (ended - begun) / 1000, ended


def touched(pids: list[int], port: int, seed: int) -> int:
    """Bytes of private memory that one scan of all files touches, while it is hot: the kernel's marks, page by page."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("1")
    scan_all(port, seed)
    total = 0
    for pid in pids:
        anonymous = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                words = line.split(maxsplit=5)
                anonymous = len(words) < 6 or words[5].startswith("[")
            elif anonymous and line.startswith("Referenced:"):
                total += int(line.split()[1]) * 1024
    return total


def measure(rows: list[dict[str, Any]], work: Workspace, kip: Kip, proxy: Proxy, samples: int, say: Callable[[str], None]) -> None:
    """Rows {state, round, us..}; one {"state": "facts", ..} with what it holds and touches."""
    patterns, hashes = signatures(work.dir)
    contents = {"srv/clamd.conf": CONF, "srv/signatures/bench.ndb": patterns, "srv/signatures/bench.hdb": hashes}
    tar = tarball(work.dir / "clamd.tar", contents)
    say("clamd loads its signatures")
    command = ["/usr/sbin/clamd", "-c", "/srv/clamd.conf"]
    proc = kip.run("clamd", command, ports=[str(PORT)], tar=tar, flags=STILL, timeout=LOAD_S)
    port, sleeper, seed = proc.port(), Sleeper(proc, proxy), iter(range(1000, 1_000_000))
    for _ in range(3):
        scan_all(port, next(seed))
    view = proc.inspect()
    needs = [touched(view["pids"], port, next(seed)) for _ in range(3)]
    rows.append({"state": "facts", "pss_bytes": view["memory"]["pss_bytes"], "touched_bytes": needs})
    for number in range(-1, samples):  # the first is to learn what a wake needs, and is not kept
        hot = {"us": scan_all(port, next(seed))[0]}
        sleeper.park()
        parked = sleeper.wake("parked", lambda: scan_all(port, next(seed)))
        stored = sleeper.archive()
        archived = {"stored": stored, **sleeper.wake("archived", lambda: scan_all(port, next(seed)))}
        if number >= 0:
            for state, row in (("hot", hot), ("parked", parked), ("archived", archived)):
                rows.append({"state": state, "round": number, **row})
        say(f"clamd: round {number + 1} of {samples}")
    proc.remove()
