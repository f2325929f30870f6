"""Parts of GPUs in Kueue's quotas and workloads."""

from __future__ import annotations

import pytest

from fairshare.schedulers.kueue.adapter import KueueAdapter
from fairshare.schedulers.kueue.kinds import CLUSTER_QUEUES, FLAVORS, LOCAL_QUEUES, WORKLOADS
from fairshare.targets.weight_plan import look_at
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import Object
from tests.fairshare.builders import object_of, policy_of
from tests.fairshare.mig_nodes import BOTH, NVL, PRO_6000, selector_of
from tests.fairshare.scheduler_kinds import KINDS


def _workload(name: str, queue: str, flavor: str = "", product: str = "") -> Object:
    limits = {"nvidia.com/mig-1g.24gb": "2"}
    spec = {"containers": [{"resources": {"limits": limits}}], "nodeSelector": selector_of(product)}
    admitted = {
        "clusterQueue": queue,
        "podSetAssignments": [
            {"name": "main", "flavors": dict.fromkeys(limits, flavor), "resourceUsage": limits, "count": 1}
        ],
    }
    return object_of(
        WORKLOADS[0],
        name,
        {"queueName": queue, "podSets": [{"name": "main", "count": 1, "template": {"spec": spec}}]},
        {"admission": admitted} if flavor else {},
    )


def test_kueue_counts_quotas_and_workloads_of_a_flavor_by_its_model() -> None:
    flavors = {"nvl": NVL, "pro": PRO_6000}
    resource = {"name": "nvidia.com/mig-1g.24gb", "nominalQuota": "4"}
    groups = [{"flavors": [{"name": name, "resources": [resource]} for name in flavors]}]
    objects = [
        object_of(CLUSTER_QUEUES[0], "a", {"resourceGroups": groups}),
        object_of(LOCAL_QUEUES[0], "a", {"clusterQueue": "a"}),
        *(object_of(FLAVORS[0], name, {"nodeLabels": selector_of(product)}) for name, product in flavors.items()),
        _workload("on-nvl", "a", "nvl"), _workload("on-pro", "a", "pro"),
        _workload("any", "a"), _workload("for-nvl", "a", product=NVL),
    ]  # fmt: skip
    policy = policy_of([{"name": "a", "refs": ["kueue:a"]}])
    found = look_at(KueueAdapter(), policy, MemoryCluster(KINDS, objects), (), MigParts.of(BOTH))
    assert {quota.nominal for quota in found.quotas.values()} == {4 / 7, 1}
    assert sorted(quota.used for quota in found.quotas.values()) == [pytest.approx(2 / 7), 1 / 2]
    assert {gang.name: (gang.requested, gang.allocated) for gang in found.gangs} == {
        "on-nvl": (pytest.approx(2 / 7), pytest.approx(2 / 7)),
        "on-pro": (1 / 2, 1 / 2),
        "any": (1 / 2, 0),
        "for-nvl": (pytest.approx(2 / 7), 0),
    }
