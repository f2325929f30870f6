"""Keeps a few short entries in a file over a restart of the program, each with a checksum.

A damaged byte costs the entries that contain it; all others are read. The damaged file stays beside it as
`NAME.damaged` (the newest one only), and the intact entries are written anew. The caller says what a missing entry
costs, because the module does not know what the entries mean.

The first line is the number of entries, every other line is one entry. Each line begins with the CRC-32 of the rest."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from gputally.base import atomic_file


class Kept(NamedTuple):
    """What a file contains.

    entries: the intact ones, in the order in which they were saved.
    damage: what is damaged and where the damaged file is; "" if nothing is."""

    entries: list[bytes]
    damage: str = ""


def save(path: Path, entries: Iterable[bytes], mode: int | None = None) -> None:
    """Replace the file's entries, none of which contains a line end. mode: as in `atomic_file.write`. Raises
    OSError."""
    atomic_file.write(path, _content(list(entries)), mode)


def load(path: Path) -> Kept:
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
        save(path, entries, mode)
    return Kept(entries, damage)


def _content(entries: list[bytes]) -> bytes:
    return b"".join(map(_sealed, [b"%d" % len(entries), *entries]))


def _sealed(line: bytes) -> bytes:
    return b"%08x %s\n" % (crc32(line), line)


def _is_intact(line: bytes) -> bool:
    return line[:9] == b"%08x " % crc32(line[9:])
