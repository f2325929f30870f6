"""The one signature of every feedback law, and KAI's law in it.

A law looks at one set of siblings (queues of one parent and one priority) and says what to divide by
now instead of the configured weights. `fairshare.weighing.weights` walks the tree, keeps the answer within the
policy's bounds and paces it, so a law knows neither the tree nor the cluster, and works at every level
of the tree alike: usage, pool and targets of siblings are relative to what their parent has.

Invariants every law keeps outside turns (tests/properties/test_laws.py): the outcome depends on the
values alone, not on their order; who used more never gets more; scaling all configured weights scales
nothing else; with no history the configured weights come back. A law is pure: what it must remember
comes in and goes out as `Memory`, numbers by name that survive JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import NamedTuple, Protocol

Memory = Mapping[str, Mapping[str, float]]
"""What a law keeps from one cycle to the next, per queue. Empty at first; losing it only loses momentum."""


class Sibling(NamedTuple):
    """One queue as a law sees it. GPUs unless said otherwise. A tuple, because replays make millions of them.

    weight: configured, >= 0. target: its part (0..1) of the pool by quota and weight, were everybody to
    ask for everything. usage: U, its usage in the policy's window over what the siblings had then (as
    GPU time: usage * pool * window). requested contains allocated; both contain its children's. gang: its
    smallest pending gang, 0 where it has none. weight_now: the weight in force, None where unset.
    reclaims: evictions made for its sake since the last cycle, as far as known."""

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


@dataclass(frozen=True, slots=True)
class Siblings:
    """Queues that are divided together. pool: GPUs there are for them. window_s: how long the usage
    window is in effect: its size, or with a half-life the integral of its decay over it. explain: False
    where nobody reads traces and notes, as in replays, which ask thousands of times."""

    members: tuple[Sibling, ...]
    pool: float
    window_s: float
    now_ms: int
    explain: bool = True

    def only(self, some: Sequence[Sibling]) -> Siblings:
        """The same cycle among some of the members, in their order."""
        if len(some) == len(self.members):
            return self
        return Siblings(tuple(some), self.pool, self.window_s, self.now_ms, self.explain)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a law wants. weights: per queue, >= 0. traces: the numbers on the way, by queue and name, in
    the order in which they arose. notes: a clause for people, by queue. turn: the queue that has its turn
    now; its weights then go out as they are, past step and clamp."""

    weights: Mapping[str, float]
    traces: Mapping[str, Mapping[str, float]]
    notes: Mapping[str, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    turn: str | None = None


class Law(Protocol):
    """Pure: equal arguments, equal verdict."""

    @property
    def relative(self) -> bool:
        """True: only the proportions of the weights mean something, and only among those who compete
        (ask for more than their quota); such a law is stateless and asked about the competitors alone.
        False: they are the weights to publish, and the law looks at demand itself."""
        ...

    def __call__(self, siblings: Siblings, memory: Memory, /) -> Verdict: ...


def normalised(siblings: Siblings) -> dict[str, float]:
    """n: every member's configured weight over their sum; all 0 where nobody has one."""
    return dict(zip([member.name for member in siblings.members], _parts(siblings), strict=True))


def _parts(siblings: Siblings) -> list[float]:
    weights = [member.weight for member in siblings.members]
    total = fsum(weights)
    return [weight / total for weight in weights] if total > 0 else [0.0] * len(weights)


@dataclass(frozen=True, slots=True)
class Static:
    """No feedback: the configured weights."""

    relative = True

    def __call__(self, siblings: Siblings, _memory: Memory, /) -> Verdict:
        n = normalised(siblings)
        return Verdict(n, {name: {"n": part} for name, part in n.items()})


@dataclass(frozen=True, slots=True)
class Kai:
    """P = max(0, n + k (n - U)): published with the scheduler's own k at 0, the same first round as its
    own history would give.

    Source: KAI-Scheduler resource_division.go, commit d5bc503a."""

    k: float
    relative = True

    def __call__(self, siblings: Siblings, _memory: Memory, /) -> Verdict:
        k, members, parts = self.k, siblings.members, _parts(siblings)
        weights = {
            member.name: max(0.0, n + k * (n - member.usage)) if n > 0 else 0.0
            for member, n in zip(members, parts, strict=True)
        }
        if not siblings.explain:
            return Verdict(weights, {})
        return Verdict(
            weights,
            {m.name: {"n": n, "U": m.usage, "k": k, "P": weights[m.name]} for m, n in zip(members, parts, strict=True)},
        )
