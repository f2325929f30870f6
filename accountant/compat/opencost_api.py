"""Serves OpenCost's HTTP API from one ledger, or from several together.

Supported are GET /allocation and /allocation/compute, their summaries, and the nodes' GPUs as /assets, each with and
without the prefix /model. Other paths that OpenCost's clients open return an empty answer of the right shape. The API
is read-only and has no credentials or CORS headers: every client that reaches it can read every team's cost. An
accountant therefore serves it on a separate port for a NetworkPolicy, and a fleet server authenticates before it calls
this application.

GPU time without a price has cost 0 here, because OpenCost's clients convert every column to a number. The `warning` of
the answer then names the models and hours. Unmetered time has a warning too. Steps that meet at whole hours need one
ledger query for up to 31 of them; other steps need one each. An answer contains nothing after the present.

Allocations are computed from charges. Time is kept as integers per GPU model and price until it is displayed, so the
parts of any step, key or share add up exactly. Over one span the costs of all allocations and of `__idle__` equal the
cost of the capacity that was up and metered.

Idle is time without a holder. On request it is shared within its node or cluster by the cost of the GPU time held
there, before filters apply. Idle time of a node or cluster without held time stays idle. Source of the order: OpenCost
core/pkg/opencost/allocation.go (AggregateBy).

Only GPU figures are metered. CPU, memory, network, load balancers and volumes are 0. Times are RFC 3339 in UTC. Floats
are the nearest ones to the exact values, not rounded to five decimals. Source: OpenCost
core/pkg/opencost/allocation_json.go and summaryallocation_json.go."""

from __future__ import annotations

import csv
import io
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol, cast
from urllib.parse import urlencode

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from accountant.api import query_parameters
from accountant.api.query_parameters import QuerySpan
from accountant.billing.charge import ALLOCATED, Charge
from accountant.billing.time_reallocation import spread_shares, whole_weights
from accountant.billing.usage_pricing import charge_table
from accountant.compat.opencost_query import (
    ASSET,
    CONTROLLER_KINDS,
    LABEL_OF,
    MAX_STEPS,
    BadQuestion,
    OpenCostQuestion,
    Span,
    asset_filter,
    parameters,
    parse_query,
)
from accountant.core.errors import UnreadableLedger
from accountant.core.settings import Limits
from accountant.ledger.protocols import Moment, NodeFacts, QueuedPod, ReadableLedger
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import UNASSIGNED
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base import called_off
from gputally.base.called_off import CalledOff
from gputally.base.clock import Clock
from gputally.base.errors import AccountantError
from gputally.base.money import exact_product
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND, US_PER_HOUR, US_PER_MS
from gputally.base.untrusted_text import for_cell
from gputally.server.turns import GONE, Busy, TurnLimits, Turns

DIMENSIONS: Final[tuple[Dimension, ...]] = (
    "cluster", "node", "namespace", "pod", "container", "job", "team", "mig_profile", "gpu",
)  # fmt: skip
"""The dimensions of the charges; GPUs of one holder are combined."""
IDLE_NAME = "__idle__"
UNALLOCATED = "__unallocated__"
_MACHINE = re.compile(r"(?:aws|gce)://[^/]*/[^/]*/([^/]+)")
"""A provider id; OpenCost shows the last part for these two clouds, the whole id for others."""
_LONE = frozenset({"Pod", "Container", "Process", "Unattributed"})
"""Beginnings of a job's name that show that the holder has no owner."""


class CostGroup(NamedTuple):
    """The key by which the time of an allocation is divided.

    price: per GPU-hour, None if unpriced.
    shared: whether it is idle time that was shared to this allocation."""

    model: str
    price: Decimal | None
    shared: bool


PodName = tuple[str, str, str]
"""Cluster, namespace, name."""


@dataclass(frozen=True, slots=True)
class PodSeen:
    """The known facts of all pods with one name.

    start_ms, end_ms: when the first was bound and the last ended; None: unknown.
    labels: those of the newest.
    shares: whether one of them requested a part of a GPU."""

    start_ms: int | None = None
    end_ms: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    shares: bool = False


@dataclass(frozen=True, slots=True)
class OpenCostAllocation:
    """GPU time of one holder, or of several combined, in [start_ms, end_ms).

    properties, labels: the properties and labels that all of its holders share.
    known_us: held time with known utilisation.
    busy_us: the busy part of it.
    shared_gpu: whether some of it is time of a part of a GPU."""

    properties: Mapping[str, str]
    labels: Mapping[str, str]
    idle: bool
    start_ms: int
    end_ms: int
    time: Mapping[CostGroup, int]
    busy_us: int = 0
    known_us: int = 0
    gpus: frozenset[str] = frozenset()
    shared_gpu: bool = False

    @property
    def gpu_us(self) -> int:
        """GPU-µs of held (or idle) time, without shared idle time."""
        return sum(gpu_us for group, gpu_us in self.time.items() if not group.shared)

    @property
    def cost(self) -> Fraction:
        """The cost of all time with a price, with shared idle time, in the price book's currency."""
        return self._cost(self.time)

    @property
    def shared_cost(self) -> Fraction:
        return self._cost(group for group in self.time if group.shared)

    @property
    def unpriced(self) -> Mapping[str, int]:
        """GPU-µs without a price, by model."""
        by_model: dict[str, int] = defaultdict(int)
        for group, gpu_us in self.time.items():
            if group.price is None:
                by_model[group.model] += gpu_us
        return by_model

    @property
    def models(self) -> frozenset[str]:
        return frozenset(group.model for group in self.time if not group.shared)

    @property
    def count(self) -> Fraction:
        """GPUs held on average."""
        return Fraction(self.gpu_us, (self.end_ms - self.start_ms) * US_PER_MS)

    @property
    def efficiency(self) -> Fraction | None:
        """Busy time over held time, for time with known utilisation; None if there is none."""
        return Fraction(self.busy_us, self.known_us) if self.known_us else None

    def at_rate(self, rate: Decimal) -> OpenCostAllocation:
        """The allocation with every price multiplied by the rate, exactly."""
        if rate == 1:
            return self
        converted = {
            group._replace(price=None if group.price is None else exact_product(group.price, rate)): gpu_us
            for group, gpu_us in self.time.items()
        }
        return replace(self, time=converted)

    def _cost(self, groups: Iterable[CostGroup]) -> Fraction:
        priced = [(group.price, self.time[group]) for group in groups if group.price is not None]
        return sum((Fraction(price) * gpu_us for price, gpu_us in priced), Fraction(0)) / US_PER_HOUR


