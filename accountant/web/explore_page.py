"""Serves the page Explore: usage and cost of any grouping and span, as a table, a pivot table, a chart and files.

The parameters are those of `GET /v1/usage` and `GET /v1/cost`, with the same rights, limits and refusals, and a few
more for the view (accountant.web.list_bar). The address of a view reproduces it. The files contain the rows of the
view, on all its pages, with exact figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from accountant.api.access_control import Reader, check_teams, team_filter
from accountant.api.answer_cache import CachedAnswer
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.query_parameters import NamedDimension, QuerySpan, check_cost, invalid, with_span_before
from accountant.core import periods
from accountant.core.periods import Days, Month
from accountant.exports.protocol import file_name
from accountant.ledger.protocols import JobKey
from accountant.reports import charts, figure_formatting
from accountant.reports.charts import ChartColumn
from accountant.reports.week_parts import is_counted, is_weekend
from accountant.web import month_and_decision_pages, page_queries, saved_views
from accountant.web.explore_table import (
    COLUMNS,
    DEFAULT_COLUMNS,
    FIGURES,
    MEASURES_SHOWN,
    Direction,
    Explored,
    Figure,
    FigureColumn,
    Measure,
    Pivot,
    Question,
    Row,
    Selection,
    Series,
    pivot,
    selected,
)
from accountant.web.list_bar import Choice, GroupedBar, GroupedListParams, check_names, group_link
from accountant.web.list_files import FileFormat, ListRecords, list_file
from accountant.web.page_rows import Page, paged
from accountant.wire.dimensions import OF_TIME
from accountant.wire.list_fields import FileCell, FileKind
from accountant.wire.option_types import Order
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base import called_off
from gputally.base.money import exact_sum, gpu_hours
from gputally.base.number_format import NOTHING, number
from gputally.base.units import US_PER_HOUR
from gputally.base.untrusted_text import for_cell
from gputally.server import page_layout
from gputally.server.tokens_and_grants import Principal

router = APIRouter(include_in_schema=False)
ROWS_A_PAGE: Final = 100
MOST_ACROSS: Final = 13
"""Columns of a pivot table that fit a page: twelve and the others."""
MOST_ACROSS_FILE: Final = 1_000
MOST_CELLS_FILE: Final = 1_000_000
"""Cells of a pivot table in a file."""
NO_NAME: Final = "(none)"
"""The head of a file's column for the empty value."""
_OF_THE_VIEW: Final = ("measure", "across", "sort", "search", "columns", "compare")
"""Parameters that the API has not."""
_ADDED_UP: Final = frozenset({"GPU-hours", "money", "kWh"})
"""Kinds of figures of which a longer span has more."""


class ExploreParams(GroupedListParams):
    """The parameters of the page. measure: what the chart and the pivot table show. across: the dimension of `by` whose
    values stand side by side."""

    measure: Measure = "allocated"
    across: NamedDimension | None = None


Params = Annotated[ExploreParams, Query()]


@dataclass(frozen=True, slots=True)
class View:
    """What a request asks for, and the answer."""

    bar: GroupedBar
    asked: Question
    answer: CachedAnswer[Explored]
    rows: Selection

    @property
    def found(self) -> Explored:
        return self.answer.value

    @property
    def across(self) -> int | None:
        name = self.bar.own["across"]
        return self.bar.by.index(name) if name in self.bar.by else None

    @property
    def others(self) -> tuple[Dimension, ...]:
        """The dimensions that are not put side by side."""
        return tuple(name for place, name in enumerate(self.bar.by) if place != self.across)

    def pivoted(self, most: int, *, exact: bool = False) -> Pivot | None:
        """The table with one dimension side by side, if the view has one. exact: as in `pivot`."""
        if self.across is None:
            return None
        in_order = self.bar.by[self.across] in OF_TIME
        sort = self.bar.sort or self.bar.usual
        ascends = sort == Order(self.asked.measure, descending=False)
        by_sum: Direction | None = None if sort.column in self.bar.by else "up" if ascends else "down"
        return pivot(
            self.found.table,
            self.rows.at,
            self.across,
            self.asked.measure,
            most,
            in_order=in_order,
            by_sum=by_sum,
            exact=exact,
        )


