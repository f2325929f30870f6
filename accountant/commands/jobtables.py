"""Jobs as tables for a terminal and as rows for a file. Renders, asks nobody."""

from __future__ import annotations

from zoneinfo import ZoneInfo

from rich.console import Group
from rich.table import Table

from accountant.console import NAMES, instant, noted, titled
from accountant.joblines import EpochLine, Job, JobAnswer, JobsAnswer
from accountant.money import exact_sum, gpu_hours, plain
from accountant.periods import utc
from accountant.reports.formats import NOTHING, hours, money
from agent.plaintext import for_cell
from agent.units import MS_PER_SECOND

JOB_COLUMNS = (
    "id", "cluster", "namespace", "job", "teams", "queues", "users", "state", "pods", "pods_running", "created",
    "ended", "waited_seconds", "gpu_models", "gpus", "gpu_hours", "busy_gpu_hours", "idle_gpu_hours", "currency",
    "cost", "unpriced_gpu_hours", "burn_per_hour", "epochs",
)  # fmt: skip
EPOCH_COLUMNS = ("id", "epoch", "start", "end", "gpu_hours", "currency", "cost", "unpriced_gpu_hours")


def many(answer: JobsAnswer, zone: ZoneInfo) -> Table:
    """One job a line, in the answer's order, with totals."""
    currency = answer.currency or ""
    table = titled(f"Jobs, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}")
    for name in ("job", "team", "state"):
        table.add_column(name, overflow="fold")
    for name in ("pods", "waited", "GPU-hours", "busy", "GPUs", f"{currency}/h".lstrip("/")):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"cost {currency}".strip(), justify="right", style="bold", no_wrap=True)
    several = len({job.cluster for job in answer.jobs}) > 1
    for job in answer.jobs:
        held = job.accounts_gpu_us
        table.add_row(
            "/".join(filter(None, (job.cluster if several else "", job.namespace, job.job))),
            ", ".join(NAMES.get(team, team) for team in job.teams),
            job.state,
            f"{job.pods:,}",
            _length(job.waited_ms),
            hours(held.allocated),
            hours(held.busy),
            f"{job.gpus:,.1f}" if job.state == "running" else NOTHING,
            money(job.burn_per_hour, answer.currency) if job.state == "running" else NOTHING,
            money(job.cost, answer.currency),
        )
    table.add_section()
    burning = [job.burn_per_hour for job in answer.jobs if job.state == "running"]
    known = [burn for burn in burning if burn is not None]
    table.add_row(
        f"{len(answer.jobs):,} jobs", "", "", f"{sum(job.pods for job in answer.jobs):,}", "",
        hours(answer.total_gpu_us), hours(sum(job.accounts_gpu_us.busy for job in answer.jobs)),
        f"{sum(job.gpus for job in answer.jobs):,.1f}",
        money(exact_sum(known) if len(known) == len(burning) else None, answer.currency),
        money(answer.total_cost, answer.currency), style="bold",
    )  # fmt: skip
    table.caption = _caption(answer.price_book_version, any(job.unpriced_gpu_us for job in answer.jobs))
    table.caption = noted(
        answer.note, f"{table.caption}; GPUs and their price an hour: over the last minutes on record"
    )
    return table


