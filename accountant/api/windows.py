"""GET /v1/windows: usage per queue over a window, with everything needed to decide whether to trust it.

What a window is, is accountant.windows' word. Only where tumbling windows begin (`start`) is settled
here, by asking the ledger for the span from the last boundary on.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field

from accountant import periods
from accountant.api.access import Reading, of_everyone
from accountant.api.deps import Given
from accountant.api.openapi import refuses
from accountant.api.params import Instant, Params, instant, invalid
from accountant.wire import Duration, Measure, UsageWindow, WindowKind, WindowSpec
from agent.units import MS_PER_DAY, MS_PER_SECOND

router = APIRouter(tags=["figures"])
SECONDS_PER_DAY = MS_PER_DAY // MS_PER_SECOND


class WindowParams(Params):
    kind: WindowKind = "sliding"
    size: Duration = Field(default=604_800, gt=0, description="Seconds, or 7d, 12h, 1h30m.")
    start: Instant = None
    half_life: Duration | None = Field(default=None, gt=0, description="Age at which usage counts half.")
    measure: Measure = "allocated"
    by: Literal["queue"] = "queue"
    at: Instant = None
    min_coverage: float = Field(default=0.98, ge=0, le=1, description="For the watermark.")


@router.get(
    "/v1/windows",
    summary="Usage per queue over a window",
    responses=refuses("invalid-parameter", "unsupported-question"),
)
async def window(asked: Annotated[WindowParams, Query()], deps: Given, principal: Reading) -> UsageWindow:
    """sliding: the last `size` seconds. tumbling: since the last multiple of `size` after `start` (1970
    without it). calendar: since the beginning of the month. All end at `at` (default now); the caller
    decides whether watermark and coverage are good enough."""
    of_everyone(principal)
    zone = periods.zone(deps.settings.timezone)
    at = deps.clock.wall_ms() if asked.at is None else instant("at", asked.at, zone)
    if asked.size > deps.settings.limits.span_days * SECONDS_PER_DAY:
        raise invalid("size", f"longer than {deps.settings.limits.span_days} days")
    spec = WindowSpec(kind=asked.kind, size=asked.size, half_life=asked.half_life)
    if asked.start is not None:
        spec = _since_boundary(asked, at, instant("start", asked.start, zone))
    answer = await asyncio.to_thread(deps.ledger.window, spec, at, asked.measure, asked.min_coverage)
    return answer.model_copy(update={"kind": asked.kind})


def _since_boundary(asked: WindowParams, at: int, start: int) -> WindowSpec:
    """From the last boundary before `at`; at a boundary itself, the window that has just ended.

    Sizes are whole seconds, so `at` has to lie whole seconds after `start`."""
    if asked.kind != "tumbling":
        raise invalid("start", f"only tumbling windows have a start; a {asked.kind} one ends at `at`")
    if at <= start:
        raise invalid("start", "the first window begins at `start`, which is not before `at`")
    elapsed = (at - 1 - start) % (asked.size * MS_PER_SECOND) + 1
    return WindowSpec(kind="sliding", size=max(1, elapsed // MS_PER_SECOND), half_life=asked.half_life)
