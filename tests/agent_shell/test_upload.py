"""At-least-once shipping against a real HTTP server that answers what a test scripts."""

from __future__ import annotations

from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from agent.upload.spool import Outbox
from agent.upload.uploader import BACKOFF_BASE_MS, BACKOFF_CAP_MS, RETRY_AFTER_CAP_MS, ShipResult, Uploader
from agent.wire import Ack, Batch
from gputally.base.clock import VirtualClock
from tests.agent_shell.outboxes import make_facts, make_set
from tests.agent_shell.scripted_accountant import Reply, ScriptedAccountant, accept, refuse
from tests.agent_shell.shipping import Shipping, drain
from tests.real.programs import free_ports

OTHER = "https://proxy.example/problems/blocked"


def test_a_batch_says_where_it_comes_from_and_covers_its_numbers(shipping: Shipping) -> None:
    shipping.append(make_set(rows=2), make_set(), facts=[make_facts("p1")])
    shipping.outbox.park(4, "invalid-batch")
    assert shipping.uploader().ship() == ShipResult("accepted", rows=4)
    (batch,) = shipping.batches
    assert (batch.schema, batch.cluster, batch.node, batch.boot_id, batch.epoch) == (
        1, "c1", "n1", "boot-1", shipping.outbox.epoch,
    )  # fmt: skip
    assert (batch.first_seq, batch.oldest_seq) == (1, 1)
    assert [f.seq for f in batch.facts] == [1]
    assert [r.seq for r in batch.intervals] == [2, 3]
    assert [s.seq for s in batch.skipped] == [4]
    (headers,) = shipping.accountant.headers
    assert headers["path"] == "/v1/usage"
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Encoding"] == "gzip"
    assert "Authorization" not in headers


def test_idle_without_records_and_without_an_accountant(shipping: Shipping) -> None:
    assert shipping.uploader().ship().outcome == "idle"
    shipping.append(make_set())
    assert shipping.uploader(url="").ship().outcome == "idle"


def test_many_batches_use_one_connection_and_bound_each(shipping: Shipping) -> None:
    shipping.append(*(make_set(rows=3) for _ in range(20)))
    results = drain(shipping.uploader(max_rows=10))
    assert [r.outcome for r in results] == ["accepted"] * 7 + ["idle"]
    assert all(len(batch.intervals) <= 10 for batch in shipping.batches)
    assert len(shipping.accountant.connections) == 1


def test_a_kept_connection_that_was_closed_is_opened_again_at_once(shipping: Shipping) -> None:
    shipping.accountant.hang_up = True
    shipping.append(*(make_set() for _ in range(3)))
    assert [r.outcome for r in drain(shipping.uploader(max_rows=1))] == ["accepted"] * 3 + ["idle"]


@pytest.mark.parametrize(("status", "body"), [
    (401, {"type": "ours"}),
    (403, {"type": "ours"}),
    (429, {"type": "ours"}),
    (500, {"type": "ours"}),
    (503, {"type": "ours"}),
    (503, b""),
    (400, b"<html>Bad Request</html>"),
    (422, {"type": OTHER}),
    (409, {"type": OTHER, "ack": {"epoch": "x", "durable_seq": 1, "checkpointed_seq": 1}}),
    (413, b"<html>too large</html>"),
    (404, {"type": "ours"}),
    (415, {"type": "ours"}),
    (302, b""),
    (200, b"<html>please log in</html>"),
    (200, {"epoch": "another", "durable_seq": 1, "checkpointed_seq": 1}),
    (200, b""),
])  # fmt: skip
def test_what_is_not_a_verdict_on_a_record_drops_nothing(shipping: Shipping, status: int, body: Any) -> None:
    shipping.append(make_set())
    ours = isinstance(body, dict) and body.get("type") == "ours"
    shipping.reply(refuse(status, "some-problem") if ours else Reply(status, body))
    ship = shipping.uploader()
    result = ship.ship()
    assert (result.outcome, result.retry_in_ms) == ("retry", BACKOFF_BASE_MS)
    assert ship.ship() == ShipResult("waiting", retry_in_ms=BACKOFF_BASE_MS)
    assert len(shipping.batches) == 1
    shipping.accountant.script = accept
    shipping.clock.advance(BACKOFF_BASE_MS)
    assert ship.ship().outcome == "accepted"
    first, again = shipping.batches
    assert again.sent_ms == first.sent_ms + BACKOFF_BASE_MS
    assert structs.replace(again, sent_ms=None) == structs.replace(first, sent_ms=None)


