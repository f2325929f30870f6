"""Publishers of a ledger in tests: of a process that has just started, and with a lake that fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accountant.core.errors import LakeUnavailable
from accountant.core.settings import Lake
from accountant.lake import tables
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.publisher import Publisher
from tests.lake.comparison_queries import PublishedLedger


def lake_of(known: PublishedLedger) -> Lake:
    assert known.settings.lake is not None
    return known.settings.lake


def publisher(known: PublishedLedger, catalogue: Any = None, **lake: str) -> Publisher:
    """A process of the ledger that has just started. lake: changed settings of the lake."""
    settings = known.settings.model_copy(update={"lake": lake_of(known).model_copy(update=lake)})
    connect = catalogue or (lambda: replace(known, settings=settings).connect())
    return Publisher(known.ledger, known.books, settings, known.clock, connect)


class Unplugged(Catalogue):
    """Fails after a number of writes, at each write of the refused table, or at each tag (`NAME tag`)."""

    def __init__(self, known: PublishedLedger, *, left: int = 1_000, refused: str = "") -> None:
        good = known.connect()
        assert known.settings.lake is not None
        super().__init__(good._catalog, good.place, known.settings.lake)
        self.left, self.refused = left, refused

    def replace(self, table: tables.LakeTable, *args: Any) -> None:
        if self.left == 0 or table.name == self.refused:
            raise LakeUnavailable(f"{self.place}: {table.name} was not written: unplugged")
        self.left -= 1
        super().replace(table, *args)

    def tag(self, table: tables.LakeTable, name: str) -> None:
        if f"{table.name} tag" == self.refused:
            raise LakeUnavailable(f"{self.place}: {table.name} has no tag: unplugged")
        super().tag(table, name)


def another_process(
    known: PublishedLedger, lake: Catalogue | None = None, *, days_back: int | None = None
) -> Publisher:
    """A publisher that writes to this catalogue, else to the intact one, and checks this number of days each time."""
    settings = known.settings
    if days_back is not None:
        assert settings.lake is not None
        settings = settings.model_copy(update={"lake": settings.lake.model_copy(update={"days_back": days_back})})
    return Publisher(known.ledger, known.books, settings, known.clock, known.connect if lake is None else lambda: lake)
