"""What the ledger no longer has leaves the lake, and what it has is there also after a run that failed or had a wrong
clock."""

from __future__ import annotations

from datetime import date

import pytest

from accountant.core.errors import LakeUnavailable, LedgerUnavailable
from accountant.core.import_epochs import import_prefix
from accountant.lake import tables
from accountant.lake.lake_comparison import LakeComparison
from accountant.ledger.protocols import ImportSpan
from agent.wire import Holder
from tests.lake.comparison_queries import HOUR, ROWS, PublishedLedger, overwrite, published
from tests.lake.publishers import Unplugged, another_process, publisher
from tests.ledger.busy_ledger import HAND
from tests.ledger.conftest import START_MS
from tests.moments import present

DAY = 24 * HOUR


def days(known: PublishedLedger) -> set[date]:
    """The days that the lake has, by their rows and by their control totals."""
    lake = known.connect()
    totals = {row["day"] for row in lake.read(tables.DAYS)}
    assert {row["day"] for row in lake.read(tables.USAGE_HOURLY)} <= totals
    return totals


def months(known: PublishedLedger) -> list[set[str]]:
    divided = tables.STATEMENTS, tables.STATEMENT_LINES, tables.FOCUS
    return [{row["month"] for row in known.connect().read(table)} for table in divided]


def first_of_october(*numbers: int) -> set[date]:
    return {date(2026, 10, number) for number in numbers}


def book_september(known: PublishedLedger, number: int = 1) -> ImportSpan:
    """Book an import of two hours of September 1. number: of the import."""
    start_ms, minutes = START_MS - 30 * DAY, 30 * 24 * 60
    rows = [
        HAND.row(
            1 + quarter, 15 * quarter - minutes, 15 * quarter + 15 - minutes, "gpu-old", gpu_model="H100",
            holder=Holder("slurm", "77", "", "77"),
        )
        for quarter in range(8)
    ]  # fmt: skip
    (receipt,) = known.ledger.append(
        [HAND.batch(*rows, node="old", epoch=f"{import_prefix('slurm')}{number}")], known.clock.wall_ms()
    )
    assert not isinstance(receipt, Exception)
    return ImportSpan(cluster="prod", source="slurm", start_ms=start_ms, end_ms=start_ms + DAY)


def test_days_that_were_computed_before_a_failure_are_written_by_the_next_run(unpublished):
    def fail(what: str, number: int, _: int) -> None:
        if (what, number) == ("days", 3):
            raise LedgerUnavailable("for a moment")

    unpublished.clock.advance(2 * DAY)
    with pytest.raises(LedgerUnavailable):
        unpublished.publisher.publish(fail)
    unpublished.clock.advance(HOUR)
    unpublished.publisher.publish()
    assert days(unpublished) == first_of_october(1, 2, 3)
    assert unpublished.publisher.compare() == LakeComparison(3, ())


def test_nothing_is_published_while_the_clock_is_behind_the_records(known):
    before = {table.name: known.connect().read(table) for table in tables.TABLES}
    known.clock.step_wall(-3 * HOUR)
    for write in (known.publisher.publish, lambda: known.publisher.repair("ana", "why not")):
        with pytest.raises(LedgerUnavailable):
            write()
    assert {table.name: known.connect().read(table) for table in tables.TABLES} == before
    assert len(present(known.ledger).acts("lake")) == 1


def test_days_that_a_clock_behind_took_from_the_lake_come_back(known):
    known.clock.advance(3 * DAY)
    quick = another_process(known, days_back=1)
    quick.publish()
    known.clock.step_wall(-3 * DAY + HOUR)
    quick.publish()
    known.clock.step_wall(3 * DAY)
    quick.publish()
    assert days(known) == first_of_october(1, 2, 3, 4)
    assert known.publisher.compare() == LakeComparison(4, ())


@pytest.mark.parametrize("own", [ROWS, []], ids=["some records stay", "none does"])
def test_what_was_withdrawn_leaves_the_lake_with_its_money(own):
    with published(rows=own, publish=False) as known:
        span = book_september(known)
        known.publisher.publish()
        assert all("2026-09" in found for found in months(known))
        known.ledger.withdraw_import(span, known.clock.wall_ms(), "ann", "wrong")
        assert known.publisher.compare().differences == (), "the next publication writes it"
        known.clock.advance(HOUR)
        known.publisher.publish()
        assert months(known) == [{"2026-10"} if own else set()] * 3
        assert days(known) == (first_of_october(1) if own else set())
        book_september(known, 2)
        known.publisher.publish()
        assert all("2026-09" in found for found in months(known))
        assert date(2026, 9, 2) in days(known)


@pytest.mark.parametrize("repair", [True, False])
def test_what_was_left_over_is_named_and_leaves(known, repair):
    lake = known.connect()
    divided = tables.STATEMENTS, tables.STATEMENT_LINES, tables.FOCUS, tables.PODS
    for table in divided:
        lake.open(table).append(table.of_rows([{**row, "month": "2026-08"} for row in lake.read(table)]))
    other_days = {"day": date(2026, 8, 1)}
    for table in (tables.USAGE_HOURLY, tables.DECISIONS):
        lake.open(table).append(table.of_rows([row | other_days for row in lake.read(table)]))
    found = known.publisher.compare().differences
    assert {line.partition(":")[0] for line in found} == {"2026-08-01", "2026-08"}
    writer = publisher(known)
    if repair:
        writer.repair("ana", "the ledger is right")
    else:
        writer.publish()
    assert writer.compare() == LakeComparison(1, ())
    assert days(known) == first_of_october(1)
    for table in divided:
        assert {row["month"] for row in lake.read(table)} == {"2026-10"}
    assert {row["day"] for row in lake.read(tables.DECISIONS)} == first_of_october(1)
    assert len(lake.read(tables.DECISIONS)) == len(present(known.ledger).decisions(0, 2**53))


def test_a_repair_that_ends_midway_leaves_no_control_total_without_figures(known):
    lake = known.connect()
    hourly = [{**row, "day": date(2026, 8, 1)} for row in lake.read(tables.USAGE_HOURLY)]
    lake.open(tables.USAGE_HOURLY).append(tables.USAGE_HOURLY.of_rows(hourly))
    overwrite(lake, tables.DAYS, tables.DAYS.arrow.empty_table(), {})
    with pytest.raises(LakeUnavailable):
        another_process(known, Unplugged(known, left=2)).repair("ana", "the totals are gone")
    assert lake.read(tables.DAYS) == []
    writer = publisher(known)
    assert len(writer.compare().differences) == 1
    writer.publish()
    assert writer.compare() == LakeComparison(1, ())
    assert days(known) == first_of_october(1)
