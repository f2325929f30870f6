"""Months that are closed, stay closed and get corrections: late facts, proposals, new prices, credits and
currencies."""

from __future__ import annotations

import copy
import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.billing.cost_allocation import statement
from accountant.billing.statements import canonical, from_canonical
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.corrections_and_adjustments import NewAdjustment
from accountant.bookkeeping.month_closing import CannotClose, faults, statement_hash
from accountant.core.errors import LedgerUnavailable
from accountant.core.periods import Month, zone
from accountant.ledger.journal import BooksMoved, NewAct
from accountant.ledger.protocols import MOST_QUARANTINED, Quarantined
from accountant.wire.usage_cost_and_job_models import Accounts
from gputally.base.clock import VirtualClock
from tests.billing.usage_rows import BOOK, NOV, OCT, SEP, Breaking, at, held, october, price_book, unheld
from tests.fakes.list_ledger import ListLedger, Row

HOUR = 3_600_000_000


def time_by_line(lines):
    """Return GPU-microseconds by team, account and price row."""
    sums = Counter()
    for line in lines:
        sums[line.team, line.account, line.price_row] += line.gpu_us
    return {key: gpu_us for key, gpu_us in sums.items() if gpu_us}


def test_a_closed_month_keeps_its_bytes(keep):
    ledger, keeper = keep(october())
    before = keeper.month(OCT)
    closed = keeper.close(OCT, "ada")
    kept = canonical(keeper.month(OCT))
    assert (before.status, keeper.month(OCT).status, keeper.status(OCT)) == ("open", "closed", "closed")
    assert statement_hash(keeper.month(OCT)) == closed.hash
    assert from_canonical(kept) == keeper.month(OCT)
    ledger.add(held("2026-10-07", "2026-10-08", team="late"))
    assert canonical(keeper.month(OCT)) == kept
    again = Bookkeeper(ledger, VirtualClock(at("2027-03-01")))
    assert canonical(again.month(OCT)) == kept
    assert again.month(OCT).lines == before.lines


def test_late_facts_are_corrected_in_the_open_month(closed):
    ledger, keeper = closed
    assert keeper.correct("auditor") == []
    ledger.add(held("2026-10-07", "2026-10-07T10:00", team="late"))
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


