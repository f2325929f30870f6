"""Alive, ready, and the figures for Prometheus."""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import APIRouter, Request, Response

from accountant.api.access import admit, of_everyone
from accountant.api.deps import Given
from accountant.api.openapi import refuses
from accountant.api.problems import Refusal
from accountant.counters import CONTENT_TYPE
from accountant.errors import LedgerUnavailable
from accountant.guarded_clock import SKEW_MS
from accountant.wire import Model
from agent.units import MS_PER_SECOND

router = APIRouter(tags=["operation"])


class State(Model):
    status: Literal["ok"] = "ok"


@router.get("/livez", summary="The process answers")
async def alive() -> State:
    return State()


@router.get(
    "/readyz",
    summary="The ledger can be read, and every background task works",
    responses=refuses("ledger-unavailable", "task-failing"),
)
async def ready(deps: Given) -> State:
    """Refuses while the time is in doubt, too: by a clock that was set, the agents' clocks, or the newest record."""
    if deps.guard is not None and (why := deps.guard.doubt):
        raise LedgerUnavailable(why)
    faults = deps.tasks.faults() if deps.tasks is not None else {}
    if faults:
        # The reasons name files and hosts, and this route needs no token: they are in the log.
        tasks = {name: fault.partition(":")[0] for name, fault in faults.items()}
        detail = "; ".join(f"{name} {fault}" for name, fault in tasks.items())
        raise Refusal("task-failing", f"{detail}: the log says why", tasks=tasks)
    now = deps.clock.wall_ms()
    await asyncio.to_thread(deps.ledger.policies, now, now + 1)
    ahead_ms = deps.ledger.newest_end_ms() - now
    if ahead_ms > SKEW_MS:
        raise LedgerUnavailable(
            f"the newest record ends {ahead_ms // MS_PER_SECOND} s after the time of the clock: one of them is wrong; "
            "see: gputally accountant clock show"
        )
    return State()


@router.get(
    "/metrics",
    summary="Prometheus text format",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request, deps: Given) -> Response:
    """Without a token only what names no team, its people, namespaces, queues or jobs, unless `open_metrics: true`."""
    naming = deps.settings.open_metrics
    if not naming:
        try:
            of_everyone(await admit(request, deps, "read"))
            naming = True
        except Refusal as refusal:
            if refusal.slug != "unauthenticated" or "authorization" in request.headers:
                raise
    found = await asyncio.to_thread(deps.metrics.exposition, naming=naming)
    return Response(found, media_type=CONTENT_TYPE)
