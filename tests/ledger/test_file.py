"""The ledger's file: its lock, recovery after a crash, copies and migrations."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from accountant.core.errors import LedgerDamaged, LedgerLocked, LedgerUnavailable, UnsupportedQuestion
from accountant.storage.crash_recovery import COMMIT, Verdict, judge_log, prepare_log
from accountant.storage.duckdb_ledger import open_ledger
from accountant.wire.policy_models import WindowSpec
from tests.chaos.power_cuts import torn
from tests.effort import examples
from tests.ledger.conftest import NOW_MS, START_MS

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
    """A copy of the folder."""
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
        yield process


def _log(path: Path) -> Path:
    return path.with_name(path.name + ".wal")


def _durable(path: Path, clock: Any) -> int:
    ledger = open_ledger(path, clock)
    try:
        acknowledged = ledger.acks("n1", "prod").get("e")
        return acknowledged.durable_seq if acknowledged else 0
    finally:
        ledger.close()


def test_only_one_may_have_it_open(path: Path, clock: Any) -> None:
    with owner(path) as process:
        with pytest.raises(LedgerLocked, match=r"ledger\.duckdb: another process has this ledger open"):
            open_ledger(path, clock)
        process.communicate("")
    assert _durable(path, clock) == 5


def test_not_even_twice_in_one_process(path: Path, clock: Any) -> None:
    ledger = open_ledger(path, clock)
    with pytest.raises(LedgerLocked):
        open_ledger(path, clock)
    ledger.close()
    ledger.close()
    open_ledger(path, clock).close()


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path, clock: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerUnavailable) as refused:
        open_ledger(tmp_path / "file" / "ledger.duckdb", clock)
    assert "the folder cannot be written: " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_ledger_is_one_clear_line(path: Path, clock: Any) -> None:
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(LedgerUnavailable) as refused:
        open_ledger(path, clock)
    assert str(refused.value).startswith(f"{path}: cannot be opened: ")
    assert "\n" not in str(refused.value)
    path.unlink()
    open_ledger(path, clock).close()


def test_what_was_acknowledged_survives_a_kill(killed: Path, clock: Any) -> None:
    assert _log(killed).stat().st_size > 0
    assert judge_log(_log(killed).read_bytes()) == (Verdict.CLEAN, _log(killed).stat().st_size)
    assert _durable(killed, clock) == 5
    assert not _log(killed).exists()


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\x20\0\0\0\0\0\0\0 half an entry"], ids=["zeros", "half"])
def test_a_torn_tail_is_cut_and_nothing_is_lost(killed: Path, clock: Any, tail: bytes) -> None:
    whole = _log(killed).read_bytes()
    _log(killed).write_bytes(whole + tail)
    assert judge_log(whole + tail) == (Verdict.TORN, len(whole))
    assert _durable(killed, clock) == 5
    aside = killed.with_name(killed.name + ".wal.torn")
    assert aside.read_bytes() == whole + tail


def test_a_commit_torn_in_the_middle_is_as_if_it_never_was(killed: Path, clock: Any) -> None:
    whole = _log(killed).read_bytes()
    _log(killed).write_bytes(whole[:-30])
    assert _durable(killed, clock) == 4


@pytest.mark.parametrize("whole_commits", [0, 1, 4])
def test_any_blocks_of_an_unsynced_commit_are_as_if_it_never_was(killed: Path, clock: Any, whole_commits: int) -> None:
    """After a power failure, any blocks of the unsynced commit can be on disk."""
    log, file, chance = _log(killed).read_bytes(), killed.read_bytes(), random.Random(whole_commits)
    ends = [0, *(found.end() for found in re.finditer(re.escape(COMMIT), log))]
    synced, written = log[: ends[whole_commits]], log[: ends[whole_commits + 1]]
    begin = len(synced)
    but_the_first_block = synced + bytes(64) + written[begin + 64 :]
    any_blocks = [torn(synced, written, chance, block_bytes=64) for _ in range(examples(6, 200))]
    for left in (but_the_first_block, *any_blocks):
        killed.write_bytes(file)
        _log(killed).write_bytes(left)
        assert _durable(killed, clock) == whole_commits + (left == written)


def test_a_power_failure_while_a_ledger_is_made_leaves_none(path: Path, clock: Any, hand: Any) -> None:
    path.with_name(f".{path.name}.new").write_bytes(b"\0" * 4096 + b"half of what the engine writes first")
    ledger = open_ledger(path, clock)
    ledger.append([hand.batch(hand.row(1))], hand.now_ms)
    ledger.close()
    assert {place.name for place in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}


def test_damage_before_whole_commits_is_left_to_a_person(killed: Path, clock: Any) -> None:
    whole = _log(killed).read_bytes()
    first = whole.find(COMMIT) + len(COMMIT)
    damaged = whole[:first] + b"\0" * 16 + whole[first + 16 :]
    _log(killed).write_bytes(damaged)
    assert judge_log(damaged) == (Verdict.DAMAGED, first)
    with pytest.raises(LedgerDamaged, match=f"damaged after byte {first}"):
        open_ledger(killed, clock)
    assert _log(killed).read_bytes() == damaged
    # Cut there by hand, it opens; the agents send again what is above its marks.
    os.truncate(_log(killed), first)
    assert _durable(killed, clock) == 1


@pytest.mark.parametrize("opens", [True, False])
def test_a_log_of_an_unknown_kind_is_left_to_the_engine_with_copies_beside_it(
    killed: Path, clock: Any, hand: Any, opens: bool
) -> None:
    """A header of an unknown version is not damage. The engine decides whether it reads or drops the log."""
    whole, file = _log(killed).read_bytes(), killed.read_bytes()
    unknown = b"something else" if opens else whole[:5] + b"\x09" + whole[6:]
    _log(killed).write_bytes(unknown)
    assert judge_log(unknown) == (Verdict.UNKNOWN, 0)
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
        ledger = open_ledger(killed, clock)
        ledger.append([hand.batch(hand.row(1))], hand.now_ms)
        ledger.close()
        assert not _log(killed).exists()


def test_a_log_that_cannot_be_copied_is_not_opened(killed: Path, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _log(killed).write_bytes(b"something else")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(LedgerUnavailable, match=r"its header is not known, and it cannot be copied .* No space left"):
        open_ledger(killed, clock)
    assert _log(killed).read_bytes() == b"something else"


def test_nothing_is_cut_while_a_checkpoint_was_under_way(killed: Path) -> None:
    torn = _log(killed).read_bytes()[:-30]
    _log(killed).write_bytes(torn)
    _log(killed).with_name(_log(killed).name + ".checkpoint").write_bytes(b"")
    assert prepare_log(killed) is Verdict.TORN
    assert _log(killed).read_bytes() == torn


def test_a_copy_is_a_whole_ledger(path: Path, clock: Any, hand: Any, tmp_path: Path) -> None:
    ledger = open_ledger(path, clock)
    ledger.append([hand.batch(hand.row(1), hand.fact(2))], hand.now_ms)
    copy = tmp_path / "it's a copy.duckdb"
    ledger.copy_to(copy)
    with pytest.raises(LedgerUnavailable, match="exists already"):
        ledger.copy_to(copy)
    ledger.append([hand.batch(hand.row(3, 1, 2))], hand.now_ms)
    expected = ledger.usage(hand.start_ms, hand.start_ms + 60_000, ("pod", "gpu"))
    ledger.close()
    other = open_ledger(copy, clock)
    assert other.acks("n1", "prod")["0192-a"].durable_seq == 2
    assert other.usage(hand.start_ms, hand.start_ms + 60_000, ("pod", "gpu")) == expected
    other.close()


def test_closed_is_closed(path: Path, clock: Any, hand: Any) -> None:
    ledger = open_ledger(path, clock)
    ledger.close()
    with pytest.raises(LedgerUnavailable):
        ledger.usage(hand.start_ms, hand.now_ms, ())
    with pytest.raises(LedgerUnavailable):
        ledger.append([hand.batch(hand.row(1))], hand.now_ms)


def test_what_it_cannot_answer_it_says(path: Path, clock: Any, hand: Any) -> None:
    ledger = open_ledger(path, clock)
    with pytest.raises(UnsupportedQuestion, match="without a price book nothing has a cost"):
        ledger.window(WindowSpec(), hand.now_ms, "cost", 0.98)
    ledger.close()


def test_no_column_is_null_but_those_that_a_record_may_leave_out(ledger: Any) -> None:
    with ledger._snapshot() as (cursor, _):
        found = cursor.run(
            "SELECT table_name, column_name FROM information_schema.columns JOIN information_schema.tables t "
            "USING (table_catalog, table_schema, table_name) WHERE table_catalog = current_database() "
            "AND table_schema = 'main' AND t.table_type = 'BASE TABLE' AND is_nullable = 'YES' ORDER BY ALL"
        )
    left_out = ("gaps", "measured_busy_us", "replicas", "sharing", "sm_active_us", "tensor_active_us")
    assert found == [("received", name) for name in left_out]
