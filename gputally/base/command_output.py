"""Holds what all commands share: output as a table, JSON or CSV, the terminal's console, and groups of options.

JSON holds all fields with exact figures: decimals are text and unknown values are null. CSV holds one record per line.
It joins nested names with a dot and several values with a semicolon, leaves unknown values empty, and contains no cell
that a spreadsheet treats as a formula. Each command defines its records.

Tables and other text are printed literally, without markup or control sequences (`gputally.base.untrusted_text`)."""

from __future__ import annotations

import csv
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from typing import Any, Literal, TextIO, get_type_hints

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import TextType

from gputally.base.untrusted_text import for_cell, for_json, for_terminal

Output = Literal["table", "json", "csv"]
OUTPUTS: tuple[Output, ...] = ("table", "json", "csv")
WIDTH_WITHOUT_TERMINAL = 160
"""Width of a table in columns without a terminal and without COLUMNS, so that a table in a file keeps its shape."""


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
        draw(table(), stream)


def draw(renderable: RenderableType, to: TextIO | None = None) -> None:
    """Print a rich renderable at the terminal's width."""
    stream = to or sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else WIDTH_WITHOUT_TERMINAL
    Terminal(file=stream, width=width).print(renderable)


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


class Terminal(Console):
    """A rich console that prints text literally. A name or an answer of an API server can contain rich's markup
    (`[denied]`, `:warning:`), and control sequences that a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        """Create the console with rich's `options`, which override this class's defaults."""
        super().__init__(**({"highlight": False, "markup": False, "emoji": False} | options))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with rich, and escape the control characters in text. Rich's own control segments do not change."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else for_terminal(segment.text)
            yield segment if text is segment.text else segment._replace(text=text)


def table(
    title: TextType,
    columns: Sequence[str | Column],
    rows: Iterable[Sequence[RenderableType]] = (),
    *,
    total: Sequence[RenderableType] | None = None,
    caption: str = "",
) -> Table:
    """Return a command's table.

    columns: the headings of text columns, and columns from `figures`.
    total: a last row, in bold."""
    drawn = Table(
        *columns, title=title or None, caption=caption or None, title_justify="left", caption_justify="left",
        box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for row in rows:
        drawn.add_row(*row)
    if total is not None:
        drawn.add_section()
        drawn.add_row(*total, style="bold")
    return drawn


def figures(*headings: str, **style: Any) -> list[Column]:
    """Return right-aligned columns with these headings. style: the style of each column, as in rich."""
    return [Column(heading.strip(), justify="right", **style) for heading in headings]


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a typer command in which the fields of a dataclass are options of their own.

    A command that takes a parameter with a dataclass as its type gets one option for each field of the dataclass. The
    annotation of a field is that of a typer option, and every field has a default. Several commands can therefore share
    a group of options that is defined once."""
    types = get_type_hints(command, include_extras=True)
    groups = {name: types.pop(name) for name, kind in tuple(types.items()) if is_dataclass(kind)}
    names = {name: tuple(field.name for field in fields(group)) for name, group in groups.items()}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        grouped = {name: group(**{key: values.pop(key) for key in names[name]}) for name, group in groups.items()}
        command(**values, **grouped)

    signature = inspect.signature(command)
    own = [each.replace(annotation=types[name]) for name, each in signature.parameters.items() if name not in groups]
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for group in groups.values()
        for hints in [get_type_hints(group, include_extras=True)]
        for field in fields(group)
    ]
    parameters = (*own, *options)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    return run
