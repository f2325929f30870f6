"""Formats the accountant's answers as tables for the terminal, with units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from accountant.api.bookkeeping_models import (
    AdjustmentPreview,
    Balance,
    BookedAdjustment,
    BookedCorrection,
    ChangesAnswer,
    Credit,
    DeliveryState,
    DraftLine,
    Period,
    PriceVersion,
    WaitingProposal,
)
from accountant.bookkeeping.invoice_reconciliation import ReconciledLine, Reconciliation
from accountant.bookkeeping.price_book_versions import PriceChange, PriceDiff
from accountant.cli.grouped_lines import NAMES
from accountant.core.periods import Days, utc
from accountant.ledger.journal import Act
from accountant.ledger.usage import ACCOUNTS
from accountant.reports.figure_formatting import budget_of, budgeted, money, relative_of
from accountant.wire.policy_models import IDLE, UNASSIGNED, UsageWindow
from accountant.wire.usage_cost_and_job_models import (
    Accounts,
    BudgetState,
    CostAnswer,
    CostLine,
    GuaranteesAnswer,
    SpanBefore,
    UnusedAnswer,
    UnusedLine,
    UsageAnswer,
    WaitLine,
)
from gputally.base.money import exact_sum, minor_places, sum_if_known
from gputally.base.number_format import NOTHING, hours, percent
from gputally.base.terminal import figures, table
from gputally.base.units import MS_PER_DAY, MS_PER_MINUTE

if TYPE_CHECKING:
    from accountant.ledger.protocols import ClockReport, GpuOwnership, Imbalance, MisdatedRecords, RetiredDevice
    from accountant.storage.backups import Backup


def instant(at_ms: int, zone: tzinfo) -> str:
    """An instant as text to the minute, with the time zone."""
    return datetime.fromtimestamp(at_ms / 1000, zone).strftime("%Y-%m-%d %H:%M %Z")


def usage_table(answer: UsageAnswer, zone: ZoneInfo, most: int | None = None) -> Table:
    """A table of GPU-hours per group and account, with the totals of all groups. most: the lines that are shown; None:
    all."""
    shown = [account for account in ACCOUNTS if any(getattr(line.accounts_gpu_us, account) for line in answer.lines)]

    def time(accounts: Sequence[Accounts]) -> list[str]:
        by_account = [hours(sum(getattr(one, account) for one in accounts)) for account in shown]
        return [*by_account, hours(sum(one.total for one in accounts))]

    return table(
        f"GPU-hours, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}",
        [*_dimensions(answer.by), *figures(*(name.removeprefix("allocated_") for name in shown)),
         *figures("total", style="bold")],
        ([*_group(answer.by, line.key), *time([line.accounts_gpu_us])] for line in answer.lines[:most]),
        total=[*_label(len(answer.by), "total"), *time([line.accounts_gpu_us for line in answer.lines])],
        caption=_left_out(len(answer.lines), most) + noted_caption(answer.note, _metered(answer)),
        may_drop=("down", "unknown", "unmetered", "unallocated", "idle", "busy"),
    )  # fmt: skip


def window_table(window: UsageWindow) -> Table:
    """A table of the usage of each queue with its descendants, the largest first, and its part of the capacity."""
    shown = sorted(window.usage.items(), key=lambda item: (-item[1], item[0]))
    if window.unassigned:
        shown.append((UNASSIGNED, window.unassigned))
    decay = f"half-life {window.half_life_s / 3_600:g} h; " if window.half_life_s else ""
    reaches = f"records up to {utc(window.watermark_ms)}" if window.watermark_ms else "no records"
    return table(
        f"Usage by queue, {utc(window.start_ms)} to {utc(window.end_ms)}",
        ["queue", *figures("GPU-hours", style="bold"), *figures("of capacity")],
        (
            (NAMES.get(queue, queue), hours(used), percent(used / window.capacity if window.capacity else None))
            for queue, used in shown
        ),
        total=("capacity", hours(window.capacity), ""),
        caption=f"{decay}{percent(window.coverage)} metered; {reaches}",
    )


def cost_table(answer: CostAnswer, zone: ZoneInfo, most: int | None = None) -> Table:
    """A table of billed GPU-hours and cost per group, with the totals of all groups. If time of one group is both held
    and not held, its cost is divided. Costs are the amounts that pages show, if the answer has them. most: the lines
    that are shown; None: all."""
    currency, unpriced = answer.currency, answer.unpriced_gpu_us > 0
    divided = any(line.held_cost and line.unheld_cost for line in answer.lines)

    def figures_of(gpu_us: int, cost: Decimal | None, unheld: Decimal | None, unpriced_us: int) -> list[str]:
        parts = [money(unheld, currency)] if divided else []
        return [hours(gpu_us), money(cost, currency), *parts, *([hours(unpriced_us)] if unpriced else [])]

    def unheld_of(line: CostLine) -> Decimal | None:
        return line.unheld_cost if line.unheld_amount is None else line.unheld_amount

    whole = sum_if_known(map(unheld_of, answer.lines))

    return table(
        f"Cost in {currency or 'no price book'}, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}",
        [*_dimensions(answer.by), *figures("GPU-hours"), *figures(f"cost {currency or ''}", style="bold"),
         *(figures("of it not held") if divided else []),
         *(figures("unpriced GPU-hours", style="yellow") if unpriced else [])],
        (
            [*_group(answer.by, line.key), *figures_of(
                line.gpu_us, line.cost if line.amount is None else line.amount, unheld_of(line), line.unpriced_gpu_us
            )]
            for line in answer.lines[:most]
        ),
        total=[
            *_label(len(answer.by), "total"),
            *figures_of(
                sum(line.gpu_us for line in answer.lines),
                answer.total if answer.total_amount is None else answer.total_amount, whole, answer.unpriced_gpu_us,
            ),
        ],
        caption=_left_out(len(answer.lines), most)
        + noted_caption(answer.note, priced_by(answer.price_book_version, unpriced=unpriced)),
    )  # fmt: skip


def _left_out(lines: int, most: int | None) -> str:
    """The line that says how many lines are not shown; "" if all are."""
    return f"{lines - most:,} more: --limit, --search, --sort\n" if most is not None and lines > most else ""


def balance_table(balance: Balance) -> Table:
    """A table of the result of a ledger check, one figure per line."""
    imbalance_us, faults = balance.imbalance_gpu_us, len(balance.month_faults)
    chain = (f"{faults} faults in the hash chain", "red") if faults else "hash chain is whole"
    rows: list[tuple[str, RenderableType]] = [
        ("books", Text(f"{imbalance_us:,} GPU-µs of imbalance", "red") if imbalance_us else Text("balance")),
        ("metered", percent(balance.coverage)),
        ("rows in quarantine", f"{balance.quarantined_rows:,}"),
        ("write-ahead log", f"{balance.wal_bytes:,} bytes"),
        ("closed months", Text.assemble(f"{balance.closed_months}, ", chain)),
        *(("month", fault) for fault in balance.month_faults),
        *(("difference", difference) for difference in balance.differences),
    ]
    if balance.lake_days is not None:
        differences = len(balance.lake_differences)
        result = (f"{differences} differences", "red") if differences else "equals the ledger"
        rows.append(("lake", Text.assemble(f"{balance.lake_days} days, ", result)))
    rows += [("difference", difference) for difference in balance.lake_differences]
    rows_table = table("The ledger", ["figure", *figures("value")], rows, caption=balance.note)
    rows_table.show_header = False
    return rows_table


def _dimensions(by: Iterable[str]) -> list[str]:
    return [dimension.replace("_", " ") for dimension in by]


def _group(by: Iterable[str], key: Mapping[str, str]) -> list[str]:
    return [NAMES.get(key[dimension], key[dimension]) for dimension in by]


def priced_by(version: str, *, unpriced: bool) -> str:
    """The caption of a table of costs. unpriced: whether some of the time has no price."""
    return f"price book {version or 'none'}" + ("; no cost where some of the time has no price" if unpriced else "")


def _metered(answer: UsageAnswer) -> str:
    """The metered share of the capacity as text."""
    if answer.coverage is None:
        return "the ledger has no records of this time"
    return f"{percent(answer.coverage)} of the capacity is metered"


def noted_caption(note: str, caption: str) -> str:
    """A caption that begins with the answer's note, if it has one."""
    return f"{note}\n{caption}" if note else caption


