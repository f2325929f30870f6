"""Who may do what: the file of callers, and what it makes of a person's name and groups. Pure but for loading.

schema: 1
kubernetes:                                  # this cluster's own API server vouches for its tokens
  audience: gputally
  agents: [gputally/gputally-agent]          # service accounts (namespace/name) that report usage
  jobs: true                                 # pods report the progress of their own job (docs/jobs.md)
  rights: true                               # people may also be granted by RBAC (docs/security.md)
issuers:                                     # other clusters, and the company's login
  - {issuer: https://oidc.edge, audience: gputally, jwks_file: edge.json, cluster: edge, agents: [gputally/agent],
     jobs: true}                             # that cluster's pods report the progress of their own job
  - {issuer: https://login, audience: gputally, jwks_url: https://login/keys, user: email, groups: groups,
     login: {client_id: gputally, client_secret_file: /etc/gputally/login/secret}}   # people sign in to the pages
certificates:                                # client certificates, by the common name of their subject
  - {name: agents-of-lab, cluster: lab}
grants:
  - {groups: [platform], scopes: [read, admin]}
  - {groups: [vision-leads], users: [ann@example.com], scopes: [read], teams: [vision]}
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from accountant.callers.auth import Principal, Scope
from accountant.wire import Model


class KubernetesCallers(Model):
    """Tokens that the API server of this cluster reviews."""

    audience: str = Field(default="gputally", min_length=1)
    agents: tuple[str, ...] = ()
    jobs: bool = False
    """Pods may report the progress of their own job, with a token of their service account for our audience."""
    rights: bool = False
    """Ask the API server (SubjectAccessReview) what a person may, beside the grants."""

    @model_validator(mode="after")
    def _accounts(self) -> Self:
        _check_accounts(self.agents)
        return self


class Login(Model):
    """People sign in to the pages with this issuer (authorization code with PKCE)."""

    client_id: str = Field(min_length=1, max_length=253)
    client_secret_file: Path | None = None
    """Read at every sign-in. None: a public client."""
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    """What is asked for; many issuers put groups into the token only for a scope of their own."""
    label: str = Field(default="", max_length=80)
    """What the link says; the issuer's host if empty."""


class Issuer(Model):
    """An OpenID Connect issuer: of another cluster's service accounts (`cluster`, `agents`), or of people."""

    issuer: str = Field(min_length=1)
    audience: str = Field(min_length=1)
    jwks_file: Path | None = None
    jwks_url: str | None = Field(default=None, pattern=r"^https://")
    cluster: str | None = None
    """The one cluster whose usage its agents may report."""
    agents: tuple[str, ...] = ()
    jobs: bool = False
    """Pods of that cluster may report the progress of their own job, with a token that is bound to the pod."""
    user: str = "sub"
    """Claim with a person's name."""
    groups: str = "groups"
    """Claim with a person's groups."""
    email_unverified: bool = False
    """Where `user` is `email`: believe an address that the token does not call verified. Only for an issuer at which
    people cannot enter the address themselves."""
    clients: tuple[str, ...] = ()
    """Clients, beside `audience` and the login's own, for which a person's token may have been made (`azp`)."""
    login: Login | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.login is not None and self.cluster is not None:
            raise ValueError("people do not sign in with a cluster's issuer: leave out login or cluster")
        if (self.jwks_file is None) == (self.jwks_url is None):
            raise ValueError("give jwks_file or jwks_url")
        if bool(self.agents or self.jobs) != bool(self.cluster):
            raise ValueError("cluster and agents (or jobs) go together")
        _check_accounts(self.agents)
        return self


class Certificate(Model):
    """A client certificate of agents, by the common name of its subject."""

    name: str = Field(min_length=1)
    cluster: str = Field(min_length=1)
    node: str | None = None

    @property
    def principal(self) -> Principal:
        return Principal(f"certificate:{self.name}", frozenset({"ingest"}), self.cluster, self.node)


class Grant(Model):
    """What these people may. teams: the only ones whose figures they see; None: all."""

    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    scopes: tuple[Literal["read", "progress", "policy", "admin"], ...] = Field(min_length=1)
    teams: tuple[str, ...] | None = None


class Callers(Model):
    """The whole file."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    kubernetes: KubernetesCallers | None = None
    issuers: tuple[Issuer, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    grants: tuple[Grant, ...] = ()

    def certified(self, common_name: str) -> Principal | None:
        """Whose client certificate it is."""
        found = next((one for one in self.certificates if one.name == common_name), None)
        return found.principal if found is not None else None


def granted(
    grants: Sequence[Grant], user: str, groups: Collection[str]
) -> tuple[frozenset[Scope], frozenset[str] | None]:
    """Scopes and visible teams of a person: what all matching grants give together."""
    scopes: set[Scope] = set()
    teams: set[str] = set()
    everything = False
    for grant in grants:
        if user in grant.users or not set(groups).isdisjoint(grant.groups):
            scopes |= set(grant.scopes)
            if {"read", "progress", "admin"} & set(grant.scopes):
                everything |= grant.teams is None
                teams |= set(grant.teams or ())
    return frozenset(scopes), None if everything else frozenset(teams)


def _check_accounts(accounts: Sequence[str]) -> None:
    for account in accounts:
        if account.count("/") != 1 or not all(account.split("/")):
            raise ValueError(f"not a service account: {account!r} (write NAMESPACE/NAME)")
