"""Runs one target's preemption in one cycle, and reports what prevented it.

Each cycle decides from the present state. Between cycles only past preemptions are kept, in the status ConfigMap.
Decisions carry all their inputs, so `replay_verdicts` can compute them again. In a dry run everything is checked and
reported, and nothing is stopped.

It explains why a workload waits although the policy allows preemption for it: the API server or a webhook refuses,
disruption budgets protect every possible victim, or a limit of the policy is reached. A workload that a rule protects
is not reported. A dry run reports the same, except that evictions are not tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, Final, Literal

from accountant.wire.policy_models import Decision, Mode, Policy
from fairshare.core.queue_annotations import say
from fairshare.core.queues_and_weights import Condition
from fairshare.preemption.eviction import STOPPED, Done, EvictionCheck, EvictionResult, EvictionVeto, act, events
from fairshare.preemption.preemption_rules import Limit, PastPreemption
from fairshare.preemption.preemption_types import PreemptionInputs, Verdict, Victim, read, show, write
from fairshare.preemption.victim_candidates import key_of
from fairshare.preemption.victim_selection import decide
from gputally.base.errors import Unavailable
from gputally.kubernetes.objects import Cluster, Event

RELEASE = version("gputally")
"""Version of the running code. It is looked up once, because the lookup reads the package's metadata."""
_BOLDNESS: tuple[Mode, ...] = ("off", "dry-run", "enforce")
ROUNDS = 5
"""How often the decision is repeated because the cluster keeps a victim."""
UNREAD = frozenset({"runai"})
"""Targets whose workloads are not read, so that no victim can be chosen there."""
EVERYTHING = "*"
"""Subject of the record that holds a cycle's inputs."""
INPUTS = frozenset({"situation", "release"})
"""Keys of that record."""
_NONE: Mapping[str, EvictionVeto] = {}


@dataclass(frozen=True, slots=True)
class VictimStop:
    """One victim and its outcome.

    claimant: the workload for which it was stopped."""

    claimant: str
    victim: Victim
    effect: EvictionResult


@dataclass(frozen=True, slots=True)
class PreemptionReport:
    """The result of one cycle at one target.

    situation: the inputs with all vetoes of the cluster. With them and the policy, `verdicts` can be computed again.
    vetoes: the same vetoes with their kinds.
    warned: pods whose owners were warned of idle GPUs.
    faults: warnings that could not be written."""

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


def mode_of(policy: Policy, target: str) -> Mode:
    """Return off, dry-run or enforce, for one target."""
    if target in UNREAD:
        return "off"
    rules = policy.preemption
    stated: Mode | None = getattr(rules.targets, target.replace("-", "_"), None)
    return stated or rules.mode


def idle_mode(policy: Policy, mode: Mode) -> Mode:
    """Return the mode of the idle rule at a target in `mode`: the more cautious of the two."""
    rule = policy.preemption.idle
    return min(rule.mode, mode, key=_BOLDNESS.index) if rule is not None else "off"


class ClaimsUnsettled(Unavailable):
    """After `ROUNDS` rounds the cluster still kept one of the chosen victims. vetoes: all that are known."""

    def __init__(self, vetoes: Mapping[str, EvictionVeto]) -> None:
        super().__init__(f"{len(vetoes)} workloads were chosen one after the other and may not go; others come next")
        self.vetoes = vetoes


