"""Volcano in the tests of schedulers whose queues are objects."""

from __future__ import annotations

from functools import partial
from typing import Any

from fairshare.preemption import unfinished_preemptions as unfinished
from fairshare.schedulers.volcano.kinds import COMMAND, JOB, POD_GROUP, QUEUE
from fairshare.schedulers.volcano.stop import REISSUE_MS
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, Kind, Object
from tests.fairshare.builders import node_object, object_of, pod_object
from tests.fairshare.case_types import BEFORE, Case, Scene, scene_policy, scene_weights, victim_of
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.volcano.objects import DRF, HOLDING, VOLCANO_QUEUE, volcano

# Stopping a victim.
RUNNING = {"state": {"phase": "Running", "lastTransitionTime": BEFORE}}
STOPPABLE = JOB
STOP = ([object_of(JOB, "x", {}, RUNNING, uid="uid-x")], victim_of(kind=JOB))


def stopped(cluster: MemoryCluster) -> list[str]:
    """Return the names of the gangs that were told to stop."""
    return [obj["target"]["name"] for obj in cluster.list(COMMAND)]


def go_on(cluster: MemoryCluster) -> None:
    """Let the minutes pass in which a lost Command is issued again."""
    for minute in range(1, 6):
        unfinished.finish_all(cluster, NOW_MS + minute * REISSUE_MS)


# A cluster of which a fault at any write changes nothing in the end.
def scene() -> Scene:
    def job(name: str, queue: str, phase: str) -> list[Object]:
        limits = {"limits": {GPU: "4"}}
        template = {"spec": {"containers": [{"name": "c", "resources": limits}]}}
        tasks = [{"name": "t", "replicas": 1, "template": template}]
        status = {"state": {"phase": phase, "lastTransitionTime": BEFORE}}
        of_job = {"apiVersion": JOB.api_version, "kind": "Job", "name": name, "uid": f"uid-{name}", "controller": True}
        group = {"queue": queue, "minMember": 1, "minResources": {GPU: "4"}}
        owned = {"ownerReferences": [of_job], "creationTimestamp": BEFORE}
        found = [
            object_of(JOB, name, {"queue": queue, "minAvailable": 1, "tasks": tasks}, status, uid=f"uid-{name}"),
            object_of(
                POD_GROUP, f"{name}-1", group, {"phase": "Running" if phase == "Running" else "Pending"}, **owned
            ),
        ]
        if phase == "Running":
            notes = {"scheduling.k8s.io/group-name": f"{name}-1", "scheduling.volcano.sh/queue-name": queue}
            pod = pod_object(f"{name}-t-0", annotations=notes, **owned)
            pod["spec"]["schedulerName"] = "volcano"
            found.append(pod)
        return found

    objects = [
        object_of(QUEUE, "a", {"weight": 1}, {"allocated": {GPU: "16"}}),
        object_of(QUEUE, "b", {"weight": 1}, {}),
        *(each for i in range(4) for each in job(f"p{i}", "a", "Running")),
        *job("w", "b", "Pending"), volcano("proportion"), node_object("n0", 16),
    ]  # fmt: skip
    weights = partial(scene_weights, QUEUE, ("spec", "weight"))
    return Scene(scene_policy("volcano", "volcano", mode="weight", apply="enforce"), objects, weights)


# Conditions, with the objects that cause and clear them.
IDLE: dict[str, Any] = {"state": "Open"}
WAITING_GROUP = object_of(POD_GROUP, "g", {"queue": "a", "minMember": 1, "minResources": {"nvidia.com/gpu": "4"}})
STRANGER = {**VOLCANO_QUEUE, "metadata": {"name": "stranger"}, "status": HOLDING}
PROPORTION = volcano({"name": "proportion"})


def _effective(status: str, reason: str, wrong: list[Object], right: list[Object], mode: str = "weight") -> Case:
    effective = ("Volcano", "Effective", status, reason)
    return Case(effective, "volcano:a", [VOLCANO_QUEUE, *wrong], [VOLCANO_QUEUE, *right], {"mode": mode})


CONDITIONS = [
    _effective("True", "PluginActive", [PROPORTION], [volcano({"name": "gang"})]),
    _effective("False", "PluginNotActive", [volcano({"name": "gang"})], [PROPORTION]),
    _effective("False", "HierarchyOff", [volcano({"name": "drf", "enabledHierarchy": True})], [volcano(DRF)],
               "hierarchy"),
    _effective("False", "HistoryCountedTwice", [volcano({"name": "proportion"}, {"name": "fairshare"})], [PROPORTION]),
    _effective("False", "StrangersCompete", [PROPORTION, STRANGER], [PROPORTION, {**STRANGER, "status": IDLE}]),
    _effective("False", "ConfigurationRefused", [volcano({"name": "proportion"}, DRF)], [PROPORTION]),
    _effective("Unknown", "ConfigurationUnread", [], [PROPORTION]),
    Case(("Volcano", "InSync", "True", "AsPolicy"), "volcano:a", [VOLCANO_QUEUE],
         [{**VOLCANO_QUEUE, "spec": {"capability": {"nvidia.com/gpu": "8"}}}]),
    Case(("Volcano", "InSync", "False", "PolicyDiffers"), "volcano:a",
         [{**VOLCANO_QUEUE, "spec": {"guarantee": {"resource": {"nvidia.com/gpu": "16"}}}}], [VOLCANO_QUEUE],
         queue={"deserved": 8}),
    Case(("Volcano", "InSync", "False", "QueuesStopped"), "volcano:a",
         [{**VOLCANO_QUEUE, "status": {"state": "Closed"}}, WAITING_GROUP], [VOLCANO_QUEUE, WAITING_GROUP]),
]  # fmt: skip

# A weight that the policy left behind: kind, spec, published weight.
LEFT_BEHIND = (QUEUE, {"weight": 5000}, 5000.0)
# What a policy says of the target beside `apply`, so that weights are written.
TARGET: dict[str, str] = {"mode": "deserved"}
# A queue of a cluster with lost GPUs: kind, spec.
DIVIDED = UNWEIGHTED = (QUEUE, {})

# What users write.
REFS = [{"name": "v", "refs": ["volcano:v"]}]
TASKS = [{"name": "t", "replicas": 1, "template": {"spec": {"containers": []}}}]
TENANTS: dict[Kind, Object] = {
    POD_GROUP: object_of(POD_GROUP, "g", {"queue": "v", "minMember": 1, "minResources": {GPU: "1"}}, uid="g"),
    JOB: object_of(JOB, "j", {"tasks": TASKS}, uid="j"),
}
OWN: list[Object] = [
    object_of(QUEUE, "v", {"weight": 1}),
    object_of(POD_GROUP, "good", {"queue": "v", "minMember": 1, "minResources": {GPU: "2"}}, uid="good"),
]
UNREADABLE = object_of(POD_GROUP, "bad", {"queue": "v", "minMember": "many", "minResources": {}})
# Objects that are so deep or huge that reading them must end.
HUGE: list[Object] = []
# Rows of the page of schedulers, with the reference, the kind and objects.
ROWS: dict[str, tuple[str, Kind, list[Object]]] = {}
# A policy and objects with which the scheduler counts history itself; None: it never does.
COUNTING_HISTORY = None
# Its own quotas that the doctor finds: objects, and those told with name, quota, nested.
QUOTAS = [
    object_of(QUEUE, "root", {"deserved": {"nvidia.com/gpu": 99}}),
    object_of(QUEUE, "v", {"deserved": {"nvidia.com/gpu": 4, "cpu": 8}}),
]
QUOTAS_TOLD = [("v", 4, False)]
