"""Prints answers as tables with units and totals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, tzinfo
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from accountant.api.bookkeeping_models import (
    Balance,
    BookedAdjustment,
    BookedCorrection,
    Credit,
    DeliveryState,
    Period,
    PriceVersion,
    WaitingProposal,
)
from accountant.billing.costs import ACCOUNTS
from accountant.bookkeeping.invoice_reconciliation import Reconciliation
from accountant.bookkeeping.price_book_versions import PriceChange, PriceDiff
from accountant.core.periods import utc
from accountant.ledger.journal import Act
from accountant.reports.report_text import money
from accountant.wire.policy_models import IDLE, UNASSIGNED, UsageWindow
from accountant.wire.usage_models import CostAnswer, UsageAnswer
from gputally.base.money import exact_sum, minor_places
from gputally.base.number_format import NOTHING, hours, percent

if TYPE_CHECKING:
    from accountant.ledger.protocols import ClockReport, GpuOwnership, MisdatedRecords, RetiredDevice
    from accountant.storage.backups import Backup
    from accountant.storage.snapshot import Imbalance

NAMES = {IDLE: "(unallocated)", UNASSIGNED: "(unassigned)", "": NOTHING}
"""What people read for names that are none."""


def instant(at_ms: int, zone: ZoneInfo) -> str:
    return datetime.fromtimestamp(at_ms / 1000, zone).strftime("%Y-%m-%d %H:%M %Z")


def usage_table(answer: UsageAnswer, zone: ZoneInfo) -> Table:
    """GPU-hours per group and account, largest allocation first, with totals."""
    table = titled_table(f"GPU-hours, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}")
    for dimension in answer.by:
        table.add_column(dimension.replace("_", " "))
    shown = [account for account in ACCOUNTS if any(getattr(line.accounts_gpu_us, account) for line in answer.lines)]
    for account in shown:
        table.add_column(account.removeprefix("allocated_"), justify="right")
    table.add_column("total", justify="right", style="bold")
    for line in sorted(answer.lines, key=lambda line: (-line.accounts_gpu_us.allocated, *line.key.values())):
        table.add_row(
            *(NAMES.get(line.key[dimension], line.key[dimension]) for dimension in answer.by),
            *(hours(getattr(line.accounts_gpu_us, account)) for account in shown),
            hours(line.accounts_gpu_us.total),
        )
    table.add_section()
    table.add_row(
        *_label(len(answer.by), "total"),
        *(hours(sum(getattr(line.accounts_gpu_us, account) for line in answer.lines)) for account in shown),
        hours(sum(line.accounts_gpu_us.total for line in answer.lines)),
        style="bold",
    )
    table.caption = noted_caption(answer.note, _metered(answer))
    return table


def window_table(window: UsageWindow) -> Table:
    """Usage per queue, own plus descendants, largest first, with its share of the capacity."""
    table = titled_table(f"Usage by queue, {utc(window.start_ms)} to {utc(window.end_ms)}")
    table.add_column("queue")
    table.add_column("GPU-hours", justify="right", style="bold")
    table.add_column("of capacity", justify="right")
    shown = sorted(window.usage.items(), key=lambda item: (-item[1], item[0]))
    if window.unassigned:
        shown.append((UNASSIGNED, window.unassigned))
    for queue, used in shown:
        share = used / window.capacity if window.capacity else None
        table.add_row(NAMES.get(queue, queue), hours(used), percent(share))
    table.add_section()
    table.add_row("capacity", hours(window.capacity), "", style="bold")
    decay = f"half-life {window.half_life_s / 3_600:g} h; " if window.half_life_s else ""
    reaches = f"records up to {utc(window.watermark_ms)}" if window.watermark_ms else "no records"
    table.caption = f"{decay}{percent(window.coverage)} metered; {reaches}"
    return table


def cost_table(answer: CostAnswer, zone: ZoneInfo) -> Table:
    """Billed GPU-hours and cost per group, dearest first, with totals."""
    currency = answer.currency or "no price book"
    table = titled_table(f"Cost in {currency}, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}")
    for dimension in answer.by:
        table.add_column(dimension.replace("_", " "))
    table.add_column("GPU-hours", justify="right")
    table.add_column(f"cost {answer.currency or ''}".strip(), justify="right", style="bold")
    unpriced = answer.unpriced_gpu_us > 0
    if unpriced:
        table.add_column("unpriced GPU-hours", justify="right", style="yellow")
    tail: Callable[[int], tuple[str, ...]] = lambda us: (hours(us),) if unpriced else ()  # noqa: E731
    for line in sorted(answer.lines, key=lambda line: (-(line.cost or 0), -line.gpu_us, *line.key.values())):
        table.add_row(
            *(NAMES.get(line.key[dimension], line.key[dimension]) for dimension in answer.by),
            hours(line.gpu_us),
            money(line.cost, answer.currency),
            *tail(line.unpriced_gpu_us),
        )
    table.add_section()
    table.add_row(
        *_label(len(answer.by), "total"),
        hours(sum(line.gpu_us for line in answer.lines)),
        money(answer.total, answer.currency),
        *tail(answer.unpriced_gpu_us),
        style="bold",
    )
    priced = f"price book {answer.price_book_version or 'none'}" + (
        "; no cost where some of the time has no price" if unpriced else ""
    )
    table.caption = noted_caption(answer.note, priced)
    return table


def balance_table(balance: Balance) -> Table:
    """The ledger's health, one figure a line."""
    table = titled_table("The ledger")
    table.caption = balance.note or None
    table.show_header = False
    table.add_column("figure")
    table.add_column("value", justify="right")
    off = balance.imbalance_gpu_us
    verdict = Text(f"{off:,} µs apart", "red") if off else Text("balances")
    table.add_row("books", verdict)
    table.add_row("metered", percent(balance.coverage))
    table.add_row("rows in quarantine", f"{balance.quarantined_rows:,}")
    table.add_row("write-ahead log", f"{balance.wal_bytes:,} bytes")
    faults = len(balance.month_faults)
    chain = (f"{faults} faults", "red") if faults else "chain holds"
    table.add_row("closed months", Text.assemble(f"{balance.closed_months}, ", chain))
    for fault in balance.month_faults:
        table.add_row("month", fault)
    for difference in balance.differences:
        table.add_row("difference", difference)
    if balance.lake_days is not None:
        apart = len(balance.lake_differences)
        said = (f"{apart} differences", "red") if apart else "equals the ledger"
        table.add_row("lake", Text.assemble(f"{balance.lake_days} days, ", said))
    for difference in balance.lake_differences:
        table.add_row("difference", difference)
    return table


