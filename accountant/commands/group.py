"""The commands by name, each with the module that it lives in: a module is imported when its command is called.

A question to a running accountant must not wait for the accountant's own modules, four fifths of a start otherwise.
Help and completion, which tell of every command, import all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer
from typer.core import TyperGroup

MODULES: Final = {
    "books": (
        "months", "close", "reopen", "publish", "proposals", "correct", "corrections", "adjust", "credit",
        "adjustments", "reprice", "prices",
    ),
    "invoices": ("reconcile",),
    "jobs": ("jobs",),
    "reporting": ("report",),
    "capacity": ("gpus", "retire"),
    "clocks": ("clock",),
    "safekeeping": ("backup", "restore", "backups"),
    "deliveries": ("deliveries",),
    "running": ("serve",),
    "questions": ("usage", "cost", "check"),
    "tokenfile": ("token",),
    "slurm": ("slurm",),
    "importing": ("import",),
}  # fmt: skip
"""Of this package, in the order of the help. Each has a `register(app)` that adds exactly these."""


class _Imported(Mapping[str, Any]):
    """A group's commands, which its library asks for by name or one after the other."""

    def __init__(self) -> None:
        self._modules = {name: module for module, names in MODULES.items() for name in names}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            part = typer.Typer(add_completion=False, rich_markup_mode=None)
            importlib.import_module(f"accountant.commands.{self._modules[name]}").register(part)
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
        self.commands = _Imported()  # type: ignore[assignment]  # nobody adds to it
