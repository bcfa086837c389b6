"""The keys that seal what is archived: listed, rotated, destroyed, exported and imported by command."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness import servers
from harness.clients import Redis
from harness.kip import Kip, Proc
from harness.wait import wait_for
from test_api import local
from test_archive import archive

PASSPHRASE = "correct horse battery staple"


def sealing(kip: Kip) -> str:
    """The id of the key that seals."""
    return next(key["id"] for key in kip.json("key", "ls") if key["current"])


def came(kip: Kip, name: str, key: str) -> None:
    """Nothing of its memory is in the store only: it comes by itself behind the wake."""
    wait_for(f"{name} is whole", lambda: all(name not in k["procs"] for k in kip.json("key", "ls") if k["id"] == key), 30)


def redis(kip: Kip, name: str) -> tuple[Proc, Redis]:
    server = servers.redis()
    proc = kip.run(name, server.command, ports=server.published)
    client = Redis(proc.port())
    client.ask_all([("SET", f"key:{i}", f"{name} {i} ".encode() * 100) for i in range(2000)])
    return proc, client


def check(name: str, client: Redis) -> None:
    assert client.ask("GET", "key:1999") == f"{name} 1999 ".encode() * 100


# promise archive: `kip key rotate`: a new key seals from then on, old ones open; what sleeps anew
#   needs only the new one
# held by: this,
#   `kip_offload::keys::tests::what_a_key_sealed_that_is_destroyed_meanwhile_is_no_only_copy`
# promise archive: `kip key destroy`: says which procs would be lost, archived or with memory in the
#   store only, needs `--yes`, never the key that seals; who slept under it says when it was
#   destroyed, stays as it is and can be removed
# held by: this, `kip_worker::keys::tests::a_refusal_says_who_would_be_lost`
def test_rotated_and_destroyed(fresh_kip: Callable[..., Kip], store: Path) -> None:
    """After a rotation the old key still opens; destroyed, what it alone sealed stays as it is and says so, and all else goes on."""
    kip = fresh_kip("--store", str(store))
    kip.expected += [r"WARN.*stays in the store"]
    (left, left_client), (back, back_client), (late, late_client) = (redis(kip, name) for name in ("left", "back", "late"))
    old = sealing(kip)
    archive(left)
    archive(back)
    rotated = kip.json("key", "rotate")
    assert rotated["current"] and rotated["id"] == sealing(kip) != old
    kip.kill()
    kip.up()
    assert sealing(kip) == rotated["id"], "it is on the disk"
    # The old one still opens, and what sleeps anew does not need it any more.
    check("back", back_client)
    archive(back)
    archive(late)
    needed = {key["id"]: key["procs"] for key in kip.json("key", "ls")}
    assert needed == {old: ["left"], rotated["id"]: ["back", "late"]}
    table = kip.cli("key", "ls").stdout.splitlines()
    assert [line.split()[2] for line in table[1:]] == ["opens", "seals"] and table[1].split()[-1] == "left", table

    assert "kip key rotate" in kip.refused("key", "destroy", rotated["id"], "--yes")
    refusal = kip.refused("key", "destroy", old[:8])
    assert "1 proc (left) would be lost" in refusal and "--yes" in refusal, refusal
    assert "has no key" in kip.refused("key", "destroy", "0123456789", "--yes")
    assert "there is no key" in kip.refused("key", "destroy", "../x", "--yes")
    assert [key["destroyed_at_ms"] for key in kip.json("key", "ls")] == [None, None], "nothing was destroyed so far"
    # `back` is awake when it happens, and its head is sealed anew by every sleep.
    check("back", back_client)
    came(kip, "back", rotated["id"])
    assert kip.json("key", "destroy", old[:8], "--yes")["procs"] == ["left"]
    refusal = kip.refused("key", "destroy", old, "--yes")
    assert "was destroyed at 20" in refusal, refusal
    secrets = (kip.data / "archive" / "default.keys").read_bytes()
    assert bytes.fromhex(old) in secrets and len(secrets) < 250, "of the old one id and date are left"

    refusal = kip.refused("wake", "left")
    assert re.search(rf"left cannot be woken: .*the key {old} of realm default was destroyed at 20\d\d-.*; it stays archived", refusal), refusal
    assert left.state == "archived"
    archive(back)
    check("back", back_client)
    check("late", late_client)
    kip.kill()
    kip.up()
    assert left.state == "archived" and "was destroyed at" in kip.refused("wake", "left")
    status, _, content = local(kip, "GET", "/v1/snapshots/left")
    assert status == 409 and b"was destroyed at" in content, "what can never be read is no failure of the daemon"
    kip.cli("rm", "--force", "left")
    assert sorted(kip.names()) == ["back", "late"]
    events = [event["detail"] for event in kip.events() if event["kind"] == "key"]
    assert events == [], "events are those of this daemon"


# promise archive: a proc that is awake or parked when its key is destroyed loses nothing and is
#   archived anew
def test_one_that_is_awake_when_its_key_goes(fresh_kip: Callable[..., Kip], store: Path) -> None:
    """All that it has in the store is unreadable: it is archived anew, as if for the first time."""
    kip = fresh_kip("--store", str(store))
    kip.expected += [r"WARN.*stays in the store"]
    proc, client = redis(kip, "web")
    old = sealing(kip)
    archive(proc)
    check("web", client)
    kip.cli("key", "rotate")
    came(kip, "web", old)
    assert kip.json("key", "destroy", old, "--yes")["procs"] == []
    assert [e["detail"] for e in kip.events() if e["kind"] == "key"][-1] == f"{old} was destroyed"
    for _ in range(2):
        archive(proc)
        check("web", client)
    archive(proc)
    needed = {key["id"]: key["procs"] for key in kip.json("key", "ls")}
    assert needed == {old: [], sealing(kip): ["web"]}
    kip.kill()
    kip.up()
    check("web", client)


# promise archive: `kip key export`, `import`: closed by a passphrase or key file, merged; what is
#   wrong has a line of its own and changes nothing; keys made apart take only the place of unused
#   ones
# held by: this,
#   `kip_offload::keys::tests::keys_made_apart_take_the_place_of_unused_ones_only`
def test_keys_travel(fresh_kip: Callable[..., Kip], store: Path, tmp_path: Path) -> None:
    """Exported and imported by passphrase and by key file; each thing that is wrong has a line of its own."""
    kip, other = fresh_kip("--store", str(store)), fresh_kip("--store", str(store))
    proc, client = redis(kip, "web")
    archive(proc)
    words, key_file, by_words, by_key = (tmp_path / name for name in ("words", "key", "by-words", "by-key"))
    words.write_text(PASSPHRASE + "\n")
    key_file.write_bytes(os.urandom(32))
    assert kip.json("key", "export", str(by_words), "--passphrase-file", str(words))["keys"] == 1
    kip.cli("key", "export", by_key, "--key-file", key_file)
    assert by_words.stat().st_mode & 0o777 == 0o600
    secret = (kip.data / "archive" / "default.keys").read_bytes()[30:60]
    assert secret not in by_words.read_bytes() and secret not in by_key.read_bytes()

    # Onto a machine whose own keys have sealed nothing.
    wrong = tmp_path / "wrong"
    wrong.write_text("incorrect horse battery staple\n")
    before = other.json("key", "ls")
    assert before[0]["id"] != sealing(kip)
    damaged = tmp_path / "damaged"
    sealed = by_words.read_bytes()
    damaged.write_bytes(sealed[:-1] + bytes([sealed[-1] ^ 1]))
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"what is this" * 20)
    for file, flags, told in [
        (by_words, ["--passphrase-file", wrong], "not the one that closed these keys"),
        (damaged, ["--passphrase-file", words], "the file is damaged"),
        (foreign, ["--passphrase-file", words], "no file of exported keys"),
        (by_words, ["--key-file", key_file], "closed with a passphrase"),
        (by_key, ["--passphrase-file", words], "closed with a key file"),
        (by_key, ["--key-file", words], "a key file has 32 bytes"),
        (tmp_path / "none", ["--key-file", key_file], "cannot read"),
        (by_words, [], "--passphrase-file"),
    ]:
        refusal = other.refused("key", "import", file, *flags)
        assert told in refusal and str(file if flags else "") in refusal, refusal
    assert "is there already" in kip.refused("key", "export", by_words, "--passphrase-file", words)
    words.write_text("short\n")
    assert "too short" in kip.refused("key", "export", tmp_path / "new", "--passphrase-file", words)
    assert not (tmp_path / "new").exists() and other.json("key", "ls") == before
    done = other.cli("key", "import", by_words, "--passphrase-file", "-", "--json", input=PASSPHRASE + "\n").stdout
    assert sealing(kip) in done
    assert [key["id"] for key in other.json("key", "ls")] == [sealing(kip)] and sealing(other) == sealing(kip)

    # What one rotated and destroyed meanwhile comes with the next import; the first import again
    # changes nothing.
    old, new = sealing(other), other.json("key", "rotate")["id"]
    assert other.json("key", "import", str(by_key), "--key-file", str(key_file)) == {
        "realm": "default", "added": [], "destroyed": [], "current": new,
    }  # fmt: skip
    other.cli("key", "export", tmp_path / "newer", "--key-file", key_file)
    assert kip.json("key", "import", str(tmp_path / "newer"), "--key-file", str(key_file))["added"] == [new]
    assert sealing(kip) == new and [key["id"] for key in kip.json("key", "ls")] == [old, new]
    check("web", client)
    archive(proc)

    # Keys that were made apart are not mixed with those that have sealed something.
    apart = fresh_kip("--store", str(store))
    apart.cli("key", "export", tmp_path / "apart", "--key-file", key_file)
    refusal = kip.refused("key", "import", tmp_path / "apart", "--key-file", key_file)
    assert "made apart from these" in refusal, refusal
    check("web", client)


# promise archive: a passphrase is no argument, and is not shown when it is typed
# held by: this, `kip_cli::key::tests::a_passphrase_is_typed_and_mended`,
#   `crates/api/tests/api.rs::keys_by_their_routes`
def test_a_passphrase_is_typed_unseen(fresh_kip: Callable[..., Kip], store: Path, tmp_path: Path) -> None:
    kip = fresh_kip("--store", str(store))

    def typed(*words: str | Path, say: list[str]) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        child = subprocess.Popen([kip.program, "--data", kip.data, "key", *words], stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        seen = ""
        for text in say:
            seen += wait_for("it asks", lambda: (got := os.read(ours, 999).decode()).endswith(": ") and got, 20)
            os.write(ours, text.encode())
        code = child.wait(20)
        with suppress(OSError):  # EIO: all is read, and no process has the other end any more
            while more := os.read(ours, 9999).decode():
                seen += more
        os.close(ours)
        return code, seen

    file = tmp_path / "keys"
    code, seen = typed("export", file, say=[PASSPHRASE + "\r", "something else\r"])
    assert code == 1 and "not the same" in seen and not file.exists(), seen
    code, seen = typed("export", file, say=["\x03"])
    assert code == 1 and "nothing was done" in seen and not file.exists(), seen
    code, seen = typed("export", file, say=[PASSPHRASE + "\r", PASSPHRASE + "\r"])
    assert code == 0 and "1 key of realm default" in seen and "horse" not in seen, seen
    assert kip.cli("key", "import", file, "--passphrase-file", "-", input=PASSPHRASE).stdout.startswith("0 keys imported")


def test_without_a_store(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip("--store", "none")
    assert "there is no store" in kip.refused("key", "ls")
