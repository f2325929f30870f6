"""Schedulers as they stand, read through the controller's own adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum

from accountant.wire import Policy
from fairshare.adapters import kai, kueue, volcano
from fairshare.errors import ClusterError, NotFound
from fairshare.kube.fields import look
from fairshare.kube.kinds import CONFIG_MAP, Object
from fairshare.kube.looking import look_at
from fairshare.kube.pods import read_pod
from fairshare.kube.quantities import gpus
from fairshare.model import Condition, Gang, Pod
from fairshare.status import StatusObject, conditions
from fairshare.targets import ADAPTERS
from gputally.doctor.schedulers import KNOWN, QueueObject, Target, queue_objects, referred
from gputally.doctor.sources import Ground

_QUEUES = {"kai": (kai.QUEUE,), "kueue": kueue.CLUSTER_QUEUES, "volcano": (volcano.QUEUE,)}


def targets(ground: Ground, policy: Policy | None) -> tuple[Target, ...]:
    """KAI, Kueue and Volcano: what is served of them, and what the adapter says of those the policy refers to."""
    groups = {kinds[0].api_version.partition("/")[0] for several in KNOWN.values() for kinds in several}
    served = ground.served(groups)
    return tuple(_target(name, ground, policy, served) for name in KNOWN)


def _target(
    name: str, ground: Ground, policy: Policy | None, served: Mapping[tuple[str, str], Sequence[str]]
) -> Target:
    adapter = next(each for each in ADAPTERS if each.name == name)
    if policy is None or not referred(policy, name):
        return Target(name, served)
    mode = adapter.mode(policy)
    try:
        seen = look_at(adapter, policy, ground)
    except NotFound:
        return Target(name, served, mode)
    except ClusterError as fault:
        return Target(name, served, mode, fault=str(fault))
    return Target(name, served, mode, seen.conditions, seen.issues)


def noted(ground: Ground, namespace: str) -> tuple[tuple[str, Condition], ...]:
    """What the controller last noted of its targets; nothing where that cannot be read."""
    where = StatusObject(namespace)
    try:
        return conditions(ground.get(CONFIG_MAP, where.name, where.namespace))
    except ClusterError:
        return ()


def own_queues(ground: Ground) -> list[QueueObject]:
    """Queues of all schedulers that are installed."""
    found: dict[str, Sequence[Object]] = {}
    for name, kinds in _QUEUES.items():
        for kind in kinds:
            try:
                found[name] = ground.list(kind)
                break
            except NotFound:
                continue
    return queue_objects(found)


def gangs(ground: Ground, policy: Policy, pods: Sequence[Object]) -> tuple[Gang, ...]:
    """What asks for GPUs in the policy's queues, at every scheduler that can be looked at."""
    read: list[Pod] = [pod for obj in pods if (pod := read_pod(obj)) is not None]
    found: list[Gang] = []
    for adapter in ADAPTERS:
        if adapter.name == "runai" or not _refers(policy, adapter.prefixes):
            continue
        try:
            found += look_at(adapter, policy, ground, read).gangs
        except ClusterError:
            continue  # said by the check `weights`
    return tuple(found)


def _refers(policy: Policy, prefixes: Sequence[str]) -> bool:
    return any(ref.partition(":")[0] in prefixes for queue in policy.queues for ref in queue.refs)


def installed(nodes: Sequence[Object]) -> float:
    """GPUs of all nodes, whatever state they are in."""
    return fsum(gpus(look(node, ("status", "allocatable"))) for node in nodes)
