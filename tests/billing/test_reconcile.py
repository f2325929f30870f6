"""The invoice against the ledger: it adds up line by line, and rates derived from it change nothing else."""

from __future__ import annotations

import gzip
import subprocess
import sys
from decimal import Decimal
from threading import Thread
from zoneinfo import ZoneInfo

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.invoice_reconciliation import Invoice, InvoiceLine
from accountant.bookkeeping.month_closing import CannotClose
from accountant.cli.invoice_lines import InstanceMap, lines
from accountant.core.errors import LedgerUnavailable
from accountant.storage.invoice_file import InvoiceItem, InvoiceUnreadable, read_invoice
from gputally.base.clock import VirtualClock
from tests.billing.usage_rows import NOV, OCT, Breaking, at, held, price_book, unheld
from tests.fakes.list_ledger import ListLedger

BOOK = (
    "id: h100, model: H100, price: '6.88', valid_from: 2026-01-01\n"
    "id: h100-spot, model: H100, capacity_type: spot, price: '3', valid_from: 2026-10-10\n"
    "id: t4, model: T4, price: '0.5', valid_from: 2026-01-01"
)


@pytest.fixture
def keeper():
    rows = [
        held("2026-10-01", "2026-11-05", 6),
        held("2026-10-01", "2026-11-05", 1, team="nlp"),
        unheld("2026-10-01", "2026-11-05"),
        held("2026-10-10", "2026-10-20", 2, team="nlp", capacity_type="spot"),
        held("2026-10-01", "2026-10-02", 1, team="nlp", gpu_model="Tesla T4"),
    ]
    found = Bookkeeper(ListLedger(rows), VirtualClock(at("2026-11-05")))
    found.prices.take(price_book(BOOK), "file", "prices.yaml", "", 0)
    return found


def line(item, amount, model="H100", capacity_type="on-demand", currency="USD", region=""):
    return InvoiceLine(
        item=item,
        gpu_model=model,
        capacity_type=capacity_type,
        amount=Decimal(amount),
        currency=currency,
        region=region,
    )


INVOICE = Invoice(
    source="october.csv",
    lines=(
        line("p5.48xlarge", "40000"), line("p5.4xlarge", "1000"), line("p5.48xlarge", "1300.25", "H100", "spot"),
        line("support", "99.5", "", ""), line("egress", "12", "", ""),
    ),
)  # fmt: skip


TWO_REGIONS = Invoice(
    source="regions.csv",
    lines=(line("a", 9, capacity_type="", region="us"), line("b", 9, capacity_type="", region="eu-1")),
)


def later_than(keeper, day):
    """Return a bookkeeper on the same ledger on another day."""
    return Bookkeeper(keeper._ledger, VirtualClock(at(day)))


def test_every_line_adds_up(keeper):
    found = keeper.invoices.reconcile(OCT, INVOICE)
    assert all(one.invoice == one.teams + one.idle + one.unmatched for one in found.lines)
    assert found.invoice == found.teams + found.idle + found.unmatched == Decimal("42411.75")
    by_item = {(one.items, one.capacity_type): one for one in found.lines}
    demand = by_item[("p5.48xlarge", "p5.4xlarge"), "on-demand"]
    hours = 31 * 24
    assert (demand.teams, demand.idle) == (7 * hours * Decimal("6.88"), hours * Decimal("6.88"))
    assert by_item[("p5.48xlarge",), "spot"].teams == 480 * 3
    assert by_item[("support",), ""].unmatched == Decimal("99.5")
    assert found.not_invoiced == 12  # the T4
    assert demand.rate == (Decimal(41000) / (8 * hours)).quantize(Decimal("1e-12"))


def test_rates_follow_the_invoice_for_that_month_alone(keeper):
    november = keeper.month(NOV)
    book, booked = keeper.true_up(OCT, INVOICE, "ada", "the bill is here")
    assert booked == []
    after = keeper.invoices.reconcile(OCT, INVOICE)
    assert all(abs(one.unmatched) < Decimal("0.00001") for one in after.lines if one.gpu_model)
    assert keeper.month(NOV).cost == november.cost
    assert {price.id for price in book.prices} == {
        "h100", "h100@2026-10", "h100@after-2026-10", "h100-spot@2026-10", "h100-spot@after-2026-10", "t4",
    }  # fmt: skip
    trued = next(price for price in book.prices if price.id == "h100@2026-10")
    assert (trued.row.source, trued.row.valid_to) == ("invoice: october.csv", "2026-11-01T00:00:00Z")
    assert [act.subject for act in keeper._ledger.acts("invoiced")] == ["2026-10"]


