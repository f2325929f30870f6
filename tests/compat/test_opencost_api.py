"""OpenCost's API: allocations, idle time, filters and refusals; no time is created, lost or moved twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from accountant.billing.charge import BILLED, Charge
from accountant.billing.usage_pricing import charge_table, cost
from accountant.compat import opencost_query
from accountant.compat.opencost_api import (
    AllocationSource,
    OpenCostAllocation,
    PodSeen,
    accumulated,
    aggregated,
    allocations,
    create_app,
    instant,
    share_idle,
)
from accountant.compat.opencost_query import KEYS
from accountant.composition import Service
from accountant.core.errors import LedgerUnavailable
from accountant.core.settings import Limits, Settings, load
from accountant.ledger.usage import ACCOUNTS
from accountant.prices import price_book as prices
from accountant.prices.price_book import Price, PriceRow
from accountant.prices.unit_prices import Place
from accountant.storage.duckdb_ledger import open_ledger
from accountant.wire.policy_models import IDLE
from gputally.base.clock import VirtualClock
from gputally.base.errors import SettingsFault
from tests.compat.opencost_day import START_MS
from tests.compat.opencost_listener import A100, BOOK, DAY, H100, HOUR_MS, HOUR_US, WITH_A100, Port, hour, served
from tests.fakes.fixed_status import FixedStatus
from tests.hypothesis_examples import examples
from tests.moments import present
from tests.usage_records import batch, deliver, pod_facts

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
    """Its request, its default window, and its processing: normalise each set, join, cast."""
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
    for path in ("/model/customCost/status", "/model/cloudCost/status", "/model/assets/autocomplete"):
        assert port.get(path)["data"] == []
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
    assert body["warning"] == f"cost 0 means unpriced for {A100} (24.00 GPU-hours): add a price to the price book"
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
        found = opencost_query.parse_query(f"{year}&step=30d&accumulateBy={unit}", START_MS, Limits(span_days=400))
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
    priced = [
        c for c in charge_table(present(port.ledger), port.book, *window, ()).charges() if c.account in BILLED and c.row
    ]
    exact = sum((Fraction(c.row.price) * c.gpu_us for c in priced if c.row), Fraction(0)) / HOUR_US
    assert sum(port.costs(includeIdle="true")[0].values()) == pytest.approx(float(exact))
    assert float(cost(present(port.ledger), port.book, *window, ()).total or 0) == pytest.approx(float(exact))


def test_a_mig_instance_is_a_shared_gpu(tmp_path: Path) -> None:
    clock = VirtualClock(START_MS + 2 * HOUR_MS)
    ledger = open_ledger(tmp_path / "ledger.duckdb", clock)
    parts = hour(0, "GPU-9", A100, "a", "vision", 0.1, part=3), hour(0, "GPU-9", A100, "", "", None, part=4)
    deliver(ledger, clock.wall_ms(), batch(parts, cluster="prod", node="n9"))
    (tmp_path / "prices.yaml").write_text(WITH_A100)
    book = prices.load(tmp_path / "prices.yaml")
    client = served(ledger, clock, lambda: book)
    asked = {"window": "2026-10-01T00:00:00Z,2026-10-01T01:00:00Z", "aggregate": "pod", "includeIdle": "true"}
    found = client.get("/allocation", params=asked).json()["data"][0]
    ledger.close()
    assert found["a"]["gpuAllocation"]["isGPUShared"] is True
    assert found["a"]["gpuCost"] == pytest.approx(1.25 * 3 / 7)
    assert found["a"]["gpuEfficiency"] == pytest.approx(0.1)
    assert found["a"]["gpuCost"] + found["__idle__"]["gpuCost"] == pytest.approx(1.25)


def test_an_imported_pod_lasts_from_its_start_to_its_end(tmp_path: Path) -> None:
    """An import knows when a pod was scheduled and ended, but not when it was created. A part of a GPU is shared."""
    clock = VirtualClock(START_MS + 4 * HOUR_MS)
    ledger = open_ledger(tmp_path / "ledger.duckdb", clock)
    facts = pod_facts(
        "a", START_MS, namespace="vision", node="n9", labels={"app": "bert"}, scheduled_ms=START_MS + HOUR_MS,
        ended_ms=START_MS + 2 * HOUR_MS, requests={"nvidia.com/gpu.shared": "1"},
    )  # fmt: skip
    one_hour = hour(1, "GPU-9", A100, "a", "vision", 0.1)
    deliver(ledger, clock.wall_ms(), batch([one_hour], [facts], cluster="old", node="n9"))
    client = served(ledger, clock)
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


def test_services_are_not_known_and_that_is_said(port: Port) -> None:
    body = port.get(aggregate="service")
    assert set(body["data"][0]) == {"__unallocated__"}
    assert body["warning"] == "the ledger does not store services: no allocation has one"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"window": ""}, "Invalid 'window' parameter: ''"),
        ({"window": "1w offset"}, "Invalid 'window' parameter"),
        ({"window": "9999d"}, "longer than 400 days"),
        ({"window": "1,2", "aggregate": "annotation:"}, r"Invalid 'aggregate' parameter: 'annotation:'"),
        ({"aggregate": "pid"}, "expected all, cluster, "),
        ({"aggregate": ",".join(f"label:a{i}" for i in range(13))}, "more than 12 names"),
    ],
)
def test_bad_windows_and_keys_are_refused_in_plain_text(port: Port, asked: dict[str, str], reason: str) -> None:
    answer = port.client.get("/allocation", params={"window": DAY, **asked})
    assert (answer.status_code, answer.headers["content-type"]) == (400, "text/plain; charset=utf-8")
    assert reason in answer.text


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"filter": "namespace"}, "Error: filter: the end: expected more"),
        ({"filter": 'image:"y"'}, "unknown property 'image'"),
        ({"step": "1s"}, "Error: step: '1s': expected a duration such as 1h or 1d"),
        ({"step": "1m"}, "more than 800 steps"),
        ({"window": "2026-01-01T00:00:00Z,2026-10-01T00:00:00Z", "accumulate": "hour"}, "more than 800 sets"),
        ({"accumulate": "year"}, "expected true, false, hour"),
        ({"includeIdle": "maybe"}, "Error: includeIdle: 'maybe'"),
        ({"includeProportionalAssetResourceCosts": "true"}, "these costs are not supported"),
        ({"format": "xml"}, "Error: format: 'xml': expected json or csv"),
        ({"filterServices": "web"}, "Error: filterServices: unknown filter: use filter, or filterClus"),
        ({"sort": "cpuCost"}, "Error: sort: 'cpuCost': expected name, totalCost"),
        ({"order": "up"}, "Error: order: 'up': expected asc or desc"),
        ({"limit": "-1"}, "Error: limit: '-1': expected a whole number"),
        ({"shareIdle": "even"}, "Error: shareIdle: 'even': expected true or false"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_opencosts_shape(port: Port, asked: dict[str, str], message: str) -> None:
    answer = port.client.get("/allocation", params={"window": DAY, **asked})
    body = answer.json()
    assert (answer.status_code, body["code"], body["status"], body["data"]) == (400, 400, "", None)
    assert message in body["message"]


def test_bytes_that_are_no_text_and_too_many_parameters_are_refused(port: Port) -> None:
    assert port.client.get("/allocation?window=%ff").status_code == 400
    assert port.client.get("/allocation?" + "a=b&" * 100).status_code == 400


def test_a_ledger_that_cannot_be_read_is_told_in_opencosts_shape(port: Port) -> None:
    class Away:
        def status(self) -> FixedStatus:
            return FixedStatus()

        def moment(self, start_ms: int, end_ms: int) -> Any:
            raise LedgerUnavailable("the disk is full")

    answer = served(Away(), port.clock).get("/allocation", params={"window": DAY})
    assert answer.status_code == answer.json()["code"] == 503
    assert "the disk is full" in answer.json()["message"]


@pytest.mark.parametrize("path", ["/allocation", "/allocation/summary", "/assets"])
def test_a_window_that_adds_up_too_much_is_refused_before_it_is_read(port: Port, path: str) -> None:
    class Large:
        """An object whose data cannot be read: an unwanted query raises AttributeError."""

        def status(self) -> FixedStatus:
            return FixedStatus(gpus=1_000)

    limits = Limits(question_gpu_hours=24_000)
    source = AllocationSource(Large(), port.clock, lambda: None, "prod", limits)  # type: ignore[arg-type]
    answer = TestClient(create_app(source)).get(path, params={"window": DAY, "aggregate": "cluster,namespace"})
    assert answer.status_code == 400
    assert (
        "48000 GPU-hours to add up (times 2 dimensions), and 24000 are the most: ask for about 12 hours" in answer.text
    )


ROW = PriceRow.model_validate(
    {"id": "r", "model": "H100", "price": 1, "per": "gpu-hour", "valid_from": "2026-01-01", "source": "s",
     "as_of": "2026-01-01", "basis": "gpu-only"}
)  # fmt: skip
PRICES = [Price(f"p{i}", Decimal(text), Decimal(text), ROW, 0, 2**50) for i, text in enumerate(("2.5", "0.333", "0"))]


@st.composite
def books(draw: st.DrawFn) -> list[Charge]:
    """Generate charges of an hour, in the form and order of accountant.billing.usage_pricing."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        account = draw(st.sampled_from(ACCOUNTS))
        where = (draw(st.sampled_from(["c1", "c2"])), draw(st.sampled_from(["n1", "n2", "n3"])))
        held = account in ("busy", "allocated_idle", "allocated_unknown")
        team, job = draw(st.sampled_from([("a", "Job/x"), ("b", "Deployment/y"), ("__unassigned__", "Pod/p0")]))
        names = ("ns", draw(st.sampled_from(["p0", "p1"])), "main", job, team) if held else ("", "", "", "", IDLE)
        model = draw(st.sampled_from(["H100", "A100"]))
        row = draw(st.sampled_from([*PRICES, None])) if account in BILLED else None
        key = (*where, *names, draw(st.sampled_from(["", "1g.10gb"])), draw(st.sampled_from(["GPU-1", "GPU-2"])))
        found.append(Charge(key, Place(model, "", "", ""), account, draw(st.integers(1, HOUR_US)), row))
    return sorted(found, key=lambda charge: (charge.key, charge.account))


