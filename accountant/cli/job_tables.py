"""Finds jobs by name, and formats them as tables and records."""

from __future__ import annotations

from collections.abc import Iterable
from zoneinfo import ZoneInfo

from rich.console import Group
from rich.table import Column, Table

from accountant.cli.terminal_tables import NAMES, instant, noted_caption, priced_by
from accountant.core.periods import utc
from accountant.reports.figure_formatting import money
from accountant.wire.typed_accountant_client import AccountantClient
from accountant.wire.usage_cost_and_job_models import (
    EpochLine,
    Job,
    JobAnswer,
    JobAttempt,
    JobsAnswer,
    NextHolder,
)
from gputally.base.accountant_connection import Query, Unanswered
from gputally.base.money import gpu_hours, plain
from gputally.base.near_names import nearest
from gputally.base.number_format import NOTHING, hours
from gputally.base.terminal import figures, table
from gputally.base.units import MS_PER_SECOND
from gputally.base.untrusted_text import for_cell


def jobs_table(answer: JobsAnswer, zone: ZoneInfo) -> Table:
    """A table with one job per line, in the order of the answer, and the totals of all pages."""
    currency = answer.currency or ""
    several = len({job.cluster for job in answer.jobs}) > 1
    more = answer.count - len(answer.jobs)
    priced = priced_by(answer.price_book_version, unpriced=any(job.unpriced_gpu_us for job in answer.jobs))
    return table(
        f"Jobs, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}",
        [
            *(Column(name, overflow="fold") for name in ("job", "team")),
            Column("state", no_wrap=True),
            *figures("pods", "waited", "GPU-hours", "busy", "GPUs", f"{currency}/h".lstrip("/"), no_wrap=True),
            *figures(f"cost {currency}", style="bold", no_wrap=True),
        ],
        (
            (
                "/".join(filter(None, (job.cluster if several else "", job.namespace, job.job))),
                ", ".join(NAMES.get(team, team) for team in job.teams),
                job.state,
                f"{job.pods:,}",
                _length(job.waited_ms),
                hours(job.accounts_gpu_us.allocated),
                hours(job.accounts_gpu_us.busy),
                f"{job.gpus:,.1f}" if job.state == "running" else NOTHING,
                money(job.burn_per_hour, answer.currency) if job.state == "running" else NOTHING,
                money(job.cost, answer.currency),
            )
            for job in answer.jobs
        ),
        total=(
            f"{answer.count:,} jobs", "", "", "", "", hours(answer.total_gpu_us), "", "", "",
            money(answer.total_cost, answer.currency),
        ),
        caption=noted_caption(
            "\n".join(filter(None, (f"{more:,} more: --limit, --search, --sort" if more else "", answer.note))),
            f"{priced}; GPUs and their price an hour: over the last minutes on record",
        ),
        may_drop=("pods", "waited", "GPUs", f"{currency}/h".lstrip("/"), "busy", "team", "state"),
    )  # fmt: skip


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
                ("team", ", ".join(NAMES.get(team, team) for team in job.teams)),
                ("queue", ", ".join(NAMES.get(queue, queue) for queue in job.queues)),
                ("user", ", ".join(job.users)),
                ("pods", f"{job.pods:,}, {job.pods_running:,} running"),
                ("longest wait in the queue", _length(job.waited_ms)),
                ("now", f"{job.gpus:,.1f} GPUs, {money(job.burn_per_hour, currency)} {currency or ''} an hour"),
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
                hours(line.gpu_us),
                money(line.cost, currency),
            )
            for line in answer.epochs
        ),
        total=("total", "", "", hours(sum(line.gpu_us for line in answer.epochs)), money(job.cost, currency)),
    )
    attempts = table(
        "Attempts",
        [*figures("no."), "started", "stopped", *figures("waited", "ran", "GPUs", "GPU-hours", "lost"),
         Column("stopped by", overflow="fold"), Column("GPUs went to", overflow="fold")],
        (
            (
                NOTHING if one.number is None else str(one.number),
                instant(one.start_ms, zone),
                "running" if one.end_ms is None else instant(one.end_ms, zone),
                _length(one.waited_ms),
                _length(_ran_ms(one, answer.end_ms)),
                str(one.gpus),
                hours(one.gpu_us),
                NOTHING if one.lost_gpu_us is None else hours(one.lost_gpu_us),
                one.reason or _ENDS[one.end],
                ", ".join(_next_holder(taker, job.id) for taker in one.next_holders or ()) or NOTHING,
            )
            for one in answer.attempts or ()
        ),
        caption="lost: GPU-hours since the last checkpoint; GPUs went to: who held them next, within half an hour"
        + _left_out(answer.earlier_attempts),
        may_drop=("lost", "GPUs", "no.", "waited", "ran", "GPU-hours"),
    )  # fmt: skip
    return Group(facts, *([attempts] if answer.attempts else []), prices, *([epochs] if answer.epochs else []))


