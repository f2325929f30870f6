"""Preemption in whole cycles, by command, for a latency objective, and by the schedulers themselves."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from rich.console import Console

from accountant.wire.policy_models import Policy
from fairshare.__main__ import main
from fairshare.cli.preemption_tables import preemption_view
from fairshare.controller.control_loop import Controller, by_hand
from fairshare.controller.controller_metrics import ControllerMetrics
from fairshare.core.gpu_demand import CHECKPOINT
from fairshare.preemption.preemption_controller import (
    VETO_VALID_MS,
    NotPossible,
    latency_reason,
)
from fairshare.preemption.preemption_cycle import condition, replay_verdicts
from fairshare.preemption.preemption_types import PreemptionCall
from fairshare.preemption.service_latency_objectives import (
    Alarms,
    Latency,
    LatencyUnknown,
    prometheus_latency,
    seconds_text,
)
from fairshare.targets.status_config_map import StatusObject
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterError
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import BUDGET, CONFIG_MAP, NODE, POD
from tests.fairshare.builders import (
    Answering,
    budget_object,
    budget_state,
    cluster_with,
    fake_pod,
    node_object,
    policy_of,
)
from tests.fairshare.conftest import Accountant, Capsys, Make
from tests.fairshare.observations import pods_of
from tests.fairshare.scheduler_kinds import KINDS
from tests.shared_files import shared


@pytest.fixture
def controller(controller_of: Make) -> Make:
    """Return a controller of pods by label: a holds 8 of n0's GPUs with a quota of 4, and b with a quota of 4 waits."""

    def make(cluster: MemoryCluster, **rules: Any) -> Controller:
        queues = [{"name": name, "deserved": 4, "refs": [f"fake-pods:{name}"]} for name in "ab"]
        wanted = policy_of(queues, preemption={"mode": "enforce", "min_runtime": 0, **rules})
        return controller_of(wanted, cluster, status_object=StatusObject(), pods=lambda: pods_of(cluster))

    return make


def _keep_a0(cluster: Answering) -> Answering:
    """Protect a0 by a disruption budget."""
    cluster.load([budget_object("b", 0, {"app": "kept"})])
    kept = cluster.get(POD, "a0", "ns")
    labels = {**kept["metadata"]["labels"], "app": "kept"}
    cluster.put({**kept, "metadata": {**kept["metadata"], "labels": labels}}, field_manager="tests")
    return cluster


def _borrowing() -> Answering:
    return cluster_with(node_object("n0", 8), fake_pod("a0"), fake_pod("a1"), fake_pod("b0", "b", node=""))


def test_a_cycle_reclaims_records_and_remembers(controller: Make, accountant: Accountant) -> None:
    cluster = _borrowing()
    loop = controller(cluster)
    report = loop.cycle()
    assert sorted(pod["metadata"]["name"] for pod in cluster.list(POD)) == ["a1", "b0"]
    (target,) = report.targets
    assert [stop.effect.result for stop in target.preemption.stops] == ["stopped"]
    assert {(event.reason, event.type) for event in cluster.events if event.kind == POD} == {("Preempted", "Warning")}
    made = {each.subject: each for each in accountant.decisions if each.kind == "preemption"}
    assert set(made) == {"*", "Pod/ns/b0", "Pod/ns/a0"}
    assert made["Pod/ns/a0"].inputs["result"] == "stopped"
    assert replay_verdicts(loop.policy, made["*"]) == target.preemption.verdicts
    assert loop.later().targets[0].preemption.verdicts[0].outcome == "room"
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
    assert {(event.reason, event.type) for event in cluster.events if event.kind == POD} == {
        ("WouldBePreempted", "Normal")
    }


