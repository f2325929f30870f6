"""The means of weekdays and of weekends."""

from __future__ import annotations

from datetime import date, timedelta
from decimal import Decimal

from accountant.reports.figure_formatting import week_text, weekday_mean_text
from accountant.reports.week_parts import WholeDay, week_parts
from gputally.base.units import US_PER_HOUR

FRIDAY = date(2026, 10, 16)


def _day(after: int, held: int, busy: int, cost: str | None) -> WholeDay:
    return WholeDay(
        FRIDAY + timedelta(days=after), held * US_PER_HOUR, busy * US_PER_HOUR, (held - busy) * US_PER_HOUR,
        None if cost is None else Decimal(cost),
    )  # fmt: skip


def test_weekdays_and_weekends_have_means_of_their_own_days() -> None:
    days = [_day(0, 10, 5, "20"), _day(1, 4, 1, "8"), _day(2, 8, 2, "16.50"), _day(3, 20, 10, "41")]
    weekdays, weekend = week_parts(days)
    assert (weekdays.days, weekdays.held_us, weekdays.cost, weekdays.utilisation) == (
        2, 15 * US_PER_HOUR, Decimal("30.5"), 0.5,
    )  # fmt: skip
    assert (weekend.days, weekend.held_us, weekend.cost, weekend.utilisation) == (
        2, 6 * US_PER_HOUR, Decimal("12.25"), 0.25,
    )  # fmt: skip
    said = week_text([weekdays, weekend], "USD")
    for figure in ("15.0 GPU-h", "USD 30.50", "50.0 %", "6.0 GPU-h", "USD 12.25", "25.0 %"):
        assert figure in said


def test_an_unknown_cost_has_no_mean_and_days_of_one_kind_compare_nothing() -> None:
    weekdays, weekend = week_parts([_day(0, 10, 5, None), _day(3, 10, 5, "9"), _day(1, 1, 1, "1")])
    assert weekdays.cost is None
    assert "USD 1.00" in week_text([weekdays, weekend], "USD")
    assert week_text([weekdays], "USD") == week_text([], "USD") == ""


def test_one_figure_has_the_same_means() -> None:
    days = [(FRIDAY, 3), (FRIDAY + timedelta(days=1), 8), (FRIDAY + timedelta(days=3), 4)]
    said = weekday_mean_text(days, lambda mean: f"{mean} h")
    assert "mean of 2: 3.5 h" in said
    assert "mean of 1: 8 h" in said
    assert weekday_mean_text(days[:1], str) == ""
