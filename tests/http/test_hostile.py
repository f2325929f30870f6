"""Whatever is sent, the answer is one of ours, never a 500, and nothing is stored by accident."""

from __future__ import annotations

import base64
import gzip
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from accountant.api.middleware import decompressed
from accountant.api.problems import Refusal
from accountant.composition import Service
from accountant.core.settings import Settings
from agent.wire import PROBLEM
from tests import fresh
from tests.effort import examples

QUIET = settings(
    max_examples=examples(13, 80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def client(tmp_path, clock):
    with Service(Settings(data=fresh.data(tmp_path / "data"), auth="off", linger_ms=0), clock) as service:
        yield TestClient(service.app, base_url="http://127.0.0.1")


def is_ours(answer):
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"].startswith(PROBLEM)
    return True


@QUIET
@given(content=st.binary(max_size=300), compressed=st.booleans())
def test_random_bytes_are_refused(client, content, compressed):
    headers = {"Content-Encoding": "gzip"} if compressed else {}
    for method, path in (("POST", "/v1/usage"), ("PUT", "/v1/policy")):
        assert is_ours(client.request(method, path, content=content, headers=headers))


@QUIET
@given(value=JSON)
def test_random_json_is_refused(client, value):
    raw = json.dumps(value).encode()
    assert is_ours(client.post("/v1/usage", content=raw))
    assert is_ours(client.put("/v1/policy", content=raw))
    answer = client.post("/v1/decisions", content=raw)
    assert (value == [] and answer.json() == {"recorded": 0, "known": 0}) or is_ours(answer)


def test_a_batch_with_one_thing_wrong_is_refused_or_quarantined_but_never_a_defect(client, kit):
    """Every field of every row replaced by every wrong kind of value."""
    chance = random.Random(7)
    plain = json.loads(kit.encoded(kit.batch()))
    wrong = [None, -1, 2**70, 1.5, "", "x" * 5000, [], {}, True, "\u0000"]
    cases = [("batch", key) for key in plain] + [("row", key) for key in plain["intervals"][0]]
    for where, key in cases:
        one = json.loads(json.dumps(plain))
        target = one if where == "batch" else one["intervals"][0]
        target[key] = chance.choice(wrong)
        answer = client.post("/v1/usage", json=one)
        assert answer.status_code in (200, 400, 409, 415, 422), (key, target[key], answer.text)
    assert client.get("/v1/check").json()["imbalance_gpu_us"] == 0
    assert client.get("/readyz").status_code == 200


@pytest.mark.parametrize("number", ["created_ms", "scheduled_ms", "started_ms", "ended_ms", "priority"])
def test_a_fact_that_no_later_question_could_read_is_not_kept(client, kit, number):
    fact = {"seq": 1, "uid": "u", "namespace": "vision", "name": "p", "node": "node-1", "observed_ms": kit.now_ms - 1}
    told = {"cluster": "prod", "source": "sacct", "pods": [fact | {number: -(2**70)}]}
    assert is_ours(client.post("/v1/pods", json=told))
    batch = json.loads(kit.encoded(kit.batch())) | {"intervals": [], "facts": [fact | {number: 2**70}]}
    assert client.post("/v1/usage", json=batch).status_code == 200
    assert [row["reason"] for row in client.get("/v1/quarantine").json()] == ["out-of-range"]
    for path in ("/v1/waits", "/v1/usage?by=team,job", "/v1/report"):
        assert client.get(path).status_code == 200, path


def test_a_decision_of_no_time_is_refused(client):
    decision = {"id": "d", "at_ms": -(2**70), "kind": "hold", "target": "kai", "subject": "s", "mode": "off",
                "reason": "r", "policy_version": "v"}  # fmt: skip
    assert is_ours(client.post("/v1/decisions", json=[decision]))


@pytest.mark.parametrize(
    "query",
    [
        "start=0001-01-01&end=0001-02-01",
        "start=1900-01-01&end=1900-02-01",
        "start=9999-01-01&end=9999-12-31",
        "start=99999999990000&end=99999999999999",
        "start=2026-10-01T00:00:00%2B99:00",
        "start=%00",
        "by=&start=2026-10-01",
        "by=hour&start=2026-10-01&end=2026-10-02&timezone=Australia/Lord_Howe",
        "where.team=%27%3B DROP TABLE received%3B--",
        "where.team=" + "x" * 3000,
        "timezone=../../etc/passwd",
        "page=" + base64.urlsafe_b64encode(b'["x",1,2,["a"]]').decode(),
        "limit=99999999999999999999",
    ],
)
def test_odd_questions_are_answered_or_refused(client, query):
    for path in ("/v1/usage", "/v1/cost"):
        answer = client.get(f"{path}?{query}")
        assert answer.status_code == 200 or is_ours(answer)
    assert client.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/month/0000-00",
        "/month/9998-12",
        "/month/1971-01",
        "/team/?month=2026-10",
        "/team/a/b/c",
        "/team/..%2f..%2fetc",
        "/v1/statement?month=1971-01",
        "/v1/report?start=1971-01-01&end=1971-01-02&team=%00",
        "/v1/windows?size=99999999999d",
        "/v1/windows?size=1100d&half_life=1s",
        "/v1/windows?at=1&size=1s",
        "/v1/windows?kind=cron",
        "/v1/windows?measure=cost",
        "/v1/decisions?start=0&end=1",
    ],
)
def test_odd_addresses_are_answered_or_refused(client, path):
    answer = client.get(path)
    assert answer.status_code == 200 or is_ours(answer)


@QUIET
@given(content=st.binary(max_size=5000), limit=st.integers(0, 6000))
def test_inflating_gives_the_content_or_refuses_but_never_more_than_the_limit(content, limit):
    if len(content) <= limit:
        assert b"".join(decompressed(gzip.compress(content), limit)) == content
    else:
        with pytest.raises(Refusal, match="larger than"):
            list(decompressed(gzip.compress(content), limit))
