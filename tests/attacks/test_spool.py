"""A sample of the trials on an agent's damaged spool and on small volumes. The modules run more of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.attacks.spool_damage import attack
from tests.attacks.spool_volumes import trial, volume
from tests.hypothesis_examples import examples


def test_a_damaged_spool_neither_stops_a_node_nor_changes_anything_in_silence(tmp_path: Path) -> None:
    outcomes, failed = attack(flips=examples(40, 2_000), cuts=examples(15, 500), seed=3, folder=tmp_path)
    assert not failed
    assert outcomes["no record lost"]
    assert outcomes["some records lost"]


@pytest.mark.parametrize(("kib", "outage", "filled"), [(64, 20, False), (300, 120, False), (400, 60, True)])
def test_after_an_outage_that_filled_a_small_volume_only_named_time_is_missing(
    kib: int, outage: int, filled: bool
) -> None:
    try:
        with volume(kib) as folder:
            assert not trial(folder, outage, kib, filled=filled)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no file system may be mounted here: {error}")
