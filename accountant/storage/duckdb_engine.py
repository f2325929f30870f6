"""Opens, locks and migrates the ledger's DuckDB file, runs SQL on it, and translates engine errors.

In `accountant.storage` only this module and `invoice_file` import duckdb. Each `Cursor` is a connection of its own, and
every call but `Cursor.each` reads its result to the end. Rows are passed in through Arrow. The statements are files in
`sql/`. Engine errors become `LedgerFailed` if the process has to end, otherwise `LedgerUnavailable`. Of the tables this
module knows only that some have figures of rows or sums."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import duckdb
import pyarrow as pa

from accountant.core.errors import LedgerFailed, LedgerLocked, LedgerUnavailable
from accountant.core.gpu_time_accounts import CELLS
from accountant.storage import crash_recovery
from gputally.base.atomic_file import sync
from gputally.base.called_off import stoppable
from gputally.base.errors import AccountantError
from gputally.base.measures import REPORTED

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

DUPLICATE = "duplicate"
"""Name under which the file of a copy is attached."""
Row = tuple[Any, ...]
_ROWS_AT_ONCE: Final = 2_048
Parameters = Mapping[str, object] | Sequence[object] | None


_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def sums_of(figures: Iterable[str]) -> str:
    """SQL for the sums of these columns, which keep their names."""
    return ", ".join(f"sum({name})::BIGINT AS {name}" for name in figures)


_TIMES: Final = {"held": "busy_us + idle_us + unknown_us", "in service": "busy_us + idle_us + unknown_us + unheld_us"}
_IF_LACKING: Final = {
    name: sql for each in REPORTED for name, sql in ((each.field, "0"), (each.unknown_column, _TIMES[each.known]))
}
"""SQL for the figures of rows and sums from before a measure: all of it is unknown."""
_OF_CELLS: Final = {
    "cells": ", ".join(CELLS),
    "sums_of_cells": sums_of(CELLS),
    "columns_of_cells": ", ".join(f"{name} BIGINT NOT NULL" for name in CELLS),
    "cells_or_unknown": ", ".join(
        f"coalesce({name}, {_IF_LACKING[name]}) AS {name}" if name in _IF_LACKING else name for name in CELLS
    ),
    "measures_if_known": ", ".join(f"CASE WHEN {one.unknown_column} = 0 THEN {one.field} END" for one in REPORTED),
    "nulls_of_measures": ", ".join(f"NULL::BIGINT AS {name}" for name in _IF_LACKING),
}
"""SQL for the figures of a row or a sum (accountant.core.gpu_time_accounts.CELLS): their names, their sums, their
definitions, their values where those of a measure may be null; the measures of a row where they are known; and a row in
which all of them are null."""


@cache
def _template(name: str) -> tuple[str, frozenset[str]]:
    """Return the text of sql/<name>.sql without its comments, and the names of its placeholders."""
    file = resources.files("accountant.storage") / "sql" / f"{name}.sql"
    if not file.is_file():
        raise ValueError(f"sql/{name}.sql does not exist, and no text is given for the placeholder {name}")
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    code = "".join(line for line in lines if not line.startswith("--"))
    return code, frozenset(_PLACEHOLDER.findall(code))


def statement(name: str, **parts: str) -> str:
    """Return the text of sql/<name>.sql with each placeholder `{other}` replaced by the given part, or else by the
    statement sql/<other>.sql. The names in `_OF_CELLS` need no part.

    Parts are SQL from this package, such as names of tables and columns; values are passed as parameters. Raises
    ValueError for a part without a placeholder, and for a placeholder with neither a part nor a statement."""
    text, placeholders = _template(name)
    if not parts.keys() <= placeholders:
        raise ValueError(f"sql/{name}.sql has the placeholders {sorted(placeholders)}, given are {sorted(parts)}")
    if not placeholders:
        return text
    return _filled(text, parts)


def _filled(text: str, parts: Mapping[str, str]) -> str:
    known = {**_OF_CELLS, **parts}
    return _PLACEHOLDER.sub(lambda found: known[found[1]] if found[1] in known else statement(found[1]), text)


def one_line(error: BaseException) -> str:
    """Return the first line of DuckDB's message, without the query text and the stack that follow it."""
    return str(error).split("\n", 1)[0].strip() or type(error).__name__


def _translated(error: duckdb.Error) -> AccountantError:
    if isinstance(error, duckdb.FatalException):
        return LedgerFailed(f"the database is no longer usable, restart the accountant: {one_line(error)}")
    remedy = ": restore a backup with: gputally accountant restore" if "Corrupt database file" in str(error) else ""
    return LedgerUnavailable(one_line(error) + remedy)


