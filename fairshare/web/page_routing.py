"""Routes requests for the controller's pages, and renders pages and errors.

For each request a thread authenticates the caller, and only then the application reads the form. A thread runs the
page's handler when the caller's turn comes, so that no caller takes all threads. The application logs an unexpected
exception and answers it with an error page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import quote, urlencode

from anyio import CapacityLimiter, to_thread
from jinja2 import Environment
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from accountant.wire.decision_text import amount, trace_in_words
from accountant.wire.policy_models import Policy
from fairshare.controller.policy_file import PolicyLocation
from fairshare.explain.plan_tables import number
from fairshare.explain.queue_and_pod_explanation import span
from fairshare.usage.accountant_client import REFUSES
from fairshare.web import svg_plots
from fairshare.web.page_authentication import (
    Caller,
    Fields,
    PageAuthentication,
    PageRefusal,
    SignInPages,
    check_form,
    fields_of,
    read_form,
    refusal,
    sent,
)
from fairshare.web.queue_history import LastCycle, QueueHistory, ReportCache
from fairshare.web.what_if_worker import Previews
from gputally.base import number_format
from gputally.base.called_off import CalledOff
from gputally.base.clock import Clock
from gputally.base.errors import AccountantUnavailable
from gputally.base.units import MS_PER_SECOND
from gputally.server import page_layout
from gputally.server.menu import Menu, Program, menu, site
from gputally.server.one_address import CONTROLLER
from gputally.server.request_handling import Answered, RequestLog, static_routes
from gputally.server.sign_in import PATHS, sign_in_routes, to_sign_in
from gputally.server.tokens_and_grants import Scope
from gputally.server.turns import GONE, Busy, TurnLimits, Turns

STYLE = "/shares/static/style.css"
SCRIPT = "/shares/static/pages.js"
_LEFT_WITH, _LEFT_S = "gputally-shares-left-with", 120
"""The cookie of a browser that these pages sent to the sign-in of another program, and the seconds that it is kept."""
ADMITTED_AT_ONCE = 4
"""The number of requests that are authenticated at the same time. Further requests wait for a moment."""
TURNS = TurnLimits(running=16, running_by_caller=4, waiting=128, waiting_by_caller=32, patience_s=30)
"""The handlers that run at the same time. Further requests wait."""
Applied = Callable[[str, Policy | None, Policy, str], None]
"""Called after a page has written the policy, with the caller's name, the policy before (None if it was faulty), the
policy now, and the reason ("" for none)."""


@dataclass(frozen=True, slots=True)
class PageContext:
    """The data behind the pages.

    location: the policy file.
    interval_s: the seconds between two cycles.
    accountant: where browsers reach the accountant's pages, "/" for the address of these pages, "" if unknown."""

    reports: ReportCache
    history: QueueHistory
    previews: Previews
    location: PolicyLocation
    clock: Clock
    interval_s: float = 60.0
    applied: Applied = field(default=lambda *_: None)
    accountant: str = ""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """An authenticated request. rest: the part of the path after the route's prefix."""

    app: PagesApp
    request: Request
    form: Fields
    caller: Caller
    rest: str

    @property
    def context(self) -> PageContext:
        return self.app.context

    def parameter(self, name: str, default: str = "") -> str:
        """Return a parameter of the query string."""
        return self.request.query_params.get(name) or default

    def field(self, name: str) -> str:
        """Return a field of the form."""
        return sent(self.form, name)

    def page(self, template: str, current: str = "", status: int = 200, **values: Any) -> Response:
        """Return a page for this caller."""
        return self.app.page(template, self.caller, current, status, **values)


@dataclass(frozen=True, slots=True)
class PageRoute:
    """A route. If its prefix ends in "/", the handler gets the rest of the path.

    scope: the scope that a caller needs.
    for_teams: True: the handler shows a caller with some teams only what belongs to them; False: such callers are
        refused."""

    method: str
    prefix: str
    scope: Scope
    handler: Callable[[RequestContext], Response]
    for_teams: bool = False