def _metered(answer: UsageAnswer) -> str:
    """The share that is metered; for a span without capacity it is not known."""
    if answer.coverage is None:
        return "nothing is recorded of this time"
    return f"{percent(answer.coverage)} of the capacity is metered"


def noted_caption(note: str, caption: str) -> str:
    """A caption that begins with what is particular about the answer."""
    return f"{note}\n{caption}" if note else caption


def titled_table(title: str) -> Table:
    """A table without columns, as all of ours look."""
    return Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def _label(columns: int, text: str) -> tuple[str, ...]:
    return (text, *[""] * (columns - 1)) if columns else ()


def in_force(version: str, corrections: int) -> Text:
    """After a price book was put there by hand."""
    return Text(
        f"in force: {version}; {corrections} correction lines booked\n"
        "Open months keep these prices until the price book's file is changed: close them first, or write the prices "
        "into the file."
    )


def trued_up(version: str, corrections: int) -> Text:
    """After a month was given an invoice's rates."""
    return Text(
        f"priced by: {version}; {corrections} correction lines booked\n"
        "The month keeps these rates when the price book's file is changed; to end that, reprice it by hand."
    )


def periods(found: Sequence[Period]) -> Table:
    """One month a line, with what stands against closing it."""
    table = titled_table("Months")
    for name in ("month", "status", "closed by", "statement"):
        table.add_column(name)
    for period in found:
        table.add_row(period.month, period.status, period.closed_by or NOTHING, (period.hash or NOTHING)[:16])
        for objection in period.objections:
            table.add_row("", Text(objection.kind, "yellow"), "", objection.text)
    return table


