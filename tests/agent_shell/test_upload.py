"""At-least-once shipping against a real HTTP server that answers what a test scripts."""

from __future__ import annotations

import socket
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from agent.metering.meter import ClosedSet
from agent.upload.spool import Outbox
from agent.upload.uploader import BACKOFF_BASE_MS, BACKOFF_CAP_MS, RETRY_AFTER_CAP_MS, ShipResult, Uploader
from agent.wire import Ack, Batch, PodFacts
from gputally.base.clock import VirtualClock

Sets = Callable[..., ClosedSet]
OTHER = "https://proxy.example/problems/blocked"


def drain(uploader: Uploader, steps: int = 200) -> list[ShipResult]:
    """Ship until nothing more happens at once."""
    results = []
    for _ in range(steps):
        results.append(uploader.ship())
        if not results[-1].progress:
            return results
    raise AssertionError(f"no end after {steps} steps: {results[-3:]}")


def test_a_batch_says_where_it_comes_from_and_covers_its_numbers(
    uploader: Callable[..., Uploader], outbox: Outbox, accountant: Any, sets: Sets, facts: Callable[..., PodFacts]
) -> None:
    outbox.append([sets(rows=2), sets()], [facts("p1")], None)
    outbox.park(4, "invalid-batch")
    assert uploader().ship() == ShipResult("accepted", rows=4)
    (batch,) = accountant.batches
    assert (batch.schema, batch.cluster, batch.node, batch.boot_id, batch.epoch) == (
        1, "c1", "n1", "boot-1", outbox.epoch,
    )  # fmt: skip
    assert (batch.first_seq, batch.oldest_seq) == (1, 1)
    assert [f.seq for f in batch.facts] == [1]
    assert [r.seq for r in batch.intervals] == [2, 3]
    assert [s.seq for s in batch.skipped] == [4]
    (headers,) = accountant.headers
    assert headers["path"] == "/v1/usage"
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Encoding"] == "gzip"
    assert "Authorization" not in headers


def test_idle_without_records_and_without_an_accountant(
    uploader: Callable[..., Uploader], outbox: Outbox, sets: Sets
) -> None:
    assert uploader().ship().outcome == "idle"
    outbox.append([sets()], [], None)
    assert uploader(url="").ship().outcome == "idle"


def test_many_batches_use_one_connection_and_bound_each(
    uploader: Callable[..., Uploader], outbox: Outbox, accountant: Any, sets: Sets
) -> None:
    outbox.append([sets(rows=3) for _ in range(20)], [], None)
    results = drain(uploader(max_rows=10))
    assert [r.outcome for r in results] == ["accepted"] * 7 + ["idle"]
    assert all(len(batch.intervals) <= 10 for batch in accountant.batches)
    assert len(accountant.connections) == 1


def test_a_kept_connection_that_was_closed_is_opened_again_at_once(
    uploader: Callable[..., Uploader], outbox: Outbox, accountant: Any, sets: Sets
) -> None:
    accountant.hang_up = True
    outbox.append([sets() for _ in range(3)], [], None)
    assert [r.outcome for r in drain(uploader(max_rows=1))] == ["accepted"] * 3 + ["idle"]


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
def test_what_is_not_a_verdict_on_a_record_drops_nothing(
    uploader: Callable[..., Uploader], outbox: Outbox, accountant: Any, sets: Sets, clock: VirtualClock,
    reply: Any, refuse: Any, accept: Any, status: int, body: Any,
) -> None:  # fmt: skip
    outbox.append([sets()], [], None)
    ours = isinstance(body, dict) and body.get("type") == "ours"
    accountant.script = lambda batch: refuse(status, "some-problem") if ours else reply(status, body)
    ship = uploader()
    result = ship.ship()
    assert (result.outcome, result.retry_in_ms) == ("retry", BACKOFF_BASE_MS)
    assert ship.ship() == ShipResult("waiting", retry_in_ms=BACKOFF_BASE_MS)
    assert len(accountant.batches) == 1
    accountant.script = accept
    clock.advance(BACKOFF_BASE_MS)
    assert ship.ship().outcome == "accepted"
    first, again = accountant.batches
    assert again.sent_ms == first.sent_ms + BACKOFF_BASE_MS
    assert structs.replace(again, sent_ms=None) == structs.replace(first, sent_ms=None)


