"""Pages close, publish and reopen a month, book credits and list every act, as the API would, for who may."""

from __future__ import annotations

import asyncio
import csv
import io
import re
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from html import unescape
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.periods import local_date
from accountant.core.settings import InvoiceIssuer
from accountant.storage.duckdb_engine import Cursor
from gputally.base.clock import VirtualClock
from gputally.server.tokens_and_grants import new_token
from tests.http.conftest import HERE, MINUTE_MS, NOW_MS, bearer, client_of, encoded, settings_in
from tests.http.page_parser import plain, read, rows_after, tables
from tests.plugin_cases import registered
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

PAGE = {"Accept": "text/html"}
DAY_MS = 86_400_000
TEAMS = ("vision", "language")
pytestmark = pytest.mark.usefixtures("logs")


@pytest.fixture
def site(tmp_path, logs) -> Iterator[tuple[TestClient, dict[str, dict[str, str]]]]:
    """Two teams' hour of November, in mid-December, and a header for an admin, a reader and a lead."""
    clock = VirtualClock(NOW_MS)
    made = {
        "admin": new_token("ada", ("admin",)),
        "reader": new_token("rob", ("read",)),
        "lead": new_token("lea", ("read",), teams=("vision",)),
        "agent": new_token("agent", ("ingest",), cluster="prod", node="node-1"),
    }
    settings = settings_in(
        tmp_path, prices=price_book_text(H100="2.00"), issuer=InvoiceIssuer(payment_days=30),
        tokens="tokens:\n" + "".join(entry for _, entry in made.values()),
        inventory="schema: 1\ncluster: prod\nnamespaces:\n"
        + "".join(f"  - {{name: ns-{team}, team: {team}}}\n" for team in TEAMS),
    )  # fmt: skip
    with Service(settings, clock) as service:
        client = client_of(service, headers=PAGE, follow_redirects=False)
        begin = NOW_MS - 60 * MINUTE_MS
        rows, facts = [], []
        for team in TEAMS:
            told = {"namespace": f"ns-{team}", "node": "node-1", "uid": team, "workload": f"Job/{team}"}
            facts.append(pod_facts(team, begin, **told, created_ms=begin, scheduled_ms=begin, started_ms=begin))
            holder = pod_holder(team, f"ns-{team}", team, "main")
            rows += [
                interval(at, f"GPU-{team}", holder, span_ms=MINUTE_MS, busy_us=MINUTE_MS * 500)
                for at in range(begin, NOW_MS, MINUTE_MS)
            ]
        headers = {role: bearer(token) for role, (token, _) in made.items()}
        sent = client.post(
            "/v1/usage", content=encoded(batch(rows, facts, cluster="prod", node="node-1")), headers=headers["agent"]
        )
        assert sent.status_code == 200, sent.text
        clock.advance(45 * DAY_MS)
        yield client, headers


def objected(client: TestClient, who: dict[str, str]) -> dict[str, str]:
    """The fields of the form that acknowledge every objection."""
    found = client.get("/v1/periods/2026-11", headers=who).json()["objections"]
    return {one["kind"]: "true" for one in found}


def table(client: TestClient, path: str, who: dict[str, str]) -> list[dict[str, str]]:
    answer = client.get(path, headers=who)
    assert answer.status_code == 200, answer.text
    return list(csv.DictReader(io.StringIO(answer.text)))


