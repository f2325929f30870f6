"""Divides GPUs level by level among the queues of a tree, in KAI's two phases; `fill` divides by weight up to a cap.

In the first phase every queue gets its deserved quota, but no more than it requests and its limit allows. In the second
phase the rest goes to queues that want more, the highest priority first. Within a priority it is divided in proportion
to

    P = max(0, n + k (n - U))

    n   the queue's weight over the sum of the weights
    U   the queue's usage, as a part of the capacity
    k   the strength of history; with k = 0 the division is by weight

Example: two queues of equal weight have n = 0.5. With k = 1, the one that used everything (U = 1) has P = 0, and the
other (U = 0) has P = 1.

Each round gives whole units, or the rest of a request. After the rounds the units that are left go to the queues with
the largest fractions.

`as_source=True` gives the same result as the source, KAI's scheduler, including its rounding. The only exceptions are
cases in which the scheduler's own result depends on the iteration order of a Go map. In this mode sums and differences
are computed one by one, in the order of priority, creation and name. Three properties of KAI follow:

- The remainder rule may lift a queue above its request and limit by less than one unit.
- If every P is 0, the pool is not divided.
- The fractions of all priorities are given out only after the rounds of all priorities.

The default mode avoids all three. No queue exceeds its limit. If every P is 0, the configured weights decide. Each
priority is finished before the next. Sums are `math.fsum`, which is exact and therefore independent of the order.

In both modes the result depends only on the claims, not on their order, because ties are broken by creation and name.
Neither mode scales down quotas that exceed the total.

Use `as_source` to predict KAI. Entitlements and the simulator's own schedulers use the default.

Source: KAI-Scheduler pkg/scheduler/plugins/proportion/resource_division, commit d5bc503a."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from math import frexp, fsum, ldexp
from operator import add, attrgetter, lt, sub
from struct import pack
from typing import Any

import numpy as np
import numpy.typing as npt

from fairshare.core.queues_and_weights import (
    UNLIMITED,
    Division,
    DivisionProblem,
    DivisionRound,
    QueueClaim,
    Remainder,
    RoundOffer,
)
from gputally.base.errors import DivisionError

Steps = list[DivisionRound | Remainder]

_MANY = 48
"""Number of queues from which on columns are arrays, which are slower for fewer."""
_NARROW = 256
"""Fewer values are added up faster one by one."""
_SAFE = 2.0**900
_MOST_SLICES = 4
_MANTISSA = 53


def _column(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the values as an array. Packing takes half the time that numpy takes for a list."""
    return np.frombuffer(bytearray(pack(f"{len(values)}d", *values)))


def _sum(values: npt.NDArray[np.float64]) -> float:
    """Return the sum of values >= 0, rounded exactly as `math.fsum` rounds it.

    The column is cut into slices, starting with the highest bits. Each slice has so few bits that its plain sum is
    exact. `fsum` then adds the sums of the slices. Small whole numbers are one slice.

    Source: Rump, Ogita, Oishi 2008, "Accurate floating-point summation"."""
    if len(values) < _NARROW:
        return fsum(values.tolist())
    largest = float(np.maximum.reduce(values))
    if not 0 < largest < _SAFE:
        return fsum(values.tolist())
    bits = len(values).bit_length() + 1
    sigma = ldexp(1.0, frexp(largest)[1] + bits)
    sums: list[float] = []
    rest = values
    for _ in range(_MOST_SLICES):
        top = (rest + sigma) - sigma
        sums.append(float(np.add.reduce(top)))
        rest = rest - top
        if not np.count_nonzero(rest):
            return fsum(sums)
        sigma = ldexp(sigma, bits - _MANTISSA)
    return fsum(sums + rest.tolist())


def history(weights: Sequence[float], usage: Sequence[float], k: float, total: float) -> list[float]:
    """Return P = max(0, n + k (n - U)) per queue. total: the sum of the weights."""
    if total == 0:
        return [0.0] * len(weights)
    normalised = [weight / total for weight in weights]
    if k == 0:
        return normalised
    p = [(n - used) * k + n for n, used in zip(normalised, usage, strict=True)]
    return p if min(p) >= 0 else [max(each, 0.0) for each in p]


