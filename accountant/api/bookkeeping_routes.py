"""Serves statements, reports and the bookkeeping: months, credits, adjustments, proposals, corrections, price books,
invoice reconciliations and the audit trail.

Statements and reports are made on request, the statement of a closed month from its stored bytes. They have an ETag of
their content, so that a client with the same content gets 304 instead. Proposals are late changes to closed months,
which an administrator accepts or refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import Field

from accountant.api.access_control import Admin, DocumentReader, Reader, body, check_teams, known_team_for
from accountant.api.bookkeeping_models import (
    AdjustmentPreview,
    BookedAdjustment,
    BookedCorrection,
    ChangeLine,
    ChangesAnswer,
    Credit,
    DraftLine,
    ObjectionLine,
    Period,
    PriceVersion,
    ProposalEffect,
    Reconciled,
    RepricingResult,
    SinceDraftLine,
    TeamCredit,
    WaitingProposal,
)
from accountant.api.closing_checklist import checklist
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.months_due import month_unknown, months_due, shown_adjustment
from accountant.api.problems import Refusal, answers, json_body, refuses, with_body
from accountant.api.query_parameters import (
    REPORT_WIDTH,
    ListedParams,
    MonthText,
    Params,
    SpanParams,
    asked,
    check_cost,
    edge,
    instant,
    invalid,
)
from accountant.billing.cost_allocation import statement
from accountant.billing.statements import Correction, canonical
from accountant.bookkeeping.corrections_and_adjustments import NewAdjustment, NodeSpan, Proposal, cluster_of
from accountant.bookkeeping.invoice_reconciliation import Invoice
from accountant.bookkeeping.month_closing import CannotClose, ClosedMonths, Objecting, state_of
from accountant.bookkeeping.price_book_versions import BookVersion, PriceDiff, difference
from accountant.core import periods
from accountant.core.periods import Month
from accountant.exports import rendering_process
from accountant.exports.format_field import FormatField
from accountant.exports.protocol import default_format, exports, file_name
from accountant.ledger.journal import FIRST_DIGEST, broken_at
from accountant.prices.price_book import PriceBook, Share
from accountant.reports import report_builder
from accountant.reports.statement_line_charges import ChargeListing
from accountant.wire.listed_tables import ADJUSTMENTS, CORRECTIONS, PRICES
from gputally.base.money import exact_sum
from gputally.base.yaml_file import FileFault, parse
from gputally.server.config_loading import Model, validate
from gputally.server.request_handling import tagged
from gputally.server.tokens_and_grants import Principal

MonthPath = Annotated[MonthText, Path(description="A calendar month: 2026-10.")]
_BOOK_REFUSALS = refuses(
    "malformed-body", "too-large", "invalid-body", "invalid-parameter", "books-refuse", "ledger-unavailable"
)

statement_router = APIRouter(tags=["statements"])


class StatementParams(SpanParams):
    """Parameters of a statement: a month, or start and end. Without either: the current month so far."""

    month: MonthText | None = None
    team: str | None = Field(default=None, max_length=253, description="One team instead of all.")


class ReportParams(StatementParams):
    format: FormatField = Field(default=default_format("html"), description="The file format.")


@dataclass(frozen=True, slots=True)
class StatementSpan:
    """The span [start_ms, end_ms) of a statement, in a time zone.

    month: the accountant's month of the span, which the current month fills only in part; None for other spans."""

    start_ms: int
    end_ms: int
    timezone: str
    month: Month | None = None


def statement_span(params: StatementParams, deps: Deps) -> StatementSpan:
    """The span that a request asks for; the current month ends now. Raises Refusal."""
    now = deps.clock.wall_ms()
    if params.month is None:
        span = params.span(now, deps.settings.timezone, deps.settings.limits, deps.newest_ms())
        if params.start is not None or params.end is not None:
            check_cost(deps.ledger, deps.settings.limits, span, REPORT_WIDTH)
        return StatementSpan(*span)
    if params.start is not None or params.end is not None:
        raise invalid("month", "give either month, or start and end, not both")
    name = params.timezone or deps.settings.timezone
    month = Month.parse(params.month)
    start, end = month.span(periods.zone(name))
    if start >= now:
        raise invalid("month", f"{params.month} has not begun: give an earlier month")
    return StatementSpan(start, min(end, now), name, month if name == deps.settings.timezone else None)


