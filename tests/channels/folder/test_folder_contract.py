"""The folder passes the suite of channels."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from accountant.channels import folder
from gputally.testing.channels import ACCEPTS, HANGS_UP, ChannelSuite, Medium


class _Files:
    """A folder as a receiver. It refuses while it is a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def answer(self) -> int:
        return ACCEPTS if not self._path.exists() or stat.S_ISDIR(self._path.stat().st_mode) else 1

    @answer.setter
    def answer(self, status: int) -> None:
        if status in (ACCEPTS, HANGS_UP):
            self._path.unlink() if self._path.is_file() else None
        elif self._path.is_dir():
            for file in self._path.iterdir():
                file.unlink()
            self._path.rmdir()
            self._path.write_text("")
        else:
            self._path.write_text("")

    @property
    def bodies(self) -> Sequence[bytes]:
        return [file.read_bytes() for file in sorted(self._path.iterdir())] if self._path.is_dir() else []


class TestFolder(ChannelSuite):
    plugin = folder.CHANNEL

    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        path = tmp_path / "reports"
        return Medium(str(path), _Files(path), markup={}, uncertain=False)
