"""What a page is asked and what it answers, as values; and who may ask. No sockets here.

A caller shows a token as a bearer, or as the password of Basic, which browsers know how to ask for. Forms carry a mark
made from the caller's own token: a page of another site cannot make it, and every replica knows it again.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from accountant.auth import SCOPES, Principal, Scope, TokenFile, Unauthenticated, is_loopback
from accountant.web.look import HTML

Fields = Mapping[str, Sequence[str]]
MARK = "form_token"
"""Name of the field that carries a form's mark."""
_CHALLENGE = 'Basic realm="gputally: any name, the token as password", charset="UTF-8"'


@dataclass(frozen=True, slots=True)
class Request:
    """headers: names in lower case. query, form: every value of every field, as sent."""

    method: str
    path: str
    query: Fields = field(default_factory=dict)
    form: Fields = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def asked(self, name: str, default: str = "") -> str:
        """The first value of a query's field."""
        return (self.query.get(name) or (default,))[0]

    def sent(self, name: str) -> str:
        """The first value of a form's field, as it was sent."""
        return (self.form.get(name) or ("",))[0]


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    type: str = HTML
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class Refusal(Exception):
    """A request that gets no answer, in words for whoever made it."""

    def __init__(self, status: int, title: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status} {title}: {detail}")
        self.status = status
        self.title = title
        self.detail = detail
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. mark: what his forms carry."""

    principal: Principal
    mark: str

    def may(self, scope: Scope) -> bool:
        return self.principal.may(scope)


class Doors:
    """Who may come in. tokens None: everybody on this machine, and nobody else."""

    def __init__(self, tokens: TokenFile | None) -> None:
        self._tokens = tokens
        self._own = secrets.token_bytes(32)

    def admit(self, request: Request, scope: Scope) -> Caller:
        """Raises Refusal. A request that changes something has to come from a page of ours as well."""
        if self._tokens is None and not is_loopback(_host(request)):
            raise Refusal(403, "Wrong host", "without tokens these pages answer only under localhost or 127.0.0.1")
        caller = self._caller(request)
        if caller.principal.teams is not None:
            raise Refusal(403, "Not for one team", "these pages show every queue; your token is for its own teams only")
        if not caller.may(scope):
            raise Refusal(403, "Not allowed", f"{caller.principal.name!r} lacks the scope {scope!r}")
        if request.method != "GET":
            _from_here(request, caller.mark)
        return caller

    def _caller(self, request: Request) -> Caller:
        if self._tokens is None:
            return Caller(Principal("anonymous", frozenset(SCOPES)), _mark(self._own))
        token = _token(request.headers.get("authorization", ""))
        try:
            principal = self._tokens.whose(token)
        except Unauthenticated as error:
            raise Refusal(401, "Who are you?", str(error), {"WWW-Authenticate": _CHALLENGE}) from error
        return Caller(principal, _mark((token or "").encode()))


def _mark(secret: bytes) -> str:
    return hmac.digest(secret, b"gputally fairshare form", "sha256").hex()


def _from_here(request: Request, mark: str) -> None:
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Refusal(403, "Another site", "a page of another site may not write here")
    origin = request.headers.get("origin", "null")  # which is what our own pages send: they tell no referrer
    if origin != "null" and urlsplit(origin).netloc != request.headers.get("host", ""):
        raise Refusal(403, "Another site", "a page of another site may not write here")
    if not hmac.compare_digest(request.sent(MARK).encode(), mark.encode()):
        raise Refusal(403, "An old form", "the form is not one that was made for you; open the page again")


def _host(request: Request) -> str:
    return urlsplit(f"//{request.headers.get('host', '')}").hostname or ""


def _token(authorization: str) -> str | None:
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None
