"""Idle reclaim in controller cycles: warning, grace period, reclaim, and the warning withdrawn once a pod works."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from accountant.wire.usage_cost_and_job_models import Accounts
from fairshare.controller.control_loop import Controller
from fairshare.core.gpu_demand import QUEUE_LABEL, read_pod
from fairshare.preemption.idle_reclaim import CHECKS_PER_GRACE, WARNING
from fairshare.preemption.preemption_cycle import replay_verdicts
from fairshare.targets import KINDS
from fairshare.targets.status_config_map import StatusObject
from gputally.base.clock import VirtualClock
from gputally.base.errors import AccountantUnavailable, Refused
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, POD, Object
from tests.fairshare.builders import object_of, policy_of
from tests.fairshare.conftest import Accountant
from tests.fairshare.preemption_cases import NOW_MS
from tests.fairshare.victims import node_object

Make = Callable[..., Any]
RULE: dict[str, Any] = {"mode": "enforce", "below": 0.05, "sustained": "2h", "grace": "30m"}
LONG_MS, GRACE_MS = 7_200_000, 1_800_000
END_MS = NOW_MS - 60_000


class Refusing(MemoryCluster):
    """A cluster in which pods cannot be written to."""

    def patch(self, *args: Any, **options: Any) -> Object:
        raise Refused('admission webhook "policy.example" denied the request')


def _pod(name: str, **metadata: Any) -> dict[str, Any]:
    """Ready for a day."""
    since = datetime.fromtimestamp(NOW_MS / 1000 - 86_400, UTC).isoformat()
    labels = {QUEUE_LABEL: "a", **metadata.pop("labels", {})}
    spec = {"nodeName": "n0", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]}
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": since}
    status = {"phase": "Running", "startTime": since, "conditions": [ready]}
    return object_of(POD, name, spec, status, **{"uid": f"uid-{name}", "labels": labels, **metadata})


class Lives:
    """What the ledger measures of two-GPU pods: busy and unknown parts by name, since an instant where one is
    given (before it a pod was idle)."""

    def __init__(self) -> None:
        self.busy: dict[str, tuple[int, float]] = {}
        self.unknown: dict[str, float] = {}
        self.names = ["nb", "web"]

    def __call__(self, start_ms: int, end_ms: int) -> Mapping[tuple[str, str], Accounts]:
        found = {}
        for name in self.names:
            since, part = self.busy.get(name, (0, 0.0))
            held = 2 * (end_ms - start_ms) * 1000
            busy = round(2 * max(0, end_ms - max(start_ms, since)) * 1000 * part)
            unknown = round(held * self.unknown.get(name, 0.0))
            found["ns", name] = Accounts(busy=busy, allocated_idle=held - busy - unknown, allocated_unknown=unknown)
        return found


@pytest.fixture
def lives_of(accountant: Accountant) -> Lives:
    found = Lives()
    found.busy["web"] = (0, 0.5)
    accountant.used = found
    return found


@pytest.fixture
def start(accountant: Accountant, clock: VirtualClock) -> Make:
    """A controller with the idle rule at queue a of n0."""

    def make(cluster: MemoryCluster, rule: Mapping[str, Any] | None = None, **rules: Any) -> Controller:
        given_ = {"mode": "enforce", "min_runtime": 0, "idle": RULE | dict(rule or {}), **rules}
        queues = [{"name": "a", "deserved": 8, "refs": ["policy:a"]}]
        return Controller(
            policy_of(queues, preemption=given_), accountant, cluster, clock, status_object=StatusObject(),
            pods=lambda: tuple(pod for obj in cluster.list(POD) if (pod := read_pod(obj)) is not None),
        )  # fmt: skip

    return make


def _cluster(*objects: dict[str, Any], of: type[MemoryCluster] = MemoryCluster) -> MemoryCluster:
    return of(KINDS, [node_object(), *objects])


def _names(cluster: MemoryCluster) -> list[str]:
    return [pod["metadata"]["name"] for pod in cluster.list(POD)]


def _told(cluster: MemoryCluster) -> list[tuple[str, str]]:
    return [(event.name, event.reason) for event in cluster.events if event.kind == POD]


def test_warning_then_grace_then_reclaim(
    start: Make, lives_of: Lives, clock: VirtualClock, accountant: Accountant
) -> None:
    cluster = _cluster(_pod("nb"), _pod("web"))
    loop = start(cluster)
    report = loop.cycle()
    assert report.targets[0].preemption.warned == 1
    assert _told(cluster) == [("nb", "Idle")]
    warning = cluster.get(POD, "nb", "ns")["metadata"]["annotations"][WARNING]
    assert warning == (
        "it was busy at most 0.0% of the last 120 min, less than 5 %: its GPUs are reclaimed after"
        " 2026-10-01T00:30:00.000Z unless they are used"
    )
    clock.advance(GRACE_MS - 60_000)
    loop.cycle()
    assert _names(cluster) == ["nb", "web"]
    clock.advance(60_000)
    report = start(cluster).cycle()  # a restart in between forgets no warning
    assert _names(cluster) == ["web"]
    (stop,) = report.targets[0].preemption.stops
    assert (stop.victim.ground, stop.effect.result) == ("idle", "stopped")
    assert stop.victim.lost_gpu_hours == pytest.approx(0.0)  # idle all its life
    made = {each.subject: each for each in accountant.decisions if each.kind == "preemption"}
    assert set(made) == {"*", "Idle/Pod/ns/nb", "Pod/ns/nb"}
    assert replay_verdicts(loop.policy, made["*"]) == report.targets[0].preemption.verdicts
    kept = json.loads(cluster.get(CONFIG_MAP, "gputally-fairshare", "gputally")["data"]["preempted"])
    assert [row[1] for row in kept] == ["Pod/ns/nb"]


def test_who_works_again_during_the_grace_is_forgiven(start: Make, lives_of: Lives, clock: VirtualClock) -> None:
    """Three minutes of work, 2.5 % of two hours: still below the threshold there, and forgiven all the same."""
    cluster = _cluster(_pod("nb"))
    loop = start(cluster)
    loop.cycle()
    clock.advance(600_000)
    lives_of.busy["nb"] = (clock.wall_ms(), 1.0)
    clock.advance(180_000)
    loop.cycle()
    assert _told(cluster) == [("nb", "Idle"), ("nb", "IdleNoMore")]
    assert WARNING not in cluster.get(POD, "nb", "ns")["metadata"].get("annotations", {})
    clock.advance(GRACE_MS)
    loop.cycle()
    assert _names(cluster) == ["nb"]


def test_unknown_use_causes_no_warning_and_an_unreachable_accountant_no_reclaim(
    start: Make, lives_of: Lives, clock: VirtualClock, accountant: Accountant
) -> None:
    cluster = _cluster(_pod("nb"))
    loop = start(cluster)
    lives_of.unknown["nb"] = 1.0
    loop.cycle()
    assert _told(cluster) == []
    lives_of.unknown.clear()
    clock.advance(GRACE_MS)
    loop.cycle()
    assert _told(cluster) == [("nb", "Idle")]
    clock.advance(GRACE_MS)
    accountant.age_ms = None
    loop.cycle()
    assert _names(cluster) == ["nb"]


def test_the_ledger_is_asked_a_few_times_in_a_grace_and_again_at_once_where_it_did_not_answer(
    start: Make, lives_of: Lives, clock: VirtualClock, accountant: Accountant
) -> None:
    asked: list[int] = []

    def used(start_ms: int, end_ms: int) -> Mapping[tuple[str, str], Accounts]:
        asked.append(end_ms)
        if len(asked) == 1:
            raise AccountantUnavailable("http://accountant:8080: connection refused")
        return lives_of(start_ms, end_ms)

    accountant.used = used
    loop = start(_cluster(_pod("nb")))
    for _ in range(30):
        loop.cycle()
        clock.advance(60_000)
    assert len(asked) == 1 + 2 * CHECKS_PER_GRACE  # no answer at first; then two spans every five minutes of thirty


def test_a_dry_run_reports_but_stops_no_pod_and_its_warning_does_not_count(
    start: Make, lives_of: Lives, clock: VirtualClock, accountant: Accountant
) -> None:
    cluster = _cluster(_pod("nb"))
    loop = start(cluster, {"mode": "dry-run"})
    loop.cycle()
    clock.advance(GRACE_MS)
    loop.cycle()
    assert _told(cluster) == [("nb", "WouldBeIdle"), ("nb", "WouldBePreempted")]
    assert "annotations" not in cluster.get(POD, "nb", "ns")["metadata"]
    assert {each.mode for each in accountant.decisions if each.kind == "preemption" and each.subject != "*"} == {
        "dry-run"
    }
    start(cluster).cycle()
    assert _names(cluster) == ["nb"]
    assert _told(cluster)[-1] == ("nb", "Idle")
    clock.advance(GRACE_MS)
    start(cluster, mode="dry-run").cycle()  # the target's own mode is the more careful one
    assert _names(cluster) == ["nb"]


@pytest.mark.parametrize(
    ("rule", "metadata"),
    [
        ({"exempt": {"labels": {"app": "chat"}}}, {"labels": {"app": "chat"}}),
        ({"exempt": {"annotations": {"keep": "*"}}}, {"annotations": {"keep": "1"}}),
        ({"exempt": {"namespaces": ["n?"]}}, {}),
        ({"exempt": {"priority": 0}}, {}),
        ({}, {"annotations": {"gputally.dev/preempt": "never"}}),
        ({"mode": "off"}, {}),
    ],
)
def test_the_exempt_are_not_even_warned(
    rule: dict[str, Any], metadata: dict[str, Any], start: Make, lives_of: Lives, clock: VirtualClock
) -> None:
    cluster = _cluster(_pod("nb", **metadata))
    loop = start(cluster, rule)
    for _ in range(3):
        loop.cycle()
        clock.advance(GRACE_MS)
    assert _told(cluster) == []
    assert _names(cluster) == ["nb"]


def test_an_exemption_written_during_the_grace_holds(start: Make, lives_of: Lives, clock: VirtualClock) -> None:
    cluster = _cluster(_pod("nb"))
    loop = start(cluster, {"exempt": {"labels": {"keep": "*"}}})
    loop.cycle()
    pod = cluster.get(POD, "nb", "ns")
    labels = {**pod["metadata"]["labels"], "keep": "1"}
    cluster.put({**pod, "metadata": {**pod["metadata"], "labels": labels}}, field_manager="owner")
    clock.advance(GRACE_MS)
    loop.cycle()
    assert _names(cluster) == ["nb"]


def test_a_warning_that_cannot_be_written_is_none(start: Make, lives_of: Lives, clock: VirtualClock) -> None:
    cluster = _cluster(_pod("nb"), of=Refusing)
    loop = start(cluster)
    report = loop.cycle()
    assert report.targets[0].preemption.faults == ('ns/nb: admission webhook "policy.example" denied the request',)
    told = {condition.type: (condition.status, condition.reason) for condition in report.targets[0].conditions}
    assert told["Preemption"] == ("False", "WarningNotWritten")
    clock.advance(GRACE_MS)
    loop.cycle()
    assert _names(cluster) == ["nb"]
