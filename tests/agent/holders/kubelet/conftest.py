"""Pods of the fake scheduler."""

from __future__ import annotations

import pytest

from tests.fake_scheduler import fake_scheduler as fake_scheduler


@pytest.fixture(autouse=True, scope="module")
def _some_scheduler(fake_scheduler: None) -> None:
    """Where a test needs the pods of any scheduler, they are those of the fake one."""
