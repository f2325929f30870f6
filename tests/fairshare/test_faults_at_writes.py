"""A fault at any write of a cycle, for every target: the next cycles end where they would have ended without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from fairshare.controller.control_loop import by_hand
from fairshare.controller.weight_writer import release_weights
from fairshare.preemption.eviction import OPT_OUT
from fairshare.preemption.preemption_controller import COMMAND_MS
from fairshare.preemption.preemption_types import PreemptionCall
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import FIELD_MANAGER
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterRefused, ClusterUnavailable
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, POD, Object
from gputally.testing.fake_scheduler import QUEUE, placed, pod_group, queue_object, setup_object
from tests.fairshare.builders import fake_pod, node_object, pod_object, policy_of
from tests.fairshare.case_types import RULES, Scene, scene_policy, scene_weights
from tests.fairshare.conftest import Make
from tests.fairshare.failing_writes import FAULTS, FaultAt
from tests.fairshare.observations import pods_of
from tests.fairshare.scheduler_kinds import KINDS
from tests.plugin_cases import plugin_cases

HERE = StatusObject("gputally", "gputally-fairshare")
MOST_WRITES = 16


def _plain() -> Scene:
    waits = fake_pod("w", "b", node="")
    objects = [node_object("n0", 16), waits, *(fake_pod(f"p{i}") for i in range(4))]
    return Scene(scene_policy("fake-pods", "fake_pods", apply="enforce"), objects, lambda cluster: {})


def _fake() -> Scene:
    def pod(name: str, queue: str, node: str) -> Object:
        return placed(pod_object(name, node=node), queue, f"g-{name}")

    queues = [queue_object("a", requested="16", allocated="16", quota=4)]
    queues.append(queue_object("b", requested="4", allocated="0", quota=4))
    names = [f"p{i}" for i in range(4)]
    groups = [pod_group(f"g-{name}", requested=4, allocated=4) for name in names]
    groups.append(pod_group("g-w", "b", requested=4, allocated=0))
    pods = [*(pod(name, "a", "n0") for name in names), pod("w", "b", "")]
    objects = [*queues, *groups, *pods, node_object("n0", 16), setup_object()]
    weights = partial(scene_weights, QUEUE, ("spec", "weight"))
    return Scene(scene_policy("fake", "fake", mode="weight", apply="enforce"), objects, weights)


CASES = plugin_cases("fairshare", "object_cases")
SCENES = {"fake": _fake, "fake-pods": _plain, **{name: cases.scene for name, cases in CASES.items()}}


def _stopped(cluster: MemoryCluster) -> list[str]:
    """Return the gangs that were told to stop."""
    told = [name for cases in CASES.values() for name in cases.stopped(cluster)]
    pods = {obj["metadata"]["name"] for obj in cluster.list(POD)}
    own = any(obj["spec"].get("schedulerName") not in CASES for obj in cluster.list(POD))
    return told + ([name for name in (f"p{i}" for i in range(4)) if name not in pods] if own else [])


def _end(scene: Scene, cluster: FaultAt, controller_of: Make) -> tuple[Mapping[str, Any], int]:
    """Run a cycle, with its fault, and the next ones; return the weights and the number of gangs that were stopped."""
    controller = controller_of(scene.policy, cluster, status_object=HERE, pods=lambda: pods_of(cluster))
    controller.cycle()
    cluster.at = None
    for _ in range(3):
        controller.later()
    return scene.weights(cluster), len(_stopped(cluster))


@pytest.mark.parametrize("target", SCENES)
def test_a_fault_at_any_write_of_a_cycle_changes_nothing_in_the_end(
    target: str, controller_of: Make, accountant: Any
) -> None:
    """One gang may be stopped in an hour, so that a victim that was not counted, or counted twice, would show."""
    scene = SCENES[target]()
    accountant.nodes = {"n0"}
    accountant.spend(a=0.75, b=0.25)
    wanted = _end(scene, FaultAt(KINDS, scene.objects), controller_of)
    assert wanted[1] == 1
    first = FaultAt(KINDS, scene.objects)
    controller_of(scene.policy, first, status_object=HERE, pods=lambda: pods_of(first)).cycle()
    assert 0 < first.writes <= MOST_WRITES
    for at in range(first.writes):
        for error, carried_out in FAULTS:
            cluster = FaultAt(KINDS, scene.objects)
            cluster.at, cluster.error, cluster.carried_out = at, error, carried_out
            assert _end(scene, cluster, controller_of) == wanted, (at, error, carried_out)


class Killed(BaseException):
    """The controller's process ends."""


