"""Speaking with an OpenID Connect provider: where it is, and a code for a token.

Sources: OpenID Connect Core 1.0 §3.1, OpenID Connect Discovery 1.0 §4, RFC 7636 (PKCE), RFC 6749 §4.1.3.
"""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from urllib.parse import urlencode

import httpx2

from accountant.callers.auth import AuthorityUnavailable, Unauthenticated, is_loopback
from accountant.callers.grants import Issuer, Login

_TIMEOUT_SECONDS: Final = 10.0
_MOST_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Endpoints:
    authorize: str
    token: str


class Provider:
    """One issuer that people sign in with. Thread-safe."""

    def __init__(self, issuer: Issuer, login: Login, transport: httpx2.BaseTransport | None = None) -> None:
        self.issuer = issuer
        self.login = login
        self._transport = transport
        self._endpoints: Endpoints | None = None

    @property
    def label(self) -> str:
        return self.login.label or httpx2.URL(self.issuer.issuer).host

    def leave_for(self, redirect: str, state: str, nonce: str, verifier: str) -> str:
        """The address to send a browser to. Raises AuthorityUnavailable."""
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
        """What the provider gives for a code; not verified here. Raises Unauthenticated, AuthorityUnavailable."""
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
        return httpx2.Client(
            timeout=_TIMEOUT_SECONDS, transport=self._transport, verify=self._trusted, follow_redirects=False
        )

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        """The authorities: reading them takes longer than all else of a request."""
        return httpx2.create_ssl_context()

    def _secret(self) -> str | None:
        path = self.login.client_secret_file
        if path is None:
            return None
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AuthorityUnavailable("the client secret cannot be read") from error


def challenge(verifier: str) -> str:
    """S256 of RFC 7636."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def _document(answer: httpx2.Response) -> dict[str, Any]:
    if not answer.is_success or len(answer.content) > _MOST_BYTES:
        raise AuthorityUnavailable(f"the provider answered {answer.status_code}")
    try:
        found = json.loads(answer.content)
    except ValueError as error:
        raise AuthorityUnavailable("the provider's answer is no JSON") from error
    if not isinstance(found, dict):
        raise AuthorityUnavailable("the provider's answer is no object")
    return found


def _safe(address: str) -> str:
    """Raises AuthorityUnavailable for an address over which others could read or answer in its place."""
    try:
        url = httpx2.URL(address)
    except httpx2.InvalidURL as error:
        raise AuthorityUnavailable("the provider names an address that is none") from error
    if url.scheme != "https" and not (url.scheme == "http" and is_loopback(url.host)):
        raise AuthorityUnavailable("the provider has to be reached over https")
    return address