def of(found: Sequence[OpenCostAllocation]) -> tuple[int, Fraction, dict[str, int]]:
    """Return time, cost and unpriced time of all together; shared idle time counts at its payer."""
    unpriced: dict[str, int] = {}
    for one in found:
        for model, gpu_us in one.unpriced.items():
            unpriced[model] = unpriced.get(model, 0) + gpu_us
    return sum(sum(one.time.values()) for one in found), sum((one.cost for one in found), Fraction(0)), unpriced


def truth(charges: Sequence[Charge]) -> tuple[int, Fraction, dict[str, int]]:
    billed = [charge for charge in charges if charge.billed]
    unpriced: dict[str, int] = {}
    for charge in billed:
        if charge.row is None:
            unpriced[charge.place.gpu_model] = unpriced.get(charge.place.gpu_model, 0) + charge.gpu_us
    cost = sum((Fraction(charge.row.price) * charge.gpu_us for charge in billed if charge.row), Fraction(0))
    return sum(charge.gpu_us for charge in billed), cost / HOUR_US, unpriced


@settings(max_examples=examples(20, 120))
@given(
    charges=books(),
    keys=st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=3),
    split=st.sampled_from(["", "node", "cluster"]),
    shared=st.booleans(),
    by_node=st.booleans(),
)
def test_allocations_and_idle_are_the_capacitys_cost(
    charges: list[Charge], keys: list[str], split: str, shared: bool, by_node: bool
) -> None:
    found = allocations(charges, {}, 0, HOUR_MS)
    if shared:
        before = {at: one.gpu_us for at, one in enumerate(one for one in found if not one.idle)}
        found = share_idle(found, by_node=by_node)
        assert {at: one.gpu_us for at, one in enumerate(one for one in found if not one.idle)} == before
        # Idle is left only where nobody paid for anything.
        for idle in (one for one in found if one.idle):
            place = ("cluster", "node")[: 1 + by_node]
            there = [one for one in found if all(one.properties[n] == idle.properties[n] for n in place)]
            assert all(one.idle or one.cost == 0 for one in there)
    named = aggregated(found, keys, split_idle=split)
    assert of(list(named.values())) == truth(charges)
    assert list(named) == sorted(named)
    assert all(one.idle == name.endswith("__idle__") for name, one in named.items())


