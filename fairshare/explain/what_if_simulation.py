"""Replays past jobs under another policy, and compares the GPUs and waits of each queue.

The replay has one level: only the leaf queues take part. The weight of a leaf is its share among its siblings times the
shares of the queues above it, which is what a tree gives while all queues request GPUs. A limit applies to each leaf
below it separately. Quotas are the leaves' own, and priorities between queues are ignored.

Under a policy with quotas by GPU model the GPUs of each model are a replay of their own, with the jobs that ran on
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from math import fsum
from pathlib import Path
from statistics import fmean, median

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.core.gpu_models import OTHERS, parts_of, policy_of_part
from fairshare.core.queues_and_weights import UNLIMITED, PolicyTree
from fairshare.simulator import job_traces
from fairshare.simulator.job_traces import HeldHour
from fairshare.simulator.scheduler_engine import replay
from fairshare.simulator.simulated_controller import Feedback
from fairshare.simulator.simulation_model import (
    CONTROL_S,
    ReplayPool,
    ReplayRecord,
    Workload,
    workload_of,
    workload_of_rows,
)
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.apportionment import apportion
from gputally.base.errors import FairshareError
from gputally.base.gpu_model_names import most_precise
from gputally.base.units import MS_PER_HOUR, MS_PER_SECOND

HOUR_S = 3600
WARM_UP_S = 7 * 86_400
"""Longest replay before the shown span, so that the span begins with full queues and a history."""
Days = list[tuple[float, list[float]]]
"""For each day its end in days since the start of the span, and the mean GPUs of every queue."""


@dataclass(frozen=True, slots=True)
class ReplayedQueue:
    """The figures of one queue in the shown span of a replay.

    jobs: the number of jobs that were submitted in the span. Waits are those of these jobs. A job that never started
        has waited until the end."""

    queue: str
    gpu_hours: float
    jobs: int
    mean_wait_h: float
    median_wait_h: float
    preempted: int


def leaves_only(policy: Policy) -> Policy:
    """Return the policy with only its leaf queues."""
    tree = PolicyTree(policy)

    def part(queue: QueuePolicy) -> float:
        siblings = fsum(each.weight for each in tree.children[queue.parent])
        own = queue.weight / siblings if siblings > 0 else 0.0
        return own if queue.parent is None else own * part(tree.queues[queue.parent])

    def limit(queue: QueuePolicy) -> float:
        return min((each.limit for each in tree.upwards(queue.name) if each.limit != UNLIMITED), default=UNLIMITED)

    leaves = tuple(
        QueuePolicy(name=q.name, deserved=q.deserved, weight=part(q), limit=limit(q), team=q.team)
        for q in policy.queues
        if q.name not in tree.children
    )
    return policy.model_copy(update={"queues": leaves, "budgets": ()})


def leaf_names(policy: Policy) -> list[str]:
    """Return the names of the leaf queues, in the order of the policy."""
    return [queue.name for queue in leaves_only(policy).queues]


def bounded_together(policy: Policy) -> list[str]:
    """Return the queues whose quota or limit applies to several leaves, which one level cannot represent."""
    tree = PolicyTree(policy)
    return [q.name for q in policy.queues if len(tree.leaves(q.name)) > 1 and (q.limit > 0 or q.deserved != 0)]


def replay_under(
    policy: Policy, workload: Workload, gpus: int, end_s: int, progress: Callable[[float], None] | None = None
) -> ReplayRecord:
    """Replay `workload` under `policy` on `gpus` GPUs. Jobs of queues that are no leaves of the policy are left out.

    progress: called with the finished part, 0..1."""
    one_level = leaves_only(policy)
    workload = _sorted_into(workload, [queue.name for queue in one_level.queues])
    pool = ReplayPool(
        gpus,
        [gpus if q.deserved == UNLIMITED else q.deserved for q in one_level.queues],
        [q.weight for q in one_level.queues],
        [None if q.limit == UNLIMITED else int(q.limit) for q in one_level.queues],
    )
    return replay(workload.fitting(gpus), pool, end_s, steering=Feedback(one_level), progress=progress)


def replay_past(
    policy: Policy, past: ReplayHistory, progress: Callable[[float], None] = lambda _part: None
) -> tuple[ReplayRecord, ...]:
    """Replay the past under `policy`: one record, or one for the GPUs of each model by which it has quotas.

    progress: called with the finished part, 0..1."""
    parts = parts_of(policy) if past.by_model else ()
    pools = [(policy_of_part(policy, model), *past.of_part(policy, model)) for model in parts]
    pools = [pool for pool in pools if pool[2] > 0] or [(policy, past.workload, past.gpus)]

    def part(begun: int) -> Callable[[float], None]:
        return lambda done: progress((begun + done) / len(pools))

    return tuple(
        replay_under(of_part, workload, gpus, past.end_s, part(n)) for n, (of_part, workload, gpus) in enumerate(pools)
    )


def replayed_queue(records: Sequence[ReplayRecord], from_s: int) -> tuple[ReplayedQueue, ...]:
    """Return the figures of each queue from `from_s` on, in the order of the workload. records: of the same queues."""
    queues = []
    for q, name in enumerate(records[0].workload.queues):
        used, preempted = 0, 0
        waits: list[float] = []
        for record in records:
            work = record.workload
            used += record.used[-1][q] - record.used[-(-from_s // CONTROL_S)][q]
            for i, at in enumerate(work.submit_s):
                if work.queue[i] == q and at >= from_s:
                    started = record.started_s[i] if record.started_s[i] >= 0 else record.end_s
                    waits.append((started - at) / HOUR_S)
                    preempted += record.evicted[i]
        mean, middle = (fmean(waits), median(waits)) if waits else (0.0, 0.0)
        queues.append(ReplayedQueue(name, used / HOUR_S, len(waits), mean, middle, preempted))
    return tuple(queues)


def daily(records: Sequence[ReplayRecord], from_s: int) -> Days:
    """Return for each day its end in days since `from_s`, and the mean GPUs that every queue held in it.

    records: of the same queues and the same span."""
    days = []
    for at in range(from_s + 86_400, records[0].end_s + 1, 86_400):
        late, early = ([record.used[at // CONTROL_S - back] for record in records] for back in (0, 144))
        held = zip(zip(*late, strict=True), zip(*early, strict=True), strict=True)
        days.append(((at - from_s) / 86_400, [(sum(ends) - sum(starts)) / 86_400 for ends, starts in held]))
    return days


def daily_from_ledger(gpu_us: Sequence[Sequence[int]]) -> Days:
    """Return what `daily` returns, from the GPU-microseconds in the ledger: gpu_us[hour][queue]."""
    days = []
    for at in range(24, len(gpu_us) + 1, 24):
        hours = gpu_us[at - 24 : at]
        days.append((at / 24, [sum(column) / 24 / 3_600_000_000 for column in zip(*hours, strict=True)]))
    return days


class WhatIfError(FairshareError):
    """There is no history to replay, or an option that the replay needs is missing."""


@dataclass(frozen=True, slots=True)
class ModelHistory:
    """What jobs held of the GPUs of one model.

    different: how many of these GPUs each (queue, job) held.
    gpus: their median number."""

    held: Sequence[HeldHour]
    different: Mapping[tuple[str, str], int]
    gpus: int


@dataclass(frozen=True, slots=True)
class ReplayHistory:
    """The past jobs for a replay, and what the ledger recorded.

    from_s: the start of the shown span. The time before it is replayed so that the span begins with full queues.
    had: recorded GPU-hours by queue in the span; None for a job trace.
    days: recorded mean GPUs per day; None for a job trace.
    assumptions: one sentence each.
    by_model: the same by the name of the GPU model; empty for a job trace, which names none.
    waits_s: the median wait of each queue.
    jobs: the number of jobs that held GPUs in the shown span; `workload` has also those of the time before it, and
        each again after a long gap."""

    workload: Workload
    gpus: int
    from_s: int
    end_s: int
    had: Sequence[float] | None
    days: Days | None
    assumptions: tuple[str, ...]
    by_model: Mapping[str, ModelHistory] = field(default_factory=dict)
    waits_s: Mapping[str, float] = field(default_factory=dict)
    jobs: int = 0

    def of_part(self, policy: Policy, model: str) -> tuple[Workload, int]:
        """Return the jobs that ran on the GPUs of one part of the policy's, and how many GPUs these are."""
        own = [
            each
            for name, each in sorted(self.by_model.items())
            if (most_precise(name, policy.gpu_models) or OTHERS) == model
        ]
        different: Counter[tuple[str, str]] = Counter()
        for each in own:
            different.update(each.different)
        held = chain.from_iterable(each.held for each in own)
        workload = job_traces.jobs(held, self.workload.queues, different, self.waits_s)
        return workload, sum(each.gpus for each in own)


