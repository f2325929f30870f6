"""Who may pass: every route with every token, and none that was forgotten."""

from __future__ import annotations

import base64

import pytest

from agent.wire import PROBLEM
from gputally.server.tokens_and_grants import sha256
from tests.http.opened import OPEN, routes

NEEDS = {
    ("POST", "/v1/usage"): "ingest",
    ("GET", "/v1/imports"): "import",
    ("POST", "/v1/imports"): "import",
    ("POST", "/v1/imports/usage"): "import",
    ("GET", "/v1/usage"): "read",
    ("GET", "/v1/cost"): "read",
    ("GET", "/v1/windows"): "read",
    ("GET", "/v1/statement"): "read",
    ("GET", "/v1/report"): "read",
    ("GET", "/v1/periods"): "read",
    ("GET", "/v1/periods/{month}"): "read",
    ("POST", "/v1/periods/{month}/close"): "admin",
    ("POST", "/v1/periods/{month}/reopen"): "admin",
    ("POST", "/v1/periods/{month}/publish"): "admin",
    ("GET", "/v1/adjustments"): "read",
    ("POST", "/v1/adjustments"): "admin",
    ("POST", "/v1/credits/preview"): "admin",
    ("POST", "/v1/credits"): "admin",
    ("GET", "/v1/corrections"): "read",
    ("POST", "/v1/corrections"): "admin",
    ("GET", "/v1/prices"): "read",
    ("GET", "/v1/budgets"): "read",
    ("GET", "/v1/prices/versions"): "read",
    ("POST", "/v1/prices/preview"): "admin",
    ("POST", "/v1/prices"): "admin",
    ("POST", "/v1/reconciliation/{month}"): "admin",
    ("PUT", "/v1/policy"): "policy",
    ("GET", "/v1/policy"): "read",
    ("GET", "/v1/policy/versions"): "read",
    ("POST", "/v1/decisions"): "policy",
    ("GET", "/v1/decisions"): "read",
    ("GET", "/v1/quarantine"): "read",
    ("GET", "/v1/check"): "admin",
    ("GET", "/v1/audit"): "admin",
    ("POST", "/v1/backups"): "admin",
    ("GET", "/v1/backups"): "admin",
    ("GET", "/v1/backups/{name}"): "admin",
    ("GET", "/v1/deliveries"): "admin",
    ("POST", "/v1/deliveries/again"): "admin",
    ("POST", "/v1/pods"): "admin",
    ("POST", "/v1/gpus/retire"): "admin",
    ("GET", "/v1/gpus/owners"): "read",
    ("POST", "/v1/gpus/move"): "admin",
    ("GET", "/v1/clock"): "admin",
    ("POST", "/v1/clock/accept"): "admin",
    ("POST", "/v1/clock/heal"): "admin",
    ("GET", "/v1/waits"): "read",
    ("GET", "/v1/proposals"): "read",
    ("GET", "/v1/periods/{month}/proposals"): "read",
    ("POST", "/v1/periods/{month}/proposals/{proposal}/take"): "admin",
    ("POST", "/v1/periods/{month}/proposals/{proposal}/refuse"): "admin",
    ("GET", "/proposals"): "read",
    ("GET", "/v1/jobs"): "read",
    ("GET", "/v1/jobs/{id}"): "read",
    ("POST", "/v1/jobs/{id}/progress"): "progress",
    ("GET", "/"): "read",
    ("GET", "/month"): "read",
    ("GET", "/month/{month}"): "read",
    ("GET", "/month/{month}/lines"): "read",
    ("GET", "/month/{month}/lines.csv"): "read",
    ("GET", "/act/{number}"): "read",
    ("GET", "/team/{team:path}"): "read",
    ("GET", "/decisions"): "read",
    ("GET", "/decisions/{at_ms}/{id:path}"): "read",
    ("GET", "/prices"): "read",
    ("GET", "/invoice"): "read",
    ("GET", "/invoice/{month}"): "read",
    ("GET", "/invoice/{month}/lines.csv"): "read",
    ("GET", "/coverage"): "read",
    ("GET", "/jobs"): "read",
    ("GET", "/job/{id:path}"): "read",
    ("GET", "/nodes"): "read",
    ("GET", "/node/{cluster}/{node}"): "read",
    ("POST", "/node/{cluster}/{node}/gpus"): "admin",
}
PARTS = {
    "{id:path}": "prod~vision~Job~train",
    "{cluster}": "prod",
    "{node}": "node-1",
    "{month}": "2026-10",
    "{number}": "1",
    "{at_ms}": "1",
    "{team:path}": "vision",
    "{id}": "prod~vision~Pod~train-0",
}


