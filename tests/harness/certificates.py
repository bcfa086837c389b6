"""Certificates for tests, by openssl(1)."""

from __future__ import annotations

import subprocess
from pathlib import Path


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=30)


def certificate(where: Path, name: str, ca: str | None, subject: str) -> None:
    """WHERE/NAME.pem and its key, by the CA of that name or by itself."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", where / f"{name}.key"]
    made = ["-x509", "-days", "2", "-subj", f"/CN={name}", "-out", where / f"{name}.pem"]
    if ca:
        made += ["-CA", where / f"{ca}.pem", "-CAkey", where / f"{ca}.key"]
        made += ["-addext", f"subjectAltName={subject}", "-addext", "basicConstraints=critical,CA:FALSE"]
    openssl("req", *key, *made)
