"""Prices usage: splits it where prices change and returns exact charges.

The span is split where a price changes. (The ledger splits it where a policy changes.) Within a piece every GPU has one
price or none. Time is added as integers first and priced afterwards, so the result does not depend on how the time was
split. Only commitments are computed per hour, or part of an hour at the ends of the span.

Held time (busy, idle and unknown) is billed to its holder. If idle time were free, holding GPUs would cost nothing.
With `shared_gpus: busy`, a holder also pays for the time that it used beyond its share. Unallocated time is priced too
and stays in `__idle__`, so that the lines add up to the price of the working capacity. Unmetered time and down time are
never billed. Billed time without a price is listed as unpriced, and a sum that contains unpriced time is None.

GPU-hours have nine decimals: the total is rounded once and divided among prices and groups. Amounts of money are not
rounded here. `gputally.base.money` rounds them once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise
from typing import Final, Literal, TypeVar, cast, get_args

from accountant.billing.time_reallocation import by_memory, memory_to_compute
from accountant.core.claim_overlap import Span
from accountant.core.periods import hours, zone
from accountant.ledger.protocols import OF_HOLDERS, Questions
from accountant.ledger.usage import LENT, MEASURES, PRICED_BY, Place
from accountant.prices.price_book import Committed, Price, PriceBook, commitment_cover
from accountant.wire.usage_cost_and_job_models import CostAnswer, CostLine, Dimension
from gputally.base.money import apportion_gpu_hours, exact_product, exact_sum
from gputally.base.units import US_PER_MS

K = TypeVar("K", bound=tuple[str | int, ...])

Capacity = Literal["busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down"]
Account = Literal[Capacity, "unused_commitment"]
"""`unused_commitment` is GPU time that was paid for in advance and not used; it is not part of the capacity."""
ACCOUNTS: Final[tuple[Capacity, ...]] = get_args(Capacity)
"""In display order; they add up to the capacity."""
LINE_ACCOUNTS: Final[tuple[Account, ...]] = get_args(Account)
"""The accounts that a statement has lines for: ACCOUNTS and unused commitments."""
ALLOCATED: Final = frozenset[Account](("busy", "allocated_idle", "allocated_unknown"))
BILLED: Final = ALLOCATED | {"unallocated", "unused_commitment"}

Detail = Literal["", "starting", "gang_waiting", "running_idle", "spread", "reserved"]
"""Subdivision of an account. Of allocated_idle: `starting` (bound, no container running yet), `gang_waiting` (running
while other members of its gang are not), `running_idle`. Of unallocated: `spread` (a share of idle capacity),
`reserved` (unused guaranteed quota). "" for others."""
DETAILS: Final[tuple[Detail, ...]] = get_args(Detail)

UNPRICED: Final = "~unpriced"
NOT_BILLED: Final = "~not billed"
"""Pseudo ids beside those of price rows, which never begin with `~`; they sort last."""

_MIG: Final[tuple[Dimension, ...]] = ("mig_profile",)


@dataclass(frozen=True, slots=True)
class Charge:
    """GPU time of one group in one account at one price. key: the values of the requested dimensions."""

    key: tuple[str, ...]
    place: Place
    account: Account
    gpu_us: int
    row: Price | None
    """None: unpriced if the account is billed, otherwise not applicable."""
    detail: Detail = ""

    @property
    def billed(self) -> bool:
        return self.account in BILLED

    @property
    def unpriced(self) -> bool:
        return self.billed and self.row is None

    @property
    def bucket(self) -> str:
        """Group of time that is rounded together: a price row, the unpriced time, or the time that is not billed."""
        if not self.billed:
            return NOT_BILLED
        return self.row.id if self.row else UNPRICED


def pieces(book: PriceBook | None, start_ms: int, end_ms: int) -> list[Span]:
    """The span, split where a price changes, in order."""
    return list(pairwise((start_ms, *(book.cuts(start_ms, end_ms) if book is not None else ()), end_ms)))


def charges(
    ledger: Questions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Mapping[Dimension, Collection[str]] | None = None,
    timezone: str = "UTC",
) -> list[Charge]:
    """Every account of every group with its price, over [start_ms, end_ms), sorted, without empty charges.

    Without `where`, their gpu_us add up to the capacity of the span. Without a price book everything is unpriced.

    Time covered by a commitment has the commitment's rate. To determine this time, the whole cluster is counted per
    hour, for any grouping."""
    if book is None or not book.commits(start_ms, end_ms):
        return _at_rows(ledger, book, start_ms, end_ms, by, where, timezone)
    dimensions: tuple[Dimension, ...] = tuple(dict.fromkeys((*by, *(where or {}), "team", "hour")))
    conditions = [(dimensions.index(name), frozenset(values)) for name, values in (where or {}).items()]
    priced: list[Charge] = []
    for start, end in pieces(book, start_ms, end_ms):
        of_piece = _at_rows(ledger, book, start, end, dimensions, None, timezone)
        lengths = hours(start, end, zone(timezone))
        hour, team = dimensions.index("hour"), dimensions.index("team")
        priced += _at_commitments(of_piece, book.committed(start), lengths, hour, team)
    return _add_by_key(
        (charge.key[: len(by)], charge)
        for charge in priced
        if all(charge.key[index] in values for index, values in conditions)
    )


def _at_commitments(
    at_rows: Sequence[Charge], commitments: Sequence[Committed], lengths: Mapping[str, int], hour: int, team: int
) -> list[Charge]:
    """Splits off the parts of charges that commitments cover, as charges at the commitments' rates.

    lengths: the length of each local hour, in ms.
    hour, team: the indices of these dimensions in the keys."""
    uncovered = list(at_rows)
    at_rates: list[Charge] = []
    for one in commitments:
        by_hour: dict[str, list[Charge]] = defaultdict(list)
        rest: list[Charge] = []
        for charge in uncovered:
            eligible = charge.billed and one.covers(*charge.place)
            (by_hour[charge.key[hour]] if eligible else rest).append(charge)
        for name, several in by_hour.items():
            committed_us = one.commitment.gpus * lengths[name] * US_PER_MS
            groups = [((c.key[team], c.place, c.account, c.bucket), c.gpu_us) for c in several]
            for charge, covered_us in zip(several, commitment_cover(committed_us, groups), strict=True):
                if covered_us:
                    at_rates.append(replace(charge, gpu_us=covered_us, row=one.price))
                if covered_us < charge.gpu_us:
                    rest.append(replace(charge, gpu_us=charge.gpu_us - covered_us))
        uncovered = rest
    return [*at_rates, *uncovered]


def _at_rows(
    ledger: Questions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Mapping[Dimension, Collection[str]] | None,
    timezone: str,
) -> list[Charge]:
    """The charges at the prices of the book's rows, without commitments."""
    by_mig_memory = book is not None and book.mig_basis == "memory"
    dimensions = tuple(dict.fromkeys((*by, *PRICED_BY, *(_MIG if by_mig_memory else ()))))
    with_unheld = not set(where or ()) & OF_HOLDERS
    rows: dict[str, Price | None] = {"": None}
    sums: Counter[tuple[tuple[str, ...], Place, int, str]] = Counter()
    for start, end in pieces(book, start_ms, end_ms):
        lent_too = LENT if book is not None and book.billing.shared_gpus == "busy" else ()
        usage = ledger.usage((start, end), dimensions, where, timezone, (*MEASURES, *lent_too))
        lines = usage.lines()
        prices: dict[Place, Price | None] = {}
        for line in by_memory(lines, PRICED_BY, with_unheld=with_unheld) if by_mig_memory else lines:
            place = Place(*(line.key[name] for name in PRICED_BY))
            if place not in prices:
                prices[place] = book.unit_price(place.gpu_model, start, *place[1:]) if book else None
            row = prices[place]
            if by_mig_memory and memory_to_compute(line.key["mig_profile"], place.gpu_model) is None:
                row = None  # it is unknown which part of the GPU this instance has
            row_id = row.id if row else ""
            rows[row_id] = row
            key = tuple(line.key[name] for name in by)
            for order, account in enumerate(ACCOUNTS):
                gpu_us = getattr(line.accounts_gpu_us, account)
                if gpu_us:
                    sums[key, place, order, row_id if account in BILLED else ""] += gpu_us
        if book is None or not lent_too:
            continue
        for names, changes in zip(usage.row_keys(), usage.columns(lent_too).tolist(), strict=True):
            named = dict(zip(usage.by, names, strict=True))
            place = Place(*(named[name] for name in PRICED_BY))
            row = book.unit_price(place.gpu_model, start, *place[1:])
            for changed, gpu_us in zip(lent_too, changes, strict=True):
                order = ACCOUNTS.index(cast(Capacity, changed.removeprefix("lent_")))
                sums[tuple(named[name] for name in by), place, order, row.id if row else ""] += gpu_us
    return [
        Charge(key, place, ACCOUNTS[order], sums[key, place, order, row_id], rows[row_id])
        for key, place, order, row_id in sorted(sums)
        if sums[key, place, order, row_id]
    ]


