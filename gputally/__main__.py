"""Runs the `gputally` command, and imports a program only when the user calls it.

The module uses only the standard library, because the agent's image contains no command line framework. Every program
is a function `main(argv) -> exit code` that parses its own arguments."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from gputally.base.version import __version__

Main = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Command:
    """A subcommand of `gputally`.

    module: the module of its program.
    prefix: arguments that precede the user's.
    entry: the name of the program's function."""

    module: str
    help: str
    prefix: tuple[str, ...] = ()
    entry: str = "main"


def _of_accountant(name: str, help: str) -> Command:
    """Return a command of the accountant that has a name of its own here, which its messages use."""
    return Command("accountant.__main__", help, prefix=(name,), entry="main_of_gputally")


INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 plus the signal's number, as in shells."""
COMPLETION = ("--install-completion", "--show-completion")
TREE = Command("gputally.shell_completion", "shell completion", entry="run")
COMMANDS = {
    "agent": Command("agent.__main__", "meter the GPUs of this machine and send their usage"),
    "accountant": Command("accountant.__main__", "keep the ledger; serve usage, cost and windows"),
    "jobs": _of_accountant("jobs", "show the cost of jobs, so far and per epoch"),
    "nodes": _of_accountant("nodes", "show what the GPUs of each node did"),
    "import": _of_accountant("import", "import the history of another system"),
    "report": _of_accountant("report", "write a month's report as a page or a file"),
    "backup": _of_accountant("backup", "copy the ledger, and verify the copy"),
    "restore": _of_accountant("restore", "rebuild a lost ledger and check it"),
    "install": _of_accountant("install", "create the Secrets with bearer tokens for a cluster"),
    "fleet": _of_accountant("fleet", "show usage, cost and reports of several clusters"),
    "fairshare": Command("fairshare.__main__", "compute queue weights from usage history; plan, explain, replay"),
    "dashboards": Command("dashboards.__main__", "build, check and push Grafana dashboards and alerts"),
    "doctor": Command("gputally.doctor.__main__", "look for common faults, and report how to fix them"),
    "advise": Command("gputally.advise.__main__", "recommend node counts, spot capacity and shared GPUs"),
    "mcp": _of_accountant("mcp", "let an assistant ask the accountant; it only reads"),
    "plugins": Command("gputally.plugin_list", "list the installed plug-ins, and what each of them may do"),
    "demo": Command("gputally.demo.__main__", "simulate a cluster for a month: metering, bills and weights"),
}


def description() -> str:
    """Return the program's description in one sentence."""
    return "Every GPU-second accounted for exactly once; every team its fair share over time."


def usage() -> str:
    """Return the text that `gputally --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: gputally COMMAND [ARGUMENTS]",
            "",
            description(),
            "",
            *lines,
            "",
            "`gputally COMMAND --help` explains a command; `gputally --version` prints the version.",
            "`gputally --install-completion` installs completion of all commands in bash, zsh, fish or PowerShell.",
        ]
    )


def run(command: Command, arguments: Sequence[str]) -> int:
    """Import the program, run it, and return its exit code. Raises SystemExit with a one-line message if a library is
    missing, as it is in the image of another program. Some libraries are imported only while the program runs."""
    try:
        program = cast(Main, getattr(importlib.import_module(command.module), command.entry))
        return program(arguments)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in {"agent", "accountant", "fairshare", "gputally"}:
            raise
        missing = f"gputally: this command needs {error.name!r}, which is not installed: pip install gputally"
        raise SystemExit(missing) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (2 for a wrong call)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "_GPUTALLY_COMPLETE" in os.environ or (arguments and arguments[0] in COMPLETION):
        return run(TREE, arguments)
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in {"-V", "--version"}:
        print(f"gputally {__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        print(f"gputally: no command {arguments[0]!r}; give one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return run(command, [*command.prefix, *arguments[1:]])
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
