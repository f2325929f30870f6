"""The fake schedulers pass the suite that every scheduler passes."""

from __future__ import annotations

import pytest

from gputally.testing.fake_scheduler import POD_SCHEDULER, SCHEDULER, queue_object, setup_object
from gputally.testing.schedulers import SchedulerSite, SchedulerSuite
from tests.fairshare.builders import fake_pod


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


class TestFakePods(SchedulerSuite):
    plugin = POD_SCHEDULER
    writes = False

    @pytest.fixture
    def site(self) -> SchedulerSite:
        return SchedulerSite(refs=("fake-pods:a", "fake-pods:b"), objects=(fake_pod("p", "a"), fake_pod("q", "b")))