def test_a_closed_month_is_corrected_by_it(keeper):
    later = later_than(keeper, "2026-11-20")
    later.close(OCT, "ada")
    _, booked = later.true_up(OCT, INVOICE, "ada", "the bill is here")
    due = sum(correction.amount for correction in booked)
    assert due == Decimal("42300.25") - 8 * 744 * Decimal("6.88") - 480 * 3


LATER = BOOK.replace(
    "price: '6.88', valid_from: 2026-01-01",
    "price: '6.88', valid_from: 2026-01-01, valid_to: 2026-11-01\n"
    "id: h100-new, model: H100, price: '9', valid_from: 2026-11-01",
)


def cost(keeper, month):
    return round(keeper.month(month).cost, 2)


def test_a_month_goes_on_following_its_invoice_when_the_price_file_changes(keeper):
    keeper.true_up(OCT, INVOICE, "ada", "the bill is here")
    before = cost(keeper, OCT)
    again = later_than(keeper, "2026-11-05")
    assert again.take_file(price_book(BOOK), "prices.yaml") is None, "a restart undoes nothing"
    assert again.take_file(price_book(LATER), "prices.yaml") is not None
    assert all(
        abs(one.unmatched) < Decimal("0.001") for one in again.invoices.reconcile(OCT, INVOICE).lines if one.gpu_model
    )
    assert (cost(again, OCT), cost(again, NOV)) == (before, 8 * 4 * 24 * 9)
    assert {price.id for price in again.prices.current.prices} == {
        "h100@2026-10", "h100", "h100-new", "h100-spot@2026-10", "h100-spot@after-2026-10", "t4",
    }  # fmt: skip
    later = later_than(keeper, "2026-11-05")
    assert later.take_file(price_book(LATER), "prices.yaml") is None
    assert cost(later, OCT) == before


def test_an_invoice_of_a_closed_month_brings_back_no_older_price(keeper):
    later = later_than(keeper, "2026-11-20")
    closed = later.close(OCT, "ada")
    later.take_file(price_book(LATER), "prices.yaml")
    november = cost(later, NOV)
    _, booked = later.true_up(OCT, INVOICE, "ada", "the bill is here")
    assert cost(later, NOV) - sum(one.amount for one in later.month(NOV).corrections) == november - sum(
        one.amount for one in booked
    )
    assert sum(one.amount for one in booked) == Decimal("42300.25") - 8 * 744 * Decimal("6.88") - 480 * 3
    assert later.prices.of(later.books().of("2026-10").priced_by).version != closed.priced_by
    assert later.correct("ada") == []
    later.reopen(OCT, "ada", "look again")
    assert abs(later.month(OCT).cost - Decimal("42300.25") - 12) < Decimal("0.01"), "the T4 is not on the invoice"


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kind", ["invoiced", "prices", "repriced", "corrected"])
def test_a_true_up_is_recorded_whole_or_not_at_all(keeper, kind, closed):
    if not closed and kind in ("repriced", "corrected"):
        return  # there is no such act
    ledger, clock = keeper._ledger, VirtualClock(at("2026-11-20"))
    if closed:
        Bookkeeper(ledger, clock).close(OCT, "ada")
    known = ledger.acts()
    broken = Bookkeeper(Breaking(ledger, kind), clock)
    with pytest.raises(LedgerUnavailable):
        broken.true_up(OCT, INVOICE, "ada", "the bill is here")
    assert ledger.acts() == known
    whole = Bookkeeper(ledger, clock)
    whole.true_up(OCT, INVOICE, "ada", "the bill is here")
    recorded = [act.kind for act in ledger.acts()[len(known) :]]
    assert recorded == (["invoiced", "prices", "repriced", "corrected"] if closed else ["invoiced", "prices"])
    assert whole.correct("ada") == []


