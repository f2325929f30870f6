"""Names to small whole numbers, inside one transaction.

A `Dictionary` remembers names that are committed; what a transaction adds is staged and either
`commit`ted or thrown away with the transaction. Names not remembered are looked up in the table, so
memory stays bounded however many pods there ever were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar, cast

import pyarrow as pa

from accountant.store.database import Cursor
from accountant.store.writing.adding import add

Name = TypeVar("Name", bound=tuple[str | int, ...])
"""The columns of a table behind its `id`, in order."""


class Dictionary(Generic[Name]):
    """Ids of one table whose first column is `id`. Not thread-safe: the writer owns it."""

    def __init__(
        self, table: str, columns: tuple[str, ...], numeric: frozenset[str] = frozenset(), keep: int = 200_000
    ) -> None:
        self._table = table
        self._columns = columns
        self._schema = pa.schema(
            [("id", pa.int32()), *((c, pa.int64() if c in numeric else pa.string()) for c in columns)]
        )
        self._keep = keep
        self._known: dict[Name, int] = {}
        self._staged: dict[Name, int] = {}
        self._next: int | None = None
        self._complete = False
        """Every name of the table is remembered."""

    def resolve(self, cursor: Cursor, names: Iterable[Name]) -> dict[Name, int]:
        """The id of each name; new names get the next free one and a row in the table."""
        if self._next is None:
            self._open(cursor)
        ids = {name: self._known.get(name, 0) or self._staged.get(name, 0) for name in names}
        missing = [name for name, number in ids.items() if not number]
        if missing:
            found = {} if self._complete else self._find(cursor, missing)
            found |= self._add(cursor, [name for name in missing if name not in found])
            self._staged |= found
            ids |= found
        return ids

    def _open(self, cursor: Cursor) -> None:
        count, highest = cursor.run(f"SELECT count(*), coalesce(max(id), 0) FROM {self._table}")[0]  # noqa: S608
        self._next = highest + 1
        self._complete = count <= self._keep
        if self._complete:
            columns = ", ".join(self._columns)
            for number, *name in cursor.run(f"SELECT id, {columns} FROM {self._table}"):  # noqa: S608
                self._known[cast(Name, tuple(name))] = number

    def _add(self, cursor: Cursor, names: list[Name]) -> dict[Name, int]:
        assert self._next is not None
        fresh = {name: self._next + i for i, name in enumerate(names)}
        if fresh:
            self._next += len(fresh)
            add(cursor, self._table, self._schema, [(number, *name) for name, number in fresh.items()])
        return fresh

    def commit(self) -> None:
        """The transaction is durable."""
        if len(self._known) + len(self._staged) > self._keep:
            self._known.clear()
            self._complete = False
        self._known |= self._staged
        self._staged.clear()

    def forget(self) -> None:
        """The transaction failed, or nobody knows: believe the table alone."""
        self._staged.clear()
        self._known.clear()
        self._next = None

    def _find(self, cursor: Cursor, names: list[Name]) -> dict[Name, int]:
        match = " AND ".join(f"t.{c} = w.{c}" for c in self._columns)
        columns = ", ".join(f"t.{c}" for c in self._columns)
        sql = f"SELECT t.id, {columns} FROM {self._table} t JOIN incoming w ON {match}"  # noqa: S608
        found = {row[1:]: row[0] for row in cursor.run(sql, incoming=self._arrow(dict.fromkeys(names, 0)))}
        return {name: found[name] for name in names if name in found}

    def _arrow(self, names: dict[Name, int]) -> pa.Table:
        columns: list[list[str | int]] = [list(names.values())]
        columns += [list(column) for column in zip(*names, strict=True)]
        return pa.table(dict(zip(self._schema.names, columns, strict=True)), schema=self._schema)
