"""The evaluation: replays job traces under the law and under baselines, and plays the scenarios of KAI's simulator.

    python -m tests.evaluation replay --trace FILE --share FILE    the given policies on a trace
    python -m tests.evaluation compare --trace FILE --share FILE   every policy
    python -m tests.evaluation play --kai-config FILE --law kai    a scenario file of KAI's own simulator

docs/evaluation.md has the results. `main(argv)` returns the exit code: 0 success, 1 failure, 2 wrong call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fairshare.cli.what_if_command import check_csv, write_csv
from fairshare.explain import what_if_figure
from fairshare.simulator import job_traces
from fairshare.simulator.job_traces import teams_of
from fairshare.simulator.simulation_model import Workload, workload_of
from gputally.base.command_options import with_option_groups
from gputally.base.errors import DivisionError, FairshareError
from gputally.base.instants import duration_seconds
from gputally.base.terminal import Terminal
from gputally.base.untrusted_text import for_terminal
from gputally.base.yaml_file import FileFault, read
from tests.evaluation import kai_scenarios, policy_comparison, scheduling_policies
from tests.evaluation.policy_comparison import parallel_replays

app = typer.Typer(
    help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None
)

Trace = Annotated[Path, typer.Option(help="Trace file with the jobs: CSV, CSV.gz or Parquet (docs/traces.md).")]
Share = Annotated[
    Path | None, typer.Option(help="CSV file with the columns `team` and `share` (default: equal shares).")
]
TeamColumn = Annotated[str, typer.Option(help="Column of the trace with a job's team.")]
Start = Annotated[str, typer.Option(help="Time after the trace's start at which the replay begins, such as 41d33m.")]
Days = Annotated[int | None, typer.Option(min=8, help="Days to replay (default: up to the last submission).")]
LeaveOut = Annotated[bool, typer.Option("--leave-out-faulty", help="Replay without the invalid rows.")]
Loads = Annotated[str, typer.Option(help="Offered work as a multiple of the capacity; several separated by commas.")]
Capacity = Annotated[int | None, typer.Option(min=1, help="GPUs of the cluster, instead of --loads.")]
Windows = Annotated[int, typer.Option(min=1, max=100, help="Number of windows to replay; 1: the whole trace.")]
WindowDays = Annotated[int, typer.Option(min=15, help="Days of each window; the first week is warm-up.")]
Plots = Annotated[Path | None, typer.Option(help="Folder to which figures are written as SVG.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Worker processes (default: one per core).")]
Results = Annotated[Path | None, typer.Option(help="CSV file to which the results are written.")]


@dataclass(frozen=True)
class Replays:
    """What is replayed of a trace, and where the results go."""

    share: Share = None
    team_column: TeamColumn = "team"
    start: Start = "0s"
    days: Days = None
    leave_out_faulty: LeaveOut = False
    loads: Loads = "1.13"
    capacity: Capacity = None
    windows: Windows = 1
    window_days: WindowDays = 21
    plots: Plots = None
    processes: Processes = None
    output: Results = None


@app.command()
@with_option_groups
def replay(
    trace: Trace,
    law: Annotated[str, typer.Option(help="Policies to replay, separated by commas.")] = "default,static",
    of: Replays = Replays(),
) -> None:
    """Replay a job trace under the given policies, and measure how fair each was."""
    _replay(trace, law.split(","), of)


@app.command()
@with_option_groups
def compare(
    trace: Trace,
    of: Replays = Replays(),
) -> None:
    """Replay a job trace under every policy: the law, KAI's rule with other settings, and all baselines."""
    _replay(trace, scheduling_policies.NAMES, of)


