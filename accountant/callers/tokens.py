"""Tokens others issue: what they say before anybody vouched for it, and service accounts in them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from accountant.callers.auth import Principal, Unauthenticated
from agent.units import MS_PER_SECOND

MOST_BYTES = 16 * 1024
"""Longest token that is looked at."""
SKEW_MS = 30 * MS_PER_SECOND
"""By which an issuer's clock may differ from ours."""
_SERVICE_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True)
class Unverified:
    """A token's own words; nothing of it is believed, it only says whom to ask."""

    issuer: str
    key: str
    algorithm: str
    expires_ms: int


def unverified(token: str) -> Unverified | None:
    """None for what is no JWT with an end."""
    if len(token) > MOST_BYTES or token.count(".") != 2:
        return None
    try:
        header = jwt.get_unverified_header(token)
        claims = jwt.decode(token, options={"verify_signature": False, "verify_exp": False, "verify_aud": False})
    except (jwt.InvalidTokenError, ValueError, RecursionError):
        return None
    issuer, key, end = claims.get("iss"), header.get("kid", ""), _instant(claims.get("exp"))
    if not isinstance(issuer, str) or not isinstance(key, str) or end is None:
        return None
    return Unverified(issuer, key, str(header.get("alg", "")), end)


def check_times(claims: Mapping[str, Any], now_ms: int) -> None:
    """Raises Unauthenticated for a token that is over, or not yet valid."""
    end, begin = _instant(claims.get("exp")), _instant(claims.get("nbf", 0))
    if end is None or now_ms >= end + SKEW_MS:
        raise Unauthenticated("the token has expired")
    if begin is None or now_ms < begin - SKEW_MS:
        raise Unauthenticated("the token is not valid yet")


def service_account(username: str) -> str | None:
    """NAMESPACE/NAME of a service account's user name; None for anybody else."""
    if not username.startswith(_SERVICE_ACCOUNT):
        return None
    namespace, colon, name = username.removeprefix(_SERVICE_ACCOUNT).partition(":")
    return f"{namespace}/{name}" if colon and namespace and name else None


def agent(account: str, node: str | None, agents: Collection[str], cluster: str) -> Principal | None:
    """The principal of an agent's service account; None where the account is none of them.

    A token that is not bound to a node could report for any: it is refused. Raises Unauthenticated."""
    if account not in agents:
        return None
    if not node:
        raise Unauthenticated("the token is not bound to a node (use a projected service account token)")
    return Principal(f"{account}@{node}", frozenset({"ingest"}), cluster, node)


def _instant(value: object) -> int | None:
    """A NumericDate as milliseconds; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**53:
        return None
    return round(value * MS_PER_SECOND)
