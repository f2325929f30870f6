"""Compares the provider's invoice with a month's bills, line by line, and derives true-up rates.

Invoice lines of one kind of GPU (model, region, capacity type) form one pool, together with the month's bills of such
GPUs. Unused commitments are shown beside the teams' usage, for every owner of a commitment. The difference between a
pool's invoice and its bills is `unmatched`, which is negative if the bills are higher. An invoice line without a
matching GPU is unmatched entirely.

A true-up is the set of hourly rates at which the month's bills equal the invoice. `trued_up` writes these rates into
the price book for that month only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

from pydantic import Field

from accountant.billing.charge import Charge, quantify_together, total_cost
from accountant.bookkeeping.month_closing import CannotClose
from accountant.core.periods import utc
from accountant.prices.price_book import MAX_DECIMALS, Price, PriceBook, PriceRow
from accountant.wire.policy_models import IDLE
from gputally.base.gpu_model_names import parse_gpu_model
from gputally.base.money import exact_sum
from gputally.server.config_loading import Model

_AFTER = "@after-"
"""Part of a row's id: the suffix names the month after which the row's own price applies again."""
MOST_ITEM = 500
"""Maximum length of an item's name, in characters."""
MOST_AMOUNT = 10**12
"""Largest amount of one line of an invoice, in its currency."""


class CannotTrueUp(CannotClose):
    """The invoice does not determine one rate for every price row. The message names the line and what to change."""


class InvoiceLine(Model):
    """The provider's charge for one kind of item in the month.

    gpu_model: "" if the item is not a GPU of the cluster."""

    item: str = Field(min_length=1, max_length=MOST_ITEM)
    gpu_model: str = Field(default="", max_length=200)
    region: str = Field(default="", max_length=200)
    capacity_type: str = Field(default="", max_length=50)
    amount: Decimal = Field(ge=-MOST_AMOUNT, le=MOST_AMOUNT, decimal_places=MAX_DECIMALS)
    currency: str = Field(pattern=r"^[A-Z]{3}$")


class Invoice(Model):
    """A provider's invoice, read from a file. source: name of the file, for later reference."""

    source: str = Field(min_length=1, max_length=1000)
    lines: tuple[InvoiceLine, ...] = Field(min_length=1, max_length=10_000)


class KeptInvoice(Model):
    """A stored invoice. act: the number of the act that stored it."""

    act: int
    invoice: Invoice


class ReconciledLine(Model):
    """One pool: invoice = teams + idle + unused_commitments + unmatched, exactly.

    items: the invoice's items for this pool.
    rate: the rate at which the bills equal the invoice, None if nothing of the pool was used or the invoice is not
        above 0. It is above `billed_rate` where the provider also charges time that nobody is billed.
    billed_rate: the mean rate of the bills; None if nothing of the pool was used, or some of it has no price.
    down_gpu_us, unmetered_gpu_us: time of the pool's GPUs that nobody is billed."""

    items: tuple[str, ...]
    gpu_model: str
    region: str
    capacity_type: str
    invoice: Decimal
    teams: Decimal
    idle: Decimal
    unused_commitments: Decimal
    unmatched: Decimal
    gpu_us: int
    rate: Decimal | None
    billed_rate: Decimal | None = None
    down_gpu_us: int = 0
    unmetered_gpu_us: int = 0


class Reconciliation(Model):
    """The comparison of a month.

    not_invoiced: priced bills without a matching invoice line.
    unpriced_gpu_us: billed time without a price."""

    month: str
    currency: str
    source: str
    lines: tuple[ReconciledLine, ...]
    invoice: Decimal
    teams: Decimal
    idle: Decimal
    unused_commitments: Decimal
    unmatched: Decimal
    not_invoiced: Decimal
    unpriced_gpu_us: int


_Kind: TypeAlias = tuple[str, str, str]
"""Model, region and capacity type, as far as an invoice states them."""


class TrueUpRate(Model):
    """The rate of one kind of GPU, per GPU and hour. region, capacity_type: "" for any.

    source: the source of the invoice."""

    gpu_model: str
    region: str
    capacity_type: str
    rate: Decimal
    source: str

    @property
    def kind(self) -> _Kind:
        return self.gpu_model, self.region, self.capacity_type