def address(path):
    for part, value in PARTS.items():
        path = path.replace(part, value)
    return path


def test_every_route_says_whom_it_lets_pass(door):
    assert routes(door().app) == set(NEEDS) | OPEN


@pytest.mark.parametrize("route", sorted(NEEDS), ids=" ".join)
def test_a_route_lets_its_own_scope_and_admin_pass_and_nobody_else(door, kit, tmp_path, route):
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml"))
    method, path = route
    outcome = {
        scope: opened.client.request(
            method, address(path), headers=kit.bearer(token), follow_redirects=False
        ).status_code
        for scope, token in kit.tokens.items()
    }
    passed = {scope for scope, status in outcome.items() if status not in (401, 403)}
    assert passed == {NEEDS[route], "admin"}
    assert all(status == 403 for scope, status in outcome.items() if scope not in passed)
    assert max(outcome.values()) < 500
    for headers in ({}, kit.bearer("unknown"), kit.bearer(""), {"Authorization": "Token x"}):
        answer = opened.client.request(method, address(path), headers=headers)
        assert answer.status_code == 401
        assert answer.json()["type"] == PROBLEM + "unauthenticated"
        assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    "route", sorted(r for r in OPEN - {("GET", "/openapi.json")} if "sign" not in r[1]), ids=" ".join
)
def test_the_open_routes_need_no_token(door, kit, tmp_path, route):
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml"))
    assert opened.client.request(*route).status_code == 200


def test_metrics_name_teams_only_with_a_token(door, kit, tmp_path):
    entries = team_token("lead", "vision")
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml", entries))
    nameless = opened.client.get("/metrics")
    assert nameless.status_code == 200
    assert "gputally_ingest_rows_total" in nameless.text
    assert not any(name in nameless.text for name in ('team="', 'queue="', 'namespace="', 'job="', "vision", "speech"))
    assert opened.client.get("/metrics", headers=kit.bearer("wrong")).status_code == 401
    assert opened.client.get("/metrics", headers=kit.bearer("lead")).status_code == 403
    named = opened.client.get("/metrics", headers=kit.bearer(kit.tokens["read"])).text
    assert 'team="vision"' in named
    everything = door(tokens=kit.token_file(tmp_path / "tokens.yaml", entries), open_metrics=True)
    assert 'team="vision"' in everything.client.get("/metrics").text
    assert opened.client.get("/metrics", headers=kit.bearer(kit.tokens["ingest"])).status_code == 403
    assert opened.client.get("/metrics", headers=kit.bearer(kit.tokens["read"])).status_code == 200


def test_who_may_not_pass_is_not_read(door, kit, tmp_path):
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml"), limits={"body_bytes": 1024})
    assert opened.client.post("/v1/usage", content=b"x" * 5000).status_code == 401
    answer = opened.client.post("/v1/usage", content=b"x" * 5000, headers=kit.bearer(kit.tokens["read"]))
    assert answer.status_code == 403
    assert opened.ledger.rows == {}


def team_token(name, teams):
    return f"  - {{name: {name}, token_sha256: {sha256(name)}, scopes: [read], teams: [{teams}]}}\n"


@pytest.fixture
def team_door(door, kit, tmp_path):
    entries = team_token("lead", "vision") + team_token("two", "'vision', 'speech'")
    return door(tokens=kit.token_file(tmp_path / "tokens.yaml", entries))


