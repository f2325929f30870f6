"""Finds jobs by name, and formats them as tables and records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from zoneinfo import ZoneInfo

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from accountant.cli.grouped_lines import NAMES
from accountant.cli.terminal_tables import changed, compared_with, instant, noted_caption, priced_by
from accountant.core.file_cells import cell_text
from accountant.core.periods import utc
from accountant.reports.figure_formatting import money
from accountant.wire.job_columns import COLUMNS as FILED
from accountant.wire.job_columns import LOST, cells, file_columns
from accountant.wire.option_types import JobOrder
from accountant.wire.typed_accountant_client import AccountantClient
from accountant.wire.usage_cost_and_job_models import (
    EpochLine,
    Job,
    JobAnswer,
    JobAttempt,
    JobsAnswer,
    JobsStops,
    JobStops,
    NextHolder,
)
from gputally.base.accountant_connection import Query, Unanswered
from gputally.base.money import gpu_hours, plain
from gputally.base.near_names import nearest
from gputally.base.number_format import NOTHING, gpus, hours, percent
from gputally.base.terminal import figures, table
from gputally.base.units import MS_PER_SECOND


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a list of jobs.

    heading: `{currency}` stands for the currency.
    text: of a job, given the currency.
    is_figure: written from the right."""

    heading: str
    text: Callable[[Job, str | None], str]
    is_figure: bool = True


def _hours_of(account: str) -> Callable[[Job, str | None], str]:
    return lambda job, _: hours(getattr(job.accounts_gpu_us, account))


def _named(*fields: str) -> Callable[[Job, str | None], str]:
    return lambda job, _: (
        ", ".join(NAMES.get(name, name) for field in fields for name in getattr(job, field)) or NOTHING
    )


COLUMNS: Final[Mapping[JobOrder, TableColumn]] = {
    "cluster": TableColumn("cluster", lambda job, _: job.cluster or NOTHING, is_figure=False),
    "namespace": TableColumn("namespace", lambda job, _: job.namespace or NOTHING, is_figure=False),
    "team": TableColumn("team", _named("teams"), is_figure=False),
    "user": TableColumn("user", _named("users"), is_figure=False),
    "queue": TableColumn("queue", _named("queues"), is_figure=False),
    "state": TableColumn("state", lambda job, _: job.state, is_figure=False),
    "kind": TableColumn("kind", lambda job, _: job.kind or NOTHING, is_figure=False),
    "pods": TableColumn("pods", lambda job, _: f"{job.pods:,}"),
    "waited": TableColumn("longest wait", lambda job, _: _length(job.waited_ms)),
    "gpu_hours": TableColumn("GPU-hours", _hours_of("allocated")),
    "busy": TableColumn("busy", _hours_of("busy")),
    "utilisation": TableColumn("utilisation", lambda job, _: percent(job.accounts_gpu_us.utilisation)),
    "idle": TableColumn("idle", _hours_of("allocated_idle")),
    "unknown": TableColumn("use unknown", _hours_of("allocated_unknown")),
    "gpus": TableColumn("GPUs", lambda job, _: f"{job.gpus:,.1f}" if job.state == "running" else NOTHING),
    "burn": TableColumn(
        "{currency}/h",
        lambda job, currency: money(job.burn_per_hour, currency) if job.state == "running" else NOTHING,
    ),
    "cost": TableColumn("cost {currency}", lambda job, currency: money(job.cost, currency)),
    "unpriced": TableColumn("unpriced", lambda job, _: hours(job.unpriced_gpu_us)),
    "gpu_model": TableColumn("GPU", _named("gpu_models"), is_figure=False),
    "created": TableColumn("created", lambda job, _: _instant(job.created_ms) or NOTHING, is_figure=False),
    "ended": TableColumn("ended", lambda job, _: _instant(job.ended_ms) or NOTHING, is_figure=False),
    "epochs": TableColumn("epochs", lambda job, _: f"{job.epochs:,}"),
    LOST: TableColumn("lost by stops", lambda job, _: _lost(job.stops)),
}
"""The columns beside the job, by the names of the API's orders."""
_USUAL: Final[tuple[JobOrder, ...]] = (
    "team", "state", "pods", "waited", "gpu_hours", "busy", "gpus", "burn", "cost"
)  # fmt: skip


def _lost_of(stops: JobsStops | None) -> str:
    """What the column of losses means, and of how many jobs they are unknown."""
    if stops is None:
        return ""
    unknown = f", unknown of {stops.unknown_jobs:,} jobs" if stops.unknown_jobs else ""
    return f"; lost by stops: GPU-hours since the last checkpoint{unknown}"


def _held_of(answer: JobsAnswer) -> str:
    """How many of the jobs held a GPU, if not all did."""
    return "" if answer.held_count == answer.count else f", {answer.held_count:,} held a GPU"


