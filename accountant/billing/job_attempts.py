"""Finds the attempts of a job: when it started and stopped, how long it waited before, who stopped it and why, what
that lost, and who held its GPUs next.

An attempt is a time without a break in which at least one pod of the job held a GPU. It is found from who held which
GPUs, so it does not matter which scheduler stopped a pod. Who stopped it and why is known only from what is recorded:
the controller's decisions, the down times of nodes, and what the pods' status said, of which the agents and the
inventory tell (`gputally.kubernetes.pod_stops`).

Decisions name gangs, whose names are `<job>` or `<job>-<suffix>`. A scheduler may add the prefix `pg-` or the kind
of the job. A record about a victim lists its pods, which identify the job exactly. A record about a workload that
claims GPUs has no pods yet. It is assigned to the job with the longest matching name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Final

from accountant.core.claim_overlap import Span, union
from accountant.core.errors import UnsupportedQuestion
from accountant.core.record_age import BURN_MS, SETTLE_MS, silent_nodes
from accountant.ledger.protocols import Hold, Holds, JobKey, Moment, NodeFacts
from accountant.wire import decision_text
from accountant.wire.policy_models import Decision
from accountant.wire.usage_cost_and_job_models import AttemptEnd, JobAttempt, JobStops, NextHolder
from agent.wire import PodFacts
from gputally.base.apportionment import prorate
from gputally.base.money import rate
from gputally.base.pod_stop import DELETED, EVICTED, FAILED, PREEMPTED, PodStop
from gputally.base.units import BUCKET_MS, MS_PER_HOUR, MS_PER_MINUTE, US_PER_MS

MOST_ATTEMPTS: Final = 50
"""The newest attempts that are described."""
MOST_NODES: Final = 20
NEXT_WITHIN_MS: Final = 30 * MS_PER_MINUTE
"""A holder that comes later is not taken for the next one."""
_MOST_SPANS: Final = 4
"""An attempt's GPUs are looked up in this many spans at most."""
_STOPPED: Final = frozenset({"stopped", "partly", "unconfirmed"})
"""The results of a decision that stopped pods."""
_RECENT_MS: Final = BURN_MS + SETTLE_MS
"""A pod that held a GPU this long before the newest record still holds it, unless its end is known."""
_TOGETHER_MS: Final = 10 * MS_PER_MINUTE
"""Pods that are stopped together release their GPUs within this time: their grace periods differ."""
_DECIDED_MS: Final = MS_PER_HOUR
"""A decision stops an attempt within this time: victims are warned, and pods have a grace period."""
CONTROLLER: Final = "gputally"
"""Who stopped an attempt that gputally's controller stopped."""
_FOUND_MS: Final = MS_PER_HOUR
"""A pod that a failure of its node ended is found within this time after the node is back."""
CLOCKS_DIFFER_MS: Final = MS_PER_MINUTE
"""Clocks of different machines differ by less."""


_Taker = tuple[JobKey, str, str]
"""A job, with the team and the queue that its time is booked to."""
_Taken = tuple[int, Hold]
"""A hold of a GPU that an attempt released, and how long after."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """The newest attempts of a job, in order of time. earlier: the number of those before; None if it is unknown.
    stops: what all stops of the read time lost."""

    newest: tuple[JobAttempt, ...]
    earlier: int | None
    stops: JobStops


NOTHING_LOST: Final = JobStops(lost_gpu_us=0, known_lost_gpu_us=0)
_UNKNOWN: Final = JobStops(lost_gpu_us=None, known_lost_gpu_us=0)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The holds of one attempt."""

    holds: tuple[Hold, ...]

    @property
    def start_ms(self) -> int:
        return min(hold.start_ms for hold in self.holds)

    @property
    def end_ms(self) -> int:
        return max(hold.end_ms for hold in self.holds)


