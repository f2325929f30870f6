"""Defines money and exact arithmetic of GPU time and prices.

The module never combines amounts of different currencies, and refuses floats. Every operation on amounts is exact (the
context traps Inexact) except the rounding to the currency's minor unit. A single amount is rounded half to even; the
parts of a whole are rounded by largest remainder, so that they add up.

An hour is 3.6e9 µs, and 1/3.6e9 has no finite decimal expansion. The module therefore never divides a price. It first
rounds time to GPU-hours with nine decimals (a unit of 3.6 µs), apportioned so that the parts add up to the rounded
total. A cost is then the price times that quantity, exactly."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, Inexact, InvalidOperation, Overflow
from fractions import Fraction
from typing import TypeVar

from gputally.base import called_off
from gputally.base.apportionment import apportion
from gputally.base.units import US_PER_HOUR

K = TypeVar("K", bound=Hashable)

HOUR_PLACES = 9
"""Decimal places of a GPU-hour quantity."""

_EXACT = Context(prec=200, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[Inexact, InvalidOperation, Overflow])
"""Context with enough precision for every sum of products in this module. If the precision does not suffice, the
context raises Inexact instead of rounding."""

# ISO 4217, list one (national currencies in use; funds and precious metals left out).
_CODES = """
    AED AFN ALL AMD AOA ARS AUD AWG AZN BAM BBD BDT BHD BIF BMD BND BOB BRL BSD BTN BWP BYN BZD CAD CDF CHF CLP CNY
    COP CRC CUP CVE CZK DJF DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD GNF GTQ GYD HKD HNL HTG HUF IDR
    ILS INR IQD IRR ISK JMD JOD JPY KES KGS KHR KMF KPW KRW KWD KYD KZT LAK LBP LKR LRD LSL LYD MAD MDL MGA MKD MMK
    MNT MOP MRU MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK NPR NZD OMR PAB PEN PGK PHP PKR PLN PYG QAR RON RSD RUB RWF
    SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP STN SVC SYP SZL THB TJS TMT TND TOP TRY TTD TWD TZS UAH UGX USD UYU
    UZS VED VES VND VUV WST XAF XCD XOF XPF YER ZAR ZMW ZWG
"""
CURRENCIES = frozenset(_CODES.split())
_WITHOUT_CENTS = "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX VND VUV XAF XOF XPF"
_WITH_MILLS = "BHD IQD JOD KWD LYD OMR TND"
_MINOR_PLACES = dict.fromkeys(_WITHOUT_CENTS.split(), 0) | dict.fromkeys(_WITH_MILLS.split(), 3)


class CurrencyMismatch(ValueError):
    """One sum has amounts of two currencies, which is always a defect in the code. Currencies are never converted."""


def minor_places(currency: str) -> int:
    """Return the number of decimals of the currency's minor unit (2 for cents). Source: ISO 4217."""
    return _MINOR_PLACES.get(currency, 2)


def half_unit(currency: str) -> Decimal:
    """Return half a minor unit, the smallest difference between two amounts that changes what is paid."""
    return Decimal(5).scaleb(-minor_places(currency) - 1)


@dataclass(frozen=True, slots=True)
class Money:
    """An exact amount of one currency. A correction can be negative."""

    amount: Decimal
    currency: str

    def __post_init__(self) -> None:
        if not isinstance(self.amount, Decimal):
            raise TypeError(f"money is Decimal, not {type(self.amount).__name__}: {self.amount!r}")
        if not self.amount.is_finite():
            raise ValueError(f"money is finite, not {self.amount}")
        if self.currency not in CURRENCIES:
            raise ValueError(f"not an ISO 4217 currency: {self.currency!r}")

    @classmethod
    def zero(cls, currency: str) -> Money:
        return cls(Decimal(0), currency)

    @classmethod
    def sum(cls, parts: Iterable[Money], currency: str) -> Money:
        """Return the exact sum; `currency` is the currency of an empty sum. Raises CurrencyMismatch."""
        total = cls.zero(currency)
        for part in parts:
            total = total + part
        return total

    def _same(self, other: Money) -> None:
        if self.currency != other.currency:
            raise CurrencyMismatch(f"{self.currency} and {other.currency} do not mix")

    def __add__(self, other: Money) -> Money:
        self._same(other)
        return Money(_EXACT.add(self.amount, other.amount), self.currency)

    def __sub__(self, other: Money) -> Money:
        self._same(other)
        return Money(_EXACT.subtract(self.amount, other.amount), self.currency)

    def __neg__(self) -> Money:
        return Money(_EXACT.minus(self.amount), self.currency)

    def times(self, quantity: Decimal | int) -> Money:
        """Multiply this unit price by `quantity`, exactly. Raises TypeError for a float."""
        if type(quantity) not in (Decimal, int):
            raise TypeError(f"a quantity is Decimal or int, not {type(quantity).__name__}")
        return Money(exact_product(self.amount, Decimal(quantity)), self.currency)

    def rounded(self) -> Money:
        """Round to the minor unit, half to even. Use it for a single figure; parts of a whole go through `payable`,
        because otherwise they would not add up."""
        return Money(_to_decimal(round(_units(self)), minor_places(self.currency)), self.currency)

    def split(self, weights: Sequence[int], places: int | None = None) -> tuple[Money, ...]:
        """Divide in proportion to `weights`, by largest remainder, with ties to the earlier position. The shares are in
        whole units of `places` decimals (default: the minor unit) and add up to this amount exactly.

        Raises ValueError for a negative amount, one that is no multiple of the unit, or invalid weights."""
        places = minor_places(self.currency) if places is None else places
        units = Fraction(self.amount) * 10**places
        if units.denominator != 1:
            raise ValueError(f"{self.amount} {self.currency} has more than {places} decimals")
        return tuple(Money(_to_decimal(n, places), self.currency) for n in apportion(units.numerator, weights))


