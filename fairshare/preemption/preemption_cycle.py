"""Runs one target's preemption in one cycle, records the decisions, and reports what prevented a preemption.

Each cycle decides from the present state and the past preemptions that the limits count. Decision records contain all
inputs besides the policy, so `replay_verdicts` can compute the verdicts again. A dry run decides and reports in the
same way, but stops nothing and does not test the victims with the Eviction API.

The condition `Preemption` explains why a workload waits although the policy allows preemption for it: the API server or
a webhook refuses, disruption budgets protect every possible victim, a limit of the policy is reached, or a warning to
an owner cannot be written. It does not name workloads that a rule protects."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Final, Literal, get_args

from accountant.wire.policy_models import Decision, Policy
from accountant.wire.scheduler_sections import Mode
from fairshare.core.queues_and_weights import Condition
from fairshare.core.scheduler_queue_objects import join_texts
from fairshare.preemption.eviction import (
    STOPPED,
    EvictionCheck,
    EvictionResult,
    EvictionVeto,
    StopResult,
    events,
    stop_victim,
)
from fairshare.preemption.preemption_types import (
    PreemptionInputs,
    Verdict,
    Victim,
    inputs_from_json,
    inputs_to_json,
    verdict_to_json,
)
from fairshare.preemption.reclaim_rules_and_limits import Limit, PastPreemption
from fairshare.preemption.victim_selection import decide, parts_of
from fairshare.targets.installed import with_workloads
from gputally.base.errors import ClusterUnavailable
from gputally.base.version import __version__
from gputally.kubernetes.objects import Cluster, Event
from gputally.kubernetes.scheduler_plugins import schedulers

RELEASE = __version__
"""Version of the running code. It is looked up once, because the lookup reads the package's metadata."""
_MODES_BY_CAUTION: tuple[Mode, ...] = ("off", "dry-run", "enforce")
ROUNDS = 5
"""Largest number of decisions in a cycle. A decision is repeated if the cluster does not allow a victim to be
stopped."""
EVERYTHING = "*"
"""Subject of the record with a cycle's inputs."""
_NO_VETOES: Mapping[str, EvictionVeto] = {}


@dataclass(frozen=True, slots=True)
class VictimStop:
    """One victim and its outcome. claimant: the workload for which it was stopped."""

    claimant: str
    victim: Victim
    effect: EvictionResult


@dataclass(frozen=True, slots=True)
class PreemptionReport:
    """The result of one cycle at one target.

    situation: the inputs with all vetoes of the cluster. With them and the policy, `verdicts` can be computed again.
    vetoes: the same vetoes with their kinds.
    warned: the number of pods whose owners were warned of idle GPUs.
    faults: warnings and records that could not be written.
    stopping: the victims of earlier cycles for which this cycle waits; it decides nothing if there are any."""

    target: str
    mode: Mode
    situation: PreemptionInputs
    verdicts: tuple[Verdict, ...] = ()
    stops: tuple[VictimStop, ...] = ()
    events: tuple[Event, ...] = ()
    past: tuple[PastPreemption, ...] = ()
    vetoes: Mapping[str, EvictionVeto] = field(default_factory=dict)
    warned: int = 0
    faults: tuple[str, ...] = ()
    stopping: tuple[str, ...] = ()


def mode_of(policy: Policy, target: str) -> Mode:
    """Return the mode of preemption at one target."""
    if target not in with_workloads():
        return "off"
    rules = policy.preemption
    return rules.targets.of(schedulers()[target].section) or rules.mode


def idle_mode(policy: Policy, mode: Mode) -> Mode:
    """Return the mode of the idle rule at a target in `mode`: the more cautious of the two."""
    rule = policy.preemption.idle
    return min(rule.mode, mode, key=_MODES_BY_CAUTION.index) if rule is not None else "off"


