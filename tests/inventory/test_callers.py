"""Authentication: issuers' keys and claims, grants, certificates, and the API server's reviews of tokens and rights."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from structlog.testing import capture_logs

from accountant.composition import Service
from accountant.core.settings import Settings
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterUnavailable
from gputally.base.yaml_file import FileFault
from gputally.server import config_loading, tokens_and_grants
from gputally.server.openid_connect import AGAIN_MS, FRESH_MS, STALE_MS, Issuers, key_source
from gputally.server.rate_and_connection_limits import RateLimit
from gputally.server.token_review import REFUSED_MS, REMEMBERED_MS, TokenReviews
from gputally.server.tokens_and_grants import (
    AnyOf,
    AuthorityUnavailable,
    Callers,
    Grant,
    Issuer,
    KubernetesCallers,
    Principal,
    SingleToken,
    TooManyUnknown,
    Unauthenticated,
    granted,
)
from tests import empty_ledger
from tests.inventory.signed_tokens import EDGE, GRANTS, KEY, LOGIN, ask, signed
from tests.inventory.token_review_server import Reviewing, account
from tests.moments import present
from tests.usage_records import batch, interval

OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def jwks(key: Any = KEY, kid: str = "k1") -> bytes:
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
    return json.dumps({"keys": [{**public, "kid": kid, "use": "sig", "alg": "RS256"}]}).encode()


def bound(node: str = "n1") -> dict[str, Any]:
    return {"kubernetes.io": {"namespace": "gputally", "node": {"name": node}, "serviceaccount": {"name": "agent"}}}


class Keys:
    """An issuer that counts the requests for its keys and can be down."""

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


@pytest.fixture
def keys() -> Keys:
    return Keys()


@pytest.fixture
def issuers(clock: VirtualClock, keys: Keys) -> Issuers:
    return Issuers((AGENTS, PEOPLE), GRANTS, clock, lambda issuer: keys.fetch)


def test_a_remote_agent_reports_for_its_own_node_of_its_own_cluster(issuers, clock):
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
def test_a_token_that_lacks_anything_is_nobodys(issuers, clock, claims):
    with pytest.raises(Unauthenticated):
        ask(issuers, signed(clock, **claims))


JOB = {"namespace": "vision", "pod": {"name": "train-0", "uid": "pod-7"}, "node": {"name": "n7"}}
OF_JOB = {"sub": "system:serviceaccount:vision:train", "kubernetes.io": JOB}


@pytest.fixture
def with_jobs(keys: Keys, clock: VirtualClock) -> Issuers:
    return Issuers((AGENTS.model_copy(update={"jobs": True}),), GRANTS, clock, lambda issuer: keys.fetch)


def test_a_pod_of_another_cluster_reports_for_its_own_job_where_its_issuer_may(with_jobs, issuers, clock):
    found = ask(with_jobs, signed(clock, **OF_JOB))
    assert found == Principal("vision/train of edge", frozenset({"progress"}), "edge", pod="pod-7")
    assert ask(with_jobs, signed(clock, **bound("n7"))).node == "n7"
    with pytest.raises(Unauthenticated, match=r"not that of an agent$"):
        ask(issuers, signed(clock, **OF_JOB))
    with pytest.raises(Unauthenticated):
        ask(with_jobs, signed(clock, **{**OF_JOB, "sub": "ann@example.com"}))


@pytest.mark.parametrize("pod", [{"name": "train-0"}, "pod-7", {"uid": ""}])
def test_a_token_that_names_no_pod_reports_for_no_job(with_jobs, clock, pod):
    with pytest.raises(Unauthenticated, match="or of a pod"):
        ask(with_jobs, signed(clock, **{**OF_JOB, "kubernetes.io": {**JOB, "pod": pod}}))


def test_only_the_issuers_own_keys_and_asymmetric_algorithms_count(issuers, clock):
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
        good + "x" * tokens_and_grants.MOST_BYTES,
        "a.b.c",
        "..",
        "",
    ]
    for token in bad:
        with pytest.raises(Unauthenticated):
            ask(issuers, token)
    assert ask(issuers, good).node == "n1"


def test_keys_are_kept_fetched_again_and_changed(issuers, keys, clock):
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
    with capture_logs() as logs, pytest.raises(AuthorityUnavailable, match=r"issuer https://oidc\.edge cannot be"):
        ask(issuers, signed(clock, OTHER, kid="k2", **bound()))
    assert [(log["event"], log["issuer"], log["reason"]) for log in logs] == [
        ("issuer_keys_not_fetched", EDGE, "connection refused")
    ]
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
def test_people_have_what_their_grants_give_together(issuers, clock, user, groups, scopes, teams):
    found = ask(issuers, signed(clock, iss=LOGIN, sub="u1", email=user, email_verified=True, groups=groups))
    assert (found.name, found.scopes, found.teams) == (user, scopes, teams)


@pytest.mark.parametrize("scope", ["admin", "policy"])
def test_a_grant_that_teams_cannot_limit_is_refused(tmp_path, scope):
    file = tmp_path / "callers.yaml"
    file.write_text(f"schema: 1\ngrants:\n  - {{users: [ann], scopes: [read, {scope}], teams: [vision]}}\n")
    with pytest.raises(FileFault, match=rf"callers.yaml:3: grants.0: .*{scope}"):
        config_loading.load_yaml(file, Callers)


@pytest.mark.parametrize("first", [0, 1])
def test_grants_do_not_extend_each_other(first):
    of_vision = Grant(users=("ann",), scopes=("read",), teams=("vision",))
    of_speech = Grant(groups=("speech",), scopes=("progress",), teams=("speech",))
    grants = (of_vision, of_speech) if first == 0 else (of_speech, of_vision)
    found = granted(grants, "ann", ["speech"])
    assert found == (frozenset({"read", "progress"}), frozenset({"vision"}), frozenset({"speech"}))
    everything = granted((*grants, Grant(users=("ann",), scopes=("progress",))), "ann", ["speech"])
    assert (everything.teams, everything.progress_teams) == (frozenset({"vision"}), None)


def test_an_issuer_of_people_vouches_for_no_agent(issuers, clock):
    agent = "system:serviceaccount:gputally:agent"
    token = signed(clock, iss=LOGIN, email=agent, email_verified=True, **bound())
    assert ask(issuers, token).scopes == frozenset()
    with pytest.raises(Unauthenticated, match="has no claim 'email'"):
        ask(issuers, signed(clock, iss=LOGIN))


def test_keys_from_a_file_are_read_anew(tmp_path, clock):
    path = tmp_path / "keys.json"
    path.write_bytes(jwks())
    issuer = Issuer(issuer=EDGE, audience="gputally", jwks_file=path, cluster="edge", agents=("gputally/agent",))
    way = Issuers((issuer,), (), clock, key_source)
    assert ask(way, signed(clock, **bound())).node == "n1"
    path.write_bytes(jwks(OTHER))
    clock.advance(FRESH_MS)
    assert ask(way, signed(clock, OTHER, **bound())).node == "n1"


FILE = """schema: 1
kubernetes: {agents: [gputally/agent], rights: true}
issuers:
  - {issuer: https://oidc.edge, audience: gputally, jwks_file: edge.json, cluster: edge, agents: [gputally/agent]}
certificates:
  - {name: lab-n1, cluster: lab, node: n1}
grants:
  - {groups: [platform], scopes: [read, admin]}
"""


def load_callers(folder: Path, text: str) -> Callers:
    path = folder / "callers.yaml"
    path.write_text(text)
    return config_loading.load_yaml(path, Callers)


def test_the_file_of_callers(tmp_path):
    callers = load_callers(tmp_path, FILE)
    assert callers.certified("lab-n1") == Principal("certificate:lab-n1", frozenset({"ingest"}), "lab", "n1")
    assert callers.certified("somebody") is None


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("gputally/agent], rights", "agent], rights", ":2: .*not a service account: 'agent'"),
        ("jwks_file: edge.json, ", "", ":4: .*give jwks_file or jwks_url"),
        ("jwks_file: edge.json", "jwks_url: 'http://edge/keys'", ":4: .*jwks_url"),
        ("cluster: edge, ", "", ":4: .*cluster and agents \\(or jobs\\) go together"),
        (", node: n1", "", ":6: certificates.0.node: "),
        ("[read, admin]", "[ingest]", ":8: .*scopes"),
        ("platform], ", "platform], may: all, ", ":8: .*may"),
    ],
)
def test_faults_of_the_file_of_callers(tmp_path, old, new, fault):
    with pytest.raises(FileFault, match=fault):
        load_callers(tmp_path, FILE.replace(old, new))


@given(st.one_of(st.text(), st.binary().map(lambda raw: f"e30.{base64.urlsafe_b64encode(raw).decode().rstrip('=')}.x")))
def test_no_text_breaks_the_reading_of_tokens(text):
    with contextlib.suppress(Unauthenticated):
        assert isinstance(tokens_and_grants.unverified(text).issuer, str)


@pytest.mark.parametrize("said", [{"email_verified": False}, {"email_verified": "true"}, {}])
def test_an_address_that_the_issuer_did_not_verify_names_nobody(clock, said):
    token = signed(clock, iss=LOGIN, sub="u1", email="ann@example.com", **said)
    with pytest.raises(Unauthenticated, match="email_verified"):
        ask(Issuers([PEOPLE], GRANTS, clock, lambda _: jwks), token)
    trusted = PEOPLE.model_copy(update={"email_unverified": True})
    assert ask(Issuers([trusted], GRANTS, clock, lambda _: jwks), token).name == "ann@example.com"
    by_subject = PEOPLE.model_copy(update={"user": "sub"})
    assert ask(Issuers([by_subject], GRANTS, clock, lambda _: jwks), token).name == "u1"


def test_a_token_that_was_made_for_another_client_is_refused(clock):
    people = PEOPLE.model_copy(update={"user": "sub", "clients": ("cli",)})
    way = Issuers([people], GRANTS, clock, lambda _: jwks)
    for fine in ({"azp": "gputally"}, {"azp": "cli"}, {}, {"aud": ["gputally", "other"], "azp": "cli"}):
        assert ask(way, signed(clock, iss=LOGIN, sub="u1", **fine)).name == "u1"
    for wrong in ({"azp": "other"}, {"azp": 1}, {"aud": ["gputally", "other"]}):
        with pytest.raises(Unauthenticated, match="azp"):
            ask(way, signed(clock, iss=LOGIN, sub="u1", **wrong))


@pytest.fixture
def server() -> Reviewing:
    api = Reviewing()
    api.users, api.rights = {}, set()
    return api


def reviews(server: Reviewing, clock: VirtualClock, **changes: Any) -> TokenReviews:
    callers = KubernetesCallers(**{"agents": ("gputally/agent",), "rights": True, **changes})
    return TokenReviews(server, clock, "prod", callers, GRANTS, lambda: ["vision", "speech"])


def test_an_agents_token_is_bound_to_its_node(server, clock):
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
    """A server before Kubernetes 1.30: its reviews name only the pod."""

    pods: dict[tuple[str, str], tuple[str, str]]
    """(namespace, name) -> uid, node"""

    def get(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> bytes:
        self._asked("GET " + path)
        if self.out:
            raise ClusterUnavailable("the API server does not answer: timed out")
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


def test_where_the_review_names_no_node_the_pod_says_it(clock):
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


def test_an_agent_whose_pod_cannot_be_looked_up_comes_again(clock):
    server = BeforeNodesWereNamed()
    token = signed(clock)
    server.users, server.rights, server.pods = {token: of_pod("agent", "agent-x", "u1")}, set(), {}
    server.trouble = [None, ClusterUnavailable("the API server does not answer: timed out")]
    with pytest.raises(AuthorityUnavailable):
        ask(reviews(server, clock), token)


def test_a_pod_reports_the_progress_of_its_own_job_where_that_is_switched_on(server, clock):
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


def test_an_answer_is_remembered_a_minute_and_never_beyond_the_token(server, clock):
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


def test_where_the_server_does_not_answer_nobody_is_judged(server, clock):
    way = reviews(server, clock)
    server.out = True
    with pytest.raises(AuthorityUnavailable):
        ask(way, signed(clock))
    # Others are let in all the same; and one who is unknown there may be known here.
    assert ask(AnyOf(SingleToken("s"), way), "s").name == "self"
    with pytest.raises(AuthorityUnavailable):
        ask(AnyOf(way, SingleToken("s")), signed(clock))


def test_what_is_no_token_of_a_cluster_is_not_asked_about(server, clock):
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
def test_rbac_grants_people(server, clock, rights, groups, scopes, teams):
    token = signed(clock)
    server.users[token] = {"user": {"username": "bob", "groups": groups}}
    server.rights = {("bob", *right) for right in rights}
    found = ask(reviews(server, clock), token)
    assert (found.name, found.scopes, found.teams) == ("bob", scopes, teams)
    without = ask(reviews(server, clock, rights=False), token)
    assert without.scopes == granted(GRANTS, "bob", groups)[0]


def test_made_up_tokens_of_one_address_cost_the_api_server_little(server, clock):
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


def test_an_issuer_that_names_nodes_without_end_is_refused_named_and_counted(tmp_path: Path) -> None:
    clock = VirtualClock(1_790_816_400_000)
    (tmp_path / "edge.json").write_bytes(jwks())
    text = FILE.replace("kubernetes: {agents: [gputally/agent], rights: true}\n", "")
    load_callers(tmp_path, text.replace("edge.json", str(tmp_path / "edge.json")))
    settings = Settings.model_validate(
        {"data": empty_ledger.data(tmp_path / "data"), "callers": tmp_path / "callers.yaml", "quotas": {"nodes": 2}}
    )
    statuses: list[int] = []
    with capture_logs() as logged, Service(settings, clock) as service, TestClient(service.app) as client:
        for number in range(8):
            name = f"invented-{number}"
            row = interval(clock.wall_ms() - 60_000, f"GPU-{number}", None, span_ms=60_000)
            content = msgspec.json.encode(batch([row], cluster="edge", node=name, epoch=f"e-{number}"))
            token = signed(clock, **bound(name))
            answer = client.post("/v1/usage", content=content, headers={"Authorization": f"Bearer {token}"})
            statuses.append(answer.status_code)
        metrics = client.get("/metrics").text
        owners = [one.gpu_uuid for one in present(service.ledger).gpu_owners()]
    assert statuses == [200] * 2 + [429] * 6
    assert int(answer.headers["Retry-After"]) > 0
    assert 'gputally_ingest_over_quota_records_total{quota="nodes"} 6.0' in metrics
    assert owners == ["GPU-0", "GPU-1"]
    named = [each["reason"] for each in logged if each["event"] == "sender_over_quota"]
    assert any("invented-2" in reason for reason in named)