def changed(now_us: int | None, before_us: int | None, before: SpanBefore | None) -> str:
    """GPU-hours of the span before and of this one, and the change: `8.0 → 10.0, +25.0 %`. before: how they are
    compared."""
    if now_us is None or before_us is None:
        return NOTHING
    by_day = None
    if before is not None and before.compared_ms is not None:
        by_day = Days(*(Decimal(ms) / MS_PER_DAY for ms in (before.compared_ms, before.end_ms - before.start_ms)))
    return f"{hours(before_us)} → {hours(now_us)}, {relative_of(now_us, before_us, by_day)}"


def compared_with(before: SpanBefore | None, zone: tzinfo) -> str:
    """The rest of a caption: what the column `change` compares with."""
    if before is None:
        return ""
    known = f"{percent(before.coverage)} metered" if before.coverage else "of which nothing is known"
    known += ", by day because records begin there" if before.compared_ms is not None else ""
    return f"; change: held GPU-hours from {instant(before.start_ms, zone)} to {instant(before.end_ms, zone)}, {known}"


def _label(columns: int, text: str) -> tuple[str, ...]:
    return (text, *[""] * (columns - 1)) if columns else ()


def in_force(version: str, corrections: int) -> Text:
    """The text after a price book was put in force by hand."""
    return Text(
        f"in force: {version}; {corrections} correction lines booked\n"
        "Open months have these prices until the price file changes: close them before, or write the prices into the "
        "file."
    )


