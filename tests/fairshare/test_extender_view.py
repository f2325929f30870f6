"""The extender's view of the cluster between two cycles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport
from fairshare.controller.kube_scheduler_extender import Extender, ExtenderViews, fair_nodes
from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import Pod
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import POD
from tests.fairshare.builders import policy_of
from tests.fairshare.victims import cluster_with, node_object, pod_object

QUEUES = [{"name": name, "deserved": 4, "refs": [f"policy:{name}"]} for name in "ab"]


def _pods(cluster: MemoryCluster) -> Sequence[Pod]:
    return tuple(pod for obj in cluster.list(POD) if (pod := read_pod(obj)) is not None)


@pytest.fixture
def seen(accountant: Any, clock: VirtualClock) -> tuple[MemoryCluster, ExtenderViews]:
    """a holds all 8 GPUs with a quota of 4; b asked for nothing when the last cycle looked."""
    cluster = cluster_with(node_object("n0", 8), pod_object("a0"), pod_object("a1"))
    policy = policy_of(QUEUES)
    view = ExtenderViews(lambda: _pods(cluster), clock)

    def observe(report: CycleReport) -> None:
        view.observe(report, policy)

    Controller(policy, accountant, cluster, clock, pods=lambda: _pods(cluster), observe=observe).cycle()
    return cluster, view


def _asking(name: str, **fields: Any) -> Pod:
    pod = read_pod(pod_object(name, "b", node="", **fields))
    assert pod is not None
    return pod


@pytest.mark.parametrize("watched", [False, True])
def test_the_first_question_of_a_queue_counts_its_own_demand(
    seen: tuple[MemoryCluster, ExtenderViews], watched: bool
) -> None:
    """b was due nothing, as it asked for nothing: what it asks for now is within its quota."""
    cluster, view = seen
    if watched:  # the watch may have shown the pod already
        cluster.load([pod_object("b0", "b", node="")])
    room = view.view()
    assert room is not None
    assert {name: share.entitled for name, share in room.shares.items()} == {"a": 8.0, "b": 0.0}
    assert fair_nodes(_asking("b0"), {"n0": ["uid-a0"]}, room) == ("n0",)


def test_what_is_above_its_share_stays_refused(seen: tuple[MemoryCluster, ExtenderViews]) -> None:
    _, view = seen
    room = view.view()
    assert room is not None
    assert fair_nodes(_asking("b0", gpus=8), {"n0": ["uid-a0", "uid-a1"]}, room) == ()


def test_whether_the_scheduler_asks_is_heard(
    accountant: Any, clock: VirtualClock, seen: tuple[MemoryCluster, ExtenderViews]
) -> None:
    cluster, view = seen
    extender = Extender(view.view, clock)
    loop = Controller(policy_of(QUEUES), accountant, cluster, clock, acts={"kube-scheduler": extender.acts})

    def said() -> tuple[str, str]:
        conditions = loop.cycle().targets[0].conditions
        (found,) = [condition for condition in conditions if condition.type == "Effective"]
        return found.status, found.reason

    assert said() == ("Unknown", "NoRequests")
    extender.prioritize(b'{"Pod": {"metadata": {"name": "p", "namespace": "ns", "uid": "u"}}, "NodeNames": []}')
    assert said() == ("True", "Asked")
