"""The price book in force, all that ever were, and what another one would change."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field

from accountant.api.access import Administering, Reading
from accountant.api.deps import Deps, Given
from accountant.api.openapi import refuses, text_body
from accountant.api.params import MonthText, Params
from accountant.api.problems import Refusal
from accountant.books.repricing import PriceDiff, difference
from accountant.periods import Month
from accountant.prices.book import PriceBook
from accountant.pricing import BookVersion
from accountant.told import PriceVersion, Repriced
from accountant.yamlfile import validate
from agent.yamlfile import FileFault, parse

router = APIRouter(tags=["prices"])
_BODY = text_body("application/yaml", "A price book, as in a file")
_REFUSALS = refuses(
    "malformed-body",
    "too-large",
    "slow-body",
    "invalid-body",
    "invalid-parameter",
    "books-refuse",
    "ledger-unavailable",
)


class RepriceParams(Params):
    month: MonthText


class ApplyParams(RepriceParams):
    reason: str = Field(min_length=1, max_length=1000, description="Why, for whoever reads the books later.")


@router.get("/v1/prices", summary="The price book in force", responses=refuses("no-price-book"))
async def current(deps: Given, _: Reading) -> PriceBook:
    book = deps.book()
    if book is None:
        raise Refusal("no-price-book", "give one in the settings (prices: FILE)")
    return book


@router.get("/v1/prices/versions", summary="Every price book that was in force", responses=refuses())
async def versions(deps: Given, _: Reading) -> list[PriceVersion]:
    """Oldest first."""
    return [_version(found) for found in deps.books.prices.versions]


@router.post(
    "/v1/prices/preview",
    summary="What another price book would change about a month",
    openapi_extra={"requestBody": _BODY},
    responses=_REFUSALS,
)
async def preview(
    asked: Annotated[RepriceParams, Query()], request: Request, deps: Given, _: Administering
) -> PriceDiff:
    """Nothing is taken into force."""
    book = await _book(request, deps)
    return await asyncio.to_thread(_difference, deps, asked.month, book)


@router.post(
    "/v1/prices",
    summary="Take a price book into force",
    openapi_extra={"requestBody": _BODY},
    responses=_REFUSALS,
)
async def apply(
    asked: Annotated[ApplyParams, Query()], request: Request, deps: Given, principal: Administering
) -> Repriced:
    """For all open months; a closed `month` is corrected by it. The file takes over again when it changes."""
    book = await _book(request, deps)

    def act() -> Repriced:
        shown = _difference(deps, asked.month, book)
        booked = deps.books.reprice(Month.parse(asked.month), book, principal.name, asked.reason)
        return Repriced(difference=shown, corrections=len(booked))

    return await asyncio.to_thread(act)


def _difference(deps: Deps, month: str, book: PriceBook) -> PriceDiff:
    return difference(month, *deps.books.preview(Month.parse(month), book))


async def _book(request: Request, deps: Deps) -> PriceBook:
    async with deps.intake.body(request) as raw:
        try:
            return await asyncio.to_thread(lambda: validate(parse(raw.decode(), "body"), PriceBook))
        except UnicodeDecodeError as error:
            raise Refusal("malformed-body", "the body is not UTF-8 text") from error
        except FileFault as fault:
            lines = str(fault).splitlines()
            errors = [{"at": line.partition(": ")[0], "reason": line.partition(": ")[2]} for line in lines]
            raise Refusal("invalid-body", "; ".join(lines), errors=errors) from fault


def _version(found: BookVersion) -> PriceVersion:
    return PriceVersion(
        version=found.version, at_ms=found.at_ms, origin=found.origin, who=found.who, reason=found.reason,
        currency=found.book.currency, rows=len(found.book.rows),
    )  # fmt: skip
