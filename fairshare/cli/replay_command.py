"""Runs `replay`: compute past decisions again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from accountant.wire.policy_models import Decision
from fairshare.cli.command_options import DEFAULT_URL, CaPath, LedgerName, Printed, TokenPath, Url
from fairshare.explain.decision_replay import CycleReplay, recount
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.command_output import show
from gputally.base.errors import FairshareError
from gputally.base.units import MS_PER_DAY, MS_PER_MINUTE, MS_PER_SECOND

MOST_SHOWN = 50
"""Differences that are printed; JSON has all of them."""
_DECISION = re.compile(r"[0-9a-f]{16}/(\d{1,15})/.+")


class ReplayError(FairshareError):
    """There is nothing to replay under what was given."""


def replay(
    when: Annotated[str, typer.Argument(metavar="DATE|DECISION", help="2026-11-21, 2026-11-21T10:00Z, or an id.")],
    accountant: Url = DEFAULT_URL,
    token_file: TokenPath = None,
    ca_file: CaPath = None,
    cluster_name: LedgerName = "",
    output: Printed = "table",
) -> None:
    """Compute past weights and preemptions again from their recorded inputs; exit 1 where anything comes out otherwise.

    A date is a day, a time a minute, in UTC unless it says otherwise."""
    start_ms, end_ms, wanted = _span(when)
    with AccountantApi(accountant, token_file=token_file, ca_file=ca_file, cluster=cluster_name) as client:
        found = list(client.decisions(start_ms, end_ms))
        policies = {each.version: each.policy for each in client.policies()}
    chosen = [d for d in found if wanted in (None, d.id, d.inputs.get("cycle")) or d.id == _cycle_of(found, wanted)]
    counts = recount(chosen, policies, version("gputally"))
    if not counts:
        raise ReplayError(f"{when}: {_nothing(found, wanted)}")
    document = [_plain(count) for count in counts]
    show(output, lambda: _view(counts), document)
    if any(count.fault or count.differences for count in counts):
        raise typer.Exit(1)


def _span(when: str) -> tuple[int, int, str | None]:
    """(start, end, the decision's id where it is one). Raises ReplayError."""
    if found := _DECISION.fullmatch(when):
        at = int(found[1])
        return at, at + 1, when
    try:
        at_time = datetime.fromisoformat(when)
    except ValueError as error:
        raise ReplayError(f"{when}: neither a date (2026-11-21, 2026-11-21T10:00Z) nor a decision's id") from error
    start_ms = _ms(at_time if at_time.tzinfo is not None else at_time.replace(tzinfo=UTC))
    return start_ms, start_ms + (MS_PER_DAY if "T" not in when and " " not in when else MS_PER_MINUTE), None


def _ms(at: datetime) -> int:
    return round(at.timestamp() * MS_PER_SECOND)


def _cycle_of(found: Sequence[Decision], wanted: str) -> object:
    return next((d.inputs.get("cycle") for d in found if d.id == wanted), None)


def _nothing(found: Sequence[Decision], wanted: str | None) -> str:
    other = next((d for d in found if d.id == wanted), None)
    if other is not None:
        return f"a decision of kind {other.kind} holds no cycle's inputs: {other.reason}"
    return "no such decision" if wanted else "nothing was decided then"


def _view(counts: Sequence[CycleReplay]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("cycle", "target", "decided", "policy"):
        table.add_column(heading)
    for heading in ("numbers", "differ"):
        table.add_column(heading, justify="right")
    table.add_column("result", overflow="fold")
    for count in counts:
        told = count.fault or count.reason or "the same, bit for bit"
        bad = bool(count.fault or count.differences)
        at = datetime.fromtimestamp(count.cycle.at_ms / MS_PER_SECOND, UTC).isoformat(timespec="milliseconds")
        table.add_row(
            at.replace("+00:00", "Z"), count.cycle.target, f"{count.cycle.kind}s", count.cycle.policy_version,
            f"{count.compared:,}", f"{len(count.differences):,}", Text(told, "red" if bad else ""),
        )  # fmt: skip
    table.add_section()
    differ = sum(len(count.differences) for count in counts)
    numbers = sum(count.compared for count in counts)
    table.add_row(f"{len(counts):,} cycles", "", "", "", f"{numbers:,}", f"{differ:,}", "")
    lines = [
        f"{d.decision}: {d.number}: recorded {d.recorded!r}, computed {d.recomputed!r}"
        for count in counts
        for d in count.differences
    ]
    if len(lines) > MOST_SHOWN:
        lines = [*lines[:MOST_SHOWN], f"and {len(lines) - MOST_SHOWN:,} more; --output json shows all"]
    return Group(table, *(Text(line, overflow="fold") for line in lines))


def _plain(count: CycleReplay) -> dict[str, object]:
    return {
        "cycle": count.cycle.id,
        "at_ms": count.cycle.at_ms,
        "target": count.cycle.target,
        "kind": count.cycle.kind,
        "policy_version": count.cycle.policy_version,
        "compared": count.compared,
        "fault": count.fault,
        "reason": count.reason,
        "differences": [asdict(difference) for difference in count.differences],
    }
