"""The callers that each route accepts, and the data that a team lead sees of a ledger with two teams."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.ledger.protocols import JobKey
from agent.wire import PodFacts, UsageInterval
from tests.exports.format_cases import TEXT
from tests.http.conftest import (
    NOW_MS,
    PUBLIC_ROUTES,
    TOKENS,
    bearer,
    client_of,
    decision,
    encoded,
    pod_minutes,
    refused,
    routes,
    scoped,
    settings_in,
    token_entry,
)
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

ROUTES = {
    "ingest": (
        "POST /v1/usage",
    ),
    "import": (
        "GET /v1/imports", "POST /v1/imports", "POST /v1/imports/usage",
    ),
    "read": (
        "GET /v1/usage", "GET /v1/cost", "GET /v1/guarantees", "GET /v1/windows", "GET /v1/statement",
        "GET /v1/report", "GET /v1/periods", "GET /v1/periods/{month}/changes",
        "GET /v1/periods/{month}", "GET /v1/adjustments", "GET /v1/corrections", "GET /v1/prices", "GET /v1/budgets",
        "GET /v1/prices/versions", "GET /v1/policy", "GET /v1/policy/versions", "GET /v1/decisions",
        "GET /v1/quarantine", "GET /v1/gpus/owners", "GET /v1/waits", "GET /v1/waits/unused", "GET /v1/proposals",
        "GET /v1/periods/{month}/proposals", "GET /proposals", "GET /v1/jobs", "GET /v1/jobs/{id}", "GET /",
        "GET /month", "GET /month/{month}", "GET /month/{month}/lines", "GET /month/{month}/lines.csv",
        "GET /act/{number}", "GET /team/{team:path}", "GET /decisions", "GET /decisions/{at_ms}/{id:path}",
        "GET /prices", "GET /invoice", "GET /invoice/{month}", "GET /invoice/{month}/lines.csv", "GET /coverage",
        "GET /jobs", "GET /jobs.csv", "GET /jobs.parquet",
        "GET /job/{id:path}", "GET /nodes", "GET /nodes.csv", "GET /nodes.parquet", "GET /v1/nodes",
        "GET /node/{cluster}/{node}",
        "POST /mcp",
        "GET /explore", "GET /explore.csv", "GET /explore.parquet", "GET /v1/sessions/ended",
        "GET /group", "POST /views", "GET /invoices", "GET /invoices.csv", "GET /invoices/{month}",
        "GET /waits", "GET /waits.csv", "GET /savings", "GET /savings.csv",
    ),
    "admin": (
        "POST /v1/periods/{month}/close", "POST /v1/periods/{month}/reopen", "POST /v1/periods/{month}/publish",
        "POST /v1/periods/{month}/drafts",
        "POST /v1/adjustments", "POST /v1/adjustments/preview", "POST /v1/credits/preview", "POST /v1/credits",
        "POST /v1/corrections",
        "POST /v1/prices/preview", "POST /v1/prices", "POST /v1/reconciliation/{month}", "GET /v1/check",
        "GET /v1/audit", "POST /v1/backups", "GET /v1/backups", "GET /v1/backups/{name}", "GET /v1/deliveries",
        "POST /v1/deliveries/again", "POST /v1/pods", "POST /v1/gpus/retire", "POST /v1/gpus/move", "GET /v1/clock",
        "POST /v1/imports/withdraw",
        "POST /v1/clock/accept", "POST /v1/clock/heal", "POST /v1/lake/repair",
        "POST /v1/periods/{month}/proposals/{proposal}/take",
        "POST /v1/periods/{month}/proposals/{proposal}/refuse", "POST /node/{cluster}/{node}/gpus",
        "GET /audit", "GET /audit.csv", "POST /invoices/{month}", "POST /invoice/{month}",
    ),
    "policy": (
        "PUT /v1/policy", "POST /v1/decisions",
    ),
    "progress": (
        "POST /v1/jobs/{id}/progress",
    ),
}  # fmt: skip
"""Routes by the scope that they need."""
NEEDS = {tuple(route.split()): scope for scope, needing in ROUTES.items() for route in needing}
OF_TEAMS = frozenset(
    tuple(route.split())
    for route in (
        "GET /v1/usage", "GET /v1/cost", "GET /v1/guarantees", "GET /v1/statement", "GET /v1/report", "GET /v1/periods",
        "GET /v1/periods/{month}/changes",
        "GET /v1/periods/{month}", "GET /v1/adjustments", "GET /v1/corrections", "GET /v1/prices", "GET /v1/budgets",
        "GET /v1/prices/versions", "GET /v1/waits", "GET /v1/waits/unused", "GET /v1/proposals",
        "GET /v1/periods/{month}/proposals",
        "GET /proposals", "GET /v1/jobs", "GET /v1/jobs/{id}", "GET /", "GET /month", "GET /month/{month}/lines",
        "GET /month/{month}/lines.csv", "GET /act/{number}", "GET /team/{team:path}", "GET /prices", "GET /jobs",
        "GET /jobs.csv", "GET /jobs.parquet",
        "GET /job/{id:path}", "POST /v1/jobs/{id}/progress", "POST /mcp", "GET /explore", "GET /explore.csv",
        "GET /explore.parquet", "GET /group", "POST /views", "GET /invoices", "GET /invoices.csv", "GET /waits",
        "GET /waits.csv", "GET /savings", "GET /savings.csv",
    )
)  # fmt: skip
"""Routes that a token with teams may use, for its own teams."""
OF_ALL = frozenset(
    tuple(route.split())
    for route in (
        "GET /v1/windows", "GET /v1/policy", "GET /v1/policy/versions", "GET /v1/decisions", "GET /v1/quarantine",
        "GET /v1/gpus/owners", "GET /month/{month}", "GET /decisions", "GET /decisions/{at_ms}/{id:path}",
        "GET /invoices/{month}", "GET /invoice", "GET /invoice/{month}", "GET /invoice/{month}/lines.csv",
        "GET /coverage", "GET /nodes", "GET /nodes.csv", "GET /nodes.parquet", "GET /v1/nodes",
        "GET /node/{cluster}/{node}", "GET /v1/sessions/ended",
    )
)  # fmt: skip
"""Routes that such a token may not use, because their figures include all teams."""
LIMITED = {
    "lead": (("read",), "read"),
    "reporter": (("progress",), "progress"),
    "both": (("read", "progress"), "read, progress"),
}
"""Tokens with teams by name: their scopes, as such and as in the token file."""
PARTS = {
    "{id:path}": "prod~vision~Job~train",
    "{cluster}": "prod",
    "{node}": "node-1",
    "{month}": "2026-10",
    "{number}": "99",
    "{at_ms}": "1",
    "{team:path}": "vision",
    "{id}": "prod~vision~Pod~train-0",
}


def address(path):
    for part, value in PARTS.items():
        path = path.replace(part, value)
    return path


def test_every_route_says_whom_it_lets_pass(accountant):
    assert routes(accountant().app) == set(NEEDS) | PUBLIC_ROUTES


@pytest.mark.parametrize("route", sorted(PUBLIC_ROUTES - {("GET", "/metrics")}), ids=" ".join)
def test_a_public_route_answers_everybody_alike(accountant, route):
    """Sign-in, probes and files: no scope and no grant of teams changes whether they answer, as it does for metrics."""
    limited = "".join(token_entry(name, scope, ", teams: [vision]") for name, (_, scope) in LIMITED.items())
    running = accountant(tokens=limited)
    method, path = route
    callers = [{}, bearer("unknown"), *(bearer(token) for token in (*TOKENS.values(), *LIMITED))]
    statuses = {
        running.client.request(method, path, headers=headers, follow_redirects=False).status_code for headers in callers
    }
    assert len(statuses) == 1
    assert max(statuses) < 500


@pytest.mark.parametrize("route", sorted(NEEDS), ids=" ".join)
def test_a_route_lets_its_own_scope_and_admin_pass_and_nobody_else(accountant, route):
    running = accountant(tokens="")
    method, path = route
    outcome = {
        scope: running.client.request(method, address(path), headers=bearer(token), follow_redirects=False).status_code
        for scope, token in TOKENS.items()
    }
    passed = {scope for scope, status in outcome.items() if status not in (401, 403)}
    assert passed == {NEEDS[route], "admin"}
    assert all(status == 403 for scope, status in outcome.items() if scope not in passed)
    assert max(outcome.values()) < 500
    for headers in ({}, bearer("unknown"), bearer(""), {"Authorization": "Token x"}):
        answer = running.client.request(method, address(path), headers=headers)
        assert answer.status_code == 401
        refused(answer, "unauthenticated")
        assert answer.headers["www-authenticate"].startswith("Bearer")


def test_every_route_says_what_it_shows_to_some_teams():
    """A new route has to be in this table."""
    limitable = {route for route, scope in NEEDS.items() if scope in ("read", "progress")}
    assert limitable == OF_TEAMS | OF_ALL
    assert not OF_TEAMS & OF_ALL


@pytest.mark.parametrize("name", LIMITED)
@pytest.mark.parametrize("route", sorted(NEEDS), ids=" ".join)
def test_a_token_with_teams_passes_where_its_scope_and_its_teams_do(accountant, route, name):
    scopes, written = LIMITED[name]
    running = accountant(tokens=token_entry(name, written, ", teams: [vision]"))
    method, path = route
    answer = running.client.request(method, address(path), headers=bearer(name), follow_redirects=False)
    assert (answer.status_code != 403) == (NEEDS[route] in scopes and route in OF_TEAMS), answer.text
    assert answer.status_code < 500


@pytest.mark.parametrize(
    "route", sorted(r for r in PUBLIC_ROUTES - {("GET", "/openapi.json")} if "sign" not in r[1]), ids=" ".join
)
def test_the_open_routes_need_no_token(accountant, route):
    running = accountant(tokens="")
    assert running.client.request(*route).status_code == 200


def test_metrics_name_teams_only_with_a_token(accountant):
    entries = token_entry("lead", "read", ", teams: [vision]")
    running = accountant(tokens=entries)
    nameless = running.client.get("/metrics")
    assert nameless.status_code == 200
    assert "gputally_ingest_rows_total" in nameless.text
    assert not any(name in nameless.text for name in ('team="', 'queue="', 'namespace="', 'job="', "vision", "speech"))
    assert running.client.get("/metrics", headers=bearer("wrong")).status_code == 401
    assert running.client.get("/metrics", headers=bearer("lead")).status_code == 403
    named = running.client.get("/metrics", headers=scoped("read")).text
    assert 'team="vision"' in named
    everything = accountant(tokens=entries, open_metrics=True)
    assert 'team="vision"' in everything.client.get("/metrics").text
    assert running.client.get("/metrics", headers=scoped("ingest")).status_code == 403
    assert running.client.get("/metrics", headers=scoped("read")).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example.com", 421), ("gpus.example.com.evil.example", 421), ("gpus.example.com", 200),
        ("metrics.example.com:8080", 200), ("10.1.2.3:8080", 200), ("gputally-accountant.gputally.svc", 200),
    ],
)  # fmt: skip
def test_metrics_with_names_and_without_a_token_are_not_answered_under_a_strangers_name(accountant, host, status):
    """A stranger's page could read them through the browser of a person who reaches the port."""
    running = accountant(
        tokens="", open_metrics=True, public_url="https://gpus.example.com", hosts=["metrics.example.com"]
    )
    answer = running.client.get("/metrics", headers={"Host": host})
    assert (answer.status_code, 'team="vision"' in answer.text) == (status, status == 200)
    assert running.client.get("/metrics", headers={"Host": host, **scoped("read")}).status_code == 200
    closed = accountant(tokens="")
    assert closed.client.get("/metrics", headers={"Host": host}).status_code == 200, "it names nobody"


