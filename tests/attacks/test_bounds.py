"""Every route that takes a span knows both its ends before it works, and asks its price.

The routes come from the application: a new route with a span fails unless it bounds and prices it, or UNPRICED says why
it needs no price."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from accountant.compat import kai_usage_api, opencost_api
from accountant.composition import ROUTES, Service
from accountant.core.settings import Limits, Settings
from gputally.base.clock import VirtualClock
from tests import empty_ledger
from tests.fakes.memory_ledger import MINUTE_MS, NOW_MS
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

DAYS = 30
UNPRICED = {
    "/v1/decisions": "it reads at most `limit` rows by their instant",
    "/v1/report": "priced like /v1/statement; its month may exceed the price",
}
REGISTERS = {"/audit", "/audit.csv"}
"""Routes whose span chooses acts, which are read in blocks, and no records."""
ENDS = {"start", "end", "size"}
SPANS = [
    route
    for route in ROUTES
    if isinstance(route, APIRoute)
    and route.path not in REGISTERS
    and ENDS & {param.alias for param in get_flat_params(route.dependant)}
]
BEGIN = NOW_MS - 60 * MINUTE_MS


@pytest.fixture(autouse=True)
def _quiet(logs: list[Any]) -> None:
    """Log nothing to the terminal."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """An accountant with two GPU-hours of a job, where a query may add up one."""
    folder = tmp_path_factory.mktemp("bounds")
    (folder / "prices.yaml").write_text(price_book_text(H100=2.5))
    settings = Settings(
        data=empty_ledger.data(folder / "data"), linger_ms=0, auth="off", prices=folder / "prices.yaml",
        limits=Limits(span_days=DAYS, question_gpu_hours=1, window_gpu_hours=1),
        kai_usage={"listen": "127.0.0.1:0"}, opencost={"listen": "127.0.0.1:0"},
    )  # fmt: skip
    rows = [
        interval(BEGIN + at * MINUTE_MS, gpu, pod_holder("train-0", "vision", "p"), span_ms=MINUTE_MS)
        for gpu in ("GPU-8", "GPU-9")
        for at in range(60)
    ]
    facts = [pod_facts("train-0", BEGIN, namespace="vision", node="node-9", uid="p", workload="Job/train")]
    with Service(settings, VirtualClock(NOW_MS)) as running:
        running.ingest.submit(
            msgspec.json.encode(batch(rows, facts, cluster="prod", node="node-9", epoch="e"))
        ).result()
        yield running


@pytest.fixture(scope="module")
def client(service: Service) -> TestClient:
    return TestClient(service.app, base_url="http://127.0.0.1")


def faults(client: TestClient, route: APIRoute, **query: str) -> set[str]:
    """Return the parameters that the refusal of a span names."""
    answer = client.get(route.path.replace("{id}", "prod~vision~Job~train"), params=query)
    assert answer.status_code == 422, (route.path, query, answer.text[:300])
    return {fault["at"] for fault in answer.json()["errors"]}


@pytest.mark.parametrize("route", SPANS, ids=lambda route: route.path)
def test_a_span_with_one_open_end_is_refused_by_name(client: TestClient, route: APIRoute) -> None:
    names = {param.alias for param in get_flat_params(route.dependant)}
    if "end" in names:
        assert faults(client, route, end="9999-12-31") == {"end"}
        assert faults(client, route, start="1970-01-01") == {"end"}
        assert faults(client, route, start="2026-11-01", end="2026-12-15") == {"end"}
    if "size" in names:
        assert faults(client, route, size="31d") == {"size"}
        assert faults(client, route, size="36500d") == {"size"}


@pytest.mark.parametrize("route", [each for each in SPANS if each.path not in UNPRICED], ids=lambda route: route.path)
def test_a_dear_span_is_refused_by_name_before_it_is_read(client: TestClient, route: APIRoute) -> None:
    end_or_size = {"size": "7d"} if route.path == "/v1/windows" else {"start": "2026-11-01", "end": "2026-11-20"}
    assert faults(client, route, **end_or_size) <= {"end", "size"}


def test_the_other_ports_bound_and_price_their_windows(service: Service) -> None:
    kai, opencost = (TestClient(listener.app, base_url="http://127.0.0.1") for listener in service.listeners)
    usage = "sum_over_time((kai_queue_allocated_gpus)[{}:1m])"
    service.ledger.put_policy(_policy(), NOW_MS)
    for window in ("31d", "36500d", "29d"):
        assert kai.get("/api/v1/query", params={"query": usage.format(window)}).status_code == 422
    for path in ("/allocation", "/allocation/summary", "/assets"):
        for window in ("31d", "9999d", "2026-11-01T00:00:00Z,9999-12-31T00:00:00Z", "29d"):
            assert opencost.get(path, params={"window": window}).status_code == 400, (path, window)
    assert {kai_usage_api.__name__, opencost_api.__name__} == {
        f"accountant.compat.{listener.what}_api" for listener in service.listeners
    }


def _policy() -> Any:
    from accountant.wire.policy_models import Policy

    return Policy.model_validate({"schema": 1, "queues": [{"name": "vision", "deserved": 4, "team": "vision"}]})
