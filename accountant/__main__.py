"""Runs `gputally accountant`; a command's module is imported only when the command is called.

`main(argv)` returns an exit code: 0 success, 1 failure (one clear line per fault on stderr, never a traceback), 2 wrong
usage, 70 the database failed and the process has to be started again.

The modules of accountant.cli declare the commands and load nothing else: a command loads what it does when it runs, so
that help and completion, which import all of them, answer at once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import typer
from typer.core import TyperGroup

from gputally.base.errors import AccountantError
from gputally.base.yaml_file import FileFault
from gputally.server.command_run import run_program

OF_PLUGINS: Final = "import_commands"
"""The module of the commands that plug-ins have beside `import`; only a plug-in knows their names."""
COMMANDS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("bookkeeping_commands", (
        "months", "close", "reopen", "publish", "draft", "changes", "proposals", "correct", "corrections", "adjust",
        "credit", "adjustments", "reprice", "prices", "reconcile",
    )),
    ("usage_commands", ("jobs", "nodes")),
    ("report_command", ("report",)),
    ("bookkeeping_commands", ("gpus", "retire")),
    ("server_commands", ("clock", "backup", "restore", "backups")),
    ("bookkeeping_commands", ("deliveries",)),
    ("server_commands", ("serve",)),
    ("usage_commands", ("usage", "cost", "waits", "budgets", "guarantees", "check")),
    ("server_commands", ("token",)),
    ("token_secrets_command", ("install",)),
    ("assistant_command", ("mcp",)),
    (OF_PLUGINS, ()),
    ("fleet_commands", ("fleet",)),
)  # fmt: skip
"""The commands in the order of the help, each with the module of accountant.cli that has it."""


class _LazyCommands(Mapping[str, Any]):
    """A mapping of command names to commands, which are imported on access."""

    def __init__(self) -> None:
        self._modules = {name: module for module, names in COMMANDS for name in names}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._load(self._modules.get(name, OF_PLUGINS))
        return self._loaded[name]

    def _load(self, module: str) -> list[str]:
        """Imports a module; returns the names of its commands. A plug-in does not replace a command."""
        group = typer.main.get_group(importlib.import_module(f"accountant.cli.{module}").app)
        own = {name: one for name, one in group.commands.items() if self._modules.get(name, OF_PLUGINS) == module}
        self._loaded |= own
        return list(own)

    def __iter__(self) -> Iterator[str]:
        for module, names in COMMANDS:
            yield from self._load(module) if module == OF_PLUGINS else names

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Commands(TyperGroup):
    """The group of the accountant's commands."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = _LazyCommands()  # type: ignore[assignment]  # it is read only


app = typer.Typer(
    cls=Commands,
    help="The ledger of GPU-hours and cost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback()
def _commands() -> None:
    """Makes Typer treat the app as a group; the group has no options."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. argv: None for the arguments of the process."""
    return run_program(app, "gputally accountant", argv, (AccountantError, FileFault))


def main_of_gputally(argv: Sequence[str]) -> int:
    """Runs one command that is called without the word `accountant`: `gputally fleet`. Messages name it so."""
    return run_program(app, "gputally", argv, (AccountantError, FileFault))


if __name__ == "__main__":
    sys.exit(main())
