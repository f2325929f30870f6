"""An empty ledger without making one: tests open two thousand, and its schema is half of what opening costs."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from accountant.storage.duckdb_ledger import open_ledger
from gputally.base.clock import VirtualClock


@cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "ledger.duckdb"
        open_ledger(place, VirtualClock(0)).close()
        return place.read_bytes()


def fresh(place: Path) -> Path:
    """`place`, with an empty ledger of the present schema there unless something is."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.write_bytes(_empty())
    return place


def data(folder: Path) -> Path:
    """`folder`, an accountant's data folder with an empty ledger in it."""
    return fresh(folder / "ledger.duckdb").parent
