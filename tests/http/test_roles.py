"""Every route that can be asked, as every role, on a real ledger of two teams: a lead never sees a word of the other.

What must not be seen carries a mark in every name it has (team, namespace, job, pod, user, budget, decision). The walk
takes the routes from the application, so one that is added later is walked too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.ledger.protocols import JobKey
from agent.wire import PodFacts, UsageInterval
from gputally.server.tokens_and_grants import sha256
from tests import fresh
from tests.http.conftest import NOW_MS
from tests.http.opened import OPEN, routes
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

MINUTE_MS = 60_000
OURS, THEIRS = "vision", "zebra"
"""THEIRS is the mark: it stands in no text of the product."""
ROLES = {
    "lead": "scopes: [read], teams: [vision]",
    "lead-who-reports": "scopes: [read, progress], teams: [vision]",
    "reader": "scopes: [read]",
    "admin": "scopes: [admin]",
    "agent": "scopes: [ingest], cluster: prod, node: node-1",
}


def pod(kit: Any, number: int, team: str) -> tuple[UsageInterval, PodFacts]:
    begin = kit.now_ms - 20 * MINUTE_MS
    name, uid = f"{team}-train-0", f"uid-{number}"
    holder = pod_holder(name, team, uid, "main")
    row = interval(begin, f"GPU-{number}", holder, span_ms=10 * MINUTE_MS, busy_us=300_000_000)
    facts = pod_facts(
        name, begin, namespace=team, node="node-1", uid=uid, workload=f"Job/{team}-train",
        queue_ref=f"policy:{team}-queue", created_ms=begin - MINUTE_MS, scheduled_ms=begin, started_ms=begin,
        labels={"gputally.dev/user": f"{team}-user"}, requests={"nvidia.com/gpu": "1"},
    )  # fmt: skip
    return row, facts


@pytest.fixture
def house(tmp_path, clock, kit) -> Iterator[TestClient]:
    entries = "".join(f"  - {{name: {name}, token_sha256: {sha256(name)}, {what}}}\n" for name, what in ROLES.items())
    (tmp_path / "tokens.yaml").write_text("tokens:\n" + entries)
    (tmp_path / "inventory.yaml").write_text(
        "schema: 1\ncluster: prod\nnamespaces:\n"
        + "".join(f"  - {{name: {team}, team: {team}}}\n" for team in (OURS, THEIRS))
    )
    queues = "".join(f"  - {{name: {team}-queue, team: {team}, deserved: 1}}\n" for team in (OURS, THEIRS))
    budgets = "".join(f"  - {{name: {team}-budget, team: {team}, limit: 1}}\n" for team in (OURS, THEIRS))
    (tmp_path / "policy.yaml").write_text(f"schema: 1\nqueues:\n{queues}budgets:\n{budgets}")
    (tmp_path / "deliveries.yaml").write_text(
        f"schema: 1\ndestinations:\n  disk: {{folder: {tmp_path}/out}}\n"
        f"reports:\n  - {{of: week, forms: [csv], team: {THEIRS}, to: [disk]}}\n"
    )
    (tmp_path / "prices.yaml").write_text(price_book_text(H100="2.40"))
    files = {name: tmp_path / f"{name}.yaml" for name in ("prices", "tokens", "inventory", "policy", "deliveries")}
    settings = Settings(
        data=fresh.data(tmp_path / "data"),
        linger_ms=0,
        open_metrics=False,
        metrics_token=tmp_path / "metrics.token",
        **files,
    )
    (tmp_path / "metrics.token").write_text("scrape\n")
    with Service(settings, clock) as service:
        client = TestClient(service.app, base_url="http://127.0.0.1", follow_redirects=False)
        (first, one), (second, two) = pod(kit, 1, OURS), pod(kit, 2, THEIRS)
        sent = kit.encoded(batch([first, second], [one, two], cluster="prod", node="node-1"))
        assert client.post("/v1/usage", content=sent, headers=kit.bearer("agent")).status_code == 200
        decision = {
            "id": "d1", "at_ms": kit.now_ms - 1, "kind": "preemption", "target": "kai", "mode": "enforce",
            "subject": f"Job/{THEIRS}/{THEIRS}-train", "reason": f"{THEIRS} borrowed", "policy_version": "p",
        }  # fmt: skip
        assert client.post("/v1/decisions", json=[decision], headers=kit.bearer("admin")).status_code == 200
        for team in (OURS, THEIRS):
            credit = {
                "month": "2026-11",
                "team": team,
                "amount": "-1.50",
                "reason": f"{team} lost a day",
                "approved_by": "cfo",
            }
            assert client.post("/v1/adjustments", json=credit, headers=kit.bearer("admin")).status_code == 200
        assert service.deliveries is not None
        service.deliveries.run()
        yield client


def addresses(client: TestClient) -> list[str]:
    """Every GET route with every value its parts can have here."""
    teams = (OURS, THEIRS)
    found = []
    for method, path in sorted(routes(client.app) - OPEN):
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
def test_a_lead_never_sees_a_word_of_another_team(house, kit, role):
    seen = 0
    for address in addresses(house):
        # What a question asks for is the same in both; whether it is put in words depends on the address alone.
        for accept in ("application/json", "text/html") if "?" not in address else ("application/json",):
            answer = house.get(address, headers={**kit.bearer(role), "Accept": accept})
            assert answer.status_code < 500, address
            told = answer.text.replace(f'"instance":{json.dumps(address.partition("?")[0])}', "")
            if answer.status_code == 200:
                seen += OURS in told
                assert THEIRS not in told, address
            elif THEIRS not in address:
                assert THEIRS not in told, address
    assert seen > 10, "the walk has seen its own team's figures"


def test_who_may_see_all_does(house, kit):
    """The mark is there to be found: on most of what a lead may read too."""
    marked = [
        address
        for address in addresses(house)
        if THEIRS in house.get(address, headers=kit.bearer("admin")).text and THEIRS not in address
    ]
    assert len(marked) > 12
    assert {"/", "/jobs", "/v1/jobs", "/v1/waits", "/v1/budgets", "/v1/deliveries", "/decisions"} <= set(marked)


def test_an_agent_reads_nothing(house, kit):
    for address in addresses(house):
        assert house.get(address, headers=kit.bearer("agent")).status_code == 403, address


def test_prometheus_has_a_token_of_its_own_in_a_file(house, tmp_path, kit):
    def status(token):
        return house.get("/metrics", headers=kit.bearer(token)).status_code

    secret = tmp_path / "metrics.token"
    assert f'team="{THEIRS}"' in house.get("/metrics", headers=kit.bearer("scrape")).text
    assert 'team="' not in house.get("/metrics").text
    assert status("scrap") == 401
    assert house.post("/v1/usage", content=b"{}", headers=kit.bearer("scrape")).status_code == 403
    secret.write_text("renewed")
    assert (status("scrape"), status("renewed")) == (401, 200)
    secret.write_text("")
    assert status("renewed") == 401
    assert 'team="' not in house.get("/metrics", headers=kit.bearer("")).text
    secret.unlink()
    assert status("renewed") == 503
    assert status("reader") == 200
