"""Describes all commands as one tree of typer commands, for shell completion and the command reference.

For a completion, a program is imported only if its own commands or options are completed, not for its name. Programs
that parse with argparse, such as the agent, are converted to typer commands."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from gputally.__main__ import COMMANDS, COMPLETION, Command, description

_UNDETECTED = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"
"""Makes typer take the shell's name as a value instead of inspecting the parent processes."""


class Program(TyperGroup):
    """One of COMMANDS, with its name and help. It imports its program on first use."""

    def __init__(self, name: str, command: Command) -> None:
        super().__init__(name=name, help=command.help, add_help_option=False)
        self._command = command

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        return typer_command(self.name or "", self._command).make_context(info_name, args, *more, **extra)


class Programs(TyperGroup):
    """The root of the tree."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the group's interface
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Program | None:  # noqa: ARG002 - the group's interface
        return Program(cmd_name, COMMANDS[cmd_name]) if cmd_name in COMMANDS else None


root = typer.Typer(cls=Programs, name="gputally", help=description(), rich_markup_mode=None)


@root.callback()
def _root() -> None:
    """Do nothing; typer needs a callback for a root without commands of its own."""


def run(arguments: Sequence[str]) -> int:
    """Answer a shell's request for completions, or print or install the completion script. Return the exit code."""
    given = list(arguments)
    if given and given[0] in COMPLETION and len(given) > 1:
        os.environ[_UNDETECTED] = "1"
    try:
        typer.main.get_command(root)(args=given, prog_name="gputally")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1
    return 0


def typer_command(name: str, command: Command) -> TyperCommand | TyperGroup:
    """Import a program and return it as a typer command. Raises ModuleNotFoundError."""
    module = importlib.import_module(command.module)
    app = getattr(module, "app", None) or _of_parser(module.parser())
    converted: Any = typer.main.get_command(app)
    for part in command.prefix:
        converted = converted.commands[part]
    converted.name = name
    return converted  # type: ignore[no-any-return]


def all_commands() -> Iterator[tuple[str, TyperCommand | TyperGroup]]:
    """Yield the full name and the command of every program and its subcommands, in the order of their help."""
    for name, command in COMMANDS.items():
        yield from _with_subcommands(f"gputally {name}", typer_command(name, command))


def _with_subcommands(path: str, command: Any) -> Iterator[tuple[str, TyperCommand | TyperGroup]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _with_subcommands(f"{path} {name}", inner)


def _of_parser(parser: argparse.ArgumentParser) -> typer.Typer:
    """Convert an argparse parser to a typer application with the same options and subcommands."""
    app = typer.Typer(help=parser.description, add_completion=False, rich_markup_mode=None)
    inner = next((each for each in _actions(parser) if isinstance(each, argparse._SubParsersAction)), None)
    if inner is None:
        app.command(help=parser.description)(_function(parser))
        return app
    helps = {each.dest: each.help for each in inner._choices_actions}
    for name, below in inner.choices.items():
        app.command(name, help=below.description or helps.get(name))(_function(below))
    app.callback(help=parser.description)(_function(parser))
    return app


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the actions of a parser, which argparse has no public attribute for."""
    return parser._actions


def _function(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """Return a function that does nothing and whose parameters are the parser's options, as typer reads them."""

    def nothing(**_: Any) -> None: ...

    skipped = (argparse._HelpAction, argparse._VersionAction, argparse._SubParsersAction)
    parameters = [
        inspect.Parameter(each.dest, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for each in _actions(parser)
        if not isinstance(each, skipped)
        for annotation, default in [_parameter(each)]
    ]
    nothing.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(nothing)["__signature__"] = inspect.Signature(parameters)
    return nothing


def _parameter(action: argparse.Action) -> tuple[Any, Any]:
    """Return the annotation and the default value of a parameter for an argparse action, as typer reads them."""
    kind: Any = str
    if action.nargs == 0:
        kind = bool
    elif action.choices is not None:
        kind = Literal[tuple(action.choices)]
    elif action.type is Path:
        kind = Path
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    if isinstance(action, argparse._AppendAction):
        return Annotated[list[kind] | None, typer.Option(*action.option_strings, help=text)], None
    if not action.option_strings:
        return Annotated[kind, typer.Argument(help=text)], ...
    default = None if action.default in (None, argparse.SUPPRESS) else action.default
    if kind is bool:
        return Annotated[bool, typer.Option(*action.option_strings, help=text)], False
    if action.required:
        return Annotated[kind, typer.Option(*action.option_strings, help=text)], ...
    if not isinstance(default, str | Path | None):
        default = str(default)
    return Annotated[kind | None, typer.Option(*action.option_strings, help=text)], default