@router.get("/explore")
def explore_page(request: Request, params: Params, deps: AppDeps, principal: Reader) -> Response:
    bar = _bar("/explore", params, deps, principal)
    if not bar.is_tidy(request) or bar.params.sort != params.sort:
        return RedirectResponse(bar.tidy, 303)
    view = _view(bar, params, deps, principal)
    found, book = view.found, deps.book()
    currency = book.currency if book is not None else None
    crossed = view.pivoted(MOST_ACROSS)
    rows: Page[Any] = paged(
        view.rows.at.tolist() if crossed is None else crossed.rows, params.page, ROWS_A_PAGE, bar.page_url
    )
    keys = [found.table.keys[at] for at in rows.rows] if crossed is None else [key for key, _, _ in rows.rows]
    columns = {name: FIGURES[name] for name in COLUMNS if name in bar.shown}
    zone = periods.zone(bar.span.timezone)
    first_ms = deps.ledger.status().extent[0]
    from_ms = min(found.start_ms, found.before_ms[0] if found.before_ms is not None else found.start_ms)
    answer = month_and_decision_pages.page(
        request, "/explore", "explore.html", deps, bar=bar, found=found, shown=rows, columns=columns,
        titles=bar.titles, crossed=crossed, others=view.others, total=view.rows.total,
        before=view.rows.total_before,
        rows=[(found.table.row(at), found.then(at))
              for at in rows.rows] if crossed is None else (),
        named=_named, text=lambda column, row: figure_text(column, row, currency), link=_link,
        changed=lambda column, row, then: changed(column, row, then, found.days),
        group_link=group_link, idle_team=IDLE, links_of_jobs=_links_of_jobs(view, keys, deps),
        begins_ms=first_ms if first_ms > from_ms or found.days is not None else None,
        first_month=str(Month.of(first_ms, zone)) if first_ms > Month.of(first_ms, zone).span(zone)[0] else "",
        measured=lambda value: _measured(view.asked.measure, value, currency), measure=FIGURES[view.asked.measure],
        measures=[Choice(name, FIGURES[name].title, name == params.measure) for name in MEASURES_SHOWN],
        currency=currency, **saved_views.of(request, deps, principal),
        unit=_unit, chart=_chart(found.chart, view.asked.measure, currency, _edges(found, bar)),
        week=_week(found, view.asked.measure, currency, zone, first_ms, unheld=view.rows.total.unheld_amount != 0),
        parts=_legend(found.chart), narrower=_narrower(bar, found.chart),
        as_of_ms=view.answer.as_of_ms, span_zone=zone, questions=_questions(bar),
        note=params.note(found.start_ms, deps.clock.wall_ms(), bar.span.timezone, deps.newest_ms(),
                         deps.silence_note()),
        span_text=figure_formatting.span_of(found.start_ms, found.end_ms, zone),
        before_text=""
        if found.before_ms is None
        else figure_formatting.compared_text(*found.before_ms, found.days, zone),
        api=[(name, bar.url(f"/v1/{name}", **dict.fromkeys(_OF_THE_VIEW), **bar.fixed)) for name in ("usage", "cost")],
        script_url=month_and_decision_pages.ZOOM,
    )  # fmt: skip
    policy = "Content-Security-Policy"
    answer.headers[policy] = page_layout.headers(script=True)[policy]  # for the script that zooms
    return answer


@router.get("/explore.csv")
def explore_csv(request: Request, params: Params, deps: AppDeps, principal: Reader) -> Response:
    return _file(request, params, deps, principal, "csv")


