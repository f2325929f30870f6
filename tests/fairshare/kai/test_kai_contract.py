"""KAI passes the suite of schedulers."""

from __future__ import annotations

import pytest

from fairshare.schedulers.kai.plugin import SCHEDULER as KAI
from gputally.testing.schedulers import SchedulerSite, SchedulerSuite
from tests.fairshare.kai.objects import DATABASE, queue_object, shard_object


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
