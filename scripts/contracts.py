"""What programs may rely on, in short: routes, fields and types of the HTTP API, options of the commands, metrics with
their labels, columns of the lake. `make reference` writes it to docs/contract, where a change of it is seen as a change
of a line.

Meanings are not part of it: the accountant answers them at `/openapi.json`, commands at `--help`, metrics with
`# HELP`, tables of the lake with the comments of their columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, get_args, get_origin

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.lake.tables import LakeTable
from gputally.base.clock import VirtualClock
from gputally.shell_completion import all_commands

Node = Mapping[str, Any]

FOLDER = Path(__file__).parents[1] / "docs" / "contract"


def api_document() -> dict[str, Any]:
    """Return the OpenAPI document of an accountant with an empty ledger."""
    with TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        with Service(Settings(data=data, auth="off"), VirtualClock(0)) as service:
            return dict(service.app.openapi())


def api(document: Node) -> str:
    """Return one line for each route, parameter, answer and field of an OpenAPI document."""
    lines: list[str] = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines.append(f"{method.upper()} {path}")
            parameters = operation.get("parameters", ())
            filters = [one["name"].removeprefix("where.") for one in parameters if one["name"].startswith("where.")]
            lines += [
                f"  {one['in']} {_field(one['name'], one['schema'], bool(one.get('required')))}"
                for one in parameters
                if not one["name"].startswith("where.")
            ]
            lines += [f"  query where.{{{', '.join(filters)}}}?: [string]"] if filters else []
            if body := operation.get("requestBody"):
                lines.append(f"  body {_content(body['content'])}")
            lines += [f"  {code} {_answer(one)}".rstrip() for code, one in sorted(operation["responses"].items())]
    for name, schema in sorted(document["components"]["schemas"].items()):
        fields, needed = schema.get("properties", {}), set(schema.get("required", ()))
        lines.append(name if fields else f"{name}: {_type(schema)}")
        lines += [f"  {_field(field, inner, field in needed)}" for field, inner in fields.items()]
    return "\n".join(lines) + "\n"


def _answer(answer: Node) -> str:
    """Return what an answer contains, and the types of problem that its description names."""
    slugs = sorted({f"`{slug}`" for slug in answer.get("description", "").split("`")[1::2]})
    return " ".join([_content(answer.get("content", {})), *slugs])


def _content(content: Node) -> str:
    return ", ".join(f"{media} {_type(one.get('schema', {}))}".strip() for media, one in sorted(content.items()))


def _field(name: str, schema: Node, needed: bool) -> str:
    default = schema.get("default")
    said = "" if default is None else f" = {json.dumps(default, sort_keys=True)}"
    return f"{name}{'' if needed else '?'}: {_type(schema)}{said}"


_BOUNDS = ("pattern", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength", "maxLength", "format")


def _type(schema: Node) -> str:
    """Return a type in short: `[T]` is a list, `{T}` a map of texts to T."""
    if ref := schema.get("$ref"):
        return str(ref).rsplit("/", 1)[-1]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " | ".join(dict.fromkeys(_type(one) for one in schema[key]))
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"[{_type(schema.get('items') or {})}]"
    if kind == "object" and isinstance(inner := schema.get("additionalProperties"), dict):
        return f"{{{_type(inner)}}}"
    bounds = [f"{key} {schema[key]}" for key in _BOUNDS if key in schema]
    return str(kind) + (f" ({', '.join(bounds)})" if bounds else "")


def commands() -> str:
    """Return one line for each command, argument and option."""
    lines = []
    for path, command in all_commands():
        lines.append(path)
        lines += [
            f"  {'|'.join(sorted(one.opts, key=len))}{_parameter(one)}" for one in command.params if one.name != "help"
        ]
    return "\n".join(lines) + "\n"


def _parameter(parameter: Any) -> str:
    needed = "" if parameter.required else "?"
    repeated = "..." if getattr(parameter, "multiple", False) or parameter.nargs == -1 else ""
    kind = value_of(parameter)
    default = default_value(parameter)
    variable = f" ${parameter.envvar}" if parameter.envvar else ""
    return f"{repeated}{needed}{f': {kind}' if kind else ''}{f' = {default}' if default else ''}{variable}"


_TYPE_NAMES = {str: "text", int: "whole number", float: "number", Path: "path", datetime: "date"}


def value_of(parameter: Any) -> str:
    """Return the type of a parameter's value in words; "" for a flag."""
    if getattr(parameter, "is_flag", False):
        return ""
    kind: Any = parameter.type_descriptor.annotation
    if (shown := parameter.metavar or "").startswith("["):
        return ", ".join(f"`{choice}`" for choice in shown.strip("[]").split("|"))
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    return _TYPE_NAMES.get(kind, kind.__name__)


def default_value(parameter: Any) -> str:
    default = parameter.default
    if callable(default) or default in (None, "", False) or getattr(parameter, "required", False):
        return ""
    if isinstance(default, list | tuple):
        return ", ".join(f"`{each}`" for each in default)
    return "on" if default is True else f"`{default}`"


class Family(NamedTuple):
    """A metric as the reference shows it. name: the name in the source code, which can lack the suffix of its type."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> str:
        """The name of the series in a scrape."""
        return self.name.removesuffix("_total") + _SUFFIX.get(self.kind, "")


_SUFFIX = {"counter": "_total", "info": "_info"}


def metrics(programs: Mapping[str, Iterable[Family]], dcgm_names: Iterable[str]) -> str:
    """Return one line for each metric of each program: its series, type and labels. Of dcgm-exporter's names, which the
    agent shows if asked to, the names."""
    lines = []
    for program, families in programs.items():
        lines.append(program)
        lines += [f"  {one.series} {one.kind} {{{', '.join(one.labels)}}}" for one in sorted(families)]
    lines += ["Agent, --dcgm-names", *(f"  {name}" for name in dcgm_names)]
    return "\n".join(lines) + "\n"


def lake(tables: Iterable[LakeTable]) -> str:
    """Return one line for each table of the lake, with its key, and for each column."""
    lines = []
    for table in tables:
        lines.append(
            f"{table.name} (one row for each {', '.join(table.key)}; partitioned by {', '.join(table.partition)})"
        )
        lines += [f"  {column.name} {column.type}" for column in table.columns]
    return "\n".join(lines) + "\n"
