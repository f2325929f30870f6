"""Every parameter of every route, and every field of every body, at the edges of its kind: an answer, or a refusal with
the place of the fault, and never a defect.

The routes come from the application, so that a route or a parameter without an entry here fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from httpx2 import Response
from starlette.testclient import TestClient

from accountant.composition import Service
from gputally.base.clock import VirtualClock
from tests import empty_ledger
from tests.attacks.edges import edges_of, mutations
from tests.attacks.valid_requests import BEGIN, BODIES, PRICES, READS, WRITES, address, sent
from tests.fakes.memory_ledger import MINUTE_MS, NOW_MS
from tests.hypothesis_examples import examples
from tests.usage_records import batch, interval, pod_facts, pod_holder

pytestmark = pytest.mark.thorough


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
