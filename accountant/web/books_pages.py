"""Serves the pages of the books: invoices of every month and team, the steps of a month, and the audit trail.

The forms close, publish and reopen a month and book credits, with the rights and refusals of the same requests of the
API; each leads to the act that it left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Final, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BeforeValidator, Field, ValidationError

from accountant.api.access_control import Admin, Reader, admit, check_form, check_teams, require_all_teams, team_filter
from accountant.api.bookkeeping_routes import list_periods
from accountant.api.closing_checklist import checklist
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.months_due import MonthsDue, month_unknown, months_due, shown_adjustment
from accountant.api.query_parameters import Params, edge, invalid
from accountant.billing.statements import invoice_number
from accountant.bookkeeping.corrections_and_adjustments import NewAdjustment
from accountant.bookkeeping.month_changes import MonthChanges, by_payer, together
from accountant.bookkeeping.month_closing import Objecting, Status, state_of
from accountant.core.periods import Month, local_date, utc
from accountant.exports.protocol import downloads
from accountant.ledger.journal import Act, ActKind
from accountant.web import month_and_decision_pages, page_queries
from accountant.web.month_and_decision_pages import TablesParams, sorting
from accountant.web.page_rows import Page, paged
from accountant.web.statement_detail_pages import WHAT
from accountant.wire.list_order import PageTables, TableSorting
from gputally.base import called_off
from gputally.base.money import plain
from gputally.base.untrusted_text import for_cell
from gputally.server.config_loading import fault_text
from gputally.server.tokens_and_grants import Principal

router = APIRouter(include_in_schema=False)
MONTHS_A_PAGE: Final = 13
ACTS_A_PAGE: Final = 100
_BLOCK: Final = 200
"""Acts that are read at once."""


@dataclass(frozen=True, slots=True)
class InvoiceRow:
    """The invoice of a team for a month. number: as in the files of charges. issued, payable_by: None for a draft."""

    month: str
    status: Status
    team: str
    number: str
    amount: Decimal
    currency: str
    issued: date | None
    payable_by: date | None


def due_of(deps: Deps, month: Month) -> MonthsDue:
    """`months_due`, kept until something changes it."""
    closed = deps.books.books().of(str(month)) is not None
    key = ("due", month, page_queries.books(deps))
    found: MonthsDue = deps.answers.ask(key, lambda: months_due(deps, month), (lambda: None) if closed else None).value
    return found


def empty_as_none(value: object) -> object:
    """A form sends an empty text for a field that is not filled in."""
    return None if value == "" else value


TABLES: Final = PageTables(
    {"invoices": {"team": lambda row: row.team, "number": lambda row: row.number, "amount": lambda row: row.amount}},
    frozenset({"team", "number"}),
)
"""The table of each month that can be sorted."""


class InvoicesParams(TablesParams):
    team: Annotated[str | None, BeforeValidator(empty_as_none)] = Field(default=None, max_length=253)
    page: int = Field(default=1, ge=1, le=10_000)


@router.get("/invoices")
def invoices(
    request: Request, params: Annotated[InvoicesParams, Query()], deps: AppDeps, principal: Reader
) -> Response:
    """The invoices, newest month first. A reader of some teams sees those of these teams."""
    months, of_month, order = _months(deps, principal, params)
    own = _query(team=params.team, sort=params.sort)
    shown = paged(months, params.page, MONTHS_A_PAGE, f"/invoices?{own}page=")
    rows = [(period, *of_month(Month.parse(period.month))) for period in shown.rows]
    teams = team_filter(principal, () if params.team is None else (params.team,)).get("team")
    return month_and_decision_pages.page(
        request, "/invoices", "invoices.html", deps, rows=rows, shown=shown, params=params,
        everyone=principal.teams is None, unpriced=lambda due: sum(
            gpu_us for team, gpu_us in due.unpriced.items() if teams is None or team in teams
        ), files=downloads(),
        csv=f"/invoices.csv?{own}", order=order,
    )  # fmt: skip


@router.get("/invoices.csv")
def invoices_file(
    request: Request, params: Annotated[InvoicesParams, Query()], deps: AppDeps, principal: Reader
) -> Response:
    """The same invoices of all months."""
    months, of_month, _ = _months(deps, principal, params)
    heads = ["month", "status", "team", "number", "amount", "currency", "issued", "payable_by"]
    rows = [
        [
            row.month,
            row.status,
            for_cell(row.team),
            for_cell(row.number),
            plain(row.amount),
            row.currency,
            *("" if day is None else day.isoformat() for day in (row.issued, row.payable_by)),
        ]
        for period in months
        for row in of_month(Month.parse(period.month))[1]
    ]
    return month_and_decision_pages.csv_file(request, "invoices", heads, rows)


def _months(
    deps: Deps, principal: Principal, params: InvoicesParams
) -> tuple[Sequence[Any], Callable[[Month], Any], TableSorting]:
    """The months, newest first, what returns the amounts of one with its invoices in their order, and this order."""
    order = sorting(TABLES, params, "/invoices", team=params.team)
    wanted = () if params.team is None else (params.team,)
    teams = team_filter(principal, wanted).get("team")
    check_teams(deps, principal, wanted)
    newest_first = list_periods(deps, principal)[::-1]

    def of_month(month: Month) -> tuple[MonthsDue, list[InvoiceRow]]:
        found, status, closed = due_of(deps, month), deps.books.status(month), deps.books.books().of(str(month))
        issued = None if closed is None else local_date(closed.at_ms, deps.settings.zone)
        payable_by = deps.settings.issuer.payable_by(issued)
        rows = [
            InvoiceRow(
                str(month), status, team, invoice_number(month, team), amount, found.currency or "", issued, payable_by
            )
            for team, amount in found.due
            if teams is None or team in teams
        ]
        return found, list(order.rows("invoices", rows))

    return newest_first, of_month, order


def _query(**values: object) -> str:
    given = {name: value for name, value in values.items() if value not in (None, "")}
    return urlencode(given) + "&" if given else ""


class StepsParams(Params):
    """since: the month is compared with its newest draft at this instant or before; None: with the newest one.

    team, amount, approved_by, reason: of a credit or charge that is shown and not booked; without a team: none is."""

    since: Annotated[str | None, BeforeValidator(empty_as_none)] = Field(default=None, max_length=64)
    team: str = Field(default="", max_length=253)
    amount: str = Field(default="", max_length=40)
    approved_by: str = Field(default="", max_length=253)
    reason: str = Field(default="", max_length=1_000)


@router.get("/invoices/{month}")
def steps(
    request: Request, month: str, params: Annotated[StepsParams, Query()], deps: AppDeps, principal: Reader
) -> Response:
    """The state of a month's invoices: what objects to closing it, what changed, and the forms of the next steps."""
    require_all_teams(principal)
    calendar_month = month_and_decision_pages.month_of(deps, month)
    objections = deps.books.standing(calendar_month, deps.proposals())
    since_ms = None if params.since is None else edge("since", params.since, deps.settings.zone, deps.clock.wall_ms())
    status, book, drafts = deps.books.status(calendar_month), deps.book(), deps.books.drafts.of(calendar_month)
    due = due_of(deps, calendar_month)
    shown = None
    if params.team and principal.may("admin"):
        new = _adjustment(deps, principal, calendar_month, params.model_dump(exclude={"since"}))
        shown = shown_adjustment(deps, principal.actor, new, partial(due_of, deps))
    with deps.ledger.moment() as moment:
        acts = moment.acts(subject=str(calendar_month))
    changed = _changed(deps, calendar_month, since_ms) if drafts or since_ms is not None else None
    billed, unbilled = by_payer(changed.teams if changed else ())
    return month_and_decision_pages.page(
        request, "/invoices", "invoice_steps.html", deps, month=calendar_month,
        status=status, due=due, objections=objections,
        checks=() if status in ("closed", "published") else checklist(deps, calendar_month, objections, due),
        state=state_of(status, month_unknown(deps, calendar_month), len(objections)),
        may=principal.may("admin"), forms=month_and_decision_pages.takes_forms(request, deps),
        params=params, shown=shown, files=downloads(), number=invoice_number,
        drafts=drafts, changed=changed, billed=billed, unbilled=unbilled, together=together(billed),
        acts=[(act, WHAT[act.kind]) for act in reversed(acts)],
        over=calendar_month.span(deps.settings.zone)[1] <= deps.clock.wall_ms(), currency=book.currency if book else "",
        is_last=deps.books.books().latest is not None and deps.books.books().closed[-1].month == str(calendar_month),
    )  # fmt: skip


