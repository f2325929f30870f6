"""Checks the write-ahead log before DuckDB opens it, and restores blocks that an interrupted checkpoint damaged.

After certain kinds of damage DuckDB 1.5 silently drops every commit of the log. After a harmless damage (an unsynced
last commit, as a power failure leaves it) it refuses to open. The log is therefore checked first.

DuckDB syncs a commit before it begins the next, so a power failure damages only the last commit, in any of its blocks.
The log is then copied aside and cut before that commit. If an earlier commit is damaged, the ledger does not open
(LedgerDamaged): an administrator restores a backup, or cuts the log. If the header is of an unknown version, this
module cannot judge the log. DuckDB then opens it as it is. Before that, the file and the log are copied aside, because
DuckDB may drop a log whose header it does not know.

Format of the log: a header entry, then entries of u64 size, u64 checksum and payload. A commit ends with a constant
marker entry. Source: measured on DuckDB 1.5.5 and 2.0.0 against nine kinds of damage. The checksum is DuckDB's own
(`checksum.cpp`): products of 64-bit words XORed together, and MurmurHash64A of the rest.

DuckDB 1.5 writes data into free blocks and then switches its header, so that after a crash either the old or the new
state is valid. Its metadata is the exception. A metadata block has 64 parts. When some are free, DuckDB overwrites the
whole block in place, although the current header still refers to the other parts. If the process is killed during that
write, the block is corrupt and the file does not open (seen once in some thousand kills).

Before every checkpoint these blocks are therefore copied to `<ledger>.blocks`, with the headers of the file. They are
restored only while the file still has the saved headers. Other headers show that the checkpoint was completed. A file
other than the one they were copied from is not changed."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from zlib import crc32

import msgspec
import numpy as np
import structlog

from accountant.core.errors import LedgerDamaged, LedgerUnavailable
from gputally.base.atomic_file import sync
from gputally.base.untrusted_text import UNDECODABLE

COMMIT = bytes.fromhex("0500000000000000e7fe7d722fed3d5e640064ffff")
_MAGIC = b"\x64\x00\x62\x65\x00\x02"
_END = b"\xff\xff"
_IDENTIFIER = 102
"""Header field that holds a list of bytes (the database's id); the other fields hold one number."""


class LogState(Enum):
    """The state of a log.

    CLEAN: it ends with a complete commit.
    TORN: only the last commit is incomplete. A log without a header counts as torn: its first commit was never synced.
    DAMAGED: a commit before the last one is incomplete.
    UNKNOWN: its header is of an unknown version."""

    CLEAN = "clean"
    TORN = "torn"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"


def judge_log(log: bytes | mmap.mmap) -> tuple[LogState, int]:
    """Return the state of a log, and the offset up to which it can be used: the end of the last commit before the first
    incomplete entry, otherwise the end of the header; 0 if there is no complete header of a known version."""
    at = commit = 0
    if any(log[: len(_MAGIC)]):
        try:
            at = commit = _header_end(log)
        except IndexError:
            return LogState.TORN, 0
        except ValueError:
            return LogState.UNKNOWN, 0
        while end := _entry_end(log, at):
            if log[at:end] == COMMIT:
                commit = end
            at = end
    if 0 < commit == len(log):
        return LogState.CLEAN, commit
    marker = log.find(COMMIT, commit)
    torn = marker in (-1, len(log) - len(COMMIT))
    return (LogState.TORN if torn else LogState.DAMAGED), commit


def _entry_end(log: bytes | mmap.mmap, at: int) -> int | None:
    """Return the offset behind the entry at `at`, or None if no complete entry begins there."""
    if at + 16 > len(log):
        return None
    size, checksum = struct.unpack_from("<QQ", log, at)
    end: int = at + 16 + size
    return end if size and end <= len(log) and entry_checksum(log[at + 16 : end]) == checksum else None


def entry_checksum(payload: bytes) -> int:
    """Return DuckDB's checksum of an entry."""
    words = np.frombuffer(payload, "<u8", len(payload) // 8)
    checksum = 5381 ^ int(np.bitwise_xor.reduce(words * np.uint64(0xBF58476D1CE4E5B9)))
    rest = payload[len(words) * 8 :]
    return checksum ^ _murmur_hash(rest) if rest else checksum


def _murmur_hash(rest: bytes) -> int:
    """Return MurmurHash64A of fewer than eight bytes."""
    factor, shift, mask = 0xC6A4A7935BD1E995, 47, 2**64 - 1
    value = 0xE17A1465 ^ (len(rest) * factor & mask)
    value = (value ^ int.from_bytes(rest, "little")) * factor & mask
    value = (value ^ value >> shift) * factor & mask
    return value ^ value >> shift


def _header_end(log: bytes | mmap.mmap) -> int:
    """Return the offset behind the header. Raises ValueError for an unknown header, IndexError if the log ends within
    it."""
    if not _MAGIC.startswith(log[: len(_MAGIC)]):
        raise ValueError("unknown header")
    at = len(_MAGIC)
    while log[at : at + 2] != _END:
        field = log[at] | log[at + 1] << 8
        count, at = _varint(log, at + 2)
        if field == _IDENTIFIER:
            for _ in range(count):
                _, at = _varint(log, at)
    return at + 2


def _varint(log: bytes | mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = log[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def prepare_log(database: Path) -> LogState | None:
    """Make the log beside `database` safe to open, and return its state; None if there is no log (after a clean stop).

    A torn log is copied and then cut before its last commit. A log beside which DuckDB's own files of an interrupted
    checkpoint lie is not changed. Raises LedgerDamaged for a damaged log, because DuckDB would drop acknowledged
    rows."""
    log = database.with_name(database.name + ".wal")
    if not log.exists() or log.stat().st_size == 0:
        return None
    with log.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        verdict, commit = judge_log(content)
    others = [log.with_name(log.name + end) for end in (".checkpoint", ".recovery")]
    if verdict is LogState.CLEAN or any(other.exists() for other in others):
        return verdict
    if verdict is LogState.UNKNOWN:
        _keep_both(database, log)
        return verdict
    aside = log.with_name(log.name + f".{verdict.value}")
    shutil.copyfile(log, aside)
    if verdict is LogState.DAMAGED:
        raise LedgerDamaged(
            f"{log}: damaged after byte {commit}, and complete commits follow the damage (copy: {aside}): restore the "
            "ledger from a backup, or cut the log at that byte; the agents then send the missing records again"
        )
    with log.open("rb+") as torn:
        torn.truncate(commit)
        os.fsync(torn.fileno())
    structlog.get_logger("accountant.storage").warning(
        "unsynced_commit_cut", log=str(log), copy=str(aside), kept_bytes=commit, cut_bytes=aside.stat().st_size - commit
    )
    return verdict


def _keep_both(database: Path, log: Path) -> None:
    """Copy the file and its log before DuckDB opens them. A log that was copied before is not copied again.

    Raises LedgerUnavailable if they cannot be copied."""
    ending = f".unknown-{log.stat().st_mtime_ns}"
    copies = [place.with_name(place.name + ending) for place in (database, log)]
    if not copies[-1].exists():
        try:
            for place, copy in zip((database, log), copies, strict=True):
                fresh = copy.with_name(f".{copy.name}.part")
                try:
                    shutil.copyfile(place, fresh)
                    sync(fresh)
                    fresh.replace(copy)
                finally:
                    fresh.unlink(missing_ok=True)
            sync(log.parent)
        except OSError as error:
            raise LedgerUnavailable(
                f"{log}: written by an unknown version of DuckDB, and it cannot be copied before it is opened: "
                f"{error.strerror}"
            ) from error
    structlog.get_logger("accountant.storage").warning("unknown_log_left_to_engine", log=str(log), copy=str(copies[-1]))


HEADERS = 3 * 4096
"""Bytes before the first block: the file header and two database headers that are used in turn."""
BLOCK = 262_144
IN_PLACE = "SELECT block_id FROM pragma_metadata_info() WHERE free_blocks > 0 ORDER BY ALL"


class _SavedBlocks(msgspec.Struct):
    """A copy of blocks of the database file, to be written back after a crash.

    file: the inode number of the database file.
    headers: the first HEADERS bytes of the file.
    blocks: by block number."""

    file: int
    headers: bytes
    blocks: dict[int, bytes]


_decoder = msgspec.msgpack.Decoder(_SavedBlocks)


def block_copy_path(database: Path) -> Path:
    """Return the path of the saved blocks of `database`."""
    return database.with_name(database.name + ".blocks")


def save_blocks(database: Path, file: int, numbers: Iterable[int]) -> None:
    """Save the blocks with these numbers durably, replacing those saved before. Raises OSError.

    file: a descriptor of the database file. It must stay open as long as DuckDB has the file open, because closing any
    descriptor of the file releases DuckDB's lock."""
    saved = _SavedBlocks(
        os.fstat(file).st_ino,
        os.pread(file, HEADERS, 0),
        {number: os.pread(file, BLOCK, HEADERS + number * BLOCK) for number in numbers},
    )
    place = block_copy_path(database)
    fresh = place.with_name(f".{place.name}.new")
    content = msgspec.msgpack.encode(saved)
    with fresh.open("wb") as out:
        out.write(crc32(content).to_bytes(4, "big"))
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(place)
    sync(place.parent)  # otherwise older blocks could be there after a power failure, beside newer headers


def restore_blocks(database: Path) -> int:
    """Restore the blocks that an unfinished checkpoint overwrote, before DuckDB opens the file. Returns the number of
    restored blocks. A copy that is damaged itself restores nothing. Raises OSError."""
    try:
        content = block_copy_path(database).read_bytes()
        if crc32(content[4:]).to_bytes(4, "big") != content[:4]:
            raise ValueError("its checksum differs")
        saved = _decoder.decode(content[4:])
        file = database.open("rb+")
    except FileNotFoundError:
        return 0
    except UNDECODABLE as error:
        structlog.get_logger("accountant.storage").warning(
            "saved_blocks_unreadable", file=str(block_copy_path(database)), reason=str(error)
        )
        return 0
    with file:
        if (os.fstat(file.fileno()).st_ino, file.read(HEADERS)) != (saved.file, saved.headers):
            return 0
        restored = 0
        for number, block in saved.blocks.items():
            file.seek(HEADERS + number * BLOCK)
            if file.read(BLOCK) != block:
                file.seek(HEADERS + number * BLOCK)
                file.write(block)
                restored += 1
        file.flush()
        os.fsync(file.fileno())
    return restored
