"""/v1/gpus: which node each GPU belonged to, GPUs that moved to another node, and GPUs that were taken out for good."""

from __future__ import annotations

import asyncio
from typing import Annotated, Self

from fastapi import APIRouter, Query, Request
from pydantic import Field, TypeAdapter, model_validator

from accountant.api.access import Administering, Reading, of_everyone
from accountant.api.body import read_model
from accountant.api.deps import Given
from accountant.api.openapi import inline_body, refuses
from accountant.api.params import Params, instant
from accountant.ledger import GpuMove, GpuOwnership, RetiredDevice, Retirement
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


class Move(Model):
    """cluster: left out, the only one there is."""

    cluster: Name = ""
    node: Annotated[str, Field(min_length=1, max_length=1024, description="The new owner.")]
    gpus: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MOST_GPUS)]
    since: str = Field(
        default="",
        max_length=64,
        description="From when on; left out: from the newest record of each one's present owner on.",
    )
    reason: str = Field(min_length=1, max_length=1000)


class OwnersParams(Params):
    cluster: str = Field(default="", max_length=1024, description="Only of this cluster.")
    node: str = Field(
        default="", max_length=1024, description="Only GPUs that ever belonged to this node, or that it claims."
    )
    gpu: str = Field(default="", max_length=1024, description="Only this UUID.")
    moved: bool = Field(default=False, description="Only GPUs that changed their owner or that another node claims.")
    after: str = Field(default="", max_length=4096, description="`next_after` of the answer before.")
    limit: int = Field(default=1_000, ge=1, le=MOST_GPUS, description="GPUs of one answer.")

    def asks_for(self, one: GpuOwnership) -> bool:
        """Whether the GPU is among those asked for."""
        return (
            self.cluster in ("", one.cluster)
            and self.gpu in ("", one.gpu_uuid)
            and (not self.node or self.node in one.nodes)
            and (not self.moved or len(one.owners) > 1 or bool(one.claims))
        )


class GpuOwners(Model):
    """By cluster and UUID. next_after: ask for more with it; null at the end."""

    gpus: tuple[GpuOwnership, ...]
    next_after: str | None


_RETIRE = TypeAdapter(Retire)
_MOVE = TypeAdapter(Move)


@router.get("/v1/gpus/owners", summary="Which node each GPU belonged to", responses=refuses("invalid-parameter"))
async def owners(asked: Annotated[OwnersParams, Query()], deps: Given, principal: Reading) -> GpuOwners:
    """A GPU belongs to the node that first reported it, until it moves. What another node reports of it is quarantined
    and stands here as a claim. Not for principals of some teams."""
    of_everyone(principal)
    known = await asyncio.to_thread(deps.ledger.gpu_owners)
    found = sorted((one for one in known if asked.asks_for(one) and _place(one) > asked.after), key=_place)
    shown = found[: asked.limit]
    return GpuOwners(gpus=tuple(shown), next_after=_place(shown[-1]) if len(found) > len(shown) else None)


@router.post(
    "/v1/gpus/move",
    summary="Confirm that GPUs moved to another node",
    openapi_extra={"requestBody": inline_body(Move)},
    responses=refuses(
        "malformed-body", "too-large", "invalid-body", "invalid-parameter", "books-refuse", "ledger-unavailable"
    ),
)
async def move(request: Request, deps: Given, principal: Administering) -> list[GpuOwnership]:
    """All or none. Without it another node has a GPU once its owner has been silent about it for `gpu_move_after`. What
    was booked before stays the former owner's, and what was quarantined stays so."""
    asked = await read_model(deps.intake, request, _MOVE)
    since = instant("since", asked.since, deps.settings.zone) if asked.since else None
    chosen = GpuMove(asked.node, asked.gpus, asked.cluster, since)

    def act() -> list[GpuOwnership]:
        return list(deps.ledger.move_gpus(chosen, deps.clock.wall_ms(), principal.name, asked.reason))

    return await asyncio.to_thread(act)


def _place(one: GpuOwnership) -> str:
    """Where the GPU stands in the order of the answer."""
    return f"{one.cluster}/{one.gpu_uuid}"


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
