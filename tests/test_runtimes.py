"""Programs outside of /usr: a runtime below /opt or /home, and a virtual environment that is a link to one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from harness.kip import Kip


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short name, as that of a home is."""
    with TemporaryDirectory(prefix="kip-") as directory:
        yield Path(directory)


# promise trouble: a program outside of /usr, and a link that leads there as in a virtual
#   environment, is refused with the volume that it wants; with those volumes it runs
# held by: this, `kip_files::interpreter::tests::absent_programs_are_given_by_directory`
def test_runtimes_outside_usr(short: Path, kip: Kip) -> None:
    runtime, venv = short / "versions" / "3", short / "venv"
    for directory in (runtime, venv):
        (directory / "bin").mkdir(parents=True)
    (runtime / "bin" / "python3").write_bytes(Path("/usr/bin/python3").read_bytes())
    (venv / "bin" / "python").symlink_to(runtime / "bin" / "python3")
    (venv / "bin" / "tool").write_text(f"#!{venv}/bin/python\nimport time\ntime.sleep(1000)\n")
    for file in (runtime / "bin" / "python3", venv / "bin" / "tool"):
        file.chmod(0o755)
    for program in ("python", "tool"):
        command, flags = [f"{venv}/bin/{program}", "-c", "import time; time.sleep(1000)"], list[str]()
        for wanted in (venv, runtime):
            line = kip.refused("run", *flags, "--name", "far", "--", *command)
            assert line.endswith(f"with -v {wanted}:{wanted}:ro"), line
            flags += ["-v", f"{wanted}:{wanted}:ro"]
        assert kip.run(f"far-{program}", command, flags=flags).state == "running"
    near = kip.run("near", ["sleep", "1000"])
    line = kip.refused("exec", "near", "--", f"{venv}/bin/python")
    assert f"-v {venv}:{venv}:ro" in line and near.state == "running", line
