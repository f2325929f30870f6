"""Weight writes: owned fields, limits, a lost lease, the release, and weights of queues that left the policy."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairshare.__main__ import main
from fairshare.controller.cycle_report import CycleReport
from fairshare.controller.weight_writer import available, release_weights, write_weights
from fairshare.core import scheduler_queue_objects
from fairshare.targets import status_config_map
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import FIELD_MANAGER, Apply
from gputally.base.clock import VirtualClock
from gputally.kubernetes.leader_election import Term
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, Cluster, Kind, Object
from gputally.testing.fake_scheduler import QUEUE, pod_group, queue_object, setup_object
from tests.fairshare.builders import cluster_of, object_of, policy_of
from tests.fairshare.conftest import Accountant, Capsys, Make
from tests.fairshare.observations import condition, conditions_of, reasons_of, results_of, weights_in
from tests.fairshare.scheduler_kinds import KINDS
from tests.plugin_cases import plugin_cases


def _apply(name: str, previous: float | None, value: float) -> Apply:
    spec = {"weight": value}
    return Apply("fake", name, name, previous, value, "why", object_of(QUEUE, name, spec))


INSTALLED = object_of(CONFIG_MAP, "settings", namespace="gputally")
"""An object of the release's namespace, which a real cluster has to have."""
WHERE = StatusObject("gputally", "gputally-fairshare")


def test_of_too_many_writes_the_largest_changes_go_first(either_of: Make) -> None:
    applies = [_apply("a", 1, 1.1), _apply("b", 1, 3), _apply("c", None, 1), _apply("d", 1, 0.5)]
    outcomes = write_weights(either_of(), applies, dry_run=False, most=2)
    assert [(o.apply.name, o.result) for o in outcomes] == [
        ("a", "deferred"), ("b", "applied"), ("c", "applied"), ("d", "deferred"),
    ]  # fmt: skip
    assert available(outcomes).status == "True"


def test_a_lost_lease_ends_the_writing(either_of: Make) -> None:
    terms = iter([True, False, False])
    cluster = either_of()
    outcomes = write_weights(cluster, [_apply(n, 1, 2) for n in "abc"], dry_run=False, leading=lambda: next(terms))
    assert [o.result for o in outcomes] == ["applied", "deferred", "deferred"]
    assert [obj["metadata"]["name"] for obj in cluster.list(QUEUE)] == ["a"]


@pytest.mark.parametrize("after", [None, Term("x", 2)])
def test_who_loses_the_lease_leaves_the_new_leaders_notes_alone(
    accountant: Any, controller_of: Make, after: Term | None
) -> None:
    """It reports the one weight that it has written, and no more."""
    cluster = cluster_of([queue_object(name) for name in "abc"])
    noted = object_of(CONFIG_MAP, WHERE.name, namespace=WHERE.namespace)
    accountant.spend(a=0.8, b=0.1, c=0.1)

    def term() -> Term | None:
        if weights_in(cluster)["a"] == 1:
            return Term("x", 1)
        cluster.apply({**noted, "data": {"preempted": "[]"}}, field_manager="gputally-fairshare")
        return after

    report = controller_of(policy_of(), cluster, status_object=WHERE, term=term).cycle()
    assert [outcome.result for outcome in report.targets[0].outcomes] == ["applied", "deferred", "deferred"]
    assert cluster.get(CONFIG_MAP, WHERE.name, WHERE.namespace)["data"] == {"preempted": "[]"}
    assert [d.subject for d in accountant.decisions if d.inputs.get("result") == "applied"] == ["a"]


def test_a_leader_of_an_earlier_term_goes_on_where_the_leader_in_between_ended(
    accountant: Any, controller_of: Make
) -> None:
    cluster = cluster_of([*(queue_object(name) for name in "abc"), INSTALLED])
    accountant.spend(a=0.7, b=0.2, c=0.1)
    leads = {"first": 1, "second": 0}

    def replica(name: str) -> Any:
        def term() -> Term | None:
            return Term(name, leads[name]) if leads[name] else None

        return controller_of(policy_of(), cluster, status_object=WHERE, term=term)

    first, second = replica("first"), replica("second")
    first.cycle()
    leads |= {"first": 0, "second": 1}
    second.later()
    second.later()
    left = status_config_map.memories(cluster.get(CONFIG_MAP, WHERE.name, WHERE.namespace))["fake"]
    leads |= {"first": 2, "second": 0}
    assert first.later().targets[0].memory == left


