"""What is not 0 is never shown as 0, and what is not whole never as 100 %."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from accountant.reports import figure_formatting
from gputally.base.number_format import gpus, hours, number, percent
from gputally.base.units import US_PER_HOUR


def is_zero(text: str) -> bool:
    return not any(digit in text for digit in "123456789")


@given(st.decimals(-1000, 1000, places=7), st.integers(0, 3))
def test_a_number_is_zero_only_if_it_is_shown_as_zero(value: Decimal, places: int) -> None:
    assert is_zero(number(value, places)) == (value == 0)


@given(st.integers(-(10**13), 10**13))
def test_one_microsecond_is_no_zero_hours(gpu_us: int) -> None:
    assert is_zero(hours(gpu_us)) == (gpu_us == 0)


@given(st.floats(0, 1), st.integers(0, 2))
def test_a_share_is_whole_only_if_it_is_shown_as_whole(ratio: float, places: int) -> None:
    shown = percent(ratio, places)
    assert is_zero(shown) == (ratio == 0)
    assert shown.startswith("100") == (ratio == 1)


def test_what_is_shown() -> None:
    assert [hours(US_PER_HOUR // at) for at in (30, 10)] == ["<0.1", "0.1"]
    assert [hours(gpu_us) for gpu_us in (0, 1, -1)] == ["0.0", "<0.1", ">−0.1"]
    assert [gpus(count) for count in (0.04, 8)] == ["<0.1", "8"]
    assert [percent(ratio) for ratio in (0.0004, 0.99996, 1)] == ["<0.1 %", "99.9 %", "100.0 %"]
    assert percent(0.99996, 0) == "99 %"
    money = figure_formatting.money
    assert [money(Decimal(text), "USD") for text in ("0.001", "0", "12.345")] == ["<0.01", "0.00", "12.34"]
    assert money(Decimal("0.4"), "JPY") == "<1"
    assert figure_formatting.duration(400) == "<1 s"
    assert figure_formatting.one_decimal(0.01) == "<0.1"
    assert figure_formatting.budgeted(0.001, "USD") == "<0.01"
