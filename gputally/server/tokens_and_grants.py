"""Defines principals and scopes, and reads the token file and the callers file that grant them.

The token file holds only SHA-256 digests, so a reader of the file gets no access. The program reads the file again when
it changes. If a new version is invalid, the program reports it and keeps the version in force. It compares a token with
every entry in constant time, so that timing reveals nothing about the tokens.

Every way to authenticate implements `Authenticator`. An example of a callers file:

schema: 1
kubernetes:                                  # this cluster's own API server reviews the tokens
  audience: gputally
  agents: [gputally/gputally-agent]          # service accounts (namespace/name) that report usage
  jobs: true                                 # pods report the progress of their own job (docs/jobs.md)
  rights: true                               # RBAC too grants rights to people (docs/security.md)
issuers:                                     # other clusters, and the company's login
  - {issuer: https://oidc.edge, audience: gputally, jwks_file: edge.json, cluster: edge, agents: [gputally/agent],
     jobs: true}                             # that cluster's pods report the progress of their own job
  - {issuer: https://login, audience: gputally, jwks_url: https://login/keys, user: email, groups: groups,
     login: {client_id: gputally, client_secret_file: /etc/gputally/login/secret}}   # people sign in to the pages
certificates:                                # one agent's client certificate each, by the common name of its subject
  - {name: lab-n1, cluster: lab, node: n1}
grants:
  - {groups: [platform], scopes: [read, admin]}
  - {groups: [vision-leads], users: [ann@example.com], scopes: [read], teams: [vision]}"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import jwt
import yaml
from pydantic import AwareDatetime, Field, field_validator, model_validator

from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND
from gputally.server import config_loading
from gputally.server.config_loading import Duration, Model, WatchedFile

Scope = Literal["ingest", "import", "read", "progress", "policy", "admin"]
SCOPES: tuple[Scope, ...] = ("ingest", "import", "read", "progress", "policy", "admin")
_TOKEN_BYTES = 32
_CHECK_EVERY_MS = 1_000
"""Least time between two checks of the token file."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. The scope `admin` includes all others.

    cluster, node: the only cluster and node whose usage the principal may report; None for no such limit.
    teams: the only teams whose figures it may see; None for all teams.
    pod: the pod's uid in `cluster` if the principal is a pod, which may report the progress of its own job.
    progress_teams: the only teams whose jobs' progress it may report; None for all teams.
    address: the address of a caller without a name of its own, where nobody needs to sign in; "" for others."""

    name: str
    scopes: frozenset[Scope]
    cluster: str | None = None
    node: str | None = None
    teams: frozenset[str] | None = None
    pod: str | None = None
    progress_teams: frozenset[str] | None = None
    address: str = ""

    @property
    def actor(self) -> str:
        """Who it is, as far as known, for the record of what it does."""
        if not self.address:
            return self.name
        return f"without sign-in, from {'this machine' if _is_loopback(self.address) else self.address}"

    def may(self, scope: Scope) -> bool:
        """Return True if the principal has the scope."""
        return scope in self.scopes or "admin" in self.scopes


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class Unauthenticated(Exception):
    """The caller is not known. The message reveals nothing about known callers."""


class UnknownToken(Unauthenticated):
    """Nothing is known about the token, not even why it would be refused."""

    def __init__(self) -> None:
        super().__init__("the token is not known")


class AuthorityUnavailable(Exception):
    """The caller cannot be identified at present: the API server or the issuer gives no valid answer, or this server is
    not set up as it expects."""


class TooManyUnknown(Exception):
    """An address sent too many unknown tokens. seconds: the time after which the next one is reviewed."""

    def __init__(self, seconds: float) -> None:
        super().__init__("this address sent too many unknown tokens")
        self.seconds = seconds


class Authenticator(Protocol):
    """Identifies the caller behind a bearer token."""

    async def authenticate(self, token: str | None, address: str = "") -> Principal:
        """Return the principal.

        token: the bearer token; None if the request has none.
        address: the caller's IP address.

        Raises Unauthenticated, AuthorityUnavailable or TooManyUnknown."""
        ...


class AnyOf:
    """Tries several authenticators in order. If none knows the token, it raises AuthorityUnavailable if an authority
    did not answer, and otherwise the last authenticator's Unauthenticated, but UnknownToken only if all raise it."""

    def __init__(self, *authenticators: Authenticator) -> None:
        self._authenticators = authenticators

    async def authenticate(self, token: str | None, address: str = "") -> Principal:
        reason: Unauthenticated | None = None
        unavailable: AuthorityUnavailable | None = None
        for authenticator in self._authenticators if token else ():
            try:
                return await authenticator.authenticate(token, address)
            except Unauthenticated as error:
                if reason is None or not isinstance(error, UnknownToken):
                    reason = error
            except AuthorityUnavailable as error:
                unavailable = error
        raise unavailable or reason or Unauthenticated("a bearer token is needed")