def test_an_accountant_that_is_not_there_is_retried(shipping: Shipping) -> None:
    (port,) = free_ports(1)
    shipping.append(make_set())
    result = shipping.uploader(url=f"http://127.0.0.1:{port}").ship()
    assert result.outcome == "retry"
    assert "Connection refused" in result.detail


def test_back_off_doubles_up_to_a_cap_and_begins_again_after_success(shipping: Shipping) -> None:
    shipping.append(make_set())
    shipping.refuse(503, "ledger-unavailable")
    ship = shipping.uploader()
    delays = []
    for _ in range(12):
        delays.append(ship.ship().retry_in_ms)
        shipping.clock.advance(delays[-1])
    assert delays[:9] == [1_000 * 2**n for n in range(9)]
    assert delays[9:] == [BACKOFF_CAP_MS] * 3
    shipping.accountant.script = accept
    assert ship.ship().outcome == "accepted"
    shipping.append(make_set())
    shipping.refuse(503, "ledger-unavailable")
    assert ship.ship().retry_in_ms == BACKOFF_BASE_MS


def test_jitter_spreads_over_the_whole_delay(shipping: Shipping) -> None:
    shipping.append(make_set())
    shipping.refuse(503, "ledger-unavailable")
    assert shipping.uploader(jitter=lambda: 0.25).ship().retry_in_ms == BACKOFF_BASE_MS // 4


@pytest.mark.parametrize(("value", "expected"), [
    ("120", 120_000),
    ("999999999999", RETRY_AFTER_CAP_MS),
    (formatdate(1_790_812_890, usegmt=True), 90_000),
    (formatdate(1_790_812_000, usegmt=True), BACKOFF_BASE_MS),
    ("soon", BACKOFF_BASE_MS),
    ("-5", BACKOFF_BASE_MS),
])  # fmt: skip
def test_retry_after_is_obeyed_within_reason(shipping: Shipping, value: str, expected: int) -> None:
    shipping.append(make_set())
    shipping.reply(Reply(429, b"", {"Retry-After": value}))
    assert shipping.uploader().ship().retry_in_ms == expected


@pytest.mark.parametrize("ours", [True, False])
def test_413_is_split_down_to_one_set_whoever_says_it(shipping: Shipping, ours: bool) -> None:
    shipping.append(*(make_set(rows=2) for _ in range(8)))
    too_large = refuse(413, "too-large") if ours else Reply(413, b"<html>413</html>")
    shipping.accountant.script = lambda batch: too_large if len(batch.intervals) > 4 else accept(batch)
    results = drain(shipping.uploader())
    assert [r.outcome for r in results].count("accepted") >= 4
    assert sum(r.rows for r in results) == 16
    assert shipping.outbox.stats().parked == 0


def test_a_set_that_is_too_large_alone_is_parked_not_retried_for_ever(shipping: Shipping) -> None:
    shipping.append(make_set(), make_set(rows=5), make_set())
    shipping.accountant.script = lambda batch: refuse(413, "too-large") if len(batch.intervals) > 4 else accept(batch)
    ship = shipping.uploader()
    drain(ship)
    assert shipping.outbox.durable_seq == 7
    assert dict(ship.parked) == {"too-large": 5}


