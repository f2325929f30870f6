"""What a checkpoint may write over in place is kept beside the file, and put back where the checkpoint did not end.

The engine (1.5) writes data into free blocks and then turns its header, so that a crash leaves the old state or the
new one. But for its own metadata: a block of them has 64 parts, and where some are free the whole block is written
anew, in place, while the present header needs its other parts still. A process killed in the middle of that leaves a
block that is neither, and a file that does not open (met once in some thousand kills). So these blocks go into
`<ledger>.blocks` before every checkpoint, with the headers they belong to. Put back they are right as long as the
file has these very headers; other headers mean that the checkpoint ended. Another file in the place is not touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from agent.wholefile import sync

HEADERS = 3 * 4096
"""Bytes before the first block: of the file, and two of the database that take turns."""
BLOCK = 262_144
IN_PLACE = "SELECT block_id FROM pragma_metadata_info() WHERE free_blocks > 0 ORDER BY ALL"


class _Kept(msgspec.Struct):
    """file: its number in the file system."""

    file: int
    headers: bytes
    blocks: dict[int, bytes]


_kept = msgspec.msgpack.Decoder(_Kept)


def beside(database: Path) -> Path:
    """Where the blocks of `database` are kept."""
    return database.with_name(database.name + ".blocks")


def keep(database: Path, file: int, numbers: Iterable[int]) -> None:
    """Copy these blocks, durably; they replace the ones that were kept before. Raises OSError.

    file: descriptor that stays open as long as the engine has the database: closing any would drop its lock."""
    kept = _Kept(
        os.fstat(file).st_ino,
        os.pread(file, HEADERS, 0),
        {number: os.pread(file, BLOCK, HEADERS + number * BLOCK) for number in numbers},
    )
    place = beside(database)
    fresh = place.with_name(f".{place.name}.new")
    with fresh.open("wb") as out:
        out.write(msgspec.msgpack.encode(kept))
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(place)
    sync(place.parent)  # or older blocks might stand here after a power failure, beside newer headers


def mend(database: Path) -> int:
    """Put back what a checkpoint that did not end has written over, before the engine opens it; how many blocks.

    Raises OSError."""
    try:
        kept = _kept.decode(beside(database).read_bytes())
        file = database.open("rb+")
    except (FileNotFoundError, msgspec.DecodeError):
        return 0  # nothing to go by: it was never kept, or by a release that does it in another way
    with file:
        if (os.fstat(file.fileno()).st_ino, file.read(HEADERS)) != (kept.file, kept.headers):
            return 0
        mended = 0
        for number, block in kept.blocks.items():
            file.seek(HEADERS + number * BLOCK)
            if file.read(BLOCK) != block:
                file.seek(HEADERS + number * BLOCK)
                file.write(block)
                mended += 1
        file.flush()
        os.fsync(file.fileno())
    return mended
