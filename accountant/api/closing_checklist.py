"""Says what is still open or unknown of a month before it is closed, as one list.

Some of it objects to closing (accountant.bookkeeping.month_closing): whoever closes has to accept it, with a reason.
The rest only costs an answer later: an amount that a team asks about, or a correction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Final
from zoneinfo import ZoneInfo

from accountant.api.bookkeeping_models import ChecklistLine, ObjectionLine
from accountant.api.dependencies import Deps
from accountant.api.months_due import MonthsDue
from accountant.api.query_parameters import explored_month
from accountant.bookkeeping.month_closing import Objecting, Objection
from accountant.core.periods import Month
from accountant.core.record_age import silent_nodes
from accountant.wire.policy_models import UNASSIGNED
from gputally.base.near_names import joined_names
from gputally.base.number_format import hours, percent
from gputally.base.units import MS_PER_SECOND

_CLEAR: Final[dict[Objecting, str]] = {
    "grace": "no late records are waited for", "quarantined": "no record of the month is in quarantine",
    "proposals": "no late change of a closed month waits for a decision",
}  # fmt: skip


def checklist(
    deps: Deps, month: Month, objections: Sequence[Objection | ObjectionLine], due: MonthsDue
) -> tuple[ChecklistLine, ...]:
    """What closing an open month asks. objections, due: of this month."""
    objecting = {one.kind: one.text for one in objections}
    zone, now = deps.settings.zone, deps.clock.wall_ms()
    start, end = month.span(zone)
    is_over = end <= now
    explored = partial(explored_month, month, is_over=is_over)

    def of(kind: Objecting, item: str, link: str, clear: str = "") -> ChecklistLine:
        text = objecting.get(kind)
        is_clear = text is None
        return ChecklistLine(
            item=item, state="clear" if is_clear else "objects", text=text or clear or _CLEAR[kind], link=link
        )

    metered = percent(due.coverage) if due.recorded else "nothing"
    late = _late_nodes(deps, start, min(end, now))
    drafts = deps.books.drafts.of(month)
    invoice = deps.books.invoices.newest(month)
    lines = [
        ChecklistLine(
            item="month", state="clear" if is_over else "open", link=f"/month/{month}",
            text="it is over" if is_over else f"it lasts until {_local(end, zone)}",
        ),
        of("grace", "late records", explored({"by": "node"})),
        of("coverage", "coverage", explored({"by": "node", "sort": "unmetered:desc", "columns": "unmetered,capacity"}),
           f"{metered} of the capacity is metered"),
        ChecklistLine(
            item="late nodes", state="open" if late else "clear", link="/nodes?sort=silent",
            text=f"no records up to the month's end, or to the present, from {joined_names(late)}" if late
            else "every node has sent records up to the month's end, or to the present",
        ),
        of("unpriced", "prices", "/prices", "all billed time has a price"),
        ChecklistLine(
            item="queues", state="open" if due.unassigned_us else "clear",
            link=explored({"by": "queue,namespace", "where.team": UNASSIGNED}),
            text=f"{hours(due.unassigned_us)} GPU-hours are of no team: no queue or namespace names one"
            if due.unassigned_us else "all held time is of a team",
        ),
        of("quarantined", "quarantine", "/coverage"),
        of("proposals", "late changes", "/proposals"),
        ChecklistLine(
            item="provider's invoice", state="open" if invoice is None else "clear", link=f"/invoice/{month}",
            text="none is stored, so nothing is reconciled" if invoice is None
            else f"{invoice.invoice.source} is stored: compare what is unmatched",
        ),
        ChecklistLine(
            item="draft", state="clear" if drafts else "open", link=f"/invoices/{month}#changed",
            text=f"the newest is of {_local(drafts[-1].at_ms, zone)}: see what changed since" if drafts
            else "none was kept, so nobody saw the amounts before",
        ),
    ]  # fmt: skip
    return tuple(lines)


def _late_nodes(deps: Deps, start_ms: int, until_ms: int) -> list[str]:
    """The nodes that reported in a span, and stopped before its end while others went on."""
    status = deps.ledger.status()
    silent = silent_nodes(status.newest_by_node, min(until_ms, status.newest_ms))
    return sorted(node for (_, node), newest_ms in silent.items() if newest_ms > start_ms)


def _local(at_ms: int, zone: ZoneInfo) -> str:
    return f"{datetime.fromtimestamp(at_ms // MS_PER_SECOND, zone):%Y-%m-%d %H:%M}"
