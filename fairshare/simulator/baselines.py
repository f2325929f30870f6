"""Other people's ways of remembering, as baselines: Karma's credits, Stateful DRF, and an oracle. Pure.

Karma and Stateful DRF say how many GPUs each queue is due, and the replay's scheduler enforces that as it
enforces any fair share; the oracle publishes weights. All three keep deserved quotas. They are sketches of the
published mechanisms on one resource with fluid shares, not those systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp2

import numpy as np
import numpy.typing as npt

from fairshare.simulator.records import CONTROL_S, View
from fairshare.simulator.workload import Workload
from fairshare.weighing.fluid import fill, fill_from

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WEEK_S = 7 * 86_400
AHEAD_H = (24, 60, 96, 132)
"""Hours until the ends of the weeks that the oracle has in mind."""


class Karma:
    """Who lends what he does not need earns a credit per GPU and quantum; who borrows pays one; most credits first.

    Of every fair share a part is guaranteed, the rest is everybody's to borrow, and its worth comes as free credits.
    With unequal shares a GPU costs a queue 1 / (n · share), so that all earn the same for nothing; this weighting is
    our own reading. Quantum: a control period.

    Source: Vuppalapati et al., "Karma: Resource Allocation for Dynamic Demands", OSDI 2023."""

    def __init__(self, capacity: int, share: Sequence[float], guaranteed: float = 0.5) -> None:
        self._fair = [part * capacity for part in share]
        self._guaranteed = [guaranteed * mine for mine in self._fair]
        self._price = [1.0 / (len(share) * part) for part in share]
        self.credits = [0.0] * len(share)
        self._due: list[float] | None = None
        self._at_s = 0

    def __call__(self, view: View, _weights: Sequence[float]) -> list[float]:
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
        # What is lent goes first, and who has least to show for it lends first.
        earned = fill_from(min(sum(lent), sum(borrowed)), lent, per_credit, self.credits)
        for q, price in enumerate(self._price):
            free = self._fair[q] - self._guaranteed[q]
            self.credits[q] += price * (free + earned[q] - borrowed[q])
        return [mine + more for mine, more in zip(own, borrowed, strict=True)]


class StatefulDrf:
    """Max-min over what a queue gets plus its commitment: the decayed mean of what it had above its share.

    What it left unused is not credited. half_life_s: of the commitment.

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

    def __call__(self, view: View, _weights: Sequence[float]) -> list[float]:
        self._remember(view)
        base = [min(ask, quota) for ask, quota in zip(view.asked, self._deserved, strict=True)]
        starts = [(c + b) / part for c, b, part in zip(self.commitment, base, self._share, strict=True)]
        more = [ask - given for ask, given in zip(view.asked, base, strict=True)]
        extra = fill_from(self._capacity - sum(base), more, self._share, starts)
        return [given + above for given, above in zip(base, extra, strict=True)]

    def _remember(self, view: View) -> None:
        span = view.now_s - self._at_s
        if span < CONTROL_S:
            return
        kept = exp2(-span / self._half_life_s)
        for q, part in enumerate(self._share):
            over = max(0.0, (view.used[q] - self._used[q]) / span - part * self._capacity)
            self.commitment[q] = self.commitment[q] * kept + over * (1.0 - kept)
        self._used, self._at_s = list(view.used), view.now_s


class Oracle:
    """Knows every job that will come and how long it runs: weights by what each queue is still due in the weeks to
    which this moment belongs, some of them just begun, some nearly over. No controller can do that; it shows how near
    one comes.

    Due in a week is `fill` of all that it delivers by share, nobody above what it used and could still use."""

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

    def __call__(self, view: View) -> list[float]:
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
        """GPU-seconds per queue that jobs to be submitted could use within the time."""
        end_s = now_s + ahead_s
        jobs = slice(self._come, int(np.searchsorted(self._submit, end_s, side="right")))
        return self._work(jobs, np.minimum(self._duration[jobs], end_s - self._submit[jobs]))

    def _work(self, jobs: slice, seconds: Ints) -> Floats:
        work: Floats = np.bincount(self._queue[jobs], self._gpus[jobs] * seconds, len(self._share)).astype(float)
        return work
