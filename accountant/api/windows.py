"""GET /v1/windows: usage per queue over a window, with everything needed to decide whether to trust it.

What a window is, is accountant.windows' word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field, ValidationError

from accountant import periods, question_cost
from accountant.api.access import Reading, of_everyone
from accountant.api.deps import Deps, Given
from accountant.api.openapi import refuses
from accountant.api.params import Instant, Params, instant, invalid
from accountant.api.problems import reason as first_reason
from accountant.windows import bounds
from accountant.wire import Duration, Measure, UsageWindow, WindowKind, WindowSpec
from agent.units import MS_PER_DAY, MS_PER_SECOND

router = APIRouter(tags=["figures"])


class WindowParams(Params):
    kind: WindowKind = Field(default="sliding", description="Since when (docs/windows.md).")
    size: Duration = Field(default=604_800, gt=0, description="Seconds, or 7d, 12h, 1h30m.")
    start: Instant = None
    cron: str | None = Field(default=None, max_length=100, description="minute hour day month weekday: 0 0 * * 1")
    half_life: Duration | None = Field(default=None, gt=0, description="Age at which usage counts half.")
    decay: Literal["exact", "slurm"] = Field(default="exact", description="The integral, or what Slurm makes of it.")
    calc_period: Duration = Field(default=300, gt=0, le=900, description="Of decay slurm: PriorityCalcPeriod.")
    measure: Measure = Field(default="allocated", description="What is added up.")
    gpu_weight: tuple[str, ...] = Field(
        default=(),
        max_length=100,
        description="MODEL:WEIGHT (repeatable): how much its time counts; others 1.",
    )
    shard: str | None = Field(default=None, max_length=253, description="Of the nodes of this scheduling shard alone.")
    cluster: str | None = Field(
        default=None, min_length=1, max_length=253, description="Of the GPUs of this cluster alone; all without it."
    )
    by: Literal["queue"] = Field(default="queue", description="One figure for each.")
    at: Instant = None
    min_coverage: float = Field(default=0.98, ge=0, le=1, description="For the watermark.")


@router.get(
    "/v1/windows",
    summary="Usage per queue over a window",
    responses=refuses("invalid-parameter", "unsupported-question"),
)
async def window(asked: Annotated[WindowParams, Query()], deps: Given, principal: Reading) -> UsageWindow:
    """sliding: the last `size` seconds. tumbling: since the last boundary, a multiple of `size` after or before
    `start` (1970 without it). cron: since the expression last fired. calendar: since the beginning of the month.
    All end at `at` (default now); the caller decides whether watermark and coverage are good enough. A cost is that
    of allocated time at the price book's rows, before commitments; time without a price is not covered."""
    of_everyone(principal)
    zone = periods.zone(deps.settings.timezone)
    at = deps.clock.wall_ms() if asked.at is None else instant("at", asked.at, zone)
    start = None if asked.start is None else instant("start", asked.start, zone)
    try:
        spec = WindowSpec(
            kind=asked.kind,
            size=asked.size,
            half_life=asked.half_life,
            start=None if start is None else datetime.fromtimestamp(start / MS_PER_SECOND, UTC),
            cron=asked.cron,
            decay=asked.decay,
            calc_period=asked.calc_period,
            gpu_weights=_weights(asked.gpu_weight),
        )
    except ValidationError as error:
        raise invalid("kind", first_reason(error.errors()[0])) from error
    begin, _ = bounds(spec, at, zone)
    if at - begin > deps.settings.limits.span_days * MS_PER_DAY:
        raise invalid("size", f"longer than {deps.settings.limits.span_days} days")
    await asyncio.to_thread(_check_cost, deps, spec, begin, at, asked.cluster)
    return await asyncio.to_thread(
        deps.ledger.window, spec, at, asked.measure, asked.min_coverage,
        book=deps.book(), shard=asked.shard, cluster=asked.cluster,
    )  # fmt: skip


def _check_cost(deps: Deps, spec: WindowSpec, begin_ms: int, at_ms: int, cluster: str | None) -> None:
    """Before anything is added up: what the window has to add up, unless the controller needs it. Raises Refusal."""
    most = deps.settings.limits.window_gpu_hours
    reason = question_cost.refusal(deps.ledger, most, begin_ms, at_ms, clusters=() if cluster is None else (cluster,))
    if not reason:
        return
    if any(version.policy.window == spec for version in deps.ledger.policies(at_ms, at_ms + 1)):
        return
    raise invalid("size", f"the window has {reason}, or for the window of the policy in force")


def _weights(given: Sequence[str]) -> dict[str, Decimal]:
    found: dict[str, Decimal] = {}
    for text in given:
        model, colon, weight = text.rpartition(":")
        try:
            found[model] = Decimal(weight)
        except InvalidOperation:
            colon = ""
        if not colon or not model:
            raise invalid("gpu_weight", f"not a weight: {text[:100]!r} (write for example H100:4)")
    return found
