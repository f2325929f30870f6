"""Defines the policies that `simulate` compares: feedback laws, and baseline schedulers.

Feedback laws (`kai-K[-HALFLIFE]`, `fairtree`, `multifactor`, `deficit`) set weights with the controller's own code.
`static` keeps the configured weights, without feedback. The other policies model a kind of scheduling, not a product:

- `fifo` has one line for all jobs, and `easy` adds EASY backfilling.
- `partition` gives each queue a fixed part of the cluster.
- `order-multifactor`, `order-fairtree` (with EASY backfilling, as on Slurm) and `order-kueue` serve queues by past
  usage and never preempt.
- `karma` and `sdrf` follow published mechanisms. They compute the GPUs that each queue is due, and the replay's
  scheduler enforces them like any fair share.
- `oracle` knows the future and sets weights.

Under Karma, Stateful DRF and the oracle every queue still gets its deserved quota first. Karma and Stateful DRF are
simpler than in the papers: GPUs are the only resource, and a queue's share may be a fraction of a GPU.

Usage over the policy's window is a running sum, so a control period costs microseconds. A test compares the resulting
weights with those of `calculate_weights` on real answers of the accountant (`tests/demo/test_same_weights.py`)."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp2
from operator import add, sub

import numpy as np
import numpy.typing as npt

from accountant.wire.policy_models import Bounds, Policy, QueuePolicy, WindowSpec
from fairshare.laws.division import fill, fill_from
from fairshare.laws.feedback_laws import LawColumns, LawQueues, Memory, fair_share_factor
from fairshare.laws.weight_calculation import law_of, law_results
from fairshare.laws.weight_pacing import paced_values, unpaced
from fairshare.simulator.scheduler_engine import replay
from fairshare.simulator.simulation_model import (
    CONTROL_S,
    ControllerView,
    Dividing,
    Pool,
    Ranking,
    Record,
    Rules,
    SimulatedController,
    Workload,
)
from gputally.base.apportionment import apportion
from gputally.server.config_loading import duration_seconds

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WEEK_S = 7 * 86_400
AHEAD_H = (24, 60, 96, 132)
"""The hours from now to the ends of the weeks that the oracle considers."""


class Karma:
    """Divides by Karma: a queue that lends unused GPUs earns credits, and a queue that borrows GPUs pays with credits.

    A GPU costs one credit per quantum, which is a control period. The queue with the most credits borrows first. A part
    of every fair share is guaranteed. The rest is a common pool from which every queue can borrow. Each queue gets free
    credits every quantum, which pay for its own part of that pool. With unequal shares, a borrowed GPU costs a queue
    1 / (n · share) credits, so that queues that use nothing earn equally fast. This price is not part of the paper.

    Source: Vuppalapati et al., "Karma: Resource Allocation for Dynamic Demands", OSDI 2023."""

    def __init__(self, capacity: int, share: Sequence[float], guaranteed: float = 0.5) -> None:
        self._fair = [part * capacity for part in share]
        self._guaranteed = [guaranteed * mine for mine in self._fair]
        self._price = [1.0 / (len(share) * part) for part in share]
        self.credits = [0.0] * len(share)
        self._due: list[float] | None = None
        self._at_s = 0

    def __call__(self, view: ControllerView, _weights: Sequence[float]) -> list[float]:
        if self._due is None or view.now_s >= self._at_s + CONTROL_S:
            self._at_s = view.now_s
            self._due = self._quantum(view.asked)
        return self._due

    def _quantum(self, asked: Sequence[float]) -> list[float]:
        own = [min(ask, quota) for ask, quota in zip(asked, self._guaranteed, strict=True)]
        wanted = [ask - mine for ask, mine in zip(asked, own, strict=True)]
        lent = [quota - mine for quota, mine in zip(self._guaranteed, own, strict=True)]
        common = sum(self._fair) - sum(self._guaranteed)
        per_credit = [1.0 / price for price in self._price]
        borrowed = fill_from(common + sum(lent), wanted, per_credit, [-credit for credit in self.credits])
        # Borrowers get lent GPUs before those of the pool, and queues with the fewest credits lend first.
        earned = fill_from(min(sum(lent), sum(borrowed)), lent, per_credit, self.credits)
        for q, price in enumerate(self._price):
            free = self._fair[q] - self._guaranteed[q]
            self.credits[q] += price * (free + earned[q] - borrowed[q])
        return [mine + more for mine, more in zip(own, borrowed, strict=True)]


class StatefulDrf:
    """Divides by Stateful DRF: max-min fairness over a queue's GPUs plus its commitment.

    The commitment is the decayed mean of the GPUs that the queue held above its share. Unused GPUs earn no credit.

    half_life_s: the half-life of the commitment.

    Source: Sadok, Campista, Costa, "Stateful DRF: Considering the Past in a Multi-Resource Allocation", IEEE
    Transactions on Computers 70(7), 2021; here with one resource."""

    def __init__(
        self, capacity: int, share: Sequence[float], deserved: Sequence[float], half_life_s: int = 86_400
    ) -> None:
        self._capacity, self._share, self._deserved = capacity, share, deserved
        self._half_life_s = half_life_s
        self._used = [0] * len(share)
        self._at_s = 0
        self.commitment = [0.0] * len(share)

    def __call__(self, view: ControllerView, _weights: Sequence[float]) -> list[float]:
        self._update_commitments(view)
        base = [min(ask, quota) for ask, quota in zip(view.asked, self._deserved, strict=True)]
        starts = [(c + b) / part for c, b, part in zip(self.commitment, base, self._share, strict=True)]
        more = [ask - given for ask, given in zip(view.asked, base, strict=True)]
        extra = fill_from(self._capacity - sum(base), more, self._share, starts)
        return [given + above for given, above in zip(base, extra, strict=True)]

    def _update_commitments(self, view: ControllerView) -> None:
        span = view.now_s - self._at_s
        if span < CONTROL_S:
            return
        decay = exp2(-span / self._half_life_s)
        for q, part in enumerate(self._share):
            over = max(0.0, (view.used[q] - self._used[q]) / span - part * self._capacity)
            self.commitment[q] = self.commitment[q] * decay + over * (1.0 - decay)
        self._used, self._at_s = list(view.used), view.now_s


class Oracle:
    """Sets weights with knowledge of every future job and its run time, as an upper bound of what a controller can do.

    The weight of a queue is the number of GPUs with which it gets the GPU time that it is still due in a week, averaged
    over several overlapping weeks that contain the present moment. In a week a queue is due its part by share (`fill`)
    of all delivered GPU time, but no more than the GPU time that it used and can still use."""

    def __init__(
        self, workload: Workload, capacity: int, share: Sequence[float], ahead_h: Sequence[int] = AHEAD_H
    ) -> None:
        self._capacity, self._share = capacity, share
        self._ahead_s = [hours * 3600 for hours in ahead_h]
        columns = (workload.submit_s, workload.duration_s, workload.gpus, workload.queue)
        self._submit, self._duration, self._gpus, self._queue = (np.asarray(column) for column in columns)
        self._offered: Floats = np.zeros(len(share))
        self._arrived = 0
        self._used: list[Floats] = []

    def __call__(self, view: ControllerView) -> list[float]:
        now = np.array(view.used, float)
        self._used.append(now)
        new_jobs = slice(self._arrived, int(np.searchsorted(self._submit, view.now_s, side="right")))
        self._offered += self._work(new_jobs, self._duration[new_jobs])
        self._arrived = new_jobs.stop
        left = np.maximum(0.0, self._offered - now)
        rates: Floats = np.zeros(len(self._share))
        for ahead_s in self._ahead_s:
            used = now - self._used[max(0, len(self._used) - 1 - (WEEK_S - ahead_s) // CONTROL_S)]
            able = (
                used + np.minimum(left, np.array(view.asked, float) * ahead_s) + self._future_work(view.now_s, ahead_s)
            )
            due = fill(float(used.sum()) + self._capacity * ahead_s, able.tolist(), self._share)
            rates += (np.array(due) - used) / ahead_s
        least = [1e-3 * part * self._capacity for part in self._share]
        return [max(low, rate / len(self._ahead_s)) for low, rate in zip(least, rates.tolist(), strict=True)]

    def _future_work(self, now_s: int, ahead_s: int) -> Floats:
        """Return the GPU-seconds per queue that jobs which are not submitted yet could use within `ahead_s`."""
        end_s = now_s + ahead_s
        jobs = slice(self._arrived, int(np.searchsorted(self._submit, end_s, side="right")))
        return self._work(jobs, np.minimum(self._duration[jobs], end_s - self._submit[jobs]))

    def _work(self, jobs: slice, seconds: Ints) -> Floats:
        work: Floats = np.bincount(self._queue[jobs], self._gpus[jobs] * seconds, len(self._share)).astype(float)
        return work


class Usage:
    """Sums up GPU-seconds, per queue and of the cluster, over a sliding window with or without a half-life."""

    def __init__(self, queues: int, size_s: int, half_life_s: int | None) -> None:
        self._size_s, self._half_life_s = size_s, half_life_s
        self._sums = [0.0] * (queues + 1)
        self._last: list[int] = [0] * (queues + 1)
        self._last_s = 0
        self._slices: deque[tuple[int, list[float]]] = deque()

    def at(self, view: ControllerView) -> tuple[list[float], float]:
        """Return the GPU-seconds per queue and those of the whole cluster in the window that ends now."""
        span = view.now_s - self._last_s
        now = [*view.used, self._last[-1] + view.capacity * span]
        new: list[float] = list(map(sub, now, self._last))
        if self._half_life_s is None:
            sums = list(map(add, self._sums, new))
        else:
            # All usage of a short slice counts as if it happened at the middle of the slice.
            decay, middle = exp2(-span / self._half_life_s), exp2(-span / 2 / self._half_life_s)
            new = [amount * middle for amount in new]
            sums = [old * decay + amount for old, amount in zip(self._sums, new, strict=True)]
        self._slices.append((view.now_s, new))
        while self._slices and self._slices[0][0] <= view.now_s - self._size_s:
            at, expired = self._slices.popleft()
            decay = 1.0 if self._half_life_s is None else exp2(-(view.now_s - at) / self._half_life_s)
            sums = [total - amount * decay for total, amount in zip(sums, expired, strict=True)]
        self._sums, self._last, self._last_s = sums, now, view.now_s
        return sums[:-1], sums[-1]


class Feedback:
    """Applies a policy's law to flat queues in every control period. Lists are in the order of the policy's queues.

    targets: each queue's part of the pool by quota and weight (`weight_calculation.static_parts`)."""

    def __init__(self, policy: Policy, targets: Mapping[str, float]) -> None:
        self._policy, self._law = policy, law_of(policy)
        queues = policy.queues
        self._names = tuple(queue.name for queue in queues)
        self._indices = {name: q for q, name in enumerate(self._names)}
        self._weights = tuple(queue.weight for queue in queues)
        self._targets = tuple(targets[name] for name in self._names)
        self._deserved, self._limits = [queue.deserved for queue in queues], [queue.limit for queue in queues]
        self._unpaced = unpaced(policy.bounds)
        self._usage = Usage(len(queues), policy.window.size, policy.window.half_life)
        self._memory: Memory = {}
        self._in_force = list(self._weights)
        self._changed_ms: list[int | None] = [None] * len(queues)
        self._direction = [0] * len(queues)
        self._reclaims = [0] * len(queues)

    def __call__(self, view: ControllerView) -> Sequence[float]:
        now_ms = view.now_s * 1000
        used, possible = self._usage.at(view)
        whole = max(possible, sum(used))
        usage = [mine / whole for mine in used] if whole > 0 else [0.0] * len(used)
        reclaims = list(map(sub, view.reclaims, self._reclaims))
        self._reclaims = list(view.reclaims)
        columns = LawColumns(
            self._names, self._weights, self._targets, usage, view.asked,
            list(map(float, view.held)), self._deserved, self._limits, view.gang, self._in_force, reclaims,
        )  # fmt: skip
        siblings = LawQueues(columns, float(view.capacity), whole / view.capacity, now_ms, explain=False)
        results = list(law_results(self._law, siblings, self._policy, self._memory))
        in_force = list(self._in_force)
        for _, result, names, values in results:
            self._pace(in_force, names, values, now_ms, at_once=self._unpaced or result.turn is not None)
        # Only a law that is called once, for all queues, keeps a memory: the first result has it.
        self._memory = results[0][1].memory
        self._in_force = in_force
        return in_force

    def _pace(
        self, in_force: list[float], names: Sequence[str], values: Sequence[float], now_ms: int, *, at_once: bool
    ) -> None:
        """Change the weights in `in_force` to `values`, or towards them as far as the bounds allow in one cycle.

        at_once: True: change the weights to `values` whatever the bounds."""
        indices, changed_ms, direction, bounds = self._indices, self._changed_ms, self._direction, self._policy.bounds
        for name, wanted in zip(names, values, strict=True):
            q = indices[name]
            weight = in_force[q]
            # A weight of 0 stays 0.
            if wanted != weight and weight:
                value = (
                    wanted if at_once else paced_values(wanted, weight, changed_ms[q], direction[q], bounds, now_ms)[1]
                )
                if value != weight:
                    in_force[q], changed_ms[q], direction[q] = value, now_ms, 1 if value > weight else -1


