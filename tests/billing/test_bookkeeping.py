"""Months that close, stay closed, and are corrected: the laws of the books, month boundaries included."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.billing.cost_allocation import statement
from accountant.billing.statements import canonical, from_canonical
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.month_closing import CannotClose, faults, statement_hash
from accountant.core.errors import LedgerUnavailable
from accountant.core.periods import Month, zone
from accountant.ledger.protocols import Quarantined
from accountant.wire.usage_cost_and_job_models import Accounts
from gputally.base.clock import VirtualClock
from tests.billing.bookkeeping_cases import BOOK, NOV, OCT, SEP, Breaking, october

HOUR = 3_600_000_000


def test_a_closed_month_keeps_its_bytes(books, keep):
    ledger, keeper = keep(october(books))
    before = keeper.month(OCT)
    closed = keeper.close(OCT, "ada")
    kept = canonical(keeper.month(OCT))
    assert (before.status, keeper.month(OCT).status, keeper.status(OCT)) == ("open", "closed", "closed")
    assert statement_hash(keeper.month(OCT)) == closed.hash
    assert from_canonical(kept) == keeper.month(OCT)
    ledger.add(books.held("2026-10-07", "2026-10-08", team="late"))
    assert canonical(keeper.month(OCT)) == kept
    again = Bookkeeper(ledger, VirtualClock(books.at("2027-03-01")))
    assert canonical(again.month(OCT)) == kept
    assert again.month(OCT).lines == before.lines


def test_late_facts_are_corrected_in_the_open_month(books, keep):
    ledger, keeper = keep(october(books))
    keeper.close(OCT, "ada")
    assert keeper.correct("auditor") == []
    ledger.add(books.held("2026-10-07", "2026-10-07T10:00", team="late"))
    booked = keeper.correct("auditor")
    assert [(c.month, c.booked_in, c.reason, c.line.team, c.amount) for c in booked] == [
        ("2026-10", "2026-11", "late facts", "late", Decimal("21.00"))
    ]
    assert keeper.correct("auditor") == []
    now = keeper.month(NOV)
    assert now.corrections == tuple(booked)
    assert (now.due["late"], now.due_total, now.payable_total) == (Decimal("21.00"), Decimal("21.00"), 0)
    keeper_of_team = keeper.month(NOV, ["late"])
    assert (keeper_of_team.due_total, keeper_of_team.corrections) == (Decimal("21.00"), tuple(booked))


def test_a_month_that_was_closed_long_ago_is_corrected_too(books, keep):
    """By late facts, in its turn; by a price, at once."""
    ledger, _ = keep([books.held("2026-01-01", "2026-11-01")])
    keeper = Bookkeeper(ledger, VirtualClock(books.at("2026-11-20")), look_back=2)
    for number in range(1, 11):
        keeper.close(Month(2026, number), "ada")
    ledger.add(books.held("2026-03-07", "2026-03-08", team="late"))
    found = [{one.month for one in keeper.new_proposals()} for _ in range(10)]
    assert sorted(found, key=len)[-2:] == [set(), {"2026-03"}], "within eight looks at the eight older ones"
    assert {c.month for c in keeper.correct("ada")} == {"2026-03"}
    ledger.add(books.held("2026-02-07", "2026-02-08", team="late"))
    assert {c.month for c in keeper.correct("ada")} == {"2026-02"}
    booked = keeper.reprice(Month(2026, 1), books.price_book(BOOK.replace("2.10", "3.10")), "ada", "signed late")
    assert sum(c.amount for c in booked) == 31 * 24


def test_a_reversal_stands_beside_the_new_amount(books, keep):
    rows = october(books, team="wrong")
    ledger, keeper = keep(rows)
    keeper.close(OCT, "ada")
    ledger.rows[:] = october(books, team="right")
    amounts = {(c.line.team, c.line.account): c.amount for c in keeper.correct("ada")}
    half = Decimal("1562.40")
    assert amounts == {
        ("right", "busy"): half, ("right", "allocated_idle"): half,
        ("wrong", "busy"): -half, ("wrong", "allocated_idle"): -half,
    }  # fmt: skip
    assert keeper.month(NOV).due_total == 0


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 700), st.integers(1, 40), st.sampled_from("abc")), max_size=3), max_size=4
    )
)
def test_closed_plus_corrections_is_the_present(books, keep, rounds):
    """However often facts arrive and corrections are booked, in GPU-µs nothing is ever missing or twice."""
    origin = books.at("2026-10-01")
    ledger, keeper = keep(october(books))
    closed = keeper.close(OCT, "ada")
    for late in rounds:
        for start, hours, team in late:
            begin = origin + start * 3_600_000
            ledger.add(books.held(begin, min(begin + hours * 3_600_000, books.at("2026-11-01")), team=team))
        keeper.correct("ada")
    sums = {}
    lines = [*from_canonical(closed.content.encode()).lines, *(c.line for c in keeper.books().corrections)]
    for line in lines:
        key = (line.team, line.account, line.price_row)
        sums[key] = sums.get(key, 0) + line.gpu_us
    present = statement(ledger, keeper.prices.current, *OCT.span(zone("UTC")))
    assert {key: us for key, us in sums.items() if us} == {
        (line.team, line.account, line.price_row): line.gpu_us for line in present.lines
    }


def test_the_chain_names_the_month_before(books, keep):
    _, keeper = keep([books.held("2026-09-01", "2026-11-01")])
    with pytest.raises(CannotClose, match="2026-09 has records and is open: close it first"):
        keeper.close(OCT, "ada")
    first = keeper.close(SEP, "ada")
    assert keeper.month(SEP).previous_hash is None
    keeper.close(OCT, "ada")
    assert keeper.month(OCT).previous_hash == first.hash
    with pytest.raises(CannotClose, match="2026-11 is not over"):
        keeper.close(NOV, "ada")
    with pytest.raises(CannotClose, match="2026-10 is closed already"):
        keeper.close(OCT, "ada")
    with pytest.raises(CannotClose, match="months close in their order: the next is 2026-11"):
        keeper.close(Month(2026, 8), "ada")


def test_what_stands_against_closing(books, keep):
    rows = [
        books.held("2026-10-01", "2026-10-30"),
        books.held("2026-10-01", "2026-10-02", gpu_model="Tesla T4"),
        books.unheld("2026-10-30", "2026-11-01", account="unmetered"),
    ]
    refused = [
        Quarantined("prod", "n", "e", number, 0, "future", "", json.dumps({"start_ms": start, "end_ms": end}))
        for number, start, end in (
            (1, books.at("2026-10-05"), books.at("2026-10-06")), (2, books.at("2026-11-05"), books.at("2026-11-06"))
        )
    ]  # fmt: skip
    _, keeper = keep(rows, now="2026-11-03", refused=refused)
    standing = {objection.kind: objection.text for objection in keeper.standing(OCT)}
    assert standing == {
        "grace": "late records are still expected: the grace period is not over",
        "unpriced": "24.000 billed GPU-hours have no price",
        "quarantined": "1 records of the month are in quarantine",
        "coverage": "93.75% of the capacity is metered, less than 99%",
    }
    with pytest.raises(
        CannotClose, match=r"24.000 billed.* \(acknowledge unpriced, quarantined, coverage with a reason\)"
    ):
        keeper.close(OCT, "ada", "known", ["grace"])
    with pytest.raises(CannotClose, match="an acknowledgement needs a reason"):
        keeper.close(OCT, "ada", " ", list(standing))
    keeper.close(OCT, "ada", "a T4 nobody bills; node n was new", list(standing))
    closing = keeper.month(OCT).closing
    assert (closing.who, closing.reason) == ("ada", "a T4 nobody bills; node n was new")
    assert closing.acknowledged == tuple(standing.values())


def test_a_quarantined_record_stands_against_its_own_months_alone(books, keep):
    """A pod's facts have no span: they speak of the instants that they name."""

    def refused(number, **content):
        return Quarantined("prod", "n", "e", number, books.at("2026-11-02"), "future", "", json.dumps(content))

    def at(day):
        return books.at(f"2026-{day}")

    records = [
        refused(1, uid="p", created_ms=at("11-05"), observed_ms=at("11-06")),
        refused(2, uid="p", created_ms=at("09-30"), ended_ms=at("10-02"), started_ms=None, observed_ms=at("10-02")),
        refused(3, uid="p", observed_ms=at("10-05")),
        refused(4, uid="p"),
        refused(5, start_ms=at("10-31"), end_ms=at("11-01")),
    ]
    _, keeper = keep([books.held("2026-01-01", "2026-12-31")], now="2027-08-01", refused=records)
    counted = {
        month: next((o.text.split()[0] for o in keeper.standing(month) if o.kind == "quarantined"), "0")
        for month in (Month(2026, 1), Month(2026, 9), OCT, NOV, Month(2026, 12), Month(2027, 6))
    }
    assert [counted[month] for month in counted] == ["0", "1", "3", "2", "0", "0"]


