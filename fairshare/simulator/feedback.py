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

from accountant.wire import Policy
from fairshare.simulator.replay import View
from fairshare.weighing.laws import Columns, Memory, Siblings
from fairshare.weighing.pacing import strides, unpaced
from fairshare.weighing.weights import law_of, verdicts


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
        if self._half_life_s is None:
            sums = list(map(add, self._sums, fresh))
        else:
            # Of a short slice: as if all of it had been used at its middle.
            fade, middle = exp2(-span / self._half_life_s), exp2(-span / 2 / self._half_life_s)
            fresh = [new * middle for new in fresh]
            sums = [old * fade + new for old, new in zip(self._sums, fresh, strict=True)]
        self._slices.append((view.now_s, fresh))
        while self._slices and self._slices[0][0] <= view.now_s - self._size_s:
            at, gone = self._slices.popleft()
            age = 1.0 if self._half_life_s is None else exp2(-(view.now_s - at) / self._half_life_s)
            sums = [old - past * age for old, past in zip(sums, gone, strict=True)]
        self._sums, self._last, self._last_s = sums, now, view.now_s
        return sums[:-1], sums[-1]


class Feedback:
    """A policy's law over flat queues, asked once a control period. Lists by queue, in the policy's order."""

    def __init__(self, policy: Policy, targets: Mapping[str, float]) -> None:
        """targets: part of the pool of every queue by quota and weight (`fairshare.weighing.tree.static_parts`)."""
        self._policy, self._law = policy, law_of(policy)
        queues = policy.queues
        self._names = tuple(queue.name for queue in queues)
        self._places = {name: q for q, name in enumerate(self._names)}
        self._weights = tuple(queue.weight for queue in queues)
        self._targets = tuple(targets[name] for name in self._names)
        self._deserved, self._limits = [queue.deserved for queue in queues], [queue.limit for queue in queues]
        self._unpaced = unpaced(policy.bounds)
        self._usage = Usage(len(queues), policy.window.size, policy.window.half_life)
        self._memory: Memory = {}
        self._in_force = list(self._weights)
        self._changed_ms: list[int | None] = [None] * len(queues)
        self._direction = [0] * len(queues)
        self._reclaims = [0] * len(queues)

    def __call__(self, view: View) -> Sequence[float]:
        now_ms = view.now_s * 1000
        used, possible = self._usage.at(view)
        whole = max(possible, sum(used))
        usage = [mine / whole for mine in used] if whole > 0 else [0.0] * len(used)
        reclaims = list(map(sub, view.reclaims, self._reclaims))
        self._reclaims = list(view.reclaims)
        columns = Columns(
            self._names, self._weights, self._targets, usage, view.asked,
            list(map(float, view.held)), self._deserved, self._limits, view.gang, self._in_force, reclaims,
        )  # fmt: skip
        siblings = Siblings(columns, float(view.capacity), whole / view.capacity, now_ms, explain=False)
        rulings = list(verdicts(self._law, siblings, self._policy, self._memory))
        in_force = list(self._in_force)
        for _, verdict, names, values in rulings:
            if self._unpaced:
                self._jump(in_force, names, values)
            else:
                self._pace(in_force, names, values, now_ms, turn=verdict.turn is not None)
        # Who is asked again takes his own memory best as it was; a law that is asked of some at a time keeps none.
        self._memory = rulings[0][1].memory
        self._in_force = in_force
        return in_force

    def _jump(self, in_force: list[float], names: Sequence[str], values: Sequence[float]) -> None:
        """`_pace` where nothing holds a weight back."""
        places = self._places
        for name, wanted in zip(names, values, strict=True):
            q = places[name]
            if in_force[q]:
                in_force[q] = wanted

    def _pace(
        self, in_force: list[float], names: Sequence[str], values: Sequence[float], now_ms: int, *, turn: bool
    ) -> None:
        """Weights from these as far towards what is wanted as one cycle may go; a turn is there at once."""
        places, changed_ms, direction, bounds = self._places, self._changed_ms, self._direction, self._policy.bounds
        for name, wanted in zip(names, values, strict=True):
            q = places[name]
            held = in_force[q]
            # A queue of weight 0 stays one, and nothing paces what does not move.
            if wanted != held and held:
                value = wanted if turn else strides(wanted, held, changed_ms[q], direction[q], bounds, now_ms)[1]
                if value != held:
                    in_force[q], changed_ms[q], direction[q] = value, now_ms, 1 if value > held else -1
