"""Gives turns to gangs that no weight admits, and computes when a gang can be admitted.

A fair share can have any size, but a gang needs all its GPUs at once. If a gang is larger than its queue's share, even
a strong reaction to history does not start it: the scheduler lets a queue reclaim GPUs only while it stays within its
share, so the gang that happens to run first keeps its GPUs.

A turn raises the share of one queue for `min_turn`. The weights of its siblings shrink only as far as the gang needs,
and stay at or above 1 / `ratio` of the largest weight. Deserved quotas of the other queues are not weights and do not
change. There is one turn at a time among siblings.

A queue may have a turn if its smallest pending gang exceeds the share that it would have at twice its configured weight
(which is as far as history goes with k = 1), or if it is stuck: for six `min_turn` it held at least one GPU less than
its share, and no waiting gang fitted beside what it held. With `turn: burst` the GPUs that the queue holds count as
part of the gang.

Owed is the sum over time of (share by configured weights and present requests - held GPUs), in GPU-hours, which fades
with the half-life of the policy's window. The queue that is owed the most gets the next turn, if it is owed a quarter
of the GPU-hours of its gang in one turn more than the holder that is owed the least.

Example: on 16 GPUs, three queues with the weights 1 : 2 : 3 always have a gang of 16 waiting. Without turns one of them
holds all GPUs for ever. With turns they hold about 3, 5 and 8 on average.

History alone can raise a share only by a limited amount. Take a queue with the normalised weight n that used nothing
while the others used everything. With the strength of history k, its over-quota share is about n (1 + k) of the pool C.
A gang of g GPUs therefore needs about k = g / (n C) - 1. The exact figure, with rounding, comes from the division.

Source of the bound: that of `division`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp2, inf

from accountant.wire.policy_models import Policy, QueuePolicy, TurnPolicy
from fairshare.core.queues_and_weights import UNLIMITED, DivisionProblem, PolicyTree, QueueClaim
from fairshare.laws.division import divide, fair_shares
from fairshare.laws.feedback_law import LawQueue, LawQueues, Memory

Shares = Callable[[LawQueues, Sequence[float]], Sequence[float]]
_TURN_HALVINGS = 12
_LEAD = 0.25
"""Minimum lead for a turn, as a part of the GPU-hours that the gang uses in one turn: the queue must be owed this much
more than the queue that makes room."""
_STUCK_TURNS = 6
_LONGEST_H = 1.0
"""An outage of the controller counts as at most this many hours, so that it makes no debts."""


@dataclass(frozen=True, slots=True)
class GangTurn:
    """The queue that has its turn, and until when.

    weights, shares: of all siblings, in their order; shares in GPUs.
    others: the part of their configured weights that the others keep."""

    queue: str
    until_ms: int
    weights: Sequence[float]
    shares: Sequence[float]
    others: float

    def note(self, name: str, now_ms: int) -> str:
        """Describe the turn for one of the siblings."""
        left_min = max(0, self.until_ms - now_ms) // 60_000
        return f"{'its' if name == self.queue else f'{self.queue} has its'} turn for {left_min} more min"


@dataclass(frozen=True, slots=True)
class TurnState:
    """Who has a turn now, and what is kept for the next cycle.

    owed: GPU-hours by sibling, in their order."""

    turn: GangTurn | None
    owed: Sequence[float]
    memory: Memory


def turns_now(siblings: LawQueues, memory: Memory, policy: Policy) -> TurnState | None:
    """Return the state of the siblings' turns; None if there are none among so many siblings."""
    names, rules = siblings.columns.names, policy.turns
    if len(names) > rules.most_queues:
        return None
    owed, stuck_ms = _owed(siblings, memory, float(policy.window.half_life or policy.window.size))
    states: dict[str, dict[str, float]] = {
        name: {"owed": amount, "at_ms": float(siblings.now_ms)} for name, amount in zip(names, owed, strict=True)
    }
    for name, since in zip(names, stuck_ms, strict=True):
        if since is not None:
            states[name]["stuck_ms"] = since
    turn = _turn_in_progress(siblings, memory, rules) or _next_turn(siblings, owed, stuck_ms, rules)
    if turn is not None:
        states[turn.queue] |= {"turn_until_ms": float(turn.until_ms), "others": turn.others}
    return TurnState(turn, owed, states)


def _owed(siblings: LawQueues, memory: Memory, half_life_s: float) -> tuple[list[float], list[float | None]]:
    """Return for each sibling the GPU-hours that it is owed, and the time since which it is stuck."""
    columns, now_ms = siblings.columns, float(siblings.now_ms)
    shares = unrounded_shares(siblings, columns.weights)
    owed: list[float] = []
    stuck: list[float | None] = []
    for name, share, held, gang in zip(columns.names, shares, columns.allocated, columns.gangs, strict=True):
        kept = memory.get(name, {})
        passed_h = max(0.0, now_ms - kept.get("at_ms", now_ms)) / 3_600_000
        faded = kept.get("owed", 0.0) * exp2(-passed_h * 3600 / half_life_s)
        owed.append(faded + (share - held) * min(passed_h, _LONGEST_H))
        stuck.append(kept.get("stuck_ms", now_ms) if share - held >= 1 and held + gang > share else None)
    return owed, stuck


