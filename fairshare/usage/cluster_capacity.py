"""Counts the GPUs to divide (without lost GPUs, with the replicas of shared ones) and finds unmetered nodes.

A node lists a lost GPU as allocatable until its device plugin notices the loss. The ledger has the agent's report: a
GPU counts as lost if it was lost, on a node in service, for the whole of the last metered quarter of an hour. Lost GPUs
can only reduce a node's listed GPUs, to 0 at the least. A GPU that its device plugin has already removed, or that is on
a node out of service, is not subtracted again. Missing data of the accountant changes nothing.

The rest of the cycle sees a node as if it had stopped listing the GPU, so that shares, room for preemption and the
extender's answers agree.

The ledger knows a GPU from its first record on, so its coverage does not include GPUs without one. Their usage would
count as zero, and the queues that run there would seem to be owed GPU-hours. While too many GPUs are on such nodes, the
controller changes no weight (`UnmeteredNodes.fault`). A new node has an hour to be metered, because a growing cluster
is not a fault. A node that was metered and is silent now lowers the coverage itself.

Coverage is computed by nodes: the GPUs that metered nodes list, over the GPUs that all nodes list. Metered GPUs cannot
be counted instead, because a node lists a time-sliced GPU several times.

Schedulers count the GPUs that a node lists, and so do quotas, demand and shares here: a GPU in four replicas counts as
four. The ledger counts it once. Where both are needed (a lost GPU, the length of a window), the nodes' labels give the
number of replicas. If nodes have different numbers, GPU counts have no common meaning, which is reported.

Sources: NVIDIA/gpu-feature-discovery (`nvidia.com/gpu.replicas`, `nvidia.com/mig-….replicas`), NVIDIA/k8s-device-plugin
(`renameByDefault`: `nvidia.com/gpu.shared`), GKE (`cloud.google.com/gke-max-shared-clients-per-gpu`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Final

from accountant.wire.policy_models import UsageWindow
from fairshare.core.pods import millis
from fairshare.core.queue_annotations import say
from fairshare.core.queues_and_weights import Condition, Shard
from fairshare.laws.weight_calculation import Pool, pools
from fairshare.usage.stale_usage_hold import gpus_of_window, within
from gputally.base.errors import AccountantUnavailable, FairshareError
from gputally.base.units import BUCKET_MS, MS_PER_HOUR
from gputally.kubernetes.objects import GPU, Object, gpus, gpus_of_nodes, quantity, value_at

UNIT = "OneUnit"
"""The type of the condition about nodes on which a GPU counts differently."""
SHARED = f"{GPU}.shared"
_GKE = "cloud.google.com/gke-max-shared-clients-per-gpu"


def devices(node: Object) -> float:
    """Physical GPUs behind what a node lists as allocatable (gputally.kubernetes.objects.gpus)."""
    labels = value_at(node, ("metadata", "labels")) or {}
    listed = value_at(node, ("status", "allocatable")) or {}
    return fsum(gpus({name: text}) / _replicas(labels, str(name)) for name, text in listed.items())


def one_unit(nodes: Sequence[Object]) -> tuple[Condition, ...]:
    """Return a condition if GPUs count differently on different nodes, or not at all; empty otherwise. nodes: those
    that accept work."""
    said: list[str] = []
    renamed = {_name(node): count for node in nodes if (count := _renamed(node)) > 0}
    if renamed:
        said.append(
            f"{fsum(renamed.values()):g} {SHARED} ({say(sorted(renamed), most=4)}) are in no share, quota or demand"
            " here, while their use is in the history"
        )
    often: dict[float, list[str]] = {}
    for node in nodes:
        listed = gpus(value_at(node, ("status", "allocatable")))
        if listed > 0:
            often.setdefault(round(listed / devices(node), 3), []).append(_name(node))
    if len(often) > 1:
        each = "; ".join(f"{times:g} on {say(sorted(names), most=4)}" for times, names in sorted(often.items()))
        said.append(
            f"a GPU counts as {each}: schedulers, quotas and shares count replicas (time-slicing, MPS), the history"
            " counts GPUs"
        )
    reason = "ReplicasDiffer" if len(often) > 1 else "NotCounted"
    return (Condition(UNIT, "False", reason, "; ".join(said)),) if said else ()


def _replicas(labels: dict[str, str], resource: str) -> float:
    for key in (f"{resource.removesuffix('.shared')}.replicas", *((_GKE,) if resource == GPU else ())):
        count = quantity(labels.get(key))
        if count is not None and count > 1:
            return count
    return 1.0


def _renamed(node: Object) -> float:
    return quantity((value_at(node, ("status", "allocatable")) or {}).get(SHARED)) or 0.0


def _name(node: Object) -> str:
    return str(value_at(node, ("metadata", "name")))


AskLostGpus = Callable[[int, int], Mapping[str, int]]
"""Lost GPUs by node over a span of UTC milliseconds: fairshare.usage.accountant_client.AccountantPort.lost_gpus."""


@dataclass(frozen=True, slots=True)
class ServingNodes:
    """Nodes that accept work, with only working GPUs. lost: GPUs that were left out, by node; only nodes that listed
    them."""

    nodes: tuple[Object, ...] = ()
    lost: Mapping[str, float] = field(default_factory=dict)

    def capacity(self, window: UsageWindow) -> float:
        """Return the GPUs to divide: the nodes' own, or the window's average if no node ever listed any; 0 if
        unknown."""
        listed = gpus_of_nodes(self.nodes)
        return listed if listed > 0 or self.lost else gpus_of_window(window) or 0.0

    @property
    def devices(self) -> float | None:
        """Return the physical GPUs behind the capacity; None if the nodes list none."""
        return fsum(map(devices, self.nodes)) or None


class NothingToDivide(FairshareError):
    """A target has no GPU for its queues; `str()` gives the reason."""


@dataclass(frozen=True, slots=True)
class TargetCapacity:
    """The GPUs that the queues of one target divide.

    devices: physical GPUs behind `gpus`; None if the nodes list none.
    pools: by shard; empty if the cluster is divided as one."""

    gpus: float
    devices: float | None
    pools: tuple[Pool, ...]


def target_capacity(
    serving: ServingNodes, window: UsageWindow, quota_gpus: float | None, shards: Sequence[Shard]
) -> TargetCapacity:
    """Return how many GPUs a target has to divide. quota_gpus: the limit that the target's own quotas set; None: no
    limit. Raises NothingToDivide."""
    there = serving.capacity(window)
    gpus = within(there, quota_gpus)
    if there <= 0:
        raise NothingToDivide("no node shows GPUs, and the measure does not tell their number")
    if gpus <= 0:
        raise NothingToDivide("the quotas of its queues hold no GPU: there is nothing to divide")
    parts = pools(shards, serving.nodes, gpus)
    divided = fsum(pool.gpus for pool in parts) if parts else gpus
    if divided <= 0:
        raise NothingToDivide("no node of its shards has a GPU that pods of other schedulers leave: nothing to divide")
    behind = serving.devices
    return TargetCapacity(divided, None if behind is None else behind * (divided / there), parts)


def quarter(window: UsageWindow, now_ms: int) -> tuple[int, int] | None:
    """Return the last whole quarter of an hour that the ledger has settled; None if it has none."""
    if window.watermark_ms is None:
        return None
    end_ms = min(window.watermark_ms, now_ms) // BUCKET_MS * BUCKET_MS
    return end_ms - BUCKET_MS, end_ms


def none_lost(window: UsageWindow, start_ms: int, end_ms: int) -> bool:
    """Return whether the window itself shows that no GPU was lost in [start_ms, end_ms), which is the usual case."""
    covered = window.start_ms <= start_ms and end_ms <= window.end_ms
    return covered and window.lost_ms is not None and window.lost_ms <= start_ms


def leave_out(nodes: Sequence[Object], lost: Mapping[str, int]) -> ServingNodes:
    """Return the nodes without their lost GPUs. lost: by name of the node.

    A node with `capacity` c that lists a as allocatable and has lost n keeps min(a, c - n), so a GPU that its device
    plugin has already removed is not subtracted twice. All replicas of a lost GPU are removed."""
    shown: list[Object] = []
    out: dict[str, float] = {}
    for node in nodes:
        name = str(value_at(node, ("metadata", "name")))
        resources = value_at(node, ("status", "allocatable"))
        listed = gpus(resources)
        each = listed / devices(node) if listed > 0 else 1.0
        most = max(listed, gpus(value_at(node, ("status", "capacity"))))
        left = min(listed, max(0.0, most - lost.get(name, 0) * each))
        if left >= listed:
            shown.append(node)
            continue
        out[name] = listed - left
        fewer = {
            key: (quantity(text) or 0.0) * left / listed if gpus({key: text}) > 0 else text
            for key, text in resources.items()
        }
        shown.append({**node, "status": {**node["status"], "allocatable": fewer}})
    return ServingNodes(tuple(shown), out)


class LostGpus:
    """Asks the accountant for lost GPUs, at most once per watermark and quarter of an hour, and not if the window shows
    that no GPU was lost. A failed query is repeated. For one controller; not thread-safe."""

    def __init__(self, ask: AskLostGpus) -> None:
        self._ask = ask
        self._asked: tuple[int, int] | None = None
        self._found: Mapping[str, int] = {}

    def serving(self, nodes: Sequence[Object], window: UsageWindow | None, now_ms: int) -> ServingNodes:
        """Return the nodes whose GPUs can be used. window: a window that is good enough to act on; None: nothing is
        known."""
        span = quarter(window, now_ms) if window is not None else None
        if window is None or window.watermark_ms is None or span is None:
            return ServingNodes(tuple(nodes))
        state = (window.watermark_ms, span[1])
        if self._asked != state:
            try:
                self._found = {} if none_lost(window, *span) else self._ask(*span)
            except AccountantUnavailable:
                return ServingNodes(tuple(nodes))
            self._asked = state
        return leave_out(nodes, self._found)


AskMeteredNodes = Callable[[int, int], Collection[str]]
"""Nodes with a record in a span of UTC milliseconds: fairshare.usage.accountant_client.AccountantPort.metered_nodes."""
SETTLED_MS: Final = MS_PER_HOUR
"""How long a new node may take until its agent reports."""


class UnmeteredNodes:
    """Queries the accountant only while there is a node that it has not reported. For one controller; not
    thread-safe."""

    def __init__(self, ask: AskMeteredNodes) -> None:
        self._ask = ask
        self._asked: int | None = None
        self._heard: frozenset[str] = frozenset()

    def fault(self, nodes: Sequence[Object], window: UsageWindow, now_ms: int, least: float) -> str | None:
        """Return why usage does not cover the GPUs to divide; None if it does.

        nodes: those that accept work.
        least: part of their GPUs that must be metered.

        Raises AccountantUnavailable."""
        span = quarter(window, now_ms)
        if span is None:
            return None
        settled = {_unmetered_name(node): gpus_of_nodes([node]) for node in nodes if _settled(node, now_ms)}
        silent = sorted(name for name, gpus in settled.items() if gpus > 0 and name not in self._heard)
        if silent and self._asked != window.watermark_ms:
            self._heard |= frozenset(self._ask(span[0], span[1] + BUCKET_MS))
            self._asked = window.watermark_ms
            silent = [name for name in silent if name not in self._heard]
        listed, missing = gpus_of_nodes(nodes), sum(settled[name] for name in silent)
        if not silent or missing <= (1 - least) * listed:
            return None
        return f"{missing:g} of {listed:g} GPUs stand on nodes that no agent has metered: {say(silent)}"


def _unmetered_name(node: Object) -> str:
    return str(value_at(node, ("metadata", "name")))


def _settled(node: Object, now_ms: int) -> bool:
    created = millis(value_at(node, ("metadata", "creationTimestamp")))
    return created is not None and created <= now_ms - SETTLED_MS
