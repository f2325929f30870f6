"""Runs `simulate` and `what-if`, which replay jobs under other laws, schedulers and policies."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairshare.cli.command_options import AccountantOptions, seconds
from gputally.base.clock import SystemClock
from gputally.base.command_output import Output, show, with_option_groups
from gputally.base.errors import DivisionError, FairshareError
from gputally.base.file_formats import format_of_file
from gputally.base.units import MS_PER_DAY
from gputally.base.untrusted_text import for_cell
from gputally.base.yaml_file import read

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from fairshare.explain.what_if_simulation import ComparedQueue, Comparison
    from fairshare.simulator import policy_comparison
    from fairshare.simulator.policy_comparison import Result
    from fairshare.simulator.simulation_model import Workload


def simulate(
    trace: Annotated[
        Path | None, typer.Option(help="Trace file with the jobs: CSV, CSV.gz or Parquet (docs/traces.md).")
    ] = None,
    law: Annotated[
        str, typer.Option(help="Feedback law or scheduling policy to replay; several are separated by commas.")
    ] = "deficit",
    with_all: Annotated[bool, typer.Option("--compare", help="Also run every feedback law and baseline.")] = False,
    share: Annotated[
        Path | None, typer.Option(help="CSV file with the columns `team` and `share` (default: equal shares).")
    ] = None,
    team_column: Annotated[str, typer.Option(help="Column of the trace with a job's team.")] = "team",
    start: Annotated[
        str, typer.Option(help="Time after the start of the trace at which the replay begins, for example 41d33m.")
    ] = "0s",
    days: Annotated[
        int | None, typer.Option(min=8, help="Number of days to replay (default: up to the last submission).")
    ] = None,
    leave_out_faulty: Annotated[
        bool, typer.Option("--leave-out-faulty", help="Replay without the invalid rows.")
    ] = False,
    loads: Annotated[
        str, typer.Option(help="Offered work as a multiple of the cluster's capacity; several are separated by commas.")
    ] = "1.13",
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Number of GPUs of the cluster, instead of --loads.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, max=100, help="Number of windows to replay; 1: the whole trace.")] = 1,
    window_days: Annotated[int, typer.Option(min=15, help="Days of each window; the first week is warm-up.")] = 21,
    plots: Annotated[Path | None, typer.Option(help="Folder to which figures are written as SVG.")] = None,
    kai_config: Annotated[
        Path | None, typer.Option(help="Scenario file of KAI's time-based simulator, to run instead of a trace.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="CSV file to which the results are written.")] = None,
) -> None:
    """Replay a job trace under feedback laws and schedulers, and measure how fair each was."""
    from fairshare.simulator import policy_comparison, scheduling_policies
    from fairshare.simulator.simulation_model import capacity_for
    from gputally.base.terminal import Terminal

    _check_csv(output)
    if kai_config is not None:
        _kai(kai_config, law, output)
        return
    if trace is None:
        raise FairshareError("nothing to replay: give --trace or --kai-config")
    names = list(dict.fromkeys([*law.split(","), *(scheduling_policies.NAMES if with_all else ())]))
    for name in names:
        if scheduling_policies.unknown(name):
            raise FairshareError(f"--law: no policy {name!r}; give one of {', '.join(scheduling_policies.NAMES)}")
    if plots is not None:
        policy_comparison.available()
    workload, parts = _workload(trace, share, team_column, leave_out_faulty)
    begin = seconds(start, "--start")
    length = days * 86_400 if days else (workload.submit_s[-1] + 1 - begin) // 21_600 * 21_600
    workload = workload.between(begin, begin + length)
    if length < 8 * 86_400 or not workload.submit_s:
        raise FairshareError(
            f"{trace}: the jobs from --start on span less than eight days; a replay needs that many, because its first"
            " week only fills the cluster"
        )
    sizes = [(load, capacity_for(workload, length / 3600, load)) for load in _loads(loads)]
    if capacity is not None:
        sizes = [(workload.gpu_hours / (capacity * length / 3600), capacity)]
    if windows > 1 and window_days * 86_400 > length:
        raise FairshareError(
            f"--window-days {window_days}: the replay has only {length // 86_400} days; give a smaller --window-days"
            " or a larger --days"
        )
    spans = policy_comparison.windows_of(length, windows, window_days)
    console = Terminal(width=None if sys.stdout.isatty() else 200)
    results = _run(workload, parts, names, spans, sizes)
    for table in policy_comparison.tables(policy_comparison.summarise(results)):
        console.print(table)
    if output is not None:
        _write_csv(output, policy_comparison.HEADER, policy_comparison.rows(results))
    if plots is not None:
        for path in policy_comparison.draw(results, plots):
            console.print(f"wrote {path}")


def _check_csv(output: Path | None) -> None:
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


def _run(
    workload: Workload,
    parts: Sequence[float],
    names: Sequence[str],
    spans: Sequence[policy_comparison.Window],
    sizes: Sequence[tuple[float, int]],
) -> list[Result]:
    from fairshare.simulator import policy_comparison
    from fairshare.simulator.policy_comparison import parallel_replays

    with _progress_bar() as bar, parallel_replays(policy_comparison.TaskRunner(workload, parts)) as replays:
        task = bar.add_task("replaying", total=1.0)
        return policy_comparison.compare(
            names, spans, sizes, replays, lambda name, part: bar.update(task, completed=part, description=name)
        )


def _workload(trace: Path, share: Path | None, team: str, lenient: bool) -> tuple[Workload, list[float]]:
    """Return the jobs of the teams that have a share, and the shares, whose sum is 1.

    lenient: leave out invalid rows, and report their number on stderr."""
    from fairshare.simulator import job_traces
    from fairshare.simulator.job_traces import teams_of
    from fairshare.simulator.simulation_model import workload_of
    from gputally.base.terminal import Terminal

    if lenient:
        jobs, faults = job_traces.load_with_faults(trace, 0, team=team)
        if faults:
            Terminal(stderr=True).print(f"{len(faults)} invalid rows are left out, the first one is {faults[0]}")
    else:
        jobs = job_traces.load(trace, 0, team=team)
    teams = teams_of(jobs)
    share_of = job_traces.shares(share, team=team) if share is not None else dict.fromkeys(teams, 1.0)
    names = [name for name in teams if name in share_of]
    if not names:
        raise FairshareError(f"{share}: no team of {trace} has a share; the teams are {', '.join(teams[:20])}")
    whole = sum(share_of[name] for name in names)
    return workload_of(jobs, names), [share_of[name] / whole for name in names]


def _kai(path: Path, law: str, output: Path | None) -> None:
    """Run a scenario of KAI's own simulator, print the GPUs of each queue, and write the CSV."""
    from fairshare.simulator import kai_scenario_file
    from gputally.base.terminal import Terminal

    if law not in kai_scenario_file.LAWS:
        raise FairshareError(
            f"--law: no law {law!r} for a scenario of KAI; give one of {', '.join(kai_scenario_file.LAWS)}"
        )
    try:
        scenario = kai_scenario_file.parse(read(path))
    except DivisionError as error:
        raise DivisionError(f"{path}: {error}") from error
    record = kai_scenario_file.run(scenario, law)
    due, held = kai_scenario_file.entitled(scenario), kai_scenario_file.second_half(record)
    say = Terminal().print
    say(f"{law}, {scenario.capacity} GPUs, {scenario.cycles} cycles; second half, GPUs held and due")
    for queue, mean in zip(scenario.queues, held, strict=True):
        off = f"{mean / due[queue.name] - 1:+.1%}" if due[queue.name] > 0 else ""
        say(f"  {queue.name:20} {mean:8.2f} {due[queue.name]:8.2f} {off:>8}")
    say(f"  evictions            {record.evictions:8}")
    if output is not None:
        _write_csv(output, ("Time", "QueueID", "Allocation", "FairShare"), kai_scenario_file.csv_rows(scenario, record))


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    import csv

    try:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(header)
            writer.writerows([for_cell(c) if isinstance(c, str) else c for c in row] for row in rows)
    except OSError as error:
        raise FairshareError(f"{path}: {error.strerror or error}") from error


