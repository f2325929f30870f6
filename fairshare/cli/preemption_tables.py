"""Draws the verdicts of a preemption with the victims and every reason."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fairshare.preemption.preemption_cycle import PreemptionReport


def preemption_view(report: PreemptionReport) -> RenderableType:
    """Render the verdicts, the victims, and the spared workloads, with every reason."""
    parts: list[RenderableType] = []
    for verdict in report.verdicts:
        parts.append(Text(f"{verdict.claimant} of queue {verdict.queue} {verdict.reason}", "bold"))
        stops = [stop for stop in report.stops if stop.claimant == verdict.claimant]
        if stops:
            table = _preemption_table("victim", "queue", "GPUs", "lost GPU-h", "result", "reason")
            for stop in stops:
                victim = stop.victim
                name = victim.gang.key
                figures = (f"{victim.gpus:g}", f"{victim.lost_gpu_hours:.1f}")
                why = f"{victim.reason} {stop.effect.detail}".strip()
                table.add_row(name, victim.gang.queue, *figures, stop.effect.result, why)
            parts.append(table)
        if verdict.spared:
            table = _preemption_table("spared", "queue", "reason")
            for spared in verdict.spared:
                table.add_row(spared.key, spared.queue, spared.reason)
            parts.append(table)
    parts += [Text(fault, "yellow") for fault in report.faults]
    if not report.verdicts:
        parts.append(Text("no pod of the workload waits for GPUs; give --gpus to free GPUs anyway"))
    return Group(*parts)


def _preemption_table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        right = heading in ("GPUs", "lost GPU-h")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    return table
