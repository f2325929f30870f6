"""POST /v1/gpus/retire: GPUs that were taken out for good."""

from __future__ import annotations

import asyncio
from typing import Annotated, Self

from fastapi import APIRouter, Request
from pydantic import Field, TypeAdapter, model_validator

from accountant.api.access import Administering
from accountant.api.body import read_model
from accountant.api.deps import Given
from accountant.api.openapi import inline_body, refuses
from accountant.api.params import instant
from accountant.ledger import RetiredDevice, Retirement
from accountant.terms import Model

router = APIRouter(tags=["usage"])
MOST_GPUS = 10_000
Name = Annotated[str, Field(max_length=1024)]


class Retire(Model):
    """These GPUs, or all of a node, or of a whole cluster. cluster: left out, the only one there is."""

    cluster: Name = ""
    node: Name = ""
    gpus: Annotated[tuple[Name, ...], Field(max_length=MOST_GPUS)] = ()
    since: str = Field(default="", max_length=64, description="From when on; left out: from now on.")
    reason: str = Field(min_length=1, max_length=1000)

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not (self.cluster or self.node or self.gpus):
            raise ValueError("name GPUs, a node, or a whole cluster")
        return self


_RETIRE = TypeAdapter(Retire)


@router.post(
    "/v1/gpus/retire",
    summary="Take GPUs out of the capacity",
    openapi_extra={"requestBody": inline_body(Retire)},
    responses=refuses(
        "malformed-body", "too-large", "invalid-body", "invalid-parameter", "books-refuse", "ledger-unavailable"
    ),
)
async def retire(request: Request, deps: Given, principal: Administering) -> list[RetiredDevice]:
    """For machines that went for good and that nothing else says it of; all or none. One that reports again is
    capacity again, what lay between unmetered."""
    asked = await read_model(deps.intake, request, _RETIRE)
    now = deps.clock.wall_ms()
    at = instant("since", asked.since, deps.settings.zone) if asked.since else now
    chosen = Retirement(asked.cluster, asked.node, asked.gpus)

    def act() -> list[RetiredDevice]:
        return list(deps.ledger.retire(chosen, at, now, principal.name, asked.reason, deps.books.closed_ms()))

    return await asyncio.to_thread(act)