def _changed(deps: Deps, month: Month, since_ms: int | None) -> MonthChanges:
    """What changed the month since a draft: up to four statements of it, kept like its amounts."""
    closed = deps.books.kept(month) is not None
    key = ("changes", month, since_ms, page_queries.books(deps))
    found: MonthChanges = deps.answers.ask(
        key, lambda: deps.books.drafts.changes(month, since_ms), (lambda: None) if closed else None
    ).value
    return found


_OBJECTIONS: Final = frozenset(get_args(Objecting))


@router.post("/invoices/{month}")
async def step(request: Request, month: str, deps: AppDeps) -> Response:
    """Closes, publishes or reopens the month, or books a credit or charge, as the form says, and leads to the act; or
    keeps a draft, and leads to what changed since."""
    principal = await admit(request, deps, "admin", form=True)
    fields = await month_and_decision_pages.read_form(request)
    check_form(request, fields.pop("form_token", ""))
    calendar_month, reason, who = (
        month_and_decision_pages.month_of(deps, month),
        fields.get("reason", "")[:1000],
        principal.actor,
    )
    last = deps.ledger.status().last_act

    def done() -> str:
        match fields.get("step"):
            case "close":
                deps.books.close(calendar_month, who, reason, [kind for kind in fields if kind in _OBJECTIONS])
            case "publish":
                deps.books.publish(calendar_month, who, reason)
            case "reopen":
                deps.books.reopen(calendar_month, who, reason)
            case "draft":
                deps.books.drafts.keep(calendar_month, who, reason)
                return f"/invoices/{calendar_month}#changed"
            case "adjust":
                deps.books.credits.adjust(_adjustment(deps, principal, calendar_month, fields), who)
            case _:
                raise invalid("step", "a form closes, publishes or reopens a month, keeps a draft, or books a credit")

        with deps.ledger.moment() as moment:
            left = [act for act in moment.acts(after=last, limit=100) if act.who == who]
        return f"/act/{left[-1].number}" if left else f"/invoices/{calendar_month}"

    async with deps.turns.turn("acts", request, who):
        return RedirectResponse(await asyncio.to_thread(done), 303)


