"""The columns of the files of lists: a name, the kind of the cells, and the cell of a row."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Generic, Literal, NamedTuple, TypeVar

FileKind = Literal["text", "hours", "money", "price", "float", "integer", "instant"]
"""hours, money: exact decimals. instant: epoch milliseconds."""
FileCell = str | Decimal | float | int | None
Row = TypeVar("Row")


class ListField(NamedTuple, Generic[Row]):
    """A column of a file. of: its cell of a row of the list."""

    name: str
    kind: FileKind
    of: Callable[[Row], FileCell]


def before(field: ListField[Row], then: Callable[[Row], Row | None]) -> ListField[Row]:
    """The column of a file with the figure of the span before."""

    def of(row: Row) -> FileCell:
        earlier = then(row)
        return None if earlier is None else field.of(earlier)

    return ListField(f"{field.name}_before", field.kind, of)
