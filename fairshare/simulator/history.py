"""Jobs as the books tell them: what held GPUs hour by hour, put together to a workload that can be replayed. Pure.

The ledger knows what ran, not what was asked for. What is assumed, and told with every result (`ASSUMED`):

- a job is one gang: as many GPUs as it held in its fullest hour, or, where it lived too short for an hour to be
  full, as many different GPUs as it held;
- it was submitted its queue's median wait before it first held a GPU, and what it did is all it had to do;
- held again within a day after it stopped, it is the same job; later, another one;
- who never got a GPU is not in the books: demand is understated where queues were refused for long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from fairshare.simulator.workload import Workload

HOUR_S = 3600
SAME_JOB_H = 24
FULL_AFTER_H = 3
"""From so many hours on, one of them was full."""
US_PER_GPU_HOUR = 3_600_000_000
_LEAST = 0.02
"""Of a GPU: less is a rounding of the clock, not another GPU."""
ASSUMED = (
    "a job holds as many GPUs as in its fullest hour and has done all it had to do",
    "it was submitted its queue's median wait before it first held a GPU",
    "jobs that never got a GPU are not in the books, so demand is understated where queues were refused for long",
    "one pool of equal GPUs, of the median capacity; nested queues as leaves with their part of their parents' weight",
)


@dataclass(frozen=True, slots=True)
class Held:
    """GPU-microseconds that a job of a queue held in the hour that begins at `hour` (hours since the start)."""

    queue: str
    job: str
    hour: int
    gpu_us: int


def jobs(
    held: Iterable[Held], queues: Sequence[str], gpus_of: Mapping[tuple[str, str], int], waits_s: Mapping[str, float]
) -> Workload:
    """The workload of `queues`. gpus_of: how many different GPUs a (queue, job) held. waits_s: median wait by
    queue. Jobs of other queues are left out and counted."""
    by_job: dict[tuple[str, str], dict[int, int]] = {}
    for each in held:
        if each.gpu_us > 0:
            hours = by_job.setdefault((each.queue, each.job), {})
            hours[each.hour] = hours.get(each.hour, 0) + each.gpu_us
    index = {name: i for i, name in enumerate(queues)}
    rows: list[tuple[int, str, int, int, int]] = []
    left_out = 0
    for (queue, job), hours in sorted(by_job.items()):
        if queue not in index:
            left_out += 1
            continue
        for run in _runs(sorted(hours)):
            amounts = [hours[hour] for hour in run]
            gang = _gang(amounts, gpus_of.get((queue, job), 0))
            begun = run[0] * HOUR_S
            if len(run) > 1:  # it went on: what is missing of its first hour is before it began
                begun += max(0, HOUR_S - ceil(amounts[0] / gang / 1e6))
            submit = max(0, begun - round(waits_s.get(queue, 0.0)))
            rows.append((submit, job, gang, max(1, ceil(sum(amounts) / gang / 1e6)), index[queue]))
    rows.sort()
    return Workload(
        tuple(queues), [row[0] for row in rows], [row[2] for row in rows], [row[3] for row in rows],
        [row[4] for row in rows], left_out,
    )  # fmt: skip


def capacity(gpu_us_by_hour: Iterable[int]) -> int:
    """GPUs of the cluster: the median over hours of what was not down; 0 where no hour is known."""
    known = [amount for amount in gpu_us_by_hour if amount > 0]
    return round(median(known) / US_PER_GPU_HOUR) if known else 0


def _runs(hours: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for hour in hours:
        if runs and hour - runs[-1][-1] <= SAME_JOB_H:
            runs[-1].append(hour)
        else:
            runs.append([hour])
    return runs


def _gang(amounts: Sequence[int], different: int) -> int:
    fullest = max(1, ceil(max(amounts) / US_PER_GPU_HOUR - _LEAST))
    return max(fullest, different) if len(amounts) < FULL_AFTER_H else fullest
