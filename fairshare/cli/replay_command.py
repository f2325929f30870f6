"""Runs `replay`: computes past decisions again from their records, and reports every number that differs.

The record of a cycle holds all inputs of its weights or preemptions except the policy, which the accountant has by its
version. A number differs only if this release computes it differently, or if the record was changed or is incomplete.
The command names the cause, as far as the record shows it. The result of a write or of an eviction is not a decision,
and the command does not compute it again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from fairshare.cli.command_options import AccountantOptions, Printed
from gputally.base.command_options import with_option_groups
from gputally.base.command_output import show
from gputally.base.errors import FairshareError
from gputally.base.units import MS_PER_DAY, MS_PER_MINUTE, MS_PER_SECOND
from gputally.base.version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fairshare.cli.decision_replay import CycleReplay


MOST_SHOWN = 50
"""The number of differences that a table shows. JSON has all of them."""
_DECISION = re.compile(r"[0-9a-f]{16}/(\d{1,15})/.+")


@with_option_groups
def replay(
    when: Annotated[
        str,
        typer.Argument(
            metavar="DATE|DECISION", help="Day (2026-11-21), minute (2026-11-21T10:00Z), or a decision's id."
        ),
    ],
    output: Printed = "table",
    *,
    at: AccountantOptions,
) -> None:
    """Compute past weights and preemptions again from their recorded inputs; exit 1 if any result differs.

    A date means a day, a time a minute, in UTC unless a zone is given."""
    from fairshare.cli.decision_replay import recount

    start_ms, end_ms, wanted = _span(when)
    with at.client() as client:
        found = list(client.decisions(start_ms, end_ms))
        policies = {each.version: each.policy for each in client.policies()}
    one = next((d for d in found if d.id == wanted), None)
    cycle = one.inputs.get("cycle") if one is not None else None
    chosen = [d for d in found if wanted in (None, d.id, d.inputs.get("cycle")) or d.id == cycle]
    replays = recount(chosen, policies, __version__)
    if not replays:
        reason = "the accountant has no such decision" if wanted else "the controller decided nothing in this time"
        if one is not None:
            reason = f"a decision of kind {one.kind} has no record of a cycle's inputs: {one.reason}"
        raise FairshareError(f"{when}: {reason}")
    show(output, lambda: _view(replays), [_plain(each) for each in replays])
    if any(each.fault or each.differences for each in replays):
        raise typer.Exit(1)


def _span(when: str) -> tuple[int, int, str | None]:
    """Return the start and the end of the time that `when` names, and `when` itself for a decision's id, else None.

    Raises FairshareError for text that is neither a date nor a decision's id."""
    if match := _DECISION.fullmatch(when):
        at_ms = int(match[1])
        return at_ms, at_ms + 1, when
    try:
        at_time = datetime.fromisoformat(when)
    except ValueError as error:
        raise FairshareError(
            f"{when}: neither a date such as 2026-11-21 or 2026-11-21T10:00Z, nor a decision's id"
        ) from error
    at_time = at_time if at_time.tzinfo is not None else at_time.replace(tzinfo=UTC)
    start_ms = round(at_time.timestamp() * MS_PER_SECOND)
    return start_ms, start_ms + (MS_PER_DAY if "T" not in when and " " not in when else MS_PER_MINUTE), None


def _view(replays: Sequence[CycleReplay]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from fairshare.core.scheduler_queue_objects import instant
    from fairshare.explain.plan_tables import titled_table

    table = titled_table("", ("cycle", "target", "decided", "policy"), ("numbers", "differ"), folded="result")
    for each in replays:
        result = each.fault or each.reason or "the same, bit for bit"
        bad = bool(each.fault or each.differences)
        table.add_row(
            instant(each.cycle.at_ms), each.cycle.target, f"{each.cycle.kind}s", each.cycle.policy_version,
            f"{each.compared:,}", f"{len(each.differences):,}", Text(result, "red" if bad else ""),
        )  # fmt: skip
    table.add_section()
    differ = sum(len(each.differences) for each in replays)
    numbers = sum(each.compared for each in replays)
    table.add_row(f"{len(replays):,} cycles", "", "", "", f"{numbers:,}", f"{differ:,}", "")
    lines = [
        f"{d.decision}: {d.number}: recorded {d.recorded!r}, computed {d.recomputed!r}"
        for each in replays
        for d in each.differences
    ]
    if len(lines) > MOST_SHOWN:
        lines = [*lines[:MOST_SHOWN], f"and {len(lines) - MOST_SHOWN:,} more; --output json shows all"]
    return Group(table, *(Text(line, overflow="fold") for line in lines))


def _plain(replay: CycleReplay) -> dict[str, object]:
    cycle = replay.cycle
    return {
        "cycle": cycle.id,
        **{name: getattr(cycle, name) for name in ("at_ms", "target", "kind", "policy_version")},
        **{name: getattr(replay, name) for name in ("compared", "fault", "reason")},
        "differences": [asdict(difference) for difference in replay.differences],
    }