_ENDS = {
    "running": NOTHING, "preempted": "the controller", "node-down": "its node", "stopped": "not recorded",
    "ended": "the job ended",
}  # fmt: skip


def _ran_ms(one: JobAttempt, until_ms: int) -> int | None:
    """How long an attempt ran; until `until_ms` if it still runs, and None if it began later."""
    length_ms = (until_ms if one.end_ms is None else one.end_ms) - one.start_ms
    return length_ms if length_ms > 0 else None


def _left_out(earlier: int | None) -> str:
    if earlier is None:
        return "; earlier attempts are not shown, and their number is not known"
    return f"; {earlier:,} earlier attempts are not shown" if earlier else ""


def _next_holder(taker: NextHolder, job: str) -> str:
    """job: the id of the job whose GPUs it took."""
    later = f", {_length(taker.after_ms)} later" if taker.after_ms else ""
    return f"{'itself' if taker.job == job else taker.job or 'another team'} ({taker.gpus}{later})"


def job_record(job: Job, currency: str | None) -> dict[str, object]:
    """A job as a row of CSV. Unknown values are empty, and names are safe for spreadsheets."""
    held = job.accounts_gpu_us
    names = {name: for_cell(getattr(job, name)) for name in ("id", "cluster", "namespace", "job")}
    names |= {name: for_cell(";".join(getattr(job, name))) for name in ("teams", "queues", "users")}
    return names | {
        "state": job.state,
        "pods": job.pods,
        "pods_running": job.pods_running,
        "created": _instant(job.created_ms),
        "ended": _instant(job.ended_ms),
        "waited_seconds": "" if job.waited_ms is None else job.waited_ms / MS_PER_SECOND,
        "gpu_models": for_cell(";".join(job.gpu_models)),
        "gpus": job.gpus,
        "gpu_hours": plain(gpu_hours(held.allocated)),
        "busy_gpu_hours": plain(gpu_hours(held.busy)),
        "idle_gpu_hours": plain(gpu_hours(held.allocated_idle)),
        "currency": currency or "",
        "cost": _plain(job.cost),
        "unpriced_gpu_hours": plain(gpu_hours(job.unpriced_gpu_us)),
        "burn_per_hour": _plain(job.burn_per_hour),
        "epochs": job.epochs,
    }


def epoch_record(answer: JobAnswer, line: EpochLine) -> dict[str, object]:
    """An epoch as a row of CSV. The time after the last report has no epoch."""
    return {
        "id": answer.job.id,
        "epoch": "" if line.epoch is None else line.epoch,
        "start": utc(line.start_ms),
        "end": utc(line.end_ms),
        "gpu_hours": plain(gpu_hours(line.gpu_us)),
        "currency": answer.currency or "",
        "cost": _plain(line.cost),
        "unpriced_gpu_hours": plain(gpu_hours(line.unpriced_gpu_us)),
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
"""Number of candidates named in an error about an ambiguous job."""


def called(name: str, remote: AccountantClient, span: Query) -> str:
    """The id of the one job of the span with this name. Raises Unanswered, which lists the candidates."""
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
    """The jobs whose CLUSTER/NAMESPACE/KIND/NAME or CLUSTER/NAMESPACE/NAME ends with `name`."""
    end = f"/{name.strip('/')}"
    matching = []
    for job in jobs:
        path, name_only = f"/{job.cluster}/{job.namespace}", job.job.rpartition("/")[2]
        if f"{path}/{job.job}".endswith(end) or f"{path}/{name_only}".endswith(end):
            matching.append(job)
    return matching
