"""Kueue passes the suite of schedulers."""

from __future__ import annotations

from typing import Any

import pytest

from fairshare.schedulers.kueue import kinds as kueue
from fairshare.schedulers.kueue.plugin import SCHEDULER as KUEUE
from gputally.kubernetes.objects import GPU
from gputally.testing.schedulers import SchedulerSite, SchedulerSuite
from tests.fairshare.builders import object_of
from tests.fairshare.kueue.objects import ON, SHOWN, V1BETA2, configured


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
