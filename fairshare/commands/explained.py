"""An account of a queue or a pod as people read it, and as JSON. Numbers are rounded here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from accountant.wire import Decision
from fairshare.explain.explaining import PodAccount, QueueAccount
from fairshare.explain.sentences import Level
from fairshare.explain.tables import indented, lost_words, number
from fairshare.model import UNLIMITED, Gang

MOST_GANGS = 8


def queue_view(account: QueueAccount) -> RenderableType:
    """Verdict first, then share, arithmetic, publication and what waits."""
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
        _arithmetic(account.levels),
        *_steps(account.levels),
        *_heading("Publication", _publication(account)),
    ]
    if account.gangs:
        parts.append(_gangs(account.gangs))
    return Group(*parts, *_past(account.past), Text())


def pod_view(account: PodAccount) -> RenderableType:
    """The pod, then its queue."""
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
    """Every number unrounded."""
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
        "past": [_decision_json(decision) for decision in account.past],
    }


def pod_json(account: PodAccount) -> dict[str, Any]:
    """Every number unrounded; the queue's account inside."""
    return {
        "pod": account.name,
        "exists": account.pod is not None,
        "gpus": account.pod.gpus if account.pod is not None else None,
        "node": account.pod.node if account.pod is not None else None,
        "gang": _gang_json(account.gang) if account.gang is not None else None,
        "sentences": list(account.sentences),
        "would_change_it": list(account.cures),
        "past": [_decision_json(decision) for decision in account.past],
        "queue": queue_json(account.queue) if account.queue is not None else None,
    }


def _shares(levels: Sequence[Level]) -> Table:
    table = _table("Share, GPUs")
    table.add_column("queue")
    for heading in ("guaranteed", "limit", "weight", "without history", "due", "holds", "asks", "left"):
        table.add_column(heading, justify="right")
    for depth, level in enumerate(levels):
        e, q = level.entitlement, level.queue
        table.add_row(
            indented(depth, q.name), number(q.deserved, 1), "none" if q.limit == UNLIMITED else number(q.limit, 1),
            number(q.weight), number(e.without_history, 2), number(e.gpus, 2), number(e.allocated, 1),
            number(e.requested, 1), f"{level.left:+.1f}",
        )  # fmt: skip
    return table


def _arithmetic(levels: Sequence[Level]) -> Table:
    table = _table("History into weight")
    table.add_column("queue")
    for heading in ("share n", "used U", "law's answer", "bounds", "in force", "after step", "new weight"):
        table.add_column(heading, justify="right")
    table.add_column("why", overflow="fold", ratio=1)
    for depth, level in enumerate(levels):
        if level.weight is None:
            table.add_row(indented(depth, level.queue.name), *[""] * 7, "the target has no object for it")
            continue
        x = level.weight.explanation
        table.add_row(
            indented(depth, level.queue.name), f"{x.n:.2%}", f"{x.u:.2%}", number(x.proportional, 4),
            f"{number(x.lower, 3)} … {number(x.upper, 3)}", number(x.previous, 4), number(x.stepped, 4),
            number(x.value, 4), level.weight.why,
        )  # fmt: skip
    return table


def _steps(levels: Sequence[Level]) -> Iterator[RenderableType]:
    """The law's own numbers, as it came to them."""
    lines = [
        f"{level.queue.name}: "
        + "  ".join(f"{name} {number(value, 4)}" for name, value in level.weight.explanation.trace.items())
        for level in levels
        if level.weight is not None and level.weight.explanation.trace
    ]
    weight = levels[-1].weight
    yield from _heading(f"Law {weight.explanation.law if weight is not None else ''}, step by step", lines)


def _publication(account: QueueAccount) -> Iterator[str]:
    p = account.published
    yield f"mode {p.mode}: {number(p.now, 4)} in force, {number(p.wanted, 4)} wanted"
    yield from p.obstacles


def _gangs(gangs: Sequence[Gang]) -> Table:
    more = f", {MOST_GANGS} of {len(gangs)}" if len(gangs) > MOST_GANGS else ""
    table = _table(f"Waiting{more}, next first")
    table.add_column("workload")
    table.add_column("queue")
    for heading in ("priority", "needs", "holds", "since"):
        table.add_column(heading, justify="right")
    for gang in gangs[:MOST_GANGS]:
        table.add_row(
            f"{gang.namespace}/{gang.name}", gang.queue, str(gang.priority), number(gang.minimum, 1),
            number(gang.allocated, 1), _instant(gang.created_ms) if gang.created_ms is not None else "",
        )  # fmt: skip
    return table


def _past(past: Sequence[Decision]) -> Iterator[RenderableType]:
    yield from _heading(
        "Decided before", [f"{_instant(d.at_ms)}  {d.kind} ({d.mode})  {_change(d)}{d.reason}" for d in past]
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


def _level_json(level: Level) -> dict[str, Any]:
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


def _decision_json(decision: Decision) -> dict[str, Any]:
    return decision.model_dump(mode="json")


def _instant(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _table(title: str) -> Table:
    return Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        header_style="",
    )
