"""Trino answers as the ledger does."""

from __future__ import annotations

import pytest

from accountant.lake.engines.sql_text import CATALOG_VARIABLE
from accountant.lake.engines.trino.engine import TrinoEngine
from tests.lake.comparison_queries import PublishedLedger, differences
from tests.real.engines.java_catalog import jdbc
from tests.real.trino import Trino

pytestmark = pytest.mark.real


def test_trino(known: PublishedLedger, name: str, trino: Trino, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = known.settings.lake
    assert lake is not None
    trino.add_catalog(name, *jdbc(lake))
    monkeypatch.setenv(CATALOG_VARIABLE, name)
    engine = TrinoEngine.connect(trino.url)
    assert differences(known, engine) == []
    engine.close()