class TrueUp(Model):
    """The rates of a month's invoices, as they were put in force."""

    month: str
    rates: tuple[TrueUpRate, ...]

    def after(self, earlier: TrueUp | None) -> TrueUp:
        """Returns these rates, and the rates of earlier invoices of the month (such as another provider's) for other
        kinds of GPU."""
        found = {one.kind: one for one in (*(earlier.rates if earlier else ()), *self.rates)}
        return TrueUp(month=self.month, rates=tuple(found[kind] for kind in sorted(found)))


@dataclass(frozen=True, slots=True)
class _Pool:
    """Invoice lines of one kind of GPU, and the charges that belong to it."""

    lines: tuple[InvoiceLine, ...]
    charges: tuple[Charge, ...]

    @property
    def kind(self) -> _Kind:
        return _kind(self.lines[0])


def reconcile(month: str, invoice: Invoice, charges: Sequence[Charge], currency: str) -> Reconciliation:
    """Compares an invoice with charges, the month's bills by team. Raises CannotClose for an invoice in another
    currency."""
    other = sorted({line.currency for line in invoice.lines} - {currency})
    if other:
        raise CannotClose(
            f"the invoice has charges in {' and '.join(other)}, but the price book is in {currency}: convert them first"
        )
    billed = [charge for charge in charges if charge.billed]
    pools, rest = _pools(invoice.lines, billed)
    unbilled, _ = _pools(invoice.lines, [charge for charge in charges if not charge.billed])
    lines = tuple(_line(pool, of_nobody.charges) for pool, of_nobody in zip(pools, unbilled, strict=True))
    return Reconciliation(
        month=month,
        currency=currency,
        source=invoice.source,
        lines=lines,
        invoice=exact_sum(line.invoice for line in lines),
        teams=exact_sum(line.teams for line in lines),
        idle=exact_sum(line.idle for line in lines),
        unused_commitments=exact_sum(line.unused_commitments for line in lines),
        unmatched=exact_sum(line.unmatched for line in lines),
        not_invoiced=_cost(rest),
        unpriced_gpu_us=sum(charge.gpu_us for charge in billed if charge.unpriced),
    )


def true_up(invoice: Invoice, charges: Sequence[Charge], month: str) -> TrueUp:
    """The rates of the invoice.

    Raises CannotTrueUp if a line matches time without a price, or if no line with an amount above 0 matches a GPU that
    was billed in the month."""
    rates = []
    for pool in _pools(invoice.lines, [charge for charge in charges if charge.billed])[0]:
        line = _line(pool)
        if line.rate is None:
            continue
        if any(charge.unpriced for charge in pool.charges):
            raise CannotTrueUp(
                f"some GPU time of {' '.join(filter(None, pool.kind))} has no price: add a price row for it, then "
                "repeat the true-up"
            )
        gpu_model, region, capacity_type = pool.kind
        kind = {"gpu_model": gpu_model, "region": region, "capacity_type": capacity_type, "source": invoice.source}
        rates.append(TrueUpRate(rate=line.rate, **kind))
    if not rates:
        raise CannotTrueUp(
            f"no line of the invoice with an amount above 0 matches a GPU that was billed in {month}: check the lines' "
            "gpu_model, region and capacity_type"
        )
    return TrueUp(month=month, rates=tuple(rates))


def trued_up(book: PriceBook, true: TrueUp, charges: Sequence[Charge], span: tuple[int, int]) -> PriceBook:
    """The book with the true-up's rates in the month's rows. Raises CannotTrueUp.

    charges: the month's bills by that book. They determine which rates apply to each row."""
    rates: dict[str, TrueUpRate] = {}
    of_kind = {one.kind: one for one in true.rates}
    for charge in charges:
        kind = _best(of_kind, charge) if charge.billed else None
        if kind is None or charge.row is None:
            continue
        if rates.setdefault(charge.row.id, of_kind[kind]).rate != of_kind[kind].rate:
            raise CannotTrueUp(
                f"price row {charge.row.id!r} matches several invoice lines: give it a region or capacity type"
            )
    rows: list[PriceRow] = []
    for price in book.prices:
        rate = rates.get(price.id)
        rows += [price.row] if rate is None else _cut(price, span, rate, true.month)
    return PriceBook.model_validate(book.model_dump(by_alias=True) | {"rows": [row.model_dump() for row in rows]})


