"""The page of one value of a dimension: its figures are those of the API with the same filter, for who may see them."""

from __future__ import annotations

import csv
import io
import re
from decimal import Decimal
from html import unescape
from urllib.parse import quote

import pytest

from accountant.ledger.usage import HELD
from accountant.reports.report_builder import CANDIDATES
from accountant.wire.policy_models import Budget, Policy, QueuePolicy
from gputally.base.units import MS_PER_DAY, US_PER_HOUR
from tests.http.conftest import INVENTORY, NOW_MS, bearer, client_of, encoded, token_entry, token_list
from tests.http.page_parser import EVIL, read
from tests.price_books import price_book_text
from tests.usage_records import QUARTER_MS, batch, interval, pod_facts, pod_holder

PAGE = {"Accept": "text/html"}
SAMPLE = (("train", "vision", "ada", 12), ("notebook", "vision", "eve", 8), ("chat", "nlp", "ada", 1))
"""Name, namespace (and team), user and GPUs of each pod. Each holds them for an hour, now and a month earlier."""


@pytest.fixture(scope="module")
def service(start_for_module):
    return filled(start_for_module)


def filled(start):
    tokens = token_list(token_entry("lead", "read", ", teams: [vision]"))
    service, client = start(
        prices=price_book_text(H100=2), inventory=INVENTORY, tokens=tokens, exported_labels=("project",)
    )
    begin = NOW_MS - 4 * QUARTER_MS
    facts, rows = [], []
    for name, team, user, gpus in SAMPLE:
        facts.append(
            pod_facts(name, begin, namespace=team, node="node-1", queue_ref=f"kai:{team}", workload=f"Job/{name}",
                      created_ms=begin - QUARTER_MS, scheduled_ms=begin, started_ms=begin,
                      labels={"gputally.dev/user": user, "project": "search"})
        )  # fmt: skip
        for back in (0, 31 * MS_PER_DAY):
            rows += [
                interval(begin - back + at * QUARTER_MS, f"GPU-{name}-{gpu}", pod_holder(name, team),
                         busy_us=0 if name == "notebook" else QUARTER_MS * 900)
                for gpu in range(gpus)
                for at in range(4)
            ]  # fmt: skip
    rows.sort(key=lambda row: row.start_ms)
    sent = encoded(batch(rows, facts, cluster="prod", node="node-1"))
    assert client.post("/v1/usage", content=sent, headers=bearer("token-of-admin")).status_code == 200
    queues = tuple(QueuePolicy(name=team, deserved=6, team=team, refs=(f"kai:{team}",)) for team in ("vision", "nlp"))
    budget = Budget(name="research", team="vision", limit=Decimal(100), currency="EUR")
    service.ledger.put_policy(Policy(queues=queues, budgets=(budget,)), NOW_MS - 40 * MS_PER_DAY)
    return service


def page(service, query: str, token: str = "token-of-read") -> str:
    answer = client_of(service).get(f"/group?{query}", headers=PAGE | bearer(token))
    assert answer.status_code == 200, answer.text
    return re.sub(r"<style.*?</style>", "", answer.text, flags=re.DOTALL)


def card(text: str, name: str) -> str:
    found = re.search(rf"<h2>{name}</h2><p class=\"value\">(?:<small>[A-Z]+</small> )?([^<]*)<", text)
    assert found is not None, name
    return found[1].strip()


@pytest.mark.parametrize(
    ("query", "held", "money"),
    [
        ("by=team&value=vision", "20.0", "40.00"),
        ("by=queue&value=vision", "20.0", "40.00"),
        ("by=user&value=ada", "13.0", "26.00"),
        ("by=label:project&value=search", "21.0", "42.00"),
        ("by=gpu_model&value=" + quote("NVIDIA H100 80GB HBM3"), "21.0", "42.00"),
        ("by=label:project&value=" + quote(EVIL), "0.0", "0.00"),
    ],
)
def test_a_page_has_the_figures_of_the_api(service, query, held, money):
    text = page(service, query)
    assert (card(text, "Held"), card(text, "Cost")) == (held, money)
    assert re.search(rf"{money}( GPU-h)? in October 2026 from 1 Oct: (–|[^ ]+ % a day)", text), "as records begin then"
    assert EVIL not in text
    charts = [value for tag, name, value in read(text).attributes if (tag, name) == ("svg", "aria-labelledby")]
    assert len({*charts} & {"explored-title explored-desc", "explored-held-title explored-held-desc"}) == 2


def test_a_team_has_its_budget_waits_jobs_and_what_it_could_save(service):
    text = page(service, "by=team&value=vision")
    assert "research" in text
    assert "15.0 min" in text, "its pods waited a quarter of an hour"
    jobs = text[text.index("<h2>Jobs</h2>") :]
    assert jobs.index("Job/train") < jobs.index("Job/notebook"), "the dearest job first"
    assert "Job/chat" not in text
    saved = text[text.index("<h2>What could be saved</h2>") :]
    assert "Job/notebook" in saved
    assert "Job/train" not in saved


def test_a_queue_is_compared_with_what_it_deserves(service):
    text = page(service, "by=queue&value=vision")
    assert "Use against what it deserves" in text
    assert re.search(r"Deserved: (72|144)\.0 GPU-h", text), "6 GPUs for half a day or a day"
    assert "Use against what it deserves" not in page(service, "by=user&value=ada")


