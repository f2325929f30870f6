"""What a figure is made of: items add up to their line, lines to the figure, to the last digit, by every cut."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from accountant.billing.charge_columns import Groups
from accountant.billing.cost_allocation import bills_by_grouping
from accountant.billing.statement_breakdown import DIMENSIONS, LATE, LineFilter, Row, accounts_named, itemise, total
from accountant.billing.statements import build, payable_lines
from accountant.prices.price_book import Billing, IdlePolicy
from accountant.wire.policy_models import IDLE

OCTOBER = ("2026-10-01", "2026-11-01")


@pytest.fixture(scope="module")
def october(books):
    """The bills of a busy month by cut, the book and the span."""
    book = books.price_book(books.sample_prices)
    ledger = books.ledger(books.busy_month("2026-09-28", "2026-10-20"))
    span = tuple(map(books.at, OCTOBER))
    return (
        dict(zip(DIMENSIONS, bills_by_grouping(ledger, book, *span, list(DIMENSIONS.values())), strict=True)),
        book,
        span,
    )


@pytest.fixture(scope="module")
def stated(october):
    billed, book, span = october
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
def test_items_add_up_to_every_figure(october, stated, cut):
    billed, _, _ = october
    for figure in FIGURES:
        found = itemise(stated, figure, billed[cut].groups)
        expected = [(line, amount) for line, (_, _, amount) in payable_lines(stated) if figure.takes(line)]
        assert [(line, part.amount) for line, part in found.lines] == expected
        assert found.lines, figure
        for line, part in found.lines:
            items = [item.part for item in found.items if item.line is line]
            assert total(items) == part, (figure, line)
            assert all(item.key != LATE for item in found.items)
        assert total(row.part for row in found.rows()) == found.whole == total(part for _, part in found.lines)
        for most in (0, 1, 3, 10_000):
            shown, rest, more = found.dearest(most)
            assert (shown, more) == (found.rows()[:most], max(0, len(found.rows()) - most))
            others = found.rows()[most:]
            assert rest == (
                Row(LATE, total(row.part for row in others), sum(row.unpriced_us for row in others)) if others else None
            )


@pytest.mark.parametrize("cut", DIMENSIONS)
def test_a_share_of_idle_time_is_nobodys_late_record(books, cut):
    """Three teams in odd proportions share what stood idle on seven nodes: every cut divides it a little otherwise."""
    spread = IdlePolicy.model_validate({"unallocated": "spread"})
    book = books.price_book(books.sample_prices).model_copy(update={"billing": Billing(idle=spread)})
    rows = [
        books.held("2026-10-01", f"2026-10-01T0{hours}:17:0{hours}", team=team)
        for team, hours in (("vision", 3), ("language", 5), ("robotics", 7))
    ]
    rows += [
        books.unheld(f"2026-10-0{day}", f"2026-10-0{day}T05:0{node}:07", node=f"n{node}", gpu=f"g{node}")
        for node in range(7)
        for day in range(1, 8)
    ]
    span = tuple(map(books.at, OCTOBER))
    ledger = books.ledger(rows)
    by_team, by_cut = bills_by_grouping(ledger, book, *span, (("team",), DIMENSIONS[cut]))
    stated = build(by_team.charges, book, (), *span, "UTC")
    found = itemise(stated, LineFilter(), by_cut.groups)
    assert {line.team for line, _ in found.lines if line.detail == "spread"} == {"vision", "language", "robotics"}
    assert not [item for item in found.items if item.key == LATE]
    for line, part in found.lines:
        assert total(item.part for item in found.items if item.line is line) == part


def test_a_choice_takes_the_lines_that_it_names(stated):
    whole = itemise(stated, LineFilter(), Groups())
    payers, nobody = (
        itemise(stated, LineFilter(payers=True), Groups()),
        itemise(stated, LineFilter(team=IDLE), Groups()),
    )
    assert len(payers.lines) + len(nobody.lines) == len(whole.lines)
    assert whole.whole.amount == sum(stated.payable.values())
    assert {
        line.account for line, _ in itemise(stated, LineFilter(accounts=accounts_named("busy")), Groups()).lines
    } == {"busy"}


def test_what_is_unpriced_has_no_cost_and_counts_in_time(october, stated):
    found = itemise(
        stated, LineFilter(gpu_model="Tesla T4", accounts=accounts_named("allocated")), october[0]["job"].groups
    )
    (row,) = found.rows()
    assert (row.part.cost, row.part.amount) == (None, None)
    assert row.unpriced_us == row.part.gpu_us == found.whole.gpu_us > 0


@pytest.mark.parametrize("days", [-2, 3])
def test_a_closed_month_names_what_moved_since(october, stated, days):
    """The kept lines stay; what the ledger has more, or less, is an item of its own."""
    groups = october[0]["team"].groups
    moved = 86_400_000_000 * days
    figure = LineFilter(team="language", accounts=accounts_named("busy"), gpu_model="NVIDIA H100 80GB HBM3")
    key, (line, (number, gpu_us)) = next(
        (key, (line, groups.by_line[key]))
        for line in stated.lines
        if figure.takes(line)
        and (key := (line.team, line.account, line.detail, line.gpu_model, line.capacity_type, line.price_row))
    )
    assert gpu_us.sum() > abs(moved)
    later = replace(groups, by_line={**groups.by_line, key: (number, gpu_us - moved)})
    found = itemise(stated, replace(figure, price_row=line.price_row), later)
    (late,) = [item for item in found.items if item.key == LATE]
    assert late.part.gpu_us == moved
    assert late.part.gpu_hours == Decimal(24 * days)
    assert total(item.part for item in found.items) == found.whole
