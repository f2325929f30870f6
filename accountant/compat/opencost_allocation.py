"""Computes OpenCost's allocations from charges and writes them in OpenCost's JSON.

Time is kept as integers per GPU model and price until it is shown, so that the parts of any step, key or share
add up to the whole exactly: over one span the costs of all allocations and of `__idle__` are the cost of the
capacity that was up and metered. Idle is time without a holder. It is shared, where that is asked for, within its node
or cluster by the cost of what was held there, before anything is filtered; idle of a node or cluster without any held
time stays idle. Source of the order: OpenCost core/pkg/opencost/allocation.go (AggregateBy).

Pure. It must not round, and it knows nothing of HTTP or JSON.

Only the GPU figures say anything: CPU, memory, network, load balancers and volumes are not metered and 0. Times are
RFC 3339 in UTC. Floats are the nearest ones to exact values, not rounded to five decimals.

Source: OpenCost core/pkg/opencost/allocation_json.go and summaryallocation_json.go. Pure.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, NamedTuple

from accountant.billing.billing_rules import spread_shares, whole_weights
from accountant.billing.costs import ALLOCATED, Charge
from accountant.compat.opencost_query import ASSET, CONTROLLER_KINDS, LABEL_OF, Span
from accountant.ledger.protocols import NodeFacts
from accountant.wire.policy_models import UNASSIGNED
from accountant.wire.usage_models import Dimension
from gputally.base.text_escaping import for_cell
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND, US_PER_HOUR, US_PER_MS

DIMENSIONS: Final[tuple[Dimension, ...]] = (
    "cluster", "node", "namespace", "pod", "container", "job", "team", "mig_profile", "gpu",
)  # fmt: skip
"""What charges have to be asked by; GPUs of one holder are put together."""
IDLE_NAME = "__idle__"
UNALLOCATED = "__unallocated__"
_LONE = frozenset({"Pod", "Container", "Process", "Unattributed"})
"""Beginnings of a job's name that say that nothing stands above the holder."""


class CostGroup(NamedTuple):
    """Time that costs the same. price None: without one. shared: idle time put on this allocation."""

    model: str
    price: Decimal | None
    shared: bool


PodName = tuple[str, str, str]
"""Cluster, namespace, name."""


@dataclass(frozen=True, slots=True)
class PodSeen:
    """What is known of the pods of one name: when they were bound and ended (None: not known), and the labels of
    the newest. shares: it asked for a part of a GPU."""

    start_ms: int | None = None
    end_ms: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    shares: bool = False


@dataclass(frozen=True, slots=True)
class Allocation:
    """GPU time of one holder, or of several put together, in [start_ms, end_ms).

    properties, labels: those that all of them have. known_us: of the held time, what utilisation is known for,
    and busy_us what of that was busy. shared_gpu: some of it is a part of a GPU."""

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
        """Held (or idle) time, without what was shared out onto it."""
        return sum(gpu_us for slot, gpu_us in self.time.items() if not slot.shared)

    @property
    def cost(self) -> Fraction:
        """Of everything that has a price, shared idle time included; currency of the price book."""
        return self._cost(self.time)

    @property
    def shared_cost(self) -> Fraction:
        return self._cost(slot for slot in self.time if slot.shared)

    @property
    def unpriced(self) -> Mapping[str, int]:
        """GPU-µs without a price, by model."""
        found: dict[str, int] = defaultdict(int)
        for slot, gpu_us in self.time.items():
            if slot.price is None:
                found[slot.model] += gpu_us
        return found

    @property
    def models(self) -> frozenset[str]:
        return frozenset(slot.model for slot in self.time if not slot.shared)

    @property
    def count(self) -> Fraction:
        """GPUs held on average."""
        return Fraction(self.gpu_us, (self.end_ms - self.start_ms) * US_PER_MS)

    @property
    def efficiency(self) -> Fraction | None:
        """Busy time of all devices over held time, as far as known; None where nothing is."""
        return Fraction(self.busy_us, self.known_us) if self.known_us else None

    def _cost(self, slots: Iterable[CostGroup]) -> Fraction:
        priced = [(slot.price, self.time[slot]) for slot in slots if slot.price is not None]
        return sum((Fraction(price) * gpu_us for price, gpu_us in priced), Fraction(0)) / US_PER_HOUR


