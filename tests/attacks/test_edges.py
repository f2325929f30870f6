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
from accountant.wire.policy_models import Policy
from gputally.base.clock import VirtualClock
from tests import empty_ledger
from tests.attacks.edges import (
    EDGES,
    OPENCOST_PARAMETERS,
    PROMQL_DURATIONS,
    PROMQL_NUMBERS,
    edges_of,
    mutations,
)
from tests.attacks.valid_requests import BEGIN, BODIES, PRICES, READS, WRITES, address, sent
from tests.fakes.memory_ledger import MINUTE_MS, NOW_MS
from tests.hypothesis_examples import examples
from tests.usage_records import batch, interval, pod_facts, pod_holder

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def _quiet(logs: list[Any]) -> None:
    """Log nothing to the terminal."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """An accountant with an hour of a job and a queue, whose clock stands still."""
    from accountant.core.settings import Settings

    folder = tmp_path_factory.mktemp("edges")
    (folder / "prices.yaml").write_text(PRICES)
    settings = Settings(
        data=empty_ledger.data(folder / "data"), linger_ms=0, auth="off", prices=folder / "prices.yaml",
        kai_usage={"listen": "127.0.0.1:0"}, opencost={"listen": "127.0.0.1:0"},
    )  # fmt: skip
    rows = [
        interval(BEGIN + at * MINUTE_MS, "GPU-9", pod_holder("train-0", "vision", "p"), span_ms=MINUTE_MS)
        for at in range(60)
    ]
    facts = [pod_facts("train-0", BEGIN, namespace="vision", node="node-9", uid="p", workload="Job/train")]
    with Service(settings, VirtualClock(NOW_MS)) as service:
        first = batch(rows, facts, cluster="prod", node="node-9", epoch="e")
        service.ingest.submit(msgspec.json.encode(first)).result()
        queue = {"name": "vision", "deserved": 4, "team": "vision", "refs": ["kai:vision"]}
        service.ledger.put_policy(Policy.model_validate({"schema": 1, "queues": [queue]}), NOW_MS)
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> TestClient:
    return TestClient(service.app, base_url="http://127.0.0.1", follow_redirects=False)


@pytest.fixture(scope="module")
def ports(service: Service) -> dict[str, TestClient]:
    """A client of each port for other programs."""
    return {one.what: TestClient(one.app, base_url="http://127.0.0.1") for one in service.listeners}


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
    step = examples(3, 1)  # the next route begins at the next case, so that three routes try all
    for changed in cases[READS.index(route) % step :: step]:
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


OPENCOST_PATHS = (
    "/allocation",
    "/allocation/summary",
    "/allocation/autocomplete",
    "/assets",
    "/model/allocation/compute",
)


@pytest.mark.parametrize("path", OPENCOST_PATHS)
def test_every_parameter_of_the_opencost_port_survives_its_edges(ports: dict[str, TestClient], path: str) -> None:
    port = ports["opencost"]
    valid = {"window": "1d", "field": "namespace"} if path.endswith("autocomplete") else {"window": "1d"}
    assert port.get(path, params=valid).status_code == 200, "the changed queries reach what they are meant for"
    for name, kind in OPENCOST_PARAMETERS.items():
        for edge in EDGES[kind][:: examples(3, 1)]:
            answer = port.get(path, params={**valid, name: edge})
            assert answer.status_code in (200, 400), (name, edge, answer.status_code, answer.text[:300])


PLAIN = "sum_over_time((kai_queue_allocated_gpus)[{window}:{step}])"
DECAYED = "sum_over_time((kai_queue_allocated_gpus * (0.5^(({reference} - time()) / {half_life})))[{window}:{step}])"
KAI_VALID = {"window": "1d", "step": "1m", "reference": str(NOW_MS // 1000), "half_life": "86400"}
KAI_EDGES = {
    "window": PROMQL_DURATIONS, "step": PROMQL_DURATIONS, "reference": PROMQL_NUMBERS, "half_life": PROMQL_NUMBERS,
}  # fmt: skip


@pytest.mark.parametrize("form", [PLAIN, DECAYED], ids=["plain", "decayed"])
def test_every_part_of_kais_queries_survives_its_edges(ports: dict[str, TestClient], form: str) -> None:
    port = ports["kai_usage"]
    at = str(NOW_MS // 1000 - 60)

    def asked(query: str, time: str) -> Response:
        return port.get("/api/v1/query", params={"query": query, "time": time})

    valid = form.format(**KAI_VALID)
    assert asked(valid, at).status_code in (200, 503), "the changed queries reach what they are meant for"
    assert asked(valid, at).json().get("errorType") in (None, "stale")
    cases = [(form.format(**{**KAI_VALID, name: edge}), at) for name, edges in KAI_EDGES.items() for edge in edges]
    cases += [(valid, time) for time in (*PROMQL_NUMBERS, *EDGES["instant"], *EDGES["fraction"])]
    for query, time in cases:
        answer = asked(query, time)
        refused = answer.status_code in (400, 422) or answer.json().get("errorType") in ("stale", "unavailable")
        assert answer.status_code == 200 or refused, (query, time, answer.text[:300])
        assert "NaN" not in answer.text.replace("not a number", "") or answer.status_code == 400, (query, time)
