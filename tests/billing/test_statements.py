"""Statements: lines add up to the last cent, every microsecond stands once, bytes never change."""

from __future__ import annotations

import hashlib
import json
import os
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.cost_allocation import statement
from accountant.billing.statements import canonical
from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.periods import Month, zone
from tests.effort import examples

BOOK = (
    "id: h100, model: H100, price: '2.10', valid_from: 2026-01-01, valid_to: 2026-10-16\n"
    "id: h100-new, model: H100, price: '2.33', valid_from: 2026-10-16\n"
    "id: h100-spot, model: H100, capacity_type: spot, price: '0.997', valid_from: 2026-01-01"
)


@pytest.fixture
def october(books):
    """A month with every account, a price change, a spot pool, an unpriced GPU and hostile names."""
    month = "2026-10-01", "2026-11-01"
    return [
        books.held("2026-10-01", "2026-10-20T10:20:30.001", busy=0.5),
        books.held("2026-10-10", "2026-10-20", busy=None, team="nlp"),
        books.held("2026-10-03", "2026-10-05T07:00:00.013", team="nlp", capacity_type="spot", busy=0.93),
        books.held("2026-10-03", "2026-10-04", team="=HYPERLINK(1)", gpu_model="Tesla T4"),
        books.unheld("2026-10-20T10:20:30.001", month[1]),
        books.unheld(*month, account="down"),
        books.unheld("2026-10-30", month[1], account="unmetered"),
    ]


def of_october(books, rows, timezone="UTC"):
    span = Month(2026, 10).span(zone(timezone))
    book = books.price_book(BOOK, timezone=timezone)
    return statement(books.ledger(rows), book, *span, timezone)


def test_every_microsecond_stands_on_one_line(books, october):
    found = of_october(books, october)
    assert found.gpu_us == sum(row.accounts.total for row in october)
    assert found.gpu_hours == sum(line.gpu_hours for line in found.lines)
    assert {line.account for line in found.lines} == {
        "busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down",
    }  # fmt: skip


def test_what_is_billed(books, october):
    lines = of_october(books, october).lines
    for line in lines:
        if line.account in ("down", "unmetered"):
            assert (line.cost, line.unit_price, line.price_row) == (0, None, None)
        elif line.gpu_model == "Tesla T4":
            assert (line.cost, line.unit_price, line.price_row) == (None, None, None)
        else:
            assert line.cost == line.unit_price * line.gpu_hours
            assert line.gpu_hours.as_tuple().exponent == -9
    assert {line.price_row for line in lines} == {"h100", "h100-new", "h100-spot", None}


def test_payable_amounts_add_up(books, october):
    found = of_october(books, october)
    assert sum(found.payable.values()) == found.payable_total
    assert found.payable_total == found.cost.quantize(Decimal("0.01"))
    assert found.unpriced_gpu_us == 24 * 3_600_000_000


def test_bytes_are_golden(books, october):
    """A change of these bytes changes every hash handed out so far: it needs a new SCHEMA."""
    found = of_october(books, october)
    golden = Path(__file__).parent / "golden" / "statement-2026-10.json"
    if os.environ.get("GPUTALLY_GOLDEN") == "update":
        golden.write_bytes(canonical(found))
    assert canonical(found) == golden.read_bytes()
    assert statement_hash(found) == hashlib.sha256(golden.read_bytes()).hexdigest()
    assert json.loads(canonical(found))["lines"][0] == {
        "account": "busy", "capacity_type": "on-demand", "cost": None, "detail": "", "gpu_hours": "24.000000000",
        "gpu_model": "Tesla T4", "gpu_us": 86400000000, "price_row": None, "team": "=HYPERLINK(1)", "unit_price": None,
    }  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(order=st.randoms(use_true_random=False))
def test_the_order_of_records_changes_no_byte(books, order):
    rows = [
        books.held(f"2026-10-0{day}", f"2026-10-0{day + 1}T0{day}:00:00.{day:03d}", team=team, busy=0.3)
        for day in range(1, 8)
        for team in ("a", "b")
    ]
    first = canonical(of_october(books, rows))
    order.shuffle(rows)
    assert canonical(of_october(books, rows)) == first


def test_one_record_more_changes_the_hash(books, october):
    one_more = books.held("2026-10-30", "2026-10-30T00:00:00.001")
    hashes = {statement_hash(of_october(books, records)) for records in (october, [*october, one_more])}
    assert len(hashes) == 2


@settings(max_examples=examples(13, 80), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2_678_400_000 - 1),
            st.integers(1, 10**9),
            st.sampled_from(["a", "b", "c"]),
            st.integers(0, 100),
        ),
        min_size=1,
        max_size=10,
    )
)
def test_lines_add_up_to_the_last_cent(books, spans):
    origin = books.at("2026-10-01")
    rows = [books.held(origin + s, origin + s + n, team=team, busy=busy / 100) for s, n, team, busy in spans]
    found = of_october(books, rows)
    assert sum((line.cost for line in found.lines), Decimal(0)) == found.cost
    assert sum(found.payable.values()) == found.payable_total == found.cost.quantize(Decimal("0.01"))
    for team, amount in found.payable.items():
        exact = sum(line.cost for line in found.lines if line.team == team)
        assert abs(amount - exact) < Decimal("0.01")


@pytest.mark.parametrize(
    ("month", "timezone", "hours"),
    [
        (Month(2028, 2), "UTC", 696),
        (Month(2026, 2), "UTC", 672),
        (Month(2026, 3), "Europe/Berlin", 743),
        (Month(2026, 10), "Europe/Berlin", 745),
    ],
)
def test_a_gpu_held_all_month_pays_the_hours_of_the_calendar(books, month, timezone, hours):
    span = month.span(zone(timezone))
    ledger = books.ledger([books.held(span[0] - 3_600_000, span[1] + 3_600_000)])
    book = books.price_book("id: a, model: H100, price: 1, valid_from: 2020-01-01", timezone=timezone)
    found = statement(ledger, book, *span, timezone)
    assert found.payable == {"vision": hours}


def test_a_teams_statement_is_a_part_of_the_clusters(books, october):
    span = Month(2026, 10).span(zone("UTC"))
    whole = statement(books.ledger(october), books.price_book(BOOK), *span)
    teams = {line.team for line in whole.lines}
    parts = [statement(books.ledger(october), books.price_book(BOOK), *span, teams=[team]) for team in sorted(teams)]
    assert tuple(line for part in parts for line in part.lines) == whole.lines
    assert sum(part.payable_total for part in parts) == whole.payable_total
    assert sum(part.gpu_us for part in parts) == whole.gpu_us
    assert sum(part.unpriced_gpu_us for part in parts) == whole.unpriced_gpu_us


def test_without_prices_there_is_no_amount(books, october):
    found = statement(books.ledger(october), None, *Month(2026, 10).span(zone("UTC")))
    assert (found.payable_total, found.currency, found.cost) == (None, None, 0)
    assert found.unpriced_gpu_us == sum(
        row.accounts.total - row.accounts.down - row.accounts.unmetered for row in october
    )
