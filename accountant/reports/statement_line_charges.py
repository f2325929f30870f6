"""Divides a statement into FOCUS charges that add up to it exactly.

accountant.reports.focus_charge_rows makes the cells of FOCUS of them; docs/reports.md describes the columns.

Invariants:
- The hours of a statement line's charges add up exactly to the line's hours. Each charge costs exactly its unit price
  times its own hours. The difference from rounding a team's sum to cents is a charge of its own.
- So a team's charges add up to its amount due in the statement, and all charges to the statement's total.
- Who held what on which day comes from the present records. For a closed month they only divide the stored lines, whose
  amounts never change.
- Time without a price, unmetered time and down time is no charge (accountant.exports.focus lists it)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import cache, partial
from typing import Final, Literal, NamedTuple
from zoneinfo import ZoneInfo

from accountant.billing.charge import Charge
from accountant.billing.cost_allocation import bills
from accountant.billing.statements import StatementLine
from accountant.core.periods import Month, day_span
from accountant.core.settings import InvoiceIssuer
from accountant.ledger.protocols import Moment
from accountant.prices.price_book import Price, PriceBook
from accountant.wire.policy_models import IDLE, UNASSIGNED
from accountant.wire.usage_cost_and_job_models import Dimension, LabelDimension, label_dimension
from gputally.base.apportionment import apportion
from gputally.base.money import HOUR_PLACES, exact_product, exact_sum

BY: Final[tuple[Dimension, ...]] = (
    "team", "day", "cluster", "zone", "namespace", "pod", "job", "user", "queue",
)  # fmt: skip
"""The dimensions that divide a statement line, besides the place of the GPU."""

Kind = Literal["usage", "commitment", "correction", "credit", "rounding"]
_KEY_DIGITS = 24
_NOT_SET: Final = frozenset({"", IDLE, UNASSIGNED})


class ChargeListing(NamedTuple):
    """What a list of every charge says beside them. issuer: the party that charges. labels: the exported labels, which
    become tags."""

    issuer: InvoiceIssuer
    labels: Sequence[str]


@dataclass(frozen=True, slots=True)
class Details:
    """The data that FOCUS files need in addition to the report.

    charges: the bills by BY and the labels.
    prices: the book's rows by id."""

    charges: tuple[Charge, ...]
    prices: Mapping[str, Price]
    issuer: InvoiceIssuer
    labels: tuple[LabelDimension, ...] = ()

    @classmethod
    def asked(
        cls,
        ledger: Moment,
        book: PriceBook | None,
        start_ms: int,
        end_ms: int,
        timezone: str,
        listing: ChargeListing,
    ) -> Details:
        """Reads the data for [start_ms, end_ms) from the ledger."""
        rows = {price.id: price for price in book.prices} if book is not None else {}
        dimensions = tuple(map(label_dimension, sorted(listing.labels)))
        found = bills(ledger, book, start_ms, end_ms, (*BY, *dimensions), timezone)
        return cls(tuple(found), rows, listing.issuer, dimensions)


class ChargeUse(NamedTuple):
    """The user and workload of a charge: the dimensions of BY except team and day. All are "" if the GPU had no holder,
    or the holder is unknown. labels: names and values of those that are set, one after the other."""

    cluster: str = ""
    zone: str = ""
    namespace: str = ""
    pod: str = ""
    job: str = ""
    user: str = ""
    queue: str = ""
    pool: str = ""
    region: str = ""
    labels: tuple[str, ...] = ()


NO_USE: Final = ChargeUse()