@pytest.mark.parametrize("name", ["Europe/Berlin", "Atlantic/Azores", "Australia/Lord_Howe", "Africa/Casablanca"])
def test_twenty_months_with_clock_changes_and_twelve_closings_are_exact(keep, name):
    """A GPU at one price all the time: each month has its own length, and together they have the whole span's."""
    months = [Month(2026 + number // 12, number % 12 + 1) for number in range(20)]
    start, end = months[0].span(zone(name))[0], months[-1].span(zone(name))[1]
    book = "id: h100, model: H100, price: '1.37', valid_from: 2025-12-01"
    later = datetime.fromtimestamp(end / 1000 + 40 * 86_400, UTC).isoformat()
    ledger, keeper = keep([held(start, end)], now=later, timezone=name, book=book)
    closed = [keeper.close(month, "ada") for month in months[:12]]
    ledger.add(held(start + HOUR // 1000, start + 3 * HOUR // 1000, team="late"))
    assert [one.month for one in keeper.proposals()] == ["2026-01"]
    stated = [keeper.month(month) for month in months]
    lengths = [month.span(zone(name))[1] - month.span(zone(name))[0] for month in months]
    of_team = [sum(line.gpu_us for line in one.lines if line.team == "vision") for one in stated]
    assert of_team == [length * 1000 for length in lengths]
    assert sum(of_team) == (end - start) * 1000
    assert len({length % 86_400_000 for length in lengths}) > 1, "some months have a day of another length"
    for one, hours in zip(stated, of_team, strict=True):
        cost = sum(line.cost for line in one.lines if line.team == "vision")
        assert cost == Decimal("1.37") * Decimal(hours) / HOUR
    assert [statement_hash(keeper.month(month)) for month in months[:12]] == [one.hash for one in closed]
    assert [one.content for one in closed] == [one.content for one in keeper.books().closed]


def test_a_month_that_was_closed_long_ago_is_corrected_too(keep):
    """Late facts are corrected in turn, a price at once."""
    ledger, _ = keep([held("2026-01-01", "2026-11-01")])
    keeper = Bookkeeper(ledger, VirtualClock(at("2026-11-20")), look_back=2)
    for number in range(1, 11):
        keeper.close(Month(2026, number), "ada")
    ledger.add(held("2026-03-07", "2026-03-08", team="late"))
    found = [{one.month for one in keeper.new_proposals()} for _ in range(10)]
    assert sorted(found, key=len)[-2:] == [set(), {"2026-03"}], "within eight looks at the eight older ones"
    assert {c.month for c in keeper.correct("ada")} == {"2026-03"}
    ledger.add(held("2026-02-07", "2026-02-08", team="late"))
    assert {c.month for c in keeper.correct("ada")} == {"2026-02"}
    booked = keeper.reprice(Month(2026, 1), price_book(BOOK.replace("2.10", "3.10")), "ada", "signed late")
    assert sum(c.amount for c in booked) == 31 * 24


def test_a_reversal_stands_beside_the_new_amount(keep):
    rows = october(team="wrong")
    ledger, keeper = keep(rows)
    keeper.close(OCT, "ada")
    ledger.rows[:] = october(team="right")
    amounts = {(c.line.team, c.line.account): c.amount for c in keeper.correct("ada")}
    half = Decimal("1562.40")
    assert amounts == {
        ("right", "busy"): half, ("right", "allocated_idle"): half,
        ("wrong", "busy"): -half, ("wrong", "allocated_idle"): -half,
    }  # fmt: skip
    assert keeper.month(NOV).due_total == 0


HOURS_OF_TEAMS = (st.integers(0, 700), st.integers(1, 40), st.sampled_from("abc"))
"""First hour, number of hours, team."""


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.tuples(*HOURS_OF_TEAMS), max_size=3), max_size=4))
def test_closed_plus_corrections_is_the_present(keep, rounds):
    """However often facts arrive and corrections are booked, no GPU-microsecond is missing or counted twice."""
    origin = at("2026-10-01")
    ledger, keeper = keep(october())
    closed = keeper.close(OCT, "ada")
    for late in rounds:
        for start, hours, team in late:
            begin = origin + start * 3_600_000
            ledger.add(held(begin, min(begin + hours * 3_600_000, at("2026-11-01")), team=team))
        keeper.correct("ada")
    lines = [*from_canonical(closed.content.encode()).lines, *(c.line for c in keeper.books().corrections)]
    present = statement(ledger, keeper.prices.current, *OCT.span(zone("UTC")))
    assert time_by_line(lines) == time_by_line(present.lines)


def test_the_chain_names_the_month_before(keep):
    _, keeper = keep([held("2026-09-01", "2026-11-01")])
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
    with pytest.raises(CannotClose, match="months are closed in order: close 2026-11 before"):
        keeper.close(Month(2026, 8), "ada")


def test_what_stands_against_closing(keep):
    rows = [
        held("2026-10-01", "2026-10-30"),
        held("2026-10-01", "2026-10-02", gpu_model="Tesla T4"),
        unheld("2026-10-30", "2026-11-01", account="unmetered"),
    ]
    refused = [
        Quarantined("prod", "n", "e", number, 0, "future", "", json.dumps({"start_ms": start, "end_ms": end}))
        for number, start, end in (
            (1, at("2026-10-05"), at("2026-10-06")), (2, at("2026-11-05"), at("2026-11-06"))
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
    refusal = r"24.000 billed.* \(acknowledge unpriced, quarantined, coverage with a reason\)"
    with pytest.raises(CannotClose, match=refusal):
        keeper.close(OCT, "ada", "known", ["grace"])
    with pytest.raises(CannotClose, match="an acknowledgement needs a reason"):
        keeper.close(OCT, "ada", " ", list(standing))
    keeper.close(OCT, "ada", "a T4 nobody bills; node n was new", list(standing))
    closing = keeper.month(OCT).closing
    assert (closing.who, closing.reason) == ("ada", "a T4 nobody bills; node n was new")
    assert closing.acknowledged == tuple(standing.values())


class ArrivingLedger(ListLedger):
    """A ledger in which something arrives as soon as a moment of November has been opened."""

    def arrive(self):
        """Nothing, until a test sets it."""

    @contextmanager
    def moment(self, start_ms=0, end_ms=0):
        opened = copy.copy(self)
        opened.rows, opened.refused = list(self.rows), list(self.refused)
        if end_ms > at("2026-11-01"):
            self.arrive()
        yield opened


def test_a_month_is_judged_by_the_state_of_the_ledger_that_its_hash_signs():
    """A record that is set aside while the month is closed belongs to the next state, as a row that arrives then."""
    instants = json.dumps({"start_ms": at("2026-11-05"), "end_ms": at("2026-11-06")})

    def arrive():
        ledger.refused.append(Quarantined("prod", "n", "e", len(ledger.refused), 0, "future", "", instants))
        ledger.rows.append(held("2026-10-03", "2026-10-04", team="late"))

    ledger = ArrivingLedger([held("2026-10-01", "2026-12-01")])
    keeper = Bookkeeper(ledger, VirtualClock(at("2027-02-01")))
    keeper.prices.take(price_book(BOOK), "file", "prices.yaml", "", at("2026-10-01"))
    keeper.close(OCT, "ada")
    ledger.arrive = arrive
    closed = keeper.close(NOV, "ada")
    assert keeper.month(NOV).closing.acknowledged == ()
    assert closed.hash
    assert [proposal.month for proposal in keeper.proposals()] == ["2026-10"]


def test_a_month_whose_quarantined_records_are_too_many_to_count_is_not_closed_unseen(keep):
    """The ledger returns the newest quarantined records; a flood of the present hides those of the month."""
    present = json.dumps({"start_ms": at("2026-11-05"), "end_ms": at("2026-11-06")})
    flood = [Quarantined("prod", "n", "e", number, 0, "future", "", present) for number in range(MOST_QUARANTINED)]
    _, keeper = keep([held("2026-10-01", "2026-11-01")], now="2026-12-01", refused=flood)
    (objection,) = keeper.standing(OCT)
    assert objection.kind == "quarantined"
    assert objection.text == (
        "0 records of the month are in quarantine; only the newest 10,000 records of the quarantine were checked"
    )


def test_a_quarantined_record_stands_against_its_own_months_alone(keep):
    """A pod's facts have no span; they belong to the instants that they name."""

    def refused(number, **content):
        return Quarantined("prod", "n", "e", number, at("2026-11-02"), "future", "", json.dumps(content))

    records = [
        refused(1, uid="p", created_ms=at("2026-11-05"), observed_ms=at("2026-11-06")),
        refused(
            2,
            uid="p",
            created_ms=at("2026-09-30"),
            ended_ms=at("2026-10-02"),
            started_ms=None,
            observed_ms=at("2026-10-02"),
        ),
        refused(3, uid="p", observed_ms=at("2026-10-05")),
        refused(4, uid="p"),
        refused(5, start_ms=at("2026-10-31"), end_ms=at("2026-11-01")),
    ]
    _, keeper = keep([held("2026-01-01", "2026-12-31")], now="2027-08-01", refused=records)
    counted = {
        month: next((o.text.split()[0] for o in keeper.standing(month) if o.kind == "quarantined"), "0")
        for month in (Month(2026, 1), Month(2026, 9), OCT, NOV, Month(2026, 12), Month(2027, 6))
    }
    assert [counted[month] for month in counted] == ["0", "1", "3", "2", "0", "0"]


@pytest.mark.parametrize("kind", ["prices", "repriced", "corrected"])
def test_a_repricing_is_recorded_whole_or_not_at_all(closed, kind):
    ledger, keeper = closed
    known, statement = ledger.acts(), keeper.month(OCT)
    dearer = price_book(BOOK.replace("2.10", "3.10"))
    broken = Bookkeeper(Breaking(ledger, kind), VirtualClock(at("2026-11-20")))
    with pytest.raises(LedgerUnavailable):
        broken.reprice(OCT, dearer, "ada", "signed late")
    assert ledger.acts() == known
    assert broken.prices.current == keeper.prices.current
    assert keeper.month(OCT) == statement
    (correction, *_) = keeper.reprice(OCT, dearer, "ada", "signed late")
    assert correction.reason == "priced again"
    assert [act.kind for act in ledger.acts()[len(known) :]] == ["prices", "repriced", "corrected"]
    assert keeper.correct("ada") == []


def test_reopening(keep):
    ledger, keeper = keep([held("2026-09-01", "2026-11-01")])
    keeper.close(SEP, "ada")
    keeper.close(OCT, "ada")
    with pytest.raises(CannotClose, match="2026-09 cannot be reopened: only the newest closed month can"):
        keeper.reopen(SEP, "ada", "wrong price")
    with pytest.raises(CannotClose, match="needs a reason"):
        keeper.reopen(OCT, "ada", "")
    ledger.add(held("2026-10-07", "2026-10-08", team="late"))
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
    with pytest.raises(
        CannotClose,
        match=r"2026-10 is published and cannot be reopened: accept the proposal from its late records, or book a "
        r"credit or charge \(both are booked in 2026-11\)",
    ):
        keeper.reopen(OCT, "ada", "again")
    with pytest.raises(CannotClose, match="2026-11 is not closed"):
        keeper.publish(NOV, "ada")


def test_a_month_is_due_once_its_grace_is_over(keep):
    _, keeper = keep(october(), grace_days=5)
    assert keeper.status(OCT) == "due"
    assert not any(objection.kind == "grace" for objection in keeper.standing(OCT))
    _, keeper = keep(october(), grace_days=25)
    assert keeper.status(OCT) == "grace"
    assert any(objection.kind == "grace" for objection in keeper.standing(OCT))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.randoms(use_true_random=False), copies=st.integers(1, 2))
def test_closing_is_blind_to_order(keep, order, copies):
    rows = [
        held(f"2026-10-{day:02d}", f"2026-10-{day + 1:02d}T0{day % 10}:00:00.{day:03d}", team=team, busy=0.3)
        for day in range(1, 20)
        for team in ("a", "b")
    ]
    first = keep(rows)[1].close(OCT, "ada")
    order.shuffle(rows)
    _, keeper = keep(rows)
    assert keeper.close(OCT, "ada").hash == first.hash
    assert [canonical(keeper.month(OCT)) for _ in range(copies)] == [first.content.encode()] * copies


def test_an_empty_month_closes_too(keep):
    _, keeper = keep([Row(at("2026-12-01"), at("2026-12-02"), Accounts())])
    closed = keeper.close(OCT, "ada")
    assert from_canonical(closed.content.encode()).lines == ()


def test_only_our_own_bytes_are_read_back():
    with pytest.raises(ValueError, match=r"canonical|validation"):
        from_canonical(b"{}")


def test_a_month_that_was_tampered_with_shows(keep):
    _, keeper = keep([held("2026-09-01", "2026-11-01")])
    keeper.close(SEP, "ada")
    keeper.close(OCT, "ada")
    sound = keeper.books()
    assert faults(sound) == []
    first, second = sound.closed
    forged = replace(first, content=first.content.replace('"vision"', '"visioN"'))
    assert faults(replace(sound, closed=(forged, second)))[0].startswith("2026-09: the stored statement has the hash")
    assert faults(replace(sound, closed=(second,))) == [
        f"2026-10: the statement states the hash {first.hash} for the previous closed month, but None is recorded"
    ]


HOUR_US = 3_600_000_000


@pytest.fixture
def closed(keep):
    """A closed October."""
    ledger, keeper = keep(october())
    keeper.close(OCT, "ada")
    return ledger, keeper


@pytest.fixture
def late(closed):
    """A closed October with ten hours that arrive late, and the resulting proposal."""
    ledger, keeper = closed
    ledger.add(held("2026-10-07", "2026-10-07T10:00", team="late"))
    (found,) = keeper.proposals()
    return ledger, keeper, found


def test_what_arrives_late_waits_and_changes_nothing(closed):
    ledger, keeper = closed
    kept, acts = canonical(keeper.month(OCT)), ledger.acts()
    assert keeper.proposals() == []
    ledger.add(held("2026-10-07", "2026-10-07T10:00", team="late"))
    (found,) = keeper.new_proposals()
    assert keeper.new_proposals() == [], "a proposal is new only once"
    assert keeper.waiting == (found,)
    assert [(e.team, e.gpu_us, e.amount) for e in found.effects()] == [("late", 10 * HOUR_US, Decimal("21.00"))]
    assert found.effects(["red"]) == []
    assert (canonical(keeper.month(OCT)), ledger.acts()) == (kept, acts)
    assert (keeper.month(NOV).corrections, keeper.month(NOV).due_total) == ((), 0)
    assert keeper.proposals(NOV) == []


class Counted:
    """A ledger that counts the moments of a span that are opened of it."""

    def __init__(self, ledger):
        self._ledger, self.opened = ledger, 0

    def __getattr__(self, name):
        return getattr(self._ledger, name)

    def moment(self, *span):
        self.opened += bool(span)
        return self._ledger.moment(*span)


def test_a_closed_month_is_billed_again_only_if_something_of_it_has_changed(closed):
    ledger, _ = closed
    counted = Counted(ledger)
    keeper = Bookkeeper(counted, VirtualClock(at("2026-11-20")))
    assert keeper.new_proposals() == []
    looked = counted.opened
    assert keeper.new_proposals() == []
    assert counted.opened == looked, "nothing has changed since"
    keeper.drafts.keep(NOV, "ada")
    looked = counted.opened
    assert keeper.new_proposals() == []
    assert counted.opened == looked, "a draft of another month changes no closed one"
    ledger.add(held("2026-10-07", "2026-10-07T10:00", team="late"))
    (found,) = keeper.new_proposals()
    assert counted.opened > looked
    keeper.refuse(OCT, found.id, "ada", "too late")
    assert keeper.new_proposals() == []
    assert keeper.waiting == ()
    ledger.add(held("2026-10-08", "2026-10-08T03:00", team="late"))
    assert [one.id == found.id for one in keeper.new_proposals()] == [False], (
        "what arrives after the refusal waits again"
    )


def test_taken_up_it_is_booked_once_by_whoever_took_it(late):
    ledger, keeper, found = late
    booked = keeper.accept(OCT, found.id, "ada", "an agent was cut off")
    assert [(one.month, one.booked_in, one.line.team) for one in booked] == [("2026-10", "2026-11", "late")]
    last = ledger.acts()[-1]
    assert (last.kind, last.subject, last.who, last.reason) == ("corrected", "2026-10", "ada", "an agent was cut off")
    assert (keeper.month(NOV).due_total, keeper.proposals(), keeper.waiting) == (Decimal("21.00"), [], ())
    with pytest.raises(CannotClose, match="2026-10 has no proposal"):
        keeper.accept(OCT, found.id, "ada")


def test_refused_it_is_kept_and_never_proposed_again(late):
    ledger, keeper, found = late
    with pytest.raises(CannotClose, match="needs a reason"):
        keeper.refuse(OCT, found.id, "ada", " ")
    keeper.refuse(OCT, found.id, "ada", "a test node")
    assert ledger.acts()[-1].kind == "refused"
    assert (keeper.proposals(), keeper.correct("ada"), keeper.month(NOV).due_total) == ([], [], 0)
    again = Bookkeeper(ledger, VirtualClock(at("2027-03-01")))
    assert again.proposals() == []
    ledger.add(held("2026-10-08", "2026-10-08T01:00", team="late"))
    (more,) = again.proposals()
    assert [(e.team, e.gpu_us) for e in more.effects()] == [("late", HOUR_US)]


def test_an_act_is_about_what_its_author_has_seen(late):
    ledger, keeper, found = late
    ledger.add(held("2026-10-08", "2026-10-08T03:00", team="late"))
    for act in (keeper.accept, keeper.refuse):
        with pytest.raises(CannotClose, match="more records have arrived for 2026-10"):
            act(OCT, found.id, "ada", "why")
    with pytest.raises(CannotClose, match="2026-11 is not closed"):
        keeper.accept(NOV, found.id, "ada")


def test_closing_the_next_month_names_what_waits(keep):
    ledger, keeper = keep([held("2026-10-01", "2026-12-01")], now="2026-12-20")
    keeper.close(OCT, "ada")
    ledger.add(held("2026-10-07", "2026-10-07T10:00", team="late"))
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


def test_a_price_takes_up_nothing_that_waits_or_was_refused(closed):
    ledger, keeper = closed
    dearer = price_book(BOOK.replace("2.10", "3.10"))
    ledger.add(held("2026-10-07", "2026-10-07T10:00", team="late"))
    with pytest.raises(CannotClose, match="accept or refuse it, then price the month again"):
        keeper.reprice(OCT, dearer, "ada", "signed late")
    (found,) = keeper.proposals()
    keeper.refuse(OCT, found.id, "ada", "a test node")
    booked = keeper.reprice(OCT, dearer, "ada", "signed late")
    assert {one.line.team for one in booked}.isdisjoint({"late"})
    assert sum(one.line.gpu_us for one in booked) == 0
    assert keeper.proposals() == []


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(*HOURS_OF_TEAMS, st.sampled_from(("accept", "refuse", ""))), max_size=6))
def test_closed_and_corrections_and_refused_and_waiting_are_the_present(keep, late):
    """In GPU-microseconds, whatever arrives and whatever is decided about it; the closed bytes stay."""
    origin = at("2026-10-01")
    ledger, keeper = keep(october())
    keeper.close(OCT, "ada")
    kept = keeper.books().closed[0].content
    for start, hours, team, act in late:
        begin = origin + start * 3_600_000
        ledger.add(held(begin, min(begin + hours * 3_600_000, at("2026-11-01")), team=team))
        for found in keeper.proposals() if act else []:
            (keeper.accept if act == "accept" else keeper.refuse)(OCT, found.id, "ada", "why")
    now = keeper.books()
    assert now.closed[0].content == kept
    waiting = [line for one in keeper.proposals() for line in one.lines]
    decided = [c.line for c in (*now.corrections, *now.refused, *waiting)]
    keeper.reopen(OCT, "ada", "to see the present")
    assert time_by_line([*from_canonical(kept.encode()).lines, *decided]) == time_by_line(keeper.month(OCT).lines)


