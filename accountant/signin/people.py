"""Signing in and being signed in: from a page to the provider and back, and who a cookie stands for.

What somebody may do is not in the cookie. It is decided by the grants in force at every request, so that a grant that
is taken away is gone at once; and a session of an issuer that nobody signs in with any more counts for nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from accountant.callers import issuers, tokens
from accountant.callers.auth import Principal, Unauthenticated
from accountant.callers.grants import Callers, granted
from accountant.callers.issuers import Keys
from accountant.signin.cookies import Seal, Session, SignIn
from accountant.signin.provider import Provider
from accountant.signin.visits import CALLBACK, LEAVE, LEFT, Cookie, CrossSite, Move, as_address, own_path
from agent.clock import Clock

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
        self._session_seconds = session_seconds
        self._secure = public_url.startswith("https:")
        self._session_name = ("__Host-" if self._secure else "") + seal.house
        self._under_way_name = ("__Secure-" if self._secure else "") + f"{seal.house}-sign-in"
        self.providers = tuple(Provider(one, one.login) for one in callers.issuers if one.login is not None)
        self._keys = {one.issuer.issuer: keys(issuers.source(one.issuer), clock) for one in self.providers}

    def leave(self, provider: Provider, following: str) -> Move:
        """To the provider; afterwards to `following`, where that is a path of ours. Raises AuthorityUnavailable."""
        state, nonce, verifier = (secrets.token_urlsafe(_CHANCE_BYTES) for _ in range(3))
        under_way = SignIn(provider.issuer.issuer, state, nonce, verifier, own_path(following))
        address = provider.leave_for(self._redirect, state, nonce, verifier)
        sealed = self._seal.sign_in(under_way, self._clock.wall_ms(), UNDER_WAY_SECONDS)
        return Move(address, (self._under_way(sealed, UNDER_WAY_SECONDS),))

    def arrive(self, cookies: Mapping[str, str], state: str, code: str) -> Move:
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
        said = tokens.unverified(token)
        if said is None:
            raise Unauthenticated("the provider's token is none")
        claims = issuers.verified(
            token, said, under_way.issuer, provider.login.client_id, self._keys[under_way.issuer], now
        )
        issuers.check_party(claims, {provider.login.client_id})
        if not secrets.compare_digest(str(claims.get("nonce", "")).encode(), under_way.nonce.encode()):
            raise Unauthenticated("the provider's token is for another sign-in")
        user, groups = issuers.person(claims, provider.issuer)
        known = {group for grant in self._grants for group in grant.groups}
        session = Session(
            under_way.issuer, user, tuple(sorted(known.intersection(groups))), secrets.token_urlsafe(_CHANCE_BYTES)
        )
        kept = self._session(self._seal.session(session, now, self._session_seconds), self._session_seconds)
        return Move(as_address(under_way.next), (kept, self._under_way("", 0)))

    def person(self, cookies: Mapping[str, str]) -> Person | None:
        """Who is signed in; None for a browser without a session. Raises Unauthenticated for a session that is over."""
        cookie = cookies.get(self._session_name)
        if not cookie:
            return None
        session = self._seal.opened_session(cookie, self._clock.wall_ms())
        self._provider(session.issuer)
        scopes, teams = granted(self._grants, session.user, session.groups)
        return Person(Principal(session.user, scopes, teams=teams), self._seal.form_token(session))

    def sign_out(self, cookies: Mapping[str, str], form_token: str) -> Move:
        """Forget the session in this browser. Raises CrossSite.

        Not at the provider: it would sign in again whoever it still knows."""
        try:
            found = self.person(cookies)
        except Unauthenticated:
            found = None
        if found is not None and not found.allows(form_token):
            raise CrossSite("this form does not belong to this session")
        return Move(LEFT, (self._session("", 0),))

    def _session(self, value: str, seconds: int) -> Cookie:
        return Cookie(self._session_name, value, seconds, "/", self._secure)

    def _under_way(self, value: str, seconds: int) -> Cookie:
        return Cookie(self._under_way_name, value, seconds, LEAVE, self._secure)

    def _provider(self, issuer: str) -> Provider:
        found = next((one for one in self.providers if one.issuer.issuer == issuer), None)
        if found is None:
            raise Unauthenticated("nobody signs in with that provider any more")
        return found
