"""Preemption in whole cycles: victims, decisions, remembered state and obstacles."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from fairshare.controller.control_loop import Controller
from fairshare.controller.controller_metrics import Metrics
from fairshare.core.gpu_demand import CHECKPOINT, read_pod
from fairshare.preemption.preemption_controller import VETO_VALID_MS
from fairshare.preemption.preemption_cycle import replay_verdicts
from fairshare.targets.status_config_map import StatusObject
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import BUDGET, CONFIG_MAP, POD
from tests.fairshare.builders import policy_of
from tests.fairshare.conftest import Accountant
from tests.fairshare.victims import Answering, budget_object, cluster_with, node_object, pod_object
from tests.shelf import shared

Make = Callable[..., Any]


@pytest.fixture
def controller(accountant: Accountant, clock: VirtualClock) -> Make:
    """A controller of pods by label: a holds 8 of n0's GPUs with a quota of 4, b with a quota of 4 waits."""

    def make(cluster: MemoryCluster, **rules: Any) -> Controller:
        queues = [
            {"name": "a", "deserved": 4, "refs": ["policy:a"]},
            {"name": "b", "deserved": 4, "refs": ["policy:b"]},
        ]
        wanted = policy_of(queues, preemption={"mode": "enforce", "min_runtime": 0, **rules})
        return Controller(
            wanted, accountant, cluster, clock, status_object=StatusObject(),
            pods=lambda: tuple(pod for obj in cluster.list(POD) if (pod := read_pod(obj)) is not None),
        )  # fmt: skip

    return make


def _borrowing(*more: dict[str, Any]) -> Answering:
    waits = pod_object("b0", "b", node="")
    return cluster_with(node_object("n0", 8), pod_object("a0"), pod_object("a1"), waits, *more)


def test_a_cycle_reclaims_records_and_remembers(controller: Make, accountant: Accountant, clock: VirtualClock) -> None:
    cluster = _borrowing()
    loop = controller(cluster)
    report = loop.cycle()
    assert sorted(pod["metadata"]["name"] for pod in cluster.list(POD)) == ["a1", "b0"]
    (target,) = report.targets
    assert [stop.effect.result for stop in target.preemption.stops] == ["stopped"]
    assert {event.reason for event in cluster.events if event.kind == POD} == {"Preempted"}
    made = {each.subject: each for each in accountant.decisions if each.kind == "preemption"}
    assert set(made) == {"*", "Pod/ns/b0", "Pod/ns/a0"}
    assert made["Pod/ns/a0"].inputs["result"] == "stopped"
    assert replay_verdicts(loop.policy, made["*"]) == target.preemption.verdicts
    clock.advance(60_000)
    assert loop.cycle().targets[0].preemption.verdicts[0].outcome == "room"
    again = controller(cluster)
    again.cycle()
    assert len(json.loads(cluster.get(CONFIG_MAP, "gputally-fairshare", "gputally")["data"]["preempted"])) == 1


def test_a_dry_run_records_the_same_decision_once_and_stops_no_pod(controller: Make, accountant: Accountant) -> None:
    cluster = _borrowing()
    loop = controller(cluster, mode="dry-run")
    loop.cycle()
    loop.cycle()
    assert len(cluster.list(POD)) == 3
    made = [each for each in accountant.decisions if each.kind == "preemption"]
    assert [(each.subject, each.mode) for each in made] == [
        ("*", "dry-run"), ("Pod/ns/b0", "dry-run"), ("Pod/ns/a0", "dry-run"),
    ]  # fmt: skip
    assert {event.reason for event in cluster.events if event.kind == POD} == {"WouldBePreempted"}


def test_off_decides_nothing(controller: Make) -> None:
    assert controller(_borrowing(), targets={"kube_scheduler": "off"}).cycle().targets[0].preemption is None


def test_stale_usage_causes_no_preemption(controller: Make, accountant: Accountant) -> None:
    accountant.coverage = 0.5
    cluster = _borrowing()
    controller(cluster).cycle()
    assert len(cluster.list(POD)) == 3


def test_a_victim_the_cluster_keeps_is_replaced_by_the_next(controller: Make) -> None:
    cluster = _borrowing(budget_object("b", 0, {"app": "kept"}))
    kept = cluster.get(POD, "a0", "ns")
    cluster.put(
        {**kept, "metadata": {**kept["metadata"], "labels": {**kept["metadata"]["labels"], "app": "kept"}}},
        field_manager="tests",
    )
    (target,) = controller(cluster).cycle().targets
    assert [stop.victim.gang.name for stop in target.preemption.stops] == ["a1"]
    assert "disruption budget b" in next(s.reason for s in target.preemption.verdicts[0].spared if s.key == "Pod/ns/a0")


