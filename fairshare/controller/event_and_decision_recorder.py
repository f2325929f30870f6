"""Reports a cycle as Events and conditions, as decisions to the accountant, and as log lines.

Each message is sent once, because a dry run plans the same writes again in every cycle, and a contested field stays
contested. Events that the API server refuses are lost: a cycle does not wait for them. Conditions are written again in
the next cycle. Decisions wait, up to a limit, while the accountant does not answer. Decisions that it refuses are
dropped, and the condition `Recorded` reports them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from typing import Any

import structlog

from accountant.wire.decision_text import is_record
from accountant.wire.policy_models import Decision
from fairshare.controller.cycle_report import CycleReport, Result, TargetReport, WriteOutcome
from fairshare.core.queues_and_weights import Condition, Observation, Value
from fairshare.core.scheduler_queue_objects import join_texts
from fairshare.core.settings import Level
from fairshare.targets import status_config_map
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import FIELD_MANAGER
from fairshare.usage.accountant_client import AccountantPort
from gputally.base.errors import AccountantRefused, AccountantUnavailable, ClusterError, ClusterUnavailable, NotFound
from gputally.kubernetes.objects import CONFIG_MAP, Cluster, Event, Object

_WARNINGS: dict[Result, str] = {"contested": "FieldNotOurs", "refused": "WriteRefused"}
MOST_CHANGES = 32
"""Largest number of events about changed weights of a target in one cycle, because each is a request."""
MOST_PENDING = 10_000
"""Largest number of decisions that wait for an accountant that does not take them. The oldest are dropped first."""
MOST_CYCLES = 60
"""Largest number of cycles whose inputs wait. In a large cluster each contains every queue or every pod. The decisions
of older cycles wait without them."""


class CycleRecorder:
    """Sends the Events, conditions and decisions of each cycle, and records which were sent and which are pending."""

    def __init__(self, cluster: Cluster, accountant: AccountantPort, status_object: StatusObject | None) -> None:
        """status_object: the ConfigMap of the conditions; None: conditions are only in reports and events."""
        self._cluster = cluster
        self._accountant = accountant
        self._status_object = status_object
        self._recorded: dict[tuple[str, str], tuple[Value | None, Result]] = {}
        self._pending: list[Decision] = []
        self._delivery_error: str | None = None
        self._refused: tuple[str, ...] = ()
        self._status_error: str | None = None
        self._previous_conditions: tuple[status_config_map.Scoped, ...] = ()
        self._log = structlog.get_logger("fairshare")

    def resume(self, status: Object) -> None:
        """Continue from the conditions in the status object of another leader (or the last run)."""
        self._previous_conditions = status_config_map.conditions(status)

    def failures(
        self, target: str, observation: Observation, outcomes: Sequence[WriteOutcome], now_ms: int
    ) -> Iterator[Event]:
        """Yield a warning for each object to which a write was contested or refused, unless the queue's last recorded
        outcome was the same."""
        for outcome in outcomes:
            obj = observation.queues.get(outcome.apply.queue)
            reason = _WARNINGS.get(outcome.result)
            if obj is None or reason is None:
                continue
            recorded = self._recorded.get((target, outcome.apply.queue))
            if recorded is None or recorded[1] != outcome.result:
                yield Event(obj.kind, obj.name, obj.namespace, obj.uid, "Warning", reason, outcome.detail, now_ms)

    def changes(self, target: TargetReport, observation: Observation, now_ms: int) -> Iterator[Event]:
        """Yield an event for each object whose recorded weight changed, with the reason of the decision; of many, for
        those with the largest changes."""
        changed = [
            outcome.apply
            for outcome in target.outcomes
            if outcome.result == "applied"
            and (recorded := self._recorded.get((target.target, outcome.apply.queue))) is not None
            and recorded[0] != outcome.apply.value
        ]
        for apply in nlargest(MOST_CHANGES, changed, key=lambda apply: apply.size):
            obj = observation.queues.get(apply.queue)
            if obj is not None:
                yield Event(obj.kind, obj.name, obj.namespace, obj.uid, "Normal", "WeightChanged", apply.why, now_ms)

    def news(self, target: TargetReport) -> tuple[WriteOutcome, ...]:
        """Return the outcomes to record: all applied writes, and others that differ from the queue's last outcome.

        The outcomes of this target count as recorded afterwards."""
        new = []
        for outcome in target.outcomes:
            key, state = (target.target, outcome.apply.queue), (outcome.apply.value, outcome.result)
            if outcome.result == "applied" or self._recorded.get(key) != state:
                new.append(outcome)
            self._recorded[key] = state
        return tuple(new)

    def condition_events(self, last: CycleReport | None, report: CycleReport) -> tuple[Event, ...]:
        """Return an event for every condition whose status or reason changed."""
        before = last.scoped_conditions() if last is not None and last.leading else self._previous_conditions
        return status_config_map.changed_conditions(
            self._status_object or StatusObject(), before, report.scoped_conditions(), report.at_ms
        )

    def publish(self, report: CycleReport, state: Mapping[str, str] | None) -> bool:
        """Write the status object, then the events. A refused event does not stop the others. Returns whether the
        status object was written.

        state: what a restart needs; None if another replica owns the status object now."""
        self._status_error, written = None, False
        if self._status_object is not None and state is not None:
            try:
                self._cluster.apply(self._status(self._status_object, report, state), field_manager=FIELD_MANAGER)
                written = True
            except ClusterError as error:
                self._status_error = str(error)
        for event in report.events:
            try:
                self._cluster.event(event)
            except ClusterUnavailable:
                break
            except ClusterError:
                continue
        return written

    def deliver(self, decisions: Sequence[Decision], *, accountant_away: bool) -> bool:
        """Post these decisions and the pending ones. After a failure they wait for the next cycle. Returns whether none
        waits.

        accountant_away: the report already says that the accountant is unreachable, so a failure sets no further
            condition."""
        waiting = [*self._pending, *decisions]
        self._pending = _newest(waiting)
        if len(self._pending) < len(waiting):
            self._log.warning("decisions_dropped", count=len(waiting) - len(self._pending), waiting=len(self._pending))
        self._delivery_error, self._refused = None, ()
        if self._pending:
            try:
                self._refused = tuple(self._post(self._pending))
            except AccountantUnavailable as error:
                self._delivery_error = None if accountant_away else str(error)
                return False
            self._pending = []
        return True

    def _post(self, decisions: Sequence[Decision]) -> list[str]:
        """Post decisions, and return why the accountant will never accept some of them.

        A refused batch is halved until the refused decision is alone, so that it does not block the others."""
        try:
            self._accountant.post_decisions(decisions)
        except AccountantRefused as error:
            if len(decisions) == 1:
                return [f"{decisions[0].id}: {error}"]
            half = len(decisions) // 2
            return [*self._post(decisions[:half]), *self._post(decisions[half:])]
        return []

    def conditions(self) -> tuple[Condition, ...]:
        """Return conditions about undelivered decisions and an unwritten status of the previous cycle; empty if
        everything was delivered."""
        conditions = []
        if self._status_error is not None:
            text = f"conditions and the state for a restart are not stored: {self._status_error}"
            conditions.append(Condition("Remembered", "False", "StatusNotWritten", text))
        if self._delivery_error is not None:
            text = f"{len(self._pending)} decisions wait to be recorded: {self._delivery_error}"
            conditions.append(Condition("Recorded", "False", "DecisionsWait", text))
        elif self._refused:
            conditions.append(Condition("Recorded", "False", "DecisionsRefused", join_texts(self._refused, most=3)))
        return tuple(conditions)

    def _status(self, where: StatusObject, report: CycleReport, state: Mapping[str, str]) -> Object:
        try:
            previous: Object | None = self._cluster.get(CONFIG_MAP, where.name, where.namespace)
        except NotFound:
            previous = None
        return status_config_map.render(where, report.scoped_conditions(), previous, report.at_ms, state)


def _newest(decisions: Sequence[Decision]) -> list[Decision]:
    """Return what waits within the limits: every decision, and the inputs of the newest cycles, which are large. Beyond
    `MOST_PENDING` the newest decisions stay, and the newest `MOST_CYCLES` changes of the policy, which are few."""
    inputs = [at for at, decision in enumerate(decisions) if is_record(decision) and decision.inputs]
    old = set(inputs[:-MOST_CYCLES])
    kept = [decision for at, decision in enumerate(decisions) if at not in old]
    first = max(0, len(kept) - MOST_PENDING)
    policies = [decision for decision in kept[:first] if decision.kind == "policy"][-MOST_CYCLES:]
    return [*policies, *kept[first:]]


def configure(level: Level) -> None:
    """Set up structlog to write JSON lines to standard error, for the whole process."""
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
    """Logs one line for each cycle, each new outcome of a write, and each condition that became False, has another
    reason, or recovered.

    A repeated outcome is not logged, because a dry run plans the same writes every minute, and a contested field can
    stay contested for weeks."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._writes: dict[tuple[str, str], tuple[object, str]] = {}
        self._failed: dict[tuple[str, str], str] = {}

    def log(self, report: CycleReport) -> None:
        """Log what is new in the report."""
        writes = {
            (target.target, outcome.apply.queue): (outcome, (outcome.apply.value, outcome.result))
            for target in report.targets
            for outcome in target.outcomes
        }
        for (target, queue), (outcome, state) in writes.items():
            if outcome.result != "applied" and self._writes.get((target, queue)) == state:
                continue
            log = self._log.info if outcome.result in {"applied", "would-apply"} else self._log.warning
            log(
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
        self._writes = {key: state for key, (_, state) in writes.items()}
        failed = {}
        for scope, condition in report.scoped_conditions():
            key = scope, condition.type
            if condition.status == "False":
                failed[key] = condition.reason
                if self._failed.get(key) != condition.reason:
                    self._condition(self._log.warning, scope, condition)
            elif key in self._failed:
                self._condition(self._log.info, scope, condition)
        self._failed = failed
        self._log.info(
            "cycle",
            policy_version=report.policy_version,
            held=report.hold.reason if report.hold else None,
            writes=len(writes),
            decisions=len(report.decisions),
            duration_ms=report.duration_ms,
        )

    def _condition(self, log: Any, scope: str, condition: Condition) -> None:
        log(
            "condition",
            target=scope or None,
            type=condition.type,
            status=condition.status,
            reason=condition.reason,
            message=condition.message,
        )
