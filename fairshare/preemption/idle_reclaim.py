"""Finds idle GPU holders, warns their owners, and selects those whose grace period is over.

A pod is idle if its GPUs were busy for less than the part `below` of the time, over `sustained` and again over `grace`.
Unknown and unmetered time counts as busy, so the rule never applies without measured utilisation. A pod that works
again during the grace period is no longer idle.

A gang is stopped as a whole if each of its pods is idle. Otherwise only idle surplus is stopped. The rule never uses an
average over pods, because one of them may work. Victims count against the limits of all preemptions.

The accountant returns how busy every pod was recently. The owner of each newly idle pod gets an annotation and an
Event. The time of the warning is kept in memory and, over restarts, in the status ConfigMap. If a pod is no longer
idle, the warning is withdrawn and its owner informed. While the accountant does not answer, no workload counts as idle,
and no warning is withdrawn.

A warning that could not be written does not count, so its grace period does not begin. A warning of a dry run says so,
and does not count once the rule is enforced. This module stops no workload."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import fsum
from typing import Any, Literal

from accountant.wire.policy_models import IdleExemptions, IdleReclaimPolicy, Mode, Policy
from accountant.wire.usage_models import Accounts
from fairshare.core.queue_annotations import instant
from fairshare.core.queues_and_weights import Gang, Pod
from fairshare.preemption.eviction import OPT_OUT
from fairshare.preemption.preemption_rules import Budget
from fairshare.preemption.preemption_types import (
    Idleness,
    Outcome,
    PodUse,
    PreemptionInputs,
    SparedWorkload,
    Verdict,
    Victim,
)
from fairshare.preemption.victim_candidates import Bundle, bundles, loss_text, past_of, protected, teams, victim_of
from fairshare.targets.weight_plan import FIELD_MANAGER
from gputally.base.errors import AccountantUnavailable, ClusterError, NotFound
from gputally.base.units import MS_PER_DAY, MS_PER_MINUTE, MS_PER_SECOND, US_PER_HOUR, US_PER_MS
from gputally.kubernetes.objects import POD, Cluster, Event, Object

CLAIMANT = "Idle/"
"""Prefix of the claimant's name when the rule itself is the reason."""


def most_busy(pod: Pod, use: PodUse | None, span_ms: int) -> float:
    """Return the largest part of the span in which its GPUs can have been busy, 0..1. It is 1 if nothing was
    measured."""
    if use is None:
        return 1.0
    held_us = max(pod.gpus * span_ms * US_PER_MS, use.busy_us + use.idle_us + use.unknown_us)
    return max(0.0, 1 - use.idle_us / held_us) if held_us > 0 else 1.0


def is_idle(rule: IdleReclaimPolicy, pod: Pod, idleness: Idleness) -> bool:
    """Return whether a pod was ready for all of `sustained` and provably idle, over all of it and lately."""
    lasting_ms, recent_ms = rule.sustained * MS_PER_SECOND, rule.grace * MS_PER_SECOND
    return (
        pod.held
        and pod.ready_ms is not None
        and pod.ready_ms <= idleness.end_ms - max(lasting_ms, recent_ms)
        and most_busy(pod, idleness.lasting.get(pod.uid), lasting_ms) < rule.below
        and most_busy(pod, idleness.recent.get(pod.uid), recent_ms) < rule.below
    )


def idle_parts(rule: IdleReclaimPolicy, gangs: Iterable[Gang], idleness: Idleness, now_ms: int) -> Iterator[Bundle]:
    """Yield for each running gang the part that may be stopped because it is idle: all pods, or its surplus."""
    for gang in gangs:
        if gang.waits > 0 or _is_exempt(rule.exempt, gang):
            continue
        found = bundles(gang, now_ms)
        quiet = [
            part
            for part in found
            if part.pods and all(is_idle(rule, pod, idleness) and pod.uid not in idleness.exempt for pod in part.pods)
        ]
        if quiet and len(quiet) == len(found):
            yield quiet[-1].with_rest(quiet[:-1])  # the core comes last
        else:
            yield from (part for part in quiet if not part.whole)


