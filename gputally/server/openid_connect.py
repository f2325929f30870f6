"""Verifies tokens of OpenID Connect issuers with PyJWT, and exchanges authorization codes for ID tokens.

The module verifies a token's signature, its audience, and its times by the local clock. It accepts only asymmetric
signature algorithms, and reads the issuer's keys (JWKS) from a file or over HTTPS. The issuer of a cluster can
authenticate only the agents of that cluster and, if configured, its pods.

Sources: OpenID Connect Core 1.0 §3.1, OpenID Connect Discovery 1.0 §4, RFC 7636 (PKCE), RFC 6749 §4.1.3."""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from urllib.parse import urlencode

import httpx2
import jwt
import structlog

from gputally.base import http_calls
from gputally.base.clock import Clock
from gputally.base.http_calls import Reply
from gputally.base.units import MS_PER_SECOND
from gputally.server.loopback import is_loopback
from gputally.server.outgoing_calls import OutgoingCalls
from gputally.server.tokens_and_grants import (
    AuthorityUnavailable,
    Grant,
    Issuer,
    Login,
    Principal,
    Unauthenticated,
    UnknownToken,
    UnverifiedToken,
    agent,
    check_times,
    granted,
    service_account,
    unverified,
)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Accepted signature algorithms, all asymmetric. With a symmetric one, every verifier could also make tokens."""
FRESH_MS = 300 * MS_PER_SECOND
"""Age at which keys are fetched again."""
AGAIN_MS = 30 * MS_PER_SECOND
"""Shortest time between two attempts to fetch the keys."""
STALE_MS = 24 * 3600 * MS_PER_SECOND
"""Age above which keys are not used any more if the issuer does not answer."""
_MOST_KEY_BYTES = 1024 * 1024
_KEYS_TIMEOUT_SECONDS = 10
_VERIFIED_AT_ONCE = 8
Fetch = Callable[[], bytes]


def key_source(issuer: Issuer) -> Fetch:
    """Return a function that reads the issuer's keys (JWKS) from its file or its URL."""
    if issuer.jwks_file is not None:
        return issuer.jwks_file.read_bytes
    url = issuer.jwks_url
    assert url is not None

    def fetch() -> bytes:
        tls = http_calls.tls_context(issuer.ca_file, OSError)
        reply = http_calls.exchange(tls, "GET", url, seconds=_KEYS_TIMEOUT_SECONDS, most_bytes=_MOST_KEY_BYTES)
        if reply.status != 200:
            raise OSError(f"{url}: the issuer answered {reply.status}")
        return reply.content

    return fetch


class Keys:
    """The public keys of an issuer by id, which are fetched again when they are old. A failure is logged. Thread-safe:
    while one caller fetches, the others use the present keys."""

    def __init__(self, issuer: str, fetch: Fetch, clock: Clock) -> None:
        self._issuer = issuer
        self._fetch = fetch
        self._clock = clock
        self._changed = threading.Condition()
        self._fetching = False
        self._keys: Mapping[str, Any] = {}
        self._fetched_ms: int | None = None
        self._tried_ms: int | None = None

    def key(self, name: str, patience_s: float = 0.0) -> Any:
        """Return a key. patience_s: how long to wait while another caller fetches it. Raises Unauthenticated if the
        issuer has no such key, AuthorityUnavailable if its keys cannot be fetched."""
        with self._changed:
            now = self._clock.monotonic_ms()
            fresh = self._fetched_ms is not None and now - self._fetched_ms < FRESH_MS
            may_try = self._tried_ms is None or now - self._tried_ms >= AGAIN_MS
            mine = (not fresh or name not in self._keys) and may_try and not self._fetching
            if mine:
                self._fetching, self._tried_ms = True, now
        if mine:
            self._fetch_again()
        with self._changed:
            if name not in self._keys:
                self._changed.wait_for(lambda: not self._fetching, patience_s)
            if self._fetched_ms is None or self._clock.monotonic_ms() - self._fetched_ms > STALE_MS:
                raise AuthorityUnavailable(
                    f"the keys of the issuer {self._issuer} cannot be fetched: try again in a minute "
                    "(the server's log has the reason)"
                )
            if name not in self._keys and self._fetching:
                raise AuthorityUnavailable(f"the keys of the issuer {self._issuer} are being fetched: try again")
            if name not in self._keys:
                raise Unauthenticated("the token is signed with an unknown key")
            return self._keys[name]

    def _fetch_again(self) -> None:
        found: jwt.PyJWKSet | None = None
        try:
            found = jwt.PyJWKSet.from_json(self._fetch().decode())
        except (OSError, httpx2.HTTPError, ValueError, jwt.PyJWTError) as error:
            structlog.get_logger("http").warning(
                "issuer_keys_not_fetched", issuer=self._issuer, reason=http_calls.reason(error)
            )
        finally:  # without new keys the present ones stay in use until they are stale
            with self._changed:
                self._fetching = False
                if found is not None:
                    self._keys = {
                        key.key_id or "": key.key for key in found.keys if key.public_key_use in (None, "sig")
                    }
                    self._fetched_ms = self._clock.monotonic_ms()
                self._changed.notify_all()


