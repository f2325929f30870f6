"""Credits for a node that failed: what its holders were billed, previewed, and booked once somebody approved it."""

from __future__ import annotations

import asyncio
from decimal import Decimal

from fastapi import APIRouter, Request
from pydantic import Field, TypeAdapter

from accountant.api.access import Administering
from accountant.api.adjustments import shown
from accountant.api.body import read_model
from accountant.api.deps import Deps, Given
from accountant.api.openapi import inline_body, refuses
from accountant.api.params import instant, invalid
from accountant.books.closing import CannotClose
from accountant.books.credits import NodeSpan, cluster_of
from accountant.money import exact_sum
from accountant.prices.amounts import Share
from accountant.told import BookedAdjustment, Credit, TeamCredit
from accountant.wire import Model

router = APIRouter(tags=["periods"])


class CreditedNode(Model):
    """start, end: as in questions, of one calendar month. cluster: only where several have a node of that name.
    share: of what was billed for it."""

    node: str = Field(min_length=1, max_length=253)
    start: str = Field(min_length=1, max_length=64)
    end: str = Field(min_length=1, max_length=64)
    cluster: str | None = Field(default=None, max_length=253)
    share: Share = Decimal(1)


class NewCredit(CreditedNode):
    reason: str = Field(min_length=1, max_length=800)
    approved_by: str = Field(min_length=1, max_length=253)


_NODE = TypeAdapter(CreditedNode)
_NEW = TypeAdapter(NewCredit)
_REFUSALS = refuses(
    "malformed-body", "too-large", "invalid-body", "invalid-parameter", "books-refuse", "ledger-unavailable"
)


@router.post(
    "/v1/credits/preview",
    summary="What a credit for a node would be",
    openapi_extra={"requestBody": inline_body(CreditedNode)},
    responses=_REFUSALS,
)
async def preview(request: Request, deps: Given, _principal: Administering) -> Credit:
    """By team: what was billed for the node's GPUs in the span. Time that was down was billed to nobody."""
    asked = await read_model(deps.intake, request, _NODE)

    def look() -> Credit:
        span, book = _span(asked, deps), deps.book()
        lines = tuple(
            TeamCredit(team=line.team, gpu_us=line.gpu_us, billed=line.billed, amount=line.amount)
            for line in deps.books.credits.preview(span)
        )
        return Credit(
            cluster=span.cluster, node=span.node, start_ms=span.start_ms, end_ms=span.end_ms,
            currency=book.currency if book else None, lines=lines, amount=exact_sum(line.amount for line in lines),
        )  # fmt: skip

    return await asyncio.to_thread(look)


@router.post(
    "/v1/credits",
    summary="Book an approved credit for a node",
    openapi_extra={"requestBody": inline_body(NewCredit)},
    responses=_REFUSALS,
)
async def credit(request: Request, deps: Given, principal: Administering) -> list[BookedAdjustment]:
    """One adjustment per team, in the first open month, all or none. A span of a node is credited once."""
    new = await read_model(deps.intake, request, _NEW)

    def act() -> list[BookedAdjustment]:
        booked = deps.books.credits.credit(_span(new, deps), principal.name, new.reason, new.approved_by)
        return [shown(adjustment) for adjustment in booked]

    return await asyncio.to_thread(act)


def _span(asked: CreditedNode, deps: Deps) -> NodeSpan:
    start, end = (instant(name, getattr(asked, name), deps.settings.zone) for name in ("start", "end"))
    if end <= start:
        raise invalid("end", "the span ends at or before it begins")
    if not asked.share:
        raise invalid("share", "a share of 0 is no credit")
    cluster = asked.cluster
    if cluster is None:
        try:
            cluster = cluster_of(deps.ledger, asked.node, start, end)
        except ValueError as error:
            raise CannotClose(str(error)) from error
    return NodeSpan(cluster=cluster, node=asked.node, start_ms=start, end_ms=end, share=asked.share)
