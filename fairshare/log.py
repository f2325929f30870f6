"""Logs: one JSON object per event on stderr, snake_case names, no tokens."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog

from fairshare.model import Condition
from fairshare.report import CycleReport

Level = Literal["debug", "info", "warning", "error"]


def configure(level: Level) -> None:
    """For the process's entry point only."""
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


class Reports:
    """Reports as events: one per write, one per condition that turned, one for each cycle. What stays as it was said is
    not said again: a dry run plans the same every minute, and a field of somebody else's stays so for weeks."""

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
