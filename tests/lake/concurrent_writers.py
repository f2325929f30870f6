"""Concurrent writers of many ledgers. As a program it is one writer: `LAKE.yaml LEDGER ROWS`."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import date
from typing import Any

from accountant.core.settings import Lake
from accountant.fleet.fleet_ledgers import load_lake
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.tables import DAYS

DAY = date(2026, 10, 1)


def control_total(ledger: str, rows: int) -> dict[str, Any]:
    return {"ledger": ledger, "day": DAY, "rows": rows, "digest": f"{ledger} {rows}"}


def claimed(lake: Lake, ledger: str) -> Catalogue:
    """Return the tables of a ledger, ready to be written. The ledger's id is its name."""
    found = Catalogue.connect(lake.model_copy(update={"ledger": ledger}))
    found.begin()
    found.claim(ledger)
    return found


def write_side_by_side(lake: Lake, writers: int, commits: int) -> list[tuple[str, int]]:
    """Let each writer replace the rows of its own ledger `commits` times. Returns the lake's content afterwards as
    (ledger, rows)."""

    def write(number: int) -> list[tuple[str, int]]:
        name = f"ledger-{number}"
        with closing(claimed(lake, name)) as found:
            for commit in range(1, commits + 1):
                found.replace(DAYS, DAYS.of_rows([control_total(name, commit)]), {})
            return [(row["ledger"], row["rows"]) for row in found.read(DAYS)]

    with ThreadPoolExecutor(writers) as pool:
        return sorted(row for rows in pool.map(write, range(writers)) for row in rows)


def write_once(lake: Lake, ledger: str, rows: int) -> None:
    """Replace the rows of the ledger by one control total."""
    with closing(claimed(lake, ledger)) as found:
        found.replace(DAYS, DAYS.of_rows([control_total(ledger, rows)]), {})


if __name__ == "__main__":
    write_once(load_lake(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