class CurrentAuthenticator:
    """Passes each token to the authenticator that `current` returns at that time."""

    def __init__(self, current: Callable[[], Authenticator]) -> None:
        self._current = current

    async def authenticate(self, token: str | None, address: str = "") -> Principal:
        return await self._current().authenticate(token, address)


class AllowAll:
    """Accepts every caller. The accountant's settings allow it only on a loopback address."""

    async def authenticate(self, token: str | None, address: str = "") -> Principal:  # noqa: ARG002  # the protocol's
        return Principal("anonymous", frozenset(SCOPES), address=address or "an unknown address")


class FileToken:
    """Accepts the bearer token that a file holds in plain text, with the scope `read`. It reads the file at every
    request."""

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._path = path

    async def authenticate(self, token: str | None, address: str = "") -> Principal:  # noqa: ARG002  # the protocol's
        try:
            expected = (await asyncio.to_thread(self._path.read_text, encoding="utf-8")).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AuthorityUnavailable(f"{self._path}: the token cannot be read: {error}") from error
        if not expected or token is None or not hmac.compare_digest(sha256(expected), sha256(token)):
            raise UnknownToken
        return Principal(self._name, frozenset({"read"}))


class SingleToken:
    """Accepts a single token, with all scopes, for a process that calls its own API."""

    def __init__(self, token: str) -> None:
        self._digest = sha256(token)

    async def authenticate(self, token: str | None, address: str = "") -> Principal:  # noqa: ARG002  # the protocol's
        if token is None or not hmac.compare_digest(self._digest, sha256(token)):
            raise UnknownToken
        return Principal("self", frozenset(SCOPES))


class TokenEntry(Model):
    """One token of the file. The holder of a token with the scope `ingest` reports for one node of one cluster, and
    with the scope `import` adds usage of the past to one cluster."""

    name: str = Field(min_length=1, max_length=200)
    token_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: tuple[Scope, ...] = Field(min_length=1)
    cluster: str | None = None
    node: str | None = None
    teams: tuple[str, ...] | None = None
    expires: AwareDatetime | None = None

    @model_validator(mode="after")
    def _bound(self) -> Self:
        _check_limited(f"token {self.name!r}", self.scopes, self.teams)
        missing = " and ".join(name for name in ("cluster", "node") if not getattr(self, name))
        if "ingest" in self.scopes and missing:
            raise ValueError(
                f"token {self.name!r} has the scope ingest and no {missing}: its holder could report for any node; "
                "make one token for each node (`gputally accountant token new --scope ingest --cluster CLUSTER "
                "--node NODE`), or let agents show projected service account tokens (`callers: kubernetes`) and remove "
                "this entry"
            )
        if "import" in self.scopes and not self.cluster:
            raise ValueError(
                f"token {self.name!r} has the scope import and no cluster: its holder could add to the past of any "
                "cluster; name the one (`gputally accountant token new --scope import --cluster CLUSTER`)"
            )
        return self

    @property
    def principal(self) -> Principal:
        teams = None if self.teams is None else frozenset(self.teams)
        return Principal(self.name, frozenset(self.scopes), self.cluster, self.node, teams, progress_teams=teams)


