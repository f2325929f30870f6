"""The division of a resource among queues by quota, priority, weight and history; and exactly as KAI-Scheduler does it.

Two phases: every queue gets its deserved quota; what is left goes, priority by priority, to the
unsatisfied in proportion to P = max(0, n + k (n - U)), n being the weight normalised among them and
U the usage. Each round hands out whole units; fractions are settled afterwards, largest first.

`kai_compat=True` equals the scheduler, rounding quirks included, except where its own answer depends on
the iteration order of a Go map: its sums and differences are taken one by one, in the order of priority, creation and
name. By default sums are `math.fsum` (exact, so they do not depend on the order of the queues). In both modes ties go
by (creation, name); the result depends on the claims alone and never on the order in which they were given.

With `kai_compat` the remainder rule may lift a queue above its request and limit by less than one unit; when
every P is 0 the pool goes to nobody; and the fractions of a high priority are settled only after the rounds of
the low ones. By default nobody gets more than it may have, the configured weights decide where no P does, and a
priority is served to the end before the next. Neither scales quotas down that exceed the total. Whoever predicts
what KAI will do asks for compatibility; what a queue is due, and our own schedulers, go by the default.

A handful of siblings is divided in plain floats (`fairshare.weighing.few`), thousands by default in numpy's columns
(`fairshare.weighing.siblings`), to the same bits.

Source: KAI-Scheduler pkg/scheduler/plugins/proportion/resource_division, commit d5bc503a. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter, lt

import numpy as np

from fairshare.errors import DivisionError
from fairshare.model import Case, Claim, Division
from fairshare.weighing.few import Few
from fairshare.weighing.siblings import Siblings, Steps, history

MOST_OF_FEW = 48
"""Siblings that are divided one by one: more are quicker as columns."""


def divide(case: Case, *, explain: bool = False, kai_compat: bool = False) -> Division:
    """Divide `case.total`. With `explain` every round is kept in `Division.steps`. kai_compat: with
    KAI's own quirks, see above.

    Raises DivisionError for a name that stands twice, an unknown parent or a cyclic tree."""
    claims = list(case.claims)
    names = [claim.name for claim in claims]
    if not all(map(lt, names, names[1:])):
        claims.sort(key=attrgetter("name"))
        names.sort()
        twice = next((one for one, other in pairwise(names) if one == other), None)
        if twice is not None:
            raise DivisionError(f"queue {twice!r} stands there twice")
    steps: Steps | None = [] if explain else None
    if case.function == "divideOverQuotaResource":
        siblings = _siblings(claims, None, steps, kai_compat=kai_compat)
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
        siblings = _siblings(tree[parent], parent, steps, kai_compat=kai_compat)
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


def first_round(claims: Iterable[Claim], k: float) -> dict[str, float]:
    """P of every claim as if all were unsatisfied: what history makes of the weights before any share is given.

    P = max(0, n + k (n - U)) with n = weight / Σ weight. All zero when every weight is zero."""
    ordered = sorted(claims, key=attrgetter("creation", "name"))
    weights, usage = np.array([c.weight for c in ordered], float), np.array([c.usage for c in ordered], float)
    p = history(weights, usage, k)
    return {claim.name: value for claim, value in zip(ordered, p.tolist(), strict=True)}


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


def _siblings(claims: list[Claim], parent: str | None, steps: Steps | None, *, kai_compat: bool) -> Few | Siblings:
    if kai_compat or len(claims) <= MOST_OF_FEW:
        return Few(claims, parent, steps, kai_compat=kai_compat)
    return Siblings(claims, parent, steps)
