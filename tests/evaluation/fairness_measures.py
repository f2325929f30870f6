"""Measures the fairness, utilisation, waits, preemptions and weight changes of a simulation.

The share error of a queue in a window is computed in three steps:

1. The feasible demand is the GPU time that its jobs could use in the window with unlimited GPUs. Each job is limited to
   its own gang and to the time left.
2. The entitlement is the queue's part, by configured weight, of the GPU time that was delivered in the window, up to
   the feasible demand. It therefore depends neither on a policy's efficiency nor on work that no policy could run.
3. The share error of the window is the largest distance of a queue's usage from its entitlement, as a part of the
   cluster's capacity in the window.

Only contended windows count, in which the demand exceeds the capacity. The first-come-first-served run determines them.
GPU time is in GPU-seconds. Waits are in hours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
import numpy.typing as npt

from fairshare.laws.division import fill
from fairshare.simulator.simulation_model import CONTROL_S, SNAPSHOT_S, ReplayRecord

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
WARM_UP_S = 7 * 86_400
"""The first seconds of a run, which only fill the cluster and do not count."""
LENGTHS_H = {168: 42, 24: 6}
"""The hours from the start of a window to the start of the next, by the length of the windows in hours."""
SHORT_S = 600
"""Run times below this many seconds count as this many in a slowdown."""
_LEAST_ENTITLEMENT = 0.002
"""The part of the capacity below which an entitlement does not count for Jain's index."""


@dataclass(frozen=True, slots=True)
class Span:
    """One window.

    used, demand, due: the GPU-seconds that each queue used, could use at most, and was due.
    possible: the GPU-seconds of the whole cluster."""

    start_s: int
    end_s: int
    used: Floats
    demand: Floats
    due: Floats
    possible: float

    @property
    def contended(self) -> bool:
        return bool(self.demand.sum() > self.possible)

    @property
    def error(self) -> float:
        return float(np.abs(self.used - self.due).max() / self.possible)

    @property
    def jain(self) -> float | None:
        """Return (Σx)² / (n Σx²) of used over due; None if nothing is due."""
        counted = self.due > _LEAST_ENTITLEMENT * self.possible
        if not counted.any():
            return None
        x = self.used[counted] / self.due[counted]
        return float(x.sum() ** 2 / (len(x) * (x * x).sum()))


@dataclass(frozen=True, slots=True)
class PolicyScore:
    """The figures of one policy on one cluster. Jobs count if they were submitted after the warm-up.

    week, day: mean and 95th percentile of the share errors of contended weeks and days, as parts (0..1).
    jain: the mean of Jain's index over the weeks. worst_ratio: the smallest ratio of used to due time of a queue.
    utilisation, lost: used time over the capacity, and lost over delivered time, as parts (0..1).
    wait_mean_h, wait_p95_h, wait_worst_queue_h, gang_p95_h: hours from submission to first start. A job that did not
        start waits until the end. gang_p95_h: of gangs of eight GPUs or more.
    move_per_day: ½ Σ |Δw| of normalised weights.
    swing: the widest ratio of one queue's largest to its smallest weight.
    disparity: the widest ratio between two queues' parts of their feasible demand.
    contended: the part of the weeks that are contended.
    slowdown: mean and 95th percentile of (finish - submission) over the run time, at least 1, of finished jobs. Run
        times below ten minutes count as ten."""

    policy: str
    week: tuple[float, float]
    day: tuple[float, float]
    jain: float
    worst_ratio: float
    utilisation: float
    wait_mean_h: float
    wait_p95_h: float
    wait_worst_queue_h: float
    gang_p95_h: float
    preemptions: int
    lost: float
    move_per_day: float
    swing: float
    disparity: float
    contended: float
    slowdown: tuple[float, float]


