"""Serves the home, month, team, prices, coverage, decisions, late-change proposal and sign-in pages.

Names come from users, so all text passes jinja2's autoescape. There is no external content, and the one script is
Explore's. The month and team pages are the HTML report with the navigation on top."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from functools import cache
from http import HTTPStatus
from importlib import resources
from typing import Annotated, Any, Final
from urllib.parse import parse_qs, quote, urlencode
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from jinja2 import Environment
from pydantic import Field
from starlette.exceptions import HTTPException

from accountant.api.access_control import Reader, admit, known_team_for, limit_address_rate, require_all_teams, team_for
from accountant.api.answer_cache import CachedAnswer
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.months_due import month_unknown
from accountant.api.problems import Refusal, answer, retry_later
from accountant.api.query_parameters import Params, explored, explored_month, invalid
from accountant.billing.statements import Adjustment, Correction, invoice_number
from accountant.bookkeeping.month_closing import Status
from accountant.core import periods
from accountant.core.periods import Month
from accountant.core.record_age import is_old
from accountant.exports.protocol import CSV, downloads, file_name
from accountant.ledger.protocols import Hole, JobKey, Moment, Quarantined, policy_at
from accountant.reports import charts, figure_formatting, html_page, report_builder
from accountant.reports.figure_formatting import silent_clusters
from accountant.web import home, page_queries, page_rows
from accountant.web.list_bar import group_address, group_link, title
from accountant.web.page_queries import records
from accountant.web.page_rows import adjusting, correcting, to_lines
from accountant.wire import decision_text
from accountant.wire.list_order import UNSORTED, PageTables, TableSorting
from accountant.wire.policy_models import Decision, DecisionKind
from accountant.wire.usage_cost_and_job_models import Dimension, label_dimension
from gputally.base.money import exact_sum
from gputally.base.near_names import joined_names
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_SECOND
from gputally.server import page_layout
from gputally.server.menu import Menu, Program, menu, site
from gputally.server.page_layout import HTML, STYLE
from gputally.server.request_handling import read_body, static_routes, tagged
from gputally.server.sign_in import Kind, Person, SignInService, sign_in_routes, to_sign_in

router = APIRouter(include_in_schema=False)
_SHOWN_QUARANTINED = 100
_SHOWN_NODES = 200
_SEARCHED_NODES = 50
"""Nodes of which the page of coverage says when they lack records."""
_SHOWN_SPANS = 100
_SHOWN_VERSIONS = 50
_MOST_FORM_BYTES = 10_000
_FORM_S = 10.0
"""Time within which a form must arrive."""


@dataclass(frozen=True, slots=True)
class StaleLedger:
    """A ledger, or a cluster of it, whose newest record is too old to describe the present.

    age: the age of the record as text.
    cluster: the cluster that stopped reporting while others continue; "" if all records are old."""

    newest_ms: int
    age: str
    cluster: str = ""


class TablesParams(Params):
    """sort: the order of one of the page's tables (accountant.wire.list_order)."""

    sort: str = Field(default="", max_length=100)


class MonthParams(TablesParams):
    month: str | None = None


class CoverageParams(Params):
    """month: None for the present one."""

    month: str | None = Field(default=None, max_length=7)