def trued_up(version: str, corrections: int) -> Text:
    """The text after a month was priced by an invoice's rates."""
    return Text(
        f"priced by: {version}; {corrections} correction lines booked\n"
        "The month keeps these rates even if the price file changes; `reprice` replaces them."
    )


def periods(months: Sequence[Period]) -> Table:
    """A table with one month per line, and the objections to closing it."""
    rows: list[tuple[RenderableType, ...]] = []
    for period in months:
        rows.append(
            (period.month, period.status, period.closed_by or NOTHING, (period.hash or "")[:16] or period.state)
        )
        rows += [("", Text(objection.kind, "yellow"), "", objection.text) for objection in period.objections]
    return table("Months", ["month", "status", "closed by", "statement"], rows)


def checklist(period: Period) -> Table:
    """A table of what closing a month asks."""
    return table(
        f"What closing {period.month} asks",
        ["item", "state", "what is known"],
        ((one.item, Text(one.state, "yellow" if one.state == "objects" else ""), one.text) for one in period.checklist),
    )


def backups(stored: Sequence[Backup]) -> Table:
    """A table with one backup per line, newest first; its damage in place of a SHA-256 that is unknown."""
    return table(
        "Backups",
        ["name", "made (UTC)", *figures("MiB", "rows"), "SHA-256"],
        (
            (
                backup.name,
                _instant(backup.at_ms),
                "" if backup.bytes is None else f"{backup.bytes / 2**20:,.1f}",
                "" if backup.rows is None else f"{backup.rows:,}",
                backup.damage if backup.sha256 is None else backup.sha256[:16],
            )
            for backup in stored
        ),
    )


def retired(devices: Sequence[RetiredDevice]) -> Table:
    """A table with one retired GPU per line."""
    return table(
        "Retired GPUs",
        ["node", "GPU", "model", "last record (UTC)", "no capacity from (UTC)"],
        (
            (device.node, device.gpu_uuid, device.gpu_model, _instant(device.last_ms), _instant(device.end_ms))
            for device in devices
        ),
    )


