"""Holds what every page needs, and renders pages and errors.

`Site.answer` never raises: a defect is logged and answered as such.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import structlog
from jinja2 import Environment

from fairshare.controller.policy_file import PolicyPlace
from fairshare.core.errors import AccountantUnavailable
from fairshare.explain.plan_tables import number
from fairshare.explain.queue_explanation import span
from fairshare.web import svg_plots
from fairshare.web.http_messages import Answer, Refusal, Request
from fairshare.web.page_authentication import Caller, PageAuthentication
from fairshare.web.queue_history import History, ReportCache, Snapshot
from fairshare.web.what_if_previews import Previews
from gputally.base import number_format
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND
from gputally.server import page_layout
from gputally.server.sign_in import to_sign_in
from gputally.server.tokens_and_grants import Scope

if TYPE_CHECKING:
    from gputally.server.sign_in import People

NAVIGATION = (("/", "Shares"), ("/decisions", "Decisions"), ("/policy", "Policy"))
OF_TEAMS = NAVIGATION[:1]
"""What there is for who sees some teams only."""
SCRIPT = "/static/pages.js"
Applied = Callable[[str, str, str], None]
"""Hears of a policy that was written from a page: who, version before, version now."""


@dataclass(frozen=True, slots=True)
class PageContext:
    """What the pages are built from. interval_s: between two cycles. accountant: the address of its pages, "" if
    unknown."""

    scene: ReportCache
    history: History
    previews: Previews
    place: PolicyPlace
    clock: Clock
    interval_s: float = 60.0
    applied: Applied = field(default=lambda *_: None)
    accountant: str = ""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One admitted request. rest: the part of the path after the route's prefix."""

    site: Site
    request: Request
    caller: Caller
    rest: str

    @property
    def house(self) -> PageContext:
        return self.site.house

    def page(self, template: str, current: str = "", status: int = 200, **values: Any) -> Answer:
        """A page for this caller."""
        return self.site.page(template, self.caller, current, status, **values)


@dataclass(frozen=True, slots=True)
class Route:
    """scope: what a caller needs. prefix ending in "/": whatever stands behind it is the handler's. for_teams: the
    handler shows who sees some teams only what belongs to them; elsewhere they are refused."""

    method: str
    prefix: str
    scope: Scope
    handler: Callable[[RequestContext], Answer]
    for_teams: bool = False


@dataclass(frozen=True, slots=True)
class PublicRoute:
    """A route that needs no authentication."""

    method: str
    path: str
    handler: Callable[[Site, Request], Answer]


