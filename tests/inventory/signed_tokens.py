"""Signed tokens of an issuer, and the caller that grants make of them."""

from __future__ import annotations

import asyncio
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from gputally.base.clock import VirtualClock
from gputally.server.tokens_and_grants import Grant, Principal

KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EDGE, LOGIN = "https://oidc.edge", "https://login"


def ask(way: Any, token: str | None) -> Principal:
    found: Principal = asyncio.run(way.authenticate(token))
    return found


def signed(clock: VirtualClock, key: Any = KEY, kid: str = "k1", algorithm: str = "RS256", **claims: Any) -> str:
    now = clock.wall_ms() // 1000
    given = {"iss": EDGE, "aud": "gputally", "exp": now + 600, "sub": "system:serviceaccount:gputally:agent"}
    return jwt.encode({**given, **claims}, key, algorithm=algorithm, headers={"kid": kid})


GRANTS = (
    Grant(groups=("platform",), scopes=("read", "admin")),
    Grant(groups=("vision",), users=("ann@example.com",), scopes=("read",), teams=("vision",)),
    Grant(groups=("fair",), scopes=("policy",)),
)
