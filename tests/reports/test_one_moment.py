"""A report is of one commit, whatever is booked while it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.corrections_and_adjustments import NewAdjustment
from accountant.core.periods import Month, zone
from accountant.ledger.protocols import EpochReport, JobKey, Moment
from accountant.reports import report_builder
from accountant.reports.report_builder import Report
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_HOUR
from tests.billing.usage_rows import at, price_book
from tests.empty_ledger import fresh
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

OCTOBER = Month(2026, 10)
SPAN = OCTOBER.span(zone("UTC"))
NOW_MS = at("2026-11-02")
JOB = JobKey("c", "vision", "Job/train")
CREDIT = {"month": "2026-10", "team": "vision", "amount": "-5", "reason": "a gift", "approved_by": "cfo"}


class WrittenMeanwhile:
    """A ledger that is written to as soon as a moment of it is open."""

    def __init__(self, ledger: DuckLedger, write: Callable[[], None]) -> None:
        self._ledger, self._write = ledger, write
        self.status = ledger.status

    @contextmanager
    def moment(self, start_ms: int = 0, end_ms: int = 0) -> Iterator[Moment]:
        with self._ledger.moment(start_ms, end_ms) as moment:
            self._write()
            yield moment


def use(ledger: DuckLedger, first_hour: int, hours: int) -> None:
    """An hour of the job after the other."""
    rows = [
        interval(
            SPAN[0] + hour * MS_PER_HOUR + quarter * MS_PER_HOUR // 4, "GPU-1", pod_holder("train-0", "vision", "u1"),
            span_ms=MS_PER_HOUR // 4, gpu_model="H100",
        )
        for hour in range(first_hour, first_hour + hours)
        for quarter in range(4)
    ]  # fmt: skip
    facts = [pod_facts("train-0", SPAN[0], uid="u1", namespace="vision", workload="Job/train")]
    deliver(ledger, NOW_MS, batch(rows, facts, epoch=f"0192-{first_hour}"))


def report(ledger: DuckLedger, books: Bookkeeper) -> Report:
    return report_builder.report(ledger, books, *SPAN, "UTC", month=OCTOBER)


def test_what_is_booked_while_a_month_is_read_is_in_no_part_of_its_page(tmp_path: Path) -> None:
    with closing(open_ledger(fresh(tmp_path / "ledger.duckdb"), VirtualClock(NOW_MS))) as ledger:
        books = Bookkeeper(ledger, VirtualClock(NOW_MS))
        books.prices.take(price_book("id: a, model: H100, price: 1, valid_from: 2026-01-01"), "put", "ann", "", NOW_MS)
        use(ledger, 0, 4)
        ledger.report_epochs([EpochReport(JOB, 1, SPAN[0] + 2 * MS_PER_HOUR, "ann")], NOW_MS)
        before = report(ledger, books)

        def write() -> None:
            use(ledger, 4, 2)
            books.credits.adjust(NewAdjustment.model_validate(CREDIT), "ann")
            dearer = price_book("id: a, model: H100, price: 2, valid_from: 2026-01-01")
            books.prices.take(dearer, "put", "ann", "", NOW_MS)

        found = report_builder.readings(WrittenMeanwhile(ledger, write), books, *SPAN, "UTC", OCTOBER)
        after = report(ledger, books)
    assert report_builder.made_of(found) == before
    assert (before.adjustments, before.headline.cost, before.epochs[0].rest_cost) == ((), 4, 2)
    assert [credit.amount for credit in after.adjustments] == [-5]
    assert (after.headline.cost, after.epochs[0].rest_cost) == (12, 8)


def test_the_data_for_all_teams_has_the_epochs_of_a_bounded_number_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every job with epochs is priced apart, and a cluster may have thousands of teams."""
    monkeypatch.setattr(report_builder, "MOST_EPOCH_JOBS", 1)
    with closing(open_ledger(fresh(tmp_path / "ledger.duckdb"), VirtualClock(NOW_MS))) as ledger:
        books = Bookkeeper(ledger, VirtualClock(NOW_MS))
        books.prices.take(price_book("id: a, model: H100, price: 1, valid_from: 2026-01-01"), "put", "ann", "", NOW_MS)
        use(ledger, 0, 4)
        ledger.report_epochs([EpochReport(JOB, 1, SPAN[0] + 2 * MS_PER_HOUR, "ann")], NOW_MS)
        found = report_builder.readings(ledger, books, *SPAN, "UTC", OCTOBER)
        (team,) = found.scopes - {None}
        own = report_builder.readings(ledger, books, *SPAN, "UTC", OCTOBER, (team,))
        whole = report_builder.report(ledger, books, *SPAN, "UTC", month=OCTOBER, team=team)
    assert found.has(None)
    assert report_builder.made_of(found).epochs
    assert not found.has(team)
    with pytest.raises(ValueError, match="without the team"):
        report_builder.made_of(found, team=team)
    assert report_builder.made_of(own, team=team) == whole
    assert whole.epochs
