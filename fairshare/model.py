"""What the controller reasons about: claims and their division, queues, demand, entitlement, weights.

Frozen values without behaviour beyond small derived properties. GPUs are floats in units of one
physical GPU, as the schedulers write them; -1 means unlimited. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

UNLIMITED: Final = -1.0

Function = Literal["setResourceShare", "divideOverQuotaResource", "hierarchy"]
"""Which part of KAI's division a case asks for: one sibling set in both phases, the over-quota phase
alone (on top of `Claim.initial`), or a tree of sibling sets."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One queue's part in a division, in units of the resource.

    deserved, limit: -1 unlimited. weight: over-quota weight, >= 0. usage: history, normalised by the
    capacity of the same window. creation: rank, lower = older. parent None: a root. initial: share held
    before the over-quota phase, read by `divideOverQuotaResource` alone."""

    name: str
    request: float
    deserved: float = 0.0
    limit: float = UNLIMITED
    weight: float = 1.0
    usage: float = 0.0
    priority: int = 100
    creation: int = 0
    parent: str | None = None
    initial: float = 0.0


@dataclass(frozen=True, slots=True)
class Case:
    """One division to be made: `total` units among `claims` with history factor `k`."""

    name: str
    total: float
    k: float
    claims: tuple[Claim, ...]
    function: Function = "hierarchy"
    resource: str = "GPU"


@dataclass(frozen=True, slots=True)
class Offer:
    """One queue in one round: n its normalised weight, U its usage, P what both make of it, `offered` its
    part of the pool (pool * P / S), `given` what it took: its want, or the offer rounded down."""

    queue: str
    n: float
    usage: float
    p: float
    offered: float
    given: float
    fraction: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the over-quota phase among the siblings under `parent` that have `priority`."""

    parent: str | None
    priority: int
    number: int
    pool: float
    sum_p: float
    offers: tuple[Offer, ...]
    remaining: float


@dataclass(frozen=True, slots=True)
class Remainder:
    """A unit, or what was left of one, given to the queue with the next largest fraction."""

    parent: str | None
    priority: int
    queue: str
    fraction: float
    given: float


@dataclass(frozen=True, slots=True)
class Division:
    """The outcome: fair share per queue, sorted by name; `remaining` of the total went to nobody (at the
    roots). deserved: what the first phase gave. steps: filled only when an explanation was asked for."""

    shares: Mapping[str, float]
    remaining: float
    deserved: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[Round | Remainder, ...] = ()
