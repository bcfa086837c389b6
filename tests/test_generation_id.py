"""/run/kip/generation-id and /etc/machine-id: how a program learns that it is a clone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.clients import Lines
from harness.kip import Kip, Proc
from harness.programs import tarball
from test_clone import clone, lines

WATCH = (
    "import ctypes, mmap, os; c = ctypes.CDLL(None); n = c.inotify_init1(0o4000); w = c.inotify_add_watch(n, b'/run/kip/generation-id', 2); "
    "f = open('/run/kip/generation-id', 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)"
)
MAPPED = "m[:].decode().split()"
READ = "open('/run/kip/generation-id').read().split()"
MACHINE = "open('/etc/machine-id').read()"
HEARD = "len(os.read(n, 4096)) // 16"


def ids(proc: Proc) -> tuple[str, str]:
    """The id as the program has mapped it, and as the file has it now; the machine's."""
    with_client = Lines(proc.port())
    mapped, read, machine = (eval(with_client.ask(what)) for what in (MAPPED, READ, MACHINE))  # noqa: S307  (what repr wrote)
    with_client.close()
    assert mapped == read and len(read) == 2 and len(machine) == 33 and machine.endswith("\n")
    return " ".join(read), machine


def count(proc: Proc) -> int:
    return int(ids(proc)[0].split()[0], 16)


# promise clones: a program that maps or watches `/run/kip/generation-id` sees that it is a clone,
#   or that it was rolled back: the count in it rises and the rest is drawn anew, before its first
#   instruction; a sleep changes neither that nor `/etc/machine-id`, which is another in each clone
# held by: this, `kip_types::generation_id::tests::the_count_rises_and_the_rest_is_drawn`
@pytest.mark.parametrize("state", ["running", "parked"])
def test_a_clone_sees_that_it_is_one(kip: Kip, state: str) -> None:
    proc = lines(kip)
    assert Lines(proc.port()).ask(WATCH) == "None"
    own = ids(proc)
    assert own[0].startswith("0000000000000001 ")
    proc.sleep()
    assert ids(proc) == own
    if state == "parked":
        proc.sleep()
    first, second = clone(proc, "--count", "2")
    third = clone(first, "third")[0]
    for made, source in ((first, proc), (second, proc), (third, first)):
        assert count(made) > count(source)
        assert Lines(made.port()).ask(HEARD) == "1"
    assert len({ids(one)[0] for one in (proc, first, second, third)}) == 4
    assert len({ids(one)[1] for one in (proc, first, second, third)}) == 4
    assert ids(proc) == own and "BlockingIOError" in Lines(proc.port()).ask(HEARD)


def test_a_rollback_is_seen(kip: Kip) -> None:
    proc = lines(kip)
    assert Lines(proc.port()).ask(WATCH) == "None"
    own = ids(proc)
    kip.cli("checkpoint", proc.name, "--tag", "then")
    assert ids(proc) == own
    kip.cli("rollback", proc.name, "--to", "then")
    back = ids(Proc(kip, proc.name))
    assert back[0] > own[0] and back[1] == own[1]


def test_what_an_image_or_a_program_has_there_stays(fresh_kip: Callable[..., Kip], tmp_path) -> None:  # type: ignore[no-untyped-def]
    kip = fresh_kip()
    machine = "0123456789abcdef0123456789abcdef\n"
    tar = tarball(tmp_path / "ids.tar", {"etc/machine-id": machine})
    proc = kip.run("ids", ["sleep", "1000"], tar=tar, flags=["--never-sleep"])
    assert proc.exec("cat", "/etc/machine-id").stdout == machine
    # A link to a file of the machine's: nothing is written there.
    proc.exec("sh", "-c", "ln -sf /etc/hostname /run/kip/generation-id")
    made = clone(proc, "made")[0]
    assert made.exec("cat", "/etc/machine-id", "/etc/hostname").stdout == machine + "made\n"
    # One that the program has written itself.
    proc.exec("sh", "-c", "rm /run/kip/generation-id && echo mine > /run/kip/generation-id")
    assert clone(proc, "other")[0].exec("cat", "/run/kip/generation-id").stdout == "mine\n"