@dataclass(frozen=True, slots=True)
class _Found:
    """An attempt: what ended it, and what that lost since which checkpoint. is_cut: whether it may have begun before
    the read time."""

    of: _Stretch
    is_cut: bool
    end: AttemptEnd
    by: str
    reason: str
    decision: Decision | None
    lost_gpu_us: int | None
    checkpoint_ms: int | None


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of the whole ledger, to find the attempts of jobs in a span.

    victims: decisions that stopped pods, the newest first.
    teams: whose pods count; None: all.
    silent: the silent nodes, and the end of the newest record of each."""

    span: Span
    victims: Sequence[Decision]
    nodes: Sequence[NodeFacts]
    teams: Collection[str] | None
    newest_ms: int
    silent: Mapping[tuple[str, str], int]

    @classmethod
    def of(
        cls,
        ledger: Moment,
        span: Span,
        decisions: Iterable[Decision],
        nodes: Iterable[NodeFacts],
        teams: Collection[str] | None,
    ) -> _Known:
        status = ledger.status()
        silent = silent_nodes(status.newest_by_node, status.newest_ms)
        return cls(span, stopping(decisions), tuple(nodes), teams, status.newest_ms, silent)

    def holds(self, read: Holds) -> list[Hold]:
        """The holds that count, cut to the part of the span of which all are read."""
        cut = (_within(hold, self.within(read)) for hold in read.found if self.counts(hold.team))
        return [hold for hold in cut if hold is not None]

    def within(self, read: Holds) -> Span:
        """The part of the span of which all holds are read."""
        return max(self.span[0], read.whole_after_ms or 0), self.span[1]

    def counts(self, team: str) -> bool:
        return self.teams is None or team in self.teams

    def attempts(
        self,
        key: JobKey,
        holds: Sequence[Hold],
        pods: Sequence[PodFacts],
        reports: Sequence[int],
        held_until_ms: int,
        cut_ms: int | None,
    ) -> list[_Found]:
        """The attempts of a job, in order of time.

        reports: when its epochs ended, in order.
        held_until_ms: the end of the last time that it held a GPU.
        cut_ms: the instant before which its holds are not read; None if it had none."""
        every = _stretches(holds)
        if not every:
            return []
        facts = {pod.uid: pod for pod in pods}
        last, (_, end_ms) = every[-1], self.span
        goes_on = last.end_ms >= end_ms and end_ms < self.newest_ms
        runs = goes_on or _runs(last, facts, self.newest_ms - _RECENT_MS, self.victims)
        gone = held_until_ms <= end_ms and all(pod.ended_ms is not None for pod in pods)
        down = [node for node in self.nodes if node.cluster == key.cluster]
        found = []
        for one in every:
            is_last, is_cut = one is last, cut_ms is not None and one.start_ms <= cut_ms
            decision = None if is_last and runs else _stopped_by(self.victims, one)
            until_ms = _lived_until(one, facts)
            stop = None if is_last and runs else _stop_of(one, facts, until_ms)
            over: AttemptEnd = "ended" if is_last and gone else "stopped"
            end: AttemptEnd
            by = ""
            if is_last and runs:
                end, reason = "running", ""
            elif decision is not None:
                end, by, reason = "preempted", CONTROLLER, decision.reason
            elif stop is not None and stop.how == PREEMPTED:
                end, by, reason = "preempted", stop.by, stop.message or stop.reason
            elif (broken := _broken_node(down, one, until_ms)) is not None:
                end, reason = "node-down", broken
            elif stop is not None and stop.how == FAILED:
                end, reason = "failed", ": ".join(filter(None, (stop.reason, stop.message)))
            elif stop is not None and stop.how == DELETED:
                end, reason = over, "its pods were deleted, by a person or by their own controller"
            elif stop is not None:
                end, by, reason = "stopped", stop.by, stop.message or stop.reason
            elif is_last and _is_unseen(one, facts, self.silent):
                end, reason = "unknown", ""
            else:
                end, reason = over, ""
            lost_us, saved_ms = _lost(one, decision, reports, self.teams, since_ms=cut_ms if is_cut else None)
            if end in _NOT_STOPPED:
                lost_us = None
            found.append(_Found(one, is_cut, end, by, reason, decision, lost_us, saved_ms))
        return found


_NOT_STOPPED: Final = frozenset({"running", "ended", "unknown"})
"""The ends of attempts that nothing stopped, as far as anybody knows."""


def stopping(decisions: Iterable[Decision]) -> list[Decision]:
    """Those of the decisions that stopped pods."""
    return [one for one in decisions if one.mode == "enforce" and one.inputs.get("result") in _STOPPED]


def _stops(found: Iterable[_Found], *, whole: bool) -> JobStops:
    """What the stops of a job lost. whole: whether all of its attempts are read."""
    lost = [one.lost_gpu_us for one in found if one.end not in ("running", "ended")]
    known = sum(us for us in lost if us is not None)
    return JobStops(lost_gpu_us=known if whole and None not in lost else None, known_lost_gpu_us=known)


def attempts(
    ledger: Moment,
    key: JobKey,
    span: Span,
    decisions: Iterable[Decision],
    nodes: Iterable[NodeFacts],
    teams: Collection[str] | None,
    *,
    whole: bool = True,
) -> Attempts:
    """The attempts of a job in a span. Raises UnsupportedQuestion if the ledger does not know them.

    span: the time in which it held GPUs. What an attempt held before and after it does not count.
    decisions: those about the job, the newest first.
    teams: whose pods count, and whose jobs may be named as next holders; None: all.
    whole: whether the job began with the span, and not before."""
    read = ledger.holds((span,), of={key})
    numbered = whole and read.whole_after_ms is None
    known = _Known.of(ledger, span, decisions, nodes, teams)
    until_ms = max(span[1], known.newest_ms)
    mine = [pod.facts for pod in ledger.pods(span[0], until_ms, of={key}) if known.counts(pod.team)]
    facts = {pod.uid: pod for pod in mine}
    reports = sorted(report.at_ms for report in ledger.epochs(of={key}))
    _, held_until_ms = ledger.extents({key}).get(key, span)
    cut_ms = None if numbered else known.within(read)[0]
    every = known.attempts(key, known.holds(read), mine, reports, held_until_ms, cut_ms)
    shown = every[-MOST_ATTEMPTS:]
    stops = _stops(every, whole=read.whole_after_ms is None)
    if not shown:
        return Attempts((), 0 if numbered else None, stops)
    following = _next_holders(ledger, key, [one.of for one in shown if one.end != "running"], teams)
    before = [None, *every][-len(shown) - 1 : -1]
    rows = []
    for number, (previous, one) in enumerate(zip(before, shown, strict=True), len(every) - len(shown) + 1):
        pods, decision = {hold.uid for hold in one.of.holds}, one.decision
        created = [at for uid in pods if uid in facts and (at := facts[uid].created_ms) is not None]
        placed = [at for uid in pods if uid in facts and (at := facts[uid].scheduled_ms) is not None]
        began = min([*([] if one.is_cut else [one.of.start_ms]), *placed], default=None)
        stopped = [previous.of.end_ms] if previous else []
        since = max([*([min(created)] if created else []), *stopped], default=None)
        rows.append(
            JobAttempt(
                number=number if numbered else None,
                start_ms=None if one.is_cut else one.of.start_ms,
                end_ms=None if one.end == "running" else one.of.end_ms,
                pods=len(pods),
                nodes=tuple(sorted({hold.node for hold in one.of.holds}))[:MOST_NODES],
                gpus=len({hold.device for hold in one.of.holds}),
                held_gpus=_held(one.of.holds),
                gpu_us=sum(hold.gpu_us for hold in one.of.holds),
                waited_ms=None if since is None or began is None else max(0, began - since),
                end=one.end,
                by=one.by,
                reason=one.reason,
                decision=None if decision is None else decision.id,
                decision_ms=None if decision is None else decision.at_ms,
                lost_gpu_us=one.lost_gpu_us,
                checkpoint_ms=one.checkpoint_ms,
                next_holders=() if one.end == "running" else following[id(one.of)],
            )
        )
    return Attempts(tuple(rows), len(every) - len(shown) if numbered else None, stops)


def lost(
    ledger: Moment,
    keys: Collection[JobKey],
    span: Span,
    decisions: Sequence[Decision],
    nodes: Iterable[NodeFacts],
    teams: Collection[str] | None,
    *,
    decided_from_ms: int = 0,
) -> Mapping[JobKey, JobStops]:
    """What stops of these jobs in a span lost, as the attempts of each say. The number of queries does not depend on
    the number of jobs. Unknown of a job with holds that are too many to be read, or that this ledger does not keep.

    decisions: those of the span, about any job, the newest first.
    decided_from_ms: earlier ones are not read."""
    if not keys:
        return {}
    try:
        read = ledger.holds((span,), of=keys)
    except UnsupportedQuestion:
        return dict.fromkeys(keys, _UNKNOWN)
    known = _Known.of(ledger, span, decisions, nodes, teams)
    holds: dict[JobKey, list[Hold]] = defaultdict(list)
    for hold in known.holds(read):
        holds[hold.key].append(hold)
    pods: dict[JobKey, list[PodFacts]] = defaultdict(list)
    for pod in ledger.pods(span[0], max(span[1], known.newest_ms), of=keys, ordered=False):
        if known.counts(pod.team):
            pods[pod.key].append(pod.facts)
    reports: dict[JobKey, list[int]] = defaultdict(list)
    for report in ledger.epochs(of=keys):
        reports[report.key].append(report.at_ms)
    extents = ledger.extents(keys)
    whole_from_ms = max(read.whole_after_ms or 0, decided_from_ms)
    within_ms = known.within(read)[0]
    found = dict.fromkeys(keys, NOTHING_LOST)
    for key, (began_ms, until_ms) in extents.items():
        of_job = replace(known, victims=_naming(decisions, key, pods[key]))
        cut_ms = within_ms if began_ms < within_ms else None
        every = of_job.attempts(key, holds[key], pods[key], sorted(reports[key]), until_ms, cut_ms)
        is_whole = whole_from_ms <= span[0] or began_ms >= whole_from_ms
        found[key] = _stops(every, whole=is_whole)
    return found


def _naming(decisions: Sequence[Decision], key: JobKey, pods: Iterable[PodFacts]) -> Sequence[Decision]:
    """Those of the decisions that stopped pods of a job."""
    if not decisions:
        return ()
    names, gangs = {f"{key.namespace}/{pod.name}" for pod in pods}, gangs_of(key)
    return [
        one
        for one in decisions
        if one.cluster in ("", key.cluster)
        and one.subject.partition("/")[2].startswith(gangs)
        and not names.isdisjoint(named(one))
    ]


def _within(hold: Hold, span: Span) -> Hold | None:
    """The part of a hold in a span; None if there is none."""
    begin, end = max(hold.start_ms, span[0]), min(hold.end_ms, span[1])
    if begin >= end:
        return None
    length_ms = hold.end_ms - hold.start_ms
    gpu_us = prorate(hold.gpu_us, length_ms, begin - hold.start_ms, end - hold.start_ms)
    return replace(hold, start_ms=begin, end_ms=end, gpu_us=gpu_us)


def _runs(one: _Stretch, facts: Mapping[str, PodFacts], recent_ms: int, victims: Iterable[Decision]) -> bool:
    """Whether a pod of the attempt held a GPU of late, is not known to have ended, and was not stopped."""
    stopped = {name for decision in victims if decision.at_ms >= one.start_ms for name in named(decision)}
    return any(
        hold.end_ms > recent_ms
        and (hold.uid not in facts or facts[hold.uid].ended_ms is None)
        and f"{hold.key.namespace}/{hold.pod}" not in stopped
        for hold in one.holds
    )


def _is_unseen(one: _Stretch, facts: Mapping[str, PodFacts], silent: Mapping[tuple[str, str], int]) -> bool:
    """Whether a pod of the attempt held a GPU up to the last record of a silent node, and is not known to have
    ended."""
    return any(
        (newest_ms := silent.get((hold.key.cluster, hold.node))) is not None
        and hold.end_ms > newest_ms - _RECENT_MS
        and (hold.uid not in facts or facts[hold.uid].ended_ms is None)
        for hold in one.holds
    )


def _stretches(holds: Sequence[Hold]) -> list[_Stretch]:
    """The attempts, in order of time. A pod goes on while its node does not report, so all its time is of one attempt;
    so is that of a batch system's job, which keeps its number when it starts again."""
    of_pod: dict[str, list[Hold]] = defaultdict(list)
    for hold in holds:
        of_pod[hold.uid].append(hold)
    groups: list[list[Hold]] = []
    until = 0
    for some in sorted(of_pod.values(), key=lambda some: (some[0].start_ms, some[0].uid)):
        if not groups or some[0].start_ms >= until:
            groups.append([])
        groups[-1] += some
        until = max(until, *(hold.end_ms for hold in some))
    return [_Stretch(tuple(group)) for group in groups]


