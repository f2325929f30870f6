"""Signs people in to the pages and out again: routes, signed cookies, redirects.

The server stores nothing: a session is a signed cookie. The grants of a person are not in the cookie but are looked up
at every request, so a withdrawn grant ends at once. The session of an issuer that is no longer configured is invalid.

Cookies are JWTs under a key that only the servers of the pages have. (HS256 is enough, because the same servers make
and verify them.) All replicas share the key. A sign-in cookie is never accepted as a session, nor the cookie of other
pages.

Scripts cannot read the cookies, and browsers do not send them with posts from other sites; under https a cookie is
bound to this host (`__Host-`, `__Secure-`: RFC 6265bis §4.1.3).

`sign_in_routes` serves the pages; each program defines the look of a page and of a refusal (`SignInSite`). These pages
need no sign-in and show no data."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol
from urllib.parse import quote, urlsplit

import jwt
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gputally.base import atomic_file
from gputally.base.clock import Clock
from gputally.base.errors import CannotStart
from gputally.base.units import MS_PER_SECOND
from gputally.server import openid_connect, tokens_and_grants
from gputally.server.openid_connect import Keys, Provider
from gputally.server.tokens_and_grants import AuthorityUnavailable, Callers, Principal, Unauthenticated, granted

Sort = Literal["sign-in", "session"]
_KEY_BYTES: Final = 32
_MOST_BYTES: Final = 4_000
"""Largest cookie that browsers store."""


@dataclass(frozen=True, slots=True)
class SignIn:
    """A sign-in in progress at the provider. next: the page to show afterwards."""

    issuer: str
    state: str
    nonce: str
    verifier: str
    next: str


@dataclass(frozen=True, slots=True)
class Session:
    """A session after a completed sign-in. id: unique to the session, for its forms."""

    issuer: str
    user: str
    groups: tuple[str, ...]
    id: str


class CookieSigner:
    """Signs and verifies cookies.

    key: secret, the same after restarts.
    program: the name of the program whose pages these are, also part of the cookies' names."""

    def __init__(self, key: bytes, program: str = "gputally") -> None:
        self._key = key
        self.program = program

    def sign_in(self, under_way: SignIn, now_ms: int, seconds: int) -> str:
        return self._sealed("sign-in", _plain(under_way), now_ms, seconds)

    def session(self, session: Session, now_ms: int, seconds: int) -> str:
        """Return a session as cookie text. Raises Unauthenticated if a person is in more groups than a cookie
        can hold."""
        text = self._sealed("session", _plain(session), now_ms, seconds)
        if len(text) > _MOST_BYTES:
            raise Unauthenticated("this person is in more groups than a session can hold")
        return text

    def opened_sign_in(self, text: str, now_ms: int) -> SignIn:
        """Verify and decode a sign-in. Raises Unauthenticated."""
        found = self._opened("sign-in", text, now_ms)
        return SignIn(found["issuer"], found["state"], found["nonce"], found["verifier"], found["next"])

    def opened_session(self, text: str, now_ms: int) -> Session:
        """Verify and decode a session. Raises Unauthenticated."""
        found = self._opened("session", text, now_ms)
        return Session(found["issuer"], found["user"], tuple(found["groups"]), found["id"])

    def form_token(self, session: Session) -> str:
        """Return the secret that every form of this session must contain."""
        return hmac.new(self._key, b"form:" + session.id.encode(), hashlib.sha256).hexdigest()

    def _sealed(self, sort: Sort, content: Mapping[str, Any], now_ms: int, seconds: int) -> str:
        times = {"aud": f"{self.program}-{sort}", "exp": now_ms // MS_PER_SECOND + seconds}
        return jwt.encode({**content, **times}, self._key, algorithm="HS256")

    def _opened(self, sort: Sort, text: str, now_ms: int) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = jwt.decode(
                text,
                self._key,
                algorithms=["HS256"],
                audience=f"{self.program}-{sort}",
                options={"require": ["exp"], "verify_exp": False},
            )
        except (jwt.PyJWTError, ValueError) as error:
            raise Unauthenticated("the cookie was not signed by this site") from error
        if claims["exp"] * MS_PER_SECOND <= now_ms:
            raise Unauthenticated("signed in too long ago")
        return claims


def key_of(path: Path, remedy: str = f"a key has at least {_KEY_BYTES} bytes") -> bytes:
    """Read the key from a file; another key ends all sessions. Raises CannotStart. remedy: advice for a key that is too
    short."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise CannotStart(f"{path}: {error.strerror}") from error
    if len(key) < _KEY_BYTES:
        raise CannotStart(f"{path}: holds no key; {remedy}")
    return key


def key_in(folder: Path) -> bytes:
    """Return the key in a folder, and create it on first use. Raises CannotStart."""
    path = folder / "session.key"
    try:
        if not path.exists():
            atomic_file.write(path, secrets.token_bytes(_KEY_BYTES), 0o600)
    except OSError as error:
        raise CannotStart(f"{path}: {error.strerror}") from error
    return key_of(path, "remove it, and a new one is made")


def _plain(value: SignIn | Session) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


LEAVE: Final = "/sign-in"
CALLBACK: Final = "/sign-in/done"
OUT: Final = "/sign-out"
LEFT: Final = "/signed-out"
LONGEST: Final = 4_000
"""Longest accepted query parameter of a browser, in characters."""


class CrossSite(Exception):
    """A form that does not belong to this session."""


def to_sign_in(here: str) -> str:
    """Return the sign-in address that leads back to `here`."""
    return f"{LEAVE}?next={quote(here, safe='')}"


def own_path(text: str) -> str:
    """Return the text if it is a path of this server, else "/", so that a sign-in never leads to another site."""
    parts = urlsplit(text)
    if not text.startswith("/") or text.startswith("//") or "\\" in text or parts.scheme or parts.netloc:
        return "/"
    return text if text.isprintable() else "/"


UNDER_WAY_SECONDS: Final = 600
"""How long a sign-in at the provider may take."""
_CHANCE_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Person:
    """A signed-in person. form_token: the token that every form of this person must carry."""

    principal: Principal
    form_token: str

    def allows(self, form_token: str) -> bool:
        """Return whether a form came from a page of this session."""
        return secrets.compare_digest(self.form_token.encode(), form_token.encode())


class SignInService:
    """Signs people in and out.

    callers: the file in force.
    public_url: the address of the pages in a browser. provider: makes the client of an issuer."""

    def __init__(
        self,
        callers: Callers,
        clock: Clock,
        seal: CookieSigner,
        public_url: str,
        session_seconds: int,
        keys: Callable[[openid_connect.Fetch, Clock], Keys] = Keys,
    ) -> None:
        self._grants = callers.grants
        self._clock = clock
        self._seal = seal
        self._redirect = public_url.rstrip("/") + CALLBACK
        self._session_seconds = session_seconds
        self._secure = public_url.startswith("https:")
        self._session_name = ("__Host-" if self._secure else "") + seal.program
        self._under_way_name = ("__Secure-" if self._secure else "") + f"{seal.program}-sign-in"
        self.providers = tuple(Provider(one, one.login) for one in callers.issuers if one.login is not None)
        self._keys = {one.issuer.issuer: keys(openid_connect.source(one.issuer), clock) for one in self.providers}

    def leave(self, provider: Provider, following: str) -> Response:
        """Redirect to the provider, and afterwards to `following` if it is a path of this server. Raises
        AuthorityUnavailable."""
        state, nonce, verifier = (secrets.token_urlsafe(_CHANCE_BYTES) for _ in range(3))
        under_way = SignIn(provider.issuer.issuer, state, nonce, verifier, own_path(following))
        address = provider.leave_for(self._redirect, state, nonce, verifier)
        sealed = self._seal.sign_in(under_way, self._clock.wall_ms(), UNDER_WAY_SECONDS)
        answer = RedirectResponse(address, 303)
        self._keep(answer, self._under_way_name, LEAVE, sealed, UNDER_WAY_SECONDS)
        return answer

    def arrive(self, cookies: Mapping[str, str], state: str, code: str) -> Response:
        """Handle the return from the provider and start a session. code: "" if the provider gave none.

        Raises Unauthenticated, AuthorityUnavailable."""
        if not code:
            raise Unauthenticated("the provider did not let you in")
        now = self._clock.wall_ms()
        under_way = self._seal.opened_sign_in(cookies.get(self._under_way_name, ""), now)
        if not secrets.compare_digest(under_way.state.encode(), state.encode()):
            raise Unauthenticated("this is the answer to another sign-in")
        provider = self._provider(under_way.issuer)
        token = provider.id_token(code, self._redirect, under_way.verifier)
        said = tokens_and_grants.unverified(token)
        if said is None:
            raise Unauthenticated("the provider's token is none")
        claims = openid_connect.verified(
            token, said, under_way.issuer, provider.login.client_id, self._keys[under_way.issuer], now
        )
        openid_connect.check_party(claims, {provider.login.client_id})
        if not secrets.compare_digest(str(claims.get("nonce", "")).encode(), under_way.nonce.encode()):
            raise Unauthenticated("the provider's token is for another sign-in")
        user, groups = openid_connect.person(claims, provider.issuer)
        known = {group for grant in self._grants for group in grant.groups}
        session = Session(
            under_way.issuer, user, tuple(sorted(known.intersection(groups))), secrets.token_urlsafe(_CHANCE_BYTES)
        )
        answer = RedirectResponse(under_way.next, 303)
        sealed = self._seal.session(session, now, self._session_seconds)
        self._keep(answer, self._session_name, "/", sealed, self._session_seconds)
        self._keep(answer, self._under_way_name, LEAVE, "", 0)
        return answer

    def person(self, cookies: Mapping[str, str]) -> Person | None:
        """Return the signed-in person; None for a browser without a session. Raises Unauthenticated for a session that
        has ended."""
        cookie = cookies.get(self._session_name)
        if not cookie:
            return None
        session = self._seal.opened_session(cookie, self._clock.wall_ms())
        self._provider(session.issuer)
        scopes, teams = granted(self._grants, session.user, session.groups)
        return Person(Principal(session.user, scopes, teams=teams), self._seal.form_token(session))

    def sign_out(self, cookies: Mapping[str, str], form_token: str) -> Response:
        """Delete the session in this browser. Raises CrossSite.

        The provider is not signed out, so it could sign the person in again."""
        try:
            found = self.person(cookies)
        except Unauthenticated:
            found = None
        if found is not None and not found.allows(form_token):
            raise CrossSite("this form does not belong to this session")
        answer = RedirectResponse(LEFT, 303)
        self._keep(answer, self._session_name, "/", "", 0)
        return answer

    def _keep(self, answer: Response, name: str, path: str, value: str, seconds: int) -> None:
        """Have the browser keep a cookie; 0 seconds: forget it."""
        answer.set_cookie(name, value, seconds, path=path, secure=self._secure, httponly=True, samesite="lax")

    def _provider(self, issuer: str) -> Provider:
        found = next((one for one in self.providers if one.issuer.issuer == issuer), None)
        if found is None:
            raise Unauthenticated("that provider has no sign-in any more")
        return found


MARK = "form_token"
"""Name of the form field with the session's secret."""
PATHS = frozenset({LEAVE, CALLBACK, OUT, LEFT})
Kind = Literal["no-provider", "too-long", "unauthenticated", "cross-site", "authority-unavailable"]


class SignInSite(Protocol):
    """The interface of a program that serves these pages."""

    def people(self, request: Request, /) -> SignInService:
        """Return the service. Raises a refusal if sign-in is not configured."""
        ...

    async def form(self, request: Request) -> Mapping[str, Sequence[str]]:
        """Return the fields of a form of these pages. Raises a refusal for any other form."""
        ...

    def page(self, request: Request, template: str, /, **values: Any) -> Response: ...

    def refusal(self, kind: Kind, detail: str) -> Exception:
        """Return the exception to raise."""
        ...


def sign_in_routes(site: SignInSite) -> list[Route]:
    """The routes of all sign-in pages."""

    def parameter(request: Request, name: str, default: str = "") -> str:
        text = request.query_params.get(name) or default
        if len(text) > LONGEST:
            raise site.refusal("too-long", f"a parameter has at most {LONGEST} characters")
        return text

    async def leave(request: Request) -> Response:
        """Redirect to the provider; if there are several, show a page to choose one."""
        people = site.people(request)
        following, chosen = parameter(request, "next", "/"), parameter(request, "with", "0")
        number = int(chosen) if chosen.isascii() and chosen.isdigit() and len(chosen) < 4 else -1
        if not 0 <= number <= len(people.providers):
            raise site.refusal("no-provider", "there is no such provider")
        if not number and len(people.providers) > 1:
            return await run_in_threadpool(
                site.page, request, "sign_in.html", providers=people.providers, next=own_path(following)
            )
        try:
            return await run_in_threadpool(people.leave, people.providers[max(number, 1) - 1], following)
        except AuthorityUnavailable as error:
            raise site.refusal("authority-unavailable", str(error)) from error

    async def done(request: Request) -> Response:
        """Handle the return from the provider with a code."""
        people = site.people(request)
        code = "" if parameter(request, "error") else parameter(request, "code")
        try:
            return await run_in_threadpool(people.arrive, request.cookies, parameter(request, "state"), code)
        except Unauthenticated as error:
            raise site.refusal("unauthenticated", f"{error}; go to {LEAVE} to begin again") from error
        except AuthorityUnavailable as error:
            raise site.refusal("authority-unavailable", str(error)) from error

    async def leave_for_good(request: Request) -> Response:
        """Delete the session in this browser."""
        people = site.people(request)
        mark = (await site.form(request)).get(MARK) or ("",)
        try:
            return people.sign_out(request.cookies, mark[0])
        except CrossSite as error:
            raise site.refusal("cross-site", str(error)) from error

    async def left(request: Request) -> Response:
        """Show the page after signing out."""
        site.people(request)
        return await run_in_threadpool(site.page, request, "signed_out.html")

    return [
        Route(LEAVE, leave),
        Route(CALLBACK, done),
        Route(OUT, leave_for_good, methods=["POST"]),
        Route(LEFT, left),
    ]
