"""Serves the page of nodes, with the bar of a list (accountant.web.list_bar), and its files.

The parameters are those of `GET /v1/nodes`, with the same rights, limits and refusals. The files contain the nodes of
the view, on all its pages and with its columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from accountant.api.access_control import Reader, require_all_teams
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.node_routes import NODES_SPAN, NODES_WIDTH
from accountant.api.query_parameters import Edge, check_cost, explored, with_span_before
from accountant.core import periods
from accountant.exports.protocol import file_name
from accountant.ledger.usage import EarlierSpan
from accountant.reports import figure_formatting, node_list
from accountant.reports.figure_formatting import Relative
from accountant.reports.node_list import Machine, NodeChoice
from accountant.web import month_and_decision_pages, page_queries, saved_views
from accountant.web.job_list_page import month_steps, named, span_names
from accountant.web.list_bar import Bar, OrderedListParams, check_columns, longest
from accountant.web.list_files import FileFormat, ListRecords, against, list_file
from accountant.web.page_queries import ListSpan
from accountant.web.page_rows import paged
from accountant.wire.list_fields import ListField, before
from accountant.wire.list_order import ListOrder
from accountant.wire.option_types import NODE_ORDERS, NodeOrder
from accountant.wire.usage_cost_and_job_models import NodeSort
from gputally.base.money import gpu_hours
from gputally.server.tokens_and_grants import Principal

router = APIRouter(include_in_schema=False)
NODES_A_PAGE: Final = 200
MOST_OUTAGES: Final = 50


class NodeListParams(OrderedListParams):
    """The parameters of the page, as those of `GET /v1/nodes`."""

    ORDERS = NODE_ORDERS
    start: Edge = NODES_SPAN
    sort: NodeSort = "name"

    @property
    def choice(self) -> NodeChoice:
        return NodeChoice(self.search, self.order)

    @property
    def own(self) -> dict[str, str | None]:
        """The parameters that other lists do not have; None for those that say nothing."""
        return {"sort": self.own_order}


AskedNodes = Annotated[NodeListParams, Query()]

NodeField = ListField[Machine]


@dataclass(frozen=True, slots=True)
class NodeColumn:
    """A column of the list. part: the column of a file that it stands for; None for what names the node.

    gpu_us: its figure, which has a total; None for another kind of column."""

    title: str
    part: NodeField | None = None
    gpu_us: Callable[[Machine], int] | None = None

    @property
    def is_compared(self) -> bool:
        """Whether it has a figure of the span before."""
        return self.part is not None and (self.gpu_us is not None or self.part.kind == "float")


def error_text(node: Machine) -> str | None:
    """The errors of a node's GPUs for a file; None if they are unknown."""
    if node.errors:
        return "; ".join(f"{error.gpu} {error.kind}: {error.count}" for error in node.errors)
    return None if node.errors is None or node.errors_unread else "none"


def _of(title: str, account: str) -> NodeColumn:
    def gpu_us(node: Machine) -> int:
        found: int = getattr(node.accounts, account)
        return found

    return NodeColumn(title, NodeField(f"{account}_gpu_hours", "hours", lambda node: gpu_hours(gpu_us(node))), gpu_us)


COLUMNS: Final[Mapping[NodeOrder, NodeColumn]] = {
    "cluster": NodeColumn("Cluster"),
    "pool": NodeColumn("Pool", NodeField("pool", "text", lambda node: node.pool)),
    "capacity_type": NodeColumn("Capacity type", NodeField("capacity_type", "text", lambda node: node.capacity_type)),
    "model": NodeColumn("GPU", NodeField("gpu_models", "text", lambda node: ", ".join(node.models))),
    "gpus": NodeColumn("GPUs", NodeField("gpus", "integer", lambda node: node.gpus)),
    "silent": NodeColumn("Newest record", NodeField("newest_record", "instant", lambda node: node.newest_ms)),
    "agent": NodeColumn("Agent", NodeField("agent_version", "text", lambda node: node.agent_version)),
    "errors": NodeColumn("GPU errors", NodeField("gpu_errors", "text", error_text)),
    "capacity": _of("Capacity", "total"),
    "held": _of("Held", "allocated"),
    "busy": _of("Busy", "busy"),
    "utilisation": NodeColumn("Utilisation", NodeField("utilisation_share", "float", lambda node: node.utilisation)),
    "idle": _of("Idle", "allocated_idle"),
    "unknown": _of("Use unknown", "allocated_unknown"),
    "unallocated": _of("Unallocated", "unallocated"),
    "unmetered": _of("Unmetered", "unmetered"),
    "down": _of("Down", "down"),
}
"""The columns beside the name of the node, by their names in addresses, which are also orders."""
USUAL: Final[tuple[str, ...]] = (
    "pool", "model", "gpus", "silent", "errors", "held", "utilisation", "idle", "unallocated",
    "unmetered", "down",
)  # fmt: skip


def change_of(name: NodeOrder, node: Machine, relative: Relative = figure_formatting.relative_of) -> str:
    """The figure of a column in the span before, and the change since; "" for a column that has none."""
    part = COLUMNS[name].part
    return against(part, node, node.then, None, relative) if part is not None and COLUMNS[name].is_compared else ""


def _then(node: Machine) -> Machine | None:
    return node.then


def totals_of(nodes: Sequence[Machine]) -> dict[str, int]:
    """The sums of the figures, by column."""
    figures = {name: column.gpu_us for name, column in COLUMNS.items() if column.gpu_us is not None}
    return {name: sum(map(of, nodes)) for name, of in figures.items()}


