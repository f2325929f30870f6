"""Late facts about a closed month, as the difference to what was stated.

The closed lines and every correction booked since, taken together, are compared with the lines as the ledger and
the price book would give them now. What differs is booked in the open month, one line per team, account, kind
of GPU and price: a changed price gives the reversal at the old one and a line at the new one. In GPU-µs the
closed lines and all corrections always add up to the present lines, exactly. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal

from accountant.books.costs import BILLED, DETAILS, LINE_ACCOUNTS
from accountant.books.statements import Correction, StatementLine
from accountant.money import Money, exact_product, gpu_hours, payable

_Key = tuple[str, int, int, str, str, str, Decimal]


def differences(
    stated: Iterable[StatementLine],
    booked: Iterable[Correction],
    present: Iterable[StatementLine],
    *,
    month: str,
    booked_in: str,
    reason: str,
    currency: str | None,
) -> tuple[Correction, ...]:
    """What has to be booked in `booked_in` so that `month` adds up again; of nothing where it does.

    A line's hours are those of its own GPU-µs, its cost their product with the price: None where unpriced."""
    time: dict[_Key, int] = {}
    sample: dict[_Key, StatementLine] = {}
    for sign, lines in (
        (-1, stated),
        (-1, (correction.line for correction in booked)),
        (1, present),
    ):
        for line in lines:
            key = _key(line)
            time[key] = time.get(key, 0) + sign * line.gpu_us
            sample[key] = line
    changed = [_line(sample[key], time[key]) for key in sorted(time) if time[key]]
    amounts = [Money(line.cost or Decimal(0), currency) if currency else None for line in changed]
    rounded = payable({i: money for i, money in enumerate(amounts) if money is not None}, currency) if currency else {}
    return tuple(
        Correction(month, booked_in, reason, line, rounded[i].amount if i in rounded else Decimal(0))
        for i, line in enumerate(changed)
    )


def _key(line: StatementLine) -> _Key:
    return (
        line.team,
        LINE_ACCOUNTS.index(line.account),
        DETAILS.index(line.detail),
        line.gpu_model,
        line.capacity_type,
        line.price_row or "",
        line.unit_price if line.unit_price is not None else Decimal(-1),
    )


def _line(sample: StatementLine, gpu_us: int) -> StatementLine:
    hours = gpu_hours(abs(gpu_us)).copy_sign(Decimal(gpu_us))
    cost = exact_product(sample.unit_price, hours) if sample.unit_price is not None else None
    if sample.account not in BILLED:
        cost = Decimal(0)
    return replace(sample, gpu_us=gpu_us, gpu_hours=hours, cost=cost)


def of_month(corrections: Sequence[Correction], month: str) -> list[Correction]:
    """Those about that month, wherever they are booked."""
    return [correction for correction in corrections if correction.month == month]
