"""Defines the policies that are compared: feedback laws in the loop, and baseline schedulers.

Feedback laws (`static`, `kai-K[-HALFLIFE]`, `fairtree`, `multifactor`, `deficit`) publish weights through the
controller's own code. The others model a kind of scheduling, not a product:

- `fifo` has one line for all jobs, and `easy` the same with EASY backfilling.
- `partition` gives each queue a fixed part.
- `order-multifactor`, `order-fairtree` (with EASY backfilling, as on Slurm) and `order-kueue` serve queues by past
  usage and never preempt.
- `karma` and `sdrf` follow published mechanisms. They compute how many GPUs each queue is due, and the replay's
  scheduler enforces this like any fair share.
- `oracle` knows the future and publishes weights.

Karma, Stateful DRF and the oracle keep deserved quotas. They model the published mechanisms on one resource with fluid
shares, and are not those systems.

The accountant's answers (usage over the policy's window) are kept as running sums, so a control period costs
microseconds. `tests/demo/test_same_weights.py` compares them with `calculate_weights` on real answers of the
accountant."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp2
from operator import add, sub

import numpy as np
import numpy.typing as npt

from accountant.wire.policy_models import Bounds, DeficitPolicy, Policy, QueuePolicy, WindowSpec
from fairshare.laws.division import fill, fill_from
from fairshare.laws.feedback_laws import LawColumns, LawQueues, Memory, fair_share_factor
from fairshare.laws.weight_calculation import law_of, law_results
from fairshare.laws.weight_pacing import strides, unpaced
from fairshare.simulator.scheduler_engine import replay
from fairshare.simulator.simulation_model import (
    CONTROL_S,
    ControllerView,
    Dividing,
    Pool,
    Ranking,
    Record,
    Rules,
    Workload,
)
from gputally.base.units import apportion
from gputally.server.config_loading import parse_duration

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WEEK_S = 7 * 86_400
AHEAD_H = (24, 60, 96, 132)
"""Hours until the ends of the weeks that the oracle considers."""


class Karma:
    """Karma: a queue that lends unused GPUs earns credits, and a queue that borrows pays with them.

    The price is one credit per GPU and quantum, which is a control period. The queue with most credits goes first.

    A part of every fair share is guaranteed. The rest is a common pool from which every queue can borrow. To pay for
    its own part of that pool, each queue gets free credits every quantum. With unequal shares, a borrowed GPU costs a
    queue 1 / (n · share) credits. Queues that use nothing then earn equally fast. This weighting is not part of the
    paper.

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
        # Lent GPUs are used first, and queues with the fewest credits lend first.
        earned = fill_from(min(sum(lent), sum(borrowed)), lent, per_credit, self.credits)
        for q, price in enumerate(self._price):
            free = self._fair[q] - self._guaranteed[q]
            self.credits[q] += price * (free + earned[q] - borrowed[q])
        return [mine + more for mine, more in zip(own, borrowed, strict=True)]


