"""Kueue in the tests of schedulers whose queues are objects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fairshare.schedulers.kueue.kinds import CLUSTER_QUEUES, COHORTS, LOCAL_QUEUES, WORKLOADS
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, Kind, Object
from tests.fairshare.builders import node_object, object_of, policy_of
from tests.fairshare.case_types import BEFORE, Case, Scene, scene_policy, scene_weights, victim_of
from tests.fairshare.kueue.objects import ON, SCOPED, SHOWN, V1BETA2, cluster_queue, configured, local_queue

# Stopping a victim.
STOPPABLE = WORKLOADS[0]
STOP = ([object_of(STOPPABLE, "x", {"active": True}, uid="uid-x")], victim_of(kind=STOPPABLE))


def stopped(cluster: MemoryCluster) -> list[str]:
    """Return the names of the gangs that were told to stop."""
    return [obj["metadata"]["name"] for obj in cluster.list(STOPPABLE) if obj["spec"].get("active") is False]


def go_on(_cluster: MemoryCluster) -> None:
    """Nothing is left to do."""


# A cluster of which a fault at any write changes nothing in the end.
def scene() -> Scene:
    quota = [{"name": GPU, "nominalQuota": "8"}]
    groups = [{"coveredResources": [GPU], "flavors": [{"name": "f", "resources": quota}]}]

    def workload(name: str, queue: str) -> Object:
        template = {"spec": {"containers": [{"name": "c", "resources": {"limits": {GPU: "4"}}}]}}
        sets = [{"name": "main", "count": 1, "template": template}]
        usage = {"name": "main", "flavors": {GPU: "f"}, "resourceUsage": {GPU: "4"}}
        reserved = [
            {"type": kind, "status": "True", "lastTransitionTime": BEFORE} for kind in ("QuotaReserved", "Admitted")
        ]
        status = {"admission": {"clusterQueue": queue, "podSetAssignments": [usage]}, "conditions": reserved}
        return object_of(
            WORKLOADS[0], name, {"queueName": queue, "podSets": sets, "active": True}, status if queue == "a" else {},
            uid=f"uid-{name}", creationTimestamp=BEFORE,
        )  # fmt: skip

    objects = [
        *(object_of(CLUSTER_QUEUES[0], name, {"cohortName": "m", "resourceGroups": groups}) for name in "ab"),
        *(object_of(LOCAL_QUEUES[0], name, {"clusterQueue": name}) for name in "ab"),
        *(workload(f"p{i}", "a") for i in range(4)), workload("w", "b"), node_object("n0", 16),
    ]  # fmt: skip
    weights = partial(scene_weights, CLUSTER_QUEUES[0], ("spec", "fairSharing", "weight"))
    return Scene(scene_policy("kueue", "kueue", apply="enforce"), objects, weights)


# Conditions, with the objects that cause and clear them.
FAIR = [cluster_queue(**SHOWN), configured(ON)]
ADMITTING = {**V1BETA2, "admissionFairSharing": {"usageHalfLifeTime": "168h", "usageSamplingInterval": "5m"}}
CREDITS = {"resourceGroups": [{"coveredResources": ["example.com/credits"], "flavors": [
    {"name": "h200", "resources": [{"name": "example.com/credits", "nominalQuota": "80"}]}]}]}  # fmt: skip
ALONE = cluster_queue(**SHOWN)
del ALONE["spec"]["cohortName"]
BESIDE = {**cluster_queue(), "metadata": {"name": "b"}}
CONTAINER = {"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
POD_SETS = [{"name": "main", "count": 2, "template": {"spec": {"containers": [CONTAINER]}}}]
WAITING = object_of(WORKLOADS[0], "w", {"queueName": "x", "podSets": POD_SETS})
STOPPED = cluster_queue(**SHOWN, spec={"stopPolicy": "Hold"})
COUNTED = {
    "weightedShare": 0,
    "admissionFairSharingStatus": {"consumedResources": {"nvidia.com/gpu": "1"}, "lastUpdate": "2026-11-01T00:00:00Z"},
}
ADMITS = {**local_queue(), "status": {"fairSharing": COUNTED}}
EIGHT: dict[str, Any] = {"deserved": 8}
REFUSED = configured({**V1BETA2, "fairSharing": {}})
SCOPED_QUEUE = cluster_queue(**SCOPED)


def _effective(status: str, reason: str, wrong: list[Object], right: list[Object], ref: str = "kueue:a") -> Case:
    return Case(("Kueue", "Effective", status, reason), ref, wrong, right)


CONDITIONS = [
    _effective("True", "FairSharing", FAIR, [cluster_queue(), configured(V1BETA2)]),
    _effective("False", "FairSharingOff", [cluster_queue(), configured(V1BETA2)], FAIR),
    _effective("False", "ConfigurationRefused", [cluster_queue(), REFUSED], FAIR),
    _effective("Unknown", "ConfigurationRefused", [cluster_queue(**SHOWN), REFUSED], FAIR),
    _effective("False", "NothingToShare", [ALONE, configured(ON)], FAIR),
    _effective("Unknown", "RestartPending", [cluster_queue(**SHOWN), configured(V1BETA2)], FAIR),
    _effective("Unknown", "SharesDisagree", [*FAIR, BESIDE], [*FAIR, {**BESIDE, "status": FAIR[0]["status"]}]),
    _effective("Unknown", "SharesUnseen", [{**cluster_queue(), "status": {}}, configured(ON)], FAIR),
    _effective("Unknown", "ConfigurationUnread", [{**cluster_queue(), "status": {}}], FAIR),
    _effective("True", "AdmissionFairSharing", [SCOPED_QUEUE, ADMITS, configured(ADMITTING)],
           [SCOPED_QUEUE, ADMITS, configured(V1BETA2)], "kueue:ns/x"),
    _effective("False", "AdmissionFairSharingOff", [SCOPED_QUEUE, ADMITS, configured(V1BETA2)],
           [SCOPED_QUEUE, ADMITS, configured(ADMITTING)], "kueue:ns/x"),
    _effective("Unknown", "UsageUnseen", [SCOPED_QUEUE, local_queue(), configured(ADMITTING)],
           [SCOPED_QUEUE, ADMITS, configured(ADMITTING)], "kueue:ns/x"),
    Case(("Kueue", "InSync", "True", "AsPolicy"), "kueue:a", FAIR, [STOPPED, local_queue(), WAITING], queue=EIGHT),
    Case(("Kueue", "InSync", "False", "PolicyDiffers"), "kueue:a", FAIR,
         [cluster_queue(**SHOWN, spec={"resourceGroups": [{"coveredResources": ["nvidia.com/gpu"], "flavors": [
             {"name": "h200", "resources": [{"name": "nvidia.com/gpu", "nominalQuota": "16"}]}]}]}), configured(ON)],
         queue={"deserved": 16}),
    Case(("Kueue", "InSync", "False", "QueuesStopped"), "kueue:a", [STOPPED, local_queue(), WAITING],
         [cluster_queue(**SHOWN), local_queue(), WAITING], queue=EIGHT),
    Case(("Kueue", "InSync", "Unknown", "NotComparable"), "kueue:a", [cluster_queue(**SHOWN, spec=CREDITS)], FAIR,
         queue=EIGHT),
]  # fmt: skip

# A weight that the policy left behind: kind, spec, published weight.
LEFT_BEHIND = (CLUSTER_QUEUES[0], {"cohortName": "c", "fairSharing": {"weight": "0.5"}}, 0.5)
# What a policy says of the target beside `apply`, so that weights are written.
TARGET: dict[str, str] = {}
# A queue of a cluster with lost GPUs: kind, spec.
DIVIDED = (CLUSTER_QUEUES[0], {"cohortName": "pool", "fairSharing": {"weight": "1"}})
UNWEIGHTED = (CLUSTER_QUEUES[0], {"cohortName": "pool"})


def _quota() -> dict[str, Any]:
    flavor = {"name": "f", "resources": [{"name": GPU, "nominalQuota": "8"}]}
    return object_of(CLUSTER_QUEUES[0], "k", {"resourceGroups": [{"coveredResources": [GPU], "flavors": [flavor]}]})


def _workload(name: str, gpus: str) -> dict[str, Any]:
    containers = [{"name": "c", "resources": {"limits": {GPU: gpus}}}]
    sets = [{"name": "main", "count": 1, "template": {"spec": {"containers": containers}}}]
    admission = {"clusterQueue": "k", "podSetAssignments": [{"name": "main", "count": 1}]}
    done = [{"name": "main", "count": 0}]
    spec, status = {"queueName": "k", "podSets": sets}, {"admission": admission, "reclaimablePods": done}
    return object_of(WORKLOADS[0], name, spec, status, uid=f"uid-{name}", annotations={}, labels={})


# What users write.
REFS = [{"name": "k", "refs": ["kueue:k"]}]
TENANTS: dict[Kind, Object] = {WORKLOADS[0]: _workload("w", "1")}
OWN: list[Object] = [_quota(), _workload("good", "2")]
UNREADABLE = {**_workload("bad", "1"), "status": {"reclaimablePods": [{"name": "main", "count": "x"}]}}
# Objects that are so deep or huge that reading them must end.
HUGE: list[Object] = [_workload("bad", "1e308")]


def _two(kind: Kind, spec: Mapping[str, Any], status: Mapping[str, Any] | None = None, **more: Any) -> list[Object]:
    return [object_of(kind, name, {**spec}, status, **more) for name in "ab"]


def _cluster_queues(cohorts: str = "mm") -> list[Object]:
    found = []
    for name, cohort in zip("ab", cohorts, strict=True):
        queue = cluster_queue(spec={"cohortName": cohort}, status={"fairSharing": {"weightedShare": 0}})
        found.append({**queue, "metadata": {"name": name}})
    return found


# Rows of the page of schedulers, with the reference, the kind and objects.
ROWS: dict[str, tuple[str, Kind, list[Object]]] = {
    "`kueue:NAME`": ("kueue:{}", CLUSTER_QUEUES[0], [*_cluster_queues(), configured(ON)]),
    "`kueue-cohort:NAME`": ("kueue-cohort:{}", COHORTS[0], [
        *_two(COHORTS[0], {"parentName": "root"}, {"fairSharing": {"weightedShare": 0}}), *_cluster_queues("ab"),
        configured(ON),
    ]),
    "`kueue:NAMESPACE/NAME`": ("kueue:ns/{}", LOCAL_QUEUES[0], [
        *_two(LOCAL_QUEUES[0], {"clusterQueue": "a"}), *_cluster_queues(), configured(ON),
    ]),
}  # fmt: skip
# A policy and objects with which the scheduler counts history itself; None: it never does.
COUNTING_HISTORY = (
    policy_of([{"name": "x", "weight": 2, "refs": ["kueue:ns/x"]}, {"name": "y", "refs": ["kueue:ns/y"]}]),
    [cluster_queue(**SCOPED), local_queue(), {**local_queue(), "metadata": {"name": "y", "namespace": "ns"}}],
)
# Its own quotas that the doctor finds: objects, and those told with name, quota, nested.
_RESOURCES = [{"name": "nvidia.com/gpu", "nominalQuota": "32"}], [{"name": "cpu", "nominalQuota": 9}]
QUOTAS = [
    object_of(CLUSTER_QUEUES[0], "cq", {"resourceGroups": [{"flavors": [{"resources": each}]} for each in _RESOURCES]})
]
QUOTAS_TOLD = [("cq", 32, False)]
