"""Logs: one JSON object per event on stderr, snake_case names, no tokens."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog

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


def tell(log: Any, report: CycleReport) -> None:
    """A report as events: one per write, one per condition that is not as it should be, one for the cycle."""
    for target in report.targets:
        for outcome in target.outcomes:
            say = log.info if outcome.result in {"applied", "would-apply"} else log.warning
            say(
                "weight",
                target=target.target,
                queue=outcome.apply.queue,
                object=outcome.apply.name,
                previous=outcome.apply.previous,
                weight=outcome.apply.value,
                result=outcome.result,
                why=outcome.apply.why,
                detail=outcome.detail or None,
            )
    for scope, condition in report.scoped_conditions():
        if condition.status == "False":
            log.warning(
                "condition",
                target=scope or None,
                type=condition.type,
                reason=condition.reason,
                message=condition.message,
            )
    log.info(
        "cycle",
        policy_version=report.policy_version,
        held=report.hold.reason if report.hold else None,
        writes=sum(len(target.outcomes) for target in report.targets),
        decisions=len(report.decisions),
        duration_ms=report.duration_ms,
    )
