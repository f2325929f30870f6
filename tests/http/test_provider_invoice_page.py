"""The page of the provider's invoice: every choice of its lines adds up beside the ledger's cost, and its form
compares, stores and applies an invoice as the API does."""

from __future__ import annotations

import csv
import io
import re
from decimal import Decimal

import pytest

from accountant.bookkeeping.invoice_reconciliation import Invoice
from accountant.composition import Service
from accountant.ledger.protocols import Down, Facts, NodeFacts, Retirement
from accountant.web.provider_invoice_page import invoice_text, parse_invoice
from gputally.base.clock import VirtualClock
from tests.http.conftest import (
    MINUTE_MS,
    NOW_MS,
    client_of,
    encoded,
    pod_minutes,
    scoped,
    settings_in,
    token_list,
)
from tests.http.page_parser import EVIL, read
from tests.price_books import price_book_text

PAGE = {"Accept": "text/html"}

INVOICE = {
    "source": f"provider-{EVIL}.csv",
    "lines": [
        {"item": "p5.48xlarge", "gpu_model": "H100", "amount": "5.00", "currency": "EUR"},
        {"item": f"egress {EVIL}", "amount": "1.23", "currency": "EUR"},
        {"item": "p4d", "gpu_model": "A100", "amount": "0", "currency": "EUR"},
    ],
}
PARTS = ("invoice", "teams", "idle", "unused_commitments", "unmatched")


@pytest.fixture(scope="module")
def invoiced(tmp_path_factory):
    """An hour of an H100 at 2.40 held in November; now it is December."""
    clock = VirtualClock(NOW_MS)
    folder = tmp_path_factory.mktemp("invoice")
    with Service(settings_in(folder, prices=price_book_text(H100="2.40"), tokens=token_list()), clock) as service:
        client = client_of(service, headers=PAGE | scoped("admin"))
        assert client.post("/v1/usage", content=encoded(pod_minutes(rows=60))).status_code == 200
        clock.advance(35 * 24 * 60 * MINUTE_MS)
        service.ledger.retire(Retirement(node="node-1"), NOW_MS, clock.wall_ms(), "ada", "sold")
        yield client


def test_a_month_without_records_is_not_compared_with_nothing(invoiced):
    """The first record is of November: what October's bills were is unknown, not 0."""
    answer = invoiced.post("/v1/reconciliation/2026-10", json=INVOICE)
    assert answer.status_code == 409
    assert "unknown" in answer.json()["detail"]


def test_without_an_invoice_it_says_how_to_keep_one(invoiced):
    assert invoiced.get("/invoice", follow_redirects=False).headers["location"] == "/invoice/2026-11"
    answer = invoiced.get("/invoice/2026-10")
    assert answer.status_code == 200
    assert "No invoice was kept" in answer.text
    assert invoiced.get("/invoice/2026-10/lines.csv").status_code == 404
    assert invoiced.get("/invoice/2027-10").status_code == 422
    assert invoiced.get("/invoice/2026-11?show=x").status_code == 422


@pytest.fixture(scope="module")
def kept(invoiced):
    """Without `keep` the invoice is not stored; with it, once."""
    for query, acts in (("", 0), ("?keep=true&reason=november", 1), ("?keep=true", 1)):
        assert invoiced.post(f"/v1/reconciliation/2026-11{query}", json=INVOICE).status_code == 200
        acted = [act for act in invoiced.get("/v1/audit").json()["acts"] if act["kind"] == "invoiced"]
        assert len(acted) == acts
    return invoiced


@pytest.mark.parametrize(
    ("query", "items"),
    [("", 3), ("?show=apart", 1), ("?show=together", 1), ("?show=foreign", 1), ("?model=A100", 1), ("?model=B200", 0)],
)
def test_every_choice_adds_up(kept, query, items):
    *rows, total = csv.DictReader(io.StringIO(kept.get(f"/invoice/2026-11/lines.csv{query}").text))
    assert len(rows) == items
    for row in (*rows, total):
        assert Decimal(row["invoice"]) == sum(Decimal(row[part]) for part in PARTS[1:])
    for part in PARTS:
        assert sum(Decimal(row[part]) for row in rows) == Decimal(total[part])
        assert sum(Decimal(row[f"{part}_shown"]) for row in rows) == Decimal(total[f"{part}_shown"])
    answer = kept.get(f"/invoice/2026-11{query}")
    assert answer.status_code == 200
    if query in ("", "?show=together"):
        texts = {text.strip() for text in read(answer.text).texts}
        assert {f"{Decimal(row[f'{part}_shown']):.2f}".replace("-", "−") for row in rows for part in PARTS} <= texts
    read(answer.text)
    assert answer.text.count("<script") == 0


