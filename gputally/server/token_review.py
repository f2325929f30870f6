"""Authenticates service accounts and people by Kubernetes TokenReview, and reads their rights from RBAC.

The module caches an answer for at most a minute, and never beyond the token's own expiry. An agent's token must have
gputally's audience and be bound to a pod, so that the agent of one node cannot report for another. The review names the
pod's node. Before Kubernetes 1.30 it names only the pod, which is then looked up by name and uid. While the API server
does not answer, callers stay admitted until their cached answer expires, and new callers get `AuthorityUnavailable`,
soon if other reviews hang (`OutgoingCalls`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
from cachetools import TLRUCache

from gputally.base.clock import Clock
from gputally.base.errors import ClusterError
from gputally.base.units import MS_PER_SECOND
from gputally.base.untrusted_text import UNDECODABLE
from gputally.kubernetes.objects import Api
from gputally.server.outgoing_calls import OutgoingCalls
from gputally.server.rate_and_connection_limits import RateLimit
from gputally.server.tokens_and_grants import (
    AuthorityUnavailable,
    Grant,
    KubernetesCallers,
    Principal,
    Scope,
    TooManyUnknown,
    Unauthenticated,
    UnknownToken,
    agent,
    granted,
    service_account,
    sha256,
    unverified,
)

T = TypeVar("T")
REMEMBERED_MS = 60 * MS_PER_SECOND
"""Milliseconds for which an admitted token is cached."""
REFUSED_MS = 10 * MS_PER_SECOND
"""Milliseconds for which a refused token is cached."""
MOST_REMEMBERED = 16_384
"""Largest number of cached tokens."""
MOST_TEAMS = 500
"""Largest number of teams for which the API server is asked whether a person may see the team."""
_REVIEWS_AT_ONCE = 8
_POD = "authentication.kubernetes.io/pod-uid"
_POD_NAME = "authentication.kubernetes.io/pod-name"
_NODE = "authentication.kubernetes.io/node-name"
GROUP = "gputally.dev"
"""The API group of gputally's resources in RBAC rules. No such API has to exist in the cluster."""
_RIGHTS: tuple[tuple[Scope, str, str], ...] = (
    ("read", "get", "usage"),
    ("policy", "update", "policies"),
    ("admin", "update", "ledgers"),
)


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    audiences: list[str] = []
    user: _User = msgspec.field(default_factory=_User)


class _TokenReview(msgspec.Struct):
    status: _TokenStatus


class _PodMeta(msgspec.Struct):
    uid: str = ""


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""


class _Pod(msgspec.Struct):
    metadata: _PodMeta = msgspec.field(default_factory=_PodMeta)
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)


class _PodList(msgspec.Struct):
    items: list[_Pod] = []


class _AccessStatus(msgspec.Struct):
    allowed: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus


