"""The fake scheduler passes the suite that every scheduler passes."""

from __future__ import annotations

import pytest

from gputally.testing.fake_scheduler import SCHEDULER, queue_object, setup_object
from gputally.testing.schedulers import SchedulerSite, SchedulerSuite


class TestFake(SchedulerSuite):
    plugin = SCHEDULER

    @pytest.fixture
    def site(self) -> SchedulerSite:
        return SchedulerSite(
            refs=("fake:a", "fake:b"),
            objects=(queue_object("a"), queue_object("b"), setup_object()),
            without_effect=lambda cluster: cluster.load([setup_object(divides=False)]),
            counts_history=lambda cluster: cluster.load([setup_object(counts_usage=True)]),
        )