class ClaimsUnsettled(ClusterUnavailable):
    """After `ROUNDS` decisions the cluster still did not allow a victim to be stopped. vetoes: by workload."""

    def __init__(self, vetoes: Mapping[str, EvictionVeto]) -> None:
        super().__init__(f"{len(vetoes)} chosen workloads may not be stopped; the next cycle chooses others")
        self.vetoes = vetoes


Begin = Callable[[Sequence[tuple[PastPreemption, Victim]]], None]
"""Notes the victims that are stopped next. Raises ClusterError if it could not."""


def preempt(
    policy: Policy,
    cluster: Cluster,
    situation: PreemptionInputs,
    mode: Mode,
    leading: Callable[[], bool] = lambda: True,
    known: Mapping[str, EvictionVeto] = _NO_VETOES,
    begin: Begin = lambda _victims: None,
) -> PreemptionReport:
    """Decide, check with the cluster, and stop victims if `mode` says so.

    known: vetoes of earlier cycles that are still valid.
    begin: is called once before the first victim is stopped.

    Raises ClusterError if the cluster does not answer before a victim is stopped, and ClaimsUnsettled if it vetoes too
    many victims."""
    settled, verdicts, vetoes = _vetted(policy, cluster, situation, mode, known)
    cycle = cycle_id(policy, settled)
    stops: list[VictimStop] = []
    stop_events: list[Event] = []
    unavailable = False
    enforced = [
        victim
        for verdict in verdicts
        if _verdict_mode(policy, verdict, mode) == "enforce"
        for victim in verdict.victims
    ]
    if enforced and leading():
        begin([(_as_past(victim, settled.now_ms, cycle), victim) for victim in enforced])
    for n, verdict in enumerate(verdicts):
        enforce = _verdict_mode(policy, verdict, mode) == "enforce"
        for m, victim in enumerate(verdict.victims):
            if not enforce:
                effect = EvictionResult("would-stop")
            elif unavailable or not leading():
                reason = "the API server does not answer" if unavailable else "no longer the leader"
                effect = EvictionResult("unavailable", f"not tried: {reason}")
            else:
                effect = stop_victim(cluster, victim, f"{cycle}/{n}/{m}", settled.now_ms)
                unavailable = effect.result in ("unavailable", "unconfirmed")
            stops.append(VictimStop(verdict.claimant, victim, effect))
            if effect.result in STOPPED or effect.result == "would-stop":
                stop_events += events(victim, settled.now_ms, dry_run=not enforce)
    past = tuple(_as_past(stop.victim, settled.now_ms, cycle) for stop in stops if stop.effect.result in STOPPED)
    return PreemptionReport(situation.target, mode, settled, verdicts, tuple(stops), tuple(stop_events), past, vetoes)


def _as_past(victim: Victim, now_ms: int, cycle: str) -> PastPreemption:
    gang = victim.gang
    return PastPreemption(now_ms, gang.key, gang.queue, victim.team, victim.gpus, victim.lost_gpu_hours, cycle)


def _verdict_mode(policy: Policy, verdict: Verdict, mode: Mode) -> Mode:
    return idle_mode(policy, mode) if verdict.trigger == "idle" else mode


def _vetted(
    policy: Policy, cluster: Cluster, situation: PreemptionInputs, mode: Mode, known: Mapping[str, EvictionVeto]
) -> tuple[PreemptionInputs, tuple[Verdict, ...], Mapping[str, EvictionVeto]]:
    """Decide until the cluster allows all victims to be stopped. Return the last inputs, the verdicts and all vetoes.

    Raises ClusterError and ClaimsUnsettled."""
    vetoes = dict(known)
    situation = replace(situation, vetoed={key: veto.reason for key, veto in known.items()} | dict(situation.vetoed))
    every = cache(partial(parts_of, situation))
    for _ in range(ROUNDS):
        verdicts = decide(policy, situation, every)
        victims = [victim for verdict in verdicts for victim in verdict.victims]
        check = EvictionCheck(cluster, try_evictions=mode == "enforce") if victims else None
        new: dict[str, EvictionVeto] = {}
        for victim in victims:
            veto = check.refusal(victim) if check is not None else None
            if veto is not None:
                new[victim.gang.key] = veto
        if not new:
            return situation, verdicts, vetoes
        vetoes |= new
        vetoed = {**situation.vetoed, **{key: veto.reason for key, veto in new.items()}}
        situation = replace(situation, vetoed=vetoed)
    raise ClaimsUnsettled(vetoes)


