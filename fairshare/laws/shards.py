"""One division for each part of a cluster that its scheduler keeps apart: KAI's scheduling shards. Pure.

A shard's queues divide the GPUs of its nodes alone, less what pods of other schedulers hold there. History enters as a
part of the shard's share of the cluster's capacity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from accountant.wire.policy_models import Policy, UsageWindow
from fairshare.core.model import Entitlement, Shard, Standing, Weight
from fairshare.laws.feedback_laws import Memory
from fairshare.laws.weight_calculation import WeightResult, calculate_weights
from gputally.kubernetes.objects import Object, gpus_of_nodes


@dataclass(frozen=True, slots=True)
class Pool:
    """What the queues of one shard divide. queues: of the policy. part: of the cluster's capacity, 0..1."""

    queues: tuple[str, ...]
    gpus: float
    part: float


def pools(shards: Sequence[Shard], nodes: Sequence[Object], gpus: float) -> tuple[Pool, ...]:
    """nodes: those that may be given work, without lost GPUs. gpus: that they have together. Empty where the cluster
    is divided as one."""
    found = []
    for shard in shards:
        own = (
            gpus
            if shard.nodes is None
            else gpus_of_nodes([node for node in nodes if node["metadata"]["name"] in shard.nodes])
        )
        found.append(Pool(shard.queues, max(0.0, own - shard.taken), own / gpus if gpus > 0 else 0.0))
    return tuple(found)


def weigh_pools(
    policy: Policy,
    window: UsageWindow,
    standings: Mapping[str, Standing],
    parts: Sequence[Pool],
    gpus: float,
    now_ms: int,
    memory: Memory | None = None,
    exhausted: frozenset[str] = frozenset(),
    devices: float | None = None,
) -> WeightResult:
    """As `weigh`, pool by pool. Queues of no pool that have children get what these get together."""
    if not parts:
        return calculate_weights(policy, window, standings, gpus, now_ms, memory, exhausted, devices)
    due: dict[str, Entitlement] = {}
    kept: dict[str, Mapping[str, float]] = {}
    weights: list[Weight] = []
    for pool in parts:
        own = _policy_of(policy, pool)
        if not own.queues:
            continue
        if pool.gpus <= 0:
            due |= {queue.name: _nothing(queue.name, queue.parent, queue.deserved, standings) for queue in own.queues}
            continue
        seen = window.model_copy(update={"capacity": round(window.capacity * pool.part)})
        known = {name: standing for name, standing in standings.items() if name in pool.queues}
        behind = None if devices is None else devices * pool.gpus / gpus
        weighing = calculate_weights(own, seen, known, pool.gpus, now_ms, memory, exhausted, behind)
        due |= {each.queue: each for each in weighing.entitlements}
        kept |= weighing.memory
        weights += weighing.weights
    for queue in policy.queues:
        if queue.name not in due:
            due[queue.name] = _together(policy, queue.name, due, standings)
    weights.sort(key=lambda weight: weight.queue)
    return WeightResult(tuple(due[name] for name in sorted(due)), tuple(weights), kept)


def _policy_of(policy: Policy, pool: Pool) -> Policy:
    """The policy with the pool's queues alone; whose parent is in no pool, or in another, is a root."""
    names = set(pool.queues)
    queues = tuple(
        queue if queue.parent in names else queue.model_copy(update={"parent": None})
        for queue in policy.queues
        if queue.name in names
    )
    return policy.model_copy(update={"queues": queues})


def _nothing(name: str, parent: str | None, deserved: float, standings: Mapping[str, Standing]) -> Entitlement:
    standing = standings.get(name, Standing(0.0, 0.0))
    return Entitlement(name, parent, 0.0, 0.0, 0.0, standing.requested, standing.allocated, deserved)


def _together(
    policy: Policy, name: str, due: Mapping[str, Entitlement], standings: Mapping[str, Standing]
) -> Entitlement:
    """A queue that only groups queues of several pools."""
    queue = next(each for each in policy.queues if each.name == name)
    children = [due[each.name] for each in policy.queues if each.parent == name and each.name in due]
    empty = _nothing(name, queue.parent, queue.deserved, standings)
    return Entitlement(
        name,
        queue.parent,
        fsum(each.gpus for each in children),
        fsum(each.without_history for each in children),
        0.0,
        max(empty.requested, fsum(each.requested for each in children)),
        max(empty.allocated, fsum(each.allocated for each in children)),
        queue.deserved,
    )
