"""Runs `gputally agent`. `agent.composition` meters; the other commands are in `agent.commands`.

A user's mistake gives a one-line message on stderr and exit code 2, a fault of the machine (spool, port) exit code 1.
If the driver was replaced or the clock was set back, the process restarts itself. Help, and settings that are wrong,
need no module that meters."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from agent.core import settings
from agent.core.settings import SettingsError
from gputally.base.errors import AgentError
from gputally.base.untrusted_text import for_terminal
from gputally.base.version import __version__
from gputally.base.yaml_file import FileFault


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    commands = parser(words)
    arguments = commands.parse_args(words)
    if arguments.command is None:
        commands.print_help()
        return 2
    if arguments.command == "smoke":
        from agent.commands import gpu_load_check

        return gpu_load_check.run(arguments)
    try:
        if arguments.command == "top":
            from agent.commands import top_command
            from agent.core.process_restart import with_restarts

            return with_restarts(lambda _: top_command.run(arguments))
        flags = {name: getattr(arguments, name) for name in settings.names() if getattr(arguments, name) is not None}
        chosen = settings.load(arguments.config, os.environ, flags)
        if arguments.print_config:
            print(settings.render(chosen), end="")
            return 0
        from agent import composition
        from agent.core.process_restart import with_restarts

        if arguments.once:
            return with_restarts(lambda _: composition.once(chosen))
        return with_restarts(lambda restarted: composition.run(chosen, watch=arguments.watch, restarted=restarted))
    except (SettingsError, FileFault) as error:
        print(for_terminal(f"gputally agent: {error}"), file=sys.stderr)
        return 2
    except AgentError as error:
        print(for_terminal(f"gputally agent: {error}"), file=sys.stderr)
        return 1


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    words: the command line. If it begins with `run`, the parser contains only that command, so that the daemon does not
        import the libraries of the other commands."""
    whole = argparse.ArgumentParser(prog="gputally agent", description="Meters the GPUs of one machine.")
    whole.add_argument("--version", action="version", version=f"gputally agent {__version__}")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser("run", help="meter until stopped", description="Meter, spool and upload until stopped.")
    run.add_argument("--config", type=Path, metavar="FILE", help="Settings file (YAML).")
    run.add_argument("--print-config", action="store_true", help="Print the settings in force and exit.")
    run.add_argument("--watch", action="store_true", help="Show a live table of the GPUs while metering.")
    run.add_argument("--once", action="store_true", help="Print the table once and exit, without metering.")
    run.add_argument("--version", action="version", version=f"gputally agent {__version__}")
    for name in settings.names():
        text = settings.description(name).replace("%", "%%")
        if settings.is_switch(name):
            run.add_argument(settings.flag(name), dest=name, action="store_true", default=None, help=text)
        else:
            run.add_argument(settings.flag(name), dest=name, metavar=settings.metavar(name), help=text)
    if words[:1] != ["run"]:
        from agent.commands import gpu_load_check, top_command

        top_command.add_parser(commands)
        gpu_load_check.add_parser(commands)
    return whole


if __name__ == "__main__":
    sys.exit(main())
