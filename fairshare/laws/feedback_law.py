"""Defines the law that turns past use into weights: P = max(0, n + k (n - U)).

n is a queue's weight over the weights of the queues that it is compared with, U its usage, k the strength of history. A
queue's weight grows by as much as its use lay below its share, at most to twice its share with k = 1, and falls in the
same way if it used more. Example: two queues of equal weight have n = 0.5. With k = 1, the one that used everything
(U = 1) has P = 0, and the other (U = 0) has P = 1.

The law gets one set of siblings, which are the queues of one parent and one priority. It knows neither the tree nor the
cluster, because usage and pool of siblings are relative to those of their parent. `weight_calculation` walks the tree,
keeps the weights within the policy's bounds and changes them at most once an interval; `gang_turns` gives turns to
gangs that no weight admits.

The law keeps these invariants (tests/properties/test_law.py):

- The result depends on the values, not on their order.
- A queue that used more never gets more.
- Scaling all configured weights changes nothing else.
- Without history the result is the configured weights.

Source: that of `division`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from math import fsum
from typing import NamedTuple, Self

Memory = Mapping[str, Mapping[str, float]]
"""What is kept from cycle to cycle, by queue and name: numbers that can be stored as JSON. It is empty at first. If it
is lost, weights are set anew from the usage in the ledger, and turns count from then on."""


class LawQueue(NamedTuple):
    """The figures of one queue from which its weight follows. Amounts are GPUs unless stated otherwise.

    weight: the configured weight, >= 0.
    usage: U, its usage in the policy's window over the capacity that the siblings had in it.
    requested: includes `allocated`. Both include the children's.
    gang: the GPUs of its smallest pending gang, 0 without one.
    burst: whether turns count the GPUs that it holds (`gang_turns`)."""

    name: str
    weight: float
    usage: float
    requested: float
    allocated: float
    deserved: float = 0.0
    limit: float = -1.0
    gang: float = 0.0
    burst: bool = False


class LawColumns(NamedTuple):
    """Queues as columns, one for each field of `LawQueue`.

    The law reads one field of all queues at a time, and a replay has the fields as columns already."""

    names: Sequence[str]
    weights: Sequence[float]
    usage: Sequence[float]
    requested: Sequence[float]
    allocated: Sequence[float]
    deserved: Sequence[float]
    limits: Sequence[float]
    gangs: Sequence[float]
    bursts: Sequence[bool]

    @classmethod
    def of(cls, members: Sequence[LawQueue]) -> Self:
        """Return the columns of at least one queue."""
        return cls(*zip(*members, strict=True))


@dataclass(frozen=True, slots=True)
class LawQueues:
    """The queues of one parent and one priority, which divide a pool.

    pool: the GPUs that they divide.
    scheduler_k: the strength with which their scheduler counts the same history by itself; 0 if it divides by the
        weights alone.
    explain: whether numbers for people are wanted too. Replays switch this off, because they compute thousands of
        cycles.
    stay: whether weights that are set now stay for the interval. They do not while no use of these queues is known."""

    columns: LawColumns
    pool: float
    now_ms: int
    scheduler_k: float = 0.0
    explain: bool = True
    stay: bool = True

    @property
    def members(self) -> tuple[LawQueue, ...]:
        return tuple(map(LawQueue._make, zip(*self.columns, strict=True)))

    def only(self, selected: Sequence[bool]) -> LawQueues:
        """Return only the selected queues, in the same order."""
        columns = LawColumns._make([list(compress(column, selected)) for column in self.columns])
        return replace(self, columns=columns)


def normalised_weights(siblings: LawQueues) -> list[float]:
    """Return n for each queue: its configured weight over the sum of all weights; 0 if that sum is 0."""
    weights = siblings.columns.weights
    total = fsum(weights)
    return [weight / total for weight in weights] if total > 0 else [0.0] * len(weights)


def history_weights(siblings: LawQueues, k: float) -> list[float]:
    """Return P for each queue.

    With these weights and its own k at 0, the first round of the division's source gives the same result as with its
    own history."""
    parts, usage = normalised_weights(siblings), siblings.columns.usage
    return [max(0.0, n + k * (n - u)) if n > 0.0 else 0.0 for n, u in zip(parts, usage, strict=True)]