def cycle_id(policy: Policy, situation: PreemptionInputs) -> str:
    return f"{policy.version()}/{situation.now_ms}/{situation.target}/preemption"


RecordedOutcomes = Mapping[str, str]
"""By claimant, the digest of the outcome that was last recorded."""


def outcomes_of(report: PreemptionReport) -> dict[str, str]:
    """Return a digest of the part of each verdict whose change leads to a new record: its outcome, and its victims."""
    effects = {(stop.claimant, stop.victim.gang.key): stop.effect.result for stop in report.stops}
    outcomes = {
        verdict.claimant: (
            verdict.outcome,
            sorted((v.gang.key, effects.get((verdict.claimant, v.gang.key))) for v in verdict.victims),
        )
        for verdict in report.verdicts
    }
    return {claimant: hashlib.sha256(repr(each).encode()).hexdigest()[:12] for claimant, each in outcomes.items()}


def decisions(policy: Policy, report: PreemptionReport, before: RecordedOutcomes) -> tuple[Decision, ...]:
    """Return the records of a cycle: its inputs, then each new verdict with its victims; empty if nothing is new.

    before: the outcomes that were recorded last."""
    now = outcomes_of(report)
    stopped = {stop.claimant for stop in report.stops if stop.effect.result in STOPPED}
    news = {
        verdict.claimant
        for verdict in report.verdicts
        if verdict.outcome != "room" and (before.get(verdict.claimant) != now[verdict.claimant])
    } | stopped
    if not news:
        return ()
    cycle = cycle_id(policy, report.situation)
    common: dict[str, Any] = {
        "at_ms": report.situation.now_ms,
        "kind": "preemption",
        "target": report.target,
        "policy_version": policy.version(),
    }
    records = [
        Decision(
            id=cycle,
            subject=EVERYTHING,
            mode=report.mode,
            reason="the inputs of this cycle's preemptions",
            inputs={"situation": inputs_to_json(report.situation), "release": RELEASE},
            **common,
        )
    ]
    effects = {(stop.claimant, id(stop.victim)): stop.effect for stop in report.stops}
    for n, verdict in enumerate(report.verdicts):
        if verdict.claimant not in news:
            continue
        mode = _verdict_mode(policy, verdict, report.mode)
        inputs: dict[str, Any] = {"cycle": cycle, "verdict": verdict_to_json(verdict)}
        records.append(
            Decision(
                id=f"{cycle}/{n}",
                subject=verdict.claimant,
                mode=mode,
                value=verdict.gpus,
                reason=verdict.reason,
                inputs=inputs,
                **common,
            )
        )
        for m, victim in enumerate(verdict.victims):
            effect = effects[verdict.claimant, id(victim)]
            inputs = {
                "cycle": cycle,
                "claimant": verdict.claimant,
                **victim_record(victim),
                "result": effect.result,
                "detail": effect.detail,
            }
            records.append(
                Decision(
                    id=f"{cycle}/{n}/{m}",
                    subject=victim.gang.key,
                    mode=mode,
                    value=victim.gpus,
                    reason=victim.reason,
                    inputs=inputs,
                    **common,
                )
            )
    return tuple(records)


