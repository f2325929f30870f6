"""Sends the reports and notices that are due, and records the outcome of each delivery.

A refused message is tried again. A message that may have arrived is sent again only on request. A background task calls
`run` every minute, but `run` queries the ledger less often. It caches the list of teams with GPU time for ten minutes,
and for a day once nothing is due any more. It caches the budget states for ten minutes, and for a day once every budget
has passed its last threshold. Only one thread sends. If a process dies while sending, the next one turns the recorded
outcome `sending` into `unsure`. A message that is refused does not stop the others, nor does a channel that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Any, TypeVar, cast

import structlog
from cachetools import TLRUCache

from accountant.billing import budget_forecast
from accountant.billing.cost_allocation import bills
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.channels.protocol import Channel, DeliveryUncertain, Message, Refused
from accountant.core.errors import LedgerFailed
from accountant.core.periods import Month, local_date
from accountant.core.settings import Settings
from accountant.exports.protocol import exports
from accountant.ledger import journal
from accountant.ledger.protocols import Ledger, policy_at
from accountant.notifications import messages, subscriptions, triggers
from accountant.notifications.subscriptions import DeliveriesFile, Delivery, Destination, Outcome
from accountant.notifications.triggers import Anomaly, DueMessage, ReportDue, TeamDay
from accountant.reports import report_builder
from accountant.reports.report_builder import Report
from accountant.reports.statement_line_charges import ChargeListing
from accountant.wire.policy_models import IDLE, UNASSIGNED
from accountant.wire.usage_cost_and_job_models import BudgetState
from gputally.base.background_tasks import error_summary
from gputally.base.clock import Clock
from gputally.base.errors import AccountantError
from gputally.base.instants import midnight_ms
from gputally.base.plugins import TakesTooLong, within
from gputally.base.units import MS_PER_DAY, MS_PER_MINUTE

CACHE_MS = 10 * MS_PER_MINUTE
"""How long the dispatcher reuses an answer of the ledger."""
DELIVERY_S = 300.0
"""How long a channel may work on one message."""
_MOST_ANSWERS = 1_000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Answer:
    """A cached answer of the ledger. is_final: the answer is not expected to change, so it is cached for a day."""

    value: Any
    is_final: bool


class UnknownDelivery(AccountantError):
    """No delivery has the requested key."""


class Dispatcher:
    """Sends reports and notices.

    deliveries_file: returns the deliveries file in force.
    channels: returns the channel of a destination.
    most_s: how long a channel may work on one message.

    Thread-safe, but `run` must be called from one thread."""

    def __init__(
        self,
        ledger: Ledger,
        books: Bookkeeper,
        settings: Settings,
        clock: Clock,
        deliveries_file: Callable[[], DeliveriesFile],
        channels: Callable[[Destination], Channel] = Destination.open,
        most_s: float = DELIVERY_S,
    ) -> None:
        self._ledger = ledger
        self._books = books
        self._listing = ChargeListing(settings.issuer, settings.exported_labels)
        self._watched = settings.kubernetes.watched
        self._timezone = settings.timezone
        self._tz = settings.zone
        self._grace_ms = settings.grace_days * MS_PER_DAY
        self._link = settings.public_url
        self._clock = clock
        self._deliveries_file = deliveries_file
        self._channels = channels
        self._most_s = most_s
        self._hanging: dict[str, threading.Event] = {}
        """By destination: set when the channel has ended its work on a message that took too long."""
        self._log = structlog.get_logger("accountant.notifications")
        self._lock = threading.Lock()
        with ledger.moment() as moment:
            self._deliveries = subscriptions.deliveries_from_acts(moment.acts("delivery"))
        self._answers: TLRUCache[tuple[Hashable, ...], _Answer] = TLRUCache(
            _MOST_ANSWERS,
            lambda _, answer, now_ms: now_ms + (MS_PER_DAY if answer.is_final else CACHE_MS),
            timer=clock.monotonic_ms,
        )
        for delivery in list(self._deliveries.values()):
            if delivery.outcome == "sending":
                self._record(delivery, "unsure", "the accountant ended while it sent the message")

    def run(self) -> None:
        """Sends everything that is due now."""
        for due_message in self.due():
            self._send(due_message)

    def due(self) -> list[DueMessage]:
        """The messages to send now; several with the same key count as one."""
        now, deliveries_file = self._clock.wall_ms(), self._deliveries_file()
        by_key: dict[str, DueMessage] = {}
        for message in self._due_messages(deliveries_file, now):
            by_key.setdefault(message.key, message)
        with self._lock:
            unsent = [message for key, message in by_key.items() if self._is_unsent(key, now)]
        if not unsent:
            # All reports were sent: only late records can add a team, so the list of teams is reused for a day.
            for key, answer in list(self._answers.items()):
                if key[0] == "teams" and not answer.is_final:
                    self._answers[key] = replace(answer, is_final=True)
        return unsent

    def known(self) -> list[Delivery]:
        """All deliveries, newest first."""
        with self._lock:
            return sorted(self._deliveries.values(), key=lambda delivery: (-delivery.last_ms, delivery.key))

    def again(self, key: str, who: str, reason: str) -> Delivery:
        """Makes the next run send a message again, although it may have been delivered. Raises UnknownDelivery."""
        with self._lock:
            before = self._deliveries.get(key)
        if before is None:
            raise UnknownDelivery(f"no delivery has the key {key!r}: `gputally accountant deliveries` lists the keys")
        return self._record(before, "again", reason, who)

    def _is_unsent(self, key: str, now_ms: int) -> bool:
        """Whether the message was never sent, or its next attempt is due."""
        before = self._deliveries.get(key)
        return before is None or (before.due_ms is not None and before.due_ms <= now_ms)

    def _due_messages(self, deliveries_file: DeliveriesFile, now_ms: int) -> Iterable[DueMessage]:
        if deliveries_file.reports:
            closed = self._books.books().closed
            yield from triggers.reports(deliveries_file, closed, now_ms, self._tz, self._grace_ms, self._teams)
        subjects = {subject for order in deliveries_file.notices for subject in order.about}
        if "budgets" in subjects:
            yield from triggers.budgets(deliveries_file, self._budgets(now_ms))
        if "anomalies" in subjects:
            yield from triggers.anomalies(deliveries_file, self._anomalies(now_ms))

    def _teams(self, start_ms: int, end_ms: int) -> list[str]:
        return self._cached(("teams", start_ms, end_ms), lambda: self._teams_now(start_ms, end_ms))

    def _teams_now(self, start_ms: int, end_ms: int) -> list[str]:
        """The teams that held GPUs, that pay for time without a holder, or that have other booked items."""
        month = Month.spanning(start_ms, end_ms, self._tz)
        kept = self._books.kept(month) if month is not None else None
        book = self._books.priced_by(kept)
        with self._ledger.moment(start_ms, end_ms) as moment:
            charges = bills(moment, book, start_ms, end_ms, ("team",), self._timezone)
        teams = {charge.key[0] for charge in charges if charge.billed}
        if month is not None:
            beside = self._books.beside(month)
            teams |= {correction.line.team for correction in beside.corrections}
            teams |= {adjustment.team for adjustment in beside.adjustments}
        return sorted(teams - {IDLE, UNASSIGNED, ""})

    def _budgets(self, now_ms: int) -> list[BudgetState]:
        """The budgets of this month, and in its first `grace_days` also those of the previous month, so that thresholds
        reached in its last hours, or while nothing could be sent, are reported too."""
        this = Month.of(now_ms, self._tz)
        lately = Month.of(now_ms - self._grace_ms, self._tz)
        return [state for month in dict.fromkeys((lately, this)) for state in self._budgets_of(month, now_ms)]

    def _budgets_of(self, month: Month, now_ms: int) -> list[BudgetState]:
        at = min(now_ms, month.span(self._tz)[1] - 1)
        policy = policy_at(self._ledger.status(), at)
        if policy is None:
            return []
        book = self._books.prices.current

        def states() -> list[BudgetState]:
            with self._ledger.moment(month.span(self._tz)[0], now_ms) as moment:
                return budget_forecast.states(moment, book, policy.policy, month, now_ms, self._timezone)

        def are_exhausted(states: list[BudgetState]) -> bool:
            parts = [part for budget in policy.policy.budgets for _, part in budget.parts()]
            last = [max(part.thresholds, default=None) for part in parts]
            return [state.threshold for state in states] == last

        version = book.version if book is not None else ""
        return self._cached(("budgets", str(month), policy.version, version), states, are_exhausted)

    def _cached(
        self, key: tuple[Hashable, ...], compute: Callable[[], T], is_final: Callable[[T], bool] = lambda _: False
    ) -> T:
        """The answer to a query, from the cache if it is there; a final answer is cached for a day."""
        answer = self._answers.get(key)
        if answer is None:
            value = compute()
            answer = self._answers[key] = _Answer(value, is_final(value))
        return cast(T, answer.value)

    def _anomalies(self, now_ms: int) -> list[Anomaly]:
        """The anomalies of the last settled days, which are computed once a day."""
        day = local_date(now_ms - triggers.SETTLED_MS, self._tz) - timedelta(days=1)
        return self._cached(("anomalies", day), lambda: self._anomalies_until(day), lambda _: True)

    def _anomalies_until(self, last: date) -> list[Anomaly]:
        days = [last - timedelta(days=back) for back in reversed(range(triggers.LOOKED_AGAIN))]
        start = midnight_ms(days[0] - timedelta(days=triggers.DAYS), self._tz)
        end = midnight_ms(last + timedelta(days=1), self._tz)
        by_team: dict[str, dict[date, TeamDay]] = {}
        with self._ledger.moment(start, end) as moment:
            lines = moment.usage((start, end), ("team", "day"), None, self._timezone).lines()
        for line in lines:
            if line.key["team"] != IDLE:
                use = TeamDay(line.accounts_gpu_us.allocated, line.accounts_gpu_us.allocated_idle)
                by_team.setdefault(line.key["team"], {})[date.fromisoformat(line.key["day"])] = use
        return [anomaly for day in days for anomaly in triggers.of_day(by_team, day)]

    def _send(self, due_message: DueMessage) -> None:
        deliveries_file, now = self._deliveries_file(), self._clock.wall_ms()
        destination = deliveries_file.destinations.get(due_message.destination)
        if destination is None:
            return  # the file changed meanwhile
        attempt = self._record(self._deliveries.get(due_message.key), "sending", "", key=due_message.key)
        message = None
        try:
            link = deliveries_file.link or self._link
            message = messages.compose(
                due_message, attempt.first_ms, self._report, link, files=destination.channel.files
            )
            detail = self._deliver(due_message.destination, destination, message)
        except LedgerFailed:
            raise
        except DeliveryUncertain as error:
            self._record(attempt, "unsure", str(error))
            self._log.warning("delivery_unsure", key=due_message.key, reason=str(error))
        except AccountantError as error:  # nothing was sent: the message could not be made, or was refused
            self._refused(attempt, str(error), now)
        except Exception as error:  # noqa: BLE001 - a defect in one message must not stop the others
            self._log.error("delivery_failed", key=due_message.key, reason=error_summary(error), exc_info=error)
            detail = f"a defect ended the attempt ({error_summary(error)}); the accountant's log has it"
            if message is None:  # it could not be made, so nothing was sent
                self._refused(attempt, detail, now)
            else:
                self._record(attempt, "unsure", detail)
        else:
            self._record(attempt, "delivered", detail)
            self._log.info("delivered", key=due_message.key, detail=detail)

    def _deliver(self, name: str, destination: Destination, message: Message) -> str:
        """Delivers the message, and returns the channel's text. Raises Refused, DeliveryUncertain, and what a channel
        with a defect raises."""
        if name in self._hanging and not self._hanging[name].is_set():
            raise Refused(f"the channel {destination.channel.name} has not ended its work on an earlier message")
        try:
            return str(within(self._most_s, lambda: self._channels(destination).deliver(message)))
        except TakesTooLong as error:
            self._hanging[name] = error.done
            raise DeliveryUncertain(f"the channel {destination.channel.name} has not answered: {error}") from error

    def _refused(self, attempt: Delivery, reason: str, now_ms: int) -> None:
        outcome = subscriptions.outcome_of_refusal(attempt, now_ms)
        self._record(attempt, outcome, reason)
        self._log.warning("delivery_refused", key=attempt.key, reason=reason, given_up=outcome == "given-up")

    def _report(self, due: ReportDue) -> Report:
        charges = any(export.charges for form, export in exports().items() if form in due.forms)
        return report_builder.report(
            self._ledger, self._books, due.period.start_ms, due.period.end_ms, self._timezone, month=due.period.month,
            team=due.team, listing=self._listing if charges else None,
            invoiced_by=self._listing.issuer if due.period.month is not None else None, watched=self._watched,
        )  # fmt: skip

    def _record(
        self, before: Delivery | None, outcome: Outcome, detail: str, who: str = subscriptions.WHO, key: str = ""
    ) -> Delivery:
        after = subscriptions.next_attempt(
            before, key or (before.key if before else ""), outcome, self._clock.wall_ms(), detail
        )
        journal.record(self._ledger, [subscriptions.act(after, who)], None)
        with self._lock:
            self._deliveries[after.key] = after
        return after
