"""A file that is read again when it changes: what a bad version, or one that cannot be read, changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputally.base.yaml_file import FileFault, Unreadable, read
from gputally.server.config_loading import WatchedFile
from tests.limits import no_more_files


@pytest.fixture
def watched(tmp_path: Path) -> tuple[Path, WatchedFile[object], list[str]]:
    """A good file of one number, and what is reported of it."""
    path, told = tmp_path / "file.yaml", list[str]()
    path.write_text("n: 1\n")

    def number(path: Path) -> object:
        document = read(path)
        if not isinstance(document.data, dict) or "n" not in document.data:
            raise FileFault([f"{document.place(())}: no n"])
        return document.data["n"]

    return path, WatchedFile(path, number, told.append), told


def test_a_bad_version_is_told_once_and_changes_nothing(watched: tuple[Path, WatchedFile[object], list[str]]) -> None:
    path, file, told = watched
    path.write_text("m: 22\n")
    assert [file.check(), file.check(), file.current, file.refused] == [False, False, 1, True]
    assert told == [f"{path}:1: no n"]
    path.write_text("n: 333\n")
    assert [file.check(), file.check(), file.current, file.refused] == [True, False, 333, False]


def test_what_cannot_be_read_is_told_once_and_tried_again(watched: tuple[Path, WatchedFile[object], list[str]]) -> None:
    path, file, told = watched
    path.write_text("n: 22\n")
    with no_more_files():
        assert [file.check(), file.check(), file.current, file.refused] == [False, False, 1, True]
    assert told == [f"{path}: Too many open files"]
    assert [file.check(), file.check(), file.current, file.refused] == [True, False, 22, False]
    path.unlink()
    assert [file.check(), file.check(), file.current] == [False, False, 22]
    assert told[1:] == [f"{path}: No such file or directory"]
    path.write_text("m: 4444\n")  # there again, and bad: another fault
    assert [file.check(), file.check()] == [False, False]
    assert len(told) == 3


def test_a_first_version_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="No such file"):
        WatchedFile(tmp_path / "none.yaml", read, print)
