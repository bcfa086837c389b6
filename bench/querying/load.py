"""YCSB's load by go-ycsb: records once, then reads, of which each second's latencies are kept."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from parkwake import ROOT
from parkwake.stats import percentile
from parkwake.workspace import Failed, Workspace
from querying.sql import DATABASE, PASSWORD, USER

# As scripts/setup builds it; the version is that of its module.
PROGRAM, MODULE = ROOT / ".kip" / "bin" / "go-ycsb", ROOT / "bench" / "programs" / "ycsb" / "go.mod"
DISTRIBUTIONS = ("zipfian", "uniform")
# Of 4,096 bytes, a record of YCSB's usual ten fields.
FIELDS, FIELD_BYTES = 10, 409
THREADS = 4
# Rows of one statement of the load.
BATCH = 100


@dataclass
class Second:
    """Reads that began in one second, counted from a moment that the reader of it knows."""

    at: int
    reads: int
    p50_us: float
    p99_us: float


@dataclass
class Reads:
    """What one run of reads took. Times are of the machine's clock (time.time)."""

    first_s: float
    last_s: float
    count: int
    errors: int
    p50_us: float
    p99_us: float
    first_second: Second
    """From the first read on."""
    seconds: list[Second] = field(default_factory=list)
    """From `since` on."""
    begun: list[tuple[float, float]] = field(default_factory=list)
    """Each read: when it began and how long it took, seconds; not among the results."""
    failed: list[float] = field(default_factory=list)
    """When each ended that was not answered. A run that is ended early ends with such."""

    @property
    def took_s(self) -> float:
        return self.last_s - self.first_s

    @property
    def per_s(self) -> float:
        return self.count / self.took_s

    def row(self) -> dict[str, Any]:
        kept = {key: value for key, value in asdict(self).items() if key not in ("begun", "failed")}
        return {**kept, "took_s": self.took_s, "per_s": self.per_s}


def words(host: str, port: int, records: int, **more: str | int) -> list[str]:
    """The properties of a run; values of records follow from their keys."""
    properties = {
        "mysql.host": host, "mysql.port": port, "mysql.user": USER, "mysql.password": PASSWORD, "mysql.db": DATABASE,
        "recordcount": records, "fieldcount": FIELDS, "fieldlength": FIELD_BYTES, "threadcount": THREADS,
        "readproportion": 1, "updateproportion": 0, "silence": "false", **more,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in properties.items()]


def insert(program: Path, host: str, port: int, records: int) -> None:
    """Makes the table."""
    # A last batch would be a whole one.
    batch = BATCH if records % BATCH == 0 else 1
    values = words(host, port, records, dataintegrity="true", **{"batch.size": batch, "threadcount": 1})
    done = subprocess.run([program, "load", *values], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1200)
    if done.returncode != 0 or "operation err" in done.stdout:
        raise Failed(f"go-ycsb: load: exit {done.returncode}: {(done.stderr + done.stdout)[-500:]}")


@contextmanager
def reading(
    program: Path, work: Workspace, host: str, port: int, records: int, reads: int, distribution: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """go-ycsb at work. It ends at SIGINT, or when it has made its reads, and then writes all of them into the file."""
    out = work.dir / f"reads-{os.urandom(4).hex()}.csv"
    more = {"operationcount": reads, "requestdistribution": distribution, "measurementtype": "raw", "measurement.output_file": str(out)}
    log = out.with_suffix(".log")
    with open(log, "wb") as output:
        command = [program, "run", *words(host, port, records, **more)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process, out
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        out.unlink(missing_ok=True)
        log.unlink(missing_ok=True)


def run(program: Path, work: Workspace, address: tuple[str, int], records: int, reads: int, distribution: str, since: float) -> Reads:
    """All reads, to their end."""
    with reading(program, work, *address, records, reads, distribution) as (process, out):
        try:
            code = process.wait(1800)
        except subprocess.TimeoutExpired:
            raise Failed("go-ycsb does not end within half an hour") from None
        if code != 0 or not out.exists():
            raise Failed(f"go-ycsb: exit {code}: {out.with_suffix('.log').read_text(errors='replace')[-500:]}")
        found = parse(out, since)
    if found.count + found.errors != reads:
        raise Failed(f"of {reads} reads {found.count} are on record, and {found.errors} errors")
    return found


def parse(out: Path, since: float) -> Reads:
    """The file of a run: kind of operation, when it began, microseconds that it took."""
    begun: list[tuple[float, float]] = []
    failed: list[float] = []
    with open(out) as lines:
        for line in lines:
            if line.startswith("READ,"):
                _, at, took = line.split(",")
                begun.append((int(at) / 1e6, int(took) / 1e6))
            elif line.startswith("READ_ERROR,"):
                failed.append(sum(int(word) for word in line.split(",")[1:]) / 1e6)
    if not begun:
        raise Failed(f"no read was answered, {len(failed)} failed")
    begun.sort()
    all_us = [took * 1e6 for _, took in begun]
    first_s, last_s = begun[0][0], max(at + took for at, took in begun)
    return Reads(
        first_s, last_s, len(begun), len(failed), percentile(all_us, 50), percentile(all_us, 99),
        seconds(begun, first_s)[0], seconds(begun, since), begun, failed,
    )  # fmt: skip


def seconds(begun: list[tuple[float, float]], since: float) -> list[Second]:
    sorted_by: dict[int, list[float]] = {}
    for at, took in begun:
        sorted_by.setdefault(int(at - since), []).append(took * 1e6)
    return [Second(at, len(us), percentile(us, 50), percentile(us, 99)) for at, us in sorted(sorted_by.items())]


def version() -> str:
    return MODULE.read_text().partition("github.com/pingcap/go-ycsb ")[2].split()[0]
