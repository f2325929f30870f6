"""POST /v1/usage: what is taken, what is refused, and that a refusal stores nothing."""

from __future__ import annotations

import gzip
import json
import zlib
from copy import deepcopy

import msgspec
import pytest

from accountant.api.problems import PROBLEMS
from accountant.core.errors import LedgerFailed, LedgerUnavailable
from agent.wire import PROBLEM, Ack

GZIP = {"Content-Encoding": "gzip"}


def refused(answer, slug):
    """The problem document, after checking everything that all of them share."""
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == PROBLEM + slug
    assert problem["status"] == answer.status_code == PROBLEMS[slug].status
    assert problem["title"] == PROBLEMS[slug].title
    assert problem["detail"]
    return problem


@pytest.mark.parametrize("compressed", [False, True])
def test_a_batch_is_answered_with_its_ack_after_it_is_stored(door, kit, compressed):
    opened = door()
    raw = kit.encoded(kit.batch(rows=3))
    answer = opened.client.post(
        "/v1/usage", content=gzip.compress(raw) if compressed else raw, headers=GZIP if compressed else {}
    )
    assert answer.status_code == 200
    assert msgspec.json.decode(answer.content, type=Ack) == Ack(epoch="0192-epoch", durable_seq=3, checkpointed_seq=0)
    assert len(opened.ledger.rows["prod", "node-1", "0192-epoch"]) == 1


def test_a_batch_sent_twice_is_stored_once(door, kit):
    opened = door()
    for _ in range(2):
        answer = opened.client.post("/v1/usage", content=kit.encoded(kit.batch(rows=2)))
    assert answer.json()["durable_seq"] == 2
    assert len(opened.ledger.rows["prod", "node-1", "0192-epoch"]) == 1


def test_fields_of_a_newer_agent_are_taken_and_ignored(door, kit):
    opened = door()
    newer = json.loads(kit.encoded(kit.batch()))
    newer["colour"] = "blue"
    newer["intervals"][0]["temperature_mc"] = 61_000
    newer["intervals"][0]["holder"]["rank"] = 3
    assert opened.client.post("/v1/usage", json=newer).json()["durable_seq"] == 1


def test_a_gap_is_a_409_that_carries_the_ack_to_rewind_to(door, kit):
    opened = door()
    opened.client.post("/v1/usage", content=kit.encoded(kit.batch(rows=2)))
    before = deepcopy(opened.ledger.rows)
    problem = refused(opened.client.post("/v1/usage", content=kit.encoded(kit.batch(first=7))), "sequence-gap")
    ack = {"epoch": "0192-epoch", "durable_seq": 2, "checkpointed_seq": 0, "archived_seq": None, "clock_ms": None}
    assert problem["ack"] == ack
    assert opened.ledger.rows == before


