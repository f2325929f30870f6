"""Authenticates requests for the controller's pages, reads their forms, refuses requests, and serves the sign-in pages.

A client sends its token as a bearer token, or as the password of Basic, for which browsers prompt. Each form contains
a secret value computed from the caller's own token or session. A page of another site cannot compute this value, and
every replica can check it. The server stores only the sessions that were ended, and looks up a person's rights in the
grants at every request."""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gputally.base.clock import Clock
from gputally.base.errors import CannotStart, FairshareError
from gputally.server import config_loading
from gputally.server.config_loading import WatchedFile
from gputally.server.ended_sessions import EndedSessions
from gputally.server.loopback import names_this_machine
from gputally.server.request_handling import read_body
from gputally.server.sign_in import FORM_TOKEN, CookieSigner, Kind, Person, SignInService, read_key
from gputally.server.tokens_and_grants import (
    SCOPES,
    Callers,
    Principal,
    Scope,
    TokenFile,
    Unauthenticated,
    token_in,
)

Fields = Mapping[str, Sequence[str]]
"""The values of each field of a form, as the browser sent them."""
MOST_BYTES = 2 * 1024 * 1024
"""The size of the largest form. A policy of two thousand queues needs half as much."""
MOST_FIELDS = 25_000
_MOST_SIGN_OUT_BYTES = 1_024
"""The size of the largest form of a caller who is not known yet."""
BODY_S = 10.0
_FORM = "application/x-www-form-urlencoded"