@router.get("/explore.parquet")
def explore_parquet(request: Request, params: Params, deps: AppDeps, principal: Reader) -> Response:
    return _file(request, params, deps, principal, "parquet")


def _file(
    request: Request, params: ExploreParams, deps: Deps, principal: Principal, file_format: FileFormat
) -> Response:
    view = _view(_bar("/explore", params, deps, principal), params, deps, principal)
    return list_file(request, _records(view, deps), file_format, _file_name(file_format, view))


def _bar(path: str, params: ExploreParams, deps: Deps, principal: Principal) -> GroupedBar:
    """The bar of a request. Who sees one team only groups by job if the request has no grouping."""
    alone = principal.teams is not None and len(principal.teams) == 1 and "by" not in params.model_fields_set
    by: tuple[Dimension, ...] = ("job",) if alone else params.by
    now = deps.clock.wall_ms()
    span = params.span(now, deps.settings.timezone, deps.settings.limits, deps.newest_ms())
    own = {
        "measure": None if params.measure == "allocated" else params.measure,
        "across": params.across if params.across in by and len(by) > 1 else None,
    }
    shown = params.columns or DEFAULT_COLUMNS
    figure = "cost" if params.measure == "cost" else "allocated"
    if figure not in shown and own["across"] is None:  # never by a figure that is not there
        figure = next((name for name in COLUMNS if name in shown), figure)
    usual = Order(by[0]) if set(by[:1]) & OF_TIME else Order(figure, descending=True)
    # A table side by side has no column but its measure: an order by another one is left.
    if own["across"] is not None and params.sort.partition(":")[0] in set(COLUMNS) - {params.measure}:
        params = params.model_copy(update={"sort": ""})
    bar = GroupedBar(
        path=path,
        params=params,
        by=by,
        span=span,
        columns={name: FIGURES[name].title for name in COLUMNS},
        shown=shown,
        usual=usual,
        own=own,
        now_ms=now,
        labels=deps.settings.exported_labels,
    )
    check_names(bar)
    return bar


def _view(bar: GroupedBar, params: ExploreParams, deps: Deps, principal: Principal) -> View:
    where = dict(params.where)
    where |= team_filter(principal, where.get("team", ()))
    check_teams(deps, principal, params.where_team)
    unit = periods.time_unit(bar.span.start_ms, bar.span.end_ms, periods.zone(bar.span.timezone))
    asked = Question(bar.by, where, bar.span.timezone, params.measure, unit, params.search)
    answer = _explored(bar, params, asked, deps)
    found = answer.value
    sort = bar.sort or bar.usual
    key = ("explored rows", found.found_ms, _identity(bar, params, asked), sort)
    rows = deps.answers.ask(key, lambda: selected(found, params.search, sort, bar.by, figure_formatting.name),
                            lambda: None).value  # fmt: skip
    return View(bar, asked, answer, rows)


def _identity(bar: GroupedBar, params: ExploreParams, asked: Question) -> tuple[object, ...]:
    """What distinguishes a question. An end that is not given is now."""
    where = tuple(sorted((name, tuple(sorted(values))) for name, values in asked.where.items()))
    return *bar.span_identity, asked.by, where, asked.timezone, asked.measure, asked.unit, asked.search, params.compare


def _explored(bar: GroupedBar, params: ExploreParams, asked: Question, deps: Deps) -> CachedAnswer[Explored]:
    limits = deps.settings.limits

    def spans() -> tuple[QuerySpan, ...]:
        span = params.span(deps.clock.wall_ms(), deps.settings.timezone, limits, deps.newest_ms())
        return with_span_before(span, deps.ledger.status().extent, compare=params.compare)

    # The units of time of the chart are a dimension more.
    for span in with_span_before(bar.span, deps.ledger.status().extent, compare=params.compare):
        check_cost(deps.ledger, limits, span, len(asked.by) + 1, params.where_cluster)
    return page_queries.explored(
        deps, _identity(bar, params, asked), asked,
        spans, charts.SERIES, ends=params.end is not None,
    )  # fmt: skip


