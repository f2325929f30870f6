"""Copies an empty ledger, because creating its schema takes half of the time of opening one, and tests open 2,000."""

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
    """Write an empty ledger of the present schema to `place`, unless a file exists there. Returns `place`."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.write_bytes(_empty())
    return place


def data(folder: Path) -> Path:
    """Write an empty ledger into an accountant's data folder. Returns `folder`."""
    return fresh(folder / "ledger.duckdb").parent
