"""Prices the relation of usage: returns exact charges, the one way from GPU time to money.

The span is split where a price changes. (The ledger splits it where a policy changes.) Within a piece every GPU has one
price or none. Time is added as integers first and priced afterwards, so the result does not depend on how the time was
split. Only commitments are computed per hour, or part of an hour at the ends of the span.

Before it is priced, time moves between holders where the price book says so: `shared_gpus: busy` bills a holder for the
time that it used beyond its share, and `mig_basis: memory` bills MIG instances by their memory.

Ask `charge_table` for one grouping, `charges_by_grouping` for several with the details of idle time, and
`usage_and_charges` for the usage beside its charges. `cost` is the answer of the API, `cost_of` that for charges that
are known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from accountant.billing.charge import (
    BILLED,
    DETAILS,
    LINE_ACCOUNTS,
    Charge,
    Detail,
    add_by_key,
    quantify,
    total_cost,
    unheld_parts,
    unpriced_us,
)
from accountant.billing.charge_table import (
    KEY,
    ChargeTable,
    numbered,
    numbered_prices,
)
from accountant.billing.time_reallocation import by_memory
from accountant.core.gpu_time_accounts import sum_by_key
from accountant.core.periods import hours, zone
from accountant.ledger.protocols import Moment, of_holders
from accountant.ledger.usage import ACCOUNTS, LENT, PRICED_BY, START_UP, Int64Array, Usage, UsageMeasure, Where
from accountant.prices.price_book import Committed, Price, PriceBook, commitment_cover
from accountant.prices.unit_prices import Place, pieces, price_edges, unit_price
from accountant.wire.dimensions import OF_TIME
from accountant.wire.usage_cost_and_job_models import CostAnswer, CostLine, Dimension
from gputally.base import called_off
from gputally.base.money import exact_sum, sum_if_known
from gputally.base.units import US_PER_MS

_MIG: Final[Dimension] = "mig_profile"
_IDLE_DETAILS: Final[tuple[Detail, ...]] = ("starting", "gang_waiting", "running_idle")
_BILLED: Final = np.array([account in BILLED for account in ACCOUNTS])


def charge_table(
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Where | None = None,
    timezone: str = "UTC",
) -> ChargeTable:
    """Every account of every group with its price, over [start_ms, end_ms).

    Without `where`, their gpu_us add up to the capacity of the span. Without a price book everything is unpriced.

    Time covered by a commitment has the commitment's rate. To determine this time, the whole cluster is counted per
    hour, for any grouping."""
    if book is None or not book.commits(start_ms, end_ms):
        return _at_rows(ledger, book, price_edges(book, start_ms, end_ms), by, where, timezone)[1].without_details()
    dimensions: tuple[Dimension, ...] = tuple(dict.fromkeys((*by, *(where or {}), "team", "hour")))
    conditions = [(dimensions.index(name), frozenset(values)) for name, values in (where or {}).items()]
    priced: list[Charge] = []
    for start, end in pieces(book, start_ms, end_ms):
        _, of_piece = _at_rows(ledger, book, (start, end), dimensions, None, timezone)
        lengths = hours(start, end, zone(timezone))
        hour, team = dimensions.index("hour"), dimensions.index("team")
        at_rows = of_piece.without_details().charges()
        priced += _at_commitments(at_rows, book.committed(start), lengths, hour, team)
    found = add_by_key(
        (charge.key[: len(by)], charge)
        for charge in priced
        if all(charge.key[index] in values for index, values in conditions)
    )
    return PricedUsage.of_charges([found]).without_details()


def usage_and_charges(
    ledger: Moment,
    book: PriceBook | None,
    edges: Sequence[int],
    by: Sequence[Dimension],
    where: Where | None = None,
    timezone: str = "UTC",
    measures: Collection[UsageMeasure] = (),
) -> tuple[Usage, PricedUsage]:
    """The usage between the edges, by `by` and what prices it, and its charges.

    edges: in none of the spans between them a price changes (accountant.prices.unit_prices.price_edges).
    measures: those that the usage has, and perhaps others.

    Both are of one question. If a commitment is in force, the charges are of another one, because commitments are
    counted for the whole cluster."""
    if book is None or not book.commits(edges[0], edges[-1]):
        return _at_rows(ledger, book, edges, by, where, timezone, measures)
    usage = ledger.usage(edges, _dimensions(book, by), where, timezone, measures)
    of_spans = (charge_table(ledger, book, *span, by, where, timezone) for span in pairwise(edges))
    return usage, PricedUsage.of_charges([table.charges() for table in of_spans])


def _at_commitments(
    at_rows: Sequence[Charge], commitments: Sequence[Committed], lengths: Mapping[str, int], hour: int, team: int
) -> list[Charge]:
    """Splits off the parts of charges that commitments cover, as charges at the commitments' rates.

    lengths: the length of each local hour, in ms.
    hour, team: the indices of these dimensions in the keys."""
    uncovered = list(at_rows)
    at_rates: list[Charge] = []
    for one in called_off.each(commitments):
        by_hour: dict[str, list[Charge]] = defaultdict(list)
        rest: list[Charge] = []
        for charge in called_off.each(uncovered):
            eligible = charge.billed and one.covers(*charge.place)
            (by_hour[charge.key[hour]] if eligible else rest).append(charge)
        for name, several in by_hour.items():
            committed_us = one.commitment.gpus * lengths[name] * US_PER_MS
            groups = [((c.key[team], c.place, c.account, c.bucket), c.gpu_us) for c in several]
            covers = zip(several, commitment_cover(committed_us, groups), strict=True)
            for charge, covered_us in called_off.each(covers):
                if covered_us:
                    at_rates.append(replace(charge, gpu_us=covered_us, row=one.price))
                if covered_us < charge.gpu_us:
                    rest.append(replace(charge, gpu_us=charge.gpu_us - covered_us))
        uncovered = rest
    return [*at_rates, *uncovered]


def _at_rows(
    ledger: Moment,
    book: PriceBook | None,
    edges: Sequence[int],
    by: Sequence[Dimension],
    where: Where | None,
    timezone: str,
    measures: Collection[UsageMeasure] = (),
) -> tuple[Usage, PricedUsage]:
    """As `usage_and_charges`, at the prices of the book's rows, without commitments."""
    asked = (*measures, *_to_price(book))
    usage = ledger.usage(edges, _dimensions(book, by), where, timezone, asked)
    return usage, PricedUsage.of(usage, by, book, edges[:-1], with_unheld=not of_holders(where or ()))