def test_pricing_again(keep):
    ledger, keeper = keep([held("2026-10-01", "2026-11-10")])
    keeper.close(OCT, "ada")
    kept = canonical(keeper.month(OCT))
    new = price_book(BOOK.replace("2.10", "3.00"))
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
    again = Bookkeeper(ledger, VirtualClock(at("2026-11-21")))
    assert again.prices.take(price_book(BOOK), "file", "prices.yaml", "", 0) is None
    assert again.prices.current.version == new.version
    assert again.correct("ada") == []


def credit(**changes):
    given = {"month": "2026-10", "team": "vision", "amount": "-125.50", "reason": "node failed", "approved_by": "cfo"}
    return NewAdjustment.model_validate({**given, **changes})


def test_no_credit_is_booked_where_no_statement_shows_it(keep):
    """The year is mistyped and before any closed month, so the credit is due in the first month of the ledger."""
    _, keeper = keep([held("2026-09-10", "2026-11-10")])
    early, own = (keeper.credits.adjust(credit(month=month, amount=-5), "ada") for month in ("2025-10", "2026-10"))
    assert [(one.month, one.booked_in) for one in (early, own)] == [("2025-10", "2026-09"), ("2026-10", "2026-10")]
    with pytest.raises(CannotClose, match="2027-01 is after 2026-11, the month in which the adjustment is booked"):
        keeper.credits.adjust(credit(month="2027-01"), "ada")
    for month in map(keeper.month, (SEP, OCT)):
        assert month.due["vision"] - month.payable["vision"] == -5