def test_who_may_not_pass_is_not_read(accountant):
    running = accountant(tokens="", limits={"body_bytes": 1024})
    assert running.client.post("/v1/usage", content=b"x" * 5000).status_code == 401
    answer = running.client.post("/v1/usage", content=b"x" * 5000, headers=scoped("read"))
    assert answer.status_code == 403
    assert running.ledger.booked == {}


@pytest.fixture
def with_leads(accountant):
    lead = token_entry("lead", "read", ", teams: [vision]")
    return accountant(tokens=lead + token_entry("two", "read", ", teams: [vision, speech]"))


def test_a_team_lead_sees_its_own_team_only(with_leads):
    lead = bearer("lead")
    get = lambda path: with_leads.client.get(path, headers=lead, follow_redirects=False)  # noqa: E731
    for path in ("/v1/usage", "/v1/cost"):
        assert {line["key"]["team"] for line in get(path).json()["lines"]} == {"vision"}
        assert get(f"{path}?where.team=vision").status_code == 200
        assert get(f"{path}?where.team=speech").status_code == 403
        assert get(f"{path}?where.team=vision&where.team=speech").status_code == 403
    assert {line["team"] for line in get("/v1/statement?month=2026-11").json()["lines"]} == {"vision"}
    assert get("/v1/statement?month=2026-10&team=speech").status_code == 403
    assert get("/").headers["location"] == "/team/vision"
    assert get("/team/vision?month=2026-10").status_code == 200
    assert get("/team/speech?month=2026-10").status_code == 403
    for path in (
        "/month/2026-10",
        "/decisions",
        "/coverage",
        "/v1/windows",
        "/v1/decisions",
        "/v1/policy",
        "/v1/quarantine",
    ):
        assert get(path).status_code == 403, path


