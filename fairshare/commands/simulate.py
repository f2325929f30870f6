"""`gputally fairshare simulate`: a trace under one law or many, in tables, CSV and plots.

Exit codes as everywhere: 0 done, 1 one clear line on stderr, 2 called wrongly.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from accountant.wire import parse_duration
from agent.plaintext import for_cell
from agent.terminal import Terminal
from agent.yamlfile import read
from fairshare.commands import figures
from fairshare.commands.playing import players
from fairshare.errors import DivisionError, FairshareError
from fairshare.explain import tracefile
from fairshare.simulator import compare, kaiconfig, policies
from fairshare.simulator.compare import Result
from fairshare.simulator.trace import teams_of
from fairshare.simulator.workload import Workload, columns


class SimulateError(FairshareError):
    """The replay was asked for in a way that cannot be."""


def simulate(
    trace: Annotated[Path | None, typer.Option(help="Jobs: CSV, CSV.gz or Parquet (docs/traces.md).")] = None,
    law: Annotated[str, typer.Option(help="What to run, or several with commas.")] = "deficit",
    with_all: Annotated[bool, typer.Option("--compare", help="Beside it every feedback law and baseline.")] = False,
    share: Annotated[Path | None, typer.Option(help="CSV with a team's `share`; equal shares without it.")] = None,
    team_column: Annotated[str, typer.Option(help="Column that says whose job it is.")] = "team",
    start: Annotated[str, typer.Option(help="Where in the trace to begin, for example 41d33m.")] = "0s",
    days: Annotated[int | None, typer.Option(min=8, help="How much of it; to the last submission.")] = None,
    leave_out_faulty: Annotated[
        bool, typer.Option("--leave-out-faulty", help="Replay without the rows that cannot be a job.")
    ] = False,
    loads: Annotated[str, typer.Option(help="Offered work over what the cluster can do.")] = "1.13",
    capacity: Annotated[int | None, typer.Option(min=1, help="GPUs, instead of a load.")] = None,
    windows: Annotated[int, typer.Option(min=1, max=100, help="Stretches to replay; 1 is all of it.")] = 1,
    window_days: Annotated[int, typer.Option(min=15, help="Length of each, its first week to warm up.")] = 21,
    plots: Annotated[Path | None, typer.Option(help="Folder for figures.")] = None,
    kai_config: Annotated[Path | None, typer.Option(help="A scenario of KAI's own time-based simulator.")] = None,
    output: Annotated[Path | None, typer.Option(help="CSV to write.")] = None,
) -> None:
    """Replay a job trace under feedback laws and schedulers, and say how fair each was."""
    if kai_config is not None:
        _kai(kai_config, law, output)
        return
    if trace is None:
        raise SimulateError("one of --trace and --kai-config is needed")
    names = list(dict.fromkeys([*law.split(","), *(policies.NAMES if with_all else ())]))
    for name in names:
        if policies.unknown(name):
            raise SimulateError(f"no policy {name!r}; one of {', '.join(policies.NAMES)}")
    if plots is not None:
        figures.available()
    workload, parts = _workload(trace, share, team_column, leave_out_faulty)
    begin = _seconds(start)
    length = days * 86_400 if days else (workload.submit_s[-1] + 1 - begin) // 21_600 * 21_600
    workload = workload.between(begin, begin + length)
    if length < 8 * 86_400 or not workload.submit_s:
        raise SimulateError(f"{trace}: a replay needs jobs and eight days at least: one week to fill the cluster")
    sizes = compare.capacities_for(workload, length / 3600, _loads(loads))
    if capacity is not None:
        sizes = [(workload.gpu_hours / (capacity * length / 3600), capacity)]
    if windows > 1 and window_days * 86_400 > length:
        raise SimulateError(f"--window-days {window_days}: the replay has {length // 86_400} days")
    stretches = compare.windows_of(length, windows, window_days)
    console = Terminal(width=None if sys.stdout.isatty() else 200)
    results = _run(workload, parts, names, stretches, sizes)
    for table in figures.tables(compare.summarise(results)):
        console.print(table)
    if output is not None:
        _write(output, figures.HEADER, figures.rows(results))
    if plots is not None:
        for path in figures.draw(results, plots):
            console.print(f"wrote {path}")


def _run(
    workload: Workload,
    parts: Sequence[float],
    names: Sequence[str],
    stretches: Sequence[compare.Window],
    sizes: Sequence[tuple[float, int]],
) -> list[Result]:
    bar = Progress(
        TextColumn("{task.description:18}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn(),
        console=Terminal(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with bar, players(compare.Player(workload, parts)) as replays:
        task = bar.add_task("replaying", total=1.0)
        return compare.compare(
            names, stretches, sizes, replays, lambda name, part: bar.update(task, completed=part, description=name)
        )


def _workload(trace: Path, share: Path | None, team: str, lenient: bool) -> tuple[Workload, list[float]]:
    """The jobs of teams that have a share, and the shares, adding up to 1. lenient: rows that cannot be a
    job are counted on stderr and left out."""
    if lenient:
        jobs, faults = tracefile.load_with_faults(trace, 0, team=team)
        if faults:
            Terminal(stderr=True).print(f"left out {len(faults)} rows, the first: {faults[0]}")
    else:
        jobs = tracefile.load(trace, 0, team=team)
    teams = teams_of(jobs)
    given = tracefile.shares(share, team=team) if share is not None else dict.fromkeys(teams, 1.0)
    names = [name for name in teams if name in given]
    if not names:
        raise SimulateError(f"{share}: no team of {trace} has a share")
    whole = sum(given[name] for name in names)
    return columns(jobs, names), [given[name] / whole for name in names]


def _kai(path: Path, law: str, output: Path | None) -> None:
    """Play a scenario of KAI's own simulator, print who held how much, and write its CSV."""
    if law not in kaiconfig.LAWS:
        raise SimulateError(f"no law {law!r} for a scenario; one of {', '.join(kaiconfig.LAWS)}")
    try:
        scenario = kaiconfig.parse(read(path).data)
    except DivisionError as error:
        raise DivisionError(f"{path}: {error}") from error
    record = kaiconfig.run(scenario, law)
    due, held = kaiconfig.entitled(scenario), kaiconfig.second_half(record)
    say = Terminal().print
    say(f"{law}, {scenario.capacity} GPUs, {scenario.cycles} cycles; second half, GPUs held and due")
    for queue, mean in zip(scenario.queues, held, strict=True):
        off = f"{mean / due[queue.name] - 1:+.1%}" if due[queue.name] > 0 else ""
        say(f"  {queue.name:20} {mean:8.2f} {due[queue.name]:8.2f} {off:>8}")
    say(f"  evictions            {record.evictions:8}")
    if output is not None:
        _write(output, ("Time", "QueueID", "Allocation", "FairShare"), kaiconfig.csv_rows(scenario, record))


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    try:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(header)
            writer.writerows([for_cell(c) if isinstance(c, str) else c for c in row] for row in rows)
    except OSError as error:
        raise SimulateError(f"{path}: {error.strerror or error}") from error


def _seconds(text: str) -> int:
    try:
        value = parse_duration(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise SimulateError(f"--start: {error}") from error
    return int(str(value))


def _loads(text: str) -> list[float]:
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        raise SimulateError(f"--loads: {text!r} is no list of numbers") from None
    if not all(0.01 <= load <= 100 for load in loads):
        raise SimulateError(f"--loads: {text}: each from 0.01 to 100")
    return loads
