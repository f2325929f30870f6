"""The controller in the loop of a replay: the same law, bounds and pace as in the cluster.

What the accountant would answer (usage over the policy's window) is kept here as running sums, so a
control period costs microseconds; `tests/simulator/test_feedback.py` holds it against
`fairshare.weighing.weights.weigh` on the accountant's own words. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import exp2
from operator import sub

from accountant.wire import Policy
from fairshare.model import Standing
from fairshare.simulator.replay import View
from fairshare.weighing.laws import Memory, Sibling, Siblings
from fairshare.weighing.weights import effective_s, law_of, published, verdicts


class Usage:
    """GPU-seconds per queue and of the cluster over a sliding window, with or without a half-life."""

    def __init__(self, queues: int, size_s: int, half_life_s: int | None) -> None:
        self._size_s, self._half_life_s = size_s, half_life_s
        self._sums = [0.0] * (queues + 1)
        self._last: list[int] = [0] * (queues + 1)
        self._last_s = 0
        self._slices: deque[tuple[int, list[float]]] = deque()

    def at(self, view: View) -> tuple[list[float], float]:
        """(per queue, of the capacity), including what was used since the last call."""
        now = [*view.used, self._last[-1] + view.capacity * (view.now_s - self._last_s)]
        span = view.now_s - self._last_s
        fresh = [float(new - old) for new, old in zip(now, self._last, strict=True)]
        if self._half_life_s is not None:
            # Of a short slice: as if all of it had been used at its middle.
            fade, middle = exp2(-span / self._half_life_s), exp2(-span / 2 / self._half_life_s)
            self._sums = [old * fade + new * middle for old, new in zip(self._sums, fresh, strict=True)]
            fresh = [new * middle for new in fresh]
        else:
            self._sums = [old + new for old, new in zip(self._sums, fresh, strict=True)]
        self._slices.append((view.now_s, fresh))
        while self._slices and self._slices[0][0] <= view.now_s - self._size_s:
            at, old_slice = self._slices.popleft()
            age = 1.0 if self._half_life_s is None else exp2(-(view.now_s - at) / self._half_life_s)
            self._sums = [old - gone * age for old, gone in zip(self._sums, old_slice, strict=True)]
        self._last, self._last_s = now, view.now_s
        return self._sums[:-1], self._sums[-1]


class Feedback:
    """A policy's law over flat queues, asked once a control period."""

    def __init__(self, policy: Policy, targets: Mapping[str, float]) -> None:
        """targets: part of the pool of every queue by quota and weight (`fairshare.weighing.tree.static_parts`)."""
        self._policy, self._law = policy, law_of(policy)
        self._configured = [(q.name, q.weight, targets[q.name], q.deserved, q.limit) for q in policy.queues]
        self._usage = Usage(len(policy.queues), policy.window.size, policy.window.half_life)
        self._span_s = effective_s(policy.window)
        self._memory: Memory = {}
        self._standing = {queue.name: Standing(0.0, 0.0, queue.weight) for queue in policy.queues}
        self._reclaims = [0] * len(policy.queues)

    def __call__(self, view: View) -> Sequence[float]:
        now_ms = view.now_s * 1000
        used, possible = self._usage.at(view)
        whole = max(possible, sum(used))
        usage = [mine / whole for mine in used] if whole > 0 else [0.0] * len(used)
        reclaims = list(map(sub, view.reclaims, self._reclaims))
        columns = zip(self._configured, usage, view.asked, view.held, view.gang, reclaims, strict=True)
        members = [
            Sibling(name, weight, target, u, asked, held, deserved, limit, gang, self._standing[name].weight, made)
            for (name, weight, target, deserved, limit), u, asked, held, gang, made in columns
        ]
        self._reclaims = list(view.reclaims)
        siblings = Siblings(tuple(members), float(view.capacity), self._span_s, now_ms, explain=False)
        memory: dict[str, Mapping[str, float]] = {}
        for _, verdict, values in verdicts(self._law, siblings, self._policy, self._memory):
            memory |= verdict.memory
            for name, value in values.items():
                self._publish(name, value, now_ms, turn=verdict.turn is not None)
        self._memory = memory
        return [self._standing[name].weight or 0.0 for name, *_ in self._configured]

    def _publish(self, name: str, wanted: float, now_ms: int, *, turn: bool) -> None:
        standing = self._standing[name]
        if not standing.weight or wanted == standing.weight:
            return  # a queue of weight 0 stays one, and nothing paces what does not move
        value = published(wanted, standing, self._policy, now_ms, turn=turn).value
        if value != standing.weight:
            self._standing[name] = Standing(0.0, 0.0, value, now_ms, 1 if value > standing.weight else -1)
