"""A file is whole, old or new, however many processes write it and whatever fails."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputally.base import atomic_file


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "file.txt"


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_made_and_replaced_and_nothing_else_is_left(place: Path) -> None:
    atomic_file.write(place, b"one")
    assert place.read_bytes() == b"one"
    atomic_file.write(place, b"")
    assert place.read_bytes() == b""
    assert list(place.parent.iterdir()) == [place]


def test_until_the_end_the_old_content_stands(place: Path) -> None:
    place.write_bytes(b"old")
    with atomic_file.replacing(place) as file:
        file.write(b"new")
        file.flush()
        assert place.read_bytes() == b"old"
    assert place.read_bytes() == b"new"


@pytest.mark.parametrize("fault", [OSError(28, "no space"), KeyboardInterrupt(), ValueError()])
def test_what_fails_leaves_everything_as_it_was(place: Path, fault: BaseException) -> None:
    def half() -> None:
        with atomic_file.replacing(place) as file:
            file.write(b"half")
            raise fault

    place.write_bytes(b"old")
    with pytest.raises(type(fault)):
        half()
    assert place.read_bytes() == b"old"
    assert list(place.parent.iterdir()) == [place]


def test_a_place_that_cannot_be_taken_leaves_nothing(place: Path) -> None:
    (place / "in it").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        atomic_file.write(place, b"new")
    assert list(place.parent.iterdir()) == [place]
    with pytest.raises(FileNotFoundError):
        atomic_file.write(place.parent / "none" / "file", b"new")


@pytest.mark.usefixtures("umask")
def test_rights_are_the_given_ones_the_old_ones_or_the_processes_own(place: Path) -> None:
    atomic_file.write(place, b"")
    assert rights(place) == 0o640
    place.chmod(0o604)
    atomic_file.write(place, b"")
    assert rights(place) == 0o604
    atomic_file.write(place, b"", 0o600)
    assert rights(place) == 0o600


def test_a_secret_is_never_readable_by_others(place: Path) -> None:
    with atomic_file.replacing(place, 0o600):
        (fresh,) = place.parent.iterdir()
        assert rights(fresh) == 0o600


def test_a_link_is_replaced_and_what_it_led_to_stays(place: Path) -> None:
    target = place.with_name("target")
    target.write_bytes(b"theirs")
    place.symlink_to(target)
    atomic_file.write(place, b"ours")
    assert (target.read_bytes(), place.is_symlink(), place.read_bytes()) == (b"theirs", False, b"ours")


def test_it_is_durable_before_it_has_its_name_and_the_name_afterwards(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, bool]] = []
    really = os.fsync

    def fsync(descriptor: int) -> None:
        asked = os.fstat(descriptor)
        kind = "folder" if stat.S_ISDIR(asked.st_mode) else "file"
        seen.append((kind, 0 if kind == "folder" else asked.st_size, place.exists()))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    atomic_file.write(place, b"content")
    assert seen == [("file", len(b"content"), False), ("folder", 0, True)]


def test_of_many_writers_at_once_one_wins_whole(place: Path) -> None:
    contents = [bytes([n]) * 65_536 for n in range(8)]
    begin = threading.Barrier(len(contents))

    def write(content: bytes) -> None:
        begin.wait(30)
        atomic_file.write(place, content)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert place.read_bytes() in contents
    assert list(place.parent.iterdir()) == [place]