@pytest.mark.parametrize("kind", ["prices", "repriced", "corrected"])
def test_a_repricing_is_recorded_whole_or_not_at_all(books, keep, kind):
    ledger, keeper = keep(october(books), now="2026-11-20")
    keeper.close(OCT, "ada")
    known, statement = ledger.acts(), keeper.month(OCT)
    dearer = books.price_book(BOOK.replace("2.10", "3.10"))
    broken = Bookkeeper(Breaking(ledger, kind), VirtualClock(books.at("2026-11-20")))
    with pytest.raises(LedgerUnavailable):
        broken.reprice(OCT, dearer, "ada", "signed late")
    assert ledger.acts() == known
    assert broken.prices.current == keeper.prices.current
    assert keeper.month(OCT) == statement
    (correction, *_) = keeper.reprice(OCT, dearer, "ada", "signed late")
    assert correction.reason == "priced again"
    assert [act.kind for act in ledger.acts()[len(known) :]] == ["prices", "repriced", "corrected"]
    assert keeper.correct("ada") == []


def test_reopening(books, keep):
    ledger, keeper = keep([books.held("2026-09-01", "2026-11-01")])
    keeper.close(SEP, "ada")
    keeper.close(OCT, "ada")
    with pytest.raises(CannotClose, match="2026-10 was closed after 2026-09"):
        keeper.reopen(SEP, "ada", "wrong price")
    with pytest.raises(CannotClose, match="needs a reason"):
        keeper.reopen(OCT, "ada", "")
    ledger.add(books.held("2026-10-07", "2026-10-08", team="late"))
    assert keeper.correct("ada")
    keeper.reopen(OCT, "ada", "the late node belongs into October")
    assert keeper.status(OCT) == "due"
    assert keeper.month(NOV).corrections == ()
    keeper.close(OCT, "ada")
    assert "late" in {line.team for line in keeper.month(OCT).lines}
    assert keeper.correct("ada") == []
    keeper.publish(OCT, "ada")
    keeper.publish(OCT, "ada")
    assert keeper.status(OCT) == "published"
    with pytest.raises(CannotClose, match="2026-10 is published: what arrives later waits as a proposal for 2026-11"):
        keeper.reopen(OCT, "ada", "again")
    with pytest.raises(CannotClose, match="2026-11 is not closed"):
        keeper.publish(NOV, "ada")