def grace_is_over(rule: IdleReclaimPolicy, part: Bundle, warned: Mapping[str, int], now_ms: int) -> bool:
    """Return whether the owner of every pod was warned at least `grace` ago."""
    return all(pod.uid in warned and now_ms - warned[pod.uid] >= rule.grace * MS_PER_SECOND for pod in part.pods)


def exemption(exempt: IdleExemptions, pod: Object) -> str | None:
    """Return why the rule exempts a pod, from annotations of its owner; None if it does not."""
    metadata = pod["metadata"]
    for what, wanted in (("label", exempt.labels), ("annotation", exempt.annotations)):
        here: Mapping[str, str] = metadata.get(f"{what}s") or {}
        for key, value in sorted(wanted.items()):
            if key in here and value in ("*", here[key]):
                return f"its {what} {key} exempts it"
    return None


def verdicts(policy: Policy, situation: PreemptionInputs, budget: Budget, taken: set[str]) -> tuple[Verdict, ...]:
    """Return a verdict per gang whose idle parts may be stopped now, in the order of their warnings.

    budget: reduced by each of them.
    taken: pods and whole gangs that other claims have already selected."""
    rule, idleness = policy.preemption.idle, situation.idle
    if rule is None or idleness is None or situation.calls_only:
        return ()
    parts: dict[str, list[Bundle]] = {}
    for part in idle_parts(rule, situation.gangs, idleness, situation.now_ms):
        mine = part.key in taken or any(pod.uid in taken for pod in part.pods)
        if not mine and grace_is_over(rule, part, idleness.warned, situation.now_ms):
            parts.setdefault(part.key, []).append(part)
    since = {key: min(idleness.warned[pod.uid] for part in here for pod in part.pods) for key, here in parts.items()}
    payers = teams(policy)
    return tuple(
        _verdict(policy, rule, situation, idleness, parts[key], budget, payers)
        for key in sorted(parts, key=lambda key: (since[key], key))
    )


def _verdict(
    policy: Policy,
    rule: IdleReclaimPolicy,
    situation: PreemptionInputs,
    idleness: Idleness,
    parts: list[Bundle],
    budget: Budget,
    payers: Mapping[str, str],
) -> Verdict:
    gang, key = parts[0].gang, parts[0].key
    team = payers.get(gang.queue, gang.queue)
    victims: list[Victim] = []
    kept: SparedWorkload | None = None
    for found in sorted(parts, key=lambda part: tuple(pod.uid for pod in part.pods)):
        part = replace(found, lost_gpu_hours=_lost(found, idleness))
        reason, limit = protected(policy, situation, part), None
        if reason is None:
            denial = budget.refusal(key, team, part.lost_gpu_hours)
            if denial is not None:
                reason, limit = denial.reason, denial.limit
        if reason is not None:
            kept = SparedWorkload(key, gang.queue, reason, limit)
            continue
        budget.spend(past_of(team, part, situation.now_ms))
        victims.append(_victim(team, rule, part, idleness, situation.now_ms))
    gpus = fsum(part.gpus for part in parts)
    does = f"does not use {gpus:g} GPUs"
    freed = fsum(victim.gpus for victim in victims)
    reason = f"{does}: {freed:g} are reclaimed" if victims else f"{does}, but {kept.reason if kept else ''}"
    spared = (kept,) if kept is not None else ()
    outcome: Outcome = "preempts" if victims else "denied"
    return Verdict(CLAIMANT + key, gang.queue, gpus, "idle", outcome, reason, tuple(victims), spared)


def _victim(team: str, rule: IdleReclaimPolicy, part: Bundle, idleness: Idleness, now_ms: int) -> Victim:
    what = f"its {part.gpus:g} GPUs were" if part.whole else f"{part.gpus:g} of its GPUs were"
    ago = (now_ms - max(idleness.warned[pod.uid] for pod in part.pods)) / MS_PER_SECOND / 60
    warned, loss = f"its owner was warned {ago:.0f} min ago", loss_text(part, now_ms)
    reason = f"{what} {idleness_text(rule, part, idleness)}; {warned}; {loss}"
    return victim_of(part, "idle", team, reason)


