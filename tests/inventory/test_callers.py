"""Who is let in by issuers, grants and certificates: their keys, claims and files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from gputally.base.clock import VirtualClock
from gputally.base.yaml_file import FileFault
from gputally.server import config_loading, tokens_and_grants
from gputally.server.openid_connect import AGAIN_MS, FRESH_MS, STALE_MS, Issuers, key_source
from gputally.server.tokens_and_grants import AuthorityUnavailable, Callers, Issuer, Principal, Unauthenticated
from tests.inventory.issued import EDGE, GRANTS, KEY, LOGIN, ask, signed

OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def jwks(key: Any = KEY, kid: str = "k1") -> bytes:
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
    return json.dumps({"keys": [{**public, "kid": kid, "use": "sig", "alg": "RS256"}]}).encode()


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
        good + "x" * tokens_and_grants.MOST_BYTES,
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
    found = ask(issuers, signed(clock, iss=LOGIN, sub="u1", email=user, email_verified=True, groups=groups))
    assert (found.name, found.scopes, found.teams) == (user, scopes, teams)


def test_an_issuer_of_people_vouches_for_no_agent(issuers: Issuers, clock: VirtualClock) -> None:
    found = ask(
        issuers, signed(clock, iss=LOGIN, email="system:serviceaccount:gputally:agent", email_verified=True, **bound())
    )
    assert found.scopes == frozenset()
    with pytest.raises(Unauthenticated, match="has no claim 'email'"):
        ask(issuers, signed(clock, iss=LOGIN))


def test_keys_from_a_file_are_read_anew(tmp_path: Path, clock: VirtualClock) -> None:
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


def test_the_file_of_callers(tmp_path: Path) -> None:
    path = tmp_path / "callers.yaml"
    path.write_text(FILE)
    callers = config_loading.load_yaml(path, Callers)
    assert callers.certified("lab-n1") == Principal("certificate:lab-n1", frozenset({"ingest"}), "lab", "n1")
    assert callers.certified("somebody") is None
    for old, new, fault in [
        ("gputally/agent], rights", "agent], rights", ":2: .*not a service account: 'agent'"),
        ("jwks_file: edge.json, ", "", ":4: .*give jwks_file or jwks_url"),
        ("jwks_file: edge.json", "jwks_url: 'http://edge/keys'", ":4: .*jwks_url"),
        ("cluster: edge, ", "", ":4: .*cluster and agents \\(or jobs\\) go together"),
        (", node: n1", "", ":6: certificates.0.node: Field required"),
        ("[read, admin]", "[ingest]", ":8: .*scopes"),
        ("platform], ", "platform], may: all, ", ":8: .*may"),
    ]:
        path.write_text(FILE.replace(old, new))
        with pytest.raises(FileFault, match=fault):
            config_loading.load_yaml(path, Callers)


@given(st.one_of(st.text(), st.binary().map(lambda raw: f"e30.{base64.urlsafe_b64encode(raw).decode().rstrip('=')}.x")))
def test_no_text_breaks_the_reading_of_tokens(text: str) -> None:
    found = tokens_and_grants.unverified(text)
    assert found is None or isinstance(found.issuer, str)


@pytest.mark.parametrize("said", [{"email_verified": False}, {"email_verified": "true"}, {}])
def test_an_address_that_the_issuer_did_not_verify_names_nobody(clock: VirtualClock, said: dict[str, object]) -> None:
    token = signed(clock, iss=LOGIN, sub="u1", email="ann@example.com", **said)
    with pytest.raises(Unauthenticated, match="email_verified"):
        ask(Issuers([PEOPLE], GRANTS, clock, lambda _: jwks), token)
    trusted = PEOPLE.model_copy(update={"email_unverified": True})
    assert ask(Issuers([trusted], GRANTS, clock, lambda _: jwks), token).name == "ann@example.com"
    by_subject = PEOPLE.model_copy(update={"user": "sub"})
    assert ask(Issuers([by_subject], GRANTS, clock, lambda _: jwks), token).name == "u1"


def test_a_token_that_was_made_for_another_client_is_refused(clock: VirtualClock) -> None:
    people = PEOPLE.model_copy(update={"user": "sub", "clients": ("cli",)})
    way = Issuers([people], GRANTS, clock, lambda _: jwks)
    for fine in ({"azp": "gputally"}, {"azp": "cli"}, {}, {"aud": ["gputally", "other"], "azp": "cli"}):
        assert ask(way, signed(clock, iss=LOGIN, sub="u1", **fine)).name == "u1"
    for wrong in ({"azp": "other"}, {"azp": 1}, {"aud": ["gputally", "other"]}):
        with pytest.raises(Unauthenticated, match="azp"):
            ask(way, signed(clock, iss=LOGIN, sub="u1", **wrong))
