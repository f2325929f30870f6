"""The requests of OpenCost's clients, as their sources write them; the figures equal those of the accountant's API.

opencost-ui at 5babf86a, kubectl cost at 3f745369, opencost-parquet-exporter at 13fcda69."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from starlette.testclient import TestClient

from accountant.api.dependencies import Deps
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.composition import create_app
from accountant.core.settings import Settings
from accountant.ledger.protocols import Facts, NodeFacts
from accountant.runtime.job_and_task_metrics import AccountantMetrics
from gputally.server.tokens_and_grants import AllowAll
from tests.compat.opencost_day import START_MS
from tests.compat.opencost_listener import DAY, HOUR_MS, Port
from tests.http.conftest import DirectIngest

KUBECTL = {
    "namespace": "cluster,namespace",
    "deployment": "cluster,namespace,deployment",
    "controller": "cluster,namespace,controller",
    "pod": "cluster,namespace,pod",
}
"""What each subcommand of `kubectl cost` aggregates by."""
SPAN = {"start": START_MS, "end": START_MS + 24 * HOUR_MS}


@pytest.fixture
def api(port: Port) -> TestClient:
    """The accountant's own API over the same ledger and prices."""
    settings = Settings(auth="off", data=port.folder)
    keeper = Bookkeeper(port.ledger, port.clock, settings.timezone)
    assert port.book is not None
    keeper.prices.take(port.book, "file", "prices.yaml", "", port.clock.wall_ms())
    ingest = DirectIngest(port.ledger, port.clock)  # type: ignore[arg-type]
    deps = Deps(settings, port.clock, port.ledger, ingest, AllowAll(), AccountantMetrics(), keeper, lambda _: None)
    return TestClient(create_app(deps), base_url="http://127.0.0.1")


def lines(api: TestClient, path: str, by: str) -> dict[str, dict[str, Any]]:
    answer = api.get(path, params={**SPAN, "by": by})
    assert answer.status_code == 200, answer.text
    return {line["key"][by]: line for line in answer.json()["lines"]}


def costs(api: TestClient, by: str) -> dict[str, float]:
    return {name: float(line["cost"]) for name, line in lines(api, "/v1/cost", by).items()}


def hours(api: TestClient, by: str) -> dict[str, float]:
    """Return held GPU-hours."""
    held = ("busy", "allocated_idle", "allocated_unknown")
    found = lines(api, "/v1/usage", by)
    return {name: sum(line["accounts_gpu_us"][one] for one in held) / 3.6e9 for name, line in found.items()}


@pytest.mark.parametrize("path", ["/model/allocation", "/allocation/compute"])
@pytest.mark.parametrize("command", sorted(KUBECTL))
def test_kubectl_cost(port: Port, api: TestClient, command: str, path: str) -> None:
    asked = {
        "window": DAY, "aggregate": KUBECTL[command], "accumulate": "true", "includeIdle": "true", "idle": "true",
        "filterNamespaces": "",
    }  # fmt: skip
    body = port.get(path, **asked)
    (found,) = body["data"]
    assert "warning" not in body
    names = {
        "namespace": {"prod/vision", "prod/nlp"},
        "deployment": {"prod/nlp/serve", "prod/vision/__unallocated__"},
        "controller": {"prod/nlp/deployment:serve", "prod/vision/job:train"},
        "pod": {"prod/nlp/serve-abc", "prod/vision/train-0"},
    }
    assert set(found) == names[command] | {"__idle__"}
    by_namespace = {name.split("/")[1]: one for name, one in found.items() if name != "__idle__"}
    told, held = costs(api, "namespace"), hours(api, "namespace")
    for namespace in ("vision", "nlp"):
        assert by_namespace[namespace]["totalCost"] == pytest.approx(told[namespace], abs=1e-9)
        assert by_namespace[namespace]["gpuHours"] == pytest.approx(held[namespace], abs=1e-9)
    assert found["__idle__"]["totalCost"] == pytest.approx(told[""], abs=1e-9)


def test_kubectl_cost_of_one_namespace(port: Port) -> None:
    """`kubectl cost pod -n nlp`: the answer contains only this namespace."""
    asked = {"aggregate": KUBECTL["pod"], "accumulate": "true", "includeIdle": "true", "idle": "true"}
    assert set(port.costs(**asked, filterNamespaces="nlp")[0]) == {"prod/nlp/serve-abc"}
    assert set(port.costs(**asked, filterNamespaces="nl*,other")[0]) == {"prod/nlp/serve-abc"}


def test_kubectl_cost_label(port: Port, api: TestClient) -> None:
    asked = {"aggregate": "cluster,label:app", "accumulate": "true", "includeIdle": "true", "idle": "true"}
    told = costs(api, "namespace")
    assert port.costs(**asked) == [{"prod/resnet": told["vision"], "prod/bert": told["nlp"], "__idle__": told[""]}]