class Site:
    """Answers requests; from any thread."""

    def __init__(
        self,
        house: PageContext,
        doors: PageAuthentication,
        routes: tuple[Route, ...],
        openings: tuple[PublicRoute, ...] = (),
    ) -> None:
        self.house = house
        self.people: Callable[[], People | None] = doors.people
        self._doors = doors
        self._routes = routes
        self._openings = openings
        self._log = structlog.get_logger("fairshare.pages")

    def make_ready(self) -> None:
        """What would take the first reader's time; whoever does not wait for it only waits longer."""
        page_layout.make_ready(_environment(), "fairshare.web")

    def answer(self, request: Request) -> Answer:
        """Never raises."""
        try:
            found = self._static(request) or self._opened(request) or self._routed(request)
        except Refusal as refusal:
            found = self._to_sign_in(request, refusal) or self._refused(refusal)
        except AccountantUnavailable as error:
            found = self._refused(Refusal(503, "The accountant does not answer", str(error)))
        except Exception as error:  # noqa: BLE001  # the last stop: a defect is logged and answered
            self._log.error("page_failed", path=request.path[:200], exc_info=error)
            found = self._refused(Refusal(500, "This page failed", "the failure is in the controller's log"))
        return replace(found, headers={**page_layout.headers(script=True), **found.headers})

    def page(self, template: str, caller: Caller | None, current: str = "", status: int = 200, **values: Any) -> Answer:
        """A page in the common frame."""
        snapshot = self.house.scene.now()
        shared: dict[str, Any] = {
            "navigation": OF_TEAMS if caller is not None and caller.teams is not None else NAVIGATION,
            "style_url": page_layout.STYLE, "script_url": SCRIPT, "visitor": caller,
            "person": caller.person if caller is not None else None,
            "current": current, "snapshot": snapshot, "place": self.house.place, "accountant": self.house.accountant,
            "now_ms": self.house.clock.wall_ms(), "stale_ms": 3 * self.house.interval_s * MS_PER_SECOND + 60_000,
        }  # fmt: skip
        return Answer(_environment().get_template(template).render(shared | values).encode(), status=status)

    def snapshot(self) -> Snapshot:
        """Raises Refusal before the first cycle."""
        found = self.house.scene.now()
        if found is None:
            raise Refusal(503, "Not yet", "the first cycle has not ended; look again in a moment")
        return found

    def _routed(self, request: Request) -> Answer:
        allowed = []
        for route in self._routes:
            rest = _rest(route.prefix, request.path)
            if rest is None:
                continue
            if route.method != request.method:
                allowed.append(route.method)
                continue
            caller = self._doors.admit(request, route.scope, for_teams=route.for_teams)
            return route.handler(RequestContext(self, request, caller, rest))
        self._doors.admit(Request("GET", request.path, headers=request.headers), "read", for_teams=True)
        if allowed:
            raise Refusal(405, "Not like that", "this address takes no such request", {"Allow": ", ".join(allowed)})
        raise Refusal(404, "No such page", "there is nothing at this address")

    def _static(self, request: Request) -> Answer | None:
        """What needs no token: it says nothing."""
        if request.method != "GET":
            return None
        if request.path == page_layout.STYLE:
            return Answer((page_layout.stylesheet() + _own("pages.css")).encode(), page_layout.CSS)
        if request.path == SCRIPT:
            return Answer(_own("pages.js").encode(), "text/javascript; charset=utf-8")
        if request.path == "/favicon.ico":
            return Answer(page_layout.ICON, page_layout.ICON_TYPE)
        return None

    def _opened(self, request: Request) -> Answer | None:
        found = next(
            (each for each in self._openings if (each.method, each.path) == (request.method, request.path)), None
        )
        return found.handler(self, request) if found is not None else None

    def _to_sign_in(self, request: Request, refusal: Refusal) -> Answer | None:
        """Instead of a refusal, where a person looks at a page without being known."""
        wants_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        known = any(request.path == each.path for each in self._openings)
        if refusal.status != 401 or not wants_page or known or self.people() is None:
            return None
        return redirect(to_sign_in(request.address))

    def _refused(self, refusal: Refusal) -> Answer:
        found = self.page(
            "refused.html", None, status=refusal.status, refusal=refusal,
            again=refusal.status == 401 and self.people() is not None,
        )  # fmt: skip
        return replace(found, headers=refusal.headers)


def redirect(path: str) -> Answer:
    """To be asked for with GET."""
    return Answer(b"", status=303, headers={"Location": path})


def as_json(value: Any) -> Answer:
    return Answer(json.dumps(value, ensure_ascii=False).encode(), "application/json")


def link(path: str, *parts: str, **query: str) -> str:
    """An address of ours; names in it are quoted."""
    text = path + "/".join(quote(part, safe="") for part in parts)
    kept = {key: value for key, value in query.items() if value}
    return f"{text}?{urlencode(kept)}" if kept else text


def moment(at_ms: int) -> str:
    """An instant in UTC, to the minute."""
    return f"{datetime.fromtimestamp(at_ms // MS_PER_SECOND, UTC):%-d %b %H:%M}"


def _rest(prefix: str, path: str) -> str | None:
    if prefix != "/" and prefix.endswith("/"):
        return path.removeprefix(prefix) if path.startswith(prefix) and len(path) > len(prefix) else None
    return "" if path == prefix else None


@cache
def _own(name: str) -> str:
    return (resources.files("fairshare.web") / "static" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = page_layout.environment("fairshare.web")
    environment.globals |= {
        "f": number_format, "moment": moment, "span": span, "link": link, "bullet": svg_plots.bullet, "number": number,
        "tenths": lambda value: number_format.number(Decimal(str(round(value, 1))), 1),
    }  # fmt: skip
    return environment
