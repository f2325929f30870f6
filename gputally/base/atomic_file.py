"""Writes a file so that readers see the old content or the new, even after a power failure.

A reader sees the old content or the new, after a power failure too: what is written is made durable
before it gets the name, and the name in its folder afterwards (rename(2), fsync(2)). Where writing fails, nothing is
left behind and the old content stands. A link at the place is replaced, not followed. It makes no folders.

A reader that polls it sees by its stamp that its content is new.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

Stamp: TypeAlias = tuple[int, int, int]
"""The state of a file at one instant: another stamp means another file or other content."""


def stamp(place: Path) -> Stamp | None:
    """Changes with every way of writing a file: in place, or a new one in its stead (as Kubernetes does). None where it
    cannot be seen."""
    try:
        return stamp_of(place.stat())
    except OSError:
        return None


def stamp_of(found: os.stat_result) -> Stamp:
    """`stamp` of a file that was looked at already."""
    return found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def replacing(place: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """What is written to in the block stands at `place` after it; an error in the block leaves everything as it was.

    mode: the file's rights; None: those of the one that it replaces, of a new one the process's own. Raises OSError."""
    fresh = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    rights = mode if mode is not None else _rights(place)
    # No other user may read it while it is not known who may.
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if rights is None else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if rights is not None:
                os.fchmod(descriptor, rights)
            yield file
            file.flush()
            os.fsync(descriptor)
        fresh.replace(place)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync(place.parent)


def write(place: Path, content: bytes, mode: int | None = None) -> None:
    """The whole content at once. Raises OSError."""
    with replacing(place, mode) as file:
        file.write(content)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rights(place: Path) -> int | None:
    """The permissions of an existing file; None where there is none."""
    try:
        mode = place.lstat().st_mode
    except FileNotFoundError:
        return None
    return None if stat.S_ISLNK(mode) else stat.S_IMODE(mode)
