"""An outbox whose disk is full, damaged, removed, torn or somebody else's: no number twice, nothing stored lost."""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.upload.spool import RESERVE_BYTES, Outbox, OutboxLocked, OutboxUnavailable, SpoolNotWritable
from gputally.base.clock import VirtualClock
from tests.agent_shell.outboxes import ALL, acknowledge, make_set, pending_seqs

Open = Callable[..., Outbox]


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """The disk takes no file beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_takes_no_writes_is_waited_for_where_that_was_asked(tmp_path: Path, clock: VirtualClock) -> None:
    """A file where the spool's folder should be is a mistake to be told at once; a full disk passes."""
    with limited_files(0):
        with pytest.raises(SpoolNotWritable):
            Outbox(tmp_path / "a" / "outbox.sqlite", clock)
        outbox = Outbox(tmp_path / "b" / "outbox.sqlite", clock, patient=True)
        for attempt in (outbox.stats, outbox.meter_state, lambda: outbox.append([], [], b"state")):
            with pytest.raises(SpoolNotWritable):
                attempt()
    assert outbox.append([], [], b"state").last_seq == 0
    assert (outbox.meter_state(), outbox.epoch != "") == (b"state", True)
    with pytest.raises(OutboxLocked):
        Outbox(tmp_path / "b" / "outbox.sqlite", clock)
    outbox.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutboxUnavailable) as told:
        Outbox(tmp_path / "file" / "outbox.sqlite", clock, patient=True)
    assert not isinstance(told.value, SpoolNotWritable)


def test_a_second_agent_is_told_in_one_line(open_outbox: Open, tmp_path: Path, clock: VirtualClock) -> None:
    held = open_outbox()
    with pytest.raises(OutboxLocked, match=r"outbox .*outbox\.sqlite is in use by another agent") as caught:
        Outbox(tmp_path / "outbox.sqlite", clock)
    assert "\n" not in str(caught.value)
    held.close()
    open_outbox()


@pytest.mark.parametrize("damage", ["garbage", "pages"])
def test_a_damaged_outbox_is_kept_aside_and_a_new_epoch_begins(
    open_outbox: Open, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "outbox.sqlite"
    if damage == "garbage":
        path.write_bytes(b"this is no database at all, " * 400)
        epoch = ""
    else:
        outbox = open_outbox()
        outbox.append([make_set() for _ in range(200)], [], None)
        epoch = outbox.epoch
        outbox.close()
        raw = bytearray(path.read_bytes())
        raw[4096 * 3 : 4096 * 6] = b"\xff" * (4096 * 3)
        path.write_bytes(bytes(raw))
    again = open_outbox()
    assert again.epoch != epoch
    assert pending_seqs(again) == []
    assert again.append([make_set()], [], None).last_seq == 1
    assert [p.name for p in tmp_path.glob("*.damaged-*")] == [f"outbox.sqlite.damaged-{1_790_812_800_000}"]
    assert "the file is renamed" in caplog.text


@pytest.mark.parametrize("what", ["files", "folder", "replaced"])
def test_an_outbox_that_is_removed_under_the_agent_is_written_anew_from_what_is_open(
    open_outbox: Open, tmp_path: Path, clock: VirtualClock, what: str
) -> None:
    folder = tmp_path / "node" / "spool"
    outbox = Outbox(folder / "outbox.sqlite", clock)
    outbox.append([make_set()], [], b"state")
    acknowledge(outbox, durable=1)
    outbox.append([make_set()], [], None)
    epoch = outbox.epoch
    if what == "replaced":
        (folder / "outbox.sqlite").write_bytes(b"somebody else's")
        (folder / "outbox.sqlite").rename(folder / "other")
        (folder / "other").replace(folder / "outbox.sqlite")
    for path in [] if what == "replaced" else [*folder.iterdir()]:
        path.unlink()
    if what == "folder":
        folder.rmdir()
    if what != "folder":
        with limited_files(1), pytest.raises(OutboxUnavailable):
            outbox.append([make_set()], [], None)
    assert outbox.append([make_set()], [], None).last_seq == 3
    outbox.append([make_set()], [], None)
    with pytest.raises(OutboxLocked):
        Outbox(folder / "outbox.sqlite", clock)
    outbox.close()
    again = Outbox(folder / "outbox.sqlite", clock)
    assert (again.epoch, again.last_seq, again.durable_seq, again.meter_state()) == (epoch, 4, 1, b"state")
    assert pending_seqs(again) == [2, 3, 4]
    again.close()


def test_an_outbox_that_is_damaged_under_the_agent_is_kept_aside_and_metering_goes_on(
    tmp_path: Path, clock: VirtualClock
) -> None:
    path = tmp_path / "outbox.sqlite"
    outbox = Outbox(path, clock)
    for _ in range(40):
        outbox.append([make_set()] * 200, [], None)
    with outbox._spool.reading():
        outbox._spool.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        outbox._spool.db.execute("PRAGMA cache_size = 1")
    epoch, size = outbox.epoch, path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    with pytest.raises(OutboxUnavailable, match="malformed"):
        outbox.append([make_set()], [], None)
    assert outbox.append([make_set()], [], None).last_seq == 1
    assert outbox.epoch != epoch
    assert len([*tmp_path.glob("*.damaged-*")]) >= 1
    outbox.close()


def test_a_newer_layout_is_refused_and_left_alone(open_outbox: Open, tmp_path: Path, clock: VirtualClock) -> None:
    open_outbox().close()
    with sqlite3.connect(tmp_path / "outbox.sqlite") as db:
        db.execute("PRAGMA user_version=9")
    db.close()
    with pytest.raises(OutboxUnavailable, match="written by a newer agent"):
        Outbox(tmp_path / "outbox.sqlite", clock)
    open_outbox("other.sqlite")


def test_a_folder_that_cannot_be_used_is_said_in_one_line(tmp_path: Path, clock: VirtualClock) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OutboxUnavailable, match=r"spool folder .* cannot be used: Not a directory"):
        Outbox(tmp_path / "file" / "spool" / "outbox.sqlite", clock)