def add_equal_charges(charges: Iterable[Charge]) -> list[Charge]:
    """Adds up charges that differ only in their time. Sorted by key, place, account, detail and price row."""
    return _add_by_key((charge.key, charge) for charge in charges)


def _add_by_key(keyed: Iterable[tuple[tuple[str, ...], Charge]]) -> list[Charge]:
    """Like `add_equal_charges`, with the given keys instead of the charges' own."""
    sums: Counter[tuple[tuple[str, ...], Place, int, int, str]] = Counter()
    rows: dict[str, Price | None] = {}
    for key, charge in keyed:
        row_id = charge.row.id if charge.row else ""
        rows[row_id] = charge.row
        account, detail = LINE_ACCOUNTS.index(charge.account), DETAILS.index(charge.detail)
        sums[key, charge.place, account, detail, row_id] += charge.gpu_us
    return [
        Charge(key, place, LINE_ACCOUNTS[account], gpu_us, rows[row_id], DETAILS[detail])
        for (key, place, account, detail, row_id), gpu_us in sorted(sums.items())
    ]


@dataclass(frozen=True, slots=True)
class PricedTime:
    """The time of one group at one price. unit_price: None if the time has no price or is not billed."""

    gpu_us: int
    gpu_hours: Decimal
    unit_price: Decimal | None
    billed: bool

    @property
    def cost(self) -> Decimal | None:
        """unit_price × gpu_hours, exactly; 0 for time that is not billed, None for billed time without a price."""
        if not self.billed:
            return Decimal(0)
        return None if self.unit_price is None else exact_product(self.unit_price, self.gpu_hours)