def test_months_that_follow_their_invoices_are_independent(keeper):
    """A second invoice replaces the first; a manual price ends it; a month with a published price does not need it any
    more."""

    def half(keeper):
        return tuple(round(keeper.month(month).cost / 2) for month in (OCT, NOV))

    later = later_than(keeper, "2026-12-20")
    rising = [INVOICE.model_copy(update={"lines": (line("p5", amount, "H100", ""),)}) for amount in ("1000", "2000")]
    for invoice in (*rising, *rising[:1], *rising[1:]):
        for month in (NOV, OCT):
            later.true_up(month, invoice, "ada", "a bill")
            assert abs(later.invoices.reconcile(month, invoice).lines[0].unmatched) < Decimal("0.001")
    assert all(len(price.id) < 30 for price in later.prices.current.prices)
    assert half(later) == (1006, 1000)
    _, previewed = later.preview(NOV, price_book(BOOK))
    later.reprice(NOV, price_book(BOOK), "ada", "by hand")
    assert later.month(NOV) == previewed
    assert half(later) == (1006, round(8 * 4 * 12 * Decimal("6.88")))
    later.close(OCT, "ada")
    later.publish(OCT, "ada")
    later.take_file(price_book(LATER), "prices.yaml")
    assert not later.prices.latest.true_ups
    assert half(later) == (1006, 8 * 4 * 12 * 9)
    assert later.correct("ada") == []


def test_a_price_file_that_is_taken_while_a_true_up_is_worked_out_is_not_lost(keeper):
    made, begun = keeper.invoices.composed, []

    def meanwhile(*of):
        found = made(*of)
        if not begun:
            begun.append(Thread(target=keeper.take_file, args=(price_book(LATER), "prices.yaml")))
            begun[0].start()
            begun[0].join(0.1)
        return found

    keeper.invoices.composed = meanwhile
    keeper.true_up(OCT, INVOICE, "ada", "the bill is here")
    begun[0].join()
    assert cost(keeper, NOV) == 8 * 4 * 24 * 9
    assert [one.month for one in keeper.prices.latest.true_ups] == ["2026-10"]


def test_invoices_of_two_providers_stand_side_by_side(keeper):
    first, second = (Invoice(source=name, lines=(line(name, "500", name, ""),)) for name in ("H100", "T4"))
    keeper.true_up(OCT, first, "ada", "one provider")
    keeper.true_up(OCT, second, "ada", "the other")
    assert cost(keeper, OCT) == 1000
    assert {row.source for row in keeper.prices.current.rows} >= {"invoice: H100", "invoice: T4"}
    keeper.take_file(price_book(LATER), "prices.yaml")
    assert cost(keeper, OCT) == 1000


def test_a_price_file_under_which_a_month_cannot_follow_its_invoice_is_refused(keeper):
    keeper._ledger.add(held("2026-10-01", "2026-10-02", 1, region="us"))
    regional = "".join(f"id: {r}, model: H100, region: {r}, price: 5, valid_from: 2026-01-01\n" for r in ("us", "eu-1"))
    keeper.take_file(price_book(regional + BOOK.splitlines()[2]), "prices.yaml")
    keeper.true_up(OCT, TWO_REGIONS, "ada", "x")
    with pytest.raises(CannotClose, match=r"^the invoice of 2026-10: price row 'h100' matches several"):
        keeper.take_file(price_book(BOOK), "prices.yaml")
    assert cost(keeper, OCT) == 18 + 12


def test_what_cannot_be_trued_up(keeper):
    with pytest.raises(CannotClose, match="the invoice has charges in EUR, but the price book is in USD"):
        keeper.invoices.reconcile(OCT, Invoice(source="s", lines=(line("a", "1", currency="EUR"),)))
    with pytest.raises(CannotClose, match="needs a reason"):
        keeper.true_up(OCT, INVOICE, "ada", " ")
    with pytest.raises(CannotClose, match="matches a GPU that was billed in"):
        keeper.true_up(OCT, Invoice(source="s", lines=(line("support", "5", "", ""),)), "ada", "x")
    keeper._ledger.add(held("2026-10-01", "2026-10-02", 1, gpu_model="NVIDIA L4"))
    unpriced = Invoice(source="s", lines=(line("g6", "5", "L4", ""),))
    with pytest.raises(CannotClose, match=r"^some GPU time of L4 has no price: add a price row for it, then repeat"):
        keeper.true_up(OCT, unpriced, "ada", "x")
    keeper._ledger.add(held("2026-10-01", "2026-10-02", 1, region="us"))
    with pytest.raises(CannotClose, match="'h100' matches several invoice lines"):
        keeper.true_up(OCT, TWO_REGIONS, "ada", "x")


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.builds(
            line, st.sampled_from("abcd"), st.decimals(-100, 10**6, places=6),
            st.sampled_from(["H100", "T4", "", "L4"]), st.sampled_from(["", "spot", "on-demand"]),
        ),
        min_size=1, max_size=8,
    )
)  # fmt: skip
def test_any_invoice_adds_up_and_loses_no_bill(keeper, invoice_lines):
    invoice = Invoice(source="s", lines=tuple(invoice_lines))
    found = keeper.invoices.reconcile(OCT, invoice)
    assert found.invoice == sum(one.amount for one in invoice_lines) == found.teams + found.idle + found.unmatched
    assert abs(found.teams + found.idle + found.not_invoiced - keeper.month(OCT).cost) < Decimal("1e-6")