def test_a_team_sees_its_own_time_only(service):
    text = page(service, "by=label:project&value=search", "lead")
    assert card(text, "Held") == "20.0"
    assert "Job/chat" not in text
    assert card(page(service, "by=user&value=ada", "lead"), "Held") == "12.0"
    assert "Use against" not in page(service, "by=queue&value=nlp", "lead")
    client = client_of(service)
    assert client.get("/group?by=team&value=nlp", headers=PAGE | bearer("lead")).status_code == 403
    assert client.get("/group?by=team&value=vision", headers=PAGE).status_code in (303, 401)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("by=day&value=2026-11-01", 422),
        ("by=colour&value=red", 422),
        ("by=label:other&value=x", 422),
        ("by=team", 422),
        ("by=team&value=nobody", 404),
        ("by=user&value=ada&month=2026-13", 422),
        ("by=user&value=ada&month=2031-01", 422),
        ("by=user&value=" + "x" * 1_025, 422),
    ],
)
def test_what_has_no_page_is_refused(service, query, status):
    answer = client_of(service).get(f"/group?{query}", headers=PAGE | bearer("token-of-read"))
    assert answer.status_code == status, answer.text


def test_a_month_without_records_is_unknown_and_not_zero(service):
    text = page(service, "by=user&value=ada&month=2026-01")
    assert card(text, "Held") == "–"
    assert "nothing is known of" in text


def test_other_pages_lead_to_it(service):
    client = client_of(service)
    client.headers.update(PAGE | bearer("token-of-read"))
    assert "/group?by=label:project&amp;value=search" in client.get("/explore?start=3h&by=label:project").text
    assert "/group?by=team&amp;value=vision" in client.get("/").text
    jobs = client.get("/jobs?start=1d").text
    assert "/group?by=user&amp;value=ada" in jobs
    (job,) = set(re.findall(r'href="(/job/[^"]*train[^"]*)"', jobs))
    assert "/group?by=queue&amp;value=vision" in client.get(job).text


def test_what_a_page_leads_to_has_its_figures(start_service):
    """The months before end, and a queue has what is below it."""
    service = filled(start_service)
    policy = Policy(
        queues=(
            QueuePolicy(name="whole", deserved=12),
            *(QueuePolicy(name=team, parent="whole", deserved=6, team=team, refs=(f"kai:{team}",))
              for team in ("vision", "nlp")),
        )
    )  # fmt: skip
    service.ledger.put_policy(policy, NOW_MS - 39 * MS_PER_DAY)
    client = client_of(service)
    client.headers.update(PAGE | bearer("token-of-read"))
    for query in ("by=team&value=vision&month=2026-10", "by=queue&value=whole", "by=queue&value=whole&month=2026-10"):
        text = page(service, query)
        explore, usage = (re.search(rf'href="({path}[^"]*)"', text) for path in ("/explore\\?", "/v1/usage"))
        assert explore is not None
        assert usage is not None
        lines = client.get(unescape(usage[1])).json()["lines"]
        held = sum(line["accounts_gpu_us"][name] for line in lines for name in HELD) / US_PER_HOUR
        assert card(text, "Held") == f"{held:.1f}", query
        table = client.get(unescape(explore[1]).replace("/explore", "/explore.csv")).text
        (total,) = (row for row in csv.DictReader(io.StringIO(table)) if row["record"] == "total")
        assert float(total["allocated_gpu_hours"]) == held, query


def test_a_team_learns_nothing_of_other_teams_and_what_all_held(service):
    client = client_of(service)
    client.headers.update(PAGE | bearer("lead"))
    answers = [client.get(f"/group?by=team&value={team}") for team in ("nlp", "nobody")]
    assert [answer.status_code for answer in answers] == [403, 403], "known or not"
    assert "of what all held" in page(service, "by=user&value=ada")
    assert "of what all held" not in page(service, "by=user&value=ada", "lead")


def test_a_month_that_is_too_large_to_add_up_is_refused_as_by_explore(start_service):
    _, client = start_service(limits={"question_gpu_hours": 10})
    rows = [interval(NOW_MS - QUARTER_MS * back, "GPU-1") for back in range(1, 200)]
    assert client.post("/v1/usage", content=encoded(batch(rows))).status_code == 200
    for path, parameter in (
        ("/explore?start=2d", "end"), ("/group?by=user&value=ada", "month"), ("/group?by=queue&value=vision", "month"),
    ):  # fmt: skip
        refused = client.get(path)
        assert refused.status_code == 422, path
        assert [one["at"] for one in refused.json()["errors"]] == [parameter], path
    assert client.get("/group?by=cluster&value=elsewhere", headers=PAGE).status_code == 200, "it has no GPU"


@pytest.mark.parametrize("team", ["", "&team=vision"])
def test_the_total_of_savings_says_of_how_many_jobs_it_is_and_leads_to_all_others(service, team):
    client = client_of(service, headers=PAGE | bearer("token-of-read"))
    told = client.get(f"/savings?month=2026-11{team}").text
    total = told.partition("<tfoot>")[2].partition("</tfoot>")[0]
    assert str(CANDIDATES) in total
    found = re.search(r'href="(/jobs[^"]*)"', total)
    assert found is not None
    listed = client.get(unescape(found[1]))
    assert listed.status_code == 200
    assert listed.text.index("Job/notebook") < listed.text.index("Job/train"), "the most idle first"
    assert ("Job/chat" in listed.text) == (not team)
    month = client.get("/team/vision?month=2026-11" if team else "/month/2026-11").text
    assert re.search(rf'href="/savings[^"]*"[^>]*>[^<]*{CANDIDATES} jobs', month)