def _dimensions(book: PriceBook | None, by: Sequence[Dimension]) -> tuple[Dimension, ...]:
    """The dimensions by which usage is asked for, to price it by `by`."""
    by_mig_memory = book is not None and book.mig_basis == "memory"
    return tuple(dict.fromkeys((*by, *PRICED_BY, *((_MIG,) if by_mig_memory else ()))))


def _to_price(book: PriceBook | None) -> tuple[UsageMeasure, ...]:
    """The measures without which usage cannot be priced."""
    return LENT if book is not None and book.billing.shared_gpus == "busy" else ()


@dataclass(frozen=True, slots=True)
class PricedUsage:
    """Charges by span, sorted.

    numbers: the indices of span, key, place, account and price; int64, shape (rows, 5).
    gpu_us: int64, shape (rows,)."""

    keys: Sequence[tuple[str, ...]]
    places: Sequence[Place]
    prices: Sequence[Price | None]
    numbers: Int64Array
    gpu_us: Int64Array

    @classmethod
    def of(
        cls,
        usage: Usage,
        by: Sequence[Dimension],
        book: PriceBook | None,
        starts: Sequence[int],
        *,
        with_unheld: bool = True,
    ) -> PricedUsage:
        """Prices usage at the book's rows. starts: the start of each span, in ms.

        with_unheld: whether the usage includes time without a holder."""
        by_mig_memory = book is not None and book.mig_basis == "memory"
        if by_mig_memory:
            usage = by_memory(usage, with_unheld=with_unheld)
        keys, key = usage.keyed(by)
        named, place = usage.keyed(PRICED_BY)
        kinds, kind = usage.keyed((*PRICED_BY, _MIG)) if by_mig_memory else (named, place)
        prices, price = numbered_prices(
            [unit_price(book, Place(*names[:4]), start, *names[4:]) for start in starts for names in kinds]
        )
        price_of_row = price.reshape(len(starts), len(kinds))[usage.span, kind]
        gpu_us = usage.columns(ACCOUNTS)
        for measure in _to_price(book):
            gpu_us[:, usage.names.index(measure.removeprefix("lent_"))] += usage.column(measure)
        rows, accounts = np.nonzero(gpu_us)
        billed_at = np.where(_BILLED[accounts], price_of_row[rows], 0)
        numbers = np.stack([usage.span[rows], key[rows], place[rows], accounts, billed_at], axis=1)
        time = gpu_us[rows, accounts].reshape(-1, 1)
        if by_mig_memory:  # instances of one key
            numbers, time = sum_by_key(numbers, time)
        return cls(keys, [Place(*names) for names in named], prices, numbers, time.reshape(-1))

    @classmethod
    def of_charges(cls, by_span: Sequence[Sequence[Charge]]) -> PricedUsage:
        """The charges of each span, as columns."""
        several = [(span, charge) for span, charges in enumerate(by_span) for charge in charges]
        keys, key = numbered([charge.key for _, charge in several])
        places, place = numbered([charge.place for _, charge in several])
        prices, price = numbered_prices([charge.row for _, charge in several])
        span = np.array([span for span, _ in several], dtype=np.int64)
        account = np.array([LINE_ACCOUNTS.index(charge.account) for _, charge in several], dtype=np.int64)
        gpu_us = np.array([charge.gpu_us for _, charge in several], dtype=np.int64)
        return cls(keys, places, prices, np.stack([span, key, place, account, price], axis=1), gpu_us)

    def table(self, detail: Int64Array, numbers: Int64Array, gpu_us: Int64Array) -> ChargeTable:
        """A table of these rows. detail: their indices in DETAILS."""
        _, key, place, account, price = numbers.T
        cells = np.stack([key, place, account, detail, price, gpu_us], axis=1)
        return ChargeTable(self.keys, self.places, self.prices, cells[gpu_us > 0])

    def without_details(self) -> ChargeTable:
        return self.table(np.zeros(len(self.gpu_us), dtype=np.int64), self.numbers, self.gpu_us)

    def with_details(self, usage: Usage, by: Sequence[Dimension]) -> ChargeTable:
        """The table with allocated_idle divided into its details. usage: contains START_UP, by at least `by`."""
        is_idle = self.numbers[:, 3] == LINE_ACCOUNTS.index("allocated_idle")
        rest, idle = np.flatnonzero(~is_idle), np.flatnonzero(is_idle)
        group, limits = self._start_up(usage, by, idle)
        parts = split_in_order(group, self.gpu_us[idle], limits)
        rows = np.concatenate([rest, np.repeat(idle, len(_IDLE_DETAILS))])
        details = np.array([DETAILS.index(name) for name in _IDLE_DETAILS], dtype=np.int64)
        detail = np.concatenate([np.zeros_like(rest), np.tile(details, len(idle))])
        return self.table(detail, self.numbers[rows], np.concatenate([self.gpu_us[rest], parts.reshape(-1)]))

    def _start_up(self, usage: Usage, by: Sequence[Dimension], idle: Int64Array) -> tuple[Int64Array, Int64Array]:
        """For each of the rows a number of its group, which is its span, key and place, and the group's START_UP."""
        keys, key = usage.keyed(by)
        named, place = usage.keyed(PRICED_BY)
        span_of, key_of, place_of, *_ = self.numbers[idle].T
        most_keys, most_places = len(keys) + len(self.keys), len(named) + len(self.places)
        known = (usage.span * most_keys + key) * most_places + place
        mine = (span_of * most_keys + _found(self.keys, keys)[key_of]) * most_places
        mine += _found(self.places, named)[place_of]
        groups, limits = sum_by_key(known.reshape(-1, 1), usage.columns(START_UP))
        at = np.searchsorted(groups[:, 0], mine)
        there = np.append(groups[:, 0], -1)[at] == mine
        none = np.zeros((1, len(START_UP)), dtype=np.int64)
        return mine, np.where(there[:, None], np.concatenate([limits, none])[at], 0)


