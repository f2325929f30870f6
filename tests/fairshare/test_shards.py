"""KAI's scheduling shards: each divides its own nodes among its own queues, less what other schedulers' pods hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accountant.wire.policy_models import WindowSpec
from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import replay_weights
from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import Shard
from fairshare.preemption.claims_and_placement import preemption_inputs
from fairshare.targets.kai import CONFIG, POOL_LABEL, SHARD
from fairshare.usage.cluster_capacity import NothingToDivide, ServingNodes, target_capacity
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_HOUR
from tests.fairshare.builders import object_of, pod_group, policy_of, queue_object
from tests.fairshare.victims import node_object, pod_object

Make = Callable[..., Any]


def _node(name: str, gpus: int = 8, pool: str = "") -> dict[str, Any]:
    labels = {"labels": {POOL_LABEL: pool}} if pool else {}
    return node_object(name, gpus, **labels)


def _shard(value: str = "") -> dict[str, Any]:
    return object_of(SHARD, value or "default", {"kValue": 0, **({"partitionLabelValue": value} if value else {})})


@pytest.fixture
def due(either_of: Make, accountant: Any, clock: VirtualClock) -> Make:
    """A cycle's report on KAI, and who is due how much."""

    def make(objects: list[dict[str, Any]], pods: list[dict[str, Any]] = [], **policy: Any) -> Any:  # noqa: B006
        accountant.nodes = {"n1", "n2"}
        read = tuple(pod for obj in pods if (pod := read_pod(obj)) is not None)
        wanted = policy_of(**{"k": 0, **policy})
        (target,) = Controller(wanted, accountant, either_of(objects), clock, pods=lambda: read).cycle().targets
        return target, {each.queue: each.gpus for each in target.entitlements}

    return make


def test_every_shard_is_divided_by_itself(due: Make, accountant: Any) -> None:
    """As two real schedulers have it: 4 and 4 of the nodes without a label, 8 of the pool blue."""
    blue = queue_object("c", labels={POOL_LABEL: "blue"})
    nodes = [_node("n1"), _node("n2", pool="blue")]
    shards = [_shard(), _shard("blue")]
    target, gpus = due([queue_object("a"), queue_object("b"), blue, *nodes, *shards])
    assert gpus == {"a": 4.0, "b": 4.0, "c": 8.0}
    assert target.gpus == 16.0


def test_the_label_of_node_pools_is_the_one_that_kais_config_names(due: Make) -> None:
    labelled = {"labels": {"corp/pool": "blue"}}
    config = object_of(CONFIG, "kai-config", {"global": {"nodePoolLabelKey": "corp/pool"}})
    blue = node_object("n2", **labelled)
    shards = [_shard(), _shard("blue")]
    queues = [queue_object("a"), queue_object("b"), queue_object("c", **labelled)]
    _, gpus = due([*queues, _node("n1"), blue, *shards, config])
    assert gpus == {"a": 4.0, "b": 4.0, "c": 8.0}


def test_a_division_by_shards_is_computed_again_from_its_record(due: Make, accountant: Any) -> None:
    """Usage is a part of the shard's own capacity: a used 0.3 of the cluster, 0.6 of its shard."""
    accountant.spend(a=0.3, b=0.1, c=0.5)
    blue = queue_object("c", labels={POOL_LABEL: "blue"})
    shards = [_shard(), _shard("blue")]
    objects = [queue_object("a"), queue_object("b"), blue, _node("n1"), _node("n2", pool="blue"), *shards]
    target, gpus = due(objects, k=1)
    assert gpus == {"a": 3.0, "b": 5.0, "c": 8.0}
    assert {each.queue: each.usage_ratio for each in target.entitlements} == {"a": 0.6, "b": 0.2, "c": 1.0}
    inputs = next(each for each in accountant.decisions if each.subject == "*")
    computed = replay_weights(policy_of(k=1), inputs)
    assert computed.entitlements == target.entitlements
    assert computed.weights == target.weights


def test_a_parent_of_queues_in_several_shards_gets_what_they_get(due: Make) -> None:
    queues = [
        {"name": "dept"},
        {"name": "a", "parent": "dept", "refs": ["kai:a"]},
        {"name": "b", "parent": "dept", "refs": ["kai:b"]},
        {"name": "c", "refs": ["kai:c"]},
    ]
    blue = {"labels": {POOL_LABEL: "blue"}}
    objects = [queue_object("a"), queue_object("b", **blue), queue_object("c", **blue)]
    shards = [_shard(), _shard("blue")]
    _, gpus = due([*objects, _node("n1"), _node("n2", pool="blue"), *shards], queues=queues)
    assert gpus == {"a": 8.0, "b": 4.0, "c": 4.0, "dept": 12.0}


