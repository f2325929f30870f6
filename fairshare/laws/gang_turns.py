"""Gives turns to gangs larger than any share, and computes when a gang can be admitted.

A fair share can have any size, but a gang needs all its GPUs at once. If a gang is larger than its queue's share, even
a strong reaction of the law to history does not start it. The scheduler lets a queue reclaim GPUs only while it stays
within its share, so the gang that happens to run first keeps its GPUs.

A turn raises the share of one queue for at least `min_turn`. The weights of its siblings shrink only as far as the gang
needs, and stay at or above 1 / `ratio` of the largest weight. The next turn goes to the queue that is owed the most
GPU-hours. Deserved quotas of the other queues are not weights and do not change.

The scheduler's own division in whole GPUs (`division.py`) shows whether a turn admits the gang.

History alone can raise a share only by a limited amount. Take a queue with the normalised weight n that used nothing
while the others used everything. With the law KAI and its strength of history k, the queue's over-quota share is about
n (1 + k) of the pool C. A gang of g GPUs therefore needs about k = g / (n C) - 1. The exact figure, with rounding,
comes from the division itself.

Source of the bound: KAI-Scheduler resource_division.go, commit d5bc503a."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf

from accountant.wire.policy_models import Policy, QueuePolicy, TurnPolicy
from fairshare.core.queues_and_weights import UNLIMITED, Claim, DivisionProblem, PolicyTree
from fairshare.laws.division import divide, fair_shares
from fairshare.laws.feedback_laws import LawQueue, LawQueues, Memory

Shares = Callable[[LawQueues, Mapping[str, float]], dict[str, float]]
_TURN_HALVINGS = 12
_LEAD = 0.25
"""Minimum lead for a turn, as a part of the GPU-hours that the gang uses in one turn: the queue must be owed this much
more than the queue that makes room."""


@dataclass(frozen=True, slots=True)
class GangTurn:
    """The queue that has its turn, and until when.

    weights: weights of all siblings.
    shares: the resulting GPUs by queue.
    kept: the state of the turn, by queue, as a part of the law's `Memory`."""

    queue: str
    until_ms: int
    weights: Mapping[str, float]
    shares: Mapping[str, float]
    notes: Mapping[str, str]
    kept: Mapping[str, Mapping[str, float]]


def turn_now(
    siblings: LawQueues,
    weights: Mapping[str, float],
    owed: Mapping[str, float],
    memory: Memory,
    policy: TurnPolicy,
    name: str | None,
) -> GangTurn | None:
    """Return the present turn, or a turn that begins now; None if no turn applies, so that `weights` stay as they are.

    owed: GPU-hours that each queue is owed. The queue that is owed most gets the next turn.
    name: the queue whose turn is in progress according to `memory`."""
    if name is not None and name in weights:
        before = memory[name]
        return _turn(siblings, weights, name, before["others"], int(before["turn_until_ms"]), policy.ratio)
    waiting = queues_with_large_gangs(siblings, policy)
    if not waiting:
        return None
    shares = shares_in_whole_gpus(siblings, weights)
    for member in sorted(waiting, key=lambda m: (-owed[m.name], m.name)):
        wanted = member.allocated + member.gang
        if wanted <= shares[member.name]:
            continue
        owed_to_holders = [owed[m.name] for m in siblings.members if m.name != member.name and m.allocated > 0]
        lead = _LEAD * member.gang * policy.min_turn / 3600
        if owed[member.name] <= 0 or (owed_to_holders and owed[member.name] <= min(owed_to_holders) + lead):
            return None  # a queue that is owed less has no better claim
        others = _boost(siblings, weights, member.name, wanted, policy.ratio)
        if others is not None:
            until_ms = siblings.now_ms + policy.min_turn * 1000
            return _turn(siblings, weights, member.name, others, until_ms, policy.ratio)
    return None


def queues_with_large_gangs(siblings: LawQueues, policy: TurnPolicy) -> list[LawQueue]:
    """Return the queues whose smallest pending gang may need a turn because of its size."""
    threshold = policy.lump * siblings.pool
    if max(siblings.columns.gangs) <= threshold or policy.ratio <= 0:
        return []
    return [m for m in siblings.members if m.gang > threshold and _may_take_turns(m, siblings.pool)]


def queue_in_turn(memory: Memory, now_ms: int, siblings: Collection[str]) -> str | None:
    """Return the sibling that has its turn, or None.

    memory: the law's state for the whole tree, in which other siblings may have turns of their own."""
    turning = [name for name, state in memory.items() if state.get("turn_until_ms", 0.0) > now_ms]
    return min([name for name in turning if name in siblings], default=None)


