"""Every parameter of every route, and every field of every body, at the edges of its kind: an answer, or a refusal with
the place of the fault, and never a defect.

The routes come from the application, so that a route or a parameter without an entry here fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from httpx2 import Response
from starlette.testclient import TestClient

from accountant.composition import ROUTES, Service
from gputally.base.clock import VirtualClock
from tests import empty_ledger
from tests.attacks.edges import edges_of, mutations
from tests.fakes.memory_ledger import MINUTE_MS, NOW_MS
from tests.hypothesis_examples import examples
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

pytestmark = pytest.mark.thorough
BEGIN = NOW_MS - 60 * MINUTE_MS
PRICES = price_book_text(H100=2.5)
NORMAL = {
    "month": "2026-10", "id": "prod~vision~Job~train", "name": "ledger-20261101T000000Z", "proposal": "0" * 16,
    "cluster": "prod", "node": "node-1", "team": "vision", "number": "1", "at_ms": str(BEGIN), "source": "slurm",
    "reason": "because",
}  # fmt: skip
"""Valid values of parameters that a route requires."""
_EPOCH = "01930000-0000-7000-8000-000000000000"
_ROW = msgspec.to_builtins(
    interval(BEGIN, "GPU-1", pod_holder("train-0", "vision"), span_ms=MINUTE_MS, energy_uj=1, memory_mib_s=1)
) | {"seq": 1}
_FACT = msgspec.to_builtins(
    pod_facts("train-0", BEGIN, namespace="vision", created_ms=BEGIN, scheduled_ms=BEGIN, started_ms=BEGIN, priority=1)
) | {"seq": 2}
_BATCH = {
    "schema": 1, "cluster": "prod", "node": "node-1", "boot_id": "b", "epoch": _EPOCH, "first_seq": 1, "oldest_seq": 1,
    "intervals": [_ROW], "facts": [_FACT], "skipped": [],
}  # fmt: skip
_IMPORT = {**_BATCH, "epoch": f"import:slurm:{BEGIN:014}", "intervals": [{**_ROW, "method": "imported"}], "facts": []}
_SPAN = {"start": "2026-11-01T00:00:00Z", "end": "2026-11-01T01:00:00Z"}
_CREDIT = {"node": "node-1", **_SPAN, "cluster": "prod", "share": "0.5"}
_DECISION = {
    "id": "d", "at_ms": BEGIN, "kind": "weight", "target": "kai", "subject": "vision", "mode": "dry-run", "reason": "r",
    "policy_version": "v",
}  # fmt: skip
_POLICY = {
    "schema": 1, "queues": [{"name": "vision", "deserved": 4, "weight": 1, "team": "vision"}],
    "window": {"kind": "sliding", "size": "7d", "half_life": "1d"}, "measure": "allocated",
}  # fmt: skip
_INVOICE = {
    "schema": 1, "currency": "USD", "source": "cloud",
    "lines": [{"item": "gpu", "gpu_model": "H100", "gpu_hours": "1.5", "amount": "3.75"}],
}  # fmt: skip
BODIES: dict[str, Any] = {
    "/v1/usage": _BATCH,
    "/v1/imports/usage": _IMPORT,
    "/v1/imports": {
        "cluster": "prod",
        "source": "slurm",
        "epoch": _IMPORT["epoch"],
        "start_ms": BEGIN,
        "end_ms": NOW_MS,
        "sent_us": 1,
        "nodes": 1,
        "origin": "o",
    },
    "/v1/pods": {"cluster": "prod", "source": "s", "pods": [_FACT]},
    "/v1/gpus/move": {"cluster": "prod", "node": "node-2", "gpus": ["GPU-1"], "since": _SPAN["end"], "reason": "r"},
    "/v1/gpus/retire": {"cluster": "prod", "node": "node-1", "since": _SPAN["end"], "reason": "r"},
    "/v1/periods/{month}/close": {"reason": "r", "acknowledge": ["coverage"]},
    "/v1/periods/{month}/reopen": {"reason": "r"},
    "/v1/periods/{month}/publish": {"reason": "r"},
    "/v1/adjustments": {"month": "2026-10", "team": "vision", "amount": "1.50", "reason": "r", "approved_by": "a"},
    "/v1/corrections": {},
    "/v1/credits/preview": _CREDIT,
    "/v1/credits": {**_CREDIT, "reason": "r", "approved_by": "a"},
    "/v1/periods/{month}/proposals/{proposal}/take": {"reason": "r"},
    "/v1/periods/{month}/proposals/{proposal}/refuse": {"reason": "r"},
    "/v1/reconciliation/{month}": _INVOICE,
    "/v1/prices/preview": PRICES,
    "/v1/prices": PRICES,
    "/v1/policy": _POLICY,
    "/v1/decisions": [_DECISION],
    "/v1/jobs/{id}/progress": [{"epoch": 1, "at": _SPAN["start"]}],
    "/v1/backups": {},
    "/v1/deliveries/again": {"key": "k", "reason": "r"},
    "/v1/clock/accept": {},
    "/v1/clock/heal": {"reason": "r"},
    "/node/{cluster}/{node}/gpus": "gpu=GPU-1&reason=r",
}
"""A valid body of every route that takes one; a text is sent as it is."""
API_ROUTES = [route for route in ROUTES if isinstance(route, APIRoute)]
READS = [route for route in API_ROUTES if "GET" in (route.methods or ())]
WRITES = [route for route in API_ROUTES if "GET" not in (route.methods or ())]


@pytest.fixture(autouse=True)
def _quiet(logs: list[Any]) -> None:
    """Log nothing to the terminal."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """An accountant with an hour of a job, whose clock stands still."""
    from accountant.core.settings import Settings

    folder = tmp_path_factory.mktemp("edges")
    (folder / "prices.yaml").write_text(PRICES)
    settings = Settings(data=empty_ledger.data(folder / "data"), linger_ms=0, auth="off", prices=folder / "prices.yaml")
    rows = [
        interval(BEGIN + at * MINUTE_MS, "GPU-9", pod_holder("train-0", "vision", "p"), span_ms=MINUTE_MS)
        for at in range(60)
    ]
    facts = [pod_facts("train-0", BEGIN, namespace="vision", node="node-9", uid="p", workload="Job/train")]
    with Service(settings, VirtualClock(NOW_MS)) as service:
        first = batch(rows, facts, cluster="prod", node="node-9", epoch="e")
        service.ingest.submit(msgspec.json.encode(first)).result()
        with TestClient(service.app, base_url="http://127.0.0.1", follow_redirects=False) as opened:
            yield opened


def address(route: APIRoute, changed: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return path and query of a request with these values, and with valid values of what the route requires."""
    path, query = route.path, {}
    for parameter in get_flat_params(route.dependant):
        name = parameter.alias
        for marker in ("{" + name + "}", "{" + name + ":path}"):
            if marker in path:
                path = path.replace(marker, quote(changed.get(name, NORMAL[name]), safe=""))
                break
        else:
            if name in changed:
                query[name] = changed[name]
            elif parameter.field_info.is_required():
                query[name] = NORMAL[name]
    return path, query