def _next_holders(
    ledger: Moment, key: JobKey, stopped: Sequence[_Stretch], teams: Collection[str] | None
) -> Mapping[int, tuple[NextHolder, ...] | None]:
    """Who held the GPUs of each attempt next, by the id of the attempt; None if the ledger has too much to tell."""
    if not stopped:
        return {}
    released = [(one, _released(one)) for one in stopped]
    gpus = {(key.cluster, hold.gpu) for _, of_one in released for hold in of_one}
    read = ledger.holds([span for _, of_one in released for span in _spans_after(of_one)], gpus=gpus)
    of_device: dict[int, list[Hold]] = defaultdict(list)
    for hold in read.found:
        of_device[hold.device].append(hold)
    taken: dict[int, tuple[NextHolder, ...] | None] = {}
    for one, of_one in released:
        if read.whole_after_ms is not None and any(hold.end_ms <= read.whole_after_ms for hold in of_one):
            taken[id(one)] = None
            continue
        by_taker: dict[_Taker, list[_Taken]] = defaultdict(list)
        for hold in of_one:
            later = (
                other
                for other in of_device[hold.device]
                if hold.end_ms <= other.start_ms < hold.end_ms + NEXT_WITHIN_MS
            )
            taker = next(later, None)
            if taker is not None and (taker.key != key or taker.start_ms > one.end_ms):
                by_taker[taker.key, taker.team, taker.queue].append((taker.start_ms - hold.end_ms, taker))
        taken[id(one)] = _described(by_taker, teams)
    return taken


