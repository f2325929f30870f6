"""Builders of small preemption inputs: queues, nodes and gangs in one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

from accountant.wire.policy_models import Policy
from fairshare.core.queues_and_weights import Gang, Pod, PolicyTree
from fairshare.preemption.preemption_types import PreemptionInputs
from fairshare.preemption.reclaim_rules_and_limits import Account, QueueResource
from gputally.kubernetes.objects import Kind

NOW_MS = 1_790_812_800_000
HOUR_MS = 3_600_000
GANG = Kind("", "Gang", "")


def policy(queues: Mapping[str, Any], **rules: Any) -> Policy:
    """Build a policy. Each queue is given by its deserved quota or by its fields. rules: preemption rules, without
    patience."""
    listed = [
        {"name": name, **(given if isinstance(given, dict) else {"deserved": given})} for name, given in queues.items()
    ]
    return Policy.model_validate({"queues": listed, "preemption": {"wait": 0, "min_runtime": 0, **rules}})


def gang(
    name: str,
    queue: str,
    on: Sequence[tuple[str, float]] = (),
    *,
    waiting: Sequence[float] = (),
    least: int | None = None,
    hours: float = 1.0,
    saved: float | None = None,
    **fields: Any,
) -> Gang:
    """Build a gang with pods on nodes, (node, GPUs) each, and waiting pods. least: the minimum number of pods (None:
    all). hours: since its start. saved: hours since its last checkpoint."""
    start = NOW_MS - round(hours * HOUR_MS)
    spot = fields.pop("spot", False)
    preempts = fields.pop("preempts", True)
    owner = fields.pop("owner", f"Job/ns/{name}")
    key = f"Gang/ns/{name}"
    runs: dict[str, Any] = {"owner": owner, "held": True, "started_ms": start, "spot": spot}
    held = {f"{name}-{i}": part for i, part in enumerate(on)}
    waits = {f"{name}-w{i}": size for i, size in enumerate(waiting)}
    pods = [Pod(pod, "ns", pod, size, node, gang=key, **runs) for pod, (node, size) in held.items()]
    pods += [Pod(pod, "ns", pod, size, gang=key, preempts=preempts) for pod, size in waits.items()]
    sizes = sorted(pod.gpus for pod in pods)
    started = fields.pop("started_ms", start if on else None)
    allocated = fsum(pod.gpus for pod in pods if pod.held)
    minimum = fsum(sizes[:least] if least is not None else sizes)
    checkpoint = None if saved is None else NOW_MS - round(saved * HOUR_MS)
    return Gang(
        queue, GANG, "ns", name, f"uid-{name}", fsum(sizes), allocated, minimum, created_ms=start, started_ms=started,
        checkpoint_ms=checkpoint, pods=tuple(pods), **fields,
    )  # fmt: skip


def situation(
    rules: Policy,
    nodes: Mapping[str, float],
    gangs: Sequence[Gang],
    shares: Mapping[str, float] | None = None,
    **more: Any,
) -> PreemptionInputs:
    """Build a situation whose queue totals follow from the gangs. shares: fair shares; the quotas if not given."""
    own: dict[str, float] = {}
    fixed: dict[str, float] = {}
    for each in gangs:
        own[each.queue] = own.get(each.queue, 0.0) + each.allocated
        if not each.preemptible:
            fixed[each.queue] = fixed.get(each.queue, 0.0) + each.allocated
    held, stuck = PolicyTree(rules).sum_up(own), PolicyTree(rules).sum_up(fixed)
    free = dict(nodes)
    for each in gangs:
        for pod in each.pods:
            if pod.node in free:
                free[pod.node] -= pod.gpus
    accounts = {}
    for queue in rules.queues:
        share = (shares or {}).get(queue.name, queue.deserved)
        own_use, fixed_use = held.get(queue.name, 0.0), stuck.get(queue.name, 0.0)
        stock = QueueResource(queue.deserved, share, queue.limit, own_use, fixed_use)
        accounts[queue.name] = Account(queue.name, queue.parent or "", {"gpu": stock})
    return PreemptionInputs(NOW_MS, "fake", tuple(gangs), accounts, free, **more)
