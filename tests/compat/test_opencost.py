"""OpenCost's clients read a day of the ledger: shapes, keys, and sums that are the cost of the capacity."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from msgspec import structs
from starlette.testclient import TestClient

from accountant.billing.usage_pricing import BILLED, charges, cost
from accountant.compat import opencost_query
from accountant.compat.opencost_api import AllocationSource, create_app, instant
from accountant.core.settings import Limits
from accountant.prices import price_book as prices
from accountant.storage.duckdb_ledger import open_ledger
from agent.wire import Batch
from gputally.base.clock import VirtualClock
from tests.compat.opencost_day import START_MS
from tests.compat.opencost_listener import A100, BOOK, DAY, H100, HOUR_MS, HOUR_US, WITH_A100, Port, fact, row

EXPORTERS_DAY = "2026-10-01T00:00:00Z,2026-10-01T23:59:59Z"

NUMBERS = [
    "minutes", "cpuCores", "cpuCoreRequestAverage", "cpuCoreUsageAverage", "cpuCoreHours", "cpuCost",
    "cpuCostAdjustment", "cpuEfficiency", "gpuCount", "gpuHours", "gpuCost", "gpuCostAdjustment", "gpuEfficiency",
    "networkTransferBytes", "networkReceiveBytes", "networkCost", "networkCrossZoneCost", "networkCrossRegionCost",
    "networkInternetCost", "networkCostAdjustment", "loadBalancerCost", "loadBalancerCostAdjustment", "pvBytes",
    "pvByteHours", "pvCost", "pvCostAdjustment", "ramBytes", "ramByteRequestAverage", "ramByteUsageAverage",
    "ramByteHours", "ramCost", "ramCostAdjustment", "ramEfficiency", "externalCost", "sharedCost", "totalCost",
    "totalEfficiency",
]  # fmt: skip
"""Columns that the Parquet exporter casts to float, each of which it has to find."""


def test_the_parquet_exporters_day_has_every_column_as_a_number(port: Port) -> None:
    """Its request, its default window, and its reading: normalise each set, join, cast."""
    asked = {
        "window": EXPORTERS_DAY, "includeIdle": "true", "shareIdle": "false", "idleByNode": "false",
        "includeProportionalAssetResourceCosts": "false", "format": "json", "step": "1h",
        "aggregate": "namespace,pod,container",
    }  # fmt: skip
    data = port.get(**asked)["data"]
    assert len(NUMBERS) == 37
    assert len(data) == 24
    frames = [pd.json_normalize([v for k, v in found.items() if k != "pvs"], sep=".") for found in data]
    table = pd.concat(frames).astype(dict.fromkeys(NUMBERS, "float"))
    assert not table[NUMBERS].isna().any().any()
    hours = table.groupby("name")["gpuHours"].sum()
    second = 1 / 3600
    assert hours.to_dict() == pytest.approx(
        {
            "vision/train-0/main": 48 - 2 * second,
            "nlp/serve-abc/main": 12,
            "__idle__": 60 - 3 * second,  # the window ends one second before midnight: not rounded up
        },
        abs=1e-9,
    )
    assert table["window.end"].max() == "2026-10-01T23:59:59Z"
    assert set(table["properties.namespace"].dropna()) == {"vision", "nlp"}


def test_the_web_interfaces_requests(port: Port) -> None:
    asked = {"window": "7d", "aggregate": "namespace", "includeIdle": "true", "accumulate": "day"}
    answer = port.client.get("/model/allocation/compute", params=asked).json()
    days = answer["data"]
    assert [sorted(found) for found in days] == [[]] * 5 + [["__idle__", "nlp", "vision"], []]
    for path in (
        "/model/cloudCost/status", "/model/cloudCost/view/graph", "/model/cloudCost/view/totals", "/model/assets",
        "/model/cloudCost/view/table", "/model/customCost/total", "/model/allocation/autocomplete", "/cloudCost",
        "/model/assets/autocomplete", "/customCost/timeseries", "/clusterInfo",
    ):  # fmt: skip
        found = port.client.get(path, params={"window": "7d", "anything": "else"})
        assert found.json()["status"] == "success", path
    assert port.client.get("/healthz").status_code == 200
    assert port.client.get("/clusterInfo").json()["data"]["name"] == "prod"


KEYS_IN_ORDER = [
    "name", "properties", "window", "start", "end", "minutes", "cpuCores", "cpuCoreRequestAverage",
    "cpuCoreUsageAverage", "cpuCoreHours", "cpuCost", "cpuCostAdjustment", "cpuCostIdle", "cpuEfficiency",
    "gpuCount", "gpuRequestAverage", "gpuUsageAverage", "gpuHours", "gpuCost", "gpuCostAdjustment", "gpuCostIdle",
    "gpuEfficiency", "gpuAllocation", "networkTransferBytes", "networkReceiveBytes", "networkCost",
    "networkCrossZoneCost", "networkCrossRegionCost", "networkInternetCost", "networkCostAdjustment",
    "loadBalancerCost", "loadBalancerCostAdjustment", "pvBytes", "pvByteHours", "pvCost", "pvs", "pvCostAdjustment",
    "ramBytes", "ramByteRequestAverage", "ramByteUsageAverage", "ramByteHours", "ramCost", "ramCostAdjustment",
    "ramCostIdle", "ramEfficiency", "externalCost", "sharedCost", "totalCost", "totalEfficiency", "lbAllocations",
]  # fmt: skip


def test_an_allocation_has_all_keys_in_order_and_the_gpu_figures(port: Port) -> None:
    one = port.get()["data"][0]["prod/n1/vision/train-0/main"]
    assert list(one) == KEYS_IN_ORDER
    assert one["properties"] == {
        "cluster": "prod", "node": "n1", "container": "main", "controller": "train", "controllerKind": "job",
        "namespace": "vision", "pod": "train-0", "labels": {"app": "resnet", "env": "prod"},
    }  # fmt: skip
    assert one["window"] == {"start": "2026-10-01T00:00:00Z", "end": "2026-10-02T00:00:00Z"}
    assert (one["minutes"], one["gpuHours"], one["gpuCost"], one["totalCost"]) == (1440, 48, 120, 120)
    # 0.75 and 0.25 of two GPUs: one GPU of two, 50 %, where an average over an average says 25 %.
    assert (one["gpuCount"], one["gpuUsageAverage"], one["gpuEfficiency"]) == (2, 1, 0.5)
    assert one["gpuAllocation"] == {
        "gpuDevice": "", "gpuModel": H100, "gpuUUID": "", "isGPUShared": False, "gpuUsageAverage": 1,
        "gpuRequestAverage": 2, "saturation": None,
    }  # fmt: skip


def test_unknown_utilisation_is_a_number_where_clients_cast_and_null_where_they_do_not(port: Port) -> None:
    one = port.get(aggregate="pod")["data"][0]["serve-abc"]
    assert (one["gpuUsageAverage"], one["gpuEfficiency"]) == (0, 0)
    assert (one["gpuAllocation"]["gpuUsageAverage"], one["gpuAllocation"]["gpuUUID"]) == (None, "GPU-3")


@pytest.mark.parametrize(
    ("aggregate", "names"),
    [
        ("cluster", {"prod"}),
        ("node", {"n1", "n2"}),
        ("namespace", {"vision", "nlp"}),
        ("controllerKind", {"job", "deployment"}),
        ("controller", {"job:train", "deployment:serve"}),
        ("job", {"train", "__unallocated__"}),
        ("deployment", {"serve", "__unallocated__"}),
        ("statefulset", {"__unallocated__"}),
        ("container", {"main"}),
        ("team", {"seeing", "__unallocated__"}),
        ("label:app", {"resnet", "bert"}),
        ("environment", {"prod", "__unallocated__"}),
        ("product,namespace", {"resnet/vision", "bert/nlp"}),
        ("all", {"all"}),
    ],
)
def test_keys(port: Port, aggregate: str, names: set[str]) -> None:
    body = port.get(aggregate=aggregate)
    assert set(body["data"][0]) == names
    assert "warning" not in body


def test_idle_apart_by_node_or_cluster(port: Port) -> None:
    assert port.costs(aggregate="namespace", includeIdle="true") == [{"vision": 120, "nlp": 15, "__idle__": 135}]
    assert port.costs(aggregate="namespace", idle="true", idleByNode="true") == [
        {"vision": 120, "nlp": 15, "n1/__idle__": 60, "n2/__idle__": 15, "n3/__idle__": 60}
    ]
    assert port.costs(aggregate="namespace", includeIdle="true", splitIdle="true") == [
        {"vision": 120, "nlp": 15, "prod/__idle__": 135}
    ]
    idle = port.get(aggregate="namespace", includeIdle="true")["data"][0]["__idle__"]
    assert (idle["gpuHours"], idle["gpuCount"], idle["properties"]) == (60, 2.5, {"cluster": "prod"})


def test_idle_is_shared_by_cost_within_its_node_or_cluster(port: Port) -> None:
    # n1 and n2 give theirs to whom they have; nobody was on n3.
    assert port.costs(aggregate="namespace", shareIdle="true", includeIdle="true", idleByNode="true") == [
        {"vision": 180, "nlp": 30, "n3/__idle__": 60}
    ]
    assert port.costs(aggregate="namespace", shareIdle="true", includeIdle="true") == [{"vision": 240, "nlp": 30}]
    one = port.get(aggregate="namespace", shareIdle="true", includeIdle="true")["data"][0]["vision"]
    assert (one["gpuHours"], one["gpuCost"], one["gpuCostIdle"]) == (48, 240, 120)
    # Weights are taken before a filter is.
    assert port.costs(aggregate="namespace", shareIdle="true", filter='namespace:"nlp"') == [{"nlp": 30}]


def test_filters(port: Port) -> None:
    assert port.costs(aggregate="pod", filter='namespace:"vision"+label[app]!:"x"') == [{"train-0": 120}]
    assert port.costs(aggregate="pod", filter='controllerKind:"deployment"|team:"nobody"') == [{"serve-abc": 15}]
    assert port.costs(aggregate="pod", includeIdle="true", filter='node:"n1"') == [{"train-0": 120, "__idle__": 60}]
    assert port.costs(aggregate="pod", filter='product:"bert"') == [{"serve-abc": 15}]


def test_unpriced_time_costs_0_and_is_named(port: Port) -> None:
    port.book = port.priced(BOOK)
    body = port.get(aggregate="namespace", includeIdle="true")
    assert body["data"][0]["nlp"]["totalCost"] == 0
    assert body["warning"] == f"cost 0 means unpriced for {A100} (24.00 GPU-hours): the price book has no price"
    assert port.costs(aggregate="namespace", shareIdle="true") == [{"vision": 216, "nlp": 24}]  # by time: 48 to 12
    port.book = None
    assert set(port.costs(aggregate="namespace")[0].values()) == {0}


def test_time_that_nobody_metered_is_named(port: Port) -> None:
    body = port.get(window="2026-10-01T12:00:00Z,2026-10-02T12:00:00Z", aggregate="namespace")
    assert body["warning"] == "60.00 GPU-hours of the window are not metered, or not delivered yet, and in no figure"


def test_steps_and_accumulation_add_up(port: Port) -> None:
    asked = {"aggregate": "namespace", "includeIdle": "true"}
    whole = port.costs(**asked)[0]
    hours = port.costs(**asked, step="1h")
    assert len(hours) == 24
    assert {name: sum(found.get(name, 0) for found in hours) for name in whole} == pytest.approx(whole)
    assert port.costs(**asked, step="1h", accumulate="true") == [whole]
    assert port.costs(**asked, accumulateBy="day") == [whole]
    assert len(port.costs(**asked, step="7h")) == 4
    half = port.get(**asked, step="6h", accumulate="true")["data"][0]["nlp"]
    assert (half["gpuHours"], half["minutes"]) == (12, 720)  # the pod has no later step


@pytest.mark.parametrize(
    ("unit", "count"), [("hour", 24), ("day", 1), ("week", 1), ("month", 1), ("quarter", 1), ("all", 1)]
)
def test_units_to_accumulate_by(port: Port, unit: str, count: int) -> None:
    assert len(port.costs(accumulate=unit)) == count


def test_units_begin_where_the_calendar_has_them() -> None:
    year = "window=2026-01-01T06:00:00Z,2027-01-01T06:00:00Z"

    def begins(unit: str) -> list[str]:
        found = opencost_query.parse_query(f"{year}&step=30d&accumulateBy={unit}", START_MS, 400 * 24 * HOUR_MS)
        assert all(a[-1][1] == b[0][0] for a, b in pairwise(found.sets))
        assert (found.sets[0][0][0], found.sets[-1][-1][1]) == (found.start_ms, found.end_ms)
        return [instant(spans[0][0])[:13] for spans in found.sets]

    assert begins("quarter") == ["2026-01-01T06", *(f"{day}T00" for day in ("2026-04-01", "2026-07-01", "2026-10-01",
                                                                           "2027-01-01"))]  # fmt: skip
    assert begins("month") == ["2026-01-01T06", *(f"2026-{n:02}-01T00" for n in range(2, 13)), "2027-01-01T00"]
    assert begins("week")[1:3] == ["2026-01-04T00", "2026-01-11T00"]  # Sundays
    assert len(begins("day")) == 366
    assert begins("all") == ["2026-01-01T06"]


def test_summaries(port: Port) -> None:
    data = port.get("/model/allocation/compute/summary", aggregate="namespace", step="12h")["data"]
    assert data["step"] == 12 * 3600 * 10**9
    assert data["window"] == {"start": "2026-10-01T00:00:00Z", "end": "2026-10-02T00:00:00Z"}
    assert [found["allocations"]["vision"]["totalCost"] for found in data["sets"]] == [60, 60]
    assert list(data["sets"][0]["allocations"]["nlp"]) == [
        "name", "start", "end", "cpuCoreRequestAverage", "cpuCoreUsageAverage", "cpuCost", "gpuCost", "networkCost",
        "loadBalancerCost", "pvCost", "ramByteRequestAverage", "ramByteUsageAverage", "ramCost", "sharedCost",
        "externalCost", "totalEfficiency", "totalCost",
    ]  # fmt: skip


def test_everything_adds_up_to_the_capacity_that_was_billed(port: Port) -> None:
    window = START_MS, START_MS + 24 * HOUR_MS
    priced = [c for c in charges(port.ledger, port.book, *window, ()) if c.account in BILLED and c.row]
    exact = sum((Fraction(c.row.price) * c.gpu_us for c in priced if c.row), Fraction(0)) / HOUR_US
    assert sum(port.costs(includeIdle="true")[0].values()) == pytest.approx(float(exact))
    assert float(cost(port.ledger, port.book, *window, ()).total or 0) == pytest.approx(float(exact))


def test_a_mig_instance_is_a_shared_gpu(tmp_path: Path) -> None:
    clock = VirtualClock(START_MS + 2 * HOUR_MS)
    ledger = open_ledger(tmp_path / "ledger.duckdb", clock)
    rows = (
        row(1, 0, "GPU-9", A100, "a", "vision", 0.1, part=3),
        row(2, 0, "GPU-9", A100, "", "", None, part=4),
    )
    batch = Batch(cluster="prod", node="n9", boot_id="b", epoch="0192-9", first_seq=1, oldest_seq=1, intervals=rows)
    (receipt,) = ledger.append([batch], clock.wall_ms())
    assert not isinstance(receipt, Exception)
    assert receipt.quarantined == 0
    (tmp_path / "prices.yaml").write_text(WITH_A100)
    book = prices.load(tmp_path / "prices.yaml")
    client = TestClient(create_app(AllocationSource(ledger, clock, lambda: book, "prod", Limits(span_days=400))))
    asked = {"window": "2026-10-01T00:00:00Z,2026-10-01T01:00:00Z", "aggregate": "pod", "includeIdle": "true"}
    found = client.get("/allocation", params=asked).json()["data"][0]
    ledger.close()
    assert found["a"]["gpuAllocation"]["isGPUShared"] is True
    assert found["a"]["gpuCost"] == pytest.approx(1.25 * 3 / 7)
    assert found["a"]["gpuEfficiency"] == pytest.approx(0.1)
    assert found["a"]["gpuCost"] + found["__idle__"]["gpuCost"] == pytest.approx(1.25)


def test_an_imported_pod_lasts_from_its_start_to_its_end(tmp_path: Path) -> None:
    """An import knows when a pod was placed and ended, and not when it was made. A part of a GPU is shared."""
    clock = VirtualClock(START_MS + 4 * HOUR_MS)
    ledger = open_ledger(tmp_path / "ledger.duckdb", clock)
    facts = structs.replace(
        fact(2, "vision", "a", "n9", "", app="bert"), created_ms=None, scheduled_ms=START_MS + HOUR_MS,
        ended_ms=START_MS + 2 * HOUR_MS, requests={"nvidia.com/gpu.shared": "1"},
    )  # fmt: skip
    rows = (row(1, 1, "GPU-9", A100, "a", "vision", 0.1),)
    batch = Batch(
        cluster="old", node="n9", boot_id="b", epoch="0192-9", first_seq=1, oldest_seq=1, intervals=rows, facts=(facts,)
    )
    (receipt,) = ledger.append([batch], clock.wall_ms())
    assert not isinstance(receipt, Exception)
    assert receipt.quarantined == 0
    client = TestClient(create_app(AllocationSource(ledger, clock, lambda: None, "prod", Limits(span_days=400))))
    asked = {"window": DAY, "aggregate": "pod"}
    one = client.get("/allocation", params=asked).json()["data"][0]["a"]
    later = client.get("/allocation", params=asked | {"window": "2026-10-01T03:00:00Z,2026-10-02T00:00:00Z"}).json()
    info = client.get("/clusterInfo").json()["data"]
    ledger.close()
    assert (one["start"], one["end"]) == ("2026-10-01T01:00:00Z", "2026-10-01T02:00:00Z")
    assert (one["minutes"], one["gpuCount"], one["gpuHours"]) == (60, 1, 1)
    assert one["gpuAllocation"]["isGPUShared"] is True
    assert one["properties"]["labels"] == {"app": "bert"}
    assert later["data"] == [{}]
    assert (info["id"], info["name"]) == ("old", "old")  # as the allocations say, whatever this one is called


def test_an_accountant_serves_both_listeners_where_it_is_told_to(tmp_path: Path) -> None:
    from accountant.composition import Service
    from accountant.core.settings import Settings, load
    from gputally.base.errors import SettingsFault

    settings = Settings.model_validate(
        {"data": tmp_path / "data", "auth": "off", "opencost": {"listen": "127.0.0.1:0"},
         "kai_usage": {"listen": "127.0.0.1:0"}, "kubernetes": {"cluster": "here"}}
    )  # fmt: skip
    with Service(settings, VirtualClock(START_MS)) as service:
        assert [listener.what for listener in service.listeners] == ["kai_usage", "opencost"]
        client = TestClient(service.listeners[1].app)
        assert client.get("/allocation?window=today").json()["data"] == [{}]
        assert client.get("/model/clusterInfo").json()["data"]["id"] == "here"
    flags = {"data": str(tmp_path / "other"), "auth": "off"}
    with Service(load(flags=flags, environ={}), VirtualClock(START_MS)) as service:
        assert service.listeners == ()
    with pytest.raises(SettingsFault, match="OPENCOST__LISTEN: not an address: '9003'"):
        load(flags=flags, environ={"GPUTALLY_ACCOUNTANT_OPENCOST__LISTEN": "9003"})
