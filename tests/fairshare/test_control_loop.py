"""Whole cycles of the controller: weights written or held, reports, decisions, and outages."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
import structlog
from structlog import get_logger
from structlog.testing import capture_logs

from accountant.wire.policy_models import Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from accountant.wire.usage_cost_and_job_models import BudgetState
from fairshare.controller.control_loop import Controller
from fairshare.controller.controller_metrics import ControllerMetrics
from fairshare.controller.cycle_report import CycleReport, replay_weights
from fairshare.controller.event_and_decision_recorder import MOST_CYCLES, CycleLog, CycleRecorder
from fairshare.controller.weight_writer import adopt
from fairshare.core import scheduler_queue_objects
from fairshare.core.gpu_demand import read_pod
from fairshare.targets.status_config_map import StatusObject
from gputally.base.clock import VirtualClock
from gputally.base.errors import AccountantRefused, AccountantUnavailable, ClusterRefused, ClusterUnavailable, Conflict
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.list_watch import Reflector
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, NODE, POD, Cluster, Object
from gputally.testing.fake_scheduler import QUEUE, SETUP, queue_object, setup_object
from tests.fairshare.builders import Failing, budget_state, cluster_of, node_object, object_of, policy_of
from tests.fairshare.conftest import NOW_MS, Accountant, Make
from tests.fairshare.observations import conditions_of, hold_of, results_of, weights_in

HERE = StatusObject("gputally", "gputally-fairshare")


@pytest.fixture
def queues(either_of: Make) -> Cluster:
    """The queues of `three`, in memory and on a real API server."""
    return either_of([*map(queue_object, "abc"), queue_object("stranger", 5), setup_object()])


def test_weights_follow_history(queues: Cluster, accountant: Any, controller_of: Make, clock: VirtualClock) -> None:
    accountant.spend(a=0.7, b=0.2, c=0.1)
    controller = controller_of(policy_of(k=1.0), queues)
    written = []
    for _ in range(6):
        written.append(len(results_of(controller.cycle())))
        clock.advance(60_000)
    weights = weights_in(queues)
    assert (weights["a"], weights["stranger"]) == (0.1, 5)
    assert weights["b"] < weights["c"]
    assert (written[0], written[-1]) == (3, 0)
    assert [p.version() for p in accountant.policies] == [policy_of(k=1.0).version()]


def test_weights_follow_the_first_use_that_is_known_and_then_stay(
    three: MemoryCluster, accountant: Any, controller_of: Make, clock: VirtualClock
) -> None:
    """Also if another controller, or another run, goes on from the state."""
    policy = policy_of(k=1.0, bounds={"interval": 10_800})

    def cycle() -> CycleReport:
        clock.advance(60_000)
        report: CycleReport = controller_of(policy, three, status_object=HERE).cycle()
        return report

    accountant.down = True
    assert results_of(cycle()) == {}
    accountant.down = False
    (first, _, _) = cycle().targets[0].weights
    (note,) = first.explanation.notes
    assert "no use of these queues is known" in note
    assert weights_in(three) == {"a": 1, "b": 1, "c": 1, "stranger": 5}
    accountant.spend(a=0.7, b=0.2, c=0.1)
    cycle()
    followed = weights_in(three)
    assert followed["a"] < followed["b"] < followed["c"]
    accountant.spend(a=0.1, b=0.2, c=0.7)
    assert results_of(cycle()) == {}
    assert weights_in(three) == followed
    clock.advance(10_800_000)
    cycle()
    assert weights_in(three)["a"] > followed["a"]


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
    report = controller_of(policy_of(targets={"fake": {"mode": "off"}}), queues).cycle()
    assert conditions_of(report)["fake.Available"] == ("Unknown", "Off")
    assert weights_in(queues)["a"] == 1


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"age_ms": 901_000}, "StaleUsage"),
        ({"age_ms": None}, "NoUsage"),
        ({"coverage": 0.97999}, "LowCoverage"),
        ({"capacity": 0}, "NoCapacity"),
        ({"down": True}, "AccountantUnavailable"),
    ],
)
def test_unusable_usage_changes_no_weight_and_is_said_once(
    three: MemoryCluster, accountant: Any, controller_of: Make, trouble: dict[str, Any], reason: str
) -> None:
    accountant.spend(a=0.5, b=0.3, c=0.2)
    controller = controller_of(policy_of(), three, status_object=HERE)
    controller.cycle()
    good, usual = weights_in(three), dict(vars(accountant))
    accountant.spend(a=0.0, b=0.0, c=1.0)
    vars(accountant).update(trouble)
    held = controller.later()
    assert hold_of(held)[0] == reason
    assert "98.00% of" not in hold_of(held)[1]  # what is below the limit is not rounded up to it
    assert weights_in(three) == good
    assert conditions_of(held)["UsageFresh"] == ("False", reason)
    assert conditions_of(held)["fake.Effective"] == ("True", "WeightsOnly")
    (event,) = [event for event in held.events if event.type == "Warning"]
    assert (event.reason, event.name) == (reason, HERE.name)
    (decision,) = held.decisions
    assert (decision.kind, decision.reason.split(":")[0]) == ("hold", reason)
    again = controller.later()
    assert (again.decisions, again.events) == ((), ())
    vars(accountant).update({key: usual[key] for key in trouble})
    resumed = controller.later()
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
    assert conditions_of(report)["fake.Available"] == ("False", "Refused")


def test_an_absent_crd_degrades_the_target(accountant: Any, controller_of: Make) -> None:
    accountant.spend(a=1.0)
    report = controller_of(policy_of(), MemoryCluster([NODE])).cycle()
    assert conditions_of(report)["fake.Available"] == ("False", "CRDAbsent")
    assert list(report.targets[0].degraded) == ["CRDAbsent"]


def test_an_api_server_that_does_not_answer(accountant: Any, controller_of: Make) -> None:
    cluster = Failing([QUEUE, SETUP, NODE], [queue_object(name) for name in "abc"])
    accountant.spend(a=1.0)
    controller = controller_of(policy_of(), cluster)
    cluster.failing = frozenset({"list"})
    assert conditions_of(controller.cycle())["fake.Available"] == ("False", "Unavailable")
    cluster.failing = frozenset({"apply Queue"})
    report = controller.cycle()
    assert set(results_of(report).values()) == {"unavailable"}
    assert "not tried" in report.targets[0].outcomes[1].detail
    cluster.failing, cluster.error = frozenset({"event"}), Conflict("no events today")
    assert set(results_of(controller.cycle()).values()) == {"applied"}


def test_every_weight_is_computed_again_from_its_record(queues: Cluster, accountant: Any, controller_of: Make) -> None:
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
    with pytest.raises(ValueError, match="take the decision with subject"):
        replay_weights(policy, next(d for d in recorded if d.subject == "a"))


def test_decisions_wait_for_an_accountant(queues: Cluster, accountant: Any, controller_of: Make) -> None:
    accountant.spend(a=1.0)
    controller = controller_of(policy_of(), queues)
    accountant.takes_decisions = False
    report = controller.cycle()
    assert report.decisions
    assert accountant.decisions == []
    accountant.takes_decisions = True
    controller.later()
    assert {d.id for d in report.decisions} <= {d.id for d in accountant.decisions}


def test_conditions_outlive_the_controller(
    three: MemoryCluster, accountant: Any, controller_of: Make, clock: VirtualClock
) -> None:
    accountant.spend(a=1.0)
    controller_of(policy_of(), three, status_object=HERE).cycle()
    first = three.get(CONFIG_MAP, HERE.name, HERE.namespace)["data"]
    of_target = {f"fake.{kind}" for kind in ("Available", "Effective", "InSync", "Mapped", "Preemption")}
    assert set(first) == {"UsageFresh", "state.fake", *of_target}
    clock.advance(3_600_000)
    accountant.coverage = 0.5
    controller_of(policy_of(), three, status_object=HERE).cycle()
    later = {k: json.loads(v) for k, v in three.get(CONFIG_MAP, HERE.name, HERE.namespace)["data"].items()}
    assert later["fake.Effective"]["lastTransitionTime"] == json.loads(first["fake.Effective"])["lastTransitionTime"]
    assert later["UsageFresh"]["status"] == "False"
    assert later["UsageFresh"]["lastTransitionTime"] == scheduler_queue_objects.instant(clock.wall_ms())


def test_a_scheduler_that_counts_usage_too_is_reported(
    three: MemoryCluster, accountant: Any, controller_of: Make
) -> None:
    three.load([setup_object(counts_usage=True)])
    accountant.spend(a=0.3)
    report = controller_of(policy_of(), three).cycle()
    assert conditions_of(report)["fake.Effective"] == ("False", "HistoryCountedTwice")
    assert "HistoryCountedTwice" in report.targets[0].degraded


def test_gpus_come_from_ready_nodes_or_the_window(three: MemoryCluster, accountant: Any, controller_of: Make) -> None:
    controller = controller_of(policy_of(), three)
    assert controller.cycle().targets[0].gpus == 16.0
    for name, ready in (("n1", "True"), ("n2", "False")):
        three.load([node_object(name, ready=ready)])
    assert controller.cycle().targets[0].gpus == 8.0


def test_run_cycles_until_told_with_each_new_policy(three: MemoryCluster, accountant: Any, controller_of: Make) -> None:
    stop = threading.Event()
    reports: list[CycleReport] = []
    old, new = policy_of(k=1.0), policy_of(k=3.0)
    policies = [None, new, None]

    def observe(report: CycleReport) -> None:
        reports.append(report)
        if len(reports) == 3:
            stop.set()

    controller = controller_of(old, three, observe=observe)
    controller.run(stop, interval_s=30, reload=lambda: policies.pop(0))
    assert [report.policy_version for report in reports] == [each.version() for each in (old, new, new)]
    assert [report.at_ms - reports[0].at_ms for report in reports] == [0, 30_000, 60_000]
    assert controller.last is reports[-1]
    assert accountant.policies == [old, new]


def test_a_silent_controller_sends_nothing(three: MemoryCluster, accountant: Any, controller_of: Make) -> None:
    accountant.spend(a=1.0)
    report = controller_of(policy_of(apply="dry-run"), three, silent=True).cycle()
    assert report.decisions
    assert (accountant.policies, accountant.decisions, three.events) == ([], [], ())


def test_usage_counted_by_another_policy_moves_nothing(queues: Cluster, accountant: Any, controller_of: Make) -> None:
    """The controller announces its own policy again."""
    accountant.spend(a=1.0)
    controller = controller_of(policy_of(), queues)
    controller.cycle()
    good = weights_in(queues)
    accountant.policies.append(policy_of(k=0.25))  # of another controller
    assert hold_of(controller.later())[0] == "PolicyNotInForce"
    assert weights_in(queues) == good
    assert controller.later().hold is None
    assert accountant.policies[-1] == policy_of()


@pytest.mark.parametrize(("behind_ms", "held"), [(0, False), (2_000, False), (60_000, False), (3_600_000, True)])
def test_a_clock_behind_the_accountants_is_called_so(
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
        reason, message = hold_of(controller.cycle())
        assert reason == ("PolicyNotInForce" if held else "")
        assert ("s or more behind the accountant's" in message) == held
        clock.advance(60_000)
    assert len(ahead.policies) == 1
    clock.advance(behind_ms)
    assert controller.cycle().hold is None


def test_an_exhausted_budget_takes_the_weight(
    queues: Cluster, accountant: Any, controller_of: Make, clock: VirtualClock
) -> None:
    budget = {"name": "c", "queue": "c", "limit": "10", "exhausted": "no-over-quota"}
    accountant.spend(a=0.3, b=0.4, c=0.3)
    controller = controller_of(policy_of(k=0.0, budgets=[budget]), queues)
    seen = []
    for spent in ("9.99", "10", None):
        accountant.states = [budget_state("c", "c", limit="10", spent=spent)]
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
    assert hold_of(report)[0] == "AccountantUnavailable"
    assert weights_in(queues)["a"] == 1
    assert controller_of(policy_of(), queues).cycle().hold is None  # nothing depends on them: they are not asked for


def _ours(cluster: MemoryCluster) -> dict[str, str]:
    return dict(cluster.get(CONFIG_MAP, HERE.name, HERE.namespace)["data"])


@pytest.fixture
def three_queues(accountant: Accountant, controller_of: Make) -> Make:
    """A controller of three queues, and its cluster."""

    def make(**options: Any) -> tuple[Failing, Controller]:
        cluster = Failing([QUEUE, SETUP, NODE, CONFIG_MAP], [queue_object(name) for name in "abc"])
        accountant.spend(a=0.6, b=0.3, c=0.1)
        return cluster, controller_of(policy_of(**options), cluster, status_object=HERE)

    return make


def test_remembered_state_is_waited_for_not_overwritten(
    three_queues: Make, clock: VirtualClock, controller_of: Make
) -> None:
    """Recent preemptions count against the limits for an hour: a leader without them would exceed the limits."""
    cluster, first = three_queues()
    for _ in range(3):
        first.cycle()
        clock.advance(60_000)
    noted = _ours(cluster)["state.fake"]
    gone = [[clock.wall_ms() - 60_000, "Pod/ns/x", "a", "a", 4.0, 1.0, "d1"]]
    noted_too = {"data": {**_ours(cluster), "preempted": json.dumps(gone)}}
    ours = object_of(CONFIG_MAP, HERE.name, namespace=HERE.namespace)
    cluster.apply({**ours, **noted_too}, field_manager="gputally-fairshare")
    weights = [obj["spec"] for obj in cluster.list(QUEUE)]
    second = controller_of(policy_of(), cluster, status_object=HERE)
    cluster.failing = frozenset({"get ConfigMap"})
    assert hold_of(second.cycle())[0] == "StateUnread"
    assert [obj["spec"] for obj in cluster.list(QUEUE)] == weights
    cluster.failing = frozenset()
    assert (_ours(cluster)["state.fake"], json.loads(_ours(cluster)["preempted"])) == (noted, gone)
    report = second.cycle()
    assert report.hold is None
    assert report.targets[0].memory == json.loads(noted)["memory"]
    assert json.loads(_ours(cluster)["preempted"]) == gone


@pytest.mark.parametrize("text", ["no json", "{}", '[["fake", 1e999]]', "[" * 100_000])
def test_a_state_that_is_not_the_controllers_is_ignored(three_queues: Make, text: str) -> None:
    cluster, controller = three_queues()
    entries = {"state.fake": text, "fake.Effective": text, "preempted": text, "warned-idle": text}
    status = object_of(CONFIG_MAP, HERE.name, namespace=HERE.namespace) | {"data": entries}
    cluster.apply(status, field_manager="gputally-fairshare")
    report = controller.cycle()
    assert (report.hold, report.targets[0].memory) == (None, {})
    assert _ours(cluster)["state.fake"] != text


def test_an_event_that_is_refused_keeps_nothing_else_back(three_queues: Make) -> None:
    """A namespace that is being deleted accepts no new Event."""
    cluster, controller = three_queues()
    for name in "ab":
        cluster.put({**cluster.get(QUEUE, name), "spec": {"weight": 7}}, field_manager="x")
    cluster.failing, cluster.error = frozenset({"event Queue"}), ClusterRefused("POST: 403: it is being terminated")
    controller.cycle()
    assert json.loads(_ours(cluster)["fake.Available"])["reason"] == "Contested"
    assert "Contested" in {event.reason for event in cluster.events}


def test_what_cannot_be_told_is_said_while_it_lasts(three_queues: Make, accountant: Accountant) -> None:
    cluster, controller = three_queues()
    accountant.takes_decisions = False
    cluster.admit_config_maps = False
    controller.cycle()
    for _ in range(2):
        found = {condition.type: condition for condition in controller.later().conditions}
        assert found["Remembered"].reason == "StatusNotWritten"
        assert "quota" in found["Remembered"].message
        assert found["Recorded"].reason == "DecisionsWait"
        assert "503 Ledger unavailable" in found["Recorded"].message
    assert {"StatusNotWritten", "DecisionsWait"} <= {event.reason for event in cluster.events}
    accountant.takes_decisions = cluster.admit_config_maps = True
    controller.cycle()
    assert [condition.type for condition in controller.cycle().conditions] == ["UsageFresh"]


def test_nodes_that_cannot_be_listed_leave_the_weights_alone(three_queues: Make) -> None:
    """Otherwise the ledger's average would replace them: half of it, if half of the nodes have no agent yet."""
    cluster, controller = three_queues()
    cluster.failing = frozenset({"list Node"})
    report = controller.cycle()
    assert (hold_of(report)[0], report.targets[0].outcomes) == ("NodesUnread", ())
    cluster.failing = frozenset()
    assert controller.cycle().targets[0].outcomes