class PagesApp:
    """The pages as an ASGI application. Handlers run in threads."""

    def __init__(self, context: PageContext, authentication: PageAuthentication, pages: Sequence[PageRoute]) -> None:
        self.context = context
        self._authentication = authentication
        self._admission = CapacityLimiter(ADMITTED_AT_ONCE)
        self._threads = CapacityLimiter(TURNS.running)
        self._turns = Turns("pages", TURNS)
        signing_in = sign_in_routes(SignInPages(authentication.people, self.page, elsewhere=context.accountant == "/"))
        handlers: Any = {
            HTTPException: self._refuse, AccountantUnavailable: self._unavailable, Busy: self._busy,
            CalledOff: lambda *_: GONE, Exception: self._failed,
        }  # fmt: skip
        self.app = Starlette(
            routes=[*_STATIC, *signing_in, *map(self._route, pages), Route("/", _home)], exception_handlers=handlers
        )
        self.app.router.redirect_slashes = False

    def observed(self, answered: Answered | None = None) -> ASGIApp:
        """Return the application with security headers. answered: called after each response."""
        return RequestLog(self.app, "fairshare.pages", headers=page_layout.headers(script=True), answered=answered)

    def compile_templates(self) -> None:
        """Compile all templates in advance, because the first request would otherwise wait for them."""
        page_layout.compile_templates(_environment(), "fairshare.web")

    def page(
        self, template: str, caller: Caller | None, current: str = "", status: int = 200, **values: Any
    ) -> Response:
        """Return a page in the common frame."""
        snapshot = self.context.reports.now()
        shared: dict[str, Any] = {
            "menu": self._menu(caller),
            "style_url": STYLE, "script_url": SCRIPT, "visitor": caller,
            "current": current, "snapshot": snapshot,
            "books": site(self.context.accountant) if self.context.accountant else None,
            "location": self.context.location,
            "now_ms": self.context.clock.wall_ms(), "stale_ms": 3 * self.context.interval_s * MS_PER_SECOND + 60_000,
        }  # fmt: skip
        return HTMLResponse(_environment().get_template(template).render(shared | values), status)

    def _menu(self, caller: Caller | None) -> Menu:
        sites: dict[Program, str] = {"controller": ""}
        if self.context.accountant:
            sites["accountant"] = site(self.context.accountant)
        return menu(None if caller is None else caller.principal, sites, None if caller is None else caller.person)

    def snapshot(self) -> LastCycle:
        """Return the last cycle. Raises PageRefusal before the first cycle has ended."""
        snapshot = self.context.reports.now()
        if snapshot is None:
            raise PageRefusal(503, "Not yet", "the first cycle has not ended; reload the page in a minute")
        return snapshot

    def _route(self, page: PageRoute) -> Route:
        async def answer(request: Request) -> Response:
            caller = await to_thread.run_sync(self._admit, page, request, limiter=self._admission)
            acts = page.method == "POST"
            content = await read_form(request) if acts else b""
            async with self._turns.turn(request, caller.principal.name, may_stop=not acts):
                response = await to_thread.run_sync(
                    self._answer, page, request, caller, content, limiter=self._threads, abandon_on_cancel=not acts
                )
            people = self._authentication.people()
            if people is not None and _LEFT_WITH in request.cookies:  # it came back, and its session is accepted
                people.set_cookie(response, _LEFT_WITH, CONTROLLER, "", 0)
            return response

        path = f"{page.prefix}{{rest:path}}" if page.prefix.endswith("/") else page.prefix
        return Route(path, answer, methods=[page.method])

    def _admit(self, page: PageRoute, request: Request) -> Caller:
        return self._authentication.admit(request, page.scope, for_teams=page.for_teams)

    def _answer(self, page: PageRoute, request: Request, caller: Caller, content: bytes) -> Response:
        form = fields_of(content) if page.method == "POST" else {}
        if page.method == "POST":
            check_form(caller, form)
        return page.handler(RequestContext(self, request, form, caller, request.path_params.get("rest", "")))

    def _refuse(self, request: Request, error: HTTPException) -> Response:
        refused = refusal(error)
        if not isinstance(error, PageRefusal) and refused.status_code in (404, 405):
            try:  # an unknown caller does not learn which addresses exist
                self._authentication.admit(request, "read", for_teams=True)
            except PageRefusal as unknown:
                refused = unknown
        wants_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        signs_in = refused.status_code == 401 and self._authentication.people() is not None
        if signs_in and wants_page and request.url.path not in PATHS:
            if not self._signed_in_elsewhere(request):
                return self._leave_to_sign_in(request)
            refused = PageRefusal(
                401, "Signed in, but not here",
                f"the accountant signed you in, and the controller does not accept its session ({refused.detail}): the"
                " operator must give both the same callers file (pages_callers) and the same session key",
            )  # fmt: skip
        caller = self._authentication.known(request)
        response = self.page("refused.html", caller, status=refused.status_code, refusal=refused, again=signs_in)
        response.headers.update(refused.headers or {})
        return response

    def _leave_to_sign_in(self, request: Request) -> Response:
        """Send the browser to the sign-in. If that is another program's, a cookie tells which session it had before."""
        query = f"?{request.url.query}" if request.url.query else ""
        response = redirect(to_sign_in(quote(request.url.path) + query))
        people = self._authentication.people()
        if self.context.accountant == "/" and people is not None:
            people.set_cookie(response, _LEFT_WITH, CONTROLLER, people.cookie_digest(request.cookies) or "-", _LEFT_S)
        return response

    def _signed_in_elsewhere(self, request: Request) -> bool:
        """Whether the browser was sent to the sign-in just now and has a new session since, which is refused here too.
        To send it again would never end."""
        people, before = self._authentication.people(), request.cookies.get(_LEFT_WITH)
        if people is None or before is None:
            return False
        return people.cookie_digest(request.cookies) not in ("", before)

    def _unavailable(self, request: Request, error: AccountantUnavailable) -> Response:
        title = "The accountant refuses" if error.reason == REFUSES else "The accountant does not answer"
        return self._refuse(request, PageRefusal(503, title, str(error)))

    def _busy(self, request: Request, error: Busy) -> Response:
        headers = {"Retry-After": str(round(error.seconds))}
        return self._refuse(request, PageRefusal(429 if error.own else 503, "Too many requests", str(error), headers))

    def _failed(self, request: Request, _: Exception) -> Response:
        return self._refuse(request, PageRefusal(500, "This page failed", "see the controller's log for the error"))