_MAY_DROP: Final[tuple[JobOrder, ...]] = ("pods", "waited", "gpus", "burn", "busy", "team", "state")


def jobs_table(answer: JobsAnswer, zone: ZoneInfo, shown: Sequence[JobOrder] = ()) -> Table:
    """A table with one job per line, in the order of the answer, and the totals of all pages. shown: the columns; the
    usual ones without any."""
    currency = answer.currency or ""
    several = len({job.cluster for job in answer.jobs}) > 1
    more = (answer.count or 0) - len(answer.jobs)
    priced = priced_by(answer.price_book_version, unpriced=any(job.unpriced_gpu_us for job in answer.jobs))
    usual = (*_USUAL, *((LOST,) if answer.stops is not None else ()))
    chosen: dict[str, TableColumn] = {name: COLUMNS[name] for name in shown or usual}
    headings = {name: column.heading.format(currency=currency).lstrip("/") for name, column in chosen.items()}
    before = answer.before
    if before is not None:
        chosen["change"] = TableColumn("change", lambda job, _: changed(_held(job), _held(job.then), before))
        headings["change"] = "change"
    totals = {
        "gpu_hours": hours(answer.total_gpu_us), "cost": money(answer.total_cost, answer.currency),
        "burn": money(answer.total_burn_per_hour, answer.currency),
        LOST: _lost(answer.stops),
        "change": changed(answer.total_gpu_us, before.total_gpu_us if before is not None else None, before),
    }  # fmt: skip
    columns = [Column("job", overflow="fold")]
    for name, column in chosen.items():
        if column.is_figure:
            columns += figures(headings[name], style="bold" if name == "cost" else "", no_wrap=True)
        elif name == "state":
            columns.append(Column("state", no_wrap=True))
        else:
            columns.append(Column(headings[name], overflow="fold"))
    return table(
        f"Jobs, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}",
        columns,
        (
            (
                "/".join(filter(None, (job.cluster if several else "", job.namespace, job.job)))
                + (f" (pod {job.pod})" if job.pod else ""),
                *(column.text(job, answer.currency) for column in chosen.values()),
            )
            for job in answer.jobs
        ),
        total=(
            NOTHING if answer.count is None else f"{answer.count:,} jobs{_held_of(answer)}",
            *(totals.get(name, "") for name in chosen),
        ),
        caption=noted_caption(
            "\n".join(filter(None, (f"{more:,} more: --limit, --search, --sort" if more else "", answer.note))),
            f"{priced}; GPUs and their cost per hour: over the last minutes on record{compared_with(before, zone)}"
            f"{_lost_of(answer.stops)}",
        ),
        may_drop=[headings[name] for name in _MAY_DROP if name in headings] if not shown else (),
    )