def test_a_queue_of_a_pool_without_a_shard_gets_nothing_and_is_named(due: Make) -> None:
    lost = queue_object("c", labels={POOL_LABEL: "green"})
    objects = [queue_object("a"), queue_object("b"), lost, _node("n1"), _node("n2", pool="green"), _shard()]
    target, gpus = due(objects)
    assert gpus == {"a": 4.0, "b": 4.0, "c": 0.0}
    mapped = next(each for each in target.conditions if each.type == "Mapped")
    assert (mapped.status, mapped.reason) == ("False", "QueuesLeftOut")
    assert "kai.scheduler/node-pool: green, a node pool that no SchedulingShard schedules" in mapped.message


def test_an_unlabelled_queue_does_not_exist_in_a_labelled_shard(due: Make) -> None:
    blue = {"labels": {POOL_LABEL: "blue"}}
    objects = [queue_object("a"), queue_object("b", **blue), queue_object("c", **blue)]
    target, gpus = due([*objects, _node("n1", pool="blue"), _node("n2", pool="blue"), _shard("blue")])
    assert gpus == {"a": 0.0, "b": 8.0, "c": 8.0}
    assert "(none)" in next(each.message for each in target.conditions if each.type == "Mapped")


def test_what_pods_of_other_schedulers_hold_is_not_kais_to_divide(due: Make) -> None:
    """KAI has 12 of 16: 4 each. Its own pods, and the reservation pods of its shared GPUs, are its own."""
    theirs = pod_object("other", node="n1", gpus=4)
    own = pod_object("own", node="n2", gpus=4)
    own["spec"]["schedulerName"] = "kai-scheduler"
    keeper = pod_object("keeper", node="n2", gpus=1)
    keeper["metadata"]["namespace"] = "kai-resource-reservation"
    objects = [*map(queue_object, "abc"), _node("n1"), _node("n2"), _shard()]
    target, gpus = due(objects, [theirs, own, keeper])
    assert gpus == {"a": 4.0, "b": 4.0, "c": 4.0}
    assert target.gpus == 12.0


def test_all_of_it_held_by_others_leaves_nothing_to_divide(due: Make) -> None:
    theirs = [pod_object(f"other{i}", node="n1", gpus=4) for i in range(2)]
    target, _ = due([*map(queue_object, "abc"), _node("n1"), _shard()], theirs)
    assert "pods of other schedulers leave" in target.degraded["NoCapacity"]


def test_a_gang_finds_room_on_nodes_of_its_own_pool_alone(due: Make) -> None:
    blue = queue_object("c", labels={POOL_LABEL: "blue"})
    groups = [pod_group(f"g{queue}", queue) for queue in "ac"]
    waiting = []
    for queue in "ac":
        pod = pod_object(f"w{queue}", node="", annotations={"pod-group-name": f"g{queue}"})
        pod["spec"]["schedulerName"] = "kai-scheduler"
        pod["metadata"]["labels"] = {"kai.scheduler/queue": queue}
        waiting.append(pod)
    nodes = [_node("n1"), _node("n2", pool="blue")]
    objects = [queue_object("a"), queue_object("b"), blue, *groups, *nodes]
    target, _ = due([*objects, _shard(), _shard("blue")], waiting)
    here = preemption_inputs(policy_of(k=0), "kai", target.gangs, target.entitlements, nodes, (), 0)
    assert here.usable == {"PodGroup/ns/ga": ("n1",), "PodGroup/ns/gc": ("n2",)}


def _shared_node(gpus: int) -> dict[str, Any]:
    """Lists each of its GPUs twice."""
    node = _node("n0", gpus)
    return {**node, "metadata": {"name": "n0", "labels": {"nvidia.com/gpu.replicas": "2"}}}


def test_the_physical_gpus_behind_a_target_shrink_with_what_it_divides(accountant: Any) -> None:
    """A node lists 16 GPUs, each twice: a target whose quotas hold 8 of them divides 4 physical ones, in the cycle and
    by hand."""
    serving = ServingNodes((_shared_node(16),))
    window = accountant.window(WindowSpec(), "allocated", MS_PER_HOUR, 0.0)
    whole = target_capacity(serving, window, None, ())
    assert (whole.gpus, whole.devices, whole.pools) == (16.0, 8.0, ())
    half = target_capacity(serving, window, 8.0, ())
    assert (half.gpus, half.devices) == (8.0, 4.0)
    part = target_capacity(serving, window, 8.0, (Shard(("a",), None, 4.0),))
    assert (part.gpus, part.devices) == (4.0, 2.0)


@pytest.mark.parametrize(
    ("gpus", "quota", "shards", "reason"),
    [
        (0, None, (), "no node shows GPUs"),
        (8, 0.0, (), "the quotas of its queues hold no GPU"),
        (8, None, (Shard(("a",), None, 8.0),), "no node of its shards has a GPU"),
    ],
)
def test_a_target_without_gpus_says_why(
    accountant: Any, gpus: int, quota: float | None, shards: tuple[Shard, ...], reason: str
) -> None:
    accountant.capacity = 0
    window = accountant.window(WindowSpec(), "allocated", MS_PER_HOUR, 0.0)
    with pytest.raises(NothingToDivide, match=reason):
        target_capacity(ServingNodes((_node("n0", gpus),)), window, quota, shards)
