"""What fairshare decided and why: kept for explaining, never used for billing."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field, TypeAdapter

from accountant.api.access import Governing, Reading, of_everyone
from accountant.api.body import read_model
from accountant.api.deps import Given
from accountant.api.openapi import json_body, refuses
from accountant.api.params import SpanParams
from accountant.wire import Decision, Model

router = APIRouter(tags=["decisions"])
MOST_DECISIONS = 10_000
_DECISIONS = TypeAdapter(Annotated[tuple[Decision, ...], Field(max_length=MOST_DECISIONS)])


class Recorded(Model):
    """How many of the decisions were new; those that are known are left as they are."""

    recorded: int
    known: int


class DecisionParams(SpanParams):
    kind: Literal["weight", "hold", "preemption"] | None = Field(default=None, description="Only these.")
    subject: str | None = Field(default=None, max_length=500, description="Only about it, by its whole name.")
    cluster: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Of the controller of this cluster, or of none that names one.",
    )
    limit: int = Field(default=1_000, ge=1, le=MOST_DECISIONS, description="Decisions, newest first.")


@router.post(
    "/v1/decisions",
    summary="Record decisions",
    openapi_extra={"requestBody": json_body("Decision", many=True)},
    responses=refuses("malformed-body", "too-large", "invalid-body", "ledger-unavailable"),
)
async def record(request: Request, deps: Given, _: Governing) -> Recorded:
    """A list of decisions, idempotent by cluster, id and instant."""
    decisions = await read_model(deps.intake, request, _DECISIONS)
    new = await asyncio.to_thread(deps.ledger.record_decisions, decisions, deps.clock.wall_ms())
    return Recorded(recorded=new, known=len(decisions) - new)


@router.get("/v1/decisions", summary="Decisions, newest first", responses=refuses("invalid-parameter"))
async def decisions(asked: Annotated[DecisionParams, Query()], deps: Given, principal: Reading) -> list[Decision]:
    of_everyone(principal)
    # What was decided in this very millisecond belongs to "until now".
    start, end, _ = asked.span(deps.clock.wall_ms() + 1, deps.settings.timezone, deps.settings.limits)
    return await asyncio.to_thread(
        deps.ledger.decisions, start, end, asked.limit, kind=asked.kind, subject=asked.subject, cluster=asked.cluster
    )