class Issuers:
    """Authenticates tokens of all configured issuers (a gputally.server.tokens_and_grants.Authenticator)."""

    def __init__(
        self,
        issuers: Sequence[Issuer],
        grants: Sequence[Grant],
        clock: Clock,
        fetch: Callable[[Issuer], Fetch] = key_source,
    ) -> None:
        self._issuers = [(issuer, Keys(issuer.issuer, fetch(issuer), clock)) for issuer in issuers]
        self._grants = grants
        self._clock = clock
        self._calls = OutgoingCalls("the issuer", _VERIFIED_AT_ONCE)

    async def authenticate(self, token: str | None, address: str = "") -> Principal:  # noqa: ARG002  # the protocol's
        if not token:
            raise UnknownToken
        content = unverified(token)
        fault: Unauthenticated = UnknownToken()
        for issuer, keys in self._issuers:
            if issuer.issuer != content.issuer:
                continue
            try:
                return await self._calls.run(self._principal, token, content, issuer, keys)
            except Unauthenticated as error:
                fault = error
        raise fault

    def _principal(self, token: str, content: UnverifiedToken, issuer: Issuer, keys: Keys) -> Principal:
        claims = verified_claims(token, content, issuer.issuer, issuer.audience, keys, self._clock.wall_ms())
        if issuer.cluster is not None:
            return _of_cluster(claims, issuer)
        check_party(claims, {issuer.audience, *issuer.clients, *([issuer.login.client_id] if issuer.login else [])})
        user, groups = person(claims, issuer)
        return Principal(user, **granted(self._grants, user, groups)._asdict())


def verified_claims(
    token: str,
    content: UnverifiedToken,
    issuer: str,
    audience: str,
    keys: Keys,
    now_ms: int,
    patience_s: float = 0.0,
) -> Mapping[str, Any]:
    """Verify that this issuer made the token for this audience, and return its claims.

    content: the decoded token.
    patience_s: see `Keys.key`.

    Raises Unauthenticated, AuthorityUnavailable."""
    if content.algorithm not in ALGORITHMS:
        raise Unauthenticated(
            f"the token is signed with the algorithm {content.algorithm[:20]!r}, not an asymmetric one"
        )
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            keys.key(content.key, patience_s),
            algorithms=[content.algorithm],
            audience=audience,
            issuer=issuer,
            # `check_times` checks the times with the clock that is an argument.
            options={"require": ["exp"], "verify_exp": False, "verify_nbf": False, "verify_iat": False},
        )
    except (jwt.InvalidAudienceError, jwt.MissingRequiredClaimError) as error:
        raise Unauthenticated(f"the token is not for {audience!r} (aud)") from error
    except jwt.InvalidIssuerError as error:
        raise Unauthenticated(f"the token is not of the issuer {issuer} (iss)") from error
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        raise Unauthenticated("the token's signature is not valid") from error
    check_times(claims, now_ms)
    return claims


def check_party(claims: Mapping[str, Any], clients: Collection[str]) -> None:
    """Check the authorized party (`azp`) of a token (OpenID Connect Core 1.0, 3.1.3.7).

    Raises Unauthenticated if the token was made for a client not in `clients`, or if it has several audiences and no
    authorized party."""
    party, audience = claims.get("azp"), claims.get("aud")
    if party is None and isinstance(audience, list) and len(audience) > 1:
        raise Unauthenticated("the token is for several audiences and does not say which client it was made for (azp)")
    if party is not None and party not in clients:
        raise Unauthenticated("the token was made for another client (azp)")