class StatefulDrf:
    """Stateful DRF: max-min fairness over a queue's GPUs plus its commitment.

    The commitment is the decayed mean of the GPUs that it had above its share. GPUs that it left unused are not
    credited.

    half_life_s: half-life of the commitment.

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
        self._remember(view)
        base = [min(ask, quota) for ask, quota in zip(view.asked, self._deserved, strict=True)]
        starts = [(c + b) / part for c, b, part in zip(self.commitment, base, self._share, strict=True)]
        more = [ask - given for ask, given in zip(view.asked, base, strict=True)]
        extra = fill_from(self._capacity - sum(base), more, self._share, starts)
        return [given + above for given, above in zip(base, extra, strict=True)]

    def _remember(self, view: ControllerView) -> None:
        span = view.now_s - self._at_s
        if span < CONTROL_S:
            return
        kept = exp2(-span / self._half_life_s)
        for q, part in enumerate(self._share):
            over = max(0.0, (view.used[q] - self._used[q]) / span - part * self._capacity)
            self.commitment[q] = self.commitment[q] * kept + over * (1.0 - kept)
        self._used, self._at_s = list(view.used), view.now_s


class Oracle:
    """Sets weights with knowledge of every future job and its run time.

    The weight of a queue is the number of GPUs with which it gets what it is still due, averaged over several
    overlapping weeks that contain the present moment. In a week a queue is due its part by share (`fill`) of all GPU
    time that is delivered, up to the time that it used and could still use.

    No controller can know this. The oracle shows how well one could do."""

    def __init__(
        self, workload: Workload, capacity: int, share: Sequence[float], ahead_h: Sequence[int] = AHEAD_H
    ) -> None:
        self._capacity, self._share = capacity, share
        self._ahead_s = [hours * 3600 for hours in ahead_h]
        columns = (workload.submit_s, workload.duration_s, workload.gpus, workload.queue)
        self._submit, self._duration, self._gpus, self._queue = (np.asarray(column) for column in columns)
        self._offered: Floats = np.zeros(len(share))
        self._come = 0
        self._used: list[Floats] = []

    def __call__(self, view: ControllerView) -> list[float]:
        now = np.array(view.used, float)
        self._used.append(now)
        fresh = slice(self._come, int(np.searchsorted(self._submit, view.now_s, side="right")))
        self._offered += self._work(fresh, self._duration[fresh])
        self._come = fresh.stop
        left = np.maximum(0.0, self._offered - now)
        rates: Floats = np.zeros(len(self._share))
        for ahead_s in self._ahead_s:
            used = now - self._used[max(0, len(self._used) - 1 - (WEEK_S - ahead_s) // CONTROL_S)]
            able = used + np.minimum(left, np.array(view.asked, float) * ahead_s) + self._to_come(view.now_s, ahead_s)
            due = fill(float(used.sum()) + self._capacity * ahead_s, able.tolist(), self._share)
            rates += (np.array(due) - used) / ahead_s
        least = [1e-3 * part * self._capacity for part in self._share]
        return [max(low, rate / len(self._ahead_s)) for low, rate in zip(least, rates.tolist(), strict=True)]

    def _to_come(self, now_s: int, ahead_s: int) -> Floats:
        """Return the GPU-seconds per queue that jobs to be submitted could use within the time."""
        end_s = now_s + ahead_s
        jobs = slice(self._come, int(np.searchsorted(self._submit, end_s, side="right")))
        return self._work(jobs, np.minimum(self._duration[jobs], end_s - self._submit[jobs]))

    def _work(self, jobs: slice, seconds: Ints) -> Floats:
        work: Floats = np.bincount(self._queue[jobs], self._gpus[jobs] * seconds, len(self._share)).astype(float)
        return work


class Usage:
    """GPU-seconds per queue and of the cluster over a sliding window, with or without a half-life."""

    def __init__(self, queues: int, size_s: int, half_life_s: int | None) -> None:
        self._size_s, self._half_life_s = size_s, half_life_s
        self._sums = [0.0] * (queues + 1)
        self._last: list[int] = [0] * (queues + 1)
        self._last_s = 0
        self._slices: deque[tuple[int, list[float]]] = deque()

    def at(self, view: ControllerView) -> tuple[list[float], float]:
        """Return the usage per queue, and that of the capacity, including the usage since the last call."""
        span = view.now_s - self._last_s
        now = [*view.used, self._last[-1] + view.capacity * span]
        fresh: list[float] = list(map(sub, now, self._last))
        if self._half_life_s is None:
            sums = list(map(add, self._sums, fresh))
        else:
            # The usage of a short slice is treated as if all of it happened at the middle of the slice.
            fade, middle = exp2(-span / self._half_life_s), exp2(-span / 2 / self._half_life_s)
            fresh = [new * middle for new in fresh]
            sums = [old * fade + new for old, new in zip(self._sums, fresh, strict=True)]
        self._slices.append((view.now_s, fresh))
        while self._slices and self._slices[0][0] <= view.now_s - self._size_s:
            at, gone = self._slices.popleft()
            age = 1.0 if self._half_life_s is None else exp2(-(view.now_s - at) / self._half_life_s)
            sums = [old - past * age for old, past in zip(sums, gone, strict=True)]
        self._sums, self._last, self._last_s = sums, now, view.now_s
        return sums[:-1], sums[-1]


class Feedback:
    """A policy's law over flat queues, called once per control period. Lists by queue, in the policy's order."""

    def __init__(self, policy: Policy, targets: Mapping[str, float]) -> None:
        """targets: part of the pool of every queue by quota and weight, see `static_parts`."""
        self._policy, self._law = policy, law_of(policy)
        queues = policy.queues
        self._names = tuple(queue.name for queue in queues)
        self._places = {name: q for q, name in enumerate(self._names)}
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
        rulings = list(law_results(self._law, siblings, self._policy, self._memory))
        in_force = list(self._in_force)
        for _, verdict, names, values in rulings:
            if self._unpaced:
                self._jump(in_force, names, values)
            else:
                self._pace(in_force, names, values, now_ms, turn=verdict.turn is not None)
        # Only a law that is called once, for all queues, keeps a memory: the first result has it.
        self._memory = rulings[0][1].memory
        self._in_force = in_force
        return in_force

    def _jump(self, in_force: list[float], names: Sequence[str], values: Sequence[float]) -> None:
        """Return the same as `_pace` if nothing limits a weight's change."""
        places = self._places
        for name, wanted in zip(names, values, strict=True):
            q = places[name]
            if in_force[q]:
                in_force[q] = wanted

    def _pace(
        self, in_force: list[float], names: Sequence[str], values: Sequence[float], now_ms: int, *, turn: bool
    ) -> None:
        """Move the weights towards the wanted ones as far as one cycle may go. A turn takes effect at once."""
        places, changed_ms, direction, bounds = self._places, self._changed_ms, self._direction, self._policy.bounds
        for name, wanted in zip(names, values, strict=True):
            q = places[name]
            held = in_force[q]
            # A weight of 0 stays 0, and a weight that does not move needs no pace.
            if wanted != held and held:
                value = wanted if turn else strides(wanted, held, changed_ms[q], direction[q], bounds, now_ms)[1]
                if value != held:
                    in_force[q], changed_ms[q], direction[q] = value, now_ms, 1 if value > held else -1


