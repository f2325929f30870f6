"""A folder of the path, in which a test installs packages with plug-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputally.base import plugins as registry


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the path, in which a test installs packages."""
    monkeypatch.syspath_prepend(tmp_path)
    registry._listed.cache_clear()
    before = set(sys.modules)
    yield tmp_path
    registry._listed.cache_clear()
    for name in set(sys.modules) - before:
        del sys.modules[name]
