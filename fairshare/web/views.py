"""A cycle as the pages show it: every queue in its tree, what it was due and had, and what was published.

Numbers are those of the cycle (`fairshare.report`); here they are put side by side. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from accountant.wire import Policy, QueuePolicy, UsageWindow
from agent.units import MS_PER_HOUR
from fairshare.model import UNLIMITED, Condition, Standing, Weight
from fairshare.report import CycleReport, Outcome, TargetReport
from fairshare.weighing.tree import static_parts

State = Literal["published", "steady", "tried", "held", "trouble", "none"]
"""What became of a queue's weight: written; within its deadband, so that nothing had to be; only tried (dry-run); held
back for all queues; not taken by the cluster; or there is no object for it."""
_TROUBLE = frozenset({"contested", "refused", "gone", "unavailable", "deferred"})
_WORDS: Mapping[State, str] = {
    "published": "published",
    "steady": "in force",
    "tried": "dry-run",
    "held": "held",
    "trouble": "not effective",
    "none": "no object",
}


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One queue. entitled: what quotas and weights come to while all ask, as a part of the cluster (0..1). used: the
    part of the window's capacity that it and what is below it used; None without a window. due, held, asked: GPUs
    now, None where the target was not weighed. owed_gpu_h, repaid_ms: what the deficit law owes it, and until when
    at the present rate; None where it is owed nothing. state, why: what became of its weight."""

    name: str
    depth: int
    queue: QueuePolicy
    entitled: float
    used: float | None
    due: float | None
    held: float | None
    asked: float | None
    configured: float
    weight: float | None
    previous: float | None
    owed_gpu_h: float | None
    repaid_ms: int | None
    exhausted: bool
    state: State
    why: str

    @property
    def word(self) -> str:
        return _WORDS[self.state]

    @property
    def limit(self) -> float | None:
        return None if self.queue.limit == UNLIMITED else self.queue.limit


@dataclass(frozen=True, slots=True)
class TargetView:
    """One target. unassigned: part of the window's capacity that no queue of the policy accounts for."""

    name: str
    mode: str
    gpus: float
    rows: tuple[QueueRow, ...]
    conditions: tuple[Condition, ...]
    degraded: Mapping[str, str]
    unassigned: float | None


def targets(policy: Policy, report: CycleReport) -> tuple[TargetView, ...]:
    """In the order of the report. Of a target that knows no GPUs, entitlements are parts of nothing: 0."""
    return tuple(_target(policy, report, target) for target in report.targets)


def ordered(policy: Policy) -> Iterator[tuple[int, QueuePolicy]]:
    """(depth, queue), every queue behind its parent, siblings in the order of the policy."""
    below: dict[str | None, list[QueuePolicy]] = {}
    for queue in policy.queues:
        below.setdefault(queue.parent, []).append(queue)

    def walk(parent: str | None, depth: int) -> Iterator[tuple[int, QueuePolicy]]:
        for queue in below.get(parent, ()):
            yield depth, queue
            yield from walk(queue.name, depth + 1)

    yield from walk(None, 0)


def used_part(window: UsageWindow | None, queue: str) -> float | None:
    """Of the window's capacity, by the queue and what is below it; None where nothing is known."""
    if window is None or window.capacity <= 0:
        return None
    return window.usage.get(queue, 0) / window.capacity


def _target(policy: Policy, report: CycleReport, target: TargetReport) -> TargetView:
    parts = static_parts(policy, target.gpus) if target.gpus > 0 else {}
    dues = {each.queue: each for each in target.entitlements}
    weights = {each.queue: each for each in target.weights}
    outcomes = {each.apply.queue: each for each in target.outcomes}
    rows = []
    for depth, queue in ordered(policy):
        name = queue.name
        due, weight, standing = dues.get(name), weights.get(name), target.standings.get(name)
        owed, until = _owed(weight, report.at_ms)
        state, why = _state(report, target, weight, outcomes.get(name), standing)
        rows.append(
            QueueRow(
                name, depth, queue, parts.get(name, 0.0), used_part(report.window, name),
                due.gpus if due is not None else None,
                due.allocated if due is not None else standing.allocated if standing is not None else None,
                due.requested if due is not None else standing.requested if standing is not None else None,
                queue.weight, weight.value if weight is not None else standing.weight if standing is not None else None,
                standing.weight if standing is not None else None, owed, until, name in target.exhausted, state, why,
            )
        )  # fmt: skip
    window = report.window
    unassigned = window.unassigned / window.capacity if window is not None and window.capacity > 0 else None
    return TargetView(
        target.target, target.mode, target.gpus, tuple(rows), target.conditions, target.degraded, unassigned
    )


def _owed(weight: Weight | None, at_ms: int) -> tuple[float | None, int | None]:
    """GPU-hours, and when they are repaid at the present rate (`fairshare.deficit`)."""
    trace = weight.explanation.trace if weight is not None else {}
    owed, rate = trace.get("owed_gpu_h"), trace.get("rate_gpus", 0.0)
    if owed is None or owed <= 0:
        return None, None
    return owed, at_ms + round(owed / rate * MS_PER_HOUR) if rate > 0 else None


def _state(
    report: CycleReport,
    target: TargetReport,
    weight: Weight | None,
    outcome: Outcome | None,
    standing: Standing | None,
) -> tuple[State, str]:
    if report.hold is not None:
        return "held", f"{report.hold.reason}: {report.hold.message}"
    if standing is None:
        return "none", "the target has no object for this queue"
    if outcome is not None and outcome.result in _TROUBLE:
        return "trouble", outcome.detail or outcome.result
    why = weight.why if weight is not None else "; ".join(target.degraded.values()) or "nothing is published for it"
    if outcome is not None and outcome.result == "would-apply":
        return "tried", why
    if outcome is not None:
        return "published", why
    return "steady", why
