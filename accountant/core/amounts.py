"""Reads decimal amounts, currencies and dates from files.

A YAML number arrives as a binary float; its shortest text is what was written, up to 15 digits. Pure.
"""

from __future__ import annotations

from datetime import date
from decimal import Decimal, InvalidOperation
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from accountant.core.periods import zone
from gputally.base.money import CURRENCIES

MAX_AMOUNT = 10**9
MAX_PLACES = 12
_FLOAT_DIGITS = 15
"""Decimal digits a binary float always gives back as written (IEEE 754 double: DBL_DIG)."""


def parse_amount(value: object) -> Decimal:
    """A YAML number or text as the decimal that was written: 0 to MAX_AMOUNT. Raises ValueError."""
    try:
        amount = Decimal(str(value))
    except InvalidOperation as error:
        raise ValueError(f"not a number: {value!r}") from error
    if not amount.is_finite():
        raise ValueError(f"not a price: {value}")
    digits, exponent = amount.as_tuple().digits, amount.as_tuple().exponent
    if isinstance(value, float) and len(digits) > _FLOAT_DIGITS:
        raise ValueError(f"{value!r} has more digits than a YAML number keeps: put the price in quotes")
    if isinstance(exponent, int) and -exponent > MAX_PLACES:
        raise ValueError(f"more than {MAX_PLACES} decimals: {value}")
    if amount < 0:
        raise ValueError(f"a price is not negative: {value}")
    if amount > MAX_AMOUNT:
        raise ValueError(f"more than {MAX_AMOUNT} a GPU-hour: {value}")
    return amount


def _share(value: object) -> Decimal:
    share = parse_amount(value)
    if share > 1:
        raise ValueError(f"a share is 0 to 1: {value}")
    return share


def _currency(value: str) -> str:
    if value not in CURRENCIES:
        raise ValueError(f"not an ISO 4217 currency: {value!r}")
    return value


def _timezone(value: str) -> str:
    zone(value)
    return value


def _day(value: str) -> str:
    date.fromisoformat(value)
    return value


Amount = Annotated[Decimal, BeforeValidator(parse_amount)]
"""A non-negative amount of the book's currency, or a quantity it is multiplied with."""
Share = Annotated[Decimal, BeforeValidator(_share)]
"""0 to 1."""
CurrencyCode = Annotated[str, AfterValidator(_currency)]
TimezoneName = Annotated[str, AfterValidator(_timezone)]
Day = Annotated[str, AfterValidator(_day), Field(description="A date: 2026-10-01.")]