def test_who_has_two_teams_has_to_choose_one(with_leads):
    two = bearer("two")
    assert with_leads.client.get("/v1/statement?month=2026-10", headers=two).status_code == 403
    assert with_leads.client.get("/v1/statement?month=2026-10&team=speech", headers=two).status_code == 200
    lines = with_leads.client.get("/v1/usage", headers=two).json()["lines"]
    assert {line["key"]["team"] for line in lines} == {"speech", "vision"}


def test_a_browser_may_send_the_token_as_a_password_for_reading_only(accountant):
    running = accountant(tokens="")
    basic = {"Authorization": "Basic " + base64.b64encode(f"me:{TOKENS['admin']}".encode()).decode()}
    assert running.client.get("/prices", headers=basic).status_code == 200
    assert running.client.post("/v1/usage", headers=basic).status_code == 401
    asked = running.client.get("/prices", headers={"Accept": "text/html"})
    assert asked.status_code == 401
    assert asked.headers["www-authenticate"].startswith("Basic")
    assert "<h1>" in asked.text
    assert running.client.get("/prices", headers={"Authorization": "Basic ???"}).status_code == 401


def test_another_site_may_not_write_through_a_browser(accountant):
    running = accountant()
    answer = running.client.post("/v1/usage", content=encoded(pod_minutes()), headers={"Sec-Fetch-Site": "cross-site"})
    refused(answer, "cross-site")
    assert running.ledger.booked == {}
    own = running.client.post("/v1/usage", content=encoded(pod_minutes()), headers={"Sec-Fetch-Site": "same-origin"})
    assert own.status_code == 200