NAMES = (
    "fifo", "easy", "partition", "order-multifactor", "order-fairtree", "order-kueue", "static", "kai-0.5", "kai-1",
    "kai-2", "kai-5", "kai-1-24h", "multifactor", "fairtree", "karma", "sdrf", "deficit", "oracle",
)  # fmt: skip
LAWS = ("static", "kai-1", "kai-5", "kai-1-24h", "multifactor", "fairtree", "deficit")
"""The laws that set weights, for a quick comparison."""
FREE = Bounds(min_multiplier=1e-4, max_multiplier=1e4, max_step=1e9, deadband=0.0)
"""The bounds of the laws other than `deficit`, which change weights as far and as fast as their formula says."""
DEFAULT = Bounds(min_multiplier=0.1, max_multiplier=8.0, max_step=0.5, deadband=0.0)
"""The bounds of the law `deficit`: the controller's usual step, and the law's own quiet zone instead of a deadband."""
_KAI = re.compile(r"kai-(\d+(?:\.\d+)?)(?:-(\d+[a-z]+))?")
_ORDER_HALF_LIFE_S = 7 * 86_400
_LINE_DEPTH = 256
"""The scan depth of backfilling in a single line for all queues; Slurm's default is similar."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The cluster on which a workload is replayed.

    share: the part of the cluster of each queue, > 0, in the workload's order; the sum is 1.
    guaranteed: the part of each share that is a deserved quota."""

    capacity: int
    share: Sequence[float]
    guaranteed: float = 0.5

    def pool(self) -> Pool:
        deserved = [self.guaranteed * part * self.capacity for part in self.share]
        return Pool(self.capacity, deserved, list(self.share))


