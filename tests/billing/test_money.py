"""Money: the published vectors, and what it refuses."""

from __future__ import annotations

from decimal import Decimal

import pytest

from gputally.base.money import Money, gpu_hours, half_unit, minor_places, payable, plain


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
    """Two-dimensional: rounded once, at the finest line; rows and columns are only sums of it."""
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
    with pytest.raises(ValueError, match="no multiple"):
        Money(Decimal("0.5"), "JPY").split([1, 1])


def test_negative_parts_add_up():
    parts = payable({i: Money(Decimal("-0.005"), "EUR") for i in range(3)}, "EUR")
    assert [plain(part.amount) for part in parts.values()] == ["0.00", "-0.01", "-0.01"]


@pytest.mark.parametrize(("currency", "half"), [("EUR", "0.005"), ("JPY", "0.5"), ("KWD", "0.0005")])
def test_half_a_minor_unit_is_the_currencys_own(currency, half):
    assert half_unit(currency) == Decimal(half)
