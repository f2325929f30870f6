"""Computes the effect of late changes to a closed month, which wait for an admin. Pure.

A closed month is changed by an admin's act alone. What the ledger says of it now and its statement, with all
corrections and all that was refused, does not, is one proposal: taken up it becomes corrections, refused it is kept as
refused and never proposed again. Its id names its lines, so an act is about what its author has seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal

from accountant.billing.costs import BILLED
from accountant.billing.statements import Correction, StatementLine, as_text
from accountant.bookkeeping.month_closing import CannotClose
from gputally.base.money import exact_sum


@dataclass(frozen=True, slots=True)
class TeamEffect:
    """What a proposal would change for one team. gpu_us: billed time. amount: in the price book's currency."""

    team: str
    gpu_us: int
    amount: Decimal


@dataclass(frozen=True, slots=True)
class Proposal:
    """lines: what would be booked in `booked_in`, the first open month."""

    month: str
    booked_in: str
    id: str
    lines: tuple[Correction, ...]

    def effects(self, teams: Collection[str] | None = None) -> list[TeamEffect]:
        """By team, sorted. teams: of these alone."""
        names = sorted({one.line.team for one in self.lines if teams is None or one.line.team in teams})
        return [
            TeamEffect(
                name,
                sum(one.line.gpu_us for one in self.lines if one.line.team == name and one.line.account in BILLED),
                exact_sum(one.amount for one in self.lines if one.line.team == name),
            )
            for name in names
        ]


def proposal(month: str, booked_in: str, lines: Sequence[Correction]) -> Proposal:
    content = json.dumps([asdict(line) for line in lines], default=as_text, sort_keys=True)
    return Proposal(month, booked_in, hashlib.sha256(content.encode()).hexdigest()[:16], tuple(lines))


def chosen_proposal(waiting: Proposal | None, month: str, asked: str) -> Proposal:
    """The proposal that is decided on. Raises CannotClose where none waits, or another one by now."""
    if waiting is None:
        raise CannotClose(f"nothing that arrived late waits for {month}")
    if waiting.id != asked:
        raise CannotClose(f"more has arrived for {month}: proposal {asked} is {waiting.id} now; look and act again")
    return waiting


def repriced_refusals(refused: Iterable[Correction], present: Iterable[StatementLine]) -> list[Correction]:
    """What was refused, put from prices that the month no longer has to the price of the most time like it, so that a
    month which is priced again does not take up what was refused for it."""
    most: dict[tuple[str, ...], StatementLine] = {}
    prices = set()
    for line in present:
        prices.add((_like(line), line.price_row, line.unit_price))
        if _like(line) not in most or line.gpu_us > most[_like(line)].gpu_us:
            most[_like(line)] = line
    found: list[Correction] = []
    for one in refused:
        like = _like(one.line)
        if like not in most or (like, one.line.price_row, one.line.unit_price) in prices:
            continue
        there = replace(most[like], gpu_us=one.line.gpu_us, gpu_hours=one.line.gpu_hours)
        back = replace(one.line, gpu_us=-one.line.gpu_us, gpu_hours=-one.line.gpu_hours)
        found += [replace(one, line=back, amount=Decimal(0)), replace(one, line=there, amount=Decimal(0))]
    return found


def _like(line: StatementLine) -> tuple[str, ...]:
    return line.team, line.account, line.detail, line.gpu_model, line.capacity_type
