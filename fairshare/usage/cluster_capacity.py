"""Counts the GPUs to divide (without lost GPUs, with the replicas of shared ones) and finds unmetered nodes.

Lost GPUs: a node lists a lost GPU as allocatable until its device plugin notices the loss, but the ledger has the
agent's report of it. A GPU counts as lost if it was lost for the whole of the last metered quarter of an hour, on a
node in service. A GPU that its device plugin has already removed, or that is on a node out of service, is not
subtracted again. If the accountant does not answer, no GPU counts as lost. The rest of the cycle gets the nodes without
their lost GPUs, so that shares, free GPUs and the extender's answers agree.

Unmetered nodes: the ledger's coverage includes a GPU only from its first record on. On a node that no agent has ever
metered, usage would count as zero, and the queues that run there would seem to be owed GPU-hours. While such nodes list
too large a part of the GPUs of all nodes, the controller changes no weight (`UnmeteredNodes.fault`). Metered GPUs
cannot be counted instead, because a node lists a time-sliced GPU several times. A new node has an hour to be metered,
because a growing cluster is not a fault. A node that was metered and is silent now lowers the ledger's coverage.

Replicas: schedulers, quotas, demand and shares count the GPUs that a node lists, so a GPU in four replicas counts as
four. The ledger counts it once. Where both are needed (a lost GPU, the length of a window), the nodes' labels give the
number of replicas. With MIG's strategy `single`, each `nvidia.com/gpu` of a node is an instance of the profile that its
product names, and counts as one too. If nodes have different numbers, GPU counts have no common meaning, and a
condition reports this.

Sources: NVIDIA/gpu-feature-discovery (`nvidia.com/gpu.replicas`, `nvidia.com/mig-….replicas`), NVIDIA/k8s-device-plugin
(`renameByDefault`: `nvidia.com/gpu.shared`), GKE (`cloud.google.com/gke-max-shared-clients-per-gpu`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp2, fsum, inf, log
from typing import Final

from accountant.wire.policy_models import Policy, UsageWindow
from fairshare.core.admission_quota_tree import QuotaTree, total_quota
from fairshare.core.gpu_demand import millis
from fairshare.core.gpu_models import ModelMap, parts_of, shard_of_nodes, standings_of_part
from fairshare.core.queues_and_weights import UNLIMITED, Condition, Observation, Shard, own_window
from fairshare.core.scheduler_queue_objects import join_texts
from fairshare.laws.weight_calculation import ModelPart, ShardCapacity, pools
from fairshare.usage.stale_usage_hold import UsageHold
from gputally.base.errors import AccountantUnavailable, FairshareError
from gputally.base.gpu_model_names import profile_of_product
from gputally.base.mig_profiles import instances_of
from gputally.base.units import BUCKET_MS, MS_PER_HOUR, MS_PER_SECOND, US_PER_MS
from gputally.kubernetes.objects import (
    GPU,
    Object,
    counts_gpus,
    gpus,
    gpus_of_node,
    gpus_of_nodes,
    quantity,
    slices_of_node,
    value_at,
)

UNIT = "OneUnit"
"""Type of the condition about nodes on which a GPU counts differently."""
SHARED = f"{GPU}.shared"
_GKE_REPLICAS = "cloud.google.com/gke-max-shared-clients-per-gpu"
NOTHING_IN_SERVICE = "NothingInService"
"""Reason of the hold while no node offers a GPU. It is not a fault."""
_NO_CAPACITY_REASONS = frozenset({"NoCapacity", "NoUsage"})


def devices(node: Object) -> float:
    """Return the physical GPUs behind those that a node lists as allocatable (`gputally.kubernetes.objects.gpus`)."""
    labels = value_at(node, ("metadata", "labels")) or {}
    listed = value_at(node, ("status", "allocatable")) or {}
    slices = slices_of_node(node)
    return fsum(gpus({name: text}, slices) / _replicas(labels, str(name)) for name, text in listed.items())


def one_unit(nodes: Sequence[Object]) -> tuple[Condition, ...]:
    """Return a condition if GPUs count differently on different nodes, or not at all; empty otherwise.

    nodes: the nodes that accept work."""
    texts: list[str] = []
    renamed = {_name(node): count for node in nodes if (count := _renamed(node)) > 0}
    if renamed:
        names = join_texts(sorted(renamed), most=4)
        texts.append(
            f"{fsum(renamed.values()):g} {SHARED} ({names}) are in no share, quota or demand here, while their use is"
            " in the history"
        )
    nodes_by_replicas: dict[float, list[str]] = {}
    for node in nodes:
        listed = gpus_of_node(node)
        if listed > 0:
            nodes_by_replicas.setdefault(round(listed / devices(node), 3), []).append(_name(node))
    if len(nodes_by_replicas) > 1:
        counts = "; ".join(
            f"{replicas:g} on {join_texts(sorted(names), most=4)}"
            for replicas, names in sorted(nodes_by_replicas.items())
        )
        texts.append(
            f"a GPU counts as {counts}: schedulers, quotas and shares count replicas (time-slicing, MPS), the history"
            " counts GPUs"
        )
    reason = "ReplicasDiffer" if len(nodes_by_replicas) > 1 else "NotCounted"
    return (Condition(UNIT, "False", reason, "; ".join(texts)),) if texts else ()


def _replicas(labels: dict[str, str], resource: str) -> float:
    product = labels.get("nvidia.com/gpu.product", "")
    instances = float(instances_of(product, profile_of_product(product))) if resource == GPU else 1.0
    for key in (f"{resource.removesuffix('.shared')}.replicas", *((_GKE_REPLICAS,) if resource == GPU else ())):
        count = quantity(labels.get(key))
        if count is not None and count > 1:
            return count * instances
    return instances


def _renamed(node: Object) -> float:
    return quantity((value_at(node, ("status", "allocatable")) or {}).get(SHARED)) or 0.0


def _name(node: Object) -> str:
    return str(value_at(node, ("metadata", "name")))


LostGpusQuery = Callable[[int, int], Mapping[str, int]]
"""Lost GPUs by node over a span of UTC milliseconds: fairshare.usage.accountant_client.AccountantPort.lost_gpus."""


@dataclass(frozen=True, slots=True)
class ServingNodes:
    """Nodes that accept work, with only working GPUs.

    lost: GPUs that were left out, by node; only nodes that listed them."""

    nodes: tuple[Object, ...] = ()
    lost: Mapping[str, float] = field(default_factory=dict)

    def capacity(self, window: UsageWindow) -> float:
        """Return the GPUs to divide: those that the nodes list, without lost ones.

        If the nodes list none, not even lost ones, return the window's average; 0 if that is unknown."""
        listed = gpus_of_nodes(self.nodes)
        return listed if listed > 0 or self.lost else gpus_of_window(window) or 0.0