@pytest.mark.parametrize(
    ("tokens", "host", "status"),
    [
        (None, "localhost:8080", 200),
        (None, "127.0.0.1", 200),
        (None, "[::1]:80", 200),
        (None, "evil.example", 421),
        ("", "accountant.gputally.svc", 200),
    ],
)
def test_without_tokens_only_loopback_names_are_answered(accountant, tokens, host, status):
    assert accountant(tokens=tokens).client.get("/livez", headers={"Host": host}).status_code == status


def test_one_client_cannot_ask_without_end(accountant):
    running = accountant(tokens="", limits={"requests_per_second": 0.5, "burst": 2})
    ask = lambda token: running.client.get("/v1/policy/versions", headers=bearer(token))  # noqa: E731
    read = TOKENS["read"]
    assert [ask(read).status_code for _ in range(3)] == [200, 200, 429]
    answer = ask(read)
    refused(answer, "too-many-requests")
    assert int(answer.headers["retry-after"]) == 2
    assert ask(TOKENS["admin"]).status_code == 200  # another token has a bucket of its own
    assert [ask("guess").status_code for _ in range(3)] == [401, 401, 429]
    running.clock.advance(2000)
    assert [ask(read).status_code, ask(read).status_code] == [200, 429]


def test_headers_that_keep_a_browser_safe_stand_on_every_answer(accountant):
    running = accountant()
    for path in ("/", "/livez", "/v1/usage", "/nowhere", "/v1/usage?by=nothing"):
        headers = running.client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src" not in policy
        assert "frame-ancestors 'none'" in policy
        assert len(headers["x-request-id"]) == 16


