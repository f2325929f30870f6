"""Columns are divided as lists are, to the last unit."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accountant.billing.statement_breakdown import minor_units, nano_hours
from gputally.base.apportionment import apportion
from gputally.base.money import HOUR_PLACES, Money, exact_product, minor_places, nano_gpu_hours, payable
from tests.effort import examples

TIMES = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 10**9), st.integers(0, 10**17)), min_size=1, max_size=30)
PRICES = st.one_of(st.decimals("0", "99", places=4), st.just(Decimal("1E+2")), st.just(Decimal(0)))


@given(TIMES, st.integers(-40, 40))
@example([9 * 10**18 // 4, 1, 9 * 10**18 // 4], 0)
@example([10**17, 3, 10**17 + 1], 5)
@settings(max_examples=examples(40, 1000), deadline=None)
def test_hours(times: list[int], off: int) -> None:
    total = max(0, nano_gpu_hours(sum(times)) + off)
    assert nano_hours(total, np.array(times, dtype=np.int64)).tolist() == apportion(total, times)


@given(st.lists(st.integers(-(10**9), 10**15), min_size=1, max_size=30), PRICES, st.sampled_from(("USD", "JPY", "KWD")))
@example([7 * 10**15, 3, 10**15 + 1], Decimal("98.7654"), "USD")
@example([5, -3, 10**14], Decimal("1E+2"), "JPY")
@settings(max_examples=examples(40, 1000), deadline=None)
def test_amounts(nano: list[int], price: Decimal, currency: str) -> None:
    costs = [exact_product(price, Decimal(each).scaleb(-HOUR_PLACES)) for each in nano]
    exact = {at: Money(cost, currency) for at, cost in enumerate(costs)}
    places = minor_places(currency)
    whole = sum(money.amount for money in payable(exact, currency).values())
    for units in (0, 1, -1):
        total = whole + Decimal(units).scaleb(-places)
        try:
            expected = [money.amount for money in payable(exact, currency, Money(total, currency)).values()]
        except ValueError:
            with pytest.raises(ValueError, match="cannot be rounded"):
                minor_units(price, np.array(nano, dtype=np.int64), int(total.scaleb(places)), places)
            continue
        found = minor_units(price, np.array(nano, dtype=np.int64), int(total.scaleb(places)), places)
        assert [Decimal(each).scaleb(-places) for each in found.tolist()] == expected