FOCUS = (
    "BilledCost,BillingCurrency,ChargePeriodStart,ChargePeriodEnd,RegionId,PricingCategory,SkuId,SkuPriceDetails,ServiceName\n"
    '10.10,USD,2026-10-01T00:00:00Z,2026-10-01T01:00:00Z,eu-1,Standard,s1,"{""InstanceType"":""p5.48xlarge""}",EC2\n'
    '20.20,USD,2026-10-31T23:00:00Z,2026-11-01T00:00:00Z,eu-1,Standard,s1,"{""InstanceType"":""p5.48xlarge""}",EC2\n'
    '5.00,USD,2026-11-01T00:00:00Z,2026-11-01T01:00:00Z,eu-1,Standard,s1,"{""InstanceType"":""p5.48xlarge""}",EC2\n'
    "0.000000000001,USD,2026-10-03T00:00:00Z,2026-10-04T00:00:00Z,eu-1,Dynamic,egress,,EC2\n"
)
CUR_BESIDE = [f"product/attribute{n}" for n in range(8)]
OCTOBER_MS = 1_790_812_800_000
CUR = (
    "lineItem/UnblendedCost,lineItem/CurrencyCode,lineItem/UsageStartDate,lineItem/UsageType,product/instanceType,product/region,pricing/term\n"
    "1.5,USD,2026-10-01T00:00:00Z,EU-BoxUsage:p5.48xlarge,p5.48xlarge,eu-1,OnDemand\n"
    "0.5,USD,2026-10-01T00:00:00Z,EU-SpotUsage:p5.48xlarge,p5.48xlarge,eu-1,\n"
    "0.25,USD,2026-10-01T00:00:00Z,DataTransfer-Out,,eu-1,\n"
)


def test_focus_and_cur_files(tmp_path):
    span = at("2026-10-01"), at("2026-11-01")
    (tmp_path / "focus.csv").write_text(FOCUS)
    expected = [
        InvoiceItem("egress", "eu-1", "spot", "USD", Decimal("0.000000000001")),
        InvoiceItem("p5.48xlarge", "eu-1", "on-demand", "USD", Decimal("30.3")),
    ]
    assert read_invoice(tmp_path / "focus.csv", *span) == expected
    parquet = tmp_path / "focus.parquet"
    duckdb.sql(f"COPY (FROM read_csv('{tmp_path / 'focus.csv'}')) TO '{parquet}'")
    assert read_invoice(parquet, *span)[1] == expected[1]
    (tmp_path / "cur.csv").write_text(CUR)
    assert read_invoice(tmp_path / "cur.csv", *span) == [
        InvoiceItem("DataTransfer-Out", "eu-1", "", "USD", Decimal("0.25")),
        InvoiceItem("p5.48xlarge", "eu-1", "on-demand", "USD", Decimal("1.5")),
        InvoiceItem("p5.48xlarge", "eu-1", "spot", "USD", Decimal("0.5")),
    ]
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(CUR.encode()))
    assert len(read_invoice(tmp_path / "packed.csv.gz", *span)) == 3
    known = InstanceMap.model_validate({"schema": 1, "instances": [{"name": "p5.48xlarge", "model": "H100"}]})
    assert [(one.item, one.gpu_model, one.capacity_type) for one in lines(expected, known)] == [
        ("egress", "", ""), ("p5.48xlarge", "H100", "on-demand"),
    ]  # fmt: skip


BY_MONTH = (
    "BilledCost,BillingCurrency,ChargePeriodStart,ChargePeriodEnd,SkuId,ChargeCategory\n"
    "100,USD,2026-10-01T00:00:00Z,2026-11-01T00:00:00Z,p5,Usage\n"
    "50,USD,2026-11-01T00:00:00Z,2026-12-01T00:00:00Z,p5,Usage\n"
    "7,usd,2026-10-01T00:00:00Z,2027-10-01T00:00:00Z,support,Purchase\n"
    "19,USD,2026-10-01T00:00:00Z,2026-11-01T00:00:00Z,p5,Tax\n"
    "0.123456789012345678,USD,2026-10-15T00:00:00Z,2026-10-15T00:00:00Z,p4,Usage\n"
)


