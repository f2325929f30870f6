"""Opens the lake's Iceberg catalog, replaces whole partitions of one ledger's tables, and removes old versions of them.

Each ledger has a namespace of its own, so no commit and no removal touches the tables of another. Before a process
writes, it claims the tables: it commits the ledger's id and the next term to each of them. Every later commit carries
both, and is made only while they are the newest. A process that was paused while another one claimed the tables
therefore writes nothing more, and an accountant that has a different ledger under the same name writes nothing at all.

A commit of Iceberg replaces one pointer, and only if the table has not changed since it was read. If a commit gives no
answer, `committed` looks for its id in the table's snapshots: the commit succeeded if and only if a snapshot has it.

When a closed month is published, the current versions of the tables with its usage and statement are tagged. A tagged
version is never removed, so the month stays readable as it was stated. What is old is decided by the times at which the
store wrote the files, never by the clock of a machine. A file is removed only if no remaining version needs it and it
is older than the age limit of versions plus one day.

Nothing is created by reading. Only `begin` makes a catalog, a namespace and tables."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
    ValidationException,
)
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    EqualTo,
    GreaterThanOrEqual,
    In,
    LessThanOrEqual,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, Table, Transaction
from pyiceberg.table.update import AddSnapshotUpdate, TableRequirement, TableUpdate
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import BooleanType, DateType, DecimalType, LongType, NestedField, StringType, TimestamptzType

from accountant.core.errors import LakeRefused, LakeUnavailable
from accountant.core.settings import Lake, secret_properties
from accountant.lake.tables import DECIMALS, FIGURES, LEDGERS, REGISTERS, TABLES, ColumnType, LakeTable
from gputally.base.errors import AccountantError, without_password

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot
    from pyiceberg.types import IcebergType

# The first rows of a partition replace none, and the library warns about that.
warnings.filterwarnings("ignore", message="Delete operation did not match any records", category=UserWarning)

PREFIX: Final = "gputally_"
"""The beginning of the name of every ledger's namespace."""
_SQLITE: Final = "sqlite:///"
_PLAIN: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""Names of ledgers that differ if and only if their namespaces differ in more than the hash."""
_MOST_OF_NAME: Final = 60
"""Characters of a ledger's name in its namespace; Hive allows 128 in all."""
BATCH: Final = "gputally.batch-id"
"""Property of a snapshot that identifies the commit, so that its outcome can be looked up."""
LEDGER_ID: Final = "gputally.ledger-id"
"""Property of a snapshot: the id of the ledger that wrote it."""
TERM: Final = "gputally.term"
"""Property of a snapshot: the number of the claim under which it was written, over all processes of the ledger."""
_PROCESS: Final = "gputally.process"
"""Property of a snapshot: the process that made the claim. It tells two processes apart that made the same one."""
VERSION: Final = "gputally.version"
"""Property of a snapshot: the number of the publication within the term, from 1; 0: the claim itself."""
_TRIES: Final = 8
"""Number of tries of a commit, beyond the library's own retries."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0
"""Bounds of the random pause between two tries. Without it, several writers meet again at every try."""
_RANDOM = SystemRandom()
ANSWER_S: Final = 60.0
"""The longest wait for an answer of a REST catalog."""
_ICEBERG: Final[dict[ColumnType, IcebergType]] = {
    "string": StringType(),
    "long": LongType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "timestamptz": TimestamptzType(),
    "decimal": DecimalType(38, DECIMALS),
}
_PROPERTIES: Final = {
    "commit.manifest-merge.enabled": "true",
    "commit.retry.num-retries": "0",  # each try checks first that the claim still holds
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    "write.parquet.row-group-limit": "15000",
    "write.parquet.compression-codec": "zstd",
}
_DELETIONS: Final = 3
"""Number of tries to remove a folder."""
_GRACE: Final = timedelta(days=1)
"""A file is never removed earlier than this after it was written."""
_MOST_FILES: Final = 10_000
"""Maximum number of files that one run removes per table; the next run continues."""


@dataclass(frozen=True, slots=True)
class Removed:
    """The numbers of table versions and of files that one run removed."""

    versions: int = 0
    files: int = 0


@dataclass(frozen=True, slots=True)
class WriterClaim:
    """A process's right to write a ledger's tables, until another process claims them.

    term: higher than that of every earlier claim.
    process: a random id of the process."""

    ledger_id: str
    term: int
    process: str


class Catalogue:
    """The lake's tables; those of one ledger can be written. ledger: the name of this ledger; "": only reading.

    Methods raise LakeUnavailable with the place and the reason, those that write also LakeRefused."""

    def __init__(self, catalog: Catalog, place: str, settings: Lake) -> None:
        self._catalog, self._settings = catalog, settings
        self.place = place
        self.ledger = settings.ledger
        self._claim: WriterClaim | None = None
        self.version = 0
        """The number of the publication that is in progress, within the claim."""

    @classmethod
    def connect(cls, settings: Lake) -> Catalogue:
        """Opens the catalog in the settings. Creates nothing."""
        secrets = secret_properties(settings.secrets)
        properties = {**settings.catalog.properties, **secrets, "warehouse": _address(settings.warehouse)}
        uri = settings.catalog.uri
        if settings.catalog.type == "sql":
            uri = uri or _sqlite_in(settings.warehouse)
        if uri:
            properties["uri"] = uri
        is_there = True
        if uri.startswith(_SQLITE):  # opened without being created
            file = Path(uri.removeprefix(_SQLITE))
            properties["uri"] = f"{_SQLITE}file:{quote(str(file))}?mode=rw&uri=true"
            is_there = file.is_file()
        if settings.catalog.type == "sql":
            properties["init_catalog_tables"] = "false"
        place = (
            f"{settings.catalog.type} catalog {without_password(uri)}".rstrip() + f", warehouse {settings.warehouse}"
        )
        with reachable(place):
            if settings.catalog.type == "rest":
                catalog: Catalog = _rest_catalog(settings.catalog.name, properties)
            else:
                catalog = load_catalog(settings.catalog.name, type=settings.catalog.type, **properties)
            if settings.catalog.type == "sql" and is_there:
                _make_catalog_tables(catalog)
        _keep_commits_in_order(catalog)
        return cls(catalog, place, settings)

    def close(self) -> None:
        """Closes the connections; the next query opens others."""
        self._catalog.close()

    # --- reading ------------------------------------------------------------------------------

    def namespaces(self) -> list[str]:
        """The namespaces of all ledgers, ascending."""
        with reachable(self.place):
            self._require_files()
            names = sorted(".".join(found) for found in self._catalog.list_namespaces())
            return [name for name in names if name.startswith(PREFIX) and self._has_tables(name)]

    def open(self, table: LakeTable, namespace: str = "") -> Table:
        """The newest version of a table of a namespace, or of the own ledger."""
        with reachable(self.place):
            self._require_files()
            try:
                return self._catalog.load_table((namespace or namespace_of(self.ledger), table.name))
            except (NoSuchTableError, NoSuchNamespaceError) as error:
                raise LakeRefused(
                    f"{self.place}: the ledger {self.ledger or namespace} has no table {table.name} there. If the "
                    "lake was moved or its volume is not mounted, restore it. If the ledger was retired, "
                    "`gputally accountant check --lake --repair` publishes it again"
                ) from error

    def read(self, table: LakeTable, namespace: str = "") -> list[dict[str, Any]]:
        """The rows of a small table of a namespace, or of the own ledger. Columns that the lake does not have yet are
        None."""
        unknown = dict.fromkeys(column.name for column in table.columns)
        with reachable(self.place):
            return [{**unknown, **row} for row in self.open(table, namespace).scan().to_arrow().to_pylist()]

    def has(self, table: LakeTable, namespace: str = "") -> bool:
        """Whether there is this table of a namespace, or of the own ledger."""
        with reachable(self.place):
            return self._catalog.table_exists((namespace or namespace_of(self.ledger), table.name))

    def parts(self, table: LakeTable) -> set[Any]:
        """The values of the column by which a table is divided, as far as the own ledger has rows with them."""
        (column,) = table.partition
        with reachable(self.place):
            return {row["partition"][column] for row in self.open(table).inspect.partitions().to_pylist()}

    # --- writing ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Creates what is missing of the own ledger's tables and their columns, and of the catalog. The folder of the
        warehouse must exist: a folder that does not is a volume that is not mounted."""
        for folder in self._folders():
            if not folder.is_dir():
                raise LakeRefused(
                    f"{self.place}: the folder {folder} does not exist: mount its volume, or create the folder"
                )
        namespace = namespace_of(self.ledger)
        with reachable(self.place):
            file = self._sqlite()
            if file is not None:
                file.touch()
                _make_catalog_tables(self._catalog)
            self._catalog.create_namespace_if_not_exists(namespace)
            there = {name[-1] for name in self._catalog.list_tables(namespace)}
            for table in sorted(TABLES, key=lambda one: one is LEDGERS):  # the last shows that all are there
                if table.name in there:
                    _add_columns(self.open(table), table)
                    continue
                with contextlib.suppress(TableAlreadyExistsError, NamespaceAlreadyExistsError):
                    self._catalog.create_table(
                        (namespace, table.name), _schema(table), partition_spec=_partitions(table),
                        properties=_PROPERTIES,
                    )  # fmt: skip

    def retire(self) -> int:
        """Removes the own ledger's tables with their files; returns how many tables. The first is that from which
        readers know the ledger, so that no one counts half of it. Raises LakeUnavailable, also for files that the store
        keeps although their tables are gone."""
        namespace = namespace_of(self.ledger)
        with reachable(self.place):
            self._require_files()
            try:
                names = sorted(self._catalog.list_tables(namespace), key=lambda name: name[-1] != LEDGERS.name)
            except NoSuchNamespaceError as error:
                raise LakeUnavailable(f"{self.place}: no ledger {self.ledger!r} publishes there") from error
            folders = []
            for name in names:
                folders.append(_folder(self._catalog.load_table(name)))
                self._catalog.drop_table(name)
            self._catalog.drop_namespace(namespace)
        left = [folder for store, folder in folders if not _removed(store, folder)]
        if left:
            raise LakeUnavailable(
                f"{self.place}: the ledger {self.ledger} is removed, but the store keeps files of {len(left)} tables: "
                f"remove {', '.join(left)} there, with credentials that may delete"
            )
        return len(names)

    def require_own(self, ledger_id: str) -> int:
        """The newest term of the own ledger's tables; 0: nobody has claimed them. Only reads. Raises LakeRefused if
        they belong to a ledger with another id, or if one of them was removed."""
        totals = {row["register"] for row in self.read(REGISTERS)}
        # A register without a control total is one that the last version which published did not know yet.
        known = [table for table in TABLES if table in FIGURES or table.name in totals or self.has(table)]
        found = [mark for table in known if (mark := newest_claim(self.open(table))) is not None]
        newest = max(found, key=lambda mark: mark.term, default=None)
        if newest is not None and newest.ledger_id != ledger_id:
            raise LakeRefused(self._another(newest.ledger_id, ledger_id))
        return newest.term if newest is not None else 0

    def claim(self, ledger_id: str) -> WriterClaim:
        """Claims the own ledger's tables for this process, until another one does. Raises LakeRefused if they belong to
        a ledger with another id."""
        mine = WriterClaim(ledger_id, self.require_own(ledger_id) + 1, uuid.uuid4().hex)
        self._claim, self.version = None, 0
        for table in TABLES:
            # All writers claim in this order, so the slower one fails at the first table.
            self._commit(table, mine, table.arrow.empty_table(), None)
        self._claim = mine
        return mine

    def replace(self, table: LakeTable, rows: pa.Table, partition: Mapping[str, object | Sequence[object]]) -> None:
        """Replaces the content of the partitions with these rows; idempotent. partition: by column, the value or the
        values of the partitions; empty: all rows."""
        rows = rows.cast(table.arrow)
        self._commit(table, self._claimed(), rows, rows_where(partition))

    def leave(self, namespace: str, row: Mapping[str, Any]) -> None:
        """Replaces the row of the table `ledgers` under a former name of the own ledger, if no one else has changed it
        meanwhile. It is no publication, so it takes the tables from no process that publishes there."""
        with reachable(self.place):
            _add_columns(self.open(LEDGERS, namespace), LEDGERS)
            with _Changes(self.open(LEDGERS, namespace)) as changes:
                changes.overwrite(LEDGERS.of_rows([dict(row)]), AlwaysTrue())

    def tag(self, table: LakeTable, name: str) -> None:
        """Tags the newest version of a table permanently. If the name is in use already, nothing changes."""
        with reachable(self.place):
            opened = self.open(table)
            self._require(opened, self._claimed())
            snapshot = opened.current_snapshot()
            if snapshot is not None and name not in opened.refs():
                opened.manage_snapshots().create_tag(snapshot.snapshot_id, name).commit()

    def remove_old_versions(self, keep_s: int) -> Removed:
        """Removes versions that were replaced more than keep_s seconds before the newest file was written, by the
        store's times, and then the files that no version needs."""
        versions = files = 0
        for table in TABLES:
            with reachable(self.place):
                opened = self.open(table)
                self._require(opened, self._claimed())
                written = _written(opened)
                if not written:
                    continue
                oldest = max(written.values()) - timedelta(seconds=keep_s)
                past = _replaced_before(opened, oldest, written)
                if past:
                    try:
                        opened.maintenance.expire_snapshots().by_ids(past).commit()
                    except CommitFailedException:
                        continue  # the table has changed; the next run tries again
                versions += len(past)
                files += _remove_orphans(self.open(table), oldest - _GRACE, written)
        return Removed(versions, files)

    # --- internal -----------------------------------------------------------------------------

    def _commit(self, table: LakeTable, claim: WriterClaim, rows: pa.Table, replaced: BooleanExpression | None) -> None:
        """Makes one commit, if the claim is the newest or a new one. replaced: the rows that leave; None: none."""
        batch = str(uuid.uuid4())
        marks = {
            BATCH: batch, LEDGER_ID: claim.ledger_id, TERM: str(claim.term), _PROCESS: claim.process,
            VERSION: str(self.version),
        }  # fmt: skip
        failure: Exception | None = None
        for attempt in range(_TRIES):
            if failure is not None:
                time.sleep(_RANDOM.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)))
            opened = self.open(table)
            if failure is not None and committed(opened, batch):
                return
            self._require(opened, claim)
            try:
                with _Changes(opened) as changes:
                    if replaced is None:
                        changes.append(rows, snapshot_properties=marks)
                    else:
                        changes.overwrite(rows, replaced, snapshot_properties=marks)
            except (CommitFailedException, CommitStateUnknownException, ValidationException) as error:
                failure = error  # the table has changed, or the outcome is unknown: the next try checks
            except Exception as error:
                if failure is not None:
                    raise LakeUnavailable(f"{self.place}: {table.name} was not written: {described(error)}") from error
                failure = error
            else:
                return
        raise LakeUnavailable(f"{self.place}: {table.name} was not written: {described(failure)}") from failure

    def _claimed(self) -> WriterClaim:
        assert self._claim is not None, "claim the tables before writing"
        return self._claim

    def _require(self, opened: Table, claim: WriterClaim) -> None:
        """Raises LakeRefused if the newest claim of a table is another ledger's, or a later one."""
        newest = newest_claim(opened)
        if newest is None:
            return
        if newest.ledger_id != claim.ledger_id:
            raise LakeRefused(self._another(newest.ledger_id, claim.ledger_id))
        if newest.term > claim.term or (newest.term == claim.term and newest.process != claim.process):
            raise LakeRefused(
                f"{self.place}: another process of the ledger {self.ledger} has begun to publish (term {newest.term}; "
                f"this one has term {claim.term}), so this one publishes nothing more. If two accountants run with "
                "copies of one ledger, stop one of them and restart the other"
            )

    def _another(self, theirs: str | None, mine: str) -> str:
        return (
            f"{self.place}: the name {self.ledger} belongs to the ledger {theirs}, and this accountant has the ledger "
            f"{mine}: set another name in `lake.ledger`. If this accountant lost its ledger, restore it from the "
            f"backup or the archive. To give the name to this ledger, remove the other one from the lake with "
            f"`gputally fleet retire {self.ledger}`"
        )

    def _has_tables(self, namespace: str) -> bool:
        try:
            return any(name[-1] == LEDGERS.name for name in self._catalog.list_tables(namespace))
        except NoSuchNamespaceError:
            return False

    def _files_exist(self) -> bool:
        """Whether the folders of the lake and the catalog's file exist, if they are on this machine."""
        file = self._sqlite()
        return all(folder.is_dir() for folder in self._folders()) and (file is None or file.is_file())

    def _require_files(self) -> None:
        if not self._files_exist():
            raise LakeUnavailable(
                f"{self.place}: there is no lake: mount the volume of the warehouse, or correct its address. The first "
                "publication of an accountant makes one"
            )

    def _sqlite(self) -> Path | None:
        """The file of an SQLite catalog."""
        catalog = self._settings.catalog
        uri = catalog.uri or (_sqlite_in(self._settings.warehouse) if catalog.type == "sql" else "")
        return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None

    def _folders(self) -> list[Path]:
        """The folders on this machine that have to exist before anything is created."""
        warehouse, file = self._settings.warehouse.removeprefix("file://"), self._sqlite()
        found = [] if "://" in warehouse else [Path(warehouse)]
        return found if file is None else [*found, file.parent]


