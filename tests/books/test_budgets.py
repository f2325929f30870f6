"""Budgets: spent exactly, queues with their descendants, unknown said so, and a forecast that knows its doubt."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.budgets import states
from accountant.forecast import run_rate
from accountant.periods import Month
from accountant.wire import Policy
from accountant.yamlfile import validate
from agent.yamlfile import FileFault, parse

TREE = """
queues:
  - {name: research}
  - {name: vision, parent: research, team: vision}
  - {name: nlp, parent: research, team: nlp}
  - {name: ops, team: ops}
budgets:
"""
BOOK = "id: a, model: H100, price: '2.50', valid_from: 2026-01-01"
OCT = Month(2026, 10)


def policy(*budgets):
    return validate(parse(TREE + "".join(f"  - {{{budget}}}\n" for budget in budgets), "policy.yaml"), Policy)


@pytest.fixture
def ask(books):
    def run(rows, *budgets, now="2026-10-11", book=BOOK):
        prices = books.price_book(book) if book else None
        return states(books.ledger(rows), prices, policy(*budgets), OCT, books.at(now), "UTC")

    return run


def test_a_queue_counts_its_descendants(books, ask):
    rows = [
        books.held("2026-10-01", "2026-10-11", 1, 0.1),
        books.held("2026-10-01", "2026-10-11", 2, team="nlp", queue="nlp"),
        books.held("2026-10-01", "2026-10-11", 4, team="ops", queue="ops"),
        books.unheld("2026-10-01", "2026-10-11", gpus=8),
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


def test_unpriced_time_makes_money_unknown_and_hours_not(books, ask):
    rows = [books.held("2026-10-01", "2026-10-11"), books.held("2026-10-01", "2026-10-02", gpu_model="Tesla T4")]
    budgets = "name: m, team: vision, limit: 10, currency: USD", "name: h, team: vision, limit: 528"
    money, hours = ask(rows, *budgets)
    assert (money.spent, money.ratio, money.threshold, money.forecast) == (None, None, None, None)
    assert (hours.spent, hours.ratio) == (264, 0.5)
    assert ask(rows, "name: e, team: vision, limit: 10, currency: EUR")[0].spent is None
    assert ask(rows, *budgets, book=None)[0].spent is None


def test_few_days_have_no_forecast(books, ask):
    rows = [books.held("2026-10-01", "2026-11-01")]
    assert ask(rows, "name: h, team: vision, limit: 744", now="2026-10-03T12:00")[0].forecast is None
    ended = ask(rows, "name: h, team: vision, limit: 744", now="2026-12-01")[0]
    assert (ended.spent, ended.forecast, ended.threshold) == (744, 744.0, 1.0)
    assert ask(rows, "name: h, team: vision, limit: 744", now="2026-09-01")[0].spent == 0


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("name: b, limit: 1", "budgets.0: Value error, budget 'b' is of a queue or of a team"),
        ("name: b, queue: q, limit: 1", "budgets.0.queue: budget 'b' is of the unknown queue 'q'"),
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