@pytest.mark.parametrize("target", SCENES)
def test_after_a_kill_at_any_write_the_next_controller_reads_from_the_objects_what_was_preempted(
    target: str, controller_of: Make, accountant: Any
) -> None:
    """Also if the kill came before the state in the status ConfigMap: no second gang stops for the same claim."""
    scene = SCENES[target]()
    accountant.nodes = {"n0"}
    accountant.spend(a=0.75, b=0.25)

    def controller(cluster: FaultAt) -> Any:
        return controller_of(scene.policy, cluster, status_object=HERE, pods=lambda: pods_of(cluster))

    first = FaultAt(KINDS, scene.objects)
    controller(first).cycle()
    assert (0 < first.writes <= MOST_WRITES, len(_stopped(first))) == (True, 1)
    for at in range(first.writes):
        for carried_out in (True, False):
            cluster = FaultAt(KINDS, scene.objects)
            cluster.at, cluster.error, cluster.carried_out = at, Killed(), carried_out  # type: ignore[assignment]
            with pytest.raises(Killed):
                controller(cluster).cycle()
            cluster.at = None
            again = controller(cluster)
            again.cycle()
            again.later()
            assert (len(_stopped(cluster)), scene.weights(cluster)) == (1, scene.weights(first)), (at, carried_out)


@pytest.mark.parametrize("target", [name for name in SCENES if name != "fake-pods"])
def test_a_fault_at_any_write_of_a_release_leaves_nothing_that_the_next_one_does_not_restore(
    target: str, controller_of: Make, accountant: Any
) -> None:
    scene = SCENES[target]()
    accountant.nodes = {"n0"}
    accountant.spend(a=0.75, b=0.25)
    before = scene.weights(FaultAt(KINDS, scene.objects))
    for at in range(2):
        for error, carried_out in FAULTS:
            cluster = FaultAt(KINDS, scene.objects)
            controller_of(scene.policy, cluster, status_object=HERE, pods=lambda c=cluster: pods_of(c)).cycle()
            assert scene.weights(cluster) != before
            cluster.at, cluster.error, cluster.carried_out = cluster.writes + at, error, carried_out
            release_weights(scene.policy, cluster)
            cluster.at = None
            assert not any(outcome.result == "contested" for outcome in release_weights(scene.policy, cluster))
            assert scene.weights(cluster) == before, (at, error, carried_out)


def _counted(cluster: MemoryCluster) -> set[str]:
    """Return the names of the gangs that a restart counts for the limits."""
    data = cluster.get(CONFIG_MAP, HERE.name, HERE.namespace)["data"]
    return {key.rpartition("/")[2].removeprefix("g-") for _, key, *_ in json.loads(data.get("preempted", "[]"))}


def _gone(cluster: MemoryCluster) -> set[str]:
    return {f"p{i}" for i in range(8)} - {obj["metadata"]["name"] for obj in cluster.list(POD)}