async def _home(_: Request) -> Response:
    """Lead from the address of a controller that stands alone to its first page."""
    return redirect("/shares")


def redirect(path: str) -> Response:
    """Return a redirect that the browser follows with GET."""
    return Response(status_code=303, headers={"Location": path})


def link(path: str, *parts: str, **query: str) -> str:
    """Return the address of a page, with quoted names and without empty parameters."""
    address = path + "/".join(quote(part, safe="") for part in parts)
    parameters = {key: value for key, value in query.items() if value}
    return f"{address}?{urlencode(parameters)}" if parameters else address


def instant_text(at_ms: int) -> str:
    """Format a time in UTC, to the minute."""
    return f"{datetime.fromtimestamp(at_ms // MS_PER_SECOND, UTC):%-d %b %H:%M}"


@cache
def _own(name: str) -> str:
    return (resources.files("fairshare.web") / "static" / name).read_text(encoding="utf-8")


_STATIC = static_routes(
    {
        STYLE: ((page_layout.stylesheet() + _own("pages.css")).encode(), page_layout.CSS),
        SCRIPT: (_own("pages.js").encode(), "text/javascript; charset=utf-8"),
        "/favicon.ico": (page_layout.ICON, page_layout.ICON_TYPE),
    }
)
"""The files that need no token, because they contain no data of the cluster."""


@cache
def _environment() -> Environment:
    environment = page_layout.environment("fairshare.web")
    environment.globals |= {
        "f": number_format, "moment": instant_text, "span": span, "link": link, "bullet": svg_plots.bullet,
        "number": number, "trace_in_words": trace_in_words, "amount": amount,
        "hundredths": lambda value: number_format.number(Decimal(str(round(value, 2))), 2),
        "tenths": lambda value: number_format.number(Decimal(repr(float(value))), 1),
    }  # fmt: skip
    return environment