SORTED_BY: Final[Mapping[str, Callable[[OpenCostAllocation], Fraction]]] = {
    "totalCost": lambda one: one.cost,
    "gpuCost": lambda one: one.cost,
    "gpuHours": lambda one: Fraction(one.gpu_us),
    "gpuCount": lambda one: one.count,
    "gpuEfficiency": lambda one: one.efficiency or Fraction(0),
    "totalEfficiency": lambda one: one.efficiency or Fraction(0),
    "minutes": lambda one: Fraction(one.end_ms - one.start_ms),
}
"""The sort key for each figure of `accountant.compat.opencost_query.FIGURES`."""


def allocations(
    charges: Iterable[Charge],
    pods: Mapping[PodName, PodSeen],
    start_ms: int,
    end_ms: int,
    machines: Mapping[tuple[str, str], str] = MappingProxyType({}),
) -> list[OpenCostAllocation]:
    """Returns one allocation per holder and place, and one idle allocation per node and GPU.

    charges: those of the span, grouped by DIMENSIONS.
    machines: provider ids by cluster and node."""
    groups: dict[tuple[bool, tuple[str, ...]], list[Charge]] = {}
    for charge in charges:
        is_held = charge.account in ALLOCATED
        if is_held or charge.account == "unallocated":
            groups.setdefault((is_held, charge.key[:-1] if is_held else charge.key), []).append(charge)
    return [
        _allocation(is_held, charges_of_group, pods, start_ms, end_ms, machines)
        for (is_held, _), charges_of_group in sorted(groups.items())
    ]


def share_idle(allocations: Sequence[OpenCostAllocation], *, by_node: bool) -> list[OpenCostAllocation]:
    """Divides the idle time of each node (or cluster) among its holders in proportion to the cost of what they held, or
    to their GPU time if some of it has no price. Idle time of a node or cluster without holders stays."""
    pools: dict[tuple[str, ...], list[int]] = defaultdict(list)
    idle_us: dict[tuple[tuple[str, ...], CostGroup], int] = defaultdict(int)
    for index, allocation in enumerate(allocations):
        pool = tuple(allocation.properties.get(name, "") for name in ("cluster", "node")[: 1 + by_node])
        if allocation.idle:
            for group, gpu_us in allocation.time.items():
                idle_us[pool, group._replace(shared=True)] += gpu_us
        else:
            pools[pool].append(index)
    weights = {pool: _weights({index: allocations[index] for index in members}) for pool, members in pools.items()}
    shares, unshared = spread_shares(idle_us, {key: weights.get(key[0], {}) for key in idle_us})
    idle_stays = {pool for pool, _ in unshared}
    shared: dict[int, dict[CostGroup, int]] = defaultdict(dict)
    for (_, group), gains in shares.items():
        for index, gpu_us in gains.items():
            shared[index][group] = gpu_us
    result = []
    for index, allocation in enumerate(allocations):
        pool = tuple(allocation.properties.get(name, "") for name in ("cluster", "node")[: 1 + by_node])
        if not allocation.idle:
            result.append(
                replace(allocation, time={**allocation.time, **shared[index]}) if index in shared else allocation
            )
        elif pool in idle_stays:
            result.append(allocation)
    return result


def aggregated(
    allocations: Iterable[OpenCostAllocation], keys: Sequence[str], *, split_idle: str = ""
) -> dict[str, OpenCostAllocation]:
    """Combines allocations with the same name; returns them sorted by name. A name consists of the values of the keys,
    joined by slashes.

    split_idle: `node` or `cluster` names idle time by node or cluster; "": all of it has one name."""
    groups: dict[str, list[OpenCostAllocation]] = {}
    for allocation in allocations:
        name = (
            _idle_name(allocation, split_idle)
            if allocation.idle
            else "/".join(value_of(allocation, key) for key in keys)
        )
        groups.setdefault(name, []).append(allocation)
    return {name: merged(groups[name]) for name in sorted(groups)}


def accumulated(sets: Iterable[Mapping[str, OpenCostAllocation]]) -> dict[str, OpenCostAllocation]:
    """Combines consecutive sets into one."""
    groups: dict[str, list[OpenCostAllocation]] = {}
    for of_set in sets:
        for name, allocation in of_set.items():
            groups.setdefault(name, []).append(allocation)
    return {name: merged(groups[name]) for name in sorted(groups)}


def merged(parts: Sequence[OpenCostAllocation]) -> OpenCostAllocation:
    """Combines allocations into one: times are added, and properties on which all agree are kept."""
    if len(parts) == 1:
        return parts[0]
    time: dict[CostGroup, int] = defaultdict(int)
    for part in parts:
        for group, gpu_us in part.time.items():
            time[group] += gpu_us
    return OpenCostAllocation(
        _common([part.properties for part in parts]),
        _common([part.labels for part in parts]),
        all(part.idle for part in parts),
        min(part.start_ms for part in parts),
        max(part.end_ms for part in parts),
        time,
        sum(part.busy_us for part in parts),
        sum(part.known_us for part in parts),
        frozenset().union(*(part.gpus for part in parts)),
        any(part.shared_gpu for part in parts),
    )