def shares_in_whole_gpus(siblings: LawQueues, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the shares in whole GPUs that the scheduler's division gives with these weights."""
    claims = tuple(Claim(m.name, m.requested, m.deserved, m.limit, weights[m.name]) for m in siblings.members)
    return dict(divide(DivisionProblem("turn", siblings.pool, 0.0, claims), kai_compat=True).shares)


def unrounded_shares(siblings: LawQueues, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the shares without rounding. A gang that fits into them also fits after rounding."""
    members = siblings.members
    requested = [m.requested if m.limit < 0 else min(m.requested, m.limit) for m in members]
    quotas = [inf if m.deserved < 0 else m.deserved for m in members]
    shares = fair_shares(siblings.pool, requested, quotas, [weights[m.name] for m in members])
    return {m.name: share for m, share in zip(members, shares, strict=True)}


def turn_weights(weights: Mapping[str, float], queue: str, others: float, ratio: float) -> dict[str, float]:
    """Return the weights of a turn: `queue` gets the largest weight, each other queue the part `others` of its own.

    No positive weight is below 1 / ratio of the largest."""
    top = max(weights.values())
    return {
        name: top if name == queue else max(weight * others, top / ratio) if weight > 0 else 0.0
        for name, weight in weights.items()
    }


def _may_take_turns(member: LawQueue, pool: float) -> bool:
    """Return whether the queue's smallest pending gang fits into the pool and the queue's limit at all."""
    most = pool if member.limit < 0 else min(pool, member.limit)
    return member.weight > 0 and member.allocated + member.gang <= most


def _boost(siblings: LawQueues, weights: Mapping[str, float], queue: str, wanted: float, ratio: float) -> float | None:
    """Return the largest part of their weights that the others may keep so that `queue` gets `wanted` GPUs.

    It uses the shares before rounding if they can reach `wanted`, otherwise those in whole GPUs. Returns None if even
    the full ratio is not enough."""
    for shares in (unrounded_shares, shares_in_whole_gpus):

        def admits(others: float, shares: Shares = shares) -> bool:
            return shares(siblings, turn_weights(weights, queue, others, ratio))[queue] >= wanted

        if admits(0.0):
            low, high = 0.0, 1.0
            for _ in range(_TURN_HALVINGS):
                middle = (low + high) / 2
                low, high = (middle, high) if admits(middle) else (low, middle)
            return low
    return None


def _turn(
    siblings: LawQueues, weights: Mapping[str, float], queue: str, others: float, until_ms: int, ratio: float
) -> GangTurn:
    """Return the turn of `queue`; the others keep the part `others` of their weights."""
    boosted = turn_weights(weights, queue, others, ratio)
    left_min = max(0, until_ms - siblings.now_ms) // 60_000
    notes = {
        name: f"its turn for {left_min} more min" if name == queue else f"{queue} has its turn for {left_min} more min"
        for name in boosted
    }
    state = {queue: {"turn_until_ms": float(until_ms), "others": others}}
    return GangTurn(queue, until_ms, boosted, shares_in_whole_gpus(siblings, boosted), notes, state)


MOST_K = 1000.0
_REACH_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class GangReach:
    """The largest share that a queue can reach for one gang, in GPUs.

    static: its share without history.
    best: the largest share that the configured law can give.
    needed_k: the smallest k with which the law KAI admits the gang, None if no k does."""

    queue: str
    gang: float
    static: float
    best: float
    needed_k: float | None
    law: str

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
            return f"{head} is larger than its share of {self.static:g}; history can lift it to {self.best:g}"
        if self.needed_k is None:
            return f"{head} can never be admitted: no history lifts its share of {self.static:g} above {self.best:g}"
        remedy = f"k >= {self.needed_k:.3f} would do"
        if self.law != "kai":
            remedy = f"law `deficit` gives turns within its ratio, law `kai` would need k >= {self.needed_k:.3f}"
        return f"{head} is never admitted by the configured law: its share reaches at most {self.best:g}; {remedy}"


def gang_reach(policy: Policy, gpus: float, queue: str, gang: float) -> GangReach:
    """Compute how far the policy's law can raise `queue` in a cluster of `gpus`.

    It assumes that all other queues request everything and used everything. Raises KeyError for an unknown queue."""
    queues = {each.name: each for each in policy.queues}
    own = queues[queue]
    static = _share(policy, gpus, own, gang, 0.0)
    best = {
        "kai": lambda: _share(policy, gpus, own, gang, policy.k),
        "deficit": lambda: max(static, _in_turn(policy, gpus, own, gang)),
    }.get(policy.law, lambda: static)()
    return GangReach(queue, gang, static, best, _least_k(policy, gpus, own, gang), policy.law)


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
            Claim(
                each.name, min(request, 1e12), each.deserved, each.limit, weight, usage, each.priority,
                parent=each.parent,
            )
        )  # fmt: skip
    return divide(DivisionProblem("reach", gpus, k, tuple(claims)), kai_compat=True).shares[own.name]


def _in_turn(policy: Policy, gpus: float, own: QueuePolicy, gang: float) -> float:
    """Return the queue's share in a turn that reduces its siblings' weights as far as the ratio allows."""
    if policy.turns.ratio <= 0 or gang <= policy.turns.lump * gpus or UNLIMITED < own.limit < gang:
        return 0.0
    return _share(policy, gpus, own, gang, 0.0, policy.turns.ratio)
