"""A real S3 server of a test's own: versitygw over a directory, on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.clients import listens
from harness.wait import wait_for

BUCKET, KEY, SECRET = "bucket", "kip-test", "kip-test-secret"
ROOT = Path(__file__).resolve().parents[2]


def program() -> str:
    """Where `scripts/setup test` builds it; a machine without it fails the test, for a skip would look like a pass."""
    built = ROOT / ".kip" / "bin" / "versitygw"
    found = str(built) if built.exists() else shutil.which("versitygw")
    assert found, "versitygw is not there: run scripts/setup"
    return found


@contextmanager
def server(directory: Path) -> Iterator[str]:
    """The URL of an empty bucket, whose objects are files below `directory`. Credentials are in the environment meanwhile."""
    (directory / BUCKET).mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [program(), "--quiet", "--port", f"127.0.0.1:{port}", "posix", str(directory)],
        env={"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    before = dict(os.environ)
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    try:
        wait_for("versitygw listens", lambda: listens(port), 60)
        yield f"s3://{BUCKET}/kip?endpoint=http://127.0.0.1:{port}"
    finally:
        os.environ.clear()
        os.environ.update(before)
        process.kill()
        process.wait()
