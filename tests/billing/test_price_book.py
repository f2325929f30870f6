"""Prices: the row that applies, refused input with its place, each way to derive a price, and published prices."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from importlib.resources import as_file, files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.billing.time_reallocation import rebase
from accountant.billing.usage_pricing import charge_table, cost
from accountant.core.periods import zone
from accountant.prices.price_book import (
    AWS_WEIGHTS,
    Amortised,
    Instance,
    PriceBook,
    ResourceWeights,
    commitment_use,
    load,
)
from accountant.prices.unit_prices import memory_to_compute
from accountant.reports.report_breakdowns import share as share_of
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Accounts
from gputally.base.gpu_model_names import GpuModel, parse_gpu_model
from gputally.base.instants import parse_instant
from gputally.base.money import exact_product
from gputally.base.yaml_file import FileFault, parse
from gputally.server.config_loading import validate
from tests.billing.usage_rows import at, held, price_book
from tests.fakes.list_ledger import ListLedger, Row

HEAD = "schema: 1\ncurrency: USD\nrows:\n"
REST = "per: gpu-hour, source: s, as_of: 2026-01-01, basis: gpu-only"


def refusal(tmp_path, text):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(FileFault) as fault:
        load(path)
    return str(fault.value).replace(f"{path}", "prices.yaml")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", GpuModel("H100", 80)),
        ("NVIDIA-H100-80GB-HBM3-SHARED", GpuModel("H100", 80)),
        ("NVIDIA A100-SXM4-40GB", GpuModel("A100", 40, "SXM")),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", GpuModel("A100", 80, "SXM")),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", GpuModel("A100", 80, "SXM")),
        ("NVIDIA A100 80GB PCIe", GpuModel("A100", 80, "PCIE")),
        ("NVIDIA H100 NVL", GpuModel("H100", None, "NVL")),
        ("Tesla V100-SXM2-16GB", GpuModel("V100", 16, "SXM")),
        ("Tesla T4", GpuModel("T4")),
        ("NVIDIA GeForce RTX 4090", GpuModel("RTX 4090")),
        ("Quadro_RTX_4000", GpuModel("RTX 4000")),
        ("NVIDIA RTX 6000 Ada Generation", GpuModel("RTX 6000 ADA")),
        ("AMD Instinct MI300X", GpuModel("MI300X")),
        ("h100", GpuModel("H100")),
        ("NVIDIA B300 SXM6 AC", GpuModel("B300", None, "SXM", "AC")),
        ("Tesla V100-SXM2-32GB-LS", GpuModel("V100", 32, "SXM", "LS")),
        ("Tesla V100-DGXS-32GB", GpuModel("V100", 32, None, "DGXS")),
        ("Tesla V100-FHHL-16GB", GpuModel("V100", 16, None, "FHHL")),
        ("nvidia-h100-mega-80gb", GpuModel("H100", 80, None, "MEGA")),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", GpuModel("RTX PRO 6000", None, None, "SERVER")),
        (
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            GpuModel("RTX PRO 6000", None, None, "MAX Q WORKSTATION"),
        ),
        ("NVIDIA L40S", GpuModel("L40S")),
        ("", GpuModel("")),
    ],
)
def test_names_of_gpus(name, expected):
    assert parse_gpu_model(name) == expected


@pytest.mark.parametrize(
    ("row", "device", "near"),
    [
        ("L40", "NVIDIA L40S", True),
        ("RTX 6000", "NVIDIA RTX 6000 Ada Generation", True),
        ("B300 AC", "NVIDIA B300 SXM6", True),
        ("H100-80GB", "NVIDIA H100 NVL", True),
        ("V100", "Tesla V100S-PCIE-32GB", True),
        ("RTX 4000", "NVIDIA RTX 6000 Ada Generation", False),
        ("A100", "Tesla T4", False),
    ],
)
def test_a_row_that_misses_by_a_suffix_is_named(row, device, near):
    book = PriceBook.model_validate({"schema": 1, "currency": "USD", "rows": [
        {"id": "near", "model": row, "price": "1", "per": "gpu-hour", "source": "s", "as_of": "2026-01-01",
         "basis": "gpu-only", "valid_from": "2026-01-01"},
    ]})  # fmt: skip
    assert book.unit_price(device, at("2026-06-01")) is None
    found = book.near_row(device)
    assert (found is not None and found.id == "near") == near


@pytest.mark.parametrize(
    ("row", "device", "covered"),
    [
        ("B300", "NVIDIA B300 SXM6 AC", True),
        ("V100", "Tesla V100-SXM2-32GB-LS", True),
        ("V100", "Tesla V100-DGXS-32GB", True),
        ("H100", "nvidia-h100-mega-80gb", True),
        ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", True),
        ("RTX PRO 6000 Blackwell", "NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", False),
        ("B300 AC", "NVIDIA B300 SXM6", False),
        ("L40", "NVIDIA L40S", False),
        ("V100", "Tesla V100S-PCIE-32GB", False),
        ("RTX 6000", "NVIDIA RTX 6000 Ada Generation", False),
        ("B300", "NVIDIA GB300", False),
    ],
)
def test_a_model_covers_its_variants_and_no_other_model(row, device, covered):
    assert parse_gpu_model(row).covers(parse_gpu_model(device)) == covered


def test_the_most_specific_row_wins():
    book = price_book(
        "id: any, model: H100, price: 1, valid_from: 2026-01-01\n"
        "id: eighty, model: H100-80GB, price: 2, valid_from: 2026-01-01\n"
        "id: spot, model: H100-80GB, capacity_type: spot, price: 3, valid_from: 2026-01-01\n"
        "id: spot-eu, model: H100-80GB, capacity_type: spot, region: eu, price: 4, valid_from: 2026-01-01"
    )
    now = at("2026-10-01")

    def row(model, **place):
        found = book.unit_price(model, now, **place)
        return found.id if found else None

    assert row("NVIDIA H100 PCIe") == "any"
    assert row("NVIDIA H100 80GB HBM3") == "eighty"
    assert row("NVIDIA H100 80GB HBM3", capacity_type="spot") == "spot"
    assert row("NVIDIA H100 80GB HBM3", capacity_type="spot", region="eu") == "spot-eu"
    assert row("NVIDIA H100 80GB HBM3", region="eu") == "eighty"
    assert row("NVIDIA H200") is None
    assert row("") is None
    assert book.unit_price("H100", at("2025-12-31T23:59:59")) is None


def test_validity_is_half_open():
    book = price_book(
        "id: a, model: T4, price: 1, valid_from: 2026-01-01, valid_to: 2026-02-01T00:00:00Z\n"
        "id: b, model: T4, price: 2, valid_from: 2026-02-01, valid_to: 2026-03-01"
    )
    change = at("2026-02-01")
    assert [book.unit_price("T4", at).id for at in (change - 1, change)] == ["a", "b"]
    assert book.unit_price("T4", at("2026-03-01")) is None
    assert book.cuts(at("2026-01-01"), at("2026-03-01")) == (change,)


def test_a_book_whose_only_row_is_at_fault_is_not_called_empty(tmp_path):
    row = "  - {id: a, model: T4, price: -1, valid_from: 2026-01-01, " + REST + "}\n"
    assert refusal(tmp_path, HEAD + row) == "prices.yaml:4: rows.0.price: the number must not be negative: -1"


def test_two_rows_that_ask_for_different_things_need_a_third(tmp_path):
    pair = (
        "  - {id: pool, model: T4, pool: a, price: 1, valid_from: 2026-01-01, " + REST + "}\n"
        "  - {id: spot, model: T4, capacity_type: spot, price: 2, valid_from: 2026-01-01, " + REST + "}\n"
    )
    assert refusal(tmp_path, HEAD + pair) == (
        "prices.yaml:5: rows.1.id: row 'spot' is ambiguous with row 'pool': both match capacity_type: spot, pool: a, "
        "and no row has all these conditions; add such a row"
    )
    both = "  - {id: both, model: T4, pool: a, capacity_type: spot, price: 3, valid_from: 2026-01-01, " + REST + "}\n"
    (tmp_path / "prices.yaml").write_text(HEAD + pair + both)
    book = load(tmp_path / "prices.yaml")
    assert book.unit_price("T4", at("2026-10-01"), pool="a", capacity_type="spot").id == "both"
    late = both.replace("2026-01-01", "2026-02-01")
    assert "ambiguous" in refusal(tmp_path, HEAD + pair + late)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("id: a, model: T4, price: -1, valid_from: 2026-01-01", "rows.0.price: the number must not be negative: -1"),
        ("id: a, model: T4, price: cheap, valid_from: 2026-01-01", "rows.0.price: not a number: 'cheap'"),
        ("id: a, model: T4, price: true, valid_from: 2026-01-01", "prices.yaml:4: rows.0.price: not a number: True"),
        ("id: a, model: T4, price: .nan, valid_from: 2026-01-01", "4: rows.0.price: not a finite number: nan"),
        ("id: a, model: T4, price: 0.1234567890123456, valid_from: 2026-01-01", "put the number in quotes"),
        ("id: a, model: T4, price: '0.1234567890123', valid_from: 2026-01-01", "has more than 12 decimals"),
        ("id: a, model: T4, price: '1e999999', valid_from: 2026-01-01", "the number must be at most 1000000000"),
        (
            "id: a, model: T4, price: 1, valid_from: 2026-02-30",
            "rows.0.valid_from: not a day of the calendar between 1970 and 9998: '2026-02-30'",
        ),
        ("id: a, model: T4, price: 1, valid_from: 2026-02-01T09:00:00", "T09:00:00' has no offset from UTC"),
        ("id: a, model: T4, price: 1, valid_from: 2026-W40-4", "'2026-W40-4' has no offset from UTC: write 2026-10-01"),
        ("id: a, model: T4, price: 1, valid_from: 2026-02-01, valid_to: 2026-02-01", "ends at or before its start"),
        ("id: a, model: '*', price: 1, valid_from: 2026-02-01", "rows.0.model: not a GPU model: '*'"),
        ("id: a, model: NVIDIA, price: 1, valid_from: 2026-02-01", "rows.0.model: not a GPU model: 'NVIDIA'"),
        ("id: a, model: T4, price: 1, valid_from: 2026-02-01, rebate: 3", "rows.0.rebate: unknown key"),
        ("id: a, model: T4, price: 1, valid_from: 2026-02-01, capacity_type: cheap", "rows.0.capacity_type: "),
        ("id: a b, model: T4, price: 1, valid_from: 2026-02-01", "rows.0.id: "),
    ],
)  # fmt: skip
def test_refused_with_the_place(tmp_path, row, message):
    assert message in refusal(tmp_path, f"{HEAD}  - {{{row}, {REST}}}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD.replace("USD", "EURO") + "  - {}\n", "prices.yaml:2: currency: not an ISO 4217 currency: 'EURO'"),
        (HEAD.replace("USD", "USD\ntimezone: Mars/Base") + "  - {}\n", "prices.yaml:3: timezone: unknown time zone"),
        (HEAD + "  []\n", "prices.yaml:3: rows: "),
        ("", "prices.yaml:1: "),
        (HEAD + "  - {id: a, id: b}\n", "occurs twice"),
    ],
)
def test_refused_books(tmp_path, text, message):
    assert message in refusal(tmp_path, text)


def test_overlapping_validity_and_repeated_ids_are_refused(tmp_path):
    row = f"  - {{id: a, model: T4, price: 1, valid_from: 2026-01-01, {REST}}}\n"
    assert "prices.yaml:5: rows.1.id: row 'a' occurs twice" in refusal(tmp_path, HEAD + row + row)
    second = row.replace("id: a", "id: b").replace("model: T4", "model: Tesla-T4")
    assert "valid at the same time as row 'a' for the same GPUs" in refusal(tmp_path, HEAD + row + second)


def test_prices_are_the_decimals_that_were_written():
    for text in ("2.7447", "'2.7447'", "0.1", "1e-3", "3", "123456.789012345"):
        book = price_book(f"id: a, model: T4, price: {text}, valid_from: 2026-01-01")
        assert book.rows[0].price == Decimal(text.strip("'"))


def test_the_version_is_the_content():
    a = "id: a, model: T4, price: 1, valid_from: 2026-01-01"
    b = "id: b, model: L4, price: 2, valid_from: 2026-01-01"
    assert price_book(f"{a}\n{b}").version == price_book(f"{b}\n{a}").version
    assert price_book(a).version == price_book(a.replace("price: 1,", "price: '1.00',")).version
    assert price_book(a).version != price_book(a.replace("price: 1,", "price: 1.01,")).version


def test_the_sample_book_is_valid_and_dated():
    with as_file(files("accountant") / "samples" / "price-book.yaml") as path:
        book = load(path)
    prices = {
        moment: book.unit_price("NVIDIA H100 80GB HBM3", at(moment), capacity_type="on-demand").price
        for moment in ("2025-05-31T23:59:59", "2025-06-01")
    }
    assert list(prices.values()) == [Decimal("12.29"), Decimal("6.88")]
    assert book.unit_price("NVIDIA GeForce RTX 4090", at("2026-10-01"), capacity_type="on-demand") is None
    assert all(row.source and row.as_of for row in book.rows)


HOUR = 3_600_000_000
OWNED_REST = "per: gpu-hour, source: s, as_of: 2026-01-01"
OWNED = "in_service: 2026-01-15, lifetime_months: 48, gpus: 8, gpu_price: 28000, overhead: 0.4, residual: 0.1"


def book_of(*rows, head="", timezone="UTC"):
    body = "".join(f"  - {{{row}, {OWNED_REST}}}\n" for row in rows)
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
    """One month after the last day of January is the last day of February, also in a leap year and over a clock
    change."""
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
        ({"residual": 2}, "a share must be between 0 and 1"),
        ({"lifetime_months": 0}, "greater than or equal to 1"),
        ({"in_service": "2026-02-30"}, "day"),
    ],
)
def test_impossible_machines(changes, message):
    with pytest.raises(ValueError, match=message):
        owned(**changes)


def test_an_owned_gpu_has_no_price_before_and_after_its_life():
    one = book_of(f"id: a, model: H100, amortised: {{{OWNED}}}, valid_from: 2026-02-01, basis: whole-instance")
    assert one.unit_price("H100", at("2026-01-31")) is None
    assert one.unit_price("H100", at("2030-01-14T23:59:59")) is not None
    assert one.unit_price("H100", at("2030-01-15")) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("valid_from: 2026-01-14", "b.yaml:5: rows.0.valid_from: the row begins before its GPUs are in service"),
        ("valid_from: 2026-02-01, valid_to: 2031-01-01", "rows.0.valid_to: the row ends after the life of its GPUs"),
        ("valid_from: 2026-02-01, price: 1", "this one has price and amortised"),
        ("valid_from: 2026-02-01, discount: 1.5", "a share must be between 0 and 1"),
    ],
)
def test_refused_owned_rows(row, message):
    with pytest.raises(FileFault, match=message.replace("(", r"\(")):
        book_of(f"id: a, model: H100, amortised: {{{OWNED}}}, {row}, basis: whole-instance")


def test_an_instance_by_either_basis():
    machine = "name: p5.48xlarge, price: '55.04', gpus: 8"
    whole = book_of(f"id: a, model: H100, instance: {{{machine}}}, valid_from: 2026-01-01, basis: whole-instance")
    assert whole.unit_price("H100", at("2026-10-01")).price == Decimal("6.88")
    parts = f"{machine}, vcpus: 192, memory_gb: 2048, weights: 'gres/gpu=9,cpu=0.9,mem=0.1G'"
    only = book_of(f"id: a, model: H100, instance: {{{parts}}}, valid_from: 2026-01-01, basis: gpu-only")
    exact = Fraction(5504, 100) * 9 / (72 + Fraction(1728, 10) + Fraction(2048, 10))
    assert abs(Fraction(only.unit_price("H100", at("2026-10-01")).price) - exact) < Fraction(1, 10**12)
    with pytest.raises(FileFault, match="weights needs `basis: gpu-only`"):
        book_of(f"id: a, model: H100, instance: {{{machine}}}, valid_from: 2026-01-01, basis: gpu-only")
    unweighted = parts.replace("gres/gpu=9", "gres/gpu=0")
    with pytest.raises(FileFault, match=r"the weights 'gres/gpu=0,.*' give GPUs \(gres/gpu\) no weight above 0"):
        book_of(f"id: a, model: H100, instance: {{{unweighted}}}, valid_from: 2026-01-01, basis: gpu-only")
    with pytest.raises(FileFault, match="need weights"):
        book_of(f"id: a, model: H100, instance: {{{machine}, vcpus: 4}}, valid_from: 2026-01-01, basis: whole-instance")


def test_a_discount_is_exact_and_keeps_the_list_price():
    one = book_of("id: a, model: H100, price: '6.88', discount: '0.125', valid_from: 2026-01-01, basis: gpu-only")
    price = one.unit_price("H100", at("2026-10-01"))
    assert (price.price, price.list_price) == (Decimal("6.02"), Decimal("6.88"))
    free = book_of("id: a, model: H100, price: '6.88', valid_from: 2026-01-01, basis: gpu-only")
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
        ("1g.24gb-me", "NVIDIA RTX PRO 6000 Blackwell Server Edition", Fraction(1)),
        ("1g.24gb", "NVIDIA RTX PRO 5000 Blackwell", Fraction(1)),
        ("", "NVIDIA A100-SXM4-80GB", Fraction(1)),
        ("1g.10gb", "NVIDIA H100 PCIe", None),
        ("half", "NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_memory_slices(profile, model, expected):
    assert memory_to_compute(profile, model) == expected


def sevenths(hour, profiles, model):
    shares = [HOUR * (i + 1) // 7 - HOUR * i // 7 for i in range(7)]
    whole = held(*hour, gpu_model=model)
    for i, share in enumerate(shares):
        names = {**whole.names, "pod": f"p{i}", "mig_profile": profiles}
        yield Row(*hour, Accounts(busy=share), names)


def test_a_gpu_of_seven_instances_by_memory(vectors):
    """The vector's other choice: each instance pays 1/8, and the eighth that no instance has is unallocated."""
    case = vectors["mig-naive-overbilling"]["input"]
    price, hour = case["card_price_per_hour"], (at("2026-10-01"), at("2026-10-01T01:00"))
    ledger = ListLedger(sevenths(hour, "1g.10gb", "NVIDIA H100 80GB HBM3"))
    by_memory = book_of(
        f"id: a, model: H100, price: {price}, valid_from: 2026-01-01, basis: gpu-only", head="mig_basis: memory\n"
    )
    answer = cost(ledger, by_memory, *hour, by=("team",))
    assert answer.total == Decimal(str(price))
    held = {line.key["team"]: line.gpu_us for line in answer.lines}
    assert held == {"vision": HOUR * 7 // 8, IDLE: HOUR // 8}
    assert sum(charge.gpu_us for charge in charge_table(ledger, by_memory, *hour, by=("pod",)).charges()) == HOUR
    one = cost(ledger, by_memory, *hour, by=("pod",), where={"pod": {"p0"}})
    assert one.lines[0].gpu_us == HOUR // 8 - 1


def test_an_instance_whose_memory_nobody_knows_is_unpriced():
    hour = at("2026-10-01"), at("2026-10-01T01:00")
    ledger = ListLedger(sevenths(hour, "1g.10gb", "NVIDIA H100 PCIe"))
    by_memory = book_of(
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


def printed(value, text):
    """Return whether an exact figure equals the source's printed one."""
    places = -Decimal(text).as_tuple().exponent
    return round(Fraction(value) * 10**places) == Fraction(text) * 10**places


def test_a_node_price_is_divided_by_ratio(vectors):
    case = vectors["opencost-spec-appendix-a"]
    prices = case["input"]["base_prices"]
    weights = ResourceWeights({name: Fraction(value) for name, value in prices.items()})
    parts = weights.divide(Decimal(case["input"]["node_price_month"]), case["input"]["resources"])
    assert parts == case["expect"]
    assert sum(parts.values()) == case["input"]["node_price_month"]


def test_aws_accelerated_split(vectors):
    case = vectors["aws-split-accelerated-unit-cost"]
    source, expected = case["input"], case["expect"]
    assert source["weights"] == {"gpu": "9", "vcpu": "0.9", "gb": "0.1"}
    weights = ResourceWeights.parse(AWS_WEIGHTS)
    amounts = {"gres/gpu": source["gpus"], "cpu": source["vcpus"], "mem": source["memory_gb"] * 1024}
    parts = weights.divide(Decimal(source["price_per_hour"]), amounts)
    assert sum(parts.values()) == Decimal(expected["sum_back_to_instance_price"])
    assert printed(parts["gres/gpu"] / source["gpus"], expected["gpu_hour_exact"])
    assert printed(parts["cpu"] / source["vcpus"], expected["vcpu_hour_exact"])
    assert printed(parts["mem"] / source["memory_gb"], expected["gb_hour_exact"])
    assert printed(source["price_per_hour"] / weights.units(amounts), expected["unit_cost_exact"])
    # What the source prints for the GB-hour does not follow from its own weights.
    assert not printed(parts["mem"] / source["memory_gb"], expected["gb_hour_printed"])
    row = Instance(name=source["instance"], price="10", gpus=8, vcpus=64, memory_gb=488, weights=AWS_WEIGHTS)
    assert printed(row.unit_price(), expected["gpu_hour_exact"])


def test_aws_cpu_split(vectors):
    case = vectors["aws-split-cpu-unit-cost"]
    source = case["input"]
    weights = ResourceWeights({name: Fraction(value) for name, value in source["weights"].items()})
    amounts = {"vcpu": source["vcpus"], "gb": source["memory_gb"]}
    parts = weights.divide(Decimal(source["price_per_hour"]), amounts)
    assert printed(source["price_per_hour"] / weights.units(amounts), case["expect"]["unit_cost_exact"])
    assert printed(parts["vcpu"] / source["vcpus"], case["expect"]["vcpu_hour_exact"])


def test_prices_by_label(vectors):
    """OpenCost's node costs its own row and its GPUs' row; this project prices the GPUs by the model in the label."""
    case = vectors["opencost-csv-gpu-price"]
    for node, expected in zip(case["input"], case["expect"], strict=True):
        (model,) = node["gpu_label"].values()
        book = price_book(f"id: a, model: {model}, price: '{node['gpu_price']}', valid_from: 2026-01-01")
        price = book.unit_price(model, at("2026-10-01")).price
        assert exact_product(price, Decimal(node["gpus"])) + Decimal(str(node["node_base"])) == Decimal(str(expected))


def test_a_configured_price_comes_out_unchanged(vectors):
    """The defect upstream: a price per core was read as the node's price and divided again."""
    case = vectors["opencost-issue-2418-root-cause"]
    for source, expected in zip(case["input"], case["expect"], strict=True):
        configured = str(source["configured"]["gpu"])
        book = price_book(f"id: a, model: T4, price: '{configured}', valid_from: 2026-01-01")
        price = book.unit_price("Tesla T4", at("2026-10-01")).price
        assert price == Decimal(expected["correct"]["gpu"]) != Decimal(expected["opencost_gives"]["gpu"])
        # Divided as a node's price on purpose, the parts are the configured prices too.
        node = {"cpu": source["node"]["cpu"], "gpu": source["node"]["gpu"], "ram": Fraction(source["node"]["ram_gib"])}
        weights = ResourceWeights({name: Fraction(value) for name, value in source["configured"].items()})
        parts = weights.divide(weights.units(node), node)
        assert {name: str(part / node[name]) for name, part in parts.items()} == expected["correct"]


def test_slurm_billing_weights(vectors):
    case = vectors["slurm-tres-billing"]
    weights = ResourceWeights.parse(case["input"]["weights"])
    job = {"cpu": 1, "mem": case["input"]["job"]["mem_gb"] * 1024, "gres/gpu": 0, "license/lica": 0}
    assert weights.units(job) == case["expect"]["sum_rule"]
    assert max(weights.terms(job).values()) == case["expect"]["max_tres_rule"]
    plain = ResourceWeights.parse("Mem=0.25")
    assert plain.units({"mem": job["mem"]}) == case["expect"]["mem_weight_plain_0_25"]
    assert weights.units({"mem": job["mem"]}) == case["expect"]["mem_weight_0_25G"]


@pytest.mark.parametrize("text", ["", "CPU", "CPU=", "CPU=-1", "CPU=1,CPU=2", "Mem=0.25X", "=1", "CPU=1e3"])
def test_weights_that_are_none(text):
    with pytest.raises(ValueError, match="not a weight"):
        ResourceWeights.parse(text)


def test_service_units(vectors):
    """An H100 node of 8 GPUs and a CPU node of 96 cores, by the larger of their two counts."""
    weights = ResourceWeights.parse("CPU=1,GRES/gpu=120")
    jobs = [{"cpu": 96}, {"cpu": 96, "gres/gpu": 8}, {"cpu": 12, "gres/gpu": 1}]
    assert [max(weights.terms(job).values()) for job in jobs] == vectors["ncsa-rails-su"]["expect"]


def test_mig_devices_are_no_gpus(vectors):
    """The labels of MIG strategy single count instances; this project's model name and capacity are the physical
    GPU's."""
    case = vectors["gfd-mig-single-labels"]
    labels, expected = case["input"]["labels"], case["expect"]
    assert int(labels["nvidia.com/gpu.count"]) == expected["mig_devices"]
    book = price_book("id: a, model: A100-40GB, price: 2, valid_from: 2026-01-01")
    price = book.unit_price(labels["nvidia.com/gpu.product"], at("2026-10-01")).price
    instances = expected["mig_devices"]
    sevenths = instances * int(labels["nvidia.com/gpu.slices.gi"])
    assert price * sevenths / 7 == 2 * expected["physical_gpus_at_7_per_gpu"]


def test_unused_quota(vectors):
    case = vectors["opencost-quota-overhead"]["input"]
    prices = {"cpu": Decimal(str(case["price"]["cpu"])), "ram": Decimal(str(case["price"]["ram"]))}
    unused = {
        "cpu": case["quota"]["cpu"] - case["used"]["cpu"],
        "ram": case["quota"]["ram_gib"] - case["used"]["ram_gib"],
    }
    found = {name: prices[name] * unused[name] * case["hours"] for name in prices}
    expected = vectors["opencost-quota-overhead"]["expect"]
    assert {name: float(value) for name, value in found.items()} == {"cpu": expected["cpu"], "ram": expected["ram"]}
    assert float(sum(found.values())) == expected["total"]


@pytest.mark.parametrize("number", [2, 3, 4])
def test_commitments(vectors, number):
    case = vectors[f"focus-commitment-usage-{number}"]
    left, found = Decimal(case["input"]["commit_per_hour"]), []
    for usage in map(Decimal, case["input"]["usage_effective"]):
        hour = commitment_use(left, usage)
        found += [("Used", Decimal(0), hour.used), (None, hour.beyond, hour.beyond)]
        left = hour.unused
    found.append(("Unused", Decimal(0), left))
    rows = [
        {
            "status": status,
            "PricingCategory": "Standard" if status is None else "Committed",
            "BilledCost": f"{billed:.2f}",
            "EffectiveCost": f"{effective:.2f}",
            "ConsumedQuantity": None,
            "ResourceId": "<commitment id>",
        }
        for status, billed, effective in found
        if effective
    ]
    assert len(rows) == len(case["expect"])
    for row, expected in zip(rows, case["expect"], strict=True):
        assert {name: row[name] for name in expected} == expected


def test_a_spend_agreement(vectors):
    case = vectors["focus-saas-spend-a1"]
    source, expected = case["input"], case["expect"]
    billed = [source["contracted_unit_price"] * quantity for quantity in source["monthly_quantities"]]
    listed = [source["list_unit_price"] * quantity for quantity in source["monthly_quantities"]]
    assert (billed, listed) == (expected["billed"], expected["list"])
    assert commitment_use(Decimal(source["commit"]), Decimal(sum(billed))).unused == expected["unused_fee"]


def test_shares_of_the_cluster(vectors):
    case = vectors["princeton-sponsor-report"]
    for kind in ("gpu", "cpu"):
        part, whole = case["input"][f"group_{kind}_hours"], case["input"][f"total_{kind}_hours"]
        assert round(share_of(part, whole) * 100, 1) == case["expect"][f"{kind}_share_pct"]
