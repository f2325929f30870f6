"""Signs people in to the pages and out again: routes, signed cookies, redirects.

A session is a signed cookie with the person's groups. It has no grants; the server looks them up at every request, so a
withdrawn grant ends at once. The session of an issuer that is no longer configured is invalid, and so is one that the
person ended (`gputally.server.ended_sessions`).

The groups are those of the last sign-in. After half the time `Login.groups_valid` a page sends the browser to the
provider, which returns it at once with the present groups while the person is signed in there. After the whole time
nothing else is answered either, so a person who was removed from a group loses its rights within that time.

Cookies are JWTs, signed by HS256 with a key that all replicas of the pages share. A cookie names the address of the
pages and its purpose (a sign-in in progress, or a session), and the server accepts it for no other. Programs that serve
pages at one address share the key, and so a session there is valid for all of them.

Scripts cannot read the cookies, and browsers do not send them with posts from other sites. Under https a cookie is
bound to this host (`__Host-`, `__Secure-`: RFC 6265bis §4.1.3).

`sign_in_routes` serves the pages. Each program renders the pages and refusals itself (`SignInSite`). These pages need
no sign-in and show no data."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol
from urllib.parse import quote, urlsplit

import jwt
import structlog
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gputally.base import atomic_file
from gputally.base.clock import Clock
from gputally.base.errors import CannotStart
from gputally.base.units import MS_PER_SECOND
from gputally.server import openid_connect
from gputally.server.ended_sessions import EndedSessions
from gputally.server.openid_connect import Keys, Provider
from gputally.server.outgoing_calls import OutgoingCalls
from gputally.server.tokens_and_grants import (
    AuthorityUnavailable,
    Callers,
    Principal,
    Unauthenticated,
    UnknownToken,
    granted,
    unverified,
)

CookieKind = Literal["sign-in", "session"]
_KEY_BYTES: Final = 32
_MOST_BYTES: Final = 4_000
"""Largest size of a cookie that browsers store."""


@dataclass(frozen=True, slots=True)
class SignIn:
    """A sign-in in progress at the provider. next: the path of the page to show afterwards."""

    issuer: str
    state: str
    nonce: str
    verifier: str
    next: str


@dataclass(frozen=True, slots=True)
class Session:
    """A session after a completed sign-in.

    id: a random text from which the token of the session's forms is derived. It stays when the groups are renewed, so
        that forms that are open stay valid.
    began_ms: when the provider last named the groups."""

    issuer: str
    user: str
    groups: tuple[str, ...]
    id: str
    began_ms: int


class CookieSigner:
    """Signs and verifies cookies.

    key: the secret, which stays the same after restarts.
    public_url: the address of the pages in a browser; only its scheme, host and port count."""

    def __init__(self, key: bytes, public_url: str) -> None:
        self._key = key
        address = urlsplit(public_url)
        self._site = f"{address.scheme}://{address.netloc}".lower()
        self.name = "gputally" + (f"-{address.port}" if address.port is not None else "")
        """The cookies' name. It has the port, because browsers send a cookie to every port of its host."""

    def encode_sign_in(self, sign_in: SignIn, now_ms: int, seconds: int) -> str:
        """Return a sign-in as cookie text, valid for so many seconds."""
        return self._encode("sign-in", sign_in, now_ms, seconds)

    def encode_session(self, session: Session, now_ms: int, seconds: int) -> str:
        """Return a session as cookie text, valid for so many seconds. Raises Unauthenticated if a cookie cannot hold
        the person's groups."""
        text = self._encode("session", session, now_ms, seconds)
        if len(text) > _MOST_BYTES:
            raise Unauthenticated(
                f"this person is in {len(session.groups)} groups with grants, more than a session can hold"
            )
        return text

    def decode_sign_in(self, text: str, now_ms: int) -> SignIn:
        """Verify and decode a sign-in. Raises Unauthenticated."""
        claims = self._decode("sign-in", text, now_ms)
        return SignIn(claims["issuer"], claims["state"], claims["nonce"], claims["verifier"], claims["next"])

    def decode_session(self, text: str, now_ms: int) -> Session:
        """Verify and decode a session. Raises Unauthenticated."""
        claims = self._decode("session", text, now_ms)
        try:
            return Session(
                claims["issuer"], claims["user"], tuple(claims["groups"]), claims["id"], int(claims["began_ms"])
            )
        except KeyError as error:
            raise Unauthenticated("the cookie is of another version of this site") from error

    def form_token(self, session: Session) -> str:
        """Return the secret that every form of this session must contain."""
        return hmac.new(self._key, b"form:" + session.id.encode(), hashlib.sha256).hexdigest()

    def _encode(self, kind: CookieKind, content: SignIn | Session, now_ms: int, seconds: int) -> str:
        fields = {name: getattr(content, name) for name in content.__slots__}
        claims = {"aud": f"{kind} at {self._site}", "exp": now_ms // MS_PER_SECOND + seconds}
        return jwt.encode({**fields, **claims}, self._key, algorithm="HS256")

    def _decode(self, kind: CookieKind, text: str, now_ms: int) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = jwt.decode(
                text,
                self._key,
                algorithms=["HS256"],
                audience=f"{kind} at {self._site}",
                options={"require": ["exp"], "verify_exp": False},
            )
        except (jwt.PyJWTError, ValueError) as error:
            raise Unauthenticated("the cookie was not signed by this site") from error
        if claims["exp"] * MS_PER_SECOND <= now_ms:
            raise Unauthenticated("the sign-in or the session has expired")
        return claims


def read_key(path: Path, remedy: str = f"a key has at least {_KEY_BYTES} bytes") -> bytes:
    """Read the cookies' key from a file. Another key ends all sessions. remedy: the advice for a key that is too short.
    Raises CannotStart."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise CannotStart(f"{path}: {error.strerror}") from error
    if len(key) < _KEY_BYTES:
        raise CannotStart(f"{path}: the key is too short; {remedy}")
    return key


def read_or_create_key(folder: Path) -> bytes:
    """Read the cookies' key from a folder, and create it on first use. Raises CannotStart."""
    path = folder / "session.key"
    try:
        if not path.exists():
            atomic_file.write(path, secrets.token_bytes(_KEY_BYTES), 0o600)
    except OSError as error:
        raise CannotStart(f"{path}: {error.strerror}") from error
    return read_key(path, "remove the file, and the program creates a new one")


SIGN_IN_PATH: Final = "/sign-in"
CALLBACK_PATH: Final = "/sign-in/done"
SIGN_OUT_PATH: Final = "/sign-out"
SIGNED_OUT_PATH: Final = "/signed-out"
LONGEST_PARAMETER: Final = 4_000
"""Longest accepted query parameter, in characters."""


class CrossSite(Exception):
    """A form was not sent by a page of the caller's own session."""


def to_sign_in(path: str) -> str:
    """Return the path of the sign-in page that leads back to `path`."""
    return f"{SIGN_IN_PATH}?next={quote(path, safe='')}"


def own_path(text: str) -> str:
    """Return the text if it is a path of this server, else "/", so that a sign-in never leads to another site."""
    inside = text.startswith("/") and not text.startswith("//") and "\\" not in text
    return text if inside and text.isprintable() else "/"


SIGN_IN_SECONDS: Final = 600
"""Time that a person has to sign in at the provider."""
MOST_SIGN_INS: Final = 10
"""Sign-ins that may be in progress in one browser, as when it opens several pages at once. Each has a cookie."""
_NAME_OF_STATE: Final = 22
"""The characters of a state that a cookie's name contains."""
_RANDOM_BYTES: Final = 32
_CALLS_AT_ONCE: Final = 4
"""Largest number of calls to providers at a time."""
_KEYS_WAIT_SECONDS: Final = 5.0
"""How long a sign-in waits while another request fetches the provider's keys."""


@dataclass(frozen=True, slots=True)
class Person:
    """A signed-in person. form_token: the secret that every form of the person's session must contain."""

    principal: Principal
    form_token: str

    def allows(self, form_token: str) -> bool:
        """Return True if a form with this token came from a page of the session."""
        return secrets.compare_digest(self.form_token.encode(), form_token.encode())


class SignInService:
    """Signs people in and out.

    callers: the callers file in force.
    signer: signs the cookies.
    public_url: the address of the pages in a browser.
    ended: the sessions that people ended; None: those of this object.
    most_groups_valid_s: upper limit of `Login.groups_valid`; None: none."""

    def __init__(
        self,
        callers: Callers,
        clock: Clock,
        signer: CookieSigner,
        public_url: str,
        session_seconds: int,
        ended: EndedSessions | None = None,
        most_groups_valid_s: int | None = None,
    ) -> None:
        self._most_groups_valid_s = most_groups_valid_s
        self._ended = ended or EndedSessions(clock)
        self.calls = OutgoingCalls("the provider", _CALLS_AT_ONCE)
        self.sign_outs = OutgoingCalls("the store of ended sessions", _CALLS_AT_ONCE)
        self._grants = callers.grants
        self._clock = clock
        self._signer = signer
        self._redirect = public_url.rstrip("/") + CALLBACK_PATH
        self._session_seconds = session_seconds
        self._secure = public_url.startswith("https:")
        self._session_cookie = ("__Host-" if self._secure else "") + signer.name
        self._sign_in_cookie = ("__Secure-" if self._secure else "") + f"{signer.name}-sign-in"
        self.providers = tuple(Provider(issuer, issuer.login) for issuer in callers.issuers if issuer.login is not None)
        self._keys = {
            provider.issuer.issuer: Keys(provider.issuer.issuer, openid_connect.key_source(provider.issuer), clock)
            for provider in self.providers
        }

    def begin(self, provider: Provider, next_page: str, cookies: Mapping[str, str]) -> Response:
        """Redirect to the provider, and afterwards to `next_page` if it is a path of this server. Raises
        AuthorityUnavailable."""
        state, nonce, verifier = (secrets.token_urlsafe(_RANDOM_BYTES) for _ in range(3))
        sign_in = SignIn(provider.issuer.issuer, state, nonce, verifier, own_path(next_page))
        address = provider.authorization_url(self._redirect, state, nonce, verifier)
        cookie = self._signer.encode_sign_in(sign_in, self._clock.wall_ms(), SIGN_IN_SECONDS)
        answer = RedirectResponse(address, 303)
        self.set_cookie(answer, self._cookie_of(state), SIGN_IN_PATH, cookie, SIGN_IN_SECONDS)
        begun = [name for name in cookies if name.startswith(self._sign_in_cookie)]
        for name in begun[
            : max(len(begun) + 1 - MOST_SIGN_INS, 0)
        ]:  # browsers send the oldest first (RFC 6265bis §5.7.3)
            self.set_cookie(answer, name, SIGN_IN_PATH, "", 0)
        return answer

    def complete(self, cookies: Mapping[str, str], state: str, code: str) -> Response:
        """Handle the return from the provider and start a session. code: "" if the provider sent none.

        Raises Unauthenticated, AuthorityUnavailable."""
        if not code:
            raise Unauthenticated("the provider refused the sign-in")
        now = self._clock.wall_ms()
        begun = cookies.get(self._cookie_of(state))
        if not begun:
            raise Unauthenticated("no sign-in with this answer is in progress in this browser")
        sign_in = self._signer.decode_sign_in(begun, now)
        if not secrets.compare_digest(sign_in.state.encode(), state.encode()):
            raise Unauthenticated("this is the answer to another sign-in")
        provider = self._provider(sign_in.issuer)
        token = provider.id_token(code, self._redirect, sign_in.verifier)
        try:
            content = unverified(token, openid_connect.MOST_ANSWER_BYTES)
        except UnknownToken as error:
            raise AuthorityUnavailable("the provider's ID token is not a JWT") from error
        claims = openid_connect.verified_claims(
            token,
            content,
            sign_in.issuer,
            provider.login.client_id,
            self._keys[sign_in.issuer],
            now,
            _KEYS_WAIT_SECONDS,
        )
        openid_connect.check_party(claims, {provider.login.client_id})
        if not secrets.compare_digest(str(claims.get("nonce", "")).encode(), sign_in.nonce.encode()):
            raise Unauthenticated("the provider's ID token is for another sign-in")
        user, groups = openid_connect.person(claims, provider.issuer)
        known = {group for grant in self._grants for group in grant.groups}
        of_grants = tuple(sorted(known.intersection(groups)))
        fault = openid_connect.groups_fault(claims, provider.issuer)
        if fault and not granted(self._grants, user, of_grants).scopes:
            raise Unauthenticated(fault)
        session = Session(sign_in.issuer, user, of_grants, self._id_for(cookies, sign_in.issuer, user), now)
        answer = RedirectResponse(sign_in.next, 303)
        cookie = self._signer.encode_session(session, now, self._session_seconds)
        self.set_cookie(answer, self._session_cookie, "/", cookie, self._session_seconds)
        self.set_cookie(answer, self._cookie_of(state), SIGN_IN_PATH, "", 0)
        return answer

    def person(self, cookies: Mapping[str, str], *, renewable: bool = False) -> Person | None:
        """Return the signed-in person; None for a browser without a session. Raises Unauthenticated for a session that
        has ended, or whose groups are old.

        renewable: whether the caller sends this browser to the provider if the session is refused."""
        session = self._session(cookies)
        if session is None:
            return None
        age_ms = self._clock.wall_ms() - session.began_ms
        valid_s = self._provider(session.issuer).login.groups_valid
        if self._most_groups_valid_s is not None:
            valid_s = min(valid_s, self._most_groups_valid_s)
        valid_ms = valid_s * MS_PER_SECOND
        if age_ms >= (valid_ms // 2 if renewable else valid_ms):
            raise Unauthenticated("the groups of this session are old: open a page of this site to renew them")
        rights = granted(self._grants, session.user, session.groups)
        return Person(Principal(session.user, **rights._asdict()), self._signer.form_token(session))

    def cookie_digest(self, cookies: Mapping[str, str]) -> str:
        """Return a digest of this browser's session cookie, whether it is valid or not; "" without one."""
        cookie = cookies.get(self._session_cookie, "")
        return hashlib.sha256(cookie.encode()).hexdigest()[:32] if cookie else ""

    def ended(self) -> Mapping[str, int]:
        """Return the ended sessions, for another program that serves pages at the same address."""
        return self._ended.known()

    def signed_in(self, cookies: Mapping[str, str]) -> Person | None:
        """Return the signed-in person like `person`, but None for a session that has ended or whose groups are old. For
        pages that only offer to sign out."""
        try:
            return self.person(cookies)
        except Unauthenticated:
            return None

    def sign_out(self, cookies: Mapping[str, str], form_token: str) -> Response:
        """End the session in this browser, and wherever its cookie was copied. Raises CrossSite, and
        AuthorityUnavailable if other replicas cannot be told.

        The person stays signed in at the provider, which could sign the person in again without a password."""
        try:
            session = self._session(cookies)
        except Unauthenticated:
            session = None
        if session is not None:
            if not secrets.compare_digest(self._signer.form_token(session).encode(), form_token.encode()):
                raise CrossSite("this form does not belong to this session")
            # No cookie of the session is valid longer than one that is made now.
            self._ended.end(session.id, self._clock.wall_ms() + self._session_seconds * MS_PER_SECOND)
        answer = RedirectResponse(SIGNED_OUT_PATH, 303)
        self.set_cookie(answer, self._session_cookie, "/", "", 0)
        return answer

    def _session(self, cookies: Mapping[str, str]) -> Session | None:
        """Return the session of this browser, whatever the age of its groups; None without one. Raises
        Unauthenticated."""
        cookie = cookies.get(self._session_cookie)
        if not cookie:
            return None
        session = self._signer.decode_session(cookie, self._clock.wall_ms())
        self._provider(session.issuer)
        if self._ended.ended(session.id, session.began_ms):
            raise Unauthenticated("this session was ended by signing out")
        return session

    def _id_for(self, cookies: Mapping[str, str], issuer: str, user: str) -> str:
        """Return the id of the same person's session in this browser, or a new one."""
        try:
            present = self._session(cookies)
        except Unauthenticated:
            present = None
        if present is not None and (present.issuer, present.user) == (issuer, user):
            return present.id
        return secrets.token_urlsafe(_RANDOM_BYTES)

    def _cookie_of(self, state: str) -> str:
        """Return the name of the cookie of a sign-in in progress. Each has its own, so that several pages that a
        browser opens at once all come back."""
        return f"{self._sign_in_cookie}-{state[:_NAME_OF_STATE]}"

    def set_cookie(self, answer: Response, name: str, path: str, value: str, seconds: int) -> None:
        """Add a cookie to an answer. seconds: 0 to delete the cookie."""
        answer.set_cookie(name, value, seconds, path=path, secure=self._secure, httponly=True, samesite="lax")

    def _provider(self, issuer: str) -> Provider:
        provider = next((each for each in self.providers if each.issuer.issuer == issuer), None)
        if provider is None:
            raise Unauthenticated("the provider is no longer configured for sign-in")
        return provider


FORM_TOKEN = "form_token"  # noqa: S105 - the name of a field
"""Name of the form field with the session's secret."""
PATHS = frozenset({SIGN_IN_PATH, CALLBACK_PATH, SIGN_OUT_PATH, SIGNED_OUT_PATH})
Kind = Literal["no-provider", "too-long", "unauthenticated", "cross-site", "authority-unavailable"]
"""The reasons for which the sign-in pages refuse a request."""


class SignInSite(Protocol):
    """The program that serves the sign-in pages."""

    def people(self, request: Request, /) -> SignInService:
        """Return the program's sign-in service. Raises an exception that refuses the request if sign-in is not
        configured."""
        ...

    async def form(self, request: Request) -> Mapping[str, Sequence[str]]:
        """Return the fields of a form of these pages. Raises an exception that refuses the request for any other
        form."""
        ...

    def page(self, request: Request, template: str, /, **values: Any) -> Response:
        """Render a template of this package."""
        ...

    def refusal(self, kind: Kind, detail: str) -> Exception:
        """Return the exception for a refusal."""
        ...


def sign_in_routes(site: SignInSite) -> list[Route]:
    """Return the routes of all sign-in pages."""
    log = structlog.get_logger("http")

    def unavailable(error: AuthorityUnavailable) -> Exception:
        log.warning("sign_in_unavailable", reason=str(error))
        return site.refusal("authority-unavailable", str(error))

    def parameter(request: Request, name: str, default: str = "") -> str:
        text = request.query_params.get(name) or default
        if len(text) > LONGEST_PARAMETER:
            raise site.refusal("too-long", f"a parameter has at most {LONGEST_PARAMETER} characters")
        return text

    async def begin(request: Request) -> Response:
        """Redirect to the provider; with several providers, show a page to choose one of them."""
        people = site.people(request)
        next_page, chosen = parameter(request, "next", "/"), parameter(request, "with", "0")
        number = int(chosen) if chosen.isascii() and chosen.isdigit() and len(chosen) < 4 else -1
        if not 0 <= number <= len(people.providers):
            raise site.refusal("no-provider", f"there is no such provider; choose one at {SIGN_IN_PATH}")
        if not number and len(people.providers) > 1:
            return await run_in_threadpool(
                site.page, request, "sign_in.html", providers=people.providers, next=own_path(next_page)
            )
        try:
            provider = people.providers[max(number, 1) - 1]
            return await people.calls.run(people.begin, provider, next_page, request.cookies)
        except AuthorityUnavailable as error:
            raise unavailable(error) from error

    async def complete(request: Request) -> Response:
        """Start a session when the provider sends the browser back with a code."""
        people = site.people(request)
        code = "" if parameter(request, "error") else parameter(request, "code")
        try:
            return await people.calls.run(people.complete, request.cookies, parameter(request, "state"), code)
        except Unauthenticated as error:
            log.warning("sign_in_refused", reason=str(error))
            raise site.refusal("unauthenticated", f"{error}; go to {SIGN_IN_PATH} to begin again") from error
        except AuthorityUnavailable as error:
            raise unavailable(error) from error

    async def sign_out(request: Request) -> Response:
        """End the session."""
        people = site.people(request)
        form_tokens = (await site.form(request)).get(FORM_TOKEN) or ("",)
        try:
            return await people.sign_outs.run(people.sign_out, request.cookies, form_tokens[0])
        except CrossSite as error:
            raise site.refusal("cross-site", str(error)) from error
        except AuthorityUnavailable as error:
            raise unavailable(error) from error

    async def signed_out(request: Request) -> Response:
        """Show the page after signing out."""
        site.people(request)
        return await run_in_threadpool(site.page, request, "signed_out.html")

    return [
        Route(SIGN_IN_PATH, begin),
        Route(CALLBACK_PATH, complete),
        Route(SIGN_OUT_PATH, sign_out, methods=["POST"]),
        Route(SIGNED_OUT_PATH, signed_out),
    ]