def test_pods_not_listed_recently_decide_nothing(
    accountant: Accountant, clock: VirtualClock, controller_of: Make
) -> None:
    cluster = Failing([QUEUE, SETUP, NODE, POD, CONFIG_MAP], [queue_object(name) for name in "abc"])
    accountant.spend(a=0.6, b=0.3, c=0.1)
    pods: Any = Reflector(cluster.api(), POD.path(), dict, read_pod, now_ms=clock.monotonic_ms)
    held = lambda: tuple(pods.values().values())  # noqa: E731
    controller = controller_of(policy_of(), cluster, pods=held, unseen=pods.behind)
    cluster.failing, cluster.error = frozenset({"list Pod"}), ClusterRefused("GET: 403: pods is forbidden")
    pods.prime()
    unread = "pods have not been read yet: GET: 403: pods is forbidden"
    assert hold_of(controller.cycle()) == ("PodsUnseen", unread)
    cluster.failing = frozenset()
    pods.prime()
    assert controller.cycle().hold is None
    clock.advance(599_000)
    assert controller.cycle().hold is None
    clock.advance(2_000)
    assert hold_of(controller.cycle())[1] == "pods were last read 601 s ago"
    pods.follow()  # a watch that ended in peace, with nothing new
    assert controller.cycle().hold is None