class Siblings:
    """One sibling set during a division.

    The queues are sorted by falling priority, then age, then name; all columns are in this order. They are lists, but
    arrays of many queues without steps in the default mode: `column` makes them."""

    def __init__(
        self, claims: list[QueueClaim], parent: str | None, steps: Steps | None, *, as_source: bool = False
    ) -> None:
        """claims: sorted by name. steps: a list to which the division appends its steps; None to record none."""
        ordered = sorted(sorted(claims, key=attrgetter("creation")), key=attrgetter("priority"), reverse=True)
        self._by_name, self.claims, self.names = claims, ordered, [claim.name for claim in ordered]
        self._many = len(ordered) >= _MANY and steps is None and not as_source
        self.column: Any = _column if self._many else list
        self.weight: Any = self.column([claim.weight for claim in ordered])
        self.usage: Any = self.column([claim.usage for claim in ordered])
        self.cap: Any = self.column(
            [claim.request if claim.limit == UNLIMITED else min(claim.request, claim.limit) for claim in ordered]
        )
        self.share: Any = ()
        self.fraction = [0.0] * len(ordered)
        """Of a unit, what the rounds have left out for each queue."""
        self.parent, self.steps, self.as_source = parent, steps, as_source
        self._levels: list[tuple[int, range]] = []
        end = 0
        while (first := end) < len(ordered):
            level = ordered[first].priority
            end = bisect_right(ordered, -level, first, key=lambda claim: -claim.priority)
            self._levels.append((level, range(first, end)))

    def shares(self) -> dict[str, float]:
        """Return the shares by name, sorted by name."""
        share_of = dict(zip(self.names, self.share.tolist() if self._many else self.share, strict=True))
        in_order = self.claims == self._by_name
        return share_of if in_order else {claim.name: share_of[claim.name] for claim in self._by_name}

    def give_deserved(self, total: float) -> float:
        """Run phase one and return the rest of the total, which may be negative.

        Every queue gets its quota up to its cap. Priority, usage and total have no influence."""
        quotas = [total if claim.deserved == UNLIMITED else claim.deserved for claim in self.claims]
        if self._many:
            self.share = np.minimum(_column(quotas), self.cap)
            return total - _sum(self.share)
        self.share = list(map(min, quotas, self.cap))
        return self._less(total, self.share)

    def divide_over_quota(self, pool: float, k: float) -> float:
        """Run phase two and return the rest of the pool.

        The priorities follow each other from high to low: the rounds of one, then its fractions. In KAI's mode the
        fractions of all priorities come after all rounds."""
        unsatisfied: list[tuple[int, list[int]]] = []
        for level, queues in self._levels:
            if not pool > 0:
                break
            if self._many:
                pool = self._give_many(pool, k, queues)
                continue
            pool, index = self._rounds(pool, k, level, queues)
            if self.as_source:
                unsatisfied.append((level, index))
            else:
                pool = self._remainders(pool, level, index)
        for level, index in unsatisfied:
            pool = self._remainders(pool, level, index)
        return pool

    def _sum(self, values: Iterable[float]) -> float:
        """Return the sum, exactly or in KAI's way: rounded at every step. `sum` does neither from Python 3.12 on."""
        return reduce(add, values, 0.0) if self.as_source else fsum(values)

    def _less(self, total: float, parts: Iterable[float]) -> float:
        """Subtract the parts from the total, exactly or in KAI's way."""
        return reduce(sub, parts, total) if self.as_source else total - fsum(parts)

    def _weightless(self, wanting: Iterable[int], k: float) -> list[float]:
        """Return the positive P of queues with weight 0. KAI adds these to the sum S but gives the queues nothing."""
        if k == 0 or not self.as_source:
            return []
        return [p for i in wanting if not self.weight[i] > 0 and (p := self.usage[i] * -k) > 0]

    def _rounds(self, pool: float, k: float, level: int, queues: Sequence[int]) -> tuple[float, list[int]]:
        """Give out whole units until a round leaves no surplus.

        Returns the rest of the pool, and the indexes of the queues that still want more."""
        share, cap, fraction = self.share, self.cap, self.fraction
        wanting = [i for i in queues if share[i] < cap[i]]
        weightless = self._weightless(wanting, k)
        index = [i for i in wanting if self.weight[i] > 0]
        number, surplus = 0, True
        while surplus and index and pool > 0:
            weight, usage = [self.weight[i] for i in index], [self.usage[i] for i in index]
            total = self._sum(weight)
            p = history(weight, usage, k, total)
            sum_p = self._sum([*p, *weightless])
            if sum_p == 0:
                if self.as_source:
                    break
                p = history(weight, usage, 0.0, total)
                sum_p = fsum(p)
            offered = [each / sum_p * pool for each in p]
            surplus, given = False, []
            for i, offer in zip(index, offered, strict=True):
                give = cap[i] - share[i]
                if give <= offer:
                    surplus = surplus or give < offer
                    fraction[i] = 0.0
                else:
                    # A queue that is offered whole units keeps the fraction of an earlier round.
                    give = offer // 1
                    fraction[i] = offer - give or fraction[i]
                share[i] += give
                given.append(give)
            left = self._less(pool, given)
            if self.steps is not None:
                number += 1
                names, fractions = zip(*((self.names[i], fraction[i]) for i in index), strict=True)
                normalised = history(weight, usage, 0.0, fsum(weight))
                offers = tuple(map(RoundOffer, names, normalised, usage, p, offered, given, fractions))
                self.steps.append(DivisionRound(self.parent, level, number, pool, sum_p, offers, left))
            pool = left
            index = [i for i in index if share[i] < cap[i]]
        return pool, index

    def _give_many(self, pool: float, k: float, queues: range) -> float:
        """Do the same as `_rounds` and `_remainders`, bit by bit, for many queues."""
        level = slice(queues.start, queues.stop)
        (at,) = ((self.share[level] < self.cap[level]) & (self.weight[level] > 0)).nonzero()
        at += queues.start
        share, weight, usage, cap = (column.take(at) for column in (self.share, self.weight, self.usage, self.cap))
        fraction = np.zeros(len(at))
        surplus = True
        while surplus and len(at) and pool > 0:
            n = weight / _sum(weight)
            p = np.maximum((n - usage) * k + n, 0.0) if k else n
            sum_p = _sum(p)
            if sum_p == 0:
                p, sum_p = n, _sum(n)
            offered = p / sum_p * pool
            want = cap - share
            met = want <= offered
            given = np.where(met, want, np.floor(offered))
            left = offered - given
            fraction = np.where(met, 0.0, np.where(left != 0, left, fraction))
            surplus = bool(np.count_nonzero(want < offered))
            share = share + given
            pool -= _sum(given)
            self.share[at] = share
            (open_,) = (share < cap).nonzero()
            if len(open_) < len(at):
                at, columns = at.take(open_), (weight, usage, cap, share, fraction)
                weight, usage, cap, share, fraction = (column.take(open_) for column in columns)
        order = np.argsort(-fraction, kind="stable")[: np.count_nonzero(fraction > 0)]
        most = np.minimum(cap[order] - share[order], 1.0)
        gone = np.zeros(len(order))
        gone[1:] = np.cumsum(most)[:-1]
        give = np.minimum(pool - gone, most)
        give = give[give > 0]
        self.share[at[order[: len(give)]]] += give
        return pool - fsum(give.tolist())

    def _remainders(self, pool: float, level: int, index: Iterable[int]) -> float:
        """Give up to one unit to each queue, the largest fraction first, until nothing is left of the pool.

        Of equal fractions the older queue comes first, then the first by name. In KAI's way a unit may exceed the limit
        of a queue, and the pool shrinks unit by unit."""
        gone, given = 0.0, []
        fraction, share, cap = self.fraction, self.share, self.cap
        for i in sorted([i for i in index if fraction[i] > 0], key=fraction.__getitem__, reverse=True):
            room, left = cap[i] - share[i], pool - gone
            most = 1.0 if self.as_source or room > 1.0 else room
            give = min(left, most)
            if not give > 0:
                break
            share[i] += give
            given.append(give)
            if self.as_source:
                pool -= give
            else:
                gone += most
            if self.steps is not None:
                self.steps.append(Remainder(self.parent, level, self.names[i], fraction[i], give))
        return pool if self.as_source else pool - fsum(given)