def test_no_token_is_ever_logged(accountant, logs):
    running = accountant(tokens="")
    for token in ("secret-unknown", TOKENS["read"]):
        running.client.get("/v1/usage?page=secret-page", headers=bearer(token))
    running.client.get(f"/{TOKENS['read']}?token=secret-query")
    assert logs
    assert {entry["principal"] for entry in logs} == {None, "read"}
    assert "secret" not in str(logs)


MINUTE_MS = 60_000
OURS, THEIRS = "vision", "zebra"
"""THEIRS is the marker: it occurs in no text of the product."""
ROLES = {
    "lead": ("read", ", teams: [vision]"),
    "lead-who-reports": ("read, progress", ", teams: [vision]"),
    "reader": ("read",),
    "admin": ("admin",),
    "agent": ("ingest", ", cluster: prod, node: node-1"),
}


def pod(number: int, team: str) -> tuple[UsageInterval, PodFacts]:
    begin = NOW_MS - 20 * MINUTE_MS
    name, uid = f"{team}-train-0", f"uid-{number}"
    holder = pod_holder(name, team, uid, "main")
    row = interval(begin, f"GPU-{number}", holder, span_ms=10 * MINUTE_MS, busy_us=300_000_000)
    facts = pod_facts(
        name, begin, namespace=team, node="node-1", uid=uid, workload=f"Job/{team}-train",
        queue_ref=f"policy:{team}-queue", created_ms=begin - MINUTE_MS, scheduled_ms=begin, started_ms=begin,
        labels={"gputally.dev/user": f"{team}-user"}, requests={"nvidia.com/gpu": "1"},
    )  # fmt: skip
    return row, facts


def _with_commitments() -> str:
    """Return a price book in which each team has paid for a GPU in advance."""
    rows = price_book_text(H100="2.40").removeprefix("schema: 1\n")
    plain = rows.splitlines()[-1].replace("2.40", "1.10")
    for team in (OURS, THEIRS):
        rows += plain.replace("id: h100", f"id: {team}-rate, commitment: {team}-deal") + "\n"
    deals = "".join(f"  - {{id: {team}-deal, gpus: 1, owner: {team}}}\n" for team in (OURS, THEIRS))
    return f"schema: 1\ncommitments:\n{deals}{rows}"


@pytest.fixture
def two_teams(tmp_path, clock, channels) -> Iterator[TestClient]:
    queues = "".join(f"  - {{name: {team}-queue, team: {team}, deserved: 1}}\n" for team in (OURS, THEIRS))
    budgets = "".join(f"  - {{name: {team}-budget, team: {team}, limit: 1}}\n" for team in (OURS, THEIRS))
    settings = settings_in(
        tmp_path, open_metrics=False, metrics_token=tmp_path / "metrics.token", prices=_with_commitments(),
        tokens="tokens:\n" + "".join(token_entry(name, *given) for name, given in ROLES.items()),
        inventory="schema: 1\ncluster: prod\nnamespaces:\n"
        + "".join(f"  - {{name: {team}, team: {team}}}\n" for team in (OURS, THEIRS)),
        policy=f"schema: 1\nqueues:\n{queues}budgets:\n{budgets}",
        deliveries=f"schema: 1\ndestinations:\n  disk: {{shelf: {{path: {tmp_path}}}}}\n"
        f"reports:\n  - {{of: week, forms: [{TEXT.name}], team: {THEIRS}, to: [disk]}}\n",
    )  # fmt: skip
    (tmp_path / "metrics.token").write_text("scrape\n")
    with Service(settings, clock) as service:
        client = client_of(service, follow_redirects=False)
        (first, one), (second, two) = pod(1, OURS), pod(2, THEIRS)
        sent = encoded(batch([first, second], [one, two], cluster="prod", node="node-1"))
        assert client.post("/v1/usage", content=sent, headers=bearer("agent")).status_code == 200
        borrowed = decision(
            id="d1", kind="preemption", subject=f"Job/{THEIRS}/{THEIRS}-train", reason=f"{THEIRS} borrowed"
        )
        assert client.post("/v1/decisions", json=[borrowed], headers=bearer("admin")).status_code == 200
        for team in (OURS, THEIRS):
            credit = {
                "month": "2026-11",
                "team": team,
                "amount": "-1.50",
                "reason": f"{team} lost a day",
                "approved_by": "cfo",
            }
            assert client.post("/v1/adjustments", json=credit, headers=bearer("admin")).status_code == 200
        assert service.deliveries is not None
        service.deliveries.run()
        yield client