def _named(dimension: Dimension, value: str) -> str:
    """The displayed name of a value; the ledger's special names as words."""
    if dimension == "queue":
        return figure_formatting.queue(value)
    return figure_formatting.name(value)


def _link(by: Sequence[Dimension], key: Sequence[str]) -> str | None:
    """The page of the job or node of a row, if the row has what identifies it."""
    names = dict(zip(by, key, strict=True))
    if names.get("job") and {"cluster", "namespace"} <= names.keys():
        return f"/job/{quote(JobKey(names['cluster'], names['namespace'], names['job']).id)}"
    if names.get("node") and names.get("cluster"):
        return f"/node/{quote(names['cluster'], safe='')}/{quote(names['node'], safe='')}"
    return None


def _links_of_jobs(view: View, keys: Sequence[Sequence[str]], deps: Deps) -> Mapping[str, str]:
    """The pages of the jobs of these rows, by the name of the job, if the rows do not say its cluster and namespace; of
    a name that several jobs have, the list of jobs of that name."""
    if "job" not in view.others or {"cluster", "namespace"} <= set(view.others):
        return {}
    place, found, asked = view.others.index("job"), view.found, view.asked
    names = tuple(sorted({key[place] for key in keys if key[place]}))
    if not names:
        return {}
    span = (found.start_ms, found.end_ms)
    by: tuple[Dimension, ...] = ("cluster", "namespace", "job")
    with deps.ledger.moment(*span) as moment:
        several = list(moment.usage(span, by, {**asked.where, "job": names}, asked.timezone).row_keys())
    jobs: dict[str, list[JobKey]] = {}
    for key in several:
        jobs.setdefault(key[2], []).append(JobKey(*key))
    listed = "/jobs?" + urlencode({"start": periods.utc(span[0]), "end": periods.utc(span[1])}, safe=":")
    return {
        name: f"/job/{quote(of[0].id)}" if len(of) == 1 else f"{listed}&{urlencode({'where.job': name})}"
        for name, of in jobs.items()
    }


def _unit(column: FigureColumn, currency: str | None) -> str:
    units = {"GPU-hours": "GPU-h", "money": currency or "", "price": currency or "", "share": "%"}
    return units.get(column.kind, column.kind)


def figure_text(column: FigureColumn, row: Row, currency: str | None) -> str:
    """A figure for people."""
    return _shown(column, column.shown(row), currency)


def _shown(column: FigureColumn, value: Figure, currency: str | None) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, int):
        return figure_formatting.hours(value)
    if isinstance(value, Decimal):
        return NOTHING if currency is None else figure_formatting.money(value, currency)
    if column.kind == "share":
        return figure_formatting.percent(value)
    return number(Decimal(repr(value)), 1)


def _measured(measure: Measure, value: Figure, currency: str | None) -> str:
    """A figure of the chart or the pivot table; 0 of an amount is an amount."""
    if measure == "cost" and value == 0:
        value = Decimal(0)
    return _shown(FIGURES[measure], value, currency)


def changed(column: FigureColumn, row: Row | None, before: Row | None, by_day: Days | None) -> str:
    """The change from the span before: `+12.3 %`, or points of a share. by_day: as in `relative_of`, of
    figures of which a longer span has more."""
    now, then = (None if one is None else column.of(one) for one in (row, before))
    if column.kind == "share":
        return figure_formatting.points(now, then)  # type: ignore[arg-type]  # shares are floats
    if now is None or then is None:
        return NOTHING
    relative = figure_formatting.by_days(by_day if column.kind in _ADDED_UP else None)
    return relative(Decimal(str(now)), Decimal(str(then)))


