"""Rounds exact costs to the amounts that pages show, in one way for all of them.

The total of a span is rounded once, and then only divided, each time by largest remainder: among the teams, a team's
amount among its kinds of time (`Kind`), and that of a kind among what a table has rows for: details of idle time, jobs,
days, the values of a filter. Therefore

- the rows of a table add up to its total, to the minor unit of the currency;
- what consists of whole kinds (all, a team, an account, a GPU model, a capacity type) has one amount for a span, in
  every table, which is the sum of its statement lines;
- what a filter takes has the amount that its group has in a table by that dimension alone, if it has no other filter.

A job is the exception: jobs are compared on many pages, by themselves. Wherever one is named, what it has is rounded by
itself (`by_itself`), and so a list of jobs may miss its total by some minor units.

A span with parts of several calendar months has the sums of the amounts of these parts.

APIs and files for programs have exact costs and are not rounded here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Final, NamedTuple, TypeAlias, TypeVar

from accountant.billing.charge import LINE_ACCOUNTS, Account, Charge, PricedTime, quantify
from accountant.ledger.usage import Int64Array
from gputally.base import called_off
from gputally.base.apportionment import apportion
from gputally.base.money import (
    HOUR_PLACES,
    Money,
    apportion_gpu_hours,
    exact_product,
    exact_sum,
    minor_places,
    payable,
    plain,
)
from gputally.base.units import US_PER_HOUR

K = TypeVar("K", bound=Hashable)
_FITS: Final = 2**62
_NANO, _US = 5, 18
"""A billionth of an hour is 18/5 µs."""
assert _US * 10**HOUR_PLACES == _NANO * US_PER_HOUR


def nano_hours(total: int, gpu_us: Int64Array) -> Int64Array:
    """Return `total` billionths of an hour divided in proportion to GPU-µs, as `apportionment.apportion` does.

    The total differs from the exact sum by rounding only. Each part therefore differs little from its own hours, and
    the intermediate products stay small."""
    import numpy as np  # not at the top: commands that only ask a server do not load it

    whole = int(gpu_us.sum())
    off = _US * total - _NANO * whole
    if not whole or abs(off) > _US or whole * (_US + abs(off)) >= _FITS or int(gpu_us.max()) >= _FITS // _NANO:
        return np.array(apportion(total, gpu_us.tolist()), dtype=np.int64)
    # total × w / whole = (5 × whole + off) × w / (18 × whole)
    units, rest = np.divmod(_NANO * gpu_us, _US)
    more, left = np.divmod(rest * whole + off * gpu_us, _US * whole)
    parts: Int64Array = units + more
    return _with_missing(parts, left, total - int(parts.sum()))


def minor_units(price: Decimal, nano: Int64Array, total: int, places: int) -> Int64Array:
    """The cost of each quantity, as integers that add up to `total`.

    nano: the quantities, in billionths of a GPU-hour.
    places: decimals of the unit of the costs and of `total`, 2 for cents.

    The result equals that of `gputally.base.money.payable`. Raises ValueError for a total that no rounding of the parts
    gives."""
    import numpy as np  # not at the top: commands that only ask a server do not load it

    exponent = int(price.as_tuple().exponent)
    scale = max(0, HOUR_PLACES - exponent - places)
    per_nano = int(price.scaleb(scale + places - HOUR_PLACES))
    most = int(np.abs(nano).max(initial=0))
    fits = abs(per_nano) * most < _FITS and 10**scale < _FITS
    exact = (nano if fits else nano.astype(object)) * per_nano
    parts, left = exact // 10**scale, exact % 10**scale
    missing = total - int(parts.sum())
    if not 0 <= missing <= len(parts):
        hours, amount = plain(Decimal(int(nano.sum())).scaleb(-HOUR_PLACES)), plain(Decimal(total).scaleb(-places))
        raise ValueError(f"the costs of {hours} GPU-hours at {plain(price)} cannot be rounded to add up to {amount}")
    return _with_missing(parts.astype(np.int64), left, missing)


def _with_missing(parts: Int64Array, left: Int64Array, missing: int) -> Int64Array:
    """Adds one to each of the `missing` parts with the largest remainders, which are in `left`. Of equal remainders the
    earlier part comes first."""
    import numpy as np  # not at the top: commands that only ask a server do not load it

    if missing:
        parts[np.argsort(-left, kind="stable")[:missing]] += 1
    return parts


KindKey: TypeAlias = tuple[str, int, str, str, str]
"""A kind of time: team, account (index in LINE_ACCOUNTS), GPU model, capacity type, id of the price row or ""."""


class Part(NamedTuple):
    """The amount of a part of a kind of time."""

    kind: KindKey
    key: tuple[str, ...]
    amount: Decimal

    @property
    def team(self) -> str:
        return self.kind[0]

    @property
    def account(self) -> Account:
        return LINE_ACCOUNTS[self.kind[1]]

    @property
    def gpu_model(self) -> str:
        return self.kind[2]


def kind_of(team: str, charge: Charge) -> KindKey:
    """The kind of a charge that this team pays."""
    place, row = charge.place, charge.row.id if charge.billed and charge.row else ""
    return team, LINE_ACCOUNTS.index(charge.account), place.gpu_model, place.capacity_type, row


def kinds(billed: Iterable[Charge]) -> dict[KindKey, PricedTime]:
    """The time and cost of every kind, in order. billed: all charges of a span, the team first in their keys."""
    return {
        kind: part for kind, (part,) in quantify((kind_of(charge.key[0], charge), charge) for charge in billed).items()
    }


def of_teams(costs: Mapping[KindKey, Decimal | None], currency: str) -> dict[str, Decimal]:
    """The payable amount of each team: that of all teams, rounded once and divided among them. Kinds without a price
    are in none."""
    owed: dict[str, Decimal] = {}
    for kind, cost in costs.items():
        if cost is not None:
            owed[kind[0]] = exact_sum([owed.get(kind[0], Decimal(0)), cost])
    return {team: money.amount for team, money in payable(_money(owed, currency), currency).items()}


def of_kinds(
    costs: Mapping[KindKey, Decimal | None], currency: str, teams: Mapping[str, Decimal]
) -> dict[KindKey, Decimal]:
    """The amounts of teams, divided among their kinds of time with a price. teams: as `of_teams` gives them."""
    of_team: dict[str, dict[KindKey, Decimal]] = defaultdict(dict)
    for kind, cost in costs.items():
        if cost is not None:
            of_team[kind[0]][kind] = cost
    return {kind: amount for team, own in of_team.items() for kind, amount in divided(own, currency, teams[team])}


def divided(costs: Mapping[K, Decimal], currency: str, total: Decimal) -> Iterator[tuple[K, Decimal]]:
    """An amount divided among parts with these exact costs."""
    for key, money in payable(_money(costs, currency), currency, Money(total, currency)).items():
        yield key, money.amount


def both_ways(rows: Iterable[Sequence[Decimal]], totals: Sequence[Decimal], currency: str) -> list[list[Decimal]]:
    """Rounds the parts of rows to amounts that add up in both directions: the columns to `totals`, and each row to its
    own sum, within one minor unit where that has fractions of it. A part that is 0 stays 0 wherever the rest allows it.

    totals: the sums of the columns, rounded up or down to the minor unit."""
    exact = [list(row) for row in rows]
    # What rounding has left to each column so far; less than one minor unit.
    owed = [exact_sum([total, *(-row[at] for row in exact)]) for at, total in enumerate(totals)]
    found = []
    for row in exact:
        due = {at: exact_sum([part, owed[at]]) for at, part in enumerate(row)}
        whole = payable({"": Money(exact_sum(due.values()), currency)}, currency)[""]
        try:
            rounded = payable(_money({at: due[at] for at, part in enumerate(row) if part}, currency), currency, whole)
        except ValueError:
            rounded = payable(_money(due, currency), currency, whole)
        amounts = [rounded[at].amount if at in rounded else Decimal(0) for at in due]
        owed = [
            exact_sum([one, -amount]) if at in rounded else owed[at]
            for (at, one), amount in zip(due.items(), amounts, strict=True)
        ]
        found.append(amounts)
    return found


def _money(costs: Mapping[K, Decimal], currency: str) -> dict[K, Money]:
    return {key: Money(cost, currency) for key, cost in costs.items()}


def by_itself(times: Iterable[tuple[str, Decimal, int]], currency: str) -> Decimal:
    """The amount of a job, or of a part of it, which depends on nothing else.

    times: ids of price rows, their prices, and GPU-µs."""
    of_rows: dict[str, dict[Decimal, int]] = defaultdict(lambda: defaultdict(int))
    for row, price, gpu_us in times:
        of_rows[row][price] += gpu_us
    hours = apportion_gpu_hours(dict(sorted(of_rows.items())))
    costs = (exact_product(price, quantity) for of_row in hours.values() for price, quantity in of_row.items())
    return Money(exact_sum(costs), currency).rounded().amount


Keyed: TypeAlias = Iterable[tuple[tuple[str, ...], Charge]]
"""Charges, each with its key."""


def keyed(several: Iterable[Charge]) -> list[tuple[tuple[str, ...], Charge]]:
    """Charges with their own keys."""
    return [(charge.key, charge) for charge in called_off.each(several)]


def parts(whole: Keyed, divisions: Keyed, width: int, currency: str) -> list[Part]:
    """The amounts of the parts of kinds of time, without those that have no price.

    whole: all charges of a span; their keys are the team and the values that a filter is about.
    divisions: those of them that the filter takes, divided further: their keys begin like those of `whole`.
    width: number of values in a key of `whole`; the rest of a key of `divisions` is the key of its part."""
    places = minor_places(currency)
    return [
        Part(kind, key, Decimal(cents).scaleb(-places))
        for kind, key, cents in minor_parts(whole, divisions, width, currency)
    ]


def minor_parts(
    whole: Keyed, divisions: Keyed, width: int, currency: str
) -> Iterator[tuple[KindKey, tuple[str, ...], int]]:
    """The kind, key and amount of each of the `parts`, in minor units of the currency."""
    filtered: dict[KindKey, dict[tuple[str, ...], int]] = defaultdict(lambda: defaultdict(int))
    wanted: dict[KindKey, dict[tuple[str, ...], dict[tuple[str, ...], int]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(int))
    )
    every = [(key, kind_of(key[0], charge), charge) for key, charge in called_off.each(whole)]
    for key, kind, charge in every:
        filtered[kind][key[1:width]] += charge.gpu_us
    for key, charge in called_off.each(divisions):
        wanted[kind_of(key[0], charge)][key[1:width]][key[width:]] += charge.gpu_us
    times = {kind: part for kind, (part,) in quantify((kind, charge) for _, kind, charge in every).items()}
    costs = {kind: part.cost for kind, part in times.items() if part.billed}
    amounts = of_kinds(costs, currency, of_teams(costs, currency))
    places = minor_places(currency)
    for kind, of_filter in called_off.each(wanted.items()):
        if kind not in amounts:
            continue
        price = times[kind].unit_price or Decimal(0)
        whole_part = _Units(int(times[kind].gpu_hours.scaleb(HOUR_PLACES)), int(amounts[kind].scaleb(places)))
        for value, units in whole_part.among(filtered[kind], price, places):
            for key, (_, cents) in units.among(of_filter.get(value, {}), price, places):
                yield kind, key, cents


class _Units(NamedTuple):
    """Time and amount of a part: billionths of a GPU-hour, and minor units of the currency."""

    nano: int
    cents: int

    def among(
        self, gpu_us: Mapping[tuple[str, ...], int], price: Decimal, places: int
    ) -> Iterator[tuple[tuple[str, ...], _Units]]:
        """Divided in proportion to time."""
        import numpy as np  # not at the top: commands that only ask a server do not load it

        if len(gpu_us) == 1:
            yield next(iter(gpu_us)), self
        elif gpu_us:
            keys = sorted(gpu_us)
            nano = nano_hours(self.nano, np.array([gpu_us[key] for key in keys], dtype=np.int64))
            cents = minor_units(price, nano, self.cents, places)
            yield from zip(keys, map(_Units, nano.tolist(), cents.tolist()), strict=True)
