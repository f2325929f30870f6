"""An OpenID Connect provider on the loopback. The test decides who signs in, and the provider checks every request."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
import trustme
from cryptography.hazmat.primitives.asymmetric import rsa

from gputally.base.clock import Clock
from gputally.testing.http_server import Handler, listening


@cache
def _key() -> rsa.RSAPrivateKey:
    """The RSA key that all providers share, because generating one takes a tenth of a second."""
    return rsa.generate_private_key(65537, 2048)


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class Provider:
    """claims: of the next user. secret: the client's secret; None for a public client. refuse: reject every sign-in.
    spoil: changes the claims of the ID token. token_answer: status and body of the token endpoint. hang: while it is
    not set, no request is answered, and `waiting` counts them. trickles: the token endpoint sends a byte now and then
    until the client has gone."""

    clock: Clock
    url: str = ""
    client_id: str = "gputally"
    secret: str | None = "client-s3cret"
    claims: dict[str, Any] = field(
        default_factory=lambda: {"sub": "1", "email": "ann@example.com", "email_verified": True, "groups": []}
    )
    spoil: dict[str, Any] = field(default_factory=dict)
    refuse: bool = False
    token_answer: tuple[int, bytes] | None = None
    hang: threading.Event = field(default_factory=_set)
    trickles: bool = False
    waiting: int = 0
    asked: list[dict[str, str]] = field(default_factory=list)
    key: rsa.RSAPrivateKey = field(default_factory=_key)
    _codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def wait(self) -> None:
        """Hang while the test says so."""
        if not self.hang.is_set():
            self.waiting += 1
            self.hang.wait(60)

    def keys(self) -> bytes:
        """Return the JWKS document."""
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
        return json.dumps({"keys": [{**public, "kid": "k1", "use": "sig", "alg": "RS256"}]}).encode()

    def authorize(self, asked: dict[str, str]) -> str:
        """Return the address to which the browser is redirected."""
        self.asked.append(asked)
        assert asked["response_type"] == "code"
        assert asked["client_id"] == self.client_id
        assert asked["code_challenge_method"] == "S256"
        assert "openid" in asked["scope"].split()
        answer = {"state": asked["state"], "iss": self.url}
        if self.refuse:
            answer["error"] = "access_denied"
        else:
            answer["code"] = secrets.token_urlsafe()
            self._codes[answer["code"]] = asked
        return f"{asked['redirect_uri']}?{urlencode(answer)}"

    def token(self, form: dict[str, str], authorization: str) -> dict[str, Any] | None:
        """Return the token response; None for an invalid request. A code is valid once."""
        begun = self._codes.pop(form.get("code", ""), None)
        if begun is None or form.get("redirect_uri") != begun["redirect_uri"]:
            return None
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != begun["code_challenge"]:
            return None
        known = f"{self.client_id}:{self.secret}".encode()
        if self.secret is None:
            if form.get("client_id") != self.client_id:
                return None
        elif authorization != "Basic " + base64.b64encode(known).decode():
            return None
        now = self.clock.wall_ms() // 1000
        times = {"iss": self.url, "aud": self.client_id, "iat": now, "exp": now + 300, "nonce": begun["nonce"]}
        claims = {**times, **self.claims, **self.spoil}
        token = jwt.encode(claims, self.key, algorithm="RS256", headers={"kid": "k1"})
        return {"token_type": "Bearer", "access_token": "none", "id_token": token}


@contextmanager
def provider(clock: Clock, authority: trustme.CA | None = None) -> Iterator[Provider]:
    """Run a provider until the block ends. authority: of its certificate; None: it speaks plain HTTP."""
    state = Provider(clock)
    tls = None
    if authority is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(tls)

    class Endpoints(Handler):
        def do_GET(self) -> None:
            state.wait()
            url = urlsplit(self.path)
            if url.path == "/.well-known/openid-configuration":
                described = {
                    "issuer": state.url,
                    "authorization_endpoint": f"{state.url}/authorize",
                    "token_endpoint": f"{state.url}/token",
                    "jwks_uri": f"{state.url}/keys",
                }
                self.say(200, json.dumps(described).encode())
            elif url.path == "/authorize":
                self.say(302, Location=state.authorize({k: v[0] for k, v in parse_qs(url.query).items()}))
            elif url.path == "/keys":
                self.say(200, state.keys())
            else:
                self.say(404, b"{}")

        def do_POST(self) -> None:
            body = self.content().decode()
            form = {k: v[0] for k, v in parse_qs(body).items()}
            given = state.token(form, self.headers.get("Authorization", ""))
            answer = 400 if given is None else 200, json.dumps(given or {"error": "invalid_grant"}).encode()
            if state.trickles:
                self.trickle()
            else:
                self.say(*(state.token_answer or answer))

    with listening(Endpoints, tls) as state.url:
        yield state