def test_a_refused_policy_is_said_until_it_is_mended(
    three_queues: Make, clock: VirtualClock, controller_of: Make
) -> None:
    cluster, _ = three_queues()
    stop, metrics, seen = threading.Event(), ControllerMetrics(clock), []
    good, new = policy_of(), policy_of(k=0.5)
    answers: list[Policy | FileFault | None] = [None, FileFault(["policy.yaml:3: no such queue: 'x'"]), None, new]

    def reload() -> Policy | None:
        answer = answers.pop(0)
        if isinstance(answer, FileFault):
            raise answer
        return answer

    def observe(report: CycleReport) -> None:
        metrics.observe(report)
        reasons = {c.reason for c in report.conditions} - {"Fresh"}
        degraded = 'controller_degraded{reason="PolicyRefused"} 1.0' in metrics.render().decode()
        seen.append((report.policy_version, reasons, degraded))
        if not answers:
            stop.set()

    controller_of(good, cluster, status_object=HERE, observe=observe).run(stop, reload=reload)
    refused, clean = (good.version(), {"PolicyRefused"}, True), (good.version(), set(), False)
    assert seen == [clean, refused, refused, (new.version(), set(), False)]
    (event,) = [event for event in cluster.events if event.reason == "PolicyRefused"]
    assert event.message.endswith("policy.yaml:3: no such queue: 'x'")