def test_while_the_victims_of_an_earlier_cycle_stop_the_condition_says_so(controller: Make) -> None:
    (target,) = controller(_borrowing()).cycle().targets
    assert condition(target.preemption).reason == "AsDecided"
    found = condition(replace(target.preemption, stopping=("Pod/ns/a0",)))
    assert (found.status, found.reason) == ("True", "Stopping")
    assert "Pod/ns/a0" in found.message


def test_off_decides_nothing(controller: Make) -> None:
    assert controller(_borrowing(), targets={"fake_pods": "off"}).cycle().targets[0].preemption is None


def test_stale_usage_causes_no_preemption(controller: Make, accountant: Accountant) -> None:
    accountant.coverage = 0.5
    cluster = _borrowing()
    controller(cluster).cycle()
    assert len(cluster.list(POD)) == 3


def test_a_victim_the_cluster_keeps_is_replaced_by_the_next_which_is_no_fault(controller: Make) -> None:
    cluster = _keep_a0(_borrowing())
    (target,) = controller(cluster).cycle().targets
    assert [stop.victim.gang.name for stop in target.preemption.stops] == ["a1"]
    assert "disruption budget b" in next(s.reason for s in target.preemption.verdicts[0].spared if s.key == "Pod/ns/a0")
    assert _condition(cluster)[:2] == ("True", "AsDecided")


def _condition(cluster: MemoryCluster) -> tuple[str, str, str]:
    found = json.loads(cluster.get(CONFIG_MAP, "gputally-fairshare", "gputally")["data"]["fake-pods.Preemption"])
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
    """All of them clear together with the cause."""
    own = {
        "403": {"status": 403, "body": {"message": 'pods "a0" is forbidden: pods/eviction is forbidden'}},
        "webhook": {"status": 403, "body": {"message": 'admission webhook "policy.example" denied the request'}},
        "503": {"status": 503, "body": {"message": "the server is currently unable to handle the request"}},
    }
    cluster = _borrowing()
    recorded = json.loads(shared("vectors/eviction_responses.json").read_text())
    cluster.answer = None if answer is None else {"retry_after": None, **(own.get(answer) or recorded[answer])}
    metrics = ControllerMetrics(clock)
    loop = controller(cluster, **rules)
    metrics.observe(loop.cycle())
    status, found, message = _condition(cluster)
    assert (status, found) == ("False", reason)
    assert words in message
    assert [e.reason for e in cluster.events if e.name == "gputally-fairshare" and e.type == "Warning"] == [reason]
    series = f'gputally_fairshare_preemption_blocked{{reason="{reason}",target="fake-pods"}}'
    degraded = 'gputally_fairshare_target_degraded{reason="PreemptionFailed",target="fake-pods"} 1.0'
    assert (degraded if answer == "503" else series) in metrics.render().decode()
    assert len(cluster.list(POD)) == 3
    cluster.answer = None
    if not rules:
        metrics.observe(loop.cycle())
        assert _condition(cluster)[:2] == ("True", "AsDecided")
        assert series not in metrics.render().decode()
        assert len(cluster.list(POD)) == 2


