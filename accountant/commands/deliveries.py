"""`deliveries`: what was sent to whom, and once more what a person wants once more."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import RootModel

from accountant.commands import tables
from accountant.commands.asking import Printed, Server, answer, connected
from accountant.told import DeliveryState


class _Deliveries(RootModel[tuple[DeliveryState, ...]]):
    pass


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("deliveries")(deliveries)


@connected
def deliveries(
    again: Annotated[str | None, typer.Option(help="Key of what is to be sent once more; needs a reason.")] = None,
    reason: Annotated[str, typer.Option(help="Why, for whoever reads the trail later.")] = "",
    output: Printed = "table",
    *,
    at: Server,
) -> None:
    """Reports and notices that went out by themselves, newest first, and what became of each."""
    if again is not None and not reason:
        raise typer.BadParameter("--again needs a --reason")
    with at.asking() as remote:
        if again is not None:
            remote.act(DeliveryState, "/v1/deliveries/again", {"key": again, "reason": reason})
        found = remote.ask(_Deliveries, "/v1/deliveries")
    answer(output, lambda: tables.deliveries(found.root), found.root)
