"""Reports a cycle as Events and conditions, as decisions to the accountant, and as log lines.

Each message is sent once, because a dry run plans the same writes again in every cycle, and a contested field stays
contested. Events and conditions that the API server refuses are lost: a cycle does not wait for them. Decisions are
kept, within bounds, while the accountant does not answer. Decisions that it refuses are dropped, and the condition
`Recorded` reports them. This module neither decides nor writes a target's objects."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import structlog

from accountant.wire.policy_models import Decision
from fairshare.controller.cycle_report import EVERYTHING, CycleReport, Outcome, Result, TargetReport, with_change
from fairshare.core.queue_annotations import say
from fairshare.core.queues_and_weights import Condition, Observation, Value
from fairshare.core.settings import Level
from fairshare.targets import status_config_map
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import FIELD_MANAGER
from fairshare.usage.accountant_client import AccountantPort
from gputally.base.errors import AccountantRefused, AccountantUnavailable, ClusterError, NotFound, Unavailable
from gputally.kubernetes.objects import CONFIG_MAP, Cluster, Event, Object

_WARNINGS: dict[Result, str] = {"contested": "FieldNotOurs", "refused": "WriteRefused"}
MOST_PENDING = 10_000
"""Number of decisions kept for an accountant that does not answer; the oldest are dropped first."""
MOST_CYCLES = 60
"""Number of cycles whose inputs are kept: in a large cluster each holds every queue or every pod."""


class CycleRecorder:
    """Sends the Events, conditions and decisions of each cycle, and remembers which were sent and which are pending."""

    def __init__(self, cluster: Cluster, accountant: AccountantPort, status_object: StatusObject | None) -> None:
        """status_object: the ConfigMap of the conditions; None: conditions are only in reports and events."""
        self._cluster = cluster
        self._accountant = accountant
        self._status_object = status_object
        self._said: dict[tuple[str, str], tuple[Value | None, Result]] = {}
        self._pending: list[Decision] = []
        self._undelivered: str | None = None
        self._refused: tuple[str, ...] = ()
        self._unsaid: str | None = None
        self._told: tuple[status_config_map.Scoped, ...] = ()

    def resume(self, standing: Object) -> None:
        """Continue from the conditions in the status object of another leader (or the last run)."""
        self._told = status_config_map.conditions(standing)

    def failures(
        self, target: str, observation: Observation, outcomes: Sequence[Outcome], now_ms: int
    ) -> Iterator[Event]:
        """Yield a warning on each object, once, if a write to it was contested or refused."""
        for outcome in outcomes:
            held = observation.held.get(outcome.apply.queue)
            reason = _WARNINGS.get(outcome.result)
            if held is None or reason is None:
                continue
            said = self._said.get((target, outcome.apply.queue))
            if said is None or said[1] != outcome.result:
                yield Event(held.kind, held.name, held.namespace, held.uid, "Warning", reason, outcome.detail, now_ms)

    def changes(self, target: TargetReport, observation: Observation, now_ms: int) -> Iterator[Event]:
        """Yield an event on each object whose weight changed, with the sentence of the decision."""
        weights = {weight.queue: weight for weight in target.weights}
        for outcome in target.outcomes:
            queue = outcome.apply.queue
            held, change = observation.held.get(queue), target.changes.get(queue)
            if outcome.result != "applied" or change is None or held is None:
                continue
            text = with_change(outcome.apply.why, change, weights.get(queue))
            yield Event(held.kind, held.name, held.namespace, held.uid, "Normal", "WeightChanged", text, now_ms)

    def news(self, target: TargetReport) -> tuple[Outcome, ...]:
        """Return the outcomes to record: every applied write, and the others only if they differ from the last recorded
        ones, because a dry run plans the same writes in every cycle."""
        news = []
        for outcome in target.outcomes:
            key, said = (target.target, outcome.apply.queue), (outcome.apply.value, outcome.result)
            if outcome.result == "applied" or self._said.get(key) != said:
                news.append(outcome)
            self._said[key] = said
        return tuple(news)

    def turned(self, last: CycleReport | None, report: CycleReport) -> tuple[Event, ...]:
        """Return an event for every condition that changed."""
        before = last.scoped_conditions() if last is not None and last.leading else self._told
        return status_config_map.changed_conditions(
            self._status_object or StatusObject(), before, report.scoped_conditions(), report.at_ms
        )

    def say(self, report: CycleReport, state: Mapping[str, str] | None) -> None:
        """Write the status object with the state to keep, then the events; a refused event does not stop the others.

        state None: the status object now has another owner."""
        self._unsaid = None
        if self._status_object is not None and state is not None:
            try:
                self._cluster.apply(self._status(self._status_object, report, state), field_manager=FIELD_MANAGER)
            except ClusterError as error:
                self._unsaid = str(error)
        for event in report.events:
            try:
                self._cluster.event(event)
            except Unavailable:
                return
            except ClusterError:
                continue

    def deliver(self, decisions: Sequence[Decision], *, away: bool) -> None:
        """Post pending decisions; after a failure they are kept for the next cycle. away: the report already says that
        the accountant is unreachable; a failed delivery then sets no further condition."""
        self._pending = _bounded([*self._pending, *decisions])
        self._undelivered, self._refused = None, ()
        if self._pending:
            try:
                self._refused = tuple(self._post(self._pending))
            except AccountantUnavailable as error:
                self._undelivered = str(error) if not away else None
                return
            self._pending = []

    def _post(self, decisions: Sequence[Decision]) -> list[str]:
        """Post decisions and return the reasons of those that the accountant refuses for good. A refused list is halved
        until each refused decision is alone, so that it does not block the others."""
        try:
            self._accountant.post_decisions(decisions)
        except AccountantRefused as error:
            if len(decisions) == 1:
                return [f"{decisions[0].id}: {error}"]
            half = len(decisions) // 2
            return [*self._post(decisions[:half]), *self._post(decisions[half:])]
        return []

    def conditions(self) -> tuple[Condition, ...]:
        """Return conditions about undelivered decisions and an unwritten status of the previous cycle; empty if there
        are none."""
        found = []
        if self._unsaid is not None:
            text = f"conditions, and what a restart has to remember, are not kept: {self._unsaid}"
            found.append(Condition("Remembered", "False", "StatusNotWritten", text))
        if self._undelivered is not None:
            text = f"{len(self._pending)} decisions wait to be recorded: {self._undelivered}"
            found.append(Condition("Recorded", "False", "DecisionsWait", text))
        elif self._refused:
            found.append(Condition("Recorded", "False", "DecisionsRefused", say(self._refused, most=3)))
        return tuple(found)

    def _status(self, where: StatusObject, report: CycleReport, state: Mapping[str, str]) -> Object:
        try:
            standing: Object | None = self._cluster.get(CONFIG_MAP, where.name, where.namespace)
        except NotFound:
            standing = None
        return status_config_map.render(where, report.scoped_conditions(), standing, report.at_ms, state)


def _bounded(decisions: Sequence[Decision]) -> list[Decision]:
    """Return the newest complete cycles. A cycle's inputs come before its decisions."""
    cycles = [at for at, decision in enumerate(decisions) if decision.subject == EVERYTHING and decision.inputs]
    first = cycles[-MOST_CYCLES] if len(cycles) > MOST_CYCLES else 0
    return list(decisions[max(first, len(decisions) - MOST_PENDING) :])


