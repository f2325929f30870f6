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


def write_side_by_side(lake: Lake, writers: int, commits: int, *, ledgers: int) -> list[tuple[str, int]]:
    """Let each writer replace its ledger's rows `commits` times; with fewer ledgers than writers, several share one.
    Returns the lake's content afterwards as (ledger, rows)."""

    def write(number: int) -> None:
        name = f"ledger-{number % ledgers}"
        with closing(Catalogue.connect(lake)) as found:
            for commit in range(1, commits + 1):
                found.replace(DAYS, DAYS.of_rows([control_total(name, commit)]), {"ledger": name})

    with closing(Catalogue.connect(lake)) as known:
        known.create_missing()
        with ThreadPoolExecutor(writers) as pool:
            list(pool.map(write, range(writers)))
        held = known.open(DAYS).scan().to_arrow()
    return sorted(zip(held["ledger"].to_pylist(), held["rows"].to_pylist(), strict=True))


def write_once(lake: Lake, ledger: str, rows: int) -> None:
    """Replace the rows of the ledger by one control total."""
    with closing(Catalogue.connect(lake)) as found:
        found.replace(DAYS, DAYS.of_rows([control_total(ledger, rows)]), {"ledger": ledger})


if __name__ == "__main__":
    write_once(load_lake(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
