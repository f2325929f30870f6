"""GET /v1/waits: how long pods waited in their queues, and for their first container."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field

from accountant.api.access import Reading
from accountant.api.deps import Given
from accountant.api.openapi import refuses
from accountant.api.params import SpanParams, check_cost
from accountant.wire import Model
from accountant.work.waits import Spread, Waited, spread, waited

router = APIRouter(tags=["usage"])


class WaitSpread(Model):
    """Seconds. pods: those of which the wait is known."""

    pods: int
    median: float
    p95: float
    longest: float


class WaitLine(Model):
    """queued: created to scheduled. starting: scheduled to the first container. waiting: not scheduled yet;
    their wait so far is among `queued`."""

    key: str
    pods: int
    waiting: int
    queued: WaitSpread
    starting: WaitSpread


class WaitParams(SpanParams):
    by: Literal["team", "queue", "namespace"] = Field(default="queue", description="One line for each.")
    cluster: str | None = Field(
        default=None, min_length=1, max_length=253, description="Of the pods of this cluster alone; all without it."
    )


@router.get("/v1/waits", summary="How long pods waited", responses=refuses("invalid-parameter"))
async def waits(asked: Annotated[WaitParams, Query()], deps: Given, principal: Reading) -> list[WaitLine]:
    """Of the pods that existed in the span; of the caller's teams."""
    now = deps.clock.wall_ms()
    start, end, _ = asked.span(now, deps.settings.timezone, deps.settings.limits)
    check_cost(
        deps.ledger, deps.settings.limits, start, end, clusters=() if asked.cluster is None else (asked.cluster,)
    )
    found = await asyncio.to_thread(deps.ledger.pods, start, end)
    groups: dict[str, list[Waited]] = defaultdict(list)
    for pod in found:
        if (principal.teams is None or pod.team in principal.teams) and asked.cluster in (None, pod.cluster):
            key = {"team": pod.team, "queue": pod.queue, "namespace": pod.facts.namespace}[asked.by]
            groups[key].append(waited(pod.facts, min(now, end)))
    return [
        WaitLine(
            key=key,
            pods=len(group),
            waiting=sum(one.waiting for one in group),
            queued=_seconds(spread(one.queued_ms for one in group)),
            starting=_seconds(spread(one.starting_ms for one in group)),
        )
        for key, group in sorted(groups.items())
    ]


def _seconds(found: Spread) -> WaitSpread:
    return WaitSpread(
        pods=found.pods,
        median=found.median_ms / 1000,
        p95=found.p95_ms / 1000,
        longest=found.longest_ms / 1000,
    )
