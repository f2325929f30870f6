"""Renders a report as one self-contained HTML page with charts.

Names of teams, pods and jobs come from users. All text therefore passes jinja2's autoescape, `charts` builds element
trees, and the page's content security policy forbids scripts and external content."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeAlias

from jinja2 import Environment

from accountant.billing.statements import Adjustment, Correction
from accountant.bookkeeping.month_closing import statement_hash
from accountant.reports import charts, figure_formatting
from accountant.reports.job_ranking import EpochRow
from accountant.reports.report_breakdowns import JobRow
from accountant.reports.report_builder import CANDIDATES, Report
from accountant.reports.savings_hints import SpotRow
from accountant.wire.list_order import PageTables, TableSorting
from gputally.server import page_layout

JobNamed: TypeAlias = JobRow | EpochRow | SpotRow


def _job_name(row: JobNamed) -> tuple[str, str, str]:
    return row.job, row.namespace, row.cluster


TABLES: Final = PageTables(
    {
        "teams": {
            "team": lambda row: row.team, "allocated": lambda row: row.figures.accounts.allocated,
            "busy": lambda row: row.figures.accounts.busy, "idle": lambda row: row.figures.accounts.allocated_idle,
            "utilisation": lambda row: row.figures.utilisation, "share": lambda row: row.share,
            "idle_cost": lambda row: row.figures.idle_cost, "cost": lambda row: row.figures.cost,
            "change": lambda row: row.change and row.change.relative,
        },
        "budgets": {
            "name": lambda row: row.name, "of": figure_formatting.budget_of, "unit": lambda row: row.unit,
            "limit": lambda row: row.limit, "spent": lambda row: row.spent, "used": lambda row: row.ratio,
            "forecast": lambda row: row.forecast, "low": lambda row: row.forecast_low,
            "exhausted": lambda row: row.exhausted_ms,
        },
        "kinds": {
            "gpu_model": lambda row: row.gpu_model, "capacity_type": lambda row: row.capacity_type,
            "present": lambda row: row.figures.accounts.total,
            "allocated": lambda row: row.figures.accounts.allocated,
            "unallocated": lambda row: row.figures.accounts.unallocated,
            "busy": lambda row: row.figures.accounts.busy, "utilisation": lambda row: row.figures.utilisation,
            "price": lambda row: max(row.unit_prices, default=None),
            "cost": lambda row: row.figures.cost if row.unit_prices else None,
        },
        "epochs": {
            "job": _job_name, "epochs": lambda row: row.epochs, "held": lambda row: row.gpu_us,
            "cost": lambda row: row.cost, "mean": lambda row: row.mean_cost, "rest": lambda row: row.rest_cost,
        },
        "users": {
            "user": lambda row: row.user or None, "jobs": lambda row: row.jobs,
            "held": lambda row: row.figures.accounts.allocated, "busy": lambda row: row.figures.accounts.busy,
            "utilisation": lambda row: row.figures.utilisation,
            "idle_cost": lambda row: row.shown and row.shown.idle_cost,
            "cost": lambda row: row.shown and row.shown.cost,
        },
        "quotas": {
            "queue": lambda row: row.queue, "team": lambda row: row.team,
            "guaranteed": lambda row: row.guaranteed_us, "held": lambda row: row.within_us,
            "taken": lambda row: row.within_us / row.guaranteed_us if row.guaranteed_us else None,
            "unused": lambda row: row.unused_us, "borrowed": lambda row: row.borrowed_us,
        },
        "idle": {
            "job": _job_name, "team": lambda row: row.team, "held": lambda row: row.figures.accounts.allocated,
            "busy": lambda row: row.figures.accounts.busy, "utilisation": lambda row: row.figures.utilisation,
            "idle_cost": lambda row: row.figures.idle_cost,
        },
        "spot": {
            "job": _job_name, "team": lambda row: row.team, "held": lambda row: row.gpu_us,
            "cost": lambda row: row.cost, "saving": lambda row: row.saving,
        },
        "waits": {
            "queue": lambda row: row.queue, "team": lambda row: row.team, "pods": lambda row: row.pods,
            "waiting": lambda row: row.waiting, "median": lambda row: row.queued.median_ms,
            "p95": lambda row: row.queued.p95_ms, "longest": lambda row: row.queued.longest_ms,
            "starting": lambda row: row.starting.median_ms if row.starting.pods else None,
        },
    },
    frozenset({"team", "name", "of", "unit", "gpu_model", "capacity_type", "job", "user", "queue", "exhausted"}),
)  # fmt: skip
"""The tables of a report that can be sorted on a page."""


_HINTS: Final = 6
"""Suggestions of a report; files have all of them."""


@dataclass(frozen=True, slots=True)
class Links:
    """Functions that return the URLs to which a report links as a page of the accountant.

    lines: the statement lines behind a figure, by team, account, GPU model, ….
    act: the journal entry of a correction or adjustment.
    user: what a user held.
    jobs: the URL of the list of all jobs.
    savings: the URL of the list of all jobs for which less would have been enough.
    order: the order of the tables."""

    lines: Callable[..., str]
    job: Callable[[JobNamed], str]
    team: Callable[[str], str]
    month: Callable[[str], str]
    act: Callable[[Correction | Adjustment], str]
    user: Callable[[str], str]
    jobs: str
    savings: str
    order: TableSorting


def render_html(report: Report, links: Links | None = None) -> str:
    """A complete HTML document. links: None for a file."""
    title = f"Allocated GPU-hours by day, {figure_formatting.span(report)}"
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            links=links,
            order=links.order if links is not None else TABLES.sorting(),
            statement_hash=statement_hash(report.statement),
            f=figure_formatting,
            most_hints=_HINTS,
            most_candidates=CANDIDATES,
            several_clusters=len({row.cluster for row in _of_jobs(report)}) > 1,
            series=charts.series(report.daily, report.everyone),
            week=figure_formatting.week_text(report.week, report.currency),
            daily=charts.daily(report.daily, title, report.everyone, capacity=report.team is None),
            hours=charts.hours(report.rhythm, "Held GPUs by hour of the day"),
            accounts=charts.accounts(report.accounts, f"Where the capacity of {figure_formatting.span(report)} went"),
        )
    )


def _of_jobs(report: Report) -> Iterator[JobNamed]:
    yield from report.jobs_by_cost
    yield from report.jobs_by_waste
    yield from report.epochs
    yield from report.idle_holders
    yield from report.spot
    yield from (hint.job for hint in report.hints)


@cache
def _environment() -> Environment:
    return page_layout.environment("accountant.reports")
