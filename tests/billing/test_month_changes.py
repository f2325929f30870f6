"""What changed a month since its draft: by team and cause, and adding up to the difference."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.bookkeeping import month_drafts
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.corrections_and_adjustments import NewAdjustment
from accountant.bookkeeping.month_closing import CannotClose
from gputally.base.clock import VirtualClock
from gputally.base.money import exact_sum
from tests.billing.usage_rows import DEC, NOV, OCT, at, held, price_book
from tests.fakes.list_ledger import ListLedger
from tests.hypothesis_examples import examples

HOUR_MS = 3_600_000
DRAFT = at("2026-11-10T12:20")


def book(price, currency="USD"):
    return price_book(f"id: h100, model: H100, price: '{price}', valid_from: 2025-12-01", currency)


def keeper_of(*rows, now_ms=DRAFT):
    clock, ledger = VirtualClock(now_ms), ListLedger(rows)
    keeper = Bookkeeper(ledger, clock)
    keeper.prices.take(book("2.00"), "file", "prices.yaml", "", at("2026-11-01"))
    return ledger, keeper, clock


def credit(amount, team="vision", month="2026-11"):
    return NewAdjustment(month=month, team=team, amount=Decimal(amount), reason="an outage", approved_by="bo")


def told(keeper, month=NOV, since=None):
    return {(one.cause, one.team): one.amount for one in keeper.drafts.changes(month, since).changes}


def test_each_cause_has_its_part():
    ledger, keeper, clock = keeper_of(held("2026-11-08", "2026-11-09", team="nlp"))
    draft = keeper.drafts.keep(NOV, "ada", "sent to the teams")
    assert (draft.amounts.until_ms, draft.amounts.charged) == (at("2026-11-10T12:00"), {"nlp": Decimal("48.00")})
    clock.advance_to(at("2026-11-11"))
    ledger.add(held("2026-11-07", "2026-11-07T10:00", team="vision"))  # late
    ledger.add(held("2026-11-10T12:00", "2026-11-10T15:00", team="vision"))  # since
    keeper.prices.take(book("3.00"), "put", "ada", "a new contract", clock.wall_ms())
    keeper.credits.adjust(credit("-5"), "ada")
    found = keeper.drafts.changes(NOV)
    assert found.draft == draft
    assert {(one.cause, one.team): one.amount for one in found.changes} == {
        ("late records", "vision"): Decimal("20.00"),
        ("use since then", "vision"): Decimal("6.00"),
        ("prices", "vision"): Decimal("13.00"),
        ("prices", "nlp"): Decimal("24.00"),
        ("credit or charge", "vision"): Decimal(-5),
    }
    given = {one.cause: one.reason for one in found.changes}
    assert (given["prices"], given["credit or charge"]) == ("a new contract", "an outage")
    assert all(given.values()), "every change says why"


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.integers(0, 10 * 24), st.integers(1, 30), st.sampled_from(["vision", "nlp"])),
        st.tuples(st.just("price"), st.sampled_from(["1.37", "2.00", "9.99"])),
        st.tuples(st.just("credit"), st.sampled_from(["-5", "0.07"]), st.sampled_from(["vision", "nlp"])),
        st.tuples(st.just("wait"), st.integers(1, 100)),
        st.tuples(st.just("draft")),
    ),
    max_size=8,
)


@given(before=EVENTS, since=EVENTS)
@settings(max_examples=examples(25, 200), deadline=None)
def test_the_changes_of_a_team_add_up_to_the_difference(before, since):
    ledger, keeper, clock = keeper_of(held("2026-11-08", "2026-11-09", team="nlp"))
    number = 0

    def happen(events):
        nonlocal number
        for name, *values in events:
            number += 1
            if name == "rows":
                start = at("2026-11-01") + values[0] * HOUR_MS
                ledger.add(held(start, start + values[1] * HOUR_MS // 7, team=values[2], gpu=f"GPU-{number}"))
            elif name == "price":
                keeper.prices.take(book(values[0]), "put", "ada", "", clock.wall_ms())
            elif name == "credit":
                amount = Decimal(values[0]) * number
                keeper.credits.adjust(credit(amount, values[1]), "ada")
            elif name == "wait":
                clock.advance(values[0] * HOUR_MS // 5)
            else:
                keeper.drafts.keep(NOV, "ada")

    happen(before)
    draft, booked = keeper.drafts.keep(NOV, "ada"), keeper.month(NOV).adjustments
    clock.advance(1)
    happen([event for event in since if event[0] != "draft"])
    now, found = keeper.month(NOV).due, keeper.drafts.changes(NOV, draft.at_ms)
    assert found.draft == draft
    for team in ("vision", "nlp"):
        then = [draft.amounts.charged.get(team, Decimal(0)), *(one.amount for one in booked if one.team == team)]
        since_then = [one.amount for one in found.changes if one.team == team]
        assert exact_sum([*then, *since_then]) == now.get(team, 0)
        amounts = {one.team: (one.draft, one.now) for one in found.teams}
        assert amounts.get(team, (0, 0)) == (exact_sum(then), now.get(team, 0))


def test_without_a_draft_only_acts_and_prices_are_known():
    ledger, keeper, clock = keeper_of(held("2026-11-08", "2026-11-09", team="nlp"))
    before = clock.wall_ms()
    clock.advance(HOUR_MS)
    ledger.add(held("2026-11-07", "2026-11-07T10:00", team="vision"))
    keeper.credits.adjust(credit("-5"), "ada")
    keeper.prices.take(book("3.00"), "put", "ada", "", clock.wall_ms())
    found = keeper.drafts.changes(NOV, before)
    assert (found.draft, found.since_ms) == (None, before)
    assert told(keeper, since=before) == {
        ("credit or charge", "vision"): Decimal(-5), ("prices", "nlp"): Decimal("24.00"),
        ("prices", "vision"): Decimal("10.00"),
    }  # fmt: skip


def test_the_newest_draft_at_the_instant_or_before_counts():
    _, keeper, clock = keeper_of(held("2026-11-08", "2026-11-20", team="nlp"))
    first = keeper.drafts.keep(NOV, "ada")
    clock.advance(24 * HOUR_MS)
    second = keeper.drafts.keep(NOV, "ada")
    assert keeper.drafts.changes(NOV).draft == second
    assert keeper.drafts.changes(NOV, second.at_ms - 1).draft == first
    assert keeper.drafts.changes(NOV, first.at_ms - 1).draft is None
    assert keeper.drafts.of(NOV) == [first, second]
    assert keeper.drafts.of(OCT) == []


def test_prices_in_another_currency_have_no_difference():
    ledger, keeper, clock = keeper_of(held("2026-11-08", "2026-11-09", team="nlp"))
    keeper.drafts.keep(NOV, "ada")
    ledger.add(held("2026-11-07", "2026-11-07T10:00", team="vision"))  # late
    ledger.add(held("2026-11-10T12:00", "2026-11-10T12:30", team="nlp"))  # since
    clock.advance(HOUR_MS)
    keeper.prices.take(book("3.00", "EUR"), "put", "ada", "", clock.wall_ms())
    expected = {
        ("prices", "nlp"): None, ("prices", "vision"): None,
        ("late records", "vision"): None, ("use since then", "nlp"): None,
    }  # fmt: skip
    assert (keeper.drafts.changes(NOV).currency, told(keeper)) == ("EUR", expected)
    assert keeper.drafts.changes(NOV).teams == (), "the draft's amounts are in another currency than today's"
    clock.advance_to(at("2026-12-20"))
    keeper.close(NOV, "ada", "a test", ["coverage"])
    assert told(keeper) == {("records", "nlp"): None, ("records", "vision"): None}


def test_a_month_keeps_a_bounded_number_of_drafts(monkeypatch):
    monkeypatch.setattr(month_drafts, "MOST_DRAFTS", 2)
    _, keeper, _ = keeper_of(held("2026-11-08", "2026-11-09", team="nlp"))
    for _ in range(2):
        keeper.drafts.keep(NOV, "ada")
    with pytest.raises(CannotClose):
        keeper.drafts.keep(NOV, "ada")
    assert len(keeper.drafts.of(NOV)) == 2


def test_a_month_that_was_closed_since_is_compared_with_what_it_states():
    ledger, keeper, clock = keeper_of(held("2026-11-08", "2026-11-09", team="nlp"))
    keeper.drafts.keep(NOV, "ada")
    ledger.add(held("2026-11-10T11:00", "2026-11-10T16:00", team="vision"))
    clock.advance_to(at("2026-12-20"))
    keeper.close(NOV, "ada", "a test", ["coverage"])
    ledger.add(held("2026-11-07", "2026-11-07T10:00", team="vision"))  # waits for a decision
    assert told(keeper) == {("records", "vision"): Decimal("10.00")}
    with pytest.raises(CannotClose):
        keeper.drafts.keep(NOV, "ada")


def test_a_month_that_has_not_begun_has_no_draft():
    _, keeper, _ = keeper_of(now_ms=at("2026-11-01T00:10"))
    with pytest.raises(CannotClose):
        keeper.drafts.keep(NOV, "ada")


def test_late_records_of_a_closed_month_are_told_in_the_month_in_which_they_are_booked():
    ledger, keeper, clock = keeper_of(held("2026-10-08", "2026-10-09", team="nlp"), now_ms=at("2026-11-12"))
    keeper.prices.take(book("2.00"), "file", "prices.yaml", "", at("2026-10-01"))
    keeper.close(OCT, "ada", "a test", ["coverage"])
    for month, hours, until in ((NOV, 10, "2026-12-15"), (DEC, 3, "2026-12-15T01:00")):
        ledger.add(held("2026-10-07", at("2026-10-07") + hours * HOUR_MS, team="vision", gpu=f"GPU-{hours}"))
        keeper.correct("ada")
        if month == NOV:
            clock.advance_to(at(until))
            keeper.close(NOV, "ada", "a test", ["coverage"])
    since = at("2026-11-01")
    booked = {month: told(keeper, month, since) for month in (NOV, DEC)}
    assert booked == {
        NOV: {("correction", "vision"): Decimal("20.00")},
        DEC: {("correction", "vision"): Decimal("6.00")},
    }
    (late,) = keeper.drafts.changes(DEC, since).changes
    assert "2026-10" in late.reason