class TokenList(Model):
    """The content of the token file."""

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
    """Accepts the bearer tokens of a token file. Raises FileFault if the first version of the file is invalid.

    report: the function that gets the faults of a later version that is not put in force."""

    def __init__(self, path: Path, clock: Clock, report: Callable[[str], None]) -> None:
        self._file = WatchedFile(path, lambda p: config_loading.load_yaml(p, TokenList).tokens, report)
        self._clock = clock
        self._checked_ms = clock.monotonic_ms()

    @property
    def refused(self) -> bool:
        """True while the file's newest version is not in force."""
        return self._file.refused

    def teams(self) -> frozenset[str]:
        """The teams to which the tokens of the version in force are limited."""
        return frozenset(team for entry in self._file.current for team in entry.teams or ())

    async def authenticate(self, token: str | None, address: str = "") -> Principal:  # noqa: ARG002  # the protocol's
        return self.principal_of(token)

    def principal_of(self, token: str | None) -> Principal:
        """Return the principal of a token, without an event loop. Raises Unauthenticated."""
        now = self._clock.monotonic_ms()
        if now - self._checked_ms >= _CHECK_EVERY_MS:
            self._checked_ms = now
            self._file.check()
        if not token:
            raise Unauthenticated("a bearer token is needed")
        digest = sha256(token)
        matching: TokenEntry | None = None
        for entry in self._file.current:  # every entry is compared, so that timing reveals nothing
            if hmac.compare_digest(entry.token_sha256, digest):
                matching = entry
        if matching is None:
            raise UnknownToken
        if matching.expires is not None and matching.expires.timestamp() * MS_PER_SECOND <= self._clock.wall_ms():
            raise Unauthenticated("the token has expired")
        return matching.principal


def token_in(authorization: str, *, basic: bool = True) -> str | None:
    """Return the bearer token of an Authorization header; None if it has none. basic: True to accept the password of
    Basic authentication as a token, because browsers can ask people for it."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if basic and kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None


def sha256(token: str) -> str:
    """Return the digest of a token as the token file stores it. Tokens are 256 random bits, so no slow hash is
    needed."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token(
    name: str,
    scopes: tuple[Scope, ...],
    *,
    cluster: str | None = None,
    node: str | None = None,
    teams: tuple[str, ...] | None = None,
    expires: datetime | None = None,
    token: str | None = None,
) -> tuple[str, str]:
    """Return a new token, or the given one, and its entry for the token file as YAML."""
    token = token or secrets.token_urlsafe(_TOKEN_BYTES)
    entry = TokenEntry(
        name=name, token_sha256=sha256(token), scopes=scopes, cluster=cluster, node=node, teams=teams, expires=expires
    )
    plain = entry.model_dump(mode="json", exclude_none=True)
    return token, yaml.safe_dump([plain], sort_keys=False, default_flow_style=None)


MOST_BYTES = 16 * 1024
"""Longest accepted token."""
SKEW_MS = 30 * MS_PER_SECOND
"""Tolerated difference in milliseconds between an issuer's clock and the local clock."""
_SERVICE_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True)
class UnverifiedToken:
    """The content of a JWT that is not verified yet. It only selects the issuer that verifies the token."""

    issuer: str
    key: str
    algorithm: str
    expires_ms: int


def unverified(token: str, most_bytes: int = MOST_BYTES) -> UnverifiedToken:
    """Decode a JWT without verification. most_bytes: the length of the longest token. Raises UnknownToken for a token
    that is no JWT, Unauthenticated with the reason for a JWT that cannot be used."""
    if token.count(".") != 2:
        raise UnknownToken
    if len(token) > most_bytes:
        raise Unauthenticated(
            f"the token has {len(token)} bytes, and the limit is {most_bytes}: let the issuer put fewer claims into it"
        )
    try:
        header = jwt.get_unverified_header(token)
        claims = jwt.decode(token, options={"verify_signature": False, "verify_exp": False, "verify_aud": False})
    except (jwt.InvalidTokenError, ValueError, RecursionError) as error:
        raise UnknownToken from error
    issuer, key, end = claims.get("iss"), header.get("kid", ""), _instant(claims.get("exp"))
    if not isinstance(issuer, str):
        raise Unauthenticated("the token names no issuer (iss)")
    if end is None:
        raise Unauthenticated("the token has no valid expiry (exp)")
    if not isinstance(key, str):
        raise Unauthenticated("the id of the token's key (kid) is not a text")
    return UnverifiedToken(issuer, key, str(header.get("alg", "")), end)


