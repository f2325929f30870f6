"""The provider's invoice against a month's books, and the rates by which they agree."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field, TypeAdapter

from accountant.api.access import Administering
from accountant.api.body import read_model
from accountant.api.deps import Given
from accountant.api.openapi import json_body, refuses
from accountant.api.params import MonthText, Params
from accountant.books.reconcile import Invoice
from accountant.periods import Month
from accountant.told import Reconciled

router = APIRouter(tags=["prices"])
_INVOICE = TypeAdapter(Invoice)


class TrueUpParams(Params):
    apply: bool = Field(default=False, description="Take the invoice's rates into force for the month.")
    keep: bool = Field(default=False, description="Keep the invoice with the books, for the page of the month.")
    reason: str = Field(default="", max_length=1000, description="Why, with `apply`.")


@router.post(
    "/v1/reconciliation/{month}",
    summary="An invoice against a month's books",
    openapi_extra={"requestBody": json_body("Invoice")},
    responses=refuses(
        "malformed-body", "too-large", "invalid-body", "invalid-parameter", "books-refuse", "ledger-unavailable"
    ),
)
async def reconcile(
    month: Annotated[MonthText, Path(description="A calendar month: 2026-10.")],
    asked: Annotated[TrueUpParams, Query()],
    request: Request,
    deps: Given,
    principal: Administering,
) -> Reconciled:
    """invoice = teams + idle + unmatched, line by line. With `apply`, the price rows of that month get the
    invoice's rates (an open month is priced by them, a closed one corrected) and the invoice is kept; with `keep`
    it is kept alone."""
    invoice = await read_model(deps.intake, request, _INVOICE)
    chosen = Month.parse(month)

    def act() -> Reconciled:
        before = deps.books.reconcile(chosen, invoice)
        if asked.keep and not asked.apply:
            deps.books.invoices.keep(chosen, invoice, principal.name, asked.reason)
        if not asked.apply:
            return Reconciled(before=before)
        book, corrections = deps.books.true_up(chosen, invoice, principal.name, asked.reason)
        after = deps.books.reconcile(chosen, invoice)
        return Reconciled(before=before, after=after, version=book.version, corrections=len(corrections))

    return await asyncio.to_thread(act)
