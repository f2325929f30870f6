"""A closed month is changed by an admin's act alone: what arrives late waits, with its effect, and is decided on."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.billing.statements import canonical, from_canonical
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.month_closing import CannotClose
from gputally.base.clock import VirtualClock
from tests.billing.bookkeeping_cases import BOOK, NOV, OCT, october

HOUR_US = 3_600_000_000


def closed(books, keep):
    ledger, keeper = keep(october(books))
    keeper.close(OCT, "ada")
    return ledger, keeper


@pytest.fixture
def late(books, keep):
    """A closed October, for which ten hours arrive late; and that proposal."""
    ledger, keeper = closed(books, keep)
    ledger.add(books.held("2026-10-07", "2026-10-07T10:00", team="late"))
    (found,) = keeper.proposals()
    return ledger, keeper, found


def test_what_arrives_late_waits_and_changes_nothing(books, keep):
    ledger, keeper = closed(books, keep)
    kept, acts = canonical(keeper.month(OCT)), ledger.acts()
    assert keeper.proposals() == []
    ledger.add(books.held("2026-10-07", "2026-10-07T10:00", team="late"))
    (found,) = keeper.new_proposals()
    assert keeper.new_proposals() == [], "a proposal is new only once"
    assert keeper.waiting == (found,)
    assert [(e.team, e.gpu_us, e.amount) for e in found.effects()] == [("late", 10 * HOUR_US, Decimal("21.00"))]
    assert found.effects(["red"]) == []
    assert (canonical(keeper.month(OCT)), ledger.acts()) == (kept, acts)
    assert (keeper.month(NOV).corrections, keeper.month(NOV).due_total) == ((), 0)
    assert keeper.proposals(NOV) == []


def test_taken_up_it_is_booked_once_by_whoever_took_it(late):
    ledger, keeper, found = late
    booked = keeper.accept(OCT, found.id, "ada", "an agent was cut off")
    assert [(one.month, one.booked_in, one.line.team) for one in booked] == [("2026-10", "2026-11", "late")]
    last = ledger.acts()[-1]
    assert (last.kind, last.subject, last.who, last.reason) == ("corrected", "2026-10", "ada", "an agent was cut off")
    assert (keeper.month(NOV).due_total, keeper.proposals(), keeper.waiting) == (Decimal("21.00"), [], ())
    with pytest.raises(CannotClose, match="2026-10 has no proposal"):
        keeper.accept(OCT, found.id, "ada")


def test_refused_it_is_kept_and_never_proposed_again(books, late):
    ledger, keeper, found = late
    with pytest.raises(CannotClose, match="needs a reason"):
        keeper.refuse(OCT, found.id, "ada", " ")
    keeper.refuse(OCT, found.id, "ada", "a test node")
    assert ledger.acts()[-1].kind == "refused"
    assert (keeper.proposals(), keeper.correct("ada"), keeper.month(NOV).due_total) == ([], [], 0)
    again = Bookkeeper(ledger, VirtualClock(books.at("2027-03-01")))
    assert again.proposals() == []
    ledger.add(books.held("2026-10-08", "2026-10-08T01:00", team="late"))
    (more,) = again.proposals()
    assert [(e.team, e.gpu_us) for e in more.effects()] == [("late", HOUR_US)]


def test_an_act_is_about_what_its_author_has_seen(books, late):
    ledger, keeper, found = late
    ledger.add(books.held("2026-10-08", "2026-10-08T10:00", team="late"))
    for act in (keeper.accept, keeper.refuse):
        with pytest.raises(CannotClose, match="more records have arrived for 2026-10"):
            act(OCT, found.id, "ada", "why")
    with pytest.raises(CannotClose, match="2026-11 is not closed"):
        keeper.accept(NOV, found.id, "ada")


def test_closing_the_next_month_names_what_waits(books, keep):
    ledger, keeper = keep([books.held("2026-10-01", "2026-12-01")], now="2026-12-20")
    keeper.close(OCT, "ada")
    ledger.add(books.held("2026-10-07", "2026-10-07T10:00", team="late"))
    with pytest.raises(CannotClose, match="a proposal from late records for 2026-10"):
        keeper.close(NOV, "ada")
    keeper.close(NOV, "ada", "decided in January", ["proposals"])
    assert keeper.month(NOV).corrections == ()
    assert [one.booked_in for one in keeper.proposals()] == ["2026-12"]


def test_reopened_the_month_has_what_was_refused_for_it(late):
    _, keeper, found = late
    keeper.refuse(OCT, found.id, "ada", "a test node")
    keeper.reopen(OCT, "ada", "it was no test node")
    assert "late" in {line.team for line in keeper.month(OCT).lines}
    keeper.close(OCT, "ada")
    assert keeper.proposals() == []


def test_a_price_takes_up_nothing_that_waits_or_was_refused(books, keep):
    ledger, keeper = closed(books, keep)
    dearer = books.price_book(BOOK.replace("2.10", "3.10"))
    ledger.add(books.held("2026-10-07", "2026-10-07T10:00", team="late"))
    with pytest.raises(CannotClose, match="accept or refuse it, then price the month again"):
        keeper.reprice(OCT, dearer, "ada", "signed late")
    (found,) = keeper.proposals()
    keeper.refuse(OCT, found.id, "ada", "a test node")
    booked = keeper.reprice(OCT, dearer, "ada", "signed late")
    assert {one.line.team for one in booked}.isdisjoint({"late"})
    assert sum(one.line.gpu_us for one in booked) == 0
    assert keeper.proposals() == []


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.integers(0, 700), st.integers(1, 40), st.sampled_from("abc"), st.sampled_from(("accept", "refuse", ""))
        ),
        max_size=6,
    )
)
def test_closed_and_corrections_and_refused_and_waiting_are_the_present(books, keep, late):
    """In GPU-µs, whatever is decided on whatever arrives; and the closed bytes stay."""
    origin = books.at("2026-10-01")
    ledger, keeper = closed(books, keep)
    kept = keeper.books().closed[0].content
    for start, hours, team, act in late:
        begin = origin + start * 3_600_000
        ledger.add(books.held(begin, min(begin + hours * 3_600_000, books.at("2026-11-01")), team=team))
        for found in keeper.proposals() if act else []:
            (keeper.accept if act == "accept" else keeper.refuse)(OCT, found.id, "ada", "why")
    now = keeper.books()
    assert now.closed[0].content == kept
    waiting = [line for one in keeper.proposals() for line in one.lines]
    sums = {}
    for line in [*from_canonical(kept.encode()).lines, *(c.line for c in (*now.corrections, *now.refused, *waiting))]:
        key = (line.team, line.account, line.price_row)
        sums[key] = sums.get(key, 0) + line.gpu_us
    keeper.reopen(OCT, "ada", "to see the present")
    present = {}
    for line in keeper.month(OCT).lines:
        key = (line.team, line.account, line.price_row)
        present[key] = present.get(key, 0) + line.gpu_us
    assert {key: us for key, us in sums.items() if us} == {key: us for key, us in present.items() if us}
