"""Who may ask what: bearer tokens with scopes, kept hashed in a file.

The file holds only SHA-256 digests, so that reading it opens no door. It is read again when it
changes; a broken new version is reported and the one in force stays. Every entry is compared in
constant time, and all of them are, so that timing tells nothing about the tokens.

`Authenticator` is the seam for other ways in (a cluster's TokenReview). No HTTP here. Published: the controller's pages
take the same file.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

import yaml
from pydantic import AwareDatetime, Field, field_validator

from accountant import yamlfile
from accountant.watched import Watched
from accountant.wire import Model
from agent.clock import Clock
from agent.units import MS_PER_SECOND

Scope = Literal["ingest", "import", "read", "progress", "policy", "admin"]
SCOPES: tuple[Scope, ...] = ("ingest", "import", "read", "progress", "policy", "admin")
_TOKEN_BYTES = 32
_LOOK_EVERY_MS = 1_000


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking. `admin` includes the other scopes.

    cluster, node: the only ones whose usage this principal may report. teams: the only ones whose
    figures it may see, and whose jobs' progress it may report; None: all. pod: uid of the pod (of `cluster`) that it
    is, which may report the progress of its own job."""

    name: str
    scopes: frozenset[Scope]
    cluster: str | None = None
    node: str | None = None
    teams: frozenset[str] | None = None
    pod: str | None = None

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes


class Unauthenticated(Exception):
    """Nobody known, with a reason that gives nothing away."""


class AuthorityUnavailable(Exception):
    """Whoever could say who that is does not answer now."""


class TooManyUnknown(Exception):
    """An address brought more unknown tokens than others may be asked about; more are looked at after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__("more unknown tokens than one address may bring")
        self.seconds = seconds


class Authenticator(Protocol):
    """Turns a bearer token into who that is."""

    async def authenticate(self, token: str | None, address: str = "") -> Principal:
        """Raises Unauthenticated, AuthorityUnavailable or TooManyUnknown. None: the request carried no token.
        address: of whoever asks."""
        ...


class AnyOf:
    """Several ways in, tried in order; the last one's reason is given where none knows the token."""

    def __init__(self, *ways: Authenticator) -> None:
        self._ways = ways

    async def authenticate(self, token: str | None, address: str = "") -> Principal:
        fault: Exception = Unauthenticated("a bearer token is needed")
        unsure: AuthorityUnavailable | None = None
        for way in self._ways if token else ():
            try:
                return await way.authenticate(token, address)
            except Unauthenticated as error:
                fault = error
            except AuthorityUnavailable as error:
                unsure = error
        raise unsure or fault


class Current:
    """Whoever is in charge by now: for a configuration that is read again."""

    def __init__(self, way: Callable[[], Authenticator]) -> None:
        self._way = way

    async def authenticate(self, token: str | None, address: str = "") -> Principal:
        return await self._way().authenticate(token, address)


class Everybody:
    """No tokens at all: for a loopback address only (accountant.settings sees to that)."""

    async def authenticate(self, token: str | None, address: str = "") -> Principal:  # noqa: ARG002  # the protocol's
        return Principal("anonymous", frozenset(SCOPES))


class OneToken:
    """A single secret for everything: for a process that asks itself."""

    def __init__(self, token: str) -> None:
        self._digest = sha256(token)

    async def authenticate(self, token: str | None, address: str = "") -> Principal:  # noqa: ARG002  # the protocol's
        if token is None or not hmac.compare_digest(self._digest, sha256(token)):
            raise Unauthenticated("the token is not known")
        return Principal("self", frozenset(SCOPES))


class TokenEntry(Model):
    """One token of the file."""

    name: str = Field(min_length=1, max_length=200)
    token_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: tuple[Scope, ...] = Field(min_length=1)
    cluster: str | None = None
    node: str | None = None
    teams: tuple[str, ...] | None = None
    expires: AwareDatetime | None = None

    @property
    def principal(self) -> Principal:
        teams = None if self.teams is None else frozenset(self.teams)
        return Principal(self.name, frozenset(self.scopes), self.cluster, self.node, teams)


class TokenList(Model):
    """The token file."""

    tokens: tuple[TokenEntry, ...]

    @field_validator("tokens")
    @classmethod
    def _distinct(cls, tokens: tuple[TokenEntry, ...]) -> tuple[TokenEntry, ...]:
        seen: set[str] = set()
        for entry in tokens:
            for part in (entry.name, entry.token_sha256):
                if part in seen:
                    raise ValueError(f"token {entry.name!r} is listed twice")
                seen.add(part)
        return tokens


class TokenFile:
    """Bearer tokens from a file. Raises FileFault where the first version cannot be read.

    report: called with the faults of a later version that is not taken into force."""

    def __init__(self, path: Path, clock: Clock, report: Callable[[str], None]) -> None:
        self._file = Watched(path, lambda p: yamlfile.load(p, TokenList).tokens, report)
        self._clock = clock
        self._looked_ms = clock.monotonic_ms()

    @property
    def refused(self) -> bool:
        """Whether the file's newest version is not in force."""
        return self._file.refused

    async def authenticate(self, token: str | None, address: str = "") -> Principal:  # noqa: ARG002  # the protocol's
        return self.whose(token)

    def whose(self, token: str | None) -> Principal:
        """The same for callers without an event loop. Raises Unauthenticated."""
        now = self._clock.monotonic_ms()
        if now - self._looked_ms >= _LOOK_EVERY_MS:
            self._looked_ms = now
            self._file.look()
        if not token:
            raise Unauthenticated("a bearer token is needed")
        digest = sha256(token)
        found: TokenEntry | None = None
        for entry in self._file.current:
            if hmac.compare_digest(entry.token_sha256, digest):
                found = entry
        if found is None:
            raise Unauthenticated("the token is not known")
        if found.expires is not None and found.expires.timestamp() * MS_PER_SECOND <= self._clock.wall_ms():
            raise Unauthenticated("the token has expired")
        return found.principal


def is_loopback(host: str) -> bool:
    """True where only this machine can connect. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def sha256(token: str) -> str:
    """Digest of a token as the file keeps it. Tokens are 256 random bits, so no slow hash is needed."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token(
    name: str,
    scopes: tuple[Scope, ...],
    *,
    cluster: str | None = None,
    node: str | None = None,
    teams: tuple[str, ...] | None = None,
    expires: datetime | None = None,
) -> tuple[str, str]:
    """A fresh token, and its entry for the token file as YAML."""
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    entry = TokenEntry(
        name=name, token_sha256=sha256(token), scopes=scopes, cluster=cluster, node=node, teams=teams, expires=expires
    )
    plain = entry.model_dump(mode="json", exclude_none=True)
    return token, yaml.safe_dump([plain], sort_keys=False, default_flow_style=None)