@pytest.mark.parametrize("tz", ["UTC", "America/New_York", "Asia/Tokyo"])
def test_a_month_of_an_invoice_is_that_month_in_every_zone_and_taxes_are_no_price(tmp_path, tz):
    (tmp_path / "focus.csv").write_text(BY_MONTH)
    found = {one.instance: one.amount for one in read_invoice(tmp_path / "focus.csv", *OCT.span(ZoneInfo(tz)))}
    assert found == {"Tax": 19, "p4": Decimal("0.123456789012345678"), "p5": 100, "support": 7}
    (tmp_path / "bare.csv").write_text("BilledCost,ChargePeriodStart,SkuId\n1,2026-10-02T00:00:00Z,p5\n")
    with pytest.raises(InvoiceUnreadable, match="charges without a currency"):
        read_invoice(tmp_path / "bare.csv", *OCT.span(ZoneInfo(tz)))


@pytest.mark.real  # of that size too dear for `make test`
def test_a_report_of_200_000_lines_is_read_in_little_memory(tmp_path):
    """In AWS' form: wide, with quoted tags; exact to the last of ten decimals."""
    wide = ", ".join(f"'{name}-' || (n % 977) AS \"{name}\"" for name in CUR_BESIDE)
    duckdb.sql(
        f"""COPY (SELECT 'id-' || n AS "identity/LineItemId",
        ('2026-10-01T00:00:00Z'::TIMESTAMP + INTERVAL 1 HOUR * (n % 768))::VARCHAR || 'Z' AS "lineItem/UsageStartDate",
        ['EU-BoxUsage:p5.48xlarge', 'EU-SpotUsage:p5.48xlarge', 'DataTransfer-Out'][n % 3 + 1] AS "lineItem/UsageType",
        ['p5.48xlarge', 'p5.48xlarge', ''][n % 3 + 1] AS "product/instanceType", 'eu-1' AS "product/region",
        ['OnDemand', '', ''][n % 3 + 1] AS "pricing/term", 'USD' AS "lineItem/CurrencyCode",
        (n % 100003 + 1)::VARCHAR || '.0000000001' AS "lineItem/UnblendedCost",
        'say "' || n || '", again' AS "resourceTags/user:Name", {wide} FROM range(200000) r(n))
        TO '{tmp_path / "cur.csv"}' (HEADER, DELIMITER ',')"""
    )
    reading = (
        "import resource, sys; from pathlib import Path; from accountant.storage.invoice_file import read_invoice\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for one in read_invoice(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])):\n"
        "    print(one.instance, one.capacity_type, one.amount)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    november = 744 * 3_600_000 + OCTOBER_MS
    told = subprocess.run(
        [sys.executable, "-c", reading, str(tmp_path / "cur.csv"), str(OCTOBER_MS), str(november)],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    inside = [[n % 100_003 + 1 for n in range(kind, 200_000, 3) if n % 768 < 744] for kind in range(3)]
    sums = [sum(mine) + len(mine) * Decimal("0.0000000001") for mine in inside]
    assert told[:-1] == [
        "DataTransfer-Out", f"{sums[2]:.18f}",
        "p5.48xlarge", "on-demand", f"{sums[0]:.18f}",
        "p5.48xlarge", "spot", f"{sums[1]:.18f}",
    ]  # fmt: skip
    assert int(told[-1]) < 300 * 1024, "KiB beyond the interpreter and its libraries"


def test_files_that_are_no_invoice(tmp_path):
    with pytest.raises(InvoiceUnreadable, match="there is no such file"):
        read_invoice(tmp_path / "none.csv", 0, 1)
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InvoiceUnreadable, match="neither FOCUS"):
        read_invoice(tmp_path / "a.csv", 0, 1)
    (tmp_path / "b.csv").write_text(FOCUS.replace("10.10", "ten"))
    with pytest.raises(InvoiceUnreadable, match="ten"):
        read_invoice(tmp_path / "b.csv", 0, 2**50)
    (tmp_path / "c.parquet").write_text("no")
    with pytest.raises(InvoiceUnreadable):
        read_invoice(tmp_path / "c.parquet", 0, 1)