def test_victims_held_by_budgets_only_delay_the_one_that_may_be_evicted(controller: Make, clock: VirtualClock) -> None:
    """Each looks cheaper than the one that may be evicted, and has a disruption budget of its own."""
    kept = [
        fake_pod(f"k{i}", gpus=1, labels={"app": f"k{i}"}, annotations={CHECKPOINT: "2026-09-30T23:59:00Z"})
        for i in range(12)
    ]
    budgets = [budget_object(f"k{i}", 0, {"app": f"k{i}"}) for i in range(12)]
    goes = fake_pod("last", gpus=1)
    cluster = cluster_with(node_object("n0", 13), *kept, *budgets, goes, fake_pod("b0", "b", node="", gpus=1))
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
    cluster.load([fake_pod("b1", "b", node="", gpus=1)])
    for _ in range(3):
        clock.advance(VETO_VALID_MS // 2)
        loop.cycle()
    assert "k3" not in {pod["metadata"]["name"] for pod in cluster.list(POD)}


QUEUES = [{"name": "a", "deserved": 4, "refs": ["fake-pods:a"]}, {"name": "serving", "refs": ["fake-pods:serving"]}]


def _full() -> MemoryCluster:
    """a borrows 4 of 8 GPUs; a server without a quota waits above its share."""
    return cluster_with(node_object("n0", 8), fake_pod("a0"), fake_pod("a1"), fake_pod("chat", "serving", node=""))


@pytest.fixture
def rules() -> Policy:
    slo = {"name": "chat", "workload": "ns/chat", "query": "p99", "above": "50ms", "sustained": "1m"}
    preemption = {"mode": "enforce", "wait": "1h", "min_runtime": 0, "slos": [slo]}
    return policy_of(QUEUES, preemption=preemption)


def test_a_threshold_is_compared_with_what_is_measured(rules: Policy) -> None:
    above = "the latency of ns/chat is 80 ms, above 50 ms"
    assert latency_reason(rules, "ns/chat", None, "", None, 0) == "asked for by hand"
    assert latency_reason(rules, "ns/chat", 0.05, "", lambda *_: 0.05, 0) is None
    assert latency_reason(rules, "ns/chat", 0.05, "", lambda *_: 0.08, 0) == above
    with pytest.raises(NotPossible, match="the latency of ns/other is not known"):
        latency_reason(rules, "ns/other", 0.05, "", lambda *_: 0.08, 0)


@pytest.fixture
def ask(accountant: Accountant, clock: VirtualClock) -> Make:
    """Return a function that requests a preemption by command and returns its report."""

    def by_command(rules: Policy, cluster: MemoryCluster, mode: Any, job: str = "ns/chat") -> Any:
        call = PreemptionCall("", job, "the latency of ns/chat is 80 ms, above 50 ms", 0.0, "by hand")
        return by_hand(rules, accountant, cluster, clock, pods_of(cluster), call, mode)

    return by_command


def test_a_dry_run_shows_who_would_give_way(rules: Policy, ask: Make, accountant: Accountant) -> None:
    cluster, out = _full(), io.StringIO()
    Console(file=out, width=220).print(preemption_view(ask(rules, cluster, "dry-run")))
    for words in ("Pod/ns/a0", "would-stop", "the latency of ns/chat is 80 ms, above 50 ms"):
        assert words in out.getvalue()
    assert len(cluster.list(POD)) == 3
    assert accountant.decisions == []


def test_by_hand_acts_for_that_one_and_records_it(rules: Policy, ask: Make, accountant: Accountant) -> None:
    cluster = _full()
    cluster.load([fake_pod("other", "serving", node="")])
    assert [verdict.claimant for verdict in ask(rules, cluster, "enforce").verdicts] == ["Pod/ns/chat"]
    assert len(cluster.list(POD)) == 3
    assert {decision.kind for decision in accountant.decisions} == {"preemption"}


def test_by_hand_is_decided_on_what_a_cycle_sees(
    ask: Make, controller_of: Make, accountant: Accountant, clock: VirtualClock
) -> None:
    """The entitlements take account of a budget that is used up and of the law's memory."""
    queues = [*QUEUES, {"name": "b", "refs": ["fake-pods:b"]}]
    budget = {"name": "b", "queue": "b", "limit": "10", "exhausted": "no-over-quota"}
    rules = policy_of(queues, budgets=[budget], preemption={"mode": "dry-run", "wait": 0, "min_runtime": 0})
    accountant.spend(a=0.5, b=0.4, serving=0.1)
    cluster = cluster_with(
        node_object("n0", 8), fake_pod("a0"), fake_pod("b0", "b"), fake_pod("chat", "serving", node="")
    )
    controller = controller_of(rules, cluster, pods=lambda: pods_of(cluster), status_object=StatusObject())
    seen = []
    for spent in ("0", "10"):
        accountant.states = [budget_state("b", "b", limit="10", spent=spent)]
        by_cycle = controller.cycle().targets[0].preemption.situation
        by_command = ask(rules, cluster, "dry-run").situation
        assert by_command.accounts == by_cycle.accounts
        seen.append(by_cycle.accounts["b"])
        clock.advance(60_000)
    assert seen[0] != seen[1]


def test_limits_count_what_was_done_by_hand(ask: Make, controller_of: Make, clock: VirtualClock) -> None:
    """The next command counts it, and so does the controller that acts meanwhile, which keeps the note."""
    rules = policy_of(QUEUES, preemption={"mode": "enforce", "wait": 0, "min_runtime": 0, "per_cluster": 1})
    cluster, where = _full(), StatusObject()
    controller = controller_of(rules, cluster, pods=lambda: pods_of(cluster), status_object=where)
    controller.cycle()
    assert len(cluster.list(POD)) == 3  # above its share it only waits
    assert ask(rules, cluster, "enforce").past
    assert len(cluster.list(POD)) == 2
    cluster.load([fake_pod("a2"), fake_pod("early", "a", node="")])
    clock.advance(60_000)
    second = ask(rules, cluster, "enforce")
    words = "1 workloads of the cluster were stopped within the hour, and no more may be"
    assert {each.reason for each in second.verdicts[0].spared if each.limit} == {words}
    (target,) = controller.later().targets
    assert [past.key for past in target.preemption.situation.past] == ["Pod/ns/a0"]
    clock.advance(24 * 3_600_000)
    assert controller.cycle().targets[0].preemption.situation.past == ()


def test_nothing_is_stopped_by_hand_without_a_note_of_it(rules: Policy, ask: Make) -> None:
    objects = [obj for kind in (NODE, POD) for obj in _full().list(kind)]
    cluster = MemoryCluster(KINDS, objects, admit=lambda obj: "read only" if obj["kind"] == "ConfigMap" else None)
    with pytest.raises(ClusterError, match="read only"):
        ask(rules, cluster, "enforce")
    assert len(cluster.list(POD)) == 3


def test_old_usage_or_unknown_workloads_are_refused(rules: Policy, ask: Make, accountant: Accountant) -> None:
    with pytest.raises(NotPossible, match="no workload ns/nobody"):
        ask(rules, _full(), "dry-run", "ns/nobody")
    accountant.coverage = 0.1
    with pytest.raises(NotPossible, match="LowCoverage"):
        ask(rules, _full(), "dry-run")


def test_the_controller_makes_room_for_a_latency(rules: Policy, controller_of: Make, clock: VirtualClock) -> None:
    """Once the excess has lasted."""
    cluster = _full()
    alarms, metrics = Alarms(lambda _query, _at: 0.08), ControllerMetrics(clock)
    metrics.watch(alarms)
    controller = controller_of(rules, cluster, pods=lambda: pods_of(cluster), calls=alarms, observe=metrics.observe)
    controller.cycle()
    assert len(cluster.list(POD)) == 3
    controller.later()
    assert len(cluster.list(POD)) == 2
    shown = metrics.render().decode()
    labels = 'ground="above share",queue="a",result="stopped",target="fake-pods"'
    for line in (
        'gputally_slo_latency_seconds{slo="chat"} 0.08',
        f"gputally_fairshare_preempted_total{{{labels}}} 1.0",
        'gputally_fairshare_preemption_claims{outcome="preempts",target="fake-pods"} 1.0',
    ):
        assert line in shown


def test_the_command_says_what_is_missing(tmp_path: Any, capsys: Capsys) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("queues: [{name: a, refs: ['fake-pods:a']}]")
    assert main(["preempt", "--policy", str(path), "--for", "ns/chat", "--threshold", "50ms", "--dry-run"]) == 1
    assert "give --query and --prometheus" in capsys.readouterr().err
    assert main(["preempt", "--policy", str(path), "--for", "ns/chat", "--threshold", "fast", "--dry-run"]) == 1
    assert capsys.readouterr().err.startswith("gputally fairshare: --threshold: not a duration: 'fast'")


SLO = {"name": "chat", "queue": "serving", "query": "p99", "above": "50ms", "sustained": "5m", "gpus": 2}
MINUTE_MS = 60_000


def _slo_policy(**more: object) -> Policy:
    return Policy.model_validate({"queues": [{"name": "serving"}], "preemption": {"slos": [{**SLO, **more}]}})


def _alarms(values: dict[int, float | None]) -> Alarms:
    """Build latency alarms by minute; None: unknown."""

    def latency(_query: str, at_ms: int) -> float:
        value = values[at_ms // MINUTE_MS]
        if value is None:
            raise LatencyUnknown("no answer")
        return value

    return Alarms(latency)


def _minutes(alarms: Alarms, policy: Policy, count: int) -> list[int]:
    """Return the minutes in which the alarm requested room."""
    return [minute for minute in range(count) if alarms(policy, minute * MINUTE_MS)]


def test_it_asks_once_it_has_lasted() -> None:
    alarms = _alarms(dict.fromkeys(range(8), 0.08))
    assert _minutes(alarms, _slo_policy(), 8) == [5, 6, 7]
    why = "the latency of chat is 80 ms, above 50 ms for 7 min"
    assert alarms(_slo_policy(), 7 * MINUTE_MS) == (PreemptionCall("serving", "", why, 2.0),)


@pytest.mark.parametrize("between", [0.05, None])
def test_a_good_or_unknown_reading_starts_the_time_anew(between: float | None) -> None:
    alarms = _alarms(dict.fromkeys(range(12), 0.08) | {4: between})
    assert _minutes(alarms, _slo_policy(), 12) == [10, 11]


def test_a_fault_is_told_and_asks_for_nothing() -> None:
    alarms = _alarms({0: None})
    assert alarms(_slo_policy(sustained=0), 0) == ()
    assert alarms.faults == {"chat": "no answer"}


def _prometheus(status: int, body: str) -> Latency:
    return prometheus_latency("http://p", transport=httpx2.MockTransport(lambda _: httpx2.Response(status, text=body)))


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, '{"status":"error","error":"parse error"}', r"http://p: parse error \(query: q\)"),
        (502, "<html>", "http://p: status 502"),
        (200, '{"status":"success","data":{"resultType":"vector","result":[]}}', "http://p: q: no value"),
        (200, '{"status":"success","data":{"resultType":"scalar","result":[1,"NaN"]}}', "http://p: q: no value"),
    ],
)
def test_what_is_no_number_is_unknown(status: int, body: str, words: str) -> None:
    latency = _prometheus(status, body)
    with pytest.raises(LatencyUnknown, match=words):
        latency("q", 0)


def test_the_largest_value_counts() -> None:
    body = '{"status":"success","data":{"resultType":"vector","result":[{"value":[1,"0.02"]},{"value":[1,"0.7"]}]}}'
    assert _prometheus(200, body)("q", 0) == 0.7
    assert (seconds_text(0.0501), seconds_text(1.25)) == ("50.1 ms", "1.25 s")


def test_a_restart_records_a_standing_verdict_only_if_the_accountant_lacks_it(
    controller: Make, accountant: Accountant
) -> None:
    cluster = _keep_a0(_borrowing())
    cluster.load([budget_object("b", 0, {}), budget_object("c", 0, {})])  # which select every pod
    accountant.takes_decisions = False
    controller(cluster).cycle()
    accountant.takes_decisions = True
    counts = []
    for _ in range(3):
        loop = controller(cluster)
        loop.cycle()
        loop.later()
        counts.append(sum(each.subject == "Pod/ns/b0" for each in accountant.decisions))
    assert counts == [1, 1, 1]
