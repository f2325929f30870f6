"""The durable spool: numbering, resending, room, damage, locking."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.upload.spool import OUTBOX_FULL, SPOOL_UNWRITABLE, LostRecords, Outbox, uuid7
from agent.wire import Ack
from gputally.base.clock import VirtualClock
from tests.agent_shell.outboxes import ALL, acknowledge, make_facts, make_set, pending_seqs
from tests.effort import examples

Open = Callable[..., Outbox]


@settings(max_examples=examples(16, 100), deadline=None)
@given(st.integers(0, 2**48 - 1), st.integers(0, 2**62 - 1))
def test_epochs_are_version_7_uuids_that_sort_by_creation(at_ms: int, bits: int) -> None:
    made = uuid.UUID(uuid7(at_ms, lambda n: bits & ((1 << n) - 1)))
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert made.int >> 80 == at_ms
    assert str(made) == uuid7(at_ms, lambda n: bits & ((1 << n) - 1))
    assert uuid7(at_ms, lambda n: 0) < uuid7(at_ms + 1, lambda n: 0) or at_ms == 2**48 - 1


def test_numbers_run_from_one_with_facts_before_the_sets_they_explain(open_outbox: Open) -> None:
    outbox = open_outbox()
    done = outbox.append([make_set(rows=2), make_set(rows=1, gpu="GPU-b")], [make_facts("p1")], None)
    assert (done.last_seq, done.refused_sets) == (4, 0)
    pending = outbox.pending(**ALL)
    assert pending is not None
    assert (pending.first_seq, pending.last_seq, pending.oldest_seq) == (1, 4, 1)
    assert [f.seq for f in pending.facts] == [1]
    assert [(r.seq, r.gpu_uuid) for r in pending.intervals] == [(2, "GPU-a"), (3, "GPU-a"), (4, "GPU-b")]


def test_a_record_keeps_its_number_whatever_the_order_of_its_stored_fields(open_outbox: Open) -> None:
    outbox = open_outbox()
    outbox.append([make_set(rows=1), make_set(rows=1, gpu="GPU-b")], [], None)
    outbox.close()
    with sqlite3.connect(outbox.path) as db:
        (payload,) = db.execute("SELECT payload FROM record WHERE seq = 2").fetchone()
        reordered = dict(reversed(msgspec.json.decode(payload).items()))  # as no release wrote it
        db.execute("UPDATE record SET payload = ? WHERE seq = 2", (msgspec.json.encode(reordered),))
    db.close()
    pending = open_outbox().pending(**ALL)
    assert pending is not None
    assert msgspec.structs.replace(pending.intervals[1], seq=0, gpu_uuid="GPU-a") == msgspec.structs.replace(
        pending.intervals[0], seq=0
    )
    assert [(r.seq, r.gpu_uuid) for r in pending.intervals] == [(1, "GPU-a"), (2, "GPU-b")]


def test_everything_survives_a_restart_with_its_epoch(open_outbox: Open) -> None:
    first = open_outbox()
    first.append([make_set()], [], b"state one")
    epoch = first.epoch
    first.close()
    second = open_outbox()
    assert second.epoch == epoch
    assert second.meter_state() == b"state one"
    assert second.append([make_set()], [], None).last_seq == 2
    assert second.meter_state() == b"state one"
    assert pending_seqs(second) == [1, 2]


def test_a_new_outbox_has_a_new_epoch(open_outbox: Open) -> None:
    assert open_outbox("a").epoch != open_outbox("b").epoch


@pytest.mark.parametrize(("limits", "expected"), [
    ({"max_rows": 1}, [1, 2, 3]),
    ({"max_rows": 3}, [1, 2, 3]),
    ({"max_rows": 5}, [1, 2, 3]),
    ({"max_rows": 6}, [1, 2, 3, 4, 5, 6]),
    ({"max_bytes": 1}, [1, 2, 3]),
    ({"max_units": 1}, [1, 2, 3]),
    ({"max_units": 2}, [1, 2, 3, 4, 5, 6]),
    ({"upto": 6}, [1, 2, 3, 4, 5, 6]),
    ({"upto": 0}, []),
    ({}, list(range(1, 8))),
])  # fmt: skip
def test_a_set_is_never_split(open_outbox: Open, limits: dict[str, int], expected: list[int]) -> None:
    outbox = open_outbox()
    outbox.append([make_set(rows=3), make_set(rows=3, gpu="GPU-b"), make_set(rows=1, gpu="GPU-c")], [], None)
    assert pending_seqs(outbox, **limits) == expected


def test_rows_leave_at_the_checkpoint_where_there_is_no_archive(open_outbox: Open) -> None:
    outbox = open_outbox()
    outbox.append([make_set() for _ in range(5)], [], None)
    acknowledge(outbox, durable=5)
    assert pending_seqs(outbox) == []
    assert outbox.stats().rows == 5
    acknowledge(outbox, durable=5, checkpointed=3)
    assert outbox.stats().rows == 2


def test_rows_leave_at_the_archive_where_there_is_one(open_outbox: Open) -> None:
    outbox = open_outbox()
    outbox.append([make_set() for _ in range(5)], [], None)
    acknowledge(outbox, durable=5, checkpointed=5, archived=2)
    assert outbox.stats().rows == 3
    acknowledge(outbox, durable=5, checkpointed=5, archived=5)
    assert (outbox.stats().rows, outbox.stats().bytes) == (0, 0)


def test_a_restored_ledger_gets_everything_again_that_is_still_here(open_outbox: Open) -> None:
    outbox = open_outbox()
    outbox.append([make_set() for _ in range(6)], [], None)
    acknowledge(outbox, durable=6, checkpointed=6, archived=2)
    acknowledge(outbox, durable=1, checkpointed=1, archived=1)
    pending = outbox.pending(**ALL)
    assert pending is not None
    assert (pending.first_seq, pending.oldest_seq, pending.last_seq) == (3, 3, 6)


def test_numbers_are_never_used_again_when_everything_was_dropped(open_outbox: Open) -> None:
    outbox = open_outbox()
    outbox.append([make_set(), make_set()], [], None)
    acknowledge(outbox, durable=2, checkpointed=2)
    outbox.close()
    again = open_outbox()
    assert again.append([make_set()], [], None).last_seq == 3
    assert pending_seqs(again) == [3]


def test_the_answer_for_another_epoch_changes_nothing(open_outbox: Open) -> None:
    outbox = open_outbox()
    outbox.append([make_set()], [], None)
    outbox.acknowledge(Ack(epoch="somebody else", durable_seq=1, checkpointed_seq=1))
    assert pending_seqs(outbox) == [1]


def test_an_old_copy_of_the_outbox_begins_a_new_epoch_and_sends_what_it_has(open_outbox: Open) -> None:
    outbox = open_outbox()
    outbox.append([make_set(rows=2), make_set(rows=2)], [], None)
    acknowledge(outbox, durable=2, checkpointed=2)
    old = outbox.epoch
    acknowledge(outbox, durable=900, checkpointed=900)
    assert outbox.epoch > old
    assert pending_seqs(outbox) == [1, 2]
    assert pending_seqs(outbox, max_units=1) == [1, 2]
    outbox.append([make_set()], [], None)
    outbox.close()
    assert pending_seqs(open_outbox()) == [1, 2, 3]


def test_parking_declares_the_whole_set_and_is_declared_again_until_it_is_dropped(open_outbox: Open) -> None:
    outbox = open_outbox()
    outbox.append([make_set(rows=2), make_set()], [], None)
    outbox.park(2, "invalid-batch")
    outbox.close()
    again = open_outbox()
    pending = again.pending(**ALL)
    assert pending is not None
    assert [(s.seq, s.reason) for s in pending.skipped] == [(1, "invalid-batch"), (2, "invalid-batch")]
    assert [r.seq for r in pending.intervals] == [3]
    acknowledge(again, durable=3)
    acknowledge(again, durable=0)
    assert pending_seqs(again) == [1, 2, 3]
    assert again.stats().parked == 2
    again.unpark(1)
    assert again.stats().parked == 0


def test_when_full_the_oldest_is_kept_and_the_loss_is_declared_once(open_outbox: Open) -> None:
    outbox = open_outbox(max_bytes=2_000)
    refused = [outbox.append([make_set(start)], [], None).refused_sets for start in range(0, 20 * 60_000, 60_000)]
    kept = refused.index(1)
    assert kept >= 2
    assert refused[kept:] == [1] * (20 - kept)
    assert outbox.append([make_set()], [make_facts("p")], None).refused_facts == 1
    pending = outbox.pending(**ALL)
    assert pending is not None
    assert [r.seq for r in pending.intervals] == list(range(1, kept + 1))
    assert [(s.seq, s.reason) for s in pending.skipped] == [(kept + 1, OUTBOX_FULL)]
    assert outbox.stats().lost_sets == 20 - kept + 1
    acknowledge(outbox, durable=kept + 1, checkpointed=kept + 1)
    assert outbox.append([make_set()], [], None).refused_sets == 0
    assert pending_seqs(outbox) == [kept + 2]


def test_what_was_lost_before_it_came_here_is_declared_behind_everything_that_did(open_outbox: Open) -> None:
    outbox = open_outbox()
    outbox.append([make_set(0)], [], None)
    outbox.declare(LostRecords(60_000, 120_000, 1, 0) + LostRecords(120_000, 180_000, 2, 1))
    outbox.declare(LostRecords(180_000, 240_000, 1, 0))
    outbox.append([make_set(240_000)], [], None)
    pending = outbox.pending(**ALL)
    assert pending is not None
    assert [row.seq for row in pending.intervals] == [1, 3]
    assert [(skip.seq, skip.reason) for skip in pending.skipped] == [(2, SPOOL_UNWRITABLE)]
    assert (outbox.stats().unspooled_sets, outbox.stats().lost_sets) == (4, 0)


def test_room_is_made_of_what_only_insures_the_accountants_volume(open_outbox: Open) -> None:
    outbox = open_outbox(max_bytes=2_000)
    while outbox.append([make_set()], [], None).refused_sets == 0:
        acknowledge(outbox, durable=outbox.last_seq, checkpointed=0, archived=0)
    durable_only = outbox.stats()
    assert (durable_only.released_early, durable_only.lost_sets) == (0, 1)
    acknowledge(outbox, durable=outbox.last_seq, checkpointed=2, archived=0)
    assert outbox.append([make_set()], [], None).refused_sets == 0
    assert outbox.stats().released_early == 2


def test_when_the_oldest_is_too_old_new_time_is_refused(open_outbox: Open, clock: VirtualClock) -> None:
    outbox = open_outbox(max_age_ms=3_600_000)
    outbox.append([make_set()], [], None)
    clock.advance(3_600_000)
    assert outbox.append([make_set()], [], None).refused_sets == 0
    clock.advance(1)
    assert outbox.append([make_set()], [], b"state").refused_sets == 1
    assert outbox.meter_state() == b"state"
    assert outbox.stats().oldest_age_ms == 3_600_001
    acknowledge(outbox, durable=outbox.last_seq)
    assert outbox.append([make_set()], [], None).refused_sets == 0
