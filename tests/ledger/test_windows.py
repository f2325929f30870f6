"""The bounds of windows of each kind, and windows from the cache, which equal those from the tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from accountant.billing.usage_pricing import PricedUsage
from accountant.core.window_decay import bounds, factor, term
from accountant.ledger.protocols import policy_at
from accountant.ledger.usage import PRICED_BY, Usage
from accountant.prices.price_book import PriceBook
from accountant.prices.unit_prices import memory_to_compute
from accountant.runtime.background_tasks import warm
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.query.gpu_weights import GpuGroup, Weighting
from accountant.storage.query.window_query import Windows
from accountant.storage.query.window_sums import MOST_KEYS, Figures, Sums, added_up
from accountant.wire.policy_models import Policy, QueuePolicy, UsageWindow, WindowSpec
from gputally.base.clock import VirtualClock
from gputally.base.units import BUCKET_MS, MS_PER_HOUR, MS_PER_MINUTE, US_PER_HOUR
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Hand
from tests.moments import present
from tests.properties.interval_streams import total

BERLIN, NEW_YORK, KIRITIMATI = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York"), ZoneInfo("Pacific/Kiritimati")
WEEK_S = 604_800


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def begin(at: str, zone: ZoneInfo = BERLIN, **spec: object) -> str:
    start, end = bounds(WindowSpec.model_validate(spec), ms(at), zone)
    assert end == ms(at)
    return datetime.fromtimestamp(start / 1000, zone).isoformat()


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("2026-11-02T00:00:00+01:00", "2026-10-26T00:00:00+01:00"),  # at a firing: the week that has just ended
        ("2026-11-02T00:00:00.001+01:00", "2026-11-02T00:00:00+01:00"),
        ("2026-11-01T23:59:59.999+01:00", "2026-10-26T00:00:00+01:00"),
        ("2026-10-25T12:00:00+01:00", "2026-10-19T00:00:00+02:00"),  # the week with 169 hours
        ("2026-04-01T12:00:00+02:00", "2026-03-30T00:00:00+02:00"),
    ],
)
def test_a_cron_window_begins_at_the_last_firing_before(at, expected):
    assert begin(at, kind="cron", cron="0 0 * * 1") == expected


def test_cron_goes_by_the_time_zone_of_the_books():
    assert begin("2026-11-01T12:00:00Z", KIRITIMATI, kind="cron", cron="0 0 1 * *") == "2026-11-01T00:00:00+14:00"
    assert begin("2026-03-08T12:00:00Z", NEW_YORK, kind="cron", cron="30 3 * * *") == "2026-03-08T03:30:00-04:00"


@pytest.mark.parametrize(
    ("at", "start", "expected"),
    [
        ("2026-11-04T00:00:00Z", "2026-11-02T00:00:00Z", "2026-11-02T00:00:00+00:00"),
        ("2026-11-09T00:00:00Z", "2026-11-02T00:00:00Z", "2026-11-02T00:00:00+00:00"),
        ("2026-11-09T00:00:00.001Z", "2026-11-02T00:00:00Z", "2026-11-09T00:00:00+00:00"),
        ("2026-10-27T00:00:00Z", "2026-11-02T00:00:00Z", "2026-10-26T00:00:00+00:00"),  # before the first one too
        ("2026-11-04T00:00:00Z", "2026-11-02T01:00:00+02:00", "2026-11-01T23:00:00+00:00"),
    ],
)
def test_a_tumbling_window_begins_a_multiple_of_its_size_from_its_start(at, start, expected):
    assert begin(at, ZoneInfo("UTC"), kind="tumbling", size="7d", start=start) == expected


def test_a_calendar_window_is_the_local_month():
    assert begin("2026-11-01T00:00:00+01:00", kind="calendar") == "2026-10-01T00:00:00+02:00"
    assert begin("2026-10-31T10:30:00Z", KIRITIMATI, kind="calendar") == "2026-11-01T00:00:00+14:00"


KINDS = [
    {"kind": "sliding", "size": WEEK_S},
    {"kind": "tumbling", "size": 5 * 3600},
    {"kind": "tumbling", "size": WEEK_S, "start": "2026-01-05T00:00:30Z"},
    {"kind": "cron", "cron": "15 2 * * *"},
    {"kind": "cron", "cron": "*/7 * * * *"},
    {"kind": "calendar"},
]


@given(
    st.sampled_from(KINDS),
    st.integers(ms("2000-01-01T00:00:00Z"), ms("2060-01-01T00:00:00Z")),
    st.sampled_from([BERLIN, NEW_YORK, KIRITIMATI, ZoneInfo("UTC")]),
)
def test_a_window_is_never_empty_and_one_boundary_follows_the_other(spec, at, zone):
    window = WindowSpec.model_validate(spec)
    start, end = bounds(window, at, zone)
    assert start < end == at
    if window.kind != "sliding":
        before, boundary = bounds(window, start, zone)
        assert before < boundary == start
        assert bounds(window, start + 1, zone)[0] == start  # seen from just after it, the boundary is the same
        assert all(bounds(window, at - k * (at - start) // 4, zone)[0] == start for k in range(4))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"kind": "cron"}, "belong together"),
        ({"cron": "0 0 * * 1"}, "belong together"),
        ({"kind": "cron", "cron": "0 0 * *"}, "not a cron expression"),
        ({"kind": "cron", "cron": "61 0 * * *"}, "not a cron expression"),
        ({"kind": "cron", "cron": "0 0 30 2 *"}, "not a cron expression"),
        ({"kind": "cron", "cron": "R 0 * * *"}, "not a cron expression"),
        ({"kind": "cron", "cron": "H 0 * * *"}, "not a cron expression"),
        ({"start": datetime(2026, 1, 1, tzinfo=UTC)}, "only a tumbling window has a start"),
        ({"kind": "tumbling", "start": "2026-01-01T00:00:00"}, "timezone"),
    ],
)
def test_what_is_no_window_is_refused(spec, reason):
    with pytest.raises(ValidationError, match=reason):
        WindowSpec.model_validate(spec)


HOUR = 3600
QUEUES = [{"name": "a", "refs": ["kai:a"]}, {"name": "b", "refs": ["kai:b"]}]
POLICY = Policy.model_validate({"queues": QUEUES})


def cached(ledger: DuckLedger, spec: WindowSpec, at_ms: int, cluster: str | None = None) -> UsageWindow | None:
    """The window from the cache, or None if the cache lacks a sum."""
    return ledger._windows.window(None, ledger._state, spec, at_ms, "allocated", 0.98, cluster=cluster)


def from_the_tables(ledger: DuckLedger, spec: WindowSpec, at_ms: int, cluster: str | None = None) -> UsageWindow:
    ledger._windows.sums.clear(ledger._state.version)
    return present(ledger).window(spec, at_ms, "allocated", 0.98, cluster=cluster)


def more(hand: Any) -> Any:
    """Later rows of a pod that has rows already, and of a new pod."""
    return hand.batch(hand.row(3, 10, 12), hand.fact(4, "pod-2", queue_ref="kai:b"), hand.row(5, 12, 14))


def another_queue(hand: Any) -> Any:
    return hand.batch(hand.fact(3, queue_ref="kai:b", observed_ms=hand.start_ms + 1), hand.row(4, 10, 12))


def late(hand: Any) -> Any:
    """A set that displaces a stored set, so that the commit does not only add rows."""
    return hand.batch(hand.row(1, 4, 6, holder=None), epoch="0191-a")


@pytest.mark.parametrize(
    ("cluster", "half_life", "minutes"), [(None, None, 15), (None, 3600, 12), ("prod", None, 12), ("prod", 3600, 15)]
)  # a whole quarter of an hour, or a part of one
@pytest.mark.parametrize(("meanwhile", "kept"), [(more, True), (another_queue, False), (late, False)])
@pytest.mark.parametrize("asked_before", [True, False])
def test_a_commit_between_the_snapshot_and_the_answer(
    send, ledger, hand, cluster, half_life, minutes, meanwhile, kept, asked_before
):
    ledger.put_policy(POLICY, hand.start_ms)
    send(hand.fact(1, queue_ref="kai:a"), hand.row(2, 0, 10))
    if cluster is not None:
        send(hand.row(1, 0, 10), cluster="staging")
    spec, at = WindowSpec(size=HOUR, half_life=half_life), hand.start_ms + minutes * MS_PER_MINUTE
    before = present(ledger).window(spec, at, "allocated", 0.98, cluster=cluster)
    if not asked_before:
        ledger._windows.sums.clear(ledger._state.version)
    with ledger._snapshot() as (cursor, state):
        ledger.append([meanwhile(hand)], hand.now_ms)
        asked = ledger._windows.window(cursor, state, spec, at, "allocated", 0.98, cluster=cluster)
    assert asked == before, "as its snapshot shows it"
    assert (cached(ledger, spec, at, cluster) is not None) == (kept and asked_before)
    found = present(ledger).window(spec, at, "allocated", 0.98, cluster=cluster)
    assert cached(ledger, spec, at, cluster) == found == from_the_tables(ledger, spec, at, cluster)


@pytest.mark.parametrize("half_life", [None, 3600])
def test_another_cluster_that_begins_to_report_in_between(send, ledger, hand, half_life):
    ledger.put_policy(POLICY, hand.start_ms)
    send(hand.fact(1, queue_ref="kai:a"), hand.row(2, 0, 10))
    spec, at = WindowSpec(size=HOUR, half_life=half_life), hand.start_ms + 12 * MS_PER_MINUTE
    alone = present(ledger).window(spec, at, "allocated", 0.98, cluster="prod")
    fact = hand.fact(1, queue_ref="kai:a")
    send(fact, hand.row(2, 0, 12), cluster="staging")
    both = present(ledger).window(spec, at, "allocated", 0.98)
    assert present(ledger).window(spec, at, "allocated", 0.98, cluster="prod") == alone
    assert both.usage["a"] > present(ledger).window(spec, at, "allocated", 0.98, cluster="staging").usage["a"] > 0


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
    send, ledger, hand, booked, half_life, minutes
):
    spec = WindowSpec(size=HOUR, half_life=half_life)
    present(ledger).window(spec, booked, "allocated", 0.98)
    for minute in range(minutes):
        row = hand.row(92 + minute, 90 + minute, 91 + minute)
        send(row, now_ms=hand.start_ms + 3 * MS_PER_HOUR)
        present(ledger).window(spec, booked + minute * MS_PER_MINUTE, "allocated", 0.98)
    later = booked + minutes * MS_PER_MINUTE
    found = cached(ledger, spec, later)
    assert found is not None
    assert found == from_the_tables(ledger, spec, later)


def test_the_view_asked_for_least_recently_goes_first(send, ledger, hand, booked):
    specs = [WindowSpec(size=HOUR, half_life=HOUR + number) for number in range(MOST_KEYS + 1)]
    for spec in specs:
        present(ledger).window(spec, booked, "allocated", 0.98)
    send(hand.row(92, 90, 91), now_ms=hand.start_ms + 3 * MS_PER_HOUR)
    later = booked + MS_PER_MINUTE
    assert cached(ledger, specs[0], booked) is None
    kept = cached(ledger, specs[-1], booked)
    assert kept is not None
    assert kept == from_the_tables(ledger, specs[-1], booked)
    assert present(ledger).window(specs[0], later, "allocated", 0.98) == from_the_tables(ledger, specs[0], later)


@pytest.mark.parametrize("half_life", [None, HOUR])
def test_sums_that_64_bits_do_not_hold_are_exact(send, ledger, hand, half_life):
    energy = 10**15 - 1
    rows = [hand.row(2 + minute, minute, minute + 1, energy_uj=energy) for minute in range(30)]
    ledger.put_policy(POLICY, hand.start_ms)
    send(hand.fact(1, queue_ref="kai:a"), *rows)
    spec, end_ms = WindowSpec(size=HOUR, half_life=half_life), hand.start_ms + 30 * MS_PER_MINUTE
    found = present(ledger).window(spec, end_ms, "energy", 0.98)
    if half_life is None:
        assert found.usage["a"] == 30 * energy
    terms = defaultdict[int, int](int)
    for row in rows:
        reference = row.start_ms - row.start_ms % BUCKET_MS + BUCKET_MS
        terms[reference] += term(energy, factor(row.start_ms, row.end_ms, reference, half_life))
    assert found.usage["a"] == total(sorted(terms.items()), end_ms, half_life)
    ledger.checkpoint()
    ledger._windows.sums.clear(ledger._state.version)
    assert present(ledger).window(spec, end_ms, "energy", 0.98) == found


VALUES = st.one_of(st.integers(0, 10**12), st.integers(0, 2**70))


@given(st.lists(st.tuples(st.integers(0, 3), VALUES), min_size=1, max_size=12))
def test_tables_are_added_up_as_python_adds_integers(lines):
    parts = []
    for place, value in lines:
        values = np.array([[value] * len(Figures._fields)], dtype=object if value >= 2**63 else np.int64)
        parts.append(Sums(np.array([[0, 0, place, 1]], np.int64), values))
    expected: dict[int, int] = defaultdict(int)
    for place, value in lines:
        expected[place] += value
    found = added_up(parts)
    assert dict(zip(found.keys[:, 2].tolist(), found.values[:, 0].tolist(), strict=True)) == expected


class CountingWindows(Windows):
    """Counts the windows for which a table was read."""

    read = 0

    def window(self, cursor: Cursor | None, *asked: Any) -> UsageWindow | None:
        self.read += cursor is not None
        return super().window(cursor, *asked)


class Counting(DuckLedger):
    def __init__(self, path: Path, clock: VirtualClock) -> None:
        super().__init__(path, clock)
        self._windows = self.windows = CountingWindows(ZoneInfo("UTC"))

    @property
    def read(self) -> int:
        return self.windows.read


@pytest.fixture
def counting(path: Path, clock: VirtualClock, hand: Hand) -> Iterator[Counting]:
    """An hour of one-minute rows and a policy with a half-life, in a ledger with an empty cache."""
    ledger = Counting(path, clock)
    ledger.append([hand.batch(*(hand.row(i + 1, i, i + 1) for i in range(58)))], NOW_MS)
    spec = WindowSpec(size=3_600, half_life=1_800)
    ledger.put_policy(Policy(window=spec, queues=(QueuePolicy(name="q"),)), START_MS)
    ledger.close()
    ledger = Counting(path, clock)
    yield ledger
    ledger.close()


def warmed(ledger: DuckLedger) -> Policy:
    """The policy in force, whose window has been queried once."""
    version = policy_at(ledger.status(), NOW_MS)
    assert version is not None
    warm(ledger, version.policy, None, NOW_MS)
    return version.policy


def test_the_next_window_needs_no_table(counting, path, clock):
    spec = warmed(counting).window
    read = counting.read
    assert read
    found = present(counting).window(spec, NOW_MS, "allocated", 0.98)
    assert found.watermark_ms is not None
    assert found.watermark_ms < NOW_MS
    present(counting).window(spec, found.watermark_ms, "allocated", 0.98)
    assert counting.read == read
    counting.close()
    with closing(Counting(path, clock)) as cold:
        assert present(cold).window(spec, NOW_MS, "allocated", 0.98) == found
        assert cold.read == 1


def test_nor_does_one_of_a_cluster_of_several(counting, hand):
    rows = (hand.row(i + 1, i, i + 1) for i in range(50))
    counting.append([hand.batch(*rows, cluster="staging")], NOW_MS)
    spec = warmed(counting).window
    read = counting.read
    for cluster in ("prod", "staging", None):
        assert present(counting).window(spec, NOW_MS, "allocated", 0.98, cluster=cluster).capacity > 0
    assert counting.read == read


def test_without_a_policy_nothing_is_asked(ledger):
    assert policy_at(ledger.status(), NOW_MS) is None


PRICES = [
    {"id": "spot", "model": "H100", "capacity_type": "spot", "price": "1.1"},
    {"id": "pool", "model": "H100", "pool": "a", "capacity_type": "on-demand", "price": "4.123456"},
    {"id": "early", "model": "H100", "price": "6.88", "valid_to": "2026-10-01"},
    {"id": "late", "model": "H100", "price": "6.451", "discount": "0.125", "valid_from": "2026-10-01"},
    {"id": "a100", "model": "A100-80GB", "price": "2.7401"},
]


@given(
    group=st.builds(
        GpuGroup,
        st.just("prod"),
        st.sampled_from(("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla T4", "")),
        st.sampled_from(("", "1g.10gb", "3g.40gb", "1g.10gb+me", "nonsense")),
        st.sampled_from(("", "a", "b")),
        st.sampled_from(("", "eu")),
        st.sampled_from(("", "spot", "on-demand")),
    ),
    minute=st.integers(-2, 2),
    basis=st.sampled_from(("compute", "memory")),
)
def test_time_costs_in_a_window_what_it_costs_in_a_bill(group: GpuGroup, minute: int, basis: str) -> None:
    told = {"per": "gpu-hour", "valid_from": "2026-01-01", "source": "s", "as_of": "2026-01-01", "basis": "gpu-only"}
    book = PriceBook.model_validate(
        {"schema": 1, "currency": "EUR", "timezone": "UTC", "mig_basis": basis, "rows": [told | row for row in PRICES]}
    )
    at_ms = START_MS + minute * MINUTE
    weighting = Weighting(book)
    profile = group.profile if weighting.uses_profiles else ""
    row = book.unit_price(group.gpu_model, at_ms, group.pool, group.region, group.capacity_type)
    share = memory_to_compute(profile, group.gpu_model)
    known = None if row is None or share is None else Fraction(row.price) * share * Fraction(10**9, US_PER_HOUR)
    assert weighting.weight(group._replace(profile=profile), at_ms) == known
    assert weighting.price_changes(at_ms, at_ms + 5 * MINUTE) == book.cuts(at_ms, at_ms + 5 * MINUTE)
    held = [7_000_000, 0, 0, 0, 0, 0]
    usage = Usage.of_rows((*PRICED_BY, "mig_profile"), [(0, (group.gpu_model, *group[3:6], profile), held)], ())
    (busy,) = (c for c in PricedUsage.of(usage, (), book, [at_ms]).without_details().charges() if c.account == "busy")
    assert busy.row == (None if known is None else row), "and in a bill"