def value_of(allocation: OpenCostAllocation, key: str) -> str:
    """The value of a property for aggregation; UNALLOCATED if there is none."""
    properties = allocation.properties
    kind, controller = properties.get("controllerKind", ""), properties.get("controller", "")
    if key == "all":
        return "all"
    if key == "controller":
        value = f"{kind}:{controller}" if controller and kind else controller
    elif key in CONTROLLER_KINDS:
        value = controller if kind == key else ""
    elif key.startswith("annotation:"):
        value = ""  # the ledger does not store it
    elif key.startswith("label:"):
        value = allocation.labels.get(key.removeprefix("label:"), "")
    elif key in LABEL_OF:
        value = allocation.labels.get(LABEL_OF[key], "")
    else:
        value = properties.get(key, "")
    return value or UNALLOCATED


def filtered_by(allocation: OpenCostAllocation) -> Mapping[str, str]:
    """The properties of an allocation by their names in filters."""
    labels = {f"label[{name}]": value for name, value in allocation.labels.items()}
    by_name = {name: allocation.labels.get(label, "") for name, label in LABEL_OF.items()}
    kind, controller = allocation.properties.get("controllerKind", ""), allocation.properties.get("controller", "")
    by_kind = {kind: controller} if kind in CONTROLLER_KINDS else {}
    return {**allocation.properties, "controllerName": controller, **by_kind, **by_name, **labels}


def _allocation(
    is_held: bool,
    charges: Sequence[Charge],
    pods: Mapping[PodName, PodSeen],
    start_ms: int,
    end_ms: int,
    machines: Mapping[tuple[str, str], str],
) -> OpenCostAllocation:
    names = dict(zip(DIMENSIONS, charges[0].key, strict=True))
    time: dict[CostGroup, int] = defaultdict(int)
    by_gpu: dict[str, int] = defaultdict(int)
    of_account: dict[str, int] = defaultdict(int)
    for charge in charges:
        time[CostGroup(charge.place.gpu_model, charge.row.price if charge.row else None, False)] += charge.gpu_us
        by_gpu[charge.key[-1]] += charge.gpu_us
        of_account[charge.account] += charge.gpu_us
    location = {name: names[name] for name in ("cluster", "node") if names[name]}
    if machine := machines.get((names["cluster"], names["node"]), ""):
        location["providerID"] = machine
    if not is_held:
        return OpenCostAllocation(location, {}, True, start_ms, end_ms, time)
    pod = pods.get((names["cluster"], names["namespace"], names["pod"]), PodSeen())
    pod_names = {name: names[name] for name in ("namespace", "pod", "container") if names[name]}
    team = {"team": names["team"]} if names["team"] not in ("", UNASSIGNED) else {}
    begin, end = _pod_lifetime(pod, start_ms, end_ms, max(by_gpu.values()))
    return OpenCostAllocation(
        {**location, **pod_names, **_controller(names["job"]), **team},
        pod.labels,
        False,
        begin,
        end,
        time,
        of_account["busy"],
        of_account["busy"] + of_account["allocated_idle"],
        frozenset(by_gpu),
        bool(names["mig_profile"]) or pod.shares,
    )


def _pod_lifetime(pod: PodSeen, start_ms: int, end_ms: int, longest_us: int) -> tuple[int, int]:
    """When the pod existed, within the span. It is the whole span if the pod held one GPU for longer than its known
    lifetime. longest_us: the longest time for which it held one GPU."""
    begin = max(start_ms, pod.start_ms) if pod.start_ms is not None else start_ms
    end = min(end_ms, pod.end_ms) if pod.end_ms is not None else end_ms
    return (begin, end) if longest_us <= (end - begin) * US_PER_MS else (start_ms, end_ms)


def _controller(job: str) -> dict[str, str]:
    kind, _, name = job.partition("/")
    return {} if kind in _LONE or not name else {"controllerKind": kind.lower(), "controller": name}


def _weights(members: Mapping[int, OpenCostAllocation]) -> dict[int, int]:
    if any(group.price is None for allocation in members.values() for group in allocation.time):
        return {index: allocation.gpu_us for index, allocation in members.items()}
    return whole_weights({index: allocation.cost for index, allocation in members.items()})


def _idle_name(allocation: OpenCostAllocation, split_idle: str) -> str:
    where = allocation.properties.get(split_idle, "") if split_idle else ""
    return f"{where}/{IDLE_NAME}" if where else IDLE_NAME


def _common(mappings: Collection[Mapping[str, str]]) -> dict[str, str]:
    first, *others = mappings
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


_PROPERTIES = ("cluster", "node", "container", "controller", "controllerKind", "namespace", "pod", "providerID")
_CPU = ("cpuCores", "cpuCoreRequestAverage", "cpuCoreUsageAverage", "cpuCoreHours", "cpuCost", "cpuCostAdjustment",
        "cpuCostIdle", "cpuEfficiency")  # fmt: skip
_NETWORK = ("networkTransferBytes", "networkReceiveBytes", "networkCost", "networkCrossZoneCost",
            "networkCrossRegionCost", "networkInternetCost", "networkCostAdjustment")  # fmt: skip
_BALANCERS_AND_VOLUMES = ("loadBalancerCost", "loadBalancerCostAdjustment", "pvBytes", "pvByteHours", "pvCost")
_MEMORY = ("ramBytes", "ramByteRequestAverage", "ramByteUsageAverage", "ramByteHours", "ramCost", "ramCostAdjustment",
           "ramCostIdle", "ramEfficiency", "externalCost", "sharedCost")  # fmt: skip
