"""Defines the signature of a feedback law, and the laws KAI, Fair Tree and multifactor.

A law gets one set of siblings, which are the queues of one parent and one priority. It returns the weights by which the
scheduler divides, in place of the configured ones. `weight_calculation` walks the tree of queues, keeps the weights
within the policy's bounds and paces them.

A law therefore knows neither the tree nor the cluster. It works the same at every level, because usage, pool and
targets of siblings are relative to those of their parent.

Except in a turn for a large gang (`gang_turns`), every law keeps these invariants (tests/properties/test_laws.py):

- The result depends on the values, not on their order.
- A queue that used more never gets more.
- Scaling all configured weights changes nothing else.
- Without history the result is the configured weights.
- A law has no state of its own. Its `Memory` is an argument and a result: numbers by name that can be stored as JSON.

Fair Tree and multifactor come from Slurm. Fair Tree orders the siblings of every level by their level fairshare
LF = S / U, where S is the queue's part of their shares and U its part of their usage. Values within 1e-12 of each other
count as equal.

Sources: SchedMD Slurm 284c3b95f08a, src/plugins/priority/multifactor/fair_tree.c and priority_multifactor.c (read, not
copied), and doc/html/fair_tree.shtml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from math import exp2, fsum, inf, isclose
from operator import lt, mul
from typing import NamedTuple, Protocol, Self

Memory = Mapping[str, Mapping[str, float]]
"""A law's state between cycles, by queue and name. It is empty at first. If it is lost, the law starts again from the
usage in the ledger."""


class LawQueue(NamedTuple):
    """The figures of one queue from which a law computes its weight. Amounts are GPUs unless stated otherwise.

    weight: the configured weight, >= 0.
    target: the queue's part (0..1) of the pool by quota and weight if all queues requested everything.
    usage: U, its usage in the policy's window over the capacity that the siblings had in it. As GPU time this
        is usage * pool * window.
    requested: includes `allocated`. Both include the children's.
    gang: the GPUs of its smallest pending gang, 0 without one.
    weight_now: the weight in force, None if unset.
    reclaims: known evictions since the last cycle that were made for this queue."""

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
    """Queues as columns, one for each field of `LawQueue`.

    Laws read one field of all queues at a time, and a replay has the fields as columns already."""

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
        """Return the columns of at least one queue."""
        return cls(*zip(*members, strict=True))


@dataclass(frozen=True, slots=True)
class LawQueues:
    """The queues of one parent and one priority, which divide a pool.

    pool: the GPUs that they divide.
    window_s: the effective length of the usage window. This is its size, or with a half-life the integral of the decay.
    explain: whether the law writes traces and notes. Replays switch this off, because they call the law thousands of
        times."""

    columns: LawColumns
    pool: float
    window_s: float
    now_ms: int
    explain: bool = True

    @property
    def members(self) -> tuple[LawQueue, ...]:
        return tuple(map(LawQueue._make, zip(*self.columns, strict=True)))

    def only(self, selected: Sequence[bool]) -> LawQueues:
        """Return only the selected queues, in the same order."""
        columns = LawColumns._make([list(compress(column, selected)) for column in self.columns])
        return replace(self, columns=columns)

    def by_name(self) -> LawQueues:
        """Return the same siblings in the order of their names."""
        names = self.columns.names
        if all(map(lt, names, names[1:])):
            return self
        return replace(self, columns=LawColumns.of(sorted(self.members, key=lambda member: member.name)))


@dataclass(frozen=True, slots=True)
class LawResult:
    """A law's result.

    names: the siblings' names, in the order of `LawQueues`.
    wanted: a weight >= 0 for each name.
    traces: the intermediate numbers by queue and name, in the order of computation.
    notes: a clause for people, by queue.
    memory: the state for the next cycle.
    turn: the queue that has its turn now. The weights are then published without step limit and bounds."""

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
    """A feedback law: equal arguments give equal results."""

    @property
    def relative(self) -> bool:
        """Whether only the proportions of the weights matter, and only among queues that request more than their quota.

        Such a law has no state and gets only these competing queues. Any other law gets all siblings and considers
        their demand itself, and its weights are not rescaled."""
        ...

    def __call__(self, siblings: LawQueues, memory: Memory, /) -> LawResult: ...


def normalised_weights(siblings: LawQueues) -> list[float]:
    """Return n for each queue: its configured weight over the sum of all weights; 0 if that sum is 0."""
    weights = siblings.columns.weights
    total = fsum(weights)
    return [weight / total for weight in weights] if total > 0 else [0.0] * len(weights)


@dataclass(frozen=True, slots=True)
class Kai:
    """KAI's own rule as weights: P = max(0, n + k (n - U)).

    With these weights and its own k at 0, the scheduler's first round gives the same result as with its own history.

    Source: KAI-Scheduler resource_division.go, commit d5bc503a."""

    k: float
    relative = True

    def __call__(self, siblings: LawQueues, _memory: Memory, /) -> LawResult:
        k, names, usage = self.k, siblings.columns.names, siblings.columns.usage
        parts = normalised_weights(siblings)
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
    """Fair Tree as weights: the configured part of each sibling times its rank.

    Slurm serves the siblings in the order of their ranks. Weights turn this order into a gradient in which no weight is
    0."""

    relative = True

    def __call__(self, siblings: LawQueues, _memory: Memory, /) -> LawResult:
        names, usage, n = siblings.columns.names, siblings.columns.usage, normalised_weights(siblings)
        levels = [part / u if u > 0 else inf if part > 0 else 0.0 for part, u in zip(n, usage, strict=True)]
        ordered = [
            index for _, _, index in sorted(zip([-level for level in levels], names, range(len(names)), strict=True))
        ]
        fairshare = [1.0] * len(ordered)
        rank, previous = len(ordered), inf
        for position, index in enumerate(ordered):
            if position and not isclose(previous, levels[index], rel_tol=_TIED):
                rank = len(ordered) - position
            previous = levels[index]
            fairshare[index] = rank / len(ordered)
        wanted = list(map(mul, n, fairshare))
        if not siblings.explain:
            return LawResult(names, wanted, {})
        traces = {
            names[i]: {"n": n[i], "U": usage[i], "LF": min(levels[i], 1e9), "fairshare": fairshare[i]} for i in ordered
        }
        return LawResult(names, wanted, traces)


def fair_share_factor(usage: float, shares: float, dampening: float = 1.0) -> float:
    """Return Slurm's factor F = 2^(-(U/S)/d), with the usage U, the shares S and the dampening d; 0 if S is 0."""
    return exp2(-usage / shares / dampening) if shares > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Multifactor:
    """Slurm's multifactor fair share as weights: the configured share n times 2^(-U / n / dampening)."""

    dampening: float = 1.0
    relative = True

    def __call__(self, siblings: LawQueues, _memory: Memory, /) -> LawResult:
        names, usage, n = siblings.columns.names, siblings.columns.usage, normalised_weights(siblings)
        factors = [fair_share_factor(max(0.0, u), part, self.dampening) for part, u in zip(n, usage, strict=True)]
        wanted = list(map(mul, n, factors))
        if not siblings.explain:
            return LawResult(names, wanted, {})
        rows = zip(names, n, usage, factors, strict=True)
        return LawResult(names, wanted, {name: {"n": part, "U": u, "F": factor} for name, part, u, factor in rows})