class PageRefusal(HTTPException):
    """The refusal of a request, as the caller reads it: a title and a sentence with the reason."""

    def __init__(self, status: int, title: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.title = title


def refusal(error: HTTPException) -> PageRefusal:
    """Convert an error of the framework to a refusal."""
    if isinstance(error, PageRefusal):
        return error
    title, detail = {
        404: ("No such page", "there is no page at this address"),
        405: ("Wrong method", "this address does not accept the method of the request"),
    }.get(error.status_code, (HTTPStatus(error.status_code).phrase, error.detail))
    return PageRefusal(error.status_code, title, detail, error.headers)


async def read_form(request: Request, most_bytes: int = MOST_BYTES) -> bytes:
    """Read the body of a form. Raises HTTPException for a body that is too large, too slow or not a form."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise HTTPException(415, f"send forms as {_FORM}")
    return await read_body(request, most_bytes, BODY_S)


def fields_of(content: bytes) -> Fields:
    """Decode the body of a form, which takes a tenth of a second for the largest one. Raises HTTPException."""
    try:
        return parse_qs(content.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise HTTPException(400, f"the body is not a form of at most {MOST_FIELDS} fields") from error


def sent(form: Fields, name: str) -> str:
    """Return the first value that a form has for a field; "" if it has none."""
    return (form.get(name) or ("",))[0]


_LOOK_EVERY_MS = 1_000


class SignInFault(FairshareError):
    """Sign-in is configured, but impossible: the session key or an issuer's login is missing."""


class SignIns:
    """Provides the sign-in service for the version of the callers file that is in force. Thread-safe.

    report: called with the faults of a new version of the file that is invalid. The earlier version then stays in
        force.
    ended: the sessions that people ended; None: those that this process knows.

    Raises FileFault for an invalid first version, SignInFault for an invalid key."""

    def __init__(
        self,
        callers: Path,
        key: Path,
        public_url: str,
        session_seconds: int,
        clock: Clock,
        report: Callable[[str], None],
        ended: EndedSessions | None = None,
    ) -> None:
        self._ended = ended or EndedSessions(clock)
        try:
            self._seal = CookieSigner(read_key(key), public_url)
        except CannotStart as error:
            raise SignInFault(f"pages_session_key: {error}") from error
        self._clock = clock
        self._public_url = public_url
        self._session_seconds = session_seconds
        self._lock = threading.Lock()
        self._file = WatchedFile(callers, lambda path: config_loading.load_yaml(path, Callers), report, self._enforce)
        self._looked_ms = clock.monotonic_ms()
        self._people: SignInService | None = None
        self._enforce(self._file.current)

    def __call__(self) -> SignInService | None:
        """Return the sign-in service; None if no issuer in the callers file has a login."""
        with self._lock:
            now = self._clock.monotonic_ms()
            if now - self._looked_ms >= _LOOK_EVERY_MS:
                self._looked_ms = now
                self._file.check()
            return self._people

    def _enforce(self, callers: Callers) -> None:
        if all(issuer.login is None for issuer in callers.issuers):
            self._people = None
        else:
            self._people = SignInService(
                callers, self._clock, self._seal, self._public_url, self._session_seconds, self._ended
            )


_BASIC = 'Basic realm="gputally: any name, the token as password", charset="UTF-8"'
_BEARER = 'Bearer realm="gputally"'


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated sender of a request.

    mark: the secret value that the caller's forms must contain.
    person: the signed-in person; None for a token."""

    principal: Principal
    mark: str
    person: Person | None = None

    def may(self, scope: Scope) -> bool:
        return self.principal.may(scope)

    @property
    def teams(self) -> frozenset[str] | None:
        """Return the teams whose queues the caller may see; None: all queues."""
        return self.principal.teams


class PageAuthentication:
    """Authenticates requests for the pages by a token or by the session of a signed-in person.

    people: a function that returns the sign-in service, or None while sign-in is not available.

    Without `tokens` and `people`, every caller on this machine is admitted, and no other caller."""

    def __init__(self, tokens: TokenFile | None, people: Callable[[], SignInService | None] | None = None) -> None:
        self._tokens = tokens
        self._open = tokens is None and people is None
        self.people: Callable[[], SignInService | None] = people or (lambda: None)
        self._anonymous_secret = secrets.token_bytes(32)

    def admit(self, request: Request, scope: Scope, *, for_teams: bool = False) -> Caller:
        """Return the caller of a request, before any byte of its body is read. Raises PageRefusal for a caller without
        the scope.

        for_teams: True if the page has a version for callers who see only some teams."""
        if self._open and not names_this_machine(request.headers.get("host", "")):
            raise PageRefusal(403, "Wrong host", "without tokens these pages answer only under localhost or 127.0.0.1")
        caller = self._caller(request)
        if caller.teams is not None and not for_teams:
            raise PageRefusal(403, "Not for one team", "this page shows every queue; you may see those of your teams")
        if not caller.may(scope):
            raise PageRefusal(
                403, "Not allowed", f"{caller.principal.name!r} lacks the scope {scope!r}, which the operator can grant"
            )
        if request.method == "POST":
            same_site(request)
        return caller

    def known(self, request: Request) -> Caller | None:
        """Return the sender of a request, whatever it may do; None for an unknown one. For the menu of refusals."""
        people = self.people()
        try:
            person = people.signed_in(request.cookies) if people is not None else None
            return Caller(person.principal, person.form_token, person) if person is not None else self._caller(request)
        except PageRefusal:
            return None

    def _caller(self, request: Request) -> Caller:
        if self._open:
            return Caller(Principal("anonymous", frozenset(SCOPES)), _mark(self._anonymous_secret))
        token, people = token_in(request.headers.get("authorization", "")), self.people()
        try:
            person = None
            if token is None and people is not None:
                person = people.person(request.cookies, renewable=renewable(request))
            if person is not None:
                return Caller(person.principal, person.form_token, person)
            if self._tokens is None:
                raise Unauthenticated("not signed in")
            return Caller(self._tokens.principal_of(token), _mark((token or "").encode()))
        except Unauthenticated as error:
            # If people sign in, a form with an expired session must not make the browser prompt for a password.
            challenge = _BASIC if people is None else _BEARER
            raise PageRefusal(401, "Not signed in", str(error), {"WWW-Authenticate": challenge}) from error


def renewable(request: Request) -> bool:
    """Return True if a browser requests a page, which is answered with a redirect to the sign-in if need be."""
    return request.method == "GET" and "text/html" in request.headers.get("accept", "")


def check_form(caller: Caller, form: Fields) -> None:
    """Raise PageRefusal if a form does not come from one of the caller's own pages."""
    if not hmac.compare_digest(sent(form, FORM_TOKEN).encode(), caller.mark.encode()):
        raise PageRefusal(403, "An old form", "this form belongs to another session; open the page again")


def _mark(secret: bytes) -> str:
    return hmac.digest(secret, b"gputally fairshare form", "sha256").hex()


def same_site(request: Request) -> None:
    """Raise PageRefusal if the browser reports that a page of another site sent the request."""
    origin = request.headers.get("origin", "null")  # the controller's own pages send `null` (no referrer)
    same_origin = origin == "null" or origin.partition("://")[2] == request.headers.get("host", "")
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") or not same_origin:
        raise PageRefusal(403, "Another site", "pages of other sites may not send forms to this site")


_REFUSED = {
    "no-provider": (404, "No such provider"),
    "too-long": (400, "Too long"),
    "unauthenticated": (401, "Not signed in"),
    "cross-site": (403, "An old form"),
    "authority-unavailable": (503, "The provider does not answer"),
}


class SignInPages:
    """Implements `gputally.server.sign_in.SignInSite` for the controller's pages."""

    def __init__(
        self, people: Callable[[], SignInService | None], page: Callable[..., Response], *, elsewhere: bool
    ) -> None:
        """elsewhere: True if another program signs people in at the address of these pages."""
        self._people = people
        self._page = page
        self._elsewhere = elsewhere

    def people(self, _: Request) -> SignInService:
        if self._elsewhere:
            raise PageRefusal(
                404, "No such page", "the accountant signs people in and out: open these pages at its address"
            )
        service = self._people()
        if service is None:
            raise PageRefusal(404, "No such page", "sign-in is not configured on this server; send a token")
        return service

    async def form(self, request: Request) -> Fields:
        same_site(request)
        return fields_of(await read_form(request, _MOST_SIGN_OUT_BYTES))

    def page(self, _: Request, template: str, /, **values: Any) -> Response:
        return self._page(template, None, **values)

    def refusal(self, kind: Kind, detail: str) -> Exception:
        status, title = _REFUSED[kind]
        return PageRefusal(status, title, detail, {"Retry-After": "5"} if status == 503 else None)
