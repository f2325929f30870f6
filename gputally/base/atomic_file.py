"""Replaces a file so that readers see either the old content or the new, even after a power failure.

The module writes a temporary file, makes it durable, renames it, and makes the folder durable (rename(2), fsync(2)). If
writing fails, it removes the temporary file, and the old content stays. It replaces a symbolic link instead of
following it, and creates no folders.

A reader that polls the file detects new content by the file's stamp."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

Stamp: TypeAlias = tuple[int, int, int]
"""Inode, size and modification time of a file. A different stamp means another file or other content."""


def stamp(path: Path) -> Stamp | None:
    """Return the file's stamp; None if the file cannot be read. The stamp changes whenever a program writes the file in
    place or replaces it, as Kubernetes replaces mounted files."""
    try:
        return stamp_of(path.stat())
    except OSError:
        return None


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the stamp of an `os.stat` result."""
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends. An error in the block changes nothing.

    mode: the file's permissions; None: those of the replaced file, or the process's default for a new file. Raises
    OSError."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.part")
    permissions = mode if mode is not None else _permissions(path)
    # Until the permissions are set, no other user may read the file.
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if permissions is None else 0o600
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            if permissions is not None:
                os.fchmod(descriptor, permissions)
            yield file
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replace the file's content. mode: see `replacing`. Raises OSError."""
    with replacing(path, mode) as file:
        file.write(content)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _permissions(path: Path) -> int | None:
    """Return the permissions of an existing file; None for a symbolic link or if there is no file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    return None if stat.S_ISLNK(mode) else stat.S_IMODE(mode)