def totals_before(nodes: Sequence[Machine], before: EarlierSpan | None) -> dict[str, int]:
    """The sums of the figures of the span before, by column; none if they are unknown."""
    then = [node.then for node in nodes if node.then is not None]
    known = before is not None and before.known is not None and (then or not nodes)
    return totals_of(then) if known else {}


def bar_of(path: str, params: NodeListParams, deps: Deps, more: Mapping[str, tuple[str, ...]] | None = None) -> Bar:
    """The bar of a list of nodes. more: further parameters of the page. Raises Refusal."""
    now = deps.clock.wall_ms()
    span = params.span(now, deps.settings.timezone, deps.settings.limits, deps.newest_ms())
    titles: dict[str, str] = {name: column.title for name, column in COLUMNS.items()}
    bar = Bar(
        path=path, params=params, span=span, columns=titles, shown=params.columns or USUAL,
        own={**params.own, **(more or {})}, now_ms=now, labels=deps.settings.exported_labels,
    )  # fmt: skip
    check_columns(bar)
    return bar


def _checked(params: NodeListParams, deps: Deps, principal: Principal) -> Bar:
    require_all_teams(principal)
    bar = bar_of("/nodes", params, deps)
    for span in with_span_before(bar.span, deps.ledger.status().extent, compare=params.compare):
        check_cost(deps.ledger, deps.settings.limits, span, NODES_WIDTH, params.where_cluster)
    return bar


@router.get("/nodes")
def nodes_page(request: Request, params: AskedNodes, deps: AppDeps, principal: Reader) -> Response:
    bar = _checked(params, deps, principal)
    if not bar.is_tidy(request):
        return RedirectResponse(bar.tidy, 303)
    span, now = ListSpan.of(params, deps, compared=params.compare), deps.clock.wall_ms()
    answer = page_queries.machines(deps, span, params.where)
    nodes, earlier = node_list.chosen(answer.value.nodes, params.choice), answer.value.before
    page = paged(nodes, params.page, NODES_A_PAGE, bar.page_url)
    outages = sorted(((node, down) for node in nodes for down in node.outages), key=lambda one: -one[1].start_ms)
    zone, relative = periods.zone(span.timezone), figure_formatting.by_days(earlier.days if earlier else None)
    return month_and_decision_pages.page(
        request, "/nodes", "nodes.html", deps, bar=bar, titles=bar.titles, named=named, nodes=page.rows, shown=page,
        totals=totals_of(nodes), compared_with=earlier, change=partial(change_of, relative=relative),
        totals_before=totals_before(nodes, earlier),
        before_text=page_queries.before_text(earlier, zone),
        relative=relative, gpus=sum(node.gpus for node in nodes),
        as_of_ms=answer.as_of_ms, is_silent=lambda node: node.is_silent(now),
        months=month_steps(bar), columns=COLUMNS, texts=NODE_ORDERS.ascending, span_zone=zone,
        span_text=figure_formatting.span_of(span.start_ms, span.until(now), zone),
        longest=longest(bar, deps.ledger, deps.settings.limits, NODES_WIDTH),
        order=ListOrder(bar.url, params.order, NODE_ORDERS.ascending.__contains__),
        lost=sorted((node for node in nodes if node.lost_us), key=lambda node: -node.lost_us)[:MOST_OUTAGES],
        gpus_of=lambda node: explored({
            **bar.fixed, "timezone": bar.span.timezone, "by": "gpu", "where.cluster": node.cluster,
            "where.node": node.name, "sort": "down:desc", "measure": "down", "columns": "capacity,down",
        }),
        outages=outages[:MOST_OUTAGES], more_outages=max(0, len(outages) - MOST_OUTAGES),
        api=bar.url("/v1/nodes", columns=None, **bar.fixed), **saved_views.of(request, deps, principal),
    )  # fmt: skip


@router.get("/nodes.csv")
def nodes_csv(request: Request, params: AskedNodes, deps: AppDeps, principal: Reader) -> Response:
    return _file(request, params, deps, principal, "csv")


@router.get("/nodes.parquet")
def nodes_parquet(request: Request, params: AskedNodes, deps: AppDeps, principal: Reader) -> Response:
    return _file(request, params, deps, principal, "parquet")


def _file(
    request: Request, params: NodeListParams, deps: Deps, principal: Principal, file_format: FileFormat
) -> Response:
    """The nodes of the view, with exact hours."""
    bar = _checked(params, deps, principal)
    span = ListSpan.of(params, deps, compared=params.compare)
    nodes = node_list.chosen(page_queries.machines(deps, span, params.where).value.nodes, params.choice)
    parts = file_fields(bar)
    rows = [[part.of(node) for part in parts] for node in nodes]
    records = ListRecords([part.name for part in parts], [part.kind for part in parts], rows, about=bar.about)
    return list_file(request, records, file_format, file_name(file_format, "nodes", *span_names(bar.span)))


def file_fields(bar: Bar) -> list[NodeField]:
    """The columns of a view's file."""
    parts: list[NodeField] = [
        NodeField("cluster", "text", lambda node: node.cluster), NodeField("node", "text", lambda node: node.name),
        NodeField("down_now", "text", lambda node: node.down),
    ]  # fmt: skip
    shown = [column for name, column in COLUMNS.items() if name in bar.shown and column.part is not None]
    parts += [column.part for column in shown if column.part is not None]
    if bar.params.compare:
        parts += [before(column.part, _then) for column in shown if column.part is not None and column.is_compared]
    return parts
