"""Defines the answers about months, credits, corrections, prices and deliveries, and the pod facts that other systems
report.

A command-line client can import these frozen models without importing the HTTP server. `PodReport` is a msgspec struct,
the others are pydantic models. Instants are UTC milliseconds, and money is a decimal in the price book's currency."""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from decimal import Decimal
from typing import Literal

import msgspec

from accountant.bookkeeping.invoice_reconciliation import Reconciliation
from accountant.bookkeeping.month_changes import ChangeCause, MonthDraft
from accountant.bookkeeping.month_closing import Objecting, Status
from accountant.bookkeeping.price_book_versions import Origin, PriceDiff
from accountant.ledger.protocols import GpuOwnership
from accountant.notifications.subscriptions import Outcome
from agent.wire import PodFacts
from gputally.server.config_loading import Model


class Balance(Model):
    """The result of checking the ledger's books over a span.

    imbalance_gpu_us: 0 if every GPU-microsecond is in exactly one account and every sum equals its rows.
    differences: descriptions, the first hundred.
    month_faults: closed months whose stored statement does not match its hash, or does not name the hash of the month
        before.
    capacity_gpu_us: the capacity of the span; if it is 0, `coverage` is null.
    lake_days: published days that were compared with the ledger; null: not requested.
    lake_differences: descriptions, the first hundred."""

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


class LakeRepaired(Model):
    """What was written to the lake: days of usage, months of statements, and the names of other tables."""

    days: tuple[date, ...]
    months: tuple[str, ...]
    tables: tuple[str, ...]


class BookedAdjustment(Model):
    """A credit (negative amount) or a charge for `month`. It is payable with the month `booked_in`."""

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


class AdjustmentPreview(BookedAdjustment):
    """A credit or charge that is not booked; its id is the one that it would get.

    before, after: what the month `booked_in` charges the team without it and with it; null if that is not known."""

    before: Decimal | None
    after: Decimal | None


class BookedCorrection(Model):
    """A correction of the closed `month` after late records. gpu_us and cost are differences; cost is null if
    unpriced."""

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
    """What proposed corrections change for one team.

    gpu_us: billed time, a difference.
    amount: payable, in the price book's currency."""

    team: str
    gpu_us: int
    amount: Decimal


class WaitingProposal(Model):
    """Late changes of the closed `month`. They are booked, in `booked_in`, only when the proposal is accepted. id:
    identifies exactly these differences; it changes when more records arrive."""

    month: str
    booked_in: str
    id: str
    currency: str | None
    effects: tuple[ProposalEffect, ...]


class TeamCredit(Model):
    """One team's part of a credit for a node.

    billed: exact cost of what the team held on the node in the span.
    amount: the credit, negative, rounded to the currency's minor unit (-12.34, not -1234)."""

    team: str
    gpu_us: int
    billed: Decimal
    amount: Decimal


class Credit(Model):
    """The preview of a credit. Nothing is booked."""

    cluster: str
    node: str
    start_ms: int
    end_ms: int
    currency: str | None
    lines: tuple[TeamCredit, ...]
    amount: Decimal


class ObjectionLine(Model):
    """One objection to closing a month. kind: the value for `acknowledge`."""

    kind: Objecting
    text: str


class ChecklistLine(Model):
    """One thing that is looked at before a month is closed.

    state: `clear`; `open`, which does not keep the month from being closed; `objects`: it is among the objections.
    link: the page that shows it."""

    item: str
    state: Literal["clear", "open", "objects"]
    text: str
    link: str


class Period(Model):
    """A month of the accountant's time zone.

    hash, closed_ms, closed_by: null until it is closed.
    state: what the status means, and of which part of the month nothing is known.
    objections: what a close would have to acknowledge; empty in lists of months.
    checklist: what is still open or unknown; empty in lists of months, of a closed month, and for a caller that may
        see only some teams."""

    month: str
    start_ms: int
    end_ms: int
    status: Status
    state: str = ""
    hash: str | None = None
    closed_ms: int | None = None
    closed_by: str | None = None
    objections: tuple[ObjectionLine, ...] = ()
    checklist: tuple[ChecklistLine, ...] = ()