def addresses(client: TestClient) -> list[str]:
    """Return every GET route with every value that its parts can have."""
    teams = (OURS, THEIRS)
    found = []
    for method, path in sorted(routes(client.app) - PUBLIC_ROUTES):
        if method != "GET":
            continue
        filled = [path.replace("{month}", "2026-11").replace("{cluster}", "prod").replace("{node}", "node-1")]
        if "{team" in path:
            filled = [path.replace("{team:path}", team) for team in teams]
        elif "{at_ms}" in path:
            filled = [f"/decisions/{NOW_MS - 1}/d1"]
        elif "{id" in path:
            ids = [JobKey("prod", team, f"Job/{team}-train").id for team in teams]
            filled = [path.replace("{id:path}", one).replace("{id}", one) for one in ids]
        elif "{name}" in path:
            filled = [path.replace("{name}", "ledger-20261101T000000000Z")]
        elif "{number}" in path:
            filled = [path.replace("{number}", str(number)) for number in range(1, 8)]
        found += filled
        found += [f"{filled[0]}?team={THEIRS}", f"{filled[0]}?where.team={THEIRS}", f"{filled[0]}?by=namespace,job,pod"]
    return found


@pytest.mark.parametrize("role", ["lead", "lead-who-reports"])
def test_a_lead_never_sees_a_word_of_another_team(two_teams, role):
    seen = 0
    for address in addresses(two_teams):
        # What a question asks for is the same in both; whether it is put in words depends on the address alone.
        for accept in ("application/json", "text/html") if "?" not in address else ("application/json",):
            answer = two_teams.get(address, headers={**bearer(role), "Accept": accept})
            assert answer.status_code < 500, address
            told = answer.text.replace(f'"instance":{json.dumps(address.partition("?")[0])}', "")
            if answer.status_code == 200:
                seen += OURS in told
                assert THEIRS not in told, address
            elif THEIRS not in address:
                assert THEIRS not in told, address
    assert seen > 10, "the walk has seen its own team's figures"


def test_who_may_see_all_does(two_teams):
    """The marker is there to be found: it is on most pages that a lead may read too."""
    marked = [
        address
        for address in addresses(two_teams)
        if THEIRS in two_teams.get(address, headers=bearer("admin")).text and THEIRS not in address
    ]
    assert len(marked) > 12
    assert {
        "/",
        "/jobs",
        "/v1/jobs",
        "/v1/waits",
        "/v1/budgets",
        "/v1/guarantees",
        "/v1/deliveries",
        "/decisions",
        "/prices",
        "/v1/prices",
    } <= set(marked)


def test_prometheus_has_a_token_of_its_own_in_a_file(two_teams, tmp_path):
    def status(token):
        return two_teams.get("/metrics", headers=bearer(token)).status_code

    secret = tmp_path / "metrics.token"
    assert f'team="{THEIRS}"' in two_teams.get("/metrics", headers=bearer("scrape")).text
    assert 'team="' not in two_teams.get("/metrics").text
    assert status("scrap") == 401
    assert two_teams.post("/v1/usage", content=b"{}", headers=bearer("scrape")).status_code == 403
    secret.write_text("renewed")
    assert (status("scrape"), status("renewed")) == (401, 200)
    secret.write_text("")
    assert status("renewed") == 401
    assert 'team="' not in two_teams.get("/metrics", headers=bearer("")).text
    secret.unlink()
    assert status("renewed") == 503
    assert status("reader") == 200


def test_every_route_that_writes_has_its_bound_in_the_table(accountant):
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    table = page.partition("### What each route leaves")[2].partition("\n## ")[0]
    paths = accountant().app.openapi()["paths"]
    writing = {
        f"{method.upper()} {path}" for path, methods in paths.items() for method in methods.keys() - {"get", "head"}
    }
    assert set(re.findall(r"`((?:POST|PUT|DELETE|PATCH) [^`]+)`", table)) == writing
