"""`/decisions`: what the controller decided, newest first, and a page for each that tells why in words and numbers."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from accountant.api.access import Reading, of_everyone
from accountant.api.conditional import tagged
from accountant.api.deps import Given
from accountant.api.params import Params
from accountant.api.problems import Refusal
from accountant.web import pages, reasons
from accountant.web.asking import records
from accountant.wire import Decision
from agent.units import MS_PER_DAY

router = APIRouter(include_in_schema=False)
SHOWN = 200
LOOKED_AT = 10_000
"""Decisions of the span that a choice is made from, newest first."""


class DecisionsParams(Params):
    """subject: a queue or a workload, by its whole name."""

    kind: Literal["weight", "preemption", "hold"] | None = None
    subject: str | None = Field(default=None, max_length=500)
    days: int = Field(default=31, ge=1, le=366)


def address(decision: Decision) -> str:
    """Of its page: the instant leads to the cycle, the id to the one."""
    return f"/decisions/{decision.at_ms}/{quote(decision.id, safe='/')}"


@router.get("/decisions")
async def listed(
    request: Request, asked: Annotated[DecisionsParams, Query()], deps: Given, principal: Reading
) -> Response:
    of_everyone(principal)
    at = deps.clock.wall_ms()

    def make() -> bytes:
        start = at - asked.days * MS_PER_DAY
        known = deps.ledger.decisions(start, at + 1, LOOKED_AT, kind=asked.kind, subject=asked.subject)
        found = [one for one in known if not reasons.is_record(one)]
        kinds = [(kind, _query(asked, kind)) for kind in (None, "weight", "preemption", "hold")]
        return pages.page(
            request, "/decisions", "decisions.html", deps, decisions=found[:SHOWN], asked=asked, address=address,
            more=max(0, len(found) - SHOWN), whole=len(known) == LOOKED_AT, kinds=kinds,
            shares=reasons.shares(records(deps.ledger, at), (asked.subject,)) if asked.subject else (),
        )  # fmt: skip

    return tagged(request, await asyncio.to_thread(make), pages.HTML)


@router.get("/decisions/{at_ms}/{id:path}")
async def one(request: Request, at_ms: int, id: str, deps: Given, principal: Reading) -> Response:
    of_everyone(principal)

    def make() -> bytes:
        cycle = deps.ledger.decisions(at_ms, at_ms + 1, LOOKED_AT) if 0 <= at_ms < 2**53 else []
        found = next((each for each in cycle if each.id == id), None)
        if found is None:
            raise Refusal("not-found", f"no decision {id[:200]!r} at that instant")
        return pages.page(
            request, "/decisions", "decision.html", deps, one=found, told=reasons.told(found, cycle), address=address
        )

    return tagged(request, await asyncio.to_thread(make), pages.HTML)


def _query(asked: DecisionsParams, kind: str | None) -> str:
    given = asked.model_dump(exclude_defaults=True) | {"kind": kind}
    return "/decisions?" + urlencode({name: value for name, value in given.items() if value is not None})