def test_when_the_scheduler_reads_usage_our_weights_are_given_back(
    either_of: Make, accountant: Any, controller_of: Make
) -> None:
    cluster = either_of([*(queue_object(name) for name in "abc"), setup_object(counts_usage=True)])
    accountant.spend(a=0.7, b=0.2, c=0.1)
    (twice,) = controller_of(policy_of(), cluster).cycle().targets
    assert reasons_of(twice)["Effective"][1] == "HistoryCountedTwice"
    assert scheduler_queue_objects.BASE in cluster.get(QUEUE, "a")["metadata"]["annotations"]
    usage = policy_of(targets={"fake": {"usage": True, "apply": "enforce"}})
    (target,) = controller_of(usage, cluster).cycle().targets
    assert reasons_of(target)["Effective"][1] == "UsageOnly"
    assert [o.apply.value for o in target.outcomes] == [1.0, 1.0, 1.0]
    assert scheduler_queue_objects.BASE not in (cluster.get(QUEUE, "a")["metadata"].get("annotations") or {})
    assert target.entitlements
    assert controller_of(usage, cluster).cycle().targets[0].outcomes == ()


def test_a_law_goes_on_with_the_last_leaders_momentum(either_of: Make, accountant: Any, controller_of: Make) -> None:
    cluster = either_of([*(queue_object(name) for name in "abc"), INSTALLED])
    accountant.spend(a=0.7, b=0.2, c=0.1)
    first, second = (controller_of(policy_of(), cluster, status_object=WHERE) for _ in range(2))
    first.cycle()
    assert second.later().targets[0].memory == first.cycle().targets[0].memory


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_policy_takes_the_momentum_along(
    restarted: bool, accountant: Any, clock: VirtualClock, controller_of: Make
) -> None:
    cluster = cluster_of([*(queue_object(name) for name in "abc"), INSTALLED])
    accountant.spend(a=0.7, b=0.2, c=0.1)
    before, after = policy_of(), policy_of(min_coverage=0.9)
    stop, told = threading.Event(), []

    def observe(report: CycleReport) -> None:
        told.append(report)
        if len(told) == 2:
            stop.set()

    if restarted:
        observe(controller_of(before, cluster, status_object=WHERE).cycle())
        clock.advance(60_000)
        observe(controller_of(after, cluster, status_object=WHERE).cycle())
    else:
        policies = iter([None, after])
        controller_of(before, cluster, status_object=WHERE, observe=observe).run(stop, reload=lambda: next(policies))
    first, second = told
    assert second.policy_version == after.version()
    assert not first.targets[0].memory
    assert sorted(second.targets[0].memory) == ["a", "b", "c"]
    assert all(kept["at_ms"] == first.at_ms for kept in second.targets[0].memory.values())


def test_a_turn_goes_on_over_a_restart(
    either_of: Make, accountant: Any, clock: VirtualClock, controller_of: Make
) -> None:
    """A gang of 16 holds all 16 GPUs, and another waits in every queue: a new process takes over in the middle of a
    turn."""

    def gang(queue: str, name: str, held: int) -> dict[str, Any]:
        return pod_group(name, queue, requested=16, allocated=held, namespace=queue)

    queues = [queue_object("a", requested="32", allocated="16"), queue_object("b", requested="16", allocated="0")]
    groups = [gang("a", "running", 16), gang("a", "next", 0), gang("b", "first", 0)]
    cluster = either_of([*queues, *groups, INSTALLED])
    accountant.spend(a=1.0)
    policy = policy_of([{"name": n, "refs": [f"fake:{n}"]} for n in "ab"], turns={"min_turn": "1h"})

    def cycle() -> dict[str, Any]:
        (target,) = controller_of(policy, cluster, status_object=WHERE).cycle().targets
        return {weight.queue: weight for weight in target.weights}

    cycle()
    clock.advance(30 * 60_000)
    begun = cycle()  # b has been owed 8 GPUs for half an hour
    assert "its turn for 60 more min" in begun["b"].why
    clock.advance(30 * 60_000)
    accountant.spend(a=0.1, b=0.9)  # no law would give b a turn now
    went_on = cycle()
    assert "its turn for 30 more min" in went_on["b"].why
    assert {name: w.value for name, w in went_on.items()} == {name: w.value for name, w in begun.items()}
    clock.advance(30 * 60_000)
    assert "its turn for 60 more min" in cycle()["b"].why, "its gang still waits: it is owed the next turn too"


