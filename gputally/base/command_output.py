"""Prints the result of a command as a table, JSON or CSV.

JSON holds all fields with exact figures: decimals as text, unknown values as null. CSV holds one record per line:
nested names are joined by a dot, several values by a semicolon, unknown values are empty, and no spreadsheet treats a
cell as a formula. Each command defines its records. The module uses only the standard library, except for tables, which
rich draws."""

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
"""Width of a table in columns without a terminal and without COLUMNS, so that a table in a file keeps its shape."""


def show(
    output: Output,
    table: Callable[[], RenderableType],
    document: object,
    records: Iterable[Mapping[str, object]] | None = None,
    *,
    to: TextIO | None = None,
) -> None:
    """Print a command's result.

    document: the plain values that JSON shows.
    records: the lines of CSV, by default the items of the document.
    to: a stream other than standard output."""
    stream = to or sys.stdout
    if output == "json":
        stream.write(for_json(json.dumps(document, indent=2, ensure_ascii=False, default=_plain)) + "\n")
    elif output == "csv":
        lines = document if records is None else records
        assert isinstance(lines, Iterable), "a document that is not a list comes with its records"
        write_csv([flat(record) for record in lines], stream)
    else:
        draw(table(), stream)


def draw(what: RenderableType, to: TextIO | None = None) -> None:
    """Print a rich renderable at the terminal's width. Text is shown literally: a name or an answer of an API server
    may contain what rich would treat as markup (`[denied]`, `:warning:`) and omit."""
    from gputally.base.terminal import Terminal

    stream = to or sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else UNWATCHED
    Terminal(file=stream, width=width).print(what)


def write_csv(rows: Sequence[Mapping[str, object]], to: TextIO) -> None:
    """Write rows as CSV with the names of all rows as columns, in the order in which they first appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = csv.DictWriter(to, names, restval="", lineterminator="\n")
    out.writeheader()
    out.writerows(rows)


def flat(record: Mapping[str, object]) -> dict[str, object]:
    """Return the record with nested records flattened."""
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
