"""Budgets: exact spending, queues with their descendants, unknown usage, and a forecast with its uncertainty."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.billing.budget_forecast import limit_forecast, run_rate, states
from accountant.core.periods import Month, zone
from accountant.reports.report_builder import build
from accountant.wire.policy_models import Policy
from accountant.wire.usage_cost_and_job_models import Accounts
from gputally.base.units import US_PER_HOUR
from gputally.base.yaml_file import FileFault, parse
from gputally.server.config_loading import validate
from tests.billing.usage_rows import OCT, at, held, ledger_of, price_book, unheld
from tests.fakes.list_ledger import ListLedger, Row

TREE = """
queues:
  - {name: research}
  - {name: vision, parent: research, team: vision}
  - {name: nlp, parent: research, team: nlp}
  - {name: ops, team: ops}
budgets:
"""
BOOK = "id: a, model: H100, price: '2.50', valid_from: 2026-01-01"


def policy(*budgets):
    return validate(parse(TREE + "".join(f"  - {{{budget}}}\n" for budget in budgets), "policy.yaml"), Policy)


@pytest.fixture
def ask():
    def run(rows, *budgets, now="2026-10-11", book=BOOK):
        prices = price_book(book) if book else None
        return states(ListLedger(rows), prices, policy(*budgets), OCT, at(now), "UTC")

    return run


def test_a_queue_counts_its_descendants(ask):
    rows = [
        held("2026-10-01", "2026-10-11", 1, 0.1),
        held("2026-10-01", "2026-10-11", 2, team="nlp", queue="nlp"),
        held("2026-10-01", "2026-10-11", 4, team="ops", queue="ops"),
        unheld("2026-10-01", "2026-10-11", gpus=8),
    ]
    found = ask(
        rows,
        "name: all-research, queue: research, limit: 2400, currency: USD",
        "name: nlp-hours, team: nlp, limit: 1000",
        "name: leaf, queue: vision, limit: 240",
    )
    assert [(s.name, s.unit, s.spent, s.ratio, s.threshold) for s in found] == [
        ("all-research", "USD", Decimal(1800), 0.75, 0.5),
        ("nlp-hours", "GPU-hours", Decimal(480), 0.48, None),
        ("leaf", "GPU-hours", Decimal(240), 1.0, 1.0),
    ]
    # Ten equal days of thirty-one: no doubt about the rest.
    assert (found[0].forecast, found[0].forecast_low, found[0].forecast_high) == (5580.0, 5580.0, 5580.0)


def test_limits_by_model_count_their_own_gpus_alone(ask):
    """vision holds one H100 and two A10 for ten days; the third T4 has no limit of its own, and counts in the whole."""
    rows = [
        held("2026-10-01", "2026-10-11", 1),
        held("2026-10-01", "2026-10-11", 2, gpu_model="NVIDIA A10"),
        held("2026-10-01", "2026-10-11", 1, gpu_model="Tesla T4"),
        held("2026-10-01", "2026-10-11", 4, team="nlp", queue="nlp"),
    ]
    found = ask(
        rows,
        "name: v, team: vision, limit: 1200, gpu_models: {H100: 240, A10: 1000}",
        "name: n, team: nlp, limit: 2000",
    )
    assert [(s.name, s.gpu_model, s.limit, s.spent, s.threshold) for s in found] == [
        ("v", "", 1200, 960, 0.8), ("v: H100", "H100", 240, 240, 1.0), ("v: A10", "A10", 1000, 480, None),
        ("n", "", 2000, 960, None),
    ]  # fmt: skip


def test_unpriced_time_makes_money_unknown_and_hours_not(ask):
    rows = [held("2026-10-01", "2026-10-11"), held("2026-10-01", "2026-10-02", gpu_model="Tesla T4")]
    budgets = "name: m, team: vision, limit: 10, currency: USD", "name: h, team: vision, limit: 528"
    money, hours = ask(rows, *budgets)
    assert (money.spent, money.ratio, money.threshold, money.forecast) == (None, None, None, None)
    assert (hours.spent, hours.ratio) == (264, 0.5)
    assert ask(rows, "name: e, team: vision, limit: 10, currency: EUR")[0].spent is None
    assert ask(rows, *budgets, book=None)[0].spent is None


def test_what_nobody_metered_spent_an_unknown_amount(ask):
    unmetered = Row(at("2026-10-01"), at("2026-10-11"), Accounts(unmetered=240 * US_PER_HOUR), {"gpu_model": "H100"})
    for budget in ("name: m, team: vision, limit: 10, currency: USD", "name: h, team: vision, limit: 528"):
        assert [found.spent for found in ask([unmetered], budget)] == [None]
        known = [unmetered, unheld("2026-10-01", "2026-10-02")]
        assert [found.spent for found in ask(known, budget)] == [0], "the rest of the GPUs were free"
        assert [found.spent for found in ask([], budget, now="2026-10-01")] == [0], "nothing of the month is over"


def test_few_days_have_no_forecast(ask):
    rows = [held("2026-10-01", "2026-11-01")]
    assert ask(rows, "name: h, team: vision, limit: 744", now="2026-10-03T12:00")[0].forecast is None
    ended = ask(rows, "name: h, team: vision, limit: 744", now="2026-12-01")[0]
    assert (ended.spent, ended.forecast, ended.threshold) == (744, None, 1.0), "what is over needs no forecast"
    assert ask(rows, "name: h, team: vision, limit: 744", now="2026-09-01")[0].spent == 0


def test_days_before_the_ledger_began_are_not_days_without_use(ask):
    """Installed on the 20th at noon: one day at 24 GPU-hours predicts the rest of the month."""
    rows = [held("2026-10-20T12:00", "2026-10-27")]
    found = ask(rows, "name: h, team: vision, limit: 250", now="2026-10-27")[0]
    assert (found.spent, found.forecast, found.forecast_low) == (156, 276.0, 276.0)
    assert found.exhausted_ms == at("2026-10-30T22:00")
    # What the ledger was there for and the team did not use are days of the team's month.
    late = [*rows, unheld("2026-10-01", "2026-10-20T12:00")]
    assert ask(late, "name: h, team: vision, limit: 250", now="2026-10-27")[0].forecast == pytest.approx(156 + 5 * 6)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("name: b, limit: 1", "budgets.0: Value error, budget 'b' needs either a queue or a team"),
        ("name: b, queue: q, limit: 1", "budgets.0.queue: budget 'b' names the unknown queue 'q'"),
        ("name: b, team: t, limit: 0", "budgets.0.limit: "),
        ("name: b, team: t, limit: 1, currency: Euro", "budgets.0.currency: "),
    ],
)
def test_refused_budgets(budget, message):
    with pytest.raises(FileFault) as fault:
        policy(budget)
    assert message.replace("Value error, ", "") in str(fault.value).replace("Value error, ", "")
    with pytest.raises(FileFault, match=r"budgets\.1\.name: budget 'b' is defined twice"):
        policy("name: b, team: t, limit: 1", "name: b, team: u, limit: 1")


AMOUNTS = st.floats(0, 1e6, allow_nan=False)


@given(st.lists(AMOUNTS, max_size=31), AMOUNTS, st.floats(0, 31))
def test_a_forecast_never_undoes_what_is_spent(days, today, left):
    spent = sum(days) + today
    found = run_rate(days, spent, left)
    if len(days) < 3:
        assert found is None
        return
    assert spent <= found.low <= found.expected * (1 + 1e-12) + 1e-6
    assert found.expected <= found.high * (1 + 1e-12) + 1e-6
    assert run_rate(days[::-1], spent, left) == found


def test_more_doubt_with_fewer_days():
    few, many = run_rate([1, 3, 2], 6, 10), run_rate([1, 3, 2] * 5, 30, 10)
    assert few.high - few.low > many.high - many.low > 0


def test_equal_days_tell_the_instant_at_which_a_budget_ends(ask):
    rows = [held("2026-10-01", "2026-11-01")]
    (found,) = ask(rows, "name: h, team: vision, limit: 400")
    # 240 of 400 GPU-hours in ten days: 24 a day, so six days and sixteen hours more, without a doubt.
    expected = at("2026-10-17T16:00")
    assert (found.exhausted_ms, found.exhausted_earliest_ms, found.exhausted_latest_ms) == (expected,) * 3
    (beyond,) = ask(rows, "name: h, team: vision, limit: 744")
    assert (beyond.exhausted_ms, beyond.exhausted_earliest_ms, beyond.exhausted_latest_ms) == (None,) * 3
    (few,) = ask(rows, "name: h, team: vision, limit: 400", now="2026-10-03T12:00")
    assert few.exhausted_ms is None


@pytest.mark.parametrize(
    ("timezone", "month", "days_over"),
    [
        ("America/Santiago", Month(2026, 9), 15),  # a day of 23 hours is over
        ("America/Santiago", Month(2026, 4), 15),  # of 25
        ("Europe/Berlin", Month(2026, 10), 20),
        ("Asia/Kathmandu", Month(2028, 2), 10),
    ],
)
def test_even_use_is_told_to_the_hour_also_where_the_clocks_change(timezone, month, days_over):
    """A GPU that is always held uses as many GPU-hours as its month has, and the forecast has no reason for less."""
    start, end = month.span(zone(timezone))
    now = start + days_over * 86_400_000 - 7 * 3_600_000
    ledger = ledger_of(held(start, now))
    two = policy("name: h, team: vision, limit: 10000", "name: few, team: vision, limit: 600")
    whole, few = states(ledger, None, two, month, now, timezone)
    hours = pytest.approx((end - start) / 3_600_000, rel=1e-12)
    assert (whole.forecast, whole.forecast_low, whole.forecast_high) == (hours,) * 3
    assert few.exhausted_ms == pytest.approx(start + 600 * 3_600_000, abs=2)
    assert few.exhausted_latest_ms is not None
    assert few.exhausted_latest_ms - few.exhausted_earliest_ms < 1_000
    report = build(ledger, price_book(BOOK, timezone=timezone), start, now, timezone)
    assert report.outlook.forecast.high == pytest.approx((end - start) / 3_600_000 * 2.5, rel=1e-12)


def test_a_budget_that_is_used_up_says_since_when(ask):
    rows = [held("2026-10-01", "2026-10-05"), held("2026-10-05", "2026-10-06", 3)]
    for now in ("2026-10-11", "2026-12-01"):
        (found,) = ask(rows, "name: h, team: vision, limit: 132", now=now)
        assert found.exhausted_ms == at("2026-10-05T12:00"), "96 in four days, 36 of 72 on the fifth"
        assert (found.exhausted_earliest_ms, found.exhausted_latest_ms) == (found.exhausted_ms,) * 2
    rows.append(held("2026-10-01", "2026-10-02", gpu_model="Tesla T4"))
    (unknown,) = ask(rows, "name: m, team: vision, limit: 1, currency: USD")
    assert unknown.exhausted_ms is None


def test_uneven_days_leave_a_doubt_that_the_month_cuts(ask):
    rows = [held(f"2026-10-{day:02d}", f"2026-10-{day + 1:02d}", 1 + day % 3) for day in range(1, 11)]
    (found,) = ask(rows, "name: h, team: vision, limit: 600")
    assert at("2026-10-11") < found.exhausted_earliest_ms < found.exhausted_ms < found.exhausted_latest_ms
    (late,) = ask(rows, "name: h, team: vision, limit: 1440")
    assert (late.exhausted_ms is not None, late.exhausted_latest_ms) == (True, None)


@given(st.lists(st.floats(0.01, 1e5), min_size=3, max_size=31), st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_bounds_of_the_date_are_where_the_forecasts_bounds_meet_the_limit(days, spent, more):
    limit = spent + more
    found = limit_forecast(days, spent, limit)
    assert 0 <= found.earliest <= found.expected
    assert found.latest is None or found.expected <= found.latest
    slack = 1e-6 * max(1.0, limit)
    for left, bound in ((found.expected, "expected"), (found.earliest, "high"), (found.latest, "low")):
        if left is not None and more:
            at = run_rate(days, spent, left)
            assert getattr(at, bound) == pytest.approx(limit, rel=1e-6, abs=slack)


def test_without_any_use_a_limit_is_never_reached():
    assert limit_forecast([0.0] * 5, 0, 10) is None
    assert limit_forecast([1.0] * 2, 2, 10) is None
    assert limit_forecast([1.0] * 3, 12, 10).expected == 0
