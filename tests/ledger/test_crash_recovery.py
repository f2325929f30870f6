"""The ledger's file: its lock, its log and its blocks after a crash, and copies."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from accountant.core.errors import LedgerDamaged, LedgerLocked, LedgerUnavailable, UnsupportedQuestion
from accountant.ledger.protocols import EpochReport, JobKey
from accountant.storage.crash_recovery import (
    BLOCK,
    COMMIT,
    HEADERS,
    LogState,
    block_copy_path,
    judge_log,
    prepare_log,
    restore_blocks,
)
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import WindowSpec
from tests.chaos.power_cuts import torn
from tests.hypothesis_examples import examples
from tests.ledger.conftest import NOW_MS, START_MS, booked
from tests.moments import acks, present

OWNER = """
import sys
from pathlib import Path
from accountant.storage.duckdb_ledger import open_ledger
from gputally.base.clock import VirtualClock
from agent.wire import Batch, UsageInterval

ledger = open_ledger(Path(sys.argv[1]), VirtualClock({now}))
for seq in range(1, 6):
    start = {start} + seq * 60_000
    row = UsageInterval(seq=seq, start_ms=start, end_ms=start + 60_000, gpu_uuid="gpu-1", gpu_model="H100",
                        capacity_us=60_000_000, allocated_us=0, method="device")
    ledger.append([Batch(cluster="prod", node="n1", boot_id="b", epoch="e", first_seq=seq, oldest_seq=1,
                         intervals=(row,))], {now})
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a ledger whose process was killed after five commits, which are only in the write-ahead log."""
    folder = tmp_path_factory.mktemp("left")
    with owner(folder / "ledger.duckdb") as process:
        process.send_signal(signal.SIGKILL)
    return folder


@pytest.fixture
def killed(left: Path, path: Path) -> Path:
    """The ledger file in a copy of the folder `left`."""
    shutil.copytree(left, path.parent, dirs_exist_ok=True)
    return path


@contextmanager
def owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has made five commits and keeps the ledger open until its input ends."""
    script = OWNER.format(now=NOW_MS, start=START_MS)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def _log(path: Path) -> Path:
    return path.with_name(path.name + ".wal")


def _durable(path: Path, clock: Any) -> int:
    with closing(open_ledger(path, clock)) as ledger:
        acknowledged = acks(ledger, "n1", "prod").get("e")
        return acknowledged.durable_seq if acknowledged else 0


def test_only_one_may_have_it_open(path, clock):
    with owner(path) as process:
        with pytest.raises(LedgerLocked, match=r"ledger\.duckdb: another process has this ledger open"):
            open_ledger(path, clock)
        process.communicate("")
    assert _durable(path, clock) == 5


def test_a_file_system_without_locks_is_not_another_process(path, clock, monkeypatch):
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.raises(LedgerUnavailable, match=r"ledger\.duckdb: cannot be locked: No locks available: use a volume"):
        open_ledger(path, clock)


def test_not_even_twice_in_one_process(path, clock):
    ledger = open_ledger(path, clock)
    with pytest.raises(LedgerLocked):
        open_ledger(path, clock)
    ledger.close()
    ledger.close()
    open_ledger(path, clock).close()


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path, clock):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerUnavailable, match=r"^[^\n]*the folder cannot be written: [^\n]*$"):
        open_ledger(tmp_path / "file" / "ledger.duckdb", clock)


def test_a_file_that_is_no_ledger_is_one_clear_line(path, clock):
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(LedgerUnavailable, match=rf"^{path}: cannot be opened: [^\n]*: check its permissions [^\n]*$"):
        open_ledger(path, clock)
    path.unlink()
    open_ledger(path, clock).close()


def test_what_was_acknowledged_survives_a_kill(killed, clock):
    assert _log(killed).stat().st_size > 0
    assert judge_log(_log(killed).read_bytes()) == (LogState.CLEAN, _log(killed).stat().st_size)
    assert _durable(killed, clock) == 5
    assert not _log(killed).exists()


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\x20\0\0\0\0\0\0\0 half an entry"], ids=["zeros", "half"])
def test_a_torn_tail_is_cut_and_nothing_is_lost(killed, clock, tail):
    whole = _log(killed).read_bytes()
    _log(killed).write_bytes(whole + tail)
    assert judge_log(whole + tail) == (LogState.TORN, len(whole))
    assert _durable(killed, clock) == 5
    aside = killed.with_name(killed.name + ".wal.torn")
    assert aside.read_bytes() == whole + tail


