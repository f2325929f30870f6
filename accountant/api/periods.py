"""Months: where each stands, what speaks against closing it, and closing, reopening and publishing it."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import Field, TypeAdapter

from accountant.api.access import Administering, Reading
from accountant.api.body import read_model
from accountant.api.deps import Deps, Given
from accountant.api.openapi import inline_body, refuses
from accountant.api.params import MonthText
from accountant.books.closing import Books, Objecting
from accountant.periods import Month
from accountant.told import ObjectionLine, Period
from accountant.wire import Model

router = APIRouter(tags=["periods"])
InPath = Annotated[MonthText, Path(description="A calendar month: 2026-10.")]


class Close(Model):
    """acknowledge: kinds of objections that shall not stand against closing; they need a reason."""

    reason: str = Field(default="", max_length=1000)
    acknowledge: tuple[Objecting, ...] = ()


class Because(Model):
    reason: str = Field(default="", max_length=1000)


_CLOSE = TypeAdapter(Close)
_BECAUSE = TypeAdapter(Because)
_REFUSALS = refuses(
    "malformed-body", "too-large", "invalid-body", "invalid-parameter", "books-refuse", "ledger-unavailable"
)


@router.get("/v1/periods", summary="All months that are closed, and those that wait", responses=refuses())
async def periods(deps: Given, _: Reading) -> list[Period]:
    """Oldest first, from the first closed one, or the first there is anything of; the current month is the last."""

    def read() -> list[Period]:
        books, now = deps.books.books(), deps.clock.wall_ms()
        current = Month.of(now, deps.settings.zone)
        known = [Month.parse(closed.month) for closed in books.closed]
        waiting = known[-1].next if known else Month.of(min(now, deps.ledger.extent()[0] or now), deps.settings.zone)
        while waiting <= current:
            known.append(waiting)
            waiting = waiting.next
        return [_period(deps, month, books) for month in known]

    return await asyncio.to_thread(read)


@router.get("/v1/periods/{month}", summary="One month, with what speaks against closing it", responses=_REFUSALS)
async def period(month: InPath, deps: Given, _: Reading) -> Period:
    return await asyncio.to_thread(_with_objections, deps, Month.parse(month))


@router.post(
    "/v1/periods/{month}/close",
    summary="Close a month",
    openapi_extra={"requestBody": inline_body(Close)},
    responses=_REFUSALS,
)
async def close(month: InPath, request: Request, deps: Given, principal: Administering) -> Period:
    """Its statement never changes again; what comes later is corrected in the next month."""
    asked = await read_model(deps.intake, request, _CLOSE)
    await asyncio.to_thread(deps.books.close, Month.parse(month), principal.name, asked.reason, asked.acknowledge)
    return await asyncio.to_thread(_with_objections, deps, Month.parse(month))


@router.post(
    "/v1/periods/{month}/reopen",
    summary="Open the newest closed month again",
    openapi_extra={"requestBody": inline_body(Because)},
    responses=_REFUSALS,
)
async def reopen(month: InPath, request: Request, deps: Given, principal: Administering) -> Period:
    """Only before it is published, and with a reason."""
    asked = await read_model(deps.intake, request, _BECAUSE)
    await asyncio.to_thread(deps.books.reopen, Month.parse(month), principal.name, asked.reason)
    return await asyncio.to_thread(_with_objections, deps, Month.parse(month))


@router.post(
    "/v1/periods/{month}/publish",
    summary="Publish a closed month",
    openapi_extra={"requestBody": inline_body(Because)},
    responses=_REFUSALS,
)
async def publish(month: InPath, request: Request, deps: Given, principal: Administering) -> Period:
    """It cannot be opened again."""
    asked = await read_model(deps.intake, request, _BECAUSE)
    await asyncio.to_thread(deps.books.publish, Month.parse(month), principal.name, asked.reason)
    return await asyncio.to_thread(_with_objections, deps, Month.parse(month))


def _period(deps: Deps, month: Month, books: Books) -> Period:
    start, end = month.span(deps.settings.zone)
    closed = books.of(str(month))
    return Period(
        month=str(month),
        start_ms=start,
        end_ms=end,
        status=deps.books.status(month, books),
        hash=closed.hash if closed else None,
        closed_ms=closed.at_ms if closed else None,
        closed_by=closed.who if closed else None,
    )


def _with_objections(deps: Deps, month: Month) -> Period:
    standing = tuple(ObjectionLine(kind=found.kind, text=found.text) for found in deps.books.standing(month))
    return _period(deps, month, deps.books.books()).model_copy(update={"objections": standing})
