"""The rows of a day cost what the ledger says, to 10⁻⁹, also where one row has several prices, or time that moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import date
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from accountant.billing.usage_pricing import cost
from accountant.lake.table_rows import DayRows, day_rows
from accountant.prices.price_book import Commitment, PriceBook
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.usage_cost_and_job_models import CostAnswer
from agent.wire import Holder, Slice, UsageInterval
from gputally.base.clock import VirtualClock
from tests.empty_ledger import fresh
from tests.ledger.busy_ledger import BOOK, HAND
from tests.ledger.conftest import START_MS, booked

DAY = date(2026, 10, 1)
UNTIL_MS = START_MS + 3_600_000
HOUR_US = 3_600_000_000


@contextmanager
def ledger_of(place: Path, *rows: UsageInterval) -> Iterator[DuckLedger]:
    with closing(open_ledger(fresh(place / "ledger.duckdb"), VirtualClock(HAND.now_ms))) as ledger:
        assert booked(ledger, HAND.now_ms, HAND.batch(*rows)).quarantined == 0
        yield ledger


def pod(number: int) -> Holder:
    return Holder("pod", f"p{number}", "ns", f"p{number}")


def of_hour(ledger: DuckLedger, book: PriceBook) -> tuple[DayRows, CostAnswer]:
    """The rows of the first hour of a day, and the ledger's own answer about that hour."""
    with ledger.moment(START_MS, UNTIL_MS) as moment:
        found = day_rows("prod", moment, book, DAY, ZoneInfo("UTC"), UNTIL_MS)
        return found, cost(moment, book, START_MS, UNTIL_MS, ("gpu_model",))


def test_the_memory_of_a_gpu_that_no_mig_instance_has_is_in_the_rows(tmp_path):
    """Seven instances hold the seven compute slices, and seven of the eight memory slices."""
    instances = [
        HAND.row(
            number, 0, 60, "gpu-0", gpu_model="A100-80GB", holder=pod(number), busy_us=0,
            slice=Slice("1g.10gb", number, 0, 1, 7, 9_856, 81_920),
            capacity_us=(part := HOUR_US // 7 + (number <= HOUR_US % 7)), allocated_us=part,
        )
        for number in range(1, 8)
    ]  # fmt: skip
    book = BOOK.model_copy(update={"mig_basis": "memory"})
    with ledger_of(tmp_path, *instances) as ledger:
        found, answer = of_hour(ledger, book)
    assert abs(found.cost - Decimal("2.7401")) < Decimal("1e-8")
    assert answer.total is not None
    assert abs(found.cost - answer.total) < Decimal("1e-8")
    assert sum(found.accounts) == HOUR_US


def test_a_row_of_which_a_commitment_prices_a_part_has_its_cost_and_the_rest_as_unpriced_time(tmp_path):
    """Without a price of its own, time beyond the commitment is unpriced; two whole GPUs share one committed GPU."""
    rate = BOOK.rows[0].model_copy(
        update={"id": "contract", "model": "B200", "commitment": "c", "valid_from": "2026-01-01", "price": Decimal(4)}
    )
    book = BOOK.model_validate({
        **BOOK.model_dump(by_alias=True), "rows": [row.model_dump() for row in (*BOOK.rows, rate)],
        "commitments": [Commitment(id="c", gpus=1).model_dump()],
    })  # fmt: skip
    held = [HAND.row(number, 0, 60, f"gpu-{number}", gpu_model="B200", holder=pod(number)) for number in (1, 2)]
    with ledger_of(tmp_path, *held) as ledger:
        found, answer = of_hour(ledger, book)
    rows = found.rows.to_pylist()
    assert found.cost == sum(row["cost"] for row in rows) == Decimal(4)
    assert found.unpriced_us == sum(row["unpriced_us"] for row in rows) == answer.unpriced_gpu_us == HOUR_US
    assert all(row["price_row"] is None for row in rows)


@pytest.mark.parametrize("book", [None, BOOK], ids=["without a price book", "by a book without a row for the GPU"])
def test_a_row_without_any_price_has_no_cost(tmp_path, book):
    with ledger_of(tmp_path, HAND.row(1, 0, 60, "gpu-0", gpu_model="B200", holder=pod(1))) as ledger:
        found, answer = of_hour(ledger, book)
    (row,) = found.rows.to_pylist()
    assert row["cost"] is None
    assert row["unpriced_us"] == found.unpriced_us == answer.unpriced_gpu_us == HOUR_US
