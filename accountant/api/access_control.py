"""Authenticates requests, requires a scope per route, limits the rate of requests, limits callers to their own teams,
refuses unknown teams, and reads the tokens file and the callers file.

A request is authenticated by a bearer token (of the tokens file, of an issuer or of Kubernetes), by a client
certificate or, for reading and for forms of the HTML pages, by a sign-in cookie. `CallersFile.check` reads a changed
callers file again; an invalid new version changes nothing.

Authorisation precedes the body: a request without permission is answered before any byte of its body is read. Routes
check the teams of a principal with the functions below, and its node themselves."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Annotated, Any, Final, TypeVar

import structlog
from fastapi import Depends, Request
from pydantic import TypeAdapter

from accountant.api.dependencies import Deps, WorkKind, deps_of
from accountant.api.middleware import read_model
from accountant.api.problems import Refusal, retry_later
from accountant.core import periods
from accountant.core.settings import Settings
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base import instants
from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import Clock
from gputally.base.errors import CannotStart
from gputally.kubernetes.objects import Api
from gputally.server import config_loading
from gputally.server.config_loading import WatchedFile
from gputally.server.ended_sessions import EndedSessions, SessionStore
from gputally.server.openid_connect import Issuers
from gputally.server.rate_and_connection_limits import RateLimit
from gputally.server.sign_in import CookieSigner, Person, SignInService, read_key, read_or_create_key
from gputally.server.token_review import TokenReviews
from gputally.server.tokens_and_grants import (
    SCOPES,
    AllowAll,
    AnyOf,
    Authenticator,
    AuthorityUnavailable,
    Callers,
    CurrentAuthenticator,
    FileToken,
    Principal,
    Scope,
    TokenFile,
    TooManyUnknown,
    Unauthenticated,
    token_in,
)

M = TypeVar("M")


def require(scope: Scope, kind: WorkKind = "reads") -> Any:
    """Returns a FastAPI dependency that admits only principals with `scope`, and returns the principal. A reading route
    then has a turn for this kind of work until it returns; `body` gives writing routes theirs."""

    async def check(request: Request, deps: Annotated[Deps, Depends(deps_of)]) -> AsyncIterator[Principal]:
        principal = await admit(request, deps, scope)
        if request.method not in ("GET", "HEAD"):
            yield principal
            return
        async with deps.turns.turn(kind, request, principal.name):
            yield principal

    return Depends(check, scope="function")


async def admit(request: Request, deps: Deps, scope: Scope, *, form: bool = False) -> Principal:
    """Authenticates the caller, checks its rate limit and then its scope; returns the principal. Raises Refusal.

    form: the route receives a form of the HTML pages, so a sign-in cookie is accepted too, and the route checks the
        form's token (`check_form`)."""
    address = request.client.host if request.client else ""
    # A browser may send the token as the password of Basic authentication, for reading only.
    token = token_in(request.headers.get("authorization", ""), basic=request.method in ("GET", "HEAD"))
    principal = deps.certified(_certificate(request)) if token is None else None
    try:
        if principal is None and token is None:
            principal = _signed_in(request, deps, form=form)
        principal = principal or await deps.authenticator.authenticate(token, address)
    except Unauthenticated as error:
        _limit_rate(deps, ("", address))
        raise Refusal("unauthenticated", str(error), headers={"WWW-Authenticate": _challenge(request)}) from error
    except TooManyUnknown as error:
        raise retry_later("too-many-requests", str(error), error.seconds) from error
    except AuthorityUnavailable as error:
        _limit_rate(deps, ("", address))
        raise retry_later("authority-unavailable", str(error)) from error
    request.state.principal, request.state.caller = principal.name, principal
    _limit_rate(deps, (principal.name, address))
    if not principal.may(scope):
        raise Refusal("forbidden", f"{principal.name!r} lacks the scope {scope!r}, which this request needs")
    if scope == "admin" and request.method not in ("GET", "HEAD"):
        deps.require_quota("acts", principal.name)
    return principal


def require_all_teams(principal: Principal) -> None:
    """Raises Refusal for a principal that may see only some teams. For routes whose figures include all teams."""
    if principal.teams is not None:
        raise own_teams_only(principal)


def own_teams_only(principal: Principal) -> Refusal:
    """The refusal of a principal that asks for figures of other teams."""
    return Refusal("forbidden", f"{principal.name!r} may see figures of its own teams only")


def team_for(principal: Principal, team: str | None) -> str | None:
    """The team whose figures to show; None: all teams. Without `team`, a principal of one team gets that team. Raises
    Refusal for a team that the principal may not see."""
    if principal.teams is None:
        return team
    if team is None and len(principal.teams) == 1:
        return next(iter(principal.teams))
    if team is None or team not in principal.teams:
        raise own_teams_only(principal)
    return team