def idleness_text(rule: IdleReclaimPolicy, part: Bundle, idleness: Idleness) -> str:
    """Format a text such as `busy at most 1.2 % of the last 120 min, below the 5 % allowed`."""
    span_ms = rule.sustained * MS_PER_SECOND
    busy = max(most_busy(pod, idleness.lasting.get(pod.uid), span_ms) for pod in part.pods)
    return f"busy at most {busy:.1%} of the last {rule.sustained / 60:g} min, less than {rule.below * 100:g} %"


def work_since(part: Bundle) -> int | None:
    """Return the instant since which its work is not saved; None if unknown."""
    starts = [pod.started_ms for pod in part.pods if pod.started_ms is not None]
    since = min(starts, default=part.gang.started_ms)
    saved = part.gang.checkpoint_ms
    return saved if since is not None and saved is not None and saved > since else since


def gpu_hours_worked(pod: Pod, use: PodUse | None, since_ms: int, end_ms: int) -> float:
    """Return the GPU-hours that the pod held in [start_ms, end_ms) and that were not measured idle."""
    held_us = pod.gpus * max(0, end_ms - since_ms) * US_PER_MS
    return max(0.0, held_us - (use.idle_us if use is not None else 0)) / US_PER_HOUR


def _lost(part: Bundle, idleness: Idleness) -> float:
    """Return the lost work. It is at most that of any victim, and less if the ledger shows that the pod hardly
    worked."""
    known = [idleness.worked[pod.uid] for pod in part.pods if pod.uid in idleness.worked]
    return min(part.lost_gpu_hours, fsum(known)) if len(known) == len(part.pods) else part.lost_gpu_hours


def _is_exempt(exempt: IdleExemptions, gang: Gang) -> bool:
    if exempt.priority is not None and gang.priority >= exempt.priority:
        return True
    return any(fnmatchcase(gang.namespace, pattern) for pattern in exempt.namespaces) or not gang.preemptible


WARNING = "gputally.dev/idle-warning"
"""Annotation on a pod: why, and from when on, it may be reclaimed."""
MOST_WARNED = 500
"""Largest number of pods of a target that are warned at a time."""
LOOKS = 6
"""Number of checks during one grace period. Each queries the accountant for the usage of every pod."""
MOST_RIPE = 20
"""Largest number of workloads whose work is looked up in one cycle. The others wait for the next."""
AGAIN_MS = 10 * MS_PER_MINUTE
"""Time after which an exempt pod is checked again."""
LONGEST_MS = 90 * MS_PER_DAY
"""How far back work is looked up. Older time counts as work."""
PodUsage = Callable[[int, int, Sequence[tuple[str, str]]], Mapping[tuple[str, str], Accounts]]
"""Returns GPU time over [start_ms, end_ms) by (namespace, name), of these pods (none given: of all). Raises
AccountantUnavailable."""


@dataclass(frozen=True, slots=True)
class IdleReport:
    """The result of a check.

    idleness: the idleness of pods that may be idle.
    events: events for the owners.
    faults: warnings that could not be written."""

    idleness: Idleness | None = None
    events: tuple[Event, ...] = ()
    faults: tuple[str, ...] = ()


