"""Windows from the cache equal windows from the tables, for commits before, between and after the queries."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.core.window_decay import factor, term
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.query.gpu_weights import Weighting
from accountant.storage.query.window_sums import MOST_KEYS, Figures, Sums, added_up
from accountant.wire.policy_models import Policy, UsageWindow, WindowSpec
from gputally.base.units import BUCKET_MS, MS_PER_HOUR, MS_PER_MINUTE
from tests.properties.streams import total

HOUR = 3600
QUEUES = [{"name": "a", "refs": ["kai:a"]}, {"name": "b", "refs": ["kai:b"]}]
POLICY = Policy.model_validate({"queues": QUEUES})


def cached(ledger: DuckLedger, spec: WindowSpec, at_ms: int, cluster: str | None = None) -> UsageWindow | None:
    """The window from the cache, or None if the cache lacks a sum."""
    return ledger._windows.window(None, ledger._state, spec, at_ms, "allocated", 0.98, Weighting(cluster=cluster))


def from_the_tables(ledger: DuckLedger, spec: WindowSpec, at_ms: int, cluster: str | None = None) -> UsageWindow:
    ledger._windows.sums.clear(ledger._state.version)
    return ledger.window(spec, at_ms, "allocated", 0.98, cluster=cluster)


def more(hand: Any) -> Any:
    """Later rows of a known pod and of another pod."""
    return hand.batch(hand.row(3, 10, 12), hand.fact(4, "pod-2", queue_ref="kai:b"), hand.row(5, 12, 14))


def another_queue(hand: Any) -> Any:
    return hand.batch(hand.fact(3, queue_ref="kai:b", observed_ms=hand.start_ms + 1), hand.row(4, 10, 12))


def late(hand: Any) -> Any:
    """A set that displaces a stored set, so that the commit does not only add rows."""
    return hand.batch(hand.row(1, 4, 6, holder=None), epoch="0191-a")


@pytest.mark.parametrize("cluster", [None, "prod"])
@pytest.mark.parametrize("half_life", [None, 3600])
@pytest.mark.parametrize("minutes", [15, 12], ids=["whole", "cut"])
@pytest.mark.parametrize(("meanwhile", "kept"), [(more, True), (another_queue, False), (late, False)])
@pytest.mark.parametrize("asked_before", [True, False])
def test_a_commit_between_the_snapshot_and_the_answer(
    ledger: DuckLedger,
    hand: Any,
    cluster: str | None,
    half_life: int | None,
    minutes: int,
    meanwhile: Any,
    kept: bool,
    asked_before: bool,
) -> None:
    ledger.put_policy(POLICY, hand.start_ms)
    ledger.append([hand.batch(hand.fact(1, queue_ref="kai:a"), hand.row(2, 0, 10))], hand.now_ms)
    if cluster is not None:
        ledger.append([hand.batch(hand.row(1, 0, 10), cluster="staging")], hand.now_ms)
    spec, at = WindowSpec(size=HOUR, half_life=half_life), hand.start_ms + minutes * MS_PER_MINUTE
    before = ledger.window(spec, at, "allocated", 0.98, cluster=cluster)
    if not asked_before:
        ledger._windows.sums.clear(ledger._state.version)
    with ledger._snapshot() as (cursor, state):
        ledger.append([meanwhile(hand)], hand.now_ms)
        asked = ledger._windows.window(cursor, state, spec, at, "allocated", 0.98, Weighting(cluster=cluster))
    assert asked == before, "as its snapshot shows it"
    assert (cached(ledger, spec, at, cluster) is not None) == (kept and asked_before)
    found = ledger.window(spec, at, "allocated", 0.98, cluster=cluster)
    assert cached(ledger, spec, at, cluster) == found == from_the_tables(ledger, spec, at, cluster)


@pytest.mark.parametrize("half_life", [None, 3600])
def test_another_cluster_that_begins_to_report_in_between(ledger: DuckLedger, hand: Any, half_life: int | None) -> None:
    ledger.put_policy(POLICY, hand.start_ms)
    ledger.append([hand.batch(hand.fact(1, queue_ref="kai:a"), hand.row(2, 0, 10))], hand.now_ms)
    spec, at = WindowSpec(size=HOUR, half_life=half_life), hand.start_ms + 12 * MS_PER_MINUTE
    alone = ledger.window(spec, at, "allocated", 0.98, cluster="prod")
    fact = hand.fact(1, queue_ref="kai:a")
    ledger.append([hand.batch(fact, hand.row(2, 0, 12), cluster="staging")], hand.now_ms)
    both = ledger.window(spec, at, "allocated", 0.98)
    assert ledger.window(spec, at, "allocated", 0.98, cluster="prod") == alone
    assert both.usage["a"] > ledger.window(spec, at, "allocated", 0.98, cluster="staging").usage["a"] > 0


@pytest.fixture
def booked(ledger: DuckLedger, hand: Any) -> int:
    """Books an hour and a half of one-minute rows, and returns its end."""
    ledger.put_policy(POLICY, hand.start_ms)
    rows = [hand.row(2 + minute, minute, minute + 1) for minute in range(90)]
    ledger.append([hand.batch(hand.fact(1, queue_ref="kai:a"), *rows)], hand.start_ms + 3 * MS_PER_HOUR)
    end_ms: int = hand.start_ms + 90 * MS_PER_MINUTE
    return end_ms


@pytest.mark.parametrize("half_life", [None, HOUR])
@pytest.mark.parametrize("minutes", [0, 7, 22])
def test_a_window_that_slides_on_over_new_rows_is_answered_from_the_cache(
    ledger: DuckLedger, hand: Any, booked: int, half_life: int | None, minutes: int
) -> None:
    spec = WindowSpec(size=HOUR, half_life=half_life)
    ledger.window(spec, booked, "allocated", 0.98)
    for minute in range(minutes):
        row = hand.row(92 + minute, 90 + minute, 91 + minute)
        ledger.append([hand.batch(row)], hand.start_ms + 3 * MS_PER_HOUR)
        ledger.window(spec, booked + minute * MS_PER_MINUTE, "allocated", 0.98)
    later = booked + minutes * MS_PER_MINUTE
    found = cached(ledger, spec, later)
    assert found is not None
    assert found == from_the_tables(ledger, spec, later)


def test_the_view_asked_for_least_recently_goes_first(ledger: DuckLedger, hand: Any, booked: int) -> None:
    specs = [WindowSpec(size=HOUR, half_life=HOUR + number) for number in range(MOST_KEYS + 1)]
    for spec in specs:
        ledger.window(spec, booked, "allocated", 0.98)
    ledger.append([hand.batch(hand.row(92, 90, 91))], hand.start_ms + 3 * MS_PER_HOUR)
    later = booked + MS_PER_MINUTE
    assert cached(ledger, specs[0], booked) is None
    kept = cached(ledger, specs[-1], booked)
    assert kept is not None
    assert kept == from_the_tables(ledger, specs[-1], booked)
    assert ledger.window(specs[0], later, "allocated", 0.98) == from_the_tables(ledger, specs[0], later)


@pytest.mark.parametrize("half_life", [None, HOUR])
def test_sums_that_64_bits_do_not_hold_are_exact(ledger: DuckLedger, hand: Any, half_life: int | None) -> None:
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
    ledger._windows.sums.clear(ledger._state.version)
    assert ledger.window(spec, end_ms, "energy", 0.98) == found


VALUES = st.one_of(st.integers(0, 10**12), st.integers(0, 2**70))


@given(st.lists(st.tuples(st.integers(0, 3), VALUES), min_size=1, max_size=12))
def test_tables_are_added_up_as_python_adds_integers(lines: list[tuple[int, int]]) -> None:
    parts = []
    for place, value in lines:
        values = np.array([[value] * len(Figures._fields)], dtype=object if value >= 2**63 else np.int64)
        parts.append(Sums(np.array([[0, 0, place, 1]], np.int64), values))
    expected: dict[int, int] = defaultdict(int)
    for place, value in lines:
        expected[place] += value
    found = added_up(parts)
    assert dict(zip(found.keys[:, 2].tolist(), found.values[:, 0].tolist(), strict=True)) == expected
