"""Holds what all commands share: output as a table, JSON or CSV.

JSON holds all fields with exact figures: decimals are text and unknown values are null. CSV holds one record per line.
It joins nested names with a dot and several values with a semicolon, leaves unknown values empty, and contains no cell
that a spreadsheet treats as a formula. Each command defines its records.

The module loads nothing that draws: `--help` and JSON need no terminal (`gputally.base.terminal`)."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Literal, TextIO

from gputally.base.untrusted_text import for_cell, for_json

if TYPE_CHECKING:
    from rich.console import RenderableType

Output = Literal["table", "json", "csv"]
OUTPUTS: tuple[Output, ...] = ("table", "json", "csv")


def show(
    output: Output,
    table: Callable[[], RenderableType],
    document: object,
    records: Iterable[Mapping[str, object]] | None = None,
    *,
    to: TextIO | None = None,
) -> None:
    """Print a command's result to standard output, or to the stream `to`.

    table: returns the table.
    document: the plain values that JSON shows.
    records: the lines of CSV; None for a document that is a list of records itself."""
    stream = to or sys.stdout
    if output == "json":
        stream.write(for_json(json.dumps(document, indent=2, ensure_ascii=False, default=_plain)) + "\n")
    elif output == "csv":
        lines = document if records is None else records
        assert isinstance(lines, Iterable), "a document that is not a list comes with its records"
        write_csv([flat(record) for record in lines], stream)
    else:
        from gputally.base.terminal import draw

        draw(table(), stream)


def write_csv(rows: Sequence[Mapping[str, object]], to: TextIO) -> None:
    """Write rows as CSV. The columns are the names of all rows, in the order in which they first appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = csv.DictWriter(to, names, restval="", lineterminator="\n")
    out.writeheader()
    out.writerows(rows)


def flat(record: Mapping[str, object]) -> dict[str, object]:
    """Return the record with nested records flattened."""
    cells: dict[str, object] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            cells |= {f"{name}.{inner}": cell for inner, cell in flat(value).items()}
        else:
            cells[name] = _cell(value)
    return cells


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
