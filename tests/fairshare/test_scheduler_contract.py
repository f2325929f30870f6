"""Our own schedulers pass the suite that every scheduler passes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairshare.schedulers.kai.plugin import SCHEDULER as KAI
from fairshare.schedulers.kube_scheduler.plugin import SCHEDULER as KUBE_SCHEDULER
from fairshare.schedulers.kueue import kinds as kueue
from fairshare.schedulers.kueue.plugin import SCHEDULER as KUEUE
from fairshare.schedulers.runai.adapter import NODE_POOL, UNITS, RunaiApi, RunaiCluster
from fairshare.schedulers.runai.plugin import SCHEDULER as RUNAI
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, POD_GROUPS, Objects
from gputally.testing.schedulers import NOW_MS, SchedulerSite, SchedulerSuite
from tests.fairshare.builders import object_of, pod_object, queue_object, shard_object
from tests.fairshare.scheduler_objects import DATABASE, ON, SHOWN, V1BETA2, configured
from tests.fakes.runai import CLIENT, SECRET, StandIn


class TestKai(SchedulerSuite):
    plugin = KAI

    @pytest.fixture
    def site(self) -> SchedulerSite:
        return SchedulerSite(
            refs=("kai:a", "kai:b"),
            objects=(queue_object("a"), queue_object("b"), shard_object(kValue=0)),
            without_effect=lambda cluster: cluster.load([shard_object(plugins={"proportion": {"enabled": False}})]),
            counts_history=lambda cluster: cluster.load([shard_object(kValue=1, usageDBConfig=DATABASE)]),
        )


class TestKueue(SchedulerSuite):
    plugin = KUEUE

    @pytest.fixture
    def site(self) -> SchedulerSite:
        flavors = [{"name": "h200", "resources": [{"name": GPU, "nominalQuota": "8"}]}]
        groups = [{"coveredResources": [GPU], "flavors": flavors}]

        def queue(name: str, status: dict[str, Any] = SHOWN["status"]) -> dict[str, Any]:
            spec = {"cohortName": "ml", "resourceGroups": groups, "fairSharing": {"weight": "2"}}
            return object_of(kueue.CLUSTER_QUEUES[0], name, spec, status)

        def workload(name: str) -> dict[str, Any]:
            containers = [{"name": "c", "resources": {"limits": {GPU: "4"}}}]
            sets = [{"name": "main", "count": 1, "template": {"spec": {"containers": containers}}}]
            return object_of(kueue.WORKLOADS[0], f"w-{name}", {"queueName": name, "podSets": sets}, {}, uid=name)

        def local(name: str) -> dict[str, Any]:
            return object_of(kueue.LOCAL_QUEUES[0], name, {"clusterQueue": name})

        return SchedulerSite(
            refs=("kueue:a", "kueue:b"),
            objects=(*map(queue, "ab"), *map(local, "ab"), *map(workload, "ab"), configured(ON)),
            without_effect=lambda cluster: cluster.load([configured(V1BETA2), queue("a", {}), queue("b", {})]),
        )


class TestKubeScheduler(SchedulerSuite):
    plugin = KUBE_SCHEDULER
    kinds = POD_GROUPS
    writes = False

    @pytest.fixture
    def site(self) -> SchedulerSite:
        return SchedulerSite(refs=("policy:a", "policy:b"), objects=(pod_object("p", "a"), pod_object("q", "b")))


class TestRunai(SchedulerSuite):
    plugin = RUNAI
    kinds = (*UNITS, NODE_POOL)

    @pytest.fixture
    def there(self) -> StandIn:
        found = StandIn()
        for name in "ab":
            found.unit("projects", name, 2, allocated=4, requested=12)
        return found

    @pytest.fixture
    def site(self, there: StandIn) -> SchedulerSite:
        def counts(_cluster: MemoryCluster) -> None:
            there.pools["default"]["schedulingConfiguration"] = {"timeBasedFairShare": {"enabled": True}}

        return SchedulerSite(
            refs=("runai:a", "runai:b"), objects=(), settings={"url": "https://runai.example"}, counts_history=counts
        )

    @pytest.fixture
    def client(self, cluster: MemoryCluster, there: StandIn, tmp_path: Path) -> Iterator[Objects]:
        (tmp_path / "client-id").write_text(CLIENT)
        (tmp_path / "client-secret").write_text(SECRET)
        clock = VirtualClock(NOW_MS)
        with RunaiApi("https://runai.example", tmp_path, clock, transport=there.transport) as api:
            yield RunaiCluster(api, cluster, "gputally", "gputally-fairshare-runai")