def divide_above(case: DivisionProblem, least: Mapping[str, float]) -> Mapping[str, float]:
    """Divide `case.total` so that no queue gets less than the GPUs that its scheduler reserves for it, whatever it
    requests, and the other queues divide the rest. Return the shares by queue.

    least: the reserved GPUs by queue, without those that have none."""
    reserved: dict[str, float] = {}
    while True:
        claims = tuple(
            replace(claim, deserved=kept, limit=kept, request=max(claim.request, kept))
            if (kept := reserved.get(claim.name)) is not None
            else claim
            for claim in case.claims
        )
        shares = divide(replace(case, claims=claims)).shares
        below = {name: kept for name, kept in least.items() if name not in reserved and shares[name] < kept}
        if not below:
            return shares
        reserved |= below


def divide(case: DivisionProblem, *, explain: bool = False, as_source: bool = False) -> Division:
    """Divide `case.total` among `case.claims`.

    With `explain`, `Division.steps` contains every round. With `as_source` the result is that of KAI's scheduler.

    Raises DivisionError for a duplicate name, an unknown parent or a cycle."""
    claims = list(case.claims)
    names = [claim.name for claim in claims]
    if not all(map(lt, names, names[1:])):
        claims.sort(key=attrgetter("name"))
        names.sort()
        twice = next((one for one, other in pairwise(names) if one == other), None)
        if twice is not None:
            raise DivisionError(f"queue {twice!r} occurs twice")
    steps: Steps | None = [] if explain else None
    if case.function == "divideOverQuotaResource":
        siblings = Siblings(claims, None, steps, as_source=as_source)
        siblings.share = siblings.column([claim.initial for claim in siblings.claims])
        remaining = siblings.divide_over_quota(case.total, case.k)
        return Division(siblings.shares(), remaining, {}, tuple(steps or ()))
    flat = case.function == "setResourceShare" or not any(map(attrgetter("parent"), claims))
    tree: dict[str | None, list[QueueClaim]] = {None: claims} if flat else _tree(claims)
    shares: dict[str, float] = {}
    deserved: dict[str, float] = {}
    remaining = 0.0
    pending: list[str | None] = [None]
    for parent in pending:
        siblings = Siblings(tree[parent], parent, steps, as_source=as_source)
        pool = siblings.give_deserved(case.total if parent is None else shares[parent])
        if explain:
            deserved.update(siblings.shares())
        left = siblings.divide_over_quota(pool, case.k) if pool > 0 else 0.0
        remaining = left if parent is None else remaining
        if flat:
            return Division(siblings.shares(), left, deserved, tuple(steps or ()))
        shares.update(siblings.shares())
        pending.extend(name for name in siblings.names if name in tree)
    return Division(
        {name: shares[name] for name in names}, remaining, dict(sorted(deserved.items())), tuple(steps or ())
    )