@router.get("/")
def overview(request: Request, params: Annotated[TablesParams, Query()], deps: AppDeps, principal: Reader) -> Response:
    if principal.teams is not None:
        return RedirectResponse("/team/" + quote(team_for(principal, min(principal.teams)) or "", safe=""), 303)
    at, timezone = deps.clock.wall_ms(), deps.settings.timezone
    now = page_queries.current_demand(deps)
    use = now.value.held
    newest_ms = deps.newest_ms()
    title = "Where the capacity is now" if not is_old(newest_ms, at) else "Where the capacity was"
    answer = page_queries.month_so_far(deps, Month.of(at - 1, periods.zone(timezone)))
    so_far = answer.value
    past = page_queries.home_of(deps, (use.start_ms, use.end_ms)).value
    return page(
        request,
        "/",
        "overview.html",
        deps,
        now=use,
        now_as_of_ms=now.as_of_ms,
        demand=now.value.demand,
        linked=group_link,
        waiting=now.value.demand.waiting,
        any_records=deps.newest_ms() > 0,
        proposals=len(deps.books.waiting),
        failing=sorted(deps.tasks.faults()) if deps.tasks is not None else (),
        bar=charts.accounts(use.accounts, title),
        order=sorting(home.TABLES, params, "/"),
        so_far=so_far,
        past=past,
        costs=home.cost_svg(past.costs, past.currency, "Cost of each day") if past.costs and past.currency else "",
        needs=_needs(deps, so_far, past, at),
        as_of_ms=answer.as_of_ms,
        lines=to_lines(so_far.month, None),
        quarter_us=(use.end_ms - use.start_ms) * 1000,
        idle_now="/jobs?" + urlencode(page_queries.IDLE_NOW, safe=",:"),
        idle_jobs=explored(
            {
                "start": periods.utc(use.start_ms),
                "end": periods.utc(use.end_ms),
                "by": "cluster,namespace,job",
                "sort": "allocated_idle:desc",
                "columns": "allocated_idle,allocated,utilisation",
            }
        ),
    )


def sorting(tables: PageTables, params: TablesParams, path: str, **given: object) -> TableSorting:
    """The order of a page's tables. given: the other parameters of its address. Raises Refusal."""
    try:
        return tables.sorting(params.sort, path, **given)
    except ValueError as error:
        raise invalid("sort", str(error)) from error


def _needs(deps: Deps, so_far: page_rows.MonthSoFar, past: home.Home, at_ms: int) -> list[tuple[str, str]]:
    """What needs a decision, with the page that helps: (text, URL)."""
    found = []
    before = so_far.month.previous
    if page_queries.recorded_of(deps, before) and deps.books.status(before) == "due":
        found.append((f"{before} is over and not closed", f"/month/{before}"))
    if waiting := len(deps.books.waiting):
        months = f"{waiting} closed month{'s' if waiting != 1 else ''}"
        found.append((f"late records of {months} wait to be booked", "/proposals"))
    for state in past.budgets:
        if state.threshold is not None and state.ratio is not None:
            place = f"/team/{quote(state.team, safe='')}" if state.team else f"/month/{so_far.month}"
            found.append((f"budget {state.name} is spent to {figure_formatting.percent(state.ratio)}", place))
    if so_far.unpriced_us:
        hours = figure_formatting.hours(so_far.unpriced_us, 0)
        found.append((f"{hours} GPU-hours of {so_far.month} have no price", "/prices"))
    nodes = page_queries.machines(deps, page_queries.recent_nodes(deps)).value.nodes
    if down := sum(1 for node in nodes if node.down):
        found.append((f"{down} node{'s are' if down != 1 else ' is'} down", "/nodes?sort=down"))
    quiet = sum(1 for node in nodes if not node.down and node.is_silent(at_ms))
    if quiet:
        found.append((f"{quiet} node{'s are' if quiet != 1 else ' is'} silent", "/nodes?sort=silent"))
    if broken := [node.name for node in nodes if node.needs]:
        found.append((f"a GPU needs a reset or a drained node on {joined_names(broken)}", "/nodes?sort=errors"))
    if older := [node.name for node in nodes if node.has_older_agent]:
        found.append((f"the agent is older than the accountant on {joined_names(older)}", "/nodes?sort=agent"))
    return found


@router.get("/month")
def this_month(deps: AppDeps, principal: Reader) -> Response:
    """Redirects to the newest month with records; a caller of some teams to the month of its first team."""
    zone = periods.zone(deps.settings.timezone)
    if principal.teams is not None:
        return RedirectResponse("/team/" + quote(min(principal.teams, default=""), safe=""), 303)
    return RedirectResponse(f"/month/{periods.month_with_records(deps.clock.wall_ms(), deps.newest_ms(), zone)}", 303)


