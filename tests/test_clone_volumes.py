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