def test_a_team_lead_sees_its_own_team_only(team_door, kit):
    lead = kit.bearer("lead")
    get = lambda path: team_door.client.get(path, headers=lead, follow_redirects=False)  # noqa: E731
    for path in ("/v1/usage", "/v1/cost"):
        assert {line["key"]["team"] for line in get(path).json()["lines"]} == {"vision"}
        assert get(f"{path}?where.team=vision").status_code == 200
        assert get(f"{path}?where.team=speech").status_code == 403
        assert get(f"{path}?where.team=vision&where.team=speech").status_code == 403
    assert {line["team"] for line in get("/v1/statement?month=2026-10").json()["lines"]} == {"vision"}
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


def test_who_has_two_teams_has_to_choose_one(team_door, kit):
    two = kit.bearer("two")
    assert team_door.client.get("/v1/statement?month=2026-10", headers=two).status_code == 403
    assert team_door.client.get("/v1/statement?month=2026-10&team=speech", headers=two).status_code == 200
    lines = team_door.client.get("/v1/usage", headers=two).json()["lines"]
    assert {line["key"]["team"] for line in lines} == {"speech", "vision"}


def test_a_browser_may_send_the_token_as_a_password_for_reading_only(door, kit, tmp_path):
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml"))
    basic = {"Authorization": "Basic " + base64.b64encode(f"me:{kit.tokens['admin']}".encode()).decode()}
    assert opened.client.get("/prices", headers=basic).status_code == 200
    assert opened.client.post("/v1/usage", headers=basic).status_code == 401
    asked = opened.client.get("/prices", headers={"Accept": "text/html"})
    assert asked.status_code == 401
    assert asked.headers["www-authenticate"].startswith("Basic")
    assert "<h1>" in asked.text
    assert opened.client.get("/prices", headers={"Authorization": "Basic ???"}).status_code == 401


def test_another_site_may_not_write_through_a_browser(door, kit):
    opened = door()
    answer = opened.client.post("/v1/usage", content=kit.encoded(kit.batch()), headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.json()["type"] == PROBLEM + "cross-site"
    assert opened.ledger.rows == {}
    own = opened.client.post("/v1/usage", content=kit.encoded(kit.batch()), headers={"Sec-Fetch-Site": "same-origin"})
    assert own.status_code == 200


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:8080", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 421)]
)
def test_without_tokens_only_loopback_names_are_answered(door, host, status):
    assert door().client.get("/livez", headers={"Host": host}).status_code == status


def test_with_tokens_any_name_is_answered(door, kit, tmp_path):
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml"))
    assert opened.client.get("/livez", headers={"Host": "accountant.gputally.svc"}).status_code == 200


def test_one_client_cannot_ask_without_end(door, kit, tmp_path):
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml"), limits={"requests_per_second": 0.5, "burst": 2})
    ask = lambda token: opened.client.get("/v1/policy/versions", headers=kit.bearer(token))  # noqa: E731
    read = kit.tokens["read"]
    assert [ask(read).status_code for _ in range(3)] == [200, 200, 429]
    refused = ask(read)
    assert refused.json()["type"] == PROBLEM + "too-many-requests"
    assert int(refused.headers["retry-after"]) == 2
    assert ask(kit.tokens["admin"]).status_code == 200  # another token has a bucket of its own
    assert [ask("guess").status_code for _ in range(3)] == [401, 401, 429]
    opened.clock.advance(2000)
    assert [ask(read).status_code, ask(read).status_code] == [200, 429]


def test_headers_that_keep_a_browser_safe_stand_on_every_answer(door):
    opened = door()
    for path in ("/", "/livez", "/v1/usage", "/nowhere", "/v1/usage?by=nothing"):
        headers = opened.client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src" not in policy
        assert "frame-ancestors 'none'" in policy
        assert len(headers["x-request-id"]) == 16


def test_no_token_is_ever_logged(door, kit, tmp_path, logs):
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml"))
    for token in ("secret-unknown", kit.tokens["read"]):
        opened.client.get("/v1/usage?page=secret-page", headers=kit.bearer(token))
    opened.client.get(f"/{kit.tokens['read']}?token=secret-query")
    assert logs
    assert {entry["principal"] for entry in logs} == {None, "read"}
    assert "secret" not in str(logs)
