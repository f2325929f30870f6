"""The durable spool: numbering, resending, disk space, damage, locking, and a model of the accountant."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent.metering.meter import ClosedSet
from agent.upload.spool import OUTBOX_FULL, SPOOL_UNWRITABLE, Outbox
from agent.upload.spool_file import (
    RESERVE_BYTES,
    SPOOL_DAMAGED,
    OutboxLocked,
    OutboxUnavailable,
    SpoolNotWritable,
    SpoolRecord,
    uuid7,
)
from agent.wire import Ack, PodFacts, Skipped, UsageInterval
from gputally.base.clock import VirtualClock
from tests.agent.records import ALL, acknowledge, make_facts, make_set, pending_seqs
from tests.file_size_limit import limited_files
from tests.hypothesis_examples import examples

Open = Callable[..., Outbox]


@pytest.fixture
def outbox(open_outbox: Open) -> Outbox:
    return open_outbox()


@settings(max_examples=examples(16, 100))
@given(st.integers(0, 2**48 - 1), st.integers(0, 2**62 - 1))
def test_epochs_are_version_7_uuids_that_sort_by_creation(at_ms: int, bits: int) -> None:
    made = uuid.UUID(uuid7(at_ms, lambda n: bits & ((1 << n) - 1)))
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert made.int >> 80 == at_ms
    assert str(made) == uuid7(at_ms, lambda n: bits & ((1 << n) - 1))
    assert uuid7(at_ms, lambda n: 0) < uuid7(at_ms + 1, lambda n: 0) or at_ms == 2**48 - 1


def test_other_users_cannot_read_the_spool_in_a_folder_that_they_can_read(open_outbox: Open, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    outbox = open_outbox(fsync=True)
    outbox.append([make_set(rows=1)], [make_facts("p1")], None)
    modes = {file.name: file.stat().st_mode & 0o007 for file in tmp_path.iterdir()}
    assert {"outbox.sqlite", "outbox.sqlite-journal"} <= modes.keys()
    assert not any(modes.values()), modes
    outbox.path.unlink()
    outbox.append([make_set(rows=1, gpu="GPU-b")], [], None)
    assert not outbox.path.stat().st_mode & 0o007, "written again"


def test_numbers_run_from_one_with_facts_before_the_sets_they_explain(outbox: Outbox) -> None:
    done = outbox.append([make_set(rows=2), make_set(rows=1, gpu="GPU-b")], [make_facts("p1")], None)
    assert (done.last_seq, done.refused_sets) == (4, 0)
    pending = outbox.pending(**ALL)
    assert pending is not None
    assert (pending.first_seq, pending.last_seq, pending.oldest_seq) == (1, 4, 1)
    assert [f.seq for f in pending.facts] == [1]
    assert [(r.seq, r.gpu_uuid) for r in pending.intervals] == [(2, "GPU-a"), (3, "GPU-a"), (4, "GPU-b")]


def test_a_record_keeps_its_number_whatever_the_order_of_its_stored_fields(outbox: Outbox) -> None:
    outbox.append([make_set(rows=1), make_set(rows=1, gpu="GPU-b")], [], None)

    def reordered(record: SpoolRecord) -> SpoolRecord:  # as no release wrote it
        fields = dict(reversed(msgspec.json.decode(record.payload).items()))
        return record._replace(payload=msgspec.json.encode(fields))

    with outbox._spool.transaction():
        assert outbox._spool.update("seq = ?", (2,), reordered) == 1
    pending = outbox.pending(**ALL)
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
def test_a_set_is_never_split(outbox: Outbox, limits: dict[str, int], expected: list[int]) -> None:
    outbox.append([make_set(rows=3), make_set(rows=3, gpu="GPU-b"), make_set(rows=1, gpu="GPU-c")], [], None)
    assert pending_seqs(outbox, **limits) == expected


@pytest.mark.parametrize(("marks", "rows"), [
    ([{"durable": 5}, {"durable": 5, "checkpointed": 3}], [5, 2]),
    ([{"durable": 5, "checkpointed": 5, "archived": archived} for archived in (2, 5)], [3, 0]),
], ids=["at the checkpoint without an archive", "at the archive"])  # fmt: skip
def test_when_rows_leave(outbox: Outbox, marks: list[dict[str, int]], rows: list[int]) -> None:
    outbox.append([make_set() for _ in range(5)], [], None)
    for mark, left in zip(marks, rows, strict=True):
        acknowledge(outbox, **mark)
        assert pending_seqs(outbox) == []
        assert outbox.stats().rows == left
    assert (outbox.stats().bytes == 0) == (rows[-1] == 0)


def test_a_restored_ledger_gets_everything_again_that_is_still_here(outbox: Outbox) -> None:
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


def test_the_answer_for_another_epoch_changes_nothing(outbox: Outbox) -> None:
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


def test_what_was_lost_before_it_came_here_is_declared_behind_everything_that_did(outbox: Outbox) -> None:
    outbox.append([make_set(0)], [], None)
    outbox.declare(sets=3)
    outbox.declare(sets=1)
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


def test_a_disk_that_takes_no_writes_is_waited_for_where_that_was_asked(open_outbox: Open, tmp_path: Path) -> None:
    """A file in place of the spool's folder is a mistake, reported at once; a full disk is temporary."""
    with limited_files(0):
        with pytest.raises(SpoolNotWritable):
            open_outbox("a/outbox.sqlite")
        outbox = open_outbox("b/outbox.sqlite", fsync=True, patient=True)
        for attempt in (outbox.stats, outbox.meter_state, lambda: outbox.append([], [], b"state")):
            with pytest.raises(SpoolNotWritable):
                attempt()
    assert outbox.append([], [], b"state").last_seq == 0
    assert (outbox.meter_state(), outbox.epoch != "") == (b"state", True)
    with pytest.raises(OutboxLocked):
        open_outbox("b/outbox.sqlite")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutboxUnavailable) as told:
        open_outbox("file/outbox.sqlite", patient=True)
    assert not isinstance(told.value, SpoolNotWritable)


