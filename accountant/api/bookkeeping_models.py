"""Defines the answers about months, credits, corrections, prices and deliveries, and the pod facts that other systems
report.

Frozen pydantic models; no HTTP, so that a command that asks loads nothing of what answers. Instants are UTC
milliseconds, money is a decimal in the book's currency.
"""

from __future__ import annotations

from decimal import Decimal

import msgspec

from accountant.bookkeeping.invoice_reconciliation import Reconciliation
from accountant.bookkeeping.month_closing import Objecting, Status
from accountant.bookkeeping.price_book_versions import Origin, PriceDiff
from accountant.notifications.subscriptions import Outcome
from agent.wire import PodFacts
from gputally.server.config_models import Model


class Balance(Model):
    """imbalance_gpu_us: 0 when every GPU-microsecond stands in exactly one account and every sum equals its rows.
    differences: in words, the first hundred. month_faults: closed months whose kept bytes are not their hash, or do not
    name the month before. capacity_gpu_us: of the span; where it is 0 there is no `coverage`. lake_days: published days
    that were compared with the ledger; null: not asked for. lake_differences: in words, the first hundred."""

    start_ms: int
    end_ms: int
    imbalance_gpu_us: int
    differences: tuple[str, ...]
    coverage: float | None
    quarantined_rows: int
    wal_bytes: int
    closed_months: int = 0
    month_faults: tuple[str, ...] = ()
    capacity_gpu_us: int = 0
    lake_days: int | None = None
    lake_differences: tuple[str, ...] = ()
    note: str = ""


class BookedAdjustment(Model):
    """A credit (negative) or charge, due in `booked_in` with the lines of that month."""

    id: str
    month: str
    booked_in: str
    team: str
    amount: Decimal
    currency: str
    reason: str
    who: str
    approved_by: str
    at_ms: int


class BookedCorrection(Model):
    """What a late fact changed about the closed `month`. gpu_us and cost are differences; cost None: unpriced."""

    month: str
    booked_in: str
    reason: str
    team: str
    account: str
    detail: str
    gpu_model: str
    capacity_type: str
    price_row: str | None
    gpu_us: int
    cost: Decimal | None
    amount: Decimal


class ProposalEffect(Model):
    """gpu_us: billed time, a difference. amount: payable, in the price book's currency."""

    team: str
    gpu_us: int
    amount: Decimal


class WaitingProposal(Model):
    """What arrived late for the closed `month`. Nothing is booked until it is taken up, in `booked_in`. id: of exactly
    these differences; another one when more arrives."""

    month: str
    booked_in: str
    id: str
    currency: str | None
    effects: tuple[ProposalEffect, ...]


class TeamCredit(Model):
    """billed: exact cost of what the team held there. amount: the credit, negative, in whole minor units."""

    team: str
    gpu_us: int
    billed: Decimal
    amount: Decimal


class Credit(Model):
    """What a credit would be. Nothing is booked."""

    cluster: str
    node: str
    start_ms: int
    end_ms: int
    currency: str | None
    lines: tuple[TeamCredit, ...]
    amount: Decimal


class ObjectionLine(Model):
    """kind: what to acknowledge."""

    kind: Objecting
    text: str


class Period(Model):
    """A month of the accountant's own time zone. hash, closed_ms, closed_by: once it is closed. objections: what a
    close would have to acknowledge, asked for one month only."""

    month: str
    start_ms: int
    end_ms: int
    status: Status
    hash: str | None = None
    closed_ms: int | None = None
    closed_by: str | None = None
    objections: tuple[ObjectionLine, ...] = ()


class PriceVersion(Model):
    """A price book that was in force from `at_ms` to the next one. who: the file, or who put it there."""

    version: str
    at_ms: int
    origin: Origin
    who: str
    reason: str
    currency: str
    rows: int


class RepricingResult(Model):
    """difference: as it was shown before. corrections: lines booked for a closed month."""

    difference: PriceDiff
    corrections: int


class DeliveryState(Model):
    """tries: since the first, or since it was asked for again. next_ms: when it is tried again; null: never by
    itself. detail: what the destination said."""

    key: str
    outcome: Outcome
    tries: int
    first_ms: int
    last_ms: int
    next_ms: int | None
    detail: str


class Reconciled(Model):
    """before: the books as they stood. after, version: with the invoice's rates, where they were applied."""

    before: Reconciliation
    after: Reconciliation | None = None
    version: str | None = None
    corrections: int = 0


class ObservedPods(Model):
    """How many were taken in."""

    pods: int


class PodReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts of one cluster's holders; the newest observation of each counts, and none from the future."""

    cluster: str
    source: str
    pods: tuple[PodFacts, ...]
