"""Every input is answered or refused, never with a 500, and refused before it costs much."""

from __future__ import annotations

import base64
import gzip
import json
import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.api.middleware import decompressed
from accountant.api.problems import Refusal
from accountant.core.errors import BadBatch
from accountant.runtime.ingest import MOST_REASON, decode
from agent.wire import PROBLEM, Skipped
from gputally.base.yaml_file import MAX_VALUES, FileFault, parse
from tests.http.conftest import NOW_MS, bearer, decision, encoded, pod_minutes, refused, token_entry
from tests.hypothesis_examples import examples
from tests.price_books import price_book_text

QUIET = settings(max_examples=examples(13, 80), suppress_health_check=[HealthCheck.function_scoped_fixture])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


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


def test_a_batch_with_one_thing_wrong_is_refused_or_quarantined_but_never_a_defect(client):
    """Every field of every row is replaced by every wrong kind of value."""
    chance = random.Random(7)
    plain = json.loads(encoded(pod_minutes()))
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
def test_a_fact_that_no_later_question_could_read_is_not_kept(client, number):
    fact = {"seq": 1, "uid": "u", "namespace": "vision", "name": "p", "node": "node-1", "observed_ms": NOW_MS - 1}
    told = {"cluster": "prod", "source": "sacct", "pods": [fact | {number: -(2**70)}]}
    assert is_ours(client.post("/v1/pods", json=told))
    batch = json.loads(encoded(pod_minutes())) | {"intervals": [], "facts": [fact | {number: 2**70}]}
    assert client.post("/v1/usage", json=batch).status_code == 200
    assert [row["reason"] for row in client.get("/v1/quarantine").json()] == ["out-of-range"]
    for path in ("/v1/waits", "/v1/usage?by=team,job", "/v1/report"):
        assert client.get(path).status_code == 200, path


@pytest.mark.parametrize("at_ms", [-(2**70), True])
def test_a_decision_of_no_time_is_refused(client, at_ms):
    answer = client.post("/v1/decisions", json=[decision(at_ms=at_ms)])
    assert is_ours(answer)
    assert (answer.status_code, answer.json()["errors"][0]["at"]) == (422, "0.at_ms")


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


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name}\n  <<: [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


PRICES = price_book_text(H100=2.5)
ROW = PRICES.splitlines(keepends=True)[-1]


@pytest.fixture
def client(start_service):
    return start_service(prices=PRICES)[1]


@pytest.mark.parametrize("text", [LAUGHS, MERGES, "-\n" * (MAX_VALUES + 1)], ids=["aliases", "merge keys", "values"])
def test_what_a_file_stands_for_is_counted_before_it_is_made(text):
    with pytest.raises(FileFault, match=r"policy:\d+: more than 250000 values"):
        parse(text, "policy")


@pytest.mark.parametrize("value", ["!!timestamp 2026-99-99", "!!int ''", "!!float x", "!!bool x", "!!binary ä"])
def test_a_value_that_is_not_of_its_tag_is_a_fault_with_its_line(value):
    with pytest.raises(FileFault, match=r"^policy:2: "):
        parse(f"a: 1\nb: {value}\n", "policy")


def test_an_alias_that_repeats_little_is_read():
    assert parse("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n", "policy").data == {
        "a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2},
    }  # fmt: skip


@pytest.mark.parametrize("text", [LAUGHS, MERGES], ids=["aliases", "merge keys"])
def test_a_preview_of_prices_does_not_expand_aliases_without_end(client, text):
    answer = client.post("/v1/prices/preview?month=2026-10", content=text)
    refused(answer, "invalid-body")


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "raw", [DEEP, b'{"cluster":' + DEEP, b'{"schema":2,"x":' + DEEP], ids=["list", "field", "head"]
)
def test_a_deep_batch_is_refused_also_with_a_bound_token(accountant, raw):
    running = accountant(tokens=token_entry("bound", "ingest", ", cluster: prod, node: n"))
    answer = running.client.post("/v1/usage", content=raw, headers=bearer("bound"))
    assert answer.status_code in (400, 422)
    assert answer.json()["type"] in (PROBLEM + "malformed-batch", PROBLEM + "invalid-batch")


def test_a_long_reason_is_cut_and_the_node_goes_on():
    batch = pod_minutes(intervals=(), skipped=(Skipped(1, "x" * 5_000_000), Skipped(2, "short")))
    found = decode(encoded(batch))
    assert [len(one.reason) for one in found.skipped] == [MOST_REASON, 5]


@pytest.mark.parametrize(
    "labels",
    [{"team": "x" * 30_000_000}, {"k" * 513: "v"}, {f"l{i}": "v" for i in range(257)}],
    ids=["value", "key", "number"],
)
def test_labels_larger_than_kubernetes_has_are_refused(labels):
    fact = {"seq": 1, "uid": "u", "namespace": "n", "name": "p", "node": "node-1", "observed_ms": 1, "labels": labels}
    plain = msgspec.to_builtins(pod_minutes(intervals=())) | {"facts": [fact]}
    with pytest.raises(BadBatch, match=r"labels"):
        decode(json.dumps(plain).encode())


@pytest.mark.parametrize("amount", ["1e1000000", "-1e1000000", "1e-1000000", "1e400", "NaN", "Infinity", "1e13"])
def test_an_amount_out_of_all_proportion_is_refused(client, amount):
    adjustment = {"month": "2026-10", "team": "vision", "amount": amount, "reason": "r", "approved_by": "ann"}
    answer = client.post("/v1/adjustments", json=adjustment)
    assert answer.status_code in (409, 422), answer.text
    line = {"item": "gpu", "gpu_model": "H100", "amount": amount, "currency": "EUR"}
    answer = client.post("/v1/reconciliation/2026-10", json={"source": "file", "lines": [line]})
    assert answer.status_code == 422, answer.text


def test_a_backup_for_which_there_is_no_room_can_be_asked_for_again(client, tmp_path):
    (tmp_path / "data" / "backups").write_text("not a folder")
    answer = client.post("/v1/backups")
    refused(answer, "ledger-unavailable")


@pytest.mark.parametrize("length", ["9" * 5_000, "1" * 20])
def test_a_length_of_many_digits_is_refused(client, length):
    answer = client.put("/v1/policy", content=b"{}", headers={"Content-Length": length})
    assert answer.status_code in (400, 413)


def test_true_is_no_price(client):
    answer = client.post("/v1/prices/preview?month=2026-10", content=PRICES.replace("2.5", "true"))
    assert (answer.status_code, answer.json()["errors"][0]["at"]) == (422, "body:4")
