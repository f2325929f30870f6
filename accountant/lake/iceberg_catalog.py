"""Opens the lake's Iceberg catalog, replaces whole partitions of its tables, and removes old versions of the tables.

A commit of Iceberg replaces one pointer. Writers of other partitions can commit at the same time: the library validates
and repeats the commit. If a commit gives no answer, `committed` looks for its id in the table's snapshots: the commit
succeeded if and only if a snapshot has it.

When a closed month is published, the current versions of the tables with its usage and statement are tagged. A tagged
version is never removed, so the month stays readable as it was stated. A file is removed only if no remaining version
needs it and it is older than the age limit of versions plus one day, because a newer file can belong to a commit in
progress."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa
import pyarrow.fs
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
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
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import BooleanType, DateType, DecimalType, LongType, NestedField, StringType, TimestamptzType

from accountant.core.errors import LakeUnavailable
from accountant.core.settings import Lake, secret_properties
from accountant.lake.tables import DECIMALS, TABLES, ColumnType, LakeTable
from gputally.base.errors import AccountantError, without_password
from gputally.base.units import MS_PER_SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyiceberg.types import IcebergType

# The first rows of a partition replace none, and the library warns about that.
warnings.filterwarnings("ignore", message="Delete operation did not match any records", category=UserWarning)

NAMESPACE: Final = "gputally"
BATCH: Final = "gputally.batch-id"
"""Property of a snapshot that identifies the commit, so that its outcome can be looked up."""
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
    "commit.retry.num-retries": "10",
    "commit.retry.max-wait-ms": "1000",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    "write.parquet.row-group-limit": "15000",
    "write.parquet.compression-codec": "zstd",
}
_GRACE: Final = timedelta(days=1)
"""A file is never removed earlier than this after it was written."""
_MOST_FILES: Final = 10_000
"""Maximum number of files that one run removes per table; the next run continues."""


@dataclass(frozen=True, slots=True)
class Removed:
    """The numbers of table versions and of files that one run removed."""

    versions: int = 0
    files: int = 0


class Catalogue:
    """The lake's tables. Methods raise LakeUnavailable with the place and the reason."""

    def __init__(self, catalog: Catalog, place: str) -> None:
        self._catalog = catalog
        self.place = place

    @classmethod
    def connect(cls, settings: Lake) -> Catalogue:
        """Opens the catalog in the settings, and creates its namespace if it is missing."""
        secrets = secret_properties(settings.secrets)
        properties = {**settings.catalog.properties, **secrets, "warehouse": _address(settings.warehouse)}
        uri = settings.catalog.uri
        if settings.catalog.type == "sql":
            uri = uri or _sqlite_in(settings.warehouse)
            if uri.startswith("sqlite:///"):
                Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        if uri:
            properties["uri"] = uri
        place = (
            f"{settings.catalog.type} catalog {without_password(uri)}".rstrip() + f", warehouse {settings.warehouse}"
        )
        with _reachable(place):
            if settings.catalog.type == "rest":
                catalog: Catalog = _rest_catalog(settings.catalog.name, properties)
            else:
                catalog = load_catalog(settings.catalog.name, type=settings.catalog.type, **properties)
            catalog.create_namespace_if_not_exists(NAMESPACE)
        return cls(catalog, place)

    def close(self) -> None:
        """Closes the connections; the next query opens others."""
        self._catalog.close()

    def create_missing(self) -> None:
        """Creates the tables that do not exist yet."""
        for table in TABLES:
            self.open(table)

    def open(self, table: LakeTable) -> Table:
        """The newest version of a table."""
        name = (NAMESPACE, table.name)
        with _reachable(self.place):
            try:
                return self._catalog.load_table(name)
            except NoSuchTableError:
                try:
                    return self._catalog.create_table(
                        name, _schema(table), partition_spec=_partitions(table), properties=_PROPERTIES
                    )
                except (TableAlreadyExistsError, NamespaceAlreadyExistsError):
                    return self._catalog.load_table(name)

    def replace(self, table: LakeTable, rows: pa.Table, partition: Mapping[str, object | Sequence[object]]) -> None:
        """Replaces the content of the partitions with these rows; idempotent. partition: by column, the value or the
        values of the partitions."""
        rows = rows.cast(table.arrow)
        replaced = rows_where(partition)
        batch = str(uuid.uuid4())
        failure: Exception | None = None
        for attempt in range(_TRIES):
            if failure is not None:
                time.sleep(_RANDOM.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)))
            opened = self.open(table)
            if failure is not None and committed(opened, batch):
                return
            try:
                opened.overwrite(rows, replaced, snapshot_properties={BATCH: batch})
            except (CommitFailedException, CommitStateUnknownException, ValidationException) as error:
                failure = error  # another writer was faster, or the outcome is unknown: the next try checks
            except Exception as error:
                if failure is not None:
                    raise LakeUnavailable(f"{self.place}: {table.name} was not written: {described(error)}") from error
                failure = error
            else:
                return
        raise LakeUnavailable(f"{self.place}: {table.name} was not written: {described(failure)}") from failure

    def tag(self, table: LakeTable, name: str) -> None:
        """Tags the newest version of a table permanently. If the name is in use already, nothing changes."""
        with _reachable(self.place):
            opened = self.open(table)
            snapshot = opened.current_snapshot()
            if snapshot is not None and name not in opened.refs():
                opened.manage_snapshots().create_tag(snapshot.snapshot_id, name).commit()

    def read(self, table: LakeTable, ledger: str) -> list[dict[str, Any]]:
        """A ledger's rows of a small table."""
        with _reachable(self.place):
            rows: list[dict[str, Any]] = self.open(table).scan(rows_where({"ledger": ledger})).to_arrow().to_pylist()
            return rows

    def remove_old_versions(self, now_ms: int, keep_s: int) -> Removed:
        """Removes versions older than keep_s seconds, and then the files that no version needs."""
        oldest = datetime.fromtimestamp(now_ms / MS_PER_SECOND, UTC) - timedelta(seconds=keep_s)
        versions = files = 0
        for table in TABLES:
            with _reachable(self.place):
                opened = self.open(table)
                before = len(opened.snapshots())
                try:
                    opened.maintenance.expire_snapshots().older_than(oldest).commit()
                except CommitFailedException:
                    continue  # another writer was faster; the next run tries again
                opened = self.open(table)
                versions += before - len(opened.snapshots())
                files += _remove_orphans(opened, oldest - _GRACE)
        return Removed(versions, files)


