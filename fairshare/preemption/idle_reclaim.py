"""Finds pods that do not use their GPUs, warns their owners, and selects those whose grace period is over.

A pod is idle if its GPUs were busy for less than the fraction `below` of the last `sustained` seconds, and also of the
last `grace` seconds (three settings of the policy). Unknown and unmetered time counts as busy, so the rule never
applies without measured utilisation. A pod that works again during the grace period is no longer idle.

A gang is stopped as a whole if each of its pods is idle. Otherwise only idle pods of its surplus are stopped: pods
without which the gang still runs. The rule never uses an average over pods, because one of them may work. Victims count
against the limits of all preemptions.

The accountant returns how busy every pod was recently. The owner of each newly idle pod gets an annotation and an
Event. The time of the warning is in memory and, for restarts, in the status ConfigMap. In a dry run there is only the
Event, which says that it is a dry run. If a pod is no longer idle, the warning is withdrawn and its owner gets an
Event. While the accountant does not answer, no workload counts as idle, and no warning is withdrawn.

A warning that could not be written does not count, so its grace period does not begin. A warning of a dry run does not
count once the rule is enforced. This module stops no workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import fsum
from typing import Literal

import msgspec

from accountant.wire.policy_models import IdleExemptions, IdleReclaimPolicy, Policy
from accountant.wire.scheduler_sections import Mode
from accountant.wire.usage_cost_and_job_models import Accounts
from fairshare.core.queues_and_weights import Gang, Pod
from fairshare.core.scheduler_queue_objects import instant
from fairshare.preemption.eviction import OPT_OUT
from fairshare.preemption.preemption_types import (
    Idleness,
    Outcome,
    PodUse,
    PreemptionInputs,
    SparedWorkload,
    Verdict,
    Victim,
)
from fairshare.preemption.reclaim_rules_and_limits import ReclaimBudget
from fairshare.preemption.victim_candidates import (
    Bundle,
    bundles,
    loss_text,
    make_victim,
    preemption_record,
    protected,
    teams,
)
from fairshare.targets.status_config_map import decoded
from fairshare.targets.weight_plan import FIELD_MANAGER
from gputally.base.errors import AccountantUnavailable, ClusterError, NotFound
from gputally.base.units import MS_PER_DAY, MS_PER_MINUTE, MS_PER_SECOND, US_PER_HOUR, US_PER_MS
from gputally.kubernetes.objects import POD, Cluster, Event, Object

CLAIMANT = "Idle/"
"""Prefix of the claimant's name when the rule itself is the reason."""


def most_busy(pod: Pod, use: PodUse | None, span_ms: int) -> float:
    """Return an upper limit of the busy part (0..1) of the span; 1 if nothing was measured."""
    if use is None:
        return 1.0
    held_us = max(pod.gpus * span_ms * US_PER_MS, use.busy_us + use.idle_us + use.unknown_us)
    return max(0.0, 1 - use.idle_us / held_us) if held_us > 0 else 1.0


def is_idle(rule: IdleReclaimPolicy, pod: Pod, idleness: Idleness) -> bool:
    """Return whether the pod was ready and idle for all of the rule's `sustained`, and idle over its `grace` too."""
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
        parts = bundles(gang, now_ms)
        idle = [
            part
            for part in parts
            if part.pods and all(is_idle(rule, pod, idleness) and pod.uid not in idleness.exempt for pod in part.pods)
        ]
        if idle and len(idle) == len(parts):
            yield idle[-1].with_rest(idle[:-1])  # the core comes last
        else:
            yield from (part for part in idle if not part.whole)


def grace_is_over(rule: IdleReclaimPolicy, part: Bundle, warned: Mapping[str, int], now_ms: int) -> bool:
    """Return whether the owner of every pod was warned at least `grace` ago."""
    return all(pod.uid in warned and now_ms - warned[pod.uid] >= rule.grace * MS_PER_SECOND for pod in part.pods)


def exemption(exempt: IdleExemptions, pod: Object) -> str | None:
    """Return which label or annotation exempts the pod; None if none does."""
    metadata = pod["metadata"]
    for kind, exempting in (("label", exempt.labels), ("annotation", exempt.annotations)):
        present: Mapping[str, str] = metadata.get(f"{kind}s") or {}
        for key, value in sorted(exempting.items()):
            if key in present and value in ("*", present[key]):
                return f"its {kind} {key} exempts it"
    return None


