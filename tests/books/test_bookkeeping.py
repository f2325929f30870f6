"""Months that close, stay closed, and are corrected: the laws of the books, month boundaries included."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.bookkeeping import Bookkeeper
from accountant.books.adjustments import NewAdjustment
from accountant.books.closing import CannotClose, faults
from accountant.books.statements import canonical, from_canonical, statement
from accountant.journal import BooksMoved, NewAct
from accountant.periods import Month, zone
from accountant.store.checks import Quarantined
from accountant.wire import Accounts
from agent.clock import VirtualClock

BOOK = "id: h100, model: H100, price: '2.10', valid_from: 2026-01-01"
SEP, OCT, NOV = Month(2026, 9), Month(2026, 10), Month(2026, 11)
HOUR = 3_600_000_000


@pytest.fixture
def keep(books):
    """A bookkeeper over plain rows, on the 20th of November, with a price book."""

    def build(rows, *, now="2026-11-20", book=BOOK, timezone="UTC", refused=(), grace_days=5):
        ledger = books.ledger(rows, refused)
        keeper = Bookkeeper(ledger, VirtualClock(books.at(now)), timezone, grace_days)
        if book:
            keeper.prices.take(books.price_book(book, timezone=timezone), "file", "prices.yaml", "", books.at(now))
        return ledger, keeper

    return build


def october(books, **names):
    return [books.held("2026-10-01", "2026-11-01", 2, 0.5, **names)]


def test_a_closed_month_keeps_its_bytes(books, keep):
    ledger, keeper = keep(october(books))
    before = keeper.month(OCT)
    closed = keeper.close(OCT, "ada")
    kept = canonical(keeper.month(OCT))
    assert (before.status, keeper.month(OCT).status, keeper.status(OCT)) == ("open", "closed", "closed")
    assert keeper.month(OCT).hash == closed.hash
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
    found = [{c.month for c in keeper.correct_lately("ada")} for _ in range(10)]
    assert sorted(found, key=len)[-2:] == [set(), {"2026-03"}], "within eight looks at the eight older ones"
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
    record = Quarantined(
        "prod",
        "n",
        "e",
        1,
        0,
        "future",
        "",
        f'{{"start_ms": {books.at("2026-10-05")}, "end_ms": {books.at("2026-10-06")}}}',
    )
    other = Quarantined(
        "prod",
        "n",
        "e",
        2,
        0,
        "future",
        "",
        f'{{"start_ms": {books.at("2026-11-05")}, "end_ms": {books.at("2026-11-06")}}}',
    )
    _, keeper = keep(rows, now="2026-11-03", refused=[record, other])
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
    with pytest.raises(CannotClose, match="2026-10 is published: later facts become corrections in 2026-11"):
        keeper.reopen(OCT, "ada", "again")
    with pytest.raises(CannotClose, match="2026-11 is not closed"):
        keeper.publish(NOV, "ada")


def test_pricing_again(books, keep):
    ledger, keeper = keep([books.held("2026-10-01", "2026-11-10")])
    keeper.close(OCT, "ada")
    kept = canonical(keeper.month(OCT))
    new = books.price_book(BOOK.replace("2.10", "3.00"))
    before, after = keeper.preview(NOV, new)
    assert (before.cost, after.cost) == (9 * 24 * Decimal("2.10"), 9 * 24 * 3)
    with pytest.raises(CannotClose, match="needs a reason"):
        keeper.reprice(OCT, new, "ada", "")
    booked = keeper.reprice(OCT, new, "ada", "the contract was signed late")
    assert {c.reason for c in booked} == {"priced again"}
    assert sum(c.amount for c in booked) == 31 * 24 * Decimal("0.90")
    assert canonical(keeper.month(OCT)) == kept
    assert keeper.month(NOV).cost == 9 * 24 * 3
    assert keeper.prices.current.version == new.version
    # The file has not changed since: a restart keeps what was put.
    again = Bookkeeper(ledger, VirtualClock(books.at("2026-11-21")))
    assert again.prices.take(books.price_book(BOOK), "file", "prices.yaml", "", 0) is None
    assert again.prices.current.version == new.version
    assert again.correct("ada") == []


def test_no_credit_is_booked_where_no_statement_shows_it(books, keep):
    """A year mistyped, before any month was closed: it is due in the first month there is."""
    _, keeper = keep([books.held("2026-09-10", "2026-11-10")])
    credit = {"team": "vision", "amount": -5, "reason": "a gift", "approved_by": "cfo"}
    early = keeper.credits.adjust(NewAdjustment(month="2025-10", **credit), "ada")
    own = keeper.credits.adjust(NewAdjustment(month="2026-10", **credit), "ada")
    assert [(one.month, one.booked_in) for one in (early, own)] == [("2025-10", "2026-09"), ("2026-10", "2026-10")]
    with pytest.raises(CannotClose, match="2027-01 lies after 2026-11, in which it would be booked"):
        keeper.credits.adjust(NewAdjustment(month="2027-01", **credit), "ada")
    assert [keeper.month(month).due["vision"] - keeper.month(month).payable["vision"] for month in (SEP, OCT)] == [
        -5,
        -5,
    ]


def test_amounts_of_two_currencies_never_meet(books, keep):
    ledger, keeper = keep([books.held("2026-10-01", "2026-11-10")])
    euros = books.price_book(BOOK, currency="EUR")
    assert keeper.prices.take(euros, "file", "prices.yaml", "", 0) is not None, "nothing is booked yet"
    assert keeper.prices.take(books.price_book(BOOK), "file", "prices.yaml", "", 0) is not None
    keeper.close(OCT, "ada")
    with pytest.raises(CannotClose, match="EUR is not the currency of these books, which have amounts in USD"):
        keeper.reprice(OCT, euros, "ada", "we pay in euros now")
    with pytest.raises(CannotClose, match="EUR is not the currency"):
        keeper.prices.try_out(euros, 0)
    again = Bookkeeper(ledger, VirtualClock(books.at("2026-11-21")))
    with pytest.raises(CannotClose, match="EUR is not the currency"):
        again.prices.take(euros, "file", "prices.yaml", "", 0)
    ledger.add(books.held("2026-10-07", "2026-10-08", team="late"))
    keeper.correct("auditor")
    assert (keeper.month(NOV).currency, keeper.month(NOV).due["late"]) == ("USD", Decimal("50.40"))
    keeper.reopen(OCT, "ada", "the contract is in euros")
    assert keeper.prices.take(euros, "file", "prices.yaml", "", 0) is not None
    keeper.credits.adjust(
        NewAdjustment(month="2026-10", team="vision", amount=-5, reason="a gift", approved_by="cfo"), "ada"
    )
    with pytest.raises(CannotClose, match="USD is not the currency of these books, which have amounts in EUR"):
        keeper.prices.take(books.price_book(BOOK), "file", "prices.yaml", "", 0)


def test_credits(books, keep):
    _, keeper = keep([books.held("2026-10-01", "2026-11-10")])
    keeper.close(OCT, "ada")
    credit = {
        "month": "2026-10",
        "team": "vision",
        "amount": "-125.50",
        "reason": "node 7 failed",
        "approved_by": "cfo",
    }
    booked = keeper.credits.adjust(NewAdjustment.model_validate(credit), "ada")
    assert (booked.booked_in, booked.amount, booked.currency) == ("2026-11", Decimal("-125.50"), "USD")
    now = keeper.month(NOV)
    assert now.due["vision"] == now.payable["vision"] - Decimal("125.50")
    assert now.due_total == now.payable_total - Decimal("125.50")
    assert keeper.month(NOV, ["vision"]).adjustments == (booked,)
    assert keeper.month(NOV, ["other"]).adjustments == ()
    for change, message in (
        ({"amount": "1.005"}, "no whole number of minor units"),
        ({"approved_by": "ada"}, "somebody else has to approve"),
        ({"month": "2026-12"}, "2026-12 lies after 2026-11"),
    ):
        with pytest.raises(CannotClose, match=message):
            keeper.credits.adjust(NewAdjustment.model_validate({**credit, **change}), "ada")
    for change in ({"amount": "0"}, {"amount": "NaN"}, {"amount": "1e13"}, {"month": "October"}, {"reason": ""}):
        with pytest.raises(ValueError, match="1 validation error"):
            NewAdjustment.model_validate({**credit, **change})


def test_two_people_do_not_close_one_month(books, keep):
    ledger, keeper = keep(october(books))
    other = Bookkeeper(ledger, VirtualClock(books.at("2026-11-20")))
    stale = keeper.books()
    other.close(OCT, "bob")
    keeper.books = lambda: stale
    with pytest.raises(BooksMoved):
        keeper.close(OCT, "ada")


def test_what_decides_nothing_about_the_books_stops_nobody(books, keep):
    """An import or a delivery records an act a minute: months close, and credits are booked, meanwhile."""
    ledger, keeper = keep(october(books))
    usage, record = ledger.usage, ledger.record

    def meanwhile(*question):
        record([NewAct(0, "imported", "chunk", "import", "")], ledger.last_act())
        return usage(*question)

    def too_late(acts, seen):
        ledger.record = record
        record([NewAct(0, "delivery", "letter", "accountant", "")], ledger.last_act())
        return record(acts, seen)

    ledger.usage, ledger.record = meanwhile, too_late
    assert keeper.close(OCT, "ada").month == "2026-10"
    assert "imported" in {act.kind for act in ledger.acts()}
    ledger.record = too_late
    credit = {"month": "2026-10", "team": "vision", "amount": "-1.00", "reason": "node failed", "approved_by": "bob"}
    adjusted = keeper.credits.adjust(NewAdjustment.model_validate(credit), "ada")
    assert adjusted.id == f"adjustment-{ledger.last_act()}", "its number is that of its act, whatever came before"


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


@pytest.mark.parametrize("amount", ["true", "false", "null", '"one"', "1e999"])
def test_what_is_no_number_is_no_amount(amount: str) -> None:
    text = f'{{"month": "2026-11", "team": "vision", "amount": {amount}, "reason": "r", "approved_by": "cfo"}}'
    with pytest.raises(ValueError, match="amount"):
        NewAdjustment.model_validate_json(text)
