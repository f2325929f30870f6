"""The fake scheduler, installed as a package of another author while the tests of a module run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gputally.testing.fake_scheduler import ENTRY_POINTS
from tests.plugins.installed import install, on_the_path


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Install it into an empty folder."""
    install(folder, "gputally-fake-scheduler", ENTRY_POINTS)
    with on_the_path(folder):
        yield


@pytest.fixture(scope="module")
def fake_scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(tmp_path_factory.mktemp("packages")):
        yield