def test_kubectl_cost_node(port: Port, api: TestClient) -> None:
    """The client reads a list of maps, and of each asset its name, cluster and costs."""
    (found,) = port.get("/model/assets", accumulate="true", filterTypes="Node")["data"]
    told = costs(api, "node")
    assert {one["properties"]["name"]: one["totalCost"] for one in found.values()} == told
    assert told == {"n1": 180, "n2": 30, "n3": 60}
    (first, *_) = found.values()
    assert (first["type"], first["gpuCount"], first["GPUHours"], first["minutes"]) == ("Node", 3, 72, 1440)
    assert first["properties"]["cluster"] == "prod"
    assert port.get("/model/assets", accumulate="true", filterTypes="Disk")["data"] == [{}]


def test_kubectl_cost_asks_for_the_currency_and_the_cluster(port: Port) -> None:
    assert port.client.get("/model/getConfigs").json()["data"]["currencyCode"] == "EUR"
    assert port.client.get("/model/clusterInfo").json()["data"]["id"] == "prod"
    port.book = None
    assert port.client.get("/model/getConfigs").json()["data"]["currencyCode"] == ""


ACCUMULATE = {"day": 1, "hour": 24, "week": 1, "weeknow": 1, "month": 1, "quarter": 1, "all": 1}


@pytest.mark.parametrize("accumulate", sorted(ACCUMULATE))
def test_a_report_of_the_web_interface(port: Port, api: TestClient, accumulate: str) -> None:
    """The report builder always sends `metrics`; its windows end at 23:59:59."""
    asked = {
        "window": "2026-10-01T00:00:00Z,2026-10-01T23:59:59Z", "aggregate": "namespace", "includeIdle": "true",
        "metrics": "totalCost,gpuCost", "accumulate": accumulate, "filter": 'namespace:"vision"',
    }  # fmt: skip
    body = port.get("/model/allocation/compute", **asked)
    assert "warning" not in body
    assert len(body["data"]) == ACCUMULATE[accumulate]
    total = sum(found["vision"]["totalCost"] for found in body["data"])
    assert total == pytest.approx(costs(api, "namespace")["vision"] * 86_399 / 86_400)


def test_a_calendar_week_begins_on_sunday(port: Port) -> None:
    asked = {"window": "2026-09-27T00:00:00Z,2026-10-10T23:59:59Z", "aggregate": "namespace"}
    first, second = port.get(**asked, accumulate="weeknow")["data"]
    assert sorted(first) == ["nlp", "vision"]
    assert (first["vision"]["window"]["end"], second) == ("2026-10-04T00:00:00Z", {})


@pytest.mark.parametrize("window", ["today", "yesterday", "24h", "48h", "week", "lastweek", "7d", "14d"])
@pytest.mark.parametrize(
    "aggregate",
    ["cluster", "node", "namespace", "controllerKind", "controller", "daemonset", "deployment", "job", "service",
     "statefulset", "pod", "container", ""],
)  # fmt: skip
def test_every_choice_of_the_web_interface_is_answered(port: Port, window: str, aggregate: str) -> None:
    for accumulate in ("true", "false", "day"):
        found = port.get("/model/allocation/compute", window=window, aggregate=aggregate, accumulate=accumulate)
        assert found["data"]


def test_the_web_interfaces_assets_are_one_map(port: Port, api: TestClient) -> None:
    """The interface keeps entries with a type and a cost, and reads when each ended."""
    asked = {"aggregate": "type", "includeIdle": "true", "accumulate": "true", "step": "1d"}
    found = port.get("/model/assets", **asked)["data"]
    assert {one["properties"]["name"]: one["totalCost"] for one in found.values()} == costs(api, "node")
    assert {one["end"] for one in found.values()} == {"2026-10-02T00:00:00Z"}
    (only,) = port.get("/model/assets", **asked, filter='name:"n1"')["data"].values()
    assert only["properties"]["name"] == "n1"
    assert port.get("/model/assets", **asked, filter='type:"Disk"')["data"] == {}


def test_assets_without_a_price_are_named(port: Port) -> None:
    port.book = None
    body = port.get("/assets")
    assert {one["totalCost"] for one in body["data"].values()} == {0}
    assert "cost 0 means unpriced for NVIDIA A100" in body["warning"]


@pytest.mark.parametrize(
    ("field", "search", "values"),
    [
        ("namespace", "", ["nlp", "vision"]),
        ("node", "2", ["n2"]),
        ("controllerName", "", ["serve", "train"]),
        ("controllerKind", "JOB", ["job"]),
        ("label:app", "", ["bert", "resnet"]),
    ],
)
def test_the_web_interfaces_lists_to_choose_from(port: Port, field: str, search: str, values: list[str]) -> None:
    asked = {"field": field, "search": search} if search else {"field": field}
    assert port.get("/model/allocation/autocomplete", **asked, limit="25")["data"] == values
    assert port.get("/model/allocation/autocomplete", **asked, limit="1")["data"] == values[:1]
    assert port.get("/model/allocation/autocomplete", **asked, limit="9" * 5_000)["data"] == values


