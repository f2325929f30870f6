"""The order of lists and tables of pages, of accountant and controller.

A list has the parameter `sort`, an `Order`. A page with several tables has one `sort` for all of them, whose column is
`TABLE.COLUMN`: the table that it names is sorted, the others have their usual order. The heads of columns are links, so
that a page needs no script and its address reproduces it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from accountant.wire.option_types import Order, Orders

T = TypeVar("T")


def in_order(rows: Sequence[T], rank: Callable[[T], Any], *, descending: bool) -> list[T]:
    """The rows by their rank; those of equal rank stay as they are. Those whose rank is None are last; before them are
    those whose rank is a tuple that begins with None, by its rest."""
    ranked = [(rank(row), row) for row in rows]
    known = [pair for pair in ranked if pair[0] is not None and not _is_partly_known(pair[0])]
    partly = [pair for pair in ranked if _is_partly_known(pair[0])]
    known.sort(key=lambda pair: pair[0], reverse=descending)
    partly.sort(key=lambda pair: pair[0][1:], reverse=descending)
    return [row for _, row in (*known, *partly)] + [row for value, row in ranked if value is None]


def _is_partly_known(rank: Any) -> bool:
    return isinstance(rank, tuple) and rank[0] is None


@dataclass(frozen=True, slots=True)
class ListOrder:
    """The order of a list, for the links of its heads.

    address: returns the address of the list with other parameters.
    ascends: whether a column begins with the smallest when it is chosen."""

    address: Callable[..., str]
    sort: Order
    ascends: Callable[[str], bool]

    def sorted_by(self, name: str) -> str:
        """The address of the list sorted by a column; the other way round if it is so already."""
        first = Order.read(name, self.ascends)
        return self.address(sort=str(first.turned if self.sort == first else first))

    def order(self, name: str) -> str:
        """`ascending` or `descending` if the list is sorted by this, otherwise ""."""
        if name != self.sort.column:
            return ""
        return "descending" if self.sort.descending else "ascending"


UNSORTED: Final = Order("")
"""The order of a page whose tables have their usual ones."""


@dataclass(frozen=True, slots=True)
class PageTables:
    """The tables of a page that can be sorted.

    columns: by table and column, what its rows are sorted by; None is unknown, and last.
    texts: the columns, without their tables, that begin with the smallest when they are chosen."""

    columns: Mapping[str, Mapping[str, Callable[[Any], Any]]]
    texts: frozenset[str] = frozenset()

    @property
    def _orders(self) -> Orders:
        names = tuple(f"{table}.{column}" for table, columns in self.columns.items() for column in columns)
        return Orders(names, frozenset(filter(self._ascends, names)))

    def _ascends(self, name: str) -> bool:
        return name.partition(".")[2] in self.texts

    def sorting(self, sort: str = "", path: str = "", **given: object) -> TableSorting:
        """The order for a template. Raises ValueError for a column that no table has.

        sort: the parameter of the page; "" for the usual orders.
        path, given: the address of the page, with its other parameters as far as they are set."""
        kept = {name: value for name, value in given.items() if value not in (None, "")}

        def address(sort: str) -> str:
            return f"{path}?{urlencode({**kept, 'sort': sort}, safe=':')}"

        return TableSorting(address, self._orders.read(sort) if sort else UNSORTED, self._ascends, self)


@dataclass(frozen=True, slots=True)
class TableSorting(ListOrder):
    """The order of a page's tables, for the links of their heads and for their rows."""

    tables: PageTables

    def sorted_by(self, name: str) -> str:
        """As of `ListOrder`; the address leads to the table."""
        return f"{ListOrder.sorted_by(self, name)}#{name.partition('.')[0]}"

    def rows(self, table: str, rows: Sequence[T]) -> Sequence[T]:
        """The rows of a table in their order."""
        name, _, column = self.sort.column.partition(".")
        if name != table:
            return rows
        return in_order(rows, self.tables.columns[table][column], descending=self.sort.descending)
