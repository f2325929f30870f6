"""Preemption by command, and by a latency objective in the controller's cycle."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from accountant.wire.policy_models import Policy
from fairshare.__main__ import main, preemption_view
from fairshare.controller.control_loop import Controller
from fairshare.controller.controller_metrics import Metrics
from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import Pod
from fairshare.preemption.preemption_controller import NotPossible, by_hand, latency_reason
from fairshare.preemption.preemption_types import PreemptionCall
from fairshare.preemption.service_latency_objectives import Alarms
from fairshare.targets import ADAPTERS, KINDS
from fairshare.targets.status_config_map import StatusObject
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import NODE, POD
from tests.fairshare.builders import policy_of
from tests.fairshare.conftest import Accountant
from tests.fairshare.victims import cluster_with, node_object, pod_object

QUEUES = [{"name": "a", "deserved": 4, "refs": ["policy:a"]}, {"name": "serving", "refs": ["policy:serving"]}]


def _full() -> MemoryCluster:
    """a borrows 4 of 8 GPUs; a server without a quota waits, above its share."""
    return cluster_with(
        node_object("n0", 8), pod_object("a0"), pod_object("a1"), pod_object("chat", "serving", node="")
    )


def _seen(cluster: MemoryCluster) -> tuple[Pod, ...]:
    return tuple(pod for obj in cluster.list(POD) if (pod := read_pod(obj)) is not None)


@pytest.fixture
def rules() -> Policy:
    slo = {"name": "chat", "workload": "ns/chat", "query": "p99", "above": "50ms", "sustained": "1m"}
    preemption = {"mode": "enforce", "wait": "1h", "min_runtime": 0, "slos": [slo]}
    found: Policy = policy_of(QUEUES, preemption=preemption)
    return found


def test_a_threshold_is_compared_with_what_is_measured(rules: Policy) -> None:
    assert latency_reason(rules, "ns/chat", None, "", None, 0) == "asked for by hand"
    assert latency_reason(rules, "ns/chat", 0.05, "", lambda *_: 0.05, 0) is None
    assert (
        latency_reason(rules, "ns/chat", 0.05, "", lambda *_: 0.08, 0) == "the latency of ns/chat is 80 ms, above 50 ms"
    )
    with pytest.raises(NotPossible, match="the latency of ns/other is not known"):
        latency_reason(rules, "ns/other", 0.05, "", lambda *_: 0.08, 0)


def _ask(
    rules: Policy,
    cluster: MemoryCluster,
    accountant: Accountant,
    clock: VirtualClock,
    mode: Any,
    job: str = "ns/chat",
) -> Any:
    call = PreemptionCall("", job, "the latency of ns/chat is 80 ms, above 50 ms", 0.0, "by hand")
    return by_hand(rules, accountant, cluster, clock, ADAPTERS, _seen(cluster), call, mode)


def test_a_dry_run_shows_who_would_give_way(rules: Policy, accountant: Accountant, clock: VirtualClock) -> None:
    cluster = _full()
    report = _ask(rules, cluster, accountant, clock, "dry-run")
    out = io.StringIO()
    Console(file=out, width=220).print(preemption_view(report))
    assert "Pod/ns/a0" in out.getvalue()
    assert "would-stop" in out.getvalue()
    assert "the latency of ns/chat is 80 ms, above 50 ms" in out.getvalue()
    assert len(cluster.list(POD)) == 3
    assert accountant.decisions == []


def test_by_hand_acts_for_that_one_and_records_it(rules: Policy, accountant: Accountant, clock: VirtualClock) -> None:
    cluster = _full()
    cluster.load([pod_object("other", "serving", node="")])
    report = _ask(rules, cluster, accountant, clock, "enforce")
    assert [verdict.claimant for verdict in report.verdicts] == ["Pod/ns/chat"]
    assert len(cluster.list(POD)) == 3
    assert {decision.kind for decision in accountant.decisions} == {"preemption"}


def test_limits_count_what_was_done_by_hand(accountant: Accountant, clock: VirtualClock) -> None:
    """By the next command, and by the controller that acts meanwhile, which leaves the note alone."""
    rules = policy_of(QUEUES, preemption={"mode": "enforce", "wait": 0, "min_runtime": 0, "per_cluster": 1})
    cluster, where = _full(), StatusObject()
    controller = Controller(rules, accountant, cluster, clock, pods=lambda: _seen(cluster), status_object=where)
    controller.cycle()
    assert len(cluster.list(POD)) == 3  # above its share it only waits
    assert _ask(rules, cluster, accountant, clock, "enforce").past
    assert len(cluster.list(POD)) == 2
    cluster.load([pod_object("a2"), pod_object("early", "a", node="")])
    clock.advance(60_000)
    second = _ask(rules, cluster, accountant, clock, "enforce")
    words = "1 workloads of the cluster were stopped within the hour, and no more may be"
    assert {each.reason for each in second.verdicts[0].spared if each.limit} == {words}
    clock.advance(60_000)
    (target,) = controller.cycle().targets
    assert target.preemption is not None
    assert [past.key for past in target.preemption.situation.past] == ["Pod/ns/a0"]
    clock.advance(24 * 3_600_000)
    assert controller.cycle().targets[0].preemption.situation.past == ()  # type: ignore[union-attr]


def test_a_note_that_cannot_be_written_is_said(rules: Policy, accountant: Accountant, clock: VirtualClock) -> None:
    objects = [obj for kind in (NODE, POD) for obj in _full().list(kind)]
    cluster = MemoryCluster(KINDS, objects, admit=lambda obj: "read only" if obj["kind"] == "ConfigMap" else None)
    report = _ask(rules, cluster, accountant, clock, "enforce")
    assert "the controller's limits will not know of it" in report.faults[0]


def test_old_usage_and_unknown_workloads_are_refused(
    rules: Policy, accountant: Accountant, clock: VirtualClock
) -> None:
    with pytest.raises(NotPossible, match="no workload ns/nobody"):
        _ask(rules, _full(), accountant, clock, "dry-run", "ns/nobody")
    accountant.coverage = 0.1
    with pytest.raises(NotPossible, match="LowCoverage"):
        _ask(rules, _full(), accountant, clock, "dry-run")


def test_the_controller_makes_room_once_a_latency_has_lasted(
    rules: Policy, accountant: Accountant, clock: VirtualClock
) -> None:
    cluster = _full()
    alarms, metrics = Alarms(lambda _query, _at: 0.08), Metrics(clock)
    metrics.watch(alarms)
    controller = Controller(
        rules, accountant, cluster, clock, pods=lambda: _seen(cluster), calls=alarms, observe=metrics.observe
    )
    controller.cycle()
    assert len(cluster.list(POD)) == 3
    clock.advance(60_000)
    controller.cycle()
    assert len(cluster.list(POD)) == 2
    shown = metrics.render().decode()
    assert 'gputally_slo_latency_seconds{slo="chat"} 0.08' in shown
    labels = 'ground="above share",queue="a",result="stopped",target="kube-scheduler"'
    assert f"gputally_fairshare_preempted_total{{{labels}}} 1.0" in shown
    assert 'gputally_fairshare_preemption_claims{outcome="preempts",target="kube-scheduler"} 1.0' in shown


def test_the_command_says_what_is_missing(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("queues: [{name: a, refs: ['policy:a']}]")
    assert main(["preempt", "--policy", str(path), "--for", "ns/chat", "--threshold", "50ms", "--dry-run"]) == 1
    assert "give --query and --prometheus" in capsys.readouterr().err
    assert main(["preempt", "--policy", str(path), "--for", "ns/chat", "--threshold", "fast", "--dry-run"]) == 1
    assert capsys.readouterr().err.startswith("gputally fairshare: --threshold: not a duration: 'fast'")