def test_amounts_of_two_currencies_never_meet(keep):
    ledger, keeper = keep([held("2026-10-01", "2026-11-10")])
    euros = price_book(BOOK, currency="EUR")
    assert keeper.prices.take(euros, "file", "prices.yaml", "", 0) is not None, "nothing is booked yet"
    assert keeper.prices.take(price_book(BOOK), "file", "prices.yaml", "", 0) is not None
    keeper.close(OCT, "ada")
    with pytest.raises(CannotClose, match="EUR is not the currency of this ledger, which has amounts in USD"):
        keeper.reprice(OCT, euros, "ada", "we pay in euros now")
    with pytest.raises(CannotClose, match="EUR is not the currency"):
        keeper.prices.try_out(euros, 0)
    again = Bookkeeper(ledger, VirtualClock(at("2026-11-21")))
    with pytest.raises(CannotClose, match="EUR is not the currency"):
        again.prices.take(euros, "file", "prices.yaml", "", 0)
    ledger.add(held("2026-10-07", "2026-10-08", team="late"))
    keeper.correct("auditor")
    assert (keeper.month(NOV).currency, keeper.month(NOV).due["late"]) == ("USD", Decimal("50.40"))
    keeper.reopen(OCT, "ada", "the contract is in euros")
    assert keeper.prices.take(euros, "file", "prices.yaml", "", 0) is not None
    keeper.credits.adjust(credit(), "ada")
    with pytest.raises(CannotClose, match="USD is not the currency of this ledger, which has amounts in EUR"):
        keeper.prices.take(price_book(BOOK), "file", "prices.yaml", "", 0)


