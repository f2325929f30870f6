"""`/act/…`: one act of the books: who did what when and why, and the lines it booked.

A team lead sees the lines of the own teams, and no act that has none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from fastapi import APIRouter, Request, Response

from accountant.api.access import Reading
from accountant.api.conditional import tagged
from accountant.api.deps import Given
from accountant.api.problems import Refusal
from accountant.books.entries import ENTRIES
from accountant.journal import ActKind
from accountant.money import exact_sum
from accountant.web import pages
from accountant.web.addresses import booked

router = APIRouter(include_in_schema=False)
WHAT: Final[Mapping[ActKind, str]] = {
    "prices": "A price book came into force", "closed": "The month was closed",
    "reopened": "The month was opened again",
    "published": "The month was published", "repriced": "The month was priced again",
    "corrected": "Late facts were booked", "refused": "Late facts were refused",
    "adjusted": "A credit or charge was booked",
    "invoiced": "An invoice was kept", "policy": "A policy came into force", "pods": "Facts of pods were imported",
    "delivery": "A report was sent again", "imported": "History was imported",
    "retired": "GPUs were taken out of the capacity",
    "moved": "GPUs were given to another node",
    "redated": "What a clock that was ahead dated wrongly was healed",
}  # fmt: skip


@router.get("/act/{number}")
async def act(request: Request, number: int, deps: Given, principal: Reading) -> Response:
    def make() -> bytes:
        found = deps.ledger.trail(number - 1, 1) if 0 < number < 2**62 else []
        if not found or found[0].number != number:
            raise Refusal("not-found", f"the books have no act {number}")
        corrections, adjustments = booked(found[0])
        if principal.teams is not None:
            corrections = tuple(one for one in corrections if one.line.team in principal.teams)
            adjustments = tuple(one for one in adjustments if one.team in principal.teams)
            if not corrections and not adjustments:
                raise Refusal("forbidden", f"{principal.name!r} may see its own teams only")
        book = deps.book()
        return pages.page(
            request, "/month", "act.html", deps, act=found[0], what=WHAT[found[0].kind], corrections=corrections,
            adjustments=adjustments, currency=book.currency if book else None,
            month=found[0].kind in (*ENTRIES, "invoiced"),
            total=exact_sum([*(one.amount for one in corrections), *(one.amount for one in adjustments)]),
            everyone=principal.teams is None,
        )  # fmt: skip

    return tagged(request, await asyncio.to_thread(make), pages.HTML)