def verdicts(
    policy: Policy, situation: PreemptionInputs, budget: ReclaimBudget, taken: set[str]
) -> tuple[Verdict, ...]:
    """Return a verdict per gang whose idle parts may be stopped now, in the order of their warnings.

    budget: the limits, which each verdict reduces.
    taken: uids of pods and keys of whole gangs that other claims have already selected."""
    rule, idleness = policy.preemption.idle, situation.idle
    if rule is None or idleness is None or situation.calls_only:
        return ()
    parts: dict[str, list[Bundle]] = {}
    for part in idle_parts(rule, situation.gangs, idleness, situation.now_ms):
        selected = part.key in taken or any(pod.uid in taken for pod in part.pods)
        if not selected and grace_is_over(rule, part, idleness.warned, situation.now_ms):
            parts.setdefault(part.key, []).append(part)
    first_warning = {
        key: min(idleness.warned[pod.uid] for part in gang_parts for pod in part.pods)
        for key, gang_parts in parts.items()
    }
    team_of = teams(policy)
    return tuple(
        _verdict(policy, rule, situation, idleness, parts[key], budget, team_of)
        for key in sorted(parts, key=lambda key: (first_warning[key], key))
    )


def _verdict(
    policy: Policy,
    rule: IdleReclaimPolicy,
    situation: PreemptionInputs,
    idleness: Idleness,
    parts: list[Bundle],
    budget: ReclaimBudget,
    team_of: Mapping[str, str],
) -> Verdict:
    """Return the verdict for the idle parts of one gang, and reduce the budget by its victims."""
    gang, key = parts[0].gang, parts[0].key
    team = team_of.get(gang.queue, gang.queue)
    victims: list[Victim] = []
    spared: SparedWorkload | None = None
    for idle_part in sorted(parts, key=lambda part: tuple(pod.uid for pod in part.pods)):
        part = replace(idle_part, lost_gpu_hours=_lost(idle_part, idleness))
        reason, limit = protected(policy, situation, part), None
        if reason is None:
            denial = budget.refusal(key, team, part.lost_gpu_hours)
            if denial is not None:
                reason, limit = denial.reason, denial.limit
        if reason is not None:
            spared = SparedWorkload(key, gang.queue, reason, limit)
            continue
        budget.spend(preemption_record(team, part, situation.now_ms))
        victims.append(_victim(team, rule, part, idleness, situation.now_ms))
    gpus = fsum(part.gpus for part in parts)
    freed = fsum(victim.gpus for victim in victims)
    reason = f"does not use {gpus:g} GPUs"
    reason += f": {freed:g} are reclaimed" if victims else f", but {spared.reason if spared else ''}"
    outcome: Outcome = "preempts" if victims else "denied"
    return Verdict(
        CLAIMANT + key, gang.queue, gpus, "idle", outcome, reason, tuple(victims), (spared,) if spared else ()
    )


def _victim(team: str, rule: IdleReclaimPolicy, part: Bundle, idleness: Idleness, now_ms: int) -> Victim:
    what = f"its {part.gpus:g} GPUs were" if part.whole else f"{part.gpus:g} of its GPUs were"
    ago = (now_ms - max(idleness.warned[pod.uid] for pod in part.pods)) / MS_PER_SECOND / 60
    warned, loss = f"its owner was warned {ago:.0f} min ago", loss_text(part, now_ms)
    reason = f"{what} {idleness_text(rule, part, idleness)}; {warned}; {loss}"
    return make_victim(part, "idle", team, reason)


def idleness_text(rule: IdleReclaimPolicy, part: Bundle, idleness: Idleness) -> str:
    """Describe how idle a part is, for example `busy at most 1.2% of the last 120 min, less than 5 %`."""
    span_ms = rule.sustained * MS_PER_SECOND
    busy = max(most_busy(pod, idleness.lasting.get(pod.uid), span_ms) for pod in part.pods)
    return f"busy at most {busy:.1%} of the last {rule.sustained / 60:g} min, less than {rule.below * 100:g} %"


def work_since(part: Bundle) -> int | None:
    """Return the time since which the part's work is not saved; None if unknown."""
    starts = [pod.started_ms for pod in part.pods if pod.started_ms is not None]
    since = min(starts, default=part.gang.started_ms)
    saved = part.gang.checkpoint_ms
    return saved if since is not None and saved is not None and saved > since else since


def gpu_hours_worked(pod: Pod, use: PodUse | None, since_ms: int, end_ms: int) -> float:
    """Return the GPU-hours that the pod held in [since_ms, end_ms) and that were not measured idle."""
    held_us = pod.gpus * max(0, end_ms - since_ms) * US_PER_MS
    return max(0.0, held_us - (use.idle_us if use is not None else 0)) / US_PER_HOUR