@app.command()
def play(
    kai_config: Annotated[Path, typer.Option(help="Scenario file of KAI's time-based simulator.")],
    law: Annotated[str, typer.Option(help=f"One of {', '.join(kai_scenarios.LAWS)}.")] = "kai",
    turns: Annotated[bool, typer.Option("--turns", help="Give turns to gangs that no weight admits.")] = False,
    output: Results = None,
) -> None:
    """Play a scenario of KAI's own simulator, print the GPUs of each queue, and write the CSV of that simulator."""
    if law not in kai_scenarios.LAWS:
        raise FairshareError(
            f"--law: no law {law!r} for a scenario of KAI; give one of {', '.join(kai_scenarios.LAWS)}"
        )
    check_csv(output)
    try:
        scenario = kai_scenarios.parse(read(kai_config))
    except DivisionError as error:
        raise DivisionError(f"{kai_config}: {error}") from error
    record = kai_scenarios.run(scenario, law, turns=turns)
    due, held = kai_scenarios.entitled(scenario), kai_scenarios.second_half(record)
    say = Terminal().print
    rule = f"{law} with turns" if turns else law
    say(f"{rule}, {scenario.capacity} GPUs, {scenario.cycles} cycles; second half, GPUs held and due")
    for queue, mean in zip(scenario.queues, held, strict=True):
        off = f"{mean / due[queue.name] - 1:+.1%}" if due[queue.name] > 0 else ""
        say(f"  {queue.name:20} {mean:8.2f} {due[queue.name]:8.2f} {off:>8}")
    say(f"  evictions            {record.evictions:8}")
    if output is not None:
        write_csv(output, ("Time", "QueueID", "Allocation", "FairShare"), kai_scenarios.csv_rows(scenario, record))


def _replay(trace: Path, policies: Sequence[str], of: Replays) -> None:
    names = list(dict.fromkeys(policies))
    for name in names:
        if scheduling_policies.unknown(name):
            raise FairshareError(f"--law: no policy {name!r}; give one of {', '.join(scheduling_policies.NAMES)}")
    check_csv(of.output)
    if of.plots is not None:
        what_if_figure.available()
    workload, parts = _workload(trace, of.share, of.team_column, of.leave_out_faulty)
    try:
        begin = duration_seconds(of.start)
    except ValueError as error:
        raise FairshareError(f"--start: {error}") from error
    length = of.days * 86_400 if of.days else (workload.submit_s[-1] + 1 - begin) // 21_600 * 21_600
    workload = workload.between(begin, begin + length)
    if length < 8 * 86_400 or not workload.submit_s:
        raise FairshareError(
            f"{trace}: the jobs from --start on span less than eight days; a replay needs that many, because its first"
            " week only fills the cluster"
        )
    sizes = [(load, _capacity_for(workload, length / 3600, load)) for load in _loads(of.loads)]
    if of.capacity is not None:
        sizes = [(workload.gpu_hours / (of.capacity * length / 3600), of.capacity)]
    if of.windows > 1 and of.window_days * 86_400 > length:
        raise FairshareError(
            f"--window-days {of.window_days}: the replay has only {length // 86_400} days; give a smaller --window-days"
            " or a larger --days"
        )
    spans = policy_comparison.windows_of(length, of.windows, of.window_days)
    with parallel_replays(policy_comparison.TaskRunner(workload, parts), of.processes) as replays:
        results = policy_comparison.compare(names, spans, sizes, replays, _say if sys.stderr.isatty() else None)
    console = Terminal(width=None if sys.stdout.isatty() else 200)
    for table in policy_comparison.tables(policy_comparison.summarise(results)):
        console.print(table)
    if of.output is not None:
        write_csv(of.output, policy_comparison.HEADER, policy_comparison.rows(results))
    if of.plots is not None:
        for path in policy_comparison.draw(results, of.plots):
            console.print(f"wrote {path}")


def _say(name: str, part: float) -> None:
    sys.stderr.write(f"\r{name:24} {part:4.0%} ")
    sys.stderr.flush()


def _workload(trace: Path, share: Path | None, team: str, lenient: bool) -> tuple[Workload, list[float]]:
    """Return the jobs of the teams that have a share, and the shares, whose sum is 1.

    lenient: leave out invalid rows, and report their number on stderr."""
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


def _capacity_for(workload: Workload, hours: float, load: float) -> int:
    """Return the GPUs, a multiple of 8, that could do 1/load of the offered work in `hours`."""
    return max(8, round(workload.gpu_hours / (hours * load) / 8) * 8)


def _loads(text: str) -> list[float]:
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        raise FairshareError(f"--loads: {text!r} is not a list of numbers, for example 0.9,1.13") from None
    if not all(0.01 <= load <= 100 for load in loads):
        raise FairshareError(f"--loads: {text}: give numbers from 0.01 to 100")
    return loads


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    try:
        app(args=list(sys.argv[1:] if argv is None else argv), prog_name="python -m tests.evaluation")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1
    except (FairshareError, FileFault) as fault:
        for line in str(fault).splitlines():
            print(for_terminal(f"tests.evaluation: {line}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
