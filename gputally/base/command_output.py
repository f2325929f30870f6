"""Holds what all commands share: output as a table, JSON or CSV, and groups of options.

JSON holds all fields with exact figures: decimals are text and unknown values are null. CSV holds one record per line.
It joins nested names with a dot and several values with a semicolon, leaves unknown values empty, and contains no cell
that a spreadsheet treats as a formula. Each command defines its records.

The module loads nothing that draws: `--help` and JSON need no terminal (`gputally.base.terminal`)."""

from __future__ import annotations

import csv
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_type_hints

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


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a typer command in which the fields of a dataclass are options of their own.

    A command that takes a parameter with a dataclass as its type gets one option for each field of the dataclass. The
    annotation of a field is that of a typer option, and every field has a default. Several commands can therefore share
    a group of options that is defined once. `refuse_ignored` knows the options that the user gave to such a command."""
    import typer

    types = get_type_hints(command, include_extras=True)
    groups = {name: types.pop(name) for name, kind in tuple(types.items()) if is_dataclass(kind)}
    names = {name: tuple(field.name for field in fields(group)) for name, group in groups.items()}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        context = values.pop(_CONTEXT)
        grouped = {name: group(**{key: values.pop(key) for key in names[name]}) for name, group in groups.items()}
        source = context.get_parameter_source
        given = {each.name: each.opts[0] for each in context.command.params if source(each.name).name == "COMMANDLINE"}
        token = _given.set(given)
        try:
            command(**values, **grouped)
        finally:
            _given.reset(token)

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
    context = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = (*own, context, *options)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    return run


_CONTEXT = "typer_context"
_given: ContextVar[Mapping[str, str]] = ContextVar("_given", default=MappingProxyType({}))
"""The options that the user gave to the running command, by the names of its parameters."""


def refuse_ignored(why: str, *names: str) -> None:
    """Raise typer.BadParameter if the user gave one of these options to a command that would ignore it.

    why: the reason that they would be ignored, such as `without --to`."""
    import typer

    given = _given.get()
    if ignored := [given[name] for name in names if name in given]:
        raise typer.BadParameter(f"{', '.join(ignored)} has no effect {why}")
