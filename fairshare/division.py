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
from math import floor, fsum
from operator import attrgetter

from fairshare.errors import DivisionError
from fairshare.model import UNLIMITED, Case, Claim, Division, Offer, Remainder, Round

Steps = list[Round | Remainder]


def divide(case: Case, *, explain: bool = False) -> Division:
    """Divide `case.total`. With `explain` every round is kept in `Division.steps`.

    Raises DivisionError for a name that stands twice, an unknown parent or a cyclic tree."""
    claims = sorted(case.claims, key=attrgetter("name"))
    for one, other in zip(claims, claims[1:], strict=False):
        if one.name == other.name:
            raise DivisionError(f"queue {one.name!r} stands there twice")
    steps: Steps | None = [] if explain else None
    if case.function == "divideOverQuotaResource":
        siblings = _Siblings(claims, None, steps)
        siblings.share = [claim.initial for claim in claims]
        remaining = siblings.divide_over_quota(case.total, case.k)
        return Division(dict(zip(siblings.names, siblings.share, strict=True)), remaining, {}, tuple(steps or ()))
    if case.function == "setResourceShare":
        tree: dict[str | None, list[Claim]] = {None: claims}
    else:
        tree = _tree(claims)
    shares: dict[str, float] = {}
    deserved: dict[str, float] = {}
    remaining = 0.0
    pending: list[tuple[str | None, float]] = [(None, case.total)]
    for parent, total in pending:
        siblings = _Siblings(tree[parent], parent, steps)
        left = siblings.divide(total, case.k)
        if parent is None:
            remaining = left
        if explain:
            deserved.update(zip(siblings.names, siblings.deserved, strict=True))
        for name, share in zip(siblings.names, siblings.share, strict=True):
            shares[name] = share
            if len(tree) > 1 and name in tree:
                pending.append((name, share))
    if len(tree) > 1:
        shares = dict(sorted(shares.items()))
    return Division(shares, remaining, deserved, tuple(steps or ()))


def first_round(claims: Sequence[Claim], k: float) -> dict[str, float]:
    """P of every claim as if all were unsatisfied: what history makes of the weights before any share is given.

    P = max(0, n + k (n - U)) with n = weight / Σ weight. All zero when every weight is zero."""
    ordered = sorted(claims, key=attrgetter("creation", "name"))
    p = _history([claim.weight for claim in ordered], [claim.usage for claim in ordered], k)
    return {claim.name: value for claim, value in zip(ordered, p, strict=True)}


def _tree(claims: Iterable[Claim]) -> dict[str | None, list[Claim]]:
    """Claims by parent, each list in the order of `claims`. Raises DivisionError."""
    parents = {claim.name: claim.parent for claim in claims}
    tree: dict[str | None, list[Claim]] = {None: []}
    rooted: set[str | None] = {None}
    for claim in claims:
        tree.setdefault(claim.parent, []).append(claim)
        path: list[str] = []
        at: str | None = claim.name
        while at not in rooted:
            assert at is not None
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
    """One sibling set under division: parallel lists in the order of the names, `share` being filled."""

    def __init__(self, claims: Sequence[Claim], parent: str | None, steps: Steps | None) -> None:
        self.claims = claims
        self.parent = parent
        self.steps = steps
        self.names = [claim.name for claim in claims]
        self.weight = [claim.weight for claim in claims]
        self.usage = [claim.usage for claim in claims]
        self.cap = [
            claim.request if claim.limit == UNLIMITED or claim.request < claim.limit else claim.limit
            for claim in claims
        ]
        self.share: list[float] = []
        self.deserved: list[float] = []
        self.fraction = [0.0] * len(claims)

    def divide(self, total: float, k: float) -> float:
        """Both phases; returns what is left of `total`."""
        self.share = [
            quota if (quota := total if claim.deserved == UNLIMITED else claim.deserved) < cap else cap
            for claim, cap in zip(self.claims, self.cap, strict=True)
        ]
        self.deserved = list(self.share) if self.steps is not None else []
        pool = total - fsum(self.share)
        return self.divide_over_quota(pool, k) if pool > 0 else 0.0

    def divide_over_quota(self, pool: float, k: float) -> float:
        """Rounds of every priority, high to low, then the fractions of every priority; returns the rest."""
        priority = [claim.priority for claim in self.claims]
        creation = [claim.creation for claim in self.claims]
        buckets: dict[int, list[int]] = {}
        for i in sorted(range(len(creation)), key=creation.__getitem__):
            buckets.setdefault(priority[i], []).append(i)
        levels = sorted(buckets, reverse=True)
        for level in levels:
            if pool <= 0:
                break
            pool = self._rounds(pool, k, level, buckets[level])
        for level in levels:
            if pool <= 0:
                break
            pool = self._remainders(pool, level, buckets[level])
        return pool

    def _rounds(self, pool: float, k: float, level: int, bucket: Iterable[int]) -> float:
        """Hand out whole units until a round leaves no surplus; remembers the fractions."""
        cap, share, weight, usage, fraction = self.cap, self.share, self.weight, self.usage, self.fraction
        wanting = [i for i in bucket if share[i] < cap[i]]
        active = [i for i in wanting if weight[i] > 0]
        # A weightless queue is never served, yet negative usage gives it a P that counts in the sum.
        phantoms = [-k * usage[i] for i in wanting if weight[i] == 0 and usage[i] < 0] if k else []
        number, again = 0, True
        while again and active and pool > 0:
            p = _history([weight[i] for i in active], [usage[i] for i in active], k)
            sum_p = fsum(p + phantoms)
            if sum_p == 0:
                break
            again = False
            before = list(share) if self.steps is not None else []
            offers = [pool * (each / sum_p) for each in p]
            gives: list[float] = []
            for i, offer in zip(active, offers, strict=True):
                want = cap[i] - share[i]
                if want <= offer:
                    share[i] += want
                    gives.append(want)
                    fraction[i] = 0.0
                    again = again or want < offer
                elif offer < 1.0:
                    # An older fraction survives an offer without one.
                    fraction[i] = offer or fraction[i]
                else:
                    give = floor(offer)
                    share[i] += give
                    gives.append(give)
                    fraction[i] = (offer - give) or fraction[i]
            left = pool - fsum(gives)
            if self.steps is not None:
                number += 1
                self.steps.append(self._round(level, number, pool, p, sum_p, active, offers, before, left))
            pool = left
            active = [i for i in active if share[i] < cap[i]]
        return pool

    def _remainders(self, pool: float, level: int, bucket: Iterable[int]) -> float:
        """One unit each, or what is left of one, by largest fraction; ties to the older, then by name."""
        fraction = self.fraction
        for i in sorted([i for i in bucket if fraction[i] > 0], key=fraction.__getitem__, reverse=True):
            give = min(1.0, pool)
            self.share[i] += give
            pool -= give
            if self.steps is not None:
                self.steps.append(Remainder(self.parent, level, self.names[i], fraction[i], give))
            if pool == 0:
                break
        return pool

    def _round(
        self,
        level: int,
        number: int,
        pool: float,
        p: list[float],
        sum_p: float,
        active: list[int],
        offers: list[float],
        before: list[float],
        left: float,
    ) -> Round:
        total = fsum(self.weight[i] for i in active)
        return Round(
            self.parent,
            level,
            number,
            pool,
            sum_p,
            tuple(
                Offer(
                    self.names[i],
                    self.weight[i] / total,
                    self.usage[i],
                    p[at],
                    offers[at],
                    self.share[i] - before[i],
                    self.fraction[i],
                )
                for at, i in enumerate(active)
            ),
            left,
        )