def _turn_in_progress(siblings: LawQueues, memory: Memory, rules: TurnPolicy) -> GangTurn | None:
    for name in siblings.columns.names:
        kept = memory.get(name, {})
        if kept.get("turn_until_ms", 0.0) > siblings.now_ms:
            return _turn(siblings, name, kept["others"], int(kept["turn_until_ms"]), rules.ratio)
    return None


def _next_turn(
    siblings: LawQueues, owed: Sequence[float], stuck_ms: Sequence[float | None], rules: TurnPolicy
) -> GangTurn | None:
    """Return a turn that begins now, or None."""
    if max(siblings.columns.gangs) <= 0:
        return None
    members, now_ms = siblings.members, siblings.now_ms
    waiting = [i for i, member in enumerate(members) if _may_take_turns(member, siblings.pool)]
    for i in sorted(waiting, key=lambda i: (-owed[i], members[i].name)):
        member, since = members[i], stuck_ms[i]
        lead = _LEAD * member.gang * rules.min_turn / 3600
        holders = [owed[j] for j, other in enumerate(members) if j != i and other.allocated > 0]
        if owed[i] <= 0 or (holders and owed[i] <= min(holders) + lead):
            return None  # a queue that is owed less has no better claim
        stuck = since is not None and now_ms - since >= _STUCK_TURNS * rules.min_turn * 1000
        if not stuck and not _exceeds_twice_its_share(siblings, i):
            continue
        others = _boost(siblings, i, member.allocated + member.gang, rules.ratio)
        if others is not None:
            return _turn(siblings, member.name, others, now_ms + rules.min_turn * 1000, rules.ratio)
    return None


def _exceeds_twice_its_share(siblings: LawQueues, index: int) -> bool:
    """Return whether the queue's smallest pending gang exceeds its share at twice its configured weight."""
    weights, member = list(siblings.columns.weights), siblings.members[index]
    weights[index] *= 2
    needed = member.gang + (member.allocated if member.burst else 0.0)
    return all(needed > shares(siblings, weights)[index] for shares in (unrounded_shares, shares_in_whole_gpus))


def shares_in_whole_gpus(siblings: LawQueues, weights: Sequence[float]) -> Sequence[float]:
    """Return the shares in whole GPUs that the scheduler's division gives with these weights."""
    claims = tuple(
        QueueClaim(m.name, m.requested, m.deserved, m.limit, weight, m.usage)
        for m, weight in zip(siblings.members, weights, strict=True)
    )
    shares = divide(DivisionProblem("turn", siblings.pool, siblings.scheduler_k, claims), as_source=True).shares
    return [shares[name] for name in siblings.columns.names]


def unrounded_shares(siblings: LawQueues, weights: Sequence[float]) -> Sequence[float]:
    """Return the shares by weight alone, without rounding. A gang that fits into them also fits after rounding."""
    columns = siblings.columns
    requested = [
        ask if limit < 0 else min(ask, limit) for ask, limit in zip(columns.requested, columns.limits, strict=True)
    ]
    quotas = [inf if quota < 0 else quota for quota in columns.deserved]
    return fair_shares(siblings.pool, requested, quotas, weights)


def turn_weights(weights: Sequence[float], index: int, others: float, ratio: float) -> list[float]:
    """Return the weights of a turn: one queue gets the largest weight, each other queue the part `others` of its own.

    No positive weight is below 1 / ratio of the largest."""
    top = max(weights)
    boosted = [max(weight * others, top / ratio) if weight > 0 else 0.0 for weight in weights]
    boosted[index] = top
    return boosted


def _may_take_turns(member: LawQueue, pool: float) -> bool:
    """Return whether the queue waits with a gang that fits into the pool and the queue's limit at all."""
    most = pool if member.limit < 0 else min(pool, member.limit)
    return member.gang > 0 and member.weight > 0 and member.allocated + member.gang <= most


