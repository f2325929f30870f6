"""The documents of the repository, and a folder in which their commands are typed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from gputally.base.clock import SystemClock
from gputally.server import logs_and_metrics
from tests.docs import accountant_of_pages
from tests.docs.code_blocks import ROOT, written
from tests.docs.page_commands import Shell

FOLDERS = ("accountant", "dashboards", "docs", "fairshare", "helm", "tests")
"""Of the checkout, by links: paths in the pages begin there."""


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def pages() -> dict[Path, str]:
    return written()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The ledger that the commands ask; whatever runs meanwhile says only what went wrong."""
    folder = tmp_path_factory.mktemp("site")
    logs_and_metrics.configure("error")
    accountant_of_pages.make(folder)
    yield folder
    structlog.reset_defaults()


@pytest.fixture
def shell(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A folder as the pages take it for granted: a checkout's folders, the files they name, an accountant to ask."""
    for name in FOLDERS:
        (tmp_path / name).symlink_to(ROOT / name)
    accountant_of_pages.stage(tmp_path)
    monkeypatch.setattr(SystemClock, "wall_ms", lambda self: accountant_of_pages.NOW_MS)
    with accountant_of_pages.answering(made, tmp_path / "var") as url:
        yield Shell(tmp_path, {"GPUTALLY_URL": url, "COLUMNS": "120", "TOKEN": "reader"})