def test_a_commit_torn_in_the_middle_is_as_if_it_never_was(killed, clock):
    whole = _log(killed).read_bytes()
    _log(killed).write_bytes(whole[:-30])
    assert _durable(killed, clock) == 4


@pytest.mark.parametrize("whole_commits", [0, 1, 4])
def test_any_blocks_of_an_unsynced_commit_are_as_if_it_never_was(killed, clock, whole_commits):
    """After a power failure, any blocks of the unsynced commit can be on disk."""
    log, file, chance = _log(killed).read_bytes(), killed.read_bytes(), random.Random(whole_commits)
    ends = [0, *(found.end() for found in re.finditer(re.escape(COMMIT), log))]
    synced, written = log[: ends[whole_commits]], log[: ends[whole_commits + 1]]
    begin = len(synced)
    but_the_first_block = synced + bytes(64) + written[begin + 64 :]
    any_blocks = [torn(synced, written, chance, block_bytes=64) for _ in range(examples(6, 100))]

    def durable(left: bytes) -> int:
        killed.write_bytes(file)
        _log(killed).write_bytes(left)
        return _durable(killed, clock)

    before, after = durable(synced), durable(written)
    assert before <= after <= before + 1
    for left in (but_the_first_block, *any_blocks):
        assert durable(left) == (after if left == written else before)


def test_what_nobody_sends_again_survives_a_torn_commit(ledger, path, tmp_path, opened):
    """Agents send their records again. The epochs that jobs reported are only in the log until the next checkpoint."""
    told = EpochReport(JobKey("prod", "vision", "Pod/train-0"), 1, START_MS, "ann")
    assert ledger.report_epochs([told], NOW_MS) == 1
    synced = _log(path).read_bytes()
    ledger.report_epochs([replace(told, epoch=2)], NOW_MS)
    left = tmp_path / "left" / path.name
    left.parent.mkdir()
    shutil.copyfile(path, left)
    _log(left).write_bytes(synced + bytes(64) + _log(path).read_bytes()[len(synced) + 64 :])
    with opened(left).moment() as found:
        assert found.epochs((START_MS - 1, START_MS + 1)) == [told]


def faults(content: bytes, chance: random.Random, count: int) -> Iterator[bytes]:
    """The content with one flipped bit, with a cut, or with 64 bytes of zeros, at random places."""
    for number in range(count):
        at = chance.randrange(len(content))
        if number % 7 == 5:
            yield content[:at]
        elif number % 7 == 6:
            yield content[:at] + bytes(64) + content[at + 64 :]
        else:
            yield content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def _read(path: Path, clock: Any) -> list[dict[tuple[str, ...], int]] | None:
    """The booked GPU time of each minute, by GPU and node; None if the ledger is refused or cannot be read."""
    spans = [(START_MS + n * 60_000, START_MS + (n + 1) * 60_000) for n in range(1, 6)]
    try:
        with closing(open_ledger(path, clock)) as ledger:
            minutes = [present(ledger).usage(span, ("gpu", "node")).lines() for span in spans]
            return [{tuple(one.key.values()): one.accounts_gpu_us.unallocated for one in lines} for lines in minutes]
    except (LedgerDamaged, LedgerUnavailable):
        return None


@pytest.mark.thorough
def test_a_fault_of_the_log_is_named_or_leaves_a_beginning_of_the_commits(killed, clock):
    log, file = _log(killed).read_bytes(), killed.read_bytes()
    truth = _read(killed, clock)
    assert truth is not None
    outcomes: Counter[int | None] = Counter()
    for bad in faults(log, random.Random(70), examples(7, 70)):
        killed.write_bytes(file)
        _log(killed).write_bytes(bad)
        found = _read(killed, clock)
        kept = None if found is None else sum(any(minute.values()) for minute in found)
        if found is not None:
            assert found[:kept] == truth[:kept]
            assert not any(sum(minute.values()) for minute in found[kept:])
        outcomes[kept] += 1
    assert outcomes.keys() - {5}, "some faults cost something"


@pytest.mark.thorough
def test_a_fault_of_the_file_is_named_or_changes_no_figure(killed, clock):
    truth = _read(killed, clock)
    with closing(open_ledger(killed, clock)) as ledger:
        ledger.checkpoint()
    file = killed.read_bytes()
    read = 0
    for bad in faults(file, random.Random(71), examples(7, 70)):
        _log(killed).unlink(missing_ok=True)
        killed.write_bytes(bad)
        found = _read(killed, clock)
        read += found is not None
        assert found in (None, truth)
    assert read < examples(7, 70)


