"""Runs `gputally accountant` and imports a command only when it is called.

`main(argv)` returns an exit code: 0 done, 1 could not (one clear line per fault on stderr, never a
traceback), 2 called wrongly, 70 the database failed and the process has to be started again.

A question to a running accountant must not wait for the accountant's own modules, four fifths of a start otherwise.
Help and completion, which tell of every command, import all of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import typer
from typer.core import TyperGroup

from gputally.base.errors import AccountantError
from gputally.base.untrusted_text import for_terminal
from gputally.base.yaml_file import FileFault

MODULES: Final = {
    "accountant.cli.bookkeeping_commands:register_months": (
        "months", "close", "reopen", "publish", "proposals", "correct", "corrections", "adjust", "credit",
        "adjustments", "reprice", "prices",
    ),
    "accountant.cli.bookkeeping_commands:register_invoices": ("reconcile",),
    "accountant.cli.usage_commands:register_jobs": ("jobs",),
    "accountant.cli.usage_commands:register_report": ("report",),
    "accountant.cli.bookkeeping_commands:register_capacity": ("gpus", "retire"),
    "accountant.cli.server_commands:register_clock": ("clock",),
    "accountant.cli.server_commands:register_backups": ("backup", "restore", "backups"),
    "accountant.cli.bookkeeping_commands:register_deliveries": ("deliveries",),
    "accountant.cli.server_commands:register_serve": ("serve",),
    "accountant.cli.usage_commands:register_questions": ("usage", "cost", "check"),
    "accountant.cli.server_commands:register_tokens": ("token",),
    "accountant.cli.install_command:register": ("install",),
    "accountant.cli.import_commands:register_slurm": ("slurm",),
    "accountant.cli.import_commands:register_import": ("import",),
    "accountant.cli.fleet_commands:register_fleet": ("fleet",),
}  # fmt: skip
"""The function that adds the commands to a Typer application, as `module:function`, and the commands it adds, in the
order of the help."""


class _LazyCommands(Mapping[str, Any]):
    """A group's commands, which its library asks for by name or one after the other."""

    def __init__(self) -> None:
        self._modules = {name: module for module, names in MODULES.items() for name in names}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            part = typer.Typer(add_completion=False, rich_markup_mode=None)
            module, _, function = self._modules[name].partition(":")
            getattr(importlib.import_module(module), function)(part)
            self._loaded |= typer.main.get_group(part).commands
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


class Commands(TyperGroup):
    """The accountant's commands."""

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
    """Nothing of its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        app(args=list(sys.argv[1:] if argv is None else argv), prog_name="gputally accountant")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1
    except (AccountantError, FileFault) as error:
        for line in str(error).splitlines():
            print(for_terminal(f"gputally accountant: {line}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