def test_a_full_disk_loses_no_number_and_nothing_stored(open_outbox: Open, tmp_path: Path) -> None:
    outbox = open_outbox()
    outbox.append([make_set()], [], b"before")
    size = (tmp_path / "outbox.sqlite-wal").stat().st_size
    with limited_files(size), pytest.raises(OutboxUnavailable, match="cannot be written"):
        outbox.append([make_set() for _ in range(300)], [], b"lost")
    assert pending_seqs(outbox) == [1]
    assert outbox.append([make_set()], [], b"after").last_seq == 2
    assert outbox.meter_state() == b"after"
    outbox.close()
    assert pending_seqs(open_outbox()) == [1, 2]


def in_a_process(path: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Runs these lines, for which `box` is the outbox and `row` an interval."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "from gputally.base.clock import VirtualClock; from agent.metering.meter import ClosedSet\n"
        "from agent.upload.spool import Outbox\n"
        "from tests.agent_shell.outboxes import make_row\n"
        "row, box = make_row(0), Outbox(Path(sys.argv[1]), VirtualClock(1))\n"
    )
    command = [sys.executable, "-c", script + "\n".join(lines), str(path)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_what_was_appended_survives_the_death_of_the_process(tmp_path: Path, open_outbox: Open) -> None:
    path = tmp_path / "outbox.sqlite"
    done = in_a_process(
        path, "box.append([ClosedSet((row, row)), ClosedSet((row,))], [], b'held')", "os.kill(os.getpid(), 9)"
    )
    assert (done.returncode, done.stderr) == (-9, "")
    outbox = open_outbox()
    assert pending_seqs(outbox) == [1, 2, 3]
    assert outbox.meter_state() == b"held"


@pytest.mark.parametrize("lost", [1, 100, 4_096, 20_000, 60_000, 10_000_000])
def test_a_torn_log_keeps_a_beginning_and_gives_out_no_number_twice_with_a_hole(
    tmp_path: Path, clock: VirtualClock, lost: int
) -> None:
    """Power fails while sqlite's log is being written: its end is missing. What is there is whole and in order."""
    outbox = Outbox(tmp_path / "outbox.sqlite", clock, fsync=False)
    for number in range(40):
        outbox.append([make_set(rows=2)], [], f"after {number}".encode())
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for suffix in ("", "-wal"):  # the files as they lie there, without a clean end
        data = (tmp_path / f"outbox.sqlite{suffix}").read_bytes()
        kept = max(len(data) - lost, 0) if suffix else len(data)
        (crashed / f"outbox.sqlite{suffix}").write_bytes(data[:kept])
    outbox.close()
    found = Outbox(crashed / "outbox.sqlite", clock, fsync=False)
    seqs = pending_seqs(found)
    assert seqs == list(range(1, found.last_seq + 1))
    assert found.last_seq % 2 == 0
    if found.last_seq:
        assert found.meter_state() == f"after {found.last_seq // 2 - 1}".encode()
    last = found.last_seq
    assert found.append([make_set(rows=2)], [], None).last_seq == last + 2
    found.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB of its own."""
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
    """How many sets of eight rows it took until it took no more."""
    for number in range(10_000):
        try:
            outbox.append([make_set(rows=8)], [], b"state" * 100)
        except OutboxUnavailable:
            return number
    raise AssertionError("it was never full")


def test_a_volume_of_400_kib_is_not_filled_by_the_journal_and_ships_when_it_is_full(
    small_disk: Path, clock: VirtualClock
) -> None:
    outbox = Outbox(small_disk / "outbox.sqlite", clock)
    taken = [_fill(outbox)]
    for _ in range(3):
        assert outbox.pending(**ALL) is not None
        acknowledge(outbox, outbox.last_seq, outbox.last_seq)
        assert outbox.pending(**ALL) is None
        assert outbox.stats().rows == 0
        taken.append(_fill(outbox))
    outbox.close()
    assert min(taken) > 40, "more than the log alone could hold"


def test_where_the_volume_has_little_room_what_was_sent_is_removed_step_by_step(
    tmp_path: Path, clock: VirtualClock
) -> None:
    free = [2**30]
    outbox = Outbox(tmp_path / "outbox.sqlite", clock, free_bytes=lambda: free[0])
    for _ in range(50):
        outbox.append([make_set(rows=8)], [], None)
    free[0] = RESERVE_BYTES
    with pytest.raises(OutboxUnavailable, match="128 KiB of disk are free"):
        outbox.append([make_set()], [], None)
    assert outbox.last_seq == 400
    acknowledge(outbox, 399, 399)
    assert pending_seqs(outbox) == [400]
    assert outbox.stats().rows == 1
    assert (tmp_path / "outbox.sqlite-wal").stat().st_size == 0
    free[0] = 2**30
    assert outbox.append([make_set()], [], None).last_seq == 401


def test_no_file_that_another_program_shortens_ends_the_process(tmp_path: Path) -> None:
    """A log's index in a mapped file ends the process by SIGBUS."""
    done = in_a_process(
        tmp_path / "outbox.sqlite",
        "box.append([ClosedSet((row,))], [], None)",
        "for index in Path(sys.argv[1]).parent.glob('*-shm'): os.truncate(index, 0)",
        "print(box.append([ClosedSet((row,))], [], None).last_seq)",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
