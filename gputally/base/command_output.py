"""Prints the result of a command as a table, JSON or CSV.

JSON holds everything, figures exact: decimals as text, unknown null. CSV holds one record a line: nested names are
joined by a dot, several values by a semicolon, unknown is empty, and no text is taken for a formula by a
spreadsheet. What a record means its command says; this knows no command. The standard library alone, but for tables,
which come from rich and are drawn by it.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Literal, TextIO

from gputally.base.untrusted_text import for_cell, for_json

if TYPE_CHECKING:
    from rich.console import RenderableType

Output = Literal["table", "json", "csv"]
OUTPUTS: tuple[Output, ...] = ("table", "json", "csv")
UNWATCHED = 160
"""Columns of a table without a terminal and without COLUMNS, so that one in a file keeps its shape."""


def show(
    output: Output,
    table: Callable[[], RenderableType],
    document: object,
    records: Iterable[Mapping[str, object]] | None = None,
    *,
    to: TextIO | None = None,
) -> None:
    """Print it. document: what JSON shows, of plain values. records: the lines of CSV; without them those of the
    document, which is a list then. to: instead of standard output."""
    stream = to or sys.stdout
    if output == "json":
        stream.write(for_json(json.dumps(document, indent=2, ensure_ascii=False, default=_plain)) + "\n")
    elif output == "csv":
        lines = document if records is None else records
        assert isinstance(lines, Iterable), "a document that is no list comes with its records"
        write_csv([flat(record) for record in lines], stream)
    else:
        draw(table(), stream)


def draw(what: RenderableType, to: TextIO | None = None) -> None:
    """Something of rich's, as wide as the terminal. Texts are shown as they are: a name or an answer of an API server
    may hold what rich would take for markup (`[denied]`, `:warning:`), and leave out."""
    from gputally.base.terminal import Terminal

    stream = to or sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else UNWATCHED
    Terminal(file=stream, width=width).print(what)


def write_csv(rows: Sequence[Mapping[str, object]], to: TextIO) -> None:
    """Flat rows under all their names, in the order in which they first appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = csv.DictWriter(to, names, restval="", lineterminator="\n")
    out.writeheader()
    out.writerows(rows)


def flat(record: Mapping[str, object]) -> dict[str, object]:
    """A record without records in it."""
    found: dict[str, object] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": cell for inner, cell in flat(value).items()}
        else:
            found[name] = _cell(value)
    return found


def _cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return value
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, list | tuple):
        return for_cell(";".join(_part(part) for part in value))
    return for_cell(str(value))


def _part(value: object) -> str:
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False, default=_plain) if isinstance(value, Mapping) else str(value)


def _plain(value: object) -> object:
    return format(value, "f") if isinstance(value, Decimal) else str(value)
