"""The manifest of KAI-Scheduler. Source of the labels: kai-scheduler pkg/common/constants."""

from __future__ import annotations

from fairshare.schedulers.kai.kinds import CONFIG, POD_GROUP, QUEUE, SHARD
from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import Object, value_at
from gputally.kubernetes.scheduler_plugins import OwnQueue, PodQueueLabels, SchedulerPlugin


def _own_queue(obj: Object, _parts: MigParts) -> OwnQueue:
    name, quota = obj["metadata"]["name"], value_at(obj, ("spec", "resources", "gpu", "quota"))
    stated = float(quota) if isinstance(quota, int | float) and quota >= 0 else None
    return OwnQueue("kai", name, stated, bool(value_at(obj, ("spec", "parentQueue"))), (f"kai:{name}",))


SCHEDULER = SchedulerPlugin(
    name="kai",
    prefixes=("kai",),
    adapter="fairshare.schedulers.kai.adapter:KaiAdapter",
    kinds=((QUEUE,), (SHARD,), (POD_GROUP,), (CONFIG,)),
    reaches="reads Queues, PodGroups, SchedulingShards and Config; writes over-quota weights of Queues",
    page="docs/schedulers.md",
    pods=PodQueueLabels(("kai.scheduler/queue", "runai/queue"), frozenset({"kai-scheduler", "runai-scheduler"})),
    own_queue=_own_queue,
)
