"""Plays the scheduler `fake` (`gputally.testing.fake_scheduler`) in the demo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accountant.wire.policy_models import QueuePolicy
from fairshare.targets.scheduler_player import SchedulerPlayer, amount
from gputally.kubernetes.objects import Object
from gputally.testing.fake_scheduler import POD_GROUP, QUEUE, SETUP, setup_object


class FakePlayer(SchedulerPlayer):
    """Its queues have their limits and priorities too."""

    kinds = (QUEUE, SETUP, POD_GROUP)

    def settings(self) -> Object:
        return setup_object()

    def queue_spec(self, queue: QueuePolicy, weight: float) -> Mapping[str, Any]:
        return {"quota": queue.deserved, "weight": weight, "limit": queue.limit, "priority": queue.priority}

    def weight(self, queue: Object) -> float:
        return float(queue["spec"]["weight"])

    def queue_status(self, requested: float, allocated: float, _not_preemptible: float) -> Mapping[str, Any]:
        return {"requested": amount(requested), "allocated": amount(allocated)}
