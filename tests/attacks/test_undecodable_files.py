"""Files that the programs keep, with bytes that no decoder accepts: no program ends at its start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from accountant.core.errors import LedgerDamaged
from accountant.runtime.clock_step_guard import GuardedClock
from accountant.storage.crash_recovery import block_copy_path, restore_blocks
from accountant.storage.folder_or_object_store import in_folder
from accountant.storage.record_archive import MANIFEST, Archive
from agent.metering.meter import GpuState, decode, encode
from agent.simulation.simulated_node import H100, make_gpu
from gputally.base.clock import VirtualClock
from tests.plugin_cases import plugin_cases

STATE = encode("boot", [GpuState(0, "ok", make_gpu("GPU-a", 0, H100), ())])

OF_PLUGINS = [one.read_kept_file for one in plugin_cases("attacks").values()]


def _clock(file: Path) -> None:
    assert GuardedClock(VirtualClock(5), file, "boot").wall_ms() == 5


def _blocks(file: Path) -> None:
    database = file.with_name("ledger")
    database.write_bytes(b"")
    file.rename(block_copy_path(database))
    assert restore_blocks(database) == 0


def _archive_part(file: Path) -> None:
    part = file.with_name("part-00000001")
    part.mkdir()
    file.rename(part / MANIFEST)
    with pytest.raises(LedgerDamaged):
        Archive(in_folder(file.parent)).part(1)


def _meter(file: Path) -> None:
    assert decode(file.read_bytes(), "boot") == ()


@pytest.mark.parametrize(
    "content",
    [b"\xff", b'{"boot_id":"\xe9"}', b'{"a' + b"\xff" * 40, b"[" * 100_000, STATE.replace(b"GPU-a", b"GPU-\xff")],
    ids=["no-text", "latin-1", "half", "deep", "state"],
)
@pytest.mark.parametrize("read", [_clock, _blocks, _archive_part, _meter, *OF_PLUGINS])
def test_a_kept_file_that_cannot_be_decoded_counts_as_absent_or_is_named(
    tmp_path: Path, read: Callable[[Path], None], content: bytes
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    read(file)
