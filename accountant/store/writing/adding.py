"""A few rows into a table, the cheapest way there is.

Lists as parameters cost a small statement half of what an Arrow table does; many rows want the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from accountant.store.database import Cursor, once
from accountant.store.writing import columns

MOST_AS_LISTS = 64


def add(cursor: Cursor, table: str, schema: pa.Schema, rows: Sequence[Sequence[object]]) -> None:
    """Append rows, whose columns are those of the table in `schema`'s order."""
    if not rows:
        return
    if len(rows) <= MOST_AS_LISTS:
        lists = [list(column) for column in zip(*rows, strict=True)]
        cursor.plainly(f"INSERT INTO {table} SELECT {', '.join(['unnest(?)'] * len(lists))}", lists)
    else:
        cursor.plainly(f"INSERT INTO {table} FROM incoming", incoming=once(columns.table(schema, rows)))
