"""The manifest of Kueue."""

from __future__ import annotations

from fairshare.schedulers.kueue.adapter import (
    CLUSTER_QUEUES,
    COHORTS,
    FLAVORS,
    LOCAL_QUEUES,
    QUEUE_PREFIX,
    WORKLOADS,
    KueueAdapter,
)
from fairshare.targets.protocol import OwnQueue, SchedulerPlugin, stated_gpus
from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import Object, value_at


def _own_queue(obj: Object, parts: MigParts) -> OwnQueue:
    name = obj["metadata"]["name"]
    amounts = [
        stated_gpus({resource.get("name"): resource.get("nominalQuota")}, parts)
        for group in value_at(obj, ("spec", "resourceGroups")) or ()
        for flavor in group.get("flavors") or ()
        for resource in flavor.get("resources") or ()
    ]
    known = [amount for amount in amounts if amount is not None]
    return OwnQueue("kueue", name, sum(known) if known else None, refs=(f"{QUEUE_PREFIX}:{name}",))


SCHEDULER = SchedulerPlugin(
    name="kueue",
    adapter=KueueAdapter,
    kinds=(CLUSTER_QUEUES, COHORTS, LOCAL_QUEUES, WORKLOADS, FLAVORS),
    reaches="reads queues, Workloads, flavors, Kueue's ConfigMap; writes fair-sharing weights; stops Workloads",
    page="docs/schedulers.md",
    own_queue=_own_queue,
)
