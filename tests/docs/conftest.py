"""The repository's documents, and a folder in which their commands run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gputally.base.clock import SystemClock
from gputally.server import logs_and_metrics
from tests.docs import accountant_of_pages
from tests.docs.code_blocks import ROOT, pages_with_text
from tests.docs.page_commands import Shell
from tests.restored_logging import restored_logging

FOLDERS = ("accountant", "dashboards", "docs", "fairshare", "helm", "tests")
"""Folders of the checkout that are linked, because paths in the pages begin there."""


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def pages() -> dict[Path, str]:
    return pages_with_text()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the ledger that the commands query. While it is made, only errors are logged."""
    folder = tmp_path_factory.mktemp("site")
    with restored_logging():
        logs_and_metrics.configure("error")
        accountant_of_pages.make(folder)
    return folder


@pytest.fixture
def shell(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A folder with everything the pages presuppose: the folders of a checkout, the files that pages name, and an
    accountant."""
    for name in FOLDERS:
        (tmp_path / name).symlink_to(ROOT / name)
    accountant_of_pages.stage(tmp_path)
    monkeypatch.setattr(SystemClock, "wall_ms", lambda self: accountant_of_pages.NOW_MS)
    logs_and_metrics.configure("error")
    with accountant_of_pages.answering(made, tmp_path / "var") as url:
        yield Shell(tmp_path, {"GPUTALLY_URL": url, "COLUMNS": "120", "TOKEN": "reader"})
