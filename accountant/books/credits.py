"""What a team was billed for GPUs that were of no use to it: a node, a span, and the credit that follows.

Time that the books have as `down` is billed to nobody and needs no credit. This is for what was billed all the same:
a node that hung while its pods held it, a fabric that failed. The credit is the billed time of the node's holders
at its price, times a share, in whole minor units that add up. A span of a node is credited once. Asks the ledger;
what it decides is pure. Who books it is accountant.crediting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from pydantic import Field, model_validator

from accountant.books.bills import start_up, told_apart
from accountant.books.costs import ALLOCATED, PRICED_BY, quantify, total_cost
from accountant.ledger import Ledger
from accountant.money import Money, exact_product, payable
from accountant.periods import utc
from accountant.prices.amounts import Share
from accountant.prices.book import PriceBook
from accountant.wire import IDLE, Dimension, Model

_BY: tuple[Dimension, ...] = ("team", "cluster", "node", *PRICED_BY)


class NodeSpan(Model):
    """A node over [start_ms, end_ms). share: of what was billed, 1 for all of it."""

    cluster: str = Field(max_length=253)
    node: str = Field(min_length=1, max_length=253)
    start_ms: int = Field(ge=0)
    end_ms: int
    share: Share = Decimal(1)

    @model_validator(mode="after")
    def _some(self) -> NodeSpan:
        if self.start_ms >= self.end_ms:
            raise ValueError("the span ends at or before it begins")
        if not self.share:
            raise ValueError("a share of 0 is no credit")
        return self

    def overlaps(self, other: NodeSpan) -> bool:
        return (
            (self.cluster, self.node) == (other.cluster, other.node)
            and self.start_ms < other.end_ms
            and other.start_ms < self.end_ms
        )

    @property
    def text(self) -> str:
        """For whoever reads the books."""
        return f"node {self.node}, {utc(self.start_ms)} to {utc(self.end_ms)}"


@dataclass(frozen=True, slots=True)
class CreditLine:
    """What one team was billed for the node, and its credit (negative, whole minor units)."""

    team: str
    gpu_us: int
    billed: Decimal
    amount: Decimal


def credit_lines(ledger: Ledger, book: PriceBook, span: NodeSpan, timezone: str) -> list[CreditLine]:
    """By team; of nobody where nobody held anything. Raises ValueError where held time has no price."""
    where: Mapping[Dimension, Collection[str]] = {"cluster": (span.cluster,), "node": (span.node,)}
    found = told_apart(ledger, book, span.start_ms, span.end_ms, _BY, where, timezone)
    held = [
        charge for charge in start_up(found, book.billing, _BY) if charge.account in ALLOCATED and charge.key[0] != IDLE
    ]
    billed: dict[str, tuple[int, Decimal]] = {}
    for (team,), parts in quantify(((charge.key[0],), charge) for charge in held).items():
        cost = total_cost(parts)
        if cost is None:
            raise ValueError(f"time of {team!r} on {span.node} has no price: nothing was billed for it")
        billed[team] = sum(part.gpu_us for part in parts), cost
    exact = {team: Money(exact_product(cost, -span.share), book.currency) for team, (_, cost) in billed.items()}
    amounts = payable(exact, book.currency) if exact else {}
    return [CreditLine(team, gpu_us, cost, amounts[team].amount) for team, (gpu_us, cost) in sorted(billed.items())]


def cluster_of(ledger: Ledger, node: str, start_ms: int, end_ms: int) -> str:
    """The cluster that has a node of that name in the span. Raises ValueError for none, or several."""
    found = [line.key["cluster"] for line in ledger.usage(start_ms, end_ms, ("cluster",), {"node": (node,)})]
    if len(found) != 1:
        raise ValueError(
            f"{node!r} is in {len(found)} clusters ({', '.join(found)}): say which"
            if found
            else f"no GPU of a node {node!r} was there in that span"
        )
    return found[0]


def refuse_twice(span: NodeSpan, credited: Sequence[NodeSpan]) -> None:
    """Raises ValueError where some of the span was credited already."""
    before = next((other for other in credited if other.overlaps(span)), None)
    if before is not None:
        raise ValueError(f"credited already: {before.text}")
