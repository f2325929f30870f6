"""Runs the commands that import history (`import prometheus`, `import slurm`) and job names (`slurm import`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from accountant.cli.connection_options import Printed, ZonedLedger
from gputally.base.clock import SystemClock
from gputally.base.command_options import refuse_ignored, with_option_groups
from gputally.base.command_output import Output, show
from gputally.base.errors import AccountantError
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND, US_PER_HOUR

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from accountant.core.claim_overlap import Span
    from accountant.history_import.import_run import Destination, Read, Summary
    from accountant.history_import.slurm_records import Fault


app = typer.Typer(add_completion=False, rich_markup_mode=None)
import_app = typer.Typer(help="Usage from before the agents, from Prometheus or Slurm.", no_args_is_help=True)
app.add_typer(import_app, name="import")
_SETTLED_MS = 10 * MS_PER_MINUTE
"""After this time no more samples or records are expected for an instant."""
_UNTIL_HELP = "End of the history, exclusive, an instant (default: ten minutes ago), rounded down to a whole hour."
_SHOWN = 20


Partial = Annotated[bool, Option("--partial", help="Exit 0 although records were left out.")]
Replace = Annotated[
    bool, Option("--replace", help="Withdraw what was imported of this time before, with an admin's token.")
]
Reason = Annotated[str, Option(help="Why the earlier import is withdrawn, for the audit trail.")]


class CannotImport(AccountantError):
    """The history cannot be imported. The message names the place and the reason in one line."""


@import_app.command("prometheus")
@with_option_groups
def from_prometheus(
    source: Annotated[str, Argument(metavar="URL", help="URL of a Prometheus, or of a service with its HTTP API.")],
    since: Annotated[str, Option(help="Start of the history: 30d or 12h before its end, or an instant.")] = "30d",
    until: Annotated[str | None, Option(help=_UNTIL_HELP)] = None,
    cluster: Annotated[str, Option(help="Name of the cluster in the ledger, the same as in its agents.")] = "default",
    match: Annotated[str, Option(help="Further label matchers, for example 'cluster=\"prod\"'.")] = "",
    scheduler: Annotated[str, Option(help="Scheduler of GPU pods, if kube_pod_scheduler is not scraped.")] = "",
    label: Annotated[list[str] | None, Option(help="Label of pods that may name a team (repeatable).")] = None,
    chunk: Annotated[
        str | None,
        Option(help="Span of one query in whole hours, such as 6h (default: by devices)."),
    ] = None,
    source_token_file: Annotated[Path | None, Option(help="File with the bearer token for URL.")] = None,
    source_ca_file: Annotated[Path | None, Option(help="CA certificates to trust for URL, PEM.")] = None,
    source_header: Annotated[list[str] | None, Option(help="HTTP header for URL, NAME: VALUE (repeatable).")] = None,
    output: Printed = "table",
    *,
    replace: Replace = False,
    reason: Reason = "imported again",
    partial: Partial = False,
    at: ZonedLedger,
) -> None:
    """Import usage from the metrics of dcgm-exporter and kube-state-metrics. Can be interrupted and repeated without
    duplicates. Exit 1 if a part of the history was left out."""
    if not replace:
        refuse_ignored("without --replace", "reason")
    from accountant.history_import.import_run import Destination
    from accountant.history_import.prometheus_source import History, PrometheusFailed
    from gputally.base.prometheus_api import Prometheus
    from gputally.base.terminal import Terminal

    now = SystemClock().wall_ms()
    end = _instant("--until", until, at, now - _SETTLED_MS) // MS_PER_HOUR * MS_PER_HOUR
    span = _since(since, end, at), end
    if span[0] >= end:
        raise CannotImport(f"--since {since}: there is no full hour between this and the end: give an earlier instant")
    server = Prometheus(
        source,
        PrometheusFailed,
        token_file=source_token_file,
        ca_file=source_ca_file,
        headers=dict(map(_header, source_header or ())),
    )
    history = History(server, match=match, scheduler=scheduler, team_labels=label or ())
    length = _chunk(chunk) if chunk is not None else history.chunk_ms(end)
    with at.connection() as remote:
        to = Destination(remote, cluster, "prometheus", server.origin)
        summaries = [(to, _import(to, history.read, span, length, 0, reason if replace else ""))]
    for name in sorted(history.unknown):
        Terminal(stderr=True).print(
            f"{server.origin}: pods request {name}, and nothing says whether it is a GPU: it is not imported",
            soft_wrap=True,
        )
    _finish(summaries, output, 0, partial=partial)


@import_app.command("slurm")
@with_option_groups
def from_slurm(
    file: Annotated[
        Path, Argument(help="Output of `sacct --json --duplicates`, or of `sacct --parsable2` with its heading.")
    ],
    cluster: Annotated[str | None, Option(help="Cluster in the ledger (default: that of each job's record).")] = None,
    nodes: Annotated[Path | None, Option(help="Output of `sinfo --Node --noheader --format '%N|%G'`.")] = None,
    model: Annotated[list[str] | None, Option(help="Model of a GPU type of Slurm, TYPE=MODEL (repeatable).")] = None,
    since: Annotated[str | None, Option(help="Start of the history (default: that of the first job).")] = None,
    until: Annotated[str | None, Option(help=_UNTIL_HELP)] = None,
    output: Printed = "table",
    *,
    replace: Replace = False,
    reason: Reason = "imported again",
    partial: Partial = False,
    at: ZonedLedger,
) -> None:
    """Import allocations from Slurm's accounting. Can be interrupted and repeated without duplicates. Exit 1 if a part
    of the history was left out."""
    from accountant.history_import import slurm_records
    from accountant.history_import.import_run import Destination
    from accountant.history_import.slurm_history import SlurmHistory
    from gputally.base.terminal import Terminal

    reading = slurm_records.read(_bytes(file), at.zone, slurm_records.OF_HISTORY)
    if reading.faults and not reading.runs:
        raise CannotImport(f"{file}: {reading.faults[0].place}: {reading.faults[0].reason}")
    if not reading.tracks_gpus:
        raise CannotImport(
            f"{file}: no job of this file has a GPU. If jobs had GPUs, this site does not track them: add gres/gpu to "
            "AccountingStorageTRES in slurm.conf (Slurm counts them from then on)"
        )
    complain = Terminal(stderr=True)
    offered, faults = slurm_records.offers(_bytes(nodes).decode("utf-8", "replace")) if nodes is not None else ({}, [])
    _complain(complain, nodes or file, faults)
    _complain(complain, file, reading.faults)
    left_out = len(faults) + len(reading.faults)
    names = sorted({job.cluster for job in reading.runs})
    if cluster is not None and len(names) > 1:
        raise CannotImport(
            f"{file}: the file has jobs of {', '.join(names)}, which keep their names: leave --cluster out"
        )
    now = SystemClock().wall_ms()
    end = _instant("--until", until, at, now - _SETTLED_MS) // MS_PER_HOUR * MS_PER_HOUR
    if not replace:
        refuse_ignored("without --replace", "reason")
    summaries: list[tuple[Destination, Summary]] = []
    with at.connection() as remote:
        for name in names:
            jobs = [job for job in reading.runs if job.cluster == name]
            history = SlurmHistory(jobs, offered, end, dict(map(_model, model or ())))
            _complain(complain, file, history.faults)
            left_out += len(history.faults)
            if history.span is None:
                complain.print(
                    f"{file}: no job{f' of {name}' if name else ''} held a GPU, so nothing is imported", soft_wrap=True
                )
                continue
            first = _instant("--since", since, at, history.span[0]) // MS_PER_HOUR * MS_PER_HOUR
            last = min(end, -(-history.span[1] // MS_PER_HOUR) * MS_PER_HOUR)
            if replace and until is not None:
                last = end  # the earlier import may have gone on for longer
            to = Destination(remote, cluster or name or "default", "slurm", file.name)
            why = reason if replace else ""
            faulty = len(faults) + len(reading.faults) + len(history.faults)
            summaries.append((to, _import(to, history.read, (first, last), MS_PER_DAY, faulty, why)))
    _finish(summaries, output, left_out, partial=partial)


def _import(to: Destination, read: Read, span: Span, chunk_ms: int, left_out: int, replace: str) -> Summary:
    from accountant.history_import.import_run import run

    with _bar(f"{to.source} → {to.cluster}") as progress:
        return run(to, read, span, chunk_ms, progress, left_out=left_out, replace=replace)


def _finish(summaries: Sequence[tuple[Destination, Summary]], output: Output, left_out: int, *, partial: bool) -> None:
    """Prints the results. Exits with 1 if the import is not complete, unless the caller asked for a partial one."""
    _print_summaries(summaries, output)
    if not partial and (left_out or any(summary.unplaced_us for _, summary in summaries)):
        raise typer.Exit(1)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from gputally.base.terminal import Terminal

    console = Terminal(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_summaries(summaries: Sequence[tuple[Destination, Summary]], output: Output) -> None:
    """Prints the result for each cluster."""
    from rich.console import Group

    from accountant.history_import.import_run import KNOWN_LIMITS

    records = [
        {
            "cluster": to.cluster, "source": to.source, "origin": to.origin, **asdict(summary),
            "coverage": _coverage(summary), "limits": KNOWN_LIMITS[to.source],
        }
        for to, summary in summaries
    ]  # fmt: skip
    show(output, lambda: Group(*(part for to, summary in summaries for part in _summary_text(to, summary))), records)


def _coverage(summary: Summary) -> float | None:
    """The share of the known time that was sent; None if nothing was known. A bound if records were left out."""
    known_us = summary.sent_us + summary.missing_us + summary.unplaced_us
    return summary.sent_us / known_us if known_us else None


def _summary_text(to: Destination, summary: Summary) -> Iterator[RenderableType]:
    """The result for one cluster: a table, and the known limits of the source."""
    from rich.table import Table
    from rich.text import Text

    from accountant.history_import.import_run import KNOWN_LIMITS

    if not summary.done:
        yield Text(f"{to.cluster}: all of this history was imported before, so nothing was sent (--replace redoes it)")
        return
    table = Table(title=f"Imported into {to.cluster} from {to.origin}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, us in (
        ("GPU-hours of capacity", summary.sent_us),
        ("  of it held", summary.held_us),
        ("  of that with unknown use", summary.unknown_us),
        ("metered by agents, so not sent", summary.metered_us),
        ("of known GPUs, but not recorded", summary.missing_us),
        ("held, but on no known GPU", summary.unplaced_us),
    ):
        table.add_row(name, f"{us / US_PER_HOUR:,.1f}")
    coverage = _coverage(summary)
    bound = "at most " if summary.left_out else ""
    table.add_row("coverage", "–" if coverage is None else f"{bound}{_floor(coverage):.2%}")
    if summary.left_out:
        table.add_row("records left out", f"{summary.left_out:,}")
    table.add_row("GPUs, nodes", f"{summary.gpus:,}, {summary.nodes:,}")
    yield table
    for limit in KNOWN_LIMITS[to.source]:
        yield Text(f"- {limit}")


def _floor(share: float) -> float:
    """A share with two digits of its percentage, rounded down: only all of it is 100 %."""
    return math.floor(share * 10_000) / 10_000


def _complain(console: Console, file: Path, faults: Sequence[Fault]) -> None:
    for fault in faults[:_SHOWN]:
        console.print(f"{file}: {fault.place}: {fault.reason}", soft_wrap=True)
    if len(faults) > _SHOWN:
        console.print(f"{file}: and {len(faults) - _SHOWN} more faults", soft_wrap=True)


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CannotImport(f"{file}: {error.strerror}") from error


def _instant(option: str, text: str | None, at: ZonedLedger, otherwise: int) -> int:
    from accountant.api.problems import Refusal
    from accountant.api.query_parameters import instant

    if text is None:
        return otherwise
    try:
        return instant(option, text, at.zone)
    except Refusal as error:
        raise CannotImport(str(error)) from error


def _since(text: str, end_ms: int, at: ZonedLedger) -> int:
    """The start of the history: a duration before the end, or an instant, rounded down to a whole hour."""
    back = duration_ms(text)
    start = _instant("--since", text, at, 0) if back is None else end_ms - back
    return start // MS_PER_HOUR * MS_PER_HOUR


def duration_ms(text: str) -> int | None:
    """A duration in milliseconds; None if the text is no duration."""
    from gputally.server.config_loading import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError:
        return None
    return seconds * MS_PER_SECOND if isinstance(seconds, int) and seconds > 0 else None


def _chunk(text: str) -> int:
    length = duration_ms(text)
    if length is None or length % MS_PER_HOUR or length > 7 * MS_PER_DAY:
        raise CannotImport(f"--chunk {text}: give whole hours, at most a week, for example 6h")
    return length


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or any(ord(char) < 32 for char in text):
        raise CannotImport("--source-header: write NAME: VALUE on one line")
    return name.strip(), value.strip()


def _model(text: str) -> tuple[str, str]:
    kind, equals, name = text.partition("=")
    if not equals or not kind or not name:
        raise CannotImport(f"--model {text}: write TYPE=MODEL, for example a100=NVIDIA A100-SXM4-80GB")
    return kind, name


slurm_app = typer.Typer(help="Names, users and accounts of Slurm jobs.", no_args_is_help=True)
app.add_typer(slurm_app, name="slurm")
PART = 5_000
"""Number of jobs sent at a time."""


@slurm_app.command("import")
@with_option_groups
def import_jobs(
    file: Annotated[
        Path,
        Argument(help="Output of `sacct --json`, slurmdbd's REST answer, or `sacct --parsable2` with its heading."),
    ],
    cluster: Annotated[str, Option(help="Name of the Slurm cluster in the ledger.")] = "default",
    *,
    partial: Partial = False,
    at: ZonedLedger,
) -> None:
    """Send the names of Slurm jobs to the accountant, because agents know only their numbers. Repeating the command
    changes nothing. Exit 1 if a record was left out."""
    import msgspec

    from accountant.api.bookkeeping_models import ObservedPods, PodReport
    from accountant.history_import import slurm_records
    from gputally.base.terminal import Terminal

    reading = slurm_records.read(_bytes(file), at.zone)
    _complain(Terminal(stderr=True), file, reading.faults)
    if reading.faults and not reading.jobs:
        raise CannotImport(f"{file}: no job could be read: give the output of sacct, or slurmdbd's answer")
    now = SystemClock().wall_ms()
    facts = [slurm_records.facts(job, now) for job in reading.jobs]
    with at.connection() as remote:
        for begin in range(0, len(facts), PART):
            body = msgspec.json.encode(PodReport(cluster, f"slurm ({file.name})", tuple(facts[begin : begin + PART])))
            remote.send(ObservedPods, "/v1/pods", body, "application/json")
    Terminal().print(f"jobs of {cluster} stored: {len(facts):,}; faulty records left out: {len(reading.faults):,}")
    if reading.faults and not partial:
        raise typer.Exit(1)
