"""Quotas by GPU model as quotas of Kueue's flavors."""

from __future__ import annotations

import pytest

from fairshare.schedulers.kueue.kinds import CLUSTER_QUEUES, COHORTS, FLAVORS, LOCAL_QUEUES, WORKLOADS
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, Object
from tests.fairshare.builders import (
    object_of,
    policy_of,
)
from tests.fairshare.by_model import H100, LABEL, by_model_policy, one_cycle, two_models
from tests.fairshare.observations import condition
from tests.fairshare.scheduler_kinds import KINDS


def _flavored(name: str, h100: int, a10: int) -> Object:
    flavors = [
        {"name": flavor, "resources": [{"name": GPU, "nominalQuota": str(gpus)}]}
        for flavor, gpus in (("big", h100), ("a10", a10))
    ]
    spec = {"cohortName": "all", "resourceGroups": [{"coveredResources": [GPU], "flavors": flavors}]}
    return object_of(CLUSTER_QUEUES[0], name, spec)


FLAVOR_OBJECTS = [object_of(FLAVORS[0], "big", {"nodeLabels": {LABEL: H100}}), object_of(FLAVORS[0], "a10", {})]
"""A flavor whose labels state its model, and one whose name does."""


@pytest.mark.parametrize(
    ("quotas", "in_sync"), [((4, 4), ("True", "AsPolicy")), ((6, 2), ("False", "PolicyDiffers"))]
)  # fmt: skip
def test_kueue_has_quotas_by_model_as_quotas_of_flavors(quotas: tuple[int, int], in_sync: tuple[str, str]) -> None:
    cluster = MemoryCluster(KINDS, [*two_models(), *FLAVOR_OBJECTS, *(_flavored(name, *quotas) for name in "ab")])
    (target,) = one_cycle(cluster, by_model_policy("kueue")).targets
    by_model, synced = condition(target, "ByModel"), condition(target, "InSync")
    assert (by_model.status, by_model.reason) == ("True", "ByFlavor")
    assert (synced.status, synced.reason) == in_sync
    if in_sync[0] == "False":
        assert "H100" in synced.message


def test_a_workload_of_kueue_counts_for_the_model_of_its_flavor() -> None:
    def workload(name: str, queue: str, flavor: str | None) -> Object:
        container = {"name": "c", "resources": {"limits": {GPU: "4"}}}
        spec = {
            "queueName": queue,
            "podSets": [{"name": "m", "count": 1, "template": {"spec": {"containers": [container]}}}],
        }
        assignment = {"name": "m", "count": 1, "flavors": {GPU: flavor}, "resourceUsage": {GPU: "4"}}
        status = {"admission": {"clusterQueue": queue, "podSetAssignments": [assignment]}} if flavor else {}
        return object_of(WORKLOADS[0], name, spec, status, uid=name)

    local = [object_of(LOCAL_QUEUES[0], name, {"clusterQueue": name}) for name in "ab"]
    work = [
        workload("w1", "b", "big"),
        workload("w2", "b", "a10"),
        workload("w3", "b", "a10"),
        workload("w4", "a", None),
    ]
    queues = [_flavored(name, 4, 4) for name in "ab"]
    cluster = MemoryCluster(KINDS, [*two_models(), *FLAVOR_OBJECTS, *queues, *local, *work, workload("w4", "a", None)])
    (target,) = one_cycle(cluster, by_model_policy("kueue")).targets
    held = {part.model: {q: (s.allocated, s.requested) for q, s in part.standings.items()} for part in target.models}
    assert held["H100"] == {"a": (0.0, 4.0), "b": (4.0, 4.0)}
    assert held["A10"] == {"a": (0.0, 4.0), "b": (8.0, 8.0)}
    assert target.waiting_models == {"Workload/ns/w4": ("H100", "A10")}


@pytest.mark.parametrize(("name", "reason"), [("t4", "NoFlavor"), ("a10", "OneWeight")])
def test_what_kueue_cannot_express_is_named(name: str, reason: str) -> None:
    queue = _flavored("a", 4, 4)
    queue["spec"]["resourceGroups"][0]["flavors"][1]["name"] = name
    flavors = [FLAVOR_OBJECTS[0], object_of(FLAVORS[0], name, {})]
    quotas = {"H100": {"deserved": 4, "weight": 2}, "A10": {"deserved": 4}}
    cluster = MemoryCluster(KINDS, [*two_models(), *flavors, queue, object_of(COHORTS[0], "all", {})])
    policy = policy_of([{"name": "a", "refs": ["kueue:a"], "gpu_models": quotas}])
    (target,) = one_cycle(cluster, policy).targets
    assert (condition(target, "ByModel").status, condition(target, "ByModel").reason) == ("False", reason)