def person(claims: Mapping[str, Any], issuer: Issuer) -> tuple[str, list[str]]:
    """Return a person's name and groups. Raises Unauthenticated if the token has no claim with the name. What of the
    claim of groups cannot be read is logged (`groups_fault`)."""
    user, groups = claims.get(issuer.user), claims.get(issuer.groups)
    if not isinstance(user, str) or not user:
        raise Unauthenticated(f"the token has no claim {issuer.user!r}")
    if issuer.user == "email" and not issuer.email_unverified and claims.get("email_verified") is not True:
        raise Unauthenticated("the issuer has not verified the e-mail address (email_verified)")
    if fault := groups_fault(claims, issuer):
        structlog.get_logger("http").warning("groups_not_read", issuer=issuer.issuer, user=user, reason=fault)
    return user, [group for group in groups if isinstance(group, str)] if isinstance(groups, list) else []


def groups_fault(claims: Mapping[str, Any], issuer: Issuer) -> str:
    """Return why a token's claim of groups cannot be read; "" if it can, or if the token has none."""
    groups, elsewhere = claims.get(issuer.groups), claims.get("_claim_names")
    if groups is None and isinstance(elsewhere, dict) and issuer.groups in elsewhere:  # OpenID Connect Core, 5.6.2
        return (
            f"the token has too many groups for the claim {issuer.groups!r}, which the issuer keeps elsewhere, so no "
            "group counts: let the issuer send only groups that have grants here"
        )
    if groups is not None and not isinstance(groups, list):
        return f"the claim {issuer.groups!r} is not a list of names, so no group counts: let the issuer send a list"
    others = sum(1 for group in groups or () if not isinstance(group, str))
    if others:
        return (
            f"{others} entries of the claim {issuer.groups!r} are not names and do not count: let the issuer send names"
        )
    return ""


def _of_cluster(claims: Mapping[str, Any], issuer: Issuer) -> Principal:
    """Return the principal of a service account's token: an agent, or a pod that reports the progress of its job.

    The function does not check whether the pod still exists; its token is valid until it expires."""
    assert issuer.cluster is not None
    account = service_account(str(claims.get("sub", ""))) or ""
    principal = agent(account, _bound_to(claims, "node", "name"), issuer.agents, issuer.cluster)
    pod = _bound_to(claims, "pod", "uid")
    if principal is None and issuer.jobs and account and pod:
        name = f"{account} of {issuer.cluster}"
        principal = Principal(name, frozenset({"progress"}), issuer.cluster, pod=pod)
    if principal is None:
        raise Unauthenticated("the token is not that of an agent" + (", or of a pod" if issuer.jobs else ""))
    return principal


def _bound_to(claims: Mapping[str, Any], kind: str, attribute: str) -> str | None:
    """Return an attribute of the object to which a service account's token is bound (claim `kubernetes.io`)."""
    bindings = claims.get("kubernetes.io")
    bound = bindings.get(kind) if isinstance(bindings, dict) else None
    value = bound.get(attribute) if isinstance(bound, dict) else None
    return value if isinstance(value, str) and value else None


_PROVIDER_TIMEOUT_SECONDS: Final = 10.0
MOST_ANSWER_BYTES: Final = 256 * 1024
"""Longest answer of a provider, and so longest ID token at sign-in: that of a person in thousands of groups."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The URLs of an issuer's authorization endpoint and token endpoint."""

    authorize: str
    token: str