def test_a_power_failure_while_a_ledger_is_made_leaves_none(path, clock, hand):
    path.with_name(f".{path.name}.new").write_bytes(b"\0" * 4096 + b"half of what the engine writes first")
    with closing(open_ledger(path, clock)) as ledger:
        booked(ledger, hand.now_ms, hand.batch(hand.row(1)))
    assert {place.name for place in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}


def test_damage_before_whole_commits_is_left_to_a_person(killed, clock):
    whole = _log(killed).read_bytes()
    first = whole.find(COMMIT) + len(COMMIT)
    damaged = whole[:first] + b"\0" * 16 + whole[first + 16 :]
    _log(killed).write_bytes(damaged)
    assert judge_log(damaged) == (LogState.DAMAGED, first)
    with pytest.raises(LedgerDamaged, match=f"damaged after byte {first}"):
        open_ledger(killed, clock)
    assert _log(killed).read_bytes() == damaged
    # Cut there by hand, it opens; the agents send again what is above its marks.
    os.truncate(_log(killed), first)
    assert _durable(killed, clock) == 1


@pytest.mark.parametrize("opens", [True, False])
def test_a_log_of_an_unknown_kind_is_left_to_the_engine_with_copies_beside_it(killed, clock, hand, opens):
    """A header of an unknown version is not damage. The engine decides whether it reads or drops the log."""
    whole, file = _log(killed).read_bytes(), killed.read_bytes()
    unknown = b"something else" if opens else whole[:5] + b"\x09" + whole[6:]
    _log(killed).write_bytes(unknown)
    assert judge_log(unknown) == (LogState.UNKNOWN, 0)
    for _ in range(2):  # as a supervisor does
        if opens:
            open_ledger(killed, clock).close()
        else:
            with pytest.raises(LedgerUnavailable, match="can only read version 1, 2"):
                open_ledger(killed, clock)
    found = {place.name.partition(".unknown-")[0]: place.read_bytes() for place in killed.parent.glob("*.unknown-*")}
    assert found == {killed.name: file, _log(killed).name: unknown}
    assert len(list(killed.parent.glob("*.unknown-*"))) == 2
    if opens:  # the agents send again what is above its marks, and what comes stays
        with closing(open_ledger(killed, clock)) as ledger:
            booked(ledger, hand.now_ms, hand.batch(hand.row(1)))
        assert not _log(killed).exists()


def test_a_log_that_cannot_be_copied_is_not_opened(killed, clock, monkeypatch):
    _log(killed).write_bytes(b"something else")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    message = r"written by an unknown version of DuckDB, and it cannot be copied .* No space left"
    with pytest.raises(LedgerUnavailable, match=message):
        open_ledger(killed, clock)
    assert _log(killed).read_bytes() == b"something else"


def test_nothing_is_cut_while_a_checkpoint_was_under_way(killed):
    torn = _log(killed).read_bytes()[:-30]
    _log(killed).write_bytes(torn)
    _log(killed).with_name(_log(killed).name + ".checkpoint").write_bytes(b"")
    assert prepare_log(killed) is LogState.TORN
    assert _log(killed).read_bytes() == torn


def test_a_copy_is_a_whole_ledger(ledger, opened, send, hand, tmp_path):
    send(hand.row(1), hand.fact(2))
    copy = tmp_path / "it's a copy.duckdb"
    ledger.copy_to(copy)
    with pytest.raises(LedgerUnavailable, match="exists already"):
        ledger.copy_to(copy)
    send(hand.row(3, 1, 2))
    other = opened(copy)
    assert acks(other, "n1", "prod")["0192-a"].durable_seq == 2
    minute = hand.start_ms, hand.start_ms + 60_000
    assert present(other).usage(minute, ("pod", "gpu")).lines() == present(ledger).usage(minute, ("pod", "gpu")).lines()


def test_closed_is_closed(ledger, hand):
    ledger.close()
    with pytest.raises(LedgerUnavailable):
        present(ledger).usage((hand.start_ms, hand.now_ms), ()).lines()
    with pytest.raises(LedgerUnavailable):
        ledger.append([hand.batch(hand.row(1))], hand.now_ms)