class _Changes(Transaction):
    """The changes of one commit. The library builds the changed metadata, with a copy of every version of the table, at
    each of the twenty times that it reads them; here it does so once a change."""

    _built: tuple[TableMetadata, tuple[TableUpdate, ...], TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        table, updates = self._table.metadata, self._updates
        if self._built is None or self._built[0] is not table or self._built[1] is not updates:
            self._built = table, updates, super().table_metadata
        return self._built[2]


def _make_catalog_tables(catalog: Catalog) -> None:
    """Makes the tables of a SQL catalog if they are missing. Processes that open a new one at one time all find them
    missing, and the database refuses all but one, each with a class of its own; at the next try they are there."""
    for left in reversed(range(_TRIES)):
        try:
            cast(Any, catalog).create_tables()
        except Exception as error:
            if not left or "already exists" not in str(error):
                raise
        else:
            return


def namespace_of(ledger: str) -> str:
    """The name of a ledger's namespace. It consists of small letters, digits and underscores, in one level, because
    Glue, Hive and Trino accept no more. Different ledgers have different ones."""
    if _PLAIN.fullmatch(ledger) and len(ledger) <= _MOST_OF_NAME:
        return PREFIX + ledger.replace("-", "_")
    plain = re.sub(r"[^a-z0-9]+", "_", ledger.lower()).strip("_")[:_MOST_OF_NAME]
    return f"{PREFIX}{plain}__{hashlib.sha256(ledger.encode()).hexdigest()[:12]}"


def newest_claim(table: Table) -> WriterClaim | None:
    """The claim under which the newest of this program's commits was made; None if there is none. Commits of other
    programs, such as a compaction, say nothing."""
    snapshot = _newest_own(table)
    if snapshot is None or snapshot.summary is None:
        return None
    marks = snapshot.summary.additional_properties
    return WriterClaim(marks[LEDGER_ID], int(marks[TERM]), marks[_PROCESS])


def _newest_own(table: Table) -> Snapshot | None:
    """The newest of this program's versions of a table."""
    for snapshot in sorted(table.snapshots(), key=lambda one: one.sequence_number or 0, reverse=True):
        if snapshot.summary is not None and TERM in snapshot.summary.additional_properties:
            return snapshot
    return None


def _keep_commits_in_order(catalog: Catalog) -> None:
    """Lets no commit have an earlier time than the one before it, as it would after a clock that was ahead is set back:
    engines refuse to read such a table."""
    commit = catalog.commit_table

    def ordered(
        table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        at_ms = max((one.timestamp_ms for one in table.metadata.snapshots), default=0)
        return commit(table, requirements, tuple(_after(update, at_ms) for update in updates))

    catalog.commit_table = ordered  # type: ignore[method-assign]


def _after(update: TableUpdate, at_ms: int) -> TableUpdate:
    """The change of a table; a new version with a time that is after this one. If it were this one, the library would
    take the table for unchanged since, and write the time of the clock as that of the newest change."""
    if not isinstance(update, AddSnapshotUpdate) or update.snapshot.timestamp_ms > at_ms:
        return update
    return update.model_copy(update={"snapshot": update.snapshot.model_copy(update={"timestamp_ms": at_ms + 1})})


def _rest_catalog(name: str, properties: Mapping[str, str]) -> Catalog:
    """A REST catalog whose calls end: the library waits for an answer for ever."""
    from pyiceberg.catalog.rest import RestCatalog

    class BoundedRestCatalog(RestCatalog):
        def _create_session(self) -> Any:
            session = super()._create_session()
            session.request = functools.partial(session.request, timeout=ANSWER_S)  # type: ignore[method-assign]
            return session

    return BoundedRestCatalog(name, **properties)


def _folder(table: Table) -> tuple[Any, str]:
    """The file system with a table's files, and their folder."""
    io: Any = table.io
    scheme, netloc, folder = io.parse_location(table.location(), io.properties)
    return io.fs_by_scheme(scheme, netloc), folder


def _removed(store: Any, folder: str) -> bool:
    """Whether a folder with all its files is gone now."""
    for _ in range(_DELETIONS):
        try:
            store.delete_dir(folder)
        except FileNotFoundError:
            return True
        except OSError:
            continue  # some stores keep a folder of which files go in the same request
        return True
    return False


def _written(table: Table) -> dict[str, datetime]:
    """When the store wrote each file of a table, by path."""
    store, folder = _folder(table)
    entries = store.get_file_info(pyarrow.fs.FileSelector(folder, recursive=True, allow_not_found=True))
    return {
        entry.path: entry.mtime
        for entry in entries
        if entry.type == pyarrow.fs.FileType.File and entry.mtime is not None
    }


def _replaced_before(table: Table, oldest: datetime, written: Mapping[str, datetime]) -> list[int]:
    """The ids of the versions that a later one replaced before this time, by the store. Versions with a name
    stay, and so does this program's newest one, which has the claim."""
    kept = {ref.snapshot_id for ref in table.refs().values()}
    if (own := _newest_own(table)) is not None:
        kept.add(own.snapshot_id)
    ordered = sorted(table.snapshots(), key=lambda one: one.sequence_number or 0)
    found = []
    for snapshot, successor in pairwise(ordered):
        replaced = written.get(_path(table, successor.manifest_list))
        if snapshot.snapshot_id not in kept and replaced is not None and replaced < oldest:
            found.append(snapshot.snapshot_id)
    return found


def _remove_orphans(table: Table, before: datetime, written: Mapping[str, datetime]) -> int:
    """Removes files that no version needs and that were written before this time; returns how many."""
    needed = _needed_files(table)
    store, _ = _folder(table)
    removed = 0
    for path, at in written.items():
        if at < before and path not in needed and removed < _MOST_FILES:
            with contextlib.suppress(FileNotFoundError):  # another process of the ledger was faster
                store.delete_file(path)
                removed += 1
    return removed


def _needed_files(table: Table) -> set[str]:
    """The paths of all files that a version of the table needs, including its metadata."""
    locations = {table.metadata_location, *(entry.metadata_file for entry in table.metadata.metadata_log)}
    for snapshot in table.snapshots():
        locations.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in locations:  # versions share most of their manifests
                locations.add(manifest.manifest_path)
                locations |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)}
    return {_path(table, location) for location in locations}


