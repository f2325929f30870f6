"""`gputally fairshare what-if POLICY --since 30d`: who would have got what, replayed from the books or a trace."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import fsum
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from accountant.wire import Policy
from agent.clock import SystemClock
from agent.output import Output, show
from agent.plaintext import for_cell
from agent.terminal import Terminal
from fairshare import policy as policies
from fairshare.client import AccountantClient
from fairshare.commands import figures
from fairshare.commands.explain import duration
from fairshare.commands.options import DEFAULT_URL, CaPath, LedgerName, TokenPath, Url, console
from fairshare.explain import comparing
from fairshare.explain.comparing import Row
from fairshare.explain.pasts import HOUR_S, Past, WhatIfError, of_books, of_trace
from fairshare.simulator.records import Record
from fairshare.simulator.what_if import Got, daily


def what_if(
    policy: Annotated[Path, typer.Argument(help="The other policy (YAML).")],
    against: Annotated[
        Path | None, typer.Option(help="The policy to compare with; the one in force at the accountant without it.")
    ] = None,
    since: Annotated[str, typer.Option(help="How far back to look.")] = "30d",
    trace: Annotated[Path | None, typer.Option(help="Jobs of a file (docs/traces.md) instead of the books.")] = None,
    capacity: Annotated[int | None, typer.Option(min=1, help="GPUs; with --trace it has to be said.")] = None,
    accountant: Url = DEFAULT_URL,
    token_file: TokenPath = None,
    ca_file: CaPath = None,
    cluster_name: LedgerName = "",
    format: Annotated[Output, typer.Option("--format", help="How to print it.")] = "table",
    output: Annotated[Path | None, typer.Option(help="CSV to write.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for the figure.")] = None,
) -> None:
    """Replay history under another policy: GPU-hours, waits and preemptions of every queue, against what was."""
    if plots is not None:
        figures.available()
    other = policies.load(policy)[0]
    if trace is not None:
        if against is None or capacity is None:
            raise WhatIfError("--trace needs --against and --capacity: a trace knows neither policy nor cluster")
        now = policies.load(against)[0]
        past = of_trace(trace, other, capacity)
    else:
        with AccountantClient(
            accountant, token_file=token_file, ca_file=ca_file, cluster=cluster_name, timeout_s=300.0
        ) as client:
            now = policies.load(against)[0] if against is not None else client.policy()
            past = of_books(client, other, duration(since, "--since"), capacity, SystemClock().wall_ms())
    leaves = comparing.leaves(other)
    told = comparing.assumed(past, now, other)
    before, after = _replay(now, past, "as it is"), _replay(other, past, str(policy))
    rows = comparing.rows(leaves, past, before, after)
    assumed = [Text(f"  assumed: {line}", overflow="fold") for line in told]
    drawn = Group(_table(rows, past, str(policy)), *assumed)
    show(format, lambda: drawn, _plain(rows, past, told), (asdict(row) for row in rows))
    if output is not None:
        _write(output, rows)
    if plots is not None:
        path = _draw(plots, leaves, past, before, after, policy.name)
        console().print(f"wrote {path}", soft_wrap=True)


def _replay(policy: Policy, past: Past, name: str) -> Record:
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn(),
        console=Terminal(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task(f"replaying {name}", total=1.0)
        return comparing.replayed(policy, past, lambda part: bar.update(task, completed=part))


def _table(rows: Sequence[Row], past: Past, name: str) -> Table:
    days = (past.end_s - past.from_s) / 86_400
    table = Table(
        title=f"{days:g} days, {past.gpus:,} GPUs, {len(past.workload.submit_s):,} jobs; GPU-hours, waits in hours",
        title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
        caption=f"now: the policy in force, replayed. then: {name}, replayed.", caption_justify="left",
    )  # fmt: skip
    table.add_column("queue")
    booked = past.had is not None
    headings = [*(["had"] if booked else []), "now", "then", "change", "of cluster"]
    for heading in (*headings, "wait now", "then", "preempted now", "then"):
        table.add_column(heading, justify="right")
    possible = past.gpus * (past.end_s - past.from_s) / HOUR_S
    for row in rows:
        change = row.then.gpu_hours - row.now.gpu_hours
        table.add_row(
            row.queue, *([f"{row.had:,.0f}"] if row.had is not None else []), f"{row.now.gpu_hours:,.0f}",
            f"{row.then.gpu_hours:,.0f}", f"{change:+,.0f}", f"{row.then.gpu_hours / possible:.1%}",
            f"{row.now.mean_wait_h:.1f}", f"{row.then.mean_wait_h:.1f}", f"{row.now.preempted:,}",
            f"{row.then.preempted:,}",
        )  # fmt: skip
    now, then = (fsum(getattr(row, key).gpu_hours for row in rows) for key in ("now", "then"))
    table.add_section()
    table.add_row(
        "total", *([f"{fsum(row.had or 0.0 for row in rows):,.0f}"] if booked else []), f"{now:,.0f}", f"{then:,.0f}",
        f"{then - now:+,.0f}", f"{then / possible:.1%}", "", "", f"{sum(row.now.preempted for row in rows):,}",
        f"{sum(row.then.preempted for row in rows):,}",
    )  # fmt: skip
    return table


def _plain(rows: Sequence[Row], past: Past, told: Sequence[str]) -> dict[str, object]:
    return {
        "gpus": past.gpus,
        "days": (past.end_s - past.from_s) / 86_400,
        "jobs": len(past.workload.submit_s),
        "assumed": list(told),
        "queues": [asdict(row) for row in rows],
    }


def _write(path: Path, rows: Sequence[Row]) -> None:
    header = ("queue", "had_gpu_h", *(f"{when}_{what}" for when in ("now", "then") for what in Got.__slots__[1:]))
    try:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(header)
            for row in rows:
                figures_ = [list(asdict(each).values())[1:] for each in (row.now, row.then)]
                writer.writerow((for_cell(row.queue), "" if row.had is None else row.had, *figures_[0], *figures_[1]))
    except OSError as error:
        raise WhatIfError(f"{path}: {error.strerror or error}") from error


def _draw(folder: Path, leaves: Sequence[str], past: Past, before: Record, after: Record, name: str) -> Path:
    """One panel per queue, the largest first: GPUs held day by day as it was, now and then."""
    place = {queue: q for q, queue in enumerate(before.workload.queues)}
    then, now = daily(after, past.from_s), daily(before, past.from_s)
    panels = []
    for q in sorted(range(len(leaves)), key=lambda q: -fsum(values[q] for _, values in then)):
        lines = {f"under {name}": [(at, values[q]) for at, values in then]}
        if leaves[q] in place:
            lines["the policy in force, replayed"] = [(at, values[place[leaves[q]]]) for at, values in now]
        if past.days is not None:
            lines["as it was"] = [(at, values[q]) for at, values in past.days]
        panels.append((leaves[q], lines))
    return figures.draw_days(folder, panels)