def _adjustment(deps: Deps, principal: Principal, month: Month, fields: Mapping[str, str]) -> NewAdjustment:
    try:
        new = NewAdjustment.model_validate(
            {"month": str(month)} | {name: fields.get(name, "") for name in ("team", "amount", "reason", "approved_by")}
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise invalid(".".join(map(str, first["loc"])) or "form", fault_text(first)) from error
    check_teams(deps, principal, (new.team,), "books-refuse")
    return new


class AuditPageParams(Params):
    """The parameters of the page. kind: of the acts; who: the caller; subject: what they concern; search: part of
    subject, reason or caller; start, end: when."""

    kind: Annotated[ActKind | None, BeforeValidator(empty_as_none)] = None
    who: str = Field(default="", max_length=253)
    subject: str = Field(default="", max_length=1_000)
    search: str = Field(default="", max_length=253)
    start: str = Field(default="", max_length=64)
    end: str = Field(default="", max_length=64)
    page: int = Field(default=1, ge=1, le=100_000)


@router.get("/audit")
def audit(request: Request, params: Annotated[AuditPageParams, Query()], deps: AppDeps, _: Admin) -> Response:
    """The acts, newest first."""
    acts = _acts(deps, params)
    query = _query(**params.model_dump(exclude_defaults=True, exclude={"page"}))
    shown: Page[Act] = paged(acts, params.page, ACTS_A_PAGE, f"/audit?{query}page=")
    return month_and_decision_pages.page(
        request, "/audit", "audit.html", deps, shown=shown, params=params, kinds=get_args(ActKind), what=WHAT,
        csv=f"/audit.csv?{query}", filtered=bool(query),
    )  # fmt: skip


@router.get("/audit.csv")
def audit_file(request: Request, params: Annotated[AuditPageParams, Query()], deps: AppDeps, _: Admin) -> Response:
    """The same acts on all pages, with their digests."""
    heads = ["number", "at", "kind", "who", "subject", "reason", "digest"]
    rows = [
        [act.number, utc(act.at_ms), act.kind, *map(for_cell, (act.who, act.subject, act.reason)), act.digest]
        for act in _acts(deps, params)
    ]
    return month_and_decision_pages.csv_file(request, "audit", heads, rows)


def _acts(deps: Deps, params: AuditPageParams) -> list[Act]:
    """The acts that match, newest first, without their contents, which may be large."""
    now, zone = deps.clock.wall_ms(), deps.settings.zone
    start = edge("start", params.start, zone, now) if params.start else None
    end = edge("end", params.end, zone, now) if params.end else None
    wanted = params.search.casefold()
    kinds = [params.kind] if params.kind else []
    found: list[Act] = []
    after: int | None = 0
    with deps.ledger.moment() as moment:
        while after is not None:
            called_off.check()
            block = moment.acts(*kinds, subject=params.subject or None, after=after, limit=_BLOCK)
            found += [
                replace(act, content="")
                for act in block
                if params.who in ("", act.who)
                and (start is None or act.at_ms >= start)
                and (end is None or act.at_ms < end)
                and any(wanted in text.casefold() for text in (act.subject, act.reason, act.who))
            ]
            after = block[-1].number if len(block) == _BLOCK else None
    return found[::-1]