def test_409_goes_back_to_where_the_accountant_is(shipping: Shipping) -> None:
    shipping.append(*(make_set() for _ in range(6)))
    shipping.outbox.acknowledge(Ack(epoch=shipping.outbox.epoch, durable_seq=4, checkpointed_seq=0))
    marks = {"epoch": shipping.outbox.epoch, "durable_seq": 1, "checkpointed_seq": 1}
    gap = refuse(409, "sequence-gap", ack=marks)
    shipping.accountant.script = lambda batch: gap if batch.first_seq == 5 else accept(batch)
    results = drain(shipping.uploader())
    assert [r.outcome for r in results] == ["rewound", "accepted", "idle"]
    assert [b.first_seq for b in shipping.batches] == [5, 2]
    assert shipping.batches[1].oldest_seq == 2


def test_409_that_leads_nowhere_backs_off_instead_of_spinning(shipping: Shipping) -> None:
    shipping.append(make_set())
    marks = {"epoch": shipping.outbox.epoch, "durable_seq": 0, "checkpointed_seq": 0}
    shipping.refuse(409, "sequence-gap", ack=marks)
    assert shipping.uploader().ship().outcome == "retry"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bad=st.sets(st.integers(0, 19), max_size=5), sizes=st.lists(st.integers(1, 3), min_size=20, max_size=20))
def test_exactly_the_undecodable_sets_are_parked_and_everything_else_arrives(
    tmp_path_factory: pytest.TempPathFactory, accountant: ScriptedAccountant, bad: set[int], sizes: list[int]
) -> None:
    clock = VirtualClock(1)
    outbox = Outbox(tmp_path_factory.mktemp("spool") / "outbox.sqlite", clock, fsync=False)
    outbox.append([make_set(n * 60_000, rows=size) for n, size in enumerate(sizes)], [], None)

    def script(batch: Batch) -> Any:
        if any(row.start_ms // 60_000 in bad for row in batch.intervals):
            return refuse(400 + 22 * (batch.first_seq % 2), "malformed-batch")
        arrived.update(row.start_ms // 60_000 for row in batch.intervals)
        return accept(batch)

    arrived: set[int] = set()
    accountant.script = script
    uploader = Uploader(outbox, accountant.url, "c", "n", "b", None, clock, jitter=lambda: 1.0)
    results = drain(uploader)
    assert results[-1].outcome == "idle"
    assert arrived == set(range(20)) - bad
    assert outbox.durable_seq == sum(sizes)
    assert outbox.stats().parked == sum(sizes[n] for n in bad)
    assert uploader.parked.total() == sum(sizes[n] for n in bad)
    uploader.close()
    outbox.close()


def test_when_the_envelope_is_refused_nothing_stays_parked(shipping: Shipping) -> None:
    shipping.append(*(make_set() for _ in range(8)))
    shipping.refuse(422, "invalid-batch")
    ship = shipping.uploader()
    for _ in range(50):
        shipping.clock.advance(ship.ship().retry_in_ms)
    assert shipping.outbox.stats().parked <= 1
    assert not ship.parked
    ship = shipping.uploader()  # restarted, perhaps with one set parked for nothing
    for _ in range(10):
        shipping.clock.advance(ship.ship().retry_in_ms)
    while shipping.outbox.stats().parked:
        shipping.clock.advance(ship.ship().retry_in_ms)
    shipping.accountant.script = accept
    shipping.clock.advance(BACKOFF_CAP_MS)
    drain(ship)
    assert shipping.outbox.durable_seq == 8
    assert not ship.parked
    assert all(not batch.skipped for batch in shipping.batches[-3:])


def test_a_path_before_the_route_is_kept(shipping: Shipping) -> None:
    shipping.append(make_set())
    shipping.uploader(url=shipping.accountant.url + "/gputally/").ship()
    assert shipping.accountant.headers[0]["path"] == "/gputally/v1/usage"


def test_an_answer_larger_than_any_of_ours_is_not_swallowed(shipping: Shipping) -> None:
    shipping.append(make_set())
    shipping.reply(Reply(200, b" " * 2_000_000))
    result = shipping.uploader().ship()
    assert result.outcome == "retry"
    assert "larger than" in result.detail