NAMES = (
    "fifo", "easy", "partition", "order-multifactor", "order-fairtree", "order-kueue", "static", "kai-0.5", "kai-1",
    "kai-2", "kai-5", "kai-1-24h", "multifactor", "fairtree", "karma", "sdrf", "deficit", "oracle",
)  # fmt: skip
LAWS = ("static", "kai-1", "kai-5", "kai-1-24h", "multifactor", "fairtree", "deficit")
"""The laws that publish weights, for a quick comparison."""
FREE = Bounds(min_multiplier=1e-4, max_multiplier=1e4, max_step=1e9, deadband=0.0)
"""Bounds of the baselines, which change as far and as fast as their formula says."""
DEFAULT = Bounds(min_multiplier=0.1, max_multiplier=8.0, max_step=0.5, deadband=0.0)
"""Bounds of the default law: the controller's usual step, and its own quiet zone instead of a deadband."""
_KAI = re.compile(r"kai-(\d+(?:\.\d+)?)(?:-(\d+[a-z]+))?")
_ORDER_HALF_LIFE_S = 7 * 86_400
_LINE_DEPTH = 256
"""How far a single line for all queues is searched for backfilling; Slurm's default is similar."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster for a workload.

    share: the share of each queue, > 0, in the workload's order, adding up to 1.
    guaranteed: the part of its share that is a deserved quota."""

    capacity: int
    share: Sequence[float]
    guaranteed: float = 0.5

    def pool(self) -> Pool:
        deserved = [self.guaranteed * part * self.capacity for part in self.share]
        return Pool(self.capacity, deserved, list(self.share))


