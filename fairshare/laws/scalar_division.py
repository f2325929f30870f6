"""Divides GPUs among a few sibling queues with plain floats.

Operation by operation what `fairshare.laws.division` does to its columns, so that the shares are the same to the
bit; the reasons stand there. KAI's own quirks are here alone: sums that round at every step and a pool that shrinks
one share at a time among them, which decide at exact boundaries (thirds, decimal fractions). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import fsum

from fairshare.core.model import UNLIMITED, Claim, DivisionRound, Remainder, RoundOffer

Owed = list[tuple["_Place", float]]
"""Who is owed which fraction, in the order of service."""


class _Place:
    """A queue while it is served."""

    __slots__ = ("cap", "claim", "share")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.cap = claim.request if claim.limit == UNLIMITED else min(claim.request, claim.limit)
        self.share = 0.0


class ScalarDivision:
    """`fairshare.laws.division.Siblings` without columns."""

    def __init__(
        self,
        claims: list[Claim],
        parent: str | None,
        steps: list[DivisionRound | Remainder] | None,
        *,
        kai_compat: bool,
    ) -> None:
        """`claims`: sorted by name."""
        self._by_name = [_Place(claim) for claim in claims]
        self._served = sorted(self._by_name, key=_turn)  # stable: equals stay by name
        self.names = [place.claim.name for place in self._served]
        self.parent, self.steps, self.kai_compat = parent, steps, kai_compat

    def shares(self) -> dict[str, float]:
        """By name."""
        return {place.claim.name: place.share for place in self._by_name}

    def begin_with(self, held: Sequence[float]) -> None:
        """Shares before the second phase, by name."""
        for place, share in zip(self._by_name, held, strict=True):
            place.share = float(share)

    def give_deserved(self, total: float) -> float:
        """Phase one; returns what it leaves, perhaps < 0."""
        for place in self._by_name:
            quota = place.claim.deserved
            place.share = min(total if quota == UNLIMITED else quota, place.cap)
        return self._less(total, [place.share for place in self._served])

    def divide_over_quota(self, pool: float, k: float) -> float:
        """Phase two; returns the rest."""
        owed: list[tuple[int, Owed]] = []
        for level, places in groupby(self._served, key=_priority):
            if not pool > 0:
                break
            pool, fractions = self._rounds(pool, k, level, list(places))
            if self.kai_compat:
                owed.append((level, fractions))
            else:
                pool = self._remainders(pool, level, fractions)
        for level, fractions in owed:
            if pool > 0:
                pool = self._remainders(pool, level, fractions)
        return pool

    def _rounds(self, pool: float, k: float, level: int, places: list[_Place]) -> tuple[float, Owed]:
        """The rest of the pool, and who is owed which fraction."""
        wanting = [place for place in places if place.share < place.cap]
        served: Owed = [(place, 0.0) for place in wanting if place.claim.weight > 0]
        phantoms = self._phantoms(wanting, k)
        number, surplus = 0, True
        while surplus and served and pool > 0:
            p = _history([place for place, _ in served], k, self._sum)
            sum_p = self._sum([*p, *phantoms])
            if sum_p == 0:
                if self.kai_compat:
                    break
                p = _history([place for place, _ in served], 0.0, self._sum)
                sum_p = self._sum(p)
            surplus = False
            rows: list[tuple[_Place, float, float, float]] = []
            for (place, older), part in zip(served, p, strict=True):
                offered = part / sum_p * pool
                want = place.cap - place.share
                if want <= offered:
                    surplus = surplus or want < offered
                    given = want
                    fraction = 0.0
                else:
                    given = offered // 1.0
                    fraction = offered - given or older
                rows.append((place, offered, given, fraction))
            left = self._less(pool, [given for _, _, given, _ in rows])
            if self.steps is not None:
                number += 1
                self.steps.append(self._round(level, number, pool, sum_p, p, rows, left))
            for place, _, given, _ in rows:
                place.share += given
            pool = left
            served = [(place, fraction) for place, _, _, fraction in rows if place.share < place.cap]
        return pool, served

    def _sum(self, parts: Sequence[float]) -> float:
        """Exact; with KAI's quirks one after the other, as it adds up, rounding at every step.

        Not by `sum`: from Python 3.12 on it carries the rounding errors along."""
        if not self.kai_compat:
            return fsum(parts)
        total = 0.0
        for part in parts:
            total += part
        return total

    def _less(self, total: float, parts: Sequence[float]) -> float:
        """What is left of the total, reckoned as `_sum` is."""
        if not self.kai_compat:
            return total - fsum(parts)
        for part in parts:
            total -= part
        return total

    def _phantoms(self, wanting: list[_Place], k: float) -> list[float]:
        if k == 0 or not self.kai_compat:
            return []
        p = [-k * place.claim.usage for place in wanting if not place.claim.weight > 0]
        return [each for each in p if each > 0]

    def _round(
        self,
        level: int,
        number: int,
        pool: float,
        sum_p: float,
        p: list[float],
        rows: list[tuple[_Place, float, float, float]],
        left: float,
    ) -> DivisionRound:
        total = fsum(place.claim.weight for place, *_ in rows)
        offers = tuple(
            RoundOffer(place.claim.name, place.claim.weight / total, place.claim.usage, part, offered, given, fraction)
            for (place, offered, given, fraction), part in zip(rows, p, strict=True)
        )
        return DivisionRound(self.parent, level, number, pool, sum_p, offers, left)

    def _remainders(self, pool: float, level: int, owed: Owed) -> float:
        """One unit each, or what is left of one, by largest fraction; ties to the older, then by name."""
        if self.kai_compat:
            return self._hand_out(pool, level, owed)
        gone = 0.0
        handed: list[float] = []
        for place, fraction in sorted((one for one in owed if one[1] > 0), key=_largest):
            unit = min(1.0, place.cap - place.share)
            gone += unit
            give = min(max(pool - (gone - unit), 0.0), unit)
            if not give > 0:
                break
            place.share += give
            handed.append(give)
            if self.steps is not None:
                self.steps.append(Remainder(self.parent, level, place.claim.name, fraction, give))
        return pool - fsum(handed)

    def _hand_out(self, pool: float, level: int, owed: Owed) -> float:
        """The same as KAI does it: a unit may exceed what a queue may have, and the pool shrinks unit by unit."""
        for place, fraction in sorted((one for one in owed if one[1] > 0), key=_largest):
            give = min(1.0, pool)
            if not give > 0:
                break
            place.share += give
            pool -= give
            if self.steps is not None:
                self.steps.append(Remainder(self.parent, level, place.claim.name, fraction, give))
        return pool


def _history(places: list[_Place], k: float, add: Callable[[Sequence[float]], float]) -> list[float]:
    """P = max(0, n + k (n - U)) per queue."""
    weights = [place.claim.weight for place in places]
    total = add(weights)
    if total == 0:
        return [0.0] * len(weights)
    n = [weight / total for weight in weights]
    if k == 0:
        return n
    return [max(each + k * (each - place.claim.usage), 0.0) for each, place in zip(n, places, strict=True)]


def _turn(place: _Place) -> tuple[int, int]:
    return -place.claim.priority, place.claim.creation


def _priority(place: _Place) -> int:
    return place.claim.priority


def _largest(owed: tuple[_Place, float]) -> float:
    return -owed[1]
