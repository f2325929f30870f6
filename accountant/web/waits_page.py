"""Serves the page of waits: how long pods waited in each queue, team or namespace, with the figures of `GET /v1/waits`,
and its file."""

from __future__ import annotations

from typing import Annotated, Final, get_args

from fastapi import APIRouter, Query, Request, Response

from accountant.api.access_control import Reader
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.query_parameters import QuerySpan
from accountant.api.usage_cost_and_job_routes import WaitParams, wait_lines
from accountant.core import periods
from accountant.reports import figure_formatting
from accountant.web import month_and_decision_pages
from accountant.web.list_bar import RECENT
from accountant.web.month_and_decision_pages import sorting
from accountant.wire.list_order import PageTables, TableSorting
from accountant.wire.option_types import WaitGroup
from accountant.wire.usage_cost_and_job_models import WaitLine, longest_first
from gputally.base.untrusted_text import for_cell
from gputally.server.tokens_and_grants import Principal

router = APIRouter(include_in_schema=False)
TABLES: Final = PageTables(
    {
        "waits": {
            "key": lambda row: row.key, "pods": lambda row: row.pods, "waiting": lambda row: row.waiting,
            "mean": lambda row: row.queued.mean, "median": lambda row: row.queued.median,
            "p95": lambda row: row.queued.p95, "longest": lambda row: row.queued.longest,
            "starting": lambda row: row.starting.median,
        }
    },
    frozenset({"key"}),
)  # fmt: skip
_USUAL_SPAN: Final = "7d"


class WaitPageParams(WaitParams, month_and_decision_pages.TablesParams):
    """The parameters of `GET /v1/waits`, of the last seven days without a start."""

    start: str | None = _USUAL_SPAN


Asked = Annotated[WaitPageParams, Query()]


@router.get("/waits")
def waits_page(request: Request, params: Asked, deps: AppDeps, principal: Reader) -> Response:
    order, span, rows = _found(params, deps, principal)
    zone = periods.zone(span.timezone)

    def address(**other: str | None) -> str:
        return _sorting(params, **other).address(params.sort or "waits.median:desc")

    return month_and_decision_pages.page(
        request, "/jobs", "waits.html", deps, rows=rows, order=order, by=params.by, span_zone=zone,
        groups=[(by, address(by=by)) for by in get_args(WaitGroup)],
        spans=[(name, address(start=start, end=None), start == params.start) for start, name in RECENT.items()],
        span_text=figure_formatting.span_of(span.start_ms, min(span.end_ms, deps.clock.wall_ms()), zone),
        csv=address().replace("/waits?", "/waits.csv?", 1),
    )  # fmt: skip


@router.get("/waits.csv")
def waits_file(request: Request, params: Asked, deps: AppDeps, principal: Reader) -> Response:
    """The same lines, in seconds."""
    rows = _found(params, deps, principal)[2]
    spread = ("pods", "mean", "median", "p95", "longest")
    heads = [params.by, "pods", "waiting", *(f"queued_{name}_s" for name in spread[1:]),
             *(f"starting_{name}_s" for name in spread[1:])]  # fmt: skip
    cells = [
        [for_cell(row.key), row.pods, "" if row.waiting is None else row.waiting,
         *("" if (value := getattr(of, name)) is None else value for of in (row.queued, row.starting)
           for name in spread[1:])]
        for row in rows
    ]  # fmt: skip
    return month_and_decision_pages.csv_file(request, "waits", heads, cells)


def _found(params: WaitPageParams, deps: Deps, principal: Principal) -> tuple[TableSorting, QuerySpan, list[WaitLine]]:
    order = _sorting(params)
    span, lines = wait_lines(params, deps, principal)
    return order, span, list(order.rows("waits", longest_first(lines)))


def _sorting(params: WaitPageParams, **other: str | None) -> TableSorting:
    given = {name: getattr(params, name) for name in ("by", "start", "end", "timezone", "cluster")}
    return sorting(TABLES, params, "/waits", **{**given, **other})
