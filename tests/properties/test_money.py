"""Laws of money and of stated quantities: parts add up to the whole, and currencies are never mixed."""

from __future__ import annotations

from decimal import ROUND_DOWN, Decimal, localcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputally.base.money import CurrencyMismatch, Money, apportion_gpu_hours, gpu_hours, nano_gpu_hours, payable, plain
from tests.hypothesis_examples import examples

AMOUNTS = st.decimals(min_value=-(10**9), max_value=10**9, places=14, allow_nan=False)
TIMES = st.integers(min_value=0, max_value=10**18)


@given(st.lists(AMOUNTS, max_size=20), st.sampled_from(["USD", "JPY", "KWD"]))
def test_payable_parts_add_up_to_the_rounded_total(amounts, currency):
    parts = payable({i: Money(amount, currency) for i, amount in enumerate(amounts)}, currency)
    total = Money.sum((Money(amount, currency) for amount in amounts), currency).rounded()
    assert Money.sum(parts.values(), currency) == total
    unit = Decimal(1).scaleb(-{"USD": 2, "JPY": 0, "KWD": 3}[currency])
    assert all(abs(part.amount - amounts[i]) < unit for i, part in parts.items())


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**6), min_size=1, max_size=12))
def test_split_loses_nothing(cents, weights):
    money = Money(Decimal(cents).scaleb(-2), "EUR")
    parts = money.split(weights)
    assert Money.sum(parts, "EUR") == money
    if any(weights):
        exact = [Decimal(cents) * w / sum(weights) for w in weights]
        assert all(abs(part.amount * 100 - e) < 1 for part, e in zip(parts, exact, strict=True))


@given(st.dictionaries(st.text(max_size=3), st.dictionaries(st.integers(), TIMES, min_size=1, max_size=6), max_size=6))
def test_stated_hours_add_up_on_every_level(buckets):
    hours = apportion_gpu_hours(buckets)
    total = sum(sum(lines.values()) for lines in buckets.values())
    assert sum((h for lines in hours.values() for h in lines.values()), Decimal(0)) == gpu_hours(total)
    for bucket, lines in buckets.items():
        for key, gpu_us in lines.items():
            assert abs(hours[bucket][key] * 3_600_000_000 - gpu_us) < 8  # two apportionments: under 2 × 3.6 µs


@given(st.dictionaries(st.sampled_from("abc"), st.lists(TIMES, min_size=1, max_size=6), min_size=1), st.data())
def test_the_hours_of_a_price_do_not_depend_on_its_lines(buckets, data):
    coarse = apportion_gpu_hours({name: {0: sum(lines)} for name, lines in buckets.items()})
    fine = apportion_gpu_hours({name: dict(enumerate(lines)) for name, lines in buckets.items()})
    assert {name: sum(lines.values()) for name, lines in fine.items()} == {
        name: lines[0] for name, lines in coarse.items()
    }


@given(st.lists(AMOUNTS, max_size=12), st.randoms(use_true_random=False))
def test_sums_do_not_depend_on_order_or_on_the_callers_context(amounts, order):
    straight = Money.sum((Money(a, "USD") for a in amounts), "USD")
    order.shuffle(amounts)
    with localcontext() as context:
        context.prec = 3
        context.rounding = ROUND_DOWN
        assert Money.sum((Money(a, "USD") for a in amounts), "USD") == straight


@settings(max_examples=examples(16, 100))
@given(AMOUNTS, AMOUNTS)
def test_currencies_never_mix(left, right):
    with pytest.raises(CurrencyMismatch):
        Money(left, "USD") + Money(right, "EUR")
    with pytest.raises(CurrencyMismatch):
        Money(left, "USD") - Money(right, "EUR")
    with pytest.raises(CurrencyMismatch):
        payable({"a": Money(left, "USD"), "b": Money(right, "EUR")}, "USD")


@given(AMOUNTS)
def test_plain_text_gives_the_number_back(amount):
    text = plain(amount)
    assert Decimal(text) == amount
    assert "e" not in text.lower()


@given(TIMES)
def test_stated_hours_are_within_half_a_unit(gpu_us):
    assert abs(nano_gpu_hours(gpu_us) * 18 - gpu_us * 5) <= 9
