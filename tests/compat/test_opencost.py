"""OpenCost's clients read a day of the ledger: shapes, keys, and sums that are the cost of the capacity."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from starlette.testclient import TestClient

from accountant.books.costs import BILLED, charges, cost
from accountant.compat import opencost_query
from accountant.compat.opencost import create_app
from accountant.compat.opencost_json import instant
from accountant.compat.opencost_source import AllocationSource
from accountant.ledger import Facts, NamespaceFacts
from accountant.prices import book as prices
from accountant.prices.book import PriceBook
from accountant.store import DuckLedger, open_ledger
from agent.clock import VirtualClock
from agent.wire import Batch, Holder, Owner, PodFacts, Slice, UsageInterval
from tests.compat.conftest import START_MS

HOUR_MS = 3_600_000
HOUR_US = HOUR_MS * 1_000
DAY = "2026-10-01T00:00:00Z,2026-10-02T00:00:00Z"
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


def fact(seq: int, namespace: str, name: str, node: str, owner: str, **labels: str) -> PodFacts:
    kind, _, owned = owner.partition("/")
    owners = (Owner(kind=kind, name=owned, uid=owner),) if owner else ()
    return PodFacts(
        seq=seq, uid=name, namespace=namespace, name=name, node=node, labels=labels, owners=owners, workload=owner,
        created_ms=START_MS, scheduled_ms=START_MS, observed_ms=START_MS, ended_ms=None,
    )  # fmt: skip


def row(
    seq: int, hour: int, gpu: str, model: str, pod: str, namespace: str, busy: float | None, part: int = 0
) -> UsageInterval:
    """An hour of a GPU; part: of a MIG instance with that many of seven slices."""
    capacity = HOUR_US if not part else -(-HOUR_US * part // 7) if part == 3 else HOUR_US * part // 7
    return UsageInterval(
        seq=seq,
        start_ms=START_MS + hour * HOUR_MS,
        end_ms=START_MS + (hour + 1) * HOUR_MS,
        gpu_uuid=gpu,
        gpu_model=model,
        slice=Slice(
            profile=f"{part}g.{part * 10}gb", gi=part, ci=0, compute=part, compute_of=7, memory_mib=1, memory_of_mib=8
        )
        if part
        else None,
        holder=Holder(kind="pod", uid=pod, namespace=namespace, name=pod, container="main") if pod else None,
        capacity_us=capacity,
        allocated_us=capacity if pod else 0,
        busy_us=round(capacity * busy) if busy is not None else None,
        method="allocation",
    )


H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def fill(ledger: DuckLedger) -> None:
    """A day. n1: two H100 held by train-0, one idle GPU. n2: an A100, half of the day serving. n3: nobody."""
    for node, facts, gpus in (
        ("n1", [("vision", "train-0", "Job/train", {"app": "resnet", "env": "prod"})],
         [("GPU-0", H100, "train-0", "vision", 0.75), ("GPU-1", H100, "train-0", "vision", 0.25),
          ("GPU-2", H100, "", "", None)]),
        ("n2", [("nlp", "serve-abc", "Deployment/serve", {"app": "bert"})],
         [("GPU-3", A100, "serve-abc", "nlp", None)]),
        ("n3", [], [("GPU-4", H100, "", "", None)]),
    ):  # fmt: skip
        told = [fact(i + 1, ns, name, node, owner, **labels) for i, (ns, name, owner, labels) in enumerate(facts)]
        rows: list[UsageInterval] = []
        for hour in range(24):
            for gpu, model, pod, namespace, busy in gpus:
                held = pod if not (gpu == "GPU-3" and hour >= 12) else ""
                rows.append(row(len(told) + len(rows) + 1, hour, gpu, model, held, namespace, busy if held else None))
        batch = Batch(
            cluster="prod", node=node, boot_id="b", epoch=f"0192-{node}", first_seq=1, oldest_seq=1,
            intervals=tuple(rows), facts=tuple(told),
        )  # fmt: skip
        (receipt,) = ledger.append([batch], START_MS + 24 * HOUR_MS)
        assert not isinstance(receipt, Exception), receipt
        assert receipt.quarantined == 0


BOOK = (
    "schema: 1\ncurrency: EUR\nrows:\n"
    "  - {id: h100, model: H100, price: 2.5, per: gpu-hour, valid_from: 2026-01-01, source: c, as_of: 2026-01-01,"
    " basis: gpu-only}\n"
)
WITH_A100 = BOOK + (
    "  - {id: a100, model: A100, price: 1.25, per: gpu-hour, valid_from: 2026-01-01, source: c, as_of: 2026-01-01,"
    " basis: gpu-only}\n"
)


class Port:
    """The listener over a filled ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = VirtualClock(START_MS)
        self.ledger = open_ledger(folder / "ledger.duckdb", self.clock)
        fill(self.ledger)
        self.ledger.observe(
            Facts(namespaces=(NamespaceFacts("prod", "vision", "seeing", since_ms=START_MS),)), START_MS
        )
        self.clock.advance(36 * HOUR_MS)
        self.book: PriceBook | None = self.priced(WITH_A100)
        source = AllocationSource(self.ledger, self.clock, lambda: self.book, "prod", 400)
        self.client = TestClient(create_app(source))

    def priced(self, text: str) -> PriceBook:
        (self.folder / "prices.yaml").write_text(text)
        return prices.load(self.folder / "prices.yaml")

    def get(self, path: str = "/allocation/compute", **asked: str) -> Any:
        answer = self.client.get(path, params={"window": DAY, **asked})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        body = answer.json()
        assert (body["code"], body["status"]) == (200, "success")
        return body

    def costs(self, **asked: str) -> list[dict[str, float]]:
        return [{name: one["totalCost"] for name, one in found.items()} for found in self.get(**asked)["data"]]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    port = Port(tmp_path_factory.mktemp("opencost"))
    yield port
    port.ledger.close()