def _questions(bar: GroupedBar) -> tuple[Choice, ...]:
    """Views that answer what people ask most, each the address of a view."""
    plain = replace(bar, params=bar.params.model_copy(update={
        "search": "", "sort": "", "columns": (), "compare": False, "start": None, "end": None,
    }), own={})  # fmt: skip
    last = next(one for one in reversed(bar.presets[:-1]))
    month = bar.presets[-1]
    listed: Sequence[tuple[str, dict[str, Any]]] = (
        ("Jobs that left most idle, 7 days", {"start": "7d", "by": ("job",), "sort": "allocated_idle:desc"}),
        ("Who used most, 30 days", {"start": "30d", "by": ("user",), "sort": "allocated:desc"}),
        ("Teams, this month against the one before", {"start": _start_of(month), "compare": True, "by": ("team",),
                                                       "sort": "cost:desc"}),
        ("Teams by month", {"start": _start_of(last), "by": ("team", "month"), "across": "month", "measure": "cost"}),
        ("Cost by GPU model", {"by": ("gpu_model",), "measure": "cost", "columns": ("allocated", "cost", "rate")}),
        ("Hours of the day, 30 days", {"start": "30d", "by": ("hour_of_day",),
                                       "columns": ("allocated", "utilisation", "allocated_idle", "unallocated")}),
        ("Nodes that were down, 7 days", {"start": "7d", "by": ("cluster", "node"), "sort": "down:desc",
                                          "measure": "down", "columns": ("capacity", "down", "unmetered")}),
        ("Idle notebooks, 24 h", {"start": "24h", "by": ("user", "job"), "search": "notebook",
                                  "sort": "allocated_idle:desc"}),
    )  # fmt: skip
    return tuple(Choice(title, title, chosen=False, address=plain.url(**changes)) for title, changes in listed)


def _start_of(month: Choice) -> str:
    return f"{month.name}-01"


def _legend(chart: Series) -> list[tuple[str, str]]:
    """Class and name of each part of the chart."""
    shown = [
        (css, _named(chart.dimension, name))
        for css, name in zip(chart.css, chart.names, strict=True)
        if chart.dimension
    ]
    if chart.others:
        shown.append(("s-rest", f"{chart.others:,} others"))
    return shown


def _edges(found: Explored, bar: GroupedBar) -> list[tuple[str, str]]:
    """Where the time of each column of the chart begins and ends, as parameters of this page; "" for the page's own
    end."""
    chart, zone = found.chart, periods.zone(bar.span.timezone)
    starts = [cell.name if chart.unit == "day" else f"{cell.name}-01" for cell in chart.cells]
    if chart.unit == "hour":
        at, starts = found.start_ms, []
        for length_ms in periods.hours(found.start_ms, found.end_ms, zone).values():
            starts.append(periods.utc(at))
            at += length_ms
    if starts:
        starts[0] = periods.utc(found.start_ms)
    return list(zip(starts, [*starts[1:], ""], strict=True))


def _narrower(bar: GroupedBar, chart: Series) -> list[tuple[str, str]]:
    """The columns of a chart by day or month, each with the address of this view of its time alone. So a reader zooms
    in with a keyboard and without a script."""
    if chart.unit not in ("day", "month") or len(chart.cells) < 2:
        return []
    found, zone = [], periods.zone(bar.span.timezone)
    for cell in chart.cells:
        first = date.fromisoformat(cell.name if chart.unit == "day" else f"{cell.name}-01")
        month_after = date.fromisoformat(f"{Month(first.year, first.month).next}-01")
        after = first + timedelta(days=1) if chart.unit == "day" else month_after
        over = periods.day_span(after, zone)[0] <= bar.now_ms
        name = _time_name(chart.unit, cell.name)
        found.append((name, bar.url(start=first.isoformat(), end=after.isoformat() if over else None)))
    return found