@router.get("/month/{month}")
def month_page(
    request: Request, month: str, params: Annotated[TablesParams, Query()], deps: AppDeps, principal: Reader
) -> Response:
    require_all_teams(principal)
    order = sorting(html_page.TABLES, params, f"/month/{quote(month, safe='')}")
    return _report(request, deps, month, None, order)


@router.get("/team/{team:path}")
def team_page(
    request: Request, team: str, params: Annotated[MonthParams, Query()], deps: AppDeps, principal: Reader
) -> Response:
    zone = periods.zone(deps.settings.timezone)
    month = params.month or str(periods.month_with_records(deps.clock.wall_ms(), deps.newest_ms(), zone))
    order = sorting(html_page.TABLES, params, f"/team/{quote(team, safe='')}", month=month)
    return _report(request, deps, month, known_team_for(deps, principal, team), order)


@router.get("/prices")
def prices_page(request: Request, deps: AppDeps, principal: Reader) -> Response:
    book = deps.book()
    at = deps.clock.wall_ms()
    shown = frozenset(row.id for row in book.shown_to(principal.teams).rows) if book is not None else frozenset()
    rows = tuple(price for price in book.prices if price.row.id in shown) if book is not None else ()
    in_force = {price.id for price in rows if price.is_valid(at)}
    return page(
        request, "/prices", "prices.html", deps, book=book, rows=rows, in_force=in_force,
        versions=deps.books.prices.versions[-_SHOWN_VERSIONS:][::-1] if principal.teams is None else (),
    )  # fmt: skip


@router.get("/coverage")
def coverage_page(
    request: Request, params: Annotated[CoverageParams, Query()], deps: AppDeps, principal: Reader
) -> Response:
    require_all_teams(principal)
    at, zone = deps.clock.wall_ms(), periods.zone(deps.settings.timezone)
    month = month_of(deps, params.month) if params.month else Month.of(at - 1, zone)
    start, end = month.span(zone)
    whole = deps.picker() is None  # a lake has no quarantine and no missing records
    nodes = page_queries.coverage(deps, month)
    until, unknown = min(end, nodes.as_of_ms or at), month_unknown(deps, month)
    since = deps.ledger.status().extent[0] if unknown else start
    quarantined, holes, missing = None, None, None
    if whole:
        missing = page_queries.unmetered_spans(deps, month, _SEARCHED_NODES).value
        with deps.ledger.moment() as moment:
            quarantined, holes = moment.quarantined(_SHOWN_QUARANTINED), moment.holes(_SHOWN_QUARANTINED)
    return page(
        request,
        "/coverage",
        "coverage.html",
        deps,
        nodes=nodes.value[:_SHOWN_NODES],
        more=nodes.value[_SHOWN_NODES:],
        as_of_ms=nodes.as_of_ms,
        whole=page_rows.total_coverage(nodes.value),
        quarantined=quarantined,
        holes=holes,
        missing=None
        if missing is None
        else [(one, *_why_missing(deps, one, quarantined or (), holes or ())) for one in missing[:_SHOWN_SPANS]],
        more_missing=max(0, len(missing or ()) - _SHOWN_SPANS),
        searched=_SEARCHED_NODES,
        most=_SHOWN_QUARANTINED,
        start_ms=start,
        end_ms=until,
        unknown=unknown,
        known=figure_formatting.span_of(since, until, zone),
        month=month,
        following=month.next if end < at else None,
    )


