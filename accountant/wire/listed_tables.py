"""The lists that are neither of jobs nor of nodes: by which columns each can be searched and sorted.

API and commands read `search`, `sort` and `limit` of such a list by its table, as lists of jobs and nodes read theirs.
The module loads no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from accountant.wire.list_order import in_order
from accountant.wire.option_types import Order, Orders

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListedTable:
    """The columns of a list, each with its value of a row. texts: those that are searched, and that begin with the
    smallest when a list is sorted by one of them alone."""

    columns: Mapping[str, Callable[[Any], Any]]
    texts: frozenset[str]

    @property
    def orders(self) -> Orders:
        return Orders(tuple(self.columns), self.texts)

    def chosen(self, rows: Sequence[T], search: str, order: Order | None) -> list[T]:
        """The rows that have a text in one of the texts, in any case, in their order; "" and None: all, as they are."""
        wanted = search.casefold()
        found = [
            row for row in rows
            if not wanted or any(wanted in str(self.columns[name](row) or "").casefold() for name in self.texts)
        ]  # fmt: skip
        return found if order is None else in_order(found, self.columns[order.column], descending=order.descending)


def _column(name: str) -> Callable[[Any], Any]:
    return lambda row: getattr(row, name)


def _columns(names: str) -> dict[str, Callable[[Any], Any]]:
    return {name: _column(name) for name in names.split()}


CORRECTIONS: Final = ListedTable(
    _columns("month booked_in team gpu_model account price_row reason gpu_us cost amount"),
    frozenset({"month", "booked_in", "team", "gpu_model", "account", "price_row", "reason"}),
)
ADJUSTMENTS: Final = ListedTable(
    _columns("month booked_in team reason who approved_by amount at_ms"),
    frozenset({"month", "booked_in", "team", "reason", "who", "approved_by"}),
)
PRICES: Final = ListedTable(
    _columns("version origin who reason currency rows at_ms"),
    frozenset({"version", "origin", "who", "reason", "currency"}),
)
GPUS: Final = ListedTable(
    {
        "gpu": lambda row: row.gpu_uuid, "cluster": lambda row: row.cluster,
        "node": lambda row: row.owners[-1].node if row.owners else None,
        "since": lambda row: row.owners[-1].from_ms if row.owners else None,
        "owners": lambda row: len(row.owners), "claims": lambda row: len(row.claims),
    },
    frozenset({"gpu", "cluster", "node"}),
)  # fmt: skip