def _released(one: _Stretch) -> list[Hold]:
    """The last hold of each GPU, or part of one, by each pod."""
    last = {(hold.device, hold.uid): hold for hold in sorted(one.holds, key=lambda hold: hold.end_ms)}
    return list(last.values())


def _spans_after(released: Iterable[Hold]) -> list[Span]:
    """The spans in which the next holders of these GPUs begin, or one around them if they are many."""
    spans = union((hold.end_ms - BUCKET_MS, hold.end_ms + NEXT_WITHIN_MS) for hold in released)
    return spans if len(spans) <= _MOST_SPANS else [(spans[0][0], spans[-1][1])]


def _described(by_taker: Mapping[_Taker, Sequence[_Taken]], teams: Collection[str] | None) -> tuple[NextHolder, ...]:
    rows, hidden = [], list[_Taken]()
    for (key, team, queue), taken in sorted(by_taker.items(), key=lambda item: (-len(item[1]), item[0])):
        if teams is not None and team not in teams:
            hidden += taken
            continue
        rows.append(_next_holder(taken, key.id, team, queue))
    if hidden:
        rows.append(_next_holder(hidden))
    return tuple(rows)


def _next_holder(
    taken: Sequence[_Taken], job: str | None = None, team: str | None = None, queue: str | None = None
) -> NextHolder:
    after_ms = min(after for after, _ in taken)
    held = _held([hold for _, hold in taken])
    return NextHolder(job=job, team=team, queue=queue, gpus=len(taken), held_gpus=held, after_ms=after_ms)