def _lost(part: Bundle, idleness: Idleness) -> float:
    """Return the GPU-hours of work that a preemption loses: without idle time if the ledger knows it for every pod."""
    worked = [idleness.worked[pod.uid] for pod in part.pods if pod.uid in idleness.worked]
    return min(part.lost_gpu_hours, fsum(worked)) if len(worked) == len(part.pods) else part.lost_gpu_hours


def _is_exempt(exempt: IdleExemptions, gang: Gang) -> bool:
    if exempt.priority is not None and gang.priority >= exempt.priority:
        return True
    return any(fnmatchcase(gang.namespace, pattern) for pattern in exempt.namespaces) or not gang.preemptible


WARNING = "gputally.dev/idle-warning"
"""Annotation on a pod: the reason of the warning, and the time after which its GPUs may be reclaimed."""
MOST_WARNED = 500
"""Largest number of pods of a target whose owners are warned at a time."""
CHECKS_PER_GRACE = 6
"""Number of checks during one grace period. Each queries the accountant for the usage of every pod."""
MOST_DUE = 20
"""Largest number of workloads in one check whose work is queried. The others wait for the next check."""
EXEMPT_MS = 10 * MS_PER_MINUTE
"""Time after which an exempt pod is checked again."""
LONGEST_MS = 90 * MS_PER_DAY
"""Longest span for which work is queried. Older time counts as work."""
_WARNED = msgspec.json.Decoder(list[tuple[str, str, int, Literal["dry-run", "enforce"]]])
"""Decodes the state: target, uid of the pod, time of the warning, and the rule's mode at that time."""
PodUsage = Callable[[int, int, Sequence[tuple[str, str]]], Mapping[tuple[str, str], Accounts]]
"""Returns GPU time over [start_ms, end_ms) by (namespace, name), of these pods (none given: of all). Raises
AccountantUnavailable."""


@dataclass(frozen=True, slots=True)
class IdleReport:
    """The result of a check.

    idleness: the idleness of the pods whose grace period is over; None if nothing was checked.
    events: events for the owners.
    faults: warnings that could not be written."""

    idleness: Idleness | None = None
    events: tuple[Event, ...] = ()
    faults: tuple[str, ...] = ()