@pytest.mark.parametrize(
    "asked",
    [
        {"metrics": "totalCost"}, {"shareTenancyCosts": "true"}, {"external": "true"}, {"reconcile": "false"},
        {"includeSharedCostBreakdown": "true"}, {"sharelb": "true"}, {"resolution": "1m"}, {"filterNamespaces": ""},
    ],
)  # fmt: skip
def test_what_opencost_ignores_is_ignored(port: Port, asked: dict[str, str]) -> None:
    assert port.get(aggregate="namespace", **asked) == port.get(aggregate="namespace")


@pytest.mark.parametrize("name", ["shareNamespaces", "shareLabels", "anything"])
def test_what_would_move_costs_elsewhere_is_named(port: Port, name: str) -> None:
    body = port.get(aggregate="namespace", **{name: "kube-system"})
    assert body["warning"] == f"the parameter {name} is not supported and has no effect"
    assert body["data"] == port.get(aggregate="namespace")["data"]


def test_annotations_and_services_are_nobodys(port: Port) -> None:
    body = port.get(aggregate="annotation:x")
    assert (set(body["data"][0]), body["warning"]) == (
        {"__unallocated__"},
        "the ledger does not store annotations: no allocation has one",
    )
    body = port.get(aggregate="namespace", filter='services:"web"|annotation[a]:"b"|namespace:"nlp"')
    assert set(body["data"][0]) == {"nlp"}
    assert "services is requested, but the ledger does not store it" in body["warning"]


def test_idle_shared_by_weight_is_idle_shared(port: Port) -> None:
    assert port.costs(aggregate="namespace", shareIdle="weighted") == port.costs(
        aggregate="namespace", shareIdle="true"
    )


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"sort": "totalCost"}, ["__idle__", "vision", "nlp"]),
        ({"sortBy": "totalCost", "sortByOrder": "asc"}, ["nlp", "vision", "__idle__"]),
        ({"sort": "name", "order": "desc"}, ["vision", "nlp", "__idle__"]),
        ({"limit": "2"}, ["__idle__", "nlp"]),
        ({"sort": "gpuHours", "offset": "1", "limit": "1"}, ["vision"]),
        ({"offset": "5"}, []),
    ],
)
def test_sorting_and_pages(port: Port, asked: dict[str, str], names: list[str]) -> None:
    body = port.get(aggregate="namespace", includeIdle="true", **asked)
    assert list(body["data"][0]) == names
    left = 3 - len(names)
    assert body.get("warning", "") == (f"{left} allocations are left out, because of limit and offset" if left else "")


def test_csv(port: Port, api: TestClient) -> None:
    answer = port.client.get("/allocation", params={"window": DAY, "aggregate": "namespace", "format": "csv"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(answer.text)))
    told, held = costs(api, "namespace"), hours(api, "namespace")
    assert {row["name"]: float(row["totalCost"]) for row in rows} == {name: told[name] for name in ("nlp", "vision")}
    assert {row["name"]: float(row["gpuHours"]) for row in rows} == {name: held[name] for name in ("nlp", "vision")}
    assert {row["windowStart"] for row in rows} == {"2026-10-01T00:00:00Z"}


PROVIDER_IDS = {
    "n1": ("aws:///eu-central-1a/i-0fea4fd46592d050b", "i-0fea4fd46592d050b"),
    "n2": ("gce://project/us-central1-a/gke-n2", "gke-n2"),
    "n3": ("azure:///subscriptions/s/resourceGroups/g/n3", "azure:///subscriptions/s/resourceGroups/g/n3"),
}
"""As the Node has it, and as OpenCost shows it."""


def test_the_machines_of_a_cloud_have_its_names(port: Port) -> None:
    asked = {"aggregate": "node", "accumulate": "true"}
    assert not any("providerID" in one["properties"] for one in port.get(**asked)["data"][0].values())
    nodes = tuple(NodeFacts("prod", name, provider_id=given) for name, (given, _) in PROVIDER_IDS.items())
    port.ledger.observe(Facts(nodes=nodes), port.clock.wall_ms())
    shown = {name: shown for name, (_, shown) in PROVIDER_IDS.items()}
    told = port.get(**asked)["data"][0]
    assert {name: one["properties"]["providerID"] for name, one in told.items()} == {
        name: shown[name] for name in ("n1", "n2")
    }
    (whole,) = port.get(aggregate="cluster", accumulate="true")["data"][0].values()
    assert "providerID" not in whole["properties"]  # of two machines
    assets = port.get("/model/assets")["data"].values()
    assert {one["properties"]["name"]: one["properties"]["providerID"] for one in assets} == shown
    (only,) = port.get("/model/assets", filter=f'providerID:"{shown["n1"]}"')["data"].values()
    assert only["properties"]["name"] == "n1"