def test_credits(keep):
    _, keeper = keep([held("2026-10-01", "2026-11-10")])
    keeper.close(OCT, "ada")
    booked = keeper.credits.adjust(credit(), "ada")
    assert (booked.booked_in, booked.amount, booked.currency) == ("2026-11", Decimal("-125.50"), "USD")
    now = keeper.month(NOV)
    assert now.due["vision"] == now.payable["vision"] - Decimal("125.50")
    assert now.due_total == now.payable_total - Decimal("125.50")
    assert keeper.month(NOV, ["vision"]).adjustments == (booked,)
    assert keeper.month(NOV, ["other"]).adjustments == ()
    for change, message in (
        ({"amount": "1.005"}, "has more decimals than the currency"),
        ({"approved_by": "ada"}, "another person has to approve"),
        ({"month": "2026-12"}, "2026-12 is after 2026-11"),
    ):
        with pytest.raises(CannotClose, match=message):
            keeper.credits.adjust(credit(**change), "ada")


@pytest.mark.parametrize(
    "change", [{"amount": "0"}, {"amount": "NaN"}, {"amount": "1e13"}, {"month": "October"}, {"reason": ""}]
)
def test_what_is_no_credit_is_refused(change):
    with pytest.raises(ValueError, match="1 validation error"):
        credit(**change)


