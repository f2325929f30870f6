"""Money and months: the published vectors, refused input, and columns that are divided as lists are."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.periods import Month, days, zone
from gputally.base.money import Money, gpu_hours, half_unit, minor_places, payable, plain
from tests.hypothesis_examples import examples


@pytest.mark.parametrize("number", [2, 3, 4, 6, 7])
def test_largest_remainder_vectors(vectors, number):
    case = vectors[f"largest-remainder-{number}"]["input"]
    names = list(case["weights"])
    if case["tie_break"] == "key":
        names.sort()
    places = -Decimal(case["unit"]).as_tuple().exponent
    parts = Money(Decimal(case["amount"]), "USD").split([int(case["weights"][name]) for name in names], places)
    expected = vectors[f"largest-remainder-{number}"]["expect"]
    assert dict(zip(names, (plain(part.amount) for part in parts), strict=True)) == expected


def test_pots_vs_people_vector(vectors):
    """Two dimensions: amounts are rounded once, on the finest line; rows and columns are sums of them."""
    case = vectors["pots-vs-people"]
    pots = [Decimal(pot) for pot in case["input"]["pots"]]
    people = [Decimal(person) for person in case["input"]["people"]]
    total = sum(pots)
    assert total == sum(people)
    exact = {
        (i, j): Money((pot * person / total).quantize(Decimal(1).scaleb(-18)), "USD")
        for i, pot in enumerate(pots)
        for j, person in enumerate(people)
    }
    cells = {key: money.amount for key, money in payable(exact, "USD").items()}
    rows = [sum(cells[i, j] for j in range(len(people))) for i in range(len(pots))]
    columns = [sum(cells[i, j] for i in range(len(pots))) for j in range(len(people))]
    assert case["expect"]["row_and_column_sums_must_match"]
    assert sum(rows) == sum(columns) == total
    assert all(abs(row - pot) < Decimal("0.03") for row, pot in zip(rows, pots, strict=True))
    assert all(abs(column - person) < Decimal("0.02") for column, person in zip(columns, people, strict=True))


def test_split_allocation_vector(vectors):
    case = vectors["focus-split-allocation"]
    weights = case["input"]["weights"]
    parts = Money(Decimal(case["input"]["origin_cost"]), "USD").split([int(weight) for weight in weights.values()])
    assert dict(zip(weights, (plain(part.amount) for part in parts), strict=True)) == case["expect"]["allocated"]


def test_job_gpu_hours_vector(vectors):
    case = vectors["princeton-jobstats"]
    hours, minutes, seconds = map(int, case["input"]["run_time"].split(":"))
    gpu_us = ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 * case["input"]["gpus"]
    expected = Decimal(str(case["expect"]["gpu_hours_allocated"]))
    assert gpu_hours(gpu_us).quantize(expected) == expected


def test_floats_are_refused():
    with pytest.raises(TypeError, match="Decimal, not float"):
        Money(0.1, "USD")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Decimal or int, not float"):
        Money(Decimal(1), "USD").times(0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("amount", ["NaN", "Infinity", "-Infinity"])
def test_only_finite_amounts(amount):
    with pytest.raises(ValueError, match="finite"):
        Money(Decimal(amount), "USD")


@pytest.mark.parametrize("currency", ["usd", "EURO", "XXX", ""])
def test_only_currencies(currency):
    with pytest.raises(ValueError, match="ISO 4217"):
        Money(Decimal(1), currency)


def test_unit_price_times_stated_hours_is_exact():
    assert Money(Decimal("2.7447"), "USD").times(gpu_hours(1)).amount == 0
    assert Money(Decimal("2.7447"), "USD").times(gpu_hours(3_600_000_001)).amount == Decimal("2.7447")
    assert Money(Decimal("0.000000000001"), "USD").times(Decimal("0.000000001")).amount == Decimal("1E-21")


def test_minor_units():
    assert (minor_places("USD"), minor_places("JPY"), minor_places("KWD")) == (2, 0, 3)
    with pytest.raises(ValueError, match="has more than 0 decimals"):
        Money(Decimal("0.5"), "JPY").split([1, 1])


def test_negative_parts_add_up():
    parts = payable({i: Money(Decimal("-0.005"), "EUR") for i in range(3)}, "EUR")
    assert [plain(part.amount) for part in parts.values()] == ["0.00", "-0.01", "-0.01"]


@pytest.mark.parametrize(("currency", "half"), [("EUR", "0.005"), ("JPY", "0.5"), ("KWD", "0.0005")])
def test_half_a_minor_unit_is_the_currencys_own(currency, half):
    assert half_unit(currency) == Decimal(half)


HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("month", "tz", "hours"),
    [
        ("2026-10", "UTC", 744),
        ("2026-09", "UTC", 720),
        ("2026-02", "UTC", 672),
        ("2028-02", "UTC", 696),
        ("2026-03", "Europe/Berlin", 743),
        ("2026-10", "Europe/Berlin", 745),
        ("2026-10", "Asia/Kolkata", 744),
        ("2026-04", "Australia/Lord_Howe", 720.5),
        ("2018-11", "America/Sao_Paulo", 719),  # midnight of the 4th did not exist
    ],
)
def test_hours_of_a_month(month, tz, hours):
    start, end = Month.parse(month).span(zone(tz))
    assert (end - start) / HOUR_MS == hours


def test_neighbours():
    assert Month.parse("2026-12").next == Month(2027, 1)
    assert Month.parse("2026-01").previous == Month(2025, 12)
    assert str(Month.parse("2026-02")) == "2026-02"


@pytest.mark.parametrize("text", ["2026-13", "2026-1", "26-10", "2026-10-01", "", "1970-01", "9999-01"])
def test_not_a_month(text):
    with pytest.raises(ValueError, match="not a month"):
        Month.parse(text)


@pytest.mark.parametrize("name", ["Mars/Base", "", "../etc/passwd", "Europe"])
def test_not_a_zone(name):
    with pytest.raises(ValueError, match="unknown time zone"):
        zone(name)


@settings(max_examples=examples(20, 120))
@given(
    st.integers(1_000_000_000, 2_000_000_000),
    st.integers(1, 40 * 24 * 3600),
    st.sampled_from(["UTC", "Europe/Berlin", "America/Sao_Paulo", "Asia/Kathmandu", "Pacific/Apia", "Asia/Beirut"]),
)
def test_days_partition_a_span(start_s, length_s, name):
    start, end = start_s * 1000, (start_s + length_s) * 1000
    pieces = list(days(start, end, zone(name)))
    assert pieces[0][1] == start
    assert pieces[-1][2] == end
    for (day, _, stop), (next_day, begin, _) in pairwise(pieces):
        assert stop == begin
        assert day < next_day


def test_every_instant_has_one_month():
    tz = zone("Europe/Berlin")
    start, end = Month.parse("2026-03").span(tz)
    assert [str(Month.of(at, tz)) for at in (start - 1, start, end - 1, end)] == [
        "2026-02", "2026-03", "2026-03", "2026-04",
    ]  # fmt: skip
