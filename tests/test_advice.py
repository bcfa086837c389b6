"""What a clone would best begin from: `kip clone --explain` and `--method auto`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.kip import Kip
from harness.wait import wait_for
from test_scale import COMMAND, SERVER, scale, told
from test_trouble import UNPARKABLE

# Reads pages of a file of 96 MiB at random, of which a limit of 48 MiB lets only a part stay.
THRASHES = """
import mmap, os, random
with open("/tmp/data", "wb") as f:
    for _ in range(96):
        f.write(os.urandom(1 << 20))
    f.flush(); os.fsync(f.fileno())
data = mmap.mmap(os.open("/tmp/data", os.O_RDONLY), 0, prot=mmap.PROT_READ)
data.madvise(mmap.MADV_RANDOM)
print("reads", flush=True)
while True:
    data[random.randrange(len(data) // 4096) * 4096]
"""


@pytest.fixture
def kip(fresh_kip: Callable[..., Kip]) -> Kip:
    """No proc of another test has left a template there."""
    return fresh_kip()


def advice(kip: Kip, name: str) -> tuple[str, str]:
    view = kip.json("clone", name, "--explain")
    assert view["name"] == name and view["memory_bytes"] > 0
    assert view["better"] is None or view["better"] in kip.cli("clone", name, "--explain").stdout
    assert view["why"] in kip.cli("clone", name, "--explain").stdout or "MiB a second" in view["why"]
    return view["method"], view["why"]


def cloned(kip: Kip, name: str, clone: str) -> tuple[str, str]:
    """By `--method auto`: what was chosen, and why."""
    view = kip.json("clone", name, clone, "--method", "auto")
    assert [made["name"] for made in view["clones"]] == [clone]
    return view["method"], view["why"]


# promise clones: a clone of a proc that thrashes is a start by `--method auto`, and `--explain`
#   says why before; of others it is hot, or warm where there is a template
def test_a_source_that_thrashes(kip: Kip) -> None:
    busy = kip.run("busy", ["/usr/bin/python3", "-c", THRASHES], flags=("--mem", "48M", "--never-sleep"))
    wait_for("it reads", lambda: "reads" in busy.logs(), 60)
    wait_for("it thrashes", lambda: advice(kip, "busy")[0] == "cold", 30)
    method, why = cloned(kip, "busy", "other")
    assert method == "cold" and "it thrashes: it reads " in why, why
    kip.cli("rm", "--force", "busy", "other")


def test_a_source_that_does_not(kip: Kip) -> None:
    web = kip.run("web", COMMAND, ports=["8080"])
    why = "there is no template of its kind, and it does not thrash"
    assert advice(kip, "web") == ("hot", why) == cloned(kip, "web", "hot-one")
    web.sleep()
    assert advice(kip, "web") == ("hot", why) == cloned(kip, "web", "of-a-sleeper")
    assert web.state == "parked"
    kip.cli("template", "take", "web")
    assert advice(kip, "web") == ("warm", "there is a template of its kind") == cloned(kip, "web", "warm-one")
    kip.cli("template", "rm", kip.json("template", "ls")["templates"][0]["id"])
    kip.cli("stop", "web")
    assert cloned(kip, "web", "cold-one") == ("cold", "it does not run, and has no memory")
    assert kip.json("clone", "web", "by-word", "--method", "cold")["method"] == "cold"


# promise clones: `kip why` says in a line what a clone would best begin from, and what would be
#   better, by the same rule as `--explain`
# held by: this,
#   `kip_insight::advice::tests::a_template_goes_before_memory_and_memory_that_helps_before_a_start`
def test_why_says_it_too(kip: Kip) -> None:
    web = kip.run("web", COMMAND, ports=["8080"])

    def same(method: str) -> str:
        view, advised = kip.json("why", "web")["clone"], kip.json("clone", "web", "--explain")
        assert {**view, "memory_bytes": 0, "reread_bytes_per_s": 0} == {**advised, "memory_bytes": 0, "reread_bytes_per_s": 0}
        assert view["method"] == method
        (line,) = [line for line in kip.cli("why", "web").stdout.splitlines() if line.split()[:1] == ["clone"]]
        return " ".join(line.split()[1:])

    why = "hot is best: there is no template of its kind, and it does not thrash"
    assert same("hot") == f"{why}; a template would spare it the moment in which it stands still: `kip template take web`"
    web.sleep()
    assert same("hot") == why and web.state == "parked"
    kip.cli("template", "take", "web")
    assert same("warm") == "warm is best: there is a template of its kind"
    kip.cli("template", "rm", kip.json("template", "ls")["templates"][0]["id"])
    web.stop()
    assert same("cold").startswith("cold is best: it does not run, and has no memory; a template would spare clones the start")


# promise clones: a proc that cannot be cloned is started by `--method auto`, and said to be; so are
#   its replicas
def test_a_source_that_cannot_be_cloned(kip: Kip) -> None:
    kip.run("fixed", ["/usr/bin/python3", "-c", next(iter(UNPARKABLE.values())) + "\n" + SERVER], ports=["8080"])
    method, why = cloned(kip, "fixed", "started")
    assert method == "cold" and "fixed cannot be cloned" in why, why
    scale(kip, "--min", "2", name="fixed")
    said = wait_for("it is scaled", lambda: [line for line in told(kip, "fixed") if "added" in line], 30)
    assert "fixed-1 is added (cold, for fixed cannot be cloned" in said[0], said


# promise clones: what cannot be asked for is one clear line
def test_what_cannot_be_asked_for(kip: Kip) -> None:
    kip.run("web", COMMAND, ports=["8080"])
    assert "there is no proc" in kip.refused("clone", "nobody", "--explain")
    kip.cli("checkpoint", "web", "--tag", "then")
    assert "goes on from that" in kip.refused("clone", "web@then", "--method", "auto")
    assert kip.cli("clone", "web", "--explain", "--warm", check=False).returncode == 2
    assert kip.cli("clone", "web", "--method", "lukewarm", check=False).returncode == 2
