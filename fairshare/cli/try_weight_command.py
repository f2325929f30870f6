"""Runs `try-weight`, which shows what every queue would be entitled to with another weight of one."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from accountant.wire.option_types import MOST
from fairshare.cli.command_options import AccountantOptions, PolicyOrInForce, Printed
from gputally.base.command_options import with_option_groups
from gputally.base.command_output import show
from gputally.base.units import MS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group
    from rich.table import Table

    from fairshare.explain.try_weight import Divided, TriedQueue


@with_option_groups
def try_weight(
    queue: Annotated[str, typer.Argument(help="The queue, by its full name.")],
    weight: Annotated[float, typer.Argument(min=0, max=MOST, help="Its other weight.")],
    policy: PolicyOrInForce = None,
    capacity: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=MOST,
            help="Number of GPUs to divide (default: those that the controller's newest cycle divided).",
        ),
    ] = None,
    output: Printed = "table",
    *,
    at: AccountantOptions,
) -> None:
    """Divide the GPUs that are there now: show what every queue is entitled to now and with another weight of one
    queue, by quotas and weights. Past usage is left out: what-if replays it, where a queue may lose that gains here."""
    from accountant.wire.decision_text import EVERYTHING
    from fairshare.controller import policy_file as policies
    from fairshare.explain.try_weight import LOOK_BACK_MS, MOST_RECORDS, Divided, divided
    from fairshare.explain.try_weight import try_weight as tried

    with at.client() as client:
        in_force = policies.load(policy)[0] if policy is not None else client.policy()
        if capacity is not None:
            parts: tuple[Divided, ...] = (Divided("", capacity),)
        else:
            serving = client.guarantees()
            cycles = client.decisions(
                serving.end_ms - LOOK_BACK_MS, serving.end_ms + MS_PER_HOUR, subject=EVERYTHING, kind="weight",
                per_get=MOST_RECORDS,
            )  # fmt: skip
            parts = divided(islice(cycles, MOST_RECORDS), float(serving.gpus or 0))
    found = [(part, tried(in_force, part.gpus, queue, weight)) for part in parts]
    records = [{"target": part.target, **asdict(row)} for part, rows in found for row in rows]
    show(output, lambda: _tables(found), records, records)


def _tables(found: Sequence[tuple[Divided, Sequence[TriedQueue]]]) -> Group:
    from rich.console import Group

    return Group(*(_table(rows, part) for part, rows in found))


def _table(rows: Sequence[TriedQueue], part: Divided) -> Table:
    from fairshare.explain.conclusions import of_weight
    from fairshare.explain.plan_tables import number, titled_table
    from gputally.base.instants import utc_text

    of = "" if part.at_ms is None else f" that {part.target} had in the cycle of {utc_text(part.at_ms)}"
    table = titled_table(
        f"Of the {part.gpus:,.1f} GPUs{of}: entitled by quotas and weights, if every queue requests more", ("queue",),
        ("weight", "then", "entitled", "then ", "GPUs", "then  "),
    )  # fmt: skip
    table.caption = (
        f"{of_weight(rows)} "
        "Past usage and what jobs request are left out. what-if replays them, for a past span: a queue may gain by one"
        " and lose by the other."
    )
    table.caption_justify = "left"
    for row in rows:
        table.add_row(
            "  " * row.depth + row.queue, number(row.weight), number(row.weight_then), f"{row.part:.1%}",
            f"{row.part_then:.1%}", f"{row.gpus:,.2f}", f"{row.gpus_then:,.2f}",
        )  # fmt: skip
    return table
