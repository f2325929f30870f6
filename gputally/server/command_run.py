"""Runs a program of commands, and tells what is wrong with a call in the words of the person who wrote it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Final, Protocol, runtime_checkable

import typer

from gputally.base.command_options import lines_of
from gputally.base.untrusted_text import for_terminal


def run_program(app: typer.Typer, name: str, argv: Sequence[str] | None, told: tuple[type[Exception], ...]) -> int:
    """Run one command and return its exit code: 0 success, 1 failure, 2 a wrong call.

    argv: None for the arguments of the process.
    told: the errors that are one line for each fault; others are faults of the program."""
    try:
        code = app(args=list(sys.argv[1:] if argv is None else argv), prog_name=name, standalone_mode=False)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1
    except typer.Abort:
        typer.echo("aborted", err=True)
        return 1
    except typer.TyperException as wrong:
        return _refused(wrong)
    except told as error:
        for line in lines_of(error):
            typer.echo(for_terminal(f"{name}: {line}"), err=True)
        return 1
    return code if isinstance(code, int) else 0


def _refused(wrong: typer.TyperException) -> int:
    from pydantic import ValidationError

    from gputally.server.config_loading import fault_text

    if isinstance(wrong, typer.BadParameter) and isinstance(wrong.__cause__, ValidationError):
        wrong.message = "; ".join(fault_text(fault) for fault in wrong.__cause__.errors())
    if isinstance(wrong, _UnknownOption) and wrong.ctx is not None:
        known = {name for each in wrong.ctx.command.params for name in each.opts}
        meant = [_MEANT[name] for name in get_close_matches(wrong.option_name, _MEANT, 1, 0.8)]
        wrong.possibilities = [name for name in meant if name in known] or wrong.possibilities
    if isinstance(wrong, _WithUsage):
        wrong.show()
    else:
        typer.echo(wrong.format_message(), err=True)
    return wrong.exit_code


_MEANT: Final = {"--accountant": "--url", "--address": "--url", "--server": "--url", "--token": "--token-file",
                 "--from": "--start", "--until": "--end", "--format": "--output"}  # fmt: skip
"""What other programs call an option, and its name here."""


@runtime_checkable
class _UnknownOption(Protocol):
    """A fault of a call with an option that the command does not have. possibilities: options that may be meant."""

    ctx: Any
    option_name: str
    possibilities: Sequence[str] | None


@runtime_checkable
class _WithUsage(Protocol):
    """A fault of a call that shows itself below the command's usage."""

    def show(self) -> None: ...
