"""FOCUS exports: their charges add up to the statement to the last unit, and every cell conforms to the rules."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.statements import Closing
from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.errors import CannotRender
from accountant.core.periods import Month, zone
from accountant.core.settings import InvoiceIssuer
from accountant.exports.focus.charge_tables import BILLING_PERIOD, INVOICE_DETAIL
from accountant.exports.focus.charge_tables import COLUMNS as COLUMNS_1_2
from accountant.exports.rendering_process import written
from accountant.exports.zip_archive import unpack
from accountant.prices.price_book import PriceBook
from accountant.reports.focus_charge_rows import COST_AND_USAGE
from accountant.reports.report_builder import MonthBooks, Report, build
from accountant.reports.statement_line_charges import ChargeListing
from gputally.base.money import exact_sum
from tests.billing.usage_rows import HOUR_MS, held, price_book, unheld
from tests.fakes.list_ledger import ListLedger
from tests.reports import sample_month

Rows = list[dict[str, str]]
CLOSED_LISTS = {
    "ChargeCategory": {"Usage", "Credit", "Adjustment"},
    "ChargeClass": {"", "Correction"},
    "ChargeFrequency": {"One-Time", "Recurring", "Usage-Based"},
    "PricingCategory": {"", "Standard", "Dynamic", "Committed"},
    "CommitmentDiscountStatus": {"", "Used", "Unused"},
    "CommitmentDiscountCategory": {"", "Usage"},
}


def read(report: Report, name: str = "cost_and_usage.csv") -> Rows:
    text = unpack(written("focus", report))[name].decode()
    return list(csv.DictReader(io.StringIO(text, newline="")))


def notes(report: Report) -> dict[str, object]:
    found = json.loads(unpack(written("focus", report))["notes.json"])
    assert isinstance(found, dict)
    return found


def projected(report: Report) -> Rows:
    text = written("focus-1.2", report).decode()
    return list(csv.DictReader(io.StringIO(text, newline="")))


def number(text: str) -> Decimal:
    return Decimal(text or 0)


def check_sums(report: Report) -> None:
    """Check every law of an export."""
    rows = read(report)
    month = Month.of(report.start_ms, report.tz)
    due: dict[str, Decimal] = defaultdict(Decimal)
    for row in rows:
        due[row["SubAccountId"]] = exact_sum([due[row["SubAccountId"]], number(row["BilledCost"])])
    assert {team: amount for team, amount in due.items() if amount} == {
        team: amount for team, amount in report.charged.items() if amount
    }
    if report.team is None and report.statement.due_total is not None:
        assert exact_sum(number(row["BilledCost"]) for row in rows) == exact_sum(report.statement.charged.values())

    hours: dict[tuple[str, ...], Decimal] = defaultdict(Decimal)
    costs: dict[tuple[str, ...], Decimal] = defaultdict(Decimal)
    for row in rows:
        if row["PricingQuantity"]:
            quantity, billed = number(row["PricingQuantity"]), number(row["BilledCost"])
            assert billed == number(row["EffectiveCost"]) == number(row["ContractedCost"])
            assert billed == number(row["ContractedUnitPrice"]) * quantity
            assert number(row["ListCost"]) == number(row["ListUnitPrice"]) * quantity
            line = row["SubAccountId"], row["x_Account"], row["x_Detail"], row["SkuPriceId"]
            hours[line] = exact_sum([hours[line], quantity])
            costs[line] = exact_sum([costs[line], billed])
        else:
            assert not row["SkuPriceId"]
        if not row["ChargeClass"]:
            assert row["BillingPeriodStart"] <= row["ChargePeriodStart"] < row["ChargePeriodEnd"]
            assert row["ChargePeriodEnd"] <= row["BillingPeriodEnd"]
    of_lines: dict[tuple[str, ...], Decimal] = defaultdict(Decimal)
    for line in (*report.lines, *report.commitments):
        if line.price_row and line.gpu_hours:
            sku = "-".join(
                part for part in ("gpu", line.gpu_model.lower().replace(" ", "-"), line.capacity_type) if part
            )
            at = line.team, line.account, line.detail, f"{sku}@{line.price_row}"
            of_lines[at] = exact_sum([of_lines[at], line.gpu_hours])
            assert line.cost == costs[at]
    assert dict(hours) == dict(of_lines)

    keys = [row["x_ChargeKey"] for row in rows]
    assert len(set(keys)) == len(keys)
    details = read(report, "invoice_detail.csv")
    invoiced = {row["InvoiceDetailId"]: number(row["BilledCost"]) for row in details}
    assert exact_sum(invoiced.values()) == exact_sum(report.due.values())
    assert {row["InvoiceId"] for row in rows if row["SubAccountId"] == "__idle__"} <= {""}, "nobody is billed for it"
    assert all(row["InvoiceId"] and row["InvoiceDetailId"] for row in rows if row["SubAccountId"] != "__idle__")
    categories = {row["InvoiceDetailId"]: row["ChargeCategory"] for row in details}
    for detail, amount in invoiced.items():
        assert amount == exact_sum(number(row["BilledCost"]) for row in rows if row["InvoiceDetailId"] == detail)
        assert {row["ChargeCategory"] for row in rows if row["InvoiceDetailId"] == detail} == {categories[detail]}
    for invoice in {row["InvoiceId"] for row in details}:
        total = exact_sum(number(row["BilledCost"]) for row in details if row["InvoiceId"] == invoice)
        assert total == round(total, 2), "an invoice is whole cents; what rounds it is a line of its own"
    assert [row["BillingPeriodStatus"] for row in read(report, "billing_period.csv")] == ["Open"]
    assert all(key.startswith(str(month)) for key in keys)
    assert exact_sum(number(row["BilledCost"]) for row in projected(report)) == exact_sum(report.charged.values())


@pytest.mark.parametrize("team", [None, "vision", "genomics", "__idle__"])
def test_a_months_charges_are_its_statement(team: str | None) -> None:
    check_sums(replace(sample_month.charged(), team=team))


def test_what_rounds_an_invoice_is_not_named_in_a_unit_of_one_currency() -> None:
    report = sample_month.charged()
    rounding = [row for row in read(report) if row["ChargeCategory"] == "Adjustment"]
    assert rounding
    texts = {text for row in (*rounding, *read(report, "invoice_detail.csv")) for text in row.values()}
    assert not [text for text in texts if re.search(r"\bcents?\b", text, re.IGNORECASE)]


def test_a_running_month_has_charges_of_whole_local_days() -> None:
    report = sample_month.charged(end_ms=sample_month.START_MS + 2 * sample_month.DAY_MS + 5 * HOUR_MS + 1)
    check_sums(report)
    days = {row["ChargePeriodStart"] for row in read(report) if row["ResourceId"]}
    assert min(days) == "2026-10-01T00:00:00Z"
    assert max(days) == "2026-10-03T00:00:00Z"


def test_every_sort_of_charge_is_there_and_says_what_it_is() -> None:
    rows = read(sample_month.charged())
    details = {(row["x_Account"], row["x_Detail"]) for row in rows}
    assert details >= {
        ("busy", ""), ("allocated_idle", "running_idle"), ("allocated_unknown", ""), ("unallocated", "spread"),
        ("unallocated", "reserved"), ("unused_commitment", ""), ("", ""),
    }  # fmt: skip
    for column, allowed in CLOSED_LISTS.items():
        assert {row[column] for row in rows} <= allowed, column
    unused = next(row for row in rows if row["x_Account"] == "unused_commitment")
    assert (unused["SubAccountId"], unused["ResourceId"], unused["CommitmentDiscountStatus"]) == (
        "genomics", "reserved-1", "Unused",
    )  # fmt: skip
    assert unused["ConsumedQuantity"] == unused["ConsumedUnit"] == ""
    covered = next(row for row in rows if row["CommitmentDiscountStatus"] == "Used")
    assert (covered["ListUnitPrice"], covered["ContractedUnitPrice"]) == ("2.00", "1.800")
    pod = next(row for row in rows if row["x_Account"] == "busy" and row["ResourceType"] == "Kubernetes Pod")
    assert pod["ResourceId"] == f"prod/{json.loads(pod['Tags'])['namespace']}/{pod['ResourceName']}"
    assert pod["x_GpuHoursUsed"] == pod["ConsumedQuantity"] == pod["x_GpuHoursAllocated"]
    spot = next(row for row in rows if row["SkuId"].endswith("-spot"))
    assert spot["PricingCategory"] == "Dynamic"
    (correction,) = (row for row in rows if row["ChargeClass"] == "Correction")
    assert (correction["ChargePeriodStart"], correction["ChargePeriodEnd"], correction["BillingPeriodStart"]) == (
        "2026-09-01T00:00:00Z", "2026-10-01T00:00:00Z", "2026-10-01T00:00:00Z",
    )  # fmt: skip
    assert correction["BilledCost"] == "-34.40"
    by_hand = {row["ChargeCategory"]: row["BilledCost"] for row in rows if row["x_Reason"] and not row["ChargeClass"]}
    assert by_hand == {"Credit": "-250.00", "Adjustment": "12.00"}


def test_a_charge_keeps_its_key_from_release_to_release() -> None:
    """Whoever loads a month again knows by it which charges there already are."""
    sorts = {"Usage": "busy", "Correction": "busy", "Credit": "", "Adjustment": ""}
    found: dict[str, str] = {}
    for row in read(sample_month.charged()):
        sort = row["ChargeClass"] or row["ChargeCategory"]
        if row["x_Account"] == sorts[sort]:
            found.setdefault(sort, row["x_ChargeKey"])
    assert found == {
        "Usage": "2026-10-d2ec73170c25ccc6359fe314",
        "Correction": "2026-10-a02cb61a7f7e93cd2365ee92",
        "Credit": "2026-10-b7c26408cdd27e1bcac4c81a",
        "Adjustment": "2026-10-51e0939c9c75fb733380fe66",
    }


def test_notes_have_names_as_they_are_written() -> None:
    ledger = sample_month.charged_ledger()
    ledger.add(held("2026-10-02", "2026-10-03", 8, team="Föhn", cluster="prod", pod="late-0"))
    span = sample_month.START_MS, sample_month.END_MS
    report = build(ledger, sample_month.charged_book(), *span, listing=ChargeListing(InvoiceIssuer(), ()))
    assert '"Föhn": ' in unpack(written("focus", report))["notes.json"].decode()


def test_what_is_no_charge_is_named_in_the_notes() -> None:
    report = sample_month.charged()
    rows, said = read(report), notes(report)
    assert not any("Tesla T4" in row["SkuPriceDetails"] for row in rows)
    left_out = said["no_charge"]
    assert isinstance(left_out, dict)
    unpriced = exact_sum(Decimal(line["gpu_hours"]) for line in left_out["unpriced"])
    assert unpriced == exact_sum(line.gpu_hours for line in report.lines if line.cost is None) > 0
    for account in ("unmetered", "down"):
        expected = exact_sum(line.gpu_hours for line in report.lines if line.account == account)
        assert Decimal(left_out[f"{account}_gpu_hours"]) == expected > 0
    assert said["statement_sha256"] == statement_hash(report.statement)
    assert Decimal(str(said["billed"])) == exact_sum(report.statement.charged.values())


def test_a_closed_month_is_closed_and_its_kept_lines_rule() -> None:
    """Records after the close divide the lines differently, and change none of them."""
    first = sample_month.charged()
    closing = Closing(sample_month.END_MS + 5 * sample_month.DAY_MS, "ann", "all there", ())
    kept = replace(first.statement, status="closed", closing=closing)
    late = sample_month.charged_ledger()
    late.add(held("2026-10-02", "2026-10-03", 8, team="latecomer", cluster="prod", pod="late-0"))
    late.rows = [row for row in late.rows if row.names.get("team") != "teaching"]
    report = build(
        late, sample_month.charged_book(), sample_month.START_MS, sample_month.END_MS,
        booked=MonthBooks(kept, period="published"), listing=ChargeListing(InvoiceIssuer(), ()),
    )  # fmt: skip
    rows = read(report)
    assert exact_sum(number(row["BilledCost"]) for row in rows) == exact_sum(kept.charged.values())
    assert "latecomer" not in {row["SubAccountId"] for row in rows}
    teaching = [row for row in rows if row["SubAccountId"] == "teaching" and row["x_Account"] == "busy"]
    assert {(row["ResourceId"], row["ChargePeriodEnd"]) for row in teaching} == {("", "2026-11-01T00:00:00Z")}
    (period,) = read(report, "billing_period.csv")
    assert (period["BillingPeriodStatus"], period["BillingPeriodLastUpdated"]) == ("Closed", "2026-11-06T00:00:00Z")
    assert {row["InvoiceIssueStatus"] for row in read(report, "invoice_detail.csv")} == {"Issued"}
    assert notes(report)["records_after_close"] is True


def test_a_second_export_is_the_same_to_the_byte() -> None:
    again = sample_month.charged.__wrapped__()
    for form in ("focus", "focus-1.2"):
        assert written(form, sample_month.charged()) == written(form, again)


def test_columns_stand_in_order_with_our_own_last() -> None:
    for columns in (COST_AND_USAGE, COLUMNS_1_2):
        focus = [name for name in columns if not name.startswith("x_")]
        assert list(columns[: len(focus)]) == sorted(focus)
        assert len(set(columns)) == len(columns)
    assert "InvoiceDetailId" not in COLUMNS_1_2
    assert list(BILLING_PERIOD) == sorted(BILLING_PERIOD)
    assert list(INVOICE_DETAIL) == sorted(INVOICE_DETAIL)


@pytest.mark.parametrize("name", sample_month.HOSTILE)
def test_no_cell_is_a_formula(name: str) -> None:
    names = dict.fromkeys(("team", "namespace", "job", "pod", "user", "cluster", "pool"), name)
    row = held("2026-10-01", "2026-10-03", gpus=8, busy=0.01, **names)
    report = sample_month.october(
        row, booked=MonthBooks(beside=sample_month.beside()), listing=ChargeListing(InvoiceIssuer(name=name), ())
    )
    for rows in (read(report), read(report, "invoice_detail.csv"), read(report, "billing_period.csv")):
        for row in rows:
            for column, cell in row.items():
                assert not cell.startswith(("=", "+", "@", "\t", "\r", "＝")), column
                assert not cell.startswith("-") or Decimal(cell) < 0, column


@pytest.mark.parametrize(
    ("start", "end", "book", "words"),
    [
        ("2026-10-01", "2026-11-01", None, "no price book"),
        ("2026-10-05", "2026-10-12", sample_month.book(), "calendar month"),
        ("2026-10-01", "2026-12-01", sample_month.book(), "calendar month"),
    ],
)
def test_what_has_no_focus_form_says_so(start: str, end: str, book: PriceBook | None, words: str) -> None:
    tz = zone("UTC")
    span = (Month.parse(start[:7]).span(tz)[0], Month.parse(end[:7]).span(tz)[0])
    if start[-2:] != "01":
        span = span[0] + 4 * sample_month.DAY_MS, span[0] + 11 * sample_month.DAY_MS
    report = build(ListLedger(), book, *span, listing=ChargeListing(InvoiceIssuer(), ()))
    for form in ("focus", "focus-1.2"):
        with pytest.raises(CannotRender, match=words):
            written(form, report)


def test_an_empty_month_has_its_headings() -> None:
    report = sample_month.october(listing=ChargeListing(InvoiceIssuer(), ()))
    assert read(report) == []
    assert notes(report)["charges"] == 0


@st.composite
def ledgers(draw: st.DrawFn) -> ListLedger:
    """Generate a few holders of whole GPUs over odd spans of October in Berlin, in which summer time ends."""
    rows = []
    for number in range(draw(st.integers(1, 12))):
        begin = sample_month.START_MS + draw(st.integers(-HOUR_MS * 40, 31 * sample_month.DAY_MS))
        end = begin + draw(st.integers(1, 4 * sample_month.DAY_MS))
        gpus = draw(st.integers(1, 8))
        model = draw(st.sampled_from(["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "Tesla T4"]))
        place = {"gpu_model": model, "pool": draw(st.sampled_from(["a", "b"])), "cluster": "prod"}
        if draw(st.booleans()):
            busy = draw(st.sampled_from([None, 0.0, 0.37, 1.0]))
            team = draw(st.sampled_from(["vision", "language", "__unassigned__"]))
            rows.append(held(begin, end, gpus, busy, team=team, pod=f"pod-{number}", user=f"u{number % 2}", **place))
        else:
            rows.append(unheld(begin, end, draw(st.sampled_from(["unallocated", "down", "unmetered"])), gpus, **place))
    return ListLedger(rows)


@given(ledgers(), st.sampled_from(["keep", "spread"]), st.sampled_from(["UTC", "Europe/Berlin", "Pacific/Kiritimati"]))
@settings(max_examples=25)
def test_whatever_was_used_the_charges_are_the_statement(ledger: ListLedger, idle: str, timezone: str) -> None:
    rows = """
        id: a100, model: A100, price: '1.337', valid_from: 2026-01-01, valid_to: 2026-10-15
        id: a100-b, model: A100, price: '2.1', discount: '0.07', valid_from: 2026-10-15
        id: h100, model: H100, price: '6.88', valid_from: 2026-01-01
    """
    plain = price_book(rows, timezone=timezone)
    book = PriceBook.model_validate({**plain.model_dump(by_alias=True), "billing": {"idle": {"unallocated": idle}}})
    span = Month(2026, 10).span(zone(timezone))
    check_sums(
        build(
            ledger,
            book,
            *span,
            timezone,
            booked=MonthBooks(beside=sample_month.beside()),
            listing=ChargeListing(InvoiceIssuer(), ()),
        )
    )
