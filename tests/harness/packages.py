"""Packages of the Python index and of npm that scripts/setup has installed in .kip, as files of a tarball: procs do not see .kip."""

from __future__ import annotations

import functools
import json
import re
from importlib import metadata
from pathlib import Path

from harness.kip import ROOT

PYPI, MODULES = ROOT / ".kip" / "pypi", ROOT / ".kip" / "npm" / "node_modules"


@functools.cache
def distributions() -> dict[str, metadata.Distribution]:
    return {re.sub("[-_.]+", "-", found.metadata["Name"]).lower(): found for found in metadata.distributions(path=[str(PYPI)])}


def distribution(name: str) -> metadata.Distribution:
    return distributions()[re.sub("[-_.]+", "-", name).lower()]


def python_files(*names: str) -> dict[str, bytes | str | Path]:
    """Packages of the Python index with all that they need of it, below srv/pypi."""
    found, left = {}, list(names)
    while left:
        name = re.sub("[-_.]+", "-", left.pop()).lower()
        if name in found or name not in distributions():
            continue
        found[name] = distributions()[name]
        left += [re.split(r"[^\w.-]", need)[0] for need in found[name].requires or [] if "extra ==" not in need]
    paths = [path for each in found.values() for path in each.files or [] if ".." not in path.parts and path.suffix != ".pyc"]
    return {f"srv/pypi/{path}": PYPI / path for path in paths if (PYPI / path).is_file()}


def node_files(*names: str) -> dict[str, bytes | str | Path]:
    """Modules of npm with all that they need, below srv/node_modules."""
    found: set[Path] = set()
    left = [MODULES / name for name in names]
    while left:
        module = left.pop()
        if module in found or not module.is_dir():
            continue
        found.add(module)
        needs = json.loads((module / "package.json").read_text()).get("dependencies", {})
        # Those of its own, in its directory, come with it.
        left += [MODULES / need for need in needs]
        left += [MODULES / need for inner in module.glob("node_modules/**/package.json") for need in json.loads(inner.read_text()).get("dependencies", {})]
    files = [path for module in found for path in sorted(module.rglob("*")) if path.is_file()]
    return {f"srv/node_modules/{path.relative_to(MODULES)}": path for path in files}


def interpreter() -> str:
    """The Python for which `scripts/setup` has installed the packages, by a path that procs see."""
    return str(Path(ROOT / ".kip" / "venv" / "bin" / "python").resolve())