def test_a_decision_that_is_refused_keeps_no_other_back(three_queues: Make, accountant: Accountant) -> None:
    _, controller = three_queues()
    plain = accountant.post_decisions

    def post(decisions: Sequence[Decision]) -> None:
        if any(decision.subject == "b" for decision in decisions):
            raise AccountantRefused("http://accountant:8080/v1/decisions: 413 Too large")
        plain(decisions)

    accountant.post_decisions = post
    controller.cycle()
    assert [decision.subject for decision in accountant.decisions] == ["*", "a", "c"]
    found = {condition.reason: condition.message for condition in controller.later().conditions}
    assert "/fake/b: http://accountant:8080/v1/decisions: 413 Too large" in found["DecisionsRefused"]


def test_of_what_waits_to_be_recorded_old_inputs_are_dropped_and_no_decision(accountant: Accountant) -> None:
    def decision(cycle: int, subject: str, **inputs: str) -> Decision:
        return Decision(
            id=f"{cycle}/{subject}", at_ms=cycle, kind="weight", target="fake", subject=subject, mode="enforce",
            reason="", policy_version="v", inputs=inputs,
        )  # fmt: skip

    recorder = CycleRecorder(MemoryCluster([]), accountant, None)
    accountant.takes_decisions = False
    for cycle in range(MOST_CYCLES + 20):
        inputs, *others = (decision(cycle, subject, of=str(cycle)) for subject in ("*", "a", "b"))
        recorder.deliver([inputs, *others], accountant_away=False)
    accountant.takes_decisions = True
    recorder.deliver([], accountant_away=False)
    kept = [decision.id for decision in accountant.decisions]
    assert kept[38:43] == ["19/a", "19/b", "20/*", "20/a", "20/b"]
    assert len(kept) == 3 * MOST_CYCLES + 2 * 20


