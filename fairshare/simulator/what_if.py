"""A workload under a whole policy file, and what each queue would have got. Pure.

The replay has one level: nested queues act as leaves, each with its part of its parents' weight. That is what
their weights come to while everybody asks. A limit holds for each leaf under it; quotas are the leaves' own, priorities
between queues are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean, median

from accountant.wire import Policy, QueuePolicy
from fairshare.model import UNLIMITED
from fairshare.simulator.feedback import Feedback
from fairshare.simulator.records import CONTROL_S, Pool, Record
from fairshare.simulator.replay import replay
from fairshare.simulator.workload import Workload
from fairshare.weighing.tree import static_parts

HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Got:
    """One queue in [from_s, end) of a replay. Waits in hours, of jobs submitted in it; those that never started
    have waited until the end."""

    queue: str
    gpu_hours: float
    jobs: int
    mean_wait_h: float
    median_wait_h: float
    preempted: int


def flat(policy: Policy) -> Policy:
    """The policy with its leaves as only queues."""
    queues = {queue.name: queue for queue in policy.queues}
    parents = {queue.parent for queue in policy.queues}

    def part(queue: QueuePolicy) -> float:
        siblings = fsum(each.weight for each in policy.queues if each.parent == queue.parent)
        own = queue.weight / siblings if siblings > 0 else 0.0
        return own if queue.parent is None else own * part(queues[queue.parent])

    def limit(queue: QueuePolicy) -> float:
        above = limit(queues[queue.parent]) if queue.parent is not None else UNLIMITED
        return min((each for each in (queue.limit, above) if each != UNLIMITED), default=UNLIMITED)

    leaves = tuple(
        QueuePolicy(name=q.name, deserved=q.deserved, weight=part(q), limit=limit(q), team=q.team)
        for q in policy.queues
        if q.name not in parents
    )
    return policy.model_copy(update={"queues": leaves, "budgets": ()})


def bounded_together(policy: Policy) -> list[str]:
    """Queues with several leaves below them whose quota or limit one level cannot tell, in the order of the policy."""
    queues = {queue.name: queue for queue in policy.queues}
    parents = {queue.parent for queue in policy.queues}
    below: dict[str, int] = {}
    for queue in policy.queues:
        if queue.name in parents:
            continue
        at = queue.parent
        while at is not None:
            below[at] = below.get(at, 0) + 1
            at = queues[at].parent
    return [q.name for q in policy.queues if below.get(q.name, 0) > 1 and (q.limit > 0 or q.deserved != 0)]


def under(
    policy: Policy, workload: Workload, gpus: int, end_s: int, progress: Callable[[float], None] | None = None
) -> Record:
    """Replay `workload` under `policy` on `gpus` GPUs. The workload's queues are the policy's leaves, in order."""
    one_level = flat(policy)
    targets = static_parts(one_level, float(gpus))
    pool = Pool(
        gpus,
        [gpus if q.deserved == UNLIMITED else q.deserved for q in one_level.queues],
        [q.weight for q in one_level.queues],
        [None if q.limit == UNLIMITED else int(q.limit) for q in one_level.queues],
    )
    return replay(workload.fitting(gpus), pool, end_s, steering=Feedback(one_level, targets), progress=progress)


def got(record: Record, from_s: int) -> tuple[Got, ...]:
    """By queue, in the order of the workload."""
    work = record.workload
    first = record.used[-(-from_s // CONTROL_S)]
    found = []
    for q, name in enumerate(work.queues):
        mine = [i for i, at in enumerate(work.submit_s) if work.queue[i] == q and at >= from_s]
        waits = [
            ((record.started_s[i] if record.started_s[i] >= 0 else record.end_s) - work.submit_s[i]) / HOUR_S
            for i in mine
        ]
        found.append(
            Got(
                name, (record.used[-1][q] - first[q]) / HOUR_S, len(mine), fmean(waits) if waits else 0.0,
                median(waits) if waits else 0.0, sum(record.evicted[i] for i in mine),
            )
        )  # fmt: skip
    return tuple(found)


def daily(record: Record, from_s: int) -> list[tuple[float, list[float]]]:
    """(day since `from_s`, mean GPUs held by every queue in the day that ends there)."""
    return [
        (
            (at - from_s) / 86_400,
            [
                (late - early) / 86_400
                for late, early in zip(record.used[at // CONTROL_S], record.used[at // CONTROL_S - 144], strict=True)
            ],
        )
        for at in range(from_s + 86_400, record.end_s + 1, 86_400)
    ]


def daily_of(gpu_us: Sequence[Sequence[int]]) -> list[tuple[float, list[float]]]:
    """The same from the books: gpu_us[hour][queue], from the first hour shown on."""
    days = []
    for at in range(24, len(gpu_us) + 1, 24):
        hours = gpu_us[at - 24 : at]
        days.append((at / 24, [sum(column) / 24 / 3_600_000_000 for column in zip(*hours, strict=True)]))
    return days
