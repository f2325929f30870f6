"""Who is let in by whom: the API server's reviews, other issuers' keys, grants, certificates."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from accountant import yamlfile
from accountant.callers import tokens
from accountant.callers.auth import AnyOf, AuthorityUnavailable, OneToken, Principal, Unauthenticated
from accountant.callers.grants import Callers, Grant, Issuer, KubernetesCallers, granted
from accountant.callers.issuers import AGAIN_MS, FRESH_MS, STALE_MS, Issuers, source
from accountant.callers.reviews import REFUSED_MS, REMEMBERED_MS, TokenReviews
from accountant.errors import ClusterUnavailable
from agent.clock import VirtualClock
from agent.yamlfile import FileFault
from tests.inventory.api import FakeApi

KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EDGE, LOGIN = "https://oidc.edge", "https://login"


def ask(way: Any, token: str | None) -> Principal:
    found: Principal = asyncio.run(way.authenticate(token))
    return found


def jwks(key: Any = KEY, kid: str = "k1") -> bytes:
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
    return json.dumps({"keys": [{**public, "kid": kid, "use": "sig", "alg": "RS256"}]}).encode()


def signed(clock: VirtualClock, key: Any = KEY, kid: str = "k1", algorithm: str = "RS256", **claims: Any) -> str:
    now = clock.wall_ms() // 1000
    given = {"iss": EDGE, "aud": "gputally", "exp": now + 600, "sub": "system:serviceaccount:gputally:agent"}
    return jwt.encode({**given, **claims}, key, algorithm=algorithm, headers={"kid": kid})


def bound(node: str = "n1") -> dict[str, Any]:
    return {"kubernetes.io": {"namespace": "gputally", "node": {"name": node}, "serviceaccount": {"name": "agent"}}}


class Keys:
    """An issuer that counts how often it is asked, and can be out."""

    def __init__(self) -> None:
        self.content, self.asked, self.out = jwks(), 0, False

    def fetch(self) -> bytes:
        self.asked += 1
        if self.out:
            raise OSError("connection refused")
        return self.content


AGENTS = Issuer(
    issuer=EDGE, audience="gputally", jwks_url="https://oidc.edge/keys", cluster="edge", agents=("gputally/agent",)
)
PEOPLE = Issuer(issuer=LOGIN, audience="gputally", jwks_url="https://login/keys", user="email")
GRANTS = (
    Grant(groups=("platform",), scopes=("read", "admin")),
    Grant(groups=("vision",), users=("ann@example.com",), scopes=("read",), teams=("vision",)),
    Grant(groups=("fair",), scopes=("policy",)),
)


@pytest.fixture
def keys() -> Keys:
    return Keys()


@pytest.fixture
def issuers(clock: VirtualClock, keys: Keys) -> Issuers:
    return Issuers((AGENTS, PEOPLE), GRANTS, clock, lambda issuer: keys.fetch)


def test_a_remote_agent_reports_for_its_own_node_of_its_own_cluster(issuers: Issuers, clock: VirtualClock) -> None:
    found = ask(issuers, signed(clock, **bound("n7")))
    assert found == Principal("gputally/agent@n7", frozenset({"ingest"}), "edge", "n7")


@pytest.mark.parametrize(
    "claims",
    [
        {},
        {"kubernetes.io": {}},
        {"kubernetes.io": {"node": {}}},
        {"kubernetes.io": {"node": "n1"}},
        {"kubernetes.io": {"node": {"name": ["n1"]}}},
        {"kubernetes.io": "n1"},
        {**bound(), "sub": "system:serviceaccount:default:default"},
        {**bound(), "sub": "gputally/agent"},
        {**bound(), "aud": "kubernetes"},
        {**bound(), "iss": "https://elsewhere"},
        {**bound(), "exp": 1},
        {**bound(), "exp": "soon"},
        {**bound(), "nbf": 2_000_000_000},
        {**bound(), "nbf": []},
    ],
)
def test_a_token_that_lacks_anything_is_nobodys(issuers: Issuers, clock: VirtualClock, claims: dict[str, Any]) -> None:
    with pytest.raises(Unauthenticated):
        ask(issuers, signed(clock, **claims))


def test_a_pod_of_another_cluster_reports_for_its_own_job_where_its_issuer_may(keys: Keys, clock: VirtualClock) -> None:
    job = {"namespace": "vision", "pod": {"name": "train-0", "uid": "pod-7"}, "node": {"name": "n7"}}
    claims = {"sub": "system:serviceaccount:vision:train", "kubernetes.io": job}
    for jobs in (True, False):
        issuer = AGENTS.model_copy(update={"jobs": jobs})
        way = Issuers((issuer,), GRANTS, clock, lambda issuer: keys.fetch)
        if not jobs:
            with pytest.raises(Unauthenticated, match=r"not that of an agent$"):
                ask(way, signed(clock, **claims))
            continue
        assert ask(way, signed(clock, **claims)) == Principal(
            "vision/train of edge", frozenset({"progress"}), "edge", pod="pod-7"
        )
        assert ask(way, signed(clock, **bound("n7"))).node == "n7"
        for broken in ({**job, "pod": {"name": "train-0"}}, {**job, "pod": "pod-7"}, {**job, "pod": {"uid": ""}}):
            with pytest.raises(Unauthenticated, match="or of a pod"):
                ask(way, signed(clock, **{**claims, "kubernetes.io": broken}))
        with pytest.raises(Unauthenticated):
            ask(way, signed(clock, **{**claims, "sub": "ann@example.com"}))


def test_only_the_issuers_own_keys_and_asymmetric_algorithms_count(issuers: Issuers, clock: VirtualClock) -> None:
    good = signed(clock, **bound())
    head, body, mark = good.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    forged = base64.urlsafe_b64encode(json.dumps({**claims, "exp": claims["exp"] + 1}).encode()).decode().rstrip("=")
    bad = [
        signed(clock, OTHER, **bound()),
        f"{head}.{forged}.{mark}",
        jwt.encode(claims, "", algorithm="none", headers={"kid": "k1"}),
        jwt.encode(claims, "s" * 64, algorithm="HS256", headers={"kid": "k1"}),
        jwt.encode(claims, ec.generate_private_key(ec.SECP256R1()), algorithm="ES256", headers={"kid": "k1"}),
        good[:-4],
        good + "x" * tokens.MOST_BYTES,
        "a.b.c",
        "..",
        "",
    ]
    for token in bad:
        with pytest.raises(Unauthenticated):
            ask(issuers, token)
    assert ask(issuers, good).node == "n1"


def test_keys_are_kept_fetched_again_and_changed(issuers: Issuers, keys: Keys, clock: VirtualClock) -> None:
    old = signed(clock, **bound())
    ask(issuers, old)
    ask(issuers, old)
    assert keys.asked == 1
    # An unknown key makes it ask again, but not as often as somebody likes.
    for _ in range(5):
        with pytest.raises(Unauthenticated, match="unknown key"):
            ask(issuers, signed(clock, OTHER, kid="k2", **bound()))
    assert keys.asked == 1
    clock.advance(AGAIN_MS)
    keys.content = jwks(OTHER, "k2")
    assert ask(issuers, signed(clock, OTHER, kid="k2", **bound())).cluster == "edge"
    with pytest.raises(Unauthenticated):
        ask(issuers, old)
    # An issuer that is out is believed a day longer, then nobody can tell.
    keys.out = True
    clock.advance(FRESH_MS)
    assert ask(issuers, signed(clock, OTHER, kid="k2", **bound())).cluster == "edge"
    clock.advance(STALE_MS)
    with pytest.raises(AuthorityUnavailable):
        ask(issuers, signed(clock, OTHER, kid="k2", **bound()))
    keys.out, keys.content = False, b"<html>"
    clock.advance(AGAIN_MS)
    with pytest.raises(AuthorityUnavailable):
        ask(issuers, signed(clock, OTHER, kid="k2", **bound()))


@pytest.mark.parametrize(
    ("user", "groups", "scopes", "teams"),
    [
        ("bob@example.com", ["vision", "x"], {"read"}, {"vision"}),
        ("ann@example.com", [], {"read"}, {"vision"}),
        ("bob@example.com", ["platform", "vision"], {"read", "admin"}, None),
        ("bob@example.com", ["fair", "vision"], {"read", "policy"}, {"vision"}),
        ("bob@example.com", ["fair"], {"policy"}, set()),
        ("bob@example.com", "platform", set(), set()),
        ("bob@example.com", [["platform"], 3], set(), set()),
    ],
)
def test_people_have_what_their_grants_give_together(
    issuers: Issuers, clock: VirtualClock, user: str, groups: Any, scopes: set[str], teams: set[str] | None
) -> None:
    found = ask(issuers, signed(clock, iss=LOGIN, sub="u1", email=user, groups=groups))
    assert (found.name, found.scopes, found.teams) == (user, scopes, teams)


def test_an_issuer_of_people_vouches_for_no_agent(issuers: Issuers, clock: VirtualClock) -> None:
    found = ask(issuers, signed(clock, iss=LOGIN, email="system:serviceaccount:gputally:agent", **bound()))
    assert found.scopes == frozenset()
    with pytest.raises(Unauthenticated, match="does not say 'email'"):
        ask(issuers, signed(clock, iss=LOGIN))


def test_keys_from_a_file_are_read_anew(tmp_path: Path, clock: VirtualClock) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(jwks())
    issuer = Issuer(issuer=EDGE, audience="gputally", jwks_file=path, cluster="edge", agents=("gputally/agent",))
    way = Issuers((issuer,), (), clock, source)
    assert ask(way, signed(clock, **bound())).node == "n1"
    path.write_bytes(jwks(OTHER))
    clock.advance(FRESH_MS)
    assert ask(way, signed(clock, OTHER, **bound())).node == "n1"


class Reviewing(FakeApi):
    """Reviews tokens by a table, and rights by another."""

    users: dict[str, dict[str, Any]]
    rights: set[tuple[str, str, str, str]]
    out = False

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        self._asked("POST " + path)
        if self.out:
            raise ClusterUnavailable("the API server does not answer: timed out")
        spec = body["spec"]
        if path.endswith("tokenreviews"):
            found = self.users.get(spec["token"])
            status = (
                {"authenticated": False}
                if found is None
                else {"authenticated": True, "audiences": spec["audiences"], **found}
            )
        else:
            asked = spec["resourceAttributes"]
            assert asked["group"] == "gputally.dev"
            status = {"allowed": (spec["user"], asked["verb"], asked["resource"], asked.get("name", "")) in self.rights}
        return json.dumps({"kind": "x", "status": status}).encode()


def account(name: str, node: str | None = "n1", namespace: str = "gputally") -> dict[str, Any]:
    extra = {"authentication.kubernetes.io/node-name": [node]} if node else {}
    return {
        "user": {
            "username": f"system:serviceaccount:{namespace}:{name}",
            "uid": "1",
            "groups": ["system:authenticated"],
            "extra": extra,
        }
    }


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
    assert ask(AnyOf(OneToken("s"), way), "s").name == "self"
    with pytest.raises(AuthorityUnavailable):
        ask(AnyOf(way, OneToken("s")), signed(clock))


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


FILE = """schema: 1
kubernetes: {agents: [gputally/agent], rights: true}
issuers:
  - {issuer: https://oidc.edge, audience: gputally, jwks_file: edge.json, cluster: edge, agents: [gputally/agent]}
certificates:
  - {name: agents-of-lab, cluster: lab}
grants:
  - {groups: [platform], scopes: [read, admin]}
"""


def test_the_file_of_callers(tmp_path: Path) -> None:
    path = tmp_path / "callers.yaml"
    path.write_text(FILE)
    callers = yamlfile.load(path, Callers)
    assert callers.certified("agents-of-lab") == Principal("certificate:agents-of-lab", frozenset({"ingest"}), "lab")
    assert callers.certified("somebody") is None
    for old, new, fault in [
        ("gputally/agent], rights", "agent], rights", ":2: .*not a service account: 'agent'"),
        ("jwks_file: edge.json, ", "", ":4: .*give jwks_file or jwks_url"),
        ("jwks_file: edge.json", "jwks_url: 'http://edge/keys'", ":4: .*jwks_url"),
        ("cluster: edge, ", "", ":4: .*cluster and agents \\(or jobs\\) go together"),
        ("[read, admin]", "[ingest]", ":8: .*scopes"),
        ("platform], ", "platform], may: all, ", ":8: .*may"),
    ]:
        path.write_text(FILE.replace(old, new))
        with pytest.raises(FileFault, match=fault):
            yamlfile.load(path, Callers)


@given(st.one_of(st.text(), st.binary().map(lambda raw: f"e30.{base64.urlsafe_b64encode(raw).decode().rstrip('=')}.x")))
def test_no_text_breaks_the_reading_of_tokens(text: str) -> None:
    found = tokens.unverified(text)
    assert found is None or isinstance(found.issuer, str)