def test_a_write_is_ours_alone_and_notes_the_base(three: MemoryCluster, accountant: Any, controller_of: Make) -> None:
    accountant.spend(a=1.0)
    controller_of(policy_of(), three).cycle()
    obj = three.get(QUEUE, "a")
    (entry,) = obj["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"]) == (FIELD_MANAGER, "Apply")
    noted = scheduler_queue_objects.read(obj["metadata"]["annotations"])
    assert (noted.base, noted.published, noted.direction) == (1.0, 0.1, -1)
    assert three.get(QUEUE, "stranger")["metadata"].get("annotations") is None


def test_a_contested_field_keeps_no_queue_back(three: MemoryCluster, accountant: Any, controller_of: Make) -> None:
    taken = {**three.get(QUEUE, "b"), "spec": {"weight": 3, "quota": 0, "limit": -1}}
    three.put(taken, field_manager="argocd")
    accountant.spend(a=1.0)
    report = controller_of(policy_of(), three).cycle()
    assert results_of(report) == {"a": "applied", "b": "contested", "c": "applied"}
    assert weights_in(three)["b"] == 3
    assert conditions_of(report)["fake.Available"] == ("False", "Contested")
    (target,) = report.targets
    assert "argocd" in target.degraded["Contested"]
    (recorded,) = [d for d in accountant.decisions if d.subject == "b"]
    assert recorded.inputs["result"] == "contested"


def test_a_reset_is_published_over(three: MemoryCluster, accountant: Any, controller_of: Make) -> None:
    """The base weight stays."""
    accountant.spend(a=1.0)
    controller = controller_of(policy_of(), three)
    controller.cycle()
    assert weights_in(three)["a"] == 0.1
    _set_unowned(three, "a", 1)
    report = controller.later()
    assert weights_in(three)["a"] == 0.1
    assert "WeightReset" in [event.reason for event in report.events]
    noted = scheduler_queue_objects.read(three.get(QUEUE, "a")["metadata"]["annotations"])
    assert noted.base == 1.0


def test_an_operators_change_is_the_base(three: MemoryCluster, accountant: Any, controller_of: Make) -> None:
    accountant.spend(a=1.0)
    controller = controller_of(policy_of(), three)
    controller.cycle()
    _set_unowned(three, "a", 7)
    report = controller.later()
    assert "BaseWeightChanged" in [event.reason for event in report.events]
    release_weights(policy_of(), three)
    assert weights_in(three) == {"a": 7, "b": 1, "c": 1, "stranger": 5}


def _set_unowned(cluster: MemoryCluster, name: str, weight: float) -> None:
    """Let another client overwrite the weight without keeping ownership; its entry is then dropped."""
    obj = cluster.get(QUEUE, name)
    obj["spec"]["weight"] = weight
    for entry in obj["metadata"]["managedFields"]:
        entry["fieldsV1"].pop("f:spec", None)
    cluster.delete(QUEUE, name)
    cluster.load([obj])


def test_release_restores_all_that_was_there(accountant: Any, controller_of: Make, clock: VirtualClock) -> None:
    cluster = cluster_of([queue_object("a", 1), queue_object("b", None), queue_object("c", 2)])
    accountant.spend(a=0.5, b=0.4, c=0.1)
    controller = controller_of(policy_of(), cluster)
    for _ in range(3):
        controller.cycle()
        clock.advance(60_000)
    assert weights_in(cluster) != {"a": 1, "b": None, "c": 2}
    tried = release_weights(policy_of(), cluster, dry_run=True)
    assert {o.apply.name: o.apply.value for o in tried} == {"a": 1.0, "b": None, "c": 2.0}
    assert {o.result for o in tried} == {"would-apply"}
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


SAYS = (
    "a has the controller's weight 0.1 (its base: 1), and no queue of the policy refers to it: restore the base with"
    " `gputally fairshare release --left-behind` (name the other policies of this cluster with `--other FILE`)"
)


def carries_annotations(obj: Object) -> bool:
    return scheduler_queue_objects.PUBLISHED in (obj["metadata"].get("annotations") or {})


