"""Defines the signature of a feedback law, and the laws static, KAI, Fair Tree and multifactor.

A law looks at one set of siblings (queues of one parent and one priority) and says what to divide by
now instead of the configured weights. `fairshare.laws.weight_calculation` walks the tree, keeps the answer within the
policy's bounds and paces it, so a law knows neither the tree nor the cluster, and works at every level
of the tree alike: usage, pool and targets of siblings are relative to what their parent has.

Invariants every law keeps outside turns (tests/properties/test_laws.py): the outcome depends on the
values alone, not on their order; who used more never gets more; scaling all configured weights scales
nothing else; with no history the configured weights come back. A law is pure: what it must remember
comes in and goes out as `Memory`, numbers by name that survive JSON.

At every level the level fairshare LF = S / U (normalised shares over the level's usage) orders siblings; values within
1e-12 are equal. Sources: SchedMD Slurm 284c3b95f08a, src/plugins/priority/multifactor/fair_tree.c and
priority_multifactor.c (read, not copied), and doc/html/fair_tree.shtml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp2, fsum, inf, isclose
from operator import itemgetter, lt, mul
from typing import Any, NamedTuple, Protocol, Self

Memory = Mapping[str, Mapping[str, float]]
"""What a law keeps from one cycle to the next, per queue. Empty at first; losing it only loses momentum."""


class LawQueue(NamedTuple):
    """One queue as a law sees it. GPUs unless said otherwise.

    weight: configured, >= 0. target: its part (0..1) of the pool by quota and weight, if all queues asked for
    everything. usage: U, its usage in the policy's window over what the siblings had then (as GPU time: usage * pool *
    window). requested contains allocated; both contain its children's. gang: its smallest pending gang, 0 where it has
    none. weight_now: the weight in force, None where unset. reclaims: evictions made for its sake since the last cycle,
    as far as known."""

    name: str
    weight: float
    target: float
    usage: float
    requested: float
    allocated: float
    deserved: float = 0.0
    limit: float = -1.0
    gang: float = 0.0
    weight_now: float | None = None
    reclaims: float = 0.0


class LawColumns(NamedTuple):
    """Queues as columns, each of a field of `LawQueue`, in step: laws look at one thing of all, and a replay has them
    so. No row is made for them."""

    names: Sequence[str]
    weights: Sequence[float]
    targets: Sequence[float]
    usage: Sequence[float]
    requested: Sequence[float]
    allocated: Sequence[float]
    deserved: Sequence[float]
    limits: Sequence[float]
    gangs: Sequence[float]
    weights_now: Sequence[float | None]
    reclaims: Sequence[float]

    @classmethod
    def of(cls, members: Sequence[LawQueue]) -> Self:
        """At least one."""
        return cls(*zip(*members, strict=True))


@lru_cache(256)
def _picking(which: tuple[bool, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Takes these places out of a column; who competes is mostly the same for hours."""
    places = [place for place, one in enumerate(which) if one]
    if len(places) > 1:
        return itemgetter(*places)
    return lambda column: tuple(column[place] for place in places)


@dataclass(frozen=True, slots=True)
class LawQueues:
    """Queues that are divided together. pool: GPUs there are for them. window_s: how long the usage
    window is in effect: its size, or with a half-life the integral of its decay over it. explain: False where traces
    and notes are not read, as in replays, which ask thousands of times."""

    columns: LawColumns
    pool: float
    window_s: float
    now_ms: int
    explain: bool = True

    @property
    def members(self) -> tuple[LawQueue, ...]:
        return tuple(map(LawQueue._make, zip(*self.columns, strict=True)))

    def only(self, which: Sequence[bool]) -> LawQueues:
        """The same cycle among some of them, in their order."""
        columns = LawColumns._make(map(_picking(tuple(which)), self.columns))
        return LawQueues(columns, self.pool, self.window_s, self.now_ms, self.explain)

    def by_name(self) -> LawQueues:
        """The same in the order of their names."""
        names = self.columns.names
        if all(map(lt, names, names[1:])):
            return self
        columns = LawColumns.of(sorted(self.members, key=lambda member: member.name))
        return LawQueues(columns, self.pool, self.window_s, self.now_ms, self.explain)


