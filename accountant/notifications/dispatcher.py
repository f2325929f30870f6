"""Sends each due message at most once automatically, and records the outcome of each delivery.

`run` is called every minute, but it queries the ledger less often. The list of teams with GPU time is cached for ten
minutes, and for a day once nothing is due any more. The budget states are cached for ten minutes, and for a day once
every budget has passed its last threshold. Only one thread sends. If a process dies while sending, the recorded outcome
`sending` becomes `unsure`. A message that cannot be rendered or delivered does not stop the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Protocol, TypeVar, cast

import structlog

from accountant.billing import budget_forecast
from accountant.billing.cost_allocation import bills
from accountant.bookkeeping.bookkeeper import Bookkeeper, BookkeepingLedger
from accountant.core.errors import CannotRender, LedgerFailed
from accountant.core.periods import Month, local_date, midnight_ms
from accountant.core.settings import Settings
from accountant.ledger import journal
from accountant.notifications import messages, subscriptions, triggers
from accountant.notifications.channels import Channel, DeliveryUncertain, Refused
from accountant.notifications.subscriptions import DeliveriesFile, Delivery, Destination, Outcome
from accountant.notifications.triggers import DueMessage, ReportDue, TeamDay
from accountant.reports import report_builder
from accountant.reports.output_formats import RENDERINGS
from accountant.reports.report_builder import Report, ReportQuestions
from accountant.wire.policy_models import IDLE, UNASSIGNED
from accountant.wire.usage_models import BudgetState
from gputally.base.clock import Clock
from gputally.base.errors import AccountantError
from gputally.base.units import MS_PER_DAY, MS_PER_SECOND

_TEAMS = "teams"
ANEW_MS = 10 * 60 * MS_PER_SECOND
"""How long a cached answer of the ledger may be used to decide that nothing is due."""
T = TypeVar("T")


class ReportLedger(BookkeepingLedger, Protocol):
    """A ledger with the snapshots that reports need."""

    def moment(self, start_ms: int = 0, end_ms: int = 0) -> AbstractContextManager[ReportQuestions]: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    """A cached answer of the ledger. until_ms: how long it may be used."""

    asked_ms: int
    until_ms: int
    found: object


class UnknownDelivery(AccountantError):
    """There never was a delivery with that key."""


class Dispatcher:
    """Sends messages.

    deliveries_file: returns the file in force.
    channels: returns the channel of a destination.

    Thread-safe, but `run` must be called from one thread."""

    def __init__(
        self,
        ledger: ReportLedger,
        books: Bookkeeper,
        settings: Settings,
        clock: Clock,
        deliveries_file: Callable[[], DeliveriesFile],
        channels: Callable[[Destination], Channel],
    ) -> None:
        self._ledger = ledger
        self._books = books
        self._issuer = settings.issuer
        self._timezone = settings.timezone
        self._tz = settings.zone
        self._grace_ms = settings.grace_days * MS_PER_DAY
        self._link = settings.public_url
        self._clock = clock
        self._deliveries_file = deliveries_file
        self._channels = channels
        self._log = structlog.get_logger("accountant.notifications")
        self._lock = threading.Lock()
        self._known = subscriptions.deliveries_from_acts(ledger.acts("delivery"))
        self._looked: date | None = None
        self._odd: Sequence[triggers.Anomaly] = ()
        self._answers: dict[tuple[Hashable, ...], _Answer] = {}
        for delivery in list(self._known.values()):
            if delivery.outcome == "sending":
                self._record(delivery, "unsure", "the accountant ended meanwhile")

    def run(self) -> None:
        """Sends everything that is due now."""
        for due_message in self.due():
            self._send(due_message)

    def due(self) -> list[DueMessage]:
        """The messages to send now, each key once."""
        now, deliveries_file = self._clock.wall_ms(), self._deliveries_file()
        found: dict[str, DueMessage] = {}
        for due_message in self._due_messages(deliveries_file, now):
            found.setdefault(due_message.key, due_message)
        with self._lock:
            wanted = [due_message for key, due_message in found.items() if self._wanted(key, now)]
        if not wanted:
            self._rest()
        return wanted

    def _rest(self) -> None:
        """After all reports were sent, only late records can add a team, so the list of teams is reused for a day."""
        for question, answer in self._answers.items():
            if question[0] == _TEAMS:
                self._answers[question] = replace(answer, until_ms=answer.asked_ms + MS_PER_DAY)

    def known(self) -> list[Delivery]:
        """All deliveries, newest first."""
        with self._lock:
            return sorted(self._known.values(), key=lambda one: (-one.last_ms, one.key))

    def again(self, key: str, who: str, reason: str) -> Delivery:
        """Requests that a message is sent again, though it may have been delivered. Raises UnknownDelivery."""
        with self._lock:
            before = self._known.get(key)
        if before is None:
            raise UnknownDelivery(f"nothing was ever delivered as {key!r}")
        return self._record(before, "again", reason, who)

    def _wanted(self, key: str, now_ms: int) -> bool:
        before = self._known.get(key)
        return before is None or (before.due_ms is not None and before.due_ms <= now_ms)

    def _due_messages(self, deliveries_file: DeliveriesFile, now_ms: int) -> Iterable[DueMessage]:
        if deliveries_file.reports:
            closed = self._books.books().closed
            yield from triggers.reports(deliveries_file, closed, now_ms, self._tz, self._grace_ms, self._teams)
        about = {what for order in deliveries_file.notices for what in order.about}
        if "budgets" in about:
            yield from triggers.budgets(deliveries_file, self._budgets(now_ms))
        if "anomalies" in about:
            yield from triggers.anomalies(deliveries_file, self._anomalies(now_ms))

    def _teams(self, start_ms: int, end_ms: int) -> list[str]:
        return self._lately((_TEAMS, start_ms, end_ms), lambda: self._teams_now(start_ms, end_ms))

    def _teams_now(self, start_ms: int, end_ms: int) -> list[str]:
        """The teams that held GPUs, that pay for time without a holder, or that have other booked items."""
        month = Month.spanning(start_ms, end_ms, self._tz)
        kept = self._books.kept(month) if month is not None else None
        book = self._books.priced_by(kept)
        found = bills(self._ledger, book, start_ms, end_ms, ("team",), self._timezone)
        teams = {charge.key[0] for charge in found if charge.billed}
        if month is not None:
            beside = self._books.beside(month)
            teams |= {one.line.team for one in beside.corrections} | {one.team for one in beside.adjustments}
        return sorted(teams - {IDLE, UNASSIGNED, ""})

    def _budgets(self, now_ms: int) -> list[BudgetState]:
        """The budgets of this month, and of the previous one while its late records are expected, so that thresholds
        reached in its last hours, or while nothing could be sent, are reported too."""
        this = Month.of(now_ms, self._tz)
        lately = Month.of(now_ms - self._grace_ms, self._tz)
        return [state for month in dict.fromkeys((lately, this)) for state in self._budgets_of(month, now_ms)]

    def _budgets_of(self, month: Month, now_ms: int) -> list[BudgetState]:
        at = min(now_ms, month.span(self._tz)[1] - 1)
        policies = self._ledger.policies(at, at + 1)
        if not policies:
            return []
        policy, book = policies[-1], self._books.prices.current

        def states() -> list[BudgetState]:
            return budget_forecast.states(self._ledger, book, policy.policy, month, now_ms, self._timezone)

        def told(found: list[BudgetState]) -> bool:
            last = [max(budget.thresholds, default=None) for budget in policy.policy.budgets]
            return [state.threshold for state in found] == last

        version = book.version if book is not None else ""
        return self._lately(("budgets", str(month), policy.version, version), states, told)

    def _lately(
        self, question: tuple[Hashable, ...], ask: Callable[[], T], final: Callable[[T], bool] = lambda _: False
    ) -> T:
        """The answer to a query, from the cache if it is recent enough; a final answer is cached for a day."""
        now = self._clock.wall_ms()
        answer = self._answers.get(question)
        if answer is not None and answer.until_ms > now:
            return cast(T, answer.found)
        found = ask()
        self._answers = {q: kept for q, kept in self._answers.items() if kept.until_ms > now}
        self._answers[question] = _Answer(now, now + (MS_PER_DAY if final(found) else ANEW_MS), found)
        return found

    def _anomalies(self, now_ms: int) -> Sequence[triggers.Anomaly]:
        """Anomalies of the last settled days; computed once a day."""
        day = local_date(now_ms - triggers.SETTLED_MS, self._tz) - timedelta(days=1)
        if day != self._looked:
            looked_at = [day - timedelta(days=back) for back in reversed(range(triggers.LOOKED_AGAIN))]
            start = midnight_ms(looked_at[0] - timedelta(days=triggers.DAYS), self._tz)
            end = midnight_ms(day + timedelta(days=1), self._tz)
            found: dict[str, dict[date, TeamDay]] = {}
            for line in self._ledger.usage(start, end, ("team", "day"), None, self._timezone):
                if line.key["team"] != IDLE:
                    spent = line.accounts_gpu_us
                    found.setdefault(line.key["team"], {})[date.fromisoformat(line.key["day"])] = TeamDay(
                        spent.allocated, spent.allocated_idle
                    )
            self._odd, self._looked = [odd for one in looked_at for odd in triggers.of_day(found, one)], day
        return self._odd

    def _send(self, due_message: DueMessage) -> None:
        deliveries_file, now = self._deliveries_file(), self._clock.wall_ms()
        destination = deliveries_file.destinations.get(due_message.destination)
        if destination is None:
            return  # the file changed meanwhile
        begun = self._record(self._known.get(due_message.key), "sending", "", key=due_message.key)
        try:
            letter = messages.compose(
                due_message,
                begun.first_ms,
                self._report,
                deliveries_file.link or self._link,
                files=destination.takes_files,
            )
            told = self._channels(destination).carry(letter)
        except LedgerFailed:
            raise
        except (Refused, CannotRender) as error:
            ended = subscriptions.ended_how(begun, now)
            self._record(begun, ended, str(error))
            self._log.warning("delivery_refused", key=due_message.key, reason=str(error), given_up=ended == "given-up")
        except DeliveryUncertain as error:
            self._record(begun, "unsure", str(error))
            self._log.warning("delivery_unsure", key=due_message.key, reason=str(error))
        except AccountantError as error:  # nothing was sent: the ledger could not be queried
            self._record(begun, "refused", str(error))
            self._log.warning("delivery_refused", key=due_message.key, reason=str(error), given_up=False)
        else:
            self._record(begun, "delivered", told)
            self._log.info("delivered", key=due_message.key, detail=told)

    def _report(self, due: ReportDue) -> Report:
        charges = any(RENDERINGS[form].charges for form in due.forms)
        return report_builder.report(
            self._ledger, self._books, due.start_ms, due.end_ms, self._timezone, month=due.month, team=due.team,
            issuer=self._issuer if charges else None,
        )  # fmt: skip

    def _record(
        self, before: Delivery | None, outcome: Outcome, detail: str, who: str = subscriptions.WHO, key: str = ""
    ) -> Delivery:
        after = subscriptions.next_attempt(
            before, key or (before.key if before else ""), outcome, self._clock.wall_ms(), detail
        )
        journal.record(self._ledger, [subscriptions.act(after, who)], None)
        with self._lock:
            self._known[after.key] = after
        return after