def backups(found: Sequence[Backup]) -> Table:
    """One a line, newest first, with its SHA-256."""
    table = titled_table("Backups")
    for name in ("name", "made (UTC)"):
        table.add_column(name)
    for name in ("MiB", "rows"):
        table.add_column(name, justify="right")
    table.add_column("SHA-256")
    for backup in found:
        size = f"{backup.bytes / 2**20:,.1f}"
        table.add_row(backup.name, _instant(backup.at_ms), size, f"{backup.rows:,}", backup.sha256[:16])
    return table


def retired(found: Sequence[RetiredDevice]) -> Table:
    """One GPU a line, by node."""
    table = titled_table("Retired GPUs")
    for name in ("node", "GPU", "model", "last record (UTC)", "no capacity from (UTC)"):
        table.add_column(name)
    for one in found:
        table.add_row(
            Text(one.node), Text(one.gpu_uuid), Text(one.gpu_model), _instant(one.last_ms), _instant(one.end_ms)
        )
    return table


def gpu_owners(found: Sequence[GpuOwnership]) -> Table:
    """One owner of a GPU a line, the present one last; then the nodes that claim it."""
    table = titled_table("Owners of GPUs")
    for name in ("cluster", "GPU", "node", "from (UTC)", "until (UTC)", "how it is known"):
        table.add_column(name)
    for one in found:
        for owner in one.owners:
            until = "now" if owner.until_ms is None else _instant(owner.until_ms)
            known = f"confirmed by {owner.confirmed_by}" if owner.confirmed_by else "records"
            table.add_row(
                Text(one.cluster), Text(one.gpu_uuid), Text(owner.node), _instant(owner.from_ms), until, Text(known)
            )
        for claim in one.claims:
            said = f"claims it: {claim.records} quarantined, the newest received"
            table.add_row(
                Text(one.cluster), Text(one.gpu_uuid), Text(claim.node), _instant(claim.newest_ms), Text(NOTHING),
                Text(said),
            )  # fmt: skip
    return table


def clock(found: ClockReport) -> Table:
    """Whether the clock is trusted, then what is dated later than now."""
    table = misdated_table(found.misdated)
    says = found.doubt or "the clock is trusted"
    agree = f"{found.agreeing} of {found.senders} agents agree with it"
    table.caption = f"{says}\nmachine: {_instant(found.wall_ms)}, taken for right: {_instant(found.told_ms)}; {agree}"
    return table


def misdated_table(found: Sequence[MisdatedRecords]) -> Table:
    """One kind a line."""
    table = titled_table("Dated later than now")
    table.add_column("what")
    table.add_column("how many", justify="right")
    for name in ("from (UTC)", "to (UTC)"):
        table.add_column(name, no_wrap=True)
    for name in ("which", "healing"):
        table.add_column(name, overflow="fold")
    for one in found:
        named = Text(", ".join(one.named) + (", …" if one.count > len(one.named) else ""))
        dates = _instant(one.first_ms), _instant(one.last_ms)
        table.add_row(one.kind, f"{one.count:,}", *dates, named, one.healing)
    return table


