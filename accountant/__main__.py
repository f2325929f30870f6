"""The accountant's command: serve the ledger, and ask it.

`main(argv)` returns an exit code: 0 done, 1 could not (one clear line per fault on stderr, never a
traceback), 2 called wrongly, 70 the database failed and the process has to be started again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from accountant.commands.group import Commands
from accountant.errors import AccountantError
from agent.plaintext import for_terminal
from agent.yamlfile import FileFault

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
