"""Closing, correcting, crediting and repricing over HTTP and by command, on a real ledger."""

from __future__ import annotations

import json
import re
from decimal import Decimal

import pytest

from accountant.composition import Service
from accountant.ledger.protocols import Retirement
from tests.http.conftest import NOW_MS, client_of, pod_minutes, settings_in
from tests.price_books import price_book_text
from tests.usage_records import running_accountant

DAY_MS = 86_400_000
PRICES = price_book_text(H100="2.4")
POLICY = "schema: 1\nqueues: [{name: vision, team: vision}]\n"


@pytest.fixture
def place(tmp_path, clock):
    """A running accountant in December, with an hour of one GPU in November."""
    settings = settings_in(tmp_path, prices=PRICES, policy=POLICY, correct_seconds=3600)
    with running_accountant(settings, clock, pod_minutes(rows=60)) as (service, url):
        clock.advance(40 * DAY_MS)
        service.ledger.retire(Retirement(node="node-1"), NOW_MS, clock.wall_ms(), "ada", "sold")
        yield service, url, tmp_path


@pytest.fixture
def asked(run_command, place):
    return run_command.at(place[1])


@pytest.fixture
def read(place):
    """Return the text at an address."""
    return lambda path: client_of(place[0]).get(path).text


@pytest.fixture
def stated(read):
    """Return the text of a month's statement."""
    return lambda month: read(f"/v1/statement?month={month}")


def test_a_month_closes_and_stays(place, asked, stated, read, clock):
    service = place[0]
    out = asked.shown("months")
    assert re.findall(r"(2026-1\d)\s+(\w+)", out) == [("2026-11", "due"), ("2026-12", "open")]
    out = asked.shown("close", "2026-11")
    assert re.search(r"2026-11\s+closed\s+without sign-in, from this machine\s+[0-9a-f]{16}", out)
    before = stated("2026-11")
    assert json.loads(before)["status"] == "closed"
    # A node whose agent was cut off: its hour of November arrives in December.
    service.ingest.submit_batch(pod_minutes(rows=60, node="node-2")).result()
    again = stated("2026-11")
    assert again == before
    clock.advance(3_600_000)
    service.maintain()
    assert json.loads(stated("2026-12"))["corrections"] == [], "nothing is booked by itself"
    assert service.books.waiting, "the look of the hour found it"
    assert "gputally_proposals_waiting 1.0" in read("/metrics")
    assert "late for 1 closed month: waits for an admin" in read("/")
    out = asked.shown("proposals")
    (waiting,) = re.findall(r"2026-11\s+2026-12\s+([0-9a-f]{16})\s+__unassigned__\s+\+1\.0\S*\s+\+2\.40 EUR", out)
    assert f"proposals take 2026-11 {waiting}" in read("/proposals")
    assert "more records have arrived for 2026-11" in asked.refused("proposals", "take", "2026-11", "0" * 16)
    out = asked.shown("proposals", "take", "2026-11", waiting, "--reason", "an agent was cut off")
    assert service.books.waiting == ()
    out = asked.shown("corrections", "2026-12")
    assert re.search(
        r"2026-11\s+2026-12\s+__unassigned__\s+NVIDIA H100 80GB HBM3\s+busy\s+late facts\s+\+0\.5\s+\+1\.20", out
    )
    out = stated("2026-12")
    december = json.loads(out)
    assert {c["month"] for c in december["corrections"]} == {"2026-11"}
    assert december["due"]["__unassigned__"] == "2.40"
    assert asked.refused("close", "2026-11").endswith("409 The bookkeeping refuses this: 2026-11 is closed already\n")
    assert "published" in asked.shown("publish", "2026-11")
    assert "2026-11 is published" in asked.refused("reopen", "2026-11", "--reason", "again")
    assert stated("2026-11") == before
    assert re.search(r"closed months\s+1, hash chain is whole", asked.shown("check"))


def test_closing_is_refused_and_acknowledged(place, asked, clock):
    service, _, folder = place
    (folder / "prices.yaml").write_text(PRICES.replace("model: H100", "model: L4"))
    clock.advance(60_000)
    service.maintain()
    assert "1.000 billed GPU-hours have no price (acknowledge unpriced with a reason)" in asked.refused(
        "close", "2026-11"
    )
    assert "an acknowledgement needs a reason" in asked.refused("close", "2026-11", "--acknowledge", "unpriced")
    assert asked("close", "2026-11", "--acknowledge", "unpriced", "--reason", "a test node")[0] == 0
    assert asked("reopen", "2026-11", "--reason", "it has a price after all")[0] == 0
    assert re.search(r"2026-11\s+due", asked.shown("months"))


