"""What another price book would change about a month: old and new cost per team and kind of GPU. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from accountant.books.statements import Statement, StatementLine
from accountant.money import exact_sum
from accountant.wire import Model

_Key = tuple[str, str, str]


class PriceChange(Model):
    """Exact costs; None where some of the time has no price under that book."""

    team: str
    gpu_model: str
    capacity_type: str
    gpu_us: int
    before: Decimal | None
    after: Decimal | None


class PriceDiff(Model):
    """Only groups whose cost changes; the totals are of everything that has a price, unused commitments too."""

    month: str
    currency_before: str | None
    currency_after: str | None
    version_before: str
    version_after: str
    changes: tuple[PriceChange, ...]
    total_before: Decimal
    total_after: Decimal
    unpriced_before_us: int
    unpriced_after_us: int


def difference(month: str, before: Statement, after: Statement) -> PriceDiff:
    """By how much `after` differs from `before`: two statements of the same time under two books."""
    old, new = _costs(before.every_line), _costs(after.every_line)
    time: dict[_Key, int] = {}
    for line in after.every_line:
        time[_key(line)] = time.get(_key(line), 0) + line.gpu_us
    zero = Decimal(0)
    return PriceDiff(
        month=month,
        currency_before=before.currency,
        currency_after=after.currency,
        version_before=before.price_book_version,
        version_after=after.price_book_version,
        changes=tuple(
            PriceChange(
                team=key[0],
                gpu_model=key[1],
                capacity_type=key[2],
                gpu_us=time.get(key, 0),
                before=old.get(key, zero),
                after=new.get(key, zero),
            )
            for key in sorted({*old, *new})
            if old.get(key, zero) != new.get(key, zero)
        ),
        total_before=_total(before),
        total_after=_total(after),
        unpriced_before_us=before.unpriced_gpu_us,
        unpriced_after_us=after.unpriced_gpu_us,
    )


def _total(stated: Statement) -> Decimal:
    return exact_sum(line.cost for line in stated.every_line if line.cost is not None)


def _key(line: StatementLine) -> _Key:
    return line.team, line.gpu_model, line.capacity_type


def _costs(lines: Iterable[StatementLine]) -> dict[_Key, Decimal | None]:
    found: dict[_Key, Decimal | None] = {}
    for line in lines:
        before = found.get(_key(line), Decimal(0))
        unknown = before is None or line.cost is None
        found[_key(line)] = None if unknown else exact_sum([before or Decimal(0), line.cost or Decimal(0)])
    return found
