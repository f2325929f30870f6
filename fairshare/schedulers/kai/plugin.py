"""The manifest of KAI-Scheduler. Source of the labels: kai-scheduler pkg/common/constants."""

from __future__ import annotations

from fairshare.schedulers.kai.kinds import CONFIG, POD_GROUP, QUEUE, SHARD
from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import Object, value_at
from gputally.kubernetes.rights import Rights
from gputally.kubernetes.scheduler_plugins import (
    OwnQueue,
    PodGangKeys,
    PodQueueLabels,
    SchedulerPlugin,
    SharedGpuKeys,
)


def _own_queue(obj: Object, _parts: MigParts) -> OwnQueue:
    name, quota = obj["metadata"]["name"], value_at(obj, ("spec", "resources", "gpu", "quota"))
    stated = float(quota) if isinstance(quota, int | float) and quota >= 0 else None
    return OwnQueue("kai", name, stated, bool(value_at(obj, ("spec", "parentQueue"))), (f"kai:{name}",))


SCHEDULER = SchedulerPlugin(
    name="kai",
    prefixes=("kai",),
    adapter="fairshare.schedulers.kai.adapter:KaiAdapter",
    settings="fairshare.schedulers.kai.section:KaiTarget",
    kinds=((QUEUE,), (SHARD,), (POD_GROUP,), (CONFIG,)),
    reaches="reads Queues, PodGroups, SchedulingShards and Config; writes over-quota weights of Queues",
    page="docs/schedulers.md",
    pods=PodQueueLabels(("kai.scheduler/queue", "runai/queue"), frozenset({"kai-scheduler", "runai-scheduler"})),
    gangs=PodGangKeys(
        POD_GROUP.kind,
        "pod-group-name",
        part_label="kai.scheduler/subgroup-name",
        # Source: pkg/scheduler/plugins: kubeflow, ray and taskorder, in the order of their default priorities.
        leaders=(("training.kubeflow.org/job-role", "master", "launcher"), ("ray.io/node-type", "head")),
        rank="kai.scheduler/task-priority",
        names_queue=True,
    ),
    shares=SharedGpuKeys(
        "gpu-fraction",
        "gpu-memory",
        "gpu-fraction-num-devices",
        frozenset({"kai-resource-reservation", "runai-reservation"}),
        "runai-gpu-group",
    ),
    shard_label="kai.scheduler/node-pool",
    player="fairshare.schedulers.kai.player:KaiPlayer",
    own_queue=_own_queue,
    rights=(
        Rights("scheduling.run.ai", "queues", "list patch", "to read demand and write weights"),
        Rights("scheduling.run.ai", "podgroups", "list", "to read gangs"),
        Rights("kai.scheduler", "schedulingshards", "list", "to see whether weights act"),
        Rights("kai.scheduler", "configs", "get", "to see what a node pool is", name="kai-config"),
        Rights("scheduling.run.ai", "podgroups", "get list watch", "to bill a pod to its queue", "accountant"),
    ),
)