def test_a_credit(place, asked, stated):
    command = (
        "adjust",
        "2026-11",
        "--team",
        "vision",
        "--amount=-1.50",
        "--reason",
        "node 1 failed",
        "--approved-by",
        "cfo",
    )
    before = json.loads(stated("2026-11"))["due"].get("vision", "0.00")
    shown = json.loads(asked.shown(*command, "--output", "json"))
    assert (Decimal(shown["before"]), shown["amount"]) == (Decimal(before), "-1.50")
    assert Decimal(shown["after"]) == Decimal(before) - Decimal("1.50")
    assert re.search(r"vision\s+node 1 failed\s+cfo\s+\S+\s+-1\.50\s+\S+", asked.shown(*command))
    assert json.loads(stated("2026-11"))["adjustments"] == [], "nothing is booked without --yes"
    out = asked.shown(*command, "--yes")
    assert re.search(
        r"2026-11\s+2026-11\s+vision\s+node 1 failed\s+without sign-in, from this machine\s+cfo\s+-1\.50 EUR", out
    )
    assert "-1.50 EUR" in asked("adjustments")[1]
    out = stated("2026-11")
    assert json.loads(out)["due"]["vision"] == "-1.50"
    asked.refused("adjust", "2026-11", "--team", "vision", "--amount=1.005", "--reason", "x", "--approved-by", "cfo")


def test_a_credit_to_a_team_that_does_not_exist_is_refused_with_the_nearest_name(asked, stated):
    refused = asked.refused(
        "adjust", "2026-11", "--team", "visoin", "--amount=-1.50", "--reason", "node 1 failed", "--approved-by", "cfo"
    )
    assert "did you mean 'vision'?" in refused
    assert json.loads(stated("2026-11"))["adjustments"] == []


def test_a_price_book_with_a_commitment_of_a_team_that_does_not_exist_is_refused(place, asked):
    new = place[2] / "new.yaml"
    row = (
        "{id: c, model: H100, price: 2, per: gpu-hour, valid_from: 2026-01-01, source: s, as_of: 2026-01-01, "
        "basis: gpu-only, commitment: c}"
    )
    for owner, code in (("visoin", 1), ("vision", 0)):
        owned = f"commitments: [{{id: c, gpus: 1, owner: {owner}}}]\nrows:\n  - {row}\n"
        new.write_text(f"schema: 1\ncurrency: EUR\n{owned}")
        found, _, err = asked("reprice", "2026-11", "--prices", new)
        assert (found, "did you mean 'vision'?" in err) == (code, code == 1), err


def test_a_failed_node_is_credited_once(place, asked, stated):
    """Half of its holder's bill: shown first, then booked, then refused a second time."""
    begin = NOW_MS - 3_600_000
    ask = ["credit", "node-1", "--start", begin, "--end", begin + 1_800_000, "--share", "0.5"]
    out = asked.shown(*ask)
    assert re.search(r"__unassigned__\s+0\.5\s+1\.20\s+-0\.60", out)
    assert json.loads(stated("2026-11"))["adjustments"] == []
    code, _, err = asked(*ask, "--apply", "--reason", "it hung")
    assert (code, "--approved-by" in err) == (2, True)
    out = asked.shown(*ask, "--apply", "--reason", "it hung", "--approved-by", "cfo")
    assert re.search(r"2026-11\s+2026-11\s+__unassigned__\s+it hung \(node node-1, .*-0\.60 EUR", out)
    (booked,) = json.loads(stated("2026-11"))["adjustments"]
    assert (booked["amount"], booked["approved_by"]) == ("-0.60", "cfo")
    later = ["credit", "node-1", "--start", begin + 900_000, "--end", begin + 3_600_000]
    for arguments, message in (
        (later, "part of this span was credited before: node node-1"),
        (["credit", "node-9", *later[2:]], "no node 'node-9' had a GPU in that span"),
        ([*ask[:3], begin, "--end", begin], "the span ends at or before its start"),
        ([*ask[:6], "--share", "0"], "a share of 0 gives no credit"),
        (["credit", "node-1", "--start", begin, "--end", begin + 40 * DAY_MS], "a credit is about one month"),
    ):
        assert message in asked.refused(*arguments)