def test_two_people_do_not_close_one_month(keep):
    ledger, keeper = keep(october())
    other = Bookkeeper(ledger, VirtualClock(at("2026-11-20")))
    stale = keeper.books()
    other.close(OCT, "bob")
    keeper.books = lambda: stale
    with pytest.raises(BooksMoved):
        keeper.close(OCT, "ada")


def test_what_decides_nothing_about_the_books_stops_nobody(keep):
    """An import or a delivery records a journal entry every minute; meanwhile months close and credits are booked."""
    ledger, keeper = keep(october())
    usage, record = ledger.usage, ledger.record

    def meanwhile(*question):
        record([NewAct(0, "imported", "chunk", "import", "")], ledger.status().last_act)
        return usage(*question)

    def too_late(acts, seen):
        ledger.record = record
        record([NewAct(0, "delivery", "letter", "accountant", "")], ledger.status().last_act)
        return record(acts, seen)

    ledger.usage, ledger.record = meanwhile, too_late
    assert keeper.close(OCT, "ada").month == "2026-10"
    assert "imported" in {act.kind for act in ledger.acts()}
    ledger.record = too_late
    adjusted = keeper.credits.adjust(credit(), "ada")
    assert adjusted.id == f"adjustment-{ledger.status().last_act}", (
        "its number is that of its act, whatever came before"
    )


@pytest.mark.parametrize("amount", ["true", "false", "null", '"one"', "1e999"])
def test_what_is_no_number_is_no_amount(amount):
    text = f'{{"month": "2026-11", "team": "vision", "amount": {amount}, "reason": "r", "approved_by": "cfo"}}'
    with pytest.raises(ValueError, match="amount"):
        NewAdjustment.model_validate_json(text)
