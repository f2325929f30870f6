"""GET /v1/windows: usage per queue over a window, with everything needed to decide whether to trust it.

The ledger measures spans that end at `at`; where the other kinds of window begin is decided here.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Query
from pydantic import Field

from accountant import periods
from accountant.api.access import Reading, of_everyone
from accountant.api.deps import Given
from accountant.api.openapi import refuses
from accountant.api.params import Instant, Params, Zone, instant, invalid
from accountant.wire import Duration, Measure, UsageWindow, WindowSpec

router = APIRouter(tags=["figures"])


class WindowParams(Params):
    kind: Literal["sliding", "tumbling", "calendar"] = "sliding"
    size: Duration = Field(default=604_800, gt=0, description="Seconds, or 7d, 12h, 1h30m.")
    start: Instant = None
    half_life: Duration | None = Field(default=None, gt=0, description="Age at which usage counts half.")
    measure: Measure = "allocated"
    by: Literal["queue"] = "queue"
    at: Instant = None
    timezone: Zone = None
    min_coverage: float = Field(default=0.98, ge=0, le=1, description="For the watermark.")


@router.get("/v1/windows", summary="Usage per queue over a window", responses=refuses("invalid-parameter"))
async def window(asked: Annotated[WindowParams, Query()], deps: Given, principal: Reading) -> UsageWindow:
    """sliding: the last `size` seconds. tumbling: since the last multiple of `size` after `start`.
    calendar: since the beginning of the month. All end at `at` (default now); the caller decides
    whether watermark and coverage are good enough."""
    of_everyone(principal)
    zone = periods.zone(asked.timezone or deps.settings.timezone)
    at = deps.clock.wall_ms() if asked.at is None else instant("at", asked.at, zone)
    if asked.kind == "sliding":
        if asked.start is not None:
            raise invalid("start", "a sliding window has no start: it ends at `at` and has a size")
        size = asked.size
    else:
        size = max(1, (at - _begin(asked, at, zone)) // 1000)
    spec = WindowSpec(kind="sliding", size=size, half_life=asked.half_life)
    answer = await asyncio.to_thread(deps.ledger.window, spec, at, asked.measure, asked.min_coverage)
    return answer.model_copy(update={"kind": asked.kind})


def _begin(asked: WindowParams, at: int, zone: ZoneInfo) -> int:
    """The last boundary before `at`; at a boundary itself, the window that has just ended."""
    if asked.kind == "calendar":
        return periods.Month.of(at - 1, zone).span(zone)[0]
    anchor = instant("start", asked.start, zone) if asked.start is not None else 0
    if at <= anchor:
        raise invalid("start", "the first window begins at `start`, which is not before `at`")
    size = asked.size * 1000
    return at - 1 - (at - 1 - anchor) % size