def one(answer: JobAnswer, zone: ZoneInfo) -> Group:
    """A job: what it is, its time by price, its epochs."""
    job, currency = answer.job, answer.currency
    facts = titled(f"{job.id}, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}")
    facts.show_header = False
    facts.add_column("what")
    facts.add_column("value")
    for what, value in (
        ("state", job.state),
        ("team", ", ".join(NAMES.get(team, team) for team in job.teams)),
        ("queue", ", ".join(NAMES.get(queue, queue) for queue in job.queues)),
        ("user", ", ".join(job.users)),
        ("pods", f"{job.pods:,}, {job.pods_running:,} running"),
        ("longest wait in the queue", _length(job.waited_ms)),
        ("now", f"{job.gpus:,.1f} GPUs, {money(job.burn_per_hour, currency)} {currency or ''} an hour"),
    ):
        facts.add_row(what, value or NOTHING)
    prices = titled("By price")
    for name in ("GPU", "capacity"):
        prices.add_column(name)
    for name in ("GPU-hours", "per GPU-hour", f"cost {currency or ''}".strip()):
        prices.add_column(name, justify="right")
    for part in answer.parts:
        rate = NOTHING if part.unit_price is None else plain(part.unit_price)
        prices.add_row(part.gpu_model, part.capacity_type, hours(part.gpu_us), rate, money(part.cost, currency))
    prices.add_section()
    whole = sum(part.gpu_us for part in answer.parts)
    prices.add_row("total", "", hours(whole), "", money(job.cost, currency), style="bold")
    prices.caption = _caption(answer.price_book_version, job.unpriced_gpu_us > 0)
    return Group(facts, prices, *([_epochs(answer, zone)] if answer.epochs else []))


def _epochs(answer: JobAnswer, zone: ZoneInfo) -> Table:
    table = titled("By epoch")
    for name in ("epoch", "ended"):
        table.add_column(name, justify="right" if name == "epoch" else "left")
    for name in ("lasted", "GPU-hours", f"cost {answer.currency or ''}".strip()):
        table.add_column(name, justify="right")
    for line in answer.epochs:
        table.add_row(
            "since then" if line.epoch is None else str(line.epoch),
            NOTHING if line.epoch is None else instant(line.end_ms, zone),
            _length(line.end_ms - line.start_ms),
            hours(line.gpu_us),
            money(line.cost, answer.currency),
        )
    table.add_section()
    total = hours(sum(line.gpu_us for line in answer.epochs))
    table.add_row("total", "", "", total, money(answer.job.cost, answer.currency), style="bold")
    return table


def job_rows(answer: JobsAnswer) -> list[tuple[object, ...]]:
    """In JOB_COLUMNS; unknown is empty, names are safe for spreadsheets."""
    return [_job_row(job, answer.currency) for job in answer.jobs]


def _job_row(job: Job, currency: str | None) -> tuple[object, ...]:
    held = job.accounts_gpu_us
    return (
        *map(for_cell, (job.id, job.cluster, job.namespace, job.job)),
        *(for_cell(";".join(names)) for names in (job.teams, job.queues, job.users)),
        job.state, job.pods, job.pods_running, _instant(job.created_ms), _instant(job.ended_ms),
        "" if job.waited_ms is None else job.waited_ms / MS_PER_SECOND, for_cell(";".join(job.gpu_models)), job.gpus,
        plain(gpu_hours(held.allocated)), plain(gpu_hours(held.busy)), plain(gpu_hours(held.allocated_idle)),
        currency or "", _plain(job.cost), plain(gpu_hours(job.unpriced_gpu_us)), _plain(job.burn_per_hour), job.epochs,
    )  # fmt: skip


def epoch_rows(answer: JobAnswer) -> list[tuple[object, ...]]:
    """In EPOCH_COLUMNS; what followed the last report has no epoch."""
    return [_epoch_row(answer, line) for line in answer.epochs]


def _epoch_row(answer: JobAnswer, line: EpochLine) -> tuple[object, ...]:
    return (
        answer.job.id, "" if line.epoch is None else line.epoch, utc(line.start_ms), utc(line.end_ms),
        plain(gpu_hours(line.gpu_us)), answer.currency or "", _plain(line.cost), plain(gpu_hours(line.unpriced_gpu_us)),
    )  # fmt: skip


def _caption(version: str, unpriced: bool) -> str:
    return f"price book {version or 'none'}" + ("; no cost where some of the time has no price" if unpriced else "")


def _length(milliseconds: int | None) -> str:
    if milliseconds is None:
        return NOTHING
    minutes, seconds = divmod(milliseconds // MS_PER_SECOND, 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _instant(at_ms: int | None) -> str:
    return "" if at_ms is None else utc(at_ms)


def _plain(value: object) -> str:
    return "" if value is None else format(value, "f")
