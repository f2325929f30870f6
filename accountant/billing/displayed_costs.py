"""The charges of a span by group, with the amounts that pages show for them (accountant.billing.displayed_amounts)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final

from accountant.billing.charge import LINE_ACCOUNTS, Charge
from accountant.billing.charge_table import ChargeTable
from accountant.billing.displayed_amounts import Keyed, by_itself, keyed, minor_parts
from accountant.billing.usage_pricing import charge_table, cost_of, usage_and_charges
from accountant.core.periods import Month, zone
from accountant.ledger.protocols import Moment
from accountant.ledger.usage import MEASURES, Usage, Where
from accountant.prices.price_book import PriceBook
from accountant.prices.unit_prices import price_edges
from accountant.wire.usage_cost_and_job_models import CostAnswer, Dimension
from gputally.base import called_off
from gputally.base.money import minor_places, sum_if_known

_UNALLOCATED: Final = LINE_ACCOUNTS.index("unallocated")
OF_KINDS: Final[frozenset[Dimension]] = frozenset({"team", "gpu_model", "capacity_type"})
"""The dimensions whose values consist of whole kinds of time."""


@dataclass(frozen=True, slots=True)
class DisplayedCosts:
    """The charges of a span by group, and by key of a group its amount and the part of it for time that nobody held.
    A group without an amount has none of its time priced.

    of_jobs: the amounts to show instead for groups of a named job, which add up to no total."""

    charges: Sequence[Charge]
    amounts: Mapping[tuple[str, ...], Decimal]
    unheld: Mapping[tuple[str, ...], Decimal]
    of_jobs: Mapping[tuple[str, ...], Decimal] = field(default_factory=dict)

    @property
    def known(self) -> dict[tuple[str, ...], Decimal | None]:
        """The amount of each group; None if some of its time has no price."""
        unpriced = {charge.key for charge in self.charges if charge.unpriced}
        keys = dict.fromkeys(charge.key for charge in self.charges if charge.billed)
        return {key: None if key in unpriced else self.amounts.get(key, Decimal(0)) for key in keys}


def displayed_costs(
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Where | None = None,
    timezone: str = "UTC",
) -> DisplayedCosts:
    """The charges of [start_ms, end_ms) by group, as `usage_pricing.charge_table` gives them, with the amounts to show.

    The amounts of several calendar months are the sums of those of each, because a month is charged by itself."""
    finest = _finest(start_ms, end_ms, by, where, timezone)
    table = charge_table(ledger, book, start_ms, end_ms, finest, where, timezone)
    return _displayed(table, finest, ledger, book, start_ms, end_ms, by, where, timezone)


def displayed_usage(
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Where | None = None,
    timezone: str = "UTC",
) -> tuple[Usage, DisplayedCosts]:
    """The usage of [start_ms, end_ms) by group, with its measures, and its `displayed_costs`, of one question
    (`usage_pricing.usage_and_charges`)."""
    finest, edges = _finest(start_ms, end_ms, by, where, timezone), price_edges(book, start_ms, end_ms)
    read, priced = usage_and_charges(ledger, book, edges, finest, where, timezone, MEASURES)
    shown = _displayed(priced.without_details(), finest, ledger, book, start_ms, end_ms, by, where, timezone)
    return read.grouped(by, spans=False), shown


def _wholes(
    start_ms: int, end_ms: int, where: Where | None, timezone: str
) -> tuple[tuple[Dimension, ...], list[Dimension]]:
    """By what the unfiltered amounts are that are divided, beside the team: the month if there are several, and the
    filtered dimensions."""
    tz = zone(timezone)
    month: tuple[Dimension, ...] = () if Month.of(start_ms, tz) == Month.of(end_ms - 1, tz) else ("month",)
    return month, [name for name in where or () if name not in OF_KINDS]


def _finest(
    start_ms: int, end_ms: int, by: Sequence[Dimension], where: Where | None, timezone: str
) -> tuple[Dimension, ...]:
    """The dimensions of the charges among which amounts are divided."""
    month, values = _wholes(start_ms, end_ms, where, timezone)
    return tuple(dict.fromkeys((*by, *values, "team", *month)))


def _displayed(
    table: ChargeTable,
    finest: Sequence[Dimension],
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Where | None,
    timezone: str,
) -> DisplayedCosts:
    """`displayed_costs`, of the charges of the span by `finest`."""
    month, values = _wholes(start_ms, end_ms, where, timezone)
    several = table.charges()
    own = several if len(finest) == len(by) else table.regrouped(range(len(by))).charges()
    if book is None:
        return DisplayedCosts(own, {}, {})
    at = [finest.index(name) for name in (*month, "team", *values, *by)]
    divisions = [(tuple([charge.key[one] for one in at]), charge) for charge in called_off.each(several)]
    whole = divisions
    if where:
        whole = keyed(charge_table(ledger, book, start_ms, end_ms, (*month, "team", *values), None, timezone).charges())
    amounts: dict[tuple[str, ...], int] = defaultdict(int)
    unheld: dict[tuple[str, ...], int] = defaultdict(int)
    wholes, parts = (_by_first(len(month), items) for items in (whole, divisions))
    for name, of_month in parts.items():
        for kind, key, cents in minor_parts(wholes[name], of_month, 1 + len(values), book.currency):
            amounts[key] += cents
            if kind[1] == _UNALLOCATED:
                unheld[key] += cents
    places = minor_places(book.currency)
    return DisplayedCosts(
        own,
        {key: Decimal(cents).scaleb(-places) for key, cents in amounts.items()},
        {key: Decimal(cents).scaleb(-places) for key, cents in unheld.items()},
        _of_jobs(own, by.index("job"), book.currency) if "job" in by else {},
    )


def cost_with_amounts(
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Where | None = None,
    timezone: str = "UTC",
) -> CostAnswer:
    """The answer of `usage_pricing.cost`, with the amounts to show for its costs."""
    found = displayed_costs(ledger, book, start_ms, end_ms, by, where, timezone)
    answer, none = cost_of(found.charges, book, start_ms, end_ms, by), Decimal(0)
    amounts = [None if line.cost is None else found.amounts.get((*line.key.values(),), none) for line in answer.lines]
    lines = tuple(
        line.model_copy(
            update={
                "amount": None if amount is None else found.of_jobs.get((*line.key.values(),), amount),
                "unheld_amount": None if line.unheld_cost is None else found.unheld.get((*line.key.values(),), none),
            }
        )
        for line, amount in called_off.each(zip(answer.lines, amounts, strict=True))
    )
    return answer.model_copy(update={"lines": lines, "total_amount": sum_if_known(amounts)})


def _of_jobs(several: Sequence[Charge], place: int, currency: str) -> dict[tuple[str, ...], Decimal]:
    """The amounts of the groups with a job at this place of their keys."""
    times: dict[tuple[str, ...], list[tuple[str, Decimal, int]]] = defaultdict(list)
    for charge in called_off.each(several):
        if charge.key[place] and charge.billed and charge.row is not None:
            times[charge.key].append((charge.row.id, charge.row.price, charge.gpu_us))
    return {key: by_itself(of_job, currency) for key, of_job in called_off.each(times.items())}


def _by_first(values: int, items: Keyed) -> dict[tuple[str, ...], list[tuple[tuple[str, ...], Charge]]]:
    """The items by so many first values of their keys, and without these."""
    found: dict[tuple[str, ...], list[tuple[tuple[str, ...], Charge]]] = defaultdict(list)
    for key, charge in called_off.each(items):
        found[key[:values]].append((key[values:], charge))
    return found
