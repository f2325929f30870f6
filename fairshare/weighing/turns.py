"""Turns: the queue that is owed most gets its gang in, where no share ever admits it.

Fair shares are fluid, gangs are lumps. Where a gang is larger than its queue's share no gain helps: the
scheduler lets a queue reclaim only while it stays within its share with the gang, so whoever sits there
first stays. A turn concentrates the weights on one queue, as little as admits its gang and never beyond
`ratio`, for at least `min_turn`; what is owed then decides whose turn is next. Deserved quotas of the
others are outside the weights and stay untouched.

A turn is checked by the scheduler's own division in whole GPUs (`fairshare.division`). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf

from accountant.wire import TurnPolicy
from fairshare.division import divide
from fairshare.model import Case, Claim
from fairshare.weighing.fluid import fair_shares
from fairshare.weighing.laws import Memory, Sibling, Siblings

Shares = Callable[[Siblings, Mapping[str, float]], dict[str, float]]
_HALVINGS = 12
_LEAD = 0.25
"""Of a gang's GPU-hours in one turn: by how much more one must be owed than who would make room."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn it is until when. weights: of every sibling. shares: what they come to, GPUs. kept: to be
    remembered, per queue."""

    queue: str
    until_ms: int
    weights: Mapping[str, float]
    shares: Mapping[str, float]
    notes: Mapping[str, str]
    kept: Mapping[str, Mapping[str, float]]


def turn_now(
    siblings: Siblings,
    weights: Mapping[str, float],
    owed: Mapping[str, float],
    memory: Memory,
    policy: TurnPolicy,
    name: str | None,
) -> Turn | None:
    """The turn under way, or one that begins now; None: the smooth `weights` stand. owed: GPU-hours, what
    decides whose turn it is. name: of the queue whose turn is under way by this memory."""
    if name is not None and name in weights:
        before = memory[name]
        return _turn(siblings, weights, name, before["others"], int(before["turn_until_ms"]), policy.ratio)
    waiting = lumps(siblings, policy)
    if not waiting:
        return None
    smooth = shares_under(siblings, weights)
    for member in sorted(waiting, key=lambda m: (-owed[m.name], m.name)):
        wanted = member.allocated + member.gang
        if wanted <= smooth[member.name]:
            continue
        holders = [owed[m.name] for m in siblings.members if m.name != member.name and m.allocated > 0]
        lead = _LEAD * member.gang * policy.min_turn / 3600
        if owed[member.name] <= 0 or (holders and owed[member.name] <= min(holders) + lead):
            return None  # who is owed less has no better claim
        others = _boost(siblings, weights, member.name, wanted, policy.ratio)
        if others is not None:
            until_ms = siblings.now_ms + policy.min_turn * 1000
            return _turn(siblings, weights, member.name, others, until_ms, policy.ratio)
    return None


def lumps(siblings: Siblings, policy: TurnPolicy) -> list[Sibling]:
    """The queues whose smallest pending gang is so large that they may need a turn for it."""
    least = policy.lump * siblings.pool
    if max(siblings.columns.gangs) <= least or policy.ratio <= 0:
        return []
    return [m for m in siblings.members if m.gang > least and _may_take_turns(m, siblings.pool)]


def under_way(memory: Memory, now_ms: int, siblings: Collection[str]) -> str | None:
    """Which of the siblings has its turn. memory: of the whole tree: other siblings have turns of their own."""
    turning = [name for name, kept in memory.items() if kept.get("turn_until_ms", 0.0) > now_ms]
    return min([name for name in turning if name in siblings], default=None)


def shares_under(siblings: Siblings, weights: Mapping[str, float]) -> dict[str, float]:
    """Fair shares in whole GPUs under these weights, as the scheduler divides."""
    claims = tuple(Claim(m.name, m.requested, m.deserved, m.limit, weights[m.name]) for m in siblings.members)
    return dict(divide(Case("turn", siblings.pool, 0.0, claims), kai_compat=True).shares)


def fluid_shares(siblings: Siblings, weights: Mapping[str, float]) -> dict[str, float]:
    """The same without rounding: a gang that fits these fits with room to spare."""
    members = siblings.members
    asked = [m.requested if m.limit < 0 else min(m.requested, m.limit) for m in members]
    quotas = [inf if m.deserved < 0 else m.deserved for m in members]
    shares = fair_shares(siblings.pool, asked, quotas, [weights[m.name] for m in members])
    return {m.name: share for m, share in zip(members, shares, strict=True)}


def concentrated(weights: Mapping[str, float], queue: str, others: float, ratio: float) -> dict[str, float]:
    """The largest weight for `queue`; for the rest `others` of their own, but no less than 1 / ratio of it."""
    top = max(weights.values())
    return {
        name: top if name == queue else max(weight * others, top / ratio) if weight > 0 else 0.0
        for name, weight in weights.items()
    }


def _may_take_turns(member: Sibling, pool: float) -> bool:
    """Whether its smallest pending gang could ever be let in by weights."""
    most = pool if member.limit < 0 else min(pool, member.limit)
    return member.weight > 0 and member.allocated + member.gang <= most


def _boost(siblings: Siblings, weights: Mapping[str, float], queue: str, wanted: float, ratio: float) -> float | None:
    """The largest part of their weights that the others may keep while `queue` is due `wanted` GPUs: before
    rounding if that can be, else after it. None: not even at the full ratio."""
    for shares in (fluid_shares, shares_under):

        def admits(others: float, shares: Shares = shares) -> bool:
            return shares(siblings, concentrated(weights, queue, others, ratio))[queue] >= wanted

        if admits(0.0):
            low, high = 0.0, 1.0
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                low, high = (middle, high) if admits(middle) else (low, middle)
            return low
    return None


def _turn(
    siblings: Siblings, weights: Mapping[str, float], queue: str, others: float, until_ms: int, ratio: float
) -> Turn:
    out = concentrated(weights, queue, others, ratio)
    left_min = max(0, until_ms - siblings.now_ms) // 60_000
    notes = {
        name: f"its turn for {left_min} more min" if name == queue else f"{queue} has its turn for {left_min} more min"
        for name in out
    }
    kept = {queue: {"turn_until_ms": float(until_ms), "others": others}}
    return Turn(queue, until_ms, out, shares_under(siblings, out), notes, kept)
