"""Volcano on an API server with its own schema: weights published, contested, handed over and released."""

from __future__ import annotations

from typing import Any

import pytest

from fairshare.controller.weight_writer import adopt, release_weights
from fairshare.core import scheduler_queue_objects
from fairshare.schedulers.volcano import kinds as volcano
from fairshare.targets.weight_plan import FIELD_MANAGER
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, Cluster
from tests.fairshare.builders import object_of, policy_of
from tests.fairshare.conftest import Make
from tests.fairshare.observations import reasons_of, results_of

pytestmark = pytest.mark.real


@pytest.mark.parametrize(("mode", "field"), [("weight", "weight"), ("deserved", "deserved")])
def test_volcano_takes_either_field(
    cluster: Cluster, accountant: Any, mode: str, field: str, controller_of: Make
) -> None:
    names = [f"vq-{mode}-{letter}" for letter in "ab"]
    for name in names:
        cluster.apply(object_of(volcano.QUEUE, name, {"reclaimable": True}), field_manager="gitops")
    policy = policy_of(
        [{"name": name, "refs": [f"volcano:{name}"]} for name in names],
        targets={"volcano": {"mode": mode, "apply": "enforce"}},
    )
    accountant.spend(**{names[0]: 0.75, names[1]: 0.25})
    results = results_of(controller_of(policy, cluster).cycle())
    assert results == dict.fromkeys(names, "applied")
    first, second = (cluster.get(volcano.QUEUE, name)["spec"][field] for name in names)
    if mode == "weight":
        assert first < second
        assert first + second == 10_000
    else:
        assert (int(first[GPU]) < int(second[GPU]), int(first[GPU]) + int(second[GPU])) == (True, 16)
    assert FIELD_MANAGER in {e["manager"] for e in cluster.get(volcano.QUEUE, names[0])["metadata"]["managedFields"]}
    assert {outcome.result for outcome in release_weights(policy, cluster)} == {"applied"}
    released = cluster.get(volcano.QUEUE, names[0])
    assert scheduler_queue_objects.BASE not in (released["metadata"].get("annotations") or {})
    if mode == "weight" and not isinstance(cluster, MemoryCluster):
        assert released["spec"]["weight"] == 1  # the schema's default is back


def test_a_volcano_weight_is_contested_until_it_is_adopted(
    cluster: Cluster, accountant: Any, controller_of: Make
) -> None:
    names = ["vo-a", "vo-b"]
    for name, weight in zip(names, (3, 1), strict=True):
        cluster.apply(object_of(volcano.QUEUE, name, {"weight": weight}), field_manager="gitops")
    policy = policy_of(
        [{"name": name, "refs": [f"volcano:{name}"]} for name in names],
        targets={"volcano": {"mode": "weight", "apply": "enforce"}},
    )
    accountant.spend(**{"vo-a": 0.75, "vo-b": 0.25})
    controller = controller_of(policy, cluster)
    report = controller.cycle()
    assert results_of(report) == dict.fromkeys(names, "contested")
    assert reasons_of(report.targets[0])["Effective"][1] == "FieldNotOurs"
    assert [cluster.get(volcano.QUEUE, name)["spec"]["weight"] for name in names] == [3, 1]
    taken = {(each.name, each.owners, each.result) for each in adopt(policy, cluster)}
    assert taken == {(name, ("gitops",), "applied") for name in names}
    assert results_of(controller.later()) == dict.fromkeys(names, "applied")
    first, second = (cluster.get(volcano.QUEUE, name)["spec"]["weight"] for name in names)
    assert (first < second, first + second) == (True, 10_000)
    release_weights(policy, cluster)
    assert [cluster.get(volcano.QUEUE, name)["spec"]["weight"] for name in names] == [3, 1]
