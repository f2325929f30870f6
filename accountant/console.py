"""Answers as tables for a terminal: aligned, with units and totals. Renders, asks nobody."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from zoneinfo import ZoneInfo

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from accountant.books.costs import ACCOUNTS
from accountant.reports.formats import NOTHING, hours, money, percent
from accountant.told import Balance
from accountant.wire import IDLE, UNASSIGNED, CostAnswer, UsageAnswer

NAMES = {IDLE: "(nobody)", UNASSIGNED: "(unassigned)", "": NOTHING}
"""What people read for names that are none."""


def instant(at_ms: int, zone: ZoneInfo) -> str:
    return datetime.fromtimestamp(at_ms / 1000, zone).strftime("%Y-%m-%d %H:%M %Z")


def usage_table(answer: UsageAnswer, zone: ZoneInfo) -> Table:
    """GPU-hours per group and account, largest allocation first, with totals."""
    table = titled(f"GPU-hours, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}")
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
    table.caption = noted(answer.note, _metered(answer))
    return table


def cost_table(answer: CostAnswer, zone: ZoneInfo) -> Table:
    """Billed GPU-hours and cost per group, dearest first, with totals."""
    currency = answer.currency or "no price book"
    table = titled(f"Cost in {currency}, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}")
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
    table.caption = noted(answer.note, priced)
    return table


def balance_table(balance: Balance) -> Table:
    """The ledger's health, one figure a line."""
    table = titled("The ledger")
    table.caption = balance.note or None
    table.show_header = False
    table.add_column("figure")
    table.add_column("value", justify="right")
    off = balance.imbalance_gpu_us
    verdict = Text(f"{off:,} µs apart", "red") if off else Text("balances")
    table.add_row("books", verdict)
    table.add_row("metered", percent(balance.coverage if balance.capacity_gpu_us else None))
    table.add_row("rows in quarantine", f"{balance.quarantined_rows:,}")
    table.add_row("write-ahead log", f"{balance.wal_bytes:,} bytes")
    faults = len(balance.month_faults)
    chain = (f"{faults} faults", "red") if faults else "chain holds"
    table.add_row("closed months", Text.assemble(f"{balance.closed_months}, ", chain))
    for fault in balance.month_faults:
        table.add_row("month", fault)
    for difference in balance.differences:
        table.add_row("difference", difference)
    return table


def _metered(answer: UsageAnswer) -> str:
    """Of a span without capacity nothing is known, and no share of it is metered."""
    if not any(line.accounts_gpu_us.total for line in answer.lines):
        return "nothing is recorded of this time"
    return f"{percent(answer.coverage)} of the capacity is metered"


def noted(note: str, caption: str) -> str:
    """A caption that begins with what is particular about the answer."""
    return f"{note}\n{caption}" if note else caption


def titled(title: str) -> Table:
    """A table without columns, as all of ours look."""
    return Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def _label(columns: int, text: str) -> tuple[str, ...]:
    return (text, *[""] * (columns - 1)) if columns else ()
