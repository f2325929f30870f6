"""Serves the page of jobs that could have cost less in a month, and its file: those for which a slice of a GPU or fewer
GPUs would have been enough, and those that hardly used theirs (accountant.reports.savings_hints)."""

from __future__ import annotations

from typing import Annotated, Final, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import BeforeValidator, Field

from accountant.api.access_control import Reader, known_team_for
from accountant.api.dependencies import AppDeps, Deps
from accountant.core import periods
from accountant.core.periods import Month
from accountant.ledger.protocols import JobKey
from accountant.reports import report_builder
from accountant.reports.report_builder import Report
from accountant.reports.savings_hints import HARDLY_USED, SLICE_AT, Hint, Kind
from accountant.web import month_and_decision_pages, page_queries
from accountant.web.books_pages import empty_as_none
from accountant.web.month_and_decision_pages import TablesParams, month_of, sorting
from accountant.wire.list_order import PageTables, TableSorting
from gputally.base.money import gpu_hours, plain, sum_if_known
from gputally.base.untrusted_text import for_cell
from gputally.server.tokens_and_grants import Principal

router = APIRouter(include_in_schema=False)
KINDS: Final[dict[Kind, str]] = {"slice": "a slice of a GPU", "fewer": "fewer GPUs", "idle": "only while used"}
"""What would have been enough. A job that hardly used its GPUs is not said to need fewer, but for a shorter time."""
TABLES: Final = PageTables(
    {
        "savings": {
            "job": lambda hint: hint.job.job, "team": lambda hint: hint.job.team,
            "gpu_model": lambda hint: sorted(hint.job.gpu_models), "held": lambda hint: hint.held,
            "peak": lambda hint: hint.peak_busy, "needed": lambda hint: hint.needed / hint.needed_of,
            "gpu_hours": lambda hint: hint.job.figures.accounts.allocated, "cost": lambda hint: hint.job.figures.cost,
            "saving": lambda hint: hint.saving,
        }
    },
    frozenset({"job", "team", "gpu_model"}),
)  # fmt: skip


class SavingsParams(TablesParams):
    """month: None for the newest one with records. team: None for all. kind: what would have been enough; None for
    all."""

    month: Annotated[str | None, BeforeValidator(empty_as_none)] = Field(default=None, max_length=7)
    team: Annotated[str | None, BeforeValidator(empty_as_none)] = Field(default=None, max_length=253)
    kind: Annotated[Kind | None, BeforeValidator(empty_as_none)] = None


Asked = Annotated[SavingsParams, Query()]


@router.get("/savings")
def savings(request: Request, params: Asked, deps: AppDeps, principal: Reader) -> Response:
    month, report, order, hints, as_of_ms = _found(params, deps, principal)
    kinds = [(one, KINDS.get(one, "all") if one else "all", _address(params, month, kind=one))
             for one in (None, *get_args(Kind))]  # fmt: skip
    return month_and_decision_pages.page(
        request, "/month", "savings.html", deps, month=month, team=report.team, hints=hints, order=order,
        currency=report.currency, kinds=kinds, kind=params.kind, texts=KINDS, hardly=HARDLY_USED,
        slice_at=SLICE_AT, as_of_ms=as_of_ms,
        csv=_address(params, month).replace("/savings?", "/savings.csv?", 1), recorded=report.statement.metered,
        total_us=sum(hint.job.figures.accounts.allocated for hint in hints),
        total_cost=sum_if_known(None if hint.job.figures.unpriced_us else hint.job.figures.cost for hint in hints),
        total_saving=sum_if_known(hint.saving for hint in hints),
        most=report_builder.CANDIDATES, rest=_idle_jobs(month, report.team),
        job_id=lambda job: JobKey(job.cluster, job.namespace, job.job).id,
    )  # fmt: skip


@router.get("/savings.csv")
def savings_file(request: Request, params: Asked, deps: AppDeps, principal: Reader) -> Response:
    """The same jobs, with exact figures."""
    _, report, _, hints, _ = _found(params, deps, principal)
    heads = ["cluster", "namespace", "job", "team", "gpu_models", "enough", "held_gpus", "peak_busy_gpus",
             "needed_gpus", "needed_of", "gpu_hours", "currency", "cost", "saving_at_most"]  # fmt: skip
    rows = [
        [*map(for_cell, (job.cluster, job.namespace, job.job, job.team, ", ".join(sorted(job.gpu_models)))),
         hint.kind, hint.held, hint.peak_busy, plain(hint.needed), hint.needed_of,
         plain(gpu_hours(job.figures.accounts.allocated)), report.currency or "",
         "" if job.figures.unpriced_us else plain(job.figures.cost),
         "" if hint.saving is None else plain(hint.saving)]
        for hint in hints
        for job in (hint.job,)
    ]  # fmt: skip
    return month_and_decision_pages.csv_file(request, "savings", heads, rows)


def _found(
    params: SavingsParams, deps: Deps, principal: Principal
) -> tuple[Month, Report, TableSorting, list[Hint], int | None]:
    """The month, its report, and the hints in their order. Raises Refusal."""
    now, zone = deps.clock.wall_ms(), periods.zone(deps.settings.timezone)
    month = month_of(deps, params.month or str(periods.month_with_records(now, deps.newest_ms(), zone)))
    team = known_team_for(deps, principal, params.team)
    order = sorting(TABLES, params, "/savings", month=str(month), team=params.team, kind=params.kind)
    readings = page_queries.readings_of(deps, month, team)
    report = report_builder.made_of(readings.value.readings, team=team)
    hints = [hint for hint in report.hints if params.kind in (None, hint.kind)]
    return month, report, order, list(order.rows("savings", hints)), readings.as_of_ms


def _address(params: SavingsParams, month: Month, **other: str | None) -> str:
    given = {"month": str(month), "team": params.team, "kind": params.kind, **other}
    return sorting(TABLES, params, "/savings", **given).address(params.sort or "savings.saving:desc")


def _idle_jobs(month: Month, team: str | None) -> str:
    """The address of the list of all jobs of the month, the most idle first."""
    of_team = {} if team is None else {"where.team": team}
    return "/jobs?" + urlencode({"start": f"{month}-01", "end": f"{month.next}-01", **of_team, "sort": "idle:desc"})
