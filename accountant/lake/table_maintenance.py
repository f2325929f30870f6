"""Keeps the lake small: removes old versions of its tables, and files that no version refers to.

Versions with a tag are kept permanently: the months as they were stated. A file is removed only if it is older than the
kept versions, so that a file about to be committed is safe."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.fs
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table

from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.tables import TABLES
from gputally.base.units import MS_PER_SECOND

_GRACE = timedelta(days=1)
"""A file is never removed earlier than this after it was written."""
_MOST = 10_000
"""Maximum number of files that one run removes per table; the next run continues."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What one run removed."""

    versions: int = 0
    files: int = 0


def keep_small(catalogue: Catalogue, now_ms: int, keep_s: int) -> Removed:
    """Removes versions older than keep_s seconds, and then the files that no version needs. Raises LakeUnavailable."""
    before = datetime.fromtimestamp(now_ms / MS_PER_SECOND, UTC) - timedelta(seconds=keep_s)
    versions = files = 0
    for described in TABLES:
        with catalogue.reachable():
            table = catalogue.open(described)
            known = len(table.snapshots())
            try:
                table.maintenance.expire_snapshots().older_than(before).commit()
            except CommitFailedException:
                continue  # another writer was faster; the next run tries again
            table = catalogue.open(described)
            versions += known - len(table.snapshots())
            files += _remove_orphans(table, before - _GRACE)
    return Removed(versions, files)


def _remove_orphans(table: Table, before: datetime) -> int:
    needed = _referenced(table)
    io: Any = table.io
    scheme, netloc, folder = io.parse_location(table.location(), io.properties)
    store = io.fs_by_scheme(scheme, netloc)
    removed = 0
    for found in store.get_file_info(pyarrow.fs.FileSelector(folder, recursive=True, allow_not_found=True)):
        old = found.mtime is not None and found.mtime < before
        if found.type == pyarrow.fs.FileType.File and old and found.path not in needed and removed < _MOST:
            with contextlib.suppress(FileNotFoundError):  # the accountant of another ledger was faster
                store.delete_file(found.path)
                removed += 1
    return removed


def _referenced(table: Table) -> set[str]:
    """The paths of all files that a version of the table needs, including its metadata."""
    io: Any = table.io
    places = {table.metadata_location, *(entry.metadata_file for entry in table.metadata.metadata_log)}
    for snapshot in table.snapshots():
        places.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in places:  # versions share most of their manifests
                places.add(manifest.manifest_path)
                places |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)}
    return {io.parse_location(place, io.properties)[2] for place in places}
