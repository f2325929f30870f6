"""Agents, jobs and people that the API server vouches for: its reviews of tokens and of rights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from gputally.base.clock import VirtualClock
from gputally.base.errors import Unavailable
from gputally.server.rate_and_connection_limits import RateLimit
from gputally.server.token_review import REFUSED_MS, REMEMBERED_MS, TokenReviews
from gputally.server.tokens_and_grants import (
    AnyOf,
    AuthorityUnavailable,
    KubernetesCallers,
    Principal,
    SingleToken,
    TooManyUnknown,
    Unauthenticated,
    granted,
)
from tests.inventory.issued import GRANTS, ask, signed
from tests.inventory.reviewing import Reviewing, account


@pytest.fixture
def server() -> Reviewing:
    api = Reviewing()
    api.users, api.rights = {}, set()
    return api


def reviews(server: Reviewing, clock: VirtualClock, **changes: Any) -> TokenReviews:
    callers = KubernetesCallers(**{"agents": ("gputally/agent",), "rights": True, **changes})
    return TokenReviews(server, clock, "prod", callers, GRANTS, lambda: ["vision", "speech"])


def test_an_agents_token_is_bound_to_its_node(server: Reviewing, clock: VirtualClock) -> None:
    token = signed(clock)
    server.users[token] = account("agent", "n7")
    assert ask(reviews(server, clock), token) == Principal("gputally/agent@n7", frozenset({"ingest"}), "prod", "n7")
    unbound = signed(clock, jti="2")
    server.users[unbound] = account("agent", None)
    with pytest.raises(Unauthenticated, match="not bound to a node"):
        ask(reviews(server, clock), unbound)
    for_anybody = signed(clock, jti="3")
    server.users[for_anybody] = {**account("agent"), "audiences": []}
    with pytest.raises(Unauthenticated):
        ask(reviews(server, clock), for_anybody)


class BeforeNodesWereNamed(Reviewing):
    """A server before Kubernetes 1.30: its reviews name the pod alone."""

    pods: dict[tuple[str, str], tuple[str, str]]
    """(namespace, name) -> uid, node"""

    def get(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> bytes:
        self._asked("GET " + path)
        if self.out:
            raise Unavailable("the API server does not answer: timed out")
        _, _, _, _, namespace, kind = path.split("/")
        assert kind == "pods"
        found = self.pods.get((namespace, query["fieldSelector"].removeprefix("metadata.name=")))
        items = [{"metadata": {"uid": found[0]}, "spec": {"nodeName": found[1]}}] if found else []
        return json.dumps({"kind": "PodList", "items": items}).encode()


def of_pod(name: str, pod: str, uid: str) -> dict[str, Any]:
    user = account(name, None)
    prefix = "authentication.kubernetes.io"
    user["user"]["extra"] = {f"{prefix}/pod-name": [pod], f"{prefix}/pod-uid": [uid]}
    return user


def test_where_the_review_names_no_node_the_pod_says_it(clock: VirtualClock) -> None:
    server = BeforeNodesWereNamed()
    server.users, server.rights = {}, set()
    server.pods = {("gputally", "agent-x"): ("u1", "n7"), ("gputally", "pending"): ("u2", "")}
    tokens = [signed(clock, jti=str(number)) for number in range(5)]
    server.users = dict(zip(tokens, (
        of_pod("agent", "agent-x", "u1"), of_pod("agent", "agent-x", "of-a-former-pod"), of_pod("agent", "gone", "u1"),
        of_pod("agent", "pending", "u2"), of_pod("trainer", "agent-x", "u1"),
    ), strict=True))  # fmt: skip
    way = reviews(server, clock, rights=False)
    assert ask(way, tokens[0]) == Principal("gputally/agent@n7", frozenset({"ingest"}), "prod", "n7")
    for token in tokens[1:4]:
        with pytest.raises(Unauthenticated, match="not bound to a node"):
            ask(way, token)
    asked = len(server.requests)
    assert ask(way, tokens[4]).scopes == frozenset(), "no agent of the callers file: its pod is not looked up"
    assert len(server.requests) == asked + 1


def test_an_agent_whose_pod_cannot_be_looked_up_comes_again(clock: VirtualClock) -> None:
    server = BeforeNodesWereNamed()
    token = signed(clock)
    server.users, server.rights, server.pods = {token: of_pod("agent", "agent-x", "u1")}, set(), {}
    server.trouble = [None, Unavailable("the API server does not answer: timed out")]
    with pytest.raises(AuthorityUnavailable):
        ask(reviews(server, clock), token)


def test_a_pod_reports_the_progress_of_its_own_job_where_that_is_switched_on(
    server: Reviewing, clock: VirtualClock
) -> None:
    token, people = signed(clock), signed(clock, jti="2")
    user = account("trainer")
    user["user"]["extra"] = {"authentication.kubernetes.io/pod-uid": ["pod-7"]}
    server.users = {token: user, people: account("trainer")}
    off = ask(reviews(server, clock, rights=False), token)
    assert (off.scopes, off.pod) == (frozenset(), None)
    way = reviews(server, clock, rights=False, jobs=True)
    found = ask(way, token)
    assert (found.scopes, found.cluster, found.pod) == (frozenset({"progress"}), "prod", "pod-7")
    assert ask(way, people).scopes == frozenset(), "a token of no pod says nothing of a job"


def test_an_answer_is_remembered_a_minute_and_never_beyond_the_token(server: Reviewing, clock: VirtualClock) -> None:
    way = reviews(server, clock)
    token, short = signed(clock), signed(clock, exp=clock.wall_ms() // 1000 + 5)
    server.users = {token: account("agent"), short: account("agent")}
    for _ in range(3):
        ask(way, token)
        ask(way, short)
    assert len(server.requests) == 2
    clock.advance(5_000)
    with pytest.raises(Unauthenticated, match="expired"):
        ask(way, short)
    clock.advance(REMEMBERED_MS - 5_000)
    server.users = {}
    with pytest.raises(Unauthenticated):
        ask(way, token)
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            ask(way, token)
    assert len(server.requests) == 3  # a refusal is remembered, too, but shortly
    server.users = {token: account("agent")}
    clock.advance(REFUSED_MS)
    assert ask(way, token).node == "n1"


def test_where_the_server_does_not_answer_nobody_is_judged(server: Reviewing, clock: VirtualClock) -> None:
    way = reviews(server, clock)
    server.out = True
    with pytest.raises(AuthorityUnavailable):
        ask(way, signed(clock))
    # Others are let in all the same; and one who is unknown there may be known here.
    assert ask(AnyOf(SingleToken("s"), way), "s").name == "self"
    with pytest.raises(AuthorityUnavailable):
        ask(AnyOf(way, SingleToken("s")), signed(clock))


def test_what_is_no_token_of_a_cluster_is_not_asked_about(server: Reviewing, clock: VirtualClock) -> None:
    for token in (None, "", "secret", "a.b.c", signed(clock, exp=1)):
        with pytest.raises(Unauthenticated):
            ask(reviews(server, clock), token)
    assert server.requests == []


@pytest.mark.parametrize(
    ("rights", "groups", "scopes", "teams"),
    [
        ({("get", "usage", "")}, [], {"read"}, None),
        ({("get", "teams", "speech")}, [], {"read"}, {"speech"}),
        ({("get", "teams", "speech")}, ["vision"], {"read"}, {"speech", "vision"}),
        ({("update", "policies", "")}, [], {"policy"}, set()),
        ({("update", "ledgers", "")}, [], {"admin"}, None),
        (set(), [], set(), set()),
    ],
)
def test_rbac_grants_people(
    server: Reviewing, clock: VirtualClock, rights: Any, groups: list[str], scopes: set[str], teams: set[str] | None
) -> None:
    token = signed(clock)
    server.users[token] = {"user": {"username": "bob", "groups": groups}}
    server.rights = {("bob", *right) for right in rights}
    found = ask(reviews(server, clock), token)
    assert (found.name, found.scopes, found.teams) == ("bob", scopes, teams)
    without = ask(reviews(server, clock, rights=False), token)
    assert without.scopes == granted(GRANTS, "bob", groups)[0]


def test_made_up_tokens_of_one_address_cost_the_api_server_little(server: Reviewing, clock: VirtualClock) -> None:
    callers = KubernetesCallers(agents=("gputally/agent",))
    way = TokenReviews(server, clock, "prod", callers, GRANTS, rate=RateLimit(clock, 5.0, 10))
    good = signed(clock)
    server.users[good] = account("agent", "n7")
    assert asyncio.run(way.authenticate(good, "10.0.0.1")).node == "n7"
    refused = 0
    for number in range(200):
        try:
            asyncio.run(way.authenticate(signed(clock, jti=str(number)), "10.0.0.1"))
        except TooManyUnknown as error:
            refused += error.seconds <= 0.2
        except Unauthenticated:
            pass
    assert (refused, len(server.requests)) == (191, 10)
    assert asyncio.run(way.authenticate(good, "10.0.0.1")).node == "n7", "who is known goes on"
    with pytest.raises(Unauthenticated):
        asyncio.run(way.authenticate(signed(clock, jti="other"), "10.0.0.2"))
    clock.advance(1_000)
    with pytest.raises(Unauthenticated):
        asyncio.run(way.authenticate(signed(clock, jti="later"), "10.0.0.1"))
