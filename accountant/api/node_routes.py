"""Serves the list of nodes: what their GPUs did in a span, their newest record, and whether they can be used."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query
from pydantic import Field

from accountant.api.access_control import Reader, require_all_teams
from accountant.api.answer_cache import open_page
from accountant.api.dependencies import AppDeps
from accountant.api.problems import refuses
from accountant.api.query_parameters import (
    Compared,
    Edge,
    QuerySpan,
    SpanParams,
    WhereParams,
    check_cost,
    with_span_before,
)
from accountant.core import periods
from accountant.ledger.usage import EarlierSpan, added
from accountant.reports import node_list
from accountant.reports.node_list import NodeChoice
from accountant.wire.option_types import NODE_ORDERS
from accountant.wire.usage_cost_and_job_models import NodeLine, NodesAnswer, NodesBefore, NodeSort

router = APIRouter(tags=["usage"])
NODES_SPAN: Final = "7d"
"""The span of a list of nodes if the request has none."""
NODES_WIDTH: Final = 3
"""Dimensions by which nodes are read."""


class NodesParams(WhereParams):
    """Parameters of a list of nodes, which is filtered, sorted and paged. What the filters by dimension exclude of a
    node's time does not count."""

    start: Edge = NODES_SPAN
    search: str = Field(default="", max_length=253, description="Only nodes with this text in CLUSTER/NODE.")
    sort: NodeSort = "name"
    compare: Compared = False
    page: str | None = Field(default=None, max_length=4096, description="`next_page` of the previous answer.")
    limit: int = Field(default=1_000, ge=1, description="Nodes of one page.")


@router.get(
    "/v1/nodes",
    summary="Nodes and what their GPUs did",
    responses=refuses("bad-page", "page-gone", "invalid-parameter"),
)
def list_nodes(params: Annotated[NodesParams, Query()], deps: AppDeps, principal: Reader) -> NodesAnswer:
    """Lists the nodes with records in the span or in the inventory, with the accounts of their GPUs. Without filters
    these add up to the capacity. Consecutive pages belong to one answer, even if more is booked meanwhile."""
    require_all_teams(principal)
    now, limits = deps.clock.wall_ms(), deps.settings.limits
    span = params.span(now, deps.settings.timezone, limits, deps.newest_ms())
    choice = NodeChoice(params.search, NODE_ORDERS.read(params.sort))
    where = params.where
    question = ["nodes", params.start, params.end, span.timezone, choice, sorted(where.items()), params.compare]
    page = open_page(question, span, now, params.page, limits)
    note = SpanParams().note(page.at_ms, page.at_ms, span.timezone, deps.newest_ms(), deps.silence_note())

    def compute() -> NodesAnswer:
        asked = QuerySpan(page.start_ms, page.end_ms, span.timezone)
        spans = with_span_before(asked, deps.ledger.status().extent, compare=params.compare)
        for one in spans:
            check_cost(deps.ledger, limits, one, NODES_WIDTH, params.where_cluster)
        with deps.ledger.moment(spans[-1].start_ms, page.end_ms) as moment:
            before = EarlierSpan.of(asked[:2], moment, periods.zone(span.timezone)) if params.compare else None
            found = node_list.machines(moment, page.start_ms, page.end_ms, where or None, span.timezone, before)
        nodes = node_list.chosen(found, choice)
        lines = tuple(
            NodeLine(
                cluster=node.cluster, node=node.name, pool=node.pool, capacity_type=node.capacity_type,
                gpu_models=node.models, gpus=node.gpus, newest_ms=node.newest_ms, silent=node.is_silent(page.at_ms),
                down=node.down, agent_version=node.agent_version, agent_older=node.has_older_agent,
                gpu_errors=node.errors, gpu_errors_unread=node.errors_unread, gpu_needs=node.needs,
                accounts_gpu_us=node.accounts,
                before_gpu_us=node.before,
            )
            for node in nodes
        )  # fmt: skip
        total = added(node.accounts for node in nodes)
        compared = [node.before for node in nodes if node.before is not None]
        return NodesAnswer(
            start_ms=page.start_ms, end_ms=page.end_ms, lines=lines, count=len(lines), total_gpu_us=total,
            before=None if before is None else NodesBefore(
                start_ms=before.start_ms, end_ms=before.end_ms, coverage=before.coverage,
                compared_ms=before.compared_ms,
                total_gpu_us=added(compared) if compared or (before.known and not nodes) else None,
            ),
            note=note,
        )  # fmt: skip

    return deps.answers.page(page, deps.page_lines(params.limit), compute)
