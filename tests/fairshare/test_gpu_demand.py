"""GPU requests of pods, their queues and gangs, and the capacity of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from fairshare.core.gpu_demand import (
    CHECKPOINT,
    GANG_LABEL,
    QUEUE_LABEL,
    SPOT_LABEL,
    PodReducer,
    gangs_by_label,
    last_checkpoint,
    read_pod,
    requested_gpus,
    shared_gpus,
    smallest_waiting,
    standings_of,
)
from fairshare.core.queues_and_weights import Pod
from fairshare.preemption.claims_and_placement import free_by_node, gpus_by_node
from gputally.base.clock import VirtualClock
from gputally.kubernetes.mig_parts import NO_NODES
from gputally.kubernetes.objects import GPU, gpus, gpus_of_nodes
from gputally.testing.fake_scheduler import (
    DEVICES_KEY,
    FRACTION_KEY,
    GROUP_KEY,
    MEMORY_KEY,
    QUEUE_KEY,
    RESERVATIONS,
    SCHEDULER,
    SCHEDULER_NAME,
    pod_group,
    queue_object,
)
from gputally.testing.fake_scheduler_adapter import FakeAdapter
from tests.fairshare.builders import node_object, plain_pod, policy_of, read_plain_pod
from tests.fairshare.conftest import Make
from tests.plugin_cases import plugin_cases

CASES = tuple(plugin_cases("fairshare").values())
SHARES = SCHEDULER.shares
assert SHARES is not None


def _container(amount: int, **more: Any) -> dict[str, Any]:
    return {"resources": {"limits": {GPU: str(amount)}}, **more}


@pytest.mark.parametrize(
    ("spec", "amount"),
    [
        ({"containers": [_container(2), _container(1)]}, 3),
        ({"containers": [_container(1)], "initContainers": [_container(4)]}, 4),
        ({"containers": [_container(2)], "initContainers": [_container(1, restartPolicy="Always"), _container(2)]}, 3),
        ({"containers": [{"resources": {"requests": {GPU: "2"}}}]}, 2),
        ({"containers": [{}]}, 0),
        ({}, 0),
    ],
)
def test_a_pods_request_is_what_its_node_must_have(spec: dict[str, Any], amount: float) -> None:
    assert requested_gpus(spec, NO_NODES) == amount


def test_mig_instances_count_by_their_slices() -> None:
    assert gpus({"nvidia.com/mig-3g.40gb": "2", GPU: "1", "cpu": "4"}, NO_NODES.anywhere) == pytest.approx(1 + 6 / 7)
    assert gpus({"nvidia.com/mig-1c.2g.20gb": "1", "nvidia.com/mig-odd": "5"}, NO_NODES.anywhere) == pytest.approx(
        2 / 7
    )
    assert gpus(None, NO_NODES.anywhere) == 0


def test_shared_gpus_count_by_their_fraction() -> None:
    assert shared_gpus({FRACTION_KEY: "0.5", DEVICES_KEY: "2"}, SHARES) == 1.0
    assert shared_gpus({}, SHARES) == 0
    assert shared_gpus({FRACTION_KEY: "1e308"}, SHARES) == 0  # no cluster has so many, and their sum would overflow
    assert shared_gpus({FRACTION_KEY: "1e300", DEVICES_KEY: "1e300"}, SHARES) == 0
    shares = {FRACTION_KEY: "0.25"}
    assert read_plain_pod(gpu=None, annotations=shares, scheduler=SCHEDULER_NAME).gpus == 0.25
    assert read_plain_pod(annotations=shares).gpus == 2  # no scheduler reads it there: its whole GPUs are its own


def test_memory_that_a_scheduler_of_shared_gpus_reads_for_a_container_is_a_request() -> None:
    request = {"nvidia.com/container.main.gpu-memory.request": "20Gi"}
    found = read_plain_pod(gpu=None, annotations={**request, DEVICES_KEY: "2"}, scheduler=SCHEDULER_NAME)
    assert (found.memory_mib, found.shares) == (40_960, True)
    assert (
        read_plain_pod(gpu=None, annotations={**request, MEMORY_KEY: "30000"}, scheduler=SCHEDULER_NAME).memory_mib
        == 30_000
    )
    assert read_pod(plain_pod(gpu=None, annotations=request)) is None  # no other scheduler reads it


def test_a_part_takes_nothing_off_whole_gpus() -> None:
    found = read_plain_pod(scheduler=SCHEDULER_NAME, annotations={FRACTION_KEY: "0.01"})
    assert (found.gpus, found.shares) == (2, False)


BOUND = {"node": "n1", "uid": "u", "labels": {QUEUE_LABEL: "own", GANG_LABEL: "g"}}
LATER: tuple[dict[str, Any], ...] = (
    {"labels": {QUEUE_LABEL: "other", GANG_LABEL: "g"}},
    {"labels": {QUEUE_LABEL: "own", GANG_LABEL: "large"}},
    {"annotations": {"scheduling.k8s.io/group-name": "large", CHECKPOINT: "2026-10-01T01:00:00Z"}},
    {"annotations": {CHECKPOINT: "2026-10-01T00:00:00Z"}},
    {"annotations": {CHECKPOINT: "2027-10-01T00:00:00Z"}},
    {"annotations": {}},
)


@pytest.mark.parametrize("later", LATER)
def test_hints_that_are_written_into_a_running_pod_buy_no_protection(later: dict[str, Any]) -> None:
    read = PodReducer(VirtualClock(1_790_820_000_000))  # 2026-10-01T02:00:00Z
    saved = {"annotations": {CHECKPOINT: "2026-10-01T01:00:00Z"}}
    before = read(plain_pod(**BOUND, **saved))
    assert before.checkpoint_ms is not None
    assert read(plain_pod(**{**BOUND, **saved, **later})) == before


@pytest.mark.parametrize("later", [{MEMORY_KEY: "1"}, {FRACTION_KEY: "0.01"}, {}])
def test_a_running_pod_keeps_the_part_of_a_gpu_that_it_was_bound_with(later: dict[str, str]) -> None:
    read = PodReducer(VirtualClock(0))
    bound = {"gpu": None, "scheduler": SCHEDULER_NAME, "node": "n1", "uid": "u"}
    before = read(plain_pod(**bound, annotations={MEMORY_KEY: "40000"}))
    assert read(plain_pod(**bound, annotations=later)) == before
    assert read(plain_pod(**bound, annotations={}, phase="Succeeded")) is None
    gone = read(plain_pod(**bound, annotations={}, deletionTimestamp="2026-10-01T01:00:00Z"))
    assert (gone.held, gone.leaving) == (False, True)


def test_a_running_pod_may_give_protection_up() -> None:
    read = PodReducer(VirtualClock(1_790_820_000_000))
    read(plain_pod(**BOUND, annotations={CHECKPOINT: "2026-10-01T01:00:00Z"}))
    saved = {CHECKPOINT: "2026-10-01T01:30:00Z"}
    later = read(plain_pod(**{**BOUND, "labels": {**BOUND["labels"], SPOT_LABEL: "true"}}, annotations=saved))
    assert (later.spot, later.disruptable, later.checkpoint_ms) == (True, True, 1_790_818_200_000)
    taken_back = read(plain_pod(**BOUND))
    assert taken_back.spot


def test_a_waiting_pod_may_still_choose() -> None:
    read = PodReducer(VirtualClock(0))
    waiting = {key: value for key, value in BOUND.items() if key != "node"}
    read(plain_pod(**waiting))
    later = read(plain_pod(**{**waiting, "labels": {QUEUE_LABEL: "other"}}))
    assert later.ref == "policy:other"


def test_finished_pods_and_those_without_gpus_are_no_demand() -> None:
    assert read_pod(plain_pod(phase="Succeeded")) is None
    assert read_pod(plain_pod(gpu=None)) is None


def test_a_pod_knows_its_queue_its_gang_and_its_clock() -> None:
    marks = {GROUP_KEY: "pg", CHECKPOINT: "2026-10-01T01:00:00Z"}
    placed = {"node": "n1", "scheduler": SCHEDULER_NAME, "labels": {QUEUE_KEY: "vision"}, "annotations": marks}
    pod = read_plain_pod(**placed, creationTimestamp="2026-10-01T00:00:00Z")
    assert (pod.ref, pod.gang, pod.held) == ("fake:vision", "PodGroup/ns/pg", True)
    assert (pod.created_ms, pod.checkpoint_ms) == (1_790_812_800_000, 1_790_816_400_000)
    assert not read_plain_pod(node="n1", deletionTimestamp="2026-10-01T00:00:00Z").held


@pytest.mark.parametrize(
    ("scheduler", "ref", "gang"),
    [
        ("fake-scheduler", "fake:vision", "PodGroup/ns/k"),
        *(cases.PLACES for cases in CASES),
        ("default-scheduler", "policy:own", "Gang/ns/g"),
        ("", "policy:own", "Gang/ns/g"),
    ],
)
def test_a_queue_and_a_gang_count_only_where_their_scheduler_places(scheduler: str, ref: str, gang: str) -> None:
    """Otherwise a pod could use the share, or inflate the gang, of any other queue."""
    labels = {QUEUE_KEY: "vision", QUEUE_LABEL: "own", GANG_LABEL: "g"}
    annotations = {GROUP_KEY: "k"}
    for cases in CASES:
        annotations |= cases.MARKS
    pod = read_plain_pod(labels=labels, annotations=annotations, scheduler=scheduler)
    assert (pod.ref, pod.gang) == (ref, gang)


def test_a_checkpoint_counts_only_as_far_as_every_pod_has_come() -> None:
    def at(instant: int | None) -> Pod:
        return Pod("u", "ns", "p", 1.0, checkpoint_ms=instant)

    assert last_checkpoint([at(5), at(3)]) == 3
    assert last_checkpoint([at(5), at(None)]) == 5  # one worker writes for all
    assert last_checkpoint([at(None)]) is None


def test_plain_pods_belong_by_label_and_start_together_only_where_they_say_so() -> None:
    owner = [{"kind": "ReplicaSet", "name": "web", "controller": True, "uid": "rs"}]
    pods = [
        read_plain_pod("g0", labels={QUEUE_LABEL: "a", GANG_LABEL: "train"}),
        read_plain_pod("g1", labels={QUEUE_LABEL: "a", GANG_LABEL: "train"}, node="n"),
        read_plain_pod("w0", labels={QUEUE_LABEL: "bee"}, ownerReferences=owner, node="n"),
        read_plain_pod("w1", labels={QUEUE_LABEL: "bee"}, ownerReferences=owner),
        read_plain_pod("alone", labels={QUEUE_LABEL: "a"}),
        read_plain_pod("nobody", labels={QUEUE_LABEL: "unknown"}),
        read_plain_pod("none"),
    ]
    policy = policy_of([{"name": "a"}, {"name": "b", "refs": ["policy:bee"]}])
    found = {(g.queue, g.name): (g.requested, g.allocated, g.minimum) for g in gangs_by_label(policy, pods)}
    assert found == {("a", "alone"): (2, 0, 2), ("a", "train"): (4, 2, 4), ("b", "web"): (4, 2, 2)}
    gangs = gangs_by_label(policy, pods)
    assert {q: (s.requested, s.allocated) for q, s in standings_of(policy, gangs).items()} == {"a": (6, 2), "b": (4, 2)}
    assert smallest_waiting(gangs) == {"a": 2.0}


def test_pods_of_a_group_of_the_kube_scheduler_start_together() -> None:
    """Other schedulers do not read the group."""

    def read(name: str, scheduler: str) -> Pod:
        obj = plain_pod(name, "2", labels={QUEUE_LABEL: "a"})
        obj["spec"] |= {"schedulerName": scheduler, "schedulingGroup": {"podGroupName": "train"}}
        found = read_pod(obj)
        assert found is not None
        return found

    pods = [read(f"p{i}", "default-scheduler") for i in range(2)]
    (gang,) = gangs_by_label(policy_of([{"name": "a"}]), pods)
    assert (gang.name, gang.requested, gang.minimum) == ("train", 4, 4)
    assert {read("q", scheduler).gang for scheduler in ("fake-scheduler", *(c.PLACES[0] for c in CASES))} == {""}


def test_a_terminating_pod_asks_for_nothing() -> None:
    """Otherwise a restarted gang would request twice, and a deleted job would cause preemptions."""
    gone = {"node": "n", "deletionTimestamp": "2026-10-01T00:00:00Z"}
    plain = {"labels": {QUEUE_LABEL: "a", GANG_LABEL: "train"}}
    policy = policy_of([{"name": "a", "refs": ["fake:a"]}])
    again = [read_plain_pod(f"old{i}", **plain, **gone) for i in range(2)]
    again += [read_plain_pod(f"new{i}", **plain) for i in range(2)]
    assert [(g.requested, g.minimum, g.waits) for g in gangs_by_label(policy, again)] == [(4, 4, 4)]
    assert gangs_by_label(policy, again[:2]) == ()


@pytest.mark.parametrize(("number", "asks"), [(0, []), (2, [(4, 4, 4)])])
def test_a_terminating_member_asks_nothing(seen_of: Make, number: int, asks: list[tuple[float, float, float]]) -> None:
    gone = {"node": "n", "deletionTimestamp": "2026-10-01T00:00:00Z"}
    placed = {
        "scheduler": SCHEDULER_NAME,
        "labels": {QUEUE_KEY: "a"},
        "annotations": {GROUP_KEY: "g"},
    }
    group = pod_group(requested=4, least=2)
    pods = [read_plain_pod(f"old{i}", **placed, **gone) for i in range(2)]
    pods += [read_plain_pod(f"new{i}", **placed) for i in range(number)]
    policy = policy_of([{"name": "a", "refs": ["fake:a"]}])
    seen = seen_of(FakeAdapter(), policy, [queue_object("a", 1), group], pods)
    assert [(gang.requested, gang.minimum, gang.waits) for gang in seen.gangs] == asks


def test_pod_groups_are_gangs_with_an_elastic_surplus(seen_of: Make) -> None:
    running = pod_group("run", requested=4, allocated=4, preemptible=False)
    marks = {"labels": {QUEUE_KEY: "a"}, "annotations": {GROUP_KEY: "wait"}, "scheduler": SCHEDULER_NAME}
    pods = [read_plain_pod(f"w{i}", **marks) for i in range(4)]
    objects = [queue_object("a"), running, pod_group("wait", least=3), pod_group("foreign", "stranger")]
    observation = seen_of(FakeAdapter(), policy_of([{"name": "a", "refs": ["fake:a"]}]), objects, pods)
    assert [(g.name, g.requested, g.allocated, g.minimum, g.preemptible) for g in observation.gangs] == [
        ("run", 4.0, 4.0, 4.0, False),
        ("wait", 8.0, 0.0, 6.0, True),
    ]


@pytest.mark.parametrize(
    "down",
    [
        {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}},
        {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
        {"status": {"conditions": None}},
        {"status": {"allocatable": {GPU: None}}},
        {"spec": {"unschedulable": True}},
        {"spec": {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}},
        {"spec": {"taints": [{"key": "gputally.dev/maintenance", "effect": "NoSchedule"}]}},
    ],
)
def test_capacity_leaves_out_what_is_down(down: dict[str, Any]) -> None:
    def node(change: dict[str, Any]) -> dict[str, Any]:
        status = {"allocatable": {GPU: "8"}, "conditions": [{"type": "Ready", "status": "True"}]}
        return {"spec": change.get("spec", {}), "status": {**status, **change.get("status", {})}}

    pool = {"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}}
    assert gpus_of_nodes([node({}), node(down), node(pool), {}]) == 16


def test_a_reservation_and_those_who_share_it_take_up_one_gpu() -> None:
    """A scheduler reserves a whole GPU by a pod of its own and places the workloads beside it."""
    keeper = plain_pod(gpu="1", node="n1", namespace=RESERVATIONS)
    share = {FRACTION_KEY: "0.5"}
    sharers = [plain_pod(gpu=None, node="n1", annotations=share, scheduler=SCHEDULER_NAME) for _ in range(2)]
    whole = plain_pod(gpu="4", node="n1")
    for pods, free in (
        ([keeper, *sharers, whole], 3),
        ([keeper, sharers[0], whole], 3),
        ([keeper, whole], 3),
        ([*sharers, whole], 3),  # the keeper is on its way out, or not seen
        ([keeper, *sharers, sharers[0], whole], 2.5),
    ):
        read = [found for pod in pods if (found := read_pod(pod)) is not None]
        assert free_by_node(gpus_by_node([node_object("n1")]), read) == {"n1": free}
