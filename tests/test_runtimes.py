"""Programs outside of /usr: a runtime below /opt or /home, and a virtual environment that is a link to one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from harness.kip import Kip, Proc
from harness.wait import wait_for


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


# promise trouble: `--base DIR` gives a runtime outside of /usr with what its programs are links to,
#   and its programs are found by their names; a bad one is refused with a line
# held by: this, `kip_describe::runtime::tests::what_its_programs_are_links_to_comes_along`,
#   `kip_describe::runtime::tests::what_is_no_runtime_is_refused`
def test_a_base_of_ones_own(short: Path, kip: Kip) -> None:
    """A real virtual environment of a real Python elsewhere: its modules are there, and a sleep and a wake later too."""
    runtime, venv = short / "versions" / "3", short / "venv"
    (runtime / "bin").mkdir(parents=True)
    (runtime / "bin" / "python3").write_bytes(Path("/usr/bin/python3").read_bytes())
    (runtime / "bin" / "python3").chmod(0o755)
    subprocess.run(["python3", "-m", "venv", "--without-pip", venv], check=True)
    (venv / "bin" / "python3").unlink()
    (venv / "bin" / "python3").symlink_to(runtime / "bin" / "python3")
    (next(venv.glob("lib/python3*/site-packages")) / "own.py").write_text("WORD = 'from the environment'\n")
    program = "import own, sys, time; print(sys.prefix, own.WORD, flush=True); time.sleep(1000)"
    kip.cli("run", "--base", venv, "--name", "based", "--", "python", "-c", program)
    proc = Proc(kip, "based")
    wait_for("it runs", lambda: f"{venv} from the environment" in proc.logs(), 10)
    proc.sleep()
    proc.wake()
    assert proc.exec("python", "-c", "import own; print(own.WORD)").stdout == "from the environment\n"
    (touched,) = [v for v in proc.inspect()["spec"]["volumes"] if v["target"] == str(runtime)]
    assert touched["read_only"] and kip.cli("exec", "based", "--", "touch", f"{venv}/x", check=False).returncode != 0
    for words, line in (
        ([short / "none", "--", "python"], "there is no directory"),
        (["/usr/lib", "--", "python"], "is in each proc already"),
        ([venv, "debian"], "write -- before it"),
    ):
        refused = kip.cli("run", "--base", *words, check=False)
        assert refused.returncode == 2 and line in refused.stderr, refused.stderr