def test_what_it_cannot_answer_it_says(ledger, hand):
    with pytest.raises(UnsupportedQuestion, match="without a price book nothing has a cost"):
        present(ledger).window(WindowSpec(), hand.now_ms, "cost", 0.98)


def test_no_column_is_null_but_those_that_a_record_may_leave_out(ledger):
    with ledger._snapshot() as (cursor, _):
        found = cursor.run(
            "SELECT table_name, column_name FROM information_schema.columns JOIN information_schema.tables t "
            "USING (table_catalog, table_schema, table_name) WHERE table_catalog = current_database() "
            "AND table_schema = 'main' AND t.table_type = 'BASE TABLE' AND is_nullable = 'YES' ORDER BY ALL"
        )
    left_out = ("gaps", "measured_busy_us", "replicas", "sharing")
    assert found == [("received", name) for name in left_out]


ROUNDS, ROWS = 8, 7


def blocks(content: bytes) -> list[bytes]:
    return [content[at : at + BLOCK] for at in range(HEADERS, len(content), BLOCK)]


def book_rows(ledger: DuckLedger, hand: Any, seq: int) -> None:
    booked(ledger, hand.now_ms, hand.batch(*(hand.row(n, n, n + 1) for n in range(seq, seq + ROWS))))


@pytest.fixture
def cut_short(path: Path, clock: Any, hand: Any) -> list[tuple[bytes, bytes, bytes, bytes]]:
    """For each of several checkpoints: the file and the log before it, the saved blocks, and the file after it."""
    found = []
    ledger = open_ledger(path, clock)
    for number in range(ROUNDS):
        book_rows(ledger, hand, 1 + ROWS * number)
        before, log = path.read_bytes(), path.with_name(path.name + ".wal").read_bytes()
        ledger.checkpoint()
        found.append((before, log, block_copy_path(path).read_bytes(), path.read_bytes()))
    ledger.close()
    return found


def test_every_block_that_matters_is_kept_and_put_back(cut_short, path, clock, hand):
    """The worst case: every block that the checkpoint wrote is incomplete, and the header is unchanged."""
    refused = 0
    for number, (before, log, kept, after) in enumerate(cut_short):
        half = BLOCK // 2
        old, new = blocks(before), blocks(after)
        written = [block if block == old[i] else block[:half] + b"?" * half for i, block in enumerate(new[: len(old)])]
        torn = b"".join([*written, *old[len(new) :], *new[len(old) :]])
        assert torn != before[HEADERS:]
        path.write_bytes(before[:HEADERS] + torn)
        path.with_name(path.name + ".wal").write_bytes(log)
        block_copy_path(path).unlink(missing_ok=True)
        try:
            duckdb.connect(str(path), read_only=True).close()
        except duckdb.Error:
            refused += 1
        path.write_bytes(before[:HEADERS] + torn)
        block_copy_path(path).write_bytes(kept)
        with closing(open_ledger(path, clock)) as ledger:
            end = hand.start_ms + (ROWS * (number + 1) + 1) * 60_000
            assert present(ledger).imbalance(hand.start_ms, end).total_us == 0
            (line,) = present(ledger).usage((hand.start_ms, end), ()).lines()
        assert line.accounts_gpu_us.allocated == ROWS * (number + 1) * 60_000_000
    assert refused, "without what was kept some of these do not open"


def test_after_a_whole_checkpoint_nothing_is_put_back(ledger, path, hand):
    book_rows(ledger, hand, 1)
    ledger.checkpoint()
    content = path.read_bytes()
    assert restore_blocks(path) == 0
    assert path.read_bytes() == content


def test_another_file_in_the_place_is_not_touched(cut_short, path):
    before, _, kept, _ = cut_short[-1]
    block_copy_path(path).write_bytes(kept)
    other = path.with_name("other")
    other.write_bytes(before[:-1] + b"!")
    other.replace(path)
    assert restore_blocks(path) == 0
    assert path.read_bytes()[-1:] == b"!"


def test_what_cannot_be_kept_stops_the_checkpoint(ledger, path, hand):
    book_rows(ledger, hand, 1)
    block_copy_path(path).unlink(missing_ok=True)
    block_copy_path(path).mkdir()  # a name that cannot be taken
    with pytest.raises(LedgerUnavailable, match="the checkpoint failed"):
        ledger.checkpoint()
    block_copy_path(path).rmdir()
    ledger.checkpoint()
