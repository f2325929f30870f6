"""A charge: GPU time of one group in one account at one price; and the quantities and costs of charges.

Held time (busy, idle and unknown) is billed to its holder. If idle time were free, holding GPUs would cost nothing.
Unallocated time is priced too and stays in `__idle__`, so that the lines add up to the price of the working capacity.
Unmetered time and down time are never billed. Billed time without a price is listed as unpriced, and a sum that
contains unpriced time is None.

The loops over charges end with CalledOff once nobody waits for the result any more.

GPU-hours have nine decimals: the total is rounded once and divided among prices and groups. Amounts of money are not
rounded here. `gputally.base.money` rounds them once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final, Literal, TypeVar, get_args

from accountant.ledger.usage import HELD, Capacity
from accountant.prices.price_book import Price
from accountant.prices.unit_prices import Place
from gputally.base import called_off
from gputally.base.apportionment import apportion
from gputally.base.money import HOUR_PLACES, apportion_gpu_hours, exact_product, sum_if_known

K = TypeVar("K", bound=tuple[str | int, ...])

Account = Literal[Capacity, "unused_commitment"]
"""`unused_commitment` is GPU time that was paid for in advance and not used; it is not part of the capacity."""
LINE_ACCOUNTS: Final[tuple[Account, ...]] = get_args(Account)
"""The accounts that a statement has lines for: ACCOUNTS and unused commitments."""
ALLOCATED: Final = frozenset[Account](HELD)
BILLED: Final = ALLOCATED | {"unallocated", "unused_commitment"}

Detail = Literal["", "starting", "gang_waiting", "running_idle", "spread", "reserved"]
"""Subdivision of an account. Of allocated_idle: `starting` (bound, no container running yet), `gang_waiting` (running
while other members of its gang are not), `running_idle`. Of unallocated: `spread` (a share of idle capacity),
`reserved` (unused guaranteed quota). "" for others."""
DETAILS: Final[tuple[Detail, ...]] = get_args(Detail)

UNPRICED: Final = "~unpriced"
NOT_BILLED: Final = "~not billed"
"""Pseudo ids beside those of price rows, which never begin with `~`; they sort last."""


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


def add_equal_charges(charges: Iterable[Charge]) -> list[Charge]:
    """Adds up charges that differ only in their time. Sorted by key, place, account, detail and price row."""
    return add_by_key((charge.key, charge) for charge in charges)


def add_by_key(keyed: Iterable[tuple[tuple[str, ...], Charge]]) -> list[Charge]:
    """Like `add_equal_charges`, with the given keys instead of the charges' own."""
    sums: Counter[tuple[tuple[str, ...], Place, int, int, str]] = Counter()
    rows: dict[str, Price | None] = {}
    for key, charge in called_off.each(keyed):
        row_id = charge.row.id if charge.row else ""
        rows[row_id] = charge.row
        account, detail = LINE_ACCOUNTS.index(charge.account), DETAILS.index(charge.detail)
        sums[key, charge.place, account, detail, row_id] += charge.gpu_us
    return [
        Charge(key, place, LINE_ACCOUNTS[account], gpu_us, rows[row_id], DETAILS[detail])
        for (key, place, account, detail, row_id), gpu_us in called_off.each(sorted(sums.items()))
    ]


@dataclass(frozen=True, slots=True)
class PricedTime:
    """The time of one group at one price.

    unit_price: None if the time has no price or is not billed.
    bucket: as `Charge.bucket`."""

    gpu_us: int
    gpu_hours: Decimal
    unit_price: Decimal | None
    billed: bool
    bucket: str

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
    for group, charge in called_off.each(items):
        buckets[charge.bucket][group] += charge.gpu_us
        prices[charge.bucket] = charge.row.price if charge.billed and charge.row else None
    ordered = {bucket: dict(sorted(lines.items())) for bucket, lines in sorted(buckets.items())}
    parts: dict[K, list[PricedTime]] = {group: [] for group in sorted({g for lines in ordered.values() for g in lines})}
    for bucket, shares in apportion_gpu_hours(ordered).items():
        for group, quantity in called_off.each(shares.items()):
            parts[group].append(
                PricedTime(ordered[bucket][group], quantity, prices[bucket], bucket != NOT_BILLED, bucket)
            )
    return parts


def unheld_parts(
    charges: Iterable[Charge], quantified: Mapping[tuple[str, ...], Collection[PricedTime]]
) -> dict[tuple[str, ...], list[PricedTime]]:
    """The unallocated part of each quantified group. Each of its quantities is divided by largest remainder, so that
    the part and the rest add up to it. quantified: these charges by their keys."""
    unheld: Counter[tuple[tuple[str, ...], str]] = Counter()
    for charge in called_off.each(charges):
        if charge.account == "unallocated":
            unheld[charge.key, charge.bucket] += charge.gpu_us
    parts: dict[tuple[str, ...], list[PricedTime]] = {}
    for key in dict.fromkeys(key for key, _ in unheld):
        parts[key] = []
        for whole in quantified[key]:
            gpu_us = unheld[key, whole.bucket]
            nano = int(whole.gpu_hours.scaleb(HOUR_PLACES))
            quantity = Decimal(apportion(nano, (whole.gpu_us - gpu_us, gpu_us))[1]).scaleb(-HOUR_PLACES)
            parts[key].append(replace(whole, gpu_us=gpu_us, gpu_hours=quantity))
    return parts


def quantify_together(charges: Iterable[Charge]) -> list[PricedTime]:
    """GPU-hours with nine decimals per price, of all charges as one group."""
    return quantify(((), charge) for charge in charges).get((), [])


def total_cost(parts: Collection[PricedTime]) -> Decimal | None:
    """The exact cost of all parts; None if any of them is unpriced."""
    return sum_if_known(part.cost for part in parts)


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