class DraftLine(Model):
    """A draft of a month: what it charged each team for its time up to `until_ms`, without corrections, credits and
    charges. act: the number of the act that keeps it."""

    month: str
    act: int
    at_ms: int
    until_ms: int
    who: str
    reason: str
    currency: str
    price_book_version: str
    charged: dict[str, Decimal]

    @classmethod
    def of(cls, draft: MonthDraft, teams: Collection[str] | None = None) -> DraftLine:
        """teams: the teams whose amounts are told; None: all."""
        amounts = draft.amounts
        return cls(
            month=draft.month, act=draft.act, at_ms=draft.at_ms, until_ms=amounts.until_ms, who=draft.who,
            reason=draft.reason, currency=amounts.currency, price_book_version=amounts.price_book_version,
            charged={name: due for name, due in amounts.charged.items() if teams is None or name in teams},
        )  # fmt: skip


class ChangeLine(Model):
    """What changed a month's amount of a team. amount: null if it is not known, or in two currencies. at_ms, act, who:
    of the act that did it; null and "" for records."""

    team: str
    cause: ChangeCause
    amount: Decimal | None
    at_ms: int | None
    act: int | None
    reason: str
    who: str = ""


class SinceDraftLine(Model):
    """A team's amount of the month when the draft was kept, and now, both with the corrections, credits and charges
    that were booked by then."""

    team: str
    draft: Decimal
    now: Decimal


class ChangesAnswer(Model):
    """What changed the amounts of a month since its newest draft, newest first. The amounts of a team add up to the
    difference between `draft` and `now` of its line in `teams`.

    since_ms: the instant of the draft, or from which on acts and prices count.
    draft: null if none was kept by then: changes by late records and use are not known, and not listed.
    teams: empty without a draft, or if its currency is another one."""

    month: str
    since_ms: int
    currency: str | None
    draft: DraftLine | None
    changes: tuple[ChangeLine, ...]
    teams: tuple[SinceDraftLine, ...] = ()


class PriceVersion(Model):
    """A price book that was in force from `at_ms` until the next one. who: the file, or the caller that put it in
    force."""

    version: str
    at_ms: int
    origin: Origin
    who: str
    reason: str
    currency: str
    rows: int


class RepricingResult(Model):
    """What a new price book changed for one month.

    difference: as in the preview.
    corrections: number of correction lines booked; 0 for an open month."""

    difference: PriceDiff
    corrections: int


class DeliveryState(Model):
    """The state of one notification's delivery.

    tries: number of attempts, since the last manual retry if there was one.
    next_ms: time of the next attempt; null: no further automatic attempt.
    detail: what the destination accepted, why the attempt failed, or the reason for the manual retry; empty during an
        attempt."""

    key: str
    outcome: Outcome
    tries: int
    first_ms: int
    last_ms: int
    next_ms: int | None
    detail: str


class Reconciled(Model):
    """An invoice compared with the bills, before and after its rates are applied.

    before: the comparison with the present bills.
    after, version: the comparison with the invoice's rates, and the price book version that contains them; null if they
        were not applied.
    corrections: number of correction lines booked."""

    before: Reconciliation
    after: Reconciliation | None = None
    version: str | None = None
    corrections: int = 0


class GpuOwners(Model):
    """One page of GPUs with their owners, sorted by cluster and UUID.

    next_after: pass it as `after` for the next page; null at the end."""

    gpus: tuple[GpuOwnership, ...]
    next_after: str | None


class ObservedPods(Model):
    """The answer to a report of pod facts. pods: number of pods in the report, which is stored."""

    pods: int


class PodReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts about pods and other holders of GPUs in one cluster. The newest observation of each holder counts.
    Observations in the future are refused.

    source: the system that reports; it is named in the audit trail."""

    cluster: str
    source: str
    pods: tuple[PodFacts, ...]