def test_conditions_of_many_strangers_fit_into_a_config_map(controller_of: Make) -> None:
    queues = [{"name": f"team-{n}-with-a-long-name", "refs": [f"fake:missing-{n}"]} for n in range(1_000)]
    cluster = MemoryCluster([QUEUE, SETUP, NODE, CONFIG_MAP], [queue_object("a")])
    policy = policy_of([*queues, {"name": "a", "refs": ["fake:a"]}])
    controller_of(policy, cluster, status_object=HERE).cycle()
    mapped = json.loads(_ours(cluster)["fake.Mapped"])
    assert mapped["message"].endswith("; and 992 more")
    assert len(json.dumps(_ours(cluster))) < 8_000


def test_the_log_says_what_turned_and_not_what_stays(
    three_queues: Make, accountant: Accountant, clock: VirtualClock, controller_of: Make
) -> None:
    """A week of cycles in which a dry run plans the same, and another manager keeps a field."""
    cluster, _ = three_queues()
    taken = {**cluster.get(QUEUE, "b"), "spec": {"weight": 3, "quota": 0, "limit": -1}}
    cluster.put(taken, field_manager="argocd")
    controller = controller_of(policy_of(apply="dry-run"), cluster)
    structlog.reset_defaults()  # a program that ran in this process may have silenced what is no error
    with capture_logs() as lines:
        told = CycleLog(get_logger("fairshare"))
        for _ in range(5):
            told.log(controller.cycle())
            clock.advance(60_000)
        accountant.down = True
        told.log(controller.cycle())
        accountant.down = False
        told.log(controller.cycle())
    said = [(line["event"], line.get("queue") or line.get("reason")) for line in lines if line["event"] != "cycle"]
    first = {("weight", queue) for queue in "abc"} | {("condition", "Contested"), ("condition", "FieldNotOurs")}
    assert (set(said[:5]), len(said[:5])) == (first, 5)
    assert {("condition", "AccountantUnavailable"), ("condition", "Fresh")} <= set(said[5:])
    assert len([line for line in lines if line["event"] == "cycle"]) == 7
    assert len(said) < 16


