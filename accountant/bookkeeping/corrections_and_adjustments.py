"""Turns late records into proposals and correction lines of a closed month, and computes credits and charges.

Late records change what a closed month should have been. `differences` compares two things: the closed lines with all
corrections since, and the lines that the ledger and the price book give now. The difference is booked in the first open
month, as one line per team, account, kind of GPU and price. A changed price gives a reversal at the old price and a
line at the new one. When no difference is left to decide on, the closed lines, all corrections and all refused changes
add up exactly to the present lines in GPU-µs.

Only an administrator's act changes a closed month. The difference, except for what was refused before, is one proposal.
If it is accepted, it becomes corrections. If it is refused, it is recorded and not proposed again. The proposal's id is
derived from its lines, so an act applies only to what its author has seen.

An adjustment is an amount for one team. It is booked in an open month, concerns that month or an earlier one, and has
an author, an approver and a reason. It is due in addition to the lines and changes none of them.

A credit for a node covers time that was billed although the node was unusable, such as a hung node or a failed fabric.
(Time recorded as `down` is not billed and needs no credit.) The credit is the billed time of the node's holders at its
price, times a share, rounded to the minor unit so that the parts add up. A span of a node can be credited once. The
bookkeeper books it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator, model_validator

from accountant.billing.charge import ALLOCATED, BILLED, DETAILS, LINE_ACCOUNTS, quantify, total_cost
from accountant.billing.cost_allocation import bill_start_up
from accountant.billing.statements import Adjustment, Correction, StatementLine, as_text
from accountant.billing.usage_pricing import charges_by_grouping
from accountant.bookkeeping.month_closing import CannotClose
from accountant.core.periods import Month, utc
from accountant.ledger.protocols import Moment, ReadableLedger
from accountant.ledger.usage import PRICED_BY
from accountant.prices.price_book import PriceBook, Share
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base.money import Money, exact_product, exact_sum, gpu_hours, minor_places, payable
from gputally.server.config_loading import Model


@dataclass(frozen=True, slots=True)
class TeamEffect:
    """The effect of a proposal on one team.

    gpu_us: billed time.
    amount: in the price book's currency."""

    team: str
    gpu_us: int
    amount: Decimal


@dataclass(frozen=True, slots=True)
class Proposal:
    """The late changes of a month that wait for a decision.

    lines: the corrections to book in `booked_in`, the first open month."""

    month: str
    booked_in: str
    id: str
    lines: tuple[Correction, ...]

    def effects(self, teams: Collection[str] | None = None) -> list[TeamEffect]:
        """The effect on each team, sorted by name. teams: the teams to include; None for all."""
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


def chosen_proposal(waiting: Proposal | None, month: str, proposal_id: str) -> Proposal:
    """The proposal with this id. Raises CannotClose if there is none, or if it has changed since."""
    if waiting is None:
        raise CannotClose(f"{month} has no proposal: no late records wait for a decision")
    if waiting.id != proposal_id:
        raise CannotClose(
            f"more records have arrived for {month}: proposal {proposal_id} is now {waiting.id}; check it and try again"
        )
    return waiting


def repriced_refusals(refused: Iterable[Correction], present: Iterable[StatementLine]) -> list[Correction]:
    """The bookings, with amount 0, that move refused time to a price that the month still has.

    A month may have been priced again after a proposal was refused. Time of a price row that the month no longer has
    moves to the line of the same team, account, detail, GPU model and capacity type with the most GPU time. Without
    this, the refused difference would be proposed again after every new pricing."""
    longest: dict[tuple[str, ...], StatementLine] = {}
    prices = set()
    for line in present:
        without_price = line.key[:-1]
        prices.add((line.key, line.unit_price))
        if without_price not in longest or line.gpu_us > longest[without_price].gpu_us:
            longest[without_price] = line
    corrections: list[Correction] = []
    for one in refused:
        key = one.line.key[:-1]
        if key not in longest or (one.line.key, one.line.unit_price) in prices:
            continue
        at_new_price = replace(longest[key], gpu_us=one.line.gpu_us, gpu_hours=one.line.gpu_hours)
        reversal = replace(one.line, gpu_us=-one.line.gpu_us, gpu_hours=-one.line.gpu_hours)
        corrections += [replace(one, line=line, amount=Decimal(0)) for line in (reversal, at_new_price)]
    return corrections


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
    """The corrections to book in `booked_in` after which the stated lines and all corrections equal the present lines;
    empty if they are equal already.

    The hours of a line are those of its own GPU-µs. Its cost is hours × price; None if unpriced, 0 for an account that
    is not billed."""
    time: Counter[_Key] = Counter()
    sample: dict[_Key, StatementLine] = {}
    for sign, lines in ((-1, stated), (-1, (correction.line for correction in booked)), (1, present)):
        for line in lines:
            time[_key(line)] += sign * line.gpu_us
            sample[_key(line)] = line
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
    """The corrections of that month, in whichever month they are booked."""
    return [correction for correction in corrections if correction.month == month]


_MAX = Decimal(10) ** 12


class NewAdjustment(Model):
    """A request for an adjustment. amount: negative for a credit; in the price book's currency, with at most the
    decimals of its minor unit (12.34, not 1234)."""

    month: str
    team: str = Field(min_length=1, max_length=253)
    amount: Annotated[Decimal, BeforeValidator(lambda value: Decimal(value) if type(value) is int else value)]
    reason: str = Field(min_length=1, max_length=1000)
    approved_by: str = Field(min_length=1, max_length=253)

    @field_validator("month")
    @classmethod
    def _month(cls, text: str) -> str:
        return str(Month.parse(text))

    @field_validator("amount")
    @classmethod
    def _amount(cls, amount: Decimal) -> Decimal:
        if not amount.is_finite() or not amount or not -_MAX <= amount <= _MAX:
            raise ValueError(f"the amount of an adjustment is not 0 and between -{_MAX:,} and {_MAX:,}")
        return amount