def gpu_owners(ownerships: Sequence[GpuOwnership]) -> Table:
    """A table of the owners of each GPU, the present one last, and of the nodes that claim it."""
    rows: list[tuple[str, ...]] = []
    for gpu in ownerships:
        for owner in gpu.owners:
            until = "now" if owner.until_ms is None else _instant(owner.until_ms)
            evidence = f"confirmed by {owner.confirmed_by}" if owner.confirmed_by else "records"
            rows.append((gpu.cluster, gpu.gpu_uuid, owner.node, _instant(owner.from_ms), until, evidence))
        for claim in gpu.claims:
            claim_text = f"claims it: {claim.records} quarantined, the newest received"
            rows.append((gpu.cluster, gpu.gpu_uuid, claim.node, _instant(claim.newest_ms), NOTHING, claim_text))
    return table("Owners of GPUs", ["cluster", "GPU", "node", "from (UTC)", "until (UTC)", "evidence"], rows)


def clock(report: ClockReport) -> Table:
    """A table of the items dated in the future, with the state of the clock as its caption."""
    state = report.doubt or "the clock is trusted"
    agree = f"{report.agreeing} of {report.senders} agents agree with the machine"
    times = f"machine: {_instant(report.wall_ms)}, accountant: {_instant(report.told_ms)}; {agree}"
    return misdated_table(report.misdated, f"{state}\n{times}")


def misdated_table(kinds: Sequence[MisdatedRecords], caption: str = "") -> Table:
    """A table with one kind of misdated item per line."""
    return table(
        "Items dated in the future",
        ["what", *figures("how many"), *_unbroken("from (UTC)", "to (UTC)"), *_folded("examples", "correction")],
        (
            (kind.kind, f"{kind.count:,}", _instant(kind.first_ms), _instant(kind.last_ms),
             ", ".join(kind.named) + (", …" if kind.count > len(kind.named) else ""), kind.healing)
            for kind in kinds
        ),
        caption=caption,
    )  # fmt: skip


def deliveries(states: Sequence[DeliveryState]) -> Table:
    """A table with one delivery per line, newest first."""
    rows = []
    for state in states:
        outcome = Text(state.outcome, "yellow" if state.outcome in ("unsure", "given-up") else "")
        following = NOTHING if state.next_ms is None else _instant(state.next_ms)
        rows.append((_instant(state.last_ms), outcome, str(state.tries), following, state.key, state.detail))
    columns = [*_unbroken("last (UTC)", "outcome"), *figures("tries"), *_unbroken("next (UTC)")]
    return table("Deliveries", [*columns, *_folded("key", "detail")], rows)


def _unbroken(*headings: str) -> list[Column]:
    return [Column(heading, no_wrap=True) for heading in headings]


def _folded(*headings: str) -> list[Column]:
    return [Column(heading, overflow="fold") for heading in headings]


def restored(ledger: Path, start_ms: int, end_ms: int, act: Act | None, imbalance: Imbalance) -> Group:
    """A table of the content of a rebuilt ledger and its imbalance, and a note about its journal. act: the newest entry
    of the journal; None if there is none."""
    rows: list[tuple[RenderableType, ...]] = [
        (str(ledger), _instant(start_ms), _instant(end_ms), f"{imbalance.total_us:,}"),
        *((Text(str(line), "yellow"),) for line in imbalance.lines),
    ]
    ledger_table = table("Restored", ["ledger", "from (UTC)", "to (UTC)", *figures("imbalance, GPU-µs")], rows)
    last = f"act {act.number:,}, {_instant(act.at_ms)} UTC: {act.kind} {act.subject}" if act else "none"
    after = (
        f"Newest administrative act: {last}.\nLater closes, publications, credits and price books are lost, because "
        "agents do not report them: repeat these acts."
    )
    return Group(ledger_table, Text(after))


def _instant(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}" if at_ms else NOTHING


