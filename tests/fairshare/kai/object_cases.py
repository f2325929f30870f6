"""KAI in the tests of schedulers whose queues are objects."""

from __future__ import annotations

from functools import partial
from typing import Any

from fairshare.core import scheduler_queue_objects
from fairshare.core.scheduler_queue_objects import WeightAnnotations
from fairshare.schedulers.kai.kinds import POD_GROUP, QUEUE
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Kind, Object
from tests.fairshare.builders import node_object, object_of, pod_object
from tests.fairshare.case_types import BEFORE, Case, Scene, scene_policy, scene_weights
from tests.fairshare.kai.objects import (
    ARGUMENTS,
    DATABASE,
    KAI_QUEUE,
    kai_policy,
    pod_group,
    queue_object,
    shard_object,
)

# Stopping a victim: by its pods, as of every scheduler without a way of its own.
STOP = STOPPABLE = None


def stopped(_cluster: MemoryCluster) -> list[str]:
    """Return the names of the gangs that were told to stop."""
    return []


# A cluster of which a fault at any write changes nothing in the end.
def scene() -> Scene:
    def pod(name: str, queue: str, node: str) -> Object:
        labels, annotations = {"kai.scheduler/queue": queue}, {"pod-group-name": f"g-{name}"}
        obj = pod_object(name, node=node, labels=labels, annotations=annotations)
        obj["spec"]["schedulerName"] = "kai-scheduler"
        return obj

    queues = [queue_object("a", requested="16", allocated="16", quota=4)]
    queues.append(queue_object("b", requested="4", allocated="0", quota=4))
    names = [f"p{i}" for i in range(4)]
    groups = [pod_group(f"g-{name}", requested=4, allocated=4, creationTimestamp=BEFORE) for name in names]
    groups.append(pod_group("g-w", "b", requested=4, allocated=0, creationTimestamp=BEFORE))
    pods = [*(pod(name, "a", "n0") for name in names), pod("w", "b", "")]
    objects = [*queues, *groups, *pods, node_object("n0", 16), shard_object(kValue=0)]
    weights = partial(scene_weights, QUEUE, ("spec", "resources", "gpu", "overQuotaWeight"))
    return Scene(scene_policy("kai", "kai", mode="weight", apply="enforce"), objects, weights)


# Conditions, with the objects that cause and clear them.
NOTED = scheduler_queue_objects.WeightAnnotations(1.0, 0.5, None, 0, "f" * 16).annotations()
WELL = shard_object(kValue=0)
USAGE = {"mode": "usage", "endpoint": "http://usage:9091"}
RARELY = {**DATABASE, "usageParams": {"fetchInterval": "2h"}}
BY_ENVIRONMENT = {"clientType": "prometheus", "connectionStringEnvVar": "USAGE_URL"}


def _effective(status: str, reason: str, wrong: Object | None, right: Object, **target: Any) -> Case:
    queue: list[Object] = [KAI_QUEUE]
    before = queue if wrong is None else [*queue, wrong]
    return Case(("KAI", "Effective", status, reason), "kai:a", before, [*queue, right], target)


