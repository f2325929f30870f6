"""GET /v1/check and /v1/quarantine: does the ledger balance, and what was not booked and why."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from accountant.answers import coverage
from accountant.api.access import Administering, Reading, of_everyone
from accountant.api.deps import Given
from accountant.api.openapi import refuses
from accountant.api.params import Params, SpanParams, check_cost
from accountant.books.closing import faults
from accountant.told import Balance
from accountant.wire import Model

router = APIRouter(tags=["operation"])
MOST_QUARANTINED = 10_000
"""More are not counted and not shown: something is then very wrong with a node."""
_SHOWN = 100


class QuarantinedRow(Model):
    """A record as it was sent (`content`, JSON), with why it was not booked; its span is unmetered."""

    cluster: str
    node: str
    epoch: str
    seq: int
    received_ms: int
    reason: str
    detail: str
    content: str


class QuarantineParams(Params):
    limit: int = Field(default=1_000, ge=1, le=MOST_QUARANTINED, description="Records, newest first.")


@router.get("/v1/check", summary="Recompute the books from the rows", responses=refuses("invalid-parameter"))
async def check(asked: Annotated[SpanParams, Query()], deps: Given, _: Administering) -> Balance:
    """Reads every row of the span; for an operator, not for a dashboard."""
    now, newest = deps.clock.wall_ms(), deps.newest_ms()
    start, end, zone = asked.span(now, deps.settings.timezone, deps.settings.limits, newest)

    def read() -> Balance:
        check_cost(deps.ledger, deps.settings.limits, start, end)
        found = deps.ledger.examine(start, end)
        books = deps.books.books()
        whole = deps.ledger.usage(start, end, ())
        return Balance(
            start_ms=start,
            end_ms=end,
            imbalance_gpu_us=found.total_us,
            differences=tuple(found.lines[:_SHOWN]),
            coverage=coverage(whole),
            capacity_gpu_us=sum(line.accounts_gpu_us.total for line in whole),
            quarantined_rows=len(deps.ledger.quarantined(MOST_QUARANTINED)),
            wal_bytes=deps.ledger.wal_bytes(),
            closed_months=len(books.closed),
            month_faults=tuple(faults(books)),
            note=asked.note(start, now, zone, newest, deps.silence_note()),
        )

    return await asyncio.to_thread(read)


@router.get("/v1/quarantine", summary="Records that were not booked", responses=refuses("invalid-parameter"))
async def quarantine(
    asked: Annotated[QuarantineParams, Query()], deps: Given, principal: Reading
) -> list[QuarantinedRow]:
    of_everyone(principal)
    found = await asyncio.to_thread(deps.ledger.quarantined, asked.limit)
    return [
        QuarantinedRow(
            cluster=row.cluster, node=row.node, epoch=row.epoch, seq=row.seq, received_ms=row.received_ms,
            reason=row.reason, detail=row.detail, content=row.content,
        )
        for row in found
    ]  # fmt: skip
