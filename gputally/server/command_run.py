"""Runs a program of commands, and tells what is wrong with a call in the words of the person who wrote it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

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
    if isinstance(wrong, _WithUsage):
        wrong.show()
    else:
        typer.echo(wrong.format_message(), err=True)
    return wrong.exit_code


@runtime_checkable
class _WithUsage(Protocol):
    """A fault of a call that shows itself below the command's usage."""

    def show(self) -> None: ...
