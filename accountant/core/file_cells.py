"""Writes the cells of a list's CSV."""

from __future__ import annotations

from decimal import Decimal

from accountant.core import periods
from accountant.wire.list_fields import FileCell, FileKind
from gputally.base.money import plain
from gputally.base.untrusted_text import for_cell


def cell_text(value: FileCell, kind: FileKind) -> str:
    """A cell as text: exact decimals, instants in UTC, texts safe for spreadsheets, what is unknown empty."""
    if value is None:
        return ""
    if isinstance(value, Decimal):
        return plain(value)
    if kind == "instant":
        return periods.utc(int(value))
    return for_cell(value) if isinstance(value, str) else repr(value)