def quantify(items: Iterable[tuple[K, Charge]]) -> dict[K, list[PricedTime]]:
    """GPU-hours with nine decimals per group and price, groups in order. An item is a pair of group and charge.

    All quantities add up to the total, which is rounded once. The total is apportioned to the price rows first, and
    then within each row to the groups. For one set of charges, the cost of a row and the total cost are therefore the
    same for every grouping."""
    buckets: dict[str, Counter[K]] = defaultdict(Counter)
    prices: dict[str, Decimal | None] = {}
    for group, charge in items:
        buckets[charge.bucket][group] += charge.gpu_us
        prices[charge.bucket] = charge.row.price if charge.billed and charge.row else None
    ordered = {bucket: dict(sorted(lines.items())) for bucket, lines in sorted(buckets.items())}
    parts: dict[K, list[PricedTime]] = {group: [] for group in sorted({g for lines in ordered.values() for g in lines})}
    for bucket, shares in apportion_gpu_hours(ordered).items():
        for group, quantity in shares.items():
            parts[group].append(PricedTime(ordered[bucket][group], quantity, prices[bucket], bucket != NOT_BILLED))
    return parts


def quantify_together(charges: Iterable[Charge]) -> list[PricedTime]:
    """GPU-hours with nine decimals per price, of all charges as one group."""
    return quantify(((), charge) for charge in charges).get((), [])


def total_cost(parts: Collection[PricedTime]) -> Decimal | None:
    """The exact cost of all parts; None if any of them is unpriced."""
    costs = [part.cost for part in parts]
    known = [cost for cost in costs if cost is not None]
    return exact_sum(known) if len(known) == len(costs) else None


def coverage(items: Iterable[Charge]) -> float:
    """The metered share of the capacity without down time; 1 if there is no such capacity."""
    sums: Counter[Account] = Counter()
    for charge in items:
        sums[charge.account] += charge.gpu_us
    capacity = sums.total() - sums["down"]
    return (capacity - sums["unmetered"]) / capacity if capacity else 1.0


def unpriced_us(parts: Iterable[PricedTime]) -> int:
    """Billed GPU-µs without a price."""
    return sum(part.gpu_us for part in parts if part.cost is None)


def cost(
    ledger: Questions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Mapping[Dimension, Collection[str]] | None = None,
    timezone: str = "UTC",
) -> CostAnswer:
    """Billed time and its exact cost per group over [start_ms, end_ms): all groups, sorted by key.

    The lines add up to `total`, which does not depend on `by`."""
    priced = quantify((charge.key, charge) for charge in charges(ledger, book, start_ms, end_ms, by, where, timezone))
    lines = tuple(
        CostLine(
            key=dict(zip(by, key, strict=True)),
            gpu_us=sum(part.gpu_us for part in billed),
            cost=total_cost(billed),
            unpriced_gpu_us=unpriced_us(billed),
        )
        for key, parts in priced.items()
        if (billed := [part for part in parts if part.billed])
    )
    known = [line.cost for line in lines if line.cost is not None]
    return CostAnswer(
        start_ms=start_ms,
        end_ms=end_ms,
        by=tuple(by),
        currency=book.currency if book else None,
        price_book_version=book.version if book else "",
        lines=lines,
        total=exact_sum(known) if len(known) == len(lines) else None,
        unpriced_gpu_us=sum(line.unpriced_gpu_us for line in lines),
    )