def print_job(answer: JobAnswer, zone: ZoneInfo) -> Group:
    """Tables about one job: its facts, its time by price, and its epochs if there are any."""
    job, currency = answer.job, answer.currency
    cost = f"cost {currency or ''}"
    facts = table(
        f"{job.id}, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}",
        ["what", "value"],
        (
            (what, value or NOTHING)
            for what, value in (
                ("state", job.state),
                ("asks for", "" if job.asks_gpus is None else f"{job.asks_gpus:,} GPUs"),
                ("created", NOTHING if job.created_ms is None else instant(job.created_ms, zone)),
                ("waits since", _waits_since(job, zone)),
                ("team", ", ".join(NAMES.get(team, team) for team in job.teams)),
                ("queue", ", ".join(NAMES.get(queue, queue) for queue in job.queues)),
                ("user", ", ".join(job.users)),
                ("pods", f"{job.pods:,}, {job.pods_running:,} running"),
                ("longest wait in the queue", _length(job.waited_ms)),
                ("last stop", "" if answer.last_stop is None else _stop(answer.last_stop, answer.job.id, zone)),
                ("GPU-hours lost by stops", _lost_of_job(answer) if answer.attempts else ""),
                (
                    "now",
                    ""
                    if job.gpus is None
                    else f"{job.gpus:,.1f} GPUs, {money(job.burn_per_hour, currency)} {currency or ''} per hour",
                ),
            )
        ),
    )
    facts.show_header = False
    prices = table(
        "By price",
        ["GPU", "capacity", *figures("GPU-hours", "per GPU-hour", cost)],
        (
            (part.gpu_model, part.capacity_type, hours(part.gpu_us),
             NOTHING if part.unit_price is None else plain(part.unit_price), money(part.cost, currency))
            for part in answer.parts
        ),
        total=("total", "", hours(sum(part.gpu_us for part in answer.parts)), "", money(job.cost, currency)),
        caption=priced_by(answer.price_book_version, unpriced=job.unpriced_gpu_us > 0),
    )  # fmt: skip
    epochs = table(
        "By epoch",
        [*figures("epoch"), "ended", *figures("lasted", "GPU-hours", cost)],
        (
            (
                "since then" if line.epoch is None else str(line.epoch),
                NOTHING if line.epoch is None else instant(line.end_ms, zone),
                _length(line.end_ms - line.start_ms),
                NOTHING if line.gpu_us is None else hours(line.gpu_us),
                money(line.cost, currency),
            )
            for line in answer.epochs
        ),
        total=("total", "", "", hours(job.accounts_gpu_us.allocated), money(job.cost, currency)),
        caption=_UNKNOWN if any(line.gpu_us is None for line in answer.epochs) else "",
    )
    attempts = table(
        "Attempts",
        [*figures("no."), "started", "stopped", *figures("waited", "ran", "GPUs", "GPU-hours", "lost"),
         "stopped by"],
        (
            (
                NOTHING if one.number is None else str(one.number),
                "earlier" if one.start_ms is None else instant(one.start_ms, zone),
                "running" if one.end_ms is None else instant(one.end_ms, zone),
                _length(one.waited_ms),
                _length(_ran_ms(one, answer.end_ms)),
                gpus(one.held_gpus),
                hours(one.gpu_us),
                NOTHING if one.lost_gpu_us is None else hours(one.lost_gpu_us),
                one.by or _ENDS[one.end],
            )
            for one in answer.attempts or ()
        ),
        caption=_UNKNOWN
        if answer.attempts is None
        else "lost: GPU-hours since the last checkpoint" + _left_out(answer.earlier_attempts),
        may_drop=("no.", "waited", "GPUs", "ran", "GPU-hours"),
    )  # fmt: skip
    is_told = answer.attempts is None or answer.attempts
    stops = [
        Text(_stop(one, job.id, zone), overflow="fold")
        for one in answer.attempts or ()
        if one.reason or one.next_holders or _saved(one, zone)
    ]
    of_attempts: list[RenderableType] = [attempts, *stops] if is_told else []
    return Group(facts, *of_attempts, prices, *([epochs] if answer.epochs else []))


_UNKNOWN = "not known: this ledger has whole hours; ask the cluster's own accountant"
_ENDS = {
    "running": NOTHING, "preempted": "a scheduler", "node-down": "its node", "failed": "it failed",
    "stopped": "not recorded", "ended": "the job ended", "unknown": "unknown: its node has been silent since",
}  # fmt: skip


def _stop(one: JobAttempt, job: str, zone: ZoneInfo) -> str:
    """When an attempt stopped, by whom and why, and who held its GPUs next."""
    told = [*([_stopped_by(one)] if one.reason else []), *_saved(one, zone), *_went_to(one, job)] or [_ENDS[one.end]]
    return f"{NOTHING if one.end_ms is None else instant(one.end_ms, zone)}: {'; '.join(told)}"


def _stopped_by(one: JobAttempt) -> str:
    """By whom and why an attempt was stopped."""
    begin = one.by or ("" if one.reason and one.end in ("stopped", "node-down") else _ENDS[one.end])
    return ": ".join(filter(None, (begin, one.reason)))


def _saved(one: JobAttempt, zone: ZoneInfo) -> list[str]:
    """The last checkpoint before a stop, if it is known."""
    if one.checkpoint_ms is None or one.end == "running":
        return []
    return [f"its last checkpoint was {instant(one.checkpoint_ms, zone)}"]


def _waits_since(job: Job, zone: ZoneInfo) -> str:
    if job.waiting_since_ms is None:
        return ""
    return f"{instant(job.waiting_since_ms, zone)}, for {_length(job.waiting_ms)}"


def _lost_of_job(answer: JobAnswer) -> str:
    """The GPU-hours that the stops of a job lost."""
    if answer.lost_gpu_us is not None:
        return hours(answer.lost_gpu_us)
    return f"at least {hours(answer.known_lost_gpu_us)}" if answer.known_lost_gpu_us else "unknown"


def _lost(stops: JobStops | None) -> str:
    """The GPU-hours that stops lost, or as much as is known of them."""
    if stops is None or stops.lost_gpu_us is None:
        return f"≥ {hours(stops.known_lost_gpu_us)}" if stops and stops.known_lost_gpu_us else NOTHING
    return hours(stops.lost_gpu_us)


def _ran_ms(one: JobAttempt, until_ms: int) -> int | None:
    """How long an attempt ran; until `until_ms` if it still runs, and None if it is unknown when it began, or later."""
    if one.start_ms is None:
        return None
    length_ms = (until_ms if one.end_ms is None else one.end_ms) - one.start_ms
    return length_ms if length_ms > 0 else None


def _left_out(earlier: int | None) -> str:
    if earlier is None:
        return "; earlier attempts are not shown, and their number is not known"
    return f"; {earlier:,} earlier attempts are not shown" if earlier else ""


