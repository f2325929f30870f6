"""Signs people in to the pages and out again: routes, signed cookies, redirects.

`provider` speaks with it, `cookies` seals what a browser keeps for us, `people` puts both together. Nothing is kept on
this side: a session is a signed cookie, and what its person may do is asked of the grants at every request.

The grants of a person are not in the cookie. It is decided by the grants in force at every request, so that a grant
that is taken away is gone at once; and a session of an issuer that is no longer configured is invalid.

Both are JWTs under a key that only who serves the pages has (HS256: who verifies them is who made them), and all
replicas of it. A value of one sort is never taken for the other, nor that of other pages for one of these.

The same for whatever serves the pages. A cookie of ours is out of every script's reach and is not sent along with what
another site posts; under https it is bound to this host (`__Host-`, `__Secure-`: RFC 6265bis §4.1.3).

`sign_in_routes` serves the pages for it; each program says how a page and a refusal of its own look (`SignInSite`).
These pages need no sign-in and show no data.
"""

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
from starlette.responses import Response
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
"""Browsers keep no more in one cookie."""


@dataclass(frozen=True, slots=True)
class SignIn:
    """A sign-in under way at the provider. next: the page to show afterwards."""

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
    """Signs and opens. key: secret, the same over restarts. house: whose pages these are; in the cookies' names too."""

    def __init__(self, key: bytes, house: str = "gputally") -> None:
        self._key = key
        self.house = house

    def sign_in(self, under_way: SignIn, now_ms: int, seconds: int) -> str:
        return self._sealed("sign-in", _plain(under_way), now_ms, seconds)

    def session(self, session: Session, now_ms: int, seconds: int) -> str:
        """Raises Unauthenticated where a person is in more groups than a cookie holds."""
        text = self._sealed("session", _plain(session), now_ms, seconds)
        if len(text) > _MOST_BYTES:
            raise Unauthenticated("this person is in more groups than a session can hold")
        return text

    def opened_sign_in(self, text: str, now_ms: int) -> SignIn:
        """Raises Unauthenticated."""
        found = self._opened("sign-in", text, now_ms)
        return SignIn(found["issuer"], found["state"], found["nonce"], found["verifier"], found["next"])

    def opened_session(self, text: str, now_ms: int) -> Session:
        """Raises Unauthenticated."""
        found = self._opened("session", text, now_ms)
        return Session(found["issuer"], found["user"], tuple(found["groups"]), found["id"])

    def form_token(self, session: Session) -> str:
        """What a form of this session has to bring along."""
        return hmac.new(self._key, b"form:" + session.id.encode(), hashlib.sha256).hexdigest()

    def _sealed(self, sort: Sort, content: Mapping[str, Any], now_ms: int, seconds: int) -> str:
        times = {"aud": f"{self.house}-{sort}", "exp": now_ms // MS_PER_SECOND + seconds}
        return jwt.encode({**content, **times}, self._key, algorithm="HS256")

    def _opened(self, sort: Sort, text: str, now_ms: int) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = jwt.decode(
                text,
                self._key,
                algorithms=["HS256"],
                audience=f"{self.house}-{sort}",
                options={"require": ["exp"], "verify_exp": False},
            )
        except (jwt.PyJWTError, ValueError) as error:
            raise Unauthenticated("the cookie is none of ours") from error
        if claims["exp"] * MS_PER_SECOND <= now_ms:
            raise Unauthenticated("signed in too long ago")
        return claims


def key_of(path: Path, remedy: str = f"a key has at least {_KEY_BYTES} bytes") -> bytes:
    """The key that a file holds; another one signs all out. Raises CannotStart. remedy: for a short one."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise CannotStart(f"{path}: {error.strerror}") from error
    if len(key) < _KEY_BYTES:
        raise CannotStart(f"{path}: holds no key; {remedy}")
    return key


def key_in(folder: Path) -> bytes:
    """The key in a folder, made when first asked for. Raises CannotStart."""
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
"""Characters of a parameter that a browser brings along."""
_KEPT: Final = ":/%#?=@[]!$&'()*+,;"
"""Characters that stand for themselves in an address."""


class CrossSite(Exception):
    """A form that is none of this session's."""


@dataclass(frozen=True, slots=True)
class Cookie:
    """value: without what a cookie would have to quote, as a JWT is. seconds: how long it is kept; 0: forget it.
    secure: for https alone."""

    name: str
    value: str
    seconds: int
    path: str
    secure: bool

    def header(self) -> str:
        """The cookie as `Set-Cookie` carries it."""
        kept = f"{self.name}={self.value}; Path={self.path}; Max-Age={self.seconds}; HttpOnly; SameSite=lax"
        return f"{kept}; Secure" if self.secure else kept


@dataclass(frozen=True, slots=True)
class Redirect:
    """The answer 303: where a browser goes next, and what it keeps or forgets on the way."""

    to: str
    cookies: tuple[Cookie, ...] = ()


def to_sign_in(here: str) -> str:
    """The address to sign in at that leads back to `here`."""
    return f"{LEAVE}?next={quote(here, safe='')}"


def own_path(text: str) -> str:
    """The text where it is a path of ours, else "/": a sign-in must not lead to another site."""
    parts = urlsplit(text)
    if not text.startswith("/") or text.startswith("//") or "\\" in text or parts.scheme or parts.netloc:
        return "/"
    return text if text.isprintable() else "/"


def as_address(path: str) -> str:
    """A path as a header carries it; what is quoted already stays so."""
    return quote(path, safe=_KEPT)


UNDER_WAY_SECONDS: Final = 600
"""How long a person may take at the provider."""
_CHANCE_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Person:
    """A signed-in person. form_token: the token that every form of this person must carry."""

    principal: Principal
    form_token: str

    def allows(self, form_token: str) -> bool:
        """Whether a form came from a page of this session."""
        return secrets.compare_digest(self.form_token.encode(), form_token.encode())


class SignInService:
    """callers: the file in force. public_url: where browsers reach us. provider: how to speak with an issuer."""

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
        self._session_name = ("__Host-" if self._secure else "") + seal.house
        self._under_way_name = ("__Secure-" if self._secure else "") + f"{seal.house}-sign-in"
        self.providers = tuple(Provider(one, one.login) for one in callers.issuers if one.login is not None)
        self._keys = {one.issuer.issuer: keys(openid_connect.source(one.issuer), clock) for one in self.providers}

    def leave(self, provider: Provider, following: str) -> Redirect:
        """To the provider; afterwards to `following`, where that is a path of ours. Raises AuthorityUnavailable."""
        state, nonce, verifier = (secrets.token_urlsafe(_CHANCE_BYTES) for _ in range(3))
        under_way = SignIn(provider.issuer.issuer, state, nonce, verifier, own_path(following))
        address = provider.leave_for(self._redirect, state, nonce, verifier)
        sealed = self._seal.sign_in(under_way, self._clock.wall_ms(), UNDER_WAY_SECONDS)
        return Redirect(address, (self._under_way(sealed, UNDER_WAY_SECONDS),))

    def arrive(self, cookies: Mapping[str, str], state: str, code: str) -> Redirect:
        """Back from the provider, with a session. code: "" where the provider gave none.

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
        kept = self._session(self._seal.session(session, now, self._session_seconds), self._session_seconds)
        return Redirect(as_address(under_way.next), (kept, self._under_way("", 0)))

    def person(self, cookies: Mapping[str, str]) -> Person | None:
        """Who is signed in; None for a browser without a session. Raises Unauthenticated for a session that is over."""
        cookie = cookies.get(self._session_name)
        if not cookie:
            return None
        session = self._seal.opened_session(cookie, self._clock.wall_ms())
        self._provider(session.issuer)
        scopes, teams = granted(self._grants, session.user, session.groups)
        return Person(Principal(session.user, scopes, teams=teams), self._seal.form_token(session))

    def sign_out(self, cookies: Mapping[str, str], form_token: str) -> Redirect:
        """Forget the session in this browser. Raises CrossSite.

        Not at the provider: it would sign the person in again."""
        try:
            found = self.person(cookies)
        except Unauthenticated:
            found = None
        if found is not None and not found.allows(form_token):
            raise CrossSite("this form does not belong to this session")
        return Redirect(LEFT, (self._session("", 0),))

    def _session(self, value: str, seconds: int) -> Cookie:
        return Cookie(self._session_name, value, seconds, "/", self._secure)

    def _under_way(self, value: str, seconds: int) -> Cookie:
        return Cookie(self._under_way_name, value, seconds, LEAVE, self._secure)

    def _provider(self, issuer: str) -> Provider:
        found = next((one for one in self.providers if one.issuer.issuer == issuer), None)
        if found is None:
            raise Unauthenticated("that provider has no sign-in any more")
        return found


MARK = "form_token"
"""Name of the field that carries a form's mark."""
PATHS = frozenset({LEAVE, CALLBACK, OUT, LEFT})
Kind = Literal["no-provider", "too-long", "unauthenticated", "cross-site", "authority-unavailable"]


class SignInSite(Protocol):
    """What these pages need of a program."""

    def people(self, request: Request, /) -> SignInService:
        """Raises a refusal where sign-in is not configured."""
        ...

    async def form(self, request: Request) -> Mapping[str, Sequence[str]]:
        """The fields of a form of our own. Raises a refusal for any other."""
        ...

    def page(self, request: Request, template: str, /, **values: Any) -> Response: ...

    def refusal(self, kind: Kind, detail: str) -> Exception:
        """What to raise."""
        ...


def sign_in_routes(site: SignInSite) -> list[Route]:
    """The routes of all sign-in pages."""

    def parameter(request: Request, name: str, default: str = "") -> str:
        text = request.query_params.get(name) or default
        if len(text) > LONGEST:
            raise site.refusal("too-long", f"no parameter of ours has more than {LONGEST} characters")
        return text

    async def leave(request: Request) -> Response:
        """To the provider; where there are several, a page to choose one."""
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
            return _moved(await run_in_threadpool(people.leave, people.providers[max(number, 1) - 1], following))
        except AuthorityUnavailable as error:
            raise site.refusal("authority-unavailable", str(error)) from error

    async def done(request: Request) -> Response:
        """Back from the provider, with a code for a session."""
        people = site.people(request)
        code = "" if parameter(request, "error") else parameter(request, "code")
        try:
            return _moved(await run_in_threadpool(people.arrive, request.cookies, parameter(request, "state"), code))
        except Unauthenticated as error:
            raise site.refusal("unauthenticated", f"{error}; go to {LEAVE} to begin again") from error
        except AuthorityUnavailable as error:
            raise site.refusal("authority-unavailable", str(error)) from error

    async def leave_for_good(request: Request) -> Response:
        """Forget the session in this browser."""
        people = site.people(request)
        mark = (await site.form(request)).get(MARK) or ("",)
        try:
            return _moved(people.sign_out(request.cookies, mark[0]))
        except CrossSite as error:
            raise site.refusal("cross-site", str(error)) from error

    async def left(request: Request) -> Response:
        """Where signing out ends."""
        site.people(request)
        return await run_in_threadpool(site.page, request, "signed_out.html")

    return [
        Route(LEAVE, leave),
        Route(CALLBACK, done),
        Route(OUT, leave_for_good, methods=["POST"]),
        Route(LEFT, left),
    ]


def _moved(move: Redirect) -> Response:
    answer = Response(status_code=303, headers={"Location": move.to})
    for cookie in move.cookies:
        answer.headers.append("Set-Cookie", cookie.header())
    return answer
