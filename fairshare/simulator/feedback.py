"""The controller in the loop of a replay: the same law, bounds and pace as in the cluster.

What the accountant would answer (usage over the policy's window) is kept here as running sums, so a
control period costs microseconds; `tests/demo/test_same_weights.py` holds it against
`fairshare.weighing.weights.weigh` on the accountant's own words. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import exp2
from operator import add, sub
from typing import NamedTuple

from accountant.wire import Policy
from fairshare.simulator.replay import View
from fairshare.weighing.laws import Memory, Sibling, Siblings
from fairshare.weighing.weights import law_of, published, verdicts


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
        span = view.now_s - self._last_s
        now = [*view.used, self._last[-1] + view.capacity * span]
        fresh: list[float] = list(map(sub, now, self._last))
        sums = self._sums
        if self._half_life_s is not None:
            # Of a short slice: as if all of it had been used at its middle.
            fade, middle = exp2(-span / self._half_life_s), exp2(-span / 2 / self._half_life_s)
            fresh = [new * middle for new in fresh]
            sums = [old * fade for old in sums]
        sums = list(map(add, sums, fresh))
        self._slices.append((view.now_s, fresh))
        while self._slices and self._slices[0][0] <= view.now_s - self._size_s:
            at, gone = self._slices.popleft()
            age = 1.0 if self._half_life_s is None else exp2(-(view.now_s - at) / self._half_life_s)
            sums = [old - past * age for old, past in zip(sums, gone, strict=True)]
        self._sums, self._last, self._last_s = sums, now, view.now_s
        return sums[:-1], sums[-1]


class _Standing(NamedTuple):
    """What `pace` asks of a weight in force; a tuple, because replays make hundreds of thousands of them."""

    weight: float
    changed_ms: int | None = None
    direction: int = 0


class Feedback:
    """A policy's law over flat queues, asked once a control period."""

    def __init__(self, policy: Policy, targets: Mapping[str, float]) -> None:
        """targets: part of the pool of every queue by quota and weight (`fairshare.weighing.tree.static_parts`)."""
        self._policy, self._law = policy, law_of(policy)
        queues = policy.queues
        self._names = [queue.name for queue in queues]
        self._weights = [queue.weight for queue in queues]
        self._targets = [targets[name] for name in self._names]
        self._deserved, self._limits = [queue.deserved for queue in queues], [queue.limit for queue in queues]
        self._usage = Usage(len(queues), policy.window.size, policy.window.half_life)
        self._memory: Memory = {}
        self._standing = {queue.name: _Standing(queue.weight) for queue in queues}
        self._in_force = list(self._weights)
        self._reclaims = [0] * len(queues)

    def __call__(self, view: View) -> Sequence[float]:
        now_ms = view.now_s * 1000
        used, possible = self._usage.at(view)
        whole = max(possible, sum(used))
        usage = [mine / whole for mine in used] if whole > 0 else [0.0] * len(used)
        columns = (
            self._names, self._weights, self._targets, usage, view.asked, view.held, self._deserved, self._limits,
            view.gang, self._in_force, map(sub, view.reclaims, self._reclaims),
        )  # fmt: skip
        members = tuple(map(Sibling._make, zip(*columns, strict=True)))
        self._reclaims = list(view.reclaims)
        siblings = Siblings(members, float(view.capacity), whole / view.capacity, now_ms, explain=False)
        memory: dict[str, Mapping[str, float]] = {}
        standing, moved = self._standing, False
        for _, verdict, values in verdicts(self._law, siblings, self._policy, self._memory):
            memory |= verdict.memory
            turn = verdict.turn is not None
            for name, wanted in values.items():
                # A queue of weight 0 stays one, and nothing paces what does not move.
                before = standing[name]
                if before.weight and wanted != before.weight:
                    value = published(wanted, before, self._policy, now_ms, turn=turn).value
                    if value != before.weight:
                        standing[name] = _Standing(value, now_ms, 1 if value > before.weight else -1)
                        moved = True
        self._memory = memory
        if moved:
            self._in_force = [standing[name].weight for name in self._names]
        return self._in_force