class IdleWatch:
    """The idle rule of one controller. Not thread-safe."""

    def __init__(self, usage: PodUsage) -> None:
        self._usage = usage
        self._warned: dict[str, dict[str, tuple[int, Mode]]] = {}
        self._exempt: dict[str, int] = {}
        self._looked_ms: dict[str, int] = {}

    def restore(self, text: str) -> None:
        """Continue from the text that `state` wrote. An invalid text is ignored, and every grace period begins
        again."""
        self._warned = {}
        try:
            for target, uid, at_ms, mode in json.loads(text or "[]"):
                if mode in ("dry-run", "enforce"):
                    self._warned.setdefault(str(target), {})[str(uid)] = (int(at_ms), mode)
        except (ValueError, TypeError):
            self._warned = {}

    def state(self) -> str:
        """Return the state to keep; empty if no pod is warned."""
        rows: list[Any] = [
            (target, uid, *noted)
            for target, here in sorted(self._warned.items())
            for uid, noted in sorted(here.items())
        ]
        return json.dumps(rows, separators=(",", ":")) if rows else ""

    def look(
        self,
        rule: IdleReclaimPolicy | None,
        mode: Mode,
        cluster: Cluster,
        target: str,
        gangs: Sequence[Gang],
        end_ms: int,
        now_ms: int,
    ) -> IdleReport:
        """Check a target. Between two checks no workload is warned, forgiven or reclaimed.

        mode: the mode of the rule at this target.
        end_ms: the instant up to which usage is metered."""
        if rule is None or mode == "off":
            self._warned.pop(target, None)
            return IdleReport()
        if now_ms - self._looked_ms.get(target, -rule.grace * MS_PER_SECOND) < rule.grace * MS_PER_SECOND // LOOKS:
            return IdleReport()
        before = {uid: at for uid, (at, noted) in self._warned.get(target, {}).items() if noted == mode}
        self._exempt = {uid: at for uid, at in self._exempt.items() if now_ms - at < AGAIN_MS}
        try:
            measured = self._measured(rule, gangs, end_ms)
        except AccountantUnavailable:
            return IdleReport()
        self._looked_ms[target] = now_ms
        parts = tuple(idle_parts(rule, gangs, measured, now_ms))
        still = {pod.uid for part in parts for pod in part.pods}
        round_ = _Round(rule, mode, cluster, measured, now_ms)
        pods = {pod.uid: pod for gang in gangs for pod in gang.pods if pod.held}
        for uid in sorted(before.keys() - still):
            if uid in pods:
                round_.forgive(pods[uid])
        warned = {uid: at for uid, at in before.items() if uid in still}
        for part in sorted(parts, key=lambda part: (min(warned.get(p.uid, now_ms) for p in part.pods), part.key)):
            for pod in part.pods:
                new = pod.uid not in warned and pod.uid not in self._exempt and len(warned) < MOST_WARNED
                if new and round_.warn(part, pod):
                    warned[pod.uid] = now_ms
        due = [part for part in parts if grace_is_over(rule, part, warned, now_ms)][:MOST_RIPE]
        for part in due:
            round_.look_again(part)
        self._exempt |= dict.fromkeys(round_.exempt, now_ms)
        self._warned[target] = {uid: (at, mode) for uid, at in warned.items() if uid not in round_.exempt}
        known = {uid for part in due for uid in (pod.uid for pod in part.pods)}
        idleness = Idleness(
            end_ms,
            {uid: use for uid, use in measured.lasting.items() if uid in known},
            {uid: use for uid, use in measured.recent.items() if uid in known},
            {uid: at for uid, at in warned.items() if uid in known},
            {uid: why for uid, why in round_.exempt.items() if uid in known},
            self._work(due, end_ms),
        )
        return IdleReport(idleness, tuple(round_.events), tuple(round_.faults))

    def warned(self, target: str) -> int:
        """Return the number of pods whose grace period is running."""
        return len(self._warned.get(target, {}))

    def _measured(self, rule: IdleReclaimPolicy, gangs: Sequence[Gang], end_ms: int) -> Idleness:
        """Return the idleness of pods that have been ready for long enough. If there is no such pod, the accountant is
        not queried."""
        longest_ms = max(rule.sustained, rule.grace) * MS_PER_SECOND
        pods = {
            (pod.namespace, pod.name): pod.uid
            for gang in gangs
            for pod in gang.pods
            if pod.held and pod.ready_ms is not None and pod.ready_ms <= end_ms - longest_ms
        }
        if not pods:
            return Idleness(end_ms, {}, {})
        spans = [self._usage(end_ms - span * MS_PER_SECOND, end_ms, ()) for span in (rule.sustained, rule.grace)]
        lasting, recent = ({pods[key]: _use(found) for key, found in span.items() if key in pods} for span in spans)
        return Idleness(end_ms, lasting, recent)

    def _work(self, due: Sequence[Bundle], end_ms: int) -> dict[str, float]:
        """Return the known work that each would lose; empty if the accountant does not answer."""
        found: dict[str, float] = {}
        for part in due:
            since = work_since(part)
            if since is None or since >= end_ms:
                continue
            names = [(pod.namespace, pod.name) for pod in part.pods]
            try:
                usage = self._usage(max(since, end_ms - LONGEST_MS), end_ms, names)
            except AccountantUnavailable:
                continue
            for pod in part.pods:
                held = usage.get((pod.namespace, pod.name))
                found[pod.uid] = gpu_hours_worked(pod, _use(held) if held is not None else None, since, end_ms)
        return found