def _why_missing(
    deps: Deps, span: page_rows.UnmeteredSpan, quarantined: Sequence[Quarantined], holes: Sequence[Hole]
) -> tuple[str, str]:
    """Why a span is unmetered, as far as known, and what to do."""
    status, node = deps.ledger.status(), (span.cluster, span.node)
    newest_ms = status.newest_by_node.get(node, 0)
    if newest_ms < span.end_ms and is_old(newest_ms, deps.clock.wall_ms()):
        return "the node has sent no later record", f"look at its agent: kubectl get pods -A -o wide | grep {span.node}"
    if any((one.cluster, one.node) == node for one in quarantined):
        return "records of the node were refused", "read the reason under Quarantine"
    if any((one.cluster, one.node) == node for one in holes):
        return (
            "the node lost records before it sent them",
            "they will not come: acknowledge coverage to close the month",
        )
    return "no agent reported it", "wait for late records, or import what another source recorded"


ZOOM: Final = "/static/zoom.js"
STATIC = static_routes(
    {
        ZOOM: (
            (resources.files("accountant.web") / "static" / "zoom.js").read_bytes(),
            "text/javascript; charset=utf-8",
        ),
        STYLE: (page_layout.stylesheet().encode(), page_layout.CSS),
        "/favicon.ico": (page_layout.ICON, page_layout.ICON_TYPE),
    }
)
"""The stylesheet of reports and pages; the script of Explore; and the icon, which browsers request automatically."""


async def recognise(request: Request) -> None:
    """Finds out who asks for a page that there is not, for its menu. Nobody in particular, if that is not known."""
    if _wants_page(request):
        with suppress(Refusal):
            await admit(request, request.app.state.deps, "read")