@statement_router.get(
    "/v1/statement",
    summary="A statement whose lines add up exactly",
    response_class=Response,
    responses=answers("Canonical JSON of the statement", "application/json")
    | refuses("not-found", "invalid-parameter", "ledger-unavailable"),
)
def month_statement(
    request: Request, params: Annotated[StatementParams, Query()], deps: AppDeps, principal: DocumentReader
) -> Response:
    """Returns the statement as canonical JSON: equal records, prices and policies give equal bytes. The ETag is its
    SHA-256."""
    span = statement_span(params, deps)
    team = known_team_for(deps, principal, params.team)
    teams = None if team is None else (team,)
    if span.month is not None:
        result = deps.books.month(span.month, teams)
    else:
        with deps.ledger.moment(span.start_ms, span.end_ms) as moment:
            result = statement(moment, deps.book(), span.start_ms, span.end_ms, span.timezone, teams=teams)
    return tagged(request, canonical(result), "application/json")


@statement_router.get(
    "/v1/report",
    summary="The report of a month or any span",
    response_class=Response,
    responses=answers("The report", *(export.media_type.partition(";")[0] for export in exports().values()))
    | refuses("not-found", "invalid-parameter", "cannot-render", "ledger-unavailable"),
)
def month_report(
    request: Request, params: Annotated[ReportParams, Query()], deps: AppDeps, principal: DocumentReader
) -> Response:
    """Returns the report as one self-contained page, or the same figures for printing, spreadsheets and programs. Equal
    records, prices and policies give equal bytes; the ETag is their SHA-256."""
    export = exports()[params.format]
    span = statement_span(params, deps)
    if export.charges and span.month is None:
        raise invalid(
            "format", f"{params.format} is only for a calendar month in {deps.settings.timezone}: give a month"
        )
    team = known_team_for(deps, principal, params.team)
    report = report_builder.report(
        deps.ledger, deps.books, span.start_ms, span.end_ms, span.timezone, month=span.month, team=team,
        listing=ChargeListing(deps.settings.issuer, deps.settings.exported_labels) if export.charges else None,
        invoiced_by=deps.settings.issuer if span.month is not None else None, watched=deps.settings.kubernetes.watched,
    )  # fmt: skip
    name = "" if export.inline else file_name(export.suffix, params.month, team)
    return tagged(request, rendering_process.render(params.format, report), export.media_type, name)


period_router = APIRouter(tags=["periods"])


class OptionalReason(Model):
    """The reason of an administrative act, for the audit trail."""

    reason: str = Field(default="", max_length=1000)


class Close(OptionalReason):
    """The request to close a month. acknowledge: kinds of objections to accept; this needs a reason."""

    acknowledge: tuple[Objecting, ...] = ()


@period_router.get("/v1/periods", summary="Every month, with its status", responses=refuses())
def list_periods(deps: AppDeps, _: Reader) -> list[Period]:
    """Lists the months, oldest first, from the first closed month, or the first with records, to the current month."""
    books, now = deps.books.books(), deps.clock.wall_ms()
    current = Month.of(now, deps.settings.zone)
    months = [Month.parse(closed.month) for closed in books.closed]
    open_month = (
        months[-1].next if months else Month.of(min(now, deps.ledger.status().extent[0] or now), deps.settings.zone)
    )
    while open_month <= current:
        months.append(open_month)
        open_month = open_month.next
    return [_period(deps, month, books) for month in months]


@period_router.get(
    "/v1/periods/{month}", summary="One month, with the objections to closing it", responses=_BOOK_REFUSALS
)
def read_period(month: MonthPath, deps: AppDeps, principal: DocumentReader) -> Period:
    """Returns a month. Of one that is open: what objects to closing it, and the checklist of what is still open or
    unknown."""
    of = Month.parse(month)
    found = _with_objections(deps, of)
    if principal.teams is not None or found.hash is not None:
        return found
    return found.model_copy(update={"checklist": checklist(deps, of, found.objections, months_due(deps, of))})


