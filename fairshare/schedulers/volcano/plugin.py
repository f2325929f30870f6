"""The manifest of Volcano. Source of the labels: Volcano's API reference."""

from __future__ import annotations

from fairshare.schedulers.volcano.kinds import COMMAND, JOB, POD_GROUP, QUEUE
from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import Object, value_at
from gputally.kubernetes.rights import Rights
from gputally.kubernetes.scheduler_plugins import (
    JobLabel,
    OwnQueue,
    PodGangKeys,
    PodJobLabels,
    PodQueueLabels,
    SchedulerPlugin,
    stated_gpus,
)


def _own_queue(obj: Object, parts: MigParts) -> OwnQueue | None:
    name = obj["metadata"]["name"]
    if name == "root":  # the parent of all queues
        return None
    quota = stated_gpus(value_at(obj, ("spec", "guarantee", "resource")) or value_at(obj, ("spec", "deserved")), parts)
    return OwnQueue("volcano", name, quota, refs=(f"volcano:{name}",))


SCHEDULER = SchedulerPlugin(
    name="volcano",
    prefixes=("volcano",),
    adapter="fairshare.schedulers.volcano.adapter:VolcanoAdapter",
    settings="fairshare.schedulers.volcano.section:VolcanoTarget",
    kinds=((QUEUE,), (POD_GROUP,), (JOB,), (COMMAND,)),
    reaches="reads Queues, PodGroups, Jobs and Volcano's ConfigMap; writes weights or quotas of Queues; restarts Jobs",
    page="docs/schedulers.md",
    pods=PodQueueLabels(("scheduling.volcano.sh/queue-name", "volcano.sh/queue-name"), frozenset({"volcano"})),
    gangs=PodGangKeys(
        POD_GROUP.kind,
        "scheduling.k8s.io/group-name",
        part_annotation="volcano.sh/task-spec",
        disruptable="volcano.sh/preemptable",
        names_queue=True,
        further=("scheduling.volcano.sh/group-name",),
    ),
    jobs=PodJobLabels((JobLabel("volcano.sh/job-name", "Job", frozenset({"PodGroup"})),)),
    own_queue=_own_queue,
    rights=(
        Rights("scheduling.volcano.sh", "queues", "list patch", "to read demand and write weights"),
        Rights("scheduling.volcano.sh", "podgroups", "list", "to read gangs"),
        Rights("batch.volcano.sh", "jobs", "get list", "to read gangs"),
        Rights("batch.volcano.sh", "jobs", "patch", "to stop Jobs", preempting=True),
        Rights("bus.volcano.sh", "commands", "create list", "to stop Jobs", preempting=True),
        Rights(
            "", "configmaps", "get", "to see whether weights act", name="volcano-scheduler-configmap", setting="config"
        ),
        Rights("scheduling.volcano.sh", "podgroups", "get list watch", "to bill a pod to its queue", "accountant"),
        Rights("batch.volcano.sh", "jobs", "get list", "to name the job of a pod", "accountant", owners=True),
    ),
)