def _effective_length_s(length_s: float, half_life_s: float | None) -> float:
    """Return the seconds of full use that a window of this length represents: its length, or the integral of
    2^(-age / half-life) over it."""
    if half_life_s is None:
        return float(length_s)
    return half_life_s / log(2) * (1 - exp2(-length_s / half_life_s))


def gpus_of_window(window: UsageWindow) -> float | None:
    """Return the average GPUs of the controller's own cluster over the recorded part of the window, weighted like its
    usage; None if it is not measured in GPU time."""
    window = own_window(window)
    if window.unit != "gpu_us":
        return None
    since_ms = window.start_ms if window.since_ms is None else max(window.start_ms, window.since_ms)
    span_s = _effective_length_s((window.end_ms - since_ms) / MS_PER_SECOND, window.half_life_s)
    return window.capacity / (span_s * MS_PER_SECOND * US_PER_MS) if span_s > 0 else None


def with_capacity_reason(hold: UsageHold | None, nodes: Sequence[Object]) -> UsageHold | None:
    """Return the hold, or a hold with the reason that the cluster offers no GPU now, for example because it was scaled
    to zero or drained.

    That reason replaces only a hold for missing capacity. Without a hold it applies if nodes list GPUs and accept no
    work, because the window's average would be divided as if it were available.

    nodes: all nodes of the cluster; empty if they cannot be read."""
    if (hold is not None and hold.reason not in _NO_CAPACITY_REASONS) or not nodes or gpus_of_nodes(nodes) > 0:
        return hold
    if hold is None and not any(map(_lists_gpus, nodes)):
        return None  # these nodes list no GPUs at all, so the GPUs are elsewhere
    return UsageHold(NOTHING_IN_SERVICE, "no node lists a GPU that may be given work: there is nothing to divide")