def refuse_equal(new: Adjustment, known: Iterable[Adjustment]) -> None:
    """Raises CannotClose if an adjustment differs from a known one in nothing but its number, instant and month of
    booking."""
    for one in known:
        if replace(one, id=new.id, at_ms=new.at_ms, booked_in=new.booked_in) == new:
            raise CannotClose(
                f"{one.id} of {utc(one.at_ms)} is equal, so this is booked already: if it is meant twice, give another"
                " reason"
            )


def booked(new: NewAdjustment, *, number: int, booked_in: str, currency: str, who: str, at_ms: int) -> Adjustment:
    """The adjustment to book.

    Raises CannotClose for a fraction of a minor unit, for a later month than `booked_in`, or if the author is also the
    approver."""
    places = minor_places(currency)
    if new.amount != round(new.amount, places):
        raise CannotClose(f"{new.amount} {currency} has more decimals than the currency: write at most {places}")
    if new.approved_by == who:
        raise CannotClose(f"{who!r} books the adjustment, so another person has to approve it")
    if new.month > booked_in:
        raise CannotClose(
            f"{new.month} is after {booked_in}, the month in which the adjustment is booked: name an earlier month"
        )
    return Adjustment(
        id=f"adjustment-{number}",
        month=new.month,
        booked_in=booked_in,
        team=new.team,
        amount=round(new.amount, places),
        currency=currency,
        reason=new.reason,
        who=who,
        approved_by=new.approved_by,
        at_ms=at_ms,
    )


_BY: tuple[Dimension, ...] = ("team", "cluster", "node", *PRICED_BY)


class NodeSpan(Model):
    """A node during [start_ms, end_ms). share: part of the billed amount to credit, 1 for all of it."""

    cluster: str = Field(max_length=253)
    node: str = Field(min_length=1, max_length=253)
    start_ms: int = Field(ge=0)
    end_ms: int
    share: Share = Decimal(1)

    @model_validator(mode="after")
    def _some(self) -> NodeSpan:
        if self.start_ms >= self.end_ms:
            raise ValueError("the span ends at or before its start")
        if not self.share:
            raise ValueError("a share of 0 gives no credit")
        return self

    def overlaps(self, other: NodeSpan) -> bool:
        return (
            (self.cluster, self.node) == (other.cluster, other.node)
            and self.start_ms < other.end_ms
            and other.start_ms < self.end_ms
        )

    @property
    def text(self) -> str:
        """The node and span as text, for the reason of an act."""
        return f"node {self.node}, {utc(self.start_ms)} to {utc(self.end_ms)}"


@dataclass(frozen=True, slots=True)
class CreditLine:
    """What one team was billed for the node, and its credit: negative, rounded to the currency's minor unit (-12.34,
    not -1234)."""

    team: str
    gpu_us: int
    billed: Decimal
    amount: Decimal


def credit_lines(ledger: Moment, book: PriceBook, span: NodeSpan, timezone: str) -> list[CreditLine]:
    """One line per team that held GPUs of the node. Raises CannotClose if held time has no price."""
    where: Mapping[Dimension, Collection[str]] = {"cluster": (span.cluster,), "node": (span.node,)}
    (columns,) = charges_by_grouping(ledger, book, span.start_ms, span.end_ms, (_BY,), timezone, where)
    paid = bill_start_up(columns, book.billing, _BY).charges()
    held = [charge for charge in paid if charge.account in ALLOCATED and charge.key[0] != IDLE]
    billed: dict[str, tuple[int, Decimal]] = {}
    for (team,), parts in quantify(((charge.key[0],), charge) for charge in held).items():
        cost = total_cost(parts)
        if cost is None:
            raise CannotClose(f"time of {team!r} on {span.node} has no price: it was not billed and needs no credit")
        billed[team] = sum(part.gpu_us for part in parts), cost
    exact = {team: Money(exact_product(cost, -span.share), book.currency) for team, (_, cost) in billed.items()}
    amounts = payable(exact, book.currency) if exact else {}
    return [CreditLine(team, gpu_us, cost, amounts[team].amount) for team, (gpu_us, cost) in sorted(billed.items())]


def cluster_of(ledger: ReadableLedger, node: str, start_ms: int, end_ms: int) -> str:
    """The cluster with a node of that name in the span. Raises ValueError if there is none, or several."""
    span = start_ms, end_ms
    with ledger.moment(*span) as moment:
        clusters = [cluster for (cluster,) in moment.usage(span, ("cluster",), {"node": (node,)}).row_keys()]
    if not clusters:
        raise ValueError(f"no node {node!r} had a GPU in that span: check its name and the span")
    if len(clusters) > 1:
        raise ValueError(f"{node!r} is in {len(clusters)} clusters ({', '.join(clusters)}): name one of them")
    return clusters[0]


def refuse_twice(span: NodeSpan, credited: Sequence[NodeSpan]) -> None:
    """Raises CannotClose if part of the span was credited before."""
    before = next((other for other in credited if other.overlaps(span)), None)
    if before is not None:
        raise CannotClose(f"part of this span was credited before: {before.text}; leave that part out")