def test_an_accountant_that_is_not_there_is_retried(
    uploader: Callable[..., Uploader], outbox: Outbox, sets: Sets
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outbox.append([sets()], [], None)
    result = uploader(url=f"http://127.0.0.1:{port}").ship()
    assert result.outcome == "retry"
    assert "Connection refused" in result.detail


def test_back_off_doubles_up_to_a_cap_and_begins_again_after_success(
    uploader: Callable[..., Uploader],
    outbox: Outbox,
    accountant: Any,
    sets: Sets,
    clock: VirtualClock,
    refuse: Any,
    accept: Any,
) -> None:
    outbox.append([sets()], [], None)
    accountant.script = lambda batch: refuse(503, "ledger-unavailable")
    ship = uploader()
    delays = []
    for _ in range(12):
        delays.append(ship.ship().retry_in_ms)
        clock.advance(delays[-1])
    assert delays[:9] == [1_000 * 2**n for n in range(9)]
    assert delays[9:] == [BACKOFF_CAP_MS] * 3
    accountant.script = accept
    assert ship.ship().outcome == "accepted"
    outbox.append([sets()], [], None)
    accountant.script = lambda batch: refuse(503, "ledger-unavailable")
    assert ship.ship().retry_in_ms == BACKOFF_BASE_MS


def test_jitter_spreads_over_the_whole_delay(
    uploader: Callable[..., Uploader], outbox: Outbox, accountant: Any, sets: Sets, refuse: Any
) -> None:
    outbox.append([sets()], [], None)
    accountant.script = lambda batch: refuse(503, "ledger-unavailable")
    assert uploader(jitter=lambda: 0.25).ship().retry_in_ms == BACKOFF_BASE_MS // 4


@pytest.mark.parametrize(("value", "expected"), [
    ("120", 120_000),
    ("999999999999", RETRY_AFTER_CAP_MS),
    (formatdate(1_790_812_890, usegmt=True), 90_000),
    (formatdate(1_790_812_000, usegmt=True), BACKOFF_BASE_MS),
    ("soon", BACKOFF_BASE_MS),
    ("-5", BACKOFF_BASE_MS),
])  # fmt: skip
def test_retry_after_is_obeyed_within_reason(
    uploader: Callable[..., Uploader],
    outbox: Outbox,
    accountant: Any,
    sets: Sets,
    reply: Any,
    value: str,
    expected: int,
) -> None:
    outbox.append([sets()], [], None)
    accountant.script = lambda batch: reply(429, b"", {"Retry-After": value})
    assert uploader().ship().retry_in_ms == expected


@pytest.mark.parametrize("ours", [True, False])
def test_413_is_split_down_to_one_set_whoever_says_it(
    uploader: Callable[..., Uploader],
    outbox: Outbox,
    accountant: Any,
    sets: Sets,
    reply: Any,
    refuse: Any,
    accept: Any,
    ours: bool,
) -> None:
    outbox.append([sets(rows=2) for _ in range(8)], [], None)
    too_large = refuse(413, "too-large") if ours else reply(413, b"<html>413</html>")
    accountant.script = lambda batch: too_large if len(batch.intervals) > 4 else accept(batch)
    results = drain(uploader())
    assert [r.outcome for r in results].count("accepted") >= 4
    assert sum(r.rows for r in results) == 16
    assert outbox.stats().parked == 0


def test_a_set_that_is_too_large_alone_is_parked_not_retried_for_ever(
    uploader: Callable[..., Uploader], outbox: Outbox, accountant: Any, sets: Sets, refuse: Any, accept: Any
) -> None:
    outbox.append([sets(), sets(rows=5), sets()], [], None)
    accountant.script = lambda batch: refuse(413, "too-large") if len(batch.intervals) > 4 else accept(batch)
    ship = uploader()
    drain(ship)
    assert outbox.durable_seq == 7
    assert dict(ship.parked) == {"too-large": 5}


def test_409_goes_back_to_where_the_accountant_is(
    uploader: Callable[..., Uploader], outbox: Outbox, accountant: Any, sets: Sets, refuse: Any, accept: Any
) -> None:
    outbox.append([sets() for _ in range(6)], [], None)
    outbox.acknowledge(Ack(epoch=outbox.epoch, durable_seq=4, checkpointed_seq=0))
    marks = {"epoch": outbox.epoch, "durable_seq": 1, "checkpointed_seq": 1}
    accountant.script = lambda batch: refuse(409, "sequence-gap", ack=marks) if batch.first_seq == 5 else accept(batch)
    results = drain(uploader())
    assert [r.outcome for r in results] == ["rewound", "accepted", "idle"]
    assert [b.first_seq for b in accountant.batches] == [5, 2]
    assert accountant.batches[1].oldest_seq == 2


def test_409_that_leads_nowhere_backs_off_instead_of_spinning(
    uploader: Callable[..., Uploader], outbox: Outbox, accountant: Any, sets: Sets, refuse: Any
) -> None:
    outbox.append([sets()], [], None)
    marks = {"epoch": outbox.epoch, "durable_seq": 0, "checkpointed_seq": 0}
    accountant.script = lambda batch: refuse(409, "sequence-gap", ack=marks)
    assert uploader().ship().outcome == "retry"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bad=st.sets(st.integers(0, 19), max_size=5), sizes=st.lists(st.integers(1, 3), min_size=20, max_size=20))