def preempt(
    policy: Policy,
    cluster: Cluster,
    situation: PreemptionInputs,
    mode: Mode,
    leading: Callable[[], bool] = lambda: True,
    known: Mapping[str, EvictionVeto] = _NONE,
) -> PreemptionReport:
    """Decide, check with the cluster, and stop victims if `mode` says so.

    known: vetoes that are still valid.

    Raises ClusterError if the cluster does not answer before anything was done, and ClaimsUnsettled if it keeps too
    many victims."""
    settled, verdicts, vetoes = _vetted(policy, cluster, situation, mode, known)
    cycle = cycle_id(policy, settled)
    stops: list[VictimStop] = []
    told: list[Event] = []
    silent = False
    for n, verdict in enumerate(verdicts):
        enforce = _verdict_mode(policy, verdict, mode) == "enforce"
        for m, victim in enumerate(verdict.victims):
            if not enforce:
                effect = EvictionResult("would-stop")
            elif silent or not leading():
                effect = EvictionResult(
                    "unavailable",
                    "not tried: " + ("the API server does not answer" if silent else "no longer the leader"),
                )
            else:
                effect = act(cluster, victim, f"{cycle}/{n}/{m}", settled.now_ms)
                silent = effect.result == "unavailable"
            stops.append(VictimStop(verdict.claimant, victim, effect))
            if effect.result in STOPPED or effect.result == "would-stop":
                told += events(victim, settled.now_ms, dry_run=not enforce)
    past = tuple(
        PastPreemption(
            settled.now_ms, key_of(stop.victim.gang), stop.victim.gang.queue, stop.victim.team, stop.victim.gpus,
            stop.victim.lost_gpu_hours, cycle,
        )
        for stop in stops
        if stop.effect.result in STOPPED
    )  # fmt: skip
    return PreemptionReport(situation.target, mode, settled, verdicts, tuple(stops), tuple(told), past, vetoes)


def _verdict_mode(policy: Policy, verdict: Verdict, mode: Mode) -> Mode:
    return idle_mode(policy, mode) if verdict.trigger == "idle" else mode


def _vetted(
    policy: Policy, cluster: Cluster, situation: PreemptionInputs, mode: Mode, known: Mapping[str, EvictionVeto]
) -> tuple[PreemptionInputs, tuple[Verdict, ...], Mapping[str, EvictionVeto]]:
    vetoes = dict(known)
    situation = replace(situation, vetoed={key: veto.reason for key, veto in known.items()} | dict(situation.vetoed))
    for _ in range(ROUNDS):
        verdicts = decide(policy, situation)
        vetoed: dict[str, str] = {}
        vetting = None
        if any(verdict.victims for verdict in verdicts):
            vetting = EvictionCheck(cluster, try_evictions=mode == "enforce")
        for verdict in verdicts:
            for victim in verdict.victims:
                veto = vetting.refusal(victim) if vetting is not None else None
                if veto is not None:
                    vetoes[key_of(victim.gang)] = veto
                    vetoed[key_of(victim.gang)] = veto.reason
        if not vetoed:
            return situation, verdicts, vetoes
        situation = replace(situation, vetoed={**situation.vetoed, **vetoed})
    raise ClaimsUnsettled(vetoes)


def cycle_id(policy: Policy, situation: PreemptionInputs) -> str:
    return f"{policy.version()}/{situation.now_ms}/{situation.target}/preemption"


RecordedOutcomes = Mapping[str, tuple[object, ...]]
"""The outcome that was last recorded of each claim."""


def outcome_of(report: PreemptionReport) -> dict[str, tuple[object, ...]]:
    """Return the parts of a verdict whose change is recorded: its outcome, and its victims."""
    effects = {(stop.claimant, key_of(stop.victim.gang)): stop.effect.result for stop in report.stops}
    return {
        verdict.claimant: (
            verdict.outcome,
            tuple(sorted((key_of(v.gang), effects.get((verdict.claimant, key_of(v.gang)))) for v in verdict.victims)),
        )
        for verdict in report.verdicts
    }


def decisions(policy: Policy, report: PreemptionReport, before: RecordedOutcomes) -> tuple[Decision, ...]:
    """Return the inputs, each verdict and each victim; empty if nothing has changed."""
    now = outcome_of(report)
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
    made = [
        Decision(
            id=cycle,
            subject=EVERYTHING,
            mode=report.mode,
            reason="the inputs of this cycle's preemptions",
            inputs={"situation": write(report.situation), "release": RELEASE},
            **common,
        )
    ]
    effects = {(stop.claimant, id(stop.victim)): stop.effect for stop in report.stops}
    for n, verdict in enumerate(report.verdicts):
        if verdict.claimant not in news:
            continue
        mode = _verdict_mode(policy, verdict, report.mode)
        inputs: dict[str, Any] = {"cycle": cycle, "verdict": show(verdict)}
        made.append(
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
                **facts(victim),
                "result": effect.result,
                "detail": effect.detail,
            }
            made.append(
                Decision(
                    id=f"{cycle}/{n}/{m}",
                    subject=key_of(victim.gang),
                    mode=mode,
                    value=victim.gpus,
                    reason=victim.reason,
                    inputs=inputs,
                    **common,
                )
            )
    return tuple(made)