def _chart(chart: Series, measure: Measure, currency: str | None, edges: Sequence[tuple[str, str]]) -> str:
    parts = _legend(chart) or [("s0", "all")]
    labels = charts.time_labels(chart.unit, [_begin(chart.unit, cell.name) for cell in chart.cells])
    columns = []
    for place, cell in enumerate(chart.cells):
        told = [_time_name(chart.unit, cell.name)]
        told += [f"{parts[at][1]}: {_measured(measure, value, currency)} {_unit(FIGURES[measure], currency)}"
                 for at, value in sorted(cell.parts.items())]  # fmt: skip
        known = [value for value in cell.parts.values() if value is not None]
        if len(known) > 1 and len(known) == len(cell.parts):
            whole = exact_sum(map(Decimal, known)) if measure == "cost" else sum(known)
            told.append(f"Together: {_measured(measure, whole, currency)} {_unit(FIGURES[measure], currency)}")
        if cell.unknown:
            told.append(charts.unknown_text(cell.unknown))
        stacks = [(parts[at][0], _height(measure, value)) for at, value in sorted(cell.parts.items())
                  if value is not None]  # fmt: skip
        columns.append(
            ChartColumn(
                labels[place],
                labels[place],
                "\n".join(told),
                stacks,
                cell.unknown,
                edges[place],
                chart.unit != "month" and is_weekend(date.fromisoformat(cell.name[:10])),
            )
        )
    title = f"{FIGURES[measure].title} by {chart.unit}, {_unit(FIGURES[measure], currency)}"
    named = ", ".join(name for _, name in parts)
    return charts.stacked("explored", columns, title, f"Parts from below: {named}.", thinned=False)


def _week(
    found: Explored, measure: Measure, currency: str | None, zone: ZoneInfo, since_ms: int, *, unheld: bool
) -> str:
    """The means of the weekdays and of the weekends of a chart by day; "" for another chart. since_ms: start of the
    first record. unheld: as in `figure_formatting.paid_time`."""
    if found.chart.unit != "day":
        return ""
    days: list[tuple[date, Decimal | int]] = []
    for cell in found.chart.cells:
        day, values = date.fromisoformat(cell.name), list(cell.parts.values())
        known = max(found.start_ms, since_ms), found.end_ms
        if is_counted(day, known, cell.unknown, zone) and None not in values:
            days.append((day, exact_sum(Decimal(value) for value in values if value is not None)))
    column = FIGURES[measure]

    def shown(mean: Decimal) -> str:
        if measure == "cost":
            return (
                f"{_measured(measure, mean, currency)} {_unit(column, currency)} {figure_formatting.paid_time(unheld)}"
            )
        return f"{_measured(measure, round(mean), currency)} {_unit(column, currency)}"

    return figure_formatting.weekday_mean_text(days, shown)


def _height(measure: Measure, value: Figure) -> float:
    return max(0.0, float(value or 0) / (1 if measure == "cost" else US_PER_HOUR))


def _begin(unit: Dimension, name: str) -> datetime:
    """The local begin of an hour, a day or a month."""
    return datetime.fromisoformat(name[:13] + ":00" if unit == "hour" else name if unit == "day" else name + "-01")


def _time_name(unit: Dimension, name: str) -> str:
    return charts.time_name(unit, _begin(unit, name))


_SUFFIXES: Final = {"GPU-hours": "_gpu_hours", "share": "_share", "GiB": "_gib", "W": "_w", "kWh": "_kwh"}
_FILE_KINDS: Final[Mapping[str, FileKind]] = {"GPU-hours": "hours", "money": "money", "price": "price"}


