"""GET /v1/audit: every administrative act, oldest first, with the proof that none was taken out."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from accountant.api.access import Administering
from accountant.api.deps import Given
from accountant.api.openapi import refuses
from accountant.api.params import Params
from accountant.journal import FIRST_DIGEST, broken_at
from accountant.wire import Model

router = APIRouter(tags=["operation"])
MOST_ACTS = 10_000


class AuditedAct(Model):
    """digest: SHA-256 over the previous entry's digest and this entry."""

    number: int
    at_ms: int
    who: str
    kind: str
    subject: str
    reason: str
    digest: str


class AuditTrail(Model):
    """broken_at: the first entry of this page that is missing or not what was written. next_after: ask for
    more with it; null at the end."""

    acts: tuple[AuditedAct, ...]
    broken_at: int | None
    next_after: int | None


class AuditParams(Params):
    after: int = Field(default=0, ge=0, le=2**62, description="Number of the last entry that is known.")
    limit: int = Field(default=1_000, ge=1, le=MOST_ACTS, description="Entries, oldest first.")


@router.get("/v1/audit", summary="Administrative acts", responses=refuses("invalid-parameter"))
async def audit(asked: Annotated[AuditParams, Query()], deps: Given, _: Administering) -> AuditTrail:
    # One entry before the page, so that the page is held against it.
    found = await asyncio.to_thread(deps.ledger.trail, max(0, asked.after - 1), asked.limit + 1 + (asked.after > 0))
    if asked.after:
        before, page = found[:1], found[1:]
        number, digest = (before[0].number, before[0].digest) if before else (0, FIRST_DIGEST)
    else:
        number, digest, page = 0, FIRST_DIGEST, found
    shown = page[: asked.limit]
    return AuditTrail(
        acts=tuple(
            AuditedAct(
                number=act.number, at_ms=act.at_ms, who=act.who, kind=act.kind, subject=act.subject, reason=act.reason,
                digest=act.digest,
            )
            for act in shown
        ),
        broken_at=broken_at(shown, number, digest),
        next_after=shown[-1].number if len(page) > asked.limit else None,
    )  # fmt: skip
