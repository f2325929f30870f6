"""Machines divided, GPUs one owns, discounts, MIG by memory: each way in which a price comes about."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.billing.time_reallocation import memory_to_compute, rebase
from accountant.billing.usage_pricing import charges, cost
from accountant.core.periods import parse_instant, zone
from accountant.prices.price_book import Amortised, PriceBook
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Accounts
from gputally.base.yaml_file import FileFault, parse
from gputally.server.config_loading import validate

HOUR = 3_600_000_000
REST = "per: gpu-hour, source: s, as_of: 2026-01-01"
OWNED = "in_service: 2026-01-15, lifetime_months: 48, gpus: 8, gpu_price: 28000, overhead: 0.4, residual: 0.1"


def book(*rows, head="", timezone="UTC"):
    body = "".join(f"  - {{{row}, {REST}}}\n" for row in rows)
    return validate(parse(f"schema: 1\ncurrency: USD\ntimezone: {timezone}\n{head}rows:\n{body}", "b.yaml"), PriceBook)


def owned(**changes):
    given = {"in_service": "2026-01-15", "lifetime_months": 48, "gpus": 8, "gpu_price": 28000}
    return Amortised.model_validate({**given, **changes})


def test_the_formula_by_hand():
    utc = zone("UTC")
    full = owned(overhead="0.4", residual="0.1", kw="10.2", pue="1.3", kwh_price="0.14", colo_per_kw_month=180,
                 ops_month=1500, licences_month=400)  # fmt: skip
    hours = (parse_instant("2030-01-15", utc) - parse_instant("2026-01-15", utc)) // 3_600_000
    assert hours == (3 * 365 + 366) * 24
    capex = 8 * 28000 * Fraction(14, 10)
    month = Fraction(102, 10) * 180 + 1900
    exact = (capex * Fraction(9, 10) + 48 * month) / (8 * hours) + Fraction(102, 10) * Fraction(13, 10) * Fraction(
        14, 100
    ) / 8
    assert abs(Fraction(full.unit_price(utc)) - exact) <= Fraction(1, 2 * 10**12)
    assert full.unit_price(utc) == Decimal("1.877498323066")
    assert abs(owned(utilisation="0.5").unit_price(utc) - 2 * owned().unit_price(utc)) <= Decimal("1e-12")


def test_a_life_has_its_real_hours():
    """From the last of January over one month is the last of February, in a leap year too; clocks change in it."""
    berlin = zone("Europe/Berlin")
    assert (
        owned(in_service="2028-01-31", lifetime_months=1).life_ms(zone("UTC"))[1]
        == parse_instant("2028-02-29", berlin) + 3_600_000
    )
    start, end = owned(in_service="2026-03-01", lifetime_months=1).life_ms(berlin)
    assert (end - start) // 3_600_000 == 31 * 24 - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pue": "0.9"}, "a PUE is at least 1"),
        ({"utilisation": 0}, "leaves no hours"),
        ({"residual": 2}, "a share is 0 to 1"),
        ({"lifetime_months": 0}, "greater than or equal to 1"),
        ({"in_service": "2026-02-30"}, "day"),
    ],
)
def test_impossible_machines(changes, message):
    with pytest.raises(ValueError, match=message):
        owned(**changes)


def test_an_owned_gpu_has_no_price_before_and_after_its_life(books):
    one = book(f"id: a, model: H100, amortised: {{{OWNED}}}, valid_from: 2026-02-01, basis: whole-instance")
    assert one.unit_price("H100", books.at("2026-01-31")) is None
    assert one.unit_price("H100", books.at("2030-01-14T23:59:59")) is not None
    assert one.unit_price("H100", books.at("2030-01-15")) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "valid_from: 2026-01-14",
            "b.yaml:5: rows.0.valid_from: before the GPUs of the row are in service",
        ),
        ("valid_from: 2026-02-01, valid_to: 2031-01-01", "rows.0.valid_to: after the end of life of the row's GPUs"),
        ("valid_from: 2026-02-01, price: 1", "this one has price and amortised"),
        ("valid_from: 2026-02-01, discount: 1.5", "a share is 0 to 1"),
    ],
)
def test_refused_owned_rows(row, message):
    with pytest.raises(FileFault, match=message.replace("(", r"\(")):
        book(f"id: a, model: H100, amortised: {{{OWNED}}}, {row}, basis: whole-instance")


def test_an_instance_by_either_basis(books):
    machine = "name: p5.48xlarge, price: '55.04', gpus: 8"
    whole = book(f"id: a, model: H100, instance: {{{machine}}}, valid_from: 2026-01-01, basis: whole-instance")
    assert whole.unit_price("H100", books.at("2026-10-01")).price == Decimal("6.88")
    parts = f"{machine}, vcpus: 192, memory_gb: 2048, weights: 'gres/gpu=9,cpu=0.9,mem=0.1G'"
    only = book(f"id: a, model: H100, instance: {{{parts}}}, valid_from: 2026-01-01, basis: gpu-only")
    exact = Fraction(5504, 100) * 9 / (72 + Fraction(1728, 10) + Fraction(2048, 10))
    assert abs(Fraction(only.unit_price("H100", books.at("2026-10-01")).price) - exact) < Fraction(1, 10**12)
    with pytest.raises(FileFault, match="gpu-only needs weights"):
        book(f"id: a, model: H100, instance: {{{machine}}}, valid_from: 2026-01-01, basis: gpu-only")
    with pytest.raises(FileFault, match="need weights"):
        book(f"id: a, model: H100, instance: {{{machine}, vcpus: 4}}, valid_from: 2026-01-01, basis: whole-instance")


def test_a_discount_is_exact_and_keeps_the_list_price(books):
    one = book("id: a, model: H100, price: '6.88', discount: '0.125', valid_from: 2026-01-01, basis: gpu-only")
    price = one.unit_price("H100", books.at("2026-10-01"))
    assert (price.price, price.list_price) == (Decimal("6.02"), Decimal("6.88"))
    free = book("id: a, model: H100, price: '6.88', valid_from: 2026-01-01, basis: gpu-only")
    assert one.version != free.version


@pytest.mark.parametrize(
    ("profile", "model", "expected"),
    [
        ("1g.10gb", "NVIDIA H100 80GB HBM3", Fraction(7, 8)),
        ("1g.10gb+me", "NVIDIA H100 80GB HBM3", Fraction(7, 8)),
        ("3g.40gb", "NVIDIA A100-SXM4-80GB", Fraction(7, 6)),
        ("7g.80gb", "NVIDIA A100-SXM4-80GB", Fraction(1)),
        ("1g.18gb", "NVIDIA H200 141GB", Fraction(7, 8)),
        ("1c.3g.40gb", "NVIDIA A100-SXM4-80GB", Fraction(7, 6)),
        ("2g.12gb", "NVIDIA A30 24GB", Fraction(1)),
        ("", "NVIDIA A100-SXM4-80GB", Fraction(1)),
        ("1g.10gb", "NVIDIA H100 PCIe", None),
        ("half", "NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_memory_slices(profile, model, expected):
    assert memory_to_compute(profile, model) == expected


def sevenths(books, hour, profiles, model):
    shares = [HOUR * (i + 1) // 7 - HOUR * i // 7 for i in range(7)]
    whole = books.held(*hour, gpu_model=model)
    for i, share in enumerate(shares):
        names = {**whole.names, "pod": f"p{i}", "mig_profile": profiles}
        yield books.row(*hour, Accounts(busy=share), names)


def test_a_gpu_of_seven_instances_by_memory(books, vectors):
    """The vector's other choice: each pays 1/8, and the eighth that no instance has is unallocated."""
    case = vectors["mig-naive-overbilling"]["input"]
    price, hour = case["card_price_per_hour"], (books.at("2026-10-01"), books.at("2026-10-01T01:00"))
    ledger = books.ledger(sevenths(books, hour, "1g.10gb", "NVIDIA H100 80GB HBM3"))
    by_memory = book(
        f"id: a, model: H100, price: {price}, valid_from: 2026-01-01, basis: gpu-only", head="mig_basis: memory\n"
    )
    answer = cost(ledger, by_memory, *hour, by=("team",))
    assert answer.total == Decimal(str(price))
    held = {line.key["team"]: line.gpu_us for line in answer.lines}
    assert held == {"vision": HOUR * 7 // 8, IDLE: HOUR // 8}
    assert sum(charge.gpu_us for charge in charges(ledger, by_memory, *hour, by=("pod",))) == HOUR
    one = cost(ledger, by_memory, *hour, by=("pod",), where={"pod": {"p0"}})
    assert one.lines[0].gpu_us == HOUR // 8 - 1


def test_an_instance_whose_memory_nobody_knows_is_unpriced(books):
    hour = books.at("2026-10-01"), books.at("2026-10-01T01:00")
    ledger = books.ledger(sevenths(books, hour, "1g.10gb", "NVIDIA H100 PCIe"))
    by_memory = book(
        "id: a, model: H100, price: 1, valid_from: 2026-01-01, basis: gpu-only", head="mig_basis: memory\n"
    )
    assert cost(ledger, by_memory, *hour, by=("team",)).unpriced_gpu_us == HOUR


RATIOS = st.sampled_from([Fraction(7, 8), Fraction(7, 6), Fraction(1)])


@given(
    st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 10**12), RATIOS), min_size=1, max_size=6),
    st.integers(0, 10**12),
)
def test_rebasing_keeps_every_microsecond(held, unheld):
    found, rest = rebase(held, unheld)
    assert sum(found.values()) + rest == unheld + sum(gpu_us for gpu_us, _ in held.values())
    assert rest >= 0
    assert all(gpu_us >= 0 for gpu_us in found.values())
