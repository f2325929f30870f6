"""/v1/deliveries: what was sent to whom, and what became of it. And once more, where a person says so."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from pydantic import Field, TypeAdapter

from accountant.api.access import Administering
from accountant.api.body import read_model
from accountant.api.deps import Deps, Given
from accountant.api.openapi import inline_body, refuses
from accountant.api.problems import Refusal
from accountant.delivery.attempts import Delivery
from accountant.delivery.dispatch import Dispatcher, UnknownDelivery
from accountant.told import DeliveryState
from accountant.wire import Model

router = APIRouter(tags=["operation"])


class Again(Model):
    """key: as listed."""

    key: str = Field(min_length=1, max_length=1_000)
    reason: str = Field(min_length=1, max_length=400)


_AGAIN = TypeAdapter(Again)


@router.get(
    "/v1/deliveries", summary="What was delivered, newest first", responses=refuses("not-found", "ledger-unavailable")
)
async def deliveries(deps: Given, _: Administering) -> list[DeliveryState]:
    return [_shown(one) for one in _dispatcher(deps).known()]


@router.post(
    "/v1/deliveries/again",
    summary="Deliver once more",
    openapi_extra={"requestBody": inline_body(Again)},
    responses=refuses("malformed-body", "too-large", "invalid-body", "not-found", "ledger-unavailable"),
)
async def again(request: Request, deps: Given, principal: Administering) -> DeliveryState:
    """What is `unsure` or `given-up` waits for this: it may have arrived, so nobody but a person repeats it."""
    asked = await read_model(deps.intake, request, _AGAIN)
    try:
        found = await asyncio.to_thread(_dispatcher(deps).again, asked.key, principal.name, asked.reason)
    except UnknownDelivery as error:
        raise Refusal("not-found", str(error)) from error
    return _shown(found)


def _dispatcher(deps: Deps) -> Dispatcher:
    if deps.deliveries is None:
        raise Refusal("not-found", "nothing is delivered by itself (no `deliveries` in the settings)")
    return deps.deliveries


def _shown(one: Delivery) -> DeliveryState:
    return DeliveryState(
        key=one.key, outcome=one.outcome, tries=one.tries, first_ms=one.first_ms, last_ms=one.last_ms,
        next_ms=one.due_ms, detail=one.detail,
    )  # fmt: skip
