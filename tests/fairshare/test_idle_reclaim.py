"""The idle rule, and idle reclaim in controller cycles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import IdleReclaimPolicy, Policy
from accountant.wire.usage_cost_and_job_models import Accounts
from fairshare.controller.control_loop import Controller
from fairshare.core.queues_and_weights import Gang, Pod
from fairshare.preemption import idle_reclaim
from fairshare.preemption.idle_reclaim import CHECKS_PER_GRACE, WARNING
from fairshare.preemption.preemption_cycle import replay_verdicts
from fairshare.preemption.preemption_types import Idleness, PodUse, PreemptionInputs, inputs_from_json, inputs_to_json
from fairshare.preemption.victim_selection import decide
from fairshare.targets.status_config_map import StatusObject
from gputally.base.clock import VirtualClock
from gputally.base.errors import AccountantUnavailable, ClusterRefused, ClusterUnavailable, Conflict
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, POD
from gputally.testing.fake_scheduler import labelled
from tests.fairshare.builders import Failing, node_object, object_of, policy_of
from tests.fairshare.conftest import Accountant, Make
from tests.fairshare.failing_writes import FaultAt
from tests.fairshare.observations import pods_of, reasons_of
from tests.fairshare.preemption_cases import NOW_MS, gang, policy, situation
from tests.fairshare.scheduler_kinds import KINDS
from tests.hypothesis_examples import examples

RULE: dict[str, Any] = {"mode": "enforce", "below": 0.05, "sustained": "2h", "grace": "30m"}
RULES = policy({"a": 16}, idle=RULE)
LONG_MS, GRACE_MS = 7_200_000, 1_800_000
END_MS = NOW_MS - 60_000


def _ready(each: Gang, since_ms: int | None = NOW_MS - 10 * LONG_MS) -> Gang:
    return replace(each, pods=tuple(replace(pod, ready_ms=since_ms) for pod in each.pods))


def _use(pod: Pod, span_ms: int, busy: float, unknown: float = 0.0) -> PodUse:
    held = pod.gpus * span_ms * 1000
    return PodUse(round(held * busy), round(held * (1 - busy - unknown)), round(held * unknown))


def _idleness(gangs: list[Gang], busy: Mapping[str, float] | None = None, **more: Any) -> Idleness:
    """Build the idleness of every pod from its busy share over both spans; without one, always idle. All were warned
    long ago."""
    pods = [pod for each in gangs for pod in each.pods]
    parts = {pod.uid: (busy or {}).get(pod.uid, 0.0) for pod in pods}
    fields: dict[str, Any] = {
        "lasting": {pod.uid: _use(pod, LONG_MS, parts[pod.uid]) for pod in pods},
        "recent": {pod.uid: _use(pod, GRACE_MS, parts[pod.uid]) for pod in pods},
        "warned": {pod.uid: NOW_MS - GRACE_MS for pod in pods},
    }
    return Idleness(END_MS, **fields | more)


def _here(rules: Policy, gangs: list[Gang], idleness: Idleness) -> PreemptionInputs:
    return situation(rules, {"n0": 16}, gangs, {"a": 16}, idle=idleness)


def _gone(gangs: list[Gang], idleness: Idleness, rules: Policy = RULES) -> set[str]:
    return {pod.uid for each in decide(rules, _here(rules, gangs, idleness)) for v in each.victims for pod in v.pods}


def _notebook(hours: float = 1.0, **ready: Any) -> list[Gang]:
    return [_ready(gang("nb", "a", [("n0", 2)], hours=hours), **ready)]


def _law(few: int, many: int) -> Any:
    """Return the number of examples for a law."""
    return settings(max_examples=examples(few, many))


def test_the_reason_says_what_was_measured_and_what_is_lost() -> None:
    gangs = _notebook(hours=20)
    (verdict,) = decide(RULES, _here(RULES, gangs, _idleness(gangs, {"nb-0": 0.012}, worked={"nb-0": 3.0})))
    (victim,) = verdict.victims
    assert (verdict.claimant, verdict.trigger, victim.ground, victim.whole) == ("Idle/Gang/ns/nb", "idle", "idle", True)
    assert verdict.reason == "does not use 2 GPUs: 2 are reclaimed"
    assert victim.reason == (
        "its 2 GPUs were busy at most 1.2% of the last 120 min, less than 5 %; its owner was warned 30 min ago;"
        " 3.0 GPU-hours of work since the start are lost"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"lasting": {}},  # no row at all
        {"recent": {}},
        {"lasting": {"nb-0": PodUse(0, 0, 2 * LONG_MS * 1000)}},  # held, allocation only
        {"lasting": {"nb-0": PodUse(0, LONG_MS * 1000, 0)}},  # half of its GPUs, or of the time
        {"recent": {"nb-0": PodUse(0, 0, 2 * GRACE_MS * 1000)}},
        {"warned": {}},
        {"warned": {"nb-0": NOW_MS - GRACE_MS + 1}},
        {"exempt": {"nb-0": "its label x exempts it"}},
    ],
)
def test_what_never_triggers_it(change: dict[str, Any]) -> None:
    gangs = _notebook()
    assert _gone(gangs, _idleness(gangs)) == {"nb-0"}
    assert _gone(gangs, _idleness(gangs, **change)) == set()


@pytest.mark.parametrize(
    ("gangs", "rules"),
    [
        (_notebook(), policy({"a": 16})),
        (_notebook(since_ms=None), RULES),
        (_notebook(since_ms=END_MS - LONG_MS + 1), RULES),
        ([_ready(gang("train", "a", [("n0", 1)] * 2, waiting=[1.0]))], RULES),
    ],
    ids=["no rule", "not ready", "ready for less than the span", "a gang that waits for the rest of it"],
)
def test_what_is_not_idle(gangs: list[Gang], rules: Policy) -> None:
    assert _gone(gangs, _idleness(gangs), rules) == set()


def test_one_pod_that_works_keeps_its_gang_and_idle_surplus_goes_alone() -> None:
    whole = [_ready(gang("train", "a", [("n0", 1)] * 4))]
    assert _gone(whole, _idleness(whole, {"train-2": 0.9})) == set()
    elastic = [_ready(gang("ray", "a", [("n0", 1)] * 4, least=2))]
    shed = {pod.uid for part in idle_reclaim.bundles(elastic[0], NOW_MS) if not part.whole for pod in part.pods}
    core = {pod.uid for pod in elastic[0].pods} - shed
    assert _gone(elastic, _idleness(elastic, dict.fromkeys(core, 0.9))) == shed
    (verdict,) = decide(RULES, _here(RULES, elastic, _idleness(elastic)))
    assert [(victim.whole, victim.gpus) for victim in verdict.victims] == [(True, 4.0)]


@pytest.mark.parametrize(
    ("options", "limit"),
    [({"per_team": 0}, "per-team"), ({"per_cluster": 0}, "per-cluster"), ({"lost_gpu_hours": 1}, "lost-hours")],
)
def test_it_counts_against_every_limit(options: dict[str, Any], limit: str) -> None:
    rules = policy({"a": 16}, idle=RULE, **options)
    gangs = _notebook(hours=20)
    (verdict,) = decide(rules, _here(rules, gangs, _idleness(gangs)))
    assert (verdict.outcome, [each.limit for each in verdict.spared]) == ("denied", [limit])


def test_only_work_that_was_done_is_lost() -> None:
    """Twenty hours of two GPUs are forty, but the ledger measured two of them busy: the limit does not apply."""
    rules = policy({"a": 16}, idle=RULE, lost_gpu_hours=5)
    gangs = _notebook(hours=20)
    assert _gone(gangs, _idleness(gangs), rules) == set()
    assert _gone(gangs, _idleness(gangs, worked={"nb-0": 2.0}), rules) == {"nb-0"}


def test_a_preempted_workload_is_not_reclaimed_as_idle_too() -> None:
    gangs = [_ready(gang("a0", "a", [("n0", 16)])), gang("b0", "b", waiting=[8])]
    rules = policy({"a": 0, "b": 16}, idle=RULE)
    verdicts = decide(rules, situation(rules, {"n0": 16}, gangs, {"a": 0, "b": 16}, idle=_idleness(gangs)))
    assert [(each.trigger, len(each.victims)) for each in verdicts] == [("waits", 1)]


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[Gang], Idleness]:
    """Generate some gangs, and any report of the ledger about their pods."""
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


@_law(20, 120)
@given(lives(), st.sampled_from([0.01, 0.05, 0.5, 1.0]))
def test_never_without_measured_idle_time(case: tuple[list[Gang], Idleness], below: float) -> None:
    """Each victim was warned, and its measured idle time exceeds the rest over both spans."""
    gangs, idleness = case
    rules = policy({"a": 16}, idle=RULE | {"below": below})
    pods = {pod.uid: pod for each in gangs for pod in each.pods}
    for uid in _gone(gangs, idleness, rules):
        for span, uses in ((LONG_MS, idleness.lasting), (GRACE_MS, idleness.recent)):
            assert uses[uid].idle_us > (1 - below) * pods[uid].gpus * span * 1000 - 1
        assert NOW_MS - idleness.warned[uid] >= GRACE_MS
    blind = {uid: PodUse(0, 0, use.busy_us + use.idle_us + use.unknown_us) for uid, use in idleness.lasting.items()}
    assert _gone(gangs, replace(idleness, lasting=blind), rules) == set()


@_law(20, 120)
@given(lives(), st.data())
def test_monotone(case: tuple[list[Gang], Idleness], data: st.DataObject) -> None:
    """More busy or unknown time, a lower threshold, a longer grace: never more victims."""
    gangs, idleness = case
    before = _gone(gangs, idleness)
    uses = dict(data.draw(st.sampled_from([idleness.lasting, idleness.recent])))
    name = "lasting" if uses == idleness.lasting else "recent"
    if uses:
        uid = data.draw(st.sampled_from(sorted(uses)))
        moved = data.draw(st.integers(0, uses[uid].idle_us))
        known = data.draw(st.booleans())
        use = uses[uid]
        uses[uid] = PodUse(use.busy_us + moved * known, use.idle_us - moved, use.unknown_us + moved * (not known))
    busier = replace(idleness, **{name: uses})
    whole = {pod.uid for each in gangs for pod in each.pods}
    assert _gone(gangs, busier) <= before
    assert _gone(gangs, idleness, policy({"a": 16}, idle=RULE | {"below": 0.02})) <= before
    later = replace(idleness, warned={uid: at + 1 for uid, at in idleness.warned.items()})
    assert _gone(gangs, later) <= before <= whole


@_law(16, 100)
@given(lives(), st.data())
def test_the_exempt_are_never_chosen(case: tuple[list[Gang], Idleness], data: st.DataObject) -> None:
    gangs, idleness = case
    uids = sorted(pod.uid for each in gangs for pod in each.pods)
    exempt = data.draw(st.sets(st.sampled_from(uids)))
    rules = policy({"a": 16}, idle=RULE | {"exempt": {"priority": 1}})
    gone = _gone(gangs, replace(idleness, exempt=dict.fromkeys(exempt, "its label exempts it")), rules)
    low = {pod.uid for each in gangs if each.priority < 1 and each.preemptible for pod in each.pods}
    assert gone <= low - exempt
    assert _gone(gangs, idleness, policy({"a": 16}, idle=RULE | {"exempt": {"namespaces": ["n*"]}})) == set()


@_law(20, 120)
@given(lives())
def test_a_recorded_idleness_is_decided_again_the_same(case: tuple[list[Gang], Idleness]) -> None:
    here = _here(RULES, *case)
    assert decide(RULES, inputs_from_json(json.loads(json.dumps(inputs_to_json(here))))) == decide(RULES, here)


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
    assert idle_reclaim.exemption(rule.exempt, pod) == reason


def _pod(name: str, **metadata: Any) -> dict[str, Any]:
    """Build a pod that has been ready for a day."""
    since = datetime.fromtimestamp(NOW_MS / 1000 - 86_400, UTC).isoformat()
    labels = metadata.pop("labels", {})
    spec = {"nodeName": "n0", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]}
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": since}
    status = {"phase": "Running", "startTime": since, "conditions": [ready]}
    return labelled(object_of(POD, name, spec, status, **{"uid": f"uid-{name}", "labels": labels, **metadata}), "a")


class Lives:
    """The ledger's measurements of two-GPU pods: busy and unknown shares by name, from an instant on if one is given
    (before it the pod was idle)."""

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
def start(controller_of: Make) -> Make:
    """Return a function that starts a controller with the idle rule at queue a of n0."""

    def make(cluster: MemoryCluster, rule: Mapping[str, Any] | None = None, **rules: Any) -> Controller:
        preemption = {"mode": "enforce", "min_runtime": 0, "idle": RULE | dict(rule or {}), **rules}
        wanted = policy_of([{"name": "a", "deserved": 8, "refs": ["fake-pods:a"]}], preemption=preemption)
        return controller_of(wanted, cluster, status_object=StatusObject(), pods=lambda: pods_of(cluster))

    return make


def _cluster(*objects: dict[str, Any]) -> Failing:
    return Failing(KINDS, [node_object(), *objects])


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
    """Three minutes of work, 2.5 % of two hours: still below the threshold there, and the warning is withdrawn all the
    same."""
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


def test_unknown_use_causes_no_warning(
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


def test_the_ledger_is_asked_a_few_times(
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


def test_a_dry_run_stops_no_pod(start: Make, lives_of: Lives, clock: VirtualClock, accountant: Accountant) -> None:
    cluster = _cluster(_pod("nb"))
    loop = start(cluster, {"mode": "dry-run"})
    loop.cycle()
    clock.advance(GRACE_MS)
    loop.cycle()
    assert _told(cluster) == [("nb", "WouldBeIdle"), ("nb", "WouldBePreempted")]
    assert "annotations" not in cluster.get(POD, "nb", "ns")["metadata"]
    made = [each for each in accountant.decisions if each.kind == "preemption" and each.subject != "*"]
    assert {each.mode for each in made} == {"dry-run"}
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
    cluster = _cluster(_pod("nb"))
    denied = ClusterRefused('admission webhook "policy.example" denied the request')
    cluster.failing, cluster.error = frozenset({"patch"}), denied
    loop = start(cluster)
    report = loop.cycle()
    assert report.targets[0].preemption.faults == ('ns/nb: admission webhook "policy.example" denied the request',)
    assert reasons_of(report.targets[0])["Preemption"] == ("False", "WarningNotWritten")
    clock.advance(GRACE_MS)
    loop.cycle()
    assert _names(cluster) == ["nb"]


FAULTS = [
    (ClusterUnavailable("timeout"), True),
    (ClusterUnavailable("503"), False),
    (ClusterRefused("403"), False),
    (Conflict("409"), False),
]


@pytest.mark.parametrize("works", [False, True], ids=["reclaimed", "forgiven"])
def test_a_fault_at_any_write_of_a_warning_its_withdrawal_or_the_reclaim_changes_nothing_in_the_end(
    works: bool, start: Make, lives_of: Lives, clock: VirtualClock
) -> None:
    """One of two idle pods may be reclaimed in an hour. No warning stands on a pod that is used again."""
    lives_of.names = ["nb", "web"]

    def life(cluster: FaultAt) -> tuple[list[str], list[str], int]:
        """Return the pods and those with a warning in the end, and the number of writes."""
        clock.advance(2 * LONG_MS)
        lives_of.busy = {}
        loop = start(cluster, per_cluster=1)
        for step in range(6):
            loop.cycle()
            clock.advance(GRACE_MS // CHECKS_PER_GRACE)
            if works and step == 1:
                lives_of.busy = dict.fromkeys(lives_of.names, (clock.wall_ms(), 1.0))
        for _ in range(0 if works else 4):
            loop.cycle()
            clock.advance(GRACE_MS // CHECKS_PER_GRACE)
        warned = [
            pod["metadata"]["name"]
            for pod in cluster.list(POD)
            if WARNING in (pod["metadata"].get("annotations") or {})
        ]
        return _names(cluster), warned, cluster.writes

    def cluster() -> FaultAt:
        return FaultAt(KINDS, [node_object(), _pod("nb"), _pod("web")])

    names, warned, writes = life(cluster())
    assert (len(names), len(warned)) == ((2, 0) if works else (1, 1))
    assert 0 < writes < 80
    for at in range(writes):
        for error, carried_out in FAULTS:
            faulty = cluster()
            faulty.at, faulty.error, faulty.carried_out = at, error, carried_out
            left, marked, _ = life(faulty)
            assert (len(left), len(marked)) == (len(names), len(warned)), (at, error, carried_out)