def check_times(claims: Mapping[str, Any], now_ms: int) -> None:
    """Check the claims `exp` and `nbf`. Raises Unauthenticated if the token has expired or is not valid yet."""
    end, begin = _instant(claims.get("exp")), _instant(claims.get("nbf", 0))
    if end is None or begin is None:
        raise Unauthenticated("the token has no valid times (exp, nbf)")
    if now_ms >= end + SKEW_MS:
        raise Unauthenticated(f"the token expired {(now_ms - end) // MS_PER_SECOND} s ago by this server's clock")
    if now_ms < begin - SKEW_MS:
        raise Unauthenticated(
            f"the token is valid only in {(begin - now_ms) // MS_PER_SECOND} s by this server's clock (nbf), so the "
            f"clocks of this server and of the issuer differ; {SKEW_MS // MS_PER_SECOND} s are tolerated"
        )


def service_account(username: str) -> str | None:
    """Return a service account as NAMESPACE/NAME from its user name; None for any other user."""
    if not username.startswith(_SERVICE_ACCOUNT):
        return None
    namespace, colon, name = username.removeprefix(_SERVICE_ACCOUNT).partition(":")
    return f"{namespace}/{name}" if colon and namespace and name else None


def agent(account: str, node: str | None, agents: Collection[str], cluster: str) -> Principal | None:
    """Return the principal of an agent's service account; None if the account is not one of `agents`.

    Raises Unauthenticated if the token is not bound to a node, because its holder could report for any node."""
    if account not in agents:
        return None
    if not node:
        raise Unauthenticated("the token is not bound to a node (use a projected service account token)")
    return Principal(f"{account}@{node}", frozenset({"ingest"}), cluster, node)


def _instant(value: object) -> int | None:
    """Convert a NumericDate (RFC 7519) to milliseconds; None for a value that is no NumericDate."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**53:
        return None
    return round(value * MS_PER_SECOND)


class KubernetesCallers(Model):
    """Settings for tokens that this cluster's API server reviews."""

    audience: str = Field(default="gputally", min_length=1)
    agents: tuple[str, ...] = ()
    jobs: bool = False
    """True if pods may report the progress of their own job, with a token of their service account for gputally's
    audience."""
    rights: bool = False
    """True if people get rights from RBAC (SubjectAccessReview), in addition to the grants."""

    @model_validator(mode="after")
    def _accounts(self) -> Self:
        _check_accounts(self.agents)
        return self


class Login(Model):
    """Settings for people who sign in to the pages with this issuer (authorization code with PKCE)."""

    client_id: str = Field(min_length=1, max_length=253)
    client_secret_file: Path | None = None
    """File with the client's secret, which is read at every sign-in; None for a public client."""
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    """Requested scopes. Many issuers put groups into the token only for a scope of their own."""
    groups_valid: Duration = Field(default=3_600, ge=60)
    """How long the groups of a sign-in count: within this time a person who was removed from a group loses its rights.
    After half of it, pages send the browser to the issuer for the present groups."""
    label: str = Field(default="", max_length=80)
    """Text of the sign-in link; "" for the issuer's host."""