@dataclass(frozen=True, slots=True)
class LawResult:
    """What a law wants. wanted: a weight >= 0 for each of `names`, which are those of the siblings, in their order.
    traces: the numbers on the way, by queue and name, in the order in which they arose. notes: a clause for people, by
    queue. turn: the queue that has its turn now; its weights then go out as they are, past step and clamp."""

    names: Sequence[str]
    wanted: Sequence[float]
    traces: Mapping[str, Mapping[str, float]]
    notes: Mapping[str, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    turn: str | None = None

    @property
    def weights(self) -> Mapping[str, float]:
        """The weights by queue."""
        return dict(zip(self.names, self.wanted, strict=True))


class Law(Protocol):
    """Pure: equal arguments, equal verdict."""

    @property
    def relative(self) -> bool:
        """True: only the proportions of the weights mean something, and only among those who compete
        (ask for more than their quota); such a law is stateless and asked about the competitors alone.
        False: they are the weights to publish, and the law looks at demand itself."""
        ...

    def __call__(self, siblings: LawQueues, memory: Memory, /) -> LawResult: ...


def normalised(siblings: LawQueues) -> list[float]:
    """n: every one's configured weight over their sum; all 0 where there is none."""
    weights = siblings.columns.weights
    total = fsum(weights)
    return [weight / total for weight in weights] if total > 0 else [0.0] * len(weights)


@dataclass(frozen=True, slots=True)
class Kai:
    """P = max(0, n + k (n - U)): published with the scheduler's own k at 0, the same first round as its
    own history would give.

    Source: KAI-Scheduler resource_division.go, commit d5bc503a."""

    k: float
    relative = True

    def __call__(self, siblings: LawQueues, _memory: Memory, /) -> LawResult:
        k, names, usage = self.k, siblings.columns.names, siblings.columns.usage
        parts = normalised(siblings)
        wanted = [n + k * (n - u) if n > 0.0 else 0.0 for n, u in zip(parts, usage, strict=True)]
        if min(wanted) < 0.0:
            wanted = [max(0.0, p) for p in wanted]
        if not siblings.explain:
            return LawResult(names, wanted, {})
        rows = zip(names, parts, usage, wanted, strict=True)
        return LawResult(names, wanted, {name: {"n": n, "U": u, "k": k, "P": p} for name, n, u, p in rows})


_TIED = 1e-12


@dataclass(frozen=True, slots=True)
class FairTree:
    """Fair Tree as weights: among siblings, the configured part times the rank, so that the order of
    service becomes a gradient and no weight is ever zero."""

    relative = True

    def __call__(self, siblings: LawQueues, _memory: Memory, /) -> LawResult:
        names, usage, n = siblings.columns.names, siblings.columns.usage, normalised(siblings)
        levels = [part / u if u > 0 else inf if part > 0 else 0.0 for part, u in zip(n, usage, strict=True)]
        ordered = sorted(zip([-level for level in levels], names, range(len(names)), strict=True))
        fairshare = [1.0] * len(ordered)
        rank, above = len(ordered), inf
        for at, (_, _, q) in enumerate(ordered):
            if at and not _same(above, levels[q]):
                rank = len(ordered) - at
            above = levels[q]
            fairshare[q] = rank / len(ordered)
        wanted = list(map(mul, n, fairshare))
        if not siblings.explain:
            return LawResult(names, wanted, {})
        traces = {
            names[q]: {"n": n[q], "U": usage[q], "LF": min(levels[q], 1e9), "fairshare": fairshare[q]}
            for _, _, q in ordered
        }
        return LawResult(names, wanted, traces)


def _same(one: float, other: float) -> bool:
    return one == other or isclose(one, other, rel_tol=_TIED)


def fair_share_factor(usage: float, shares: float, dampening: float = 1.0) -> float:
    """F = 2^(-(U/S)/d); 0 where there are no shares."""
    return exp2(-usage / shares / dampening) if shares > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Multifactor:
    """The classic factor as weights: the configured part times 2^(-U/n), never zero."""

    dampening: float = 1.0
    relative = True

    def __call__(self, siblings: LawQueues, _memory: Memory, /) -> LawResult:
        names, usage, n = siblings.columns.names, siblings.columns.usage, normalised(siblings)
        factors = [fair_share_factor(max(0.0, u), part, self.dampening) for part, u in zip(n, usage, strict=True)]
        wanted = list(map(mul, n, factors))
        if not siblings.explain:
            return LawResult(names, wanted, {})
        rows = zip(names, n, usage, factors, strict=True)
        return LawResult(names, wanted, {name: {"n": part, "U": u, "F": factor} for name, part, u, factor in rows})
