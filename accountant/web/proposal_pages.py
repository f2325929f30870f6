"""`/proposals`: what arrived late for closed months, what it would change, and how to take it up or refuse it."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from accountant.api.authorization import Reading
from accountant.api.dependencies import Given
from accountant.web import overview_pages
from gputally.base.money import exact_sum
from gputally.server.request_handling import tagged

router = APIRouter(include_in_schema=False)


@router.get("/proposals")
async def proposals(request: Request, deps: Given, principal: Reading) -> Response:
    """A team lead sees the effect on the own teams."""

    def make() -> bytes:
        found = [(one, one.effects(principal.teams)) for one in deps.books.proposals()]
        book = deps.book()
        rows = [(one, effect) for one, effects in found for effect in effects]
        return overview_pages.page(
            request, "/month", "proposals.html", deps, rows=rows, currency=book.currency if book else None,
            waiting=[one for one, effects in found if effects], everyone=principal.teams is None,
            total=exact_sum(effect.amount for _, effect in rows),
        )  # fmt: skip

    return tagged(request, await asyncio.to_thread(make), overview_pages.HTML)
