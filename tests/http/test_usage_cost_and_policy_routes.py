"""Usage, cost, windows, statements, reports, policy and decisions over HTTP: parameters, pages and answers."""

from __future__ import annotations

import json
import re
from decimal import Decimal

import pytest

from accountant.core.errors import LedgerUnavailable
from accountant.exports.protocol import exports
from accountant.reports import figure_formatting
from accountant.wire.usage_cost_and_job_models import CostLine
from gputally.base.units import MS_PER_DAY
from tests.exports.format_cases import TEXT, cases_of
from tests.http.conftest import HOUR_US, NOW_MS, decision, refused, scoped, usage_line

OCTOBER = 1_790_812_800_000
NOVEMBER = 1_793_491_200_000


def test_usage_defaults_to_the_month_so_far_by_team(accountant):
    answer = accountant().client.get("/v1/usage").json()
    assert (answer["start_ms"], answer["end_ms"]) == (NOVEMBER, NOW_MS)
    assert [line["key"]["team"] for line in answer["lines"]] == ["__idle__", "speech", "vision"]
    assert sum(sum(line["accounts_gpu_us"].values()) for line in answer["lines"]) == 13 * HOUR_US
    assert answer["next_page"] is None


@pytest.mark.parametrize(("query", "coverage"), [("", 0.75), ("&limit=1", 0.75), ("&where.team=t0", 0.75)])
def test_coverage_is_that_of_all_lines_and_the_clusters_where_only_some_are_asked_for(accountant, query, coverage):
    running = accountant()
    running.ledger.lines = [usage_line("t0", busy=2, unmetered=1, down=5), usage_line("t1", unallocated=1)]
    assert running.client.get(f"/v1/usage?by=team{query}").json()["coverage"] == coverage


@pytest.mark.parametrize("by", ["by=gpu_model,team", "by=gpu_model&by=team"])
def test_dimensions_may_be_joined_or_repeated(accountant, by):
    answer = accountant().client.get(f"/v1/usage?{by}").json()
    assert answer["by"] == ["gpu_model", "team"]
    assert len(answer["lines"]) == 4


def test_filters_narrow_the_answer(accountant):
    answer = accountant().client.get("/v1/usage?by=team&where.gpu_model=NVIDIA A100-SXM4-80GB").json()
    assert [line["key"]["team"] for line in answer["lines"]] == ["vision"]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("1790812800000", OCTOBER),
        ("2026-10-01T00:00:00Z", OCTOBER),
        ("2026-10-01T02:00:00%2B02:00", OCTOBER),
        ("2026-10-01T02:00:00+02:00", OCTOBER),  # an unescaped + arrives as a space
        ("2026-10-01", OCTOBER),
        ("2026-10-01&timezone=Europe/Berlin", OCTOBER - 2 * 3_600_000),
        ("7d", NOW_MS - 7 * 86_400_000),
        ("90m", NOW_MS - 90 * 60_000),
        ("1d12h&end=2026-10-02", OCTOBER - 12 * 3_600_000),  # that long before the end
        ("1d&end=5d", NOW_MS - 6 * 86_400_000),
    ],
)
def test_edges_of_a_span_are_read_exactly(accountant, start, expected):
    assert accountant().client.get(f"/v1/usage?start={start}").json()["start_ms"] == expected