_NS_PER_MS = 1_000_000
_COLUMNS = ("start", "end", "minutes", "gpuCount", "gpuHours", "gpuCost", "gpuCostIdle", "gpuEfficiency",
            "totalCost", "totalEfficiency")  # fmt: skip
"""Columns of the CSV after the properties."""


def sets(allocation_sets: Iterable[tuple[Span, Mapping[str, OpenCostAllocation]]]) -> list[dict[str, Any]]:
    """The `data` of an allocation answer: one map per set."""
    return [
        {name: allocation(name, item, span) for name, item in allocations.items()}
        for span, allocations in allocation_sets
    ]


def summary(
    allocation_sets: Iterable[tuple[Span, Mapping[str, OpenCostAllocation]]], step_ms: int, span_of_query: Span
) -> dict[str, Any]:
    """The `data` of a summary answer; step in nanoseconds, as in Go."""
    return {
        "step": step_ms * _NS_PER_MS,
        "sets": [
            {
                "allocations": {name: _summary_entry(name, item) for name, item in allocations.items()},
                "window": window(span),
            }
            for span, allocations in allocation_sets
        ],
        "window": window(span_of_query),
    }


def table(allocation_sets: Iterable[tuple[Span, Mapping[str, OpenCostAllocation]]]) -> str:
    """All allocations of all sets as CSV with one line each. Text that a spreadsheet would execute gets an
    apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(["name", "windowStart", "windowEnd", *_PROPERTIES, *_COLUMNS])
    for span, allocations in allocation_sets:
        for name, item in allocations.items():
            fields = allocation(name, item, span)
            properties = [for_cell(item.properties.get(key, "")) for key in _PROPERTIES]
            writer.writerow([for_cell(name), *map(instant, span), *properties, *(fields[key] for key in _COLUMNS)])
    return out.getvalue()


class NodeTotal(NamedTuple):
    """The capacity of a node that was up and metered.

    cost: the sum of price per GPU-hour × GPU-µs, so US_PER_HOUR times the cost in the price book's currency."""

    gpu_us: int = 0
    cost: Fraction = Fraction(0)


def node_assets(
    totals: Mapping[tuple[str, str], NodeTotal], facts_of: Mapping[tuple[str, str], NodeFacts], span: Span
) -> dict[str, Any]:
    """Returns OpenCost assets of type Node, under the keys that OpenCost gives its assets. totals: by cluster and
    node."""
    return {
        f"__undefined__/__undefined__/__undefined__/Compute/{cluster}/Node/Kubernetes/{node}/{node}": _node(
            cluster, node, total, facts_of.get((cluster, node), NodeFacts(cluster, node)), span
        )
        for (cluster, node), total in sorted(totals.items())
    }


def _asset(cluster: str, node: str, machine: str) -> dict[str, str]:
    return {**ASSET, "cluster": cluster, "name": node, "providerID": machine}


def provider_id(facts: NodeFacts) -> str:
    """The provider id as OpenCost shows it (ParseID in core/pkg/util)."""
    cloud = _MACHINE.match(facts.provider_id)
    return cloud[1] if cloud else facts.provider_id


def _node(cluster: str, node: str, total: NodeTotal, facts: NodeFacts, span: Span) -> dict[str, Any]:
    cost = float(total.cost / US_PER_HOUR)
    places = {"topology_kubernetes_io_region": facts.region, "topology_kubernetes_io_zone": facts.zone}
    return {
        "type": ASSET["type"],
        "properties": {
            name: value for name, value in _asset(cluster, node, provider_id(facts)).items() if value and name != "type"
        },
        "labels": {name: value for name, value in places.items() if value},
        "window": window(span),
        "start": instant(span[0]),
        "end": instant(span[1]),
        "minutes": (span[1] - span[0]) / MS_PER_MINUTE,
        "nodeType": facts.instance_type,
        **dict.fromkeys(("cpuCores", "ramBytes", "cpuCoreHours", "ramByteHours"), 0),
        "GPUHours": total.gpu_us / US_PER_HOUR,
        "cpuBreakdown": dict.fromkeys(("idle", "other", "system", "user"), 0),
        "ramBreakdown": dict.fromkeys(("idle", "other", "system", "user"), 0),
        "preemptible": int(facts.capacity_type == "spot"),
        **dict.fromkeys(("discount", "cpuCost"), 0),
        "gpuCost": cost,
        "gpuCount": total.gpu_us / ((span[1] - span[0]) * US_PER_MS),
        **dict.fromkeys(("ramCost", "adjustment", "overhead"), 0),
        "totalCost": cost,
    }


def allocation(name: str, item: OpenCostAllocation, span: Span) -> dict[str, Any]:
    """An allocation in the form of OpenCost's JSON. span: the span of its set."""
    cost, efficiency = float(item.cost), float(item.efficiency or 0)
    count = float(item.count)
    return {
        "name": name,
        "properties": _properties(item),
        "window": window(span),
        "start": instant(item.start_ms),
        "end": instant(item.end_ms),
        "minutes": (item.end_ms - item.start_ms) / MS_PER_MINUTE,
        **dict.fromkeys(_CPU, 0),
        "gpuCount": count,
        "gpuRequestAverage": count,
        "gpuUsageAverage": float(item.count * (item.efficiency or 0)),
        "gpuHours": item.gpu_us / US_PER_HOUR,
        "gpuCost": cost,
        "gpuCostAdjustment": 0,
        "gpuCostIdle": float(item.shared_cost),
        "gpuEfficiency": efficiency,
        "gpuAllocation": _devices(item),
        **dict.fromkeys(_NETWORK, 0),
        **dict.fromkeys(_BALANCERS_AND_VOLUMES, 0),
        "pvs": None,
        "pvCostAdjustment": 0,
        **dict.fromkeys(_MEMORY, 0),
        "totalCost": cost,
        "totalEfficiency": efficiency,
        "lbAllocations": None,
    }