def configure(level: Level) -> None:
    """Configure logging; only for the process's entry point."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class CycleLog:
    """Logs each cycle: one line per write, one per changed condition, one per cycle. Unchanged content is not logged
    again, because a dry run plans the same writes every minute, and a contested field can stay contested for weeks."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._writes: dict[tuple[str, str], tuple[object, str]] = {}
        self._bad: dict[tuple[str, str], str] = {}

    def tell(self, report: CycleReport) -> None:
        writes = {
            (target.target, outcome.apply.queue): (outcome, (outcome.apply.value, outcome.result))
            for target in report.targets
            for outcome in target.outcomes
        }
        for (target, queue), (outcome, said) in writes.items():
            if outcome.result != "applied" and self._writes.get((target, queue)) == said:
                continue
            say = self._log.info if outcome.result in {"applied", "would-apply"} else self._log.warning
            say(
                "weight",
                target=target,
                queue=queue,
                object=outcome.apply.name,
                previous=outcome.apply.previous,
                weight=outcome.apply.value,
                result=outcome.result,
                why=outcome.apply.why,
                detail=outcome.detail or None,
            )
        self._writes = {key: said for key, (_, said) in writes.items()}
        bad = {}
        for scope, condition in report.scoped_conditions():
            key = scope, condition.type
            if condition.status == "False":
                bad[key] = condition.reason
                if self._bad.get(key) != condition.reason:
                    self._condition(self._log.warning, scope, condition)
            elif key in self._bad:
                self._condition(self._log.info, scope, condition)
        self._bad = bad
        self._log.info(
            "cycle",
            policy_version=report.policy_version,
            held=report.hold.reason if report.hold else None,
            writes=len(writes),
            decisions=len(report.decisions),
            duration_ms=report.duration_ms,
        )

    def _condition(self, say: Any, scope: str, condition: Condition) -> None:
        say(
            "condition",
            target=scope or None,
            type=condition.type,
            status=condition.status,
            reason=condition.reason,
            message=condition.message,
        )