def unknown(name: str) -> bool:
    """Return True if no policy has this name."""
    return name not in NAMES and not _KAI.fullmatch(name)


def run(
    name: str,
    workload: Workload,
    setup: Setup,
    end_s: int,
    *,
    progress: Callable[[float], None] | None = None,
) -> Record:
    """Replay a workload under a policy of `NAMES`, or `kai-` with any k and half-life. Raises ValueError for any other
    name.

    progress: called with the finished part, 0..1."""
    if unknown(name):
        raise ValueError(f"no policy {name!r}; one of {', '.join(NAMES)}")
    pool, capacity, share = setup.pool(), setup.capacity, setup.share
    steering: SimulatedController | None = None
    dividing: Dividing | None = None
    ranking: Ranking | None = None
    if name == "fifo":
        pool = replace(pool, rules=Rules(reclaim=False, one_line=True))
    elif name == "easy":
        pool = replace(pool, rules=Rules(reclaim=False, one_line=True, backfill=True, scan_depth=_LINE_DEPTH))
    elif name == "partition":
        limits = apportion(capacity, [round(part * 1_000_000) for part in share])
        pool = replace(pool, rules=Rules(reclaim=False), limits=limits)
    elif name.startswith("order-"):
        pool = replace(pool, rules=Rules(reclaim=False, backfill=name != "order-kueue"))
        ranking = _ranking(name, setup)
    elif name == "oracle":
        steering = Oracle(workload, capacity, share)
    elif name == "karma":
        dividing = Karma(capacity, share, setup.guaranteed)
    elif name == "sdrf":
        dividing = StatefulDrf(capacity, share, pool.deserved)
    elif name != "static":
        policy = law_policy(name, workload.queues, setup)
        steering = Feedback(policy, dict(zip(workload.queues, share, strict=True)))
    return replay(workload, pool, end_s, steering=steering, dividing=dividing, ranking=ranking, progress=progress)


