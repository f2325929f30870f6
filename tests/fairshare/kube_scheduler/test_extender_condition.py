"""The condition of a scheduler that no object shows: whether it asks."""

from __future__ import annotations

from typing import Any

from fairshare.schedulers.kube_scheduler.extender import KubeSchedulerExtender
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from tests.fairshare.builders import policy_of
from tests.fairshare.conftest import Make
from tests.fairshare.observations import conditions_of
from tests.fairshare.scheduler_kinds import KINDS


def test_the_kube_scheduler_is_heard_by_the_extender_alone(clock: VirtualClock, controller_of: Make) -> None:
    policy = policy_of([{"name": "a", "refs": ["policy:a"]}], targets={"kube_scheduler": {"mode": "extender"}})
    cluster = MemoryCluster(KINDS)

    def effective(**options: Any) -> tuple[str, str]:
        report = controller_of(policy, cluster, **options).cycle()
        return conditions_of(report)["kube-scheduler.Effective"]

    assert effective() == ("Unknown", "AsksTheExtender")
    extender = KubeSchedulerExtender(lambda: None, clock)
    assert effective(acts={"kube-scheduler": extender.acts}) == ("Unknown", "NoRequests")
    extender.prioritize(b'{"Pod": {"metadata": {"name": "p", "namespace": "n", "uid": "u"}}, "NodeNames": ["n1"]}')
    assert effective(acts={"kube-scheduler": extender.acts}) == ("True", "Asked")
