"""GET /v1/usage and /v1/cost: grouped integers and exact money over any span."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Query

from accountant.answers import coverage
from accountant.api.access import Reading, teams_asked
from accountant.api.deps import Deps, Given
from accountant.api.known import check_teams
from accountant.api.openapi import refuses
from accountant.api.paging import Page, open_page
from accountant.api.params import GroupedParams, UsageParams, check_cost
from accountant.books.breakdown import broken_down
from accountant.books.costs import cost
from accountant.callers.auth import Principal
from accountant.wire import CostAnswer, Dimension, UsageAnswer

router = APIRouter(tags=["figures"])
Grouped = Annotated[GroupedParams, Query()]
Broken = Annotated[UsageParams, Query()]
REFUSALS = refuses("bad-page", "not-found", "page-gone", "invalid-parameter", "ledger-unavailable")


@router.get("/v1/usage", summary="GPU time by account and group", responses=REFUSALS)
async def usage(asked: Broken, deps: Given, principal: Reading) -> UsageAnswer:
    """GPU-microseconds of every account per group; over all groups they add up to the capacity. Pages that follow from
    one another are of one answer and add up to it, whatever is booked meanwhile; `coverage` is that of all pages."""
    page, where, zone, note = _opened("usage", asked, deps, principal, asked.breakdown)

    def find() -> UsageAnswer:
        span = page.start_ms, page.end_ms
        check_teams(deps, principal, asked.where_team)
        check_cost(deps.ledger, deps.settings.limits, *span, len(asked.by), asked.where_cluster)
        with deps.ledger.moment(*span) as moment:
            lines = moment.usage(*span, asked.by, where, zone)
            # Of all lines together it is the same whatever they are grouped by; some of them tell too little.
            covered = moment.coverage(*span) if where else coverage(lines)
            if asked.breakdown:
                lines = broken_down(moment, lines, *span, asked.by, where, zone)
        lines = sorted(lines, key=lambda line: tuple(line.key[dimension] for dimension in asked.by))
        return UsageAnswer(
            start_ms=page.start_ms, end_ms=page.end_ms, by=asked.by, lines=tuple(lines), coverage=covered, note=note
        )

    return await asyncio.to_thread(deps.kept.turn, page, deps.page_lines(asked.limit), find)


@router.get("/v1/cost", summary="Exact cost by group", responses=REFUSALS)
async def costs(asked: Grouped, deps: Given, principal: Reading) -> CostAnswer:
    """Billed GPU time and its cost per group. Pages that follow from one another are of one answer and add up to its
    `total`, which every page shows, whatever is booked or priced anew meanwhile. Unpriced time is never zero: where
    some of a group has no price its cost is null, and `unpriced_gpu_us` says how much."""
    page, where, zone, note = _opened("cost", asked, deps, principal)

    def find() -> CostAnswer:
        span = page.start_ms, page.end_ms
        check_teams(deps, principal, asked.where_team)
        check_cost(deps.ledger, deps.settings.limits, *span, len(asked.by), asked.where_cluster)
        with deps.ledger.moment(*span) as moment:
            found = cost(moment, deps.book(), *span, asked.by, where, zone)
        return found.model_copy(update={"note": note})

    return await asyncio.to_thread(deps.kept.turn, page, deps.page_lines(asked.limit), find)


def _opened(
    address: str, asked: GroupedParams, deps: Deps, principal: Principal, *more: object
) -> tuple[Page, Mapping[Dimension, tuple[str, ...]], str, str]:
    """The page, the filters, the time zone, and the note of the answer. Raises Refusal."""
    now, limits, newest = deps.clock.wall_ms(), deps.settings.limits, deps.newest_ms()
    start, end, zone = asked.span(now, deps.settings.timezone, limits, newest)
    where = dict(asked.where)
    where |= teams_asked(principal, where.get("team", ()))
    question = [address, asked.start, asked.end, zone, asked.by, sorted(where.items()), *more]
    page = open_page(question, start, end, now, asked.page, span_days=limits.span_days)
    return page, where, zone, asked.note(page.start_ms, page.at_ms, zone, newest, deps.silence_note())
