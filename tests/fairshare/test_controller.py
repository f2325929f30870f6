"""Whole controller cycles against an in-memory cluster: weights written or held, reports and decisions."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from accountant.wire.policy_models import Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from accountant.wire.usage_cost_and_job_models import BudgetState
from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport, replay_weights
from fairshare.core import scheduler_queue_objects
from fairshare.targets.kai import QUEUE, SHARD
from fairshare.targets.status_config_map import StatusObject
from gputally.base.clock import VirtualClock
from gputally.base.errors import AccountantUnavailable, Conflict, Unavailable
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, NODE, Cluster, Kind, Object
from tests.fairshare.builders import cluster_of, policy_of, queue_object, shard_object
from tests.fairshare.conftest import NOW_MS, Accountant
from tests.fairshare.observations import conditions_of, results_of, weights_in
from tests.fairshare.victims import node_object

Make = Callable[..., Any]
HERE = StatusObject("gputally", "gputally-fairshare")


@pytest.fixture
def queues(either_of: Make) -> Cluster:
    """As `three`, in memory and on a real API server."""
    found: Cluster = either_of([*map(queue_object, "abc"), queue_object("stranger", 5), shard_object(kValue=0)])
    return found


def test_weights_follow_history_and_settle(
    queues: Cluster, accountant: Any, controller_of: Make, clock: VirtualClock
) -> None:
    accountant.spend(a=0.7, b=0.2, c=0.1)
    controller = controller_of(policy_of(k=1.0), queues)
    seen = []
    for _ in range(6):
        seen.append(len(results_of(controller.cycle())))
        clock.advance(60_000)
    weights = weights_in(queues)
    assert weights["a"] == 0.1
    assert weights["b"] < weights["c"]
    assert weights["stranger"] == 5
    assert seen[0] == 3
    assert seen[-1] == 0
    assert [p.version() for p in accountant.policies] == [policy_of(k=1.0).version()]


def test_a_dry_run_writes_nothing_and_says_what_it_would(queues: Cluster, accountant: Any, controller_of: Make) -> None:
    accountant.spend(a=1.0)
    before = queues.list(QUEUE)
    controller = controller_of(policy_of(apply="dry-run"), queues)
    report = controller.cycle()
    assert queues.list(QUEUE) == before
    assert set(results_of(report).values()) == {"would-apply"}
    assert [d.subject for d in report.decisions] == ["*", "a", "b", "c"]
    assert {d.mode for d in report.decisions} == {"dry-run"}
    assert controller.cycle().decisions == ()  # the same again is no news


def test_off_leaves_the_target_alone(queues: Cluster, accountant: Any, controller_of: Make) -> None:
    accountant.spend(a=1.0)
    report = controller_of(policy_of(targets={"kai": {"mode": "off"}}), queues).cycle()
    assert conditions_of(report)["kai.Available"] == ("Unknown", "Off")
    assert weights_in(queues)["a"] == 1


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"age_ms": 901_000}, "StaleUsage"),
        ({"age_ms": None}, "NoUsage"),
        ({"coverage": 0.9799}, "LowCoverage"),
        ({"capacity": 0}, "NoCapacity"),
        ({"down": True}, "AccountantUnavailable"),
    ],
)
def test_unusable_usage_changes_no_weight_and_is_said_once(
    three: MemoryCluster,
    accountant: Any,
    controller_of: Make,
    clock: VirtualClock,
    trouble: dict[str, Any],
    reason: str,
) -> None:
    accountant.spend(a=0.5, b=0.3, c=0.2)
    controller = controller_of(policy_of(), three, status_object=HERE)
    controller.cycle()
    good, usual = weights_in(three), dict(vars(accountant))
    accountant.spend(a=0.0, b=0.0, c=1.0)
    vars(accountant).update(trouble)
    clock.advance(60_000)
    held = controller.cycle()
    assert held.hold is not None
    assert held.hold.reason == reason
    assert weights_in(three) == good
    assert conditions_of(held)["UsageFresh"] == ("False", reason)
    assert conditions_of(held)["kai.Effective"] == ("True", "WeightsOnly")
    (event,) = [event for event in held.events if event.type == "Warning"]
    assert (event.reason, event.name) == (reason, HERE.name)
    (decision,) = held.decisions
    assert (decision.kind, decision.reason.split(":")[0]) == ("hold", reason)
    clock.advance(60_000)
    again = controller.cycle()
    assert (again.decisions, again.events) == ((), ())
    vars(accountant).update({key: usual[key] for key in trouble})
    clock.advance(60_000)
    resumed = controller.cycle()
    assert resumed.hold is None
    assert weights_in(three) != good
    assert [event.reason for event in resumed.events] == ["WeightChanged"] * 3 + ["Fresh"]
    assert [d.kind for d in accountant.decisions].count("hold") == 1


def test_a_refusal_of_one_is_reported_and_the_others_go_on(accountant: Any, controller_of: Make) -> None:
    def admit(obj: Object) -> str | None:
        return "not today" if obj["metadata"]["name"] == "a" else None

    cluster = cluster_of([queue_object(name) for name in "abc"], admit=admit)
    accountant.spend(a=1.0)
    report = controller_of(policy_of(), cluster).cycle()
    assert results_of(report) == {"a": "refused", "b": "applied", "c": "applied"}
    assert conditions_of(report)["kai.Available"] == ("False", "Refused")


def test_an_absent_crd_degrades_the_target(accountant: Any, controller_of: Make) -> None:
    accountant.spend(a=1.0)
    report = controller_of(policy_of(), MemoryCluster([NODE])).cycle()
    assert conditions_of(report)["kai.Available"] == ("False", "CRDAbsent")
    assert list(report.targets[0].degraded) == ["CRDAbsent"]


class Faulty(MemoryCluster):
    """Fails as it is told to."""

    failing: str = ""

    def list(self, kind: Kind, *, fields: str = "") -> list[Object]:
        if self.failing == "list":
            raise Unavailable("the API server does not answer: timed out")
        return super().list(kind, fields=fields)

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        if self.failing == "apply":
            raise Unavailable("the API server does not answer: timed out")
        return super().apply(obj, field_manager=field_manager, dry_run=dry_run, subresource=subresource)

    def event(self, event: Any) -> None:
        if self.failing == "event":
            raise Conflict("no events today")
        super().event(event)


def test_an_api_server_that_does_not_answer(accountant: Any, controller_of: Make) -> None:
    cluster = Faulty([QUEUE, SHARD, NODE], [queue_object(name) for name in "abc"])
    accountant.spend(a=1.0)
    controller = controller_of(policy_of(), cluster)
    cluster.failing = "list"
    assert conditions_of(controller.cycle())["kai.Available"] == ("False", "Unavailable")
    cluster.failing = "apply"
    report = controller.cycle()
    assert set(results_of(report).values()) == {"unavailable"}
    assert "not tried" in report.targets[0].outcomes[1].detail
    cluster.failing = "event"
    assert set(results_of(controller.cycle()).values()) == {"applied"}


def test_every_weight_can_be_computed_again_from_its_record(
    queues: Cluster, accountant: Any, controller_of: Make
) -> None:
    accountant.spend(a=0.61, b=0.17, c=0.13)
    policy = policy_of(k=2.0)
    report = controller_of(policy, queues).cycle()
    recorded = [Decision.model_validate_json(d.model_dump_json()) for d in accountant.decisions]
    (cycle,) = [d for d in recorded if d.subject == "*"]
    again = replay_weights(policy, cycle)
    assert again.weights == report.targets[0].weights
    assert again.entitlements == report.targets[0].entitlements
    for decision in recorded:
        if decision.subject != "*":
            assert decision.inputs["cycle"] == cycle.id
            assert decision.inputs["explanation"]["value"] == decision.value  # type: ignore[index,call-overload]
    with pytest.raises(ValueError, match="holds no inputs"):
        replay_weights(policy, next(d for d in recorded if d.subject == "a"))


def test_decisions_wait_for_an_accountant_that_comes_back(
    queues: Cluster, accountant: Any, controller_of: Make, clock: VirtualClock
) -> None:
    accountant.spend(a=1.0)
    controller = controller_of(policy_of(), queues)
    accountant.takes_decisions = False
    report = controller.cycle()
    assert report.decisions
    assert accountant.decisions == []
    accountant.takes_decisions = True
    clock.advance(60_000)
    controller.cycle()
    assert {d.id for d in report.decisions} <= {d.id for d in accountant.decisions}


def test_conditions_are_kept_in_the_cluster_and_outlive_the_controller(
    three: MemoryCluster, accountant: Any, controller_of: Make, clock: VirtualClock
) -> None:
    accountant.spend(a=1.0)
    controller_of(policy_of(), three, status_object=HERE).cycle()
    first = three.get(CONFIG_MAP, HERE.name, HERE.namespace)["data"]
    of_target = {f"kai.{kind}" for kind in ("Available", "Effective", "InSync", "Mapped", "Preemption")}
    assert set(first) == {"UsageFresh", *of_target}
    clock.advance(3_600_000)
    accountant.coverage = 0.5
    controller_of(policy_of(), three, status_object=HERE).cycle()
    later = {k: json.loads(v) for k, v in three.get(CONFIG_MAP, HERE.name, HERE.namespace)["data"].items()}
    assert later["kai.Effective"]["lastTransitionTime"] == json.loads(first["kai.Effective"])["lastTransitionTime"]
    assert later["UsageFresh"]["status"] == "False"
    assert later["UsageFresh"]["lastTransitionTime"] == scheduler_queue_objects.instant(clock.wall_ms())


def test_a_shard_with_history_of_its_own_is_reported(
    three: MemoryCluster, accountant: Any, controller_of: Make
) -> None:
    three.load([shard_object(kValue=1, usageDBConfig={"clientType": "prometheus"})])
    accountant.spend(a=0.3)
    report = controller_of(policy_of(), three).cycle()
    assert conditions_of(report)["kai.Effective"] == ("False", "HistoryCountedTwice")
    assert "HistoryCountedTwice" in report.targets[0].degraded


def test_gpus_come_from_ready_nodes_else_from_the_window(
    three: MemoryCluster, accountant: Any, controller_of: Make
) -> None:
    controller = controller_of(policy_of(), three)
    assert controller.cycle().targets[0].gpus == 16.0
    for name, ready in (("n1", "True"), ("n2", "False")):
        three.load([node_object(name, ready=ready)])
    assert controller.cycle().targets[0].gpus == 8.0


def test_run_cycles_until_told_and_takes_a_new_policy(
    three: MemoryCluster, accountant: Any, clock: VirtualClock
) -> None:
    stop = threading.Event()
    reports: list[CycleReport] = []
    policies = [None, policy_of(k=3.0), None]

    def observe(report: CycleReport) -> None:
        reports.append(report)
        if len(reports) == 3:
            stop.set()

    controller = Controller(
        policy_of(k=1.0), accountant, three, clock, interval_s=30, reload=lambda: policies.pop(0), observe=observe
    )
    controller.run(stop)
    versions = [report.policy_version for report in reports]
    assert versions == [policy_of(k=1.0).version(), *[policy_of(k=3.0).version()] * 2]
    assert [report.at_ms - reports[0].at_ms for report in reports] == [0, 30_000, 60_000]
    assert controller.last is reports[-1]
    assert [p.version() for p in accountant.policies] == versions[:2]


def test_a_silent_controller_sends_nothing(three: MemoryCluster, accountant: Any, controller_of: Make) -> None:
    accountant.spend(a=1.0)
    report = controller_of(policy_of(apply="dry-run"), three, silent=True).cycle()
    assert report.decisions
    assert (accountant.policies, accountant.decisions, three.events) == ([], [], ())


def test_usage_counted_by_another_policy_moves_nothing_and_ours_is_announced_again(
    queues: Cluster, accountant: Any, controller_of: Make, clock: VirtualClock
) -> None:
    accountant.spend(a=1.0)
    controller = controller_of(policy_of(), queues)
    controller.cycle()
    good = weights_in(queues)
    accountant.policies.append(policy_of(k=0.25))  # of another controller
    clock.advance(60_000)
    held = controller.cycle()
    assert held.hold is not None
    assert held.hold.reason == "PolicyNotInForce"
    assert weights_in(queues) == good
    clock.advance(60_000)
    assert controller.cycle().hold is None
    assert accountant.policies[-1] == policy_of()


@pytest.mark.parametrize(("behind_ms", "held"), [(0, False), (2_000, False), (60_000, False), (3_600_000, True)])
def test_a_clock_behind_the_accountants_is_called_so_and_no_other_controller(
    behind_ms: int, held: bool, queues: Cluster, clock: VirtualClock
) -> None:
    """A policy is in force from its announcement on, by the accountant's clock."""

    class Ahead(Accountant):
        def put_policy(self, policy: Policy) -> PolicyVersion:
            return super().put_policy(policy).model_copy(update={"effective_ms": clock.wall_ms() + behind_ms})

        def window(self, spec: WindowSpec, measure: Measure, at_ms: int, min_coverage: float) -> UsageWindow:
            window = super().window(spec, measure, at_ms, min_coverage)
            in_force = at_ms >= NOW_MS + behind_ms
            return window if in_force else window.model_copy(update={"policy_version": "0" * 16})

    ahead = Ahead()
    controller = Controller(policy_of(), ahead, queues, clock)
    for _ in range(5):
        found = controller.cycle().hold
        assert (found is not None) == held
        if found is not None:
            assert found.reason == "PolicyNotInForce"
            assert "s or more behind the accountant's" in found.message
        clock.advance(60_000)
    assert len(ahead.policies) == 1
    clock.advance(behind_ms)
    assert controller.cycle().hold is None


