"""Runs the controller's law in a replay: the usage of flat queues over the policy's window, and their weights.

Usage over the window is a running sum, so a control period costs microseconds. A test compares the resulting weights
with those of `calculate_weights` on real answers of the accountant (`tests/demo/test_same_weights.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp2
from operator import add, sub

from accountant.wire.policy_models import Policy
from fairshare.laws.feedback_law import LawColumns, LawQueues, Memory
from fairshare.laws.weight_calculation import sibling_weights
from fairshare.simulator.simulation_model import ControllerView


class SlidingUsage:
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
    """Computes the weights of flat queues by a policy in every control period. Lists are in the order of its queues.

    scheduler_k: the strength with which the scheduler counts the same history by itself.
    turns_only: whether the configured weights stay except in a turn, as for such a scheduler."""

    def __init__(self, policy: Policy, *, scheduler_k: float = 0.0, turns_only: bool = False) -> None:
        queues = policy.queues
        self._policy, self._scheduler_k, self._turns_only = policy, scheduler_k, turns_only
        self._names = tuple(queue.name for queue in queues)
        self._weights = tuple(queue.weight for queue in queues)
        self._deserved, self._limits = [queue.deserved for queue in queues], [queue.limit for queue in queues]
        self._bursts = [queue.turn == "burst" for queue in queues]
        self._usage = SlidingUsage(len(queues), policy.window.size, policy.window.half_life)
        self._memory: Memory = {}

    def __call__(self, view: ControllerView) -> Sequence[float]:
        used, possible = self._usage.at(view)
        whole = max(possible, sum(used))
        usage = [mine / whole for mine in used] if whole > 0 else [0.0] * len(used)
        columns = LawColumns(
            self._names, self._weights, usage, view.asked, list(map(float, view.held)), self._deserved, self._limits,
            view.gang, self._bursts,
        )  # fmt: skip
        siblings = LawQueues(columns, float(view.capacity), view.now_s * 1000, self._scheduler_k, explain=False)
        result = sibling_weights(siblings, self._policy, self._memory)
        self._memory = result.memory
        return self._weights if self._turns_only and result.turn is None else result.values
