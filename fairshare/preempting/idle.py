"""GPUs that are held and not used: who may be warned, and who was warned long enough ago to give way. Pure.

A pod is idle where the time that was measured idle leaves less than `below` for everything else, over `sustained`
and again over `grace`: time of which nothing is known, or that was not metered, counts as busy. So a rule without
measured utilisation never fires, and who works again while the grace lasts is idle no longer. A gang goes whole,
when each of its pods is idle; else only idle surplus goes. Victims count against the limits of every preemption.
What this must not do: look at an average over pods, one of which works.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import fsum

from accountant.preempting import IdleExemptions, IdleReclaimPolicy
from accountant.wire import Policy
from agent.units import MS_PER_SECOND, US_PER_HOUR, US_PER_MS
from fairshare.kube.kinds import Object
from fairshare.model import Gang, Pod
from fairshare.preempting.limits import Budget
from fairshare.preempting.rulings import Idleness, Outcome, Situation, Spared, Use, Verdict, Victim
from fairshare.preempting.sparing import past_of, protected, teams
from fairshare.preempting.victims import Bundle, bundles, counted_from, for_good

CLAIMANT = "Idle/"
"""Beginning of what stands for a claimant where the rule itself asks."""


def most_busy(pod: Pod, use: Use | None, span_ms: int) -> float:
    """The largest part of the span that its GPUs can have been busy, 0..1; 1 where nothing was measured."""
    if use is None:
        return 1.0
    held_us = max(pod.gpus * span_ms * US_PER_MS, use.busy_us + use.idle_us + use.unknown_us)
    return max(0.0, 1 - use.idle_us / held_us) if held_us > 0 else 1.0


def is_idle(rule: IdleReclaimPolicy, pod: Pod, idleness: Idleness) -> bool:
    """Whether a pod was ready for all of `sustained` and provably idle, all the time and lately."""
    lasting_ms, recent_ms = rule.sustained * MS_PER_SECOND, rule.grace * MS_PER_SECOND
    return (
        pod.held
        and pod.ready_ms is not None
        and pod.ready_ms <= idleness.end_ms - max(lasting_ms, recent_ms)
        and most_busy(pod, idleness.lasting.get(pod.uid), lasting_ms) < rule.below
        and most_busy(pod, idleness.recent.get(pod.uid), recent_ms) < rule.below
    )


def idle_parts(rule: IdleReclaimPolicy, gangs: Iterable[Gang], idleness: Idleness, now_ms: int) -> Iterator[Bundle]:
    """Of each gang that runs all that may go because it is idle: everything, or what it can run without."""
    for gang in gangs:
        if gang.waits > 0 or _spared(rule.exempt, gang):
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


def ripe(rule: IdleReclaimPolicy, part: Bundle, warned: Mapping[str, int], now_ms: int) -> bool:
    """Whether the owner of every pod has known for the grace."""
    return all(pod.uid in warned and now_ms - warned[pod.uid] >= rule.grace * MS_PER_SECOND for pod in part.pods)


def exemption(exempt: IdleExemptions, pod: Object) -> str | None:
    """Why the rule leaves a pod alone, by what its owner wrote on it; None: it does not."""
    metadata = pod["metadata"]
    for what, wanted in (("label", exempt.labels), ("annotation", exempt.annotations)):
        here: Mapping[str, str] = metadata.get(f"{what}s") or {}
        for key, value in sorted(wanted.items()):
            if key in here and value in ("*", here[key]):
                return f"its {what} {key} exempts it"
    return None


def verdicts(policy: Policy, situation: Situation, budget: Budget, taken: set[str]) -> tuple[Verdict, ...]:
    """A verdict per gang of which idle parts are ripe, those warned first coming first. budget: grows smaller with
    each. taken: pods and whole gangs that other claims have already."""
    rule, idleness = policy.preemption.idle, situation.idle
    if rule is None or idleness is None or situation.calls_only:
        return ()
    parts: dict[str, list[Bundle]] = {}
    for part in idle_parts(rule, situation.gangs, idleness, situation.now_ms):
        mine = part.key in taken or any(pod.uid in taken for pod in part.pods)
        if not mine and ripe(rule, part, idleness.warned, situation.now_ms):
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
    situation: Situation,
    idleness: Idleness,
    parts: list[Bundle],
    budget: Budget,
    payers: Mapping[str, str],
) -> Verdict:
    gang, key = parts[0].gang, parts[0].key
    team = payers.get(gang.queue, gang.queue)
    victims: list[Victim] = []
    kept: Spared | None = None
    for found in sorted(parts, key=lambda part: tuple(pod.uid for pod in part.pods)):
        part = replace(found, lost_gpu_hours=_lost(found, idleness))
        reason, limit = protected(policy, situation, part), None
        if reason is None:
            denial = budget.refusal(key, team, part.lost_gpu_hours)
            if denial is not None:
                reason, limit = denial.reason, denial.limit
        if reason is not None:
            kept = Spared(key, gang.queue, reason, limit)
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
    since = counted_from(part, now_ms)
    reason = (
        f"{what} {shown(rule, part, idleness)}; its owner was warned {ago:.0f} min ago;"
        f" {part.lost_gpu_hours:.1f} GPU-hours of work since {since} are lost{for_good(part)}"
    )
    return Victim(part.gang, part.pods, part.gpus, part.lost_gpu_hours, part.whole, "idle", team, reason)


def shown(rule: IdleReclaimPolicy, part: Bundle, idleness: Idleness) -> str:
    """busy at most 1.2 % of the last 120 min, below the 5 % allowed."""
    span_ms = rule.sustained * MS_PER_SECOND
    busy = max(most_busy(pod, idleness.lasting.get(pod.uid), span_ms) for pod in part.pods)
    return f"busy at most {busy:.1%} of the last {rule.sustained / 60:g} min, less than {rule.below * 100:g} %"


def work_since(part: Bundle) -> int | None:
    """The instant since which its work is not safe; None where that is not known."""
    starts = [pod.started_ms for pod in part.pods if pod.started_ms is not None]
    since = min(starts, default=part.gang.started_ms)
    saved = part.gang.checkpoint_ms
    return saved if since is not None and saved is not None and saved > since else since


def worked(pod: Pod, use: Use | None, since_ms: int, end_ms: int) -> float:
    """GPU-hours that it held in [since_ms, end_ms) and that were not measured idle."""
    held_us = pod.gpus * max(0, end_ms - since_ms) * US_PER_MS
    return max(0.0, held_us - (use.idle_us if use is not None else 0)) / US_PER_HOUR


def _lost(part: Bundle, idleness: Idleness) -> float:
    """At most what any victim loses; less where the ledger knows how little of the time it worked."""
    known = [idleness.worked[pod.uid] for pod in part.pods if pod.uid in idleness.worked]
    return min(part.lost_gpu_hours, fsum(known)) if len(known) == len(part.pods) else part.lost_gpu_hours


def _spared(exempt: IdleExemptions, gang: Gang) -> bool:
    if exempt.priority is not None and gang.priority >= exempt.priority:
        return True
    return any(fnmatchcase(gang.namespace, pattern) for pattern in exempt.namespaces) or not gang.preemptible