def checked(answer: Response, sent: object) -> None:
    """Fail on an answer that is a defect: a 500, or a refusal that reads like success."""
    may = answer.status_code < 500 or answer.json()["type"].rpartition(":")[2] in ("cannot-render", "no-price-book")
    assert may, (answer.status_code, answer.text[:500], sent)


@pytest.mark.parametrize("route", READS, ids=lambda route: route.path)
def test_every_parameter_of_every_read_survives_its_edges(client: TestClient, route: APIRoute) -> None:
    names = [parameter.alias for parameter in get_flat_params(route.dependant)]
    cases = [{}] + [{name: edge} for name in names for edge in edges_of(name)]
    if {"start", "end"} <= set(names):
        edges = ("0001-01-01", "1970-01-01", "2026-11-01", "9998-12-31", "9999-12-31", "-1", str(2**63 - 1))
        cases += [{"start": start, "end": end} for start in edges for end in edges]
    for changed in cases:
        path, query = address(route, changed)
        checked(client.get(path, params=query), changed)


@pytest.mark.parametrize("route", WRITES, ids=lambda route: f"{min(route.methods)} {route.path}")
def test_every_field_of_every_body_survives_its_edges(client: TestClient, route: APIRoute) -> None:
    method, body = min(route.methods or ()), BODIES[route.path]
    for parameter in get_flat_params(route.dependant):
        for edge in edges_of(parameter.alias):
            path, query = address(route, {parameter.alias: edge})
            checked(client.request(method, path, params=query, content=sent(body)), {parameter.alias: edge})
    path, query = address(route, {})
    changes = [body] if isinstance(body, str) else mutations(body)
    for number, changed in enumerate(changes[:: examples(3, 1)]):
        is_batch = "first_seq" in body and isinstance(changed, dict) and changed.get("epoch") == body["epoch"]
        # An outbox's number counts once, so each batch is of an outbox of its own.
        one = {**changed, "epoch": f"{body['epoch'][:-6]}{number:06}"} if is_batch else changed
        checked(client.request(method, path, params=query, content=sent(one)), one)


def sent(body: Any) -> bytes:
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()