CONDITIONS = [
    _effective("True", "WeightsOnly", WELL, shard_object(kValue=1, usageDBConfig=DATABASE)),
    _effective("False", "HistoryCountedTwice", shard_object(kValue=0, usageDBConfig=DATABASE, **ARGUMENTS), WELL),
    _effective("Unknown", "NoShards", None, WELL),
    _effective("True", "UsageOnly", shard_object(kValue=1, usageDBConfig=DATABASE), shard_object(kValue=1), **USAGE),
    _effective("False", "UsageNotRead", shard_object(kValue=1), shard_object(kValue=1, usageDBConfig=DATABASE),
               **USAGE),
    _effective("False", "UsageTooOld", shard_object(kValue=1, usageDBConfig=RARELY),
               shard_object(kValue=1, usageDBConfig=DATABASE), **USAGE),
    _effective("Unknown", "AddressUnknown", shard_object(kValue=1, usageDBConfig=BY_ENVIRONMENT),
               shard_object(kValue=1, usageDBConfig=DATABASE), **USAGE),
    Case(("KAI", "Effective", "False", "ProportionOff"), "kai:a",
         [KAI_QUEUE, shard_object(kValue=0, plugins={"proportion": {"enabled": False}})], [KAI_QUEUE, WELL]),
    Case(("KAI", "Effective", "False", "HierarchyIgnored"), "kai:a",
         [KAI_QUEUE, shard_object(kValue=0, args={"full-hierarchy-fairness": "false"})], [KAI_QUEUE, WELL]),
    Case(("KAI", "InSync", "True", "AsPolicy"), "kai:a", [KAI_QUEUE, WELL],
         [{**KAI_QUEUE, "spec": {"resources": {"gpu": {"quota": 4, "limit": -1}}}}, WELL], queue={"deserved": 8}),
    Case(("KAI", "InSync", "False", "PolicyDiffers"), "kai:a", [KAI_QUEUE, WELL],
         [{**KAI_QUEUE, "spec": {"resources": {"gpu": {"quota": 16, "limit": -1}}}}, WELL], queue={"deserved": 16}),
]  # fmt: skip

# A weight that the policy left behind: kind, spec, published weight.
LEFT_BEHIND = (QUEUE, {"resources": {"gpu": {"overQuotaWeight": 0.5}}}, 0.5)
# What a policy says of the target beside `apply`, so that weights are written.
TARGET: dict[str, str] = {}
# A queue of a cluster with lost GPUs: kind, spec.
DIVIDED = UNWEIGHTED = (QUEUE, queue_object("a")["spec"])

# What users write.
REFS = [{"name": "own", "refs": ["kai:own"]}]
CHAIN = [{"name": f"s{i}", **({"parent": f"s{i - 1}"} if i else {}), "minMember": 1} for i in range(1100)]
TENANTS: dict[Kind, Object] = {
    POD_GROUP: pod_group(
        "g", "own", spec={"minMember": 1, "subGroups": CHAIN[:2], "topologyConstraint": {}}, requested=1
    )
}
OWN: list[Object] = [queue_object("own"), pod_group("good", "own", requested=2)]
UNREADABLE = pod_group("bad", "own", spec={"minMember": "many"}, requested=1)
# Objects that are so deep or huge that reading them must end.
HUGE = [pod_group("bad", "own", spec={"minMember": 1, "subGroups": CHAIN}, requested=1)]
# Rows of the page of schedulers, with the reference, the kind and objects.
ROWS: dict[str, tuple[str, Kind, list[Object]]] = {
    "`kai:NAME`": ("kai:{}", QUEUE, [*(queue_object(name) for name in "ab"), shard_object(kValue=0)])
}
# A policy and objects with which the scheduler counts history itself; None: it never does.
COUNTING_HISTORY = (
    kai_policy(targets={"kai": {"apply": "enforce", "mode": "usage"}}),
    [
        queue_object("a", 3, annotations=WeightAnnotations(1.0, 3.0, 0, 1, "v", None, "").annotations()),
        queue_object("b"), queue_object("c"),
        shard_object(kValue=3, usageDBConfig={**DATABASE, "usageParams": {"windowSize": "6h"}}),
    ],
)  # fmt: skip
# Its own quotas that the doctor finds: objects, and those told with name, quota, nested.
QUOTAS = [
    object_of(QUEUE, "root", {"resources": {"gpu": {"quota": 16}}}),
    object_of(QUEUE, "leaf", {"parentQueue": "root", "resources": {"gpu": {"quota": 16}}}),
    object_of(QUEUE, "free", {"resources": {"gpu": {"quota": -1}}}),
]
QUOTAS_TOLD = [("free", None, False), ("leaf", 16, True), ("root", 16, False)]
