"""A ledger on a virtual clock for what inventories tell it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from gputally.base.clock import VirtualClock
from tests.fresh import fresh

NOW_MS = 1_790_816_400_000  # 2026-10-01T01:00:00Z


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW_MS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.duckdb"


@pytest.fixture
def ledger(path: Path, clock: VirtualClock) -> Iterator[DuckLedger]:
    opened = open_ledger(fresh(path), clock)
    yield opened
    opened.close()