def _found(values: Sequence[tuple[str, ...]], among: Sequence[tuple[str, ...]]) -> Int64Array:
    """The index of each value among others; for values that are not there, numbers beyond them."""
    index = {tuple(value): number for number, value in enumerate(called_off.each(among))}
    numbers = [index.get(tuple(value), len(among) + at) for at, value in enumerate(called_off.each(values))]
    return np.array(numbers, dtype=np.int64)


def charges_by_grouping(
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    groupings: Sequence[Sequence[Dimension]],
    timezone: str = "UTC",
    where: Where | None = None,
) -> list[ChargeTable]:
    """The charges of [start_ms, end_ms) by each of the groupings, with allocated_idle divided into its details.

    Each span without a price change is priced separately, so start-up time has the price of its own hours.

    where: a filter by dimensions that every grouping has.

    Raises CalledOff when nobody waits for it any more."""
    edges, tables = price_edges(book, start_ms, end_ms), dict[int, ChargeTable]()
    # Start-up time is read once if those by day or hour are the first.
    for number in sorted(range(len(groupings)), key=lambda number: not OF_TIME & set(groupings[number])):
        called_off.check()
        by = groupings[number]
        usage, priced = usage_and_charges(ledger, book, edges, by, None, timezone, START_UP)
        table = priced.with_details(usage, by)
        tables[number] = _filtered(table, by, where) if where else table
    return [tables[number] for number in range(len(groupings))]


