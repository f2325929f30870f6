"""Callers an OpenID Connect issuer vouches for: other clusters' agents, and people.

A token is verified against the issuer's own keys (JWKS, from a file or over HTTPS), with asymmetric
algorithms alone, its audience and its times by our clock. An issuer of a cluster vouches for the agents, and where
that is wanted for the pods, of that cluster and for nobody else's.
"""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

import jwt

from accountant.callers import tokens
from accountant.callers.auth import AuthorityUnavailable, Principal, Unauthenticated
from accountant.callers.grants import Grant, Issuer, granted
from agent.clock import Clock
from agent.units import MS_PER_SECOND

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Asymmetric ones: with any other, who can verify a token could make one."""
FRESH_MS = 300 * MS_PER_SECOND
"""How long keys are used before they are fetched again."""
AGAIN_MS = 30 * MS_PER_SECOND
"""How soon, at the earliest, an unknown key makes them be fetched again."""
STALE_MS = 24 * 3600 * MS_PER_SECOND
"""How long keys are used where the issuer does not answer."""
_MOST_BYTES = 1024 * 1024
_TIMEOUT_SECONDS = 10
Fetch = Callable[[], bytes]


def source(issuer: Issuer) -> Fetch:
    """Where its keys come from."""
    if issuer.jwks_file is not None:
        return _reading(issuer.jwks_file)
    assert issuer.jwks_url is not None
    return _fetching(issuer.jwks_url)


def _reading(path: Path) -> Fetch:
    return path.read_bytes


def _fetching(url: str) -> Fetch:
    def fetch() -> bytes:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310  # https, by Issuer
            content: bytes = answer.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise OSError(f"{url}: more than {_MOST_BYTES} bytes of keys")
        return content

    return fetch


class Keys:
    """An issuer's keys by id. Thread-safe."""

    def __init__(self, fetch: Fetch, clock: Clock) -> None:
        self._fetch = fetch
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: Mapping[str, Any] = {}
        self._fetched_ms: int | None = None
        self._tried_ms: int | None = None

    def key(self, name: str) -> Any:
        """Raises Unauthenticated for a key the issuer does not have, AuthorityUnavailable where it cannot tell."""
        with self._lock:
            now = self._clock.monotonic_ms()
            fresh = self._fetched_ms is not None and now - self._fetched_ms < FRESH_MS
            may_try = self._tried_ms is None or now - self._tried_ms >= AGAIN_MS
            if (not fresh or name not in self._keys) and may_try:
                self._load(now)
            if self._fetched_ms is None or now - self._fetched_ms > STALE_MS:
                raise AuthorityUnavailable("the issuer's keys cannot be had")
            if name not in self._keys:
                raise Unauthenticated("the token is signed with an unknown key")
            return self._keys[name]

    def _load(self, now: int) -> None:
        self._tried_ms = now
        try:
            found = jwt.PyJWKSet.from_json(self._fetch().decode())
        except (OSError, URLError, ValueError, jwt.PyJWTError):
            return  # those we have stay good for a while
        self._keys = {key.key_id or "": key.key for key in found.keys if key.public_key_use in (None, "sig")}
        self._fetched_ms = now


class Issuers:
    """accountant.callers.auth.Authenticator over all configured issuers."""

    def __init__(
        self,
        issuers: Sequence[Issuer],
        grants: Sequence[Grant],
        clock: Clock,
        fetch: Callable[[Issuer], Fetch] = source,
    ) -> None:
        self._issuers = [(issuer, Keys(fetch(issuer), clock)) for issuer in issuers]
        self._grants = grants
        self._clock = clock

    async def authenticate(self, token: str | None, address: str = "") -> Principal:  # noqa: ARG002  # the protocol's
        said = tokens.unverified(token) if token else None
        if not token or said is None or said.algorithm not in ALGORITHMS:
            raise Unauthenticated("the token is not known")
        fault = Unauthenticated("the token is not known")
        for issuer, keys in self._issuers:
            if issuer.issuer != said.issuer:
                continue
            try:
                return await asyncio.to_thread(self._verified, token, said, issuer, keys)
            except Unauthenticated as error:
                fault = error
        raise fault

    def _verified(self, token: str, said: tokens.Unverified, issuer: Issuer, keys: Keys) -> Principal:
        claims = verified(token, said, issuer.issuer, issuer.audience, keys, self._clock.wall_ms())
        if issuer.cluster is not None:
            return _of_cluster(claims, issuer)
        check_party(claims, {issuer.audience, *issuer.clients, *([issuer.login.client_id] if issuer.login else [])})
        user, groups = person(claims, issuer)
        scopes, teams = granted(self._grants, user, groups)
        return Principal(user, scopes, teams=teams)


