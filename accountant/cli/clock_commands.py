"""The commands about the accountant's clock: is it trusted, and what did it date wrongly."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import RootModel

from accountant.cli import terminal_tables
from accountant.cli.connection_options import Printed, ZonedLedger, answer, connected
from accountant.ledger.protocols import ClockReport, MisdatedRecords


class _RedatedRecords(RootModel[tuple[MisdatedRecords, ...]]):
    pass


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    clock = typer.Typer(no_args_is_help=True, help="The accountant's clock, and what it dated wrongly.")
    clock.command()(show)
    clock.command()(accept)
    clock.command()(heal)
    app.add_typer(clock, name="clock")


@connected
def show(output: Printed = "table", *, at: ZonedLedger) -> None:
    """Say whether the clock is trusted, and name what is dated later than now."""
    with at.asking() as remote:
        found = remote.ask(ClockReport, "/v1/clock")
    answer(output, lambda: terminal_tables.clock(found), found)


@connected
def accept(output: Printed = "table", *, at: ZonedLedger) -> None:
    """Take the clock of the accountant's machine for right after it was set."""
    with at.asking() as remote:
        found = remote.act(ClockReport, "/v1/clock/accept", {})
    answer(output, lambda: terminal_tables.clock(found), found)


@connected
def heal(
    reason: Annotated[str, typer.Option(help="Why, for whoever reads the audit trail later.")],
    output: Printed = "table",
    *,
    at: ZonedLedger,
) -> None:
    """Heal what a clock that was ahead dated wrongly; the clock has to be right now."""
    with at.asking() as remote:
        done = remote.act(_RedatedRecords, "/v1/clock/heal", {"reason": reason}).root
    answer(output, lambda: terminal_tables.misdated_table(done), done)
