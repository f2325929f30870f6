"""What is due of a statement's lines, in minor units: rounded once, so that all tables of them add up. Pure."""

from __future__ import annotations

from decimal import Decimal
from typing import TypeAlias

from accountant.books.costs import Account
from accountant.books.statements import Statement, StatementLine
from accountant.money import Money, payable

Entry: TypeAlias = tuple[Account, int, Decimal | None]
"""One account's GPU-µs and its cost (None: unpriced)."""


def payable_lines(stated: Statement) -> list[tuple[StatementLine, Entry]]:
    """The statement's lines with their costs in minor units (None: unpriced).

    Each team's payable amount is apportioned to its lines once; every table is a sum of these, so rows and
    columns of all tables meet to the last cent. Source: the two-dimensional rounding problem, where
    rounding per table breaks the other table's totals."""
    amounts: dict[int, Decimal] = {}
    if stated.currency is not None:
        currency = stated.currency
        for team, total in stated.payable.items():
            exact = {
                i: Money(line.cost, currency)
                for i, line in enumerate(stated.lines)
                if line.team == team and line.cost is not None
            }
            amounts |= {i: money.amount for i, money in payable(exact, currency, Money(total, currency)).items()}
    return [
        (line, (line.account, line.gpu_us, None if line.cost is None else amounts.get(i, line.cost)))
        for i, line in enumerate(stated.lines)
    ]