def test_pricing_again_shows_first(place, asked):
    _, _, folder = place
    new = folder / "new.yaml"
    new.write_text(PRICES.replace("2.4", "3.0"))
    out = asked.shown("reprice", "2026-11", "--prices", new)
    assert re.search(r"total\s+2\.40\s+3\.00\s+\+0\.60", out)
    assert asked("prices")[1].count("EUR") == 1
    assert asked("reprice", "2026-11", "--prices", new, "--apply")[0] == 2
    asked("close", "2026-11")
    out = asked.shown("reprice", "2026-11", "--prices", new, "--apply", "--reason", "signed late")
    assert re.search(r"in force: [0-9a-f]{16}; 4 correction lines booked", out)
    assert "until the price file changes" in " ".join(out.split())
    assert re.search(r"total\s+\+0\.60", asked("corrections")[1])
    assert "signed late" in asked("prices")[1]
    broken = folder / "broken.yaml"
    broken.write_text(PRICES.replace("2.4", "-1"))
    assert "body:4: rows.0.price: the number must not be negative: -1" in asked.refused(
        "reprice", "2026-11", "--prices", broken
    )
    assert "No such file" in asked.refused("reprice", "2026-11", "--prices", folder / "none.yaml")


def test_a_price_book_tried_out_on_a_stopped_ledger_is_not_recorded(tmp_path, clock, run_command):
    (tmp_path / "prices.yaml").write_text(PRICES)
    with Service(settings_in(tmp_path), clock) as service:
        service.ingest.submit_batch(pod_minutes(rows=60)).result()
    db = ("--db", tmp_path / "data" / "ledger.duckdb")
    assert run_command("prices", *db)[0] == 0
    span = ("--start", "2026-11-01T11:00:00Z", "--end", "2026-11-01T12:00:00Z")
    assert "2.40" in run_command.shown("cost", *db, "--prices", tmp_path / "prices.yaml", *span)
    assert "EUR" not in run_command("prices", *db)[1]


def test_an_invoice_from_its_file(place, asked, stated):
    _, _, folder = place
    invoice, known = folder / "focus.csv", folder / "instances.yaml"
    invoice.write_text(
        "BilledCost,BillingCurrency,ChargePeriodStart,PricingCategory,SkuId\n"
        "3.00,EUR,2026-11-01T11:00:00Z,,p5\n0.50,EUR,2026-11-01T11:00:00Z,,support\n"
    )
    known.write_text("schema: 1\ninstances:\n  - {name: p5, model: H100}\n")
    files = ("--invoice", invoice, "--instances", known)
    out = asked.shown("reconcile", "2026-11", *files)
    assert re.search(r"p5\s+H100\s+3\.00\s+2\.40\s+0\.00\s+0\.00\s+0\.60\s+3\.000000", out)
    assert re.search(r"total\s+3\.50\s+2\.40\s+0\.00\s+0\.00\s+1\.10", out)
    assert asked("reconcile", "2026-11", *files, "--true-up")[0] == 2
    out = asked.shown("reconcile", "2026-11", *files, "--true-up", "--reason", "the bill")
    assert re.search(r"p5\s+H100\s+3\.00\s+3\.00\s+0\.00\s+0\.00\s+0\.00", out)
    assert json.loads(stated("2026-11"))["cost"] == "3.000000000000000000000"
    known.write_text("schema: 1\ninstances: []\n")
    assert "instances.yaml:2: instances" in asked.refused("reconcile", "2026-11", *files)
    assert asked("reconcile", "2026-13", *files)[0] == 2


def test_budgets_over_http(place):
    client = client_of(place[0])
    budget = {"name": "b", "team": "__unassigned__", "limit": 4}
    client.put("/v1/policy", json={"queues": [{"name": "q"}], "budgets": [budget]}).raise_for_status()
    (state,) = client.get("/v1/budgets").json()
    assert (state["name"], state["month"], state["unit"], state["spent"]) == ("b", "2026-12", "GPU-hours", None)
