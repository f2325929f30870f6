"""Every figure of a month's pages links to lines that add up to it; an invoice adds up beside the ledger's cost."""

from __future__ import annotations

import csv
import io
import json
import re
from decimal import Decimal
from html import unescape
from typing import get_args
from urllib.parse import unquote

import pytest

from accountant.composition import Service
from accountant.ledger.journal import ActKind
from accountant.web.statement_detail_pages import WHAT
from gputally.base import number_format
from gputally.base.clock import VirtualClock
from tests.http.conftest import (
    MINUTE_MS,
    NOW_MS,
    client_of,
    encoded,
    settings_in,
)
from tests.http.page_parser import EVIL, read
from tests.price_books import price_book_text
from tests.seams.site import book, hours_of, site
from tests.seams.small_month import at
from tests.usage_records import batch, interval, pod_facts, pod_holder

DAY_MS = 86_400_000
PAGE = {"Accept": "text/html"}
TEAMS = {"vision": 3, "language": 4, EVIL: 5}
"""Pods of each team."""


@pytest.fixture(scope="module")
def billed(tmp_path_factory):
    """Twelve GPUs, each held by a pod of its own for a different number of minutes. The month is closed, and a late
    node and a credit are booked in the next."""
    clock = VirtualClock(NOW_MS)
    settings = settings_in(
        tmp_path_factory.mktemp("lines"), correct_seconds=3600,
        prices=price_book_text(H100="2.47", source="framework contract"),
        inventory="schema: 1\ncluster: prod\nnamespaces:\n"
        + "".join(f"  - {{name: ns-{n}, team: {json.dumps(team)}}}\n" for n, team in enumerate(TEAMS)),
    )  # fmt: skip
    with Service(settings, clock) as service:
        client = client_of(service, headers=PAGE)

        def report(node: str) -> None:
            rows, facts = [], []
            begin = NOW_MS - 50 * MINUTE_MS
            times = {"created_ms": begin, "scheduled_ms": begin, "started_ms": begin}
            for n, (team, pods) in enumerate(TEAMS.items()):
                for pod in range(pods):
                    name = f"{EVIL if team == EVIL else 'train'}-{pod}"
                    uid, space = f"{node}-{n}-{pod}", f"ns-{n}"
                    told = {"namespace": space, "node": node, "uid": uid, "workload": f"Job/{name}"}
                    facts.append(pod_facts(name, begin, **told, **times))
                    holder = pod_holder(name, space, uid, "main")
                    rows += [
                        interval(at, f"GPU-{uid}", holder, span_ms=MINUTE_MS, busy_us=MINUTE_MS * 617)
                        for at in range(begin, begin + (7 + 3 * n + pod) * MINUTE_MS, MINUTE_MS)
                    ]
            found = batch(rows, facts, cluster="prod", node=node)
            assert client.post("/v1/usage", content=encoded(found)).status_code == 200

        report("node-1")
        clock.advance(45 * DAY_MS)
        standing = [one["kind"] for one in client.get("/v1/periods/2026-11").json()["objections"]]
        closed = client.post("/v1/periods/2026-11/close", json={"acknowledge": standing, "reason": "test"})
        assert closed.status_code == 200
        report("node-2")
        clock.advance(3_600_000)
        service.maintain()
        assert client.post("/v1/corrections").status_code == 200
        credit = {"month": "2026-11", "team": "vision", "amount": "-1.50", "reason": EVIL, "approved_by": "cfo"}
        assert client.post("/v1/adjustments", json=credit).status_code == 200
        yield client


def figures(client, path):
    """Return every (shown figure, address of its lines) of a page."""
    page = client.get(path)
    assert page.status_code == 200
    return [(text, unescape(to)) for to, text in re.findall(r'<a class="fig" href="([^"]+)">([^<]+)</a>', page.text)]


def number(text):
    return Decimal(text.replace(",", "").replace("\u2212", "-").replace("+", ""))


@pytest.fixture(scope="module")
def csv_of(billed):
    """Return the rows of a figure's CSV, and the figure. Each is requested once."""
    known = {}

    def get(to):
        if to not in known:
            *rows, whole = csv.DictReader(io.StringIO(billed.get(to.replace("/lines", "/lines.csv")).text))
            known[to] = rows, whole
        return known[to]

    return get


@pytest.mark.parametrize("path", ["/month/2026-11", "/team/vision?month=2026-11", "/month/2026-12"])
def test_every_figure_leads_to_lines_that_add_up_to_it(billed, csv_of, path):
    linked = [(text, to) for text, to in figures(billed, path) if "/lines" in to]
    assert len(linked) > 4
    for text, to in linked:
        rows, whole = csv_of(to)
        assert whole["account"] == "total"
        for column in ("gpu_hours", "cost", "payable"):
            assert sum(number(row[column] or "0") for row in rows) == number(whole[column] or "0"), (to, column)
        hours, amount = number(whole["gpu_hours"]), number(whole["payable"] or "0")
        assert unescape(text) in {number_format.number(hours, 1), number_format.number(hours, 0), f"{amount:,.2f}"}, to
    for _, to in linked[:3]:
        page = " ".join(read(billed.get(to).text).texts)
        assert csv_of(to)[1]["payable"] in page.replace(",", "")


