"""The demo plays the first scheduler that is installed and can be played: at least the fake one."""

from __future__ import annotations

import pytest

from tests.fake_scheduler import fake_scheduler as fake_scheduler


@pytest.fixture(autouse=True, scope="module")
def _some_scheduler(fake_scheduler: None) -> None:
    """Where the demo has no other to play, it is the fake one."""
