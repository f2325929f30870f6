"""Unknown memory is not 0: its time is separate in sums of every width and in the archive."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import duckdb

from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.folder_or_object_store import in_folder
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_HOUR
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Hand

MINUTE_US = 60_000_000


def test_unknown_memory_is_unknown_and_its_time_is_told_through_every_width_of_sums(
    path: Path, tmp_path: Path, hand: Hand
) -> None:
    """Reads rows, hours, days and the archive. The memory of GPU 1 is known, that of GPU 2 is not, and that of GPU 3
    half the time."""

    def told(ledger: DuckLedger, end_ms: int, *by: Dimension) -> list[tuple[int | None, int, int]]:
        lines = ledger.usage(START_MS, end_ms, by)
        return [(one.memory_mib_s, one.memory_unknown_us, one.accounts_gpu_us.allocated) for one in lines]

    ledger = open_ledger(path, VirtualClock(NOW_MS), archive=in_folder(tmp_path / "archive"))
    rows = [
        hand.row(number, minute, minute + 1, gpu=gpu, memory_mib_s=memory)
        for number, (minute, (gpu, memory)) in enumerate(
            (
                (minute, row)
                for minute in range(60)
                for row in (("gpu-1", 60), ("gpu-2", None), ("gpu-3", 0 if minute % 2 else None))
            ),
            1,
        )
    ]
    ledger.append([hand.batch(*rows)], NOW_MS)
    hour, half = 60 * MINUTE_US, 30 * MINUTE_US
    by_gpu = [(3600, 0, hour), (None, hour, hour), (0, half, hour)]
    of_all = [(3600, hour + half, 3 * hour)]

    def check(ledger: DuckLedger) -> None:
        for end_ms in (START_MS + MS_PER_HOUR, START_MS + 24 * MS_PER_HOUR):
            assert told(ledger, end_ms, "gpu") == by_gpu
            assert told(ledger, end_ms) == of_all
        cut = told(ledger, START_MS + 30 * MINUTE + 30_000, "gpu")
        assert [(memory, unknown) for memory, unknown, _ in cut] == [
            (1830, 0), (None, half + MINUTE_US // 2), (0, 15 * MINUTE_US + MINUTE_US // 2)
        ]  # fmt: skip

    check(ledger)
    later = hand.row(len(rows) + 1, 48 * 60, 48 * 60 + 1, gpu="gpu-1", memory_mib_s=60)
    hand.now_ms = NOW_MS + 3 * 86_400_000
    ledger.append([hand.batch(later)], hand.now_ms)
    ledger.checkpoint()
    check(ledger)
    ledger.archive(hand.now_ms)
    assert ledger.freeze(START_MS + 2 * MS_PER_HOUR) == 1
    check(ledger)
    ledger.close()
    rebuilt = open_ledger(
        tmp_path / "rebuilt.duckdb", VirtualClock(hand.now_ms), archive=in_folder(tmp_path / "archive")
    )
    check(rebuilt)
    rebuilt.close()


def test_what_was_booked_before_unknown_memory_was_kept_is_unknown_where_it_is_nothing(
    path: Path, tmp_path: Path, hand: Hand
) -> None:
    """Parts of an earlier release lack the column and contain 0 for unknown memory."""
    ledger = open_ledger(path, VirtualClock(NOW_MS), archive=in_folder(tmp_path / "archive"))
    ledger.append([hand.batch(hand.row(1, 0, 1, memory_mib_s=None), hand.row(2, 1, 2, memory_mib_s=60))], NOW_MS)
    ledger.archive(NOW_MS)
    ledger.close()
    place = tmp_path / "archive" / "part-00000001"
    old = f"SELECT * EXCLUDE (memory_blind_us) FROM read_parquet('{place}/rows.parquet')"
    duckdb.sql(old).write_parquet(f"{place}/old.parquet")
    Path(f"{place}/old.parquet").replace(place / "rows.parquet")
    manifest = json.loads((place / "part.json").read_text())
    manifest["files"]["rows.parquet"] = sha256((place / "rows.parquet").read_bytes()).hexdigest()
    (place / "part.json").write_text(json.dumps(manifest))
    rebuilt = open_ledger(tmp_path / "rebuilt.duckdb", VirtualClock(NOW_MS), archive=in_folder(tmp_path / "archive"))
    (line,) = rebuilt.usage(START_MS, START_MS + 2 * MINUTE, ())
    assert (line.memory_mib_s, line.memory_unknown_us) == (60, MINUTE_US)
    rebuilt.close()
