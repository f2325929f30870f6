"""The situation of one target as a cycle has seen it: books, room on the nodes, who may run where. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum

from accountant.wire import Policy
from fairshare.kube.kinds import Object
from fairshare.kube.mapping import sum_up
from fairshare.kube.pods import taken_up
from fairshare.model import Entitlement, Gang, Pod, Quota
from fairshare.preempting.claims import GPU
from fairshare.preempting.limits import Past, kept
from fairshare.preempting.reclaim import Account, Stock
from fairshare.preempting.rulings import Call, Situation
from fairshare.preempting.victims import key_of
from fairshare.weighing.gates import gpus_of_nodes

NO_QUOTAS: Mapping[str, Quota] = {}


def situation(
    policy: Policy,
    target: str,
    gangs: Sequence[Gang],
    entitlements: Sequence[Entitlement],
    nodes: Sequence[Object],
    pods: Sequence[Pod],
    now_ms: int,
    *,
    past: Sequence[Past] = (),
    calls: Sequence[Call] = (),
    quotas: Mapping[str, Quota] = NO_QUOTAS,
) -> Situation:
    """nodes: those that may be given work. pods: of the whole cluster; who is on his way out leaves room. quotas: by
    which the target admits work."""
    known = {queue.name for queue in policy.queues}
    mine = tuple(gang for gang in gangs if gang.queue in known)
    usable = {}
    for gang in mine:
        wanted = {pod.selector for pod in gang.pods if not pod.node and pod.selector}
        if gang.waits > 0 and wanted:
            usable[key_of(gang)] = tuple(
                sorted(
                    node["metadata"]["name"]
                    for node in nodes
                    if all(
                        (node["metadata"].get("labels") or {}).get(key) == value
                        for selector in wanted
                        for key, value in selector
                    )
                )
            )
    return Situation(
        now_ms,
        target,
        mine,
        _accounts(policy, mine, entitlements),
        free_by_node(nodes, pods),
        usable,
        kept(past, now_ms, policy.preemption.cool_down),
        tuple(calls),
        quotas=quotas,
    )


def _accounts(policy: Policy, gangs: Sequence[Gang], entitlements: Sequence[Entitlement]) -> Mapping[str, Account]:
    """What a queue holds is what its gangs hold: only they can be counted down when one of them goes."""
    own: dict[str, list[float]] = {}
    fixed: dict[str, list[float]] = {}
    for gang in gangs:
        own.setdefault(gang.queue, []).append(gang.allocated)
        if not gang.preemptible:
            fixed.setdefault(gang.queue, []).append(gang.allocated)
    held = sum_up(policy, {queue: fsum(parts) for queue, parts in own.items()})
    stuck = sum_up(policy, {queue: fsum(parts) for queue, parts in fixed.items()})
    shares = {due.queue: due.gpus for due in entitlements}
    return {
        queue.name: Account(
            queue.name,
            queue.parent or "",
            {
                GPU: Stock(
                    queue.deserved,
                    shares[queue.name],
                    queue.limit,
                    held.get(queue.name, 0.0),
                    stuck.get(queue.name, 0.0),
                )
            },
        )
        for queue in sorted(policy.queues, key=lambda queue: queue.name)
        if queue.name in shares
    }


def free_by_node(nodes: Sequence[Object], pods: Sequence[Pod]) -> Mapping[str, float]:
    """GPUs that no pod holds. pods: of the whole cluster; who is on his way out leaves room."""
    used: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.held:
            used.setdefault(pod.node, []).append(pod)
    return {
        name: gpus_of_nodes([node]) - taken_up(used.get(name, ()))
        for node in sorted(nodes, key=lambda node: str(node["metadata"]["name"]))
        for name in (node["metadata"]["name"],)
    }
