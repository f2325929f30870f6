"""Serves the page of waits: how long pods waited in each queue, team or namespace, and which GPU time was unused
meanwhile, with the figures of `GET /v1/waits` and `GET /v1/waits/unused`; and its file."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, get_args
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Query, Request, Response

from accountant.api.access_control import Reader
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.query_parameters import QuerySpan
from accountant.api.usage_cost_and_job_routes import WaitParams, waits, waits_and_unused
from accountant.core import periods
from accountant.reports import charts, figure_formatting
from accountant.reports.charts import ChartColumn
from accountant.reports.week_parts import is_weekend
from accountant.web import month_and_decision_pages
from accountant.web.list_bar import RECENT
from accountant.web.month_and_decision_pages import sorting
from accountant.wire.list_order import PageTables, TableSorting
from accountant.wire.option_types import WaitGroup
from accountant.wire.usage_cost_and_job_models import UnusedAnswer, UnusedLine, WaitLine, longest_first
from gputally.base.units import MS_PER_SECOND, US_PER_HOUR
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
    order, span, rows, unused = _found(params, deps, principal)
    zone = periods.zone(span.timezone)

    def address(**other: str | None) -> str:
        return _sorting(params, **other).address(params.sort or "waits.median:desc")

    return month_and_decision_pages.page(
        request, "/jobs", "waits.html", deps, rows=rows, order=order, by=params.by, span_zone=zone,
        groups=[(by, address(by=by)) for by in get_args(WaitGroup)],
        spans=[(name, address(start=start, end=None), start == params.start) for start, name in RECENT.items()],
        span_text=figure_formatting.span_of(span.start_ms, min(span.end_ms, deps.clock.wall_ms()), zone),
        csv=address().replace("/waits?", "/waits.csv?", 1), unused=unused, of_all=principal.teams is None,
        chart=_chart(unused, zone) if unused.total is not None and unused.total.known_ms else "",
        named=lambda line: _named(line, unused, zone),
    )  # fmt: skip


@router.get("/waits.csv")
def waits_file(request: Request, params: Asked, deps: AppDeps, principal: Reader) -> Response:
    """The same lines, in seconds."""
    rows = _sorting(params).rows("waits", longest_first(waits(params, deps, principal)))
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


def _found(
    params: WaitPageParams, deps: Deps, principal: Principal
) -> tuple[TableSorting, QuerySpan, list[WaitLine], UnusedAnswer]:
    order = _sorting(params)  # which refuses first
    span, lines, unused = waits_and_unused(params, deps, principal)
    return order, span, list(order.rows("waits", longest_first(lines))), unused


def _named(line: UnusedLine, found: UnusedAnswer, zone: ZoneInfo) -> str:
    """The hour, day or month of a line."""
    return charts.time_name(found.unit, _begin(line, zone))


def _begin(line: UnusedLine, zone: ZoneInfo) -> datetime:
    return datetime.fromtimestamp(line.start_ms // MS_PER_SECOND, zone)


def _chart(found: UnusedAnswer, zone: ZoneInfo) -> str:
    """The unused time of each line, below a line with what was asked for."""
    columns = []
    labels = charts.time_labels(found.unit, [_begin(line, zone) for line in found.lines])
    for line, label in zip(found.lines, labels, strict=True):
        name, length_ms = _named(line, found, zone), line.end_ms - line.start_ms
        figures = {"Asked for": line.asked_gpu_us, "Free": line.free_gpu_us, "Held idle": line.idle_gpu_us}
        told = [name, *(f"{title}: {figure_formatting.hours(gpu_us)} GPU-h" for title, gpu_us in figures.items()
                        if gpu_us is not None)]  # fmt: skip
        if line.known_ms < length_ms:
            told.append(f"Unknown for {figure_formatting.duration(length_ms - line.known_ms)} of it")
        columns.append(
            ChartColumn(
                label,
                label,
                "\n".join(told),
                [("a-unallocated", (line.free_gpu_us or 0) / US_PER_HOUR),
                 ("a-allocated_idle", (line.idle_gpu_us or 0) / US_PER_HOUR)],
                1 - line.known_ms / length_ms,
                weekend=found.unit != "month" and is_weekend(periods.local_date(line.start_ms, zone)),
            )
        )  # fmt: skip
    levels = [None if line.asked_gpu_us is None else line.asked_gpu_us / US_PER_HOUR for line in found.lines]
    return charts.stacked(
        "explored unused", columns, f"GPU-hours unused while pods waited, by {found.unit}",
        "Parts from below: free, held idle. The line is what waiting pods asked for.", levels, thinned=False,
    )  # fmt: skip


def _sorting(params: WaitPageParams, **other: str | None) -> TableSorting:
    given = {name: getattr(params, name) for name in ("by", "start", "end", "timezone", "cluster")}
    return sorting(TABLES, params, "/waits", **{**given, **other})