def unknown(name: str) -> bool:
    """Return whether no policy has this name."""
    return name not in NAMES and not _KAI.fullmatch(name)


def run(
    name: str,
    workload: Workload,
    setup: Setup,
    end_s: int,
    *,
    settings: DeficitPolicy | None = None,
    progress: Callable[[float], None] | None = None,
) -> Record:
    """Replay a workload under a policy of `NAMES` (any k and half-life after `kai-`). Raises ValueError."""
    if unknown(name):
        raise ValueError(f"no policy {name!r}; one of {', '.join(NAMES)}")
    pool = setup.pool()
    if name == "fifo":
        pool = replace(pool, rules=Rules(reclaim=False, one_line=True))
        return replay(workload, pool, end_s, progress=progress)
    if name == "easy":
        rules = Rules(reclaim=False, one_line=True, backfill=True, scan_depth=_LINE_DEPTH)
        pool = replace(pool, rules=rules)
        return replay(workload, pool, end_s, progress=progress)
    if name == "partition":
        parts = apportion(setup.capacity, [round(part * 1_000_000) for part in setup.share])
        return replay(workload, replace(pool, rules=Rules(reclaim=False), limits=parts), end_s, progress=progress)
    if name == "static":
        return replay(workload, pool, end_s, progress=progress)
    if name.startswith("order-"):
        ranking, backfill = _ranking(name, setup), name != "order-kueue"
        pool = replace(pool, rules=Rules(reclaim=False, backfill=backfill))
        return replay(workload, pool, end_s, ranking=ranking, progress=progress)
    if name == "oracle":
        oracle = Oracle(workload, setup.capacity, setup.share)
        return replay(workload, pool, end_s, steering=oracle, progress=progress)
    if name in ("karma", "sdrf"):
        dividing: Dividing = Karma(setup.capacity, setup.share, setup.guaranteed)
        if name == "sdrf":
            dividing = StatefulDrf(setup.capacity, setup.share, pool.deserved)
        return replay(workload, pool, end_s, dividing=dividing, progress=progress)
    policy = law_policy(name, workload.queues, setup, settings)
    targets = dict(zip(workload.queues, setup.share, strict=True))
    return replay(workload, pool, end_s, steering=Feedback(policy, targets), progress=progress)


def law_policy(name: str, queues: Sequence[str], setup: Setup, settings: DeficitPolicy | None = None) -> Policy:
    """Return the policy file of a feedback law with this name."""
    members = tuple(
        QueuePolicy(name=queue, weight=part, deserved=setup.guaranteed * part * setup.capacity)
        for queue, part in zip(queues, setup.share, strict=True)
    )
    if found := _KAI.fullmatch(name):
        half_life = parse_duration(found[2]) if found[2] else None
        window = WindowSpec.model_validate({"half_life": half_life})
        return Policy(law="kai", k=float(found[1]), window=window, bounds=FREE, queues=members)
    if name == "deficit":
        window = WindowSpec(half_life=30 * 3600)
        chosen = settings or DeficitPolicy()
        return Policy(law="deficit", window=window, bounds=DEFAULT, deficit=chosen, queues=members)
    law: Mapping[str, object] = {"law": name, "bounds": FREE, "queues": members}
    return Policy.model_validate(law)


def _ranking(name: str, setup: Setup) -> Ranking:
    """Order queues by what they used, decayed with a week's half-life, against their share."""
    queues = len(setup.share)
    usage = Usage(queues, 3 * _ORDER_HALF_LIFE_S, _ORDER_HALF_LIFE_S)
    waited: list[int] = [0] * queues

    def rank(view: ControllerView) -> list[float]:
        used, possible = usage.at(view)
        parts = [mine / possible if possible > 0 else 0.0 for mine in used]
        if name == "order-fairtree":
            return [part / share for part, share in zip(parts, setup.share, strict=True)]
        if name == "order-kueue":
            # The entry penalty: admitted GPUs count as if they had been used for a sampling interval.
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
