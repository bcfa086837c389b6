"""The parts of `bench/park-wake`. Each measures one thing or knows one way to run a server; how results are shown is known
to `report` and `svg` only. Servers' set-ups and the driver of Kip's command line are those of the tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
