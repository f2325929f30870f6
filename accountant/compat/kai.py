"""The rows KAI-Scheduler's usage client expects, out of a window of the ledger.

KAI divides: usage of a queue = row of the queue / capacity. Both are here the exact integral of GPUs over
the window, expressed in the unit of the question (GPUs times steps of its resolution), so that they can be
compared with what Prometheus would have answered. There is exactly one row per queue: KAI keeps the last of
several instead of adding them up. Source: KAI-Scheduler pkg/scheduler/cache/usagedb/prometheus at v0.17.

CPU and memory are not metered: their capacity is a positive constant and their usage empty, which makes
the usage of every queue 0. A capacity of 0 would make it NaN, and nobody would get any over-quota share.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from accountant.compat.promql import UsageQuestion
from accountant.windows import age_weight
from accountant.wire import Policy, QueuePolicy, UsageWindow
from agent.units import MS_PER_SECOND, US_PER_MS

State = Literal["usage", "stale", "plain"]
"""usage: history counts. stale: an error, on which KAI keeps the usage it has. plain: so old that no
history is better than that one: capacity without usage, hence the configured weights."""
QUEUE_LABEL = "queue_name"
REF_PREFIX = "kai:"


@dataclass(frozen=True, slots=True)
class Row:
    labels: Mapping[str, str]
    value: float


def state_at(at_ms: int, watermark_ms: int | None, stale_after_s: int, plain_after_s: int) -> State:
    """How far the ledger's knowledge may be used for a window that ends at `at_ms`."""
    if watermark_ms is None or at_ms - watermark_ms > plain_after_s * MS_PER_SECOND:
        return "plain"
    return "stale" if at_ms - watermark_ms > stale_after_s * MS_PER_SECOND else "usage"


def rows(question: UsageQuestion, window: UsageWindow, policy: Policy, state: State) -> Sequence[Row]:
    """The instant vector, by queue name. state is not `stale`.

    A policy's queue that stands for several of KAI's (refs) gives each of them its whole usage: in the
    policy's eyes they are one queue. Usage of a queue contains that of its descendants, as in KAI."""
    if question.of == "capacity":
        known = question.resource == "gpu" and window.capacity > 0
        value = _steps(question, window, window.capacity) if known else question.window_s / question.resolution_s
        return [Row({}, value)]
    if question.resource != "gpu" or state == "plain" or window.capacity <= 0:
        return []
    return [
        Row({QUEUE_LABEL: name}, _steps(question, window, window.usage.get(queue.name, 0)))
        for name, queue in sorted(_named(policy).items())
    ]


def _named(policy: Policy) -> Mapping[str, QueuePolicy]:
    """The policy's queues by the names KAI has for them."""
    refs = [(ref, queue) for queue in policy.queues for ref in queue.refs if ref.startswith(REF_PREFIX)]
    return {ref.removeprefix(REF_PREFIX): queue for ref, queue in refs}


def _steps(question: UsageQuestion, window: UsageWindow, quantity: int) -> float:
    """A quantity of the window in GPUs times steps, decayed to the question's own reference."""
    value = quantity / (question.resolution_s * MS_PER_SECOND * US_PER_MS)
    if question.half_life_s is None or question.reference_s is None:
        return value
    reference_ms = round(question.reference_s * MS_PER_SECOND)
    return value * age_weight(window.end_ms, reference_ms, question.half_life_s)