_token_review = msgspec.json.Decoder(_TokenReview)
_pod_list = msgspec.json.Decoder(_PodList)
_access_review = msgspec.json.Decoder(_AccessReview)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The cached answer for a token.

    principal: None if the API server refused the token.
    reason: why it was refused, "" if it was not or if nothing is known about it.
    until_ms: the monotonic time at which the answer expires."""

    principal: Principal | None
    reason: str
    until_ms: int


class TokenReviews:
    """Authenticates tokens by an API server (a gputally.server.tokens_and_grants.Authenticator).

    cluster: the cluster's name in the ledger.
    teams: returns the existing teams; a person who may not see all teams needs a right for each.
    rate: limits the tokens that one address can have reviewed."""

    def __init__(
        self,
        api: Api,
        clock: Clock,
        cluster: str,
        callers: KubernetesCallers,
        grants: Sequence[Grant] = (),
        teams: Callable[[], Collection[str]] = tuple,
        rate: RateLimit | None = None,
    ) -> None:
        self._api = api
        self._clock = clock
        self._cluster = cluster
        self._callers = callers
        self._grants = grants
        self._teams = teams
        self._rate = rate
        self._known: TLRUCache[str, _Answer] = TLRUCache(
            MOST_REMEMBERED, ttu=lambda _key, answer, _now: answer.until_ms, timer=clock.monotonic_ms
        )
        self._reviews = OutgoingCalls("the API server", _REVIEWS_AT_ONCE)

    async def authenticate(self, token: str | None, address: str = "") -> Principal:
        if not token:
            raise UnknownToken
        content = unverified(token)
        valid_ms = content.expires_ms - self._clock.wall_ms()
        if valid_ms <= 0:
            raise Unauthenticated("the token has expired")
        key = sha256(token)
        answer = self._known.get(key)
        if answer is None:
            # Checked before the review: an invented token costs its sender nothing, but a review costs the cluster.
            wait = self._rate.admit(("", address)) if self._rate is not None else 0.0
            if wait:
                raise TooManyUnknown(wait)
            principal, reason = await self._reviews.run(self._review, token)
            cached_ms = min(REMEMBERED_MS if principal else REFUSED_MS, valid_ms)
            answer = _Answer(principal, reason, self._clock.monotonic_ms() + cached_ms)
            self._known[key] = answer
        if answer.principal is None:
            raise Unauthenticated(answer.reason) if answer.reason else UnknownToken
        return answer.principal

    def _review(self, token: str) -> tuple[Principal | None, str]:
        """Review a token. Return the principal, or None and the reason."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self._callers.audience]},
        }
        status = self._post("/apis/authentication.k8s.io/v1/tokenreviews", body, _token_review).status
        # A server that knows no audiences leaves them out of its answer, because the token is then valid for any.
        if not status.authenticated or self._callers.audience not in status.audiences:
            return None, ""
        user = status.user
        account = service_account(user.username)
        if account is not None:
            node = next(iter(user.extra.get(_NODE, ())), None)
            if node is None and account in self._callers.agents:
                node = self._node_of_pod(account.partition("/")[0], user)
            try:
                reporter = agent(account, node, self._callers.agents, self._cluster)
            except Unauthenticated as error:
                return None, str(error)
            if reporter is not None:
                return reporter, ""
        person = self._person(user)
        pod = next(iter(user.extra.get(_POD, ())), None)
        if account is not None and pod and self._callers.jobs and not person.may("progress"):
            person = replace(person, scopes=person.scopes | {"progress"}, cluster=self._cluster, pod=pod)
        return person, ""

    def _node_of_pod(self, namespace: str, user: _User) -> str | None:
        """Return the node of the pod that a token is bound to; None if it is bound to no pod, or the pod is deleted."""
        uid = next(iter(user.extra.get(_POD, ())), "")
        name = next(iter(user.extra.get(_POD_NAME, ())), "")
        if not uid or not name:
            return None
        try:
            answer = self._api.get(f"/api/v1/namespaces/{namespace}/pods", {"fieldSelector": f"metadata.name={name}"})
            pods = _pod_list.decode(answer).items
        except (ClusterError, *UNDECODABLE) as error:
            raise AuthorityUnavailable(f"the API server gave no valid answer: {error}") from error
        return next((pod.spec.node_name for pod in pods if pod.metadata.uid == uid), None)

    def _person(self, user: _User) -> Principal:
        scopes, teams, progress_teams = granted(self._grants, user.username, user.groups)
        if self._callers.rights:
            allowed = frozenset(scope for scope, verb, resource in _RIGHTS if self._may(user, verb, resource))
            if "admin" in allowed:
                progress_teams = None
            if "read" in allowed or "admin" in allowed:
                teams = None
            elif teams is not None:
                checked = sorted(self._teams())[:MOST_TEAMS]
                visible = frozenset(team for team in checked if self._may(user, "get", "teams", team))
                allowed |= {"read"} if visible else frozenset()
                teams |= visible
            scopes |= allowed
        return Principal(user.username, scopes, teams=teams, progress_teams=progress_teams)

    def _may(self, user: _User, verb: str, resource: str, name: str = "") -> bool:
        attributes = {"group": GROUP, "resource": resource, "verb": verb, **({"name": name} if name else {})}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": user.username,
                "uid": user.uid,
                "groups": user.groups,
                "extra": user.extra,
                "resourceAttributes": attributes,
            },
        }
        return self._post("/apis/authorization.k8s.io/v1/subjectaccessreviews", body, _access_review).status.allowed

    def _post(self, path: str, body: Mapping[str, object], answer: msgspec.json.Decoder[T]) -> T:
        try:
            return answer.decode(self._api.post(path, body))
        except (ClusterError, *UNDECODABLE) as error:
            raise AuthorityUnavailable(f"the API server gave no valid answer: {error}") from error