class IdleWatch:
    """Checks pods for idle GPUs, and remembers whose owners were warned. Not thread-safe."""

    def __init__(self, usage: PodUsage) -> None:
        self._usage = usage
        self._warned: dict[str, dict[str, tuple[int, Mode]]] = {}
        self._exempt: dict[str, int] = {}
        self._checked_ms: dict[str, int] = {}

    def restore(self, text: str) -> None:
        """Continue from the text that `state` wrote. An invalid text is ignored, and every grace period begins
        again."""
        self._warned = {}
        for target, uid, at_ms, mode in decoded(text, _WARNED) or ():
            self._warned.setdefault(target, {})[uid] = (at_ms, mode)

    def state(self) -> str:
        """Return the state to keep; empty if no pod is warned."""
        rows = [
            (target, uid, *warning)
            for target, warnings in sorted(self._warned.items())
            for uid, warning in sorted(warnings.items())
        ]
        return msgspec.json.encode(rows).decode() if rows else ""

    def check(
        self,
        rule: IdleReclaimPolicy | None,
        mode: Mode,
        cluster: Cluster,
        target: str,
        gangs: Sequence[Gang],
        end_ms: int,
        now_ms: int,
    ) -> IdleReport:
        """Check a target. Between two checks no warning is written or withdrawn, and no workload is reclaimed.

        mode: the mode of the rule at this target.
        end_ms: the time up to which usage is metered."""
        if rule is None or mode == "off":
            self._warned.pop(target, None)
            return IdleReport()
        grace_ms = rule.grace * MS_PER_SECOND
        if now_ms - self._checked_ms.get(target, -grace_ms) < grace_ms // CHECKS_PER_GRACE:
            return IdleReport()
        before = {uid: at for uid, (at, warned_in) in self._warned.get(target, {}).items() if warned_in == mode}
        self._exempt = {uid: at for uid, at in self._exempt.items() if now_ms - at < EXEMPT_MS}
        try:
            measured = self._measured(rule, gangs, end_ms)
        except AccountantUnavailable:
            return IdleReport()
        self._checked_ms[target] = now_ms
        parts = tuple(idle_parts(rule, gangs, measured, now_ms))
        idle_uids = {pod.uid for part in parts for pod in part.pods}
        warnings = _Warnings(rule, mode, cluster, measured, now_ms)
        pods = {pod.uid: pod for gang in gangs for pod in gang.pods if pod.held}
        working = [pods[uid] for uid in sorted(before.keys() - idle_uids) if uid in pods]
        # One whose warning could not be removed is warned from now on, so that the next check removes it.
        standing = {pod.uid: now_ms for pod in working if not warnings.withdraw(pod)}
        warned = standing | {uid: at for uid, at in before.items() if uid in idle_uids}
        for part in sorted(parts, key=lambda part: (min(warned.get(p.uid, now_ms) for p in part.pods), part.key)):
            for pod in part.pods:
                new = pod.uid not in warned and pod.uid not in self._exempt and len(warned) < MOST_WARNED
                if new and warnings.warn(part, pod):
                    warned[pod.uid] = now_ms
        due = [part for part in parts if grace_is_over(rule, part, warned, now_ms)][:MOST_DUE]
        due_uids = {pod.uid for part in due for pod in part.pods}
        for part in due:
            for pod in part.pods:
                warnings.may_be_warned(pod)  # its owner may have exempted it during the grace period
        self._exempt |= dict.fromkeys(warnings.exempt, now_ms)
        self._warned[target] = {uid: (at, mode) for uid, at in warned.items() if uid not in warnings.exempt}
        idleness = Idleness(
            end_ms,
            {uid: use for uid, use in measured.lasting.items() if uid in due_uids},
            {uid: use for uid, use in measured.recent.items() if uid in due_uids},
            {uid: at for uid, at in warned.items() if uid in due_uids},
            {uid: reason for uid, reason in warnings.exempt.items() if uid in due_uids},
            self._work(due, end_ms),
        )
        return IdleReport(idleness, tuple(warnings.events), tuple(warnings.faults))

    def warned(self, target: str) -> int:
        """Return the number of pods whose owners are warned."""
        return len(self._warned.get(target, {}))

    def _measured(self, rule: IdleReclaimPolicy, gangs: Sequence[Gang], end_ms: int) -> Idleness:
        """Return the idleness of the pods that have been ready for long enough. Without such a pod the accountant is
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
        """Return by pod the GPU-hours of work that a preemption would lose; empty if the accountant does not answer."""
        worked: dict[str, float] = {}
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
                accounts = usage.get((pod.namespace, pod.name))
                use = _use(accounts) if accounts is not None else None
                worked[pod.uid] = gpu_hours_worked(pod, use, since, end_ms)
        return worked


class _Warnings:
    """Writes and withdraws warnings in one check of one target, and collects the events for their owners."""

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
        """Warn the pod's owner. Return False if the pod is exempt or gone, or its annotation could not be written."""
        if not self.may_be_warned(pod):
            return False
        until = instant(self._now_ms + self._rule.grace * MS_PER_SECOND)
        effect = "its GPUs are reclaimed" if self._enforce else "its GPUs would be reclaimed (dry run)"
        text = f"it was {idleness_text(self._rule, part, self._measured)}: {effect} after {until} unless they are used"
        if self._enforce and not self._annotate(pod, text):
            return False
        self._add_event(pod, "Warning", "Idle" if self._enforce else "WouldBeIdle", text)
        return True

    def withdraw(self, pod: Pod) -> bool:
        """Withdraw the warning of a pod that is no longer idle. Return False if its annotation could not be removed."""
        if self._enforce and not self._annotate(pod, None):
            return False
        text = "its GPUs are used again, or their use is unknown: nothing is reclaimed"
        self._add_event(pod, "Normal", "IdleNoMore", text)
        return True

    def may_be_warned(self, pod: Pod) -> bool:
        """Return whether the pod still exists and is not exempt. The reason of an exemption is recorded."""
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

    def _annotate(self, pod: Pod, text: str | None) -> bool:
        """Write the warning on the pod (None: remove it), and return whether this succeeded."""
        change = {"metadata": {"uid": pod.uid, "annotations": {WARNING: text}}}
        try:
            self._cluster.patch(POD, pod.name, pod.namespace, change, field_manager=FIELD_MANAGER)
        except NotFound:
            return False
        except ClusterError as error:
            self.faults.append(f"{pod.namespace}/{pod.name}: {error}")
            return False
        return True

    def _add_event(self, pod: Pod, kind: Literal["Normal", "Warning"], reason: str, text: str) -> None:
        self.events.append(Event(POD, pod.name, pod.namespace, pod.uid, kind, reason, text, self._now_ms))


def _use(accounts: Accounts) -> PodUse:
    return PodUse(accounts.busy, accounts.allocated_idle, accounts.allocated_unknown)
