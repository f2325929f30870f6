"""Verifies ID tokens of OpenID Connect issuers with PyJWT, and exchanges authorization codes.

A token is verified against the issuer's own keys (JWKS, from a file or over HTTPS), with asymmetric algorithms only,
its audience, and its times by the local clock. The issuer of a cluster can authenticate only the agents, and if
configured the pods, of that cluster.

Sources: OpenID Connect Core 1.0 §3.1, OpenID Connect Discovery 1.0 §4, RFC 7636 (PKCE), RFC 6749 §4.1.3."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import ssl
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import httpx2
import jwt

from gputally.base import http_calls
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND
from gputally.server import tokens_and_grants
from gputally.server.tokens_and_grants import (
    AuthorityUnavailable,
    Grant,
    Issuer,
    Login,
    Principal,
    Unauthenticated,
    granted,
    is_loopback,
)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Asymmetric algorithms; with a symmetric one, every verifier could also make tokens."""
FRESH_MS = 300 * MS_PER_SECOND
"""How long keys are used before they are fetched again."""
AGAIN_MS = 30 * MS_PER_SECOND
"""Shortest time before an unknown key causes another fetch."""
STALE_MS = 24 * 3600 * MS_PER_SECOND
"""How long keys are used if the issuer does not answer."""
_MOST_KEY_BYTES = 1024 * 1024
_KEYS_TIMEOUT_SECONDS = 10
Fetch = Callable[[], bytes]


def source(issuer: Issuer) -> Fetch:
    """Return the source of an issuer's keys."""
    if issuer.jwks_file is not None:
        return _reading(issuer.jwks_file)
    assert issuer.jwks_url is not None
    return _fetching(issuer.jwks_url)


def _reading(path: Path) -> Fetch:
    return path.read_bytes


def _fetching(url: str) -> Fetch:
    def fetch() -> bytes:
        trusted = http_calls.tls_context(None, OSError)
        with http_calls.client(trusted, _KEYS_TIMEOUT_SECONDS) as client, client.stream("GET", url) as answer:
            content = http_calls.read_bounded(answer.raise_for_status(), _MOST_KEY_BYTES)
        if content is None:
            raise OSError(f"{url}: more than {_MOST_KEY_BYTES} bytes of keys")
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
        """Return a key. Raises Unauthenticated for a key that the issuer does not have, AuthorityUnavailable if this is
        unknown."""
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
        except (OSError, httpx2.HTTPError, ValueError, jwt.PyJWTError):
            return  # the present keys stay valid for a while
        self._keys = {key.key_id or "": key.key for key in found.keys if key.public_key_use in (None, "sig")}
        self._fetched_ms = now


class Issuers:
    """A gputally.server.tokens_and_grants.Authenticator over all configured issuers."""

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
        said = tokens_and_grants.unverified(token) if token else None
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

    def _verified(self, token: str, said: tokens_and_grants.UnverifiedToken, issuer: Issuer, keys: Keys) -> Principal:
        claims = verified(token, said, issuer.issuer, issuer.audience, keys, self._clock.wall_ms())
        if issuer.cluster is not None:
            return _of_cluster(claims, issuer)
        check_party(claims, {issuer.audience, *issuer.clients, *([issuer.login.client_id] if issuer.login else [])})
        user, groups = person(claims, issuer)
        scopes, teams = granted(self._grants, user, groups)
        return Principal(user, scopes, teams=teams)


def verified(
    token: str, said: tokens_and_grants.UnverifiedToken, issuer: str, audience: str, keys: Keys, now_ms: int
) -> Mapping[str, Any]:
    """Return the claims of a token that this issuer made for this audience. Raises Unauthenticated,
    AuthorityUnavailable."""
    if said.algorithm not in ALGORITHMS:
        raise Unauthenticated("the token is not known")
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            keys.key(said.key),
            algorithms=[said.algorithm],
            audience=audience,
            issuer=issuer,
            # The times are checked below with our own clock.
            options={"require": ["exp"], "verify_exp": False, "verify_nbf": False, "verify_iat": False},
        )
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        raise Unauthenticated("the token is not valid") from error
    tokens_and_grants.check_times(claims, now_ms)
    return claims


def check_party(claims: Mapping[str, Any], clients: Collection[str]) -> None:
    """Check the authorized party (OpenID Connect Core 1.0, 3.1.3.7). A token for a client that is not allowed is
    refused, and so is a token with several audiences and no authorized party. Raises Unauthenticated."""
    party, audience = claims.get("azp"), claims.get("aud")
    if party is None and isinstance(audience, list) and len(audience) > 1:
        raise Unauthenticated("the token is for several audiences and does not say which client it was made for (azp)")
    if party is not None and party not in clients:
        raise Unauthenticated("the token was made for another client (azp)")


def person(claims: Mapping[str, Any], issuer: Issuer) -> tuple[str, list[str]]:
    """Return a person's name and groups. Raises Unauthenticated if the token does not state them."""
    user, groups = claims.get(issuer.user), claims.get(issuer.groups)
    if not isinstance(user, str) or not user:
        raise Unauthenticated(f"the token does not say {issuer.user!r}")
    if issuer.user == "email" and not issuer.email_unverified and claims.get("email_verified") is not True:
        raise Unauthenticated("the issuer does not say that it verified this address (email_verified)")
    return user, [group for group in groups if isinstance(group, str)] if isinstance(groups, list) else []


