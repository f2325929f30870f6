"""A short siege: while every role attacks and the programs are killed, nothing is lost and everybody is answered.

`python -m tests.attacks.siege` runs a long one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.attacks.siege import Size, besiege

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
SIZE = Size(seconds=30, seed=35, kills=8)


def test_under_attack_and_killed_the_programs_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[Any]) -> None:
    outcome = besiege(tmp_path, SIZE)
    with capsys.disabled():
        print(f"\n{outcome.table()}")
    assert outcome.broken() == []
    assert outcome.kills.total() == SIZE.kills
    assert outcome.acts
    assert outcome.rows
