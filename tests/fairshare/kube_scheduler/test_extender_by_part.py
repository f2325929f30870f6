"""The extender in clusters whose GPUs are counted apart: by model, and as parts of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fairshare.controller.extender_views import ExtenderViews
from fairshare.core.gpu_demand import gpus_taken
from fairshare.schedulers.kube_scheduler.extender import fair_nodes
from fairshare.targets.pod_index import PodIndex
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from tests.fairshare.builders import cluster_with, pod_object, policy_of
from tests.fairshare.by_model import by_model_policy, one_cycle, two_models
from tests.fairshare.conftest import NOW_MS, Make
from tests.fairshare.kube_scheduler.node_scores import scores
from tests.fairshare.mig_nodes import BOTH, mig_pod
from tests.fairshare.observations import condition, pods_of
from tests.fairshare.scheduler_kinds import KINDS


def test_the_extender_protects_a_queue_within_its_quota_of_the_nodes_model() -> None:
    """b is within its quota of H100 and borrows A10, so a's pod may end b's work only on the node with A10."""
    held = [pod_object("b-h", "b", node="h"), pod_object("a-h", "a", node="h", gpus=2)]
    held += [pod_object(f"b-t{i}", "b", node="t") for i in range(2)]
    asking = pod_object("a1", node="")
    cluster = cluster_with(*two_models(), *held, asking)
    policy = by_model_policy("policy")
    index, pods = PodIndex(), {pod.name: pod for pod in pods_of(cluster)}
    for pod in pods.values():
        index.change(pod.uid, pod)
    views = ExtenderViews(index, VirtualClock(NOW_MS))
    report = one_cycle(cluster, by_model_policy("policy", targets={"kube_scheduler": {"mode": "extender"}}))
    views.observe(report, policy)
    view = views.view()
    assert view is not None
    (target,) = report.targets
    assert (condition(target, "ByModel").status, condition(target, "ByModel").reason) == ("True", "ByNode")
    assert fair_nodes(pods["a1"], {"h": [pods["b-h"].uid], "t": [pods["b-t0"].uid]}, view) == ("t",)


def test_a_cycle_and_the_extender_count_alike_in_a_cluster_with_both_gpus(
    controller_of: Make, clock: VirtualClock
) -> None:
    """Every instance of both nodes is held: nothing is free, and the queue holds what they offer."""
    index = PodIndex()
    for of_node in BOTH[:2]:
        name = of_node["metadata"]["name"]
        for resource, count in of_node["status"]["allocatable"].items():
            held = mig_pod(f"{name}-{resource}", resource.removeprefix("nvidia.com/mig-"), name, count=int(count))
            index.change(held.uid, replace(held, ref="policy:a"))
    policy = policy_of([{"name": "a", "refs": ["policy:a"]}], targets={"kube_scheduler": {"mode": "extender"}})
    views = ExtenderViews(index, clock)
    nodes = [{**each, "apiVersion": "v1", "kind": "Node"} for each in BOTH[:2]]
    report = controller_of(policy, MemoryCluster(KINDS, nodes), pods=index.pods).cycle()
    views.observe(report, policy)
    assert report.gpus_by_node == {"nvl": pytest.approx(5 / 7), "pro": 1}
    assert report.free_by_node == pytest.approx({"nvl": 0, "pro": 0})
    (target,) = report.targets
    assert target.standings["a"].allocated == pytest.approx(5 / 7 + 1)
    view = views.view()
    assert view is not None
    assert {name: gpus_taken(view.pods.on_node(name).pods) for name in view.gpus} == pytest.approx(view.gpus)
    asking = mig_pod("new", "1g.24gb")
    assert scores(asking, ["nvl", "pro"], view) == {"nvl": 0, "pro": 0}
    index.change("nvl-nvidia.com/mig-1g.24gb", mig_pod("two", "1g.24gb", "nvl", count=2))
    assert scores(asking, ["nvl", "pro"], view)["nvl"] > 0