def _lists_gpus(node: Object) -> bool:
    return any(gpus_of_node(node, key) > 0 for key in ("allocatable", "capacity"))


class NothingToDivide(FairshareError):
    """A target has no GPU for its queues. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class TargetCapacity:
    """The GPUs that the queues of one target divide.

    pools: by shard; empty if the cluster is divided as one."""

    gpus: float
    pools: tuple[ShardCapacity, ...]


def target_capacity(
    serving: ServingNodes, window: UsageWindow, quota_gpus: float | None, shards: Sequence[Shard]
) -> TargetCapacity:
    """Return how many GPUs a target has to divide.

    quota_gpus: the limit that the target's own quotas set; None for no limit. Raises NothingToDivide."""
    available = serving.capacity(window)
    gpus = available if quota_gpus is None else min(available, quota_gpus)
    if available <= 0:
        raise NothingToDivide(
            "no node lists a GPU, and a window that is not in GPU time does not show how many there are"
        )
    if gpus <= 0:
        raise NothingToDivide("the quotas of its queues contain no GPU: there is nothing to divide")
    parts = pools(shards, serving.nodes, gpus)
    divided = fsum(pool.gpus for pool in parts) if parts else gpus
    if divided <= 0:
        raise NothingToDivide(
            "the nodes of its shards have no GPU, or pods of other schedulers hold them all: nothing to divide"
        )
    return TargetCapacity(divided, parts)


def model_parts(
    policy: Policy,
    serving: ServingNodes,
    observation: Observation,
    windows: Mapping[str, UsageWindow],
    exhausted: Mapping[str, frozenset[str]],
) -> tuple[ModelPart, ...]:
    """Return the inputs of the division of each GPU model; empty if the policy has no quotas by model.

    windows, exhausted: the usage of each part, and the queues whose budget of it is used up."""
    if not parts_of(policy):
        return ()
    models = ModelMap.of(policy, serving.nodes, observation.pool_models)
    quotas = QuotaTree(observation.quotas)
    parts = []
    for model in models.models:
        nodes = [node for node in serving.nodes if models.of_node[_name(node)] == model]
        known = serving.nodes or serving.lost
        available = gpus_of_nodes(nodes) if known else gpus_of_window(windows[model]) or 0.0
        quota_gpus = _quota_of_part(observation, models, quotas, model)
        total = available if quota_gpus is None else min(available, quota_gpus)
        shards = [shard_of_nodes(shard, map(_name, nodes)) for shard in observation.shards]
        divided = pools(shards, nodes, total)
        standings = standings_of_part(policy, observation.standings, observation.gangs, models, model)
        parts.append(
            ModelPart(
                model,
                windows[model],
                {
                    name: replace(standing, most=_most_of_part(observation, models, quotas, name, model))
                    for name, standing in standings.items()
                },
                fsum(pool.gpus for pool in divided) if divided else total,
                exhausted.get(model, frozenset()),
                divided,
            )
        )
    return tuple(parts)


def _quota_of_part(observation: Observation, models: ModelMap, quotas: QuotaTree, model: str) -> float | None:
    """Return the GPUs of this model that the target's quotas allow together; None if they do not limit them, or if the
    model of one of them is unknown."""
    own = [pool for pools_ in observation.pools.values() for pool in pools_]
    if observation.capacity is None or not own or not all(models.of_pool.get(pool) for pool in own):
        return None
    return total_quota(quotas, (pool for pool in own if models.of_pool[pool] == model)) or 0.0


def _most_of_part(observation: Observation, models: ModelMap, quotas: QuotaTree, queue: str, model: str) -> float:
    """Return the most GPUs of this model that the target's quotas allow a queue; -1 if they set no limit."""
    own = observation.pools.get(queue, ())
    if not own or not all(models.of_pool.get(pool) for pool in own):
        return UNLIMITED
    most = fsum(quotas.maximum(pool) for pool in own if models.of_pool[pool] == model)
    return UNLIMITED if most == inf else most


def last_metered_quarter(window: UsageWindow, now_ms: int) -> tuple[int, int] | None:
    """Return the last whole quarter of an hour that the ledger has settled; None if it has none."""
    if window.watermark_ms is None:
        return None
    end_ms = min(window.watermark_ms, now_ms) // BUCKET_MS * BUCKET_MS
    return end_ms - BUCKET_MS, end_ms