def test_two_controllers_do_not_take_turns_for_ever(
    three_queues: Make, accountant: Accountant, clock: VirtualClock
) -> None:
    """Otherwise each would act on the other's usage every other minute, and no alert would last long enough to fire."""
    _, one = three_queues()
    _, other = three_queues(k=0.5)
    held = []
    for _ in range(72):
        held.append((one.cycle().hold, other.cycle().hold))
        clock.advance(300_000)
    assert len(accountant.policies) < 20
    stretches = [
        len(list(run)) for who in (0, 1) for is_held, run in groupby(pair[who] is not None for pair in held) if is_held
    ]
    assert max(stretches) * 5 > 30  # minutes, as the alert waits
    texts = {hold.message for pair in held for hold in pair if hold is not None}
    assert any("another controller announces its own to this accountant" in text for text in texts)


def test_a_second_controller_with_another_lease_reports_contested_and_writes_nothing(
    accountant: Accountant, controller_of: Make
) -> None:
    cluster = cluster_of([*(queue_object(name) for name in "abc"), node_object(gpus=16)])
    policy = policy_of()
    first, second = (controller_of(policy, cluster, name=f"{where}/gputally-fairshare") for where in ("one", "two"))
    accountant.spend(a=0.6, b=0.3, c=0.1)
    first.cycle()
    before = weights_in(cluster)
    accountant.spend(a=0.1, b=0.3, c=0.6)
    report = second.cycle()
    assert conditions_of(report)["fake.Available"] == ("False", "Contested")
    assert (weights_in(cluster), results_of(report), report.targets[0].preemption) == (before, {}, None)
    (again,) = {name for name, *_ in [conditions_of(first.cycle())["fake.Available"]]}
    assert again == "True"
    adopted = adopt(policy, cluster, name="two/gputally-fairshare")
    assert {(each.owners, each.result) for each in adopted} == {(("controller one/gputally-fairshare",), "applied")}
    held = weights_in(cluster)
    accountant.spend(a=0.1, b=0.6, c=0.3)
    assert conditions_of(second.cycle())["fake.Available"][0] == "True"
    assert weights_in(cluster) != held
    assert conditions_of(first.cycle())["fake.Available"] == ("False", "Contested")


@pytest.mark.parametrize("error", [ClusterRefused("GET: 403: configmaps is forbidden"), ClusterUnavailable("GET: 503")])
def test_without_the_state_of_earlier_cycles_nothing_is_written(
    accountant: Accountant, controller_of: Make, error: Exception
) -> None:
    cluster = Failing([QUEUE, SETUP, NODE, CONFIG_MAP], [*(queue_object(name) for name in "abc"), node_object()])
    cluster.failing, cluster.error = frozenset({"get ConfigMap"}), error
    accountant.spend(a=0.6, b=0.3, c=0.1)
    controller = controller_of(policy_of(), cluster, status_object=StatusObject())
    before = weights_in(cluster)
    assert hold_of(controller.cycle())[0] == "StateUnread"
    assert weights_in(cluster) == before
    cluster.failing = frozenset()
    assert controller.cycle().hold is None
    assert weights_in(cluster) != before