def test_the_page_says_what_the_invoice_pays_for(kept):
    said = " ".join(" ".join(read(kept.get("/invoice/2026-11").text).texts).split())
    for text in ("6.23", "2.40", EVIL, "in agreement", "no GPU of the cluster", "5.0000"):
        assert text in said
    (act,) = set(re.findall(r'href="(/act/\d+)"', kept.get("/invoice/2026-11").text))
    assert "An invoice was stored" in kept.get(act).text
    teams = kept.get("/month/2026-11/lines?payers=true")
    assert "2.40" in teams.text, "what the teams' part leads to"


def test_an_invoice_in_another_currency_is_not_kept(kept):
    wrong = {"source": "x", "lines": [{"item": "y", "amount": "1", "currency": "USD"}]}
    assert kept.post("/v1/reconciliation/2026-11?keep=true", json=wrong).json()["type"].endswith("books-refuse")


@pytest.fixture
def unkept(tmp_path):
    """An accountant without sign-in, with an hour of an H100 at 2.40 in November; now it is December."""
    clock = VirtualClock(NOW_MS)
    with Service(settings_in(tmp_path, prices=price_book_text(H100="2.40")), clock) as service:
        client = client_of(service, headers=PAGE)
        assert client.post("/v1/usage", content=encoded(pod_minutes(rows=60))).status_code == 200
        clock.advance(35 * 24 * 60 * MINUTE_MS)
        service.ledger.retire(Retirement(node="node-1"), NOW_MS, clock.wall_ms(), "ada", "sold")
        yield client


SUMS = "item;gpu_model;amount\n8 × H100;H100;3.00\n" + EVIL + ";;1.25\n"


def sent(client, step, lines=SUMS, **fields):
    form = {"step": step, "source": "november.csv", "lines": lines, **fields}
    return client.post("/invoice/2026-11", data=form, follow_redirects=False)


def acts(client):
    return [act["kind"] for act in client.get("/v1/audit").json()["acts"]]


def test_an_invoice_is_compared_without_an_act_and_shows_what_the_api_says(unkept):
    before = acts(unkept)
    answer = sent(unkept, "compare")
    assert answer.status_code == 200
    said = " ".join(" ".join(read(answer.text).texts).split())
    invoice = parse_invoice("november.csv", SUMS, "EUR")
    found = unkept.post("/v1/reconciliation/2026-11", json=invoice.model_dump(mode="json")).json()["before"]
    sums = [Decimal(found[part]) for part in ("invoice", "teams", "unmatched")]
    assert sums == [Decimal("4.25"), Decimal("2.40"), Decimal("1.85")]
    for text in ("4.25", "2.40", "1.85", EVIL, "compared and not kept"):
        assert text in said
    assert acts(unkept) == before
    assert "No invoice was kept" in unkept.get("/invoice/2026-11").text


def test_an_invoice_of_a_month_of_which_a_part_is_recorded_says_so(unkept):
    """The records of the fixture begin after the month does."""
    for answer in (sent(unkept, "compare"), unkept.get("/invoice/2026-11")):
        assert "records begin" in answer.text


def test_a_kept_invoice_is_what_the_page_shows_and_is_in_the_form_again(unkept):
    answer = sent(unkept, "keep", reason="agreed")
    assert (answer.status_code, answer.headers["location"]) == (303, "/invoice/2026-11")
    assert acts(unkept).count("invoiced") == 1
    page = read(unkept.get("/invoice/2026-11").text)
    assert "november.csv" in " ".join(page.texts)
    (act,) = [act for act in unkept.get("/v1/audit").json()["acts"] if act["kind"] == "invoiced"]
    assert act["reason"] == "agreed"


def test_a_rate_above_that_of_the_bills_has_the_time_that_nobody_is_billed_beside_it(tmp_path):
    """An H100 at 2.40 is held for an hour and down for half an hour; the provider charges both."""
    clock, half_hour = VirtualClock(NOW_MS), 30 * MINUTE_MS
    with Service(settings_in(tmp_path, prices=price_book_text(H100="2.40")), clock) as service:
        client = client_of(service, headers=PAGE)
        assert client.post("/v1/usage", content=encoded(pod_minutes(rows=60))).status_code == 200
        down = Down(NOW_MS, NOW_MS + half_hour, "kernel panic")
        service.ledger.observe(Facts(nodes=(NodeFacts("prod", "node-1", down=(down,)),)), NOW_MS)
        clock.advance(35 * 24 * 60 * MINUTE_MS)
        service.ledger.retire(Retirement(node="node-1"), NOW_MS + half_hour, clock.wall_ms(), "ada", "sold")
        body = {"source": "x", "lines": [{"item": "p5", "gpu_model": "H100", "amount": "3.60", "currency": "EUR"}]}
        found = client.post("/v1/reconciliation/2026-11?keep=true", json=body).json()
        (line,) = found["before"]["lines"]
        page, file = client.get("/invoice/2026-11"), client.get("/invoice/2026-11/lines.csv")
    (row, _) = csv.DictReader(io.StringIO(file.text))
    held = ("gpu_hours", "down_gpu_hours", "unmetered_gpu_hours", "rate", "billed_rate")
    assert [Decimal(row[name]) for name in held] == [1, Decimal("0.5"), 0, Decimal("3.6"), Decimal("2.4")]
    assert (Decimal(line["rate"]), Decimal(line["billed_rate"])) == (Decimal("3.60"), Decimal("2.40"))
    assert (line["down_gpu_us"], line["unmetered_gpu_us"]) == (half_hour * 1000, 0)
    texts = " ".join(read(page.text).texts)
    assert re.search(r"3\.6000\s+bills 2\.4000", texts)
    assert "0.5 down" in texts