class _Round:
    """One target in one cycle: annotations and events."""

    def __init__(self, rule: IdleReclaimPolicy, mode: Mode, cluster: Cluster, measured: Idleness, now_ms: int) -> None:
        self._rule = rule
        self._enforce = mode == "enforce"
        self._cluster = cluster
        self._measured = measured
        self._now_ms = now_ms
        self.events: list[Event] = []
        self.faults: list[str] = []
        self.exempt: dict[str, str] = {}

    def warn(self, part: Bundle, pod: Pod) -> bool:
        """Return whether its owner was warned. False means that the pod is exempt, gone, or could not be written."""
        if not self._may_be_warned(pod):
            return False
        until = instant(self._now_ms + self._rule.grace * MS_PER_SECOND)
        does = "its GPUs are reclaimed" if self._enforce else "its GPUs would be reclaimed (dry run)"
        text = f"it was {idleness_text(self._rule, part, self._measured)}: {does} after {until} unless they are used"
        if self._enforce and not self._note(pod, text):
            return False
        self._tell(pod, "Warning", "Idle" if self._enforce else "WouldBeIdle", text)
        return True

    def forgive(self, pod: Pod) -> None:
        if self._enforce:
            self._note(pod, None)
        self._tell(pod, "Normal", "IdleNoMore", "its GPUs are used again, or it is not known: nothing is reclaimed")

    def look_again(self, part: Bundle) -> None:
        """Check whether an owner has exempted a pod during its grace period."""
        for pod in part.pods:
            self._may_be_warned(pod)

    def _may_be_warned(self, pod: Pod) -> bool:
        try:
            obj = self._cluster.get(POD, pod.name, pod.namespace)
        except NotFound:
            return False
        except ClusterError as error:
            self.faults.append(f"{pod.namespace}/{pod.name}: {error}")
            return False
        if obj["metadata"].get("uid", "") != pod.uid:
            return False
        reason = exemption(self._rule.exempt, obj)
        if (obj["metadata"].get("annotations") or {}).get(OPT_OUT) == "never":
            reason = "its owner has opted out of preemption"
        if reason is not None:
            self.exempt[pod.uid] = reason
        return reason is None

    def _note(self, pod: Pod, text: str | None) -> bool:
        change = {"metadata": {"uid": pod.uid, "annotations": {WARNING: text}}}
        try:
            self._cluster.patch(POD, pod.name, pod.namespace, change, field_manager=FIELD_MANAGER)
        except NotFound:
            return False
        except ClusterError as error:
            self.faults.append(f"{pod.namespace}/{pod.name}: {error}")
            return False
        return True

    def _tell(self, pod: Pod, kind: Literal["Normal", "Warning"], reason: str, text: str) -> None:
        self.events.append(Event(POD, pod.name, pod.namespace, pod.uid, kind, reason, text, self._now_ms))


def _use(found: Accounts) -> PodUse:
    return PodUse(found.busy, found.allocated_idle, found.allocated_unknown)
