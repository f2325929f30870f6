"""Statements: lines add up to the last cent, bytes never change, and items add up to every line in every breakdown."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accountant.billing.charge_table import Groups
from accountant.billing.cost_allocation import billed_tables, statement
from accountant.billing.displayed_amounts import minor_units, nano_hours
from accountant.billing.statement_breakdown import (
    DIMENSIONS,
    LATE,
    LineFilter,
    accounts_named,
    itemise,
    total,
)
from accountant.billing.statements import (
    SCHEMA,
    build,
    canonical,
    for_teams,
    from_canonical,
    invoice_number,
    payable_lines,
)
from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.periods import zone
from accountant.prices.price_book import Billing, IdlePolicy
from accountant.wire.policy_models import IDLE, UNASSIGNED
from gputally.base.apportionment import apportion
from gputally.base.money import HOUR_PLACES, Money, exact_product, minor_places, nano_gpu_hours, payable
from tests.billing.usage_rows import OCT, SAMPLE_PRICES, at, busy_month, held, price_book, unheld
from tests.fakes.list_ledger import ListLedger
from tests.hypothesis_examples import examples

BOOK = (
    "id: h100, model: H100, price: '2.10', valid_from: 2026-01-01, valid_to: 2026-10-16\n"
    "id: h100-new, model: H100, price: '2.33', valid_from: 2026-10-16\n"
    "id: h100-spot, model: H100, capacity_type: spot, price: '0.997', valid_from: 2026-01-01"
)


@pytest.fixture
def october():
    """A month with every account, a price change, a spot pool, an unpriced GPU and hostile names."""
    month = "2026-10-01", "2026-11-01"
    return [
        held("2026-10-01", "2026-10-20T10:20:30.001", busy=0.5),
        held("2026-10-10", "2026-10-20", busy=None, team="nlp"),
        held("2026-10-03", "2026-10-05T07:00:00.013", team="nlp", capacity_type="spot", busy=0.93),
        held("2026-10-03", "2026-10-04", team="=HYPERLINK(1)", gpu_model="Tesla T4"),
        unheld("2026-10-20T10:20:30.001", month[1]),
        unheld(*month, account="down"),
        unheld("2026-10-30", month[1], account="unmetered"),
    ]


def of_october(rows, timezone="UTC"):
    span = OCT.span(zone(timezone))
    book = price_book(BOOK, timezone=timezone)
    return statement(ListLedger(rows), book, *span, timezone)


def test_every_microsecond_stands_on_one_line(october):
    found = of_october(october)
    assert found.gpu_us == sum(row.accounts.total for row in october)
    assert found.gpu_hours == sum(line.gpu_hours for line in found.lines)
    assert {line.account for line in found.lines} == {
        "busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down",
    }  # fmt: skip


def test_what_is_billed(october):
    lines = of_october(october).lines
    for line in lines:
        if line.account in ("down", "unmetered"):
            assert (line.cost, line.unit_price, line.price_row) == (0, None, None)
        elif line.gpu_model == "Tesla T4":
            assert (line.cost, line.unit_price, line.price_row) == (None, None, None)
        else:
            assert line.cost == line.unit_price * line.gpu_hours
            assert line.gpu_hours.as_tuple().exponent == -9
    assert {line.price_row for line in lines} == {"h100", "h100-new", "h100-spot", None}


def test_payable_amounts_add_up(october):
    found = of_october(october)
    assert sum(found.payable.values()) == found.payable_total
    assert found.payable_total == found.cost.quantize(Decimal("0.01"))
    assert found.unpriced_gpu_us == 24 * 3_600_000_000


def test_bytes_are_golden(october):
    """A change of these bytes changes every hash published so far: it needs a new SCHEMA."""
    found = of_october(october)
    golden = Path(__file__).parent / "golden" / "statement-2026-10.json"
    if os.environ.get("GPUTALLY_GOLDEN") == "update":
        golden.write_bytes(canonical(found))
    assert canonical(found) == golden.read_bytes()
    assert statement_hash(found) == hashlib.sha256(golden.read_bytes()).hexdigest()
    assert json.loads(canonical(found))["lines"][0] == {
        "account": "busy", "capacity_type": "on-demand", "cost": None, "detail": "", "gpu_hours": "24.000000000",
        "gpu_model": "Tesla T4", "gpu_us": 86400000000, "price_row": None, "team": "=HYPERLINK(1)", "unit_price": None,
    }  # fmt: skip


def test_what_is_due_is_what_somebody_is_billed_for_and_the_rest_stands_beside_it(october):
    found = of_october(october)
    assert IDLE in found.payable
    assert IDLE not in found.due
    assert found.due_total == sum(found.due.values()) == found.payable_total - found.payable[IDLE]
    assert found.not_billed == found.payable[IDLE] > 0
    told = json.loads(canonical(found))
    assert (told["due_total"], told["not_billed"]) == (str(found.due_total), str(found.not_billed))
    (team, *_) = found.due
    assert for_teams(found, (team,)).due_total == found.due[team]
    assert for_teams(found, (team,)).not_billed is None


def test_a_month_that_was_closed_with_the_first_schema_keeps_its_bytes_and_reads_as_every_other(october):
    kept = (Path(__file__).parent / "golden" / "statement-2026-10.schema-1.json").read_bytes()
    found = from_canonical(kept)
    assert canonical(found) == kept
    assert IDLE in json.loads(kept)["due"]
    assert replace(found, schema=SCHEMA) == of_october(october)
    team = json.loads(canonical(for_teams(found, ("vision",))))
    assert (team["schema"], team["due"], team["due_total"]) == (1, {"vision": "1003.78"}, "1003.78")
    nobody = json.loads(canonical(for_teams(found, (IDLE,))))
    assert (nobody["due"], nobody["due_total"]) == ({IDLE: "646.94"}, "646.94")


@settings(max_examples=25)
@given(order=st.randoms(use_true_random=False))
def test_the_order_of_records_changes_no_byte(order):
    rows = [
        held(f"2026-10-0{day}", f"2026-10-0{day + 1}T0{day}:00:00.{day:03d}", team=team, busy=0.3)
        for day in range(1, 8)
        for team in ("a", "b")
    ]
    first = canonical(of_october(rows))
    order.shuffle(rows)
    assert canonical(of_october(rows)) == first


def test_one_record_more_changes_the_hash(october):
    one_more = held("2026-10-30", "2026-10-30T00:00:00.001")
    hashes = {statement_hash(of_october(records)) for records in (october, [*october, one_more])}
    assert len(hashes) == 2


@settings(max_examples=examples(13, 80))
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2_678_400_000 - 1), st.integers(1, 10**9), st.sampled_from("abc"), st.integers(0, 100)
        ),
        min_size=1,
        max_size=10,
    )
)
def test_lines_add_up_to_the_last_cent(spans):
    origin = at("2026-10-01")
    rows = [held(origin + s, origin + s + n, team=team, busy=busy / 100) for s, n, team, busy in spans]
    found = of_october(rows)
    assert sum((line.cost for line in found.lines), Decimal(0)) == found.cost
    assert sum(found.payable.values()) == found.payable_total == found.cost.quantize(Decimal("0.01"))
    for team, amount in found.payable.items():
        exact = sum(line.cost for line in found.lines if line.team == team)
        assert abs(amount - exact) < Decimal("0.01")


def test_a_teams_statement_is_a_part_of_the_clusters(october):
    span = OCT.span(zone("UTC"))
    whole = statement(ListLedger(october), price_book(BOOK), *span)
    teams = {line.team for line in whole.lines}
    parts = [statement(ListLedger(october), price_book(BOOK), *span, teams=[team]) for team in sorted(teams)]
    assert tuple(line for part in parts for line in part.lines) == whole.lines
    assert sum(part.payable_total for part in parts) == whole.payable_total
    assert sum(part.gpu_us for part in parts) == whole.gpu_us
    assert sum(part.unpriced_gpu_us for part in parts) == whole.unpriced_gpu_us


def test_without_prices_there_is_no_amount(october):
    found = statement(ListLedger(october), None, *OCT.span(zone("UTC")))
    assert (found.payable_total, found.currency, found.cost) == (None, None, 0)
    assert found.unpriced_gpu_us == sum(
        row.accounts.total - row.accounts.down - row.accounts.unmetered for row in october
    )


OCTOBER = ("2026-10-01", "2026-11-01")


@pytest.fixture(scope="module")
def billed_october():
    """The bills of a busy month by breakdown, the price book and the span."""
    book = price_book(SAMPLE_PRICES)
    ledger = ListLedger(busy_month("2026-09-28", "2026-10-20"))
    span = tuple(map(at, OCTOBER))
    bills = [table.by_line() for table in billed_tables(ledger, book, *span, list(DIMENSIONS.values()))]
    return dict(zip(DIMENSIONS, bills, strict=True)), book, span


@pytest.fixture(scope="module")
def stated(billed_october):
    billed, book, span = billed_october
    return build(billed["team"].charges, book, (), *span, "UTC")


FIGURES = (
    LineFilter(),
    LineFilter(payers=True),
    LineFilter(team="vision"),
    LineFilter(team=IDLE),
    LineFilter(accounts=accounts_named("allocated")),
    LineFilter(team="teaching", accounts=accounts_named("allocated_idle")),
    LineFilter(gpu_model="NVIDIA A100-SXM4-40GB", capacity_type="spot"),
    LineFilter(gpu_model="Tesla T4"),
    LineFilter(accounts=accounts_named("down")),
    LineFilter(price_row="h100-oct"),
)


@pytest.mark.parametrize("cut", DIMENSIONS)
def test_items_add_up_to_every_figure(billed_october, stated, cut):
    billed, _, _ = billed_october
    for figure in FIGURES:
        found = itemise(stated, figure, billed[cut].groups, cut)
        expected = [(line, amount) for line, (_, _, amount) in payable_lines(stated) if figure.takes(line)]
        assert [(line, part.amount) for line, part in found.lines] == expected
        assert found.lines, figure
        for line, part in found.lines:
            items = [item.part for item in found.items if item.line is line]
            assert total(items) == part, (figure, line)
            assert all(item.key != LATE for item in found.items)
        assert found.whole == total(part for _, part in found.lines)
        # Amounts of jobs are rounded each by itself.
        kept = {"amount": None} if cut == "job" else {}
        assert replace(total(row.part for row in found.rows()), **kept) == replace(found.whole, **kept)
        for most in (0, 1, 3, 10_000):
            shown, rest, more = found.dearest(most)
            assert (shown, more) == (found.rows()[:most], max(0, len(found.rows()) - most))
            others = found.rows()[most:]
            assert (rest is None) == (not others)
            if rest is not None:
                whole = total(row.part for row in others)
                assert replace(rest.part, **kept) == replace(whole, **kept)
                assert (rest.key, rest.unpriced_us) == (LATE, sum(row.unpriced_us for row in others))


@pytest.mark.parametrize("cut", DIMENSIONS)
def test_a_share_of_idle_time_is_nobodys_late_record(cut):
    """Three teams in odd proportions share the idle time of seven nodes; each breakdown divides it slightly
    differently."""
    spread = IdlePolicy.model_validate({"unallocated": "spread"})
    book = price_book(SAMPLE_PRICES).model_copy(update={"billing": Billing(idle=spread)})
    rows = [
        held("2026-10-01", f"2026-10-01T0{hours}:17:0{hours}", team=team)
        for team, hours in (("vision", 3), ("language", 5), ("robotics", 7))
    ]
    rows += [
        unheld(f"2026-10-0{day}", f"2026-10-0{day}T05:0{node}:07", node=f"n{node}", gpu=f"g{node}")
        for node in range(7)
        for day in range(1, 8)
    ]
    span = tuple(map(at, OCTOBER))
    ledger = ListLedger(rows)
    by_team, by_cut = [table.by_line() for table in billed_tables(ledger, book, *span, (("team",), DIMENSIONS[cut]))]
    stated = build(by_team.charges, book, (), *span, "UTC")
    found = itemise(stated, LineFilter(), by_cut.groups, cut)
    assert {line.team for line, _ in found.lines if line.detail == "spread"} == {"vision", "language", "robotics"}
    assert not [item for item in found.items if item.key == LATE]
    for line, part in found.lines:
        assert total(item.part for item in found.items if item.line is line) == part


def test_a_choice_takes_the_lines_that_it_names(stated):
    whole, payers, nobody, busy = (
        itemise(stated, figure, Groups(), "team")
        for figure in (
            LineFilter(), LineFilter(payers=True), LineFilter(team=IDLE), LineFilter(accounts=accounts_named("busy")),
        )
    )  # fmt: skip
    assert len(payers.lines) + len(nobody.lines) == len(whole.lines)
    assert whole.whole.amount == sum(stated.payable.values())
    assert {line.account for line, _ in busy.lines} == {"busy"}


def test_what_is_unpriced_has_no_cost_and_counts_in_time(billed_october, stated):
    unpriced = LineFilter(gpu_model="Tesla T4", accounts=accounts_named("allocated"))
    found = itemise(stated, unpriced, billed_october[0]["job"].groups, "job")
    (row,) = found.rows()
    assert (row.part.cost, row.part.amount) == (None, None)
    assert row.unpriced_us == row.part.gpu_us == found.whole.gpu_us > 0


@pytest.mark.parametrize("days", [-2, 3])
def test_a_closed_month_names_what_moved_since(billed_october, stated, days):
    """The closed lines stay; the difference to the present ledger is an item of its own."""
    groups = billed_october[0]["team"].groups
    moved = 86_400_000_000 * days
    figure = LineFilter(team="language", accounts=accounts_named("busy"), gpu_model="NVIDIA H100 80GB HBM3")
    key, (line, (number, gpu_us)) = next(
        (key, (line, groups.by_line[key])) for line in stated.lines if figure.takes(line) and (key := line.key)
    )
    assert gpu_us.sum() > abs(moved)
    later = replace(groups, by_line={**groups.by_line, key: (number, gpu_us - moved)})
    found = itemise(stated, replace(figure, price_row=line.price_row), later, "team")
    (late,) = [item for item in found.items if item.key == LATE]
    assert late.part.gpu_us == moved
    assert late.part.gpu_hours == Decimal(24 * days)
    assert total(item.part for item in found.items) == found.whole


TIMES = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 10**9), st.integers(0, 10**17)), min_size=1, max_size=30)
PRICES = st.one_of(st.decimals("0", "99", places=4), st.just(Decimal("1E+2")), st.just(Decimal(0)))


@given(TIMES, st.integers(-40, 40))
@example([9 * 10**18 // 4, 1, 9 * 10**18 // 4], 0)
@example([10**17, 3, 10**17 + 1], 5)
@settings(max_examples=examples(40, 1000))
def test_hours_are_divided_as_lists_are(times, off):
    total = max(0, nano_gpu_hours(sum(times)) + off)
    assert nano_hours(total, np.array(times, dtype=np.int64)).tolist() == apportion(total, times)


@given(st.lists(st.integers(-(10**9), 10**15), min_size=1, max_size=30), PRICES, st.sampled_from(("USD", "JPY", "KWD")))
@example([7 * 10**15, 3, 10**15 + 1], Decimal("98.7654"), "USD")
@example([5, -3, 10**14], Decimal("1E+2"), "JPY")
@settings(max_examples=examples(40, 1000))
def test_amounts_are_divided_as_lists_are(nano, price, currency):
    costs = [exact_product(price, Decimal(each).scaleb(-HOUR_PLACES)) for each in nano]
    exact = {at: Money(cost, currency) for at, cost in enumerate(costs)}
    places = minor_places(currency)
    whole = sum(money.amount for money in payable(exact, currency).values())
    for units in (0, 1, -1):
        total = whole + Decimal(units).scaleb(-places)
        try:
            expected = [money.amount for money in payable(exact, currency, Money(total, currency)).values()]
        except ValueError:
            with pytest.raises(ValueError, match="cannot be rounded"):
                minor_units(price, np.array(nano, dtype=np.int64), int(total.scaleb(places)), places)
            continue
        found = minor_units(price, np.array(nano, dtype=np.int64), int(total.scaleb(places)), places)
        assert [Decimal(each).scaleb(-places) for each in found.tolist()] == expected


@given(st.text(max_size=20))
def test_no_teams_invoice_has_the_number_of_time_without_a_team(team):
    assert invoice_number(OCT, UNASSIGNED) == "INV-2026-10.no-team"
    assert team == UNASSIGNED or invoice_number(OCT, team) != invoice_number(OCT, UNASSIGNED)