class Issuer(Model):
    """An OpenID Connect issuer, either of another cluster's service accounts (`cluster`, `agents`) or of people."""

    issuer: str = Field(min_length=1)
    audience: str = Field(min_length=1)
    jwks_file: Path | None = None
    jwks_url: str | None = Field(default=None, pattern=r"^https://")
    ca_file: Path | None = None
    """PEM file with the CAs of the issuer's certificates, for `jwks_url` and `login`; None for the system's CAs."""
    cluster: str | None = None
    """The one cluster whose usage its agents may report."""
    agents: tuple[str, ...] = ()
    jobs: bool = False
    """True if pods of that cluster may report the progress of their own job, with a token that is bound to the pod."""
    user: str = "sub"
    """Claim with a person's name."""
    groups: str = "groups"
    """Claim with a person's groups."""
    email_unverified: bool = False
    """True to accept an e-mail address that the issuer has not verified, if `user` is `email`. This is safe only if
    people cannot enter the address themselves."""
    clients: tuple[str, ...] = ()
    """Clients, besides `audience` and the login's own, to which a person's token may have been issued (`azp`)."""
    login: Login | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.login is not None and self.cluster is not None:
            raise ValueError("people do not sign in with a cluster's issuer: leave out login or cluster")
        if (self.jwks_file is None) == (self.jwks_url is None):
            raise ValueError("give jwks_file or jwks_url, and not both")
        if bool(self.agents or self.jobs) != bool(self.cluster):
            raise ValueError("cluster and agents (or jobs) go together: give both, or neither for people's tokens")
        _check_accounts(self.agents)
        return self


class Certificate(Model):
    """The client certificate of one node's agent. name: the common name of the certificate's subject."""

    name: str = Field(min_length=1)
    cluster: str = Field(min_length=1)
    node: str = Field(min_length=1)

    @property
    def principal(self) -> Principal:
        return Principal(f"certificate:{self.name}", frozenset({"ingest"}), self.cluster, self.node)


class Grant(Model):
    """The scopes of some users and groups. teams: the only teams whose figures they see (`read`) and whose jobs'
    progress they report (`progress`); None: all teams."""

    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    scopes: tuple[Literal["read", "progress", "policy", "admin"], ...] = Field(min_length=1)
    teams: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _limited(self) -> Self:
        _check_limited("the grant", self.scopes, self.teams)
        return self


class Callers(Model):
    """The content of the callers file."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    kubernetes: KubernetesCallers | None = None
    issuers: tuple[Issuer, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    grants: tuple[Grant, ...] = ()

    def certified(self, common_name: str) -> Principal | None:
        """Return the principal of a client certificate; None if the file does not list it."""
        certificate = next((each for each in self.certificates if each.name == common_name), None)
        return certificate.principal if certificate is not None else None


class GrantedRights(NamedTuple):
    """What the grants of a person give. teams, progress_teams: as in `Principal`."""

    scopes: frozenset[Scope]
    teams: frozenset[str] | None
    progress_teams: frozenset[str] | None


def granted(grants: Sequence[Grant], user: str, groups: Collection[str]) -> GrantedRights:
    """Return what the matching grants give. Grants do not extend each other: each scope has the teams of the grants
    that give this scope, so a grant to read one team's figures gives no right to report for it."""
    matching = [grant for grant in grants if user in grant.users or not set(groups).isdisjoint(grant.groups)]
    scopes: frozenset[Scope] = frozenset(scope for grant in matching for scope in grant.scopes)
    return GrantedRights(scopes, _teams_of(matching, "read"), _teams_of(matching, "progress"))


def _teams_of(grants: Sequence[Grant], scope: Scope) -> frozenset[str] | None:
    limits = [grant.teams for grant in grants if {scope, "admin"} & set(grant.scopes)]
    return None if None in limits else frozenset(team for teams in limits for team in teams or ())


_OF_TEAMS: frozenset[Scope] = frozenset({"read", "progress"})
"""Scopes that can be limited to teams."""


def _check_limited(what: str, scopes: Collection[Scope], teams: Sequence[str] | None) -> None:
    unlimited = sorted(set(scopes) - _OF_TEAMS)
    if teams is not None and unlimited:
        raise ValueError(
            f"{what} has teams and the scope {unlimited[0]}, which they cannot limit: give {' and '.join(unlimited)} "
            "without teams, in an entry of its own"
        )


def _check_accounts(accounts: Sequence[str]) -> None:
    for account in accounts:
        if account.count("/") != 1 or not all(account.split("/")):
            raise ValueError(f"not a service account: {account!r} (write NAMESPACE/NAME)")
