"""The commands about GPUs: which node each belonged to, moves to another node, and GPUs that are capacity no more."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from pydantic import BaseModel, RootModel

from accountant.commands import tables
from accountant.commands.asking import Printed, Zoned, answer, connected
from accountant.ledger import GpuOwnership, RetiredDevice


class _Owners(BaseModel):
    gpus: tuple[GpuOwnership, ...]
    next_after: str | None


class _Moved(RootModel[tuple[GpuOwnership, ...]]):
    pass


class _Retired(RootModel[tuple[RetiredDevice, ...]]):
    pass


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(gpus)
    app.command()(retire)


@connected
def gpus(
    act: Annotated[Literal["owners", "move"], typer.Argument(help="What to do.")] = "owners",
    node: Annotated[
        str, typer.Option(help="owners: only GPUs that this node had or claims; move: the new owner.")
    ] = "",
    gpu: Annotated[list[str] | None, typer.Option(help="UUID of one GPU (repeatable with move).")] = None,
    cluster: Annotated[str, typer.Option(help="Of this cluster (move; default: the only one).")] = "",
    moved: Annotated[
        bool, typer.Option("--moved", help="owners: only GPUs that changed their owner or that another node claims.")
    ] = False,
    since: Annotated[
        str, typer.Option(help="move: from when on (default: from the present owner's newest record on).")
    ] = "",
    reason: Annotated[str, typer.Option(help="move: why, for whoever reads the audit trail later.")] = "",
    output: Printed = "table",
    *,
    at: Zoned,
) -> None:
    """Which node each GPU belonged to; confirm that GPUs moved to another node."""
    named = gpu or []
    if act == "move":
        if not (node and named and reason.strip()):
            raise typer.BadParameter("move needs --node, --gpu and --reason")
        body = {"cluster": cluster, "node": node, "gpus": named, "since": since, "reason": reason}
        with at.asking() as remote:
            found: tuple[GpuOwnership, ...] = remote.act(_Moved, "/v1/gpus/move", body).root
    else:
        if len(named) > 1:
            raise typer.BadParameter("owners takes one --gpu")
        asked = {"cluster": cluster, "node": node, "gpu": named[0] if named else "", "moved": str(moved).lower()}
        found, after = (), ""
        with at.asking() as remote:
            while True:
                page = remote.ask(_Owners, "/v1/gpus/owners", {**asked, "after": after})
                found += page.gpus
                if page.next_after is None:
                    break
                after = page.next_after
    answer(output, lambda: tables.gpu_owners(found), found)


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