def test_a_queue_let_go_is_said_and_given_back(either_of: Make, accountant: Accountant, controller_of: Make) -> None:
    cluster: Cluster = either_of([queue_object(name) for name in "abc"])
    accountant.spend(a=0.8, b=0.1, c=0.1)
    policies = [policy_of()]
    controller = controller_of(policies[0], cluster, status_object=StatusObject())
    controller.cycle()
    policies.append(policy_of([{"name": name, "refs": (f"fake:{name}",)} for name in "bc"]))
    controller._reload_policy(lambda: policies[-1])
    report = controller.later()
    mapped = condition(report.targets[0], "Mapped")
    assert (mapped.status, mapped.reason, mapped.message) == ("False", "WeightsLeftBehind", SAYS)
    assert [event.message for event in report.events if event.reason == "WeightsLeftBehind"] == [f"fake: {SAYS}"]

    before = weights_in(cluster)
    assert [o.result for o in release_weights(policies[-1], cluster, left_behind=True)] == ["applied"]
    assert weights_in(cluster) == {**before, "a": 1}
    assert not carries_annotations(cluster.get(QUEUE, "a"))
    assert release_weights(policies[-1], cluster, left_behind=True) == ()
    assert condition(controller.later().targets[0], "Mapped").status == "True"


@pytest.mark.parametrize(
    ("ref", "kind", "spec", "published"),
    [
        ("fake", QUEUE, {"weight": 0.5}, 0.5),
        *((name, *cases.LEFT_BEHIND) for name, cases in plugin_cases("fairshare", "object_cases").items()),
    ],
)
def test_every_target_knows_what_it_left_behind(
    ref: str, kind: Any, spec: dict[str, Any], published: float, controller_of: Make
) -> None:
    noted = scheduler_queue_objects.WeightAnnotations(1.0, published, None, 0, "f" * 16).annotations()
    others = [object_of(kind, name, spec) for name in ("b", "stranger")]
    cluster = MemoryCluster(KINDS, [object_of(kind, "a", spec, annotations=noted), *others])
    policy = policy_of([{"name": "b", "refs": (f"{ref}:b",)}])
    (target,) = controller_of(policy, cluster).cycle().targets
    assert condition(target, "Mapped").reason == "WeightsLeftBehind"
    (outcome,) = release_weights(policy, cluster, left_behind=True)
    assert (outcome.apply.name, outcome.apply.value, outcome.result) == ("a", 1.0, "applied")


def test_weights_of_another_named_policy_stay(either_of: Make, accountant: Accountant, controller_of: Make) -> None:
    """Two policies publish to one cluster; the first releases a queue."""
    cluster: Cluster = either_of([queue_object(name) for name in "abxy"])
    accountant.spend(a=0.8, x=0.2)
    first, second = (policy_of([{"name": n, "refs": (f"fake:{n}",)} for n in names]) for names in ("ab", "xy"))
    for policy in (first, second):
        controller_of(policy, cluster).cycle()
    smaller = policy_of([{"name": "b", "refs": ("fake:b",)}])

    def carrying() -> list[str]:
        return sorted(o["metadata"]["name"] for o in cluster.list(QUEUE) if carries_annotations(o))

    assert carrying() == ["a", "b", "x", "y"]
    release_weights(smaller, cluster, left_behind=True, others=[second])
    assert carrying() == ["b", "x", "y"]
    release_weights(smaller, cluster, others=[second])
    assert carrying() == ["x", "y"]


def test_the_command_gives_back_what_was_left_alone(tmp_path: Path, capsys: Capsys) -> None:
    noted = scheduler_queue_objects.WeightAnnotations(1.0, 0.5, None, 0, "f" * 16).annotations()
    objects = [queue_object("a", 0.5, annotations=noted), queue_object("b", 0.5, annotations=noted)]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(objects))
    (tmp_path / "policy.yaml").write_text("queues: [{name: b, refs: [fake:b]}]")
    call = ["release", "--policy", str(tmp_path / "policy.yaml"), "--objects", str(tmp_path / "cluster.yaml")]
    assert main([*call, "--left-behind", "--dry-run", "--output", "csv"]) == 0
    assert [line.split(",")[:3] for line in capsys.readouterr().out.splitlines()[1:]] == [["fake", "a", "a"]]