def window(span: Span) -> dict[str, str]:
    return {"start": instant(span[0]), "end": instant(span[1])}


def instant(at_ms: int) -> str:
    moment = datetime.fromtimestamp(at_ms / MS_PER_SECOND, UTC)
    return moment.isoformat(timespec="milliseconds" if at_ms % MS_PER_SECOND else "seconds").replace("+00:00", "Z")


def _properties(item: OpenCostAllocation) -> dict[str, Any]:
    properties: dict[str, Any] = {name: item.properties[name] for name in _PROPERTIES if name in item.properties}
    return properties | ({"labels": dict(sorted(item.labels.items()))} if item.labels else {})


def _devices(item: OpenCostAllocation) -> dict[str, Any]:
    """The field `gpuAllocation`. Model and UUID are empty unless there is exactly one; unknown usage is null."""
    usage = None if item.efficiency is None else float(item.count * item.efficiency)
    return {
        "gpuDevice": "",
        "gpuModel": next(iter(item.models)) if len(item.models) == 1 else "",
        "gpuUUID": next(iter(item.gpus)) if len(item.gpus) == 1 else "",
        "isGPUShared": item.shared_gpu,
        "gpuUsageAverage": usage,
        "gpuRequestAverage": float(item.count),
        "saturation": None,
    }


def _summary_entry(name: str, item: OpenCostAllocation) -> dict[str, Any]:
    cost = float(item.cost)
    return {
        "name": name,
        "start": instant(item.start_ms),
        "end": instant(item.end_ms),
        **dict.fromkeys(("cpuCoreRequestAverage", "cpuCoreUsageAverage", "cpuCost"), 0),
        "gpuCost": cost,
        **dict.fromkeys(("networkCost", "loadBalancerCost", "pvCost", "ramByteRequestAverage"), 0),
        **dict.fromkeys(("ramByteUsageAverage", "ramCost", "sharedCost", "externalCost"), 0),
        "totalEfficiency": float(item.efficiency or 0),
        "totalCost": cost,
    }


MAX_ALLOCATIONS = 200_000
"""Maximum number of allocations in one answer, over all of its sets."""
_STEPS_AT_ONCE = 31
_SHARED = ("nvidia.com/gpu.shared", "nvidia.com/mig-")
"""Prefixes of resources that are parts of a GPU."""

_FIELDS = {"controllerName": "controller"}
"""Aggregation names of fields with another name."""

AllocationSets = list[tuple[Span, dict[str, OpenCostAllocation]]]