def _records(view: View, deps: Deps) -> ListRecords:
    """The rows of the view with exact figures: one for each row of its table, on all pages."""
    found, book = view.found, deps.book()
    currency = book.currency if book is not None else ""
    about = {
        "start": periods.utc(found.start_ms), "end": periods.utc(found.end_ms), "timezone": view.asked.timezone,
        "coverage": "" if found.covered is None else f"{found.covered:.6f}",
        "price_book_version": book.version if book is not None else "",
    }  # fmt: skip
    crossed = view.pivoted(MOST_ACROSS_FILE, exact=True)
    if crossed is not None:
        return _crossed_records(view, crossed, currency, about)
    chosen = [name for name in COLUMNS if name in view.bar.shown]
    if "cost" in chosen and "unpriced" not in chosen:  # never a cost without what it lacks
        chosen.insert(chosen.index("cost") + 1, "unpriced")
    spans: list[tuple[str, Callable[[int], Row | None], Row | None]] = [("", found.table.row, view.rows.total)]
    if found.before_ms is not None:
        spans.append(("_before", found.then, view.rows.total_before))
    names = [f"{name}{_SUFFIXES.get(FIGURES[name].kind, '')}{suffix}" for suffix, _, _ in spans for name in chosen]
    rows = []
    for at in called_off.each(view.rows.at.tolist()):
        of_row = [of(at) for _, of, _ in spans]
        rows.append(["line", *found.table.keys[at], currency, *_exact(chosen, of_row)])
    total = ["total", *("" for _ in view.bar.by), currency, *_exact(chosen, [total for _, _, total in spans])]
    kinds: list[FileKind] = [_FILE_KINDS.get(FIGURES[name].kind, "float") for _ in spans for name in chosen]
    texts: list[FileKind] = ["text"] * (len(view.bar.by) + 2)
    return ListRecords(("record", *view.bar.by, "currency", *names), [*texts, *kinds], rows, total, about)


def _crossed_records(view: View, crossed: Pivot, currency: str, about: dict[str, str]) -> ListRecords:
    if crossed.others:
        raise invalid("across", f"a file has at most {MOST_ACROSS_FILE - 1:,} columns side by side: choose another"
                                " dimension, or filter its values")  # fmt: skip
    if len(crossed.rows) * crossed.width > MOST_CELLS_FILE:
        raise invalid("across", f"a file has at most {MOST_CELLS_FILE:,} cells, and {len(crossed.rows):,} rows with"
                                f" {crossed.width:,} columns side by side have more: leave out \"Side by side\", choose"
                                " another dimension, or filter its values")  # fmt: skip
    measure = view.asked.measure
    zero = _exact_of(measure, 0)
    rows: list[list[FileCell]] = []
    for key, cells, whole in called_off.each(crossed.rows):
        exact = {number: _exact_of(measure, value) for number, value in cells.items()}
        row = [exact.get(number, zero) for number in range(crossed.width)]
        rows.append(["line", *key, measure, currency, *row, _exact_of(measure, whole)])
    total: list[FileCell] = ["total", *("" for _ in view.others), measure, currency,
                         *(_exact_of(measure, value) for value in crossed.sums)]  # fmt: skip
    taken = {"record", "measure", "currency", "total", *view.others}
    heads = []
    for name in crossed.heads:
        head = name or NO_NAME
        while for_cell(head) in taken:
            head += " (value)"
        taken.add(for_cell(head))
        heads.append(head)
    names = ("record", *view.others, "measure", "currency", *heads, "total")
    kind: FileKind = "money" if measure == "cost" else "hours"
    texts: list[FileKind] = ["text"] * (len(view.others) + 3)
    return ListRecords(names, [*texts, *([kind] * (len(heads) + 1))], rows, total, about)


def _exact(columns: Sequence[str], rows: Sequence[Row | None]) -> list[FileCell]:
    return [None if row is None else _exact_of(name, FIGURES[name].of(row)) for row in rows for name in columns]


def _exact_of(name: str, value: Figure) -> FileCell:
    kind = FIGURES[name].kind
    if value is None:
        return None
    if kind == "GPU-hours":
        return gpu_hours(int(value))
    return Decimal(value) if kind == "money" else value


def _file_name(ending: str, view: View) -> str:
    found, zone = view.found, periods.zone(view.asked.timezone)
    first, last = (periods.local_date(at, zone) for at in (found.start_ms, found.end_ms - 1))
    return file_name(ending, "explore", *view.bar.by, str(first), str(last))