def without_lost_gpus(nodes: Sequence[Object], lost: Mapping[str, int]) -> ServingNodes:
    """Return the nodes without their lost GPUs. lost: by name of the node.

    A node with `capacity` c that lists a as allocatable and has lost n keeps min(a, c - n), so a GPU that its device
    plugin has already removed is not subtracted twice. All replicas of a lost GPU are removed."""
    serving: list[Object] = []
    removed: dict[str, float] = {}
    for node in nodes:
        name = _name(node)
        resources = value_at(node, ("status", "allocatable"))
        listed = left = gpus_of_node(node)
        if listed > 0 and name in lost:
            capacity = max(listed, gpus_of_node(node, "capacity"))
            replicas = listed / devices(node)
            left = min(listed, max(0.0, capacity - lost[name] * replicas))
        if left >= listed:
            serving.append(node)
            continue
        removed[name] = listed - left
        allocatable = {
            key: (quantity(text) or 0.0) * left / listed if counts_gpus(key) else text
            for key, text in resources.items()
        }
        serving.append({**node, "status": {**node["status"], "allocatable": allocatable}})
    return ServingNodes(tuple(serving), removed)


class LostGpus:
    """Queries the accountant for lost GPUs, at most once per watermark and quarter of an hour, and not if the window
    shows that no GPU was lost. A failed query is repeated. For one controller; not thread-safe."""

    def __init__(self, query: LostGpusQuery) -> None:
        self._query = query
        self._queried: tuple[int, int] | None = None
        self._lost: Mapping[str, int] = {}

    def serving(self, nodes: Sequence[Object], window: UsageWindow | None, now_ms: int) -> ServingNodes:
        """Return the nodes with only working GPUs.

        window: a window that may change weights; with None no GPU counts as lost."""
        span = last_metered_quarter(window, now_ms) if window is not None else None
        if window is None or window.watermark_ms is None or span is None:
            return ServingNodes(tuple(nodes))
        state = (window.watermark_ms, span[1])
        if self._queried != state:
            covered = window.start_ms <= span[0] and span[1] <= window.end_ms
            none_lost = covered and window.lost_ms is not None and window.lost_ms <= span[0]
            try:
                self._lost = {} if none_lost else self._query(*span)
            except AccountantUnavailable:
                return ServingNodes(tuple(nodes))
            self._queried = state
        return without_lost_gpus(nodes, self._lost)


MeteredNodesQuery = Callable[[int, int], Collection[str]]
"""Nodes with a record in a span of UTC milliseconds: fairshare.usage.accountant_client.AccountantPort.metered_nodes."""
SETTLED_MS: Final = MS_PER_HOUR
"""How long a new node may take until its agent reports."""


class UnmeteredNodes:
    """Finds nodes that no agent has metered. It queries the accountant only while there is a node of which the ledger
    has shown no record yet. For one controller; not thread-safe."""

    def __init__(self, query: MeteredNodesQuery) -> None:
        self._query = query
        self._queried_ms: int | None = None
        self._metered: frozenset[str] = frozenset()

    def fault(self, nodes: Sequence[Object], window: UsageWindow, now_ms: int, min_coverage: float) -> str | None:
        """Return why usage does not cover the GPUs to divide; None if it does.

        nodes: the nodes that accept work.
        min_coverage: part of their GPUs that must be metered.

        Raises AccountantUnavailable."""
        span = last_metered_quarter(window, now_ms)
        if span is None:
            return None
        settled = {_name(node): gpus_of_nodes([node]) for node in nodes if _settled(node, now_ms)}
        unmetered = sorted(name for name, gpus in settled.items() if gpus > 0 and name not in self._metered)
        if unmetered and self._queried_ms != window.watermark_ms:
            self._metered |= frozenset(self._query(span[0], span[1] + BUCKET_MS))
            self._queried_ms = window.watermark_ms
            unmetered = [name for name in unmetered if name not in self._metered]
        listed, missing = gpus_of_nodes(nodes), sum(settled[name] for name in unmetered)
        if not unmetered or missing <= (1 - min_coverage) * listed:
            return None
        return f"{missing:g} of {listed:g} GPUs are on nodes that no agent has metered: {join_texts(unmetered)}"


def _settled(node: Object, now_ms: int) -> bool:
    created = millis(value_at(node, ("metadata", "creationTimestamp")))
    return created is not None and created <= now_ms - SETTLED_MS
