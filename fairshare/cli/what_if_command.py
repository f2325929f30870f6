"""Runs `what-if`, which replays the past under another policy."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairshare.cli.command_options import AccountantOptions, Printed, edge_ms
from gputally.base.clock import SystemClock
from gputally.base.command_options import refuse_ignored, with_option_groups
from gputally.base.command_output import show
from gputally.base.errors import FairshareError
from gputally.base.file_formats import format_of_file
from gputally.base.units import MS_PER_DAY
from gputally.base.untrusted_text import for_cell

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from fairshare.explain.what_if_simulation import ComparedQueue, Comparison


def check_csv(output: Path | None) -> None:
    """Raise WrongEnding if the name of the file to write is not that of a CSV file."""
    if output is not None:
        format_of_file(output, {"csv": "csv"}, None, "csv")


def _progress_bar() -> Progress:
    """Return a progress bar that is shown only on a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from gputally.base.terminal import Terminal

    return Progress(
        TextColumn("{task.description:18}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn(),
        console=Terminal(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file in which no cell is a formula. Raises FairshareError if it cannot be written."""
    import csv

    try:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(header)
            writer.writerows([for_cell(c) if isinstance(c, str) else c for c in row] for row in rows)
    except OSError as error:
        raise FairshareError(f"{path}: {error.strerror or error}") from error


@with_option_groups
def what_if(
    policy: Annotated[Path, typer.Argument(help="Policy file (YAML) to try.")],
    against: Annotated[
        Path | None, typer.Option(help="Policy file to compare with (default: the accountant's policy in force).")
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--start", "--since", help="Start of the ledger's history to replay: 30d before now, a date or RFC 3339."
        ),
    ] = "30d",
    trace: Annotated[
        Path | None, typer.Option(help="Trace file with the jobs (docs/traces.md), instead of the ledger.")
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(min=1, help="Number of GPUs of the cluster (default: the ledger's; required with --trace)."),
    ] = None,
    output: Printed = "table",
    to: Annotated[Path | None, typer.Option(help="CSV file to which the comparison is written.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder to which the figure is written as SVG.")] = None,
    *,
    at: AccountantOptions,
) -> None:
    """Replay history under the policy in force and under another one, and compare the GPU-hours, waits and preemptions
    of every queue. The recorded GPU-hours are shown beside them."""
    from rich.console import Group
    from rich.text import Text

    from fairshare.controller import policy_file as policies
    from fairshare.explain import what_if_figure
    from fairshare.explain import what_if_simulation as comparing
    from fairshare.explain.what_if_simulation import WhatIfError, history_from_ledger, history_from_trace
    from gputally.base.terminal import Terminal

    check_csv(to)
    if plots is not None:
        what_if_figure.available()
    other, now_ms = policies.load(policy)[0], SystemClock().wall_ms()
    if trace is not None:
        refuse_ignored("with --trace", "start", *vars(at))
        if against is None or capacity is None:
            raise WhatIfError("--trace needs --against and --capacity: a trace has neither a policy nor a cluster")
        now = policies.load(against)[0]
        past = history_from_trace(trace, other, capacity)
    else:
        with at.client(timeout_s=300.0) as client:
            now = policies.load(against)[0] if against is not None else client.policy()
            span_s = (now_ms - edge_ms(start, "--start", now_ms)) // 1000
            past = history_from_ledger(client, other, span_s, capacity, now_ms)
    with _progress_bar() as bar:
        task = bar.add_task("replaying", total=1.0)
        found = comparing.compare(
            now, other, past, now_ms, lambda part, doing: bar.update(task, completed=part, description=doing)
        )
    assumed = [Text(f"  assumed: {line}", overflow="fold") for line in found.assumptions]
    drawn = Group(_table(found, str(policy)), *assumed)
    show(output, lambda: drawn, _plain(found), (asdict(row) for row in found.rows))
    if to is not None:
        _write_comparison(to, found.rows)
    if plots is not None:
        path = _draw(plots, found, policy.name)
        Terminal().print(f"wrote {path}", soft_wrap=True)


def _table(found: Comparison, name: str) -> Table:
    from fairshare.explain.conclusions import of_replay
    from fairshare.explain.plan_tables import titled_table
    from gputally.base.instants import utc_text

    rows = found.rows
    booked = rows[0].had is not None
    until = f" until {utc_text(found.end_ms)}" if booked else ""
    title = f"Replay of {_days(found):g} days{until} on {found.gpus:,} GPUs, {found.jobs:,} jobs"
    title = f"{title}{' that held GPUs then' if booked else ''}; GPU-hours, waits in hours"
    hours = [*(["had"] if booked else []), "now", "then", "change", "of cluster"]
    table = titled_table(title, ("queue",), (*hours, "wait now", "then", "preempted now", "then"))
    table.caption = (
        f"{' '.join(of_replay(found))} "
        f"now: the policy in force, replayed. then: {name}, replayed. try-weight answers another question: what quotas"
        " and weights entitle a queue to now; a queue may gain by one and lose by the other."
    )
    table.caption_justify = "left"
    possible = found.gpus * _days(found) * 24
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


def _days(found: Comparison) -> float:
    return (found.end_ms - found.start_ms) / MS_PER_DAY


def _plain(found: Comparison) -> dict[str, object]:
    return {
        "gpus": found.gpus,
        "days": _days(found),
        "jobs": found.jobs,
        "replayed_jobs": found.replayed,
        "assumed": list(found.assumptions),
        "queues": [asdict(row) for row in found.rows],
    }


def _write_comparison(path: Path, rows: Sequence[ComparedQueue]) -> None:
    from fairshare.explain.what_if_simulation import ReplayedQueue

    header = (
        "queue",
        "had_gpu_h",
        *(f"{when}_{what}" for when in ("now", "then") for what in ReplayedQueue.__slots__[1:]),
    )
    cells = (
        (row.queue, "" if row.had is None else row.had, *astuple(row.now)[1:], *astuple(row.then)[1:]) for row in rows
    )
    write_csv(path, header, cells)


def _draw(folder: Path, found: Comparison, name: str) -> Path:
    """Draw one panel per queue, the largest first: GPUs held day by day in the past and under both policies."""
    from fairshare.explain import what_if_figure

    labels = {"then": f"under {name}", "now": "the policy in force, replayed", "had": "as it was"}
    panels = [
        (queue, {label: cases[case] for case, label in labels.items() if cases[case]})
        for queue, cases in sorted(found.series.items(), key=lambda item: -fsum(held for _, held in item[1]["then"]))
    ]
    return what_if_figure.draw_days(folder, panels)