def _filtered(columns: ChargeTable, by: Sequence[Dimension], where: Where) -> ChargeTable:
    conditions = [(by.index(name), frozenset(values)) for name, values in where.items()]
    matches = [all(key[index] in values for index, values in conditions) for key in called_off.each(columns.keys)]
    return columns.only(np.array(matches, dtype=bool)[columns.cells[:, KEY]])


def split_in_order(group: Int64Array, gpu_us: Int64Array, limits: Int64Array) -> Int64Array:
    """Divides each group's time into parts and a rest. The first rows of a group fill the first part up to its limit,
    the next rows the second part, and so on.

    group, gpu_us: shape (rows,). Adjacent equal values of `group` form one group.
    limits: of a row's whole group, shape (rows, parts).

    Returns shape (rows, parts + 1). Each row adds up to its gpu_us."""
    if not len(group):
        return np.zeros((0, limits.shape[1] + 1), dtype=np.int64)
    until = np.cumsum(gpu_us)
    first = np.flatnonzero(np.concatenate(([True], group[1:] != group[:-1])))
    until -= np.repeat((until - gpu_us)[first], np.diff([*first, len(group)]))
    edges = np.cumsum(limits, axis=1)
    before_edge = np.minimum(until[:, None], edges) - np.minimum((until - gpu_us)[:, None], edges)
    return np.diff(np.column_stack([np.zeros_like(gpu_us), before_edge, gpu_us]), axis=1)


def cost(
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Where | None = None,
    timezone: str = "UTC",
) -> CostAnswer:
    """Billed time and its exact cost per group over [start_ms, end_ms): all groups, sorted by key.

    The lines add up to `total`, which does not depend on `by`."""
    found = charge_table(ledger, book, start_ms, end_ms, by, where, timezone).charges()
    return cost_of(found, book, start_ms, end_ms, by)


def cost_of(
    found: Sequence[Charge], book: PriceBook | None, start_ms: int, end_ms: int, by: Sequence[Dimension]
) -> CostAnswer:
    """The answer of `cost` for these charges."""
    priced = quantify((charge.key, charge) for charge in found)
    unheld = unheld_parts(found, priced)
    lines = tuple(
        CostLine(
            key=dict(zip(by, key, strict=True)),
            gpu_us=sum(part.gpu_us for part in billed),
            cost=amount,
            unpriced_gpu_us=unpriced_us(billed),
            held_cost=None if amount is None or of_nobody is None else exact_sum([amount, of_nobody.copy_negate()]),
            unheld_cost=None if amount is None else of_nobody,
        )
        for key, parts in called_off.each(priced.items())
        if (billed := [part for part in parts if part.billed])
        for amount, of_nobody in [(total_cost(billed), total_cost([one for one in unheld.get(key, ()) if one.billed]))]
    )
    return CostAnswer(
        start_ms=start_ms,
        end_ms=end_ms,
        by=tuple(by),
        currency=book.currency if book else None,
        price_book_version=book.version if book else "",
        lines=lines,
        total=sum_if_known(line.cost for line in lines),
        unpriced_gpu_us=sum(line.unpriced_gpu_us for line in lines),
    )
