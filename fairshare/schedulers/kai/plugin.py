"""The manifest of KAI-Scheduler."""

from __future__ import annotations

from fairshare.schedulers.kai.adapter import CONFIG, POD_GROUP, PREFIX, QUEUE, SHARD, KaiAdapter
from fairshare.targets.protocol import OwnQueue, SchedulerPlugin
from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import Object, value_at


def _own_queue(obj: Object, _parts: MigParts) -> OwnQueue:
    name, quota = obj["metadata"]["name"], value_at(obj, ("spec", "resources", "gpu", "quota"))
    stated = float(quota) if isinstance(quota, int | float) and quota >= 0 else None
    return OwnQueue("kai", name, stated, bool(value_at(obj, ("spec", "parentQueue"))), (f"{PREFIX}:{name}",))


SCHEDULER = SchedulerPlugin(
    name="kai",
    adapter=KaiAdapter,
    kinds=((QUEUE,), (SHARD,), (POD_GROUP,), (CONFIG,)),
    reaches="reads Queues, PodGroups, SchedulingShards and Config; writes over-quota weights of Queues",
    page="docs/schedulers.md",
    own_queue=_own_queue,
)
