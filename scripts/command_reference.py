"""Writes docs/commands.md from the programs' parsers.

`python -m scripts.command_reference` writes it anew.
"""

from __future__ import annotations

import inspect
import re
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from gputally.__main__ import COMMANDS
from gputally.command_tree import all_commands

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
_NAMES = {str: "text", int: "whole number", float: "number", Path: "path", datetime: "date"}
HEAD = """\
# Commands

Generated from the programs' own parsers: `make reference` writes it anew. How they print, what their exit codes mean
and how a shell completes them: [the command line](cli.md).

"""


def page() -> str:
    """The page's text."""
    found = list(all_commands())
    rows = [f"| [`gputally {name}`](#gputally-{name}) | {command.help} |" for name, command in COMMANDS.items()]
    index = "\n".join(["| command | what it does |", "|---|---|", *rows]) + "\n"
    return HEAD + index + "".join(_section(path, command) for path, command in found)


def _section(path: str, command: Any) -> str:
    depth = "##" if path.count(" ") == 1 else "###"
    inner = list(getattr(command, "commands", {}))
    parameters = [each for each in command.params if each.name != "help"]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option"]
    text = _paragraphs(COMMANDS[path.split()[1]].help if inner and not command.help else command.help or "")
    parts = [f"\n{depth} {path}\n\n{text}\n"]
    if inner:
        below = ", ".join(f"[{name}](#{path.replace(' ', '-')}-{name})" for name in inner)
        parts.append(f"\nCommands: {below}.\n")
    if arguments or options:
        rows = [*map(_argument, arguments), *sorted(map(_option, options))]
        parts.append("\n" + "\n".join(["| option | value | default | meaning |", "|---|---|---|---|", *rows]) + "\n")
    return "".join(parts)


def _paragraphs(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def _argument(argument: Any) -> str:
    name = (argument.name or "").upper().replace("_", "-")
    return _row(f"`{name}`" + ("" if argument.required else " (optional)"), argument)


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len, reverse=True))
    names += " (required)" if option.required else ""
    return _row(names + (", repeatable" if option.multiple else ""), option)


def _row(names: str, parameter: Any) -> str:
    variable = parameter.envvar
    meaning = " ".join((getattr(parameter, "help", None) or "").split())
    if variable and variable not in meaning:
        meaning += f" Environment: `{variable}`."
    cells = [names, _value(parameter), _default(parameter), meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(parameter: Any) -> str:
    """What it takes, by its annotation."""
    if getattr(parameter, "is_flag", False):
        return ""
    kind: Any = parameter.type_descriptor.annotation
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    return _NAMES.get(kind, kind.__name__)


def _default(parameter: Any) -> str:
    default = parameter.default
    if callable(default) or default in (None, "", False) or getattr(parameter, "required", False):
        return ""
    if isinstance(default, list | tuple):
        return ", ".join(f"`{each}`" for each in default)
    return "on" if default is True else f"`{default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
