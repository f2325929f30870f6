"""What is due beside the metered time: another price for a closed month, credits, one currency, each act once."""

from __future__ import annotations

from decimal import Decimal

import pytest

from accountant.billing.statements import canonical
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.corrections_and_adjustments import NewAdjustment
from accountant.bookkeeping.month_closing import CannotClose
from accountant.ledger.journal import BooksMoved, NewAct
from gputally.base.clock import VirtualClock
from tests.billing.bookkeeping_cases import BOOK, NOV, OCT, SEP, october


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
    with pytest.raises(
        CannotClose, match="2027-01 is after 2026-11, the month in which the adjustment would be booked"
    ):
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
        ({"amount": "1.005"}, "not a whole number of minor units"),
        ({"approved_by": "ada"}, "another person has to approve"),
        ({"month": "2026-12"}, "2026-12 is after 2026-11"),
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


@pytest.mark.parametrize("amount", ["true", "false", "null", '"one"', "1e999"])
def test_what_is_no_number_is_no_amount(amount: str) -> None:
    text = f'{{"month": "2026-11", "team": "vision", "amount": {amount}, "reason": "r", "approved_by": "cfo"}}'
    with pytest.raises(ValueError, match="amount"):
        NewAdjustment.model_validate_json(text)