def spans(record: ReplayRecord, length_h: int) -> list[Span]:
    """Return all windows of `length_h` hours that begin after the warm-up, LENGTHS_H[length_h] hours apart.

    Every window begins at a snapshot."""
    stride, length_s = LENGTHS_H[length_h] * 3600, length_h * 3600
    jobs = record.workload
    submit, duration, gpus, queue = map(np.asarray, (jobs.submit_s, jobs.duration_s, jobs.gpus, jobs.queue))
    windows = []
    for start_s in range(WARM_UP_S, record.end_s - length_s + 1, stride):
        end_s, queues = start_s + length_s, len(jobs.queues)
        used = np.array(record.used[end_s // CONTROL_S], float) - np.array(record.used[start_s // CONTROL_S], float)
        late, left = map(np.asarray, record.backlog[start_s // SNAPSHOT_S])
        demand = np.bincount(queue[late], gpus[late] * np.minimum(left, length_s), queues)
        first, last = np.searchsorted(submit, [start_s + 1, end_s])
        arrived = slice(int(first), int(last))
        able = np.minimum(duration[arrived], end_s - submit[arrived])
        demand = demand + np.bincount(queue[arrived], gpus[arrived] * able, queues)
        demand = np.maximum(demand, used)
        due = np.array(fill(fsum(used.tolist()), demand.tolist(), list(record.pool.weights)))
        windows.append(Span(start_s, end_s, used, demand, due, float(record.pool.capacity * length_s)))
    return windows


def contended(reference: ReplayRecord) -> dict[int, frozenset[int]]:
    """Return for each window length the starts of the windows in which demand exceeded capacity."""
    return {
        length: frozenset(each.start_s for each in spans(reference, length) if each.contended) for length in LENGTHS_H
    }


def score(policy: str, record: ReplayRecord, windows: dict[int, frozenset[int]]) -> PolicyScore:
    """Return the figures of one run. windows: the result of `contended` for the first-come-first-served run."""
    from_s = WARM_UP_S
    weeks, days = spans(record, 168), spans(record, 24)
    used = np.array(record.used[record.end_s // CONTROL_S], float) - np.array(record.used[from_s // CONTROL_S], float)
    demand, due, used_sums = (
        [float(value) for value in np.sum(rows, axis=0)] if rows else []
        for rows in ([s.demand for s in weeks], [s.due for s in weeks], [s.used for s in weeks])
    )
    waited, queues, gangs = waits(record, from_s)
    by_queue = [float(waited[queues == q].mean()) for q in range(len(record.workload.queues)) if (queues == q).any()]
    jains = [value for s in weeks if (value := s.jain) is not None]
    move, swing = movement(record, from_s)
    ratio = [a / b for a, b in zip(used_sums, due, strict=True) if b > 0]
    met = [a / b for a, b in zip(used_sums, demand, strict=True) if a > 0]
    return PolicyScore(
        policy,
        _mean_p95([s.error for s in weeks if s.start_s in windows[168]]),
        _mean_p95([s.error for s in days if s.start_s in windows[24]]),
        float(np.mean(jains)) if jains else 1.0,
        min(ratio, default=1.0),
        float(used.sum() / (record.pool.capacity * (record.end_s - from_s))),
        float(waited.mean()) if len(waited) else 0.0,
        float(np.quantile(waited, 0.95)) if len(waited) else 0.0,
        max(by_queue, default=0.0),
        float(np.quantile(waited[gangs >= 8], 0.95)) if (gangs >= 8).any() else 0.0,
        record.evictions,
        record.lost_gpu_s / max(1, record.delivered_gpu_s),
        move,
        swing,
        max(met) / min(met) if met else 1.0,
        len(windows[168]) / len(weeks) if weeks else 0.0,
        _mean_p95(slowdowns(record, from_s).tolist()),
    )


def movement(record: ReplayRecord, from_s: int = WARM_UP_S) -> tuple[float, float]:
    """Return `move_per_day` and `swing` of PolicyScore, from the weights in force after `from_s`."""
    weights = np.array(record.weights[from_s // CONTROL_S :], float)
    if len(weights) < 2:
        return 0.0, 1.0
    weights = weights / weights.sum(axis=1, keepdims=True)
    distance = float(np.abs(np.diff(weights, axis=0)).sum() / 2)
    swing = float((weights.max(axis=0) / np.maximum(weights.min(axis=0), 1e-4)).max())
    return distance / ((len(weights) - 1) * CONTROL_S / 86_400), swing


def waits(record: ReplayRecord, from_s: int) -> tuple[Floats, Ints, Ints]:
    """Return the hours of waiting, the queue and the GPUs of every job submitted in [from_s, end of the run)."""
    submit = np.asarray(record.workload.submit_s)
    counted = (submit >= from_s) & (submit < record.end_s)
    started = np.asarray(record.started_s)[counted]
    waits = (np.where(started >= 0, started, record.end_s) - submit[counted]) / 3600
    return waits, np.asarray(record.workload.queue)[counted], np.asarray(record.workload.gpus)[counted]


def slowdowns(record: ReplayRecord, from_s: int) -> Floats:
    """Return the bounded slowdown of every job that was submitted from `from_s` on and finished."""
    submit, finish = np.asarray(record.workload.submit_s), np.asarray(record.finished_s)
    counted = (submit >= from_s) & (finish >= 0)
    run_s = np.maximum(np.asarray(record.workload.duration_s)[counted], SHORT_S)
    slowdown: Floats = np.maximum(1.0, (finish[counted] - submit[counted]) / run_s)
    return slowdown


def _mean_p95(values: Sequence[float]) -> tuple[float, float]:
    return (float(np.mean(values)), float(np.quantile(values, 0.95))) if values else (0.0, 0.0)
