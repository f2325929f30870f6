"""What windows will soon need is read before they ask, and is what they would have read."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from accountant.core.window_decay import factor, term, total
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.query.window_buckets import MOST_HALF_LIVES
from accountant.wire.policy_models import Policy, UsageWindow, WindowSpec
from gputally.base.units import BUCKET_MS, MS_PER_HOUR, MS_PER_MINUTE

POLICY = Policy.model_validate({"queues": [{"name": "a", "refs": ["kai:a"]}]})
HOUR = 3600


def remembered(ledger: DuckLedger, spec: WindowSpec, at_ms: int) -> UsageWindow | None:
    """The answer from memory alone."""
    return ledger._windows.window(None, ledger._state, spec, at_ms, "allocated", 0.98)


def from_the_tables(ledger: DuckLedger, spec: WindowSpec, at_ms: int) -> UsageWindow:
    ledger._windows.forget_all(ledger._state.version)
    return ledger.window(spec, at_ms, "allocated", 0.98)


@pytest.fixture
def booked(ledger: DuckLedger, hand: Any) -> int:
    """An hour and a half of minutes; the end of it."""
    ledger.put_policy(POLICY, hand.start_ms)
    rows = [hand.row(2 + minute, minute, minute + 1) for minute in range(90)]
    ledger.append([hand.batch(hand.fact(1, queue_ref="kai:a"), *rows)], hand.start_ms + 3 * MS_PER_HOUR)
    end_ms: int = hand.start_ms + 90 * MS_PER_MINUTE
    return end_ms


@pytest.mark.parametrize("half_life", [None, HOUR])
def test_of_time_of_which_nothing_is_booked_yet_nothing_is_read(
    ledger: DuckLedger, booked: int, half_life: int | None
) -> None:
    spec = WindowSpec(size=HOUR, half_life=half_life)
    ledger.window(spec, booked, "allocated", 0.98)
    ledger.look_ahead()
    later = booked + 20 * MS_PER_MINUTE
    found = remembered(ledger, spec, later)
    assert found is not None
    assert found == from_the_tables(ledger, spec, later)


@pytest.mark.parametrize("half_life", [None, HOUR])
@pytest.mark.parametrize("minutes", [7, 22])
def test_a_window_that_slides_on_over_new_rows_reads_nothing(
    ledger: DuckLedger, hand: Any, booked: int, half_life: int | None, minutes: int
) -> None:
    spec = WindowSpec(size=HOUR, half_life=half_life)
    ledger.window(spec, booked, "allocated", 0.98)
    assert ledger.look_ahead() == 2, "the quarter-hour it begins with, and the next"
    assert ledger.look_ahead() == 0
    rows = [hand.row(92 + minute, 90 + minute, 91 + minute) for minute in range(minutes)]
    ledger.append([hand.batch(*rows)], hand.start_ms + 3 * MS_PER_HOUR)
    later = booked + minutes * MS_PER_MINUTE
    found = remembered(ledger, spec, later)
    assert found is not None
    assert found == from_the_tables(ledger, spec, later)


def test_what_a_late_set_made_forgotten_is_read_again(ledger: DuckLedger, hand: Any, booked: int) -> None:
    spec = WindowSpec(size=HOUR)
    ledger.window(spec, booked, "allocated", 0.98)
    ledger.look_ahead()
    ledger.append([hand.batch(hand.row(1, 50, 52, holder=None), epoch="0191-a")], hand.start_ms + 3 * MS_PER_HOUR)
    assert remembered(ledger, spec, booked) is None
    assert ledger.look_ahead() == 1
    found = remembered(ledger, spec, booked)
    assert found is not None
    assert found == from_the_tables(ledger, spec, booked)


def test_half_lives_that_nobody_asks_for_any_more_are_forgotten(ledger: DuckLedger, hand: Any, booked: int) -> None:
    specs = [WindowSpec(size=HOUR, half_life=HOUR + number) for number in range(MOST_HALF_LIVES + 1)]
    for spec in specs:
        ledger.window(spec, booked, "allocated", 0.98)
    ledger.append([hand.batch(hand.row(92, 90, 91))], hand.start_ms + 3 * MS_PER_HOUR)
    later = booked + MS_PER_MINUTE
    assert remembered(ledger, specs[0], booked) is None
    kept = remembered(ledger, specs[-1], booked)
    assert kept is not None
    assert kept == from_the_tables(ledger, specs[-1], booked)
    assert ledger.window(specs[0], later, "allocated", 0.98) == from_the_tables(ledger, specs[0], later)


@pytest.mark.parametrize("half_life", [None, HOUR])
def test_sums_too_large_for_columns_are_told_all_the_same(ledger: DuckLedger, hand: Any, half_life: int | None) -> None:
    """Terms are added up as floating-point numbers only where that is exact."""
    energy = 10**15 - 1
    rows = [hand.row(2 + minute, minute, minute + 1, energy_uj=energy) for minute in range(30)]
    ledger.put_policy(POLICY, hand.start_ms)
    ledger.append([hand.batch(hand.fact(1, queue_ref="kai:a"), *rows)], hand.now_ms)
    spec, end_ms = WindowSpec(size=HOUR, half_life=half_life), hand.start_ms + 30 * MS_PER_MINUTE
    found = ledger.window(spec, end_ms, "energy", 0.98)
    if half_life is None:
        assert found.usage["a"] == 30 * energy
    terms = defaultdict[int, int](int)
    for row in rows:
        reference = row.start_ms - row.start_ms % BUCKET_MS + BUCKET_MS
        terms[reference] += term(energy, factor(row.start_ms, row.end_ms, reference, half_life))
    assert found.usage["a"] == total(sorted(terms.items()), end_ms, half_life)
    ledger.checkpoint()
    ledger._windows.forget_all(ledger._state.version)
    assert ledger.window(spec, end_ms, "energy", 0.98) == found
