"""The manifest of Volcano."""

from __future__ import annotations

from fairshare.schedulers.volcano.adapter import COMMAND, JOB, POD_GROUP, PREFIX, QUEUE, ROOT, VolcanoAdapter
from fairshare.targets.protocol import OwnQueue, SchedulerPlugin, stated_gpus
from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import Object, value_at


def _own_queue(obj: Object, parts: MigParts) -> OwnQueue | None:
    name = obj["metadata"]["name"]
    if name == ROOT:
        return None
    quota = stated_gpus(value_at(obj, ("spec", "guarantee", "resource")) or value_at(obj, ("spec", "deserved")), parts)
    return OwnQueue("volcano", name, quota, refs=(f"{PREFIX}:{name}",))


SCHEDULER = SchedulerPlugin(
    name="volcano",
    adapter=VolcanoAdapter,
    kinds=((QUEUE,), (POD_GROUP,), (JOB,), (COMMAND,)),
    reaches="reads Queues, PodGroups, Jobs and Volcano's ConfigMap; writes weights or quotas of Queues; restarts Jobs",
    page="docs/schedulers.md",
    own_queue=_own_queue,
)
