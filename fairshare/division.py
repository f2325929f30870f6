"""KAI-Scheduler's division of a resource among queues, exactly, rounding quirks included, and explainable.

Two phases: every queue gets its deserved quota; what is left goes, priority by priority, to the
unsatisfied in proportion to P = max(0, n + k (n - U)), n being the weight normalised among them and
U the usage. Each round hands out whole units; fractions are settled, largest first, only after every
priority has had its rounds.

Equal to the scheduler except where its own answer depends on the iteration order of a Go map: here
sums are `math.fsum` over queues sorted by (creation, name), so the result depends on the claims alone
and never on the order in which they were given.

Documented exceptions, all KAI's own and kept on purpose: the remainder rule may lift a queue above its
request and limit by less than one unit; quotas are not scaled down when they exceed the total; when
every P is 0 the pool goes to nobody.

Source: KAI-Scheduler pkg/scheduler/plugins/proportion/resource_division, commit d5bc503a. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import compress, pairwise
from math import fsum
from operator import add, attrgetter, itemgetter, lt, neg, not_, sub

from fairshare.errors import DivisionError
from fairshare.model import UNLIMITED, Case, Claim, Division, Offer, Remainder, Round

Steps = list[Round | Remainder]


def divide(case: Case, *, explain: bool = False) -> Division:
    """Divide `case.total`. With `explain` every round is kept in `Division.steps`.

    Raises DivisionError for a name that stands twice, an unknown parent or a cyclic tree."""
    claims = sorted(case.claims, key=attrgetter("name"))
    shares = dict.fromkeys([claim.name for claim in claims], 0.0)
    if len(shares) < len(claims):
        twice = next(one.name for one, other in pairwise(claims) if one.name == other.name)
        raise DivisionError(f"queue {twice!r} stands there twice")
    steps: Steps | None = [] if explain else None
    if case.function == "divideOverQuotaResource":
        siblings = _Siblings(claims, None, steps)
        siblings.share = [claim.initial for claim in siblings.claims]
        remaining = siblings.divide_over_quota(case.total, case.k)
        shares.update(zip(siblings.names, siblings.share, strict=True))
        return Division(shares, remaining, {}, tuple(steps or ()))
    flat = case.function == "setResourceShare" or not any(map(attrgetter("parent"), claims))
    tree: dict[str | None, list[Claim]] = {None: claims} if flat else _tree(claims)
    deserved: dict[str, float] = {}
    remaining = 0.0
    pending: list[str | None] = [None]
    for parent in pending:
        siblings = _Siblings(tree[parent], parent, steps)
        pool = siblings.give_deserved(case.total if parent is None else shares[parent])
        if explain:
            deserved.update(zip(siblings.names, siblings.share, strict=True))
        left = siblings.divide_over_quota(pool, case.k) if pool > 0 else 0.0
        remaining = left if parent is None else remaining
        shares.update(zip(siblings.names, siblings.share, strict=True))
        if not flat:
            pending.extend(name for name in siblings.names if name in tree)
    return Division(shares, remaining, dict(sorted(deserved.items())), tuple(steps or ()))


def first_round(claims: Iterable[Claim], k: float) -> dict[str, float]:
    """P of every claim as if all were unsatisfied: what history makes of the weights before any share is given.

    P = max(0, n + k (n - U)) with n = weight / Σ weight. All zero when every weight is zero."""
    ordered = sorted(claims, key=attrgetter("creation", "name"))
    p = _history([claim.weight for claim in ordered], [claim.usage for claim in ordered], k)
    return {claim.name: value for claim, value in zip(ordered, p, strict=True)}


def _tree(claims: Sequence[Claim]) -> dict[str | None, list[Claim]]:
    """Claims by parent, each list in the order of `claims`. Raises DivisionError."""
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


def _history(weights: Sequence[float], usage: Sequence[float], k: float) -> list[float]:
    """P = max(0, n + k (n - U)) per queue."""
    total = fsum(weights)
    if total == 0:
        return [0.0] * len(weights)
    if k == 0:
        return [w / total for w in weights]
    return [p if (p := (n := w / total) + k * (n - u)) > 0 else 0.0 for w, u in zip(weights, usage, strict=True)]


class _Siblings:
    """One sibling set being served, by falling priority, then age, then name: a priority is a slice of each list."""

    def __init__(self, claims: list[Claim], parent: str | None, steps: Steps | None) -> None:
        """`claims`: sorted by name."""
        ordered = sorted(sorted(claims, key=attrgetter("creation")), key=attrgetter("priority"), reverse=True)
        self.claims, self.parent, self.steps = ordered, parent, steps
        self.names = [claim.name for claim in ordered]
        self.cap = [
            claim.request if claim.limit == UNLIMITED or claim.request < claim.limit else claim.limit
            for claim in ordered
        ]
        self.share: list[float] = []

    def give_deserved(self, total: float) -> float:
        """Phase one, regardless of priority, usage and total; returns what it leaves, perhaps < 0."""
        self.share = [
            quota if (quota := total if claim.deserved == UNLIMITED else claim.deserved) < cap else cap
            for claim, cap in zip(self.claims, self.cap, strict=True)
        ]
        return total - fsum(self.share)

    def divide_over_quota(self, pool: float, k: float) -> float:
        """Phase two: rounds of every priority, high to low, then their fractions; returns the rest."""
        owed: list[tuple[int, list[int], list[float]]] = []
        priorities = [claim.priority for claim in self.claims]
        start = 0
        while start < len(priorities) and pool > 0:
            level = priorities[start]
            end = bisect_right(priorities, -level, lo=start, key=neg)
            pool, index, fraction = self._rounds(pool, k, level, start, end)
            owed.append((level, index, fraction))
            start = end
        for level, index, fraction in owed:
            if pool > 0:
                pool = self._remainders(pool, level, index, fraction)
        return pool

    def _rounds(self, pool: float, k: float, level: int, start: int, end: int) -> tuple[float, list[int], list[float]]:
        """Hand out whole units until a round leaves no surplus.

        Returns the rest of the pool, and who is owed which fraction. The lists run in parallel over the
        queues that are still unsatisfied."""
        claims = self.claims
        wanting = [i for i in range(start, end) if self.share[i] < self.cap[i]]
        index = [i for i in wanting if claims[i].weight > 0]
        # A weightless queue is never served, yet negative usage gives it a P that counts in the sum.
        phantoms = [-k * c.usage for i in wanting if (c := claims[i]).weight == 0 and c.usage < 0] if k else []
        weight = [claims[i].weight for i in index]
        usage = [claims[i].usage for i in index]
        cap = [self.cap[i] for i in index]
        share = [self.share[i] for i in index]
        fraction = [0.0] * len(index)
        number, surplus = 0, True
        while surplus and index and pool > 0:
            p = _history(weight, usage, k)
            sum_p = fsum(p + phantoms)
            if sum_p == 0:
                break
            offered = [pool * (each / sum_p) for each in p]
            want = list(map(sub, cap, share))
            given = [w if w <= offer else offer // 1.0 for w, offer in zip(want, offered, strict=True)]
            # An older fraction survives an offer of whole units; one who got all he wanted is owed none.
            fraction = [
                0.0 if w <= offer else offer - give or older
                for w, offer, give, older in zip(want, offered, given, fraction, strict=True)
            ]
            share = list(map(add, share, given))
            surplus = any(map(lt, want, offered))
            left = pool - fsum(given)
            if self.steps is not None:
                number += 1
                total = fsum(weight)
                rows = zip([self.names[i] for i in index], weight, usage, p, offered, given, fraction, strict=True)
                offers = tuple(Offer(name, w / total, u, *rest) for name, w, u, *rest in rows)
                self.steps.append(Round(self.parent, level, number, pool, sum_p, offers, left))
            pool = left
            unsatisfied = list(map(lt, share, cap))
            if not all(unsatisfied):
                for i, held in compress(zip(index, share, strict=True), map(not_, unsatisfied)):
                    self.share[i] = held
                index = list(compress(index, unsatisfied))
                weight, usage, cap, share, fraction = (
                    list(compress(column, unsatisfied)) for column in (weight, usage, cap, share, fraction)
                )
        for i, held in zip(index, share, strict=True):
            self.share[i] = held
        return pool, index, fraction

    def _remainders(self, pool: float, level: int, index: list[int], fraction: list[float]) -> float:
        """One unit each, or what is left of one, by largest fraction; ties to the older, then by name."""
        for i, part in sorted(zip(index, fraction, strict=True), key=itemgetter(1), reverse=True):
            if part <= 0 or pool <= 0:
                break
            give = min(1.0, pool)
            self.share[i] += give
            pool -= give
            if self.steps is not None:
                self.steps.append(Remainder(self.parent, level, self.names[i], part, give))
        return pool