def test_exactly_the_undecodable_sets_are_parked_and_everything_else_arrives(
    tmp_path_factory: pytest.TempPathFactory,
    accountant: Any,
    sets: Sets,
    refuse: Any,
    accept: Any,
    bad: set[int],
    sizes: list[int],
) -> None:
    clock = VirtualClock(1)
    outbox = Outbox(tmp_path_factory.mktemp("spool") / "outbox.sqlite", clock, fsync=False)
    outbox.append([sets(n * 60_000, rows=size) for n, size in enumerate(sizes)], [], None)

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


def test_when_the_envelope_is_refused_nothing_stays_parked(
    uploader: Callable[..., Uploader],
    outbox: Outbox,
    accountant: Any,
    sets: Sets,
    clock: VirtualClock,
    refuse: Any,
    accept: Any,
) -> None:
    outbox.append([sets() for _ in range(8)], [], None)
    accountant.script = lambda batch: refuse(422, "invalid-batch")
    ship = uploader()
    for _ in range(50):
        clock.advance(ship.ship().retry_in_ms)
    assert outbox.stats().parked <= 1
    assert not ship.parked
    ship = uploader()  # restarted, perhaps with one set parked for nothing
    for _ in range(10):
        clock.advance(ship.ship().retry_in_ms)
    while outbox.stats().parked:
        clock.advance(ship.ship().retry_in_ms)
    accountant.script = accept
    clock.advance(BACKOFF_CAP_MS)
    drain(ship)
    assert outbox.durable_seq == 8
    assert not ship.parked
    assert all(not batch.skipped for batch in accountant.batches[-3:])


def test_a_path_before_the_route_is_kept(
    uploader: Callable[..., Uploader], outbox: Outbox, accountant: Any, sets: Sets
) -> None:
    outbox.append([sets()], [], None)
    uploader(url=accountant.url + "/gputally/").ship()
    assert accountant.headers[0]["path"] == "/gputally/v1/usage"


def test_an_answer_larger_than_any_of_ours_is_not_swallowed(
    uploader: Callable[..., Uploader], outbox: Outbox, accountant: Any, sets: Sets, reply: Any
) -> None:
    outbox.append([sets()], [], None)
    accountant.script = lambda batch: reply(200, b" " * 2_000_000)
    result = uploader().ship()
    assert result.outcome == "retry"
    assert "larger than" in result.detail
