"""Run:ai passes the suite of schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fairshare.schedulers.runai.adapter import NODE_POOL, UNITS, RunaiApi, RunaiCluster
from fairshare.schedulers.runai.plugin import SCHEDULER as RUNAI
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Objects
from gputally.testing.schedulers import NOW_MS, SchedulerSite, SchedulerSuite
from tests.fakes.runai import CLIENT, SECRET, StandIn


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
