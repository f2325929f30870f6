"""The command that says which GPUs are capacity no more."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import RootModel

from accountant.commands import tables
from accountant.commands.asking import Printed, Zoned, answer, connected
from accountant.ledger import RetiredDevice


class _Retired(RootModel[tuple[RetiredDevice, ...]]):
    pass


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(retire)


@connected
def retire(
    reason: Annotated[str, typer.Option(help="Why, for whoever reads the audit trail later.")],
    node: Annotated[str, typer.Option(help="All GPUs that were seen on this node last.")] = "",
    gpu: Annotated[list[str] | None, typer.Option(help="UUID of one GPU (repeatable).")] = None,
    cluster: Annotated[str, typer.Option(help="Of this cluster; alone: all of it (default: the only one).")] = "",
    since: Annotated[str, typer.Option(help="From when on: a date or RFC 3339 (default: now).")] = "",
    output: Printed = "table",
    *,
    at: Zoned,
) -> None:
    """Take GPUs that went for good out of the capacity; what they missed until then stays unmetered."""
    body = {"cluster": cluster, "node": node, "gpus": gpu or [], "since": since, "reason": reason}
    with at.asking() as remote:
        done = remote.act(_Retired, "/v1/gpus/retire", body).root
    answer(output, lambda: tables.retired(done), done)