def test_a_disk_that_fills_while_damage_is_repaired_is_waited_for(open_outbox: Open, tmp_path: Path) -> None:
    """No lock of sqlite stays behind."""
    outbox = open_outbox()
    outbox.append([make_set()], [], b"state")
    outbox.close()
    path = tmp_path / "outbox.sqlite"
    place = path.read_bytes().index(b"GPU-a")
    overwrite(path, place, place + 1)
    with limited_files(0):
        with pytest.raises(SpoolNotWritable):
            open_outbox()
        again = open_outbox(patient=True)
        with pytest.raises(SpoolNotWritable):
            again.append([make_set()], [], None)
    assert again.append([make_set()], [], None).last_seq == 2
    assert again.meter_state() == b"state"


def test_a_closed_outbox_refuses_every_call_in_its_own_words(outbox: Outbox) -> None:
    outbox.append([make_set()], [], b"state")
    outbox.close()
    outbox.close()
    for call in (
        outbox.stats, outbox.meter_state, outbox.inquiry, lambda: pending_seqs(outbox), lambda: outbox.park(1, "x"),
        lambda: outbox.append([make_set()], [], None), lambda: acknowledge(outbox, 1, 1),
        lambda: outbox.store_value("a", b""), lambda: outbox.shift_times({}, "a", b""),
        lambda: outbox.declare(1),
    ):  # fmt: skip
        with pytest.raises(OutboxUnavailable):
            call()


def test_a_second_agent_is_told_in_one_line(outbox: Outbox, open_outbox: Open) -> None:
    with pytest.raises(OutboxLocked, match=r"outbox .*outbox\.sqlite is in use by another agent") as caught:
        open_outbox()
    assert "\n" not in str(caught.value)
    outbox.close()
    open_outbox()


def overwrite(path: Path, start: int, end: int, content: bytes = b"\xff") -> None:
    """Overwrite the bytes from `start` to `end` of a file with a repeated byte."""
    raw = bytearray(path.read_bytes())
    raw[start:end] = content * (end - start)
    path.write_bytes(raw)