def test_after_a_kill_the_victims_of_every_target_of_the_cycle_count(controller_of: Make, accountant: Any) -> None:
    plain, fake = _plain(), _fake()
    names = {f"p{i}": f"p{i + 4}" for i in range(4)} | {f"g-p{i}": f"g-p{i + 4}" for i in range(4)} | {"w": "v"}
    text = json.dumps(fake.objects).replace('"n0"', '"n1"').replace('"g-w"', '"g-v"')
    for old, new in names.items():
        text = text.replace(f'"{old}"', f'"{new}"').replace(f'"uid-{old}"', f'"uid-{new}"')
    queues = [{"name": name, "deserved": 4, "refs": [f"fake-pods:{name}", f"fake:{name}"]} for name in "ab"]
    targets = {"fake_pods": {"apply": "enforce"}, "fake": {"mode": "weight", "apply": "enforce"}}
    policy = policy_of(queues, targets=targets, preemption={**RULES, "per_cluster": 2, "per_team": 2})
    objects = [*plain.objects, *json.loads(text)]
    for obj in objects:  # a pod waits for GPUs of its scheduler's node
        if obj["kind"] == "Node":
            obj["metadata"]["labels"] = {"of": obj["metadata"]["name"]}
        elif obj["metadata"]["name"] in ("w", "v"):
            obj["spec"]["nodeSelector"] = {"of": "n0" if obj["metadata"]["name"] == "w" else "n1"}
    accountant.nodes = {"n0", "n1"}
    accountant.spend(a=0.75, b=0.25)

    def controller(cluster: FaultAt) -> Any:
        return controller_of(policy, cluster, status_object=HERE, pods=lambda: pods_of(cluster))

    first = FaultAt(KINDS, objects)
    controller(first).cycle()
    assert (len(_gone(first)), _counted(first)) == (2, _gone(first))
    for at in range(first.writes):
        cluster = FaultAt(KINDS, objects)
        cluster.at, cluster.error = at, Killed()  # type: ignore[assignment]
        with pytest.raises(Killed):
            controller(cluster).cycle()
        cluster.at = None
        again = controller(cluster)
        again.cycle()
        again.later()
        assert (len(_gone(cluster)), _counted(cluster)) == (2, _gone(cluster)), at


class _Refusing(FaultAt):
    """A cluster that refuses an eviction that its dry run allowed, and refuses the controller's state if told so."""

    keeps, forgets = False, False

    def evict(self, *args: Any, dry_run: bool = False, **named: Any) -> None:
        if self.keeps and not dry_run:
            raise ClusterRefused("403")
        super().evict(*args, dry_run=dry_run, **named)

    def apply(self, obj: Object, *, field_manager: str, **named: Any) -> Object:
        if self.forgets and field_manager == FIELD_MANAGER and obj["kind"] == "ConfigMap":
            raise ClusterUnavailable("503")
        return super().apply(obj, field_manager=field_manager, **named)


def _by_two(cluster: MemoryCluster, controller_of: Make) -> Any:
    policy = policy_of(
        [{"name": name, "deserved": 8, "refs": [f"fake-pods:{name}"]} for name in "ab"],
        targets={"fake_pods": {"apply": "enforce"}},
        preemption={**RULES, "per_cluster": 2, "per_team": 2, "lost_gpu_hours": 10_000},
    )
    return controller_of(policy, cluster, status_object=HERE, pods=lambda: pods_of(cluster))


def test_victims_of_a_cycle_whose_state_was_not_written_count_after_a_kill_of_the_next(
    controller_of: Make, accountant: Any
) -> None:
    cluster = _Refusing(KINDS, _plain().objects)
    accountant.nodes = {"n0"}
    accountant.spend(a=0.75, b=0.25)
    controller = _by_two(cluster, controller_of)
    cluster.forgets = True
    controller.cycle()
    before = _gone(cluster)
    ours = cluster.get(POD, "w", "ns")
    cluster.put({**ours, "spec": {**ours["spec"], "nodeName": "n0"}}, field_manager="tests")
    cluster.load([fake_pod("w2", "b", node="")])
    controller.later()
    assert (len(before), len(_gone(cluster) - {f"p{i}" for i in range(4, 8)})) == (5, 2)
    cluster.forgets = False
    _by_two(cluster, controller_of).cycle()
    assert len(_counted(cluster)) == 2