class AllocationSource:
    """Answers queries for allocations and assets. Thread-safe. cluster: the name of this cluster."""

    def __init__(
        self, ledger: ReadableLedger, clock: Clock, book: Callable[[], PriceBook | None], cluster: str, limits: Limits
    ) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._clock = clock
        self._book = book
        self._limits = limits

    def answer(self, query: str, *, summed: bool) -> Mapping[str, object] | str:
        """The body of a successful answer; a text is CSV. summed: a summary answer. Raises BadQuestion and
        AccountantError."""
        question, allocation_sets, warnings = self._query_allocations(query)
        if question.format == "csv":
            return table(allocation_sets)
        span = (question.start_ms, question.end_ms)
        return _success(summary(allocation_sets, question.step_ms, span) if summed else sets(allocation_sets), warnings)

    def nodes(self, query: str) -> Mapping[str, object]:
        """The body of an answer with the GPUs of each node as an asset, whether held or not. Raises what `answer`
        raises.

        Its data is a map by name, as in OpenCost; with `filterTypes` it is a list with this map, as in Kubecost and as
        `kubectl cost node` expects."""
        assets, unpriced = self.assets(query)
        return _success([assets] if parameters(query).get("filterTypes", "") else assets, _unpriced(unpriced))

    def assets(self, query: str, rate: Decimal = Decimal(1)) -> tuple[dict[str, Any], dict[str, int]]:
        """The asset of each node by OpenCost's key, and the GPU-µs without a price by model. Raises what `answer`
        raises.

        rate: with which every price is multiplied, exactly."""
        parameter_values = parameters(query)
        now = self._clock.wall_ms()
        question = parse_query(urlencode({"window": parameter_values.get("window", "")}), now, self._limits)
        matches = asset_filter(parameter_values)
        start, end = question.start_ms, min(question.end_ms, now)
        self._check_cost(question.span._replace(end_ms=end), 2)
        totals: dict[tuple[str, str], NodeTotal] = {}
        unpriced: dict[str, int] = {}
        with self._ledger.moment(start, end) as moment:
            facts_of = {(facts.cluster, facts.name): facts for facts in moment.status().nodes}
            charged = (
                charge_table(moment, self._book(), start, end, ("cluster", "node")).charges() if start < end else []
            )
        machines = {name: provider_id(facts) for name, facts in facts_of.items()}
        for charge in charged:
            cluster, node = charge.key
            if not charge.billed or not matches(_asset(cluster, node, machines.get((cluster, node), ""))):
                continue
            before = totals.get((cluster, node), NodeTotal())
            price = Fraction(charge.row.price) * Fraction(rate) if charge.row is not None else Fraction(0)
            totals[cluster, node] = NodeTotal(before.gpu_us + charge.gpu_us, before.cost + price * charge.gpu_us)
            if charge.unpriced:
                unpriced[charge.place.gpu_model] = unpriced.get(charge.place.gpu_model, 0) + charge.gpu_us
        return node_assets(totals, facts_of, (start, end)), unpriced

    def values(self, query: str) -> Mapping[str, object]:
        """The body of an answer with the values of `field` that contain `search`, of the allocations in the window, for
        a selection list. Raises what `answer` raises."""
        parameter_values = parameters(query)
        field = _FIELDS.get(parameter_values.get("field", ""), parameter_values.get("field", ""))
        allocation_query = urlencode(
            {name: parameter_values[name] for name in ("window", "filter") if parameter_values.get(name)}
            | {"aggregate": field or "namespace", "accumulate": "true"}
        )
        _, allocation_sets, _ = self._query_allocations(allocation_query)
        search = parameter_values.get("search", "").lower()
        one_kind = [name.partition(":")[2] or name if field == "controller" else name for name in allocation_sets[0][1]]
        values = sorted({name for name in one_kind if name != UNALLOCATED and search in name.lower()})
        limit = parameter_values.get("limit", "")
        return _success(values[: int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else None], [])

    def information(self) -> Mapping[str, object]:
        """The body of /clusterInfo: the clusters that allocations name, this accountant's own first."""
        clusters = sorted(self.clusters(), key=lambda name: (name != self._cluster, name)) or [self._cluster]
        return _success(
            {"id": clusters[0], "name": ", ".join(clusters), "profile": "gputally", "provider": "", "version": ""}, []
        )

    def configuration(self) -> Mapping[str, object]:
        """The body of /getConfigs: the currency of all costs."""
        return _success({"currencyCode": self.currency() or "", "clusterName": self._cluster}, [])

    def clusters(self) -> Collection[str]:
        """The clusters with booked records."""
        return self._ledger.status().clusters

    def currency(self) -> str | None:
        """The currency of all costs; None if it is unknown."""
        book = self._book()
        return book.currency if book is not None else None

    def _check_cost(self, span: QuerySpan, width: int) -> None:
        """Raises BadQuestion for a query that is too large, before anything is read."""
        if reason := query_parameters.refusal(self._ledger, self._limits.question_gpu_hours, span, width):
            raise BadQuestion("window", reason)

    def _query_allocations(self, query: str) -> tuple[OpenCostQuestion, AllocationSets, list[str]]:
        now = self._clock.wall_ms()
        question = parse_query(query, now, self._limits)
        allocation_sets, unmetered_us = self.groups(question)
        count = sum(len(allocations) for _, allocations in allocation_sets)
        selected = [(span, _select_allocations(allocations, question)) for span, allocations in allocation_sets]
        omitted = count - sum(len(allocations) for _, allocations in selected)
        warnings = _warnings(allocation_sets, unmetered_us, question) + (
            [f"{omitted} allocations are left out, because of limit and offset"] if omitted else []
        )
        return question, selected, warnings

    def groups(self, question: OpenCostQuestion) -> tuple[AllocationSets, int]:
        """The span and the allocations by name of each set of the answer, and the unmetered GPU-µs of all sets. Raises
        BadQuestion."""
        now_ms = self._clock.wall_ms()
        self._check_cost(question.span._replace(end_ms=min(question.end_ms, now_ms)), len(question.aggregate))
        book = self._book()
        until_ms = min(question.end_ms, now_ms)
        with self._ledger.moment(question.start_ms, until_ms) as moment:
            pods = _pods_by_name(list(moment.pods(question.start_ms, until_ms, placed=True)))
            machines = {(facts.cluster, facts.name): provider_id(facts) for facts in moment.status().nodes}
            return self._groups(moment, question, book, pods, machines, now_ms)

    def _groups(
        self,
        moment: Moment,
        question: OpenCostQuestion,
        book: PriceBook | None,
        pods: Mapping[PodName, PodSeen],
        machines: Mapping[tuple[str, str], str],
        now_ms: int,
    ) -> tuple[AllocationSets, int]:
        allocation_sets: AllocationSets = []
        unmetered_us = count = 0
        charges_of_steps = self._charges(moment, [step for spans in question.sets for step in spans], book, now_ms)
        for spans in question.sets:
            steps = []
            for start, end in spans:
                called_off.check()
                step_charges = next(charges_of_steps)
                unmetered_us += sum(charge.gpu_us for charge in step_charges if charge.account == "unmetered")
                steps.append(
                    _allocations_of_step(allocations(step_charges, pods, start, min(end, now_ms), machines), question)
                )
            allocation_sets.append(((spans[0][0], spans[-1][1]), accumulated(steps) if len(steps) > 1 else steps[0]))
            count += len(allocation_sets[-1][1])
            if count > MAX_ALLOCATIONS:
                raise BadQuestion("window", f"more than {MAX_ALLOCATIONS} allocations: aggregate, or ask for less time")
        return allocation_sets, unmetered_us

    @staticmethod
    def _charges(moment: Moment, steps: Sequence[Span], book: PriceBook | None, now_ms: int) -> Iterator[list[Charge]]:
        """Yields the charges of each step until now. If all steps consist of whole hours, one ledger query covers many
        steps."""
        grain = _grain(steps)
        many = _STEPS_AT_ONCE if grain else 1
        for chunk in (steps[at : at + many] for at in range(0, len(steps), many)):
            start, end = chunk[0][0], min(chunk[-1][1], now_ms)
            by = DIMENSIONS if grain is None else (*DIMENSIONS, grain)
            charged = charge_table(moment, book, start, end, by).charges() if start < end else []
            if grain is None:
                yield charged
                continue
            of_step: list[list[Charge]] = [[] for _ in chunk]
            starts = [begin for begin, _ in chunk]
            for charge in charged:
                at = bisect_right(starts, max(start, _instant(charge.key[-1]))) - 1
                of_step[at].append(replace(charge, key=charge.key[:-1]))
            yield from of_step


class ExchangeRates(Protocol):
    """The part of `accountant.fleet.fleet_ledgers.Rates` that is used here. to: the currency after conversion."""

    to: str

    def converted(self, amount: Decimal, currency: str) -> Decimal:
        """The exact amount in `to`. Raises AccountantError if there is no rate."""
        ...