def named(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the log's records about damage."""
    return [record for record in caplog.records if record.levelno == logging.CRITICAL]


def test_a_file_that_is_no_outbox_is_kept_aside_and_a_new_epoch_begins(
    open_outbox: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "outbox.sqlite").write_bytes(b"this is no database at all, " * 400)
    outbox = open_outbox()
    pending = outbox.pending(**ALL)
    assert pending is not None
    assert [skip.reason for skip in pending.skipped] == [SPOOL_DAMAGED]
    assert outbox.append([make_set()], [], None).last_seq == 2
    assert [p.name for p in tmp_path.glob("*.damaged-*")] == [f"outbox.sqlite.damaged-{1_790_812_800_000}"]
    assert named(caplog)


def test_of_a_file_with_a_broken_structure_everything_intact_is_sent_and_the_rest_is_declared(
    open_outbox: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = open_outbox()
    outbox.append([make_set(rows=2) for _ in range(100)], [], b"state")
    acknowledge(outbox, 10)
    epoch, path = outbox.epoch, tmp_path / "outbox.sqlite"
    outbox.close()
    overwrite(path, 4096 * 6, 4096 * 8)
    again = open_outbox()
    assert (again.epoch, again.last_seq, again.durable_seq, again.meter_state()) == (epoch, 200, 10, b"state")
    pending = again.pending(**ALL)
    assert pending is not None
    assert pending_seqs(again) == list(range(11, 201))
    assert {skip.reason for skip in pending.skipped} == {SPOOL_DAMAGED}
    assert 0 < len(pending.skipped) < 60
    assert len(pending.skipped) % 2 == 0, "sets are lost as a whole"
    lost = [record for record in named(caplog) if hasattr(record, "first_seq")]
    assert sum(record.last_seq - record.first_seq + 1 for record in lost) == len(pending.skipped)  # type: ignore[attr-defined]
    assert [p.name for p in tmp_path.glob("*.damaged-*")] == [f"outbox.sqlite.damaged-{1_790_812_800_000}"]


@pytest.mark.parametrize("value", ["meter_state", "clock_origins"])
def test_a_damaged_value_beside_the_records_counts_as_absent(
    open_outbox: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    outbox = open_outbox()
    outbox.append([make_set()], [], None)
    outbox.store_value(value, b"a value that is damaged")
    outbox.close()
    path = tmp_path / "outbox.sqlite"
    place = path.read_bytes().index(b"value that")
    overwrite(path, place, place + 1)
    again = open_outbox()
    assert again.stored_value(value) is None
    assert pending_seqs(again) == [1]
    (record,) = named(caplog)
    assert record.values == [value]  # type: ignore[attr-defined]


def test_without_its_marks_an_outbox_begins_a_new_epoch_and_sends_what_it_has(
    open_outbox: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = open_outbox()
    outbox.append([make_set(rows=3), make_set()], [make_facts("p")], b"state")
    acknowledge(outbox, 4)
    epoch, path = outbox.epoch, tmp_path / "outbox.sqlite"
    outbox.close()
    place = path.read_bytes().index(epoch.encode())
    overwrite(path, place, place + 1)
    again = open_outbox()
    assert again.epoch != epoch
    pending = again.pending(**ALL)
    assert pending is not None
    assert ([f.seq for f in pending.facts], [r.seq for r in pending.intervals]) == ([1], [2, 3, 4, 5])
    assert [(skip.seq, skip.reason) for skip in pending.skipped] == [(6, SPOOL_DAMAGED)]
    assert again.meter_state() == b"state"
    assert named(caplog)


def test_an_empty_file_in_place_of_a_used_one_is_named(
    open_outbox: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = open_outbox()
    assert not named(caplog)
    outbox.append([make_set()], [], None)
    epoch = outbox.epoch
    outbox.close()
    (tmp_path / "outbox.sqlite").write_bytes(b"")
    assert open_outbox().epoch != epoch
    assert named(caplog)


def test_a_volume_without_room_for_a_second_file_keeps_only_what_is_intact(open_outbox: Open, tmp_path: Path) -> None:
    outbox = open_outbox()
    outbox.append([make_set() for _ in range(100)], [], None)
    outbox.close()
    overwrite(tmp_path / "outbox.sqlite", 4096 * 6, 4096 * 7)
    again = open_outbox(free_bytes=lambda: 0)
    pending = again.pending(**ALL)
    assert pending is not None
    assert len(pending.intervals) + len(pending.skipped) == 100
    assert len(pending.intervals) > 80
    assert not [*tmp_path.glob("*.damaged-*")]


@pytest.mark.parametrize("what", ["files", "folder", "replaced"])
def test_an_outbox_that_is_removed_under_the_agent_is_written_anew_from_what_is_open(
    open_outbox: Open, tmp_path: Path, what: str
) -> None:
    name, folder = "node/spool/outbox.sqlite", tmp_path / "node" / "spool"
    outbox = open_outbox(name, fsync=True)
    outbox.append([make_set()], [], b"state")
    acknowledge(outbox, durable=1)
    outbox.append([make_set()], [], None)
    epoch = outbox.epoch
    if what == "replaced":
        (folder / "other").write_bytes(b"somebody else's")
        (folder / "other").replace(folder / "outbox.sqlite")
    else:
        for path in folder.iterdir():
            path.unlink()
    if what == "folder":
        folder.rmdir()
    else:
        with limited_files(1), pytest.raises(OutboxUnavailable):
            outbox.append([make_set()], [], None)
    assert outbox.append([make_set()], [], None).last_seq == 3
    outbox.append([make_set()], [], None)
    with pytest.raises(OutboxLocked):
        open_outbox(name)
    outbox.close()
    again = open_outbox(name)
    assert (again.epoch, again.last_seq, again.durable_seq, again.meter_state()) == (epoch, 4, 1, b"state")
    assert pending_seqs(again) == [2, 3, 4]


def test_an_outbox_that_is_damaged_under_the_agent_is_repaired_and_metering_goes_on(
    open_outbox: Open, tmp_path: Path
) -> None:
    outbox, path = open_outbox(fsync=True), tmp_path / "outbox.sqlite"
    for _ in range(10):
        outbox.append([make_set() for _ in range(20)], [], None)
    with outbox._spool.reading():
        outbox._spool.db.execute("PRAGMA cache_size = 1")
    with path.open("r+b") as file:
        file.seek(4096 * 4)
        file.write(b"\xff" * 4096)
    with pytest.raises(OutboxUnavailable):
        outbox.pending(**ALL)
    pending = outbox.pending(**ALL)
    assert pending is not None
    assert pending_seqs(outbox) == list(range(1, 201))
    assert 0 < len(pending.skipped) < 40
    assert outbox.append([make_set()], [], None).last_seq == 201


def test_a_newer_layout_is_refused_and_left_alone(open_outbox: Open, tmp_path: Path) -> None:
    open_outbox().close()
    with closing(sqlite3.connect(tmp_path / "outbox.sqlite")) as db:
        db.execute(f"PRAGMA user_version={0x09090909}")
    with pytest.raises(OutboxUnavailable, match="written by a newer agent"):
        open_outbox()
    open_outbox("other.sqlite")


def test_a_folder_that_cannot_be_used_is_said_in_one_line(open_outbox: Open, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OutboxUnavailable, match=r"spool folder .* cannot be used: Not a directory"):
        open_outbox("file/spool/outbox.sqlite")


def test_a_full_disk_loses_no_number_and_nothing_stored(open_outbox: Open, tmp_path: Path) -> None:
    outbox = open_outbox()
    outbox.append([make_set()], [], b"before")
    size = (tmp_path / "outbox.sqlite").stat().st_size
    with limited_files(size), pytest.raises(OutboxUnavailable, match="cannot be written"):
        outbox.append([make_set() for _ in range(300)], [], b"lost")
    assert pending_seqs(outbox) == [1]
    assert outbox.append([make_set()], [], b"after").last_seq == 2
    assert outbox.meter_state() == b"after"
    outbox.close()
    assert pending_seqs(open_outbox()) == [1, 2]


def in_a_process(path: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Run these lines in a process in which `box` is the outbox and `row` an interval."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "from gputally.base.clock import VirtualClock; from agent.metering.meter import ClosedSet\n"
        "from agent.upload.spool import Outbox\n"
        "from tests.agent.records import make_row\n"
        "row, box = make_row(0), Outbox(Path(sys.argv[1]), VirtualClock(1))\n"
    )
    command = [sys.executable, "-c", script + "\n".join(lines), str(path)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_what_was_appended_survives_the_death_of_the_process(tmp_path: Path, open_outbox: Open) -> None:
    lines = ("box.append([ClosedSet((row, row)), ClosedSet((row,))], [], b'held')", "os.kill(os.getpid(), 9)")
    done = in_a_process(tmp_path / "outbox.sqlite", *lines)
    assert (done.returncode, done.stderr) == (-9, "")
    outbox = open_outbox()
    assert pending_seqs(outbox) == [1, 2, 3]
    assert outbox.meter_state() == b"held"


def test_a_process_that_dies_within_a_transaction_leaves_what_was_before_it(open_outbox: Open, tmp_path: Path) -> None:
    outbox = open_outbox(fsync=True)
    for number in range(40):
        outbox.append([make_set(rows=2)], [], f"after {number}".encode())
    with suppress(KeyError), outbox._spool.transaction():
        outbox._spool.db.execute("PRAGMA cache_size = 1")  # pages reach the file before the transaction ends
        outbox._spool.remove(60)
        (tmp_path / "crashed").mkdir()
        for suffix in ("", "-journal"):
            (tmp_path / f"crashed/outbox.sqlite{suffix}").write_bytes(
                (tmp_path / f"outbox.sqlite{suffix}").read_bytes()
            )
        raise KeyError
    assert (tmp_path / "crashed/outbox.sqlite-journal").stat().st_size > 4096
    for found in (outbox, open_outbox("crashed/outbox.sqlite")):
        assert pending_seqs(found) == list(range(1, 81))
        assert found.meter_state() == b"after 39"
        assert found.append([make_set(rows=2)], [], None).last_seq == 82


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _fill(outbox: Outbox) -> int:
    """Append sets of eight rows until the outbox refuses one; return their number."""
    for number in range(10_000):
        try:
            outbox.append([make_set(rows=8)], [], b"state" * 100)
        except OutboxUnavailable:
            return number
    raise AssertionError("it was never full")


def test_a_volume_of_400_kib_is_not_filled_by_the_journal_and_ships_when_it_is_full(
    small_disk: Path, open_outbox: Open
) -> None:
    outbox = open_outbox(f"{small_disk.name}/outbox.sqlite", fsync=True)
    taken = [_fill(outbox)]
    for _ in range(3):
        assert outbox.pending(**ALL) is not None
        acknowledge(outbox, outbox.last_seq, outbox.last_seq)
        assert outbox.pending(**ALL) is None
        assert outbox.stats().rows == 0
        taken.append(_fill(outbox))
    assert min(taken) > 40, "more than the log alone could hold"


def test_where_the_volume_has_little_room_what_was_sent_is_removed_step_by_step(
    open_outbox: Open, tmp_path: Path
) -> None:
    free = [2**30]
    outbox = open_outbox(fsync=True, free_bytes=lambda: free[0])
    for _ in range(50):
        outbox.append([make_set(rows=8)], [], None)
    free[0] = RESERVE_BYTES
    with pytest.raises(OutboxUnavailable, match=r"128 KiB of its volume are free, and [0-9]+ KiB are needed"):
        outbox.append([make_set()], [], None)
    assert outbox.last_seq == 400
    acknowledge(outbox, 399, 399)
    assert pending_seqs(outbox) == [400]
    assert outbox.stats().rows == 1
    assert (tmp_path / "outbox.sqlite-journal").stat().st_size == 0
    free[0] = 2**30
    assert outbox.append([make_set()], [], None).last_seq == 401


def test_no_file_that_another_program_shortens_ends_the_process(tmp_path: Path) -> None:
    """A mapped file would end the process by SIGBUS."""
    done = in_a_process(
        tmp_path / "outbox.sqlite",
        "box.append([ClosedSet((row,))], [], None)",
        "for file in Path(sys.argv[1]).parent.iterdir(): os.truncate(file, 0)",
        "print(box.append([ClosedSet((row,))], [], None).last_seq)",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


Sent = UsageInterval | PodFacts | Skipped


class Protocol(RuleBasedStateMachine):
    """A node's outbox, and a ledger that may lose what is not durable yet."""

    @initialize(archive=st.booleans())
    def begin(self, archive: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clock = VirtualClock(1_790_812_800_000)
        self.archive = archive
        self.outbox = self.open()
        self.epoch = self.outbox.epoch
        self.written: dict[int, UsageInterval | PodFacts] = {}
        self.unit_of: dict[int, int] = {}
        self.parked: set[int] = set()
        self.ledger: dict[int, Sent] = {}
        self.safe: dict[int, Sent] = {}
        self.units = 0

    def open(self) -> Outbox:
        return Outbox(Path(self.folder.name) / "outbox.sqlite", self.clock, fsync=False)

    @rule(sizes=st.lists(st.integers(1, 3), max_size=3), facts=st.integers(0, 2))
    def append(self, sizes: list[int], facts: int) -> None:
        seq = self.outbox.last_seq
        made_facts = []
        for _ in range(facts):
            seq, self.units = seq + 1, self.units + 1
            fact = PodFacts(seq=seq, uid=f"u{seq}", namespace="n", name="p", node="n1", observed_ms=seq)
            made_facts.append(fact)
            self.written[seq], self.unit_of[seq] = fact, self.units
        made_sets = []
        for size in sizes:
            self.units += 1
            rows = []
            for _ in range(size):
                seq += 1
                row = UsageInterval(
                    seq=seq, start_ms=self.units, end_ms=self.units + 1, gpu_uuid="G", gpu_model="M",
                    capacity_us=seq, allocated_us=0, method="device",
                )  # fmt: skip
                rows.append(row)
                self.written[seq], self.unit_of[seq] = row, self.units
            made_sets.append(ClosedSet(tuple(rows)))
        assert self.outbox.append(made_sets, made_facts, b"%d" % seq).last_seq == seq

    @rule(max_rows=st.integers(1, 6), arrives=st.booleans(), answered=st.booleans())
    def send(self, max_rows: int, arrives: bool, answered: bool) -> None:
        pending = self.outbox.pending(max_rows, 1_000_000)
        if pending is None:
            return
        records: list[Sent] = [*pending.intervals, *pending.facts, *pending.skipped]
        seqs = sorted(r.seq for r in records)
        assert seqs == list(range(pending.first_seq, pending.last_seq + 1))
        units = {self.unit_of[seq] for seq in seqs}
        assert {s for s, unit in self.unit_of.items() if unit in units} == set(seqs), "a set was split"
        if not arrives:
            return
        durable = max(self.ledger, default=0)
        assert pending.first_seq <= durable + 1 or pending.first_seq == pending.oldest_seq
        for record in sorted(records, key=lambda r: r.seq):
            self.ledger.setdefault(record.seq, record)
        if answered:
            self.answer()

    @rule()
    def answer(self) -> None:
        safe = max(self.safe, default=0)
        self.outbox.acknowledge(
            Ack(
                epoch=self.epoch,
                durable_seq=max(self.ledger, default=0),
                checkpointed_seq=max(self.ledger, default=0) if self.archive else safe,
                archived_seq=safe if self.archive else None,
            )
        )

    @rule()
    def make_safe(self) -> None:
        self.safe = dict(self.ledger)

    @rule()
    def ledger_restored(self) -> None:
        """Whatever the ledger loses, the outbox sends every number that was not safe, unchanged."""
        self.ledger = dict(self.safe)
        self.answer()
        pending = self.outbox.pending(10_000, 100_000_000)
        there = {r.seq: r for r in (*pending.intervals, *pending.facts, *pending.skipped)} if pending else {}
        assert set(there) == self.written.keys() - self.safe.keys()
        for seq, record in there.items():
            if seq in self.parked:
                assert record == Skipped(seq, "refused")
            else:
                assert msgspec.json.encode(record) == msgspec.json.encode(self.written[seq])

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        held = [s for s in self.written if s not in self.ledger]
        if held:
            seq = data.draw(st.sampled_from(held))
            self.outbox.park(seq, "refused")
            self.parked |= {s for s, unit in self.unit_of.items() if unit == self.unit_of[seq]}

    @rule()
    def agent_restarted(self) -> None:
        self.outbox.close()
        self.outbox = self.open()

    @invariant()
    def numbers_and_state_are_kept(self) -> None:
        if not hasattr(self, "outbox"):
            return
        assert self.outbox.epoch == self.epoch
        assert self.outbox.last_seq == max(self.written, default=0)

    @invariant()
    def the_ledger_has_what_was_written(self) -> None:
        if not hasattr(self, "outbox"):
            return
        for seq, record in self.ledger.items():
            assert seq in self.parked if isinstance(record, Skipped) else record == self.written[seq]

    def teardown(self) -> None:
        if hasattr(self, "outbox"):
            self.ledger_restored()
            self.outbox.close()
            self.folder.cleanup()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=examples(13, 80), stateful_step_count=30)