@dataclass(frozen=True, slots=True)
class FocusCharge:
    """One row of FOCUS's Cost and Usage. [start_ms, end_ms): its charge period.

    key: unique, and equal for the same charge in every rendering.
    line: the statement line of which it is a part; None for credits and rounding.
    hours: GPU-hours, None if it is not metered time.
    list_price: per GPU-hour, before discounts.
    about: the month that a correction or credit is about; "" for other charges."""

    key: str
    kind: Kind
    team: str
    start_ms: int
    end_ms: int
    billed: Decimal
    line: StatementLine | None = None
    hours: Decimal | None = None
    list_price: Decimal | None = None
    use: ChargeUse = NO_USE
    about: str = ""
    reason: str = ""
    commitment: str = ""


def of_lines(month: Month, tz: ZoneInfo, lines: Iterable[StatementLine], details: Details) -> Iterator[FocusCharge]:
    """The charges of priced lines, in the lines' order and by day and use."""
    parts_of_lines = _parts(details.charges, details.labels)
    span = month.span(tz)
    of_day = cache(partial(_day, tz=tz))
    for line in lines:
        if line.cost is None or line.unit_price is None or not line.gpu_us:
            continue
        # A line of a closed month for which the ledger has no records any more stays in one piece.
        of_line = parts_of_lines.get(line.key) or {("", NO_USE): line.gpu_us}
        nano = int(line.gpu_hours.scaleb(HOUR_PLACES))
        price = details.prices.get(line.price_row or "")
        for (day, use), share in zip(of_line, apportion(nano, list(of_line.values())), strict=True):
            if not share:
                continue
            hours = Decimal(share).scaleb(-HOUR_PLACES)
            start_ms, end_ms = of_day(day) if day else span
            yield FocusCharge(
                key=charge_key(month, "use", *line.key, day, *use[:-1], *use.labels),
                kind="commitment" if line.account == "unused_commitment" else "usage",
                team=line.team,
                start_ms=start_ms,
                end_ms=end_ms,
                billed=exact_product(line.unit_price, hours),
                line=line,
                hours=hours,
                list_price=price.list_price if price is not None else line.unit_price,
                use=use,
                commitment=(price.row.commitment or "") if price is not None else "",
            )


def rounding(
    month: Month, tz: ZoneInfo, due: Mapping[str, Decimal], charges: Sequence[FocusCharge]
) -> list[FocusCharge]:
    """The charges for the difference between each team's charges and its amount due, if there is one."""
    sums = dict.fromkeys(due, Decimal(0))
    for charge in charges:
        sums[charge.team] = exact_sum([sums[charge.team], charge.billed])
    start_ms, end_ms = month.span(tz)
    return [
        FocusCharge(charge_key(month, "rounding", team), "rounding", team, start_ms, end_ms, rest)
        for team, amount in due.items()
        if (rest := exact_sum([amount, -sums[team]]))
    ]


def _parts(
    charges: Iterable[Charge], labels: Sequence[LabelDimension]
) -> dict[tuple[str, ...], dict[tuple[str, ChargeUse], int]]:
    """GPU-µs by statement line, then by day and use, sorted."""
    sums: dict[tuple[str, ...], dict[tuple[str, ChargeUse], int]] = {}
    for charge in charges:
        team, day, *use = charge.key[: len(BY)]
        set_ = (pair for pair in zip(labels, charge.key[len(BY) :], strict=True) if pair[1] not in _NOT_SET)
        place = charge.place
        row = charge.row.id if charge.billed and charge.row else ""
        line = team, charge.account, charge.detail, place.gpu_model, place.capacity_type, row
        parts = sums.setdefault(line, {})
        part = day, ChargeUse._make((*use, place.pool, place.region, tuple(text for pair in set_ for text in pair)))
        parts[part] = parts.get(part, 0) + charge.gpu_us
    return {line: dict(sorted(parts.items())) for line, parts in sums.items()}


def _day(text: str, tz: ZoneInfo) -> tuple[int, int]:
    return day_span(date.fromisoformat(text), tz)


def charge_key(month: Month, *names: str) -> str:
    """The key of the month's charge that has these names. Equal names give equal keys."""
    text = json.dumps(names, ensure_ascii=False)
    return f"{month}-{hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]}"
