"""Real programs of Debian, PyPI and npm through every tier; docs/compatibility.md has all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ALL_KIPS
from harness import compatibility, guests
from harness.kip import ROOT, Kip, daemon
from harness.rows import one_in


@pytest.fixture(scope="module")
def module_kip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kip]:
    with daemon("--store", str(tmp_path_factory.mktemp("store"))) as kip:
        ALL_KIPS.append(kip)
        yield kip
        ALL_KIPS.remove(kip)


def goes_through(kip: Kip, name: str, directory: Path, wakes: int) -> None:
    guest = guests.ALL[name]
    if why := guest.missing():
        pytest.skip(why)
    result = compatibility.run(kip, guest, directory, wakes)
    slept = [tier for tier, found in result.tiers.items() if found.wakes_ms]
    assert slept == guest.sleeps(), {tier: found.refused for tier, found in result.tiers.items()}


# promise servers: real programs of Debian, PyPI and npm, 40 and more, go through every tier that
#   docs/compatibility.md has for them, with an open connection and what a client left in them
# held by: this, all of them `tests/test_compatibility.py::test_every_program`,
#   `tests/test_compatibility.py::test_the_table_is_of_these_programs`
@pytest.mark.parametrize("name", one_in(3, guests.SHORT))
def test_some_programs(kip: Kip, tmp_path: Path, name: str) -> None:
    goes_through(kip, name, tmp_path, 1)


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in guests.ALL if name not in guests.SHORT])
def test_every_program(kip: Kip, tmp_path: Path, name: str) -> None:
    goes_through(kip, name, tmp_path, 2)


def test_the_table_is_of_these_programs() -> None:
    """The document has a row for each program that the code knows, and no other: `bench/compatibility` writes it."""
    rows = compatibility.named((ROOT / "docs" / "compatibility.md").read_text())
    assert rows == list(guests.ALL), set(rows) ^ set(guests.ALL)
    sources = Counter(guest.source for guest in guests.ALL.values())
    assert len(rows) >= 40 and set(sources) == {guests.DEBIAN, guests.PYTHON_INDEX, guests.NPM}, sources