def corrections(booked: Sequence[BookedCorrection]) -> Table:
    """A table of corrections in the order of booking, with the sum of their amounts."""
    return table(
        "Corrections",
        ["about", "booked in", "team", "GPU", "account", "why", *figures("GPU-hours", "amount")],
        (
            (line.month, line.booked_in, line.team, line.gpu_model, line.detail or line.account, line.reason,
             _signed_hours(line.gpu_us), _signed(line.amount))
            for line in booked
        ),
        total=["total", *[""] * 6, _signed(exact_sum(line.amount for line in booked))],
    )  # fmt: skip


def proposals(waiting: Sequence[WaitingProposal], *, refused: bool = False) -> Table:
    """A table of the late changes of closed months, by month and team. refused: they were refused, and do not wait."""
    rows = []
    for proposal in waiting:
        for effect in proposal.effects:
            amount = NOTHING if proposal.currency is None else f"{_signed(effect.amount)} {proposal.currency}"
            rows.append(
                (proposal.month, proposal.booked_in, proposal.id, effect.team, _signed_hours(effect.gpu_us), amount)
            )
    title = "Refused" if refused else "Waiting for an administrator"
    return table(title, ["about", "booked in", "proposal", "team", *figures("GPU-hours", "amount")], rows)


def adjustments(booked: Sequence[BookedAdjustment]) -> Table:
    """A table of credits and charges in the order of booking."""
    return table(
        "Credits and charges",
        ["about", "booked in", "team", "reason", "by", "approved by", *figures("amount", style="bold")],
        (
            (line.month, line.booked_in, line.team, line.reason, line.who, line.approved_by,
             f"{_signed(line.amount)} {line.currency}")
            for line in booked
        ),
    )  # fmt: skip


def adjustment_preview(one: AdjustmentPreview) -> Table:
    """A table of what a credit or charge would change."""
    unit = f" {one.currency}"
    return table(
        "A credit or charge, not booked: --yes books it",
        ["about", "booked in", "team", "reason", "approved by", *figures(f"charged there{unit}", "amount", "then")],
        [(one.month, one.booked_in, one.team, one.reason, one.approved_by, money(one.before, one.currency),
          _signed(one.amount), money(one.after, one.currency))],
    )  # fmt: skip


def budgets(states: Sequence[BudgetState]) -> Table:
    """A table of budgets, with the forecast of the whole month and the bounds of its middle 80 %."""
    return table(
        f"Budgets of {states[0].month}" if states else "Budgets",
        ["budget", "of", "unit", *figures("limit", "spent", "used", "forecast", "80 % between")],
        (
            (
                f"{one.name} ({one.gpu_model})" if one.gpu_model else one.name,
                budget_of(one),
                one.unit,
                budgeted(one.limit, one.unit),
                "unknown" if one.spent is None else budgeted(one.shown, one.unit),
                percent(one.ratio),
                budgeted(one.forecast, one.unit),
                NOTHING
                if one.forecast_low is None
                else f"{budgeted(one.forecast_low, one.unit)} – {budgeted(one.forecast_high, one.unit)}",
            )
            for one in states
        ),
        may_drop=("80 % between", "unit"),
    )


def draft(kept: DraftLine, zone: ZoneInfo) -> Table:
    """A table of what a draft keeps."""
    return table(
        f"Draft of {kept.month} until {instant(kept.until_ms, zone)}, act {kept.act}",
        ["team", *figures(f"charged {kept.currency}")],
        ((NAMES.get(team, team), money(amount, kept.currency)) for team, amount in sorted(kept.charged.items())),
    )


