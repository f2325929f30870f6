"""After a process is killed during a checkpoint, the blocks that it overwrote in place are restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest

from accountant.core.errors import LedgerUnavailable
from accountant.storage.crash_recovery import BLOCK, HEADERS, block_copy_path, restore_blocks
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger

ROUNDS, ROWS = 8, 7


def blocks(content: bytes) -> list[bytes]:
    return [content[at : at + BLOCK] for at in range(HEADERS, len(content), BLOCK)]


def booked(ledger: DuckLedger, hand: Any, seq: int) -> None:
    ledger.append([hand.batch(*(hand.row(seq + i, seq + i, seq + i + 1) for i in range(ROWS)))], hand.now_ms)


@pytest.fixture
def cut_short(path: Path, clock: Any, hand: Any) -> list[tuple[bytes, bytes, bytes, bytes]]:
    """Several checkpoints: file and log before each, the saved blocks, and the file after it."""
    found = []
    ledger = open_ledger(path, clock)
    for number in range(ROUNDS):
        booked(ledger, hand, 1 + ROWS * number)
        before, log = path.read_bytes(), path.with_name(path.name + ".wal").read_bytes()
        ledger.checkpoint()
        found.append((before, log, block_copy_path(path).read_bytes(), path.read_bytes()))
    ledger.close()
    return found


def test_every_block_that_matters_is_kept_and_put_back(
    cut_short: list[tuple[bytes, bytes, bytes, bytes]], path: Path, clock: Any, hand: Any
) -> None:
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
        ledger = open_ledger(path, clock)
        end = hand.start_ms + (ROWS * (number + 1) + 1) * 60_000
        assert ledger.examine(hand.start_ms, end).total_us == 0
        (line,) = ledger.usage(hand.start_ms, end, ())
        assert line.accounts_gpu_us.allocated_idle + line.accounts_gpu_us.busy == ROWS * (number + 1) * 60_000_000
        ledger.close()
    assert refused, "without what was kept some of these do not open"


def test_after_a_whole_checkpoint_nothing_is_put_back(path: Path, clock: Any, hand: Any) -> None:
    ledger = open_ledger(path, clock)
    booked(ledger, hand, 1)
    ledger.checkpoint()
    content = path.read_bytes()
    assert restore_blocks(path) == 0
    assert path.read_bytes() == content
    ledger.close()


def test_another_file_in_the_place_is_not_touched(
    cut_short: list[tuple[bytes, bytes, bytes, bytes]], path: Path
) -> None:
    before, _, kept, _ = cut_short[-1]
    block_copy_path(path).write_bytes(kept)
    other = path.with_name("other")
    other.write_bytes(before[:-1] + b"!")
    other.replace(path)
    assert restore_blocks(path) == 0
    assert path.read_bytes()[-1:] == b"!"


def test_what_cannot_be_kept_stops_the_checkpoint(path: Path, clock: Any, hand: Any) -> None:
    ledger = open_ledger(path, clock)
    booked(ledger, hand, 1)
    block_copy_path(path).unlink()
    block_copy_path(path).mkdir()  # a name that cannot be taken
    with pytest.raises(LedgerUnavailable, match="the checkpoint failed"):
        ledger.checkpoint()
    block_copy_path(path).rmdir()
    ledger.checkpoint()
    ledger.close()
