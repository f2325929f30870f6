"""Credits and charges that somebody approved: a failed node, a goodwill credit, a fee.

An adjustment is an amount for one team, booked in an open month about that or an earlier one, with who booked it,
who approved it and why. It never changes a line: it stands beside them and is due with them. Pure.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from accountant.books.statements import Adjustment
from accountant.money import minor_places
from accountant.periods import Month
from accountant.wire import Model

_MAX = Decimal(10) ** 12


class NewAdjustment(Model):
    """amount: negative for a credit, in whole minor units of the price book's currency."""

    month: str
    team: str = Field(min_length=1, max_length=253)
    amount: Annotated[Decimal, BeforeValidator(lambda value: Decimal(value) if type(value) is int else value)]
    reason: str = Field(min_length=1, max_length=1000)
    approved_by: str = Field(min_length=1, max_length=253)

    @field_validator("month")
    @classmethod
    def _month(cls, text: str) -> str:
        return str(Month.parse(text))

    @field_validator("amount")
    @classmethod
    def _amount(cls, amount: Decimal) -> Decimal:
        if not amount.is_finite() or not amount or not -_MAX <= amount <= _MAX:
            raise ValueError(f"an adjustment is an amount other than 0, at most {_MAX:.0e}")
        return amount


def booked(new: NewAdjustment, *, number: int, booked_in: str, currency: str, who: str, at_ms: int) -> Adjustment:
    """The adjustment as it is booked. Raises ValueError for a fraction of a minor unit, or one that its own
    author approves."""
    places = minor_places(currency)
    if new.amount != round(new.amount, places):
        raise ValueError(f"{new.amount} {currency} is no whole number of minor units ({places} decimals)")
    if new.approved_by == who:
        raise ValueError(f"{who!r} books it, so somebody else has to approve it")
    if new.month > booked_in:
        raise ValueError(f"{new.month} lies after {booked_in}, in which it would be booked")
    return Adjustment(
        id=f"adjustment-{number}",
        month=new.month,
        booked_in=booked_in,
        team=new.team,
        amount=round(new.amount, places),
        currency=currency,
        reason=new.reason,
        who=who,
        approved_by=new.approved_by,
        at_ms=at_ms,
    )
