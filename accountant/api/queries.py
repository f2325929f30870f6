"""GET /v1/usage and /v1/cost: grouped integers and exact money over any span."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Query

from accountant.answers import coverage
from accountant.api.access import Reading, teams_asked
from accountant.api.deps import Deps, Given
from accountant.api.openapi import refuses
from accountant.api.paging import Page, open_page
from accountant.api.params import GroupedParams, UsageParams
from accountant.books.breakdown import broken_down
from accountant.books.costs import cost
from accountant.callers.auth import Principal
from accountant.wire import CostAnswer, CostLine, Dimension, UsageAnswer, UsageLine

router = APIRouter(tags=["figures"])
Grouped = Annotated[GroupedParams, Query()]
Broken = Annotated[UsageParams, Query()]
REFUSALS = refuses("bad-page", "invalid-parameter", "ledger-unavailable")


@router.get("/v1/usage", summary="GPU time by account and group", responses=REFUSALS)
async def usage(asked: Broken, deps: Given, principal: Reading) -> UsageAnswer:
    """GPU-microseconds of every account per group; over all groups they add up to the capacity."""
    page, where, zone = _opened("usage", asked, deps, principal, asked.breakdown)

    def read() -> tuple[list[UsageLine], float]:
        span = page.start_ms, page.end_ms
        lines = deps.ledger.usage(*span, asked.by, where, zone)
        # Of all lines together it is the same whatever they are grouped by; some of them tell too little.
        covered = deps.ledger.coverage(*span) if where else coverage(lines)
        if asked.breakdown:
            lines = broken_down(deps.ledger, lines, *span, asked.by, where, zone)
        return lines, covered

    lines, covered = await asyncio.to_thread(read)
    shown, following = page.cut(
        sorted(lines, key=lambda line: _key(asked, line)), lambda line: _key(asked, line), _limit(asked, deps)
    )
    return UsageAnswer(
        start_ms=page.start_ms,
        end_ms=page.end_ms,
        by=asked.by,
        lines=shown,
        next_page=following,
        coverage=covered,
    )


@router.get("/v1/cost", summary="Exact cost by group", responses=REFUSALS)
async def costs(asked: Grouped, deps: Given, principal: Reading) -> CostAnswer:
    """Billed GPU time and its cost per group. `total` is that of all pages. Unpriced time is never zero:
    where some of a group has no price its cost is null, and `unpriced_gpu_us` says how much."""
    page, where, zone = _opened("cost", asked, deps, principal)
    whole = await asyncio.to_thread(cost, deps.ledger, deps.book(), page.start_ms, page.end_ms, asked.by, where, zone)
    shown, following = page.cut(whole.lines, lambda line: _key(asked, line), _limit(asked, deps))
    return whole.model_copy(update={"lines": shown, "next_page": following})


def _opened(
    address: str, asked: GroupedParams, deps: Deps, principal: Principal, *more: object
) -> tuple[Page, Mapping[Dimension, tuple[str, ...]], str]:
    start, end, zone = asked.span(deps.clock.wall_ms(), deps.settings.timezone, deps.settings.limits)
    where = dict(asked.where)
    where |= teams_asked(principal, where.get("team", ()))
    question = [address, asked.start, asked.end, zone, asked.by, sorted(where.items()), *more]
    return open_page(question, start, end, asked.page), where, zone


def _key(asked: GroupedParams, line: UsageLine | CostLine) -> tuple[str, ...]:
    return tuple(line.key[dimension] for dimension in asked.by)


def _limit(asked: GroupedParams, deps: Deps) -> int:
    return min(asked.limit, deps.settings.limits.page_lines)
