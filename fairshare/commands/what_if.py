"""`gputally fairshare what-if POLICY --since 30d`: who would have got what, replayed from the books or a trace."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import fsum
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from accountant.wire import Policy
from agent.clock import SystemClock
from agent.units import MS_PER_HOUR
from fairshare import policy as policies
from fairshare import tracefile
from fairshare.client import AccountantClient
from fairshare.commands import figures
from fairshare.commands.explain import duration
from fairshare.commands.options import DEFAULT_URL, Format, TokenPath, Url, console
from fairshare.errors import FairshareError
from fairshare.simulator import history
from fairshare.simulator.history import Held
from fairshare.simulator.records import Record
from fairshare.simulator.what_if import Got, daily, daily_of, flat, got, under
from fairshare.simulator.workload import Workload, columns

HOUR_S = 3600
WARM_UP_S = 7 * 86_400
"""Most that is replayed before the span that is shown, so that it begins with a full cluster and a history."""
Days = list[tuple[float, list[float]]]


class WhatIfError(FairshareError):
    """There is no history to replay."""


@dataclass(frozen=True, slots=True)
class Past:
    """What is replayed. from_s: where the span that is shown begins. had: GPU-hours by queue in it, and days:
    mean GPUs day by day, as the books have them; None of a trace."""

    workload: Workload
    gpus: int
    from_s: int
    end_s: int
    had: Sequence[float] | None
    days: Days | None
    told: tuple[str, ...]


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
    format: Format = "table",
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
        past = _of_trace(trace, other, capacity)
    else:
        with AccountantClient(accountant, token_file=token_file, timeout_s=300.0) as client:
            now = policies.load(against)[0] if against is not None else client.policy()
            past = _of_books(client, other, duration(since, "--since"), capacity)
    leaves = [queue.name for queue in flat(other).queues]
    missing = sorted({queue.name for queue in flat(now).queues} ^ set(leaves))
    told = past.told
    if missing:
        told = (*told, f"only one of the policies has {', '.join(missing)}: there it held nothing")
    before, after = _replay(now, past, "as it is"), _replay(other, past, str(policy))
    rows = _rows(leaves, past, before, after)
    if format == "json":
        typer.echo(json.dumps(_plain(rows, past, told), indent=2))
    else:
        screen = console()
        screen.print(_table(rows, past, str(policy)))
        for line in told:
            screen.print(f"  assumed: {line}", markup=False, soft_wrap=True)
    if output is not None:
        _write(output, rows)
    if plots is not None:
        path = _draw(plots, leaves, past, before, after, policy.name)
        console().print(f"wrote {path}", soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One queue: GPU-hours as they were, and under the replay of both policies."""

    queue: str
    had: float | None
    now: Got
    then: Got


def _of_books(client: AccountantClient, policy: Policy, span_s: int, given: int | None) -> Past:
    end_ms = SystemClock().wall_ms() // MS_PER_HOUR * MS_PER_HOUR
    hours = max(1, span_s // HOUR_S)
    warm = min(WARM_UP_S, policy.window.size) // HOUR_S
    start_ms = end_ms - (hours + warm) * MS_PER_HOUR
    leaves = [queue.name for queue in flat(policy).queues]
    held: list[Held] = []
    whole = [0] * (hours + warm)
    begin = datetime.fromtimestamp(start_ms / 1000, UTC)
    for line in client.usage(start_ms, end_ms, ("queue", "job", "hour")):
        at = datetime.strptime(line.key["hour"], "%Y-%m-%dT%H").replace(tzinfo=UTC)
        hour = round((at - begin).total_seconds()) // HOUR_S
        accounts = line.accounts_gpu_us
        whole[hour] += accounts.allocated + accounts.unallocated
        held.append(Held(line.key["queue"], line.key["job"], hour, accounts.allocated))
    gpus = given or history.capacity(whole)
    known = next((hour for hour, amount in enumerate(whole) if amount > 0), None)
    if gpus <= 0 or known is None:
        raise WhatIfError(f"the books hold no GPU time in the last {span_s // HOUR_S} hours")
    different: dict[tuple[str, str], int] = {}
    for line in client.usage(start_ms, end_ms, ("queue", "job", "gpu")):
        if line.accounts_gpu_us.allocated > 0:
            key = line.key["queue"], line.key["job"]
            different[key] = different.get(key, 0) + 1
    waits = client.median_waits_s(start_ms, end_ms)
    workload = history.jobs(held, leaves, different, waits)
    if not workload.submit_s:
        raise WhatIfError(f"no queue of the policy ({', '.join(leaves)}) held a GPU in that time")
    index = {name: i for i, name in enumerate(leaves)}
    amounts = [[0] * len(leaves) for _ in range(hours)]
    for each in held:
        if each.queue in index and each.hour >= warm:
            amounts[each.hour - warm][index[each.queue]] += each.gpu_us
    had = [sum(column) / history.US_PER_GPU_HOUR for column in zip(*amounts, strict=True)]
    told = list(history.ASSUMED)
    if known > warm:
        told.append(f"the books begin {known - warm} hours into the span")
    if policy.window.kind != "sliding":
        told.append(f"the {policy.window.kind} window as a sliding one of its size")
    if workload.left_out:
        told.append(f"{workload.left_out} jobs of no leaf queue of the policy are left out")
    return Past(workload, gpus, warm * HOUR_S, (hours + warm) * HOUR_S, had, daily_of(amounts), tuple(told))


def _of_trace(path: Path, policy: Policy, gpus: int) -> Past:
    leaves = [queue.name for queue in flat(policy).queues]
    workload = columns(tracefile.load(path, 0), leaves)
    if not workload.submit_s:
        raise WhatIfError(f"{path}: no job of a queue of the policy ({', '.join(leaves)})")
    end_s = max(86_400, -(-(workload.submit_s[-1] + 1) // 86_400) * 86_400)
    told = [history.ASSUMED[-1]]
    if workload.left_out:
        told.append(f"{workload.left_out} jobs of no leaf queue of the policy are left out")
    return Past(workload, gpus, 0, end_s, None, None, tuple(told))


def _replay(policy: Policy, past: Past, name: str) -> Record:
    leaves = [queue.name for queue in flat(policy).queues]
    workload = _sorted_into(past.workload, leaves)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task(f"replaying {name}", total=1.0)
        return under(policy, workload, past.gpus, past.end_s, lambda part: bar.update(task, completed=part))


def _sorted_into(workload: Workload, leaves: Sequence[str]) -> Workload:
    """The same jobs with `leaves` as queues; those of others are left out."""
    index = {name: i for i, name in enumerate(leaves)}
    kept = [i for i, q in enumerate(workload.queue) if workload.queues[q] in index]
    return Workload(
        tuple(leaves), [workload.submit_s[i] for i in kept], [workload.gpus[i] for i in kept],
        [workload.duration_s[i] for i in kept], [index[workload.queues[workload.queue[i]]] for i in kept],
        len(workload.queue) - len(kept),
    )  # fmt: skip


def _rows(leaves: Sequence[str], past: Past, before: Record, after: Record) -> list[Row]:
    now = {each.queue: each for each in got(before, past.from_s)}
    nothing = Got("", 0.0, 0, 0.0, 0.0, 0)
    return [
        Row(name, past.had[q] if past.had is not None else None, now.get(name, nothing), each)
        for q, (name, each) in enumerate(zip(leaves, got(after, past.from_s), strict=True))
    ]


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
                writer.writerow((row.queue, "" if row.had is None else row.had, *figures_[0], *figures_[1]))
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
