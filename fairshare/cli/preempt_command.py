"""Runs `preempt`: preempts manually for one workload."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fairshare.cli.command_options import ClusterOptions, FleetOptions, PolicyPath, Printed, pods_of
from fairshare.controller import policy_file as policies
from fairshare.explain import plan_tables
from fairshare.preemption.preemption_cycle import by_hand, latency_reason
from fairshare.preemption.preemption_types import PreemptionCall
from fairshare.preemption.service_latency_objectives import prometheus_latency
from fairshare.preemption.target_preemption import PreemptionReport
from fairshare.targets import ADAPTERS
from gputally.base.clock import SystemClock
from gputally.base.command_line import draw, show, with_option_groups
from gputally.server.config_loading import parse_seconds


@with_option_groups
def preempt(
    policy: PolicyPath,
    job: Annotated[str, typer.Option("--for", help="NAMESPACE/NAME of the workload that needs room.")],
    threshold: Annotated[
        str | None, typer.Option(help="Only if its latency is above this, for example 50ms; else in any case.")
    ] = None,
    query: Annotated[str, typer.Option(help="PromQL of that latency in seconds; else the policy's SLO of it.")] = "",
    prometheus: Annotated[
        str, typer.Option(envvar="GPUTALLY_FAIRSHARE_PROMETHEUS", help="Prometheus that knows the latency.")
    ] = "",
    gpus: Annotated[float, typer.Option(min=0, help="GPUs to free if nothing of it waits.")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show who would give way.")] = False,
    output: Printed = "table",
    *,
    at: FleetOptions,
    on: ClusterOptions,
) -> None:
    """Make room for one workload now, by the policy's rules and limits, and show the victims with the reasons."""
    others, clock = at.others(), SystemClock()
    wanted = policies.load(policy, others)[0]
    with at.client() as client:
        asked = prometheus_latency(prometheus) if prometheus else None
        why = latency_reason(wanted, job, _seconds(threshold), query, asked, clock.wall_ms())
        if why is None and output != "table":
            show(output, Group, [])
            return
        if why is None:
            draw(Text(f"the latency of {job} is not above {threshold}: no workload has to give way"))
            return
        there = on.open()
        call = PreemptionCall("", job, why, gpus, "by hand")
        mode: Literal["dry-run", "enforce"] = "dry-run" if dry_run else "enforce"
        pods = pods_of(there)
        report = by_hand(wanted, client, there, clock, ADAPTERS, pods, call, mode, on.status_object, others)
    show(output, lambda: view(report), plan_tables.preemption(report), plan_tables.stops(report))
    if any(verdict.outcome == "denied" for verdict in report.verdicts):
        raise typer.Exit(1)


def _seconds(text: str | None) -> float | None:
    """A threshold such as 50ms. Raises PolicyFault."""
    if text is None:
        return None
    try:
        return float(str(parse_seconds(text)))
    except ValueError as error:
        raise policies.PolicyFault(f"--threshold: {error}") from error


def view(report: PreemptionReport) -> RenderableType:
    """Render the verdict, the victims, and the spared workloads, with every reason."""
    parts: list[RenderableType] = []
    for verdict in report.verdicts:
        parts.append(Text(f"{verdict.claimant} of queue {verdict.queue} {verdict.reason}", "bold"))
        mine = [stop for stop in report.stops if stop.claimant == verdict.claimant]
        if mine:
            table = _table("gives way", "queue", "GPUs", "lost GPU-h", "result", "why")
            for stop in mine:
                victim = stop.victim
                name = victim.gang.key
                figures = (f"{victim.gpus:g}", f"{victim.lost_gpu_hours:.1f}")
                why = f"{victim.reason} {stop.effect.detail}".strip()
                table.add_row(name, victim.gang.queue, *figures, stop.effect.result, why)
            parts.append(table)
        if verdict.spared:
            table = _table("stays", "queue", "why")
            for spared in verdict.spared:
                table.add_row(spared.key, spared.queue, spared.reason)
            parts.append(table)
    parts += [Text(fault, "yellow") for fault in report.faults]
    if not report.verdicts:
        parts.append(Text("nothing of it waits for GPUs; give --gpus to have some freed all the same"))
    return Group(*parts)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        right = heading in ("GPUs", "lost GPU-h")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    return table