def test_a_month_is_due_once_its_grace_is_over(books, keep):
    _, keeper = keep(october(books), grace_days=5)
    assert keeper.status(OCT) == "due"
    assert not any(objection.kind == "grace" for objection in keeper.standing(OCT))
    _, keeper = keep(october(books), grace_days=25)
    assert keeper.status(OCT) == "grace"
    assert any(objection.kind == "grace" for objection in keeper.standing(OCT))


MONTHS = (
    ("Europe/Berlin", Month(2026, 3), 743),  # clocks forward
    ("Europe/Berlin", Month(2026, 10), 745),  # and back
    ("America/New_York", Month(2026, 11), 721),
    ("Pacific/Kiritimati", Month(2026, 10), 744),  # UTC+14
    ("UTC", Month(2028, 2), 696),  # leap
    ("UTC", Month(2026, 2), 672),
    ("Asia/Kathmandu", Month(2026, 4), 720),  # UTC+5:45
    ("Australia/Lord_Howe", Month(2026, 4), 720.5),  # half an hour of daylight saving
)


@pytest.mark.parametrize(("name", "month", "hours"), MONTHS)
def test_month_boundaries(books, keep, name, month, hours):
    """One GPU held without end: each month has its own hours, and nothing is lost between them. The price
    changes at 00:00 local of its first day."""
    tz = zone(name)
    start, end = month.span(tz)
    day = f"{month}-01"
    book = (
        f"id: old, model: H100, price: '1.00', valid_from: 2025-01-01, valid_to: {day}\n"
        f"id: new, model: H100, price: '3.00', valid_from: {day}"
    )
    whole = books.held(start - 40 * 86_400_000, end + 40 * 86_400_000)
    _, keeper = keep([whole], now="2029-01-01", book=book, timezone=name)
    three = [keeper.month(one) for one in (month.previous, month, month.next)]
    assert three[1].gpu_us == hours * HOUR
    assert three[1].cost == 3 * Decimal(str(hours))
    assert {line.unit_price for line in three[0].lines} == {Decimal("1.00")}
    assert {line.unit_price for line in three[2].lines} == {Decimal("3.00")}
    assert [one.end_ms for one in three[:2]] == [one.start_ms for one in three[1:]]
    assert all(left.end_ms == right.start_ms for left, right in pairwise(three))
    assert sum(one.gpu_us for one in three) == (three[2].end_ms - three[0].start_ms) * 1000


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.randoms(use_true_random=False), copies=st.integers(1, 2))
def test_closing_is_blind_to_order(books, keep, order, copies):
    rows = [
        books.held(f"2026-10-{day:02d}", f"2026-10-{day + 1:02d}T0{day % 10}:00:00.{day:03d}", team=team, busy=0.3)
        for day in range(1, 20)
        for team in ("a", "b")
    ]
    first = keep(rows)[1].close(OCT, "ada")
    order.shuffle(rows)
    _, keeper = keep(rows)
    assert keeper.close(OCT, "ada").hash == first.hash
    assert [canonical(keeper.month(OCT)) for _ in range(copies)] == [first.content.encode()] * copies


def test_an_empty_month_closes_too(books, keep):
    _, keeper = keep([books.row(books.at("2026-12-01"), books.at("2026-12-02"), Accounts())])
    closed = keeper.close(OCT, "ada")
    assert from_canonical(closed.content.encode()).lines == ()


def test_only_our_own_bytes_are_read_back():
    with pytest.raises(ValueError, match=r"canonical|validation"):
        from_canonical(b"{}")


def test_a_month_that_was_tampered_with_shows(books, keep):
    _, keeper = keep([books.held("2026-09-01", "2026-11-01")])
    keeper.close(SEP, "ada")
    keeper.close(OCT, "ada")
    sound = keeper.books()
    assert faults(sound) == []
    first, second = sound.closed
    forged = replace(first, content=first.content.replace('"vision"', '"visioN"'))
    assert faults(replace(sound, closed=(forged, second)))[0].startswith("2026-09: its bytes have the hash")
    assert faults(replace(sound, closed=(second,))) == [
        f"2026-10: names {first.hash} as the month before, which has None"
    ]
