"""Gangs of the default kube-scheduler by PodGroups of `scheduling.k8s.io` count as it starts them.

What the scheduler itself does with these groups: tests/fairshare/real/test_pod_groups.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fairshare.core.queues_and_weights import Gang
from fairshare.preemption.victim_candidates import bundles
from fairshare.schedulers.kube_scheduler.adapter import KubeSchedulerAdapter
from fairshare.targets.weight_plan import look_at
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import POD_GROUPS, Kind, Object
from tests.fairshare.builders import object_of, pod_object, policy_of
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.observations import pods_of, reasons_of
from tests.fairshare.scheduler_kinds import KINDS

POLICY = policy_of([{"name": "a", "refs": ["policy:a"]}])
NEWEST = POD_GROUPS[0]


def gang_of(least: int) -> dict[str, Any]:
    return {"gang": {"minCount": least}}


def group_object(policy: Mapping[str, Any], kind: Kind = NEWEST, **spec: Any) -> Object:
    return object_of(kind, "train", {"schedulingPolicy": policy, **spec}, uid="uid-train")


def member(number: int, gpus: int, *, runs: bool = False, **metadata: Any) -> Object:
    obj = pod_object(f"p{number}", gpus=gpus, node="n0" if runs else "", **metadata)
    obj["spec"]["schedulingGroup"] = {"podGroupName": "train"}
    return obj


def seen(objects: Sequence[Object], kinds: Sequence[Kind] = KINDS) -> list[Gang]:
    cluster = MemoryCluster(kinds, objects)
    return list(look_at(KubeSchedulerAdapter(), POLICY, cluster, pods_of(cluster)).gangs)


@pytest.mark.parametrize("kind", POD_GROUPS)
@pytest.mark.parametrize(("policy", "sizes", "minimum"), [
    (gang_of(2), [4, 4, 4], 8),
    (gang_of(3), [4, 4, 4], 12),
    ({"basic": {}}, [4, 4, 4], 4),
    (gang_of(3), [0, 4, 4, 4, 4], 8),  # a member without GPUs counts
    (gang_of(2), [8, 4, 4], 12),  # of one second: with room for 8, the largest may come first and leave none
    (gang_of(1), [16, 4], 4),  # the larger does not fit where the smaller does
    (gang_of(1), [0, 4], 4),
])  # fmt: skip
def test_a_group_waits_for_the_gpus_with_which_its_scheduler_starts_it(
    kind: Kind, policy: Mapping[str, Any], sizes: Sequence[int], minimum: float
) -> None:
    others = [each for each in KINDS if each not in POD_GROUPS]
    (gang,) = seen([group_object(policy, kind), *(member(i, size) for i, size in enumerate(sizes))], [*others, kind])
    assert (gang.requested, gang.minimum, gang.waits, gang.held_back) == (sum(sizes), minimum, minimum, "")


def test_a_group_that_has_started_waits_for_nothing() -> None:
    running = [member(i, 4, runs=True) for i in range(2)]
    (gang,) = seen([group_object(gang_of(2)), *running, member(2, 8), member(3, 4)])
    assert (gang.requested, gang.allocated, gang.minimum, gang.waits) == (20, 8, 8, 0)


def test_the_surplus_of_a_group_may_be_stopped_pod_by_pod_unless_it_ends_together() -> None:
    pods = [member(i, 4, runs=True) for i in range(3)]
    for mode, parts in (("Pod", [1, 2]), ("PodGroup", [3]), ({"single": {}}, [1, 2]), ({"all": {}}, [3])):
        (gang,) = seen([group_object(gang_of(2), disruptionMode=mode), *pods])
        assert [len(bundle.pods) for bundle in bundles(gang, NOW_MS) if bundle.pods] == parts, mode


@pytest.mark.parametrize("groups", [[], [group_object(gang_of(4))]], ids=["no group", "too few pods"])
def test_no_room_is_made_for_a_group_that_its_scheduler_does_not_try(groups: Sequence[Object]) -> None:
    (gang,) = seen([*groups, *(member(i, 4) for i in range(3))])
    assert gang.held_back
    assert gang.minimum == 12


def test_a_group_that_needs_one_domain_is_placed_by_its_scheduler() -> None:
    rack = {"topology": [{"key": "topology.kubernetes.io/rack"}]}
    (gang,) = seen([group_object(gang_of(1), schedulingConstraints=rack), member(0, 4)])
    assert gang.topology == "topology.kubernetes.io/rack"


def test_where_groups_are_not_served_all_pods_start_together() -> None:
    (gang,) = seen([member(i, 4) for i in range(3)], [each for each in KINDS if each not in POD_GROUPS])
    assert (gang.minimum, gang.held_back) == (12, "")


def test_the_scheduler_reads_the_group_and_not_the_label_of_a_gang() -> None:
    labelled = member(1, 4, labels={"gputally.dev/gang": "other"})
    only_label = pod_object("q", node="", labels={"gputally.dev/gang": "train"})
    gangs = seen([group_object(gang_of(2)), member(0, 4), labelled, only_label])
    assert sorted((gang.requested, gang.minimum) for gang in gangs) == [(4, 4), (8, 8)]


@pytest.mark.parametrize("policy", [{"gang": {"minCount": "many"}}, {"gang": []}, 7])
def test_a_group_that_cannot_be_read_is_named_and_the_others_count(policy: Any) -> None:
    objects = [group_object(policy), member(0, 4), member(1, 4), pod_object("good", node="")]
    cluster = MemoryCluster(KINDS, objects)
    found = look_at(KubeSchedulerAdapter(), POLICY, cluster, pods_of(cluster))
    assert [(gang.name, gang.minimum) for gang in found.gangs] == [("good", 4), ("train", 8)]
    assert reasons_of(found)["Readable"] == ("False", "ObjectsLeftOut")


def test_pods_of_a_group_of_kubernetes_1_35_start_together_by_replica_key() -> None:
    """Also if the cluster serves PodGroups too, of which they name none."""
    objects = [pod_object(f"p{number}", gpus=2, node="") for number in range(5)]
    for number, obj in enumerate(objects[:4]):
        obj["spec"]["workloadRef"] = {"name": "w", "podGroup": "workers", "podGroupReplicaKey": str(number // 2)}
    for kinds in (KINDS, [each for each in KINDS if each not in POD_GROUPS]):
        gangs = seen(objects, kinds)
        assert sorted((len(gang.pods), gang.requested, gang.minimum, gang.held_back) for gang in gangs) == [
            (1, 2.0, 2.0, ""), (2, 4.0, 4.0, ""), (2, 4.0, 4.0, ""),
        ]  # fmt: skip