def changes(answer: ChangesAnswer, zone: ZoneInfo) -> RenderableType:
    """A table of the amounts in the draft and now, and one of what changed a month."""
    since = instant(answer.since_ms, zone)
    known = f"its draft of {since}" if answer.draft else f"{since}, without a draft: acts and prices only"
    causes = table(
        f"What changed {answer.month} since {known}",
        ["cause", "team", *figures(f"amount {answer.currency or ''}"), "when", "why", "by"],
        (
            (
                one.cause,
                NAMES.get(one.team, one.team),
                money(one.amount, answer.currency),
                NOTHING if one.at_ms is None else instant(one.at_ms, zone),
                one.reason or NOTHING,
                one.who or NOTHING,
            )
            for one in answer.changes
        ),
        may_drop=("when",),
    )
    if not answer.teams:
        return causes
    places = None if answer.currency is None else minor_places(answer.currency)
    billed = [one for one in answer.teams if one.team != IDLE]
    sums = exact_sum(one.draft for one in billed), exact_sum(one.now for one in billed)
    amounts = [(one.team, one.draft, one.now) for one in billed] + [("together", *sums)]
    amounts += [(NAMES[IDLE], one.draft, one.now) for one in answer.teams if one.team == IDLE]
    return Group(
        table(
            f"Amounts of {answer.month}, in the draft and now",
            ["team", *figures(*(f"{name} {answer.currency or ''}" for name in ("in the draft", "change", "now")))],
            ((NAMES.get(team, team), money(then, answer.currency), _signed(exact_sum([now, -then]), places),
              money(now, answer.currency)) for team, then, now in amounts),
        ),
        causes,
    )  # fmt: skip


def guarantees(answer: GuaranteesAnswer, zone: ZoneInfo) -> Table:
    """A table of what each queue is guaranteed and held on average, in GPUs."""
    until = "Guarantees"
    if answer.coverage is not None:
        minutes = (answer.end_ms - answer.start_ms) // MS_PER_MINUTE
        until = f"Guarantees, and GPUs held on average in the {minutes} minutes until {instant(answer.end_ms, zone)}"
    return table(
        f"{until}, {percent(answer.coverage)} metered",
        ["queue", "team", "GPU model", *figures("guaranteed", "mean held", "above")],
        (
            (
                one.queue,
                NAMES.get(one.team, one.team),
                one.gpu_model or NOTHING,
                "unlimited" if one.guaranteed_gpus is None else _gpus(one.guaranteed_gpus),
                NOTHING if one.held_gpus is None else _gpus(one.held_gpus),
                NOTHING if one.above_gpus is None else _gpus(one.above_gpus),
            )
            for one in answer.queues
        ),
        may_drop=("GPU model",),
    )


def waits(lines: Sequence[WaitLine], by: str, start: str | None, end: str | None) -> Table:
    """A table of how long the pods of each group waited, the longest mean first; unknown waits come last. start, end:
    as asked."""
    shown = sorted(lines, key=lambda line: (line.queued.mean is None, -(line.queued.mean or 0), line.key))
    notes = dict.fromkeys(line.note for line in lines if line.note)
    return table(
        f"Waits in queues, hours, {start or 'this month'} to {end or 'now'}",
        [by, *figures("pods", "waiting now", "mean", "median", "95 %", "longest", "to start")],
        (
            (
                NAMES.get(line.key, line.key),
                f"{line.pods:,}",
                NOTHING if line.waiting is None else f"{line.waiting:,}",
                *(_of_seconds(getattr(line.queued, name)) for name in ("mean", "median", "p95", "longest")),
                _of_seconds(line.starting.mean),
            )
            for line in shown
        ),
        caption="\n".join([*notes, "to start: mean from the place on a node to the first container"]),
        may_drop=("to start", "longest"),
    )


def unused(answer: UnusedAnswer, zone: ZoneInfo) -> Table:
    """A table of the GPU-hours that were unused while pods waited, by hour, day or month."""

    def cells(line: UnusedLine) -> list[str]:
        known = (line.asked_gpu_us, line.free_gpu_us, line.idle_gpu_us)
        return [*(NOTHING if gpu_us is None else hours(gpu_us) for gpu_us in known),
                percent(1 - line.known_ms / (line.end_ms - line.start_ms))]  # fmt: skip

    why = "at most: free GPUs may be on other nodes, of another model, or parts of GPUs"
    return table(
        f"GPU-hours unused while pods waited, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}",
        [f"{answer.unit} from", *figures("asked for", "free, at most", "held idle, at most", "unknown time")],
        ([instant(line.start_ms, zone), *cells(line)] for line in answer.lines),
        total=None if answer.total is None else ["total", *cells(answer.total)],
        caption=noted_caption(answer.note, f"unknown: {answer.unknown}" if answer.unknown else why),
        may_drop=("unknown time",),
    )  # fmt: skip