def team_filter(principal: Principal, teams: tuple[str, ...]) -> dict[Dimension, tuple[str, ...]]:
    """The filter for these teams, or for all teams that the principal may see if `teams` is empty. Raises Refusal for a
    team that the principal may not see."""
    if principal.teams is None:
        return {"team": teams} if teams else {}
    if not set(teams) <= principal.teams:
        raise own_teams_only(principal)
    return {"team": tuple(sorted(teams or principal.teams))}


def known_team_for(deps: Deps, principal: Principal, team: str | None) -> str | None:
    """The team whose figures to show, as in `team_for`. Raises Refusal also for an unknown team."""
    chosen = team_for(principal, team)
    check_teams(deps, principal, () if chosen is None else (chosen,))
    return chosen


def check_teams(deps: Deps, principal: Principal, teams: Iterable[str], slug: str = "not-found") -> None:
    """Raises Refusal for a team that no policy, namespace, record or adjustment names. A principal's own teams count as
    known. slug: of the problem."""
    for message in deps.books.teams.unknown(set(teams) - (principal.teams or frozenset())).values():
        raise Refusal(slug, message)


def recorded_span(deps: Deps) -> tuple[int, int]:
    """The span from the midnight before the first record until now; (0, 0) without records. It begins at midnight
    because a lake accepts only spans that begin at a whole hour."""
    first, newest = deps.ledger.status().extent
    zone = deps.settings.zone
    return (instants.midnight_ms(periods.local_date(first, zone), zone), deps.clock.wall_ms()) if newest else (0, 0)


def limit_address_rate(request: Request, deps: Deps) -> None:
    """Limits the rate of requests from the address of a caller without a name. Raises Refusal."""
    _limit_rate(deps, ("", request.client.host if request.client else ""))


def check_form(request: Request, form_token: str) -> None:
    """Raises Refusal if a signed-in browser sends a form that does not come from a page of its session."""
    person: Person | None = getattr(request.state, "person", None)
    if person is not None and not person.allows(form_token):
        raise Refusal(
            "cross-site", "this form does not belong to this session: reload the page and send the form again"
        )


def _signed_in(request: Request, deps: Deps, *, form: bool) -> Principal | None:
    """The signed-in person's principal, for reading and for forms of the HTML pages. Other requests with a cookie get
    None, because another site can make a browser send them."""
    people = deps.people() if form or request.method in ("GET", "HEAD") else None
    if people is None:
        return None
    person = people.person(request.cookies, renewable=renewable(request))
    if person is None:
        return None
    request.state.person = person
    return person.principal


def renewable(request: Request) -> bool:
    """Whether a browser requests a page, which `accountant.web` answers with a redirect to the sign-in if need be."""
    wants_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
    return wants_page and not request.url.path.startswith("/v1/")


def _limit_rate(deps: Deps, client: tuple[str, str]) -> None:
    wait = deps.rate.admit(client)
    if wait:
        raise retry_later(
            "too-many-requests", "this client sends more requests than its limit allows: wait as Retry-After says", wait
        )


def _certificate(request: Request) -> str:
    """The common name of the verified client certificate; "" without one."""
    extensions = request.scope.get("extensions") or {}
    return str((extensions.get("tls") or {}).get("client_cert_name") or "")


def _challenge(request: Request) -> str:
    if "text/html" in request.headers.get("accept", ""):
        return 'Basic realm="gputally: any name, the token as password", charset="UTF-8"'
    return 'Bearer realm="gputally"'


_REQUIRED: Final = {scope: require(scope) for scope in SCOPES}
IngestPrincipal = Annotated[Principal, _REQUIRED["ingest"]]
ImportPrincipal = Annotated[Principal, _REQUIRED["import"]]
Reader = Annotated[Principal, _REQUIRED["read"]]
DocumentReader = Annotated[Principal, require("read", "documents")]
ProgressPrincipal = Annotated[Principal, _REQUIRED["progress"]]
PolicyPrincipal = Annotated[Principal, _REQUIRED["policy"]]
Admin = Annotated[Principal, _REQUIRED["admin"]]


def body(model: type[M] | TypeAdapter[M], scope: Scope = "admin") -> Any:
    """A dependency that reads the request's body as the model, after checking that the caller has `scope`. The route
    then has a turn for an act until it returns."""
    admitted = _REQUIRED[scope]

    async def read(
        request: Request, deps: Annotated[Deps, Depends(deps_of)], principal: Principal = admitted
    ) -> AsyncIterator[M]:
        content = await read_model(deps.intake, request, model)
        async with deps.turns.turn("acts", request, principal.name):
            yield content

    return Depends(read, scope="function")


ALONE_SECONDS: Final = 900
"""How long the groups of a session count where replicas share no store of ended sessions."""


