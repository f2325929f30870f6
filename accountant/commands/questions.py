"""`usage`, `cost` and `check`: what the ledger holds, who pays how much of it, and whether it adds up."""

from __future__ import annotations

import typer

from accountant import console
from accountant.commands.asking import (
    By,
    End,
    Ledger,
    Priced,
    Printed,
    Start,
    Where,
    Zoned,
    answer,
    connected,
)
from accountant.remote import Query
from accountant.told import Balance
from accountant.wire import CostAnswer, UsageAnswer


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (usage, cost, check):
        app.command()(command)


@connected
def usage(
    by: By = "team",
    start: Start = None,
    end: End = None,
    where: Where = None,
    output: Printed = "table",
    *,
    at: Zoned,
) -> None:
    """GPU-hours by account and group."""
    with at.asking() as remote:
        pages = list(remote.pages(UsageAnswer, "/v1/usage", _query(by, start, end, where, at.timezone)))
    lines = tuple(line for page in pages for line in page.lines)
    whole = pages[-1].model_copy(update={"lines": lines, "next_page": None})
    answer(output, lambda: console.usage_table(whole, at.zone), whole, whole.lines)


@connected
def cost(
    by: By = "team",
    start: Start = None,
    end: End = None,
    where: Where = None,
    output: Printed = "table",
    *,
    at: Priced,
) -> None:
    """Exact cost by group."""
    with at.asking() as remote:
        pages = list(remote.pages(CostAnswer, "/v1/cost", _query(by, start, end, where, at.timezone)))
    lines = tuple(line for page in pages for line in page.lines)
    whole = pages[-1].model_copy(update={"lines": lines, "next_page": None})
    answer(output, lambda: console.cost_table(whole, at.zone), whole, whole.lines)


@connected
def check(output: Printed = "table", *, at: Ledger) -> None:
    """Recompute the books from the rows; exit 1 unless every GPU-microsecond stands in exactly one account."""
    with at.asking() as remote:
        balance = remote.ask(Balance, "/v1/check")
    answer(output, lambda: console.balance_table(balance), balance)
    if balance.imbalance_gpu_us or balance.month_faults:
        raise typer.Exit(1)


def _query(by: str, start: str | None, end: str | None, where: list[str] | None, timezone: str | None) -> Query:
    query: dict[str, str | list[str] | None] = {"by": by, "start": start, "end": end, "timezone": timezone}
    for filter in where or ():
        dimension, equals, value = filter.partition("=")
        if not equals:
            raise typer.BadParameter(f"not a filter: {filter!r} (write for example team=vision)")
        values = query.setdefault(f"where.{dimension}", [])
        assert isinstance(values, list)
        values.append(value)
    return query
