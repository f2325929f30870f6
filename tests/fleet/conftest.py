"""Provides two ledgers that publish into one lake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from accountant.fleet.fleet_ledgers import Fleet
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.prices.price_book import Billing, IdlePolicy
from tests.lake.comparison_queries import ROWS, PublishedLedger, published
from tests.ledger.busy_ledger import BOOK

OTHER_ROWS = [
    (quarter, gpu, (quarter * 2 + gpu) % 6, quarter * 3 % 16, gpu == 1) for quarter in range(10) for gpu in range(3)
]


@dataclass(frozen=True)
class TwoLedgers:
    """Two ledgers, north and south, in one currency. South's days are those of New York, and it does not export the
    label of cost centres. No job reported an epoch, because the lake has no cost of epochs."""

    warehouse: str
    north: PublishedLedger
    south: PublishedLedger
    engine: DuckDbEngine

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.engine)

    @property
    def both(self) -> tuple[PublishedLedger, PublishedLedger]:
        return self.north, self.south


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoLedgers]:
    place = str(tmp_path_factory.mktemp("lake"))
    dearer: Any = BOOK.model_copy(
        update={"rows": tuple(row.model_copy(update={"price": row.price and row.price * 2}) for row in BOOK.rows)}
    )
    with ExitStack() as stack:
        north = stack.enter_context(published(place, name="north", rows=ROWS, epochs=False))
        south = stack.enter_context(
            published(
                place, name="south", rows=OTHER_ROWS, book=dearer, timezone="America/New_York", seed=7, epochs=False,
                exported=("project",),
            )
        )  # fmt: skip
        engine = DuckDbEngine(north.connect())
        stack.callback(engine.close)
        yield TwoLedgers(place, north, south, engine)


@pytest.fixture(scope="session")
def two_currencies() -> Iterator[PublishedLedger]:
    """The ledger `b`, in euros; in the same lake `a` is in dollars."""
    euros: Any = BOOK.model_copy(update={"currency": "EUR"})
    with published(name="a") as dollars, published(_lake(dollars), name="b", book=euros) as found:
        yield found


@pytest.fixture(scope="session")
def billed_by_busy_time() -> Iterator[PublishedLedger]:
    """The ledger `south`, which bills shared GPUs by busy time; in the same lake `north` does not."""
    lent = BOOK.model_copy(update={"billing": Billing(shared_gpus="busy", idle=IdlePolicy())})
    with published(name="north") as north, published(_lake(north), name="south", book=lent) as found:
        yield found


def _lake(known: PublishedLedger) -> str:
    assert known.settings.lake is not None
    return known.settings.lake.warehouse


@pytest.fixture
def lake_file(two: TwoLedgers, tmp_path: Path) -> Path:
    found = tmp_path / "lake.yaml"
    found.write_text(f"warehouse: {two.warehouse}\n")
    return found
