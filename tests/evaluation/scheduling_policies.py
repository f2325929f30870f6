"""Defines the policies that the evaluation compares: the law, and baseline schedulers.

`default` is the product's policy: KAI's rule with k = 1, a half-life of 24 h, an interval of 3 h, weights between a
tenth and four times the configured ones, and turns. `no-turns` is the same without turns. `kai-K[-HALFLIFE]` is KAI's
rule at every cycle, without bounds and turns, `static` keeps the configured weights. All set weights with the
controller's own code. The other policies model a kind of scheduling, not a product:

- `fifo` has one line for all jobs, and `easy` adds EASY backfilling.
- `partition` gives each queue a fixed part of the cluster.
- `order-multifactor`, `order-fairtree` (with EASY backfilling, as on Slurm) and `order-kueue` serve queues by past
  usage and never preempt.
- `karma` and `sdrf` follow published mechanisms. They compute the GPUs that each queue is due, and the replay's
  scheduler enforces them like any fair share.
- `oracle` knows the future and sets weights.

Under Karma, Stateful DRF and the oracle every queue still gets its deserved quota first. Karma and Stateful DRF are
simpler than in the papers: GPUs are the only resource, and a queue's share may be a fraction of a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp2

import numpy as np
import numpy.typing as npt

from accountant.wire.policy_models import Bounds, Policy, QueuePolicy, TurnPolicy, WindowSpec
from fairshare.laws.division import fill
from fairshare.simulator.scheduler_engine import replay
from fairshare.simulator.simulated_controller import Feedback, SlidingUsage
from fairshare.simulator.simulation_model import (
    CONTROL_S,
    ControllerView,
    Dividing,
    Ranking,
    ReplayPool,
    ReplayRecord,
    Rules,
    SimulatedController,
    Workload,
)
from gputally.base.apportionment import apportion
from gputally.base.instants import duration_seconds

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WEEK_S = 7 * 86_400
AHEAD_H = (24, 60, 96, 132)
"""The hours from now to the ends of the weeks that the oracle considers."""


def fill_from(total: float, caps: Sequence[float], weights: Sequence[float], starts: Sequence[float]) -> list[float]:
    """Divide like `fill`, but with a starting level for each queue.

    Queue i gets weight · (level - start), limited to 0 and its cap. All queues have the same level, at which the sum is
    `total`. If the caps add up to no more than `total`, each queue gets its cap."""
    competing = [i for i, cap in enumerate(caps) if cap > 0 and weights[i] > 0]
    if sum([caps[i] for i in competing]) <= total:
        return [cap if weight > 0 else 0.0 for cap, weight in zip(caps, weights, strict=True)]
    turns = sorted(
        [(starts[i], weights[i]) for i in competing]
        + [(starts[i] + caps[i] / weights[i], -weights[i]) for i in competing]
    )
    level, slope, given = turns[0][0], 0.0, 0.0
    for at, change in turns:
        if slope > 0 and given + slope * (at - level) >= total:
            level += (total - given) / slope
            break
        given += slope * (at - level)
        level, slope = at, slope + change
    parts = [0.0] * len(caps)
    for i in competing:
        parts[i] = min(caps[i], max(0.0, weights[i] * (level - starts[i])))
    return parts


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


NAMES = (
    "default", "no-turns", "fifo", "easy", "partition", "order-multifactor", "order-fairtree", "order-kueue", "static",
    "kai-0.5", "kai-1", "kai-2", "kai-5", "kai-1-24h", "karma", "sdrf", "oracle",
)  # fmt: skip
LAWS = ("default", "no-turns", "static", "kai-1", "kai-5", "kai-1-24h")
"""The policies that set weights, for a quick comparison."""
FREE = Bounds(min_multiplier=1e-4, max_multiplier=1e4, interval=0)
"""The bounds of KAI's rule as KAI applies it: at every cycle, as far as the formula says."""
NO_TURNS = TurnPolicy(most_queues=0)
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

    def pool(self) -> ReplayPool:
        deserved = [self.guaranteed * part * self.capacity for part in self.share]
        return ReplayPool(self.capacity, deserved, list(self.share))


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
) -> ReplayRecord:
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
        steering = Feedback(policy)
    return replay(workload, pool, end_s, steering=steering, dividing=dividing, ranking=ranking, progress=progress)


def law_policy(name: str, queues: Sequence[str], setup: Setup) -> Policy:
    """Return the product's policy of this name."""
    members = tuple(
        QueuePolicy(name=queue, weight=part, deserved=setup.guaranteed * part * setup.capacity)
        for queue, part in zip(queues, setup.share, strict=True)
    )
    if found := _KAI.fullmatch(name):
        window = WindowSpec(half_life=duration_seconds(found[2]) if found[2] else None)
        return Policy(k=float(found[1]), window=window, bounds=FREE, turns=NO_TURNS, queues=members)
    return Policy(queues=members, turns=TurnPolicy() if name == "default" else NO_TURNS)


def fair_share_factor(usage: float, shares: float) -> float:
    """Return Slurm's factor 2^(-U/S), with the usage U and the shares S; 0 if S is 0.

    Source: SchedMD Slurm 284c3b95f08a, src/plugins/priority/multifactor/priority_multifactor.c (read, not copied)."""
    return exp2(-usage / shares) if shares > 0 else 0.0


def _ranking(name: str, setup: Setup) -> Ranking:
    """Return the ranking of queues by their usage, with a half-life of a week, relative to their share."""
    queues = len(setup.share)
    usage = SlidingUsage(queues, 3 * _ORDER_HALF_LIFE_S, _ORDER_HALF_LIFE_S)
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