def _rest_catalog(name: str, properties: Mapping[str, str]) -> Catalog:
    """A REST catalog whose calls end: the library waits for an answer for ever."""
    from pyiceberg.catalog.rest import RestCatalog

    class BoundedRestCatalog(RestCatalog):
        def _create_session(self) -> Any:
            session = super()._create_session()
            session.request = functools.partial(session.request, timeout=ANSWER_S)  # type: ignore[method-assign]
            return session

    return BoundedRestCatalog(name, **properties)


def _remove_orphans(table: Table, before: datetime) -> int:
    """Removes files that no version needs and that were written before this time; returns how many."""
    needed = _needed_files(table)
    io: Any = table.io
    scheme, netloc, folder = io.parse_location(table.location(), io.properties)
    store = io.fs_by_scheme(scheme, netloc)
    removed = 0
    for entry in store.get_file_info(pyarrow.fs.FileSelector(folder, recursive=True, allow_not_found=True)):
        old = entry.mtime is not None and entry.mtime < before
        is_file = entry.type == pyarrow.fs.FileType.File
        if is_file and old and entry.path not in needed and removed < _MOST_FILES:
            with contextlib.suppress(FileNotFoundError):  # the accountant of another ledger was faster
                store.delete_file(entry.path)
                removed += 1
    return removed


def _needed_files(table: Table) -> set[str]:
    """The paths of all files that a version of the table needs, including its metadata."""
    io: Any = table.io
    locations = {table.metadata_location, *(entry.metadata_file for entry in table.metadata.metadata_log)}
    for snapshot in table.snapshots():
        locations.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in locations:  # versions share most of their manifests
                locations.add(manifest.manifest_path)
                locations |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)}
    return {io.parse_location(location, io.properties)[2] for location in locations}


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
    return f"sqlite:///{folder}/catalog.db"


def _schema(table: LakeTable) -> Schema:
    return Schema(
        *(
            NestedField(number, column.name, _ICEBERG[column.type], required=False, doc=column.text)
            for number, column in enumerate(table.columns, 1)
        )
    )


def _partitions(table: LakeTable) -> PartitionSpec:
    numbers = {column.name: number for number, column in enumerate(table.columns, 1)}
    return PartitionSpec(
        *(
            PartitionField(numbers[name], 1000 + at, IdentityTransform(), name)
            for at, name in enumerate(table.partition)
        )
    )


@contextlib.contextmanager
def _reachable(place: str) -> Iterator[None]:
    """Raises LakeUnavailable with the place instead of the library's exceptions."""
    try:
        yield
    except AccountantError:
        raise
    except Exception as error:
        raise LakeUnavailable(f"{place}: {described(error)}") from error
