"""Draws and records the explanation of a queue or of a pod."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from accountant.wire.decision_text import trace_in_words
from accountant.wire.policy_models import Decision
from fairshare.core.queues_and_weights import UNLIMITED, Gang
from fairshare.explain.plan_tables import indented, lost_words, number, titled_table
from fairshare.explain.queue_and_pod_explanation import (
    ModelFigures,
    PodAccount,
    QueueAccount,
    QueueLevel,
)
from gputally.base.instants import utc_text

MOST_GANGS = 8


def queue_view(account: QueueAccount) -> RenderableType:
    """Render the explanation of a queue: sentences, share, arithmetic, publication, waiting gangs, past decisions."""
    own = account.own
    parts: list[RenderableType] = [
        Text(
            f"{own.queue.name} at {account.target}, {number(account.gpus, 1)} GPUs{lost_words(account.lost)}, "
            f"{number(account.free, 1)} free",
            "bold",
        ),
        *_lines(account.sentences),
        *_heading("What would change it", account.cures),
        _shares(account.levels),
        *_models(account.models),
        _arithmetic(account.levels),
        *_steps(account.levels),
        *_heading("Publication", _publication(account)),
    ]
    if account.gangs:
        parts.append(_gangs(account.gangs))
    return Group(*parts, *_past(account.past), Text())


def pod_view(account: PodAccount) -> RenderableType:
    """Render the explanation of a pod, then that of its queue."""
    queue = f", queue {account.queue.own.queue.name}" if account.queue is not None else ""
    parts: list[RenderableType] = [
        Text(f"{account.name}{queue}", "bold"),
        *_lines(account.sentences),
        *_heading("What would change it", account.cures),
        *_past(account.past),
    ]
    if account.queue is not None:
        parts += [Text(), queue_view(account.queue)]
    return Group(*parts)


def queue_json(account: QueueAccount) -> dict[str, Any]:
    """Return the explanation of a queue for JSON, with unrounded numbers."""
    return {
        "queue": account.own.queue.name,
        "target": account.target,
        "gpus": account.gpus,
        "lost": dict(account.lost),
        "free": account.free,
        "sentences": list(account.sentences),
        "would_change_it": list(account.cures),
        "levels": [_level_json(level) for level in account.levels],
        "published": asdict(account.published),
        "waiting": [_gang_json(gang) for gang in account.gangs],
        "budgets": [budget.model_dump(mode="json") for budget in account.budgets],
        "models": [
            {"gpus": each.gpus, "configured": each.queue.model_dump(mode="json"), **asdict(each.entitlement)}
            for each in account.models
        ],
        "past": [decision.model_dump(mode="json") for decision in account.past],
    }


def pod_json(account: PodAccount) -> dict[str, Any]:
    """Return the explanation of a pod and of its queue for JSON, with unrounded numbers."""
    return {
        "pod": account.name,
        "exists": account.pod is not None,
        "gpus": account.pod.gpus if account.pod is not None else None,
        "node": account.pod.node if account.pod is not None else None,
        "gang": _gang_json(account.gang) if account.gang is not None else None,
        "sentences": list(account.sentences),
        "would_change_it": list(account.cures),
        "past": [decision.model_dump(mode="json") for decision in account.past],
        "queue": queue_json(account.queue) if account.queue is not None else None,
    }


def _shares(levels: Sequence[QueueLevel]) -> Table:
    figures = ("guaranteed", "limit", "weight", "without history", "due", "holds", "asks", "left")
    table = titled_table("\nShare, GPUs", ("queue",), figures)
    for depth, level in enumerate(levels):
        due, queue = level.entitlement, level.queue
        limit = "none" if queue.limit == UNLIMITED else number(queue.limit, 1)
        table.add_row(
            indented(depth, queue.name), number(queue.deserved, 1), limit, number(queue.weight),
            number(due.without_history, 2), number(due.gpus, 2), number(due.allocated, 1), number(due.requested, 1),
            f"{level.left:+.1f}",
        )  # fmt: skip
    return table


def _models(models: Sequence[ModelFigures]) -> Iterator[Table]:
    """Yield a table of the figures by GPU model, if there are any."""
    figures = ("guaranteed", "limit", "weight", "used", "without history", "due", "holds", "asks")
    if models:
        table = titled_table("\nBy GPU model", ("GPUs",), figures)
        for each in models:
            due, queue = each.entitlement, each.queue
            limit = "none" if queue.limit == UNLIMITED else number(queue.limit, 1)
            table.add_row(
                each.gpus, number(queue.deserved, 1), limit, number(queue.weight), f"{due.usage_ratio:.2%}",
                number(due.without_history, 2), number(due.gpus, 2), number(due.allocated, 1),
                number(due.requested, 1),
            )  # fmt: skip
        yield table


def _arithmetic(levels: Sequence[QueueLevel]) -> Table:
    figures = ("fair share", "used", "law's answer", "bounds", "in force", "new weight")
    table = titled_table("\nHistory into weight", ("queue",), figures, folded="why")
    for depth, level in enumerate(levels):
        if level.weight is None:
            table.add_row(indented(depth, level.queue.name), *[""] * 6, "the target has no object for it")
            continue
        steps = level.weight.explanation
        table.add_row(
            indented(depth, level.queue.name), f"{steps.n:.2%}", f"{steps.u:.2%}", number(steps.proportional, 4),
            f"{number(steps.lower, 3)} … {number(steps.upper, 3)}", number(steps.previous, 4),
            number(steps.value, 4), level.weight.why,
        )  # fmt: skip
    return table


def _steps(levels: Sequence[QueueLevel]) -> Iterator[RenderableType]:
    """Render the law's own numbers in the order of their computation."""
    lines = [
        f"{level.queue.name}: "
        + ", ".join(f"{step.lower()} {figure}" for step, _, figure in trace_in_words(level.weight.explanation.trace))
        for level in levels
        if level.weight is not None and level.weight.explanation.trace
    ]
    yield from _heading("Step by step", lines)


