"""Runs `try-weight`, which shows what every queue would be entitled to with another weight of one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from accountant.wire.option_types import MOST
from fairshare.cli.command_options import AccountantOptions, PolicyOrInForce, Printed
from gputally.base.command_options import with_option_groups
from gputally.base.command_output import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from fairshare.explain.try_weight import TriedQueue


@with_option_groups
def try_weight(
    queue: Annotated[str, typer.Argument(help="The queue, by its full name.")],
    weight: Annotated[float, typer.Argument(min=0, max=MOST, help="Its other weight.")],
    policy: PolicyOrInForce = None,
    capacity: Annotated[
        float | None, typer.Option(min=0, max=MOST, help="Number of GPUs of the cluster (default: the ledger's).")
    ] = None,
    output: Printed = "table",
    *,
    at: AccountantOptions,
) -> None:
    """Show what every queue is entitled to now and with another weight of one queue, by quotas and weights. Past usage
    is left out: what-if replays it."""
    from fairshare.controller import policy_file as policies
    from fairshare.explain.try_weight import try_weight as tried

    with at.client() as client:
        in_force = policies.load(policy)[0] if policy is not None else client.policy()
        gpus = capacity if capacity is not None else float(client.guarantees().gpus or 0)
    rows = tried(in_force, gpus, queue, weight)
    records = [asdict(row) for row in rows]
    show(output, lambda: _table(rows, gpus), records, records)


def _table(rows: Sequence[TriedQueue], gpus: float) -> Table:
    from fairshare.explain.plan_tables import number, titled_table

    table = titled_table(
        f"Entitled by quotas and weights, of {gpus:,.1f} GPUs, if every queue requests more", ("queue",),
        ("weight", "then", "entitled", "then ", "GPUs", "then  "),
    )  # fmt: skip
    for row in rows:
        table.add_row(
            "  " * row.depth + row.queue, number(row.weight), number(row.weight_then), f"{row.part:.1%}",
            f"{row.part_then:.1%}", f"{row.gpus:,.2f}", f"{row.gpus_then:,.2f}",
        )  # fmt: skip
    return table