def _of_seconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds / 3_600:,.2f}"


def _gpus(count: Decimal) -> str:
    return f"{count:,.1f}"


def credit(found: Credit) -> Table:
    """A table of the credit of each team, with the total."""
    whole, billed = sum(line.gpu_us for line in found.lines), exact_sum(line.billed for line in found.lines)
    return table(
        f"A credit for {found.node}, not booked",
        ["team", *figures("GPU-hours", "billed", f"credit {found.currency or ''}")],
        (
            (line.team, hours(line.gpu_us), money(line.billed, found.currency), _signed(line.amount))
            for line in found.lines
        ),
        total=("all", hours(whole), money(billed, found.currency), _signed(found.amount)),
    )


def price_diff(diff: PriceDiff) -> Table:
    """A table of the changes by another price book, the largest first, with totals."""
    before, after = diff.currency_before, diff.currency_after
    totals = money(diff.total_before, before), money(diff.total_after, after)
    return table(
        f"{diff.month}: price book {diff.version_before or 'none'} to {diff.version_after or 'none'}",
        ["team", "GPU", "capacity", *figures("GPU-hours", f"before {before or ''}", f"after {after or ''}", "change")],
        (
            (line.team, line.gpu_model, line.capacity_type, hours(line.gpu_us), money(line.before, before),
             money(line.after, after), _change(diff, line.before, line.after))
            for line in sorted(diff.changes, key=lambda line: (-_size(line), line.team, line.gpu_model))
        ),
        total=("total", "", "", "", *totals, _change(diff, diff.total_before, diff.total_after)),
        caption=f"{hours(diff.unpriced_after_us)} GPU-hours without a price "
        f"(before: {hours(diff.unpriced_before_us)})",
    )  # fmt: skip


def reconciliation(result: Reconciliation) -> Table:
    """A table of an invoice with one line per kind of GPU or other item. Each line and the totals add up."""

    def amounts(row: Reconciliation | ReconciledLine) -> list[str]:
        values = row.invoice, row.teams, row.idle, row.unused_commitments, row.unmatched
        return [money(value, result.currency) for value in values]

    return table(
        f"{result.month}: {result.source} compared with the bills, {result.currency}",
        ["item", "GPU", "region", "capacity",
         *figures("invoice", "= teams", "+ idle", "+ unused", "+ unmatched", "per GPU-hour")],
        (
            (", ".join(line.items), line.gpu_model, line.region, line.capacity_type, *amounts(line),
             NOTHING if line.rate is None else f"{line.rate:.6f}")
            for line in result.lines
        ),
        total=("total", "", "", "", *amounts(result)),
        caption="unused: paid in advance and not used; "
        f"{money(result.not_invoiced, result.currency)} billed without a line of the invoice; "
        f"{hours(result.unpriced_gpu_us)} GPU-hours without a price",
    )  # fmt: skip


def price_versions(versions: Sequence[PriceVersion], zone: tzinfo) -> Table:
    """A table of price books, oldest first."""
    return table(
        "Price books",
        ["since", "version", "currency", *figures("rows"), "by", "reason"],
        (
            (
                instant(version.at_ms, zone),
                version.version,
                version.currency,
                str(version.rows),
                version.who,
                version.reason,
            )
            for version in versions
        ),
    )


def _change(diff: PriceDiff, before: Decimal | None, after: Decimal | None) -> str:
    """The change of an amount, with the decimals of the currency; a dash if an amount is unknown or the currencies
    differ."""
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