SORTED_BY: Final[Mapping[str, Callable[[Allocation], Fraction]]] = {
    "totalCost": lambda one: one.cost,
    "gpuCost": lambda one: one.cost,
    "gpuHours": lambda one: Fraction(one.gpu_us),
    "gpuCount": lambda one: one.count,
    "gpuEfficiency": lambda one: one.efficiency or Fraction(0),
    "totalEfficiency": lambda one: one.efficiency or Fraction(0),
    "minutes": lambda one: Fraction(one.end_ms - one.start_ms),
}
"""Figures by accountant.compat.opencost_query.FIGURES."""


def allocations(
    charges: Iterable[Charge], pods: Mapping[PodName, PodSeen], start_ms: int, end_ms: int
) -> list[Allocation]:
    """One per holder and place, and idle ones per node and GPU. charges: of the span, by DIMENSIONS."""
    groups: dict[tuple[bool, tuple[str, ...]], list[Charge]] = {}
    for charge in charges:
        held = charge.account in ALLOCATED
        if held or charge.account == "unallocated":
            groups.setdefault((held, charge.key[:-1] if held else charge.key), []).append(charge)
    return [_allocation(held, found, pods, start_ms, end_ms) for (held, _), found in sorted(groups.items())]


def share_idle(found: Sequence[Allocation], *, by_node: bool) -> list[Allocation]:
    """Idle time put on who held GPUs of the same node (or cluster), in proportion to the cost of that; by GPU
    time where some of it has no price."""
    pools: dict[tuple[str, ...], list[int]] = defaultdict(list)
    free: dict[tuple[tuple[str, ...], CostGroup], int] = defaultdict(int)
    for at, one in enumerate(found):
        pool = tuple(one.properties.get(name, "") for name in ("cluster", "node")[: 1 + by_node])
        if one.idle:
            for slot, gpu_us in one.time.items():
                free[pool, slot._replace(shared=True)] += gpu_us
        else:
            pools[pool].append(at)
    weights = {pool: _weights({at: found[at] for at in members}) for pool, members in pools.items()}
    shares, left = spread_shares(free, {key: weights.get(key[0], {}) for key in free})
    idle_stays = {pool for pool, _ in left}
    gained: dict[int, dict[CostGroup, int]] = defaultdict(dict)
    for (_, slot), parts in shares.items():
        for at, gpu_us in parts.items():
            gained[at][slot] = gpu_us
    answer = []
    for at, one in enumerate(found):
        pool = tuple(one.properties.get(name, "") for name in ("cluster", "node")[: 1 + by_node])
        if not one.idle:
            answer.append(replace(one, time={**one.time, **gained[at]}) if at in gained else one)
        elif pool in idle_stays:
            answer.append(one)
    return answer


def aggregated(found: Iterable[Allocation], keys: Sequence[str], *, split_idle: str = "") -> dict[str, Allocation]:
    """By name, sorted: the values of the keys joined with a slash. split_idle: `node` or `cluster` keeps idle
    time apart by it."""
    groups: dict[str, list[Allocation]] = {}
    for one in found:
        name = _idle_name(one, split_idle) if one.idle else "/".join(value_of(one, key) for key in keys)
        groups.setdefault(name, []).append(one)
    return {name: merged(groups[name]) for name in sorted(groups)}


def accumulated(sets: Iterable[Mapping[str, Allocation]]) -> dict[str, Allocation]:
    """Sets that follow one another, as one."""
    groups: dict[str, list[Allocation]] = {}
    for one in sets:
        for name, allocation in one.items():
            groups.setdefault(name, []).append(allocation)
    return {name: merged(groups[name]) for name in sorted(groups)}


