"""The manifest of Kueue."""

from __future__ import annotations

from fairshare.schedulers.kueue.kinds import CLUSTER_QUEUES, COHORTS, FLAVORS, LOCAL_QUEUES, WORKLOADS
from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import Object, value_at
from gputally.kubernetes.rights import Rights
from gputally.kubernetes.scheduler_plugins import (
    JobLabel,
    LevelObjects,
    OwnQueue,
    PodGangKeys,
    PodJobLabels,
    PodQueueLabels,
    QueueLevels,
    SchedulerPlugin,
    stated_gpus,
)

_GROUP = "kueue.x-k8s.io"


def _own_queue(obj: Object, parts: MigParts) -> OwnQueue:
    name = obj["metadata"]["name"]
    amounts = [
        stated_gpus({resource.get("name"): resource.get("nominalQuota")}, parts)
        for group in value_at(obj, ("spec", "resourceGroups")) or ()
        for flavor in group.get("flavors") or ()
        for resource in flavor.get("resources") or ()
    ]
    known = [amount for amount in amounts if amount is not None]
    return OwnQueue("kueue", name, sum(known) if known else None, refs=(f"kueue:{name}",))


SCHEDULER = SchedulerPlugin(
    name="kueue",
    prefixes=("kueue", "kueue-cohort"),
    adapter="fairshare.schedulers.kueue.adapter:KueueAdapter",
    settings="fairshare.schedulers.kueue.section:KueueTarget",
    kinds=(CLUSTER_QUEUES, COHORTS, LOCAL_QUEUES, WORKLOADS, FLAVORS),
    reaches="reads queues, Workloads, flavors, Kueue's ConfigMap; writes fair-sharing weights; stops Workloads",
    page="docs/schedulers.md",
    pods=PodQueueLabels(("kueue.x-k8s.io/queue-name",), scheduler_names=None),
    gangs=PodGangKeys(WORKLOADS[0].kind, "kueue.x-k8s.io/workload"),
    jobs=PodJobLabels((JobLabel("kueue.x-k8s.io/pod-group-name", "PodGroup"),)),
    # A ClusterQueue names its cohort in `cohort` up to v1beta1.
    levels=QueueLevels(
        queues=LevelObjects(LOCAL_QUEUES[0].kind, ("spec.clusterQueue",)),
        workloads=LevelObjects(WORKLOADS[0].kind, ("status.admission.clusterQueue",), queue="spec.queueName"),
        leading=LevelObjects(CLUSTER_QUEUES[0].kind, ("spec.cohortName", "spec.cohort")),
        groups=LevelObjects(COHORTS[0].kind, ("spec.parentName",)),
        prefix="kueue-cohort",
    ),
    # On pods that it manages itself; of other jobs it lets their controller delete the pods.
    stop_condition="TerminationTarget",
    own_queue=_own_queue,
    rights=(
        Rights(_GROUP, "clusterqueues cohorts localqueues", "list patch", "to read demand and write weights"),
        Rights(_GROUP, "resourceflavors", "list", "to see the nodes of a quota"),
        Rights(_GROUP, "workloads", "get list", "to read gangs"),
        Rights(_GROUP, "workloads", "patch", "to stop Workloads", preempting=True),
        Rights("", "configmaps", "get", "to see whether weights act", name="kueue-manager-config", setting="config"),
        Rights(_GROUP, "localqueues clusterqueues cohorts", "list watch", "to bill a pod to its queue", "accountant"),
        Rights(_GROUP, "workloads", "get list watch", "to bill a pod to its queue", "accountant"),
    ),
)