@pytest.mark.parametrize("by", ["team", "queue", "job", "pod", "user", "node", "gpu", "day"])
def test_a_cut_shows_everything_once(billed, by):
    answer = billed.get(f"/month/2026-11/lines?account=allocated&by={by}")
    assert answer.status_code == 200
    reader = read(answer.text)
    assert "script" not in reader.tags
    *rows, whole = csv.DictReader(io.StringIO(billed.get(f"/month/2026-11/lines.csv?account=allocated&by={by}").text))
    assert sum(number(row["payable"]) for row in rows) == number(whole["payable"])
    assert {row["price_source"] for row in rows} == {"framework contract"}
    assert "framework contract" in answer.text
    late = [row for row in rows if row["detail"] == "late"]
    assert late, "node-2's hours of November came after its close"


IDENTITY = {
    "team": ("team",), "queue": ("queue",), "job": ("cluster", "namespace", "job"),
    "pod": ("cluster", "namespace", "pod", "job"), "user": ("user",), "node": ("cluster", "node"),
    "gpu": ("cluster", "gpu"), "day": ("day",),
}  # fmt: skip


@pytest.mark.parametrize("by", IDENTITY)
@pytest.mark.parametrize("query", ["", "&account=allocated", "&team=vision"])
def test_what_a_cut_counts_are_the_things_themselves_whoever_pays(billed, by, query):
    """Three teams hold GPUs of one node on one day: that is one node and one day."""
    rows = list(csv.DictReader(io.StringIO(billed.get(f"/month/2026-11/lines.csv?by={by}{query}").text)))[:-1]
    of_things = [tuple(row[name] for name in IDENTITY[by]) for row in rows if row[by] and row["detail"] != "late"]
    page = billed.get(f"/month/2026-11/lines?by={by}{query}").text
    shown = page.partition("<tbody>")[2].partition("</tbody>")[0]
    heads = re.findall(r'<th class="t wrap" scope="row">(.*?)</th>', shown, re.DOTALL)
    assert len(heads) == len(set(heads)), "each thing has one row"
    (counted,) = re.findall(r"of the statement, ([\d,]+) ", page)
    assert int(counted) == len(set(of_things))


def test_items_lead_to_their_own_pages(billed):
    text = billed.get("/month/2026-12/lines?by=job").text + billed.get("/month/2026-11/lines?by=node&account=busy").text
    links = {unquote(to) for to in re.findall(r'href="(/(?:job|node)/[^"]+)"', text)}
    assert "/node/prod/node-1" in links
    for link in links:
        assert billed.get(link).status_code == 200


def test_a_correction_and_a_credit_lead_to_their_acts_and_their_month(billed):
    acts = {to for _, to in figures(billed, "/month/2026-12") if to.startswith("/act/")}
    assert len(acts) == 2, "one act of corrections, one credit"
    said = ""
    for act in acts:
        page = read(billed.get(act).text)
        assert ("a", "href", "/month/2026-11") in page.attributes
        said += " ".join(page.texts)
    assert "A proposal was booked" in said
    assert "A credit or charge was booked" in said
    assert EVIL in said
    assert billed.get("/act/999").status_code == 404
    assert billed.get("/act/0").status_code == 404


def test_every_kind_of_act_has_its_words():
    assert set(WHAT) == set(get_args(ActKind))


@pytest.mark.parametrize("query", ["account=rent", "by=colour", "month=1", "team=" + "x" * 300])
def test_what_is_no_choice_is_refused(billed, query):
    assert billed.get(f"/month/2026-11/lines?{query}").status_code == 422


def test_a_month_to_come_has_no_lines(billed):
    assert billed.get("/month/2027-03/lines").status_code == 422


@pytest.mark.parametrize("account", ["unmetered", "down", "busy", "unallocated"])
def test_the_amount_of_a_figure_has_its_currency(billed, account):
    page = billed.get(f"/month/2026-11/lines?account={account}").text
    value = re.search(r'<h2>The figure</h2><p class="value">(.*?)</p>', page)[1]
    assert re.sub("<[^>]*>", "", value).startswith(("USD ", "EUR ", "\u2013", "unpriced")), value


def test_the_things_that_the_page_does_not_show_are_one_row_of_their_own_time_and_amount(tmp_path):
    """204 GPUs for an hour at 2.47, of which the page shows 200."""
    with site(tmp_path, VirtualClock(at(1)), prices=book("id: h, model: H100, price: 2.47")) as found:
        for node in "abcd":
            gpus = [f"GPU-{node}{number:02}" for number in range(51)]
            found.send([row for gpu in gpus for row in hours_of(gpu, at(0), 1, "vision/train", 1)], node=node)
        page = found.client.get("/month/2026-10/lines?by=gpu", headers=PAGE).text
    ((more, cells),) = re.findall(r"<tr><th[^>]*>(\d+) more(.*?)</tr>", page, re.DOTALL)
    hours, _, amount = (re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", cells, re.DOTALL))
    assert (more, number(hours), amount) == ("4", 4, "9.88")