def merged(parts: Sequence[Allocation]) -> Allocation:
    """Several allocations as one: times added, properties kept where all agree."""
    if len(parts) == 1:
        return parts[0]
    time: dict[CostGroup, int] = defaultdict(int)
    for part in parts:
        for slot, gpu_us in part.time.items():
            time[slot] += gpu_us
    return Allocation(
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


def value_of(one: Allocation, key: str) -> str:
    """Of one of the names that can be aggregated by; UNALLOCATED where there is none."""
    properties = one.properties
    kind, controller = properties.get("controllerKind", ""), properties.get("controller", "")
    if key == "all":
        return "all"
    if key == "controller":
        value = f"{kind}:{controller}" if controller and kind else controller
    elif key in CONTROLLER_KINDS:
        value = controller if kind == key else ""
    elif key.startswith("annotation:"):
        value = ""  # the ledger keeps none
    elif key.startswith("label:"):
        value = one.labels.get(key.removeprefix("label:"), "")
    elif key in LABEL_OF:
        value = one.labels.get(LABEL_OF[key], "")
    else:
        value = properties.get(key, "")
    return value or UNALLOCATED


def filtered_by(one: Allocation) -> Mapping[str, str]:
    """An allocation's properties by the names that a filter has for them."""
    labels = {f"label[{name}]": value for name, value in one.labels.items()}
    named = {name: one.labels.get(label, "") for name, label in LABEL_OF.items()}
    kind, controller = one.properties.get("controllerKind", ""), one.properties.get("controller", "")
    kinds = {kind: controller} if kind in CONTROLLER_KINDS else {}
    return {**one.properties, "controllerName": controller, **kinds, **named, **labels}


def _allocation(
    held: bool, charges: Sequence[Charge], pods: Mapping[PodName, PodSeen], start_ms: int, end_ms: int
) -> Allocation:
    told = dict(zip(DIMENSIONS, charges[0].key, strict=True))
    time: dict[CostGroup, int] = defaultdict(int)
    by_gpu: dict[str, int] = defaultdict(int)
    of_account: dict[str, int] = defaultdict(int)
    for charge in charges:
        time[CostGroup(charge.place.gpu_model, charge.row.price if charge.row else None, False)] += charge.gpu_us
        by_gpu[charge.key[-1]] += charge.gpu_us
        of_account[charge.account] += charge.gpu_us
    place = {name: told[name] for name in ("cluster", "node") if told[name]}
    if not held:
        return Allocation(place, {}, True, start_ms, end_ms, time)
    pod = pods.get((told["cluster"], told["namespace"], told["pod"]), PodSeen())
    names = {name: told[name] for name in ("namespace", "pod", "container") if told[name]}
    team = {"team": told["team"]} if told["team"] not in ("", UNASSIGNED) else {}
    begin, end = _lived(pod, start_ms, end_ms, max(by_gpu.values()))
    return Allocation(
        {**place, **names, **_controller(told["job"]), **team},
        pod.labels,
        False,
        begin,
        end,
        time,
        of_account["busy"],
        of_account["busy"] + of_account["allocated_idle"],
        frozenset(by_gpu),
        bool(told["mig_profile"]) or pod.shares,
    )


def _lived(pod: PodSeen, start_ms: int, end_ms: int, longest_us: int) -> tuple[int, int]:
    """When the pod was there, within the span; the whole span where that is not known, or cannot be true because
    it held a GPU for longer."""
    begin = max(start_ms, pod.start_ms) if pod.start_ms is not None else start_ms
    end = min(end_ms, pod.end_ms) if pod.end_ms is not None else end_ms
    return (begin, end) if longest_us <= (end - begin) * US_PER_MS else (start_ms, end_ms)


def _controller(job: str) -> dict[str, str]:
    kind, _, name = job.partition("/")
    return {} if kind in _LONE or not name else {"controllerKind": kind.lower(), "controller": name}


def _weights(members: Mapping[int, Allocation]) -> dict[int, int]:
    if any(slot.price is None for one in members.values() for slot in one.time):
        return {at: one.gpu_us for at, one in members.items()}
    return whole_weights({at: one.cost for at, one in members.items()})


def _idle_name(one: Allocation, split_idle: str) -> str:
    where = one.properties.get(split_idle, "") if split_idle else ""
    return f"{where}/{IDLE_NAME}" if where else IDLE_NAME


def _common(several: Collection[Mapping[str, str]]) -> dict[str, str]:
    first, *others = several
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


_PROPERTIES = ("cluster", "node", "container", "controller", "controllerKind", "namespace", "pod")
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
"""Of the CSV, after the properties."""


def sets(found: Iterable[tuple[Span, Mapping[str, Allocation]]]) -> list[dict[str, Any]]:
    """The `data` of an allocation answer: one map per set."""
    return [{name: allocation(name, one, span) for name, one in named.items()} for span, named in found]


def summary(found: Iterable[tuple[Span, Mapping[str, Allocation]]], step_ms: int, whole: Span) -> dict[str, Any]:
    """The `data` of a summary answer; step in nanoseconds, as Go writes durations."""
    return {
        "step": step_ms * _NS_PER_MS,
        "sets": [
            {"allocations": {name: _summed(name, one) for name, one in named.items()}, "window": window(span)}
            for span, named in found
        ],
        "window": window(whole),
    }


def table(found: Iterable[tuple[Span, Mapping[str, Allocation]]]) -> str:
    """All allocations of all sets as CSV, a line each; text that a spreadsheet would execute gets an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(["name", "windowStart", "windowEnd", *_PROPERTIES, *_COLUMNS])
    for span, named in found:
        for name, one in named.items():
            told = allocation(name, one, span)
            properties = [for_cell(one.properties.get(key, "")) for key in _PROPERTIES]
            writer.writerow([for_cell(name), *map(instant, span), *properties, *(told[key] for key in _COLUMNS)])
    return out.getvalue()


class NodeTotal(NamedTuple):
    """A node's capacity that was up and metered. cost: in the price book's currency × µs of an hour."""

    gpu_us: int = 0
    cost: Fraction = Fraction(0)


def node_assets(
    totals: Mapping[tuple[str, str], NodeTotal], known: Mapping[tuple[str, str], NodeFacts], span: Span
) -> dict[str, Any]:
    """Assets of type Node by OpenCost's key of an asset, from totals by cluster and node."""
    return {
        f"__undefined__/__undefined__/__undefined__/Compute/{cluster}/Node/Kubernetes/{node}/{node}": _node(
            cluster, node, total, known.get((cluster, node), NodeFacts(cluster, node)), span
        )
        for (cluster, node), total in sorted(totals.items())
    }


def _node(cluster: str, node: str, total: NodeTotal, facts: NodeFacts, span: Span) -> dict[str, Any]:
    cost = float(total.cost / US_PER_HOUR)
    places = {"topology_kubernetes_io_region": facts.region, "topology_kubernetes_io_zone": facts.zone}
    return {
        "type": ASSET["type"],
        "properties": {"category": ASSET["category"], "service": ASSET["service"], "cluster": cluster, "name": node},
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


def allocation(name: str, one: Allocation, span: Span) -> dict[str, Any]:
    """One allocation. span: of the set it stands in."""
    cost, efficiency = float(one.cost), float(one.efficiency or 0)
    count = float(one.count)
    return {
        "name": name,
        "properties": _properties(one),
        "window": window(span),
        "start": instant(one.start_ms),
        "end": instant(one.end_ms),
        "minutes": (one.end_ms - one.start_ms) / MS_PER_MINUTE,
        **dict.fromkeys(_CPU, 0),
        "gpuCount": count,
        "gpuRequestAverage": count,
        "gpuUsageAverage": float(one.count * (one.efficiency or 0)),
        "gpuHours": one.gpu_us / US_PER_HOUR,
        "gpuCost": cost,
        "gpuCostAdjustment": 0,
        "gpuCostIdle": float(one.shared_cost),
        "gpuEfficiency": efficiency,
        "gpuAllocation": _devices(one),
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


def _properties(one: Allocation) -> dict[str, Any]:
    told: dict[str, Any] = {name: one.properties[name] for name in _PROPERTIES if name in one.properties}
    return told | ({"labels": dict(sorted(one.labels.items()))} if one.labels else {})


def _devices(one: Allocation) -> dict[str, Any]:
    """The newer form of the GPU fields. Model and UUID only where there is one; unknown usage is null here."""
    usage = None if one.efficiency is None else float(one.count * one.efficiency)
    return {
        "gpuDevice": "",
        "gpuModel": next(iter(one.models)) if len(one.models) == 1 else "",
        "gpuUUID": next(iter(one.gpus)) if len(one.gpus) == 1 else "",
        "isGPUShared": one.shared_gpu,
        "gpuUsageAverage": usage,
        "gpuRequestAverage": float(one.count),
        "saturation": None,
    }


def _summed(name: str, one: Allocation) -> dict[str, Any]:
    cost = float(one.cost)
    return {
        "name": name,
        "start": instant(one.start_ms),
        "end": instant(one.end_ms),
        **dict.fromkeys(("cpuCoreRequestAverage", "cpuCoreUsageAverage", "cpuCost"), 0),
        "gpuCost": cost,
        **dict.fromkeys(("networkCost", "loadBalancerCost", "pvCost", "ramByteRequestAverage"), 0),
        **dict.fromkeys(("ramByteUsageAverage", "ramCost", "sharedCost", "externalCost"), 0),
        "totalEfficiency": float(one.efficiency or 0),
        "totalCost": cost,
    }
