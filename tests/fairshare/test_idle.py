"""The idle rule: never without measured time, monotone, forgiving, exempting; and from warning to reclaim."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.preempting import IdleReclaimPolicy
from accountant.wire import Accounts, Policy
from agent.clock import VirtualClock
from fairshare.errors import AccountantUnavailable, Refused
from fairshare.kube.disruption import BUDGET
from fairshare.kube.kinds import CONFIG_MAP, NODE, POD, Object
from fairshare.kube.memory import MemoryCluster
from fairshare.kube.pods import QUEUE_LABEL, read_pod
from fairshare.loop import Controller
from fairshare.model import Gang, Pod
from fairshare.preempting import idle
from fairshare.preempting.idlewatch import LOOKS, WARNING
from fairshare.preempting.preempter import replay
from fairshare.preempting.rulings import Idleness, Situation, Use, read, write
from fairshare.preemption import decide
from fairshare.status import StatusObject
from tests.effort import examples
from tests.fairshare.conftest import Accountant
from tests.fairshare.preempting import NOW_MS, gang, policy, situation

Make = Callable[..., Any]
RULE: dict[str, Any] = {"mode": "enforce", "below": 0.05, "sustained": "2h", "grace": "30m"}
LONG_MS, GRACE_MS = 7_200_000, 1_800_000
END_MS = NOW_MS - 60_000


def _ready(each: Gang, since_ms: int = NOW_MS - 10 * LONG_MS) -> Gang:
    return replace(each, pods=tuple(replace(pod, ready_ms=since_ms) for pod in each.pods))


def _use(pod: Pod, span_ms: int, busy: float, unknown: float = 0.0) -> Use:
    held = pod.gpus * span_ms * 1000
    return Use(round(held * busy), round(held * (1 - busy - unknown)), round(held * unknown))


def _idleness(gangs: list[Gang], busy: Mapping[str, float] | None = None, **more: Any) -> Idleness:
    """Every pod by its busy part over both spans; without one, idle all the time. All were warned long ago."""
    pods = [pod for each in gangs for pod in each.pods]
    parts = {pod.uid: (busy or {}).get(pod.uid, 0.0) for pod in pods}
    fields: dict[str, Any] = {
        "lasting": {pod.uid: _use(pod, LONG_MS, parts[pod.uid]) for pod in pods},
        "recent": {pod.uid: _use(pod, GRACE_MS, parts[pod.uid]) for pod in pods},
        "warned": {pod.uid: NOW_MS - GRACE_MS for pod in pods},
    }
    return Idleness(END_MS, **fields | more)


def _here(rules: Policy, gangs: list[Gang], idleness: Idleness) -> Situation:
    return situation(rules, {"n0": 16}, gangs, {"a": 16}, idle=idleness)


def _gone(rules: Policy, gangs: list[Gang], idleness: Idleness) -> set[str]:
    return {pod.uid for each in decide(rules, _here(rules, gangs, idleness)) for v in each.victims for pod in v.pods}


def test_the_reason_says_what_was_measured_and_what_is_lost() -> None:
    rules = policy({"a": 16}, idle=RULE)
    gangs = [_ready(gang("nb", "a", [("n0", 2)], hours=20))]
    (verdict,) = decide(rules, _here(rules, gangs, _idleness(gangs, {"nb-0": 0.012}, worked={"nb-0": 3.0})))
    (victim,) = verdict.victims
    assert (verdict.claimant, verdict.trigger, victim.ground, victim.whole) == ("Idle/Gang/ns/nb", "idle", "idle", True)
    assert verdict.reason == "does not use 2 GPUs: 2 are reclaimed"
    assert victim.reason == (
        "its 2 GPUs were busy at most 1.2% of the last 120 min, less than 5 %; its owner was warned 30 min ago;"
        " 3.0 GPU-hours of work since the start are lost"
    )


def test_without_a_rule_nobody_is_idle() -> None:
    gangs = [_ready(gang("nb", "a", [("n0", 2)]))]
    assert _gone(policy({"a": 16}), gangs, _idleness(gangs)) == set()


@pytest.mark.parametrize(
    "change",
    [
        {"lasting": {}},  # no row at all
        {"recent": {}},
        {"lasting": {"nb-0": Use(0, 0, 2 * LONG_MS * 1000)}},  # held, allocation only
        {"lasting": {"nb-0": Use(0, LONG_MS * 1000, 0)}},  # half of its GPUs, or of the time
        {"recent": {"nb-0": Use(0, 0, 2 * GRACE_MS * 1000)}},
        {"warned": {}},
        {"warned": {"nb-0": NOW_MS - GRACE_MS + 1}},
        {"exempt": {"nb-0": "its label x exempts it"}},
    ],
)
def test_what_never_triggers_it(change: dict[str, Any]) -> None:
    rules = policy({"a": 16}, idle=RULE)
    gangs = [_ready(gang("nb", "a", [("n0", 2)]))]
    assert _gone(rules, gangs, _idleness(gangs)) == {"nb-0"}
    assert _gone(rules, gangs, _idleness(gangs, **change)) == set()


def test_who_has_not_been_ready_for_so_long_is_left_alone() -> None:
    rules = policy({"a": 16}, idle=RULE)
    for since in (None, END_MS - LONG_MS + 1):
        gangs = [gang("nb", "a", [("n0", 2)])]
        gangs = [replace(gangs[0], pods=(replace(gangs[0].pods[0], ready_ms=since),))]
        assert _gone(rules, gangs, _idleness(gangs)) == set()


def test_one_pod_that_works_keeps_its_gang_and_idle_surplus_goes_alone() -> None:
    rules = policy({"a": 16}, idle=RULE)
    whole = [_ready(gang("train", "a", [("n0", 1)] * 4))]
    assert _gone(rules, whole, _idleness(whole, {"train-2": 0.9})) == set()
    elastic = [_ready(gang("ray", "a", [("n0", 1)] * 4, least=2))]
    shed = {pod.uid for part in idle.bundles(elastic[0], NOW_MS) if not part.whole for pod in part.pods}
    core = {pod.uid for pod in elastic[0].pods} - shed
    assert _gone(rules, elastic, _idleness(elastic, dict.fromkeys(core, 0.9))) == shed
    (verdict,) = decide(rules, _here(rules, elastic, _idleness(elastic)))
    assert [(victim.whole, victim.gpus) for victim in verdict.victims] == [(True, 4.0)]


def test_a_gang_that_waits_for_the_rest_of_it_is_not_idle() -> None:
    rules = policy({"a": 16}, idle=RULE)
    gangs = [_ready(gang("train", "a", [("n0", 1)] * 2, waiting=[1.0]))]
    assert _gone(rules, gangs, _idleness(gangs)) == set()


@pytest.mark.parametrize(
    ("options", "limit"),
    [({"per_team": 0}, "per-team"), ({"per_cluster": 0}, "per-cluster"), ({"lost_gpu_hours": 1}, "lost-hours")],
)
def test_it_counts_against_every_limit(options: dict[str, Any], limit: str) -> None:
    rules = policy({"a": 16}, idle=RULE, **options)
    gangs = [_ready(gang("nb", "a", [("n0", 2)], hours=20))]
    (verdict,) = decide(rules, _here(rules, gangs, _idleness(gangs)))
    assert (verdict.outcome, [each.limit for each in verdict.spared]) == ("denied", [limit])


def test_only_work_that_was_done_is_lost() -> None:
    """Twenty hours of two GPUs are forty, but the ledger saw two of them busy: the limit is no matter."""
    rules = policy({"a": 16}, idle=RULE, lost_gpu_hours=5)
    gangs = [_ready(gang("nb", "a", [("n0", 2)], hours=20))]
    assert _gone(rules, gangs, _idleness(gangs)) == set()
    assert _gone(rules, gangs, _idleness(gangs, worked={"nb-0": 2.0})) == {"nb-0"}


def test_who_has_given_way_to_somebody_is_not_reclaimed_again() -> None:
    gangs = [_ready(gang("a0", "a", [("n0", 16)])), gang("b0", "b", waiting=[8])]
    rules = policy({"a": 0, "b": 16}, idle=RULE)
    here = situation(rules, {"n0": 16}, gangs, {"a": 0, "b": 16}, idle=_idleness(gangs))
    verdicts = decide(rules, here)
    assert [(each.trigger, len(each.victims)) for each in verdicts] == [("waits", 1)]


# --- laws -------------------------------------------------------------------------------------------


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[Gang], Idleness]:
    """Some gangs, and whatever a ledger may say of their pods."""
    gangs = []
    for i in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 3))
        least = draw(st.sampled_from([None, 1]))
        made = gang(
            f"g{i}", "a", [("n0", draw(st.sampled_from([0.5, 1.0, 2.0])))] * size, least=least,
            priority=draw(st.integers(0, 2)), preemptible=draw(st.sampled_from([True, True, False])),
        )  # fmt: skip
        gangs.append(_ready(made, draw(st.sampled_from([NOW_MS - 10 * LONG_MS, NOW_MS - LONG_MS]))))
    parts = st.sampled_from([0.0, 0.0, 0.01, 0.049, 0.05, 0.06, 0.5, 1.0])
    lasting, recent, warned = {}, {}, {}
    for pod in (pod for each in gangs for pod in each.pods):
        for span, spans in ((LONG_MS, lasting), (GRACE_MS, recent)):
            if draw(st.sampled_from([True] * 5 + [False])):
                busy = draw(parts)
                spans[pod.uid] = _use(pod, span, busy, min(1 - busy, draw(parts)))
        if draw(st.sampled_from([True] * 4 + [False])):
            warned[pod.uid] = NOW_MS - draw(st.sampled_from([GRACE_MS, 2 * GRACE_MS, GRACE_MS - 1]))
    return gangs, Idleness(END_MS, lasting, recent, warned)


@settings(max_examples=examples(20, 120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives(), st.sampled_from([0.01, 0.05, 0.5, 1.0]))
def test_never_without_measured_idle_time(case: tuple[list[Gang], Idleness], below: float) -> None:
    """Whoever goes was warned, and measured idle for more than the rest of the time, over both spans."""
    gangs, idleness = case
    rules = policy({"a": 16}, idle=RULE | {"below": below})
    pods = {pod.uid: pod for each in gangs for pod in each.pods}
    for uid in _gone(rules, gangs, idleness):
        for span, uses in ((LONG_MS, idleness.lasting), (GRACE_MS, idleness.recent)):
            assert uses[uid].idle_us > (1 - below) * pods[uid].gpus * span * 1000 - 1
        assert NOW_MS - idleness.warned[uid] >= GRACE_MS
    blind = {uid: Use(0, 0, use.busy_us + use.idle_us + use.unknown_us) for uid, use in idleness.lasting.items()}
    assert _gone(rules, gangs, replace(idleness, lasting=blind)) == set()


@settings(max_examples=examples(20, 120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives(), st.data())
def test_monotone(case: tuple[list[Gang], Idleness], data: st.DataObject) -> None:
    """More busy or unknown time, a lower threshold, a longer grace: never more that go."""
    gangs, idleness = case
    before = _gone(policy({"a": 16}, idle=RULE), gangs, idleness)
    uses = dict(data.draw(st.sampled_from([idleness.lasting, idleness.recent])))
    name = "lasting" if uses == idleness.lasting else "recent"
    if uses:
        uid = data.draw(st.sampled_from(sorted(uses)))
        moved = data.draw(st.integers(0, uses[uid].idle_us))
        known = data.draw(st.booleans())
        use = uses[uid]
        uses[uid] = Use(use.busy_us + moved * known, use.idle_us - moved, use.unknown_us + moved * (not known))
    busier = replace(idleness, **{name: uses})
    rules = policy({"a": 16}, idle=RULE)
    whole = {pod.uid for each in gangs for pod in each.pods}
    assert _gone(rules, gangs, busier) <= before
    assert _gone(policy({"a": 16}, idle=RULE | {"below": 0.02}), gangs, idleness) <= before
    later = replace(idleness, warned={uid: at + 1 for uid, at in idleness.warned.items()})
    assert _gone(rules, gangs, later) <= before <= whole


@settings(max_examples=examples(16, 100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives(), st.data())
def test_the_exempt_are_never_chosen(case: tuple[list[Gang], Idleness], data: st.DataObject) -> None:
    gangs, idleness = case
    uids = sorted(pod.uid for each in gangs for pod in each.pods)
    exempt = data.draw(st.sets(st.sampled_from(uids)))
    rules = policy({"a": 16}, idle=RULE | {"exempt": {"priority": 1}})
    gone = _gone(rules, gangs, replace(idleness, exempt=dict.fromkeys(exempt, "its label exempts it")))
    low = {pod.uid for each in gangs if each.priority < 1 and each.preemptible for pod in each.pods}
    assert gone <= low - exempt
    assert _gone(policy({"a": 16}, idle=RULE | {"exempt": {"namespaces": ["n*"]}}), gangs, idleness) == set()


@settings(max_examples=examples(20, 120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives())
def test_a_recorded_idleness_is_decided_again_the_same(case: tuple[list[Gang], Idleness]) -> None:
    rules = policy({"a": 16}, idle=RULE)
    here = _here(rules, *case)
    assert decide(rules, read(json.loads(json.dumps(write(here))))) == decide(rules, here)


@pytest.mark.parametrize(
    ("exempt", "reason"),
    [
        ({"labels": {"app": "chat"}}, "its label app exempts it"),
        ({"labels": {"app": "*"}}, "its label app exempts it"),
        ({"labels": {"app": "other"}}, None),
        ({"annotations": {"keep": "*"}}, "its annotation keep exempts it"),
        ({}, None),
    ],
)
def test_exemptions_by_what_the_owner_wrote(exempt: dict[str, Any], reason: str | None) -> None:
    rule = IdleReclaimPolicy.model_validate({"exempt": exempt})
    pod = {"metadata": {"name": "p", "labels": {"app": "chat"}, "annotations": {"keep": "yes"}}}
    assert idle.exemption(rule.exempt, pod) == reason


# --- a controller's cycles --------------------------------------------------------------------------


class Refusing(MemoryCluster):
    """A cluster in which pods cannot be written to."""

    def patch(self, *args: Any, **options: Any) -> Object:
        raise Refused('admission webhook "policy.example" denied the request')


def _pod(name: str, **metadata: Any) -> dict[str, Any]:
    """Ready for a day."""
    since = datetime.fromtimestamp(NOW_MS / 1000 - 86_400, UTC).isoformat()
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", **metadata,
                     "labels": {QUEUE_LABEL: "a", **metadata.get("labels", {})}},
        "spec": {"nodeName": "n0", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
        "status": {"phase": "Running", "startTime": since,
                   "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": since}]},
    }  # fmt: skip


NODES = {
    "apiVersion": "v1", "kind": "Node", "metadata": {"name": "n0"},
    "status": {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]},
}  # fmt: skip


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
def start(accountant: Accountant, clock: VirtualClock, policy_of: Make) -> Make:
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
    return of([NODE, CONFIG_MAP, POD, BUDGET], [NODES, *objects])


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
    assert replay(loop.policy, made["*"]) == report.targets[0].preemption.verdicts
    kept = json.loads(cluster.get(CONFIG_MAP, "gputally-fairshare", "gputally-system")["data"]["preempted"])
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


def test_unknown_use_warns_nobody_and_a_silent_accountant_reclaims_nothing(
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
    assert len(asked) == 1 + 2 * LOOKS  # no answer at first; then two spans every five minutes of thirty


def test_a_dry_run_tells_and_stops_nobody_and_its_warning_counts_for_nothing(
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
    clock.advance(GRACE_MS)
    loop.cycle()
    assert _names(cluster) == ["nb"]
