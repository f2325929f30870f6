"""Runs the controller's law in a replay: the usage of flat queues over the policy's window, and their weights.

Usage over the window is a running sum, so a control period costs microseconds. A test compares the resulting weights
with those of `calculate_weights` on real answers of the accountant (`tests/demo/test_same_weights.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import exp2
from operator import add, sub

from accountant.wire.policy_models import Policy
from fairshare.laws.feedback_laws import LawColumns, LawQueues, Memory
from fairshare.laws.weight_calculation import law_of, law_results
from fairshare.laws.weight_pacing import paced_values, unpaced
from fairshare.simulator.simulation_model import ControllerView


class Usage:
    """Sums up GPU-seconds, per queue and of the cluster, over a sliding window with or without a half-life."""

    def __init__(self, queues: int, size_s: int, half_life_s: int | None) -> None:
        self._size_s, self._half_life_s = size_s, half_life_s
        self._sums = [0.0] * (queues + 1)
        self._last: list[int] = [0] * (queues + 1)
        self._last_s = 0
        self._slices: deque[tuple[int, list[float]]] = deque()

    def at(self, view: ControllerView) -> tuple[list[float], float]:
        """Return the GPU-seconds per queue and those of the whole cluster in the window that ends now."""
        span = view.now_s - self._last_s
        now = [*view.used, self._last[-1] + view.capacity * span]
        new: list[float] = list(map(sub, now, self._last))
        if self._half_life_s is None:
            sums = list(map(add, self._sums, new))
        else:
            # All usage of a short slice counts as if it happened at the middle of the slice.
            decay, middle = exp2(-span / self._half_life_s), exp2(-span / 2 / self._half_life_s)
            new = [amount * middle for amount in new]
            sums = [old * decay + amount for old, amount in zip(self._sums, new, strict=True)]
        self._slices.append((view.now_s, new))
        while self._slices and self._slices[0][0] <= view.now_s - self._size_s:
            at, expired = self._slices.popleft()
            decay = 1.0 if self._half_life_s is None else exp2(-(view.now_s - at) / self._half_life_s)
            sums = [total - amount * decay for total, amount in zip(sums, expired, strict=True)]
        self._sums, self._last, self._last_s = sums, now, view.now_s
        return sums[:-1], sums[-1]


class Feedback:
    """Applies a policy's law to flat queues in every control period. Lists are in the order of the policy's queues.

    targets: each queue's part of the pool by quota and weight (`weight_calculation.static_parts`)."""

    def __init__(self, policy: Policy, targets: Mapping[str, float]) -> None:
        self._policy, self._law = policy, law_of(policy)
        queues = policy.queues
        self._names = tuple(queue.name for queue in queues)
        self._indices = {name: q for q, name in enumerate(self._names)}
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

    def __call__(self, view: ControllerView) -> Sequence[float]:
        now_ms = view.now_s * 1000
        used, possible = self._usage.at(view)
        whole = max(possible, sum(used))
        usage = [mine / whole for mine in used] if whole > 0 else [0.0] * len(used)
        reclaims = list(map(sub, view.reclaims, self._reclaims))
        self._reclaims = list(view.reclaims)
        columns = LawColumns(
            self._names, self._weights, self._targets, usage, view.asked,
            list(map(float, view.held)), self._deserved, self._limits, view.gang, self._in_force, reclaims,
        )  # fmt: skip
        siblings = LawQueues(columns, float(view.capacity), whole / view.capacity, now_ms, explain=False)
        results = list(law_results(self._law, siblings, self._policy, self._memory))
        in_force = list(self._in_force)
        for _, result, names, values in results:
            self._pace(in_force, names, values, now_ms, at_once=self._unpaced or result.turn is not None)
        # Only a law that is called once, for all queues, keeps a memory: the first result has it.
        self._memory = results[0][1].memory
        self._in_force = in_force
        return in_force

    def _pace(
        self, in_force: list[float], names: Sequence[str], values: Sequence[float], now_ms: int, *, at_once: bool
    ) -> None:
        """Change the weights in `in_force` to `values`, or towards them as far as the bounds allow in one cycle.

        at_once: True: change the weights to `values` whatever the bounds."""
        indices, changed_ms, direction, bounds = self._indices, self._changed_ms, self._direction, self._policy.bounds
        for name, wanted in zip(names, values, strict=True):
            q = indices[name]
            weight = in_force[q]
            # A weight of 0 stays 0.
            if wanted != weight and weight:
                value = (
                    wanted if at_once else paced_values(wanted, weight, changed_ms[q], direction[q], bounds, now_ms)[1]
                )
                if value != weight:
                    in_force[q], changed_ms[q], direction[q] = value, now_ms, 1 if value > weight else -1
