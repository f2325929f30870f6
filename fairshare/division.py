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

from collections.abc import Iterable, Sequence
from itertools import compress
from math import fsum
from operator import add, attrgetter, lt, sub

from fairshare.errors import DivisionError
from fairshare.model import UNLIMITED, Case, Claim, Division, Offer, Remainder, Round

Steps = list[Round | Remainder]


def divide(case: Case, *, explain: bool = False) -> Division:
    """Divide `case.total`. With `explain` every round is kept in `Division.steps`.

    Raises DivisionError for a name that stands twice, an unknown parent or a cyclic tree."""
    claims = sorted(case.claims, key=attrgetter("name"))
    shares = {claim.name: claim.initial for claim in claims}
    if len(shares) < len(claims):
        twice = next(one.name for one, other in zip(claims, claims[1:], strict=False) if one.name == other.name)
        raise DivisionError(f"queue {twice!r} stands there twice")
    steps: Steps | None = [] if explain else None
    deserved: dict[str, float] = {}
    if case.function == "divideOverQuotaResource":
        remaining = _Siblings(claims, None, shares, steps).divide_over_quota(case.total, case.k)
        return Division(shares, remaining, deserved, tuple(steps or ()))
    flat = case.function == "setResourceShare" or all(claim.parent is None for claim in claims)
    tree: dict[str | None, list[Claim]] = {None: claims} if flat else _tree(claims)
    remaining = 0.0
    pending: list[str | None] = [None]
    for parent in pending:
        total = case.total if parent is None else shares[parent]
        siblings = _Siblings(tree[parent], parent, shares, steps)
        pool = siblings.give_deserved(total)
        if explain:
            deserved.update((claim.name, shares[claim.name]) for claim in tree[parent])
        left = siblings.divide_over_quota(pool, case.k) if pool > 0 else 0.0
        remaining = left if parent is None else remaining
        if not flat:
            pending.extend(claim.name for claim in tree[parent] if claim.name in tree)
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


def _cap(claim: Claim) -> float:
    """What the queue can use at most: its request, within its limit."""
    return claim.request if claim.limit == UNLIMITED or claim.request < claim.limit else claim.limit


class _Siblings:
    """One sibling set, sorted by name, being served: `shares`, common to the whole tree, is filled."""

    def __init__(self, claims: list[Claim], parent: str | None, shares: dict[str, float], steps: Steps | None) -> None:
        self.claims, self.parent, self.shares, self.steps = claims, parent, shares, steps

    def give_deserved(self, total: float) -> float:
        """Phase one, regardless of priority, usage and total; returns what it leaves, perhaps < 0."""
        gives = [min(total if c.deserved == UNLIMITED else c.deserved, _cap(c)) for c in self.claims]
        self.shares.update(zip([c.name for c in self.claims], gives, strict=True))
        return total - fsum(gives)

    def divide_over_quota(self, pool: float, k: float) -> float:
        """Phase two: rounds of every priority, high to low, then their fractions; returns the rest."""
        buckets: dict[int, list[Claim]] = {}
        for claim in sorted(self.claims, key=attrgetter("creation")):
            buckets.setdefault(claim.priority, []).append(claim)
        fractions: dict[int, list[tuple[str, float]]] = {}
        levels = sorted(buckets, reverse=True)
        for level in levels:
            if pool > 0:
                pool, fractions[level] = self._rounds(pool, k, level, buckets[level])
        for level in levels:
            if pool > 0:
                pool = self._remainders(pool, level, fractions[level])
        return pool

    def _rounds(self, pool: float, k: float, level: int, bucket: list[Claim]) -> tuple[float, list[tuple[str, float]]]:
        """Hand out whole units until a round leaves no surplus; the pool's rest and the fractions owed.

        The lists run in parallel over the queues still unsatisfied, oldest first."""
        shares = self.shares
        wanting = [(c, cap, held) for c in bucket if (held := shares[c.name]) < (cap := _cap(c))]
        # A weightless queue is never served, yet negative usage gives it a P that counts in the sum.
        phantoms = [-k * c.usage for c, _, _ in wanting if c.weight == 0 and c.usage < 0] if k else []
        active = [c for c, _, _ in wanting if c.weight > 0]
        names = [c.name for c in active]
        weight = [c.weight for c in active]
        usage = [c.usage for c in active]
        cap = [cap for c, cap, _ in wanting if c.weight > 0]
        share = [held for c, _, held in wanting if c.weight > 0]
        fraction = [0.0] * len(active)
        number, surplus = 0, True
        while surplus and names and pool > 0:
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
                rows = zip(names, weight, usage, p, offered, given, fraction, strict=True)
                offers = tuple(Offer(name, w / total, u, *rest) for name, w, u, *rest in rows)
                self.steps.append(Round(self.parent, level, number, pool, sum_p, offers, left))
            pool = left
            shares.update(zip(names, share, strict=True))
            open_ = list(map(lt, share, cap))
            if not all(open_):
                names, weight, usage, cap, share, fraction = (
                    list(compress(column, open_)) for column in (names, weight, usage, cap, share, fraction)
                )
        return pool, list(zip(names, fraction, strict=True))

    def _remainders(self, pool: float, level: int, fractions: list[tuple[str, float]]) -> float:
        """One unit each, or what is left of one, by largest fraction; ties to the older, then by name."""
        for name, fraction in sorted(fractions, key=lambda owed: owed[1], reverse=True):
            if fraction <= 0 or pool <= 0:
                break
            give = min(1.0, pool)
            self.shares[name] += give
            pool -= give
            if self.steps is not None:
                self.steps.append(Remainder(self.parent, level, name, fraction, give))
        return pool
