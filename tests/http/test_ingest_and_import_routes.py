"""Usage, bodies and imports: accepted and refused ones; a refused request stores nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from copy import deepcopy
from typing import Any

import msgspec
import pytest
from fastapi import Request
from msgspec import structs

from accountant.api.middleware import BodyLimits
from accountant.api.problems import Refusal
from accountant.core.errors import LedgerFailed, LedgerUnavailable
from accountant.core.import_epochs import epoch
from accountant.core.settings import Limits
from accountant.history_import.import_run import first_seq
from agent.wire import Ack
from gputally.base.units import MS_PER_DAY
from tests.http.conftest import NOW_MS, bearer, encoded, pod_minutes, refused, scoped, token_entry
from tests.moments import present

GZIP = {"Content-Encoding": "gzip"}


def post(running, one, **options):
    """Send a batch."""
    return running.client.post("/v1/usage", content=encoded(one), **options)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_batch_is_answered_with_its_ack_after_it_is_stored(accountant, compressed):
    running = accountant()
    raw = encoded(pod_minutes(rows=3))
    answer = running.client.post(
        "/v1/usage", content=gzip.compress(raw) if compressed else raw, headers=GZIP if compressed else {}
    )
    assert answer.status_code == 200
    assert msgspec.json.decode(answer.content, type=Ack) == Ack(epoch="0192-epoch", durable_seq=3, checkpointed_seq=0)
    assert len(running.ledger.booked["prod", "node-1", "0192-epoch"]) == 1


def test_fields_of_a_newer_agent_are_taken_and_ignored(accountant):
    running = accountant()
    newer = json.loads(encoded(pod_minutes()))
    newer["colour"] = "blue"
    newer["intervals"][0]["temperature_mc"] = 61_000
    newer["intervals"][0]["holder"]["rank"] = 3
    assert running.client.post("/v1/usage", json=newer).json()["durable_seq"] == 1


def test_a_gap_is_a_409_that_carries_the_ack_to_rewind_to(accountant):
    running = accountant()
    post(running, pod_minutes(rows=2))
    before = deepcopy(running.ledger.booked)
    problem = refused(post(running, pod_minutes(first=7)), "sequence-gap")
    ack = {"epoch": "0192-epoch", "durable_seq": 2, "checkpointed_seq": 0, "archived_seq": None, "clock_ms": None}
    assert problem["ack"] == ack
    assert running.ledger.booked == before


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
def test_a_body_that_cannot_be_taken_has_its_own_type_and_stores_nothing(accountant, case):
    running = accountant(limits={"body_bytes": 4096, "decoded_bytes": 65_536})
    content, headers, slug = BODIES[case]
    refused(running.client.post("/v1/usage", content=content, headers=headers), slug)
    assert running.ledger.booked == {}


@pytest.mark.parametrize("field", ["cluster", "node", "boot_id", "epoch", "first_seq", "oldest_seq"])
def test_a_batch_without_a_needed_field_is_invalid(accountant, field):
    running = accountant()
    plain = json.loads(encoded(pod_minutes()))
    del plain[field]
    assert field in refused(running.client.post("/v1/usage", json=plain), "invalid-batch")["detail"]
    assert running.ledger.booked == {}


def test_another_schema_is_refused_so_that_the_agent_keeps_its_rows(accountant):
    running = accountant()
    problem = refused(post(running, pod_minutes(schema=99)), "unknown-schema")
    assert problem["status"] not in (400, 413, 422)  # those make an agent park what it cannot deliver
    assert running.ledger.booked == {}


def test_a_body_exactly_at_the_limit_is_read(accountant):
    raw = encoded(pod_minutes())
    padded = raw + b" " * (8192 - len(raw))
    running = accountant(limits={"body_bytes": 8192, "decoded_bytes": 8192})
    assert running.client.post("/v1/usage", content=padded).status_code == 200
    assert running.client.post("/v1/usage", content=gzip.compress(padded), headers=GZIP).status_code == 200


def test_a_large_body_takes_the_same_way(accountant):
    running = accountant()
    raw = encoded(pod_minutes(rows=1500))
    assert len(raw) > 512 * 1024
    answer = running.client.post("/v1/usage", content=zlib.compress(raw, 0, 31), headers=GZIP)
    assert answer.json()["durable_seq"] == 1500


def test_bodies_without_a_declared_length_are_bounded_too(accountant):
    running = accountant(limits={"body_bytes": 4096})
    refused(running.client.post("/v1/usage", content=iter([b"x" * 3000, b"x" * 3000])), "too-large")


def test_what_all_clients_send_together_is_bounded(accountant):
    running = accountant(limits={"body_bytes": 4096, "inflight_bytes": 1024})
    answer = running.client.post("/v1/usage", content=b"x" * 2000)
    refused(answer, "busy")
    assert int(answer.headers["retry-after"]) >= 1


def test_an_unavailable_ledger_is_a_503_with_retry_after(accountant):
    running = accountant()
    running.ledger.trouble = LedgerUnavailable("no space left on the ledger's volume")
    answer = post(running, pod_minutes())
    assert "no space left" in refused(answer, "ledger-unavailable")["detail"]
    assert int(answer.headers["retry-after"]) >= 1
    assert running.failures == []


def test_a_failed_ledger_is_a_503_and_ends_the_service(accountant):
    running = accountant()
    running.ledger.trouble = LedgerFailed("the database is no longer usable")
    refused(post(running, pod_minutes()), "ledger-unavailable")
    assert running.failures == [running.ledger.trouble]


def test_a_defect_is_a_500_problem_that_gives_nothing_away(accountant):
    running = accountant()
    running.ledger.trouble = ZeroDivisionError("secret")
    answer = post(running, pod_minutes())
    assert "secret" not in refused(answer, "internal")["detail"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_bound_token_reports_for_its_own_node_only(accountant):
    running = accountant(tokens=token_entry("n1", "ingest", ", cluster: prod, node: node-1"))
    own = post(running, pod_minutes(), headers=bearer("n1"))
    assert own.status_code == 200
    before = deepcopy(running.ledger.booked)
    for changes in ({"node": "node-2"}, {"cluster": "test"}):
        other = post(running, pod_minutes(**changes), headers=bearer("n1"))
        refused(other, "wrong-origin")
    refused(running.client.post("/v1/usage", content=b"{", headers=bearer("n1")), "malformed-batch")
    assert running.ledger.booked == before


def test_every_answer_is_counted_by_status(accountant):
    running = accountant(limits={"body_bytes": 4096})
    for content in (encoded(pod_minutes()), encoded(pod_minutes()), b"{", b"x" * 5000):
        running.client.post("/v1/usage", content=content)
    sample = running.metrics.registry.get_sample_value
    counted = {c: sample("gputally_ingest_batches_total", {"code": c}) for c in ("200", "400", "413")}
    assert counted == {"200": 2, "400": 1, "413": 1}
    assert sample("gputally_ingest_rows_total", {"result": "stored"}) == 1
    assert sample("gputally_ingest_rows_total", {"result": "duplicate"}) == 1
    assert sample("gputally_ingest_commit_seconds_count") == 2


KIB = 1024
LIMITS = Limits(body_bytes=64 * KIB, decoded_bytes=64 * KIB, inflight_bytes=512 * KIB)


def body_request(caller: str, *pieces: bytes, ends: bool = True, **headers: str) -> Request:
    """Return a function that sends a body in pieces. ends: False: the connection stays open after the pieces."""
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        if left:
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or not ends}
        await asyncio.Event().wait()
        raise AssertionError

    scope = {
        "type": "http", "method": "POST", "path": "/", "query_string": b"", "client": ("127.0.0.1", 1),
        "headers": [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()],
        "state": {"principal": caller},
    }  # fmt: skip
    return Request(scope, receive)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))  # type: ignore[arg-type]


def test_bodies_that_are_only_announced_take_no_room():
    async def work() -> None:
        intake = BodyLimits(LIMITS)
        slow = [body_request("slow", b"x", ends=False, content_length=str(64 * KIB)) for _ in range(80)]
        waiting = [asyncio.create_task(intake.body(one).__aenter__()) for one in slow]
        await asyncio.sleep(0)
        async with intake.body(body_request("other", b"y" * 64 * KIB)) as body:
            assert len(body) == 64 * KIB
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(work)


def test_one_caller_has_a_share_and_leaves_the_rest_to_others():
    packed = gzip.compress(bytes(60 * KIB))

    async def work() -> None:
        intake = BodyLimits(LIMITS)
        async with AsyncExitStack() as held:
            for _ in range(2):
                await held.enter_async_context(intake.body(body_request("node-1", packed, content_encoding="gzip")))
            with pytest.raises(Refusal, match="this caller is sending") as refused:
                await held.enter_async_context(intake.body(body_request("node-1", packed, content_encoding="gzip")))
            assert refused.value.headers["Retry-After"] == "1"
            await held.enter_async_context(intake.body(body_request("node-2", packed, content_encoding="gzip")))
        async with intake.body(body_request("node-1", packed, content_encoding="gzip")) as body:
            assert len(body) == 60 * KIB

    run(work)


def test_a_body_that_comes_too_slowly_is_given_up_before_its_time_is_over():
    class Impatient(BodyLimits):
        GRACE_SECONDS = 0.05

    async def work() -> None:
        with pytest.raises(Refusal, match="arrived at less than") as refused:
            async with Impatient(LIMITS).body(body_request("slow", b"x", ends=False)):
                pass
        assert refused.value.slug == "slow-body"

    run(work)


@pytest.mark.parametrize("text", ["9" * 5_000, "-1", "1_000", "²"])
def test_a_length_that_is_none_is_refused(text):
    async def work() -> None:
        with pytest.raises(Refusal, match="Content-Length"):
            async with BodyLimits(LIMITS).body(body_request("any", b"", content_length=text)):
                pass

    run(work)


DAY_MS = NOW_MS // MS_PER_DAY * MS_PER_DAY
EPOCH = epoch("prometheus", DAY_MS)
CHUNK = {
    "cluster": "prod", "source": "prometheus", "origin": "https://prometheus:9090", "epoch": EPOCH,
    "start_ms": DAY_MS, "end_ms": NOW_MS, "nodes": 1, "gpus": 8, "sent_us": 3_600_000_000, "held_us": 5,
    "unknown_us": 0, "metered_us": 7, "missing_us": 0,
}  # fmt: skip


def imported(**changes):
    one = pod_minutes(first=first_seq(DAY_MS), node="old-1", epoch=EPOCH, oldest_seq=first_seq(DAY_MS))
    rows = tuple(
        structs.replace(row, method="imported", start_ms=DAY_MS, end_ms=DAY_MS + 60_000) for row in one.intervals
    )
    return structs.replace(one, **({"intervals": rows} | changes))


@pytest.fixture
def importer(accountant):
    running = accountant(tokens="")
    running.client.headers.update(scoped("import"))
    return running


def test_rows_are_booked_and_the_mark_is_told(importer):
    answer = importer.client.post("/v1/imports/usage", content=encoded(imported()))
    assert answer.status_code == 200, answer.text
    assert answer.json()["durable_seq"] == first_seq(DAY_MS)
    told = importer.client.get("/v1/imports", params={"cluster": "prod", "source": "prometheus"}).json()
    assert told["marks"] == [{"node": "old-1", "epoch": EPOCH, "durable_seq": first_seq(DAY_MS)}]
    assert told["metered"] == [{"node": "node-1", "start_ms": NOW_MS - 1, "end_ms": NOW_MS}]
    other = importer.client.get("/v1/imports", params={"cluster": "prod", "source": "slurm"}).json()
    assert other["marks"] == other["done"] == []


@pytest.mark.parametrize(
    "changes",
    [{"epoch": "0192-epoch"}, {"intervals": pod_minutes(first=first_seq(DAY_MS)).intervals}],
    ids=["epoch", "method"],
)
def test_what_is_not_imported_is_refused(importer, changes):
    answer = importer.client.post("/v1/imports/usage", content=encoded(imported(**changes)))
    assert answer.status_code == 422
    assert importer.ledger.booked == {}


def test_a_chunk_is_noted_once_and_is_part_of_the_trail(importer):
    assert importer.client.post("/v1/imports", json=CHUNK).json() == {"new": True}
    assert importer.client.post("/v1/imports", json=CHUNK).json() == {"new": False}
    (act,) = present(importer.ledger).acts("imported")
    assert (act.subject, act.who) == ("prometheus/prod", "import")
    assert act.reason == "1.0 GPU-hours of 1 nodes from https://prometheus:9090"
    told = importer.client.get("/v1/imports", params={"cluster": "prod", "source": "prometheus"}).json()
    assert told["done"] == [{"epoch": EPOCH, "start_ms": DAY_MS, "end_ms": NOW_MS}]


def test_an_import_notes_no_more_chunks_than_its_quota(accountant):
    running = accountant(tokens="", quotas={"import_chunks": 3})
    notes = [CHUNK | {"start_ms": CHUNK["start_ms"] + number} for number in range(5)]
    for one in notes[:3]:
        assert running.client.post("/v1/imports", json=one, headers=scoped("import")).json() == {"new": True}
    for one in notes[3:]:
        assert running.client.post("/v1/imports", json=one, headers=scoped("import")).status_code == 409
    assert running.client.post("/v1/imports", json=notes[0], headers=scoped("import")).json() == {"new": False}
    assert len(present(running.ledger).acts("imported")) == 3


@pytest.mark.parametrize(
    ("field", "value"), [("epoch", "0192-epoch"), ("epoch", epoch("slurm", 0)), ("end_ms", DAY_MS), ("sent_us", -1)]
)
def test_a_note_that_cannot_be_true_is_refused(importer, field, value):
    assert importer.client.post("/v1/imports", json=CHUNK | {field: value}).status_code == 422
    assert present(importer.ledger).acts("imported") == []


def test_a_token_of_one_cluster_imports_into_that_alone(accountant):
    running = accountant(tokens=token_entry("lab", "import", ", cluster: lab"))
    running.client.headers.update(bearer("lab"))
    for answer in (
        running.client.post("/v1/imports/usage", content=encoded(imported())),
        running.client.post("/v1/imports", json=CHUNK),
        running.client.get("/v1/imports", params={"cluster": "prod", "source": "prometheus"}),
    ):
        assert answer.json()["type"].endswith("wrong-origin")
    assert running.client.post("/v1/imports/usage", content=encoded(imported(cluster="lab"))).status_code == 200


def test_a_body_that_is_no_batch_is_refused(importer):
    assert importer.client.post("/v1/imports/usage", content=b"{").status_code == 400
    assert importer.client.post("/v1/imports/usage", content=msgspec.json.encode({"schema": 9})).status_code == 415