BODIES = {
    "not json": (b"{", {}, "malformed-batch"),
    "empty": (b"", {}, "malformed-batch"),
    "a list": (b"[]", {}, "invalid-batch"),
    "not utf-8": (b'{"cluster": "\xff"}', {}, "malformed-batch"),
    "not gzip": (b"plain", GZIP, "malformed-body"),
    "gzip cut off": (gzip.compress(b"x" * 1000)[:-9], GZIP, "malformed-body"),
    "something after the gzip": (gzip.compress(b"x") + b"tail", GZIP, "malformed-body"),
    "unknown encoding": (b"x", {"Content-Encoding": "br"}, "unsupported-encoding"),
    "one byte too large": (b"x" * 4097, {}, "too-large"),
    "one byte too large after decompression": (gzip.compress(b" " * 65_537), GZIP, "too-large"),
    "a bomb": (gzip.compress(b"\0" * 3_000_000), GZIP, "too-large"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_body_that_cannot_be_taken_has_its_own_type_and_stores_nothing(door, case):
    opened = door(limits={"body_bytes": 4096, "decoded_bytes": 65_536})
    content, headers, slug = BODIES[case]
    refused(opened.client.post("/v1/usage", content=content, headers=headers), slug)
    assert opened.ledger.rows == {}


@pytest.mark.parametrize("field", ["cluster", "node", "boot_id", "epoch", "first_seq", "oldest_seq"])
def test_a_batch_without_a_needed_field_is_invalid(door, kit, field):
    opened = door()
    plain = json.loads(kit.encoded(kit.batch()))
    del plain[field]
    assert field in refused(opened.client.post("/v1/usage", json=plain), "invalid-batch")["detail"]
    assert opened.ledger.rows == {}


def test_another_schema_is_refused_so_that_the_agent_keeps_its_rows(door, kit):
    opened = door()
    problem = refused(opened.client.post("/v1/usage", content=kit.encoded(kit.batch(schema=99))), "unknown-schema")
    assert problem["status"] not in (400, 413, 422)  # those make an agent park what it cannot deliver
    assert opened.ledger.rows == {}


def test_a_body_exactly_at_the_limit_is_read(door, kit):
    raw = kit.encoded(kit.batch())
    padded = raw + b" " * (8192 - len(raw))
    opened = door(limits={"body_bytes": 8192, "decoded_bytes": 8192})
    assert opened.client.post("/v1/usage", content=padded).status_code == 200
    assert opened.client.post("/v1/usage", content=gzip.compress(padded), headers=GZIP).status_code == 200


def test_a_large_body_takes_the_same_way(door, kit):
    opened = door()
    raw = kit.encoded(kit.batch(rows=1500))
    assert len(raw) > 512 * 1024
    answer = opened.client.post("/v1/usage", content=zlib.compress(raw, 0, 31), headers=GZIP)
    assert answer.json()["durable_seq"] == 1500


def test_bodies_without_a_declared_length_are_bounded_too(door):
    opened = door(limits={"body_bytes": 4096})
    refused(opened.client.post("/v1/usage", content=iter([b"x" * 3000, b"x" * 3000])), "too-large")


def test_what_all_clients_send_together_is_bounded(door, kit):
    opened = door(limits={"body_bytes": 4096, "inflight_bytes": 1024})
    answer = opened.client.post("/v1/usage", content=b"x" * 2000)
    refused(answer, "busy")
    assert int(answer.headers["retry-after"]) >= 1


def test_an_unavailable_ledger_is_a_503_with_retry_after(door, kit):
    opened = door()
    opened.ledger.trouble = LedgerUnavailable("no space left on the ledger's volume")
    answer = opened.client.post("/v1/usage", content=kit.encoded(kit.batch()))
    assert "no space left" in refused(answer, "ledger-unavailable")["detail"]
    assert int(answer.headers["retry-after"]) >= 1
    assert opened.failures == []


def test_a_failed_ledger_is_a_503_and_ends_the_service(door, kit):
    opened = door()
    opened.ledger.trouble = LedgerFailed("the database is no longer usable")
    refused(opened.client.post("/v1/usage", content=kit.encoded(kit.batch())), "ledger-unavailable")
    assert opened.failures == [opened.ledger.trouble]


def test_a_defect_is_a_500_problem_that_gives_nothing_away(door, kit):
    opened = door()
    opened.ledger.trouble = ZeroDivisionError("secret")
    answer = opened.client.post("/v1/usage", content=kit.encoded(kit.batch()))
    assert "secret" not in refused(answer, "internal")["detail"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_bound_token_reports_for_its_own_node_only(door, kit, tmp_path):
    from gputally.server.tokens_and_grants import sha256

    bound = f"  - {{name: n1, token_sha256: {sha256('n1')}, scopes: [ingest], cluster: prod, node: node-1}}\n"
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml", bound))
    own = opened.client.post("/v1/usage", content=kit.encoded(kit.batch()), headers=kit.bearer("n1"))
    assert own.status_code == 200
    before = deepcopy(opened.ledger.rows)
    for changes in ({"node": "node-2"}, {"cluster": "test"}):
        other = opened.client.post("/v1/usage", content=kit.encoded(kit.batch(**changes)), headers=kit.bearer("n1"))
        refused(other, "wrong-origin")
    refused(opened.client.post("/v1/usage", content=b"{", headers=kit.bearer("n1")), "malformed-batch")
    assert opened.ledger.rows == before


def test_every_answer_is_counted_by_status(door, kit):
    opened = door(limits={"body_bytes": 4096})
    for content in (kit.encoded(kit.batch()), kit.encoded(kit.batch()), b"{", b"x" * 5000):
        opened.client.post("/v1/usage", content=content)
    sample = opened.metrics.registry.get_sample_value
    counted = {c: sample("gputally_ingest_batches_total", {"code": c}) for c in ("200", "400", "413")}
    assert counted == {"200": 2, "400": 1, "413": 1}
    assert sample("gputally_ingest_rows_total", {"result": "stored"}) == 1
    assert sample("gputally_ingest_rows_total", {"result": "duplicate"}) == 1
    assert sample("gputally_ingest_commit_seconds_count") == 2
