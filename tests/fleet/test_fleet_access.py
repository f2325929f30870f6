"""The callers that each route of the fleet's server accepts, and every parameter of every route at the edges of its
kind. The routes come from the application: a new one fails without a row here."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from accountant.core.settings import Settings
from accountant.fleet import fleet_routes
from accountant.fleet.fleet_server import FleetService
from gputally.base.clock import VirtualClock
from gputally.server.tokens_and_grants import sha256
from tests.attacks.edges import TEXTS, edges_of
from tests.fleet.conftest import TwoLedgers
from tests.lake.comparison_queries import SPAN

HERE = "http://127.0.0.1"
OPEN, OF_ALL, OF_TEAMS = "open", "of all teams", "of one's teams"
PASSES = {
    "/livez": OPEN, "/readyz": OPEN, "/metrics": OF_TEAMS, "/v1/ledgers": OF_ALL, "/v1/usage": OF_TEAMS,
    "/v1/cost": OF_TEAMS, "/v1/report": OF_ALL, "/": OF_TEAMS, "/fleet": OF_ALL, "/fleet/team/{team:path}": OF_TEAMS,
    **dict.fromkeys(("/fleet/jobs", "/fleet/jobs.csv", "/fleet/jobs.parquet"), OF_TEAMS),
    **dict.fromkeys(("/fleet/nodes", "/fleet/nodes.csv", "/fleet/nodes.parquet"), OF_ALL),
}  # fmt: skip
"""Who passes, by route: everybody, those who may read all teams, or those who may read some. A new route has to be in
this table."""
BESIDE = {
    "/opencost/allocation?window=1d": OF_ALL, "/opencost/x": OF_ALL, "/clusters/north/opencost/allocation": OF_ALL,
    "/clusters/east/": OF_ALL, "/clusters/north": OF_ALL, "/clusters/north/v1/check": OF_ALL,
    "/clusters//v1/usage": OF_ALL, "/clusters/north/v1/statement": OF_TEAMS, "/clusters/north/jobs": OF_TEAMS,
    "/clusters/north/nodes": OF_ALL, "/clusters/north/v1/windows": OF_ALL,
}  # fmt: skip
"""Addresses that other applications below the server answer."""
CALLERS = {
    "": set(), "unknown": set(), "all": {OF_ALL, OF_TEAMS}, "admin": {OF_ALL, OF_TEAMS}, "lead": {OF_TEAMS},
    "node": set(), "importer": set(), "controller": set(), "job": set(),
}  # fmt: skip
"""What each token passes; "" for none."""
RIGHTS = {
    "all": "scopes: [read]", "admin": "scopes: [admin]", "lead": "scopes: [read], teams: [blue]",
    "node": "scopes: [ingest], cluster: north, node: n", "importer": "scopes: [import], cluster: north",
    "controller": "scopes: [policy]", "job": "scopes: [progress]",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(logs: list[Any]) -> None:
    """Log nothing to the terminal."""


def client_of(two: TwoLedgers, **settings: Any) -> TestClient:
    service = FleetService(Settings(**settings), two.fleet, VirtualClock(SPAN[1] + 60_000))
    return TestClient(service.app, base_url=HERE, follow_redirects=False, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def guarded(two: TwoLedgers, tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    tokens = tmp_path_factory.mktemp("fleet") / "tokens.yaml"
    rows = (f"  - {{name: {name}, token_sha256: {sha256(name)}, {right}}}\n" for name, right in RIGHTS.items())
    tokens.write_text("tokens:\n" + "".join(rows))
    limits = {"requests_per_second": 1_000, "burst": 10_000}
    return client_of(two, auth="tokens", tokens=tokens, limits=limits)


def routes() -> list[APIRoute]:
    return [route for route in fleet_routes.ROUTES if isinstance(route, APIRoute)]


def test_every_route_says_whom_it_lets_pass() -> None:
    assert {route.path for route in routes()} == set(PASSES)
    assert {method for route in routes() for method in route.methods or ()} == {"GET"}


@pytest.mark.parametrize("caller", CALLERS, ids=lambda name: name or "nobody")
def test_every_route_with_every_token(guarded: TestClient, caller: str) -> None:
    headers = {"Authorization": f"Bearer {caller}"} if caller else {}
    for path, passing in {**PASSES, **BESIDE}.items():
        found = guarded.get(path.replace("{team:path}", "blue"), headers=headers).status_code
        if passing == OPEN or passing in CALLERS[caller]:
            assert found not in (401, 403, 500), (caller, path)
        else:
            assert found == (401 if caller in ("", "unknown") else 403), (caller, path)


@pytest.mark.real
@pytest.mark.parametrize("route", routes(), ids=lambda route: route.path)
def test_every_parameter_of_every_route_survives_its_edges(two: TwoLedgers, route: APIRoute) -> None:
    client = client_of(two, auth="off")
    for parameter in get_flat_params(route.dependant):
        name = parameter.alias
        for edge in TEXTS if name == "ledger" else edges_of(name):
            in_path = "{" + name + ":path}" in route.path
            path = route.path.replace("{" + name + ":path}", quote(edge))
            found = client.get(path, params={} if in_path else {name: edge})
            assert found.status_code < 500, (route.path, name, edge, found.text[:300])