def _wants_page(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/v1/")


def present(request: Request, refusal: Refusal) -> Response:
    """The answer of a refusal: an HTML page or a redirect to sign-in for browsers, a problem document for others."""
    if not _wants_page(request):
        return answer(refusal, request.url.path)
    deps: Deps = request.app.state.deps
    if refusal.slug == "unauthenticated" and deps.people() is not None and not request.url.path.startswith("/sign-"):
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(to_sign_in(here), 303)
    links = menu_of(request, deps)
    meant = _meant(request.url.path, links) if refusal.kind.status == HTTPStatus.NOT_FOUND else ()
    text = _render("refusal.html", deps, current="", menu=links, refusal=refusal, meant=meant)
    return Response(text, refusal.kind.status, refusal.headers, HTML)


_LISTS: Final = {"act": "/audit", "group": "/explore", "job": "/jobs", "node": "/nodes", "team": "/month"}
"""The page that lists what the pages below a path are of."""


def _meant(path: str, links: Menu) -> list[tuple[str, str]]:
    """Address and title of the pages of the menu that may be meant by an address of which there is none."""
    first = path.strip("/").partition("/")[0].casefold()
    titles = dict(links.links)
    by_word = {
        word: address for address, title in links.links for word in (title.casefold(), address.strip("/")) if word
    }
    near = [by_word[word] for word in get_close_matches(first, by_word, 3, 0.6)]
    return [
        (address, titles[address]) for address in dict.fromkeys((_LISTS.get(first, ""), *near)) if address in titles
    ]


def parse_month(text: str, at_ms: int, tz: ZoneInfo) -> Month:
    """The month in a page's URL. Raises Refusal for an invalid or future month."""
    try:
        month = Month.parse(text)
    except ValueError as error:
        raise invalid("month", str(error)) from error
    if month.span(tz)[0] >= at_ms:
        raise invalid("month", f"{text} has not begun: choose an earlier month")
    return month


def _report(request: Request, deps: Deps, month: str, team: str | None, order: TableSorting) -> Response:
    """The page with the HTML report of a month and the navigation. team: None for the whole cluster."""
    at, timezone = deps.clock.wall_ms(), deps.settings.timezone
    calendar_month = month_of(deps, month)
    report = report_of(deps, calendar_month, team, order)
    bar = _render(
        "report_bar.html",
        deps,
        month=calendar_month,
        team=team,
        following=calendar_month.next if calendar_month.next.span(periods.zone(timezone))[0] < at else None,
        path="/month/" if team is None else f"/team/{quote(team, safe='')}?month=",
        query=f"month={calendar_month}" + (f"&team={quote(team, safe='')}" if team is not None else ""),
        by_two=_by_two(deps, calendar_month, team),
        downloads=downloads(),
        style=page_layout.sheet("site.css"),
        menu=menu_of(request, deps),
        as_of_ms=report.as_of_ms,
        related=[] if team is None else [(group_address("team", team, str(calendar_month)), "Use by day"),
                                         *_invoice_of(deps, calendar_month, team),
                                         *pages_of_queues(deps, team=team)],
    )  # fmt: skip
    return tagged(request, report.value.replace("<body>", f"<body>{bar}", 1).encode(), HTML)


def _invoice_of(deps: Deps, month: Month, team: str) -> list[tuple[str, str]]:
    """Address and title of the team's invoice of a closed month."""
    if deps.books.books().of(str(month)) is None:
        return []
    address = f"/invoices?team={quote(team, safe='')}#month-{month}"
    return [(address, f"Invoice {invoice_number(month, team)}")]


def _by_two(deps: Deps, month: Month, team: str | None) -> tuple[str, str]:
    """The cost of a month by the first exported label, or by team, and by GPU model: its name, and its page."""
    labels = deps.settings.exported_labels
    first: Dimension = label_dimension(labels[0]) if labels else "team" if team is None else "job"
    over = month.span(deps.settings.zone)[1] <= deps.clock.wall_ms()
    query = {"by": f"{first},gpu_model", "where.team": team, "columns": "allocated,cost", "measure": "cost"}
    return f"by {title(first).lower()} and GPU model", explored_month(month, query, is_over=over)


MOST_QUEUES: Final = 6


def pages_of_queues(deps: Deps, *, team: str = "", queue: str = "") -> list[tuple[str, str]]:
    """Address and title of the controller's pages of a queue, or of the first queues of a team, if these pages are
    known: what a queue is due, and why."""
    if deps.settings.controller_pages is None:
        return []
    at, base = deps.clock.wall_ms(), site(deps.settings.controller_pages)
    version = policy_at(deps.ledger.status(), at - 1)
    if version is None:
        return []
    names = [one.name for one in version.policy.queues]
    found = [name for name in names if name == queue or (team and version.policy.team_of(name) == team)]
    return [(f"{base}/shares/queue/{quote(name, safe='')}", f"Share of {name}") for name in found[:MOST_QUEUES]]


def report_of(deps: Deps, month: Month, team: str | None, order: TableSorting) -> CachedAnswer[str]:
    """The HTML report of a month; team: None for the whole cluster."""
    readings = page_queries.readings_of(deps, month, team)

    def rendered() -> str:
        report = report_builder.made_of(readings.value.readings, team=team)
        return html_page.render_html(report, _links(deps, month, team, order))

    if order.sort != UNSORTED:  # its links name the order, and few ask for it again
        return CachedAnswer(rendered(), readings.as_of_ms)
    # Pages depend only on this key: what was rendered from the same readings is reused.
    key = ("report", month, team, deps.books.status(month), page_queries.books(deps), readings.value.found_ms)
    return CachedAnswer(deps.answers.ask(key, rendered, lambda: None).value, readings.as_of_ms)


def prepare_pages(deps: Deps) -> None:
    """Computes the slow pages that most readers open, before they open them. Raises AccountantError.

    The previous month is included, because its bills are sent. It is computed again only after late records."""
    page_layout.compile_templates(_environment(), "accountant.web")
    timezone = periods.zone(deps.settings.timezone)
    running = Month.of(deps.clock.wall_ms() - 1, timezone)
    page_queries.prepare_answers(deps, running)
    first_ms, newest_ms = deps.ledger.status().extent
    for month in (running, running.previous) if newest_ms and first_ms < running.span(timezone)[0] else (running,):
        page_queries.all_bills_of(deps, month)
        report_of(deps, month, None, sorting(html_page.TABLES, TablesParams(), f"/month/{month}"))


def _links(deps: Deps, month: Month, team: str | None, order: TableSorting) -> html_page.Links:
    """The targets of the links in a month's report. On the page of a team, they are pages of this team."""
    with deps.ledger.moment() as moment:
        booked = correcting(moment)

    def act(booking: Correction | Adjustment) -> str:
        return f"/act/{booked[booking] if isinstance(booking, Correction) else adjusting(booking)}"

    def of_month(name: str) -> str:
        return f"/month/{name}" if team is None else f"/team/{quote(team, safe='')}?month={name}"

    def of_user(name: str) -> str:
        where = {"where.user": name, **({"where.team": team} if team is not None else {})}
        return explored({**where, "start": f"{month}-01", "end": f"{month.next}-01", "by": "job"})

    return html_page.Links(
        user=of_user,
        lines=to_lines(month, team),
        job=lambda row: f"/job/{quote(JobKey(row.cluster, row.namespace, row.job).id)}",
        team=lambda name: f"/team/{quote(name, safe='')}?month={month}",
        month=of_month,
        act=act,
        savings=f"/savings?month={month}" + (f"&team={quote(team, safe='')}" if team is not None else ""),
        jobs=f"/jobs?start={month}-01&end={month.next}-01"
        + (f"&where.team={quote(team, safe='')}" if team is not None else ""),
        order=order,
    )


def csv_file(request: Request, name: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Response:
    """A list as a file to save. Texts from outside are escaped by the caller (`for_cell`)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
    return tagged(request, text.getvalue().encode(), CSV, file_name("csv", name))


def page(request: Request, current: str, template: str, deps: Deps, **values: Any) -> Response:
    """A page with the navigation. current: the URL of the navigation entry that is highlighted."""
    shown = {"menu": menu_of(request, deps), **values}
    text = _render(template, deps, current=current, **shown)
    return tagged(request, text.encode(), HTML)


def month_of(deps: Deps, text: str) -> Month:
    """`parse_month`, in the zone of the accountant and as of now."""
    return parse_month(text, deps.clock.wall_ms(), deps.settings.zone)


async def read_form(request: Request, most_bytes: int = _MOST_FORM_BYTES) -> dict[str, str]:
    """The fields of a form; of several values of one field, the first. Raises Refusal for a form that is too large or
    too slow."""
    try:
        body = await read_body(request, most_bytes, _FORM_S)
    except HTTPException as error:
        slug = "slow-body" if error.status_code == 408 else "too-large"
        raise Refusal(slug, str(error.detail), headers={"Connection": "close"}) from error
    return {name: values[0] for name, values in parse_qs(body.decode(errors="replace")).items()}


def person_of(request: Request) -> Person | None:
    """The signed-in person; None if the request has a token, or needs none."""
    person: Person | None = getattr(request.state, "person", None)
    return person


def takes_forms(request: Request, deps: Deps) -> bool:
    """Whether the sender may send the forms of a page: a signed-in person, or anybody where nobody signs in."""
    return person_of(request) is not None or deps.settings.auth == "off"


def menu_of(request: Request, deps: Deps, program: Program = "accountant") -> Menu:
    """The menu for the sender of a request. program: the program to which the page belongs."""
    sites: dict[Program, str] = {program: ""}
    if deps.settings.controller_pages is not None:
        sites["controller"] = site(deps.settings.controller_pages)
    return menu(getattr(request.state, "caller", None), sites, person_of(request))


def _render(template: str, deps: Deps, **values: Any) -> str:
    zone = periods.zone(deps.settings.timezone)
    newest, at = deps.newest_ms(), deps.clock.wall_ms()
    book = deps.book()
    shared: dict[str, Any] = {
        "example_prices": book is not None and book.has_examples,
        "picker": deps.picker(), "style_url": STYLE, "f": figure_formatting, "zone": zone,
        "old": StaleLedger(newest, figure_formatting.duration(at - newest)) if is_old(newest, at) else None,
        "silent": [
            StaleLedger(end_ms, figure_formatting.duration(at - end_ms), cluster)
            for cluster, end_ms in silent_clusters(deps.ledger.status().newest_by_cluster, at).items()
        ],
    }  # fmt: skip
    return _environment().get_template(template).render(shared | values)


STATUS_WORDS: Final[Mapping[Status, str]] = {
    "open": "open", "grace": "waiting for late records", "due": "not closed yet", "closed": "closed",
    "published": "published",
}  # fmt: skip
"""The states of a month as the pages say them."""


@cache
def _environment() -> Environment:
    environment = page_layout.environment("accountant.web")
    environment.globals |= {
        "group_address": group_address,
        "moment": _instant_text,
        "figure": _figure,
        "count": decision_text.of_gpus,
        "job_id": _job_id,
        "job_name": _job_name,
        "exact_moment": _exact_instant,
        "utilisation": page_rows.utilisation,
        "status_word": STATUS_WORDS.__getitem__,
        "decision_address": _decision_address,
    }
    environment.filters["title_of"] = title
    environment.filters["team_name"] = figure_formatting.name
    environment.filters["compact"] = lambda value: json.dumps(value, sort_keys=True, ensure_ascii=False)
    return environment


def _job_id(cluster: str, namespace: str, job: str) -> str:
    """The id of a job in URLs."""
    return JobKey(cluster, namespace, job).id


def _job_name(id_: str) -> str:
    """The kind and name in a job's id."""
    return JobKey.parse(id_).job


def _instant_text(at_ms: int, zone: ZoneInfo) -> str:
    return f"{datetime.fromtimestamp(at_ms // MS_PER_SECOND, zone):%-d %b %H:%M}"


def _exact_instant(at_ms: int, zone: ZoneInfo) -> str:
    return f"{datetime.fromtimestamp(at_ms // MS_PER_SECOND, zone):%-d %b %H:%M:%S}"


def _figure(value: float | None) -> str:
    """A weight with four significant digits."""
    return figure_formatting.NOTHING if value is None else f"{value:.4g}"


SHOWN = 200
LOOKED_AT = 10_000
"""Number of newest decisions of the span that are read to select those that the page shows."""


class DecisionsParams(Params):
    """The parameters of the page of decisions. subject: only decisions about this queue or workload, by its full
    name."""

    kind: DecisionKind | None = None
    subject: str | None = Field(default=None, max_length=500)
    days: int = Field(default=31, ge=1, le=366)


def address(decision: Decision) -> str:
    """The URL of a decision's page. The instant identifies the cycle, and the id the decision."""
    return _decision_address(decision.at_ms, decision.id)


def _decision_address(at_ms: int, id_: str) -> str:
    return f"/decisions/{at_ms}/{quote(id_, safe='/')}"


@router.get("/decisions")
def listed(request: Request, params: Annotated[DecisionsParams, Query()], deps: AppDeps, principal: Reader) -> Response:
    require_all_teams(principal)
    at = deps.clock.wall_ms()
    start = at - params.days * MS_PER_DAY
    with deps.ledger.moment() as moment:
        all_decisions = moment.decisions(start, at + 1, LOOKED_AT, kind=params.kind, subject=params.subject)
    decisions = [decision for decision in all_decisions if not decision_text.is_record(decision)]
    about = (params.subject,) if params.subject else ()
    kinds = [(kind, _query(params, kind)) for kind in (None, "weight", "preemption", "hold", "policy")]
    return page(
        request, "/decisions", "decisions.html", deps, decisions=decisions[:SHOWN], params=params, address=address,
        more=max(0, len(decisions) - SHOWN), whole=len(all_decisions) == LOOKED_AT, kinds=kinds,
        shares=decision_text.shares(records(deps.ledger, at, about), about) if about else (),
        audited=principal.may("admin"),
    )  # fmt: skip


@router.get("/decisions/{at_ms}/{id:path}")
def one(request: Request, at_ms: int, id: str, deps: AppDeps, principal: Reader) -> Response:
    require_all_teams(principal)
    decision, cycle, next_ms = None, [], None
    if 0 <= at_ms < 2**53:
        with deps.ledger.moment() as moment:
            cycle = _cycle(moment, at_ms)
            decision = next((other for other in cycle if other.id == id), None)
            if decision is not None and decision.kind == "hold":
                next_ms = _next_weight_ms(moment, decision)
    if decision is None:
        raise Refusal("not-found", f"no decision {id[:200]!r} was made at that instant: /decisions lists the decisions")
    return page(
        request,
        "/decisions",
        "decision.html",
        deps,
        one=decision,
        explanation=decision_text.decision_text(decision, cycle, next_ms),
        address=address,
    )


def _next_weight_ms(ledger: Moment, hold: Decision) -> int | None:
    """When its cluster decided a weight after a hold; None if it did not in a month, or too much was decided."""
    for span_ms in (MS_PER_HOUR, MS_PER_DAY, 31 * MS_PER_DAY):
        later = ledger.decisions(hold.at_ms + 1, hold.at_ms + span_ms, LOOKED_AT, kind="weight")
        if len(later) == LOOKED_AT:
            return None
        instants = [one.at_ms for one in later if one.cluster == hold.cluster]
        if instants:
            return min(instants)
    return None


def _cycle(ledger: Moment, at_ms: int) -> list[Decision]:
    """All decisions of one millisecond."""
    cycle: list[Decision] = []
    while not len(cycle) % LOOKED_AT:
        before = cycle[-1].key if cycle else None
        more = ledger.decisions(at_ms, at_ms + 1, LOOKED_AT, before=before)
        if not more:
            break
        cycle += more
    return cycle


def _query(params: DecisionsParams, kind: str | None) -> str:
    given = params.model_dump(exclude_defaults=True) | {"kind": kind}
    return "/decisions?" + urlencode({name: value for name, value in given.items() if value is not None})


@router.get("/proposals")
def proposals(request: Request, deps: AppDeps, principal: Reader) -> Response:
    """The page of late changes of closed months. A reader of some teams sees only the effects on these."""
    with_effects = [(proposal, proposal.effects(principal.teams)) for proposal in deps.proposals()]
    book = deps.book()
    rows = [(proposal, effect) for proposal, effects in with_effects for effect in effects]
    return page(
        request, "/month", "proposals.html", deps, rows=rows, currency=book.currency if book else None,
        waiting=[proposal for proposal, effects in with_effects if effects], everyone=principal.teams is None,
        total=exact_sum(effect.amount for _, effect in rows),
    )  # fmt: skip


class _SignInSite:
    """Connects the shared sign-in routes with the accountant; implements `gputally.server.sign_in.SignInSite`."""

    def people(self, request: Request) -> SignInService:
        deps = _deps(request)
        limit_address_rate(request, deps)
        people = deps.people()
        if people is None:
            raise Refusal("not-found", "sign-in is not configured on this server: send a token")
        return people

    async def form(self, request: Request) -> Mapping[str, Sequence[str]]:
        return {name: [value] for name, value in (await read_form(request)).items()}

    def page(self, request: Request, template: str, /, **values: Any) -> Response:
        return Response(
            _render(template, _deps(request), current="", menu=menu_of(request, _deps(request)), **values),
            media_type=HTML,
        )

    def refusal(self, kind: Kind, detail: str) -> Exception:
        if kind == "authority-unavailable":
            return retry_later(kind, detail)
        if kind in ("no-provider", "too-long"):
            return invalid("with" if kind == "no-provider" else "query", detail)
        return Refusal(kind, detail)


def _deps(request: Request) -> Deps:
    deps: Deps = request.app.state.deps
    return deps


SIGN_IN_ROUTES = sign_in_routes(_SignInSite())