def _path(table: Table, location: str) -> str:
    """The path of a file in its file system."""
    io: Any = table.io
    path: str = io.parse_location(location, io.properties)[2]
    return path


def rows_where(
    values: Mapping[str, object | Sequence[object]], between: Mapping[str, tuple[object, object]] = {}
) -> BooleanExpression:
    """The filter for rows that meet all conditions.

    values: by column, the value, or a list or tuple of the values that are possible.
    between: by column, the lowest and the highest value."""
    equal, among, least, most = (cast(Any, one) for one in (EqualTo, In, GreaterThanOrEqual, LessThanOrEqual))
    conditions: list[BooleanExpression] = [AlwaysTrue()]
    conditions += [
        among(name, set(value)) if isinstance(value, (list, tuple)) else equal(name, value)
        for name, value in values.items()
    ]
    for name, (first, last) in between.items():
        conditions += [least(name, first), most(name, last)]
    return functools.reduce(And, conditions)


def committed(table: Table, batch: str) -> bool:
    """Whether a snapshot of the table has this commit id (BATCH)."""
    return any(snapshot.summary is not None and snapshot.summary.get(BATCH) == batch for snapshot in table.snapshots())


def described(error: BaseException | None) -> str:
    """The first line of an exception's message, shortened and without passwords; the type if there is no message."""
    return without_password(str(error).partition("\n")[0])[:300] or type(error).__name__


