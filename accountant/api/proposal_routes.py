"""Serves proposals: late changes to closed months, which an admin accepts or refuses."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import Field, TypeAdapter

from accountant.api.authorization import Administering, Reading
from accountant.api.bookkeeping_models import BookedCorrection, ProposalEffect, WaitingProposal
from accountant.api.bookkeeping_routes import corrected
from accountant.api.dependencies import Deps, Given
from accountant.api.middleware import read_model
from accountant.api.problems import inline_body, refuses
from accountant.api.query_parameters import MonthText
from accountant.bookkeeping.late_change_proposals import Proposal
from accountant.core.periods import Month
from gputally.server.config_models import Model
from gputally.server.tokens_and_grants import Principal

router = APIRouter(tags=["periods"])
InPath = Annotated[MonthText, Path(description="A closed month: 2026-10.")]
Named = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="The proposal's `id`; it names its lines.")]


class AcceptReason(Model):
    reason: str = Field(default="", max_length=1000)


class RefuseReason(Model):
    reason: str = Field(min_length=1, max_length=1000)


_TAKING, _REFUSING = TypeAdapter(AcceptReason), TypeAdapter(RefuseReason)
_REFUSALS = refuses(
    "malformed-body", "too-large", "invalid-body", "invalid-parameter", "books-refuse", "ledger-unavailable"
)


@router.get("/v1/proposals", summary="What arrived late for closed months and waits", responses=refuses())
async def proposals(deps: Given, principal: Reading) -> list[WaitingProposal]:
    """Oldest month first; of the caller's teams. Nothing of it is booked before an admin takes it up."""
    return _shown(deps, principal, await asyncio.to_thread(deps.books.proposals))


@router.get(
    "/v1/periods/{month}/proposals", summary="What waits for one closed month", responses=refuses("invalid-parameter")
)
async def of_month(month: InPath, deps: Given, principal: Reading) -> list[WaitingProposal]:
    """One at most: what arrives later becomes part of it, under another id."""
    return _shown(deps, principal, await asyncio.to_thread(deps.books.proposals, Month.parse(month)))


@router.post(
    "/v1/periods/{month}/proposals/{proposal}/take",
    summary="Take up what arrived late",
    openapi_extra={"requestBody": inline_body(AcceptReason)},
    responses=_REFUSALS,
)
async def take(
    month: InPath, proposal: Named, request: Request, deps: Given, principal: Administering
) -> list[BookedCorrection]:
    """It is booked as corrections in the first open month. Refused where more has arrived since it was shown."""
    asked = await read_model(deps.intake, request, _TAKING)
    booked = await asyncio.to_thread(deps.books.take, Month.parse(month), proposal, principal.name, asked.reason)
    return [corrected(one) for one in booked]


@router.post(
    "/v1/periods/{month}/proposals/{proposal}/refuse",
    summary="Refuse what arrived late",
    openapi_extra={"requestBody": inline_body(RefuseReason)},
    responses=_REFUSALS,
)
async def refuse(
    month: InPath, proposal: Named, request: Request, deps: Given, principal: Administering
) -> WaitingProposal:
    """The month stays as it was stated, and the same facts are not proposed again."""
    asked = await read_model(deps.intake, request, _REFUSING)
    done = await asyncio.to_thread(deps.books.refuse, Month.parse(month), proposal, principal.name, asked.reason)
    return _shown(deps, principal, [done])[0]


def _shown(deps: Deps, principal: Principal, found: list[Proposal]) -> list[WaitingProposal]:
    book = deps.book()
    shown = []
    for one in found:
        effects = one.effects(principal.teams)
        if effects:
            shown.append(
                WaitingProposal(
                    month=one.month, booked_in=one.booked_in, id=one.id, currency=book.currency if book else None,
                    effects=tuple(ProposalEffect(team=e.team, gpu_us=e.gpu_us, amount=e.amount) for e in effects),
                )
            )  # fmt: skip
    return shown