def test_a_month_is_closed_and_published_from_its_page_and_each_step_leads_to_its_act(site) -> None:
    client, who = site
    objections = objected(client, who["admin"])
    assert objections
    read(client.get("/invoices/2026-11", headers=who["admin"]).text)
    refused = client.post("/invoices/2026-11", data={"step": "close"}, headers=who["admin"])
    assert refused.status_code == 409
    for form, status in (
        ({"step": "close", "reason": "over", **objections}, "closed"),
        ({"step": "reopen", "reason": "too early"}, "due"),
        ({"step": "close", "reason": "over", **objections}, "closed"),
        ({"step": "publish"}, "published"),
    ):
        done = client.post("/invoices/2026-11", data=form, headers=who["admin"])
        assert done.status_code == 303, done.text
        act = client.get(done.headers["location"], headers=who["admin"])
        assert act.status_code == 200
        assert "ada" in read(act.text).texts
        assert client.get("/v1/periods/2026-11", headers=who["reader"]).json()["status"] == status
        read(client.get("/invoices/2026-11", headers=who["admin"]).text)
    assert client.post("/invoices/2026-11", data={"step": "shred"}, headers=who["admin"]).status_code == 422


def test_a_step_does_not_read_the_ledger_on_the_event_loop(site, monkeypatch) -> None:
    client, who = site
    objections = objected(client, who["admin"])
    on_loop: list[bool] = []
    run = Cursor.run

    def watched(*given: Any, **named: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            on_loop.append(False)
        else:
            on_loop.append(True)
        return run(*given, **named)

    monkeypatch.setattr(Cursor, "run", watched)
    form = {"step": "close", "reason": "over", **objections}
    assert client.post("/invoices/2026-11", data=form, headers=who["admin"]).status_code == 303
    assert on_loop
    assert not any(on_loop)


def test_only_an_admin_acts_and_a_lead_sees_the_invoices_of_own_teams_alone(site) -> None:
    client, who = site
    for role in ("reader", "lead"):
        assert client.post("/invoices/2026-11", data={"step": "close"}, headers=who[role]).status_code == 403
        assert client.get("/audit", headers=who[role]).status_code == 403
        assert client.get("/audit.csv", headers=who[role]).status_code == 403
    assert client.get("/invoices/2026-11", headers=who["lead"]).status_code == 403
    assert 'method="post"' not in client.get("/invoices/2026-11", headers=who["reader"]).text
    every = table(client, "/invoices.csv", who["reader"])
    own = table(client, "/invoices.csv", who["lead"])
    assert {row["team"] for row in every} >= set(TEAMS)
    assert own == [row for row in every if row["team"] == "vision"]
    assert own == table(client, "/invoices.csv?team=vision", who["reader"])
    assert client.get("/invoices?team=language", headers=who["lead"]).status_code == 403
    assert "INV-2026-11-language" not in client.get("/invoices", headers=who["lead"]).text


def test_invoices_have_the_amounts_of_the_statements(site) -> None:
    client, who = site
    rows = [row for row in table(client, "/invoices.csv", who["admin"]) if row["month"] == "2026-11"]
    due = client.get("/v1/statement?month=2026-11", headers=who["admin"]).json()["due"]
    assert "__idle__" not in due
    assert {row["team"]: Decimal(row["amount"]) for row in rows} == {team: Decimal(one) for team, one in due.items()}
    page = client.get("/invoices", headers=who["admin"]).text
    read(page)
    for row in rows:
        assert row["number"] in page


def test_a_file_is_the_author_of_a_price_book_by_its_name_without_its_folder(site, tmp_path) -> None:
    client, who = site
    act = client.get("/v1/audit", headers=who["admin"]).json()["acts"][-1]
    assert (act["kind"], act["who"]) == ("prices", "file prices.yaml")
    for path in ("/prices", "/audit", f"/act/{act['number']}", "/invoices/2026-11"):
        text = client.get(path, headers=who["admin"]).text
        assert str(tmp_path) not in text
    assert "from file prices.yaml" in client.get("/prices", headers=who["admin"]).text


def test_a_month_lists_the_files_of_its_invoices_open_or_closed_and_a_closed_one_is_linked_by_its_teams(site) -> None:
    client, who = site
    of_team = lambda: client.get("/team/vision?month=2026-11", headers=who["lead"]).text  # noqa: E731
    assert "INV-2026-11-vision" not in of_team()
    for _ in range(2):
        page = client.get("/invoices/2026-11", headers=who["admin"]).text
        read(page)
        links = {unescape(one) for one in re.findall(r'href="(/v1/report[^"]+)"', page)}
        assert len(links) % (len(TEAMS) + 1) == 0
        for team in TEAMS:
            assert f"INV-2026-11-{team}" in page
            for link in [one for one in links if f"team={team}" in one][:2]:
                assert client.get(link, headers=who["admin"]).status_code == 200
        form = {"step": "close", "reason": "over", **objected(client, who["admin"])}
        client.post("/invoices/2026-11", data=form, headers=who["admin"])
    (address,) = re.findall(r'href="(/invoices[?][^"]+)"', of_team())
    path, _, anchor = unescape(address).partition("#")
    assert f'id="{anchor}"' in client.get(path, headers=who["lead"]).text


def test_what_no_team_is_billed_for_has_no_invoice_and_is_not_due(tmp_path, logs) -> None:
    """Of a month whose records begin with its 16th day: the page says so, and of a draft leads back to it."""
    clock = VirtualClock(NOW_MS)
    with Service(settings_in(tmp_path, prices=price_book_text(H100="2.00")), clock) as service:
        client = client_of(service, headers=PAGE, follow_redirects=False)
        begin = NOW_MS - 60 * MINUTE_MS
        facts = [pod_facts("a", begin, namespace="ns", node="node-1", uid="a", workload="Job/a", created_ms=begin,
                           scheduled_ms=begin, started_ms=begin)]  # fmt: skip
        holder = pod_holder("a", "ns", "a", "main")
        rows = [
            interval(at, gpu, one, span_ms=MINUTE_MS, busy_us=0 if one is None else MINUTE_MS * 500)
            for at in range(begin, NOW_MS, MINUTE_MS)
            for gpu, one in (("GPU-a", holder), ("GPU-b", None))
        ]
        sent = client.post("/v1/usage", content=encoded(batch(rows, facts, cluster="prod", node="node-1")))
        assert sent.status_code == 200, sent.text
        clock.advance(MINUTE_MS)
        stated = client.get("/v1/statement?month=2026-11").json()
        assert (Decimal(stated["not_billed"]), Decimal(stated["due_total"])) == (2, 2)
        assert [row["team"] for row in table(client, "/invoices.csv", {})] == [*stated["due"]]
        for path in ("/invoices", "/invoices/2026-11", "/month/2026-11"):
            page = client.get(path).text
            read(page)
            assert "records begin" in page
            assert "INV-2026-11-__idle__" not in page
        assert "USD 2.00 due" in unescape(client.get("/invoices/2026-11").text).replace("EUR", "USD")
        kept = client.post("/invoices/2026-11", data={"step": "draft", "reason": "sent"})
        assert kept.headers["location"].partition("#")[0] == "/invoices/2026-11"


@pytest.mark.parametrize(("address", "said"), [("127.0.0.1", "this machine"), ("10.1.2.3", "10.1.2.3")])
def test_an_act_says_who_did_it_as_far_as_known_where_nobody_signs_in(tmp_path, logs, address: str, said: str) -> None:
    with Service(settings_in(tmp_path, prices=price_book_text(H100="2.00")), VirtualClock(NOW_MS)) as service:
        client = TestClient(service.app, base_url=HERE, client=(address, 50_000), headers=PAGE, follow_redirects=False)
        kept = client.post("/invoices/2026-11", data={"step": "draft", "reason": "sent"})
        assert kept.status_code == 303, kept.text
        acts = client.get("/v1/audit").json()["acts"]
        assert acts[-1]["who"] == f"without sign-in, from {said}"
        assert all(act["who"] for act in acts)
        for path in ("/audit", "/audit.csv", "/invoices/2026-11", f"/act/{acts[-1]['number']}"):
            text = client.get(path).text
            told = "without sign-in" if path.endswith(".csv") else "nobody signed in (sign-in was off)"
            assert f"{told}, from {said}" in text
            assert "anonymous" not in text
        first = client.get("/prices").text + client.get("/act/1").text
        assert first.count("no reason given") == 2, "the price book of the file has none"


@pytest.mark.parametrize("part", [True, False])
def test_a_month_has_one_state_in_the_api_and_on_its_page(tmp_path, logs, part: bool) -> None:
    """The records begin inside the month, or with it; nothing says that it can be closed beside what objects."""
    begin, end = NOW_MS - 61 * DAY_MS, NOW_MS
    clock = VirtualClock(end)
    with Service(settings_in(tmp_path, prices=price_book_text(H100="2.00"), grace_days=1), clock) as service:
        client = client_of(service, headers=PAGE)
        starts = [*([] if part else [begin - 90 * DAY_MS]), begin]
        rows = [interval(start, "GPU-a", None, span_ms=MINUTE_MS, busy_us=0) for start in starts]
        deliver(service.ledger, end, batch(rows, cluster="prod", node="node-1"))
        month = [one["month"] for one in client.get("/v1/periods").json()][-3]
        one = client.get(f"/v1/periods/{month}").json()
        (listed,) = [each for each in client.get("/v1/periods").json() if each["month"] == month]
        assert one["objections"], "most of the month is not metered"
        page = unescape(client.get(f"/invoices/{month}").text)
        assert one["state"].lower() in page.lower()
        for said in (one["state"], listed["state"]):
            assert ("records begin" in said) == part
            assert "can be closed" not in said or "acknowledged" in said


def test_credits_and_prices_are_told_as_the_changes_of_an_open_month(site) -> None:
    client, who = site
    before = client.get("/v1/statement?month=2026-11", headers=who["admin"]).json()["due"]
    drafted = client.get("/invoices/2026-11?since=1h", headers=who["admin"])
    assert "/act/" not in drafted.text.partition("What changed since")[2].partition("</section>")[0]
    entered = client.post(
        "/v1/prices?month=2026-11&reason=new", content=price_book_text(H100="3.00"), headers=who["admin"]
    )
    assert entered.status_code == 200, entered.text
    form = {"step": "adjust", "team": "vision", "amount": "-1.50", "approved_by": "cfo", "reason": "node lost"}
    assert client.post("/invoices/2026-11", data=form, headers=who["admin"]).status_code == 303
    after = client.get("/v1/statement?month=2026-11", headers=who["admin"]).json()["due"]
    page = client.get("/invoices/2026-11?since=1h", headers=who["admin"]).text
    told = page.partition("What changed since")[2].partition("</section>")[0]
    sums: dict[str, Decimal] = {}
    for team, amount in re.findall(r'data-label="Team">([^<]*)</td>.*?data-label="Amount[^"]*">([^<]*)</td>', told):
        sums[team] = sums.get(team, Decimal(0)) + Decimal(amount.replace("+", "").replace("−", "-").replace(",", ""))
    expected = {team: Decimal(after[team]) - Decimal(before[team]) for team in TEAMS}
    assert {team: sums.get(team, 0) for team in TEAMS} == expected
    assert expected["language"] > 0
    rows = next(rows for caption, (_, rows) in tables(page).items() if caption.startswith("What changed the amounts"))
    assert {(row[0], *row[-3:-1]) for row in rows} == {
        ("prices", "new", "ada"), ("credit or charge", "node lost", "ada"),
    }  # fmt: skip


def test_a_month_says_before_it_is_closed_what_is_open_of_it(site) -> None:
    client, who = site
    asked = client.get("/v1/periods/2026-11", headers=who["reader"]).json()
    found = {one["item"]: one for one in asked["checklist"]}
    assert {item for item, one in found.items() if one["state"] == "objects"} == {"coverage"}
    assert {item for item, one in found.items() if one["state"] == "open"} == {"provider's invoice", "draft"}
    assert "checklist" in asked
    assert not client.get("/v1/periods/2026-11", headers=who["lead"]).json()["checklist"]
    page = client.get("/invoices/2026-11", headers=who["admin"]).text
    _, rows = tables(page)["What closing 2026-11 asks"]
    told = {plain(row[0]): plain(row[-1]) for row in rows}
    assert told.keys() == found.keys()
    assert all(told[item].endswith(one["text"]) for item, one in found.items())
    for one in found.values():
        assert client.get(one["link"], headers=who["admin"], follow_redirects=True).status_code == 200, one
    assert client.post(
        "/invoices/2026-11", data={"step": "close", "reason": "over", **objected(client, who["admin"])},
        headers=who["admin"],
    ).status_code == 303  # fmt: skip
    assert not client.get("/v1/periods/2026-11", headers=who["reader"]).json()["checklist"]


def test_the_act_of_a_price_book_says_line_by_line_what_it_changed(site) -> None:
    client, who = site
    entered = client.post(
        "/v1/prices?month=2026-11&reason=new", content=price_book_text(H100="3.00"), headers=who["admin"]
    )
    assert entered.status_code == 200, entered.text
    newest, first = table(client, "/audit.csv?kind=prices", who["admin"])
    told = unescape(client.get(f"/act/{newest['number']}", headers=who["admin"]).text).partition('class="diff"')[2]
    lines = re.findall(r'<span class="(plus|minus)">(.*)', told)
    assert [(kind, line[1:].split()) for kind, line in lines if "price:" in line] == [
        ("minus", ["price:", "'2.0'"]), ("plus", ["price:", "'3.0'"]),
    ]  # fmt: skip
    whole = client.get(f"/act/{first['number']}", headers=who["admin"]).text
    assert "minus" not in whole.partition('class="diff"')[2].partition("</pre>")[0]
    assert f"/act/{newest['number']}" in client.get("/prices", headers=who["reader"]).text
    assert "/act/" not in client.get("/prices", headers=who["lead"]).text


def test_an_invoice_has_the_date_of_issue_once_its_month_is_closed_and_the_date_of_payment(site) -> None:
    """The month is closed on 13 January, or later by the clock of the test; 30 days are given."""
    client, who = site
    address, shown = "/v1/report?month=2026-11&team=vision&format=html", registered("exports.html")
    if shown:
        draft = client.get(address, headers=who["lead"]).text
        assert "Invoice INV" in draft
        assert "Date of issue" not in draft
    form = {"step": "close", "reason": "over", **objected(client, who["admin"])}
    assert client.post("/invoices/2026-11", data=form, headers=who["admin"]).status_code == 303
    closed = client.get("/v1/periods/2026-11", headers=who["admin"]).json()["closed_ms"]
    issued = local_date(closed, ZoneInfo("UTC"))
    if shown:
        texts = read(client.get(address, headers=who["lead"]).text).texts
        for name, day in (("Date of issue", issued), ("To be paid by", issued + timedelta(days=30))):
            assert f"{day:%-d %B %Y}" == texts[texts.index(name) + 1]
        assert "Forecast" not in texts
    listed = {row["month"]: row["issued"] for row in table(client, "/invoices.csv", who["lead"])}
    assert listed["2026-11"] == f"{issued}"
    assert f"To be paid by {issued + timedelta(days=30):%-d %B %Y}".lower() in (
        client.get("/invoices", headers=who["lead"]).text.lower()
    )


CREDIT = {"team": "vision", "amount": "-1.50", "approved_by": "cfo", "reason": 'the "node" <b>lost</b> & more'}


def test_a_credit_is_shown_with_what_it_does_before_it_is_booked(site) -> None:
    """The hour of H100 costs vision 2.00."""
    client, who = site
    page = client.get("/invoices/2026-11", params=CREDIT, headers=who["admin"])
    assert page.status_code == 200, page.text
    row = rows_after(read(page.text), "What it would do", "vision")
    assert row[:6] == ["2026-11", "2.00", "−1.50", "0.50", "cfo", CREDIT["reason"]]
    assert client.get("/v1/adjustments", headers=who["admin"]).json() == []
    assert "What it would do" not in client.get("/invoices/2026-11", params=CREDIT, headers=who["reader"]).text
    for change, status in (
        ({"amount": "1.005"}, 409), ({"amount": "much"}, 422), ({"approved_by": "ada"}, 409), ({"reason": ""}, 422),
    ):  # fmt: skip
        answers = [
            client.get("/invoices/2026-11", params=CREDIT | change, headers=who["admin"]),
            client.post("/invoices/2026-11", data={"step": "adjust", **CREDIT, **change}, headers=who["admin"]),
        ]
        assert [answer.status_code for answer in answers] == [status, status], change
    unknown = client.get("/invoices/2026-11", params=CREDIT | {"team": "visoin"}, headers=who["admin"])
    assert unknown.status_code in (404, 409)


def test_the_form_books_what_was_shown(tmp_path, logs) -> None:
    inventory = "schema: 1\ncluster: prod\nnamespaces:\n  - {name: ns, team: vision}\n"
    settings = settings_in(tmp_path, prices=price_book_text(H100="2.00"), inventory=inventory, auth="off")
    with Service(settings, VirtualClock(NOW_MS)) as service:
        client = client_of(service, headers=PAGE, follow_redirects=False)
        first = client.get("/invoices/2026-11").text
        assert 'value="adjust"' not in first
        shown = client.get("/invoices/2026-11", params=CREDIT).text
        form = shown.partition('value="adjust"')[2].partition("</form>")[0]
        fields = {name: unescape(value) for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', form)}
        assert fields == CREDIT
        assert client.post("/invoices/2026-11", data={"step": "adjust", **fields}).status_code == 303
        (booked,) = client.get("/v1/adjustments").json()
        assert {name: booked[name] for name in CREDIT} == CREDIT
        again = client.get("/invoices/2026-11", params=CREDIT)
        assert again.status_code == 409, "it is booked already"


def test_prices_in_another_currency_have_no_difference(site) -> None:
    client, who = site
    book = price_book_text(H100="300").replace("EUR", "JPY")
    entered = client.post("/v1/prices?month=2026-11&reason=moved", content=book, headers=who["admin"])
    assert entered.status_code == 200, entered.text
    page = client.get("/invoices/2026-11?since=1h", headers=who["admin"]).text
    told = page.partition("What changed since")[2].partition("</section>")[0]
    assert "/act/" in told
    assert set(re.findall(r'data-label="Amount[^"]*">([^<]*)</td>', told)) == {"–"}


def test_acts_are_found_by_kind_person_subject_text_and_time(site) -> None:
    client, who = site
    form = {"step": "close", "reason": "the year ends", **objected(client, who["admin"])}
    assert client.post("/invoices/2026-11", data=form, headers=who["admin"]).status_code == 303
    every = table(client, "/audit.csv", who["admin"])
    assert [int(row["number"]) for row in every] == list(range(len(every), 0, -1))
    closing = [row for row in every if row["kind"] == "closed"]
    assert len(closing) == 1
    for query in ("kind=closed", "who=ada", "subject=2026-11", "search=YEAR+ends", "start=1h&kind=closed&end="):
        assert table(client, f"/audit.csv?{query}", who["admin"]) == closing, query
    assert table(client, "/audit.csv?end=1h&kind=closed", who["admin"]) == []
    at = closing[0]["at"]
    assert table(client, f"/audit.csv?start={at}&kind=closed", who["admin"]) == closing, "the first instant counts"
    assert table(client, f"/audit.csv?end={at}&kind=closed", who["admin"]) == [], "the last one does not"
    shown = client.get("/audit?kind=closed", headers=who["admin"])
    read(shown.text)
    assert f"/act/{closing[0]['number']}" in shown.text
    read(client.get("/audit?search=nothing+like+this", headers=who["admin"]).text)
    assert client.get("/audit?start=never", headers=who["admin"]).status_code == 422


def test_a_lead_learns_nothing_of_the_time_of_others_that_has_no_price(site) -> None:
    client, who = site
    begin = NOW_MS - 60 * MINUTE_MS
    holder = pod_holder("other", "ns-language", "other", "main")
    fact = pod_facts("other", begin, namespace="ns-language", node="node-1", uid="other", workload="Job/other")
    rows = [
        interval(at, "GPU-other", holder, span_ms=MINUTE_MS, busy_us=0, gpu_model="Unpriced 9000")
        for at in range(begin, NOW_MS, MINUTE_MS)
    ]
    sent = batch(rows, [fact], cluster="prod", node="node-1", epoch="0192-b")
    assert client.post("/v1/usage", content=encoded(sent), headers=who["agent"]).status_code == 200
    assert "GPU-hours have no price" in client.get("/invoices", headers=who["reader"]).text
    assert "GPU-hours have no price" in client.get("/invoices?team=language", headers=who["reader"]).text
    assert "GPU-hours have no price" not in client.get("/invoices?team=vision", headers=who["reader"]).text
    assert "have no price" not in client.get("/invoices", headers=who["lead"]).text


def test_a_team_whose_time_has_no_price_held_gpus_and_its_amount_is_unknown(site) -> None:
    client, who = site
    client.post("/v1/prices?month=2026-11&reason=new", content=price_book_text(A100="3.00"), headers=who["admin"])
    page = client.get("/invoices?team=vision", headers=who["reader"]).text
    assert "GPU-hours have no price" in page
    assert "The team held no GPU in 2026-11" not in page


@pytest.mark.parametrize(
    "path",
    ["/invoices/0001-01", "/invoices/9999-12", "/invoices/2026-11?since=9999-12-31",
     "/group?by=user&value=a&month=0001-01", "/group?by=job&value=%ff%00",
     "/audit?start=99999999999999999999&search=%00"],
)  # fmt: skip
def test_no_edge_of_an_address_breaks_a_page(site, path) -> None:
    client, who = site
    assert client.get(path, headers=who["admin"]).status_code in (200, 404, 422), path


def test_what_changed_since_a_draft_has_the_amounts_of_the_draft_and_of_now(site) -> None:
    client, who = site

    def due() -> dict[str, Decimal]:
        stated = client.get("/v1/statement?month=2026-11", headers=who["admin"]).json()["due"]
        return {team: Decimal(stated[team]) for team in TEAMS}

    before = due()
    assert client.post("/v1/periods/2026-11/drafts", headers=who["admin"], json={}).status_code == 200
    client.post("/v1/prices?month=2026-11&reason=new", content=price_book_text(H100="3.00"), headers=who["admin"])
    form = {"step": "adjust", "team": "vision", "amount": "-1.50", "approved_by": "cfo", "reason": "node lost"}
    assert client.post("/invoices/2026-11", data=form, headers=who["admin"]).status_code == 303
    after = due()
    for name, teams in (("admin", TEAMS), ("lead", ("vision",))):
        found = client.get("/v1/periods/2026-11/changes", headers=who[name]).json()
        amounts = {one["team"]: (Decimal(one["draft"]), Decimal(one["now"])) for one in found["teams"]}
        assert {team: amounts.get(team) for team in TEAMS} == {
            team: (before[team], after[team]) if team in teams else None for team in TEAMS
        }
    told = client.get("/invoices/2026-11", headers=who["admin"]).text.partition('id="changed"')[2]
    read = dict(
        re.findall(
            r'scope="row">([^<]*)</th><td data-label="In the draft[^"]*">([^<]*)</td>', told.partition("</section>")[0]
        )
    )
    now = dict(re.findall(r'scope="row">([^<]*)</th>[^/]*/td><td[^/]*/td><td data-label="Now[^"]*">([^<]*)</td>', told))
    for name, then, later in (
        *((team, before[team], after[team]) for team in TEAMS),
        ("Together", sum(before.values()), sum(after.values())),
    ):
        assert (Decimal(read[name]), Decimal(now[name])) == (then, later)