def _address(warehouse: str) -> str:
    """The warehouse as an address, because some engines (Trino) do not read tables whose files have no scheme."""
    return warehouse if "://" in warehouse else f"file://{Path(warehouse).absolute()}"


def _sqlite_in(warehouse: str) -> str:
    """The URI of the SQLite catalog in a warehouse folder. Raises LakeUnavailable if the warehouse is no folder."""
    folder = warehouse.removeprefix("file://")
    if "://" in folder:
        raise LakeUnavailable(
            f"warehouse {warehouse} is not a folder: set `lake.catalog.uri` to a database or a REST catalog"
        )
    return f"{_SQLITE}{folder}/catalog.db"


def _schema(table: LakeTable) -> Schema:
    return Schema(
        *(
            NestedField(number, column.name, _ICEBERG[column.type], required=False, doc=column.text)
            for number, column in enumerate(table.columns, 1)
        )
    )


def _add_columns(opened: Table, table: LakeTable) -> None:
    """Adds the columns that the version which made the table did not know. Their values in its rows are unknown."""
    there = set(opened.schema().column_names)
    missing = [column for column in table.columns if column.name not in there]
    if missing:
        with opened.update_schema() as update:
            for column in missing:
                update.add_column(column.name, _ICEBERG[column.type], column.text)


def _partitions(table: LakeTable) -> PartitionSpec:
    numbers = {column.name: number for number, column in enumerate(table.columns, 1)}
    return PartitionSpec(
        *(
            PartitionField(numbers[name], 1000 + at, IdentityTransform(), name)
            for at, name in enumerate(table.partition)
        )
    )


@contextlib.contextmanager
def reachable(place: str) -> Iterator[None]:
    """Raises LakeUnavailable with the place instead of the library's exceptions."""
    try:
        yield
    except AccountantError:
        raise
    except Exception as error:
        raise LakeUnavailable(f"{place}: {described(error)}") from error
