"""Allocations in OpenCost's JSON, and as CSV: every key its clients cast is there, in its order, and a number.

Only the GPU figures say anything: CPU, memory, network, load balancers and volumes are not metered and 0. Times are
RFC 3339 in UTC. Floats are the nearest ones to exact values, not rounded to five decimals.

Source: OpenCost core/pkg/opencost/allocation_json.go and summaryallocation_json.go. Pure.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any, NamedTuple

from accountant.compat.opencost_allocation import Allocation
from accountant.compat.opencost_query import ASSET, Span
from accountant.ledger import NodeFacts
from agent.plaintext import for_cell
from agent.units import MS_PER_MINUTE, MS_PER_SECOND, US_PER_HOUR, US_PER_MS

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
