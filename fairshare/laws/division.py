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

`kai_compat=True` gives the same result as KAI's scheduler, including its rounding. The only exceptions are cases in
which the scheduler's own result depends on the iteration order of a Go map. In this mode sums and differences are
computed one by one, in the order of priority, creation and name. Three properties of KAI follow:

- The remainder rule may lift a queue above its request and limit by less than one unit.
- If every P is 0, the pool is not divided.
- The fractions of all priorities are given out only after the rounds of all priorities.

The default mode avoids all three. No queue exceeds its limit. If every P is 0, the configured weights decide. Each
priority is finished before the next. Sums are `math.fsum`, which is exact and therefore independent of the order.

In both modes the result depends only on the claims, not on their order, because ties are broken by creation and name.
Neither mode scales down quotas that exceed the total.

Use `kai_compat` to predict KAI. Entitlements and the simulator's own schedulers use the default.

Source: KAI-Scheduler pkg/scheduler/plugins/proportion/resource_division, commit d5bc503a."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import frexp, fsum, ldexp
from operator import add, attrgetter, lt, sub
from struct import pack

import numpy as np
import numpy.typing as npt

from fairshare.core.queues_and_weights import (
    UNLIMITED,
    Claim,
    Division,
    DivisionProblem,
    DivisionRound,
    Remainder,
    RoundOffer,
)
from gputally.base.errors import DivisionError

Steps = list[DivisionRound | Remainder]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

_NARROW = 128
"""Number of values below which they are added one by one."""
_SAFE = 2.0**900
_WHOLE = 2.0**53
"""Whole numbers whose sum is below this are added without rounding."""
_MOST_SLICES = 4
_MANTISSA = 53


def _column(values: Sequence[float]) -> Floats:
    """Return a read-only column. Packing is several times faster than numpy's conversion of a list."""
    return np.frombuffer(pack(f"{len(values)}d", *values)) if values else np.zeros(0)


def _sum(values: Floats, *, whole: bool = False) -> float:
    """Return the sum of values >= 0, rounded exactly as `math.fsum` rounds it.

    The result therefore does not depend on the order. Set `whole` if all values are known to be whole numbers.

    Whole numbers add up exactly as long as the sum stays below 2^53. Other long columns are cut into slices, starting
    with the highest bits. Each slice has so few bits that its plain sum is exact. `fsum` then adds the sums of the
    slices.

    Source: Rump, Ogita, Oishi 2008, "Accurate floating-point summation"."""
    if len(values) < _NARROW:
        return fsum(values.tolist())
    plain = float(np.add.reduce(values))
    if not 0 < plain < _SAFE:
        return fsum(values.tolist())
    if plain < _WHOLE and (whole or _all_whole(values)):
        return plain
    bits = len(values).bit_length() + 1
    sigma = ldexp(1.0, frexp(float(np.maximum.reduce(values)))[1] + bits)
    sums: list[float] = []
    rest = values
    for _ in range(_MOST_SLICES):
        top = rest + sigma
        top -= sigma
        sums.append(float(np.add.reduce(top)))
        rest = rest - top
        if not np.count_nonzero(rest):
            return fsum(sums)
        sigma = ldexp(sigma, bits - _MANTISSA)
    return fsum(sums + rest.tolist())


def _all_whole(values: Floats) -> bool:
    return not np.count_nonzero(np.floor(values) != values)


def _sum_in_order(values: Floats) -> float:
    """Add the values one after the other and round at every step, as KAI does.

    Python's `sum` compensates rounding errors from version 3.12 on, and numpy's `sum` adds in pairs."""
    return float(np.add.accumulate(values)[-1]) if len(values) else 0.0


def history(weights: Floats, usage: Floats, k: float, total: float) -> Floats:
    """Return P = max(0, n + k (n - U)) per queue. total: the sum of the weights."""
    if total == 0:
        return np.zeros(len(weights))
    n = weights / total
    if k == 0:
        return n
    p = n - usage
    p *= k
    p += n
    return np.maximum(p, 0.0, out=p)


def _levels(priorities: Ints) -> list[tuple[int, int, int]]:
    """Return (priority, start, end) for every range of equal priorities."""
    bounds = [0, *(np.diff(priorities).nonzero()[0] + 1).tolist(), len(priorities)]
    return [(int(priorities[start]), start, end) for start, end in pairwise(bounds)]