def _publication(account: QueueAccount) -> Iterator[str]:
    published = account.published
    yield f"mode {published.mode}: {number(published.now, 4)} in force, {number(published.wanted, 4)} wanted"
    yield from published.obstacles


def _gangs(gangs: Sequence[Gang]) -> Table:
    more = f", {MOST_GANGS} of {len(gangs)}" if len(gangs) > MOST_GANGS else ""
    title = f"\nWaiting{more}, next first"
    table = titled_table(title, ("workload", "queue"), ("priority", "needs", "holds", "since"))
    for gang in gangs[:MOST_GANGS]:
        table.add_row(
            f"{gang.namespace}/{gang.name}", gang.queue, str(gang.priority), number(gang.minimum, 1),
            number(gang.allocated, 1), utc_text(gang.created_ms) if gang.created_ms is not None else "",
        )  # fmt: skip
    return table


def _past(past: Sequence[Decision]) -> Iterator[RenderableType]:
    yield from _heading(
        "Decided before", [f"{utc_text(d.at_ms)}  {d.kind} ({d.mode})  {_change(d)}{d.reason}" for d in past]
    )


def _change(decision: Decision) -> str:
    if decision.value is None:
        return ""
    return f"{number(decision.previous, 4)} -> {number(decision.value, 4)}: "


def _heading(title: str, lines: Sequence[str] | Iterator[str]) -> Iterator[RenderableType]:
    lines = tuple(lines)
    if lines:
        yield Text(f"\n{title}", "bold")
        yield from _lines(lines)


def _lines(lines: Sequence[str]) -> list[RenderableType]:
    return [Padding(Text(f"- {line}", overflow="fold"), (0, 0, 0, 2)) for line in lines]


def _level_json(level: QueueLevel) -> dict[str, Any]:
    return {
        "queue": level.queue.name,
        "configured": level.queue.model_dump(mode="json"),
        "entitlement": asdict(level.entitlement),
        "left": level.left,
        "standing": asdict(level.standing) if level.standing is not None else None,
        "weight": asdict(level.weight) if level.weight is not None else None,
    }


def _gang_json(gang: Gang) -> dict[str, Any]:
    return {
        "kind": gang.kind.kind, "namespace": gang.namespace, "name": gang.name, "queue": gang.queue,
        "requested": gang.requested, "allocated": gang.allocated, "minimum": gang.minimum, "waits": gang.waits,
        "priority": gang.priority, "created_ms": gang.created_ms,
    }  # fmt: skip