def deliveries(found: Sequence[DeliveryState]) -> Table:
    """One a line, newest first."""
    table = titled_table("Deliveries")
    for name in ("last (UTC)", "became of it"):
        table.add_column(name, no_wrap=True)
    table.add_column("tries", justify="right")
    table.add_column("next (UTC)", no_wrap=True)
    for name in ("key", "detail"):
        table.add_column(name, overflow="fold")
    for one in found:
        waits = one.outcome in ("unsure", "given-up")
        outcome = Text(one.outcome, "yellow" if waits else "")
        following = NOTHING if one.next_ms is None else _instant(one.next_ms)
        table.add_row(_instant(one.last_ms), outcome, str(one.tries), following, Text(one.key), Text(one.detail))
    return table


def restored(ledger: Path, start_ms: int, end_ms: int, act: Act | None, found: Imbalance) -> Group:
    """What is in a ledger that was rebuilt, and whether its books balance. act: the newest that it knows."""
    table = titled_table("Restored")
    for name in ("ledger", "from (UTC)", "to (UTC)"):
        table.add_column(name)
    table.add_column("imbalance, GPU-µs", justify="right")
    table.add_row(str(ledger), _instant(start_ms), _instant(end_ms), f"{found.total_us:,}")
    for line in found.lines:
        table.add_row(Text(str(line), "yellow"))
    last = f"act {act.number:,}, {_instant(act.at_ms)} UTC: {act.kind} {act.subject}" if act else "none"
    after = (
        f"Newest act of the books: {last}.\nWhat was closed, published, credited or put in force by hand later is not "
        "in it, and agents cannot tell it: do it again."
    )
    return Group(table, Text(after))


def _instant(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}" if at_ms else NOTHING


def corrections(found: Sequence[BookedCorrection]) -> Table:
    """In their order, with the sum of the amounts."""
    table = titled_table("Corrections")
    for name in ("about", "booked in", "team", "GPU", "account", "why"):
        table.add_column(name)
    for name in ("GPU-hours", "amount"):
        table.add_column(name, justify="right")
    for line in found:
        table.add_row(
            line.month, line.booked_in, line.team, line.gpu_model, line.detail or line.account, line.reason,
            _signed_hours(line.gpu_us), _signed(line.amount),
        )  # fmt: skip
    table.add_section()
    table.add_row("total", *[""] * 6, _signed(exact_sum(line.amount for line in found)), style="bold")
    return table


def proposals(found: Sequence[WaitingProposal], *, refused: bool = False) -> Table:
    """What would change, by month and team."""
    table = titled_table("Refused" if refused else "Waiting for an admin")
    for name in ("about", "booked in", "proposal", "team"):
        table.add_column(name)
    for name in ("GPU-hours", "amount"):
        table.add_column(name, justify="right")
    for one in found:
        for effect in one.effects:
            amount = NOTHING if one.currency is None else f"{_signed(effect.amount)} {one.currency}"
            table.add_row(one.month, one.booked_in, one.id, effect.team, _signed_hours(effect.gpu_us), amount)
    return table


def adjustments(found: Sequence[BookedAdjustment]) -> Table:
    """In their order, with who approved them."""
    table = titled_table("Credits and charges")
    for name in ("about", "booked in", "team", "reason", "by", "approved by"):
        table.add_column(name)
    table.add_column("amount", justify="right", style="bold")
    for line in found:
        amount = f"{_signed(line.amount)} {line.currency}"
        table.add_row(line.month, line.booked_in, line.team, line.reason, line.who, line.approved_by, amount)
    return table


def credit(found: Credit) -> Table:
    """The credit of each team, with the total."""
    table = titled_table(f"A credit for {found.node}, not booked")
    table.add_column("team")
    for name in ("GPU-hours", "billed", f"credit {found.currency or ''}"):
        table.add_column(name.strip(), justify="right")
    for line in found.lines:
        table.add_row(line.team, hours(line.gpu_us), money(line.billed, found.currency), _signed(line.amount))
    table.add_section()
    whole = sum(line.gpu_us for line in found.lines)
    billed = exact_sum(line.billed for line in found.lines)
    table.add_row("all", hours(whole), money(billed, found.currency), _signed(found.amount))
    return table