def verified(
    token: str, said: tokens.Unverified, issuer: str, audience: str, keys: Keys, now_ms: int
) -> Mapping[str, Any]:
    """The claims of a token that this issuer made for this audience. Raises Unauthenticated, AuthorityUnavailable."""
    if said.algorithm not in ALGORITHMS:
        raise Unauthenticated("the token is not known")
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            keys.key(said.key),
            algorithms=[said.algorithm],
            audience=audience,
            issuer=issuer,
            # Times are held against our own clock below.
            options={"require": ["exp"], "verify_exp": False, "verify_nbf": False, "verify_iat": False},
        )
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        raise Unauthenticated("the token is not valid") from error
    tokens.check_times(claims, now_ms)
    return claims


def check_party(claims: Mapping[str, Any], clients: Collection[str]) -> None:
    """Hold the authorized party (OpenID Connect Core 1.0, 3.1.3.7) against the clients that tokens may be made for:
    a token for another one is refused, and one of several audiences that names none. Raises Unauthenticated."""
    party, audience = claims.get("azp"), claims.get("aud")
    if party is None and isinstance(audience, list) and len(audience) > 1:
        raise Unauthenticated("the token is for several audiences and does not say which client it was made for (azp)")
    if party is not None and party not in clients:
        raise Unauthenticated("the token was made for another client (azp)")


def person(claims: Mapping[str, Any], issuer: Issuer) -> tuple[str, list[str]]:
    """Who it is, and the groups. Raises Unauthenticated where the token does not say."""
    user, groups = claims.get(issuer.user), claims.get(issuer.groups)
    if not isinstance(user, str) or not user:
        raise Unauthenticated(f"the token does not say {issuer.user!r}")
    if issuer.user == "email" and not issuer.email_unverified and claims.get("email_verified") is not True:
        raise Unauthenticated("the issuer does not say that it verified this address (email_verified)")
    return user, [group for group in groups if isinstance(group, str)] if isinstance(groups, list) else []


def _of_cluster(claims: Mapping[str, Any], issuer: Issuer) -> Principal:
    """The bound service account in a cluster's own token (claim `kubernetes.io`): an agent, or a pod for its job.

    Nobody is asked whether the pod still exists: its token is good until it ends."""
    assert issuer.cluster is not None
    account = tokens.service_account(str(claims.get("sub", ""))) or ""
    found = tokens.agent(account, _bound_to(claims, "node", "name"), issuer.agents, issuer.cluster)
    pod = _bound_to(claims, "pod", "uid")
    if found is None and issuer.jobs and account and pod:
        name = f"{account} of {issuer.cluster}"
        found = Principal(name, frozenset({"progress"}), issuer.cluster, pod=pod)
    if found is None:
        raise Unauthenticated("the token is not that of an agent" + (", or of a pod" if issuer.jobs else ""))
    return found


def _bound_to(claims: Mapping[str, Any], kind: str, attribute: str) -> str | None:
    """What a service account's token says that it is bound to."""
    bound = claims.get("kubernetes.io")
    one = bound.get(kind) if isinstance(bound, dict) else None
    value = one.get(attribute) if isinstance(one, dict) else None
    return value if isinstance(value, str) and value else None