class AllocationsOfLedgers(AllocationSource):
    """Answers for several ledgers as one: allocations with the same name are added up.

    ledgers: by name.
    rates: the operator's exchange rates; with them every cost is in their currency.
    unreadable: why further ledgers cannot be read. If there are any, every query is refused, because OpenCost's clients
        add up what they get.

    Without rates, a query that would add costs in several currencies is refused."""

    def __init__(
        self,
        ledgers: Mapping[str, AllocationSource],
        clock: Clock,
        limits: Limits,
        rates: ExchangeRates | None = None,
        unreadable: Sequence[str] = (),
    ) -> None:
        # The methods that read one ledger are overridden.
        super().__init__(cast(ReadableLedger, None), clock, lambda: None, "", limits)
        self._readable = ledgers
        self._rates = rates
        self._unreadable = unreadable

    @property
    def _ledgers(self) -> Mapping[str, AllocationSource]:
        """Every ledger of the lake. Raises UnreadableLedger."""
        if self._unreadable:
            hint = "or query one ledger, below its own path"
            raise UnreadableLedger("; ".join([*self._unreadable, hint]))
        return self._readable

    def groups(self, question: OpenCostQuestion) -> tuple[AllocationSets, int]:
        self._check_currencies()
        sets: dict[Span, list[dict[str, OpenCostAllocation]]] = {}
        unmetered_us = 0
        for source in self._ledgers.values():
            allocation_sets, unmetered = source.groups(question)
            unmetered_us += unmetered
            rate = self._rate(source)
            for span, allocations in allocation_sets:
                sets.setdefault(span, []).append(
                    {name: allocation.at_rate(rate) for name, allocation in allocations.items()}
                )
        added = [(span, accumulated(parts)) for span, parts in sets.items()]
        if sum(len(allocations) for _, allocations in added) > MAX_ALLOCATIONS:
            raise BadQuestion("window", f"more than {MAX_ALLOCATIONS} allocations: aggregate, or ask for less time")
        return added, unmetered_us

    def assets(self, query: str, rate: Decimal = Decimal(1)) -> tuple[dict[str, Any], dict[str, int]]:
        self._check_currencies()
        assets: dict[str, Any] = {}
        unpriced: dict[str, int] = {}
        for name, source in self._ledgers.items():
            of_ledger, unpriced_of_ledger = source.assets(query, exact_product(rate, self._rate(source)))
            if duplicates := assets.keys() & of_ledger.keys():
                node = min(duplicates).rpartition("/")[2]
                raise BadQuestion(
                    "window",
                    f"{name} and another ledger have a node {node} in clusters of the same name: query one ledger",
                )
            assets |= of_ledger
            for model, gpu_us in unpriced_of_ledger.items():
                unpriced[model] = unpriced.get(model, 0) + gpu_us
        return assets, unpriced

    def clusters(self) -> Collection[str]:
        return frozenset().union(*(source.clusters() for source in self._ledgers.values()))

    def currency(self) -> str | None:
        currencies = self._currencies()
        if self._rates is not None and currencies:
            return self._rates.to
        return currencies[0] if len(currencies) == 1 else None

    def _currencies(self) -> list[str]:
        return sorted({currency for source in self._ledgers.values() if (currency := source.currency()) is not None})

    def _check_currencies(self) -> None:
        currencies = self._currencies()
        if self._rates is None and len(currencies) > 1:
            hint = "query one ledger, or start the server with --rates FILE"
            raise BadQuestion("window", f"amounts in {', '.join(currencies)} cannot be added up: {hint}")

    def _rate(self, source: AllocationSource) -> Decimal:
        """The value of one unit of the source's currency in the currency of the answer. Raises BadQuestion."""
        currency = source.currency()
        if self._rates is None or currency is None:
            return Decimal(1)
        try:
            return self._rates.converted(Decimal(1), currency)
        except AccountantError as error:
            raise BadQuestion("window", str(error)) from error


def _grain(steps: Sequence[Span]) -> Literal["hour", "day"] | None:
    """The dimension by which the charges of one ledger query can be divided into these steps; None if there is none."""
    edges = [end for _, end in steps[:-1]]
    if not edges:
        return None
    if all(edge % MS_PER_DAY == 0 for edge in edges):
        return "day"
    return "hour" if all(edge % MS_PER_HOUR == 0 for edge in edges) else None


@lru_cache(maxsize=MAX_STEPS)
def _instant(text: str) -> int:
    """The start of a day or an hour that the ledger names, in UTC milliseconds."""
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * MS_PER_SECOND)


def _allocations_of_step(
    allocations: list[OpenCostAllocation], question: OpenCostQuestion
) -> dict[str, OpenCostAllocation]:
    if question.share_idle:
        allocations = share_idle(allocations, by_node=question.idle_by_node)
    with_idle = question.include_idle or question.share_idle
    matching = [
        allocation
        for allocation in allocations
        if (with_idle or not allocation.idle) and question.matches(filtered_by(allocation))
    ]
    split_idle = ("node" if question.idle_by_node else "cluster") if question.split_idle else ""
    return aggregated(matching, question.aggregate, split_idle=split_idle)


def _select_allocations(
    allocations: dict[str, OpenCostAllocation], question: OpenCostQuestion
) -> dict[str, OpenCostAllocation]:
    """The allocations of one set that the answer shows, in the order that the query asks for."""
    names = list(allocations)
    if question.sort:
        sort_key = SORTED_BY[question.sort]
        names.sort(key=lambda name: sort_key(allocations[name]), reverse=question.descending)
    elif question.descending:
        names.reverse()
    until = None if question.limit is None else question.offset + question.limit
    return {name: allocations[name] for name in names[question.offset : until]}


