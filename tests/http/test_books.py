"""Closing, correcting, crediting and re-pricing over HTTP and from the command line, on a real ledger."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest

from accountant.__main__ import main
from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.ledger.protocols import Retirement
from gputally.server.https_server import serve
from tests import fresh
from tests.price_books import price_book_text

DAY_MS = 86_400_000
PRICES = price_book_text(H100="2.4")


@pytest.fixture
def place(tmp_path, clock, kit):
    """A running accountant in December, with an hour of one GPU in November."""
    (tmp_path / "prices.yaml").write_text(PRICES)
    settings = Settings(
        data=fresh.data(tmp_path / "data"),
        auth="off",
        linger_ms=0,
        prices=tmp_path / "prices.yaml",
        correct_seconds=3600,
    )
    with Service(settings, clock) as service:
        service.ingest.submit_batch(kit.batch(rows=60)).result()
        clock.advance(40 * DAY_MS)
        service.ledger.retire(Retirement(node="node-1"), kit.now_ms, clock.wall_ms(), "ada", "sold")
        with serve(service.app, "127.0.0.1", 0) as url:
            yield service, url, tmp_path


@pytest.fixture
def asked(run_command, place, monkeypatch):
    monkeypatch.setenv("COLUMNS", "180")
    return lambda *arguments: run_command(*arguments, "--url", place[1])


@pytest.fixture
def stated(place):
    """The statement of a month, as its bytes."""
    _, url, _ = place

    def get(month):
        with urllib.request.urlopen(f"{url}/v1/statement?month={month}") as answer:
            return answer.read().decode()

    return get


def test_a_month_closes_and_stays(place, asked, stated, kit, clock):
    service = place[0]
    code, out, _ = asked("months")
    assert code == 0
    assert re.findall(r"(2026-1\d)\s+(\w+)", out) == [("2026-11", "due"), ("2026-12", "open")]
    code, out, _ = asked("close", "2026-11")
    assert code == 0
    assert re.search(r"2026-11\s+closed\s+\S+\s+[0-9a-f]{16}", out)
    before = stated("2026-11")
    assert json.loads(before)["status"] == "closed"
    # A node whose agent was cut off: its hour of November arrives in December.
    service.ingest.submit_batch(kit.batch(rows=60, node="node-2")).result()
    again = stated("2026-11")
    assert again == before
    clock.advance(3_600_000)
    service.maintain()
    assert json.loads(stated("2026-12"))["corrections"] == [], "nothing is booked by itself"
    assert service.books.waiting, "the look of the hour found it"
    with urllib.request.urlopen(f"{place[1]}/metrics") as answer:
        assert "gputally_proposals_waiting 1.0" in answer.read().decode()
    with urllib.request.urlopen(f"{place[1]}/proposals") as answer:
        page = answer.read().decode()
    with urllib.request.urlopen(f"{place[1]}/") as answer:
        assert "late for 1 closed month: waits for an admin" in answer.read().decode()
    code, out, _ = asked("proposals")
    assert code == 0
    (waiting,) = re.findall(r"2026-11\s+2026-12\s+([0-9a-f]{16})\s+__unassigned__\s+\+1\.0\S*\s+\+2\.40 EUR", out)
    assert f"proposals take 2026-11 {waiting}" in page
    code, _, err = asked("proposals", "take", "2026-11", "0" * 16)
    assert (code, "more records have arrived for 2026-11" in err) == (1, True)
    code, out, _ = asked("proposals", "take", "2026-11", waiting, "--reason", "an agent was cut off")
    assert code == 0
    assert service.books.waiting == ()
    code, out, _ = asked("corrections", "2026-12")
    assert code == 0
    assert re.search(
        r"2026-11\s+2026-12\s+__unassigned__\s+NVIDIA H100 80GB HBM3\s+busy\s+late facts\s+\+0\.5\s+\+1\.20", out
    )
    out = stated("2026-12")
    december = json.loads(out)
    assert {c["month"] for c in december["corrections"]} == {"2026-11"}
    assert december["due"]["__unassigned__"] == "2.40"
    code, out, err = asked("close", "2026-11")
    assert code == 1
    assert err.endswith("409 The bookkeeping refuses this: 2026-11 is closed already\n")
    code, out, _ = asked("publish", "2026-11")
    assert (code, "published" in out) == (0, True)
    code, out, err = asked("reopen", "2026-11", "--reason", "again")
    assert (code, "2026-11 is published" in err) == (1, True)
    assert stated("2026-11") == before
    code, out, _ = asked("check")
    assert (code, bool(re.search(r"closed months\s+1, chain holds", out))) == (0, True)


def test_closing_is_refused_and_acknowledged(place, asked, clock):
    service, _, folder = place
    (folder / "prices.yaml").write_text(PRICES.replace("model: H100", "model: L4"))
    clock.advance(60_000)
    service.maintain()
    code, _, err = asked("close", "2026-11")
    assert code == 1
    assert "1.000 billed GPU-hours have no price (acknowledge unpriced with a reason)" in err
    code, _, err = asked("close", "2026-11", "--acknowledge", "unpriced")
    assert (code, "an acknowledgement needs a reason" in err) == (1, True)
    assert asked("close", "2026-11", "--acknowledge", "unpriced", "--reason", "a test node")[0] == 0
    assert asked("reopen", "2026-11", "--reason", "it has a price after all")[0] == 0
    code, out, _ = asked("months")
    assert re.search(r"2026-11\s+due", out)


def test_a_credit(place, asked, stated):
    code, out, _ = asked(
        "adjust", "2026-11", "--team", "vision", "--amount=-1.50", "--reason", "node 1 failed", "--approved-by", "cfo"
    )
    assert code == 0
    assert re.search(r"2026-11\s+2026-11\s+vision\s+node 1 failed\s+\S+\s+cfo\s+-1\.50 EUR", out)
    assert "-1.50 EUR" in asked("adjustments")[1]
    out = stated("2026-11")
    assert json.loads(out)["due"]["vision"] == "-1.50"
    code, _, err = asked(
        "adjust", "2026-11", "--team", "vision", "--amount=1.005", "--reason", "x", "--approved-by", "cfo"
    )
    assert (code, err.count("\n")) == (1, 1)


def test_a_failed_node_is_credited_once(place, asked, stated, kit):
    """Half of what its holder was billed: shown, then booked, then not again."""
    begin = kit.now_ms - 3_600_000
    ask = ["credit", "node-1", "--start", begin, "--end", begin + 1_800_000, "--share", "0.5"]
    code, out, _ = asked(*ask)
    assert code == 0
    assert re.search(r"__unassigned__\s+0\.5\s+1\.20\s+-0\.60", out)
    assert json.loads(stated("2026-11"))["adjustments"] == []
    code, _, err = asked(*ask, "--book", "--reason", "it hung")
    assert (code, "--approved-by" in err) == (2, True)
    code, out, _ = asked(*ask, "--book", "--reason", "it hung", "--approved-by", "cfo")
    assert code == 0
    assert re.search(r"2026-11\s+2026-11\s+__unassigned__\s+it hung \(node node-1, .*-0\.60 EUR", out)
    (booked,) = json.loads(stated("2026-11"))["adjustments"]
    assert (booked["amount"], booked["approved_by"]) == ("-0.60", "cfo")
    later = ["credit", "node-1", "--start", begin + 900_000, "--end", begin + 3_600_000]
    for arguments, message in (
        (later, "credited already: node node-1"),
        (["credit", "node-9", *later[2:]], "no node 'node-9' had a GPU in that span"),
        ([*ask[:3], begin, "--end", begin], "the span ends at or before its start"),
        ([*ask[:6], "--share", "0"], "a share of 0 gives no credit"),
        (["credit", "node-1", "--start", begin, "--end", begin + 40 * DAY_MS], "a credit is about one month"),
    ):
        code, _, err = asked(*arguments)
        assert (code, message in err, err.count("\n")) == (1, True, 1), err


def test_pricing_again_shows_first(place, asked):
    _, _, folder = place
    new = folder / "new.yaml"
    new.write_text(PRICES.replace("2.4", "3.0"))
    code, out, _ = asked("reprice", "2026-11", "--book", new)
    assert code == 0
    assert re.search(r"total\s+2\.40\s+3\.00\s+\+0\.60", out)
    assert asked("prices")[1].count("EUR") == 1
    assert asked("reprice", "2026-11", "--book", new, "--apply")[0] == 2
    asked("close", "2026-11")
    code, out, _ = asked("reprice", "2026-11", "--book", new, "--apply", "--reason", "signed late")
    assert code == 0
    assert re.search(r"in force: [0-9a-f]{16}; 4 correction lines booked", out)
    assert "until the price book's file is changed" in " ".join(out.split())
    assert re.search(r"total\s+\+0\.60", asked("corrections")[1])
    assert "signed late" in asked("prices")[1]
    broken = folder / "broken.yaml"
    broken.write_text(PRICES.replace("2.4", "-1"))
    code, _, err = asked("reprice", "2026-11", "--book", broken)
    assert (code, err.count("\n")) == (1, 1)
    assert "body:4: rows.0.price: a price cannot be negative: -1" in err
    code, _, err = asked("reprice", "2026-11", "--book", folder / "none.yaml")
    assert (code, "No such file" in err) == (1, True)


def test_a_price_book_tried_out_on_a_stopped_ledger_is_not_recorded(tmp_path, clock, kit, capsys):
    (tmp_path / "prices.yaml").write_text(PRICES)
    with Service(Settings(data=fresh.data(tmp_path / "data"), auth="off", linger_ms=0), clock) as service:
        service.ingest.submit_batch(kit.batch(rows=60)).result()
    db = tmp_path / "data" / "ledger.duckdb"
    assert main(["prices", "--db", str(db)]) == 0
    span = ("--start", "2026-11-01T11:00:00Z", "--end", "2026-11-01T12:00:00Z")
    assert main(["cost", "--db", str(db), "--prices", str(tmp_path / "prices.yaml"), *span]) == 0
    assert "2.40" in capsys.readouterr().out
    main(["prices", "--db", str(db)])
    assert "EUR" not in capsys.readouterr().out


def test_an_invoice_from_its_file(place, asked, stated):
    _, _, folder = place
    invoice, known = folder / "focus.csv", folder / "instances.yaml"
    invoice.write_text(
        "BilledCost,BillingCurrency,ChargePeriodStart,PricingCategory,SkuId\n"
        "3.00,EUR,2026-11-01T11:00:00Z,,p5\n0.50,EUR,2026-11-01T11:00:00Z,,support\n"
    )
    known.write_text("schema: 1\ninstances:\n  - {name: p5, model: H100}\n")
    files = ("--invoice", invoice, "--instances", known)
    code, out, _ = asked("reconcile", "2026-11", *files)
    assert code == 0
    assert re.search(r"p5\s+H100\s+3\.00\s+2\.40\s+0\.00\s+0\.00\s+0\.60\s+3\.000000", out)
    assert re.search(r"total\s+3\.50\s+2\.40\s+0\.00\s+0\.00\s+1\.10", out)
    assert asked("reconcile", "2026-11", *files, "--true-up")[0] == 2
    code, out, _ = asked("reconcile", "2026-11", *files, "--true-up", "--reason", "the bill")
    assert code == 0
    assert re.search(r"p5\s+H100\s+3\.00\s+3\.00\s+0\.00\s+0\.00\s+0\.00", out)
    assert json.loads(stated("2026-11"))["cost"] == "3.000000000000000000000"
    known.write_text("schema: 1\ninstances: []\n")
    code, _, err = asked("reconcile", "2026-11", *files)
    assert (code, "instances.yaml:2: instances" in err) == (1, True)
    assert asked("reconcile", "2026-13", *files)[0] == 2


def test_budgets_over_http(place):
    url = place[1]
    policy = {
        "queues": [{"name": "q"}],
        "budgets": [{"name": "b", "team": "__unassigned__", "limit": 4}],
    }
    body = json.dumps(policy).encode()
    request = urllib.request.Request(f"{url}/v1/policy", body, {"Content-Type": "application/json"}, method="PUT")
    urllib.request.urlopen(request).close()
    with urllib.request.urlopen(f"{url}/v1/budgets") as answer:
        (state,) = json.load(answer)
    assert (state["name"], state["month"], state["unit"], state["spent"]) == ("b", "2026-12", "GPU-hours", "0")
