"""What is booked beside the metered time: approved credits and charges, and corrections of closed months."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import TypeAdapter

from accountant.api.access import Administering, Reading
from accountant.api.body import read_model
from accountant.api.deps import Given
from accountant.api.openapi import inline_body, refuses
from accountant.api.params import MonthText, Params
from accountant.books.adjustments import NewAdjustment
from accountant.books.statements import Adjustment, Correction
from accountant.callers.auth import Principal
from accountant.told import BookedAdjustment, BookedCorrection

router = APIRouter(tags=["periods"])
_NEW = TypeAdapter(NewAdjustment)


class BookedParams(Params):
    booked_in: MonthText | None = None


@router.get("/v1/adjustments", summary="Approved credits and charges", responses=refuses("invalid-parameter"))
async def adjustments(
    asked: Annotated[BookedParams, Query()], deps: Given, principal: Reading
) -> list[BookedAdjustment]:
    """In the order of booking; of the caller's teams."""
    books = await asyncio.to_thread(deps.books.books)
    return [
        shown(found)
        for found in books.adjustments
        if asked.booked_in in (None, found.booked_in) and _visible(principal, found.team)
    ]


@router.post(
    "/v1/adjustments",
    summary="Book an approved credit or charge",
    openapi_extra={"requestBody": inline_body(NewAdjustment)},
    responses=refuses("malformed-body", "too-large", "invalid-body", "books-refuse", "ledger-unavailable"),
)
async def adjust(request: Request, deps: Given, principal: Administering) -> BookedAdjustment:
    """In the first open month. Somebody other than the caller has to have approved it."""
    new = await read_model(deps.intake, request, _NEW)
    return shown(await asyncio.to_thread(deps.books.credits.adjust, new, principal.name))


@router.get("/v1/corrections", summary="Corrections of closed months", responses=refuses("invalid-parameter"))
async def corrections(
    asked: Annotated[BookedParams, Query()], deps: Given, principal: Reading
) -> list[BookedCorrection]:
    """In the order of booking; of the caller's teams."""
    books = await asyncio.to_thread(deps.books.books)
    return [
        corrected(found)
        for found in books.corrections
        if asked.booked_in in (None, found.booked_in) and _visible(principal, found.line.team)
    ]


@router.post(
    "/v1/corrections", summary="Take up every proposal", responses=refuses("books-refuse", "ledger-unavailable")
)
async def correct(deps: Given, principal: Administering) -> list[BookedCorrection]:
    """All that arrived late for closed months and waits; the new lines."""
    return [corrected(found) for found in await asyncio.to_thread(deps.books.correct, principal.name)]


def _visible(principal: Principal, team: str) -> bool:
    return principal.teams is None or team in principal.teams


def shown(found: Adjustment) -> BookedAdjustment:
    """An adjustment as it is answered."""
    return BookedAdjustment(
        id=found.id, month=found.month, booked_in=found.booked_in, team=found.team, amount=found.amount,
        currency=found.currency, reason=found.reason, who=found.who, approved_by=found.approved_by, at_ms=found.at_ms,
    )  # fmt: skip


def corrected(found: Correction) -> BookedCorrection:
    """A correction as it is answered."""
    line = found.line
    return BookedCorrection(
        month=found.month, booked_in=found.booked_in, reason=found.reason, team=line.team, account=line.account,
        detail=line.detail, gpu_model=line.gpu_model, capacity_type=line.capacity_type, price_row=line.price_row,
        gpu_us=line.gpu_us, cost=line.cost, amount=found.amount,
    )  # fmt: skip