def victim_record(victim: Victim) -> dict[str, Any]:
    """Return the inputs of a victim's record. Its GPUs and its reason are fields of the decision itself."""
    return {
        "queue": victim.gang.queue,
        "team": victim.team,
        "ground": victim.ground,
        "whole": victim.whole,
        "pods": [f"{pod.namespace}/{pod.name}" for pod in victim.pods],
        "lost_gpu_hours": victim.lost_gpu_hours,
        **({} if victim.gang.checkpoint_ms is None else {"checkpoint_ms": victim.gang.checkpoint_ms}),
    }


def replay_verdicts(policy: Policy, cycle: Decision) -> tuple[Verdict, ...]:
    """Decide a recorded cycle again, with the same verdicts, bit for bit.

    policy: the policy in force at that time. Raises ValueError for a record without inputs."""
    recorded: Any = cycle.inputs.get("situation")
    if recorded is None:
        raise ValueError(
            f"decision {cycle.id} has no inputs: take the decision with subject {EVERYTHING!r} of the same time"
        )
    return decide(policy, inputs_from_json(recorded))


Obstacle = Literal[
    "Refused", "Unavailable", "LostWorkLimitReached", "RateLimitReached", "HeldByBudgets", "WarningNotWritten"
]
OBSTACLES: Final[tuple[Obstacle, ...]] = get_args(Obstacle)
"""What can prevent a preemption, the most urgent first. The condition has the first one as its reason."""
CONDITION = "Preemption"
_OF_LIMIT: Mapping[Limit, Obstacle] = {
    "per-team": "RateLimitReached", "per-cluster": "RateLimitReached", "lost-hours": "LostWorkLimitReached",
}  # fmt: skip
_OF_RESULT: Mapping[StopResult, Obstacle] = {
    "refused": "Refused", "unavailable": "Unavailable", "unconfirmed": "Unavailable", "blocked": "HeldByBudgets",
}  # fmt: skip


def obstacles(report: PreemptionReport) -> dict[Obstacle, tuple[str, ...]]:
    """Return sentences by obstacle, in the order of `OBSTACLES`; empty if every victim was stopped as decided."""
    texts: dict[Obstacle, list[str]] = {obstacle: [] for obstacle in OBSTACLES}
    for stop in report.stops:
        obstacle = _OF_RESULT.get(stop.effect.cause or stop.effect.result)
        if obstacle is not None:
            texts[obstacle].append(f"{stop.victim.gang.key}: {stop.effect.detail}")
    for verdict in report.verdicts:
        for spared in verdict.spared if verdict.outcome == "denied" else ():
            veto = report.vetoes.get(spared.key)
            if spared.limit is not None and spared.limit in _OF_LIMIT:
                texts[_OF_LIMIT[spared.limit]].append(f"{spared.key}: {spared.reason}")
            elif veto is not None and veto.kind != "changed":
                texts["Refused" if veto.kind == "refused" else "HeldByBudgets"].append(f"{spared.key}: {veto.reason}")
    texts["WarningNotWritten"] += report.faults
    return {obstacle: tuple(dict.fromkeys(each)) for obstacle, each in texts.items() if each}


def condition(report: PreemptionReport) -> Condition:
    """Return the condition `Preemption`: True if nothing prevented a preemption (see `OBSTACLES`)."""
    texts_by_obstacle = obstacles(report)
    if report.stopping and not texts_by_obstacle:
        text = f"no other workload is stopped before the GPUs of {join_texts(report.stopping, most=3)} are free"
        return Condition(CONDITION, "True", "Stopping", text)
    if not texts_by_obstacle:
        return Condition(CONDITION, "True", "AsDecided", f"mode {report.mode}: nothing prevents a decided preemption")
    parts = [f"{obstacle}: {join_texts(texts, most=3)}" for obstacle, texts in texts_by_obstacle.items()]
    return Condition(CONDITION, "False", next(iter(texts_by_obstacle)), "; ".join(parts))


def failed(error: Exception) -> Condition:
    """Return the condition `Preemption` for a cycle in which nothing could be decided."""
    return Condition(CONDITION, "False", "Unavailable", str(error))