def test_the_columns_of_the_page_add_up_to_their_totals(unkept):
    """Two kinds of lines whose parts no cent divides."""
    lines = "item,gpu_model,amount\nhalf,H100,1.2049\nmore,,0.0049\nmost,,0.0049\n"
    text = sent(unkept, "compare", lines).text
    body = text[text.index("Lines of the invoice against the books") :]
    rows = [
        [Decimal(re.sub(r"<[^>]*>", "", cell).replace("−", "-"))
         for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)[1:6]]
        for row in re.findall(r"<tr>(.*?)</tr>", body[body.index("<tbody>") : body.index("</tfoot>")], re.DOTALL)
    ]  # fmt: skip
    *parts, total = rows
    assert len(parts) == 3
    assert [sum(column) for column in zip(*parts, strict=True)] == total
    assert all(row[0] == sum(row[1:]) for row in rows)


def test_by_the_invoices_rates_the_bills_equal_the_invoice(unkept):
    assert sent(unkept, "apply").status_code == 409, "without a reason"
    assert sent(unkept, "apply", reason="November's bill").status_code == 303
    rows = csv.DictReader(io.StringIO(unkept.get("/invoice/2026-11/lines.csv?show=together").text))
    assert Decimal(next(rows)["teams"]) == 3


def test_a_reader_compares_nothing_and_sees_no_form(invoiced):
    assert invoiced.post("/invoice/2026-11", data={"lines": SUMS}, headers=scoped("read")).status_code == 403
    assert "<textarea" not in invoiced.get("/invoice/2026-11", headers=scoped("read")).text


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ("", "item"),
        ("item,price\nx,1", "amount"),
        ("item,amount,colour\nx,1,red", "colour"),
        ("item,amount\nx,1\ny,two", "line 3"),
        ("item,amount\nx,1,2", "line 2"),
        ("item,amount,Amount\nx,1,2", "twice"),
        ("item," + "a" * 140_000 + "\nx,1", "line"),
        ("item,amount\n,1", "line 2"),
        ("item,amount\nx,1e99", "line 2"),
        ("item,amount\nx,nan", "line 2"),
        ("item,amount,currency\nx,1,euro", "line 2"),
        ("item,amount\n", "lines"),
        ("item,amount\n" + "x,1\n" * 10_001, "lines"),
    ],
)
def test_what_is_no_invoice_is_refused_with_its_place(unkept, lines, place):
    answer = unkept.post("/invoice/2026-11", data={"lines": lines}, headers={"Accept": "application/json"})
    assert answer.status_code == 422
    assert place in answer.text


def test_a_form_that_is_too_large_or_says_no_known_step_is_refused(unkept):
    assert sent(unkept, "compare", "item,amount\n" + "x" * 300_000).status_code == 413
    assert sent(unkept, "guess").status_code == 422
    assert sent(unkept, "compare", "item,amount,currency\nx,1,USD").status_code == 409


@pytest.mark.parametrize("text", ["item,amount\rx,1\ry,2", "\ufeffitem,amount\r\nx,1\r\ny,2\r\n"])
def test_an_invoice_may_end_its_lines_as_any_program_does(text):
    assert [(line.item, line.amount) for line in parse_invoice("", text, "EUR").lines] == [("x", 1), ("y", 2)]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_what_the_form_shows_reads_as_the_same_invoice(separator):
    invoice = Invoice.model_validate(INVOICE)
    text = invoice_text(invoice)
    if separator != ",":
        rows = io.StringIO()
        csv.writer(rows, delimiter=separator).writerows(csv.reader(io.StringIO(text)))
        text = rows.getvalue()
    assert parse_invoice(invoice.source, text, "USD") == invoice