class CallersFile:
    """The tokens file and the callers file.

    report: called with the faults of a version that is not put in force.
    api: returns the client of the API server, used only if the callers file needs it.
    teams: returns the existing teams.
    sessions: where ended sessions are stored; None: in this process. Then groups count for `ALONE_SECONDS` at most,
        because another replica, and this one after a restart, accepts a copied cookie of an ended session.

    Raises FileFault for an invalid first file, and CannotStart if people are to sign in but `public_url` is not set."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        report: Callable[[str], None],
        api: Callable[[], Api],
        teams: Callable[[], Collection[str]],
        sessions: SessionStore | None = None,
    ) -> None:
        self._sessions = sessions
        self._ended = EndedSessions(clock, sessions)
        self._sessions_read = False
        self._settings = settings
        self._clock = clock
        self._api = api
        self._teams = teams
        self._tokens = TokenFile(settings.tokens, clock, report) if settings.tokens is not None else None
        self._callers: WatchedFile[Callers] | None = None
        if settings.callers is not None:
            self._callers = WatchedFile(
                settings.callers, lambda path: config_loading.load_yaml(path, Callers), report, self._enforce
            )
        self._enforce(self._callers.current if self._callers is not None else Callers())
        self.authenticator: Authenticator = CurrentAuthenticator(lambda: self._authenticator)
        self._read_sessions()

    def check(self) -> bool:
        """Puts a changed callers file in force; returns whether another version is now in force. Raises CannotStart at
        each call while the new version needs a setting that is missing."""
        self._read_sessions()
        return self._callers is not None and self._callers.check()

    def teams(self) -> frozenset[str]:
        """The teams that the versions in force name."""
        named = frozenset() if self._tokens is None else self._tokens.teams()
        granted = self._callers.current.grants if self._callers is not None else ()
        return named.union(*(grant.teams or () for grant in granted))

    def _read_sessions(self) -> None:
        """Reads the sessions that people ended before this process began, and stores those that could not be stored.
        Only this process ends further ones."""
        if (self._sessions_read and self._ended.stored) or self._people is None:
            return
        try:
            self._ended.read()
        except AuthorityUnavailable as error:
            structlog.get_logger("http").warning("ended_sessions_not_read", reason=str(error))
        else:
            self._sessions_read = True

    def refused(self) -> dict[str, bool]:
        """For each file, whether its newest version is not in force."""
        files = {"tokens file": self._tokens, "callers file": self._callers}
        return {name: file.refused for name, file in files.items() if file is not None}

    def _enforce(self, callers: Callers) -> None:
        # Both are made before either is put in force: a fault leaves the present ones unchanged.
        authenticator, people = self._make_authenticator(callers), self._make_sign_in(callers)
        self._authenticator, self._people = authenticator, people

    def follow_sessions(self, stop: threading.Event, task: BackgroundTask) -> None:
        """Reads the sessions that other replicas end until `stop` is set. For servers with several replicas at once."""
        self._ended.keep_reading(stop, task)

    def people(self) -> SignInService | None:
        """The sign-in for the pages; None if it is not configured."""
        return self._people

    def certified(self, common_name: str) -> Principal | None:
        """The principal of a client certificate with this common name; None if unknown."""
        if self._callers is None or not common_name:
            return None
        return self._callers.current.certified(common_name)

    def _make_authenticator(self, callers: Callers) -> Authenticator:
        if self._settings.auth == "off":
            return AllowAll()
        methods: list[Authenticator] = [] if self._tokens is None else [self._tokens]
        if self._settings.metrics_token is not None:
            methods.append(FileToken("prometheus", self._settings.metrics_token))
        if callers.issuers:
            methods.append(Issuers(callers.issuers, callers.grants, self._clock))
        if callers.kubernetes is not None:
            cluster = self._settings.kubernetes.cluster
            limits = self._settings.limits
            rate = RateLimit(self._clock, limits.reviews_per_second, limits.reviews_burst)
            methods.append(
                TokenReviews(self._api(), self._clock, cluster, callers.kubernetes, callers.grants, self._teams, rate)
            )
        return AnyOf(*methods)

    def _make_sign_in(self, callers: Callers) -> SignInService | None:
        settings = self._settings
        if settings.auth == "off" or all(issuer.login is None for issuer in callers.issuers):
            return None
        if settings.public_url is None:
            raise CannotStart(
                f"{settings.callers}: sign-in with an issuer needs this server's URL: set public_url in the settings"
            )
        return SignInService(
            callers,
            self._clock,
            CookieSigner(
                read_key(settings.session_key)
                if settings.session_key is not None
                else read_or_create_key(settings.data),
                settings.public_url,
            ),
            settings.public_url,
            settings.session,
            self._ended,
            ALONE_SECONDS if self._sessions is None else None,
        )
