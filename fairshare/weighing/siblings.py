"""One sibling set as columns of numpy arrays: a cluster may have ten thousand queues.

How the shares come about is told in `fairshare.division`; `weighing.few` does the same for a handful of queues
in plain floats, to the same bits. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import frexp, fsum, ldexp
from struct import pack

import numpy as np
import numpy.typing as npt

from fairshare.model import UNLIMITED, Claim, Offer, Remainder, Round

Steps = list[Round | Remainder]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

_NARROW = 128
"""Fewer values are added up one by one."""
_SAFE = 2.0**900
_WHOLE = 2.0**53
"""Whole numbers that add up to less do so without rounding."""
_MOST_SLICES = 4
_MANTISSA = 53


def _column(values: Sequence[float]) -> Floats:
    """Read-only. Packing is several times as quick as what numpy makes of a list."""
    return np.frombuffer(pack(f"{len(values)}d", *values))


def _sum(values: Floats, *, whole: bool = False) -> float:
    """Of values >= 0: exact, and so independent of the order, as `math.fsum` rounds it. whole: they are known to be
    whole numbers.

    Whole numbers add up exactly as they are. Other wide columns are cut, from the top, into slices of bits so narrow
    that a plain sum of a slice is exact (Rump, Ogita, Oishi 2008, "Accurate floating-point summation"); few such sums
    are left to `fsum`."""
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


def history(weights: Floats, usage: Floats, k: float, *, whole: bool = False) -> Floats:
    """P = max(0, n + k (n - U)) per queue. whole: the weights are known to be whole numbers."""
    total = _sum(weights, whole=whole)
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
    """(priority, start, end) of every run of equals."""
    bounds = [0, *(np.diff(priorities).nonzero()[0] + 1).tolist(), len(priorities)]
    return [(int(priorities[start]), start, end) for start, end in pairwise(bounds)]


class Siblings:
    """One sibling set being served, by falling priority, then age, then name: a priority is a slice of each column."""

    def __init__(self, claims: list[Claim], parent: str | None, steps: Steps | None) -> None:
        """`claims`: sorted by name, at least one."""
        size = len(claims)
        request = _column([claim.request for claim in claims])
        deserved = _column([claim.deserved for claim in claims])
        limit = _column([claim.limit for claim in claims])
        weight = _column([claim.weight for claim in claims])
        usage = _column([claim.usage for claim in claims])
        priorities, ages = [claim.priority for claim in claims], [claim.creation for claim in claims]
        self._by_name = self.names = [claim.name for claim in claims]
        self._order: Ints | None = None
        self._levels = [(priorities[0], 0, size)]
        if priorities.count(priorities[0]) < size or ages != sorted(ages):
            priority = np.array(priorities)
            order = self._order = np.lexsort((np.array(ages), -priority))  # stable: equals stay by name
            request, deserved, limit, weight, usage = (
                column.take(order) for column in (request, deserved, limit, weight, usage)
            )
            self._levels = _levels(priority.take(order))
            self.names = [self.names[i] for i in order.tolist()]
        self.deserved, self.weight, self.usage = deserved, weight, usage
        self.parent, self.steps = parent, steps
        self.cap = np.where(limit == UNLIMITED, request, np.minimum(request, limit))
        self.share: Floats = np.zeros(size)

    def shares(self) -> dict[str, float]:
        """By name."""
        share = self.share
        if self._order is not None:
            share = np.empty_like(share)
            share[self._order] = self.share
        return dict(zip(self._by_name, share.tolist(), strict=True))

    def begin_with(self, held: Sequence[float]) -> None:
        """Shares before the second phase, by name."""
        share = np.array(held, float)
        self.share = share if self._order is None else share.take(self._order)

    def give_deserved(self, total: float) -> float:
        """Phase one, regardless of priority, usage and total; returns what it leaves, perhaps < 0."""
        quota = np.where(self.deserved == UNLIMITED, total, self.deserved)
        self.share = np.minimum(quota, self.cap)
        return total - _sum(self.share)

    def divide_over_quota(self, pool: float, k: float) -> float:
        """Phase two: rounds of every priority, high to low, each with its fractions; returns the rest."""
        for level, start, end in self._levels:
            if not pool > 0:
                break
            pool, index, fraction = self._rounds(pool, k, level, start, end)
            pool = self._remainders(pool, level, index, fraction)
        return pool

    def _rounds(self, pool: float, k: float, level: int, start: int, end: int) -> tuple[float, Ints, Floats]:
        """Hand out whole units until a round leaves no surplus.

        Returns the rest of the pool, and who is owed which fraction. The columns run in parallel over the
        queues that are still unsatisfied."""
        wanting = (self.share[start:end] < self.cap[start:end]).nonzero()[0] + start
        weighty = self.weight[wanting] > 0
        index = wanting[weighty]
        weight, usage, cap, share = (column.take(index) for column in (self.weight, self.usage, self.cap, self.share))
        fraction = np.zeros(len(index))
        whole_weights, whole_units = _all_whole(weight), _all_whole(cap) and _all_whole(share)
        number, surplus = 0, True
        while surplus and len(index) and pool > 0:
            p = history(weight, usage, k, whole=whole_weights)
            sum_p = _sum(p)
            if sum_p == 0:
                p = history(weight, usage, 0.0)
                sum_p = _sum(p)
            offered = p / sum_p
            offered *= pool
            want = cap - share
            met = want <= offered
            # An older fraction survives an offer of whole units; one who got all he wanted is owed none.
            given = np.floor(offered)
            part = offered - given
            np.copyto(fraction, part, where=part != 0)
            surplus = bool(np.count_nonzero(met))
            if surplus:
                surplus = bool(np.count_nonzero(want < offered))
                np.copyto(given, want, where=met)
                np.copyto(fraction, 0.0, where=met)
            share += given
            left = pool - _sum(given, whole=whole_units)
            if self.steps is not None:
                number += 1
                total = _sum(weight)
                columns = (weight / total, usage, p, offered, given, fraction)
                rows = zip([self.names[i] for i in index], *(column.tolist() for column in columns), strict=True)
                offers = tuple(Offer(*row) for row in rows)
                self.steps.append(Round(self.parent, level, number, pool, sum_p, offers, left))
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
        """One unit each, or what is left of one, by largest fraction; ties to the older, then by name."""
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