def _went_to(one: JobAttempt, job: str) -> list[str]:
    """Who held the GPUs of an attempt next, within half an hour; nothing if nobody is known."""
    every = one.next_holders or ()
    takers = ", ".join(_next_holder(taker, job) for taker in every[:_SHOWN])
    takers += f" and {len(every) - _SHOWN:,} more" if len(every) > _SHOWN else ""
    return [f"its GPUs went to {takers}"] if takers else []


def _next_holder(taker: NextHolder, job: str) -> str:
    """job: the id of the job whose GPUs it took."""
    later = f", {_length(taker.after_ms)} later" if taker.after_ms else ""
    return f"{'itself' if taker.job == job else taker.job or 'another team'} ({gpus(taker.held_gpus)}{later})"


def _held(job: Job | None) -> int | None:
    return None if job is None else job.accounts_gpu_us.allocated


def job_records(
    jobs: Iterable[Job],
    currency: str | None,
    shown: Sequence[JobOrder] = (),
    *,
    compare: bool = False,
    lost: bool = False,
) -> Iterator[dict[str, object]]:
    """Jobs as rows of CSV, with the columns of the page's file; unknown values are empty. shown: the columns; all
    without any, and those of losses only if they were asked. compare: with the figures of the span before."""
    usual = tuple(name for name in FILED if name != LOST or lost)
    parts, with_currency = file_columns(shown or usual, compare=compare)
    for job in jobs:
        *found, told = cells(parts, job, currency, with_currency=True)
        row: dict[str, object] = {
            part.name: cell_text(cell, part.kind) for part, cell in zip(parts, found, strict=True)
        }
        yield row | ({"currency": told} if with_currency else {})


def epoch_record(answer: JobAnswer, line: EpochLine) -> dict[str, object]:
    """An epoch as a row of CSV. The time after the last report has no epoch."""
    return {
        "id": answer.job.id,
        "epoch": "" if line.epoch is None else line.epoch,
        "start": utc(line.start_ms),
        "end": utc(line.end_ms),
        "gpu_hours": "" if line.gpu_us is None else plain(gpu_hours(line.gpu_us)),
        "currency": answer.currency or "",
        "cost": _plain(line.cost),
        "unpriced_gpu_hours": "" if line.unpriced_gpu_us is None else plain(gpu_hours(line.unpriced_gpu_us)),
    }


def _length(milliseconds: int | None) -> str:
    if milliseconds is None:
        return NOTHING
    minutes, seconds = divmod(milliseconds // MS_PER_SECOND, 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _instant(at_ms: int | None) -> str:
    return "" if at_ms is None else utc(at_ms)


def _plain(value: object) -> str:
    return "" if value is None else format(value, "f")


_LONGEST = 253
"""Length of the longest text that the accountant searches for."""
_SHOWN = 5
"""Number of candidates named in an error about an ambiguous job, and of jobs that held the GPUs of another next."""


def called(name: str, remote: AccountantClient, span: Query) -> str:
    """The id of the one job of the span with this name, or with a pod of this name. Raises Unanswered, which lists
    the candidates."""
    found = remote.whole(JobsAnswer, "/v1/jobs", {**span, "search": name.rpartition("/")[2][:_LONGEST]}).jobs
    ids = sorted(job.id for job in jobs_named(found, name))
    if len(ids) == 1:
        return ids[0]
    if not ids:
        jobs = remote.whole(JobsAnswer, "/v1/jobs", span).jobs
        near = nearest(name.rpartition("/")[2], {job.job.rpartition("/")[2] for job in jobs})
        raise Unanswered(
            f"no job {name!r} held or requested a GPU in that time{near}; an earlier --start searches further back"
        )
    shown = ", ".join(ids[:_SHOWN]) + (f" and {len(ids) - _SHOWN:,} more" if len(ids) > _SHOWN else "")
    raise Unanswered(f"{name!r} fits {len(ids):,} jobs, give more of the name: {shown}")


def jobs_named(jobs: Iterable[Job], name: str) -> list[Job]:
    """The jobs whose CLUSTER/NAMESPACE/KIND/NAME or CLUSTER/NAMESPACE/NAME ends with `name`; without any, those with a
    pod of which CLUSTER/NAMESPACE/NAME does."""
    end = f"/{name.strip('/')}"
    matching, of_pods = list[Job](), list[Job]()
    for job in jobs:
        path, name_only = f"/{job.cluster}/{job.namespace}", job.job.rpartition("/")[2]
        if f"{path}/{job.job}".endswith(end) or f"{path}/{name_only}".endswith(end):
            matching.append(job)
        elif f"{path}/{job.pod}".endswith(end):
            of_pods.append(job)
    return matching or of_pods