def _held(holds: Iterable[Hold]) -> Decimal:
    """How much of GPUs was held: the sum of the parts of each, over the time that each was held."""
    held: dict[int, tuple[int, int]] = {}
    for hold in holds:
        gpu_us, length_us = held.get(hold.device, (0, 0))
        held[hold.device] = gpu_us + hold.gpu_us, length_us + (hold.end_ms - hold.start_ms) * US_PER_MS
    return rate(sum((Fraction(gpu_us, length_us) for gpu_us, length_us in held.values()), Fraction(0)))


def _stopped_by(victims: Iterable[Decision], one: _Stretch) -> Decision | None:
    """The newest decision that stopped the attempt: pods that it names held GPUs until about its end. Others only made
    it smaller."""
    last = {f"{hold.key.namespace}/{hold.pod}" for hold in one.holds if hold.end_ms >= one.end_ms - _TOGETHER_MS}
    for decision in victims:
        if not max(one.start_ms, one.end_ms - _DECIDED_MS) <= decision.at_ms <= one.end_ms + CLOCKS_DIFFER_MS:
            continue
        if not last.isdisjoint(named(decision)):
            return decision
    return None


_FIRST: Final = {PREEMPTED: 0, EVICTED: 1, FAILED: 3, DELETED: 4}
"""Which of several pods' stops says most about their attempt: a pod whose gang is stopped may fail, and is deleted."""