def test_an_exhausted_budget_takes_the_over_quota_weight_and_its_return_gives_it_back(
    queues: Cluster, accountant: Any, controller_of: Make, clock: VirtualClock
) -> None:
    budget = {"name": "c", "queue": "c", "limit": "10", "exhausted": "no-over-quota"}
    accountant.spend(a=0.3, b=0.4, c=0.3)
    controller = controller_of(policy_of(k=0.0, budgets=[budget]), queues)
    state = {
        "name": "c", "queue": "c", "team": None, "month": "2026-10", "unit": "GPU-hours", "limit": "10",
        "ratio": None, "threshold": None, "forecast": None, "forecast_low": None, "forecast_high": None, "as_of_ms": 0,
    }  # fmt: skip
    seen = []
    for spent in ("9.99", "10", None):
        accountant.states = [BudgetState.model_validate({**state, "spent": spent})]
        report = controller.cycle()
        seen.append(weights_in(queues)["c"])
        for decision in report.decisions:
            if decision.subject == "*":
                assert decision.inputs["exhausted"] == (["c"] if spent == "10" else [])
                assert replay_weights(controller.policy, decision).weights == report.targets[0].weights
        clock.advance(60_000)
    assert seen == [1, 0.0, 1.0]


def test_budgets_that_cannot_be_read_hold_the_weights(queues: Cluster, accountant: Any, controller_of: Make) -> None:
    def unread() -> list[BudgetState]:
        raise AccountantUnavailable("http://accountant:8080/v1/budgets: 403 Forbidden")

    accountant.budgets = unread
    accountant.spend(a=1.0)
    budget = {"name": "c", "queue": "c", "limit": "10", "exhausted": "no-over-quota"}
    report = controller_of(policy_of(budgets=[budget]), queues).cycle()
    assert report.hold is not None
    assert report.hold.reason == "AccountantUnavailable"
    assert weights_in(queues)["a"] == 1
    assert controller_of(policy_of(), queues).cycle().hold is None  # nothing depends on them: they are not asked for
