"""The provider's invoice beside the books: every line adds up, on the page and in the CSV, whatever is chosen."""

from __future__ import annotations

import csv
import io
import re
from decimal import Decimal

import pytest
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.ledger.protocols import Retirement
from gputally.base.clock import VirtualClock
from tests.http.conftest import MINUTE_MS, NOW_MS, batch, bearer, encoded, token_file
from tests.http.readers import EVIL, read
from tests.price_books import price_book_text

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
def house(tmp_path_factory):
    """An hour of an H100 at 2.40 held, in November; December."""
    folder = tmp_path_factory.mktemp("invoice")
    (folder / "prices.yaml").write_text(price_book_text(H100="2.40"))
    token_file(folder / "tokens.yaml")
    clock = VirtualClock(NOW_MS)
    files = {name: folder / f"{name}.yaml" for name in ("prices", "tokens")}
    with Service(Settings(data=folder / "data", auth="tokens", linger_ms=0, **files), clock) as service:
        headers = {"Accept": "text/html", **bearer("token-of-admin")}
        client = TestClient(service.app, base_url="http://127.0.0.1", headers=headers)
        assert client.post("/v1/usage", content=encoded(batch(rows=60))).status_code == 200
        clock.advance(35 * 24 * 60 * MINUTE_MS)
        service.ledger.retire(Retirement(node="node-1"), NOW_MS, clock.wall_ms(), "ada", "sold")
        yield client


def test_without_an_invoice_it_says_how_to_keep_one(house):
    assert house.get("/invoice", follow_redirects=False).headers["location"] == "/invoice/2026-11"
    answer = house.get("/invoice/2026-10")
    assert answer.status_code == 200
    assert "No invoice was kept" in answer.text
    assert house.get("/invoice/2026-10/lines.csv").status_code == 404
    assert house.get("/invoice/2027-10").status_code == 422
    assert house.get("/invoice/2026-11?show=x").status_code == 422


@pytest.fixture(scope="module")
def kept(house):
    """Asked without `keep` it is not kept, and kept twice it is kept once."""
    for query, acts in (("", 0), ("?keep=true&reason=november", 1), ("?keep=true", 1)):
        assert house.post(f"/v1/reconciliation/2026-11{query}", json=INVOICE).status_code == 200
        acted = [act for act in house.get("/v1/audit").json()["acts"] if act["kind"] == "invoiced"]
        assert len(acted) == acts
    return house


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
    answer = kept.get(f"/invoice/2026-11{query}")
    assert answer.status_code == 200
    read(answer.text)
    assert answer.text.count("<script") == 0


def test_the_page_says_what_the_invoice_pays_for(kept):
    said = " ".join(" ".join(read(kept.get("/invoice/2026-11").text).texts).split())
    for text in ("6.23", "2.40", EVIL, "in agreement", "no GPU of the cluster", "5.0000"):
        assert text in said
    (act,) = set(re.findall(r'href="(/act/\d+)"', kept.get("/invoice/2026-11").text))
    assert "An invoice was kept" in kept.get(act).text
    teams = kept.get("/month/2026-11/lines?payers=true")
    assert "2.40" in teams.text, "what the teams' part leads to"


def test_a_page_of_everybody_is_not_for_an_agent(kept):
    for path in ("/invoice", "/invoice/2026-11", "/invoice/2026-11/lines.csv"):
        assert kept.get(path, headers=bearer("token-of-ingest"), follow_redirects=False).status_code == 403


def test_an_invoice_in_another_currency_is_not_kept(kept):
    wrong = {"source": "x", "lines": [{"item": "y", "amount": "1", "currency": "USD"}]}
    assert kept.post("/v1/reconciliation/2026-11?keep=true", json=wrong).json()["type"].endswith("books-refuse")