def _last_pods(one: _Stretch) -> set[str]:
    """The pods (uid) that held GPUs until about the end of the attempt."""
    return {hold.uid for hold in one.holds if hold.end_ms >= one.end_ms - _TOGETHER_MS}


def _lived_until(one: _Stretch, facts: Mapping[str, PodFacts]) -> int:
    """The end of the attempt's pods. It is later than their last record if their node failed before it sent more."""
    ends = (facts[uid].ended_ms for uid in _last_pods(one) if uid in facts)
    return max([one.end_ms, *(end for end in ends if end is not None)])


def _stop_of(one: _Stretch, facts: Mapping[str, PodFacts], until_ms: int) -> PodStop | None:
    """What the status of the attempt's pods says about its end. As of decisions, only pods count that held GPUs until
    about its end, and only stops of about that time: an eviction that was called off stays in a pod's status."""
    stops = []
    for uid in _last_pods(one):
        pod = facts.get(uid)
        if pod is None or pod.stop is None:
            continue
        at_ms = pod.stop.at_ms if pod.stop.at_ms is not None else pod.ended_ms
        if at_ms is None or max(one.start_ms, one.end_ms - _DECIDED_MS) <= at_ms <= until_ms + CLOCKS_DIFFER_MS:
            stops.append((_FIRST.get(pod.stop.how, 2), at_ms is None, at_ms or 0, pod.name, uid, pod.stop))
    return min(stops)[-1] if stops else None


def named(decision: Decision) -> list[str]:
    """The pods that a decision names, as NAMESPACE/NAME."""
    return [name for name in decision_text.as_list(decision.inputs.get("pods")) if isinstance(name, str)]


