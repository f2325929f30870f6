"""The kube-scheduler passes the suite of schedulers."""

from __future__ import annotations

import pytest

from fairshare.schedulers.kube_scheduler.plugin import SCHEDULER as KUBE_SCHEDULER
from gputally.kubernetes.objects import POD_GROUPS
from gputally.testing.schedulers import SchedulerSite, SchedulerSuite
from tests.fairshare.builders import pod_object


class TestKubeScheduler(SchedulerSuite):
    plugin = KUBE_SCHEDULER
    kinds = POD_GROUPS
    writes = False

    @pytest.fixture
    def site(self) -> SchedulerSite:
        return SchedulerSite(refs=("policy:a", "policy:b"), objects=(pod_object("p", "a"), pod_object("q", "b")))