def price_diff(diff: PriceDiff) -> Table:
    """What changes, largest first, and the totals."""
    table = titled_table(f"{diff.month}: price book {diff.version_before or 'none'} to {diff.version_after or 'none'}")
    for name in ("team", "GPU", "capacity"):
        table.add_column(name)
    for name in ("GPU-hours", f"before {diff.currency_before or ''}", f"after {diff.currency_after or ''}", "change"):
        table.add_column(name.strip(), justify="right")
    for line in sorted(diff.changes, key=lambda line: (-_size(line), line.team, line.gpu_model)):
        change = _change(diff, line.before, line.after)
        table.add_row(
            line.team, line.gpu_model, line.capacity_type, hours(line.gpu_us),
            money(line.before, diff.currency_before), money(line.after, diff.currency_after), change,
        )  # fmt: skip
    table.add_section()
    totals = money(diff.total_before, diff.currency_before), money(diff.total_after, diff.currency_after)
    table.add_row("total", "", "", "", *totals, _change(diff, diff.total_before, diff.total_after), style="bold")
    table.caption = (
        f"{hours(diff.unpriced_after_us)} GPU-hours without a price (before: {hours(diff.unpriced_before_us)})"
    )
    return table


def reconciliation(found: Reconciliation) -> Table:
    """One kind of GPU, or item that is none, a line; every line and the totals add up."""
    table = titled_table(f"{found.month}: {found.source} against the books, {found.currency}")
    for name in ("item", "GPU", "region", "capacity"):
        table.add_column(name)
    for name in ("invoice", "= teams", "+ idle", "+ unused", "+ unmatched", "per GPU-hour"):
        table.add_column(name, justify="right")
    for line in found.lines:
        amounts = (
            money(value, found.currency)
            for value in (line.invoice, line.teams, line.idle, line.unused_commitments, line.unmatched)
        )
        rate = NOTHING if line.rate is None else f"{line.rate:.6f}"
        table.add_row(", ".join(line.items), line.gpu_model, line.region, line.capacity_type, *amounts, rate)
    table.add_section()
    totals = (
        money(value, found.currency)
        for value in (found.invoice, found.teams, found.idle, found.unused_commitments, found.unmatched)
    )
    table.add_row("total", "", "", "", *totals, style="bold")
    table.caption = (
        "unused: paid for in advance and not taken up; "
        f"{money(found.not_invoiced, found.currency)} billed that no invoice line answers to; "
        f"{hours(found.unpriced_gpu_us)} GPU-hours without a price"
    )
    return table


def price_versions(found: Sequence[PriceVersion], zone: tzinfo) -> Table:
    """Oldest first."""
    table = titled_table("Price books")
    for name in ("since", "version", "currency", "rows", "by", "reason"):
        table.add_column(name, justify="right" if name == "rows" else "left")
    for version in found:
        since = datetime.fromtimestamp(version.at_ms / 1000, zone).strftime("%Y-%m-%d %H:%M %Z")
        table.add_row(since, version.version, version.currency, str(version.rows), version.who, version.reason)
    return table


def _change(diff: PriceDiff, before: Decimal | None, after: Decimal | None) -> str:
    """In minor units; none between two currencies."""
    currency = diff.currency_after
    if before is None or after is None or currency is None or diff.currency_before not in (None, currency):
        return NOTHING
    return _signed(exact_sum([after, -before]), minor_places(currency))


def _size(line: PriceChange) -> Decimal:
    return abs((line.after or Decimal(0)) - (line.before or Decimal(0)))


def _signed(amount: Decimal, places: int | None = None) -> str:
    return f"{amount:+,}" if places is None else f"{amount:+,.{places}f}"


def _signed_hours(gpu_us: int) -> str:
    return ("-" if gpu_us < 0 else "+") + hours(abs(gpu_us))
