"""Replaces a file so that readers see either the old content or the new, even after a power failure.

The module writes a temporary file, makes it durable, renames it, and makes the folder durable (rename(2), fsync(2)). If
writing fails, it removes the temporary file, and the old content stays. It replaces a symbolic link instead of
following it, and creates no folders.

A reader that polls the file detects new content by the file's stamp.

`save_entries` keeps a few short entries over a restart of the program, each with a checksum. A damaged byte costs the
entries that contain it; all others are read. The damaged file stays beside it as `NAME.damaged` (the newest one only),
and the intact entries are written anew. The caller says what a missing entry costs. The first line is the number of
entries, every other line is one entry. Each line begins with the CRC-32 of the rest."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias
from zlib import crc32

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


class Kept(NamedTuple):
    """What a file contains.

    entries: the intact ones, in the order in which they were saved.
    damage: what is damaged and where the damaged file is; "" if nothing is."""

    entries: list[bytes]
    damage: str = ""


def save_entries(path: Path, entries: Iterable[bytes], mode: int | None = None) -> None:
    """Replace the file's entries, none of which contains a line end. mode: as in `write`. Raises
    OSError."""
    write(path, _content(list(entries)), mode)


def load_entries(path: Path) -> Kept:
    """Return the file's entries; none if there is no file. Raises OSError if it cannot be read."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Kept([])
    _, *rest = content.split(b"\n")
    entries = [line[9:] for line in rest if _is_intact(line)]
    if content == _content(entries):
        return Kept(entries)
    aside = path.with_name(f"{path.name}.damaged")
    damage = f"{path} is damaged: {len(entries)} of its entries are intact"
    with suppress(OSError):
        mode = path.stat().st_mode & 0o777
        path.replace(aside)
        damage += f"; the damaged file is {aside}"
        save_entries(path, entries, mode)
    return Kept(entries, damage)


def _content(entries: list[bytes]) -> bytes:
    return b"".join(map(_sealed, [b"%d" % len(entries), *entries]))


def _sealed(line: bytes) -> bytes:
    return b"%08x %s\n" % (crc32(line), line)


def _is_intact(line: bytes) -> bool:
    return line[:9] == b"%08x " % crc32(line[9:])