def _broken_node(nodes: Iterable[NodeFacts], one: _Stretch, until_ms: int) -> str | None:
    """Why a node of the attempt could not be used when it stopped; None if all could.

    until_ms: the end of the attempt's pods."""
    names = {hold.node for hold in one.holds}
    since_ms = max(one.end_ms - CLOCKS_DIFFER_MS, until_ms - _FOUND_MS)
    for node in nodes:
        for down in node.down if node.name in names else ():
            begins = one.start_ms <= down.start_ms <= until_ms + CLOCKS_DIFFER_MS
            if begins and (down.end_ms is None or down.end_ms >= since_ms):
                return f"{node.name} is down: {down.reason}" if down.reason else f"{node.name} is down"
    return None


def _lost(
    one: _Stretch,
    decision: Decision | None,
    reports: Sequence[int],
    teams: Collection[str] | None,
    *,
    since_ms: int | None,
) -> tuple[int | None, int | None]:
    """The GPU-µs held since the last checkpoint, and its instant; None if it is not known. What the controller recorded
    counts for readers who see all the pods that it stopped.

    since_ms: what the attempt held before this instant is not read; None: all of it is."""
    recorded = decision.inputs.get("lost_gpu_hours") if decision is not None else None
    names = {f"{hold.key.namespace}/{hold.pod}" for hold in one.holds}
    if decision is not None and teams is not None and not names.issuperset(named(decision)):
        recorded = None
    if isinstance(recorded, int | float):
        at_ms = decision.inputs.get("checkpoint_ms") if decision is not None else None
        return round(recorded * MS_PER_HOUR * US_PER_MS), at_ms if isinstance(at_ms, int) else None
    if not reports:
        return None, None
    saved_ms = max((at for at in reports if at <= one.end_ms), default=None)
    saved = saved_ms or 0
    if since_ms is not None and saved < since_ms:
        return None, saved_ms
    lost_us = sum(
        prorate(hold.gpu_us, length, max(0, saved - hold.start_ms), length)
        for hold in one.holds
        if (length := hold.end_ms - hold.start_ms) > 0 and hold.end_ms > saved
    )
    return lost_us, saved_ms


def gangs_of(key: JobKey) -> tuple[str, ...]:
    """The texts NAMESPACE/NAME with which the names of the job's gangs begin."""
    return tuple(f"{key.namespace}/{name}" for name in _names(key.job))


def decisions_about_job(
    decisions: Iterable[Decision], key: JobKey, pods: Collection[str], siblings: Collection[str]
) -> list[Decision]:
    """The decisions about the job, in the given order.

    pods: names of the job's pods.
    siblings: jobs (`Kind/name`) of the same cluster and namespace."""
    pod_names = {f"{key.namespace}/{name}" for name in pods}
    jobs = sorted({key.job, *siblings}, key=lambda job: (-len(_name(job)), job != key.job, job))
    return [decision for decision in decisions if _is_about(decision, key, pod_names, jobs)]


def _is_about(decision: Decision, key: JobKey, pods: Collection[str], jobs: Iterable[str]) -> bool:
    """Whether a decision is about this job. jobs: all jobs of the namespace, the longest name first, and the job itself
    before others of its name."""
    subject = decision.subject.partition("/")[2]
    if subject == f"{key.namespace}/{_name(key.job)}":
        return True
    victims = named(decision)
    if victims:
        return any(name in pods for name in victims)
    begin = f"{key.namespace}/"
    if not subject.startswith(begin):
        return False
    return next((job for job in jobs if _is_of(subject.removeprefix(begin), job)), None) == key.job


def _is_of(gang: str, job: str) -> bool:
    return any(gang == name or gang.startswith(f"{name}-") for name in _names(job))


def _names(job: str) -> tuple[str, ...]:
    kind, name = job.partition("/")[0], _name(job)
    return name, f"pg-{name}", f"{kind.lower()}-{name}"


def _name(job: str) -> str:
    """A job's name without the kind."""
    return job.partition("/")[2] or job