def _of_cluster(claims: Mapping[str, Any], issuer: Issuer) -> Principal:
    """Return the bound service account in a cluster's own token (claim `kubernetes.io`): an agent, or a pod for its
    job.

    It does not check whether the pod still exists: its token is valid until it expires."""
    assert issuer.cluster is not None
    account = tokens_and_grants.service_account(str(claims.get("sub", ""))) or ""
    found = tokens_and_grants.agent(account, _bound_to(claims, "node", "name"), issuer.agents, issuer.cluster)
    pod = _bound_to(claims, "pod", "uid")
    if found is None and issuer.jobs and account and pod:
        name = f"{account} of {issuer.cluster}"
        found = Principal(name, frozenset({"progress"}), issuer.cluster, pod=pod)
    if found is None:
        raise Unauthenticated("the token is not that of an agent" + (", or of a pod" if issuer.jobs else ""))
    return found


def _bound_to(claims: Mapping[str, Any], kind: str, attribute: str) -> str | None:
    """Return what a service account's token is bound to."""
    bound = claims.get("kubernetes.io")
    one = bound.get(kind) if isinstance(bound, dict) else None
    value = one.get(attribute) if isinstance(one, dict) else None
    return value if isinstance(value, str) and value else None


_PROVIDER_TIMEOUT_SECONDS: Final = 10.0
_MOST_ANSWER_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Endpoints:
    authorize: str
    token: str


class Provider:
    """An issuer with which people sign in. Thread-safe."""

    def __init__(self, issuer: Issuer, login: Login, transport: httpx2.BaseTransport | None = None) -> None:
        self.issuer = issuer
        self.login = login
        self._transport = transport
        self._endpoints: Endpoints | None = None

    @property
    def label(self) -> str:
        return self.login.label or httpx2.URL(self.issuer.issuer).host

    def leave_for(self, redirect: str, state: str, nonce: str, verifier: str) -> str:
        """Return the address to which to send a browser. Raises AuthorityUnavailable."""
        asked = {
            "response_type": "code",
            "client_id": self.login.client_id,
            "redirect_uri": redirect,
            "scope": " ".join(self.login.scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge(verifier),
            "code_challenge_method": "S256",
        }
        address = self._found().authorize
        return f"{address}{'&' if '?' in address else '?'}{urlencode(asked)}"

    def id_token(self, code: str, redirect: str, verifier: str) -> str:
        """Exchange a code for an ID token, which is not verified here. Raises Unauthenticated, AuthorityUnavailable."""
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect, "code_verifier": verifier}
        secret = self._secret()
        auth = httpx2.BasicAuth(self.login.client_id, secret) if secret is not None else None
        if secret is None:
            form["client_id"] = self.login.client_id
        answer = self._ask("POST", self._found().token, data=form, auth=auth)
        if 400 <= answer.status_code < 500:
            raise Unauthenticated("the provider did not take the code")
        found = _document(answer).get("id_token")
        if not isinstance(found, str):
            raise AuthorityUnavailable("the provider gave no ID token")
        return found

    def _found(self) -> Endpoints:
        if self._endpoints is None:
            place = self.issuer.issuer.rstrip("/") + "/.well-known/openid-configuration"
            _safe(place)
            said = _document(self._ask("GET", place))
            authorize, token = said.get("authorization_endpoint"), said.get("token_endpoint")
            if said.get("issuer") != self.issuer.issuer or not isinstance(authorize, str) or not isinstance(token, str):
                raise AuthorityUnavailable("the provider does not describe itself as the issuer it should be")
            self._endpoints = Endpoints(_safe(authorize), _safe(token))
        return self._endpoints

    def _ask(self, method: str, url: str, **more: Any) -> httpx2.Response:
        try:
            with self._client() as client:
                return client.request(method, url, headers={"Accept": "application/json"}, **more)
        except httpx2.HTTPError as error:
            raise AuthorityUnavailable(f"the provider does not answer ({type(error).__name__})") from error

    def _client(self) -> httpx2.Client:
        return http_calls.client(self._trusted, _PROVIDER_TIMEOUT_SECONDS, transport=self._transport)

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        """Return the trusted authorities, cached because reading them takes longer than the rest of a request."""
        return http_calls.tls_context(None, AuthorityUnavailable)

    def _secret(self) -> str | None:
        path = self.login.client_secret_file
        if path is None:
            return None
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AuthorityUnavailable("the client secret cannot be read") from error


def challenge(verifier: str) -> str:
    """Return the S256 challenge of RFC 7636."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def _document(answer: httpx2.Response) -> dict[str, Any]:
    if not answer.is_success or len(answer.content) > _MOST_ANSWER_BYTES:
        raise AuthorityUnavailable(f"the provider answered {answer.status_code}")
    try:
        found = json.loads(answer.content)
    except ValueError as error:
        raise AuthorityUnavailable("the provider's answer is not JSON") from error
    if not isinstance(found, dict):
        raise AuthorityUnavailable("the provider's answer is no object")
    return found


def _safe(address: str) -> str:
    """Return the address. Raises AuthorityUnavailable if others could read or answer requests to it."""
    try:
        url = httpx2.URL(address)
    except httpx2.InvalidURL as error:
        raise AuthorityUnavailable("the provider names an address that is none") from error
    if url.scheme != "https" and not (url.scheme == "http" and is_loopback(url.host)):
        raise AuthorityUnavailable("the provider has to be reached over https")
    return address
