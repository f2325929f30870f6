"""Owned fields: the base weight, changes by other managers, and the release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairshare.controller.weight_writer import release_weights
from fairshare.core import scheduler_queue_objects
from fairshare.targets.kai import QUEUE
from fairshare.targets.weight_plan import FIELD_MANAGER
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Kind, Object
from tests.fairshare.builders import cluster_of, policy_of, queue_object
from tests.fairshare.observations import conditions_of, results_of, weights_in

Make = Callable[..., Any]


def test_every_write_is_ours_alone_and_notes_the_base(
    three: MemoryCluster, accountant: Any, controller_of: Make
) -> None:
    accountant.spend(a=1.0)
    controller_of(policy_of(), three).cycle()
    obj = three.get(QUEUE, "a")
    (entry,) = obj["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"]) == (FIELD_MANAGER, "Apply")
    noted = scheduler_queue_objects.read(obj["metadata"]["annotations"])
    assert noted is not None
    assert (noted.base, noted.published, noted.direction) == (1.0, 0.5, -1)
    assert three.get(QUEUE, "stranger")["metadata"].get("annotations") is None


def test_a_field_of_another_manager_is_contested_and_other_queues_are_written(
    three: MemoryCluster, accountant: Any, controller_of: Make
) -> None:
    taken = {**three.get(QUEUE, "b"), "spec": {"resources": {"gpu": {"overQuotaWeight": 3, "quota": 0, "limit": -1}}}}
    three.put(taken, field_manager="argocd")
    accountant.spend(a=1.0)
    report = controller_of(policy_of(), three).cycle()
    assert results_of(report) == {"a": "applied", "b": "contested", "c": "applied"}
    assert weights_in(three)["b"] == 3
    assert conditions_of(report)["kai.Available"] == ("False", "Contested")
    (target,) = report.targets
    assert "argocd" in target.degraded["contested"]
    (recorded,) = [d for d in accountant.decisions if d.subject == "b"]
    assert recorded.inputs["result"] == "contested"


def test_a_reset_to_the_base_is_published_over_and_the_base_stays(
    three: MemoryCluster, accountant: Any, controller_of: Make, clock: VirtualClock
) -> None:
    accountant.spend(a=1.0)
    controller = controller_of(policy_of(bounds={"max_step": 100}), three)
    controller.cycle()
    assert weights_in(three)["a"] == 0.1
    fields = {("spec", "resources", "gpu", "overQuotaWeight"): 1}
    _set_unowned(three, "a", fields)
    clock.advance(60_000)
    report = controller.cycle()
    assert weights_in(three)["a"] == 0.1
    assert "WeightReset" in [event.reason for event in report.events]
    noted = scheduler_queue_objects.read(three.get(QUEUE, "a")["metadata"]["annotations"])
    assert noted is not None
    assert noted.base == 1.0


def test_a_change_by_the_operator_is_the_new_base(
    three: MemoryCluster, accountant: Any, controller_of: Make, clock: VirtualClock
) -> None:
    accountant.spend(a=1.0)
    controller = controller_of(policy_of(), three)
    controller.cycle()
    _set_unowned(three, "a", {("spec", "resources", "gpu", "overQuotaWeight"): 7})
    clock.advance(60_000)
    report = controller.cycle()
    assert "BaseWeightChanged" in [event.reason for event in report.events]
    release_weights(policy_of(), three)
    assert weights_in(three) == {"a": 7, "b": 1, "c": 1, "stranger": 5}


def _set_unowned(cluster: MemoryCluster, name: str, fields: dict[tuple[str, ...], Any]) -> None:
    """Another client overwrote the object and keeps no ownership: its entry is dropped afterwards."""
    obj = cluster.get(QUEUE, name)
    for path, value in fields.items():
        at = obj
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value  # type: ignore[index]
    for entry in obj["metadata"]["managedFields"]:
        entry["fieldsV1"].pop("f:spec", None)
    cluster.delete(QUEUE, name)
    cluster.load([obj])


def test_release_restores_what_stood_there_and_leaves_no_annotation(
    accountant: Any, controller_of: Make, clock: VirtualClock
) -> None:
    cluster = cluster_of([queue_object("a", 1), queue_object("b", None), queue_object("c", 2)])
    accountant.spend(a=0.5, b=0.4, c=0.1)
    controller = controller_of(policy_of(), cluster)
    for _ in range(3):
        controller.cycle()
        clock.advance(60_000)
    assert weights_in(cluster) != {"a": 1, "b": None, "c": 2}
    tried = release_weights(policy_of(), cluster, dry_run=True)
    assert [(o.apply.name, o.apply.value, o.result) for o in tried] == [
        ("a", 1.0, "would-apply"),
        ("b", None, "would-apply"),
        ("c", 2.0, "would-apply"),
    ]
    release_weights(policy_of(), cluster)
    assert weights_in(cluster) == {"a": 1, "b": None, "c": 2}
    assert all("annotations" not in obj["metadata"] for obj in cluster.list(QUEUE))
    assert release_weights(policy_of(), cluster) == ()


def test_a_queue_that_goes_meanwhile_is_not_made_again(accountant: Any, controller_of: Make) -> None:
    class Vanishing(MemoryCluster):
        def list(self, kind: Kind, *, fields: str = "") -> list[Object]:
            listed = super().list(kind, fields=fields)
            if kind == QUEUE:
                self.delete(QUEUE, "a")
            return listed

    cluster = Vanishing([QUEUE], [queue_object(name) for name in "abc"])
    accountant.spend(a=1.0)
    report = controller_of(policy_of(), cluster).cycle()
    assert results_of(report)["a"] == "contested"
    assert "a" not in [obj["metadata"]["name"] for obj in MemoryCluster.list(cluster, QUEUE)]