@settings(max_examples=examples(13, 80))
@given(steps=st.lists(books(), min_size=1, max_size=4), keys=st.sampled_from([("pod",), ("node", "team"), ("all",)]))
def test_steps_accumulate_to_the_whole_in_any_grouping(steps: list[list[Charge]], keys: tuple[str, ...]) -> None:
    sets = [
        aggregated(allocations(charges, {}, at * HOUR_MS, (at + 1) * HOUR_MS), keys) for at, charges in enumerate(steps)
    ]
    whole = accumulated(sets)
    assert of(list(whole.values())) == truth([charge for charges in steps for charge in charges])
    assert accumulated([accumulated(sets[:2]), accumulated(sets[2:])]) == whole
    for one in whole.values():
        assert one.efficiency is None or 0 <= one.efficiency <= 1


def held(gpu: str, account: str, gpu_us: int) -> Charge:
    key = ("c", "n", "ns", "p", "main", "Job/x", "t", "", gpu)
    return Charge(key, Place("H100", "", "", ""), account, gpu_us, PRICES[0])  # type: ignore[arg-type]


def test_efficiency_is_of_what_is_known() -> None:
    charges = [held("g", "busy", 30), held("g", "allocated_idle", 10), held("h", "allocated_unknown", 60)]
    (one,) = allocations(charges, {}, 0, 1)
    assert one.efficiency == Fraction(3, 4)
    assert replace(one, busy_us=0, known_us=0).efficiency is None


@pytest.mark.parametrize(
    ("bound", "ended", "span"),
    [
        (None, None, (0, 100)),
        (20, None, (20, 100)),
        (-50, 60, (0, 60)),
        (80, None, (0, 100)),  # it held a GPU for 30 ms of the window: cannot be true
        (60, 50, (0, 100)),
    ],
)
def test_a_pod_is_there_from_being_bound_to_its_end(
    bound: int | None, ended: int | None, span: tuple[int, int]
) -> None:
    seen = {("c", "ns", "p"): PodSeen(bound, ended, {})}
    (one,) = allocations([held("g", "busy", 30_000)], seen, 0, 100)
    assert (one.start_ms, one.end_ms) == span
