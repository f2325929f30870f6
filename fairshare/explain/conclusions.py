"""Says in one sentence each who gains, who loses and whose waits change under another policy or weight.

Each is computed from the figures of the table that it stands beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fairshare.explain.try_weight import TriedQueue
from fairshare.explain.what_if_simulation import Comparison

LEAST_GPU_H: Final = 0.05
LEAST_WAIT_H: Final = 0.05
"""Less is shown as no change."""
LEAST_GPUS: Final = 0.005
_NAMED: Final = 4
"""Queues that a sentence names; others are counted."""


def of_replay(result: Comparison) -> tuple[str, ...]:
    """The conclusions of a replay of two policies."""
    held = _gains_and_losses(
        [(row.queue, row.then.gpu_hours - row.now.gpu_hours, row.now.gpu_hours) for row in result.rows],
        LEAST_GPU_H, "GPU-hours", ".1f",
    )  # fmt: skip
    waits = [(row.queue, row.then.mean_wait_h - row.now.mean_wait_h) for row in result.rows if row.now.jobs]
    shorter, longer = _both(waits, LEAST_WAIT_H)
    parts = [f"{_named(some, '.1f', 'h')} {word}" for some, word in ((shorter, "shorter"), (longer, "longer")) if some]
    changed = f"Mean waits: {'; '.join(parts)}." if parts else "No queue's mean wait changes by 0.1 h or more."
    return held, changed


def of_weight(rows: Sequence[TriedQueue]) -> str:
    """The conclusion of another weight of one queue. Of queues above others, only the lowest ones are named."""
    lowest = [
        row for row, below in zip(rows, [*rows[1:], None], strict=True) if below is None or below.depth <= row.depth
    ]
    return _gains_and_losses(
        [(row.queue, row.gpus_then - row.gpus, row.gpus) for row in lowest], LEAST_GPUS, "GPUs", ".2f"
    )


def _gains_and_losses(changes: Sequence[tuple[str, float, float]], least: float, unit: str, form: str) -> str:
    """changes: queue, change, and the figure before."""
    before = {queue: was for queue, _, was in changes}
    losing, gaining = _both([(queue, change) for queue, change, _ in changes], least)
    if not losing and not gaining:
        return f"No queue gains or loses {unit}."
    parts = [
        f"{word}: {_named(some, form, unit, before)}" for some, word in ((gaining, "gains"), (losing, "losses")) if some
    ]
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _both(
    changes: Sequence[tuple[str, float]], least: float
) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """The changes below and above zero by `least` or more, the largest first."""
    found = sorted(changes, key=lambda one: (-abs(one[1]), one[0]))
    return [one for one in found if one[1] <= -least], [one for one in found if one[1] >= least]


def _named(changes: Sequence[tuple[str, float]], form: str, unit: str, before: dict[str, float] | None = None) -> str:
    def text(queue: str, change: float) -> str:
        was = before.get(queue, 0.0) if before is not None else 0.0
        part = f" ({change / was:+.0%})".replace("-", "−").replace("%", " %") if was > 0 else ""
        return f"{queue} {abs(change):,{form}} {unit}{part}"

    shown = [text(*one) for one in changes[:_NAMED]]
    more = len(changes) - _NAMED
    return ", ".join([*shown, *([f"and {more} {'others' if more > 1 else 'other'}"] if more > 0 else [])])
