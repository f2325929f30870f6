"""Authenticates requests for the controller's pages, limits what each caller may see, reads forms, refuses requests,
and serves the sign-in pages.

A token is sent as a bearer token, or as the password of Basic, which browsers can ask for. Forms contain a secret value
made from the caller's own token or session: a page of another site cannot compute it, and every replica can check it.
The server stores nothing; a person's rights are looked up in the grants at every request."""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gputally.base.clock import Clock
from gputally.base.errors import CannotStart, FairshareError
from gputally.server import config_loading
from gputally.server.config_loading import WatchedFile
from gputally.server.request_handling import read_body
from gputally.server.sign_in import FORM_TOKEN, CookieSigner, Kind, Person, SignInService, read_key
from gputally.server.tokens_and_grants import (
    SCOPES,
    Callers,
    Principal,
    Scope,
    TokenFile,
    Unauthenticated,
    names_this_machine,
    token_in,
)

Fields = Mapping[str, Sequence[str]]
"""Every value of every field of a form, as sent."""
MOST_BYTES = 2 * 1024 * 1024
"""Size of the largest form; a policy of two thousand queues needs half of it."""
MOST_FIELDS = 25_000
BODY_S = 10.0
_FORM = "application/x-www-form-urlencoded"


class Refusal(HTTPException):
    """A request is refused. The message says why and is sent to the caller."""

    def __init__(self, status: int, title: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.title = title


def refusal(error: HTTPException) -> Refusal:
    """Convert the framework's refusals to those of the pages."""
    if isinstance(error, Refusal):
        return error
    title, detail = {
        404: ("No such page", "there is nothing at this address"),
        405: ("Not like that", "this address takes no such request"),
    }.get(error.status_code, (HTTPStatus(error.status_code).phrase, error.detail))
    return Refusal(error.status_code, title, detail, error.headers)


async def read_form(request: Request) -> Fields:
    """Read the fields of a form. Raises HTTPException for a body that is too large, too slow or not a form."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise HTTPException(415, f"forms are {_FORM}")
    content = await read_body(request, MOST_BYTES, BODY_S)
    try:
        return parse_qs(content.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise HTTPException(400, "not a form, or one with too many fields") from error


def sent(form: Fields, name: str) -> str:
    """Return the first value of a form's field, as it was sent."""
    return (form.get(name) or ("",))[0]


PROGRAM = "gputally-fairshare"
"""Name that separates these cookies from the accountant's: a session there is not valid here, even with the
same key."""
_LOOK_EVERY_MS = 1_000


class NoSessions(FairshareError):
    """There is no key to sign sessions with."""


class SignIns:
    """Returns the sign-in service of the callers file that is in force. Thread-safe; looks at the file at most once a
    second.

    report: called with the faults of a version that is not put in force.

    Raises FileFault for an invalid first version, NoSessions for the key."""

    def __init__(
        self,
        callers: Path,
        key: Path,
        public_url: str,
        session_seconds: int,
        clock: Clock,
        report: Callable[[str], None],
    ) -> None:
        try:
            self._seal = CookieSigner(read_key(key), PROGRAM)
        except CannotStart as error:
            raise NoSessions(f"pages_session_key: {error}") from error
        self._clock = clock
        self._public_url = public_url
        self._session_seconds = session_seconds
        self._lock = threading.Lock()
        self._file = WatchedFile(callers, lambda path: config_loading.load_yaml(path, Callers), report, self._enforce)
        self._looked_ms = clock.monotonic_ms()
        self._people: SignInService | None = None
        self._enforce(self._file.current)

    def __call__(self) -> SignInService | None:
        """Return the sign-in service of the current file; None if none of its issuers has a login."""
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
            self._people = SignInService(callers, self._clock, self._seal, self._public_url, self._session_seconds)


_BASIC = 'Basic realm="gputally: any name, the token as password", charset="UTF-8"'
_BEARER = 'Bearer realm="gputally"'


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller.

    mark: the secret value of the caller's forms.
    person: the signed-in person; None for a token."""

    principal: Principal
    mark: str
    person: Person | None = None

    def may(self, scope: Scope) -> bool:
        return self.principal.may(scope)

    @property
    def teams(self) -> frozenset[str] | None:
        """Return the only teams whose queues the caller sees; None for all."""
        return self.principal.teams


class PageAuthentication:
    """Authenticates requests for the pages by token or signed-in session.

    people: returns the sign-in service, None while there is none. If neither tokens nor people are configured, only
    requests whose Host header names this machine (localhost) are admitted, and they may do everything."""

    def __init__(self, tokens: TokenFile | None, people: Callable[[], SignInService | None] | None = None) -> None:
        self._tokens = tokens
        self._people = people
        self._own = secrets.token_bytes(32)

    def people(self) -> SignInService | None:
        """Return the sign-in for the pages; None if it is not configured."""
        return self._people() if self._people is not None else None

    def admit(self, request: Request, scope: Scope, form: Fields | None = None, *, for_teams: bool = False) -> Caller:
        """Return the caller. Raises Refusal. A form must also come from one of these pages.

        for_teams: the page has a version for callers who see only some teams."""
        if self._tokens is None and self._people is None and not names_this_machine(request.headers.get("host", "")):
            raise Refusal(403, "Wrong host", "without tokens these pages answer only under localhost or 127.0.0.1")
        caller = self._caller(request)
        if caller.teams is not None and not for_teams:
            raise Refusal(403, "Not for one team", "this page is about every queue, and you see those of your teams")
        if not caller.may(scope):
            raise Refusal(403, "Not allowed", f"{caller.principal.name!r} lacks the scope {scope!r}")
        if form is not None:
            _from_here(request, form, caller.mark)
        return caller

    def _caller(self, request: Request) -> Caller:
        if self._tokens is None and self._people is None:
            return Caller(Principal("anonymous", frozenset(SCOPES)), _mark(self._own))
        token = token_in(request.headers.get("authorization", ""))
        try:
            person = self._signed_in(request) if token is None else None
            if person is not None:
                return Caller(person.principal, person.form_token, person)
            if self._tokens is None:
                raise Unauthenticated("not signed in")
            return Caller(self._tokens.principal_of(token), _mark((token or "").encode()))
        except Unauthenticated as error:
            # If people sign in, a form with an expired session must not make the browser ask for a password.
            challenge = _BASIC if self.people() is None else _BEARER
            raise Refusal(401, "Who are you?", str(error), {"WWW-Authenticate": challenge}) from error

    def _signed_in(self, request: Request) -> Person | None:
        people = self.people()
        return people.person(request.cookies) if people is not None else None


def _mark(secret: bytes) -> str:
    return hmac.digest(secret, b"gputally fairshare form", "sha256").hex()


def _from_here(request: Request, form: Fields, mark: str) -> None:
    same_site(request)
    if not hmac.compare_digest(sent(form, FORM_TOKEN).encode(), mark.encode()):
        raise Refusal(403, "An old form", "the form is not one that was made for you; open the page again")


def same_site(request: Request) -> None:
    """Raise Refusal if the browser reports that a page of another site sent the request."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Refusal(403, "Another site", "pages of other sites may not send forms to this site")
    origin = request.headers.get("origin", "null")  # our own pages send `null` (no referrer)
    if origin != "null" and urlsplit(origin).netloc != request.headers.get("host", ""):
        raise Refusal(403, "Another site", "pages of other sites may not send forms to this site")


_REFUSED = {
    "no-provider": (404, "No such provider"),
    "too-long": (400, "Too long"),
    "unauthenticated": (401, "Not signed in"),
    "cross-site": (403, "An old form"),
    "authority-unavailable": (503, "The provider does not answer"),
}


class SignInPages:
    """The controller's side of the sign-in routes; implements gputally.server.sign_in.SignInSite."""

    def __init__(self, people: Callable[[], SignInService | None], page: Callable[..., Response]) -> None:
        self._people = people
        self._page = page

    def people(self, _: Request) -> SignInService:
        found = self._people()
        if found is None:
            raise Refusal(404, "No such page", "sign-in is not configured on this server; send a token")
        return found

    async def form(self, request: Request) -> Fields:
        same_site(request)
        return await read_form(request)

    def page(self, _: Request, template: str, /, **values: Any) -> Response:
        return self._page(template, None, **values)

    def refusal(self, kind: Kind, detail: str) -> Exception:
        status, title = _REFUSED[kind]
        return Refusal(status, title, detail, {"Retry-After": "5"} if status == 503 else None)