def test_a_victim_that_was_not_stopped_and_ended_later_does_not_count(controller_of: Make, accountant: Any) -> None:
    """Also if the controller is restarted after its pod ended."""
    cluster = _Refusing(KINDS, _plain().objects)
    accountant.nodes = {"n0"}
    accountant.spend(a=0.75, b=0.25)
    controller = _by_two(cluster, controller_of)
    cluster.keeps = True
    (target,) = controller.cycle().targets
    (stop,) = target.preemption.stops
    assert stop.effect.result == "refused"
    cluster.delete(POD, stop.victim.gang.name, "ns")
    for _ in range(2):
        _by_two(cluster, controller_of).cycle()
        assert _counted(cluster) == set()


def test_the_note_of_a_victim_is_small_however_many_pods_it_has(controller_of: Make, accountant: Any) -> None:
    many = [fake_pod(f"m{i}", gpus=1, labels={"gputally.dev/gang": "many"}, uid=f"{i:036}") for i in range(200)]
    keep = fake_pod("keep", gpus=8, annotations={OPT_OUT: "never"})
    cluster = FaultAt(KINDS, [node_object("n0", 208), keep, fake_pod("w", "b", node="", gpus=8), *many])
    accountant.nodes = {"n0"}
    accountant.spend(a=0.75, b=0.25)
    _by_two(cluster, controller_of).cycle()
    assert len(cluster.list(POD)) == 2
    note = cluster.get(CONFIG_MAP, HERE.name, HERE.namespace)["data"]["preempting"]
    assert 0 < len(note) < 500


@pytest.mark.parametrize("target", SCENES)
def test_a_preemption_by_hand_that_was_killed_at_any_write_counts_once(
    target: str, controller_of: Make, accountant: Any, clock: VirtualClock
) -> None:
    """For the controller, for the next controller and for the next command, and only if the victim was stopped."""
    scene = SCENES[target]()
    accountant.nodes = {"n0"}
    accountant.spend(a=0.75, b=0.25)

    def preempt(cluster: FaultAt, mode: Any = "enforce") -> Any:
        gang = next((name for obj in scene.objects if (name := obj["metadata"]["name"]) == "g-w"), "w")
        call = PreemptionCall("", f"ns/{gang}", "asked for by hand", 0.0, "by hand")
        return by_hand(scene.policy, accountant, cluster, clock, pods_of(cluster), call, mode, HERE)

    def keys_of(report: Any) -> list[str]:
        return [past.key for past in report.situation.past]

    first = FaultAt(KINDS, scene.objects)
    preempt(first)
    assert len(_stopped(first)) == 1
    dry = scene.policy.model_copy(update={"preemption": scene.policy.preemption.model_copy(update={"mode": "dry-run"})})
    for at in range(first.writes):
        for carried_out in (True, False):
            cluster = FaultAt(KINDS, scene.objects)
            cluster.at, cluster.error, cluster.carried_out = at, Killed(), carried_out  # type: ignore[assignment]
            with pytest.raises(Killed):
                preempt(cluster)
            cluster.at = None
            (of_target,) = (
                controller_of(dry, cluster, status_object=HERE, pods=lambda c=cluster: pods_of(c)).cycle().targets
            )
            assert len(keys_of(of_target.preemption)) >= len(_stopped(cluster))  # the command may still run
            clock.advance(COMMAND_MS)
            for _ in range(2):  # what was begun is carried out meanwhile
                controller = controller_of(dry, cluster, status_object=HERE, pods=lambda c=cluster: pods_of(c))
                for report in (controller.cycle(), controller.later()):
                    (of_target,) = report.targets
                    counted = keys_of(of_target.preemption)
                    assert len(counted) == len(_stopped(cluster)), (at, carried_out)
                assert keys_of(preempt(cluster, "dry-run")) == counted, (at, carried_out)
