"""Weight writes: limits, a lost lease, and no history counted twice when the mode changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport
from fairshare.controller.weight_writer import available, write_weights
from fairshare.core import scheduler_queue_objects
from fairshare.targets.kai import QUEUE, shard_advice, usage_read
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import Apply
from gputally.base.clock import VirtualClock
from gputally.kubernetes.objects import CONFIG_MAP
from tests.fairshare.builders import cluster_of, object_of, pod_group, policy_of, queue_object, shard_object

Make = Callable[..., Any]


def _apply(name: str, previous: float | None, value: float) -> Apply:
    spec = {"resources": {"gpu": {"overQuotaWeight": value}}}
    return Apply("kai", name, name, previous, value, "why", object_of(QUEUE, name, spec))


INSTALLED = object_of(CONFIG_MAP, "settings", namespace="gputally")
"""Of the release, whose namespace a real cluster has to have."""


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


def test_who_loses_the_lease_in_a_cycle_leaves_the_new_leaders_notes_alone(
    accountant: Any, clock: VirtualClock
) -> None:
    """He tells of the one weight that he has written, and no more."""
    cluster, where = cluster_of([queue_object(name) for name in "abc"]), StatusObject()
    noted = object_of(CONFIG_MAP, where.name, namespace=where.namespace)
    accountant.spend(a=0.8, b=0.1, c=0.1)

    def leading() -> bool:
        if cluster.get(QUEUE, "a")["spec"]["resources"]["gpu"]["overQuotaWeight"] == 1:
            return True
        cluster.apply({**noted, "data": {"preempted": "[]"}}, field_manager="gputally-fairshare")
        return False

    report = Controller(policy_of(), accountant, cluster, clock, status_object=where, leading=leading).cycle()
    assert [outcome.result for outcome in report.targets[0].outcomes] == ["applied", "deferred", "deferred"]
    assert cluster.get(CONFIG_MAP, where.name, where.namespace)["data"] == {"preempted": "[]"}
    assert [d.subject for d in accountant.decisions if d.inputs.get("result") == "applied"] == ["a"]


def test_when_kai_reads_usage_our_weights_are_given_back(either_of: Make, accountant: Any, clock: VirtualClock) -> None:
    shard = shard_object(kValue=1, usageDBConfig={"clientType": "prometheus", "connectionString": "http://a:9091"})
    cluster = either_of([*(queue_object(name) for name in "abc"), shard])
    accountant.spend(a=0.7, b=0.2, c=0.1)
    controller = Controller(policy_of(), accountant, cluster, clock)
    twice = controller.cycle()
    assert {c.type: c.reason for c in twice.targets[0].conditions}["Effective"] == "HistoryCountedTwice"
    assert scheduler_queue_objects.BASE in cluster.get(QUEUE, "a")["metadata"]["annotations"]
    usage = policy_of(targets={"kai": {"mode": "usage", "apply": "enforce", "endpoint": "http://a:9091"}})
    report = Controller(usage, accountant, cluster, clock).cycle()
    assert {c.type: c.reason for c in report.targets[0].conditions}["Effective"] == "UsageOnly"
    assert [o.apply.value for o in report.targets[0].outcomes] == [1.0, 1.0, 1.0]
    assert scheduler_queue_objects.BASE not in (cluster.get(QUEUE, "a")["metadata"].get("annotations") or {})
    assert report.targets[0].entitlements
    assert Controller(usage, accountant, cluster, clock).cycle().targets[0].outcomes == ()


def test_a_shard_that_reads_no_usage_is_named_and_told_what_to_do() -> None:
    tumbling = {"clientType": "prometheus", "usageParams": {"windowType": "tumbling"}}
    for spec, says in (
        ({"kValue": 0, "usageDBConfig": {"clientType": "prometheus"}}, "history counts for nothing"),
        ({}, "has no usageDBConfig"),
        ({"usageDBConfig": {"clientType": "fake"}}, "clientType"),
        ({"usageDBConfig": tumbling}, "only sliding works"),
    ):
        condition = usage_read([shard_object(**spec)])
        assert (condition.status, condition.reason) == ("False", "UsageNotRead")
        assert says in condition.message
    assert usage_read([]).status == "Unknown"
    good = {"kValue": 1, "usageDBConfig": {"clientType": "prometheus", "connectionString": "http://a:9091/"}}
    assert usage_read([shard_object(**good)], "http://a:9091").status == "True"
    elsewhere = usage_read([shard_object(**good)], "http://accountant:9091")
    assert (elsewhere.status, elsewhere.reason) == ("False", "UsageNotRead")
    assert "reads usage from http://a:9091, not from http://accountant:9091" in elsewhere.message
    usage = policy_of(targets={"kai": {"mode": "usage"}}, k=2.0, window={"size": "7d", "half_life": "1d"})
    advised = shard_advice(usage, "http://accountant:8080")
    assert usage_read([shard_object(**advised)], "http://accountant:8080").status == "True"
    assert advised["usageDBConfig"]["usageParams"]["halfLifePeriod"] == "86400s"
    assert shard_advice(policy_of(), "") == {"kValue": 0}


def test_a_law_goes_on_with_the_momentum_of_the_last_leader(
    either_of: Make, accountant: Any, clock: VirtualClock
) -> None:
    where = StatusObject(INSTALLED["metadata"]["namespace"], "gputally-fairshare")
    cluster = either_of([*(queue_object(name) for name in "abc"), INSTALLED])
    accountant.spend(a=0.7, b=0.2, c=0.1)
    policy = policy_of(law="deficit")

    def controller() -> Controller:
        return Controller(policy, accountant, cluster, clock, status_object=where)

    whole = controller()
    whole.cycle()
    clock.advance(60_000)
    restarted = controller().cycle()
    went_on = whole.cycle()
    assert restarted.targets[0].memory == went_on.targets[0].memory


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_policy_takes_the_momentum_along_with_or_without_a_restart(
    restarted: bool, accountant: Any, clock: VirtualClock
) -> None:
    where = StatusObject(INSTALLED["metadata"]["namespace"], "gputally-fairshare")
    cluster = cluster_of([*(queue_object(name) for name in "abc"), INSTALLED])
    accountant.spend(a=0.7, b=0.2, c=0.1)
    before, after = policy_of(law="deficit"), policy_of(law="deficit", min_coverage=0.9)
    stop, told = threading.Event(), []

    def observe(report: CycleReport) -> None:
        told.append(report)
        if len(told) == 2:
            stop.set()

    if restarted:
        observe(Controller(before, accountant, cluster, clock, status_object=where).cycle())
        clock.advance(60_000)
        observe(Controller(after, accountant, cluster, clock, status_object=where).cycle())
    else:
        policies = iter([None, after])
        Controller(
            before, accountant, cluster, clock, status_object=where, observe=observe, reload=lambda: next(policies)
        ).run(stop)
    first, second = told
    assert second.policy_version == after.version()
    assert not first.targets[0].memory
    assert sorted(second.targets[0].memory) == ["a", "b", "c"]
    assert all(kept["at_ms"] == first.at_ms for kept in second.targets[0].memory.values())


def test_a_turn_goes_on_over_a_restart(either_of: Make, accountant: Any, clock: VirtualClock) -> None:
    """16 GPUs held by one gang of 16, another waits in every queue: a turn, cut in the middle by a new process."""

    def gang(queue: str, name: str, held: int) -> dict[str, Any]:
        return pod_group(name, queue, requested=16, allocated=held, namespace=queue)

    queues = [queue_object("a", requested="32", allocated="16"), queue_object("b", requested="16", allocated="0")]
    groups = [gang("a", "running", 16), gang("a", "next", 0), gang("b", "first", 0)]
    cluster = either_of([*queues, *groups, INSTALLED])
    accountant.spend(a=1.0)
    policy = policy_of([{"name": n, "refs": [f"kai:{n}"]} for n in "ab"], law="deficit", turns={"min_turn": "1h"})

    def cycle() -> dict[str, Any]:
        where = StatusObject(INSTALLED["metadata"]["namespace"], "gputally-fairshare")
        (target,) = Controller(policy, accountant, cluster, clock, status_object=where).cycle().targets
        return {weight.queue: weight for weight in target.weights}

    begun = cycle()
    assert "its turn for 60 more min" in begun["b"].why
    clock.advance(30 * 60_000)
    accountant.spend(a=0.1, b=0.9)  # no law would give b a turn now
    went_on = cycle()
    assert "its turn for 30 more min" in went_on["b"].why
    assert {name: w.value for name, w in went_on.items()} == {name: w.value for name, w in begun.items()}
    clock.advance(30 * 60_000)
    assert "its turn" not in cycle()["b"].why