@pytest.fixture
def port(filled: Port) -> Iterator[Port]:
    before = filled.book
    yield filled
    filled.book = before


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


def test_services_are_not_known_and_that_is_said(port: Port) -> None:
    body = port.get(aggregate="service")
    assert set(body["data"][0]) == {"__unallocated__"}
    assert body["warning"] == "services are not known to the ledger"


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
        found = opencost_query.parse(f"{year}&step=30d&accumulateBy={unit}", START_MS, 400 * 24 * HOUR_MS)
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


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"window": ""}, "Invalid 'window' parameter: ''"),
        ({"window": "1w offset"}, "Invalid 'window' parameter"),
        ({"window": "9999d"}, "Invalid 'window' parameter: longer than 400 days"),
        ({"window": "1,2", "aggregate": "annotation:x"}, r"Invalid 'aggregate' parameter: 'annotation:x'"),
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
        ({"filter": 'annotation[x]:"y"'}, "unknown property 'annotation[x]'"),
        ({"step": "1s"}, "Error: step: '1s': expected a duration such as 1h or 1d"),
        ({"step": "1m"}, "more than 800 steps"),
        ({"window": "2026-01-01T00:00:00Z,2026-10-01T00:00:00Z", "accumulate": "hour"}, "more than 800 sets"),
        ({"accumulate": "year"}, "expected true, false, hour"),
        ({"includeIdle": "maybe"}, "Error: includeIdle: 'maybe'"),
        ({"includeProportionalAssetResourceCosts": "true"}, "not answered here"),
        ({"format": "csv"}, "only json"),
        ({"shareNamespaces": "kube-system"}, "Error: shareNamespaces: not answered here; there are accumulate"),
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
    client = TestClient(create_app(AllocationSource(ledger, clock, lambda: book, "prod", 400)))
    asked = {"window": "2026-10-01T00:00:00Z,2026-10-01T01:00:00Z", "aggregate": "pod", "includeIdle": "true"}
    found = client.get("/allocation", params=asked).json()["data"][0]
    ledger.close()
    assert found["a"]["gpuAllocation"]["isGPUShared"] is True
    assert found["a"]["gpuCost"] == pytest.approx(1.25 * 3 / 7)
    assert found["a"]["gpuEfficiency"] == pytest.approx(0.1)
    assert found["a"]["gpuCost"] + found["__idle__"]["gpuCost"] == pytest.approx(1.25)


def test_a_ledger_that_cannot_be_read_is_told_in_opencosts_shape(port: Port) -> None:
    from accountant.errors import LedgerUnavailable

    class Away:
        def pods(self, start_ms: int, end_ms: int) -> Any:
            raise LedgerUnavailable("the disk is full")

    source = AllocationSource(Away(), port.clock, lambda: None, "prod", 400)  # type: ignore[arg-type]
    answer = TestClient(create_app(source)).get("/allocation", params={"window": DAY})
    assert answer.status_code == answer.json()["code"] == 503
    assert "the disk is full" in answer.json()["message"]


def test_an_accountant_serves_both_listeners_where_it_is_told_to(tmp_path: Path) -> None:
    from accountant.service import Service
    from accountant.settings import Settings, SettingsFault, load

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
