"""Writes a file so that readers see the old content or the new, even after a power failure.

The content is made durable before it gets the name, and afterwards the name in its folder (rename(2), fsync(2)). If
writing fails, no temporary file remains and the old content stays. A link at the place is replaced, not followed. No
folders are created.

A reader that polls the file detects new content by its stamp."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

Stamp: TypeAlias = tuple[int, int, int]
"""The state of a file at one moment. A different stamp means another file or other content."""


def stamp(place: Path) -> Stamp | None:
    """Return the file's stamp, which changes whenever the file is written in place or replaced (as Kubernetes does);
    None if the file cannot be read."""
    try:
        return stamp_of(place.stat())
    except OSError:
        return None


def stamp_of(found: os.stat_result) -> Stamp:
    """Return the stamp of an `os.stat` result."""
    return found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def replacing(place: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Open a new file that replaces `place` when the block ends; an error in the block changes nothing.

    mode: the file's permissions; None: those of the replaced file, or the process's default for a new one. Raises
    OSError."""
    fresh = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    rights = mode if mode is not None else _rights(place)
    # Until the permissions are set, no other user may read the file.
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
    """Write the whole content at once. Raises OSError."""
    with replacing(place, mode) as file:
        file.write(content)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rights(place: Path) -> int | None:
    """Return the permissions of an existing file; None if there is no file."""
    try:
        mode = place.lstat().st_mode
    except FileNotFoundError:
        return None
    return None if stat.S_ISLNK(mode) else stat.S_IMODE(mode)