def streamed(table: pa.Table) -> Any:
    """Return the table as a stream, which DuckDB reads in half to two thirds of the time that a table takes; None for
    None.

    A statement may name a stream only once and outside WITH, because reading a stream twice ends the process."""
    return None if table is None else table.__arrow_c_stream__()


class Cursor:
    """Runs statements on a connection of its own. If the current work is called off, a query is interrupted and raises
    `gputally.base.called_off.CalledOff`. A statement refers to the tables passed with it as `incoming`,
    `payers` and `kinds`."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._optimising = True
        self._reading = False
        """Whether `each` has rows left, which another statement would take from it."""

    def rows(
        self,
        name: str,
        parameters: Parameters = None,
        incoming: pa.Table = None,
        kinds: pa.Table = None,
    ) -> list[Row]:
        """Run sql/<name>.sql and return all rows."""
        return self.run(statement(name), parameters, incoming, kinds)

    def run(
        self,
        sql: str,
        parameters: Parameters = None,
        incoming: pa.Table = None,  # noqa: ARG002 - DuckDB finds a table by the name of a local variable, since
        kinds: pa.Table = None,  # noqa: ARG002 - registering one takes 0.5 ms, more than the statement itself
    ) -> list[Row]:
        """Run a statement and return all rows."""
        try:
            self._optimise(True)
            with stoppable(self._connection.interrupt):
                return self._connection.execute(sql, parameters).fetchall()
        except duckdb.Error as error:
            raise _translated(error) from error

    def each(self, sql: str, parameters: Parameters = None) -> Iterator[Row]:
        """Run a statement and yield its rows, which are not in memory together. Until the last one has been read the
        cursor runs nothing else."""
        try:
            self._optimise(True)
            with stoppable(self._connection.interrupt):
                self._connection.execute(sql, parameters)
            self._reading = True
            while True:
                with stoppable(self._connection.interrupt):
                    rows = self._connection.fetchmany(_ROWS_AT_ONCE)
                if not rows:
                    break
                yield from rows
        except duckdb.Error as error:
            raise _translated(error) from error
        finally:
            self._reading = False

    def fix(self, table: str) -> None:
        """Fix the snapshot of a transaction that has just begun. DuckDB does so when it first looks a table up, which
        takes a quarter of the time of a query."""
        try:
            self._connection.table(table)
        except duckdb.Error as error:
            raise _translated(error) from error

    def plainly(self, sql: str, parameters: Parameters = None) -> list[Row]:
        """Run a statement without DuckDB's optimiser, which saves a quarter of a small statement's time, and return all
        rows. Use it to add rows or to look them up by one column, and not for joins or views."""
        try:
            self._optimise(False)
            return self._connection.execute(sql, parameters).fetchall()
        except duckdb.Error as error:
            raise _translated(error) from error

    def insert(self, table: str, rows: pa.Table) -> None:
        """Append rows, whose columns are those of the table in its order. As a statement this takes four fifths of the
        time that a relation of DuckDB's takes."""
        incoming = streamed(rows)  # noqa: F841 - as in `run`
        try:
            self._optimise(False)
            self._connection.execute(f"INSERT INTO {table} FROM incoming")
        except duckdb.Error as error:
            raise _translated(error) from error

    def _optimise(self, wanted: bool) -> None:
        assert not self._reading, "another statement's rows are being read"
        if wanted != self._optimising:
            self._connection.execute(f"PRAGMA {'enable' if wanted else 'disable'}_optimizer")
            self._optimising = wanted

    def columns(
        self,
        sql: str,
        parameters: Parameters = None,
        incoming: pa.Table = None,  # noqa: ARG002 - as above
        payers: pa.Table = None,  # noqa: ARG002
        kinds: pa.Table = None,  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Run a statement and return the result as numpy arrays by column name, for many rows of numbers."""
        try:
            self._optimise(True)
            with stoppable(self._connection.interrupt):
                found: Mapping[str, Any] = self._connection.execute(sql, parameters).fetchnumpy()
        except duckdb.Error as error:
            raise _translated(error) from error
        return found

    def attach(self, path: Path) -> None:
        """Attach the file at `path` as the database `DUPLICATE`."""
        if any(not character.isprintable() for character in str(path)):
            raise LedgerUnavailable(f"{str(path)!r}: the path has control characters: choose another path")
        literal = str(path).replace("'", "''")
        self.run(f"ATTACH '{literal}' AS {DUPLICATE}")

    def rollback(self) -> None:
        """End a failed transaction. It is no error if the engine has already ended it."""
        try:
            self._connection.execute("ROLLBACK")
        except duckdb.TransactionException:
            return
        except duckdb.Error as error:
            raise _translated(error) from error

    def close(self) -> None:
        self._connection.close()


def fingerprints(cursor: Cursor) -> dict[str, tuple[int, int]]:
    """Return, for each table, its number of rows and a checksum that does not depend on their order."""
    tables = cursor.run(
        "SELECT table_name FROM information_schema.tables WHERE table_catalog = current_database() "
        "AND table_schema = 'main' AND table_type = 'BASE TABLE' ORDER BY ALL"
    )
    sums = "SELECT count(*), coalesce(sum(hash(t)::HUGEINT), 0) FROM"
    return {name: (count, total) for (name,) in tables for count, total in cursor.run(f"{sums} {name} t")}


class Migration(NamedTuple):
    """One step of the schema: statements that a ledger lacks if it was written before this step."""

    name: str
    sql: str


@cache
def migrations() -> tuple[Migration, ...]:
    """Return the steps of migrations/ in order. The first one creates the schema."""
    folder = resources.files("accountant.storage") / "migrations"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return tuple(Migration(file.name, _filled(file.read_text(encoding="utf-8"), {})) for file in files)


class Database:
    """Opens, locks and migrates the database file. Raises LedgerLocked, LedgerUnavailable or LedgerDamaged with the
    place and the reason.

    steps: all steps of the schema; the file gets those that it lacks.
    threads: the number of DuckDB's threads; None: as many as DuckDB chooses. With 1, each query runs in the calling
    thread. Readers still run in parallel, and a small commit takes half the CPU time that it takes with a thread
    pool."""

    def __init__(
        self,
        path: Path,
        memory_limit: str = "512MB",
        threads: int | None = 1,
        steps: Sequence[Migration] | None = None,
    ) -> None:
        self.path = path
        self._wal = path.with_name(path.name + ".wal")
        self._lock = lock_ledger(path)
        try:
            if not path.exists():
                _create(path)
            crash_recovery.prepare_log(path)
            crash_recovery.restore_blocks(path)
            # DuckDB's automatic checkpoint is only a fallback. The ledger's own checkpoints run between transactions
            # and record how far each outbox is checkpointed (`transactions`).
            settings: dict[str, Any] = {"checkpoint_threshold": "1GB", "memory_limit": memory_limit}
            if threads is not None:
                settings["threads"] = threads
            self._connection = duckdb.connect(str(path), config=settings)
            self._file = path.open("rb")
        except (duckdb.Error, OSError) as error:
            self._lock.close()
            reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
            raise LedgerUnavailable(
                f"{path}: cannot be opened: {reason}: check its permissions and the free disk space, or restore a "
                "backup with: gputally accountant restore"
            ) from error
        except BaseException:
            self._lock.close()
            raise
        try:
            self._migrate(migrations() if steps is None else steps)
        except BaseException:
            self._connection.close()
            self._file.close()
            self._lock.close()
            raise

    def reach(self, files: AbstractFileSystem | None) -> None:
        """Let statements name the files of an object store by their URLs. files: None if there is no object store."""
        if files is not None:
            self._connection.register_filesystem(files)

    def _migrate(self, steps: Sequence[Migration]) -> None:
        with self.cursor() as cursor:
            cursor.run("CREATE TABLE IF NOT EXISTS migration (number INTEGER NOT NULL, name VARCHAR NOT NULL)")
            done = cursor.run("SELECT coalesce(max(number), 0) FROM migration")[0][0]
            if done > len(steps):
                raise LedgerUnavailable(
                    f"{self.path}: written by a newer release (schema {done}, known {len(steps)}):"
                    " start that release, or restore the backup from before the upgrade"
                )
            # All in one transaction: after a crash the file has the old schema or the new one, and only one sync is
            # needed.
            if pending := steps[done:]:
                cursor.run("BEGIN")
                for step in pending:
                    cursor.run(step.sql)
                cursor.run(
                    "INSERT INTO migration SELECT unnest(?::INTEGER[]), unnest(?::VARCHAR[])",
                    [list(range(done + 1, len(steps) + 1)), [step.name for step in pending]],
                )
                cursor.run("COMMIT")
            self._add_measures(cursor)
            # Never leave schema changes and rows in the same write-ahead log; start with an empty one.
            self.checkpoint(cursor)

    def _add_measures(self, cursor: Cursor) -> None:
        """Give every table of rows or sums the columns of the measures that it lacks, in one transaction."""
        lacking = {}
        for table, sql in cursor.run(
            "SELECT table_name, sql FROM duckdb_tables() WHERE database_name = current_database() "
            "AND contains(sql, ' busy_us BIGINT')"
        ):
            there = tuple(re.findall(r"(\w+) BIGINT", sql[sql.index(" busy_us ") :]))
            if there != CELLS[: len(there)]:
                raise LedgerUnavailable(
                    f"{self.path}: written by another release, whose table {table} has {', '.join(there)}:"
                    " start that release, or restore the backup from before the upgrade"
                )
            if there != CELLS:
                lacking[table] = sql.rstrip(");"), CELLS[len(there) :]
        if not lacking:
            return
        cursor.run("BEGIN")
        # The engine adds no column that has to have a value, so each table is written again.
        for table, (sql, names) in lacking.items():
            values = ", ".join(_IF_LACKING[name] for name in names)
            definition = ", ".join([sql, *(f"{name} BIGINT NOT NULL" for name in names)]) + ")"
            cursor.run(f"ALTER TABLE {table} RENAME TO before_measures")
            cursor.run(definition)
            cursor.run(f"INSERT INTO {table} SELECT *, {values} FROM before_measures")  # noqa: S608
            cursor.run("DROP TABLE before_measures")
        cursor.run(_filled("CREATE OR REPLACE VIEW present AS {present}", {}))
        cursor.run("CREATE OR REPLACE VIEW entry AS FROM present")
        cursor.run("COMMIT")

    def checkpoint(self, cursor: Cursor) -> None:
        """Write the log into the file. If the process is killed meanwhile, the next opening restores the state before
        the checkpoint."""
        try:
            crash_recovery.save_blocks(
                self.path, self._file.fileno(), (number for (number,) in cursor.run(crash_recovery.IN_PLACE))
            )
        except OSError as error:
            raise LedgerUnavailable(f"{self.path}: the checkpoint failed: {error.strerror}") from error
        cursor.run("CHECKPOINT")

    @contextmanager
    def cursor(self) -> Iterator[Cursor]:
        try:
            cursor = Cursor(self._connection.cursor())
        except duckdb.Error as error:
            raise LedgerUnavailable(f"{self.path}: the ledger is closed") from error
        try:
            yield cursor
        finally:
            cursor.close()

    def wal_bytes(self) -> int:
        """Return the size of the write-ahead log."""
        try:
            return self._wal.stat().st_size
        except FileNotFoundError:
            return 0

    def free_bytes(self) -> int:
        """Return the free space for this process on the ledger's file system."""
        space = os.statvfs(self.path.parent)
        return space.f_bavail * space.f_frsize

    def duplicate(self, cursor: Cursor) -> dict[str, tuple[int, int]]:
        """Copy everything in the snapshot of `cursor` to the file that `duplicating` attached, end the snapshot, and
        return the fingerprint of every table.

        Writers continue meanwhile. The file itself must not be copied, because closing it would release DuckDB's
        lock."""
        source = cursor.run("SELECT current_database()")[0][0]
        cursor.run(f'COPY FROM DATABASE "{source}" TO {DUPLICATE}')
        copied = fingerprints(cursor)
        cursor.run("COMMIT")
        return copied

    @contextmanager
    def duplicating(self, path: Path) -> Iterator[None]:
        """Attach a new, empty file for `duplicate` while the block runs. Only one file can be attached at a time."""
        if path.exists():
            raise LedgerUnavailable(f"{path}: the file exists already and is not overwritten: choose another name")
        with self.cursor() as cursor:
            cursor.attach(path)
            try:
                yield
            finally:
                cursor.run(f"DETACH {DUPLICATE}")

    def close(self) -> None:
        """Run a checkpoint and close the file. Idempotent."""
        # The engine's own checkpoint at closing does not save the blocks that it overwrites. Ours therefore runs first
        # if there is anything to write.
        with suppress(AccountantError), self.cursor() as cursor:
            if self.wal_bytes():
                self.checkpoint(cursor)
        self._connection.close()
        self._file.close()
        if not self.wal_bytes():  # otherwise the last checkpoint was not completed
            crash_recovery.block_copy_path(self.path).unlink(missing_ok=True)
        self._lock.close()


def _create(path: Path) -> None:
    """Create an empty database under another name and then rename it, because the engine cannot open an incomplete
    file, such as one that a power failure leaves."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    duckdb.connect(str(fresh)).close()
    sync(fresh)
    fresh.replace(path)
    sync(path.parent)


def lock_ledger(path: Path) -> IO[bytes]:
    """Lock `path` against every other process, and against a second opening in this one.

    Raises LedgerLocked if it is locked already; LedgerUnavailable if it cannot be locked."""
    place = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = place.open("ab")
    except OSError as error:
        raise LedgerUnavailable(f"{path}: the folder cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        if isinstance(error, BlockingIOError):
            raise LedgerLocked(
                f"{path}: another process has this ledger open, and only one may: stop that process first"
            ) from error
        raise LedgerUnavailable(
            f"{path}: cannot be locked: {error.strerror}: use a volume whose file system has locks"
        ) from error
    return lock