def _success(data: object, warnings: Sequence[str]) -> Mapping[str, object]:
    return {"code": 200, "status": "success", "data": data} | ({"warning": "; ".join(warnings)} if warnings else {})


def _pods_by_name(pods: Sequence[QueuedPod]) -> Mapping[PodName, PodSeen]:
    """The pods by cluster, namespace and name; several pods with one name are combined."""
    by_name: dict[PodName, PodSeen] = {}
    for pod in sorted(pods, key=lambda seen: (seen.facts.created_ms or seen.facts.scheduled_ms or 0, seen.facts.uid)):
        facts, name = pod.facts, (pod.cluster, pod.facts.namespace, pod.facts.name)
        bound = facts.scheduled_ms if facts.scheduled_ms is not None else facts.created_ms
        end = facts.ended_ms
        shares = any(resource.startswith(_SHARED) for resource in facts.requests)
        if (before := by_name.get(name)) is not None:
            bound = None if bound is None or before.start_ms is None else min(bound, before.start_ms)
            end = None if end is None or before.end_ms is None else max(end, before.end_ms)
            shares = shares or before.shares
        by_name[name] = PodSeen(bound, end, facts.labels, shares)
    return by_name


def _warnings(allocation_sets: AllocationSets, unmetered_us: int, question: OpenCostQuestion) -> list[str]:
    unpriced: dict[str, int] = {}
    for _, allocations in allocation_sets:
        for allocation in allocations.values():
            for model, gpu_us in allocation.unpriced.items():
                unpriced[model] = unpriced.get(model, 0) + gpu_us
    warnings = _unpriced(unpriced)
    if unmetered_us:
        warnings.append(f"{_hours(unmetered_us)} of the window are not metered, or not delivered yet, and in no figure")
    if "service" in question.aggregate:
        warnings.append("the ledger does not store services: no allocation has one")
    if any(name.startswith("annotation:") for name in question.aggregate):
        warnings.append("the ledger does not store annotations: no allocation has one")
    warnings += [
        f"{name} is requested, but the ledger does not store it: no allocation has one" for name in question.unkept
    ]
    warnings += [f"the parameter {name} is not supported and has no effect" for name in question.ignored]
    return warnings


def _unpriced(by_model: Mapping[str, int]) -> list[str]:
    if not by_model:
        return []
    models = ", ".join(f"{model} ({_hours(gpu_us)})" for model, gpu_us in sorted(by_model.items()))
    return [f"cost 0 means unpriced for {models}: add a price to the price book"]


def _hours(gpu_us: int) -> str:
    return f"{gpu_us / US_PER_HOUR:,.2f} GPU-hours"


_TURNS: Final = TurnLimits(running=2, running_by_caller=2, waiting=64, waiting_by_caller=64, patience_s=30)
"""A query that has waited for half a minute is refused."""
_PLAIN = frozenset({"window", "aggregate"})
"""Parameters whose faults OpenCost answers as plain text."""
_EMPTY: Mapping[str, object] = {
    "/assets/autocomplete": [],
    "/cloudCost": [],
    "/cloudCost/autocomplete": [],
    "/cloudCost/status": [],
    "/cloudCost/view/graph": [],
    "/cloudCost/view/table": [],
    "/cloudCost/view/totals": [],
    "/customCost/status": [],
    "/customCost/total": [],
    "/customCost/timeseries": [],
}


def create_app(source: AllocationSource) -> FastAPI:
    """The listener's application. It needs no credentials, only reads, and answers two queries at a time. The work on
    a query ends when its client goes."""
    turns = Turns("queries", _TURNS)

    def reading(read: Callable[[str], Mapping[str, object] | str]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                return await turns.run(request, _encode_answer, read, request.url.query)
            except BadQuestion as bad:
                return _bad_request(bad)
            except Busy as busy:
                body = {"code": 503, "status": "", "data": None, "message": f"Error: {busy}"}
                return _json(body, 503, {"Retry-After": str(round(busy.seconds))})
            except CalledOff:
                return GONE
            except AccountantError as error:
                return _json({"code": 503, "status": "", "data": None, "message": f"Error: {error}"}, 503)

        return answer

    def always(data: object) -> Callable[[Request], Any]:
        body = {"code": 200, "status": "success", "data": data}

        async def same(_: Request) -> Response:
            return _json(body)

        return same

    async def well(_: Request) -> Response:
        return PlainTextResponse("")

    app = FastAPI(title="gputally's answers in OpenCost's form", openapi_url=None)
    questions: Mapping[str, Callable[[str], Mapping[str, object] | str]] = {
        "/allocation": partial(source.answer, summed=False),
        "/allocation/compute": partial(source.answer, summed=False),
        "/allocation/summary": partial(source.answer, summed=True),
        "/allocation/compute/summary": partial(source.answer, summed=True),
        "/allocation/autocomplete": source.values,
        "/assets": source.nodes,
        "/clusterInfo": lambda _: source.information(),
        "/getConfigs": lambda _: source.configuration(),
    }
    for prefix in ("", "/model"):
        for path, read in questions.items():
            app.add_route(prefix + path, reading(read))
        for path, data in _EMPTY.items():
            app.add_route(prefix + path, always(data))
        app.add_route(f"{prefix}/healthz", well)
    return app


def _encode_answer(read: Callable[[str], Mapping[str, object] | str], query: str) -> Response:
    answer = read(query)
    return Response(answer, media_type="text/csv") if isinstance(answer, str) else _json(answer)


def _json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _bad_request(bad: BadQuestion) -> Response:
    if bad.parameter in _PLAIN:
        return PlainTextResponse(f"Invalid '{bad.parameter}' parameter: {bad}\n", 400)
    return _json({"code": 400, "status": "", "data": None, "message": f"Error: {bad.parameter}: {bad}"}, 400)