def history_from_ledger(
    client: AccountantApi, policy: Policy, span_s: int, given: int | None, now_ms: int
) -> ReplayHistory:
    """Reconstruct the jobs of the last `span_s` seconds, in whole hours, and of the warm-up before, from the ledger.

    given: the number of GPUs to assume; None for the ledger's.

    Raises WhatIfError if there is nothing to replay, and AccountantUnavailable."""
    end_ms = now_ms // MS_PER_HOUR * MS_PER_HOUR
    hours = max(1, span_s // HOUR_S)
    warm = min(WARM_UP_S, policy.window.size) // HOUR_S
    start_ms = end_ms - (hours + warm) * MS_PER_HOUR
    leaves = leaf_names(policy)
    held: dict[str, list[HeldHour]] = {}
    amounts_of: dict[str, list[int]] = {}
    begin = datetime.fromtimestamp(start_ms / 1000, UTC)
    for line in client.usage(start_ms, end_ms, ("queue", "job", "gpu_model", "hour")):
        at = datetime.strptime(line.key["hour"], "%Y-%m-%dT%H").replace(tzinfo=UTC)
        hour, model = round((at - begin).total_seconds()) // HOUR_S, line.key["gpu_model"]
        accounts = line.accounts_gpu_us
        amounts_of.setdefault(model, [0] * (hours + warm))[hour] += accounts.allocated + accounts.unallocated
        of_hour = HeldHour(line.key["queue"], line.key["job"], hour, accounts.allocated)
        held.setdefault(model, []).append(of_hour)
    whole = [sum(of_hour) for of_hour in zip(*amounts_of.values(), strict=True)]
    gpus = given or job_traces.capacity(whole)
    known = next((hour for hour, amount in enumerate(whole) if amount > 0), None)
    if gpus <= 0 or known is None:
        raise WhatIfError(
            f"the ledger has no GPU time in the last {span_s // HOUR_S} hours: choose a longer span,"
            " or check that agents report"
        )
    different: dict[str, Counter[tuple[str, str]]] = {model: Counter() for model in held}
    for line in client.usage(start_ms, end_ms, ("queue", "job", "gpu_model", "gpu")):
        if line.accounts_gpu_us.allocated > 0:
            different.setdefault(line.key["gpu_model"], Counter())[line.key["queue"], line.key["job"]] += 1
    waits = client.median_waits_s(start_ms, end_ms)
    capacities = [job_traces.capacity(amounts) for amounts in amounts_of.values()]
    if given is not None:
        capacities = apportion(given, capacities)
    by_model = {
        model: ModelHistory(held[model], different[model], number)
        for model, number in zip(amounts_of, capacities, strict=True)
    }
    everything = list(chain.from_iterable(held.values()))
    workload = job_traces.jobs(everything, leaves, sum(different.values(), Counter()), waits)
    if not workload.submit_s:
        raise WhatIfError(
            f"no queue of the policy ({', '.join(leaves)}) held a GPU in the last {span_s // HOUR_S} hours: choose a"
            " longer span, or a policy with the queues of the ledger"
        )
    index = {name: i for i, name in enumerate(leaves)}
    amounts = [[0] * len(leaves) for _ in range(hours)]
    jobs: set[tuple[str, str]] = set()
    for each in everything:
        if each.queue in index and each.hour >= warm and each.gpu_us:
            amounts[each.hour - warm][index[each.queue]] += each.gpu_us
            jobs.add((each.queue, each.job))
    had = [sum(column) / job_traces.US_PER_GPU_HOUR for column in zip(*amounts, strict=True)]
    notes = list(job_traces.ASSUMED)
    if known > warm:
        notes.append(f"the ledger has no records of the first {known - warm} hours of the span")
    if policy.window.kind != "sliding":
        notes.append(f"the {policy.window.kind} window counts as a sliding one of its size")
    if policy.usage.clusters:
        notes.append("usage of this cluster alone counts: other clusters (usage.clusters) are not replayed")
    if workload.left_out:
        notes.append(f"{workload.left_out} jobs of no leaf queue of the policy are left out")
    return ReplayHistory(
        workload, gpus, warm * HOUR_S, (hours + warm) * HOUR_S, had, daily_from_ledger(amounts), tuple(notes), by_model,
        waits, len(jobs),
    )  # fmt: skip


def history_from_trace(path: Path, policy: Policy, gpus: int) -> ReplayHistory:
    """Return the jobs of a trace for a replay of whole days.

    Raises TraceError for an invalid trace, WhatIfError if no job is of a leaf queue of the policy."""
    leaves = leaf_names(policy)
    workload = workload_of(job_traces.load(path, 0), leaves)
    if not workload.submit_s:
        raise WhatIfError(
            f"{path}: no job has a team that is a leaf queue of the policy ({', '.join(leaves)}): give a policy whose"
            " leaf queues have the names of the trace's teams"
        )
    end_s = max(86_400, -(-(workload.submit_s[-1] + 1) // 86_400) * 86_400)
    notes = list(job_traces.ASSUMED[-2:])
    if workload.left_out:
        notes.append(f"{workload.left_out} jobs of no leaf queue of the policy are left out")
    return ReplayHistory(workload, gpus, 0, end_s, None, None, tuple(notes), jobs=len(workload.submit_s))


@dataclass(frozen=True, slots=True)
class ComparedQueue:
    """One queue in a comparison.

    had: its GPU-hours in the ledger; None for a job trace.
    now, then: its figures in the replays under the policy in force, and under the other policy."""

    queue: str
    had: float | None
    now: ReplayedQueue
    then: ReplayedQueue


def assumptions(past: ReplayHistory, now: Policy, then: Policy) -> tuple[str, ...]:
    """Return the assumptions behind the comparison."""
    notes = list(past.assumptions)
    together = dict.fromkeys((*bounded_together(now), *bounded_together(then)))
    if together:
        notes.append(f"the limit of {', '.join(together)} applies to each queue below separately, its quota to none")
    too_large = sum(1 for gpus in past.workload.gpus if gpus > past.gpus)
    if too_large:
        notes.append(f"{too_large} jobs are larger than the {past.gpus:,} GPUs and are left out")
    if now.gpu_models or then.gpu_models:
        notes.append(
            "a job could run only on the GPU model on which it ran"
            if past.by_model
            else "a trace names no GPU models: quotas by model are added up"
        )
    missing = sorted(set(leaf_names(now)) ^ set(leaf_names(then)))
    if missing:
        notes.append(f"only one of the policies has {', '.join(missing)}; under the other they have no GPUs")
    return tuple(notes)


def _sorted_into(workload: Workload, leaves: Sequence[str]) -> Workload:
    """Return the jobs with `leaves` as queues; jobs of other queues are left out."""
    index = {name: i for i, name in enumerate(leaves)}
    rows = [
        (submit_s, gpus, duration_s, index[workload.queues[queue]])
        for submit_s, gpus, duration_s, queue in workload.rows()
        if workload.queues[queue] in index
    ]
    return workload_of_rows(leaves, rows, len(workload.queue) - len(rows))


def rows(
    names: Sequence[str], past: ReplayHistory, before: Sequence[ReplayRecord], after: Sequence[ReplayRecord]
) -> list[ComparedQueue]:
    """Return the comparison of each queue.

    names: the leaf queues of the other policy.
    before, after: the replays under the policy in force, and under the other policy."""
    now = {each.queue: each for each in replayed_queue(before, past.from_s)}
    nothing = ReplayedQueue("", 0.0, 0, 0.0, 0.0, 0)
    return [
        ComparedQueue(name, past.had[q] if past.had is not None else None, now.get(name, nothing), each)
        for q, (name, each) in enumerate(zip(names, replayed_queue(after, past.from_s), strict=True))
    ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The past under two policies.

    jobs: as in `ReplayHistory`.
    replayed: the number of jobs that are replayed, with those of the time before the span (`ReplayHistory.workload`).
    warm_up_ms: the length of that time.
    series: by queue, and by "had" (from the ledger), "now" and "then": pairs of day and mean GPUs, empty if unknown.
    assumptions: one sentence each."""

    gpus: int
    jobs: int
    start_ms: int
    end_ms: int
    rows: tuple[ComparedQueue, ...]
    series: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
    assumptions: tuple[str, ...]
    replayed: int = 0
    warm_up_ms: int = 0


def compare(
    now: Policy, then: Policy, past: ReplayHistory, end_ms: int, progress: Callable[[float, str], None]
) -> Comparison:
    """Replay the past, which ends at `end_ms`, under both policies.

    progress: called with the finished part, 0..1, and the current step."""
    first_step, second_step = "replaying the policy in force", "replaying the draft"
    progress(0.0, first_step)
    before = replay_past(now, past, lambda part: progress(part / 2, first_step))
    progress(0.5, second_step)
    after = replay_past(then, past, lambda part: progress(0.5 + part / 2, second_step))
    names = leaf_names(then)
    days: dict[str, tuple[list[str], Days]] = {
        "now": (leaf_names(now), daily(before, past.from_s)),
        "then": (names, daily(after, past.from_s)),
        "had": (names, past.days or []),
    }
    series = {
        name: {
            case: [(at, values[queues.index(name)]) for at, values in found] if name in queues else []
            for case, (queues, found) in days.items()
        }
        for name in names
    }
    start_ms = end_ms - (past.end_s - past.from_s) * MS_PER_SECOND
    compared = tuple(rows(names, past, before, after))
    return Comparison(
        past.gpus, past.jobs, start_ms, end_ms, compared, series, assumptions(past, now, then),
        len(past.workload.submit_s), past.from_s * MS_PER_SECOND,
    )  # fmt: skip
