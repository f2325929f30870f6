"""The price book: which row wins, what is refused and where, and names of GPUs."""

from __future__ import annotations

from decimal import Decimal
from importlib.resources import as_file, files

import pytest

from accountant.prices.gpu_model_names import GpuModel, parse_gpu_model
from accountant.prices.price_book import load
from gputally.base.yaml_file import FileFault

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
        ("", GpuModel("")),
    ],
)
def test_names_of_gpus(name, expected):
    assert parse_gpu_model(name) == expected


def test_the_most_specific_row_wins(books):
    book = books.price_book(
        "id: any, model: H100, price: 1, valid_from: 2026-01-01\n"
        "id: eighty, model: H100-80GB, price: 2, valid_from: 2026-01-01\n"
        "id: spot, model: H100-80GB, capacity_type: spot, price: 3, valid_from: 2026-01-01\n"
        "id: spot-eu, model: H100-80GB, capacity_type: spot, region: eu, price: 4, valid_from: 2026-01-01"
    )
    now = books.at("2026-10-01")

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
    assert book.unit_price("H100", books.at("2025-12-31T23:59:59")) is None


def test_validity_is_half_open(books):
    book = books.price_book(
        "id: a, model: T4, price: 1, valid_from: 2026-01-01, valid_to: 2026-02-01T00:00:00Z\n"
        "id: b, model: T4, price: 2, valid_from: 2026-02-01, valid_to: 2026-03-01"
    )
    change = books.at("2026-02-01")
    assert [book.unit_price("T4", at).id for at in (change - 1, change)] == ["a", "b"]
    assert book.unit_price("T4", books.at("2026-03-01")) is None
    assert book.cuts(books.at("2026-01-01"), books.at("2026-03-01")) == (change,)


def test_two_rows_that_ask_for_different_things_need_a_third(books, tmp_path):
    pair = (
        "  - {id: pool, model: T4, pool: a, price: 1, valid_from: 2026-01-01, " + REST + "}\n"
        "  - {id: spot, model: T4, capacity_type: spot, price: 2, valid_from: 2026-01-01, " + REST + "}\n"
    )
    assert refusal(tmp_path, HEAD + pair) == (
        "prices.yaml:5: rows.1.id: row 'spot' is ambiguous with row 'pool': both match capacity_type: spot, pool: a, "
        "and no row has all these conditions"
    )
    both = "  - {id: both, model: T4, pool: a, capacity_type: spot, price: 3, valid_from: 2026-01-01, " + REST + "}\n"
    (tmp_path / "prices.yaml").write_text(HEAD + pair + both)
    book = load(tmp_path / "prices.yaml")
    assert book.unit_price("T4", books.at("2026-10-01"), pool="a", capacity_type="spot").id == "both"
    late = both.replace("2026-01-01", "2026-02-01")
    assert "ambiguous" in refusal(tmp_path, HEAD + pair + late)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("id: a, model: T4, price: -1, valid_from: 2026-01-01", "rows.0.price: a price cannot be negative: -1"),
        ("id: a, model: T4, price: cheap, valid_from: 2026-01-01", "rows.0.price: not a number: 'cheap'"),
        ("id: a, model: T4, price: true, valid_from: 2026-01-01", "prices.yaml:4: rows.0.price: not a number: True"),
        ("id: a, model: T4, price: .nan, valid_from: 2026-01-01", "prices.yaml:4: rows.0.price: not a price: nan"),
        ("id: a, model: T4, price: 0.1234567890123456, valid_from: 2026-01-01", "put the price in quotes"),
        ("id: a, model: T4, price: '0.1234567890123', valid_from: 2026-01-01", "more than 12 decimals"),
        ("id: a, model: T4, price: '1e999999', valid_from: 2026-01-01", "a price is at most 1000000000 per GPU-hour"),
        ("id: a, model: T4, price: 1, valid_from: 2026-02-30", "rows.0.valid_from: not a date: '2026-02-30'"),
        ("id: a, model: T4, price: 1, valid_from: 2026-02-01T09:00:00", "has a time of day but no offset"),
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


def test_prices_are_the_decimals_that_were_written(books):
    for text in ("2.7447", "'2.7447'", "0.1", "1e-3", "3", "123456.789012345"):
        book = books.price_book(f"id: a, model: T4, price: {text}, valid_from: 2026-01-01")
        assert book.rows[0].price == Decimal(text.strip("'"))


def test_the_version_is_the_content(books):
    a = "id: a, model: T4, price: 1, valid_from: 2026-01-01"
    b = "id: b, model: L4, price: 2, valid_from: 2026-01-01"
    assert books.price_book(f"{a}\n{b}").version == books.price_book(f"{b}\n{a}").version
    assert books.price_book(a).version == books.price_book(a.replace("price: 1,", "price: '1.00',")).version
    assert books.price_book(a).version != books.price_book(a.replace("price: 1,", "price: 1.01,")).version


def test_the_sample_book_is_valid_and_dated(books):
    with as_file(files("accountant") / "samples" / "price-book.yaml") as path:
        book = load(path)
    prices = {
        moment: book.unit_price("NVIDIA H100 80GB HBM3", books.at(moment), capacity_type="on-demand").price
        for moment in ("2025-05-31T23:59:59", "2025-06-01")
    }
    assert list(prices.values()) == [Decimal("12.29"), Decimal("6.88")]
    assert book.unit_price("NVIDIA GeForce RTX 4090", books.at("2026-10-01"), capacity_type="on-demand") is None
    assert all(row.source and row.as_of for row in book.rows)