class Siblings:
    """One sibling set during a division.

    The columns are sorted by falling priority, then age, then name. Each priority is therefore a slice of every column.
    """

    def __init__(
        self, claims: list[Claim], parent: str | None, steps: Steps | None, *, kai_compat: bool = False
    ) -> None:
        """claims: sorted by name. steps: a list to which the division appends its steps; None to record none."""
        size = len(claims)
        request = _column([claim.request for claim in claims])
        deserved = _column([claim.deserved for claim in claims])
        limit = _column([claim.limit for claim in claims])
        weight = _column([claim.weight for claim in claims])
        usage = _column([claim.usage for claim in claims])
        priorities, ages = [claim.priority for claim in claims], [claim.creation for claim in claims]
        self._by_name = self.names = [claim.name for claim in claims]
        self._order: Ints | None = None
        self._levels = [(priorities[0], 0, size)] if claims else []
        if len(set(priorities)) > 1 or ages != sorted(ages):
            priority = np.array(priorities)
            order = self._order = np.lexsort((np.array(ages), -priority))  # stable: equal ones stay sorted by name
            request, deserved, limit, weight, usage = (
                column.take(order) for column in (request, deserved, limit, weight, usage)
            )
            self._levels = _levels(priority.take(order))
            self.names = [self.names[i] for i in order.tolist()]
        self.deserved, self.weight, self.usage = deserved, weight, usage
        self.parent, self.steps, self.kai_compat = parent, steps, kai_compat
        self.cap = np.where(limit == UNLIMITED, request, np.minimum(request, limit))
        self.share: Floats = np.zeros(size)

    def shares(self) -> dict[str, float]:
        """Return the shares by name."""
        share = self.share
        if self._order is not None:
            share = np.empty_like(share)
            share[self._order] = self.share
        return dict(zip(self._by_name, share.tolist(), strict=True))

    def begin_with(self, shares: Sequence[float]) -> None:
        """Set the shares with which the second phase starts, in the order of the names."""
        share = np.array(shares, float)
        self.share = share if self._order is None else share.take(self._order)

    def give_deserved(self, total: float) -> float:
        """Run phase one and return the rest of the total, which may be negative.

        Every queue gets its quota up to its cap. Priority, usage and total have no influence."""
        quota = np.where(self.deserved == UNLIMITED, total, self.deserved)
        self.share = np.minimum(quota, self.cap)
        return self._less(total, self.share)

    def divide_over_quota(self, pool: float, k: float) -> float:
        """Run phase two and return the rest of the pool.

        The priorities follow each other from high to low: the rounds of one, then its fractions. In KAI's mode the
        fractions of all priorities come after all rounds."""
        fractions: list[tuple[int, Ints, Floats]] = []
        for level, start, end in self._levels:
            if not pool > 0:
                break
            pool, index, fraction = self._rounds(pool, k, level, start, end)
            if self.kai_compat:
                fractions.append((level, index, fraction))
            else:
                pool = self._remainders(pool, level, index, fraction)
        for level, index, fraction in fractions:
            pool = self._kai_remainders(pool, level, index, fraction)
        return pool

    def _sum(self, values: Floats, *, whole: bool = False) -> float:
        """Return the sum, exactly or in KAI's way. whole: the values are known to be whole numbers."""
        return _sum_in_order(values) if self.kai_compat else _sum(values, whole=whole)

    def _less(self, total: float, parts: Floats, *, whole: bool = False) -> float:
        """Subtract the parts from the total, exactly or in KAI's way."""
        if not self.kai_compat:
            return total - _sum(parts, whole=whole)
        for part in parts.tolist():
            total -= part
        return total

    def _weightless(self, wanting: Ints, k: float) -> Floats:
        """Return the positive P of queues with weight 0. KAI adds these to the sum S but gives the queues nothing."""
        if k == 0 or not self.kai_compat:
            return np.zeros(0)
        p = self.usage[wanting[~(self.weight[wanting] > 0)]] * -k
        return p[p > 0]

    def _rounds(self, pool: float, k: float, level: int, start: int, end: int) -> tuple[float, Ints, Floats]:
        """Give out whole units until a round leaves no surplus.

        Returns the rest of the pool, the indexes of the queues that still want more, and the fraction of a unit that
        each of them has not got."""
        wanting = (self.share[start:end] < self.cap[start:end]).nonzero()[0] + start
        weighty = self.weight[wanting] > 0
        index = wanting[weighty]
        weight, usage, cap, share = (column.take(index) for column in (self.weight, self.usage, self.cap, self.share))
        weightless = self._weightless(wanting, k)
        fraction = np.zeros(len(index))
        whole_weights, whole_units = _all_whole(weight), _all_whole(cap) and _all_whole(share)
        number, surplus = 0, True
        while surplus and len(index) and pool > 0:
            total = self._sum(weight, whole=whole_weights)
            p = history(weight, usage, k, total)
            sum_p = self._sum(np.concatenate((p, weightless)) if len(weightless) else p)
            if sum_p == 0:
                if self.kai_compat:
                    break
                p = history(weight, usage, 0.0, total)
                sum_p = _sum(p)
            offered = p / sum_p
            offered *= pool
            want = cap - share
            met = want <= offered
            # A queue that is offered whole units keeps the fraction of an earlier round. A satisfied queue has no
            # fraction.
            given = np.floor(offered)
            part = offered - given
            np.copyto(fraction, part, where=part != 0)
            surplus = bool(np.count_nonzero(met))
            if surplus:
                surplus = bool(np.count_nonzero(want < offered))
                np.copyto(given, want, where=met)
                np.copyto(fraction, 0.0, where=met)
            share += given
            left = self._less(pool, given, whole=whole_units)
            if self.steps is not None:
                number += 1
                columns = (weight / _sum(weight), usage, p, offered, given, fraction)
                rows = zip([self.names[i] for i in index], *(column.tolist() for column in columns), strict=True)
                offers = tuple(RoundOffer(*row) for row in rows)
                self.steps.append(DivisionRound(self.parent, level, number, pool, sum_p, offers, left))
            pool = left
            unsatisfied = (share < cap).nonzero()[0]
            if len(unsatisfied) < len(index):
                self.share[index] = share
                index = index.take(unsatisfied)
                weight, usage, cap, share, fraction = (
                    column.take(unsatisfied) for column in (weight, usage, cap, share, fraction)
                )
        self.share[index] = share
        return pool, index, fraction

    def _remainders(self, pool: float, level: int, index: Ints, fraction: Floats) -> float:
        """Give up to one unit to each queue, the largest fraction first, until nothing is left of the pool.

        Of equal fractions the older queue comes first, then the first by name."""
        if not len(index):
            return pool
        order = np.argsort(-fraction, kind="stable")
        order = order[: np.count_nonzero(fraction > 0)]
        chosen = index[order]
        unit = np.minimum(1.0, self.cap[chosen] - self.share[chosen])
        give = np.clip(pool - (np.cumsum(unit) - unit), 0.0, unit)
        chosen, give = chosen[give > 0], give[give > 0]
        self.share[chosen] += give
        if self.steps is not None:
            parts = zip(chosen.tolist(), fraction[order].tolist(), give.tolist(), strict=False)
            self.steps += [Remainder(self.parent, level, self.names[i], part, unit) for i, part, unit in parts]
        return pool - _sum(give)

    def _kai_remainders(self, pool: float, level: int, index: Ints, fraction: Floats) -> float:
        """Divide the remainders as KAI does: a unit may exceed the limit of a queue, and the pool shrinks unit by
        unit."""
        order = np.argsort(-fraction, kind="stable")
        order = order[: np.count_nonzero(fraction > 0)]
        for queue, part in zip(index[order].tolist(), fraction[order].tolist(), strict=True):
            if not pool > 0:
                break
            unit = min(1.0, pool)
            self.share[queue] += unit
            pool -= unit
            if self.steps is not None:
                self.steps.append(Remainder(self.parent, level, self.names[queue], part, unit))
        return pool


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


def divide(case: DivisionProblem, *, explain: bool = False, kai_compat: bool = False) -> Division:
    """Divide `case.total` among `case.claims`.

    With `explain`, `Division.steps` contains every round. With `kai_compat` the result is that of KAI's scheduler.

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
        siblings = Siblings(claims, None, steps, kai_compat=kai_compat)
        siblings.begin_with([claim.initial for claim in claims])
        remaining = siblings.divide_over_quota(case.total, case.k)
        return Division(siblings.shares(), remaining, {}, tuple(steps or ()))
    flat = case.function == "setResourceShare" or not any(map(attrgetter("parent"), claims))
    tree: dict[str | None, list[Claim]] = {None: claims} if flat else _tree(claims)
    shares: dict[str, float] = {}
    deserved: dict[str, float] = {}
    remaining = 0.0
    pending: list[str | None] = [None]
    for parent in pending:
        siblings = Siblings(tree[parent], parent, steps, kai_compat=kai_compat)
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


def _tree(claims: Sequence[Claim]) -> dict[str | None, list[Claim]]:
    """Return claims by parent, each list in the order of `claims`. Raises DivisionError."""
    parents = {claim.name: claim.parent for claim in claims}
    tree: dict[str | None, list[Claim]] = {None: []}
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