@pytest.mark.parametrize(
    ("query", "place"),
    [
        ("start=yesterday", "start"),
        ("start=7days", "start"),
        ("start=0d", "start"),
        ("end=99999w", "end"),
        ("start=2026-10-01T00:00:00", "start"),
        ("start=2026-11-01&end=2026-10-01", "end"),
        ("start=2026-10-01&end=2026-10-01", "end"),
        ("start=0", "end"),  # longer than a question may be
        ("timezone=Mars/Olympus", "timezone"),
        ("by=colour", "by.0"),
        ("by=team,team", "by"),
        ("by=team,queue,namespace,job,pod,gpu,node", "by"),
        ("where.colour=red", "where.colour"),
        ("were.team=vision", "were.team"),
        ("limit=0", "limit"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/usage", "/v1/cost"])
def test_a_bad_parameter_is_named(accountant, path, query, place):
    answer = accountant().client.get(f"{path}?{query}")
    problem = refused(answer, "invalid-parameter")
    assert answer.status_code == 422
    assert place in [fault["at"] for fault in problem["errors"]]
    assert all(fault["reason"] for fault in problem["errors"])
    assert not re.search("Input should|epoch|Value error|[0-9]{13}", problem["detail"]), "the words of a person"


def test_a_page_is_never_longer_than_the_service_allows(accountant):
    answer = accountant(limits={"page_lines": 2}).client.get("/v1/usage?limit=5000").json()
    assert len(answer["lines"]) == 2
    assert answer["next_page"]


def test_cost_is_exact_and_its_total_is_that_of_all_pages(accountant):
    client = accountant().client
    answer = client.get("/v1/cost?by=team&limit=1").json()
    assert answer["currency"] == "EUR"
    assert Decimal(answer["total"]) == 10 * Decimal("2.5") + 2 * Decimal("1.25")
    whole = client.get("/v1/cost?by=team").json()["lines"]
    assert {line["key"]["team"]: Decimal(line["cost"]) for line in whole} == {
        "__idle__": Decimal(10), "speech": Decimal(10), "vision": Decimal("7.5"),
    }  # fmt: skip


def test_no_amount_has_an_exponent_however_small():
    """Pages and files write a price of 1e-9 in digits, and so does the API."""
    line = CostLine(key={}, gpu_us=1, cost=Decimal("2.50000000E-10"))
    assert json.loads(line.model_dump_json())["cost"] == "0.000000000250000000"
    assert figure_formatting.price(Decimal("1E-9")) == "0.000000001"
    assert figure_formatting.price(Decimal("-1E-7")) == "\u22120.0000001"


def test_without_a_price_book_everything_is_unpriced_and_nothing_free(accountant):
    answer = accountant(prices=None).client.get("/v1/cost").json()
    assert answer["currency"] is None
    assert answer["total"] is None
    assert all(line["cost"] is None for line in answer["lines"])
    assert answer["unpriced_gpu_us"] == 12 * HOUR_US


def test_windows_are_those_of_the_ledger(start_service):
    _, client = start_service()
    sliding = client.get("/v1/windows?size=2h&half_life=30m").json()
    assert client.get("/v1/windows?size=7200&half_life=1800").json() == sliding  # plain seconds
    assert (sliding["start_ms"], sliding["end_ms"]) == (NOW_MS - 7_200_000, NOW_MS)
    assert sliding["half_life_s"] == 1800
    assert client.get("/v1/windows?kind=calendar").json()["kind"] == "calendar"
    weighed = client.get("/v1/windows?gpu_weight=H100:4&gpu_weight=A100-80GB:2.5&shard=a").json()
    assert (weighed["gpu_weights"], weighed["shard"]) == ({"H100": "4", "A100-80GB": "2.5"}, "a")
    assert client.get("/v1/windows?cluster=prod").json()["cluster"] == "prod"
    assert not {"cluster", "policy_counting"} & sliding.keys(), "callers who never heard of it refuse it"
    assert client.get("/v1/windows?kind=cron&cron=0 0 * * 1").json()["kind"] == "cron"
    assert client.get("/v1/windows?kind=tumbling&size=5h&start=2026-11-01").json()["kind"] == "tumbling"


@pytest.mark.parametrize(
    "query", ["kind=lunar", "size=0", "size=a week", "half_life=0", "measure=joy", "by=team", "min_coverage=2",
              "start=2026-11-01", "kind=calendar&start=2026-11-01", "at=noon", "sise=7d",
              "kind=cron", "cron=0 0 * * 1", "kind=cron&cron=0 0 0 * * 1", "kind=cron&cron=R 0 * * 1",
              "gpu_weight=H100", "gpu_weight=:4", "gpu_weight=H100:much", "gpu_weight=H100:-1", "decay=slurm",
              "decay=fast", "half_life=1d&decay=slurm&calc_period=7m", "calc_period=0",
              "kind=cron&cron=0 0 31 2 *", "cluster=", "kind=cron&cron=0 0 29 2 1%235"],
)  # fmt: skip
def test_a_bad_window_is_refused(accountant, query):
    refused(accountant().client.get(f"/v1/windows?{query}"), "invalid-parameter")


def test_what_the_ledger_does_not_keep_is_said_so(accountant):
    refused(accountant().client.get("/v1/windows?measure=energy"), "unsupported-question")


POLICY = {"schema": 1, "queues": [{"name": "vision", "deserved": 8, "refs": ["kai:vision"]}]}


def test_a_policy_is_dated_and_idempotent(accountant):
    running = accountant()
    refused(running.client.get("/v1/policy"), "not-found")
    first = running.client.put("/v1/policy", json=POLICY).json()
    assert first["effective_ms"] == NOW_MS
    running.clock.advance(1000)
    assert running.client.put("/v1/policy", json=POLICY).json() == first
    second = running.client.put("/v1/policy", json=POLICY | {"k": 2.0}).json()
    assert second["effective_ms"] == NOW_MS + 1000
    running.clock.advance(1)
    current = running.client.get("/v1/policy")
    assert current.json() == second
    assert current.headers["etag"] == f'"{second["version"]}"'
    assert running.client.get("/v1/policy/versions").json() == [first, second]


@pytest.mark.parametrize(
    ("body", "slug", "reason"),
    [
        (b"{", "malformed-body", "JSON"),
        (b"{}", "invalid-body", "queues"),
        (b'{"queues": [{"name": "a", "weight": -1}]}', "invalid-body", "queues.0.weight"),
        (b'{"queues": [{"name": "a", "parent": "b"}, {"name": "b", "parent": "a"}]}', "invalid-body", "cycle"),
        (b'{"queues": [{"name": "a", "colour": "red"}]}', "invalid-body", "queues.0.colour"),
    ],
)
def test_a_bad_policy_is_refused_with_the_place(accountant, body, slug, reason):
    running = accountant()
    assert reason in refused(running.client.put("/v1/policy", content=body), slug)["detail"]
    assert running.ledger.versions == []


def test_decisions_are_recorded_once_and_read_newest_first(accountant):
    client = accountant().client
    sent = [decision(id="d-1", at_ms=NOW_MS - 5), decision(id="d-2", at_ms=NOW_MS)]
    assert client.post("/v1/decisions", json=sent).json() == {"recorded": 2, "known": 0}
    assert client.post("/v1/decisions", json=sent).json() == {"recorded": 0, "known": 2}
    assert [one["id"] for one in client.get("/v1/decisions").json()] == ["d-2", "d-1"]
    assert [one["id"] for one in client.get("/v1/decisions?limit=1").json()] == ["d-2"]


def test_decisions_of_one_millisecond_are_read_page_by_page(accountant):
    client = accountant().client
    sent = [decision(id=f"d-{number}", cluster=cluster, at_ms=NOW_MS) for number in range(3) for cluster in ("", "c1")]
    client.post("/v1/decisions", json=[decision(id="older", at_ms=NOW_MS - 1), *sent])
    found: list[tuple[str, str]] = []
    before = {}
    while page := client.get("/v1/decisions", params={"end": NOW_MS + 1, "limit": 1, **before}).json():
        found += [(one.get("cluster", ""), one["id"]) for one in page]
        before = {"before": "/".join(filter(None, found[-1]))}
        if found[-1][1] == "older":
            break
    assert sorted(found[:-1]) == sorted((one["cluster"], one["id"]) for one in sent)
    assert found[-1] == ("", "older")


@pytest.mark.parametrize("body", [b"{}", b'[{"id": "x"}]', b"[1]"])
def test_bad_decisions_are_refused_whole(accountant, body):
    running = accountant()
    refused(running.client.post("/v1/decisions", content=body), "invalid-body")
    assert running.ledger.decided == {}


def test_statements_are_canonical_and_tagged(accountant):
    client = accountant().client
    answer = client.get("/v1/statement?month=2026-10")
    assert answer.status_code == 200
    assert answer.json()["month"] == "2026-10"
    tag = answer.headers["etag"]
    for known in (tag, f'"other", {tag}', f"W/{tag}", "*"):
        again = client.get("/v1/statement?month=2026-10", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get("/v1/statement?month=2026-10", headers={"If-None-Match": '"other"'}).status_code == 200


def test_a_running_month_ends_now(accountant):
    answer = accountant().client.get("/v1/statement?month=2026-11").json()
    assert (answer["start_ms"], answer["end_ms"], answer["month"]) == (NOVEMBER, NOW_MS, "2026-11")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.real if form == "pdf" else ()) for form in exports()]
)
def test_reports_come_in_every_form(accountant, form):
    client = accountant().client
    answer = client.get(f"/v1/report?month=2026-10&format={form}")
    assert answer.headers["content-type"] == exports()[form].media_type
    assert cases_of("BEGINS")[form] == answer.content[: len(cases_of("BEGINS")[form])]
    again = client.get(f"/v1/report?month=2026-10&format={form}", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
    if form not in ("html", "json"):
        name = f"gputally-2026-10.{exports()[form].suffix}"
        assert answer.headers["content-disposition"] == f'attachment; filename="{name}"'


@pytest.mark.parametrize(
    "query",
    [
        "month=2026-13",
        "month=October",
        "month=2027-01",
        "month=2026-10&start=2026-10-01",
        "format=doc&month=2026-10",
        "format=focus&start=2026-10-05&end=2026-10-12",
        "format=focus-1.2&month=2026-10&timezone=Europe/Berlin",
    ],
)
def test_a_bad_report_is_refused(accountant, query):
    refused(accountant().client.get(f"/v1/report?{query}"), "invalid-parameter")


def test_a_file_name_cannot_break_out_of_its_header(accountant):
    running = accountant()
    running.ledger.lines = [usage_line('a"b\r\nX: 1', busy=2)]
    answer = running.client.get("/v1/report?month=2026-10&format=" + TEXT.name + '&team=a"b%0d%0aX: 1')
    name = answer.headers["content-disposition"]
    assert re.fullmatch(r'attachment; filename="gputally-2026-10-a_b__X__1-[0-9a-f]{8}\.' + TEXT.suffix + '"', name)
    assert "x" not in answer.headers


def test_the_check_says_that_the_books_balance(accountant):
    answer = accountant().client.get("/v1/check").json()
    assert answer["imbalance_gpu_us"] == 0
    assert answer["quarantined_rows"] == 1
    assert accountant().client.get("/v1/quarantine").json()[0]["reason"] == "future-dated"


@pytest.mark.parametrize(("method", "path", "slug"), [
    ("GET", "/v1/nothing", "not-found"), ("GET", "/v1/usage/", "not-found"),
    ("DELETE", "/v1/usage", "method-not-allowed"),
    ("POST", "/livez", "method-not-allowed"),
])  # fmt: skip
def test_what_does_not_exist_is_a_problem_too(accountant, method, path, slug):
    answer = accountant().client.request(method, path)
    refused(answer, slug)
    if slug == "method-not-allowed":
        assert answer.headers["allow"]


def test_probes_read_no_table(accountant):
    """A ledger that fails at its writes is a task's fault, which makes the accountant unready."""
    running = accountant()
    running.ledger.trouble = LedgerUnavailable("closing")
    assert running.client.get("/readyz").json() == {"status": "ok", "tasks": {}}
    assert running.client.get("/livez").status_code == 200


def test_a_window_says_what_it_costs_before_it_is_added_up(accountant):
    running = accountant(limits={"window_gpu_hours": 24_000})
    running.ledger.gpus = 1_000
    assert running.client.get("/v1/windows?size=1d&half_life=7d").status_code == 200
    answer = running.client.get("/v1/windows?size=365d&half_life=7d")
    assert answer.status_code == 422
    assert answer.json()["errors"] == [
        {
            "at": "size",
            "reason": "the window has 8760000 GPU-hours to add up, and 24000 are the most: ask for about 24 hours,"
            " or for one cluster, or for the window of the policy in force",
        }
    ]
    policy = {"schema": 1, "window": {"size": "365d", "half_life": "7d"}, "queues": [{"name": "a", "deserved": 1}]}
    assert running.client.put("/v1/policy", json=policy).status_code == 200
    assert running.client.get("/v1/windows?size=365d&half_life=7d").status_code == 200
    assert running.client.get("/v1/windows?size=366d&half_life=7d").status_code == 422


SPAN = "start=2026-10-01&end=2026-10-11"


@pytest.mark.parametrize(
    ("question", "width", "days"),
    [
        (f"/v1/usage?{SPAN}&by=team", 1, 10),
        (f"/v1/usage?{SPAN}&by=team,pod,hour", 3, 3),
        (f"/v1/cost?{SPAN}&by=team,node", 2, 5),
        (f"/v1/jobs?{SPAN}", 4, 2),
        (f"/v1/statement?{SPAN}", 6, 1),
        *(
            (f"/v1/report?{SPAN}&format={form}", 6, 1)
            for form, one in exports().items()
            if one.readable and not one.charges
        ),
        (f"/v1/waits?{SPAN}", 1, 10),
        (f"/v1/check?{SPAN}", 1, 10),
    ],
)
def test_a_question_says_what_it_costs_before_it_is_answered(accountant, question, width, days):
    running = accountant(limits={"question_gpu_hours": 240_000 * width})
    running.ledger.gpus = 1_000
    assert running.client.get(question).status_code == 200
    running = accountant(limits={"question_gpu_hours": 239_999})
    running.ledger.gpus = 1_000
    answer = running.client.get(question)
    assert answer.status_code == 422
    (fault,) = answer.json()["errors"]
    assert fault["at"] == "end"
    assert f"the query has {240_000 * width} GPU-hours to add up" in fault["reason"]
    less = 239_999 * 240 // (240_000 * width) // 24
    assert f"ask for about {less} days" in fault["reason"] or less <= 1
    assert ("fewer than" in fault["reason"]) == (width > 1)


def test_no_more_policies_are_put_in_force_than_the_quota(accountant):
    """Each stays for ever, so a stolen token of the controller could leave any number."""
    running = accountant(tokens="", quotas={"policies": 3})

    def put(name: str) -> int:
        body = {"queues": [{"name": name}]}
        return running.client.put("/v1/policy", json=body, headers=scoped("policy")).status_code

    assert [put(f"q{number}") for number in range(5)] == [200, 200, 200, 409, 409]
    assert put("q2") == 200, "the policy in force is known"
    assert len(running.ledger.versions) == 3


def test_decisions_have_an_allowance_of_a_day(accountant):
    running = accountant(tokens="", quotas={"decisions": 48})

    def post(first: int, count: int) -> int:
        body = [decision(id=f"d{number}") for number in range(first, first + count)]
        return running.client.post("/v1/decisions", json=body, headers=scoped("policy")).status_code

    assert [post(0, 40), post(0, 40), post(0, 48), post(48, 1)] == [200, 200, 200, 429], "what is known costs nothing"
    running.clock.advance(3_700_000)
    assert [post(48, 2), post(50, 1)] == [200, 429]
    assert len(running.ledger.decided) == 50
    assert 'gputally_ingest_over_quota_records_total{quota="decisions"} 2.0' in running.client.get("/metrics").text


def test_acts_of_an_admin_have_an_allowance_of_a_day(accountant):
    running = accountant(tokens="", quotas={"acts": 3})

    def act(scope: str = "admin", path: str = "/v1/gpus/retire") -> int:
        return running.client.post(path, json={}, headers=scoped(scope)).status_code

    assert [act("read"), *(act() for _ in range(4))] == [403, 422, 422, 422, 429]
    paths = ("/v1/deliveries/again", "/v1/imports/withdraw", "/v1/periods/2026-10/close", "/node/prod/node-1/gpus")
    assert {act(path=path) for path in paths} == {429}
    assert running.client.get("/v1/audit", headers=scoped("admin")).status_code == 200
    running.clock.advance(MS_PER_DAY // 3 + 1_000)
    assert [act(), act()] == [422, 429]
    assert 'gputally_ingest_over_quota_records_total{quota="acts"} 6.0' in running.client.get("/metrics").text


def test_the_reason_of_a_policy_is_in_the_audit_trail_and_may_be_left_out(start_service) -> None:
    _, client = start_service()
    client.put("/v1/policy", json=POLICY).raise_for_status()
    client.put("/v1/policy?reason=a+new+quarter", json=POLICY | {"k": 2.0}).raise_for_status()
    first, second = (act for act in client.get("/v1/audit").json()["acts"] if act["kind"] == "policy")
    assert second["reason"].startswith("a new quarter; in force from")
    assert first["reason"].startswith("in force from")
    refused(client.put(f"/v1/policy?reason={'x' * 1_001}", json=POLICY), "invalid-parameter")
    assert "a new quarter" in client.get("/audit", headers={"Accept": "text/html"}).text