def _condition(cluster: MemoryCluster) -> tuple[str, str, str]:
    standing = cluster.get(CONFIG_MAP, "gputally-fairshare", "gputally")["data"]["kube-scheduler.Preemption"]
    found = json.loads(standing)
    return found["status"], found["reason"], found["message"]


@pytest.mark.parametrize(
    ("answer", "rules", "reason", "words"),
    [
        ("403", {}, "Refused", "pods/eviction is forbidden"),
        ("webhook", {}, "Refused", 'admission webhook "policy.example" denied the request'),
        ("pdb_zero", {}, "HeldByBudgets", "would violate the pod's disruption budget"),
        (None, {"per_cluster": 0}, "RateLimitReached", "0 workloads of the cluster were stopped within the hour"),
        (None, {"per_team": 0}, "RateLimitReached", "0 workloads of team a were stopped within the hour"),
        (None, {"lost_gpu_hours": 1}, "LostWorkLimitReached", "more than the 1 allowed"),
        ("503", {}, "Unavailable", "503"),
    ],
)
def test_what_stands_in_the_way_is_a_condition_an_event_and_a_metric(
    answer: str | None, rules: dict[str, Any], reason: str, words: str, controller: Make, clock: VirtualClock
) -> None:
    """And all of it ends where the cause does."""
    own = {
        "403": {"status": 403, "body": {"message": 'pods "a0" is forbidden: pods/eviction is forbidden'}},
        "webhook": {"status": 403, "body": {"message": 'admission webhook "policy.example" denied the request'}},
        "503": {"status": 503, "body": {"message": "the server is currently unable to handle the request"}},
    }
    cluster = _borrowing()
    recorded = json.loads(shared("vectors/eviction_responses.json").read_text())
    cluster.answer = None if answer is None else {"retry_after": None, **(own.get(answer) or recorded[answer])}
    metrics = Metrics(clock)
    loop = controller(cluster, **rules)
    metrics.observe(loop.cycle())
    status, found, message = _condition(cluster)
    assert (status, found) == ("False", reason)
    assert words in message
    assert [e.reason for e in cluster.events if e.name == "gputally-fairshare" and e.type == "Warning"] == [reason]
    series = f'gputally_fairshare_preemption_blocked{{reason="{reason}",target="kube-scheduler"}}'
    degraded = 'gputally_fairshare_target_degraded{reason="PreemptionFailed",target="kube-scheduler"} 1.0'
    assert (degraded if answer == "503" else series) in metrics.render().decode()
    assert len(cluster.list(POD)) == 3
    cluster.answer = None
    if not rules:
        metrics.observe(loop.cycle())
        assert _condition(cluster)[:2] == ("True", "AsDecided")
        assert series not in metrics.render().decode()
        assert len(cluster.list(POD)) == 2


def test_a_claim_that_finds_another_victim_is_no_fault(controller: Make) -> None:
    cluster = _borrowing(budget_object("b", 0, {"app": "kept"}))
    kept = cluster.get(POD, "a0", "ns")
    labels = {**kept["metadata"]["labels"], "app": "kept"}
    cluster.put({**kept, "metadata": {**kept["metadata"], "labels": labels}}, field_manager="tests")
    controller(cluster).cycle()
    assert _condition(cluster)[:2] == ("True", "AsDecided")


def test_many_victims_held_by_budgets_only_delay_the_one_that_may_be_evicted(
    controller: Make, clock: VirtualClock
) -> None:
    """Each looks cheaper than the one who may go, and has a budget of its own."""
    kept = [
        pod_object(f"k{i}", gpus=1, labels={"app": f"k{i}"}, annotations={CHECKPOINT: "2026-09-30T23:59:00Z"})
        for i in range(12)
    ]
    budgets = [budget_object(f"k{i}", 0, {"app": f"k{i}"}) for i in range(12)]
    goes = pod_object("last", gpus=1)
    cluster = cluster_with(node_object("n0", 13), *kept, *budgets, goes, pod_object("b0", "b", node="", gpus=1))
    loop = controller(cluster)
    seen = []
    for _ in range(4):
        (target,) = loop.cycle().targets
        seen.append(target.degraded.get("PreemptionFailed", "decided"))
        clock.advance(60_000)
    assert [text == "decided" for text in seen] == [False, False, True, True]
    assert "12" not in seen[0]
    assert "last" not in {pod["metadata"]["name"] for pod in cluster.list(POD)}
    open_now = {**cluster.get(BUDGET, "k3", "ns"), "status": {"disruptionsAllowed": 1}}
    cluster.put(open_now, field_manager="x", subresource="status")
    cluster.load([pod_object("b1", "b", node="", gpus=1)])
    for _ in range(3):
        clock.advance(VETO_VALID_MS // 2)
        loop.cycle()
    assert "k3" not in {pod["metadata"]["name"] for pod in cluster.list(POD)}
