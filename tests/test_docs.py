"""What the documents say is there is there: commands and flags, messages, files."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from harness import leftovers
from harness.clients import Redis, free_port
from harness.kip import Kip, Proc, binary
from harness.wait import wait_for

ROOT = Path(__file__).parents[1]
# The index of promises is generated, and no guide.
DOCS = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "promises.md")
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, ROOT / "recipes" / "README.md"]
# A literal that is shorter says nothing about where it comes from.
FEWEST = 10


@cache
def help_of(*words: str) -> str:
    return subprocess.run([binary(), *words, "--help"], capture_output=True, text=True, timeout=20, check=True).stdout


@cache
def sources() -> str:
    """All string literals in the programs, more or less: lines that go on are joined."""
    texts = [path.read_text() for path in (ROOT / "crates").glob("*/src/**/*.rs")]
    return re.sub(r"\\\n\s*", "", "\n".join(texts))


def commands(text: str) -> set[tuple[str, ...]]:
    """Each `kip ...` of a document up to the first thing that is neither subcommand nor flag, with its flags."""
    found = set()
    lines = [*re.findall(r"`(kip [^`]*)`", text), *re.findall(r"^ *(?:sudo )?(kip .*)$", text, re.MULTILINE)]
    for line in lines:
        line = re.split(r"#|;| -- |\||\\", line)[0]
        found.add(tuple(line.split()[1:]))
    return found


# promise commands: commands, flags, messages and links in README and docs are those that there are
# held by: this, `tests/test_docs.py::test_messages_are_what_kip_says`,
#   `tests/test_docs.py::test_links_lead_somewhere`
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_commands_and_flags_are_there(guide: Path) -> None:
    known = set(re.findall(r"^  ([a-z]+) ", help_of(), re.MULTILINE))
    for words in commands(guide.read_text()):
        if not words or not re.fullmatch("[a-z]+", words[0]):
            continue
        assert words[0] in known, f"{guide.name}: there is no `kip {words[0]}`"
        nested = set(re.findall(r"^  ([a-z]+) ", help_of(words[0]), re.MULTILINE)) if words[0] != "help" else set()
        deeper = words[:2] if len(words) > 1 and words[1] in nested and "Commands:" in help_of(words[0]) else words[:1]
        for flag in (re.split(r"[=\]]", word.strip("[]"))[0] for word in words if word.strip("[").startswith("--")):
            assert flag in help_of(*deeper), f"{guide.name}: `kip {' '.join(deeper)}` has no {flag}"


def every_flag(*words: str) -> dict[str, tuple[str, ...]]:
    """All long flags below a command, each with one command that has it."""
    text = help_of(*words)
    found = {flag: words for flag in re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)}
    if listed := re.search(r"^Commands:\n((?:  .*\n)+)", text, re.MULTILINE):
        for command in re.findall(r"^  ([a-z]+) ", listed[1], re.MULTILINE):
            if command != "help":
                found = every_flag(*words, command) | found
    return found


# promise commands: every flag is in a guide, not only in `--help`
def test_every_flag_is_in_a_guide() -> None:
    """Beyond what `--help` and the manual pages, which are made of the same lines, say of it."""
    text = "\n".join(guide.read_text() for guide in GUIDES)
    flags = {flag: words for flag, words in every_flag().items() if flag not in ("--help", "--version")}
    assert len(flags) > 80, flags
    missing = {flag: " ".join(words) for flag, words in flags.items() if not re.search(rf"{flag}(?![\w-])", text)}
    assert not missing, missing


# promise commands: metrics that a guide names are there
def test_metrics_that_are_named_are_there() -> None:
    """Those worth an alarm among them; a test holds the list itself against what the daemon says (test_metrics.py)."""
    there = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    for guide in GUIDES:
        named = {re.sub("_bucket$", "", name) for name in re.findall(r"\b(?:kip|process)_[a-z_]+[a-z]\b(?!\.\.\.)", guide.read_text())}
        assert named <= there, f"{guide.name}: there is no {named - there}"


def test_messages_are_what_kip_says() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = [row for row in re.findall(r"^\| `(.*?)` \|", text, re.MULTILINE)]
    assert len(messages) > 25
    for message in messages:
        pieces = [piece.strip() for piece in message.split("…")]
        telling = [piece for piece in pieces if len(piece) >= FEWEST]
        assert telling, f"{message}: nothing of it can be found again"
        for piece in telling:
            assert piece in sources(), f"nobody says {piece!r} (of {message!r}) any more"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_links_lead_somewhere(guide: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", guide.read_text()):
        if "://" not in target:
            assert (guide.parent / target).exists(), f"{guide.name} links to {target}, which is not there"


# promise commands: from a clean clone to a sleeping and waking redis: ten minutes and five commands
# held by: the commands, not their time: this
def test_the_first_five_minutes(fresh_kip: Callable[..., Kip]) -> None:
    """At most five commands; what the last of them starts sleeps and wakes. How long they take: bench/first-minutes."""
    block = re.search(r"^<!-- first minutes -->\n```\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block
    lines = [shlex.split(line, comments=True) for line in block[1].splitlines()]
    assert len(lines) <= 5
    assert lines[1] == ["sudo", "make", "install"] and lines[3] == ["sudo", "kip", "up", "&"]
    assert lines[4][:3] == ["sudo", "kip", "run"]
    kip = fresh_kip()
    port = free_port()
    kip.cli(*(word.replace("16379", str(port)) for word in lines[4][2:]))
    proc = Proc(kip, "cache")
    client = Redis(port)
    assert client.ask("SET", "greeting", "hello") == "OK"
    # As redis-cli does: redis ticks, and is parked by its profile while no client is connected.
    client.close()
    for tier in ("hibernated", "parked"):
        wait_for(tier, lambda tier=tier: proc.inspect()["tier"] == tier, 60)
    client = Redis(port)
    assert client.ask("GET", "greeting") == b"hello"
    client.close()


# promise workspace: `make demo`: a web server parks and a page request brings it back; nothing of
#   it is left on the machine
def test_the_demo(tmp_path: Path) -> None:
    """Of these programs, in place of those of a release."""
    (tmp_path / "release").symlink_to(binary().resolve().parent)
    environment = {**os.environ, "CARGO_TARGET_DIR": str(tmp_path)}
    before = set(Path("/tmp").glob("kip-demo.*"))
    done = subprocess.run([ROOT / "scripts" / "demo"], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert re.search(r"parked, a page .* us: Hello from a server that was asleep\.", done.stdout), done.stdout
    assert set(Path("/tmp").glob("kip-demo.*")) == before
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=20).stdout
    assert "/tmp/kip-demo." not in processes
    # The number of its data directory stays its own until another directory wants it.
    for number in leftovers.RUN.glob("instance-*"):
        if "/tmp/kip-demo." in number.read_text():
            number.unlink()
