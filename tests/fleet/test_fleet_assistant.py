"""An assistant asks the fleet's `/mcp` as it asks an accountant's: all ledgers, or one by its name, with its caller's
rights."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest
from starlette.testclient import TestClient

from accountant.assistant.protocol import SEAM
from accountant.core.settings import Settings
from accountant.fleet.fleet_server import FleetService
from gputally.base.clock import VirtualClock
from gputally.base.money import gpu_hours, plain
from gputally.server.tokens_and_grants import sha256
from tests.fleet.conftest import TwoLedgers
from tests.http.conftest import bearer
from tests.lake.comparison_queries import SPAN

HERE = "http://127.0.0.1"
WHOLE = {"start": "2026-10-01T00:00:00Z", "end": "2026-10-01T05:00:00Z"}
RIGHTS = {"all": "scopes: [read]", "lead": "scopes: [read], teams: [blue]", "job": "scopes: [progress]"}


@pytest.fixture(scope="module")
def client(two: TwoLedgers, tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    tokens = tmp_path_factory.mktemp("fleet") / "tokens.yaml"
    rows = (f"  - {{name: {name}, token_sha256: {sha256(name)}, {right}}}\n" for name, right in RIGHTS.items())
    tokens.write_text("tokens:\n" + "".join(rows))
    limits: Any = {"requests_per_second": 1_000, "burst": 10_000}
    settings = Settings(auth="tokens", tokens=tokens, limits=limits)
    service = FleetService(settings, two.fleet, VirtualClock(SPAN[1] + 60_000))
    return TestClient(service.app, base_url=HERE)


def sent(client: TestClient, method: str, params: Any, token: str = "all", path: str = "/mcp") -> Any:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    accept = {"accept": "application/json, text/event-stream"}
    return client.post(path, json=body, headers={**bearer(token), **accept})


def called(client: TestClient, tool: str, token: str = "all", path: str = "/mcp", **arguments: Any) -> Any:
    answer = sent(client, "tools/call", {"name": tool, "arguments": arguments}, token, path)
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]


def read(client: TestClient, path: str, token: str = "all") -> Any:
    answer = client.get(path, headers=bearer(token))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_usage_and_cost_of_all_ledgers_are_those_of_the_api(client: TestClient) -> None:
    query = f"?by=team&start={WHOLE['start']}&end={WHOLE['end']}"
    for tool in ("usage", "cost"):
        found = called(client, tool, **WHOLE)["structuredContent"]
        lines = read(client, f"/v1/{tool}{query}")["lines"]
        assert [row["team"] for row in found["rows"]] == [line["key"]["team"] for line in lines]
        assert found["link"].startswith(f"{HERE}/v1/{tool}?")
    assert [row["cost"] for row in found["rows"]] == [line["cost"] for line in lines]
    held = called(client, "usage", **WHOLE)["structuredContent"]["rows"]
    of_api = read(client, f"/v1/usage{query}")["lines"]
    accounts = [line["accounts_gpu_us"] for line in of_api]
    assert [row["busy"] for row in held] == [plain(gpu_hours(one["busy"])) for one in accounts]


@pytest.mark.parametrize("ledger", ["north", "south"])
def test_every_question_to_an_accountant_may_be_asked_of_one_ledger(client: TestClient, ledger: str) -> None:
    asked: dict[str, dict[str, Any]] = {
        "usage": WHOLE, "cost": WHOLE, "jobs": WHOLE, "explain_statement": {"month": "2026-10"}, "why_waiting":
        {"job": "j"}, "explain_weight": {"queue": "q"}, "holds": {"gpu": "GPU-0", "at": "2026-10-01T01:00:00Z"},
    }  # fmt: skip
    for tool, arguments in asked.items():
        by_name = called(client, tool, ledger=ledger, **arguments)
        at_its_path = called(client, tool, path=f"/clusters/{ledger}/mcp", **arguments)
        if tool == "holds":  # the lake has whole hours
            assert by_name["isError"]
            assert at_its_path["isError"]
            continue
        assert not by_name["isError"], by_name
        assert by_name == at_its_path, tool
        assert by_name["structuredContent"]["link"].startswith(f"{HERE}/clusters/{ledger}/"), tool
    jobs = called(client, "jobs", ledger=ledger, sort="name", **WHOLE)["structuredContent"]
    query = f"?start={WHOLE['start']}&end={WHOLE['end']}&sort=name&limit=20"
    own = read(client, f"/clusters/{ledger}/v1/jobs{query}")["jobs"]
    assert [row["cost"] for row in jobs["rows"]] == [one["cost"] for one in own]
    assert own
    assert read(client, jobs["rows"][0]["link"].removeprefix(HERE).replace("/job/", "/v1/jobs/"))


def test_the_ledgers_and_the_tools_are_named(client: TestClient) -> None:
    rows = called(client, "ledgers")["structuredContent"]["rows"]
    assert [row["ledger"] for row in rows] == ["north", "south"]
    tools = sent(client, "tools/list", {}).json()["result"]["tools"]
    assert {one["name"] for one in tools} >= {"ledgers", "usage", "cost", "jobs"} | {"advise", "doctor"} & entry_points(
        group=SEAM
    ).names
    assert all("ledger" in one["inputSchema"]["properties"] for one in tools)
    own = sent(client, "tools/list", {}, path="/clusters/north/mcp").json()["result"]["tools"]
    assert {one["name"] for one in own} == {one["name"] for one in tools} - {"ledgers"}
    assert not any("ledger" in one["inputSchema"].get("properties", {}) for one in own)


@pytest.mark.parametrize("ledger", [None, "", "east", "..", "../../v1", "north/v1/usage?", "a" * 254])
def test_a_question_to_no_ledger_is_refused(client: TestClient, ledger: str | None) -> None:
    assert called(client, "jobs", ledger=ledger, **WHOLE)["isError"]


def test_a_caller_sees_what_its_token_may_see(client: TestClient) -> None:
    for named in ({}, {"ledger": "north"}):
        found = called(client, "usage", "lead", **named, **WHOLE)["structuredContent"]
        assert {row["team"] for row in found["rows"]} == {"blue"}
    assert called(client, "ledgers", "lead")["isError"]
    for token in ("job", "unknown", ""):
        for path in ("/mcp", "/clusters/north/mcp"):
            assert sent(client, "tools/list", {}, token, path).status_code in (401, 403)
    assert client.post("/clusters/north/v1/policy", headers=bearer("all")).status_code == 405
    assert client.post("/clusters/east/mcp", headers=bearer("all")).status_code == 404