class Provider:
    """A client of an issuer with which people sign in. Thread-safe. Its methods raise AuthorityUnavailable if the
    issuer gives no valid answer."""

    def __init__(self, issuer: Issuer, login: Login) -> None:
        self.issuer = issuer
        self.login = login
        self._endpoints: Endpoints | None = None

    @property
    def label(self) -> str:
        """The text of the sign-in link."""
        return self.login.label or httpx2.URL(self.issuer.issuer).host

    def authorization_url(self, redirect: str, state: str, nonce: str, verifier: str) -> str:
        """Return the URL at which a browser begins the sign-in. Raises AuthorityUnavailable."""
        parameters = {
            "response_type": "code",
            "client_id": self.login.client_id,
            "redirect_uri": redirect,
            "scope": " ".join(self.login.scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge(verifier),
            "code_challenge_method": "S256",
        }
        address = self._discovered().authorize
        return f"{address}{'&' if '?' in address else '?'}{urlencode(parameters)}"

    def id_token(self, code: str, redirect: str, verifier: str) -> str:
        """Exchange a code for an ID token, and return the token unverified. Raises Unauthenticated,
        AuthorityUnavailable."""
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect, "code_verifier": verifier}
        secret = self._secret()
        auth = httpx2.BasicAuth(self.login.client_id, secret) if secret is not None else None
        if secret is None:
            form["client_id"] = self.login.client_id
        answer = self._request("POST", self._discovered().token, data=form, auth=auth)
        if 400 <= answer.status < 500:
            raise self._refused(answer)
        token = _document(answer).get("id_token")
        if not isinstance(token, str):
            raise AuthorityUnavailable("the provider's answer has no ID token")
        return token

    def _discovered(self) -> Endpoints:
        """Return the endpoints from the issuer's OpenID configuration, which is read once."""
        if self._endpoints is None:
            url = _safe(self.issuer.issuer.rstrip("/") + "/.well-known/openid-configuration")
            document = _document(self._request("GET", url))
            authorize, token = document.get("authorization_endpoint"), document.get("token_endpoint")
            if document.get("issuer") != self.issuer.issuer:
                raise AuthorityUnavailable(
                    "the provider's OpenID configuration names an issuer other than the configured one"
                )
            if not isinstance(authorize, str) or not isinstance(token, str):
                raise AuthorityUnavailable(
                    "the provider's OpenID configuration lacks authorization_endpoint or token_endpoint"
                )
            self._endpoints = Endpoints(_safe(authorize), _safe(token))
        return self._endpoints

    def _refused(self, answer: Reply) -> Unauthenticated | AuthorityUnavailable:
        """The refusal of a code by the token endpoint (RFC 6749 §5.2)."""
        try:
            code = str(json.loads(answer.content).get("error", ""))
        except (ValueError, AttributeError):
            code = ""
        if answer.status == 429:
            return AuthorityUnavailable(
                f"{self.label} refuses because it gets too many requests: try again in a minute"
            )
        if code == "invalid_client" or answer.status == 401:
            return AuthorityUnavailable(
                f"{self.label} does not accept this server's client_id and secret (invalid_client): the operator has "
                "to correct login.client_id or login.client_secret_file"
            )
        if code == "invalid_grant":
            return Unauthenticated("the provider refused the code, which is used or has expired (invalid_grant)")
        return Unauthenticated(f"the provider refused the code ({code[:40]!r}, status {answer.status})")

    def _request(self, method: str, url: str, **more: Any) -> Reply:
        try:
            return http_calls.exchange(
                self._tls, method, url, seconds=_PROVIDER_TIMEOUT_SECONDS, most_bytes=MOST_ANSWER_BYTES,
                headers={"Accept": "application/json"}, **more,
            )  # fmt: skip
        except httpx2.HTTPError as error:
            raise AuthorityUnavailable(
                f"{self.label} does not answer ({http_calls.reason(error)}): try again in a minute"
            ) from error

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The TLS context with the issuer's CAs. It is cached, because loading the system's CAs takes longer than a
        request."""
        return http_calls.tls_context(self.issuer.ca_file, AuthorityUnavailable)

    def _secret(self) -> str | None:
        path = self.login.client_secret_file
        if path is None:
            return None
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AuthorityUnavailable(
                "this server cannot read its secret for the provider (client_secret_file)"
            ) from error


def challenge(verifier: str) -> str:
    """Return the S256 challenge of RFC 7636."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def _document(answer: Reply) -> dict[str, Any]:
    if answer.status != 200:
        raise AuthorityUnavailable(f"the provider answered {answer.status}: try again in a minute")
    try:
        document = json.loads(answer.content)
    except ValueError as error:
        raise AuthorityUnavailable("the provider's answer is not JSON") from error
    if not isinstance(document, dict):
        raise AuthorityUnavailable("the provider's answer is not a JSON object")
    return document


def _safe(address: str) -> str:
    """Return an address of the provider if it is https, or http on this machine. Raises AuthorityUnavailable for any
    other address, because a third machine could read or answer requests to it."""
    try:
        url = httpx2.URL(address)
    except httpx2.InvalidURL as error:
        raise AuthorityUnavailable("the provider's OpenID configuration has an invalid address") from error
    if url.scheme != "https" and not (url.scheme == "http" and is_loopback(url.host)):
        raise AuthorityUnavailable("the provider's OpenID configuration has an address that is not https")
    return address