def _cut(price: Price, span: tuple[int, int], trued: TrueUpRate, month: str) -> list[PriceRow]:
    """The row before the month, inside it at the invoice's rate, and after it, as far as the row is valid there."""
    row, begin, stop = price.row, max(price.start_ms, span[0]), min(price.end_ms, span[1])
    # After true-ups of several months in a row, the id still has only one suffix.
    own = row.id.partition(_AFTER)[0]
    rows = [row.model_copy(update={"valid_to": utc(begin)})] if price.start_ms < begin else []
    inside = {
        "id": f"{own}@{month}", "price": trued.rate, "instance": None, "amortised": None, "discount": Decimal(0),
        "valid_from": utc(begin), "valid_to": utc(stop), "source": f"invoice: {trued.source}"[:1000],
        "as_of": utc(stop)[:10],
    }  # fmt: skip
    rows.append(row.model_copy(update=inside))
    if stop < price.end_ms:
        after = {"id": f"{own}{_AFTER}{month}", "valid_from": utc(stop)}
        rows.append(row.model_copy(update=after))
    return rows


def _pools(lines: Iterable[InvoiceLine], charges: Iterable[Charge]) -> tuple[list[_Pool], list[Charge]]:
    """The pools by kind, and the charges that belong to none."""
    kinds: dict[_Kind, list[InvoiceLine]] = {}
    for line in lines:
        # An item that is not a GPU of the cluster stays a separate line, so that items can be distinguished.
        kinds.setdefault(_kind(line) if line.gpu_model else ("", line.item, line.region), []).append(line)
    of_kind: dict[_Kind, list[Charge]] = {kind: [] for kind in kinds}
    rest: list[Charge] = []
    for charge in charges:
        best = _best(kinds, charge)
        (rest if best is None else of_kind[best]).append(charge)
    return [_Pool(tuple(kinds[kind]), tuple(of_kind[kind])) for kind in sorted(kinds)], rest


def _best(kinds: Iterable[_Kind], charge: Charge) -> _Kind | None:
    """The most specific kind that matches a charge; None if none does."""
    matching = [kind for kind in kinds if kind[0] and _matches(kind, charge)]
    return max(matching, key=lambda kind: (sum(map(bool, kind)), len(kind[0]), kind), default=None)


def _kind(line: InvoiceLine) -> _Kind:
    return line.gpu_model, line.region, line.capacity_type


def _matches(kind: _Kind, charge: Charge) -> bool:
    model, region, capacity_type = kind
    return (
        parse_gpu_model(model).covers(parse_gpu_model(charge.place.gpu_model))
        and region in ("", charge.place.region)
        and capacity_type in ("", charge.place.capacity_type)
    )


def _line(pool: _Pool, unbilled: Sequence[Charge] = ()) -> ReconciledLine:
    invoice = exact_sum(line.amount for line in pool.lines)
    unused = _cost([charge for charge in pool.charges if charge.account == "unused_commitment"])
    capacity = [charge for charge in pool.charges if charge.account != "unused_commitment"]
    idle = _cost([charge for charge in capacity if charge.key[0] == IDLE])
    teams = exact_sum([_cost(capacity), -idle])
    hours = Fraction(exact_sum(part.gpu_hours for part in quantify_together(pool.charges)))
    gpu_model, region, capacity_type = pool.kind
    return ReconciledLine(
        items=tuple(sorted({line.item for line in pool.lines})),
        gpu_model=gpu_model,
        region=region,
        capacity_type=capacity_type,
        invoice=invoice,
        teams=teams,
        idle=idle,
        unused_commitments=unused,
        unmatched=exact_sum([invoice, -teams, -idle, -unused]),
        gpu_us=sum(charge.gpu_us for charge in pool.charges),
        rate=_rate(invoice, hours) if hours and invoice > 0 else None,
        billed_rate=_rate(exact_sum([teams, idle, unused]), hours)
        if hours and not any(charge.unpriced for charge in pool.charges)
        else None,
        down_gpu_us=sum(charge.gpu_us for charge in unbilled if charge.account == "down"),
        unmetered_gpu_us=sum(charge.gpu_us for charge in unbilled if charge.account == "unmetered"),
    )


def _rate(amount: Decimal, hours: Fraction) -> Decimal:
    return Decimal(round(Fraction(amount) / hours * 10**MAX_DECIMALS)).scaleb(-MAX_DECIMALS)


def _cost(charges: Iterable[Charge]) -> Decimal:
    """The cost of the charges with a price."""
    return total_cost(quantify_together(charge for charge in charges if not charge.unpriced)) or Decimal(0)