def law_policy(name: str, queues: Sequence[str], setup: Setup) -> Policy:
    """Return the policy with the feedback law of this name."""
    members = tuple(
        QueuePolicy(name=queue, weight=part, deserved=setup.guaranteed * part * setup.capacity)
        for queue, part in zip(queues, setup.share, strict=True)
    )
    if found := _KAI.fullmatch(name):
        window = WindowSpec(half_life=duration_seconds(found[2]) if found[2] else None)
        return Policy(law="kai", k=float(found[1]), window=window, bounds=FREE, queues=members)
    if name == "deficit":
        return Policy(law="deficit", window=WindowSpec(half_life=30 * 3600), bounds=DEFAULT, queues=members)
    return Policy.model_validate({"law": name, "bounds": FREE, "queues": members})


def _ranking(name: str, setup: Setup) -> Ranking:
    """Return the ranking of queues by their usage, with a half-life of a week, relative to their share."""
    queues = len(setup.share)
    usage = Usage(queues, 3 * _ORDER_HALF_LIFE_S, _ORDER_HALF_LIFE_S)
    waited: list[int] = [0] * queues

    def rank(view: ControllerView) -> list[float]:
        used, possible = usage.at(view)
        parts = [mine / possible if possible > 0 else 0.0 for mine in used]
        if name == "order-fairtree":
            return [part / share for part, share in zip(parts, setup.share, strict=True)]
        if name == "order-kueue":
            # Kueue's entry penalty: admitted GPUs count as if they had been used for a sampling interval.
            return [
                part / share + held / view.capacity / share / 1e3
                for part, share, held in zip(parts, setup.share, view.held, strict=True)
            ]
        for q in range(queues):
            waited[q] = waited[q] + 600 if view.asked[q] > view.held[q] else 0
        return [
            -fair_share_factor(part, share) - min(1.0, since / _ORDER_HALF_LIFE_S)
            for part, share, since in zip(parts, setup.share, waited, strict=True)
        ]

    return rank
