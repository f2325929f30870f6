"""A folder of the path, in which a test installs packages with plug-ins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.installed import on_the_path


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of the path, in which a test installs packages."""
    with on_the_path(tmp_path):
        yield tmp_path