def payable(amounts: Mapping[K, Money], currency: str, total: Money | None = None) -> dict[K, Money]:
    """Round exact amounts to minor units so that they add up to the rounded total.

    The function rounds every part down and gives the missing units to the parts with the largest fractions, equal ones
    in the order of the mapping. It rounds the total half to even. An amount can be negative.

    total: the total, if it has been rounded already as a part of a larger sum; None: the sum of the amounts.

    Raises CurrencyMismatch, and ValueError for a total that no rounding of the parts gives. Source: Hamilton's method;
    openmeter's AllocateByWeight does the same."""
    zero = Money.zero(currency)
    several = [*amounts.values(), zero if total is None else total]
    for money in several:
        zero._same(money)
    places = minor_places(currency)
    finest = max(-int(money.amount.as_tuple().exponent) for money in several)
    # Whole numbers of the smallest unit that any amount has; `unit` of them are one minor unit.
    unit = 10 ** max(0, finest - places)
    exact = {key: _scaled(money.amount, max(finest, places)) for key, money in amounts.items()}
    floors = {key: value // unit for key, value in exact.items()}
    whole = sum(exact.values()) if total is None else _scaled(total.amount, max(finest, places))
    missing = _half_even(whole, unit) - sum(floors.values())
    if not 0 <= missing <= len(floors):
        parts, given = plain(exact_sum(money.amount for money in amounts.values())), plain(several[-1].amount)
        raise ValueError(f"amounts with the sum {parts} {currency} cannot be rounded to add up to {given} {currency}")
    order = sorted(exact, key=lambda key: -(exact[key] % unit))  # stable: ties keep their order
    for key in order[:missing]:
        floors[key] += 1
    return {key: Money(_to_decimal(value, places), currency) for key, value in floors.items()}


def nano_gpu_hours(gpu_us: int) -> int:
    """Convert GPU-µs to whole nano-GPU-hours (3.6 µs each), half to even. Raises ValueError for a negative value."""
    if gpu_us < 0:
        raise ValueError(f"GPU time cannot be negative: {gpu_us} µs")
    return _half_even(gpu_us * 10**HOUR_PLACES, US_PER_HOUR)


def gpu_hours(gpu_us: int) -> Decimal:
    """Convert GPU-µs to GPU-hours with nine decimals, half to even, for a single figure."""
    return _to_decimal(nano_gpu_hours(gpu_us), HOUR_PLACES)


def apportion_gpu_hours(gpu_us: Mapping[str, Mapping[K, int]]) -> dict[str, dict[K, Decimal]]:
    """Convert GPU-µs by bucket and line to GPU-hours with nine decimals that add up on every level.

    The function rounds the grand total once, apportions it over the buckets (price rows), and apportions the quantity
    of each bucket over its lines. The quantity and the cost of a bucket therefore do not depend on how its time is cut
    into lines. Ties go to the earlier bucket or line, so both mappings must be sorted."""
    totals = [sum(lines.values()) for lines in gpu_us.values()]
    if not totals:
        return {}
    quantities: dict[str, dict[K, Decimal]] = {}
    for (bucket, lines), nano in zip(gpu_us.items(), apportion(nano_gpu_hours(sum(totals)), totals), strict=True):
        parts = apportion(nano, list(lines.values())) if lines else []
        pairs = called_off.each(zip(lines, parts, strict=True))
        quantities[bucket] = {key: _to_decimal(n, HOUR_PLACES) for key, n in pairs}
    return quantities


def exact_product(left: Decimal, right: Decimal) -> Decimal:
    """Multiply without rounding, independently of the thread's decimal context."""
    return _EXACT.multiply(left, right)


def exact_sum(values: Iterable[Decimal]) -> Decimal:
    """Add without rounding, independently of the thread's decimal context."""
    total = Decimal(0)
    for value in values:
        total = _EXACT.add(total, value)
    return total


def sum_if_known(values: Iterable[Decimal | None]) -> Decimal | None:
    """The exact sum; None if one of the values is unknown."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return exact_sum(known) if len(known) == len(listed) else None


def plain(value: Decimal) -> str:
    """Format a decimal without exponent and thousands separators, as files and hashes need it."""
    return format(value, "f")


def _units(money: Money) -> Fraction:
    return Fraction(money.amount) * Fraction(10 ** minor_places(money.currency))


def _scaled(amount: Decimal, places: int) -> int:
    """Convert an amount to an integer number of units with `places` decimals, of which it must be a multiple."""
    return int(_EXACT.scaleb(amount, places))


def _half_even(value: int, unit: int) -> int:
    """Divide two integers and round the quotient half to even."""
    whole, rest = divmod(value, unit)
    return whole + (2 * rest > unit or (2 * rest == unit and whole % 2 == 1))


def _to_decimal(units: int, places: int) -> Decimal:
    return _EXACT.scaleb(Decimal(units), -places)


_RATE_PLACES = 6


def rate(value: Fraction) -> Decimal:
    """Round a rate for display. A list adds up the rates that it shows, and nothing else does."""
    return Decimal(round(value * 10**_RATE_PLACES)).scaleb(-_RATE_PLACES)