def _loads(text: str) -> list[float]:
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        raise FairshareError(f"--loads: {text!r} is not a list of numbers, for example 0.9,1.13") from None
    if not all(0.01 <= load <= 100 for load in loads):
        raise FairshareError(f"--loads: {text}: give numbers from 0.01 to 100")
    return loads


@with_option_groups
def what_if(
    policy: Annotated[Path, typer.Argument(help="Policy file (YAML) to try.")],
    against: Annotated[
        Path | None, typer.Option(help="Policy file to compare with (default: the accountant's policy in force).")
    ] = None,
    since: Annotated[str, typer.Option(help="Span of the ledger's history to replay, up to now.")] = "30d",
    trace: Annotated[
        Path | None, typer.Option(help="Trace file with the jobs (docs/traces.md), instead of the ledger.")
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(min=1, help="Number of GPUs of the cluster (default: the ledger's; required with --trace)."),
    ] = None,
    format: Annotated[Output, typer.Option("--format", help="Format of the output.")] = "table",
    output: Annotated[Path | None, typer.Option(help="CSV file to which the comparison is written.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder to which the figure is written as SVG.")] = None,
    *,
    at: AccountantOptions,
) -> None:
    """Replay history under the policy in force and under another one, and compare the GPU-hours, waits and preemptions
    of every queue. The recorded GPU-hours are shown beside them."""
    from rich.console import Group
    from rich.text import Text

    from fairshare.controller import policy_file as policies
    from fairshare.explain import what_if_simulation as comparing
    from fairshare.explain.what_if_simulation import WhatIfError, history_from_ledger, history_from_trace
    from fairshare.simulator import policy_comparison
    from gputally.base.terminal import Terminal

    _check_csv(output)
    if plots is not None:
        policy_comparison.available()
    other, now_ms = policies.load(policy)[0], SystemClock().wall_ms()
    if trace is not None:
        if against is None or capacity is None:
            raise WhatIfError("--trace needs --against and --capacity: a trace has neither a policy nor a cluster")
        now = policies.load(against)[0]
        past = history_from_trace(trace, other, capacity)
    else:
        with at.client(timeout_s=300.0) as client:
            now = policies.load(against)[0] if against is not None else client.policy()
            past = history_from_ledger(client, other, seconds(since, "--since"), capacity, now_ms)
    with _progress_bar() as bar:
        task = bar.add_task("replaying", total=1.0)
        found = comparing.compare(
            now, other, past, now_ms, lambda part, doing: bar.update(task, completed=part, description=doing)
        )
    assumed = [Text(f"  assumed: {line}", overflow="fold") for line in found.assumptions]
    drawn = Group(_table(found, str(policy)), *assumed)
    show(format, lambda: drawn, _plain(found), (asdict(row) for row in found.rows))
    if output is not None:
        _write_comparison(output, found.rows)
    if plots is not None:
        path = _draw(plots, found, policy.name)
        Terminal().print(f"wrote {path}", soft_wrap=True)


def _table(found: Comparison, name: str) -> Table:
    from fairshare.explain.plan_tables import titled_table

    rows = found.rows
    booked = rows[0].had is not None
    title = f"{_days(found):g} days, {found.gpus:,} GPUs, {found.jobs:,} jobs; GPU-hours, waits in hours"
    hours = [*(["had"] if booked else []), "now", "then", "change", "of cluster"]
    table = titled_table(title, ("queue",), (*hours, "wait now", "then", "preempted now", "then"))
    table.caption, table.caption_justify = f"now: the policy in force, replayed. then: {name}, replayed.", "left"
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
    _write_csv(path, header, cells)


def _draw(folder: Path, found: Comparison, name: str) -> Path:
    """Draw one panel per queue, the largest first: GPUs held day by day in the past and under both policies."""
    from fairshare.simulator import policy_comparison

    labels = {"then": f"under {name}", "now": "the policy in force, replayed", "had": "as it was"}
    panels = [
        (queue, {label: cases[case] for case, label in labels.items() if cases[case]})
        for queue, cases in sorted(found.series.items(), key=lambda item: -fsum(held for _, held in item[1]["then"]))
    ]
    return policy_comparison.draw_days(folder, panels)
