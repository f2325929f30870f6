"""/v1/clock: whether the accountant's clock can be trusted, and what was dated wrongly while it could not."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from pydantic import Field, TypeAdapter

from accountant.api.authorization import Administering
from accountant.api.dependencies import Deps, Given
from accountant.api.middleware import read_model
from accountant.api.problems import inline_body, refuses
from accountant.ledger.protocols import ClockReport, MisdatedRecords
from accountant.runtime.guarded_clock import ClockState
from gputally.server.config_models import Model

router = APIRouter(tags=["operation"])


class RedateReason(Model):
    """Why, for the audit trail."""

    reason: str = Field(min_length=1, max_length=1000)


_HEAL = TypeAdapter(RedateReason)


@router.get(
    "/v1/clock",
    summary="The accountant's clock, and what is dated later than now",
    responses=refuses("ledger-unavailable"),
)
async def clock(deps: Given, _: Administering) -> ClockReport:
    """doubt: why nothing is dated now. misdated: what a clock that was ahead dated wrongly, by kind."""
    return await asyncio.to_thread(_report, deps)


@router.post(
    "/v1/clock/accept", summary="Take the clock of the machine for right", responses=refuses("ledger-unavailable")
)
async def accept(deps: Given, _: Administering) -> ClockReport:
    """For a clock that was set and is right now, where too few agents say so by themselves."""
    if deps.guard is not None:
        await asyncio.to_thread(deps.guard.accept)
    return await asyncio.to_thread(_report, deps)


@router.post(
    "/v1/clock/heal",
    summary="Heal what is dated later than now",
    openapi_extra={"requestBody": inline_body(RedateReason)},
    responses=refuses(
        "malformed-body", "too-large", "invalid-body", "invalid-parameter", "books-refuse", "ledger-unavailable"
    ),
)
async def heal(request: Request, deps: Given, principal: Administering) -> list[MisdatedRecords]:
    """What is named by `GET /v1/clock`, each kind as it says there; an act in the audit trail."""
    asked = await read_model(deps.intake, request, _HEAL)
    now = deps.clock.wall_ms()
    return list(await asyncio.to_thread(deps.ledger.redate, now, principal.name, asked.reason))


def _report(deps: Deps) -> ClockReport:
    now = deps.clock.wall_ms()
    state = deps.guard.state() if deps.guard is not None else ClockState("", now, now, 0, 0, 0)
    return ClockReport(
        doubt=state.doubt,
        wall_ms=state.wall_ms,
        told_ms=state.told_ms,
        senders=state.senders,
        agreeing=state.agreeing,
        misdated=deps.ledger.misdated(state.told_ms),
    )