def _tree(claims: Sequence[QueueClaim]) -> dict[str | None, list[QueueClaim]]:
    """Return claims by parent, each list in the order of `claims`. Raises DivisionError."""
    parents = {claim.name: claim.parent for claim in claims}
    tree: dict[str | None, list[QueueClaim]] = {None: []}
    rooted: set[str | None] = {None}
    for claim in claims:
        tree.setdefault(claim.parent, []).append(claim)
        path: list[str] = []
        at: str | None = claim.name
        while at is not None and at not in rooted:
            if at in path:
                raise DivisionError("the queue tree has a cycle: " + " -> ".join([*path[path.index(at) :], at]))
            if at not in parents:
                raise DivisionError(f"queue {path[-1]!r} has the unknown parent {at!r}")
            path.append(at)
            at = parents[at]
        rooted.update(path)
    return tree


_AMPLE = 1 - 1e-9
"""If the requests reach at most this part of the total, rounding cannot leave a queue with less than its request."""


def fill(total: float, caps: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Divide `total` by weight, up to the cap of each queue; a queue with weight 0 gets nothing.

    The units that a queue leaves because of its cap go to the others."""
    parts = [0.0] * len(caps)
    open_ = [i for i, cap in enumerate(caps) if cap > 0.0 and weights[i] > 0.0]
    while open_ and total > 0.0:
        level = total / sum([weights[i] for i in open_])
        uncapped: list[int] = []
        for i in open_:
            cap, part = caps[i], level * weights[i]
            if cap <= part:
                parts[i] = cap
                total -= cap
            else:
                parts[i] = part
                uncapped.append(i)
        if len(uncapped) == len(open_):
            return parts
        open_ = uncapped
    for i in open_:
        parts[i] = 0.0
    return parts


def fair_shares(
    total: float, requested: Sequence[float], deserved: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Give deserved quotas first, then the rest by weight to queues that request more. This is KAI's division without
    rounding."""
    if sum(requested) < total * _AMPLE and min(weights) > 0:
        return list(map(float, requested))
    base = list(map(min, deserved, requested))
    pool = total - sum(base)
    if pool <= 0:
        return base
    more = fill(pool, list(map(sub, requested, base)), weights)
    return list(map(add, base, more))
