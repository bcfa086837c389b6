"""`kip clone --volumes`: what clones have in place of the volumes that their source writes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.clients import Lines, listens
from harness.kip import Kip
from harness.programs import SOURCES
from harness.wait import wait_for
from test_clone import clone, lines

# Appends lines to a file of its volume that it keeps open, and answers with all of it.
APPENDS = """
import os, socketserver
log = open("/data/log", "a+") if os.path.isdir("/data") else None
class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            log.write(line.decode())
            log.flush()
            log.seek(0)
            self.wfile.write(" ".join(log.read().split()).encode() + b"\\n")
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("", 8080), Answer).serve_forever()
"""


# promise clones: a proc that writes to a volume is cloned as its owner says: with the same volume,
#   with a copy of the moment that goes on under the file that it has open, or with an empty one
@pytest.mark.parametrize("state", ["running", "parked"])
def test_volumes(kip: Kip, tmp_path: Path, state: str) -> None:
    (tmp_path / "more").mkdir()
    log, spare = f"log-{state}", f"spare-{state}"
    flags = ["-v", f"{log}:/data", "-v", f"{spare}:/spare", "-v", f"{SOURCES}:/sources:ro", "--never-sleep"]
    proc = kip.run("writer", ["/usr/bin/python3", "-c", APPENDS], ports=["8080"], flags=flags)
    wait_for("it listens", lambda: listens(proc.port()), 20)
    assert Lines(proc.port()).ask("one") == "one"
    proc.exec("sh", "-c", "echo spare > /spare/file; chown 1000:1001 /spare/file")
    if state == "parked":
        proc.sleep()
    copies = clone(proc, "copy", "--volumes", "copy", "--count", "2")
    assert proc.state == state
    assert "it has \"log\" open in its volume at /data" in kip.refused("clone", "writer", "empty", "--volumes", "drop")
    (shared,) = clone(proc, "shared", "--volumes", "share")
    assert Lines(proc.port()).ask("two") == "one two"
    for number, one in enumerate(copies):
        assert Lines(one.port()).ask(f"copy{number}") == f"one copy{number}", "that of the moment, and its own since"
        assert one.exec("stat", "-c", "%u:%g", "/spare/file").stdout == "1000:1001\n"
        one.sleep()
        assert Lines(one.port()).ask("woken") == f"one copy{number} woken"
    assert Lines(shared.port()).ask("three") == "one two three" and Lines(proc.port()).ask("four") == "one two three four"
    volumes = {view["name"]: view["users"] for view in kip.json("volume", "ls") if view["users"]}
    own = {f"{name}-copy-{number}": [f"copy-{number}"] for name in (log, spare) for number in (1, 2)}
    assert volumes == {log: ["shared", "writer"], spare: ["shared", "writer"], **own}
    assert not any(view["name"].endswith("-empty") for view in kip.json("volume", "ls")), "it was not made"


# promise clones: where the source has nothing open in its volume, a clone may have an empty one
def test_empty_volumes(kip: Kip, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("host")
    proc = lines(kip, flags=["-v", "kept:/kept", "-v", f"{tmp_path}:/host"])
    proc.exec("sh", "-c", "echo kept > /kept/file")
    (hot,) = clone(proc, "hot", "--volumes", "drop")
    (cold,) = clone(proc, "cold", "--volumes", "drop", "--cold")
    for one in (hot, cold):
        assert one.exec("sh", "-c", "ls -A /kept /host").stdout.split() == ["/host:", "/kept:"]
        one.exec("sh", "-c", "echo own > /host/file; echo own > /kept/file")
    assert proc.exec("cat", "/kept/file", "/host/file").stdout == "kept\nhost"
    assert {view["name"] for view in kip.json("volume", "ls")} >= {"kept-hot", "host-hot", "kept-cold", "host-cold"}


# promise clones: volumes of a clone that is not made go again, and nothing else does: not a
#   directory of the host that was moved, and not a volume of another proc
def test_a_clone_that_is_not_made(kip: Kip, tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    proc = kip.run("source", ["sleep", "1000"], flags=["-v", f"{tmp_path / 'moved'}:/host", "-v", "kept:/kept", "--never-sleep"])
    proc.exec("sh", "-c", "touch /host/file /kept/file")
    (tmp_path / "moved").rename(tmp_path / "now")
    (tmp_path / "moved").symlink_to(tmp_path / "now")
    other = kip.run("other", ["sleep", "1000"], flags=["-v", "kept-x-2:/x"])
    other.exec("touch", "/x/file")
    # What is mounted is at another path now, so that it cannot sleep.
    assert "is not what is mounted at /host" in kip.refused("clone", "source", "x", "--volumes", "drop")
    # The second of them would have a volume that is there already.
    said = kip.refused("clone", "source", "x", "--count", "2", "--volumes", "drop", "--cold")
    assert "would have the volume kept-x-2, which is there already" in said
    assert kip.names() == ["other", "source"]
    assert [view["name"] for view in kip.json("volume", "ls") if "-x" in view["name"]] == ["kept-x-2"]
    assert (tmp_path / "now" / "file").exists() and other.exec("ls", "/x").stdout == "file\n"
    (shared,) = clone(proc, "shared", "--volumes", "share", "--cold")
    assert shared.exec("ls", "/host", "/kept").stdout.split() == ["/host:", "file", "/kept:", "file"]
    hook = kip.run("hook", ["sleep", "1000"], flags=["-v", f"{tmp_path / 'moved'}:/host", "-v", "hooked:/kept", "--after-clone", "exit 3"])
    hook.exec("touch", "/kept/file")
    (tmp_path / "moved").unlink()
    (tmp_path / "now").rename(tmp_path / "again")
    (tmp_path / "now").symlink_to(tmp_path / "again")
    for how in ("share", "drop"):
        for way in ("--hot", "--cold"):
            kip.refused("clone", "hook", "z", "--volumes", how, way)
    assert (tmp_path / "again" / "file").exists() and hook.exec("ls", "/kept").stdout == "file\n"
    assert not [view for view in kip.json("volume", "ls") if "-z" in view["name"]]


# promise clones: each of several mounts is another volume in the clone, or one where it was one,
#   and a clone of a sleeping clone has its files
def test_several_mounts(kip: Kip, tmp_path: Path) -> None:
    flags = ["-v", "data:/a", "-v", "data:/b:ro", "-v", "other:/c", "--never-sleep", "-p", "8080"]
    proc = kip.run("mounts", ["/usr/bin/python3", "-c", APPENDS.replace("/data", "/a")], flags=flags)
    wait_for("it listens", lambda: listens(proc.port()), 20)
    assert Lines(proc.port()).ask("one") == "one"
    (asleep,) = clone(proc, "asleep", "--volumes", "copy", "--asleep")
    (again,) = clone(asleep, "again", "--volumes", "share", "--asleep")
    assert Lines(again.port()).ask("two") == "one two" == again.exec("cat", "/b/log").stdout.replace("\n", " ").strip()
    assert proc.exec("cat", "/a/log").stdout == "one\n" and again.exec("ls", "/c").stdout == ""
    host = kip.run("host", ["sleep", "1000"], flags=["-v", "data:/var", "-v", f"{tmp_path}:/data"])
    (one,) = clone(host, "h", "--volumes", "drop")
    one.exec("touch", "/var/one")
    assert one.exec("ls", "/data").stdout == "", "another volume"