def facts(victim: Victim) -> dict[str, Any]:
    """Return the fields of a victim's record besides its GPUs and its reason."""
    return {
        "queue": victim.gang.queue,
        "team": victim.team,
        "ground": victim.ground,
        "whole": victim.whole,
        "pods": [f"{pod.namespace}/{pod.name}" for pod in victim.pods],
        "lost_gpu_hours": victim.lost_gpu_hours,
    }


def replay_verdicts(policy: Policy, cycle: Decision) -> tuple[Verdict, ...]:
    """Decide a recorded cycle again. The verdicts are the same, bit for bit.

    policy: the one under which it was decided.

    Raises ValueError for a record without inputs."""
    recorded: Any = cycle.inputs.get("situation")
    if recorded is None:
        raise ValueError(f"decision {cycle.id} holds no inputs; take the one with subject {EVERYTHING!r}")
    return decide(policy, read(recorded))


Trouble = Literal[
    "Refused", "Unavailable", "LostWorkLimitReached", "RateLimitReached", "HeldByBudgets", "WarningNotWritten"
]
"""Obstacles, the most urgent first. The condition has the first one as its reason."""
TROUBLES: Final[tuple[Trouble, ...]] = (
    "Refused", "Unavailable", "LostWorkLimitReached", "RateLimitReached", "HeldByBudgets", "WarningNotWritten",
)  # fmt: skip
CONDITION = "Preemption"
_OF_LIMIT: Mapping[Limit, Trouble] = {
    "per-team": "RateLimitReached", "per-cluster": "RateLimitReached", "lost-hours": "LostWorkLimitReached",
}  # fmt: skip
_OF_EFFECT: Mapping[Done, Trouble] = {
    "refused": "Refused", "unavailable": "Unavailable", "blocked": "HeldByBudgets",
}  # fmt: skip


def troubles(report: PreemptionReport) -> dict[Trouble, tuple[str, ...]]:
    """Return sentences by obstacle, in the order of `TROUBLES`; empty if everything was done as decided."""
    found: dict[Trouble, list[str]] = {trouble: [] for trouble in TROUBLES}
    for stop in report.stops:
        trouble = _OF_EFFECT.get(stop.effect.cause or stop.effect.result)
        if trouble is not None:
            found[trouble].append(f"{key_of(stop.victim.gang)}: {stop.effect.detail}")
    for verdict in report.verdicts:
        for spared in verdict.spared if verdict.outcome == "denied" else ():
            veto = report.vetoes.get(spared.key)
            if spared.limit is not None and spared.limit in _OF_LIMIT:
                found[_OF_LIMIT[spared.limit]].append(f"{spared.key}: {spared.reason}")
            elif veto is not None and veto.kind != "changed":
                found["Refused" if veto.kind == "refused" else "HeldByBudgets"].append(f"{spared.key}: {veto.reason}")
    found["WarningNotWritten"] += report.faults
    return {trouble: tuple(dict.fromkeys(texts)) for trouble, texts in found.items() if texts}


def condition(report: PreemptionReport) -> Condition:
    """Return the condition `Preemption`: True if every chosen victim was stopped (or would be, in a dry run)."""
    found = troubles(report)
    if not found:
        return Condition(CONDITION, "True", "AsDecided", f"mode {report.mode}: nothing stands in the way")
    words = [f"{trouble}: {say(texts, most=3)}" for trouble, texts in found.items()]
    return Condition(CONDITION, "False", next(iter(found)), "; ".join(words))


def failed(error: Exception) -> Condition:
    """Return the condition if nothing could be decided."""
    return Condition(CONDITION, "False", "Unavailable", str(error))
