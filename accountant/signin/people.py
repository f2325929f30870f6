"""Signing in and being signed in: from a page to the provider and back, and who a cookie stands for.

What somebody may do is not in the cookie. It is decided by the grants in force at every request, so that a grant that
is taken away is gone at once; and a session of an issuer that nobody signs in with any more counts for nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from accountant import issuers, tokens
from accountant.auth import Principal, Unauthenticated
from accountant.grants import Callers, granted
from accountant.issuers import Keys
from accountant.signin.cookies import Seal, Session, SignIn
from accountant.signin.provider import Provider
from agent.clock import Clock

CALLBACK: Final = "/sign-in/done"
UNDER_WAY_SECONDS: Final = 600
"""How long somebody may take at the provider."""
_CHANCE_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who signed in. form_token: what a form of theirs has to bring along."""

    principal: Principal
    form_token: str

    def allows(self, form_token: str) -> bool:
        """Whether a form came from a page of this session."""
        return secrets.compare_digest(self.form_token.encode(), form_token.encode())


class People:
    """callers: the file in force. public_url: where browsers reach us. provider: how to speak with an issuer."""

    def __init__(
        self,
        callers: Callers,
        clock: Clock,
        seal: Seal,
        public_url: str,
        session_seconds: int,
        keys: Callable[[issuers.Fetch, Clock], Keys] = Keys,
    ) -> None:
        self._grants = callers.grants
        self._clock = clock
        self._seal = seal
        self._redirect = public_url.rstrip("/") + CALLBACK
        self.session_seconds = session_seconds
        self.secure = public_url.startswith("https:")
        """Whether cookies are for https alone."""
        self.providers = tuple(Provider(one, one.login) for one in callers.issuers if one.login is not None)
        self._keys = {one.issuer.issuer: keys(issuers.source(one.issuer), clock) for one in self.providers}

    def leave(self, provider: Provider, following: str) -> tuple[str, str]:
        """Where to send a browser, and the cookie to send along. Raises AuthorityUnavailable."""
        state, nonce, verifier = (secrets.token_urlsafe(_CHANCE_BYTES) for _ in range(3))
        under_way = SignIn(provider.issuer.issuer, state, nonce, verifier, own_path(following))
        address = provider.leave_for(self._redirect, state, nonce, verifier)
        return address, self._seal.sign_in(under_way, self._clock.wall_ms(), UNDER_WAY_SECONDS)

    def arrive(self, cookie: str, state: str, code: str) -> tuple[str, str]:
        """The session's cookie, and where to go. Raises Unauthenticated, AuthorityUnavailable."""
        now = self._clock.wall_ms()
        under_way = self._seal.opened_sign_in(cookie, now)
        if not secrets.compare_digest(under_way.state.encode(), state.encode()):
            raise Unauthenticated("this is the answer to another sign-in")
        provider = self._provider(under_way.issuer)
        token = provider.id_token(code, self._redirect, under_way.verifier)
        said = tokens.unverified(token)
        if said is None:
            raise Unauthenticated("the provider's token is none")
        claims = issuers.verified(
            token, said, under_way.issuer, provider.login.client_id, self._keys[under_way.issuer], now
        )
        if not secrets.compare_digest(str(claims.get("nonce", "")).encode(), under_way.nonce.encode()):
            raise Unauthenticated("the provider's token is for another sign-in")
        user, groups = issuers.person(claims, provider.issuer)
        known = {group for grant in self._grants for group in grant.groups}
        session = Session(
            under_way.issuer, user, tuple(sorted(known.intersection(groups))), secrets.token_urlsafe(_CHANCE_BYTES)
        )
        return self._seal.session(session, now, self.session_seconds), under_way.next

    def who(self, cookie: str) -> Person:
        """Raises Unauthenticated."""
        session = self._seal.opened_session(cookie, self._clock.wall_ms())
        self._provider(session.issuer)
        scopes, teams = granted(self._grants, session.user, session.groups)
        return Person(Principal(session.user, scopes, teams=teams), self._seal.form_token(session))

    def _provider(self, issuer: str) -> Provider:
        found = next((one for one in self.providers if one.issuer.issuer == issuer), None)
        if found is None:
            raise Unauthenticated("nobody signs in with that provider any more")
        return found


def own_path(text: str) -> str:
    """The text where it is a path of ours, else "/": a sign-in must not lead to another site."""
    parts = urlsplit(text)
    if not text.startswith("/") or text.startswith("//") or "\\" in text or parts.scheme or parts.netloc:
        return "/"
    return text if text.isprintable() else "/"