@period_router.post(
    "/v1/periods/{month}/close",
    summary="Close a month",
    **with_body(Close, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def close(month: MonthPath, request: Annotated[Close, body(Close)], deps: AppDeps, principal: Admin) -> Period:
    """Closes the month, so that its statement never changes. Records that arrive later become proposals for
    corrections."""
    deps.books.close(Month.parse(month), principal.actor, request.reason, request.acknowledge)
    return _with_objections(deps, Month.parse(month))


@period_router.post(
    "/v1/periods/{month}/reopen",
    summary="Reopen the newest closed month",
    **with_body(OptionalReason, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def reopen(
    month: MonthPath, request: Annotated[OptionalReason, body(OptionalReason)], deps: AppDeps, principal: Admin
) -> Period:
    """Reopens a month that is not published yet. A reason is required."""
    deps.books.reopen(Month.parse(month), principal.actor, request.reason)
    return _with_objections(deps, Month.parse(month))


@period_router.post(
    "/v1/periods/{month}/publish",
    summary="Publish a closed month",
    **with_body(OptionalReason, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def publish(
    month: MonthPath, request: Annotated[OptionalReason, body(OptionalReason)], deps: AppDeps, principal: Admin
) -> Period:
    """Publishes the month, which cannot be reopened afterwards."""
    deps.books.publish(Month.parse(month), principal.actor, request.reason)
    return _with_objections(deps, Month.parse(month))


@period_router.post(
    "/v1/periods/{month}/drafts",
    summary="Keep what an open month charges now",
    **with_body(OptionalReason, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def keep_draft(
    month: MonthPath, request: Annotated[OptionalReason, body(OptionalReason)], deps: AppDeps, principal: Admin
) -> DraftLine:
    """Keeps the amounts by team of the month's time up to the last whole hour, so that it can be told later what
    changed since. Keep one whenever you send a draft."""
    return DraftLine.of(deps.books.drafts.keep(Month.parse(month), principal.actor, request.reason))


class ChangesParams(Params):
    since: str | None = Field(
        default=None, max_length=64,
        description="The newest draft at this instant or before: 7d (ago), a date or RFC 3339. Default: the newest.",
    )  # fmt: skip


@period_router.get(
    "/v1/periods/{month}/changes", summary="What changed a month since its draft", responses=_BOOK_REFUSALS
)
def month_changes(
    month: MonthPath, params: Annotated[ChangesParams, Query()], deps: AppDeps, principal: DocumentReader
) -> ChangesAnswer:
    """Lists what changed the amounts of the caller's teams since a draft: late records, use since then, prices,
    corrections, credits and charges."""
    now, teams = deps.clock.wall_ms(), principal.teams
    since = None if params.since is None else edge("since", params.since, deps.settings.zone, now)
    found = deps.books.drafts.changes(Month.parse(month), since)
    return ChangesAnswer(
        month=found.month,
        since_ms=found.since_ms,
        currency=found.currency,
        draft=None if found.draft is None else DraftLine.of(found.draft, teams),
        changes=tuple(ChangeLine.from_object(one) for one in found.changes if _may_see(principal, one.team)),
        teams=tuple(SinceDraftLine.from_object(one) for one in found.teams if _may_see(principal, one.team)),
    )


def _period(deps: Deps, month: Month, books: ClosedMonths, objecting: int | None = None) -> Period:
    start, end = month.span(deps.settings.zone)
    closed, status = books.of(str(month)), deps.books.status(month, books)
    return Period(
        month=str(month),
        start_ms=start,
        end_ms=end,
        status=status,
        state=state_of(status, month_unknown(deps, month), objecting),
        hash=closed.hash if closed else None,
        closed_ms=closed.at_ms if closed else None,
        closed_by=closed.who if closed else None,
    )


def _with_objections(deps: Deps, month: Month) -> Period:
    objections = tuple(
        ObjectionLine.from_object(objection) for objection in deps.books.standing(month, deps.proposals())
    )
    found = _period(deps, month, deps.books.books(), len(objections))
    return found.model_copy(update={"objections": objections})


class BookedParams(ListedParams):
    booked_in: MonthText | None = None


@period_router.get("/v1/adjustments", summary="Approved credits and charges", responses=refuses("invalid-parameter"))
def adjustments(params: Annotated[BookedParams, Query()], deps: AppDeps, principal: Reader) -> list[BookedAdjustment]:
    """Lists the adjustments of the caller's teams, in the order of booking unless `sort` names another one."""
    booked = [
        BookedAdjustment.from_object(adjustment)
        for adjustment in deps.books.books().adjustments
        if params.booked_in in (None, adjustment.booked_in) and _may_see(principal, adjustment.team)
    ]
    return params.chosen(booked, ADJUSTMENTS)


@period_router.post(
    "/v1/adjustments",
    summary="Book an approved credit or charge",
    **with_body(NewAdjustment, "books-refuse", "ledger-unavailable"),
)
def book_adjustment(
    new: Annotated[NewAdjustment, body(NewAdjustment)], deps: AppDeps, principal: Admin
) -> BookedAdjustment:
    """Books the adjustment in the first open month. A person other than the caller has to approve it. The team must be
    one that a record, a queue or a namespace names, because its amount is due for ever."""
    check_teams(deps, principal, (new.team,), "books-refuse")
    return BookedAdjustment.from_object(deps.books.credits.adjust(new, principal.actor))


@period_router.post(
    "/v1/adjustments/preview",
    summary="Preview a credit or charge",
    **with_body(NewAdjustment, "books-refuse", "ledger-unavailable"),
)
def preview_adjustment(
    new: Annotated[NewAdjustment, body(NewAdjustment)], deps: AppDeps, principal: Admin
) -> AdjustmentPreview:
    """Returns what the adjustment would change in the month in which it would be booked, with the refusals of booking
    it."""
    check_teams(deps, principal, (new.team,), "books-refuse")
    shown = shown_adjustment(deps, principal.actor, new, partial(months_due, deps))
    booked = BookedAdjustment.from_object(shown.adjustment)
    return AdjustmentPreview(**booked.model_dump(), before=shown.before, after=shown.after)


@period_router.get("/v1/corrections", summary="Corrections of closed months", responses=refuses("invalid-parameter"))
def corrections(params: Annotated[BookedParams, Query()], deps: AppDeps, principal: Reader) -> list[BookedCorrection]:
    """Lists the corrections of the caller's teams, in the order of booking unless `sort` names another one."""
    booked = [
        correction_line(correction)
        for correction in deps.books.books().corrections
        if params.booked_in in (None, correction.booked_in) and _may_see(principal, correction.line.team)
    ]
    return params.chosen(booked, CORRECTIONS)


@period_router.post(
    "/v1/corrections", summary="Accept every proposal", responses=refuses("books-refuse", "ledger-unavailable")
)
def accept_all_proposals(deps: AppDeps, principal: Admin) -> list[BookedCorrection]:
    """Accepts all proposals for closed months; returns the new lines."""
    return [correction_line(correction) for correction in deps.books.correct(principal.actor)]


def _may_see(principal: Principal, team: str) -> bool:
    return principal.teams is None or team in principal.teams


def correction_line(correction: Correction) -> BookedCorrection:
    """The API form of a correction."""
    line = correction.line
    return BookedCorrection(
        month=correction.month, booked_in=correction.booked_in, reason=correction.reason, team=line.team,
        account=line.account, detail=line.detail, gpu_model=line.gpu_model, capacity_type=line.capacity_type,
        price_row=line.price_row, gpu_us=line.gpu_us, cost=line.cost, amount=correction.amount,
    )  # fmt: skip


class CreditedNode(Model):
    """The request to credit teams for a node over a span.

    start, end: instants as in query parameters, within one calendar month.
    cluster: required only if several clusters have a node of that name.
    share: the part of the billed amount to credit, 1 for all of it."""

    node: str = Field(min_length=1, max_length=253)
    start: str = Field(min_length=1, max_length=64)
    end: str = Field(min_length=1, max_length=64)
    cluster: str | None = Field(default=None, max_length=253)
    share: Share = Decimal(1)


class NewCredit(CreditedNode):
    reason: str = Field(min_length=1, max_length=800)
    approved_by: str = Field(min_length=1, max_length=253)


@period_router.post(
    "/v1/credits/preview",
    summary="Preview a credit for a node",
    **with_body(CreditedNode, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def preview_credit(request: Annotated[CreditedNode, body(CreditedNode)], deps: AppDeps) -> Credit:
    """Returns the amount that each team was billed for the node's GPUs in the span, and its credit. Down time is never
    billed, so it gives no credit."""
    span, book = _node_span(request, deps), deps.book()
    lines = tuple(TeamCredit.from_object(line) for line in deps.books.credits.preview(span))
    return Credit(
        cluster=span.cluster, node=span.node, start_ms=span.start_ms, end_ms=span.end_ms,
        currency=book.currency if book else None, lines=lines, amount=exact_sum(line.amount for line in lines),
    )  # fmt: skip


@period_router.post(
    "/v1/credits",
    summary="Book an approved credit for a node",
    **with_body(NewCredit, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def book_credit(new: Annotated[NewCredit, body(NewCredit)], deps: AppDeps, principal: Admin) -> list[BookedAdjustment]:
    """Books one adjustment per team in the first open month, for all teams or none. Each span of a node can be credited
    only once."""
    booked = deps.books.credits.credit(_node_span(new, deps), principal.actor, new.reason, new.approved_by)
    return [BookedAdjustment.from_object(adjustment) for adjustment in booked]


def _node_span(request: CreditedNode, deps: Deps) -> NodeSpan:
    zone, limits = deps.settings.zone, deps.settings.limits
    start, end, _ = asked(instant("start", request.start, zone), instant("end", request.end, zone), limits)
    if not request.share:
        raise invalid("share", "a share of 0 gives no credit: give a share above 0")
    cluster = request.cluster
    if cluster is None:
        try:
            cluster = cluster_of(deps.ledger, request.node, start, end)
        except ValueError as error:
            raise CannotClose(str(error)) from error
    return NodeSpan(cluster=cluster, node=request.node, start_ms=start, end_ms=end, share=request.share)


price_router = APIRouter(tags=["prices"])


class TrueUpParams(Params):
    apply: bool = Field(default=False, description="Put the rates of the invoice in force for the month.")
    keep: bool = Field(default=False, description="Store the invoice, so that the page of the month shows it.")
    reason: str = Field(
        default="", max_length=1000, description="Reason for the audit trail, used with `apply` or `keep`."
    )


@price_router.post(
    "/v1/reconciliation/{month}",
    summary="Compare an invoice with a month's bills",
    openapi_extra={"requestBody": json_body("Invoice")},
    responses=_BOOK_REFUSALS,
)
def reconcile(
    month: MonthPath,
    params: Annotated[TrueUpParams, Query()],
    invoice: Annotated[Invoice, body(Invoice)],
    deps: AppDeps,
    principal: Admin,
) -> Reconciled:
    """Compares an invoice with the ledger line by line: invoice = teams + idle + unmatched. With `apply`, the price
    rows of that month get the rates of the invoice, which is stored. An open month then has these prices, and a closed
    one is corrected. With `keep`, the invoice is only stored."""
    calendar_month = Month.parse(month)
    before = deps.books.invoices.reconcile(calendar_month, invoice)
    if params.keep and not params.apply:
        deps.books.invoices.keep(calendar_month, invoice, principal.actor, params.reason)
    if not params.apply:
        return Reconciled(before=before)
    book, corrections = deps.books.true_up(calendar_month, invoice, principal.actor, params.reason)
    after = deps.books.invoices.reconcile(calendar_month, invoice)
    return Reconciled(before=before, after=after, version=book.version, corrections=len(corrections))


_BODY = {
    "required": True,
    "description": "A price book, as in a file",
    "content": {"application/yaml": {"schema": {"type": "string"}}},
}
_PRICE_REFUSALS = refuses(
    "malformed-body",
    "too-large",
    "slow-body",
    "invalid-body",
    "invalid-parameter",
    "books-refuse",
    "ledger-unavailable",
)


async def _sent_book(request: Request, deps: AppDeps, principal: Admin) -> AsyncIterator[PriceBook]:
    """The price book in the body of the request, and a turn for the act. Raises Refusal."""
    async with deps.intake.body(request) as raw:
        try:
            book = await asyncio.to_thread(lambda: validate(parse(raw.decode(), "body"), PriceBook))
        except UnicodeDecodeError as error:
            raise Refusal(
                "malformed-body", "the body is not UTF-8 text: send the price book as YAML in UTF-8"
            ) from error
        except FileFault as fault:
            lines = str(fault).splitlines()
            errors = [{"at": line.partition(": ")[0], "reason": line.partition(": ")[2]} for line in lines]
            raise Refusal("invalid-body", "; ".join(lines), errors=errors) from fault
    async with deps.turns.turn("acts", request, principal.actor):
        yield book


SentBook = Annotated[PriceBook, Depends(_sent_book, scope="function")]


class RepriceParams(Params):
    month: MonthText


class ApplyParams(RepriceParams):
    reason: str = Field(min_length=1, max_length=1000, description="Reason for the audit trail.")


@price_router.get("/v1/prices", summary="The price book in force", responses=refuses("no-price-book"))
def current_prices(deps: AppDeps, principal: Reader) -> PriceBook:
    """Returns the price book. A caller with some teams does not see the commitments of other teams and their rates."""
    book = deps.book()
    if book is None:
        raise Refusal("no-price-book", "this accountant has no price book: set `prices: FILE` in its settings")
    return book.shown_to(principal.teams)


@price_router.get(
    "/v1/prices/versions", summary="Every price book that was in force", responses=refuses("invalid-parameter")
)
def price_versions(params: Annotated[ListedParams, Query()], deps: AppDeps, _: Reader) -> list[PriceVersion]:
    """Lists the price books, oldest first unless `sort` names another order."""
    return params.chosen([_price_version(version) for version in deps.books.prices.versions], PRICES)


@price_router.post(
    "/v1/prices/preview",
    summary="Preview a month under another price book",
    openapi_extra={"requestBody": _BODY},
    responses=_PRICE_REFUSALS,
)
def preview_prices(
    params: Annotated[RepriceParams, Query()], book: SentBook, deps: AppDeps, principal: Admin
) -> PriceDiff:
    """Returns how the month's bills would differ. The price book is not put in force."""
    return _price_changes(deps, principal, params.month, book)


@price_router.post(
    "/v1/prices",
    summary="Put a price book in force",
    openapi_extra={"requestBody": _BODY},
    responses=_PRICE_REFUSALS,
)
def apply_prices(
    params: Annotated[ApplyParams, Query()], book: SentBook, deps: AppDeps, principal: Admin
) -> RepricingResult:
    """Puts the price book in force for all open months, and corrects `month` if it is closed. If the price file changes
    later, the file is in force again."""
    changes = _price_changes(deps, principal, params.month, book)
    booked = deps.books.reprice(Month.parse(params.month), book, principal.actor, params.reason)
    return RepricingResult(difference=changes, corrections=len(booked))


def _price_changes(deps: Deps, principal: Principal, month: str, book: PriceBook) -> PriceDiff:
    check_teams(deps, principal, {commitment.owner for commitment in book.commitments}, "books-refuse")
    return difference(month, *deps.books.preview(Month.parse(month), book))


def _price_version(version: BookVersion) -> PriceVersion:
    return PriceVersion(
        version=version.version, at_ms=version.at_ms, origin=version.origin, who=version.who, reason=version.reason,
        currency=version.book.currency, rows=len(version.book.rows),
    )  # fmt: skip


audit_router = APIRouter(tags=["operation"])
MOST_ACTS = 10_000


class AuditedAct(Model):
    """One entry of the audit trail. digest: SHA-256 of the previous entry's digest and this entry."""

    number: int
    at_ms: int
    who: str
    kind: str
    subject: str
    reason: str
    digest: str


class AuditTrail(Model):
    """One page of the audit trail.

    broken_at: number of the first entry of this page that is missing or was changed; null if there is none.
    next_after: pass it as `after` for the next page; null at the end."""

    acts: tuple[AuditedAct, ...]
    broken_at: int | None
    next_after: int | None


class AuditParams(Params):
    after: int = Field(default=0, ge=0, le=2**62, description="Only entries with a higher number.")
    limit: int = Field(default=1_000, ge=1, le=MOST_ACTS, description="Entries of one page, oldest first.")


@audit_router.get("/v1/audit", summary="Administrative acts", responses=refuses("invalid-parameter"))
def audit(params: Annotated[AuditParams, Query()], deps: AppDeps, _: Admin) -> AuditTrail:
    # One entry before the page, to check that the page continues it.
    with deps.ledger.moment() as moment:
        acts = moment.acts(after=max(0, params.after - 1), limit=params.limit + 1 + (params.after > 0))
    if params.after:
        before, page = acts[:1], acts[1:]
        number, digest = (before[0].number, before[0].digest) if before else (0, FIRST_DIGEST)
    else:
        number, digest, page = 0, FIRST_DIGEST, acts
    listed = page[: params.limit]
    return AuditTrail(
        acts=tuple(AuditedAct.from_object(act) for act in listed),
        broken_at=broken_at(listed, number, digest),
        next_after=listed[-1].number if len(page) > params.limit else None,
    )  # fmt: skip


ClosedMonthPath = Annotated[MonthText, Path(description="A closed month: 2026-10.")]
ProposalId = Annotated[
    str, Path(pattern="^[0-9a-f]{16}$", description="The `id` of the proposal, which changes with its lines.")
]


class RefuseReason(Model):
    """Why a proposal is refused, for the audit trail."""

    reason: str = Field(min_length=1, max_length=1000)


@period_router.get(
    "/v1/proposals", summary="Late changes of closed months that wait for a decision", responses=refuses()
)
def proposals(deps: AppDeps, principal: DocumentReader) -> list[WaitingProposal]:
    """Lists the proposals of the caller's teams, oldest month first. They are booked only when an administrator accepts
    them."""
    return _waiting_proposals(deps, principal, deps.proposals())


@period_router.get(
    "/v1/periods/{month}/proposals", summary="Late changes of one closed month", responses=refuses("invalid-parameter")
)
def month_proposals(month: ClosedMonthPath, deps: AppDeps, principal: DocumentReader) -> list[WaitingProposal]:
    """Returns at most one proposal. When more records arrive, they become part of it and its id changes."""
    return _waiting_proposals(deps, principal, deps.proposals(Month.parse(month)))


@period_router.post(
    "/v1/periods/{month}/proposals/{proposal}/take",
    summary="Accept a proposal",
    **with_body(OptionalReason, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def accept_proposal(
    month: ClosedMonthPath,
    proposal: ProposalId,
    request: Annotated[OptionalReason, body(OptionalReason)],
    deps: AppDeps,
    principal: Admin,
) -> list[BookedCorrection]:
    """Books the proposal as corrections in the first open month. If more records have arrived since the proposal was
    listed, the request is refused."""
    booked = deps.books.accept(Month.parse(month), proposal, principal.actor, request.reason)
    return [correction_line(correction) for correction in booked]


@period_router.post(
    "/v1/periods/{month}/proposals/{proposal}/refuse",
    summary="Refuse a proposal",
    **with_body(RefuseReason, "invalid-parameter", "books-refuse", "ledger-unavailable"),
)
def refuse_proposal(
    month: ClosedMonthPath,
    proposal: ProposalId,
    request: Annotated[RefuseReason, body(RefuseReason)],
    deps: AppDeps,
    principal: Admin,
) -> WaitingProposal:
    """Refuses the proposal: the month does not change, and the same changes are not proposed again."""
    refused = deps.books.refuse(Month.parse(month), proposal, principal.actor, request.reason)
    return _waiting_proposals(deps, principal, [refused])[0]


def _waiting_proposals(deps: Deps, principal: Principal, proposals: list[Proposal]) -> list[WaitingProposal]:
    book = deps.book()
    waiting = []
    for proposal in proposals:
        effects = proposal.effects(principal.teams)
        if effects:
            waiting.append(
                WaitingProposal(
                    month=proposal.month, booked_in=proposal.booked_in, id=proposal.id,
                    currency=book.currency if book else None,
                    effects=tuple(ProposalEffect.from_object(effect) for effect in effects),
                )
            )  # fmt: skip
    return waiting
