"""A long list in pages: which rows one shows, and where the others are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """rows: of `count`, the first of them with number `first` (from 1). previous, following: addresses."""

    rows: Sequence[T]
    first: int
    count: int
    previous: str | None
    following: str | None

    @property
    def last(self) -> int:
        return self.first + len(self.rows) - 1

    @property
    def whole(self) -> bool:
        """Whether there is no other page."""
        return len(self.rows) == self.count


def paged(rows: Sequence[T], number: int, size: int, address: str, count: int | None = None) -> Page[T]:
    """The page with that number, from 1; behind the end the last one. address: of a page, but for its number.
    count: of all rows, where not all of them are at hand."""
    pages = max(1, -(-len(rows) // size))
    number = min(number, pages)
    first = (number - 1) * size
    return Page(
        rows[first : first + size],
        first + 1,
        len(rows) if count is None else count,
        f"{address}{number - 1}" if number > 1 else None,
        f"{address}{number + 1}" if number < pages else None,
    )