def _boost(siblings: LawQueues, index: int, wanted: float, ratio: float) -> float | None:
    """Return the largest part of their weights that the others may keep so that the queue gets `wanted` GPUs.

    It uses the shares before rounding if they can reach `wanted`, otherwise those in whole GPUs. Returns None if even
    the full ratio is not enough."""
    weights = siblings.columns.weights
    kinds: tuple[Shares, ...] = (unrounded_shares, shares_in_whole_gpus)
    for shares in kinds[1:] if siblings.scheduler_k else kinds:

        def admits(others: float, shares: Shares = shares) -> bool:
            return shares(siblings, turn_weights(weights, index, others, ratio))[index] >= wanted

        if admits(0.0):
            low, high = 0.0, 1.0
            for _ in range(_TURN_HALVINGS):
                middle = (low + high) / 2
                low, high = (middle, high) if admits(middle) else (low, middle)
            return low
    return None


def _turn(siblings: LawQueues, name: str, others: float, until_ms: int, ratio: float) -> GangTurn:
    """Return the turn of a queue, in which the others keep the part `others` of their weights."""
    columns = siblings.columns
    weights = turn_weights(columns.weights, list(columns.names).index(name), others, ratio)
    shares = shares_in_whole_gpus(siblings, weights) if siblings.explain else ()
    return GangTurn(name, until_ms, weights, shares, others)


MOST_K = 1000.0
_REACH_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class GangReach:
    """The largest share that a queue can reach for one gang, in GPUs.

    static: its share without history.
    best: the largest share that history or a turn can give.
    needed_k: the smallest k with which history admits the gang, None if no k does."""

    queue: str
    gang: float
    static: float
    best: float
    needed_k: float | None

    @property
    def admitted(self) -> bool:
        return self.best >= self.gang

    def sentence(self, held: float = 0.0) -> str:
        """Describe the reach in a sentence. held: the part of `gang` that the queue already has for other jobs."""
        head = f"a gang of {self.gang - held:g} GPUs in {self.queue!r}"
        if held > 0:
            head = f"{head}, beside the {held:g} that it holds,"
        if self.static >= self.gang:
            return f"{head} fits its share of {self.static:g}"
        if self.admitted:
            return f"{head} is larger than its share of {self.static:g}; history or a turn can lift it to {self.best:g}"
        if self.needed_k is None:
            return f"{head} can never be admitted: no history lifts its share of {self.static:g} above {self.best:g}"
        return (
            f"{head} is never admitted by this policy: its share reaches at most {self.best:g};"
            f" k >= {self.needed_k:.3f} or a turn would do"
        )


def gang_reach(policy: Policy, gpus: float, queue: str, gang: float) -> GangReach:
    """Compute how far history and turns can raise `queue` in a cluster of `gpus`.

    It assumes that all other queues request everything and used everything. Raises KeyError for an unknown queue."""
    queues = {each.name: each for each in policy.queues}
    own = queues[queue]
    static = _share(policy, gpus, own, gang, 0.0)
    best = max(_share(policy, gpus, own, gang, policy.k), _in_turn(policy, gpus, own, gang))
    return GangReach(queue, gang, static, best, _least_k(policy, gpus, own, gang))


def _least_k(policy: Policy, gpus: float, own: QueuePolicy, gang: float) -> float | None:
    if _share(policy, gpus, own, gang, MOST_K) < gang:
        return None
    low, high = 0.0, MOST_K
    if _share(policy, gpus, own, gang, 0.0) >= gang:
        return 0.0
    for _ in range(_REACH_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _share(policy, gpus, own, gang, middle) >= gang else (middle, high)
    return high


def _share(policy: Policy, gpus: float, own: QueuePolicy, gang: float, k: float, ratio: float | None = None) -> float:
    """Return the share of `own` if it used nothing, and if its siblings used everything in proportion to their
    weights.

    ratio: limits the weights of the siblings to the queue's own weight over this ratio."""
    above = {queue.name for queue in PolicyTree(policy).upwards(own.name)}
    claims = []
    for each in policy.queues:
        siblings = [other for other in policy.queues if other.parent == each.parent and other.name not in above]
        total_weight = sum(other.weight for other in siblings)
        usage = 0.0 if each.name in above or total_weight == 0 else each.weight / total_weight
        request = gang if each.name == own.name else inf if each.name not in above else gpus
        weight = each.weight
        if ratio is not None and each.name not in above and each.parent == own.parent:
            weight = min(weight, own.weight / ratio)
        claims.append(
            QueueClaim(
                each.name, min(request, 1e12), each.deserved, each.limit, weight, usage, each.priority,
                parent=each.parent,
            )
        )  # fmt: skip
    return divide(DivisionProblem("reach", gpus, k, tuple(claims)), as_source=True).shares[own.name]


def _in_turn(policy: Policy, gpus: float, own: QueuePolicy, gang: float) -> float:
    """Return the queue's share in a turn that reduces its siblings' weights as far as the ratio allows."""
    siblings = sum(each.parent == own.parent for each in policy.queues)
    if siblings > policy.turns.most_queues or UNLIMITED < own.limit < gang:
        return 0.0
    return _share(policy, gpus, own, gang, 0.0, policy.turns.ratio)
