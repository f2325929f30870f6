"""Which k, or which turn, lets a gang in: the reach of a policy's feedback. Pure.

A scheduler lets a queue reclaim only while it stays within its fair share with the gang. History can lift
a share only so far: with k the over-quota share of a queue that used nothing while the others used
everything is about n (1 + k) of the pool, so a gang of g GPUs needs about k = g / (n C) - 1. The exact
figure, rounding included, comes from running the division.

Source of the bound: KAI-Scheduler resource_division.go, commit d5bc503a.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from accountant.wire import Policy, QueuePolicy
from fairshare.division import divide
from fairshare.model import UNLIMITED, Case, Claim

MOST_K = 1000.0
_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class Reach:
    """What a queue can be due for one gang. static: GPUs with no history at all; best: the most the
    configured law can make of it; needed_k: the least k that admits the gang, None where none does."""

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
        """For people. held: the part of `gang` that the queue holds already, for others."""
        head = f"a gang of {self.gang - held:g} GPUs in {self.queue!r}"
        if held > 0:
            head = f"{head}, beside the {held:g} that it holds,"
        if self.static >= self.gang:
            return f"{head} fits its share of {self.static:g}"
        if self.admitted:
            return f"{head} is larger than its share of {self.static:g}; history can lift it to {self.best:g}"
        if self.needed_k is None:
            return f"{head} can never be admitted: no history lifts its share of {self.static:g} above {self.best:g}"
        cure = f"k >= {self.needed_k:.3f} would do"
        if self.law != "kai":
            cure = f"law `deficit` gives turns within its ratio, law `kai` would need k >= {self.needed_k:.3f}"
        return f"{head} is never admitted by the configured law: its share reaches at most {self.best:g}; {cure}"


def reach(policy: Policy, gpus: float, queue: str, gang: float) -> Reach:
    """How far the policy's law can lift `queue` in a cluster of `gpus` in which everybody else asks for
    everything and used everything. Raises KeyError for an unknown queue."""
    queues = {each.name: each for each in policy.queues}
    own = queues[queue]
    static = _share(policy, gpus, own, gang, 0.0)
    best = {
        "kai": lambda: _share(policy, gpus, own, gang, policy.k),
        "deficit": lambda: max(static, _in_turn(policy, gpus, own, gang)),
    }.get(policy.law, lambda: static)()
    return Reach(queue, gang, static, best, _least_k(policy, gpus, own, gang), policy.law)


def _least_k(policy: Policy, gpus: float, own: QueuePolicy, gang: float) -> float | None:
    if _share(policy, gpus, own, gang, MOST_K) < gang:
        return None
    low, high = 0.0, MOST_K
    if _share(policy, gpus, own, gang, 0.0) >= gang:
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _share(policy, gpus, own, gang, middle) >= gang else (middle, high)
    return high


def _share(policy: Policy, gpus: float, own: QueuePolicy, gang: float, k: float, ratio: float | None = None) -> float:
    """Share of `own` with nothing used, its siblings having used all they had between them by weight."""
    above = _path(policy, own)
    claims = []
    for each in policy.queues:
        siblings = [other for other in policy.queues if other.parent == each.parent and other.name not in above]
        whole = sum(other.weight for other in siblings)
        used = 0.0 if each.name in above or whole == 0 else each.weight / whole
        asks = gang if each.name == own.name else inf if each.name not in above else gpus
        weight = each.weight
        if ratio is not None and each.name not in above and each.parent == own.parent:
            weight = min(weight, own.weight / ratio)
        claims.append(
            Claim(
                each.name, min(asks, 1e12), each.deserved, each.limit, weight, used, each.priority,
                parent=each.parent,
            )
        )  # fmt: skip
    return divide(Case("reach", gpus, k, tuple(claims)), kai_compat=True).shares[own.name]


def _in_turn(policy: Policy, gpus: float, own: QueuePolicy, gang: float) -> float:
    """Share in a turn, its siblings' weights at the least the ratio allows."""
    if policy.turns.ratio <= 0 or gang <= policy.turns.lump * gpus or UNLIMITED < own.limit < gang:
        return 0.0
    return _share(policy, gpus, own, gang, 0.0, policy.turns.ratio)


def _path(policy: Policy, own: QueuePolicy) -> frozenset[str]:
    """The queue and everything above it."""
    parents = {queue.name: queue.parent for queue in policy.queues}
    path = [own.name]
    while (parent := parents[path[-1]]) is not None:
        path.append(parent)
    return frozenset(path)
